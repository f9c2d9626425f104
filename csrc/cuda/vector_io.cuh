// Loads and stores of several neighbouring numbers: 16 bytes at once where the address allows it, converted to the type of arithmetic.
#pragma once
#include "cuda/device.cuh"

namespace mamba::cuda {

template <class S>
struct alignas(16) Pack {
  static constexpr int size = 16 / sizeof(S);
  S item[size];
};

// A tensor may be a slice, so neither its start nor its row length need be a multiple of 16 bytes.
__device__ __forceinline__ bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

template <int N, class S>
constexpr bool is_whole_packs = N % Pack<S>::size == 0;

// out[i] = item i of a row; `row` points at item 0, items outside [low, high) read as 0.
template <int N, class T, class S>
__device__ __forceinline__ void load_items(T (&out)[N], const S* row, int64_t stride, int64_t low, int64_t high) {
  if constexpr (is_whole_packs<N, S>) {
    if (stride == 1 && low <= 0 && high >= N && is_aligned(row)) {
#pragma unroll
      for (int v = 0; v < N / Pack<S>::size; ++v) {
        const Pack<S> pack = reinterpret_cast<const Pack<S>*>(row)[v];
#pragma unroll
        for (int i = 0; i < Pack<S>::size; ++i) out[v * Pack<S>::size + i] = T(to_number(pack.item[i]));
      }
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = i >= low && i < high ? T(to_number(row[i * stride])) : T(0);
}

template <int N, class T, class S>
__device__ __forceinline__ void store_items(S* row, const T (&in)[N], int64_t stride, int64_t low, int64_t high) {
  if constexpr (is_whole_packs<N, S>) {
    if (stride == 1 && low <= 0 && high >= N && is_aligned(row)) {
#pragma unroll
      for (int v = 0; v < N / Pack<S>::size; ++v) {
        Pack<S> pack;
#pragma unroll
        for (int i = 0; i < Pack<S>::size; ++i) round_to(pack.item[i], in[v * Pack<S>::size + i]);
        reinterpret_cast<Pack<S>*>(row)[v] = pack;
      }
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (i >= low && i < high) round_to(row[i * stride], in[i]);
}

// The same for a dtype known at run time: parameters, states and residuals.
template <int N, class T>
__device__ __forceinline__ void load_items(T (&out)[N], const void* data, DType dtype, int64_t offset, int64_t stride, int64_t high) {
  dispatch_floating(dtype, [&](auto tag) {
    using S = typename decltype(tag)::type;
    load_items(out, static_cast<const S*>(data) + offset, stride, 0, high);
  });
}
template <int N, class T>
__device__ __forceinline__ void store_items(void* data, DType dtype, int64_t offset, const T (&in)[N], int64_t stride, int64_t high) {
  dispatch_floating(dtype, [&](auto tag) {
    using S = typename decltype(tag)::type;
    store_items(static_cast<S*>(data) + offset, in, stride, 0, high);
  });
}

template <class T>
__device__ __forceinline__ T load_number(const void* data, DType dtype, int64_t offset) {
  T out[1];
  load_items(out, data, dtype, offset, 1, 1);
  return out[0];
}
template <class T>
__device__ __forceinline__ void store_number(void* data, DType dtype, int64_t offset, T value) {
  const T in[1] = {value};
  store_items(data, dtype, offset, in, 1, 1);
}

template <class T, int N, class... I>
__device__ __forceinline__ T load_at(const View<N>& view, I... index) {
  return load_number<T>(view.data, view.dtype, view.offset(index...));
}
template <class T, int N, class... I>
__device__ __forceinline__ void store_at(const View<N>& view, T value, I... index) {
  store_number(view.data, view.dtype, view.offset(index...), value);
}

// f(Tag<S>{}) on the host, for the kernel of that storage type.
template <class F>
void for_storage_type(DType dtype, F&& f) {
  dispatch_floating(dtype, f);
}

}  // namespace mamba::cuda
