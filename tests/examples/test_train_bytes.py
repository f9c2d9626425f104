"""examples/train_bytes.py on a few tiny steps: curve, resume, evaluation, files, messages."""

import importlib.util
import lzma
import math
import sys
import zlib
from itertools import pairwise
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).parents[2] / "examples" / "train_bytes.py"
TEXT = PROGRAM  # any text will do
TINY = ["--steps", "12", "--batch", "2", "--seqlen", "24", "--width", "16", "--layers", "1", "--d-state", "4"]


@pytest.fixture(scope="module")
def example():
    specification = importlib.util.spec_from_file_location("train_bytes", PROGRAM)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def run(example, tmp_path):
    """Runs the program; returns (results, loss curve). The output folder is the test's own unless named."""

    def call(*arguments, out="run"):
        folder = tmp_path / out
        results = example.main([*TINY, "--out", str(folder), "--text", str(TEXT), *arguments])
        lines = (folder / "loss.csv").read_text().splitlines()
        assert lines[0] == "step,nats_per_byte"
        return results, [float(line.split(",")[1]) for line in lines[1:]]

    return call


# ---- the whole program ----


@pytest.mark.parametrize("arch", ["mamba", "lstm"])
def test_program(example, run, tmp_path, capsys, arch):
    results, curve = run("--arch", arch, "--sample", "7")
    heldout = example.split_text(TEXT.read_bytes(), 24)[1]
    assert results["lzma"] == 8 * len(lzma.compress(heldout, preset=9 | lzma.PRESET_EXTREME)) / len(heldout)
    assert results["zlib"] == 8 * len(zlib.compress(heldout, 9)) / len(heldout)
    assert len(curve) == 12 and curve[0] == pytest.approx(math.log(256), rel=0.1)
    assert curve[-1] < curve[0] and results[arch] < 8
    assert (tmp_path / "run" / "loss.png").stat().st_size > 5000
    printed = capsys.readouterr().out
    for word in ("tokens/s", "held-out bits per byte", f"{arch} {results[arch]:.4f}", "lzma", "zlib", "sample"):
        assert word in printed


def test_saved_model_loads(example, run, tmp_path):
    from mamba_ops.models import MambaLM

    results, _ = run("--sample", "0")
    model = MambaLM.from_pretrained(tmp_path / "run" / "model")
    heldout = example.split_text(TEXT.read_bytes(), 24)[1]
    assert example.heldout_bits_per_byte(model, heldout, 65536) == results["mamba"]


def test_default_text_is_the_documentation_of_python(example):
    text = example.load_text(None)
    assert len(text) > 300_000 and b"assert" in text
    train, heldout = example.split_text(text, 512)
    assert train + heldout == text and abs(len(heldout) - len(text) / 10) <= 1


# ---- the loss curve repeats, and resumes ----


def test_equal_seed_equal_curve(run):
    results, curve = run("--dropout", "0.1", out="a")
    again, repeated = run("--dropout", "0.1", out="b")
    assert curve == repeated and results == again
    _, other = run("--dropout", "0.1", "--seed", "1", out="c")
    assert curve != other


@pytest.mark.parametrize("arch", ["mamba", "lstm"])
def test_resume_continues_the_same_curve(example, run, monkeypatch, capsys, arch):
    options = ["--arch", arch, "--dropout", "0.1", "--checkpoint-every", "4"]
    results, curve = run(*options, out="whole")

    step = example.Training.step

    def interrupted(training):
        if len(training.curve) == 7:
            raise KeyboardInterrupt
        return step(training)

    monkeypatch.setattr(example.Training, "step", interrupted)
    with pytest.raises(SystemExit, match="stopped at step 7; --resume goes on"):
        run(*options, out="parts")
    monkeypatch.undo()
    again, repeated = run(*options, "--resume", out="parts")
    assert "resumed at step 7" in capsys.readouterr().out
    assert repeated == curve and again == results


def test_resume_after_a_crash_starts_from_the_last_checkpoint(example, run, monkeypatch):
    _, curve = run(out="whole")
    step = example.Training.step

    def crash(training):
        if len(training.curve) == 7:
            raise RuntimeError("power cut")
        return step(training)

    monkeypatch.setattr(example.Training, "step", crash)
    with pytest.raises(RuntimeError, match="power cut"):
        run("--checkpoint-every", "5", out="parts")
    monkeypatch.undo()
    assert run("--resume", out="parts")[1] == curve


def test_resume_of_a_finished_run_trains_no_more(run):
    results, curve = run()
    assert run("--resume") == (results, curve)


def test_resume_refuses_another_curve(run):
    run()
    with pytest.raises(SystemExit, match=r"was made with lr = 0\.\d+, this run has 0\.5: not the same loss curve"):
        run("--resume", "--lr", "0.5")


# ---- schedule, optimizer, clock ----


def test_minutes_stop_the_training_and_say_so(run, capsys):
    _, curve = run("--steps", "100000", "--minutes", "0.01", "--sample", "0")
    assert 0 < len(curve) < 100000
    assert "--minutes 0.01 ended it before --steps 100000" in capsys.readouterr().out


def test_learning_rate(example):
    settings = example.parse_arguments(["--steps", "110", "--warmup", "10", "--lr", "2.0"])
    rates = [example.learning_rate(step, settings) for step in range(111)]
    assert rates[:10] == pytest.approx([0.2 * i for i in range(1, 11)])
    assert rates[10] == 2.0 and rates[60] == pytest.approx(1.01) and rates[110] == pytest.approx(0.02)
    assert all(a >= b for a, b in pairwise(rates[9:]))


def test_weight_decay_spares_what_is_marked(example):
    model = example.build_model(example.parse_arguments(TINY))
    decayed, spared = example.parameter_groups(model, 0.3)
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.3, 0.0)
    names = {id(parameter): name.removeprefix("backbone.") for name, parameter in model.named_parameters()}
    assert {names[id(p)] for p in spared["params"]} == {
        "layers.0.norm.weight",
        "layers.0.mixer.A_log",
        "layers.0.mixer.D",
        "layers.0.mixer.conv1d.bias",
        "layers.0.mixer.dt_proj.bias",
        "norm_f.weight",
    }
    assert len(decayed["params"]) + len(spared["params"]) == len(names)


def test_gradients_are_clipped(example, tmp_path):
    settings = example.parse_arguments([*TINY, "--clip", "1e-3", "--out", str(tmp_path)])
    training = example.Training(settings, torch.randint(256, (500,)))
    training.step()
    norms = torch.stack([p.grad.norm() for p in training.model.parameters()])
    assert norms.norm().item() == pytest.approx(1e-3, rel=1e-2)


# ---- held-out evaluation ----


class Bigrams(torch.nn.Module):
    """A model whose prediction depends on the last byte alone."""

    def __init__(self):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.randn(256, 256, dtype=torch.float64))

    def forward(self, ids):
        return self.logits[ids]


@pytest.mark.parametrize("window", [8, 11, 64, 199, 200, 65536])
def test_every_byte_is_scored_once(example, window):
    data = bytes(torch.randint(256, (200,)).tolist())
    model = Bigrams()
    logarithms = model.logits.log_softmax(-1) / math.log(2)
    expected = (8 - sum(logarithms[a, b] for a, b in pairwise(data)).item()) / 200
    assert example.heldout_bits_per_byte(model, data, window) == pytest.approx(expected, rel=1e-12)


def test_windows_give_a_quarter_of_context(example):
    seen = []

    def model(ids):
        seen.append(ids[0].tolist())
        return torch.zeros(1, ids.shape[1], 256)

    model.eval = lambda: None
    data = bytes(range(100))
    assert example.heldout_bits_per_byte(model, data, 40) == pytest.approx(8)
    assert seen == [list(range(40)), list(range(31, 71)), list(range(62, 99))]


# ---- messages ----


def test_short_text_is_refused(run):
    with pytest.raises(SystemExit, match="the text is too short"):
        run("--seqlen", "1000000")


@pytest.mark.parametrize("package", ["tqdm", "matplotlib", "safetensors"])
def test_missing_packages_are_said(run, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match=rf"needs the package {package}: pip install 'mamba_ops\[examples\]'"):
        run("--steps", "1000000")


def test_wrong_sizes_are_refused(example, capsys):
    with pytest.raises(SystemExit):
        example.parse_arguments(["--checkpoint-every", "0"])
    assert "--checkpoint-every must be at least 1, got 0" in capsys.readouterr().err
