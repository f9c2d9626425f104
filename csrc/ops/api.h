// What the host layer needs of torch, in one place: the stable tensor, dtype names, views for kernels, allocation by the layout rule.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "common/view.h"

namespace mamba {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

bool is_floating(ScalarType dtype);        // one of the four that the kernels take
const char* dtype_name(ScalarType dtype);  // "float32", as Python prints it without "torch."
std::vector<int64_t> sizes_of(const Tensor& tensor);
std::string shape_text(const Tensor& tensor);
std::string device_text(const Tensor& tensor);
DType dtype_of(const Tensor& tensor);
ScalarType accumulate_type(ScalarType dtype);  // float64 for float64, else float32

#if MAMBA_EMULATED
// What the kernels' memory checker (tests/cuda_emulator) learns from the host layer about the tensors of the call at hand.
namespace emulator {
void note_tensor(const Tensor& tensor, bool is_output);
void note_mutated(const Tensor& tensor);
void forget_tensors();
}  // namespace emulator
#endif

// The address that a kernel gets.
inline void* data_of(const Tensor& tensor) {
#if MAMBA_EMULATED
  emulator::note_tensor(tensor, false);
#endif
  return const_cast<void*>(tensor.const_data_ptr());
}

// The tensor as kernels see it. N must be its number of dimensions (checked before by ops/check.h).
template <int N>
inline View<N> view_of(const Tensor& tensor) {
  View<N> view;
  view.data = data_of(tensor);
  view.dtype = dtype_of(tensor);
  const auto strides = tensor.strides();
  for (int axis = 0; axis < N; ++axis) view.stride[axis] = strides[axis];
  return view;
}
template <int N>
inline View<N> view_of(const OptionalTensor& tensor) {
  return tensor ? view_of<N>(*tensor) : View<N>{};
}

// A new contiguous tensor on `like`'s device.
Tensor empty(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType dtype);
// A gradient: `argument`'s shape and dtype, contiguous; shape (0,) when the argument is absent.
Tensor empty_gradient(const Tensor& like, const OptionalTensor& argument);
// (batch, dim, seqlen) with like's sizes and dtype: in (batch, seqlen, dim) memory when like.stride(1) == 1, else contiguous.
Tensor empty_sequence(const Tensor& like);

// For ops that write into an argument: raises the argument's version counter, and refuses a leaf that requires grad while grad mode is on.
void mark_mutated(const char* op, const char* name, const Tensor& tensor);

}  // namespace mamba

// One host layer, compiled up to three times:
//   for _C.so         CPU kernels, namespace mamba, dispatch key CPU
//   for _C_cuda.so    MAMBA_CUDA=1: CUDA kernels, namespace mamba, dispatch key CUDA
//   for the tests     MAMBA_CUDA=1, MAMBA_EMULATED=1: the CUDA kernels' source executed on the CPU, MAMBA_NAMESPACE given, key CPU
#define MAMBA_EXPANDED_IMPL(space, key, m) STABLE_TORCH_LIBRARY_IMPL(space, key, m)
#define MAMBA_EXPANDED_SCHEMAS(space, m) STABLE_TORCH_LIBRARY(space, m)
#ifndef MAMBA_NAMESPACE
#define MAMBA_NAMESPACE mamba
#endif
#if MAMBA_CUDA && !MAMBA_EMULATED
#define MAMBA_REGISTER_KERNELS(m) MAMBA_EXPANDED_IMPL(MAMBA_NAMESPACE, CUDA, m)
#else
#define MAMBA_REGISTER_KERNELS(m) MAMBA_EXPANDED_IMPL(MAMBA_NAMESPACE, CPU, m)
#endif
#define MAMBA_SCHEMAS(m) MAMBA_EXPANDED_SCHEMAS(MAMBA_NAMESPACE, m)

// Runs a kernel on `tensor`'s device and, with CUDA, in its current stream.
#if MAMBA_CUDA
#include "ops/cuda_call.h"
#define MAMBA_RUN(name, params, tensor) \
  ::mamba::CudaCall(tensor).run([&](const ::mamba::cuda::Context& context) { ::mamba::cuda::name(params, context); })
#else
#define MAMBA_RUN(name, params, tensor) ::mamba::cpu::name(params)
#endif
