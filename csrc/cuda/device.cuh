// What the kernels know of the compiler: nvcc, or g++ with the emulator of tests/cuda_emulator. Launches, shared memory, conversions and
// fast mathematics. The only file with #ifdef __CUDACC__.
#pragma once
#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#endif

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "common/view.h"
#include "params/kernel.h"

namespace mamba::cuda {

// ---- launch ----

// Replaces kernel<<<grid, block, shared_bytes, stream>>>(arguments...). The grid is one-dimensional: its x axis alone holds up to 2^31 - 1
// blocks, so that no batch or number of channels is too large. An empty grid does nothing.
template <class... Parameters, class... Arguments>
void launch(const Context& context, const char* name, void (*kernel)(Parameters...), int64_t blocks, int threads, int64_t shared_bytes,
            Arguments&&... arguments) {
  if (blocks <= 0) return;
  if (blocks > 0x7fffffff) throw std::runtime_error(std::string("mamba_ops: ") + name + ": the tensors are too large for one launch");
#ifdef __CUDACC__
  cudaError_t status = cudaSuccess;
  if (shared_bytes > 48 * 1024) status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes));
  if (status == cudaSuccess) {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned(blocks));
    config.blockDim = dim3(unsigned(threads));
    config.dynamicSmemBytes = size_t(shared_bytes);
    config.stream = static_cast<cudaStream_t>(context.stream);
    status = cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
  }
  if (status != cudaSuccess)
    throw std::runtime_error(std::string("mamba_ops: launching ") + name + " failed: " + cudaGetErrorString(status));
#else
  emu::launch(kernel, dim3(unsigned(blocks)), dim3(unsigned(threads)), size_t(shared_bytes), name, std::forward<Arguments>(arguments)...);
#endif
}

// The function `name` of the first of these shared libraries that the process has loaded, else that can be found; null without one. In the
// emulator: its own stand-in.
template <class Function>
Function library_function(std::initializer_list<const char*> libraries, const char* name) {
#ifdef __CUDACC__
  for (const int how : {RTLD_LAZY | RTLD_NOLOAD, RTLD_LAZY})
    for (const char* library : libraries)
      if (void* const handle = dlopen(library, how))
        if (void* const function = dlsym(handle, name)) return reinterpret_cast<Function>(function);
  return nullptr;
#else
  return reinterpret_cast<Function>(emu::library_function(name));
#endif
}

// ---- shared memory ----

// `count` uninitialised objects in the block's dynamic shared memory, of which a kernel has one array.
template <class T>
__device__ __forceinline__ T* dynamic_shared(int count) {
#ifdef __CUDACC__
  extern __shared__ __align__(16) unsigned char dynamic_shared_bytes[];
  return reinterpret_cast<T*>(dynamic_shared_bytes);
#else
  return reinterpret_cast<T*>(emu::dynamic_shared_memory(size_t(count) * sizeof(T)));
#endif
}

// One uninitialised object in static shared memory. T tells uses apart: use a struct declared in the function.
template <class T>
__device__ __forceinline__ T& static_shared() {
#ifdef __CUDACC__
  __shared__ __align__(16) unsigned char bytes[sizeof(T)];
  return *reinterpret_cast<T*>(bytes);
#else
  static const char tag = 0;
  return *reinterpret_cast<T*>(emu::static_shared_memory(&tag, sizeof(T), alignof(T)));
#endif
}

// ---- numbers: the stored types to the type of arithmetic and back, rounded to nearest even ----

template <class S>
using Accumulate = std::conditional_t<std::is_same_v<S, double>, double, float>;
template <class S>
constexpr DType accumulate_tag = std::is_same_v<S, double> ? DType::f64 : DType::f32;

__device__ __forceinline__ double to_number(double x) { return x; }
__device__ __forceinline__ float to_number(float x) { return x; }
#ifdef __CUDACC__
__device__ __forceinline__ float to_number(bf16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }
__device__ __forceinline__ float to_number(f16 x) { return __half2float(__ushort_as_half(x.bits)); }
__device__ __forceinline__ void round_to(bf16& to, float x) { to.bits = __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
__device__ __forceinline__ void round_to(f16& to, float x) { to.bits = __half_as_ushort(__float2half_rn(x)); }
#else
inline float to_number(bf16 x) { return std::bit_cast<float>(uint32_t(x.bits) << 16); }
inline float to_number(f16 x) { return float(std::bit_cast<_Float16>(x.bits)); }
inline void round_to(bf16& to, float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  to.bits = uint16_t(x != x ? 0x7fc0u : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
inline void round_to(f16& to, float x) { to.bits = std::bit_cast<uint16_t>(_Float16(x)); }
#endif
__device__ __forceinline__ void round_to(float& to, double x) { to = float(x); }
__device__ __forceinline__ void round_to(float& to, float x) { to = x; }
__device__ __forceinline__ void round_to(double& to, double x) { to = x; }
__device__ __forceinline__ void round_to(bf16& to, double x) { round_to(to, float(x)); }
__device__ __forceinline__ void round_to(f16& to, double x) { round_to(to, float(x)); }

// ---- mathematics ----

__device__ __forceinline__ float exp_of(float x) { return expf(x); }
__device__ __forceinline__ double exp_of(double x) { return exp(x); }
__device__ __forceinline__ float exp2_of(float x) { return exp2f(x); }
__device__ __forceinline__ double exp2_of(double x) { return exp2(x); }
__device__ __forceinline__ float quotient(float x, float y) { return __fdividef(x, y); }
__device__ __forceinline__ double quotient(double x, double y) { return x / y; }
__device__ __forceinline__ float root(float x) { return sqrtf(x); }
__device__ __forceinline__ double root(double x) { return sqrt(x); }

}  // namespace mamba::cuda
