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

// The tensor as kernels see it. N must be its number of dimensions (checked before by ops/check.h).
template <int N>
inline View<N> view_of(const Tensor& tensor) {
  View<N> view;
  view.data = const_cast<void*>(tensor.const_data_ptr());
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
