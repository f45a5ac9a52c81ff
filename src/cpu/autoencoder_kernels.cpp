// The autoencoder's inner loops: the whole model for a block of rows, forward and backward.
// Lanes are rows, and activations are stored as [feature][row]. So norms, activations and GEMMs
// need no operation across lanes, and a weight is read in memory order and broadcast to all lanes.
// x and y cross memory once; the weights come from the caches for every block. Bound by arithmetic.

// Compiled once per instruction set, under the rule of cpu/vector.h.

#include "cpu/autoencoder_kernels.h"

#include "cpu/vector.h"
#include "cpu/vector_lanes.h"
#include "cpu/vector_math.h"

namespace fusewise::cpu::FUSEWISE_ISA {
namespace {

using autoencoder::Kernels;
using autoencoder::Model;
using autoencoder::Outputs;
using autoencoder::Sizes;
using autoencoder::Strided;
using autoencoder::Sums;
using autoencoder::Tensors;

constexpr int kVectors = 2;                  // vectors of rows in a full block
constexpr int kTile = kBytes == 64 ? 8 : 4;  // times two vectors: as many as the registers hold

template <typename A>
using MaskOf = decltype(LanesOf<A>{} == LanesOf<A>{});
template <typename A, int kVecs>
constexpr Index kRows = kVecs * Memory<A>::kLanes;

F32 square_root(F32 x) {
  for (int i = 0; i < kFloats; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
}
F64 square_root(F64 x) {
  return by_lane(x, [](double v) { return __builtin_sqrt(v); });
}

constexpr Index smaller(Index a, Index b) { return a < b ? a : b; }
constexpr Index larger(Index a, Index b) { return a > b ? a : b; }

// Conversion between rows in memory and lanes. ----------------------------------------------------

/// Loads `width` elements with a stride of `step`.
template <typename T>
typename Memory<T>::V load_row(const T* from, Index step, Index width) {
  using M = Memory<T>;
  if (step == 1) return width == M::kLanes ? M::load(from) : M::load(from, width);
  T elements[M::kLanes];
  for (Index i = 0; i < width; ++i) elements[i] = from[i * step];
  return width == M::kLanes ? M::load(elements) : M::load(elements, width);
}
template <typename T>
void store_row(T* to, Index step, Index width, typename Memory<T>::V value) {
  using M = Memory<T>;
  if (step == 1) return width == M::kLanes ? M::store(to, value) : M::store(to, value, width);
  T elements[M::kLanes];
  M::store(elements, value);
  for (Index i = 0; i < width; ++i) to[i * step] = elements[i];
}

/// Loads one frame of `count` rows as [feature][row]. Rows past `count` are zero.
template <int kVecs, typename T, typename A = AccumulatorOf<T>>
void load_lanes(const Strided<const T>& from, Index row, Index count, Index frame, Index features,
                A* out) {
  constexpr Index kLanes = Memory<A>::kLanes, kAll = kRows<A, kVecs>;
  const T* base = from.data + row * from.row + frame * from.frame;
  for (Index first = 0; first < kAll; first += kLanes) {
    for (Index f = 0; f < features; f += kLanes) {
      const Index width = smaller(kLanes, features - f), here = smaller(kLanes, count - first);
      const T* start = base + first * from.row + f * from.feature;
      A* to = out + f * kAll + first;
      if (from.feature == 1 && width == kLanes && here == kLanes) {
        transpose_square<A>(
            [&](Index i) { return Memory<T>::load(start + i * from.row); },
            [&](Index i, LanesOf<A> value) { Memory<A>::store(to + i * kAll, value); });
        continue;
      }
      LanesOf<A> tile[kLanes] = {};
      for (Index i = 0; i < here; ++i) {
        tile[i] = load_row(start + i * from.row, from.feature, width);
      }
      transpose<A>(tile);
      for (Index i = 0; i < width; ++i) Memory<A>::store(to + i * kAll, tile[i]);
    }
  }
}

/// The inverse of load_lanes, for the first `count` rows.
template <int kVecs, typename T, typename A = AccumulatorOf<T>>
void store_lanes(const A* in, Index features, const Strided<T>& to, Index row, Index count,
                 Index frame) {
  constexpr Index kLanes = Memory<A>::kLanes, kAll = kRows<A, kVecs>;
  T* base = to.data + row * to.row + frame * to.frame;
  for (Index first = 0; first < count; first += kLanes) {
    for (Index f = 0; f < features; f += kLanes) {
      const Index width = smaller(kLanes, features - f), here = smaller(kLanes, count - first);
      const A* from = in + f * kAll + first;
      T* start = base + first * to.row + f * to.feature;
      if (to.feature == 1 && width == kLanes && here == kLanes) {
        transpose_square<A>(
            [&](Index i) { return Memory<A>::load(from + i * kAll); },
            [&](Index i, LanesOf<A> value) { Memory<T>::store(start + i * to.row, value); });
        continue;
      }
      LanesOf<A> tile[kLanes] = {};
      for (Index i = 0; i < width; ++i) tile[i] = Memory<A>::load(from + i * kAll);
      transpose<A>(tile);
      for (Index i = 0; i < here; ++i) {
        store_row(start + i * to.row, to.feature, width, tile[i]);
      }
    }
  }
}

// GEMMs. -----------------------------------------------------------------------------------------

/// Initial value of a GEMM's accumulators.
enum class From { zero, bias, sums };

template <From kFrom, int kVecs, int kOutputs, typename A>
void multiply_tile(const A* weights, Index output_step, Index input_step, Index inputs,
                   const A* bias, const A* in, A* out) {
  using M = Memory<A>;
  LanesOf<A> sums[kOutputs][kVecs];
  for (int n = 0; n < kOutputs; ++n) {
    for (int v = 0; v < kVecs; ++v) {
      if constexpr (kFrom == From::sums)
        sums[n][v] = M::load(out + (n * kVecs + v) * M::kLanes);
      else
        sums[n][v] = broadcast<LanesOf<A>>(kFrom == From::bias ? bias[n] : A(0));
    }
  }
  for (Index k = 0; k < inputs; ++k) {
    LanesOf<A> value[kVecs];
    for (int v = 0; v < kVecs; ++v) value[v] = M::load(in + (k * kVecs + v) * M::kLanes);
    for (int n = 0; n < kOutputs; ++n) {
      const auto weight = broadcast<LanesOf<A>>(weights[n * output_step + k * input_step]);
      for (int v = 0; v < kVecs; ++v) sums[n][v] = multiply_add(weight, value[v], sums[n][v]);
    }
  }
  for (int n = 0; n < kOutputs; ++n) {
    for (int v = 0; v < kVecs; ++v) M::store(out + (n * kVecs + v) * M::kLanes, sums[n][v]);
  }
}

/// A weight matrix. The weight of output n and input k is at n * output + k * input.
template <typename A>
struct Matrix {
  const A* weights;
  Index output, input;
};

/// out[n][row] = 0, bias[n] or itself + sum over k of weight(n, k) * in[k][row]
template <From kFrom, int kVecs, typename A>
[[gnu::noinline]] void multiply(const Matrix<A>& matrix, Index outputs, Index inputs, const A* bias,
                                const A* in, A* out) {
  Index n = 0;
  const auto tile = [&]<int kOutputs>() {
    for (; n + kOutputs <= outputs; n += kOutputs) {
      multiply_tile<kFrom, kVecs, kOutputs>(
          matrix.weights + n * matrix.output, matrix.output, matrix.input, inputs,
          kFrom == From::bias ? bias + n : nullptr, in, out + n * kRows<A, kVecs>);
    }
  };
  tile.template operator()<kTile>();
  tile.template operator()<1>();
}

template <int kVecs, typename A>
void multiply(const Matrix<A>& matrix, Index outputs, Index inputs, const A* bias, const A* in,
              A* out) {
  multiply<From::bias, kVecs>(matrix, outputs, inputs, bias, in, out);
}
template <int kVecs, typename A>
void multiply(const Matrix<A>& matrix, Index outputs, Index inputs, const A* in, A* out) {
  multiply<From::zero, kVecs>(matrix, outputs, inputs, static_cast<const A*>(nullptr), in, out);
}
template <int kVecs, typename A>
void multiply_onto(const Matrix<A>& matrix, Index outputs, Index inputs, const A* in, A* out) {
  multiply<From::sums, kVecs>(matrix, outputs, inputs, static_cast<const A*>(nullptr), in, out);
}

/// `width` columns: kWhole whole vectors, or part of one vector if kWhole is 0.
template <int kOutputs, int kWhole, typename A>
void outer_tile(const A* a, Index a_n, Index a_row, const A* b, Index b_row, Index width,
                Index rows, A* out, Index out_n) {
  using M = Memory<A>;
  constexpr int kVecs = kWhole == 0 ? 1 : kWhole;
  const auto load = [&](const A* from) {
    if constexpr (kWhole == 0)
      return M::load(from, width);
    else
      return M::load(from);
  };
  LanesOf<A> sums[kOutputs][kVecs];
  for (int n = 0; n < kOutputs; ++n) {
    for (int v = 0; v < kVecs; ++v) sums[n][v] = load(out + n * out_n + v * M::kLanes);
  }
  for (Index row = 0; row < rows; ++row) {
    LanesOf<A> value[kVecs];
    for (int v = 0; v < kVecs; ++v) value[v] = load(b + row * b_row + v * M::kLanes);
    for (int n = 0; n < kOutputs; ++n) {
      const auto factor = broadcast<LanesOf<A>>(a[n * a_n + row * a_row]);
      for (int v = 0; v < kVecs; ++v) sums[n][v] = multiply_add(factor, value[v], sums[n][v]);
    }
  }
  for (int n = 0; n < kOutputs; ++n) {
    for (int v = 0; v < kVecs; ++v) {
      A* to = out + n * out_n + v * M::kLanes;
      if constexpr (kWhole == 0)
        M::store(to, sums[n][v], width);
      else
        M::store(to, sums[n][v]);
    }
  }
}

template <int kOutputs, typename A>
void outer_outputs(const A* a, Index a_n, Index a_row, const A* b, Index b_row, Index columns,
                   Index rows, A* out, Index out_n) {
  constexpr Index kLanes = Memory<A>::kLanes;
  Index k = 0;
  for (; k + 2 * kLanes <= columns; k += 2 * kLanes) {
    outer_tile<kOutputs, 2>(a, a_n, a_row, b + k, b_row, 2 * kLanes, rows, out + k, out_n);
  }
  for (; k + kLanes <= columns; k += kLanes) {
    outer_tile<kOutputs, 1>(a, a_n, a_row, b + k, b_row, kLanes, rows, out + k, out_n);
  }
  if (k < columns) {
    outer_tile<kOutputs, 0>(a, a_n, a_row, b + k, b_row, columns - k, rows, out + k, out_n);
  }
}

/// out[n * out_n + k] += sum over rows of a[n * a_n + row * a_row] * b[row * b_row + k]
template <typename A>
__attribute__((noinline)) void outer(const A* a, Index a_n, Index a_row, Index outputs, const A* b,
                                     Index b_row, Index columns, Index rows, A* out, Index out_n) {
  Index n = 0;
  for (; n + kTile <= outputs; n += kTile) {
    outer_outputs<kTile>(a + n * a_n, a_n, a_row, b, b_row, columns, rows, out + n * out_n, out_n);
  }
  for (; n < outputs; ++n) {
    outer_outputs<1>(a + n * a_n, a_n, a_row, b, b_row, columns, rows, out + n * out_n, out_n);
  }
}

// Pointwise and norms, all on [feature][row]. -----------------------------------------------------

/// Calls f(feature, offset of the vector) for every vector.
template <typename A, int kVecs, typename F>
void each(Index features, const F& f) {
  for (Index i = 0; i < features; ++i) {
    for (int v = 0; v < kVecs; ++v) f(i, (i * kVecs + v) * Memory<A>::kLanes);
  }
}

/// The sum over features of term(offset of the vector), for every row.
template <typename A, typename F>
LanesOf<A> add_features(Index features, Index step, const F& term) {
  LanesOf<A> sums[4] = {};  // enough to hide the latency of an addition
  Index i = 0;
  for (; i + 4 <= features; i += 4) {
    for (int k = 0; k < 4; ++k) sums[k] += term((i + k) * step);
  }
  for (; i < features; ++i) sums[0] += term(i * step);
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

/// x := (x - mean) / sqrt(variance + eps). The inverse of the divisor goes to `scales`.
template <int kVecs, typename A>
void normalise(A* x, Index features, A* scales) {
  using M = Memory<A>;
  constexpr Index kAll = kRows<A, kVecs>;
  for (Index first = 0; first < kAll; first += M::kLanes) {
    const auto at = [&](Index place) { return M::load(x + place + first); };
    const LanesOf<A> mean = add_features<A>(features, kAll, at) / A(features);
    const auto deviation = [&](Index place) {
      const LanesOf<A> d = at(place) - mean;
      return d * d;
    };
    const LanesOf<A> variance = add_features<A>(features, kAll, deviation) / A(features);
    const LanesOf<A> scale = A(1) / square_root(variance + A(1e-5));
    M::store(scales + first, scale);
    for (Index i = 0; i < features; ++i) {
      M::store(x + i * kAll + first, (at(i * kAll) - mean) * scale);
    }
  }
}

/// The gradient before a norm, from the gradient after it, `gradient`, in place: multiplied by the
/// affine weight, minus the contributions of the mean and the variance.
template <int kVecs, typename A>
void normalise_gradient(A* gradient, const A* weight, const A* normalised, Index features,
                        const A* scales) {
  using M = Memory<A>;
  constexpr Index kAll = kRows<A, kVecs>;
  each<A, kVecs>(features, [&](Index i, Index place) {
    M::store(gradient + place, M::load(gradient + place) * weight[i]);
  });
  for (Index first = 0; first < kAll; first += M::kLanes) {
    const auto at = [&](Index place) { return M::load(gradient + place + first); };
    const auto product = [&](Index place) {
      return at(place) * M::load(normalised + place + first);
    };
    const LanesOf<A> mean = add_features<A>(features, kAll, at) / A(features);
    const LanesOf<A> slope = add_features<A>(features, kAll, product) / A(features);
    const LanesOf<A> scale = M::load(scales + first);
    for (Index i = 0; i < features; ++i) {
      const Index place = i * kAll;
      const LanesOf<A> along = M::load(normalised + place + first) * slope;
      M::store(gradient + place + first, (at(place) - mean - along) * scale);
    }
  }
}

template <int kVecs, typename A>
void affine(const A* in, const A* weight, const A* bias, Index features, A* out) {
  using M = Memory<A>;
  each<A, kVecs>(features, [&](Index i, Index place) {
    const auto w = broadcast<LanesOf<A>>(weight[i]), b = broadcast<LanesOf<A>>(bias[i]);
    M::store(out + place, multiply_add(M::load(in + place), w, b));
  });
}

template <int kVecs, typename A>
void scale_features(const A* in, const A* factors, Index features, A* out) {
  using M = Memory<A>;
  each<A, kVecs>(features, [&](Index i, Index place) {
    M::store(out + place, M::load(in + place) * factors[i]);
  });
}

/// x := GELU(x). Writes GELU'(x) to `slopes` unless null.
template <int kVecs, typename A>
void gelu(A* x, Index features, A* slopes) {
  using M = Memory<A>;
  each<A, kVecs>(features, [&](Index, Index place) {
    const LanesOf<A> z = M::load(x + place);
    const LanesOf<A> cdf = normal_cdf(z);
    M::store(x + place, z * cdf);
    if (slopes != nullptr) M::store(slopes + place, multiply_add(z, normal_density(z), cdf));
  });
}

/// sums[feature] += sum over the first `count` rows of a (times b, unless b is null)
template <int kVecs, typename A>
void add_rows(const A* a, const A* b, Index features, Index count, A* sums) {
  using M = Memory<A>;
  if (sums == nullptr) return;
  for (Index i = 0; i < features; ++i) {
    LanesOf<A> sum{};
    for (Index first = 0; first < count; first += M::kLanes) {
      const Index place = i * kRows<A, kVecs> + first, here = count - first;
      // Ignore the lanes past `count`: with infinite weights they would not be zero.
      const auto load = [&](const A* from) {
        return here >= M::kLanes ? M::load(from) : M::load(from, here);
      };
      sum += b == nullptr ? load(a + place) : load(a + place) * load(b + place);
    }
    sums[i] += add_lanes<A>(sum);
  }
}

/// Which rows contain an infinity.
template <typename A, int kVecs>
struct Infinite {
  bool rows[kRows<A, kVecs>] = {};
  bool any = false;

  void look(const A* values, Index features) {
    using M = Memory<A>;
    constexpr A kInfinity = __builtin_inf();
    for (int v = 0; v < kVecs; ++v) {
      MaskOf<A> found{};
      for (Index i = 0; i < features; ++i) {
        const LanesOf<A> x = M::load(values + (i * kVecs + v) * M::kLanes);
        found |= (x == kInfinity) | (x == -kInfinity);
      }
      for (int i = 0; i < M::kLanes; ++i) {
        rows[v * M::kLanes + i] |= found[i] != 0;
        any |= found[i] != 0;
      }
    }
  }
  void all() {
    for (bool& row : rows) row = true;
    any = true;
  }
};

// Without folding, for a single row: infinities combine as in torch. ------------------------------

/// r_f of a row from its z, which has a stride of `step`.
template <typename A>
void expand_row(const Model<A>& model, Index frame, const A* z, Index step, A* r) {
  const Index width = model.sizes.frames * model.sizes.slice;
  for (Index s = 0; s < model.sizes.slice; ++s) {
    A sum = 0;
    for (Index l = 0; l < model.sizes.latent; ++l) {
      const A basis = model.weights.basis[l * width + frame * model.sizes.slice + s];
      sum += z[l * step] * (basis * model.inverse_lengths[l]);
    }
    r[s] = sum;
  }
}

/// y_f of a row. `r`: S elements of scratch memory.
template <typename A>
void decode_row(const Model<A>& model, Index frame, const A* z, Index step, A* r, A* y) {
  expand_row(model, frame, z, step, r);
  for (Index m = 0; m < model.sizes.mels; ++m) {
    A sum = model.weights.decoder_bias[m];
    for (Index s = 0; s < model.sizes.slice; ++s) {
      sum += model.weights.decoder_weight[m * model.sizes.slice + s] * r[s];
    }
    y[m * step] = sum;
  }
}

/// Adds a row's frame to dz and to the sums of decoder and basis. `r`: 2 S elements of scratch
/// memory.
template <typename A>
void decode_row_gradient(const Model<A>& model, Index frame, const A* z, const A* dy, Index step,
                         A* r, A* dz, const Sums<A>& sums) {
  const Sizes& size = model.sizes;
  const Index width = size.frames * size.slice;
  A* dr = r + size.slice;
  expand_row(model, frame, z, step, r);
  for (Index s = 0; s < size.slice; ++s) {
    dr[s] = 0;
    for (Index m = 0; m < size.mels; ++m) {
      dr[s] += model.weights.decoder_weight[m * size.slice + s] * dy[m * step];
      if (sums.weights.decoder_weight != nullptr) {
        sums.weights.decoder_weight[m * size.slice + s] += dy[m * step] * r[s];
      }
    }
  }
  for (Index l = 0; l < size.latent; ++l) {
    for (Index s = 0; s < size.slice; ++s) {
      const Index place = l * width + frame * size.slice + s;
      dz[l * step] += model.weights.basis[place] * model.inverse_lengths[l] * dr[s];
      if (sums.weights.basis != nullptr) sums.weights.basis[place] += z[l * step] * dr[s];
    }
  }
}

// The whole model for a block of rows. -----------------------------------------------------------

/// Allocates parts of the scratch memory, each starting on a cache line. Without memory it only
/// counts.
template <typename A>
struct Taker {
  A* memory;
  Index used = 0;
  A* operator()(Index count) {
    constexpr Index kLine = 64 / sizeof(A);
    A* taken = memory == nullptr ? nullptr : memory + used;
    used += (count + kLine - 1) / kLine * kLine;
    return taken;
  }
};

/// Results of forward: z, and the intermediate results for backward. A step of 0 between frames
/// means that per-frame results are not saved.
template <typename A>
struct Passed {
  bool keep;
  A *input, *hidden;                        // [max(M, S)][rows] each, of the current frame
  A *normalised, *scales, *slopes, *coded;  // by frame; `coded` is [row][S]
  A *mid_normalised, *mid_scale, *mid_input, *mid_slopes, *z;
};

template <int kVecs, typename A>
Passed<A> take_passed(const Sizes& size, bool keep, Taker<A>& take) {
  constexpr Index kAll = kRows<A, kVecs>;
  const Index wide = larger(size.mels, size.slice) * kAll;
  const Index frames = keep ? size.frames : 1;
  Passed<A> p{};
  p.keep = keep;
  p.input = take(wide);
  p.hidden = take(wide);
  p.scales = take(frames * kAll);
  p.mid_scale = take(kAll);
  p.mid_normalised = take(size.latent * kAll);
  p.mid_input = take(size.latent * kAll);
  p.z = take(size.latent * kAll);
  if (keep) {
    p.normalised = take(frames * size.mels * kAll);
    p.slopes = take(frames * size.slice * kAll);
    p.coded = take(frames * size.slice * kAll);
    p.mid_slopes = take(size.latent * kAll);
  }
  return p;
}

/// From x to z. If `known` is given, it is the projection. Otherwise the projection is computed,
/// and written to `kept` unless null.
template <int kVecs, typename T, typename A = AccumulatorOf<T>>
void encode_block(const Model<A>& model, const Strided<const T>& x, const A* known, A* kept,
                  Index row, Index count, const Passed<A>& p) {
  constexpr Index kAll = kRows<A, kVecs>;
  const Sizes& size = model.sizes;
  const Tensors<const A*>& w = model.weights;
  const Index width = size.frames * size.slice;
  for (Index f = 0; f < size.frames; ++f) {
    A* normalised = p.keep ? p.normalised + f * size.mels * kAll : p.input;
    load_lanes<kVecs>(x, row, count, f, size.mels, normalised);
    normalise<kVecs>(normalised, size.mels, p.keep ? p.scales + f * kAll : p.scales);
    affine<kVecs>(normalised, w.norm_weight, w.norm_bias, size.mels, p.input);
    multiply<kVecs>(Matrix<A>{w.encoder_weight, size.mels, 1}, size.slice, size.mels,
                    w.encoder_bias, p.input, p.hidden);
    gelu<kVecs>(p.hidden, size.slice, p.keep ? p.slopes + f * size.slice * kAll : nullptr);
    if (p.keep) {
      const Strided<A> coded{p.coded + f * size.slice * kAll, size.slice, 0, 1};
      store_lanes<kVecs>(p.hidden, size.slice, coded, 0, count, 0);
    }
    if (known != nullptr) continue;
    const Matrix<A> basis{w.basis + f * size.slice, width, 1};
    if (f == 0)
      multiply<kVecs>(basis, size.latent, size.slice, p.hidden, p.mid_normalised);
    else
      multiply_onto<kVecs>(basis, size.latent, size.slice, p.hidden, p.mid_normalised);
  }
  if (known != nullptr) {
    const Strided<const A> from{known, size.latent, 0, 1};
    load_lanes<kVecs>(from, row, count, 0, size.latent, p.mid_normalised);
  } else {
    scale_features<kVecs>(p.mid_normalised, model.inverse_lengths, size.latent, p.mid_normalised);
  }
  if (kept != nullptr) {
    const Strided<A> to{kept, size.latent, 0, 1};
    store_lanes<kVecs>(p.mid_normalised, size.latent, to, row, count, 0);
  }
  normalise<kVecs>(p.mid_normalised, size.latent, p.mid_scale);
  affine<kVecs>(p.mid_normalised, w.mid_norm_weight, w.mid_norm_bias, size.latent, p.mid_input);
  multiply<kVecs>(Matrix<A>{w.mid_weight, size.latent, 1}, size.latent, size.latent, w.mid_bias,
                  p.mid_input, p.z);
  gelu<kVecs>(p.z, size.latent, p.mid_slopes);
}

/// y_f of the block. `r`: S elements of scratch memory for rows that are not folded.
template <int kVecs, typename A>
void decode_block(const Model<A>& model, Index frame, const A* z,
                  const Infinite<A, kVecs>& unfolded, A* r, A* y) {
  constexpr Index kAll = kRows<A, kVecs>;
  const Sizes& size = model.sizes;
  const Matrix<A> folded{model.folded_decoder + frame * size.latent * size.mels, 1, size.mels};
  multiply<kVecs>(folded, size.mels, size.latent, model.weights.decoder_bias, z, y);
  if (!unfolded.any) return;
  for (Index i = 0; i < kAll; ++i) {
    if (unfolded.rows[i]) decode_row(model, frame, z + i, kAll, r, y + i);
  }
}

template <int kVecs, typename T, typename A = AccumulatorOf<T>>
void forward_block(const Model<A>& model, const Strided<const T>& x, const Outputs<T, A>& out,
                   A* projection, Index row, Index count, A* scratch) {
  using M = Memory<A>;
  const Sizes& size = model.sizes;
  Taker<A> take{scratch};
  const Passed<A> p = take_passed<kVecs>(size, false, take);
  encode_block<kVecs>(model, x, static_cast<const A*>(nullptr), projection, row, count, p);
  if (out.latent.data != nullptr) {
    return store_lanes<kVecs>(p.z, size.latent, out.latent, row, count, 0);
  }
  Infinite<A, kVecs> unfolded;
  unfolded.look(p.z, size.latent);
  if (!model.foldable) unfolded.all();
  A* r = take(size.slice);
  LanesOf<A> squares[kVecs] = {};
  for (Index f = 0; f < size.frames; ++f) {
    decode_block<kVecs>(model, f, p.z, unfolded, r, p.hidden);
    if (out.y.data != nullptr) {
      store_lanes<kVecs>(p.hidden, size.mels, out.y, row, count, f);
      continue;
    }
    load_lanes<kVecs>(x, row, count, f, size.mels, p.input);
    for (Index i = 0; i < size.mels; ++i) {
      for (int v = 0; v < kVecs; ++v) {
        const Index place = (i * kVecs + v) * M::kLanes;
        const LanesOf<A> off = M::load(p.hidden + place) - M::load(p.input + place);
        squares[v] = multiply_add(off, off, squares[v]);
      }
    }
  }
  if (out.score == nullptr) return;
  A means[kRows<A, kVecs>];
  for (int v = 0; v < kVecs; ++v) {
    M::store(means + v * M::kLanes, squares[v] / A(size.frames * size.mels));
  }
  for (Index i = 0; i < count; ++i) out.score[(row + i) * out.score_step] = means[i];
}

/// dy of one frame: the incoming one, or computed from dscore and y - x.
template <int kVecs, typename T, typename A = AccumulatorOf<T>>
void output_gradient(const Model<A>& model, const Strided<const T>& x,
                     const Outputs<const T, const A>& gradient, Index row, Index count, Index frame,
                     const Passed<A>& p, const Infinite<A, kVecs>& unfolded, A* r, A* dy) {
  using M = Memory<A>;
  const Sizes& size = model.sizes;
  if (gradient.y.data != nullptr) {
    return load_lanes<kVecs>(gradient.y, row, count, frame, size.mels, dy);
  }
  A factors[kRows<A, kVecs>] = {};
  for (Index i = 0; i < count; ++i) {
    factors[i] =
        gradient.score[(row + i) * gradient.score_step] * A(2) / A(size.frames * size.mels);
  }
  decode_block<kVecs>(model, frame, p.z, unfolded, r, p.hidden);
  load_lanes<kVecs>(x, row, count, frame, size.mels, p.input);
  each<A, kVecs>(size.mels, [&](Index, Index place) {
    const LanesOf<A> off = M::load(p.hidden + place) - M::load(p.input + place);
    M::store(dy + place, off * M::load(factors + place % kRows<A, kVecs>));
  });
}

/// dz from the dy of every frame. Also adds to the decoder's sums.
template <int kVecs, typename T, typename A = AccumulatorOf<T>>
void decoder_gradient(const Model<A>& model, const Strided<const T>& x,
                      const Outputs<const T, const A>& gradient, const Sums<A>& sums, Index row,
                      Index count, const Passed<A>& p, Taker<A>& take, A* dy, A* dz) {
  using M = Memory<A>;
  constexpr Index kAll = kRows<A, kVecs>;
  const Sizes& size = model.sizes;
  A* r = take(2 * size.slice);
  A* z_rows = take(kAll * size.latent);
  Infinite<A, kVecs> unfolded;
  unfolded.look(p.z, size.latent);
  if (!model.foldable) unfolded.all();
  // All of dy first: a row that is not folded in one frame is not folded in any.
  for (Index f = 0; f < size.frames; ++f) {
    A* dy_f = dy + f * size.mels * kAll;
    output_gradient<kVecs>(model, x, gradient, row, count, f, p, unfolded, r, dy_f);
    add_rows<kVecs>(dy_f, static_cast<const A*>(nullptr), size.mels, count,
                    sums.weights.decoder_bias);
  }
  for (Index f = 0; f < size.frames; ++f) unfolded.look(dy + f * size.mels * kAll, size.mels);
  store_lanes<kVecs>(p.z, size.latent, Strided<A>{z_rows, size.latent, 0, 1}, 0, count, 0);
  each<A, kVecs>(size.latent, [&](Index, Index place) { M::store(dz + place, LanesOf<A>{}); });
  for (Index f = 0; f < size.frames; ++f) {
    A* dy_f = dy + f * size.mels * kAll;
    A* folded_dy = dy_f;
    if (unfolded.any) {  // without the rows that are not folded
      folded_dy = p.hidden;
      for (Index i = 0; i < size.mels * kAll; ++i) {
        folded_dy[i] = unfolded.rows[i % kAll] ? A(0) : dy_f[i];
      }
      for (Index i = 0; i < count * size.latent; ++i) {
        if (unfolded.rows[i / size.latent]) z_rows[i] = 0;
      }
    }
    const Matrix<A> folded{model.folded_decoder + f * size.latent * size.mels, size.mels, 1};
    multiply_onto<kVecs>(folded, size.latent, size.mels, folded_dy, dz);
    if (sums.folded_decoder != nullptr) {
      outer(folded_dy, kAll, Index(1), size.mels, z_rows, size.latent, size.latent, count,
            sums.folded_decoder + f * size.mels * size.latent, size.latent);
    }
  }
  if (!unfolded.any) return;
  for (Index i = 0; i < count; ++i) {
    if (!unfolded.rows[i]) continue;
    for (Index l = 0; l < size.latent; ++l) dz[l * kAll + i] = 0;
    for (Index f = 0; f < size.frames; ++f) {
      decode_row_gradient(model, f, p.z + i, dy + f * size.mels * kAll + i, kAll, r, dz + i, sums);
    }
  }
}

template <int kVecs, typename T, typename A = AccumulatorOf<T>>
void backward_block(const Model<A>& model, const Strided<const T>& x,
                    const Outputs<const T, const A>& gradient, const A* projection,
                    const Strided<T>& dx, const Sums<A>& sums, Index row, Index count, A* scratch) {
  using M = Memory<A>;
  constexpr Index kAll = kRows<A, kVecs>;
  const Sizes& size = model.sizes;
  const Tensors<const A*>& w = model.weights;
  const Tensors<A*>& into = sums.weights;
  Taker<A> take{scratch};
  const Passed<A> p = take_passed<kVecs>(size, true, take);
  encode_block<kVecs>(model, x, projection, static_cast<A*>(nullptr), row, count, p);

  A* dy = take(size.frames * size.mels * kAll);
  A* dz = take(size.latent * kAll);
  A* dmid = take(size.latent * kAll);
  A* rows = take(kAll * larger(size.mels, size.latent));
  if (gradient.latent.data != nullptr)
    load_lanes<kVecs>(gradient.latent, row, count, 0, size.latent, dz);
  else
    decoder_gradient<kVecs>(model, x, gradient, sums, row, count, p, take, dy, dz);

  each<A, kVecs>(size.latent, [&](Index, Index place) {
    M::store(dz + place, M::load(dz + place) * M::load(p.mid_slopes + place));
  });
  add_rows<kVecs>(dz, static_cast<const A*>(nullptr), size.latent, count, into.mid_bias);
  if (into.mid_weight != nullptr) {
    const Strided<A> mid_rows{rows, size.latent, 0, 1};
    store_lanes<kVecs>(p.mid_input, size.latent, mid_rows, 0, count, 0);
    outer(dz, kAll, Index(1), size.latent, rows, size.latent, size.latent, count, into.mid_weight,
          size.latent);
  }
  multiply<kVecs>(Matrix<A>{w.mid_weight, 1, size.latent}, size.latent, size.latent, dz, dmid);
  add_rows<kVecs>(dmid, p.mid_normalised, size.latent, count, into.mid_norm_weight);
  add_rows<kVecs>(dmid, static_cast<const A*>(nullptr), size.latent, count, into.mid_norm_bias);
  normalise_gradient<kVecs>(dmid, w.mid_norm_weight, p.mid_normalised, size.latent, p.mid_scale);

  const bool want_encoder =
      dx.data != nullptr || into.encoder_weight != nullptr || into.encoder_bias != nullptr;
  scale_features<kVecs>(dmid, model.inverse_lengths, size.latent, dz);
  const Index width = size.frames * size.slice;
  for (Index f = 0; f < size.frames; ++f) {
    if (into.basis != nullptr) {
      outer(dmid, kAll, Index(1), size.latent, p.coded + f * size.slice * kAll, size.slice,
            size.slice, count, into.basis + f * size.slice, width);
    }
    if (!want_encoder) continue;
    const A* slopes = p.slopes + f * size.slice * kAll;
    const A* normalised = p.normalised + f * size.mels * kAll;
    const Matrix<A> basis{w.basis + f * size.slice, 1, width};
    multiply<kVecs>(basis, size.slice, size.latent, dz, p.hidden);
    each<A, kVecs>(size.slice, [&](Index, Index place) {
      M::store(p.hidden + place, M::load(p.hidden + place) * M::load(slopes + place));
    });
    add_rows<kVecs>(p.hidden, static_cast<const A*>(nullptr), size.slice, count, into.encoder_bias);
    if (into.encoder_weight != nullptr) {
      store_lanes<kVecs>(normalised, size.mels, Strided<A>{rows, size.mels, 0, 1}, 0, count, 0);
      outer(p.hidden, kAll, Index(1), size.slice, rows, size.mels, size.mels, count,
            into.encoder_weight, size.mels);
    }
    if (dx.data == nullptr) continue;
    multiply<kVecs>(Matrix<A>{w.encoder_weight, 1, size.mels}, size.mels, size.slice, p.hidden,
                    p.input);
    normalise_gradient<kVecs>(p.input, w.norm_weight, normalised, size.mels, p.scales + f * kAll);
    if (gradient.score != nullptr) {  // y is compared with x, so x has a direct gradient
      const A* dy_f = dy + f * size.mels * kAll;
      each<A, kVecs>(size.mels, [&](Index, Index place) {
        M::store(p.input + place, M::load(p.input + place) - M::load(dy_f + place));
      });
    }
    store_lanes<kVecs>(p.input, size.mels, dx, row, count, f);
  }
}

// Entry points. ----------------------------------------------------------------------------------

/// Calls work.operator()<vectors>(row, count) for blocks of rows.
template <typename A, typename Work>
void each_block(Index begin, Index end, const Work& work) {
  constexpr Index kAll = kRows<A, kVectors>;
  for (Index row = begin; row < end; row += kAll) {
    const Index count = smaller(kAll, end - row);
    if (count <= Memory<A>::kLanes)
      work.template operator()<1>(row, count);
    else
      work.template operator()<kVectors>(row, count);
  }
}

template <typename T, typename A = AccumulatorOf<T>>
void forward(const Model<A>& model, const Strided<const T>& x, const Outputs<T, A>& out,
             A* projection, Index begin, Index end, A* scratch) {
  each_block<A>(begin, end, [&]<int kVecs>(Index row, Index count) {
    forward_block<kVecs>(model, x, out, projection, row, count, scratch);
  });
}

template <typename T, typename A = AccumulatorOf<T>>
void backward(const Model<A>& model, const Strided<const T>& x,
              const Outputs<const T, const A>& gradient, const A* projection, const Strided<T>& dx,
              const Sums<A>& sums, Index begin, Index end, A* scratch) {
  each_block<A>(begin, end, [&]<int kVecs>(Index row, Index count) {
    backward_block<kVecs>(model, x, gradient, projection, dx, sums, row, count, scratch);
  });
}

template <typename A>
Index scratch_elements(const Sizes& size, bool backward) {
  constexpr Index kAll = kRows<A, kVectors>;
  Taker<A> take{nullptr};
  take_passed<kVectors>(size, backward, take);
  take(2 * size.slice);
  if (backward) {
    take(size.frames * size.mels * kAll);
    for (int i = 0; i < 2; ++i) take(size.latent * kAll);
    take(kAll * larger(size.mels, size.latent));
    take(kAll * size.latent);
  }
  return take.used;
}

template <typename A>
A dot(const A* a, const A* b, Index count) {
  using M = Memory<A>;
  LanesOf<A> sums[2] = {};
  Index i = 0;
  for (; i + 2 * M::kLanes <= count; i += 2 * M::kLanes) {
    for (int k = 0; k < 2; ++k) {
      const Index place = i + k * M::kLanes;
      sums[k] = multiply_add(M::load(a + place), M::load(b + place), sums[k]);
    }
  }
  A sum = add_lanes<A>(sums[0] + sums[1]);
  for (; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

template <typename A>
bool fold(const Sizes& size, const Tensors<const A*>& weights, A* inverse_lengths,
          A* folded_decoder, A* scratch) {
  const Index width = size.frames * size.slice;
  for (Index l = 0; l < size.latent; ++l) {
    const A* row = weights.basis + l * width;
    const A length = square_root(broadcast<LanesOf<A>>(dot(row, row, width)))[0];
    inverse_lengths[l] = A(1) / (length < A(1e-12) ? A(1e-12) : length);
  }
  // Transpose the decoder, then multiply a row of the basis by it.
  for (Index m = 0; m < size.mels; ++m) {
    for (Index s = 0; s < size.slice; ++s) {
      scratch[s * size.mels + m] = weights.decoder_weight[m * size.slice + s];
    }
  }
  const Index frame = size.latent * size.mels;
  __builtin_memset(folded_decoder, 0, size.frames * frame * sizeof(A));
  A nothing = 0;  // stays 0 if all are finite, otherwise becomes NaN
  for (Index f = 0; f < size.frames; ++f) {
    A* folded = folded_decoder + f * frame;
    outer(weights.basis + f * size.slice, width, Index(1), size.latent,
          static_cast<const A*>(scratch), size.mels, size.mels, size.slice, folded, size.mels);
    for (Index l = 0; l < size.latent; ++l) {
      for (Index m = 0; m < size.mels; ++m) {
        folded[l * size.mels + m] *= inverse_lengths[l];
        nothing += folded[l * size.mels + m] * A(0);
      }
    }
  }
  return nothing == A(0);
}

/// All gradients except that of the basis.
template <typename A>
void finish(const Model<A>& model, const Sums<A>& sums, A* scratch) {
  const Sizes& size = model.sizes;
  const Tensors<A*>& into = sums.weights;
  for (Index s = 0; s < size.slice; ++s) {
    const A* weight = model.weights.encoder_weight + s * size.mels;
    if (into.norm_bias != nullptr) {
      for (Index m = 0; m < size.mels; ++m) into.norm_bias[m] += weight[m] * into.encoder_bias[s];
    }
    if (into.encoder_weight == nullptr) continue;
    A* sum = into.encoder_weight + s * size.mels;
    if (into.norm_weight != nullptr) {
      for (Index m = 0; m < size.mels; ++m) into.norm_weight[m] += weight[m] * sum[m];
    }
    for (Index m = 0; m < size.mels; ++m) {  // from the normalised x to the affine part's output
      sum[m] =
          sum[m] * model.weights.norm_weight[m] + into.encoder_bias[s] * model.weights.norm_bias[m];
    }
  }
  if (sums.folded_decoder == nullptr || into.decoder_weight == nullptr) return;
  const Index width = size.frames * size.slice, frame = size.mels * size.latent;
  for (Index f = 0; f < size.frames; ++f) {
    const A* folded = sums.folded_decoder + f * frame;
    for (Index i = 0; i < frame; i += size.latent) {
      for (Index l = 0; l < size.latent; ++l) {
        scratch[i + l] = folded[i + l] * model.inverse_lengths[l];
      }
    }
    outer(static_cast<const A*>(scratch), size.latent, Index(1), size.mels,
          model.weights.basis + f * size.slice, width, size.slice, size.latent, into.decoder_weight,
          size.slice);
  }
}

template <typename A>
void finish_basis(const Model<A>& model, const Sums<A>& sums) {
  const Sizes& size = model.sizes;
  const Index width = size.frames * size.slice, frame = size.mels * size.latent;
  A* into = sums.weights.basis;
  for (Index f = 0; sums.folded_decoder != nullptr && f < size.frames; ++f) {
    outer(static_cast<const A*>(sums.folded_decoder) + f * frame, Index(1), size.latent,
          size.latent, model.weights.decoder_weight, size.slice, size.slice, size.mels,
          into + f * size.slice, width);
  }
  for (Index l = 0; l < size.latent; ++l) {  // through the normalisation of each row
    const A* row = model.weights.basis + l * width;
    A* gradient = into + l * width;
    const A inverse = model.inverse_lengths[l];
    // A row shorter than 1e-12 is divided by 1e-12, whatever its length.
    const bool by_length = inverse < A(1) / A(1e-12);
    const A along = by_length ? dot(static_cast<const A*>(gradient), row, width) * inverse : A(0);
    for (Index i = 0; i < width; ++i) {
      gradient[i] = (gradient[i] - row[i] * inverse * along) * inverse;
    }
  }
}

template <typename T, typename A = AccumulatorOf<T>>
void widen_all(const T* from, Index count, A* to) {
  using M = Memory<T>;
  Index i = 0;
  for (; i + M::kLanes <= count; i += M::kLanes) Memory<A>::store(to + i, M::load(from + i));
  if (i < count) Memory<A>::store(to + i, M::load(from + i, count - i), count - i);
}

template <typename T, typename A = AccumulatorOf<T>>
void narrow_all(const A* from, Index count, T* to) {
  using M = Memory<T>;
  Index i = 0;
  for (; i + M::kLanes <= count; i += M::kLanes) M::store(to + i, Memory<A>::load(from + i));
  if (i < count) M::store(to + i, Memory<A>::load(from + i, count - i), count - i);
}

template <typename A>
void add_all(const A* from, Index count, A* to) {
  using M = Memory<A>;
  Index i = 0;
  for (; i + M::kLanes <= count; i += M::kLanes) {
    M::store(to + i, M::load(to + i) + M::load(from + i));
  }
  for (; i < count; ++i) to[i] += from[i];
}

template <typename T, typename A = AccumulatorOf<T>>
constexpr Kernels<T> all_of() {
  return {
      kRows<A, kVectors>, scratch_elements<A>, widen_all<T>, narrow_all<T>,  add_all<A>, fold<A>,
      forward<T>,         backward<T>,         finish<A>,    finish_basis<A>};
}

}  // namespace

constinit const autoencoder::KernelSet autoencoder_kernels{all_of<float>(), all_of<double>(),
                                                           all_of<F16>(), all_of<BF16>()};

}  // namespace fusewise::cpu::FUSEWISE_ISA
