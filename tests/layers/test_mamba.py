"""The Mamba layer: its numbers and gradients."""

import pytest
import torch
import vectors

from mamba_ops import reference
from mamba_ops.layers import Mamba
from mamba_ops.testing import assert_close, strided_variants

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# A whole layer rounds at a handful of stores, so that its error in 16 bits is a few times that of one operator.
LAYER_TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def composed(layer, hidden, seq_idx=None, cu_seqlens=None):
    """The layer's equations, written once more from its parameters and the reference functions, in float64."""
    p = {name: parameter.double() for name, parameter in layer.named_parameters()}
    borders = {"seq_idx": seq_idx, "cu_seqlens": cu_seqlens}
    inner = p["D"].numel()
    hidden = hidden.double()
    if cu_seqlens is not None:
        hidden = torch.cat([hidden[:, : cu_seqlens[-1]], torch.zeros_like(hidden[:, cu_seqlens[-1] :])], dim=1)
    xz = hidden @ p["in_proj.weight"].T + p.get("in_proj.bias", 0)
    x, z = xz[..., :inner].mT, xz[..., inner:].mT
    x, _ = reference.causal_conv1d(x, p["conv1d.weight"][:, 0], p.get("conv1d.bias"), activation="silu", **borders)
    rank = p["dt_proj.weight"].shape[1]
    r, B, C = torch.tensor_split(x.mT @ p["x_proj.weight"].T, [rank, rank + p["A_log"].shape[1]], dim=-1)
    delta = (r @ p["dt_proj.weight"].T).mT
    y, _ = reference.selective_scan(
        x, delta, -p["A_log"].exp(), B.mT, C.mT, p["D"], z, p["dt_proj.bias"], delta_softplus=True, **borders
    )
    out = y.mT @ p["out_proj.weight"].T + p.get("out_proj.bias", 0)
    if cu_seqlens is not None:
        out = torch.cat([out[:, : cu_seqlens[-1]], torch.zeros_like(out[:, cu_seqlens[-1] :])], dim=1)
    return out


def gradients(layer, function, hidden, upstream, **borders):
    """(out, {name: gradient}) of function(hidden), the input's gradient under the name "hidden"."""
    hidden = hidden.detach().requires_grad_()
    names = dict(layer.named_parameters())
    out = function(hidden, **borders)
    inputs = [hidden, *names.values()]
    found = torch.autograd.grad(out, inputs, upstream.to(out.dtype), materialize_grads=True)  # zeros at length 0
    return out, dict(zip(["hidden", *names], found))


def check_layer(layer, hidden, **borders):
    upstream = torch.randn(hidden.shape, dtype=torch.float64).to(hidden.dtype)
    out, found = gradients(layer, layer, hidden, upstream, **borders)
    expected, wanted = gradients(layer, lambda h, **b: composed(layer, h, **b), hidden, upstream, **borders)
    assert out.dtype == hidden.dtype
    rtol = LAYER_TOLERANCE[hidden.dtype]
    assert_close(out, expected, rtol=rtol, what="out")
    for name, gradient in found.items():
        rtol = max(rtol, 1e-4) if hidden.dtype != torch.float64 else rtol
        assert_close(gradient, wanted[name], rtol=rtol, what=f"gradient of {name}")


# ---- agrees with reference ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch, seqlen", [(2, 0), (2, 1), (2, 3), (3, 37), (1, 261), (0, 5)])
def test_agrees_with_the_composed_reference(dtype, batch, seqlen):
    layer = Mamba(10, d_state=5, dtype=dtype)
    check_layer(layer, torch.randn(batch, seqlen, 10, dtype=dtype))


@pytest.mark.parametrize(
    "options",
    [
        {"bias": True},
        {"conv_bias": False},
        {"bias": True, "conv_bias": False, "d_conv": 1},
        {"d_conv": 2},
        {"d_conv": 7},
        {"expand": 1.5},
        {"expand": 1, "dt_rank": 6},
        {"d_state": 1},
        {"d_state": 19},
        {"dt_init": "constant", "dt_scale": 0.5},
    ],
    ids=str,
)
def test_options(options):
    layer = Mamba(8, **options, dtype=torch.float64)
    check_layer(layer, torch.randn(2, 9, 8, dtype=torch.float64))


@pytest.mark.parametrize("d_model", [1, 3, 7, 9])
def test_odd_widths(d_model):
    layer = Mamba(d_model, d_state=3, dtype=torch.float64)
    check_layer(layer, torch.randn(2, 6, d_model, dtype=torch.float64))


def test_bias_gradients_have_the_shape_of_the_biases():
    """B32."""
    layer = Mamba(6, bias=True)
    upstream = torch.randn(2, 5, 6)
    layer(torch.randn(2, 5, 6)).backward(upstream)
    assert layer.out_proj.bias.grad.shape == (6,)
    assert layer.in_proj.bias.grad.shape == (24,)
    assert_close(layer.out_proj.bias.grad, upstream.sum((0, 1)), gradient=True)


# ---- agrees with the test vectors ----


def test_agrees_with_the_test_vector():
    vector = vectors.load("block_mamba1")
    u = vector.inputs.pop("u").requires_grad_()
    layer = Mamba(6, d_state=3, dt_rank=2, dtype=torch.float64)
    layer.load_state_dict(vector.inputs)
    out = layer(u)
    assert_close(out, vector.outputs["out"], rtol=1e-10)
    out.backward(vector.output_gradients["out"])
    found = {name: parameter.grad for name, parameter in layer.named_parameters()} | {"u": u.grad}
    assert found.keys() == vector.gradients.keys()
    for name, gradient in found.items():
        assert_close(gradient, vector.gradients[name], rtol=1e-10, what=f"gradient of {name}")


# ---- strides and slices ----


def test_any_strides_give_the_same_numbers():
    layer = Mamba(6, d_state=3, dtype=torch.float64)
    hidden = torch.randn(2, 7, 6, dtype=torch.float64)
    upstream = torch.randn(2, 7, 6, dtype=torch.float64)
    expected, wanted = gradients(layer, layer, hidden, upstream)
    for name, view in strided_variants(hidden):
        for other, incoming in strided_variants(upstream):
            out, found = gradients(layer, layer, view, incoming)
            assert_close(out, expected, rtol=1e-12, what=name)
            for parameter, gradient in found.items():
                assert_close(gradient, wanted[parameter], rtol=1e-12, what=f"{name}, {other}: {parameter}")


def test_expanded_upstream_gradient():
    layer = Mamba(6, d_state=3, dtype=torch.float64)
    hidden = torch.randn(2, 7, 6, dtype=torch.float64)
    _, found = gradients(layer, layer, hidden, torch.ones(1, 1, 1, dtype=torch.float64).expand(2, 7, 6))
    _, wanted = gradients(layer, layer, hidden, torch.ones(2, 7, 6, dtype=torch.float64))
    for name, gradient in found.items():
        assert_close(gradient, wanted[name], rtol=1e-12, what=name)


# ---- gradcheck ----


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"conv_bias": False}], ids=str)
@pytest.mark.parametrize("packing", [None, "seq_idx", "cu_seqlens"])
def test_gradcheck(options, packing):
    layer = Mamba(3, d_state=2, d_conv=3, **options, dtype=torch.float64)
    borders = {}
    if packing == "seq_idx":
        borders["seq_idx"] = torch.tensor([[4, 4, 1, 1, 1, 7]])
    elif packing == "cu_seqlens":
        borders["cu_seqlens"] = torch.tensor([0, 2, 2, 5])
    names = [name for name, _ in layer.named_parameters()]

    def run(hidden, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters)), (hidden,), borders)

    hidden = torch.randn(1, 6, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(run, (hidden, *layer.parameters()))


# ---- packed equals separate ----


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("packing", ["seq_idx", "cu_seqlens"])
def test_packed_equals_separate(dtype, packing):
    lengths = [3, 5, 6, 2]
    layer = Mamba(6, d_state=3, dtype=dtype)
    hidden = torch.randn(1, sum(lengths), 6, dtype=dtype)
    upstream = torch.randn(1, sum(lengths), 6, dtype=dtype)
    if packing == "seq_idx":
        borders = {"seq_idx": torch.repeat_interleave(torch.tensor([3, 0, 3, 8]), torch.tensor(lengths))[None]}
    else:
        borders = {"cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int()}

    def separate(h):
        return torch.cat([layer(piece) for piece in h.split(lengths, dim=1)], dim=1)

    out, found = gradients(layer, layer, hidden, upstream, **borders)
    expected, wanted = gradients(layer, separate, hidden, upstream)
    assert_close(out, expected)
    for name, gradient in found.items():
        assert_close(gradient, wanted[name], gradient=True, what=name)
    unpacked, _ = gradients(layer, layer, hidden, upstream)
    assert (unpacked - out).abs().max() > 1e-3  # the borders matter


@pytest.mark.parametrize("bias", [False, True])
def test_trailing_padding_is_never_used(bias):
    """B68: also with NaN there, in the input and in the upstream gradient."""
    layer = Mamba(6, d_state=3, bias=bias, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, 9, 9, 20, 37])
    hidden = torch.randn(1, 128, 6, dtype=torch.float64)
    upstream = torch.randn(1, 128, 6, dtype=torch.float64)
    hidden[:, 37:] = upstream[:, 37:] = float("nan")
    out, found = gradients(layer, layer, hidden, upstream, cu_seqlens=cu_seqlens)
    expected, wanted = gradients(layer, layer, hidden[:, :37], upstream[:, :37], cu_seqlens=cu_seqlens)
    assert torch.equal(out[:, 37:], torch.zeros_like(out[:, 37:]))
    assert torch.equal(found["hidden"][:, 37:], torch.zeros_like(out[:, 37:]))
    assert_close(out[:, :37], expected, rtol=1e-12)
    wanted["hidden"] = torch.nn.functional.pad(wanted["hidden"], (0, 0, 0, 91))
    for name, gradient in found.items():
        assert_close(gradient, wanted[name], rtol=1e-12, what=name)


def test_packing_with_an_empty_tail_and_without_tokens():
    layer = Mamba(4, d_state=2, bias=True, dtype=torch.float64)
    hidden = torch.randn(1, 5, 4, dtype=torch.float64)
    assert_close(layer(hidden, cu_seqlens=torch.tensor([0, 5])), layer(hidden), rtol=1e-12)
    assert not layer(hidden, cu_seqlens=torch.tensor([0, 0])).any()
    assert layer(hidden[:, :0], cu_seqlens=torch.tensor([0, 0])).shape == (1, 0, 4)


# ---- dtypes and autocast ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_layers_train(dtype):
    """A, D and the step-size bias stay float32, and a short training stays finite and helps."""
    layer = Mamba(16, dtype=dtype)
    assert {p.dtype for p in (layer.A_log, layer.D, layer.dt_proj.bias)} == {torch.float32}
    assert {p.dtype for n, p in layer.named_parameters() if n not in ("A_log", "D", "dt_proj.bias")} == {dtype}
    hidden = torch.randn(4, 50, 16).to(dtype)
    target = hidden.roll(1, dims=1) * 0.5
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2, eps=1e-4)  # 1e-8 is 0 in float16
    losses = []
    for _ in range(40):
        loss = (layer(hidden) - target).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(torch.isfinite(p).all() for p in layer.parameters())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_converted_layers_run(dtype):
    """.to(dtype) converts every parameter, as for any module, and the layer still runs."""
    layer = Mamba(8).to(dtype)
    assert {p.dtype for p in layer.parameters()} == {dtype}
    check_layer(layer, torch.randn(2, 9, 8, dtype=dtype))
    check_layer(Mamba(8, dtype=dtype).float(), torch.randn(2, 9, 8))


def test_autocast():
    layer = Mamba(8, d_state=4)
    hidden = torch.randn(2, 20, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(hidden)
    assert out.dtype == torch.bfloat16
    assert_close(out, composed(layer, hidden), rtol=5e-2)
    out.float().sum().backward()
    expected = torch.autograd.grad(composed(layer, hidden).sum(), [hidden, *layer.parameters()])
    for tensor, gradient in zip([hidden, *layer.parameters()], expected):
        assert tensor.grad.dtype == torch.float32
        assert_close(tensor.grad, gradient, rtol=6e-2)


# ---- bitwise repeat ----


def test_twenty_repeats_are_bitwise_equal():
    torch.use_deterministic_algorithms(True)
    layer = Mamba(24)
    hidden, upstream = torch.randn(3, 70, 24), torch.randn(3, 70, 24)
    first, wanted = gradients(layer, layer, hidden, upstream)
    for _ in range(19):
        out, found = gradients(layer, layer, hidden, upstream)
        assert torch.equal(out, first)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


# ---- error texts ----


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"d_model": 0}, "Mamba: d_model must be at least 1, got 0"),
        ({"d_state": 0}, "Mamba: d_state must be at least 1, got 0"),
        ({"d_conv": 0}, "Mamba: d_conv must be at least 1, got 0"),
        ({"expand": 0.1}, "Mamba: expand * d_model must be at least 1, got expand = 0.1, d_model = 8"),
        ({"dt_rank": "big"}, "Mamba: dt_rank must be 'auto' or at least 1, got 'big'"),
        ({"dt_rank": 0}, "Mamba: dt_rank must be 'auto' or at least 1, got 0"),
        ({"dt_init": "zero"}, "Mamba: dt_init must be 'random' or 'constant', got 'zero'"),
        ({"dt_min": 0.2}, "Mamba: dt_min and dt_max must satisfy 0 < dt_min <= dt_max, got 0.2 and 0.1"),
        ({"dt_init_floor": 0}, "Mamba: dt_init_floor must be positive, got 0"),
    ],
    ids=str,
)
def test_wrong_constructor_arguments(arguments, text):
    with pytest.raises(ValueError) as error:
        Mamba(**{"d_model": 8, **arguments})
    assert str(error.value) == text


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"hidden_states": (2, 5, 7)}, "hidden_states must have shape (batch, seqlen, d_model = 8), got (2, 5, 7)"),
        ({"hidden_states": (5, 8)}, "hidden_states must have shape (batch, seqlen, d_model = 8), got (5, 8)"),
        ({"seq_idx": (2, 4)}, "seq_idx must have shape (batch, seqlen) = (2, 5), got (2, 4)"),
        ({"cu_seqlens": (2,)}, "batch must be 1 with cu_seqlens, got 2"),
        ({"cu_seqlens": (2, 1)}, "cu_seqlens must have shape (sequences + 1), got (2, 1)"),
        ({"seq_idx": (2, 5), "cu_seqlens": (2,)}, "seq_idx and cu_seqlens exclude each other"),
    ],
    ids=str,
)
def test_wrong_forward_arguments(arguments, text):
    shapes = {"hidden_states": (2, 5, 8), **arguments}
    tensors = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in shapes.items()}
    tensors["hidden_states"] = tensors["hidden_states"].float()
    with pytest.raises(ValueError) as error:
        Mamba(8)(**tensors)
    assert str(error.value) == f"Mamba: {text}"
