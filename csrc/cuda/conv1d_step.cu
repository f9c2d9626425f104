// One or a few samples of the causal convolution with its cache. A thread owns one channel of one row: its cache row is short (width
// samples) and neighbouring channels lie next to each other, so a warp reads and writes one contiguous stretch.
//
// Bytes per channel and row, one token, width 4, f32: reads x 4 and the cache 12, writes out 4 and the cache 16; the filter (20 bytes a
// channel) comes from L2 for all rows but the first. A step of 64 x 1536 channels is 4 MB, 1 microsecond at full bandwidth, so that the
// launch decides: one launch forward. The backward's sums over the batch are a second launch: 8 warps share a channel's rows, in an order
// that depends on nothing.
#include "params/conv1d_step.h"

#include "cuda/math.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vector_io.cuh"

namespace mamba::cuda {
namespace {

constexpr int threads = 128;

int64_t blocks_for(int64_t count) { return (count + threads - 1) / threads; }

// Sample i of [cache, new samples], oldest first. The cache starts at column `first`.
template <class S, class Params>
__device__ __forceinline__ Accumulate<S> sample(const Params& p, int64_t b, int64_t entry, int64_t d, int64_t i, int64_t first) {
  using T = Accumulate<S>;
  if (i >= p.state_len) return T(to_number(*p.x.template at<S>(b, d, i - p.state_len)));
  const int64_t column = first + i;
  return load_at<T>(p.state, entry, d, column < p.state_len ? column : column - p.state_len);
}

// bias + sum_k weight[k] sample[state_len - (width - 1) + t + k]
template <class S, class Params>
__device__ __forceinline__ Accumulate<S> convolve(const Params& p, int64_t b, int64_t entry, int64_t d, int64_t t, int64_t first) {
  using T = Accumulate<S>;
  T sum = p.bias ? load_at<T>(p.bias, d) : T(0);
  const int64_t oldest = p.state_len - (p.width - 1) + t;
  for (int64_t k = 0; k < p.width; ++k) sum += load_at<T>(p.weight, d, k) * sample<S>(p, b, entry, d, oldest + k, first);
  return sum;
}

template <class S>
__global__ void __launch_bounds__(threads, 8) forward_kernel(const Conv1dStepFwd p) {
  using T = Accumulate<S>;
  const int64_t index = int64_t(blockIdx.x) * threads + threadIdx.x, M = p.state_len;
  if (index >= p.batch * p.dim) return;
  const int64_t b = index / p.dim, d = index % p.dim;
  const int64_t entry = p.indices ? load_index(p.indices, b) : b;
  if (entry < 0 || entry >= p.entries) {
    for (int64_t t = 0; t < p.tokens; ++t) round_to(*p.out.template at<S>(b, d, t), T(0));
    return;
  }
  // Circular: column (c - j) mod M holds the sample j steps back. Linear is the same with c = 0.
  int64_t first = 0;
  if (p.cache_seqlens && M > 0) first = (load_index(p.cache_seqlens, b) % M + M) % M;
  for (int64_t t = 0; t < p.tokens; ++t) {
    const T sum = convolve<S>(p, b, entry, d, t, first);
    round_to(*p.out.template at<S>(b, d, t), p.silu ? silu(sum) : sum);
  }
  // The outputs are done, so the cache may change. Column j gets a sample that stands behind it: in place is safe in this order.
  if (p.cache_seqlens) {
    for (int64_t t = larger(0, p.tokens - M); t < p.tokens; ++t)
      store_at(p.new_state, sample<S>(p, b, entry, d, M + t, first), entry, d, (first + t) % M);
  } else {
    for (int64_t j = 0; j < M; ++j) store_at(p.new_state, sample<S>(p, b, entry, d, j + p.tokens, 0), entry, d, j);
  }
}

// dp is (batch, tokens, dim) scratch: the gradient before the activation.
template <class S>
__global__ void __launch_bounds__(threads) backward_kernel(const Conv1dStepBwd p, Accumulate<S>* dp) {
  using T = Accumulate<S>;
  const int64_t index = int64_t(blockIdx.x) * threads + threadIdx.x, M = p.state_len;
  if (index >= p.batch * p.dim) return;
  const int64_t b = index / p.dim, d = index % p.dim;
  T* const gradient = dp + b * p.tokens * p.dim + d;
  for (int64_t t = 0; t < p.tokens; ++t) {
    T value = p.dout ? T(to_number(*p.dout.template at<S>(b, d, t))) : T(0);
    if (p.silu && p.dout) value *= silu_with_slope(convolve<S>(p, b, b, d, t, 0)).slope;
    gradient[t * p.dim] = value;
  }
  for (int64_t i = 0; i < M + p.tokens; ++i) {
    T sum = i >= p.tokens && p.dnew_state ? load_at<T>(p.dnew_state, b, d, i - p.tokens) : T(0);
    for (int64_t k = 0; k < p.width; ++k) {
      const int64_t t = i - (M - (p.width - 1)) - k;
      if (t >= 0 && t < p.tokens) sum += gradient[t * p.dim] * load_at<T>(p.weight, d, k);
    }
    if (i < M)
      store_at(p.dstate, sum, b, d, i);
    else
      round_to(*p.dx.template at<S>(b, d, i - M), sum);
  }
}

// A block: 32 channels and one tap k; k = width is the bias.
template <class S>
__global__ void __launch_bounds__(32 * sum_warps) sum_kernel(const Conv1dStepBwd p, const Accumulate<S>* dp) {
  using T = Accumulate<S>;
  const int64_t k = blockIdx.x % (p.width + 1), d = int64_t(blockIdx.x / (p.width + 1)) * 32 + threadIdx.x % 32;
  const bool inside = d < p.dim;
  const int64_t oldest = p.state_len - (p.width - 1) + k;
  const T sum = sum_over_warps<T>(p.batch * p.tokens, inside, [&](int64_t i) {
    const T gradient = dp[i * p.dim + d];
    const int64_t b = i / p.tokens;
    return k == p.width ? gradient : gradient * sample<S>(p, b, b, d, oldest + i % p.tokens, 0);
  });
  if (threadIdx.x < 32 && inside) {
    if (k < p.width)
      store_at(p.dweight, sum, d, k);
    else if (p.dbias)
      store_at(p.dbias, sum, d);
  }
}

// dbias += sum_b dy; dweight[k] += sum_b dy state[k]; dx = dy weight[width - 1], written by the blocks of the bias.
template <class S>
__global__ void __launch_bounds__(32 * sum_warps) seed_kernel(const Conv1dStepSeedBwd p) {
  using T = Accumulate<S>;
  const int64_t k = blockIdx.x % (p.width + 1), d = int64_t(blockIdx.x / (p.width + 1)) * 32 + threadIdx.x % 32;
  const bool inside = d < p.dim;
  const T last = inside && k == p.width ? load_at<T>(p.weight, d, p.width - 1) : T(0);
  const T sum = sum_over_warps<T>(p.batch, inside, [&](int64_t b) {
    const T dy = to_number(*p.dy.template at<S>(b, d));
    if (k < p.width) return dy * load_at<T>(p.state, b, d, k);
    round_to(*p.dx.template at<S>(b, d), dy * last);
    return dy;
  });
  if (threadIdx.x < 32 && inside) {
    if (k < p.width)
      store_at(p.dweight, load_at<T>(p.dweight, d, k) + sum, d, k);
    else if (p.dbias)
      store_at(p.dbias, load_at<T>(p.dbias, d) + sum, d);
  }
}

int64_t sum_blocks(int64_t dim, int64_t width) { return (dim + 31) / 32 * (width + 1); }

}  // namespace

void conv1d_step_fwd(const Conv1dStepFwd& p, const Context& context) {
  dispatch_floating(p.x.dtype, [&](auto tag) {
    using S = typename decltype(tag)::type;
    launch(context, "conv1d_step_fwd", forward_kernel<S>, blocks_for(p.batch * p.dim), threads, 0, p);
  });
}

void conv1d_step_bwd(const Conv1dStepBwd& p, const Context& context) {
  dispatch_floating(p.x.dtype, [&](auto tag) {
    using S = typename decltype(tag)::type;
    using T = Accumulate<S>;
    T* dp = context.scratch<T>(p.batch * p.tokens * p.dim);
    launch(context, "conv1d_step_bwd", backward_kernel<S>, blocks_for(p.batch * p.dim), threads, 0, p, dp);
    launch(context, "conv1d_step_bwd_sum", sum_kernel<S>, sum_blocks(p.dim, p.width), 32 * sum_warps, 0, p, static_cast<const T*>(dp));
  });
}

void conv1d_step_seed_bwd(const Conv1dStepSeedBwd& p, const Context& context) {
  dispatch_floating(p.dy.dtype, [&](auto tag) {
    using S = typename decltype(tag)::type;
    launch(context, "conv1d_step_seed_bwd", seed_kernel<S>, sum_blocks(p.dim, p.width), 32 * sum_warps, 0, p);
  });
}

}  // namespace mamba::cuda
