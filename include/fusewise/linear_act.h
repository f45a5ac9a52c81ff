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
/// Types: float32, float64, float16 or bfloat16, one for all tensors of a call. Sums are float32
/// (float64 for float64). Layouts: a matrix has its rows or its columns adjacent (one stride is 1)
/// at any distance; others are refused, except dy, which may have any strides. Any size may be 0.
/// GEMMs: cuBLASLt's on CUDA, those of `Context::gemm` on the CPU.
/// Memory: see tensor.h; no output may overlap an input or another output.
/// Errors: `Error`, before anything is written. What a caller's GEMM throws passes through.
namespace fusewise {

/// How matrix products are computed. For CUDA alone.
struct ProductMath {
  /// float32 factors are rounded to TF32.
  bool tf32 = false;
  /// Partial sums of half products may be added in half.
  bool reduced_sums = false;
  /// The first call with these weights' sizes and an octave of row counts measures cuBLASLt's
  /// algorithms and keeps the fastest, in memory and in `fusewise/products` of the user's cache
  /// folder. Otherwise, and while a graph is captured, cuBLASLt's own first choice is taken, as
  /// with FUSEWISE_TUNE=0 in the environment.
  bool tune = true;
};

struct LinearActForward {
  TensorView x;  ///< in, [M, K]
  TensorView w;  ///< in, [N, K]
  TensorView b;  ///< in, [N], may be absent
  Activation activation = Activation::relu;
  ProductMath math{};
  TensorView y;  ///< out, [M, N], rows adjacent
  /// out, what backward needs, may be absent. relu: `bits`, the others: z; identity needs nothing.
  TensorView kept;

  std::string_view implementation = {};
};

/// Bytes of one row of the bits that relu keeps: [M, bit_bytes(N)] of uint8, bit j % 8 of byte j /
/// 8 set where z was above zero or NaN.
constexpr std::int64_t bit_bytes(std::int64_t columns) { return (columns + 7) / 8; }

void linear_act(const Context& context, const LinearActForward& call);
/// On CUDA the answer may have to be tried out or measured, on the call's own tensors: y and kept
/// may be overwritten.
Candidates explain(const Context& context, const LinearActForward& call);

/// The gradients, with dz = dy * act':
///
///     dx = dz W          dW = dz^T x          db = sum_M dz
struct LinearActBackward {
  TensorView dy;    ///< in, [M, N], any strides
  TensorView x;     ///< in, [M, K], may be absent where dw is
  TensorView w;     ///< in, [N, K], may be absent where dx is
  TensorView kept;  ///< in, from forward; for relu the bits, or y
  Activation activation = Activation::relu;
  ProductMath math{};

  /// out, each may be absent, and what is absent is not computed.
  TensorView dx;  ///< [M, K]
  TensorView dw;  ///< [N, K]
  TensorView db;  ///< [N]

  /// dy is scratch memory too: dz may be written there. Otherwise dz, where it is needed, takes
  /// scratch memory of its own.
  bool overwrite_dy = false;

  std::string_view implementation = {};
};

void linear_act(const Context& context, const LinearActBackward& call);
Candidates explain(const Context& context, const LinearActBackward& call);

}  // namespace fusewise
