#include "common/overlap.h"

#include <array>
#include <cstdlib>
#include <vector>

#include "common/check.h"

namespace fusewise {
namespace {

/// The addresses from a tensor's first byte to one past its last. For most tensors this check is
/// enough.
struct Range {
  std::uintptr_t begin, end;

  explicit Range(const TensorView& t)
      : begin(reinterpret_cast<std::uintptr_t>(t.data)), end(begin) {
    if (!t.defined() || t.numel() == 0) return;
    const std::int64_t bytes = size_of(t.dtype);
    end += bytes;
    for (int d = 0; d < t.rank; ++d) {
      const std::int64_t reach = (t.sizes[d] - 1) * t.strides[d] * bytes;
      (reach < 0 ? begin : end) += reach;
    }
  }
  bool meets(const Range& other) const {
    return begin < other.end && other.begin < end && begin < end && other.begin < other.end;
  }
};

struct Axis {
  std::int64_t stride, size;  // the stride is in bytes and not negative
};

/// A tensor's axes with more than one element, in order of decreasing stride, and the number of
/// bytes that it spans.
struct Layout {
  std::int64_t bytes, extent;  // of an element, of the whole tensor
  std::array<Axis, TensorView::kMaxRank> axes;
  int rank = 0;

  /// The tensor must not be empty.
  explicit Layout(const TensorView& t) : bytes(size_of(t.dtype)), extent(bytes) {
    for (int d = 0; d < t.rank; ++d) {
      if (t.sizes[d] == 1) continue;
      const std::int64_t stride = std::abs(t.strides[d]) * bytes;
      extent += (t.sizes[d] - 1) * stride;
      int place = rank++;
      for (; place > 0 && axes[place - 1].stride < stride; --place) axes[place] = axes[place - 1];
      axes[place] = {stride, t.sizes[d]};
    }
  }
};

/// Whether `a` from axis d on, at offset 0, may share a byte with `b` from axis d on, at offset
/// `delta`.
bool meet(const Layout& a, std::int64_t extent_a, const Layout& b, std::int64_t extent_b, int d,
          std::int64_t delta) {
  if (delta >= extent_a || -delta >= extent_b) return false;
  if (d >= a.rank || d >= b.rank || a.axes[d].stride != b.axes[d].stride) return true;
  const std::int64_t stride = a.axes[d].stride;
  const std::int64_t last_a = a.axes[d].size - 1, last_b = b.axes[d].size - 1;
  const std::int64_t inner_a = extent_a - last_a * stride, inner_b = extent_b - last_b * stride;
  if (inner_a > stride || inner_b > stride) return true;
  // The distance between row i of a and row j of b depends on i - j only. For at most two values of
  // i - j the rows are near enough to overlap.
  const std::int64_t nearest = delta / stride - (delta % stride < 0);
  for (const std::int64_t rows : {nearest, nearest + 1}) {
    if (rows < -last_b || rows > last_a) continue;
    if (meet(a, inner_a, b, inner_b, d + 1, delta - rows * stride)) return true;
  }
  return false;
}

}  // namespace

static std::ostream& operator<<(std::ostream& out, const Argument& argument) {
  if (argument.number >= 0) out << argument.part << " " << argument.number << ": ";
  return out << argument.name;
}

bool may_overlap_itself(const TensorView& t) {
  if (!t.defined() || t.numel() == 0) return false;
  const Layout layout(t);
  std::int64_t covered = layout.bytes;
  for (int d = layout.rank - 1; d >= 0; --d) {
    if (layout.axes[d].stride < covered) return true;
    covered += (layout.axes[d].size - 1) * layout.axes[d].stride;
  }
  return false;
}

bool may_overlap(const TensorView& a, const TensorView& b) {
  const Range of_a(a), of_b(b);
  if (!of_a.meets(of_b)) return false;
  const Layout first(a), second(b);
  return meet(first, first.extent, second, second.extent, 0,
              static_cast<std::int64_t>(of_b.begin - of_a.begin));
}

void check_apart(const Argument& output, const Argument& other) {
  check(!may_overlap(output.view, other.view), output,
        ": expected memory that no other tensor of the call uses, got memory that overlaps ",
        other);
}

void check_outputs(std::span<const Argument> outputs, std::span<const Argument> inputs) {
  std::vector<Range> ranges;  // of the outputs, then of the inputs
  ranges.reserve(outputs.size() + inputs.size());
  for (const Argument& each : outputs) ranges.emplace_back(each.view);
  for (const Argument& each : inputs) ranges.emplace_back(each.view);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    check(!may_overlap_itself(outputs[i].view), outputs[i],
          ": expected an output whose elements do not overlap in memory; check its strides");
    for (std::size_t j = i + 1; j < ranges.size(); ++j) {
      if (!ranges[i].meets(ranges[j])) continue;
      const Argument& other = j < outputs.size() ? outputs[j] : inputs[j - outputs.size()];
      check_apart(outputs[i], other);
    }
  }
}

}  // namespace fusewise
