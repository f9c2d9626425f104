// One source, several instruction sets: setup.py compiles every file of csrc/cpu once per level, with MAMBA_CPU_LEVEL set to
// baseline, avx2 or avx512 and the matching compiler flags; the level in use is chosen at run time.
// Everything a kernel file defines stands in namespace mamba::cpu::MAMBA_CPU_LEVEL (or is anonymous), so that no code compiled for
// one level can be linked into another: no std containers, no std::function, no inline functions from outside that namespace
// that the compiler may leave out of line.
#pragma once

#ifndef MAMBA_CPU_LEVEL
#define MAMBA_CPU_LEVEL baseline
#endif

namespace mamba::cpu {

enum class Level { baseline, avx2, avx512 };

// The best level that the machine supports, or the one MAMBA_OPS_CPU_CAPABILITY names; decided at the first call, which throws when the
// variable names an unknown or unsupported level. Defined in ops/cpu_level.cpp.
Level level();

// Whether the CPU converts float to bf16 by itself (AVX512-BF16; of use at level avx512). Defined in ops/cpu_level.cpp.
extern const bool bf16_instructions;

}  // namespace mamba::cpu

// Declares the kernel `name(const Params&)` of every level and cpu::name, which forwards to the level in use. Stands in params/<op>.h.
#if defined(__x86_64__)
#define MAMBA_CPU_KERNEL(name, Params)                 \
  namespace mamba::cpu {                               \
  namespace baseline {                                 \
  void name(const Params&);                            \
  }                                                    \
  namespace avx2 {                                     \
  void name(const Params&);                            \
  }                                                    \
  namespace avx512 {                                   \
  void name(const Params&);                            \
  }                                                    \
  inline void name(const Params& params) {             \
    switch (level()) {                                 \
      case Level::avx512: return avx512::name(params); \
      case Level::avx2: return avx2::name(params);     \
      default: return baseline::name(params);          \
    }                                                  \
  }                                                    \
  }
#else
#define MAMBA_CPU_KERNEL(name, Params)                                      \
  namespace mamba::cpu {                                                    \
  namespace baseline {                                                      \
  void name(const Params&);                                                 \
  }                                                                         \
  inline void name(const Params& params) { return baseline::name(params); } \
  }
#endif
