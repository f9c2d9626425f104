// RMS norm, forward. Rows go through in small blocks: first the sums of squares, in the pass that adds the residual and applies a gate that
// comes first, then the outputs, from the first-level cache.
#include "cpu/rms_norm.h"

namespace mamba::cpu::MAMBA_CPU_LEVEL {
namespace {

template <class S>
struct Forward {
  using T = Accumulate<S>;
  using V = Vec<T>;
  static constexpr int width = Simd<T>::width;

  explicit Forward(const RmsNormFwd& params)
      : p(params),
        weight(p.weight, groups, n, 1),
        bias(p.bias, groups, n, 0),
        streaming(p.rows.count * p.dim * sizeof(S) >= streamed_bytes) {}

  void run() const {
    const auto rows = [&](int64_t begin, int64_t end) {
      with_flags([&](auto residual, auto gate_first) { sweep<residual.value, gate_first.value>(begin, end); }, bool{p.residual},
                 p.z && !p.norm_before_gate);
      if (streaming) end_streaming();
    };
    parallel_for(p.rows.count, rows, p.dim ? serial_columns / p.dim : 1);
  }

 private:
  template <bool Residual, bool GateFirst>
  void sweep(int64_t begin, int64_t end) const {
    // Normed from where they stand, unless they are changed or need a conversion first.
    constexpr bool in_place = !GateFirst && (Residual || std::is_same_v<S, T>);
    const Rows<T, S> x(p.rows, p.x, n), z(p.rows, p.z, n), out(p.rows, p.out, n);
    const Rows<T, T> residual(p.rows, p.residual, n), residual_out(p.rows, p.residual_out, n);
    const Scratch<T> normed(in_place ? 0 : rows_at_once * pad);
    for (int64_t first = begin; first < end; first += rows_at_once) {
      const int count = static_cast<int>(end - first < rows_at_once ? end - first : rows_at_once);
      for (int64_t g = 0; g < groups; ++g) {
        const T* from[rows_at_once];
        const S *given[rows_at_once], *gates[rows_at_once];
        T scales[rows_at_once];
        for (int i = 0; i < count; ++i) {
          const int64_t row = first + i;
          given[i] = x.read(row, g, i);
          gates[i] = z.read(row, g, i);
          T* sums = residual_out.target(row, g, i);
          T* to = normed.get() + i * pad;
          const T squares = this->squares<Residual, GateFirst>(given[i], residual.read(row, g, i), gates[i], sums, to);
          if constexpr (Residual) residual_out.done(row, g, i);
          if constexpr (in_place && Residual)
            from[i] = sums;
          else if constexpr (in_place)
            from[i] = given[i];
          else
            from[i] = to;
          // rms = sqrt(mean(v^2) + eps)
          const T rms = sqrt(broadcast(squares / static_cast<T>(n) + static_cast<T>(p.eps)))[0];
          static_cast<T*>(p.rms.data)[row_offset(p.rows, p.rms, row) + g * p.rms.column] = rms;
          scales[i] = T(1) / rms;
        }
        for (int i = 0; i < count; ++i) {
          S* to = out.target(first + i, g, i);
          const bool stream = streaming && out.direct() && reinterpret_cast<uintptr_t>(to) % 64 == 0;
          with_flags(
              [&](auto biased, auto gated, auto stream) {
                write<biased.value, gated.value, stream.value>(from[i], broadcast(scales[i]), weight.group(g), bias.group(g), gates[i], to,
                                                               given[i]);
              },
              bool{p.bias}, p.z && p.norm_before_gate, stream);
          out.done(first + i, g, i);
        }
      }
    }
  }

  // v = s or s silu(z) with s = x + residual; the sum of v^2
  template <bool Residual, bool GateFirst>
  T squares(const S* x, const T* residual, const S* z, T* sums, T* normed) const {
    return sum_vectors<T>(pad, [&](int64_t k) __attribute__((always_inline)) {
      V v = load_as<T>(x + k);
      if constexpr (Residual) {
        v += load(residual + k);
        store(sums + k, v);
      }
      if constexpr (GateFirst) v *= silu(load_as<T>(z + k));
      if constexpr (GateFirst || (!Residual && !std::is_same_v<S, T>)) store(normed + k, v);
      return v * v;
    });
  }

  // out = v / rms * weight + bias, times silu(z) where the gate comes last
  template <bool Biased, bool Gated, bool Stream>
  void write(const T* v, V scale, const T* w, const T* b, const S* z, S* out, const S* x) const {
    for (int64_t k = 0; k < pad; k += width) {
      V value = load(v + k) * scale * load(w + k);
      prefetch(x + k, block_bytes);
      if constexpr (Biased) value += load(b + k);
      if constexpr (Gated) value *= silu(load_as<T>(z + k));
      if constexpr (Stream)
        stream_as(out + k, value);
      else
        store_as(out + k, value);
    }
  }

  const RmsNormFwd& p;
  const int64_t n = p.group_size, pad = padded<T>(n), groups = n ? p.dim / n : 0;
  const Parameter<T> weight, bias;
  const bool streaming;
  // From a row of x to the one that comes next to the same place: memory is read while outputs are computed.
  const int64_t block_bytes = p.rows.axes ? rows_at_once * p.x.stride[p.rows.axes - 1] * static_cast<int64_t>(sizeof(S)) : 0;
};

}  // namespace

void rms_norm_fwd(const RmsNormFwd& params) {
  dispatch_floating(params.x.dtype, [&](auto tag) { Forward<typename decltype(tag)::type>(params).run(); });
}

}  // namespace mamba::cpu::MAMBA_CPU_LEVEL
