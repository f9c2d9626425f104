"""RMSNorm as a module."""

import copy

import pytest
import torch

from mamba_ops import reference
from mamba_ops.layers import RMSNorm
from mamba_ops.testing import assert_close

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_before_gate", [True, False])
@pytest.mark.parametrize("group_size", [None, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_agrees_with_reference(dtype, norm_before_gate, group_size, bias):
    norm = RMSNorm(12, 1e-4, group_size, norm_before_gate, bias, dtype=dtype)
    torch.nn.init.normal_(norm.weight)
    x, z, residual = (torch.randn(3, 5, 12, dtype=dtype) for _ in range(3))
    out, residual_out = norm(x, residual, z, prenorm=True)
    expected, expected_residual, _ = reference.rms_norm(
        x.double(),
        norm.weight.double(),
        norm.bias.double() if bias else None,
        z.double(),
        residual.double(),
        eps=1e-4,
        group_size=group_size,
        norm_before_gate=norm_before_gate,
    )
    assert out.dtype == residual_out.dtype == dtype
    assert_close(out, expected)
    assert_close(residual_out, expected_residual)
    assert torch.equal(norm(x, residual, z), out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_residual_dtype(dtype):
    norm = RMSNorm(8, dtype=dtype)
    x = torch.randn(2, 8, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    out, first = norm(x, prenorm=True)
    assert out.dtype == first.dtype == dtype and torch.equal(first, x)
    _, first = norm(x, prenorm=True, residual_in_fp32=True)
    assert first.dtype == wide and torch.equal(first, x.to(wide))
    out, second = norm(x, first, prenorm=True, residual_in_fp32=True)
    assert out.dtype == dtype and second.dtype == wide
    assert torch.equal(second, x.to(wide) + first)


def test_gradcheck():
    norm = RMSNorm(6, group_size=3, bias=True, dtype=torch.float64)
    x, residual, z = (torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradcheck(
        lambda x, r, z, *_: norm(x, r, z, prenorm=True), (x, residual, z, *norm.parameters())
    )


def test_names_values_and_copies():
    assert list(RMSNorm(4).state_dict()) == ["weight"]
    norm = RMSNorm(4, bias=True, device="meta")
    assert list(norm.state_dict()) == ["weight", "bias"]
    norm.to_empty(device="cpu")
    norm.reset_parameters()
    assert torch.equal(norm.weight, torch.ones(4)) and torch.equal(norm.bias, torch.zeros(4))
    x = torch.randn(3, 4)
    assert torch.equal(copy.deepcopy(norm)(x), norm(x))


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"hidden_size": 0}, "RMSNorm: hidden_size must be at least 1, got 0"),
        ({"eps": 0.0}, "RMSNorm: eps must be positive, got 0.0"),
        ({"group_size": 3}, "RMSNorm: group_size must divide hidden_size = 8, got 3"),
    ],
    ids=str,
)
def test_wrong_constructor_arguments(arguments, text):
    with pytest.raises(ValueError) as error:
        RMSNorm(**{"hidden_size": 8, **arguments})
    assert str(error.value) == text


def test_wrong_width():
    with pytest.raises(ValueError, match=r"RMSNorm: x must have shape \(\.\.\., 8\), got \(2, 7\)"):
        RMSNorm(8)(torch.zeros(2, 7))
