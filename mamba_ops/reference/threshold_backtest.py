"""Back-test of probability thresholds, in plain PyTorch: one threshold after the other."""

import torch


def threshold_backtest(probs, price_now, price_later, thresholds, cost, ddof=0):
    """Statistics of the trades at every threshold; a trade where |prob - 0.5| > threshold, rows with a NaN left out.

    Returns (n_trades, mean_ret, std_ret, sharpe, hit_rate, total_pnl, pnl); pnl (thresholds, rows) in float64, 0 where
    there is no trade.
    """
    probs, now, later = probs.double(), price_now.double(), price_later.double()
    fine = ~(torch.isnan(probs) | torch.isnan(now) | torch.isnan(later))
    profit = torch.where(probs > 0.5, later - now, now - later) - cost
    columns, rows = [], [profit.new_zeros(0, len(profit))]
    for threshold in torch.as_tensor(thresholds, dtype=torch.float64).tolist():
        traded = ((probs - 0.5).abs() > threshold) & fine
        columns.append(_statistics(profit[traded], ddof))
        rows.append(torch.where(traded, profit, 0)[None])
    results = torch.tensor(columns, dtype=torch.float64).reshape(-1, 6).T
    return (results[0].long(), *results[1:], torch.cat(rows))


def _statistics(values, ddof):
    n = len(values)
    if n == 0:
        return [0.0] * 6
    shifted = values - values[0]  # equal values have exactly no variance
    mean = shifted.mean()
    squares = (shifted - mean).square().sum()
    std = (squares / (n - ddof)).sqrt().item() if n > ddof else 0.0
    mean = (values[0] + mean).item()
    sharpe = mean / std if std > 0 else 0.0
    return [n, mean, std, sharpe, (values > 0).double().mean().item(), values.sum().item()]


def example_inputs(*, dtype=torch.float32, device=None, generator=None, count=50, thresholds=(0.0, 0.1, 0.4)):
    """Small random arguments for threshold_backtest: a random walk of prices, some of the probabilities exactly 1/2."""
    device = device or torch.get_default_device()

    def normal(*shape):
        return torch.randn(shape, dtype=torch.float64, generator=generator, device="cpu")

    prices = 100 + normal(count + 1).cumsum(0)
    probs = torch.sigmoid(normal(count))
    probs[::7] = 0.5
    return {
        "probs": probs.to(device=device, dtype=dtype),
        "price_now": prices[:-1].to(device=device, dtype=dtype),
        "price_later": prices[1:].to(device=device, dtype=dtype),
        "thresholds": list(thresholds),
        "cost": 0.25,
    }
