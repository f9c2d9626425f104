// Every operator's schema, with its shapes. Sizes that follow from tensors are never arguments.
#include "ops/api.h"

MAMBA_SCHEMAS(m) {
  // The CPU level in use: baseline, avx2 or avx512.
  m.def("cpu_capability() -> str");

  // x, z, residual (..., dim); weight, bias (dim); out (..., dim); residual_out as residual, or (0,) without one;
  // rms (...) or, with a group size, (..., dim / group_size)
  m.def(
      "rms_norm(Tensor x, Tensor? weight=None, Tensor? bias=None, Tensor? z=None, Tensor? residual=None, float eps=1e-05, "
      "int? group_size=None, bool norm_before_gate=True, bool residual_in_fp32=False) -> (Tensor out, Tensor residual_out, Tensor rms)");
  m.def(
      "rms_norm_fwd(Tensor x, Tensor? weight, Tensor? bias, Tensor? z, Tensor? residual, float eps, int? group_size, "
      "bool norm_before_gate, bool residual_in_fp32) -> (Tensor out, Tensor residual_out, Tensor rms)");
  // dout, dresidual_out: absent counts as zero. A gradient has shape (0,) when its argument is absent; dresidual also when it equals dx
  // (x and residual of one dtype).
  m.def(
      "rms_norm_bwd(Tensor? dout, Tensor? dresidual_out, Tensor x, Tensor? weight, Tensor? bias, Tensor? z, Tensor? residual, Tensor rms, "
      "int? group_size, bool norm_before_gate) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dz, Tensor dresidual)");
  // dy, x, dx (..., dim); weight, dweight (dim); rms (...). dx is overwritten, dweight accumulated onto.
  m.def("rms_norm_bwd_(Tensor dy, Tensor x, Tensor weight, Tensor rms, Tensor(a!) dx, Tensor(b!) dweight) -> ()");

  // u, delta, z (batch, dim, seqlen); A (dim, dstate); B, C (dim, dstate), (batch, dstate, seqlen) or (batch, ngroups, dstate, seqlen);
  // D, delta_bias (dim); states (batch, dim, dstate), leading size num_sequences with cu_seqlens; seq_idx (batch, seqlen)
  m.def(
      "selective_scan(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D=None, Tensor? z=None, Tensor? delta_bias=None, "
      "Tensor? initial_state=None, Tensor? seq_idx=None, Tensor? cu_seqlens=None, bool delta_softplus=False) "
      "-> (Tensor out, Tensor last_state)");
  m.def(
      "selective_scan_fwd(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias, "
      "Tensor? initial_state, Tensor? seq_idx, Tensor? cu_seqlens, bool delta_softplus, bool save_states) "
      "-> (Tensor out, Tensor last_state, Tensor chunk_states)");
  m.def(
      "selective_scan_bwd(Tensor? dout, Tensor? dlast_state, Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, "
      "Tensor? delta_bias, Tensor? initial_state, Tensor? seq_idx, Tensor? cu_seqlens, bool delta_softplus, Tensor chunk_states) "
      "-> (Tensor du, Tensor ddelta, Tensor dA, Tensor dB, Tensor dC, Tensor dD, Tensor dz, Tensor ddelta_bias, Tensor dinitial_state)");

  // x, gates, logits, states (batch, ...) with time along dim >= 1; last_state and initial_state (batch, ...) without the time axis,
  // leading size num_sequences with cu_seqlens; seq_idx (batch, seqlen). Without return_states: states (0,)
  m.def(
      "linear_recurrence(Tensor x, Tensor gates, Tensor? initial_state=None, Tensor? seq_idx=None, Tensor? cu_seqlens=None, "
      "int dim=1, bool reverse=False, bool return_states=True) -> (Tensor states, Tensor last_state)");
  m.def(
      "gated_scan(Tensor x, Tensor logits, Tensor? initial_state=None, Tensor? seq_idx=None, Tensor? cu_seqlens=None, "
      "int dim=1, bool reverse=False, bool return_states=True) -> (Tensor states, Tensor last_state)");
  // chunk_states: every 64th state, flat, in the accumulation dtype; empty without save_states
  m.def(
      "linear_recurrence_fwd(Tensor x, Tensor gates, Tensor? initial_state, Tensor? seq_idx, Tensor? cu_seqlens, int dim, bool reverse, "
      "bool return_states, bool save_states) -> (Tensor states, Tensor last_state, Tensor chunk_states)");
  m.def(
      "linear_recurrence_bwd(Tensor? dstates, Tensor? dlast_state, Tensor x, Tensor gates, Tensor? initial_state, Tensor? seq_idx, "
      "Tensor? cu_seqlens, int dim, bool reverse, Tensor chunk_states) -> (Tensor dx, Tensor dgates, Tensor dinitial_state)");
  m.def(
      "gated_scan_fwd(Tensor x, Tensor logits, Tensor? initial_state, Tensor? seq_idx, Tensor? cu_seqlens, int dim, bool reverse, "
      "bool return_states, bool save_states) -> (Tensor states, Tensor last_state, Tensor chunk_states)");
  m.def(
      "gated_scan_bwd(Tensor? dstates, Tensor? dlast_state, Tensor x, Tensor logits, Tensor? initial_state, Tensor? seq_idx, "
      "Tensor? cu_seqlens, int dim, bool reverse, Tensor chunk_states) -> (Tensor dx, Tensor dlogits, Tensor dinitial_state)");

  // x (batch, dim, seqlen); weight (dim, width); bias (dim); states (batch, dim, width - 1), leading size num_sequences with cu_seqlens
  m.def(
      "causal_conv1d(Tensor x, Tensor weight, Tensor? bias=None, Tensor? initial_state=None, Tensor? seq_idx=None, "
      "Tensor? cu_seqlens=None, str activation=\"none\") -> (Tensor out, Tensor last_state)");
  m.def(
      "causal_conv1d_fwd(Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor? seq_idx, Tensor? cu_seqlens, "
      "str activation) -> (Tensor out, Tensor last_state)");
  m.def(
      "causal_conv1d_bwd(Tensor? dout, Tensor? dlast_state, Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, "
      "Tensor? seq_idx, Tensor? cu_seqlens, str activation) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dinitial_state)");

  // x, out (batch, dim) or (batch, dim, seqlen); conv_state (batch, dim, state_len), state_len >= width - 1; weight (dim, width); bias
  // (dim)
  m.def(
      "conv1d_step(Tensor x, Tensor conv_state, Tensor weight, Tensor? bias=None, str activation=\"none\") "
      "-> (Tensor out, Tensor new_state)");
  m.def("conv1d_step_fwd(Tensor x, Tensor conv_state, Tensor weight, Tensor? bias, str activation) -> (Tensor out, Tensor new_state)");
  m.def(
      "conv1d_step_bwd(Tensor? dout, Tensor? dnew_state, Tensor x, Tensor conv_state, Tensor weight, Tensor? bias, str activation) "
      "-> (Tensor dx, Tensor dconv_state, Tensor dweight, Tensor dbias)");
  // The same in place; cache_seqlens (batch) makes the cache circular; conv_state (entries, dim, state_len) with conv_state_indices (batch)
  m.def(
      "conv1d_step_(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias=None, str activation=\"none\", "
      "Tensor? cache_seqlens=None, Tensor? conv_state_indices=None) -> Tensor");
  // d_y, d_x (dim) or (batch, dim); state (dim, width), (dim * width) or (batch, dim, width); weight, d_weight (dim, width) or
  // (dim * width); d_bias (dim). d_x is overwritten, d_weight and d_bias accumulated onto.
  m.def("conv1d_step_bwd_(Tensor d_y, Tensor state, Tensor weight, Tensor(a!) d_x, Tensor(b!) d_weight, Tensor(c!)? d_bias=None) -> ()");

  // state (batch, nheads, headdim, dstate); x, dt, z, out (batch, nheads, headdim); A (nheads, headdim, dstate); B, C (batch, ngroups,
  // dstate); D, dt_bias (nheads, headdim). Without heads: state (batch, dim, dstate), x (batch, dim), A (dim, dstate), B (batch, dstate) …
  m.def(
      "selective_state_update(Tensor state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D=None, Tensor? z=None, "
      "Tensor? dt_bias=None, bool dt_softplus=False) -> (Tensor out, Tensor new_state)");
  m.def(
      "selective_state_update_fwd(Tensor state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, "
      "Tensor? dt_bias, bool dt_softplus) -> (Tensor out, Tensor new_state)");
  m.def(
      "selective_state_update_bwd(Tensor? dout, Tensor? dnew_state, Tensor state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, "
      "Tensor? D, Tensor? z, Tensor? dt_bias, bool dt_softplus) -> (Tensor dstate, Tensor dx, Tensor ddt, Tensor dA, Tensor dB, "
      "Tensor dC, Tensor dD, Tensor dz, Tensor ddt_bias)");
  // The same in place; with state_batch_indices (batch) state has shape (entries, …)
  m.def(
      "selective_state_update_(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D=None, Tensor? z=None, "
      "Tensor? dt_bias=None, bool dt_softplus=False, Tensor? state_batch_indices=None) -> Tensor");

  // hidden, result (batch, d_model), result float32; conv_state (n_layer, batch, d_inner, state_len); ssm_state (n_layer, batch, d_inner,
  // d_state); weights, parameters (n_layer, …) as csrc/params/mamba_step.h packs them
  m.def(
      "mamba_step_(Tensor hidden, Tensor(a!) conv_state, Tensor(b!) ssm_state, Tensor weights, Tensor parameters, int d_conv, int dt_rank, "
      "float eps, bool block) -> Tensor");
  // hidden (batch, d_model); norm_weight (d_model); weight (vocab, d_model); result (batch, vocab), float32
  m.def("mamba_step_logits(Tensor hidden, Tensor norm_weight, Tensor weight, float eps) -> Tensor");

  // probs, price_now, price_later (count); thresholds (num_thresholds), float64; statistics (num_thresholds), float64, n_trades int64; pnl
  // (num_thresholds, count) in price_now's dtype, or (0,); bad (2): number of rows with a NaN, index of the first or -1
  m.def(
      "threshold_backtest(Tensor probs, Tensor price_now, Tensor price_later, Tensor thresholds, float cost, int ddof=0, "
      "bool return_pnl=False) -> (Tensor n_trades, Tensor mean_ret, Tensor std_ret, Tensor sharpe, Tensor hit_rate, "
      "Tensor total_pnl, Tensor pnl, Tensor bad)");
}
