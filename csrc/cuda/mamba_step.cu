// One token through a stack of Mamba layers, for decoding, in launches that a CUDA graph captures.
//
// Up to 16 rows of the batch, five a layer:
//   1. norm   2. in_proj, convolution, silu   3. x_proj   4. dt_proj, softplus, state update, gate   5. out_proj, residual
// A warp owns one row of a weight matrix, that is one channel of the result, for 8 rows of the batch at a time: the weights are read 16
// bytes a lane, once for every 8 rows, and what follows the product goes on in the same warp. Inputs are float and come from the caches.
//
// More rows: the products of 2, 3 and 5 are cuBLAS's (gemm.cu), in three kernels and six products. cuBLAS multiplies numbers of one dtype,
// so inputs are split into two of the weights' dtype, high + low, and the products added, for the matrix units twice nearly nothing. With
// f16 that keeps an input's float accuracy, with bf16 it rounds inputs to 2^-18. A warp of the first way does one multiplication a float
// that it reads from the L1 cache, 32 of the 128 a clock that a multiprocessor could: about 8 T/s on 132 of them. For 3.6 M weights that is
// 0.45 microseconds a row of the batch and layer, against 1.7 for reading the weights in bf16 and 2 for a launch more; so the two meet at
// about 16 rows.
//
// Bytes of a token and layer: the weights (3 d_inner d_model + ... , 2 or 4 bytes each) once for 8 rows of the batch, above 16 rows once,
// the states read and written. With bf16 weights of 768 x 1536: 7.2 MB a layer, 1.7 microseconds at full bandwidth: launches weigh as much.
// 60 % of the copy bandwidth expected for one row of the batch and weights of this size under graph capture, 80 % for layers four times as
// wide.
#include "params/mamba_step.h"

#include "cuda/gemm.h"
#include "cuda/math.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vector_io.cuh"

namespace mamba::cuda {
namespace {

constexpr int threads = 128, warps_per_block = threads / 32, batch_tile = 8;
constexpr int64_t most_rows = 16;  // of the batch, for the kernels that multiply themselves

int64_t blocks_of(int64_t rows) { return (rows + warps_per_block - 1) / warps_per_block; }
int64_t blocks_for(int64_t count) { return (count + threads - 1) / threads; }

// Products of row `row` of a (rows, columns) matrix with the vectors x[b], b0 <= b < b0 + batch_tile: lane j gets that of b0 + j. Called by
// whole warps.
template <class S>
__device__ __forceinline__ float multiply_row(const S* weights, int64_t columns, const float* x, int64_t x_stride, int count) {
  constexpr int items = Pack<S>::size;
  const int lane = threadIdx.x % 32;
  float total[batch_tile] = {};
  for (int64_t k = lane * items; k < columns; k += 32 * items) {
    float w[items];
    load_items(w, weights + k, 1, 0, columns - k);
#pragma unroll
    for (int j = 0; j < batch_tile; ++j) {
      if (j >= count) break;
      float in[items];
      load_items(in, x + j * x_stride + k, 1, 0, columns - k);
#pragma unroll
      for (int i = 0; i < items; ++i) total[j] += w[i] * in[i];
    }
  }
  float result = 0;
#pragma unroll
  for (int j = 0; j < batch_tile; ++j) {
    if (j >= count) break;
    const float sum = sum_lanes(total[j]);
    if (lane == j) result = sum;
  }
  return result;
}

// A layer, and the buffers between its launches, all dense floats.
template <class S>
struct Layer : LayerWeights<S> {
  MambaStep p;
  int64_t index;
  int64_t inner;                    // a padded row of channels
  float *x, *z, *projected, *both;  // (batch, d_inner) twice, (batch, dt_rank + 2 d_state), in_proj's (batch, 2 d_inner)

  Layer(const MambaStep& step, int64_t index, float* buffers)
      : LayerWeights<S>(step, index), p(step), index(index), inner(padded_lanes(step.d_inner)) {
    x = buffers;
    z = x + p.batch * p.d_inner;
    projected = z + p.batch * p.d_inner;
    both = projected + p.batch * (p.dt_rank + 2 * p.d_state);
  }
  static int64_t buffers_size(const MambaStep& p) { return p.batch * (4 * p.d_inner + p.dt_rank + 2 * p.d_state); }
};

// to = hidden as floats
__global__ void __launch_bounds__(threads) read_kernel(const View<2> hidden, int64_t batch, int64_t columns, float* to) {
  const int64_t index = int64_t(blockIdx.x) * threads + threadIdx.x;
  if (index < batch * columns) to[index] = load_at<float>(hidden, index / columns, index % columns);
}

// A float as two numbers of the weights' dtype, `count` apart: high + low. As itself where the weights are floats.
template <class To>
__device__ __forceinline__ void store_split(To* to, int64_t count, float value) {
  round_to(*to, value);
  if constexpr (!std::is_same_v<To, float>) round_to(to[count], value - to_number(*to));
}

// normed = hidden / sqrt(mean(hidden^2) + eps) weight, without a norm (`plain`) hidden itself; a block a row. `next` (may be hidden): what
// the layer's result is added to: hidden (0 where plain) + bias.
template <class To>
__global__ void __launch_bounds__(threads, 8) norm_kernel(const float* hidden, const View<1> weight, int64_t columns, float eps, bool plain,
                                                          To* normed, float* next, const float* bias) {
  const int64_t row = int64_t(blockIdx.x) * columns;
  float squares = 0;
  for (int64_t k = threadIdx.x; k < columns; k += threads) squares += hidden[row + k] * hidden[row + k];
  const float scale = 1 / sqrtf(sum_block(squares) / float(columns) + eps);
  for (int64_t k = threadIdx.x; k < columns; k += threads) {
    const float value = hidden[row + k];
    store_split(normed + row + k, gridDim.x * columns, plain ? value : value * scale * load_at<float>(weight, k));
    if (next) next[row + k] = (plain ? 0 : value) + bias[k];
  }
}

// What follows in_proj, for one row of it and one of the batch: x goes through the convolution and its cache, z waits.
template <class S, class To>
__device__ __forceinline__ void finish_in(const Layer<S>& layer, int64_t row, int64_t b, float value, To* x) {
  const MambaStep& p = layer.p;
  const int64_t channel = row % p.d_inner, M = p.state_len, at = b * p.d_inner + channel;
  if (row >= p.d_inner) {
    layer.z[at] = value + layer.in_bias[layer.inner + channel];
    return;
  }
  value += layer.in_bias[channel];
  const auto sample = [&](int64_t i) { return i < M ? load_at<float>(p.conv_state, layer.index, b, channel, i) : value; };
  float sum = layer.conv_bias[channel];
  for (int64_t k = 0; k < p.d_conv; ++k) sum += layer.conv_weight[k * layer.inner + channel] * sample(M + 1 - p.d_conv + k);
  sum = silu(sum);
  layer.x[at] = sum;
  if (x) store_split(x + at, p.batch * p.d_inner, sum);
  for (int64_t i = 0; i < M; ++i) store_at(p.conv_state, sample(i + 1), layer.index, b, channel, i);
}

template <class S>
__global__ void __launch_bounds__(threads, 4) in_kernel(const Layer<S> layer, const float* input) {
  const MambaStep& p = layer.p;
  const int64_t row = int64_t(blockIdx.x) * warps_per_block + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= 2 * p.d_inner) return;  // whole warps
  for (int64_t b0 = 0; b0 < p.batch; b0 += batch_tile) {
    const int count = int(smaller(batch_tile, p.batch - b0));
    const float value = multiply_row(layer.in_proj + row * p.d_model, p.d_model, input + b0 * p.d_model, p.d_model, count);
    if (lane < count) finish_in(layer, row, b0 + lane, value, static_cast<float*>(nullptr));
  }
}

// The same after a product by cuBLAS: a thread a number of it.
template <class S>
__global__ void __launch_bounds__(threads) conv_kernel(const Layer<S> layer, S* x) {
  const int64_t index = int64_t(blockIdx.x) * threads + threadIdx.x, rows = 2 * layer.p.d_inner;
  if (index < layer.p.batch * rows) finish_in(layer, index % rows, index / rows, layer.both[index], x);
}

// y = x W^T (+ bias) (+ y)
template <class S>
__global__ void __launch_bounds__(threads)
    product_kernel(const S* weights, const float* bias, int64_t rows, int64_t columns, int64_t batch, const float* x, float* y, bool add) {
  const int64_t row = int64_t(blockIdx.x) * warps_per_block + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= rows) return;  // whole warps
  for (int64_t b0 = 0; b0 < batch; b0 += batch_tile) {
    const int count = int(smaller(batch_tile, batch - b0));
    float value = multiply_row(weights + row * columns, columns, x + b0 * columns, columns, count);
    if (lane >= count) continue;
    float* const to = y + (b0 + lane) * rows + row;
    if (bias) value += bias[row];
    *to = add ? *to + value : value;
  }
}

// delta = softplus(dt_proj r + bias); state = 2^(delta A) state + delta x B; y = (C . state + D x) silu(z). A warp a channel, a lane a
// state.
template <class S, class To>
__global__ void __launch_bounds__(threads, 4) update_kernel(const Layer<S> layer, To* out) {
  const MambaStep& p = layer.p;
  const int64_t channel = int64_t(blockIdx.x) * warps_per_block + threadIdx.x / 32, columns = p.dt_rank + 2 * p.d_state;
  const int lane = threadIdx.x % 32;
  if (channel >= p.d_inner) return;  // whole warps
  for (int64_t b0 = 0; b0 < p.batch; b0 += batch_tile) {
    const int count = int(smaller(batch_tile, p.batch - b0));
    const float* const projected = layer.projected + b0 * columns;
    const float deltas = multiply_row(layer.dt_proj + channel * p.dt_rank, p.dt_rank, projected, columns, count);
    for (int j = 0; j < count; ++j) {
      const int64_t b = b0 + j;
      const float delta = softplus(__shfl_sync(all_lanes, deltas, j) + layer.dt_bias[channel]);
      const float x = layer.x[b * p.d_inner + channel];
      const float *B = projected + j * columns + p.dt_rank, *C = B + p.d_state;
      float y = 0;
      for (int64_t n = lane; n < p.d_state; n += 32) {
        const float state =
            exp2f(delta * layer.A[n * layer.inner + channel]) * load_at<float>(p.ssm_state, layer.index, b, channel, n) + delta * x * B[n];
        store_at(p.ssm_state, state, layer.index, b, channel, n);
        y += C[n] * state;
      }
      y = sum_lanes(y);
      const int64_t at = b * p.d_inner + channel;
      if (lane == 0) store_split(out + at, p.batch * p.d_inner, (y + layer.D[channel] * x) * silu(layer.z[at]));
    }
  }
}

View<1> dense_row(const float* data) {
  View<1> view;
  view.data = const_cast<float*>(data);
  view.stride[0] = 1;
  return view;
}

template <class S>
constexpr DType dtype_tag = std::is_same_v<S, bf16>  ? DType::bf16
                            : std::is_same_v<S, f16> ? DType::f16
                                                     : DType::f32;

// How many numbers a float becomes for cuBLAS.
template <class S>
constexpr int parts = std::is_same_v<S, float> ? 1 : 2;

// c = x W^T, or c += x W^T, for x as store_split leaves it.
template <class S>
void multiply_all(const S* x, const S* weights, float* c, int64_t batch, int64_t rows, int64_t columns, bool add, const Context& context) {
  Product product{1, batch, columns, rows, {}, {}, {}, add};
  product.b = {const_cast<S*>(weights), dtype_tag<S>, {0, 1, columns}};
  product.c = {c, DType::f32, {0, rows, 1}};
  for (int part = 0; part < parts<S>; ++part) {
    product.a = {const_cast<S*>(x) + part * batch * columns, dtype_tag<S>, {0, columns, 1}};
    multiply(product, context);
    product.add = true;
  }
}

// `input` and `y` are scratch: (batch, d_model) and (batch, d_inner).
template <class S>
void run_layer(const Layer<S>& layer, float* input, float* y, const Context& context) {
  const MambaStep& p = layer.p;
  if (p.block)
    launch(context, "mamba_step_norm", norm_kernel<float>, p.batch, threads, 0, static_cast<const float*>(p.out), dense_row(layer.norm),
           p.d_model, p.eps, false, input, static_cast<float*>(nullptr), static_cast<const float*>(nullptr));
  launch(context, "mamba_step_in", in_kernel<S>, blocks_of(2 * p.d_inner), threads, 0, layer,
         static_cast<const float*>(p.block ? input : p.out));
  const int64_t projected = p.dt_rank + 2 * p.d_state;
  launch(context, "mamba_step_x_proj", product_kernel<S>, blocks_of(projected), threads, 0, layer.x_proj,
         static_cast<const float*>(nullptr), projected, p.d_inner, p.batch, static_cast<const float*>(layer.x), layer.projected, false);
  launch(context, "mamba_step_update", update_kernel<S, float>, blocks_of(p.d_inner), threads, 0, layer, y);
  launch(context, "mamba_step_out", product_kernel<S>, blocks_of(p.d_model), threads, 0, layer.out_proj, layer.out_bias, p.d_model,
         p.d_inner, p.batch, static_cast<const float*>(y), p.out, p.block);
}

template <class S>
void run_wide_layer(const Layer<S>& layer, S* input, S* inner, const Context& context) {
  const MambaStep& p = layer.p;
  const int64_t projected = p.dt_rank + 2 * p.d_state;
  launch(context, "mamba_step_norm", norm_kernel<S>, p.batch, threads, 0, static_cast<const float*>(p.out), dense_row(layer.norm),
         p.d_model, p.eps, !p.block, input, p.out, layer.out_bias);
  multiply_all(input, layer.in_proj, layer.both, p.batch, 2 * p.d_inner, p.d_model, false, context);
  launch(context, "mamba_step_conv", conv_kernel<S>, blocks_for(p.batch * 2 * p.d_inner), threads, 0, layer, inner);
  multiply_all(inner, layer.x_proj, layer.projected, p.batch, projected, p.d_inner, false, context);
  launch(context, "mamba_step_update", update_kernel<S, S>, blocks_of(p.d_inner), threads, 0, layer, inner);
  multiply_all(inner, layer.out_proj, p.out, p.batch, p.d_model, p.d_inner, true, context);
}

// f64 weights do not exist (the host layer refuses them).
template <class F>
void for_weight_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::bf16: return f(Tag<bf16>{});
    case DType::f16: return f(Tag<f16>{});
    default: return f(Tag<float>{});
  }
}

}  // namespace

// p.out holds the residual stream from the first launch to the last.
void mamba_step(const MambaStep& p, const Context& context) {
  if (p.batch == 0) return;
  launch(context, "mamba_step_read", read_kernel, blocks_for(p.batch * p.d_model), threads, 0, p.hidden, p.batch, p.d_model, p.out);
  for_weight_type(p.weight_dtype, [&](auto tag) {
    using S = typename decltype(tag)::type;
    float* const buffers = context.scratch<float>(Layer<S>::buffers_size(p));
    if (p.batch > most_rows) {
      S *input = context.scratch<S>(parts<S> * p.batch * p.d_model), *inner = context.scratch<S>(parts<S> * p.batch * p.d_inner);
      for (int64_t index = 0; index < p.n_layer; ++index) run_wide_layer(Layer<S>(p, index, buffers), input, inner, context);
    } else {
      float *input = context.scratch<float>(p.batch * p.d_model), *y = context.scratch<float>(p.batch * p.d_inner);
      for (int64_t index = 0; index < p.n_layer; ++index) run_layer(Layer<S>(p, index, buffers), input, y, context);
    }
  });
}

void mamba_step_logits(const MambaStepLogits& p, const Context& context) {
  if (p.batch == 0) return;
  float* const hidden = context.scratch<float>(p.batch * p.d_model);
  launch(context, "mamba_step_read", read_kernel, blocks_for(p.batch * p.d_model), threads, 0, p.hidden, p.batch, p.d_model, hidden);
  for_weight_type(p.weight_dtype, [&](auto tag) {
    using S = typename decltype(tag)::type;
    const S* const weight = static_cast<const S*>(p.weight);
    const auto norm = [&](auto* normed) {
      using To = std::remove_pointer_t<decltype(normed)>;
      launch(context, "mamba_step_norm", norm_kernel<To>, p.batch, threads, 0, static_cast<const float*>(hidden), p.norm_weight, p.d_model,
             p.eps, false, normed, static_cast<float*>(nullptr), static_cast<const float*>(nullptr));
      return normed;
    };
    if (p.batch > most_rows)
      multiply_all(static_cast<const S*>(norm(context.scratch<S>(parts<S> * p.batch * p.d_model))), weight, p.out, p.batch, p.vocab,
                   p.d_model, false, context);
    else
      launch(context, "mamba_step_logits", product_kernel<S>, blocks_of(p.vocab), threads, 0, weight, static_cast<const float*>(nullptr),
             p.vocab, p.d_model, p.batch, static_cast<const float*>(norm(context.scratch<float>(p.batch * p.d_model))), p.out, false);
  });
}

}  // namespace mamba::cuda
