// Causal depthwise convolution, forward: strand by strand (see causal_conv1d.h), so that no tensor is transposed. Padding and sequence
// borders are a matter of where runs begin and end, never of multiplication.
#include "cpu/causal_conv1d.h"

namespace mamba::cpu::MAMBA_CPU_LEVEL {
namespace {

constexpr int64_t forward_rows = 16;  // of a channel-last tile

template <int W, class S>
class Forward : Convolution<W, S, CausalConv1dFwd> {
  using Base = Convolution<W, S, CausalConv1dFwd>;
  using Base::vl, Base::group, Base::width, Base::past, Base::p, Base::plan, Base::tiles, Base::filters, Base::groups, Base::streaming;
  using typename Base::T, typename Base::V;

 public:
  explicit Forward(const CausalConv1dFwd& params) : Base(params, forward_rows, 1 << 20) {}

  void run() {
    if constexpr (Base::joining) {
      if (Base::joins(p.x, p.out)) return with_flags([&](auto active) { join<active.value>(); }, p.silu);
    }
    const int64_t tasks = tiles.count() * plan.chunks;
    const int64_t task_size = plan.chunk * (plan.length < p.seqlen ? plan.length : p.seqlen);
    const auto body = [&](int64_t begin, int64_t end) {
      with_flags([&](auto channels, auto active) { sweep<channels.value ? vl : 1, active.value>(begin, end); }, plan.channels, p.silu);
      if (streaming) end_streaming();
    };
    parallel_for(tasks, body, task_size > 0 ? 32768 / task_size : 1);
    empty_sequences();
  }

 private:
  template <bool Active>
  void join() const {
    parallel_for(groups * Base::joined_blocks(), [&](int64_t begin, int64_t end) {
      const int64_t channels = Base::joined_channels();
      const Scratch<T> filter((width + 1) * channels * p.seqlen + vl);
      const Scratch<S> states(channels * past);
      for (int64_t index = begin; index < end; ++index) {
        const JoinedItem item = Base::joined_item(index);
        Base::join_filters(item, filter.get());
        item.for_each_row([&](int64_t row, auto rows) {
          this->template joined<Active, rows.value>(item, row, filter.get());
          for (int n = 0; n < rows; ++n) this->joined_states(item, row + n, states.get());
        });
      }
      if (streaming) end_streaming();
    });
  }

  // `N` joined rows.
  template <bool Active, int N>
  __attribute__((noinline)) void joined(const JoinedItem& item, int64_t row, const T* filter) const {
    const S* const from = p.x.template at<S>(row, item.d, 0);
    S* const to = p.out.template at<S>(row, item.d, 0);
    const int64_t step = p.x.stride[0], to_step = p.out.stride[0], count = item.count;
    const IntVec<T> length = broadcast_int<T>(p.seqlen), turn = broadcast_int<T>(vl % p.seqlen);
    const bool stream = group * vl * sizeof(S) == 64 && Base::streams_from(to, to_step);
    IntVec<T> times = Base::joined_times(0);
    V before[N];
    for (int n = 0; n < N; ++n) before[n] = zero<T>();
    for (int64_t line = 0; line < count; line += group * vl) {
      V values[N][group];
#pragma GCC unroll 2
      for (int m = 0; m < group; ++m) {
        const int64_t i = line + m * vl;
        V weight[W];
        unroll<W>([&](auto k) __attribute__((always_inline)) { weight[k] = load(filter + k * count + i); });
        const V bias = load(filter + W * count + i);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
          const V now = load_as<T>(from + n * step + i);
          V x[W];
          Base::joined_samples(before[n], now, times, x);
          before[n] = now;
          values[n][m] = Base::convolve(x, weight, bias);
        }
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) values[n][m] = activate<Active>(values[n][m]);
        times = times + turn;
        times = select(times >= length, times - length, times);
      }
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        prefetch(from + (n + N) * step + line, 0);
        store_group(to + n * to_step + line, values[n], stream);
      }
    }
  }

  // The last samples of each channel: collected, so that whole lines are written.
  void joined_states(const JoinedItem& item, int64_t row, S* states) const {
    const View<3>& view = p.last_state;
    if (view.stride[2] != 1 || view.stride[1] != past) return last_state(row, item.d, item.d + item.count / p.seqlen);
    const S* const x = p.x.template at<S>(row, item.d, 0);
    S *const to = view.template at<S>(row, item.d, 0), *next = states;
    for (int64_t i = p.seqlen - past; i < item.count; i += p.seqlen, next += past)
      unroll<W - 1>([&](auto j) __attribute__((always_inline)) { next[j] = x[i + j]; });
    const int64_t bytes = (next - states) * static_cast<int64_t>(sizeof(S)), whole = streaming && is_line(to) ? bytes / 64 * 64 : 0;
    for (int64_t i = 0; i < whole; i += vector_bytes)
      stream_as(reinterpret_cast<float*>(to) + i / 4, load(reinterpret_cast<const float*>(states) + i / 4));
    __builtin_memcpy(reinterpret_cast<char*>(to) + whole, reinterpret_cast<const char*>(states) + whole, bytes - whole);
  }

  template <int Step, bool Active>
  void sweep(int64_t begin, int64_t end) const {
    const Scratch<T> memory(group * (Base::template room<Step>() + width * vl));
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task % plan.chunks * plan.chunk, last = Base::chunk_end(first);
      const Tile& tile = tiles[task / plan.chunks];
      if (tile.padding) {
        clear(tile, first, last);
      } else if constexpr (Step == 1) {
        for (int64_t d = first; d < last; ++d) {
          if constexpr (Base::registers) {
            if (p.x.stride[2] == 1 && p.out.stride[2] == 1) {
              row<Active>(tile, d);
              continue;
            }
          }
          Base::for_each_piece(tile, [&](const Tile& piece) { times<Active>(piece, d, memory.get()); });
        }
      } else {
        Base::for_each_piece(tile, [&](const Tile& piece) {
          int64_t d = first;
          if constexpr (Base::registers) d = rows<Active>(piece, first, last);
          for (; p.out.stride[1] == 1 && d + group * vl <= last; d += group * vl) channels<Active, group>(piece, d, vl, memory.get());
          for (; d < last; d += vl) channels<Active, 1>(piece, d, static_cast<int>(last - d < vl ? last - d : vl), memory.get());
        });
      }
      if (tile.final >= 0 && tile.end == tile.last) last_state(tile.final, first, last);
    }
  }

  void clear(const Tile& tile, int64_t begin, int64_t end) const {
    for (int64_t d = begin; d < end; ++d)
      for (int64_t t = tile.begin; t < tile.end; ++t) *p.out.template at<S>(tile.row, d, t) = S{};
  }

  // out = silu(p_t) or p_t
  template <bool Active>
  static MAMBA_INLINE V activate(V sum) {
    if constexpr (Active)
      return silu_for<S>(sum);
    else
      return sum;
  }

  // One channel whose time steps are neighbours in memory.
  template <bool Active>
  __attribute__((noinline)) void row(const Tile& tile, int64_t d) const {
    const S* const from = p.x.template at<S>(tile.row, d, tile.begin);
    S* const to = p.out.template at<S>(tile.row, d, tile.begin);
    const int64_t count = tile.end - tile.begin;
    const bool stream = streaming && is_line(to);
    V weight[W], x[W], before = Base::before(tile, d);
    Base::template filter_of<1>(d, weight);
    const V bias = broadcast(*filters.tap(W, d));
    const auto next = [&](V now) __attribute__((always_inline)) {
      windows<vl - W + 1, W>(before, now, x);
      before = now;
      return Base::convolve(x, weight, bias);
    };
    int64_t i = 0;
    for (; i + together * vl <= count; i += together * vl) {
      V sums[together];
#pragma GCC unroll 8
      for (int n = 0; n < together; ++n) {
        prefetch(from + i + n * vl + Base::distance, 0);
        sums[n] = next(load_as<T>(from + i + n * vl));
      }
#pragma GCC unroll 8
      for (int n = 0; n < together; n += group) {
        V values[group];
        for (int m = 0; m < group; ++m) values[m] = activate<Active>(sums[n + m]);
        store_group(to + i + n * vl, values, stream);
      }
    }
    for (; i + vl <= count; i += vl) {
      const V value = activate<Active>(next(load_as<T>(from + i)));
      if (stream && group == 1)
        stream_as(to + i, value);
      else
        store_as(to + i, value);
    }
    if (i < count) {
      const int lanes = static_cast<int>(count - i);
      write(to + i, activate<Active>(next(read<T>(from + i, lanes, 1))), lanes, 1);
    }
  }

  // Channels that are neighbours in memory: `block` time steps of all of them, then the next ones. Returns the first channel left over.
  template <bool Active>
  __attribute__((noinline)) int64_t rows(const Tile& piece, int64_t first, int64_t last) const {
    const int64_t step = p.x.stride[2], to_step = p.out.stride[2], blocks = (piece.end - piece.begin) / block;
    if (p.x.stride[1] != 1 || p.out.stride[1] != 1 || blocks * block != piece.end - piece.begin) return first;
    const int64_t end = first + (last - first) / (group * vl) * (group * vl);
    for (int64_t t = piece.begin; t < piece.end; t += block) {
      const S* const from = p.x.template at<S>(piece.row, 0, t);
      S* const to = p.out.template at<S>(piece.row, 0, t);
      const bool stream = group * vl * sizeof(S) == 64 && Base::streams_from(to + first, to_step);
      for (int64_t d = first; d < end; d += group * vl) {
        V values[block][group];
        for (int n = 0; n < group; ++n) {
          V weight[W], x[block + W - 1];
          const int64_t channel = d + n * vl;
          Base::template filter_of<vl>(channel, weight);
          const V bias = load(filters.tap(W, channel));
          Base::edge(piece, t, channel, x);
#pragma GCC unroll 16
          for (int k = W - 1; k < block + W - 1; ++k) x[k] = load_as<T>(from + (k - past) * step + channel);
#pragma GCC unroll 16
          for (int k = 0; k < block; ++k) values[k][n] = Base::convolve(x + k, weight, bias);
#pragma GCC unroll 16
          for (int k = 0; k < block; ++k) values[k][n] = activate<Active>(values[k][n]);
        }
#pragma GCC unroll 16
        for (int k = 0; k < block; ++k) {
          prefetch(from + (k + block) * step + d, 0);
          store_group(to + k * to_step + d, values[k], stream);
        }
      }
    }
    return end;
  }

  // `N` strands of channels, one behind the other.
  template <bool Active, int N>
  void channels(const Tile& piece, int64_t d, int lanes, T* memory) const {
    const int64_t room = Base::template room<vl>(), count = piece.end - piece.begin;
    T* const x = memory + Base::template lead<vl>();
    for (int n = 0; n < N; ++n) {
      Base::template fill_past<vl>(x + n * room, piece, d + n * vl, lanes);
      Base::template fill<vl>(x + n * room, p.x.template at<S>(piece.row, d + n * vl, piece.begin), count, lanes, p.x.stride[1],
                              p.x.stride[2]);
    }
    S* const to = p.out.template at<S>(piece.row, d, piece.begin);
    const auto ahead = Base::template ahead<vl>(p.x, piece, d);
    const int64_t to_step = p.out.stride[2];
    const bool direct = lanes == vl && p.out.stride[1] == 1;
    const bool stream = N * vl * sizeof(S) == 64 && Base::streams_from(to, to_step);
    Vectors<T, W * N> weight(memory + N * room);
    V bias[N];
    for (int n = 0; n < N; ++n) {
      for (int64_t k = 0; k < width; ++k) weight[k * N + n] = load(filters.tap(k, d + n * vl));
      bias[n] = load(filters.tap(width, d + n * vl));
    }
    for (int64_t i = 0; i < count; ++i) {
      V values[N];
      ahead(i);
      for (int n = 0; n < N; ++n) values[n] = activate<Active>(Base::template convolve<vl, N>(x + n * room + i * vl, weight, bias[n], n));
      if (direct)
        store_group(to + i * to_step, values, stream);
      else
        store(x + (i - past) * vl, values[0]);  // over the sample that nothing else needs
    }
    if (!direct) Base::store_transposed(x - past * vl, to, to_step, p.out.stride[1], count, lanes);
  }

  // One channel, a row of time steps.
  template <bool Active>
  void times(const Tile& piece, int64_t d, T* memory) const {
    const int64_t count = piece.end - piece.begin, to_step = p.out.stride[2];
    T* const x = memory + Base::template lead<1>();
    Base::template fill_past<1>(x, piece, d, 1);
    Base::template fill<1>(x, p.x.template at<S>(piece.row, d, piece.begin), count, 1, 0, p.x.stride[2]);
    S* const to = p.out.template at<S>(piece.row, d, piece.begin);
    const auto ahead = Base::template ahead<1>(p.x, piece, d);
    Vectors<T, W> weight(memory + Base::template room<1>());
    for (int64_t k = 0; k < width; ++k) weight[k] = broadcast(*filters.tap(k, d));
    const V bias = broadcast(*filters.tap(width, d));
    const bool stream = streaming && is_line(to);
    int64_t i = 0;
    for (; to_step == 1 && i + group * vl <= count; i += group * vl) {
      V values[group];
      ahead(i / vl);
      for (int n = 0; n < group; ++n) values[n] = activate<Active>(Base::template convolve<1>(x + i + n * vl, weight, bias));
      store_group(to + i, values, stream);
    }
    for (; i < count; i += vl) {
      const V value = activate<Active>(Base::template convolve<1>(x + i, weight, bias));
      write(to + i * to_step, value, static_cast<int>(count - i < vl ? count - i : vl), to_step);
    }
  }

  // Sequences without tokens; the others' states are written with their last tiles.
  void empty_sequences() const {
    for (int64_t s = 0; s < p.num_sequences; ++s)
      if (p.cu_seqlens ? load_index(p.cu_seqlens, s) == load_index(p.cu_seqlens, s + 1) : p.seqlen == 0) last_state(s, 0, p.dim);
  }

  // last_state[j] = sample last - past + j of the sequence, 0 before the last run's first sample unless initial_state reaches there
  void last_state(int64_t s, int64_t begin, int64_t end) const {
    if (past == 0) return;
    const int64_t row = p.cu_seqlens ? 0 : s;
    const int64_t start = p.cu_seqlens ? load_index(p.cu_seqlens, s) : 0;
    const int64_t last = p.cu_seqlens ? load_index(p.cu_seqlens, s + 1) : p.seqlen;
    int64_t first = start;  // of the run that ends the sequence, as far as it matters
    if (p.seq_idx) {
      first = last;
      while (first > start && first > last - past && (first == last || same_id(row, first - 1, first))) --first;
    }
    const bool reaches_start = first == start;
    const int64_t x_step = p.x.stride[2], to_step = p.last_state.stride[2];
    for (int64_t d = begin; d < end; ++d) {
      const S* const x = p.x.template at<S>(row, d, last - past);
      S* const to = p.last_state.template at<S>(s, d, 0);
      if (last - past >= first) {
        for (int64_t j = 0; j < past; ++j) to[j * to_step] = x[j * x_step];
        continue;
      }
      for (int64_t j = 0; j < past; ++j) {
        const int64_t t = last - past + j;
        S value{};
        if (t >= first)
          value = x[j * x_step];
        else if (t < start && reaches_start && p.initial_state)
          store_scalar(&value, read_one<T>(p.initial_state, s, d, past + t - start));
        to[j * to_step] = value;
      }
    }
  }

  bool same_id(int64_t row, int64_t t, int64_t u) const { return load_index(p.seq_idx, row, t) == load_index(p.seq_idx, row, u); }
};

}  // namespace

void causal_conv1d_fwd(const CausalConv1dFwd& params) {
  dispatch(params, [&](auto tag, auto width) { Forward<width.value, typename decltype(tag)::type>(params).run(); });
}

}  // namespace mamba::cpu::MAMBA_CPU_LEVEL
