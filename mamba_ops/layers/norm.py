"""RMS norm as a module, with the residual sum and the gate of Mamba blocks."""

import torch
from torch import Tensor, nn

from ..ops import rms_norm


class RMSNorm(nn.Module):
    r"""Root-mean-square norm over the last axis, with optional residual, gate and groups.

    .. math::
        s &= x + \mathrm{residual} \\
        \mathrm{out} &= s / \sqrt{\mathrm{mean}(s^2) + \mathrm{eps}} \cdot \mathrm{weight} + \mathrm{bias}

    With a gate z, out is multiplied by silu(z); with norm_before_gate=False, s is multiplied by it instead.

    Args:
        hidden_size: length of the normalised axis.
        eps: added to the mean of squares inside the root; positive.
        group_size: normalise within groups of this many neighbouring columns; divides hidden_size. Default: one group.
        norm_before_gate: whether the gate multiplies the normalised row, or the row before the norm.
        bias: whether there is a learned bias (upstream has none, and then the state_dict has only `weight`).
        device, dtype: of the parameters.

    Raises:
        ValueError: hidden_size, eps or group_size does not fit; the text names the argument.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.

    Gradients: for x, residual, z, weight and bias. Once differentiable, in reverse mode.
    Autocast: leaves every tensor as it is; statistics are float32 (float64 for float64) whatever the dtypes.
    Determinism: bit-identical from run to run and for any number of threads.

    Example:
        >>> import torch
        >>> from mamba_ops.layers import RMSNorm
        >>> RMSNorm(2, eps=1e-12)(torch.tensor([[3.0, 4.0]]))
        tensor([[0.8485, 1.1314]], grad_fn=...)
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
        """Normalises x, or x + residual.

        Args:
            x, residual, z: (..., hidden_size).
            prenorm: return residual_out as well.
            residual_in_fp32: residual_out is float32 (float64 for float64 x).

        Returns:
            out (..., hidden_size) in x's dtype; with prenorm the pair (out, residual_out), where residual_out is
            x + residual in residual's dtype, or x itself without residual.

        Raises:
            ValueError: x's last axis is not hidden_size.
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
