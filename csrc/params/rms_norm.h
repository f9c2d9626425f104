// rms_norm: what the kernels get. Tensors of shape (..., dim) are rows; leading axes that lie evenly in memory are merged by the host.
#pragma once

#include "common/view.h"
#include "params/kernel.h"

namespace mamba {

constexpr int max_leading_axes = 8;

struct RowLayout {
  int64_t count = 0;  // product of the sizes
  int axes = 0;
  int64_t size[max_leading_axes] = {};
};

// One operand of shape (..., dim): strides of the merged leading axes and of the columns. For rms: columns are groups.
struct RowView {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t stride[max_leading_axes] = {};
  int64_t column = 0;

  MAMBA_INLINE explicit operator bool() const { return data != nullptr; }
};

MAMBA_INLINE int64_t row_offset(const RowLayout& layout, const RowView& view, int64_t row) {
  int64_t sum = 0;
  for (int axis = layout.axes - 1; axis > 0; --axis) {
    sum += row % layout.size[axis] * view.stride[axis];
    row /= layout.size[axis];
  }
  return layout.axes ? sum + row * view.stride[0] : 0;
}

struct RmsNormFwd {
  RowLayout rows;
  int64_t dim, group_size;
  double eps;
  bool norm_before_gate;
  RowView x, z, residual;  // z, residual may be absent
  View<1> weight, bias;    // may be absent
  RowView out, residual_out, rms;
};

struct RmsNormBwd {
  RowLayout rows;
  int64_t dim, group_size;
  bool norm_before_gate;
  bool accumulate;              // dweight is added to
  RowView dout, dresidual_out;  // absent: zero
  RowView x, z, residual, rms;  // z, residual may be absent
  View<1> weight, bias;         // may be absent
  RowView dx, dz, dresidual;    // dz, dresidual may be absent
  View<1> dweight, dbias;       // may be absent
};

}  // namespace mamba

MAMBA_KERNEL(rms_norm_fwd, RmsNormFwd)
MAMBA_KERNEL(rms_norm_bwd, RmsNormBwd)
