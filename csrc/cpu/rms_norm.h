// rms_norm: how rows are reached, what forward and backward share. A work unit is one segment: one group of one row (the whole row without
// groups), seen as whole vectors. Segments that lie so in memory are used in place; others pass through padded buffers, padding 0.
#pragma once

#include <type_traits>

#include "cpu/parallel.h"
#include "cpu/simd_math.h"
#include "cpu/stream.h"
#include "params/rms_norm.h"

namespace mamba::cpu::MAMBA_CPU_LEVEL {
namespace {

constexpr int64_t serial_columns = 16384;  // below this many numbers one thread is faster than two

template <class T>
int64_t padded(int64_t count) {
  return (count + Simd<T>::width - 1) / Simd<T>::width * Simd<T>::width;
}

template <class E>
constexpr DType dtype_of() {
  if constexpr (std::is_same_v<E, double>) return DType::f64;
  if constexpr (std::is_same_v<E, float>) return DType::f32;
  return std::is_same_v<E, bf16> ? DType::bf16 : DType::f16;
}

// `count` elements `step` apart -> padded contiguous ones of type E, which is the elements' own type or the arithmetic type T.
template <class T, class E, class S>
void gather(E* to, const S* from, int64_t step, int64_t count) {
  constexpr int width = Simd<T>::width;
  for (int64_t k = 0; k < count; k += width) {
    const int lanes = static_cast<int>(count - k < width ? count - k : width);
    if constexpr (std::is_same_v<E, S> && !std::is_same_v<E, T>) {
      for (int i = 0; i < width; ++i) to[k + i] = i < lanes ? from[(k + i) * step] : S{};
    } else {
      store_as(to + k, step == 1 && lanes == width ? load_as<T>(from + k) : load_partial<T>(from + k * step, lanes, step));
    }
  }
}

template <class T, class E, class S>
void scatter(S* to, const E* from, int64_t step, int64_t count) {
  constexpr int width = Simd<T>::width, lines = line_vectors<T, S>;
  int64_t k = 0;
  if constexpr (std::is_same_v<E, T>) {
    for (; step == 1 && k + lines * width <= count; k += lines * width) {
      Vec<T> values[lines];
      for (int i = 0; i < lines; ++i) values[i] = load(from + k + i * width);
      store_group(to + k, values, false);
    }
  }
  for (; k < count; k += width) {
    const int lanes = static_cast<int>(count - k < width ? count - k : width);
    if constexpr (std::is_same_v<E, S> && !std::is_same_v<E, T>) {
      for (int i = 0; i < lanes; ++i) to[(k + i) * step] = from[k + i];
    } else {
      store_partial(to + k * step, load_as<T>(from + k), lanes, step);
    }
  }
}

// One operand's segments as padded rows of E (the operand's own type, or the arithmetic type T): in place where memory holds them so.
template <class T, class E>
class Rows {
 public:
  Rows(const RowLayout& layout, const RowView& view, int64_t count)
      : layout_(layout),
        view_(view),
        count_(count),
        pad_(padded<T>(count)),
        direct_(!view || (view.dtype == dtype_of<E>() && view.column == 1 && count == pad_)),
        buffer_(direct_ ? 0 : pad_) {}

  explicit operator bool() const { return static_cast<bool>(view_); }
  // Whether rows are written to memory at once, whole cache lines from `to` on.
  bool is_lines(const E* to) const { return direct_ && is_line(to); }

  // Null for an absent operand.
  const E* read(int64_t row, int64_t group) const {
    if (direct_) return place(row, group);
    dispatch([&](auto tag) {
      using S = typename decltype(tag)::type;
      gather<T>(buffer_.get(), static_cast<const S*>(view_.data) + offset(row, group), view_.column, count_);
    });
    return buffer_.get();
  }

  // Where to write a row, which done() brings home.
  E* target(int64_t row, int64_t group) const { return direct_ ? place(row, group) : buffer_.get(); }

  void done(int64_t row, int64_t group) const {
    if (direct_) return;
    dispatch([&](auto tag) {
      using S = typename decltype(tag)::type;
      scatter<T>(static_cast<S*>(view_.data) + offset(row, group), buffer_.get(), view_.column, count_);
    });
  }

 private:
  int64_t offset(int64_t row, int64_t group) const { return row_offset(layout_, view_, row) + group * count_ * view_.column; }
  E* place(int64_t row, int64_t group) const { return view_ ? static_cast<E*>(view_.data) + offset(row, group) : nullptr; }

  template <class F>
  void dispatch(F&& f) const {
    if constexpr (std::is_same_v<E, T>)
      dispatch_floating(view_.dtype, f);
    else
      f(Tag<E>{});
  }

  const RowLayout& layout_;
  const RowView& view_;
  int64_t count_, pad_;
  bool direct_;
  Scratch<E> buffer_;
};

// Weight or bias, group by group in padded rows; `absent` where there is none.
template <class T>
class Parameter {
 public:
  Parameter(const View<1>& view, int64_t groups, int64_t group_size, T absent)
      : pad_(padded<T>(group_size)), values_(groups * padded<T>(group_size)) {
    for (int64_t g = 0; g < groups; ++g) {
      T* to = values_.get() + g * pad_;
      for (int64_t k = 0; k < pad_; ++k) to[k] = absent;
      if (!view) continue;
      dispatch_floating(
          view.dtype, [&](auto tag) { gather<T>(to, view.at<typename decltype(tag)::type>(g * group_size), view.stride[0], group_size); });
    }
  }
  const T* group(int64_t g) const { return values_.get() + g * pad_; }

 private:
  int64_t pad_;
  Scratch<T> values_;
};

// sum_k f(k, N) over the padded columns, N vectors in a call (those of a cache line of S, at the end 1), in an order that depends on the
// count only.
template <class T, class S, class F>
MAMBA_INLINE T sum_lines(int64_t pad, F&& f) {
  using Line = std::integral_constant<int, line_vectors<T, S>>;
  constexpr int64_t width = Simd<T>::width, line = Line::value * width;
  Vec<T> a = zero<T>(), b = a, c = a, d = a;
  int64_t k = 0;
  for (; k + 4 * line <= pad; k += 4 * line) {
    a += f(k, Line{});
    b += f(k + line, Line{});
    c += f(k + 2 * line, Line{});
    d += f(k + 3 * line, Line{});
  }
  for (; k + line <= pad; k += line) a += f(k, Line{});
  for (; k < pad; k += width) a += f(k, std::integral_constant<int, 1>{});
  return sum((a + b) + (c + d));
}

// Whether all of the operands that are there have x's own 16-bit type, so that they need no buffer in the arithmetic type.
template <class S, class... Views>
bool all_narrow(const Views&... views) {
  return sizeof(S) == 2 && ((!views || views.dtype == dtype_of<S>()) && ...);
}

// What forward and backward know of a norm.
template <class S, class Params>
struct Norm {
  using T = Accumulate<S>;
  using V = Vec<T>;
  static constexpr int width = Simd<T>::width;

  explicit Norm(const Params& params)
      : p(params),
        weight(p.weight, groups, n, 1),
        bias(p.bias, groups, n, 0),
        streaming(p.rows.count * p.dim * static_cast<int64_t>(sizeof(S)) >= streamed_bytes) {}

  const Params& p;
  const int64_t n = p.group_size, pad = padded<T>(n), groups = n ? p.dim / n : 0;
  const Parameter<T> weight, bias;
  const bool streaming;
};

}  // namespace
}  // namespace mamba::cpu::MAMBA_CPU_LEVEL
