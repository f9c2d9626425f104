// linear_recurrence: how the work is cut up, and what forward and backward share.
// A task is one run of time for a block of lanes. Where the lanes lie one behind the other in every operand, a block is as wide as leaves
// enough tasks, and rows of it are read and written in place; else it is one vector, and stretches of time go through small tiles. Time is
// never cut between threads: that would read everything twice, and one step of one vector costs little more than the memory it moves.
#pragma once

#include <type_traits>

#include "cpu/flush.h"
#include "cpu/parallel.h"
#include "cpu/simd_math.h"
#include "cpu/stream.h"
#include "cpu/tile.h"
#include "params/linear_recurrence.h"

namespace mamba::cpu::MAMBA_CPU_LEVEL {
namespace {

MAMBA_INLINE void* address(const LinearRecurrenceInputs& p, const RecurrenceView& view, int64_t row, int64_t lane, int64_t t) {
  return static_cast<char*>(view.data) + (row_offset(p, view, row) + lane * view.lane + t * view.time) * size_of(view.dtype);
}

template <bool Sigmoid, class V>
MAMBA_INLINE V gate(V x) {
  if constexpr (Sigmoid)
    return sigmoid(x);
  else
    return x;
}

struct RecurrenceTask {
  int64_t row, lane;
  int lanes;
  RecurrenceRun run;
};

struct RecurrencePlan {
  bool wide;
  int64_t block, blocks, runs, tasks;

  RecurrencePlan(const LinearRecurrenceInputs& p, bool in_place, int64_t width, int64_t most) : wide(in_place && p.lanes >= width) {
    runs = recurrence_runs(p);
    block = width;
    if (wide) {
      constexpr int64_t wanted_tasks = 16;  // more would make rows so short that memory gets slow
      const int64_t unit = 4 * width, groups = p.rows * runs;
      const int64_t share = groups >= wanted_tasks ? p.lanes : p.lanes * groups / wanted_tasks;
      block = (share + unit - 1) / unit * unit;
      block = block < unit ? unit : block > most ? most : block;
    }
    blocks = (p.lanes + block - 1) / block;
    tasks = p.rows * runs * blocks;
  }

  // Neighbouring tasks are neighbours in memory.
  RecurrenceTask task(const LinearRecurrenceInputs& p, int64_t index) const {
    const int64_t lane = index % blocks * block, rest = p.lanes - lane;
    index /= blocks;
    return {index % p.rows, lane, static_cast<int>(rest < block ? rest : block), recurrence_run(p, index / p.rows)};
  }
};

// States of a block, whatever their dtype and strides; absent: zeros. `state` holds whole vectors.
template <class T>
void load_states(const LinearRecurrenceInputs& p, T* state, const RecurrenceView& view, const RecurrenceTask& task, int64_t index) {
  constexpr int width = Simd<T>::width;
  for (int lane = 0; lane < task.lanes; lane += width) {
    const int lanes = task.lanes - lane < width ? task.lanes - lane : width;
    if (view)
      load_tile(state + lane, address(p, view, task.row, task.lane + lane, index), view.dtype, 0, view.lane, 1, lanes);
    else
      store(state + lane, zero<T>());
  }
}

template <class T>
void store_states(const LinearRecurrenceInputs& p, const T* state, const RecurrenceView& view, const RecurrenceTask& task, int64_t index) {
  constexpr int width = Simd<T>::width;
  for (int lane = 0; view && lane < task.lanes; lane += width) {
    const int lanes = task.lanes - lane < width ? task.lanes - lane : width;
    store_tile(state + lane, address(p, view, task.row, task.lane + lane, index), view.dtype, 0, view.lane, 1, lanes);
  }
}

template <class T>
MAMBA_INLINE void clear_states(T* state, int lanes) {
  for (int lane = 0; lane < lanes; lane += Simd<T>::width) store(state + lane, zero<T>());
}

inline void clear_padding(const LinearRecurrenceInputs& p, const RecurrenceView& view, const RecurrenceTask& task) {
  const int64_t bytes = size_of(view.dtype);
  for (int64_t t = task.run.begin; view && t < task.run.end; ++t) {
    char* const to = static_cast<char*>(address(p, view, task.row, task.lane, t));
    for (int lane = 0; lane < task.lanes; ++lane) __builtin_memset(to + lane * view.lane * bytes, 0, bytes);
  }
}

// Rows of lanes, `step` elements apart.
template <class E>
struct LaneRows {
  E* data = nullptr;
  int64_t step = 0;

  MAMBA_INLINE E* operator[](int64_t row) const { return data + row * step; }
};

template <class E>
LaneRows<E> rows_of(const LinearRecurrenceInputs& p, const RecurrenceView& view, const RecurrenceTask& task, int64_t t) {
  if (!view) return {};
  return {static_cast<E*>(address(p, view, task.row, task.lane, t)), view.time};
}

// Tiles hold the rows in the order of memory, also where time runs backwards in it.
template <class E>
LaneRows<E> tile_rows(const RecurrenceView& view, E* tile, int count) {
  constexpr int64_t width = Simd<std::remove_const_t<E>>::width;
  return view.time < 0 ? LaneRows<E>{tile + (count - 1) * width, -width} : LaneRows<E>{tile, width};
}

template <class T>
LaneRows<const T> load_rows(const LinearRecurrenceInputs& p, T* tile, const RecurrenceView& view, const RecurrenceTask& task, int64_t t,
                            int count) {
  if (!view) return {};
  const int64_t first = view.time < 0 ? t + count - 1 : t, step = view.time < 0 ? -view.time : view.time;
  load_tile(tile, address(p, view, task.row, task.lane, first), view.dtype, step, view.lane, count, task.lanes);
  return tile_rows<const T>(view, tile, count);
}

template <class T>
void store_rows(const LinearRecurrenceInputs& p, const T* tile, const RecurrenceView& view, const RecurrenceTask& task, int64_t t,
                int count, bool stream) {
  if (!view) return;
  const int64_t first = view.time < 0 ? t + count - 1 : t, step = view.time < 0 ? -view.time : view.time;
  void* const to = address(p, view, task.row, task.lane, first);
  const bool whole_lines = stream && is_line(to) && view.lane * size_of(view.dtype) % 64 == 0;
  store_tile(tile, to, view.dtype, step, view.lane, count, task.lanes, Simd<T>::width, whole_lines);
}

// The memory of a chunk that goes through a tile, to be asked for piece by piece, a cache line a step, while another chunk is at work.
template <class T>
class Pieces {
 public:
  Pieces(const LinearRecurrenceInputs& p, const RecurrenceView& view, const RecurrenceTask& task, int64_t t)
      : from_(view ? static_cast<const char*>(address(p, view, task.row, task.lane, t)) : nullptr),
        lane_(view.lane * size_of(view.dtype)),
        time_(view.time * size_of(view.dtype)) {}

  MAMBA_INLINE void ask(int64_t step) const {
    constexpr int64_t width = Simd<T>::width;
    if (from_) prefetch<2>(from_, step % width * lane_ + step / width * width * time_);
  }

 private:
  const char* from_;
  int64_t lane_, time_;
};

// Whether whole cache lines of the block's rows may pass by the caches.
template <class E>
bool streams(const LaneRows<E>& rows, int64_t lanes) {
  constexpr int64_t line = 64, size = sizeof(E);
  return reinterpret_cast<uintptr_t>(rows.data) % line == 0 && rows.step * size % line == 0 && lanes * size % line == 0;
}

// From one row to the one that memory is to be asked for: about 4 KiB ahead.
template <class E>
int64_t bytes_ahead(const LaneRows<E>& rows, int64_t lanes) {
  constexpr int64_t size = sizeof(E), distance = 4096;
  const int64_t row = lanes * size;
  return (row < distance ? distance / row : 1) * rows.step * size;
}

// Calls f(first lane, lanes, whole) for every vector of a row; `whole` is a type, so that full vectors need no condition.
template <class T, class F>
MAMBA_INLINE void for_each_vector(int lanes, F&& f) {
  constexpr int width = Simd<T>::width;
  int lane = 0;
  for (; lane + width <= lanes; lane += width) f(lane, width, std::true_type{});
  if (lane < lanes) f(lane, lanes - lane, std::false_type{});
}

template <class T, class E, class Whole>
MAMBA_INLINE Vec<T> get(const E* from, int lanes, Whole) {
  if constexpr (Whole::value)
    return load_as<T>(from);
  else
    return load_partial<T>(from, lanes);
}

enum class Output { none, store, stream };

// The CPU's own conversion to bf16 takes subnormal numbers for 0, which FlushSubnormals makes of them too.
template <Output How, class V, class E, class Whole>
MAMBA_INLINE void put(E* to, V from, int lanes, Whole) {
  if constexpr (How == Output::none)
    return;
  else if constexpr (!Whole::value)
    return store_partial(to, from, lanes);
#if MAMBA_CPU_AVX512
  if constexpr (std::is_same_v<E, bf16> && sizeof(Lane<V>) == 4) {
    if (bf16_instructions) {
      __m256i narrow;
      asm("vcvtneps2bf16 %1, %0" : "=v"(narrow) : "v"(from));
      return How == Output::stream ? _mm256_stream_si256(reinterpret_cast<__m256i*>(to), narrow)
                                   : _mm256_storeu_si256(reinterpret_cast<__m256i_u*>(to), narrow);
    }
  }
#endif
  if constexpr (How == Output::stream)
    stream_as(to, from);
  else
    store_as(to, from);
}

template <class Params, class F>
void dispatch(const Params& params, F&& f) {
  dispatch_floating(params.x.dtype, [&](auto tag) {
    if (params.sigmoid)
      f(tag, std::true_type{});
    else
      f(tag, std::false_type{});
  });
}

// How many tasks are not worth waking a second thread.
inline int64_t serial_tasks(const LinearRecurrenceInputs& p, const RecurrencePlan& plan) {
  const int64_t numbers = plan.block * (p.seqlen / (plan.runs > 1 ? plan.runs - 1 : 1));
  return numbers > 0 ? 16384 / numbers : 64;
}

// Calls sweep(task, memory) for every task, on all threads; `memory`: `numbers` of them to work in.
template <class T, class F>
void run_tasks(const LinearRecurrenceInputs& p, const RecurrencePlan& plan, int64_t numbers, bool streaming, const F& sweep) {
  parallel_for(
      plan.tasks,
      [&](int64_t begin, int64_t end) {
        const FlushSubnormals flush;
        const Scratch<T> memory(numbers);
        for (int64_t index = begin; index < end; ++index) sweep(plan.task(p, index), memory.get());
        if (streaming) end_streaming();
      },
      serial_tasks(p, plan));
}

}  // namespace
}  // namespace mamba::cpu::MAMBA_CPU_LEVEL
