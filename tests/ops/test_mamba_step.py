"""mamba_step_, mamba_step_logits and pack_layer."""

import checks
import pytest
import torch

import mamba_ops
from mamba_ops import testing
from mamba_ops.ops.mamba_step import pack_layers
from mamba_ops.reference import mamba_step as reference

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = [
    dict(d_model=8, d_inner=16, d_state=4, d_conv=4, dt_rank=2),
    dict(d_model=1, d_inner=1, d_state=1, d_conv=1, dt_rank=1),
    dict(d_model=7, d_inner=19, d_state=3, d_conv=2, dt_rank=5),
    dict(d_model=33, d_inner=66, d_state=16, d_conv=4, dt_rank=3),
    dict(d_model=48, d_inner=80, d_state=17, d_conv=6, dt_rank=17),
]


def packed(layers):
    return pack_layers([mamba_ops.pack_layer(**layer) for layer in layers])


def run(backend, inputs, *, block=True, eps=1e-5):
    """The backend's operator on the arguments of the reference; states are written in place."""
    layers = inputs["layers"]
    d_conv, dt_rank = layers[0]["conv_weight"].shape[1], layers[0]["dt_proj"].shape[1]
    states = inputs["conv_states"], inputs["ssm_states"]
    return backend.op("mamba_step_")(inputs["hidden"], *states, *packed(layers), d_conv, dt_rank, eps, block)


def exact(inputs):
    """The same arguments in float64."""
    layers = [{name: value.double() for name, value in layer.items()} for layer in inputs["layers"]]
    return {name: layers if name == "layers" else value.double() for name, value in inputs.items()}


def check(backend, inputs, **options):
    wide = exact(inputs)
    dtype = inputs["layers"][0]["in_proj"].dtype
    out = run(backend, inputs, **options)
    assert out.dtype == torch.float32
    rtol = len(inputs["layers"]) * testing.tolerance(dtype)  # layers add up
    testing.assert_close(out, reference.mamba_step_(**wide, **options), rtol=rtol, what="hidden")
    for name in ("conv_states", "ssm_states"):
        testing.assert_close(inputs[name], wide[name], rtol=rtol, what=name)


@pytest.fixture(autouse=True)
def needs_operator(request):
    backend = getattr(request.node, "callspec", None) and request.node.callspec.params.get("backend")
    if backend and not backend.has("mamba_step_"):
        pytest.skip(f"{backend} has no mamba_step_")


# ---- agrees with the reference ----


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: str(sizes["d_inner"]))
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize("batch", [1, 2, 4, 5, 11, 16, 17, 64])
def test_agrees_with_reference(backend, sizes, dtype, batch):
    for block, biases in ((True, True), (False, False)):
        inputs = reference.example_inputs(n_layer=2, batch=batch, dtype=dtype, biases=biases, **sizes)
        check(backend, inputs, block=block)


@pytest.mark.parametrize("batch, n_layer", [(0, 2), (3, 0)])
def test_zero_sizes(backend, batch, n_layer):
    inputs = reference.example_inputs(n_layer=max(n_layer, 1), batch=batch)
    if n_layer == 0:
        weights, parameters = (rows[:0] for rows in packed(inputs["layers"]))
        states = inputs["conv_states"][:0], inputs["ssm_states"][:0]
        out = backend.op("mamba_step_")(inputs["hidden"], *states, weights, parameters, 4, 2, 1e-5, True)
        assert torch.equal(out, inputs["hidden"])
    else:
        assert run(backend, inputs).shape == (0, 8)


def test_many_steps(backend):
    """20 tokens, one after another, through states of every memory layout."""
    for layout in (lambda t: t, testing.transposed, lambda t: testing.sliced(t, 1)):
        inputs = reference.example_inputs(d_inner=40)
        wide = exact(inputs)
        states = {name: layout(inputs[name]) for name in ("conv_states", "ssm_states")}
        for _ in range(20):
            hidden = torch.randn(2, 8)
            out = run(backend, {**inputs, **states, "hidden": hidden})
            testing.assert_close(out, reference.mamba_step_(**{**wide, "hidden": hidden.double()}))
        for name, state in states.items():
            testing.assert_close(state, wide[name], what=name)


def test_long_caches_and_other_dtypes(backend):
    """A cache longer than d_conv, states in bfloat16, hidden in float16 and strided."""
    inputs = reference.example_inputs()
    inputs["conv_states"] = torch.randn(3, 2, 16, 7).bfloat16()
    inputs["hidden"] = testing.transposed(inputs["hidden"].half())
    wide = exact(inputs)
    testing.assert_close(run(backend, inputs), reference.mamba_step_(**wide))
    testing.assert_close(inputs["conv_states"], wide["conv_states"], torch.bfloat16)


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize(
    "batch, d_model, vocab",
    [(1, 8, 30), (3, 33, 100), (5, 1, 1), (0, 4, 7), (2, 4, 0), (20, 7, 30), (9, 65, 16), (35, 40, 50)],
)
def test_logits(backend, dtype, batch, d_model, vocab):
    hidden, norm_weight = torch.randn(batch, d_model), torch.randn(d_model)
    weight = torch.randn(vocab, d_model).to(dtype)
    out = backend.op("mamba_step_logits")(hidden, norm_weight, weight, 1e-5)
    expected = reference.mamba_step_logits(hidden.double(), norm_weight.double(), weight.double())
    assert out.dtype == torch.float32
    testing.assert_close(out, expected, torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)


def test_logits_of_very_many_rows(backend):
    """B54: one block a row; more than 65,535 for every backend."""
    hidden = torch.randn(70_000, 1)
    out = backend.op("mamba_step_logits")(hidden, torch.ones(1), torch.ones(1, 1), 1e-5)
    testing.assert_close(out, hidden.double() / (hidden.double().square() + 1e-5).sqrt())


def test_bitwise_repeatable_for_any_number_of_threads(backend):
    """B96."""
    inputs = reference.example_inputs(batch=6, d_model=200, d_inner=400, d_state=16)
    start = {name: inputs[name].clone() for name in ("conv_states", "ssm_states")}
    expected = None
    for repeat in range(10):
        torch.set_num_threads(1 + repeat % 3)
        states = {name: value.clone() for name, value in start.items()}
        found = (run(backend, {**inputs, **states}), *states.values())
        expected = expected or found
        assert all(map(torch.equal, found, expected))


# ---- opcheck, compile, CPU levels ----


def test_opcheck(backend):
    """B101: both states are marked as written."""
    inputs = reference.example_inputs()
    states = inputs["conv_states"], inputs["ssm_states"]
    arguments = (inputs["hidden"], *states, *packed(inputs["layers"]), 4, 2, 1e-5, True)
    torch.library.opcheck(backend.op("mamba_step_").default, arguments)
    torch.library.opcheck(
        backend.op("mamba_step_logits").default, (torch.randn(2, 8), torch.ones(8), torch.randn(9, 8), 1e-5)
    )


def test_compiled_loop(backend):
    inputs = reference.example_inputs()
    weights = packed(inputs["layers"])
    tokens = torch.randn(4, 2, 8)

    def loop(tokens, conv_states, ssm_states):
        step = backend.op("mamba_step_")
        return torch.stack([step(x, conv_states, ssm_states, *weights, 4, 2, 1e-5, True) for x in tokens.unbind()])

    eager = inputs["conv_states"].clone(), inputs["ssm_states"].clone()
    states = inputs["conv_states"].clone(), inputs["ssm_states"].clone()
    expected = loop(tokens, *eager)
    torch._dynamo.reset()
    testing.assert_close(torch.compile(loop, fullgraph=True, backend=checks.COMPILER)(tokens, *states), expected)
    assert all(map(torch.equal, states, eager))


LEVEL_SCRIPT = """
import torch
import mamba_ops.ops.mamba_step as step
from mamba_ops import testing
from mamba_ops.reference import mamba_step as reference
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    step.self_test(reference, dtype, torch.Generator().manual_seed(0))
    for batch in (1, 3, 7, 11, 16, 35):  # one vector; registers that are full and not, groups of them
        hidden, norm_weight, weight = torch.randn(batch, 33), torch.randn(33), torch.randn(50, 33).to(dtype)
        out = step.mamba_step_logits(hidden, norm_weight, weight)
        expected = reference.mamba_step_logits(hidden.double(), norm_weight.double(), weight.double())
        tolerance = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        testing.assert_close(out, expected, tolerance, what=f"logits, batch {batch}, {dtype}")
"""


@pytest.mark.parametrize("level", checks.LEVELS)
def test_every_cpu_level(level):
    checks.run_at_level(level, LEVEL_SCRIPT)


# ---- error texts ----


def arguments():
    inputs = reference.example_inputs()
    weights, parameters = packed(inputs["layers"])
    names = ("hidden", "conv_state", "ssm_state", "weights", "parameters")
    values = (inputs["hidden"], inputs["conv_states"], inputs["ssm_states"], weights, parameters)
    return dict(zip(names, values), d_conv=4, dt_rank=2)


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(hidden=torch.ones(2, 8, 1)), r"hidden must have shape \(batch, d_model\), got \(2, 8, 1\)"),
        (dict(hidden=torch.ones(4, 8)), r"conv_state must have shape .* = \(3, 4, 16, 4\), got \(3, 2, 16, 4\)"),
        (dict(ssm_state=torch.ones(3, 2, 15, 4)), r"ssm_state must have shape .* = \(3, 2, 16, 4\)"),
        (dict(d_conv=6), r"conv_state must hold at least d_conv - 1 = 5 samples, got shape \(3, 2, 16, 4\)"),
        (dict(dt_rank=0), r"dt_rank must be at least 1, got 0"),
        (dict(weights=torch.ones(3, 5)), r"weights must have shape \(n_layer, weights of a layer\) = \(3, 576\)"),
        (dict(parameters=torch.ones(2, 240)), r"parameters must have shape .*, got \(2, 240\)"),
        (dict(weights=torch.ones(3, 576).double()), r"weights must be float32, bfloat16 or float16, got float64"),
    ],
)
def test_error_texts(change, text):
    checks.error_text(mamba_ops.mamba_step_, {**arguments(), **change}, f"mamba_step_: {text}")


def test_gradients_are_refused():
    given = arguments()
    with pytest.raises(RuntimeError, match="mamba_step_: weights requires grad, but mamba_step_ works in place"):
        mamba_ops.mamba_step_(**{**given, "weights": given["weights"].requires_grad_()})
    with pytest.raises(RuntimeError, match="mamba_step_logits: weight requires grad"):
        mamba_ops.mamba_step_logits(torch.ones(1, 2), torch.ones(2), torch.ones(3, 2, requires_grad=True))
