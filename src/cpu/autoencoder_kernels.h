#pragma once

// The vectorised loops of the autoencoder, one set per instruction set. A is the type of sums.
// Lanes are rows: every row is computed independently, so no result depends on its neighbours or on
// how the caller splits the rows. Sums over rows are in the order of the rows.

#include <cstdint>

#include "cpu/types.h"

namespace fusewise::cpu::autoencoder {

using Index = std::int64_t;

struct Sizes {
  Index mels, frames, latent, slice;
};

/// The weights, or the sums from which their gradients are computed. Dense.
template <typename Pointer>
struct Tensors {
  Pointer norm_weight, norm_bias, encoder_weight, encoder_bias, basis, mid_norm_weight,
      mid_norm_bias, mid_weight, mid_bias, decoder_weight, decoder_bias;
};

/// The weights, and values computed from them alone.
template <typename A>
struct Model {
  Sizes sizes;
  Tensors<const A*> weights;
  /// [L]: 1 / the length of each row of the basis
  const A* inverse_lengths;
  /// [F, L, M]: decoder B^_f^T, so that y_f is one GEMM from z
  const A* folded_decoder;
  /// Whether folded_decoder is finite. If not, folding would combine infinities differently from
  /// the two separate GEMMs, so no row is folded.
  bool foldable;
};

/// Rows of frames of features, with strides in elements.
template <typename T>
struct Strided {
  T* data;
  Index row, frame, feature;
};

/// One of the three outputs, or of their gradients. The data of the other two is null.
template <typename T, typename S>
struct Outputs {
  Strided<T> y, latent;
  S* score;
  Index score_step;
};

/// Sums over rows. A null one is not wanted and not computed.
template <typename A>
struct Sums {
  /// encoder_weight is the sum for the normalised x, and basis for the normalised basis.
  /// decoder_weight has only the rows that were not folded. norm_weight and norm_bias are unused,
  /// because they follow from the encoder's sums. `finish` computes the gradients from them.
  Tensors<A*> weights;
  /// [F, M, L], of the folded decoder
  A* folded_decoder;
};

template <typename T, typename A = AccumulatorOf<T>>
struct Kernels {
  /// Number of rows that are computed together.
  Index rows;
  /// Elements of scratch memory that forward or backward needs.
  Index (*scratch)(const Sizes& sizes, bool backward);

  void (*widen)(const T* from, Index count, A* to);
  void (*narrow)(const A* from, Index count, T* to);
  void (*add)(const A* from, Index count, A* to);

  /// Computes inverse_lengths and folded_decoder; returns `foldable`. Scratch: S * M.
  bool (*fold)(const Sizes& sizes, const Tensors<const A*>& weights, A* inverse_lengths,
               A* folded_decoder, A* scratch);
  /// Writes `projection` [N, L] for backward, unless null.
  void (*forward)(const Model<A>& model, const Strided<const T>& x, const Outputs<T, A>& out,
                  A* projection, Index begin, Index end, A* scratch);
  /// Adds to `sums`, and writes dx unless its data is null. `projection` may be null too.
  void (*backward)(const Model<A>& model, const Strided<const T>& x,
                   const Outputs<const T, const A>& gradient, const A* projection,
                   const Strided<T>& dx, const Sums<A>& sums, Index begin, Index end, A* scratch);
  /// Computes the gradients of the weights from the sums, in place: all except the basis, and the
  /// basis. The two do not touch each other's sums. Scratch: M * L.
  void (*finish)(const Model<A>& model, const Sums<A>& sums, A* scratch);
  void (*finish_basis)(const Model<A>& model, const Sums<A>& sums);
};

struct KernelSet {
  Kernels<float> f32;
  Kernels<double> f64;
  Kernels<F16> f16;
  Kernels<BF16> bf16;
};

}  // namespace fusewise::cpu::autoencoder

namespace fusewise::cpu::portable {
extern const autoencoder::KernelSet autoencoder_kernels;
}
namespace fusewise::cpu::avx2 {
extern const autoencoder::KernelSet autoencoder_kernels;
}
namespace fusewise::cpu::avx512 {
extern const autoencoder::KernelSet autoencoder_kernels;
}
