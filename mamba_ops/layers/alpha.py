"""The alpha block: a gated scan over a window of features, and one logit a window."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import gated_scan


class AlphaActivations(NamedTuple):
    """What AlphaBlock.forward_train computed on the way to the logit."""

    x: Tensor  # (batch, seqlen, hidden)
    a: Tensor  # (batch, seqlen, state), before the sigmoid
    b: Tensor  # (batch, seqlen, state)
    last_state: Tensor  # (batch, state)
    h_enriched: Tensor  # (batch, hidden)


class AlphaBlock(nn.Module):
    r"""One logit for a window of features: two projections, a gated scan over time, and a linear head.

    .. math::
        x_t &= W_{in} \, \mathrm{input}_t + b_{in} \qquad a_t = W_a x_t + b_a \qquad b_t = W_b x_t + b_b \\
        s_t &= \sigma(a_t) \, s_{t-1} + b_t, \quad s_0 = 0 \\
        \mathrm{logit} &= W_{out} (h_{s2} + W_c s_K) + b_{out}

    Every projection is a matrix product; backwards, one scan runs for every pair of batch and state.

    Args:
        in_dim: features of a time step.
        hidden: width of x and of h_s2.
        state: channels of the scan.
        device, dtype: of the parameters.

    Parameters, nine: W_in (hidden, in_dim), b_in (hidden,), W_a and W_b (state, hidden), b_a and b_b (state,), W_c
    (hidden, state), W_out (1, hidden), b_out (1,).

    Raises:
        ValueError: a size below 1; the text names the argument.

    Source: the gated linear recurrence of Martin and Cundy, "Parallelizing Linear Recurrent Neural Nets Over Sequence
    Length", 2018.

    Gradients: for the input, h_s2 and all parameters. Once differentiable, in reverse mode.
    Autocast: projections and scan run in the autocast dtype, the state in float32.
    Determinism: the scan is bit-identical from run to run and for any number of threads.

    Train it with torch.nn.functional.binary_cross_entropy_with_logits, torch.nn.utils.clip_grad_norm_ and
    torch.optim.AdamW; with the optimizer's fused=True and capturable=True no step waits for a CUDA device.

    Example:
        >>> import torch
        >>> from mamba_ops.layers import AlphaBlock
        >>> AlphaBlock(in_dim=4, hidden=8, state=4)(torch.randn(2, 16, 4)).shape
        torch.Size([2, 1])
    """

    def __init__(self, in_dim: int, hidden: int, state: int, device=None, dtype=None) -> None:
        super().__init__()
        for name, size in (("in_dim", in_dim), ("hidden", hidden), ("state", state)):
            if size < 1:
                raise ValueError(f"AlphaBlock: {name} must be at least 1, got {size}")
        self.in_dim, self.hidden, self.state = in_dim, hidden, state

        def parameter(*shape):
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.W_in, self.b_in = parameter(hidden, in_dim), parameter(hidden)
        self.W_a, self.b_a = parameter(state, hidden), parameter(state)
        self.W_b, self.b_b = parameter(state, hidden), parameter(state)
        self.W_c = parameter(hidden, state)
        self.W_out, self.b_out = parameter(1, hidden), parameter(1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Everything uniform within 1 / sqrt(number of inputs), as nn.Linear does."""
        inputs = {"in": self.in_dim, "a": self.hidden, "b": self.hidden, "c": self.state, "out": self.hidden}
        for name, parameter in self.named_parameters():
            bound = 1 / math.sqrt(inputs[name.partition("_")[2]])
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, input: Tensor, h_s2: Tensor | None = None) -> Tensor:
        """The logit.

        Args:
            input: (batch, seqlen, in_dim), seqlen at least 1.
            h_s2: (batch, hidden), added to what the scan gives; absent means 0.

        Returns:
            logit (batch, 1).

        Raises:
            ValueError: a shape does not fit; the text names the argument.
        """
        return self.forward_train(input, h_s2)[0]

    def forward_train(self, input: Tensor, h_s2: Tensor | None = None) -> tuple[Tensor, AlphaActivations]:
        """The logit and the activations on the way to it; arguments and errors as in forward."""
        if input.dim() != 3 or input.shape[2] != self.in_dim or input.shape[1] < 1:
            required = f"(batch, seqlen, in_dim = {self.in_dim}) with seqlen >= 1"
            raise ValueError(f"AlphaBlock: input must have shape {required}, got {tuple(input.shape)}")
        if h_s2 is not None and h_s2.shape != (input.shape[0], self.hidden):
            required = f"(batch, hidden) = {(input.shape[0], self.hidden)}"
            raise ValueError(f"AlphaBlock: h_s2 must have shape {required}, got {tuple(h_s2.shape)}")
        x = F.linear(input, self.W_in, self.b_in)
        a, b = F.linear(x, self.W_a, self.b_a), F.linear(x, self.W_b, self.b_b)
        last_state = gated_scan(b, a, return_states=False)[1].to(x.dtype)
        h_enriched = F.linear(last_state, self.W_c)
        if h_s2 is not None:
            h_enriched = h_s2 + h_enriched
        logit = F.linear(h_enriched, self.W_out, self.b_out)
        return logit, AlphaActivations(x, a, b, last_state, h_enriched)

    def extra_repr(self) -> str:
        return f"in_dim={self.in_dim}, hidden={self.hidden}, state={self.state}"
