// A tensor as kernels see it: pointer, dtype tag, N strides in elements. Sizes belong to the params struct. Host and device.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace mamba {

template <int N>
struct View {
  void* data = nullptr;  // null: the optional tensor is absent
  DType dtype = DType::f32;
  int64_t stride[N] = {};

  MAMBA_INLINE explicit operator bool() const { return data != nullptr; }

  template <class... I>
  MAMBA_INLINE int64_t offset(I... index) const {
    static_assert(sizeof...(I) == N);
    const int64_t at[] = {static_cast<int64_t>(index)...};
    int64_t sum = 0;
    for (int i = 0; i < N; ++i) sum += at[i] * stride[i];
    return sum;
  }

  // T must be the type that dtype names.
  template <class T, class... I>
  MAMBA_INLINE T* at(I... index) const {
    return static_cast<T*>(data) + offset(index...);
  }
};

// Index tensors (seq_idx, cu_seqlens, cache indices) are int32 or int64.
template <int N, class... I>
MAMBA_INLINE int64_t load_index(const View<N>& view, I... index) {
  return view.dtype == DType::i64 ? *view.template at<int64_t>(index...) : *view.template at<int32_t>(index...);
}

// The first of `count` packed sequences that ends behind time t, or `count`.
MAMBA_INLINE int64_t sequence_of(const View<1>& cu_seqlens, int64_t count, int64_t t) {
  int64_t low = 0, high = count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (load_index(cu_seqlens, middle + 1) > t)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

}  // namespace mamba
