// Causal depthwise convolution, forward. Two kernels: filters of up to 4 taps over rows without sequence borders (a thread owns 8 times of
// one channel and reads 11 samples, each from memory once, the 3 in front from the caches), and a general one (a thread owns one number).
//
// Bytes per element, bf16: 2 read + 2 written; the filter and the 3 samples in front of a thread's times come from the caches.
// 85-90 % of the copy bandwidth expected for the first kernel, half of that for the second.
#include "cuda/causal_conv1d.cuh"

namespace mamba::cuda {
namespace {

template <class S>
__global__ void __launch_bounds__(conv_threads) forward_kernel(const CausalConv1dFwd p, const ConvPlan plan) {
  using T = Accumulate<S>;
  const ConvPlace at(p, plan);
  if (at.d >= p.dim) return;
  const Filter<T> filter(p, at.d);
  for (int round = 0; round < plan.rounds; ++round) {
    const int64_t t = at.t + round * at.round_step;
    if (t >= p.seqlen) return;
    T window[conv_times + conv_width - 1], out[conv_times];
    load_window<S>(window, p, at.b, at.d, t);
#pragma unroll
    for (int i = 0; i < conv_times; ++i) {
      const T sum = convolve_window(filter, window + i);
      out[i] = p.silu ? silu(sum) : sum;
    }
    store_items(p.out.template at<S>(at.b, at.d, t), out, p.out.stride[2], 0, p.seqlen - t);
  }
}

template <class S>
__global__ void __launch_bounds__(conv_threads) general_kernel(const CausalConv1dFwd p) {
  using T = Accumulate<S>;
  const int64_t index = int64_t(blockIdx.x) * conv_threads + threadIdx.x;
  if (index >= p.batch * p.dim * p.seqlen) return;
  const Element at(p, index);
  const Segment segment = segment_of(p, at.b, at.t);
  T out = 0;
  if (!segment.padding) {
    out = convolve<S>(p, segment, at.b, at.d, at.t);
    if (p.silu) out = silu(out);
  }
  round_to(*p.out.template at<S>(at.b, at.d, at.t), out);
}

// last_state[j] = sample end - (width - 1) + j of each sequence; an empty one passes its initial state on.
template <class S>
__global__ void __launch_bounds__(conv_threads) last_state_kernel(const CausalConv1dFwd p) {
  using T = Accumulate<S>;
  const int64_t index = int64_t(blockIdx.x) * conv_threads + threadIdx.x, past = p.width - 1;
  if (index >= p.num_sequences * p.dim * past) return;
  const int64_t j = index % past, d = index / past % p.dim, s = index / past / p.dim;
  const int64_t b = p.cu_seqlens ? 0 : s, begin = p.cu_seqlens ? bound_of(p, s) : 0, end = p.cu_seqlens ? bound_of(p, s + 1) : p.seqlen;
  T value = 0;
  if (begin < end) {
    const Segment segment = p.cu_seqlens ? Segment{begin, s, false} : segment_of(p, b, end - 1);
    value = sample<S>(p, segment, b, d, end - past + j);
  } else if (p.initial_state) {
    value = load_at<T>(p.initial_state, s, d, j);
  }
  store_at(p.last_state, value, s, d, j);
}

}  // namespace

void causal_conv1d_fwd(const CausalConv1dFwd& p, const Context& context) {
  dispatch_floating(p.x.dtype, [&](auto tag) {
    using S = typename decltype(tag)::type;
    if (takes_fast_kernels(p)) {
      const ConvPlan plan(p);
      launch(context, "causal_conv1d_fwd", forward_kernel<S>, p.batch * plan.channel_blocks * plan.time_blocks, conv_threads, 0, p, plan);
    } else {
      launch(context, "causal_conv1d_fwd", general_kernel<S>, general_blocks(p.batch * p.dim * p.seqlen), conv_threads, 0, p);
    }
    launch(context, "causal_conv1d_last_state", last_state_kernel<S>, general_blocks(p.num_sequences * p.dim * (p.width - 1)), conv_threads,
           0, p);
  });
}

}  // namespace mamba::cuda
