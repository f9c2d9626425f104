"""selective_scan: values, gradients, memory layouts, compile, transforms, determinism, errors."""

from itertools import product

import checks
import pytest
import torch
import vectors

import mamba_ops
from mamba_ops import testing
from mamba_ops.reference.selective_scan import example_inputs
from mamba_ops.reference.selective_scan import selective_scan as reference

OPTIONAL = ("D", "z", "delta_bias", "initial_state")
SUBSETS = [dict(zip(OPTIONAL, present)) for present in product((False, True), repeat=4)]
ORDER = ("u", "delta", "A", "B", "C", *OPTIONAL, "seq_idx", "cu_seqlens")


def call(backend):
    """The backend's operator as a function of keyword arguments."""

    def function(delta_softplus=False, **inputs):
        tensors = [inputs.pop(name, None) for name in ORDER]
        assert not inputs
        return backend.op("selective_scan")(*tensors, delta_softplus)

    return function


def subset_id(subset):
    return "+".join(name for name, present in subset.items() if present) or "plain"


# ---- agrees with the reference ----


@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
@pytest.mark.parametrize("seqlen", [1, 2, 5, 7, 8, 9, 15, 16, 17, 33, 65, 129])
def test_every_length_around_chunk_borders(backend, dtype, seqlen):
    """B24: with bias and softplus, all nine gradients."""
    testing.check_values(call(backend), example_inputs(dtype=dtype, seqlen=seqlen), reference)


def test_long_sequence(backend):
    """B24: 2049 positions."""
    inputs = example_inputs(dtype=torch.float32, batch=1, seqlen=backend.long)
    testing.check_values(call(backend), inputs, reference)


@pytest.mark.parametrize("dim", [1, 2, 3, 15, 16, 17, 31, 33, 64, 65, 130])
@pytest.mark.parametrize("dstate", [1, 3, 16, 17])
def test_every_size(backend, dim, dstate):
    """B51."""
    for kind, dtype in product(("shared", "constant"), (torch.float32, torch.float64)):
        inputs = example_inputs(dtype=dtype, dim=dim, dstate=dstate, seqlen=10, B=kind, C=kind)
        testing.check_values(call(backend), inputs, reference)


@pytest.mark.parametrize("dstate", [64, 128, 257, 300])
def test_large_states(backend, dstate):
    """B53: no limit on dstate."""
    testing.check_values(call(backend), example_inputs(dim=6, dstate=dstate, seqlen=19), reference)


@pytest.mark.parametrize("kinds", list(product(("constant", "shared", "grouped"), repeat=2)), ids="-".join)
@pytest.mark.parametrize("ngroups", [1, 2, 3, 6])
@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
def test_kinds_of_projections(backend, kinds, ngroups, dtype):
    """B85: channel d uses group d // (dim / ngroups)."""
    inputs = example_inputs(dtype=dtype, dim=6, dstate=4, ngroups=ngroups, B=kinds[0], C=kinds[1])
    testing.check_values(call(backend), inputs, reference)


@pytest.mark.parametrize("ngroups", [2, 3, 12])
def test_groups_wider_than_a_vector(backend, ngroups):
    inputs = example_inputs(dim=192, dstate=5, seqlen=20, ngroups=ngroups)
    testing.check_values(call(backend), inputs, reference)


@pytest.mark.parametrize("subset", SUBSETS, ids=subset_id)
@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
def test_every_subset_of_optional_arguments(backend, dtype, subset):
    """B33, B09."""
    for softplus in (False, True):
        inputs = example_inputs(dtype=dtype, delta_softplus=softplus, seqlen=21, **subset)
        testing.check_values(call(backend), inputs, reference)


@pytest.mark.parametrize(
    "batch, dim, seqlen, dstate", [(2, 4, 0, 3), (0, 4, 5, 3), (2, 0, 5, 3), (2, 4, 5, 0), (0, 0, 0, 0)]
)
def test_zero_sizes(backend, batch, dim, seqlen, dstate):
    inputs = example_inputs(batch=batch, dim=dim, seqlen=seqlen, dstate=dstate, ngroups=1)
    testing.check_values(call(backend), inputs, reference)
    if seqlen == 0:
        last_state = call(backend)(**inputs)[1]
        assert torch.equal(last_state, inputs["initial_state"])
        assert last_state.data_ptr() != inputs["initial_state"].data_ptr() or not last_state.numel()


@pytest.mark.parametrize("axis", ["batch", "dim"])
def test_very_many_channels_and_rows(backend, axis):
    """B54."""
    inputs = example_inputs(seqlen=2, dstate=1, ngroups=1, **{"batch": 1, "dim": 1, axis: backend.many})
    testing.check_values(call(backend), inputs, reference)


def test_parameters_and_states_of_other_dtypes(backend):
    inputs = example_inputs(dtype=torch.bfloat16, C="constant")
    inputs.update(A=inputs["A"].bfloat16(), C=inputs["C"].double(), D=inputs["D"].half())
    inputs["initial_state"] = inputs["initial_state"].bfloat16()
    out, last_state = call(backend)(**inputs)
    assert out.dtype == torch.bfloat16
    assert last_state.dtype == torch.float32
    testing.check_values(call(backend), inputs, reference, rtol=2e-2, gradient_rtol=2e-2)


# ---- numbers ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_division_by_a_running_product(backend, dtype):
    """B15: a long sequence, delta 0.5, A = -1 ... -16: the product of all decays is far below any number."""
    options = dict(batch=1, dim=4, seqlen=backend.long, dstate=16, delta_softplus=False, delta_bias=False)
    inputs = example_inputs(dtype=dtype, **options)
    inputs["delta"] = torch.full_like(inputs["delta"], 0.5)
    inputs["A"] = -torch.arange(1.0, 17.0).repeat(4, 1)
    testing.check_values(call(backend), inputs, reference)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_states_beyond_half_precision(backend, dtype):
    """B16: the state passes 65504 while the output stays small."""
    inputs = example_inputs(dtype=dtype, batch=1, seqlen=300, D=False, z=False, delta_bias=False, delta_softplus=False)
    inputs["u"] = torch.full_like(inputs["u"], 600.0)
    inputs["delta"] = torch.ones_like(inputs["delta"])
    inputs["B"] = torch.full_like(inputs["B"], 100.0)
    inputs["C"] = torch.full_like(inputs["C"], 1e-4)
    inputs["A"] = torch.full_like(inputs["A"], -1e-3)
    out, last_state = call(backend)(**inputs)
    assert last_state.max() > 65504
    assert torch.isfinite(out).all()
    testing.check_values(call(backend), inputs, reference, gradients=False)


def test_extreme_steps(backend):
    """exp underflows to 0 silently, gradients stay finite; A > 0 is allowed."""
    inputs = example_inputs(seqlen=40, delta_softplus=False, delta_bias=False, initial_state=False)
    inputs["delta"] = inputs["delta"] * 2000
    testing.check_values(call(backend), inputs, reference)
    inputs = example_inputs(seqlen=40)
    inputs["A"] = -0.2 * inputs["A"]
    testing.check_values(call(backend), inputs, reference)


# ---- agrees with the test vectors ----


@pytest.mark.parametrize("name", vectors.names("selective_scan"))
def test_agrees_with_vector(backend, name):
    vector = vectors.load(name)
    arguments = vector.arguments("delta_softplus")
    for argument in vector.gradients:
        arguments[argument] = arguments[argument].requires_grad_()
    results = dict(zip(("out", "last_state"), call(backend)(**arguments)))
    for key, expected in vector.outputs.items():
        testing.assert_close(results[key], expected, what=key)
    for key, gradient in vectors.run_backward(vector, arguments, results).items():
        testing.assert_close(gradient, vector.gradients[key], what=f"gradient of {key}")


# ---- strides ----


@pytest.mark.parametrize("name", ORDER[:9])
@pytest.mark.parametrize("seqlen", [1, 19])
def test_strides(backend, name, seqlen):
    """B47, B49: every layout of every argument, channel-last included."""
    checks.input_layouts(call(backend), example_inputs(dim=34, seqlen=seqlen), name)


@pytest.mark.parametrize("dim, seqlen", [(5, 3), (34, 19)])
def test_strides_of_incoming_gradients(backend, dim, seqlen):
    """B34."""
    checks.gradient_layouts(call(backend), example_inputs(dim=dim, seqlen=seqlen, ngroups=1))


@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
def test_both_memory_layouts(backend, dtype):
    """The output has u's layout: channel-last in, channel-last out; slices of a wider projection are read in place."""
    inputs = example_inputs(dtype=dtype, dim=48, seqlen=37, B="shared", C="shared")
    expected = testing.run_with_gradients(call(backend), inputs)
    assert expected[0][0].is_contiguous()
    wide = torch.zeros(2, 37, 100, dtype=dtype)
    last = dict(inputs)
    for at, name in ((3, "u"), (51, "z")):
        last[name] = wide[..., at : at + 48].transpose(1, 2).copy_(inputs[name])
    last["delta"] = testing.transposed(inputs["delta"])
    found = testing.run_with_gradients(call(backend), last, upstream=expected[1])
    assert found[0][0].transpose(1, 2).is_contiguous()
    for name in ("u", "z", "delta"):
        assert found[2][name].transpose(1, 2).is_contiguous()
    for name, gradient in found[2].items():
        testing.assert_close(gradient, expected[2][name], gradient=True)
    testing.assert_close(found[0][0], expected[0][0])


def test_broadcast_steps(backend):
    """Stride 0: one step size for all channels (expanded), and its gradient."""
    inputs = example_inputs(dim=6)
    delta = inputs["delta"][:, :1]
    found = testing.run_with_gradients(
        lambda delta, **i: call(backend)(delta=delta.expand(2, 6, 11), **i), {**inputs, "delta": delta}
    )
    expected = testing.run_with_gradients(call(backend), {**inputs, "delta": delta.repeat(1, 6, 1)}, upstream=found[1])
    testing.assert_close(found[2]["delta"], expected[2]["delta"].sum(1, keepdim=True), gradient=True)


def test_strides_beyond_32_bits(backend):
    """B55: offsets past 2^31 elements."""
    storage = torch.empty(2**31 + 4096, dtype=torch.bfloat16, device=backend.device)
    inputs = example_inputs(dtype=torch.bfloat16, seqlen=9)
    far = storage.as_strided(inputs["u"].shape, (2**31 - 64, 32, 1)).copy_(inputs["u"])
    expected = testing.run_with_gradients(call(backend), inputs)
    found = testing.run_with_gradients(call(backend), {**inputs, "u": far}, upstream=expected[1])
    assert checks.equal_runs(found, expected)


# ---- gradcheck, opcheck ----


@pytest.mark.parametrize("subset", SUBSETS, ids=subset_id)
@pytest.mark.parametrize("kind", ["constant", "shared", "grouped"])
def test_gradcheck(backend, subset, kind):
    """B39: through out and last_state, for every input."""
    for softplus in (False, True) if backend.name != "emulated" else (subset["delta_bias"],):
        options = dict(batch=2, dim=4, seqlen=10, dstate=2, B=kind, C=kind, delta_softplus=softplus)
        inputs = example_inputs(dtype=torch.float64, **options, **subset)
        testing.check_gradcheck(call(backend), inputs)


@pytest.mark.parametrize("subset", SUBSETS, ids=subset_id)
def test_opcheck(backend, subset):
    """B100: fakes promise what kernels do, memory layout included."""
    for layout, packing in product((lambda t: t, testing.transposed, testing.sliced), (None, "seq_idx", "cu_seqlens")):
        inputs = example_inputs(packing=packing, **subset)
        softplus = inputs.pop("delta_softplus")
        given = {k: layout(v) if k in ("u", "delta", "z", "B", "C") else v for k, v in inputs.items()}
        leaves = {k: v.detach().requires_grad_(v.is_floating_point()) for k, v in given.items()}
        everything = checks.OPCHECK if packing is None else checks.OPCHECK[:3]
        arguments = [leaves.get(name) for name in ORDER]
        torch.library.opcheck(backend.op("selective_scan").default, (*arguments, softplus), test_utils=everything)
        plain = [given.get(name) for name in ORDER]
        torch.library.opcheck(backend.op("selective_scan_fwd").default, (*plain, softplus, True), test_utils=everything)
        out, last_state, states = backend.op("selective_scan_fwd")(*plain, softplus, True)
        backward = (out, last_state, *plain, softplus, states)
        torch.library.opcheck(backend.op("selective_scan_bwd").default, backward, test_utils=everything)


# ---- compile, export, functional transforms ----


@pytest.mark.parametrize("packing", [None, "seq_idx", "cu_seqlens"])
def test_compile_with_dynamic_length(backend, packing):
    """B98."""
    lengths = (7, 17, 33) if packing else (7, 2, 3, 17, 33)
    checks.compiles_once(call(backend), [example_inputs(seqlen=seqlen, packing=packing) for seqlen in lengths])


def test_export(backend):
    class Scan(torch.nn.Module):
        def forward(self, u, delta, A, B):
            return backend.op("selective_scan")(u, delta, A, B, B)

    inputs = example_inputs(seqlen=12, B="shared")
    arguments = tuple(inputs[name] for name in ORDER[:4])
    length = torch.export.Dim("length", min=2, max=4096)
    dynamic = ({2: length}, {2: length}, None, {2: length})
    program = torch.export.export(Scan(), arguments, dynamic_shapes=dynamic).run_decompositions()
    assert any("selective_scan_fwd" in str(node.target) for node in program.graph.nodes)
    longer = example_inputs(seqlen=31, B="shared")
    arguments = tuple(longer[name] for name in ORDER[:4])
    assert all(map(torch.equal, program.module()(*arguments), Scan()(*arguments)))


def test_checkpoint(backend):
    inputs = example_inputs()
    expected = testing.run_with_gradients(call(backend), inputs)

    def recomputed(**inputs):
        return torch.utils.checkpoint.checkpoint(call(backend), use_reentrant=False, **inputs)

    assert checks.equal_runs(testing.run_with_gradients(recomputed, inputs), expected)


def test_functional_transforms(backend):
    """B45."""
    checks.functional_transforms(call(backend), example_inputs(seqlen=9), batched="u")


def test_what_cannot_be_differentiated_is_refused(backend):
    inputs = example_inputs()
    checks.refusals(lambda u: call(backend)(**{**inputs, "u": u}), "selective_scan", inputs["u"])


# ---- determinism, CPU levels ----


@pytest.mark.parametrize("batch, dim, seqlen", [(1, 300, 50), (40, 33, 9)])
@pytest.mark.parametrize("kind", ["shared", "constant"])
def test_bitwise_repeatable_for_any_number_of_threads(backend, batch, dim, seqlen, kind):
    """B96."""
    checks.bitwise_repeatable(
        call(backend), example_inputs(batch=batch, dim=dim, seqlen=seqlen, dstate=16, B=kind, C=kind)
    )


LEVEL_SCRIPT = """
import torch
from mamba_ops import selective_scan, testing
from mamba_ops.reference.selective_scan import example_inputs, selective_scan as reference
for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
    one = dict(ngroups=1)
    for options in (dict(dim=1, dstate=1, **one), dict(dim=37, dstate=16, **one), dict(dim=40, dstate=19, seqlen=33)):
        for packing in (None, "seq_idx", "cu_seqlens"):
            testing.check_values(selective_scan, example_inputs(dtype=dtype, packing=packing, **options), reference)
    last = example_inputs(dtype=dtype, dim=34, seqlen=20)
    last["u"] = testing.transposed(last["u"])
    testing.check_values(selective_scan, last, reference)
"""


LARGE_SCRIPT = """
import torch
from mamba_ops import selective_scan, testing
from mamba_ops.reference.selective_scan import example_inputs
for dtype, dim in ((torch.float32, 1040), (torch.float32, 1000), (torch.float64, 1000)):
    inputs = example_inputs(dtype=dtype, batch=80, dim=dim, seqlen=32, dstate=1, initial_state=False)
    assert inputs["u"].nbytes >= 2**23 > inputs["u"][:20].nbytes
    for layout in (lambda t: t, testing.transposed):
        given = {k: layout(v) if k in ("u", "delta", "z") else v for k, v in inputs.items()}
        (out, _), upstream, gradients = testing.run_with_gradients(selective_scan, given)
        for start in range(0, 80, 20):
            rows = slice(start, start + 20)
            some = {k: v[rows] if k in ("u", "delta", "z", "B", "C") else v for k, v in given.items()}
            (few, _), _, wanted = testing.run_with_gradients(selective_scan, some, upstream=[g[rows] for g in upstream])
            assert torch.equal(out[rows], few)
            for name in ("u", "delta", "z", "B", "C"):
                assert torch.equal(gradients[name][rows], wanted[name]), name
"""


@pytest.mark.parametrize("level", checks.LEVELS)
def test_large_outputs(level):
    """From 8 MB on, outputs whose rows are whole cache lines pass by the caches: the same bits as in small pieces."""
    checks.run_at_level(level, LARGE_SCRIPT)


@pytest.mark.parametrize("level", checks.LEVELS)
def test_every_cpu_level(level):
    checks.run_at_level(level, LEVEL_SCRIPT)


def test_autocast(backend):
    """u, delta, B, C and z are cast; parameters, states and float64 are not."""
    inputs = example_inputs(B="grouped")
    cast = {k: v.bfloat16() if k in ("u", "delta", "B", "C", "z") else v for k, v in inputs.items()}
    with torch.autocast(backend.device, torch.bfloat16):
        found = testing.run_with_gradients(call(backend), inputs)
        assert call(backend)(**example_inputs(dtype=torch.float64))[0].dtype == torch.float64
    expected = testing.run_with_gradients(call(backend), cast, upstream=found[1])
    assert all(map(torch.equal, found[0], expected[0]))
    for name, gradient in found[2].items():
        assert gradient.dtype == inputs[name].dtype
        assert torch.equal(gradient, expected[2][name].to(gradient.dtype))


# ---- error texts ----


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(u=torch.ones(2, 4)), r"u must have shape \(batch, dim, seqlen\), got \(2, 4\)"),
        (dict(u=torch.ones(2, 4, 11).int()), r"u must be float64, float32, bfloat16 or float16, got int32"),
        (
            dict(delta=torch.ones(2, 4, 10)),
            r"delta must have shape \(batch, dim, seqlen\) = \(2, 4, 11\), got \(2, 4, 10\)",
        ),
        (dict(delta=torch.ones(2, 4, 11).double()), r"delta must have u's dtype float32, got float64"),
        (dict(A=torch.ones(3, 3)), r"A must have shape \(dim, dstate\) = \(4, 3\), got \(3, 3\)"),
        (dict(A=torch.ones(4, 3, dtype=torch.complex64)), r"A must be float64, .*, got complex64"),
        (dict(B=torch.ones(2, 3, 3, 11)), r"B must have an ngroups that divides dim = 4, got 3"),
        (dict(C=torch.ones(2, 3, 5)), r"C must have shape \(batch, dstate, seqlen\) = \(2, 3, 11\), got \(2, 3, 5\)"),
        (dict(C=torch.ones(3)), r"C must have shape \(dim, dstate\), \(batch, dstate, seqlen\) or .*, got \(3,\)"),
        (dict(B=torch.ones(2, 3, 11).half()), r"B must have u's dtype float32, got float16"),
        (dict(D=torch.ones(4, 1)), r"D must have shape \(dim,\) = \(4,\), got \(4, 1\)"),
        (dict(z=torch.ones(2, 4, 12)), r"z must have shape \(batch, dim, seqlen\) = \(2, 4, 11\), got \(2, 4, 12\)"),
        (
            dict(initial_state=torch.ones(1, 4, 3)),
            r"initial_state must have shape \(batch, dim, dstate\) = \(2, 4, 3\)",
        ),
        (dict(seq_idx=torch.ones(2, 11)), r"seq_idx must be int32 or int64, got float32"),
        (dict(seq_idx=torch.ones(2, 9).int()), r"seq_idx must have shape \(batch, seqlen\) = \(2, 11\), got \(2, 9\)"),
        (dict(cu_seqlens=torch.tensor([0, 11])), r"with cu_seqlens batch must be 1, got 2"),
    ],
)
def test_error_texts(change, text):
    inputs = {**example_inputs(), **change}
    checks.error_text(mamba_ops.selective_scan, inputs, "selective_scan: " + text)


def test_mixed_devices_name_the_odd_argument():
    """B07."""
    inputs = example_inputs()
    inputs["z"] = inputs["z"].to("meta")
    with pytest.raises(RuntimeError, match=r"selective_scan: .* must be on u's device (cpu|meta), got (cpu|meta)"):
        mamba_ops.selective_scan(**inputs)
