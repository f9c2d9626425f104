// The scalar formulas of the kernels.
#pragma once
#include "cuda/device.cuh"

namespace mamba::cuda {

constexpr double log2_e = 1.44269504088896340736;

// 1 / (1 + e^-x), without overflow on either side
template <class T>
__device__ __forceinline__ T sigmoid(T x) {
  const T e = exp_of(x < 0 ? x : -x);
  return quotient(x < 0 ? e : T(1), 1 + e);
}

// x y where a y that has become 0 wins, also over an infinite x
template <class T>
__device__ __forceinline__ T vanishing(T x, T y) {
  return y == 0 ? T(0) : x * y;
}

template <class T>
__device__ __forceinline__ T silu(T x) {
  return vanishing(x, sigmoid(x));
}

template <class T>
struct WithSlope {
  T value, slope;
};

// silu'(x) = s (1 + x (1 - s)) with s = sigmoid(x); 1 - s = sigmoid(-x) is computed without cancellation
template <class T>
__device__ __forceinline__ WithSlope<T> silu_with_slope(T x) {
  const T e = exp_of(x < 0 ? x : -x), r = quotient(T(1), 1 + e), s = x < 0 ? e * r : r, rest = x < 0 ? r : e * r;
  return {vanishing(x, s), vanishing(1 + vanishing(x, rest), s)};
}

__device__ __forceinline__ float log_1p(float x) { return log1pf(x); }
__device__ __forceinline__ double log_1p(double x) { return log1p(x); }

// x beyond 20, else log(1 + e^x)
template <class T>
__device__ __forceinline__ T softplus(T x) {
  return x > 20 ? x : log_1p(exp_of(x));
}

template <class T>
__device__ __forceinline__ T softplus_slope(T x) {
  return x > 20 ? T(1) : sigmoid(x);
}

MAMBA_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
MAMBA_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

}  // namespace mamba::cuda
