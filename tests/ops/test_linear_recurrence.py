"""linear_recurrence and gated_scan: values, gradients, memory layouts, compile, transforms, determinism, errors."""

from itertools import product

import checks
import pytest
import torch
import vectors

import mamba_ops
from mamba_ops import reference, testing
from mamba_ops.reference.linear_recurrence import example_inputs

GATES = {"linear_recurrence": "gates", "gated_scan": "logits"}


@pytest.fixture(params=GATES)
def op(request):
    return request.param


def call(backend, op):
    """The backend's operator as a function of keyword arguments."""

    def function(
        x, initial_state=None, seq_idx=None, cu_seqlens=None, dim=1, reverse=False, return_states=True, **gates
    ):
        (gates,) = (gates[GATES[op]],)
        return backend.op(op)(x, gates, initial_state, seq_idx, cu_seqlens, dim, reverse, return_states)

    return function


def inputs_of(op, **options):
    return example_inputs(gated=op == "gated_scan", **options)


def check(backend, op, **options):
    testing.check_values(call(backend, op), inputs_of(op, **options), getattr(reference, op))


# ---- agrees with the reference ----


@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
@pytest.mark.parametrize("seqlen", [0, 1, 2, 3, 31, 63, 64, 65, 130])
def test_every_length_around_chunk_borders(backend, op, dtype, seqlen):
    for channels, reverse in (((5,), False), ((3, 40), True)):
        check(backend, op, dtype=dtype, seqlen=seqlen, channels=channels, reverse=reverse)


@pytest.mark.parametrize("channels", [1, 2, 15, 16, 17, 32, 33, 64, 100, 300])
@pytest.mark.parametrize("dim", [1, 2])
def test_every_number_of_channels(backend, op, channels, dim):
    """Time before and behind the channels."""
    for dtype, reverse in product((torch.float32, torch.bfloat16), (False, True)):
        check(backend, op, dtype=dtype, channels=(channels,), seqlen=21, dim=dim, reverse=reverse)


@pytest.mark.parametrize("dim", [1, 2, 3, -1, -3])
@pytest.mark.parametrize("channels", [(2, 20), (34, 3)])
def test_any_axis_is_time(backend, op, dim, channels):
    for dtype, reverse in product((torch.float64, torch.float16), (False, True)):
        check(backend, op, dtype=dtype, channels=channels, seqlen=70, dim=dim, reverse=reverse)


def test_batch_and_time_alone(backend, op):
    for batch, packing in product((1, 40), (None, "seq_idx")):
        check(backend, op, batch=batch, channels=(), seqlen=75, packing=packing)


def test_many_axes(backend, op):
    check(backend, op, channels=(2, 1, 2, 2, 1, 3, 2), seqlen=3, dim=4)


@pytest.mark.parametrize(
    "sizes", [dict(batch=0), dict(channels=(0,)), dict(seqlen=0), dict(batch=0, seqlen=0)], ids=str
)
def test_zero_sizes(backend, op, sizes):
    check(backend, op, **sizes)
    inputs = inputs_of(op, **sizes)
    if sizes.get("seqlen") == 0:
        last_state = call(backend, op)(**inputs)[1]
        assert torch.equal(last_state, inputs["initial_state"])


@pytest.mark.parametrize("rows", [False, True])
def test_very_many_channels_and_rows(backend, op, rows):
    batch, channels = (backend.many, 1) if rows else (1, backend.many)
    check(backend, op, batch=batch, channels=(channels,), seqlen=2)


def test_long_sequence(backend, op):
    check(backend, op, batch=1, channels=(3,), seqlen=backend.long, dim=2)


def test_only_the_last_state(backend, op):
    """The same last state and gradients, and no states of all times."""
    inputs = inputs_of(op, seqlen=150, dtype=torch.float64)
    states, last_state = call(backend, op)(**inputs)
    found = testing.run_with_gradients(call(backend, op), {**inputs, "return_states": False})
    assert found[0][0].shape == (0,) and torch.equal(found[0][1], last_state)
    upstream = [torch.zeros_like(states), found[1][1]]
    expected = testing.run_with_gradients(call(backend, op), inputs, upstream=upstream)
    for name, gradient in found[2].items():
        assert torch.equal(gradient, expected[2][name])


@pytest.mark.parametrize("gradients", [(True, False), (False, True)])
def test_absent_gradients_count_as_zero(backend, op, gradients):
    inputs = inputs_of(op, seqlen=70, dtype=torch.float64)
    leaves = {name: inputs[name].requires_grad_() for name in ("x", GATES[op], "initial_state")}
    results = [
        [out.sin().sum() for out, wanted in zip(function(**inputs), gradients) if wanted]
        for function in (call(backend, op), getattr(reference, op))
    ]
    found, expected = (torch.autograd.grad(sum(terms), list(leaves.values())) for terms in results)
    for name, gradient, want in zip(leaves, found, expected):
        testing.assert_close(gradient, want, what=name)


def test_states_of_other_dtypes(backend, op):
    inputs = inputs_of(op, dtype=torch.bfloat16)
    inputs["initial_state"] = inputs["initial_state"].half()
    states, last_state = call(backend, op)(**inputs)
    assert states.dtype == torch.bfloat16 and last_state.dtype == torch.float32
    testing.check_values(call(backend, op), inputs, getattr(reference, op), gradient_rtol=2e-2)


# ---- numbers ----


def test_gates_of_one_sum_up(backend):
    """A gate of exactly 1 keeps everything, one of 0 forgets everything, larger ones overflow to infinity."""
    x = torch.ones(1, 200, 3)
    gates = torch.stack([torch.ones(200), torch.zeros(200), torch.full((200,), 4.0)], 1)[None]
    states, last_state = backend.op("linear_recurrence")(x, gates)
    assert torch.equal(states[0, :, 0], torch.arange(1.0, 201.0)) and torch.equal(states[0, :, 1], torch.ones(200))
    assert last_state[0, 2] == float("inf")


@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
def test_extreme_logits(backend, dtype):
    """Sigmoids reach 0 and 1 without NaN; so do their gradients."""
    inputs = inputs_of("gated_scan", dtype=dtype, seqlen=40, channels=(20,))
    inputs["logits"] = (inputs["logits"] * 300).to(dtype)
    inputs["logits"][0, 3], inputs["logits"][0, 5] = float("inf"), -float("inf")
    found = testing.run_with_gradients(call(backend, "gated_scan"), inputs)
    assert all(torch.isfinite(out).all() for out in (*found[0], *found[2].values()))
    testing.check_values(call(backend, "gated_scan"), inputs, reference.gated_scan)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_states_are_not_rounded_on_the_way(backend, dtype):
    """1000 additions of 1 pass what half precision can count."""
    x = torch.ones(1, 1000, 1, dtype=dtype)
    _, last_state = backend.op("linear_recurrence")(x, x)
    assert last_state.item() == 1000


# ---- agrees with the test vectors ----


@pytest.mark.parametrize(
    "name, names, dim",
    [
        ("linear_recurrence", {"g": "gates", "x": "x", "h0": "initial_state"}, -1),
        ("gated_scan", {"a": "logits", "b": "x", "s0": "initial_state"}, 1),
    ],
)
def test_agrees_with_vector(backend, name, names, dim):
    vector = vectors.load(name)
    leaves = {key: tensor.requires_grad_() for key, tensor in vector.inputs.items()}
    states, _ = call(backend, name)(**{names[key]: leaf for key, leaf in leaves.items()}, dim=dim)
    testing.assert_close(states, vector.outputs["states"])
    for key, gradient in vectors.run_backward(vector, leaves, {"states": states}).items():
        testing.assert_close(gradient, vector.gradients[key], what=f"gradient of {key}")


# ---- strides ----


@pytest.mark.parametrize("argument", ["x", "gates", "initial_state"])
@pytest.mark.parametrize("options", [dict(channels=(34,)), dict(channels=(3, 20), dim=2), dict(reverse=True)], ids=str)
def test_strides(backend, op, argument, options):
    argument = GATES[op] if argument == "gates" else argument
    checks.input_layouts(call(backend, op), inputs_of(op, seqlen=70, **options), argument)


@pytest.mark.parametrize("dim, reverse", [(1, False), (2, True)])
def test_strides_of_incoming_gradients(backend, op, dim, reverse):
    checks.gradient_layouts(call(backend, op), inputs_of(op, seqlen=9, channels=(33,), dim=dim, reverse=reverse))


def test_broadcast_gates(backend):
    """Stride 0: one gate for all channels (expanded), and its gradient."""
    inputs = example_inputs(channels=(20,), dtype=torch.float64)
    gates = inputs.pop("gates")[..., :1]
    function = call(backend, "linear_recurrence")
    found = testing.run_with_gradients(
        lambda gates, **others: function(gates=gates.expand(2, 11, 20), **others), {**inputs, "gates": gates}
    )
    whole = {**inputs, "gates": gates.repeat(1, 1, 20)}
    expected = testing.run_with_gradients(function, whole, upstream=found[1])
    testing.assert_close(found[2]["gates"], expected[2]["gates"].sum(2, keepdim=True))


def test_strides_beyond_32_bits(backend):
    storage = torch.empty(2**31 + 4096, dtype=torch.bfloat16, device=backend.device)
    inputs = example_inputs(dtype=torch.bfloat16)
    far = storage.as_strided(inputs["x"].shape, (2**31 - 64, 32, 1)).copy_(inputs["x"])
    function = call(backend, "linear_recurrence")
    expected = testing.run_with_gradients(function, inputs)
    assert checks.equal_runs(testing.run_with_gradients(function, {**inputs, "x": far}, upstream=expected[1]), expected)


# ---- gradcheck, opcheck ----


@pytest.mark.parametrize("packing", [None, "seq_idx", "cu_seqlens"])
@pytest.mark.parametrize("initial_state, reverse", [(False, False), (True, False), (True, True)])
def test_gradcheck(backend, op, packing, initial_state, reverse):
    for dim, channels in ((1, (3,)), (2, (2, 2))):
        options = dict(dim=dim, channels=channels, packing=packing, initial_state=initial_state, reverse=reverse)
        testing.check_gradcheck(call(backend, op), inputs_of(op, dtype=torch.float64, seqlen=10, **options))


@pytest.mark.parametrize("packing", [None, "seq_idx", "cu_seqlens"])
@pytest.mark.parametrize("layout", [lambda t: t, testing.transposed, testing.sliced])
def test_opcheck(backend, op, packing, layout):
    for initial_state, return_states in product((False, True), repeat=2):
        inputs = inputs_of(op, packing=packing, initial_state=initial_state)
        x, gates = layout(inputs["x"]), layout(inputs[GATES[op]])
        others = [inputs.get(name) for name in ("initial_state", "seq_idx", "cu_seqlens")]
        utils = ("test_schema", "test_faketensor", "test_autograd_registration")
        everything = (*utils, "test_aot_dispatch_dynamic") if packing is None else utils
        leaves = (x.detach().requires_grad_(), gates.detach().requires_grad_(), *others, 1, False, return_states)
        torch.library.opcheck(backend.op(op).default, leaves, test_utils=everything)
        forward = (x, gates, *others, 1, False, return_states, True)
        torch.library.opcheck(backend.op(f"{op}_fwd").default, forward, test_utils=everything)
        states, last_state, kept = backend.op(f"{op}_fwd")(*forward)
        backward = (states if return_states else None, last_state, x, gates, *others, 1, False, kept)
        torch.library.opcheck(backend.op(f"{op}_bwd").default, backward, test_utils=everything)


# ---- compile, functional transforms ----


@pytest.mark.parametrize("packing", [None, "seq_idx", "cu_seqlens"])
def test_compile_with_dynamic_length(backend, op, packing):
    lengths = (7, 17, 130) if packing else (7, 2, 3, 17, 130)
    checks.compiles_once(call(backend, op), [inputs_of(op, seqlen=seqlen, packing=packing) for seqlen in lengths])


def test_functional_transforms(backend, op):
    function = call(backend, op)
    checks.functional_transforms(function, inputs_of(op, seqlen=9), batched="x")


def test_what_cannot_be_differentiated_is_refused(backend, op):
    inputs = inputs_of(op)
    checks.refusals(lambda x: call(backend, op)(**{**inputs, "x": x}), op, inputs["x"])


# ---- determinism, CPU levels, autocast ----


@pytest.mark.parametrize(
    "options", [dict(batch=1, channels=(300,), seqlen=150), dict(batch=40, channels=(33,), seqlen=9, dim=2)], ids=str
)
@pytest.mark.parametrize("packing", [None, "seq_idx"])
def test_bitwise_repeatable_for_any_number_of_threads(backend, op, options, packing):
    checks.bitwise_repeatable(call(backend, op), inputs_of(op, packing=packing, **options))


LEVEL_SCRIPT = """
import torch
from mamba_ops import gated_scan, linear_recurrence, reference, testing
from mamba_ops.reference.linear_recurrence import example_inputs
for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
    for options in (dict(channels=(1,)), dict(channels=(37,), seqlen=70), dict(channels=(40,), seqlen=70, dim=2)):
        for packing in (None, "seq_idx", "cu_seqlens"):
            for function in (linear_recurrence, gated_scan):
                inputs = example_inputs(dtype=dtype, packing=packing, gated=function is gated_scan, **options)
                testing.check_values(function, inputs, getattr(reference, function.__name__))
# outputs large enough to pass by the caches
inputs = example_inputs(batch=1, channels=(1024,), seqlen=8200, initial_state=False)
found = testing.run_with_gradients(linear_recurrence, inputs)
for part in (slice(0, 3), slice(500, 503), slice(1020, 1024)):
    few = {k: v[..., part] if torch.is_tensor(v) else v for k, v in inputs.items()}
    expected = testing.run_with_gradients(linear_recurrence, few, upstream=[g[..., part] for g in found[1]])
    for whole, want in zip((*found[0], *found[2].values()), (*expected[0], *expected[2].values())):
        testing.assert_close(whole[..., part], want, gradient=True)
"""


LARGE_SCRIPT = """
import torch
from mamba_ops import linear_recurrence, testing
from mamba_ops.reference.linear_recurrence import example_inputs
names = ("x", "gates", "initial_state")
for seqlen in (64, 72, 100):
    for dtype, rows in ((torch.float32, 80), (torch.bfloat16, 160)):
        inputs = example_inputs(dtype=dtype, batch=rows, channels=(512,), seqlen=seqlen, dim=2, reverse=seqlen == 72)
        upstream, quarter = None, rows // 4
        assert inputs["x"].nbytes >= 2**23 > inputs["x"][:quarter].nbytes
        for layout in (lambda t: t, testing.transposed):
            given = {**inputs, "x": layout(inputs["x"]), "gates": layout(inputs["gates"])}
            outputs, upstream, gradients = testing.run_with_gradients(linear_recurrence, given, upstream=upstream)
            for start in range(0, rows, quarter):
                part = slice(start, start + quarter)
                some = {**given, **{name: given[name][part] for name in names}}
                grads = [g[part] for g in upstream]
                few, _, wanted = testing.run_with_gradients(linear_recurrence, some, upstream=grads)
                assert all(torch.equal(whole[part], want) for whole, want in zip(outputs, few))
                assert all(torch.equal(gradients[name][part], wanted[name]) for name in names)
"""


@pytest.mark.parametrize("level", checks.LEVELS)
def test_large_outputs(level):
    """From 8 MB on, outputs in whole cache lines pass by the caches: the same bits as in small pieces."""
    checks.run_at_level(level, LARGE_SCRIPT)


@pytest.mark.parametrize("level", checks.LEVELS)
def test_every_cpu_level(level):
    checks.run_at_level(level, LEVEL_SCRIPT)


def test_autocast(backend, op):
    """x and the gates are cast; states and float64 are not."""
    inputs = inputs_of(op)
    cast = {k: v.bfloat16() if k in ("x", GATES[op]) else v for k, v in inputs.items()}
    with torch.autocast(backend.device, torch.bfloat16):
        found = testing.run_with_gradients(call(backend, op), inputs)
        assert call(backend, op)(**inputs_of(op, dtype=torch.float64))[0].dtype == torch.float64
    assert found[0][0].dtype == torch.bfloat16 and found[0][1].dtype == torch.float32
    expected = testing.run_with_gradients(call(backend, op), cast, upstream=found[1])
    assert all(map(torch.equal, found[0], expected[0]))
    for name, gradient in found[2].items():
        assert gradient.dtype == inputs[name].dtype and torch.equal(gradient, expected[2][name].to(gradient.dtype))


# ---- error texts ----


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(x=torch.ones(3)), r"x must have shape \(batch, \.\.\.\) with at least two axes, got \(3,\)"),
        (dict(x=torch.ones([1] * 10)), r"x must have at most 9 axes, got"),
        (dict(x=torch.ones(2, 11, 5).int()), r"x must be float64, float32, bfloat16 or float16, got int32"),
        (dict(dim=0), r"dim must name an axis of x other than the first, the batch, got 0"),
        (dict(dim=3), r"dim must name an axis of x other than the first, the batch, got 3"),
        (dict(dim=-3), r"dim must name an axis of x other than the first, the batch, got -3"),
        (dict(gates=torch.ones(2, 11, 4)), r"GATES must have x's shape \(2, 11, 5\), got \(2, 11, 4\)"),
        (dict(gates=torch.ones(2, 11, 5).half()), r"GATES must have x's dtype float32, got float16"),
        (
            dict(initial_state=torch.ones(2, 4)),
            r"initial_state must have x's shape without time: \(2, 5\), got \(2, 4\)",
        ),
        (dict(initial_state=torch.ones(2, 5).int()), r"initial_state must be float64, .*, got int32"),
        (dict(seq_idx=torch.ones(2, 11)), r"seq_idx must be int32 or int64, got float32"),
        (dict(seq_idx=torch.ones(2, 9).int()), r"seq_idx must have shape \(batch, seqlen\) = \(2, 11\), got \(2, 9\)"),
        (dict(cu_seqlens=torch.tensor([0, 11])), r"with cu_seqlens batch must be 1, got 2"),
    ],
)
def test_error_texts(op, change, text):
    change = {GATES[op] if k == "gates" else k: v for k, v in change.items()}
    inputs = {**inputs_of(op), **change}
    checks.error_text(getattr(mamba_ops, op), inputs, f"{op}: " + text.replace("GATES", GATES[op]))


def test_error_texts_of_packed_sequences(op):
    inputs = inputs_of(op, batch=1)
    text = r"initial_state must have x's shape without time, num_sequences in place of batch: \(2, 5\), got \(1, 5\)"
    checks.error_text(getattr(mamba_ops, op), {**inputs, "cu_seqlens": torch.tensor([0, 5, 11])}, text)
    packing = dict(seq_idx=torch.zeros(1, 11).int(), cu_seqlens=torch.tensor([0, 11]))
    text = "seq_idx and cu_seqlens must not be given together"
    checks.error_text(getattr(mamba_ops, op), {**inputs, **packing}, text)
    with pytest.raises(RuntimeError, match="cu_seqlens must end at most at seqlen = 11, got 12"):
        getattr(mamba_ops, op)(**{**inputs, "cu_seqlens": torch.tensor([0, 12])})


def test_mixed_devices_name_the_odd_argument(op):
    inputs = inputs_of(op)
    inputs["x"] = inputs["x"].to("meta")
    with pytest.raises(RuntimeError, match=rf"{op}: .* must be on x's device (cpu|meta), got (cpu|meta)"):
        getattr(mamba_ops, op)(**inputs)
