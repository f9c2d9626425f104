"""Mamba state-space models as PyTorch custom operators, with first-class CPU kernels and verified gradients.

The operators are `torch.ops.mamba.*`; the functions here document them and call them.
"""

from ._version import __version__
from .ops import (
    causal_conv1d,
    conv1d_step,
    conv1d_step_,
    gated_scan,
    linear_recurrence,
    mamba_step_,
    mamba_step_logits,
    pack_layer,
    rms_norm,
    selective_scan,
    selective_state_update,
    selective_state_update_,
    threshold_backtest,
)

__all__ = [
    "__version__",
    "causal_conv1d",
    "conv1d_step",
    "conv1d_step_",
    "gated_scan",
    "linear_recurrence",
    "mamba_step_",
    "mamba_step_logits",
    "pack_layer",
    "rms_norm",
    "selective_scan",
    "selective_state_update",
    "selective_state_update_",
    "threshold_backtest",
]
