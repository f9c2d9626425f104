"""Every public module of layers and models is documented, and its example runs."""

import doctest
import inspect

import pytest

from mamba_ops import layers, models

PUBLIC = [getattr(package, name) for package in (layers, models) for name in package.__all__]


@pytest.mark.parametrize("thing", PUBLIC, ids=lambda thing: thing.__name__)
def test_documented(thing):
    assert inspect.getdoc(thing)
    for name, member in vars(thing).items():
        if inspect.isfunction(member) and not name.startswith("_") and name not in ("extra_repr", "forward"):
            assert member.__doc__, f"{thing.__name__}.{name} has no docstring"


@pytest.mark.parametrize("thing", [layers.Mamba, layers.RMSNorm, models.MambaConfig, models.MambaLM])
def test_examples_run(thing):
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in doctest.DocTestFinder(recurse=False).find(thing, thing.__name__, globs={}):
        runner.run(test)
    assert runner.summarize(verbose=False).attempted > 0
    assert runner.summarize(verbose=False).failed == 0
