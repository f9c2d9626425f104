// Checks every memory access of an instrumented kernel: bounds, alignment, initialisation, data races.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace emu {

constexpr unsigned kWarp = 32, kMaxThreads = 1024;

// Who accesses: a thread of the running block. `warp_epoch` counts its warp's full-mask __syncwarp()s.
struct Accessor {
  unsigned thread;
  uint16_t warp_epoch;
};

class MemoryChecker {
 public:
  static inline bool enabled = false;  // set while loading (by __tsan_init): some kernel was built with -fsanitize=thread

  // A tensor that lies within a known one belongs to it; one that overlaps others joins them.
  void add_global(const void* p, size_t bytes, size_t element, bool initialised, bool writable, const std::string& name);
  void allow_writes(const void* p);  // to the known tensor at p
  void forget_globals() { globals_.clear(); }
  void ignore(const void* begin, size_t bytes);  // stacks and the emulator's own data
  void start_launch() { launch_epoch_ = ++epoch_; }
  void start_block(const void* arena, size_t arena_bytes);
  void add_shared(const void* p, size_t bytes);
  void barrier() { ++epoch_; }
  // Returns the error text, empty if the access is fine.
  std::string access(const void* p, size_t bytes, bool write, bool atomic, bool aligned, const void* pc, Accessor by);

  // Bytes. The first two count what a launch touches, each byte once: the traffic to memory if the caches served all repeated accesses.
  uint64_t global_read = 0, global_written = 0, global_accessed = 0, shared_accessed = 0;

 private:
  // The last accesses to one granule. `who` is a thread, or several readers: of one warp (0x8000 | warp) or more (0xffff).
  struct Access {
    uint32_t epoch = 0;  // grows at every barrier, block and launch
    uint16_t who = 0, warp_epoch = 0;
    const void* pc = nullptr;
  };
  struct Granule {
    Access write, read;
    bool initialised = false;
  };
  struct Region {
    uintptr_t begin = 0, end = 0;
    size_t granule = 2;
    bool writable = true;
    std::string name;
    std::vector<Granule> granules = {};
  };
  bool unordered(const Access& earlier, Accessor by, bool global) const;
  std::string neighbours(uintptr_t address) const;

  std::map<uintptr_t, Region> globals_;  // by end: upper_bound(address) is the only candidate
  Region shared_{.name = "shared memory"};
  std::map<uintptr_t, uintptr_t> shared_objects_, ignored_;  // end -> begin
  uint32_t epoch_ = 1, block_epoch_ = 1, launch_epoch_ = 1;
};

}  // namespace emu
