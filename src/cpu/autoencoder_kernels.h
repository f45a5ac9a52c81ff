#pragma once

// The vectorised loops of the autoencoder, one set for each instruction set. A is the type of sums.
// Lanes are rows: every row is computed by itself, so no result depends on its neighbours or on how
// the caller splits the rows; sums over rows are in the rows' order.

#include <cstdint>

#include "cpu/types.h"

namespace fusewise::cpu::autoencoder {

using Index = std::int64_t;

struct Sizes {
  Index mels, frames, latent, slice;
};

/// The weights, or the sums that become their gradients; dense.
template <typename Pointer>
struct Tensors {
  Pointer norm_weight, norm_bias, encoder_weight, encoder_bias, basis, mid_norm_weight,
      mid_norm_bias, mid_weight, mid_bias, decoder_weight, decoder_bias;
};

/// The weights, and what is made from them alone.
template <typename A>
struct Model {
  Sizes sizes;
  Tensors<const A*> weights;
  /// [L]: 1 / the length of each row of the basis
  const A* inverse_lengths;
  /// [F, L, M]: decoder B^_f^T, so that y_f is one product from z
  const A* folded_decoder;
  /// Whether that is finite. If not, infinities would not meet as they do one product after the
  /// other, and every row goes that way.
  bool foldable;
};

/// Rows of frames of features, with strides in elements.
template <typename T>
struct Strided {
  T* data;
  Index row, frame, feature;
};

/// One of the three outputs, or of their gradients: the others' data is null.
template <typename T, typename S>
struct Outputs {
  Strided<T> y, latent;
  S* score;
  Index score_step;
};

/// Sums over rows. Null where nobody wants them, and then not computed.
template <typename A>
struct Sums {
  /// encoder_weight is that of the normalised x; basis that of the normalised basis;
  /// decoder_weight has only the rows that were not folded; norm_weight and norm_bias have nothing,
  /// as they follow from the encoder's. `finish` makes gradients of them.
  Tensors<A*> weights;
  /// [F, M, L], of the folded decoder
  A* folded_decoder;
};

template <typename T, typename A = AccumulatorOf<T>>
struct Kernels {
  /// Rows that are computed together.
  Index rows;
  /// Elements of scratch that forward and backward need.
  Index (*scratch)(const Sizes& sizes, bool backward);

  void (*widen)(const T* from, Index count, A* to);
  void (*narrow)(const A* from, Index count, T* to);
  void (*add)(const A* from, Index count, A* to);

  /// Makes inverse_lengths and folded_decoder; returns `foldable`. Scratch: S * M.
  bool (*fold)(const Sizes& sizes, const Tensors<const A*>& weights, A* inverse_lengths,
               A* folded_decoder, A* scratch);
  /// `projection` [N, L] is kept for backward, unless null.
  void (*forward)(const Model<A>& model, const Strided<const T>& x, const Outputs<T, A>& out,
                  A* projection, Index begin, Index end, A* scratch);
  /// Adds to `sums`, and writes dx unless its data is null. `projection` may be null, too.
  void (*backward)(const Model<A>& model, const Strided<const T>& x,
                   const Outputs<const T, const A>& gradient, const A* projection,
                   const Strided<T>& dx, const Sums<A>& sums, Index begin, Index end, A* scratch);
  /// From sums to gradients of the weights, in place: of all but the basis, and of the basis. Each
  /// leaves alone what the other takes. Scratch: M * L.
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
