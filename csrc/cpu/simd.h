// Vectors of the level's native width over GCC/Clang vector extensions: one source for AVX-512, AVX2, SSE2, NEON and anything else.
// +, -, *, /, comparisons, `mask ? a : b`, &, |, <<, >> are the compiler's own; a * b + c contracts to a fused multiply-add where the level
// has one. Every function is always inlined (see level.h). Arithmetic happens in float or double only; 16-bit types are converted on load
// and store. Vector mathematics (exp, log, softplus, ...) stands in simd_math.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "common/dtype.h"
#include "cpu/level.h"

// Everything here is inlined, so no vector is ever passed by a calling convention.
#pragma GCC diagnostic ignored "-Wpsabi"

#if MAMBA_CPU_AVX512 || MAMBA_CPU_AVX2
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // false alarm on the undefined pass-through operands inside GCC 12's own header
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace mamba::cpu::MAMBA_CPU_LEVEL {

#if MAMBA_CPU_AVX512
inline constexpr int vector_bytes = 64;
#elif MAMBA_CPU_AVX2
inline constexpr int vector_bytes = 32;
#else
inline constexpr int vector_bytes = 16;
#endif

template <class T, int N>
struct VectorOf {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
};

// T is float or double. Int has lanes of the same width: the type of bit patterns and (as 0 or -1) of masks.
template <class T>
struct Simd {
  static constexpr int width = vector_bytes / static_cast<int>(sizeof(T));
  using Vec = typename VectorOf<T, width>::type;
  using IntLane = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
  using Int = typename VectorOf<IntLane, width>::type;
};

// The arithmetic type of numbers stored as S.
template <class S>
using Accumulate = std::conditional_t<std::is_same_v<S, double>, double, float>;

template <class T>
using Vec = typename Simd<T>::Vec;
template <class T>
using IntVec = typename Simd<T>::Int;
template <class V>
using Lane = std::remove_cvref_t<decltype(std::declval<V&>()[0])>;

template <class To, class From>
MAMBA_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

template <class T>
MAMBA_INLINE Vec<T> zero() {
  return Vec<T>{};
}

template <class T>
MAMBA_INLINE Vec<T> broadcast(T x) {
  return x - Vec<T>{};  // x - 0 keeps the sign of a zero, and compilers make it a plain broadcast
}

template <class T>
MAMBA_INLINE IntVec<T> broadcast_int(typename Simd<T>::IntLane x) {
  return x + IntVec<T>{};
}

// mask ? a : b, lane by lane: a selection, so a NaN in the lane not taken does no harm.
template <class V, class M>
MAMBA_INLINE V select(M mask, V a, V b) {
  return mask ? a : b;
}

// a > b ? a : b and a < b ? a : b: the second operand where either is NaN.
template <class V>
MAMBA_INLINE V max(V a, V b) {
#if MAMBA_CPU_AVX512
  if constexpr (sizeof(Lane<V>) == 4)
    return bit_cast<V>(_mm512_max_ps(bit_cast<__m512>(a), bit_cast<__m512>(b)));
  else
    return bit_cast<V>(_mm512_max_pd(bit_cast<__m512d>(a), bit_cast<__m512d>(b)));
#elif MAMBA_CPU_AVX2
  if constexpr (sizeof(Lane<V>) == 4)
    return bit_cast<V>(_mm256_max_ps(bit_cast<__m256>(a), bit_cast<__m256>(b)));
  else
    return bit_cast<V>(_mm256_max_pd(bit_cast<__m256d>(a), bit_cast<__m256d>(b)));
#else
  return a > b ? a : b;
#endif
}

template <class V>
MAMBA_INLINE V min(V a, V b) {
#if MAMBA_CPU_AVX512
  if constexpr (sizeof(Lane<V>) == 4)
    return bit_cast<V>(_mm512_min_ps(bit_cast<__m512>(a), bit_cast<__m512>(b)));
  else
    return bit_cast<V>(_mm512_min_pd(bit_cast<__m512d>(a), bit_cast<__m512d>(b)));
#elif MAMBA_CPU_AVX2
  if constexpr (sizeof(Lane<V>) == 4)
    return bit_cast<V>(_mm256_min_ps(bit_cast<__m256>(a), bit_cast<__m256>(b)));
  else
    return bit_cast<V>(_mm256_min_pd(bit_cast<__m256d>(a), bit_cast<__m256d>(b)));
#else
  return a < b ? a : b;
#endif
}

template <class V>
MAMBA_INLINE V abs(V x) {
  using T = Lane<V>;
  using L = typename Simd<T>::IntLane;
  return bit_cast<V>(bit_cast<IntVec<T>>(x) & broadcast_int<T>(std::is_same_v<T, float> ? L(0x7fffffff) : L(0x7fffffffffffffffll)));
}

template <class V>
MAMBA_INLINE V negative_abs(V x) {
  using T = Lane<V>;
  return bit_cast<V>(bit_cast<IntVec<T>>(x) | bit_cast<IntVec<T>>(broadcast<T>(T(-0.0))));
}

template <class V>
MAMBA_INLINE V sqrt(V x) {
#if MAMBA_CPU_AVX512
  if constexpr (sizeof(Lane<V>) == 4)
    return bit_cast<V>(_mm512_sqrt_ps(bit_cast<__m512>(x)));
  else
    return bit_cast<V>(_mm512_sqrt_pd(bit_cast<__m512d>(x)));
#elif MAMBA_CPU_AVX2
  if constexpr (sizeof(Lane<V>) == 4)
    return bit_cast<V>(_mm256_sqrt_ps(bit_cast<__m256>(x)));
  else
    return bit_cast<V>(_mm256_sqrt_pd(bit_cast<__m256d>(x)));
#else
  V root;
  for (int i = 0; i < Simd<Lane<V>>::width; ++i) {
    if constexpr (sizeof(Lane<V>) == 4)
      root[i] = __builtin_sqrtf(x[i]);
    else
      root[i] = __builtin_sqrt(x[i]);
  }
  return root;
#endif
}

// ---- Loads and stores: any alignment; S is the type in memory (double, float, bf16, f16), T the arithmetic type (float, double) ----

// bf16 is the upper half of a float; f16 without hardware: shift the fields into place and rescale by 2^112 (exact, subnormals too).
template <class Wide>
MAMBA_INLINE Wide widen_bf16(Wide bits) {
  return bits << 16;
}

template <class Wide>
MAMBA_INLINE Wide widen_f16(Wide bits) {
  using F = typename VectorOf<float, sizeof(Wide) / 4>::type;
  const Wide magnitude = (bits & 0x7fff) << 13;
  const F scaled = bit_cast<F>(magnitude) * 0x1p112f;
  const Wide special = magnitude >= (0x7c00 << 13) ? Wide{} + 0x7f800000 : Wide{};
  return bit_cast<Wide>(scaled) | special | (bits & 0x8000) << 16;
}

// Round to nearest, ties to even; NaN stays NaN. `bits` holds floats, the result stands in the upper halves.
template <class Wide>
MAMBA_INLINE Wide narrow_bf16(Wide bits) {
  using F = typename VectorOf<float, sizeof(Wide) / 4>::type;
  const Wide rounded = bits + 0x7fff + (bits >> 16 & 1);
  const F floats = bit_cast<F>(bits);
  return floats == floats ? rounded : (bits | 0x400000);
}

template <class Wide>
MAMBA_INLINE Wide narrow_f16(Wide bits) {
  using F = typename VectorOf<float, sizeof(Wide) / 4>::type;
  const Wide magnitude = bits & 0x7fffffff;
  // Normal results: drop 13 bits with the rounding carry (which may reach infinity); the exponent bias changes by 112.
  const Wide normal = (magnitude - (112 << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  // Subnormal results: adding 0.5 lets the hardware round to multiples of 2^-24.
  const Wide subnormal = bit_cast<Wide>(bit_cast<F>(magnitude) + 0.5f) - 0x3f000000;
  const Wide special = magnitude > 0x7f800000 ? Wide{} + 0x7e00 : Wide{} + 0x7c00;
  const Wide finite = magnitude < 0x38800000 ? subnormal : normal;
  return (magnitude >= 0x47800000 ? special : finite) | (bits >> 16 & 0x8000);
}

// Lanes of 16 and 32 bits into each other. GCC 12 takes __builtin_convertvector apart, which costs several instructions.
template <class Wide, class Narrow>
MAMBA_INLINE Wide widen(Narrow narrow) {
#if MAMBA_CPU_AVX512
  if constexpr (sizeof(Wide) == 64) return bit_cast<Wide>(_mm512_cvtepu16_epi32(bit_cast<__m256i>(narrow)));
#endif
#if MAMBA_CPU_AVX512 || MAMBA_CPU_AVX2
  if constexpr (sizeof(Wide) == 32) return bit_cast<Wide>(_mm256_cvtepu16_epi32(bit_cast<__m128i>(narrow)));
#endif
  return __builtin_convertvector(narrow, Wide);
}

template <class Narrow, class Wide>
MAMBA_INLINE Narrow narrow(Wide wide) {
#if MAMBA_CPU_AVX512
  if constexpr (sizeof(Wide) == 64) return bit_cast<Narrow>(_mm512_cvtepi32_epi16(bit_cast<__m512i>(wide)));
  if constexpr (sizeof(Wide) == 32) return bit_cast<Narrow>(_mm256_cvtepi32_epi16(bit_cast<__m256i>(wide)));
#elif MAMBA_CPU_AVX2
  if constexpr (sizeof(Wide) == 32) {
    const __m256i packed = _mm256_packus_epi32(bit_cast<__m256i>(wide), bit_cast<__m256i>(wide));
    return bit_cast<Narrow>(_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
  }
#endif
  return __builtin_convertvector(wide, Narrow);
}

template <class T, class S>
MAMBA_INLINE Vec<T> load_as(const S* from) {
  constexpr int width = Simd<T>::width;
  Vec<T> to;
  if constexpr (std::is_same_v<T, S>) {
    __builtin_memcpy(&to, from, sizeof to);
  } else if constexpr (std::is_same_v<S, float> || std::is_same_v<S, double>) {
    typename VectorOf<S, width>::type source;
    __builtin_memcpy(&source, from, sizeof source);
    to = __builtin_convertvector(source, Vec<T>);
  } else {
    using Narrow = typename VectorOf<uint16_t, width>::type;
    using Wide = typename VectorOf<uint32_t, width>::type;
    using F = typename VectorOf<float, width>::type;
    Narrow narrow;
    __builtin_memcpy(&narrow, from, sizeof narrow);
    F floats;
    if constexpr (std::is_same_v<S, bf16>) {
      floats = bit_cast<F>(widen_bf16(widen<Wide>(narrow)));
    } else {
#if MAMBA_CPU_AVX512
      if constexpr (width == 16)
        floats = bit_cast<F>(_mm512_cvtph_ps(bit_cast<__m256i>(narrow)));
      else
        floats = bit_cast<F>(_mm256_cvtph_ps(bit_cast<__m128i>(narrow)));
#elif MAMBA_CPU_AVX2
      if constexpr (width == 8)
        floats = bit_cast<F>(_mm256_cvtph_ps(bit_cast<__m128i>(narrow)));
      else
        floats = bit_cast<F>(_mm_cvtph_ps(_mm_cvtsi64_si128(bit_cast<long long>(narrow))));
#else
      floats = bit_cast<F>(widen_f16(widen<Wide>(narrow)));
#endif
    }
    if constexpr (std::is_same_v<T, float>)
      to = floats;
    else
      to = __builtin_convertvector(floats, Vec<T>);
  }
  return to;
}

template <class V, class S>
MAMBA_INLINE void store_as(S* to, V from) {
  using T = Lane<V>;
  constexpr int width = Simd<T>::width;
  if constexpr (std::is_same_v<T, S>) {
    __builtin_memcpy(to, &from, sizeof from);
  } else if constexpr (std::is_same_v<S, float> || std::is_same_v<S, double>) {
    const auto converted = __builtin_convertvector(from, typename VectorOf<S, width>::type);
    __builtin_memcpy(to, &converted, sizeof converted);
  } else {
    using Narrow = typename VectorOf<uint16_t, width>::type;
    using Wide = typename VectorOf<uint32_t, width>::type;
    using F = typename VectorOf<float, width>::type;
    F floats;
    if constexpr (std::is_same_v<T, float>)
      floats = from;
    else
      floats = __builtin_convertvector(from, F);
    Narrow result;
    if constexpr (std::is_same_v<S, bf16>) {
      result = narrow<Narrow>(narrow_bf16(bit_cast<Wide>(floats)) >> 16);
    } else {
#if MAMBA_CPU_AVX512
      if constexpr (width == 16)
        result = bit_cast<Narrow>(_mm512_cvtps_ph(bit_cast<__m512>(floats), _MM_FROUND_TO_NEAREST_INT));
      else
        result = bit_cast<Narrow>(_mm256_cvtps_ph(bit_cast<__m256>(floats), _MM_FROUND_TO_NEAREST_INT));
#elif MAMBA_CPU_AVX2
      if constexpr (width == 8)
        result = bit_cast<Narrow>(_mm256_cvtps_ph(bit_cast<__m256>(floats), _MM_FROUND_TO_NEAREST_INT));
      else
        result = bit_cast<Narrow>(_mm_cvtsi128_si64(_mm_cvtps_ph(bit_cast<__m128>(floats), _MM_FROUND_TO_NEAREST_INT)));
#else
      result = narrow<Narrow>(narrow_f16(bit_cast<Wide>(floats)));
#endif
    }
    __builtin_memcpy(to, &result, sizeof result);
  }
}

template <class T>
MAMBA_INLINE Vec<T> load(const T* from) {
  return load_as<T>(from);
}

template <class V>
MAMBA_INLINE void store(Lane<V>* to, V from) {
  store_as(to, from);
}

// The first `count` lanes (0 <= count <= width), `step` elements apart; the other lanes read as 0 and are not written.
// Conversions are those of the full vectors, so a number does not depend on where in a vector it stands.
template <class T, class S>
MAMBA_INLINE Vec<T> load_partial(const S* from, int count, int64_t step = 1) {
  S buffer[Simd<T>::width];
  __builtin_memset(buffer, 0, sizeof buffer);
  for (int i = 0; i < count; ++i) buffer[i] = from[i * step];
  return load_as<T>(buffer);
}

template <class V, class S>
MAMBA_INLINE void store_partial(S* to, V from, int count, int64_t step = 1) {
  S buffer[Simd<Lane<V>>::width];
  store_as(buffer, from);
  for (int i = 0; i < count; ++i) to[i * step] = buffer[i];
}

template <class T, class S>
MAMBA_INLINE T load_scalar(const S* from) {
  return load_partial<T>(from, 1)[0];
}

template <class T, class S>
MAMBA_INLINE void store_scalar(S* to, T from) {
  store_partial(to, broadcast(from), 1);
}

// f(0), ..., f(Count - 1) with constant arguments: unrolled before the compiler decides which arrays of vectors live in registers.
template <int Count, class F>
MAMBA_INLINE void unroll(F&& f) {
  [&]<int... I>(std::integer_sequence<int, I...>)
      __attribute__((always_inline)) { (f(std::integral_constant<int, I>{}), ...); }(std::make_integer_sequence<int, Count>{});
}

// ---- Lanes ----

// Lane i of the result is lane At::at(i) of the concatenation (a, b).
template <class At, class V, std::size_t... I>
MAMBA_INLINE V shuffle(V a, V b, std::index_sequence<I...>) {
#if __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(a, b, At::at(static_cast<int>(I))...);
#else  // GCC 11
  return __builtin_shuffle(a, b, IntVec<Lane<V>>{At::at(static_cast<int>(I))...});
#endif
}

template <class At, class V>
MAMBA_INLINE V shuffle(V a, V b) {
  return shuffle<At>(a, b, std::make_index_sequence<Simd<Lane<V>>::width>{});
}

// Lanes whose bit `Block` is set come from b, the others from a.
template <int Width, int Block>
struct BlendBlocks {
  static constexpr int at(int i) { return (i & Block) ? Width + i : i; }
};
// The same with lane i ^ Block in place of lane i.
template <int Width, int Block>
struct SwapBlocks {
  static constexpr int at(int i) { return ((i & Block) ? Width : 0) + (i ^ Block); }
};
// The two halves of a 2 x 2 block transpose.
template <int Width, int Block>
struct LowBlocks {
  static constexpr int at(int i) { return (i & Block) ? Width + i - Block : i; }
};
template <int Width, int Block>
struct HighBlocks {
  static constexpr int at(int i) { return (i & Block) ? Width + i : i + Block; }
};

template <int Block, class V>
MAMBA_INLINE V sum_step(V a, V b) {
  constexpr int width = Simd<Lane<V>>::width;
  return shuffle<BlendBlocks<width, Block>>(a, b) + shuffle<SwapBlocks<width, Block>>(a, b);
}

template <int Block, class V>
MAMBA_INLINE void sum_steps(V* v) {
  if constexpr (Block > 0) {
    for (int i = 0; i < Block; ++i) v[i] = sum_step<Block>(v[i], v[i + Block]);
    sum_steps<Block / 2>(v);
  }
}

// Lane i of the result is the sum of the lanes of v[i], always added in the same tree order; v is overwritten.
template <class V>
MAMBA_INLINE V sum_each(V (&v)[Simd<Lane<V>>::width]) {
  sum_steps<Simd<Lane<V>>::width / 2>(v);
  return v[0];
}

template <int Block, class V>
MAMBA_INLINE V sum_all(V v) {
  if constexpr (Block > 0)
    return sum_all<Block / 2>(v + shuffle<SwapBlocks<Simd<Lane<V>>::width, Block>>(v, v));
  else
    return v;
}

// The sum of the lanes, in the tree order of sum_each.
template <class V>
MAMBA_INLINE Lane<V> sum(V v) {
  return sum_all<Simd<Lane<V>>::width / 2>(v)[0];
}

// Transposes every Rows x Rows block of rows[0..Rows) in place; Rows is a power of two up to the width.
template <int Rows, int Block = 1, class V>
MAMBA_INLINE void transpose_blocks(V* rows) {
  constexpr int width = Simd<Lane<V>>::width;
  if constexpr (Block < Rows) {
    for (int i = 0; i < Rows; ++i) {
      if (i & Block) continue;
      const V a = rows[i], b = rows[i + Block];
      rows[i] = shuffle<LowBlocks<width, Block>>(a, b);
      rows[i + Block] = shuffle<HighBlocks<width, Block>>(a, b);
    }
    transpose_blocks<Rows, Block * 2>(rows);
  }
}

// rows[i][j] <-> rows[j][i], in place (width rows of width lanes).
template <class V>
MAMBA_INLINE void transpose(V (&rows)[Simd<Lane<V>>::width]) {
  transpose_blocks<Simd<Lane<V>>::width>(rows);
}

}  // namespace mamba::cpu::MAMBA_CPU_LEVEL
