// causal_conv1d: how the work is cut up, and what forward and backward share.
// A run is a stretch of one row in which every sample sees the ones before it; runs are cut into tiles of consecutive time steps.
#pragma once

#include <type_traits>

#include "cpu/parallel.h"
#include "cpu/simd_math.h"
#include "params/causal_conv1d.h"

namespace mamba::cpu::MAMBA_CPU_LEVEL {
namespace {

template <class S>
using Accumulate = std::conditional_t<std::is_same_v<S, double>, double, float>;

struct Tile {
  int64_t row;
  int64_t first, last;  // the run
  int64_t begin, end;   // the tile, a part of it
  int64_t initial;      // whose initial_state precedes the run; -1: zeros
  int64_t final;        // whose last_state holds the run's last samples; -1: nobody's
  bool padding;         // samples are not used, outputs are 0
};

// Calls f for every run, as a tile that covers it; rows and runs in order.
template <class Params, class F>
void for_each_run(const Params& p, F&& f) {
  auto run = [&](int64_t row, int64_t first, int64_t last, int64_t initial, int64_t final, bool padding) {
    if (first < last) f(Tile{row, first, last, first, last, initial, final, padding});
  };
  if (p.cu_seqlens) {
    int64_t first = 0;
    for (int64_t s = 0; s < p.num_sequences; ++s) {
      const int64_t last = load_index(p.cu_seqlens, s + 1);
      run(0, first, last, s, s, false);
      first = last;
    }
    return run(0, first, p.seqlen, -1, -1, true);
  }
  for (int64_t row = 0; row < p.batch; ++row) {
    int64_t first = 0, id = p.seq_idx && p.seqlen > 0 ? load_index(p.seq_idx, row, 0) : 0;
    for (int64_t t = 1; p.seq_idx && t < p.seqlen; ++t) {
      const int64_t next = load_index(p.seq_idx, row, t);
      if (next == id) continue;
      run(row, first, t, first == 0 ? row : -1, -1, id < 0);
      first = t;
      id = next;
    }
    run(row, first, p.seqlen, first == 0 ? row : -1, row, id < 0);
  }
}

class Tiles {
 public:
  template <class Params>
  Tiles(const Params& p, int64_t length) : count_(count(p, length)), tiles_(count_) {
    int64_t next = 0;
    for_each_run(p, [&](const Tile& run) {
      for (int64_t begin = run.first; begin < run.last; begin += length) {
        Tile tile = run;
        tile.begin = begin;
        tile.end = begin + length < run.last ? begin + length : run.last;
        tiles_.get()[next++] = tile;
      }
    });
  }

  int64_t count() const { return count_; }
  const Tile& operator[](int64_t i) const { return tiles_.get()[i]; }

 private:
  template <class Params>
  static int64_t count(const Params& p, int64_t length) {
    int64_t sum = 0;
    for_each_run(p, [&](const Tile& run) { sum += (run.last - run.first + length - 1) / length; });
    return sum;
  }

  int64_t count_;
  Scratch<Tile> tiles_;
};

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

// The first `lanes` lanes, `step` elements apart. Full: all lanes, step 1.
template <bool Full, class T, class S>
MAMBA_INLINE Vec<T> read(const S* from, int lanes, int64_t step) {
  if (Full || (lanes == Simd<T>::width && step == 1)) return load_as<T>(from);
  if (step == 0) return broadcast(load_scalar<T>(from));
  return load_partial<T>(from, lanes, step);
}

template <bool Full, class V, class S>
MAMBA_INLINE void write(S* to, V from, int lanes, int64_t step) {
  if (Full || (lanes == Simd<Lane<V>>::width && step == 1))
    store_as(to, from);
  else
    store_partial(to, from, lanes, step);
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
  if (t >= tile.first) return read<false, T>(p.x.template at<S>(tile.row, d, t), lanes, p.x.stride[1]);
  if (tile.initial < 0 || !p.initial_state) return zero<T>();
  return dispatch_floating(p.initial_state.dtype, [&](auto tag) {
    using I = typename decltype(tag)::type;
    return load_partial<T>(p.initial_state.template at<I>(tile.initial, d, p.width - 1 + t - tile.first), lanes, p.initial_state.stride[1]);
  });
}

// The `past` samples before time step t of channel d in the last lanes.
template <class S, class T, class Params>
Vec<T> past_samples(const Params& p, const Tile& tile, int64_t t, int64_t d, int past) {
  constexpr int vl = Simd<T>::width;
  if (t == tile.first && (tile.initial < 0 || !p.initial_state)) return zero<T>();
  T lanes[vl] = {};
  for (int j = 0; j < past; ++j) {
    const int64_t i = t - past + j;
    if (i >= tile.first)
      lanes[vl - past + j] = load_scalar<T>(p.x.template at<S>(tile.row, d, i));
    else if (tile.initial >= 0 && p.initial_state)
      lanes[vl - past + j] = read_one<T>(p.initial_state, tile.initial, d, past + i - tile.first);
  }
  return load(lanes);
}

template <int Width, int Lanes>
struct BackBy {
  static constexpr int at(int i) { return Width - Lanes + i; }
};

// Lanes -n .. width - n - 1 of the sequence ..., before, now, ...
template <int Lanes, class V>
MAMBA_INLINE V back_by(V before, V now) {
  if constexpr (Lanes == 0)
    return now;
  else
    return shuffle<BackBy<Simd<Lane<V>>::width, Lanes>>(before, now);
}

// taps[k]: samples W - 1 - k steps back.
template <int W, class V, std::size_t... K>
MAMBA_INLINE void shift_taps(V (&taps)[W], V before, V now, std::index_sequence<K...>) {
  ((taps[K] = back_by<W - 1 - static_cast<int>(K)>(before, now)), ...);
}

// taps[k]: gradients k steps ahead.
template <int W, class V, std::size_t... K>
MAMBA_INLINE void shift_ahead(V (&taps)[W], V now, V next, std::index_sequence<K...>) {
  ((taps[K] = K == 0 ? now : back_by<(Simd<Lane<V>>::width - static_cast<int>(K)) % Simd<Lane<V>>::width>(now, next)), ...);
}

// silu(z) and its slope. float: the functions of simd_math.h with half the instructions, for vectors without a lane below -87, where
// e^-z overflows or silu becomes subnormal.
template <class V>
MAMBA_INLINE bool any_below(V z, Lane<V> bound) {
#if MAMBA_CPU_AVX512
  return _mm512_cmp_ps_mask(bit_cast<__m512>(z), _mm512_set1_ps(bound), _CMP_LT_OQ) != 0;
#elif MAMBA_CPU_AVX2
  return _mm256_movemask_ps(_mm256_cmp_ps(bit_cast<__m256>(z), _mm256_set1_ps(bound), _CMP_LT_OQ)) != 0;
#else
  const auto mask = z < bound;
  Lane<decltype(mask)> some = 0;
  for (int i = 0; i < Simd<Lane<V>>::width; ++i) some |= mask[i];
  return some != 0;
#endif
}

// e^-z for -87 <= z; NaN stays NaN
template <class V>
MAMBA_INLINE V exp_minus(V z) {
  const V x = min(broadcast(87.0f), z);
  const Rounded<V> n = round_nearest(x * -0x1.715476p0f);
  V r = x * -0x1.715476p0f - n.value;
  r = r + x * -0x1.4ae0cp-26f;
  const V fraction = exp2_fraction(r);
  return bit_cast<V>(bit_cast<IntVec<float>>(fraction) + (bit_cast<IntVec<float>>(n.shifted) << 23));
}

template <class V>
MAMBA_INLINE V activation(V z) {
  if constexpr (sizeof(Lane<V>) == 4) {
    if (__builtin_expect(!any_below(z, -87.0f), 1)) return z / (exp_minus(z) + 1.0f);
  }
  return silu(z);
}

template <class V>
MAMBA_INLINE V activation_slope(V z) {
  if constexpr (sizeof(Lane<V>) == 4) {
    if (__builtin_expect(!any_below(z, -87.0f), 1)) {
      const V e = exp_minus(z);
      const V s = 1.0f / (e + 1.0f);
      return s * (min(broadcast(200.0f), z) * (e * s) + 1.0f);  // 1 - s = e s, without cancellation
    }
  }
  return silu_with_slope(z).slope;
}

// Stores that pass by the caches, for outputs that would not fit into them. Needs alignment to the vector's size in memory.
template <class V, class S>
MAMBA_INLINE void stream_as(S* to, V from) {
  constexpr int bytes = Simd<Lane<V>>::width * static_cast<int>(sizeof(S));
  alignas(64) S buffer[Simd<Lane<V>>::width];
  store_as(buffer, from);
#if MAMBA_CPU_AVX512
  if constexpr (bytes == 64) return _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_load_si512(buffer));
#endif
#if MAMBA_CPU_AVX512 || MAMBA_CPU_AVX2
  if constexpr (bytes == 32)
    return _mm256_stream_si256(reinterpret_cast<__m256i*>(to), _mm256_load_si256(reinterpret_cast<const __m256i*>(buffer)));
#endif
  store_as(to, from);
}

MAMBA_INLINE void end_streaming() {
#if MAMBA_CPU_AVX512 || MAMBA_CPU_AVX2
  _mm_sfence();
#endif
}

// So far ahead of a stream, in bytes, that memory answers in time; hardware prefetchers stop at page borders.
constexpr int64_t time_ahead = 1024, channels_ahead = 256;

template <class S>
MAMBA_INLINE void prefetch(const S* from, int64_t bytes) {
  __builtin_prefetch(reinterpret_cast<const char*>(from) + bytes);
}

constexpr int64_t streamed_bytes = 32 << 20;  // outputs of this size do not stay in a cache

// The orientation of the vectors, and how many time steps a tile has.
struct Plan {
  bool channels;   // lanes are channels (channel-last memory), else time steps
  int64_t length;  // of a tile
  int64_t chunk;   // channels a task goes through, tile by tile
  int64_t chunks;

  template <class Params>
  Plan(const Params& p, bool any_width, int vl, int64_t rows, int64_t most_tasks) {
    channels = any_width || (p.x.stride[1] == 1 && p.dim > 1);
    // Channels: few rows, so that their pages stay within reach of the first-level cache while all channels are swept.
    // Time: whole rows, which lie behind one another in memory, unless there are too few of them for several threads.
    if (channels)
      length = p.dim >= 256 || p.dim == 0 ? rows : rows * 256 / p.dim;
    else
      length = p.batch * p.dim >= 64 ? int64_t{1} << 40 : 2048;
    if (length < 4 * p.width) length = 4 * p.width;
    chunk = p.dim;
    const int64_t tiles = p.batch * ((p.seqlen + length - 1) / length);
    const int64_t wanted = tiles < most_tasks ? tiles : most_tasks;
    if (wanted > 0 && wanted < 32) {
      const int64_t unit = channels ? vl : 1;
      chunk = (p.dim * wanted / 32 + unit - 1) / unit * unit;
      if (chunk < unit) chunk = unit;
    }
    chunks = p.dim > 0 ? (p.dim + chunk - 1) / chunk : 0;
  }
};

// Calls f(Tag<S>{}, std::integral_constant<int, W>{}); W = 0 for a width without a special version, or one that a vector cannot reach over.
template <class Params, class F>
void dispatch(const Params& params, F&& f) {
  dispatch_floating(params.x.dtype, [&](auto tag) {
    constexpr int vl = Simd<Accumulate<typename decltype(tag)::type>>::width;
    switch (params.width) {
      case 2: return f(tag, std::integral_constant<int, 2>{});
      case 3: return f(tag, std::integral_constant<int, 3>{});
      case 4: return f(tag, std::integral_constant<int, vl >= 3 ? 4 : 0>{});
      default: return f(tag, std::integral_constant<int, 0>{});
    }
  });
}

}  // namespace
}  // namespace mamba::cpu::MAMBA_CPU_LEVEL
