"""The rules that keep the project simple: what includes what, what every operator has, what every docstring says."""

import ast
import doctest
import inspect
import re
import sys
from pathlib import Path

import pytest
import torch

import mamba_ops
from mamba_ops import _library, info, ops

ROOT = Path(__file__).parent.parent
CSRC, PACKAGE = ROOT / "csrc", ROOT / "mamba_ops"
SOURCES = sorted(path for path in CSRC.rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh"))
MODULES = sorted(PACKAGE.rglob("*.py"))
OP_FILES = [module.__name__.rpartition(".")[2] for module in ops.MODULES]
PUBLIC = [getattr(ops, name) for name in ops.__all__ if name != "register"]

# csrc: a folder may include itself and what stands before it.
MAY_INCLUDE = {
    "common": {"common"},
    "params": {"common", "params", "cpu/level.h"},
    "cpu": {"common", "params", "cpu"},
    "cuda": {"common", "params", "cuda"},
    "ops": {"common", "params", "cpu/parallel.h", "cpu/level.h", "ops"},
}
# mamba_ops: the same for subpackages; what they may import besides themselves and the top-level helper modules.
MAY_IMPORT = {
    "ops": {"ops"},
    "reference": {"reference"},
    "layers": {"ops", "layers"},
    "models": {"ops", "layers", "models"},
    "training": {"ops", "layers", "models", "training"},
    "compat": {"ops", "layers", "models", "compat"},
}


def includes(path):
    return re.findall(r'^\s*#\s*include\s+(["<])([^">]+)', path.read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(CSRC)))
def test_include_arrows_point_one_way(path):
    folder = path.relative_to(CSRC).parts[0]
    for quote, name in includes(path):
        torch_header = name.startswith(("torch/", "ATen/", "c10/"))
        assert not torch_header or folder in ("ops", "schema.cpp"), (
            f"{name}: torch headers stand in csrc/ops and schema.cpp only"
        )
        cuda_header = name.startswith(("cuda", "cublas", "cub/"))
        assert not cuda_header or folder == "cuda" or path.name == "api.h", (
            f"{name}: CUDA headers stand in csrc/cuda and ops/api.h"
        )
        assert "pybind11" not in name, "the library has no Python symbol"
        if quote == '"' and folder in MAY_INCLUDE:
            allowed = MAY_INCLUDE[folder]
            assert name.split("/")[0] in allowed or name in allowed, f"csrc/{folder} must not include {name}"


def imported(path):
    """Absolute module names that a file of the package imports, relative imports resolved."""
    package = ["mamba_ops", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join(base + ([node.module] if node.module else []))
            yield stem
            if not node.module or stem == "mamba_ops":
                yield from (f"{stem}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_python_layers_point_one_way(path):
    parts = path.relative_to(PACKAGE).parts
    folder = parts[0] if len(parts) > 1 else ""
    for name in imported(path):
        if folder == "reference":
            standard = name.split(".")[0] in sys.stdlib_module_names
            own = name.startswith("mamba_ops.reference")
            assert standard or own or name.split(".")[0] == "torch", f"a reference imports torch only, not {name}"
        if not name.startswith("mamba_ops."):
            continue
        target = name.split(".")[1]
        assert target != "compat" or folder == "compat", "nothing imports compat"
        if folder in MAY_IMPORT and (PACKAGE / target).is_dir():
            assert target in MAY_IMPORT[folder], f"mamba_ops.{folder} must not import {name}"


@pytest.mark.parametrize("name", OP_FILES)
def test_basename_rule(name):
    """An op's name is the file name in every folder."""
    expected = [
        f"csrc/params/{name}.h",
        f"csrc/ops/{name}.cpp",
        f"csrc/cpu/{name}.cpp",
        f"csrc/cuda/{name}.cu",
        f"mamba_ops/ops/{name}.py",
        f"mamba_ops/reference/{name}.py",
        f"tests/ops/test_{name}.py",
        f"benchmarks/benchmark_{name}.py",
    ]
    missing = [path for path in expected if not (ROOT / path).exists()]
    assert not missing


def schemas():
    return {
        schema.name.removeprefix("mamba::"): schema
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("mamba::")
    }


@pytest.mark.parametrize("name", _library.operator_names())
def test_every_operator_is_complete(name):
    found = dict(info.backends())[name]
    assert found["CPU"] and found["fake"], "every op has a CPU kernel and a fake"
    schema = schemas()[name]
    mutated = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    assert bool(mutated) == name.endswith("_"), "in-place ops, and only they, mark what they write"
    text = (CSRC / "schema.cpp").read_text()
    assert f'"{name}(' in text, "every schema stands in csrc/schema.cpp"


def test_schemas_have_shape_comments():
    lines = (CSRC / "schema.cpp").read_text().splitlines()
    for number, line in enumerate(lines):
        if "m.def(" in line and not line.lstrip().startswith("//"):
            before = lines[number - 1].strip()
            assert before.startswith("//") or before.endswith(");"), f"line {number + 1}: no shape comment above"


@pytest.mark.parametrize("function", PUBLIC, ids=lambda function: function.__name__)
def test_public_docstrings(function):
    text = inspect.getdoc(function)
    for section in ("Args:", "Returns:", "Raises:", "Source:", "Gradients:", "Autocast:", "Determinism:", "Example:"):
        assert section in text, f"{function.__name__} lacks {section}"
    assert ".. math::" in text
    for parameter in inspect.signature(function).parameters:
        assert re.search(rf"\b{parameter}[,:]", text), f"{parameter} is not described"


@pytest.mark.parametrize("function", PUBLIC, ids=lambda function: function.__name__)
def test_docstring_examples_run(function):
    tests = doctest.DocTestFinder().find(function, globs={})
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in tests:
        runner.run(test)
    assert runner.summarize(verbose=False).attempted > 0
    assert runner.summarize(verbose=False).failed == 0


@pytest.mark.parametrize("path", [*SOURCES, *MODULES], ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_readable(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 450, "split by meaning"
    assert "\t" not in text


def test_readme_lists_every_public_operator():
    readme = (ROOT / "README.md").read_text()
    missing = [function.__name__ for function in PUBLIC if f"`{function.__name__}`" not in readme]
    assert not missing


def test_readme_quick_start_runs():
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[:1]
    assert len([line for line in block.splitlines() if line.strip()]) <= 10
    exec(compile(block, "README.md", "exec"), {})


def test_version_stands_once():
    assert mamba_ops.__version__ in (ROOT / "CHANGELOG.md").read_text()
    assert "version =" not in (ROOT / "pyproject.toml").read_text().replace("version = { attr", "").replace(
        "target-version =", ""
    )
