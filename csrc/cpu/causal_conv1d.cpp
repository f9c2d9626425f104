// Causal depthwise convolution. Two orientations of one loop, after the memory layout of x, so that no tensor is transposed:
// lanes are channels (the last width samples stay in registers while time goes on) or time steps (a row is brought into a small buffer,
// whose shifted loads are the taps). Padding and sequence borders are a matter of where runs begin and end, never of multiplication.
#include "cpu/causal_conv1d_tiles.h"

namespace mamba::cpu::MAMBA_CPU_LEVEL {
namespace {

template <int W, class S>  // W = 0: any width
class Forward {
 public:
  using T = Accumulate<S>;
  using V = Vec<T>;
  static constexpr int vl = Simd<T>::width;

  explicit Forward(const CausalConv1dFwd& params)
      : p(params), plan(params, vl, 1 << 20), width(W ? W : params.width), past(width - 1), filters(params), tiles(params, plan.length) {}

  void run() {
    const int64_t tasks = tiles.count() * plan.chunks;
    const int64_t task_size = plan.chunk * (plan.length < p.seqlen ? plan.length : p.seqlen);
    parallel_for(
        tasks,
        [&](int64_t begin, int64_t end) {
          const Scratch<T> memory(2 * width * vl + plan.length + past + 2 * vl);
          for (int64_t task = begin; task < end; ++task) {
            const int64_t d = task % plan.chunks * plan.chunk;
            sweep(tiles[task / plan.chunks], d, d + plan.chunk < p.dim ? d + plan.chunk : p.dim, memory.get());
          }
        },
        task_size > 0 ? 32768 / task_size : 1);
    last_states();
  }

 private:
  void sweep(const Tile& tile, int64_t begin, int64_t end, T* memory) const {
    if (tile.padding) return clear(tile, begin, end);
    if (!plan.channels) {
      for (int64_t d = begin; d < end; ++d) times(tile, d, memory);
      return;
    }
    int64_t d = begin;
    for (; d + vl <= end; d += vl) channels<true>(tile, d, vl, memory);
    if (d < end) channels<false>(tile, d, static_cast<int>(end - d), memory);
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
    for (int64_t t = tile.begin; t < tile.end; ++t) {
      for (int64_t k = 0; k < past; ++k) samples[k] = samples[k + 1];
      samples[past] = read<Full, T>(from, lanes, 1);
      V sum = bias;
      for (int64_t k = 0; k < width; ++k) sum = sum + weight[k] * samples[k];
      write<Full>(to, p.silu ? silu(sum) : sum, lanes, 1);
      from += p.x.stride[2];
      to += p.out.stride[2];
    }
  }

  void times(const Tile& tile, int64_t d, T* memory) const {
    Vectors<T, W> weight(memory);
    T* const samples = memory + width * vl;
    for (int64_t k = 0; k < width; ++k) weight[k] = broadcast(*filters.tap(k, d));
    const V bias = broadcast(*filters.tap(width, d));
    time_samples<S>(p, tile, tile.end, d, samples);
    S* const to = p.out.template at<S>(tile.row, d, tile.begin);
    const int64_t count = tile.end - tile.begin, step = p.out.stride[2];
    for (int64_t i = 0; i < count; i += vl) {
      V sum = bias;
      for (int64_t k = 0; k < width; ++k) sum = sum + weight[k] * load(samples + i + k);
      if (p.silu) sum = silu(sum);
      if (i + vl <= count && step == 1)
        write<true>(to + i, sum, vl, 1);
      else
        write<false>(to + i * step, sum, static_cast<int>(i + vl <= count ? vl : count - i), step);
    }
  }

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
    for (int64_t d = 0; d < p.dim; ++d) {
      for (int64_t j = 0; j < past; ++j) {
        const int64_t t = last - past + j;
        S value{};
        if (t >= first)
          value = *p.x.template at<S>(row, d, t);
        else if (t < start && reaches_start && p.initial_state)
          store_scalar(&value, read_one<T>(p.initial_state, s, d, past + t - start));
        *p.last_state.template at<S>(s, d, j) = value;
      }
    }
  }

  bool same_id(int64_t row, int64_t t, int64_t u) const { return load_index(p.seq_idx, row, t) == load_index(p.seq_idx, row, u); }

  const CausalConv1dFwd& p;
  const Plan plan;
  const int64_t width, past;
  const Filters<T> filters;
  const Tiles tiles;
};

constexpr int64_t most_blocks = 64;  // of the sums for dweight and dbias

template <int W, class S>
class Backward {
 public:
  using T = Accumulate<S>;
  using V = Vec<T>;
  static constexpr int vl = Simd<T>::width;

  explicit Backward(const CausalConv1dBwd& params)
      : p(params),
        plan(params, vl, most_blocks),
        width(W ? W : params.width),
        past(width - 1),
        filters(params),
        tiles(params, plan.length),
        blocks(tiles.count() < most_blocks ? tiles.count() : most_blocks),
        partial(blocks * (width + 1) * filters.stride) {}

  void run() {
    const int64_t work = tiles.count() * plan.length * p.dim;
    parallel_for(
        blocks * plan.chunks,
        [&](int64_t begin, int64_t end) {
          const Scratch<T> memory(4 * width * vl + 2 * (plan.length + 2 * past + 2 * vl));
          for (int64_t task = begin; task < end; ++task) {
            const int64_t block = task / plan.chunks, d = task % plan.chunks * plan.chunk;
            sum_block(block, d, d + plan.chunk < p.dim ? d + plan.chunk : p.dim, memory.get());
          }
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
      if (plan.channels) {
        for (; full(tile) && d + vl <= end; d += vl) channels<true>(tile, d, vl, sums + d, memory);
        for (; d < end; d += vl) channels<false>(tile, d, static_cast<int>(end - d < vl ? end - d : vl), sums + d, memory);
      } else {
        for (; d < end; ++d) times(tile, d, sums + d, memory);
      }
    }
  }

  bool reads(const Tile& tile) const { return p.dout && !tile.padding; }
  bool full(const Tile& tile) const { return !reads(tile) || p.dout.stride[1] == 1; }

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
    const bool reading = reads(tile);
    const int64_t reach = tile.end + past < tile.last ? tile.end + past : tile.last;
    const S* x = p.x.template at<S>(tile.row, d, tile.begin);
    const S* dout = reading ? p.dout.template at<S>(tile.row, d, tile.begin) : nullptr;
    S* dx = p.dx.template at<S>(tile.row, d, tile.begin);

    auto step = [&](int64_t t, auto edge) {
      for (int64_t k = 0; k < past; ++k) {
        samples[k] = samples[k + 1];
        gradients[k] = gradients[k + 1];
      }
      gradients[past] = zero<T>();
      if (reading && (!edge.value || t < reach)) {
        samples[past] = read<Full, T>(x, lanes, 1);
        V gradient = read<Full, T>(dout, lanes, p.dout.stride[1]);
        if (p.silu) {
          V sum = bias;
          for (int64_t k = 0; k < width; ++k) sum = sum + weight[k] * samples[k];
          gradient = gradient * silu_with_slope(sum).slope;
        }
        if (!edge.value || t < tile.end) {
          dbias = dbias + gradient;
          for (int64_t k = 0; k < width; ++k) dweight[k] = dweight[k] + gradient * samples[k];
        }
        gradients[past] = gradient;
        x += p.x.stride[2];
        dout += p.dout.stride[2];
      }
      const int64_t i = t - past;
      if (edge.value && i < tile.begin && !(i < tile.first && tile.begin == tile.first)) return;
      V sum = zero<T>();
      for (int64_t j = 0; j < width; ++j) sum = sum + weight[past - j] * gradients[j];
      if (edge.value) sum = sum + final_gradient(tile, i, d, lanes);
      if (edge.value && i < tile.first) return initial_gradient(tile, i, d, lanes, sum);
      write<Full>(dx, sum, lanes, 1);
      dx += p.dx.stride[2];
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

  void times(const Tile& tile, int64_t d, T* sums, T* memory) const {
    Vectors<T, W> weight(memory), dweight(memory + width * vl);
    T* const samples = memory + 4 * width * vl;                      // sample begin - past + i stands at i
    T* const gradients = samples + plan.length + 2 * past + 2 * vl;  // gp of begin + i stands at i, zeros from the run's end on
    for (int64_t k = 0; k < width; ++k) {
      weight[k] = broadcast(*filters.tap(k, d));
      dweight[k] = zero<T>();
    }
    const V bias = broadcast(*filters.tap(width, d));
    V dbias = zero<T>();
    const int64_t count = tile.end - tile.begin;
    const int64_t reach = reads(tile) ? (tile.end + past < tile.last ? tile.end + past : tile.last) - tile.begin : 0;
    if (reach > 0) time_samples<S>(p, tile, tile.begin + reach, d, samples);

    auto gradient = [&](int64_t i, int lanes) {
      const S* dout = p.dout.template at<S>(tile.row, d, tile.begin + i);
      const int64_t step = p.dout.stride[2];
      V value = lanes == vl && step == 1 ? load_as<T>(dout) : load_partial<T>(dout, lanes, step);
      if (p.silu) {
        V sum = bias;
        for (int64_t k = 0; k < width; ++k) sum = sum + weight[k] * load(samples + i + k);
        value = value * silu_with_slope(sum).slope;
      }
      store(gradients + i, value);
      return value;
    };
    int64_t i = 0;
    for (; i < (reach > 0 ? count : 0); i += vl) {
      const V value = gradient(i, static_cast<int>(count - i < vl ? count - i : vl));
      dbias = dbias + value;
      for (int64_t k = 0; k < width; ++k) dweight[k] = dweight[k] + value * load(samples + i + k);
    }
    for (i = count; i < reach; i += vl) gradient(i, static_cast<int>(reach - i < vl ? reach - i : vl));
    for (i = reach; i < count + past + vl; ++i) gradients[i] = 0;
    for (int64_t k = 0; k < width && reach > 0; ++k) sums[k * filters.stride] += sum(dweight[k]);
    if (reach > 0) sums[width * filters.stride] += sum(dbias);

    S* const dx = p.dx.template at<S>(tile.row, d, tile.begin);
    for (i = 0; i < count; i += vl) {
      V value = zero<T>();
      for (int64_t j = 0; j < width; ++j) value = value + weight[past - j] * load(gradients + i + j);
      for (int lane = 0; lane < vl && tile.begin + i + vl > tile.last - past && p.dlast_state; ++lane)
        value[lane] += final_gradient(tile, tile.begin + i + lane, d, i + lane < count)[0];
      write_times(dx + i * p.dx.stride[2], value, count - i);
    }
    if (tile.begin > tile.first || tile.initial < 0 || !p.dinitial_state) return;
    for (int64_t j = 0; j < past; ++j) {
      T value = final_gradient(tile, tile.first - past + j, d, 1)[0];
      for (int64_t k = 0; k <= j; ++k) value += *filters.tap(k, d) * gradients[j - k];
      write_one(p.dinitial_state, value, tile.initial, d, j);
    }
  }

  MAMBA_INLINE void write_times(S* to, V value, int64_t count) const {
    if (count >= vl && p.dx.stride[2] == 1)
      write<true>(to, value, vl, 1);
    else
      write<false>(to, value, static_cast<int>(count < vl ? count : vl), p.dx.stride[2]);
  }

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
  const int64_t width, past;
  const Filters<T> filters;
  const Tiles tiles;
  const int64_t blocks;
  const Scratch<T> partial;  // (blocks, width + 1, filters.stride)
};

// Calls f(Tag<S>{}, std::integral_constant<int, W>{}).
template <class Params, class F>
void dispatch(const Params& params, F&& f) {
  dispatch_floating(params.x.dtype, [&](auto tag) {
    switch (params.width) {
      case 2: return f(tag, std::integral_constant<int, 2>{});
      case 3: return f(tag, std::integral_constant<int, 3>{});
      case 4: return f(tag, std::integral_constant<int, 4>{});
      default: return f(tag, std::integral_constant<int, 0>{});
    }
  });
}

}  // namespace

void causal_conv1d_fwd(const CausalConv1dFwd& params) {
  dispatch(params, [&](auto tag, auto width) { Forward<width.value, typename decltype(tag)::type>(params).run(); });
}

void causal_conv1d_bwd(const CausalConv1dBwd& params) {
  dispatch(params, [&](auto tag, auto width) { Backward<width.value, typename decltype(tag)::type>(params).run(); });
}

}  // namespace mamba::cpu::MAMBA_CPU_LEVEL
