// What both directions of the selective scan share.
//
// Plan. A channel is owned by `lanes` neighbouring threads, a thread holds 4 states in registers and time runs through it step by step: one
// exponential a state step, and no exchange between threads but the sum over states. A block is 128 threads (32 channels with 16 states) of
// one group of B and C. It works in tiles of time: all threads bring u, delta, B, C into shared memory (lanes along the axis that lies
// contiguously), then the scan runs, then all threads write the tile's results. More than 128 states are done in pieces, tile by tile.
// Where batch and channels do not fill the chip, time is split as well: a first pass leaves each split's decay and local state, a second
// one combines them, the third starts from the true states; that costs a second exponential a state step. All sizes follow from the shape
// only.
#pragma once
#include "cuda/math.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vector_io.cuh"
#include "params/selective_scan.h"

namespace mamba::cuda {

constexpr int scan_threads = 128, scan_held = 4;
constexpr int scan_max_tile = 32, scan_min_split = 128;
constexpr int64_t scan_full_chip = 1056;  // blocks: 8 on each of 132 multiprocessors

struct ScanPlan {
  int lanes, channels, tile, piece;  // piece: states done at once
  int64_t pieces;
  int64_t run, blocks_per_run, channel_blocks;  // a run: channels that share a group of B and of C
  int64_t splits, split_length;

  explicit ScanPlan(const SelectiveScanInputs& p) : lanes(1) {
    while (lanes < 32 && lanes * scan_held < p.dstate) lanes *= 2;
    channels = scan_threads / lanes;
    piece = lanes * scan_held;
    pieces = larger(1, (p.dstate + piece - 1) / piece);
    tile = int(larger(8, smaller(scan_max_tile, 1024 / channels)));
    run = p.B_varies ? p.dim / p.ngroups_B : p.dim;
    for (int64_t other = p.C_varies ? p.dim / p.ngroups_C : p.dim; other;) {  // greatest common divisor
      const int64_t rest = run % other;
      run = other;
      other = rest;
    }
    blocks_per_run = run ? (run + channels - 1) / channels : 0;
    channel_blocks = run ? p.dim / run * blocks_per_run : 0;
    const int64_t wanted = (scan_full_chip + p.batch * channel_blocks - 1) / larger(1, p.batch * channel_blocks);
    split_length = larger(scan_min_split, (p.seqlen + larger(1, wanted) - 1) / larger(1, wanted));
    split_length = (split_length + scan_max_tile - 1) / scan_max_tile * scan_max_tile;
    splits = (p.seqlen + split_length - 1) / split_length;
  }

  int64_t blocks(const SelectiveScanInputs& p) const { return p.batch * channel_blocks * splits; }
};

// The place of a thread.
struct ScanPlace {
  int lane, slot;  // in the channel; the channel's number in the block
  int64_t b, block, split, first_channel, channel, group_B, group_C, begin, end;
  int count;  // channels of the block
  bool inside;

  __device__ __forceinline__ ScanPlace(const SelectiveScanInputs& p, const ScanPlan& plan) {
    lane = threadIdx.x % plan.lanes;
    slot = threadIdx.x / plan.lanes;
    const int64_t index = blockIdx.x;
    block = index % plan.channel_blocks;
    split = index / plan.channel_blocks % plan.splits;
    b = index / plan.channel_blocks / plan.splits;
    const int64_t in_run = block % plan.blocks_per_run * plan.channels;
    first_channel = block / plan.blocks_per_run * plan.run + in_run;
    channel = first_channel + slot;
    count = int(smaller(plan.channels, plan.run - in_run));
    inside = slot < count;
    group_B = p.B_varies ? first_channel / (p.dim / p.ngroups_B) : 0;
    group_C = p.C_varies ? first_channel / (p.dim / p.ngroups_C) : 0;
    begin = split * plan.split_length;
    end = smaller(begin + plan.split_length, p.seqlen);
  }
};

// The states of one part of a tile, from n0 on: 4 of the thread from n on, if it has some (`live`).
struct ScanPart {
  int64_t n0, n;
  bool live;
};
__device__ __forceinline__ ScanPart scan_part(const SelectiveScanInputs& p, const ScanPlan& plan, const ScanPlace& at, int64_t part) {
  const int64_t n0 = part * plan.piece, n = n0 + at.lane * scan_held;
  return {n0, n, at.inside && n < p.dstate};
}

// ---- segments ----

constexpr int64_t scan_inside = -2, scan_zero_state = -1;

// Of one tile: start[t] is the index of the initial state that enters time t, scan_zero_state where a segment starts from zero, scan_inside
// elsewhere; end[t] the index of the last state that time t completes, or scan_inside. Times from `valid` on lie behind the last sequence.
struct ScanSegments {
  int64_t start[scan_max_tile], end[scan_max_tile];
  int valid;
};

// Called by all threads, before a barrier.
__device__ __forceinline__ void fill_segments(ScanSegments& segments, const SelectiveScanInputs& p, int64_t b, int64_t begin, int rows) {
  const int i = threadIdx.x;
  if (i == 0) {
    int64_t valid = rows;
    if (p.cu_seqlens) valid = larger(0, smaller(rows, (p.num_sequences ? load_index(p.cu_seqlens, p.num_sequences) : 0) - begin));
    segments.valid = int(valid);
  }
  if (i >= rows) return;
  const int64_t t = begin + i;
  int64_t start = scan_inside, end = scan_inside;
  if (p.cu_seqlens) {
    const int64_t s = sequence_of(p.cu_seqlens, p.num_sequences, t);
    if (s < p.num_sequences) {
      if (load_index(p.cu_seqlens, s) == t) start = s;
      if (load_index(p.cu_seqlens, s + 1) == t + 1) end = s;
    }
  } else {
    if (t == 0) start = b;
    if (t + 1 == p.seqlen) end = b;
    if (p.seq_idx && t > 0 && load_index(p.seq_idx, b, t) != load_index(p.seq_idx, b, t - 1)) start = scan_zero_state;
  }
  segments.start[i] = start;
  segments.end[i] = end;
}

// ---- states and tiles ----

template <class T>
using States = T[scan_held];

// The kernels see states as dense (rows, dim, dstate) tensors of the accumulation type; `as_dense` makes them so. 4 states from n on;
// states that there are not are 0.
template <class T>
__device__ __forceinline__ void load_states(States<T>& out, const View<3>& view, int64_t row, int64_t channel, int64_t n, int64_t dstate) {
  load_items(out, view.template at<T>(row, channel, n), 1, 0, dstate - n);
}
template <class T>
__device__ __forceinline__ void store_states(const States<T>& in, const View<3>& view, int64_t row, int64_t channel, int64_t n,
                                             int64_t dstate) {
  store_items(view.template at<T>(row, channel, n), in, 1, 0, dstate - n);
}

// What enters a segment.
template <class T>
__device__ __forceinline__ void enter_segment(States<T>& h, const SelectiveScanInputs& p, int64_t start, int64_t channel, int64_t n) {
#pragma unroll
  for (int i = 0; i < scan_held; ++i) h[i] = 0;
  if (start >= 0 && p.initial_state) load_states(h, p.initial_state, start, channel, n, p.dstate);
}

template <class T>
struct alignas(16) Quad {
  T v[scan_held];
};
template <class T>
__device__ __forceinline__ Quad<T> quad_at(const T* shared) {
  return *reinterpret_cast<const Quad<T>*>(shared);
}

// A of 4 states, times log2(e): e^(delta A) = 2^(delta A log2(e)).
template <class T>
__device__ __forceinline__ void load_A(States<T>& out, const SelectiveScanInputs& p, int64_t channel, int64_t n) {
  load_items(out, p.A.data, p.A.dtype, p.A.offset(channel, n), p.A.stride[1], p.dstate - n);
#pragma unroll
  for (int i = 0; i < scan_held; ++i) out[i] *= T(log2_e);
}

// Constant B or C: 4 states of a channel, for the whole scan.
template <class T>
__device__ __forceinline__ void load_constant(States<T>& out, const SelectiveScanInputs& p, const View<4>& view, int64_t channel,
                                              int64_t n) {
  load_items(out, view.data, view.dtype, view.offset(0, channel, n, 0), view.stride[2], p.dstate - n);
}

// Up to Pack<S>::size neighbouring elements of a tile, from (t, slot) on, along the axis that lies contiguously in memory.
struct ScanPack {
  int t, slot, count;
  bool along_channels;

  __device__ __forceinline__ int time(int i) const { return along_channels ? t : t + i; }
  __device__ __forceinline__ int channel(int i) const { return along_channels ? slot + i : slot; }
  __device__ __forceinline__ int at(int i, int pitch) const { return time(i) * pitch + channel(i); }  // in a tile
  // How many of the elements lie before time `valid`.
  __device__ __forceinline__ int before(int valid) const {
    return along_channels ? (t < valid ? count : 0) : valid - t < count ? valid - t : count;
  }
  template <class S, int N, class T>
  __device__ __forceinline__ void load(T (&out)[N], const View<3>& view, const ScanPlace& place, int64_t begin, int high) const {
    load_items(out, view.template at<S>(place.b, place.first_channel + slot, begin + t), view.stride[along_channels ? 1 : 2], 0, high);
  }
  template <class S, int N, class T>
  __device__ __forceinline__ void store(const View<3>& view, const T (&in)[N], const ScanPlace& place, int64_t begin) const {
    store_items(view.template at<S>(place.b, place.first_channel + slot, begin + t), in, view.stride[along_channels ? 1 : 2], 0, count);
  }
};

// f(pack) for a tile of `rows` times and the block's channels, which the threads share. The odd pitch of a tile spreads a warp over the
// banks.
template <class S, class F>
__device__ __forceinline__ void each_pack(const View<3>& view, int rows, int count, F&& f) {
  constexpr int size = Pack<S>::size;
  const bool along_channels = view.stride[1] == 1;
  const int inner = along_channels ? count : rows, outer = along_channels ? rows : count, packs = (inner + size - 1) / size;
  for (int i = threadIdx.x; i < outer * packs; i += scan_threads) {
    const int o = i / packs, first = i % packs * size, left = inner - first;
    f(ScanPack{along_channels ? o : first, along_channels ? first : o, left < size ? left : size, along_channels});
  }
}

// The tile's rows of B or C, times from `valid` on as 0: to[t * piece + n], for the piece of states from n0 on.
template <class S, class T>
__device__ __forceinline__ void load_projection(T* to, const View<4>& view, int64_t b, int64_t group, int64_t begin, int rows, int valid,
                                                int64_t n0, int piece, int64_t dstate) {
  constexpr int size = Pack<S>::size;
  const bool along_time = view.stride[3] == 1;
  const int inner = along_time ? rows : piece, outer = along_time ? piece : rows, packs = (inner + size - 1) / size;
  const int there = along_time ? valid : int(smaller(piece, dstate - n0)), others = along_time ? int(smaller(piece, dstate - n0)) : valid;
  for (int i = threadIdx.x; i < outer * packs; i += scan_threads) {
    const int o = i / packs, first = i % packs * size, t = along_time ? first : o, n = along_time ? o : first;
    T items[size];
    load_items(items, view.template at<S>(b, group, n0 + n, begin + t), view.stride[along_time ? 3 : 2], 0, o < others ? there - first : 0);
#pragma unroll
    for (int k = 0; k < size; ++k)
      if (first + k < inner) to[along_time ? (t + k) * piece + n : t * piece + n + k] = items[k];
  }
}

// delta after bias and softplus.
template <class T>
__device__ __forceinline__ T step_size(const SelectiveScanInputs& p, T delta, T bias) {
  const T e = delta + bias;
  return p.delta_softplus ? softplus(e) : e;
}

// D and delta_bias of the block's channels, in shared memory.
template <class T>
struct ScanParameters {
  T D[scan_threads], delta_bias[scan_threads];

  __device__ __forceinline__ void fill(const SelectiveScanInputs& p, const ScanPlace& at) {
    const int slot = threadIdx.x;
    if (slot >= at.count) return;
    D[slot] = p.D ? load_at<T>(p.D, at.first_channel + slot) : T(0);
    delta_bias[slot] = p.delta_bias ? load_at<T>(p.delta_bias, at.first_channel + slot) : T(0);
  }
};

// What every kernel of the scan has in static shared memory.
template <class T>
struct ScanShared {
  ScanSegments segments;
  ScanParameters<T> parameters;
};

// ---- combining splits ----

// Per (batch, split, channel, state): how a split maps what enters it to what leaves it: decay * entering + local. `entering` may be the
// same memory as `local`.
template <class T>
struct ScanSplits {
  T *decay, *local, *entering;
};

MAMBA_INLINE int64_t split_offset(const SelectiveScanInputs& p, const ScanPlan& plan, int64_t b, int64_t split, int64_t channel) {
  return ((b * plan.splits + split) * p.dim + channel) * p.dstate;
}

// What a pass without outputs found: the states that leave the split (in `state`, or in `carry` where they are done in pieces), and the
// decay from the sum of the step sizes; 0 where a segment starts within the split (`reset`).
template <class T>
__device__ __forceinline__ void store_summary(const SelectiveScanInputs& p, const ScanPlan& plan, const ScanPlace& at,
                                              const ScanSplits<T>& s, const T* carry, States<T>& state, States<T>& A, T decay_sum,
                                              bool reset) {
  const int64_t saved = split_offset(p, plan, at.b, at.split, at.channel);
  for (int64_t part = 0; part < plan.pieces; ++part) {
    const auto [n0, n, live] = scan_part(p, plan, at, part);
    if (!live) continue;
    if (plan.pieces > 1) {
      load_A(A, p, at.channel, n);
      load_items(state, carry + saved + n, 1, 0, p.dstate - n);
    }
    // decay_sum of the piece that the lane saw: lanes without states in the first piece have none in later ones
    T decay[scan_held];
#pragma unroll
    for (int i = 0; i < scan_held; ++i) decay[i] = reset ? T(0) : exp2_of(decay_sum * A[i]);
    store_items(s.decay + saved + n, decay, 1, 0, p.dstate - n);
    store_items(s.local + saved + n, state, 1, 0, p.dstate - n);
  }
}

// One thread a state: walks over the splits, forwards in time or backwards. Nothing enters the first.
template <class T>
__global__ void __launch_bounds__(scan_threads)
    combine_splits_kernel(const SelectiveScanInputs p, const ScanPlan plan, const ScanSplits<T> s, bool backwards) {
  const int64_t index = int64_t(blockIdx.x) * scan_threads + threadIdx.x, states = p.dim * p.dstate;
  if (index >= p.batch * states) return;
  T state = 0;
  for (int64_t i = 0; i < plan.splits; ++i) {
    const int64_t split = backwards ? plan.splits - 1 - i : i, at = (index / states * plan.splits + split) * states + index % states;
    const T next = s.decay[at] * state + s.local[at];
    s.entering[at] = state;
    state = next;
  }
}

inline int64_t scan_blocks_for(int64_t count) { return (count + scan_threads - 1) / scan_threads; }

// Scratch for the states between tiles, null where they stay in registers.
template <class T>
T* carry_scratch(const SelectiveScanInputs& p, const ScanPlan& plan, const Context& context) {
  return plan.pieces > 1 ? context.scratch<T>(p.batch * plan.splits * p.dim * p.dstate) : nullptr;
}

// What enters each split, where there are several: summary(s) launches the pass that finds decay and local state.
template <class T, class F>
ScanSplits<T> enter_splits(const SelectiveScanInputs& p, const ScanPlan& plan, const char* name, bool backwards, const Context& context,
                           F&& summary) {
  if (plan.splits <= 1 || p.dstate == 0) return {};
  const int64_t numbers = p.batch * plan.splits * p.dim * p.dstate;
  const ScanSplits<T> s{context.scratch<T>(numbers), context.scratch<T>(numbers), context.scratch<T>(numbers)};
  summary(s);
  launch(context, name, combine_splits_kernel<T>, scan_blocks_for(p.batch * p.dim * p.dstate), scan_threads, 0, p, plan, s, backwards);
  return s;
}

// ---- states of any dtype and strides ----

inline int64_t state_rows(const SelectiveScanInputs& p) { return p.cu_seqlens ? p.num_sequences : p.batch; }

// to = from, or 0; `empty_only`: for sequences without a token, whose state only passes through.
__global__ void __launch_bounds__(scan_threads) inline copy_states_kernel(const SelectiveScanInputs p, const View<3> from, const View<3> to,
                                                                          int64_t count, bool empty_only) {
  const int64_t index = int64_t(blockIdx.x) * scan_threads + threadIdx.x;
  if (index >= count) return;
  const int64_t n = index % p.dstate, channel = index / p.dstate % p.dim, row = index / p.dstate / p.dim;
  if (empty_only && (p.cu_seqlens ? load_index(p.cu_seqlens, row) != load_index(p.cu_seqlens, row + 1) : p.seqlen > 0)) return;
  store_at(to, from ? load_at<double>(from, row, channel, n) : 0.0, row, channel, n);
}

inline void copy_states(const SelectiveScanInputs& p, const View<3>& from, const View<3>& to, bool empty_only, const Context& context) {
  const int64_t count = state_rows(p) * p.dim * p.dstate;
  launch(context, "selective_scan_copy_states", copy_states_kernel, scan_blocks_for(count), scan_threads, 0, p, from, to, count,
         empty_only);
}

inline void pass_through(const SelectiveScanInputs& p, const View<3>& from, const View<3>& to, const Context& context) {
  if (to && (p.cu_seqlens || p.seqlen == 0)) copy_states(p, from, to, true, context);
}

// The view itself where it is dense and of type T, else one of scratch memory (not filled).
template <class T>
View<3> as_dense(const SelectiveScanInputs& p, const View<3>& view, const Context& context) {
  View<3> dense;
  if (!view) return dense;
  dense.dtype = accumulate_tag<T>;
  dense.stride[0] = p.dim * p.dstate;
  dense.stride[1] = p.dstate;
  dense.stride[2] = 1;
  bool same = view.dtype == dense.dtype;
  const int64_t sizes[] = {state_rows(p), p.dim, p.dstate};
  for (int axis = 0; axis < 3; ++axis) same = same && (sizes[axis] <= 1 || view.stride[axis] == dense.stride[axis]);
  dense.data = same ? view.data : context.scratch<T>(state_rows(p) * p.dim * p.dstate);
  return dense;
}
template <class T>
View<3> dense_input(const SelectiveScanInputs& p, const View<3>& view, const Context& context) {
  const View<3> dense = as_dense<T>(p, view, context);
  if (dense.data != view.data) copy_states(p, view, dense, false, context);
  return dense;
}

}  // namespace mamba::cuda
