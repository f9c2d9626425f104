// What both directions of the linear recurrence share: how threads map to times and lanes, and the scan over slices of time.
//
// A block owns one run of time for some lanes and goes through it in tiles. A thread owns a slice of 8 times of one lane: it folds them
// into one link h -> a h + b, the links of a tile are scanned in shared memory, and the thread goes through its 8 times again, in
// registers, from the state that enters them. So every number is read and written once, and many loads are under way at a time although the
// recurrence is sequential. Neighbouring threads follow the memory: lanes (a warp reads 32 neighbours of one time) or time (16 bytes a
// thread).
#pragma once
#include "cuda/math.cuh"
#include "cuda/vector_io.cuh"
#include "params/linear_recurrence.h"

namespace mamba::cuda {

constexpr int recurrence_threads = 256, recurrence_times = 8;

struct RecurrencePlan {
  bool along_time;  // neighbouring threads hold neighbouring times
  int slices, lanes;
  int64_t tile, lane_blocks, blocks;

  explicit RecurrencePlan(const LinearRecurrenceInputs& p) : along_time(p.x.lane != 1 && (p.x.time == 1 || p.x.time == -1)) {
    const int64_t groups = (p.seqlen + recurrence_times - 1) / recurrence_times;
    slices = along_time ? 32 : 8;  // tiles are whole chunks, or there is one tile
    while (slices < 64 && slices * p.lanes < recurrence_threads) slices *= 2;
    while (slices > 1 && slices / 2 >= groups) slices /= 2;
    lanes = recurrence_threads / slices;
    tile = int64_t(slices) * recurrence_times;
    lane_blocks = (p.lanes + lanes - 1) / lanes;
    blocks = recurrence_runs(p) * p.rows * lane_blocks;
  }
};

struct RecurrencePlace {
  int slice, lane_thread;
  int64_t row, lane;
  bool inside;  // the lane exists
  RecurrenceRun run;

  __device__ __forceinline__ RecurrencePlace(const LinearRecurrenceInputs& p, const RecurrencePlan& plan) {
    slice = plan.along_time ? threadIdx.x % plan.slices : threadIdx.x / plan.lanes;
    lane_thread = plan.along_time ? threadIdx.x / plan.slices : threadIdx.x % plan.lanes;
    int64_t index = blockIdx.x;
    lane = index % plan.lane_blocks * plan.lanes + lane_thread;
    index /= plan.lane_blocks;
    row = index % p.rows;
    run = recurrence_run(p, index / p.rows);
    inside = lane < p.lanes;
  }
};

MAMBA_INLINE int64_t recurrence_offset(const LinearRecurrenceInputs& p, const RecurrenceView& view, int64_t row, int64_t lane) {
  return row_offset(p, view, row) + lane * view.lane;
}

// x y, where a product of infinitely many gates times a state of 0 is 0: one step after the other would not have overflowed.
template <class T>
__device__ __forceinline__ T product(T x, T y) {
  const T xy = x * y;
  return xy == xy || x != x || y != y ? xy : T(0);
}

// Some steps in a row: h becomes a h + b, or b whatever it was (cut: a segment starts among them).
template <class T>
struct Link {
  T a = 1, b = 0;
  int cut = 0;

  __device__ __forceinline__ T operator()(T h) const { return cut ? b : product(a, h) + b; }
};

template <class T>
__device__ __forceinline__ Link<T> follow(const Link<T>& first, const Link<T>& second) {
  if (second.cut) return second;
  Link<T> both;
  both.a = product(second.a, first.a);
  both.b = product(second.a, first.b) + second.b;
  both.cut = first.cut;
  return both;
}

template <class T>
struct ScannedLinks {
  Link<T> before, all;  // all ranks before one's own; all ranks
};

// Over the slices of a lane, in the order of `rank`. Every thread of the block calls it.
template <class T>
__device__ __forceinline__ ScannedLinks<T> scan_links(const Link<T>& own, int rank, int lane, const RecurrencePlan& plan) {
  struct Links {
    Link<T> at[2][recurrence_threads];
  };
  auto& shared = static_shared<Links>();
  const int place = rank * plan.lanes + lane;
  int from = 0;
  __syncthreads();  // readers of the previous call are done
  shared.at[0][place] = own;
  __syncthreads();
  for (int reach = 1; reach < plan.slices; reach *= 2) {
    Link<T> link = shared.at[from][place];
    if (rank >= reach) link = follow(shared.at[from][place - reach * plan.lanes], link);
    from ^= 1;
    shared.at[from][place] = link;
    __syncthreads();
  }
  ScannedLinks<T> result;
  if (rank > 0) result.before = shared.at[from][place - plan.lanes];
  result.all = shared.at[from][(plan.slices - 1) * plan.lanes + lane];
  return result;
}

// What a thread holds of its slice: x, g (1 outside of the run), and which of its times start a segment.
template <class S>
struct RecurrenceSlice {
  using T = Accumulate<S>;
  T x[recurrence_times], g[recurrence_times];

  __device__ __forceinline__ void load(const LinearRecurrenceInputs& p, const S* x_lane, const S* gates_lane, int64_t t, int64_t low,
                                       int64_t high) {
    load_items(x, x_lane + t * p.x.time, p.x.time, low, high);
    load_items(g, gates_lane + t * p.gates.time, p.gates.time, low, high);
  }

  __device__ __forceinline__ void open_gates(bool sigmoid_of, int64_t low, int64_t high) {
#pragma unroll
    for (int i = 0; i < recurrence_times; ++i) g[i] = i >= low && i < high ? (sigmoid_of ? sigmoid(g[i]) : g[i]) : T(1);
  }
};

__device__ __forceinline__ unsigned restarts_of(const LinearRecurrenceInputs& p, const RecurrencePlace& at, int64_t t, int64_t low,
                                                int64_t high) {
  unsigned restarts = 0;
  if (p.seq_idx && at.inside)
    for (int i = 0; i < recurrence_times; ++i)
      if (i >= low && i < high && recurrence_restarts(p, at.row, t + i)) restarts |= 1u << i;
  return restarts;
}

template <class S>
__device__ __forceinline__ Link<Accumulate<S>> fold(const RecurrenceSlice<S>& slice, unsigned restarts) {
  Link<Accumulate<S>> link;
#pragma unroll
  for (int i = 0; i < recurrence_times; ++i) {
    if (restarts >> i & 1) {
      link.b = 0;
      link.cut = 1;
    }
    link.a = product(link.a, slice.g[i]);
    link.b = slice.g[i] * link.b + slice.x[i];
  }
  return link;
}

}  // namespace mamba::cuda
