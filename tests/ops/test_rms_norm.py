"""rms_norm: values, gradients, memory layouts, compile, transforms, determinism, errors."""

from itertools import product

import checks
import pytest
import torch
import vectors

import mamba_ops
from mamba_ops import testing
from mamba_ops.reference.rms_norm import example_inputs
from mamba_ops.reference.rms_norm import rms_norm as reference

OPTIONAL = ("weight", "bias", "z", "residual")
SUBSETS = [dict(zip(OPTIONAL, present)) for present in product((False, True), repeat=4)]
ORDER = ("x", *OPTIONAL, "eps", "group_size", "norm_before_gate", "residual_in_fp32")


def call(backend):
    """The backend's operator as a function of keyword arguments."""

    def function(**inputs):
        tensors = [inputs.pop(name, None) for name in ORDER[:5]]
        return backend.op("rms_norm")(*tensors, **inputs)

    return function


def subset_id(subset):
    return "+".join(name for name, present in subset.items() if present) or "plain"


# ---- agrees with the reference ----


@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
@pytest.mark.parametrize("shape, dim", [((3, 2), 12), ((), 7), ((1,), 1), ((5,), 33), ((2, 1, 3), 768), ((37,), 64)])
@pytest.mark.parametrize("group", [None, "whole", "one"])
def test_agrees_with_reference(backend, dtype, shape, dim, group):
    group_size = {None: 1 if dim == 1 else None, "whole": dim, "one": 1}[group]
    for norm_before_gate in (True, False):
        # A group of one column is almost constant: with a small eps its gradient is rounding error only.
        eps = 0.5 if group_size == 1 else 1e-5
        options = dict(shape=shape, dim=dim, group_size=group_size, norm_before_gate=norm_before_gate, eps=eps)
        testing.check_values(call(backend), example_inputs(dtype=dtype, **options), reference)


@pytest.mark.parametrize("subset", SUBSETS, ids=subset_id)
@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
def test_every_subset_of_optional_arguments(backend, dtype, subset):
    """B33, B09."""
    for norm_before_gate, residual_in_fp32 in product((True, False), repeat=2):
        options = dict(norm_before_gate=norm_before_gate, residual_in_fp32=residual_in_fp32)
        testing.check_values(call(backend), example_inputs(dtype=dtype, group_size=4, **subset, **options), reference)


@pytest.mark.parametrize("shape, dim", [((0,), 5), ((3, 0, 2), 5), ((4,), 0), ((0,), 0)])
def test_zero_sizes(backend, shape, dim):
    inputs = example_inputs(shape=shape, dim=dim)
    out, _, gradients = testing.run_with_gradients(call(backend), inputs)
    assert out[0].shape == (*shape, dim)
    assert out[1].shape == (*shape, dim)
    assert out[2].shape == shape
    for name, gradient in gradients.items():
        assert gradient.shape == inputs[name].shape
        assert not gradient.any()


def test_parameters_and_residual_of_other_dtypes(backend):
    inputs = example_inputs(dtype=torch.bfloat16)
    inputs["weight"] = inputs["weight"].float()
    inputs["bias"] = inputs["bias"].double()
    inputs["residual"] = inputs["residual"].float()
    outputs, _, _ = testing.run_with_gradients(call(backend), inputs)
    assert outputs[0].dtype == torch.bfloat16
    assert outputs[1].dtype == outputs[2].dtype == torch.float32
    testing.check_values(call(backend), inputs, reference, gradient_rtol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("group_size", [16, 64])
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("norm_before_gate", [False, True])
def test_group_gradients(backend, group_size, gate, norm_before_gate):
    """B28: gradients of grouped norms, D = 64."""
    options = dict(dim=64, shape=(3,), group_size=group_size, z=gate, norm_before_gate=norm_before_gate)
    testing.check_gradcheck(call(backend), example_inputs(dtype=torch.float64, **options))


@pytest.mark.parametrize("weight", [False, True])
def test_very_many_rows(backend, weight):
    """B31, B54: very many rows with and without a weight."""
    inputs = example_inputs(shape=(backend.many,), dim=8, weight=weight, bias=False, z=False, residual=False)
    testing.check_values(call(backend), inputs, reference)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_range(backend, dtype):
    """B16: squares beyond the half types' range stay finite."""
    x = torch.tensor([[3e4, -2e4, 1e4, 5e3]], dtype=dtype)
    out, _, rms = backend.op("rms_norm")(x.to(backend.device))
    assert torch.isfinite(out).all()
    testing.assert_close(out, reference(x.double())[0], dtype)
    assert rms.dtype == torch.float32


# ---- agrees with the test vectors ----


@pytest.mark.parametrize("name", vectors.names("rms_norm", without=["rms_norm_seed"]))
def test_agrees_with_vector(backend, name):
    vector = vectors.load(name)
    arguments = vector.arguments("eps", "group_size", "norm_before_gate")
    for argument in vector.gradients:
        arguments[argument] = arguments[argument].requires_grad_()
    out, residual_out, _ = call(backend)(**arguments)
    results = {"out": out, "residual_out": residual_out}
    for key, expected in vector.outputs.items():
        testing.assert_close(results[key], expected, what=key)
    for key, gradient in vectors.run_backward(vector, arguments, results).items():
        testing.assert_close(gradient, vector.gradients[key], what=f"gradient of {key}")


def test_seed_backward_overwrites_dx_and_accumulates_dweight(backend):
    vector = vectors.load("rms_norm_seed")
    given = vector.inputs
    dx = torch.full_like(given["x"], float("nan"))
    dweight = given["d_scale_acc"].clone()
    backend.op("rms_norm_bwd_")(given["dy"], given["x"], given["scale"], given["rms"], dx, dweight)
    testing.assert_close(dx, vector.outputs["dx"], what="dx")
    testing.assert_close(dweight, vector.outputs["d_scale"], what="dweight")


@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
def test_seed_backward_equals_the_functional_one(backend, dtype):
    x, dy = torch.randn(2, 3, 40).to(dtype), torch.randn(2, 3, 40).to(dtype)
    weight = torch.randn(40)
    rms = backend.op("rms_norm")(x, weight)[2]
    expected = backend.op("rms_norm_bwd")(dy, None, x, weight, None, None, None, rms, None, True)
    wide = torch.zeros(2, 3, 80, dtype=dtype)
    dx, dweight = wide[..., ::2], torch.ones(40)
    versions = dx._version, dweight._version
    assert backend.op("rms_norm_bwd_")(dy, x, weight, rms, dx, dweight) is None
    assert torch.equal(dx, expected[0])
    assert not wide[..., 1::2].any()
    torch.testing.assert_close(dweight, 1 + expected[1])
    assert dx._version > versions[0] and dweight._version > versions[1]


# ---- strides ----


@pytest.mark.parametrize("name", ["x", *OPTIONAL])
def test_strides(backend, name):
    """B49."""
    checks.input_layouts(call(backend), example_inputs(group_size=4), name)


def test_strides_of_incoming_gradients(backend):
    """B34."""
    checks.gradient_layouts(call(backend), example_inputs())


def test_leading_axes_that_do_not_merge(backend):
    x = torch.randn(6, 5, 4, 3, 8).permute(3, 1, 0, 2, 4)[:, ::2]
    assert torch.equal(backend.op("rms_norm")(x)[0], backend.op("rms_norm")(x.contiguous())[0])


def test_strides_beyond_32_bits(backend):
    """B55: offsets past 2^31 elements."""
    storage = torch.empty(2**31 + 64, dtype=torch.bfloat16, device=backend.device)
    far = storage.as_strided((2, 16), (2**31 + 16, 1))
    far.copy_(torch.randn(2, 16))
    found = testing.run_with_gradients(call(backend), {"x": far, "z": far.clone()})
    expected = testing.run_with_gradients(call(backend), {"x": far.clone(), "z": far.clone()}, upstream=found[1])
    assert torch.equal(found[0][0], expected[0][0])
    assert torch.equal(found[2]["x"], expected[2]["x"])


# ---- gradcheck, opcheck ----


@pytest.mark.parametrize("subset", SUBSETS, ids=subset_id)
@pytest.mark.parametrize("group_size", [None, 3])
@pytest.mark.parametrize("norm_before_gate", [True, False])
def test_gradcheck(backend, subset, group_size, norm_before_gate):
    options = dict(shape=(2,), dim=6, group_size=group_size, norm_before_gate=norm_before_gate)
    testing.check_gradcheck(call(backend), example_inputs(dtype=torch.float64, **options, **subset))


@pytest.mark.parametrize("subset", SUBSETS, ids=subset_id)
def test_opcheck(backend, subset):
    """B100: fakes promise what kernels do; layouts too."""
    inputs = example_inputs(**subset, group_size=4)
    names = [name for name in ORDER[:5] if name in inputs]
    for layout in (lambda t: t, testing.transposed, testing.sliced):
        given = {k: (layout(v) if k in names and v.dim() > 1 else v) for k, v in inputs.items()}
        tensors = [given[name].requires_grad_() if name in given else None for name in ORDER[:5]]
        options = [inputs[name] for name in ORDER[5:]]
        torch.library.opcheck(backend.op("rms_norm").default, (*tensors, *options))
        plain = [None if tensor is None else tensor.detach() for tensor in tensors]
        torch.library.opcheck(backend.op("rms_norm_fwd").default, (*plain, *options))
        out, residual_out, rms = backend.op("rms_norm_fwd")(*plain, *options)
        dresidual = residual_out if subset["residual"] else None
        torch.library.opcheck(backend.op("rms_norm_bwd").default, (out, dresidual, *plain, rms, 4, True))


def test_opcheck_of_the_in_place_backward(backend):
    x, dy, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    rms = backend.op("rms_norm")(x)[2]
    arguments = (dy, x, weight, rms, torch.empty(3, 8), torch.zeros(8))
    torch.library.opcheck(backend.op("rms_norm_bwd_").default, arguments)


# ---- compile, export, functional transforms ----


def test_compile_with_dynamic_shapes(backend):
    """B98."""
    checks.compiles_once(call(backend), [example_inputs(shape=(rows, 3), group_size=4) for rows in (2, 7, 33)])


def test_export(backend):
    class Norm(torch.nn.Module):
        def forward(self, x, weight):
            return backend.op("rms_norm")(x, weight)[0]

    arguments = (torch.randn(4, 8), torch.randn(8))
    rows = torch.export.Dim("rows", min=2, max=1024)
    program = torch.export.export(Norm(), arguments, dynamic_shapes=({0: rows}, None)).run_decompositions()
    assert any("rms_norm" in str(node.target) for node in program.graph.nodes)
    x = torch.randn(9, 8)
    assert torch.equal(program.module()(x, arguments[1]), Norm()(x, arguments[1]))


def test_checkpoint(backend):
    inputs = example_inputs(bias=False, z=False, residual=False)
    x, weight = (inputs[name].requires_grad_() for name in ("x", "weight"))

    def loss(x, weight):
        return backend.op("rms_norm")(x, weight)[0].square().sum()

    expected = torch.autograd.grad(loss(x, weight), (x, weight))
    saved = torch.utils.checkpoint.checkpoint(loss, x, weight, use_reentrant=False)
    assert all(map(torch.equal, torch.autograd.grad(saved, (x, weight)), expected))


def test_functional_transforms(backend):
    """B45."""
    inputs = example_inputs(shape=(4,), residual=False, group_size=4)
    checks.functional_transforms(lambda **i: call(backend)(**i)[:1], inputs, batched="x")


def test_what_cannot_be_differentiated_is_refused(backend):
    x = torch.randn(3, 8)
    checks.refusals(lambda x: backend.op("rms_norm")(x)[:1], "rms_norm", x)
    assert not backend.op("rms_norm")(x.requires_grad_())[2].requires_grad


def test_autocast_changes_nothing(backend):
    inputs = example_inputs()
    with torch.autocast(backend.device, torch.bfloat16):
        found = call(backend)(**inputs)
    assert all(map(torch.equal, found, call(backend)(**inputs)))


# ---- determinism, CPU levels ----


def test_bitwise_repeatable_for_any_number_of_threads(backend):
    """B96."""
    checks.bitwise_repeatable(call(backend), example_inputs(shape=(500,), dim=100))


LEVEL_SCRIPT = """
import torch
from mamba_ops import rms_norm, testing
from mamba_ops.reference.rms_norm import example_inputs, rms_norm as reference
for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
    for dim, norm_before_gate in ((1, True), (37, False), (128, True)):
        inputs = example_inputs(dtype=dtype, dim=dim, norm_before_gate=norm_before_gate)
        testing.check_values(rms_norm, inputs, reference)
"""


@pytest.mark.parametrize("level", checks.LEVELS)
def test_every_cpu_level(level):
    checks.run_at_level(level, LEVEL_SCRIPT)


# ---- error texts ----


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(weight=torch.ones(5)), r"rms_norm: weight must have shape \(dim,\) = \(8,\), got \(5,\)"),
        (dict(bias=torch.ones(2, 4)), r"rms_norm: bias must have shape \(dim,\) = \(8,\), got \(2, 4\)"),
        (dict(z=torch.ones(3, 7)), r"rms_norm: z must have x's shape \(3, 8\), got \(3, 7\)"),
        (dict(z=torch.ones(3, 8).bfloat16()), r"rms_norm: z must have x's dtype float32, got bfloat16"),
        (dict(residual=torch.ones(8)), r"rms_norm: residual must have x's shape \(3, 8\), got \(8,\)"),
        (dict(residual=torch.ones(3, 8).int()), r"residual must be float64, float32, bfloat16 or float16, got int32"),
        (dict(x=torch.ones(3, 8).long()), r"rms_norm: x must be float64, float32, bfloat16 or float16, got int64"),
        (dict(x=torch.tensor(1.0)), r"rms_norm: x must have shape \(\.\.\., dim\), got \(\)"),
        (dict(group_size=3), r"rms_norm: group_size must be positive and divide dim = 8, got 3"),
        (dict(group_size=0), r"rms_norm: group_size must be positive and divide dim = 8, got 0"),
        (dict(eps=0.0), r"rms_norm: eps must be positive, got 0"),
    ],
)
def test_error_texts(change, text):
    checks.error_text(mamba_ops.rms_norm, {"x": torch.ones(3, 8), **change}, text)


def test_mixed_devices_name_the_odd_argument():
    """B07."""
    with pytest.raises(RuntimeError, match=r"rms_norm: weight must be on x's device (cpu|meta), got (cpu|meta)"):
        mamba_ops.rms_norm(torch.ones(3, 8), torch.ones(8, device="meta"))


def test_in_place_backward_refuses_leaves_that_require_grad(backend):
    x, weight = torch.randn(3, 8), torch.randn(8)
    rms = backend.op("rms_norm")(x)[2]
    dweight = torch.zeros(8, requires_grad=True)
    with pytest.raises(RuntimeError, match="rms_norm_bwd_: dweight is written in place"):
        backend.op("rms_norm_bwd_")(x, x, weight, rms, torch.empty(3, 8), dweight)
    with torch.no_grad():
        backend.op("rms_norm_bwd_")(x, x, weight, rms, torch.empty(3, 8), dweight)
    assert dweight.abs().sum() > 0
