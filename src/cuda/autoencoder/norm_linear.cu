// LayerNorm, Linear and GELU, and the backward pass of Linear and LayerNorm. A warp holds 16 rows
// of one frame in registers, and each value crosses memory once. All loads of a tile are issued
// before the first of them is used. The weights, some 10 to 100 KB, are read through L1 by every
// warp. Bound by memory bandwidth, in float32 by the tensor cores.

#include <stdexcept>

#include "common/divide.h"
#include "cuda/autoencoder/norm_linear.cuh"
#include "cuda/autoencoder/warp_tile.cuh"
#include "cuda/launch.cuh"

namespace fusewise::cuda::autoencoder {
namespace {

constexpr int kWarps = 4;
constexpr int kTogether = 2;  // blocks of results computed at a time

/// Four values, or zeros where `inside` is false. No branch, which would wait for earlier loads.
template <typename T>
__device__ __forceinline__ Four<T> load_four_if(bool inside, const T* p) {
  Four<T> four{};
  const int predicate = inside;
  if constexpr (sizeof(T) == 2) {
    asm volatile(
        "{\n\t.reg .pred inside;\n\tsetp.ne.s32 inside, %3, 0;\n\t"
        "@inside ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];\n\t}"
        : "+r"(four.bits.x), "+r"(four.bits.y)
        : "l"(p), "r"(predicate));
  } else {
    asm volatile(
        "{\n\t.reg .pred inside;\n\tsetp.ne.s32 inside, %5, 0;\n\t"
        "@inside ld.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];\n\t}"
        : "+f"(four.values[0]), "+f"(four.values[1]), "+f"(four.values[2]), "+f"(four.values[3])
        : "l"(p), "r"(predicate));
  }
  return four;
}

/// Four parameters, which all warps read: they stay in L1.
template <typename T>
__device__ __forceinline__ Four<T> load_parameters(const T* p) {
  Four<T> four;
  four.load_own(p);
  return four;
}

/// The two rows of a tensor that a lane works on, with any number of columns. `vectors`: every
/// group of four columns is aligned and none crosses the edge.
template <typename T>
struct EdgedRows : private RowPair<T> {
  using RowPair<T>::at, RowPair<T>::real;
  using Value = std::remove_const_t<T>;
  int columns;
  bool vectors;

  __device__ __forceinline__ EdgedRows(const RowPair<T>& rows, int columns, bool vectors)
      : RowPair<T>(rows), columns(columns), vectors(vectors) {}

  /// Loads blocks from `first` on, in memory format. Columns past the edge become 0.
  template <int kCount>
  __device__ __forceinline__ void fetch(Four<Value> (&raw)[kCount][2], int first) const {
    const int lane_column = 16 * first + 4 * (threadIdx.x % 4);
    if (vectors) {
#pragma unroll
      for (int b = 0; b < kCount; ++b) {
        const int column = lane_column + 16 * b;
#pragma unroll
        for (int r = 0; r < 2; ++r) raw[b][r] = load_four_if(column < columns, at[r] + column);
      }
      return;
    }
#pragma unroll
    for (int b = 0; b < kCount; ++b) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int column = lane_column + 16 * b + i;
          const Value value = at[r][min(column, columns - 1)];
          raw[b][r].set(i, column < columns ? value : from_accumulator<Value>(0.f));
        }
      }
    }
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

/// Blocks of backward that an SM holds at least, which limits the registers to 255 or 168.
template <typename P, int kBlocks>
constexpr int kFewestBlocks = P::kExact || kBlocks == 8 ? 2 : 3;

/// A warp's 16 rows and frame.
struct Unit {
  long long rows, first_row;
  int frames, frame;

  __device__ __forceinline__ Unit(long long rows, int frames) : rows(rows), frames(frames) {
    const long long unit = static_cast<long long>(blockIdx.x) * kWarps + warp_index();
    first_row = 16 * (unit / frames);
    frame = static_cast<int>(unit % frames);
  }

  template <typename T>
  __device__ __forceinline__ EdgedRows<T> of(T* data, long long stride, int columns,
                                             bool vectors) const {
    return {RowPair<T>(data + static_cast<long long>(frame) * columns, first_row, rows, stride),
            columns, vectors};
  }
  /// Of a tensor [rows, frames, columns].
  template <typename T>
  __device__ __forceinline__ EdgedRows<T> of(T* data, int columns, bool vectors) const {
    return of(data, static_cast<long long>(frames) * columns, columns, vectors);
  }
};
std::int64_t blocks_of(std::int64_t rows, int frames) {
  return divide_up(divide_up(rows, 16) * frames, kWarps);
}

struct ForwardArguments {
  NormLinear call;
  bool in_vectors, normal_vectors, before_vectors, after_vectors, exact_vectors;
};

template <typename In, typename P, typename Out, int kBlocks>
__global__ void __launch_bounds__(32 * kWarps)
    norm_linear_kernel(const __grid_constant__ ForwardArguments a) {
  const NormLinear& c = a.call;
  wait_for_previous_kernel();
  allow_next_kernel();
  const Unit unit(c.rows, c.frames);
  if (unit.first_row >= c.rows) return;
  const int lane = threadIdx.x % 32;

  const auto in = unit.of(static_cast<const In*>(c.in), c.in_stride, c.inputs, a.in_vectors);
  Four<In> raw[kBlocks][2];
  in.fetch(raw, 0);
  Block values[kBlocks];
  expand(values, raw);
  float inverse[2];
  normalise(
      values, kBlocks, c.inputs,
      [&](int b, int i) { return 16 * b + 4 * (lane % 4) + i < c.inputs; }, inverse);
  if (c.inverse != nullptr && lane % 4 == 0) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const long long row = unit.first_row + lane / 4 + 8 * r;
      if (row < c.rows) c.inverse[row * c.frames + unit.frame] = inverse[r];
    }
  }
  if (c.normal != nullptr) {
    const auto normal = unit.of(static_cast<In*>(c.normal), c.inputs, a.normal_vectors);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) normal.store(values[b], b);
  }
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const int column = 16 * b + 4 * (lane % 4);
    const Four<float> weight = load_parameters(c.norm_weight + column);
    const Four<float> bias = load_parameters(c.norm_bias + column);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) values[b].v[r][i] = fmaf(values[b].v[r][i], weight[i], bias[i]);
    }
  }

  const auto before = unit.of(static_cast<In*>(c.before), c.outputs, a.before_vectors);
  const auto after = unit.of(static_cast<Out*>(c.after), c.outputs, a.after_vectors);
  const auto exact_after = unit.of(c.exact_after, c.outputs, a.exact_vectors);
  using Source = Weights<P, false>;
  const Source weights{static_cast<const typename Source::Group*>(c.weights), nullptr};
  const In* bias = static_cast<const In*>(c.bias);
#pragma unroll 1
  for (int o = 0; o < norm_output_blocks(c.outputs); o += kTogether) {
    Block results[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const Four<In> four = load_parameters(bias + 16 * (o + j) + 4 * (lane % 4));
      results[j].fill(make_float4(four[0], four[1], four[2], four[3]));
    }
    multiply_blocks<P, kTogether>(results, values, weights, 0, o, 0, kBlocks);
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
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

template <typename In, typename P, typename Out, int kBlocks>
__global__ void __launch_bounds__(32 * kWarps, kFewestBlocks<P, kBlocks>)
    norm_linear_backward_kernel(const __grid_constant__ BackwardArguments a) {
  const NormLinearBackward& c = a.call;
  wait_for_previous_kernel();
  allow_next_kernel();
  const Unit unit(c.rows, c.frames);
  if (unit.first_row >= c.rows) return;
  const int lane = threadIdx.x % 32;
  const auto d = unit.of(static_cast<const In*>(c.d), c.outputs, a.d_vectors);
  const auto normal = unit.of(static_cast<const In*>(c.normal), c.inputs, a.normal_vectors);
  const auto d_in = unit.of(static_cast<Out*>(c.d_in), c.inputs, a.d_in_vectors);
  float inverse[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const long long row = min(unit.first_row + lane / 4 + 8 * r, c.rows - 1ll);
    inverse[r] = c.inverse[row * c.frames + unit.frame];
  }
  Four<In> next[1][2], normals[kBlocks][2];
  d.fetch(next, 0);
  normal.fetch(normals, 0);

  using Source = Weights<P, false>;
  const Source weights{static_cast<const typename Source::Group*>(c.weights), nullptr};
  Block gradient[kBlocks];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) gradient[b].fill(0.f);
  const int output_blocks = (c.outputs + 15) / 16;
#pragma unroll 1
  for (int o = 0; o < output_blocks; ++o) {
    Block block[1];
    expand(block, next);
    if (o + 1 < output_blocks) d.fetch(next, o + 1);
    multiply_block<P, kTogether>(gradient, kBlocks, P::left(block[0]), weights, 0, 0, o,
                                 norm_output_blocks(c.outputs));
  }

  Block n[kBlocks];
  expand(n, normals);
  float sums[2] = {}, products[2] = {};
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const Four<float> weight = load_parameters(c.norm_weight + 16 * b + 4 * (lane % 4));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        gradient[b].v[r][i] *= weight[i];
        sums[r] += gradient[b].v[r][i];
        products[r] = fmaf(gradient[b].v[r][i], n[b].v[r][i], products[r]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sums[r] = row_sum(sums[r]) / c.inputs;
    products[r] = row_sum(products[r]) / c.inputs;
  }
  Four<Out> added[kBlocks][2] = {};
  if (c.add) d_in.fetch(added, 0);
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float centred = gradient[b].v[r][i] - sums[r];
        gradient[b].v[r][i] =
            fmaf(inverse[r], fmaf(-n[b].v[r][i], products[r], centred), added[b][r][i]);
      }
    }
    d_in.store(gradient[b], b);
  }
}

/// Calls body(In, P, Out, blocks) for every combination that the general path uses. `blocks`: of 16
/// inputs, a std::integral_constant.
template <typename Body>
void dispatch(const NormProducts& products, int inputs, Body&& body) {
  dispatch_products(products.in, products.tf32, [&]<typename P>(P) {
    using In = typename P::Weight;
    const auto with_blocks = [&]<typename Out>(Out) {
      switch (norm_input_blocks(inputs)) {
        case 4:
          return body(In{}, P{}, Out{}, std::integral_constant<int, 4>{});
        case 5:
          return body(In{}, P{}, Out{}, std::integral_constant<int, 5>{});
        default:
          return body(In{}, P{}, Out{}, std::integral_constant<int, 8>{});
      }
    };
    if (products.in == products.out) return with_blocks(In{});
    if constexpr (std::is_same_v<P, Tf32Products>) {
      products.out == DType::f16 ? with_blocks(__half{}) : with_blocks(__nv_bfloat16{});
    } else {
      throw std::logic_error("norm_linear: only TF32 products have results of another type");
    }
  });
}

}  // namespace

void norm_linear(const Context& context, const NormProducts& products, const NormLinear& call) {
  dispatch(products, call.inputs,
           [&]<typename In, typename P, typename Out>(In, P, Out, auto blocks) {
             const ForwardArguments a{
                 call,
                 has_vectors(static_cast<const In*>(call.in), call.in_stride, call.inputs),
                 has_vectors(static_cast<const In*>(call.normal), 0, call.inputs),
                 has_vectors(static_cast<const In*>(call.before), 0, call.outputs),
                 has_vectors(static_cast<const Out*>(call.after), 0, call.outputs),
                 has_vectors(call.exact_after, 0, call.outputs)};
             launch_kernel({context, blocks_of(call.rows, call.frames), 32 * kWarps, 0, true},
                           "LayerNorm and Linear", norm_linear_kernel<In, P, Out, blocks()>, a);
           });
}

void norm_linear_backward(const Context& context, const NormProducts& products,
                          const NormLinearBackward& call) {
  dispatch(
      products, call.inputs, [&]<typename In, typename P, typename Out>(In, P, Out, auto blocks) {
        const BackwardArguments a{call,
                                  has_vectors(static_cast<const In*>(call.d), 0, call.outputs),
                                  has_vectors(static_cast<const In*>(call.normal), 0, call.inputs),
                                  has_vectors(static_cast<const Out*>(call.d_in), 0, call.inputs)};
        launch_kernel({context, blocks_of(call.rows, call.frames), 32 * kWarps, 0, true},
                      "LayerNorm and Linear backward",
                      norm_linear_backward_kernel<In, P, Out, blocks()>, a);
      });
}

}  // namespace fusewise::cuda::autoencoder
