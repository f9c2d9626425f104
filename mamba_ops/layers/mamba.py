"""The Mamba-1 mixer: projection, causal convolution, selective scan, gate, projection."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import (
    causal_conv1d,
    conv1d_step,
    conv1d_step_,
    selective_scan,
    selective_state_update,
    selective_state_update_,
)
from .cache import MambaCache
from .packing import check_packing, left_padding, select, zero_padding


def is_plain_linear(module: nn.Module) -> bool:
    """Whether calling the module is the same as using its weight and bias: an nn.Linear, not wrapped, without hooks."""
    return (
        type(module) in (nn.Linear, HalfPrecisionStepLinear)
        and "forward" not in module.__dict__
        and not has_hooks(module)
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether something listens to calls of the module, or changes them."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


class HalfPrecisionStepLinear(nn.Linear):
    """dt_proj of a bfloat16 or float16 layer: an nn.Linear whose bias is float32 and rounded only where it is added.

    In 16 bits a step-size bias of -7 would move in jumps of 0.03, so that small updates never reach it.
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias.to(self.weight.dtype))


class Mamba(nn.Module):
    r"""Selective state-space mixer of Mamba-1, with upstream's constructor arguments and state_dict names.

    .. math::
        [x, z] &= W_{in}\,\mathrm{hidden}, \quad x \leftarrow \mathrm{silu}(\mathrm{conv1d}(x)), \quad
            [r, B, C] = W_x\,x, \quad \Delta = \mathrm{softplus}(W_{dt}\,r + b_{dt}) \\
        h_t &= \exp(\Delta_t A) h_{t-1} + \Delta_t B_t x_t, \quad A = -\exp(\mathrm{A\_log}) \\
        \mathrm{out}_t &= W_{out}\,((C_t \cdot h_t + D x_t)\,\mathrm{silu}(z_t))

    Args:
        d_model: width of input and output.
        d_state: states per channel.
        d_conv: taps of the convolution, any number from 1 on.
        expand: the inner width d_inner is int(expand * d_model).
        dt_rank: width of the step-size bottleneck; "auto" is ceil(d_model / 16).
        dt_min, dt_max, dt_init_floor: fresh step sizes are log-uniform in [dt_min, dt_max], but at least dt_init_floor.
        dt_init: "random" (uniform) or "constant" fresh dt_proj.weight, of size dt_rank ** -0.5 * dt_scale.
        dt_scale: see dt_init.
        conv_bias: whether the convolution has a bias.
        bias: whether in_proj and out_proj have one.
        use_fast_path: upstream's choice between a fused CUDA kernel and separate calls. Here one path serves every
            device and dtype, with the projections always called as modules, so both values give the same numbers; it is
            kept as an attribute.
        layer_idx: this layer's place in a model, kept as an attribute.
        device, dtype: of the parameters. A_log, D and dt_proj.bias are never narrower than float32 in a fresh layer.

    Raises:
        ValueError: a size is below 1, dt_init is unknown, or not 0 < dt_min <= dt_max; the text names the argument.

    The projections in_proj, x_proj, dt_proj and out_proj may be replaced by wrappers or quantised linears, and carry
    hooks. The bias of a plain dt_proj is added inside the scan; any other dt_proj is called as a module. conv1d only
    holds parameters: it is not called. A_log, D and dt_proj.bias are marked `_no_weight_decay`, dt_proj.bias
    `_no_reinit`; the marks survive copies, pickling, loading and `to_empty`.

    Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023, section 3.

    Gradients: for the input and every parameter. Once differentiable, in reverse mode.
    Autocast: projections and sequences in the autocast dtype; A, D, biases and states stay float32.
    Determinism: bit-identical from run to run.

    Example:
        >>> import torch
        >>> from mamba_ops.layers import Mamba
        >>> layer = Mamba(16)
        >>> layer(torch.randn(2, 10, 16)).shape
        torch.Size([2, 10, 16])
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: float = 2,
        dt_rank: int | str = "auto",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init: str = "random",
        dt_scale: float = 1.0,
        dt_init_floor: float = 1e-4,
        conv_bias: bool = True,
        bias: bool = False,
        use_fast_path: bool = True,
        layer_idx: int | None = None,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        for name, value in (("d_model", d_model), ("d_state", d_state), ("d_conv", d_conv)):
            if value < 1:
                raise ValueError(f"Mamba: {name} must be at least 1, got {value}")
        if int(expand * d_model) < 1:
            raise ValueError(f"Mamba: expand * d_model must be at least 1, got expand = {expand}, d_model = {d_model}")
        if dt_rank != "auto" and (not isinstance(dt_rank, int) or dt_rank < 1):
            raise ValueError(f"Mamba: dt_rank must be 'auto' or at least 1, got {dt_rank!r}")
        if dt_init not in ("random", "constant"):
            raise ValueError(f"Mamba: dt_init must be 'random' or 'constant', got {dt_init!r}")
        if not 0 < dt_min <= dt_max:
            raise ValueError(f"Mamba: dt_min and dt_max must satisfy 0 < dt_min <= dt_max, got {dt_min} and {dt_max}")
        if not dt_init_floor > 0:
            raise ValueError(f"Mamba: dt_init_floor must be positive, got {dt_init_floor}")
        self.d_model = d_model
        self.d_state = d_state
        self.d_conv = d_conv
        self.expand = expand
        self.d_inner = int(expand * d_model)
        self.dt_rank = math.ceil(d_model / 16) if dt_rank == "auto" else dt_rank
        self.dt_min, self.dt_max, self.dt_init_floor = dt_min, dt_max, dt_init_floor
        self.dt_init, self.dt_scale = dt_init, dt_scale
        self.use_fast_path = use_fast_path
        self.layer_idx = layer_idx

        factory = {"device": device, "dtype": dtype}
        dtype = torch.get_default_dtype() if dtype is None else dtype
        wide = {"device": device, "dtype": torch.promote_types(dtype, torch.float32)}
        self.in_proj = nn.Linear(d_model, 2 * self.d_inner, bias=bias, **factory)
        self.conv1d = nn.Conv1d(
            self.d_inner, self.d_inner, d_conv, groups=self.d_inner, padding=d_conv - 1, bias=conv_bias, **factory
        )
        self.x_proj = nn.Linear(self.d_inner, self.dt_rank + 2 * d_state, bias=False, **factory)
        if wide["dtype"] == dtype:
            self.dt_proj = nn.Linear(self.dt_rank, self.d_inner, **factory)
        else:
            self.dt_proj = HalfPrecisionStepLinear(self.dt_rank, self.d_inner, **factory)
            self.dt_proj.bias = nn.Parameter(torch.empty(self.d_inner, **wide))
        self.A_log = nn.Parameter(torch.empty(self.d_inner, d_state, **wide))
        self.D = nn.Parameter(torch.empty(self.d_inner, **wide))
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias, **factory)
        self.register_load_state_dict_post_hook(Mamba._mark_parameters)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fresh values for every parameter, also after construction on the meta device and `to_empty`."""
        for module in (self.in_proj, self.conv1d, self.x_proj, self.out_proj):
            module.reset_parameters()  # uniform within 1 / sqrt(fan in), biases too
        for module in (self.in_proj, self.out_proj):
            if module.bias is not None:
                module.bias.zero_()
        bound = self.dt_rank**-0.5 * self.dt_scale
        if self.dt_init == "random":
            self.dt_proj.weight.uniform_(-bound, bound)
        else:
            self.dt_proj.weight.fill_(bound)
        step_bias = self.dt_proj.bias
        uniform = torch.rand(
            step_bias.shape, device=step_bias.device, dtype=torch.promote_types(step_bias.dtype, torch.float32)
        )
        log_min, log_max = math.log(self.dt_min), math.log(self.dt_max)
        step = torch.exp(log_min + uniform * (log_max - log_min)).clamp(min=self.dt_init_floor)
        step_bias.copy_(step + torch.log(-torch.expm1(-step)))  # softplus of this is step
        self.A_log.copy_(torch.arange(1, self.d_state + 1, device=self.A_log.device).to(self.A_log.dtype).log())
        self.D.fill_(1)
        self._mark_parameters()

    def _mark_parameters(self, *_) -> None:
        """Marks what weight decay and generic initialisers must leave alone; again wherever parameters are replaced."""
        step_bias = getattr(self.dt_proj, "bias", None)
        for parameter in (self.A_log, self.D, step_bias):
            if isinstance(parameter, nn.Parameter):
                parameter._no_weight_decay = True
        if isinstance(step_bias, nn.Parameter):
            step_bias._no_reinit = True

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self._mark_parameters()  # a move between device types makes new parameters
        return self

    def __setstate__(self, state):
        super().__setstate__(state)
        self._mark_parameters()  # deepcopy makes new ones, too

    def _project_step(self, r: Tensor) -> tuple[Tensor, Tensor | None]:
        """delta and the bias still to be added: the scan does that, in float32, if dt_proj is a plain linear."""
        if self.dt_rank == 1:
            r = r.contiguous()  # for a column of a wider matrix torch 2.10 gets the weight's bfloat16 gradient wrong
        if is_plain_linear(self.dt_proj):
            return F.linear(r, self.dt_proj.weight), self.dt_proj.bias
        return self.dt_proj(r), None

    def decay_rates(self) -> Tensor:
        """A = -exp(A_log), (d_inner, d_state), float32 or float64."""
        return -torch.exp(self.A_log.to(torch.promote_types(self.A_log.dtype, torch.float32)))

    def forward(
        self,
        hidden_states: Tensor,
        inference_params=None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Mixes the tokens of each sequence.

        Args:
            hidden_states: (batch, seqlen, d_model), of the parameters' dtype (any float under autocast).
            inference_params: a MambaCache, or any object with upstream's key_value_memory_dict and seqlen_offset: the
                layer continues from its states (from zero states at offset 0) and writes the new ones; any number of
                tokens. No gradient flows through a cache. With cu_seqlens it holds one row for each sequence.
            seq_idx: (batch, seqlen), int32 or int64: a new sequence starts wherever the value changes; nothing flows
                across, and a negative value hides a token from the convolution.
            cu_seqlens: (sequences + 1,), int32 or int64; batch is 1, sequence s is cu_seqlens[s] .. cu_seqlens[s + 1].
                What follows the last is padding: its content, even NaN, is never used, its output and gradient are 0.
            attention_mask: (batch, seqlen), bool, integer or float: 0 marks padding on the left, in front of a row's
                first token; it changes nothing for the tokens, and its output and gradient are 0.

        Returns:
            (batch, seqlen, d_model) in hidden_states' dtype; under autocast in the autocast dtype.

        Raises:
            ValueError: a shape does not fit, both kinds of borders are given, the mask is no left padding, or the
                cache is of another batch size.
        """
        if hidden_states.dim() != 3 or hidden_states.shape[2] != self.d_model:
            raise ValueError(
                f"Mamba: hidden_states must have shape (batch, seqlen, d_model = {self.d_model}), "
                f"got {tuple(hidden_states.shape)}"
            )
        check_packing("Mamba", hidden_states, seq_idx, cu_seqlens)
        real = left_padding("Mamba", hidden_states, attention_mask, inference_params)
        borders = {"seq_idx": seq_idx, "cu_seqlens": cu_seqlens}
        if inference_params is None:
            out, _ = self._mix(hidden_states, borders, real, None)
            return out
        sequences = hidden_states.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        conv_state, ssm_state = self._states(inference_params, sequences, hidden_states)
        if inference_params.seqlen_offset > 0 and hidden_states.shape[1] == 1 and cu_seqlens is None:
            out, new_conv_state, new_ssm_state = self.step(hidden_states, conv_state, ssm_state)
            states = (new_conv_state, new_ssm_state)
        else:
            # Copies: autograd keeps what the operators read, and the cache is about to be written.
            fresh = inference_params.seqlen_offset == 0
            states = (None, None) if fresh else (conv_state.clone(), ssm_state.clone())
            out, states = self._mix(hidden_states, borders, real, states)
        with torch.no_grad():
            for old, new in zip((conv_state, ssm_state), states):
                if new is not old:
                    old.copy_(new)
        return out

    def _mix(
        self,
        hidden_states: Tensor,
        borders: dict[str, Tensor | None],
        real: Tensor | None,
        states: tuple[Tensor | None, Tensor | None] | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The mixer over whole sequences, and the states behind them; `states` None: the caller needs none."""
        cu_seqlens = borders["cu_seqlens"]
        hidden_states = select(real, zero_padding(hidden_states, cu_seqlens))
        weight, conv_state, ssm_state = self.conv1d.weight.squeeze(1), None, None
        if states is not None:
            conv_state, ssm_state = states
            weight = F.pad(weight, (1, 0))  # one more tap, of weight 0: its state is the cache's d_conv samples

        # Views (batch, d_inner, seqlen) with stride(1) == 1: convolution and scan read and write that layout. Splitting
        # before transposing lets the two gradients be joined in it, too.
        x, z = self.in_proj(hidden_states).chunk(2, dim=2)
        x, z = select(real, x).transpose(1, 2), z.transpose(1, 2)
        x, conv_state = causal_conv1d(
            x, weight, self.conv1d.bias, activation="silu", initial_state=conv_state, **borders
        )
        x = select(real, x.transpose(1, 2))
        r, B, C = self.x_proj(x).split([self.dt_rank, self.d_state, self.d_state], dim=2)
        delta, delta_bias = self._project_step(r)
        y, ssm_state = selective_scan(
            x.transpose(1, 2),
            delta.transpose(1, 2),
            self.decay_rates(),
            B.transpose(1, 2),
            C.transpose(1, 2),
            self.D,
            z,
            delta_bias,
            delta_softplus=True,
            initial_state=ssm_state,
            **borders,
        )
        out = select(real, zero_padding(self.out_proj(y.transpose(1, 2)), cu_seqlens))
        return out, (conv_state, ssm_state)

    def step(self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mixes one more token of each row.

        Args:
            hidden_states: (batch, 1, d_model).
            conv_state: (batch, d_inner, d_conv): the last d_conv inputs of the convolution, oldest first.
            ssm_state: (batch, d_inner, d_state).

        Returns:
            out: (batch, 1, d_model).
            conv_state, ssm_state: the states behind the token. Where a gradient is needed (grad mode on, and a
                parameter, the input or a state requires one) they are new tensors, the given ones stay as they are,
                and back-propagation through time works by chaining steps; otherwise the given ones, written in place.

        Raises:
            ValueError: hidden_states is not one token a row.
        """
        if hidden_states.dim() != 3 or hidden_states.shape[1:] != (1, self.d_model):
            raise ValueError(
                f"Mamba: step takes one token a row, hidden_states of shape (batch, 1, d_model = {self.d_model}), "
                f"got {tuple(hidden_states.shape)}"
            )
        x, z = self.in_proj(hidden_states.squeeze(1)).chunk(2, dim=1)
        functional = torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in (x, conv_state, ssm_state, *self.parameters())
        )
        conv = (self.conv1d.weight.squeeze(1), self.conv1d.bias)
        if functional:
            x, conv_state = conv1d_step(x, conv_state, *conv, activation="silu")
        else:
            x = conv1d_step_(x, conv_state, *conv, activation="silu")
        r, B, C = self.x_proj(x).split([self.dt_rank, self.d_state, self.d_state], dim=1)
        dt, dt_bias = self._project_step(r)
        scan = (x, dt, self.decay_rates(), B, C, self.D, z, dt_bias)
        if functional:
            y, ssm_state = selective_state_update(ssm_state, *scan, dt_softplus=True)
        else:
            y = selective_state_update_(ssm_state, *scan, dt_softplus=True)
        return self.out_proj(y).unsqueeze(1), conv_state, ssm_state

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int | None = None, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """Zero states (conv_state, ssm_state) for `step`, as upstream; their size does not depend on max_seqlen."""
        dtype = self.conv1d.weight.dtype if dtype is None else dtype
        cache = MambaCache(1, batch_size, self.d_inner, self.d_state, self.d_conv, dtype, self.conv1d.weight.device)
        return cache.conv_states[0], cache.ssm_states[0]

    def _states(self, inference_params, batch: int, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """This layer's states in the cache; upstream's InferenceParams starts empty and gets them here."""
        if isinstance(inference_params, MambaCache):
            inference_params.check_batch("Mamba", batch)
        if self.layer_idx is None:
            raise ValueError("Mamba: inference_params needs a layer with a layer_idx, got layer_idx None")
        states = inference_params.key_value_memory_dict
        if self.layer_idx not in states:
            states[self.layer_idx] = self.allocate_inference_cache(batch, dtype=hidden_states.dtype)
        conv_state, ssm_state = states[self.layer_idx]
        if conv_state.shape[0] != batch:
            raise ValueError(f"Mamba: the cache holds batch {conv_state.shape[0]}, got {batch}; allocate another one")
        return conv_state, ssm_state

    def extra_repr(self) -> str:
        names = ("d_model", "d_state", "d_conv", "d_inner", "dt_rank")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)
