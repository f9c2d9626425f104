// Sums over the threads of a warp or a block, in an order that never changes.
#pragma once
#include "cuda/device.cuh"

namespace mamba::cuda {

constexpr unsigned all_lanes = 0xffffffffu;

// Over `lanes` neighbouring lanes, a power of two; every lane gets the sum.
template <class T>
__device__ __forceinline__ T sum_lanes(T value, int lanes = 32) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(all_lanes, value, offset);
  return value;
}

// Over a block of whole warps; every thread gets the sum. May be called again at once.
template <class T>
__device__ __forceinline__ T sum_block(T value) {
  struct Sums {
    T warp[32];
  };
  auto& shared = static_shared<Sums>();
  value = sum_lanes(value);
  const int warps = blockDim.x / 32;
  __syncthreads();  // readers of the previous call are done
  if (threadIdx.x % 32 == 0) shared.warp[threadIdx.x / 32] = value;
  __syncthreads();
  T sum = 0;
  for (int w = 0; w < warps; ++w) sum += shared.warp[w];
  return sum;
}

constexpr int sum_warps = 8;

// For blocks of sum_warps warps whose lanes are neighbouring results: the sum of term(i) over 0 <= i < count, for every lane that is
// `inside`. The warps share the terms; warp 0 adds theirs in order and gets the sum.
template <class T, class F>
__device__ __forceinline__ T sum_over_warps(int64_t count, bool inside, F&& term) {
  struct Sums {
    T value[sum_warps][32];
  };
  auto& shared = static_shared<Sums>();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  T sum = 0;
  if (inside)
    for (int64_t i = warp; i < count; i += sum_warps) sum += term(i);
  shared.value[warp][lane] = sum;
  __syncthreads();
  sum = 0;
  if (warp == 0)
    for (int w = 0; w < sum_warps; ++w) sum += shared.value[w][lane];
  return sum;
}

}  // namespace mamba::cuda
