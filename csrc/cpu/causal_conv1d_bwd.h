// causal_conv1d, backward, of strands that lie in memory in the order in which they are computed: nothing passes through buffers.
#pragma once

#include "cpu/causal_conv1d.h"

namespace mamba::cpu::MAMBA_CPU_LEVEL {
namespace {

template <int W, class S>
class Gradients : protected Convolution<W, S, CausalConv1dBwd> {
 protected:
  using Base = Convolution<W, S, CausalConv1dBwd>;
  using Base::Base;
  using Base::vl, Base::group, Base::past, Base::p, Base::filters, Base::streaming;
  using typename Base::T, typename Base::V;

  // A piece of a strand: x and the gradients of p in buffers.
  struct Strand {
    int64_t d;  // first channel
    int lanes;  // channels; 1 where lanes are time steps
    T *x, *gradient;
    T* sums;  // of dweight and dbias, `pitch` apart
    int64_t pitch;
  };

  // The step of a piece from which on samples are part of last_state (it may precede the piece).
  int64_t final_from(const Tile& piece) const {
    return piece.final >= 0 && p.dlast_state ? piece.last - past - piece.begin : piece.end - piece.begin;
  }

  // What last_state's gradient adds to the samples of step i, or of `lanes` steps from i on.
  template <int Step>
  V with_final(const Tile& piece, const Strand& s, int64_t i, int lanes, V value) const {
    const int64_t final = final_from(piece);
    if (piece.final < 0 || !p.dlast_state || i + (Step > 1 ? 1 : lanes) <= final) return value;
    if constexpr (Step > 1) {
      return value + load_partial<T>(p.dlast_state.template at<S>(piece.final, s.d, i - final), lanes, p.dlast_state.stride[1]);
    } else {
      for (int lane = i < final ? static_cast<int>(final - i) : 0; lane < lanes; ++lane)
        value[lane] += load_scalar<T>(p.dlast_state.template at<S>(piece.final, s.d, i + lane - final));
      return value;
    }
  }

  // dx_i = sum_j weight[past - j] gp_{i + j}
  static MAMBA_INLINE V correlate(const V* gradient, const V* weight) {
    V sum = weight[W - 1] * gradient[0];
    unroll<W - 1>([&](auto j) __attribute__((always_inline)) { sum = sum + weight[W - 2 - j] * gradient[j + 1]; });
    return sum;
  }

  template <bool Active>
  static MAMBA_INLINE V gradient_of(V sum, V dout) {
    if constexpr (Active)
      return dout * silu_with_slope_for<S>(sum).slope;
    else
      return dout;
  }

  // One channel whose time steps are neighbours in memory, in one sweep: dx is a vector behind the gradient of p.
  template <bool Active>
  __attribute__((noinline)) void row(const Tile& tile, const Strand& s) const {
    const S* const from = p.x.template at<S>(tile.row, s.d, tile.begin);
    const S* const dout = p.dout.template at<S>(tile.row, s.d, tile.begin);
    S* const to = p.dx.template at<S>(tile.row, s.d, tile.begin);
    const int64_t steps = tile.end - tile.begin, reach = tile.last - tile.begin, final = final_from(tile);
    const bool stream = streaming && is_line(to);
    V weight[W], dweight[W], before = Base::before(tile, s.d), gradient = zero<T>();
    Base::template filter_of<1>(s.d, weight);
    unroll<W>([&](auto k) __attribute__((always_inline)) { dweight[k] = load(s.sums + k * vl); });
    V dbias = load(s.sums + W * vl);
    const V bias = broadcast(*filters.tap(W, s.d));
    const auto sum_at = [&](V now) __attribute__((always_inline)) {
      V x[W];
      windows<vl - W + 1, W>(before, now, x);
      before = now;
      return Base::convolve(x, weight, bias);
    };
    const auto gradient_at = [&](int64_t i) __attribute__((always_inline)) {
      const int lanes = static_cast<int>(reach - i < vl ? reach - i : vl);
      return first_lanes(gradient_of<Active>(sum_at(read<T>(from + i, lanes, 1)), read<T>(dout + i, lanes, 1)), lanes);
    };
    // dx of the vector `x`, before the one whose gradients are `next`
    const auto spread = [&](V x, V next) __attribute__((always_inline)) {
      V after[W];
      windows<0, W>(gradient, next, after);
      gradient = next;
      dbias = dbias + after[0];
      unroll<W>([&](auto j) __attribute__((always_inline)) { dweight[W - 1 - j] = dweight[W - 1 - j] + x * after[j]; });
      return correlate(after, weight);
    };
    prefetch(from + Base::distance, 0);
    prefetch(dout + Base::distance, 0);
    const V samples = before, initial = spread(samples, gradient_at(0));
    if (p.dinitial_state && tile.begin == tile.first && tile.initial >= 0) {
      const V value = with_final<1>(tile, s, -vl, vl, initial);
      for (int64_t j = 0; j < past; ++j) write_one(p.dinitial_state, static_cast<T>(value[vl - past + j]), tile.initial, s.d, j);
    }
    int64_t i = 0;
    for (; i + together * vl <= final; i += together * vl) {
      const bool ends = i + together * vl == reach;  // no gradients follow
      if (!ends && i + (together + 1) * vl > steps) break;
      V next[together];
#pragma GCC unroll 8
      for (int n = 0; n < together; ++n) {
        const int64_t at = i + (n + 1) * vl;
        prefetch(from + at + Base::distance, 0);
        next[n] = n == together - 1 && ends ? zero<T>() : sum_at(load_as<T>(from + at));
      }
#pragma GCC unroll 8
      for (int n = 0; n < together; ++n) {
        const int64_t at = i + (n + 1) * vl;
        prefetch(dout + at + Base::distance, 0);
        if (n < together - 1 || !ends) next[n] = gradient_of<Active>(next[n], load_as<T>(dout + at));
      }
#pragma GCC unroll 8
      for (int n = 0; n < together; n += group) {
        V values[group];
        for (int m = 0; m < group; ++m) values[m] = spread(load_as<T>(from + i + (n + m) * vl), next[n + m]);
        store_group(to + i + n * vl, values, stream);
      }
    }
    for (; i < steps; i += vl) {
      const int lanes = static_cast<int>(steps - i < vl ? steps - i : vl);
      const V x = read<T>(from + i, lanes, 1), own = gradient, next = i + vl < reach ? gradient_at(i + vl) : zero<T>();
      V value = spread(x, i + vl < steps ? next : zero<T>());  // the gradients behind the tile count for other sums
      if (i + vl >= steps) {
        V after[W];
        windows<0, W>(own, next, after);
        value = correlate(after, weight);
      }
      if (lanes == vl && i + vl <= final) {
        if (stream && group == 1)
          stream_as(to + i, value);
        else
          store_as(to + i, value);
      } else {
        write(to + i, with_final<1>(tile, s, i, lanes, value), lanes, 1);
      }
    }
    unroll<W>([&](auto k) __attribute__((always_inline)) { store(s.sums + k * vl, dweight[k]); });
    store(s.sums + W * vl, dbias);
  }

  // `N` joined rows, from their ends on; `sums`: of dweight and dbias, lane by lane.
  template <bool Active, int N>
  __attribute__((noinline)) void joined(const JoinedItem& item, int64_t row, const T* filter, T* sums) const {
    const S* const from = p.x.template at<S>(row, item.d, 0);
    const S* const dout = p.dout.template at<S>(row, item.d, 0);
    S* const to = p.dx.template at<S>(row, item.d, 0);
    const int64_t step = p.x.stride[0], dout_step = p.dout.stride[0], to_step = p.dx.stride[0], count = item.count;
    const IntVec<T> length = broadcast_int<T>(p.seqlen), turn = broadcast_int<T>(vl % p.seqlen);
    const bool stream = group * vl * sizeof(S) == 64 && Base::streams_from(to, to_step);
    IntVec<T> times = Base::joined_times(count - vl);
    V behind[N];
    for (int n = 0; n < N; ++n) behind[n] = zero<T>();
    for (int64_t line = count - group * vl; line >= 0; line -= group * vl) {
      V values[N][group];
#pragma GCC unroll 2
      for (int m = group - 1; m >= 0; --m) {
        const int64_t i = line + m * vl, earlier = i > 0 ? i - vl : 0;
        V weight[W], gradient[N], dweight[W];
        unroll<W>([&](auto k) __attribute__((always_inline)) { weight[k] = load(filter + k * count + i); });
        const V bias = load(filter + W * count + i);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
          V x[W];
          Base::joined_samples(load_as<T>(from + n * step + earlier), load_as<T>(from + n * step + i), times, x);
          gradient[n] = Base::convolve(x, weight, bias);
        }
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) gradient[n] = gradient_of<Active>(gradient[n], load_as<T>(dout + n * dout_step + i));
        unroll<W>([&](auto k) __attribute__((always_inline)) { dweight[k] = load(sums + k * count + i); });
        V dbias = load(sums + W * count + i);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
          V after[W];
          after[0] = gradient[n];
          unroll<W - 1>([&](auto j) __attribute__((always_inline)) {
            after[j + 1] = lanes_from<j.value + 1>(gradient[n], behind[n], -times, j.value + 2 - p.seqlen);
          });
          behind[n] = gradient[n];
          const V x = load_as<T>(from + n * step + i);
          dbias = dbias + gradient[n];
          unroll<W>([&](auto j) __attribute__((always_inline)) { dweight[W - 1 - j] = dweight[W - 1 - j] + x * after[j]; });
          values[n][m] = correlate(after, weight);
        }
        unroll<W>([&](auto k) __attribute__((always_inline)) { store(sums + k * count + i, dweight[k]); });
        store(sums + W * count + i, dbias);
        times = times - turn;
        times = select(times < 0, times + length, times);
      }
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        prefetch(from + (n + N) * step + line, 0);
        prefetch(dout + (n + N) * dout_step + line, 0);
        store_group(to + n * to_step + line, values[n], stream);
      }
    }
  }

  // The sums over the lanes of each channel of an item.
  void add_lanes(const JoinedItem& item, const T* lane_sums, T* sums) const {
    const Scratch<T> tile(joined_steps * vl);
    const int64_t channels = item.count / p.seqlen;
    for (int64_t c = 0; c < channels; c += vl)
      for (int64_t k = 0; k <= W; ++k) {
        const int lanes = static_cast<int>(least(channels - c, vl));
        load_tile_from(tile.get(), vl, lane_sums + k * item.count + c * p.seqlen, 1, p.seqlen, static_cast<int>(p.seqlen), lanes);
        V total = zero<T>();
        for (int64_t t = 0; t < p.seqlen; ++t) total = total + load(tile.get() + t * vl);
        store(sums + k * filters.stride + item.d + c, total);
      }
  }

  // Channels that are neighbours in memory: `block` time steps of all of them, then the next ones; dx is `past` steps behind, and `carry`
  // holds the gradients of p in between. Returns the first channel left over.
  template <bool Active>
  __attribute__((noinline)) int64_t rows(const Tile& tile, int64_t first, int64_t last, T* sums, T* carry) const {
    const int64_t end = first + (last - first) / (group * vl) * (group * vl), count = tile.end - tile.begin, stride = filters.stride;
    const int64_t x_step = p.x.stride[2], dout_step = p.dout.stride[2], to_step = p.dx.stride[2];
    if (!p.dout || tile.padding || p.x.stride[1] != 1 || p.dout.stride[1] != 1 || p.dx.stride[1] != 1 || count % block != 0 ||
        count < past || (tile.begin == tile.first && p.dinitial_state) || (tile.end < tile.last && tile.end + past > tile.last) ||
        final_from(tile) < count)
      return first;
    const auto sum_at = [&](const S* from, const V* weight, V bias) __attribute__((always_inline)) {
      V x[W];
      unroll<W>([&](auto k) __attribute__((always_inline)) { x[k] = load_as<T>(from + (k - W + 1) * x_step); });
      return Base::convolve(x, weight, bias);
    };
    for (int64_t t = tile.begin; t < tile.end; t += block) {
      const S* const from = p.x.template at<S>(tile.row, 0, t);
      const S* const dout = p.dout.template at<S>(tile.row, 0, t);
      S* const to = p.dx.template at<S>(tile.row, 0, t - past);
      const bool begins = t == tile.begin;
      const bool stream = group * vl * sizeof(S) == 64 && Base::streams_from(to + first, to_step);
      for (int64_t d = first; d < end; d += group * vl) {
        V values[block][group];
#pragma GCC unroll 1
        for (int n = 0; n < group; ++n) {
          const int64_t channel = d + n * vl;
          V weight[W], before[W], sum[block], gradient[block + W - 1], dweight[W];
          Base::edge(tile, t, channel, before);
          const auto sample = [&](auto k) __attribute__((always_inline)) {  // of step t - past + k
            if constexpr (k.value < W - 1)
              return before[k.value];
            else
              return load_as<T>(from + (k.value - W + 1) * x_step + channel);
          };
          Base::template filter_of<vl>(channel, weight);
          const V bias = load(filters.tap(W, channel));
          unroll<block>([&](auto k) __attribute__((always_inline)) {
            prefetch(from + (k + block) * x_step + channel, 0);
            V x[W];
            unroll<W>([&](auto j) __attribute__((always_inline)) { x[j] = sample(std::integral_constant<int, k.value + j.value>{}); });
            sum[k] = Base::convolve(x, weight, bias);
          });
          unroll<W - 1>([&](auto k)
                            __attribute__((always_inline)) { gradient[k] = begins ? zero<T>() : load(carry + k * stride + channel); });
          unroll<block>([&](auto k) __attribute__((always_inline)) {
            prefetch(dout + (k + block) * dout_step + channel, 0);
            gradient[W - 1 + k] = gradient_of<Active>(sum[k], load_as<T>(dout + k * dout_step + channel));
          });
          unroll<W - 1>([&](auto k) __attribute__((always_inline)) { store(carry + k * stride + channel, gradient[block + k]); });
          unroll<W>([&](auto k) __attribute__((always_inline)) { dweight[k] = load(sums + k * stride + channel); });
          V dbias = load(sums + W * stride + channel);
          unroll<block>([&](auto k) __attribute__((always_inline)) {
            const V g = gradient[W - 1 + k];
            dbias = dbias + g;
            unroll<W>([&](auto j) __attribute__((always_inline)) {
              dweight[j] = dweight[j] + g * sample(std::integral_constant<int, k.value + j.value>{});
            });
            values[k][n] = correlate(gradient + k, weight);
          });
          unroll<W>([&](auto k) __attribute__((always_inline)) { store(sums + k * stride + channel, dweight[k]); });
          store(sums + W * stride + channel, dbias);
        }
        unroll<block>([&](auto k) __attribute__((always_inline)) {
          if (k >= W - 1 || !begins) store_group(to + k * to_step + d, values[k], stream);
        });
      }
    }
    const bool more = tile.end < tile.last;
    for (int64_t d = first; d < end; d += group * vl) {
      V values[W][group];
      for (int n = 0; n < group; ++n) {
        const int64_t channel = d + n * vl;
        V weight[W], gradient[2 * W];
        Base::template filter_of<vl>(channel, weight);
        const V bias = load(filters.tap(W, channel));
        for (int k = 0; k < W - 1; ++k) {
          gradient[k] = load(carry + k * stride + channel);
          gradient[W - 1 + k] = zero<T>();
          if (more)
            gradient[W - 1 + k] = gradient_of<Active>(sum_at(p.x.template at<S>(tile.row, channel, tile.end + k), weight, bias),
                                                      load_as<T>(p.dout.template at<S>(tile.row, channel, tile.end + k)));
        }
        for (int k = 0; k < W - 1; ++k) values[k][n] = correlate(gradient + k, weight);
      }
      for (int k = 0; k < W - 1; ++k) store_group(p.dx.template at<S>(tile.row, d, tile.end - past + k), values[k], false);
    }
    return end;
  }
};

}  // namespace
}  // namespace mamba::cpu::MAMBA_CPU_LEVEL
