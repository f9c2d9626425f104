// linear_recurrence and gated_scan: h_t = g_t h_{t-1} + x_t, what the kernels get. Batch and channels are rows of lanes: `lanes` neighbours
// along the axis that kernels run their vectors over, and rows for everything else. Reversed time is a negative stride.
#pragma once

#include "common/view.h"
#include "params/kernel.h"

namespace mamba {

constexpr int recurrence_axes = 8;

// Strides along time, lanes and the axes that make up the rows. For states `time` is the stride of packed sequences, else 0.
struct RecurrenceView {
  void* data = nullptr;  // null: absent
  DType dtype = DType::f32;
  int64_t time = 0, lane = 0, row[recurrence_axes] = {};

  MAMBA_INLINE explicit operator bool() const { return data != nullptr; }
};

struct LinearRecurrenceInputs {
  int64_t seqlen = 0, rows = 1, lanes = 1;
  int axes = 0;  // of the rows
  int64_t size[recurrence_axes] = {};
  int64_t rows_per_batch = 1;  // row r belongs to batch r / rows_per_batch, where seq_idx makes a difference
  int64_t num_sequences = 0;
  bool sigmoid = false;          // g = sigmoid(gates), else g = gates
  bool reverse = false;          // already in the strides; cu_seqlens still count from the other end
  RecurrenceView x, gates;       // one dtype
  RecurrenceView initial_state;  // may be absent
  View<2> seq_idx;               // (batch, seqlen); may be absent
  View<1> cu_seqlens;            // (num_sequences + 1); may be absent. Then there is one row of the batch
};

struct LinearRecurrenceFwd : LinearRecurrenceInputs {
  RecurrenceView states;      // x's dtype; may be absent
  RecurrenceView last_state;  // accumulation type, like chunk_states
  RecurrenceView chunk_states;
};

struct LinearRecurrenceBwd : LinearRecurrenceInputs {
  RecurrenceView dstates, dlast_state;  // absent: zero
  RecurrenceView chunk_states;
  RecurrenceView dx, dgates;
  RecurrenceView dinitial_state;  // may be absent
};

// chunk_states holds the states that enter the times k * recurrence_chunk of the kernels' direction, k = 0 ... ceil(seqlen /
// recurrence_chunk) - 1, as a contiguous (k, batch, channels...) tensor; where a sequence starts at that time the entry means nothing.
inline constexpr int64_t recurrence_chunk = 64;

MAMBA_INLINE int64_t row_offset(const LinearRecurrenceInputs& p, const RecurrenceView& view, int64_t row) {
  int64_t sum = 0;
  for (int axis = p.axes - 1; axis > 0; --axis) {
    sum += row % p.size[axis] * view.row[axis];
    row /= p.size[axis];
  }
  return p.axes ? sum + row * view.row[0] : 0;
}

// A stretch of time with a state of its own: a row, a packed sequence, or the padding behind (in front of, reversed) the last one.
struct RecurrenceRun {
  int64_t begin, end;
  int64_t state;  // index along the states' leading axis, by RecurrenceView::time
  bool padding;
};

MAMBA_INLINE int64_t recurrence_runs(const LinearRecurrenceInputs& p) { return p.cu_seqlens ? p.num_sequences + 1 : 1; }

MAMBA_INLINE int64_t recurrence_bound(const LinearRecurrenceInputs& p, int64_t index) {
  const int64_t bound = load_index(p.cu_seqlens, index);  // within the tensor whatever it holds: CUDA's contents are not checked
  return bound < 0 ? 0 : bound > p.seqlen ? p.seqlen : bound;
}

MAMBA_INLINE RecurrenceRun recurrence_run(const LinearRecurrenceInputs& p, int64_t index) {
  if (!p.cu_seqlens) return {0, p.seqlen, 0, false};
  const bool padding = index == p.num_sequences;
  const int64_t begin = recurrence_bound(p, index), end = padding ? p.seqlen : recurrence_bound(p, index + 1);
  return {p.reverse ? p.seqlen - end : begin, p.reverse ? p.seqlen - begin : end, index, padding};
}

// Whether the state restarts from zero at time t > 0.
MAMBA_INLINE bool recurrence_restarts(const LinearRecurrenceInputs& p, int64_t row, int64_t t) {
  if (!p.seq_idx || t == 0) return false;
  const int64_t batch = row / p.rows_per_batch;
  return load_index(p.seq_idx, batch, t) != load_index(p.seq_idx, batch, t - 1);
}

}  // namespace mamba

MAMBA_KERNEL(linear_recurrence_fwd, LinearRecurrenceFwd)
MAMBA_KERNEL(linear_recurrence_bwd, LinearRecurrenceBwd)
