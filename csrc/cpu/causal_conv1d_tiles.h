// causal_conv1d: how the work is cut up, and what forward and backward share.
// A run is a stretch of one row in which every sample sees the ones before it; runs are cut into tiles of consecutive time steps.
#pragma once

#include <type_traits>

#include "cpu/parallel.h"
#include "cpu/simd_math.h"
#include "cpu/stream.h"
#include "params/causal_conv1d.h"

namespace mamba::cpu::MAMBA_CPU_LEVEL {
namespace {

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

struct Tile {
  int64_t row;
  int64_t first, last;  // the run
  int64_t begin, end;   // the tile, a part of it
  int64_t initial;      // whose initial_state precedes the run; -1: zeros
  int64_t final;        // whose last_state holds the run's last samples; -1: nobody's
  bool padding;         // samples are not used, outputs are 0
};

// Calls f for every run, as a tile that covers it; rows and runs in order.
template <class Params, class F>
void for_each_run(const Params& p, F&& f) {
  auto run = [&](int64_t row, int64_t first, int64_t last, int64_t initial, int64_t final, bool padding) {
    if (first < last) f(Tile{row, first, last, first, last, initial, final, padding});
  };
  if (p.cu_seqlens) {
    int64_t first = 0;
    for (int64_t s = 0; s < p.num_sequences; ++s) {
      const int64_t last = load_index(p.cu_seqlens, s + 1);
      run(0, first, last, s, s, false);
      first = last;
    }
    return run(0, first, p.seqlen, -1, -1, true);
  }
  for (int64_t row = 0; row < p.batch; ++row) {
    int64_t first = 0, id = p.seq_idx && p.seqlen > 0 ? load_index(p.seq_idx, row, 0) : 0;
    for (int64_t t = 1; p.seq_idx && t < p.seqlen; ++t) {
      const int64_t next = load_index(p.seq_idx, row, t);
      if (next == id) continue;
      run(row, first, t, first == 0 ? row : -1, -1, id < 0);
      first = t;
      id = next;
    }
    run(row, first, p.seqlen, first == 0 ? row : -1, row, id < 0);
  }
}

class Tiles {
 public:
  template <class Params>
  Tiles(const Params& p, int64_t length) : count_(count(p, length)), tiles_(count_) {
    int64_t next = 0;
    for_each_run(p, [&](const Tile& run) {
      for (int64_t begin = run.first; begin < run.last; begin += length) {
        Tile tile = run;
        tile.begin = begin;
        tile.end = begin + length < run.last ? begin + length : run.last;
        tiles_.get()[next++] = tile;
      }
    });
  }

  int64_t count() const { return count_; }
  const Tile& operator[](int64_t i) const { return tiles_.get()[i]; }

 private:
  template <class Params>
  static int64_t count(const Params& p, int64_t length) {
    int64_t sum = 0;
    for_each_run(p, [&](const Tile& run) { sum += (run.last - run.first + length - 1) / length; });
    return sum;
  }

  int64_t count_;
  Scratch<Tile> tiles_;
};

constexpr int64_t short_row = 64;

// The orientation of the vectors, and how the time steps and channels are cut up.
struct Plan {
  bool channels;   // lanes are channels (channel-last memory, or short rows, which are transposed on their way), else time steps
  int64_t length;  // of a tile
  int64_t piece;   // steps of a tile that pass through the buffers at once
  int64_t chunk;   // channels a task goes through, tile by tile
  int64_t chunks;

  template <class Params>
  Plan(const Params& p, int vl, int64_t rows, int64_t most_tasks) {
    channels = (p.x.stride[1] == 1 && p.dim > 1) || (p.seqlen <= short_row && p.dim >= vl);
    // Channels: few rows, so that their pages stay within reach of the first-level cache while all channels are swept.
    // Time: whole rows, which lie behind one another in memory, unless there are too few of them for several threads.
    if (channels)
      length = p.dim >= 256 || p.dim == 0 ? rows : (rows * 256 / p.dim + rows - 1) / rows * rows;
    else
      length = p.batch * p.dim >= 64 ? int64_t{1} << 40 : 2048;
    if (length < 4 * p.width) length = 4 * p.width;
    piece = channels ? rows : 512;
    if (piece < 4 * p.width) piece = 4 * p.width;
    if (piece > p.seqlen) piece = p.seqlen;
    piece = (piece + vl - 1) / vl * vl;
    chunk = p.dim;
    const int64_t tiles = p.batch * ((p.seqlen + length - 1) / length);
    const int64_t wanted = tiles < most_tasks ? tiles : most_tasks;
    if (wanted > 0 && wanted < 32) {
      const int64_t unit = channels ? vl : 1;
      chunk = (chunk * wanted / 32 + unit - 1) / unit * unit;
      if (chunk < unit) chunk = unit;
    }
    if (!channels && chunk > 64) chunk = 64;  // whose sums along time stay in the first-level cache
    chunks = p.dim > 0 ? (p.dim + chunk - 1) / chunk : 0;
  }
};

// Calls f(Tag<S>{}, std::integral_constant<int, W>{}); W = 0 for a width without a special version.
template <class Params, class F>
void dispatch(const Params& params, F&& f) {
  dispatch_floating(params.x.dtype, [&](auto tag) {
    switch (params.width) {
      case 2: return f(tag, std::integral_constant<int, 2>{});
      case 3: return f(tag, std::integral_constant<int, 3>{});
      case 4: return f(tag, std::integral_constant<int, 4>{});
      default: return f(tag, std::integral_constant<int, 0>{});
    }
  });
}

}  // namespace
}  // namespace mamba::cpu::MAMBA_CPU_LEVEL
