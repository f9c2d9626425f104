// What declares an operator's kernels: cpu::name(params) and cuda::name(params, context). Stands at the end of params/<op>.h.
#pragma once

#include <cstdint>

#include "cpu/level.h"

namespace mamba::cuda {

// What a CUDA kernel's entry gets besides its params. It only enqueues work on the stream and never waits; it throws std::runtime_error
// when a launch fails.
struct Context {
  void* stream;  // cudaStream_t
  void* owner;
  void* (*allocate)(void* owner, int64_t bytes);  // scratch for the work that this call enqueues, at least 16-byte aligned
  void* (*blas)(void* owner);                     // cublasHandle_t of the stream, asked for when it is needed

  template <class T>
  T* scratch(int64_t count) const {
    return static_cast<T*>(allocate(owner, count * static_cast<int64_t>(sizeof(T))));
  }
  void* blas_handle() const { return blas(owner); }
};

}  // namespace mamba::cuda

#define MAMBA_KERNEL(name, Params)          \
  MAMBA_CPU_KERNEL(name, Params)            \
  namespace mamba::cuda {                   \
  void name(const Params&, const Context&); \
  }
