// RMS norm. A work unit is one segment: one group of one row (the whole row without groups). A segment is brought into small padded
// buffers in accumulation type, so that every tensor is read and written once, whatever its dtype and strides; padding is 0.
#include "params/rms_norm.h"

#include "cpu/parallel.h"
#include "cpu/simd_math.h"

namespace mamba::cpu::MAMBA_CPU_LEVEL {
namespace {

constexpr int64_t serial_columns = 16384;  // below this many numbers one thread is faster than two

template <class T>
int64_t padded(int64_t count) {
  return (count + Simd<T>::width - 1) / Simd<T>::width * Simd<T>::width;
}

// Calls f(k, lanes, full) for the vectors of `count` columns.
template <class T, class F>
MAMBA_INLINE void for_vectors(int64_t count, F&& f) {
  constexpr int width = Simd<T>::width;
  int64_t k = 0;
  for (; k + width <= count; k += width) f(k, width, std::true_type{});
  if (k < count) f(k, static_cast<int>(count - k), std::false_type{});
}

enum class Read { assign, add };

template <Read mode, class T, class S>
void read_as(T* to, const S* from, int64_t step, int64_t count) {
  for_vectors<T>(count, [&](int64_t k, int lanes, auto full) {
    Vec<T> value;
    if (full.value && step == 1)
      value = load_as<T>(from + k);
    else
      value = load_partial<T>(from + k * step, lanes, step);
    store(to + k, mode == Read::add ? load(to + k) + value : value);
  });
}

// `count` columns of a row from column `first` on; the rest of the last vector is 0.
template <Read mode = Read::assign, class T>
void read(T* to, const RowView& view, int64_t offset, int64_t first, int64_t count) {
  dispatch_floating(view.dtype, [&](auto tag) {
    using S = typename decltype(tag)::type;
    read_as<mode>(to, static_cast<const S*>(view.data) + offset + first * view.column, view.column, count);
  });
}

template <class T>
void write(const RowView& view, int64_t offset, int64_t first, int64_t count, const T* from) {
  dispatch_floating(view.dtype, [&](auto tag) {
    using S = typename decltype(tag)::type;
    S* to = static_cast<S*>(view.data) + offset + first * view.column;
    for_vectors<T>(count, [&](int64_t k, int lanes, auto full) {
      if (full.value && view.column == 1)
        store_as(to + k, load(from + k));
      else
        store_partial(to + k * view.column, load(from + k), lanes, view.column);
    });
  });
}

template <class T>
T read_one(const RowView& view, int64_t offset) {
  T value = 0;
  dispatch_floating(view.dtype, [&](auto tag) {
    using S = typename decltype(tag)::type;
    value = load_scalar<T>(static_cast<const S*>(view.data) + offset);
  });
  return value;
}

// Weight or bias, group by group in padded rows; `absent` where there is none.
template <class T>
void read_parameter(T* to, const View<1>& view, int64_t groups, int64_t group_size, T absent) {
  const int64_t pad = padded<T>(group_size);
  for (int64_t g = 0; g < groups; ++g) {
    T* row = to + g * pad;
    for (int64_t k = 0; k < pad; ++k) row[k] = view ? 0 : absent;
    if (!view) continue;
    RowView columns;
    columns.data = view.data;
    columns.dtype = view.dtype;
    columns.column = view.stride[0];
    read(row, columns, 0, g * group_size, group_size);
  }
}

// sum_k f(k) over the padded columns, in an order that depends on the count only.
template <class T, class F>
MAMBA_INLINE T sum_vectors(int64_t pad, F&& f) {
  constexpr int width = Simd<T>::width;
  Vec<T> a = zero<T>(), b = a, c = a, d = a;
  int64_t k = 0;
  for (; k + 4 * width <= pad; k += 4 * width) {
    a += f(k);
    b += f(k + width);
    c += f(k + 2 * width);
    d += f(k + 3 * width);
  }
  for (; k < pad; k += width) a += f(k);
  return sum((a + b) + (c + d));
}

template <class T>
void forward(const RmsNormFwd& p) {
  constexpr int width = Simd<T>::width;
  const int64_t n = p.group_size, pad = padded<T>(n), groups = n ? p.dim / n : 0;
  Scratch<T> weight(groups * pad), bias(groups * pad);
  read_parameter<T>(weight.get(), p.weight, groups, n, 1);
  read_parameter<T>(bias.get(), p.bias, groups, n, 0);

  const auto rows = [&](int64_t begin, int64_t end) {
    Scratch<T> buffers(3 * pad);
    T *v = buffers.get(), *gate = v + pad, *out = gate + pad;
    for (int64_t row = begin; row < end; ++row) {
      const auto at = [&](const RowView& view) { return row_offset(p.rows, view, row); };
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t first = g * n;
        const T *w = weight.get() + g * pad, *b = bias.get() + g * pad;
        read(v, p.x, at(p.x), first, n);  // s = x + residual
        if (p.residual) {
          read<Read::add>(v, p.residual, at(p.residual), first, n);
          write(p.residual_out, at(p.residual_out), first, n, v);
        }
        if (p.z) {
          read(gate, p.z, at(p.z), first, n);
          for (int64_t k = 0; k < pad; k += width) {
            const Vec<T> factor = silu(load(gate + k));
            store(gate + k, factor);
            if (!p.norm_before_gate) store(v + k, load(v + k) * factor);  // v = s silu(z)
          }
        }
        // rms = sqrt(mean(v^2) + eps); out = v / rms * weight + bias
        const T squares = sum_vectors<T>(pad, [&](int64_t k) { return load(v + k) * load(v + k); });
        const T rms = sqrt(broadcast(squares / static_cast<T>(n) + static_cast<T>(p.eps)))[0];
        const Vec<T> scale = broadcast(T(1) / rms);
        for (int64_t k = 0; k < pad; k += width) store(out + k, load(v + k) * scale * load(w + k) + load(b + k));
        if (p.z && p.norm_before_gate)
          for (int64_t k = 0; k < pad; k += width) store(out + k, load(out + k) * load(gate + k));
        write(p.out, at(p.out), first, n, out);
        static_cast<T*>(p.rms.data)[at(p.rms) + g * p.rms.column] = rms;
      }
    }
  };
  parallel_for(p.rows.count, rows, p.dim ? serial_columns / p.dim : 1);
}

// Two-stage sums over rows: blocks whose size depends on the row count only, then the blocks in order.
int64_t rows_per_block(int64_t rows) {
  const int64_t even = (rows + 255) / 256;
  return even > 32 ? even : 32;
}

template <class T>
struct Backward {
  static constexpr int width = Simd<T>::width;
  const RmsNormBwd& p;
  const int64_t n = p.group_size, pad = padded<T>(n), groups = n ? p.dim / n : 0;
  const T *weight, *bias;

  // One segment; adds its terms to the block's dweight and dbias. `buffers` holds 6 padded rows.
  void segment(int64_t row, int64_t g, T* buffers, T* dweight, T* dbias) const {
    const auto at = [&](const RowView& view) { return row_offset(p.rows, view, row); };
    const int64_t first = g * n;
    const T *w = weight + g * pad, *b = bias + g * pad;
    T *s = buffers, *grad = s + pad, *gate = grad + pad, *slope = gate + pad, *normed = slope + pad, *dz = normed + pad;

    read(s, p.x, at(p.x), first, n);
    if (p.residual) read<Read::add>(s, p.residual, at(p.residual), first, n);
    if (p.dout) {
      read(grad, p.dout, at(p.dout), first, n);
    } else {
      for (int64_t k = 0; k < pad; ++k) grad[k] = 0;
    }
    const Vec<T> scale = broadcast(T(1) / read_one<T>(p.rms, at(p.rms) + g * p.rms.column));
    if (p.z) read(gate, p.z, at(p.z), first, n);
    for (int64_t k = 0; k < pad; k += width) {
      Vec<T> v = load(s + k);
      if (p.z) {
        const auto [factor, derivative] = silu_with_slope(load(gate + k));
        store(gate + k, factor);
        store(slope + k, derivative);
        if (p.norm_before_gate) {  // dz = dout y silu'(z); grad = dout silu(z)
          const Vec<T> y = v * scale * load(w + k) + load(b + k), dout = load(grad + k);
          store(dz + k, dout * y * derivative);
          store(grad + k, dout * factor);
        } else {
          v *= factor;
        }
      }
      const Vec<T> unit = v * scale, g_k = load(grad + k);
      store(normed + k, unit);
      store(dweight + k, load(dweight + k) + g_k * unit);
      store(dbias + k, load(dbias + k) + g_k);
    }
    // dv = (q - normed mean(q normed)) / rms, q = grad weight
    const T dot = sum_vectors<T>(pad, [&](int64_t k) { return load(grad + k) * load(w + k) * load(normed + k); });
    const Vec<T> mean = broadcast(dot / static_cast<T>(n));
    for (int64_t k = 0; k < pad; k += width) {
      Vec<T> ds = scale * (load(grad + k) * load(w + k) - load(normed + k) * mean);
      if (p.z && !p.norm_before_gate) {  // dz = dv s silu'(z); ds = dv silu(z)
        store(dz + k, ds * load(s + k) * load(slope + k));
        ds *= load(gate + k);
      }
      store(grad + k, ds);
    }
    if (p.dresidual_out) read<Read::add>(grad, p.dresidual_out, at(p.dresidual_out), first, n);
    write(p.dx, at(p.dx), first, n, grad);
    if (p.dz) write(p.dz, at(p.dz), first, n, dz);
    if (p.dresidual) write(p.dresidual, at(p.dresidual), first, n, grad);
  }

  // Adds the blocks' partial sums in order and rounds once.
  void finish(const View<1>& result, const T* partial, int64_t blocks) const {
    if (!result) return;
    const int64_t stride = groups * pad;
    dispatch_floating(result.dtype, [&](auto tag) {
      using S = typename decltype(tag)::type;
      for (int64_t g = 0; g < groups; ++g) {
        for_vectors<T>(n, [&](int64_t k, int lanes, auto) {
          Vec<T> total = zero<T>();
          for (int64_t block = 0; block < blocks; ++block) total += load(partial + block * stride + g * pad + k);
          S* to = static_cast<S*>(result.data) + (g * n + k) * result.stride[0];
          if (p.accumulate) total += load_partial<T>(to, lanes, result.stride[0]);
          store_partial(to, total, lanes, result.stride[0]);
        });
      }
    });
  }
};

template <class T>
void backward(const RmsNormBwd& p) {
  const int64_t n = p.group_size, pad = padded<T>(n), groups = n ? p.dim / n : 0;
  const int64_t per_block = rows_per_block(p.rows.count), blocks = (p.rows.count + per_block - 1) / per_block;
  Scratch<T> weight(groups * pad), bias(groups * pad), dweight(blocks * groups * pad), dbias(blocks * groups * pad);
  read_parameter<T>(weight.get(), p.weight, groups, n, 1);
  read_parameter<T>(bias.get(), p.bias, groups, n, 0);
  const Backward<T> norm{.p = p, .weight = weight.get(), .bias = bias.get()};

  const auto run_blocks = [&](int64_t begin, int64_t end) {
    Scratch<T> buffers(6 * pad);
    for (int64_t block = begin; block < end; ++block) {
      T *dw = dweight.get() + block * groups * pad, *db = dbias.get() + block * groups * pad;
      for (int64_t k = 0; k < groups * pad; ++k) dw[k] = db[k] = 0;
      const int64_t last = (block + 1) * per_block < p.rows.count ? (block + 1) * per_block : p.rows.count;
      for (int64_t row = block * per_block; row < last; ++row)
        for (int64_t g = 0; g < groups; ++g) norm.segment(row, g, buffers.get(), dw + g * pad, db + g * pad);
    }
  };
  parallel_for(blocks, run_blocks, p.dim ? serial_columns / p.dim / per_block : 1);
  norm.finish(p.dweight, dweight.get(), blocks);
  norm.finish(p.dbias, dbias.get(), blocks);
}

}  // namespace

void rms_norm_fwd(const RmsNormFwd& params) {
  if (params.x.dtype == DType::f64)
    forward<double>(params);
  else
    forward<float>(params);
}

void rms_norm_bwd(const RmsNormBwd& params) {
  if (params.x.dtype == DType::f64)
    backward<double>(params);
  else
    backward<float>(params);
}

}  // namespace mamba::cpu::MAMBA_CPU_LEVEL
