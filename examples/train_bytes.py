"""Trains a byte-level language model on real English text and reports its bits per byte on text it has not seen.

    python examples/train_bytes.py                     # Mamba, on the documentation topics that come with CPython
    python examples/train_bytes.py --text FILE         # on your own text
    python examples/train_bytes.py --arch lstm         # the baseline: a one-layer LSTM
    python examples/train_bytes.py --resume            # go on from the checkpoint in --out

The last tenth of the text is held out. What it costs the model is compared with what lzma and zlib reach on the same
bytes. Equal seed, settings and number of threads give the same loss curve bit for bit, with or without an interruption.
Files in --out: checkpoint.pt, loss.csv, loss.png and, for Mamba, model/ (config.json and model.safetensors, for
MambaLM.from_pretrained).
"""

import argparse
import hashlib
import importlib
import lzma
import math
import os
import sys
import time
import zlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mamba_ops.models import MambaConfig, MambaLM

DEFAULTS = {  # what depends on the architecture
    "mamba": {"steps": 1000, "batch": 4, "seqlen": 512, "lr": 5e-3, "weight_decay": 0.5, "width": 192, "layers": 4},
    "lstm": {"steps": 650, "batch": 16, "seqlen": 256, "lr": 3e-3, "weight_decay": 0.1, "width": 512, "layers": 1},
}
NOT_IN_CURVE = {
    "minutes",
    "out",
    "resume",
    "checkpoint_every",
    "sample",
    "window",
    "text",
}  # settings that leave the loss curve alone


class LSTMLanguageModel(nn.Module):
    """Embedding, torch.nn.LSTM, linear head: logits (batch, seqlen, 256) of the next byte."""

    def __init__(self, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, 256)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.dropout(self.lstm(self.dropout(self.embedding(input_ids)))[0]))

    def loss(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self(input_ids).flatten(0, 1), targets.flatten())


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="text file; default: the topics of pydoc_data, about 0.47 MB")
    parser.add_argument("--arch", choices=sorted(DEFAULTS), default="mamba")
    parser.add_argument("--steps", type=int, help="optimizer steps; the learning-rate schedule spans them")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="stop training after this time, finished or not"
    )
    parser.add_argument("--batch", type=int, help="sequences per step")
    parser.add_argument("--seqlen", type=int, help="bytes per sequence")
    parser.add_argument("--width", type=int, help="d_model, or the LSTM's hidden size")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--d-state", type=int, default=16, help="states per channel (Mamba)")
    parser.add_argument("--lr", type=float, help="highest learning rate")
    parser.add_argument("--warmup", type=int, help="steps of linear warm-up; default: a twentieth of --steps")
    parser.add_argument("--weight-decay", type=float)
    parser.add_argument("--dropout", type=float, default=0.15)
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path("runs/train_bytes"))
    parser.add_argument("--resume", action="store_true", help="go on from checkpoint.pt in --out, if there is one")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--window", type=int, default=65536, help="longest sequence of the held-out evaluation")
    parser.add_argument("--sample", type=int, default=300, help="bytes of text to generate at the end")
    settings = parser.parse_args(argv)
    for name, value in DEFAULTS[settings.arch].items():
        if getattr(settings, name) is None:
            setattr(settings, name, value)
    if settings.warmup is None:
        settings.warmup = settings.steps // 20
    for name in ("steps", "batch", "seqlen", "width", "layers", "threads", "checkpoint_every"):
        if getattr(settings, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(settings, name)}")
    return settings


def load_text(path: Path | None) -> bytes:
    if path is not None:
        return path.read_bytes()
    from pydoc_data.topics import topics

    return "".join(topics.values()).encode()


def split_text(text: bytes, seqlen: int) -> tuple[bytes, bytes]:
    """(training text, held-out last tenth)."""
    border = len(text) * 9 // 10
    if border <= seqlen:
        raise SystemExit(
            f"the text is too short: nine tenths of it must exceed --seqlen = {seqlen} bytes, got {border}"
        )
    return text[:border], text[border:]


def compressed_bits_per_byte(data: bytes) -> dict[str, float]:
    """What general compressors need for the data alone."""
    sizes = {
        "lzma": len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)),
        "zlib": len(zlib.compress(data, 9)),
    }
    return {name: 8 * size / len(data) for name, size in sizes.items()}


def as_tokens(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def build_model(settings: argparse.Namespace) -> nn.Module:
    if settings.arch == "lstm":
        return LSTMLanguageModel(settings.width, settings.layers, settings.dropout)
    config = MambaConfig(
        d_model=settings.width,
        n_layer=settings.layers,
        vocab_size=256,
        ssm_cfg={"d_state": settings.d_state},
        dropout=settings.dropout,
    )
    return MambaLM(config)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups for AdamW: no weight decay for norms, biases and what a layer marks by `_no_weight_decay`."""
    decayed, spared = [], []
    for parameter in model.parameters():
        spare = parameter.dim() < 2 or getattr(parameter, "_no_weight_decay", False)
        (spared if spare else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": spared, "weight_decay": 0.0}]


def learning_rate(step: int, settings: argparse.Namespace) -> float:
    """Linear warm-up to --lr, then half a cosine down to a hundredth of it at the last step."""
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    progress = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return settings.lr * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


class Training:
    """Model, optimizer, batch sampler and loss curve: all that a checkpoint holds."""

    def __init__(self, settings: argparse.Namespace, tokens: Tensor) -> None:
        torch.manual_seed(settings.seed)
        self.settings = settings
        self.tokens = tokens
        self.model = build_model(settings)
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.model, settings.weight_decay), betas=(0.9, 0.95), fused=True
        )
        self.sampler = torch.Generator().manual_seed(settings.seed)
        self.curve: list[float] = []  # nats per byte of each step's batch
        self.seconds = 0.0

    @property
    def path(self) -> Path:
        return self.settings.out / "checkpoint.pt"

    def fingerprint(self) -> dict[str, str]:
        """Everything the loss curve depends on; settings as text."""
        values = {name: str(value) for name, value in vars(self.settings).items() if name not in NOT_IN_CURVE}
        digest = hashlib.sha256(self.tokens.to(torch.uint8).numpy().tobytes()).hexdigest()
        return values | {"text": digest, "torch": str(torch.__version__)}

    def save(self) -> None:
        """Replaces the checkpoint in one move, so that an interruption leaves the old or the new one."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "sampler": self.sampler.get_state(),
            "random": torch.get_rng_state(),  # dropout
            "curve": self.curve,
            "seconds": self.seconds,
            "fingerprint": self.fingerprint(),
        }
        self.settings.out.mkdir(parents=True, exist_ok=True)
        torch.save(state, self.path.with_suffix(".new"))
        os.replace(self.path.with_suffix(".new"), self.path)

    def load(self) -> None:
        state = torch.load(self.path, weights_only=True)
        for name, value in self.fingerprint().items():
            if state["fingerprint"].get(name) != value:
                old = state["fingerprint"].get(name)
                raise SystemExit(
                    f"{self.path} was made with {name} = {old}, this run has {value}: not the same loss curve"
                )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.sampler.set_state(state["sampler"])
        torch.set_rng_state(state["random"])
        self.curve, self.seconds = state["curve"], state["seconds"]

    def step(self) -> float:
        """One optimizer step on random windows of the text; returns the loss in nats per byte."""
        settings = self.settings
        start = torch.randint(len(self.tokens) - settings.seqlen, (settings.batch, 1), generator=self.sampler)
        window = self.tokens[start + torch.arange(settings.seqlen + 1)]
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(len(self.curve), settings)
        loss = self.model.loss(window[:, :-1], window[:, 1:])
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
        self.optimizer.step()
        self.curve.append(loss.item())
        return self.curve[-1]

    def run(self) -> None:
        """Steps until --steps or --minutes; checkpoints on the way, at the end and on Ctrl-C."""
        settings, done = self.settings, len(self.curve)
        bytes_per_step = settings.batch * settings.seqlen
        self.model.train()
        first, began = done, time.perf_counter() - self.seconds
        bar = progress_bar(settings.steps, done)
        try:
            while done < settings.steps and self.seconds < 60 * settings.minutes:
                loss = self.step()
                done = len(self.curve)
                self.seconds = time.perf_counter() - began
                bar.set_postfix_str(f"{loss / math.log(2):.3f} bits/byte", refresh=False)
                bar.update()
                if done % settings.checkpoint_every == 0 and done < settings.steps:
                    self.save()
        except KeyboardInterrupt:
            self.save()
            raise SystemExit(f"\nstopped at step {done}; --resume goes on from {self.path}") from None
        finally:
            bar.close()
        if done > first:
            self.save()
        speed = done * bytes_per_step / max(self.seconds, 1e-9)
        print(f"trained {done} steps in {self.seconds / 60:.2f} minutes: {speed:,.0f} tokens/s")
        if done < settings.steps:
            rate = learning_rate(done, settings)
            print(
                f"--minutes {settings.minutes:g} ended it before --steps {settings.steps}, at learning rate {rate:.1e}"
            )


def require_packages() -> None:
    """Says what is missing before the training, not after it."""
    for name in ("tqdm", "matplotlib", "safetensors"):
        try:
            importlib.import_module(name)
        except ImportError:
            raise SystemExit(f"this example needs the package {name}: pip install 'mamba_ops[examples]'") from None


def progress_bar(total: int, initial: int):
    from tqdm import tqdm

    return tqdm(total=total, initial=initial, unit="step", mininterval=0.5 if sys.stderr.isatty() else 15)


@torch.no_grad()
def heldout_bits_per_byte(model: nn.Module, data: bytes, window: int) -> float:
    """Bits per byte when the model reads data from its beginning, its state carried along; the first byte counts as 8
    bits.

    Data longer than window is read in pieces of that length that overlap by a quarter: each byte is scored once, with
    at least a quarter of a window before it.
    """
    model.eval()
    tokens = as_tokens(data)
    nats, scored = 8 * math.log(2), 1  # bytes 0 .. scored - 1 are paid for
    while scored < len(tokens):
        begin = 0 if scored == 1 else scored - window // 4
        piece = tokens[begin : begin + window + 1]
        logits = model(piece[None, :-1])[0, scored - 1 - begin :]
        nats += F.cross_entropy(logits, piece[scored - begin :], reduction="sum").item()
        scored = begin + len(piece)
    return nats / math.log(2) / len(tokens)


@torch.no_grad()
def sample_text(model: nn.Module, prompt: bytes, count: int, seed: int, temperature: float = 0.7) -> str:
    """count bytes after the prompt; Mamba goes on from its state, the baseline reads its last 256 bytes each time."""
    model.eval()
    tokens = as_tokens(prompt)
    if isinstance(model, MambaLM):
        tokens = model.generate(tokens[None], count, temperature=temperature, seed=seed)[0]
        return bytes(tokens.tolist()).decode(errors="replace")
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        probabilities = torch.softmax(model(tokens[None, -256:])[0, -1] / temperature, dim=-1)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)])
    return bytes(tokens.tolist()).decode(errors="replace")


def write_curve(curve: list[float], out: Path, lines: dict[str, float]) -> None:
    """loss.csv with exact values, loss.png with the curve in bits per byte and horizontal lines to compare with."""
    (out / "loss.csv").write_text(
        "step,nats_per_byte\n" + "".join(f"{i + 1},{loss!r}\n" for i, loss in enumerate(curve))
    )
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    axes.plot(range(1, len(curve) + 1), [loss / math.log(2) for loss in curve], linewidth=0.8, label="training batches")
    for (name, value), color in zip(lines.items(), ("tab:green", "tab:red", "tab:orange")):
        axes.axhline(value, color=color, linestyle="--", label=f"{name}, held-out: {value:.3f}")
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(0, 6))
    axes.legend()
    figure.savefig(out / "loss.png", dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Trains, evaluates, writes the files; returns held-out bits per byte of the model, lzma and zlib."""
    settings = parse_arguments(argv)
    require_packages()
    torch.set_num_threads(settings.threads)
    train_text, heldout_text = split_text(load_text(settings.text), settings.seqlen)
    training = Training(settings, as_tokens(train_text))
    parameters = sum(p.numel() for p in training.model.parameters())
    sizes = f"{len(train_text):,} bytes to train on, {len(heldout_text):,} held out"
    print(f"{settings.arch}: {parameters:,} parameters, {sizes}")
    if settings.resume and training.path.is_file():
        training.load()
        print(f"resumed at step {len(training.curve)}")
    training.run()

    results = {settings.arch: heldout_bits_per_byte(training.model, heldout_text, settings.window)}
    results |= compressed_bits_per_byte(heldout_text)
    print(
        "held-out bits per byte, read once from the beginning: " + ", ".join(f"{k} {v:.4f}" for k, v in results.items())
    )
    write_curve(training.curve, settings.out, results)
    if settings.arch == "mamba":
        training.model.save_pretrained(settings.out / "model")
    if settings.sample:
        prompt = heldout_text[:200]
        text = sample_text(training.model, prompt, settings.sample, settings.seed)
        print(f"sample, after a prompt of {len(prompt)} held-out bytes:\n{text}")
    print(f"files: {settings.out}")
    return results


if __name__ == "__main__":
    main()
