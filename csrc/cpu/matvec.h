// Rows of a matrix times a batch of vectors, for decoding. Every weight is read from memory once, in the order it lies there, whatever the
// batch.
//
// A register of weights is multiplied with registers of numbers that consist of `Parts` parts, each for another vector of the batch. With
// one part it holds neighbouring weights of a row; with parts of 128 bits each part holds the same 16 bytes of the row. So four rows times
// four registers of numbers need eight loads for sixteen multiply-adds, whose results are up to sixteen vectors', and only the four lanes
// of a part are left to be added up at the end.
#pragma once

#include "cpu/simd.h"

namespace mamba::cpu::MAMBA_CPU_LEVEL {

constexpr int parts = Simd<float>::width / 4;  // of 128 bits
constexpr int most_registers = 4;              // of numbers, at a time
constexpr int group_batch = most_registers * parts;
constexpr int running_sums = 4;  // of a single vector: enough to hide the latency of the multiply-add

// A register from memory: as it lies there with one part, else the same 16 bytes in every part.
template <int Parts>
MAMBA_INLINE Vec<float> load_parts(const void* from) {
#if MAMBA_CPU_AVX512
  if constexpr (Parts > 1) return bit_cast<Vec<float>>(_mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(from))));
#elif MAMBA_CPU_AVX2
  if constexpr (Parts > 1) return bit_cast<Vec<float>>(_mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(from))));
#endif
  return load(static_cast<const float*>(from));
}

// The same of 16-bit numbers, four in every part, as floats.
template <int Parts, class S>
MAMBA_INLINE Vec<float> widen_parts(const S* from) {
  if constexpr (Parts > 1) {
    uint64_t bits;
    __builtin_memcpy(&bits, from, sizeof bits);
    const auto all = bits + typename VectorOf<uint64_t, Parts>::type{};
    return load_as<float>(reinterpret_cast<const S*>(&all));
  }
  return load_as<float>(from);
}

// What weights stored as S are multiplied with, and how: `columns` of a row at a time, in `terms` registers. load(...) gives the weights in
// them, pack(...) the numbers beside, `lanes` of each register.
template <class S, int Parts>
struct Product {
  static constexpr int terms = 4 / sizeof(S), lanes = Simd<float>::width / Parts, columns = terms * lanes;

  static MAMBA_INLINE void load(const S* from, Vec<float> (&weights)[terms]) {
    if constexpr (std::is_same_v<S, float>) {
      weights[0] = load_parts<Parts>(from);
    } else if constexpr (std::is_same_v<S, bf16>) {  // the halves of 32 bits: even columns, then odd ones
      using Wide = typename VectorOf<uint32_t, Simd<float>::width>::type;
      const Wide bits = bit_cast<Wide>(load_parts<Parts>(from));
      weights[0] = bit_cast<Vec<float>>(bits << 16);
      weights[1] = bit_cast<Vec<float>>(bits & 0xffff0000u);
    } else {
      for (int term = 0; term < terms; ++term) weights[term] = widen_parts<Parts>(from + term * lanes);
    }
  }

  static MAMBA_INLINE Vec<float> add(Vec<float> total, Vec<float> weights, Vec<float> numbers) { return total + weights * numbers; }

  static MAMBA_INLINE void pack(const float* numbers, float (&packed)[terms][lanes]) {
    for (int term = 0; term < terms; ++term)
      for (int i = 0; i < lanes; ++i) packed[term][i] = numbers[std::is_same_v<S, bf16> ? terms * i + term : term * lanes + i];
  }
};

#if MAMBA_CPU_AVX512
// bfloat16 weights on a CPU that multiplies pairs of bfloat16 (AVX512-BF16): the vectors are rounded to bfloat16, as nn.Linear's are.
struct paired_bf16 {
  uint16_t bits;
};

template <int Parts>
struct Product<paired_bf16, Parts> {
  static constexpr int terms = 1, lanes = Simd<float>::width / Parts, columns = 2 * lanes;

  static MAMBA_INLINE void load(const paired_bf16* from, Vec<float> (&weights)[terms]) { weights[0] = load_parts<Parts>(from); }

  // As an instruction, not an intrinsic, so that the file needs no flag that this CPU may not have.
  static MAMBA_INLINE Vec<float> add(Vec<float> total, Vec<float> weights, Vec<float> numbers) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(total) : "v"(weights), "v"(numbers));
    return total;
  }

  static MAMBA_INLINE void pack(const float* numbers, float (&packed)[terms][lanes]) {
    using Wide = VectorOf<uint32_t, 8>::type;
    for (int i = 0; i < lanes; i += 4) {
      Wide bits;
      __builtin_memcpy(&bits, numbers + 2 * i, sizeof bits);
      const auto pairs = narrow<VectorOf<uint16_t, 8>::type>(narrow_bf16(bits) >> 16);
      __builtin_memcpy(packed[0] + i, &pairs, sizeof pairs);
    }
  }
};
#endif

// A batch of vectors as products with weights of type S take them. Up to most_registers registers form a group, which holds, for every
// `columns` and every term, one register after the other. `single`: one vector, in registers of one part.
template <class S>
struct Vectors {
  const float* data;
  int64_t batch, size;  // size: floats of one vector
  bool single;
};

// Vectors of the batch, those included that only fill a register.
constexpr int64_t filled_batch(int64_t batch) { return (batch + parts - 1) / parts * parts; }

template <int Parts, class S>
Vectors<S> arrange_parts(const float* x, int64_t columns, int64_t stride, int64_t batch, float* to) {
  using P = Product<S, Parts>;
  const int64_t size = (columns + P::columns - 1) / P::columns * (P::terms * P::lanes);
  for (int64_t first = 0; first < batch; first += group_batch) {
    const int64_t rest = (batch - first + Parts - 1) / Parts * Parts, filled = rest < group_batch ? rest : group_batch;
    float* group = to + first * size;
    for (int64_t k = 0; k < columns; k += P::columns, group += P::terms * filled * P::lanes)
      for (int64_t i = 0; i < filled; ++i) {
        const float* numbers = x + (first + i < batch ? first + i : batch - 1) * stride + k;
        float padded[P::columns] = {}, packed[P::terms][P::lanes];
        if (k + P::columns > columns) {
          __builtin_memcpy(padded, numbers, (columns - k) * sizeof(float));
          numbers = padded;
        }
        P::pack(numbers, packed);
        for (int term = 0; term < P::terms; ++term)
          __builtin_memcpy(group + (term * filled + i) * P::lanes, packed[term], sizeof packed[term]);
      }
  }
  return {to, batch, size, Parts == 1 && batch == 1};
}

// Room for the numbers of an arranged vector.
constexpr int64_t arranged_size(int64_t columns) { return (columns + 31) / 32 * 32; }

// `batch` rows of `columns` floats, `stride` apart; `to` has room for filled_batch(batch) arranged ones.
template <class S>
Vectors<S> arrange(const float* x, int64_t columns, int64_t stride, int64_t batch, float* to) {
  const bool single = batch == 1 && columns >= running_sums * Product<S, 1>::columns;
  return single ? arrange_parts<1, S>(x, columns, stride, batch, to) : arrange_parts<parts, S>(x, columns, stride, batch, to);
}

// The weights of `columns` columns from the k-th on, zeros behind the last one.
template <class P, class S>
MAMBA_INLINE void load_rest(const S* row, int64_t k, int64_t columns, Vec<float> (&weights)[P::terms]) {
  S rest[P::columns] = {};
  __builtin_memcpy(rest, row + k, (columns - k) * sizeof(S));
  P::load(rest, weights);
}

// One row times a single vector. The hardware foresees the one stream: without prefetches it is read faster than with.
template <class S>
MAMBA_INLINE Vec<float> multiply_row(const S* row, int64_t columns, const float* x) {
  using P = Product<S, 1>;
  Vec<float> total[running_sums] = {}, weights[P::terms];
  int64_t k = 0;
  const auto add = [&](int sum) __attribute__((always_inline)) {
#pragma GCC unroll 2
    for (int term = 0; term < P::terms; ++term, x += Simd<float>::width) total[sum] = P::add(total[sum], weights[term], load(x));
    k += P::columns;
  };
  while (k + running_sums * P::columns <= columns) {
#pragma GCC unroll 4
    for (int sum = 0; sum < running_sums; ++sum) {
      P::load(row + k, weights);
      add(sum);
    }
  }
  while (k + P::columns <= columns) {
    P::load(row + k, weights);
    add(0);
  }
  if (k < columns) {
    load_rest<P>(row, k, columns, weights);
    add(0);
  }
  return (total[0] + total[1]) + (total[2] + total[3]);
}

// `Rows` rows times a group: sums[r * Registers + i] are rows 2 r and 2 r + 1 times register i, in even and odd lanes, two of each part
// still to be added up. Meanwhile the memory from `ahead` on is asked for, as much as is read.
template <int Rows, int Registers, class S>
MAMBA_INLINE void multiply(const S* const (&rows)[Rows], int64_t columns, const float* x, const char* ahead, Vec<float>* sums) {
  using P = Product<S, parts>;
  constexpr int width = Simd<float>::width, bytes = Rows * P::columns * sizeof(S);
  Vec<float> total[Rows][Registers];
  for (int r = 0; r < Rows; ++r)
    for (int i = 0; i < Registers; ++i) total[r][i] = zero<float>();
  const auto step = [&](const auto& load_weights) __attribute__((always_inline)) {
    Vec<float> numbers[P::terms][Registers];
#pragma GCC unroll 2
    for (int term = 0; term < P::terms; ++term)
#pragma GCC unroll 4
      for (int i = 0; i < Registers; ++i, x += width) numbers[term][i] = load(x);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      Vec<float> weights[P::terms];
      load_weights(rows[r], weights);
#pragma GCC unroll 2
      for (int term = 0; term < P::terms; ++term)
#pragma GCC unroll 4
        for (int i = 0; i < Registers; ++i) total[r][i] = P::add(total[r][i], weights[term], numbers[term][i]);
    }
  };
  using Weights = Vec<float>(&)[P::terms];
  int64_t k = 0;
  for (; k + P::columns <= columns; k += P::columns, ahead += bytes) {
    for (int byte = 0; byte < bytes; byte += 64) __builtin_prefetch(ahead + byte, 0, 2);
    step([&](const S* row, Weights weights) __attribute__((always_inline)) { P::load(row + k, weights); });
  }
  if (k < columns) step([&](const S* row, Weights weights) __attribute__((always_inline)) { load_rest<P>(row, k, columns, weights); });
  for (int r = 0; r < Rows; r += 2)
    for (int i = 0; i < Registers; ++i) sums[r / 2 * Registers + i] = sum_step<1>(total[r][i], total[r + 1][i]);
}

// `lanes` rows times a group: out[b * width + r], zeros in the lanes behind.
template <int Registers, class S>
void multiply_group(const S* weights, int64_t columns, int lanes, const float* x, float* out) {
  constexpr int width = Simd<float>::width;
  constexpr int together = Registers <= 2 || width == 16 ? 4 : 2;  // rows: as registers allow
  Vec<float> pairs[width / 2 * Registers];
  for (int r = 0; r < width; r += together) {
    const S* rows[together];
    for (int i = 0; i < together; ++i) rows[i] = weights + (r + i < lanes ? r + i : lanes - 1) * columns;
    const S* ahead = weights + (r + width) * columns;
    multiply<together, Registers>(rows, columns, x, reinterpret_cast<const char*>(ahead), pairs + r / 2 * Registers);
  }
  for (int i = 0; i < Registers; ++i) {
    Vec<float> sums[width] = {};
    for (int r = 0; r < width; r += 4) sums[r] = sum_step<2>(pairs[r / 2 * Registers + i], pairs[(r / 2 + 1) * Registers + i]);
    transpose_blocks<width, 4>(sums);  // every fourth: its parts were four rows each of as many vectors
    for (int part = 0; part < parts; ++part) store(out + (i * parts + part) * width, sums[4 * part]);
  }
  for (int b = 0; lanes < width && b < Registers * parts; ++b)
    for (int r = lanes; r < width; ++r) out[b * width + r] = 0;
}

// `lanes` rows of a matrix times a batch of vectors: out[b * width + r], zeros in the lanes behind, for filled_batch(batch) vectors.
template <class S>
void multiply_block(const S* weights, int64_t columns, int lanes, const Vectors<S>& x, float* out) {
  constexpr int width = Simd<float>::width;
  if (x.single) {
    Vec<float> sums[width];
    for (int r = 0; r < width; ++r) sums[r] = r < lanes ? multiply_row(weights + r * columns, columns, x.data) : zero<float>();
    store(out, sum_each(sums));
    return;
  }
  for (int64_t b = 0; b < x.batch; b += group_batch) {
    const float* from = x.data + b * x.size;
    float* to = out + b * width;
    switch ((x.batch - b + parts - 1) / parts) {
      case 1: multiply_group<1>(weights, columns, lanes, from, to); break;
      case 2: multiply_group<2>(weights, columns, lanes, from, to); break;
      case 3: multiply_group<3>(weights, columns, lanes, from, to); break;
      default: multiply_group<4>(weights, columns, lanes, from, to);
    }
  }
}

}  // namespace mamba::cpu::MAMBA_CPU_LEVEL
