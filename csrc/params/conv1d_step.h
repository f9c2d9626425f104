// conv1d_step: what the kernels get. A step takes `tokens` samples (usually one) and a cache of `state_len` >= width - 1 past samples.
#pragma once

#include "common/view.h"
#include "params/kernel.h"

namespace mamba {

struct Conv1dStepFwd {
  int64_t batch, dim, width, tokens, state_len;
  int64_t entries;  // of the cache: its leading size
  bool silu;
  View<3> x;              // (batch, dim, tokens)
  View<3> state;          // (batch, dim, state_len), or (entries, dim, state_len) with indices
  View<2> weight;         // (dim, width)
  View<1> bias;           // (dim); may be absent
  View<1> cache_seqlens;  // (batch); may be absent. The cache is circular: the next sample goes to column cache_seqlens % state_len
  View<1> indices;        // (batch); may be absent. Row b uses cache entry indices[b]; a negative index is padding: out 0, no entry touched
  View<3> out;            // as x
  View<3> new_state;      // as state; may be the same memory
};

struct Conv1dStepBwd {
  int64_t batch, dim, width, tokens, state_len;
  int64_t entries;
  bool silu;
  View<3> x, state;
  View<2> weight;
  View<1> bias;
  View<3> dout, dnew_state;  // absent: zero
  View<3> dx, dstate;
  View<2> dweight;
  View<1> dbias;  // may be absent
};

// One step's own gradient, without the carry to older samples: dx overwritten, dweight and dbias accumulated onto.
struct Conv1dStepSeedBwd {
  int64_t batch, dim, width;
  View<2> dy;     // (batch, dim): gradient before the activation
  View<3> state;  // (batch, dim, width): the samples the step saw
  View<2> weight, dx, dweight;
  View<1> dbias;  // may be absent
};

}  // namespace mamba

MAMBA_KERNEL(conv1d_step_fwd, Conv1dStepFwd)
MAMBA_KERNEL(conv1d_step_bwd, Conv1dStepBwd)
MAMBA_KERNEL(conv1d_step_seed_bwd, Conv1dStepSeedBwd)
