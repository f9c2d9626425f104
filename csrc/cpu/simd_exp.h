// Exponentials of vectors of float and double, and what they are made of: rounding, polynomials, powers of two. Promises: simd_math.h.
#pragma once

#include "cpu/simd.h"

namespace mamba::cpu::MAMBA_CPU_LEVEL {

// Whether the mask is set for some lane. (AVX-512 code has no use for it.)
template <class M>
MAMBA_INLINE bool any(M mask) {
#if MAMBA_CPU_AVX512 || MAMBA_CPU_AVX2
  if constexpr (sizeof(M) == 32) return _mm256_movemask_epi8(bit_cast<__m256i>(mask)) != 0;
#elif defined(__SSE2__)
  if constexpr (sizeof(M) == 16) return __builtin_ia32_movmskps(bit_cast<typename VectorOf<float, 4>::type>(mask)) != 0;
#endif
  auto some = mask[0];
  for (int i = 1; i < static_cast<int>(sizeof(M) / sizeof some); ++i) some |= mask[i];
  return some != 0;
}

// a b + c in one rounding, where the CPU can. The compiler contracts products and sums by itself, but not across branches, which may differ
// from one place that a function is inlined in to the next.
template <class V>
MAMBA_INLINE V fma(V a, V b, V c) {
#if MAMBA_CPU_AVX512
  if constexpr (sizeof(Lane<V>) == 4)
    return bit_cast<V>(_mm512_fmadd_ps(bit_cast<__m512>(a), bit_cast<__m512>(b), bit_cast<__m512>(c)));
  else
    return bit_cast<V>(_mm512_fmadd_pd(bit_cast<__m512d>(a), bit_cast<__m512d>(b), bit_cast<__m512d>(c)));
#elif MAMBA_CPU_AVX2
  if constexpr (sizeof(Lane<V>) == 4)
    return bit_cast<V>(_mm256_fmadd_ps(bit_cast<__m256>(a), bit_cast<__m256>(b), bit_cast<__m256>(c)));
  else
    return bit_cast<V>(_mm256_fmadd_pd(bit_cast<__m256d>(a), bit_cast<__m256d>(b), bit_cast<__m256d>(c)));
#else
  return a * b + c;
#endif
}

template <class T>
struct FloatFormat;
template <>
struct FloatFormat<float> {
  static constexpr int mantissa_bits = 23, bias = 127;
  static constexpr float rounder = 0x1.8p23f;  // x + rounder rounds x to an integer, which then stands in the low bits
  static constexpr float smallest_normal = 0x1p-126f, infinity = __builtin_inff(), nan = __builtin_nanf("");
};
template <>
struct FloatFormat<double> {
  static constexpr int mantissa_bits = 52, bias = 1023;
  static constexpr double rounder = 0x1.8p52;
  static constexpr double smallest_normal = 0x1p-1022, infinity = __builtin_inf(), nan = __builtin_nan("");
};

// ((c0 x + c1) x + c2) x + ...
template <class V, class... C>
MAMBA_INLINE V polynomial(V x, Lane<V> first, C... rest) {
  V sum = broadcast<Lane<V>>(first);
  ((sum = sum * x + broadcast<Lane<V>>(rest)), ...);
  return sum;
}

// The integer nearest to x and its bit form: `shifted` holds n in its low bits. |x| must be below 2^(mantissa_bits - 1).
template <class V>
struct Rounded {
  V shifted, value;
};

template <class V>
MAMBA_INLINE Rounded<V> round_nearest(V x) {
  using T = Lane<V>;
  const V rounder = broadcast<T>(FloatFormat<T>::rounder);
  const V shifted = x + rounder;
  return {shifted, shifted - rounder};
}

#if MAMBA_CPU_AVX512
// p 2^floor(n)
template <class V>
MAMBA_INLINE V scalef(V p, V n) {
  if constexpr (sizeof(Lane<V>) == 4)
    return bit_cast<V>(_mm512_scalef_ps(bit_cast<__m512>(p), bit_cast<__m512>(n)));
  else
    return bit_cast<V>(_mm512_scalef_pd(bit_cast<__m512d>(p), bit_cast<__m512d>(n)));
}

// x minus the nearest multiple of 2^-Bits; 0 for an infinite x. Zen 4 makes vreduce wait for the old contents of its result's register,
// which strings independent exponentials together, so that register is cleared first.
template <int Bits, class V>
MAMBA_INLINE V fraction_nearest(V x) {
  V r = zero<Lane<V>>();
  if constexpr (sizeof(Lane<V>) == 4)
    asm("vreduceps %2, %1, %0" : "+v"(r) : "v"(x), "i"(16 * Bits + 8));
  else
    asm("vreducepd %2, %1, %0" : "+v"(r) : "v"(x), "i"(16 * Bits + 8));
  return r;
}

alignas(64) inline constexpr float power_table[32] = {
    0x1p0f,        0x1.059b0ep0f, 0x1.0b5586p0f, 0x1.11301ep0f, 0x1.172b84p0f, 0x1.1d4874p0f, 0x1.2387a6p0f, 0x1.29e9ep0f,
    0x1.306fep0f,  0x1.371a74p0f, 0x1.3dea64p0f, 0x1.44e086p0f, 0x1.4bfdaep0f, 0x1.5342b6p0f, 0x1.5ab07ep0f, 0x1.6247ecp0f,
    0x1.6a09e6p0f, 0x1.71f75ep0f, 0x1.7a1148p0f, 0x1.82589ap0f, 0x1.8ace54p0f, 0x1.93737cp0f, 0x1.9c4918p0f, 0x1.a5503cp0f,
    0x1.ae89fap0f, 0x1.b7f77p0f,  0x1.c199bep0f, 0x1.cb720ep0f, 0x1.d5818ep0f, 0x1.dfc974p0f, 0x1.ea4afap0f, 0x1.f50766p0f,
};

// 2^(n + r) for |r| <= 1/64 and a multiple n of 1/32, in units of 1/32 in the low bits of `shifted`: a shuffle of two registers looks up
// the power of the fraction of n, a parabola (`exact`: a cubic, which takes half a unit off the error) is 2^r. Three multiplications fewer
// than with a polynomial alone.
template <bool exact = false>
MAMBA_INLINE Vec<float> power_by_table(__m512i shifted, Vec<float> n, Vec<float> r) {
  const __m512 power = _mm512_permutex2var_ps(_mm512_load_ps(power_table), shifted, _mm512_load_ps(power_table + 16));
  const Vec<float> t = bit_cast<Vec<float>>(power);
  const Vec<float> second = broadcast(exact ? 0x1.ebfbep-3f : 0x1.ebfbe4p-3f), first = broadcast(exact ? 0x1.62e43p-1f : 0x1.62e584p-1f);
  const Vec<float> q = fma(r, exact ? fma(r, broadcast(0x1.c6b08ep-5f), second) : second, first);
  return scalef(fma(t, r * q, t), n);
}

inline constexpr float table_rounder = 0x1.8p18f;  // x + table_rounder rounds x to a multiple of 1/32

MAMBA_INLINE Vec<float> exp2_by_table(Vec<float> x) {
  const Vec<float> r = fraction_nearest<5>(x);
  return power_by_table(bit_cast<__m512i>(x + table_rounder), x - r, r);  // any entry, where 2^x is 0 or infinite anyway
}

// e^x for |x| <= 150; NaN stays.
template <bool exact = false>
MAMBA_INLINE Vec<float> exp_by_table(Vec<float> x) {
  const Vec<float> high = broadcast(0x1.715476p0f), low = broadcast(0x1.4ae0cp-26f);  // 1 / ln 2
  const Vec<float> shifted = fma(x, high, broadcast(table_rounder)), n = shifted - table_rounder;
  return power_by_table<exact>(bit_cast<__m512i>(shifted), n, fma(x, low, fma(x, high, -n)));
}
#endif

// p 2^n for any integer |n| <= 2 bias (double: 4000), also where 2^n or the result is subnormal or infinite; one rounding.
template <class V>
MAMBA_INLINE V scale_by_power(V p, Rounded<V> n) {
#if MAMBA_CPU_AVX512
  return scalef(p, n.value);
#else
  using T = Lane<V>;
  using F = FloatFormat<T>;
  const IntVec<T> bias = broadcast_int<T>(F::bias);
  if (__builtin_expect(!any(abs(n.value) > T(F::bias - 1)), 1))
    return p * bit_cast<V>((bit_cast<IntVec<T>>(n.shifted) + bias) << F::mantissa_bits);
  // 2^n = 2^k 2^(n - k) with k about n / 2, so that each factor is a normal number.
  const Rounded<V> half = round_nearest(n.value * T(0.5));
  const V rest = n.value - half.value;
  const V factor1 = bit_cast<V>((bit_cast<IntVec<T>>(half.shifted) + bias) << F::mantissa_bits);
  const V factor2 = bit_cast<V>((bit_cast<IntVec<T>>(rest + F::rounder) + bias) << F::mantissa_bits);
  return p * factor1 * factor2;
#endif
}

// 2^r for |r| <= 1/2
template <class V>
MAMBA_INLINE V exp2_fraction(V r) {
  if constexpr (sizeof(Lane<V>) == 4) {
    return polynomial(r, 0x1.5bedb0p-10f, 0x1.3ce9e0p-7f, 0x1.c6b6b6p-5f, 0x1.ebf9bep-3f, 0x1.62e42ap-1f, 1.0f);
  } else {
    return polynomial(r, 0x1.e81b36499f7c5p-32, 0x1.e612fd5e44f68p-28, 0x1.b5260656e1767p-24, 0x1.62bfcd02e336dp-20, 0x1.ffcbfbfbaeba9p-17,
                      0x1.4309130c61d6fp-13, 0x1.5d87fe78b34bfp-10, 0x1.3b2ab6fba0fcep-7, 0x1.c6b08d704a0d5p-5, 0x1.ebfbdff82c59dp-3,
                      0x1.62e42fefa39efp-1, 1.0);
  }
}

// 2^x, the exponential of inner loops: within 2.5 units in the last place (float), exact at 0. Without AVX-512 results below 2^-126.5
// (double: 2^-1022.5) are 0 and those from 2^127.5 (2^1023.5) on infinite, which saves the second scaling.
template <class V>
MAMBA_INLINE V exp2(V x) {
#if MAMBA_CPU_AVX512
  if constexpr (sizeof(Lane<V>) == 4) {
    return exp2_by_table(x);
  } else {
    const V r = fraction_nearest<0>(x);
    return scalef(exp2_fraction(r), x - r);
  }
#else
  using T = Lane<V>;
  using F = FloatFormat<T>;
  // Exponent fields 0 and all ones are the factors 0 and infinity.
  const V clamped = min(broadcast<T>(F::bias + 1), max(broadcast<T>(-F::bias), x));
  const Rounded<V> n = round_nearest(clamped);
  const V power = bit_cast<V>((bit_cast<IntVec<T>>(n.shifted) + broadcast_int<T>(F::bias)) << F::mantissa_bits);
  return exp2_fraction(clamped - n.value) * power;
#endif
}

// e^x = fraction 2^n with fraction in about [0.7, 1.42], n clamped to what scale_by_power takes. NaN gives a NaN fraction.
template <class V>
struct ExpParts {
  V fraction;
  Rounded<V> n;
};

// For |x| <= 150 (double: 1200).
template <class V>
MAMBA_INLINE ExpParts<V> exp_parts_within(V x) {
  if constexpr (sizeof(Lane<V>) == 4) {
    const Rounded<V> n = round_nearest(x * 0x1.715476p0f);
    const V r = (x - n.value * 0x1.62e4p-1f) - n.value * 0x1.7f7d1cp-20f;  // ln 2 in two parts; the first product is exact
    const V q = polynomial(r, 0x1.6a4f68p-10f, 0x1.123982p-7f, 0x1.5558aep-5f, 0x1.555492p-3f, 0x1.fffffcp-2f);
    return {(r * r * q + r) + 1.0f, n};
  } else {
    const Rounded<V> n = round_nearest(x * 0x1.71547652b82fep0);
    const V r = (x - n.value * 0x1.62e42fefa3800p-1) - n.value * 0x1.ef35793c76730p-45;
    const V q =
        polynomial(r, 0x1.ad99f114050f3p-26, 0x1.28ae09ace3db1p-22, 0x1.71df143b40ce0p-19, 0x1.a0199951f7ef6p-16, 0x1.a01a013230483p-13,
                   0x1.6c16c1847b41fp-10, 0x1.11111111263f7p-7, 0x1.55555555506aep-5, 0x1.5555555555500p-3, 0.5);
    return {(r * r * q + r) + 1.0, n};
  }
}

// `negative`: x <= 0 is known, which saves the upper clamp.
template <bool negative = false, class V>
MAMBA_INLINE ExpParts<V> exp_parts(V x) {
  using T = Lane<V>;
  constexpr T least = std::is_same_v<T, float> ? T(-150) : T(-1200), most = std::is_same_v<T, float> ? T(100) : T(750);
  const V above = max(broadcast<T>(least), x);
  return exp_parts_within(negative ? above : min(broadcast<T>(most), above));
}

template <class V>
MAMBA_INLINE V exp(V x) {
  const ExpParts<V> parts = exp_parts(x);
  return scale_by_power(parts.fraction, parts.n);
}

template <class V>
MAMBA_INLINE V exp_negative(V x) {
#if MAMBA_CPU_AVX512
  if constexpr (sizeof(Lane<V>) == 4) return exp_by_table(max(broadcast(-150.0f), x));
#endif
  const ExpParts<V> parts = exp_parts<true>(x);
  return scale_by_power(parts.fraction, parts.n);
}

}  // namespace mamba::cpu::MAMBA_CPU_LEVEL
