// Kernels over the autoencoder's parameters, a few hundred KB in all: bound by latency.

#include <algorithm>
#include <type_traits>

#include "common/divide.h"
#include "cuda/autoencoder/finish.cuh"
#include "cuda/autoencoder/mma_registers.cuh"
#include "cuda/autoencoder/parameters.cuh"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"

namespace fusewise::cuda::autoencoder {
namespace {

constexpr int kThreads = 256;
constexpr int kMostParts = 16;  // blocks per basis vector: each reads all of it

/// A LayerNorm and the Linear that follows it, and where to write them.
template <typename To, typename A>
struct Copied {
  const void *weight, *bias, *norm_weight, *norm_bias;
  int outputs, inputs;
  To *to, *transposed, *to_bias;
  Affine<A> norm;
};

/// Copies row n, which may be padding.
template <typename W, typename T, typename A, typename To>
__device__ void copy_row(const Copied<To, A>& c, int n, const Prepared<T, A>& prepared) {
  const bool real = n < c.outputs;
  const int columns = padded_inputs(c.inputs, prepared.packed);
  for (int k = threadIdx.x; k < columns; k += blockDim.x) {
    const long long at = static_cast<long long>(n) * c.inputs + k;
    const A value = real && k < c.inputs ? read<W>(c.weight, at) : A(0);
    if (!prepared.packed) {
      c.to[at] = from_accumulator<To>(value);
      continue;
    }
    if constexpr (!std::is_same_v<A, double>) {
      const To weight = packed_value<To>(value, prepared.tf32);
      c.to[register_position(n, k, norm_input_blocks(c.inputs))] = weight;
      if (c.transposed == nullptr) continue;
      c.transposed[register_position(k, n, norm_output_blocks(c.outputs))] = weight;
    }
  }
  if (threadIdx.x == 0) c.to_bias[n] = from_accumulator<To>(real ? read<W>(c.bias, n) : A(0));
  if (n > 0) return;
  for (int k = threadIdx.x; k < columns; k += blockDim.x) {
    c.norm.weight[k] = k < c.inputs ? read<W>(c.norm_weight, k) : A(0);
    c.norm.bias[k] = k < c.inputs ? read<W>(c.norm_bias, k) : A(0);
  }
}

/// The sum of term(k) for k = first, first + step, ... below count. Eight terms are in flight at
/// once, without branches.
template <typename Term>
__device__ __forceinline__ auto sum_of_terms(int first, int count, int step, Term term) {
  constexpr int kInFlight = 8;
  decltype(term(0)) sum = 0;
  for (int k = first; k < count; k += kInFlight * step) {
    decltype(sum) terms[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) terms[i] = term(min(k + i * step, count - 1));
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) sum += k + i * step < count ? terms[i] : 0;
  }
  return sum;
}

/// Computes a frame of `decode`: `vector` is its index, `inverse` 1 / the basis vector's norm.
/// `lanes` neighbouring lanes share a value. They read neighbouring weights of the decoder.
template <typename W, typename T, typename A>
__device__ void fold_decoder(const AutoencoderTensors<const void*>& p, const AutoencoderSizes& s,
                             long long vector, A inverse, int lanes, const Prepared<T, A>& to) {
  const long long basis = vector * s.slice_latent;
  const int lane = threadIdx.x % lanes;
  // All lanes of a warp take part in each sum, so the loop ends for all of them together.
  for (int first = 0; first < s.n_mels; first += kThreads / lanes) {
    const int mel = first + threadIdx.x / lanes;
    const long long decoder = static_cast<long long>(min(mel, s.n_mels - 1)) * s.slice_latent;
    A sum = sum_of_terms(lane, s.slice_latent, lanes, [&](int k) {
      return read<W>(p.basis, basis + k) * inverse * read<W>(p.decoder_weight, decoder + k);
    });
    sum = warp_sum(sum, lanes);
    if (mel >= s.n_mels || lane > 0) continue;
    to.decode[vector * s.n_mels + mel] = sum;
    if constexpr (!std::is_same_v<T, A>) {
      to.decode_of_rows[vector * s.n_mels + mel] = from_accumulator<T>(sum);
    }
  }
}

/// `parts` blocks for each basis vector, which share its frames, and one block for each row of the
/// other matrices.
template <typename W, typename T, typename A>
__global__ void __launch_bounds__(kThreads)
    prepare_kernel(AutoencoderTensors<const void*> p, AutoencoderSizes s, Prepared<T, A> to,
                   int parts, int lanes, bool decodes) {
  wait_for_previous_kernel();
  allow_next_kernel();
  int b = blockIdx.x;
  if (b < s.latent * parts) {
    const int l = b / parts, part = b % parts;
    const long long width = static_cast<long long>(s.frames) * s.slice_latent, begin = l * width;
    A squares[1] = {};
    for (long long k = threadIdx.x; k < width; k += blockDim.x) {
      const A value = read<W>(p.basis, begin + k);
      squares[0] += value * value;
    }
    block_totals<kThreads>(squares);
    const A norm = sqrt(squares[0]);
    // Not max, which would discard NaN.
    const A inverse = norm < A(1e-12) ? A(1e12) : A(1) / norm;
    if (part == 0 && threadIdx.x == 0) to.inverse_norm[l] = inverse;
    for (int f = part; f < s.frames; f += parts) {
      const long long vector = static_cast<long long>(l) * s.frames + f;
      for (int k = threadIdx.x; k < s.slice_latent; k += blockDim.x) {
        const long long at = vector * s.slice_latent + k;
        const A value = read<W>(p.basis, at) * inverse;
        to.unit[at] = value;
        if constexpr (!std::is_same_v<T, A>) to.unit_of_rows[at] = from_accumulator<T>(value);
      }
      if (to.packed && decodes) fold_decoder<W>(p, s, vector, inverse, lanes, to);
    }
    return;
  }
  b -= s.latent * parts;
  if (b < padded_outputs(s.latent, to.packed)) {
    const Copied<A, A> mid{
        p.mid_weight, p.mid_bias, p.mid_norm_weight, p.mid_norm_bias, s.latent,
        s.latent,     to.mid,     to.mid_transposed, to.mid_bias,     to.mid_norm};
    return copy_row<W>(mid, b, to);
  }
  b -= padded_outputs(s.latent, to.packed);
  if (b < padded_outputs(s.slice_latent, to.packed)) {
    const Copied<T, A> encoder{
        p.encoder_weight, p.encoder_bias, p.norm_weight,         p.norm_bias,     s.slice_latent,
        s.n_mels,         to.encoder,     to.encoder_transposed, to.encoder_bias, to.norm};
    return copy_row<W>(encoder, b, to);
  }
  b -= padded_outputs(s.slice_latent, to.packed);
  for (int k = threadIdx.x; k < s.slice_latent; k += blockDim.x) {
    const long long at = static_cast<long long>(b) * s.slice_latent + k;
    to.decoder[at] = read<W>(p.decoder_weight, at);
  }
  for (int f = threadIdx.x; f < s.frames; f += blockDim.x) {
    const long long at = static_cast<long long>(f) * s.n_mels + b;
    const A value = read<W>(p.decoder_bias, b);
    to.decode_bias[at] = value;
    if constexpr (!std::is_same_v<T, A>) to.decode_bias_of_rows[at] = from_accumulator<T>(value);
  }
}

constexpr int kColumns = 8;  // of a gradient, per block: a sector

/// kColumns results of a row per block: first for each frame of the basis, if wanted, then for each
/// mel. The threads of a column share its sum.
__global__ void __launch_bounds__(kThreads)
    decoder_gradients_kernel(AutoencoderSizes s, const float* unit, const float* decoder,
                             Sums<float> sums, int unit_blocks) {
  constexpr int kStrands = kThreads / kColumns;
  wait_for_previous_kernel();
  allow_next_kernel();
  const bool to_unit = static_cast<int>(blockIdx.x) < unit_blocks;
  const int b = to_unit ? blockIdx.x : blockIdx.x - unit_blocks;
  const int m = s.n_mels, h = s.slice_latent, tiles = (h + kColumns - 1) / kColumns;
  const int row = b / tiles, column = b % tiles * kColumns + threadIdx.x % kColumns;
  const int strand = threadIdx.x / kColumns;
  float sum = 0;
  if (column < h && to_unit) {
    const float* d = sums.decode + static_cast<long long>(row) * m;
    sum = sum_of_terms(strand, m, kStrands, [&](int k) { return d[k] * decoder[k * h + column]; });
  } else if (column < h) {
    sum = sum_of_terms(strand, s.latent * s.frames, kStrands, [&](int k) {
      return sums.decode[static_cast<long long>(k) * m + row] *
             unit[static_cast<long long>(k) * h + column];
    });
  }
  sum = block_column_sum<kThreads, kColumns>(sum);
  if (strand > 0 || column >= h) return;
  const long long at = static_cast<long long>(row) * h + column;
  if (to_unit) {
    sums.unit[at] += sum;
  } else {
    sums.decoder[at] = sum;
  }
}

template <typename W, typename A>
__global__ void __launch_bounds__(kFinishThreads)
    parameter_gradients_kernel(AutoencoderTensors<const void*> p, AutoencoderTensors<void*> g,
                               AutoencoderSizes s, const A* inverse_norm, Sums<A> sums,
                               bool decodes) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const auto bias = [&](int first) {
    return [=](int n) {
      A sum = 0;
      for (long long i = 0; i < sums.chunks; ++i) {
        sum += sums.biases[i * (s.slice_latent + s.latent + s.n_mels) + first + n];
      }
      return sum;
    };
  };
  int b = blockIdx.x;
  if (b < s.latent) {
    if (g.basis == nullptr) return;
    const long long width = static_cast<long long>(s.frames) * s.slice_latent, begin = b * width;
    return finish_basis_vector<W>(p.basis, g.basis, begin, width, inverse_norm[b],
                                  sums.unit + begin);
  }
  b -= s.latent;
  if (b < s.latent) {
    const NormedLinear mid{p.mid_norm_weight, p.mid_norm_bias, p.mid_weight, g.mid_norm_weight,
                           g.mid_norm_bias,   g.mid_weight,    g.mid_bias};
    if (!mid.wanted()) return;
    return finish_linear<W>(mid, sums.mid, s.latent, bias(s.slice_latent), s.latent, s.latent, b);
  }
  b -= s.latent;
  if (b < s.n_mels) {
    const NormedLinear encoder{p.norm_weight, p.norm_bias,      p.encoder_weight, g.norm_weight,
                               g.norm_bias,   g.encoder_weight, g.encoder_bias};
    if (!encoder.wanted()) return;
    return finish_linear<W>(encoder, sums.encode, s.n_mels, bias(0), s.slice_latent, s.n_mels, b);
  }
  b -= s.n_mels;
  if (g.decoder_weight != nullptr) {
    for (int k = threadIdx.x; k < s.slice_latent; k += blockDim.x) {
      const long long at = static_cast<long long>(b) * s.slice_latent + k;
      write<W>(g.decoder_weight, at, decodes ? sums.decoder[at] : A(0));
    }
  }
  if (g.decoder_bias != nullptr && threadIdx.x == 0) {
    write<W>(g.decoder_bias, b, decodes ? bias(s.slice_latent + s.latent)(b) : A(0));
  }
}

/// Calls body(W) with the device type of the parameters, for data that is computed in A.
template <typename A, typename Body>
void dispatch_parameters(DType dtype, Body&& body) {
  if constexpr (std::is_same_v<A, double>) {
    body(double{});
  } else {
    dispatch_short_dtype(dtype, body);
  }
}

}  // namespace

template <typename T>
void prepare_parameters(const Context& context, const AutoencoderTensors<const void*>& parameters,
                        DType dtype, const AutoencoderSizes& s, const Prepared<T>& to,
                        bool decodes) {
  using A = Accumulator<T>;
  dispatch_parameters<A>(dtype, [&]<typename W>(W) {
    const int parts = std::min(s.frames, kMostParts);
    int lanes = 1;  // so many that each adds eight terms, but a warp reads whole sectors
    while (lanes < 8 && lanes * 8 < s.slice_latent) lanes *= 2;
    const std::int64_t blocks = std::int64_t{s.latent} * parts +
                                padded_outputs(s.latent, to.packed) +
                                padded_outputs(s.slice_latent, to.packed) + s.n_mels;
    launch_kernel({context, blocks, kThreads, 0, true}, "preparing the autoencoder's weights",
                  prepare_kernel<W, T, A>, parameters, s, to, parts, lanes, decodes);
  });
}

void decoder_gradients(const Context& context, const AutoencoderSizes& s, const float* unit,
                       const float* decoder, const Sums<float>& sums, bool to_unit,
                       bool to_decoder) {
  const std::int64_t tiles = divide_up(s.slice_latent, kColumns);
  const std::int64_t unit_blocks = to_unit ? std::int64_t{s.latent} * s.frames * tiles : 0;
  const std::int64_t blocks = unit_blocks + (to_decoder ? s.n_mels * tiles : 0);
  if (blocks == 0) return;
  launch_kernel({context, blocks, kThreads, 0, true}, "computing the decoder's gradients",
                decoder_gradients_kernel, s, unit, decoder, sums, static_cast<int>(unit_blocks));
}

template <typename A>
void parameter_gradients(const Context& context, const AutoencoderBackwardArguments& call,
                         const A* inverse_norm, const Sums<A>& sums, bool decodes) {
  const AutoencoderSizes& s = call.sizes;
  dispatch_parameters<A>(call.parameter_dtype, [&]<typename W>(W) {
    launch_kernel({context, 2 * (std::int64_t{s.latent} + s.n_mels), kFinishThreads, 0, true},
                  "computing the autoencoder's gradients", parameter_gradients_kernel<W, A>,
                  call.parameters, call.gradients, s, inverse_norm, sums, decodes);
  });
}

#define FUSEWISE_INSTANTIATE(T)                                                                   \
  template void prepare_parameters(const Context&, const AutoencoderTensors<const void*>&, DType, \
                                   const AutoencoderSizes&, const Prepared<T>&, bool)
FUSEWISE_INSTANTIATE(float);
FUSEWISE_INSTANTIATE(double);
FUSEWISE_INSTANTIATE(__half);
FUSEWISE_INSTANTIATE(__nv_bfloat16);
#undef FUSEWISE_INSTANTIATE
template void parameter_gradients(const Context&, const AutoencoderBackwardArguments&, const float*,
                                  const Sums<float>&, bool);
template void parameter_gradients(const Context&, const AutoencoderBackwardArguments&,
                                  const double*, const Sums<double>&, bool);

}  // namespace fusewise::cuda::autoencoder
