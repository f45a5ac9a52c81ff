#pragma once

// The library's own GEMM. A task packs some panels of b's columns, and multiplies some rows of a by
// them. Bound by arithmetic where b has many columns or a many rows.

#include <algorithm>
#include <type_traits>

#include "common/divide.h"
#include "common/matrix.h"
#include "common/scratch.h"
#include "cpu/gemm.h"
#include "cpu/linear_act_kernels.h"
#include "cpu/threads.h"

namespace fusewise::cpu {

inline Strides strides_of(const TensorView& t) { return {t.strides[0], t.strides[1]}; }

/// Whether a sum can be stored as T and added to later. Half precision would round it each time.
template <typename T>
constexpr bool kKeepsSums = std::is_same_v<T, AccumulatorOf<T>>;

/// d = a b (+ c), with c as in `Gemm::multiply`. d has contiguous rows. The bits do not depend on
/// the number of threads.
template <typename T>
class GemmLoops {
 public:
  GemmLoops(const Context& context, const LinearKernels<T>& kernels)
      : context_(context), kernels_(kernels) {}

  void multiply(const TensorView& a, const TensorView& b, const TensorView& c,
                const TensorView& d) const {
    const Index rows = d.sizes[0], columns = d.sizes[1], inner = a.sizes[1];
    if (rows == 0 || columns == 0) return;
    const Index parts = parts_of(rows, columns, inner);
    const Scratch<T> others(context_, (parts - 1) * rows * columns);
    const Index d_stride = matrix_of(d).stride, c_stride = c.rank == 2 ? matrix_of(c).stride : 0;
    const Index panels = divide_up(columns, width()), groups = divide_up(panels, kPanels);
    const Index group = divide_up(panels, groups) * width();
    const Index ranges = ranges_of(rows, groups * parts, panels % groups == 0);
    const Index range = divide_up(divide_up(rows, ranges), kRowsAtOnce) * kRowsAtOnce;
    const Index depth = divide_up(std::max<Index>(inner, 1), parts);
    parallel_for(context_, parts * groups * ranges, [&](Index begin, Index end) {
      const Scratch<A> panels(context_, segment_of(depth) * group);
      for (Index task = begin; task < end; ++task) {
        const Index part = task / (groups * ranges), column = task % groups * group;
        const Index row = task / groups % ranges * range, step = part * depth;
        if (row >= rows || (step >= inner && part > 0)) continue;
        Task t;
        t.a = data(a) + row * a.strides[0] + step * a.strides[1];
        t.b = data(b) + column * b.strides[1] + step * b.strides[0];
        t.d = part == 0 ? data(d) + row * d_stride + column
                        : others.data() + ((part - 1) * rows + row) * columns + column;
        t.d_stride = part == 0 ? d_stride : columns;
        if (part == 0 && c.defined())
          t.c = data(c) + row * c_stride + column, t.c_stride = c_stride;
        t.rows = std::min(range, rows - row);
        t.columns = std::min(group, columns - column);
        t.inner = std::min(depth, inner - step);
        run(t, strides_of(a), strides_of(b), panels.data());
      }
    });
    const Index used = divide_up(std::max<Index>(inner, 1), depth);
    if (used > 1) add_parts(others.data(), used - 1, d);
  }

 private:
  using Index = std::int64_t;
  using A = AccumulatorOf<T>;

  /// Sums are stored between blocks.
  static constexpr bool kBlocks = kKeepsSums<T>;
  static constexpr Index kRowsAtOnce = 6;   // of the kernel
  static constexpr Index kFewestRows = 12;  // of a task
  static constexpr Index kTasksOfAThread = 4;
  static constexpr Index kBlock = 512;     // of a sum, while its part of the panel is in L1
  static constexpr Index kBlockRows = 96;  // whose results are in L1 meanwhile
  static constexpr Index kCopyBlock = 128, kCopyRows = 48;  // of a, where it is copied
  static constexpr Index kSegment = 2 * kBlock;             // of a sum, for panels in L2
  static constexpr Index kPanels = 4;                       // of a task
  static constexpr Index kFewTasks = 32, kTaskRows = 48, kMostParts = 32, kPart = kBlock;

  struct Task {
    const T *a, *b, *c = nullptr;
    T* d;
    Index c_stride = 0, d_stride, rows, columns, inner;
  };

  static T* data(const TensorView& t) { return static_cast<T*>(t.data); }
  Index width() const { return kernels_.product_columns; }

  /// In how many parts the sums are computed. Where d is small, there would not be enough tasks.
  Index parts_of(Index rows, Index columns, Index inner) const {
    const Index tasks = divide_up(rows, kTaskRows) * divide_up(columns, width());
    if (!kBlocks || tasks >= kFewTasks) return 1;
    return std::clamp<Index>(inner / kPart, 1, kMostParts);
  }

  /// How much of a sum the panels are packed for.
  static Index segment_of(Index inner) { return kBlocks ? std::min(inner, kSegment) : inner; }

  /// Into how many ranges of rows a task is divided. Each range packs the panels again, so there is
  /// only one where the threads have equal shares without more.
  Index ranges_of(Index rows, Index tasks, bool equal) const {
    if (equal && tasks % threads(context_) == 0) return 1;
    const Index wanted = divide_up(kTasksOfAThread * threads(context_), tasks);
    return std::clamp<Index>(wanted, 1, divide_up(rows, kFewestRows));
  }

  void run(const Task& t, Strides a, Strides b, A* panels) const {
    // Where a is transposed, each step of a sum is in a cache line of its own, and L1 would lose
    // them before the next rows read them.
    const bool copies = kBlocks && a.row == 1 && a.column != 1;
    const Index all = std::max<Index>(t.inner, 1), segment = segment_of(all);
    const Index block = !kBlocks ? all : copies ? kCopyBlock : kBlock;
    const Index block_rows = copies ? kCopyRows : kBlockRows;
    T copy[kBlocks ? kCopyBlock * kCopyRows : 1];
    for (Index first = 0; first == 0 || first < t.inner; first += segment) {
      const Index packed = std::min(segment, t.inner - first), panel = packed * width();
      for (Index c = 0; c < t.columns; c += width()) {
        kernels_.pack(t.b + first * b.row + c * b.column, b, packed, t.columns - c,
                      panels + c / width() * panel);
      }
      for (Index row = 0; row < t.rows; row += block_rows) {
        const Index rows = std::min(block_rows, t.rows - row);
        for (Index i = 0; i == 0 || i < packed; i += block) {
          const Index depth = std::min(block, packed - i);
          const T* from = t.a + row * a.row + (first + i) * a.column;
          if (copies) {
            for (Index j = 0; j < depth; ++j) {
              std::copy_n(from + j * a.column, rows, copy + j * kCopyRows);
            }
            from = copy;
          }
          T* const to = t.d + row * t.d_stride;
          // The first block of a sum adds c, the others add what the ones before them stored.
          const bool later = first + i > 0;
          const Index stride = later ? t.d_stride : t.c_stride;
          const T* added = later ? to : t.c;
          if (!later && added != nullptr) added += row * stride;
          for (Index column = 0; column < t.columns; column += width()) {
            kernels_.multiply(from, copies ? Strides{1, kCopyRows} : a,
                              panels + column / width() * panel + i * width(), depth,
                              added == nullptr ? nullptr : added + column, stride, to + column,
                              t.d_stride, rows, t.columns - column);
          }
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

/// d = a b (+ c), by a GEMM library where there is one that takes the call.
template <typename T>
void multiply(const Context& context, const LinearKernels<T>& kernels, const TensorView& a,
              const TensorView& b, const TensorView& c, const TensorView& d) {
  if (!multiply_by_library(context, a, b, c, d)) {
    GemmLoops<T>(context, kernels).multiply(a, b, c, d);
  }
}

}  // namespace fusewise::cpu
