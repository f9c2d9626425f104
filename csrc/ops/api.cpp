#include "ops/api.h"

#include <sstream>

#include "ops/check.h"

#if defined(__linux__) && !MAMBA_CUDA
#include <sys/mman.h>
#endif

namespace mamba {
namespace {

// Large outputs in pages of 2 MiB where Linux has some: filling memory for the first time costs a fault for each page, and with pages of
// 4 KiB that takes longer than most kernels. A hint, so nothing depends on whether it is heard.
void prefer_huge_pages(const Tensor& tensor, uintptr_t bytes) {
#if defined(__linux__) && !MAMBA_CUDA
  constexpr uintptr_t page = uintptr_t{2} << 20;
  if (bytes < page || !tensor.is_cpu()) return;
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  const uintptr_t first = (begin + page - 1) / page * page, last = (begin + bytes) / page * page;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)tensor, (void)bytes;
#endif
}

}  // namespace

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
  const auto sizes = tensor.sizes();
  return {sizes.begin(), sizes.end()};
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

// The shim allocates without a dispatcher look-up by name, which costs a small op more than its kernel.
Tensor empty_strided(const Tensor& like, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, ScalarType dtype) {
  int32_t device_type = 0, device_index = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  AtenTensorHandle handle = nullptr;
  const auto dtype_code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype_code, device_type,
                                                  device_index, &handle));
  Tensor tensor(handle);
  uintptr_t bytes = dtype == ScalarType::Double ? 8 : dtype == ScalarType::Float ? 4 : 2;  // at least, for a dense tensor
  for (const int64_t size : sizes) bytes *= static_cast<uintptr_t>(size);
  prefer_huge_pages(tensor, bytes);
#if MAMBA_EMULATED
  emulator::note_tensor(tensor, true);
#endif
  return tensor;
}

Tensor empty(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType dtype) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t axis = sizes.size(); axis-- > 0; stride *= sizes[axis] > 1 ? sizes[axis] : 1) strides[axis] = stride;
  return empty_strided(like, sizes, strides, dtype);
}

Tensor empty_gradient(const Tensor& like, const OptionalTensor& argument) {
  if (!argument) return empty(like, {0}, like.scalar_type());
  return empty(like, sizes_of(*argument), argument->scalar_type());
}

Tensor empty_sequence(const Tensor& like) {
  const int64_t batch = like.size(0), dim = like.size(1), seqlen = like.size(2);
  if (like.stride(1) != 1) return empty(like, {batch, dim, seqlen}, like.scalar_type());
  const int64_t row = dim > 1 ? dim : 1, sequence = row * (seqlen > 1 ? seqlen : 1);
  return empty_strided(like, {batch, dim, seqlen}, {sequence, 1, row}, like.scalar_type());
}

void mark_mutated(const char* op, const char* name, const Tensor& tensor) {
  // A copy of the tensor onto itself moves nothing; on the way autograd checks the tensor and raises its version counter.
  if (aoti_torch_copy_(tensor.get(), tensor.get(), 0))
    fail(op, ": ", name, " is written in place, so it must not be a leaf that requires grad while grad mode is on (detach it or use ",
         "torch.no_grad()), nor an inference tensor outside inference mode");
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
