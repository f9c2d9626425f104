"""One step of the selective scan: functional and differentiable, or in place for decoding."""

from __future__ import annotations

import torch

from .. import _autograd
from .._check import Checker, empty_gradient, refuse_gradients, tuple_text


def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    *,
    dt_softplus: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Advance the state by one position; returns the output and the new state, changes nothing.

    .. math::
        \Delta &= \mathrm{softplus}(\mathrm{dt} + \mathrm{dt\_bias}) \\
        \mathrm{state}'[n] &= e^{\Delta A[n]} \mathrm{state}[n] + \Delta B[n] x \\
        \mathrm{out} &= (\textstyle\sum_n C[n] \, \mathrm{state}'[n] + D x) \cdot \mathrm{silu}(z)

    Args:
        state: (batch, dim, dstate), or with heads (batch, nheads, headdim, dstate); float64, float32, bfloat16 or
            float16.
        x: (batch, dim), or (batch, nheads, headdim); any of these dtypes.
        dt: x's shape and dtype: step size, in units of time, before bias and softplus. May be expanded over headdim.
        A: (dim, dstate), or (nheads, headdim, dstate): decay rate, per unit of time. May be expanded (stride 0): one
            value per head costs one exponential.
        B: (batch, dstate), or (batch, ngroups, dstate), x's dtype; head h uses group h // (nheads / ngroups).
        C: as B.
        D: (dim,), or (nheads, headdim): skip connection.
        z: gate, x's shape and dtype.
        dt_bias: (dim,), or (nheads, headdim): added to dt.
        dt_softplus: apply softplus (the identity above 20) to dt + dt_bias.

    Returns:
        out: x's shape and dtype, contiguous; computed from the unrounded new state.
        new_state: state's shape and dtype, contiguous.

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the text names the argument.

    Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023.

    Gradients: for every floating argument, from out and new_state: back-propagation through time works by chaining
    steps. Once differentiable, in reverse mode.
    Autocast: float32 x, dt, B, C and z are cast to the autocast dtype; A, D, dt_bias and states are not.
    Determinism: bit-identical from run to run and for any number of threads.

    Example:
        >>> import torch, mamba_ops
        >>> state, x, A, B = torch.zeros(1, 1, 1), torch.ones(1, 1), torch.zeros(1, 1), torch.ones(1, 1)
        >>> for _ in range(3):
        ...     out, state = mamba_ops.selective_state_update(state, x, 0.5 * x, A, B, B)
        >>> print(out)
        tensor([[1.5000]])
    """
    return torch.ops.mamba.selective_state_update(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus)


def selective_state_update_(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    *,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    r"""`selective_state_update` that writes the new state into `state`; for decoding.

    .. math::
        \mathrm{state}[n] \leftarrow e^{\Delta A[n]} \mathrm{state}[n] + \Delta B[n] x

    Args:
        state: as in `selective_state_update`, written in place (rounded to its dtype); (entries, …) with
            `state_batch_indices`.
        x, dt, A, B, C, D, z, dt_bias, dt_softplus: as in `selective_state_update`.
        state_batch_indices: (batch,), int32 or int64: row b uses entry state_batch_indices[b]. A negative one is
            padding: out is 0 and no entry is touched. Two rows with one index: undefined.

    Returns:
        out: x's shape and dtype, contiguous.

    Raises:
        RuntimeError: a shape, dtype, device or index does not fit, or an argument requires grad while grad mode is on.

    Source: as `selective_state_update`.

    Gradients: none; use `selective_state_update`.
    Autocast: float32 x, dt, B, C and z are cast to the autocast dtype; A, D, dt_bias and states are not.
    Determinism: bit-identical from run to run and for any number of threads.

    Example:
        >>> import torch, mamba_ops
        >>> state, x, A, B = torch.zeros(1, 1, 1), torch.ones(1, 1), torch.zeros(1, 1), torch.ones(1, 1)
        >>> print(mamba_ops.selective_state_update_(state, x, 0.5 * x, A, B, B), state)
        tensor([[0.5000]]) tensor([[[0.5000]]])
    """
    if torch.is_grad_enabled():
        tensors = dict(state=state, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias)
        refuse_gradients("selective_state_update_", **tensors)
    return torch.ops.mamba.selective_state_update_.default(
        state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices
    )


def _check(check, state, x, dt, A, B, C, D, z, dt_bias, any_entries=False):
    """The checks of csrc/ops/selective_state_update.cpp."""
    heads = x.dim() == 3
    if x.dim() != 2 and not heads:
        check.fail(f"x must have shape (batch, dim) or (batch, nheads, headdim), got {tuple_text(x.shape)}")
    check.dims(
        "state", state, 4 if heads else 3, "(batch, nheads, headdim, dstate)" if heads else "(batch, dim, dstate)"
    )
    check.dims("B", B, 3 if heads else 2, "(batch, ngroups, dstate)" if heads else "(batch, dstate)")
    batch = {"batch": x.shape[0]}
    channels = {"nheads": x.shape[1], "headdim": x.shape[2]} if heads else {"dim": x.shape[1]}
    dstate = {"dstate": state.shape[-1]}
    groups = {"ngroups": B.shape[1]} if heads else {}
    entries = {"entries": state.shape[0]} if any_entries else batch
    check.shape("state", state, **entries, **channels, **dstate)
    check.shape("dt", dt, **batch, **channels)
    check.shape("A", A, **channels, **dstate)
    check.shape("B", B, **batch, **groups, **dstate)
    check.shape("C", C, **batch, **groups, **dstate)
    check.shape("D", D, **channels)
    check.shape("z", z, **batch, **channels)
    check.shape("dt_bias", dt_bias, **channels)
    if heads and (B.shape[1] < 1 or x.shape[1] % B.shape[1] != 0):
        check.fail(f"B must have an ngroups that divides nheads = {x.shape[1]}, got {B.shape[1]}")
    for name, tensor in (("dt", dt), ("B", B), ("C", C), ("z", z)):
        check.same_dtype(name, tensor)
    for name, tensor in (("state", state), ("A", A), ("D", D), ("dt_bias", dt_bias)):
        check.floating(name, tensor)


def _fake_fwd(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus):
    _check(Checker("selective_state_update", "x", x), state, x, dt, A, B, C, D, z, dt_bias)
    return x.new_empty(x.shape), state.new_empty(state.shape)


def _fake_(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None):
    check = Checker("selective_state_update_", "x", x)
    _check(check, state, x, dt, A, B, C, D, z, dt_bias, any_entries=state_batch_indices is not None)
    check.shape("state_batch_indices", state_batch_indices, batch=x.shape[0])
    check.index("state_batch_indices", state_batch_indices)
    return x.new_empty(x.shape)


def _fake_bwd(dout, dnew_state, state, x, dt, A, B, C, D, z, dt_bias, dt_softplus):
    check = Checker("selective_state_update_bwd", "x", x)
    _check(check, state, x, dt, A, B, C, D, z, dt_bias)
    for name, gradient, of, like in (("dout", dout, "x", x), ("dnew_state", dnew_state, "state", state)):
        if gradient is not None and gradient.shape != like.shape:
            check.fail(f"{name} must have {of}'s shape {tuple_text(like.shape)}, got {tuple_text(gradient.shape)}")
    check.same_dtype("dout", dout)
    check.floating("dnew_state", dnew_state)
    return tuple(empty_gradient(x, argument) for argument in (state, x, dt, A, B, C, D, z, dt_bias))


def register(namespace: str) -> None:
    """Fakes, autograd and autocast of the operators in `namespace`."""
    ops = getattr(torch.ops, namespace)
    library = _autograd.library(namespace)
    fakes = {
        "selective_state_update_fwd": _fake_fwd,
        "selective_state_update_": _fake_,
        "selective_state_update_bwd": _fake_bwd,
    }
    for name, fake in fakes.items():
        torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
    _autograd.define(
        namespace,
        "selective_state_update",
        num_outputs=2,
        forward=lambda *arguments: ops.selective_state_update_fwd(*arguments[:-1]),
        backward=lambda *arguments: ops.selective_state_update_bwd(*arguments),
        gradients_of=range(9),
    )
    _autograd.define_autocast(namespace, "selective_state_update", positions=(1, 2, 4, 5, 7))
    _autograd.define_autocast(namespace, "selective_state_update_", positions=(1, 2, 4, 5, 7))
