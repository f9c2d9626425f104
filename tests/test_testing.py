"""The testers are tested: a wrong value, gradient, shape or fake must be found, and the message says what is wrong."""

import pytest
import torch

from mamba_ops.testing import (
    assert_close,
    check_compile,
    check_gradcheck,
    check_op,
    check_values,
    expanded,
    relative_error,
    run_with_gradients,
    sliced,
    stepped,
    strided_variants,
    tolerance,
    transposed,
)

NAN, INF = float("nan"), float("inf")


def test_relative_error_is_relative_to_the_largest_expected_value():
    expected = torch.tensor([1.0, -10.0, 0.0], dtype=torch.float64)
    assert relative_error(expected + torch.tensor([0.0, 0.0, 0.5]), expected) == 0.05
    assert relative_error(expected, expected) == 0
    assert relative_error(torch.zeros(3), torch.zeros(3)) == 0
    assert relative_error(torch.tensor([1e-30]), torch.zeros(1)) == INF
    assert relative_error(torch.zeros(0, 2), torch.zeros(0, 2)) == 0
    with pytest.raises(ValueError, match="shapes differ"):
        relative_error(torch.zeros(2), torch.zeros(3))


@pytest.mark.parametrize(
    "actual, expected, error",
    [
        ([1.0, NAN], [1.0, NAN], 0),
        ([1.0, NAN], [1.0, 2.0], INF),
        ([1.0, 2.0], [1.0, NAN], INF),
        ([1.0, INF], [1.0, INF], 0),
        ([1.0, -INF], [1.0, INF], INF),
        ([1.0, INF], [1.0, 3.0], INF),
        ([1.5, NAN], [1.0, NAN], 0.5),
    ],
)
def test_relative_error_of_special_values(actual, expected, error):
    assert relative_error(torch.tensor(actual), torch.tensor(expected)) == error


def test_assert_close_message_names_the_worst_value():
    expected = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    actual = expected.clone()
    actual[1, 0] = 3.5
    actual[0, 0] = 1.1
    with pytest.raises(AssertionError) as failure:
        assert_close(actual, expected, what="gradient of weight")
    text = str(failure.value)
    assert "gradient of weight: relative error 0.125 exceeds 2e-05" in text
    assert "worst at [1, 0]: got 3.5, expected 3" in text and "2 of 4 values differ" in text


def test_assert_close_uses_the_tolerance_of_the_dtype():
    one = torch.ones(1, dtype=torch.float64)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        assert_close(one * (1 + 0.9 * tolerance(dtype)), one, dtype)
        with pytest.raises(AssertionError):
            assert_close(one * (1 + 1.1 * tolerance(dtype)), one, dtype)
    assert_close(one + 9e-5, one, torch.float32, gradient=True)
    with pytest.raises(AssertionError, match="shape"):
        assert_close(torch.ones(2), torch.ones(1, 2))
    with pytest.raises(AssertionError, match="nan"):
        assert_close(torch.tensor([1.0, NAN]), torch.ones(2))
    with pytest.raises(ValueError, match=r"no tolerance for torch\.int64"):
        tolerance(torch.int64)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return ctx.factor * ctx.saved_tensors[0] * gradient, None


def square(x):
    return x * x


def test_check_values_finds_wrong_values_and_gradients():
    inputs = {"x": torch.randn(3, 4)}
    check_values(square, inputs, square)
    with pytest.raises(AssertionError, match="output 0: relative error"):
        check_values(lambda x: x * x * 1.001, inputs, square)
    with pytest.raises(AssertionError, match="gradient of x: relative error"):
        check_values(lambda x: Square.apply(x, 2.01), inputs, square)
    check_values(lambda x: Square.apply(x, 2.01), inputs, square, gradients=False)
    with pytest.raises(AssertionError, match="2 outputs, expected 1"):
        check_values(lambda x: (x * x, x), inputs, square)
    with pytest.raises(AssertionError, match="gradient of x"):
        check_values(lambda x: (x * x).detach(), inputs, square)


def test_check_gradcheck_finds_a_wrong_gradient():
    inputs = {"x": torch.randn(3, dtype=torch.float64)}
    check_gradcheck(lambda x: Square.apply(x, 2), inputs)
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        check_gradcheck(lambda x: Square.apply(x, 2.01), inputs)
    with pytest.raises(ValueError, match=r"gradcheck needs float64, x is torch\.float32"):
        check_gradcheck(square, {"x": torch.randn(3)})


def test_run_with_gradients_gives_zeros_for_unused_inputs():
    inputs = {"x": torch.ones(2), "unused": torch.ones(3)}
    _, upstream, gradients = run_with_gradients(lambda x, unused: 3 * x, inputs)
    assert torch.equal(gradients["x"], 3 * upstream[0]) and torch.equal(gradients["unused"], torch.zeros(3))
    assert not inputs["x"].requires_grad


def test_check_compile_finds_a_graph_break():
    def breaks(x):
        torch._dynamo.graph_break()
        return x * x

    check_compile(square, {"x": torch.randn(3)})
    with pytest.raises(Exception, match="graph_break"):
        check_compile(breaks, {"x": torch.randn(3)})


def test_check_op_covers_a_custom_operator():
    with torch.library._scoped_library("mamba_testing_example", "DEF") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: 2 * x, "CPU")
        torch.library.register_fake("mamba_testing_example::double", torch.empty_like, lib=library)
        torch.library.register_autograd(
            "mamba_testing_example::double", lambda ctx, gradient: 2 * gradient, lib=library
        )
        op = torch.ops.mamba_testing_example.double
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            check_op(op, {"x": torch.randn(3, 4, dtype=dtype)}, lambda x: x + x, op=op.default)
        with pytest.raises(AssertionError, match="output 0"):
            check_op(op, {"x": torch.randn(3)}, square, op=op.default)


def test_check_op_finds_a_wrong_fake():
    with torch.library._scoped_library("mamba_testing_example", "DEF") as library:
        library.define("flip(Tensor x) -> Tensor")
        library.impl("flip", lambda x: 1 * x.t(), "CPU")
        torch.library.register_fake("mamba_testing_example::flip", torch.empty_like, lib=library)
        op = torch.ops.mamba_testing_example.flip
        with pytest.raises(Exception, match=r"(?i)mismatch|shape|size"):
            check_op(
                op, {"x": torch.randn(3, 4)}, lambda x: x.t().clone(), op=op.default, gradients=False, compile=False
            )


def test_strided_helpers_keep_the_values_and_change_the_strides():
    x = torch.randn(2, 3, 4)
    assert transposed(x).stride() == (12, 1, 3) and torch.equal(transposed(x), x)
    assert sliced(x).stride() == (27, 9, 1) and sliced(x).storage_offset() == 3 and torch.equal(sliced(x), x)
    assert stepped(x, axis=1).stride() == (24, 8, 1) and torch.equal(stepped(x, axis=1), x)
    assert expanded(x, axis=1).stride() == (12, 0, 1) and torch.equal(expanded(x, axis=1)[:, 2], x[:, 0])
    assert torch.isnan(sliced(x)._base).any() and sliced(torch.arange(3))._base.min() < 0
    found = dict(strided_variants(x))
    assert len(found) == 1 + 3 * 2 + 2
    for name, variant in found.items():
        assert torch.equal(variant, x), name
        assert variant.is_leaf and not variant.requires_grad
    assert found["stepped0"].stride() == (24, 4, 1) and found["sliced1"].stride() == (32, 4, 1)
