// One or a few samples of the causal convolution with its cache. Lanes are channels; past and present samples of a vector of channels lie
// time by time in a small tile: samples[0 .. state_len) the cache, oldest first, samples[state_len ..) the new ones.
#include "params/conv1d_step.h"

#include "cpu/parallel.h"
#include "cpu/simd_math.h"
#include "cpu/tile.h"

namespace mamba::cpu::MAMBA_CPU_LEVEL {
namespace {

constexpr int64_t serial_numbers = 65536;  // below this many numbers one thread is faster than two

// Work items are vectors of channels.
template <class T>
int64_t vectors_of(int64_t dim) {
  return (dim + Simd<T>::width - 1) / Simd<T>::width;
}

template <class T>
int lanes_of(int64_t vector, int64_t dim) {
  const int64_t rest = dim - vector * Simd<T>::width;
  return static_cast<int>(rest < Simd<T>::width ? rest : Simd<T>::width);
}

template <class T>
void load_samples(T* tile, const View<3>& view, int64_t b, int64_t d, int64_t first, int64_t count, int lanes) {
  load_tile(tile, address(view, b, d, first), view.dtype, view.stride[2], view.stride[1], static_cast<int>(count), lanes);
}

template <class T>
void store_samples(const T* tile, const View<3>& view, int64_t b, int64_t d, int64_t first, int64_t count, int lanes) {
  store_tile(tile, address(view, b, d, first), view.dtype, view.stride[2], view.stride[1], static_cast<int>(count), lanes);
}

// Weights of `lanes` channels from d on, tap by tap, and their bias.
template <class T>
Vec<T> load_filter(T* taps, const View<2>& weight, const View<1>& bias, int64_t width, int64_t d, int lanes) {
  load_tile(taps, address(weight, d, 0), weight.dtype, weight.stride[1], weight.stride[0], static_cast<int>(width), lanes);
  T row[Simd<T>::width] = {};
  if (bias) load_tile(row, address(bias, d), bias.dtype, 0, bias.stride[0], 1, lanes);
  return load(row);
}

// p = bias + sum_k weight[k] samples[k]
template <class T>
MAMBA_INLINE Vec<T> convolve(const T* taps, const T* samples, int64_t width, Vec<T> bias) {
  Vec<T> p = bias;
  for (int64_t k = 0; k < width; ++k) p += load(taps + k * Simd<T>::width) * load(samples + k * Simd<T>::width);
  return p;
}

template <class T>
void forward(const Conv1dStepFwd& p) {
  constexpr int lanes_full = Simd<T>::width;
  const int64_t past = p.width - 1, vectors = vectors_of<T>(p.dim), M = p.state_len;
  const auto run = [&](int64_t begin, int64_t end) {
    Scratch<T> buffer((p.width + M + p.tokens + p.tokens) * lanes_full);
    T *taps = buffer.get(), *samples = taps + p.width * lanes_full, *out = samples + (M + p.tokens) * lanes_full;
    int64_t filter_of = -1;
    Vec<T> bias = zero<T>();
    for (int64_t item = begin; item < end; ++item) {
      const int64_t vector = item / p.batch, b = item % p.batch, d = vector * lanes_full;
      const int lanes = lanes_of<T>(vector, p.dim);
      if (vector != filter_of) bias = load_filter(taps, p.weight, p.bias, p.width, d, lanes);
      filter_of = vector;
      const int64_t entry = p.indices ? load_index(p.indices, b) : b;
      if (entry < 0) {
        for (int64_t t = 0; t < p.tokens; ++t) store(out + t * lanes_full, zero<T>());
        store_samples(out, p.out, b, d, 0, p.tokens, lanes);
        continue;
      }
      // Circular: column (c - j) mod M holds the sample j steps back. Linear is the same with c = M.
      const int64_t c = p.cache_seqlens ? (load_index(p.cache_seqlens, b) % (M ? M : 1) + M) % (M ? M : 1) : 0;
      load_samples(samples, p.state, entry, d, c, M - c, lanes);
      load_samples(samples + (M - c) * lanes_full, p.state, entry, d, 0, c, lanes);
      load_samples(samples + M * lanes_full, p.x, b, d, 0, p.tokens, lanes);
      for (int64_t t = 0; t < p.tokens; ++t) {
        const Vec<T> value = convolve(taps, samples + (M - past + t) * lanes_full, p.width, bias);
        store(out + t * lanes_full, p.silu ? silu(value) : value);
      }
      store_samples(out, p.out, b, d, 0, p.tokens, lanes);
      const T* kept = samples + p.tokens * lanes_full;  // the last M samples
      if (p.cache_seqlens) {
        // Column (c + i) mod M gets token i; in order of columns that is the kept samples rotated.
        const int64_t next = (c + p.tokens) % (M ? M : 1);
        store_samples(kept, p.new_state, entry, d, next, M - next, lanes);
        store_samples(kept + (M - next) * lanes_full, p.new_state, entry, d, 0, next, lanes);
      } else {
        store_samples(kept, p.new_state, entry, d, 0, M, lanes);
      }
    }
  };
  parallel_for(vectors * p.batch, run, serial_numbers / ((M + p.tokens + 1) * lanes_full));
}

// dsamples holds the gradient of [cache, new samples]: from the outputs through the taps, and from the new cache (its last M columns).
template <class T>
void backward(const Conv1dStepBwd& p) {
  constexpr int lanes_full = Simd<T>::width;
  const int64_t past = p.width - 1, vectors = vectors_of<T>(p.dim), M = p.state_len, all = M + p.tokens;
  const auto run = [&](int64_t begin, int64_t end) {
    Scratch<T> buffer((2 * p.width + 2 * all + p.tokens + 1) * lanes_full);  // dout doubles as the row of dbias
    T *taps = buffer.get(), *dtaps = taps + p.width * lanes_full, *samples = dtaps + p.width * lanes_full;
    T *dsamples = samples + all * lanes_full, *dout = dsamples + all * lanes_full;
    for (int64_t vector = begin; vector < end; ++vector) {
      const int64_t d = vector * lanes_full;
      const int lanes = lanes_of<T>(vector, p.dim);
      const Vec<T> bias = load_filter(taps, p.weight, p.bias, p.width, d, lanes);
      Vec<T> dbias = zero<T>();
      for (int64_t k = 0; k < p.width; ++k) store(dtaps + k * lanes_full, zero<T>());
      for (int64_t b = 0; b < p.batch; ++b) {
        load_samples(samples, p.state, b, d, 0, M, lanes);
        load_samples(samples + M * lanes_full, p.x, b, d, 0, p.tokens, lanes);
        for (int64_t i = 0; i < p.tokens; ++i) store(dsamples + i * lanes_full, zero<T>());
        if (p.dnew_state)
          load_samples(dsamples + p.tokens * lanes_full, p.dnew_state, b, d, 0, M, lanes);
        else
          for (int64_t i = p.tokens; i < all; ++i) store(dsamples + i * lanes_full, zero<T>());
        if (p.dout) load_samples(dout, p.dout, b, d, 0, p.tokens, lanes);
        for (int64_t t = 0; t < (p.dout ? p.tokens : 0); ++t) {
          const T* window = samples + (M - past + t) * lanes_full;
          T* dwindow = dsamples + (M - past + t) * lanes_full;
          Vec<T> dp = load(dout + t * lanes_full);
          if (p.silu) dp *= silu_with_slope(convolve(taps, window, p.width, bias)).slope;
          dbias += dp;
          for (int64_t k = 0; k < p.width; ++k) {
            const int64_t at = k * lanes_full;
            store(dwindow + at, load(dwindow + at) + dp * load(taps + at));
            store(dtaps + at, load(dtaps + at) + dp * load(window + at));
          }
        }
        store_samples(dsamples, p.dstate, b, d, 0, M, lanes);
        store_samples(dsamples + M * lanes_full, p.dx, b, d, 0, p.tokens, lanes);
      }
      store_tile(dtaps, address(p.dweight, d, 0), p.dweight.dtype, p.dweight.stride[1], p.dweight.stride[0], static_cast<int>(p.width),
                 lanes);
      if (p.dbias) {
        store(dout, dbias);
        store_tile(dout, address(p.dbias, d), p.dbias.dtype, 0, p.dbias.stride[0], 1, lanes);
      }
    }
  };
  parallel_for(vectors, run, serial_numbers / ((all + 1) * lanes_full * (p.batch + 1)));
}

// dbias += sum_b dy; dweight[k] += sum_b dy state[k]; dx = dy weight[width - 1]
template <class T>
void seed_backward(const Conv1dStepSeedBwd& p) {
  constexpr int lanes_full = Simd<T>::width;
  const auto run = [&](int64_t begin, int64_t end) {
    Scratch<T> buffer((3 * p.width + 2) * lanes_full);
    T *taps = buffer.get(), *dtaps = taps + p.width * lanes_full, *samples = dtaps + p.width * lanes_full;
    T *row = samples + p.width * lanes_full, *dbias = row + lanes_full;
    const auto taps_of = [&](const View<2>& view, int64_t d) { return address(view, d, 0); };
    const int width = static_cast<int>(p.width);
    for (int64_t vector = begin; vector < end; ++vector) {
      const int64_t d = vector * lanes_full;
      const int lanes = lanes_of<T>(vector, p.dim);
      load_tile(taps, taps_of(p.weight, d), p.weight.dtype, p.weight.stride[1], p.weight.stride[0], width, lanes);
      load_tile(dtaps, taps_of(p.dweight, d), p.dweight.dtype, p.dweight.stride[1], p.dweight.stride[0], width, lanes);
      if (p.dbias)
        load_tile(dbias, address(p.dbias, d), p.dbias.dtype, 0, p.dbias.stride[0], 1, lanes);
      else
        store(dbias, zero<T>());
      for (int64_t b = 0; b < p.batch; ++b) {
        load_tile(row, address(p.dy, b, d), p.dy.dtype, 0, p.dy.stride[1], 1, lanes);
        load_samples(samples, p.state, b, d, 0, p.width, lanes);
        const Vec<T> dy = load(row);
        store(dbias, load(dbias) + dy);
        for (int64_t k = 0; k < p.width; ++k) {
          T* dtap = dtaps + k * lanes_full;
          store(dtap, load(dtap) + dy * load(samples + k * lanes_full));
        }
        store(row, dy * load(taps + (p.width - 1) * lanes_full));
        store_tile(row, address(p.dx, b, d), p.dx.dtype, 0, p.dx.stride[1], 1, lanes);
      }
      store_tile(dtaps, taps_of(p.dweight, d), p.dweight.dtype, p.dweight.stride[1], p.dweight.stride[0], width, lanes);
      if (p.dbias) store_tile(dbias, address(p.dbias, d), p.dbias.dtype, 0, p.dbias.stride[0], 1, lanes);
    }
  };
  parallel_for(vectors_of<T>(p.dim), run, serial_numbers / (p.width * lanes_full * (p.batch + 1)));
}

}  // namespace

void conv1d_step_fwd(const Conv1dStepFwd& params) {
  if (params.x.dtype == DType::f64)
    forward<double>(params);
  else
    forward<float>(params);
}

void conv1d_step_bwd(const Conv1dStepBwd& params) {
  if (params.x.dtype == DType::f64)
    backward<double>(params);
  else
    backward<float>(params);
}

void conv1d_step_seed_bwd(const Conv1dStepSeedBwd& params) {
  if (params.dy.dtype == DType::f64)
    seed_backward<double>(params);
  else
    seed_backward<float>(params);
}

}  // namespace mamba::cpu::MAMBA_CPU_LEVEL
