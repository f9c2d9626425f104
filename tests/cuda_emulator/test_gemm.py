"""Products by cuBLAS (csrc/cuda/gemm.cu): operands of any strides; the stand-in for cuBLAS reads what it is told to."""

from itertools import product

import pytest
import torch

import cuda_emulator
from mamba_ops import testing

pytestmark = cuda_emulator.needs_emulator

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # in the order of csrc/common/dtype.h


def multiply(a, b, c, add=False, mode="checked"):
    """c = a b, or c += a b, by the kernels of one build; every tensor has three axes."""
    controls = cuda_emulator.load(mode)
    for tensor, written in ((a, False), (b, False), (c, True)):
        reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        if tensor.numel():
            size, name = tensor.element_size(), str(tuple(tensor.shape))
            controls.add_tensor(tensor.data_ptr(), reach * size, size, not written or add, written, name)
    sizes = (a.shape[0], a.shape[1], a.shape[2], b.shape[2])
    try:
        controls.multiply(
            sizes, a.data_ptr(), a.stride(), b.data_ptr(), b.stride(), DTYPES.index(a.dtype), c.data_ptr(), c.stride(),
            DTYPES.index(c.dtype), add,
        )  # fmt: skip
    finally:
        controls.forget_tensors()


def check(a, b, c, add=False):
    expected = a.double() @ b.double() + (c.double() if add else 0)
    multiply(a, b, c, add)
    testing.assert_close(c, expected, a.dtype)


def layouts(tensor):
    yield from testing.strided_variants(tensor)
    yield "batch last", testing.transposed(testing.transposed(tensor, 0, 1), 0, 2)
    yield from ((f"expanded{axis}", testing.expanded(tensor, axis)) for axis in range(3))


def results(*shape):
    """Memory of every layout for a result, full of NaN."""
    for name, view in testing.strided_variants(torch.zeros(shape)):
        yield name, view.fill_(float("nan"))


SIZES = ((2, 3, 5, 4), (1, 1, 7, 3), (3, 4, 1, 1), (2, 1, 1, 6), (1, 5, 4, 1))


@pytest.mark.parametrize("batch, rows, inner, columns", SIZES)
def test_every_pair_of_operand_layouts(batch, rows, inner, columns):
    a, b = torch.randn(batch, rows, inner), torch.randn(batch, inner, columns)
    for (_, left), (_, right) in product(layouts(a), layouts(b)):
        check(left, right, torch.full((batch, rows, columns), float("nan")))


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("batch, rows, inner, columns", SIZES)
def test_every_layout_of_the_result(batch, rows, inner, columns, add):
    """The memory between a strided result's numbers stays as it is."""
    a, b = torch.randn(batch, rows, inner), torch.randn(batch, inner, columns)
    for (_, left), (_, right) in product(list(layouts(a))[::3], list(layouts(b))[::3]):
        for _, c in results(batch, rows, columns):
            if add:
                c.copy_(torch.randn(c.shape))
            check(left, right, c, add)
    wide = torch.full((batch, rows, 2 * columns + 1), 7.0)
    check(a, b, wide[..., 1::2], add)
    assert (wide[..., ::2] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype):
    """Half-precision operands, results in float32 or their own dtype."""
    a, b = torch.randn(2, 9, 33).to(dtype), testing.transposed(torch.randn(2, 33, 6).to(dtype))
    for result in {dtype, torch.float64 if dtype == torch.float64 else torch.float32}:
        check(a, b, torch.full((2, 9, 6), float("nan"), dtype=result))


@pytest.mark.parametrize("sizes", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 3, 4, 0), (2, 3, 0, 4)])
def test_zero_sizes(sizes):
    batch, rows, inner, columns = sizes
    c = torch.full((batch, rows, columns), float("nan"))
    multiply(torch.ones(batch, rows, inner), torch.ones(batch, inner, columns), c)
    assert not c.any()


# d_model 12, d_inner 24, dt_rank 3, d_state 5: a Mamba layer's projections, (out_features, in_features)
PROJECTIONS = {"in_proj": (48, 12), "x_proj": (13, 24), "dt_proj": (24, 3), "out_proj": (12, 24)}


@pytest.mark.parametrize("name", PROJECTIONS)
def test_gradients_of_the_projections_with_operands_that_are_not_contiguous(name):
    """y = x W^T, dx = dy W and dW = dy^T x, with activations as slices and transposes as a layer has them."""
    out_features, in_features = PROJECTIONS[name]
    tokens = 10
    weight = torch.randn(1, out_features, in_features)
    activations, gradients = torch.randn(1, tokens, in_features), torch.randn(1, tokens, out_features)
    for (_, x), (_, dy) in product(layouts(activations), layouts(gradients)):
        leaves = [tensor.double().requires_grad_() for tensor in (x, weight)]
        torch.einsum("bti,boi->bto", *leaves).backward(dy.double())
        check(x, weight.mT, torch.empty(1, tokens, out_features))
        for left, right, leaf in ((dy, weight, leaves[0]), (dy.mT, x, leaves[1])):
            found = torch.empty(leaf.shape)
            multiply(left, right, found)
            testing.assert_close(found, leaf.grad, gradient=True, what=name)
