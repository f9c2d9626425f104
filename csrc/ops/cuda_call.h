// One call of a CUDA kernel from the host layer: device guard, current stream, scratch memory. Included by ops/api.h.
#pragma once

#if !MAMBA_EMULATED
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/c/shim.h>
#endif

#include <stdexcept>
#include <vector>

#include "ops/api.h"
#include "params/kernel.h"

namespace mamba {

class CudaCall {
 public:
  explicit CudaCall(const Tensor& tensor) : tensor_(tensor) {}

  template <class F>
  void run(F&& kernel) {
#if MAMBA_EMULATED
    struct Forget {
      ~Forget() { emulator::forget_tensors(); }
    } at_the_end;
    kernel(context(nullptr));
#else
    const int32_t device = tensor_.get_device_index();
    const torch::stable::accelerator::DeviceGuard guard(device);
    void* stream = nullptr;
    if (aoti_torch_get_current_cuda_stream(device, &stream)) throw std::runtime_error("mamba_ops: no current CUDA stream");
    kernel(context(stream));
#endif
  }

 private:
  cuda::Context context(void* stream) { return {stream, this, &CudaCall::allocate, &CudaCall::blas}; }

  // Freed when the call has returned: torch's allocator gives the memory to later work of the same stream only.
  static void* allocate(void* self, int64_t bytes) {
    CudaCall& call = *static_cast<CudaCall*>(self);
    call.scratch_.push_back(empty(call.tensor_, {bytes}, ScalarType::Byte));
    return call.scratch_.back().mutable_data_ptr();
  }

  // torch's own handle: it has the current stream, and a workspace that graphs may capture.
  static void* blas(void*) {
    void* handle = nullptr;
#if !MAMBA_EMULATED
    if (torch_get_current_cuda_blas_handle(&handle)) throw std::runtime_error("mamba_ops: no cuBLAS handle");
#endif
    return handle;
  }

  const Tensor& tensor_;
  std::vector<Tensor> scratch_;
};

}  // namespace mamba
