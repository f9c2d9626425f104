// Memory traffic of operators that do little arithmetic: stores that pass by the caches, prefetches.
#pragma once

#include "cpu/simd.h"

namespace mamba::cpu::MAMBA_CPU_LEVEL {

constexpr int64_t streamed_bytes = 32 << 20;  // outputs of this size do not stay in a cache

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

template <class S>
MAMBA_INLINE void prefetch(const S* from, int64_t bytes) {
  __builtin_prefetch(reinterpret_cast<const char*>(from) + bytes);
}

}  // namespace mamba::cpu::MAMBA_CPU_LEVEL
