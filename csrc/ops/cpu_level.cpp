// Which CPU level runs: see cpu/level.h.
#include "cpu/level.h"

#include <cstdlib>
#include <cstring>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "ops/check.h"

namespace mamba {
namespace cpu {
namespace {

constexpr const char* names[] = {"baseline", "avx2", "avx512"};

Level best_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  unsigned eax, ebx, ecx, edx;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);  // Clang 14 cannot ask for it by name
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  return avx2 && avx512 ? Level::avx512 : avx2 ? Level::avx2 : Level::baseline;
#else
  return Level::baseline;
#endif
}

Level chosen_level() {
  const Level best = best_level();
  const char* wish = std::getenv("MAMBA_OPS_CPU_CAPABILITY");
  if (!wish || !*wish) return best;
  for (int i = 0; i < 3; ++i) {
    if (std::strcmp(wish, names[i])) continue;
    if (i > static_cast<int>(best))
      fail("MAMBA_OPS_CPU_CAPABILITY=", wish, " is not supported by this CPU, whose best level is ", names[static_cast<int>(best)]);
    return static_cast<Level>(i);
  }
  fail("MAMBA_OPS_CPU_CAPABILITY must be baseline, avx2 or avx512, got ", wish);
}

bool converts_bf16() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

}  // namespace

const bool bf16_instructions = converts_bf16();

Level level() {
  static const Level chosen = chosen_level();
  return chosen;
}

}  // namespace cpu

namespace {
std::string cpu_capability() { return cpu::names[static_cast<int>(cpu::level())]; }
}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mamba, CompositeExplicitAutograd, m) { m.impl("cpu_capability", TORCH_BOX(&cpu_capability)); }

}  // namespace mamba
