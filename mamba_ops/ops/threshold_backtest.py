"""Back-test of probability thresholds over a series of prices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .. import _autograd
from .._check import Checker, dtype_name


class Backtest(NamedTuple):
    """Results of threshold_backtest, one entry a threshold."""

    n_trades: torch.Tensor
    mean_ret: torch.Tensor
    std_ret: torch.Tensor
    sharpe: torch.Tensor
    hit_rate: torch.Tensor
    total_pnl: torch.Tensor
    n_skipped: torch.Tensor
    pnl: torch.Tensor | None


def threshold_backtest(
    probs: torch.Tensor,
    price_now: torch.Tensor,
    price_later: torch.Tensor,
    thresholds: Sequence[float] | torch.Tensor,
    cost: float,
    ddof: int = 0,
    return_pnl: bool = False,
    nan_policy: str = "raise",
) -> Backtest:
    r"""Trade every row whose probability is further than a threshold from one half, for many thresholds at once.

    .. math::
        v_i &= \pm(\mathrm{price\_later}_i - \mathrm{price\_now}_i) - \mathrm{cost}
            \quad\text{(+ where } \mathrm{probs}_i > \tfrac12 \text{)} \\
        \mathrm{trades}_\tau &= \{ i : |\mathrm{probs}_i - \tfrac12| > \mathrm{thresholds}_\tau \}

    Computed in float64, in one pass over the rows, from values shifted by a traded one: equal profits have exactly no
    variance.

    Args:
        probs: (count,), probability of a rise; float64, float32, bfloat16 or float16, any strides.
        price_now: (count,), price at the time of the decision; any of these dtypes.
        price_later: (count,), price when the trade is closed; price_now's dtype.
        thresholds: (num_thresholds,), at least 0: a sequence of numbers or a tensor.
        cost: of a trade, there and back, in units of price; at least 0.
        ddof: the variance is divided by n_trades - ddof.
        return_pnl: whether every trade's profit is wanted too.
        nan_policy: rows where one of the three is NaN: "raise" refuses them, which waits for the result; "skip" leaves
            them out and counts them, which does not.

    Returns:
        A named tuple of tensors of shape (num_thresholds,), float64 except n_trades (int64):
        n_trades; mean_ret, std_ret: of v over the trades; sharpe: mean_ret / std_ret, per trade, not annualised;
        hit_rate: share of v > 0; total_pnl: sum of v. 0 without trades; std_ret is 0 where n_trades <= ddof, and sharpe
        where std_ret is 0.
        n_skipped: (), int64: the rows left out.
        pnl: (num_thresholds, count) in price_now's dtype, v or 0 where there is no trade; None without `return_pnl`.

    Raises:
        ValueError: an unknown `nan_policy`, or a NaN with "raise"; the text names the first bad index.
        RuntimeError: a shape, dtype, device, threshold, cost or ddof does not fit; the text names the argument.

    Source: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979.

    Gradients: none.
    Autocast: leaves every tensor as it is.
    Determinism: bit-identical from run to run and for any number of threads.

    Example:
        >>> import torch, mamba_ops
        >>> probs, now = torch.tensor([0.9, 0.2, 0.6]), torch.tensor([10.0, 10.0, 10.0])
        >>> later = torch.tensor([12.0, 9.0, 9.0])
        >>> result = mamba_ops.threshold_backtest(probs, now, later, [0.0, 0.2], cost=0.5)
        >>> print(result.n_trades, result.total_pnl)
        tensor([3, 2]) tensor([0.5000, 2.0000], dtype=torch.float64)
    """
    if nan_policy not in ("raise", "skip"):
        raise ValueError(f"threshold_backtest: nan_policy must be 'raise' or 'skip', got {nan_policy!r}")
    limits = torch.as_tensor(thresholds, dtype=torch.float64, device=probs.device)
    *results, pnl, bad = torch.ops.mamba.threshold_backtest(
        probs, price_now, price_later, limits, cost, ddof, return_pnl
    )
    if nan_policy == "raise":
        count, first = bad.tolist()
        if count:
            series = {"probs": probs, "price_now": price_now, "price_later": price_later}
            name = next(name for name, values in series.items() if torch.isnan(values[first]))
            raise ValueError(
                f"threshold_backtest: {name} must not be NaN, got NaN at index {first} ({count} such rows in all; "
                "nan_policy='skip' leaves them out)"
            )
    return Backtest(*results, bad[0], pnl if return_pnl else None)


def _fake(probs, price_now, price_later, thresholds, cost, ddof=0, return_pnl=False):
    """The checks of csrc/ops/threshold_backtest.cpp."""
    check = Checker("threshold_backtest", "price_now", price_now)
    check.dims("price_now", price_now, 1, "(count,)")
    count = price_now.shape[0]
    check.shape("probs", probs, count=count)
    check.floating("probs", probs)
    check.shape("price_later", price_later, count=count)
    check.same_dtype("price_later", price_later)
    if not cost >= 0:
        check.fail(f"cost must be at least 0, got {cost:g}")
    if ddof < 0:
        check.fail(f"ddof must be at least 0, got {ddof}")
    check.dims("thresholds", thresholds, 1, "(num_thresholds,)")
    if thresholds.dtype != torch.float64:
        check.fail(f"thresholds must be float64, got {dtype_name(thresholds.dtype)}")
    check.device("thresholds", thresholds)
    size = thresholds.shape
    statistics = [thresholds.new_empty(size) for _ in range(5)]
    pnl = price_now.new_empty((size[0], count) if return_pnl else (0,))
    return probs.new_empty(size, dtype=torch.int64), *statistics, pnl, probs.new_empty((2,), dtype=torch.int64)


def self_test(reference, dtype, generator) -> None:
    """What `python -m mamba_ops` runs."""
    from ..testing import assert_close

    inputs = reference.example_inputs(dtype=dtype, generator=generator)
    *statistics, _, pnl = threshold_backtest(**inputs, return_pnl=True)
    for found, expected in zip((*statistics, pnl), reference.threshold_backtest(**inputs)):
        assert_close(found, expected, rtol=None if found is pnl else 1e-10)


def register(namespace: str) -> None:
    """The fake of the operator in `namespace`."""
    library = _autograd.library(namespace)
    torch.library.register_fake(f"{namespace}::threshold_backtest", _fake, lib=library)
