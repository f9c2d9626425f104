"""The operators: public functions, one file each. Importing this module registers their fakes, gradients and autocast rules."""

from .. import _library

_library.load()

from . import causal_conv1d as _causal_conv1d  # noqa: E402
from . import rms_norm as _rms_norm  # noqa: E402

MODULES = (_causal_conv1d, _rms_norm)


def register(namespace: str) -> None:
    """Register the Python half of every operator for `namespace`; tests use it for a second build of the library."""
    for module in MODULES:
        module.register(namespace)


register(_library.NAMESPACE)

from .causal_conv1d import causal_conv1d  # noqa: E402
from .rms_norm import rms_norm  # noqa: E402

__all__ = ["causal_conv1d", "register", "rms_norm"]
