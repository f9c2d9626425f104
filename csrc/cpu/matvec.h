// Rows of a matrix times a few vectors, for decoding: bound by reading the matrix, which is read once, in the order it lies in memory.
#pragma once

#include "cpu/simd.h"

namespace mamba::cpu::MAMBA_CPU_LEVEL {

constexpr int tile_batch = 4;  // vectors that share one load of a weight

// What weights stored as S are multiplied with, and how. `step` columns at a time: load(weights), then add(total, loaded, numbers) for
// each vector; rest(...) for the columns behind the last whole step. arrange(...) puts a row of floats into the order that add expects.
template <class S>
struct Product {
  using Number = float;
  static constexpr int width = Simd<float>::width, step = 2 * width;
  struct Weights {
    Vec<float> first, second;
  };

  // Two bfloat16 are the halves of one 32-bit lane: all the even ones first, then the odd ones, is half the work of widening in order.
  static MAMBA_INLINE Weights load(const S* from) {
    if constexpr (std::is_same_v<S, bf16>) {
      using Wide = typename VectorOf<uint32_t, width>::type;
      Wide bits;
      __builtin_memcpy(&bits, from, sizeof bits);
      return {bit_cast<Vec<float>>(bits << 16), bit_cast<Vec<float>>(bits & 0xffff0000u)};
    } else {
      return {load_as<float>(from), load_as<float>(from + width)};
    }
  }

  static MAMBA_INLINE Vec<float> add(Vec<float> total, const Weights& weights, const float* x) {
    return (total + weights.first * load_as<float>(x)) + weights.second * load_as<float>(x + width);
  }

  // x is zero-padded to whole vectors.
  static MAMBA_INLINE Vec<float> rest(Vec<float> total, const S* weights, const float* x, int64_t columns) {
    for (int64_t k = 0; k < columns; k += width) {
      const int64_t count = columns - k;
      const Vec<float> w = count < width ? load_partial<float>(weights + k, static_cast<int>(count)) : load_as<float>(weights + k);
      total += w * load_as<float>(x + k);
    }
    return total;
  }

  static void arrange(const float* x, int64_t columns, int64_t stride, float* to) {
    int64_t k = 0;
    for (; k + step <= columns; k += step)
      for (int i = 0; i < width; ++i) {
        to[k + i] = x[k + 2 * i];
        to[k + width + i] = x[k + 2 * i + 1];
      }
    for (; k < stride; ++k) to[k] = x[k];
  }
};

#if MAMBA_CPU_AVX512
// bfloat16 weights on a CPU that multiplies pairs of bfloat16 (AVX512-BF16): the vectors are rounded to bfloat16, as nn.Linear's are.
struct paired_bf16 {
  uint16_t bits;
};

template <>
struct Product<paired_bf16> {
  using Number = bf16;
  static constexpr int step = 32;
  using Weights = __m512i;

  static MAMBA_INLINE Weights load(const paired_bf16* from) { return _mm512_loadu_si512(from); }

  // As an instruction, not an intrinsic, so that the file needs no flag that this CPU may not have.
  static MAMBA_INLINE Vec<float> add(Vec<float> total, Weights weights, const bf16* x) {
    const __m512i numbers = _mm512_loadu_si512(x);
    asm("vdpbf16ps %2, %1, %0" : "+v"(total) : "v"(weights), "v"(numbers));
    return total;
  }

  static MAMBA_INLINE Vec<float> rest(Vec<float> total, const paired_bf16* weights, const bf16* x, int64_t columns) {
    if (columns == 0) return total;
    return add(total, _mm512_maskz_loadu_epi16((1u << columns) - 1, weights), x);
  }

  static void arrange(const float* x, int64_t columns, int64_t stride, bf16* to) {
    constexpr int width = Simd<float>::width;
    int64_t k = 0;
    for (; k < columns; k += width) store_as(to + k, mamba::cpu::MAMBA_CPU_LEVEL::load(x + k));
    for (; k < stride; k += width) store_as(to + k, zero<float>());
  }
};
#endif

// `batch` rows of numbers, `stride` apart, zero-padded.
template <class S>
struct Vectors {
  const typename Product<S>::Number* data;
  int64_t stride;
};

// Floats that arrange() needs for a row.
constexpr int64_t arranged_size(int64_t columns) { return (columns + 31) / 32 * 32; }

// `batch` rows of `columns` floats, zero-padded to `stride`, as products with weights of type S take them: x itself, or a copy in `to`.
template <class S>
Vectors<S> arrange(const float* x, int64_t columns, int64_t stride, int64_t batch, float* to) {
  using Number = typename Product<S>::Number;
  if constexpr (std::is_same_v<S, float> || std::is_same_v<S, f16>) {
    return {x, stride};
  } else {
    const int64_t arranged = std::is_same_v<Number, float> ? stride : arranged_size(columns);
    Number* rows = reinterpret_cast<Number*>(to);
    for (int64_t b = 0; b < batch; ++b) Product<S>::arrange(x + b * stride, columns, arranged, rows + b * arranged);
    return {rows, arranged};
  }
}

// `Rows` neighbouring rows of a matrix times tile_batch vectors: sums[j * width + r] holds the lane sums of row r and vector j. Meanwhile
// every `parts`th of the rows, from `part` on, of the next block is asked for.
template <int Rows, class S>
MAMBA_INLINE void multiply(const S* weights, int64_t columns, const Vectors<S>& x, Vec<float>* sums, int part, int parts) {
  using P = Product<S>;
  constexpr int width = Simd<float>::width;
  Vec<float> total[Rows][tile_batch];
  for (int r = 0; r < Rows; ++r)
    for (int j = 0; j < tile_batch; ++j) total[r][j] = zero<float>();
  int64_t k = 0;
  for (; k + P::step <= columns; k += P::step) {
    for (int r = part; r < Rows; r += parts) {
      const char* ahead = reinterpret_cast<const char*>(weights + (r + width) * columns + k);
      for (size_t byte = 0; byte < P::step * sizeof(S); byte += 64) __builtin_prefetch(ahead + byte, 0, 2);
    }
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const auto w = P::load(weights + r * columns + k);
#pragma GCC unroll 4
      for (int j = 0; j < tile_batch; ++j) total[r][j] = P::add(total[r][j], w, x.data + j * x.stride + k);
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int j = 0; j < tile_batch; ++j)
      sums[j * width + r] = P::rest(total[r][j], weights + r * columns + k, x.data + j * x.stride + k, columns - k);
}

// One row times one vector, with running sums enough to hide the latency of the multiply-add. Without prefetches it streams faster than
// with.
template <class S>
MAMBA_INLINE Vec<float> multiply_row(const S* weights, int64_t columns, const typename Product<S>::Number* x) {
  using P = Product<S>;
  Vec<float> a = zero<float>(), b = a, c = a, d = a;
  int64_t k = 0;
  for (; k + 4 * P::step <= columns; k += 4 * P::step) {
    a = P::add(a, P::load(weights + k), x + k);
    b = P::add(b, P::load(weights + k + P::step), x + k + P::step);
    c = P::add(c, P::load(weights + k + 2 * P::step), x + k + 2 * P::step);
    d = P::add(d, P::load(weights + k + 3 * P::step), x + k + 3 * P::step);
  }
  for (; k + P::step <= columns; k += P::step) a = P::add(a, P::load(weights + k), x + k);
  return (P::rest(a, weights + k, x + k, columns - k) + b) + (c + d);
}

// `lanes` rows of a matrix times `batch` vectors: out[b * width + r], zeros in the lanes behind. out has width * batch numbers.
template <class S>
void multiply_block(const S* weights, int64_t columns, int lanes, const Vectors<S>& x, int64_t batch, float* out) {
  constexpr int width = Simd<float>::width, together = width >= 16 ? 4 : 2;
  const int tiles = static_cast<int>(batch / tile_batch);
  for (int tile = 0; tile < tiles; ++tile) {
    const Vectors<S> in = {x.data + tile * tile_batch * x.stride, x.stride};
    Vec<float> sums[tile_batch * width];
    int r = 0;
    for (; r + together <= lanes; r += together) multiply<together>(weights + r * columns, columns, in, sums + r, tile, tiles);
    for (; r < lanes; ++r) multiply<1>(weights + r * columns, columns, in, sums + r, tile, tiles);
    for (; r < width; ++r)
      for (int j = 0; j < tile_batch; ++j) sums[j * width + r] = zero<float>();
    for (int j = 0; j < tile_batch; ++j) {
      Vec<float> row[width];
      for (int i = 0; i < width; ++i) row[i] = sums[j * width + i];
      store(out + (tile * tile_batch + j) * width, sum_each(row));
    }
  }
  for (int64_t b = tiles * tile_batch; b < batch; ++b) {
    const auto* in = x.data + b * x.stride;
    Vec<float> row[width];
    for (int i = 0; i < width; ++i) row[i] = i < lanes ? multiply_row(weights + i * columns, columns, in) : zero<float>();
    store(out + b * width, sum_each(row));
  }
}

}  // namespace mamba::cpu::MAMBA_CPU_LEVEL
