// One block-wide sum with a seeded bug each: what the emulator must find. `none` is correct.
#include "cuda/device.cuh"

namespace {

enum Bug {
  none,
  missing_barrier,
  read_past_end,
  uninitialised_shared,
  wrong_mask,
  divergent_barrier,
  early_exit,
  write_past_end,
  shared_overflow,
  cross_block_race,
  float_atomics,
  missing_syncwarp,
  wrong_offset,
  misaligned,
  int_overflow,
  write_to_input,
  count
};

struct alignas(16) Four {
  float x, y, z, w;
};

template <Bug bug>
__global__ void block_sum_kernel(const float* in, float* out, int n) {
  struct Storage {
    float warp[4];
  };
  auto& shared = mamba::cuda::static_shared<Storage>();
  const int i = blockIdx.x * 128 + threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (bug == misaligned && threadIdx.x == 0) {
    const Four v = *reinterpret_cast<const Four*>(in + 1);
    if (v.x == 12345.0f) out[0] = v.y;
  }
  if (bug == int_overflow && (n << 21) * int(gridDim.x + 1) == 7) return;
  if (bug == early_exit && i >= n) return;
  if (bug == write_to_input && i == 3) const_cast<float*>(in)[3] = 0.0f;
  float value = (bug == read_past_end ? i <= n : i < n) ? in[i] : 0.0f;
  for (int offset = bug == wrong_offset ? 8 : 16; offset > 0; offset /= 2) {
    if (bug == wrong_mask && lane < 16)
      value += __shfl_down_sync(0x0000ffffu, value, offset);
    else if (bug == wrong_mask)
      value += __shfl_down_sync(0xffffffffu, value, offset);
    else
      value += __shfl_down_sync(0xffffffffu, value, offset);
  }
  if (bug == float_atomics) {
    if (lane == 0) atomicAdd(out, value);
    return;
  }
  if (lane == 0 && !(bug == uninitialised_shared && warp == 3)) shared.warp[warp] = value;
  if (bug == shared_overflow && threadIdx.x == 5) shared.warp[4] = 0.0f;
  if (bug == divergent_barrier) {
    if (warp < 2) __syncthreads();
  } else if (bug != missing_barrier) {
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    const float sum = shared.warp[0] + shared.warp[1] + shared.warp[2] + shared.warp[3];
    out[bug == cross_block_race ? 0 : blockIdx.x] = sum;
    if (bug == write_past_end) out[gridDim.x] = sum;
  }
  if (bug == missing_syncwarp) {  // an exchange within a warp through shared memory
    __syncthreads();
    if (warp == 0) {
      if (lane < 4) shared.warp[lane] = value;
      if (lane < 4 && value != 0.0f) out[0] = shared.warp[3 - lane];
    }
  }
}

template <int bug>
void dispatch(int which, const float* in, float* out, int n) {
  if constexpr (bug < count) {
    if (which == bug) {
      const mamba::cuda::Context context{};
      mamba::cuda::launch(context, "block_sum", block_sum_kernel<Bug(bug)>, (n + 127) / 128, 128, 0, in, out, n);
    } else {
      dispatch<bug + 1>(which, in, out, n);
    }
  }
}

}  // namespace

void run_seeded_bug(int which, const float* in, float* out, int n) { dispatch<0>(which, in, out, n); }
