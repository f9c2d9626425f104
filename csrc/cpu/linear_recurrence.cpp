// Gated linear recurrence, forward: h_t = g_t h_{t-1} + x_t, one multiplication and one addition for three numbers moved (and one sigmoid,
// for gated_scan), so that memory decides: rows of a block are read in the order in which they lie, outputs pass by the caches.
#include "cpu/linear_recurrence.h"

namespace mamba::cpu::MAMBA_CPU_LEVEL {
namespace {

template <class S, bool Sigmoid>
class Forward {
 public:
  using T = std::conditional_t<std::is_same_v<S, double>, double, float>;
  using V = Vec<T>;
  static constexpr int vl = Simd<T>::width;
  static constexpr int64_t most_lanes = 1024, tile = recurrence_chunk * vl;

  explicit Forward(const LinearRecurrenceFwd& params)
      : p(params),
        plan(params, params.x.lane == 1 && params.gates.lane == 1 && (!params.states || params.states.lane == 1), vl, most_lanes),
        streaming(params.rows * params.lanes * params.seqlen * static_cast<int64_t>(sizeof(S)) >= streamed_bytes) {}

  void run() const {
    run_tasks<T>(p, plan, plan.block + (plan.wide ? 0 : 3 * tile), streaming,
                 [&](const RecurrenceTask& task, T* memory) { sweep(task, memory); });
  }

 private:
  void sweep(const RecurrenceTask& task, T* state) const {
    const RecurrenceRun& run = task.run;
    if (run.padding) return clear(task, state);
    load_states(p, state, p.initial_state, task, run.state);
    for (int64_t t = run.begin; t < run.end;) {
      if (t % recurrence_chunk == 0) store_states(p, state, p.chunk_states, task, t / recurrence_chunk);
      const int64_t border = (t / recurrence_chunk + 1) * recurrence_chunk, next = border < run.end ? border : run.end;
      chunk(task, state, t, static_cast<int>(next - t));
      t = next;
    }
    store_states(p, state, p.last_state, task, run.state);
  }

  void clear(const RecurrenceTask& task, T* state) const {
    clear_padding(p, p.states, task);
    clear_states(state, task.lanes);
    for (int64_t t = task.run.begin; p.chunk_states && t < task.run.end; ++t)
      if (t % recurrence_chunk == 0) store_states(p, state, p.chunk_states, task, t / recurrence_chunk);
  }

  void chunk(const RecurrenceTask& task, T* state, int64_t t, int count) const {
    if (plan.wide) {
      const auto out = rows_of<S>(p, p.states, task, t);
      const auto x = rows_of<const S>(p, p.x, task, t), gates = rows_of<const S>(p, p.gates, task, t);
      if (!p.states) return steps<Output::none, S>(task, state, t, count, x, gates, out, [](int) {});
      if (streaming && streams(out, task.lanes)) return steps<Output::stream, S>(task, state, t, count, x, gates, out, [](int) {});
      return steps<Output::store, S>(task, state, t, count, x, gates, out, [](int) {});
    }
    T *const x = state + vl, *const gates = x + tile, *const out = gates + tile;
    const auto x_rows = load_rows(p, x, p.x, task, t, count), gate_rows = load_rows(p, gates, p.gates, task, t, count);
    const RecurrenceTask whole{task.row, task.lane, vl, task.run};
    const Pieces<T> next_x(p, p.x, task, t + count), next_gates(p, p.gates, task, t + count);
    steps<Output::store, T>(whole, state, t, count, x_rows, gate_rows, tile_rows(p.states, out, count),
                            [&](int i) __attribute__((always_inline)) {
                              next_x.ask(i);
                              next_gates.ask(i);
                            });
    store_rows(p, out, p.states, task, t, count, streaming);
  }

  template <Output How, class E, class F>
  void steps(const RecurrenceTask& task, T* state, int64_t t, int count, LaneRows<const E> x, LaneRows<const E> gates, LaneRows<E> out,
             const F& ask) const {
    const int64_t x_ahead = bytes_ahead(x, task.lanes), gates_ahead = bytes_ahead(gates, task.lanes);
    for (int i = 0; i < count; ++i) {
      ask(i);
      if (recurrence_restarts(p, task.row, t + i)) clear_states(state, task.lanes);
      const E *const x_row = x[i], *const gate_row = gates[i];
      E* const out_row = out[i];
      for_each_vector<T>(task.lanes, [&](int lane, int lanes, auto whole) __attribute__((always_inline)) {
        const V g = gate<Sigmoid>(get<T>(gate_row + lane, lanes, whole));
        const V h = g * load(state + lane) + get<T>(x_row + lane, lanes, whole);
        store(state + lane, h);
        prefetch(x_row + lane, x_ahead);
        prefetch(gate_row + lane, gates_ahead);
        put<How>(out_row + lane, h, lanes, whole);
      });
    }
  }

  const LinearRecurrenceFwd& p;
  const RecurrencePlan plan;
  const bool streaming;
};

}  // namespace

void linear_recurrence_fwd(const LinearRecurrenceFwd& params) {
  dispatch(params, [&](auto tag, auto sigmoid) { Forward<typename decltype(tag)::type, decltype(sigmoid)::value>(params).run(); });
}

}  // namespace mamba::cpu::MAMBA_CPU_LEVEL
