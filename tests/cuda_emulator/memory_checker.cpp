#include "memory_checker.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace emu {
namespace {

// file:line of an instruction, by addr2line.
std::string location(const void* pc) {
  Dl_info info{};
  if (!pc || !dladdr(pc, &info)) return "an unknown place";
  char command[512], line[512] = "an unknown place";
  std::snprintf(command, sizeof command, "addr2line -e '%s' 0x%zx 2>/dev/null", info.dli_fname,
                size_t(static_cast<const char*>(pc) - static_cast<const char*>(info.dli_fbase)) - 1);
  if (FILE* pipe = popen(command, "r")) {
    if (std::fgets(line, sizeof line, pipe)) line[std::strcspn(line, "\n (")] = 0;
    pclose(pipe);
  }
  const char* slash = std::strrchr(line, '/');
  return slash ? slash + 1 : line;
}

bool contains(const std::map<uintptr_t, uintptr_t>& ranges, uintptr_t begin, uintptr_t end) {
  const auto it = ranges.upper_bound(begin);
  return it != ranges.end() && begin >= it->second && end <= it->first;
}

}  // namespace

void MemoryChecker::add_global(const void* p, size_t bytes, size_t element, bool initialised, bool writable, const std::string& name) {
  if (!bytes) return;
  auto begin = uintptr_t(p), end = begin + bytes;
  auto it = globals_.upper_bound(begin);
  if (it != globals_.end() && it->second.begin <= begin && it->second.end >= end) return;
  Region region{begin, end, element, writable, name, {}};
  while (it != globals_.end() && it->second.begin < end) {
    region.begin = std::min(region.begin, it->second.begin);
    region.end = std::max(region.end, it->second.end);
    region.granule = std::min(region.granule, it->second.granule);
    region.writable |= it->second.writable;
    it = globals_.erase(it);
  }
  region.granules.assign((region.end - region.begin) / region.granule, Granule{{}, {}, initialised});
  globals_.insert_or_assign(region.end, std::move(region));
}

void MemoryChecker::allow_writes(const void* p) {
  const auto it = globals_.upper_bound(uintptr_t(p));
  if (it != globals_.end() && it->second.begin <= uintptr_t(p)) it->second.writable = true;
}

void MemoryChecker::ignore(const void* begin, size_t bytes) { ignored_[uintptr_t(begin) + bytes] = uintptr_t(begin); }

void MemoryChecker::start_block(const void* arena, size_t arena_bytes) {
  block_epoch_ = ++epoch_;
  shared_objects_.clear();
  shared_.begin = uintptr_t(arena);
  shared_.end = shared_.begin + arena_bytes;
  shared_.granules.resize(arena_bytes / shared_.granule);
}

void MemoryChecker::add_shared(const void* p, size_t bytes) {
  if (!enabled) return;
  const auto begin = uintptr_t(p);
  shared_objects_[begin + bytes] = begin;
  for (size_t i = 0; i < bytes; i += shared_.granule) shared_.granules[(begin - shared_.begin + i) / shared_.granule] = {};
}

// Did another thread, warp or block make this earlier access with nothing that orders it before the one by `by`?
bool MemoryChecker::unordered(const Access& earlier, Accessor by, bool global) const {
  if (earlier.epoch < launch_epoch_) return false;
  if (earlier.epoch < block_epoch_) return global;  // another block of this launch
  if (earlier.epoch < epoch_ || earlier.who == by.thread) return false;
  const unsigned warp = by.thread / kWarp;
  const bool same_warp = earlier.who == (0x8000 | warp) || (earlier.who < kMaxThreads && earlier.who / kWarp == warp);
  return !same_warp || earlier.warp_epoch >= by.warp_epoch;
}

std::string MemoryChecker::neighbours(uintptr_t address) const {
  std::string text;
  const auto it = globals_.upper_bound(address);
  if (it != globals_.begin())
    text += ", " + std::to_string(address - std::prev(it)->first) + " bytes past the end of " + std::prev(it)->second.name;
  if (it != globals_.end()) text += ", " + std::to_string(it->second.begin - address) + " bytes before " + it->second.name;
  return text;
}

std::string MemoryChecker::access(const void* p, size_t bytes, bool write, bool atomic, bool aligned, const void* pc, Accessor by) {
  const uintptr_t begin = uintptr_t(p), end = begin + bytes;
  if (contains(ignored_, begin, end)) return {};
  const std::string what = std::to_string(bytes) + (write ? "-byte write" : "-byte read");
  if (aligned && begin % bytes) return "misaligned " + what + " at " + location(pc);
  Region* region = &shared_;
  if (begin >= shared_.begin && begin < shared_.end) {
    if (!contains(shared_objects_, begin, end)) return "out-of-bounds " + what + " in shared memory at " + location(pc);
    shared_accessed += bytes;
  } else {
    const auto it = globals_.upper_bound(begin);
    if (it == globals_.end() || begin < it->second.begin || end > it->second.end) {
      Dl_info info{};
      if (!write && dladdr(p, &info)) return {};  // a constant table of the program
      return "out-of-bounds " + what + " of global memory" + neighbours(begin) + " at " + location(pc);
    }
    region = &it->second;
    if (write && !region->writable) return "write to read-only " + region->name + " at " + location(pc);
    global_accessed += bytes;
  }
  const bool global = region != &shared_;
  const Access now{epoch_, uint16_t(by.thread), by.warp_epoch, pc};
  for (size_t i = (begin - region->begin) / region->granule; i * region->granule < end - region->begin; ++i) {
    Granule& g = region->granules[i];
    const auto here = [&] { return region->name + "+" + std::to_string(i * region->granule) + " at " + location(pc); };
    if (global && (write ? g.write : g.read).epoch < launch_epoch_) (write ? global_written : global_read) += region->granule;
    if (!write && !g.initialised) return "read of uninitialised " + here();
    if (!atomic && unordered(g.write, by, global))
      return std::string("race: ") + (write ? "write" : "read") + " of " + here() + " is unordered with the write at " +
             location(g.write.pc);
    if (!atomic && write && unordered(g.read, by, global))
      return "race: write of " + here() + " is unordered with the read at " + location(g.read.pc);
    if (write) {
      g.initialised = true;
      if (!atomic) g.write = now;
    } else if (g.read.epoch != epoch_ || !unordered(g.read, by, global)) {
      g.read = now;
    } else if (g.read.who != 0xffff) {  // one more reader
      const unsigned warp = by.thread / kWarp;
      const bool same_warp = (g.read.who & 0x8000 ? g.read.who & 0x7fffu : g.read.who / kWarp) == warp;
      g.read.who = same_warp ? uint16_t(0x8000 | warp) : 0xffff;
      g.read.warp_epoch = by.warp_epoch;
    }
  }
  return {};
}

}  // namespace emu
