"""One token through a whole language model in two operator calls, where the model is made of plain parts."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .._memory import prefer_huge_pages
from ..layers import Mamba, MambaCache, RMSNorm
from ..layers.mamba import is_plain_linear
from ..ops import mamba_step_, mamba_step_logits, pack_layer
from ..ops.mamba_step import pack_layers

if TYPE_CHECKING:
    from .language_model import MambaLM

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Watch:
    """Notices, in some ten microseconds, that a module tree is no longer what it was: parts, wrapping, parameters."""

    def __init__(self, root: nn.Module) -> None:
        modules = list(root.modules())
        self.root = root
        self._modules = modules
        self._children = [module._modules for module in modules]
        self._own_parameters = [module._parameters for module in modules]
        self._namespaces = [module.__dict__ for module in modules]
        self._hooks = [
            hooks
            for m in modules
            for hooks in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
        ]
        self._parts = list(map(dict, self._own_parameters))  # kept alive, so that no other object gets an old one's id
        self.parameters = [p for own in self._own_parameters for p in own.values() if p is not None]
        self._versioned = [p for p in self.parameters if not p.is_inference()]
        self._structure = self.structure()
        self.plain = not any(self._structure[-1])

    def structure(self) -> tuple:
        hooked, replaced = any(self._hooks), any("forward" in names for names in self._namespaces)
        return (
            list(map(type, self._modules)),
            list(map(id, chain.from_iterable(map(dict.values, self._children)))),
            list(map(id, chain.from_iterable(map(dict.values, self._own_parameters)))),
            (hooked, replaced),
        )

    def is_current(self) -> bool:
        return self.structure() == self._structure

    def versions(self) -> tuple:
        """Changes whenever a parameter's values do (those of inference tensors only by another address)."""
        return list(map(Tensor.data_ptr, self.parameters)), list(map(attrgetter("_version"), self._versioned))


class FusedDecoder:
    """Decodes with `mamba_step_`; steps aside where a part of the model is wrapped, hooked or not where it fits.

    The layers' parameters are copied into one packed buffer at the first step, and again when one of them changes:
    decoding needs the memory of the layers (without embedding and head) once more.
    """

    def __init__(self) -> None:
        self._backbone: Watch | None = None
        self._plain = False
        self._norms: list[RMSNorm] = []
        self._versions: tuple | None = None
        self._packed: tuple[Tensor, Tensor] | None = None
        self._head_address: int | None = None  # of the weights whose pages were asked for

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
        if nn.modules.module._has_any_global_hook():
            return False
        weight = model.backbone.embedding.weight
        if weight.dtype not in WEIGHT_DTYPES or weight.device.type not in ("cpu", "cuda"):
            return False
        backbone = model.backbone
        if self._backbone is None or backbone is not self._backbone.root or not self._backbone.is_current():
            self._observe(backbone)
        if not self._plain or any(norm.group_size is not None for norm in self._norms):
            return False
        return not any(block.training and block.dropout.p > 0 for block in backbone.layers)

    def logits(self, model: MambaLM, cache: MambaCache, input_ids: Tensor) -> Tensor:
        """(batch, 1) token numbers -> (batch, 1, vocabulary); advances the cache."""
        backbone = model.backbone
        hidden = backbone.embedding(input_ids.squeeze(1))
        if len(backbone.layers):
            mixer = backbone.layers[0].mixer
            weights, parameters = self.packed(backbone)
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
            if self._head_address != head.weight.data_ptr():
                prefer_huge_pages(head.weight)
                self._head_address = head.weight.data_ptr()
            logits = mamba_step_logits(hidden, norm.weight, head.weight, eps=norm.eps).to(dtype)
        else:
            logits = head(norm(hidden).to(dtype))
        return logits.unsqueeze(1)

    def _observe(self, backbone: nn.Module) -> None:
        self._backbone = Watch(backbone)
        self._plain = self._backbone.plain and _is_plain(backbone)
        self._norms = [*(layer.norm for layer in backbone.layers), backbone.norm_f] if self._plain else []

    def packed(self, backbone: nn.Module) -> tuple[Tensor, Tensor]:
        """The layers' parameters as `mamba_step_` takes them, as they are now."""
        if self._backbone is None or backbone is not self._backbone.root:
            self._observe(backbone)
        versions = self._backbone.versions()
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


def _is_plain(backbone: nn.Module) -> bool:
    return all(map(_is_plain_block, backbone.layers)) and _is_plain_norm(backbone.norm_f)


def _is_plain_norm(norm: nn.Module) -> bool:
    return type(norm) is RMSNorm and norm.bias is None


def _is_plain_block(block: nn.Module) -> bool:
    mixer = block.mixer
    if type(mixer) is not Mamba or not _is_plain_norm(block.norm):
        return False
    projections = (mixer.in_proj, mixer.x_proj, mixer.dt_proj, mixer.out_proj)
    return all(map(is_plain_linear, projections)) and mixer.x_proj.bias is None and mixer.dt_proj.bias is not None
