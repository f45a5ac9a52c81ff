#pragma once

// The library's own GEMM. A task packs a panel of b's columns, and multiplies some rows of a by it.
// Bound by arithmetic where b has many columns or a many rows.

#include <algorithm>
#include <type_traits>

#include "common/divide.h"
#include "common/matrix.h"
#include "common/scratch.h"
#include "cpu/linear_act_kernels.h"
#include "cpu/threads.h"

namespace fusewise::cpu {

/// d = a b (+ bias). d has contiguous rows. The bits do not depend on the number of threads.
template <typename T>
class GemmLoops {
 public:
  GemmLoops(const Context& context, const LinearKernels<T>& kernels)
      : context_(context), kernels_(kernels) {}

  void multiply(const TensorView& a, const TensorView& b, const TensorView& bias,
                const TensorView& d) const {
    const Index rows = d.sizes[0], columns = d.sizes[1], inner = a.sizes[1];
    if (rows == 0 || columns == 0) return;
    const Index parts = parts_of(rows, columns, inner);
    const Scratch<T> others(context_, (parts - 1) * rows * columns);
    const Index d_stride = matrix_of(d).stride, panels = divide_up(columns, width());
    const Index ranges = ranges_of(rows, panels * parts);
    const Index range = divide_up(divide_up(rows, ranges), kRowsAtOnce) * kRowsAtOnce;
    const Index depth = divide_up(std::max<Index>(inner, 1), parts);
    parallel_for(context_, parts * panels * ranges, [&](Index begin, Index end) {
      const Scratch<A> panel(context_, segment_of(depth) * width());
      for (Index task = begin; task < end; ++task) {
        const Index part = task / (panels * ranges), column = task % panels * width();
        const Index row = task / panels % ranges * range, step = part * depth;
        if (row >= rows || (step >= inner && part > 0)) continue;
        Task t;
        t.a = data(a) + row * a.strides[0] + step * a.strides[1];
        t.b = data(b) + column * b.strides[1] + step * b.strides[0];
        t.d = part == 0 ? data(d) + row * d_stride + column
                        : others.data() + ((part - 1) * rows + row) * columns + column;
        t.d_stride = part == 0 ? d_stride : columns;
        t.bias = part == 0 && bias.defined() ? data(bias) + column : nullptr;
        t.rows = std::min(range, rows - row);
        t.columns = std::min(width(), columns - column);
        t.inner = std::min(depth, inner - step);
        run(t, {a.strides[0], a.strides[1]}, {b.strides[0], b.strides[1]}, panel.data());
      }
    });
    const Index used = divide_up(std::max<Index>(inner, 1), depth);
    if (used > 1) add_parts(others.data(), used - 1, d);
  }

 private:
  using Index = std::int64_t;
  using A = AccumulatorOf<T>;

  /// Sums are rounded to T where they are stored between blocks, so only these types have blocks.
  static constexpr bool kBlocks = std::is_same_v<T, A>;
  static constexpr Index kRowsAtOnce = 6;  // of the kernel
  static constexpr Index kFewestRows = 48;
  static constexpr Index kTasksOfAThread = 4;
  static constexpr Index kBlock = 512;           // of a sum, while its part of the panel is in L1
  static constexpr Index kStridedBlock = 128;    // each step in a cache line of its own
  static constexpr Index kBlockRows = 96;        // whose results are in L1 meanwhile
  static constexpr Index kSegment = 8 * kBlock;  // of a sum, for a panel in L2
  static constexpr Index kFewTasks = 32, kMostParts = 32, kPart = kBlock;

  struct Task {
    const T *a, *b, *bias;
    T* d;
    Index d_stride, rows, columns, inner;
  };

  static T* data(const TensorView& t) { return static_cast<T*>(t.data); }
  Index width() const { return kernels_.product_columns; }

  /// In how many parts the sums are computed. Where d is small, there would not be enough tasks.
  Index parts_of(Index rows, Index columns, Index inner) const {
    const Index tasks = divide_up(rows, kFewestRows) * divide_up(columns, width());
    if (!kBlocks || tasks >= kFewTasks) return 1;
    return std::clamp<Index>(inner / kPart, 1, kMostParts);
  }

  /// How much of a sum a panel is packed for.
  static Index segment_of(Index inner) { return kBlocks ? std::min(inner, kSegment) : inner; }

  Index ranges_of(Index rows, Index tasks) const {
    const Index wanted = divide_up(kTasksOfAThread * threads(context_), tasks);
    return std::clamp<Index>(wanted, 1, divide_up(rows, kFewestRows));
  }

  void run(const Task& t, Strides a, Strides b, A* panel) const {
    const Index all = std::max<Index>(t.inner, 1), segment = segment_of(all);
    const Index block = !kBlocks ? all : a.column == 1 ? kBlock : kStridedBlock;
    for (Index first = 0; first == 0 || first < t.inner; first += segment) {
      const Index packed = std::min(segment, t.inner - first);
      kernels_.pack(t.b + first * b.row, b, packed, t.columns, panel);
      for (Index row = 0; row < t.rows; row += kBlockRows) {
        for (Index i = 0; i == 0 || i < packed; i += block) {
          const bool add = first + i > 0;
          kernels_.multiply(t.a + row * a.row + (first + i) * a.column, a, panel + i * width(),
                            std::min(block, packed - i), add ? nullptr : t.bias, add,
                            t.d + row * t.d_stride, t.d_stride, std::min(kBlockRows, t.rows - row),
                            t.columns);
        }
      }
    }
  }

  /// d += others[0] + others[1] + ..., in order.
  void add_parts(const T* others, Index count, const TensorView& d) const {
    if constexpr (kBlocks) {
      const Index rows = d.sizes[0], columns = d.sizes[1], stride = matrix_of(d).stride;
      parallel_for(context_, rows, [&](Index begin, Index end) {
        for (Index row = begin; row < end; ++row) {
          T* const to = data(d) + row * stride;
          for (Index part = 0; part < count; ++part) {
            const T* const from = others + (part * rows + row) * columns;
            for (Index i = 0; i < columns; ++i) to[i] += from[i];
          }
        }
      });
    }
  }

  const Context& context_;
  const LinearKernels<T>& kernels_;
};

}  // namespace fusewise::cpu
