// Causal depthwise convolution, forward. Two orientations of one loop, after the memory layout of x, so that no tensor is transposed:
// lanes are channels (the last width samples stay in registers while time goes on) or time steps (a row is brought into a small buffer,
// whose shifted loads are the taps). Padding and sequence borders are a matter of where runs begin and end, never of multiplication.
#include "cpu/causal_conv1d_tiles.h"

namespace mamba::cpu::MAMBA_CPU_LEVEL {
namespace {

constexpr int64_t forward_rows = 16;  // of a channel-last tile

template <int W, class S>  // W = 0: any width
class Forward : Width<W> {
  using Width<W>::width;
  using Width<W>::past;

 public:
  using T = Accumulate<S>;
  using V = Vec<T>;
  static constexpr int vl = Simd<T>::width;

  explicit Forward(const CausalConv1dFwd& params)
      : Width<W>(params.width),
        p(params),
        plan(params, W == 0, vl, forward_rows, 1 << 20),
        filters(params),
        tiles(params, plan.length),
        streaming(params.batch * params.dim * params.seqlen * static_cast<int64_t>(sizeof(S)) >= streamed_bytes) {}

  void run() {
    const int64_t tasks = tiles.count() * plan.chunks;
    const int64_t task_size = plan.chunk * (plan.length < p.seqlen ? plan.length : p.seqlen);
    parallel_for(
        tasks,
        [&](int64_t begin, int64_t end) {
          const Scratch<T> memory(2 * width * vl);
          for (int64_t task = begin; task < end; ++task) {
            const int64_t d = task % plan.chunks * plan.chunk;
            sweep(tiles[task / plan.chunks], d, d + plan.chunk < p.dim ? d + plan.chunk : p.dim, memory.get());
          }
          if (streaming) end_streaming();
        },
        task_size > 0 ? 32768 / task_size : 1);
    last_states();
  }

 private:
  void sweep(const Tile& tile, int64_t begin, int64_t end, T* memory) const {
    if (tile.padding) return clear(tile, begin, end);
    int64_t d = begin;
    if constexpr (W > 0) {
      if (!plan.channels)
        for (; d < end; ++d) times(tile, d);
    }
    const bool full = p.x.stride[1] == 1 && p.out.stride[1] == 1;
    for (; full && d + vl <= end; d += vl) channels<true>(tile, d, vl, memory);
    for (; d < end; d += vl) channels<false>(tile, d, static_cast<int>(end - d < vl ? end - d : vl), memory);
  }

  void clear(const Tile& tile, int64_t begin, int64_t end) const {
    for (int64_t d = begin; d < end; ++d)
      for (int64_t t = tile.begin; t < tile.end; ++t) *p.out.template at<S>(tile.row, d, t) = S{};
  }

  // p_t = bias + sum_k weight[k] x[t - past + k]; out = silu(p_t) or p_t
  template <bool Full>
  void channels(const Tile& tile, int64_t d, int lanes, T* memory) const {
    Vectors<T, W> weight(memory), samples(memory + width * vl);
    for (int64_t k = 0; k < width; ++k) weight[k] = load(filters.tap(k, d));
    const V bias = load(filters.tap(width, d));
    for (int64_t k = 0; k < past; ++k) samples[k + 1] = channel_samples<S>(p, tile, tile.begin - past + k, d, lanes);
    const S* from = p.x.template at<S>(tile.row, d, tile.begin);
    S* to = p.out.template at<S>(tile.row, d, tile.begin);
    const int64_t from_lanes = p.x.stride[1], to_lanes = p.out.stride[1];
    const int64_t from_step = p.x.stride[2], to_step = p.out.stride[2], count = tile.end - tile.begin;
    // Whole cache lines only: half lines of many rows would fill the write-combining buffers.
    const bool stream = Full && streaming && vl * sizeof(S) == 64 && aligned(to) && to_step * sizeof(S) % 64 == 0;
    const bool active = p.silu;
    for (int64_t t = 0; t < count; ++t) {
      for (int64_t k = 0; k < past; ++k) samples[k] = samples[k + 1];
      samples[past] = read<Full, T>(from + t * from_step, lanes, from_lanes);
      if (Full) prefetch(from + t * from_step, channels_ahead);
      V sum = bias;
      for (int64_t k = 0; k < width; ++k) sum = sum + weight[k] * samples[k];
      if (active) sum = silu(sum);
      if (stream)
        stream_as(to + t * to_step, sum);
      else
        write<Full>(to + t * to_step, sum, lanes, to_lanes);
    }
  }

  void times(const Tile& tile, int64_t d) const {
    V weight[W], taps[W];
    for (int64_t k = 0; k < width; ++k) weight[k] = broadcast(*filters.tap(k, d));
    const V bias = broadcast(*filters.tap(width, d));
    const S* const from = p.x.template at<S>(tile.row, d, tile.begin);
    S* const to = p.out.template at<S>(tile.row, d, tile.begin);
    const int64_t count = tile.end - tile.begin, from_step = p.x.stride[2], to_step = p.out.stride[2];
    const bool stream = streaming && to_step == 1 && aligned(to), active = p.silu;
    V before = past_samples<S, T>(p, tile, tile.begin, d, past);
    for (int64_t i = 0; i < count; i += vl) {
      const int lanes = static_cast<int>(count - i < vl ? count - i : vl);
      const V now = read<false, T>(from + i * from_step, lanes, from_step);
      prefetch(from + i * from_step, time_ahead);
      shift_taps<W>(taps, before, now, std::make_index_sequence<W>{});
      V sum = bias;
      for (int64_t k = 0; k < width; ++k) sum = sum + weight[k] * taps[k];
      if (active) sum = silu(sum);
      if (stream && lanes == vl)
        stream_as(to + i, sum);
      else
        write<false>(to + i * to_step, sum, lanes, to_step);
      before = now;
    }
  }

  static bool aligned(const S* to) { return reinterpret_cast<uintptr_t>(to) % 64 == 0; }

  // last_state[j] = sample last - past + j of the sequence, 0 before the last run's first sample unless initial_state reaches there
  void last_states() const {
    if (past == 0) return;
    parallel_for(
        p.num_sequences,
        [&](int64_t begin, int64_t end) {
          for (int64_t s = begin; s < end; ++s) last_state(s);
        },
        p.dim > 0 ? 16384 / (p.dim * past) : 1);
  }

  void last_state(int64_t s) const {
    const int64_t row = p.cu_seqlens ? 0 : s;
    const int64_t start = p.cu_seqlens ? load_index(p.cu_seqlens, s) : 0;
    const int64_t last = p.cu_seqlens ? load_index(p.cu_seqlens, s + 1) : p.seqlen;
    int64_t first = start;  // of the run that ends the sequence, as far as it matters
    if (p.seq_idx) {
      first = last;
      while (first > start && first > last - past && (first == last || same_id(row, first - 1, first))) --first;
    }
    const bool reaches_start = first == start;
    const int64_t x_step = p.x.stride[2], to_step = p.last_state.stride[2];
    for (int64_t d = 0; d < p.dim; ++d) {
      const S* const x = p.x.template at<S>(row, d, last - past);
      S* const to = p.last_state.template at<S>(s, d, 0);
      if (last - past >= first) {
        for (int64_t j = 0; j < past; ++j) to[j * to_step] = x[j * x_step];
        continue;
      }
      for (int64_t j = 0; j < past; ++j) {
        const int64_t t = last - past + j;
        S value{};
        if (t >= first)
          value = x[j * x_step];
        else if (t < start && reaches_start && p.initial_state)
          store_scalar(&value, read_one<T>(p.initial_state, s, d, past + t - start));
        to[j * to_step] = value;
      }
    }
  }

  bool same_id(int64_t row, int64_t t, int64_t u) const { return load_index(p.seq_idx, row, t) == load_index(p.seq_idx, row, u); }

  const CausalConv1dFwd& p;
  const Plan plan;
  const Filters<T> filters;
  const Tiles tiles;
  const bool streaming;
};

}  // namespace

void causal_conv1d_fwd(const CausalConv1dFwd& params) {
  dispatch(params, [&](auto tag, auto width) { Forward<width.value, typename decltype(tag)::type>(params).run(); });
}

}  // namespace mamba::cpu::MAMBA_CPU_LEVEL
