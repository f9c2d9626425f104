"""threshold_backtest: statistics, numbers, NaN policies, layouts, determinism, errors."""

import json
from itertools import product

import checks
import pytest
import torch
import vectors

import mamba_ops
from mamba_ops import testing
from mamba_ops.ops.threshold_backtest import Backtest
from mamba_ops.reference.threshold_backtest import example_inputs
from mamba_ops.reference.threshold_backtest import threshold_backtest as reference

STATISTICS = Backtest._fields[:6]


def call(backend):
    """The public function over the backend's operator, with the matrix, rows with a NaN skipped."""

    def function(probs, price_now, price_later, thresholds, cost, ddof=0):
        thresholds = torch.as_tensor(thresholds, dtype=torch.float64, device=probs.device)
        return backend.op("threshold_backtest")(probs, price_now, price_later, thresholds, cost, ddof, True)

    return function


def check(backend, inputs, rtol=1e-10):
    *found, pnl, bad = call(backend)(**inputs)
    *expected, wanted = reference(**inputs)
    assert torch.equal(found[0], expected[0]) and found[0].dtype == torch.int64
    for name, value, want in zip(STATISTICS[1:], found[1:], expected[1:]):
        assert value.dtype == torch.float64
        testing.assert_close(value, want, rtol=rtol, what=name)
    assert pnl.dtype == inputs["price_now"].dtype
    assert torch.equal(pnl, wanted.to(pnl.dtype))
    return bad


# ---- agrees with the reference and the vector ----


@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 9, 1023, 1024, 1025, 5000])
def test_every_number_of_rows(backend, dtype, count):
    for ddof in (0, 1):
        assert check(backend, {**example_inputs(dtype=dtype, count=count), "ddof": ddof}).tolist() == [0, -1]


@pytest.mark.parametrize("count", [32768, 32769, 100_000])
def test_several_groups_of_blocks(backend, count):
    check(backend, example_inputs(count=count, dtype=torch.float64))


def test_no_threshold(backend):
    check(backend, example_inputs(thresholds=()))


def test_many_thresholds(backend):
    check(backend, example_inputs(thresholds=[i / 200 for i in range(100)], count=300))


def test_probabilities_of_another_dtype(backend):
    inputs = example_inputs(dtype=torch.float64)
    for dtype in checks.DTYPES:
        check(backend, {**inputs, "probs": inputs["probs"].to(dtype)})


def test_agrees_with_vector(backend):
    stored = json.loads((vectors.DATA / "backtest.json").read_text())
    for case in stored["cases"]:
        probs, now, later = (
            torch.tensor(case[name], dtype=torch.float64) for name in ("probs", "prices_t", "prices_kt")
        )
        *found, pnl, _ = call(backend)(probs, now, later, case["thresholds"], stored["cost"])
        expected = torch.tensor(case["stats"], dtype=torch.float64).T
        for name, value, want in zip(stored["columns"], found, expected):
            testing.assert_close(value.double(), want, rtol=1e-10, what=name)
        testing.assert_close(pnl, torch.tensor(case["pnl"], dtype=torch.float64), rtol=1e-10)
        assert torch.equal(pnl != 0, torch.tensor(case["traded"]).bool())


# ---- numbers ----


@pytest.mark.parametrize("count", [1, 3, 1000, 70_000])
@pytest.mark.parametrize("change", [0.1, 1 / 3, 1e8 / 7])
def test_equal_profits_have_no_variance(backend, count, change):
    now = torch.zeros(count, dtype=torch.float64)
    inputs = dict(probs=torch.full((count,), 0.9), price_now=now, price_later=now + change)
    found = Backtest(*call(backend)(**inputs, thresholds=[0.0], cost=0.1)[:6], None, None)
    assert found.n_trades.item() == count and found.mean_ret.item() == change - 0.1
    assert found.std_ret.item() == 0 and found.sharpe.item() == 0


def test_no_cancellation(backend):
    """A deviation of 1e-6 beside profits of 1e6."""
    spread = torch.tensor([-1e-6, 1e-6], dtype=torch.float64).repeat(20_000)
    now = torch.zeros(40_000, dtype=torch.float64)
    inputs = dict(probs=torch.full((40_000,), 0.9), price_now=now, price_later=1e6 + spread)
    found = call(backend)(**inputs, thresholds=[0.0], cost=0.0)
    testing.assert_close(found[2], torch.tensor([1e-6], dtype=torch.float64), rtol=1e-3)


def test_direction_and_borders(backend):
    """0.5 never trades at threshold 0, a distance equal to the threshold does not either; hits are after cost."""
    probs = torch.tensor([0.5, 0.75, 0.25, 0.75, 1.0, 0.0])
    now = torch.full((6,), 10.0)
    later = torch.tensor([99.0, 11.0, 11.0, 10.1, 10.0, 9.0])
    found = call(backend)(probs, now, later, [0.0, 0.25, 0.5], 0.5)
    assert found[0].tolist() == [5, 2, 0]
    assert found[4].tolist() == [2 / 5, 1 / 2, 0]
    expected = [[0, 0.5, -1.5, -0.4, -0.5, 0.5], [0, 0, 0, 0, -0.5, 0.5], [0] * 6]
    testing.assert_close(found[6], torch.tensor(expected))


def test_degrees_of_freedom(backend):
    probs, now = torch.full((4,), 0.9), torch.zeros(4)
    later = torch.tensor([1.0, 2.0, 3.0, 6.0])
    for ddof, variance in ((0, 14 / 4), (1, 14 / 3), (3, 14), (4, 0), (9, 0)):
        found = call(backend)(probs, now, later, [0.0], 0.0, ddof)
        testing.assert_close(found[2], torch.tensor([variance**0.5], dtype=torch.float64))


# ---- NaN ----


@pytest.mark.parametrize("name", ["probs", "price_now", "price_later"])
@pytest.mark.parametrize("at", [[0], [1500, 40_000], [69_999], list(range(70_000))])
def test_rows_with_a_nan(backend, name, at):
    inputs = example_inputs(count=70_000)
    inputs[name][at] = float("nan")
    assert check(backend, inputs).tolist() == [len(at), at[0]]


def test_nan_policies():
    inputs = example_inputs()
    clean = mamba_ops.threshold_backtest(**inputs)
    assert clean.n_skipped.item() == 0 and clean.pnl is None
    inputs["price_later"][[7, 9]] = float("nan")
    text = r"threshold_backtest: price_later must not be NaN, got NaN at index 7 \(2 such rows in all"
    with pytest.raises(ValueError, match=text):
        mamba_ops.threshold_backtest(**inputs)
    found = mamba_ops.threshold_backtest(**inputs, nan_policy="skip", return_pnl=True)
    keep = [i for i in range(50) if i not in (7, 9)]
    short = {k: v[keep] if torch.is_tensor(v) else v for k, v in inputs.items()}
    expected = mamba_ops.threshold_backtest(**short, return_pnl=True)
    assert found.n_skipped.item() == 2
    assert torch.equal(found.n_trades, expected.n_trades) and torch.equal(found.pnl[:, keep], expected.pnl)
    assert not found.pnl[:, [7, 9]].any()
    for name in STATISTICS[1:]:
        testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-12)


def test_skipping_does_not_wait():
    """The whole function traces without a value being read."""
    inputs = example_inputs(count=40)
    torch._dynamo.reset()
    compiled = torch.compile(lambda **i: mamba_ops.threshold_backtest(**i, nan_policy="skip")[:7], fullgraph=True)
    thresholds = torch.tensor(inputs.pop("thresholds"), dtype=torch.float64)
    for found, expected in zip(
        compiled(**inputs, thresholds=thresholds), mamba_ops.threshold_backtest(**inputs, thresholds=thresholds)
    ):
        assert torch.equal(found, expected)


# ---- layouts, opcheck, determinism, levels ----


@pytest.mark.parametrize("name", ["probs", "price_now", "price_later", "thresholds"])
def test_strides(backend, name):
    inputs = example_inputs(count=2000)
    inputs["thresholds"] = torch.tensor(inputs["thresholds"], dtype=torch.float64)
    expected = call(backend)(**inputs)
    for _, view in testing.strided_variants(inputs[name]):
        assert all(map(torch.equal, call(backend)(**{**inputs, name: view}), expected))


def test_opcheck(backend):
    for dtype, return_pnl in product((torch.float64, torch.bfloat16), (False, True)):
        inputs = example_inputs(dtype=dtype)
        thresholds = torch.tensor(inputs["thresholds"], dtype=torch.float64)
        arguments = (*(inputs[k] for k in ("probs", "price_now", "price_later")), thresholds, 0.25, 0, return_pnl)
        torch.library.opcheck(backend.op("threshold_backtest").default, arguments)


def test_bitwise_repeatable_for_any_number_of_threads(backend):
    inputs = example_inputs(count=200_000)
    expected = call(backend)(**inputs)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert all(map(torch.equal, call(backend)(**inputs), expected))


LEVEL_SCRIPT = """
import torch
from mamba_ops import threshold_backtest
from mamba_ops.reference.threshold_backtest import example_inputs, threshold_backtest as reference
from mamba_ops.testing import assert_close
for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
    for count in (1, 7, 1030, 40_001):
        inputs = example_inputs(dtype=dtype, count=count)
        inputs["probs"][count // 2] = float("nan")
        *found, skipped, pnl = threshold_backtest(**inputs, nan_policy="skip", return_pnl=True)
        *expected, wanted = reference(**inputs)
        assert skipped == 1 and torch.equal(pnl, wanted.to(dtype))
        for value, want in zip(found, expected):
            assert_close(value, want, rtol=1e-10)
"""


@pytest.mark.parametrize("level", checks.LEVELS)
def test_every_cpu_level(level):
    checks.run_at_level(level, LEVEL_SCRIPT)


# ---- error texts ----


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(price_now=torch.ones(5, 2)), r"price_now must have shape \(count,\), got \(5, 2\)"),
        (dict(price_now=torch.ones(50).int()), r"price_now must be float64, .*, got int32"),
        (dict(probs=torch.ones(49)), r"probs must have shape \(count,\) = \(50,\), got \(49,\)"),
        (dict(probs=torch.ones(50).int()), r"probs must be float64, float32, bfloat16 or float16, got int32"),
        (dict(price_later=torch.ones(51)), r"price_later must have shape \(count,\) = \(50,\), got \(51,\)"),
        (dict(price_later=torch.ones(50).double()), r"price_later must have price_now's dtype float32, got float64"),
        (dict(thresholds=torch.ones(2, 2)), r"thresholds must have shape \(num_thresholds,\), got \(2, 2\)"),
        (dict(cost=-0.5), r"cost must be at least 0, got -0.5"),
        (dict(cost=float("nan")), r"cost must be at least 0, got nan"),
        (dict(ddof=-1), r"ddof must be at least 0, got -1"),
    ],
)
def test_error_texts(change, text):
    inputs = {**example_inputs(), "nan_policy": "skip", **change}
    checks.error_text(mamba_ops.threshold_backtest, inputs, "threshold_backtest: " + text)


def test_contents_of_thresholds_are_checked():
    inputs = {**example_inputs(), "thresholds": [0.1, -0.25]}
    with pytest.raises(RuntimeError, match=r"thresholds must be at least 0, got -0.25 at position 1"):
        mamba_ops.threshold_backtest(**inputs)
    with pytest.raises(RuntimeError, match="thresholds must be at least 0, got nan at position 0"):
        mamba_ops.threshold_backtest(**{**inputs, "thresholds": [float("nan")]})


def test_unknown_policy():
    with pytest.raises(ValueError, match="nan_policy must be 'raise' or 'skip', got 'ignore'"):
        mamba_ops.threshold_backtest(**example_inputs(), nan_policy="ignore")
