// Threads and scratch memory for CPU kernels. Torch-free: the host layer supplies run_parallel (its thread pool).
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

#include "cpu/level.h"

namespace mamba::cpu {

// Splits 0..count-1 into at most one contiguous range a thread and calls task(context, begin, end) for each.
// Defined in ops/cpu_parallel.cpp. Work items must be independent: the split depends on the number of threads.
void run_parallel(int64_t count, void (*task)(void*, int64_t, int64_t), void* context);

namespace MAMBA_CPU_LEVEL {

// Calls body(begin, end) for ranges that cover 0..count-1; up to `serial` items are not worth waking a second thread.
template <class F>
inline void parallel_for(int64_t count, const F& body, int64_t serial = 1) {
  if (count <= serial) {
    if (count > 0) body(int64_t{0}, count);
    return;
  }
  run_parallel(
      count, [](void* context, int64_t begin, int64_t end) { (*static_cast<const F*>(context))(begin, end); }, const_cast<F*>(&body));
}

// Uninitialised, 64-byte aligned memory for `count` objects of a trivial type; a little of it comes without an allocation.
template <class T>
class Scratch {
 public:
  explicit Scratch(int64_t count) {
    if (count <= 0) return;  // get() is null
    const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    data_ = static_cast<T*>(bytes <= sizeof little_ ? static_cast<void*>(little_) : std::aligned_alloc(64, bytes));
    if (!data_) throw std::bad_alloc();
  }
  ~Scratch() {
    if (static_cast<void*>(data_) != little_) std::free(data_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  T* get() const { return data_; }

 private:
  alignas(64) unsigned char little_[4096];
  T* data_ = nullptr;
};

}  // namespace MAMBA_CPU_LEVEL
}  // namespace mamba::cpu
