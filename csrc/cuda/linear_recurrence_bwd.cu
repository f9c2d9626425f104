// Gated linear recurrence, backward; see linear_recurrence.cuh for the plan. Tiles from the last to the first: the states inside a tile are
// scanned again from the kept one that enters it, then C_t = g_t (dh_t + C_{t+1}) is scanned against time; dx_t = dh_t + C_{t+1},
// dg_t = dx_t h_{t-1}, dinitial_state = C_0.
//
// Bytes per element, f32: x, gates, dstates read, dx, dgates written: 20. About 70 % of the copy bandwidth expected (two scans a tile).
#include "cuda/linear_recurrence.cuh"

namespace mamba::cuda {
namespace {

template <class T>
__device__ __forceinline__ T load_state(const LinearRecurrenceInputs& p, const RecurrenceView& view, const RecurrencePlace& at,
                                        int64_t index) {
  if (!view || !at.inside) return 0;
  return load_number<T>(view.data, view.dtype, recurrence_offset(p, view, at.row, at.lane) + index * view.time);
}

template <class S>
__device__ __forceinline__ S* lane_of(const LinearRecurrenceInputs& p, const RecurrenceView& view, const RecurrencePlace& at) {
  return static_cast<S*>(view.data) + recurrence_offset(p, view, at.row, at.lane);
}

template <class S>
__global__ void __launch_bounds__(recurrence_threads, sizeof(S) == 8 ? 1 : 2)
    backward_kernel(const LinearRecurrenceBwd p, const RecurrencePlan plan) {
  using T = Accumulate<S>;
  constexpr int times = recurrence_times;
  const RecurrencePlace at(p, plan);
  const int64_t begin = at.run.begin, end = at.inside ? at.run.end : at.run.begin;
  S *const dx = lane_of<S>(p, p.dx, at), *const dgates = lane_of<S>(p, p.dgates, at);

  T carry = at.run.padding ? T(0) : load_state<T>(p, p.dlast_state, at, at.run.state);
  const int64_t first = begin / plan.tile * plan.tile, tiles = (at.run.end - first + plan.tile - 1) / plan.tile;
  for (int64_t index = tiles - 1; index >= 0; --index) {
    const int64_t tile = first + index * plan.tile, t = tile + at.slice * times, low = begin - t, high = end - t;
    if (at.run.padding) {
      const T zeros[times] = {};
      store_items(dx + t * p.dx.time, zeros, p.dx.time, low, high);
      store_items(dgates + t * p.dgates.time, zeros, p.dgates.time, low, high);
      continue;
    }
    RecurrenceSlice<S> now;
    now.load(p, lane_of<const S>(p, p.x, at), lane_of<const S>(p, p.gates, at), t, low, high);
    T dstates[times] = {};
    if (p.dstates) load_items(dstates, lane_of<const S>(p, p.dstates, at) + t * p.dstates.time, p.dstates.time, low, high);
    now.open_gates(p.sigmoid, low, high);
    const unsigned restarts = restarts_of(p, at, t, low, high);
    const bool starts = tile <= begin;
    const T entering =
        starts ? load_state<T>(p, p.initial_state, at, at.run.state) : load_state<T>(p, p.chunk_states, at, tile / recurrence_chunk);

    T h = scan_links(fold(now, restarts), at.slice, at.lane_thread, plan).before(entering);
#pragma unroll
    for (int i = 0; i < times; ++i) {  // x becomes h_{t-1}
      if (restarts >> i & 1) h = 0;
      const T x = now.x[i];
      now.x[i] = h;
      h = now.g[i] * h + x;
    }

    Link<T> link;
#pragma unroll
    for (int i = times - 1; i >= 0; --i) {
      link.a = product(link.a, now.g[i]);
      link.b = now.g[i] * (dstates[i] + link.b);
      if (restarts >> i & 1) {
        link.b = 0;
        link.cut = 1;
      }
    }
    const ScannedLinks<T> links = scan_links(link, plan.slices - 1 - at.slice, at.lane_thread, plan);
    T behind = links.before(carry);
    carry = links.all(carry);
    T dgate[times];
#pragma unroll
    for (int i = times - 1; i >= 0; --i) {
      dstates[i] += behind;
      dgate[i] = dstates[i] * now.x[i];
      if (p.sigmoid) dgate[i] *= now.g[i] * (1 - now.g[i]);
      behind = restarts >> i & 1 ? T(0) : now.g[i] * dstates[i];
    }
    store_items(dx + t * p.dx.time, dstates, p.dx.time, low, high);
    store_items(dgates + t * p.dgates.time, dgate, p.dgates.time, low, high);
  }
  if (at.inside && at.slice == 0 && !at.run.padding && p.dinitial_state)
    store_number(p.dinitial_state.data, p.dinitial_state.dtype,
                 recurrence_offset(p, p.dinitial_state, at.row, at.lane) + at.run.state * p.dinitial_state.time, carry);
}

}  // namespace

void linear_recurrence_bwd(const LinearRecurrenceBwd& p, const Context& context) {
  dispatch_floating(p.x.dtype, [&](auto tag) {
    using S = typename decltype(tag)::type;
    const RecurrencePlan plan(p);
    launch(context, "linear_recurrence_bwd", backward_kernel<S>, plan.blocks, recurrence_threads, 0, p, plan);
  });
}

}  // namespace mamba::cuda
