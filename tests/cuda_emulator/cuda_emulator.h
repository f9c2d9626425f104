// Runs CUDA kernels on the CPU: `g++ -x c++ -include cuda_emulator.h kernel.cu`. Needs no CUDA toolkit.
// Every CUDA thread is a fiber, so barriers and warp shuffles really interleave. Compiled with -fsanitize=thread (compile step only;
// cuda_emulator.cpp supplies the hooks), every memory access is checked for bounds, initialisation and races.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#ifdef __CUDACC__
#error "cuda_emulator.h replaces nvcc; do not include it in an nvcc compilation"
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define EMU_CALL_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace emu {

struct Coordinates {
  uint3 thread, block;
  dim3 block_dim, grid_dim;
  unsigned index;  // of the thread in its block
};
extern thread_local Coordinates* current;  // of the running CUDA thread, null in host code

enum class WarpOp : uint8_t { sync, shuffle, ballot };

// Runs `body(context)` once for every thread of the grid; throws std::runtime_error on any misuse.
void run_grid(dim3 grid, dim3 block, size_t shared_bytes, void (*body)(void*), void* context, const char* name);
void sync_block(const char* file, int line);
uint64_t warp_exchange(WarpOp op, unsigned mask, uint64_t value, int source_lane, const char* file, int line);
inline unsigned lane() { return current->index % 32; }
std::byte* dynamic_shared_memory(size_t bytes);
std::byte* static_shared_memory(const void* tag, size_t bytes, size_t alignment);
void begin_atomic(const void* address, size_t bytes);
void* library_function(const char* name);  // cublas.cu

// Like the <<<>>> launch, the arguments are converted to the kernel's parameter types first and copied per thread.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, const char* name, Arguments&&... arguments) {
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<Parameters...> arguments;
  } call{kernel, {std::forward<Arguments>(arguments)...}};
  run_grid(
      grid, block, shared_bytes,
      [](void* context) {
        auto& c = *static_cast<Call*>(context);
        std::apply(c.kernel, c.arguments);
      },
      &call, name);
}

template <typename T>
uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>, "shuffles move at most 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}
template <typename T>
T from_bits(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
template <typename T>
T shuffle(unsigned mask, T value, int source, bool in_segment, const char* file, int line) {
  if (!in_segment) source = int(lane());
  return from_bits<T>(warp_exchange(WarpOp::shuffle, mask, to_bits(value), source, file, line));
}
template <typename T, typename F>
__attribute__((no_sanitize("thread"))) T atomic_update(T* address, F&& combine) {
  begin_atomic(address, sizeof(T));
  const T old = *address;
  *address = combine(old);
  return old;
}

}  // namespace emu

#define threadIdx (::emu::current->thread)
#define blockIdx (::emu::current->block)
#define blockDim (::emu::current->block_dim)
#define gridDim (::emu::current->grid_dim)

// Synchronisation and warp collectives.
inline void __syncthreads(EMU_CALL_SITE) { emu::sync_block(file, line); }
inline void __syncwarp(unsigned mask = ~0u, EMU_CALL_SITE) { emu::warp_exchange(emu::WarpOp::sync, mask, 0, 0, file, line); }
inline unsigned __ballot_sync(unsigned mask, int predicate, EMU_CALL_SITE) {
  return unsigned(emu::warp_exchange(emu::WarpOp::ballot, mask, predicate != 0, 0, file, line));
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMU_CALL_SITE) {
  const int lane = int(emu::lane());
  return emu::shuffle(mask, value, (lane & -width) + (source & (width - 1)), true, file, line);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMU_CALL_SITE) {
  const int lane = int(emu::lane()), source = lane - int(delta);
  return emu::shuffle(mask, value, source, source >= (lane & -width), file, line);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMU_CALL_SITE) {
  const int lane = int(emu::lane()), source = lane + int(delta);
  return emu::shuffle(mask, value, source, source < (lane & -width) + width, file, line);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, EMU_CALL_SITE) {
  const int lane = int(emu::lane()), source = lane ^ lane_mask;
  return emu::shuffle(mask, value, source, source < (lane & -width) + width, file, line);
}

template <typename T>
T __ldg(const T* address) {
  return *address;
}
template <typename T>
T atomicAdd(T* p, std::type_identity_t<T> v) {
  return emu::atomic_update(p, [=](T old) { return T(old + v); });
}

// Macros, because glibc has taken the names.
#define __expf(x) ::expf(x)
#define __logf(x) ::logf(x)
inline float __fdividef(float x, float y) { return x / y; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
