// Memory traffic of operators that do little arithmetic: stores that pass by the caches, prefetches.
#pragma once

#include "cpu/simd.h"

namespace mamba::cpu::MAMBA_CPU_LEVEL {

constexpr int64_t streamed_bytes = 8 << 20;  // outputs of this size do not stay in a cache near the core

// Stores that pass by the caches, for outputs that would not fit into them. Needs alignment to the vector's size in memory.
template <class V, class S>
MAMBA_INLINE void stream_as(S* to, V from) {
  [[maybe_unused]] constexpr int bytes = Simd<Lane<V>>::width * static_cast<int>(sizeof(S));
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

// Vectors of T that are stored as S together: a cache line of 16-bit numbers comes from two.
template <class T, class S>
constexpr int line_vectors = Simd<T>::width * sizeof(S) == 32 && sizeof(S) == 2 ? 2 : 1;

// N vectors behind one another; `stream`: past the caches, `to` is aligned to their size in memory. With the CPU's own conversion to bf16,
// results below 2^-126 are 0.
template <int N, class V, class S>
MAMBA_INLINE void store_group(S* to, const V (&from)[N], bool stream) {
#if MAMBA_CPU_AVX512
  if constexpr (N == 2 && sizeof(S) == 2 && sizeof(Lane<V>) == 4) {
    if (std::is_same_v<S, f16> || bf16_instructions) {
      __m512i line;
      if constexpr (std::is_same_v<S, bf16>)
        asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(line) : "v"(from[1]), "v"(from[0]));
      else
        line = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(bit_cast<__m512>(from[0]), _MM_FROUND_TO_NEAREST_INT)),
                                  _mm512_cvtps_ph(bit_cast<__m512>(from[1]), _MM_FROUND_TO_NEAREST_INT), 1);
      if (stream)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to), line);
      else
        _mm512_storeu_si512(to, line);
      return;
    }
  }
#endif
  for (int n = 0; n < N; ++n) {
    if (stream)
      stream_as(to + n * Simd<Lane<V>>::width, from[n]);
    else
      store_as(to + n * Simd<Lane<V>>::width, from[n]);
  }
}

// Calls f(k, N) for k = 0, N width, 2 N width, ... below `count` (a whole number of vectors), where N vectors make a cache line of S; the
// rest one vector at a time.
template <class T, class S, class F>
MAMBA_INLINE void for_lines(int64_t count, F&& f) {
  constexpr int64_t N = line_vectors<T, S>, width = Simd<T>::width;
  int64_t k = 0;
  for (; k + N * width <= count; k += N * width) f(k, std::integral_constant<int, N>{});
  if (N > 1 && k < count) f(k, std::integral_constant<int, 1>{});
}

MAMBA_INLINE bool is_line(const void* at) { return reinterpret_cast<uintptr_t>(at) % 64 == 0; }

MAMBA_INLINE void end_streaming() {
#if MAMBA_CPU_AVX512 || MAMBA_CPU_AVX2
  _mm_sfence();
#endif
}

// Level: the cache that the line is to come to; the second one takes more at a time.
template <int Level = 1, class S>
MAMBA_INLINE void prefetch(const S* from, int64_t bytes) {
  __builtin_prefetch(reinterpret_cast<const char*>(from) + bytes, 0, 4 - Level);
}

}  // namespace mamba::cpu::MAMBA_CPU_LEVEL
