// mamba_step: one token through a stack of Mamba layers, what the kernels get. float accumulation; every pointer is contiguous memory.
//
// Packed weights of one layer, one after the other, rows as in nn.Linear: in_proj (2 d_inner, d_model), x_proj (dt_rank + 2 d_state,
// d_inner), dt_proj (d_inner, dt_rank), out_proj (d_model, d_inner). Packed parameters of one layer, float, each row of channels padded
// with zeros to a multiple of `lane_padding`: norm weight (d_model), in_proj bias (x part, z part), conv weight (d_conv rows), conv bias,
// dt_proj bias, A log2(e) (d_state rows), D, out_proj bias (d_model).
#pragma once

#include "common/view.h"
#include "params/kernel.h"

namespace mamba {

constexpr int64_t lane_padding = 16;

MAMBA_INLINE int64_t padded_lanes(int64_t count) { return (count + lane_padding - 1) / lane_padding * lane_padding; }

struct MambaStep {
  int64_t n_layer, batch, d_model, d_inner, d_state, d_conv, dt_rank;
  int64_t state_len;  // columns of conv_state, at least d_conv - 1
  float eps;
  bool block;  // hidden + mixer(norm(hidden)), else mixer(hidden)
  DType weight_dtype;
  const void* weights;      // (n_layer, weights_size)
  const float* parameters;  // (n_layer, parameters_size)
  View<2> hidden;           // (batch, d_model)
  View<4> conv_state;       // (n_layer, batch, d_inner, state_len), written
  View<4> ssm_state;        // (n_layer, batch, d_inner, d_state), written
  float* out;               // (batch, d_model)

  MAMBA_INLINE int64_t weights_size() const { return 3 * d_inner * d_model + (dt_rank + 2 * d_state) * d_inner + d_inner * dt_rank; }
  MAMBA_INLINE int64_t parameters_size() const { return 2 * padded_lanes(d_model) + (5 + d_conv + d_state) * padded_lanes(d_inner); }
};

// Where the weights and parameters of one layer lie.
template <class S>
struct LayerWeights {
  const S *in_proj, *x_proj, *dt_proj, *out_proj;
  const float *norm, *in_bias, *conv_weight, *conv_bias, *dt_bias, *A, *D, *out_bias;

  LayerWeights(const MambaStep& p, int64_t index) {
    const int64_t model = padded_lanes(p.d_model), inner = padded_lanes(p.d_inner);
    in_proj = static_cast<const S*>(p.weights) + index * p.weights_size();
    x_proj = in_proj + 2 * p.d_inner * p.d_model;
    dt_proj = x_proj + (p.dt_rank + 2 * p.d_state) * p.d_inner;
    out_proj = dt_proj + p.d_inner * p.dt_rank;
    norm = p.parameters + index * p.parameters_size();
    in_bias = norm + model;
    conv_weight = in_bias + 2 * inner;
    conv_bias = conv_weight + p.d_conv * inner;
    dt_bias = conv_bias + inner;
    A = dt_bias + inner;
    D = A + p.d_state * inner;
    out_bias = D + inner;
  }
};

// logits = weight . norm(hidden)
struct MambaStepLogits {
  int64_t batch, d_model, vocab;
  float eps;
  View<2> hidden;       // (batch, d_model)
  View<1> norm_weight;  // (d_model)
  DType weight_dtype;
  const void* weight;  // (vocab, d_model)
  float* out;          // (batch, vocab)
};

}  // namespace mamba

MAMBA_KERNEL(mamba_step, MambaStep)
MAMBA_KERNEL(mamba_step_logits, MambaStepLogits)
