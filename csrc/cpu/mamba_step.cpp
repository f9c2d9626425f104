// One token through a stack of Mamba layers. Every weight is read from memory once, in the order it lies there, whatever the batch; up to
// eight vectors or so, reading it is what takes the time. Work items are blocks of `width` rows of a matrix, so that a block's products are
// a vector of neighbouring channels and what follows (convolution, state update) goes on in registers. Four parallel phases a layer:
//   1. in_proj's x, convolution, SiLU   2. x_proj   3. in_proj's z, dt_proj, softplus, state update, gate   4. out_proj, residual
// Bytes a token: weights once (n_layer weights_size, 2 or 4 bytes each) + states read and written.
#include "params/mamba_step.h"

#include "cpu/matvec.h"
#include "cpu/parallel.h"
#include "cpu/simd_math.h"
#include "cpu/tile.h"

namespace mamba::cpu::MAMBA_CPU_LEVEL {
namespace {

using V = Vec<float>;
constexpr int width = Simd<float>::width;
constexpr int64_t serial_products = 200'000;  // below this many multiply-adds one thread is faster than two

int64_t blocks_of(int64_t rows) { return (rows + width - 1) / width; }

int lanes_in(int64_t block, int64_t rows) {
  const int64_t rest = rows - block * width;
  return static_cast<int>(rest < width ? rest : width);
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
class Layer : LayerWeights<S> {
 public:
  Layer(const MambaStep& p, int64_t index, float* hidden, float* buffers) : LayerWeights<S>(p, index), p(p), index(index), hidden(hidden) {
    const int64_t model = padded_lanes(p.d_model), inner = padded_lanes(p.d_inner);
    normed = buffers;
    x = normed + p.batch * model;
    y = x + p.batch * inner;
    proj = y + p.batch * inner;
    arranged_input = proj + p.batch * projected_size(p);
    arranged = arranged_input + filled_batch(p.batch) * arranged_size(p.d_model);
  }

  static int64_t projected_size(const MambaStep& p) { return padded_lanes(p.dt_rank + 2 * p.d_state); }  // x_proj's rows: dt, B, C
  static int64_t buffer_size(const MambaStep& p) {
    const int64_t model = padded_lanes(p.d_model), inner = padded_lanes(p.d_inner), projected = projected_size(p);
    const int64_t wider = p.d_inner > p.dt_rank ? p.d_inner : p.dt_rank;
    return p.batch * (model + 2 * inner + projected) + filled_batch(p.batch) * (arranged_size(p.d_model) + arranged_size(wider));
  }

  void run() {
    const int64_t model = padded_lanes(p.d_model), inner = padded_lanes(p.d_inner);
    const float* input = hidden;
    if (p.block) {
      normalise(hidden, norm, p.batch, p.d_model, model, p.eps, normed);
      input = normed;
    }
    input_operand = arrange<S>(input, p.d_model, model, p.batch, arranged_input);
    each_block(blocks_of(p.d_inner), width * p.d_model, [&](int64_t block, float* out) { project_input(block, out); });
    operand = arrange<S>(x, p.d_inner, inner, p.batch, arranged);
    each_block(blocks_of(p.dt_rank + 2 * p.d_state), width * p.d_inner, [&](int64_t block, float* out) {
      const int lanes = lanes_in(block, p.dt_rank + 2 * p.d_state);
      multiply_block(x_proj + block * width * p.d_inner, p.d_inner, lanes, operand, out);
      for (int64_t b = 0; b < p.batch; ++b) store(proj + b * projected_size(p) + block * width, load(out + b * width));
    });
    operand = arrange<S>(proj, p.dt_rank, projected_size(p), p.batch, arranged);
    each_range(blocks_of(p.d_inner), width * (p.d_model + p.dt_rank + 8 * p.d_state), [&](int64_t begin, int64_t end, float* out) {
      // The products hide the time that memory needs for the states. Of one vector, they are bound by it too, and fastest in one stream.
      const int64_t together = p.batch == 1 ? end - begin : 1;
      for (; begin < end; begin += together) {
        for (int64_t block = begin; block < begin + together; ++block) project_gate(block, out);
        for (int64_t block = begin; block < begin + together; ++block) update_states(block, out);
      }
    });
    operand = arrange<S>(y, p.d_inner, inner, p.batch, arranged);
    each_block(blocks_of(p.d_model), width * p.d_inner, [&](int64_t block, float* out) {
      multiply_block(out_proj + block * width * p.d_inner, p.d_inner, lanes_in(block, p.d_model), operand, out);
      for (int64_t b = 0; b < p.batch; ++b) {
        float* to = hidden + b * model + block * width;
        const V mixed = load(out + b * width) + load(out_bias + block * width);
        store(to, p.block ? load(to) + mixed : mixed);
      }
    });
  }

 private:
  // body(begin, end, out) for ranges of blocks, of `products` a row of the batch each; `out` has room for what a block works with.
  template <class F>
  void each_range(int64_t blocks, int64_t products, F&& body) {
    const auto range = [&](int64_t begin, int64_t end) {
      Scratch<float> out((filled_batch(p.batch) + p.state_len + 1 + p.d_state) * width);
      body(begin, end, out.get());
    };
    parallel_for(blocks, range, serial_products / (products * p.batch + 1));
  }

  template <class F>
  void each_block(int64_t blocks, int64_t products, F&& body) {
    each_range(blocks, products, [&](int64_t begin, int64_t end, float* out) {
      for (int64_t block = begin; block < end; ++block) body(block, out);
    });
  }

  // Rows of in_proj that give z of one vector of channels.
  void project_gate(int64_t block, float* out) {
    const int64_t inner = padded_lanes(p.d_inner), channel = block * width;
    const int lanes = lanes_in(block, p.d_inner);
    multiply_block(in_proj + (p.d_inner + channel) * p.d_model, p.d_model, lanes, input_operand, out);
    for (int64_t b = 0; b < p.batch; ++b) store(y + b * inner + channel, silu(load(out + b * width) + load(in_bias + inner + channel)));
  }

  // Rows of in_proj that give x of one vector of channels, and the convolution.
  void project_input(int64_t block, float* out) {
    const int64_t inner = padded_lanes(p.d_inner), channel = block * width;
    const int lanes = lanes_in(block, p.d_inner);
    for (int64_t b = 0; b < p.batch; ++b)
      for (int64_t k = 0; k < p.state_len; ++k) __builtin_prefetch(address(p.conv_state, index, b, channel, k), 0, 2);
    multiply_block(in_proj + channel * p.d_model, p.d_model, lanes, input_operand, out);
    float* samples = out + filled_batch(p.batch) * width;
    const View<4>& cache = p.conv_state;
    for (int64_t b = 0; b < p.batch; ++b) {
      void* state = address(cache, index, b, channel, 0);
      load_tile(samples, state, cache.dtype, cache.stride[3], cache.stride[2], static_cast<int>(p.state_len), lanes);
      store(samples + p.state_len * width, load(out + b * width) + load(in_bias + channel));
      const float* window = samples + (p.state_len + 1 - p.d_conv) * width;
      V sum = load(conv_bias + channel);
      for (int64_t k = 0; k < p.d_conv; ++k) sum += load(conv_weight + k * inner + channel) * load(window + k * width);
      store(out + b * width, sum);
      store_tile(samples + width, state, cache.dtype, cache.stride[3], cache.stride[2], static_cast<int>(p.state_len), lanes);
    }
    for (int64_t b = 0; b < p.batch; ++b) store(x + b * inner + channel, silu(load(out + b * width)));
  }

  // delta = softplus(dt_proj r + bias); state = exp(delta A) state + delta x B; y = (C . state + D x) silu(z), for one vector of channels.
  void update_states(int64_t block, float* out) {
    const int64_t inner = padded_lanes(p.d_inner), channel = block * width, projected = projected_size(p);
    const int lanes = lanes_in(block, p.d_inner);
    float* tile = out + filled_batch(p.batch) * width;
    multiply_block(dt_proj + channel * p.dt_rank, p.dt_rank, lanes, operand, out);
    for (int64_t b = 0; b < p.batch; ++b) store(out + b * width, softplus(load(out + b * width) + load(dt_bias + channel)));
    const View<4>& cache = p.ssm_state;
    const int count = static_cast<int>(p.d_state);
    for (int64_t b = 0; b < p.batch; ++b) {
      void* state = address(cache, index, b, channel, 0);
      const bool in_place = holds_rows<float>(cache.dtype, cache.stride[2], lanes);
      float* states = in_place ? static_cast<float*>(state) : tile;
      const int64_t pitch = in_place ? cache.stride[3] : width;
      prefetch_next(b, channel);
      if (!in_place) load_tile(states, state, cache.dtype, cache.stride[3], cache.stride[2], count, lanes);
      const V delta = load(out + b * width), in = load(x + b * inner + channel);
      const V delta_x = delta * in;
      const float *B = proj + b * projected + p.dt_rank, *C = B + p.d_state;
      V even = load(D + channel) * in, odd = zero<float>();
      const auto advance = [&](int n, V& sum) __attribute__((always_inline)) {
        const V s = exp2(delta * load(A + n * inner + channel)) * load(states + n * pitch) + delta_x * broadcast(B[n]);
        store(states + n * pitch, s);
        sum += s * broadcast(C[n]);
      };
      int n = 0;
      for (; n + 2 <= count; n += 2) {
        advance(n, even);
        advance(n + 1, odd);
      }
      if (n < count) advance(n, even);
      float* gated = y + b * inner + channel;
      store(gated, (even + odd) * load(gated));
      if (!in_place) store_tile(states, state, cache.dtype, cache.stride[3], cache.stride[2], count, lanes);
    }
  }

  // The states and decay rates that come next lie in many places, which the hardware does not foresee. (Inline: GCC drops
  // calls of functions that only prefetch.)
  MAMBA_INLINE void prefetch_next(int64_t b, int64_t channel) const {
    channel += width;
    if (channel >= p.d_inner) return;
    for (int64_t n = 0; n < p.d_state; ++n) {
      __builtin_prefetch(address(p.ssm_state, index, b, channel, n), 0, 2);
      if (b == 0) __builtin_prefetch(A + n * padded_lanes(p.d_inner) + channel, 0, 2);
    }
  }

  const MambaStep& p;
  const int64_t index;
  float* hidden;  // (batch, padded d_model): read, and overwritten with the result
  using Weights = LayerWeights<S>;
  using Weights::conv_bias, Weights::dt_bias, Weights::A, Weights::D, Weights::out_bias;
  using Weights::in_proj, Weights::x_proj, Weights::dt_proj, Weights::out_proj, Weights::norm, Weights::in_bias, Weights::conv_weight;
  float *normed, *x, *y, *proj, *arranged_input, *arranged;
  Vectors<S> input_operand, operand;  // what in_proj and the matrix at hand are multiplied with
};

// f(Tag<S>) with the type that the weights are read as.
template <class F>
void dispatch_weights(DType dtype, F&& f) {
#if MAMBA_CPU_AVX512
  if (dtype == DType::bf16 && bf16_instructions) return f(Tag<paired_bf16>{});
#endif
  switch (dtype) {
    case DType::bf16: return f(Tag<bf16>{});
    case DType::f16: return f(Tag<f16>{});
    default: return f(Tag<float>{});
  }
}

}  // namespace

void mamba_step(const MambaStep& p) {
  dispatch_weights(p.weight_dtype, [&](auto tag) {
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
  dispatch_weights(p.weight_dtype, [&](auto tag) {
    using S = typename decltype(tag)::type;
    const int64_t model = padded_lanes(p.d_model);
    Scratch<float> hidden(p.batch * model), normed(p.batch * model), arranged(filled_batch(p.batch) * arranged_size(p.d_model)),
        weight(model);
    read_rows(p.hidden, p.batch, p.d_model, model, hidden.get());
    View<2> row;
    row.data = p.norm_weight.data;
    row.dtype = p.norm_weight.dtype;
    row.stride[1] = p.norm_weight.stride[0];
    read_rows(row, 1, p.d_model, model, weight.get());
    normalise(hidden.get(), weight.get(), p.batch, p.d_model, model, p.eps, normed.get());
    const Vectors<S> operand = arrange<S>(normed.get(), p.d_model, model, p.batch, arranged.get());
    const auto range = [&](int64_t begin, int64_t end) {
      Scratch<float> out(filled_batch(p.batch) * width);
      for (int64_t block = begin; block < end; ++block) {
        const int lanes = lanes_in(block, p.vocab);
        const S* rows = static_cast<const S*>(p.weight) + block * width * p.d_model;
        multiply_block(rows, p.d_model, lanes, operand, out.get());
        for (int64_t b = 0; b < p.batch; ++b) {
          float* to = p.out + b * p.vocab + block * width;
          const V logits = load(out.get() + b * width);
          if (lanes == width)
            store(to, logits);
          else
            store_partial(to, logits, lanes);
        }
      }
    };
    parallel_for(blocks_of(p.vocab), range, serial_products / (width * p.d_model * p.batch + 1));
  });
}

}  // namespace mamba::cpu::MAMBA_CPU_LEVEL
