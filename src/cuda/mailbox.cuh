#pragma once

// Floats that blocks of one launch send each other through global memory. Value and stamp travel in
// one 8-byte word, so no fence is needed: a fence would wait for all of a block's stores before it.

namespace fusewise::cuda {

using Mail = unsigned long long;

__device__ __forceinline__ void clear_mail(Mail* slot) { *slot = 0; }

__device__ __forceinline__ void send_mail(Mail* slot, float value) {
  const Mail word = (Mail{1} << 32) | __float_as_uint(value);
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(slot), "l"(word) : "memory");
}

__device__ __forceinline__ Mail peek_mail(const Mail* slot) {
  Mail word;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(slot) : "memory");
  return word;
}

/// Waits until the slot was sent to. `word` is what an earlier peek saw.
__device__ __forceinline__ float read_mail(const Mail* slot, Mail word) {
  while (word >> 32 == 0) word = peek_mail(slot);
  return __uint_as_float(static_cast<unsigned>(word));
}

}  // namespace fusewise::cuda
