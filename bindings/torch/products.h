#pragma once

// Matrix products on the CPU by the libraries that torch brings, called through torch.

#include <optional>

#include "call.h"

namespace fusewise::binding {

/// x w^T + b for x [..., K] and w [N, K].
Tensor linear(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b);

/// dz w for dz [M, N] and w [N, K].
Tensor back(const Tensor& dz, const Tensor& w);

/// dz^T x for dz [M, N] and x [..., K] of M rows.
Tensor outer(const Tensor& dz, const Tensor& x);

}  // namespace fusewise::binding
