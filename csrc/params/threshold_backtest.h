// threshold_backtest: what the kernels get, and the statistics that are merged from blocks.
#pragma once

#include "common/view.h"
#include "params/kernel.h"

namespace mamba {

struct ThresholdBacktest {
  int64_t count;  // of rows
  int64_t num_thresholds;
  double cost;
  int64_t ddof;
  View<1> probs;                                           // (count)
  View<1> price_now, price_later;                          // (count), one dtype
  View<1> thresholds;                                      // (num_thresholds), f64
  View<1> n_trades;                                        // (num_thresholds), i64
  View<1> mean_ret, std_ret, sharpe, hit_rate, total_pnl;  // (num_thresholds), f64
  View<2> pnl;                                             // (num_thresholds, count), prices' dtype; may be absent
  View<1> bad;                                             // (2), i64: rows with a NaN, the first of them or -1
};

// Of the profits of some trades: number, mean, sum of squared distances from it, sum, and how many are positive.
struct Trades {
  double n = 0, mean = 0, squares = 0, total = 0, hits = 0;
};

// Chan's rule. Equal values in both parts give exactly no variance.
MAMBA_INLINE Trades merge(const Trades& a, const Trades& b) {
  if (a.n == 0) return b;
  if (b.n == 0) return a;
  Trades sum;
  const double difference = b.mean - a.mean;
  sum.n = a.n + b.n;
  sum.mean = a.mean + difference * (b.n / sum.n);
  sum.squares = a.squares + b.squares + difference * difference * (a.n * b.n / sum.n);
  sum.total = a.total + b.total;
  sum.hits = a.hits + b.hits;
  return sum;
}

struct BadRows {
  int64_t count = 0, first = -1;
};

// `b` stands behind `a`.
MAMBA_INLINE BadRows merge(const BadRows& a, const BadRows& b) { return {a.count + b.count, a.count ? a.first : b.first}; }

// Statistics of one threshold; without trades, and the Sharpe ratio without variance: 0.
template <class Root>
MAMBA_INLINE void finish_backtest(const ThresholdBacktest& p, int64_t threshold, const Trades& trades, Root&& root) {
  const double n = trades.n, degrees = n - static_cast<double>(p.ddof);
  const double deviation = degrees > 0 ? root(trades.squares / degrees) : 0;
  *p.n_trades.at<int64_t>(threshold) = static_cast<int64_t>(n);
  *p.mean_ret.at<double>(threshold) = trades.mean;
  *p.std_ret.at<double>(threshold) = deviation;
  *p.sharpe.at<double>(threshold) = deviation == 0 ? 0 : trades.mean / deviation;
  *p.hit_rate.at<double>(threshold) = n > 0 ? trades.hits / n : 0;
  *p.total_pnl.at<double>(threshold) = trades.total;
}

}  // namespace mamba

MAMBA_KERNEL(threshold_backtest, ThresholdBacktest)
