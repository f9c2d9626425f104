#include "params/rms_norm.h"

#include "ops/check.h"

namespace mamba {
namespace {

// Brings operands of one leading shape to a common RowLayout: neighbouring leading axes are merged where every operand allows it.
class RowOperands {
 public:
  explicit RowOperands(const char* op) : op_(op) {}

  // `columns`: the last axis is the columns. Otherwise all axes are leading ones (rms without groups).
  void add(RowView& view, const OptionalTensor& tensor, bool columns = true) {
    if (tensor) operands_.push_back({&view, *tensor, columns});
  }

  RowLayout finish() {
    const Operand& first = operands_.front();
    const int64_t axes = first.tensor.dim() - (first.columns ? 1 : 0);
    RowLayout layout;
    layout.count = 1;
    for (const Operand& operand : operands_) {
      operand.view->data = data_of(operand.tensor);
      operand.view->dtype = dtype_of(operand.tensor);
      operand.view->column = operand.columns ? operand.tensor.stride(axes) : 0;
    }
    for (int64_t axis = 0; axis < axes; ++axis) {
      const int64_t size = first.tensor.size(axis);
      layout.count *= size;
      if (size == 1) continue;
      if (layout.axes > 0 && mergeable(layout, axis)) {
        layout.size[layout.axes - 1] *= size;
      } else {
        if (layout.axes == max_leading_axes)
          fail(op_, ": more than ", max_leading_axes, " leading axes that do not lie evenly in memory; call contiguous() first");
        layout.size[layout.axes++] = size;
      }
      for (const Operand& operand : operands_) operand.view->stride[layout.axes - 1] = operand.tensor.stride(axis);
    }
    return layout;
  }

 private:
  struct Operand {
    RowView* view;
    Tensor tensor;
    bool columns;
  };

  bool mergeable(const RowLayout& layout, int64_t axis) const {
    for (const Operand& operand : operands_)
      if (operand.view->stride[layout.axes - 1] != operand.tensor.stride(axis) * operand.tensor.size(axis)) return false;
    return true;
  }

  const char* op_;
  std::vector<Operand> operands_;
};

// rms has x's leading shape, with a last axis of groups when there is a group size.
std::vector<int64_t> rms_sizes(const Tensor& x, std::optional<int64_t> group_size) {
  std::vector<int64_t> sizes = sizes_of(x);
  if (group_size)
    sizes.back() /= *group_size;
  else
    sizes.pop_back();
  return sizes;
}

void check_like_x(const Checker& check, const char* name, const OptionalTensor& tensor, const Tensor& x, const char* x_name = "x") {
  if (tensor && sizes_of(*tensor) != sizes_of(x))
    fail(check.op(), ": ", name, " must have ", x_name, "'s shape ", shape_text(x), ", got ", shape_text(*tensor));
}

int64_t check_arguments(const Checker& check, const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                        const OptionalTensor& z, const OptionalTensor& residual, std::optional<int64_t> group_size) {
  if (x.dim() < 1) fail(check.op(), ": x must have shape (..., dim), got ", shape_text(x));
  const int64_t dim = x.size(x.dim() - 1);
  check.shape("weight", weight, {{"dim", dim}});
  check.shape("bias", bias, {{"dim", dim}});
  check_like_x(check, "z", z, x);
  check_like_x(check, "residual", residual, x);
  check.floating("weight", weight);
  check.floating("bias", bias);
  check.same_dtype("z", z);
  check.floating("residual", residual);
  if (group_size && (*group_size < 1 || dim % *group_size != 0))
    fail(check.op(), ": group_size must be positive and divide dim = ", dim, ", got ", *group_size);
  return dim;
}

std::tuple<Tensor, Tensor, Tensor> rms_norm_fwd(Tensor x, OptionalTensor weight, OptionalTensor bias, OptionalTensor z,
                                                OptionalTensor residual, double eps, std::optional<int64_t> group_size,
                                                bool norm_before_gate, bool residual_in_fp32) {
  const Checker check("rms_norm", "x", x);
  const int64_t dim = check_arguments(check, x, weight, bias, z, residual, group_size);
  if (!(eps > 0)) fail("rms_norm: eps must be positive, got ", eps);

  const ScalarType acc = accumulate_type(x.scalar_type());
  Tensor out = empty(x, sizes_of(x), x.scalar_type());
  Tensor residual_out = residual ? empty(x, sizes_of(x), residual_in_fp32 ? acc : residual->scalar_type()) : empty(x, {0}, acc);
  Tensor rms = empty(x, rms_sizes(x, group_size), acc);

  RmsNormFwd params{};
  RowOperands operands("rms_norm");
  operands.add(params.x, x);
  operands.add(params.z, z);
  operands.add(params.residual, residual);
  operands.add(params.out, out);
  if (residual) operands.add(params.residual_out, residual_out);
  operands.add(params.rms, rms, group_size.has_value());
  params.rows = operands.finish();
  params.dim = dim;
  params.group_size = group_size.value_or(dim);
  params.eps = eps;
  params.norm_before_gate = norm_before_gate;
  params.weight = view_of<1>(weight);
  params.bias = view_of<1>(bias);
  MAMBA_RUN(rms_norm_fwd, params, x);
  return {out, residual_out, rms};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> rms_norm_bwd(OptionalTensor dout, OptionalTensor dresidual_out, Tensor x,
                                                                OptionalTensor weight, OptionalTensor bias, OptionalTensor z,
                                                                OptionalTensor residual, Tensor rms, std::optional<int64_t> group_size,
                                                                bool norm_before_gate) {
  const Checker check("rms_norm_bwd", "x", x);
  const int64_t dim = check_arguments(check, x, weight, bias, z, residual, group_size);
  check_like_x(check, "dout", dout, x);
  check.same_dtype("dout", dout);
  if (!residual) dresidual_out.reset();
  check_like_x(check, "dresidual_out", dresidual_out, x);
  check.floating("dresidual_out", dresidual_out);
  check.floating("rms", rms);
  if (sizes_of(rms) != rms_sizes(x, group_size))
    fail("rms_norm_bwd: rms must be the one that rms_norm returned for x of shape ", shape_text(x), ", got shape ", shape_text(rms));

  Tensor dx = empty(x, sizes_of(x), x.scalar_type());
  Tensor dweight = empty_gradient(x, weight);
  Tensor dbias = empty_gradient(x, bias);
  Tensor dz = empty_gradient(x, z);
  const bool separate = residual && residual->scalar_type() != x.scalar_type();
  Tensor dresidual = empty_gradient(x, separate ? residual : std::nullopt);

  RmsNormBwd params{};
  RowOperands operands("rms_norm_bwd");
  operands.add(params.x, x);
  operands.add(params.z, z);
  operands.add(params.residual, residual);
  operands.add(params.rms, rms, group_size.has_value());
  operands.add(params.dout, dout);
  operands.add(params.dresidual_out, dresidual_out);
  operands.add(params.dx, dx);
  if (z) operands.add(params.dz, dz);
  if (separate) operands.add(params.dresidual, dresidual);
  params.rows = operands.finish();
  params.dim = dim;
  params.group_size = group_size.value_or(dim);
  params.norm_before_gate = norm_before_gate;
  params.weight = view_of<1>(weight);
  params.bias = view_of<1>(bias);
  if (weight) params.dweight = view_of<1>(dweight);
  if (bias) params.dbias = view_of<1>(dbias);
  MAMBA_RUN(rms_norm_bwd, params, x);
  return {dx, dweight, dbias, dz, dresidual};
}

void rms_norm_bwd_(Tensor dy, Tensor x, Tensor weight, Tensor rms, Tensor dx, Tensor dweight) {
  const Checker check("rms_norm_bwd_", "x", x);
  if (x.dim() < 1) fail("rms_norm_bwd_: x must have shape (..., dim), got ", shape_text(x));
  const int64_t dim = x.size(x.dim() - 1);
  check_like_x(check, "dy", dy, x);
  check_like_x(check, "dx", dx, x);
  check.shape("weight", weight, {{"dim", dim}});
  check.shape("dweight", dweight, {{"dim", dim}});
  if (sizes_of(rms) != rms_sizes(x, std::nullopt))
    fail("rms_norm_bwd_: rms must have x's leading shape (x has shape ", shape_text(x), "), got ", shape_text(rms));
  check.same_dtype("dy", dy);
  check.same_dtype("dx", dx);
  check.floating("weight", weight);
  check.floating("dweight", dweight);
  check.floating("rms", rms);
  mark_mutated("rms_norm_bwd_", "dx", dx);
  mark_mutated("rms_norm_bwd_", "dweight", dweight);

  RmsNormBwd params{};
  RowOperands operands("rms_norm_bwd_");
  operands.add(params.x, x);
  operands.add(params.rms, rms, false);
  operands.add(params.dout, dy);
  operands.add(params.dx, dx);
  params.rows = operands.finish();
  params.dim = dim;
  params.group_size = dim;
  params.accumulate = true;
  params.weight = view_of<1>(weight);
  params.dweight = view_of<1>(dweight);
  MAMBA_RUN(rms_norm_bwd, params, x);
}

}  // namespace

MAMBA_REGISTER_KERNELS(m) {
  m.impl("rms_norm_fwd", TORCH_BOX(&rms_norm_fwd));
  m.impl("rms_norm_bwd", TORCH_BOX(&rms_norm_bwd));
  m.impl("rms_norm_bwd_", TORCH_BOX(&rms_norm_bwd_));
}

}  // namespace mamba
