// The controls as a Python module, and the host layer's notes of tensors to the memory checker.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <memory>

#include "controls.h"
#include "cuda/gemm.h"
#include "ops/api.h"

namespace mamba::emulator {

void note_tensor(const Tensor& tensor, bool is_output) {
  if (!emu::is_checked() || tensor.numel() == 0) return;
  const auto element = static_cast<size_t>(is_floating(tensor.scalar_type()) || tensor.scalar_type() == ScalarType::Int ||
                                                   tensor.scalar_type() == ScalarType::Long
                                               ? size_of(dtype_of(tensor))
                                               : 1);
  int64_t low = 0, high = 0;
  for (int64_t axis = 0; axis < tensor.dim(); ++axis) {
    const int64_t reach = (tensor.size(axis) - 1) * tensor.stride(axis);
    (reach < 0 ? low : high) += reach;
  }
  const auto* first = static_cast<const char*>(tensor.const_data_ptr()) + low * static_cast<int64_t>(element);
  const std::string name =
      std::string(is_output ? "new " : "") + dtype_name(tensor.scalar_type()) + " tensor of shape " + shape_text(tensor);
  emu::add_tensor(first, static_cast<size_t>(high - low + 1) * element, element, !is_output, is_output, name);
}
void note_mutated(const Tensor& tensor) {
  note_tensor(tensor, false);
  if (emu::is_checked() && tensor.numel()) emu::allow_writes(tensor.const_data_ptr());
}
void forget_tensors() { emu::forget_tensors(); }

}  // namespace mamba::emulator

void run_seeded_bug(int which, const float* in, float* out, int n);  // bugs.cu

namespace {

using Strides = std::array<int64_t, 3>;

mamba::View<3> view(uintptr_t address, mamba::DType dtype, const Strides& strides) {
  return {reinterpret_cast<void*>(address), dtype, {strides[0], strides[1], strides[2]}};
}

struct Scratch {
  std::vector<std::unique_ptr<std::byte[]>> pieces;

  static void* allocate(void* self, int64_t bytes) {
    auto& pieces = static_cast<Scratch*>(self)->pieces;
    pieces.emplace_back(new std::byte[static_cast<size_t>(bytes) + 1]);
    emu::add_tensor(pieces.back().get(), static_cast<size_t>(bytes), 1, false, true, "scratch");
    return pieces.back().get();
  }
};

// csrc/cuda/gemm.h; dtypes by their number in common/dtype.h. Sizes: batch, rows, inner, columns.
void multiply(const std::array<int64_t, 4>& sizes, uintptr_t a, const Strides& a_strides, uintptr_t b, const Strides& b_strides, int dtype,
              uintptr_t c, const Strides& c_strides, int c_dtype, bool add) {
  const auto operands = static_cast<mamba::DType>(dtype), result = static_cast<mamba::DType>(c_dtype);
  Scratch scratch;
  const mamba::cuda::Context context{nullptr, &scratch, &Scratch::allocate, [](void*) -> void* { return nullptr; }};
  mamba::cuda::multiply({sizes[0], sizes[1], sizes[2], sizes[3], view(a, operands, a_strides), view(b, operands, b_strides),
                         view(c, result, c_strides), add},
                        context);
}

}  // namespace

PYBIND11_MODULE(MAMBA_EMULATOR_MODULE, m) {
  m.def("set_seed", &emu::set_seed);
  m.def("is_checked", &emu::is_checked);
  m.def("add_tensor", [](uintptr_t address, size_t bytes, size_t element, bool initialised, bool writable, const std::string& name) {
    emu::add_tensor(reinterpret_cast<const void*>(address), bytes, element, initialised, writable, name);
  });
  m.def("multiply", &multiply);
  m.def("forget_tensors", &emu::forget_tensors);
  m.def("take_statistics", [] {
    pybind11::dict result;
    for (const auto& [name, count] : emu::take_statistics()) result[name.c_str()] = count;
    return result;
  });
  m.def("run_seeded_bug", [](int which, uintptr_t in, uintptr_t out, int n) {
    run_seeded_bug(which, reinterpret_cast<const float*>(in), reinterpret_cast<float*>(out), n);
  });
}
