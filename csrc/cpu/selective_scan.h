// What the forward and the backward scan share: how channels map to lanes, where segments start and end, and the rows of B and C.
//
// Lanes are channels. A *block* is up to `width` channels; their states form a small matrix [dstate][width] that stays in the cache while
// time runs in short row blocks over all blocks of a thread. A *run* is a stretch of channels that share one group of every time-varying B
// and C.
#pragma once

#include "cpu/parallel.h"
#include "cpu/simd_math.h"
#include "cpu/tile.h"
#include "params/selective_scan.h"

namespace mamba::cpu::MAMBA_CPU_LEVEL {

inline constexpr int scan_max_rows = 128;  // upper limit of a row block

MAMBA_INLINE int64_t scan_min(int64_t a, int64_t b) { return a < b ? a : b; }
MAMBA_INLINE int64_t scan_max(int64_t a, int64_t b) { return a > b ? a : b; }
MAMBA_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

MAMBA_INLINE int64_t greatest_divisor(int64_t a, int64_t b) {
  while (b) {
    const int64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

// One of B and C. `per_lane` says how the inner loop reads it: false, one number for all lanes of a block (they share a group); true, a
// vector.
struct ScanMatrix {
  View<4> view;
  bool varies = true;
  int64_t group_size = 1;  // channels per group

  MAMBA_INLINE int64_t group(int64_t channel) const { return varies ? channel / group_size : channel; }
};

MAMBA_INLINE ScanMatrix scan_matrix(const SelectiveScanInputs& p, const View<4>& view, bool varies, int64_t ngroups) {
  return {view, varies, varies ? scan_max(1, p.dim / scan_max(1, ngroups)) : scan_max(1, p.dim)};
}

// Channels to lanes. Depends on the shape only.
template <class T>
struct ScanBlocks {
  int64_t run;   // channels of a run
  int64_t step;  // channels of a full block
  int64_t blocks_per_run;
  int64_t count;  // blocks in all
  bool per_lane;  // B and C are read as vectors: one of them is constant in time, or a block holds several whole groups
  bool packed;    // a block holds several whole groups of both

  explicit ScanBlocks(const SelectiveScanInputs& p) {
    constexpr int width = Simd<T>::width;
    const int64_t dim = scan_max(1, p.dim);
    const int64_t size_B = p.B_varies ? dim / p.ngroups_B : dim, size_C = p.C_varies ? dim / p.ngroups_C : dim;
    run = greatest_divisor(size_B, size_C);
    const int64_t unit = size_B / run * size_C;  // least common multiple
    packed = run < dim && unit <= width / 2;
    per_lane = packed || !p.B_varies || !p.C_varies;
    if (packed) run = dim;
    step = packed ? width / unit * unit : width;
    blocks_per_run = ceil_div(run, step);
    count = p.dim ? dim / run * blocks_per_run : 0;
  }

  MAMBA_INLINE int64_t channel(int64_t block) const { return block / blocks_per_run * run + block % blocks_per_run * step; }
  MAMBA_INLINE int lanes(int64_t block) const { return static_cast<int>(scan_min(step, run - block % blocks_per_run * step)); }
};

// Where segments start and end within a row block that begins at `begin`.
// start[i]: the index of the initial state that enters row i, `zero_state` where a segment starts from zero, `inside` elsewhere.
// end[i]: the index of the last state that row i completes, or `inside`.
struct ScanSegments {
  static constexpr int64_t inside = -2, zero_state = -1;
  int64_t start[scan_max_rows], end[scan_max_rows];
  int valid;  // rows from here on are padding behind the last sequence

  void fill(const SelectiveScanInputs& p, int64_t batch, int64_t begin, int rows) {
    valid = rows;
    for (int i = 0; i < rows; ++i) start[i] = end[i] = inside;
    if (p.cu_seqlens) {
      fill_packed(p, begin, rows);
      return;
    }
    if (begin == 0 && rows > 0) start[0] = batch;
    if (rows > 0 && begin + rows == p.seqlen) end[rows - 1] = batch;
    if (!p.seq_idx) return;
    for (int i = begin == 0 ? 1 : 0; i < rows; ++i) {
      if (load_index(p.seq_idx, batch, begin + i) != load_index(p.seq_idx, batch, begin + i - 1)) start[i] = zero_state;
    }
  }

  // The first row after `row` at which the state has to be looked at: a start, behind an end, or `limit`.
  int next(int row, int limit) const {
    int i = row + 1;
    while (i < limit && start[i] == inside && end[i - 1] == inside) ++i;
    return i;
  }

 private:
  void fill_packed(const SelectiveScanInputs& p, int64_t begin, int rows) {
    int64_t sequence = sequence_of(p.cu_seqlens, p.num_sequences, begin);
    for (int i = 0; i < rows; ++i) {
      while (sequence < p.num_sequences && load_index(p.cu_seqlens, sequence + 1) <= begin + i) ++sequence;
      if (sequence == p.num_sequences) {
        valid = i;
        return;
      }
      if (load_index(p.cu_seqlens, sequence) == begin + i) start[i] = sequence;
      if (load_index(p.cu_seqlens, sequence + 1) == begin + i + 1) end[i] = sequence;
    }
  }
};

// True where state `index` belongs to no token, so that it only passes through.
MAMBA_INLINE bool scan_is_empty(const SelectiveScanInputs& p, int64_t index) {
  return p.cu_seqlens ? load_index(p.cu_seqlens, index) == load_index(p.cu_seqlens, index + 1) : p.seqlen == 0;
}

// [dstate][width] of the channels of a block from a (batch or S, dim, dstate) tensor; zeros where there is none.
template <class T>
inline void load_states(T* states, const View<3>& view, int64_t index, int64_t channel, int lanes, int64_t dstate) {
  if (view && index >= 0) {
    load_tile(states, address(view, index, channel, 0), view.dtype, view.stride[2], view.stride[1], static_cast<int>(dstate), lanes);
  } else {
    for (int64_t n = 0; n < dstate; ++n) store(states + n * Simd<T>::width, zero<T>());
  }
}

template <class T>
inline void store_states(const T* states, const View<3>& view, int64_t index, int64_t channel, int lanes, int64_t dstate) {
  if (!view || index < 0) return;
  store_tile(states, address(view, index, channel, 0), view.dtype, view.stride[2], view.stride[1], static_cast<int>(dstate), lanes);
}

// [dstate][width] of A, and one vector of a parameter, for the channels of a block.
template <class T>
inline void load_A(T* to, const SelectiveScanInputs& p, int64_t channel, int lanes, T factor) {
  load_tile(to, address(p.A, channel, 0), p.A.dtype, p.A.stride[1], p.A.stride[0], static_cast<int>(p.dstate), lanes);
  for (int64_t i = 0; i < p.dstate; ++i) store(to + i * Simd<T>::width, load(to + i * Simd<T>::width) * factor);
}

template <class T>
inline void load_parameter(T* to, const View<1>& view, int64_t channel, int lanes) {
  if (view)
    load_tile(to, address(view, channel), view.dtype, 0, view.stride[0], 1, lanes);
  else
    store(to, zero<T>());
}

// The rows of B or C that an inner loop reads: entry (row, n) stands at data + row * row_step + n * state_step, a number or a vector.
template <class T>
struct ScanRows {
  T* data;
  int64_t row_step, state_step;
};

// Elements that a buffer for `rows` rows needs.
template <class T>
MAMBA_INLINE int64_t scan_rows_size(const SelectiveScanInputs& p, bool per_lane, int rows) {
  constexpr int width = Simd<T>::width;
  const int64_t padded = ceil_div(p.dstate, width) * width;
  return (per_lane ? rows * p.dstate * width : 0) + (rows + 1) * padded + width;
}

// Loads rows [begin, begin + rows) for the channels of a block (with per_lane false: for all blocks of its run).
template <class T>
inline ScanRows<T> load_scan_rows(T* buffer, const SelectiveScanInputs& p, const ScanMatrix& matrix, bool per_lane, bool packed,
                                  int64_t batch, int64_t channel, int lanes, int64_t begin, int rows) {
  constexpr int width = Simd<T>::width;
  const View<4>& v = matrix.view;
  const int64_t dstate = p.dstate;
  if (!matrix.varies) {
    load_tile(buffer, address(v, 0, channel, 0, 0), v.dtype, v.stride[2], v.stride[1], static_cast<int>(dstate), lanes);
    return {buffer, 0, width};
  }
  const int64_t pitch = ceil_div(dstate, width) * width;
  T* flat = per_lane ? buffer + rows * dstate * width : buffer;
  const auto load_group = [&](int64_t group) {
    for (int64_t n = 0; n < dstate; n += width) {
      load_tile(flat + n, address(v, batch, group, n, begin), v.dtype, v.stride[3], v.stride[2], rows,
                static_cast<int>(scan_min(width, dstate - n)), pitch);
    }
  };
  load_group(matrix.group(channel));
  if (!per_lane) return {flat, pitch, 1};
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t n = 0; n < dstate; ++n) store(buffer + (i * dstate + n) * width, broadcast<T>(flat[i * pitch + n]));
  }
  for (int lane = 1; packed && lane < lanes; ++lane) {
    if (matrix.group(channel + lane) != matrix.group(channel + lane - 1)) load_group(matrix.group(channel + lane));
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t n = 0; n < dstate; ++n) buffer[(i * dstate + n) * width + lane] = flat[i * pitch + n];
    }
  }
  return {buffer, dstate * width, width};
}

// Rows of a tile, which are a chunk of the backward too.
inline constexpr int scan_tile_rows = static_cast<int>(selective_scan_chunk_cpu);

// Where the state of `channel` that enters the tile at `time` is kept: (batch, tile, dstate, dim).
template <class T, class Params>
MAMBA_INLINE T* chunk_state(const Params& p, int64_t batch, int64_t time, int64_t channel) {
  const int64_t tile = batch * ceil_div(p.seqlen, scan_tile_rows) + time / scan_tile_rows;
  return static_cast<T*>(p.chunk_states) + tile * p.dstate * p.dim + channel;
}

// Rows of a block of time over all channels: one tile, so that each page of (seqlen, dim) memory is used while it is mapped, or several
// where time is contiguous. Results do not depend on the choice.
inline int scan_block_rows(const SelectiveScanInputs& p, bool per_lane) {
  const bool along_time = p.u.stride[2] == 1 && p.u.stride[1] != 1;
  const int64_t tiles = along_time && !per_lane ? scan_min(scan_max_rows, 4096 / scan_max(1, p.dstate)) / scan_tile_rows : 1;
  return static_cast<int>(scan_max(1, tiles)) * scan_tile_rows;
}

// Cache lines to ask for while the recurrence runs, `PerRow` in every row: tiles walk through one line per page, which hardware
// prefetchers do not follow, and asking for many lines at once stalls. They go to the second-level cache: the lines of a tile often share
// few sets of the first, where they would push each other out.
template <int PerRow>
class ScanAhead {
 public:
  void clear() { count_ = next_ = 0; }

  // One tile of a (batch, dim, seqlen) tensor whose rows (or channels) are contiguous; lines are counted from the last element of each.
  void add(const View<3>& view, int64_t batch, int64_t channel, int64_t time, int rows, int lanes) {
    if (!view) return;
    const bool along_lanes = view.stride[1] == 1;
    if (!along_lanes && view.stride[2] != 1) return;
    const int64_t size = size_of(view.dtype), bytes = (along_lanes ? lanes : rows) * size;
    const char* last = static_cast<const char*>(address(view, batch, channel, time)) + bytes - size;
    for (int64_t back = 0; back < bytes; back += 64) add(last - back, view.stride[along_lanes ? 2 : 1] * size, along_lanes ? rows : lanes);
  }

  void add(const void* first, int64_t bytes_apart, int64_t count) {
    const int64_t room = scan_min(count, most - count_);
    Addresses at = Addresses{0, 1, 2, 3, 4, 5, 6, 7} * bytes_apart + reinterpret_cast<int64_t>(first);
    for (int64_t i = 0; i < room; i += 8, at += 8 * bytes_apart) __builtin_memcpy(lines_ + count_ + i, &at, sizeof at);
    count_ += static_cast<int>(scan_max(0, room));
  }

  // The list for `rows` rows (PerRow entries each), or null when all lines were asked for.
  const void* const* take(int rows) {
    if (next_ >= count_) return nullptr;
    const void* const* list = lines_ + next_;
    next_ += rows * PerRow;
    for (int i = count_; i < next_; ++i) lines_[i] = lines_[count_ - 1];
    return list;
  }

  MAMBA_INLINE void ask_for_the_rest() {
    for (; next_ < count_; ++next_) __builtin_prefetch(lines_[next_], 0, 2);
  }

 private:
  using Addresses = VectorOf<int64_t, 8>::type;
  static_assert(sizeof(void*) == sizeof(int64_t));
  static constexpr int most = 384;
  int count_ = 0, next_ = 0;
  const void* lines_[most + 2 * 32 * PerRow];
};

template <int PerRow>
MAMBA_INLINE void ask_for_lines(const void* const* list, int row) {
  if (!list) return;
#pragma GCC unroll 8
  for (int k = 0; k < PerRow; ++k) __builtin_prefetch(list[row * PerRow + k], 0, 2);
}

// Calls core(first, std::integral_constant<int, count>) for the states 0..dstate-1 in register-sized pieces; once where there are none.
template <int Most, class F>
MAMBA_INLINE void for_state_pieces(int64_t dstate, F&& core) {
  if (dstate == 0) return core(0, std::integral_constant<int, 0>{});
  int64_t n = 0;
  for (; n + Most <= dstate; n += Most) core(n, std::integral_constant<int, Most>{});
  for (; n + 4 <= dstate; n += 4) core(n, std::integral_constant<int, 4>{});
  for (; n < dstate; ++n) core(n, std::integral_constant<int, 1>{});
}

}  // namespace mamba::cpu::MAMBA_CPU_LEVEL
