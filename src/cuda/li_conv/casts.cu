// Casts the weights of a layer to half precision, and their gradients back to float32.
// Memory: each element is read once and written once. Bound by memory bandwidth.

#include "cuda/gemm/alignment.h"
#include "cuda/launch.cuh"
#include "cuda/li_conv/casts.h"
#include "cuda/vector.cuh"

namespace fusewise::cuda {
namespace {

constexpr int kThreads = 256, kElements = 8;  // of a vector of half precision
constexpr int kVectors = 2;                   // of a thread, all in flight at once
constexpr std::int64_t kOfABlock = std::int64_t{kThreads} * kElements * kVectors;

struct Part {
  const void* from;
  void* to;
  long long count;
  unsigned first_block;
  bool aligned;
};

struct Parts {
  Part part[kMostCasts];
  int count;
};

template <typename T>
struct alignas(sizeof(T) * kElements < 32 ? 16 : 32) Eight {
  T values[kElements];
};

template <typename From, typename To>
__global__ void __launch_bounds__(kThreads) cast_kernel(const __grid_constant__ Parts parts) {
  int which = 0;
  while (which + 1 < parts.count && blockIdx.x >= parts.part[which + 1].first_block) ++which;
  const Part& part = parts.part[which];
  const auto* from = static_cast<const From*>(part.from);
  auto* to = static_cast<To*>(part.to);
  const long long begin = (blockIdx.x - part.first_block) * static_cast<long long>(kOfABlock);
  if (part.aligned && begin + kOfABlock <= part.count) {
    Eight<From> loaded[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const long long at = begin + (v * kThreads + threadIdx.x) * kElements;
      const auto* source = reinterpret_cast<const uint4*>(from + at);
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof(Eight<From>) / 16); ++i) {
        reinterpret_cast<uint4*>(&loaded[v])[i] = source[i];
      }
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      Eight<To> made;
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        made.values[i] = from_accumulator<To>(to_accumulator<float>(loaded[v].values[i]));
      }
      const long long at = begin + (v * kThreads + threadIdx.x) * kElements;
      auto* target = reinterpret_cast<uint4*>(to + at);
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof(Eight<To>) / 16); ++i) {
        target[i] = reinterpret_cast<const uint4*>(&made)[i];
      }
    }
    return;
  }
  const long long end = begin + kOfABlock < part.count ? begin + kOfABlock : part.count;
  for (long long i = begin + threadIdx.x; i < end; i += kThreads) {
    to[i] = from_accumulator<To>(to_accumulator<float>(from[i]));
  }
}

template <typename From, typename To>
void launch(const Context& context, std::span<const Cast> casts) {
  Parts parts{};
  std::int64_t blocks = 0;
  for (const Cast& each : casts) {
    const std::int64_t count = each.to.numel();
    if (count == 0) continue;
    check(blocks < (std::int64_t{1} << 31), "casting: too many elements for one launch");
    parts.part[parts.count++] = {each.from.data, each.to.data, count, static_cast<unsigned>(blocks),
                                 is_aligned(each.from.data) && is_aligned(each.to.data)};
    blocks += (count + kOfABlock - 1) / kOfABlock;
  }
  launch_kernel({.context = context, .blocks = blocks, .threads = kThreads}, "casting",
                cast_kernel<From, To>, parts);
}

}  // namespace

void cast(const Context& context, std::span<const Cast> casts) {
  while (!casts.empty()) {
    const auto some = casts.first(std::min<std::size_t>(casts.size(), kMostCasts));
    casts = casts.subspan(some.size());
    const DType from = some[0].from.dtype, to = some[0].to.dtype;
    if (from == DType::f32 && to == DType::f16) {
      launch<float, __half>(context, some);
    } else if (from == DType::f32) {
      launch<float, __nv_bfloat16>(context, some);
    } else if (from == DType::f16) {
      launch<__half, float>(context, some);
    } else {
      launch<__nv_bfloat16, float>(context, some);
    }
  }
}

}  // namespace fusewise::cuda
