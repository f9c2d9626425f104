// Back-test of several thresholds. One launch: a thread holds 16 neighbouring rows as profits and distances from one half, in f64
// registers; for every threshold it sums its trades, shifted by the first of them and centred, and the block merges its threads in a tree
// by Chan's rule. A second launch, one block a threshold, merges the blocks in a tree of fixed shape. No (threshold, row) temporary.
//
// Bytes per row, f32: 12 read; the partial sums (40 bytes for 4096 rows and threshold) do not count; the matrix, if wanted, 4 a threshold.
// Each threshold costs a tree of 5 shuffles of 5 numbers a warp for 512 rows: with 7 thresholds about half of the copy bandwidth expected.
#include "cuda/math.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vector_io.cuh"
#include "params/threshold_backtest.h"

namespace mamba::cuda {
namespace {

constexpr int backtest_threads = 256, thread_rows = 16, backtest_warps = backtest_threads / 32;
constexpr int64_t block_rows = backtest_threads * thread_rows;

__device__ __forceinline__ Trades from_lane(const Trades& own, int offset) {
  Trades other;
  other.n = __shfl_down_sync(all_lanes, own.n, offset);
  other.mean = __shfl_down_sync(all_lanes, own.mean, offset);
  other.squares = __shfl_down_sync(all_lanes, own.squares, offset);
  other.total = __shfl_down_sync(all_lanes, own.total, offset);
  other.hits = __shfl_down_sync(all_lanes, own.hits, offset);
  return other;
}

__device__ __forceinline__ BadRows from_lane(const BadRows& own, int offset) {
  BadRows other;
  other.count = __shfl_down_sync(all_lanes, own.count, offset);
  other.first = __shfl_down_sync(all_lanes, own.first, offset);
  return other;
}

// Over the threads of the block, neighbours first; thread 0 gets the result. Every thread calls it.
template <class Part>
__device__ __forceinline__ Part merge_block(Part part) {
  struct Parts {
    Part warp[backtest_warps];
  };
  auto& shared = static_shared<Parts>();
  for (int offset = 1; offset < 32; offset *= 2) {  // a lane that is no multiple of 2 offset gets what nobody reads
    const Part other = from_lane(part, offset);
    part = merge(part, other);
  }
  __syncthreads();  // the reader of the previous call is done
  if (threadIdx.x % 32 == 0) shared.warp[threadIdx.x / 32] = part;
  __syncthreads();
  Part sum;
  if (threadIdx.x == 0)
    for (int warp = 0; warp < backtest_warps; ++warp) sum = merge(sum, shared.warp[warp]);
  return sum;
}

__device__ __forceinline__ Trades sum_rows(double threshold, const double (&distance)[thread_rows], const double (&profit)[thread_rows]) {
  Trades trades;
  double shift = 0, sum = 0;
#pragma unroll
  for (int i = 0; i < thread_rows; ++i) {
    if (!(distance[i] > threshold)) continue;
    if (trades.n == 0) shift = profit[i];
    trades.n += 1;
    sum += profit[i] - shift;
    trades.hits += profit[i] > 0 ? 1 : 0;
  }
  if (trades.n == 0) return trades;
  const double mean = sum / trades.n;
#pragma unroll
  for (int i = 0; i < thread_rows; ++i) {
    const double rest = (profit[i] - shift) - mean;
    if (distance[i] > threshold) trades.squares += rest * rest;
  }
  trades.mean = shift + mean;
  trades.total = trades.n * shift + sum;
  return trades;
}

__device__ __forceinline__ void load_rows(double (&to)[thread_rows], const View<1>& view, int64_t begin, int64_t count) {
  load_items(to, view.data, view.dtype, begin * view.stride[0], view.stride[0], count);
}

// partial: (num_thresholds, blocks); bad: (blocks)
__global__ void __launch_bounds__(backtest_threads, 1) sum_kernel(const ThresholdBacktest p, Trades* partial, BadRows* bad) {
  const int64_t begin = int64_t(blockIdx.x) * block_rows + threadIdx.x * thread_rows, count = p.count - begin;
  double distance[thread_rows], profit[thread_rows], now[thread_rows];
  load_rows(distance, p.probs, begin, count);
  load_rows(profit, p.price_later, begin, count);
  load_rows(now, p.price_now, begin, count);
  BadRows rows;
#pragma unroll
  for (int i = 0; i < thread_rows; ++i) {  // a row with a NaN, and one behind the last, never trades
    const double prob = distance[i], change = profit[i] - now[i];
    const bool bad_row = prob != prob || profit[i] != profit[i] || now[i] != now[i];
    if (bad_row && i < count) rows = merge(rows, BadRows{1, begin + i});
    distance[i] = bad_row || i >= count ? -1.0 / 0.0 : fabs(prob - 0.5);
    profit[i] = (prob > 0.5 ? change : -change) - p.cost;
  }
  rows = merge_block(rows);
  if (threadIdx.x == 0) bad[blockIdx.x] = rows;
  for (int64_t threshold = 0; threshold < p.num_thresholds; ++threshold) {
    const double limit = *p.thresholds.at<double>(threshold);
    const Trades trades = merge_block(sum_rows(limit, distance, profit));
    if (threadIdx.x == 0) partial[threshold * gridDim.x + blockIdx.x] = trades;
    if (!p.pnl) continue;
    double values[thread_rows];
#pragma unroll
    for (int i = 0; i < thread_rows; ++i) values[i] = distance[i] > limit ? profit[i] : 0.0;
    store_items(p.pnl.data, p.pnl.dtype, p.pnl.offset(threshold, begin), values, 1, count);
  }
}

// Thread i merges the i-th share of `count` parts in order, then the block its threads.
template <class Part>
__device__ __forceinline__ Part merge_parts(const Part* parts, int64_t count) {
  const int64_t share = (count + backtest_threads - 1) / backtest_threads, begin = threadIdx.x * share;
  Part sum;
  for (int64_t i = begin; i < begin + share && i < count; ++i) sum = merge(sum, parts[i]);
  return merge_block(sum);
}

__global__ void __launch_bounds__(backtest_threads)
    merge_kernel(const ThresholdBacktest p, const Trades* partial, const BadRows* bad, int64_t blocks) {
  const int64_t threshold = blockIdx.x;
  if (threshold < p.num_thresholds) {
    const Trades trades = merge_parts(partial + threshold * blocks, blocks);
    if (threadIdx.x == 0) finish_backtest(p, threshold, trades, [](double x) { return root(x); });
  }
  if (blockIdx.x > 0) return;
  const BadRows rows = merge_parts(bad, blocks);
  if (threadIdx.x == 0) {
    *p.bad.at<int64_t>(0) = rows.count;
    *p.bad.at<int64_t>(1) = rows.first;
  }
}

}  // namespace

void threshold_backtest(const ThresholdBacktest& p, const Context& context) {
  const int64_t blocks = (p.count + block_rows - 1) / block_rows;
  Trades* const partial = context.scratch<Trades>(larger(1, blocks * p.num_thresholds));
  BadRows* const bad = context.scratch<BadRows>(larger(1, blocks));
  launch(context, "threshold_backtest", sum_kernel, blocks, backtest_threads, 0, p, partial, bad);
  launch(context, "threshold_backtest_merge", merge_kernel, larger(1, p.num_thresholds), backtest_threads, 0, p,
         static_cast<const Trades*>(partial), static_cast<const BadRows*>(bad), blocks);
}

}  // namespace mamba::cuda
