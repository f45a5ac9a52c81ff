// For images of few channels: the taps of a convolution in a row of the image as channels, and the
// gradients of such weights back without the channels that were added.
// Memory: each vector of taps is written once, an image is read several times, mostly from L1.
// Bound by memory bandwidth.

#include "cuda/launch.cuh"
#include "cuda/li_conv/taps.h"

namespace fusewise::cuda {
namespace {

using Element = unsigned short;  // of any half precision
constexpr int kThreads = 256;
constexpr int kVector = 8;

template <typename Part>
struct Parts {
  Part part[kMostWindows];
  unsigned first_block[kMostWindows];
  int count;
};

/// The part of this block, and the first index of its threads in the part.
template <typename Part>
__device__ __forceinline__ const Part& own_part(const Parts<Part>& parts, unsigned& begin) {
  int which = 0;
  while (which + 1 < parts.count && blockIdx.x >= parts.first_block[which + 1]) ++which;
  begin = (blockIdx.x - parts.first_block[which]) * kThreads;
  return parts.part[which];
}

__global__ void __launch_bounds__(kThreads)
    unfold_kernel(const __grid_constant__ Parts<Windows> parts) {
  unsigned begin;
  const Windows& all = own_part(parts, begin);
  const unsigned index = begin + threadIdx.x;
  const unsigned vector = index % all.vectors, window = index / all.vectors;
  const unsigned row = window / all.count, q = window % all.count;
  if (row >= all.rows) return;
  const auto* from = static_cast<const Element*>(all.from) + std::size_t{row} * all.width;
  const int first = static_cast<int>(vector) * kVector;
  const int start = static_cast<int>(q) * all.step - all.offset + first;
  alignas(16) Element taps[kVector];
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    const int at = start + j;
    const bool real = first + j < all.taps && at >= 0 && at < all.width;
    taps[j] = real ? from[at] : Element{0};
  }
  static_cast<uint4*>(all.to)[index] = *reinterpret_cast<const uint4*>(taps);
}

__global__ void __launch_bounds__(kThreads)
    trim_kernel(const __grid_constant__ Parts<Trimmed> parts) {
  unsigned begin;
  const Trimmed& all = own_part(parts, begin);
  const unsigned index = begin + threadIdx.x;
  const unsigned row = index / all.taps, tap = index % all.taps;
  if (row >= all.rows) return;
  static_cast<Element*>(all.to)[index] =
      static_cast<const Element*>(all.from)[std::size_t{row} * all.channels + tap];
}

std::int64_t threads_of(const Windows& each) { return each.rows * each.count * each.vectors; }
std::int64_t threads_of(const Trimmed& each) { return each.rows * each.taps; }

template <typename Part>
void launch(const Context& context, const char* what, std::span<const Part> all,
            void (*kernel)(Parts<Part>)) {
  while (!all.empty()) {
    const auto some = all.first(std::min<std::size_t>(all.size(), kMostWindows));
    all = all.subspan(some.size());
    Parts<Part> parts{};
    std::int64_t blocks = 0;
    for (const Part& each : some) {
      check(threads_of(each) < (std::int64_t{1} << 31), what, ": too many elements");
      parts.part[parts.count] = each;
      parts.first_block[parts.count++] = static_cast<unsigned>(blocks);
      blocks += (threads_of(each) + kThreads - 1) / kThreads;
    }
    launch_kernel({.context = context, .blocks = blocks, .threads = kThreads}, what, kernel, parts);
  }
}

}  // namespace

void unfold(const Context& context, std::span<const Windows> windows) {
  launch(context, "unfolding images", windows, unfold_kernel);
}

void trim(const Context& context, std::span<const Trimmed> all) {
  launch(context, "trimming gradients", all, trim_kernel);
}

}  // namespace fusewise::cuda
