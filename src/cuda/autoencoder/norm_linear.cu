// LayerNorm, Linear and GELU, and the backward pass of Linear and LayerNorm. A warp holds 16 rows
// of one frame in registers. Each value crosses memory once, except that backward reads the
// normalised values twice, the second time from L2. The weights, some 10 to 100 KB, are read
// through L1 by every warp. Bound by memory bandwidth, in float32 by the tensor cores.

#include "common/divide.h"
#include "cuda/autoencoder/norm_linear.cuh"
#include "cuda/autoencoder/warp_tile.cuh"
#include "cuda/launch.cuh"

namespace fusewise::cuda::autoencoder {
namespace {

constexpr int kWarps = 4;
constexpr int kBlocks = kMostNormColumns / 16;
constexpr int kTogether = 2;  // blocks of results computed at a time

/// The two rows of a tensor that a lane works on, with any number of columns. `vectors`: every
/// group of four columns is aligned and none crosses the edge.
template <typename T>
struct EdgedRows {
  T* at[2];
  bool real[2];
  int columns;
  bool vectors;

  using Value = std::remove_const_t<T>;

  __device__ __forceinline__ EdgedRows(T* base, long long first_row, long long rows,
                                       long long stride, int frame, int columns, bool vectors)
      : columns(columns), vectors(vectors) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const long long row = first_row + threadIdx.x % 32 / 4 + 8 * r;
      real[r] = row < rows;
      // A row past the end is replaced by the last row.
      at[r] = base + (real[r] ? row : rows - 1) * stride + static_cast<long long>(frame) * columns;
    }
  }

  __device__ __forceinline__ Block load(int block) const {
    const int column = 16 * block + 4 * (threadIdx.x % 4);
    Block b;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      Four<Value> four{};
      if (!vectors) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (column + i < columns) four.set(i, at[r][column + i]);
        }
      } else if (column < columns) {
        four = load_four(at[r] + column);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) b.v[r][i] = four[i];
    }
    return b;
  }
  __device__ __forceinline__ void store(const Block& b, int block) const {
    const int column = 16 * block + 4 * (threadIdx.x % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!real[r]) continue;
      if (!vectors) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (column + i < columns) at[r][column + i] = from_accumulator<Value>(b.v[r][i]);
        }
      } else if (column < columns) {
        store_four(at[r] + column, b.v[r]);
      }
    }
  }
};

/// Whether a tensor's rows can be read and written four elements at a time.
template <typename T>
bool has_vectors(const T* data, std::int64_t stride, int columns) {
  return reinterpret_cast<std::uintptr_t>(data) % (4 * sizeof(T)) == 0 && stride % 4 == 0 &&
         columns % 4 == 0;
}

/// A warp's 16 rows and frame.
struct Unit {
  long long first_row;
  int frame;

  __device__ __forceinline__ Unit(int frames) {
    const long long unit = static_cast<long long>(blockIdx.x) * kWarps + warp_index();
    first_row = 16 * (unit / frames);
    frame = static_cast<int>(unit % frames);
  }
};
std::int64_t blocks_of(std::int64_t rows, int frames) {
  return divide_up(divide_up(rows, 16) * frames, kWarps);
}

struct ForwardArguments {
  NormLinear call;
  bool in_vectors, normal_vectors, before_vectors, after_vectors, exact_vectors;
};

template <typename In, typename P, typename Out>
__global__ void __launch_bounds__(32 * kWarps)
    norm_linear_kernel(const __grid_constant__ ForwardArguments a) {
  const NormLinear& c = a.call;
  wait_for_previous_kernel();
  allow_next_kernel();
  const Unit unit(c.frames);
  if (unit.first_row >= c.rows) return;
  const int input_blocks = (c.inputs + 15) / 16, output_blocks = (c.outputs + 15) / 16;
  const int lane = threadIdx.x % 32;

  const EdgedRows<const In> in(static_cast<const In*>(c.in), unit.first_row, c.rows, c.in_stride,
                               unit.frame, c.inputs, a.in_vectors);
  Block values[kBlocks];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    if (b < input_blocks) values[b] = in.load(b);
  }
  float inverse[2];
  normalise(
      values, input_blocks, c.inputs,
      [&](int b, int i) { return 16 * b + 4 * (lane % 4) + i < c.inputs; }, inverse);
  const auto rows_of = [&]<typename T>(T* data, int columns, bool vectors) {
    return EdgedRows<T>(data, unit.first_row, c.rows, static_cast<long long>(c.frames) * columns,
                        unit.frame, columns, vectors);
  };
  if (c.inverse != nullptr && lane % 4 == 0) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const long long row = unit.first_row + lane / 4 + 8 * r;
      if (row < c.rows) c.inverse[row * c.frames + unit.frame] = inverse[r];
    }
  }
  if (c.normal != nullptr) {
    const auto normal = rows_of(static_cast<In*>(c.normal), c.inputs, a.normal_vectors);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      if (b < input_blocks) normal.store(values[b], b);
    }
  }

#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    if (b >= input_blocks) break;
    const int column = 16 * b + 4 * (lane % 4);
    const Four<float> weight = load_four(c.norm_weight + column);
    const Four<float> bias = load_four(c.norm_bias + column);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) values[b].v[r][i] = fmaf(values[b].v[r][i], weight[i], bias[i]);
    }
  }

  const auto before = rows_of(static_cast<In*>(c.before), c.outputs, a.before_vectors);
  const auto after = rows_of(static_cast<Out*>(c.after), c.outputs, a.after_vectors);
  const auto exact_after = rows_of(c.exact_after, c.outputs, a.exact_vectors);
  using Source = Weights<P, false>;
  const Source weights{static_cast<const typename Source::Group*>(c.weights), nullptr};
  const In* bias = static_cast<const In*>(c.bias);
#pragma unroll 1
  for (int o = 0; o < output_blocks; o += kTogether) {
    const int count = min(kTogether, output_blocks - o);
    Block results[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int column = 16 * (o + j) + 4 * (lane % 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float value = column + i < c.outputs ? to_accumulator<float>(bias[column + i]) : 0.f;
        results[j].v[0][i] = results[j].v[1][i] = value;
      }
    }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      if (b >= input_blocks) break;
      multiply_block<P, kTogether>(results, count, P::left(values[b]), weights, 0, o, b,
                                   input_blocks);
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      if (j >= count) break;
      if (c.before != nullptr) before.store(results[j], o + j);
      if (c.infinite) {
        gelu_of_any<P::kGeluDegree>(results[j]);
      } else {
        gelu<P::kGeluDegree>(results[j]);
      }
      if (c.after != nullptr) after.store(results[j], o + j);
      if (c.exact_after != nullptr) exact_after.store(results[j], o + j);
    }
  }
}

struct BackwardArguments {
  NormLinearBackward call;
  bool d_vectors, normal_vectors, d_in_vectors;
};

template <typename In, typename P, typename Out>
__global__ void __launch_bounds__(32 * kWarps)
    norm_linear_backward_kernel(const __grid_constant__ BackwardArguments a) {
  const NormLinearBackward& c = a.call;
  wait_for_previous_kernel();
  allow_next_kernel();
  const Unit unit(c.frames);
  if (unit.first_row >= c.rows) return;
  const int input_blocks = (c.inputs + 15) / 16, output_blocks = (c.outputs + 15) / 16;
  const int lane = threadIdx.x % 32;
  const auto rows_of = [&]<typename T>(T* data, int columns, bool vectors) {
    return EdgedRows<T>(data, unit.first_row, c.rows, static_cast<long long>(c.frames) * columns,
                        unit.frame, columns, vectors);
  };
  const auto d = rows_of(static_cast<const In*>(c.d), c.outputs, a.d_vectors);
  const auto normal = rows_of(static_cast<const In*>(c.normal), c.inputs, a.normal_vectors);
  const auto d_in = rows_of(static_cast<Out*>(c.d_in), c.inputs, a.d_in_vectors);

  using Source = Weights<P, false>;
  const Source weights{static_cast<const typename Source::Group*>(c.weights), nullptr};
  Block gradient[kBlocks];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) gradient[b].fill(0.f);
#pragma unroll 1
  for (int o = 0; o < output_blocks; ++o) {
    multiply_block<P, kTogether>(gradient, input_blocks, P::left(d.load(o)), weights, 0, 0, o,
                                 output_blocks);
  }

  float sums[2] = {}, products[2] = {};
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    if (b >= input_blocks) break;
    const Block n = normal.load(b);
    const Four<float> weight = load_four(c.norm_weight + 16 * b + 4 * (lane % 4));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        gradient[b].v[r][i] *= weight[i];
        sums[r] += gradient[b].v[r][i];
        products[r] = fmaf(gradient[b].v[r][i], n.v[r][i], products[r]);
      }
    }
  }
  float inverse[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const long long row = unit.first_row + lane / 4 + 8 * r;
    inverse[r] = row < c.rows ? c.inverse[row * c.frames + unit.frame] : 0.f;
    sums[r] = row_sum(sums[r]) / c.inputs;
    products[r] = row_sum(products[r]) / c.inputs;
  }
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    if (b >= input_blocks) break;
    const Block n = normal.load(b);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float centred = gradient[b].v[r][i] - sums[r];
        gradient[b].v[r][i] = inverse[r] * fmaf(-n.v[r][i], products[r], centred);
      }
    }
    if (c.add) gradient[b].add(d_in.load(b));
    d_in.store(gradient[b], b);
  }
}

/// Calls body(In, P, Out) for every combination that the general path uses.
template <typename Body>
void dispatch(const NormProducts& products, Body&& body) {
  dispatch_products(products.in, products.tf32, [&]<typename P>(P) {
    using In = typename P::Weight;
    if (products.in == products.out) return body(In{}, P{}, In{});
    if constexpr (std::is_same_v<P, Tf32Products>) {
      products.out == DType::f16 ? body(In{}, P{}, __half{}) : body(In{}, P{}, __nv_bfloat16{});
    }
  });
}

}  // namespace

void norm_linear(const Context& context, const NormProducts& products, const NormLinear& call) {
  dispatch(products, [&]<typename In, typename P, typename Out>(In, P, Out) {
    const ForwardArguments a{
        call,
        has_vectors(static_cast<const In*>(call.in), call.in_stride, call.inputs),
        has_vectors(static_cast<const In*>(call.normal), 0, call.inputs),
        has_vectors(static_cast<const In*>(call.before), 0, call.outputs),
        has_vectors(static_cast<const Out*>(call.after), 0, call.outputs),
        has_vectors(call.exact_after, 0, call.outputs)};
    launch_kernel({context, blocks_of(call.rows, call.frames), 32 * kWarps, 0, true},
                  "LayerNorm and Linear", norm_linear_kernel<In, P, Out>, a);
  });
}

void norm_linear_backward(const Context& context, const NormProducts& products,
                          const NormLinearBackward& call) {
  dispatch(products, [&]<typename In, typename P, typename Out>(In, P, Out) {
    const BackwardArguments a{call, has_vectors(static_cast<const In*>(call.d), 0, call.outputs),
                              has_vectors(static_cast<const In*>(call.normal), 0, call.inputs),
                              has_vectors(static_cast<const Out*>(call.d_in), 0, call.inputs)};
    launch_kernel({context, blocks_of(call.rows, call.frames), 32 * kWarps, 0, true},
                  "LayerNorm and Linear backward", norm_linear_backward_kernel<In, P, Out>, a);
  });
}

}  // namespace fusewise::cuda::autoencoder
