"""MambaLM with a cache: fused decoding, stepping aside, generation, memory over many steps."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mamba_ops import testing
from mamba_ops.models import MambaConfig, MambaLM
from mamba_ops.models.generation import Sampling

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def make(dtype=torch.float32, **options):
    ssm_cfg = options.pop("ssm_cfg", {})
    return MambaLM(MambaConfig(d_model=24, n_layer=3, vocab_size=50, ssm_cfg=ssm_cfg, **options), dtype=dtype).eval()


@torch.no_grad()
def in_pieces(model, ids, lengths, **options):
    cache, outs, start = model.allocate_inference_cache(ids.shape[0]), [], 0
    for length in lengths:
        outs.append(model(ids[:, start : start + length], inference_params=cache, **options))
        start += length
    assert cache.seqlen_offset == start == ids.shape[1]
    return torch.cat(outs, 1)


def is_fused(model):
    """Whether the next step of a warm cache goes through the fused operator."""
    cache = model.allocate_inference_cache(1)
    cache.advance(1)
    with torch.no_grad():
        return model._decoder.fits(model, cache, torch.zeros(1, 1, dtype=torch.long))


# ---- step loop = chunked prefill = one full pass ----


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("lengths", [[16], [1] * 16, [10, 5, 1], [2, 1, 1, 12], [3] + [1] * 13], ids=str)
@pytest.mark.parametrize("ssm_cfg", [{}, dict(bias=True, d_conv=3, conv_bias=False, d_state=5)], ids=str)
def test_pieces_equal_one_pass(dtype, lengths, ssm_cfg):
    """B74, B75, B76."""
    model, ids = make(dtype, ssm_cfg=ssm_cfg), torch.randint(50, (2, 16))
    assert is_fused(model) == (dtype != torch.float64)
    with torch.no_grad():
        expected = model(ids)
    found = in_pieces(model, ids, lengths)
    assert found.dtype == dtype
    testing.assert_close(found, expected, rtol=TOLERANCES[dtype])


def test_packed_prefill_then_steps():
    model, ends = make(torch.float64), [0, 3, 8, 9]
    ids, last = torch.randint(50, (1, 11)), torch.randint(50, (3, 1))
    cache = model.allocate_inference_cache(3)
    with torch.no_grad():
        model(ids, cu_seqlens=torch.tensor(ends), inference_params=cache)
        found = model(last, inference_params=cache)
        for s in range(3):
            whole = torch.cat([ids[:, ends[s] : ends[s + 1]], last[s : s + 1]], 1)
            testing.assert_close(found[s], model(whole)[0, -1:], what=f"sequence {s}")


# ---- the fused step steps aside ----


def test_fused_equals_separate_steps():
    model, ids = make(), torch.randint(50, (2, 8))
    fused = in_pieces(model, ids, [1] * 8)
    handle = model.backbone.layers[1].mixer.x_proj.register_forward_hook(lambda *_: None)
    assert not is_fused(model)
    testing.assert_close(in_pieces(model, ids, [1] * 8), fused, rtol=1e-5)
    handle.remove()
    assert is_fused(model)


def test_groups_of_a_norm_are_noticed():
    model, ids = make(), torch.randint(50, (2, 8))
    in_pieces(model, ids, [7, 1])
    for norm in (model.backbone.layers[1].norm, model.backbone.norm_f):
        norm.group_size = norm.weight.shape[0] // 2
        assert not is_fused(model)
        with torch.no_grad():
            testing.assert_close(in_pieces(model, ids, [7, 1]), model(ids), rtol=1e-5)
        norm.group_size = None
        assert is_fused(model)


class Wrapped(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return 2 * self.linear(x)


@pytest.mark.parametrize("name", ["in_proj", "x_proj", "dt_proj", "out_proj"])
def test_wrapped_projections_are_called(name):
    model, ids = make(), torch.randint(50, (2, 8))
    mixer = model.backbone.layers[2].mixer
    setattr(mixer, name, Wrapped(getattr(mixer, name)))
    assert not is_fused(model)
    with torch.no_grad():
        testing.assert_close(in_pieces(model, ids, [3, 1, 1, 1, 2]), model(ids), rtol=1e-5)


def test_wrapped_head_and_hooks_elsewhere():
    model, ids = make(), torch.randint(50, (2, 8))
    model.lm_head = Wrapped(model.lm_head)
    assert is_fused(model)
    with torch.no_grad():
        testing.assert_close(in_pieces(model, ids, [1] * 8), model(ids), rtol=1e-5)
    calls = []
    for module in (model.backbone.layers[0], model.backbone.layers[0].norm, model.backbone.norm_f, model.backbone):
        handle = module.register_forward_hook(lambda *_: calls.append(1))
        assert not is_fused(model)
        in_pieces(model, ids, [1] * 8)
        handle.remove()
    assert len(calls) == 4 * 8


def test_changed_parameters_are_packed_again():
    model, ids = make(), torch.randint(50, (1, 6))
    before = in_pieces(model, ids, [1] * 6)
    with torch.no_grad():
        model.backbone.layers[1].mixer.D.add_(0.5)
        model.backbone.layers[0].mixer.out_proj.weight.mul_(1.5)
        expected = model(ids)
    found = in_pieces(model, ids, [1] * 6)
    assert not torch.equal(found, before)
    testing.assert_close(found, expected, rtol=1e-5)
    model.load_state_dict(make().state_dict())
    with torch.no_grad():
        testing.assert_close(in_pieces(model, ids, [1] * 6), model(ids), rtol=1e-5)


def test_copies_pack_their_own_weights():
    model, ids = make(), torch.randint(50, (1, 4))
    expected = in_pieces(model, ids, [1] * 4)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other._decoder._packed is None
        assert torch.equal(in_pieces(other, ids, [1] * 4), expected)


def test_cache_of_another_batch_is_refused():
    """B82."""
    model = make()
    with pytest.raises(ValueError, match="MambaLM: the cache holds batch 4, got 2"):
        model(torch.zeros(2, 3, dtype=torch.long), inference_params=model.allocate_inference_cache(4))


# ---- generation ----


def test_greedy_equals_full_passes():
    model, ids = make(), torch.randint(50, (2, 5))
    found = model.generate(ids, 10)
    for _ in range(10):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, ids)


def test_prompts_of_different_lengths():
    """B64: every row continues as it does alone; lengths below the convolution's width too."""
    model = make()
    prompts = [[7], [1, 2], [3, 4, 5, 6, 7, 8, 9], [9, 8, 7]]
    found = model.generate(prompts, 8)
    assert found.shape == (4, 15)
    for row, prompt in zip(found, prompts):
        alone = model.generate([prompt], 8)[0]
        assert torch.equal(row[7 - len(prompt) :], alone)
    mask = torch.tensor([[0, 1], [1, 1]])
    assert torch.equal(model.generate(torch.tensor([[0, 7], [1, 2]]), 8, attention_mask=mask)[:, 2:], found[:2, 7:])


def test_sampling_is_seeded():
    model, prompt = make(), [[1, 2, 3]]
    options = dict(temperature=1.0, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2)
    first = model.generate(prompt, 20, seed=5, **options)
    assert torch.equal(first, model.generate(prompt, 20, seed=5, **options))
    assert not torch.equal(first, model.generate(prompt, 20, seed=6, **options))


def test_stop_tokens_and_callback():
    model = make()
    free = model.generate([[1, 2], [3]], 12)
    stop = int(free[0, 4])
    found = model.generate([[1, 2], [3]], 12, stop_tokens=stop, pad_token=49)
    first = (free[0, 2:] == stop).nonzero()[0, 0] + 3
    assert torch.equal(found[0, :first], free[0, :first])
    assert (found[0, first:] == 49).all()
    seen = []

    def callback(token):
        seen.append(token.clone())
        return len(seen) == 4

    found = model.generate([[1, 2], [3]], 12, callback=callback)
    assert found.shape == (2, 6)
    assert torch.equal(found[:, 2:], torch.stack(seen, 1))
    assert torch.equal(found, free[:, :6])
    assert model.generate([[1, 2]], 0).shape == (1, 2)


def test_sampling_rules():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0]])

    def kept(**options):
        filtered = Sampling(temperature=1.0, **options)._filter(logits)
        return torch.isfinite(filtered[0]).nonzero().flatten().tolist()

    assert kept() == [0, 1, 2, 3, 4]
    assert kept(top_k=2) == [0, 1]
    assert kept(top_p=0.6) == [0]  # softmax: 0.636, 0.234, 0.086, 0.032, 0.012
    assert kept(top_p=0.7) == [0, 1]
    assert kept(min_p=0.1) == [0, 1, 2]
    assert kept(min_p=1.0) == [0]
    penalised = Sampling(repetition_penalty=2.0)
    seen = torch.tensor([[True, False, False, False, True]])
    assert penalised.choose(logits, seen).item() == 1
    assert Sampling(temperature=0.5, top_k=1).choose(logits).item() == 0
    draws = [
        Sampling(temperature=1.0).choose(logits, None, torch.Generator().manual_seed(i)).item() for i in range(400)
    ]
    assert abs(draws.count(0) / 400 - 0.636) < 0.08


@pytest.mark.parametrize(
    "options, text",
    [
        (dict(temperature=-1.0), "generate: temperature must be at least 0, got -1.0"),
        (dict(top_p=0.0), r"generate: top_p must be in \(0, 1\], got 0.0"),
        (dict(min_p=2.0), r"generate: min_p must be in \[0, 1\], got 2.0"),
        (dict(top_k=-3), "generate: top_k must be at least 0, got -3"),
        (dict(repetition_penalty=0.0), "generate: repetition_penalty must be positive, got 0.0"),
        (dict(max_new_tokens=-1), "generate: max_new_tokens must be at least 0, got -1"),
        (dict(input_ids=[[]]), "generate: every prompt must be a non-empty row of tokens"),
        (dict(input_ids=torch.zeros(2, 0).long()), r"generate: prompts must have shape \(batch, seqlen >= 1\)"),
    ],
)
def test_error_texts(options, text):
    with pytest.raises(ValueError, match=text):
        make().generate(**{"input_ids": [[1]], "max_new_tokens": 2, **options})


def test_inference_mode_and_compile():
    """The same tokens under inference_mode, and from a compiled model; compiled once for all steps."""
    model, ids = make(), torch.randint(50, (2, 5))
    expected = model.generate(ids, 8)
    with torch.inference_mode():
        assert torch.equal(model.generate(ids, 8), expected)
        fresh = make()
        fresh.load_state_dict(model.state_dict())
        assert torch.equal(fresh.generate(ids, 8), expected)
    compiled = copy.deepcopy(model)
    torch._dynamo.reset()
    compiled.compile(fullgraph=True)
    assert torch.equal(compiled.generate(ids, 8), expected)


# ---- memory over many steps ----


class NoRecurrence(nn.Module):
    """The same model without anything that carries from one position to the next."""

    def __init__(self, vocab_size, d_model=32):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Embedding(vocab_size, d_model), nn.Linear(d_model, 64), nn.SiLU(), nn.Linear(64, vocab_size)
        )

    def forward(self, ids):
        return self.layers(ids)


def recall(model, steps):
    """Train a model to copy the first token after a gap of 24 blanks; the accuracy on 500 fresh rows."""
    symbols, gap = 8, 24
    torch.manual_seed(1)

    def batch(rows):
        first = torch.randint(symbols, (rows, 1))
        blanks = torch.full((rows, gap), symbols)
        return torch.cat([first, blanks, torch.full((rows, 1), symbols + 1)], 1), first[:, 0]

    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        ids, target = batch(64)
        loss = F.cross_entropy(model(ids)[:, -1, :symbols], target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ids, target = batch(500)
    with torch.no_grad():
        full = model(ids)[:, -1, :symbols].argmax(-1)
    return ids, target, (full == target).float().mean().item()


def test_memory_over_many_steps():
    """Copy the first token after a gap: above 99 %, decoding step by step too; at chance without recurrence."""
    torch.manual_seed(0)
    model = MambaLM(MambaConfig(d_model=32, n_layer=2, vocab_size=10, initializer_range=0.3))
    ids, target, accuracy = recall(model, 150)
    assert accuracy > 0.99
    logits = in_pieces(model.eval(), ids, [1] * ids.shape[1])
    assert (logits[:, -1, :8].argmax(-1) == target).float().mean() > 0.99
    _, _, chance = recall(NoRecurrence(10), 150)
    assert abs(chance - 1 / 8) < 0.08
