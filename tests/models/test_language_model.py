"""MambaLM: numbers, names, packing, initialisation, files."""

import copy
import json
import math
import sys

import pytest
import torch

from mamba_ops import reference
from mamba_ops.models import MambaConfig, MambaLM
from mamba_ops.testing import assert_close

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def small(**changes):
    return MambaConfig(**{"d_model": 8, "n_layer": 2, "vocab_size": 13, "ssm_cfg": {"d_state": 3}, **changes})


def tokens(*shape):
    return torch.randint(13, shape)


# ---- agrees with the equations ----


def composed(model, input_ids):
    """Embedding, residual blocks, final norm and head, written once more around the mixers."""
    stream = model.backbone.embedding.weight[input_ids]
    for layer in model.backbone.layers:
        normed, _, _ = reference.rms_norm(stream, layer.norm.weight, eps=model.config.norm_epsilon)
        stream = stream + layer.mixer(normed)
    normed, _, _ = reference.rms_norm(stream, model.backbone.norm_f.weight, eps=model.config.norm_epsilon)
    return (normed @ model.lm_head.weight.T)[..., : model.config.vocab_size]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("n_layer", [0, 1, 3])
@pytest.mark.parametrize("batch, seqlen", [(2, 0), (2, 1), (2, 17)])
def test_agrees_with_the_composed_blocks(tied, n_layer, batch, seqlen):
    model = MambaLM(small(n_layer=n_layer, tie_embeddings=tied), dtype=torch.float64)
    ids = tokens(batch, seqlen)
    upstream = torch.randn(batch, seqlen, 13, dtype=torch.float64)
    parameters = list(model.parameters())
    logits, expected = model(ids), composed(model, ids)
    assert logits.shape == (batch, seqlen, 13)
    assert_close(logits, expected, rtol=1e-10)
    found = torch.autograd.grad(logits, parameters, upstream, materialize_grads=True)
    wanted = torch.autograd.grad(expected, parameters, upstream, materialize_grads=True)
    for a, b in zip(found, wanted):
        assert_close(a, b, rtol=1e-10)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("residual_in_fp32", [True, False])
def test_dtypes(dtype, residual_in_fp32):
    model = MambaLM(small(residual_in_fp32=residual_in_fp32), dtype=dtype)
    seen = []
    for layer in model.backbone.layers:
        layer.register_forward_hook(lambda module, inputs, output: seen.append(output[1].dtype))
    ids = tokens(2, 20)
    logits = model(ids)
    assert logits.dtype == dtype
    wide = torch.promote_types(dtype, torch.float32)
    assert seen == [wide if residual_in_fp32 else dtype] * 2
    exact = copy.deepcopy(model).double()
    assert_close(logits, exact(ids), rtol={torch.bfloat16: 5e-2, torch.float16: 1e-2}.get(dtype))
    loss = model.loss(ids, ids)
    assert loss.dtype == wide
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_loss_is_mean_cross_entropy_over_real_targets():
    model = MambaLM(small())
    ids, targets = tokens(2, 6), tokens(2, 6)
    targets[0, :4] = -100
    chosen = model(ids).log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    assert_close(model.loss(ids, targets), -chosen[targets >= 0].mean())


def test_it_learns_a_repeated_text():
    model = MambaLM(small(d_model=32, vocab_size=13))
    text = tokens(1, 40).repeat(1, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = model.loss(text[:, :-1], text[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.3 * math.log(13)


# ---- packing ----


@pytest.mark.parametrize("packing", ["seq_idx", "cu_seqlens"])
def test_packed_equals_separate(packing):
    lengths = [3, 5, 6, 2]
    model = MambaLM(small(), dtype=torch.float64)
    ids = tokens(1, sum(lengths))
    if packing == "seq_idx":
        borders = {"seq_idx": torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]}
    else:
        borders = {"cu_seqlens": torch.tensor([0, *lengths]).cumsum(0)}
    logits = model(ids, **borders)
    expected = torch.cat([model(piece) for piece in ids.split(lengths, dim=1)], dim=1)
    assert_close(logits, expected, rtol=1e-10)
    upstream = torch.randn_like(logits)
    parameters = list(model.parameters())
    for a, b in zip(
        torch.autograd.grad(logits, parameters, upstream), torch.autograd.grad(expected, parameters, upstream)
    ):
        assert_close(a, b, rtol=1e-10)


def test_trailing_padding():
    model = MambaLM(small(), dtype=torch.float64)
    ids = tokens(1, 128).clamp(max=11)
    ids[:, 37:] = 12  # a token that real text does not have, with an embedding of NaN
    with torch.no_grad():
        model.backbone.embedding.weight[12] = float("nan")
    model.lm_head.weight = torch.nn.Parameter(torch.randn(16, 8, dtype=torch.float64))
    cu_seqlens = torch.tensor([0, 20, 37])
    logits = model(ids, cu_seqlens=cu_seqlens)
    assert torch.equal(logits[:, 37:], torch.zeros_like(logits[:, 37:]))
    assert_close(logits[:, :37], model(ids[:, :37], cu_seqlens=cu_seqlens), rtol=1e-12)
    upstream = torch.full_like(logits, float("nan"))
    upstream[:, :37] = 1
    for gradient in torch.autograd.grad(logits, list(model.parameters()), upstream):
        assert torch.isfinite(gradient).all()


# ---- names, initialisation, ties ----


def test_state_dict_names_are_upstreams():
    model = MambaLM(small(n_layer=1))
    mixer = ["A_log", "D", "in_proj.weight", "conv1d.weight", "conv1d.bias", "x_proj.weight", "dt_proj.weight"]
    mixer += ["dt_proj.bias", "out_proj.weight"]
    expected = {f"backbone.layers.0.mixer.{name}" for name in mixer}
    expected |= {
        "backbone.embedding.weight",
        "backbone.layers.0.norm.weight",
        "backbone.norm_f.weight",
        "lm_head.weight",
    }
    assert set(model.state_dict()) == expected
    assert model.backbone.embedding.weight.shape == (16, 8)


def test_initialisation():
    model = MambaLM(MambaConfig(d_model=128, n_layer=16, vocab_size=1000, ssm_cfg={"bias": True}))
    weight = model.backbone.embedding.weight
    assert weight.std().item() == pytest.approx(0.02, rel=0.02) and abs(weight.mean().item()) < 1e-3
    bound = 256**-0.5 / 16**0.5
    for layer in model.backbone.layers:
        out = layer.mixer.out_proj
        assert out.weight.abs().max() <= bound * (1 + 1e-6)
        assert out.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
        assert not out.bias.any() and not layer.mixer.in_proj.bias.any()
        assert layer.mixer.dt_proj.bias.max() < -2  # softplus^-1(0.1) = -2.25: not zeroed with the other biases
        assert torch.equal(layer.norm.weight, torch.ones(128))


def test_weights_stay_tied():
    def check(model):
        assert model.lm_head.weight is model.backbone.embedding.weight
        assert model.backbone.layers[0].mixer.A_log._no_weight_decay

    model = MambaLM(small())
    check(model)
    check(copy.deepcopy(model))
    check(copy.deepcopy(model).double())
    on_meta = MambaLM(small(), device="meta")
    check(on_meta)
    check(on_meta.to_empty(device="cpu"))
    on_meta.load_state_dict(model.state_dict(), assign=True)
    check(on_meta)
    without_head = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    again = MambaLM(small())
    again.load_state_dict(without_head)
    check(again)
    ids = tokens(1, 7)
    assert torch.equal(again(ids), model(ids)) and torch.equal(on_meta(ids), model(ids))
    untied = MambaLM(small(tie_embeddings=False))
    assert untied.lm_head.weight is not untied.backbone.embedding.weight
    with pytest.raises(RuntimeError, match=r"lm_head\.weight"):
        untied.load_state_dict(without_head)


def test_meta_construction_and_reset():
    model = MambaLM(small(), device="meta").to_empty(device="cpu")
    torch.manual_seed(3)
    model.reset_parameters()
    again = MambaLM(small())
    torch.manual_seed(3)
    again.reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))


# ---- activation checkpointing and dropout ----


def test_activation_checkpointing_gives_the_same_bits():
    ids = tokens(2, 9)
    results, saved = [], []
    for option in (False, True):
        torch.manual_seed(0)
        model = MambaLM(small(dropout=0.2), activation_checkpointing=option)
        kept = []
        torch.manual_seed(1)
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.numel()) or t, lambda t: t):
            loss = model.loss(ids, ids)
        loss.backward()
        results.append([loss, *(p.grad for p in model.parameters())])
        saved.append(sum(kept))
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert saved[1] < 0.5 * saved[0]


def test_dropout_acts_in_training_only():
    model = MambaLM(small(dropout=0.5))
    ids = tokens(2, 9)
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))


# ---- compile ----


def test_compiled_loss_without_recompiles():
    torch._dynamo.reset()
    model = MambaLM(small(ssm_cfg={"d_state": 3, "dt_rank": 2}))
    compiled = torch.compile(model.loss, fullgraph=True, dynamic=True)
    for number, seqlen in enumerate([5, 2, 64, 37]):
        ids = tokens(2, seqlen)
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            loss = compiled(ids, ids)
        expected = model.loss(ids, ids)
        assert_close(loss, expected)
        found = torch.autograd.grad(loss, list(model.parameters()))
        for a, b in zip(found, torch.autograd.grad(expected, list(model.parameters()))):
            assert_close(a, b, gradient=True)


# ---- files ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_save_and_load(tmp_path, dtype, tied):
    model = MambaLM(small(tie_embeddings=tied), dtype=dtype).eval()
    model.save_pretrained(tmp_path / "model")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["config.json", "model.safetensors"]
    again = MambaLM.from_pretrained(tmp_path / "model")
    assert again.config == model.config and not again.training
    assert (again.lm_head.weight is again.backbone.embedding.weight) == tied
    for (name, a), (other, b) in zip(model.named_parameters(), again.named_parameters()):
        assert name == other and a.dtype == b.dtype and torch.equal(a, b)
    ids = tokens(2, 7)
    assert torch.equal(again(ids), model(ids))
    assert again.backbone.layers[0].mixer.D._no_weight_decay


def test_load_in_another_dtype(tmp_path):
    MambaLM(small()).save_pretrained(tmp_path)
    model = MambaLM.from_pretrained(tmp_path, device="cpu", dtype=torch.bfloat16)
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert model.backbone.layers[0].mixer.A_log.dtype == torch.float32


def test_what_is_wrong_with_a_directory_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no model: config\.json is missing"):
        MambaLM.from_pretrained(tmp_path)
    MambaLM(small()).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "n_layer": 3}))
    with pytest.raises(RuntimeError, match=r"Missing key.*backbone\.layers\.2\.mixer"):
        MambaLM.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no model: model\.safetensors is missing"):
        MambaLM.from_pretrained(tmp_path)


def test_missing_safetensors_is_said(tmp_path, monkeypatch):
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'mamba_ops\[models\]'"):
        MambaLM(small()).save_pretrained(tmp_path)


# ---- error texts ----


LONG, INTEGERS = torch.long, "input_ids must be integers of shape (batch, seqlen)"


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"input_ids": torch.zeros(5, dtype=LONG)}, f"{INTEGERS}, got torch.int64 of shape (5,)"),
        ({"input_ids": torch.zeros(2, 5)}, f"{INTEGERS}, got torch.float32 of shape (2, 5)"),
        ({"seq_idx": torch.zeros(2, 4, dtype=LONG)}, "seq_idx must have shape (batch, seqlen) = (2, 5), got (2, 4)"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "batch must be 1 with cu_seqlens, got 2"),
        ({"targets": torch.zeros(2, 4, dtype=LONG)}, "targets must have shape (2, 5), got (2, 4)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_error_texts(arguments, text):
    ids = torch.zeros(2, 5, dtype=torch.long)
    with pytest.raises(ValueError) as error:
        MambaLM(small()).loss(**{"input_ids": ids, "targets": arguments.get("input_ids", ids), **arguments})
    assert str(error.value) == f"MambaLM: {text}"
