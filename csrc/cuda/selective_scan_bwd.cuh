// The inner part of the backward scan: a tile of time in shared memory, and one chunk of it in registers.
#pragma once
#include "cuda/selective_scan.cuh"

namespace mamba::cuda {

constexpr int chunk = int(selective_scan_chunk_cuda), warps = scan_threads / 32;

// Partial sums. channel_sums: per (batch, split) dA, then dB, dC of constant B, C, each (dim, dstate), then dD, ddelta_bias (dim).
// projections: per (batch, block of channels, time) dB, then dC.
template <class T>
struct Partial {
  T *channel_sums, *projections;
};

MAMBA_INLINE int64_t channel_sums_size(const SelectiveScanInputs& p) { return p.dim * (3 * p.dstate + 2); }

template <class T>
struct BackwardTile {
  T *B, *C, *delta, *u, *gy, *lambda_B, *lambda_Aw, *y, *sums;  // sums: of a chunk, [warp][step][dB or dC][state]
  int pitch;

  static int64_t numbers(const ScanPlan& plan) {
    return 2 * plan.tile * plan.piece + 6 * plan.tile * (plan.channels + 1) + warps * chunk * 2 * plan.piece;
  }
  __device__ __forceinline__ explicit BackwardTile(const ScanPlan& plan) : pitch(plan.channels + 1) {
    const int rows = plan.tile * plan.piece, elements = plan.tile * pitch, all = warps * chunk * 2 * plan.piece;
    B = dynamic_shared<T>(2 * rows + 6 * elements + all);
    C = B + rows;
    sums = C + rows;
    delta = sums + all;
    u = delta + elements;
    gy = u + elements;
    lambda_B = gy + elements;
    lambda_Aw = lambda_B + elements;
    y = lambda_Aw + elements;
  }
};

// The times of a tile: `rows` from `begin` on, those from `valid` on behind the last sequence.
struct TileTimes {
  int64_t begin;
  int rows, valid;
};

__device__ __forceinline__ int64_t tiles_of(const ScanPlan& plan, const ScanPlace& at) {
  return (at.end - at.begin + plan.tile - 1) / plan.tile;
}

// Brings the split's tile `number`: its segments; u, delta and gy, 0 where there is no token. A barrier must follow.
template <class S, class T>
__device__ __forceinline__ TileTimes load_tile(const BackwardTile<T>& tile, const SelectiveScanBwd& p, const ScanPlan& plan,
                                               const ScanPlace& at, ScanShared<T>& shared, int64_t number) {
  const int64_t begin = at.begin + number * plan.tile;
  const int rows = int(smaller(plan.tile, at.end - begin));
  fill_segments(shared.segments, p, at.b, begin, rows);
  __syncthreads();
  const int valid = shared.segments.valid;
  each_pack<S>(p.u, plan.tile, at.count, [&](const ScanPack& pack) {
    T u[Pack<S>::size], delta[Pack<S>::size], gy[Pack<S>::size] = {};
    const int there = pack.before(valid);
    pack.load<S>(u, p.u, at, begin, there);
    pack.load<S>(delta, p.delta, at, begin, there);
    if (p.dout) pack.load<S>(gy, p.dout, at, begin, there);
    if (p.dout && p.z) {
      T z[Pack<S>::size];
      pack.load<S>(z, p.z, at, begin, there);
#pragma unroll
      for (int i = 0; i < Pack<S>::size; ++i) gy[i] = i < there ? gy[i] * silu(z[i]) : T(0);
    }
#pragma unroll
    for (int i = 0; i < Pack<S>::size; ++i) {
      if (i >= pack.count) break;
      const int to = pack.at(i, tile.pitch);
      tile.delta[to] = i < there ? step_size(p, delta[i], shared.parameters.delta_bias[pack.channel(i)]) : T(0);
      tile.u[to] = u[i];
      tile.gy[to] = gy[i];
      tile.lambda_B[to] = tile.lambda_Aw[to] = tile.y[to] = 0;
    }
  });
  return {begin, rows, valid};
}

// Sums 8 numbers over the warp's channels; lanes of one channel keep apart. Every level of the tree halves the numbers that a lane holds.
// At the end number `first` + i of the 8 stands in v[i], for i < the result.
template <class T>
__device__ __forceinline__ int sum_channels(T (&v)[8], int lanes, int& first) {
  const int lane = threadIdx.x % 32;
  first = 0;
#pragma unroll
  for (int half = 4, offset = 16; half > 0; half /= 2, offset /= 2) {
    if (offset < lanes) continue;
    const bool upper = lane & offset;
    if (upper) first += half;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const T send = upper ? v[i] : v[i + half], keep = upper ? v[i + half] : v[i];
      v[i] = keep + __shfl_xor_sync(all_lanes, send, offset);
    }
  }
  if (lanes <= 2) v[0] += __shfl_xor_sync(all_lanes, v[0], 2);
  if (lanes <= 1) v[0] += __shfl_xor_sync(all_lanes, v[0], 1);
  return lanes <= 4 ? 1 : lanes / 4;
}

// What a thread holds of its 4 states through the whole split (or one tile, where states are done in pieces).
template <class T>
struct Held {
  T g[scan_held] = {}, A[scan_held] = {}, B[scan_held] = {}, C[scan_held] = {};  // g = (a lambda) of the next time
  T dA[scan_held] = {}, dB[scan_held] = {}, dC[scan_held] = {};                  // dB, dC: of constant B and C
};

// Steps whose states stay in registers: with f64 a quarter of a chunk, so that the steps before it are run through again.
template <class T>
constexpr int kept_steps = sizeof(T) == 4 ? chunk : chunk / 4;

// `kept_steps` steps of a chunk, from `first` on (known when compiling, so that all indices into registers are), backwards. `h` is the
// state that enters the chunk at the tile's row `row`.
template <int first, class T>
__device__ __forceinline__ void scan_chunk(Held<T>& held, T (&h)[scan_held], const BackwardTile<T>& tile, const SelectiveScanBwd& p,
                                           const ScanPlan& plan, const ScanPlace& at, const ScanSegments& segments, int row, int64_t n,
                                           bool live) {
  const T ln2 = T(0.69314718055994530942);  // A holds A log2(e)
  constexpr int steps = kept_steps<T>;
  T a[steps][scan_held], w[steps][scan_held];
#pragma unroll
  for (int k = 0; k < first + steps; ++k) {
    const int t = row + k, i_tile = t * tile.pitch + at.slot;
    const bool token = t < segments.valid;
    if (k > 0 && token && segments.start[t] != scan_inside && live) enter_segment(h, p, segments.start[t], at.channel, n);
    T delta = 0, u = 0;
    Quad<T> b = {};
    if (at.inside) {
      delta = tile.delta[i_tile];
      u = tile.u[i_tile];
      if (p.B_varies) b = quad_at(tile.B + t * plan.piece + at.lane * scan_held);
    }
#pragma unroll
    for (int i = 0; i < scan_held; ++i) {
      const T decay = exp2_of(delta * held.A[i]), carried = decay * h[i];
      h[i] = carried + delta * u * (p.B_varies ? b.v[i] : held.B[i]);
      if (k >= first) {
        a[k < first ? 0 : k - first][i] = decay;
        w[k < first ? 0 : k - first][i] = carried;
      }
    }
  }
#pragma unroll
  for (int k = steps - 1; k >= 0; --k) {
    const int t = row + first + k, i_tile = t * tile.pitch + at.slot;
    const bool token = t < segments.valid;
    T delta = 0, u = 0, gy = 0, lambda_B = 0, lambda_Aw = 0, y = 0, sums[2 * scan_held];
    Quad<T> b = {}, c = {};
    if (at.inside) {
      delta = tile.delta[i_tile];
      u = tile.u[i_tile];
      gy = tile.gy[i_tile];
      if (p.B_varies) b = quad_at(tile.B + t * plan.piece + at.lane * scan_held);
      if (p.C_varies) c = quad_at(tile.C + t * plan.piece + at.lane * scan_held);
    }
    if (token && live && segments.end[t] != scan_inside) {
      for (int i = 0; i < scan_held; ++i) held.g[i] = 0;
      if (p.dlast_state) load_states(held.g, p.dlast_state, segments.end[t], at.channel, n, p.dstate);
    }
#pragma unroll
    for (int i = 0; i < scan_held; ++i) {
      const T B = p.B_varies ? b.v[i] : held.B[i], C = p.C_varies ? c.v[i] : held.C[i];
      const T lambda = held.g[i] + gy * C, state = w[k][i] + delta * u * B;
      lambda_B += lambda * B;
      lambda_Aw += lambda * held.A[i] * w[k][i];
      y += C * state;
      held.dA[i] += lambda * delta * w[k][i];
      sums[i] = lambda * delta * u;
      sums[scan_held + i] = gy * state;
      held.g[i] = a[k][i] * lambda;
    }
    if (token && segments.start[t] != scan_inside) {
      if (live && segments.start[t] >= 0 && p.dinitial_state)
        store_states(held.g, p.dinitial_state, segments.start[t], at.channel, n, p.dstate);
      for (int i = 0; i < scan_held; ++i) held.g[i] = 0;
    }
    if (!p.B_varies)
      for (int i = 0; i < scan_held; ++i) held.dB[i] += sums[i];
    if (!p.C_varies)
      for (int i = 0; i < scan_held; ++i) held.dC[i] += sums[scan_held + i];
    lambda_B = sum_lanes(lambda_B, plan.lanes);
    lambda_Aw = sum_lanes(lambda_Aw, plan.lanes);
    if (p.z) y = sum_lanes(y, plan.lanes);
    if (at.inside && at.lane == 0) {
      tile.lambda_B[i_tile] += lambda_B;
      tile.lambda_Aw[i_tile] += lambda_Aw * ln2;
      tile.y[i_tile] += y;
    }
    if (p.B_varies || p.C_varies) {
      int number;
      const int count = sum_channels(sums, plan.lanes, number), lane = threadIdx.x % 32;
      T* const to = tile.sums + (threadIdx.x / 32 * chunk + first + k) * 2 * plan.piece + at.lane * scan_held;
      if (plan.lanes >= 4 || lane % 4 < plan.lanes) {
#pragma unroll
        for (int i = 0; i < 2 * scan_held; ++i)
          if (i < count) to[(number + i) / scan_held * plan.piece + (number + i) % scan_held] = sums[i];
      }
    }
  }
}

// The whole chunk, piece by piece; its 4 states at the start are read from `saved`, `left` of them (the others are 0).
template <int first, class T>
__device__ __forceinline__ void scan_pieces(Held<T>& held, const T* saved, int64_t left, const BackwardTile<T>& tile,
                                            const SelectiveScanBwd& p, const ScanPlan& plan, const ScanPlace& at,
                                            const ScanSegments& segments, int row, int64_t n, bool live) {
  T h[scan_held];
  load_items(h, saved, 1, 0, left);
  scan_chunk<first>(held, h, tile, p, plan, at, segments, row, n, live);
  if constexpr (first > 0) scan_pieces<first - kept_steps<T>>(held, saved, left, tile, p, plan, at, segments, row, n, live);
}

}  // namespace mamba::cuda
