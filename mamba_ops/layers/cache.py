"""The states that Mamba layers carry from one call to the next when they decode."""

from __future__ import annotations

import torch
from torch import Tensor


class MambaCache:
    """Convolution and scan states of a stack of layers; `inference_params` of layers and models.

    Args:
        n_layer, batch_size, d_inner, d_state, d_conv: sizes of the model.
        dtype: of the convolution states, which are samples: the model's. Scan states are float32 (float64 in float64).
        device: of the states.

    Attributes:
        conv_states: (n_layer, batch, d_inner, d_conv): the last d_conv inputs of each convolution, at first zeros.
        ssm_states: (n_layer, batch, d_inner, d_state).
        seqlen_offset: positions seen so far; 0 means that the states are fresh.
        key_value_memory_dict: {layer: (conv_state, ssm_state)}, views, as upstream's InferenceParams has it.

    Memory is channel-last, (n_layer, batch, columns, d_inner), where one step is fastest.

    Example:
        >>> from mamba_ops.layers import MambaCache
        >>> cache = MambaCache(n_layer=2, batch_size=3, d_inner=8, d_state=4, d_conv=4)
        >>> cache.ssm_states.shape, cache.seqlen_offset
        (torch.Size([2, 3, 8, 4]), 0)
    """

    def __init__(
        self,
        n_layer: int,
        batch_size: int,
        d_inner: int,
        d_state: int,
        d_conv: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        wide = torch.promote_types(dtype, torch.float32)
        self.conv_states = torch.zeros(n_layer, batch_size, d_conv, d_inner, dtype=dtype, device=device).transpose(2, 3)
        self.ssm_states = torch.zeros(n_layer, batch_size, d_state, d_inner, dtype=wide, device=device).transpose(2, 3)
        self.seqlen_offset = 0
        self._marks: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def batch_size(self) -> int:
        return self.conv_states.shape[1]

    @property
    def key_value_memory_dict(self) -> dict[int, tuple[Tensor, Tensor]]:
        return dict(enumerate(zip(self.conv_states.unbind(), self.ssm_states.unbind())))

    def advance(self, positions: int) -> None:
        """Count `positions` more as seen; models do this, callers of a single layer do it themselves."""
        self.seqlen_offset += positions

    def reset(self) -> None:
        """Back to the start, in the same memory."""
        self.conv_states.zero_()
        self.ssm_states.zero_()
        self.seqlen_offset = 0
        self._marks.clear()

    def clone(self) -> MambaCache:
        """An independent copy, marks included."""
        copy = object.__new__(MambaCache)
        copy.conv_states, copy.ssm_states = self.conv_states.clone(), self.ssm_states.clone()
        copy.seqlen_offset = self.seqlen_offset
        copy._marks = dict(self._marks)  # marks are never written to
        return copy

    def mark(self) -> int:
        """Remember the states at the present position, for `crop`; returns the position."""
        self._marks[self.seqlen_offset] = (self.conv_states.clone(), self.ssm_states.clone())
        return self.seqlen_offset

    def crop(self, seqlen: int) -> None:
        """Roll back to position `seqlen`, which must be 0, the present one or one that `mark` remembered.

        A recurrent state does not contain the earlier ones, so that other positions are refused: ValueError.
        """
        if seqlen == 0:
            self.reset()
        elif seqlen in self._marks:
            conv_states, ssm_states = self._marks[seqlen]
            self.conv_states.copy_(conv_states)
            self.ssm_states.copy_(ssm_states)
        elif seqlen != self.seqlen_offset:
            raise ValueError(
                f"MambaCache: cannot crop to {seqlen}: a recurrent state rolls back only to positions that mark() "
                f"remembered: 0, {', '.join(map(str, [*sorted(self._marks), self.seqlen_offset]))}"
            )
        self.seqlen_offset = seqlen
        self._marks = {position: states for position, states in self._marks.items() if position <= seqlen}

    def reorder(self, index: Tensor) -> None:
        """Row b becomes the former row index[b], in every layer and mark; for beam search. index: (batch,) integers."""
        if index.shape != (self.batch_size,):
            raise ValueError(f"MambaCache: index must have shape ({self.batch_size},), got {tuple(index.shape)}")
        self.conv_states.copy_(self.conv_states[:, index])
        self.ssm_states.copy_(self.ssm_states[:, index])
        self._marks = {
            position: (conv_states[:, index], ssm_states[:, index])
            for position, (conv_states, ssm_states) in self._marks.items()
        }

    def check_batch(self, name: str, batch: int) -> None:
        """Refuse another batch size in words."""
        if batch != self.batch_size:
            raise ValueError(
                f"{name}: the cache holds batch {self.batch_size}, got {batch}; allocate another one with "
                "allocate_inference_cache"
            )
