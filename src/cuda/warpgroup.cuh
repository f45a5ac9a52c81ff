#pragma once

// GEMMs of a warpgroup (128 threads, 64 rows) on Hopper's tensor cores. The right operand is in
// shared memory, the left one there or in registers. They run asynchronously: the warps continue
// meanwhile. Compiled for sm_90a only.
//
// A tile of the result has 8 columns. Lane 4g + t of warp w has columns 2t and 2t + 1 in rows g and
// g + 8 of the warp's 16 rows. `d[4 j + 2 r + b]` is tile j, row g + 8 r, column 2t + b. Of a left
// operand in registers, lane 4g + t has the pairs of columns at 2t and 8 + 2t in half precision,
// and columns t and 4 + t in float32; row g first, then g + 8.

#include <cstdint>

#include "cuda/copy_async.cuh"

namespace fusewise::cuda {

/// Needed before GEMMs that use registers written since the last GEMMs.
__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
/// Combines all GEMMs issued since the last call into one group.
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until all but the last kPending groups are complete.
template <int kPending = 0>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
/// Makes this thread's writes to shared memory visible to GEMMs after the next barrier.
__device__ __forceinline__ void show_to_products() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Layout of operands in shared memory: lines of 128 or 64 bytes, eight lines in a unit, `stride`
/// bytes from unit to unit. Chunks of 16 bytes are swizzled: the line's number is xored into the
/// chunk's.
template <int kLineBytes, int kStride>
struct OperandLayout {
  static_assert(kLineBytes == 128 || kLineBytes == 64);
  static constexpr unsigned kHigh = kStride >> 4 | (kLineBytes == 128 ? 1u : 2u) << 30;
};

/// An operand in the shared memory that begins at `memory`. `+ bytes` moves it by that distance.
/// Operands differ only in their distance from `memory`, which the compiler knows.
template <typename Layout>
struct Operand {
  unsigned low;

  __device__ __forceinline__ Operand(const void* memory, const void* start)
      : low(((shared_address(memory) >> 4 & 0x3fff) | 1u << 16) +
            ((shared_address(start) - shared_address(memory)) >> 4)) {}
  __device__ __forceinline__ Operand operator+(int bytes) const {
    Operand o = *this;
    o.low += bytes >> 4;
    return o;
  }
};

#define FUSEWISE_RESULT_16(how)                                                           \
  how(d[0]), how(d[1]), how(d[2]), how(d[3]), how(d[4]), how(d[5]), how(d[6]), how(d[7]), \
      how(d[8]), how(d[9]), how(d[10]), how(d[11]), how(d[12]), how(d[13]), how(d[14]), how(d[15])
#define FUSEWISE_RESULT_32(how)                                                                    \
  FUSEWISE_RESULT_16(how), how(d[16]), how(d[17]), how(d[18]), how(d[19]), how(d[20]), how(d[21]), \
      how(d[22]), how(d[23]), how(d[24]), how(d[25]), how(d[26]), how(d[27]), how(d[28]),          \
      how(d[29]), how(d[30]), how(d[31])

// With the left operand in registers. kTypes begins with the inner size.
#define FUSEWISE_MULTIPLY_LEFT_32(kTypes, kTail, kAdds, how)                                 \
  asm volatile(                                                                              \
      "{\n.reg .pred adds;\n.reg .b64 right;\nsetp.ne.b32 adds, " kAdds                      \
      ", 0;\n"                                                                               \
      "mov.b64 right, {%20, %21};\n"                                                         \
      "wgmma.mma_async.sync.aligned.m64n32" kTypes                                           \
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, right, " \
      "adds, 1, 1" kTail ";\n}"                                                              \
      : FUSEWISE_RESULT_16(how)                                                              \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.low), "n"(Layout::kHigh))
#define FUSEWISE_MULTIPLY_LEFT_64(kTypes, kTail, kAdds, how)                                    \
  asm volatile(                                                                                 \
      "{\n.reg .pred adds;\n.reg .b64 right;\nsetp.ne.b32 adds, " kAdds                         \
      ", 0;\n"                                                                                  \
      "mov.b64 right, {%36, %37};\n"                                                            \
      "wgmma.mma_async.sync.aligned.m64n64" kTypes                                              \
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,"    \
      "%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, right, adds, 1, 1" kTail ";\n}" \
      : FUSEWISE_RESULT_32(how)                                                                 \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.low), "n"(Layout::kHigh))
#define FUSEWISE_MULTIPLY_LEFT(kTypes, kTail)            \
  if constexpr (kSize == 16 && kAdd) {                   \
    FUSEWISE_MULTIPLY_LEFT_32(kTypes, kTail, "1", "+f"); \
  } else if constexpr (kSize == 16) {                    \
    FUSEWISE_MULTIPLY_LEFT_32(kTypes, kTail, "0", "=f"); \
  } else if constexpr (kAdd) {                           \
    FUSEWISE_MULTIPLY_LEFT_64(kTypes, kTail, "1", "+f"); \
  } else {                                               \
    FUSEWISE_MULTIPLY_LEFT_64(kTypes, kTail, "0", "=f"); \
  }

#define FUSEWISE_MULTIPLY_SHARED(kTypes, kTail)                                                \
  if constexpr (kSize == 16) {                                                                 \
    asm volatile(                                                                              \
        "{\n.reg .b64 left, right;\nmov.b64 left, {%16, %17};\nmov.b64 right, {%18, %19};\n"   \
        "wgmma.mma_async.sync.aligned.m64n32" kTypes                                           \
        " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, left, right, 1, 1, 1" kTail \
        ";\n}"                                                                                 \
        : FUSEWISE_RESULT_16("+f")                                                             \
        : "r"(a.low), "n"(Left::kHigh), "r"(b.low), "n"(Right::kHigh));                        \
  } else {                                                                                     \
    asm volatile(                                                                              \
        "{\n.reg .b64 left, right;\nmov.b64 left, {%32, %33};\nmov.b64 right, {%34, %35};\n"   \
        "wgmma.mma_async.sync.aligned.m64n64" kTypes                                           \
        " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22," \
        "%23,%24,%25,%26,%27,%28,%29,%30,%31}, left, right, 1, 1, 1" kTail ";\n}"              \
        : FUSEWISE_RESULT_32("+f")                                                             \
        : "r"(a.low), "n"(Left::kHigh), "r"(b.low), "n"(Right::kHigh));                        \
  }

/// d = a b, or d += a b with kAdd. a is 64 rows by 8 float32 values, truncated to TF32, or by 16
/// half-precision values. b has that many rows and 32 or 64 columns, and its lines are columns.
template <bool kAdd, int kSize, typename Layout>
__device__ __forceinline__ void multiply_left(float, float (&d)[kSize], const unsigned (&a)[4],
                                              Operand<Layout> b) {
  FUSEWISE_MULTIPLY_LEFT("k8.f32.tf32.tf32", "")
}
template <bool kAdd, int kSize, typename Layout>
__device__ __forceinline__ void multiply_left(__half, float (&d)[kSize], const unsigned (&a)[4],
                                              Operand<Layout> b) {
  FUSEWISE_MULTIPLY_LEFT("k16.f32.f16.f16", ", 0")
}
template <bool kAdd, int kSize, typename Layout>
__device__ __forceinline__ void multiply_left(__nv_bfloat16, float (&d)[kSize],
                                              const unsigned (&a)[4], Operand<Layout> b) {
  FUSEWISE_MULTIPLY_LEFT("k16.f32.bf16.bf16", ", 0")
}

/// d += a^T b over 8 rows in float32 or 16 rows in half precision. Both operands are in shared
/// memory. Lines are columns in float32 and rows in half precision.
template <int kSize, typename Left, typename Right>
__device__ __forceinline__ void multiply_shared(float, float (&d)[kSize], Operand<Left> a,
                                                Operand<Right> b) {
  FUSEWISE_MULTIPLY_SHARED("k8.f32.tf32.tf32", "")
}
template <int kSize, typename Left, typename Right>
__device__ __forceinline__ void multiply_shared(__half, float (&d)[kSize], Operand<Left> a,
                                                Operand<Right> b) {
  FUSEWISE_MULTIPLY_SHARED("k16.f32.f16.f16", ", 1, 1")
}
template <int kSize, typename Left, typename Right>
__device__ __forceinline__ void multiply_shared(__nv_bfloat16, float (&d)[kSize], Operand<Left> a,
                                                Operand<Right> b) {
  FUSEWISE_MULTIPLY_SHARED("k16.f32.bf16.bf16", ", 1, 1")
}

#undef FUSEWISE_MULTIPLY_SHARED
#undef FUSEWISE_MULTIPLY_LEFT
#undef FUSEWISE_MULTIPLY_LEFT_64
#undef FUSEWISE_MULTIPLY_LEFT_32
#undef FUSEWISE_RESULT_32
#undef FUSEWISE_RESULT_16

}  // namespace fusewise::cuda
