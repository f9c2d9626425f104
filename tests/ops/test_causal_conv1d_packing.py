"""causal_conv1d: initial and last states, packed sequences, padding."""

from itertools import pairwise, product

import checks
import pytest
import torch
from test_causal_conv1d import call, channel_last

from mamba_ops import testing
from mamba_ops.reference.causal_conv1d import causal_conv1d as reference
from mamba_ops.reference.causal_conv1d import example_inputs

LAYOUTS = pytest.mark.parametrize("layout", [dict, channel_last], ids=["first", "last"])

# ---- channels side by side ----


@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
@pytest.mark.parametrize("packing", [None, "seq_idx", "cu_seqlens"])
@pytest.mark.parametrize("width", [2, 4, 9, 12, 16])
def test_channel_last_inputs_and_gradients(backend, dtype, packing, width):
    """Whole blocks of 8 steps and what is left, with and without states and what flows back into them."""
    for seqlen, dim, state in product((8, 24, 39, 72), (32, 50), (False, True)):
        options = dict(width=width, seqlen=seqlen, dim=dim, packing=packing, initial_state=state)
        inputs = channel_last(example_inputs(dtype=dtype, **options))
        with torch.no_grad():
            out, last_state = call(backend)(**inputs)
        upstream = [testing.transposed(torch.randn_like(out)), state * torch.randn_like(last_state)]
        _, _, found = testing.run_with_gradients(call(backend), inputs, upstream=upstream)
        exact = {name: value.double() if name in found else value for name, value in inputs.items()}
        _, _, wanted = testing.run_with_gradients(reference, exact, upstream=[g.double() for g in upstream])
        for name, gradient in found.items():
            testing.assert_close(gradient, wanted[name], gradient=True, what=f"gradient of {name} at {options}")


# ---- states ----


@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
@pytest.mark.parametrize("width", [2, 3, 4])
def test_last_state_holds_the_last_samples(backend, dtype, width):
    """B62: exactly the last width - 1 of [initial_state, x], for every length from 1 to 40."""
    for seqlen in range(1, 41):
        inputs = example_inputs(dtype=dtype, width=width, seqlen=seqlen)
        expected = torch.cat([inputs["initial_state"], inputs["x"]], dim=2)[..., seqlen:]
        for given in (inputs, channel_last(inputs)):
            _, last_state = call(backend)(**given)
            assert torch.equal(last_state, expected)


@LAYOUTS
@pytest.mark.parametrize("seqlen", [1, 2, 3])
def test_chunk_shorter_than_the_filter(backend, seqlen, layout):
    """B36: an initial state goes in, gradients come from out and from last_state; gradcheck."""
    inputs = layout(example_inputs(dtype=torch.float64, dim=2, seqlen=seqlen, width=4))
    testing.check_gradcheck(call(backend), inputs)
    testing.check_values(call(backend), inputs, reference)


@LAYOUTS
@pytest.mark.parametrize("width", [1, 2, 4, 6])
@pytest.mark.parametrize("cut", [0, 1, 2, 3, 20, 37, 40])
def test_split_equals_whole(backend, cut, width, layout):
    """A sequence in two calls, the state handed over, equals one call; gradients flow through the hand-over."""
    inputs = layout(example_inputs(dtype=torch.float64, seqlen=40, width=width))

    def split(x, initial_state, **rest):
        left, state = call(backend)(x=x[..., :cut], initial_state=initial_state, **rest)
        right, state = call(backend)(x=x[..., cut:], initial_state=state, **rest)
        return torch.cat([left, right], dim=2), state

    testing.check_values(split, inputs, reference)


def test_steps_equal_the_whole(backend):
    """Token by token equals the whole sequence."""
    inputs = example_inputs(dtype=torch.float64, seqlen=9)
    whole, last_state = call(backend)(**inputs)
    state = inputs["initial_state"]
    for t in range(9):
        out, state = call(backend)(**{**inputs, "x": inputs["x"][..., t : t + 1], "initial_state": state})
        testing.assert_close(out, whole[..., t : t + 1])
    assert torch.equal(state, last_state)


@pytest.mark.parametrize("output", [0, 1])
@pytest.mark.parametrize("packing", [None, "seq_idx", "cu_seqlens"])
def test_gradient_through_one_output_alone(backend, output, packing):
    inputs = example_inputs(dtype=torch.float64, packing=packing)
    for given in (inputs, channel_last(inputs)):
        testing.check_values(lambda **k: call(backend)(**k)[output], given, lambda **k: reference(**k)[output])


# ---- packed sequences ----


def random_ids(batch, seqlen, pieces, dtype=torch.int32):
    """Ids that change at random places, reappear, and are negative now and then."""
    ids = torch.randint(-1, 4, (batch, max(pieces, 1)))
    at = torch.randint(0, max(pieces, 1), (batch, seqlen)).sort(dim=1).values
    return ids.gather(1, at).to(dtype)


@LAYOUTS
@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 2, 3, 4, 6])
def test_random_packing_agrees_with_reference(backend, dtype, width, layout):
    """B72: ids or offsets with initial states and last states, differentiable in all of them."""
    for seqlen in (1, 2, 5, 17, 40, 150):
        for pieces in (1, 3, seqlen):
            inputs = layout(example_inputs(dtype=dtype, dim=7, seqlen=seqlen, width=width))
            inputs["seq_idx"] = random_ids(2, seqlen, pieces)
            testing.check_values(call(backend), inputs, reference)
            ends = torch.randint(0, seqlen + 1, (pieces + 1,)).sort().values
            ends[0] = 0
            state = torch.randn(pieces, 7, width - 1).to(dtype)
            inputs = {**inputs, "x": inputs["x"][:1], "cu_seqlens": ends, "initial_state": state}
            del inputs["seq_idx"]
            testing.check_values(call(backend), inputs, reference)


@LAYOUTS
@pytest.mark.parametrize("seqlen", [63, 64, 65, 127, 128, 129, 256, 257])
def test_ids_at_the_end_of_their_storage(backend, seqlen, layout):
    """B61: nothing behind the ids is read: other ids placed there change nothing."""
    inputs = layout(example_inputs(seqlen=seqlen))
    storage = torch.full((2 * seqlen + 64,), -7, dtype=torch.int32)
    ids = storage[: 2 * seqlen].view(2, seqlen)
    ids.copy_(random_ids(2, seqlen, 5))
    first = testing.run_with_gradients(call(backend), {**inputs, "seq_idx": ids})
    storage[2 * seqlen :] = 5
    assert checks.equal_runs(testing.run_with_gradients(call(backend), {**inputs, "seq_idx": ids}), first)
    testing.check_values(call(backend), {**inputs, "seq_idx": ids.clone()}, reference)


@LAYOUTS
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_packed_equals_separate_calls(backend, index_dtype, layout):
    """B69: packed sequences of 3, 5, 6 and 2 tokens equal four calls, gradients included."""
    inputs = layout(example_inputs(dtype=torch.float64, batch=1, seqlen=16, initial_state=False))
    states = torch.randn(4, 5, 3, dtype=torch.float64)
    ends = [0, 3, 8, 14, 16]

    def separate(x, initial_state, **rest):
        pieces = [
            call(backend)(x=x[..., start:end], initial_state=initial_state[s : s + 1], **rest)
            for s, (start, end) in enumerate(pairwise(ends))
        ]
        return torch.cat([out for out, _ in pieces], dim=2), torch.cat([state for _, state in pieces])

    def packed(**given):
        return call(backend)(**given, cu_seqlens=torch.tensor(ends, dtype=index_dtype))

    testing.check_values(packed, {**inputs, "initial_state": states}, separate)

    def by_ids(x, initial_state, **rest):
        ids = torch.tensor([[7] * 3 + [2] * 5 + [7] * 6 + [0] * 2], dtype=index_dtype)
        return call(backend)(x=x, initial_state=initial_state[:1], seq_idx=ids, **rest)

    def separate_from_zero(x, initial_state, **rest):
        first = torch.cat([initial_state[:1], torch.zeros_like(initial_state[1:])])
        out, state = separate(x, first, **rest)
        return out, state[-1:]

    testing.check_values(by_ids, {**inputs, "initial_state": states}, separate_from_zero)


@LAYOUTS
@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
def test_trailing_padding_is_never_read(backend, dtype, layout):
    """B68: 128 tokens, offsets end at 37; NaN in the tail, and in the gradient that arrives there, does no harm."""
    inputs = layout(example_inputs(dtype=dtype, batch=1, seqlen=128, initial_state=False))
    inputs["cu_seqlens"] = torch.tensor([0, 20, 20, 37])
    cut = {**inputs, "x": inputs["x"][..., :37]}
    expected = testing.run_with_gradients(call(backend), cut)
    upstream = [torch.full((1, 5, 128), float("nan"), dtype=dtype), expected[1][1]]
    upstream[0][..., :37] = expected[1][0]
    inputs["x"] = inputs["x"].clone()
    inputs["x"][..., 37:] = float("nan")
    found = testing.run_with_gradients(call(backend), inputs, upstream=upstream)
    assert torch.equal(found[0][0][..., :37], expected[0][0]) and not found[0][0][..., 37:].any()
    assert torch.equal(found[0][1], expected[0][1])
    assert torch.equal(found[2]["x"][..., :37], expected[2]["x"]) and not found[2]["x"][..., 37:].any()
    for name in ("weight", "bias"):
        testing.assert_close(found[2][name], expected[2][name], what=name)


@LAYOUTS
def test_padding_ids_are_harmless(backend, layout):
    """NaN where seq_idx is negative reaches no other output and no gradient."""
    inputs = layout(example_inputs(dtype=torch.float64, seqlen=60))
    ids = random_ids(2, 60, 9)
    ids[:, -1] = 3  # the last state belongs to a real sequence
    padding = (ids < 0)[:, None]
    assert padding.any() and not padding.all()
    clean = testing.run_with_gradients(call(backend), {**inputs, "seq_idx": ids})
    upstream = [clean[1][0].masked_fill(padding, float("nan")), clean[1][1]]
    spoiled = {**inputs, "x": layout({"x": inputs["x"].masked_fill(padding, float("nan"))})["x"], "seq_idx": ids}
    found = testing.run_with_gradients(call(backend), spoiled, upstream=upstream)
    assert torch.equal(found[0][0], clean[0][0]) and not found[0][0].masked_select(padding).any()
    assert torch.equal(found[0][1], clean[0][1])
    for name, gradient in found[2].items():
        assert torch.equal(gradient, clean[2][name]), name


def test_nan_stays_in_its_sequence(backend):
    """A NaN sample spoils the width outputs that see it, in its own sequence, and nothing else."""
    inputs = example_inputs(dtype=torch.float64, batch=1, dim=3, seqlen=20, initial_state=False)
    inputs["cu_seqlens"] = torch.tensor([0, 6, 20])
    inputs["x"][0, 1, 4] = float("nan")
    for given in (inputs, channel_last(inputs)):
        out, _ = call(backend)(**given)
        expected = torch.zeros(1, 3, 20, dtype=torch.bool)
        expected[0, 1, 4:6] = True
        assert torch.equal(torch.isnan(out), expected)


def test_empty_sequences_pass_their_state_through(backend):
    inputs = example_inputs(dtype=torch.float64, packing="cu_seqlens", batch=1)
    outputs, upstream, gradients = testing.run_with_gradients(call(backend), inputs)
    assert torch.equal(outputs[1][1], inputs["initial_state"][1])
    assert torch.equal(gradients["initial_state"][1], upstream[1][1])
    del inputs["initial_state"]
    assert not call(backend)(**inputs)[1][1].any()
    inputs["cu_seqlens"] = torch.tensor([0])
    out, last_state = call(backend)(**inputs)
    assert not out.any() and last_state.shape == (0, 5, 3)


@pytest.mark.parametrize("packing", ["seq_idx", "cu_seqlens"])
def test_index_tensors_of_any_strides(backend, packing):
    inputs = example_inputs(packing=packing)
    expected = call(backend)(**inputs)
    for _, view in testing.strided_variants(inputs[packing]):
        assert all(map(torch.equal, call(backend)(**{**inputs, packing: view}), expected))


# ---- error texts ----


@pytest.mark.parametrize(
    "cu_seqlens, text",
    [
        ([1, 5], r"causal_conv1d: cu_seqlens must start with 0, got 1"),
        ([0, 5, 4], r"cu_seqlens must not decrease, got 5 followed by 4 at position 2"),
        ([0, 12], r"cu_seqlens must end at most at seqlen = 11, got 12"),
    ],
)
def test_contents_of_cu_seqlens_are_checked(cu_seqlens, text):
    inputs = example_inputs(batch=1, initial_state=False)
    with pytest.raises(RuntimeError, match=text):
        torch.ops.mamba.causal_conv1d(inputs["x"], inputs["weight"], cu_seqlens=torch.tensor(cu_seqlens))


@pytest.mark.parametrize(
    "change, text",
    [
        (
            dict(seq_idx=torch.zeros(2, 10).int()),
            r"seq_idx must have shape \(batch, seqlen\) = \(2, 11\), got \(2, 10\)",
        ),
        (dict(seq_idx=torch.zeros(2, 11)), r"seq_idx must be int32 or int64, got float32"),
        (dict(cu_seqlens=torch.tensor([0, 11])), r"with cu_seqlens batch must be 1, got 2"),
        (
            dict(seq_idx=torch.zeros(2, 11).int(), cu_seqlens=torch.tensor([0, 11])),
            r"seq_idx and cu_seqlens must not be given together",
        ),
    ],
)
def test_packing_error_texts(backend, change, text):
    checks.error_text(call(backend), {**example_inputs(), **change}, text)


def test_initial_state_follows_cu_seqlens(backend):
    inputs = example_inputs(packing="cu_seqlens")
    inputs["initial_state"] = inputs["initial_state"][:1]
    text = r"initial_state must have shape \(num_sequences, dim, width - 1\) = \(4, 5, 3\), got \(1, 5, 3\)"
    checks.error_text(call(backend), inputs, text)
