// The autoencoder and its gradients for any sizes and types. It uses the vendor's GEMMs on chunks
// of rows, with every intermediate result in scratch memory. Intermediate results of whole rows
// have x's type; latents and sums are float32 (float64 for float64). The decoder is folded into the
// basis, and sums yield the gradients, as in the fused kernels. But LayerNorm's weight and bias are
// not folded into the next Linear: a LayerNorm of few values can enlarge errors a hundredfold, so
// the GEMMs round what torch rounds. Bound by memory for many rows, by launches for few.

#include <algorithm>
#include <type_traits>

#include "common/divide.h"
#include "common/scratch.h"
#include "cuda/autoencoder/gradients.cuh"
#include "cuda/autoencoder/kernels.h"
#include "cuda/autoencoder/norm_linear.cuh"
#include "cuda/autoencoder/parameters.cuh"
#include "cuda/gemm/product.h"
#include "cuda/launch.cuh"
#include "cuda/linear_act/passes.cuh"
#include "cuda/reduce.cuh"

namespace fusewise::cuda::autoencoder {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMostRowBytes = std::int64_t{128} << 20;  // scratch for a chunk of rows
constexpr int kMostFusedSlices = 256;    // above this, multiplying the parameters takes too long
constexpr int kMostVectors = 4096;       // above this, a block would add too many terms
constexpr std::int64_t kRowsApart = 16;  // chunks start at multiples of this, to stay aligned

// ---- kernels over rows

/// LayerNorm of `segments` segments of `columns` values each, one warp per segment. A row of `in`
/// has `frames` segments. `normal`, unless null, is the result without weight and bias.
template <typename T, typename A>
__global__ void __launch_bounds__(kThreads)
    layer_norm_kernel(const T* in, long long row_stride, int frames, long long segments,
                      int columns, Affine<A> affine, T* normal, A* inverse_deviation, T* out) {
  const int lane = threadIdx.x % 32;
  const long long segment = (blockIdx.x * static_cast<long long>(kThreads) + threadIdx.x) / 32;
  if (segment >= segments) return;
  const T* row = in + segment / frames * row_stride + segment % frames * columns;
  A sum = 0;
  for (int i = lane; i < columns; i += 32) sum += to_accumulator<A>(row[i]);
  const A mean = warp_sum(sum) / A(columns);
  A squares = 0;
  for (int i = lane; i < columns; i += 32) {
    const A d = to_accumulator<A>(row[i]) - mean;
    squares += d * d;
  }
  const A inverse = A(1) / sqrt(warp_sum(squares) / A(columns) + A(1e-5));
  if (lane == 0) inverse_deviation[segment] = inverse;
  for (int i = lane; i < columns; i += 32) {
    const A value = (to_accumulator<A>(row[i]) - mean) * inverse;
    if (normal != nullptr) normal[segment * columns + i] = from_accumulator<T>(value);
    out[segment * columns + i] = from_accumulator<T>(value * affine.weight[i] + affine.bias[i]);
  }
}

/// From the gradient of LayerNorm's result to that of its input, written or added to `out`.
template <typename T, typename A, typename Out>
__global__ void __launch_bounds__(kThreads)
    layer_norm_backward_kernel(const T* d, const T* normal, const A* inverse_deviation,
                               long long segments, int columns, const A* weight, Out* out,
                               bool add) {
  const int lane = threadIdx.x % 32;
  const long long segment = (blockIdx.x * static_cast<long long>(kThreads) + threadIdx.x) / 32;
  if (segment >= segments) return;
  d += segment * columns, normal += segment * columns, out += segment * columns;
  A sum = 0, product = 0;
  for (int i = lane; i < columns; i += 32) {
    const A value = to_accumulator<A>(d[i]) * weight[i];
    sum += value;
    product += value * to_accumulator<A>(normal[i]);
  }
  sum = warp_sum(sum) / A(columns);
  product = warp_sum(product) / A(columns);
  const A inverse = inverse_deviation[segment];
  for (int i = lane; i < columns; i += 32) {
    const A value = inverse * (to_accumulator<A>(d[i]) * weight[i] - sum -
                               to_accumulator<A>(normal[i]) * product);
    out[i] = from_accumulator<Out>(add ? to_accumulator<A>(out[i]) + value : value);
  }
}

template <typename From, typename To>
struct Convert {
  const From* in;
  To* out;
  __device__ void operator()(long long i) const {
    if constexpr (sizeof(From) >= sizeof(To)) {
      out[i] = from_accumulator<To>(in[i]);
    } else {
      out[i] = to_accumulator<To>(in[i]);
    }
  }
};

template <typename T, typename A>
struct Add {
  const T* in;
  A* out;
  __device__ void operator()(long long i) const { out[i] += to_accumulator<A>(in[i]); }
};

/// dy = d_out + 2 / width * d_score * (y - x); it may overwrite y. The second term with the
/// opposite sign is the direct gradient of x.
template <typename T, typename A>
struct OutputGradient {
  const A* y;
  T* dy;
  const T* d_out;
  const A* d_score;
  const T* x;
  long long x_stride, width;
  T* dx;
  __device__ void operator()(long long i) const {
    const long long row = i / width;
    const A d = A(2) / A(width) * d_score[row] *
                (y[i] - to_accumulator<A>(x[row * x_stride + i - row * width]));
    dy[i] = from_accumulator<T>(d + (d_out != nullptr ? to_accumulator<A>(d_out[i]) : A(0)));
    if (dx != nullptr) dx[i] = from_accumulator<T>(-d);
  }
};

template <typename Body>
__global__ void __launch_bounds__(kThreads) each_kernel(Body body, long long count) {
  const long long i = blockIdx.x * static_cast<long long>(kThreads) + threadIdx.x;
  if (i < count) body(i);
}

template <typename Body>
void each(const Context& context, const char* what, std::int64_t count, const Body& body) {
  launch_kernel({context, divide_up(count, kThreads), kThreads}, what, each_kernel<Body>, body,
                count);
}

/// One warp per row.
template <typename T, typename A>
__global__ void __launch_bounds__(kThreads)
    score_kernel(const A* y, const T* x, long long x_stride, long long rows, long long width,
                 A* score) {
  const long long row = (blockIdx.x * static_cast<long long>(kThreads) + threadIdx.x) / 32;
  if (row >= rows) return;
  A sum = 0;
  for (long long i = threadIdx.x % 32; i < width; i += 32) {
    const A d = y[row * width + i] - to_accumulator<A>(x[row * x_stride + i]);
    sum += d * d;
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) score[row] = sum / A(width);
}

// ---- processing chunks of rows

/// Allocates aligned pieces of one memory block, suitable for vector loads and the vendor's GEMMs.
/// Without a block it only counts the bytes.
class Pieces {
 public:
  explicit Pieces(char* memory) : memory_(memory) {}
  template <typename Element>
  Element* take(std::int64_t count) {
    const std::int64_t begin = bytes_;
    bytes_ += divide_up(count * std::int64_t{sizeof(Element)}, kAlignment) * kAlignment;
    return memory_ == nullptr ? nullptr : reinterpret_cast<Element*>(memory_ + begin);
  }
  std::int64_t bytes() const { return bytes_; }

 private:
  static constexpr std::int64_t kAlignment = 256;
  char* memory_;
  std::int64_t bytes_ = 0;
};

template <typename Element>
constexpr DType kDType = DType::f32;
template <>
constexpr DType kDType<double> = DType::f64;
template <>
constexpr DType kDType<__half> = DType::f16;
template <>
constexpr DType kDType<__nv_bfloat16> = DType::bf16;

/// An operand of a GEMM.
template <typename Element>
struct Operand {
  const Element* data;
  std::int64_t stride;
  bool transposed;

  Matrix matrix() const { return {const_cast<Element*>(data), stride, transposed}; }
};
template <typename Element>
Operand<Element> as_is(const Element* data, std::int64_t stride) {
  return {data, stride, false};
}
template <typename Element>
Operand<Element> transposed(const Element* data, std::int64_t stride) {
  return {data, stride, true};
}

/// The steps for one chunk of rows, with scratch memory for the largest chunk.
template <typename T>
class GeneralPath {
 public:
  using A = Accumulator<T>;

  template <typename Call>
  GeneralPath(const Context& context, const Call& call)
      : context_(context),
        s_(call.sizes),
        width_(std::int64_t{s_.frames} * s_.n_mels),
        hidden_(std::int64_t{s_.frames} * s_.slice_latent),
        // fp16 and bf16 have no more mantissa bits than TF32.
        tf32_(call.tf32 || sizeof(T) == 2),
        fused_(!std::is_same_v<T, double> && s_.n_mels <= kMostNormColumns &&
               s_.latent <= kMostNormColumns && s_.slice_latent <= kMostFusedSlices),
        scores_(scores(call)),
        chunks_(divide_up(s_.rows * row_bytes(call), kMostRowBytes)),
        chunk_(divide_up(divide_up(s_.rows, chunks_), kRowsApart) * kRowsApart),
        memory_(context, lay_out(call, nullptr)) {
    lay_out(call, memory_.data());
    prepare_parameters<T>(context_, call.parameters, call.parameter_dtype, s_, prepared_,
                          decodes(call));
    if (!decodes(call) || fused_) return;
    multiply(vectors(), s_.n_mels, s_.slice_latent, as_is(prepared_.unit, s_.slice_latent),
             transposed(prepared_.decoder, s_.slice_latent), prepared_.decode, kExact);
    convert(prepared_.decode, prepared_.decode_of_rows, s_.latent * width_);
  }

  std::int64_t chunk() const { return chunk_; }

  void forward(const AutoencoderForwardArguments& call, std::int64_t row, std::int64_t rows) {
    const T* x = static_cast<const T*>(call.x) + row * call.x_stride;
    A* projection = call.projection == nullptr ? projection_
                                               : static_cast<A*>(call.projection) + row * s_.latent;
    T* z = call.z == nullptr ? z_of_rows_ : static_cast<T*>(call.z) + row * s_.latent;
    T* out = call.out == nullptr ? nullptr : static_cast<T*>(call.out) + row * width_;
    encode(x, call.x_stride, rows);
    project(projection, rows);
    if (call.z == nullptr && !decodes(call)) return;
    make_latent(projection, z, rows);
    if (out != nullptr) decode(z, out, rows);
    if (call.score == nullptr) return;
    launch_kernel({context_, divide_up(32 * rows, kThreads), kThreads}, "scoring",
                  score_kernel<T, A>, decode_exactly(z, rows), x, call.x_stride, rows, width_,
                  static_cast<A*>(call.score) + row);
  }

  void backward(const AutoencoderBackwardArguments& call, std::int64_t row, std::int64_t rows) {
    const WantedSums wanted = wanted_sums(call);
    const std::int64_t m = s_.n_mels, l = s_.latent, h = s_.slice_latent, frames = rows * s_.frames;
    const T* x = static_cast<const T*>(call.x) + row * call.x_stride;
    const T* d_z = call.d_z == nullptr ? nullptr : static_cast<const T*>(call.d_z) + row * l;
    T* dx = call.dx == nullptr ? nullptr : static_cast<T*>(call.dx) + row * width_;
    const A* kept =
        call.projection == nullptr ? nullptr : static_cast<const A*>(call.projection) + row * l;
    const bool to_encoder = dx != nullptr || wanted.encode;
    A* biases = sums_.biases + row / chunk_ * (h + l + m);
    const bool add = row > 0;

    if (kept == nullptr || to_encoder || wanted.project) encode(x, call.x_stride, rows);
    if (kept == nullptr) project(projection_, rows);
    make_latent(kept == nullptr ? projection_ : kept, z_of_rows_, rows);

    if (decodes(call)) {
      const T* dy = output_gradient(call, x, row, rows, dx);
      multiply(rows, l, width_, as_is(dy, width_), transposed(prepared_.decode_of_rows, width_),
               dz_);
      if (d_z != nullptr) each(context_, "adding z's gradient", rows * l, Add<T, A>{d_z, dz_});
      if (wanted.decode) {
        multiply(l, width_, rows, transposed(z_of_rows_, l), as_is(dy, width_), sums_.decode,
                 {.add = add});
        differentiate(context_, {.dy = view(dy, frames, m),
                                 .db = view(biases + h + l, m),
                                 .activation = Activation::identity});
      }
    } else if (d_z != nullptr) {
      each(context_, "reading z's gradient", rows * l, Convert<T, A>{d_z, dz_});
    } else {
      check_cuda(
          cudaMemsetAsync(dz_, 0, rows * l * sizeof(A), static_cast<cudaStream_t>(context_.stream)),
          "clearing z's gradient");
    }

    gelu_backward(dz_, mid_before_, rows, l, wanted.mid ? biases + h : nullptr);
    if (wanted.mid) {
      multiply(l, l, rows, transposed(dz_, l), as_is(mid_normal_, l), sums_.mid, {.add = add});
    }
    if (!to_encoder && !wanted.project) return;

    // The latent's buffer is reused for the projection's gradient.
    T* d_projection = z_of_rows_;
    if (fused_) {
      norm_linear_backward(context_, mid_products(),
                           {rows, 1, s_.latent, s_.latent, dz_, prepared_.mid_transposed,
                            exact(prepared_.mid_norm.weight), mid_normal_, exact(mid_inverse_),
                            d_projection, false});
    } else {
      multiply(rows, l, l, as_is(dz_, l), as_is(prepared_.mid, l), projection_);
      layer_norm_backward(projection_, mid_normal_, mid_inverse_, rows, s_.latent,
                          prepared_.mid_norm.weight, d_projection, false);
    }
    if (wanted.project) {
      multiply(l, hidden_, rows, transposed(d_projection, l), as_is(slices_, hidden_), sums_.unit,
               {.add = add});
    }
    if (!to_encoder) return;

    // slices_ is reused for its own gradient, then for the gradient before the GELU.
    multiply(rows, hidden_, l, as_is(d_projection, l), as_is(prepared_.unit_of_rows, hidden_),
             slices_);
    if (wanted.encode) {
      gelu_backward(slices_, before_, frames, h, biases);
      multiply(h, m, frames, transposed(slices_, h), as_is(normal_, m), sums_.encode, {.add = add});
    } else {
      gelu_backward(slices_, before_, rows, hidden_, nullptr);
    }
    if (dx == nullptr) return;
    if (fused_) {
      return norm_linear_backward(
          context_, products(),
          {rows, s_.frames, s_.n_mels, s_.slice_latent, slices_, prepared_.encoder_transposed,
           exact(prepared_.norm.weight), normal_, exact(inverse_), dx, scores_});
    }
    multiply(frames, m, h, as_is(slices_, h), as_is(prepared_.encoder, m), y_);
    layer_norm_backward(y_, normal_, inverse_, frames, s_.n_mels, prepared_.norm.weight, dx,
                        scores_);
  }

  /// Called after the last chunk.
  void finish(const AutoencoderBackwardArguments& call) {
    const WantedSums wanted = wanted_sums(call);
    if (wanted.decode) {
      differentiate_decoder(wanted.project, call.gradients.decoder_weight != nullptr);
    }
    parameter_gradients(context_, call, prepared_.inverse_norm, sums_, decodes(call));
  }

 private:
  template <typename Call>
  static constexpr bool kBackward = std::is_same_v<Call, AutoencoderBackwardArguments>;

  static bool decodes(const AutoencoderForwardArguments& call) {
    return call.out != nullptr || call.score != nullptr;
  }
  static bool decodes(const AutoencoderBackwardArguments& call) {
    return call.d_out != nullptr || call.d_score != nullptr;
  }

  struct Options {
    bool add = false;
    bool exact = false;  ///< for parameters alone: costs almost no time, so it need not round
  };
  static constexpr Options kExact{.exact = true};

  static bool scores(const AutoencoderForwardArguments& call) { return call.score != nullptr; }
  static bool scores(const AutoencoderBackwardArguments& call) { return call.d_score != nullptr; }

  static constexpr bool kTwice = !std::is_same_v<T, A>;

  template <typename Call>
  std::int64_t row_bytes(const Call& call) const {
    const std::int64_t wide = (kBackward<Call> ? 2 : 1) * (width_ + hidden_) + s_.latent;
    const std::int64_t exact =
        s_.frames + 1 + 4 * std::int64_t{s_.latent} + (kTwice && scores(call) ? width_ : 0);
    return wide * std::int64_t{sizeof(T)} + exact * std::int64_t{sizeof(A)};
  }

  /// Returns the number of bytes needed.
  template <typename Call>
  std::int64_t lay_out(const Call& call, char* memory) {
    Pieces pieces(memory);
    const std::int64_t m = s_.n_mels, l = s_.latent, h = s_.slice_latent;
    const std::int64_t slices = padded_outputs(s_.slice_latent, fused_);
    const std::int64_t latents = padded_outputs(s_.latent, fused_);
    const std::int64_t encoder = slices * padded_inputs(s_.n_mels, fused_);
    const std::int64_t mid = latents * padded_inputs(s_.latent, fused_);
    prepared_.packed = fused_;
    prepared_.tf32 = tf32_;
    const auto affine = [&](int columns) -> Affine<A> {
      const int wide = padded_inputs(columns, fused_);
      return {pieces.take<A>(wide), pieces.take<A>(wide)};
    };
    prepared_.norm = affine(s_.n_mels);
    prepared_.mid_norm = affine(s_.latent);
    prepared_.encoder = pieces.take<T>(encoder);
    prepared_.mid = pieces.take<A>(mid);
    if (fused_ && kBackward<Call>) {
      prepared_.encoder_transposed = pieces.take<T>(encoder);
      prepared_.mid_transposed = pieces.take<A>(mid);
    }
    prepared_.encoder_bias = pieces.take<T>(slices);
    prepared_.mid_bias = pieces.take<A>(latents);
    prepared_.inverse_norm = pieces.take<A>(l);
    prepared_.unit = pieces.take<A>(l * hidden_);
    prepared_.decoder = pieces.take<A>(m * h);
    prepared_.decode = pieces.take<A>(l * width_);
    prepared_.decode_bias = pieces.take<A>(width_);
    if constexpr (kTwice) {
      prepared_.unit_of_rows = pieces.take<T>(l * hidden_);
      prepared_.decode_of_rows = pieces.take<T>(l * width_);
      prepared_.decode_bias_of_rows = pieces.take<T>(width_);
    } else {
      prepared_.unit_of_rows = prepared_.unit;
      prepared_.decode_of_rows = prepared_.decode;
      prepared_.decode_bias_of_rows = prepared_.decode_bias;
    }
    const std::int64_t r = std::min(chunk_, s_.rows);
    normal_ = pieces.take<T>(r * width_);
    before_ = pieces.take<T>(r * hidden_);
    projection_ = pieces.take<A>(r * l);
    mid_normal_ = pieces.take<A>(r * l);
    mid_before_ = pieces.take<A>(r * l);
    dz_ = pieces.take<A>(r * l);
    z_of_rows_ = pieces.take<T>(r * l);
    inverse_ = pieces.take<A>(r * s_.frames);
    mid_inverse_ = pieces.take<A>(r);
    // Forward may overwrite these buffers.
    slices_ = kBackward<Call> ? pieces.take<T>(r * hidden_) : before_;
    y_ = kBackward<Call> ? pieces.take<T>(r * width_) : normal_;
    if constexpr (kTwice) {
      exact_y_ = pieces.take<A>(scores(call) ? r * width_ : 0);
    } else {
      exact_y_ = y_;
    }
    if (kBackward<Call>) {
      sums_.encode = pieces.take<A>(h * m);
      sums_.mid = pieces.take<A>(l * l);
      sums_.unit = pieces.take<A>(l * hidden_);
      sums_.decode = pieces.take<A>(l * width_);
      sums_.decoder = pieces.take<A>(m * h);
      sums_.biases = pieces.take<A>(chunks_ * (h + l + m));
      sums_.chunks = divide_up(s_.rows, chunk_);
    }
    return pieces.bytes();
  }

  std::int64_t vectors() const { return std::int64_t{s_.latent} * s_.frames; }

  /// Types with which norm_linear.cu multiplies data of x's type, and data of the bottleneck.
  NormProducts products() const { return {kDType<T>, kDType<T>, tf32_}; }
  NormProducts mid_products() const { return {DType::f32, kDType<T>, tf32_}; }
  /// Only float32: norm_linear.cu takes nothing else.
  static float* exact(A* values) {
    if constexpr (std::is_same_v<A, float>) return values;
    return nullptr;
  }

  /// Whether intermediate results are kept, for backward.
  bool keeps() const { return slices_ != before_; }

  /// Computes slices_, and the intermediate results that backward needs.
  void encode(const T* x, std::int64_t x_stride, std::int64_t rows) {
    const std::int64_t m = s_.n_mels, h = s_.slice_latent, frames = rows * s_.frames;
    if (fused_) {
      return norm_linear(context_, products(),
                         {.rows = rows,
                          .frames = s_.frames,
                          .inputs = s_.n_mels,
                          .outputs = s_.slice_latent,
                          .in = x,
                          .in_stride = x_stride,
                          .norm_weight = exact(prepared_.norm.weight),
                          .norm_bias = exact(prepared_.norm.bias),
                          .weights = prepared_.encoder,
                          .bias = prepared_.encoder_bias,
                          .normal = keeps() ? normal_ : nullptr,
                          .inverse = keeps() ? exact(inverse_) : nullptr,
                          .before = keeps() ? before_ : nullptr,
                          .after = slices_});
    }
    layer_norm(x, x_stride, s_.frames, frames, s_.n_mels, prepared_.norm,
               keeps() ? normal_ : nullptr, inverse_, y_);
    multiply(frames, h, m, as_is(y_, m), transposed(prepared_.encoder, m), before_, {},
             prepared_.encoder_bias);
    gelu(before_, slices_, rows, hidden_);  // dense memory: long rows fill the lanes best
  }

  /// Computes c B^T.
  void project(A* projection, std::int64_t rows) {
    multiply(rows, s_.latent, hidden_, as_is(slices_, hidden_),
             transposed(prepared_.unit_of_rows, hidden_), projection);
  }

  void make_latent(const A* projection, T* z, std::int64_t rows) {
    const std::int64_t l = s_.latent;
    if (fused_) {
      return norm_linear(context_, mid_products(),
                         {.rows = rows,
                          .frames = 1,
                          .inputs = s_.latent,
                          .outputs = s_.latent,
                          .in = projection,
                          .in_stride = l,
                          .norm_weight = exact(prepared_.mid_norm.weight),
                          .norm_bias = exact(prepared_.mid_norm.bias),
                          .weights = prepared_.mid,
                          .bias = prepared_.mid_bias,
                          .normal = keeps() ? mid_normal_ : nullptr,
                          .inverse = keeps() ? exact(mid_inverse_) : nullptr,
                          .before = keeps() ? mid_before_ : nullptr,
                          .after = z,
                          .exact_after = kTwice && scores_ ? exact(dz_) : nullptr,
                          .infinite = true});
    }
    // dz_ is free until its gradient is computed.
    layer_norm(projection, l, 1, rows, s_.latent, prepared_.mid_norm,
               keeps() ? mid_normal_ : nullptr, mid_inverse_, dz_);
    multiply(rows, l, l, as_is(dz_, l), transposed(prepared_.mid, l), mid_before_, {},
             prepared_.mid_bias);
    if constexpr (kTwice) {
      gelu(mid_before_, dz_, rows, l);
      convert(dz_, z, rows * l);
    } else {
      gelu(mid_before_, z, rows, l);
    }
  }

  void decode(const T* z, T* y, std::int64_t rows) {
    multiply(rows, width_, s_.latent, as_is(z, s_.latent), as_is(prepared_.decode_of_rows, width_),
             y, {}, prepared_.decode_bias_of_rows);
  }
  /// Decodes the latent just computed, for the score, without rounding to half precision.
  const A* decode_exactly(const T* z, std::int64_t rows) {
    if constexpr (kTwice) {
      multiply(rows, width_, s_.latent, as_is(dz_, s_.latent), as_is(prepared_.decode, width_),
               exact_y_, {}, prepared_.decode_bias);
    } else {
      decode(z, y_, rows);
    }
    return exact_y_;
  }

  /// From sums_.decode to the gradients of the normalised basis and of the decoder's weights.
  void differentiate_decoder(bool unit, bool decoder) {
    if constexpr (std::is_same_v<A, float>) {
      if (fused_ && vectors() <= kMostVectors) {
        return decoder_gradients(context_, s_, prepared_.unit, prepared_.decoder, sums_, unit,
                                 decoder);
      }
    }
    const std::int64_t m = s_.n_mels, h = s_.slice_latent;
    if (unit) {
      multiply(vectors(), h, m, as_is(sums_.decode, m), as_is(prepared_.decoder, h), sums_.unit,
               {.add = true, .exact = true});
    }
    if (decoder) {
      multiply(m, h, vectors(), transposed(sums_.decode, m), as_is(prepared_.unit, h),
               sums_.decoder, kExact);
    }
  }

  /// Returns the output's gradient: the incoming one, or y_.
  const T* output_gradient(const AutoencoderBackwardArguments& call, const T* x, std::int64_t row,
                           std::int64_t rows, T* dx) {
    const T* d_out =
        call.d_out == nullptr ? nullptr : static_cast<const T*>(call.d_out) + row * width_;
    if (call.d_score == nullptr) return d_out;
    const A* y = decode_exactly(z_of_rows_, rows);
    const A* d_score = static_cast<const A*>(call.d_score) + row;
    each(context_, "the output's gradient", rows * width_,
         OutputGradient<T, A>{y, y_, d_out, d_score, x, call.x_stride, width_, dx});
    return y_;
  }

  template <typename From, typename To>
  void convert(const From* from, To* to, std::int64_t count) {
    if constexpr (!std::is_same_v<From, To>) {
      each(context_, "rounding", count, Convert<From, To>{from, to});
    }
  }

  template <typename Element>
  TensorView view(const Element* data, std::int64_t rows, std::int64_t columns) const {
    return {data, kDType<Element>, context_.device, {rows, columns}};
  }
  template <typename Element>
  TensorView view(const Element* data, std::int64_t count) const {
    return {data, kDType<Element>, context_.device, {count}};
  }

  /// d = a b + bias, or d += a b. Rows of d are contiguous.
  template <typename In, typename Out>
  void multiply(std::int64_t rows, std::int64_t columns, std::int64_t inner, Operand<In> a,
                Operand<In> b, Out* d, Options options = {}, const Out* bias = nullptr) {
    cuda::multiply(context_, {.rows = rows,
                              .columns = columns,
                              .inner = inner,
                              .a = a.matrix(),
                              .b = b.matrix(),
                              .d = as_is(d, columns).matrix(),
                              .dtype = kDType<In>,
                              .bias = bias,
                              .math = {.tf32 = tf32_ && !options.exact, .tune = false},
                              .add = options.add,
                              .wide_result = !std::is_same_v<In, Out>});
  }

  template <typename Element>
  void gelu(const Element* z, Element* y, std::int64_t rows, std::int64_t columns) {
    activate(
        context_,
        {.z = view(z, rows, columns), .y = view(y, rows, columns), .activation = Activation::gelu});
  }
  /// In place. `sums` receives the column sums and may be null.
  template <typename Element>
  void gelu_backward(Element* d, const Element* z, std::int64_t rows, std::int64_t columns,
                     A* sums) {
    differentiate(context_, {.dy = view(d, rows, columns),
                             .kept = view(z, rows, columns),
                             .dz = view(d, rows, columns),
                             .db = sums == nullptr ? TensorView{} : view(sums, columns),
                             .activation = Activation::gelu});
  }
  template <typename Element>
  void layer_norm(const Element* in, std::int64_t stride, int frames, std::int64_t segments,
                  int columns, Affine<A> affine, Element* normal, A* inverse, Element* out) {
    launch_kernel({context_, divide_up(32 * segments, kThreads), kThreads}, "LayerNorm",
                  layer_norm_kernel<Element, A>, in, stride, frames, segments, columns, affine,
                  normal, inverse, out);
  }
  template <typename Element>
  void layer_norm_backward(const Element* d, const Element* normal, const A* inverse,
                           std::int64_t segments, int columns, const A* weight, T* out, bool add) {
    launch_kernel({context_, divide_up(32 * segments, kThreads), kThreads}, "LayerNorm backward",
                  layer_norm_backward_kernel<Element, A, T>, d, normal, inverse, segments, columns,
                  weight, out, add);
  }

  const Context& context_;
  AutoencoderSizes s_;
  std::int64_t width_, hidden_;
  bool tf32_;
  bool fused_;  ///< LayerNorm and the following Linear in one kernel
  bool scores_;
  std::int64_t chunks_, chunk_;
  Prepared<T, A> prepared_{};
  Sums<A> sums_{};
  T *normal_, *before_, *slices_, *z_of_rows_, *y_;
  A *projection_, *mid_normal_, *mid_before_, *dz_, *inverse_, *mid_inverse_, *exact_y_;
  Scratch<char> memory_;
};

}  // namespace

void run_general(const Context& context, const AutoencoderForwardArguments& call) {
  dispatch_dtype(call.dtype, [&]<typename T>(T) {
    GeneralPath<T> path(context, call);
    for (std::int64_t row = 0; row < call.sizes.rows; row += path.chunk()) {
      path.forward(call, row, std::min(path.chunk(), call.sizes.rows - row));
    }
  });
}

void run_general(const Context& context, const AutoencoderBackwardArguments& call) {
  dispatch_dtype(call.dtype, [&]<typename T>(T) {
    GeneralPath<T> path(context, call);
    for (std::int64_t row = 0; row < call.sizes.rows; row += path.chunk()) {
      path.backward(call, row, std::min(path.chunk(), call.sizes.rows - row));
    }
    if (finishes(call)) path.finish(call);
  });
}

}  // namespace fusewise::cuda::autoencoder
