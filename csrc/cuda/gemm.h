// Matrix products for the fused operators, by cuBLAS.
#pragma once

#include "common/view.h"
#include "params/kernel.h"

namespace mamba::cuda {

// c = a b, or c += a b, for every index of the first axis. Any strides; those of a and b may be 0.
struct Product {
  int64_t batch, rows, inner, columns;
  View<3> a;  // (batch, rows, inner)
  View<3> b;  // (batch, inner, columns), a's dtype
  View<3> c;  // (batch, rows, columns), a's dtype, or f32 with bf16 and f16; accumulated in f32 (f64 in f64)
  bool add;
};

void multiply(const Product& product, const Context& context);

}  // namespace mamba::cuda
