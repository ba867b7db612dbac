// Which instructions processor and system have. By hand, because __builtin_cpu_supports needs a library of Clang's
// that is not linked on Windows.
#pragma once

#include <cpuid.h>

#include <cstdint>

#include "math/tables.h"

namespace ngn {
inline namespace NGN_ISA {

constexpr uint32_t AVX_REGISTERS = 0x6, AVX512_REGISTERS = 0xe6;  // of XCR0

// Whether a processor has these bits of cpuid(1).ecx and cpuid(7).ebx, and the system saves these registers.
inline bool has_features(uint32_t ecx_of_1, uint32_t ebx_of_7, uint32_t registers) {
  constexpr uint32_t OSXSAVE = 1u << 27;
  unsigned a, b, c, d;
  if (!__get_cpuid_count(1, 0, &a, &b, &c, &d)) return false;
  ecx_of_1 |= OSXSAVE;
  if ((c & ecx_of_1) != ecx_of_1) return false;
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & registers) != registers) return false;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & ebx_of_7) == ebx_of_7;
}

constexpr uint32_t FMA = 1u << 12, AVX = 1u << 28;                                                   // cpuid(1).ecx
constexpr uint32_t AVX2 = 1u << 5, AVX512F = 1u << 16, AVX512DQ = 1u << 17, AVX512BW = 1u << 30, AVX512VL = 1u << 31;

}  // namespace NGN_ISA
}  // namespace ngn
