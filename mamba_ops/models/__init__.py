"""Language models built of mamba_ops.layers."""

from .config import MambaConfig
from .language_model import MambaBackbone, MambaBlock, MambaLM

__all__ = ["MambaBackbone", "MambaBlock", "MambaConfig", "MambaLM"]
