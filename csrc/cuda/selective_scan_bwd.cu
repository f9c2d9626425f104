// Selective scan backward; selective_scan.cuh says the plan, spec of the formulas:
//   lambda_t = gy_t C_t + (a lambda)_{t+1};  w_t = a_t h_{t-1};  gy = dout silu(z)
//   du = D gy + delta sum_n lambda B;  ddelta = (sum_n lambda (u B + A w)) softplus'(e);  dz = dout y silu'(z)
//   dA = sum lambda delta w;  dB = lambda delta u;  dC = gy h;  dD = sum gy u
// Time runs backwards in chunks of 8 steps: the states of a chunk are recomputed from the one that the forward saved at its start and stay
// in registers (a and w: 64 numbers), so that there is one exponential a state step here too.
//
// Bytes per token and channel, bf16, 16 states: u, delta, z, dout read, du, ddelta, dz written: 14; saved states read: 8; partial sums of
// dB and dC written and read: 8 (2 dstate numbers a token and block of 32 channels). The sums over channels are shuffles that halve the
// numbers at every level (7 for 8 numbers); they and the exponentials decide: 35-40 % of the copy bandwidth expected.
//
// Sums in two stages: dA, dD, ddelta_bias (constant B and C: dB, dC too) are partial sums of one (batch, split), time-varying dB and dC
// those of a block of channels; second launches add them in order.
#include "cuda/selective_scan_bwd.cuh"

namespace mamba::cuda {
namespace {

// The adjoint that leaves a split at its first token, without what enters it, and the split's decay.
template <class S>
__global__ void __launch_bounds__(scan_threads, sizeof(Accumulate<S>) == 8 ? 2 : 4)
    summary_kernel(const SelectiveScanBwd p, const ScanPlan plan, const ScanSplits<Accumulate<S>> s, Accumulate<S>* carry) {
  using T = Accumulate<S>;
  auto& shared = static_shared<ScanShared<T>>();
  ScanSegments& segments = shared.segments;
  const BackwardTile<T> tile(plan);
  const ScanPlace at(p, plan);
  const int64_t saved = split_offset(p, plan, at.b, at.split, at.channel);
  T g[scan_held] = {}, A[scan_held] = {}, C[scan_held] = {}, decay_sum = 0;
  bool reset = false;
  const int64_t tiles = tiles_of(plan, at);
  shared.parameters.fill(p, at);
  for (int64_t number = tiles - 1; number >= 0; --number) {
    const auto [begin, rows, valid] = load_tile<S>(tile, p, plan, at, shared, number);
    for (int64_t part = 0; part < plan.pieces; ++part) {
      const auto [n0, n, live] = scan_part(p, plan, at, part);
      const bool first_tile = number == tiles - 1;
      if (p.C_varies) load_projection<S>(tile.C, p.C, at.b, at.group_C, begin, plan.tile, valid, n0, plan.piece, p.dstate);
      if (live && (first_tile || plan.pieces > 1)) {
        load_A(A, p, at.channel, n);
        if (!p.C_varies) load_constant(C, p, p.C, at.channel, n);
        for (int i = 0; i < scan_held; ++i) g[i] = 0;
        if (!first_tile) load_items(g, carry + saved + n, 1, 0, p.dstate - n);
      }
      __syncthreads();
      for (int t = valid - 1; t >= 0; --t) {
        const int64_t start = segments.start[t], end = segments.end[t];
        if (start != scan_inside) reset = true;
        if (!live) continue;
        if (end != scan_inside) {
          for (int i = 0; i < scan_held; ++i) g[i] = 0;
          if (p.dlast_state) load_states(g, p.dlast_state, end, at.channel, n, p.dstate);
        }
        const T delta = tile.delta[t * tile.pitch + at.slot], gy = tile.gy[t * tile.pitch + at.slot];
        Quad<T> c;
        if (p.C_varies) c = quad_at(tile.C + t * plan.piece + at.lane * scan_held);
#pragma unroll
        for (int i = 0; i < scan_held; ++i) {
          g[i] = exp2_of(delta * A[i]) * (g[i] + gy * (p.C_varies ? c.v[i] : C[i]));
          if (start != scan_inside) g[i] = 0;
        }
        if (part == 0) decay_sum += delta;
      }
      if (live && plan.pieces > 1) store_items(carry + saved + n, g, 1, 0, p.dstate - n);
      __syncthreads();
    }
  }
  store_summary(p, plan, at, s, carry, g, A, decay_sum, reset);
}

// du, ddelta and dz of one pack; leaves ddelta in the tile for the sum over time.
template <class S, class T>
__device__ __forceinline__ void store_tile(const BackwardTile<T>& tile, const SelectiveScanBwd& p, const ScanPlace& at,
                                           const ScanParameters<T>& parameters, int64_t begin, int valid, const ScanPack& pack) {
  constexpr int size = Pack<S>::size;
  T du[size] = {}, ddelta[size] = {};
  const int there = pack.before(valid);
#pragma unroll
  for (int i = 0; i < size; ++i) {
    if (i >= there) break;
    const int from = pack.at(i, tile.pitch);
    du[i] = parameters.D[pack.channel(i)] * tile.gy[from] + tile.delta[from] * tile.lambda_B[from];
    ddelta[i] = tile.u[from] * tile.lambda_B[from] + tile.lambda_Aw[from];
  }
  if (p.delta_softplus) {
    T delta[size];
    pack.load<S>(delta, p.delta, at, begin, there);
#pragma unroll
    for (int i = 0; i < size; ++i)
      if (i < there) ddelta[i] *= softplus_slope(delta[i] + parameters.delta_bias[pack.channel(i)]);
  }
  pack.store<S>(p.du, du, at, begin);
  pack.store<S>(p.ddelta, ddelta, at, begin);
  if (p.z) {
    T z[size], dz[size] = {};
    if (p.dout) {
      pack.load<S>(dz, p.dout, at, begin, there);
      pack.load<S>(z, p.z, at, begin, there);
    }
#pragma unroll
    for (int i = 0; i < size; ++i) {
      if (i >= there || !p.dout) break;
      const int from = pack.at(i, tile.pitch);
      dz[i] *= (tile.y[from] + parameters.D[pack.channel(i)] * tile.u[from]) * silu_with_slope(z[i]).slope;
    }
    pack.store<S>(p.dz, dz, at, begin);
  }
#pragma unroll
  for (int i = 0; i < size; ++i)
    if (i < pack.count) tile.lambda_Aw[pack.at(i, tile.pitch)] = ddelta[i];
}

// Adds the warps' sums of a chunk and writes them to the block's partial sums of dB and dC.
template <class T>
__device__ __forceinline__ void store_sums(const BackwardTile<T>& tile, const SelectiveScanBwd& p, const ScanPlan& plan,
                                           const ScanPlace& at, const Partial<T>& partial, int64_t t0, int64_t n0) {
  const int numbers = 2 * plan.piece;
  for (int i = threadIdx.x; i < chunk * numbers; i += scan_threads) {
    const int k = i / numbers, which = i % numbers / plan.piece, n = i % plan.piece;
    T sum = 0;
    for (int warp = 0; warp < warps; ++warp) sum += tile.sums[warp * chunk * numbers + i];
    if (t0 + k < at.end && n0 + n < p.dstate)
      partial.projections[(((at.b * plan.channel_blocks + at.block) * p.seqlen + t0 + k) * 2 + which) * p.dstate + n0 + n] = sum;
  }
}

template <class T>
__device__ __forceinline__ void load_held(Held<T>& held, const SelectiveScanBwd& p, const ScanPlan& plan, const ScanPlace& at,
                                          const ScanSplits<T>& s, const T* sums, T* carry, int64_t n, bool first_tile) {
  const int64_t saved = split_offset(p, plan, at.b, at.split, at.channel), states = p.dim * p.dstate, own = at.channel * p.dstate + n;
  load_A(held.A, p, at.channel, n);
  if (!p.B_varies) load_constant(held.B, p, p.B, at.channel, n);
  if (!p.C_varies) load_constant(held.C, p, p.C, at.channel, n);
  const int64_t left = first_tile ? 0 : p.dstate - n;
  load_items(held.dA, sums + own, 1, 0, left);
  load_items(held.dB, sums + states + own, 1, 0, p.B_varies ? 0 : left);
  load_items(held.dC, sums + 2 * states + own, 1, 0, p.C_varies ? 0 : left);
  if (!first_tile)
    load_items(held.g, carry + saved + n, 1, 0, p.dstate - n);
  else
    load_items(held.g, s.entering + saved + n, 1, 0, plan.splits > 1 ? p.dstate - n : 0);
}

template <class T>
__device__ __forceinline__ void store_held(const Held<T>& held, const SelectiveScanBwd& p, const ScanPlan& plan, const ScanPlace& at,
                                           T* sums, T* carry, int64_t n) {
  const int64_t states = p.dim * p.dstate, own = at.channel * p.dstate + n, left = p.dstate - n;
  store_items(sums + own, held.dA, 1, 0, left);
  if (!p.B_varies) store_items(sums + states + own, held.dB, 1, 0, left);
  if (!p.C_varies) store_items(sums + 2 * states + own, held.dC, 1, 0, left);
  if (carry) store_items(carry + split_offset(p, plan, at.b, at.split, at.channel) + n, held.g, 1, 0, left);
}

template <class S>
__global__ void __launch_bounds__(scan_threads, 2)
    backward_kernel(const SelectiveScanBwd p, const ScanPlan plan, const ScanSplits<Accumulate<S>> s, Accumulate<S>* carry,
                    const Partial<Accumulate<S>> partial) {
  using T = Accumulate<S>;
  struct Shared : ScanShared<T> {
    T dD[scan_threads], ddelta_bias[scan_threads];  // of the block's channels
  };
  auto& shared = static_shared<Shared>();
  ScanSegments& segments = shared.segments;
  const BackwardTile<T> tile(plan);
  const ScanPlace at(p, plan);
  T* const sums = partial.channel_sums + (at.b * plan.splits + at.split) * channel_sums_size(p);
  const int64_t chunks = (p.seqlen + chunk - 1) / chunk, tiles = tiles_of(plan, at);
  const T* const chunk_states = static_cast<const T*>(p.chunk_states);
  Held<T> held;
  shared.parameters.fill(p, at);
  shared.dD[threadIdx.x] = shared.ddelta_bias[threadIdx.x] = 0;
  for (int64_t number = tiles - 1; number >= 0; --number) {
    const auto [begin, rows, valid] = load_tile<S>(tile, p, plan, at, shared, number);
    for (int64_t part = 0; part < plan.pieces; ++part) {
      const auto [n0, n, live] = scan_part(p, plan, at, part);
      const bool first_tile = number == tiles - 1;
      if (p.B_varies) load_projection<S>(tile.B, p.B, at.b, at.group_B, begin, plan.tile, valid, n0, plan.piece, p.dstate);
      if (p.C_varies) load_projection<S>(tile.C, p.C, at.b, at.group_C, begin, plan.tile, valid, n0, plan.piece, p.dstate);
      if (plan.pieces > 1) held = Held<T>{};
      if (live && (first_tile || plan.pieces > 1)) load_held(held, p, plan, at, s, sums, carry, n, first_tile);
      __syncthreads();
      for (int row = (rows - 1) / chunk * chunk; row >= 0; row -= chunk) {
        const T* const saved = chunk_states + ((at.b * chunks + (begin + row) / chunk) * p.dim + at.channel) * p.dstate + n;
        const int64_t left = live && row < valid ? p.dstate - n : 0;
        scan_pieces<chunk - kept_steps<T>>(held, saved, left, tile, p, plan, at, segments, row, n, live);
        if (p.B_varies || p.C_varies) {
          __syncthreads();
          store_sums(tile, p, plan, at, partial, begin + row, n0);
          __syncthreads();
        }
      }
      if (live && (plan.pieces > 1 || number == 0)) store_held(held, p, plan, at, sums, carry, n);
      __syncthreads();
    }
    each_pack<S>(p.du, rows, at.count, [&](const ScanPack& pack) { store_tile<S>(tile, p, at, shared.parameters, begin, valid, pack); });
    __syncthreads();
    if (int(threadIdx.x) < at.count) {  // one thread a channel, backwards in time as everything here
      T dD = shared.dD[threadIdx.x], ddelta_bias = shared.ddelta_bias[threadIdx.x];
      for (int t = rows - 1; t >= 0; --t) {
        const int i = t * tile.pitch + threadIdx.x;
        dD += tile.gy[i] * tile.u[i];
        ddelta_bias += tile.lambda_Aw[i];
      }
      shared.dD[threadIdx.x] = dD;
      shared.ddelta_bias[threadIdx.x] = ddelta_bias;
    }
    __syncthreads();
  }
  if (int(threadIdx.x) < at.count) {
    T* const own = sums + 3 * p.dim * p.dstate + at.first_channel + threadIdx.x;
    own[0] = shared.dD[threadIdx.x];
    own[p.dim] = shared.ddelta_bias[threadIdx.x];
  }
}

// One thread a number of dA (and constant dB, dC) or a channel's dD and ddelta_bias: adds the partial sums of all batches and splits.
template <class T>
__global__ void __launch_bounds__(scan_threads) channel_sums_kernel(const SelectiveScanBwd p, const Partial<T> partial, int64_t count) {
  const int64_t index = int64_t(blockIdx.x) * scan_threads + threadIdx.x, size = channel_sums_size(p), states = p.dim * p.dstate;
  if (index >= size) return;
  const int64_t which = states ? index / states : 3;
  if ((which == 1 && p.B_varies) || (which == 2 && p.C_varies)) return;
  T sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += partial.channel_sums[i * size + index];
  if (index < 3 * states) {
    const int64_t channel = index % states / p.dstate, n = index % p.dstate;
    if (which == 0)
      store_at(p.dA, sum, channel, n);
    else
      store_at(which == 1 ? p.dB : p.dC, sum, int64_t(0), channel, n, int64_t(0));
  } else {
    const int64_t channel = index - 3 * states;
    if (channel < p.dim) {
      if (p.dD) store_at(p.dD, sum, channel);
    } else if (p.ddelta_bias) {
      store_at(p.ddelta_bias, sum, channel - p.dim);
    }
  }
}

// Time-varying dB and dC: adds the blocks of channels of each group. Neighbouring threads are neighbouring states.
template <class T>
__global__ void __launch_bounds__(scan_threads)
    projections_kernel(const SelectiveScanBwd p, const ScanPlan plan, const Partial<T> partial, int64_t which, int64_t ngroups) {
  const int64_t index = int64_t(blockIdx.x) * scan_threads + threadIdx.x;
  if (index >= p.batch * ngroups * p.seqlen * p.dstate) return;
  const int64_t n = index % p.dstate, t = index / p.dstate % p.seqlen, g = index / p.dstate / p.seqlen % ngroups;
  const int64_t b = index / p.dstate / p.seqlen / ngroups, blocks = plan.channel_blocks / ngroups;
  T sum = 0;
  for (int64_t block = g * blocks; block < (g + 1) * blocks; ++block)
    sum += partial.projections[(((b * plan.channel_blocks + block) * p.seqlen + t) * 2 + which) * p.dstate + n];
  store_at(which == 0 ? p.dB : p.dC, sum, b, g, n, t);
}

template <class S>
void backward(const SelectiveScanBwd& p, const Context& context) {
  using T = Accumulate<S>;
  const ScanPlan plan(p);
  const int64_t bytes = BackwardTile<T>::numbers(plan) * int64_t(sizeof(T));
  const bool varies = p.B_varies || p.C_varies;
  const Partial<T> partial{context.scratch<T>(p.batch * plan.splits * channel_sums_size(p)),
                           varies ? context.scratch<T>(p.batch * plan.channel_blocks * p.seqlen * 2 * p.dstate) : nullptr};
  T* const carry = carry_scratch<T>(p, plan, context);
  const auto s = enter_splits<T>(p, plan, "selective_scan_bwd_combine", true, context, [&](const ScanSplits<T>& s) {
    launch(context, "selective_scan_bwd_summary", summary_kernel<S>, plan.blocks(p), scan_threads, bytes, p, plan, s, carry);
  });
  launch(context, "selective_scan_bwd", backward_kernel<S>, plan.blocks(p), scan_threads, bytes, p, plan, s, carry, partial);
  launch(context, "selective_scan_bwd_channel_sums", channel_sums_kernel<T>, scan_blocks_for(channel_sums_size(p)), scan_threads, 0, p,
         partial, p.batch * plan.splits);
  for (int64_t which = 0; which < 2; ++which) {
    const bool wanted = which == 0 ? p.B_varies : p.C_varies;
    const int64_t ngroups = which == 0 ? p.ngroups_B : p.ngroups_C;
    if (wanted)
      launch(context, "selective_scan_bwd_projections", projections_kernel<T>, scan_blocks_for(p.batch * ngroups * p.seqlen * p.dstate),
             scan_threads, 0, p, plan, partial, which, ngroups);
  }
}

}  // namespace

void selective_scan_bwd(const SelectiveScanBwd& p, const Context& context) {
  if (p.dim == 0) return;
  dispatch_floating(p.u.dtype, [&](auto tag) {
    using S = typename decltype(tag)::type;
    using T = Accumulate<S>;
    SelectiveScanBwd dense = p;
    dense.initial_state = dense_input<T>(p, p.initial_state, context);
    dense.dlast_state = dense_input<T>(p, p.dlast_state, context);
    dense.dinitial_state = as_dense<T>(p, p.dinitial_state, context);
    pass_through(dense, dense.dlast_state, dense.dinitial_state, context);
    backward<S>(dense, context);
    if (dense.dinitial_state.data != p.dinitial_state.data) copy_states(p, dense.dinitial_state, p.dinitial_state, false, context);
  });
}

}  // namespace mamba::cuda
