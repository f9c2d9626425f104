"""RMS norm as a module, with the residual sum and the gate of Mamba blocks."""

import torch
from torch import Tensor, nn

from ..ops import rms_norm


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, with optional residual, gate and groups.

    s = x + residual;  out = s / sqrt(mean(s^2) + eps) * weight,  then * silu(z) with a gate. With
    norm_before_gate=False the gate comes first: out = v / sqrt(mean(v^2) + eps) * weight, v = s * silu(z).

    Args:
        hidden_size: length of the normalised axis.
        eps: added to the mean of squares inside the root; positive.
        group_size: normalise within groups of this many neighbouring columns; must divide hidden_size. None: one group.
        norm_before_gate: whether the norm or the gate comes first; without z it means nothing.
        bias: add a learned bias (upstream has none, and then the state_dict has only `weight`).
        device, dtype: of the parameters.

    Raises ValueError for a group_size that does not divide hidden_size and for eps <= 0.

    Statistics are computed in float32 (float64 for float64 x) whatever the dtypes; autocast casts nothing here.
    Gradients reach x, residual, z, weight and bias and are the same bits from run to run. Source: Zhang and Sennrich,
    Root Mean Square Layer Normalization (2019).

    >>> norm = RMSNorm(8)
    >>> norm(torch.randn(2, 3, 8)).shape
    torch.Size([2, 3, 8])
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        bias: bool = False,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        if hidden_size < 1:
            raise ValueError(f"RMSNorm: hidden_size must be at least 1, got {hidden_size}")
        if not eps > 0:
            raise ValueError(f"RMSNorm: eps must be positive, got {eps}")
        if group_size is not None and (group_size < 1 or hidden_size % group_size):
            raise ValueError(f"RMSNorm: group_size must divide hidden_size = {hidden_size}, got {group_size}")
        self.hidden_size = hidden_size
        self.eps = eps
        self.group_size = group_size
        self.norm_before_gate = norm_before_gate
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", nn.Parameter(torch.empty_like(self.weight)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """weight 1, bias 0."""
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        z: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Returns out (..., hidden_size) in x's dtype; with prenorm the pair (out, residual_out).

        x, residual, z: (..., hidden_size). residual_out = x + residual has residual's dtype, or the dtype of the
            statistics with
        residual_in_fp32; without residual it is x itself (cast with residual_in_fp32).
        """
        if x.shape[-1] != self.hidden_size:
            raise ValueError(f"RMSNorm: x must have shape (..., {self.hidden_size}), got {tuple(x.shape)}")
        out, residual_out, _ = rms_norm(
            x,
            self.weight,
            self.bias,
            z,
            residual,
            eps=self.eps,
            group_size=self.group_size,
            norm_before_gate=self.norm_before_gate,
            residual_in_fp32=residual_in_fp32,
        )
        if not prenorm:
            return out
        if residual is None:
            residual_out = x.to(torch.promote_types(x.dtype, torch.float32)) if residual_in_fp32 else x
        return out, residual_out

    def extra_repr(self) -> str:
        text = f"{self.hidden_size}, eps={self.eps}"
        if self.group_size is not None:
            text += f", group_size={self.group_size}"
        return text if self.norm_before_gate else text + ", norm_before_gate=False"
