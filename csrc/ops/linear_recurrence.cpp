#include "params/linear_recurrence.h"

#include "ops/check.h"

namespace mamba {
namespace {

using Sizes = std::vector<int64_t>;

// Cuts batch and channels into rows of lanes. The lanes run along the channels that lie one behind the other in x, or else along the last
// axis; neighbouring axes are merged where every operand allows it, which keeps their order.
class RecurrenceOperands {
 public:
  RecurrenceOperands(LinearRecurrenceInputs& p, const Tensor& x, int64_t dim, bool batch_apart)
      : p_(p), dim_(dim), batch_apart_(batch_apart) {
    for (int64_t axis = 0; axis < x.dim(); ++axis)
      if (axis != dim) axes_.push_back({x.size(axis), axis});
    size_t lane = axes_.size() - 1;
    for (size_t i = batch_apart ? 1 : 0; i < axes_.size(); ++i)
      if (axes_[i].size > 1 && x.stride(axes_[i].of) == 1) lane = i;
    if (lane == 0 && batch_apart) {
      axes_.push_back({1, -1});
    } else {
      const Axis last = axes_[lane];
      axes_.erase(axes_.begin() + lane);
      axes_.push_back(last);
    }
  }

  void add_sequence(RecurrenceView& view, const OptionalTensor& tensor) {
    if (!tensor) return;
    const auto strides = tensor->strides();
    add(view, *tensor, [&](int64_t axis) { return strides[axis]; });
    view.time = tensor->stride(dim_);
    if (p_.reverse) flip(view, tensor->size(dim_));
  }

  // `packed`: the first axis is sequences, and the batch has one row.
  void add_state(RecurrenceView& view, const OptionalTensor& tensor, bool packed) {
    if (!tensor) return;
    const auto strides = tensor->strides();
    add(view, *tensor, [&](int64_t axis) { return strides[axis < dim_ ? axis : axis - 1]; });
    if (packed) view.time = tensor->stride(0);
  }

  void add_chunk_states(RecurrenceView& view, const Tensor& tensor, const Sizes& x_sizes) {
    Sizes strides(x_sizes.size());
    int64_t stride = 1;
    for (int64_t axis = static_cast<int64_t>(x_sizes.size()) - 1; axis >= 0; --axis) {
      if (axis == dim_) continue;
      strides[axis] = stride;
      stride *= x_sizes[axis];
    }
    add(view, tensor, [&](int64_t axis) { return strides[axis]; });
    view.time = stride;
  }

  void finish() {
    std::vector<std::vector<Axis>> merged;
    for (const Axis& axis : axes_) {
      if (axis.size == 1 && &axis != &axes_.back()) continue;
      if (!merged.empty() && mergeable(merged.back().back(), axis))
        merged.back().push_back(axis);
      else
        merged.push_back({axis});
    }
    p_.axes = 0;
    p_.rows = 1;
    for (size_t i = 0; i < merged.size(); ++i) {
      int64_t size = 1;
      for (const Axis& axis : merged[i]) size *= axis.size;
      const int64_t of = merged[i].back().of;
      const bool last = i + 1 == merged.size();
      for (const Operand& operand : operands_) (last ? operand.view->lane : operand.view->row[p_.axes]) = operand.stride(of);
      if (last) {
        p_.lanes = size;
      } else {
        p_.size[p_.axes++] = size;
        p_.rows *= size;
      }
    }
  }

 private:
  struct Axis {
    int64_t size, of;  // of x; -1: a lane of its own
  };
  struct Operand {
    RecurrenceView* view;
    Sizes strides;  // by x's axes
    int64_t stride(int64_t axis) const { return axis < 0 ? 0 : strides[axis]; }
  };

  template <class F>
  void add(RecurrenceView& view, const Tensor& tensor, F&& stride) {
    view.data = data_of(tensor);
    view.dtype = dtype_of(tensor);
    Operand operand{&view, Sizes(axes_.size() + 1)};
    for (const Axis& axis : axes_)
      if (axis.of >= 0) operand.strides[axis.of] = stride(axis.of);
    operands_.push_back(operand);
  }

  static void flip(RecurrenceView& view, int64_t seqlen) {
    if (seqlen > 0) view.data = static_cast<char*>(view.data) + (seqlen - 1) * view.time * size_of(view.dtype);
    view.time = -view.time;
  }

  bool mergeable(const Axis& outer, const Axis& inner) const {
    if (inner.of < 0 || (batch_apart_ && outer.of == 0 && inner.of == axes_.back().of)) return false;
    for (const Operand& operand : operands_)
      if (operand.stride(outer.of) != operand.stride(inner.of) * inner.size) return false;
    return true;
  }

  LinearRecurrenceInputs& p_;
  const int64_t dim_;
  const bool batch_apart_;
  std::vector<Axis> axes_;
  std::vector<Operand> operands_;
};

int64_t time_axis(const Checker& check, const Tensor& x, int64_t dim) {
  const int64_t axes = x.dim(), axis = dim < 0 ? dim + axes : dim;
  if (axes < 2) fail(check.op(), ": x must have shape (batch, ...) with at least two axes, got ", shape_text(x));
  if (axes > recurrence_axes + 1) fail(check.op(), ": x must have at most ", recurrence_axes + 1, " axes, got ", shape_text(x));
  if (axis < 1 || axis >= axes) fail(check.op(), ": dim must name an axis of x other than the first, the batch, got ", dim);
  return axis;
}

void like_x(const Checker& check, const char* name, const OptionalTensor& tensor, const Tensor& x) {
  if (tensor && sizes_of(*tensor) != sizes_of(x))
    fail(check.op(), ": ", name, " must have x's shape ", shape_text(x), ", got ", shape_text(*tensor));
  check.same_dtype(name, tensor);
}

Sizes state_sizes(const Tensor& x, int64_t dim, int64_t leading) {
  Sizes sizes = sizes_of(x);
  sizes.erase(sizes.begin() + dim);
  sizes[0] = leading;
  return sizes;
}

std::string sizes_text(const Sizes& sizes) {
  std::ostringstream text;
  text << '(';
  for (size_t i = 0; i < sizes.size(); ++i) text << (i ? ", " : "") << sizes[i];
  text << (sizes.size() == 1 ? ",)" : ")");
  return text.str();
}

void check_state(const Checker& check, const char* name, const OptionalTensor& tensor, const Sizes& sizes, bool packed) {
  if (tensor && sizes_of(*tensor) != sizes)
    fail(check.op(), ": ", name, " must have x's shape without time", packed ? ", num_sequences in place of batch: " : ": ",
         sizes_text(sizes), ", got ", shape_text(*tensor));
  check.floating(name, tensor);
}

int64_t chunk_states_size(const Tensor& x, int64_t dim) {
  const int64_t seqlen = x.size(dim);
  int64_t channels = 1;
  for (int64_t axis = 0; axis < x.dim(); ++axis) channels *= axis == dim ? 1 : x.size(axis);
  return (seqlen + recurrence_chunk - 1) / recurrence_chunk * channels;
}

struct Names {
  const char *op, *backward, *gates;
};
constexpr Names recurrence{"linear_recurrence", "linear_recurrence_bwd", "gates"}, gated{"gated_scan", "gated_scan_bwd", "logits"};

// Checks what forward and backward share; returns the shape of the states.
Sizes check_inputs(const Checker& check, LinearRecurrenceInputs& p, const Names& names, const Tensor& x, const Tensor& gates,
                   const OptionalTensor& initial_state, const OptionalTensor& seq_idx, const OptionalTensor& cu_seqlens, int64_t dim) {
  like_x(check, names.gates, gates, x);
  p.seqlen = x.size(dim);
  p.num_sequences = check_packing(check, seq_idx, cu_seqlens, x.size(0), p.seqlen);
  p.sigmoid = &names == &gated;
  const Sizes sizes = state_sizes(x, dim, p.num_sequences);
  check_state(check, "initial_state", initial_state, sizes, cu_seqlens.has_value());
  return sizes;
}

void fill_inputs(RecurrenceOperands& operands, LinearRecurrenceInputs& p, const Tensor& x, const Tensor& gates,
                 const OptionalTensor& initial_state, const OptionalTensor& seq_idx, const OptionalTensor& cu_seqlens) {
  operands.add_sequence(p.x, x);
  operands.add_sequence(p.gates, gates);
  operands.add_state(p.initial_state, initial_state, cu_seqlens.has_value());
  p.seq_idx = view_of<2>(seq_idx);
  p.cu_seqlens = view_of<1>(cu_seqlens);
  if (seq_idx && p.reverse && p.seqlen > 0) {
    p.seq_idx.data = static_cast<char*>(p.seq_idx.data) + (p.seqlen - 1) * p.seq_idx.stride[1] * size_of(p.seq_idx.dtype);
    p.seq_idx.stride[1] = -p.seq_idx.stride[1];
  }
}

// After finish(): with seq_idx the batch is the slowest of the rows.
void fill_rows(LinearRecurrenceInputs& p, const Tensor& x) {
  if (p.seq_idx && x.size(0) > 0) p.rows_per_batch = p.rows / x.size(0) > 0 ? p.rows / x.size(0) : 1;
}

template <const Names& names>
std::tuple<Tensor, Tensor, Tensor> forward(Tensor x, Tensor gates, OptionalTensor initial_state, OptionalTensor seq_idx,
                                           OptionalTensor cu_seqlens, int64_t dim, bool reverse, bool return_states, bool save_states) {
  const Checker check(names.op, "x", x);
  dim = time_axis(check, x, dim);
  LinearRecurrenceFwd params;
  params.reverse = reverse;
  const Sizes sizes = check_inputs(check, params, names, x, gates, initial_state, seq_idx, cu_seqlens, dim);
  RecurrenceOperands operands(params, x, dim, seq_idx.has_value());
  const ScalarType acc = accumulate_type(x.scalar_type());
  Tensor states = empty(x, return_states ? sizes_of(x) : Sizes{0}, x.scalar_type());
  Tensor last_state = empty(x, sizes, acc);
  Tensor chunk_states = empty(x, {save_states ? chunk_states_size(x, dim) : 0}, acc);
  fill_inputs(operands, params, x, gates, initial_state, seq_idx, cu_seqlens);
  if (return_states) operands.add_sequence(params.states, states);
  operands.add_state(params.last_state, last_state, cu_seqlens.has_value());
  if (save_states) operands.add_chunk_states(params.chunk_states, chunk_states, sizes_of(x));
  operands.finish();
  fill_rows(params, x);
  MAMBA_RUN(linear_recurrence_fwd, params, x);
  return {states, last_state, chunk_states};
}

template <const Names& names>
std::tuple<Tensor, Tensor, Tensor> backward(OptionalTensor dstates, OptionalTensor dlast_state, Tensor x, Tensor gates,
                                            OptionalTensor initial_state, OptionalTensor seq_idx, OptionalTensor cu_seqlens, int64_t dim,
                                            bool reverse, Tensor chunk_states) {
  const Checker check(names.backward, "x", x);
  dim = time_axis(check, x, dim);
  LinearRecurrenceBwd params;
  params.reverse = reverse;
  const Sizes sizes = check_inputs(check, params, names, x, gates, initial_state, seq_idx, cu_seqlens, dim);
  RecurrenceOperands operands(params, x, dim, seq_idx.has_value());
  like_x(check, "dstates", dstates, x);
  check_state(check, "dlast_state", dlast_state, sizes, cu_seqlens.has_value());
  const ScalarType acc = accumulate_type(x.scalar_type());
  if (chunk_states.scalar_type() != acc || chunk_states.numel() != chunk_states_size(x, dim) || !chunk_states.is_contiguous())
    fail(check.op(), ": chunk_states must be the contiguous ", dtype_name(acc), " tensor of ", chunk_states_size(x, dim),
         " numbers that the forward returned, got ", dtype_name(chunk_states.scalar_type()), " of shape ", shape_text(chunk_states));
  check.device("chunk_states", chunk_states);
  Tensor dx = empty_gradient(x, x), dgates = empty_gradient(x, gates), dinitial_state = empty_gradient(x, initial_state);
  fill_inputs(operands, params, x, gates, initial_state, seq_idx, cu_seqlens);
  operands.add_sequence(params.dstates, dstates);
  operands.add_state(params.dlast_state, dlast_state, cu_seqlens.has_value());
  operands.add_chunk_states(params.chunk_states, chunk_states, sizes_of(x));
  operands.add_sequence(params.dx, dx);
  operands.add_sequence(params.dgates, dgates);
  if (initial_state) operands.add_state(params.dinitial_state, dinitial_state, cu_seqlens.has_value());
  operands.finish();
  fill_rows(params, x);
  MAMBA_RUN(linear_recurrence_bwd, params, x);
  return {dx, dgates, dinitial_state};
}

}  // namespace

MAMBA_REGISTER_KERNELS(m) {
  m.impl("linear_recurrence_fwd", TORCH_BOX(&forward<recurrence>));
  m.impl("linear_recurrence_bwd", TORCH_BOX(&backward<recurrence>));
  m.impl("gated_scan_fwd", TORCH_BOX(&forward<gated>));
  m.impl("gated_scan_bwd", TORCH_BOX(&backward<gated>));
}

}  // namespace mamba
