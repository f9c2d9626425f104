// Matrix products by cuBLAS, on torch's handle: it carries the current stream and a workspace that CUDA graphs may capture. The only user
// of cuBLAS; training projections are nn.Linear's.
//
// The few declarations that are needed stand here and the function is looked up in the cuBLAS that the process has loaded, torch's own.
// So a build needs neither cuBLAS's headers nor its library, and one binary serves torch with CUDA 12 or 13.
//
// cuBLAS wants matrices whose rows or columns are contiguous and do not overlap. Operands that are not so (stepped, expanded) are copied
// first; a result that is not so is computed in scratch memory and copied back. Bytes: a, b read, c written (and read to add to it) once; a
// copy adds twice its operand. Bound by the matrix units or, for few rows, by reading b.
#include "cuda/gemm.h"

#include "cuda/math.cuh"

namespace mamba::cuda {
namespace {

// cublas_api.h and library_types.h, unchanged since CUDA 12.
enum Operation { as_stored = 0, transposed = 1 };                        // cublasOperation_t
enum DataType { real_32 = 0, real_64 = 1, real_16 = 2, real_b16 = 14 };  // cudaDataType
enum ComputeType { compute_32 = 68, compute_64 = 70 };                   // cublasComputeType_t
constexpr int default_algorithm = -1;                                    // cublasGemmAlgo_t

using Gemm = int (*)(void* handle, int transa, int transb, int64_t m, int64_t n, int64_t k, const void* alpha, const void* a, int type_a,
                     int64_t lda, long long stride_a, const void* b, int type_b, int64_t ldb, long long stride_b, const void* beta, void* c,
                     int type_c, int64_t ldc, long long stride_c, int64_t batch, int compute, int algorithm);

Gemm find_gemm() {
  static const Gemm found = library_function<Gemm>({"libcublas.so.13", "libcublas.so.12"}, "cublasGemmStridedBatchedEx_64");
  if (!found) throw std::runtime_error("mamba_ops: cuBLAS 12 or 13 was not found (cublasGemmStridedBatchedEx_64)");
  return found;
}

int data_type(DType dtype) {
  switch (dtype) {
    case DType::f64: return real_64;
    case DType::bf16: return real_b16;
    case DType::f16: return real_16;
    default: return real_32;
  }
}

constexpr int copy_threads = 256;

template <class S>
__global__ void __launch_bounds__(copy_threads)
    copy_kernel(const View<3> from, const View<3> to, int64_t rows, int64_t columns, int64_t count) {
  const int64_t index = int64_t(blockIdx.x) * copy_threads + threadIdx.x;
  if (index >= count) return;
  const int64_t column = index % columns, row = index / columns % rows, b = index / columns / rows;
  *to.at<S>(b, row, column) = *from.at<S>(b, row, column);
}

void copy(const View<3>& from, const View<3>& to, int64_t batch, int64_t rows, int64_t columns, const Context& context) {
  const int64_t count = batch * rows * columns;
  dispatch_floating(from.dtype, [&](auto tag) {
    using S = typename decltype(tag)::type;
    launch(context, "gemm_copy", copy_kernel<S>, (count + copy_threads - 1) / copy_threads, copy_threads, 0, from, to, rows, columns,
           count);
  });
}

// How cuBLAS sees an operand: the distance of its rows (by_columns: of its columns), 0 where it cannot read it.
struct Stored {
  int64_t distance = 0;
  bool by_columns = false;

  Stored(const View<3>& view, int64_t rows, int64_t columns) {
    const int64_t row = rows <= 1 ? larger(columns, 1) : view.stride[1], column = columns <= 1 ? larger(rows, 1) : view.stride[2];
    if ((columns <= 1 || column == 1) && row >= larger(columns, 1)) {
      distance = row;
    } else if ((rows <= 1 || row == 1) && column >= larger(rows, 1)) {
      distance = column;
      by_columns = true;
    }
  }
};

View<3> scratch_like(const View<3>& view, int64_t batch, int64_t rows, int64_t columns, const Context& context) {
  View<3> dense;
  dense.dtype = view.dtype;
  dense.data = context.scratch<char>(batch * rows * columns * size_of(view.dtype));
  dense.stride[0] = rows * columns;
  dense.stride[1] = columns;
  dense.stride[2] = 1;
  return dense;
}

View<3> readable(const View<3>& view, int64_t batch, int64_t rows, int64_t columns, const Context& context) {
  if (Stored(view, rows, columns).distance) return view;
  const View<3> dense = scratch_like(view, batch, rows, columns, context);
  copy(view, dense, batch, rows, columns, context);
  return dense;
}

View<3> flipped(View<3> view) {
  std::swap(view.stride[1], view.stride[2]);
  return view;
}

// c by rows. In cuBLAS's order of axes that is the product c^T = b^T a^T.
void multiply_by_rows(const Product& p, const Context& context) {
  const Stored a(p.a, p.rows, p.inner), b(p.b, p.inner, p.columns), c(p.c, p.rows, p.columns);
  const double one_64 = 1, beta_64 = p.add ? 1 : 0;
  const float one_32 = 1, beta_32 = p.add ? 1 : 0;
  const bool wide = p.a.dtype == DType::f64;
  const void *one = wide ? static_cast<const void*>(&one_64) : &one_32, *beta = wide ? static_cast<const void*>(&beta_64) : &beta_32;
  const int type = data_type(p.a.dtype);
  const int status =
      find_gemm()(context.blas_handle(), b.by_columns ? transposed : as_stored, a.by_columns ? transposed : as_stored, p.columns, p.rows,
                  p.inner, one, p.b.data, type, b.distance, p.b.stride[0], p.a.data, type, a.distance, p.a.stride[0], beta, p.c.data,
                  data_type(p.c.dtype), c.distance, p.c.stride[0], p.batch, wide ? compute_64 : compute_32, default_algorithm);
  if (status) throw std::runtime_error("mamba_ops: cuBLAS failed with status " + std::to_string(status));
}

}  // namespace

void multiply(const Product& product, const Context& context) {
  Product p = product;
  if (p.batch == 0 || p.rows == 0 || p.columns == 0) return;
  p.a = readable(p.a, p.batch, p.rows, p.inner, context);
  p.b = readable(p.b, p.batch, p.inner, p.columns, context);
  const bool scattered = !Stored(p.c, p.rows, p.columns).distance;
  if (scattered) {
    p.c = scratch_like(product.c, p.batch, p.rows, p.columns, context);
    if (p.add) copy(product.c, p.c, p.batch, p.rows, p.columns, context);
  }
  if (Stored(p.c, p.rows, p.columns).by_columns)
    multiply_by_rows({p.batch, p.columns, p.inner, p.rows, flipped(p.b), flipped(p.a), flipped(p.c), p.add}, context);
  else
    multiply_by_rows(p, context);
  if (scattered) copy(p.c, product.c, p.batch, p.rows, p.columns, context);
}

}  // namespace mamba::cuda
