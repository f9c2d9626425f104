#include "params/selective_scan.h"

#include "ops/check.h"

namespace mamba {
namespace {

// B or C: constant (dim, dstate), shared (batch, dstate, seqlen) or grouped (batch, ngroups, dstate, seqlen).
void check_projection(const Checker& check, const char* name, const Tensor& tensor, const SelectiveScanInputs& p) {
  if (tensor.dim() == 2) {
    check.shape(name, tensor, {{"dim", p.dim}, {"dstate", p.dstate}});
    check.floating(name, tensor);
  } else if (tensor.dim() == 3) {
    check.shape(name, tensor, {{"batch", p.batch}, {"dstate", p.dstate}, {"seqlen", p.seqlen}});
    check.same_dtype(name, tensor);
  } else if (tensor.dim() == 4) {
    const int64_t ngroups = tensor.size(1);
    check.shape(name, tensor, {{"batch", p.batch}, {"ngroups", ngroups}, {"dstate", p.dstate}, {"seqlen", p.seqlen}});
    if (ngroups < 1 || p.dim % ngroups != 0)
      fail(check.op(), ": ", name, " must have an ngroups that divides dim = ", p.dim, ", got ", ngroups);
    check.same_dtype(name, tensor);
  } else {
    fail(check.op(), ": ", name, " must have shape (dim, dstate), (batch, dstate, seqlen) or (batch, ngroups, dstate, seqlen), got ",
         shape_text(tensor));
  }
}

// B, C and their gradients as (batch, group, dstate, seqlen).
View<4> projection_view(const Tensor& tensor) {
  View<4> view;
  view.data = data_of(tensor);
  view.dtype = dtype_of(tensor);
  const int64_t axes = tensor.dim();
  if (axes == 2) {
    view.stride[1] = tensor.stride(0);
    view.stride[2] = tensor.stride(1);
  } else {
    view.stride[0] = tensor.stride(0);
    if (axes == 4) view.stride[1] = tensor.stride(1);
    view.stride[2] = tensor.stride(axes - 2);
    view.stride[3] = tensor.stride(axes - 1);
  }
  return view;
}

void fill_inputs(SelectiveScanInputs& p, const Checker& check, const Tensor& u, const Tensor& delta, const Tensor& A, const Tensor& B,
                 const Tensor& C, const OptionalTensor& D, const OptionalTensor& z, const OptionalTensor& delta_bias,
                 const OptionalTensor& initial_state, const OptionalTensor& seq_idx, const OptionalTensor& cu_seqlens,
                 bool delta_softplus) {
  check.dims("u", u, 3, "(batch, dim, seqlen)");
  p.batch = u.size(0);
  p.dim = u.size(1);
  p.seqlen = u.size(2);
  check.dims("A", A, 2, "(dim, dstate)");
  p.dstate = A.size(1);
  check.shape("delta", delta, {{"batch", p.batch}, {"dim", p.dim}, {"seqlen", p.seqlen}});
  check.same_dtype("delta", delta);
  check.shape("A", A, {{"dim", p.dim}, {"dstate", p.dstate}});
  check.floating("A", A);
  check_projection(check, "B", B, p);
  check_projection(check, "C", C, p);
  check.shape("D", D, {{"dim", p.dim}});
  check.floating("D", D);
  check.shape("z", z, {{"batch", p.batch}, {"dim", p.dim}, {"seqlen", p.seqlen}});
  check.same_dtype("z", z);
  check.shape("delta_bias", delta_bias, {{"dim", p.dim}});
  check.floating("delta_bias", delta_bias);
  p.num_sequences = check_packing(check, seq_idx, cu_seqlens, p.batch, p.seqlen);
  check.shape("initial_state", initial_state,
              {{cu_seqlens ? "num_sequences" : "batch", p.num_sequences}, {"dim", p.dim}, {"dstate", p.dstate}});
  check.floating("initial_state", initial_state);

  p.B_varies = B.dim() != 2;
  p.C_varies = C.dim() != 2;
  p.ngroups_B = B.dim() == 4 ? B.size(1) : 1;
  p.ngroups_C = C.dim() == 4 ? C.size(1) : 1;
  p.delta_softplus = delta_softplus;
  p.u = view_of<3>(u);
  p.delta = view_of<3>(delta);
  p.z = view_of<3>(z);
  p.A = view_of<2>(A);
  p.B = projection_view(B);
  p.C = projection_view(C);
  p.D = view_of<1>(D);
  p.delta_bias = view_of<1>(delta_bias);
  p.initial_state = view_of<3>(initial_state);
  p.seq_idx = view_of<2>(seq_idx);
  p.cu_seqlens = view_of<1>(cu_seqlens);
}

// Flat, because a size that is 1 for short sequences would make compiled programs specialise on it.
int64_t chunk_states_size(const SelectiveScanInputs& p) {
#if MAMBA_CUDA
  constexpr int64_t chunk = selective_scan_chunk_cuda;
#else
  constexpr int64_t chunk = selective_scan_chunk_cpu;
#endif
  return p.batch * ((p.seqlen + chunk - 1) / chunk) * p.dstate * p.dim;
}

std::tuple<Tensor, Tensor, Tensor> selective_scan_fwd(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, OptionalTensor D,
                                                      OptionalTensor z, OptionalTensor delta_bias, OptionalTensor initial_state,
                                                      OptionalTensor seq_idx, OptionalTensor cu_seqlens, bool delta_softplus,
                                                      bool save_states) {
  SelectiveScanFwd params;
  fill_inputs(params, Checker("selective_scan", "u", u), u, delta, A, B, C, D, z, delta_bias, initial_state, seq_idx, cu_seqlens,
              delta_softplus);
  const ScalarType acc = accumulate_type(u.scalar_type());
  Tensor out = empty_sequence(u);
  Tensor last_state = empty(u, {params.num_sequences, params.dim, params.dstate}, acc);
  Tensor chunk_states = empty(u, {save_states ? chunk_states_size(params) : 0}, acc);
  params.out = view_of<3>(out);
  params.last_state = view_of<3>(last_state);
  if (save_states) params.chunk_states = data_of(chunk_states);
  MAMBA_RUN(selective_scan_fwd, params, u);
  return {out, last_state, chunk_states};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> selective_scan_bwd(
    OptionalTensor dout, OptionalTensor dlast_state, Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, OptionalTensor D,
    OptionalTensor z, OptionalTensor delta_bias, OptionalTensor initial_state, OptionalTensor seq_idx, OptionalTensor cu_seqlens,
    bool delta_softplus, Tensor chunk_states) {
  const Checker check("selective_scan_bwd", "u", u);
  SelectiveScanBwd params;
  fill_inputs(params, check, u, delta, A, B, C, D, z, delta_bias, initial_state, seq_idx, cu_seqlens, delta_softplus);
  const ScalarType acc = accumulate_type(u.scalar_type());
  check.shape("dout", dout, {{"batch", params.batch}, {"dim", params.dim}, {"seqlen", params.seqlen}});
  check.same_dtype("dout", dout);
  check.shape("dlast_state", dlast_state,
              {{cu_seqlens ? "num_sequences" : "batch", params.num_sequences}, {"dim", params.dim}, {"dstate", params.dstate}});
  check.floating("dlast_state", dlast_state);
  if (chunk_states.scalar_type() != acc || chunk_states.numel() != chunk_states_size(params) || !chunk_states.is_contiguous())
    fail("selective_scan_bwd: chunk_states must be the contiguous ", dtype_name(acc), " tensor of ", chunk_states_size(params),
         " numbers that selective_scan_fwd returned, got ", dtype_name(chunk_states.scalar_type()), " of shape ", shape_text(chunk_states));
  check.device("chunk_states", chunk_states);

  Tensor du = empty_sequence(u), ddelta = empty_sequence(u);
  Tensor dz = z ? empty_sequence(u) : empty(u, {0}, u.scalar_type());
  Tensor dA = empty_gradient(u, A), dB = empty_gradient(u, B), dC = empty_gradient(u, C), dD = empty_gradient(u, D);
  Tensor ddelta_bias = empty_gradient(u, delta_bias), dinitial_state = empty_gradient(u, initial_state);
  params.dout = view_of<3>(dout);
  params.dlast_state = view_of<3>(dlast_state);
  params.chunk_states = data_of(chunk_states);
  params.du = view_of<3>(du);
  params.ddelta = view_of<3>(ddelta);
  if (z) params.dz = view_of<3>(dz);
  params.dA = view_of<2>(dA);
  params.dB = projection_view(dB);
  params.dC = projection_view(dC);
  if (D) params.dD = view_of<1>(dD);
  if (delta_bias) params.ddelta_bias = view_of<1>(ddelta_bias);
  if (initial_state) params.dinitial_state = view_of<3>(dinitial_state);
  if (params.dim == 0) {  // nothing to sum over
    torch::stable::zero_(dB);
    torch::stable::zero_(dC);
  }
  MAMBA_RUN(selective_scan_bwd, params, u);
  return {du, ddelta, dA, dB, dC, dD, dz, ddelta_bias, dinitial_state};
}

}  // namespace

MAMBA_REGISTER_KERNELS(m) {
  m.impl("selective_scan_fwd", TORCH_BOX(&selective_scan_fwd));
  m.impl("selective_scan_bwd", TORCH_BOX(&selective_scan_bwd));
}

}  // namespace mamba
