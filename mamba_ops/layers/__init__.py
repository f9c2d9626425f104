"""Modules with upstream's constructor arguments and state_dict names, built on mamba_ops.ops."""

from .alpha import AlphaActivations, AlphaBlock
from .cache import MambaCache
from .mamba import Mamba
from .norm import RMSNorm

__all__ = ["AlphaActivations", "AlphaBlock", "Mamba", "MambaCache", "RMSNorm"]
