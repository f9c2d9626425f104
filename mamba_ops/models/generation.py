"""Text generation: prefill once, then one token at a time from the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from logits.

    Args:
        temperature: 0 takes the most probable token; otherwise logits are divided by it.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the most probable tokens whose probabilities first reach this sum; 1 keeps all.
        min_p: keep tokens at least this fraction as probable as the most probable one; 0 keeps all.
        repetition_penalty: logits of tokens already in the row are divided by it where positive, multiplied where
            negative; 1 changes nothing.

    Raises:
        ValueError: a value is out of range; the text names it.

    Example:
        >>> import torch
        >>> from mamba_ops.models.generation import Sampling
        >>> Sampling(top_k=1, temperature=1.0).choose(torch.tensor([[0.0, 2.0, 1.0]]))
        tensor([1])
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        ranges = {
            "temperature": (self.temperature >= 0, "at least 0"),
            "top_k": (self.top_k >= 0, "at least 0"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "min_p": (0 <= self.min_p <= 1, "in [0, 1]"),
            "repetition_penalty": (self.repetition_penalty > 0, "positive"),
        }
        for name, (fits, text) in ranges.items():
            if not fits:
                raise ValueError(f"generate: {name} must be {text}, got {getattr(self, name)}")

    def choose(self, logits: Tensor, seen: Tensor | None = None, generator: torch.Generator | None = None) -> Tensor:
        """logits (batch, vocabulary), seen (batch, vocabulary) bool -> tokens (batch,)."""
        logits = logits.float()
        if self.repetition_penalty != 1 and seen is not None:
            penalised = torch.where(logits > 0, logits / self.repetition_penalty, logits * self.repetition_penalty)
            logits = torch.where(seen, penalised, logits)
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = self._filter(logits / self.temperature)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)

    def _filter(self, logits: Tensor) -> Tensor:
        nothing = float("-inf")
        if 0 < self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, nothing)
        if self.min_p > 0:
            probabilities = logits.softmax(-1)
            logits = logits.masked_fill(probabilities < self.min_p * probabilities.amax(-1, keepdim=True), nothing)
        if self.top_p < 1:
            ordered, order = logits.sort(descending=True)
            probabilities = ordered.softmax(-1)
            before = probabilities.cumsum(-1) - probabilities  # the first token always stays
            keep = torch.zeros_like(before, dtype=torch.bool).scatter(1, order, before < self.top_p)
            logits = logits.masked_fill(~keep, nothing)
        return logits


def pad_prompts(prompts: Sequence[Tensor | Sequence[int]], pad_token: int) -> tuple[Tensor, Tensor]:
    """Prompts of different lengths as (input_ids, attention_mask), padded on the left."""
    rows = [torch.as_tensor(prompt, dtype=torch.long) for prompt in prompts]
    for row in rows:
        if row.dim() != 1 or not len(row):
            raise ValueError(f"generate: every prompt must be a non-empty row of tokens, got shape {tuple(row.shape)}")
    length = max(map(len, rows))
    input_ids = torch.full((len(rows), length), pad_token)
    attention_mask = torch.zeros(len(rows), length, dtype=torch.bool)
    for b, row in enumerate(rows):
        input_ids[b, length - len(row) :] = row
        attention_mask[b, length - len(row) :] = True
    return input_ids, attention_mask


@torch.no_grad()
def generate(
    model: torch.nn.Module,
    input_ids: Tensor | Sequence[Tensor | Sequence[int]],
    max_new_tokens: int,
    *,
    attention_mask: Tensor | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop_tokens: int | Sequence[int] = (),
    pad_token: int = 0,
    seed: int | None = None,
    callback: Callable[[Tensor], object] | None = None,
) -> Tensor:
    """Continue every prompt; `MambaLM.generate` documents the arguments."""
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    if max_new_tokens < 0:
        raise ValueError(f"generate: max_new_tokens must be at least 0, got {max_new_tokens}")
    if not isinstance(input_ids, Tensor):
        if attention_mask is not None:
            raise ValueError("generate: attention_mask goes with a tensor of prompts; a list is padded here")
        input_ids, attention_mask = pad_prompts(input_ids, pad_token)
    device = next(model.parameters()).device
    input_ids = input_ids.to(device)
    if input_ids.dim() != 2 or not input_ids.shape[1]:
        raise ValueError(f"generate: prompts must have shape (batch, seqlen >= 1), got {tuple(input_ids.shape)}")
    stops = torch.as_tensor([stop_tokens] if isinstance(stop_tokens, int) else list(stop_tokens), device=device)
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)

    batch = input_ids.shape[0]
    cache = model.allocate_inference_cache(batch)
    logits = model(input_ids, inference_params=cache, attention_mask=attention_mask, num_last_tokens=1)
    seen = None
    if repetition_penalty != 1:
        seen = torch.zeros(batch, logits.shape[-1], dtype=torch.bool, device=device)
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(device)
        rows = torch.arange(batch, device=device)[:, None].expand_as(input_ids)
        seen[rows[real != 0], input_ids[real != 0]] = True
    finished = torch.zeros(batch, dtype=torch.bool, device=device)
    tokens: list[Tensor] = []
    while len(tokens) < max_new_tokens:
        token = sampling.choose(logits[:, -1], seen, generator)
        token = token.masked_fill(finished, pad_token)
        tokens.append(token)
        if seen is not None:
            seen[torch.arange(batch, device=device), token] = True
        finished = finished | torch.isin(token, stops)
        stopped = callback is not None and callback(token) is True
        if stopped or len(tokens) == max_new_tokens or (len(stops) and bool(finished.all())):
            break
        logits = model(token[:, None], inference_params=cache)
    return torch.cat([input_ids, *(token[:, None] for token in tokens)], dim=1)
