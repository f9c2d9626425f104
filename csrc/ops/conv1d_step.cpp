#include "params/conv1d_step.h"

#include "ops/check.h"

namespace mamba {
namespace {

// x of one token may lack the last axis.
View<3> samples_view(const Tensor& x) {
  if (x.dim() == 3) return view_of<3>(x);
  const View<2> flat = view_of<2>(x);
  View<3> view;
  view.data = flat.data;
  view.dtype = flat.dtype;
  view.stride[0] = flat.stride[0];
  view.stride[1] = flat.stride[1];
  return view;
}
View<3> samples_view(const OptionalTensor& x) { return x ? samples_view(*x) : View<3>{}; }

// Checks what the forms have in common and fills it in.
template <class Params>
Params describe(const Checker& check, const Tensor& x, const Tensor& state, const Tensor& weight, const OptionalTensor& bias,
                const std::string& activation, bool any_entries) {
  if (x.dim() != 2 && x.dim() != 3) fail(check.op(), ": x must have shape (batch, dim) or (batch, dim, seqlen), got ", shape_text(x));
  check.dims("weight", weight, 2, "(dim, width)");
  check.dims("conv_state", state, 3, "(batch, dim, state_len)");
  if (activation != "none" && activation != "silu") fail(check.op(), ": activation must be none or silu, got ", activation);
  Params p{};
  p.silu = activation == "silu";
  p.batch = x.size(0);
  p.dim = x.size(1);
  p.tokens = x.dim() == 3 ? x.size(2) : 1;
  p.width = weight.size(1);
  p.state_len = state.size(2);
  p.entries = state.size(0);
  check.shape("weight", weight, {{"dim", p.dim}, {"width", p.width}});
  if (p.width < 1) fail(check.op(), ": weight must have shape (dim, width) with width >= 1, got ", shape_text(weight));
  check.shape("bias", bias, {{"dim", p.dim}});
  if (any_entries)
    check.shape("conv_state", state, {{"entries", state.size(0)}, {"dim", p.dim}, {"state_len", p.state_len}});
  else
    check.shape("conv_state", state, {{"batch", p.batch}, {"dim", p.dim}, {"state_len", p.state_len}});
  if (p.state_len < p.width - 1)
    fail(check.op(), ": conv_state must hold at least width - 1 = ", p.width - 1, " samples, got shape ", shape_text(state));
  check.floating("weight", weight);
  check.floating("bias", bias);
  check.floating("conv_state", state);
  p.x = samples_view(x);
  p.state = view_of<3>(state);
  p.weight = view_of<2>(weight);
  p.bias = view_of<1>(bias);
  return p;
}

std::tuple<Tensor, Tensor> conv1d_step_fwd(const Tensor& x, const Tensor& conv_state, const Tensor& weight, const OptionalTensor& bias,
                                           const std::string& activation) {
  const Checker check("conv1d_step", "x", x);
  auto p = describe<Conv1dStepFwd>(check, x, conv_state, weight, bias, activation, false);
  Tensor out = empty(x, sizes_of(x), x.scalar_type());
  Tensor new_state = empty(x, sizes_of(conv_state), conv_state.scalar_type());
  p.out = samples_view(out);
  p.new_state = view_of<3>(new_state);
  MAMBA_RUN(conv1d_step_fwd, p, x);
  return {out, new_state};
}

Tensor conv1d_step_(const Tensor& x, const Tensor& conv_state, const Tensor& weight, const OptionalTensor& bias,
                    const std::string& activation, const OptionalTensor& cache_seqlens, const OptionalTensor& conv_state_indices) {
  const Checker check("conv1d_step_", "x", x);
  auto p = describe<Conv1dStepFwd>(check, x, conv_state, weight, bias, activation, conv_state_indices.has_value());
  check.shape("cache_seqlens", cache_seqlens, {{"batch", p.batch}});
  check.index("cache_seqlens", cache_seqlens);
  check_entries(check, "conv_state_indices", conv_state_indices, p.batch, "conv_state", conv_state);
  mark_mutated("conv1d_step_", "conv_state", conv_state);
  Tensor out = empty(x, sizes_of(x), x.scalar_type());
  p.out = samples_view(out);
  p.new_state = p.state;
  p.cache_seqlens = view_of<1>(cache_seqlens);
  p.indices = view_of<1>(conv_state_indices);
  MAMBA_RUN(conv1d_step_fwd, p, x);
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> conv1d_step_bwd(const OptionalTensor& dout, const OptionalTensor& dnew_state, const Tensor& x,
                                                           const Tensor& conv_state, const Tensor& weight, const OptionalTensor& bias,
                                                           const std::string& activation) {
  const Checker check("conv1d_step_bwd", "x", x);
  auto p = describe<Conv1dStepBwd>(check, x, conv_state, weight, bias, activation, false);
  if (dout && sizes_of(*dout) != sizes_of(x))
    fail("conv1d_step_bwd: dout must have x's shape ", shape_text(x), ", got ", shape_text(*dout));
  check.same_dtype("dout", dout);
  check.shape("dnew_state", dnew_state, {{"batch", p.batch}, {"dim", p.dim}, {"state_len", p.state_len}});
  check.floating("dnew_state", dnew_state);
  Tensor dx = empty(x, sizes_of(x), x.scalar_type()), dstate = empty_gradient(x, conv_state);
  Tensor dweight = empty_gradient(x, weight), dbias = empty_gradient(x, bias);
  p.dout = samples_view(dout);
  p.dnew_state = view_of<3>(dnew_state);
  p.dx = samples_view(dx);
  p.dstate = view_of<3>(dstate);
  p.dweight = view_of<2>(dweight);
  if (bias) p.dbias = view_of<1>(dbias);
  MAMBA_RUN(conv1d_step_bwd, p, x);
  return {dx, dstate, dweight, dbias};
}

// A (dim, width) matrix, also given flat as (dim * width,).
View<2> filter_view(const Checker& check, const char* name, const Tensor& tensor, int64_t dim, int64_t width) {
  if (tensor.dim() == 2) {
    check.shape(name, tensor, {{"dim", dim}, {"width", width}});
    return view_of<2>(tensor);
  }
  check.shape(name, tensor, {{"dim * width", dim * width}});
  View<2> view;
  view.data = data_of(tensor);
  view.dtype = dtype_of(tensor);
  view.stride[0] = tensor.stride(0) * width;
  view.stride[1] = tensor.stride(0);
  return view;
}

void conv1d_step_bwd_(const Tensor& d_y, const Tensor& state, const Tensor& weight, const Tensor& d_x, const Tensor& d_weight,
                      const OptionalTensor& d_bias) {
  const Checker check("conv1d_step_bwd_", "d_y", d_y);
  Conv1dStepSeedBwd p{};
  const bool batched = d_y.dim() == 2;
  if (!batched) check.dims("d_y", d_y, 1, "(dim,) or (batch, dim)");
  p.batch = batched ? d_y.size(0) : 1;
  p.dim = d_y.size(batched ? 1 : 0);
  const int64_t numbers = weight.numel();
  p.width = weight.dim() == 2 ? weight.size(1) : p.dim ? numbers / p.dim : 1;
  if (p.width < 1 || numbers != p.dim * p.width)
    fail("conv1d_step_bwd_: weight must have shape (dim, width) or (dim * width,) with dim = ", p.dim, ", got ", shape_text(weight));
  p.weight = filter_view(check, "weight", weight, p.dim, p.width);
  p.dweight = filter_view(check, "d_weight", d_weight, p.dim, p.width);
  check.shape("d_bias", d_bias, {{"dim", p.dim}});
  const auto vector_view = [&](const char* name, const Tensor& tensor) {
    View<2> view;
    if (batched) {
      check.shape(name, tensor, {{"batch", p.batch}, {"dim", p.dim}});
      return view_of<2>(tensor);
    }
    check.shape(name, tensor, {{"dim", p.dim}});
    view.data = data_of(tensor);
    view.dtype = dtype_of(tensor);
    view.stride[1] = tensor.stride(0);
    return view;
  };
  p.dy = vector_view("d_y", d_y);
  p.dx = vector_view("d_x", d_x);
  if (batched && state.dim() == 3) {
    check.shape("state", state, {{"batch", p.batch}, {"dim", p.dim}, {"width", p.width}});
    p.state = view_of<3>(state);
  } else {
    if (batched) check.dims("state", state, 3, "(batch, dim, width)");
    const View<2> filter = filter_view(check, "state", state, p.dim, p.width);
    p.state.data = filter.data;
    p.state.dtype = filter.dtype;
    p.state.stride[1] = filter.stride[0];
    p.state.stride[2] = filter.stride[1];
  }
  check.same_dtype("d_x", d_x);
  check.floating("state", state);
  check.floating("weight", weight);
  check.floating("d_weight", d_weight);
  check.floating("d_bias", d_bias);
  p.dbias = view_of<1>(d_bias);
  mark_mutated("conv1d_step_bwd_", "d_x", d_x);
  mark_mutated("conv1d_step_bwd_", "d_weight", d_weight);
  if (d_bias) mark_mutated("conv1d_step_bwd_", "d_bias", *d_bias);
  MAMBA_RUN(conv1d_step_seed_bwd, p, d_y);
}

}  // namespace

MAMBA_REGISTER_KERNELS(m) {
  m.impl("conv1d_step_fwd", TORCH_BOX(&conv1d_step_fwd));
  m.impl("conv1d_step_", TORCH_BOX(&conv1d_step_));
  m.impl("conv1d_step_bwd", TORCH_BOX(&conv1d_step_bwd));
  m.impl("conv1d_step_bwd_", TORCH_BOX(&conv1d_step_bwd_));
}

}  // namespace mamba
