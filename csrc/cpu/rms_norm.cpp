// RMS norm, forward, row by row: first the sum of squares, in the pass that adds the residual and applies a gate that comes first, then the
// outputs, from the first-level cache.
#include "cpu/rms_norm.h"

namespace mamba::cpu::MAMBA_CPU_LEVEL {
namespace {

template <class S>
struct Forward : Norm<S, RmsNormFwd> {
  using Base = Norm<S, RmsNormFwd>;
  using Base::Base, Base::p, Base::n, Base::pad, Base::groups, Base::width, Base::weight, Base::bias, Base::streaming;
  using typename Base::T, typename Base::V;

  void run() const {
    const auto rows = [&](int64_t begin, int64_t end) {
      with_flags(
          [&](auto residual, auto narrow, auto gate_first) {
            sweep<residual.value, std::conditional_t<residual.value && narrow.value && sizeof(S) == 2, S, T>, gate_first.value>(begin, end);
          },
          bool{p.residual}, all_narrow<S>(p.residual, p.residual_out), p.z && !p.norm_before_gate);
      if (streaming) end_streaming();
    };
    parallel_for(p.rows.count, rows, p.dim ? serial_columns / p.dim : 1);
  }

 private:
  // R: how the residual is read and the sum written.
  template <bool Residual, class R, bool GateFirst>
  void sweep(int64_t begin, int64_t end) const {
    constexpr bool in_place = !Residual && !GateFirst;  // normed from where they stand, else from a buffer
    using From = std::conditional_t<in_place, S, T>;
    const Rows<T, S> x(p.rows, p.x, n), z(p.rows, p.z, n), out(p.rows, p.out, n);
    const Rows<T, R> residual(p.rows, p.residual, n), residual_out(p.rows, p.residual_out, n);
    const Scratch<T> normed(in_place ? 0 : pad);
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t g = 0; g < groups; ++g) {
        const S *const given = x.read(row, g), *const gates = z.read(row, g);
        R* const sums = residual_out.target(row, g);
        const T total = squares<Residual, R, GateFirst>(given, residual.read(row, g), gates, sums, normed.get(),
                                                        streaming && residual_out.is_lines(sums));
        if constexpr (Residual) residual_out.done(row, g);
        const From* from;
        if constexpr (in_place)
          from = given;
        else
          from = normed.get();
        // rms = sqrt(mean(v^2) + eps)
        const T rms = sqrt(broadcast(total / static_cast<T>(n) + static_cast<T>(p.eps)))[0];
        static_cast<T*>(p.rms.data)[row_offset(p.rows, p.rms, row) + g * p.rms.column] = rms;
        S* const to = out.target(row, g);
        with_flags(
            [&](auto biased, auto gated) {
              write<biased.value, gated.value>(from, broadcast(T(1) / rms), weight.group(g), bias.group(g), gates, to,
                                               streaming && out.is_lines(to));
            },
            bool{p.bias}, p.z && p.norm_before_gate);
        out.done(row, g);
      }
    }
  }

  // v = s or s silu(z) with s = x + residual; the sum of v^2
  template <bool Residual, class R, bool GateFirst>
  T squares(const S* x, const R* residual, const S* z, R* sums, T* changed, bool stream) const {
    return sum_lines<T, S>(pad, [&](int64_t k, auto vectors) __attribute__((always_inline)) {
      V values[vectors.value], squares = zero<T>();
      for (int i = 0; i < vectors.value; ++i) {
        values[i] = load_as<T>(x + k + i * width);
        if constexpr (Residual) values[i] += load_as<T>(residual + k + i * width);
      }
      if constexpr (Residual) store_group(sums + k, values, stream);
      for (int i = 0; i < vectors.value; ++i) {
        if constexpr (GateFirst) values[i] *= silu_for<S>(load_as<T>(z + k + i * width));
        if constexpr (Residual || GateFirst) store(changed + k + i * width, values[i]);
        squares += values[i] * values[i];
      }
      return squares;
    });
  }

  // out = v / rms * weight + bias, times silu(z) where the gate comes last
  template <bool Biased, bool Gated, class From>
  void write(const From* v, V scale, const T* w, const T* b, const S* z, S* out, bool stream) const {
    for_lines<T, S>(pad, [&](int64_t k, auto vectors) __attribute__((always_inline)) {
      V values[vectors.value];
      for (int i = 0; i < vectors.value; ++i) {
        const int64_t at = k + i * width;
        V value = load_as<T>(v + at) * scale * load(w + at);
        if constexpr (Biased) value += load(b + at);
        if constexpr (Gated) value *= silu_for<S>(load_as<T>(z + at));
        values[i] = value;
      }
      store_group(out + k, values, stream);
    });
  }
};

}  // namespace

void rms_norm_fwd(const RmsNormFwd& params) {
  dispatch_floating(params.x.dtype, [&](auto tag) { Forward<typename decltype(tag)::type>(params).run(); });
}

}  // namespace mamba::cpu::MAMBA_CPU_LEVEL
