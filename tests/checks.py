"""Checks that every operator's tests share. `function` takes keyword arguments and returns a tuple of tensors."""

import os
import subprocess
import sys

import pytest
import torch

from mamba_ops import testing

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LEVELS = ("baseline", "avx2", "avx512")
# conftest.py lowers these for backend emulated: repetitions, what torch.compile makes of the rest of a graph, and what
# opcheck does (its last test traces the Python around the kernels, which is the same for every backend).
REPEATS = 20
COMPILER = "inductor"
OPCHECK = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")


def equal_runs(first, second):
    """Whether two results of testing.run_with_gradients are bit-identical, outputs in the same memory layout."""
    same = all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(first[0], second[0]))
    return same and all(torch.equal(first[2][name], second[2][name]) for name in second[2])


def bitwise_repeatable(function, inputs):
    """B96: the same bits every time, for 1, 2 and 3 threads, under the deterministic flag."""
    torch.use_deterministic_algorithms(True)
    expected = testing.run_with_gradients(function, inputs)
    for repeat in range(REPEATS):
        torch.set_num_threads(1 + repeat % 3)
        assert equal_runs(testing.run_with_gradients(function, inputs), expected)


def input_layouts(function, inputs, name):
    """B34, B47, B49: every memory layout of one argument gives the contiguous call's numbers."""
    expected = testing.run_with_gradients(function, inputs)
    for layout, view in testing.strided_variants(inputs[name]):
        found = testing.run_with_gradients(function, {**inputs, name: view}, upstream=expected[1])
        for position, (out, want) in enumerate(zip(found[0], expected[0])):
            testing.assert_close(out, want, rtol=1e-6, what=f"output {position} with {name} {layout}")
        for key, gradient in found[2].items():
            testing.assert_close(gradient, expected[2][key], rtol=1e-6, what=f"gradient of {key} with {name} {layout}")


def gradient_layouts(function, inputs):
    """B34: transposed, sliced, stepped and expanded incoming gradients give the numbers of contiguous ones."""
    _, upstream, _ = testing.run_with_gradients(function, inputs)
    for position, gradient in enumerate(upstream):
        views = [*testing.strided_variants(gradient)]
        views += [(f"expanded{axis}", testing.expanded(gradient, axis)) for axis in range(gradient.dim())]
        for layout, view in views:
            given = list(upstream)
            given[position] = view
            plain = [item.contiguous() for item in given]
            expected = testing.run_with_gradients(function, inputs, upstream=plain)[2]
            found = testing.run_with_gradients(function, inputs, upstream=given)[2]
            for name in expected:
                testing.assert_close(found[name], expected[name], rtol=1e-6, what=f"gradient of {name}, {layout}")


def compiles_once(function, all_inputs, differentiable=None):
    """B98: one full graph with a backward pass, and no recompilation after the first of `all_inputs`."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda **i: function(**i), fullgraph=True, dynamic=True, backend=COMPILER)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for inputs in all_inputs:
            expected = testing.run_with_gradients(function, inputs, differentiable)
            found = testing.run_with_gradients(compiled, inputs, differentiable, upstream=expected[1])
            for out, want in zip(found[0], expected[0]):
                testing.assert_close(out, want)
            for name, gradient in found[2].items():
                testing.assert_close(gradient, expected[2][name], gradient=True, what=name)


def compiled_loop(step, inputs, state):
    """B101: five in-place steps in one graph change `state` as five eager ones do."""
    xs = torch.randn(5, *inputs["x"].shape)
    rest = {name: value for name, value in inputs.items() if name not in ("x", state)}

    def loop(xs, written):
        return torch.stack([step(**rest, **{"x": x, state: written}) for x in xs.unbind()])

    expected_state, found_state = inputs[state].clone(), inputs[state].clone()
    expected = loop(xs, expected_state)
    torch._dynamo.reset()
    found = torch.compile(loop, fullgraph=True, backend=COMPILER)(xs, found_state)
    testing.assert_close(found, expected)
    testing.assert_close(found_state, expected_state)


def functional_transforms(function, inputs, batched):
    """B45: torch.func.grad, vmap(grad), jacrev and compile(grad) of a loss of the tensors in `inputs`.

    The tensor `batched` has a leading axis over which rows are independent.
    """
    names = [name for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    tensors = tuple(inputs[name] for name in names)

    def loss(*tensors):
        outputs = function(**{**inputs, **dict(zip(names, tensors))})
        return sum(out.sin().sum() for out in outputs)

    leaves = tuple(tensor.clone().requires_grad_() for tensor in tensors)
    expected = torch.autograd.grad(loss(*leaves), leaves)
    everything = tuple(range(len(names)))
    for found in (
        torch.func.grad(loss, everything)(*tensors),
        torch.func.jacrev(loss, everything)(*tensors),
    ):
        for name, gradient, want in zip(names, found, expected):
            testing.assert_close(gradient, want, gradient=True, what=name)
    if torch.__version__ >= (2, 11):  # 2.10 fails an assertion of its own
        torch._dynamo.reset()
        found = torch.compile(torch.func.grad(loss, everything), fullgraph=True, backend=COMPILER)(*tensors)
        for name, gradient, want in zip(names, found, expected):
            testing.assert_close(gradient, want, gradient=True, what=f"compiled {name}")

    position = names.index(batched)
    stacked = torch.stack([tensors[position], 2 * tensors[position], -tensors[position]])
    axes = tuple(0 if i == position else None for i in everything)
    given = tuple(stacked if i == position else tensor for i, tensor in enumerate(tensors))
    found = torch.func.vmap(torch.func.grad(loss, position), axes)(*given)
    for row, gradient in zip(stacked, found):
        one = tuple(row if i == position else tensor for i, tensor in enumerate(tensors))
        testing.assert_close(gradient, torch.func.grad(loss, position)(*one), gradient=True, what="vmap(grad)")


def refusals(function, name, x):
    """Forward mode and double backward of `function(x)` are refused in words."""

    def loss(x):
        return sum(out.square().sum() for out in function(x))

    with pytest.raises(NotImplementedError, match=f"{name}: forward-mode differentiation is not supported"):
        torch.func.jvp(loss, (x,), (x,))
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match=f"{name}: double backward is not supported"):
        gradient.sum().backward()


def run_at_level(level, script):
    """Run a Python script with one CPU level, from the seed that every test has; skips where the CPU lacks it."""
    script = f"import torch, mamba_ops\ntorch.manual_seed(0)\n{script}\nprint(torch.ops.mamba.cpu_capability())\n"
    environment = {**os.environ, "MAMBA_OPS_CPU_CAPABILITY": level}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    if "is not supported by this CPU" in result.stderr:
        pytest.skip(f"this CPU has no {level}")
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[-1] == level


def error_text(function, inputs, text):
    """The call fails with this text (a regular expression), on the default device and with fake tensors."""
    here = torch.get_default_device()
    inputs = {name: value.to(here) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    with pytest.raises(RuntimeError, match=text):
        function(**inputs)
    fake = {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    with pytest.raises(RuntimeError, match=text):
        function(**fake)
