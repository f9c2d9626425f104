"""linear_recurrence and gated_scan on packed sequences, backwards in time, and states that go in and come out."""

import pytest
import torch
from test_linear_recurrence import GATES, call, check, inputs_of

from mamba_ops import testing
from mamba_ops.reference.linear_recurrence import example_inputs


@pytest.fixture(params=GATES)
def op(request):
    return request.param


@pytest.mark.parametrize("packing", ["seq_idx", "cu_seqlens"])
@pytest.mark.parametrize("seqlen", [0, 1, 2, 11, 70, 200])
@pytest.mark.parametrize("dim, reverse", [(1, False), (1, True), (2, False), (3, True)])
def test_packed_agrees_with_reference(backend, op, packing, seqlen, dim, reverse):
    options = dict(packing=packing, seqlen=seqlen, channels=(2, 20), dim=dim, reverse=reverse)
    for dtype in (torch.float64, torch.bfloat16):
        check(backend, op, dtype=dtype, **options)
    check(backend, op, initial_state=False, **options)


def test_seq_idx_and_cu_seqlens_agree(backend):
    """Ids need not start at 0 nor increase; one that reappears starts a new segment."""
    inputs = example_inputs(batch=1, seqlen=12, dtype=torch.float64, initial_state=False)
    function = call(backend, "linear_recurrence")
    by_id = function(**inputs, seq_idx=torch.tensor([[7, 7, 7, -1, -1, 7, 7, 7, 7, 2, 2, 2]]))
    by_end = function(**inputs, cu_seqlens=torch.tensor([0, 3, 5, 9, 12]))
    assert torch.equal(by_id[0], by_end[0]) and torch.equal(by_id[1], by_end[1][-1:])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dim", [1, 2])
def test_padding_is_never_read(backend, op, reverse, dim):
    """NaN behind the last sequence, and in the gradient there, reaches nothing; states and gradients are 0 there."""
    inputs = inputs_of(op, batch=1, seqlen=90, channels=(20,), dim=dim, reverse=reverse, initial_state=False)
    inputs["cu_seqlens"] = torch.tensor([0, 10, 37])
    short = {k: v.narrow(dim, 0, 37) if k in ("x", GATES[op]) else v for k, v in inputs.items()}
    expected = testing.run_with_gradients(call(backend, op), short)
    for name in ("x", GATES[op]):
        inputs[name].narrow(dim, 37, 53).fill_(float("nan"))
    upstream = torch.full_like(inputs["x"], float("nan"))
    upstream.narrow(dim, 0, 37).copy_(expected[1][0])
    found = testing.run_with_gradients(call(backend, op), inputs, upstream=[upstream, expected[1][1]])
    testing.assert_close(found[0][1], expected[0][1])
    for whole, part in ((found[0][0], expected[0][0]), *((found[2][k], expected[2][k]) for k in ("x", GATES[op]))):
        testing.assert_close(whole.narrow(dim, 0, 37), part)
        assert not whole.narrow(dim, 37, 53).any()


@pytest.mark.parametrize("reverse", [False, True])
def test_segments_are_selected_not_multiplied(backend, op, reverse):
    """A state that is infinite or NaN ends with its segment, and so does its gradient."""
    inputs = inputs_of(op, batch=1, seqlen=80, channels=(20,), reverse=reverse)
    inputs["seq_idx"] = (torch.arange(80) >= 40).int()[None]
    spoiled = {**inputs, "x": inputs["x"].clone()}
    first, second = (slice(40, 80), slice(0, 40)) if reverse else (slice(0, 40), slice(40, 80))
    spoiled["x"][:, first] = float("nan")
    expected = testing.run_with_gradients(call(backend, op), inputs)
    found = testing.run_with_gradients(call(backend, op), spoiled, upstream=expected[1])
    assert torch.isnan(found[0][0][:, first]).all()
    assert torch.equal(found[0][0][:, second], expected[0][0][:, second])
    for name in ("x", GATES[op]):
        assert torch.equal(found[2][name][:, second], expected[2][name][:, second])
    assert torch.equal(found[2]["x"], expected[2]["x"])


def test_empty_sequences_pass_their_state_through(backend, op):
    inputs = inputs_of(op, batch=1, seqlen=6, dtype=torch.float64)
    inputs["initial_state"] = torch.randn(4, 5, dtype=torch.float64)
    inputs["cu_seqlens"] = torch.tensor([0, 0, 6, 6, 6])
    outputs, upstream, gradients = testing.run_with_gradients(call(backend, op), inputs)
    for s in (0, 2, 3):
        assert torch.equal(outputs[1][s], inputs["initial_state"][s])
        assert torch.equal(gradients["initial_state"][s], upstream[1][s])


@pytest.mark.parametrize("packing", ["seq_idx", "cu_seqlens"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_layouts_of_packing_arguments(backend, packing, index_dtype):
    inputs = example_inputs(packing=packing, seqlen=65, reverse=True)
    expected = call(backend, "linear_recurrence")(**inputs)
    for _, view in testing.strided_variants(inputs[packing].to(index_dtype)):
        assert all(map(torch.equal, call(backend, "linear_recurrence")(**{**inputs, packing: view}), expected))


@pytest.mark.parametrize("cut", [1, 63, 64, 65, 100])
@pytest.mark.parametrize("reverse", [False, True])
def test_split_equals_whole(backend, op, cut, reverse):
    """The last state of one piece is the initial state of the next, gradients included."""
    inputs = inputs_of(op, seqlen=140, dtype=torch.float64, reverse=reverse)

    def split(initial_state, **inputs):
        pieces = [
            {k: v[:, part] if k in ("x", GATES[op]) else v for k, v in inputs.items()}
            for part in (slice(0, cut), slice(cut, None))
        ]
        states = [None, None]
        for i in (1, 0) if reverse else (0, 1):
            states[i], initial_state = call(backend, op)(initial_state=initial_state, **pieces[i])
        return torch.cat(states, 1), initial_state

    expected = testing.run_with_gradients(call(backend, op), inputs)
    found = testing.run_with_gradients(split, inputs, upstream=expected[1])
    for out, want in zip((*found[0], *found[2].values()), (*expected[0], *expected[2].values())):
        testing.assert_close(out, want)


def test_reverse_is_flip(backend, op):
    inputs = inputs_of(op, seqlen=70, dtype=torch.float64)
    flipped = {k: v.flip(1) if k in ("x", GATES[op]) else v for k, v in inputs.items()}
    backwards = call(backend, op)(**{**flipped, "reverse": True})
    forwards = call(backend, op)(**inputs)
    assert torch.equal(backwards[0].flip(1), forwards[0]) and torch.equal(backwards[1], forwards[1])
