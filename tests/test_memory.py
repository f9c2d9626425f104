"""Large pages: what Linux was asked for, as /proc/self/smaps tells it."""

import re
from pathlib import Path

import pytest
import torch

import mamba_ops
from mamba_ops._memory import HUGE_PAGE, prefer_huge_pages

pytestmark = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no large pages"
)


def advised(tensor):
    """Bytes of the whole large pages within the tensor, and how many of them were asked for."""
    begin = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    end = (tensor.data_ptr() + tensor.nbytes) // HUGE_PAGE * HUGE_PAGE
    inside, wanted = 0, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            first, last = (int(number, 16) for number in found.groups())
            inside = max(0, min(last, end) - max(first, begin))
        elif line.startswith("VmFlags:") and "hg" in line.split():
            wanted += inside
    return end - begin, wanted


def test_pages_of_tensors():
    tensor = torch.arange(4 * HUGE_PAGE // 4, dtype=torch.float32)
    kept, address = tensor.clone(), tensor.data_ptr()
    prefer_huge_pages(tensor[5:])
    whole, wanted = advised(tensor[5:])
    assert whole >= 2 * HUGE_PAGE and wanted == whole
    assert tensor.data_ptr() == address and torch.equal(tensor, kept)


@pytest.mark.parametrize("tensor", [torch.ones(0), torch.ones(5), torch.ones(3, 4).t(), torch.ones(2, device="meta")])
def test_tensors_without_a_whole_page_are_left_alone(tensor):
    prefer_huge_pages(tensor)


def test_pages_of_large_outputs():
    x = torch.ones(4, 4 * HUGE_PAGE // 16)
    out = mamba_ops.rms_norm(x)[0]
    whole, wanted = advised(out)
    assert whole >= 2 * HUGE_PAGE and wanted == whole
    assert torch.allclose(out, x)
