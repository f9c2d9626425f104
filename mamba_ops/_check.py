"""The sentences of csrc/ops/check.h for fake tensors, and the layout rule of sequence outputs.

Fake kernels check shapes, dtypes and devices too: a call that mixes CPU and meta tensors would otherwise pass silently.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tuple_text(values: Sequence[object]) -> str:
    inside = ", ".join(map(str, values))
    return f"({inside},)" if len(values) == 1 else f"({inside})"


def device_text(device: torch.device) -> str:
    return device.type if device.index is None or device.type == "cpu" else f"{device.type}:{device.index}"


class Checker:
    """Checks the arguments of one call; the C++ class of the same name is its twin."""

    def __init__(self, op: str, main_name: str, main: torch.Tensor):
        self.op, self.main_name, self.main = op, main_name, main
        if main.dtype not in FLOATING:
            self.fail(f"{main_name} must be float64, float32, bfloat16 or float16, got {dtype_name(main.dtype)}")

    def fail(self, text: str) -> None:
        raise RuntimeError(f"{self.op}: {text}")

    def dims(self, name: str, tensor: torch.Tensor, required: int, meaning: str) -> None:
        if tensor.dim() != required:
            self.fail(f"{name} must have shape {meaning}, got {tuple_text(tensor.shape)}")

    def shape(self, name: str, tensor: torch.Tensor | None, **sizes: int) -> None:
        if tensor is None or tensor.shape == tuple(sizes.values()):
            return
        required = f"{tuple_text(list(sizes))} = {tuple_text(list(sizes.values()))}"
        self.fail(f"{name} must have shape {required}, got {tuple_text(tensor.shape)}")

    def device(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.device != self.main.device:
            where, found = device_text(self.main.device), device_text(tensor.device)
            self.fail(f"{name} must be on {self.main_name}'s device {where}, got {found}")

    def same_dtype(self, name: str, tensor: torch.Tensor | None) -> None:
        if tensor is None:
            return
        if tensor.dtype != self.main.dtype:
            required, found = dtype_name(self.main.dtype), dtype_name(tensor.dtype)
            self.fail(f"{name} must have {self.main_name}'s dtype {required}, got {found}")
        self.device(name, tensor)

    def floating(self, name: str, tensor: torch.Tensor | None) -> None:
        if tensor is None:
            return
        if tensor.dtype not in FLOATING:
            self.fail(f"{name} must be float64, float32, bfloat16 or float16, got {dtype_name(tensor.dtype)}")
        self.device(name, tensor)

    def index(self, name: str, tensor: torch.Tensor | None) -> None:
        if tensor is None:
            return
        if tensor.dtype not in (torch.int32, torch.int64):
            self.fail(f"{name} must be int32 or int64, got {dtype_name(tensor.dtype)}")
        self.device(name, tensor)

    def packing(self, seq_idx: torch.Tensor | None, cu_seqlens: torch.Tensor | None, batch: int, seqlen: int) -> int:
        """Shapes of the packing arguments; returns the leading size of the states."""
        self.index("seq_idx", seq_idx)
        self.index("cu_seqlens", cu_seqlens)
        if seq_idx is not None and cu_seqlens is not None:
            self.fail("seq_idx and cu_seqlens must not be given together")
        self.shape("seq_idx", seq_idx, batch=batch, seqlen=seqlen)
        if cu_seqlens is None:
            return batch
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
            self.fail(f"cu_seqlens must have shape (num_sequences + 1,), got {tuple_text(cu_seqlens.shape)}")
        if batch != 1:
            self.fail(f"with cu_seqlens batch must be 1, got {batch}")
        return cu_seqlens.shape[0] - 1


def accumulate_type(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_sequence(like: torch.Tensor) -> torch.Tensor:
    """(batch, dim, seqlen) as `like`: in (batch, seqlen, dim) memory when like.stride(1) == 1, else contiguous."""
    batch, dim, seqlen = like.shape
    if like.stride(1) == 1:
        return like.new_empty((batch, seqlen, dim)).transpose(1, 2)
    return like.new_empty((batch, dim, seqlen))


def empty_gradient(like: torch.Tensor, argument: torch.Tensor | None) -> torch.Tensor:
    """A contiguous gradient of `argument`; shape (0,) when it is absent."""
    if argument is None:
        return like.new_empty((0,))
    return argument.new_empty(argument.shape)


def refuse_gradients(op: str, **tensors: torch.Tensor | None) -> None:
    """In-place operators carry no gradient: while grad mode is on, no argument may require one."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            functional = op.rstrip("_")
            raise RuntimeError(
                f"{op}: {name} requires grad, but {op} works in place and carries no gradient; "
                f"use {functional}, or call it under torch.no_grad()"
            )
