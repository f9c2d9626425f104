"""The operators: public functions, one file each. Importing this module registers fakes, gradients, autocast rules."""

from .. import _library

_library.load()

from . import causal_conv1d as _causal_conv1d  # noqa: E402
from . import conv1d_step as _conv1d_step  # noqa: E402
from . import linear_recurrence as _linear_recurrence  # noqa: E402
from . import mamba_step as _mamba_step  # noqa: E402
from . import rms_norm as _rms_norm  # noqa: E402
from . import selective_scan as _selective_scan  # noqa: E402
from . import selective_state_update as _selective_state_update  # noqa: E402
from . import threshold_backtest as _threshold_backtest  # noqa: E402

MODULES = (
    _causal_conv1d,
    _conv1d_step,
    _linear_recurrence,
    _mamba_step,
    _rms_norm,
    _selective_scan,
    _selective_state_update,
    _threshold_backtest,
)


def register(namespace: str) -> None:
    """Register the Python half of every operator for `namespace`; tests use it for CUDA kernels that run on the CPU."""
    for module in MODULES:
        module.register(namespace)


register(_library.NAMESPACE)

from .causal_conv1d import causal_conv1d  # noqa: E402
from .conv1d_step import conv1d_step, conv1d_step_  # noqa: E402
from .linear_recurrence import gated_scan, linear_recurrence  # noqa: E402
from .mamba_step import mamba_step_, mamba_step_logits, pack_layer  # noqa: E402
from .rms_norm import rms_norm  # noqa: E402
from .selective_scan import selective_scan  # noqa: E402
from .selective_state_update import selective_state_update, selective_state_update_  # noqa: E402
from .threshold_backtest import threshold_backtest  # noqa: E402

__all__ = [
    "causal_conv1d",
    "conv1d_step",
    "conv1d_step_",
    "gated_scan",
    "linear_recurrence",
    "mamba_step_",
    "mamba_step_logits",
    "pack_layer",
    "register",
    "rms_norm",
    "selective_scan",
    "selective_state_update",
    "selective_state_update_",
    "threshold_backtest",
]
