"""conv1d_step, conv1d_step_ and their backward forms."""

from itertools import product

import checks
import pytest
import torch
import vectors

import mamba_ops
from mamba_ops import testing
from mamba_ops.reference import conv1d_step as reference
from mamba_ops.reference.conv1d_step import example_inputs

ORDER = ("x", "conv_state", "weight", "bias")


def call(backend):
    """The backend's functional operator as a function of keyword arguments."""

    def function(activation=None, **inputs):
        return backend.op("conv1d_step")(*(inputs.get(name) for name in ORDER), activation or "none")

    return function


def call_(backend):
    """The backend's in-place operator as a function of keyword arguments."""

    def function(activation=None, cache_seqlens=None, conv_state_indices=None, **inputs):
        tensors = [inputs.get(name) for name in ORDER]
        return backend.op("conv1d_step_")(*tensors, activation or "none", cache_seqlens, conv_state_indices)

    return function


# ---- agrees with the reference ----


@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 8, 31])
def test_every_width(backend, dtype, width):
    """B52."""
    for extra, seqlen in product((0, 1, 3), (None, 1, 2, 7)):
        inputs = example_inputs(dtype=dtype, width=width, state_len=width - 1 + extra, seqlen=seqlen, dim=19)
        testing.check_values(call(backend), inputs, reference.conv1d_step)


@pytest.mark.parametrize("dim", [1, 3, 7, 8, 9, 16, 17, 33])
@pytest.mark.parametrize("batch", [1, 2, 40])
def test_every_size(backend, batch, dim):
    for bias, activation in product((True, False), (None, "silu")):
        inputs = example_inputs(batch=batch, dim=dim, bias=bias, activation=activation)
        testing.check_values(call(backend), inputs, reference.conv1d_step)


@pytest.mark.parametrize("batch, dim, seqlen", [(0, 5, None), (2, 0, None), (2, 5, 0)])
def test_zero_sizes(backend, batch, dim, seqlen):
    testing.check_values(call(backend), example_inputs(batch=batch, dim=dim, seqlen=seqlen), reference.conv1d_step)


def test_parameters_and_states_of_other_dtypes(backend):
    inputs = example_inputs(dtype=torch.bfloat16)
    inputs.update(
        weight=inputs["weight"].float(), bias=inputs["bias"].double(), conv_state=inputs["conv_state"].float()
    )
    out, new_state = call(backend)(**inputs)
    assert (out.dtype, new_state.dtype) == (torch.bfloat16, torch.float32)
    testing.check_values(call(backend), inputs, reference.conv1d_step, rtol=2e-2, gradient_rtol=2e-2)


@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
@pytest.mark.parametrize("state_len", [3, 4, 7])
@pytest.mark.parametrize("circular", [False, True])
def test_in_place_agrees_with_reference(backend, dtype, state_len, circular):
    """B78: 12 steps with state length 3, 4 and 7, linear and circular; then several tokens at once."""
    inputs = example_inputs(dtype=dtype, dim=21, state_len=state_len)
    expected_state, state = inputs["conv_state"].clone(), inputs["conv_state"].clone()
    position = torch.tensor([0, 2, 9], dtype=torch.int32)
    for tokens in [None] * 12 + [1, 2, 5, 9]:
        x = torch.randn(3, 21).to(dtype) if tokens is None else torch.randn(3, 21, tokens).to(dtype)
        options = {**inputs, "x": x, "cache_seqlens": position if circular else None}
        out = call_(backend)(**{**options, "conv_state": state})
        expected = reference.conv1d_step_(**{**options, "conv_state": expected_state})
        testing.assert_close(out, expected)
        assert torch.equal(state, expected_state)
        position = position + (tokens or 1)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_cache_entries(backend, index_dtype):
    """Rows pick entries of a pool; a negative index is padding: out 0, no entry touched."""
    inputs = example_inputs(dim=18)
    pool = torch.randn(6, 18, 3)
    indices = torch.tensor([4, -1, 0], dtype=index_dtype)
    found, expected = pool.clone(), pool.clone()
    out = call_(backend)(**{**inputs, "conv_state": found, "conv_state_indices": indices})
    want = reference.conv1d_step_(**{**inputs, "conv_state": expected, "conv_state_indices": indices})
    testing.assert_close(out, want)
    assert torch.equal(found, expected)
    assert not out[1].any()
    assert torch.equal(found[[1, 2, 3, 5]], pool[[1, 2, 3, 5]])


def test_twice_from_clones_and_twice_from_one_buffer(backend):
    """B77: the in-place form changes its buffer, the functional one nothing; both ranks of x."""
    inputs = example_inputs()
    state = inputs["conv_state"].clone()
    first = call_(backend)(**{**inputs, "conv_state": state.clone()})
    again = call_(backend)(**{**inputs, "conv_state": state.clone()})
    assert torch.equal(first, again)
    flat, new_state = call(backend)(**inputs)
    assert torch.equal(first, flat)
    assert torch.equal(inputs["conv_state"], state)
    with_axis = call(backend)(**{**inputs, "x": inputs["x"][..., None]})
    assert torch.equal(with_axis[0][..., 0], flat)
    assert torch.equal(with_axis[1], new_state)
    call_(backend)(**{**inputs, "conv_state": state})
    second = call_(backend)(**{**inputs, "conv_state": state})
    assert torch.equal(second, call(backend)(**{**inputs, "conv_state": new_state})[0])


@pytest.mark.parametrize("seqlen", [1, 2, 3, 5])
def test_old_and_new_cache_are_separate(backend, seqlen):
    """B80: chunks shorter than the filter read one cache and write another; the one read stays as it was."""
    inputs = example_inputs(dim=18, seqlen=seqlen, state_len=4)
    before = inputs["conv_state"].clone()
    _, new_state = call(backend)(**inputs)
    assert torch.equal(inputs["conv_state"], before)
    assert torch.equal(new_state, torch.cat([before, inputs["x"]], 2)[..., seqlen:])


# ---- agrees with the sequence operator, and with the test vectors ----


@pytest.mark.parametrize("state_len", [3, 4, 9])
def test_steps_equal_the_sequence(backend, state_len):
    """B38: 64 chained functional steps give the outputs and gradients of causal_conv1d."""
    inputs = example_inputs(dtype=torch.float64, seqlen=64, state_len=3)

    def whole(x, conv_state, weight, bias, activation):
        return backend.op("causal_conv1d")(x, weight, bias, conv_state, None, None, activation)

    def stepped(x, conv_state, weight, bias, activation):
        state = torch.nn.functional.pad(conv_state, (state_len - 3, 0))
        outs = []
        for t in range(64):
            out, state = call(backend)(x=x[..., t], conv_state=state, weight=weight, bias=bias, activation=activation)
            outs.append(out)
        return torch.stack(outs, 2), state[..., state_len - 3 :]

    expected = testing.run_with_gradients(whole, inputs)
    found = testing.run_with_gradients(stepped, inputs, upstream=expected[1])
    for out, want in zip(found[0], expected[0]):
        testing.assert_close(out, want)
    for name, gradient in found[2].items():
        testing.assert_close(gradient, expected[2][name], what=name)


@pytest.mark.parametrize("name", vectors.names("conv1d_step_bptt"))
def test_agrees_with_bptt_vector(backend, name):
    vector = vectors.load(name)
    arguments = {{"state": "conv_state"}.get(k, k): v.requires_grad_() for k, v in vector.inputs.items()}
    out, state = call(backend)(**arguments, activation=vector.meta["activation"])
    results = {"y": out, "state": state}
    for key, expected in vector.outputs.items():
        testing.assert_close(results[key], expected, what=key)
    for key, gradient in vectors.run_backward(vector, vector.inputs, results).items():
        testing.assert_close(gradient, vector.gradients[key], what=f"gradient of {key}")


@pytest.mark.parametrize("name", vectors.names("conv1d_update"))
def test_agrees_with_update_vector(backend, name):
    vector = vectors.load(name)
    out = call_(backend)(**vector.inputs, activation=vector.meta["activation"])
    testing.assert_close(out, vector.outputs["out"])
    testing.assert_close(vector.inputs["conv_state"], vector.outputs["conv_state"])


@pytest.mark.parametrize("form", ["batched", "one sample", "flat"])
def test_seed_backward_agrees_with_vector(backend, form):
    """d_x is overwritten, d_weight and d_bias accumulated onto what is passed; batched, per sample, and flat memory."""
    vector = vectors.load("conv1d_step_seed")
    given = vector.inputs
    d_x = torch.full_like(given["d_y"], float("nan"))
    d_weight, d_bias = given["d_weight_acc"].clone(), given["d_bias_acc"].clone()
    bwd = backend.op("conv1d_step_bwd_")
    versions = d_x._version, d_weight._version, d_bias._version
    if form == "batched":
        assert bwd(given["d_y"], given["state"], given["weight"], d_x, d_weight, d_bias) is None
    for b in range(3 if form != "batched" else 0):
        if form == "flat":
            rows = (given["d_y"][b], given["state"][b].flatten(), given["weight"].flatten(), d_x[b], d_weight.view(-1))
        else:
            rows = (given["d_y"][b], given["state"][b], given["weight"], d_x[b], d_weight)
        bwd(*rows, d_bias)
    for found, key in ((d_x, "d_x"), (d_weight, "d_weight"), (d_bias, "d_bias")):
        testing.assert_close(found, vector.outputs[key], what=key)
    assert d_x._version > versions[0] and d_weight._version > versions[1] and d_bias._version > versions[2]


@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
def test_seed_backward_without_bias_and_with_strides(backend, dtype):
    d_y, state, weight = torch.randn(3, 20).to(dtype), torch.randn(3, 20, 4).to(dtype), torch.randn(20, 4).to(dtype)
    wide = torch.zeros(3, 40, dtype=dtype)
    d_x, d_weight = wide[:, ::2], testing.transposed(torch.ones(20, 4))
    backend.op("conv1d_step_bwd_")(d_y, testing.transposed(state), weight, d_x, d_weight, None)
    testing.assert_close(d_x, d_y.double() * weight[:, 3].double())
    testing.assert_close(d_weight, 1 + torch.einsum("bd,bdk->dk", d_y.double(), state.double()), torch.float32)
    assert not wide[:, 1::2].any()


# ---- strides ----


@pytest.mark.parametrize("name", ORDER)
@pytest.mark.parametrize("seqlen", [None, 3])
def test_strides(backend, name, seqlen):
    checks.input_layouts(call(backend), example_inputs(dim=20, seqlen=seqlen), name)


def test_strides_of_incoming_gradients(backend):
    """B34."""
    checks.gradient_layouts(call(backend), example_inputs(dim=18))


def test_strided_caches_in_place(backend):
    inputs = example_inputs(dim=18)
    expected = inputs["conv_state"].clone()
    call_(backend)(**{**inputs, "conv_state": expected})
    for layout, view in list(testing.strided_variants(inputs["conv_state"].clone())):
        call_(backend)(**{**inputs, "conv_state": view})
        assert torch.equal(view, expected), layout


# ---- gradcheck, opcheck, compile, transforms ----


@pytest.mark.parametrize("width, state_len, seqlen", [(1, 0, None), (1, 1, None), (4, 3, None), (4, 4, 2), (3, 6, 4)])
def test_gradcheck(backend, width, state_len, seqlen):
    for bias, activation in product((True, False), (None, "silu")):
        options = dict(width=width, state_len=state_len, seqlen=seqlen, bias=bias, activation=activation)
        inputs = example_inputs(dtype=torch.float64, batch=2, dim=3, **options)
        testing.check_gradcheck(call(backend), inputs)


@pytest.mark.parametrize("bias", [True, False])
def test_opcheck(backend, bias):
    """B100, B101: the schema marks what is written."""
    inputs = example_inputs(bias=bias, state_len=5)
    tensors = [inputs.get(name) for name in ORDER]
    leaves = [None if tensor is None else tensor.clone().requires_grad_() for tensor in tensors]
    torch.library.opcheck(backend.op("conv1d_step").default, (*leaves, "silu"))
    torch.library.opcheck(backend.op("conv1d_step_fwd").default, (*tensors, "silu"))
    gradients = (torch.randn(3, 5), torch.randn(3, 5, 5))
    torch.library.opcheck(backend.op("conv1d_step_bwd").default, (*gradients, *tensors, "silu"))
    torch.library.opcheck(backend.op("conv1d_step_").default, (*tensors, "silu"))
    index = torch.tensor([0, 2, 1])
    torch.library.opcheck(backend.op("conv1d_step_").default, (*tensors, "silu", index, index))
    seed = (torch.randn(3, 5), torch.randn(3, 5, 4), inputs["weight"], torch.empty(3, 5), torch.zeros(5, 4))
    torch.library.opcheck(backend.op("conv1d_step_bwd_").default, (*seed, torch.zeros(5) if bias else None))


def test_compile(backend):
    """B98."""
    checks.compiles_once(call(backend), [example_inputs(batch=batch, seqlen=4) for batch in (2, 3, 5)])


def test_compiled_loop_of_in_place_steps(backend):
    """B101."""
    checks.compiled_loop(call_(backend), {**example_inputs(), "activation": "silu"}, "conv_state")


def test_functional_transforms(backend):
    """B45."""
    checks.functional_transforms(call(backend), example_inputs(), batched="x")


def test_what_cannot_be_differentiated_is_refused(backend):
    inputs = example_inputs()
    checks.refusals(lambda x: call(backend)(**{**inputs, "x": x}), "conv1d_step", inputs["x"])


# ---- determinism, CPU levels, autocast ----


def test_bitwise_repeatable_for_any_number_of_threads(backend):
    """B96."""
    checks.bitwise_repeatable(call(backend), example_inputs(batch=64, dim=300))


LEVEL_SCRIPT = """
import torch
from mamba_ops import conv1d_step, testing
from mamba_ops.reference.conv1d_step import example_inputs, conv1d_step as reference
for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
    for options in (dict(dim=1, width=1), dict(dim=37, width=4), dict(dim=16, width=3, state_len=5, seqlen=9)):
        testing.check_values(conv1d_step, example_inputs(dtype=dtype, **options), reference)
"""


@pytest.mark.parametrize("level", checks.LEVELS)
def test_every_cpu_level(level):
    checks.run_at_level(level, LEVEL_SCRIPT)


def test_autocast(backend):
    """B91: x is cast, weights and float32 caches are not."""
    inputs = example_inputs()
    cast = {**inputs, "x": inputs["x"].bfloat16()}
    with torch.autocast(backend.device, torch.bfloat16):
        out, new_state = call(backend)(**inputs)
        in_place = call_(backend)(**{**inputs, "conv_state": inputs["conv_state"].clone()})
    assert (out.dtype, new_state.dtype) == (torch.bfloat16, torch.float32)
    expected = call(backend)(**cast)
    assert torch.equal(out, expected[0]) and torch.equal(in_place, expected[0])


# ---- error texts ----


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(x=torch.ones(3)), r"x must have shape \(batch, dim\) or \(batch, dim, seqlen\), got \(3,\)"),
        (
            dict(conv_state=torch.ones(3, 5, 2)),
            r"conv_state must hold at least width - 1 = 3 samples, got shape \(3, 5, 2\)",
        ),
        (dict(conv_state=torch.ones(2, 5, 3)), r"conv_state must have shape \(batch, dim, state_len\) = \(3, 5, 3\)"),
        (dict(weight=torch.ones(4, 4)), r"weight must have shape \(dim, width\) = \(5, 4\), got \(4, 4\)"),
        (dict(bias=torch.ones(4)), r"bias must have shape \(dim,\) = \(5,\), got \(4,\)"),
        (dict(conv_state=torch.ones(3, 5, 3).int()), r"conv_state must be float64, .*, got int32"),
    ],
)
def test_error_texts(change, text):
    for function in (mamba_ops.conv1d_step, mamba_ops.conv1d_step_):
        checks.error_text(function, {**example_inputs(), **change}, rf"conv1d_step_?: {text}")


def test_in_place_errors():
    inputs = example_inputs()
    with pytest.raises(ValueError, match="conv1d_step: activation must be None, 'silu' or 'swish', got 'relu'"):
        mamba_ops.conv1d_step(**{**inputs, "activation": "relu"})
    with pytest.raises(RuntimeError, match=r"conv_state_indices must be below conv_state's number of entries 3, got 3"):
        mamba_ops.conv1d_step_(**inputs, conv_state_indices=torch.tensor([0, 3, 1]))
    for name in ORDER:
        given = {**inputs, name: inputs[name].clone().requires_grad_()}
        with pytest.raises(RuntimeError, match=f"conv1d_step_: {name} requires grad, but conv1d_step_ works in place"):
            mamba_ops.conv1d_step_(**given)
        with torch.no_grad():
            mamba_ops.conv1d_step_(**given)
    with pytest.raises(RuntimeError, match="conv1d_step_: conv_state is written in place"):
        torch.ops.mamba.conv1d_step_(inputs["x"], inputs["conv_state"].requires_grad_(), inputs["weight"])


def test_version_counter(backend):
    inputs = example_inputs()
    before = inputs["conv_state"]._version
    call_(backend)(**inputs)
    assert inputs["conv_state"]._version > before


@pytest.mark.parametrize(
    "position, tensor, text",
    [
        (1, torch.ones(2, 5, 4), r"state must have shape \(batch, dim, width\) = \(3, 5, 4\), got \(2, 5, 4\)"),
        (1, torch.ones(3, 20), r"state must have shape \(batch, dim, width\), got \(3, 20\)"),
        (2, torch.ones(21), r"weight must have shape \(dim, width\) or \(dim \* width,\) with dim = 5, got \(21,\)"),
        (3, torch.ones(3, 4), r"d_x must have .*, got \(3, 4\)"),
        (4, torch.ones(4, 5), r"d_weight must have shape \(dim, width\) = \(5, 4\), got \(4, 5\)"),
        (5, torch.ones(4), r"d_bias must have shape \(dim,\) = \(5,\), got \(4,\)"),
    ],
)
def test_seed_backward_errors(position, tensor, text):
    arguments = [
        torch.ones(3, 5),
        torch.ones(3, 5, 4),
        torch.ones(5, 4),
        torch.ones(3, 5),
        torch.ones(5, 4),
        torch.ones(5),
    ]
    arguments[position] = tensor
    for device in ("cpu", "meta"):
        with pytest.raises(RuntimeError, match=f"conv1d_step_bwd_: {text}"):
            torch.ops.mamba.conv1d_step_bwd_(*(argument.to(device) for argument in arguments))
