// Loops over arrays for test_simd_math.py: every function of cpu/simd_math.h, and the conversions of cpu/simd.h. `count` is a multiple
// of 64.
#include "cpu/simd_math.h"
#include "cpu/stream.h"

const bool mamba::cpu::bf16_instructions =
#if defined(__x86_64__)
    __builtin_cpu_supports("avx512bf16");
#else
    false;
#endif

using namespace mamba;
using namespace mamba::cpu::MAMBA_CPU_LEVEL;

namespace {

template <class T, class F>
void loop(const T* x, T* y, int64_t count, F f) {
  for (int64_t i = 0; i < count; i += Simd<T>::width) store(y + i, f(load(x + i)));
}

template <class T, class S>
void widen_all(const S* x, T* y, int64_t count) {
  for (int64_t i = 0; i < count; i += Simd<T>::width) store(y + i, load_as<T>(x + i));
}

template <class T, class S>
void narrow_all(const T* x, S* y, int64_t count) {
  for (int64_t i = 0; i < count; i += Simd<T>::width) store_as(y + i, load(x + i));
}

template <class T, class S>
void narrow_lines(const T* x, S* y, int64_t count) {
  for_lines<T, S>(count, [&](int64_t i, auto vectors) {
    Vec<T> values[vectors.value];
    for (int n = 0; n < vectors.value; ++n) values[n] = load(x + i + n * Simd<T>::width);
    store_group(y + i, values, false);
  });
}

}  // namespace

#define FUNCTION(name, expression)                                                \
  extern "C" void name##_float32(const float* from, float* to, int64_t count) {   \
    loop(from, to, count, [](Vec<float> x) { return expression; });               \
  }                                                                               \
  extern "C" void name##_float64(const double* from, double* to, int64_t count) { \
    loop(from, to, count, [](Vec<double> x) { return expression; });              \
  }

FUNCTION(exp, exp(x))
FUNCTION(exp2, exp2(x))
FUNCTION(log, log(x))
FUNCTION(sigmoid, sigmoid(x))
FUNCTION(softplus, softplus(x))
FUNCTION(softplus_slope, softplus_with_slope(x).slope)
FUNCTION(silu, silu(x))
FUNCTION(silu_slope, silu_with_slope(x).slope)
FUNCTION(coarse_silu, coarse_silu_with_slope(x).value)
FUNCTION(coarse_silu_slope, coarse_silu_with_slope(x).slope)

#define CONVERSION(S, T, name)                                                                       \
  extern "C" void load_##name(const S* from, T* to, int64_t count) { widen_all(from, to, count); }   \
  extern "C" void store_##name(const T* from, S* to, int64_t count) { narrow_all(from, to, count); } \
  extern "C" void store_lines_##name(const T* from, S* to, int64_t count) { narrow_lines(from, to, count); }

CONVERSION(bf16, float, bfloat16_float32)
CONVERSION(f16, float, float16_float32)
CONVERSION(bf16, double, bfloat16_float64)
CONVERSION(f16, double, float16_float64)
