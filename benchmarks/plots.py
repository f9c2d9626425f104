"""Pictures of saved results: the scan's time by seqlen and dstate, peers and limit beside, logarithmic axes."""

import json
import re

from .harness import RESULTS

LIMIT = "% of arithmetic limit"
LIMIT_LINE = "limit of the machine (arithmetic)"
STYLES = {"mamba_ops": "o-", LIMIT_LINE: "--"}


def scan_rows():
    """(shape by name, row) of the float32, channel-last rows with the fewest threads."""
    path = RESULTS / "selective_scan.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    fewest = min((row["threads"] for row in rows), default=1)
    for row in rows:
        job, _, shape = row["job"].partition(" · ")
        if row["threads"] == fewest and shape.endswith("float32, channel-last"):
            yield {"job": job, **{name: int(value) for name, value in re.findall(r"(\w+) (\d+)", shape)}}, row


def lines(along, fixed):
    """{job: {candidate: [(x, ms)]}} with the limit as one more candidate; x is the shape's number called `along`."""
    found = {}
    for shape, row in scan_rows():
        if any(shape.get(name) != value for name, value in fixed.items()):
            continue
        candidates = found.setdefault(shape["job"], {})
        candidates.setdefault(row["candidate"], []).append((shape[along], row["min_ms"]))
        if row["candidate"] == "mamba_ops" and LIMIT in row["notes"]:
            limit = row["min_ms"] * row["notes"][LIMIT] / 100
            candidates.setdefault(LIMIT_LINE, []).append((shape[along], limit))
    return found


def draw():
    """Writes scan_by_seqlen.png and scan_by_dstate.png; without matplotlib or results it says so."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no plots are drawn")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    pictures = {
        "seqlen": {"batch": 1, "dim": 1536, "dstate": 16},
        "dstate": {"batch": 1, "dim": 1536, "seqlen": 2048},
    }
    for along, fixed in pictures.items():
        jobs = lines(along, fixed)
        if not jobs:
            print(f"no saved rows to plot against {along}: run python -m benchmarks --save selective_scan")
            continue
        figure, axes = plt.subplots(1, len(jobs), figsize=(6 * len(jobs), 4.5), squeeze=False, layout="constrained")
        names = dict.fromkeys(name for candidates in jobs.values() for name in candidates)
        colours = {name: f"C{position}" for position, name in enumerate(names)} | {LIMIT_LINE: "black"}
        for axis, (job, candidates) in zip(axes[0], jobs.items()):
            for name, points in candidates.items():
                line = dict(label=name, color=colours[name], linewidth=2 if name == "mamba_ops" else 1)
                axis.plot(*zip(*sorted(points)), STYLES.get(name, "s:"), **line)
            ticks = sorted({x for points in candidates.values() for x, _ in points})
            axis.set(xscale="log", yscale="log", xlabel=along, ylabel="ms", title=f"selective_scan, {job}")
            axis.set_xticks(ticks, map(str, ticks), minor=False)
            axis.minorticks_off()
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8)
        shape = ", ".join(f"{name} {value}" for name, value in fixed.items())
        figure.suptitle(f"{shape}, float32, one thread", fontsize=10)
        path = RESULTS / f"scan_by_{along}.png"
        figure.savefig(path, dpi=110)
        plt.close(figure)
        print(f"wrote {path}")
