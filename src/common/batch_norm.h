#pragma once

// What BatchNorm and the operators that contain it share.

#include "fusewise/batch_norm.h"

namespace fusewise {

/// Throws Error if forward breaks a rule about statistics that its table does not express.
void check_statistics(const BatchNormActForward& call);

/// The BatchNorm of an operator that contains one, whose tensors have the same names there. y and
/// what depends on it are absent.
template <typename Forward>
BatchNormActForward norm_in_forward(const Forward& call) {
  BatchNormActForward norm;
  norm.x = call.x;
  norm.weight = call.weight;
  norm.bias = call.bias;
  norm.running_mean = call.running_mean;
  norm.running_var = call.running_var;
  norm.num_batches_tracked = call.num_batches_tracked;
  norm.activation = call.activation;
  norm.training = call.training;
  norm.momentum = call.momentum;
  norm.eps = call.eps;
  norm.mean = call.mean;
  norm.inverse_deviation = call.inverse_deviation;
  return norm;
}
template <typename Backward>
BatchNormActBackward norm_in_backward(const Backward& call) {
  BatchNormActBackward norm;
  norm.x = call.x;
  norm.weight = call.weight;
  norm.bias = call.bias;
  norm.mean = call.mean;
  norm.inverse_deviation = call.inverse_deviation;
  norm.activation = call.activation;
  norm.training = call.training;
  norm.dx = call.dx;
  norm.dweight = call.dweight;
  norm.dbias = call.dbias;
  return norm;
}

/// The same call without its max-pool. y and what depends on it is absent.
BatchNormActForward without_pool(const BatchNormActPoolForward& call);
BatchNormActBackward without_pool(const BatchNormActPoolBackward& call);

}  // namespace fusewise
