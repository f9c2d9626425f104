// RMS norm, forward and backward. A segment is one group of one row (the whole row without groups); a team of threads owns one segment at a
// time: one warp for short segments (8 teams a block), else a whole block. A thread holds 8 neighbouring columns in registers; segments
// longer than 8 columns a thread (4096 a block forward, 2048 backward) go through the caches a second time.
//
// Bytes: forward reads x (z, residual), writes out (residual_out); backward reads dout, x (z, residual, dresidual_out), writes dx (dz,
// dresidual). Per element with bf16: 4 forward, 6 backward (+ 2 for every optional operand). The partial sums of dweight and dbias add less
// than 4 % from 2048 rows on. Memory-bound: 85-90 % of the copy bandwidth expected for rows of 1024 columns and more.
//
// Backward sums over rows in two stages: a team adds up a strip of rows (boundaries depend on the number of rows only), a second launch
// adds the strips in order.
#include "params/rms_norm.h"

#include "cuda/math.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vector_io.cuh"

namespace mamba::cuda {
namespace {

constexpr int items = 8;                                      // columns a thread
constexpr int warp_columns = 32 * items;                      // longest segment of a one-warp team
constexpr int teams_per_block = 8;                            // where a team is a warp
constexpr int forward_threads = 512, backward_threads = 256;  // at most, of a block that is one team; registers decide
constexpr int64_t max_strips = 512;

// Threads of a block for segments of `columns`.
int threads_for(int64_t columns, int most) {
  int threads = 32 * teams_per_block;
  if (columns > warp_columns) {
    threads = 64;
    while (threads < most && threads * items < columns) threads *= 2;
  }
  return threads;
}

// The place of a thread in its team.
struct Team {
  bool block_team;
  int thread, size;  // in the team
  int64_t index, count;

  __device__ __forceinline__ explicit Team(bool block_team) : block_team(block_team) {
    const int per_block = block_team ? 1 : blockDim.x / 32;
    thread = block_team ? threadIdx.x : threadIdx.x % 32;
    size = block_team ? blockDim.x : 32;
    index = int64_t(blockIdx.x) * per_block + (block_team ? 0 : threadIdx.x / 32);
    count = int64_t(gridDim.x) * per_block;
  }
  template <class T>
  __device__ __forceinline__ T sum(T value) const {
    return block_team ? sum_block(value) : sum_lanes(value);
  }
};

// f(Tag<S>{}) or f(Tag<accumulation type>{}): operands of other types are converted by launches of their own (`native_rows`).
template <class S, class F>
__device__ __forceinline__ void for_native_type(DType dtype, F&& f) {
  using T = Accumulate<S>;
  if constexpr (!std::is_same_v<S, T>) {
    if (dtype != accumulate_tag<S>) return f(Tag<S>{});
  }
  f(Tag<T>{});
}

// Eight columns of one operand's row.
template <class S, class T>
__device__ __forceinline__ void load_columns(T (&out)[items], const RowView& view, int64_t row_at, int64_t column, int64_t left) {
  for_native_type<S>(view.dtype, [&](auto tag) {
    load_items(out, static_cast<const typename decltype(tag)::type*>(view.data) + row_at + column * view.column, view.column, 0, left);
  });
}
template <class S, class T>
__device__ __forceinline__ void store_columns(const RowView& view, const T (&in)[items], int64_t row_at, int64_t column, int64_t left) {
  for_native_type<S>(view.dtype, [&](auto tag) {
    store_items(static_cast<typename decltype(tag)::type*>(view.data) + row_at + column * view.column, in, view.column, 0, left);
  });
}
template <class S, class T>
__device__ __forceinline__ void load_columns_as(T (&out)[items], const RowView& view, int64_t row_at, int64_t column, int64_t left) {
  load_items(out, static_cast<const S*>(view.data) + row_at + column * view.column, view.column, 0, left);
}
template <class S, class T>
__device__ __forceinline__ void store_columns_as(const RowView& view, const T (&in)[items], int64_t row_at, int64_t column, int64_t left) {
  store_items(static_cast<S*>(view.data) + row_at + column * view.column, in, view.column, 0, left);
}
template <class S, class T>
__device__ __forceinline__ void load_parameter(T (&out)[items], const View<1>& view, int64_t column, int64_t left, T absent) {
  if (view) {
    for_native_type<S>(view.dtype, [&](auto tag) {
      load_items(out, static_cast<const typename decltype(tag)::type*>(view.data) + column * view.stride[0], view.stride[0], 0, left);
    });
  } else {
#pragma unroll
    for (int i = 0; i < items; ++i) out[i] = absent;
  }
}

// v of eight columns: x + residual, times silu(z) where the gate comes first. Writes residual_out.
template <class S, class T>
__device__ __forceinline__ void forward_values(T (&v)[items], const RmsNormFwd& p, int64_t row, int64_t column, int64_t left, bool write) {
  load_columns_as<S>(v, p.x, row_offset(p.rows, p.x, row), column, left);
  if (p.residual) {
    T residual[items];
    load_columns<S>(residual, p.residual, row_offset(p.rows, p.residual, row), column, left);
#pragma unroll
    for (int i = 0; i < items; ++i) v[i] += residual[i];
    if (write) store_columns<S>(p.residual_out, v, row_offset(p.rows, p.residual_out, row), column, left);
  }
  if (p.z && !p.norm_before_gate) {
    T z[items];
    load_columns_as<S>(z, p.z, row_offset(p.rows, p.z, row), column, left);
#pragma unroll
    for (int i = 0; i < items; ++i) v[i] *= silu(z[i]);
  }
}

template <class S>
__global__ void __launch_bounds__(forward_threads, 1) forward_kernel(const RmsNormFwd p, bool block_team) {
  using T = Accumulate<S>;
  const Team team(block_team);
  const int64_t n = p.group_size, groups = p.dim / n, segments = p.rows.count * groups, step = int64_t(team.size) * items;
  // Teams of one block run the same number of rounds, for the barriers in a block's sum.
  for (int64_t segment = team.index; segment < segments; segment += team.count) {
    const int64_t row = segment / groups, group = segment % groups, base = group * n;
    T v[items], kept[items], squares = 0;
    for (int64_t first = team.thread * items; first < n; first += step) {
      forward_values<S>(v, p, row, base + first, n - first, true);
#pragma unroll
      for (int i = 0; i < items; ++i) {
        squares += v[i] * v[i];
        if (first < step) kept[i] = v[i];
      }
    }
    const T rms = root(team.sum(squares) / T(n) + T(p.eps)), scale = 1 / rms;
    if (team.thread == 0) {
      T one[1] = {rms};
      store_items(static_cast<T*>(p.rms.data) + row_offset(p.rows, p.rms, row) + group * p.rms.column, one, 1, 0, 1);
    }
    for (int64_t first = team.thread * items; first < n; first += step) {
      const int64_t column = base + first, left = n - first;
      if (first < step) {
#pragma unroll
        for (int i = 0; i < items; ++i) v[i] = kept[i];
      } else {
        forward_values<S>(v, p, row, column, left, false);
      }
      T weight[items], bias[items];
      load_parameter<S>(weight, p.weight, column, left, T(1));
      load_parameter<S>(bias, p.bias, column, left, T(0));
#pragma unroll
      for (int i = 0; i < items; ++i) v[i] = v[i] * scale * weight[i] + bias[i];
      if (p.z && p.norm_before_gate) {
        T z[items];
        load_columns_as<S>(z, p.z, row_offset(p.rows, p.z, row), column, left);
#pragma unroll
        for (int i = 0; i < items; ++i) v[i] *= silu(z[i]);
      }
      store_columns_as<S>(p.out, v, row_offset(p.rows, p.out, row), column, left);
    }
  }
}

// ---- backward ----

// What the backward needs of eight columns: the normalised value, s (before a first gate), the gradient that reaches the normalised row
// (g = dout, times silu(z) where the gate comes last) and q = g weight.
template <class T>
struct Columns {
  T s[items], normed[items], g[items], q[items], gate[items], slope[items];
};

template <class S, class T>
__device__ __forceinline__ void backward_values(Columns<T>& c, const RmsNormBwd& p, int64_t row, int64_t column, int64_t left, T scale,
                                                bool write) {
  load_columns_as<S>(c.s, p.x, row_offset(p.rows, p.x, row), column, left);
  if (p.residual) {
    T residual[items];
    load_columns<S>(residual, p.residual, row_offset(p.rows, p.residual, row), column, left);
#pragma unroll
    for (int i = 0; i < items; ++i) c.s[i] += residual[i];
  }
#pragma unroll
  for (int i = 0; i < items; ++i) c.g[i] = 0;
  if (p.dout) load_columns_as<S>(c.g, p.dout, row_offset(p.rows, p.dout, row), column, left);
  if (p.z) {
    T z[items];
    load_columns_as<S>(z, p.z, row_offset(p.rows, p.z, row), column, left);
#pragma unroll
    for (int i = 0; i < items; ++i) {
      const WithSlope<T> gate = silu_with_slope(z[i]);
      c.gate[i] = gate.value;
      c.slope[i] = gate.slope;
    }
  }
  const bool gate_first = p.z && !p.norm_before_gate, gate_last = p.z && p.norm_before_gate;
  T weight[items];
  load_parameter<S>(weight, p.weight, column, left, T(1));
#pragma unroll
  for (int i = 0; i < items; ++i) c.normed[i] = (gate_first ? c.s[i] * c.gate[i] : c.s[i]) * scale;
  if (gate_last) {
    if (write) {
      T bias[items], dz[items];
      load_parameter<S>(bias, p.bias, column, left, T(0));
#pragma unroll
      for (int i = 0; i < items; ++i) dz[i] = c.g[i] * (c.normed[i] * weight[i] + bias[i]) * c.slope[i];
      store_columns_as<S>(p.dz, dz, row_offset(p.rows, p.dz, row), column, left);
    }
#pragma unroll
    for (int i = 0; i < items; ++i) c.g[i] *= c.gate[i];
  }
#pragma unroll
  for (int i = 0; i < items; ++i) c.q[i] = c.g[i] * weight[i];
}

// Writes dx, dresidual and, where the gate came first, dz. `mean` is that of q normed over the segment.
template <class S, class T>
__device__ __forceinline__ void backward_store(const Columns<T>& c, const RmsNormBwd& p, int64_t row, int64_t column, int64_t left, T scale,
                                               T mean) {
  T ds[items];
#pragma unroll
  for (int i = 0; i < items; ++i) ds[i] = scale * (c.q[i] - c.normed[i] * mean);
  if (p.z && !p.norm_before_gate) {
    T dz[items];
#pragma unroll
    for (int i = 0; i < items; ++i) {
      dz[i] = ds[i] * c.s[i] * c.slope[i];
      ds[i] *= c.gate[i];
    }
    store_columns_as<S>(p.dz, dz, row_offset(p.rows, p.dz, row), column, left);
  }
  if (p.dresidual_out) {
    T more[items];
    load_columns<S>(more, p.dresidual_out, row_offset(p.rows, p.dresidual_out, row), column, left);
#pragma unroll
    for (int i = 0; i < items; ++i) ds[i] += more[i];
  }
  store_columns_as<S>(p.dx, ds, row_offset(p.rows, p.dx, row), column, left);
  if (p.dresidual) store_columns<S>(p.dresidual, ds, row_offset(p.rows, p.dresidual, row), column, left);
}

// Adds to eight columns of a strip's partial sums; a thread owns its columns.
template <class T>
__device__ __forceinline__ void add_to_strip(T* partial, const T (&value)[items], int64_t left, bool first) {
  T sum[items];
  load_items(sum, partial, 1, 0, first ? 0 : left);
#pragma unroll
  for (int i = 0; i < items; ++i) sum[i] += value[i];
  store_items(partial, sum, 1, 0, left);
}

// `partial` holds, for every strip, dim sums of dweight and then dim of dbias.
template <class S>
__global__ void __launch_bounds__(backward_threads, 1)
    backward_kernel(const RmsNormBwd p, bool block_team, Accumulate<S>* partial, int64_t strips) {
  using T = Accumulate<S>;
  const Team team(block_team);
  const int64_t n = p.group_size, groups = p.dim / n, step = int64_t(team.size) * items;
  const int64_t per_strip = (p.rows.count + strips - 1) / strips;
  for (int64_t task = team.index; task < strips * groups; task += team.count) {
    const int64_t strip = task / groups, group = task % groups, base = group * n;
    const int64_t begin = strip * per_strip, end = smaller(begin + per_strip, p.rows.count);
    T dweight[items] = {}, dbias[items] = {};
    T* const sums = partial + strip * 2 * p.dim;
    for (int64_t row = begin; row < end; ++row) {
      const T scale = 1 / load_number<T>(p.rms.data, p.rms.dtype, row_offset(p.rows, p.rms, row) + group * p.rms.column);
      Columns<T> c;
      T dot = 0;
      // From the last piece of the segment to the first, which stays in registers.
      const int64_t pieces = (n + step - 1) / step;
      for (int64_t piece = pieces - 1; piece >= 0; --piece) {
        const int64_t first = piece * step + team.thread * items, column = base + first, left = n - first;
        if (left <= 0) continue;
        backward_values<S>(c, p, row, column, left, scale, true);
        T dw[items];
#pragma unroll
        for (int i = 0; i < items; ++i) {
          dot += c.q[i] * c.normed[i];
          dw[i] = c.g[i] * c.normed[i];
        }
        if (piece == 0) {
#pragma unroll
          for (int i = 0; i < items; ++i) {
            dweight[i] += dw[i];
            dbias[i] += c.g[i];
          }
        } else {
          if (p.dweight) add_to_strip(sums + column, dw, left, row == begin);
          if (p.dbias) add_to_strip(sums + p.dim + column, c.g, left, row == begin);
        }
      }
      const T mean = team.sum(dot) / T(n);
      for (int64_t piece = 0; piece < pieces; ++piece) {
        const int64_t first = piece * step + team.thread * items, left = n - first;
        if (left <= 0) continue;
        if (piece > 0) backward_values<S>(c, p, row, base + first, left, scale, false);
        backward_store<S>(c, p, row, base + first, left, scale, mean);
      }
    }
    const int64_t first = team.thread * items, left = n - first;
    if (left > 0) {
      if (p.dweight) store_items(sums + base + first, dweight, 1, 0, left);
      if (p.dbias) store_items(sums + p.dim + base + first, dbias, 1, 0, left);
    }
  }
}

constexpr int sum_columns = 32, sum_rows = 8;

// Adds the strips: a warp is 32 columns, the 8 warps of a block share the strips.
template <class T>
__global__ void __launch_bounds__(sum_columns* sum_rows) finish_kernel(const RmsNormBwd p, const T* partial, int64_t strips) {
  struct Sums {
    T value[2][sum_rows][sum_columns];
  };
  auto& shared = static_shared<Sums>();
  const int lane = threadIdx.x % sum_columns, warp = threadIdx.x / sum_columns;
  const int64_t column = int64_t(blockIdx.x) * sum_columns + lane;
  T dweight = 0, dbias = 0;
  if (column < p.dim) {
    for (int64_t strip = warp; strip < strips; strip += sum_rows) {
      const T* sums = partial + strip * 2 * p.dim + column;
      if (p.dweight) dweight += sums[0];
      if (p.dbias) dbias += sums[p.dim];
    }
  }
  shared.value[0][warp][lane] = dweight;
  shared.value[1][warp][lane] = dbias;
  __syncthreads();
  if (warp < 2 && column < p.dim) {
    const View<1>& result = warp == 0 ? p.dweight : p.dbias;
    if (result) {
      T sum = p.accumulate ? load_at<T>(result, column) : T(0);
      for (int row = 0; row < sum_rows; ++row) sum += shared.value[warp][row][lane];
      store_at(result, sum, column);
    }
  }
}

// Enough blocks to fill any chip several times over; longer work lists go round.
constexpr int64_t most_blocks = 1 << 16;

// ---- operands of foreign types ----

__global__ void __launch_bounds__(sum_columns* sum_rows)
    convert_kernel(const RowLayout rows, int64_t columns, const RowView from, const RowView to) {
  const int64_t index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= rows.count * columns) return;
  const int64_t row = index / columns, column = index % columns;
  const double value = load_number<double>(from.data, from.dtype, row_offset(rows, from, row) + column * from.column);
  store_number(to.data, to.dtype, row_offset(rows, to, row) + column * to.column, value);
}

void convert(const RowLayout& rows, int64_t columns, const RowView& from, const RowView& to, const Context& context) {
  constexpr int threads = sum_columns * sum_rows;
  launch(context, "rms_norm_convert", convert_kernel, (rows.count * columns + threads - 1) / threads, threads, 0, rows, columns, from, to);
}

// The view itself where the kernels take its type, else one of scratch memory (not filled).
template <class S>
RowView native_rows(const RowLayout& rows, int64_t columns, const RowView& view, DType own, const Context& context) {
  if (!view || view.dtype == own || view.dtype == accumulate_tag<S>) return view;
  RowView native;
  native.dtype = accumulate_tag<S>;
  native.data = context.scratch<Accumulate<S>>(rows.count * columns);
  native.column = 1;
  int64_t stride = columns;
  for (int axis = rows.axes - 1; axis >= 0; --axis) {
    native.stride[axis] = stride;
    stride *= rows.size[axis];
  }
  return native;
}
template <class S>
RowView native_input(const RowLayout& rows, int64_t columns, const RowView& view, DType own, const Context& context) {
  const RowView native = native_rows<S>(rows, columns, view, own, context);
  if (native.data != view.data) convert(rows, columns, view, native, context);
  return native;
}
template <class S>
View<1> native_parameter(const View<1>& view, int64_t columns, DType own, const Context& context) {
  RowView row;
  row.data = view.data;
  row.dtype = view.dtype;
  row.column = view.stride[0];
  row = native_input<S>({1}, columns, row, own, context);
  return {row.data, row.dtype, {row.column}};
}

}  // namespace

void rms_norm_fwd(const RmsNormFwd& p, const Context& context) {
  if (p.dim == 0) return;
  const bool block_team = p.group_size > warp_columns;
  const int64_t segments = p.rows.count * (p.dim / p.group_size), teams = block_team ? 1 : teams_per_block;
  dispatch_floating(p.x.dtype, [&](auto tag) {
    using S = typename decltype(tag)::type;
    RmsNormFwd native = p;
    native.residual = native_input<S>(p.rows, p.dim, p.residual, p.x.dtype, context);
    native.residual_out = native_rows<S>(p.rows, p.dim, p.residual_out, p.x.dtype, context);
    native.weight = native_parameter<S>(p.weight, p.dim, p.x.dtype, context);
    native.bias = native_parameter<S>(p.bias, p.dim, p.x.dtype, context);
    launch(context, "rms_norm_fwd", forward_kernel<S>, smaller((segments + teams - 1) / teams, most_blocks),
           threads_for(p.group_size, forward_threads), 0, native, block_team);
    if (native.residual_out.data != p.residual_out.data) convert(p.rows, p.dim, native.residual_out, p.residual_out, context);
  });
}

void rms_norm_bwd(const RmsNormBwd& p, const Context& context) {
  if (p.dim == 0) return;
  const bool block_team = p.group_size > warp_columns;
  const int64_t per_strip = larger(block_team ? 16 : 32, (p.rows.count + max_strips - 1) / max_strips);
  const int64_t strips = (p.rows.count + per_strip - 1) / per_strip, tasks = strips * (p.dim / p.group_size);
  const int64_t teams = block_team ? 1 : teams_per_block;
  dispatch_floating(p.x.dtype, [&](auto tag) {
    using S = typename decltype(tag)::type;
    using T = Accumulate<S>;
    RmsNormBwd native = p;
    native.residual = native_input<S>(p.rows, p.dim, p.residual, p.x.dtype, context);
    native.dresidual_out = native_input<S>(p.rows, p.dim, p.dresidual_out, p.x.dtype, context);
    native.dresidual = native_rows<S>(p.rows, p.dim, p.dresidual, p.x.dtype, context);
    native.weight = native_parameter<S>(p.weight, p.dim, p.x.dtype, context);
    native.bias = native_parameter<S>(p.bias, p.dim, p.x.dtype, context);
    T* partial = context.scratch<T>(strips * 2 * p.dim);
    launch(context, "rms_norm_bwd", backward_kernel<S>, smaller((tasks + teams - 1) / teams, most_blocks),
           threads_for(p.group_size, backward_threads), 0, native, block_team, partial, strips);
    if (p.dweight || p.dbias)
      launch(context, "rms_norm_bwd_sum", finish_kernel<T>, (p.dim + sum_columns - 1) / sum_columns, sum_columns * sum_rows, 0, p,
             static_cast<const T*>(partial), strips);
    if (native.dresidual.data != p.dresidual.data) convert(p.rows, p.dim, native.dresidual, p.dresidual, context);
  });
}

}  // namespace mamba::cuda
