// selective_scan: the contract between the host layer and the kernels. A View without data is an absent optional tensor; any strides
// (0 and negative too) are accepted. `acc` is double when u is double, else float.
#pragma once

#include "common/view.h"
#include "params/kernel.h"

namespace mamba {

struct SelectiveScanInputs {
  int64_t batch = 0, dim = 0, seqlen = 0, dstate = 0;
  int64_t ngroups_B = 1, ngroups_C = 1;   // divide dim; meaningful where the tensor varies with time
  bool B_varies = true, C_varies = true;  // (batch, group, dstate, seqlen), else constant (dim, dstate)
  bool delta_softplus = false;
  int64_t num_sequences = 0;  // S; with cu_seqlens, where batch is 1
  View<3> u, delta, z;        // (batch, dim, seqlen), one dtype; z optional
  View<2> A;                  // (dim, dstate)
  View<4> B, C;               // (batch, group, dstate, seqlen); constant: stride {0, over dim, over dstate, 0}
  View<1> D, delta_bias;      // (dim), optional
  View<3> initial_state;      // (batch or S, dim, dstate), optional
  View<2> seq_idx;            // (batch, seqlen), optional, int32 or int64
  View<1> cu_seqlens;         // (S + 1), optional; not together with seq_idx; contents already checked
};

struct SelectiveScanFwd : SelectiveScanInputs {
  View<3> out;                   // (batch, dim, seqlen), dtype of u
  View<3> last_state;            // (batch or S, dim, dstate), any floating dtype; optional
  void* chunk_states = nullptr;  // acc, or null; see below
};

struct SelectiveScanBwd : SelectiveScanInputs {
  View<3> dout;                        // (batch, dim, seqlen), optional: zero when absent, like dlast_state
  View<3> dlast_state;                 // (batch or S, dim, dstate), optional, any floating dtype
  const void* chunk_states = nullptr;  // as the forward wrote them
  View<3> du, ddelta, dz;              // (batch, dim, seqlen); dz only with z. Every output is written completely
  View<2> dA;                          // (dim, dstate)
  View<4> dB, dC;                      // indexed like B and C
  View<1> dD, ddelta_bias;             // only with D and delta_bias
  View<3> dinitial_state;              // only with initial_state
};

// chunk_states is contiguous acc, batch * ceil(seqlen / chunk) * dstate * dim numbers in an order of the kernels' own: the states that
// enter the times 0, chunk, 2 chunk, ... (after a segment start at that time has replaced them). The backward works chunk by chunk, CPU
// kernels in the first-level cache, CUDA kernels in registers.
inline constexpr int64_t selective_scan_chunk_cpu = 32, selective_scan_chunk_cuda = 8;

}  // namespace mamba

MAMBA_KERNEL(selective_scan_fwd, SelectiveScanFwd)
MAMBA_KERNEL(selective_scan_bwd, SelectiveScanBwd)
