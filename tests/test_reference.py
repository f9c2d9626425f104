"""The plain PyTorch definitions against the test vectors, and their own rules: zero sizes, padding, split = whole."""

import itertools
import sys

import pytest
import torch
import vectors

from mamba_ops import reference
from mamba_ops.reference import causal_conv1d, rms_norm, selective_scan
from mamba_ops.testing import assert_close

MODULES = {name: sys.modules[getattr(reference, name).__module__] for name in reference.__all__}
FLAGS = ("delta_softplus", "activation", "eps", "group_size", "norm_before_gate")
RESULTS = {
    "selective_scan": (selective_scan, ("out", "last_state")),
    "conv1d": (causal_conv1d, ("out", "last_state")),
    "rms_norm": (rms_norm, ("out", "residual_out", "rms")),
}
CASES = (
    vectors.names("selective_scan")
    + vectors.names("conv1d", without=("conv1d_step", "conv1d_update"))
    + vectors.names("rms_norm", without=("rms_norm_seed",))
)


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_vectors(name):
    function, results = next(entry for prefix, entry in RESULTS.items() if name.startswith(prefix))
    vector = vectors.load(name)
    arguments = vector.arguments(*FLAGS)
    for input_name in vector.gradients:
        arguments[input_name].requires_grad_()
    outputs = dict(zip(results, function(**arguments)))
    for output_name, expected in vector.outputs.items():
        assert_close(outputs[output_name], expected, what=output_name)
    for input_name, gradient in vectors.run_backward(vector, arguments, outputs).items():
        assert_close(gradient, vector.gradients[input_name], what=f"gradient of {input_name}")


def test_rms_norm_agrees_with_seed_vector():
    vector = vectors.load("rms_norm_seed")
    x, scale = vector.inputs["x"].requires_grad_(), vector.inputs["scale"].requires_grad_()
    out, _, rms = rms_norm(x, scale, eps=vector.meta["eps"])
    assert_close(rms, vector.inputs["rms"], what="rms")
    dx, dscale = torch.autograd.grad(out, (x, scale), vector.inputs["dy"])
    assert_close(dx, vector.outputs["dx"], what="dx")
    assert_close(vector.inputs["d_scale_acc"] + dscale, vector.outputs["d_scale"], what="d_scale")


@pytest.mark.parametrize(
    "name, names, dim",
    [
        ("linear_recurrence", {"x": "x", "g": "gates", "h0": "initial_state"}, -1),
        ("gated_scan", {"b": "x", "a": "logits", "s0": "initial_state"}, 1),
    ],
)
def test_recurrences_agree_with_vectors(name, names, dim):
    vector = vectors.load(name)
    leaves = {key: tensor.requires_grad_() for key, tensor in vector.inputs.items()}
    states, last = getattr(reference, name)(**{names[key]: leaf for key, leaf in leaves.items()}, dim=dim)
    assert_close(states, vector.outputs["states"])
    assert torch.equal(last, states.select(dim, -1))
    for key, gradient in vectors.run_backward(vector, leaves, {"states": states}).items():
        assert_close(gradient, vector.gradients[key], what=f"gradient of {key}")


@pytest.mark.parametrize("function", [causal_conv1d, selective_scan])
@pytest.mark.parametrize("sizes", [{"seqlen": 0}, {"batch": 0}, {"dim": 0}, {"seqlen": 1}, {"seqlen": 2}])
@pytest.mark.parametrize("packing", [None, "seq_idx", "cu_seqlens"])
def test_small_sizes(function, sizes, packing):
    if function is selective_scan and sizes.get("dim") == 0:
        sizes = {"dim": 0, "ngroups": 1}
    inputs = MODULES[function.__name__].example_inputs(dtype=torch.float64, packing=packing, **sizes)
    first = "x" if function is causal_conv1d else "u"
    initial_state = inputs["initial_state"].requires_grad_()
    out, last_state = function(**inputs)
    assert out.shape == inputs[first].shape and last_state.shape == initial_state.shape
    assert torch.isfinite(out).all() and torch.isfinite(last_state).all()
    if sizes.get("seqlen") == 0:
        assert torch.equal(last_state, initial_state) and last_state.data_ptr() != initial_state.data_ptr()
        upstream = torch.randn_like(last_state)
        assert torch.equal(torch.autograd.grad(last_state, initial_state, upstream)[0], upstream)


def test_scan_without_states_is_the_skip_term():
    inputs = MODULES["selective_scan"].example_inputs(dtype=torch.float64, dstate=0, z=False)
    out, last_state = selective_scan(**inputs)
    assert_close(out, inputs["D"][:, None] * inputs["u"])
    assert last_state.shape == (2, 4, 0)


@pytest.mark.parametrize("function", [causal_conv1d, selective_scan])
def test_padding_behind_cu_seqlens_is_harmless(function):
    """B68: NaN behind the last sequence, and in the upstream gradient there, reaches neither values nor gradients."""
    clean = MODULES[function.__name__].example_inputs(dtype=torch.float64, packing="cu_seqlens")
    end = int(clean["cu_seqlens"][-1])
    per_token = [name for name in ("x", "u", "delta", "z", "B", "C") if name in clean]
    cut, spoiled = dict(clean), dict(clean)
    for name in per_token:
        cut[name] = clean[name][..., :end]
        spoiled[name] = clean[name].clone()
        spoiled[name][..., end:] = float("nan")
    results = []
    for inputs in (cut, spoiled):
        leaves = {
            name: t.clone().requires_grad_()
            for name, t in inputs.items()
            if torch.is_tensor(t) and t.is_floating_point()
        }
        out, last_state = function(**{**inputs, **leaves})
        upstream = torch.ones_like(out)
        upstream[..., end:] = float("nan")
        gradients = torch.autograd.grad(
            (out, last_state), list(leaves.values()), (upstream, torch.ones_like(last_state))
        )
        results.append((out, last_state, dict(zip(leaves, gradients))))
    (out, state, gradients), (padded_out, padded_state, padded_gradients) = results
    assert torch.equal(padded_out[..., :end], out) and (padded_out[..., end:] == 0).all()
    assert torch.equal(padded_state, state)
    for name, gradient in gradients.items():
        if name in per_token:
            assert (padded_gradients[name][..., end:] == 0).all()
            assert torch.equal(padded_gradients[name][..., :end], gradient), name
        else:
            assert torch.equal(padded_gradients[name], gradient), name


def test_conv_padding_ids_are_harmless():
    """NaN in samples whose id is negative reaches neither the other outputs nor any gradient."""
    inputs = MODULES["causal_conv1d"].example_inputs(dtype=torch.float64, packing="seq_idx")
    padding = inputs["seq_idx"][:, None] < 0
    assert padding.any()
    spoiled = inputs["x"].masked_fill(padding, float("nan")).requires_grad_()
    weight = inputs["weight"].requires_grad_()
    out, _ = causal_conv1d(**{**inputs, "x": spoiled})
    expected, _ = causal_conv1d(**inputs)
    assert torch.equal(out, expected) and (out.masked_select(padding) == 0).all()
    dx, dweight = torch.autograd.grad(out, (spoiled, weight), torch.ones_like(out).masked_fill(padding, float("nan")))
    (dweight_expected,) = torch.autograd.grad(expected, weight, torch.ones_like(out).masked_fill(padding, 0))
    assert torch.equal(dweight, dweight_expected) and (dx.masked_select(padding) == 0).all()


@pytest.mark.parametrize("function", [causal_conv1d, selective_scan])
def test_packed_equals_separate(function):
    """B69: packed sequences of 3, 5, 6 and 2 tokens equal four calls."""
    inputs = MODULES[function.__name__].example_inputs(dtype=torch.float64, batch=1, seqlen=16, initial_state=False)
    ends = [0, 3, 8, 14, 16]
    packed, states = function(**inputs, cu_seqlens=torch.tensor(ends))
    by_ids, last = function(**inputs, seq_idx=torch.tensor([[7] * 3 + [2] * 5 + [7] * 6 + [0] * 2]))
    per_token = [name for name in ("x", "u", "delta", "z", "B", "C") if name in inputs]
    pieces = []
    for s, (start, end) in enumerate(itertools.pairwise(ends)):
        out, state = function(**{**inputs, **{name: inputs[name][..., start:end] for name in per_token}})
        assert_close(states[s : s + 1], state, what=f"state of sequence {s}")
        pieces.append(out)
    assert_close(packed, torch.cat(pieces, dim=2), what="cu_seqlens")
    assert_close(by_ids, torch.cat(pieces, dim=2), what="seq_idx")
    assert_close(last, states[-1:], what="last state with seq_idx")


@pytest.mark.parametrize("function", [causal_conv1d, selective_scan])
@pytest.mark.parametrize("cut", [0, 1, 2, 7, 11])
def test_split_equals_whole(function, cut):
    inputs = MODULES[function.__name__].example_inputs(dtype=torch.float64)
    per_token = [name for name in ("x", "u", "delta", "z", "B", "C") if name in inputs]
    whole, last = function(**inputs)
    left, state = function(**{**inputs, **{name: inputs[name][..., :cut] for name in per_token}})
    rest = {name: inputs[name][..., cut:] for name in per_token}
    right, state = function(**{**inputs, **rest, "initial_state": state})
    assert_close(torch.cat([left, right], dim=2), whole)
    assert_close(state, last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", reference.__all__)
def test_rounds_once_to_the_output_dtype(name, dtype):
    """Half-precision results are the float32 results, rounded; gradients have their input's dtype."""
    options = {"gated": True} if name == "gated_scan" else {}
    inputs = MODULES[name].example_inputs(dtype=dtype, **options)
    function = getattr(reference, name)
    floats = {k: v.float() if torch.is_tensor(v) and v.dtype == dtype else v for k, v in inputs.items()}
    for out, exact in zip(function(**inputs), function(**floats)):
        assert torch.equal(out, exact.to(out.dtype))
    first = next(k for k in ("x", "u") if k in inputs)
    assert function(**inputs)[0].dtype == dtype
    leaf = inputs[first].requires_grad_()
    (gradient,) = torch.autograd.grad(function(**inputs)[0].float().sum(), leaf)
    assert gradient.dtype == dtype


def test_options_are_checked():
    inputs = MODULES["causal_conv1d"].example_inputs(packing="seq_idx")
    with pytest.raises(ValueError, match="exclude each other"):
        causal_conv1d(**inputs, cu_seqlens=torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="activation must be"):
        causal_conv1d(inputs["x"], inputs["weight"], activation="relu")
    with pytest.raises(ValueError, match="group_size must divide dim = 12, got 5"):
        rms_norm(torch.randn(2, 12), group_size=5)
