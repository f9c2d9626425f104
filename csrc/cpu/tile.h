// Tiles: a small block of a (channel, time) matrix in the arithmetic type T, time by time: row i holds `width` channels at tile + i *
// pitch. Loading and storing convert from and to any floating dtype and any strides, fast when channels or times are contiguous in memory;
// kernels then work on tiles alone and are compiled for float and double only.
#pragma once

#include "common/view.h"
#include "cpu/stream.h"

namespace mamba::cpu::MAMBA_CPU_LEVEL {

// The unsigned or floating lane that carries S in a vector.
template <class S>
struct StorageLane {
  using type = S;
};
template <>
struct StorageLane<bf16> {
  using type = uint16_t;
};
template <>
struct StorageLane<f16> {
  using type = uint16_t;
};

template <class V, class Half, std::size_t... I>
MAMBA_INLINE V join(Half low, Half high, std::index_sequence<I...>) {
#if __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(low, high, static_cast<int>(I)...);
#else  // GCC 11
  V whole;
  __builtin_memcpy(&whole, &low, sizeof low);
  __builtin_memcpy(reinterpret_cast<char*>(&whole) + sizeof low, &high, sizeof high);
  return whole;
#endif
}

// `Rows` times of each of `lanes` channels, contiguous in time: vectors along time, transposed in registers. Rows is width or width / 2;
// with half-width rows, vector j carries channel j in its lower half and channel j + width / 2 in its upper half.
template <int Rows, class T, class S>
MAMBA_INLINE void load_times(T* tile, int64_t pitch, const S* from, int64_t lane_stride, int lanes) {
  constexpr int width = Simd<T>::width;
  Vec<T> rows[Rows];
  for (int j = 0; j < Rows; ++j) {
    if constexpr (Rows == width) {
      rows[j] = j < lanes ? load_as<T>(from + j * lane_stride) : zero<T>();
    } else {
      using U = typename StorageLane<S>::type;
      using Half = typename VectorOf<U, Rows>::type;
      using Whole = typename VectorOf<U, width>::type;
      Half low{}, high{};
      if (j < lanes) __builtin_memcpy(&low, from + j * lane_stride, sizeof low);
      if (j + Rows < lanes) __builtin_memcpy(&high, from + (j + Rows) * lane_stride, sizeof high);
      const Whole whole = join<Whole>(low, high, std::make_index_sequence<width>{});
      S storage[width];
      __builtin_memcpy(storage, &whole, sizeof whole);
      rows[j] = load_as<T>(storage);
    }
  }
  transpose_blocks<Rows>(rows);
  for (int i = 0; i < Rows; ++i) store(tile + i * pitch, rows[i]);
}

// Whether a vector of T is a whole cache line of S: what may be stored past the caches.
template <class T, class S>
constexpr bool is_whole_line = Simd<T>::width * sizeof(S) == 64;

template <int Rows, class T, class S>
MAMBA_INLINE void store_times(const T* tile, int64_t pitch, S* to, int64_t lane_stride, int lanes, bool stream) {
  constexpr int width = Simd<T>::width;
  Vec<T> rows[Rows];
  for (int i = 0; i < Rows; ++i) rows[i] = load(tile + i * pitch);
  transpose_blocks<Rows>(rows);
  for (int j = 0; j < Rows; ++j) {
    if constexpr (Rows == width) {
      if (j < lanes) {
        if (is_whole_line<T, S> && stream)
          stream_as(to + j * lane_stride, rows[j]);
        else
          store_as(to + j * lane_stride, rows[j]);
      }
    } else {
      S storage[width];
      store_as(storage, rows[j]);
      if (j < lanes) __builtin_memcpy(to + j * lane_stride, storage, sizeof(S) * Rows);
      if (j + Rows < lanes) __builtin_memcpy(to + (j + Rows) * lane_stride, storage + Rows, sizeof(S) * Rows);
    }
  }
}

template <class T, class S>
__attribute__((noinline)) void load_tile_from(T* tile, int64_t pitch, const S* from, int64_t row_stride, int64_t lane_stride, int rows,
                                              int lanes) {
  constexpr int width = Simd<T>::width;
  int i = 0;
  if (lane_stride == 1 && lanes == width) {
    for (; i < rows; ++i) store(tile + i * pitch, load_as<T>(from + i * row_stride));
  } else if (row_stride == 1) {
    for (; i + width <= rows; i += width) load_times<width>(tile + i * pitch, pitch, from + i, lane_stride, lanes);
    if constexpr (width >= 4) {
      if (i + width / 2 <= rows) {
        load_times<width / 2>(tile + i * pitch, pitch, from + i, lane_stride, lanes);
        i += width / 2;
      }
    }
  }
  for (; i < rows; ++i) store(tile + i * pitch, load_partial<T>(from + i * row_stride, lanes, lane_stride));
}

template <class T, class S>
__attribute__((noinline)) void store_tile_to(const T* tile, int64_t pitch, S* to, int64_t row_stride, int64_t lane_stride, int rows,
                                             int lanes, bool stream = false) {
  constexpr int width = Simd<T>::width;
  int i = 0;
  if (lane_stride == 1 && lanes == width) {
    for (; i < rows; ++i) store_as(to + i * row_stride, load(tile + i * pitch));
  } else if (row_stride == 1) {
    for (; i + width <= rows; i += width) store_times<width>(tile + i * pitch, pitch, to + i, lane_stride, lanes, stream);
    if constexpr (width >= 4) {
      if (i + width / 2 <= rows) {
        store_times<width / 2>(tile + i * pitch, pitch, to + i, lane_stride, lanes, false);
        i += width / 2;
      }
    }
  }
  for (; i < rows; ++i) store_partial(to + i * row_stride, load(tile + i * pitch), lanes, lane_stride);
}

// tile[i * pitch + j] = from[i * row_stride + j * lane_stride] for i < rows, j < lanes; lanes from `lanes` to the width become 0. Every row
// is written as a full vector, in order of i. `from` points at the element (0, 0) of the dtype that the tag names.
template <class T>
inline void load_tile(T* tile, const void* from, DType dtype, int64_t row_stride, int64_t lane_stride, int rows, int lanes,
                      int64_t pitch = Simd<T>::width) {
  dispatch_floating(dtype, [&](auto tag) __attribute__((always_inline)) {
    using S = typename decltype(tag)::type;
    load_tile_from(tile, pitch, static_cast<const S*>(from), row_stride, lane_stride, rows, lanes);
  });
}

// The inverse; touches rows x lanes elements only (and reads whole vectors of the tile). `stream`: times that are contiguous may be stored
// past the caches, `to` and lane_stride are whole cache lines.
template <class T>
inline void store_tile(const T* tile, void* to, DType dtype, int64_t row_stride, int64_t lane_stride, int rows, int lanes,
                       int64_t pitch = Simd<T>::width, bool stream = false) {
  dispatch_floating(dtype, [&](auto tag) __attribute__((always_inline)) {
    using S = typename decltype(tag)::type;
    store_tile_to(tile, pitch, static_cast<S*>(to), row_stride, lane_stride, rows, lanes, stream);
  });
}

// The address of an element of a view whose dtype is known at run time only.
template <int N, class... I>
MAMBA_INLINE void* address(const View<N>& view, I... index) {
  return static_cast<char*>(view.data) + view.offset(index...) * size_of(view.dtype);
}

template <class T>
MAMBA_INLINE bool holds_rows(DType dtype, int64_t lane_stride, int lanes) {
  return dtype == (std::is_same_v<T, double> ? DType::f64 : DType::f32) && lane_stride == 1 && lanes == Simd<T>::width;
}

// Rows of lanes, `pitch` apart: a tile, or memory that needs no conversion.
template <class T>
struct TileRows {
  const T* data;
  int64_t pitch;

  MAMBA_INLINE Vec<T> operator[](int row) const { return load(data + row * pitch); }
};

// Like load_tile, but hands out the memory itself where it already holds rows of T.
template <class T>
inline TileRows<T> tile_rows(T* tile, const void* from, DType dtype, int64_t row_stride, int64_t lane_stride, int rows, int lanes) {
  if (holds_rows<T>(dtype, lane_stride, lanes)) return {static_cast<const T*>(from), row_stride};
  load_tile(tile, from, dtype, row_stride, lane_stride, rows, lanes);
  return {tile, Simd<T>::width};
}

// Whether stores of whole tiles of a (batch, dim, seqlen) output pass by the caches: it is large, and a vector of the axis that is
// contiguous is an aligned cache line.
template <class T>
inline bool streams_tiles(const View<3>& view, int64_t batch, int64_t dim, int64_t seqlen) {
  const int64_t size = size_of(view.dtype);
  if (!view || Simd<T>::width * size != 64 || batch * dim * seqlen * size < streamed_bytes || !is_line(view.data)) return false;
  const int contiguous = view.stride[1] == 1 ? 1 : 2;
  if (view.stride[contiguous] != 1) return false;
  return (batch == 1 || view.stride[0] * size % 64 == 0) && view.stride[3 - contiguous] * size % 64 == 0;
}

// Rows of lanes to write, `pitch` apart; `stream`: past the caches.
template <class T>
struct TargetRows {
  T* data;
  int64_t pitch;
  bool stream;

  MAMBA_INLINE T* operator[](int row) const { return data + row * pitch; }
  MAMBA_INLINE TargetRows from(int row) const { return {data + row * pitch, pitch, stream}; }

  // A row that is not read again.
  MAMBA_INLINE void put(int row, Vec<T> value) const {
    if (is_whole_line<T, T> && stream)
      stream_as(data + row * pitch, value);
    else
      store(data + row * pitch, value);
  }
};

// Where the rows of a tile of a (batch, dim, seqlen) output are written: the output itself where it holds rows of T, else `tile`, which
// finish() then converts. Nothing for an absent output. `stream`: see streams_tiles; the tile must then start on a whole cache line.
template <class T>
class TileTarget {
 public:
  TileTarget(T* tile, const View<3>& view, int64_t batch, int64_t channel, int64_t time, int lanes, bool stream)
      : view_(view), out_(view ? address(view, batch, channel, time) : nullptr), lanes_(lanes), stream_(stream && is_line(out_)) {
    direct_ = view && holds_rows<T>(view.dtype, view.stride[1], lanes);
    rows = {direct_ ? static_cast<T*>(out_) : tile, direct_ ? view.stride[2] : Simd<T>::width, direct_ && stream_};
  }

  TargetRows<T> rows;

  void finish(int count) const {
    if (out_ && !direct_)
      store_tile(rows.data, out_, view_.dtype, view_.stride[2], view_.stride[1], count, lanes_, Simd<T>::width, stream_);
  }

 private:
  const View<3>& view_;
  void* out_;
  int lanes_;
  bool direct_, stream_;
};

}  // namespace mamba::cpu::MAMBA_CPU_LEVEL
