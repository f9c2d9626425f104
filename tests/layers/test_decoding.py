"""Mamba.step, caches, chunked prefill, left padding: decoding equals training."""

import pytest
import torch

from mamba_ops import testing
from mamba_ops.layers import Mamba, MambaCache

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}


def make(dtype=torch.float64, **options):
    options = {"d_model": 20, "layer_idx": 0, **options}
    return Mamba(**options, dtype=dtype)


def cache_for(layer, batch):
    dtype = layer.conv1d.weight.dtype
    return MambaCache(1, batch, layer.d_inner, layer.d_state, layer.d_conv, dtype)


def in_pieces(layer, hidden, lengths):
    """The layer on consecutive pieces of hidden, with a cache."""
    cache, outs, start = cache_for(layer, hidden.shape[0]), [], 0
    for length in lengths:
        outs.append(layer(hidden[:, start : start + length], cache))
        cache.advance(length)
        start += length
    assert start == hidden.shape[1]
    return torch.cat(outs, 1), cache


# ---- step loop = chunked prefill = one full pass ----


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    "options", [{}, dict(d_conv=1), dict(d_conv=2, conv_bias=False), dict(bias=True, d_state=3)], ids=str
)
@pytest.mark.parametrize(
    "lengths",
    [[16], [1] * 16, [10, 5, 1], [1, 15], [2, 1, 1, 12], [3, 1, 1, 1, 1, 1, 8], [6, 1, 1, 1, 7]],
    ids=lambda lengths: "+".join(map(str, lengths)),
)
def test_pieces_equal_one_pass(dtype, options, lengths):
    """B74: prompts shorter than the convolution; B75: prefill 6, step 3; B76: several tokens with a warm cache."""
    layer, hidden = make(dtype, **options), torch.randn(2, 16, 20, dtype=dtype)
    with torch.no_grad():
        expected = layer(hidden)
        found, cache = in_pieces(layer, hidden, lengths)
        _, whole = in_pieces(layer, hidden, [16])
    testing.assert_close(found, expected, rtol=TOLERANCES[dtype])
    testing.assert_close(cache.ssm_states, whole.ssm_states, rtol=TOLERANCES[dtype])
    testing.assert_close(cache.conv_states, whole.conv_states, rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_upstream_step_loop(dtype):
    """allocate_inference_cache and step, as in upstream: states are written in place and returned."""
    layer, hidden = make(dtype), torch.randn(3, 9, 20, dtype=dtype)
    with torch.no_grad():
        expected = layer(hidden)
        conv_state, ssm_state = layer.allocate_inference_cache(3, max_seqlen=9)
        outs = []
        for t in range(9):
            out, new_conv_state, new_ssm_state = layer.step(hidden[:, t : t + 1], conv_state, ssm_state)
            assert new_conv_state is conv_state and new_ssm_state is ssm_state
            outs.append(out)
    testing.assert_close(torch.cat(outs, 1), expected, rtol=TOLERANCES[dtype])
    assert (tuple(conv_state.shape), tuple(ssm_state.shape)) == ((3, 40, 4), (3, 40, 16))


def test_upstream_inference_params():
    """An object with upstream's key_value_memory_dict and seqlen_offset works, and starts empty."""

    class InferenceParams:
        def __init__(self):
            self.key_value_memory_dict, self.seqlen_offset = {}, 0

    layer, hidden, params = make(layer_idx=5), torch.randn(2, 8, 20, dtype=torch.float64), InferenceParams()
    with torch.no_grad():
        outs = [layer(hidden[:, :5], params)]
        for t in range(5, 8):
            params.seqlen_offset = t
            outs.append(layer(hidden[:, t : t + 1], inference_params=params))
        testing.assert_close(torch.cat(outs, 1), layer(hidden))
    assert list(params.key_value_memory_dict) == [5]


def test_packed_prefill_then_steps():
    """One cache row for each packed sequence, an empty one included; then a step of all of them."""
    layer, ends = make(), [0, 3, 3, 8, 9]
    hidden, last = torch.randn(1, 12, 20, dtype=torch.float64), torch.randn(4, 1, 20, dtype=torch.float64)
    cache = cache_for(layer, 4)
    with torch.no_grad():
        layer(hidden, cache, cu_seqlens=torch.tensor(ends))
        cache.advance(1)
        found = layer(last, cache)
        for s in range(4):
            whole = torch.cat([hidden[:, ends[s] : ends[s + 1]], last[s : s + 1]], 1)
            testing.assert_close(found[s], layer(whole)[0, -1:], what=f"sequence {s}")


# ---- back-propagation through time ----


def test_gradients_through_steps_equal_those_of_the_scan():
    """B38: 64 chained functional steps; every parameter, the input and both initial states; states stay untouched."""
    layer = make(bias=True)
    hidden = torch.randn(2, 64, 20, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, 64, 20, dtype=torch.float64)
    parameters = [hidden, *layer.parameters()]
    expected = torch.autograd.grad((layer(hidden) * weights).sum(), parameters)

    conv_state, ssm_state = layer.allocate_inference_cache(2)
    start, outs = (conv_state, ssm_state), []
    for t in range(64):
        out, conv_state, ssm_state = layer.step(hidden[:, t : t + 1], conv_state, ssm_state)
        outs.append(out)
    found = torch.autograd.grad((torch.cat(outs, 1) * weights).sum(), parameters)
    for name, gradient, want in zip(["hidden", *dict(layer.named_parameters())], found, expected):
        testing.assert_close(gradient, want, what=name)
    assert not start[0].any() and not start[1].any()


def test_training_with_a_cache_leaves_inputs_alone():
    """B41: backward works though the cache is written; gradients are those without a cache."""
    layer, hidden = make(), torch.randn(2, 7, 20, dtype=torch.float64)
    expected = torch.autograd.grad(layer(hidden).sum(), list(layer.parameters()))
    version = hidden._version
    cache = cache_for(layer, 2)
    out = layer(hidden, cache)
    found = torch.autograd.grad(out.sum(), list(layer.parameters()))
    for gradient, want in zip(found, expected):
        testing.assert_close(gradient, want)
    assert hidden._version == version and not cache.ssm_states.requires_grad


# ---- the cache ----


def test_cache_batch_is_checked():
    """B82: another batch size is refused in words, on the object and on upstream's dictionary."""
    layer = make()
    cache = cache_for(layer, 4)
    with torch.no_grad():
        layer(torch.randn(4, 3, 20, dtype=torch.float64), cache)
        with pytest.raises(ValueError, match="the cache holds batch 4, got 2; allocate another"):
            layer(torch.randn(2, 1, 20, dtype=torch.float64), cache)


def test_cache_reorder():
    """B95: rows follow the index in all layers; the step after it too."""
    layer, hidden = make(), torch.randn(3, 6, 20, dtype=torch.float64)
    index = torch.tensor([1, 1, 0])
    with torch.no_grad():
        _, cache = in_pieces(layer, hidden[:, :5], [5])
        before = cache.clone()
        cache.mark()
        cache.reorder(index)
        assert torch.equal(cache.conv_states, before.conv_states[:, index])
        assert torch.equal(cache.ssm_states, before.ssm_states[:, index])
        found = layer(hidden[:, 5:], cache)
        expected = layer(torch.cat([hidden[index, :5], hidden[:, 5:]], 1))[:, 5:]
        testing.assert_close(found, expected)
        cache.crop(5)
        assert torch.equal(cache.ssm_states, before.ssm_states[:, index])
    with pytest.raises(ValueError, match=r"index must have shape \(3,\), got \(2,\)"):
        cache.reorder(index[:2])


def test_cache_crop_and_clone():
    layer, hidden = make(), torch.randn(2, 9, 20, dtype=torch.float64)
    with torch.no_grad():
        _, cache = in_pieces(layer, hidden[:, :4], [4])
        assert cache.mark() == 4
        copy = cache.clone()
        layer(hidden[:, 4:7], cache)
        cache.advance(3)
        with pytest.raises(ValueError, match=r"cannot crop to 5: .* 0, 4, 7"):
            cache.crop(5)
        cache.crop(4)
        assert torch.equal(cache.ssm_states, copy.ssm_states) and cache.seqlen_offset == 4
        again = layer(hidden[:, 4:], cache)
        testing.assert_close(again, layer(hidden)[:, 4:])
        assert not torch.equal(cache.ssm_states, copy.ssm_states)
        cache.crop(0)
        assert cache.seqlen_offset == 0 and not cache.ssm_states.any() and not cache.conv_states.any()


def test_needs_a_layer_index():
    layer = make(layer_idx=None)
    with pytest.raises(ValueError, match="inference_params needs a layer with a layer_idx"):
        layer(torch.randn(1, 2, 20, dtype=torch.float64), cache_for(layer, 1))


def test_step_takes_one_token():
    layer = make()
    with pytest.raises(ValueError, match=r"step takes one token a row, .* got \(2, 3, 20\)"):
        layer.step(torch.randn(2, 3, 20, dtype=torch.float64), *layer.allocate_inference_cache(2))


# ---- left padding ----


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_left_padding_changes_nothing(mask_dtype, bias):
    """B64, B66: a row padded by 5 equals the row alone, gradients and states too; NaN in the padding is harmless."""
    layer = make(bias=bias)
    rows = torch.randn(2, 12, 20, dtype=torch.float64)
    rows[1, :5] = float("nan")
    mask = torch.ones(2, 12).to(mask_dtype)
    mask[1, :5] = 0
    cache, alone = cache_for(layer, 2), cache_for(layer, 1)
    out = layer(rows, cache, attention_mask=mask)
    assert not out[1, :5].any()
    testing.assert_close(out[0:1], layer(rows[:1]))
    testing.assert_close(out[1:, 5:], layer(rows[1:, 5:], alone))
    testing.assert_close(cache.ssm_states[:, 1:], alone.ssm_states)
    testing.assert_close(cache.conv_states[:, 1:], alone.conv_states)
    found = torch.autograd.grad(out[1].sum(), list(layer.parameters()))
    expected = torch.autograd.grad(layer(rows[1:, 5:]).sum(), list(layer.parameters()))
    for gradient, want in zip(found, expected):
        testing.assert_close(gradient, want)


@pytest.mark.parametrize(
    "mask, text",
    [
        (torch.ones(2, 1, 1, 6), r"attention_mask must have shape \(batch, seqlen\) = \(2, 6\), got \(2, 1, 1, 6\)"),
        (torch.tensor([[1, 1, 1, 0, 0, 0]] * 2), "attention_mask must be left padding"),
    ],
)
def test_other_masks_are_refused(mask, text):
    """B66: a 4-D mask is refused, never ignored."""
    with pytest.raises(ValueError, match=text):
        make()(torch.randn(2, 6, 20, dtype=torch.float64), attention_mask=mask)


# ---- autocast, compile, half precision ----


def test_autocast_prefill_and_steps():
    """B91: float32 weights and cache under bfloat16 autocast: prefill and 5 steps, close to float32."""
    layer, hidden = make(torch.float32), torch.randn(2, 11, 20)
    with torch.no_grad():
        expected = layer(hidden)
        with torch.autocast("cpu", torch.bfloat16):
            found, cache = in_pieces(layer, hidden, [6, 1, 1, 1, 1, 1])
    assert found.dtype == torch.bfloat16
    assert cache.conv_states.dtype == cache.ssm_states.dtype == torch.float32
    testing.assert_close(found, expected, rtol=3e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_layers(dtype):
    """B89: with a cache, output dtype = input dtype."""
    layer, hidden = make(dtype), torch.randn(2, 9, 20).to(dtype)
    with torch.no_grad():
        found, cache = in_pieces(layer, hidden, [4, 1, 1, 3])
        assert found.dtype == cache.conv_states.dtype == dtype
        assert cache.ssm_states.dtype == torch.float32
        testing.assert_close(found, layer(hidden), rtol=3e-2)


def test_compiled_steps():
    """B101: a compiled loop of in-place steps, full graph."""
    layer, hidden = make(torch.float32), torch.randn(2, 5, 20)

    def loop(hidden, conv_state, ssm_state):
        outs = [layer.step(x, conv_state, ssm_state)[0] for x in hidden.split(1, dim=1)]
        return torch.cat(outs, 1)

    with torch.no_grad():
        states = layer.allocate_inference_cache(2)
        torch._dynamo.reset()
        found = torch.compile(loop, fullgraph=True)(hidden, *states)
        testing.assert_close(found, layer(hidden))
        _, cache = in_pieces(layer, hidden, [5])
        testing.assert_close(states[1], cache.ssm_states[0])
