"""Root-mean-square norm with optional residual, gate and groups, in plain PyTorch."""

import torch
import torch.nn.functional as F

from ._examples import normal_numbers


def rms_norm(
    x,
    weight=None,
    bias=None,
    z=None,
    residual=None,
    *,
    eps=1e-5,
    group_size=None,
    norm_before_gate=True,
    residual_in_fp32=False,
):
    """out = v / sqrt(mean(v^2) + eps) weight + bias over the last axis, or over groups of it.

    Returns (out, residual_out, rms). v = x + residual. With a gate z: out = norm(v) silu(z), or norm(v silu(z)) if not
    norm_before_gate. x, z, residual (..., dim); weight, bias (dim). residual_out = x + residual in residual's dtype
    (float32, or float64 for float64 x, if residual_in_fp32), of shape (0,) without residual.
    rms = sqrt(mean(v^2) + eps), of x's leading shape, with group_size followed by the number of groups.
    """
    dim = x.shape[-1]
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    group = dim if group_size is None else group_size
    if dim and (group < 1 or dim % group):
        raise ValueError(f"rms_norm: group_size must divide dim = {dim}, got {group_size}")
    s = x.to(acc)
    if residual is not None:
        s = s + residual.to(acc)
    v = s
    if z is not None and not norm_before_gate:
        v = s * F.silu(z.to(acc))
    groups = v.reshape(*v.shape[:-1], dim // group if group else 0, group)
    rms = torch.sqrt(groups.square().mean(-1) + eps)
    y = (groups / rms[..., None]).reshape(v.shape)
    if weight is not None:
        y = y * weight.to(acc)
    if bias is not None:
        y = y + bias.to(acc)
    if z is not None and norm_before_gate:
        y = y * F.silu(z.to(acc))
    if residual is None:
        residual_out = x.new_zeros(0)
    else:
        residual_out = s.to(acc if residual_in_fp32 else residual.dtype)
    return y.to(x.dtype), residual_out, (rms.squeeze(-1) if group_size is None and dim else rms).detach()


def example_inputs(
    *,
    dtype=torch.float32,
    device=None,
    generator=None,
    shape=(3, 2),
    dim=12,
    weight=True,
    bias=True,
    z=True,
    residual=True,
    group_size=None,
    norm_before_gate=True,
    residual_in_fp32=False,
    eps=1e-5,
):
    """Small random arguments for rms_norm."""
    normal = normal_numbers(dtype, device, generator)

    inputs = {"x": normal(*shape, dim), "eps": eps, "group_size": group_size}
    inputs.update(norm_before_gate=norm_before_gate, residual_in_fp32=residual_in_fp32)
    if weight:
        inputs["weight"] = 1 + 0.3 * normal(dim)
    if bias:
        inputs["bias"] = normal(dim)
    if z:
        inputs["z"] = normal(*shape, dim)
    if residual:
        inputs["residual"] = normal(*shape, dim)
    return inputs
