// The machine's arithmetic limits, as tight loops over data in the first-level cache. Compiled by limits.py.
#include "cpu/simd_math.h"

using namespace mamba::cpu::MAMBA_CPU_LEVEL;

namespace {
constexpr int width = Simd<float>::width;
constexpr int steps = 64, states = 16;
volatile float sink;

// 2^x by a polynomial.
struct Polynomial {
  static Vec<float> exp2(Vec<float> x) {
#if MAMBA_CPU_AVX512
    const Vec<float> r = fraction_nearest<0>(x);
    return scalef(exp2_fraction(r), x - r);
#else
    return mamba::cpu::MAMBA_CPU_LEVEL::exp2(x);
#endif
  }
};

struct Kernels {
  static Vec<float> exp2(Vec<float> x) { return mamba::cpu::MAMBA_CPU_LEVEL::exp2(x); }
};

// State steps of a selective scan: h = 2^(delta A) h + (delta u) B, y += C h, the states of one vector of channels in registers.
template <class Functions>
long long scan_steps(long long repeats) {
  float delta[steps * width], u[steps * width], a[states * width], b[steps * states], c[steps * states];
  for (int i = 0; i < steps * width; ++i) delta[i] = 0.01f * (i % 7), u[i] = 0.1f * (i % 5);
  for (int i = 0; i < states * width; ++i) a[i] = -0.1f * (1 + i % 11);
  for (int i = 0; i < steps * states; ++i) b[i] = 0.1f * (i % 3), c[i] = 0.1f * (i % 13);
  Vec<float> total = zero<float>();
  for (long long repeat = 0; repeat < repeats; ++repeat) {
    for (int half = 0; half < states; half += 8) {
      Vec<float> h[8], rates[8];
      for (int n = 0; n < 8; ++n) h[n] = zero<float>(), rates[n] = load(a + (half + n) * width);
      for (int t = 0; t < steps; ++t) {
        const Vec<float> step = load(delta + t * width), input = step * load(u + t * width);
        Vec<float> y = zero<float>();
        for (int n = 0; n < 8; ++n) {
          h[n] = Functions::exp2(step * rates[n]) * h[n] + input * b[t * states + half + n];
          y = y + h[n] * c[t * states + half + n];
        }
        total = total + y;
      }
    }
    asm volatile("" ::: "memory");
  }
  sink = sum(total);
  return repeats * steps * states * width;
}

template <class Functions>
long long exponentials(long long repeats) {
  constexpr int count = 2048;
  float x[count], y[count];
  for (int i = 0; i < count; ++i) x[i] = -10 + 0.01f * i;
  for (long long repeat = 0; repeat < repeats; ++repeat) {
    for (int i = 0; i < count; i += width) store(y + i, Functions::exp2(load(x + i)));
    asm volatile("" ::"r"(y) : "memory");
  }
  sink = y[7];
  return repeats * count;
}
}  // namespace

extern "C" long long scan_steps(long long repeats) { return scan_steps<Kernels>(repeats); }
extern "C" long long exponentials(long long repeats) { return exponentials<Kernels>(repeats); }
extern "C" long long polynomial_scan_steps(long long repeats) { return scan_steps<Polynomial>(repeats); }
extern "C" long long polynomial_exponentials(long long repeats) { return exponentials<Polynomial>(repeats); }
