"""selective_scan on packed sequences, and states that go in and come out."""

from itertools import pairwise, product

import checks
import pytest
import torch
from test_selective_scan import call

import mamba_ops
from mamba_ops import testing
from mamba_ops.reference.selective_scan import example_inputs
from mamba_ops.reference.selective_scan import selective_scan as reference

ALONG_TIME = ("u", "delta", "z", "B", "C")


@pytest.mark.parametrize("packing", ["seq_idx", "cu_seqlens"])
@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
@pytest.mark.parametrize("seqlen", [0, 1, 2, 8, 11, 16, 40, 70])
def test_packed_agrees_with_reference(backend, packing, dtype, seqlen):
    for kind in ("constant", "grouped"):
        inputs = example_inputs(dtype=dtype, seqlen=seqlen, packing=packing, B=kind, C=kind)
        testing.check_values(call(backend), inputs, reference)


@pytest.mark.parametrize("packing", ["seq_idx", "cu_seqlens"])
def test_packed_gradcheck(backend, packing):
    for initial_state, kind in product((False, True), ("constant", "shared")):
        options = dict(seqlen=10, dim=4, dstate=2, initial_state=initial_state, B=kind, C=kind)
        inputs = example_inputs(dtype=torch.float64, packing=packing, **options)
        testing.check_gradcheck(call(backend), inputs)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_packed_equals_separate_calls(backend, index_dtype):
    """B69, B72: lengths 3, 5, 6, 2 with states of their own; outputs, last states and gradients."""
    ends = [0, 3, 8, 14, 16]
    inputs = example_inputs(batch=1, seqlen=16, dtype=torch.float64)
    inputs["initial_state"] = torch.randn(4, 4, 3, dtype=torch.float64)
    cu_seqlens = torch.tensor(ends, dtype=index_dtype)

    def separate(**inputs):
        outs, states = [], []
        for s, (start, end) in enumerate(pairwise(ends)):
            piece = {k: v[..., start:end] if k in ALONG_TIME else v for k, v in inputs.items()}
            piece["initial_state"] = inputs["initial_state"][s : s + 1]
            out, state = call(backend)(**piece)
            outs.append(out)
            states.append(state)
        return torch.cat(outs, 2), torch.cat(states)

    expected = testing.run_with_gradients(separate, inputs)
    found = testing.run_with_gradients(call(backend), {**inputs, "cu_seqlens": cu_seqlens}, upstream=expected[1])
    for out, want in zip(found[0], expected[0]):
        testing.assert_close(out, want)
    for name, gradient in expected[2].items():
        testing.assert_close(found[2][name], gradient, what=name)


def test_seq_idx_and_cu_seqlens_agree(backend):
    """Ids need not start at 0 nor increase; one that reappears starts a new segment."""
    inputs = example_inputs(batch=1, seqlen=12, dtype=torch.float64, initial_state=False)
    seq_idx = torch.tensor([[7, 7, 7, -1, -1, 7, 7, 7, 7, 2, 2, 2]])
    by_id = call(backend)(**inputs, seq_idx=seq_idx)
    by_end = call(backend)(**inputs, cu_seqlens=torch.tensor([0, 3, 5, 9, 12]))
    assert torch.equal(by_id[0], by_end[0])
    assert torch.equal(by_id[1], by_end[1][-1:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_trailing_padding_is_never_read(backend, dtype):
    """B68: packed length 128, offsets ending at 37, NaN in the tail: zeros in out and in gradients there."""
    inputs = example_inputs(batch=1, seqlen=128, dtype=dtype, initial_state=False)
    cu_seqlens = torch.tensor([0, 10, 37], dtype=torch.int32)
    short = {k: v[..., :37] if k in ALONG_TIME else v for k, v in inputs.items()}
    for name in ALONG_TIME:
        inputs[name][..., 37:] = float("nan")
    expected = testing.run_with_gradients(call(backend), {**short, "cu_seqlens": cu_seqlens})
    tail = torch.full_like(inputs["u"][..., 37:], float("nan"))
    upstream = [torch.cat([expected[1][0], tail], 2), expected[1][1]]
    found = testing.run_with_gradients(call(backend), {**inputs, "cu_seqlens": cu_seqlens}, upstream=upstream)
    assert torch.equal(found[0][0][..., :37], expected[0][0])
    assert not found[0][0][..., 37:].any()
    assert torch.equal(found[0][1], expected[0][1])
    for name, gradient in found[2].items():
        if name in ALONG_TIME:
            assert not gradient[..., 37:].any(), name
            gradient = gradient[..., :37]
        testing.assert_close(gradient, expected[2][name], dtype, gradient=True, what=name)


def test_empty_sequences_pass_their_state_through(backend):
    inputs = example_inputs(batch=1, seqlen=6, dtype=torch.float64)
    inputs["initial_state"] = torch.randn(4, 4, 3, dtype=torch.float64)
    inputs["cu_seqlens"] = torch.tensor([0, 0, 6, 6, 6])
    outputs, upstream, gradients = testing.run_with_gradients(call(backend), inputs)
    for s in (0, 2, 3):
        assert torch.equal(outputs[1][s], inputs["initial_state"][s])
        assert torch.equal(gradients["initial_state"][s], upstream[1][s])
    none = {**inputs, "cu_seqlens": torch.tensor([0]), "initial_state": torch.zeros(0, 4, 3, dtype=torch.float64)}
    out, last_state = call(backend)(**none)
    assert not out.any()
    assert last_state.shape == (0, 4, 3)


@pytest.mark.parametrize("cut", [1, 7, 8, 9, 20])
def test_split_equals_whole(backend, cut):
    """B39: the last state of one piece is the initial state of the next, gradients included."""
    inputs = example_inputs(seqlen=29, dtype=torch.float64)

    def split(**inputs):
        state, outs = inputs.pop("initial_state"), []
        for start, end in ((0, cut), (cut, 29)):
            piece = {k: v[..., start:end] if k in ALONG_TIME else v for k, v in inputs.items()}
            out, state = call(backend)(**piece, initial_state=state)
            outs.append(out)
        return torch.cat(outs, 2), state

    expected = testing.run_with_gradients(call(backend), inputs)
    found = testing.run_with_gradients(split, inputs, upstream=expected[1])
    for out, want in zip(found[0], expected[0]):
        testing.assert_close(out, want)
    for name, gradient in found[2].items():
        testing.assert_close(gradient, expected[2][name], what=name)


@pytest.mark.parametrize("output", [0, 1])
def test_gradient_through_one_output_alone(backend, output):
    """B39: a loss of the last state alone, or of out alone."""
    inputs = example_inputs(seqlen=13, dtype=torch.float64)
    testing.check_values(lambda **i: call(backend)(**i)[output], inputs, lambda **i: reference(**i)[output])


@pytest.mark.parametrize("packing", ["seq_idx", "cu_seqlens"])
def test_index_tensors_of_any_strides(backend, packing):
    """B61: index tensors sliced from a longer one, or at the end of their storage."""
    inputs = example_inputs(seqlen=65, packing=packing)
    expected = call(backend)(**inputs)
    for _, view in testing.strided_variants(inputs[packing]):
        assert all(map(torch.equal, call(backend)(**{**inputs, packing: view}), expected))
    storage = torch.cat([torch.full((5,), 99, dtype=torch.int32), inputs[packing].flatten()])
    end = storage[5:].view(inputs[packing].shape)
    assert all(map(torch.equal, call(backend)(**{**inputs, packing: end}), expected))


@pytest.mark.parametrize(
    "cu_seqlens, text",
    [
        ([1, 11], r"cu_seqlens must start with 0, got 1"),
        ([0, 5, 4, 11], r"cu_seqlens must not decrease, got 5 followed by 4 at position 2"),
        ([0, 12], r"cu_seqlens must end at most at seqlen = 11, got 12"),
    ],
)
def test_contents_of_cu_seqlens_are_checked(cu_seqlens, text):
    inputs = example_inputs(batch=1, initial_state=False)
    with pytest.raises(RuntimeError, match="selective_scan: " + text):
        mamba_ops.selective_scan(**inputs, cu_seqlens=torch.tensor(cu_seqlens))


def test_packing_arguments_exclude_each_other():
    inputs = example_inputs(batch=1, initial_state=False)
    packing = dict(seq_idx=torch.zeros(1, 11).int(), cu_seqlens=torch.tensor([0, 11]))
    checks.error_text(
        mamba_ops.selective_scan, {**inputs, **packing}, "seq_idx and cu_seqlens must not be given together"
    )


def test_initial_state_follows_cu_seqlens():
    inputs = example_inputs(batch=1)
    text = r"initial_state must have shape \(num_sequences, dim, dstate\) = \(2, 4, 3\), got \(1, 4, 3\)"
    checks.error_text(mamba_ops.selective_scan, {**inputs, "cu_seqlens": torch.tensor([0, 5, 11])}, text)
