"""Trains the alpha block to say whether a price will rise, and back-tests thresholds on its probability.

    python examples/alpha_backtest.py                  # a synthetic price with a weak signal
    python examples/alpha_backtest.py --csv FILE       # your own bars

FILE is a CSV file with a header line, one bar a line, oldest first. Columns: `close` (the price, positive) is
required; `volume` is used when it is there; others are left alone. Features are made from present and past bars only.

The bars are split by time: the first part trains, the next chooses the best epoch, the last is back-tested; windows
that reach over a border, with their features or their label, are left out, and features are scaled by statistics of the
training part. A trade buys or sells one unit at the close of a bar and closes it --horizon bars later; --cost is what
that costs there and back, in units of price. The class of the best threshold by Sharpe ratio, per trade: above 1.5
deployable, 0.5 to 1.5 marginal, below that fail.
Files in --out: backtest.csv (the table), sweep.png, equity.png and model.pt.
"""

import argparse
import csv
import importlib
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from mamba_ops import threshold_backtest
from mamba_ops.layers import AlphaBlock

THRESHOLDS = (0.0, 0.02, 0.05, 0.10, 0.15, 0.20, 0.25)
PAST = 32  # bars that a feature looks back


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, help="bars: columns close and, optionally, volume")
    parser.add_argument("--bars", type=int, default=30_000, help="length of the synthetic series")
    parser.add_argument("--signal", type=float, default=0.25, help="strength of its drift beside its noise")
    parser.add_argument("--window", type=int, default=24, help="bars the block sees")
    parser.add_argument("--horizon", type=int, default=4, help="bars until a trade is closed")
    parser.add_argument("--cost", type=float, default=0.25, help="of a trade, in units of price")
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--state", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=1e-2)
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm")
    parser.add_argument("--train", type=float, default=0.6, help="share of the bars")
    parser.add_argument("--validation", type=float, default=0.2, help="share of the bars; the rest is back-tested")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/alpha_backtest"))
    settings = parser.parse_args(argv)
    for name in ("bars", "window", "horizon", "hidden", "state", "epochs", "batch"):
        if getattr(settings, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(settings, name)}")
    if not (settings.train > 0 and settings.validation > 0 and settings.train + settings.validation < 1):
        parser.error("--train and --validation must be positive and leave something to back-test")
    return settings


# ---- bars ----


def synthetic_bars(count: int, signal: float, seed: int) -> dict[str, Tensor]:
    """A price near 100 whose noise comes in clusters and has fat tails, with a hidden drift that lasts for some bars.

    The volume rises with the size of the moves. `signal` is the drift's deviation relative to the noise's.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    fat = noise[:, 0] / (noise[:, 1:5].square().mean(1) + 0.1).sqrt()
    drift, spread, price, closes, volumes = 0.0, 1.0, 100.0, [], []
    for shock, push in zip(fat.tolist(), noise[:, 5].tolist()):
        drift = 0.95 * drift + math.sqrt(1 - 0.95**2) * push
        spread = math.sqrt(0.05 + 0.85 * spread**2 + 0.08 * min(shock * shock * spread**2, 9))
        change = 0.25 * spread * (shock + signal * drift) - 0.002 * (price - 100)
        price = max(price + change, 1.0)
        closes.append(price)
        volumes.append(math.exp(0.5 * abs(change) + 0.2 * push))
    return {"close": torch.tensor(closes), "volume": torch.tensor(volumes)}


def read_bars(path: Path) -> dict[str, Tensor]:
    with open(path, newline="") as file:
        rows = csv.DictReader(file)
        names = [name for name in ("close", "volume") if name in (rows.fieldnames or ())]
        if "close" not in names:
            raise SystemExit(f"{path}: no column named close; found: {', '.join(rows.fieldnames or ['nothing'])}")
        columns: dict[str, list[float]] = {name: [] for name in names}
        for row in rows:
            for name in names:
                try:
                    value = float(row[name])
                except (TypeError, ValueError):
                    raise SystemExit(f"{path}, line {rows.line_num}: {name} is not a number: {row[name]!r}") from None
                if not math.isfinite(value) or (name == "close" and value <= 0):
                    raise SystemExit(f"{path}, line {rows.line_num}: {name} must be finite, and close positive")
                columns[name].append(value)
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}


# ---- features, labels, split ----


def features_of(bars: dict[str, Tensor]) -> Tensor:
    """(bars, features), float32: each row from that bar and the PAST bars before it; the first PAST rows are 0."""
    price = bars["close"].double().log()
    change = torch.zeros_like(price)
    change[1:] = price[1:] - price[:-1]
    series = [change]
    for span in (4, 16, PAST):
        mean = F.avg_pool1d(change[None, None], span, 1).flatten()
        series.append(F.pad(mean, (span - 1, 0)))
    size = F.avg_pool1d(change.square()[None, None], 16, 1).flatten().sqrt()
    series.append(F.pad(size, (15, 0)))
    if "volume" in bars:
        series.append(bars["volume"].double().clamp_min(1e-12).log())
    features = torch.stack(series, 1)
    features[:PAST] = 0
    return features.float()


def split_windows(count: int, settings: argparse.Namespace) -> dict[str, Tensor]:
    """For each part the bars at which its windows end. A window with its features and label stays within its part."""
    borders = [0, int(count * settings.train), int(count * (settings.train + settings.validation)), count]
    parts = {}
    for name, begin, end in zip(("train", "validation", "test"), borders, borders[1:]):
        first = begin + PAST + settings.window - 1
        parts[name] = torch.arange(first, max(first, end - settings.horizon))
        if len(parts[name]) == 0:
            raise SystemExit(
                f"the {name} part has {end - begin} bars; it needs more than {first - begin + settings.horizon}"
            )
    return parts


class Windows:
    """Features scaled by the training part, and batches of windows with their labels."""

    def __init__(self, bars: dict[str, Tensor], settings: argparse.Namespace) -> None:
        features = features_of(bars)
        self.parts = split_windows(len(features), settings)
        seen = features[PAST : int(self.parts["train"][-1]) + 1]
        self.features = ((features - seen.mean(0)) / (seen.std(0) + 1e-12)).clamp(-8, 8).to(settings.device)
        self.close = bars["close"].double()
        self.steps = torch.arange(1 - settings.window, 1)
        rises = self.close[settings.horizon :] > self.close[: -settings.horizon]
        self.labels = rises.float().to(settings.device)

    def batch(self, ends: Tensor) -> tuple[Tensor, Tensor]:
        ends = ends.to(self.features.device)
        return self.features[ends[:, None] + self.steps.to(ends.device)], self.labels[ends]


# ---- training ----


@torch.no_grad()
def probabilities(block: AlphaBlock, windows: Windows, ends: Tensor) -> Tensor:
    return torch.cat([torch.sigmoid(block(windows.batch(part)[0])[:, 0]) for part in ends.split(4096)]).cpu()


def train(block: AlphaBlock, windows: Windows, settings: argparse.Namespace) -> list[tuple[float, float]]:
    """Epochs over the training part; the block ends with the weights of the lowest validation loss.

    Returns (training loss, validation loss) of every epoch. No step waits for the device.
    """
    from tqdm import tqdm

    cuda = torch.device(settings.device).type == "cuda"
    optimizer = torch.optim.AdamW(
        block.parameters(), lr=settings.lr, weight_decay=settings.weight_decay, fused=True, capturable=cuda
    )
    generator = torch.Generator().manual_seed(settings.seed)
    ends, curve, best = windows.parts["train"], [], (math.inf, {})
    steps = settings.epochs * math.ceil(len(ends) / settings.batch)
    with tqdm(total=steps, unit="step", mininterval=0.5 if sys.stderr.isatty() else 15) as bar:
        for _ in range(settings.epochs):
            losses = []
            for part in ends[torch.randperm(len(ends), generator=generator)].split(settings.batch):
                input, labels = windows.batch(part)
                loss = F.binary_cross_entropy_with_logits(block(input)[:, 0], labels)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(block.parameters(), settings.clip)
                optimizer.step()
                losses.append(loss.detach())
                bar.update()
            held = windows.parts["validation"]
            probs = probabilities(block, windows, held)
            validation = F.binary_cross_entropy(probs, windows.labels[held.to(windows.labels.device)].cpu()).item()
            curve.append((torch.stack(losses).mean().item(), validation))
            bar.set_postfix_str(f"loss {curve[-1][0]:.4f}, validation {validation:.4f}")
            if validation < best[0]:
                best = validation, {name: value.clone() for name, value in block.state_dict().items()}
    block.load_state_dict(best[1])
    return curve


# ---- back-test ----


def verdict(sharpe: float) -> str:
    return "deployable" if sharpe > 1.5 else "marginal" if sharpe >= 0.5 else "fail"


def write_table(result, path: Path) -> None:
    names = result._fields[:6]
    rows = list(zip(THRESHOLDS, *(getattr(result, name).tolist() for name in names)))
    print(f"{'threshold':>9} " + " ".join(f"{name:>10}" for name in names))
    for threshold, trades, *others in rows:
        print(f"{threshold:>9.2f} {trades:>10} " + " ".join(f"{value:>10.4f}" for value in others))
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([("threshold", *names), *rows])


def draw(result, out: Path) -> None:
    """equity.png: profit summed up over the test part, a line a threshold; sweep.png: statistics over thresholds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for threshold, profits, trades in zip(THRESHOLDS, result.pnl, result.n_trades.tolist()):
        axes.plot(profits.double().cumsum(0), linewidth=0.9, label=f"{threshold:.2f}: {trades} trades")
    axes.axhline(0, color="black", linewidth=0.5)
    axes.set(xlabel="bar of the test part", ylabel="profit after cost, units of price")
    axes.legend(title="threshold")
    figure.savefig(out / "equity.png", dpi=120, bbox_inches="tight")
    pyplot.close(figure)

    figure, panels = pyplot.subplots(1, 3, figsize=(12, 3.6))
    for axes, name in zip(panels, ("sharpe", "hit_rate", "n_trades")):
        axes.plot(THRESHOLDS, getattr(result, name), marker="o")
        axes.set(xlabel="threshold", title=name.replace("_", " "))
    for level, color in ((0.5, "tab:orange"), (1.5, "tab:green")):
        panels[0].axhline(level, color=color, linestyle="--", linewidth=0.8)
    figure.savefig(out / "sweep.png", dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def require_packages() -> None:
    """Says what is missing before the training, not after it."""
    for name in ("tqdm", "matplotlib"):
        try:
            importlib.import_module(name)
        except ImportError:
            raise SystemExit(f"this example needs the package {name}: pip install 'mamba_ops[examples]'") from None


def main(argv: list[str] | None = None) -> dict[str, object]:
    """Trains, back-tests, writes the files; returns the results, the losses of the epochs and the best threshold."""
    settings = parse_arguments(argv)
    require_packages()
    torch.manual_seed(settings.seed)
    bars = read_bars(settings.csv) if settings.csv else synthetic_bars(settings.bars, settings.signal, settings.seed)
    windows = Windows(bars, settings)
    block = AlphaBlock(windows.features.shape[1], settings.hidden, settings.state, device=settings.device)
    sizes = ", ".join(f"{name} {len(ends):,}" for name, ends in windows.parts.items())
    print(f"{len(windows.close):,} bars of {windows.features.shape[1]} features; windows: {sizes}")
    curve = train(block, windows, settings)

    ends = windows.parts["test"]
    result = threshold_backtest(
        probabilities(block, windows, ends),
        windows.close[ends],
        windows.close[ends + settings.horizon],
        THRESHOLDS,
        settings.cost,
        return_pnl=True,
    )
    settings.out.mkdir(parents=True, exist_ok=True)
    write_table(result, settings.out / "backtest.csv")
    best = int(torch.where(result.n_trades > 0, result.sharpe, -math.inf).argmax())
    sharpe = result.sharpe[best].item()
    trades = f"{sharpe:.3f} a trade over {int(result.n_trades[best])} trades"
    print(f"best by Sharpe ratio: threshold {THRESHOLDS[best]:.2f}, {trades}: {verdict(sharpe)}")
    draw(result, settings.out)
    torch.save(block.state_dict(), settings.out / "model.pt")
    print(f"files: {settings.out}")
    return {"result": result, "curve": curve, "best": THRESHOLDS[best], "verdict": verdict(sharpe)}


if __name__ == "__main__":
    main()
