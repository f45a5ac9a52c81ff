// Copies half-precision matrices between rows of any stride, and pads with zeros.
// Memory: each element is read once and written once. Bound by memory bandwidth.

#include <algorithm>

#include "common/divide.h"
#include "cuda/gemm/padding.h"
#include "cuda/launch.cuh"

namespace fusewise::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kColumnsOfAThread = 4, kRowsOfAThread = 2;  // all in flight at once
constexpr int kMostShift = 8;

/// A copy and the part of the grid that performs it. A block has `kThreads >> shift` rows of `1 <<
/// shift` threads. Threads of a row are neighbours, so that a warp accesses contiguous elements.
struct Part {
  Copy copy;
  int shift;
  unsigned column_tiles, first_block;
};

struct Parts {
  Part part[kMostCopies];
  int count;
};

std::int64_t rows_of_a_block(int shift) { return (kThreads >> shift) * kRowsOfAThread; }
std::int64_t columns_of_a_block(int shift) { return (1 << shift) * kColumnsOfAThread; }

__global__ void __launch_bounds__(kThreads) copy_kernel(Parts parts) {
  int which = 0;
  while (which + 1 < parts.count && blockIdx.x >= parts.part[which + 1].first_block) ++which;
  const Part& part = parts.part[which];
  const Copy& copy = part.copy;
  const unsigned block = blockIdx.x - part.first_block;
  const int lane = threadIdx.x & ((1 << part.shift) - 1), strand = threadIdx.x >> part.shift;
  const int strands = kThreads >> part.shift;
  const long long row =
      static_cast<long long>(block / part.column_tiles) * strands * kRowsOfAThread + strand;
  const long long column =
      static_cast<long long>(block % part.column_tiles) * (kColumnsOfAThread << part.shift) + lane;
  const auto* from = static_cast<const unsigned short*>(copy.from);
  auto* to = static_cast<unsigned short*>(copy.to);

  unsigned short values[kRowsOfAThread][kColumnsOfAThread];
#pragma unroll
  for (int i = 0; i < kRowsOfAThread; ++i) {
#pragma unroll
    for (int j = 0; j < kColumnsOfAThread; ++j) {
      const long long r = row + i * strands, c = column + (j << part.shift);
      values[i][j] = r < copy.rows && c < copy.columns ? from[r * copy.from_stride + c] : 0;
    }
  }
#pragma unroll
  for (int i = 0; i < kRowsOfAThread; ++i) {
#pragma unroll
    for (int j = 0; j < kColumnsOfAThread; ++j) {
      const long long r = row + i * strands, c = column + (j << part.shift);
      if (r < copy.to_rows && c < copy.to_columns) to[r * copy.to_stride + c] = values[i][j];
    }
  }
}

}  // namespace

void run_copies(const Context& context, const Copy* copies, int count) {
  Parts parts{};
  std::int64_t blocks = 0;
  for (int i = 0; i < count; ++i) {
    const Copy& copy = copies[i];
    if (copy.rows == 0) continue;
    int shift = 0;
    while (shift < kMostShift && columns_of_a_block(shift) < copy.to_columns) ++shift;
    const std::int64_t tiles = divide_up(copy.to_columns, columns_of_a_block(shift));
    check(blocks < (std::int64_t{1} << 31), "copying operands: the problem is too large");
    parts.part[parts.count++] = {copy, shift, static_cast<unsigned>(tiles),
                                 static_cast<unsigned>(blocks)};
    blocks += tiles * divide_up(copy.to_rows, rows_of_a_block(shift));
  }
  launch_kernel({.context = context, .blocks = blocks, .threads = kThreads}, "copying operands",
                copy_kernel, parts);
}

}  // namespace fusewise::cuda
