"""Plain PyTorch definitions of the operators: the readable mathematics, and the oracle of the tests.

Each module holds one function with the operator's name and signature, differentiable by autograd, and `example_inputs`.
They are written to be read and to be right, not to be fast. They import torch and nothing else.
"""

from .causal_conv1d import causal_conv1d
from .linear_recurrence import gated_scan, linear_recurrence
from .rms_norm import rms_norm
from .selective_scan import selective_scan

__all__ = ["causal_conv1d", "gated_scan", "linear_recurrence", "rms_norm", "selective_scan"]
