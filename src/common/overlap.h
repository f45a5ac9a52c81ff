#pragma once

// Outputs must have memory of their own. This is the only place that checks them against inputs and
// each other.

#include <span>

#include "fusewise/tensor.h"

namespace fusewise {

/// A tensor of a call and its name in messages.
struct Argument {
  const char* name;
  const TensorView& view;
  int number = -1;             // in a stack: its layer, which becomes part of the name
  const char* part = "layer";  // what the number counts
};

/// Whether two elements of a tensor may share memory: going up from the smallest stride, some
/// stride is smaller than the span of the smaller ones.
bool may_overlap_itself(const TensorView& t);

/// Whether elements of both may share memory. Exact if the address ranges are disjoint or the
/// strides are equal, as for two slices of one tensor. Otherwise interleaved tensors count as
/// overlapping.
bool may_overlap(const TensorView& a, const TensorView& b);

/// Throws Error if an output may overlap another tensor.
void check_apart(const Argument& output, const Argument& other);

/// Throws Error if an output may overlap itself, another output or an input. Absent tensors are
/// skipped.
void check_outputs(std::span<const Argument> outputs, std::span<const Argument> inputs);

}  // namespace fusewise
