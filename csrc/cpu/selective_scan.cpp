// selective_scan forward. For each batch row, row block, block of channels: read tiles of u, delta, z; run the recurrence with the states
// of up to 16 n in registers; write the tile of out. See selective_scan.h for the words.
#include "cpu/selective_scan.h"
#include "cpu/flush.h"

namespace mamba::cpu::MAMBA_CPU_LEVEL {
namespace {

#if MAMBA_CPU_AVX512 || defined(__aarch64__)
constexpr int states_in_registers = 16;
#else
constexpr int states_in_registers = 8;
#endif
constexpr int lines_per_row = 3;

// What the recurrence reads and writes, row by row of a tile. `before` holds the sums over the states already done and `gate` what the sum
// is multiplied by; both may stand still (pitch 0).
template <class T>
struct ScanTile {
  TileRows<T> delta, u, before, gate;
  Vec<T> skip;
  T* out;
  int64_t out_pitch;
  const void* const* ahead;
};

// For `Count` states and `rows` rows:
//   h = exp(delta A) h + (delta u) B;   out = (before + D u + sum C h) gate
template <int Count, bool PerLane, class T>
__attribute__((noinline)) void scan_states(const ScanTile<T>& tile, int rows, const T* A2, T* states, const T* B, int64_t B_step,
                                           const T* C, int64_t C_step) {
  constexpr int width = Simd<T>::width;
  Vec<T> h[Count + 1];
  unroll<Count>([&](auto n) __attribute__((always_inline)) { h[n] = load(states + n * width); });
  for (int i = 0; i < rows; ++i) {
    ask_for_lines<lines_per_row>(tile.ahead, i);
    const Vec<T> delta = tile.delta[i], u = tile.u[i], delta_u = delta * u;
    Vec<T> sums[2] = {tile.before[i] + tile.skip * u, zero<T>()};
    unroll<Count>([&](auto n) __attribute__((always_inline)) {
      const Vec<T> b = PerLane ? load(B + n * width) : broadcast<T>(B[n]);
      const Vec<T> c = PerLane ? load(C + n * width) : broadcast<T>(C[n]);
      h[n] = exp2(delta * load(A2 + n * width)) * h[n] + delta_u * b;
      sums[n & 1] += c * h[n];
    });
    store(tile.out + i * tile.out_pitch, (sums[0] + sums[1]) * tile.gate[i]);
    B += B_step;
    C += C_step;
  }
  unroll<Count>([&](auto n) __attribute__((always_inline)) { store(states + n * width, h[n]); });
}

// The work of one thread. Parameters and states of the channels at hand stand in [block][dstate][width] tables.
template <class T>
class Forward {
 public:
  Forward(const SelectiveScanFwd& p, const ScanBlocks<T>& blocks, int block_rows, int64_t table_blocks)
      : p_(p),
        blocks_(blocks),
        block_rows_(block_rows),
        streams_(p.out.stride[2] == 1 && streams_tiles<T>(p.out, p.batch, p.dim, p.seqlen)),
        B_(scan_matrix(p, p.B, p.B_varies, p.ngroups_B)),
        C_(scan_matrix(p, p.C, p.C_varies, p.ngroups_C)),
        A2_(table_blocks * p.dstate * width),
        states_(table_blocks * p.dstate * width),
        skip_(table_blocks * width),
        bias_(table_blocks * width),
        B_rows_(scan_rows_size<T>(p, blocks.per_lane, block_rows)),
        C_rows_(scan_rows_size<T>(p, blocks.per_lane, block_rows)) {
    store(zero_, zero<T>());
    store(one_, broadcast<T>(1));
  }

  void load_parameters(int64_t first, int64_t last) {
    first_ = first;
    for (int64_t block = first; block < last; ++block) {
      const int64_t channel = blocks_.channel(block);
      const int lanes = blocks_.lanes(block);
      load_A(table(A2_, block), p_, channel, lanes, T(1.44269504088896340736));  // exp(x) = 2^(x log2 e)
      load_parameter(skip_.get() + (block - first) * width, p_.D, channel, lanes);
      load_parameter(bias_.get() + (block - first) * width, p_.delta_bias, channel, lanes);
    }
  }

  // One batch row for the blocks [begin, end), whose parameters are loaded.
  void run(int64_t batch, int64_t begin, int64_t end) {
    pass_through(batch, begin, end);
    for (int64_t time = 0; time < p_.seqlen; time += block_rows_) {
      const int rows = static_cast<int>(scan_min(block_rows_, p_.seqlen - time));
      segments_.fill(p_, batch, time, rows);
      int64_t loaded_run = -1;
      for (int64_t block = begin; block < end; ++block) {
        const int64_t channel = blocks_.channel(block);
        const int lanes = blocks_.lanes(block);
        if (blocks_.per_lane || block / blocks_.blocks_per_run != loaded_run) {
          B_now_ = load_scan_rows(B_rows_.get(), p_, B_, blocks_.per_lane, blocks_.packed, batch, channel, lanes, time, rows);
          C_now_ = load_scan_rows(C_rows_.get(), p_, C_, blocks_.per_lane, blocks_.packed, batch, channel, lanes, time, rows);
          loaded_run = block / blocks_.blocks_per_run;
        }
        for (int row = 0; row < rows; row += scan_tile_rows) {
          ahead_.clear();
          if (row + scan_tile_rows < rows)
            look_ahead(batch, channel, time + row + scan_tile_rows);
          else if (block + 1 < end)
            look_ahead(batch, blocks_.channel(block + 1), time);
          else if (time + rows < p_.seqlen)
            look_ahead(batch, blocks_.channel(begin), time + rows);
          tile(batch, block, channel, lanes, time, row, static_cast<int>(scan_min(scan_tile_rows, rows - row)));
        }
      }
    }
  }

 private:
  static constexpr int width = Simd<T>::width;

  T* table(const Scratch<T>& of, int64_t block) const { return of.get() + (block - first_) * p_.dstate * width; }

  // The tile that comes next.
  void look_ahead(int64_t batch, int64_t channel, int64_t time) {
    const int rows = static_cast<int>(scan_min(scan_tile_rows, p_.seqlen - time)),
              lanes = static_cast<int>(scan_min(width, p_.dim - channel));
    for (const View<3>* view : {&p_.delta, &p_.u, &p_.z}) ahead_.add(*view, batch, channel, time, rows, lanes);
    if (!streams_) ahead_.add(p_.out, batch, channel, time, rows, lanes);
    if (p_.chunk_states) ahead_.add(chunk_state<T>(p_, batch, time, channel) + lanes - 1, p_.dim * sizeof(T), p_.dstate);
  }

  // last_state of empty sequences.
  void pass_through(int64_t batch, int64_t begin, int64_t end) {
    const int64_t count = p_.cu_seqlens ? p_.num_sequences : 1;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t index = p_.cu_seqlens ? i : batch;
      if (!scan_is_empty(p_, index)) continue;
      for (int64_t block = begin; block < end; ++block) {
        T* h = table(states_, block);
        load_states(h, p_.initial_state, index, blocks_.channel(block), blocks_.lanes(block), p_.dstate);
        store_states(h, p_.last_state, index, blocks_.channel(block), blocks_.lanes(block), p_.dstate);
      }
    }
  }

  // Rows [row, row + rows) of the row block that starts at `time`.
  void tile(int64_t batch, int64_t block, int64_t channel, int lanes, int64_t time, int row, int rows) {
    const int64_t t = time + row;
    ScanTile<T> tile;
    tile.delta = rows_of(delta_, p_.delta, batch, channel, t, rows, lanes);
    tile.u = rows_of(u_, p_.u, batch, channel, t, rows, lanes);
    tile.gate = {one_, 0};
    tile.skip = load(skip_.get() + (block - first_) * width);
    if (p_.delta_bias || p_.delta_softplus) {
      const Vec<T> bias = load(bias_.get() + (block - first_) * width);
      for (int i = 0; i < rows; ++i) {
        const Vec<T> e = tile.delta[i] + bias;
        store(delta_ + i * width, p_.delta_softplus ? softplus(e) : e);
      }
      tile.delta = {delta_, width};
    }
    if (p_.z) {
      const TileRows<T> z = rows_of(gate_, p_.z, batch, channel, t, rows, lanes);
      for (int i = 0; i < rows; ++i) store(gate_ + i * width, silu(z[i]));
      tile.gate = {gate_, width};
    }
    const TileTarget<T> out(y_, p_.out, batch, channel, t, lanes, streams_);
    tile.out = out.rows.data;
    tile.out_pitch = out.rows.pitch;
    const int valid = static_cast<int>(scan_min(row + rows, segments_.valid));
    spans(tile, batch, block, channel, lanes, time, row, valid);
    ahead_.ask_for_the_rest();
    for (int i = valid > row ? valid - row : 0; i < rows; ++i) store(out.rows[i], zero<T>());
    out.finish(rows);
  }

  static TileRows<T> rows_of(T* tile, const View<3>& view, int64_t batch, int64_t channel, int64_t time, int rows, int lanes) {
    return tile_rows(tile, address(view, batch, channel, time), view.dtype, view.stride[2], view.stride[1], rows, lanes);
  }

  // The rows [row, valid) of the row block, segment by segment.
  void spans(const ScanTile<T>& tile, int64_t batch, int64_t block, int64_t channel, int lanes, int64_t time, int row, int valid) {
    T* states = table(states_, block);
    for (int from = row, to; from < valid; from = to) {
      to = segments_.next(from, valid);
      if (segments_.start[from] != ScanSegments::inside) {
        load_states(states, p_.initial_state, segments_.start[from], channel, lanes, p_.dstate);
      }
      if (p_.chunk_states && from == row) save(states, batch, time + row, channel, lanes);
      span(tile, states, table(A2_, block), from - row, to - from, from);
      store_states(states, p_.last_state, segments_.end[to - 1], channel, lanes, p_.dstate);
    }
  }

  // Rows of one segment: tile rows [in_tile, in_tile + rows), rows of B and C from `in_block` on.
  void span(const ScanTile<T>& tile, T* states, const T* A2, int in_tile, int rows, int in_block) {
    const auto from = [&](TileRows<T> r) { return TileRows<T>{r.data + in_tile * r.pitch, r.pitch}; };
    T* const out = tile.out + in_tile * tile.out_pitch;
    const T *B = B_now_.data + in_block * B_now_.row_step, *C = C_now_.data + in_block * C_now_.row_step;
    const TileRows<T> delta = from(tile.delta), u = from(tile.u), gate = from(tile.gate), none{zero_, 0}, sums{out, tile.out_pitch};
    for_state_pieces<states_in_registers>(p_.dstate, [&](int64_t n, auto count) __attribute__((always_inline)) {
      const bool first = n == 0, last = n + count == p_.dstate;
      const ScanTile<T> piece{delta,
                              u,
                              first ? none : sums,
                              last ? gate : TileRows<T>{one_, 0},
                              first ? tile.skip : zero<T>(),
                              out,
                              tile.out_pitch,
                              ahead_.take(rows)};
      const auto core = blocks_.per_lane ? scan_states<decltype(count)::value, true, T> : scan_states<decltype(count)::value, false, T>;
      core(piece, rows, A2 + n * width, states + n * width, B + n * B_now_.state_step, B_now_.row_step, C + n * C_now_.state_step,
           C_now_.row_step);
    });
  }

  void save(const T* states, int64_t batch, int64_t time, int64_t channel, int lanes) {
    T* to = chunk_state<T>(p_, batch, time, channel);
    for (int64_t n = 0; n < p_.dstate; ++n) {
      if (lanes == width)
        store(to + n * p_.dim, load(states + n * width));
      else
        store_partial(to + n * p_.dim, load(states + n * width), lanes);
    }
  }

  const SelectiveScanFwd& p_;
  const ScanBlocks<T>& blocks_;
  const int block_rows_;
  const bool streams_;
  const ScanMatrix B_, C_;
  const Scratch<T> A2_, states_, skip_, bias_, B_rows_, C_rows_;
  ScanRows<T> B_now_{}, C_now_{};
  int64_t first_ = 0;
  ScanSegments segments_;
  ScanAhead<lines_per_row> ahead_;
  alignas(64) T delta_[scan_tile_rows * width];
  alignas(64) T u_[scan_tile_rows * width];
  alignas(64) T y_[scan_tile_rows * width];
  alignas(64) T gate_[scan_tile_rows * width];
  alignas(64) T zero_[width];
  alignas(64) T one_[width];
};

// Items are pieces of `piece` blocks of one batch row, in the order (strip of blocks, batch row, piece): a thread keeps the parameters of a
// strip for all its batch rows.
template <class T>
void forward(const SelectiveScanFwd& p) {
  constexpr int width = Simd<T>::width;
  const ScanBlocks<T> blocks(p);
  const int64_t states = scan_max(p.dstate, 1);
  const int64_t row_work = scan_max(1, p.seqlen) * width * scan_max(p.dstate, 4);
  const int64_t piece = scan_max(1, scan_min(blocks.count, 65536 / row_work));
  const int64_t strip = ceil_div(scan_max(piece, 65536 / (states * width)), piece) * piece;
  const int64_t strips = ceil_div(blocks.count, strip), pieces = ceil_div(scan_min(strip, blocks.count), scan_max(1, piece));
  const int block_rows = scan_block_rows(p, blocks.per_lane);
  parallel_for(strips * p.batch * pieces, [&](int64_t begin, int64_t end) {
    const FlushSubnormals flush;
    Forward<T> work(p, blocks, block_rows, scan_min(strip, blocks.count));
    int64_t loaded = -1;
    while (begin < end) {
      const int64_t s = begin / (p.batch * pieces), batch = begin / pieces % p.batch, from = begin % pieces;
      const int64_t to = scan_min(pieces, from + end - begin);
      const int64_t last_block = scan_min((s + 1) * strip, blocks.count);
      if (s != loaded) {  // the blocks of this batch row only, where the thread has no other row
        const bool only = to - from == end - begin;
        work.load_parameters(s * strip + (only ? from * piece : 0), only ? scan_min(s * strip + to * piece, last_block) : last_block);
      }
      loaded = s;
      work.run(batch, scan_min(s * strip + from * piece, last_block), scan_min(s * strip + to * piece, last_block));
      begin += to - from;
    }
    end_streaming();
  });
}

}  // namespace

void selective_scan_fwd(const SelectiveScanFwd& p) {
  if (p.batch == 0 || p.dim == 0) return;
  dispatch_accumulate(p.u.dtype, [&](auto tag) { forward<typename decltype(tag)::type>(p); });
}

}  // namespace mamba::cpu::MAMBA_CPU_LEVEL
