#include "params/threshold_backtest.h"

#include "ops/check.h"

namespace mamba {
namespace {

// On CPU the contents of the thresholds are checked too.
void check_thresholds(const Checker& check, const Tensor& thresholds) {
  check.dims("thresholds", thresholds, 1, "(num_thresholds,)");
  if (thresholds.scalar_type() != ScalarType::Double)
    fail(check.op(), ": thresholds must be float64, got ", dtype_name(thresholds.scalar_type()));
  check.device("thresholds", thresholds);
  if (!thresholds.is_cpu()) return;
  const View<1> view = view_of<1>(thresholds);
  for (int64_t i = 0; i < thresholds.size(0); ++i)
    if (!(*view.at<double>(i) >= 0)) fail(check.op(), ": thresholds must be at least 0, got ", *view.at<double>(i), " at position ", i);
}

using Results = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Results threshold_backtest(Tensor probs, Tensor price_now, Tensor price_later, Tensor thresholds, double cost, int64_t ddof,
                           bool return_pnl) {
  const Checker check("threshold_backtest", "price_now", price_now);
  check.dims("price_now", price_now, 1, "(count,)");
  ThresholdBacktest params{};
  params.count = price_now.size(0);
  check.shape("probs", probs, {{"count", params.count}});
  check.floating("probs", probs);
  check.shape("price_later", price_later, {{"count", params.count}});
  check.same_dtype("price_later", price_later);
  if (!(cost >= 0)) fail(check.op(), ": cost must be at least 0, got ", cost);
  if (ddof < 0) fail(check.op(), ": ddof must be at least 0, got ", ddof);
  check_thresholds(check, thresholds);
  params.num_thresholds = thresholds.size(0);
  params.cost = cost;
  params.ddof = ddof;
  params.probs = view_of<1>(probs);
  params.price_now = view_of<1>(price_now);
  params.price_later = view_of<1>(price_later);
  params.thresholds = view_of<1>(thresholds);

  const std::vector<int64_t> shape{params.num_thresholds};
  Tensor n_trades = empty(probs, shape, ScalarType::Long);
  Tensor mean_ret = empty(probs, shape, ScalarType::Double), std_ret = empty(probs, shape, ScalarType::Double);
  Tensor sharpe = empty(probs, shape, ScalarType::Double), hit_rate = empty(probs, shape, ScalarType::Double);
  Tensor total_pnl = empty(probs, shape, ScalarType::Double), bad = empty(probs, {2}, ScalarType::Long);
  Tensor pnl = empty(price_now, return_pnl ? std::vector<int64_t>{params.num_thresholds, params.count} : std::vector<int64_t>{0},
                     price_now.scalar_type());
  params.n_trades = view_of<1>(n_trades);
  params.mean_ret = view_of<1>(mean_ret);
  params.std_ret = view_of<1>(std_ret);
  params.sharpe = view_of<1>(sharpe);
  params.hit_rate = view_of<1>(hit_rate);
  params.total_pnl = view_of<1>(total_pnl);
  params.bad = view_of<1>(bad);
  if (return_pnl) params.pnl = view_of<2>(pnl);
  MAMBA_RUN(threshold_backtest, params, probs);
  return {n_trades, mean_ret, std_ret, sharpe, hit_rate, total_pnl, pnl, bad};
}

}  // namespace

MAMBA_REGISTER_KERNELS(m) { m.impl("threshold_backtest", TORCH_BOX(&threshold_backtest)); }

}  // namespace mamba
