"""Tools for testing operators, ours and those of others.

Tolerances by dtype, comparisons that say how wrong a result is, one check that covers an operator from its values to
torch.compile, and views of every memory layout.

    from mamba_ops.testing import check_op
    check_op(my_op, dict(x=x, weight=w), my_definition, op=torch.ops.mine.my_op.default)
"""

import torch

# Largest error allowed, relative to the largest expected value. Sums over a long sequence get the second table.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
GRADIENT_TOLERANCES = {**TOLERANCES, torch.float32: 1e-4}


def tolerance(dtype, *, gradient=False):
    """The relative tolerance of a result (or a gradient) of that dtype."""
    table = GRADIENT_TOLERANCES if gradient else TOLERANCES
    if dtype not in table:
        raise ValueError(f"no tolerance for {dtype}; known: {', '.join(map(str, table))}")
    return table[dtype]


def relative_error(actual, expected):
    """max |actual - expected| / max |expected|, in float64.

    NaN and infinities count as equal only where both have the same one.

    0 where both are entirely zero; infinite where only `expected` is, or where one has a NaN or an infinity that the
    other has not.
    """
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    if actual.shape != expected.shape:
        raise ValueError(f"shapes differ: {tuple(actual.shape)} and {tuple(expected.shape)}")
    special = ~(torch.isfinite(actual) & torch.isfinite(expected))
    same = (actual == expected) | (torch.isnan(actual) & torch.isnan(expected))
    if not bool(same[special].all()):
        return float("inf")
    difference = (actual - expected)[~special].abs()
    if difference.numel() == 0 or difference.max() == 0:
        return 0.0
    scale = expected[~special].abs().max()
    return float("inf") if scale == 0 else float(difference.max() / scale)


def assert_close(actual, expected, dtype=None, *, gradient=False, rtol=None, what="result"):
    """Fails, saying where and by how much, unless actual equals expected within rtol.

    rtol is relative to max |expected|; by default it is the tolerance of dtype, or of actual's dtype.
    """
    if tuple(actual.shape) != tuple(expected.shape):
        raise AssertionError(f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if rtol is None:
        rtol = tolerance(dtype or actual.dtype, gradient=gradient)
    error = relative_error(actual, expected)
    if error <= rtol:
        return
    got, want = actual.detach().cpu().double(), expected.detach().cpu().double()
    wrong = (got != want) & ~(torch.isnan(got) & torch.isnan(want))
    distance = torch.where(wrong, (got - want).abs().nan_to_num(nan=float("inf")), -1)
    at = torch.unravel_index(distance.argmax(), distance.shape)
    index = tuple(int(i) for i in at)
    raise AssertionError(
        f"{what}: relative error {error:.3g} exceeds {rtol:.3g} ({actual.dtype}); "
        f"worst at {list(index)}: got {float(got[index]):.9g}, expected {float(want[index]):.9g}; "
        f"{int(wrong.sum())} of {wrong.numel()} values differ"
    )


def _outputs(results):
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)


def _is_floating(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _to_float64(value):
    return value.detach().double() if _is_floating(value) else value


def run_with_gradients(function, inputs, differentiable=None, upstream=None, seed=20261130):
    """Calls function(**inputs); returns (outputs, upstream gradients, {name: gradient}).

    `differentiable` names the inputs to differentiate (all floating tensors by default). Upstream gradients are random
    unless given; an input the outputs do not depend on gets zeros.
    """
    names = (
        [name for name, value in inputs.items() if _is_floating(value)]
        if differentiable is None
        else list(differentiable)
    )
    leaves = {name: inputs[name].detach().requires_grad_() for name in names}
    outputs = _outputs(function(**{**inputs, **leaves}))
    if upstream is None:
        generator = torch.Generator().manual_seed(seed)
        upstream = [torch.randn(out.shape, generator=generator, dtype=torch.float64, device="cpu") for out in outputs]
        upstream = [gradient.to(out) for gradient, out in zip(upstream, outputs)]
    used = [(out, gradient.to(out)) for out, gradient in zip(outputs, upstream) if out.requires_grad]
    found = [None] * len(names)
    if used and names:
        found = torch.autograd.grad(
            [u[0] for u in used], list(leaves.values()), [u[1] for u in used], allow_unused=True
        )
    gradients = {name: torch.zeros_like(leaves[name]) if g is None else g for name, g in zip(names, found)}
    return outputs, upstream, gradients


def check_values(function, inputs, reference, *, differentiable=None, rtol=None, gradient_rtol=None, gradients=True):
    """Outputs and gradients (for random upstream gradients) of function(**inputs) against reference in float64.

    Every tensor is compared at the tolerance of its own dtype, unless rtol or gradient_rtol are given.
    Gradients must have their input's shape and dtype.
    """
    exact = {name: _to_float64(value) for name, value in inputs.items()}
    names = differentiable if gradients else ()
    outputs, upstream, found = run_with_gradients(function, inputs, names)
    expected, _, wanted = run_with_gradients(reference, exact, names, [gradient.double() for gradient in upstream])
    if len(outputs) != len(expected):
        raise AssertionError(f"{len(outputs)} outputs, expected {len(expected)}")
    for number, (out, want) in enumerate(zip(outputs, expected)):
        assert_close(out, want, rtol=rtol, what=f"output {number}")
    for name, gradient in found.items():
        if gradient.dtype != inputs[name].dtype:
            raise AssertionError(f"gradient of {name}: dtype {gradient.dtype}, expected {inputs[name].dtype}")
        assert_close(gradient, wanted[name], gradient=True, rtol=gradient_rtol, what=f"gradient of {name}")


def check_gradcheck(function, inputs, differentiable=None):
    """torch.autograd.gradcheck of every differentiable input; needs float64."""
    names = (
        [name for name, value in inputs.items() if _is_floating(value)]
        if differentiable is None
        else list(differentiable)
    )
    for name in names:
        if inputs[name].dtype != torch.float64:
            raise ValueError(f"gradcheck needs float64, {name} is {inputs[name].dtype}")

    def of_tensors(*tensors):
        outputs = _outputs(function(**{**inputs, **dict(zip(names, tensors))}))
        return tuple(out for out in outputs if out.requires_grad)

    leaves = tuple(inputs[name].detach().clone().requires_grad_() for name in names)
    torch.autograd.gradcheck(of_tensors, leaves)


def check_compile(function, inputs, differentiable=None, *, dynamic=None):
    """torch.compile(fullgraph=True) gives the outputs and gradients of the eager call, without a graph break."""
    torch._dynamo.reset()
    outputs, upstream, gradients = run_with_gradients(function, inputs, differentiable)
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
    again, _, found = run_with_gradients(compiled, inputs, differentiable, upstream)
    for number, (out, want) in enumerate(zip(again, outputs)):
        assert_close(out, want, what=f"compiled output {number}")
    for name, gradient in found.items():
        assert_close(gradient, gradients[name], gradient=True, what=f"compiled gradient of {name}")


def check_op(
    function,
    inputs,
    reference,
    *,
    op=None,
    op_inputs=None,
    differentiable=None,
    rtol=None,
    gradient_rtol=None,
    gradients=True,
    compile=True,
    opcheck=True,
):
    """Checks an operator on one set of arguments: values, gradients, gradcheck, opcheck, compile.

    Raises at the first failure.

    function    takes **inputs, returns a tensor or a tuple of tensors
    inputs      dict of keyword arguments; floating tensors are differentiated (or those that `differentiable` names)
    reference   the same mathematics in plain PyTorch; evaluated in float64
    op          the operator overload for torch.library.opcheck, called with op_inputs (default: inputs)
    gradients   False for an operator without autograd
    gradcheck runs if all differentiated inputs are float64.
    """
    check_values(
        function,
        inputs,
        reference,
        differentiable=differentiable,
        rtol=rtol,
        gradient_rtol=gradient_rtol,
        gradients=gradients,
    )
    names = (
        [name for name, value in inputs.items() if _is_floating(value)]
        if differentiable is None
        else list(differentiable)
    )
    if gradients and all(inputs[name].dtype == torch.float64 for name in names):
        check_gradcheck(function, inputs, names)
    if op is not None and opcheck:
        arguments = dict(inputs if op_inputs is None else op_inputs)
        if gradients:
            arguments.update({name: arguments[name].detach().requires_grad_() for name in names if name in arguments})
        torch.library.opcheck(op, (), arguments)
    if compile:
        check_compile(function, inputs, names if gradients else ())


def transposed(tensor, first=-2, second=-1):
    """The same values in memory with two axes exchanged."""
    return tensor.detach().transpose(first, second).contiguous().transpose(first, second)


def sliced(tensor, axis=-1, before=3, after=2):
    """The same values as a slice of a wider tensor, which is NaN (or the smallest integer) everywhere else."""
    shape = list(tensor.shape)
    shape[axis] += before + after
    filler = float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min
    wide = tensor.new_full(shape, filler)
    view = wide.narrow(axis, before, tensor.shape[axis])
    return view.copy_(tensor.detach())


def stepped(tensor, axis=-1, step=2):
    """The same values at every step-th place of a longer tensor, which is NaN (or the smallest integer) elsewhere."""
    shape = list(tensor.shape)
    shape[axis] *= step
    filler = float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min
    wide = tensor.new_full(shape, filler)
    index = [slice(None)] * tensor.dim()
    index[axis] = slice(None, None, step)
    return wide[tuple(index)].copy_(tensor.detach())


def expanded(tensor, axis=-1):
    """Stride 0 along an axis: its first entry, repeated without memory (so the values change)."""
    return tensor.detach().narrow(axis, 0, 1).expand(tensor.shape) if tensor.shape[axis] else tensor.detach()


def strided_variants(tensor):
    """Pairs (name, tensor of the same values): contiguous; sliced and stepped for each axis; neighbours transposed."""
    yield "contiguous", tensor.detach().contiguous()
    for axis in range(tensor.dim()):
        yield f"sliced{axis}", sliced(tensor, axis)
        yield f"stepped{axis}", stepped(tensor, axis)
    for axis in range(tensor.dim() - 1):
        yield f"transposed{axis}{axis + 1}", transposed(tensor, axis, axis + 1)
