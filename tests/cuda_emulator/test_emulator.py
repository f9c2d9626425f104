"""The emulator finds every kind of mistake that it claims to find: one kernel with a seeded bug each."""

import re

import pytest
import torch

import cuda_emulator

pytestmark = cuda_emulator.needs_emulator

# What a run of each bug must show: in the fast build, in the checked build.
BUGS = {
    "none": (None, None),
    "missing_barrier": ("NaN|wrong", "race: |uninitialised shared"),
    "read_past_end": ("wrong", "out-of-bounds 4-byte read of global memory, 0 bytes past the end of data"),
    "uninitialised_shared": ("NaN", "read of uninitialised shared memory"),
    "wrong_mask": ("diverged warp operation", "diverged warp operation"),
    "divergent_barrier": (
        "deadlock|diverged __syncthreads",
        "deadlock|diverged __syncthreads|race: |uninitialised",
    ),
    "early_exit": ("names an exited lane", "names an exited lane"),
    "write_past_end": (None, "out-of-bounds 4-byte write of global memory, 0 bytes past the end of out"),
    "shared_overflow": ("wrote past the end of its shared memory", "out-of-bounds 4-byte write in shared memory"),
    "cross_block_race": ("depends on the order|NaN", "race: write of out"),
    "float_atomics": ("depends on the order", "depends on the order"),
    "missing_syncwarp": ("depends on the order|wrong", "race: "),
    "wrong_offset": ("wrong", "wrong"),
    "misaligned": (None, "misaligned"),
    "int_overflow": (None, "signed integer overflow in [*]"),
    "write_to_input": ("wrong", "write to read-only data"),
}


def symptoms(controls, which):
    """Everything that runs under several schedules show, as one text."""
    n, blocks = 1000, 8
    storage = torch.randn(n + 64, generator=torch.Generator().manual_seed(3))
    expected = torch.nn.functional.pad(storage[:n].double(), (0, 24)).view(blocks, 128).sum(1)
    adds_up = list(BUGS)[which] == "float_atomics"  # onto what out holds
    found, outs = [], []
    for seed in range(6):
        given = storage.clone()[:n]
        out = torch.full((blocks + 8,), 0.0 if adds_up else float("nan"))[:blocks]
        controls.set_seed(seed)
        controls.forget_tensors()
        controls.add_tensor(given.data_ptr(), given.nbytes, 4, True, False, "data")
        controls.add_tensor(out.data_ptr(), out.nbytes, 4, adds_up, True, "out")
        try:
            controls.run_seeded_bug(which, given.data_ptr(), out.data_ptr(), n)
        except RuntimeError as error:
            found.append(str(error))
        outs.append(out.clone())
    controls.set_seed(0)
    controls.forget_tensors()
    if not all(torch.equal(outs[0].nan_to_num(7), out.nan_to_num(7)) for out in outs):
        found.append("the result depends on the order")
    if any(out.isnan().any() for out in outs):
        found.append("NaN in the result")
    elif not torch.allclose(outs[0].double(), expected, atol=1e-4):
        found.append("wrong result")
    return found


@pytest.mark.parametrize("mode", cuda_emulator.MODES)
@pytest.mark.parametrize("bug", BUGS)
def test_seeded_bugs(mode, bug):
    controls = cuda_emulator.load(mode)
    assert controls.is_checked() == (mode == "checked")
    found = symptoms(controls, list(BUGS).index(bug))
    expected = BUGS[bug][mode == "checked"]
    if expected is None:
        assert found == []
    else:
        assert any(re.search(expected, text) for text in found), found
        if mode == "checked" and ":" in expected:
            assert any("bugs.cu:" in text for text in found), "names the line"


def test_statistics_count_bytes_once():
    controls = cuda_emulator.load("checked")
    controls.take_statistics()
    data, out = torch.ones(1024), torch.empty(8)
    controls.add_tensor(data.data_ptr(), data.nbytes, 4, True, False, "data")
    controls.add_tensor(out.data_ptr(), out.nbytes, 4, False, True, "out")
    controls.run_seeded_bug(0, data.data_ptr(), out.data_ptr(), 1024)
    controls.forget_tensors()
    found = controls.take_statistics()
    assert torch.equal(out, torch.full((8,), 128.0))
    assert (found["bytes_read"], found["bytes_written"]) == (4096, 32)
    assert (found["launches"], found["blocks"], found["barriers"]) == (1, 8, 8)
