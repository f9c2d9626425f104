"""The Mamba layer as a module: names, initialisation, copies, hooks, wrapped projections, compile, export, memory."""

import copy
import gc
import math
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mamba_ops.layers import Mamba
from mamba_ops.testing import assert_close

PROJECTIONS = ["in_proj", "x_proj", "dt_proj", "out_proj"]


def marks(layer):
    names = ("_no_weight_decay", "_no_reinit")
    return {(n, mark) for n, p in layer.named_parameters() for mark in names if getattr(p, mark, False)}


ALL_MARKS = {
    ("A_log", "_no_weight_decay"),
    ("D", "_no_weight_decay"),
    ("dt_proj.bias", "_no_weight_decay"),
    ("dt_proj.bias", "_no_reinit"),
}


# ---- names and initialisation ----


def test_state_dict_names_and_shapes_are_upstreams():
    layer = Mamba(40, d_state=7, d_conv=3, bias=True)
    assert {name: tuple(value.shape) for name, value in layer.state_dict().items()} == {
        "A_log": (80, 7),
        "D": (80,),
        "in_proj.weight": (160, 40),
        "in_proj.bias": (160,),
        "conv1d.weight": (80, 1, 3),
        "conv1d.bias": (80,),
        "x_proj.weight": (3 + 14, 80),
        "dt_proj.weight": (80, 3),
        "dt_proj.bias": (80,),
        "out_proj.weight": (40, 80),
        "out_proj.bias": (40,),
    }


def within(parameter, bound):
    """Looks uniform in [-bound, bound]: none outside, standard deviation bound / sqrt(3), mean 0."""
    assert parameter.abs().max() <= bound
    assert parameter.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert abs(parameter.mean().item()) < 0.1 * bound


def test_initialisation():
    layer = Mamba(400, bias=True)
    within(layer.in_proj.weight, 400**-0.5)
    within(layer.conv1d.weight, 4**-0.5)
    within(layer.conv1d.bias, 4**-0.5)
    within(layer.x_proj.weight, 800**-0.5)
    within(layer.dt_proj.weight, 25**-0.5)
    within(layer.out_proj.weight, 800**-0.5)
    assert not layer.in_proj.bias.any() and not layer.out_proj.bias.any()
    assert torch.equal(layer.D, torch.ones(800))
    assert_close(-layer.A_log.exp(), -torch.arange(1.0, 17).expand(800, 16), rtol=1e-6)
    step = nn.functional.softplus(layer.dt_proj.bias).log()
    assert math.log(0.001) - 1e-3 <= step.min() and step.max() <= math.log(0.1) + 1e-3
    assert step.mean().item() == pytest.approx(math.log(0.01), abs=0.15)
    assert step.std().item() == pytest.approx(math.log(100) / math.sqrt(12), rel=0.05)


def test_initialisation_options():
    layer = Mamba(32, dt_rank=4, dt_init="constant", dt_scale=3.0, dt_min=1e-5, dt_max=1e-2, dt_init_floor=1e-3)
    assert torch.equal(layer.dt_proj.weight, torch.full((64, 4), 1.5))
    step = nn.functional.softplus(layer.dt_proj.bias)
    assert step.min().item() == pytest.approx(1e-3, rel=1e-3)
    assert 1e-3 < step.max() <= 1.01e-2


def test_layer_idx_and_use_fast_path_change_no_number():
    layers = []
    for arguments in ({}, {"use_fast_path": False, "layer_idx": 3}):
        torch.manual_seed(0)
        layers.append(Mamba(8, **arguments))
    hidden = torch.randn(2, 5, 8)
    assert torch.equal(layers[0](hidden), layers[1](hidden))
    assert (layers[1].use_fast_path, layers[1].layer_idx) == (False, 3)


# ---- meta, copies, pickles ----


def test_meta_construction_and_reset():
    with torch.device("meta"):
        layer = Mamba(8)
    assert all(p.is_meta for p in layer.parameters())
    layer.to_empty(device="cpu")
    torch.manual_seed(5)
    layer.reset_parameters()
    assert marks(layer) == ALL_MARKS
    again = Mamba(8)
    torch.manual_seed(5)
    again.reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), again.parameters()))
    layer(torch.randn(1, 3, 8)).sum().backward()


def test_forward_on_meta_tensors():
    layer = Mamba(8, device="meta")
    assert layer(torch.empty(2, 5, 8, device="meta")).shape == (2, 5, 8)


def test_mixed_devices_are_refused():
    layer = Mamba(8)
    layer.D = nn.Parameter(torch.ones(16, device="meta"))
    with pytest.raises(RuntimeError, match="D must be on"):
        layer(torch.randn(1, 3, 8))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))], ids=["copy", "pickle"]
)
def test_copies_have_the_numbers_and_the_marks(copied):
    layer = Mamba(8)
    hidden = torch.randn(2, 5, 8)
    twin = copied(layer)
    assert torch.equal(twin(hidden), layer(hidden))
    assert marks(twin) == marks(layer) == ALL_MARKS
    with torch.no_grad():
        twin.D.zero_()
    assert not torch.equal(twin(hidden), layer(hidden))


# ---- hooks and other projections ----


@pytest.mark.parametrize("name", PROJECTIONS)
def test_hooks_are_called_and_may_change_the_result(name):
    layer = Mamba(8, dtype=torch.float64)
    hidden = torch.randn(2, 5, 8, dtype=torch.float64)
    plain = layer(hidden)
    calls = []
    handle = getattr(layer, name).register_forward_hook(lambda *arguments: calls.append(arguments[2].shape))
    assert_close(layer(hidden), plain, rtol=1e-12)
    assert len(calls) == 1
    handle.remove()
    handle = getattr(layer, name).register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    assert (layer(hidden) - plain).abs().max() > 1e-6
    handle.remove()
    seen = []
    handle = getattr(layer, name).register_full_backward_hook(lambda *arguments: seen.append(arguments[2][0].shape))
    layer(hidden.requires_grad_()).sum().backward()
    assert len(seen) == 1
    handle.remove()
    assert torch.equal(layer(hidden), plain)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PROJECTIONS)
def test_wrapped_projections(name, dtype):
    """A low-rank adapter around a projection: zero at first, trained alone."""

    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down = nn.Linear(base.in_features, 2, bias=False, dtype=dtype)
            self.up = nn.Linear(2, base.out_features, bias=False, dtype=dtype)
            nn.init.zeros_(self.up.weight)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    layer = Mamba(8, dtype=dtype)
    hidden = torch.randn(2, 5, 8, dtype=dtype)
    plain = layer(hidden)
    setattr(layer, name, Adapter(getattr(layer, name)))
    assert_close(layer(hidden), plain, rtol=1e-12 if dtype == torch.float64 else 2e-2)
    layer(hidden).sum().backward()
    assert getattr(layer, name).up.weight.grad.abs().max() > 0
    assert getattr(layer, name).base.weight.grad is None
    copy.deepcopy(layer).to(torch.float64)(hidden.double())


def test_replaced_forward_of_dt_proj_is_called():
    layer = Mamba(8)
    layer.dt_proj.forward = lambda r: torch.full((*r.shape[:-1], 16), -100.0)
    hidden = torch.randn(2, 5, 8)
    out = layer(hidden)  # steps of size 0: only the skip term D x is left
    with torch.no_grad():
        layer.D.zero_()
    assert out.abs().max() > 1e-3 and layer(hidden).abs().max() < 1e-6


@pytest.mark.skipif(not set(torch.backends.quantized.supported_engines) - {"none"}, reason="no quantised engine")
def test_dynamically_quantised_projections():
    layer = Mamba(32)
    hidden = torch.randn(2, 20, 32)
    plain = layer(hidden)
    quantised = torch.ao.quantization.quantize_dynamic(layer, {nn.Linear}, dtype=torch.qint8)
    for name in PROJECTIONS:
        assert isinstance(getattr(quantised, name), torch.ao.nn.quantized.dynamic.Linear)
    out = quantised(hidden)
    assert not torch.equal(out, plain)
    assert_close(out, plain, rtol=0.05)


# ---- activation checkpointing, torch.func ----


def test_activation_checkpointing_gives_the_same_bits():
    layer = Mamba(8)
    hidden = torch.randn(2, 9, 8, requires_grad=True)
    wanted = torch.autograd.grad(layer(hidden).square().sum(), [hidden, *layer.parameters()])
    out = checkpoint(layer, hidden, use_reentrant=False)
    found = torch.autograd.grad(out.square().sum(), [hidden, *layer.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(found, wanted))


def test_functional_gradients_per_sample():
    layer = Mamba(4, d_state=2, dtype=torch.float64)
    hidden = torch.randn(3, 6, 4, dtype=torch.float64)
    parameters = dict(layer.named_parameters())

    def loss(values, sample):
        return torch.func.functional_call(layer, values, (sample[None],)).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, hidden)
    for i in range(3):
        wanted = torch.autograd.grad(layer(hidden[i : i + 1]).square().sum(), list(parameters.values()))
        for name, gradient in zip(parameters, wanted):
            assert_close(found[name][i], gradient, rtol=1e-10, what=name)


# ---- compile and export ----


def run_and_differentiate(function, layer, hidden, **borders):
    out = function(hidden, **borders)
    return [out, *torch.autograd.grad(out.square().sum(), [hidden, *layer.parameters()])]


@pytest.mark.parametrize("packing", [None, "seq_idx", "cu_seqlens"])
def test_compile_without_recompiles(packing):
    torch._dynamo.reset()
    layer = Mamba(8, d_state=3, dt_rank=2)  # a product over a single column would be special-cased for short lengths
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for number, seqlen in enumerate([5, 2, 3, 64, 131]):
        hidden = torch.randn(1, seqlen, 8, requires_grad=True)
        borders = {}
        if packing == "seq_idx":
            borders["seq_idx"] = (torch.arange(seqlen) // 3)[None]
        elif packing == "cu_seqlens":
            borders["cu_seqlens"] = torch.tensor([0, 1, seqlen - 1])
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            found = run_and_differentiate(compiled, layer, hidden, **borders)
        wanted = run_and_differentiate(layer, layer, hidden, **borders)
        for a, b in zip(found, wanted):
            assert_close(a, b, gradient=True)


def test_export_with_any_length():
    layer = Mamba(8, d_state=3).eval()
    seqlen = torch.export.Dim("seqlen", min=2)
    program = torch.export.export(layer, (torch.randn(2, 16, 8),), dynamic_shapes=({1: seqlen},))
    for length in (2, 7, 300):
        hidden = torch.randn(2, length, 8)
        assert_close(program.module()(hidden), layer(hidden), rtol=1e-6)


# ---- memory ----


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_stays_flat_over_500_steps():
    """B103."""
    layer = Mamba(16, d_state=4)
    optimizer = torch.optim.AdamW(layer.parameters())
    hidden = torch.randn(4, 64, 16)

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            layer(hidden).square().mean().backward()
            optimizer.step()
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()), resident_bytes()

    tensors, memory = train(100)
    tensors_after, memory_after = train(400)
    assert tensors_after == tensors
    assert memory_after - memory < 4 << 20  # a leak of one activation (16 KiB) a step would be 6 MiB
