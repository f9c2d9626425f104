// One token through a stack of Mamba layers. Bound by reading the weights: every weight is read once, in the order it lies in memory,
// whatever the batch. Work items are blocks of `width` rows of a matrix, so that a block's products are a vector of neighbouring channels
// and what follows (convolution, state update) goes on in registers. Four parallel phases a layer:
//   1. in_proj, convolution, SiLU   2. x_proj   3. dt_proj, softplus, state update, gate   4. out_proj, residual
// Bytes a token: weights once (n_layer weights_size, 2 or 4 bytes each) + states read and written.
#include "params/mamba_step.h"

#include "cpu/parallel.h"
#include "cpu/simd_math.h"
#include "cpu/tile.h"

namespace mamba::cpu::MAMBA_CPU_LEVEL {
namespace {

using V = Vec<float>;
constexpr int width = Simd<float>::width;
constexpr int64_t serial_products = 200'000;  // below this many multiply-adds one thread is faster than two
constexpr int tile_batch = 4;                 // rows of the batch that share one load of a weight

int64_t blocks_of(int64_t rows) { return (rows + width - 1) / width; }

int lanes_in(int64_t block, int64_t rows) {
  const int64_t rest = rows - block * width;
  return static_cast<int>(rest < width ? rest : width);
}

// `Rows` neighbouring rows of a matrix times tile_batch vectors (x, zero-padded to whole vectors): sums[j * width + r] holds the lane sums
// of row r and vector j. `Ahead`: ask for the rows of the next block meanwhile.
template <int Rows, bool Ahead, class S>
MAMBA_INLINE void multiply(const S* weights, int64_t columns, const float* x, int64_t x_stride, V* sums) {
  V total[Rows][tile_batch];
  for (int r = 0; r < Rows; ++r)
    for (int j = 0; j < tile_batch; ++j) total[r][j] = zero<float>();
  int64_t k = 0;
  for (; k + width <= columns; k += width) {
    V in[tile_batch];
    for (int j = 0; j < tile_batch; ++j) in[j] = load(x + j * x_stride + k);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const V w = load_as<float>(weights + r * columns + k);
      if (Ahead && k * sizeof(S) % 64 == 0) __builtin_prefetch(weights + (r + width) * columns + k, 0, 2);
#pragma GCC unroll 4
      for (int j = 0; j < tile_batch; ++j) total[r][j] += w * in[j];
    }
  }
  if (k < columns) {
    for (int r = 0; r < Rows; ++r) {
      const V w = load_partial<float>(weights + r * columns + k, static_cast<int>(columns - k));
      for (int j = 0; j < tile_batch; ++j) total[r][j] += w * load(x + j * x_stride + k);
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int j = 0; j < tile_batch; ++j) sums[j * width + r] = total[r][j];
}

// One row times one vector, with running sums enough to hide the latency of the multiply-add. Without prefetches it streams faster than
// with.
template <class S>
MAMBA_INLINE V multiply_row(const S* weights, int64_t columns, const float* x) {
  V a = zero<float>(), b = a, c = a, d = a;
  int64_t k = 0;
  for (; k + 4 * width <= columns; k += 4 * width) {
    a += load_as<float>(weights + k) * load(x + k);
    b += load_as<float>(weights + k + width) * load(x + k + width);
    c += load_as<float>(weights + k + 2 * width) * load(x + k + 2 * width);
    d += load_as<float>(weights + k + 3 * width) * load(x + k + 3 * width);
  }
  for (; k + width <= columns; k += width) a += load_as<float>(weights + k) * load(x + k);
  if (k < columns) b += load_partial<float>(weights + k, static_cast<int>(columns - k)) * load(x + k);
  return (a + b) + (c + d);
}

// `lanes` rows times tile_batch vectors. The first vectors find the rows in the cache only if the block before asked for them: the hardware
// follows one stream, not several neighbouring rows.
template <bool First, class S>
MAMBA_INLINE void multiply_tile(const S* weights, int64_t columns, int lanes, const float* x, int64_t x_stride, V* sums) {
  constexpr int together = width >= 16 ? 4 : 2;
  int r = 0;
  for (; r + together <= lanes; r += together) multiply<together, First>(weights + r * columns, columns, x, x_stride, sums + r);
  for (; r < lanes; ++r) multiply<1, false>(weights + r * columns, columns, x, x_stride, sums + r);
  for (; r < width; ++r)
    for (int j = 0; j < tile_batch; ++j) sums[j * width + r] = zero<float>();
}

// `lanes` rows of a matrix times `batch` vectors: out[b * width + r], zeros in the lanes behind. out has width * batch numbers.
template <class S>
void multiply_block(const S* weights, int64_t columns, int lanes, const float* x, int64_t x_stride, int64_t batch, float* out) {
  V sums[tile_batch * width];
  int64_t b = 0;
  for (; b + tile_batch <= batch; b += tile_batch) {
    if (b == 0)
      multiply_tile<true>(weights, columns, lanes, x, x_stride, sums);
    else
      multiply_tile<false>(weights, columns, lanes, x + b * x_stride, x_stride, sums);
    for (int j = 0; j < tile_batch; ++j) {
      V row[width];
      for (int i = 0; i < width; ++i) row[i] = sums[j * width + i];
      store(out + (b + j) * width, sum_each(row));
    }
  }
  for (; b < batch; ++b) {
    V row[width];
    for (int i = 0; i < width; ++i) row[i] = i < lanes ? multiply_row(weights + i * columns, columns, x + b * x_stride) : zero<float>();
    store(out + b * width, sum_each(row));
  }
}

// normed = hidden / sqrt(mean(hidden^2) + eps) weight, zero-padded rows of `pad`
void normalise(const float* hidden, const float* weight, int64_t batch, int64_t columns, int64_t pad, float eps, float* normed) {
  for (int64_t b = 0; b < batch; ++b) {
    V squares = zero<float>();
    for (int64_t k = 0; k < pad; k += width) squares += load(hidden + b * pad + k) * load(hidden + b * pad + k);
    const V root = sqrt(broadcast(sum(squares) / static_cast<float>(columns) + eps));
    for (int64_t k = 0; k < pad; k += width) store(normed + b * pad + k, load(hidden + b * pad + k) / root * load(weight + k));
  }
}

// hidden in any dtype and strides to zero-padded rows.
void read_rows(const View<2>& view, int64_t batch, int64_t columns, int64_t pad, float* rows) {
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t k = 0; k < pad; k += width) {
      const int64_t rest = columns - k;
      const int lanes = static_cast<int>(rest < 0 ? 0 : rest < width ? rest : width);
      if (lanes)
        load_tile(rows + b * pad + k, address(view, b, k), view.dtype, 0, view.stride[1], 1, lanes);
      else
        store(rows + b * pad + k, zero<float>());
    }
}

template <class S>
class Layer {
 public:
  Layer(const MambaStep& p, int64_t index, float* hidden, float* buffers) : p(p), index(index), hidden(hidden) {
    in_proj = static_cast<const S*>(p.weights) + index * p.weights_size();
    x_proj = in_proj + 2 * p.d_inner * p.d_model;
    dt_proj = x_proj + (p.dt_rank + 2 * p.d_state) * p.d_inner;
    out_proj = dt_proj + p.d_inner * p.dt_rank;
    const int64_t model = padded_lanes(p.d_model), inner = padded_lanes(p.d_inner);
    const float* at = p.parameters + index * p.parameters_size();
    const auto take = [&](int64_t count) {
      const float* row = at;
      at += count;
      return row;
    };
    norm = take(model);
    in_bias = take(2 * inner);
    conv_weight = take(p.d_conv * inner);
    conv_bias = take(inner);
    dt_bias = take(inner);
    A = take(p.d_state * inner);
    D = take(inner);
    out_bias = take(model);
    normed = buffers;
    x = normed + p.batch * model;
    z = x + p.batch * inner;
    y = z + p.batch * inner;
    proj = y + p.batch * inner;
  }

  // Rows of x_proj's result: dt_rank columns padded to whole vectors (dt_proj's input), then B and C.
  static int64_t rank_pad(const MambaStep& p) { return padded_lanes(p.dt_rank); }
  static int64_t projected_size(const MambaStep& p) { return rank_pad(p) + padded_lanes(2 * p.d_state); }
  static int64_t buffer_size(const MambaStep& p) {
    return p.batch * (padded_lanes(p.d_model) + 3 * padded_lanes(p.d_inner) + projected_size(p));
  }

  void run() {
    const int64_t model = padded_lanes(p.d_model), inner = padded_lanes(p.d_inner);
    const float* input = hidden;
    if (p.block) {
      normalise(hidden, norm, p.batch, p.d_model, model, p.eps, normed);
      input = normed;
    }
    each_block(blocks_of(p.d_inner), 2 * width * p.d_model, [&](int64_t block, float* out) { project_in(block, input, out); });
    each_block(blocks_of(p.dt_rank + 2 * p.d_state), width * p.d_inner, [&](int64_t block, float* out) {
      const int64_t rows = p.dt_rank + 2 * p.d_state;
      const int lanes = lanes_in(block, rows);
      multiply_block(x_proj + block * width * p.d_inner, p.d_inner, lanes, x, inner, p.batch, out);
      for (int64_t b = 0; b < p.batch; ++b)
        for (int i = 0; i < lanes; ++i) {
          const int64_t row = block * width + i;
          float* to = proj + b * projected_size(p);
          if (row < p.dt_rank)
            to[row] = out[b * width + i];
          else
            to[rank_pad(p) + row - p.dt_rank] = out[b * width + i];
        }
    });
    for (int64_t b = 0; b < p.batch; ++b)
      for (int64_t i = p.dt_rank; i < rank_pad(p); ++i) proj[b * projected_size(p) + i] = 0;
    each_block(blocks_of(p.d_inner), width * (p.dt_rank + 8 * p.d_state), [&](int64_t block, float* out) { update_states(block, out); });
    each_block(blocks_of(p.d_model), width * p.d_inner, [&](int64_t block, float* out) {
      multiply_block(out_proj + block * width * p.d_inner, p.d_inner, lanes_in(block, p.d_model), y, inner, p.batch, out);
      for (int64_t b = 0; b < p.batch; ++b) {
        float* to = hidden + b * model + block * width;
        const V mixed = load(out + b * width) + load(out_bias + block * width);
        store(to, p.block ? load(to) + mixed : mixed);
      }
    });
  }

 private:
  // body(block, out) for every block; `out` has room for a vector per row of the batch and the convolution's samples.
  template <class F>
  void each_block(int64_t blocks, int64_t products, F&& body) {
    const auto range = [&](int64_t begin, int64_t end) {
      Scratch<float> out((2 * p.batch + p.state_len + 1 + p.d_state) * width);
      for (int64_t block = begin; block < end; ++block) body(block, out.get());
    };
    parallel_for(blocks, range, serial_products / (products * p.batch + 1));
  }

  // Rows of in_proj that give x and z of one vector of channels; x goes through the convolution.
  void project_in(int64_t block, const float* input, float* out) {
    const int64_t model = padded_lanes(p.d_model), inner = padded_lanes(p.d_inner), channel = block * width;
    const int lanes = lanes_in(block, p.d_inner);
    multiply_block(in_proj + (p.d_inner + channel) * p.d_model, p.d_model, lanes, input, model, p.batch, out);
    for (int64_t b = 0; b < p.batch; ++b) store(z + b * inner + channel, load(out + b * width) + load(in_bias + inner + channel));
    multiply_block(in_proj + channel * p.d_model, p.d_model, lanes, input, model, p.batch, out);
    float* samples = out + p.batch * width;
    const View<4>& cache = p.conv_state;
    for (int64_t b = 0; b < p.batch; ++b) {
      void* state = address(cache, index, b, channel, 0);
      load_tile(samples, state, cache.dtype, cache.stride[3], cache.stride[2], static_cast<int>(p.state_len), lanes);
      store(samples + p.state_len * width, load(out + b * width) + load(in_bias + channel));
      const float* window = samples + (p.state_len + 1 - p.d_conv) * width;
      V sum = load(conv_bias + channel);
      for (int64_t k = 0; k < p.d_conv; ++k) sum += load(conv_weight + k * inner + channel) * load(window + k * width);
      store(x + b * inner + channel, silu(sum));
      store_tile(samples + width, state, cache.dtype, cache.stride[3], cache.stride[2], static_cast<int>(p.state_len), lanes);
    }
  }

  // delta = softplus(dt_proj r + bias); state = exp(delta A) state + delta x B; y = (C . state + D x) silu(z), for one vector of channels.
  void update_states(int64_t block, float* out) {
    const int64_t inner = padded_lanes(p.d_inner), channel = block * width, projected = projected_size(p);
    const int lanes = lanes_in(block, p.d_inner);
    multiply_block(dt_proj + channel * p.dt_rank, p.dt_rank, lanes, proj, projected, p.batch, out);
    float* states = out + p.batch * width;
    const View<4>& cache = p.ssm_state;
    const int count = static_cast<int>(p.d_state);
    for (int64_t b = 0; b < p.batch; ++b) {
      void* state = address(cache, index, b, channel, 0);
      load_tile(states, state, cache.dtype, cache.stride[3], cache.stride[2], count, lanes);
      const V delta = softplus(load(out + b * width) + load(dt_bias + channel)), in = load(x + b * inner + channel);
      const V delta_x = delta * in;
      const float *B = proj + b * projected + rank_pad(p), *C = B + p.d_state;
      V even = load(D + channel) * in, odd = zero<float>();
      for (int n = 0; n < count; ++n) {
        const V a = exp2(delta * load(A + n * inner + channel));
        const V s = a * load(states + n * width) + delta_x * broadcast(B[n]);
        store(states + n * width, s);
        if (n & 1)
          odd += s * broadcast(C[n]);
        else
          even += s * broadcast(C[n]);
      }
      store(y + b * inner + channel, (even + odd) * silu(load(z + b * inner + channel)));
      store_tile(states, state, cache.dtype, cache.stride[3], cache.stride[2], count, lanes);
    }
  }

  const MambaStep& p;
  const int64_t index;
  float* hidden;  // (batch, padded d_model): read, and overwritten with the result
  const S *in_proj, *x_proj, *dt_proj, *out_proj;
  const float *norm, *in_bias, *conv_weight, *conv_bias, *dt_bias, *A, *D, *out_bias;
  float *normed, *x, *z, *y, *proj;
};

}  // namespace

void mamba_step(const MambaStep& p) {
  dispatch_floating(p.weight_dtype, [&](auto tag) {
    using S = typename decltype(tag)::type;
    const int64_t model = padded_lanes(p.d_model);
    Scratch<float> hidden(p.batch * model), buffers(Layer<S>::buffer_size(p));
    read_rows(p.hidden, p.batch, p.d_model, model, hidden.get());
    for (int64_t index = 0; index < p.n_layer; ++index) Layer<S>(p, index, hidden.get(), buffers.get()).run();
    for (int64_t b = 0; b < p.batch; ++b)
      for (int64_t k = 0; k < p.d_model; ++k) p.out[b * p.d_model + k] = hidden.get()[b * model + k];
  });
}

void mamba_step_logits(const MambaStepLogits& p) {
  dispatch_floating(p.weight_dtype, [&](auto tag) {
    using S = typename decltype(tag)::type;
    const int64_t model = padded_lanes(p.d_model);
    Scratch<float> hidden(p.batch * model), normed(p.batch * model), weight(model);
    read_rows(p.hidden, p.batch, p.d_model, model, hidden.get());
    View<2> row;
    row.data = p.norm_weight.data;
    row.dtype = p.norm_weight.dtype;
    row.stride[1] = p.norm_weight.stride[0];
    read_rows(row, 1, p.d_model, model, weight.get());
    normalise(hidden.get(), weight.get(), p.batch, p.d_model, model, p.eps, normed.get());
    const auto range = [&](int64_t begin, int64_t end) {
      Scratch<float> out(p.batch * width);
      for (int64_t block = begin; block < end; ++block) {
        const int lanes = lanes_in(block, p.vocab);
        const S* rows = static_cast<const S*>(p.weight) + block * width * p.d_model;
        multiply_block(rows, p.d_model, lanes, normed.get(), model, p.batch, out.get());
        for (int64_t b = 0; b < p.batch; ++b) store_partial(p.out + b * p.vocab + block * width, load(out.get() + b * width), lanes);
      }
    };
    parallel_for(blocks_of(p.vocab), range, serial_products / (width * p.d_model * p.batch + 1));
  });
}

}  // namespace mamba::cpu::MAMBA_CPU_LEVEL
