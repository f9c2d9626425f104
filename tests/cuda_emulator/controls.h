// What tests and the host layer over the emulator may ask of it.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace emu {

void set_seed(uint64_t seed);  // of the order in which blocks and threads run; 0: index order
bool is_checked();             // whether the kernels were compiled with the memory checks
// The checked build refuses every access outside the tensors of the call at hand, and reads of those parts of them that are not
// initialised.
void add_tensor(const void* address, size_t bytes, size_t element_bytes, bool initialised, bool writable, const std::string& name);
void allow_writes(const void* address);
void forget_tensors();
// Counts since the last call.
std::vector<std::pair<std::string, uint64_t>> take_statistics();

}  // namespace emu
