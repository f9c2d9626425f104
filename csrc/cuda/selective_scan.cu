// Selective scan forward; selective_scan.cuh says the plan.
//
// Bytes per token and channel, bf16: u, delta, z read and out written: 8, and B and C (4 dstate bytes a token and group, read by every
// block of 32 channels, mostly from L2). Saving states for the backward adds dstate / 2 (one f32 state every 8 tokens). With 16 states the
// exponentials decide (17 a token and channel, against 8 bytes): 60-70 % of the rate of the special-function units expected, 25-30 % of the
// copy bandwidth; with 4 states or fewer the bandwidth decides.
#include "cuda/selective_scan.cuh"

namespace mamba::cuda {
namespace {

// The tile in shared memory: delta, delta u, y as [time][channel], B and C as [time][state].
template <class T>
struct ForwardTile {
  T *B, *C, *delta, *delta_u, *y;
  int pitch;

  static int64_t numbers(const ScanPlan& plan) { return 2 * plan.tile * plan.piece + 3 * plan.tile * (plan.channels + 1); }
  __device__ __forceinline__ explicit ForwardTile(const ScanPlan& plan) : pitch(plan.channels + 1) {
    const int rows = plan.tile * plan.piece, elements = plan.tile * pitch;
    B = dynamic_shared<T>(2 * rows + 3 * elements);
    C = B + rows;
    delta = C + rows;
    delta_u = delta + elements;
    y = delta_u + elements;
  }
};

// summary: only what maps the states that enter the split to those that leave it. Otherwise outputs, starting from s.entering (with one
// split: nothing enters). `carry` holds the states between tiles where they are done in pieces.
template <class S, bool summary>
__global__ void __launch_bounds__(scan_threads, sizeof(Accumulate<S>) == 8 ? 2 : 4)
    forward_kernel(const SelectiveScanFwd p, const ScanPlan plan, const ScanSplits<Accumulate<S>> s, Accumulate<S>* carry) {
  using T = Accumulate<S>;
  auto& shared = static_shared<ScanShared<T>>();
  ScanSegments& segments = shared.segments;
  const ForwardTile<T> tile(plan);
  const ScanPlace at(p, plan);
  const int64_t saved = split_offset(p, plan, at.b, at.split, at.channel),
                chunks = (p.seqlen + selective_scan_chunk_cuda - 1) / selective_scan_chunk_cuda;
  T* const chunk_states = static_cast<T*>(p.chunk_states);
  T h[scan_held] = {}, A[scan_held] = {}, B[scan_held] = {}, C[scan_held] = {}, decay_sum = 0;
  bool reset = false;  // a segment starts within this split
  shared.parameters.fill(p, at);
  __syncthreads();
  for (int64_t begin = at.begin; begin < at.end; begin += plan.tile) {
    const int rows = int(smaller(plan.tile, at.end - begin));
    fill_segments(segments, p, at.b, begin, rows);
    each_pack<S>(p.u, rows, at.count, [&](const ScanPack& pack) {
      T u[Pack<S>::size], delta[Pack<S>::size];
      pack.load<S>(u, p.u, at, begin, pack.count);
      pack.load<S>(delta, p.delta, at, begin, pack.count);
#pragma unroll
      for (int i = 0; i < Pack<S>::size; ++i) {
        if (i >= pack.count) break;
        const int slot = pack.channel(i), to = pack.at(i, tile.pitch);
        const T step = step_size(p, delta[i], shared.parameters.delta_bias[slot]);
        tile.delta[to] = step;
        tile.delta_u[to] = step * u[i];
        if (!summary) tile.y[to] = shared.parameters.D[slot] * u[i];
      }
    });
    __syncthreads();
    const int valid = segments.valid;
    for (int64_t part = 0; part < plan.pieces; ++part) {
      const auto [n0, n, live] = scan_part(p, plan, at, part);
      const bool first_tile = begin == at.begin;
      if (p.B_varies) load_projection<S>(tile.B, p.B, at.b, at.group_B, begin, rows, valid, n0, plan.piece, p.dstate);
      if (p.C_varies && !summary) load_projection<S>(tile.C, p.C, at.b, at.group_C, begin, rows, valid, n0, plan.piece, p.dstate);
      if (live && (first_tile || plan.pieces > 1)) {
        load_A(A, p, at.channel, n);
        if (!p.B_varies) load_constant(B, p, p.B, at.channel, n);
        if (!p.C_varies) load_constant(C, p, p.C, at.channel, n);
        if (!first_tile)
          load_items(h, carry + saved + n, 1, 0, p.dstate - n);
        else if (!summary && plan.splits > 1)
          load_items(h, s.entering + saved + n, 1, 0, p.dstate - n);
        else
          for (int i = 0; i < scan_held; ++i) h[i] = 0;
      }
      __syncthreads();
      for (int t = 0; t < valid; ++t) {
        const int64_t start = segments.start[t];
        if (start != scan_inside) {
          if (live) enter_segment(h, p, start, at.channel, n);
          reset = true;
        }
        if (!summary && chunk_states && live && (begin + t) % selective_scan_chunk_cuda == 0) {
          const int64_t chunk = at.b * chunks + (begin + t) / selective_scan_chunk_cuda;
          store_items(chunk_states + (chunk * p.dim + at.channel) * p.dstate + n, h, 1, 0, p.dstate - n);
        }
        T sum = 0;
        if (live) {
          const T delta = tile.delta[t * tile.pitch + at.slot], delta_u = tile.delta_u[t * tile.pitch + at.slot];
          const int row = t * plan.piece + at.lane * scan_held;
          Quad<T> b, c;
          if (p.B_varies) b = quad_at(tile.B + row);
          if (p.C_varies && !summary) c = quad_at(tile.C + row);
#pragma unroll
          for (int i = 0; i < scan_held; ++i) {
            h[i] = exp2_of(delta * A[i]) * h[i] + delta_u * (p.B_varies ? b.v[i] : B[i]);
            if (!summary && n + i < p.dstate) sum += (p.C_varies ? c.v[i] : C[i]) * h[i];
          }
          if (summary && part == 0) decay_sum += delta;
        }
        if constexpr (!summary) {
          sum = sum_lanes(sum, plan.lanes);
          if (at.inside && at.lane == 0) tile.y[t * tile.pitch + at.slot] += sum;
          const int64_t end = segments.end[t];
          if (end != scan_inside && live && p.last_state) store_states(h, p.last_state, end, at.channel, n, p.dstate);
        }
      }
      if (live && plan.pieces > 1) store_items(carry + saved + n, h, 1, 0, p.dstate - n);
      __syncthreads();
    }
    if constexpr (!summary) {
      each_pack<S>(p.out, rows, at.count, [&](const ScanPack& pack) {
        T out[Pack<S>::size], z[Pack<S>::size];
        const int there = pack.before(valid);
        if (p.z) pack.load<S>(z, p.z, at, begin, there);
#pragma unroll
        for (int i = 0; i < Pack<S>::size; ++i) {
          out[i] = i < there ? tile.y[pack.at(i, tile.pitch)] : T(0);
          if (p.z && i < there) out[i] *= silu(z[i]);
        }
        pack.store<S>(p.out, out, at, begin);
      });
      __syncthreads();
    }
  }
  if constexpr (summary) store_summary(p, plan, at, s, carry, h, A, decay_sum, reset);
}

template <class S>
void forward(const SelectiveScanFwd& p, const Context& context) {
  using T = Accumulate<S>;
  const ScanPlan plan(p);
  const int64_t bytes = ForwardTile<T>::numbers(plan) * int64_t(sizeof(T));
  T* const carry = carry_scratch<T>(p, plan, context);
  const auto s = enter_splits<T>(p, plan, "selective_scan_fwd_combine", false, context, [&](const ScanSplits<T>& s) {
    launch(context, "selective_scan_fwd_summary", forward_kernel<S, true>, plan.blocks(p), scan_threads, bytes, p, plan, s, carry);
  });
  launch(context, "selective_scan_fwd", forward_kernel<S, false>, plan.blocks(p), scan_threads, bytes, p, plan, s, carry);
}

}  // namespace

void selective_scan_fwd(const SelectiveScanFwd& p, const Context& context) {
  if (p.batch == 0 || p.dim == 0) return;
  dispatch_floating(p.u.dtype, [&](auto tag) {
    using S = typename decltype(tag)::type;
    SelectiveScanFwd dense = p;
    dense.initial_state = dense_input<Accumulate<S>>(p, p.initial_state, context);
    dense.last_state = as_dense<Accumulate<S>>(p, p.last_state, context);
    pass_through(dense, dense.initial_state, dense.last_state, context);
    forward<S>(dense, context);
    if (dense.last_state.data != p.last_state.data) copy_states(p, dense.last_state, p.last_state, false, context);
  });
}

}  // namespace mamba::cuda
