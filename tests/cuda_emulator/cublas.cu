// Stands in for the one function of cuBLAS that csrc/cuda/gemm.cu calls, as its documentation defines it: column-major, one thread an
// element.
#include <cstring>

#include "cuda/device.cuh"

namespace {

constexpr int threads = 64;

struct Matrix {
  const void* data;
  int64_t leading, batch_stride;
  bool transposed;

  template <class S>
  double at(int64_t b, int64_t row, int64_t column) const {
    const int64_t place = transposed ? row * leading + column : column * leading + row;
    return mamba::cuda::to_number(static_cast<const S*>(data)[b * batch_stride + place]);
  }
};

template <class S, class R>
__global__ void product_kernel(Matrix a, Matrix b, R* c, int64_t leading, int64_t batch_stride, int64_t m, int64_t n, int64_t k,
                               int64_t batch, double alpha, double beta) {
  const int64_t index = int64_t(blockIdx.x) * threads + threadIdx.x;
  if (index >= m * n * batch) return;
  const int64_t row = index % m, column = index / m % n, entry = index / m / n;
  double sum = 0;
  for (int64_t i = 0; i < k; ++i) sum += a.at<S>(entry, row, i) * b.at<S>(entry, i, column);
  R* const to = c + entry * batch_stride + column * leading + row;
  sum *= alpha;
  if (beta != 0) sum += beta * mamba::cuda::to_number(*to);
  mamba::cuda::round_to(*to, sum);
}

// cudaDataType
template <class F>
bool with_type(int type, F&& f) {
  switch (type) {
    case 0: f(mamba::Tag<float>{}); return true;
    case 1: f(mamba::Tag<double>{}); return true;
    case 2: f(mamba::Tag<mamba::f16>{}); return true;
    case 14: f(mamba::Tag<mamba::bf16>{}); return true;
    default: return false;
  }
}

constexpr int success = 0, invalid_value = 7, not_supported = 15;  // cublasStatus_t

int gemm(void*, int transa, int transb, int64_t m, int64_t n, int64_t k, const void* alpha, const void* a, int type_a, int64_t lda,
         long long stride_a, const void* b, int type_b, int64_t ldb, long long stride_b, const void* beta, void* c, int type_c, int64_t ldc,
         long long stride_c, int64_t batch, int compute, int) {
  const auto below = [](int64_t leading, int64_t rows) { return leading < (rows > 1 ? rows : 1); };
  if (m < 0 || n < 0 || k < 0 || batch < 0 || below(lda, transa ? k : m) || below(ldb, transb ? n : k) || below(ldc, m))
    return invalid_value;
  const bool wide = compute == 70;
  if (type_a != type_b || wide != (type_a == 1) || (!wide && compute != 68) || (type_c != type_a && (wide || type_c != 0)))
    return not_supported;
  const double scale = wide ? *static_cast<const double*>(alpha) : double(*static_cast<const float*>(alpha));
  const double keep = wide ? *static_cast<const double*>(beta) : double(*static_cast<const float*>(beta));
  const Matrix left{a, lda, stride_a, transa != 0}, right{b, ldb, stride_b, transb != 0};
  const mamba::cuda::Context context{};
  bool known = false;
  with_type(type_a, [&](auto operand) {
    known = with_type(type_c, [&](auto result) {
      using S = typename decltype(operand)::type;
      using R = typename decltype(result)::type;
      mamba::cuda::launch(context, "cublas", product_kernel<S, R>, (m * n * batch + threads - 1) / threads, threads, 0, left, right,
                          static_cast<R*>(c), ldc, int64_t(stride_c), m, n, k, batch, scale, keep);
    });
  });
  return known ? success : not_supported;
}

}  // namespace

namespace emu {

void* library_function(const char* name) {
  return std::strcmp(name, "cublasGemmStridedBatchedEx_64") ? nullptr : reinterpret_cast<void*>(&gemm);
}

}  // namespace emu
