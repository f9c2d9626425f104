// What both directions of the causal convolution share: sequence borders, tiles of samples, and how threads map to channels and times.
#pragma once
#include "cuda/math.cuh"
#include "cuda/vector_io.cuh"
#include "params/causal_conv1d.h"

namespace mamba::cuda {

// The segment of one time step. Samples before `begin` are those of `state` (a row of initial_state) or, where it is negative, zero.
struct Segment {
  int64_t begin, state;
  bool padding;  // out is 0
};

// A bound from cu_seqlens, within the tensor whatever it holds.
template <class Params>
__device__ __forceinline__ int64_t bound_of(const Params& p, int64_t index) {
  return larger(0, smaller(load_index(p.cu_seqlens, index), p.seqlen));
}

// With seq_idx, borders that the taps of t do not reach are not looked for.
template <class Params>
__device__ __forceinline__ Segment segment_of(const Params& p, int64_t b, int64_t t) {
  if (p.cu_seqlens) {
    const int64_t s = sequence_of(p.cu_seqlens, p.num_sequences, t);
    if (s == p.num_sequences) return {t, -1, true};
    const int64_t begin = bound_of(p, s);
    return {begin, begin <= t ? s : -1, begin > t};
  }
  if (!p.seq_idx) return {0, b, false};
  const int64_t id = load_index(p.seq_idx, b, t);
  int64_t begin = t;
  while (begin > 0 && t - begin < p.width - 1 && load_index(p.seq_idx, b, begin - 1) == id) --begin;
  return {begin, begin == 0 ? b : -1, id < 0};
}

// Sample i of time t's extended input; i > t - width.
template <class S, class Params>
__device__ __forceinline__ Accumulate<S> sample(const Params& p, const Segment& segment, int64_t b, int64_t d, int64_t i) {
  using T = Accumulate<S>;
  if (i >= segment.begin) return to_number(*p.x.template at<S>(b, d, i));
  if (segment.state < 0 || !p.initial_state) return 0;
  return load_at<T>(p.initial_state, segment.state, d, p.width - 1 + i - segment.begin);
}

// bias + sum_k weight[k] sample[t - width + 1 + k]
template <class S, class Params>
__device__ __forceinline__ Accumulate<S> convolve(const Params& p, const Segment& segment, int64_t b, int64_t d, int64_t t) {
  using T = Accumulate<S>;
  T sum = p.bias ? load_at<T>(p.bias, d) : T(0);
  for (int64_t k = 0; k < p.width; ++k) sum += load_at<T>(p.weight, d, k) * sample<S>(p, segment, b, d, t - p.width + 1 + k);
  return sum;
}

// ---- the plan of the fast kernels: a thread owns 8 times of one channel ----

constexpr int conv_threads = 128, conv_times = 8;
constexpr int conv_width = 4;  // longer filters take the general kernels

// Lanes run along the axis that lies contiguously in memory: with contiguous time each thread reads its 8 times as one or two 16-byte
// accesses, with contiguous channels a warp reads 32 neighbouring channels of one time at a time.
struct ConvPlan {
  bool channels_first;  // time is contiguous
  int time_threads, channel_threads;
  int rounds;  // of 8 times a thread
  int64_t time_blocks, channel_blocks;

  template <class Params>
  explicit ConvPlan(const Params& p) : channels_first(p.x.stride[1] != 1) {
    const int64_t groups = (p.seqlen + conv_times - 1) / conv_times;
    time_threads = 4;
    if (channels_first) {
      time_threads = 1;
      while (time_threads < conv_threads && time_threads < groups) time_threads *= 2;
    }
    channel_threads = conv_threads / time_threads;
    rounds = channels_first ? 1 : int(larger(1, smaller(4, groups / time_threads)));
    time_blocks = (groups + time_threads * rounds - 1) / (time_threads * rounds);
    channel_blocks = (p.dim + channel_threads - 1) / channel_threads;
  }
};

// The place of a thread: its channel and its times, conv_times from `t` on in every round.
struct ConvPlace {
  int time_thread, channel_thread;
  int64_t b, d, t, round_step, time_block;  // time_block: over all rows of the batch

  template <class Params>
  __device__ __forceinline__ ConvPlace(const Params& p, const ConvPlan& plan) {
    time_thread = plan.channels_first ? threadIdx.x % plan.time_threads : threadIdx.x / plan.channel_threads;
    channel_thread = plan.channels_first ? threadIdx.x / plan.time_threads : threadIdx.x % plan.channel_threads;
    int64_t index = blockIdx.x;
    const int64_t time_index = index % plan.time_blocks;
    index /= plan.time_blocks;
    const int64_t channel_block = index % plan.channel_blocks;
    b = index / plan.channel_blocks;
    d = channel_block * plan.channel_threads + channel_thread;
    time_block = b * plan.time_blocks + time_index;
    t = (time_index * plan.rounds * plan.time_threads + time_thread) * conv_times;
    round_step = plan.time_threads * conv_times;
  }
};

// The filter in registers, taps that a shorter filter lacks in front. weight[conv_width - 1] multiplies the current sample.
template <class T>
struct Filter {
  T weight[conv_width], bias;
  int width;

  template <class Params>
  __device__ __forceinline__ Filter(const Params& p, int64_t d) : width(int(p.width)) {
#pragma unroll
    for (int k = 0; k < conv_width; ++k) {
      const int tap = k - (conv_width - width);
      weight[k] = tap >= 0 ? load_at<T>(p.weight, d, tap) : T(0);
    }
    bias = p.bias ? load_at<T>(p.bias, d) : T(0);
  }
};

// window[i] = sample t - (conv_width - 1) + i of a row without borders: 0 before the row's first sample unless initial_state reaches there.
template <class S, int N, class T, class Params>
__device__ __forceinline__ void load_window(T (&window)[N], const Params& p, int64_t b, int64_t d, int64_t t) {
  constexpr int past = conv_width - 1;
  const S* const row = p.x.template at<S>(b, d, t);
  const int64_t step = p.x.stride[2];
  T now[conv_times];
  load_items(now, row, step, 0, p.seqlen - t);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int64_t at = t - past + i;
    if (i >= past && i < past + conv_times) {
      window[i] = now[i >= past && i < past + conv_times ? i - past : 0];
    } else if (at >= 0) {
      window[i] = at < p.seqlen ? T(to_number(row[(i - past) * step])) : T(0);
    } else {
      const int64_t column = p.width - 1 + at;
      window[i] = p.initial_state && column >= 0 ? load_at<T>(p.initial_state, b, d, column) : T(0);
    }
  }
}

// bias + sum_k weight[k] window[k], over the taps that the filter has.
template <class T>
__device__ __forceinline__ T convolve_window(const Filter<T>& filter, const T* window) {
  T sum = filter.bias;
#pragma unroll
  for (int k = 0; k < conv_width; ++k)
    if (k >= conv_width - filter.width) sum += filter.weight[k] * window[k];
  return sum;
}

// ---- the general kernels: a thread owns one number, neighbouring threads follow the memory layout ----

constexpr int64_t general_blocks(int64_t count) { return (count + conv_threads - 1) / conv_threads; }

struct Element {
  int64_t b, d, t;

  template <class Params>
  __device__ __forceinline__ Element(const Params& p, int64_t index) {
    const bool time_fastest = p.x.stride[1] != 1;
    const int64_t inner = time_fastest ? p.seqlen : p.dim, outer = time_fastest ? p.dim : p.seqlen;
    const int64_t i = index % inner, o = index / inner % outer;
    b = index / inner / outer;
    t = time_fastest ? i : o;
    d = time_fastest ? o : i;
  }
};

template <class Params>
bool takes_fast_kernels(const Params& p) {
  return p.width <= conv_width && !p.seq_idx && !p.cu_seqlens;
}

}  // namespace mamba::cuda
