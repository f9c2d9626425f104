#include "ops/api.h"

#include <array>
#include <sstream>

#include "ops/check.h"

namespace mamba {

bool is_floating(ScalarType dtype) {
  return dtype == ScalarType::Double || dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half;
}

const char* dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double: return "float64";
    case ScalarType::Float: return "float32";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Half: return "float16";
    case ScalarType::Long: return "int64";
    case ScalarType::Int: return "int32";
    case ScalarType::Short: return "int16";
    case ScalarType::Char: return "int8";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Bool: return "bool";
    case ScalarType::ComplexFloat: return "complex64";
    case ScalarType::ComplexDouble: return "complex128";
    default: return torch::headeronly::toString(dtype);
  }
}

std::vector<int64_t> sizes_of(const Tensor& tensor) {
  std::vector<int64_t> sizes(tensor.dim());
  for (size_t axis = 0; axis < sizes.size(); ++axis) sizes[axis] = tensor.size(axis);
  return sizes;
}

std::string shape_text(const Tensor& tensor) {
  std::ostringstream text;
  text << '(';
  for (int64_t axis = 0; axis < tensor.dim(); ++axis) text << (axis ? ", " : "") << tensor.size(axis);
  text << (tensor.dim() == 1 ? ",)" : ")");
  return text.str();
}

std::string device_text(const Tensor& tensor) {
  const auto device = tensor.device();
  std::string text = device.type() == torch::headeronly::DeviceType::CPU    ? "cpu"
                     : device.type() == torch::headeronly::DeviceType::CUDA ? "cuda"
                     : device.type() == torch::headeronly::DeviceType::Meta ? "meta"
                                                                            : "of another type";
  if (device.has_index() && !device.is_cpu()) text += ":" + std::to_string(device.index());
  return text;
}

DType dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Double: return DType::f64;
    case ScalarType::BFloat16: return DType::bf16;
    case ScalarType::Half: return DType::f16;
    case ScalarType::Int: return DType::i32;
    case ScalarType::Long: return DType::i64;
    default: return DType::f32;
  }
}

ScalarType accumulate_type(ScalarType dtype) { return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float; }

Tensor empty(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType dtype) {
  Tensor tensor = torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(sizes.data(), sizes.size()), dtype);
#if MAMBA_EMULATED
  emulator::note_tensor(tensor, true);
#endif
  return tensor;
}

Tensor empty_gradient(const Tensor& like, const OptionalTensor& argument) {
  if (!argument) return empty(like, {0}, like.scalar_type());
  return empty(like, sizes_of(*argument), argument->scalar_type());
}

Tensor empty_sequence(const Tensor& like) {
  const int64_t batch = like.size(0), dim = like.size(1), seqlen = like.size(2);
  if (like.stride(1) != 1) return empty(like, {batch, dim, seqlen}, like.scalar_type());
  return torch::stable::transpose(empty(like, {batch, seqlen, dim}, like.scalar_type()), 1, 2);
}

void mark_mutated(const char* op, const char* name, const Tensor& tensor) {
  // An in-place view op that changes nothing: autograd checks the tensor and raises its version counter.
  if (tensor.dim() == 0) return;
  std::array<StableIValue, 3> stack = {torch::stable::detail::from(tensor), torch::stable::detail::from(int64_t{0}),
                                       torch::stable::detail::from(int64_t{0})};
  if (torch_call_dispatcher("aten::transpose_", "", stack.data(), TORCH_ABI_VERSION))
    fail(op, ": ", name, " is written in place, so it must not be a leaf that requires grad while grad mode is on; detach it or use ",
         "torch.no_grad()");
  torch::stable::detail::to<Tensor>(stack[0]);  // takes over the returned reference
#if MAMBA_EMULATED
  emulator::note_mutated(tensor);
#endif
}

int64_t check_packing(const Checker& check, const OptionalTensor& seq_idx, const OptionalTensor& cu_seqlens, int64_t batch,
                      int64_t seqlen) {
  check.index("seq_idx", seq_idx);
  check.index("cu_seqlens", cu_seqlens);
  if (seq_idx && cu_seqlens) fail(check.op(), ": seq_idx and cu_seqlens must not be given together");
  check.shape("seq_idx", seq_idx, {{"batch", batch}, {"seqlen", seqlen}});
  if (!cu_seqlens) return batch;
  if (cu_seqlens->dim() != 1 || cu_seqlens->size(0) < 1)
    fail(check.op(), ": cu_seqlens must have shape (num_sequences + 1,), got ", shape_text(*cu_seqlens));
  if (batch != 1) fail(check.op(), ": with cu_seqlens batch must be 1, got ", batch);
  const int64_t count = cu_seqlens->size(0) - 1;
  if (!cu_seqlens->is_cpu()) return count;
  const View<1> bounds = view_of<1>(*cu_seqlens);
  if (load_index(bounds, 0) != 0) fail(check.op(), ": cu_seqlens must start with 0, got ", load_index(bounds, 0));
  for (int64_t i = 0; i < count; ++i)
    if (load_index(bounds, i + 1) < load_index(bounds, i))
      fail(check.op(), ": cu_seqlens must not decrease, got ", load_index(bounds, i), " followed by ", load_index(bounds, i + 1),
           " at position ", i + 1);
  if (load_index(bounds, count) > seqlen)
    fail(check.op(), ": cu_seqlens must end at most at seqlen = ", seqlen, ", got ", load_index(bounds, count));
  return count;
}

void check_entries(const Checker& check, const char* name, const OptionalTensor& indices, int64_t batch, const char* cache_name,
                   const Tensor& cache) {
  check.shape(name, indices, {{"batch", batch}});
  check.index(name, indices);
  if (!indices || !indices->is_cpu()) return;
  const View<1> view = view_of<1>(*indices);
  for (int64_t b = 0; b < batch; ++b)
    if (load_index(view, b) >= cache.size(0))
      fail(check.op(), ": ", name, " must be below ", cache_name, "'s number of entries ", cache.size(0), ", got ", load_index(view, b),
           " at position ", b);
}

}  // namespace mamba
