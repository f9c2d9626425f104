"""One token through a whole language model in two operator calls, where the model is made of plain parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..layers import Mamba, MambaCache, RMSNorm
from ..layers.mamba import has_hooks, is_plain_linear
from ..ops import mamba_step_, mamba_step_logits, pack_layer
from ..ops.mamba_step import pack_layers

if TYPE_CHECKING:
    from .language_model import MambaLM

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class FusedDecoder:
    """Decodes with `mamba_step_`; steps aside where a part of the model is wrapped, hooked or not where it fits.

    The layers' parameters are copied into one packed buffer at the first step, and again when one of them changes:
    decoding needs the memory of the layers (without embedding and head) once more.
    """

    def __init__(self) -> None:
        self._versions: tuple | None = None
        self._packed: tuple[Tensor, Tensor] | None = None

    def __deepcopy__(self, memo) -> FusedDecoder:
        return FusedDecoder()  # the copy packs its own weights

    def __reduce__(self):
        return FusedDecoder, ()

    def fits(self, model: MambaLM, cache: object, input_ids: Tensor) -> bool:
        """Whether the next token of every row can go through the fused step."""
        if not isinstance(cache, MambaCache) or cache.seqlen_offset == 0 or input_ids.shape[1] != 1:
            return False
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.is_autocast_enabled(input_ids.device.type):
            return False
        weight = model.backbone.embedding.weight
        if weight.dtype not in WEIGHT_DTYPES or weight.device.type not in ("cpu", "cuda"):
            return False
        if nn.modules.module._has_any_global_hook() or has_hooks(model.backbone):
            return False
        return all(map(_is_plain_block, model.backbone.layers)) and _is_plain_norm(model.backbone.norm_f)

    def logits(self, model: MambaLM, cache: MambaCache, input_ids: Tensor) -> Tensor:
        """(batch, 1) token numbers -> (batch, 1, vocabulary); advances the cache."""
        backbone = model.backbone
        hidden = backbone.embedding(input_ids.squeeze(1))
        if len(backbone.layers):
            mixer = backbone.layers[0].mixer
            weights, parameters = self._current(backbone)
            hidden = mamba_step_(
                hidden,
                cache.conv_states,
                cache.ssm_states,
                weights,
                parameters,
                d_conv=mixer.d_conv,
                dt_rank=mixer.dt_rank,
                eps=backbone.layers[0].norm.eps,
            )
        head, norm = model.lm_head, backbone.norm_f
        dtype = backbone.embedding.weight.dtype
        plain = is_plain_linear(head) and head.bias is None and head.weight.dtype in WEIGHT_DTYPES
        if plain and head.weight.is_contiguous():
            logits = mamba_step_logits(hidden, norm.weight, head.weight, eps=norm.eps).to(dtype)
        else:
            logits = head(norm(hidden).to(dtype))
        return logits.unsqueeze(1)

    def _current(self, backbone: nn.Module) -> tuple[Tensor, Tensor]:
        parameters = [parameter for layer in backbone.layers for parameter in layer.parameters()]
        versions = tuple(
            (parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version) for parameter in parameters
        )
        if versions != self._versions:
            self._packed = None  # free the old buffer first
            self._packed = pack_layers([_pack(layer) for layer in backbone.layers])
            self._versions = versions
        return self._packed


def _pack(layer: nn.Module) -> tuple[Tensor, Tensor]:
    mixer: Mamba = layer.mixer
    return pack_layer(
        mixer.in_proj.weight,
        mixer.x_proj.weight,
        mixer.dt_proj.weight,
        mixer.out_proj.weight,
        mixer.conv1d.weight.squeeze(1),
        mixer.decay_rates(),
        mixer.D,
        mixer.dt_proj.bias,
        conv_bias=mixer.conv1d.bias,
        in_bias=mixer.in_proj.bias,
        out_bias=mixer.out_proj.bias,
        norm_weight=layer.norm.weight,
    )


def _is_plain_norm(norm: nn.Module) -> bool:
    return type(norm) is RMSNorm and norm.bias is None and norm.group_size is None and not has_hooks(norm)


def _is_plain_block(block: nn.Module) -> bool:
    mixer = block.mixer
    if type(mixer) is not Mamba or has_hooks(block) or has_hooks(mixer) or not _is_plain_norm(block.norm):
        return False
    if block.dropout.p > 0 and block.training:
        return False
    projections = (mixer.in_proj, mixer.x_proj, mixer.dt_proj, mixer.out_proj)
    return all(map(is_plain_linear, projections)) and mixer.x_proj.bias is None and mixer.dt_proj.bias is not None
