// Elementary functions of vectors of float and double, the same code at every level (the last bit may differ between levels: FMA or not).
// float: exp and log within 2 units in the last place, softplus and silu within 5, wherever the result is a normal number; smaller results
// within one smallest normal. double: about 1e-15 relative. Zeros, infinities and NaN give the mathematical limits. Polynomials:
// near-minimax fits.
#pragma once

#include "cpu/simd_exp.h"

namespace mamba::cpu::MAMBA_CPU_LEVEL {

// Natural logarithm: x = 2^k m with m in [sqrt(1/2), sqrt(2)), f = m - 1, s = f / (2 + f), log m = 2 atanh(s) = f - s (f - R(s^2)).
template <class V>
MAMBA_INLINE V log(V x) {
  using T = Lane<V>;
  using F = FloatFormat<T>;
  using I = IntVec<T>;
  const I subnormal = x < F::smallest_normal;
  constexpr T lift = std::is_same_v<T, float> ? T(0x1p25) : T(0x1p54);
  const V lifted = select(subnormal, x * lift, x);
  const I root = bit_cast<I>(broadcast<T>(T(0x1.6a09e667f3bcdp-1)));
  const I exponent = (bit_cast<I>(lifted) - root) >> F::mantissa_bits;
  const V m = bit_cast<V>(bit_cast<I>(lifted) - (exponent << F::mantissa_bits));
  const V rounder = broadcast<T>(F::rounder);
  const V k = (bit_cast<V>(exponent + bit_cast<I>(rounder)) - rounder) -
              select(subnormal, broadcast<T>(std::is_same_v<T, float> ? T(25) : T(54)), zero<T>());
  const V f = m - T(1);
  const V s = f / (f + T(2));
  const V z = s * s;
  V r;
  if constexpr (sizeof(T) == 4) {
    r = z * polynomial(z, 0x1.31e244p-2f, 0x1.995eccp-2f, 0x1.55557ap-1f);
  } else {
    r = z * polynomial(z, 0x1.2f116f5fc5bc4p-3, 0x1.39a09707ea88ep-3, 0x1.746649a202fcep-3, 0x1.c71c51d809d5ep-3, 0x1.249249422a094p-2,
                       0x1.999999997f9fbp-2, 0x1.5555555555593p-1);
  }
  constexpr T ln2_high = std::is_same_v<T, float> ? T(0x1.62e4p-1) : T(0x1.62e42fefa3800p-1);
  constexpr T ln2_low = std::is_same_v<T, float> ? T(0x1.7f7d1cp-20) : T(0x1.ef35793c76730p-45);
  const V half = f * f * T(0.5);
  const V result = k * ln2_high + (f - (half - (s * (half + r) + k * ln2_low)));
  const V edge = select(I(x == T(0)), broadcast<T>(-F::infinity), select(I(x == F::infinity), x, broadcast<T>(F::nan)));
  return select(I(I(x > T(0)) & I(x < F::infinity)), result, edge);
}

// log(1 + x) for 0 <= x <= 1: a polynomial (float), or s = x / (2 + x), 2 atanh(s) = 2 s + s R(s^2)
template <class V>
MAMBA_INLINE V log1p_unit(V x) {
  using T = Lane<V>;
  if constexpr (sizeof(T) == 4) {
    return x * x *
               polynomial(x, 0x1.5f81d2p-8f, -0x1.ec8696p-6f, 0x1.44659ap-4f, -0x1.19ab64p-3f, 0x1.88439ep-3f, -0x1.fd130cp-3f,
                          0x1.5535dap-2f, -0x1.ffff14p-2f) +
           x;
  } else {
    const V s = x / (x + T(2));
    const V z = s * s;
    const V r =
        z * polynomial(z, 0x1.5c84f70ad2a16p-3, 0x1.55a31ebde9d44p-4, 0x1.efdbaee17aa1ep-4, 0x1.10678b78d5971p-3, 0x1.3b1ddffd7bce7p-3,
                       0x1.745cb3c8deaadp-3, 0x1.c71c741df8785p-3, 0x1.24924920898efp-2, 0x1.99999999a0790p-2, 0x1.5555555555535p-1);
    return s * r + (s + s);
  }
}

// e^-x = fraction / 2^n for |x| <= 150 (double: 1200), a little less exact than exp_parts where that saves instructions.
template <class V>
MAMBA_INLINE ExpParts<V> exp_minus_parts(V x) {
#if MAMBA_CPU_AVX512 || MAMBA_CPU_AVX2
  using T = Lane<V>;
  constexpr bool single = std::is_same_v<T, float>;
  constexpr T high = single ? T(0x1.715476p0) : T(0x1.71547652b82fep0);  // 1 / ln 2 in two parts
  constexpr T low = single ? T(0x1.4ae0cp-26) : T(0x1.777d0ffda0d24p-56);
  const Rounded<V> n = round_nearest(x * high);
  return {exp2_fraction((n.value - x * high) - x * low), n};  // fused: the first difference is exact
#else
  const ExpParts<V> parts = exp_parts_within(-x);
  return {parts.fraction, round_nearest(-parts.n.value)};
#endif
}

// 2^n for n <= bias; 0 or something as small where that would be subnormal.
template <class V>
MAMBA_INLINE V small_power(Rounded<V> n) {
  using T = Lane<V>;
#if MAMBA_CPU_AVX512
  return scale_by_power(broadcast<T>(1), n);
#else
  using F = FloatFormat<T>;
  const V bounded = max(broadcast<T>(-F::bias), n.value);  // exponent field 0
  return bit_cast<V>((bit_cast<IntVec<T>>(bounded + F::rounder) + broadcast_int<T>(F::bias)) << F::mantissa_bits);
#endif
}

// A function and its derivative at the same point.
template <class V>
struct WithSlope {
  V value, slope;
};

// x if x > 20, else log1p(e^x) = max(x, 0) + log1p(e^-|x|); the slope is 1 if x > 20, else sigmoid(x).
template <class V>
MAMBA_INLINE WithSlope<V> softplus_with_slope(V x) {
  using T = Lane<V>;
  using I = IntVec<T>;
  const V e = exp_negative(negative_abs(x));
  const V value = max(x, zero<T>()) + log1p_unit(e), slope = select(I(x >= T(0)), broadcast<T>(1), e) / (e + T(1));
  if constexpr (sizeof(T) == 4) return {value, slope};  // where x > 20, they round to x and 1
  const I linear = x > T(20);
  return {select(linear, x, value), select(linear, broadcast<T>(1), slope)};
}

template <class V>
MAMBA_INLINE V softplus(V x) {
  return softplus_with_slope(x).value;
}

// silu(z) = z s and its slope s (1 + z (1 - s)) with s = 1 / (1 + e^-z). With e^-z = f / 2^n and d = 2^n + f it is s = 2^n / d, 1 - s = f /
// d; 2^n is multiplied last, because e^z may be subnormal where z e^z is not. -inf gives -0 for both, the limit from where it is reached.
template <class V>
struct SiluParts {
  V z, bounded, f, d;
  Rounded<V> n;
};

template <class V>
MAMBA_INLINE SiluParts<V> silu_parts(V x) {
  using T = Lane<V>;
  constexpr T least = std::is_same_v<T, float> ? T(-126) : T(-760);  // silu rounds to -0 from here on
  const V z = max(broadcast<T>(least), x);
  const V bounded = min(broadcast<T>(42), z);  // 1 + e^-42 = 1
  const ExpParts<V> parts = exp_minus_parts(bounded);
  return {z, bounded, parts.fraction, small_power(parts.n) + parts.fraction, parts.n};
}

// Scaling twice is dear: numbers x whose e^x and e^-x are normal go without it, and vectors of such numbers without even trying.
template <class T>
constexpr T ordinary_most = std::is_same_v<T, float> ? 87 : 700;

template <class V>
MAMBA_INLINE IntVec<Lane<V>> is_ordinary(V x) {
  return abs(x) <= ordinary_most<Lane<V>>;
}

template <class V>
MAMBA_INLINE bool are_ordinary(V x) {
  using T = Lane<V>;
#if MAMBA_CPU_AVX512
  if constexpr (sizeof(T) == 4)
    return __builtin_expect(_mm512_cmp_ps_mask(bit_cast<__m512>(abs(x)), _mm512_set1_ps(ordinary_most<T>), _CMP_NLE_UQ) == 0, 1);
  else
    return __builtin_expect(_mm512_cmp_pd_mask(bit_cast<__m512d>(abs(x)), _mm512_set1_pd(ordinary_most<T>), _CMP_NLE_UQ) == 0, 1);
#else
  return __builtin_expect(!any(~is_ordinary(x)), 1);
#endif
}

template <bool exact = false, class V>
MAMBA_INLINE V ordinary_exp_minus(V x) {
  using T = Lane<V>;
#if MAMBA_CPU_AVX512
  if constexpr (sizeof(T) == 4) return exp_by_table<exact>(-x);
#endif
  const ExpParts<V> parts = exp_minus_parts(x);
  return bit_cast<V>(bit_cast<IntVec<T>>(parts.fraction) - (bit_cast<IntVec<T>>(parts.n.shifted) << FloatFormat<T>::mantissa_bits));
}

// 1 / (1 + e^-x), in the parts of silu; else from e = e^-|x|: 1 / (1 + e) for x >= 0, e / (1 + e) for x < 0
template <class V>
MAMBA_INLINE V sigmoid(V x) {
  using T = Lane<V>;
#if MAMBA_CPU_AVX512
  const SiluParts<V> p = silu_parts(x);
  V r;
  if constexpr (sizeof(T) == 4) {  // 14 bits, then a step of Newton's method: a third of the division's time
    r = bit_cast<V>(_mm512_rcp14_ps(bit_cast<__m512>(p.d)));
    r = r * (T(1) - p.d * r) + r;
  } else {
    r = T(1) / p.d;
  }
  return scale_by_power(r, p.n);
#else
  const V e = exp_negative(negative_abs(x));
  return select(IntVec<T>(x >= T(0)), broadcast<T>(1), e) / (e + T(1));
#endif
}

template <class V>
MAMBA_INLINE V silu(V x) {
  const V value = x / (ordinary_exp_minus(x) + Lane<V>(1));
  if (are_ordinary(x)) return value;
  const SiluParts<V> p = silu_parts(x);
  return select(is_ordinary(x), value, scale_by_power(p.z / p.d, p.n));
}

template <class V>
MAMBA_INLINE WithSlope<V> silu_with_slope(V x) {
  using T = Lane<V>;
  const V e = ordinary_exp_minus<true>(x), s = T(1) / (e + T(1));
  const WithSlope<V> ordinary{x * s, s * fma(x, e * s, broadcast<T>(1))};
  if (are_ordinary(x)) return ordinary;
  const SiluParts<V> p = silu_parts(x);
  const V q = T(1) / p.d, slope = q * (p.bounded * (p.f * q) + T(1));
  const auto chosen = is_ordinary(x);
  return {select(chosen, ordinary.value, scale_by_power(p.z * q, p.n)), select(chosen, ordinary.slope, scale_by_power(slope, p.n))};
}

// silu and its slope for results that are stored in 16 bits: relative error below 2^-16, absolute below 2^-118.
template <class V>
MAMBA_INLINE WithSlope<V> coarse_silu_with_slope(V x) {
#if MAMBA_CPU_AVX512
  if constexpr (sizeof(Lane<V>) == 4) {
    const V above = max(broadcast(-87.0f), x), z = min(broadcast(42.0f), above);
    const V t = above * -0x1.715476p0f, r = fraction_nearest<0>(t);
    const V e = scalef(polynomial(r, 0x1.3a02ccp-7f, 0x1.c9fc46p-5f, 0x1.ec0378p-3f, 0x1.62e12cp-1f, 1.0f), t - r);
    const V s = 1.0f / (e + 1.0f);
    return {above / (e + 1.0f), s * (z * (e * s) + 1.0f)};
  }
#endif
  return silu_with_slope(x);
}

// As exact as numbers stored as S need it.
template <class S, class V>
MAMBA_INLINE WithSlope<V> silu_with_slope_for(V x) {
  if constexpr (sizeof(S) == 2)
    return coarse_silu_with_slope(x);
  else
    return silu_with_slope(x);
}

template <class S, class V>
MAMBA_INLINE V silu_for(V x) {
  if constexpr (sizeof(S) == 2)
    return coarse_silu_with_slope(x).value;
  else
    return silu(x);
}

}  // namespace mamba::cpu::MAMBA_CPU_LEVEL
