#pragma once

// Why a CPU cannot run the kernels of an instruction set. Empty if it can.

#include <string>

#include "fusewise/context.h"

namespace fusewise::cpu {

template <typename Call>
std::string needs_avx512(const Context&, const Call&) {
  const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  return has ? "" : "this CPU has no AVX-512 (F, BW, VL and DQ, with FMA and F16C)";
}

template <typename Call>
std::string needs_avx2(const Context&, const Call&) {
  const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                   __builtin_cpu_supports("f16c");
  return has ? "" : "this CPU has no AVX2 with FMA and F16C";
}

template <typename Call>
std::string needs_nothing(const Context&, const Call&) {
  return "";
}

}  // namespace fusewise::cpu
