// Back-test of several thresholds in one pass over the data. A block of rows is turned into profits and distances from one half, in f64;
// from these, still in the first-level cache, come every threshold's statistics, shifted by the block's first traded value and centred.
// Blocks of a group are merged in order, groups in a tree; both depend on the number of rows only.
#include "params/threshold_backtest.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace mamba::cpu::MAMBA_CPU_LEVEL {
namespace {

constexpr int64_t block_rows = 1024, group_rows = 32 * block_rows;

class Backtest {
 public:
  using V = Vec<double>;
  static constexpr int vl = Simd<double>::width;

  explicit Backtest(const ThresholdBacktest& params)
      : p(params), groups((p.count + group_rows - 1) / group_rows), trades(groups * p.num_thresholds), bad(groups) {}

  void run() const {
    parallel_for(groups, [&](int64_t begin, int64_t end) {
      const Scratch<double> memory(3 * block_rows);
      for (int64_t group = begin; group < end; ++group) sum_group(group, memory.get());
    });
    Trades* const sums = trades.get();
    for (int64_t step = 1; step < groups; step *= 2)
      for (int64_t group = 0; group + step < groups; group += 2 * step)
        for (int64_t i = 0; i < p.num_thresholds; ++i) {
          Trades& sum = sums[group * p.num_thresholds + i];
          sum = merge(sum, sums[(group + step) * p.num_thresholds + i]);
        }
    for (int64_t i = 0; i < p.num_thresholds; ++i)
      finish_backtest(p, i, groups ? sums[i] : Trades{}, [](double x) { return __builtin_sqrt(x); });
    BadRows rows;
    for (int64_t group = 0; group < groups; ++group) rows = merge(rows, bad.get()[group]);
    *p.bad.at<int64_t>(0) = rows.count;
    *p.bad.at<int64_t>(1) = rows.first;
  }

 private:
  void sum_group(int64_t group, double* memory) const {
    Trades* const sums = trades.get() + group * p.num_thresholds;
    for (int64_t i = 0; i < p.num_thresholds; ++i) sums[i] = Trades{};
    BadRows rows;
    const int64_t last = (group + 1) * group_rows < p.count ? (group + 1) * group_rows : p.count;
    for (int64_t begin = group * group_rows; begin < last; begin += block_rows) {
      const int count = static_cast<int>(last - begin < block_rows ? last - begin : block_rows);
      double *const distance = memory, *const profit = memory + block_rows;
      rows = merge(rows, prepare(begin, count, distance, profit, memory + 2 * block_rows));
      for (int64_t i = 0; i < p.num_thresholds; ++i) {
        const double threshold = *p.thresholds.at<double>(i);
        sums[i] = merge(sums[i], sum_block(threshold, count, distance, profit));
        if (p.pnl) write_profits(i, begin, threshold, count, distance, profit);
      }
    }
    bad.get()[group] = rows;
  }

  static void read(double* to, const View<1>& view, int64_t begin, int count) {
    dispatch_floating(view.dtype, [&](auto tag) __attribute__((always_inline)) {
      const auto* const from = view.template at<typename decltype(tag)::type>(begin);
      const int64_t step = view.stride[0];
      for (int i = 0; i < count; i += vl) {
        const bool whole = step == 1 && i + vl <= count;
        store(to + i, whole ? load_as<double>(from + i) : load_partial<double>(from + i * step, count - i < vl ? count - i : vl, step));
      }
    });
  }

  // distance = |prob - 1/2|, profit = +-(later - now) - cost, whole vectors; rows with a NaN and those behind the last have distance
  // -infinity, so that they never trade.
  BadRows prepare(int64_t begin, int count, double* distance, double* profit, double* now) const {
    read(distance, p.probs, begin, count);
    read(profit, p.price_later, begin, count);
    read(now, p.price_now, begin, count);
    BadRows rows;
    const V never = broadcast(-__builtin_inf());
    for (int i = 0; i < count; i += vl) {
      const V prob = load(distance + i), later = load(profit + i), before = load(now + i);
      const IntVec<double> fine = IntVec<double>(prob == prob) & IntVec<double>(later == later) & IntVec<double>(before == before);
      const V change = later - before, side = select(IntVec<double>(prob > 0.5), change, -change);
      store(distance + i, select(fine, abs(prob - 0.5), never));
      store(profit + i, side - p.cost);
      for (int lane = 0; !all(fine) && lane < vl && i + lane < count; ++lane)
        if (!fine[lane]) rows = merge(rows, BadRows{1, begin + i + lane});
    }
    for (int i = count; i % vl != 0; ++i) distance[i] = never[0];
    return rows;
  }

  static bool all(IntVec<double> mask) {
    auto every = mask[0];
    for (int lane = 1; lane < vl; ++lane) every &= mask[lane];
    return every != 0;
  }

  static Trades sum_block(double threshold, int count, const double* distance, const double* profit) {
    int first = 0;
    while (first < count && !(distance[first] > threshold)) ++first;
    Trades trades;
    if (first == count) return trades;
    const double shift = profit[first];
    const int begin = first / vl * vl;
    V sums = zero<double>();
    IntVec<double> traded{}, hits{};  // minus their numbers
    for (int i = begin; i < count; i += vl) {
      const IntVec<double> trade = load(distance + i) > threshold;
      const V value = load(profit + i);
      sums = sums + select(trade, value - shift, zero<double>());
      traded = traded + trade;
      hits = hits + (trade & IntVec<double>(value > 0.0));
    }
    for (int lane = 0; lane < vl; ++lane) {
      trades.n -= static_cast<double>(traded[lane]);
      trades.hits -= static_cast<double>(hits[lane]);
    }
    const double sum_of_shifted = sum(sums), mean = sum_of_shifted / trades.n;
    V squares = zero<double>();
    for (int i = begin; i < count; i += vl) {
      const V rest = (load(profit + i) - shift) - mean;
      squares = squares + select(IntVec<double>(load(distance + i) > threshold), rest * rest, zero<double>());
    }
    trades.mean = shift + mean;
    trades.squares = sum(squares);
    trades.total = trades.n * shift + sum_of_shifted;
    return trades;
  }

  void write_profits(int64_t row, int64_t begin, double threshold, int count, const double* distance, const double* profit) const {
    dispatch_floating(p.pnl.dtype, [&](auto tag) __attribute__((always_inline)) {
      auto* const to = p.pnl.template at<typename decltype(tag)::type>(row, begin);
      for (int i = 0; i < count; i += vl) {
        const V value = select(IntVec<double>(load(distance + i) > threshold), load(profit + i), zero<double>());
        if (i + vl <= count)
          store_as(to + i, value);
        else
          store_partial(to + i, value, count - i);
      }
    });
  }

  const ThresholdBacktest& p;
  const int64_t groups;
  const Scratch<Trades> trades;  // (groups, thresholds)
  const Scratch<BadRows> bad;
};

}  // namespace

void threshold_backtest(const ThresholdBacktest& params) { Backtest(params).run(); }

}  // namespace mamba::cpu::MAMBA_CPU_LEVEL
