// The autoencoder and its gradients step by step as the formula says, for any sizes and types: some
// rows at a time, every intermediate result in scratch memory, in float32 (float64 for float64).
// Each step reads and writes its operands once; bound by L2 and the plain products.

#include "cuda/autoencoder/general.cuh"

#include <algorithm>

#include "common/divide.h"
#include "common/scratch.h"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vector.cuh"

namespace fusewise::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = 16;  // of a product: rows, columns, and summands at a time

// ---- the steps

/// c[i][j] = bias[j] + sum over k of a(i, k) b(j, k), or that added to c. Strides are in elements.
template <typename A>
struct Product {
  long long rows, columns, depth;
  const A* a;
  long long a_row, a_k;
  const A* b;
  long long b_column, b_k;
  A* c;
  const A* bias = nullptr;
  bool add = false;
};

template <typename A>
__global__ void __launch_bounds__(kTile* kTile) product_kernel(Product<A> p) {
  __shared__ A a[kTile][kTile + 1], b[kTile][kTile + 1];
  const long long across = (p.columns + kTile - 1) / kTile;
  const long long i0 = blockIdx.x / across * kTile, j0 = blockIdx.x % across * kTile;
  const int ty = threadIdx.x / kTile, tx = threadIdx.x % kTile;
  A total = 0;
  for (long long k0 = 0; k0 < p.depth; k0 += kTile) {
    const long long k = k0 + tx;
    a[ty][tx] = i0 + ty < p.rows && k < p.depth ? p.a[(i0 + ty) * p.a_row + k * p.a_k] : A(0);
    b[ty][tx] = j0 + ty < p.columns && k < p.depth ? p.b[(j0 + ty) * p.b_column + k * p.b_k] : A(0);
    __syncthreads();
    // A sum of its own for every tile keeps rounding errors small in long sums.
    A sum = 0;
#pragma unroll
    for (int s = 0; s < kTile; ++s) sum += a[ty][s] * b[tx][s];
    total += sum;
    __syncthreads();
  }
  if (i0 + ty >= p.rows || j0 + tx >= p.columns) return;
  A* c = p.c + (i0 + ty) * p.columns + j0 + tx;
  if (p.bias != nullptr) total += p.bias[j0 + tx];
  *c = p.add ? *c + total : total;
}

template <typename A>
void multiply(const Context& context, const Product<A>& p) {
  launch_kernel({context, divide_up(p.rows, kTile) * divide_up(p.columns, kTile), kTile * kTile},
                "a product of the autoencoder", product_kernel<A>, p);
}

/// out[column] += sum over rows of a * b; b may be null, for ones.
template <typename A>
__global__ void __launch_bounds__(kThreads)
    column_sums_kernel(const A* a, const A* b, long long rows, int columns, A* out) {
  __shared__ A parts[kThreads / 32][32];
  const int lane = threadIdx.x % 32, strand = threadIdx.x / 32;
  const long long column = blockIdx.x * 32ll + lane;
  A total = 0;
  for (long long begin = strand; begin < rows; begin += 16 * (kThreads / 32)) {
    A sum = 0;
    for (int j = 0; j < 16; ++j) {
      const long long row = begin + j * (kThreads / 32);
      if (row >= rows || column >= columns) break;
      const A value = a[row * columns + column];
      sum += b != nullptr ? value * b[row * columns + column] : value;
    }
    total += sum;
  }
  parts[strand][lane] = total;
  __syncthreads();
  if (strand != 0 || column >= columns) return;
  for (int s = 1; s < kThreads / 32; ++s) total += parts[s][lane];
  out[column] += total;
}

template <typename A>
void sum_columns(const Context& context, const A* a, const A* b, std::int64_t rows, int columns,
                 A* out) {
  launch_kernel({context, divide_up(columns, 32), kThreads}, "summing the autoencoder's gradients",
                column_sums_kernel<A>, a, b, rows, columns, out);
}

/// LayerNorm of `groups` stretches of `columns` values each, `frames` of them in a row of `in`: a
/// warp for each.
template <typename T, typename A>
__global__ void __launch_bounds__(kThreads)
    normalise_kernel(const T* in, long long row_stride, int frames, long long groups, int columns,
                     const A* weight, const A* bias, A* normal, A* out, A* inverse_deviation) {
  const int lane = threadIdx.x % 32;
  const long long group = (blockIdx.x * static_cast<long long>(kThreads) + threadIdx.x) / 32;
  if (group >= groups) return;
  const T* row = in + group / frames * row_stride + group % frames * columns;
  A sum = 0;
  for (int i = lane; i < columns; i += 32) sum += to_accumulator<A>(row[i]);
  const A mean = warp_sum(sum) / A(columns);
  A squares = 0;
  for (int i = lane; i < columns; i += 32) {
    const A d = to_accumulator<A>(row[i]) - mean;
    squares += d * d;
  }
  const A inverse = A(1) / sqrt(warp_sum(squares) / A(columns) + A(1e-5));
  if (lane == 0) inverse_deviation[group] = inverse;
  for (int i = lane; i < columns; i += 32) {
    const A value = (to_accumulator<A>(row[i]) - mean) * inverse;
    normal[group * columns + i] = value;
    out[group * columns + i] = value * weight[i] + bias[i];
  }
}

/// d (of LayerNorm's result) becomes the gradient of its input.
template <typename A>
__global__ void __launch_bounds__(kThreads)
    normalise_backward_kernel(A* d, const A* normal, const A* weight, const A* inverse_deviation,
                              long long groups, int columns) {
  const int lane = threadIdx.x % 32;
  const long long group = (blockIdx.x * static_cast<long long>(kThreads) + threadIdx.x) / 32;
  if (group >= groups) return;
  A* row = d + group * columns;
  const A* n = normal + group * columns;
  A sum = 0, product = 0;
  for (int i = lane; i < columns; i += 32) {
    const A value = row[i] * weight[i];
    sum += value;
    product += value * n[i];
  }
  sum = warp_sum(sum) / A(columns);
  product = warp_sum(product) / A(columns);
  for (int i = lane; i < columns; i += 32) {
    row[i] = inverse_deviation[group] * (row[i] * weight[i] - sum - n[i] * product);
  }
}

template <typename A>
__device__ A normal_integral(A z) {
  return A(0.5) * (A(1) + erf(z * A(0.70710678118654752440)));
}

template <typename A>
struct Gelu {
  const A* z;
  A* out;
  __device__ void operator()(long long i) const { out[i] = z[i] * normal_integral(z[i]); }
};

template <typename A>
struct GeluBackward {
  const A* z;
  A* d;
  __device__ void operator()(long long i) const {
    const A v = z[i];
    d[i] *= normal_integral(v) + v * A(0.39894228040143267794) * exp(A(-0.5) * v * v);
  }
};

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

/// dy = d_out + 2 / width * d_score * (y - x), in place of y; the second part with the other sign
/// is x's own share of the gradient.
template <typename T, typename A>
struct OutputGradient {
  A* y;
  const T* d_out;
  const A* d_score;
  const T* x;
  long long x_stride, width;
  T* dx;
  __device__ void operator()(long long i) const {
    const long long row = i / width;
    A d = 0;
    if (d_score != nullptr) {
      d = A(2) / A(width) * d_score[row] *
          (y[i] - to_accumulator<A>(x[row * x_stride + i - row * width]));
    }
    y[i] = d + (d_out != nullptr ? to_accumulator<A>(d_out[i]) : A(0));
    if (dx != nullptr) dx[i] = from_accumulator<T>(-d);
  }
};

template <typename T, typename A>
struct AddGradient {
  const A* d;
  T* dx;
  __device__ void operator()(long long i) const {
    dx[i] = from_accumulator<T>(to_accumulator<A>(dx[i]) + d[i]);
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

/// A block for each basis vector: u = vector / max(norm, 1e-12).
template <typename A>
__global__ void __launch_bounds__(kThreads)
    normalise_basis_kernel(const A* basis, long long width, A* unit, A* norms) {
  __shared__ A scratch[kThreads];
  const A* row = basis + blockIdx.x * width;
  block_sum(
      kThreads, 1, scratch,
      [&](int i, int parts, int) {
        A sum = 0;
        for (long long k = i; k < width; k += parts) sum += row[k] * row[k];
        return sum;
      },
      [&](int, A sum) {
        const A norm = sqrt(sum);
        // Not max, which would swallow NaN.
        norms[blockIdx.x] = norm < A(1e-12) ? A(1e-12) : norm;
      });
  const A norm = norms[blockIdx.x];
  for (long long k = threadIdx.x; k < width; k += kThreads) {
    unit[blockIdx.x * width + k] = row[k] / norm;
  }
}

/// d of the unit vector becomes that of the vector itself.
template <typename A>
__global__ void __launch_bounds__(kThreads)
    normalise_basis_backward_kernel(A* d, const A* unit, const A* norms, long long width) {
  __shared__ A scratch[kThreads], along;
  A* row = d + blockIdx.x * width;
  const A* u = unit + blockIdx.x * width;
  const A norm = norms[blockIdx.x];
  block_sum(
      kThreads, 1, scratch,
      [&](int i, int parts, int) {
        A sum = 0;
        for (long long k = i; k < width; k += parts) sum += row[k] * u[k];
        return sum;
      },
      // At the smallest norm the divisor is a constant.
      [&](int, A sum) { along = norm > A(1e-12) ? sum : A(0); });
  for (long long k = threadIdx.x; k < width; k += kThreads) row[k] = (row[k] - u[k] * along) / norm;
}

/// A warp for each row.
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

// ---- the walk

constexpr int kTensors = 11;

/// How many elements each parameter has, in the order of AutoencoderTensors.
void tensor_counts(const AutoencoderSizes& s, std::int64_t (&counts)[kTensors]) {
  const std::int64_t m = s.n_mels, l = s.latent, h = s.slice_latent;
  const std::int64_t all[kTensors] = {m, m, h * m, h, l * s.frames * h, l, l, l * l, l, m * h, m};
  std::copy(all, all + kTensors, counts);
}

/// Eleven arrays of A, one behind the other.
template <typename A>
struct Arrays {
  A* at[kTensors];
  Arrays(A* memory, const std::int64_t (&counts)[kTensors]) {
    for (int i = 0; i < kTensors; ++i) {
      at[i] = memory;
      memory += counts[i];
    }
  }
};

template <typename Pointer>
Pointer tensor(const AutoencoderTensors<Pointer>& t, int i) {
  const Pointer all[kTensors] = {t.norm_weight, t.norm_bias,       t.encoder_weight, t.encoder_bias,
                                 t.basis,       t.mid_norm_weight, t.mid_norm_bias,  t.mid_weight,
                                 t.mid_bias,    t.decoder_weight,  t.decoder_bias};
  return all[i];
}

/// In the order of AutoencoderTensors.
enum {
  kNormW,
  kNormB,
  kEncoderW,
  kEncoderB,
  kBasis,
  kMidNormW,
  kMidNormB,
  kMidW,
  kMidB,
  kDecoderW,
  kDecoderB
};

/// Everything but the parameters' type.
template <typename T>
class Walk {
 public:
  using A = Accumulator<T>;

  Walk(const Context& context, const AutoencoderSizes& sizes,
       const AutoencoderTensors<const void*>& parameters, DType parameter_dtype, bool backward)
      : context_(context),
        s_(sizes),
        width_(std::int64_t{sizes.frames} * sizes.n_mels),
        hidden_(std::int64_t{sizes.frames} * sizes.slice_latent),
        rows_at_once_(std::clamp<std::int64_t>(
            (std::int64_t{64} << 20) / (row_values() * sizeof(A)), 1,
            std::min<std::int64_t>(2048, std::max<std::int64_t>(sizes.rows, 1)))),
        parameter_count_(count_parameters()),
        memory_(context, (backward ? 2 : 1) * parameter_count_ + hidden_ * sizes.latent +
                             sizes.latent + rows_at_once_ * row_values()),
        parameters_(memory_.data(), counts_),
        gradients_(memory_.data() + parameter_count_, counts_) {
    A* at = memory_.data() + (backward ? 2 : 1) * parameter_count_;
    const auto take = [&](std::int64_t count) {
      A* begin = at;
      at += count;
      return begin;
    };
    unit_ = take(hidden_ * s_.latent);
    norms_ = take(s_.latent);
    const std::int64_t r = rows_at_once_;
    normal_ = take(r * width_);
    affine_ = take(r * width_);
    inverse_ = take(r * s_.frames);
    before_ = take(r * hidden_);
    slices_ = take(r * hidden_);
    projection_ = take(r * s_.latent);
    mid_normal_ = take(r * s_.latent);
    mid_affine_ = take(r * s_.latent);
    mid_inverse_ = take(r);
    mid_before_ = take(r * s_.latent);
    z_ = take(r * s_.latent);
    expanded_ = take(r * hidden_);
    y_ = take(r * width_);
    d_hidden_ = take(r * hidden_);
    dz_ = take(r * s_.latent);
    for (int i = 0; i < kTensors; ++i) {
      dispatch_dtype(parameter_dtype, [&]<typename W>(W) {
        each(context_, "reading a parameter", counts_[i],
             Convert<W, A>{static_cast<const W*>(tensor(parameters, i)), parameters_.at[i]});
      });
    }
    launch_kernel({context_, s_.latent, kThreads}, "normalising the basis",
                  normalise_basis_kernel<A>, parameters_.at[kBasis], hidden_, unit_, norms_);
  }

  std::int64_t rows_at_once() const { return rows_at_once_; }

  /// As far as z.
  void encode(const T* x, std::int64_t x_stride, std::int64_t rows) {
    const auto& p = parameters_.at;
    const std::int64_t m = s_.n_mels, l = s_.latent, h = s_.slice_latent, f = s_.frames;
    normalise(x, x_stride, s_.frames, rows * f, s_.n_mels, p[kNormW], p[kNormB], normal_, affine_,
              inverse_);
    multiply<A>(context_,
                {rows * f, h, m, affine_, m, 1, p[kEncoderW], m, 1, before_, p[kEncoderB]});
    each(context_, "GELU", rows * hidden_, Gelu<A>{before_, slices_});
    multiply<A>(context_, {rows, l, hidden_, slices_, hidden_, 1, unit_, hidden_, 1, projection_});
    normalise(projection_, l, 1, rows, s_.latent, p[kMidNormW], p[kMidNormB], mid_normal_,
              mid_affine_, mid_inverse_);
    multiply<A>(context_, {rows, l, l, mid_affine_, l, 1, p[kMidW], l, 1, mid_before_, p[kMidB]});
    each(context_, "GELU", rows * l, Gelu<A>{mid_before_, z_});
  }

  void decode(std::int64_t rows) {
    const auto& p = parameters_.at;
    const std::int64_t m = s_.n_mels, l = s_.latent, h = s_.slice_latent, f = s_.frames;
    multiply<A>(context_, {rows, hidden_, l, z_, l, 1, unit_, 1, hidden_, expanded_});
    multiply<A>(context_, {rows * f, m, h, expanded_, h, 1, p[kDecoderW], h, 1, y_, p[kDecoderB]});
  }

  void write_out(T* out, std::int64_t rows) {
    each(context_, "writing the reconstruction", rows * width_, Convert<A, T>{y_, out});
  }
  void write_z(T* z, std::int64_t rows) {
    each(context_, "writing z", rows * s_.latent, Convert<A, T>{z_, z});
  }
  void write_projection(A* projection, std::int64_t rows) {
    each(context_, "writing the projection", rows * s_.latent,
         Convert<A, A>{projection_, projection});
  }
  void write_score(const T* x, std::int64_t x_stride, A* score, std::int64_t rows) {
    launch_kernel({context_, divide_up(32 * rows, kThreads), kThreads}, "scoring",
                  score_kernel<T, A>, y_, x, x_stride, rows, width_, score);
  }

  /// Behind encode and, where the output has a gradient, decode. Null: zero, or not wanted.
  void backward(const T* x, std::int64_t x_stride, const T* d_out, const A* d_score, const T* d_z,
                T* dx, std::int64_t rows, bool parameters) {
    const auto& p = parameters_.at;
    const auto& g = gradients_.at;
    const std::int64_t m = s_.n_mels, l = s_.latent, h = s_.slice_latent, f = s_.frames;
    const bool reconstructs = d_out != nullptr || d_score != nullptr;
    if (d_z != nullptr) {
      each(context_, "reading the gradient of z", rows * l, Convert<T, A>{d_z, dz_});
    }
    if (reconstructs) {
      each(context_, "the output's gradient", rows * width_,
           OutputGradient<T, A>{y_, d_out, d_score, x, x_stride, width_, dx});
      multiply<A>(context_, {rows * f, h, m, y_, m, 1, p[kDecoderW], 1, h, d_hidden_});
      multiply<A>(context_, {rows, l, hidden_, d_hidden_, hidden_, 1, unit_, hidden_, 1, dz_,
                             nullptr, d_z != nullptr});
      if (parameters) {
        multiply<A>(context_,
                    {m, h, rows * f, y_, 1, m, expanded_, 1, h, g[kDecoderW], nullptr, true});
        sum_columns<A>(context_, y_, nullptr, rows * f, s_.n_mels, g[kDecoderB]);
        multiply<A>(context_,
                    {l, hidden_, rows, z_, 1, l, d_hidden_, 1, hidden_, g[kBasis], nullptr, true});
      }
    } else if (d_z == nullptr) {
      clear(dz_, rows * l);
    }
    each(context_, "GELU backward", rows * l, GeluBackward<A>{mid_before_, dz_});
    if (parameters) {
      multiply<A>(context_, {l, l, rows, dz_, 1, l, mid_affine_, 1, l, g[kMidW], nullptr, true});
      sum_columns<A>(context_, dz_, nullptr, rows, s_.latent, g[kMidB]);
    }
    // From here on the memory of `projection_` has its gradient.
    multiply<A>(context_, {rows, l, l, dz_, l, 1, p[kMidW], 1, l, projection_});
    if (parameters) {
      sum_columns<A>(context_, projection_, mid_normal_, rows, s_.latent, g[kMidNormW]);
      sum_columns<A>(context_, projection_, nullptr, rows, s_.latent, g[kMidNormB]);
    }
    normalise_backward(projection_, mid_normal_, p[kMidNormW], mid_inverse_, rows, s_.latent);
    if (parameters) {
      multiply<A>(context_, {l, hidden_, rows, projection_, 1, l, slices_, 1, hidden_, g[kBasis],
                             nullptr, true});
    }
    multiply<A>(context_, {rows, hidden_, l, projection_, l, 1, unit_, 1, hidden_, d_hidden_});
    each(context_, "GELU backward", rows * hidden_, GeluBackward<A>{before_, d_hidden_});
    if (parameters) {
      multiply<A>(context_,
                  {h, m, rows * f, d_hidden_, 1, h, affine_, 1, m, g[kEncoderW], nullptr, true});
      sum_columns<A>(context_, d_hidden_, nullptr, rows * f, s_.slice_latent, g[kEncoderB]);
    }
    // And that of `affine_` the gradient of x.
    multiply<A>(context_, {rows * f, m, h, d_hidden_, h, 1, p[kEncoderW], 1, m, affine_});
    if (parameters) {
      sum_columns<A>(context_, affine_, normal_, rows * f, s_.n_mels, g[kNormW]);
      sum_columns<A>(context_, affine_, nullptr, rows * f, s_.n_mels, g[kNormB]);
    }
    if (dx == nullptr) return;
    normalise_backward(affine_, normal_, p[kNormW], inverse_, rows * f, s_.n_mels);
    if (reconstructs) {
      each(context_, "the gradient of x", rows * width_, AddGradient<T, A>{affine_, dx});
    } else {
      each(context_, "the gradient of x", rows * width_, Convert<A, T>{affine_, dx});
    }
  }

  void clear_gradients() { clear(gradients_.at[0], parameter_count_); }

  void write_gradients(const AutoencoderTensors<void*>& gradients, DType dtype) {
    launch_kernel({context_, s_.latent, kThreads}, "normalising the basis backward",
                  normalise_basis_backward_kernel<A>, gradients_.at[kBasis], unit_, norms_,
                  hidden_);
    for (int i = 0; i < kTensors; ++i) {
      void* out = tensor(gradients, i);
      if (out == nullptr) continue;
      dispatch_dtype(dtype, [&]<typename W>(W) {
        each(context_, "writing a gradient", counts_[i],
             Convert<A, W>{gradients_.at[i], static_cast<W*>(out)});
      });
    }
  }

 private:
  std::int64_t row_values() const {
    return 3 * width_ + 4 * hidden_ + s_.frames + 6 * std::int64_t{s_.latent} + 1;
  }
  std::int64_t count_parameters() {
    tensor_counts(s_, counts_);
    std::int64_t sum = 0;
    for (std::int64_t count : counts_) sum += count;
    return sum;
  }
  void clear(A* memory, std::int64_t count) {
    check_cuda(
        cudaMemsetAsync(memory, 0, count * sizeof(A), static_cast<cudaStream_t>(context_.stream)),
        "clearing scratch memory");
  }
  template <typename In>
  void normalise(const In* in, std::int64_t stride, int frames, std::int64_t groups, int columns,
                 const A* weight, const A* bias, A* normal, A* out, A* inverse) {
    launch_kernel({context_, divide_up(32 * groups, kThreads), kThreads}, "LayerNorm",
                  normalise_kernel<In, A>, in, stride, frames, groups, columns, weight, bias,
                  normal, out, inverse);
  }
  void normalise_backward(A* d, const A* normal, const A* weight, const A* inverse,
                          std::int64_t groups, int columns) {
    launch_kernel({context_, divide_up(32 * groups, kThreads), kThreads}, "LayerNorm backward",
                  normalise_backward_kernel<A>, d, normal, weight, inverse, groups, columns);
  }

  const Context& context_;
  AutoencoderSizes s_;
  std::int64_t width_, hidden_, rows_at_once_;
  std::int64_t counts_[kTensors];
  std::int64_t parameter_count_;
  Scratch<A> memory_;
  Arrays<A> parameters_, gradients_;
  A *unit_, *norms_, *normal_, *affine_, *inverse_, *before_, *slices_, *projection_, *mid_normal_,
      *mid_affine_, *mid_inverse_, *mid_before_, *z_, *expanded_, *y_, *d_hidden_, *dz_;
};

template <typename P>
P* advance(P* pointer, std::int64_t elements) {
  return pointer == nullptr ? nullptr : pointer + elements;
}

template <typename T>
void run(const Context& context, const AutoencoderForwardArguments& call) {
  using A = Accumulator<T>;
  Walk<T> walk(context, call.sizes, call.parameters, call.parameter_dtype, false);
  const std::int64_t width = std::int64_t{call.sizes.frames} * call.sizes.n_mels;
  for (std::int64_t row = 0; row < call.sizes.rows; row += walk.rows_at_once()) {
    const std::int64_t rows = std::min(walk.rows_at_once(), call.sizes.rows - row);
    const T* x = static_cast<const T*>(call.x) + row * call.x_stride;
    walk.encode(x, call.x_stride, rows);
    if (call.projection != nullptr) {
      walk.write_projection(static_cast<A*>(call.projection) + row * call.sizes.latent, rows);
    }
    if (call.z != nullptr) walk.write_z(static_cast<T*>(call.z) + row * call.sizes.latent, rows);
    if (call.out == nullptr && call.score == nullptr) continue;
    walk.decode(rows);
    if (call.out != nullptr) walk.write_out(static_cast<T*>(call.out) + row * width, rows);
    if (call.score != nullptr) {
      walk.write_score(x, call.x_stride, static_cast<A*>(call.score) + row, rows);
    }
  }
}

template <typename T>
void run(const Context& context, const AutoencoderBackwardArguments& call) {
  using A = Accumulator<T>;
  Walk<T> walk(context, call.sizes, call.parameters, call.parameter_dtype, true);
  bool parameters = false;
  for (int i = 0; i < kTensors; ++i) parameters |= tensor(call.gradients, i) != nullptr;
  if (parameters) walk.clear_gradients();
  const std::int64_t width = std::int64_t{call.sizes.frames} * call.sizes.n_mels;
  for (std::int64_t row = 0; row < call.sizes.rows; row += walk.rows_at_once()) {
    const std::int64_t rows = std::min(walk.rows_at_once(), call.sizes.rows - row);
    const T* x = static_cast<const T*>(call.x) + row * call.x_stride;
    walk.encode(x, call.x_stride, rows);
    if (call.d_out != nullptr || call.d_score != nullptr) walk.decode(rows);
    walk.backward(x, call.x_stride, advance(static_cast<const T*>(call.d_out), row * width),
                  advance(static_cast<const A*>(call.d_score), row),
                  advance(static_cast<const T*>(call.d_z), row * call.sizes.latent),
                  advance(static_cast<T*>(call.dx), row * width), rows, parameters);
  }
  if (parameters) walk.write_gradients(call.gradients, call.parameter_dtype);
}

}  // namespace

void autoencoder_general_run(const Context& context, const AutoencoderForwardArguments& call) {
  dispatch_dtype(call.dtype, [&]<typename T>(T) { run<T>(context, call); });
}

void autoencoder_general_run(const Context& context, const AutoencoderBackwardArguments& call) {
  dispatch_dtype(call.dtype, [&]<typename T>(T) { run<T>(context, call); });
}

}  // namespace fusewise::cuda
