// selective_scan backward. Time runs backwards in short row blocks. Each tile of rows is first redone forward from its stored state, which
// keeps a = exp(delta A) and w = a h in a buffer the size of the first-level cache, then the adjoint runs through it in reverse. Sums over
// channels (dB, dC) are kept as lane partials over the blocks of a *cell*, reduced once per cell and added up in cell order; sums over
// batch rows (dA, dD, ...) are made per batch block and added up in block order. Cells and batch blocks depend on the shape only.
#include "cpu/selective_scan_bwd.h"
#include "cpu/flush.h"

namespace mamba::cpu::MAMBA_CPU_LEVEL {
namespace {

// The work of one thread, for some cells of one batch block at a time.
template <class T>
class Backward {
 public:
  Backward(const SelectiveScanBwd& p, const BackwardPlan<T>& plan, const BackwardParts<T>& parts, int64_t table_blocks)
      : p_(p),
        plan_(plan),
        blocks_(plan.blocks),
        parts_(parts),
        stream_du_(streams_tiles<T>(p.du, p.batch, p.dim, p.seqlen)),
        stream_ddelta_(streams_tiles<T>(p.ddelta, p.batch, p.dim, p.seqlen)),
        stream_dz_(streams_tiles<T>(p.dz, p.batch, p.dim, p.seqlen)),
        A2_(table_blocks * p.dstate * width),
        lambda_(table_blocks * p.dstate * width),
        dA_(table_blocks * p.dstate * width),
        constant_B_(p.B_varies ? 0 : table_blocks * p.dstate * width),
        constant_C_(p.C_varies ? 0 : table_blocks * p.dstate * width),
        skip_(table_blocks * width),
        bias_(table_blocks * width),
        dD_(table_blocks * width),
        dbias_(table_blocks * width),
        B_rows_(scan_rows_size<T>(p, blocks_.per_lane, plan.block_rows)),
        C_rows_(scan_rows_size<T>(p, blocks_.per_lane, plan.block_rows)),
        dB_(p.B_varies ? (scan_tile_rows * p.dstate + width) * width : 0),
        dC_(p.C_varies ? (scan_tile_rows * p.dstate + width) * width : 0),
        sums_B_(plan.block_rows * p.dstate + width),
        sums_C_(plan.block_rows * p.dstate + width),
        states_(p.dstate * width),
        zeros_(p.dstate * width),
        kept_(2 * scan_tile_rows * backward_states_in_registers * width) {
    clear(zeros_.get(), p.dstate);
  }

  void run(int64_t batch_block, int64_t first_cell, int64_t last_cell) {
    first_ = plan_.first_block(first_cell);
    const int64_t end = plan_.first_block(last_cell);
    load_parameters(end);
    const int64_t last_batch = scan_min(p_.batch, (batch_block + 1) * plan_.batch_rows);
    for (int64_t batch = batch_block * plan_.batch_rows; batch < last_batch; ++batch) {
      pass_through(batch, end);
      const int64_t row_blocks = ceil_div(p_.seqlen, plan_.block_rows);
      for (int64_t k = row_blocks - 1; k >= 0; --k) {
        time_ = k * plan_.block_rows;
        rows_ = static_cast<int>(scan_min(plan_.block_rows, p_.seqlen - time_));
        segments_.fill(p_, batch, time_, rows_);
        loaded_run_ = -1;
        for (int64_t cell = first_cell; cell < last_cell; ++cell) run_cell(batch, cell, end);
      }
    }
    for (int64_t block = first_; block < end; ++block) flush(batch_block, block);
  }

 private:
  static constexpr int width = Simd<T>::width;

  static void clear(T* to, int64_t vectors) {
    for (int64_t i = 0; i < vectors; ++i) store(to + i * width, zero<T>());
  }

  T* table(const Scratch<T>& of, int64_t block) const { return of.get() + (block - first_) * p_.dstate * width; }
  T* vector(const Scratch<T>& of, int64_t block) const { return of.get() + (block - first_) * width; }

  void load_parameters(int64_t end) {
    for (int64_t block = first_; block < end; ++block) {
      const int64_t channel = blocks_.channel(block);
      const int lanes = blocks_.lanes(block);
      load_A(table(A2_, block), p_, channel, lanes, T(1.44269504088896340736));
      load_parameter(vector(skip_, block), p_.D, channel, lanes);
      load_parameter(vector(bias_, block), p_.delta_bias, channel, lanes);
      clear(table(dA_, block), p_.dstate);
      if (!p_.B_varies) clear(table(constant_B_, block), p_.dstate);
      if (!p_.C_varies) clear(table(constant_C_, block), p_.dstate);
      store(vector(dD_, block), zero<T>());
      store(vector(dbias_, block), zero<T>());
    }
  }

  // The gradient of an empty sequence's state passes straight through.
  void pass_through(int64_t batch, int64_t end) {
    if (!p_.dinitial_state) return;
    const int64_t count = p_.cu_seqlens ? p_.num_sequences : 1;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t index = p_.cu_seqlens ? i : batch;
      if (!scan_is_empty(p_, index)) continue;
      for (int64_t block = first_; block < end; ++block) {
        load_states(states_.get(), p_.dlast_state, index, blocks_.channel(block), blocks_.lanes(block), p_.dstate);
        store_states(states_.get(), p_.dinitial_state, index, blocks_.channel(block), blocks_.lanes(block), p_.dstate);
      }
    }
  }

  // Tile by tile over the blocks of the cell, so that the lane partials of a tile stay in the cache until they are added up.
  void run_cell(int64_t batch, int64_t cell, int64_t end) {
    const int64_t first = plan_.first_block(cell), last = plan_.first_block(cell + 1);
    const int tiles = (rows_ + scan_tile_rows - 1) / scan_tile_rows;
    for (int k = tiles - 1; k >= 0; --k) {
      const int row = k * scan_tile_rows, rows = static_cast<int>(scan_min(scan_tile_rows, rows_ - row));
      for (int64_t block = first; block < last; ++block) {
        const int64_t channel = blocks_.channel(block);
        const int lanes = blocks_.lanes(block);
        if (blocks_.per_lane || block / blocks_.blocks_per_run != loaded_run_) {
          B_now_ = load_scan_rows(B_rows_.get(), p_, plan_.B, blocks_.per_lane, blocks_.packed, batch, channel, lanes, time_, rows_);
          C_now_ = load_scan_rows(C_rows_.get(), p_, plan_.C, blocks_.per_lane, blocks_.packed, batch, channel, lanes, time_, rows_);
          loaded_run_ = block / blocks_.blocks_per_run;
        }
        ahead_.clear();
        if (block + 1 < last)
          look_ahead(batch, blocks_.channel(block + 1), time_ + row);
        else if (k > 0)
          look_ahead(batch, blocks_.channel(first), time_ + row - scan_tile_rows);
        else if (last < end)
          look_ahead(batch, blocks_.channel(last), time_ + (tiles - 1) * scan_tile_rows);
        else if (time_ > 0)
          look_ahead(batch, blocks_.channel(first_), time_ - scan_tile_rows);
        fresh_ = block == first;
        if (fresh_) clear_padding(row, rows);
        tile(batch, block, channel, lanes, row, rows);
      }
      if (p_.B_varies) add_lanes(dB_.get(), sums_B_.get(), row, rows);
      if (p_.C_varies) add_lanes(dC_.get(), sums_C_.get(), row, rows);
    }
    if (p_.B_varies) store_sums(sums_B_.get(), dB_.get(), plan_.B, p_.dB, parts_.B.get(), batch, cell);
    if (p_.C_varies) store_sums(sums_C_.get(), dC_.get(), plan_.C, p_.dC, parts_.C.get(), batch, cell);
  }

  // Padding rows are never visited; the first block that adds to the lane partials sets all others.
  void clear_padding(int row, int rows) {
    const int64_t from = scan_max(0, scan_min(rows, segments_.valid - row)) * p_.dstate;
    if (p_.B_varies) clear(dB_.get() + from * width, rows * p_.dstate - from);
    if (p_.C_varies) clear(dC_.get() + from * width, rows * p_.dstate - from);
  }

  // The tile that comes next.
  void look_ahead(int64_t batch, int64_t channel, int64_t time) {
    const int rows = static_cast<int>(scan_min(scan_tile_rows, p_.seqlen - time)),
              lanes = static_cast<int>(scan_min(width, p_.dim - channel));
    for (const View<3>* view : {&p_.delta, &p_.z, &p_.dout, &p_.u}) ahead_.add(*view, batch, channel, time, rows, lanes);
    ahead_.add(chunk_state<const T>(p_, batch, time, channel) + lanes - 1, p_.dim * sizeof(T), p_.dstate);
    if (!stream_du_) ahead_.add(p_.du, batch, channel, time, rows, lanes);
    if (!stream_ddelta_) ahead_.add(p_.ddelta, batch, channel, time, rows, lanes);
    if (!stream_dz_) ahead_.add(p_.dz, batch, channel, time, rows, lanes);
  }

  // Adds up the lanes of rows [row, row + rows): sums[row][n] = the sum of a vector of `partials`.
  void add_lanes(const T* partials, T* sums, int row, int rows) {
    if (blocks_.packed) return;
    const int64_t count = rows * p_.dstate;
    T* to = sums + row * p_.dstate;
    for (int64_t j = 0; j < count; j += width) {
      Vec<T> v[width];
      for (int i = 0; i < width; ++i) v[i] = load(partials + (j + i) * width);
      const Vec<T> added = sum_each(v);
      if (j + width <= count)
        store(to + j, added);
      else
        store_partial(to + j, added, static_cast<int>(count - j));
    }
  }

  // The sums of a cell -> dB or dC rows of its group, or the cell's part of them. A packed block has several groups.
  void store_sums(T* sums, const T* partials, const ScanMatrix& matrix, const View<4>& to, T* parts, int64_t batch, int64_t cell) {
    const int64_t count = rows_ * p_.dstate, channel = blocks_.channel(plan_.first_block(cell));
    if (blocks_.packed) {
      const int lanes = blocks_.lanes(plan_.first_block(cell)), size = static_cast<int>(matrix.group_size);
      for (int lane = 0; lane < lanes; lane += size) {
        for (int64_t j = 0; j < count; ++j) {
          T sum = 0;
          for (int i = 0; i < size; ++i) sum += partials[j * width + lane + i];
          sums[j] = sum;
        }
        store_matrix_rows(sums, to, batch, matrix.group(channel + lane), time_, rows_, p_.dstate);
      }
    } else if (parts) {
      __builtin_memcpy(parts + ((batch * plan_.cells + cell) * p_.seqlen + time_) * p_.dstate, sums, count * sizeof(T));
    } else {
      store_matrix_rows(sums, to, batch, matrix.group(channel), time_, rows_, p_.dstate);
    }
  }

  static TileRows<T> rows_of(T* tile, const View<3>& view, int64_t batch, int64_t channel, int64_t time, int rows, int lanes) {
    return tile_rows(tile, address(view, batch, channel, time), view.dtype, view.stride[2], view.stride[1], rows, lanes);
  }

  // Rows [row, row + rows) of the row block.
  void tile(int64_t batch, int64_t block, int64_t channel, int lanes, int row, int rows) {
    const int64_t time = time_ + row;
    const TileRows<T> delta_in = rows_of(delta_, p_.delta, batch, channel, time, rows, lanes);
    const Vec<T> bias = load(vector(bias_, block));
    BackwardTile<T> tile{{delta_, width}, rows_of(u_, p_.u, batch, channel, time, rows, lanes), {g_, width}, y_, s1_, s2_, nullptr,
                         nullptr};
    for (int i = 0; i < rows; ++i) {
      const Vec<T> e = delta_in[i] + bias;
      const WithSlope<Vec<T>> delta = p_.delta_softplus ? softplus_with_slope(e) : WithSlope<Vec<T>>{e, broadcast<T>(1)};
      store(delta_ + i * width, delta.value);
      store(slope_ + i * width, delta.slope);
    }
    if (!p_.dout) {
      for (int i = 0; i < rows; ++i) store(g_ + i * width, zero<T>());
    } else {
      tile.g = rows_of(g_, p_.dout, batch, channel, time, rows, lanes);
    }
    if (p_.z) {
      const TileRows<T> z = rows_of(dz_, p_.z, batch, channel, time, rows, lanes);
      for (int i = 0; i < rows; ++i) {
        const WithSlope<Vec<T>> gate = silu_with_slope(z[i]);
        const Vec<T> dout = tile.g[i];
        store(g_ + i * width, dout * gate.value);
        store(dz_ + i * width, dout * gate.slope);
      }
      tile.g = {g_, width};
    }
    const TileTarget<T> du(du_, p_.du, batch, channel, time, lanes, stream_du_);
    const TileTarget<T> ddelta(delta_, p_.ddelta, batch, channel, time, lanes, stream_ddelta_);
    const TileTarget<T> dz(dz_, p_.dz, batch, channel, time, lanes, stream_dz_);
    const BackwardEnd<T> end{
        du.rows, ddelta.rows, dz.rows, slope_, p_.z ? dz_ : nullptr, vector(skip_, block), vector(dD_, block), vector(dbias_, block)};
    tile.end = &end;
    const int valid = static_cast<int>(scan_max(0, scan_min(rows, segments_.valid - row)));
    spans(tile, batch, block, channel, lanes, row, row + valid);
    ahead_.ask_for_the_rest();
    for (int i = valid; i < rows; ++i) {
      du.rows.put(i, zero<T>());
      ddelta.rows.put(i, zero<T>());
      if (p_.z) dz.rows.put(i, zero<T>());
    }
    du.finish(rows);
    ddelta.finish(rows);
    dz.finish(rows);
  }

  // The rows [row, valid) of the row block, from the last span (a piece of one segment) to the first.
  void spans(const BackwardTile<T>& tile, int64_t batch, int64_t block, int64_t channel, int lanes, int row, int valid) {
    int8_t starts[scan_tile_rows + 1];
    int count = 0;
    for (int from = row; from < valid; from = segments_.next(from, valid)) {
      starts[count++] = static_cast<int8_t>(from - row);
    }
    T* lambda = table(lambda_, block);
    for (int k = count - 1; k >= 0; --k) {
      const int from = row + starts[k], to = k + 1 < count ? row + starts[k + 1] : valid;
      const int64_t start = segments_.start[from], end = segments_.end[to - 1];
      if (start != ScanSegments::inside) {
        load_states(states_.get(), p_.initial_state, start, channel, lanes, p_.dstate);
      } else {
        load_tile(states_.get(), chunk_state<const T>(p_, batch, time_ + from, channel),
                  std::is_same_v<T, double> ? DType::f64 : DType::f32, p_.dim, 1, static_cast<int>(p_.dstate), lanes);
      }
      if (end != ScanSegments::inside) load_states(lambda, p_.dlast_state, end, channel, lanes, p_.dstate);
      span(tile, block, starts[k], to - from, from);
      if (start != ScanSegments::inside) {
        store_states(lambda, p_.dinitial_state, start, channel, lanes, p_.dstate);
        clear(lambda, p_.dstate);
      }
    }
  }

  // Tile rows [in_tile, in_tile + rows), rows of B and C from `in_block` on.
  void span(const BackwardTile<T>& tile, int64_t block, int in_tile, int rows, int in_block) {
    const auto from = [&](TileRows<T> r) { return TileRows<T>{r.data + in_tile * r.pitch, r.pitch}; };
    const int64_t at = in_tile * width;
    const BackwardEnd<T> end = tile.end->from(in_tile);
    BackwardTile<T> piece{from(tile.delta), from(tile.u), from(tile.g), tile.y + at, tile.s1 + at, tile.s2 + at, nullptr, nullptr};
    const T* A2 = table(A2_, block);
    T *lambda = table(lambda_, block), *dA = table(dA_, block);
    const int64_t row_step = p_.dstate * width;
    const auto sums = [&](bool varies, const Scratch<T>& lane_partials, const Scratch<T>& constant) -> LaneSums<T> {
      T* to = varies ? lane_partials.get() + in_tile * row_step : table(constant, block);
      const int64_t step = varies ? row_step : 0;
      const bool fresh = varies && fresh_;
      return {to, step, fresh ? zeros_.get() : to, fresh ? 0 : step};
    };
    const LaneSums<T> dB = sums(p_.B_varies, dB_, constant_B_), dC = sums(p_.C_varies, dC_, constant_C_);
    const ScanRows<T> B{B_now_.data + in_block * B_now_.row_step, B_now_.row_step, B_now_.state_step};
    const ScanRows<T> C{C_now_.data + in_block * C_now_.row_step, C_now_.row_step, C_now_.state_step};
    for_state_pieces<backward_states_in_registers>(p_.dstate, [&](int64_t n, auto count) __attribute__((always_inline)) {
      if (n + count == p_.dstate) piece.end = &end;
      piece.ahead = ahead_.take(2 * rows);
      const auto core =
          blocks_.per_lane ? scan_states_backward<decltype(count)::value, true, T> : scan_states_backward<decltype(count)::value, false, T>;
      core(piece, rows, n == 0, A2 + n * width, states_.get() + n * width, lambda + n * width, dA + n * width,
           {B.data + n * B.state_step, B.row_step, B.state_step}, {C.data + n * C.state_step, C.row_step, C.state_step},
           {dB.data + n * width, dB.row_step, dB.before + n * width, dB.before_step},
           {dC.data + n * width, dC.row_step, dC.before + n * width, dC.before_step}, kept_.get());
    });
  }

  // The sums of one block over the batch block, into the gradients or the parts.
  void flush(int64_t batch_block, int64_t block) {
    const int64_t channel = blocks_.channel(block), part = batch_block * blocks_.count + block, size = p_.dstate * width;
    const int lanes = blocks_.lanes(block);
    const bool direct = plan_.batch_blocks == 1;
    const auto matrix = [&](const Scratch<T>& sums, const View<2>& to, const Scratch<T>& parts) {
      if (direct)
        store_parameter(table(sums, block), to, channel, lanes, p_.dstate);
      else if (size > 0)
        __builtin_memcpy(parts.get() + part * size, table(sums, block), size * sizeof(T));
    };
    const auto line = [&](const Scratch<T>& sums, const View<1>& to, const Scratch<T>& parts) {
      if (direct)
        store_tile(vector(sums, block), address(to, channel), to.dtype, 0, to.stride[0], 1, lanes);
      else
        store(parts.get() + part * width, load(vector(sums, block)));
    };
    matrix(dA_, p_.dA, parts_.dA);
    if (!p_.B_varies) matrix(constant_B_, constant_matrix(p_.dB), parts_.constant_B);
    if (!p_.C_varies) matrix(constant_C_, constant_matrix(p_.dC), parts_.constant_C);
    if (p_.dD) line(dD_, p_.dD, parts_.dD);
    if (p_.ddelta_bias) line(dbias_, p_.ddelta_bias, parts_.bias);
  }

  const SelectiveScanBwd& p_;
  const BackwardPlan<T>& plan_;
  const ScanBlocks<T>& blocks_;
  const BackwardParts<T>& parts_;
  const bool stream_du_, stream_ddelta_, stream_dz_;
  const Scratch<T> A2_, lambda_, dA_, constant_B_, constant_C_, skip_, bias_, dD_, dbias_, B_rows_, C_rows_, dB_, dC_, sums_B_, sums_C_,
      states_, zeros_, kept_;
  ScanRows<T> B_now_{}, C_now_{};
  int64_t first_ = 0, time_ = 0, loaded_run_ = -1;
  int rows_ = 0;
  bool fresh_ = false;  // nothing was added to the lane partials yet
  ScanSegments segments_;
  ScanAhead<backward_lines_per_row> ahead_;
  alignas(64) T delta_[scan_tile_rows * width];
  alignas(64) T slope_[scan_tile_rows * width];
  alignas(64) T u_[scan_tile_rows * width];
  alignas(64) T g_[scan_tile_rows * width];
  alignas(64) T dz_[scan_tile_rows * width];
  alignas(64) T du_[scan_tile_rows * width];
  alignas(64) T y_[scan_tile_rows * width];
  alignas(64) T s1_[scan_tile_rows * width];
  alignas(64) T s2_[scan_tile_rows * width];
};

// Items are (batch block, cell); a thread takes neighbouring cells of a batch block together, as many as its tables hold.
template <class T>
void backward(const SelectiveScanBwd& p) {
  const BackwardPlan<T> plan(p);
  const BackwardParts<T> parts(p, plan);
  const int64_t cell_blocks = ceil_div(plan.blocks.blocks_per_run, plan.cells_per_run);
  const int64_t most_cells = scan_max(1, 65536 / scan_max(1, p.dstate * cell_blocks * Simd<T>::width));
  parallel_for(plan.batch_blocks * plan.cells, [&](int64_t begin, int64_t end) {
    const FlushSubnormals flush;
    Backward<T> work(p, plan, parts, scan_min(most_cells, plan.cells) * cell_blocks);
    while (begin < end) {
      const int64_t batch_block = begin / plan.cells, cell = begin % plan.cells;
      const int64_t count = scan_min(most_cells, scan_min(plan.cells - cell, end - begin));
      work.run(batch_block, cell, cell + count);
      begin += count;
    }
    end_streaming();
  });
  Merge<T>(p, plan, parts).run();
}

}  // namespace

void selective_scan_bwd(const SelectiveScanBwd& p) {
  if (p.dim == 0) return;
  dispatch_accumulate(p.u.dtype, [&](auto tag) { backward<typename decltype(tag)::type>(p); });
}

}  // namespace mamba::cpu::MAMBA_CPU_LEVEL
