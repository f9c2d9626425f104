// Causal depthwise convolution, backward: strand by strand (see causal_conv1d.h), with a second buffer for the gradients of p.
// dweight and dbias are summed in blocks of tiles, then over the blocks, always in the same order.
#include "cpu/causal_conv1d_bwd.h"

namespace mamba::cpu::MAMBA_CPU_LEVEL {
namespace {

constexpr int64_t backward_rows = 64;  // of a channel-last tile of one vector
constexpr int64_t most_blocks = 64;    // of the sums for dweight and dbias

template <int W, class S>
class Backward : Gradients<W, S> {
  using Base = Gradients<W, S>;
  using Base::vl, Base::group, Base::width, Base::past, Base::p, Base::plan, Base::tiles, Base::filters, Base::groups, Base::streaming;
  using typename Base::T, typename Base::V, typename Base::Strand;

 public:
  explicit Backward(const CausalConv1dBwd& params)
      : Base(params, backward_rows / group, most_blocks),
        joins(params.dout && !params.dlast_state && Base::joins(params.x, params.dout, params.dx)),
        blocks(joins ? groups : least(tiles.count(), most_blocks)),
        partial(blocks * (width + 1) * filters.stride) {}

  void run() {
    const int64_t work = p.batch * p.dim * p.seqlen, tasks = blocks * plan.chunks;
    const auto body = [&](int64_t begin, int64_t end) {
      with_flags([&](auto channels, auto active) { sum_blocks<channels.value ? vl : 1, active.value>(begin, end); }, plan.channels, p.silu);
      if (streaming) end_streaming();
    };
    if (joins)
      with_flags([&](auto active) { join<active.value>(); }, p.silu);
    else
      parallel_for(tasks, body, work < 16384 ? tasks : 1);
    add_blocks();
    if (p.dinitial_state && past > 0) empty_sequences();
  }

 private:
  template <bool Active>
  void join() const {
    if constexpr (Base::joining) {
      parallel_for(groups * Base::joined_blocks(), [&](int64_t begin, int64_t end) {
        const int64_t numbers = (width + 1) * Base::joined_channels() * p.seqlen;
        const Scratch<T> filter(numbers + vl), lane_sums(numbers);
        for (int64_t index = begin; index < end; ++index) {
          const JoinedItem item = Base::joined_item(index);
          Base::join_filters(item, filter.get());
          for (int64_t i = 0; i < (width + 1) * item.count; i += vl) store(lane_sums.get() + i, zero<T>());
          item.for_each_row(
              [&](int64_t row, auto rows) { this->template joined<Active, rows.value>(item, row, filter.get(), lane_sums.get()); });
          Base::add_lanes(item, lane_sums.get(), partial.get() + item.group * (width + 1) * filters.stride);
        }
        if (streaming) end_streaming();
      });
    }
  }

  // The tiles of each block, in order. Blocks depend on the shape only, so the sums do not depend on the number of threads.
  template <int Step, bool Active>
  void sum_blocks(int64_t begin, int64_t end) const {
    constexpr bool channels = Step > 1;
    constexpr int most = channels ? group : 1;
    const int64_t room = Base::template room<Step>();
    const Scratch<T> memory(2 * most * (room + width * vl)), lane_sums(channels ? 0 : plan.chunk * (width + 1) * vl);
    const Scratch<T> carry(channels ? past * filters.stride : 0);
    Strand strands[most];
    for (int64_t task = begin; task < end; ++task) {
      const int64_t block = task / plan.chunks, first = task % plan.chunks * plan.chunk, last = Base::chunk_end(first);
      T* const sums = partial.get() + block * (width + 1) * filters.stride;
      for (int64_t k = 0; k <= width; ++k)
        for (int64_t d = first; d < (last == p.dim ? filters.stride : last); ++d) sums[k * filters.stride + d] = 0;
      for (int64_t i = 0; !channels && i < (last - first) * (width + 1) * vl; ++i) lane_sums.get()[i] = 0;
      for (int64_t i = block * tiles.count() / blocks; i < (block + 1) * tiles.count() / blocks; ++i) {
        const auto strands_of = [&](int64_t d) {
          int count = 0;
          for (; count < most && d < last; ++count, d += channels ? vl : 1) {
            T* const x = memory.get() + 2 * most * width * vl + 2 * count * room + Base::template lead<Step>();
            const int lanes = static_cast<int>(!channels ? 1 : last - d < vl ? last - d : vl);
            strands[count] = channels ? Strand{d, lanes, x, x + room, sums + d, filters.stride}
                                      : Strand{d, lanes, x, x + room, lane_sums.get() + (d - first) * (width + 1) * vl, vl};
          }
          return count;
        };
        if constexpr (channels) {
          int64_t begin = first;
          if constexpr (Base::registers) begin = Base::template rows<Active>(tiles[i], first, last, sums, carry.get());
          Base::for_each_piece(tiles[i], [&](const Tile& piece) {
            for (int64_t d = begin; d < last; d += most * vl) this->piece<Step, Active>(piece, strands, strands_of(d), memory.get());
          });
        } else {
          for (int64_t d = first; d < last; d += most) {
            const int count = strands_of(d);
            if constexpr (Base::registers) {
              if (p.dout && !tiles[i].padding && p.x.stride[2] == 1 && p.dout.stride[2] == 1 && p.dx.stride[2] == 1) {
                Base::template row<Active>(tiles[i], *strands);
                continue;
              }
            }
            Base::for_each_piece(tiles[i], [&](const Tile& piece) { this->piece<Step, Active>(piece, strands, count, memory.get()); });
          }
        }
      }
      for (int64_t i = 0; !channels && i < (last - first) * (width + 1); ++i)
        sums[i % (width + 1) * filters.stride + first + i / (width + 1)] = sum(load(lane_sums.get() + i * vl));
    }
  }

  // p_t is recomputed; gp_t = dout_t silu'(p_t); dweight[k] = sum_t gp_t x[t - past + k]; dbias = sum_t gp_t;
  // dx_i = sum_j weight[past - j] gp_{i + j}, so gp is computed that far behind the piece.
  template <int Step, bool Active>
  void piece(const Tile& piece, const Strand* strands, int count, T* memory) const {
    const bool reads = p.dout && !piece.padding;
    const int64_t steps = piece.end - piece.begin;
    const int64_t reach = reads ? (piece.end + past < piece.last ? piece.end + past : piece.last) - piece.begin : 0;
    for (int n = 0; n < count; ++n) {
      const Strand& s = strands[n];
      const int64_t end = (steps * Step + vl - 1) / vl * vl + Base::template lead<Step>();
      for (int64_t zeros = reach * Step / vl * vl; zeros < end; zeros += vl) store(s.gradient + zeros, zero<T>());
      if (!reads) continue;
      Base::template fill_past<Step>(s.x, piece, s.d, s.lanes);
      Base::template fill<Step>(s.x, p.x.template at<S>(piece.row, s.d, piece.begin), reach, s.lanes, p.x.stride[1], p.x.stride[2]);
      Base::template fill<Step>(s.gradient, p.dout.template at<S>(piece.row, s.d, piece.begin), reach, s.lanes, p.dout.stride[1],
                                p.dout.stride[2]);
    }
    for (int n = 0; n < count && reads; ++n) {
      if constexpr (Active) slopes<Step>(piece, strands[n], reach, memory);
    }
    if (p.dinitial_state && piece.begin == piece.first && piece.initial >= 0)
      for (int n = 0; n < count; ++n) initial_gradient<Step>(piece, strands[n], memory);
    if constexpr (Step == 1) {
      if (reads) sums<1>(piece, *strands, memory);
      write_times(piece, *strands, memory);
    } else if (count == group && strands[group - 1].lanes == vl && p.dx.stride[1] == 1) {
      for (int n = 0; n < count && group > 1 && reads; ++n) sums<vl>(piece, strands[n], memory);
      finish_channels<group>(piece, strands, group == 1 && reads, memory);
    } else {
      for (int n = 0; n < count; ++n) finish_channels<1>(piece, strands + n, reads, memory);
    }
  }

  template <int Step>
  void slopes(const Tile& piece, const Strand& s, int64_t reach, T* memory) const {
    Vectors<T, W> weight(memory);
    for (int64_t k = 0; k < width; ++k) weight[k] = Base::template tap<Step>(k, s.d);
    const V bias = Base::template tap<Step>(width, s.d);
    const int64_t end = reach * Step;
    const auto ahead = Base::template ahead<Step>(p.x, piece, s.d);
    for (int64_t i = 0; i < end; i += vl) {
      const V sum = Base::template convolve<Step>(s.x + i, weight, bias);
      ahead(i / vl);
      store(s.gradient + i, load(s.gradient + i) * silu_with_slope_for<S>(sum).slope);
    }
    for (int64_t i = end; i % vl; ++i) s.gradient[i] = 0;  // were these numbers x, not even a NaN must count
  }

  template <int Step>
  void sums(const Tile& piece, const Strand& s, T* memory) const {
    Vectors<T, W> dweight(memory);
    for (int64_t k = 0; k < width; ++k) dweight[k] = load(s.sums + k * s.pitch);
    V dbias = load(s.sums + width * s.pitch);
    const auto ahead = Base::template ahead<Step>(p.dout, piece, s.d);
    const int64_t end = (piece.end - piece.begin) * Step;
    int64_t i = 0;
    for (; i + vl <= end; i += vl) {
      ahead(i / vl);
      const V gradient = load(s.gradient + i);
      dbias = dbias + gradient;
      for (int64_t k = 0; k < width; ++k) dweight[k] = dweight[k] + gradient * load(s.x + i + (k - past) * Step);
    }
    if (i < end) {
      const int lanes = static_cast<int>(end - i);
      const V gradient = load_partial<T>(s.gradient + i, lanes);
      dbias = dbias + gradient;
      for (int64_t k = 0; k < width; ++k) dweight[k] = dweight[k] + gradient * load_partial<T>(s.x + i + (k - past) * Step, lanes);
    }
    for (int64_t k = 0; k < width; ++k) store(s.sums + k * s.pitch, dweight[k]);
    store(s.sums + width * s.pitch, dbias);
  }

  template <int Step, int N = 1>
  MAMBA_INLINE V spread(const T* gradient, Vectors<T, W * N>& weight, int n = 0) const {
    V sum = weight[past * N + n] * load(gradient);
    for (int64_t j = 1; j < width; ++j) sum = sum + weight[(past - j) * N + n] * load(gradient + j * Step);
    return sum;
  }

  // `N` strands, behind one another in memory: dx, and with `summing` their sums in the same sweep (two strands lack registers for that).
  template <int N>
  void finish_channels(const Tile& piece, const Strand* s, bool summing, T* memory) const {
    Vectors<T, W * N> weight(memory);
    Vectors<T, W> dweight(memory + N * width * vl);
    for (int64_t k = 0; k < width * N; ++k) weight[k] = load(filters.tap(k / N, s[k % N].d));
    for (int64_t k = 0; k < width; ++k) dweight[k] = load(s->sums + k * s->pitch);
    V dbias = load(s->sums + width * s->pitch);
    const int64_t steps = piece.end - piece.begin, final = Base::final_from(piece), step = p.dx.stride[2];
    S* const to = p.dx.template at<S>(piece.row, s->d, piece.begin);
    const bool direct = s->lanes == vl && p.dx.stride[1] == 1;
    const bool stream = N * vl * sizeof(S) == 64 && Base::streams_from(to, step);
    const auto ahead = Base::template ahead<vl>(summing ? p.dout : p.dx, piece, s->d);
    for (int64_t i = 0; i < steps; ++i) {
      V values[N];
      if (summing) ahead(i);
      for (int n = 0; n < N; ++n) {
        const T* const at = s[n].gradient + i * vl;
        if (N == 1 && summing) {
          const V gradient = load(at);
          dbias = dbias + gradient;
          for (int64_t k = 0; k < width; ++k) dweight[k] = dweight[k] + gradient * load(s->x + (i + k - past) * vl);
        }
        values[n] = spread<vl, N>(at, weight, n);
        if (i >= final) values[n] = Base::template with_final<vl>(piece, s[n], i, s[n].lanes, values[n]);
      }
      if (direct)
        store_group(to + i * step, values, stream);
      else
        store(s->x + (i - past) * vl, values[0]);  // over the sample that nothing else needs
    }
    if (!direct) Base::store_transposed(s->x - past * vl, to, step, p.dx.stride[1], steps, s->lanes);
    if (!summing) return;
    for (int64_t k = 0; k < width; ++k) store(s->sums + k * s->pitch, dweight[k]);
    store(s->sums + width * s->pitch, dbias);
  }

  void write_times(const Tile& piece, const Strand& s, T* memory) const {
    Vectors<T, W> weight(memory);
    for (int64_t k = 0; k < width; ++k) weight[k] = broadcast(*filters.tap(k, s.d));
    const int64_t steps = piece.end - piece.begin, final = Base::final_from(piece), step = p.dx.stride[2];
    S* const to = p.dx.template at<S>(piece.row, s.d, piece.begin);
    const bool stream = streaming && is_line(to);
    int64_t i = 0;
    for (; step == 1 && i + group * vl <= (steps < final ? steps : final); i += group * vl) {
      V values[group];
      for (int n = 0; n < group; ++n) values[n] = spread<1>(s.gradient + i + n * vl, weight);
      store_group(to + i, values, stream);
    }
    for (; i < steps; i += vl) {
      const int lanes = static_cast<int>(steps - i < vl ? steps - i : vl);
      write(to + i * step, Base::template with_final<1>(piece, s, i, lanes, spread<1>(s.gradient + i, weight)), lanes, step);
    }
  }

  template <int Step>
  void initial_gradient(const Tile& piece, const Strand& s, T* memory) const {
    Vectors<T, W> weight(memory);
    for (int64_t k = 0; k < width; ++k) weight[k] = Base::template tap<Step>(k, s.d);
    for (int64_t i = Base::template lead<Step>(); i > 0; i -= vl) store(s.gradient - i, zero<T>());
    for (int64_t i = -past; i < 0; i += Step > 1 ? 1 : vl) {
      const int lanes = Step > 1 ? s.lanes : static_cast<int>(i + vl < 0 ? vl : -i);
      const V value = Base::template with_final<Step>(piece, s, i, lanes, spread<Step>(s.gradient + i * Step, weight));
      for (int lane = 0; lane < lanes; ++lane) {
        const int64_t d = Step > 1 ? s.d + lane : s.d, t = Step > 1 ? i : i + lane;
        write_one(p.dinitial_state, static_cast<T>(value[lane]), piece.initial, d, past + t);
      }
    }
  }

  // Second stage: the blocks' sums, in order.
  void add_blocks() const {
    for (int64_t d = 0; d < p.dim; d += vl) {
      const int lanes = static_cast<int>(p.dim - d < vl ? p.dim - d : vl);
      for (int64_t k = 0; k <= width; ++k) {
        V total = zero<T>();
        for (int64_t block = 0; block < blocks; ++block)
          total = total + load(partial.get() + (block * (width + 1) + k) * filters.stride + d);
        for (int lane = 0; lane < lanes; ++lane) {
          if (k < width)
            write_one(p.dweight, static_cast<T>(total[lane]), d + lane, k);
          else if (p.dbias)
            write_one(p.dbias, static_cast<T>(total[lane]), d + lane);
        }
      }
    }
  }

  // A sequence without tokens hands its state through, and so its gradient.
  void empty_sequences() const {
    for (int64_t s = 0; s < p.num_sequences; ++s) {
      const int64_t count = p.cu_seqlens ? load_index(p.cu_seqlens, s + 1) - load_index(p.cu_seqlens, s) : p.seqlen;
      if (count > 0) continue;
      for (int64_t d = 0; d < p.dim; ++d)
        for (int64_t j = 0; j < past; ++j) write_one(p.dinitial_state, p.dlast_state ? read_one<T>(p.dlast_state, s, d, j) : T(0), s, d, j);
    }
  }

  const bool joins;
  const int64_t blocks;
  const Scratch<T> partial;  // (blocks, width + 1, filters.stride)
};

}  // namespace

void causal_conv1d_bwd(const CausalConv1dBwd& params) {
  dispatch(params, [&](auto tag, auto width) { Backward<width.value, typename decltype(tag)::type>(params).run(); });
}

}  // namespace mamba::cpu::MAMBA_CPU_LEVEL
