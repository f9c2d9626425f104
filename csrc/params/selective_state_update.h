// selective_state_update: what the kernels get. Without heads: nheads = ngroups = 1 and headdim = dim.
#pragma once

#include "common/view.h"
#include "params/kernel.h"

namespace mamba {

struct SelectiveStateUpdateInputs {
  int64_t batch, nheads, headdim, dstate, ngroups;
  int64_t entries;  // leading size of state
  bool dt_softplus;
  View<4> state;       // (batch, nheads, headdim, dstate), or (entries, …) with indices
  View<3> x, dt, z;    // (batch, nheads, headdim); z may be absent
  View<3> A;           // (nheads, headdim, dstate)
  View<3> B, C;        // (batch, ngroups, dstate)
  View<2> D, dt_bias;  // (nheads, headdim); may be absent
};

struct SelectiveStateUpdateFwd : SelectiveStateUpdateInputs {
  View<1> indices;    // (batch); may be absent. Row b uses entry indices[b]; a negative index is padding: out 0, no entry touched
  View<3> out;        // as x
  View<4> new_state;  // as state; may be the same memory
};

struct SelectiveStateUpdateBwd : SelectiveStateUpdateInputs {
  View<3> dout;  // absent: zero, like dnew_state
  View<4> dnew_state;
  View<4> grad_state;               // of state
  View<3> dx, ddt, dz, dA, dB, dC;  // dz may be absent
  View<2> dD, ddt_bias;             // may be absent
};

}  // namespace mamba

MAMBA_KERNEL(selective_state_update_fwd, SelectiveStateUpdateFwd)
MAMBA_KERNEL(selective_state_update_bwd, SelectiveStateUpdateBwd)
