// Dtype tags, the two 16-bit floating types, and dispatch from a tag to a C++ type. Host and device.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

// Always inlined: the same header is compiled for several instruction sets, and an out-of-line copy could be linked into the wrong one.
#if defined(__CUDACC__)
#define MAMBA_INLINE __host__ __device__ __forceinline__
#else
#define MAMBA_INLINE __attribute__((always_inline)) inline
#endif

namespace mamba {

enum class DType : int8_t { f64, f32, bf16, f16, i32, i64 };

// Storage only: arithmetic is done in float (design: accumulate in f32, round once at the store).
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

template <class T>
struct Tag {
  using type = T;
};

// Calls f(Tag<T>{}) for the floating type T that the tag names.
template <class F>
MAMBA_INLINE decltype(auto) dispatch_floating(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f64: return f(Tag<double>{});
    case DType::bf16: return f(Tag<bf16>{});
    case DType::f16: return f(Tag<f16>{});
    default: return f(Tag<float>{});
  }
}

// Calls f(Tag<acc>{}): double for f64, float for everything else.
template <class F>
MAMBA_INLINE decltype(auto) dispatch_accumulate(DType dtype, F&& f) {
  if (dtype == DType::f64) return f(Tag<double>{});
  return f(Tag<float>{});
}

// Calls f(std::bool_constant<flag>{}...).
template <class F>
MAMBA_INLINE decltype(auto) with_flags(F&& f) {
  return f();
}
template <class F, class... Flags>
MAMBA_INLINE decltype(auto) with_flags(F&& f, bool flag, Flags... flags) {
  if (flag) return with_flags([&](auto... rest) { return f(std::true_type{}, rest...); }, flags...);
  return with_flags([&](auto... rest) { return f(std::false_type{}, rest...); }, flags...);
}

MAMBA_INLINE constexpr int64_t size_of(DType dtype) {
  return dtype == DType::f64 || dtype == DType::i64 ? 8 : dtype == DType::f32 || dtype == DType::i32 ? 4 : 2;
}

}  // namespace mamba
