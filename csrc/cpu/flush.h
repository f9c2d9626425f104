// The processor's treatment of subnormal results.
#pragma once

#include "cpu/level.h"

namespace mamba::cpu::MAMBA_CPU_LEVEL {

// While it lives, results below the smallest normal number become 0: a state that decays towards 0 would otherwise slow every step down
// tenfold on some processors. Inputs are not touched.
class FlushSubnormals {
 public:
#if defined(__SSE__)
  FlushSubnormals() : saved_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(saved_ | 0x8000); }
  ~FlushSubnormals() { __builtin_ia32_ldmxcsr(saved_); }

 private:
  unsigned saved_;
#else
  FlushSubnormals() {}
  ~FlushSubnormals() {}
#endif
  FlushSubnormals(const FlushSubnormals&) = delete;
};

}  // namespace mamba::cpu::MAMBA_CPU_LEVEL
