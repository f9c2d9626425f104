"""The kernels under many schedules, with every memory access checked, bytes counted, and mistakes put into them."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch

import cuda_emulator
from cuda_emulator import cases

pytestmark = cuda_emulator.needs_emulator


@pytest.fixture
def controls(request):
    """The controls of a build, with the schedule put back afterwards."""
    found = cuda_emulator.load(getattr(request, "param", "fast"))
    yield found
    found.set_seed(0)
    found.take_statistics()


@pytest.mark.parametrize("case", cases.ALL)
def test_results_do_not_depend_on_the_schedule(controls, case):
    """B96: blocks and threads in any order give the same bits."""
    expected = cases.results("mamba_emulated", case)
    for seed in (1, 2, 3):
        controls.set_seed(seed)
        assert all(map(torch.equal, cases.results("mamba_emulated", case), expected)), f"seed {seed}"


@pytest.mark.parametrize("controls", ["checked"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", cases.ALL)
def test_every_memory_access_is_allowed(controls, case, dtype):
    """In bounds, aligned, initialised, ordered; and the results are right."""
    for seed in (0, 1):
        controls.set_seed(seed)
        cases.check("mamba_checked", case, dtype)
    assert controls.take_statistics()["atomics"] == 0


# ---- bytes: what the kernels' head comments promise ----

B, D, L, N, W = 2, 64, 128, 16, 4


def sequence(*shape):
    return torch.randn(*shape)


def rms_norm_bytes(ops):
    rows, dim = 128, 1024
    x, weight = sequence(rows, dim), sequence(dim)
    numbers, strips = rows * dim, rows // 16
    forward = partial(ops.rms_norm_fwd, x, weight, None, None, None, 1e-5, None, True, False)
    yield forward, 4 * numbers, 4 * numbers
    backward = partial(ops.rms_norm_bwd, x.clone(), None, x, weight, None, None, None, forward()[2], None, True)
    yield backward, 4 * (2 * numbers + strips * dim), 4 * (numbers + strips * dim)


def causal_conv1d_bytes(ops):
    length, weight = 512, sequence(D, W)
    numbers = B * D * length
    for x, sums in ((sequence(B, D, length), 1), (sequence(B, length, D).transpose(1, 2), length // 128)):
        options = (x, weight, None, None, None, None, "silu")
        yield partial(ops.causal_conv1d_fwd, *options), 4 * numbers, 4 * numbers
        partial_sums = B * D * sums * (W + 1)
        backward = partial(ops.causal_conv1d_bwd, x.clone(), None, *options)
        yield backward, 4 * (2 * numbers + partial_sums), 4 * (numbers + partial_sums)


def general_conv1d_bytes(ops):
    """With sequence borders every number has a thread; the backward keeps dp, the gradient before the activation."""
    batch, dim, length, width = 1, 64, 256, 6
    x, ids = sequence(batch, dim, length), torch.zeros(batch, length, dtype=torch.int32)
    options = (x, sequence(dim, width), None, None, ids, None, "silu")
    numbers = batch * dim * length
    yield partial(ops.causal_conv1d_fwd, *options), 4 * numbers, 4 * numbers
    yield partial(ops.causal_conv1d_bwd, x.clone(), None, *options), 4 * 5 * numbers, 4 * 2 * numbers


def step_bytes(ops):
    batch, dim = 32, 96
    x, state, weight = sequence(batch, dim), sequence(batch, dim, W), sequence(dim, W)
    forward = partial(ops.conv1d_step_fwd, x, state, weight, None, "none")
    yield forward, 4 * (batch * dim * W + dim * W), 4 * batch * dim * (1 + W)  # the oldest sample drops out unread
    backward = partial(ops.conv1d_step_bwd, x.clone(), state.clone(), x, state, weight, None, "none")
    yield backward, 4 * batch * dim * (3 + 2 * W), 4 * batch * dim * (2 + W)
    seed = (x.clone(), state, weight, torch.empty_like(x), torch.zeros(dim, W), None)
    yield partial(ops.conv1d_step_bwd_, *seed), 4 * (batch * dim * (1 + W) + dim * W), 4 * (batch * dim + dim * W)


def state_update_bytes(ops):
    batch, dim = 32, 96
    blocks, strips, channels = dim // 32, batch // 8, batch * dim
    state, x, A, row = sequence(batch, dim, N), sequence(batch, dim), -torch.rand(dim, N), sequence(batch, N)
    inputs = (state, x, x.clone(), A, row, row.clone(), None, None, None, False)
    update = partial(ops.selective_state_update_fwd, *inputs)
    yield update, 4 * (channels * (2 + N) + dim * N + 2 * batch * N), 4 * channels * (1 + N)
    sums = strips * dim * (N + 2) + 2 * batch * blocks * N
    backward = partial(ops.selective_state_update_bwd, x.clone(), state.clone(), *inputs)
    read = channels * (3 + 2 * N) + dim * N + 2 * batch * N + sums
    yield backward, 4 * read, 4 * (channels * (2 + N) + sums + dim * N + 2 * batch * N)


def mamba_step_bytes(ops):
    """Weights once, states read and written; and what goes from launch to launch."""
    model, inner, states, rank = 48, 96, 16, 3
    projected = rank + 2 * states
    for batch in (4, 17):
        sizes = dict(batch=batch, n_layer=1, d_model=model, d_inner=inner, d_state=states, dt_rank=rank)
        inputs = cases.example("mamba_step", **sizes)
        weights = inner * (3 * model + projected + rank)
        parameters = inner * (5 + W + states) + 2 * model
        held = batch * inner * (W - 1 + states)  # the oldest sample drops out unread
        between = batch * (4 * model + 2 * projected + 5 * inner)
        read = weights + parameters + held + between + (batch * 3 * inner if batch > 16 else 0)
        written = batch * (3 * model + projected + 3 * inner + inner * (W + states))
        call = partial(cases.fused_layers, torch.ops.mamba_checked, inputs)
        yield call, 4 * read, 4 * (written + (batch * 3 * inner if batch > 16 else 0))
    for batch in (4, 17):
        hidden, weight = sequence(batch, model), sequence(500, model)
        call = partial(ops.mamba_step_logits, hidden, torch.ones(model), weight, 1e-5)
        yield call, 4 * (500 * model + 3 * batch * model), 4 * batch * (2 * model + 500)


def selective_scan_bytes(ops):
    u, A, projection = sequence(B, D, L), -torch.rand(D, N), sequence(B, N, L)
    inputs = (u, torch.rand(B, D, L), A, projection, projection.clone(), None, u.clone(), None, None, None, None, False)
    tokens, states, projections = B * D * L, B * D * N, B * L * N
    read = 3 * tokens + 2 * projections + D * N
    yield partial(ops.selective_scan_fwd, *inputs, False), 4 * read, 4 * (tokens + states)
    forward = partial(ops.selective_scan_fwd, *inputs, True)
    yield forward, 4 * read, 4 * (tokens + tokens * N // 8 + states)
    backward = partial(ops.selective_scan_bwd, u.clone(), None, *inputs, forward()[2])
    partial_sums = 2 * projections * (D // 32) + states
    read += tokens + tokens * N // 8 + partial_sums
    yield backward, 4 * read, 4 * (3 * tokens + partial_sums + 2 * projections + D * N)


def linear_recurrence_bytes(ops):
    """Everything once; the backward also reads every 64th state, and every thread of a slice the one that enters it."""
    length = 512
    numbers, kept = B * D * length, B * D * length // 64
    for sizes, dim, slices in (((B, length, D), 1, 8), ((B, D, length), 2, 32)):
        x, gates, rest = sequence(*sizes), torch.rand(sizes), (None, None, None, dim, False)
        forward = partial(ops.linear_recurrence_fwd, x, gates, *rest, True, True)
        yield forward, 4 * 2 * numbers, 4 * (numbers + kept + B * D)
        backward = partial(ops.linear_recurrence_bwd, x.clone(), None, x, gates, *rest, forward()[2])
        entering = B * D * (length // (8 * slices) - 1) * slices
        yield backward, 4 * (3 * numbers + entering), 4 * 2 * numbers


def threshold_backtest_bytes(ops):
    rows, threads, thresholds = 8192, 512, torch.tensor([0.1], dtype=torch.float64)
    probs, now = torch.rand(rows), sequence(rows)
    for return_pnl in (False, True):
        call = partial(ops.threshold_backtest, probs, now, now.clone(), thresholds, 0.25, 0, return_pnl)
        yield call, 4 * 3 * rows + 8 * threads + 2 * 56, 4 * rows * return_pnl + 2 * 56 + 64


BUDGETS = [rms_norm_bytes, causal_conv1d_bytes, general_conv1d_bytes, step_bytes, state_update_bytes]
BUDGETS += [selective_scan_bytes, mamba_step_bytes, linear_recurrence_bytes, threshold_backtest_bytes]


@pytest.mark.parametrize("controls", ["checked"], indirect=True)
@pytest.mark.parametrize("calls", BUDGETS)
def test_bytes_moved(controls, calls):
    """Within 10 % of the operands' sizes and the promised partial sums."""
    for call, read, written in calls(torch.ops.mamba_checked):
        controls.take_statistics()
        call()
        found = controls.take_statistics()
        assert found["bytes_read"] == pytest.approx(read, rel=0.1)
        assert found["bytes_written"] == pytest.approx(written, rel=0.1)


# ---- mutants: the tests above notice real mistakes ----

MUTANTS = {
    "barrier removed": (
        "mamba_step.cu",
        "reduce.cuh",
        "shared.warp[threadIdx.x / 32] = value;\n  __syncthreads();\n  T sum = 0;\n  for (int w = 0; w < warps",
        "shared.warp[threadIdx.x / 32] = value;\n  T sum = 0;\n  for (int w = 0; w < warps",
        "mamba_step_long",
    ),
    "shared memory reused too early": (
        "rms_norm.cu",
        "reduce.cuh",
        "  __syncthreads();  // readers of the previous call are done\n",
        "",
        "rms_norm_block",
    ),
    "wrong shuffle offset": (
        "mamba_step.cu",
        "reduce.cuh",
        "int offset = lanes / 2; offset > 0;",
        "int offset = lanes / 4; offset > 0;",
        "mamba_step_long",
    ),
    "wrong stride": (
        "rms_norm.cu",
        "rms_norm.cu",
        "static_cast<const S*>(view.data) + row_at + column * view.column",
        "static_cast<const S*>(view.data) + row_at + column",
        "rms_norm_strided",
    ),
    "tail guard removed": (
        "causal_conv1d.cu",
        "causal_conv1d.cuh",
        "load_items(now, row, step, 0, p.seqlen - t);",
        "load_items(now, row, step, 0, conv_times);",
        "causal_conv1d",
    ),
    "tile overwritten while it is read": (
        "selective_scan.cu",
        "selective_scan.cu",
        "store_items(carry + saved + n, h, 1, 0, p.dstate - n);\n      __syncthreads();\n",
        "store_items(carry + saved + n, h, 1, 0, p.dstate - n);\n",
        "selective_scan_splits",
    ),
    "missing carry": (
        "selective_scan_bwd.cu",
        "selective_scan_bwd.cu",
        "load_items(held.g, s.entering + saved + n, 1, 0, plan.splits > 1 ? p.dstate - n : 0);",
        "load_items(held.g, s.entering + saved + n, 1, 0, 0);",
        "selective_scan_splits",
    ),
    "one lane too few": (
        "selective_state_update.cu",
        "selective_state_update.cu",
        "if (threadIdx.x % 32 < lanes) shared.value",
        "if (threadIdx.x % 32 < lanes - 1) shared.value",
        "selective_state_update",
    ),
    "links overwritten while they are read": (
        "linear_recurrence.cu",
        "linear_recurrence.cuh",
        "    shared.at[from][place] = link;\n    __syncthreads();\n",
        "    shared.at[from][place] = link;\n",
        "linear_recurrence",
    ),
    "rows behind the last": (
        "threshold_backtest.cu",
        "threshold_backtest.cu",
        "bad_row || i >= count ?",
        "bad_row ?",
        "threshold_backtest",
    ),
}

SCRIPT = """
import sys
import cuda_emulator
from cuda_emulator import cases
library, case = sys.argv[1:]
controls = cuda_emulator.load("checked", library)
for seed in range(3):
    controls.set_seed(seed)
    cases.check("mamba_checked", case)
"""


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_noticed(tmp_path, mutant):
    source, changed, old, new, case = MUTANTS[mutant]
    text = (cuda_emulator.CSRC / "cuda" / changed).read_text()
    assert text.count(old) == 1, "the kernel has changed; change the mutant too"
    library = cuda_emulator.build_mutant("checked", source, changed, text.replace(old, new), tmp_path)
    environment = {"PYTHONPATH": f"{cuda_emulator.ROOT}:{cuda_emulator.FOLDER.parent}"}
    command = [sys.executable, "-c", SCRIPT, str(library), case]
    result = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert result.returncode == 1, "the mistake went unnoticed"
    assert "cuda_emulator: " in result.stderr or "relative error" in result.stderr, result.stderr
