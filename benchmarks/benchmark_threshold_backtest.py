"""threshold_backtest on 10 million rows and 7 thresholds, beside the same in plain PyTorch, threshold by threshold."""

from functools import partial

import torch

import mamba_ops
from mamba_ops.reference.threshold_backtest import threshold_backtest as reference

from . import shapes
from .harness import error_of

THRESHOLDS = (0.0, 0.02, 0.05, 0.10, 0.15, 0.20, 0.25)


def by_hand(probs, now, later, thresholds, cost):
    """What people write: a mask and a few reductions for each threshold."""
    distance = (probs - 0.5).abs()
    profit = torch.where(probs > 0.5, later - now, now - later).double() - cost
    columns = []
    for threshold in thresholds:
        values = profit[distance > threshold]
        mean, std = values.mean(), values.std(correction=0)
        columns.append(torch.stack([mean, std, mean / std, (values > 0).double().mean(), values.sum()]))
    return torch.stack(columns, 1)


def run(bench, limits):
    for count in shapes.BACKTEST[bench.mode]:
        for dtype in (torch.float32, torch.float64):
            probs, now = torch.rand(count).to(dtype), (100 + torch.randn(count)).to(dtype)
            later = now + torch.randn(count).to(dtype)
            inputs = (probs, now, later, THRESHOLDS, 0.25)
            wanted = reference(*inputs)[1:6]
            target, source = torch.empty(3 * count // 2, dtype=dtype), torch.rand(3 * count // 2).to(dtype)
            candidates = {
                "Tensor.copy_": partial(target.copy_, source),
                "mamba_ops": partial(mamba_ops.threshold_backtest, *inputs),
                "mamba_ops, with the matrix": partial(mamba_ops.threshold_backtest, *inputs, return_pnl=True),
                "by hand": partial(by_hand, *inputs),
            }

            def check(name, result, wanted=wanted):
                if name == "Tensor.copy_":
                    return None
                return error_of(result if name == "by hand" else result[1:6], wanted)

            for threads in bench.threads:
                job = f"{count} rows, {len(THRESHOLDS)} thresholds, {str(dtype)[6:]}"
                rows = bench.compare("threshold_backtest", job, candidates, check, threads=threads, slow=["by hand"])
                for row in rows.values():
                    row.notes["% of copy bandwidth"] = round(100 * rows["Tensor.copy_"].min_ms / row.min_ms)
                rows["by hand"].notes["mamba_ops is faster by"] = round(
                    rows["by hand"].min_ms / rows["mamba_ops"].min_ms, 2
                )
                bench.show(rows)
