// Causal depthwise convolution, backward: the loops of causal_conv1d.cpp with a second window, over the gradients of p.
// dweight and dbias are summed in blocks of tiles, then over the blocks, always in the same order.
#include "cpu/causal_conv1d_tiles.h"

namespace mamba::cpu::MAMBA_CPU_LEVEL {
namespace {

constexpr int64_t backward_rows = 32;  // of a channel-last tile
constexpr int64_t most_blocks = 64;    // of the sums for dweight and dbias

template <int W, class S>
class Backward : Width<W> {
  using Width<W>::width;
  using Width<W>::past;

 public:
  using T = Accumulate<S>;
  using V = Vec<T>;
  static constexpr int vl = Simd<T>::width;

  explicit Backward(const CausalConv1dBwd& params)
      : Width<W>(params.width),
        p(params),
        plan(params, W == 0, vl, backward_rows, most_blocks),
        filters(params),
        tiles(params, plan.length),
        blocks(tiles.count() < most_blocks ? tiles.count() : most_blocks),
        partial(blocks * (width + 1) * filters.stride),
        streaming(params.batch * params.dim * params.seqlen * static_cast<int64_t>(sizeof(S)) >= streamed_bytes) {}

  void run() {
    const int64_t work = p.batch * p.dim * p.seqlen;
    parallel_for(
        blocks * plan.chunks,
        [&](int64_t begin, int64_t end) {
          const Scratch<T> memory(4 * width * vl);
          for (int64_t task = begin; task < end; ++task) {
            const int64_t block = task / plan.chunks, d = task % plan.chunks * plan.chunk;
            sum_block(block, d, d + plan.chunk < p.dim ? d + plan.chunk : p.dim, memory.get());
          }
          if (streaming) end_streaming();
        },
        work < 16384 ? blocks * plan.chunks : 1);
    sum_blocks();
    if (p.dinitial_state && past > 0) empty_sequences();
  }

 private:
  // The tiles of one block, in order. Blocks depend on the shape only, so the sums do not depend on the number of threads.
  void sum_block(int64_t block, int64_t begin, int64_t end, T* memory) const {
    T* const sums = partial.get() + block * (width + 1) * filters.stride;
    for (int64_t k = 0; k <= width; ++k)
      for (int64_t d = begin; d < (end == p.dim ? filters.stride : end); ++d) sums[k * filters.stride + d] = 0;
    for (int64_t i = block * tiles.count() / blocks; i < (block + 1) * tiles.count() / blocks; ++i) {
      const Tile& tile = tiles[i];
      int64_t d = begin;
      if constexpr (W > 0) {
        if (!plan.channels)
          for (; d < end; ++d) times(tile, d, sums + d);
      }
      for (; full(tile) && d + vl <= end; d += vl) channels<true>(tile, d, vl, sums + d, memory);
      for (; d < end; d += vl) channels<false>(tile, d, static_cast<int>(end - d < vl ? end - d : vl), sums + d, memory);
    }
  }

  bool reads(const Tile& tile) const { return p.dout && !tile.padding; }
  bool full(const Tile& tile) const { return p.x.stride[1] == 1 && p.dx.stride[1] == 1 && (!reads(tile) || p.dout.stride[1] == 1); }

  // p_t is recomputed; gp_t = dout_t silu'(p_t); dweight[k] = sum_t gp_t x[t - past + k]; dbias = sum_t gp_t;
  // dx_i = sum_j weight[past - j] gp_{i + j}, complete when time has come to i + past: gp is recomputed that far behind the tile.
  template <bool Full>
  void channels(const Tile& tile, int64_t d, int lanes, T* sums, T* memory) const {
    Vectors<T, W> weight(memory), samples(memory + width * vl), gradients(memory + 2 * width * vl), dweight(memory + 3 * width * vl);
    for (int64_t k = 0; k < width; ++k) {
      weight[k] = load(filters.tap(k, d));
      gradients[k] = dweight[k] = zero<T>();
    }
    const V bias = load(filters.tap(width, d));
    V dbias = zero<T>();
    for (int64_t k = 0; k < past; ++k) samples[k + 1] = channel_samples<S>(p, tile, tile.begin - past + k, d, lanes);
    const bool reading = reads(tile), active = p.silu;
    const int64_t x_step = p.x.stride[2], dout_step = p.dout.stride[2], dx_step = p.dx.stride[2];
    const int64_t x_lanes = p.x.stride[1], dout_lanes = p.dout.stride[1], dx_lanes = p.dx.stride[1];
    const int64_t reach = tile.end + past < tile.last ? tile.end + past : tile.last;
    const S* x = p.x.template at<S>(tile.row, d, tile.begin);
    const S* dout = reading ? p.dout.template at<S>(tile.row, d, tile.begin) : nullptr;
    S* dx = p.dx.template at<S>(tile.row, d, tile.begin);
    const bool stream = Full && streaming && vl * sizeof(S) == 64 && aligned(dx) && dx_step * sizeof(S) % 64 == 0;

    auto step = [&](int64_t t, auto edge) __attribute__((always_inline)) {
      for (int64_t k = 0; k < past; ++k) {
        samples[k] = samples[k + 1];
        gradients[k] = gradients[k + 1];
      }
      gradients[past] = zero<T>();
      if (reading && (!edge.value || t < reach)) {
        samples[past] = read<Full, T>(x, lanes, x_lanes);
        V gradient = read<Full, T>(dout, lanes, dout_lanes);
        if (Full) {
          prefetch(x, channels_ahead);
          prefetch(dout, channels_ahead);
        }
        if (active) {
          V sum = bias;
          for (int64_t k = 0; k < width; ++k) sum = sum + weight[k] * samples[k];
          gradient = gradient * silu_with_slope(sum).slope;
        }
        if (!edge.value || t < tile.end) {
          dbias = dbias + gradient;
          for (int64_t k = 0; k < width; ++k) dweight[k] = dweight[k] + gradient * samples[k];
        }
        gradients[past] = gradient;
        x += x_step;
        dout += dout_step;
      }
      const int64_t i = t - past;
      if (edge.value && i < tile.begin && !(i < tile.first && tile.begin == tile.first)) return;
      V sum = zero<T>();
      for (int64_t j = 0; j < width; ++j) sum = sum + weight[past - j] * gradients[j];
      if (edge.value) sum = sum + final_gradient(tile, i, d, lanes);
      if (edge.value && i < tile.first) return initial_gradient(tile, i, d, lanes, sum);
      if (stream)
        stream_as(dx, sum);
      else
        write<Full>(dx, sum, lanes, dx_lanes);
      dx += dx_step;
    };
    int64_t t = tile.begin;
    for (; t < tile.begin + past; ++t) step(t, std::true_type{});
    for (; t < tile.end; ++t) step(t, std::false_type{});
    for (; t < tile.end + past; ++t) step(t, std::true_type{});

    for (int64_t k = 0; k < width; ++k) store(sums + k * filters.stride, load(sums + k * filters.stride) + dweight[k]);
    store(sums + width * filters.stride, load(sums + width * filters.stride) + dbias);
  }

  // What last_state's gradient adds to sample i (which may precede the run).
  V final_gradient(const Tile& tile, int64_t i, int64_t d, int lanes) const {
    const int64_t j = i - (tile.last - past);
    if (tile.final < 0 || !p.dlast_state || j < 0) return zero<T>();
    return load_partial<T>(p.dlast_state.template at<S>(tile.final, d, j), lanes, p.dlast_state.stride[1]);
  }

  void initial_gradient(const Tile& tile, int64_t i, int64_t d, int lanes, V sum) const {
    if (tile.initial < 0 || !p.dinitial_state) return;
    for (int lane = 0; lane < lanes; ++lane)
      write_one(p.dinitial_state, static_cast<T>(sum[lane]), tile.initial, d + lane, past + i - tile.first);
  }

  void times(const Tile& tile, int64_t d, T* sums) const {
    V weight[W], dweight[W], taps[W];
    for (int64_t k = 0; k < width; ++k) {
      weight[k] = broadcast(*filters.tap(k, d));
      dweight[k] = zero<T>();
    }
    const V bias = broadcast(*filters.tap(width, d));
    V dbias = zero<T>();
    const bool active = p.silu;
    const int64_t count = tile.end - tile.begin;
    const int64_t reach = reads(tile) ? (tile.end + past < tile.last ? tile.end + past : tile.last) - tile.begin : 0;
    const int64_t x_step = p.x.stride[2], dout_step = p.dout.stride[2], dx_step = p.dx.stride[2];
    const S* const x = p.x.template at<S>(tile.row, d, tile.begin);
    const S* const dout = reach > 0 ? p.dout.template at<S>(tile.row, d, tile.begin) : nullptr;
    S* const dx = p.dx.template at<S>(tile.row, d, tile.begin);
    const bool stream = streaming && dx_step == 1 && aligned(dx);
    const int64_t final_from = tile.final >= 0 && p.dlast_state ? tile.last - past - tile.begin : count;  // where last_state looks

    V before = reach > 0 ? past_samples<S, T>(p, tile, tile.begin, d, past) : zero<T>();
    V gradient = zero<T>(), first = zero<T>();
    for (int64_t i = 0; i < count + vl; i += vl) {  // one vector ahead of dx
      V next = zero<T>();
      if (i < reach) {
        const int lanes = static_cast<int>(reach - i < vl ? reach - i : vl);
        const V now = read<false, T>(x + i * x_step, lanes, x_step);
        next = read<false, T>(dout + i * dout_step, lanes, dout_step);
        prefetch(x + i * x_step, time_ahead);
        prefetch(dout + i * dout_step, time_ahead);
        if (lanes < vl) next = first_lanes(next, lanes);
        shift_taps<W>(taps, before, now, std::make_index_sequence<W>{});
        before = now;
        if (active) {
          V sum = bias;
          for (int64_t k = 0; k < width; ++k) sum = sum + weight[k] * taps[k];
          next = next * silu_with_slope(sum).slope;
        }
        const V counted = count - i < vl ? first_lanes(next, count - i) : next;
        if (i < count) {
          dbias = dbias + counted;
          for (int64_t k = 0; k < width; ++k) dweight[k] = dweight[k] + counted * taps[k];
        }
      }
      if (i == 0) {
        first = next;
      } else {
        const int64_t at = i - vl;
        shift_ahead<W>(taps, gradient, next, std::make_index_sequence<W>{});
        V value = zero<T>();
        for (int64_t j = 0; j < width; ++j) value = value + weight[past - j] * taps[j];
        for (int64_t lane = final_from > at ? final_from - at : 0; lane < vl && at + lane < count; ++lane)
          value[lane] += final_gradient(tile, tile.begin + at + lane, d, 1)[0];
        if (stream && i <= count)
          stream_as(dx + at, value);
        else
          write<false>(dx + at * dx_step, value, static_cast<int>(i <= count ? vl : count - at), dx_step);
      }
      gradient = next;
    }
    if (reach > 0) {
      for (int64_t k = 0; k < width; ++k) sums[k * filters.stride] += sum(dweight[k]);
      sums[width * filters.stride] += sum(dbias);
    }
    if (tile.begin > tile.first || tile.initial < 0 || !p.dinitial_state) return;
    for (int64_t j = 0; j < past; ++j) {
      T value = final_gradient(tile, tile.first - past + j, d, 1)[0];
      for (int64_t k = 0; k <= j; ++k) value += *filters.tap(k, d) * first[j - k];
      write_one(p.dinitial_state, value, tile.initial, d, j);
    }
  }

  // A selection: the other lanes are 0 whatever they were.
  static V first_lanes(V value, int64_t lanes) {
    T numbers[vl];
    store(numbers, value);
    return load_partial<T>(numbers, static_cast<int>(lanes < 0 ? 0 : lanes));
  }

  static bool aligned(const S* to) { return reinterpret_cast<uintptr_t>(to) % 64 == 0; }

  // Second stage: the blocks' sums, in order.
  void sum_blocks() const {
    for (int64_t d = 0; d < p.dim; d += vl) {
      const int lanes = static_cast<int>(p.dim - d < vl ? p.dim - d : vl);
      for (int64_t k = 0; k <= width; ++k) {
        V total = zero<T>();
        for (int64_t block = 0; block < blocks; ++block)
          total = total + load(partial.get() + (block * (width + 1) + k) * filters.stride + d);
        for (int lane = 0; lane < lanes; ++lane) {
          if (k < width)
            write_one(p.dweight, static_cast<T>(total[lane]), d + lane, k);
          else if (p.dbias)
            write_one(p.dbias, static_cast<T>(total[lane]), d + lane);
        }
      }
    }
  }

  // A sequence without tokens hands its state through, and so its gradient.
  void empty_sequences() const {
    for (int64_t s = 0; s < p.num_sequences; ++s) {
      const int64_t count = p.cu_seqlens ? load_index(p.cu_seqlens, s + 1) - load_index(p.cu_seqlens, s) : p.seqlen;
      if (count > 0) continue;
      for (int64_t d = 0; d < p.dim; ++d)
        for (int64_t j = 0; j < past; ++j) write_one(p.dinitial_state, p.dlast_state ? read_one<T>(p.dlast_state, s, d, j) : T(0), s, d, j);
    }
  }

  const CausalConv1dBwd& p;
  const Plan plan;
  const Filters<T> filters;
  const Tiles tiles;
  const int64_t blocks;
  const Scratch<T> partial;  // (blocks, width + 1, filters.stride)
  const bool streaming;
};

}  // namespace

void causal_conv1d_bwd(const CausalConv1dBwd& params) {
  dispatch(params, [&](auto tag, auto width) { Backward<width.value, typename decltype(tag)::type>(params).run(); });
}

}  // namespace mamba::cpu::MAMBA_CPU_LEVEL
