// One step of the selective scan. A channel (b, h, p) is owned by `lanes` neighbouring threads, a power of two; a thread owns 4
// neighbouring states, or 4 of every 4 * 32 when dstate exceeds 128. States and A are read 16 bytes at a time, y is a sum over the lanes.
//
// Bytes per channel and row, dstate 16, f32 states, bf16 inputs: states 64 read + 64 written, x, dt, z, out 8; A (64 bytes a channel) comes
// from L2 for all rows but the first. The states alone decide: 85 % of the copy bandwidth expected from 16 MB of states on, launch time
// below.
//
// The backward takes a strip of the batch at a time, whose boundaries depend on its size only: sums over the batch (dA, dD, ddt_bias) are
// partial sums of a strip, sums over channels (dB, dC) those of a block; a second launch adds them in order.
#include "params/selective_state_update.h"

#include "cuda/math.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vector_io.cuh"

namespace mamba::cuda {
namespace {

constexpr int threads = 128, held = 4;

// How the threads of a block share channels and states.
struct Plan {
  int lanes;       // of a channel
  int channels;    // of a block, all of one head
  int64_t blocks;  // of a head
  int64_t strips;  // of the batch (backward)
  int64_t per_strip;

  explicit Plan(const SelectiveStateUpdateInputs& p) : lanes(1) {
    while (lanes < 32 && lanes * held < p.dstate) lanes *= 2;
    channels = threads / lanes;
    blocks = (p.headdim + channels - 1) / channels;
    per_strip = (p.batch + 31) / 32 > 8 ? (p.batch + 31) / 32 : 8;
    strips = (p.batch + per_strip - 1) / per_strip;
  }
};

// The place of a thread: its channel and its first state.
struct Place {
  int lane;
  int64_t outer, h, block, channel, group;
  bool inside;

  __device__ __forceinline__ Place(const SelectiveStateUpdateInputs& p, const Plan& plan) {
    lane = threadIdx.x % plan.lanes;
    const int64_t index = blockIdx.x;
    block = index % plan.blocks;
    h = index / plan.blocks % p.nheads;
    outer = index / plan.blocks / p.nheads;  // row of the batch, or strip
    channel = block * plan.channels + threadIdx.x / plan.lanes;
    group = h / (p.nheads / p.ngroups);
    inside = channel < p.headdim;
  }
};

template <class T, int N, class... I>
__device__ __forceinline__ void load_states(T (&out)[held], const View<N>& view, int64_t n, int64_t high, I... index) {
  const int64_t stride = view.stride[N - 1];
  load_items(out, view.data, view.dtype, view.offset(index..., n), stride, high - n);
}
template <class T, int N, class... I>
__device__ __forceinline__ void store_states(const T (&in)[held], const View<N>& view, int64_t n, int64_t high, I... index) {
  const int64_t stride = view.stride[N - 1];
  store_items(view.data, view.dtype, view.offset(index..., n), in, stride, high - n);
}

template <class T>
__device__ __forceinline__ T optional_at(const View<2>& view, int64_t h, int64_t channel) {
  return view ? load_at<T>(view, h, channel) : T(0);
}

// a = exp(dt A); s = a state + dt x B; y = sum_n C s + D x; out = y silu(z)
template <class S>
__global__ void __launch_bounds__(threads, 4) forward_kernel(const SelectiveStateUpdateFwd p, const Plan plan) {
  using T = Accumulate<S>;
  const Place at(p, plan);
  const int64_t b = at.outer, entry = p.indices ? load_index(p.indices, b) : b;
  const bool live = at.inside && entry >= 0 && entry < p.entries;
  T x = 0, dt = 0, y = 0;
  if (live) {
    x = to_number(*p.x.template at<S>(b, at.h, at.channel));
    dt = T(to_number(*p.dt.template at<S>(b, at.h, at.channel))) + optional_at<T>(p.dt_bias, at.h, at.channel);
    if (p.dt_softplus) dt = softplus(dt);
    for (int64_t n = at.lane * held; n < p.dstate; n += plan.lanes * held) {
      T A[held], B[held], C[held], s[held];
      load_states(A, p.A, n, p.dstate, at.h, at.channel);
      load_states(B, p.B, n, p.dstate, b, at.group);
      load_states(C, p.C, n, p.dstate, b, at.group);
      load_states(s, p.state, n, p.dstate, entry, at.h, at.channel);
#pragma unroll
      for (int i = 0; i < held; ++i) {
        s[i] = exp_of(dt * A[i]) * s[i] + dt * x * B[i];
        if (n + i < p.dstate) y += C[i] * s[i];
      }
      store_states(s, p.new_state, n, p.dstate, entry, at.h, at.channel);
    }
  }
  y = sum_lanes(y, plan.lanes);
  if (at.inside && at.lane == 0) {
    T out = 0;
    if (live) {
      out = y + optional_at<T>(p.D, at.h, at.channel) * x;
      if (p.z) out *= silu(T(to_number(*p.z.template at<S>(b, at.h, at.channel))));
    }
    round_to(*p.out.template at<S>(b, at.h, at.channel), out);
  }
}

// Partial sums of the backward. Per strip: dA (nheads, headdim, dstate), then dD and ddt_bias (nheads, headdim). Per row of the batch, head
// and block of channels: dB and dC, dstate numbers each.
template <class T>
struct Partial {
  T *dA, *dD, *ddt_bias, *projections;
};

// The sum over the block's channels of each of the 4 states of a lane, by warps and then in order; called by all threads.
template <class T>
__device__ __forceinline__ void sum_channels(T* out, const T (&value)[held], int lane, int lanes, int64_t n, int64_t dstate) {
  struct Sums {
    T value[threads / 32][32][held];
  };
  auto& shared = static_shared<Sums>();
#pragma unroll
  for (int i = 0; i < held; ++i) {
    T sum = value[i];
    for (int offset = 16; offset >= lanes; offset /= 2) sum += __shfl_xor_sync(all_lanes, sum, offset);
    if (threadIdx.x % 32 < lanes) shared.value[threadIdx.x / 32][lane][i] = sum;
  }
  __syncthreads();
  if (threadIdx.x < lanes) {
#pragma unroll
    for (int i = 0; i < held; ++i) {
      T sum = 0;
      for (int w = 0; w < threads / 32; ++w) sum += shared.value[w][lane][i];
      if (n + i < dstate) out[n + i] = sum;
    }
  }
  __syncthreads();
}

template <class S>
__global__ void __launch_bounds__(threads, 4)
    backward_kernel(const SelectiveStateUpdateBwd p, const Plan plan, const Partial<Accumulate<S>> partial) {
  using T = Accumulate<S>;
  const Place at(p, plan);
  const int64_t begin = at.outer * plan.per_strip, end = smaller(begin + plan.per_strip, p.batch);
  const int64_t step = plan.lanes * held, rounds = (p.dstate + step - 1) / step;
  const int64_t row = (at.outer * p.nheads + at.h) * p.headdim + at.channel;  // of the strip's sums
  const T skip = at.inside ? optional_at<T>(p.D, at.h, at.channel) : T(0);
  const T bias = at.inside ? optional_at<T>(p.dt_bias, at.h, at.channel) : T(0);
  T dD = 0, ddt_bias = 0, dA[held] = {};  // dA of the first round; others are added up in memory
  for (int64_t b = begin; b < end; ++b) {
    T x = 0, e = 0, gy = 0, dt = 0;
    if (at.inside) {
      x = to_number(*p.x.template at<S>(b, at.h, at.channel));
      e = T(to_number(*p.dt.template at<S>(b, at.h, at.channel))) + bias;
      dt = p.dt_softplus ? softplus(e) : e;
      if (p.dout) gy = to_number(*p.dout.template at<S>(b, at.h, at.channel));
    }
    if (p.z) {  // dz = dout y silu'(z); gy = dout silu(z)
      T y = 0;
      for (int64_t n = at.lane * held; at.inside && n < p.dstate; n += step) {
        T A[held], B[held], C[held], s[held];
        load_states(A, p.A, n, p.dstate, at.h, at.channel);
        load_states(B, p.B, n, p.dstate, b, at.group);
        load_states(C, p.C, n, p.dstate, b, at.group);
        load_states(s, p.state, n, p.dstate, b, at.h, at.channel);
#pragma unroll
        for (int i = 0; i < held; ++i)
          if (n + i < p.dstate) y += C[i] * (exp_of(dt * A[i]) * s[i] + dt * x * B[i]);
      }
      y = sum_lanes(y, plan.lanes);
      if (at.inside) {
        const WithSlope<T> gate = silu_with_slope(T(to_number(*p.z.template at<S>(b, at.h, at.channel))));
        if (at.lane == 0) round_to(*p.dz.template at<S>(b, at.h, at.channel), gy * (y + skip * x) * gate.slope);
        gy *= gate.value;
      }
    }
    T lambda_B = 0, lambda_Aw = 0;
    T* const projections = partial.projections + ((b * p.nheads + at.h) * plan.blocks + at.block) * 2 * p.dstate;
    for (int64_t round = 0; round < rounds; ++round) {
      const int64_t n = round * step + at.lane * held;
      T A[held] = {}, B[held] = {}, C[held] = {}, s[held] = {}, lambda[held] = {}, dB[held], dC[held];
      if (at.inside && n < p.dstate) {
        load_states(A, p.A, n, p.dstate, at.h, at.channel);
        load_states(B, p.B, n, p.dstate, b, at.group);
        load_states(C, p.C, n, p.dstate, b, at.group);
        load_states(s, p.state, n, p.dstate, b, at.h, at.channel);
        if (p.dnew_state) load_states(lambda, p.dnew_state, n, p.dstate, b, at.h, at.channel);
      }
      T add[held];
#pragma unroll
      for (int i = 0; i < held; ++i) {
        const T a = exp_of(dt * A[i]), w = a * s[i];
        lambda[i] += gy * C[i];
        lambda_B += lambda[i] * B[i];
        lambda_Aw += lambda[i] * A[i] * w;
        add[i] = lambda[i] * dt * w;
        dB[i] = lambda[i] * dt * x;
        dC[i] = gy * (w + dt * x * B[i]);
        lambda[i] *= a;  // gradient of the state
      }
      if (at.inside && n < p.dstate) {
        store_states(lambda, p.grad_state, n, p.dstate, b, at.h, at.channel);
        if (round > 0) {
          T sum[held];
          load_items(sum, partial.dA + row * p.dstate + n, 1, 0, b == begin ? 0 : p.dstate - n);
#pragma unroll
          for (int i = 0; i < held; ++i) sum[i] += add[i];
          store_items(partial.dA + row * p.dstate + n, sum, 1, 0, p.dstate - n);
        }
      }
      if (round == 0) {
#pragma unroll
        for (int i = 0; i < held; ++i) dA[i] += add[i];
      }
      sum_channels(projections, dB, at.lane, plan.lanes, n, p.dstate);
      sum_channels(projections + p.dstate, dC, at.lane, plan.lanes, n, p.dstate);
    }
    lambda_B = sum_lanes(lambda_B, plan.lanes);
    lambda_Aw = sum_lanes(lambda_Aw, plan.lanes);
    const T ddt = (x * lambda_B + lambda_Aw) * (p.dt_softplus ? softplus_slope(e) : T(1));
    if (at.inside && at.lane == 0) {
      round_to(*p.dx.template at<S>(b, at.h, at.channel), dt * lambda_B + skip * gy);
      round_to(*p.ddt.template at<S>(b, at.h, at.channel), ddt);
    }
    ddt_bias += ddt;
    dD += gy * x;
  }
  if (!at.inside) return;
  const int64_t n = at.lane * held;
  if (n < p.dstate) store_items(partial.dA + row * p.dstate + n, dA, 1, 0, p.dstate - n);
  if (at.lane == 0) {
    partial.dD[row] = dD;
    partial.ddt_bias[row] = ddt_bias;
  }
}

// One thread a result: dA and, for each channel, dD and ddt_bias, from the strips.
template <class T>
__global__ void __launch_bounds__(threads) sum_strips_kernel(const SelectiveStateUpdateBwd p, int64_t strips, const Partial<T> partial) {
  const int64_t index = int64_t(blockIdx.x) * threads + threadIdx.x, channels = p.nheads * p.headdim, per_channel = p.dstate + 1;
  if (index >= channels * per_channel) return;
  const int64_t row = index / per_channel, n = index % per_channel, h = row / p.headdim, channel = row % p.headdim;
  T sum = 0, more = 0;
  for (int64_t strip = 0; strip < strips; ++strip) {
    const int64_t at = strip * channels + row;
    sum += n < p.dstate ? partial.dA[at * p.dstate + n] : partial.dD[at];
    if (n == p.dstate) more += partial.ddt_bias[at];
  }
  if (n < p.dstate) {
    store_at(p.dA, sum, h, channel, n);
  } else {
    if (p.dD) store_at(p.dD, sum, h, channel);
    if (p.ddt_bias) store_at(p.ddt_bias, more, h, channel);
  }
}

// One thread a number of dB or dC: the sum over the heads of the group and their blocks.
template <class T>
__global__ void __launch_bounds__(threads) sum_blocks_kernel(const SelectiveStateUpdateBwd p, int64_t blocks, const Partial<T> partial) {
  const int64_t index = int64_t(blockIdx.x) * threads + threadIdx.x, numbers = 2 * p.dstate;
  if (index >= p.batch * p.ngroups * numbers) return;
  const int64_t n = index % numbers, g = index / numbers % p.ngroups, b = index / numbers / p.ngroups;
  const int64_t count = p.nheads / p.ngroups * blocks;
  const T* from = partial.projections + (b * p.nheads * blocks + g * count) * numbers + n;
  T sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += from[i * numbers];
  store_at(n < p.dstate ? p.dB : p.dC, sum, b, g, n % p.dstate);
}

int64_t blocks_for(int64_t count) { return (count + threads - 1) / threads; }

}  // namespace

void selective_state_update_fwd(const SelectiveStateUpdateFwd& p, const Context& context) {
  const Plan plan(p);
  dispatch_floating(p.x.dtype, [&](auto tag) {
    using S = typename decltype(tag)::type;
    launch(context, "selective_state_update_fwd", forward_kernel<S>, p.batch * p.nheads * plan.blocks, threads, 0, p, plan);
  });
}

void selective_state_update_bwd(const SelectiveStateUpdateBwd& p, const Context& context) {
  const Plan plan(p);
  dispatch_floating(p.x.dtype, [&](auto tag) {
    using S = typename decltype(tag)::type;
    using T = Accumulate<S>;
    const int64_t channels = p.nheads * p.headdim;
    const Partial<T> partial{context.scratch<T>(plan.strips * channels * p.dstate), context.scratch<T>(plan.strips * channels),
                             context.scratch<T>(plan.strips * channels),
                             context.scratch<T>(p.batch * p.nheads * plan.blocks * 2 * p.dstate)};
    launch(context, "selective_state_update_bwd", backward_kernel<S>, plan.strips * p.nheads * plan.blocks, threads, 0, p, plan, partial);
    launch(context, "selective_state_update_bwd_sum_strips", sum_strips_kernel<T>, blocks_for(channels * (p.dstate + 1)), threads, 0, p,
           plan.strips, partial);
    launch(context, "selective_state_update_bwd_sum_blocks", sum_blocks_kernel<T>, blocks_for(p.batch * p.ngroups * 2 * p.dstate), threads,
           0, p, plan.blocks, partial);
  });
}

}  // namespace mamba::cuda
