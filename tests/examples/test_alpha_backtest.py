"""examples/alpha_backtest.py on few bars and epochs: files, table, split without a look ahead, messages."""

import csv
import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).parents[2] / "examples" / "alpha_backtest.py"
TINY = ["--epochs", "2", "--window", "6", "--hidden", "8", "--state", "4", "--batch", "64"]


@pytest.fixture(scope="module")
def example():
    specification = importlib.util.spec_from_file_location("alpha_backtest", PROGRAM)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def write_csv(path, bars, names=("time", "close", "volume")):
    columns = {"time": range(len(bars["close"])), **{name: values.tolist() for name, values in bars.items()}}
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([names, *zip(*(columns[name] for name in names))])


def test_program(example, tmp_path, capsys):
    found = example.main([*TINY, "--bars", "1500", "--out", str(tmp_path)])
    result, best = found["result"], found["best"]
    rows = list(csv.DictReader((tmp_path / "backtest.csv").read_text().splitlines()))
    assert [float(row["threshold"]) for row in rows] == list(example.THRESHOLDS)
    assert [int(row["n_trades"]) for row in rows] == result.n_trades.tolist()
    assert [float(row["sharpe"]) for row in rows] == result.sharpe.tolist()
    assert result.n_trades[0] > 0 and result.n_trades.diff().max() <= 0
    torch.testing.assert_close(result.pnl.sum(1), result.total_pnl)
    traded = result.sharpe[result.n_trades > 0]
    assert result.sharpe[example.THRESHOLDS.index(best)] == traded.max()
    assert found["verdict"] == example.verdict(traded.max().item())
    assert len(found["curve"]) == 2 and all(0 < loss < 1 for losses in found["curve"] for loss in losses)
    for name in ("equity.png", "sweep.png"):
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG" and (tmp_path / name).stat().st_size > 5000
    printed = capsys.readouterr().out
    for word in ("threshold", "n_trades", f"threshold {best:.2f}", found["verdict"], str(tmp_path)):
        assert word in printed


def test_own_bars_give_the_same(example, tmp_path):
    bars = example.synthetic_bars(1200, 0.25, 3)
    write_csv(tmp_path / "bars.csv", bars)
    found = [
        example.main([*TINY, "--out", str(tmp_path / name), *source])
        for name, source in (("a", ["--csv", str(tmp_path / "bars.csv")]), ("b", ["--csv", str(tmp_path / "bars.csv")]))
    ]
    assert found[0]["curve"] == found[1]["curve"]
    assert all(map(torch.equal, found[0]["result"][:6], found[1]["result"][:6]))
    windows = example.Windows(example.read_bars(tmp_path / "bars.csv"), example.parse_arguments([]))
    assert torch.equal(windows.close, bars["close"].double())


def test_a_strong_signal_is_found(example, tmp_path):
    """Without cost and with a strong drift, trades earn on average; the loss falls below that of guessing."""
    options = ["--signal", "1.5", "--cost", "0", "--bars", "6000", "--epochs", "3", "--window", "12"]
    found = example.main([*options, "--out", str(tmp_path)])
    assert found["curve"][-1][1] < math.log(2) - 0.01
    assert found["result"].mean_ret[0] > 0 and found["result"].hit_rate[0] > 0.52


@pytest.mark.parametrize("at", [700, 1100])
def test_no_look_ahead(example, at):
    """A change of the bars from `at` on alters no feature, label or scale that earlier windows use."""
    settings = example.parse_arguments(TINY)
    bars = example.synthetic_bars(1200, 0.25, 0)
    changed = {name: values.clone() for name, values in bars.items()}
    changed["close"][at:] *= 1.5
    changed["volume"][at:] *= 7
    before, after = (example.Windows(series, settings) for series in (bars, changed))
    assert torch.equal(example.features_of(bars)[:at], example.features_of(changed)[:at])
    for part, ends in before.parts.items():
        if at < int(ends[-1]) + settings.horizon:
            ends = ends[ends + settings.horizon < at]
        if at == 700 and part == "train":
            continue
        for values, others in zip(before.batch(ends), after.batch(ends)):
            assert torch.equal(values, others), part
        if at == 1100 and part == "train":
            assert len(ends) == len(before.parts["train"])


def test_parts_do_not_share_a_bar(example):
    settings = example.parse_arguments(TINY)
    parts = example.split_windows(1000, settings)
    used = {
        name: range(int(ends[0]) - settings.window + 1 - example.PAST, int(ends[-1]) + settings.horizon + 1)
        for name, ends in parts.items()
    }
    assert used["train"].start == 0 and used["test"].stop == 1000
    assert used["train"].stop <= used["validation"].start and used["validation"].stop <= used["test"].start


@pytest.mark.parametrize("sharpe, expected", [(2, "deployable"), (1.5, "marginal"), (0.5, "marginal"), (0.4, "fail")])
def test_verdict(example, sharpe, expected):
    assert example.verdict(sharpe) == expected


@pytest.mark.parametrize(
    "text, message",
    [
        ("time,open\n1,2\n", "no column named close; found: time, open"),
        ("close\n1\nx\n", "line 3: close is not a number: 'x'"),
        ("close,volume\n1,1\n-2,1\n", "line 3: close must be finite, and close positive"),
        ("close\n" + "1\n" * 50, "the train part has 30 bars; it needs more than"),
    ],
)
def test_messages(example, tmp_path, text, message):
    (tmp_path / "bars.csv").write_text(text)
    with pytest.raises(SystemExit, match=message):
        example.main([*TINY, "--csv", str(tmp_path / "bars.csv"), "--out", str(tmp_path)])


def test_arguments_are_checked(example, capsys):
    for options, message in ((["--window", "0"], "at least 1, got 0"), (["--train", "0.9"], "leave something")):
        with pytest.raises(SystemExit):
            example.parse_arguments(options)
        assert message in capsys.readouterr().err


def test_missing_package_is_named(example, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r"needs the package matplotlib: pip install 'mamba_ops\[examples\]'"):
        example.main([*TINY, "--bars", "400"])
