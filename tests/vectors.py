"""Loads the test vectors of tests/data as tensors."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch

DATA = Path(__file__).parent / "data"

# The vectors' names for states -> the names of the operators' arguments and results.
RENAMED = {"initial_states": "initial_state", "final_states": "last_state"}


@dataclass
class Vector:
    name: str
    meta: dict
    inputs: dict
    outputs: dict
    output_gradients: dict
    gradients: dict

    def arguments(self, *flags):
        """Keyword arguments of the operator: inputs and boundaries, and the named flags of the vector's meta."""
        return {**self.inputs, **{flag: self.meta[flag] for flag in flags if flag in self.meta}}


def load(name):
    stored = numpy.load(DATA / f"{name}.npz")
    parts = {"in": {}, "x": {}, "out": {}, "gout": {}, "grad": {}}
    for key in stored.files:
        kind, _, of = key.partition(".")
        if kind in parts:
            parts[kind][RENAMED.get(of, of)] = torch.from_numpy(stored[key]).to(torch.get_default_device())
    meta = json.loads(str(stored["meta"]))
    return Vector(name, meta, {**parts["in"], **parts["x"]}, parts["out"], parts["gout"], parts["grad"])


def names(prefix, without=()):
    """Names of the stored vectors that start with prefix, except those that start with one of `without`."""
    found = sorted(path.stem for path in DATA.glob(f"{prefix}*.npz"))
    assert found, f"no test vector starts with {prefix}"
    return [name for name in found if not name.startswith(tuple(without))]


def run_backward(vector, arguments, results):
    """Gradients of sum(gout * out), by name, for every input that the vector has a gradient of."""
    upstream = vector.output_gradients
    wanted = [arguments[name] for name in vector.gradients]
    found = torch.autograd.grad([results[k] for k in upstream], wanted, list(upstream.values()), allow_unused=True)
    return {
        name: torch.zeros_like(argument) if gradient is None else gradient
        for name, argument, gradient in zip(vector.gradients, wanted, found)
    }
