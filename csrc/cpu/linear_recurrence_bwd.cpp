// Gated linear recurrence, backward. Chunks of time from the last to the first: the states of a chunk are computed again from the one that
// enters it, then L_t = dh_t + g_{t+1} L_{t+1} runs against time; dx_t = L_t, dg_t = L_t h_{t-1}, dinitial_state = g_0 L_0.
// Read: x, gates, dstates; written: dx, dgates; a chunk's states and gates stay in the cache.
#include "cpu/linear_recurrence.h"

namespace mamba::cpu::MAMBA_CPU_LEVEL {
namespace {

template <class S, bool Sigmoid>
class Backward {
 public:
  using T = std::conditional_t<std::is_same_v<S, double>, double, float>;
  using V = Vec<T>;
  static constexpr int vl = Simd<T>::width;
  static constexpr int64_t most_lanes = 256, tile = recurrence_chunk * vl;

  explicit Backward(const LinearRecurrenceBwd& params)
      : p(params),
        plan(params,
             params.x.lane == 1 && params.gates.lane == 1 && params.dx.lane == 1 && params.dgates.lane == 1 &&
                 (!params.dstates || params.dstates.lane == 1),
             vl, most_lanes),
        streaming(params.rows * params.lanes * params.seqlen * static_cast<int64_t>(sizeof(S)) >= streamed_bytes) {}

  void run() const {
    run_tasks<T>(p, plan, (2 + 2 * recurrence_chunk) * plan.block + (plan.wide ? 0 : 5 * tile), streaming,
                 [&](const RecurrenceTask& task, T* memory) { sweep(task, memory); });
  }

 private:
  // What a chunk works on: rows of `block` numbers.
  struct Work {
    T *state, *carry;     // h before the next step; g L of the step behind
    T *entering, *gates;  // of every step of the chunk: h_{t-1}, g_t
    T* tiles;
  };

  void sweep(const RecurrenceTask& task, T* memory) const {
    const RecurrenceRun& run = task.run;
    if (run.padding) {
      clear_padding(p, p.dx, task);
      return clear_padding(p, p.dgates, task);
    }
    const int64_t block = plan.block, history = recurrence_chunk * block;
    const Work work{memory, memory + block, memory + 2 * block, memory + 2 * block + history, memory + 2 * block + 2 * history};
    load_states(p, work.carry, p.dlast_state, task, run.state);
    for (int64_t end = run.end; end > run.begin;) {
      const int64_t border = (end - 1) / recurrence_chunk * recurrence_chunk, t = border > run.begin ? border : run.begin;
      if (t == run.begin)
        load_states(p, work.state, p.initial_state, task, run.state);
      else
        load_states(p, work.state, p.chunk_states, task, t / recurrence_chunk);
      chunk(task, work, t, static_cast<int>(end - t));
      end = t;
    }
    store_states(p, work.carry, p.dinitial_state, task, run.state);
  }

  void chunk(const RecurrenceTask& task, const Work& work, int64_t t, int count) const {
    if (plan.wide) {
      const auto dstates = rows_of<const S>(p, p.dstates, task, t);
      recompute<S>(task, work, t, count, rows_of<const S>(p, p.x, task, t), rows_of<const S>(p, p.gates, task, t), dstates, [](int) {});
      const auto dx = rows_of<S>(p, p.dx, task, t), dgates = rows_of<S>(p, p.dgates, task, t);
      if (streaming && streams(dx, task.lanes) && streams(dgates, task.lanes))
        return reverse<Output::stream, S>(task, work, t, count, dstates, dx, dgates);
      return reverse<Output::store, S>(task, work, t, count, dstates, dx, dgates);
    }
    const RecurrenceTask whole{task.row, task.lane, vl, task.run};
    T *const x = work.tiles, *const gates = x + tile, *const dstates = gates + tile, *const dx = dstates + tile, *const dgates = dx + tile;
    const auto x_rows = load_rows(p, x, p.x, task, t, count), gate_rows = load_rows(p, gates, p.gates, task, t, count);
    const Pieces<T> more_x(p, p.x, task, t - recurrence_chunk), more_gates(p, p.gates, task, t - recurrence_chunk);
    const Pieces<T> more_dstates(p, p.dstates, task, t);
    recompute<T>(whole, work, t, count, x_rows, gate_rows, {}, [&](int i) __attribute__((always_inline)) {
      more_x.ask(i);
      more_gates.ask(i);
      more_dstates.ask(i);
    });
    const auto dstate_rows = load_rows(p, dstates, p.dstates, task, t, count);
    reverse<Output::store, T>(whole, work, t, count, dstate_rows, tile_rows(p.dx, dx, count), tile_rows(p.dgates, dgates, count));
    store_rows(p, dx, p.dx, task, t, count, streaming);
    store_rows(p, dgates, p.dgates, task, t, count, streaming);
  }

  // Meanwhile memory is asked for what comes next: this chunk's dstates, x and gates of the one before.
  template <class E, class F>
  void recompute(const RecurrenceTask& task, const Work& work, int64_t t, int count, LaneRows<const E> x, LaneRows<const E> gates,
                 LaneRows<const E> dstates, const F& ask) const {
    constexpr int64_t chunk_rows = recurrence_chunk * sizeof(E);
    for (int i = 0; i < count; ++i) {
      ask(i);
      if (recurrence_restarts(p, task.row, t + i)) clear_states(work.state, task.lanes);
      T *const entering = work.entering + i * plan.block, *const kept = work.gates + i * plan.block;
      const E *const x_row = x[i], *const gate_row = gates[i], *const dstate_row = dstates.data ? dstates[i] : nullptr;
      for_each_vector<T>(task.lanes, [&](int lane, int lanes, auto whole) __attribute__((always_inline)) {
        const V g = gate<Sigmoid>(get<T>(gate_row + lane, lanes, whole)), h = load(work.state + lane);
        prefetch<2>(x_row + lane, -x.step * chunk_rows);
        prefetch<2>(gate_row + lane, -gates.step * chunk_rows);
        if (dstate_row) prefetch<2>(dstate_row + lane, 0);
        store(entering + lane, h);
        store(kept + lane, g);
        store(work.state + lane, g * h + get<T>(x_row + lane, lanes, whole));
      });
    }
  }

  template <Output How, class E>
  void reverse(const RecurrenceTask& task, const Work& work, int64_t t, int count, LaneRows<const E> dstates, LaneRows<E> dx,
               LaneRows<E> dgates) const {
    for (int i = count - 1; i >= 0; --i) {
      const T *const entering = work.entering + i * plan.block, *const kept = work.gates + i * plan.block;
      const E* const dstate_row = dstates.data ? dstates[i] : nullptr;
      E *const dx_row = dx[i], *const dgate_row = dgates[i];
      for_each_vector<T>(task.lanes, [&](int lane, int lanes, auto whole) __attribute__((always_inline)) {
        V sum = load(work.carry + lane);
        if (dstate_row) sum = sum + get<T>(dstate_row + lane, lanes, whole);
        const V g = load(kept + lane);
        V dgate = sum * load(entering + lane);
        if constexpr (Sigmoid) dgate = dgate * (g * (T(1) - g));
        store(work.carry + lane, g * sum);
        put<How>(dx_row + lane, sum, lanes, whole);
        put<How>(dgate_row + lane, dgate, lanes, whole);
      });
      if (recurrence_restarts(p, task.row, t + i)) clear_states(work.carry, task.lanes);
    }
  }

  const LinearRecurrenceBwd& p;
  const RecurrencePlan plan;
  const bool streaming;
};

}  // namespace

void linear_recurrence_bwd(const LinearRecurrenceBwd& params) {
  dispatch(params, [&](auto tag, auto sigmoid) { Backward<typename decltype(tag)::type, decltype(sigmoid)::value>(params).run(); });
}

}  // namespace mamba::cpu::MAMBA_CPU_LEVEL
