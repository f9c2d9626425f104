#include "params/mamba_step.h"

#include "ops/check.h"

namespace mamba {
namespace {

void check_weights(const Checker& check, const char* name, const Tensor& weights) {
  check.floating(name, weights);
  if (weights.scalar_type() == ScalarType::Double) fail(check.op(), ": ", name, " must be float32, bfloat16 or float16, got float64");
  if (!weights.is_contiguous()) fail(check.op(), ": ", name, " must be contiguous, got a strided tensor of shape ", shape_text(weights));
}

Tensor mamba_step_(const Tensor& hidden, const Tensor& conv_state, const Tensor& ssm_state, const Tensor& weights, const Tensor& parameters,
                   int64_t d_conv, int64_t dt_rank, double eps, bool block) {
  const Checker check("mamba_step_", "hidden", hidden);
  check.dims("hidden", hidden, 2, "(batch, d_model)");
  check.dims("conv_state", conv_state, 4, "(n_layer, batch, d_inner, state_len)");
  check.dims("ssm_state", ssm_state, 4, "(n_layer, batch, d_inner, d_state)");
  MambaStep p{};
  p.batch = hidden.size(0);
  p.d_model = hidden.size(1);
  p.n_layer = conv_state.size(0);
  p.d_inner = conv_state.size(2);
  p.state_len = conv_state.size(3);
  p.d_state = ssm_state.size(3);
  p.d_conv = d_conv;
  p.dt_rank = dt_rank;
  p.eps = static_cast<float>(eps);
  p.block = block;
  if (d_conv < 1) fail("mamba_step_: d_conv must be at least 1, got ", d_conv);
  if (dt_rank < 1) fail("mamba_step_: dt_rank must be at least 1, got ", dt_rank);
  if (p.state_len < d_conv - 1)
    fail("mamba_step_: conv_state must hold at least d_conv - 1 = ", d_conv - 1, " samples, got shape ", shape_text(conv_state));
  const Size n_layer{"n_layer", p.n_layer}, batch{"batch", p.batch}, d_inner{"d_inner", p.d_inner};
  check.shape("conv_state", conv_state, {n_layer, batch, d_inner, {"state_len", p.state_len}});
  check.shape("ssm_state", ssm_state, {n_layer, batch, d_inner, {"d_state", p.d_state}});
  check.shape("weights", weights, {n_layer, {"weights of a layer", p.weights_size()}});
  check.shape("parameters", parameters, {n_layer, {"parameters of a layer", p.parameters_size()}});
  check.floating("conv_state", conv_state);
  check.floating("ssm_state", ssm_state);
  check_weights(check, "weights", weights);
  check.device("parameters", parameters);
  if (parameters.scalar_type() != ScalarType::Float || !parameters.is_contiguous())
    fail("mamba_step_: parameters must be contiguous float32, got ", dtype_name(parameters.scalar_type()));
  mark_mutated("mamba_step_", "conv_state", conv_state);
  mark_mutated("mamba_step_", "ssm_state", ssm_state);

  Tensor out = empty(hidden, {p.batch, p.d_model}, ScalarType::Float);
  p.weight_dtype = dtype_of(weights);
  p.weights = data_of(weights);
  p.parameters = static_cast<const float*>(data_of(parameters));
  p.hidden = view_of<2>(hidden);
  p.conv_state = view_of<4>(conv_state);
  p.ssm_state = view_of<4>(ssm_state);
  p.out = static_cast<float*>(data_of(out));
  MAMBA_RUN(mamba_step, p, hidden);
  return out;
}

Tensor mamba_step_logits(const Tensor& hidden, const Tensor& norm_weight, const Tensor& weight, double eps) {
  const Checker check("mamba_step_logits", "hidden", hidden);
  check.dims("hidden", hidden, 2, "(batch, d_model)");
  check.dims("weight", weight, 2, "(vocab, d_model)");
  MambaStepLogits p{};
  p.batch = hidden.size(0);
  p.d_model = hidden.size(1);
  p.vocab = weight.size(0);
  p.eps = static_cast<float>(eps);
  check.shape("norm_weight", norm_weight, {{"d_model", p.d_model}});
  check.shape("weight", weight, {{"vocab", p.vocab}, {"d_model", p.d_model}});
  check.floating("norm_weight", norm_weight);
  check_weights(check, "weight", weight);

  Tensor out = empty(hidden, {p.batch, p.vocab}, ScalarType::Float);
  p.hidden = view_of<2>(hidden);
  p.norm_weight = view_of<1>(norm_weight);
  p.weight_dtype = dtype_of(weight);
  p.weight = data_of(weight);
  p.out = static_cast<float*>(data_of(out));
  MAMBA_RUN(mamba_step_logits, p, hidden);
  return out;
}

}  // namespace

MAMBA_REGISTER_KERNELS(m) {
  m.impl("mamba_step_", TORCH_BOX(&mamba_step_));
  m.impl("mamba_step_logits", TORCH_BOX(&mamba_step_logits));
}

}  // namespace mamba
