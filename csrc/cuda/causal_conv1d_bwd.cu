// Causal depthwise convolution, backward. The fast kernel (filters of up to 4 taps, no sequence borders) owns 8 times of one channel: it
// recomputes the sums of 11 times from 14 samples, so that dx, dweight and dbias come out of one pass. The general way keeps the gradient
// before the activation (dp) in scratch, in the accumulation type.
//
// Bytes per element, bf16: x and dout read, dx written: 6; the sums add 0.3 (one partial sum of width + 1 numbers for every 64 times or
// more of a channel). 80-85 % of the copy bandwidth expected; the general way moves 20 bytes.
//
// dweight and dbias: partial sums of a block (fixed times of fixed channels), then one launch adds the blocks in order.
#include "cuda/causal_conv1d.cuh"
#include "cuda/reduce.cuh"

namespace mamba::cuda {
namespace {

constexpr int sums = conv_width + 1;  // of a channel: taps, bias

// Block sums: partial[(block * sums + k) * dim + d].
template <class S>
__global__ void __launch_bounds__(conv_threads, sizeof(S) == 8 ? 3 : 4)
    backward_kernel(const CausalConv1dBwd p, const ConvPlan plan, Accumulate<S>* partial) {
  using T = Accumulate<S>;
  constexpr int past = conv_width - 1, reach = conv_times + past;
  const ConvPlace at(p, plan);
  const int skipped = conv_width - int(p.width);
  T total[sums] = {};
  if (at.d < p.dim) {
    const Filter<T> filter(p, at.d);
    for (int round = 0; round < plan.rounds; ++round) {
      const int64_t t = at.t + round * at.round_step;
      if (t >= p.seqlen) break;
      T window[reach + past], dp[reach] = {};
      load_window<S>(window, p, at.b, at.d, t);
      if (p.dout) {
        const S* const from = p.dout.template at<S>(at.b, at.d, t);
        T now[conv_times];
        load_items(now, from, p.dout.stride[2], 0, p.seqlen - t);
#pragma unroll
        for (int i = 0; i < reach; ++i)
          dp[i] = i < conv_times ? now[i < conv_times ? i : 0] : t + i < p.seqlen ? T(to_number(from[i * p.dout.stride[2]])) : T(0);
      }
      if (p.silu) {
#pragma unroll
        for (int i = 0; i < reach; ++i)
          if (t + i < p.seqlen) dp[i] *= silu_with_slope(convolve_window(filter, window + i)).slope;
      }
      T dx[conv_times];
#pragma unroll
      for (int i = 0; i < conv_times; ++i) {
        T sum = 0;
#pragma unroll
        for (int k = 0; k < conv_width; ++k) {
          if (k < skipped) continue;
          sum += filter.weight[k] * dp[i + past - k];
          if (t + i < p.seqlen) total[k] += dp[i] * window[i + k];
        }
        total[conv_width] += dp[i];
        const int64_t column = t + i - (p.seqlen - (p.width - 1));  // of last_state
        if (p.dlast_state && column >= 0 && column < p.width - 1) sum += T(to_number(*p.dlast_state.template at<S>(at.b, at.d, column)));
        dx[i] = sum;
      }
      store_items(p.dx.template at<S>(at.b, at.d, t), dx, p.dx.stride[2], 0, p.seqlen - t);
    }
  }
  // Lanes of one channel, then what is left of its threads.
  struct Sums {
    T value[sums][conv_threads];
  };
  auto& shared = static_shared<Sums>();
  const int lanes = plan.channels_first ? int(smaller(32, plan.time_threads)) : 1, parts = plan.time_threads / lanes;
#pragma unroll
  for (int k = 0; k < sums; ++k) {
    total[k] = sum_lanes(total[k], lanes);
    if (at.time_thread % lanes == 0) shared.value[k][at.time_thread / lanes * plan.channel_threads + at.channel_thread] = total[k];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < sums * plan.channel_threads; i += conv_threads) {
    const int channel = i % plan.channel_threads, k = i / plan.channel_threads;
    const int64_t d = at.d - at.channel_thread + channel;
    T sum = 0;
    for (int part = 0; part < parts; ++part) sum += shared.value[k][part * plan.channel_threads + channel];
    if (d < p.dim) partial[(at.time_block * sums + k) * p.dim + d] = sum;
  }
}

// One block: 32 channels of one tap, or of the bias; adds `count` partial sums each.
template <class T>
__global__ void __launch_bounds__(32 * sum_warps) finish_kernel(const CausalConv1dBwd p, const T* partial, int64_t count, int64_t row) {
  const int64_t k = blockIdx.x % (p.width + 1), d = int64_t(blockIdx.x / (p.width + 1)) * 32 + threadIdx.x % 32;
  const int64_t place = k + row - (p.width + 1);  // taps that a short filter lacks stand in front
  const T sum = sum_over_warps<T>(count, d < p.dim, [&](int64_t i) { return partial[(i * row + place) * p.dim + d]; });
  if (threadIdx.x >= 32 || d >= p.dim) return;
  if (k < p.width)
    store_at(p.dweight, sum, d, k);
  else if (p.dbias)
    store_at(p.dbias, sum, d);
}

// ---- the general way ----

// The gradient before the activation.
template <class S>
__device__ __forceinline__ Accumulate<S> gradient_at(const CausalConv1dBwd& p, const Segment& segment, int64_t b, int64_t d, int64_t t) {
  using T = Accumulate<S>;
  if (segment.padding || !p.dout) return 0;
  const T dout = to_number(*p.dout.template at<S>(b, d, t));
  return p.silu ? dout * silu_with_slope(convolve<S>(p, segment, b, d, t)).slope : dout;
}

// dp lies as (batch, time, channel).
template <class S>
__global__ void __launch_bounds__(conv_threads) general_gradient_kernel(const CausalConv1dBwd p, Accumulate<S>* dp) {
  const int64_t index = int64_t(blockIdx.x) * conv_threads + threadIdx.x;
  if (index >= p.batch * p.dim * p.seqlen) return;
  const Element at(p, index);
  dp[(at.b * p.seqlen + at.t) * p.dim + at.d] = gradient_at<S>(p, segment_of(p, at.b, at.t), at.b, at.d, at.t);
}

template <class S>
__global__ void __launch_bounds__(conv_threads, 8) general_dx_kernel(const CausalConv1dBwd p, const Accumulate<S>* dp) {
  using T = Accumulate<S>;
  const int64_t index = int64_t(blockIdx.x) * conv_threads + threadIdx.x;
  if (index >= p.batch * p.dim * p.seqlen) return;
  const Element at(p, index);
  T sum = 0;
  int64_t end = p.seqlen, s = at.b;
  if (p.cu_seqlens) {
    s = sequence_of(p.cu_seqlens, p.num_sequences, at.t);
    end = s < p.num_sequences ? bound_of(p, s + 1) : 0;
  }
  for (int64_t t = at.t; t < at.t + p.width && t < end; ++t)
    if (t == at.t || segment_of(p, at.b, t).begin <= at.t)
      sum += load_at<T>(p.weight, at.d, p.width - 1 - (t - at.t)) * dp[(at.b * p.seqlen + t) * p.dim + at.d];
  const int64_t column = at.t - (end - (p.width - 1));
  if (p.dlast_state && end > at.t && column >= 0 && segment_of(p, at.b, end - 1).begin <= at.t)
    sum += T(to_number(*p.dlast_state.template at<S>(s, at.d, column)));
  round_to(*p.dx.template at<S>(at.b, at.d, at.t), sum);
}

// One block: 32 channels of one tap, for a strip of tokens (batch and time as one axis).
template <class S>
__global__ void __launch_bounds__(32 * sum_warps)
    general_sum_kernel(const CausalConv1dBwd p, const Accumulate<S>* dp, int64_t per_strip, Accumulate<S>* partial) {
  using T = Accumulate<S>;
  const int64_t channel_blocks = (p.dim + 31) / 32, k = blockIdx.x % (p.width + 1);
  const int64_t d = blockIdx.x / (p.width + 1) % channel_blocks * 32 + threadIdx.x % 32,
                strip = blockIdx.x / (p.width + 1) / channel_blocks;
  const int64_t begin = strip * per_strip, count = smaller(per_strip, p.batch * p.seqlen - begin);
  const T sum = sum_over_warps<T>(count, d < p.dim, [&](int64_t i) {
    const int64_t token = begin + i, b = token / p.seqlen, t = token % p.seqlen;
    const T gradient = dp[token * p.dim + d];
    if (k == p.width) return gradient;
    const Segment segment = segment_of(p, b, t);
    return segment.padding ? T(0) : gradient * sample<S>(p, segment, b, d, t - p.width + 1 + k);
  });
  if (threadIdx.x < 32 && d < p.dim) partial[(strip * (p.width + 1) + k) * p.dim + d] = sum;
}

// dinitial_state[j]: what reaches the sample width - 1 - j in front of each sequence.
template <class S>
__global__ void __launch_bounds__(conv_threads) initial_state_kernel(const CausalConv1dBwd p) {
  using T = Accumulate<S>;
  const int64_t index = int64_t(blockIdx.x) * conv_threads + threadIdx.x, past = p.width - 1;
  if (index >= p.num_sequences * p.dim * past) return;
  const int64_t j = index % past, d = index / past % p.dim, s = index / past / p.dim;
  const int64_t b = p.cu_seqlens ? 0 : s, begin = p.cu_seqlens ? bound_of(p, s) : 0, end = p.cu_seqlens ? bound_of(p, s + 1) : p.seqlen;
  T sum = 0;
  for (int64_t t = begin; t < end && t <= begin + j; ++t) {
    const Segment segment = segment_of(p, b, t);
    if (segment.begin == begin && segment.state == s) sum += load_at<T>(p.weight, d, begin + j - t) * gradient_at<S>(p, segment, b, d, t);
  }
  const int64_t column = j - larger(0, end - begin);  // of last_state: the sequence was too short to push this sample out
  if (p.dlast_state && column >= 0 && (begin >= end || segment_of(p, b, end - 1).begin == begin))
    sum += T(to_number(*p.dlast_state.template at<S>(s, d, column)));
  store_at(p.dinitial_state, sum, s, d, j);
}

template <class S>
void fast_backward(const CausalConv1dBwd& p, const Context& context) {
  using T = Accumulate<S>;
  const ConvPlan plan(p);
  const int64_t blocks = p.batch * plan.time_blocks;
  T* partial = context.scratch<T>(blocks * sums * p.dim);
  launch(context, "causal_conv1d_bwd", backward_kernel<S>, blocks * plan.channel_blocks, conv_threads, 0, p, plan, partial);
  launch(context, "causal_conv1d_bwd_sum", finish_kernel<T>, (p.dim + 31) / 32 * (p.width + 1), 32 * sum_warps, 0, p,
         static_cast<const T*>(partial), blocks, int64_t(sums));
}

template <class S>
void general_backward(const CausalConv1dBwd& p, const Context& context) {
  using T = Accumulate<S>;
  const int64_t tokens = p.batch * p.seqlen, per_strip = larger(64, (tokens + 63) / 64), strips = (tokens + per_strip - 1) / per_strip;
  const int64_t tiles = (p.dim + 31) / 32 * (p.width + 1);
  T *dp = context.scratch<T>(tokens * p.dim), *partial = context.scratch<T>(strips * (p.width + 1) * p.dim);
  launch(context, "causal_conv1d_bwd_gradient", general_gradient_kernel<S>, general_blocks(tokens * p.dim), conv_threads, 0, p, dp);
  launch(context, "causal_conv1d_bwd_dx", general_dx_kernel<S>, general_blocks(tokens * p.dim), conv_threads, 0, p,
         static_cast<const T*>(dp));
  launch(context, "causal_conv1d_bwd_strips", general_sum_kernel<S>, strips * tiles, 32 * sum_warps, 0, p, static_cast<const T*>(dp),
         per_strip, partial);
  launch(context, "causal_conv1d_bwd_sum", finish_kernel<T>, tiles, 32 * sum_warps, 0, p, static_cast<const T*>(partial), strips,
         p.width + 1);
}

}  // namespace

void causal_conv1d_bwd(const CausalConv1dBwd& p, const Context& context) {
  dispatch_floating(p.x.dtype, [&](auto tag) {
    using S = typename decltype(tag)::type;
    if (takes_fast_kernels(p))
      fast_backward<S>(p, context);
    else
      general_backward<S>(p, context);
    if (p.dinitial_state)
      launch(context, "causal_conv1d_bwd_state", initial_state_kernel<S>, general_blocks(p.num_sequences * p.dim * (p.width - 1)),
             conv_threads, 0, p);
  });
}

}  // namespace mamba::cuda
