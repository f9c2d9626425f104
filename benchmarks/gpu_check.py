"""One run on a machine with a GPU: gradients against the CPU, CUDA graphs, the speed of every kernel.

    python -m benchmarks.gpu_check             results go to benchmarks/results/gpu.json and gpu.md
    python -m benchmarks.gpu_check --dry-run   the same code on the CPU and on tiny shapes; nothing is written

scripts/gpu_check.sh builds, runs the operators' tests and compute-sanitizer around it.
"""

import argparse
import datetime
import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F

import mamba_ops
from mamba_ops import layers, models, testing
from mamba_ops._library import build_information

from . import peers
from .harness import RESULTS

GRADIENT_TOLERANCE = 1e-4


class Run:
    def __init__(self, dry):
        self.dry = dry
        self.device = "cpu" if dry else "cuda"
        self.rows, self.remarks = [], []
        self.copy_rate = None  # bytes a second, read and written

    def size(self, real, tiny):
        return tiny if self.dry else real

    def remark(self, text):
        print(text, flush=True)
        self.remarks.append(text)

    def milliseconds(self, function, turns=7):
        """The least and the median time of a call: several of them in one CUDA graph, so that only the GPU is timed."""
        for _ in range(1 if self.dry else 2):  # the first call may compile
            start = time.perf_counter()
            function()
            if not self.dry:
                torch.cuda.synchronize()
            once = 1e3 * (time.perf_counter() - start)
        if self.dry:
            return once, once
        calls = 10 if once < 5 else 1
        replay = captured(lambda: [function() for _ in range(calls)])
        times = []
        for _ in range(turns):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / calls)
        return min(times), statistics.median(times)

    def measure(self, op, job, candidates, nbytes):
        """Rows for {name: function}; a candidate that fails gets a remark. `nbytes`: what the operator must move."""
        found = {}
        for name, function in candidates.items():
            try:
                with torch.no_grad():
                    found[name] = self.milliseconds(function)
            except Exception as problem:  # a peer may fail in any way; the others still count
                first = (str(problem).splitlines() or [""])[0][:160]
                self.remark(f"{op}, {job}: {name} left out: {type(problem).__name__}: {first}")
        for name, (least, median) in found.items():
            rate = nbytes / least * 1e3
            row = dict(op=op, job=job, candidate=name, min_ms=round(least, 5), median_ms=round(median, 5))
            row.update(gb_s=round(rate / 1e9, 1), percent_of_copy=round(100 * rate / self.copy_rate, 1))
            if name != "mamba_ops" and "mamba_ops" in found:
                row["mamba_ops_is_faster_by"] = round(least / found["mamba_ops"][0], 2)
            self.rows.append(row)
            print(row, flush=True)


def captured(function):
    """A function that replays `function`'s work as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


# ---- right ----


def block_gradients(run):
    """A Mamba block's output and nine parameter gradients in float32, here and on the CPU in float64."""
    torch.manual_seed(0)
    block = layers.Mamba(run.size(256, 16))
    hidden = torch.randn(2, run.size(512, 20), block.d_model)
    found = {}
    for device, dtype in ((run.device, torch.float32), ("cpu", torch.float64)):
        copy = layers.Mamba(block.d_model).to(device=device, dtype=dtype)
        copy.load_state_dict(block.state_dict())
        out = copy(hidden.to(device, dtype))
        out.square().sum().backward()
        found[dtype] = {"out": out, **{name: parameter.grad for name, parameter in copy.named_parameters()}}
    assert len(found[torch.float64]) == 10
    errors = {n: testing.relative_error(found[torch.float32][n], want) for n, want in found[torch.float64].items()}
    for name, error in errors.items():
        run.remark(f"relative error against the CPU, {name}: {error:.1e}")
    worst = max(errors.values())
    assert worst <= GRADIENT_TOLERANCE, f"the gradients differ by {worst:.1e}"


def graphs(run):
    """A training step and a decode step, captured and replayed, give the numbers of the plain calls."""
    if run.dry:
        run.remark("CUDA graphs: left out, there is no GPU")
        return
    torch.manual_seed(0)
    config = models.MambaConfig(d_model=128, n_layer=2, vocab_size=256)
    model = models.MambaLM(config).cuda()
    ids = torch.randint(256, (4, 64), device="cuda")

    def train():
        model.zero_grad(set_to_none=False)
        F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()

    train()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    replay = captured(train)
    replay()
    for name, parameter in model.named_parameters():
        testing.assert_close(parameter.grad, expected[name], rtol=1e-5, what=f"training step in a graph, {name}")
    run.remark("training step under CUDA graph capture: equal")
    for batch in (1, 4, 32):
        decode_graph(model, batch)
        run.remark(f"decode step under CUDA graph capture, batch {batch}: equal")


def decode_graph(model, batch):
    layer = model.backbone.layers[0].mixer
    with torch.no_grad():
        ids = torch.randint(256, (batch, 5), device="cuda")
        cache = model.allocate_inference_cache(batch)
        model(ids, inference_params=cache)
        weights = model._decoder.packed(model.backbone)
        hidden = torch.randn(batch, model.config.d_model, device="cuda")
        states = cache.conv_states, cache.ssm_states

        def decode(states):
            return mamba_ops.mamba_step_(hidden, *states, *weights, d_conv=layer.d_conv, dt_rank=layer.dt_rank)

        start = [state.clone() for state in states]
        plain = [state.clone() for state in states]
        expected = decode(plain)
        result = []
        replay = captured(lambda: result.append(decode(states)))
        for state, value in zip(states, start):
            state.copy_(value)
        replay()
        testing.assert_close(result[-1], expected, rtol=1e-6, what="decode step in a graph")
        for state, want in zip(states, plain):
            testing.assert_close(state, want, rtol=1e-6, what="state after a decode step in a graph")


# ---- fast ----


def tensors(run, *shape, dtype=torch.bfloat16):
    return torch.randn(shape, device=run.device).to(dtype)


def copies(run):
    source = tensors(run, run.size(2**28, 2**12))
    target = torch.empty_like(source)
    least, _ = run.milliseconds(lambda: target.copy_(source))
    run.copy_rate = 2 * source.nbytes / least * 1e3
    run.remark(f"copy: {run.copy_rate / 1e9:.0f} GB/s (read + written)")


def norms(run):
    rows, dim = run.size((16384, 2048), (8, 32))
    x, weight = tensors(run, rows, dim), tensors(run, dim, dtype=torch.float32)
    ops = torch.ops.mamba
    arguments = (x, weight, None, None, None)
    job = f"{rows} x {dim}, bfloat16"
    others = {f"PyTorch, {name}": lambda f=f: f(x, weight.to(x.dtype)) for name, f in peers.norms().items()}
    ours = {"mamba_ops": lambda: ops.rms_norm_fwd(*arguments, 1e-5, None, True, False)}
    run.measure("rms_norm", f"forward, {job}", {**ours, **others, **foreign_norm(run, x, weight)}, 2 * x.nbytes)
    rms = ops.rms_norm_fwd(*arguments, 1e-5, None, True, False)[2]
    ours = {"mamba_ops": lambda: ops.rms_norm_bwd(x, None, *arguments, rms, None, True)}
    run.measure("rms_norm", f"backward, {job}", ours, 3 * x.nbytes)


def convolutions(run):
    batch, dim, seqlen = run.size((8, 1536, 2048), (1, 4, 16))
    weight, bias = tensors(run, dim, 4, dtype=torch.float32), tensors(run, dim, dtype=torch.float32)
    ops = torch.ops.mamba
    for layout in ("channel-first", "channel-last"):
        x = tensors(run, batch, seqlen, dim).transpose(1, 2)
        x = x.contiguous() if layout == "channel-first" else x
        half = weight.to(x.dtype), bias.to(x.dtype)
        others = {f"PyTorch, {name}": lambda f=f, x=x, h=half: f(x, *h) for name, f in peers.convolutions().items()}
        foreign = peers.optional("causal_conv1d", run.remarks)
        if foreign is not None:
            others["causal_conv1d"] = lambda x=x, h=half, f=foreign: f.causal_conv1d_fn(x, *h, activation="silu")
        arguments = (x, weight, bias, None, None, None, "silu")
        job = f"{batch} x {dim} x {seqlen}, width 4, bfloat16, {layout}"
        ours = {"mamba_ops": lambda a=arguments: ops.causal_conv1d_fwd(*a)}
        run.measure("causal_conv1d", f"forward, {job}", {**ours, **others}, 2 * x.nbytes)
        ours = {"mamba_ops": lambda a=arguments, x=x: ops.causal_conv1d_bwd(x, None, *a)}
        run.measure("causal_conv1d", f"backward, {job}", ours, 3 * x.nbytes)


def scans(run):
    ops = torch.ops.mamba
    for batch, dim, dstate, seqlen in run.size([(8, 1536, 16, 2048), (1, 1536, 16, 8192)], [(1, 4, 4, 16)]):
        u, delta, z = (tensors(run, batch, seqlen, dim).transpose(1, 2) for _ in range(3))
        B, C = (tensors(run, batch, seqlen, dstate).transpose(1, 2) for _ in range(2))
        A = -torch.arange(1.0, dstate + 1, device=run.device).repeat(dim, 1)
        D, bias = torch.ones(dim, device=run.device), torch.full((dim,), -4.0, device=run.device)
        arguments = (u, delta, A, B, C, D, z, bias)
        job = f"{batch} x {dim} x {seqlen}, dstate {dstate}, bfloat16"
        candidates = {"mamba_ops": lambda a=arguments: ops.selective_scan_fwd(*a, None, None, None, True, False)}
        if batch == 8 or run.dry:
            wide = tuple(t.float() for t in arguments)
            candidates["PyTorch, time loop, float32"] = lambda wide=wide: peers.time_loop(*wide)
            candidates["PyTorch, 8-step chunks compiled, float32"] = lambda wide=wide: peers.chunks_compiled(*wide)
        foreign = peers.optional("mamba_ssm.ops.selective_scan_interface", run.remarks)
        if foreign is not None:
            rows = tuple(t.contiguous() for t in arguments)
            candidates["mamba_ssm"] = lambda r=rows, f=foreign: f.selective_scan_fn(*r, delta_softplus=True)
        run.measure("selective_scan", f"forward, {job}", candidates, 4 * u.nbytes + B.nbytes + C.nbytes)
        saved = ops.selective_scan_fwd(*arguments, None, None, None, True, True)[2]
        backward = (u, None, *arguments, None, None, None, True, saved)
        ours = {"mamba_ops": lambda backward=backward: ops.selective_scan_bwd(*backward)}
        run.measure("selective_scan", f"backward, {job}", ours, 7 * u.nbytes + saved.nbytes + 2 * (B.nbytes + C.nbytes))


def steps(run):
    ops = torch.ops.mamba
    for batch in run.size([1, 64, 512], [2]):
        dim, dstate = run.size(1536, 8), 16
        state = tensors(run, batch, dim, dstate, dtype=torch.float32)
        x, dt, z = (tensors(run, batch, dim) for _ in range(3))
        A, B, C = -torch.rand(dim, dstate, device=run.device), tensors(run, batch, dstate), tensors(run, batch, dstate)
        arguments = (state, x, dt, A, B, C, None, z, None, True)
        candidates = {"mamba_ops": lambda a=arguments: ops.selective_state_update_(*a)}
        foreign = peers.optional("mamba_ssm.ops.triton.selective_state_update", run.remarks)
        if foreign is not None:
            update = foreign.selective_state_update
            given = (state, x, dt, A, B, C)
            candidates["mamba_ssm"] = lambda g=given, z=z, u=update: u(*g, z=z, dt_softplus=True)
        run.measure("selective_state_update", f"batch {batch}, dim {dim}", candidates, 2 * state.nbytes + 4 * x.nbytes)
        cache, weight = tensors(run, batch, dim, 4), tensors(run, dim, 4)
        ours = {"mamba_ops": lambda a=(x, cache, weight): ops.conv1d_step_(*a, None, "silu")}
        run.measure("conv1d_step", f"batch {batch}, dim {dim}", ours, 2 * x.nbytes + 2 * cache.nbytes)


def decoding(run):
    """The fused step of mamba-130m's layers; 16 and 17 rows stand on both sides of the change to cuBLAS."""
    config = models.MambaConfig(d_model=run.size(768, 16), n_layer=run.size(24, 2), vocab_size=64)
    for dtype in (torch.bfloat16, torch.float32):
        model = models.MambaLM(config, device=run.device, dtype=dtype).eval()
        mixer = model.backbone.layers[0].mixer
        weights = models.decode.FusedDecoder().packed(model.backbone)
        for batch in run.size([1, 8, 16, 17, 64, 256], [1, 17]):
            cache = model.allocate_inference_cache(batch)
            states, hidden = (cache.conv_states, cache.ssm_states), tensors(run, batch, config.d_model)
            sizes = dict(d_conv=mixer.d_conv, dt_rank=mixer.dt_rank)
            ours = {"mamba_ops": lambda h=hidden, s=states, w=weights, k=sizes: mamba_ops.mamba_step_(h, *s, *w, **k)}
            nbytes = sum(w.nbytes for w in weights) + 2 * sum(state.nbytes for state in states)
            run.measure("mamba_step", f"{config.n_layer} layers, batch {batch}, {str(dtype)[6:]}", ours, nbytes)


def recurrences(run):
    ops = torch.ops.mamba
    for dtype in (torch.bfloat16, torch.float32):
        x, logits = (tensors(run, *run.size((64, 4096, 256), (2, 16, 4)), dtype=dtype) for _ in range(2))
        job = f"{' x '.join(map(str, x.shape))}, {str(dtype)[6:]}"
        run.measure(
            "gated_scan", f"forward, {job}", {"mamba_ops": lambda a=(x, logits): ops.gated_scan(*a)}, 3 * x.nbytes
        )
    count = run.size(10_000_000, 1000)
    probs, now = torch.rand(count, device=run.device), torch.rand(count, device=run.device) + 100
    later, thresholds = now + torch.randn_like(now), torch.tensor([0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25])
    ours = {"mamba_ops": lambda: mamba_ops.threshold_backtest(probs, now, later, thresholds, 0.25, nan_policy="skip")}
    run.measure("threshold_backtest", f"{count} rows, 7 thresholds", ours, 3 * probs.nbytes)


def foreign_norm(run, x, weight):
    foreign = peers.optional("mamba_ssm.ops.triton.layer_norm", run.remarks)
    return {} if foreign is None else {"mamba_ssm": lambda: foreign.rms_norm_fn(x, weight.to(x.dtype), None, eps=1e-5)}


# ---- results ----


def markdown(record):
    head = f"{record['date']}, {record['gpu']}, torch {record['torch']}, {record['cuda']}, {record['seconds']:.0f} s"
    lines = ["# On a GPU", "", f"`{record['command']}`, {head}", ""]
    lines += [f"- {text}" for text in record["remarks"]]
    columns = list(dict.fromkeys(key for row in record["rows"] for key in row))
    lines += ["", "| " + " | ".join(key.replace("_", " ") for key in columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(row.get(key, "")) for key in columns) + " |" for row in record["rows"]]
    return "\n".join(lines) + "\n"


PARTS = [block_gradients, graphs, copies, norms, convolutions, scans, recurrences, steps, decoding]


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__.split("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU, nothing is written")
    dry = parser.parse_args().dry_run
    if not dry and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --dry-run rehearses on the CPU")
    start, failed, run = time.perf_counter(), [], Run(dry)
    for part in PARTS:
        print(f"\n== {part.__name__}", flush=True)
        try:
            part(run)
        except Exception as problem:  # the parts after it still say something
            failed.append(part.__name__)
            run.remark(f"FAILED: {part.__name__}: {type(problem).__name__}: {problem}")
    record = dict(
        date=datetime.date.today().isoformat(),
        gpu="none" if dry else torch.cuda.get_device_name(),
        torch=torch.__version__,
        cuda=build_information().get("cuda", "unknown"),
        revision=build_information().get("git_revision"),
        command=" ".join(["python -m benchmarks.gpu_check", *sys.argv[1:]]),
        seconds=round(time.perf_counter() - start, 1),
        remarks=list(dict.fromkeys(run.remarks)),
        rows=run.rows,
    )
    text = markdown(record)
    if not dry:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "gpu.json").write_text(json.dumps(record, indent=1) + "\n")
        (RESULTS / "gpu.md").write_text(text)
    print(f"\n{len(run.rows)} rows in {record['seconds']} s; failed: {', '.join(failed) or 'nothing'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
