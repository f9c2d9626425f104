// One step of the selective scan. Lanes are channels of one head; a work item is one vector of channels, for all rows of the batch, so that
// A and the parameters are read once. Tiles hold one state a row.
#include "params/selective_state_update.h"

#include "cpu/parallel.h"
#include "cpu/simd_math.h"
#include "cpu/tile.h"

namespace mamba::cpu::MAMBA_CPU_LEVEL {
namespace {

constexpr int64_t serial_states = 32768;  // below this many states one thread is faster than two

// What one work item (a vector of channels of one head) reads that does not depend on the row of the batch.
template <class T>
struct Channels {
  static constexpr int width = Simd<T>::width;
  const SelectiveStateUpdateInputs& p;
  int64_t h, channel, group;
  int lanes, dstate;
  bool tied;  // A does not depend on the state: one exponential serves all
  T* A;       // dstate rows
  Vec<T> D, dt_bias;

  Channels(const SelectiveStateUpdateInputs& params, int64_t item, T* tile) : p(params), A(tile) {
    const int64_t vectors = (p.headdim + width - 1) / width;
    h = item / vectors;
    channel = item % vectors * width;
    group = h / (p.nheads / p.ngroups);
    lanes = static_cast<int>(p.headdim - channel < width ? p.headdim - channel : width);
    dstate = static_cast<int>(p.dstate);
    tied = p.A.stride[2] == 0;
    load_tile(A, address(p.A, h, channel, 0), p.A.dtype, p.A.stride[2], p.A.stride[1], dstate, lanes);
    D = parameter(p.D);
    dt_bias = parameter(p.dt_bias);
  }

  Vec<T> parameter(const View<2>& view) const {
    T row[width] = {};
    if (view) load_tile(row, address(view, h, channel), view.dtype, 0, view.stride[1], 1, lanes);
    return load(row);
  }
  Vec<T> channels(const View<3>& view, int64_t b) const {
    T row[width];
    load_tile(row, address(view, b, h, channel), view.dtype, 0, view.stride[2], 1, lanes);
    return load(row);
  }
  void store_channels(const View<3>& view, int64_t b, Vec<T> value) const {
    T row[width];
    store(row, value);
    store_tile(row, address(view, b, h, channel), view.dtype, 0, view.stride[2], 1, lanes);
  }
  void store_parameter(const View<2>& view, Vec<T> value) const {
    if (!view) return;
    T row[width];
    store(row, value);
    store_tile(row, address(view, h, channel), view.dtype, 0, view.stride[1], 1, lanes);
  }
  void states(T* tile, const View<4>& view, int64_t entry) const {
    load_tile(tile, address(view, entry, h, channel, 0), view.dtype, view.stride[3], view.stride[2], dstate, lanes);
  }
  void store_states(const T* tile, const View<4>& view, int64_t entry) const {
    store_tile(tile, address(view, entry, h, channel, 0), view.dtype, view.stride[3], view.stride[2], dstate, lanes);
  }
  // The group's row of B or C as numbers; `row` is padded to whole vectors.
  void projection(T* row, const View<3>& view, int64_t b) const {
    dispatch_floating(view.dtype, [&](auto tag) {
      using S = typename decltype(tag)::type;
      const S* from = view.at<S>(b, group, 0);
      for (int n = 0; n < dstate; n += width) {
        const int count = dstate - n < width ? dstate - n : width;
        if (view.stride[2] == 1 && count == width)
          store(row + n, load_as<T>(from + n));
        else
          store(row + n, load_partial<T>(from + n * view.stride[2], count, view.stride[2]));
      }
    });
  }
};

template <class T>
int64_t padded(int64_t count) {
  return (count + Simd<T>::width - 1) / Simd<T>::width * Simd<T>::width;
}

template <class T>
int64_t items_of(const SelectiveStateUpdateInputs& p) {
  return p.nheads * (padded<T>(p.headdim) / Simd<T>::width);
}

// a = exp(dt A); s = a state + dt x B; y = sum_n C s + D x; out = y silu(z)
template <class T>
void forward(const SelectiveStateUpdateFwd& p) {
  constexpr int width = Simd<T>::width;
  const auto run = [&](int64_t begin, int64_t end) {
    Scratch<T> buffer(2 * p.dstate * width + 2 * padded<T>(p.dstate));
    T *A = buffer.get(), *state = A + p.dstate * width, *B = state + p.dstate * width, *C = B + padded<T>(p.dstate);
    for (int64_t item = begin; item < end; ++item) {
      const Channels<T> at(p, item, A);
      for (int64_t b = 0; b < p.batch; ++b) {
        const int64_t entry = p.indices ? load_index(p.indices, b) : b;
        if (entry < 0) {
          at.store_channels(p.out, b, zero<T>());
          continue;
        }
        const Vec<T> x = at.channels(p.x, b), e = at.channels(p.dt, b) + at.dt_bias;
        const Vec<T> dt = p.dt_softplus ? softplus(e) : e, dtx = dt * x;
        at.states(state, p.state, entry);
        at.projection(B, p.B, b);
        at.projection(C, p.C, b);
        Vec<T> y = at.D * x, y_odd = zero<T>(), a = at.tied ? exp(dt * load(A)) : zero<T>();
        for (int n = 0; n < at.dstate; ++n) {
          if (!at.tied) a = exp(dt * load(A + n * width));
          const Vec<T> s = a * load(state + n * width) + dtx * broadcast(B[n]);
          store(state + n * width, s);
          if (n & 1)
            y_odd += s * broadcast(C[n]);
          else
            y += s * broadcast(C[n]);
        }
        y += y_odd;
        at.store_states(state, p.new_state, entry);
        at.store_channels(p.out, b, p.z ? y * silu(at.channels(p.z, b)) : y);
      }
    }
  };
  parallel_for(items_of<T>(p), run, serial_states / ((p.batch + 1) * (p.dstate + 1) * width));
}

// Per item and row of the batch: sums over the item's channels, dB then dC, in `partial`.
template <class T>
void backward_item(const SelectiveStateUpdateBwd& p, int64_t item, T* buffer, T* partial) {
  constexpr int width = Simd<T>::width;
  const int64_t pad = padded<T>(p.dstate), tile = p.dstate * width;
  T *A = buffer, *state = A + tile, *lambda = state + tile, *dA = lambda + tile, *dB = dA + tile, *B = dB + tile, *C = B + pad;
  const Channels<T> at(p, item, A);
  Vec<T> dD = zero<T>(), ddt_bias = zero<T>();
  for (int64_t i = 0; i < tile; i += width) store(dA + i, zero<T>());
  for (int64_t b = 0; b < p.batch; ++b, partial += 2 * p.dstate) {
    const Vec<T> x = at.channels(p.x, b), e = at.channels(p.dt, b) + at.dt_bias;
    WithSlope<Vec<T>> step{e, broadcast<T>(1)};
    if (p.dt_softplus) step = softplus_with_slope(e);
    const Vec<T> dt = step.value, dtx = dt * x;
    at.states(state, p.state, b);
    at.projection(B, p.B, b);
    at.projection(C, p.C, b);
    Vec<T> gy = p.dout ? at.channels(p.dout, b) : zero<T>();
    if (p.z) {  // dz = dout y silu'(z); gy = dout silu(z)
      Vec<T> y = at.D * x;
      for (int n = 0; n < at.dstate; ++n)
        y += (exp(dt * load(A + n * width)) * load(state + n * width) + dtx * broadcast(B[n])) * broadcast(C[n]);
      const auto [gate, slope] = silu_with_slope(at.channels(p.z, b));
      at.store_channels(p.dz, b, gy * y * slope);
      gy *= gate;
    }
    if (p.dnew_state)
      at.states(lambda, p.dnew_state, b);
    else
      for (int64_t i = 0; i < tile; i += width) store(lambda + i, zero<T>());
    Vec<T> lambda_B = zero<T>(), lambda_Aw = zero<T>();
    for (int n = 0; n < at.dstate; ++n) {
      T* row = lambda + n * width;
      const Vec<T> A_n = load(A + n * width), a = exp(dt * A_n), w = a * load(state + n * width);
      const Vec<T> l = load(row) + gy * broadcast(C[n]), s = w + dtx * broadcast(B[n]);
      lambda_B += l * broadcast(B[n]);
      lambda_Aw += l * A_n * w;
      store(dA + n * width, load(dA + n * width) + l * dt * w);
      partial[n] = sum(l * dtx);
      partial[p.dstate + n] = sum(gy * s);
      store(row, a * l);  // gradient of the state
    }
    at.store_states(lambda, p.grad_state, b);
    at.store_channels(p.dx, b, dt * lambda_B + at.D * gy);
    const Vec<T> ddt = (x * lambda_B + lambda_Aw) * step.slope;
    at.store_channels(p.ddt, b, ddt);
    ddt_bias += ddt;
    dD += gy * x;
  }
  store_tile(dA, address(p.dA, at.h, at.channel, 0), p.dA.dtype, p.dA.stride[2], p.dA.stride[1], at.dstate, at.lanes);
  at.store_parameter(p.dD, dD);
  at.store_parameter(p.ddt_bias, ddt_bias);
}

template <class T>
void backward(const SelectiveStateUpdateBwd& p) {
  const int64_t items = items_of<T>(p), per_group = p.ngroups ? items / p.ngroups : 0, row = 2 * p.dstate;
  Scratch<T> partial(items * p.batch * row);
  const auto run = [&](int64_t begin, int64_t end) {
    Scratch<T> buffer(5 * p.dstate * Simd<T>::width + 2 * padded<T>(p.dstate));
    for (int64_t item = begin; item < end; ++item) backward_item(p, item, buffer.get(), partial.get() + item * p.batch * row);
  };
  parallel_for(items, run, serial_states / ((p.batch + 1) * (p.dstate + 1) * Simd<T>::width));
  // dB and dC: the sum over the group's items, in order.
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t g = 0; g < p.ngroups; ++g) {
      for (int64_t n = 0; n < row; ++n) {
        T total = 0;
        for (int64_t item = g * per_group; item < (g + 1) * per_group; ++item) total += partial.get()[(item * p.batch + b) * row + n];
        const View<3>& view = n < p.dstate ? p.dB : p.dC;
        dispatch_floating(view.dtype, [&](auto tag) { store_scalar(view.at<typename decltype(tag)::type>(b, g, n % p.dstate), total); });
      }
    }
  }
}

}  // namespace

void selective_state_update_fwd(const SelectiveStateUpdateFwd& params) {
  if (params.x.dtype == DType::f64)
    forward<double>(params);
  else
    forward<float>(params);
}

void selective_state_update_bwd(const SelectiveStateUpdateBwd& params) {
  if (params.x.dtype == DType::f64)
    backward<double>(params);
  else
    backward<float>(params);
}

}  // namespace mamba::cpu::MAMBA_CPU_LEVEL
