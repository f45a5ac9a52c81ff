#pragma once

// Outputs have memory of their own: the one place that holds them against inputs and each other.

#include <span>

#include "fusewise/tensor.h"

namespace fusewise {

/// A tensor of a call, and how messages name it.
struct Argument {
  const char* name;
  const TensorView& view;
  int layer = -1;  // of a stack: its number is part of the name
};

/// Whether two elements of a tensor may share memory: a stride, from the smallest on, does not
/// reach over what the smaller ones cover.
bool may_overlap_itself(const TensorView& t);

/// Whether elements of both may share memory. Exact where the ranges of addresses are disjoint or
/// the strides agree, as those of two slices of one tensor do; otherwise interleaved tensors count
/// as overlapping.
bool may_overlap(const TensorView& a, const TensorView& b);

/// Throws Error where an output may overlap itself, another output or an input. Absent tensors are
/// skipped.
void check_outputs(std::span<const Argument> outputs, std::span<const Argument> inputs);

}  // namespace fusewise
