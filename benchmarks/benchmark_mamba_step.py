"""Decoding: the fused step of whole models against the time of reading the weights once, and against peers.

mamba-130m's shape (24 layers, d_model 768, dstate 16, vocabulary 50,280) in float32 and bfloat16, and a small model
(3 layers, d_model 128). Peers: transformers' Mamba (eager) with the same weights, where it is installed, and our own
model with its operators called one by one.
"""

import mmap
import time

import torch

from mamba_ops import mamba_step_
from mamba_ops._memory import prefer_huge_pages
from mamba_ops.models import MambaConfig, MambaLM

from . import peers
from .harness import call_overhead, error_of


def read_bandwidth(threads, huge_pages, megabytes=512):
    """Bytes a second of a sum over float32 numbers that no cache holds, in ordinary pages or in pages of 2 MiB."""
    memory = mmap.mmap(
        -1, megabytes * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )  # fresh, whatever the heap was told before
    data = torch.frombuffer(memory, dtype=torch.float32)
    if huge_pages:
        prefer_huge_pages(data)
    data.fill_(1)
    torch.set_num_threads(threads)
    best = float("inf")
    for _ in range(7):
        start = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - start)
    return 4 * data.numel() / best


def decoder(model, ids):
    """One more token for every row, from a warm cache, again and again."""
    cache = model.allocate_inference_cache(ids.shape[0])
    model(ids[:, :-1], inference_params=cache)
    return lambda: model(ids[:, -1:], inference_params=cache)[:, -1]


def one_model(bench, config, dtype, batch, threads, read_rates):
    torch.manual_seed(0)
    model = MambaLM(config, dtype=dtype).eval()
    ids = torch.randint(config.vocab_size, (batch, 5))
    exact = MambaLM(config, dtype=torch.float64).eval()
    exact.load_state_dict(model.state_dict())
    expected = exact(ids)[:, -1]
    del exact
    candidates = {"mamba_ops": decoder(model, ids)}
    missing = []
    other = peers.transformers_model(model, missing)
    for text in missing:
        bench.remark(text)
    if other is not None:
        candidates["transformers, eager"] = peers.transformers_decoder(other, ids)
    bytes_read = sum(p.numel() * p.element_size() for p in model.parameters())
    ordinary_ms, huge_ms = (1e3 * bytes_read / rate for rate in read_rates)
    job = f"decode · {config.n_layer} layers, d_model {config.d_model}, batch {batch}, {str(dtype)[6:]}"
    rows = bench.compare(
        "mamba_step", job, candidates, lambda name, result: error_of([result], [expected]), threads=threads
    )
    for name, row in rows.items():
        row.notes["tokens/s"] = round(1e3 * batch / row.min_ms, 1)
        row.notes["x reading the weights once"] = round(row.min_ms / ordinary_ms, 2)
        row.notes["in pages of 2 MiB"] = round(row.min_ms / huge_ms, 2)
        if name != "mamba_ops":
            row.notes["mamba_ops is faster by"] = round(row.min_ms / rows["mamba_ops"].min_ms, 2)
    bench.show(rows)


def small_stack(bench, threads):
    """The fused operator alone, without embedding and head."""
    torch.manual_seed(0)
    model = MambaLM(MambaConfig(d_model=128, n_layer=3, vocab_size=256)).eval()
    ids = torch.randint(256, (1, 5))
    cache = model.allocate_inference_cache(1)
    model(ids, inference_params=cache)
    model(ids[:, -1:], inference_params=cache)
    weights = model._decoder.packed(model.backbone)
    hidden, mixer = torch.randn(1, 128), model.backbone.layers[0].mixer
    residual = hidden.double()
    exact = MambaLM(model.config, dtype=torch.float64).eval()
    exact.load_state_dict(model.state_dict())
    states = cache.conv_states.double(), cache.ssm_states.double()
    for index, layer in enumerate(exact.backbone.layers):
        normed = layer.norm(residual)[:, None]
        residual = residual + layer.mixer.step(normed, states[0][index], states[1][index])[0][:, 0]

    def verify(name, result):
        return None if name == "torch.add" else error_of([result], [residual])

    def step():
        sizes = dict(d_conv=mixer.d_conv, dt_rank=mixer.dt_rank)
        return mamba_step_(hidden, cache.conv_states, cache.ssm_states, *weights, **sizes)

    candidates = {"torch.add": lambda: torch.add(hidden, hidden), "mamba_ops": step}
    call_overhead(bench, "mamba_step", "stack · 3 layers, d_model 128, batch 1", candidates, verify, threads=threads)


@torch.no_grad()
def run(bench, limits):
    large = MambaConfig(d_model=768, n_layer=24, vocab_size=50280)
    for threads in bench.threads:
        small_stack(bench, threads)
        read_rates = [read_bandwidth(threads, huge) for huge in (False, True)]
        gigabytes = " and ".join(f"{rate / 1e9:.1f}" for rate in read_rates)
        bench.remark(f"{threads} threads read {gigabytes} GB/s, in ordinary pages and in pages of 2 MiB")
        for dtype in (torch.float32, torch.bfloat16):
            for batch in (1, 16):
                one_model(bench, large, dtype, batch, threads, read_rates)
