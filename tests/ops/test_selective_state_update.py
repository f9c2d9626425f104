"""selective_state_update, selective_state_update_ and the backward form."""

from itertools import product

import checks
import pytest
import torch
import vectors

import mamba_ops
from mamba_ops import testing
from mamba_ops.reference import selective_state_update as reference
from mamba_ops.reference.selective_state_update import example_inputs

ORDER = ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias")
OPTIONAL = ("D", "z", "dt_bias")
SUBSETS = [dict(zip(OPTIONAL, present)) for present in product((False, True), repeat=3)]


def call(backend):
    """The backend's functional operator as a function of keyword arguments."""

    def function(dt_softplus=False, **inputs):
        return backend.op("selective_state_update")(*(inputs.get(name) for name in ORDER), dt_softplus)

    return function


def call_(backend):
    """The backend's in-place operator as a function of keyword arguments."""

    def function(dt_softplus=False, state_batch_indices=None, **inputs):
        tensors = [inputs.get(name) for name in ORDER]
        return backend.op("selective_state_update_")(*tensors, dt_softplus, state_batch_indices)

    return function


def subset_id(subset):
    return "+".join(name for name, present in subset.items() if present) or "plain"


# ---- agrees with the reference ----


@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
@pytest.mark.parametrize("nheads, ngroups", [(None, 1), (1, 1), (4, 2), (6, 3), (4, 4)])
@pytest.mark.parametrize("subset", SUBSETS, ids=subset_id)
def test_every_subset_of_optional_arguments(backend, dtype, nheads, ngroups, subset):
    """B33, B83, B85: D is per channel; head h uses group h // (nheads / ngroups); each option absent on its own."""
    for softplus in (False, True):
        inputs = example_inputs(dtype=dtype, nheads=nheads, ngroups=ngroups, dt_softplus=softplus, **subset)
        testing.check_values(call(backend), inputs, reference.selective_state_update)


@pytest.mark.parametrize("dstate", [1, 3, 16, 17, 257, 300])
@pytest.mark.parametrize("headdim", [1, 3, 16, 37])
def test_every_size(backend, headdim, dstate):
    """B53."""
    for nheads in (None, 2):
        inputs = example_inputs(nheads=nheads, headdim=headdim, dstate=dstate)
        testing.check_values(call(backend), inputs, reference.selective_state_update)


@pytest.mark.parametrize("sizes", [dict(batch=0), dict(headdim=0), dict(dstate=0), dict(batch=0, headdim=0, dstate=0)])
@pytest.mark.parametrize("nheads", [None, 4])
def test_zero_sizes(backend, sizes, nheads):
    testing.check_values(call(backend), example_inputs(nheads=nheads, **sizes), reference.selective_state_update)


def test_very_many_rows_and_channels(backend):
    """B54."""
    for sizes in (dict(batch=backend.many, headdim=1), dict(batch=1, headdim=backend.many)):
        inputs = example_inputs(nheads=None, dstate=1, **sizes)
        testing.check_values(call(backend), inputs, reference.selective_state_update)


def test_tied_parameters(backend):
    """Compact dt, A, D, dt_bias, expanded over headdim and dstate with stride 0; gradients of the compact ones."""
    inputs = example_inputs(dtype=torch.float64)
    compact = dict(
        dt=inputs["dt"][..., 0], A=inputs["A"][:, 0, 0], D=inputs["D"][:, 0], dt_bias=inputs["dt_bias"][:, 0]
    )

    def expanded(function, copy):
        def run(dt, A, D, dt_bias, **rest):
            tied = dict(
                dt=dt[..., None].expand(3, 4, 5),
                A=A[:, None, None].expand(4, 5, 6),
                D=D[:, None].expand(4, 5),
                dt_bias=dt_bias[:, None].expand(4, 5),
            )
            return function(**{name: copy(tensor) for name, tensor in tied.items()}, **rest)

        return run

    inputs.update(compact)
    expected = testing.run_with_gradients(expanded(call(backend), torch.clone), inputs)
    found = testing.run_with_gradients(expanded(call(backend), lambda t: t), inputs, upstream=expected[1])
    for out, want in zip(found[0], expected[0]):
        testing.assert_close(out, want)
    for name, gradient in found[2].items():
        testing.assert_close(gradient, expected[2][name], what=name)


def test_states_and_parameters_of_other_dtypes(backend):
    inputs = example_inputs(dtype=torch.bfloat16)
    inputs.update(state=inputs["state"].bfloat16(), A=inputs["A"].double(), D=inputs["D"].half())
    out, new_state = call(backend)(**inputs)
    assert (out.dtype, new_state.dtype) == (torch.bfloat16, torch.bfloat16)
    rounded = dict(rtol=2e-2, gradient_rtol=2e-2)
    testing.check_values(call(backend), inputs, reference.selective_state_update, **rounded)


@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
@pytest.mark.parametrize("nheads", [None, 4])
def test_in_place_equals_functional(backend, dtype, nheads):
    inputs = example_inputs(dtype=dtype, nheads=nheads, headdim=19)
    out, new_state = call(backend)(**inputs)
    before = inputs["state"]._version
    assert torch.equal(call_(backend)(**inputs), out)
    assert torch.equal(inputs["state"], new_state)
    assert inputs["state"]._version > before


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("nheads", [None, 4])
def test_cache_entries(backend, index_dtype, nheads):
    """Rows pick entries of a pool; a negative index is padding: out 0, no entry touched."""
    inputs = example_inputs(nheads=nheads)
    pool = torch.randn(6, *inputs["state"].shape[1:])
    indices = torch.tensor([4, -1, 0], dtype=index_dtype)
    found, expected = pool.clone(), pool.clone()
    out = call_(backend)(**{**inputs, "state": found}, state_batch_indices=indices)
    want = reference.selective_state_update_(**{**inputs, "state": expected}, state_batch_indices=indices)
    testing.assert_close(out, want)
    testing.assert_close(found, expected)
    assert not out[1].any()
    assert torch.equal(found[[1, 2, 3, 5]], pool[[1, 2, 3, 5]])


# ---- agrees with the sequence operator, and with the test vectors ----


def test_steps_equal_the_scan(backend):
    """B38: 64 chained functional steps give the outputs and gradients of selective_scan."""
    length = 64
    inputs = example_inputs(dtype=torch.float64, nheads=None)
    for name in ("x", "dt", "B", "C", "z"):
        inputs[name] = torch.randn(*inputs[name].shape, length, dtype=torch.float64)

    def whole(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus):
        return backend.op("selective_scan")(x, dt, A, B, C, D, z, dt_bias, state, None, None, dt_softplus)

    def stepped(state, **inputs):
        outs = []
        for t in range(length):
            row = {k: v[..., t] if k in ("x", "dt", "B", "C", "z") else v for k, v in inputs.items()}
            out, state = call(backend)(state=state, **row)
            outs.append(out)
        return torch.stack(outs, 2), state

    expected = testing.run_with_gradients(whole, inputs)
    found = testing.run_with_gradients(stepped, inputs, upstream=expected[1])
    for out, want in zip(found[0], expected[0]):
        testing.assert_close(out, want)
    for name, gradient in found[2].items():
        testing.assert_close(gradient, expected[2][name], what=name)


@pytest.mark.parametrize("name", vectors.names("state_update", without=["state_update_pool"]))
def test_agrees_with_vector(backend, name):
    vector = vectors.load(name)
    leaves = {key: tensor.requires_grad_() for key, tensor in vector.inputs.items()}
    given = dict(leaves)
    if name == "state_update_tied":
        batch, nheads, headdim, dstate = given["state"].shape
        given["dt"] = given["dt"][..., None].expand(batch, nheads, headdim)
        given["A"] = given["A"][:, None, None].expand(nheads, headdim, dstate)
        for key in ("D", "dt_bias"):
            given[key] = given[key][:, None].expand(nheads, headdim)
    out, state = call(backend)(**given, dt_softplus=vector.meta["dt_softplus"])
    results = {"out": out, "state": state}
    for key, expected in vector.outputs.items():
        testing.assert_close(results[key], expected, what=key)
    for key, gradient in vectors.run_backward(vector, leaves, results).items():
        testing.assert_close(gradient, vector.gradients[key], what=f"gradient of {key}")


def test_agrees_with_pool_vector(backend):
    vector = vectors.load("state_update_pool")
    out = call_(backend)(**vector.inputs, dt_softplus=vector.meta["dt_softplus"])
    testing.assert_close(out, vector.outputs["out"])
    testing.assert_close(vector.inputs["state"], vector.outputs["state"])


# ---- strides ----


@pytest.mark.parametrize("name", ORDER)
def test_strides(backend, name):
    checks.input_layouts(call(backend), example_inputs(headdim=18), name)


def test_strides_of_incoming_gradients(backend):
    """B34."""
    checks.gradient_layouts(call(backend), example_inputs(headdim=18))


def test_strided_states_in_place(backend):
    inputs = example_inputs(headdim=18)
    expected = inputs["state"].clone()
    call_(backend)(**{**inputs, "state": expected})
    for layout, view in list(testing.strided_variants(inputs["state"].clone())):
        call_(backend)(**{**inputs, "state": view})
        testing.assert_close(view, expected, rtol=1e-6, what=layout)


# ---- gradcheck, opcheck, compile, transforms ----


@pytest.mark.parametrize("subset", SUBSETS, ids=subset_id)
@pytest.mark.parametrize("nheads", [None, 2])
def test_gradcheck(backend, subset, nheads):
    for softplus in (False, True):
        options = dict(nheads=nheads, headdim=3, dstate=2, dt_softplus=softplus)
        testing.check_gradcheck(call(backend), example_inputs(dtype=torch.float64, batch=2, **options, **subset))


@pytest.mark.parametrize("subset", SUBSETS, ids=subset_id)
@pytest.mark.parametrize("nheads", [None, 4])
def test_opcheck(backend, subset, nheads):
    """B100, B101: the schema marks what is written."""
    inputs = example_inputs(nheads=nheads, **subset)
    tensors = [inputs.get(name) for name in ORDER]
    leaves = [None if tensor is None else tensor.clone().requires_grad_() for tensor in tensors]
    torch.library.opcheck(backend.op("selective_state_update").default, (*leaves, True))
    torch.library.opcheck(backend.op("selective_state_update_fwd").default, (*tensors, True))
    gradients = (torch.randn_like(inputs["x"]), torch.randn_like(inputs["state"]))
    torch.library.opcheck(backend.op("selective_state_update_bwd").default, (*gradients, *tensors, True))
    torch.library.opcheck(backend.op("selective_state_update_").default, (*tensors, True, torch.tensor([2, 0, 1])))


def test_compile(backend):
    """B98."""
    checks.compiles_once(call(backend), [example_inputs(batch=batch) for batch in (7, 2, 3)])


def test_compiled_loop_of_in_place_steps(backend):
    """B101."""
    checks.compiled_loop(call_(backend), {**example_inputs(), "dt_softplus": True}, "state")


def test_functional_transforms(backend):
    """B45."""
    checks.functional_transforms(call(backend), example_inputs(), batched="x")


def test_what_cannot_be_differentiated_is_refused(backend):
    inputs = example_inputs()
    checks.refusals(lambda x: call(backend)(**{**inputs, "x": x}), "selective_state_update", inputs["x"])


# ---- determinism, CPU levels, autocast ----


def test_bitwise_repeatable_for_any_number_of_threads(backend):
    """B96."""
    checks.bitwise_repeatable(call(backend), example_inputs(batch=16, headdim=130, dstate=16))


LEVEL_SCRIPT = """
import torch
from mamba_ops import selective_state_update, testing
from mamba_ops.reference.selective_state_update import example_inputs, selective_state_update as reference
for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
    for options in (dict(nheads=None, headdim=1), dict(nheads=None, headdim=37, dstate=16), dict(headdim=9, dstate=19)):
        testing.check_values(selective_state_update, example_inputs(dtype=dtype, **options), reference)
"""


@pytest.mark.parametrize("level", checks.LEVELS)
def test_every_cpu_level(level):
    checks.run_at_level(level, LEVEL_SCRIPT)


def test_autocast(backend):
    """B91: activations are cast, the float32 state and parameters are not."""
    inputs = example_inputs()
    cast = {k: v.bfloat16() if k in ("x", "dt", "B", "C", "z") else v for k, v in inputs.items()}
    with torch.autocast(backend.device, torch.bfloat16):
        out, new_state = call(backend)(**inputs)
        in_place = call_(backend)(**{**inputs, "state": inputs["state"].clone()})
    expected = call(backend)(**cast)
    assert (out.dtype, new_state.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(out, expected[0]) and torch.equal(new_state, expected[1]) and torch.equal(in_place, out)


# ---- error texts ----


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(x=torch.ones(3)), r"x must have shape \(batch, dim\) or \(batch, nheads, headdim\), got \(3,\)"),
        (
            dict(state=torch.ones(3, 20, 6)),
            r"state must have shape \(batch, nheads, headdim, dstate\), got \(3, 20, 6\)",
        ),
        (dict(state=torch.ones(2, 4, 5, 6)), r"state must have shape .* = \(3, 4, 5, 6\), got \(2, 4, 5, 6\)"),
        (dict(dt=torch.ones(3, 4)), r"dt must have shape \(batch, nheads, headdim\) = \(3, 4, 5\), got \(3, 4\)"),
        (dict(A=torch.ones(4, 6)), r"A must have shape \(nheads, headdim, dstate\) = \(4, 5, 6\), got \(4, 6\)"),
        (dict(B=torch.ones(3, 3, 6), C=torch.ones(3, 3, 6)), r"B must have an ngroups that divides nheads = 4, got 3"),
        (dict(C=torch.ones(3, 1, 6)), r"C must have shape \(batch, ngroups, dstate\) = \(3, 2, 6\), got \(3, 1, 6\)"),
        (dict(dt=torch.ones(3, 4, 5).double()), r"dt must have x's dtype float32, got float64"),
        (dict(D=torch.ones(4)), r"D must have shape \(nheads, headdim\) = \(4, 5\), got \(4,\)"),
    ],
)
def test_error_texts(change, text):
    for function in (mamba_ops.selective_state_update, mamba_ops.selective_state_update_):
        checks.error_text(function, {**example_inputs(), **change}, rf"selective_state_update_?: {text}")


def test_in_place_errors():
    inputs = example_inputs()
    with pytest.raises(RuntimeError, match=r"state_batch_indices must be below state's number of entries 3, got 7"):
        mamba_ops.selective_state_update_(**inputs, state_batch_indices=torch.tensor([0, 7, 1]))
    for name in ORDER:
        given = {**inputs, name: inputs[name].clone().requires_grad_()}
        with pytest.raises(RuntimeError, match=f"selective_state_update_: {name} requires grad"):
            mamba_ops.selective_state_update_(**given)
        with torch.no_grad():
            mamba_ops.selective_state_update_(**given)
