"""MambaConfig: what it computes, reads and refuses."""

import pytest

from mamba_ops.models import MambaConfig


@pytest.mark.parametrize("vocab_size, multiple, padded", [(50277, 8, 50280), (256, 8, 256), (1, 8, 8), (9, 1, 9)])
def test_padded_vocab_size(vocab_size, multiple, padded):
    assert MambaConfig(vocab_size=vocab_size, pad_vocab_size_multiple=multiple).padded_vocab_size == padded


def test_round_trip():
    config = MambaConfig(d_model=24, n_layer=3, ssm_cfg={"layer": "Mamba1", "d_state": 4}, dropout=0.1)
    assert MambaConfig.from_dict(config.to_dict()) == config
    assert config.mixer_arguments == {"d_state": 4}


def test_reads_upstreams_fields():
    values = {
        "d_model": 768,
        "d_intermediate": 0,
        "n_layer": 24,
        "vocab_size": 50277,
        "ssm_cfg": {"layer": "Mamba1"},
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 8,
        "tie_embeddings": True,
    }
    assert MambaConfig.from_dict(values) == MambaConfig(ssm_cfg={"layer": "Mamba1"})


@pytest.mark.parametrize(
    "values, text",
    [
        ({"d_intermediate": 128}, "MambaConfig: d_intermediate must be 0, got 128"),
        ({"attn_layer_idx": [1]}, "MambaConfig: attn_layer_idx must be [], got [1]"),
        ({"rms_norm": False}, "MambaConfig: rms_norm must be True, got False"),
        ({"d_modle": 8}, "MambaConfig: unknown field 'd_modle'; the fields are "),
        ({"d_model": 0}, "MambaConfig: d_model must be at least 1, got 0"),
        ({"n_layer": -1}, "MambaConfig: n_layer must be at least 0, got -1"),
        ({"vocab_size": 0}, "MambaConfig: vocab_size must be at least 1, got 0"),
        ({"pad_vocab_size_multiple": 0}, "MambaConfig: pad_vocab_size_multiple must be at least 1, got 0"),
        ({"dropout": 1.0}, "MambaConfig: dropout must be in [0, 1), got 1.0"),
        ({"ssm_cfg": {"layer": "Mamba9"}}, "MambaConfig: ssm_cfg['layer'] must be 'Mamba1', got 'Mamba9'"),
    ],
    ids=str,
)
def test_refusals(values, text):
    with pytest.raises(ValueError) as error:
        MambaConfig.from_dict(values)
    assert str(error.value).startswith(text)
