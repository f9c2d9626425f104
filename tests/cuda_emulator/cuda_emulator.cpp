// Runtime of the CUDA emulator: fibers, block scheduler, barriers and warp operations.
#include "cuda_emulator.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "controls.h"
#include "memory_checker.h"

// Saves the callee-saved registers and the stack pointer of the running fiber and continues another one.
extern "C" void emu_switch(void** save, void* load);
#if defined(__x86_64__)
asm(R"(
.globl emu_switch
.hidden emu_switch
.type emu_switch,@function
emu_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");
#else
#error "cuda_emulator: port emu_switch to this processor"
#endif

namespace emu {

thread_local Coordinates* current = nullptr;

namespace {

constexpr size_t kStackBytes = 64 << 10, kArenaBytes = 256 << 10, kRedZone = 64, kMaxSharedBytes = 227 << 10;
constexpr auto kPoison = std::byte{0xff};  // a NaN in f32, f16 and bf16

struct Options {
  uint64_t seed = 0;  // 0: threads and blocks run in index order
} options;
MemoryChecker checker;
thread_local bool busy = false;  // in a hook, which may use library functions that a kernel's file has left here with hooks in them
std::mutex one_launch_at_a_time;
std::atomic<uint64_t> launches, blocks, barriers, warp_operations, atomics;

enum class State : uint8_t { ready, at_barrier, at_warp, exited };

struct Thread : Coordinates {
  State state = State::ready;
  void* stack_pointer = nullptr;
  const char* file = nullptr;  // where it waits
  int line = 0;
  WarpOp operation{};
  unsigned mask = 0;
  int source = 0;
  uint64_t value = 0, result = 0;
  bool waits_at(const char* f, int l) const { return line == l && (file == f || !std::strcmp(file, f)); }
};

struct Warp {
  unsigned present = 0, arrived = 0, exited = 0;  // lane masks
  uint16_t epoch = 0;
};

struct Launch {
  dim3 grid, block;
  size_t shared_bytes;
  void (*body)(void*);
  void* context;
  const char* name;
  std::vector<uint32_t> order;  // of the blocks
  std::string error;
};

uint64_t next_random(uint64_t& state) {  // splitmix64
  uint64_t z = state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}
void reorder(std::vector<uint32_t>& order, size_t size, uint64_t* random) {
  order.resize(size);
  std::iota(order.begin(), order.end(), 0u);
  if (random)
    for (size_t i = size; i > 1; --i) std::swap(order[i - 1], order[next_random(*random) % i]);
}
std::string text(uint3 v) { return "(" + std::to_string(v.x) + "," + std::to_string(v.y) + "," + std::to_string(v.z) + ")"; }
std::string site(const char* file, int line) { return std::string(" at ") + file + ":" + std::to_string(line); }
unsigned first_lane(unsigned mask) { return unsigned(std::countr_zero(mask)); }

// One operating-system thread that runs blocks.
class Worker {
 public:
  static void run(Launch& l);
  static Worker& self() { return *self_; }
  void sync_block(const char* file, int line);
  uint64_t warp_exchange(WarpOp op, unsigned mask, uint64_t value, int source, const char* file, int line);
  std::byte* dynamic_shared(size_t bytes);
  std::byte* static_shared(const void* tag, size_t bytes, size_t alignment);
  void check(const void* p, size_t bytes, bool write, bool atomic, bool aligned, const void* pc);
  [[noreturn]] void fail(const std::string& message);

 private:
  Worker();
  ~Worker() { munmap(stacks_, kMaxThreads * kStackBytes + kArenaBytes); }
  static void entry();
  void start_block(Launch& l, uint32_t linear);
  void run_block(Launch& l, uint32_t linear);
  Thread& running() { return *static_cast<Thread*>(current); }
  void yield() { emu_switch(&running().stack_pointer, scheduler_stack_pointer_); }
  std::string deadlock() const;

  static thread_local Worker* self_;
  std::byte *stacks_, *arena_;
  std::vector<Thread> threads_{kMaxThreads};
  std::vector<Warp> warps_{kMaxThreads / kWarp};
  std::vector<uint32_t> order_;
  std::map<const void*, std::byte*> static_objects_;
  size_t dynamic_bytes_ = 0, arena_used_ = 0;
  unsigned count_ = 0, live_ = 0, waiting_ = 0;
  const Thread* first_waiting_ = nullptr;
  uint64_t random_ = 0;
  void* scheduler_stack_pointer_ = nullptr;
  Launch* launch_ = nullptr;
  std::string error_;
};
thread_local Worker* Worker::self_ = nullptr;

Worker::Worker() {
  const size_t bytes = kMaxThreads * kStackBytes + kArenaBytes;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("cuda_emulator: no memory for the fiber stacks");
  stacks_ = static_cast<std::byte*>(memory);
  arena_ = stacks_ + kMaxThreads * kStackBytes;
  for (size_t i = 0; i < kMaxThreads; ++i) mprotect(stacks_ + i * kStackBytes, 4096, PROT_NONE);  // overflow: SIGSEGV

  pthread_attr_t attributes;
  void* host_stack;
  size_t size;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &host_stack, &size);
  pthread_attr_destroy(&attributes);
  checker.ignore(stacks_, kMaxThreads * kStackBytes);                 // local variables
  checker.ignore(host_stack, size);                                   // launch arguments
  checker.ignore(threads_.data(), threads_.size() * sizeof(Thread));  // threadIdx and so on
  checker.ignore(&current, sizeof current);
}

void Worker::run(Launch& l) {
  try {
    static thread_local Worker worker;
    self_ = &worker;
    for (const uint32_t block : l.order) worker.run_block(l, block);
  } catch (const std::runtime_error& e) {
    l.error = e.what();
  }
}

void Worker::entry() {
  Worker& w = self();
  w.launch_->body(w.launch_->context);
  Thread& t = w.running();
  t.state = State::exited;
  w.warps_[t.index / kWarp].exited |= 1u << t.index % kWarp;
  --w.live_;
  w.yield();
  std::abort();  // never resumed
}

void Worker::start_block(Launch& l, uint32_t linear) {
  launch_ = &l;
  count_ = live_ = l.block.x * l.block.y * l.block.z;
  waiting_ = 0;
  static_objects_.clear();
  dynamic_bytes_ = l.shared_bytes;
  arena_used_ = dynamic_bytes_ + kRedZone;
  std::fill_n(arena_, arena_used_, kPoison);
  if (checker.enabled) checker.start_block(arena_, kArenaBytes);
  checker.add_shared(arena_, dynamic_bytes_);
  const uint3 block{linear % l.grid.x, linear / l.grid.x % l.grid.y, linear / l.grid.x / l.grid.y};
  for (unsigned i = 0; i < count_; ++i) {
    const uint3 thread{i % l.block.x, i / l.block.x % l.block.y, i / l.block.x / l.block.y};
    threads_[i] = Thread{{thread, block, l.block, l.grid, i}};
    // Staggered, or the hot frames of all fibers would fall into the same cache sets.
    auto* top = reinterpret_cast<void**>(stacks_ + (i + 1) * kStackBytes - i * 1088 % 16384);
    *--top = nullptr;  // the stack pointer is 8 modulo 16 at entry, as after a call
    *--top = reinterpret_cast<void*>(&entry);
    threads_[i].stack_pointer = top - 6;
  }
  for (unsigned w = 0; w * kWarp < count_; ++w) warps_[w] = {count_ - w * kWarp >= kWarp ? ~0u : (1u << count_ % kWarp) - 1};
  random_ = options.seed ^ (uint64_t(linear) << 32);
  reorder(order_, count_, options.seed ? &random_ : nullptr);
}

void Worker::run_block(Launch& l, uint32_t linear) {
  start_block(l, linear);
  while (live_) {
    bool progress = false;
    for (size_t i = 0; i < count_; ++i) {
      Thread& t = threads_[order_[i]];
      if (t.state != State::ready) continue;
      progress = true;
      current = &t;
      emu_switch(&scheduler_stack_pointer_, t.stack_pointer);
      current = nullptr;
      if (!error_.empty()) throw std::runtime_error("cuda_emulator: " + std::exchange(error_, {}));
    }
    if (!progress) throw std::runtime_error("cuda_emulator: " + deadlock());
  }
  const auto intact = [&](const std::byte* zone) { return std::all_of(zone, zone + kRedZone, [](std::byte b) { return b == kPoison; }); };
  if (!intact(arena_ + dynamic_bytes_) || !intact(arena_ + arena_used_ - kRedZone))
    throw std::runtime_error(std::string("cuda_emulator: ") + l.name + " wrote past the end of its shared memory");
  blocks.fetch_add(1, std::memory_order_relaxed);
}

// Called on a fiber, which is abandoned: kernels own nothing that needs a destructor.
void Worker::fail(const std::string& message) {
  busy = true;
  error_ = std::string(launch_->name) + ", block " + text(running().block) + ", thread " + text(running().thread) + ": " + message;
  busy = false;
  yield();
  std::abort();
}

std::string Worker::deadlock() const {
  std::map<std::string, std::vector<unsigned>> groups;
  for (unsigned i = 0; i < count_; ++i) {
    const Thread& t = threads_[i];
    char mask[16];
    std::snprintf(mask, sizeof mask, "0x%08x", t.mask);
    groups[t.state == State::at_barrier ? "wait in __syncthreads" + site(t.file, t.line)
           : t.state == State::at_warp  ? std::string("wait in a warp operation with mask ") + mask + site(t.file, t.line)
           : t.state == State::exited   ? "have exited"
                                        : "run"]
        .push_back(i);
  }
  std::string message = "deadlock in " + std::string(launch_->name) + ", block " + text(threads_[0].block) + ":";
  for (const auto& [what, members] : groups)
    message += " " + std::to_string(members.size()) + " threads (" + std::to_string(members.front()) + " to " +
               std::to_string(members.back()) + ") " + what + ";";
  return message;
}

void Worker::sync_block(const char* file, int line) {
  Thread& t = running();
  t.state = State::at_barrier, t.file = file, t.line = line;
  if (!waiting_) first_waiting_ = &t;
  if (!first_waiting_->waits_at(file, line)) fail("diverged __syncthreads, " + deadlock());
  if (++waiting_ == count_) {
    waiting_ = 0;
    for (unsigned i = 0; i < count_; ++i) threads_[i].state = State::ready;
    checker.barrier();
    barriers.fetch_add(1, std::memory_order_relaxed);
    if (options.seed) reorder(order_, count_, &random_);
  }
  yield();
}

uint64_t Worker::warp_exchange(WarpOp op, unsigned mask, uint64_t value, int source, const char* file, int line) {
  Thread& t = running();
  Warp& warp = warps_[t.index / kWarp];
  const unsigned first = t.index / kWarp * kWarp, bit = 1u << t.index % kWarp;
  if (!(mask & bit)) fail("warp operation whose mask lacks the calling lane" + site(file, line));
  if (mask & ~warp.present) fail("warp operation whose mask names lanes past the end of the block" + site(file, line));
  if (mask & warp.exited) fail("warp operation whose mask names an exited lane" + site(file, line));
  if (const unsigned others = warp.arrived & mask) {  // any one will do: they were compared with each other on arrival
    const Thread& o = threads_[first + first_lane(others)];
    if (o.mask != mask || o.operation != op || !o.waits_at(file, line))
      fail("diverged warp operation" + site(file, line) + ", while lane " + std::to_string(o.index - first) + " waits" +
           site(o.file, o.line));
  }
  t.state = State::at_warp, t.file = file, t.line = line;
  t.operation = op, t.mask = mask, t.value = value, t.source = source;
  warp.arrived |= bit;
  if ((warp.arrived & mask) == mask) {  // the last to arrive completes it for all
    unsigned ballot = 0;
    for (unsigned rest = mask; rest; rest &= rest - 1)
      if (threads_[first + first_lane(rest)].value) ballot |= rest & -rest;
    for (unsigned rest = mask; rest; rest &= rest - 1) {
      Thread& o = threads_[first + first_lane(rest)];
      const bool defined = mask >> o.source & 1;  // a lane outside the mask has no defined value: poison
      o.result = op == WarpOp::ballot ? ballot : defined ? threads_[first + unsigned(o.source)].value : ~uint64_t{0};
      o.state = State::ready;
    }
    warp.arrived &= ~mask;
    if (op == WarpOp::sync && mask == ~0u) ++warp.epoch;  // a shuffle orders no memory accesses
    warp_operations.fetch_add(1, std::memory_order_relaxed);
  }
  yield();
  return t.result;
}

std::byte* Worker::dynamic_shared(size_t bytes) {
  if (bytes > dynamic_bytes_) fail("the launch gave less dynamic shared memory than the kernel uses");
  return arena_;
}

std::byte* Worker::static_shared(const void* tag, size_t bytes, size_t alignment) {
  std::byte*& object = static_objects_[tag];
  if (object) return object;
  alignment = std::max<size_t>(alignment, 16);
  const size_t start = (arena_used_ + alignment - 1) / alignment * alignment;
  if (start + bytes + kRedZone > kArenaBytes) fail("more shared memory than the emulator has");
  arena_used_ = start + bytes + kRedZone;
  object = arena_ + start;
  std::fill_n(object, bytes + kRedZone, kPoison);
  checker.add_shared(object, bytes);
  return object;
}

void Worker::check(const void* p, size_t bytes, bool write, bool atomic, bool aligned, const void* pc) {
  const Thread& t = running();
  busy = true;
  const std::string error = checker.access(p, bytes, write, atomic, aligned, pc, {t.index, warps_[t.index / kWarp].epoch});
  busy = false;
  if (!error.empty()) fail(error);
}

struct SourceLocation {
  const char* file;
  uint32_t line, column;
};
void undefined(const SourceLocation& at, const char* what) {
  if (current) Worker::self().fail(what + site(at.file, int(at.line)));
}
void hook(const void* p, size_t bytes, bool write, bool aligned, const void* pc) {
  if (current && !busy) Worker::self().check(p, bytes, write, false, aligned, pc);
}

}  // namespace

void run_grid(dim3 grid, dim3 block, size_t shared_bytes, void (*body)(void*), void* context, const char* name) {
  const size_t threads = size_t(block.x) * block.y * block.z, count = size_t(grid.x) * grid.y * grid.z;
  if (!threads || threads > kMaxThreads || !count || grid.y > 65535 || grid.z > 65535 || shared_bytes > kMaxSharedBytes)
    throw std::runtime_error(std::string("cuda_emulator: invalid launch configuration of ") + name);
  const std::lock_guard lock(one_launch_at_a_time);
  Launch l{grid, block, shared_bytes, body, context, name, {}, {}};
  uint64_t random = options.seed;
  reorder(l.order, count, options.seed ? &random : nullptr);
  checker.start_launch();
  ++launches;
  Worker::run(l);
  if (!l.error.empty()) throw std::runtime_error(l.error);
}

void sync_block(const char* file, int line) { Worker::self().sync_block(file, line); }
uint64_t warp_exchange(WarpOp op, unsigned mask, uint64_t value, int source, const char* file, int line) {
  return Worker::self().warp_exchange(op, mask, value, source, file, line);
}
std::byte* dynamic_shared_memory(size_t bytes) { return Worker::self().dynamic_shared(bytes); }
std::byte* static_shared_memory(const void* tag, size_t bytes, size_t alignment) {
  return Worker::self().static_shared(tag, bytes, alignment);
}
void begin_atomic(const void* p, size_t bytes) {
  ++atomics;
  if (checker.enabled) Worker::self().check(p, bytes, true, true, true, __builtin_return_address(0));
}

}  // namespace emu

// The hooks that g++ -fsanitize=thread calls before every access. __tsan_init runs when an instrumented object is loaded.
#define EMU_HOOK(name, bytes, write, aligned) \
  void name(void* p) { emu::hook(p, bytes, write, aligned, __builtin_return_address(0)); }
#define EMU_HOOKS(bytes)                           \
  EMU_HOOK(__tsan_read##bytes, bytes, false, true) \
  EMU_HOOK(__tsan_write##bytes, bytes, true, true) \
  EMU_HOOK(__tsan_unaligned_read##bytes, bytes, false, false) EMU_HOOK(__tsan_unaligned_write##bytes, bytes, true, false)
extern "C" {
EMU_HOOKS(1) EMU_HOOKS(2) EMU_HOOKS(4) EMU_HOOKS(8) EMU_HOOKS(16) void __tsan_read_range(void* p, size_t n) {
  emu::hook(p, n, false, false, __builtin_return_address(0));
}
void __tsan_write_range(void* p, size_t n) { emu::hook(p, n, true, false, __builtin_return_address(0)); }
void __tsan_init() { emu::checker.enabled = true; }
void __tsan_vptr_update(void**, void*) {}
uint8_t __tsan_atomic8_load(const volatile uint8_t* p, int) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }  // of function statics

// The hooks of g++ -fsanitize=alignment,bounds,shift,signed-integer-overflow; all get a source location first.
#define EMU_UNDEFINED(name, what) \
  void __ubsan_handle_##name(const emu::SourceLocation* at, uintptr_t, uintptr_t) { emu::undefined(*at, what); }
EMU_UNDEFINED(type_mismatch_v1, "misaligned access")
EMU_UNDEFINED(out_of_bounds, "array index out of bounds")
EMU_UNDEFINED(shift_out_of_bounds, "shift out of range")
EMU_UNDEFINED(add_overflow, "signed integer overflow in +")
EMU_UNDEFINED(sub_overflow, "signed integer overflow in -")
EMU_UNDEFINED(mul_overflow, "signed integer overflow in *")
EMU_UNDEFINED(divrem_overflow, "division overflow")
EMU_UNDEFINED(negate_overflow, "signed integer overflow in -")
}

namespace emu {

void set_seed(uint64_t seed) { options.seed = seed; }
bool is_checked() { return checker.enabled; }
void add_tensor(const void* p, size_t bytes, size_t element, bool initialised, bool writable, const std::string& name) {
  if (checker.enabled) checker.add_global(p, bytes, element, initialised, writable, name);
}
void allow_writes(const void* p) {
  if (checker.enabled) checker.allow_writes(p);
}
void forget_tensors() { checker.forget_globals(); }

std::vector<std::pair<std::string, uint64_t>> take_statistics() {
  return {{"launches", launches.exchange(0)},
          {"blocks", blocks.exchange(0)},
          {"barriers", barriers.exchange(0)},
          {"warp_operations", warp_operations.exchange(0)},
          {"atomics", atomics.exchange(0)},
          {"bytes_read", std::exchange(checker.global_read, 0)},
          {"bytes_written", std::exchange(checker.global_written, 0)},
          {"bytes_accessed", std::exchange(checker.global_accessed, 0)},
          {"shared_bytes_accessed", std::exchange(checker.shared_accessed, 0)}};
}

}  // namespace emu
