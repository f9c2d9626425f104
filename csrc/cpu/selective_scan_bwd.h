// The pieces of the selective scan's backward: the recurrence and its adjoint, and the two-stage reductions (how the work is cut, where
// partial sums go, how they are added up).
#pragma once

#include "cpu/selective_scan.h"

namespace mamba::cpu::MAMBA_CPU_LEVEL {

inline constexpr int backward_states_in_registers = 8;
inline constexpr int backward_lines_per_row = 3;

// What follows the last piece of states, row by row:
//   du = D g + delta s1;   ddelta = (u s1 + s2) softplus';   dz = dout silu' (y + D u)
template <class T>
struct BackwardEnd {
  TargetRows<T> du, ddelta, dz;
  const T *slope, *gate;  // softplus'; dout silu', null without z
  const T* skip;
  T *dD, *dbias;  // sums

  MAMBA_INLINE BackwardEnd from(int row) const {
    constexpr int width = Simd<T>::width;
    return {du.from(row), ddelta.from(row), dz.from(row), slope + row * width, gate ? gate + row * width : nullptr, skip, dD, dbias};
  }
};

// What one piece of states reads and writes, row by row. `y`, `s1` and `s2` accumulate over pieces: y = sum C h, s1 = sum lambda B,
// s2 = sum lambda A w (A in units of log 2).
template <class T>
struct BackwardTile {
  TileRows<T> delta, u, g;
  T *y, *s1, *s2;
  const BackwardEnd<T>* end;  // of the last piece
  const void* const* ahead;
};

// A matrix of sums that grows with every row: vector (row, n) stands at data + row * row_step + n * width. `before` is the same, or zeros
// for the first block that adds to it.
template <class T>
struct LaneSums {
  T* data;
  int64_t row_step;
  const T* before;
  int64_t before_step;
};

// For `Count` states and up to scan_tile_rows rows, from the states that enter the first row and the adjoint that leaves the last:
//   w = exp(delta A) h;   h = w + delta u B;   lambda = g C + (a lambda of the next row)
//   dA += lambda delta w;   dB += lambda delta u;   dC += g h
template <int Count, bool PerLane, class T>
__attribute__((noinline)) void scan_states_backward(const BackwardTile<T>& tile, int rows, bool first, const T* A2, const T* states,
                                                    T* lambda, T* dA, ScanRows<T> B, ScanRows<T> C, LaneSums<T> dB, LaneSums<T> dC,
                                                    T* buffer) {
  constexpr int width = Simd<T>::width;
  constexpr T ln2 = T(0.693147180559945309417);
  const bool last = tile.end != nullptr;
  const BackwardEnd<T> end = last ? *tile.end : BackwardEnd<T>{};
  const Vec<T> skip = last ? load(end.skip) : zero<T>();
  {
    Vec<T> h[Count + 1];
    unroll<Count>([&](auto n) __attribute__((always_inline)) { h[n] = load(states + n * width); });
    for (int i = 0; i < rows; ++i) {
      const Vec<T> delta = tile.delta[i], u = tile.u[i], g = tile.g[i], delta_u = delta * u;
      const T *b_row = B.data + i * B.row_step, *c_row = C.data + i * C.row_step;
      T *kept = buffer + i * 2 * Count * width, *dC_row = dC.data + i * dC.row_step;
      const T* dC_before = dC.before + i * dC.before_step;
      ask_for_lines<backward_lines_per_row>(tile.ahead, i);
      Vec<T> y = first ? zero<T>() : load(tile.y + i * width);
      unroll<Count>([&](auto n) __attribute__((always_inline)) {
        const Vec<T> b = PerLane ? load(b_row + n * width) : broadcast<T>(b_row[n]);
        const Vec<T> c = PerLane ? load(c_row + n * width) : broadcast<T>(c_row[n]);
        const Vec<T> a = exp2(delta * load(A2 + n * width));
        const Vec<T> w = a * h[n];
        store(kept + (2 * n) * width, a);
        store(kept + (2 * n + 1) * width, w);
        h[n] = w + delta_u * b;
        y += c * h[n];
        store(dC_row + n * width, load(dC_before + n * width) + g * h[n]);
      });
      if (!last)
        store(tile.y + i * width, y);
      else if (end.gate)
        end.dz.put(i, load(end.gate + i * width) * (y + skip * u));
    }
  }
  Vec<T> next[Count + 1], sum_A[Count + 1], dD = last ? load(end.dD) : zero<T>(), dbias = last ? load(end.dbias) : zero<T>();
  unroll<Count>([&](auto n) __attribute__((always_inline)) {
    next[n] = load(lambda + n * width);
    sum_A[n] = load(dA + n * width);
  });
  for (int i = rows - 1; i >= 0; --i) {
    const Vec<T> delta = tile.delta[i], u = tile.u[i], g = tile.g[i], delta_u = delta * u;
    const T *b_row = B.data + i * B.row_step, *c_row = C.data + i * C.row_step, *kept = buffer + i * 2 * Count * width;
    T* dB_row = dB.data + i * dB.row_step;
    const T* dB_before = dB.before + i * dB.before_step;
    ask_for_lines<backward_lines_per_row>(tile.ahead, 2 * rows - 1 - i);
    Vec<T> s1 = first ? zero<T>() : load(tile.s1 + i * width), s2 = first ? zero<T>() : load(tile.s2 + i * width);
    unroll<Count>([&](auto n) __attribute__((always_inline)) {
      const Vec<T> b = PerLane ? load(b_row + n * width) : broadcast<T>(b_row[n]);
      const Vec<T> c = PerLane ? load(c_row + n * width) : broadcast<T>(c_row[n]);
      const Vec<T> l = g * c + next[n];
      const Vec<T> lw = l * load(kept + (2 * n + 1) * width);
      s1 += l * b;
      s2 += lw * load(A2 + n * width);
      sum_A[n] += lw * delta;
      store(dB_row + n * width, load(dB_before + n * width) + l * delta_u);
      next[n] = l * load(kept + (2 * n) * width);
    });
    if (last) {
      const Vec<T> ddelta = (u * s1 + ln2 * s2) * load(end.slope + i * width);
      end.du.put(i, skip * g + delta * s1);
      end.ddelta.put(i, ddelta);
      dD += g * u;
      dbias += ddelta;
    } else {
      store(tile.s1 + i * width, s1);
      store(tile.s2 + i * width, s2);
    }
  }
  if (last) {
    store(end.dD, dD);
    store(end.dbias, dbias);
  }
  unroll<Count>([&](auto n) __attribute__((always_inline)) {
    store(lambda + n * width, next[n]);
    store(dA + n * width, sum_A[n]);
  });
}

// How the work is cut, and where partial sums go. Depends on the shape only.
template <class T>
struct BackwardPlan {
  static constexpr int width = Simd<T>::width;
  ScanBlocks<T> blocks;
  int block_rows;
  ScanMatrix B, C;
  int64_t cells_per_run, cells;
  int64_t batch_rows, batch_blocks;  // batch rows of a block, and blocks
  int64_t cells_B, cells_C;          // cells that share a group: above 1, dB (dC) of each cell goes to a buffer first

  explicit BackwardPlan(const SelectiveScanBwd& p)
      : blocks(p), B(scan_matrix(p, p.B, p.B_varies, p.ngroups_B)), C(scan_matrix(p, p.C, p.C_varies, p.ngroups_C)) {
    const int64_t cell_blocks = blocks.packed ? 1 : ceil_div(scan_max(128, 4 * p.dstate), width);
    cells_per_run = ceil_div(blocks.blocks_per_run, cell_blocks);
    const int64_t runs = blocks.count / blocks.blocks_per_run;
    cells = runs * cells_per_run;
    cells_B = B.varies && !blocks.packed ? B.group_size / blocks.run * cells_per_run : 1;
    cells_C = C.varies && !blocks.packed ? C.group_size / blocks.run * cells_per_run : 1;
    // At most 32 blocks, and sums of dA no larger than a quarter of u.
    batch_rows = scan_max(1, scan_max(ceil_div(p.batch, 32), ceil_div(4 * p.dstate, scan_max(1, p.seqlen))));
    batch_blocks = ceil_div(p.batch, batch_rows);
    block_rows = scan_block_rows(p, blocks.per_lane);
  }

  MAMBA_INLINE int64_t first_block(int64_t cell) const {
    const int64_t in_run = cell % cells_per_run;
    return cell / cells_per_run * blocks.blocks_per_run + in_run * blocks.blocks_per_run / cells_per_run;
  }
};

// Partial sums in memory; null where there is only one part, which is stored at once.
template <class T>
struct BackwardParts {
  Scratch<T> B, C;                        // [batch][cell][seqlen][dstate]
  Scratch<T> dA, constant_B, constant_C;  // [batch block][block][dstate][width]
  Scratch<T> dD, bias;                    // [batch block][block][width]

  BackwardParts(const SelectiveScanBwd& p, const BackwardPlan<T>& plan)
      : B(plan.cells_B > 1 ? p.batch * plan.cells * p.seqlen * p.dstate : 0),
        C(plan.cells_C > 1 ? p.batch * plan.cells * p.seqlen * p.dstate : 0),
        dA(table(plan) * p.dstate),
        constant_B(p.B_varies ? 0 : table(plan) * p.dstate),
        constant_C(p.C_varies ? 0 : table(plan) * p.dstate),
        dD(p.D ? table(plan) : 0),
        bias(p.delta_bias ? table(plan) : 0) {}

 private:
  static int64_t table(const BackwardPlan<T>& plan) {
    return plan.batch_blocks > 1 ? plan.batch_blocks * plan.blocks.count * Simd<T>::width : 0;
  }
};

// Stores [dstate][width] sums of the channels of a block as (channel, n) of a parameter gradient.
template <class T>
inline void store_parameter(const T* sums, const View<2>& to, int64_t channel, int lanes, int64_t dstate) {
  store_tile(sums, address(to, channel, 0), to.dtype, to.stride[1], to.stride[0], static_cast<int>(dstate), lanes);
}

inline View<2> constant_matrix(const View<4>& v) { return {v.data, v.dtype, {v.stride[1], v.stride[2]}}; }

// Stores rows [begin, begin + rows) of dB or dC of one group from numbers [rows][dstate]; reads up to a vector beyond them.
template <class T>
inline void store_matrix_rows(const T* numbers, const View<4>& to, int64_t batch, int64_t group, int64_t begin, int rows, int64_t dstate) {
  constexpr int width = Simd<T>::width;
  for (int64_t n = 0; n < dstate; n += width) {
    store_tile(numbers + n, address(to, batch, group, n, begin), to.dtype, to.stride[3], to.stride[2], rows,
               static_cast<int>(scan_min(width, dstate - n)), dstate);
  }
}

// Adds up the parts, in order.
template <class T>
class Merge {
 public:
  Merge(const SelectiveScanBwd& p, const BackwardPlan<T>& plan, const BackwardParts<T>& parts) : p_(p), plan_(plan), parts_(parts) {}

  void run() {
    const int64_t blocks = plan_.batch_blocks != 1 ? plan_.blocks.count : 0;
    const int64_t times = ceil_div(p_.seqlen, rows);
    const int64_t items_B = plan_.cells_B > 1 ? p_.batch * p_.ngroups_B * times : 0,
                  items_C = plan_.cells_C > 1 ? p_.batch * p_.ngroups_C * times : 0;
    parallel_for(blocks + items_B + items_C, [&](int64_t begin, int64_t end) {
      const Scratch<T> sums(scan_max(p_.dstate * width, rows * p_.dstate) + width);
      for (int64_t i = begin; i < end; ++i) {
        if (i < blocks)
          block(i, sums.get());
        else if (i < blocks + items_B)
          matrix_rows(p_.dB, parts_.B.get(), p_.ngroups_B, plan_.cells_B, i - blocks, times, sums.get());
        else
          matrix_rows(p_.dC, parts_.C.get(), p_.ngroups_C, plan_.cells_C, i - blocks - items_B, times, sums.get());
      }
    });
  }

 private:
  static constexpr int width = Simd<T>::width;
  static constexpr int rows = 32;

  // sums[0..count) = the sum over k < parts of from[k * step + ...]
  static void add_up(T* sums, const T* from, int64_t parts, int64_t step, int64_t count) {
    int64_t j = 0;
    for (; j + width <= count; j += width) {
      Vec<T> sum = zero<T>();
      for (int64_t k = 0; k < parts; ++k) sum += load(from + k * step + j);
      store(sums + j, sum);
    }
    if (j == count) return;
    Vec<T> sum = zero<T>();
    for (int64_t k = 0; k < parts; ++k) sum += load_partial<T>(from + k * step + j, static_cast<int>(count - j));
    store(sums + j, sum);
  }

  void block(int64_t index, T* sums) const {
    const int64_t channel = plan_.blocks.channel(index), size = p_.dstate * width, count = plan_.blocks.count;
    const int lanes = plan_.blocks.lanes(index);
    const auto matrix = [&](const Scratch<T>& parts, const View<2>& to) {
      add_up(sums, parts.get() + index * size, plan_.batch_blocks, count * size, size);
      store_parameter(sums, to, channel, lanes, p_.dstate);
    };
    const auto line = [&](const Scratch<T>& parts, const View<1>& to) {
      add_up(sums, parts.get() + index * width, plan_.batch_blocks, count * width, width);
      store_tile(sums, address(to, channel), to.dtype, 0, to.stride[0], 1, lanes);
    };
    matrix(parts_.dA, p_.dA);
    if (!p_.B_varies) matrix(parts_.constant_B, constant_matrix(p_.dB));
    if (!p_.C_varies) matrix(parts_.constant_C, constant_matrix(p_.dC));
    if (p_.dD) line(parts_.dD, p_.dD);
    if (p_.ddelta_bias) line(parts_.bias, p_.ddelta_bias);
  }

  // `rows` times of one group of dB or dC.
  void matrix_rows(const View<4>& to, const T* parts, int64_t groups, int64_t cells, int64_t item, int64_t times, T* sums) const {
    const int64_t time = item % times * rows, group = item / times % groups, batch = item / times / groups;
    const int64_t count = scan_min(rows, p_.seqlen - time), step = p_.seqlen * p_.dstate;
    add_up(sums, parts + (batch * plan_.cells + group * cells) * step + time * p_.dstate, cells, step, count * p_.dstate);
    store_matrix_rows(sums, to, batch, group, time, static_cast<int>(count), p_.dstate);
  }

  const SelectiveScanBwd& p_;
  const BackwardPlan<T>& plan_;
  const BackwardParts<T>& parts_;
};

}  // namespace mamba::cpu::MAMBA_CPU_LEVEL
