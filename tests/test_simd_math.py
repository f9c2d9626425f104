"""The elementary functions and conversions (cpu/simd_math.h, cpu/simd.h) at every CPU level, against float64."""

import ctypes
import importlib.util
from functools import cache
from pathlib import Path

import checks
import numpy as np
import pytest
import torch

HERE = Path(__file__).parent
TINY, HUGE = 2.0**-126, torch.finfo(torch.float32).max
INFINITY, NAN = float("inf"), float("nan")


def native():
    specification = importlib.util.spec_from_file_location("native", HERE.parent / "benchmarks" / "native.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


class Level:
    def __init__(self, name, library):
        self.name, self.library = name, library

    def call(self, name, x, dtype=None):
        """The function called `name` of every element; the result has `dtype` (default: x's)."""
        padded = torch.nn.functional.pad(x, (0, -len(x) % 64))
        result = torch.empty_like(padded, dtype=dtype)
        address = lambda tensor: ctypes.c_void_p(tensor.data_ptr())  # noqa: E731
        getattr(self.library, name)(address(padded), address(result), ctypes.c_int64(len(padded)))
        return result[: len(x)]


@cache
def load_level(name):
    """The Level, or why there is none."""
    if checks.LEVELS.index(name) > checks.LEVELS.index(torch.ops.mamba.cpu_capability()):
        return f"this CPU has no {name}"
    library = native().load(HERE / "simd_math.cpp", name)
    return Level(name, library) if library else "no C++ compiler"


@pytest.fixture(scope="module", params=checks.LEVELS)
def level(request):
    loaded = load_level(request.param)
    if isinstance(loaded, str):
        pytest.skip(loaded)
    return loaded


# ---- the exact functions, in float64 ----


def softplus(x):
    return torch.where(x > 20, x, x.clamp(min=0) + torch.log1p(torch.exp(-x.abs())))


def softplus_slope(x):
    return torch.where(x > 20, 1.0, torch.sigmoid(x))


def silu(x):
    return torch.where(x == -INFINITY, -0.0, x * torch.sigmoid(x))


def silu_slope(x):
    inside = x.clamp(-1000, 1000)
    return torch.sigmoid(inside) * (1 + inside * torch.sigmoid(-inside))


def silu_slope_size(x):
    """What the slope's rounding errors are proportional to: it has a zero at -1.28."""
    inside = x.clamp(-1000, 1000)
    return torch.sigmoid(inside) * (1 + inside.abs() * torch.sigmoid(-inside))


# name: function, most units in the last place (float32), what they are units of (default: the result)
FUNCTIONS = {
    "exp": (torch.exp, 2, None),
    "exp2": (torch.exp2, 2.5, None),
    "log": (torch.log, 2, None),
    "sigmoid": (torch.sigmoid, 5, None),
    "softplus": (softplus, 5, None),
    "softplus_slope": (softplus_slope, 5, None),
    "silu": (silu, 5, None),
    "silu_slope": (silu_slope, 5, silu_slope_size),
}


class Exact:
    """The exact values for float32 `x`, and what errors are measured in."""

    def __init__(self, name, x):
        function, _, size_of = FUNCTIONS[name]
        wide = x.double()
        self.name, self.x, self.values = name, x, function(wide)
        self.nan = self.values.isnan()
        self.tiny = self.values.abs() < TINY  # results in smallest normals; the others in units in the last place
        size = size_of(wide) if size_of else self.values
        exponent = size.abs().clamp_(TINY, HUGE).float().view(torch.int32).bitwise_and_(0x7F800000)
        self.unit = exponent.view(torch.float32).double().mul_(2.0**-23).masked_fill_(self.tiny, TINY)
        self.bounded = self.values.clamp(-HUGE, HUGE)

    def worst_units(self, level):
        """(largest error among normal results, where); checks everything else on the way."""
        found = level.call(f"{self.name}_float32", self.x)
        if self.name == "exp2" and level.name != "avx512":  # infinite from 2^127.5 on
            late = (self.x >= 127.5) & (found == INFINITY)
            found = torch.where(late, self.values.float(), found)
        assert torch.equal(found.isnan(), self.nan), f"{self.name}: NaN where none belongs, or none where one does"
        errors = found.double().clamp_(-HUGE, HUGE).sub_(self.bounded).abs_().div_(self.unit).masked_fill_(self.nan, 0)
        worst = errors.max()
        if self.tiny.any():
            small = errors.masked_fill(~self.tiny, 0).max()
            assert small <= 1, f"{self.name}: a result below the smallest normal number is off by more than that"
            worst = errors.masked_fill_(self.tiny, 0).max()
        most = FUNCTIONS[self.name][1]
        at = float(self.x[errors.argmax()]) if worst > most else None
        assert at is None, f"{self.name}({at!r}) is off by {worst:.2f} units in the last place, more than {most}"
        return float(worst)


def exact_at(name, bits):
    return Exact(name, bits.to(torch.int32).view(torch.float32))


# ---- functions ----


@pytest.mark.parametrize("name", FUNCTIONS)
def test_float32_sampled(level, name):
    """Every 1021st bit pattern, and all that lie close to where something changes."""
    edges = [
        0.0,
        TINY,
        1.0,
        20.0,
        42.0,
        64.0,
        87.0,
        88.0,
        88.72284,
        91.9,
        103.97,
        126.0,
        126.5,
        127.5,
        128.0,
        150.0,
        HUGE,
    ]
    around = torch.tensor(edges + [-edge for edge in edges]).view(torch.int32)
    near = (around.long()[:, None] + torch.arange(-2000, 2000)).flatten()
    bits = torch.cat([torch.arange(-(2**31), 2**31, 1021), near.clamp(-(2**31), 2**31 - 1)])
    exact_at(name, bits).worst_units(level)


@pytest.mark.parametrize("name", ["silu", "silu_slope"])
def test_coarse(level, name):
    """For 16-bit results: within 2^-16 of the result (the slope: of its terms), or within 2^-118."""
    x = torch.arange(-(2**31), 2**31, 509).to(torch.int32).view(torch.float32)
    found, wide = level.call(f"coarse_{name}_float32", x).double(), x.double()
    exact, _, size_of = FUNCTIONS[name]
    expected = exact(wide)
    assert torch.equal(found.isnan(), expected.isnan())
    numbers = expected.isfinite()
    assert torch.equal(found[~numbers & ~expected.isnan()], expected[~numbers & ~expected.isnan()])
    size = (size_of(wide) if size_of else expected)[numbers].abs()
    error = (found[numbers] - expected[numbers]).abs()
    assert (error <= (size * 2**-16).clamp(min=2.0**-118)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", [*FUNCTIONS, "coarse_silu", "coarse_silu_slope"])
def test_lanes_do_not_see_one_another(level, name, dtype):
    """What else stands in a vector changes no bit."""
    x = 20 * torch.randn(20_000, dtype=dtype)
    function = f"{name}_{str(dtype)[6:]}"
    expected = level.call(function, x)
    others = torch.tensor([NAN, INFINITY, -INFINITY, 1e30, -1e30, 0.0, 1000.0, -1000.0, 100.0, -90.0], dtype=dtype)
    replaced = torch.rand(len(x)) < 0.1
    mixed = torch.where(replaced, others[torch.randint(len(others), (len(x),))], x)
    found = level.call(function, mixed)
    kept = ~replaced & ~expected.isnan()
    assert kept.sum() > 8000
    assert torch.equal(found[kept], expected[kept])


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_float32_all(name):
    """Every float32 number at every level; prints the worst errors with -s (benchmarks/results/accuracy.md)."""
    levels = [level for level in map(load_level, checks.LEVELS) if isinstance(level, Level)]
    worst, step = dict.fromkeys(levels, 0.0), 2**18  # a piece stays in the caches
    for first in range(-(2**31), 2**31, step):
        exact = exact_at(name, torch.arange(first, first + step))
        for level in levels:
            worst[level] = max(worst[level], exact.worst_units(level))
    print(f"\n{name}: units in the last place at most", *(f"{level.name} {most:.3f}" for level, most in worst.items()))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_float64(level, name):
    """Within 1e-15 of an extended precision, relative to the result (silu's slope: to its terms)."""
    if np.finfo(np.longdouble).nmant < 63:
        pytest.skip("this machine has no extended precision")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100_000, dtype=torch.float64, generator=generator)
    x = torch.cat([x * scale for scale in (1e-3, 1, 30, 300)]).clamp(-700, 700)
    if name == "log":
        x = torch.cat([x.abs(), 1 + x * 1e-3, torch.exp(x)])
    wide = x.numpy().astype(np.longdouble)
    small = np.exp(-np.abs(wide))
    sigmoid = np.where(wide >= 0, 1, small) / (1 + small)
    size = None
    if name == "softplus":
        expected = np.where(wide > 20, wide, np.maximum(wide, 0) + np.log1p(small))
    elif name == "softplus_slope":
        expected = np.where(wide > 20, 1, sigmoid)
    elif name == "sigmoid":
        expected = sigmoid
    elif name == "silu":
        expected = wide * sigmoid
    elif name == "silu_slope":
        other = np.where(wide >= 0, small, 1) / (1 + small)
        expected, size = sigmoid * (1 + wide * other), sigmoid * (1 + np.abs(wide) * other)
    else:
        expected = getattr(np, name)(wide)
    found = level.call(f"{name}_float64", x).numpy()
    error = np.abs(found - expected) / np.abs(expected if size is None else size)
    at = int(np.nanargmax(error))
    assert error[at] <= 1e-15, f"{name}({x[at]!r}) is off by {float(error[at]):.2g}"


LIMITS = {
    "exp": [(0.0, 1.0), (-0.0, 1.0), (INFINITY, INFINITY), (-INFINITY, 0.0)],
    "exp2": [(0.0, 1.0), (-0.0, 1.0), (INFINITY, INFINITY), (-INFINITY, 0.0)],
    "log": [(0.0, -INFINITY), (-0.0, -INFINITY), (1.0, 0.0), (INFINITY, INFINITY), (-INFINITY, NAN), (-1.0, NAN)],
    "sigmoid": [(0.0, 0.5), (-0.0, 0.5), (INFINITY, 1.0), (-INFINITY, 0.0)],
    "softplus": [(INFINITY, INFINITY), (-INFINITY, 0.0)],
    "softplus_slope": [(0.0, 0.5), (-0.0, 0.5), (INFINITY, 1.0), (-INFINITY, 0.0)],
    "silu": [(0.0, 0.0), (-0.0, -0.0), (INFINITY, INFINITY), (-INFINITY, -0.0)],
    "silu_slope": [(0.0, 0.5), (-0.0, 0.5), (INFINITY, 1.0), (-INFINITY, -0.0)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_limits(level, name, dtype):
    """Exact at zeros and infinities, the sign of a zero too; NaN stays NaN, whatever its payload and sign."""
    x, expected = torch.tensor(LIMITS[name], dtype=dtype).T.contiguous()
    found = level.call(f"{name}_{str(dtype)[6:]}", x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    numbers = ~expected.isnan()
    assert torch.equal(torch.signbit(found[numbers]), torch.signbit(expected[numbers]))
    payloads = torch.tensor([0x7FC00000, 0x7FC001FF, 0x7F800001, 0x7FFFFFFF, -1, -0x400000], dtype=torch.int32)
    nan = payloads.view(torch.float32).to(dtype)
    assert level.call(f"{name}_{str(dtype)[6:]}", nan).isnan().all()


# ---- conversions ----

HALF = pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
WIDE = pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=str)


def conversion(half, wide):
    return f"{str(half)[6:]}_{str(wide)[6:]}"


@HALF
@WIDE
def test_loads_of_every_pattern(level, half, wide):
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(half)
    found = level.call(f"load_{conversion(half, wide)}", x, wide)
    assert torch.equal(found.isnan(), x.isnan())
    numbers = ~x.isnan()
    assert torch.equal(found[numbers], x[numbers].to(wide))
    assert torch.equal(torch.signbit(found), torch.signbit(x))


@HALF
@WIDE
def test_stores_round_to_nearest_even(level, half, wide):
    """All half values, what lies close to them and to the middle between neighbours, and a sample of all floats."""
    low = torch.tensor([0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    structured = ((torch.arange(-(2**15), 2**15) << 16)[:, None] | low).flatten()
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(half).float().view(torch.int32).long()
    middles = (values[:, None] + torch.tensor([-0x1001, -0x1000, -0xFFF, -1, 0, 1, 0xFFF, 0x1000, 0x1001])).flatten()
    bits = torch.cat([structured, middles, torch.arange(-(2**31), 2**31, 4099)]).clamp(-(2**31), 2**31 - 1)
    x = bits.to(torch.int32).view(torch.float32)
    if half == torch.float16:  # subnormal results: middles are multiples of 2^-25
        x = torch.cat([x, torch.arange(-4096, 4096) * 2.0**-25, torch.arange(-4096, 4096) * 2.0**-26])
    expected = x.to(half)
    for store in ("store", "store_lines"):
        found = level.call(f"{store}_{conversion(half, wide)}", x.to(wide), half)
        if store == "store_lines" and half == torch.bfloat16:  # the CPU's own conversion flushes what is below 2^-126
            found = torch.where((x.abs() < TINY) & (found == 0), expected, found)
        check_rounding(x, found, expected)


def check_rounding(x, found, expected):
    assert torch.equal(found.isnan(), x.isnan())
    numbers = ~x.isnan()
    assert torch.equal(found.view(torch.int16)[numbers], expected.view(torch.int16)[numbers])
