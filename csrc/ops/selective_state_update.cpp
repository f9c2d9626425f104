#include "params/selective_state_update.h"

#include "ops/check.h"

namespace mamba {
namespace {

// Views with a head axis; without heads it has size 1. `lead` axes stand before it.
template <int N>
View<N> with_heads(const Tensor& tensor, bool heads, int lead) {
  if (heads) return view_of<N>(tensor);
  const View<N - 1> flat = view_of<N - 1>(tensor);
  View<N> view;
  view.data = flat.data;
  view.dtype = flat.dtype;
  for (int axis = 0; axis < N - 1; ++axis) view.stride[axis < lead ? axis : axis + 1] = flat.stride[axis];
  return view;
}
template <int N>
View<N> with_heads(const OptionalTensor& tensor, bool heads, int lead) {
  return tensor ? with_heads<N>(*tensor, heads, lead) : View<N>{};
}

struct Arguments {
  const Tensor &state, &x, &dt, &A, &B, &C;
  const OptionalTensor &D, &z, &dt_bias;
};

// Checks what all forms share and fills it in; returns whether there is a head axis.
bool describe(SelectiveStateUpdateInputs& p, const Checker& check, const Arguments& in, bool dt_softplus, bool any_entries) {
  const bool heads = in.x.dim() == 3;
  if (in.x.dim() != 2 && !heads) fail(check.op(), ": x must have shape (batch, dim) or (batch, nheads, headdim), got ", shape_text(in.x));
  check.dims("state", in.state, heads ? 4 : 3, heads ? "(batch, nheads, headdim, dstate)" : "(batch, dim, dstate)");
  check.dims("B", in.B, heads ? 3 : 2, heads ? "(batch, ngroups, dstate)" : "(batch, dstate)");
  p.batch = in.x.size(0);
  p.nheads = heads ? in.x.size(1) : 1;
  p.headdim = in.x.size(heads ? 2 : 1);
  p.dstate = in.state.size(heads ? 3 : 2);
  p.ngroups = heads ? in.B.size(1) : 1;
  p.entries = in.state.size(0);
  p.dt_softplus = dt_softplus;
  const Size batch{"batch", p.batch}, nheads{"nheads", p.nheads}, headdim{heads ? "headdim" : "dim", p.headdim};
  const Size dstate{"dstate", p.dstate}, ngroups{"ngroups", p.ngroups};
  const Size entries{any_entries ? "entries" : "batch", any_entries ? in.state.size(0) : p.batch};
  const auto shape = [&](const char* name, const auto& tensor, std::initializer_list<Size> with, std::initializer_list<Size> without) {
    if (heads)
      check.shape(name, tensor, with);
    else
      check.shape(name, tensor, without);
  };
  shape("state", in.state, {entries, nheads, headdim, dstate}, {entries, headdim, dstate});
  shape("dt", in.dt, {batch, nheads, headdim}, {batch, headdim});
  shape("A", in.A, {nheads, headdim, dstate}, {headdim, dstate});
  shape("B", in.B, {batch, ngroups, dstate}, {batch, dstate});
  shape("C", in.C, {batch, ngroups, dstate}, {batch, dstate});
  shape("D", in.D, {nheads, headdim}, {headdim});
  shape("z", in.z, {batch, nheads, headdim}, {batch, headdim});
  shape("dt_bias", in.dt_bias, {nheads, headdim}, {headdim});
  if (p.ngroups < 1 || p.nheads % p.ngroups != 0)
    fail(check.op(), ": B must have an ngroups that divides nheads = ", p.nheads, ", got ", p.ngroups);
  check.same_dtype("dt", in.dt);
  check.same_dtype("B", in.B);
  check.same_dtype("C", in.C);
  check.same_dtype("z", in.z);
  check.floating("state", in.state);
  check.floating("A", in.A);
  check.floating("D", in.D);
  check.floating("dt_bias", in.dt_bias);
  p.state = with_heads<4>(in.state, heads, 1);
  p.x = with_heads<3>(in.x, heads, 1);
  p.dt = with_heads<3>(in.dt, heads, 1);
  p.z = with_heads<3>(in.z, heads, 1);
  p.A = with_heads<3>(in.A, heads, 0);
  p.B = with_heads<3>(in.B, heads, 1);
  p.C = with_heads<3>(in.C, heads, 1);
  p.D = with_heads<2>(in.D, heads, 0);
  p.dt_bias = with_heads<2>(in.dt_bias, heads, 0);
  return heads;
}

std::tuple<Tensor, Tensor> selective_state_update_fwd(const Tensor& state, const Tensor& x, const Tensor& dt, const Tensor& A,
                                                      const Tensor& B, const Tensor& C, const OptionalTensor& D, const OptionalTensor& z,
                                                      const OptionalTensor& dt_bias, bool dt_softplus) {
  const Checker check("selective_state_update", "x", x);
  SelectiveStateUpdateFwd p{};
  const bool heads = describe(p, check, {state, x, dt, A, B, C, D, z, dt_bias}, dt_softplus, false);
  Tensor out = empty(x, sizes_of(x), x.scalar_type());
  Tensor new_state = empty(x, sizes_of(state), state.scalar_type());
  p.out = with_heads<3>(out, heads, 1);
  p.new_state = with_heads<4>(new_state, heads, 1);
  MAMBA_RUN(selective_state_update_fwd, p, x);
  return {out, new_state};
}

Tensor selective_state_update_(const Tensor& state, const Tensor& x, const Tensor& dt, const Tensor& A, const Tensor& B, const Tensor& C,
                               const OptionalTensor& D, const OptionalTensor& z, const OptionalTensor& dt_bias, bool dt_softplus,
                               const OptionalTensor& state_batch_indices) {
  const Checker check("selective_state_update_", "x", x);
  SelectiveStateUpdateFwd p{};
  const bool heads = describe(p, check, {state, x, dt, A, B, C, D, z, dt_bias}, dt_softplus, state_batch_indices.has_value());
  check_entries(check, "state_batch_indices", state_batch_indices, p.batch, "state", state);
  mark_mutated("selective_state_update_", "state", state);
  Tensor out = empty(x, sizes_of(x), x.scalar_type());
  p.indices = view_of<1>(state_batch_indices);
  p.out = with_heads<3>(out, heads, 1);
  p.new_state = p.state;
  MAMBA_RUN(selective_state_update_fwd, p, x);
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> selective_state_update_bwd(
    const OptionalTensor& dout, const OptionalTensor& dnew_state, const Tensor& state, const Tensor& x, const Tensor& dt, const Tensor& A,
    const Tensor& B, const Tensor& C, const OptionalTensor& D, const OptionalTensor& z, const OptionalTensor& dt_bias, bool dt_softplus) {
  const Checker check("selective_state_update_bwd", "x", x);
  SelectiveStateUpdateBwd p{};
  const bool heads = describe(p, check, {state, x, dt, A, B, C, D, z, dt_bias}, dt_softplus, false);
  if (dout && sizes_of(*dout) != sizes_of(x))
    fail("selective_state_update_bwd: dout must have x's shape ", shape_text(x), ", got ", shape_text(*dout));
  if (dnew_state && sizes_of(*dnew_state) != sizes_of(state))
    fail("selective_state_update_bwd: dnew_state must have state's shape ", shape_text(state), ", got ", shape_text(*dnew_state));
  check.same_dtype("dout", dout);
  check.floating("dnew_state", dnew_state);
  Tensor dstate = empty_gradient(x, state), dx = empty_gradient(x, x), ddt = empty_gradient(x, dt), dA = empty_gradient(x, A);
  Tensor dB = empty_gradient(x, B), dC = empty_gradient(x, C), dD = empty_gradient(x, D), dz = empty_gradient(x, z);
  Tensor ddt_bias = empty_gradient(x, dt_bias);
  p.dout = with_heads<3>(dout, heads, 1);
  p.dnew_state = with_heads<4>(dnew_state, heads, 1);
  p.grad_state = with_heads<4>(dstate, heads, 1);
  p.dx = with_heads<3>(dx, heads, 1);
  p.ddt = with_heads<3>(ddt, heads, 1);
  p.dA = with_heads<3>(dA, heads, 0);
  p.dB = with_heads<3>(dB, heads, 1);
  p.dC = with_heads<3>(dC, heads, 1);
  if (z) p.dz = with_heads<3>(dz, heads, 1);
  if (D) p.dD = with_heads<2>(dD, heads, 0);
  if (dt_bias) p.ddt_bias = with_heads<2>(ddt_bias, heads, 0);
  MAMBA_RUN(selective_state_update_bwd, p, x);
  return {dstate, dx, ddt, dA, dB, dC, dD, dz, ddt_bias};
}

}  // namespace

MAMBA_REGISTER_KERNELS(m) {
  m.impl("selective_state_update_fwd", TORCH_BOX(&selective_state_update_fwd));
  m.impl("selective_state_update_", TORCH_BOX(&selective_state_update_));
  m.impl("selective_state_update_bwd", TORCH_BOX(&selective_state_update_bwd));
}

}  // namespace mamba
