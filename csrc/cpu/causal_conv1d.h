// causal_conv1d: what forward and backward share. A strand is what a vector follows through time: a vector of channels, whose time steps
// are `vl` numbers apart in a buffer (channel-last memory), or one channel, whose time steps are 1 apart, so that lanes are time steps.
// Either way a piece of a strand stands in the first-level cache in arithmetic type, with the samples before it in front, and one loop
// serves both: tap k of the numbers at `at` is the vector at at + (k - past) * step. Where memory already has the order of the strand, it
// is read once, and the taps are kept in registers. Short rows of time steps are joined (see below), or transposed where they have states.
#pragma once

#include "cpu/causal_conv1d_tiles.h"
#include "cpu/simd_math.h"
#include "cpu/stream.h"
#include "cpu/tile.h"

namespace mamba::cpu::MAMBA_CPU_LEVEL {
namespace {

// The filter's width and the number of past samples it reaches: constants for W > 0.
template <int W>
struct Width {
  explicit Width(int64_t) {}
  static constexpr int64_t width = W, past = W - 1;
};
template <>
struct Width<0> {
  explicit Width(int64_t taps) : width(taps), past(taps - 1) {}
  const int64_t width, past;
};

// N vectors in registers; as many as wanted, in the memory given, for N = 0.
template <class T, int N>
struct Vectors {
  explicit Vectors(T*) {}
  MAMBA_INLINE Vec<T>& operator[](int64_t i) { return values[i]; }
  Vec<T> values[N];
};
template <class T>
struct Vectors<T, 0> {
  explicit Vectors(T* memory) : values(reinterpret_cast<Vec<T>*>(memory)) {}
  MAMBA_INLINE Vec<T>& operator[](int64_t i) { return values[i]; }
  Vec<T>* values;
};

template <class T, int N, class... I>
T read_one(const View<N>& view, I... index) {
  return dispatch_floating(view.dtype,
                           [&](auto tag) -> T { return load_scalar<T>(view.template at<typename decltype(tag)::type>(index...)); });
}

template <class T, int N, class... I>
void write_one(const View<N>& view, T value, I... index) {
  dispatch_floating(view.dtype, [&](auto tag) { store_scalar(view.template at<typename decltype(tag)::type>(index...), value); });
}

// The first `lanes` lanes, `step` elements apart.
template <class T, class S>
MAMBA_INLINE Vec<T> read(const S* from, int lanes, int64_t step) {
  if (lanes == Simd<T>::width && step == 1) return load_as<T>(from);
  if (step == 0) return broadcast(load_scalar<T>(from));
  return load_partial<T>(from, lanes, step);
}

template <class V, class S>
MAMBA_INLINE void write(S* to, V from, int lanes, int64_t step) {
  if (lanes == Simd<Lane<V>>::width && step == 1)
    store_as(to, from);
  else
    store_partial(to, from, lanes, step);
}

// The lanes From, From + 1, ... of the concatenation (a, b).
template <int Width, int From>
struct LanesFrom {
  static constexpr int at(int i) { return i + From; }
};

template <int From, class V>
MAMBA_INLINE V lanes_from(V a, V b) {
  constexpr int width = Simd<Lane<V>>::width;
  if constexpr (From == 0) return a;
  if constexpr (From == width) return b;
#if MAMBA_CPU_AVX512
  if constexpr (sizeof(Lane<V>) == 4)
    return bit_cast<V>(_mm512_alignr_epi32(bit_cast<__m512i>(b), bit_cast<__m512i>(a), From % width));
  else
    return bit_cast<V>(_mm512_alignr_epi64(bit_cast<__m512i>(b), bit_cast<__m512i>(a), From % width));
#else
  return shuffle<LanesFrom<width, From % width>>(a, b);
#endif
}

// to[k] = lanes_from<From + k>(a, b)
template <int From, int Count, class V>
MAMBA_INLINE void windows(V a, V b, V* to) {
  if constexpr (Count > 0) {
    *to = lanes_from<From>(a, b);
    windows<From + 1, Count - 1>(a, b, to + 1);
  }
}

#if MAMBA_CPU_AVX512
// The same, 0 in the lanes whose time is below `least`.
template <int From, class V>
MAMBA_INLINE V lanes_from(V a, V b, IntVec<Lane<V>> times, int64_t least) {
  using T = Lane<V>;
  constexpr int by = From % Simd<T>::width;
  const auto now = bit_cast<__m512i>(times), low = bit_cast<__m512i>(a), high = bit_cast<__m512i>(b);
  if constexpr (sizeof(T) == 4)
    return bit_cast<V>(_mm512_maskz_alignr_epi32(_mm512_cmpge_epi32_mask(now, _mm512_set1_epi32(static_cast<int>(least))), high, low, by));
  else
    return bit_cast<V>(_mm512_maskz_alignr_epi64(_mm512_cmpge_epi64_mask(now, _mm512_set1_epi64(least)), high, low, by));
}
#endif

// The first `lanes` lanes, the others 0.
template <class V>
MAMBA_INLINE V first_lanes(V v, int lanes) {
  using T = Lane<V>;
  if (lanes == Simd<T>::width) return v;
  T buffer[Simd<T>::width];
  store(buffer, v);
  return load_partial<T>(buffer, lanes);
}

// Weights and bias in accumulation type: rows of `stride` channels (a whole number of vectors), one for each tap, then the bias.
template <class T>
class Filters {
 public:
  template <class Params>
  explicit Filters(const Params& p)
      : stride((p.dim + Simd<T>::width - 1) / Simd<T>::width * Simd<T>::width), values_(stride * (p.width + 1)) {
    T* const values = values_.get();
    for (int64_t i = 0; i < stride * (p.width + 1); ++i) values[i] = 0;
    for (int64_t d = 0; d < p.dim; ++d) {
      for (int64_t k = 0; k < p.width; ++k) values[k * stride + d] = read_one<T>(p.weight, d, k);
      if (p.bias) values[p.width * stride + d] = read_one<T>(p.bias, d);
    }
  }

  const T* tap(int64_t k, int64_t d) const { return values_.get() + k * stride + d; }

  const int64_t stride;

 private:
  Scratch<T> values_;
};

// Sample t of channels d .. d + lanes - 1, where t may precede the run (by at most width - 1).
template <class S, class T = Accumulate<S>, class Params>
Vec<T> channel_samples(const Params& p, const Tile& tile, int64_t t, int64_t d, int lanes) {
  if (t >= tile.first) return read<T>(p.x.template at<S>(tile.row, d, t), lanes, p.x.stride[1]);
  if (tile.initial < 0 || !p.initial_state) return zero<T>();
  return dispatch_floating(p.initial_state.dtype, [&](auto tag) {
    using I = typename decltype(tag)::type;
    return load_partial<T>(p.initial_state.template at<I>(tile.initial, d, p.width - 1 + t - tile.first), lanes, p.initial_state.stride[1]);
  });
}

// Sums are computed for several vectors before any of them is activated: so many instructions wait for one another otherwise that the
// next vector's do not fit into the processor's window.
constexpr int together = 4;  // vectors of a row
constexpr int block = 8;     // rows

// Joined rows: short ones that lie behind one another in memory are computed as one, vectors go over their borders, samples beyond one are
// masked out. The filter and the sums of dweight and dbias have a place for every lane; several rows of the batch use them together. That
// takes 32 registers: with fewer it is slower than transposing.
constexpr int joined_rows = 4;
constexpr int64_t joined_steps = 256;     // at most
constexpr int64_t joined_numbers = 4096;  // of a row, whose filter and sums stay in the second-level cache

// The rows first .. last - 1 of the batch, `count` numbers of each, from channel d on.
struct JoinedItem {
  int64_t group, first, last, d, count;

  // Calls f(row, number of rows as a constant).
  template <class F>
  void for_each_row(F&& f) const {
    int64_t row = first;
    for (; row + joined_rows <= last; row += joined_rows) f(row, std::integral_constant<int, joined_rows>{});
    for (; row < last; ++row) f(row, std::integral_constant<int, 1>{});
  }
};

template <int W, class S, class Params>
class Convolution : protected Width<W> {
 protected:
  using Width<W>::width;
  using Width<W>::past;
  using T = Accumulate<S>;
  using V = Vec<T>;
  static constexpr int vl = Simd<T>::width;
  static constexpr int group = line_vectors<T, S>;     // of vectors that are written together
  static constexpr bool registers = W > 0 && W <= vl;  // may hold the taps
  static constexpr bool joining = registers && vector_bytes == 64;
  static constexpr int64_t distance = 2048 / sizeof(S);  // of prefetches along time

  Convolution(const Params& params, int64_t rows, int64_t most_tasks)
      : Width<W>(params.width),
        p(params),
        plan(params, vl, rows, most_tasks),
        filters(params),
        tiles(params, plan.length),
        groups(least((params.batch + 15) / 16, 64)),
        streaming(params.batch * params.dim * params.seqlen * static_cast<int64_t>(sizeof(S)) >= streamed_bytes) {}

  // Where a task's channels end that begin at d.
  int64_t chunk_end(int64_t d) const { return d + plan.chunk < p.dim ? d + plan.chunk : p.dim; }

  // Calls f(piece) for the pieces of a tile.
  template <class F>
  void for_each_piece(const Tile& tile, F&& f) const {
    Tile piece = tile;
    for (piece.begin = tile.begin; piece.begin < tile.end; piece.begin = piece.end) {
      piece.end = piece.begin + plan.piece < tile.end ? piece.begin + plan.piece : tile.end;
      f(piece);
    }
  }

  // A buffer holds the steps -past .. count - 1 + past of a strand, rounded up to whole vectors; step 0 is aligned.
  template <int Step>
  int64_t lead() const {
    return (past * Step + vl - 1) / vl * vl;
  }
  template <int Step>
  int64_t room() const {
    return 2 * lead<Step>() + (plan.piece * Step + vl - 1) / vl * vl + vl;
  }

  // The steps 0 .. count - 1 of a strand of `lanes` channels (those that a vector covers; 1 where lanes are time steps), the last vector
  // filled up with zeros.
  template <int Step>
  void fill(T* to, const S* from, int64_t count, int lanes, int64_t lane_step, int64_t time_step) const {
    if constexpr (Step > 1) {
      load_tile_from(to, vl, from, time_step, lane_step, static_cast<int>(count), lanes);
    } else {
      int64_t i = 0;
      for (; time_step == 1 && i + vl <= count; i += vl) store(to + i, load_as<T>(from + i));
      for (; i < count; i += vl) store(to + i, read<T>(from + i * time_step, static_cast<int>(count - i < vl ? count - i : vl), time_step));
    }
  }

  // Whether outputs pass by the caches that start at `to` and go on `step` numbers later: whole cache lines only, since half lines of many
  // rows would fill the write-combining buffers.
  bool streams_from(const S* to, int64_t step) const { return streaming && is_line(to) && step * sizeof(S) % 64 == 0; }

  // `count` steps of a strand of channels whose memory does not lie channel by channel.
  void store_transposed(const T* tile, S* to, int64_t time_step, int64_t lane_step, int64_t count, int lanes) const {
    store_tile_to(tile, vl, to, time_step, lane_step, static_cast<int>(count), lanes, streams_from(to, lane_step));
  }

  // What is to be read a few strands (channels) or a piece (time) later: asked for, one address a vector, while numbers are computed.
  struct Ahead {
    const S* at;
    int64_t step;
    MAMBA_INLINE void operator()(int64_t vector) const { prefetch(at + vector * step, 0); }
  };
  template <int Step>
  Ahead ahead(const View<3>& view, const Tile& piece, int64_t d) const {
    const S* const at = view.template at<S>(piece.row, d, piece.begin);
    if (Step == 1) return {at + plan.piece, vl};
    if (view.stride[1] == 1) return {at + 256 / sizeof(S), view.stride[2]};
    return {at + vl * view.stride[1], view.stride[1]};
  }

  // The steps -past .. -1 of a piece.
  template <int Step>
  void fill_past(T* to, const Tile& piece, int64_t d, int lanes) const {
    if (Step == 1 && piece.begin == piece.first && (piece.initial < 0 || !p.initial_state)) {
      for (int64_t i = lead<1>(); i > 0; i -= vl) store(to - i, zero<T>());
      return;
    }
    for (int64_t k = -past; k < 0; ++k) {
      const V samples = channel_samples<S>(p, piece, piece.begin + k, d, lanes);
      if constexpr (Step == vl)
        store(to + k * vl, samples);
      else
        to[k] = samples[0];
    }
  }

  // The filter of a strand: a vector of channels, or one channel in all lanes.
  template <int Step>
  MAMBA_INLINE V tap(int64_t k, int64_t d) const {
    if constexpr (Step == vl)
      return load(filters.tap(k, d));
    else
      return broadcast(*filters.tap(k, d));
  }

  // Every N-th vector from `n` on is a tap.
  // p_t = bias + sum_k weight[k] x[t - past + k]
  template <int Step, int N = 1>
  MAMBA_INLINE V convolve(const T* x, Vectors<T, W * N>& weight, V bias, int n = 0) const {
    V sum = bias;
    for (int64_t k = 0; k < width; ++k) sum = sum + weight[k * N + n] * load(x + (k - past) * Step);
    return sum;
  }

  // The same with the taps in registers.
  static MAMBA_INLINE V convolve(const V* x, const V* weight, V bias) {
    V sum = bias;
    unroll<W>([&](auto k) __attribute__((always_inline)) { sum = sum + weight[k] * x[k]; });
    return sum;
  }

  template <int Step>
  MAMBA_INLINE void filter_of(int64_t d, V* weight) const {
    unroll<W>([&](auto k) __attribute__((always_inline)) { weight[k] = tap<Step>(k, d); });
  }

  // The `past` samples before step t of a vector of channels that lie in memory side by side.
  MAMBA_INLINE void edge(const Tile& tile, int64_t t, int64_t d, V* samples) const {
    if (t - past >= tile.first) {
      const S* const from = p.x.template at<S>(tile.row, d, t);
      unroll<W - 1>([&](auto k) __attribute__((always_inline)) { samples[k] = load_as<T>(from + (k - W + 1) * p.x.stride[2]); });
    } else {
      for (int k = 0; k < W - 1; ++k) samples[k] = channel_samples<S>(p, tile, t - past + k, d, vl);
    }
  }

  // The vector of time steps that ends before the tile; only the last `past` lanes matter.
  V before(const Tile& tile, int64_t d) const {
    V samples = zero<T>();
    if (tile.begin > tile.first || (tile.initial >= 0 && p.initial_state))
      for (int64_t k = -past; k < 0; ++k) samples[vl + k] = channel_samples<S>(p, tile, tile.begin + k, d, 1)[0];
    return samples;
  }

  // Whether the rows of all `views` are joined.
  template <class... Views>
  bool joins(const Views&... views) const {
    const bool plain = !p.seq_idx && !p.cu_seqlens && !p.initial_state && p.seqlen >= width && p.seqlen <= joined_steps;
    return joining && plain && p.batch >= 16 && p.dim * p.seqlen % (group * vl) == 0 &&
           ((views.stride[1] == p.seqlen && views.stride[2] == 1) && ...);
  }

  // An item of work: a group of the batch's rows, a block of channels.
  int64_t joined_channels() const {
    const int64_t lines = joined_numbers / (group * vl * p.seqlen);
    return group * vl * (lines > 0 ? lines : 1);
  }
  int64_t joined_blocks() const { return (p.dim + joined_channels() - 1) / joined_channels(); }
  JoinedItem joined_item(int64_t index) const {
    const int64_t n = index / joined_blocks(), d = index % joined_blocks() * joined_channels();
    return {n, n * p.batch / groups, (n + 1) * p.batch / groups, d, least(joined_channels(), p.dim - d) * p.seqlen};
  }

  // The steps of the lanes of a vector that begins with step `first`.
  IntVec<T> joined_times(int64_t first) const {
    IntVec<T> times;
    for (int i = 0; i < vl; ++i) times[i] = (first + i) % p.seqlen;
    return times;
  }

  // The filter of each lane: rows of `count` numbers, taps, then bias.
  void join_filters(const JoinedItem& item, T* to) const {
    for (int64_t k = 0; k <= width; ++k, to += item.count)
      for (int64_t i = 0, d = item.d; i < item.count; i += p.seqlen, ++d)
        for (int64_t t = 0; t < p.seqlen; t += vl) store(to + i + t, broadcast(*filters.tap(k, d)));  // the next channel covers the excess
  }

  // samples[k]: those W - 1 - k steps before `now`
  static MAMBA_INLINE void joined_samples(V before, V now, IntVec<T> times, V* samples) {
    unroll<W - 1>(
        [&](auto k) __attribute__((always_inline)) { samples[k] = lanes_from<vl - W + 1 + k.value>(before, now, times, W - 1 - k.value); });
    samples[W - 1] = now;
  }

  const Params& p;
  const Plan plan;
  const Filters<T> filters;
  const Tiles tiles;
  const int64_t groups;  // of joined rows
  const bool streaming;
};

}  // namespace
}  // namespace mamba::cpu::MAMBA_CPU_LEVEL
