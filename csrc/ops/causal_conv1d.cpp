#include "params/causal_conv1d.h"

#include "ops/check.h"

namespace mamba {
namespace {

bool is_silu(const Checker& check, const std::string& activation) {
  if (activation != "none" && activation != "silu") fail(check.op(), ": activation must be none or silu, got ", activation);
  return activation == "silu";
}

// Checks what forward and backward share, and fills it in.
template <class Params>
Params describe(const Checker& check, const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                const OptionalTensor& initial_state, const OptionalTensor& seq_idx, const OptionalTensor& cu_seqlens,
                const std::string& activation) {
  check.dims("x", x, 3, "(batch, dim, seqlen)");
  check.dims("weight", weight, 2, "(dim, width)");
  Params params{};
  params.silu = is_silu(check, activation);
  params.batch = x.size(0);
  params.dim = x.size(1);
  params.seqlen = x.size(2);
  params.width = weight.size(1);
  check.shape("weight", weight, {{"dim", params.dim}, {"width", params.width}});
  if (params.width < 1) fail(check.op(), ": weight must have shape (dim, width) with width >= 1, got ", shape_text(weight));
  check.shape("bias", bias, {{"dim", params.dim}});
  check.floating("weight", weight);
  check.floating("bias", bias);
  check.floating("initial_state", initial_state);
  params.num_sequences = check_packing(check, seq_idx, cu_seqlens, params.batch, params.seqlen);
  const char* leading = cu_seqlens ? "num_sequences" : "batch";
  check.shape("initial_state", initial_state, {{leading, params.num_sequences}, {"dim", params.dim}, {"width - 1", params.width - 1}});
  params.x = view_of<3>(x);
  params.weight = view_of<2>(weight);
  params.bias = view_of<1>(bias);
  params.initial_state = view_of<3>(initial_state);
  params.seq_idx = view_of<2>(seq_idx);
  params.cu_seqlens = view_of<1>(cu_seqlens);
  return params;
}

std::tuple<Tensor, Tensor> causal_conv1d_fwd(Tensor x, Tensor weight, OptionalTensor bias, OptionalTensor initial_state,
                                             OptionalTensor seq_idx, OptionalTensor cu_seqlens, std::string activation) {
  const Checker check("causal_conv1d", "x", x);
  auto params = describe<CausalConv1dFwd>(check, x, weight, bias, initial_state, seq_idx, cu_seqlens, activation);
  Tensor out = empty_sequence(x);
  Tensor last_state = empty(x, {params.num_sequences, params.dim, params.width - 1}, x.scalar_type());
  params.out = view_of<3>(out);
  params.last_state = view_of<3>(last_state);
  MAMBA_RUN(causal_conv1d_fwd, params, x);
  return {out, last_state};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> causal_conv1d_bwd(OptionalTensor dout, OptionalTensor dlast_state, Tensor x, Tensor weight,
                                                             OptionalTensor bias, OptionalTensor initial_state, OptionalTensor seq_idx,
                                                             OptionalTensor cu_seqlens, std::string activation) {
  const Checker check("causal_conv1d_bwd", "x", x);
  auto params = describe<CausalConv1dBwd>(check, x, weight, bias, initial_state, seq_idx, cu_seqlens, activation);
  check.shape("dout", dout, {{"batch", params.batch}, {"dim", params.dim}, {"seqlen", params.seqlen}});
  const char* leading = cu_seqlens ? "num_sequences" : "batch";
  check.shape("dlast_state", dlast_state, {{leading, params.num_sequences}, {"dim", params.dim}, {"width - 1", params.width - 1}});
  check.same_dtype("dout", dout);
  check.same_dtype("dlast_state", dlast_state);
  Tensor dx = empty_sequence(x);
  Tensor dweight = empty_gradient(x, weight);
  Tensor dbias = empty_gradient(x, bias);
  Tensor dinitial_state = empty_gradient(x, initial_state);
  params.dout = view_of<3>(dout);
  params.dlast_state = view_of<3>(dlast_state);
  params.dx = view_of<3>(dx);
  params.dweight = view_of<2>(dweight);
  if (bias) params.dbias = view_of<1>(dbias);
  if (initial_state) params.dinitial_state = view_of<3>(dinitial_state);
  MAMBA_RUN(causal_conv1d_bwd, params, x);
  return {dx, dweight, dbias, dinitial_state};
}

}  // namespace

MAMBA_REGISTER_KERNELS(m) {
  m.impl("causal_conv1d_fwd", TORCH_BOX(&causal_conv1d_fwd));
  m.impl("causal_conv1d_bwd", TORCH_BOX(&causal_conv1d_bwd));
}

}  // namespace mamba
