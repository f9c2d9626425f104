"""causal_conv1d: values, gradients, memory layouts, compile, transforms, determinism, errors. Packed sequences and
states: test_causal_conv1d_packing.py; batches of short rows, large outputs: test_causal_conv1d_rows.py."""

from itertools import product

import checks
import pytest
import torch
import vectors

import mamba_ops
from mamba_ops import testing
from mamba_ops.reference.causal_conv1d import causal_conv1d as reference
from mamba_ops.reference.causal_conv1d import example_inputs

OPTIONAL = ("bias", "initial_state")
SUBSETS = [
    dict(zip((*OPTIONAL, "activation", "packing"), choice))
    for choice in product((False, True), (False, True), ("none", "silu"), (None, "seq_idx", "cu_seqlens"))
]
ORDER = ("x", "weight", "bias", "initial_state", "seq_idx", "cu_seqlens")


def call(backend):
    """The backend's operator as a function of keyword arguments."""

    def function(**inputs):
        tensors = [inputs.pop(name, None) for name in ORDER]
        return backend.op("causal_conv1d")(*tensors, **inputs)

    return function


def subset_id(subset):
    return (
        "-".join(str(value) if isinstance(value, str) else name for name, value in subset.items() if value) or "plain"
    )


def channel_last(inputs):
    return {**inputs, "x": testing.transposed(inputs["x"])}


# ---- agrees with the reference ----


@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 8, 31])
def test_every_width_and_length(backend, dtype, width):
    """B52: every width and dtype, both memory layouts, from length 0 to longer than a tile."""
    for seqlen in (0, 1, 2, 3, 15, 16, 17, 33, 70, 300):
        inputs = example_inputs(dtype=dtype, width=width, seqlen=seqlen, dim=6)
        testing.check_values(call(backend), inputs, reference)
        testing.check_values(call(backend), channel_last(inputs), reference)


@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
@pytest.mark.parametrize("dim", [2, 3, 7, 9, 16, 17, 40, 300])
def test_every_dim(backend, dtype, dim):
    """B51: no divisibility is asked of dim."""
    for width, seqlen in ((4, 50), (3, 5), (6, 20)):
        inputs = example_inputs(dtype=dtype, dim=dim, width=width, seqlen=seqlen)
        testing.check_values(call(backend), inputs, reference)
        testing.check_values(call(backend), channel_last(inputs), reference)


def test_one_channel(backend):
    """B51. A sum over one channel may cancel, so this compares in float64."""
    for seqlen in (1, 40, backend.long):
        inputs = example_inputs(dtype=torch.float64, dim=1, seqlen=seqlen)
        testing.check_values(call(backend), inputs, reference)
        testing.check_values(call(backend), channel_last(inputs), reference)


@pytest.mark.parametrize("subset", SUBSETS, ids=subset_id)
@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
def test_every_subset_of_optional_arguments(backend, dtype, subset):
    """B33, B09: outputs and gradients whatever is present."""
    inputs = example_inputs(dtype=dtype, seqlen=45, **subset)
    testing.check_values(call(backend), inputs, reference)
    testing.check_values(call(backend), channel_last(inputs), reference)


@pytest.mark.parametrize("sizes", [dict(batch=0), dict(dim=0), dict(seqlen=0), dict(batch=0, seqlen=0)], ids=str)
@pytest.mark.parametrize("packing", [None, "seq_idx", "cu_seqlens"])
def test_zero_sizes(backend, sizes, packing):
    if packing == "cu_seqlens" and "batch" in sizes:
        pytest.skip("cu_seqlens means a batch of one")
    inputs = example_inputs(packing=packing, **sizes)
    testing.check_values(call(backend), inputs, reference)
    outputs, upstream, gradients = testing.run_with_gradients(call(backend), inputs)
    assert outputs[0].shape == inputs["x"].shape
    assert torch.equal(outputs[1], inputs["initial_state"])
    assert torch.equal(gradients["initial_state"], upstream[1])
    assert not gradients["weight"].any() and not gradients["bias"].any()


@pytest.mark.parametrize("batch, dim, seqlen", [("many", 1, 2), (1, "many", 2), ("many", 2, 1), (3000, 5, 16)])
def test_very_many_channels_and_rows(backend, batch, dim, seqlen):
    """B54."""
    batch, dim = (backend.many if size == "many" else min(size, backend.many) for size in (batch, dim))
    inputs = example_inputs(dtype=torch.float64, batch=batch, dim=dim, seqlen=seqlen)
    testing.check_values(call(backend), inputs, reference)
    testing.check_values(call(backend), channel_last(inputs), reference)


def test_outputs_that_pass_by_the_caches(backend):
    """Large outputs in long rows are written with streaming stores, where rows are aligned and where they are not."""
    if backend.name == "emulated":
        pytest.skip("a matter of the CPU kernels")
    for dim, seqlen in ((128, 70000), (1027, 8200)):
        x, dout = torch.randn(2, 1, dim, seqlen)
        weight = torch.randn(dim, 4)
        expected, expected_dx = torch.zeros_like(x), torch.zeros_like(x)
        for k in range(4):
            back = 3 - k
            expected[..., back:] += weight[:, k, None] * x[..., : seqlen - back]
            expected_dx[..., : seqlen - back] += weight[:, k, None] * dout[..., back:]
        for given in (x, testing.transposed(x)):
            (out, _), _, gradients = testing.run_with_gradients(
                call(backend), {"x": given, "weight": weight}, ("x",), [dout, torch.zeros(1, dim, 3)]
            )
            testing.assert_close(out, expected, rtol=1e-6)
            testing.assert_close(gradients["x"], expected_dx, rtol=1e-6)


def test_parameters_and_states_of_other_dtypes(backend):
    inputs = example_inputs(dtype=torch.bfloat16, seqlen=40)
    inputs["weight"] = inputs["weight"].float()
    inputs["bias"] = inputs["bias"].double()
    inputs["initial_state"] = inputs["initial_state"].half()
    outputs, _, _ = testing.run_with_gradients(call(backend), inputs)
    assert outputs[0].dtype == outputs[1].dtype == torch.bfloat16
    testing.check_values(call(backend), inputs, reference, rtol=2e-2, gradient_rtol=2e-2)
    testing.check_values(call(backend), channel_last(inputs), reference, rtol=2e-2, gradient_rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_silu_everywhere(backend, dtype):
    """Values and slopes of silu from -120 to 120, at its limits and for NaN, against float64."""
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-30, -1e-30])
    grid = torch.cat([torch.linspace(-120, 120, 5001), special]).to(dtype)
    for x in (grid.view(1, 1, -1), grid.view(1, -1, 1)):  # lanes are time steps, and channels
        x = x.clone().requires_grad_()
        out, _ = call(backend)(x=x, weight=torch.ones(x.shape[1], 1, dtype=dtype), activation="silu")
        (slope,) = torch.autograd.grad(out, x, torch.ones_like(out))
        z = grid.double()
        sigmoid = torch.sigmoid(z)
        finite = torch.isfinite(z)
        unit = torch.finfo(dtype).eps
        error = (out.detach().flatten().double() - z * sigmoid).abs()[finite]
        assert (error <= (5 * unit * (z * sigmoid).abs() + torch.finfo(dtype).tiny)[finite]).all()
        error = (slope.flatten().double() - sigmoid * (1 + z * torch.sigmoid(-z))).abs()[finite]
        assert (error <= 4 * unit).all()
        out, slope = out.flatten(), slope.flatten()
        assert out[-5] == float("inf") and out[-4] == 0 and torch.isnan(out[-3])
        assert slope[-5] == 1 and slope[-4] == 0 and torch.isnan(slope[-3])


# ---- agrees with the test vectors ----


@pytest.mark.parametrize("name", vectors.names("conv1d", without=("conv1d_step", "conv1d_update")))
def test_agrees_with_vector(backend, name):
    vector = vectors.load(name)
    arguments = {key: value.to(backend.device) for key, value in vector.inputs.items()}
    for layout in (lambda x: x, testing.transposed):
        given = {**arguments, "x": layout(arguments["x"])}
        for input_name in vector.gradients:
            given[input_name] = given[input_name].detach().requires_grad_()
        results = call(backend)(**given, activation=vector.meta["activation"] or "none")
        outputs = dict(zip(("out", "last_state"), results))
        for output_name, expected in vector.outputs.items():
            testing.assert_close(outputs[output_name], expected, what=output_name)
        for input_name, gradient in vectors.run_backward(vector, given, outputs).items():
            testing.assert_close(gradient, vector.gradients[input_name], what=f"gradient of {input_name}")


# ---- strides ----


@pytest.mark.parametrize("name", ["x", "weight", "bias", "initial_state"])
@pytest.mark.parametrize("width", [4, 6])
def test_strides(backend, name, width):
    """B47, B49."""
    inputs = example_inputs(dtype=torch.float64, dim=19, seqlen=37, width=width)
    checks.input_layouts(call(backend), inputs, name)


@pytest.mark.parametrize("width", [4, 6])
def test_strides_of_incoming_gradients(backend, width):
    """B34: after split, cat, transpose, and stride 0 from sum()."""
    inputs = example_inputs(dtype=torch.float64, dim=19, seqlen=37, width=width)
    checks.gradient_layouts(call(backend), inputs)
    checks.gradient_layouts(call(backend), channel_last(inputs))


@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
def test_slice_of_a_wider_projection(backend, dtype, layout):
    """B49: channel offset 3, five channels, in both memory layouts; no stride has to be a multiple of anything."""
    wide = torch.randn(2, 9, 14).to(dtype) if layout == "first" else torch.randn(2, 14, 9).to(dtype).transpose(1, 2)
    inputs = example_inputs(dtype=dtype, dim=5, seqlen=14)
    inputs["x"] = wide[:, 3:8]
    testing.check_values(call(backend), inputs, reference)


def test_output_layout_follows_the_input(backend):
    """Outputs and gradients of x are channel-last if x.stride(1) == 1, else contiguous; they never alias inputs."""
    inputs = example_inputs(seqlen=9)
    for given, strides in ((inputs, (45, 9, 1)), (channel_last(inputs), (45, 1, 5))):
        outputs, _, gradients = testing.run_with_gradients(call(backend), given)
        assert outputs[0].stride() == gradients["x"].stride() == strides
        assert outputs[1].is_contiguous() and gradients["initial_state"].is_contiguous()
        assert outputs[0].data_ptr() != given["x"].data_ptr()


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_strides_beyond_32_bits(backend, axis):
    """B55: one axis of a view reaches past 2^31 elements; only the touched pages exist."""
    if backend.name != "cpu":
        pytest.skip("needs memory that is allocated when touched")
    small = torch.randn(3, 3, 3).bfloat16()
    stride = 2**30 + 7
    strides = [9, 3, 1]
    strides[axis] = stride
    memory = torch.empty(2 * stride + 64, dtype=torch.bfloat16)
    x = memory.as_strided((3, 3, 3), strides).copy_(small)
    inputs = {"x": x, "weight": torch.randn(3, 4), "bias": torch.randn(3), "activation": "silu"}
    upstream = [torch.randn(3, 3, 3).bfloat16(), torch.randn(3, 3, 3).bfloat16()]
    found = testing.run_with_gradients(call(backend), inputs, upstream=upstream)
    expected = testing.run_with_gradients(call(backend), {**inputs, "x": small}, upstream=upstream)
    assert all(map(torch.equal, found[0], expected[0]))
    for name, gradient in found[2].items():
        testing.assert_close(gradient, expected[2][name], rtol=1e-6, what=name)
    memory.as_strided((3, 3, 3), strides).copy_(upstream[0])
    del found
    again = testing.run_with_gradients(
        call(backend), {**inputs, "x": small}, upstream=[memory.as_strided((3, 3, 3), strides), upstream[1]]
    )
    for name, gradient in again[2].items():
        testing.assert_close(gradient, expected[2][name], rtol=1e-6, what=name)


# ---- gradcheck, opcheck ----


@pytest.mark.parametrize("subset", SUBSETS, ids=subset_id)
@pytest.mark.parametrize("width", [1, 2, 4, 5])
def test_gradcheck(backend, subset, width):
    """B52."""
    inputs = example_inputs(dtype=torch.float64, batch=2, dim=2, seqlen=6, width=width, **subset)
    testing.check_gradcheck(call(backend), inputs)
    testing.check_gradcheck(call(backend), channel_last(inputs))


@pytest.mark.parametrize("subset", [s for s in SUBSETS if s["activation"] == "silu"], ids=subset_id)
def test_opcheck(backend, subset):
    """B100: contiguous, transposed and sliced inputs; the raw operators too."""
    inputs = example_inputs(seqlen=7, **subset)
    raw = ("test_schema", "test_faketensor")
    for x in (inputs["x"], testing.transposed(inputs["x"]), testing.sliced(inputs["x"], 1)):
        given = [{**inputs, "x": x}.get(name) for name in ORDER]
        leaves = [t.detach().requires_grad_() if t is not None and t.is_floating_point() else t for t in given]
        torch.library.opcheck(backend.op("causal_conv1d").default, (*leaves, "silu"))
        arguments = (*given, "silu")
        torch.library.opcheck(backend.op("causal_conv1d_fwd").default, arguments, test_utils=raw)
        out, last_state = backend.op("causal_conv1d_fwd")(*arguments)
        for upstream in ((out, last_state), (out, None), (None, last_state), (None, None)):
            backward = backend.op("causal_conv1d_bwd").default
            torch.library.opcheck(backward, (*upstream, *arguments), test_utils=raw)


# ---- compile, transforms, autocast ----


@pytest.mark.parametrize("subset", [SUBSETS[0], SUBSETS[-1], SUBSETS[-2]], ids=subset_id)
def test_compile_with_dynamic_length(backend, subset):
    """B98."""
    checks.compiles_once(call(backend), [example_inputs(seqlen=seqlen, **subset) for seqlen in (9, 2, 3, 33, 200)])
    checks.compiles_once(
        call(backend), [channel_last(example_inputs(seqlen=seqlen, **subset)) for seqlen in (9, 2, 3, 33)]
    )


def test_export(backend):
    class Module(torch.nn.Module):
        def forward(self, x, weight, bias):
            return call(backend)(x=x, weight=weight, bias=bias, activation="silu")

    inputs = example_inputs(initial_state=False)
    arguments = (inputs["x"], inputs["weight"], inputs["bias"])
    length = torch.export.Dim("length", min=2)
    program = torch.export.export(Module(), arguments, dynamic_shapes=({2: length}, None, None))
    longer = torch.randn(2, 5, 64)
    for found, expected in zip(program.module()(longer, *arguments[1:]), Module()(longer, *arguments[1:])):
        assert torch.equal(found, expected)


def test_functional_transforms(backend):
    """B45."""
    inputs = example_inputs(dtype=torch.float64, batch=2, dim=3, seqlen=5)
    checks.functional_transforms(call(backend), inputs, "x")
    if backend.name == "cpu":
        checks.functional_transforms(mamba_ops.causal_conv1d, inputs, "x")


def test_what_cannot_be_differentiated_is_refused(backend):
    weight = torch.randn(3, 4)
    checks.refusals(lambda x: call(backend)(x=x, weight=weight), "causal_conv1d", torch.randn(2, 3, 5))


def test_autocast(backend):
    """x is cast; weight, bias and states are not, and float64 stays."""
    inputs = example_inputs()
    with torch.autocast(backend.device, torch.bfloat16):
        found = testing.run_with_gradients(call(backend), inputs)
        assert call(backend)(**example_inputs(dtype=torch.float64))[0].dtype == torch.float64
    cast = {**inputs, "x": inputs["x"].bfloat16()}
    expected = testing.run_with_gradients(call(backend), cast, upstream=found[1])
    assert found[0][0].dtype == torch.bfloat16 and all(map(torch.equal, found[0], expected[0]))
    for name, gradient in found[2].items():
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, expected[2][name].float())


# ---- determinism, CPU levels ----


@pytest.mark.parametrize("sizes", [dict(batch=3, dim=70, seqlen=500), dict(batch=200, dim=9, seqlen=7)], ids=str)
@pytest.mark.parametrize("packing", [None, "seq_idx"])
def test_bitwise_repeatable_for_any_number_of_threads(backend, sizes, packing):
    """B96."""
    inputs = example_inputs(packing=packing, **sizes)
    checks.bitwise_repeatable(call(backend), inputs)
    checks.bitwise_repeatable(call(backend), channel_last(inputs))


LEVEL_SCRIPT = """
import torch
from mamba_ops import causal_conv1d, testing
from mamba_ops.reference.causal_conv1d import example_inputs, causal_conv1d as reference
torch.manual_seed(0)
for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
    for width in (1, 2, 3, 4, 7):
        for packing in (None, "seq_idx", "cu_seqlens"):
            inputs = example_inputs(dtype=dtype, width=width, packing=packing, dim=21, seqlen=43)
            testing.check_values(causal_conv1d, inputs, reference)
            testing.check_values(causal_conv1d, {**inputs, "x": testing.transposed(inputs["x"])}, reference)
"""


@pytest.mark.parametrize("level", checks.LEVELS)
def test_every_cpu_level(level):
    checks.run_at_level(level, LEVEL_SCRIPT)


# ---- error texts ----


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(x=torch.ones(2, 5)), r"causal_conv1d: x must have shape \(batch, dim, seqlen\), got \(2, 5\)"),
        (dict(x=torch.ones(2, 5, 11).int()), r"causal_conv1d: x must be float64, float32, .* got int32"),
        (dict(weight=torch.ones(4, 4)), r"weight must have shape \(dim, width\) = \(5, 4\), got \(4, 4\)"),
        (dict(weight=torch.ones(5)), r"weight must have shape \(dim, width\), got \(5,\)"),
        (dict(weight=torch.ones(5, 0)), r"weight must have shape \(dim, width\) with width >= 1, got \(5, 0\)"),
        (dict(weight=torch.ones(5, 4).long()), r"weight must be float64, float32, .* got int64"),
        (dict(bias=torch.ones(4)), r"bias must have shape \(dim,\) = \(5,\), got \(4,\)"),
        (
            dict(initial_state=torch.ones(2, 5, 4)),
            r"initial_state must have shape \(batch, dim, width - 1\) = \(2, 5, 3\), got \(2, 5, 4\)",
        ),
        (dict(activation="gelu"), r"causal_conv1d: activation must be none or silu, got gelu"),
    ],
)
def test_error_texts(backend, change, text):
    checks.error_text(call(backend), {**example_inputs(), **change}, text)


def test_public_function_refuses_unknown_activations():
    with pytest.raises(ValueError, match="activation must be None, 'silu' or 'swish', got 'gelu'"):
        mamba_ops.causal_conv1d(**example_inputs(activation="gelu"))
    inputs = example_inputs(activation="swish")
    expected = mamba_ops.causal_conv1d(**{**inputs, "activation": "silu"})
    assert all(map(torch.equal, mamba_ops.causal_conv1d(**inputs), expected))


def test_mixed_devices_name_the_odd_argument():
    inputs = example_inputs()
    for name in ("weight", "bias", "initial_state"):
        with pytest.raises(RuntimeError, match=f"causal_conv1d: {name} must be on x's device cpu, got meta"):
            mamba_ops.causal_conv1d(**{**inputs, name: inputs[name].to("meta")})
