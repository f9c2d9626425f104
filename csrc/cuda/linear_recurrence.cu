// Gated linear recurrence, forward; see linear_recurrence.cuh for the plan.
//
// Bytes per element, f32: x, gates read, states written: 12; every 64th state for the backward adds 0.06. About 80 % of the copy bandwidth
// expected from 64 rows of 256 lanes on (512 blocks; 16 numbers a thread in flight, while other blocks of the processor scan); shared
// memory moves 2 links of 12 bytes for every 8 elements and round of the scan.
#include "cuda/linear_recurrence.cuh"

namespace mamba::cuda {
namespace {

template <class S>
__global__ void __launch_bounds__(recurrence_threads, sizeof(S) == 8 ? 2 : 3)
    forward_kernel(const LinearRecurrenceFwd p, const RecurrencePlan plan) {
  using T = Accumulate<S>;
  const RecurrencePlace at(p, plan);
  const int64_t begin = at.run.begin, end = at.inside ? at.run.end : at.run.begin, first = begin / plan.tile * plan.tile;
  const S* const x = static_cast<const S*>(p.x.data) + recurrence_offset(p, p.x, at.row, at.lane);
  const S* const gates = static_cast<const S*>(p.gates.data) + recurrence_offset(p, p.gates, at.row, at.lane);
  S* const states = p.states ? static_cast<S*>(p.states.data) + recurrence_offset(p, p.states, at.row, at.lane) : nullptr;
  const int64_t kept = p.chunk_states ? recurrence_offset(p, p.chunk_states, at.row, at.lane) : 0;

  T carry = 0;
  if (at.inside && p.initial_state && !at.run.padding)
    carry = load_number<T>(p.initial_state.data, p.initial_state.dtype,
                           recurrence_offset(p, p.initial_state, at.row, at.lane) + at.run.state * p.initial_state.time);
  int64_t t = first + at.slice * recurrence_times;
  for (int64_t tile = first; tile < at.run.end; tile += plan.tile, t += plan.tile) {
    const int64_t low = begin - t, high = end - t;
    const bool keeps = p.chunk_states && t % recurrence_chunk == 0 && low <= 0 && high > 0;
    if (at.run.padding) {
      const T zeros[recurrence_times] = {};
      if (states) store_items(states + t * p.states.time, zeros, p.states.time, low, high);
      if (keeps) store_number(p.chunk_states.data, p.chunk_states.dtype, kept + t / recurrence_chunk * p.chunk_states.time, T(0));
      continue;
    }
    RecurrenceSlice<S> now;
    now.load(p, x, gates, t, low, high);
    now.open_gates(p.sigmoid, low, high);
    const unsigned restarts = restarts_of(p, at, t, low, high);
    const ScannedLinks<T> links = scan_links(fold(now, restarts), at.slice, at.lane_thread, plan);
    T h = links.before(carry);
    carry = links.all(carry);
    if (keeps) store_number(p.chunk_states.data, p.chunk_states.dtype, kept + t / recurrence_chunk * p.chunk_states.time, h);
    T out[recurrence_times];
#pragma unroll
    for (int i = 0; i < recurrence_times; ++i) {
      h = now.g[i] * (restarts >> i & 1 ? T(0) : h) + now.x[i];
      out[i] = h;
    }
    if (states) store_items(states + t * p.states.time, out, p.states.time, low, high);
  }
  if (at.inside && at.slice == 0 && !at.run.padding)
    store_number(p.last_state.data, p.last_state.dtype,
                 recurrence_offset(p, p.last_state, at.row, at.lane) + at.run.state * p.last_state.time, carry);
}

}  // namespace

void linear_recurrence_fwd(const LinearRecurrenceFwd& p, const Context& context) {
  dispatch_floating(p.x.dtype, [&](auto tag) {
    using S = typename decltype(tag)::type;
    const RecurrencePlan plan(p);
    launch(context, "linear_recurrence_fwd", forward_kernel<S>, plan.blocks, recurrence_threads, 0, p, plan);
  });
}

}  // namespace mamba::cuda
