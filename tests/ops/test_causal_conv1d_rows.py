"""causal_conv1d: batches of short rows that lie behind one another in memory, and outputs that pass by the caches."""

import checks
import pytest
import torch

from mamba_ops import causal_conv1d, testing
from mamba_ops.reference.causal_conv1d import example_inputs


def out(**inputs):
    return causal_conv1d(**inputs)[0]


# Without states, vectors go over the borders of rows; 257 steps are too many for that, 3 x 5 numbers no whole vectors.
SHORT_SCRIPT = """
from itertools import product
import torch
from mamba_ops import causal_conv1d, testing
from mamba_ops.reference.causal_conv1d import example_inputs, causal_conv1d as reference

def check(**options):
    inputs = example_inputs(initial_state=False, **options)
    out, expected = (lambda f=f, **inputs: f(**inputs)[0] for f in (causal_conv1d, reference))
    testing.check_values(out, inputs, expected)
    assert torch.equal(causal_conv1d(**inputs)[1], reference(**inputs)[1])

dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
for dtype, seqlen in product(dtypes, (1, 2, 3, 4, 5, 8, 9, 16, 17, 24, 31, 100)):
    for width, activation in ((2, "silu"), (3, None), (4, "silu")):
        check(dtype=dtype, batch=21, dim=32, seqlen=seqlen, width=width, activation=activation, bias=width != 3)
sizes = ((16, 640, 16), (37, 96, 50), (16, 32, 256), (16, 32, 257), (16, 5, 3), (70, 3, 32))
for dtype, (batch, dim, seqlen) in product((torch.float32, torch.bfloat16), sizes):
    check(dtype=dtype, batch=batch, dim=dim, seqlen=seqlen)
"""


@pytest.mark.parametrize("level", checks.LEVELS)
def test_short_rows(level):
    checks.run_at_level(level, SHORT_SCRIPT)


@pytest.mark.parametrize("seqlen", [5, 16, 40])
def test_short_rows_do_not_see_one_another(seqlen):
    """NaN and infinities stay in their row, and in their channel's sums."""
    inputs = example_inputs(batch=17, dim=48, seqlen=seqlen, initial_state=False)
    expected = testing.run_with_gradients(out, inputs)
    x, grad = inputs["x"].clone(), expected[1][0].clone()
    x[3, 5], x[4, 20], grad[9, 30], grad[10, 31] = (float(value) for value in ("nan", "inf", "nan", "-inf"))
    found = testing.run_with_gradients(out, {**inputs, "x": x}, upstream=[grad])
    spoiled = torch.zeros(17, 48, dtype=torch.bool)
    spoiled[3, 5] = spoiled[4, 20] = True
    assert torch.equal(found[0][0][~spoiled], expected[0][0][~spoiled])
    spoiled[9, 30] = spoiled[10, 31] = True
    assert torch.equal(found[2]["x"][~spoiled], expected[2]["x"][~spoiled])
    channels = ~spoiled.any(0)
    for name in ("weight", "bias"):
        assert torch.equal(found[2][name][channels], expected[2][name][channels])
        assert not torch.isfinite(found[2][name][[5, 30, 31]]).any()


@pytest.mark.parametrize("sizes", [(70, 512, 16), (200, 48, 24)])
def test_bitwise_repeatable_for_any_number_of_threads(sizes):
    batch, dim, seqlen = sizes
    inputs = example_inputs(batch=batch, dim=dim, seqlen=seqlen, initial_state=False)
    checks.bitwise_repeatable(out, inputs)


def test_slices_of_wider_batches():
    """Rows are neighbours, items of the batch are not; a slice of channels, a batch of one row seen many times."""
    wide = torch.randn(18, 96, 16)
    inputs = example_inputs(batch=18, dim=32, seqlen=16, initial_state=False)
    for x in (wide[:, 7:39], wide[:, 64:], wide[:1, 7:39].expand(18, -1, -1)):
        found = testing.run_with_gradients(out, {**inputs, "x": x})
        plain = {**inputs, "x": x.contiguous()}
        expected = testing.run_with_gradients(out, plain, upstream=found[1])
        assert checks.equal_runs(found, expected)


LARGE_SCRIPT = """
import torch
from mamba_ops import causal_conv1d, testing
from mamba_ops.reference.causal_conv1d import example_inputs
for batch, dim, seqlen in ((1024, 160, 16), (80, 1040, 32), (80, 1000, 32)):
    for dtype, rows in ((torch.float32, batch), (torch.bfloat16, 2 * batch)):
        sizes, quarter = dict(batch=rows, dim=dim, seqlen=seqlen), rows // 4
        for width, layout in ((2, lambda t: t), (2, testing.transposed), (4, lambda t: t), (4, testing.transposed)):
            states = width == 2
            inputs = example_inputs(
                dtype=dtype, weight_dtype=torch.float32, width=width, initial_state=states, **sizes
            )
            inputs["x"] = layout(inputs["x"])
            assert inputs["x"].nbytes >= 2**23 > inputs["x"][:quarter].nbytes
            names = ("x", "initial_state") if states else ("x",)
            function = causal_conv1d if states else lambda **inputs: causal_conv1d(**inputs)[0]
            outputs, upstream, gradients = testing.run_with_gradients(function, inputs)
            sums = {name: torch.zeros_like(inputs[name], dtype=torch.float64) for name in ("weight", "bias")}
            for start in range(0, rows, quarter):
                part = slice(start, start + quarter)
                some, grads = {**inputs, **{name: inputs[name][part] for name in names}}, [g[part] for g in upstream]
                few, _, wanted = testing.run_with_gradients(function, some, upstream=grads)
                assert all(torch.equal(whole[part], want) for whole, want in zip(outputs, few))
                assert all(torch.equal(gradients[name][part], wanted[name]) for name in names)
                exact = {name: t.double() if torch.is_tensor(t) else t for name, t in some.items()}
                _, _, exact = testing.run_with_gradients(function, exact, sums, [g.double() for g in grads])
                for name in sums:
                    sums[name] += exact[name]
            for name in sums:
                testing.assert_close(gradients[name], sums[name], what=name)
"""


@pytest.mark.parametrize("level", checks.LEVELS)
def test_large_outputs(level):
    """From 8 MB on, outputs in whole cache lines pass by the caches: the same bits as in small pieces."""
    checks.run_at_level(level, LARGE_SCRIPT)
