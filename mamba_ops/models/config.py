"""Sizes and options of a Mamba language model."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

# Fields of upstream's configuration that say nothing here as long as they have these values; None: any value.
_UPSTREAM_NEUTRAL = {
    "d_intermediate": 0,
    "attn_layer_idx": [],
    "attn_cfg": None,
    "rms_norm": True,
    "fused_add_norm": None,
}


@dataclass
class MambaConfig:
    """Configuration of MambaLM; the field names are upstream's where it has them.

    Args:
        d_model: width of the residual stream.
        n_layer: number of blocks.
        vocab_size: number of tokens.
        ssm_cfg: keyword arguments of the mixer (d_state, d_conv, expand, ... of layers.Mamba); its key "layer" names
            the mixer, "Mamba1".
        residual_in_fp32: keep the residual stream in float32 in half-precision models.
        pad_vocab_size_multiple: the embedding's rows are rounded up to a multiple of this.
        tie_embeddings: the head uses the embedding's weight.
        norm_epsilon: eps of every RMS norm.
        initializer_range: standard deviation of a fresh embedding.
        dropout: in training, the probability of dropping an element of the embedding and of each mixer's output
            (upstream has none).

    Raises:
        ValueError: a field makes no model; the text names it.

    Example:
        >>> from mamba_ops.models import MambaConfig
        >>> MambaConfig(d_model=64, n_layer=2, vocab_size=250).padded_vocab_size
        256
    """

    d_model: int = 768
    n_layer: int = 24
    vocab_size: int = 50277
    ssm_cfg: dict[str, Any] = field(default_factory=dict)
    residual_in_fp32: bool = True
    pad_vocab_size_multiple: int = 8
    tie_embeddings: bool = True
    norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("d_model", "vocab_size", "pad_vocab_size_multiple"):
            if getattr(self, name) < 1:
                raise ValueError(f"MambaConfig: {name} must be at least 1, got {getattr(self, name)}")
        if self.n_layer < 0:
            raise ValueError(f"MambaConfig: n_layer must be at least 0, got {self.n_layer}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"MambaConfig: dropout must be in [0, 1), got {self.dropout}")
        layer = self.ssm_cfg.get("layer", "Mamba1")
        if layer != "Mamba1":
            raise ValueError(f"MambaConfig: ssm_cfg['layer'] must be 'Mamba1', got {layer!r}")

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: vocab_size rounded up to a multiple of pad_vocab_size_multiple."""
        return -(-self.vocab_size // self.pad_vocab_size_multiple) * self.pad_vocab_size_multiple

    @property
    def mixer_arguments(self) -> dict[str, Any]:
        """Keyword arguments of every mixer."""
        return {name: value for name, value in self.ssm_cfg.items() if name != "layer"}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "MambaConfig":
        """The inverse of to_dict; reads upstream's config.json too, but refuses attention, MLP and LayerNorm."""
        known = {f.name for f in dataclasses.fields(cls)}
        kept = {}
        for name, value in values.items():
            if name in known:
                kept[name] = value
            elif name not in _UPSTREAM_NEUTRAL:
                raise ValueError(f"MambaConfig: unknown field {name!r}; the fields are {', '.join(sorted(known))}")
            elif _UPSTREAM_NEUTRAL[name] is not None and value != _UPSTREAM_NEUTRAL[name]:
                raise ValueError(f"MambaConfig: {name} must be {_UPSTREAM_NEUTRAL[name]!r}, got {value!r}")
        return cls(**kept)
