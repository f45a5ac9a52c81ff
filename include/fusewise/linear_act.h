#pragma once

#include <cstdint>
#include <string_view>

#include "fusewise/activation.h"
#include "fusewise/context.h"
#include "fusewise/implementation.h"
#include "fusewise/tensor.h"

/// A linear map and its activation, forward and backward.
///
///     z = x W^T + b          [M, N]
///     y = act(z)             [M, N]
///
/// Types: float32, float64, float16 or bfloat16, the same for all tensors of a call. Sums are
/// float32 (float64 for float64). Layouts: a matrix has contiguous rows or contiguous columns (one
/// stride is 1), with any stride between them. Other layouts are rejected, except for dy, which may
/// have any strides. Any size may be 0. GEMMs: cuBLASLt's on CUDA, those of `Context::gemm` on the
/// CPU. Memory: see tensor.h; no output may overlap an input or another output. Errors: `Error`,
/// before anything is written. Exceptions of a caller's GEMM pass through.
namespace fusewise {

/// How GEMMs are computed. For CUDA only.
struct ProductMath {
  /// float32 factors are rounded to TF32.
  bool tf32 = false;
  /// Partial sums of half-precision GEMMs may be added in half precision.
  bool reduced_sums = false;
  /// The first call with these weight sizes and an octave of row counts measures cuBLASLt's
  /// algorithms. The fastest is cached in memory and in `fusewise/products` of the user's cache
  /// folder. If this is false, while a graph is captured, or with FUSEWISE_TUNE=0 in the
  /// environment, cuBLASLt's own first choice is used.
  bool tune = true;
};

struct LinearActForward {
  TensorView x;  ///< in, [M, K]
  TensorView w;  ///< in, [N, K]
  TensorView b;  ///< in, [N], may be absent
  Activation activation = Activation::relu;
  ProductMath math{};
  TensorView y;  ///< out, [M, N], rows contiguous
  /// out, for backward, may be absent. relu: `bits`; the others: z; identity needs nothing.
  TensorView kept;

  std::string_view implementation = {};
};

/// Bytes of one row of the bits that relu saves: [M, bit_bytes(N)] of uint8. Bit j % 8 of byte j /
/// 8 is set if z was above zero or NaN.
constexpr std::int64_t bit_bytes(std::int64_t columns) { return (columns + 7) / 8; }

void linear_act(const Context& context, const LinearActForward& call);
/// On CUDA the answer may require a test or a measurement on the call's own tensors, so y and kept
/// may be overwritten.
Candidates explain(const Context& context, const LinearActForward& call);

/// The gradients, with dz = dy * act':
///
///     dx = dz W          dW = dz^T x          db = sum_M dz
struct LinearActBackward {
  TensorView dy;    ///< in, [M, N], any strides
  TensorView x;     ///< in, [M, K], may be absent if dw is
  TensorView w;     ///< in, [N, K], may be absent if dx is
  TensorView kept;  ///< in, from forward; for relu the bits, or y
  Activation activation = Activation::relu;
  ProductMath math{};

  /// out, each may be absent, and an absent one is not computed.
  TensorView dx;  ///< [M, K]
  TensorView dw;  ///< [N, K]
  TensorView db;  ///< [N]

  /// dy may be overwritten with dz. If this is false and dz is needed, dz gets scratch memory of
  /// its own.
  bool overwrite_dy = false;

  std::string_view implementation = {};
};

void linear_act(const Context& context, const LinearActBackward& call);
Candidates explain(const Context& context, const LinearActBackward& call);

}  // namespace fusewise
