// Argument checks of the host layer. Every check stands once, before anything is allocated or computed, and says the op, the argument, what
// was required and what came: "selective_scan: delta must have shape (batch, dim, seqlen) = (2, 8, 64), got (2, 8, 63)".
// mamba_ops/_check.py says the same sentences for fake tensors.
#pragma once

#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include "ops/api.h"

namespace mamba {

template <class... Parts>
[[noreturn]] inline void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

struct Size {
  const char* name;
  int64_t value;
};

class Checker {
 public:
  // `main` is the tensor whose dtype and device the others are compared with; `main_name` is what the op calls it.
  Checker(const char* op, const char* main_name, const Tensor& main)
      : op_(op), main_name_(main_name), main_(main), dtype_(main.scalar_type()), device_(main.device()) {
    if (!is_floating(dtype_)) fail(op, ": ", main_name, " must be float64, float32, bfloat16 or float16, got ", dtype_name(dtype_));
  }

  void dims(const char* name, const Tensor& tensor, int64_t required, const char* meaning) const {
    if (tensor.dim() != required) fail(op_, ": ", name, " must have shape ", meaning, ", got ", shape_text(tensor));
  }

  void shape(const char* name, const Tensor& tensor, std::initializer_list<Size> sizes) const {
    const auto found = tensor.sizes();
    bool same = found.size() == sizes.size();
    size_t axis = 0;
    for (const Size& size : sizes) same = same && found[axis++] == size.value;
    if (same) return;
    std::ostringstream names, values;
    const char* comma = "";
    for (const Size& size : sizes) {
      names << comma << size.name;
      values << comma << size.value;
      comma = ", ";
    }
    const char* end = sizes.size() == 1 ? ",)" : ")";
    fail(op_, ": ", name, " must have shape (", names.str(), end, " = (", values.str(), end, ", got ", shape_text(tensor));
  }
  void shape(const char* name, const std::optional<Tensor>& tensor, std::initializer_list<Size> sizes) const {
    if (tensor) shape(name, *tensor, sizes);
  }

  // The argument is a sequence input: it must have the main input's dtype.
  void same_dtype(const char* name, const Tensor& tensor) const {
    if (tensor.scalar_type() != dtype_)
      fail(op_, ": ", name, " must have ", main_name_, "'s dtype ", dtype_name(dtype_), ", got ", dtype_name(tensor.scalar_type()));
    device(name, tensor);
  }
  void same_dtype(const char* name, const std::optional<Tensor>& tensor) const {
    if (tensor) same_dtype(name, *tensor);
  }

  // The argument is a parameter or a state: any floating dtype.
  void floating(const char* name, const Tensor& tensor) const {
    if (!is_floating(tensor.scalar_type()))
      fail(op_, ": ", name, " must be float64, float32, bfloat16 or float16, got ", dtype_name(tensor.scalar_type()));
    device(name, tensor);
  }
  void floating(const char* name, const std::optional<Tensor>& tensor) const {
    if (tensor) floating(name, *tensor);
  }

  void index(const char* name, const std::optional<Tensor>& tensor) const {
    if (!tensor) return;
    if (tensor->scalar_type() != ScalarType::Int && tensor->scalar_type() != ScalarType::Long)
      fail(op_, ": ", name, " must be int32 or int64, got ", dtype_name(tensor->scalar_type()));
    device(name, *tensor);
  }

  void device(const char* name, const Tensor& tensor) const {
    if (tensor.device() != device_)
      fail(op_, ": ", name, " must be on ", main_name_, "'s device ", device_text(main_), ", got ", device_text(tensor));
  }

  const char* op() const { return op_; }

 private:
  const char* op_;
  const char* main_name_;
  const Tensor& main_;
  const ScalarType dtype_;
  const torch::stable::Device device_;
};

// Packed sequences: at most one of seq_idx (batch, seqlen) and cu_seqlens (num_sequences + 1,). Returns the leading size of the states.
// On CPU the contents of cu_seqlens are checked too.
int64_t check_packing(const Checker& check, const std::optional<Tensor>& seq_idx, const std::optional<Tensor>& cu_seqlens, int64_t batch,
                      int64_t seqlen);

// Indices of cache entries, one a row: int32 or int64, below the number of entries (on CPU the contents are checked); negative is padding.
void check_entries(const Checker& check, const char* name, const OptionalTensor& indices, int64_t batch, const char* cache_name,
                   const Tensor& cache);

}  // namespace mamba
