"""AlphaBlock: the test vector with its 20 training steps, gradients, sizes, errors."""

import doctest
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
import vectors

from mamba_ops import layers, testing
from mamba_ops.layers import AlphaBlock
from mamba_ops.reference import gated_scan


def reference(parameters, input, h_s2=None):
    """The block in plain PyTorch, the scan as a loop over time."""
    p = parameters
    x = input @ p["W_in"].T + p["b_in"]
    a, b = x @ p["W_a"].T + p["b_a"], x @ p["W_b"].T + p["b_b"]
    h = gated_scan(b, a)[1] @ p["W_c"].T
    if h_s2 is not None:
        h = h_s2 + h
    return h @ p["W_out"].T + p["b_out"]


def from_vector(vector):
    block = AlphaBlock(4, 8, 4, dtype=torch.float64)
    block.load_state_dict({name: vector.inputs[name] for name in dict(block.named_parameters())})
    return block


def gradients(function, parameters, input, h_s2, upstream):
    leaves = [*parameters, input, h_s2]
    return torch.autograd.grad(function(input, h_s2), leaves, upstream)


@pytest.mark.parametrize("sizes", [(2, 5, 3, 7, 4), (1, 1, 1, 1, 1), (3, 70, 6, 9, 40), (2, 200, 30, 64, 33)], ids=str)
def test_all_gradients_equal_autograd_on_the_reference(sizes):
    """seqlen and state beyond 32 and 16 too."""
    batch, seqlen, in_dim, hidden, state = sizes
    block = AlphaBlock(in_dim, hidden, state, dtype=torch.float64)
    parameters = dict(block.named_parameters())
    assert len(parameters) == 9
    input = torch.randn(batch, seqlen, in_dim, dtype=torch.float64, requires_grad=True)
    h_s2 = torch.randn(batch, hidden, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(batch, 1, dtype=torch.float64)
    testing.assert_close(block(input, h_s2), reference(parameters, input, h_s2))
    found = gradients(block, parameters.values(), input, h_s2, upstream)
    expected = gradients(lambda *inputs: reference(parameters, *inputs), parameters.values(), input, h_s2, upstream)
    for name, gradient, want in zip((*parameters, "input", "h_s2"), found, expected):
        testing.assert_close(gradient, want, what=name)
    assert torch.equal(found[-1], upstream @ block.W_out)  # h_s2 passes through


@pytest.fixture
def scan_of_the_backend(backend, monkeypatch):
    def scan(x, logits, return_states):
        return backend.op("gated_scan")(x, logits, return_states=return_states)

    monkeypatch.setattr(layers.alpha, "gated_scan", scan)


def test_agrees_with_vector(scan_of_the_backend):
    vector = vectors.load("alpha_block")
    block = from_vector(vector)
    input = vector.inputs["input"].requires_grad_()
    h_s2 = torch.zeros(4, 8, dtype=torch.float64, requires_grad=True)
    logit, kept = block.forward_train(input, h_s2)
    assert torch.equal(logit, block(input, h_s2)) and torch.equal(logit, block(input))
    names = {"x": "x", "a": "a_proj", "b": "b_proj", "last_state": "x_K", "h_enriched": "h_enriched"}
    for name, stored in names.items():
        testing.assert_close(getattr(kept, name), vector.outputs[stored], what=name)
    testing.assert_close(logit, vector.outputs["logit"])
    loss = F.binary_cross_entropy_with_logits(logit[:, 0], vector.inputs["labels"])
    testing.assert_close(loss, vector.outputs["loss"])
    leaves = {**dict(block.named_parameters()), "input": input, "h_s2": h_s2}
    for name, gradient in zip(leaves, torch.autograd.grad(loss, list(leaves.values()))):
        testing.assert_close(gradient, vector.gradients[name], what=name)


@pytest.mark.parametrize("fused", [False, True])
def test_twenty_steps_agree_with_vector(scan_of_the_backend, fused):
    vector = vectors.load("alpha_block")
    block, meta = from_vector(vector), vector.meta
    optimizer = torch.optim.AdamW(
        block.parameters(),
        lr=meta["lr"],
        betas=meta["betas"],
        eps=meta["eps"],
        weight_decay=meta["weight_decay"],
        fused=fused,
    )
    losses, norms = [], []
    for _ in range(meta["steps"]):
        loss = F.binary_cross_entropy_with_logits(block(vector.inputs["input"])[:, 0], vector.inputs["labels"])
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(block.parameters(), meta["max_norm"]))
        optimizer.step()
        losses.append(loss.detach())
    testing.assert_close(torch.stack(losses), vector.outputs["losses"])
    testing.assert_close(torch.stack(norms), vector.outputs["grad_norms"])
    for name, parameter in block.named_parameters():
        testing.assert_close(parameter, vector.outputs[f"final_{name}"], what=name)


def test_training_lowers_the_loss():
    """20 steps on a fixed batch: at least 15 losses fall, and the last is below 0.65."""
    torch.manual_seed(1)
    block = AlphaBlock(in_dim=4, hidden=8, state=4)
    input, labels = torch.randn(4, 8, 4), torch.tensor([0.0, 1.0, 0.0, 1.0])
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2, fused=True)
    losses = []
    for _ in range(21):
        loss = F.binary_cross_entropy_with_logits(block(input)[:, 0], labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(block.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert sum(later < earlier for earlier, later in pairwise(losses)) >= 15
    assert losses[-1] < 0.65


def test_gradcheck_and_compile():
    block = AlphaBlock(3, 4, 2, dtype=torch.float64)
    names = [name for name, _ in block.named_parameters()]

    def function(input, h_s2, *parameters):
        return torch.func.functional_call(block, dict(zip(names, parameters)), (input, h_s2))

    leaves = [torch.randn(2, 6, 3), torch.randn(2, 4), *(p.detach() for p in block.parameters())]
    torch.autograd.gradcheck(function, [leaf.double().requires_grad_() for leaf in leaves])
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True)
    input = torch.randn(2, 6, 3, dtype=torch.float64)
    testing.assert_close(compiled(input), block(input))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_lower_precision(dtype):
    block = AlphaBlock(4, 16, 8).to(dtype)
    input = torch.randn(3, 20, 4, dtype=dtype)
    logit = block(input)
    assert logit.dtype == dtype and logit.shape == (3, 1)
    exact = reference({name: p.double() for name, p in block.named_parameters()}, input.double())
    testing.assert_close(logit, exact, rtol=5 * testing.tolerance(dtype))
    wide = block.float()
    with torch.autocast("cpu", torch.bfloat16):
        logit = wide(input.float())
    testing.assert_close(logit, reference(dict(wide.named_parameters()), input.float()), rtol=0.1)


def test_initial_values():
    block = AlphaBlock(100, 400, 25)
    for name, inputs in {"W_in": 100, "b_in": 100, "W_a": 400, "b_b": 400, "W_c": 25, "W_out": 400}.items():
        largest = getattr(block, name).abs().max()
        assert 0.7 < largest * inputs**0.5 <= 1, name


def test_errors():
    for name in ("in_dim", "hidden", "state"):
        with pytest.raises(ValueError, match=f"AlphaBlock: {name} must be at least 1, got 0"):
            AlphaBlock(**{"in_dim": 2, "hidden": 3, "state": 4, name: 0})
    block = AlphaBlock(2, 3, 4)
    shape = r"AlphaBlock: input must have shape \(batch, seqlen, in_dim = 2\) with seqlen >= 1, got "
    for wrong in ((5, 7, 3), (5, 0, 2), (7, 2)):
        with pytest.raises(ValueError, match=shape + str(wrong).replace("(", r"\(").replace(")", r"\)")):
            block(torch.ones(wrong))
    with pytest.raises(ValueError, match=r"h_s2 must have shape \(batch, hidden\) = \(5, 3\), got \(5, 4\)"):
        block(torch.ones(5, 7, 2), torch.ones(5, 4))
    with pytest.raises(RuntimeError, match=r"shape of .*\[5\].* shape of .*\[5, 1\]"):
        block(torch.ones(5, 7, 2)).backward(torch.ones(5))


def test_example():
    assert doctest.testmod(layers.alpha).failed == 0
