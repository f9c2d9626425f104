"""What layers and models do about the padding behind the last packed sequence."""

import torch
from torch import Tensor


def check_packing(name: str, hidden: Tensor, seq_idx: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Refuses, in the layer's name, sequence borders that do not belong to `hidden` (batch, seqlen, ...)."""
    if seq_idx is not None and cu_seqlens is not None:
        raise ValueError(f"{name}: seq_idx and cu_seqlens exclude each other")
    if seq_idx is not None and seq_idx.shape != hidden.shape[:2]:
        raise ValueError(
            f"{name}: seq_idx must have shape (batch, seqlen) = {tuple(hidden.shape[:2])}, got {tuple(seq_idx.shape)}"
        )
    if cu_seqlens is not None:
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
            raise ValueError(f"{name}: cu_seqlens must have shape (sequences + 1), got {tuple(cu_seqlens.shape)}")
        if hidden.shape[0] != 1:
            raise ValueError(f"{name}: batch must be 1 with cu_seqlens, got {hidden.shape[0]}")


def zero_padding(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """x (1, seqlen, ...) with the rows from cu_seqlens[-1] on replaced by 0; x itself without cu_seqlens.

    A selection, not a product: NaN in a padding row reaches neither the result nor, on the way back, the gradient of x.
    """
    if cu_seqlens is None:
        return x
    real = torch.arange(x.shape[1], device=x.device) < cu_seqlens[-1]
    return torch.where(real.view(-1, *[1] * (x.dim() - 2)), x, 0)


def left_padding(name: str, hidden: Tensor, attention_mask: Tensor | None, inference_params) -> Tensor | None:
    """attention_mask as bool, True for real tokens; refuses, in the layer's name, what is no left padding."""
    if attention_mask is None:
        return None
    if attention_mask.shape != hidden.shape[:2]:
        raise ValueError(
            f"{name}: attention_mask must have shape (batch, seqlen) = {tuple(hidden.shape[:2])}, "
            f"got {tuple(attention_mask.shape)}"
        )
    real = attention_mask != 0
    if torch.compiler.is_compiling() or real.device.type != "cpu":
        return real  # contents are not read
    if (real[:, :-1] & ~real[:, 1:]).any():
        raise ValueError(f"{name}: attention_mask must be left padding: zeros, then ones, in every row")
    if inference_params is not None and inference_params.seqlen_offset > 0 and not real.all():
        raise ValueError(f"{name}: attention_mask must be all ones behind the first tokens of a cache")
    return real


def select(real: Tensor | None, x: Tensor) -> Tensor:
    """x (batch, seqlen, ...) with 0 where `real` (batch, seqlen) is False; x itself without a mask."""
    if real is None:
        return x
    return torch.where(real.unsqueeze(-1), x, 0)
