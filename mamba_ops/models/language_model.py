"""A language model of Mamba blocks: embedding, pre-norm residual blocks, final norm, tied head."""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from ..layers import Mamba, MambaCache, RMSNorm
from ..layers.packing import check_packing, zero_padding
from .checkpoint import load_model, save_model
from .config import MambaConfig
from .decode import FusedDecoder
from .generation import generate


class MambaBlock(nn.Module):
    """residual = residual + hidden;  hidden = mixer(norm(residual)); returns (hidden, residual), the sum being left to
    the next norm.

    hidden (batch, seqlen, d_model); residual the same, or None in front of the first block.
    """

    def __init__(self, config: MambaConfig, layer_idx: int, device=None, dtype=None) -> None:
        super().__init__()
        self.residual_in_fp32 = config.residual_in_fp32
        self.norm = RMSNorm(config.d_model, config.norm_epsilon, device=device, dtype=dtype)
        self.mixer = Mamba(config.d_model, **config.mixer_arguments, layer_idx=layer_idx, device=device, dtype=dtype)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inference_params=None,
    ) -> tuple[Tensor, Tensor]:
        hidden, residual = self.norm(hidden, residual, prenorm=True, residual_in_fp32=self.residual_in_fp32)
        hidden = self.mixer(hidden, inference_params, seq_idx, cu_seqlens, attention_mask)
        return self.dropout(hidden), residual


class MambaBackbone(nn.Module):
    """Token numbers (batch, seqlen) -> normalised hidden states (batch, seqlen, d_model)."""

    def __init__(self, config: MambaConfig, activation_checkpointing: bool = False, device=None, dtype=None) -> None:
        super().__init__()
        self.activation_checkpointing = activation_checkpointing
        self.embedding = nn.Embedding(config.padded_vocab_size, config.d_model, device=device, dtype=dtype)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(MambaBlock(config, i, device, dtype) for i in range(config.n_layer))
        self.norm_f = RMSNorm(config.d_model, config.norm_epsilon, device=device, dtype=dtype)

    def forward(
        self,
        input_ids: Tensor,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inference_params=None,
    ) -> Tensor:
        hidden, residual = zero_padding(self.dropout(self.embedding(input_ids)), cu_seqlens), None
        borders = (seq_idx, cu_seqlens, attention_mask)
        for layer in self.layers:
            if self.activation_checkpointing and torch.is_grad_enabled() and inference_params is None:
                hidden, residual = torch.utils.checkpoint.checkpoint(
                    layer, hidden, residual, *borders, use_reentrant=False
                )
            else:
                hidden, residual = layer(hidden, residual, *borders, inference_params)
        return zero_padding(self.norm_f(hidden, residual), cu_seqlens)


class MambaLM(nn.Module):
    r"""Mamba language model: logits of the next token at every position; state_dict names are upstream's.

    .. math::
        x_0 = \mathrm{embedding}(\mathrm{ids}), \quad x_{i+1} = x_i + \mathrm{mixer}_i(\mathrm{norm}_i(x_i)), \quad
        \mathrm{logits} = W_{head}\,\mathrm{norm}_f(x_n)

    Args:
        config: sizes and options.
        activation_checkpointing: keep only the blocks' inputs in training and run each block again in the backward
            pass; the numbers are the same. `model.backbone.activation_checkpointing` switches it later.
        device, dtype: of the parameters; A_log, D and the step-size biases are never narrower than float32 in a fresh
            model.

    Fresh values: embedding normal with standard deviation initializer_range, biases of linear layers 0, out_proj as any
    linear layer but divided by sqrt(n_layer), the rest as layers.Mamba. The embedding has padded_vocab_size rows;
    logits have vocab_size columns.

    Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023.

    Gradients: for every parameter. Autocast and determinism: as layers.Mamba.

    Example:
        >>> import torch
        >>> from mamba_ops.models import MambaConfig, MambaLM
        >>> model = MambaLM(MambaConfig(d_model=16, n_layer=2, vocab_size=30))
        >>> ids = torch.randint(30, (2, 11))
        >>> model(ids).shape
        torch.Size([2, 11, 30])
        >>> model.loss(ids[:, :-1], ids[:, 1:]).backward()
    """

    def __init__(self, config: MambaConfig, activation_checkpointing: bool = False, device=None, dtype=None) -> None:
        super().__init__()
        self.config = config
        self._decoder = FusedDecoder()
        self.backbone = MambaBackbone(config, activation_checkpointing, device, dtype)
        self.lm_head = nn.Linear(config.d_model, config.padded_vocab_size, bias=False, device=device, dtype=dtype)
        self.tie_weights()
        self.reset_parameters()

    def tie_weights(self) -> None:
        """Lets a head that is a plain linear layer use the embedding's weight, if the configuration says so."""
        if self.config.tie_embeddings and type(self.lm_head) is nn.Linear:
            self.lm_head.weight = self.backbone.embedding.weight

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fresh values for every parameter, also after construction on the meta device and `to_empty`."""
        if not self.config.tie_embeddings:
            self.lm_head.reset_parameters()
        nn.init.normal_(self.backbone.embedding.weight, std=self.config.initializer_range)
        for layer in self.backbone.layers:
            layer.norm.reset_parameters()
            layer.mixer.reset_parameters()
            layer.mixer.out_proj.weight /= len(self.backbone.layers) ** 0.5
        self.backbone.norm_f.reset_parameters()

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.tie_weights()  # a move between device types makes a new parameter of each of the two names
        return self

    def load_state_dict(self, state_dict, strict: bool = True, assign: bool = False):
        """As nn.Module; lm_head.weight may be absent when it is tied."""
        embedding = state_dict.get("backbone.embedding.weight")
        if self.config.tie_embeddings and "lm_head.weight" not in state_dict and embedding is not None:
            state_dict = {**state_dict, "lm_head.weight": embedding}
        result = super().load_state_dict(state_dict, strict, assign)
        self.tie_weights()
        return result

    def forward(
        self,
        input_ids: Tensor,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inference_params=None,
        num_last_tokens: int = 0,
    ) -> Tensor:
        """Predicts token t + 1 at every position t.

        Args:
            input_ids: (batch, seqlen), integers below padded_vocab_size.
            seq_idx, cu_seqlens: borders of packed sequences, as in layers.Mamba; behind the last sequence of cu_seqlens
                the logits are 0 (the token numbers there are not used, but must be valid).
            attention_mask: (batch, seqlen), 0 for padding on the left, as in layers.Mamba.
            inference_params: the cache of allocate_inference_cache: the model continues from its states, and leaves
                those behind the last token there.
            num_last_tokens: logits of this many last positions only; 0 means all.

        Returns:
            Logits (batch, seqlen or num_last_tokens, vocab_size).

        Raises:
            ValueError: input_ids are not integers of that shape, the borders do not fit, or the cache is of another
                batch size.
        """
        if input_ids.dim() != 2 or input_ids.is_floating_point():
            raise ValueError(
                f"MambaLM: input_ids must be integers of shape (batch, seqlen), "
                f"got {input_ids.dtype} of shape {tuple(input_ids.shape)}"
            )
        check_packing("MambaLM", input_ids, seq_idx, cu_seqlens)
        plain = seq_idx is None and cu_seqlens is None and attention_mask is None
        if isinstance(inference_params, MambaCache):
            inference_params.check_batch("MambaLM", input_ids.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1)
        if plain and inference_params is not None and self._decoder.fits(self, inference_params, input_ids):
            logits = self._decoder.logits(self, inference_params, input_ids)
        else:
            hidden = self.backbone(input_ids, seq_idx, cu_seqlens, attention_mask, inference_params)
            logits = zero_padding(self.lm_head(hidden[:, -num_last_tokens:]), None if num_last_tokens else cu_seqlens)
        if isinstance(inference_params, MambaCache):
            inference_params.advance(input_ids.shape[1])
        return logits[..., : self.config.vocab_size]

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int | None = None, dtype: torch.dtype | None = None
    ) -> MambaCache:
        """A fresh cache for `batch_size` rows (or packed sequences); its size does not depend on max_seqlen."""
        weight, sizes = self.backbone.embedding.weight, {"d_inner": 0, "d_state": 0, "d_conv": 0}
        if len(self.backbone.layers):
            sizes = {name: getattr(self.backbone.layers[0].mixer, name) for name in sizes}
        dtype = weight.dtype if dtype is None else dtype
        return MambaCache(len(self.backbone.layers), batch_size, **sizes, dtype=dtype, device=weight.device)

    def generate(self, input_ids: Tensor | Sequence[Tensor | Sequence[int]], max_new_tokens: int, **options) -> Tensor:
        """Continues every prompt.

        Args:
            input_ids: (batch, seqlen) token numbers, or a list of prompts of different lengths, which are padded on the
                left.
            max_new_tokens: stop after this many.
            attention_mask: (batch, seqlen), 0 for padding on the left, with a tensor of prompts.
            temperature: 0 (the default) takes the most probable token; otherwise logits are divided by it and a token
                is drawn.
            top_k, top_p, min_p: restrict what is drawn from; see generation.Sampling. Defaults 0, 1, 0: no restriction.
            repetition_penalty: above 1 makes tokens already in the row less probable. Default 1.
            stop_tokens: a row that produced one of these is finished; `pad_token` (default 0) follows.
            seed: of the draws; equal seeds give equal text. Default: torch's global generator.
            callback: called with every new (batch,) row of tokens, for streaming; returning True ends the generation.

        Returns:
            (batch, seqlen + new) token numbers, prompts included.

        Raises:
            ValueError: an argument is out of range; the text names it.

        Example:
            >>> import torch
            >>> from mamba_ops.models import MambaConfig, MambaLM
            >>> model = MambaLM(MambaConfig(d_model=16, n_layer=2, vocab_size=30)).eval()
            >>> model.generate([[1, 2, 3], [4]], max_new_tokens=5).shape
            torch.Size([2, 8])
        """
        return generate(self, input_ids, max_new_tokens, **options)

    def loss(
        self,
        input_ids: Tensor,
        targets: Tensor,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        ignore_index: int = -100,
    ) -> Tensor:
        """Mean cross-entropy, in nats, of the next token.

        Args:
            input_ids, seq_idx, cu_seqlens: as in forward.
            targets: (batch, seqlen), targets[:, t] being the token after input_ids[:, t].
            ignore_index: positions with this target do not count.

        Returns:
            The mean, in float32 (float64 for a float64 model).

        Raises:
            ValueError: targets have another shape than input_ids, or as in forward.
        """
        if targets.shape != input_ids.shape:
            raise ValueError(f"MambaLM: targets must have shape {tuple(input_ids.shape)}, got {tuple(targets.shape)}")
        logits = self(input_ids, seq_idx, cu_seqlens).flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, targets.flatten(), ignore_index=ignore_index)

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes config.json and model.safetensors (tied weights once) into the directory, which is made if need be."""
        save_model(self, directory)

    @classmethod
    def from_pretrained(cls, directory: str | Path, device=None, dtype=None) -> "MambaLM":
        """The model that save_pretrained wrote, in evaluation mode; dtype None keeps the stored one."""
        return load_model(cls, MambaConfig, directory, device, dtype)
