// causal_conv1d: what the kernels get.
#pragma once

#include "common/view.h"
#include "params/kernel.h"

namespace mamba {

struct CausalConv1dFwd {
  int64_t batch, dim, seqlen, width;
  int64_t num_sequences;  // leading size of the states: batch, or the number of packed sequences
  bool silu;
  View<3> x;              // (batch, dim, seqlen)
  View<2> weight;         // (dim, width)
  View<1> bias;           // (dim); may be absent
  View<3> initial_state;  // (num_sequences, dim, width - 1); may be absent
  View<2> seq_idx;        // (batch, seqlen); may be absent
  View<1> cu_seqlens;     // (num_sequences + 1); may be absent
  View<3> out;            // as x
  View<3> last_state;     // as initial_state
};

struct CausalConv1dBwd {
  int64_t batch, dim, seqlen, width;
  int64_t num_sequences;
  bool silu;
  View<3> x;
  View<2> weight;
  View<1> bias;
  View<3> initial_state;
  View<2> seq_idx;
  View<1> cu_seqlens;
  View<3> dout, dlast_state;  // absent: zero
  View<3> dx;
  View<2> dweight;
  View<1> dbias;           // may be absent
  View<3> dinitial_state;  // may be absent
};

}  // namespace mamba

MAMBA_KERNEL(causal_conv1d_fwd, CausalConv1dFwd)
MAMBA_KERNEL(causal_conv1d_bwd, CausalConv1dBwd)
