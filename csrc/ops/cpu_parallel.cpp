// The CPU kernels' thread pool is torch's own: torch.set_num_threads governs it.
#include "cpu/parallel.h"

#include <torch/csrc/stable/ops.h>

namespace mamba::cpu {

void run_parallel(int64_t count, void (*task)(void*, int64_t, int64_t), void* context) {
  if (count <= 0) return;
  if (count == 1) return task(context, 0, 1);
  torch::stable::parallel_for(0, count, 1, [=](int64_t begin, int64_t end) { task(context, begin, end); });
}

}  // namespace mamba::cpu
