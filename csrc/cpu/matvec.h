// Rows of a matrix times a batch of vectors, for decoding. Every weight is read from memory once, in the order it lies there, whatever the
// batch.
//
// Registers are seen as parts of 128 bits, with four cells each: a float, or a pair of bfloat16. The parts of a register of weights hold
// the same 16 bytes of a row, those of a register of numbers as many vectors of the batch. So four rows times four registers of numbers
// need eight loads for sixteen multiply-adds, and only the four cells of a part are left to be added up at the end.
#pragma once

#include "cpu/simd.h"

namespace mamba::cpu::MAMBA_CPU_LEVEL {

constexpr int batch_parts = Simd<float>::width / 4;  // vectors of the batch in one register
constexpr int batch_registers = 4;                   // at most, at a time

// 16 bytes in every part.
MAMBA_INLINE Vec<float> spread(const void* from) {
#if MAMBA_CPU_AVX512
  return bit_cast<Vec<float>>(_mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(from))));
#elif MAMBA_CPU_AVX2
  return bit_cast<Vec<float>>(_mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(from))));
#else
  return load(static_cast<const float*>(from));
#endif
}

// What weights stored as S are multiplied with, and how. `columns` of a row at a time: load(weights) gives `terms` registers, each to be
// multiplied with and added by add(...); pack(...) puts the numbers beside them into 4 `terms` cells.
template <class S>
struct Product {
  static constexpr int columns = Simd<float>::width, terms = columns / 4;
  struct Weights {
    Vec<float> term[terms];
  };

  static MAMBA_INLINE Weights load(const S* from) {
    Weights weights;
    if constexpr (std::is_same_v<S, float>) {
      for (int i = 0; i < terms; ++i) weights.term[i] = spread(from + 4 * i);
    } else {
      float numbers[columns];
      store(numbers, load_as<float>(from));
      for (int i = 0; i < terms; ++i) weights.term[i] = spread(numbers + 4 * i);
    }
    return weights;
  }

  static MAMBA_INLINE Vec<float> add(Vec<float> total, Vec<float> weights, Vec<float> numbers) { return total + weights * numbers; }

  static MAMBA_INLINE void pack(const float* numbers, float* cells) { __builtin_memcpy(cells, numbers, columns * sizeof(float)); }
};

#if MAMBA_CPU_AVX512
// bfloat16 weights on a CPU that multiplies pairs of bfloat16 (AVX512-BF16): the vectors are rounded to bfloat16, as nn.Linear's are.
struct paired_bf16 {
  uint16_t bits;
};

template <>
struct Product<paired_bf16> {
  static constexpr int columns = 8, terms = 1;
  struct Weights {
    Vec<float> term[terms];
  };

  static MAMBA_INLINE Weights load(const paired_bf16* from) { return {{spread(from)}}; }

  // As an instruction, not an intrinsic, so that the file needs no flag that this CPU may not have.
  static MAMBA_INLINE Vec<float> add(Vec<float> total, Vec<float> weights, Vec<float> numbers) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(total) : "v"(weights), "v"(numbers));
    return total;
  }

  static MAMBA_INLINE void pack(const float* numbers, float* cells) {
    using Wide = VectorOf<uint32_t, columns>::type;
    Wide bits;
    __builtin_memcpy(&bits, numbers, sizeof bits);
    const auto pairs = narrow<VectorOf<uint16_t, columns>::type>(narrow_bf16(bits) >> 16);
    __builtin_memcpy(cells, &pairs, sizeof pairs);
  }
};
#endif

constexpr int64_t round_up(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

// Vectors of the batch, those included that only fill a register.
constexpr int64_t filled_batch(int64_t batch) { return round_up(batch, batch_parts); }

// A batch of vectors as products with weights of type S take them. Up to batch_registers registers of vectors form a group; a group holds,
// for every step of columns and every term, one register after the other.
template <class S>
struct Vectors {
  const float* data;
  int64_t batch, size;  // size: cells of one vector

  static int registers(int64_t batch) {
    const int64_t count = (batch + batch_parts - 1) / batch_parts;
    return static_cast<int>(count < batch_registers ? count : batch_registers);
  }
};

// `batch` rows of `columns` floats, `stride` apart; `to` has room for filled_batch(batch) rows of columns rounded up to whole vectors.
template <class S>
Vectors<S> arrange(const float* x, int64_t columns, int64_t stride, int64_t batch, float* to) {
  using P = Product<S>;
  const int64_t size = round_up(columns, P::columns) / P::columns * P::terms * 4;
  for (int64_t first = 0; first < batch; first += batch_registers * batch_parts) {
    const int filled = Vectors<S>::registers(batch - first) * batch_parts;
    float* cell = to + first * size;
    for (int64_t k = 0; k < columns; k += P::columns, cell += P::terms * filled * 4)
      for (int i = 0; i < filled; ++i) {
        const float* numbers = x + (first + i < batch ? first + i : batch - 1) * stride + k;
        float rest[P::columns] = {}, cells[4 * P::terms];
        if (k + P::columns > columns) {
          __builtin_memcpy(rest, numbers, (columns - k) * sizeof(float));
          numbers = rest;
        }
        P::pack(numbers, cells);
        for (int term = 0; term < P::terms; ++term) __builtin_memcpy(cell + (term * filled + i) * 4, cells + 4 * term, 4 * sizeof(float));
      }
  }
  return {to, batch, size};
}

// `Rows` rows times a group: totals[r * Registers + i] is row r times register i, the cells of each part still to be added up. Meanwhile
// the memory from `ahead` on is asked for, as much as is read.
template <int Rows, int Registers, class S>
MAMBA_INLINE void multiply(const S* const (&rows)[Rows], int64_t columns, const float* x, const char* ahead, Vec<float>* totals) {
  using P = Product<S>;
  constexpr int width = Simd<float>::width, bytes = Rows * P::columns * sizeof(S);
  Vec<float> total[Rows][Registers];
  for (int r = 0; r < Rows; ++r)
    for (int i = 0; i < Registers; ++i) total[r][i] = zero<float>();
  const auto step = [&](const auto& weights_of) __attribute__((always_inline)) {
    Vec<float> numbers[P::terms][Registers];
#pragma GCC unroll 4
    for (int term = 0; term < P::terms; ++term)
#pragma GCC unroll 4
      for (int i = 0; i < Registers; ++i) numbers[term][i] = load(x + (term * Registers + i) * width);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const auto weights = weights_of(r);
#pragma GCC unroll 4
      for (int term = 0; term < P::terms; ++term)
#pragma GCC unroll 4
        for (int i = 0; i < Registers; ++i) total[r][i] = P::add(total[r][i], weights.term[term], numbers[term][i]);
    }
    x += P::terms * Registers * width;
  };
  int64_t k = 0;
  for (; k + P::columns <= columns; k += P::columns) {
    for (int byte = 0; byte < bytes; byte += 64) __builtin_prefetch(ahead + byte, 0, 2);
    ahead += bytes;
    step([&](int r) __attribute__((always_inline)) { return P::load(rows[r] + k); });
  }
  if (k < columns)
    step([&](int r) __attribute__((always_inline)) {
      S rest[P::columns] = {};
      __builtin_memcpy(rest, rows[r] + k, (columns - k) * sizeof(S));
      return P::load(rest);
    });
  for (int r = 0; r < Rows; ++r)
    for (int i = 0; i < Registers; ++i) totals[r * Registers + i] = total[r][i];
}

// `lanes` rows times a group: out[b * width + r], zeros in the lanes behind.
template <int Registers, class S>
void multiply_group(const S* weights, int64_t columns, int lanes, const float* x, float* out) {
  constexpr int width = Simd<float>::width;
  constexpr int together = Registers == 1 ? (width < 8 ? width : 8) : Registers == 2 || width == 16 ? 4 : 2;  // rows: as registers allow
  Vec<float> totals[width * Registers];
  for (int r = 0; r < lanes; r += together) {
    const S* rows[together];
    for (int i = 0; i < together; ++i) rows[i] = weights + (r + i < lanes ? r + i : lanes - 1) * columns;
    const S* ahead = weights + (r + width) * columns;
    multiply<together, Registers>(rows, columns, x, reinterpret_cast<const char*>(ahead), totals + r * Registers);
  }
  for (int i = lanes * Registers; i < width * Registers; ++i) totals[i] = zero<float>();
  for (int i = 0; i < Registers; ++i) {
    Vec<float> sums[width];
    for (int r = 0; r < width; ++r) sums[r] = totals[r * Registers + i];
    for (int r = 0; r < width; r += 2) sums[r] = sum_step<1>(sums[r], sums[r + 1]);
    for (int r = 0; r < width; r += 4) sums[r] = sum_step<2>(sums[r], sums[r + 2]);
    transpose_blocks<width, 4>(sums);  // parts: every fourth holds four rows of as many vectors
    for (int part = 0; part < batch_parts; ++part) store(out + (i * batch_parts + part) * width, sums[4 * part]);
  }
}

// `lanes` rows of a matrix times a batch of vectors: out[b * width + r], zeros in the lanes behind, for filled_batch(batch) vectors.
template <class S>
void multiply_block(const S* weights, int64_t columns, int lanes, const Vectors<S>& x, float* out) {
  for (int64_t b = 0; b < x.batch; b += batch_registers * batch_parts) {
    const float* from = x.data + b * x.size;
    float* to = out + b * Simd<float>::width;
    switch (Vectors<S>::registers(x.batch - b)) {
      case 1: multiply_group<1>(weights, columns, lanes, from, to); break;
      case 2: multiply_group<2>(weights, columns, lanes, from, to); break;
      case 3: multiply_group<3>(weights, columns, lanes, from, to); break;
      default: multiply_group<4>(weights, columns, lanes, from, to);
    }
  }
}

}  // namespace mamba::cpu::MAMBA_CPU_LEVEL
