// RMS norm, backward, row by row, so that memory is read in order: a first pass reads everything and sums over the row; a second one writes
// the gradients of the row from the first-level cache and adds to those of weight and bias.
#include "cpu/rms_norm.h"

namespace mamba::cpu::MAMBA_CPU_LEVEL {
namespace {

enum class Gate { none, first, last };

constexpr int64_t ahead = 4096;  // bytes; memory is asked for here, because the pass that writes gives the processor no hint

// Two-stage sums over rows: blocks whose size depends on the row count only, then the blocks in order.
int64_t rows_per_block(int64_t rows) {
  const int64_t even = (rows + 255) / 256;
  return even > 32 ? even : 32;
}

template <class S>
struct Backward : Norm<S, RmsNormBwd> {
  using Base = Norm<S, RmsNormBwd>;
  using Base::p, Base::n, Base::pad, Base::groups, Base::width, Base::weight, Base::bias, Base::streaming;
  using typename Base::T, typename Base::V;

  explicit Backward(const RmsNormBwd& params)
      : Base(params), dweight(p.dweight ? blocks * groups * pad : 0), dbias(p.dbias ? blocks * groups * pad : 0) {}

  void run() const {
    const auto body = [&](int64_t begin, int64_t end) {
      with_flags(
          [&](auto residual, auto narrow) {
            using R = std::conditional_t<residual.value && narrow.value && sizeof(S) == 2, S, T>;
            constexpr bool with_residual = decltype(residual)::value;
            if (!p.z) return Sweep<with_residual, R, Gate::none>(*this).blocks(begin, end);
            if (p.norm_before_gate) return Sweep<with_residual, R, Gate::last>(*this).blocks(begin, end);
            return Sweep<with_residual, R, Gate::first>(*this).blocks(begin, end);
          },
          bool{p.residual}, all_narrow<S>(p.residual, p.dresidual_out));
      if (streaming) end_streaming();
    };
    parallel_for(blocks, body, p.dim ? serial_columns / p.dim / per_block : 1);
    finish(p.dweight, dweight.get());
    finish(p.dbias, dbias.get());
  }

 private:
  // One thread's share of the blocks. R: how the residual and the gradient of the sum are read.
  template <bool Residual, class R, Gate gate>
  struct Sweep {
    explicit Sweep(const Backward& norm)
        : norm(norm),
          x(norm.p.rows, norm.p.x, norm.n),
          dout(norm.p.rows, norm.p.dout, norm.n),
          z(norm.p.rows, norm.p.z, norm.n),
          dx(norm.p.rows, norm.p.dx, norm.n),
          dz(norm.p.rows, norm.p.dz, norm.n),
          residual(norm.p.rows, norm.p.residual, norm.n),
          dresidual_out(norm.p.rows, norm.p.dresidual_out, norm.n),
          dresidual(norm.p.rows, norm.p.dresidual, norm.n),
          zeros(norm.pad),
          kept(5 * norm.pad) {
      for (int64_t k = 0; k < norm.pad; ++k) zeros.get()[k] = S{};
    }

    void blocks(int64_t begin, int64_t end) const {
      const auto& p = norm.p;
      const int64_t size = norm.groups * norm.pad;
      for (int64_t block = begin; block < end; ++block) {
        T* dw = norm.dweight.get() ? norm.dweight.get() + block * size : nullptr;
        T* db = norm.dbias.get() ? norm.dbias.get() + block * size : nullptr;
        for (int64_t k = 0; dw && k < size; ++k) dw[k] = 0;
        for (int64_t k = 0; db && k < size; ++k) db[k] = 0;
        const int64_t last = (block + 1) * norm.per_block < p.rows.count ? (block + 1) * norm.per_block : p.rows.count;
        for (int64_t row = block * norm.per_block; row < last; ++row) backward(row, dw, db);
      }
    }

   private:
    // A row at hand. What the second pass needs of the first one's is kept in s, v, grad, factor and slope.
    struct Row {
      const S *x, *dout, *z;
      const R* residual;
      T *s, *v, *grad, *factor, *slope;
      S *dx, *dz;
      const R* more;  // the gradient of the sum, from elsewhere
      T* dresidual;
      bool stream_dx, stream_dz;
      T scale;
    };

    void backward(int64_t index, T* dweight, T* dbias) const {
      const auto& p = norm.p;
      for (int64_t g = 0; g < norm.groups; ++g) {
        const Row row = open(index, g);
        const T mean = dot(row, g) / static_cast<T>(norm.n);
        const int64_t offset = g * norm.pad;
        with_flags(
            [&](auto weighted, auto biased) {
              gradients<weighted.value, biased.value>(row, g, mean, weighted.value ? dweight + offset : nullptr,
                                                      biased.value ? dbias + offset : nullptr);
            },
            dweight != nullptr, dbias != nullptr);
        dx.done(index, g);
        if (p.dz) dz.done(index, g);
        if (p.dresidual) dresidual.done(index, g);
      }
    }

    Row open(int64_t row, int64_t g) const {
      const auto& p = norm.p;
      T* memory = kept.get();
      T rms = 0;
      dispatch_floating(p.rms.dtype, [&](auto tag) {
        const auto* from = static_cast<const typename decltype(tag)::type*>(p.rms.data);
        rms = load_scalar<T>(from + row_offset(p.rows, p.rms, row) + g * p.rms.column);
      });
      S *const dx_row = dx.target(row, g), *const dz_row = dz.target(row, g);
      return {.x = x.read(row, g),
              .dout = dout ? dout.read(row, g) : zeros.get(),
              .z = z.read(row, g),
              .residual = residual.read(row, g),
              .s = memory,
              .v = memory + norm.pad,
              .grad = memory + 2 * norm.pad,
              .factor = memory + 3 * norm.pad,
              .slope = memory + 4 * norm.pad,
              .dx = dx_row,
              .dz = dz_row,
              .more = dresidual_out.read(row, g),
              .dresidual = dresidual ? dresidual.target(row, g) : nullptr,
              .stream_dx = norm.streaming && dx.is_lines(dx_row),
              .stream_dz = norm.streaming && dz.is_lines(dz_row),
              .scale = T(1) / rms};
    }

    // v = s or s silu(z) with s = x + residual; grad = dout or dout silu(z); the sum of grad weight v. (The row by value: no store changes
    // it.)
    T dot(Row row, int64_t g) const {
      const T *weight = norm.weight.group(g), *bias = norm.bias.group(g);
      return sum_lines<T, S>(norm.pad, [&](int64_t first, auto vectors) __attribute__((always_inline)) {
        V dz[vectors.value], sum = zero<T>();
        prefetch<2>(row.x + first, ahead);
        prefetch<2>(row.dout + first, ahead);
        if constexpr (Residual) prefetch<2>(row.residual + first, ahead);
        if constexpr (gate != Gate::none) prefetch<2>(row.z + first, ahead);
        for (int i = 0; i < vectors.value; ++i) {
          const int64_t k = first + i * width;
          const V w = load(weight + k);
          V v = load_as<T>(row.x + k), grad = load_as<T>(row.dout + k);
          if constexpr (Residual) {
            v += load_as<T>(row.residual + k);
            store(row.s + k, v);
          }
          if constexpr (gate != Gate::none) {
            const auto [factor, slope] = silu_with_slope_for<S>(load_as<T>(row.z + k));
            if constexpr (gate == Gate::first) {
              v *= factor;
              store(row.v + k, v);
              store(row.factor + k, factor);
              store(row.slope + k, slope);
            } else {  // dz = dout y silu'(z)
              const V y = v * row.scale * w + load(bias + k);
              dz[i] = grad * y * slope;
              grad *= factor;
              store(row.grad + k, grad);
            }
          }
          sum += grad * v * w;
        }
        if constexpr (gate == Gate::last) store_group(row.dz + first, dz, row.stream_dz);
        return sum;
      });
    }

    // dv = (grad weight - v mean(grad weight v) / rms^2) / rms; dweight += grad v / rms, dbias += grad
    template <bool Weighted, bool Biased>
    void gradients(Row row, int64_t g, T mean, T* dweight, T* dbias) const {
      const T* weight = norm.weight.group(g);
      const V scale = broadcast(row.scale), along = broadcast(mean * row.scale * row.scale * row.scale);
      for_lines<T, S>(norm.pad, [&](int64_t first, auto vectors) __attribute__((always_inline)) {
        V dx[vectors.value], dz[vectors.value];
        for (int i = 0; i < vectors.value; ++i) {
          const int64_t k = first + i * width;
          const V s = Residual ? load(row.s + k) : load_as<T>(row.x + k);
          const V v = gate == Gate::first ? load(row.v + k) : s;
          const V grad = gate == Gate::last ? load(row.grad + k) : load_as<T>(row.dout + k);
          const V scaled = grad * scale;
          if constexpr (Weighted) store(dweight + k, load(dweight + k) + scaled * v);
          if constexpr (Biased) store(dbias + k, load(dbias + k) + grad);
          V ds = scaled * load(weight + k) - v * along;
          if constexpr (gate == Gate::first) {  // dz = dv s silu'(z); ds = dv silu(z)
            dz[i] = ds * s * load(row.slope + k);
            ds *= load(row.factor + k);
          }
          if constexpr (Residual) {
            if (row.more) ds += load_as<T>(row.more + k);
            if (row.dresidual) store(row.dresidual + k, ds);
          }
          dx[i] = ds;
        }
        if constexpr (gate == Gate::first) store_group(row.dz + first, dz, row.stream_dz);
        store_group(row.dx + first, dx, row.stream_dx);
      });
    }

    const Backward& norm;
    const Rows<T, S> x, dout, z, dx, dz;
    const Rows<T, R> residual, dresidual_out;
    const Rows<T, T> dresidual;
    const Scratch<S> zeros;
    const Scratch<T> kept;
  };

  // Adds the blocks' partial sums in order and rounds once.
  void finish(const View<1>& result, const T* partial) const {
    if (!result) return;
    const int64_t size = groups * pad;
    dispatch_floating(result.dtype, [&](auto tag) {
      using R = typename decltype(tag)::type;
      for (int64_t g = 0; g < groups; ++g) {
        for (int64_t k = 0; k < n; k += width) {
          const int lanes = static_cast<int>(n - k < width ? n - k : width);
          V total = zero<T>();
          for (int64_t block = 0; block < blocks; ++block) total += load(partial + block * size + g * pad + k);
          R* to = result.template at<R>(g * n + k);
          if (p.accumulate) total += load_partial<T>(to, lanes, result.stride[0]);
          store_partial(to, total, lanes, result.stride[0]);
        }
      }
    });
  }

  const int64_t per_block = rows_per_block(p.rows.count), blocks = (p.rows.count + per_block - 1) / per_block;
  const Scratch<T> dweight, dbias;
};

}  // namespace

void rms_norm_bwd(const RmsNormBwd& params) {
  dispatch_floating(params.x.dtype, [&](auto tag) { Backward<typename decltype(tag)::type>(params).run(); });
}

}  // namespace mamba::cpu::MAMBA_CPU_LEVEL
