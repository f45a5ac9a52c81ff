// Squeeze-and-Excitation in one kernel each for forward and backward, for Hopper. A cluster of
// blocks holds a sample.
// Memory: forward reads x once and writes y; backward reads dy and x once and writes dx. The image
// that is scaled (x, in backward dy) is read once and stays in registers and shared memory until
// the gates are known. As soon as a vector is written, its slot is refilled from the next sample.
// Bound by memory bandwidth while clusters are at different stages, otherwise by the latency of the
// two small GEMMs.

#include "cuda/squeeze_excite/cluster.cuh"

#include <algorithm>
#include <map>
#include <mutex>
#include <type_traits>

#include "common/backends.h"
#include "common/math.h"
#include "cuda/cluster.cuh"
#include "cuda/copy_async.cuh"
#include "cuda/cuda_error.h"
#include "cuda/device.h"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/squeeze_excite/arguments.cuh"
#include "cuda/squeeze_excite/images.h"
#include "cuda/squeeze_excite/weight_gradients.cuh"
#include "cuda/vector.cuh"

namespace fusewise::cuda {
namespace {

struct Arguments {
  const void* kept;   ///< the image that is scaled: x, in backward dy
  const void* extra;  ///< backward: x
  void* out;          ///< y, in backward dx
  const void *w1, *b1, *w2, *b2;
  float *pooled, *hidden, *gates;  ///< forward: written, may be null; backward: read
  float *dz2, *dz1;                ///< backward: for the weight gradients, may be null
  int n, c, hw, r;
  float inverse_hw;
  Activation activation;
  Gate gate;
  ClusterPlan plan;
};

/// Two neighbouring weights, or one if rows have an odd length.
template <typename W, int kCount>
struct alignas(kCount * sizeof(W)) Few {
  W values[kCount];
};

/// The small GEMMs of a block. Its slices of W1, [r][channels], and W2, [channels][r], are in
/// shared memory.
template <typename W>
struct Products {
  static constexpr int kVector = Vector<W>::kSize;
  const W *w1, *w2;
  int r, channels, w1_stride;
  int channel_lanes, hidden_lanes;
  float* rows;  ///< partial sums
  int row_stride;
  int rows_of_channels;  ///< number of rows that fit

  /// Calls finish(r, sum over channels of W1[r][c] * values[c], lane).
  template <typename Finish>
  __device__ void rows_of_w1(const float* values, Finish finish) const {
    sum_by_lanes(
        r, hidden_lanes,
        [&](int k, int i) {
          const W* row = w1 + k * w1_stride;
          float sum[2] = {};
#pragma unroll 2
          for (int c = i * kVector; c < channels; c += hidden_lanes * kVector) {
            const Vector<W> w = load_vector(row + c);
#pragma unroll
            for (int j = 0; j < kVector; j += 4) {
              const float4 value = *reinterpret_cast<const float4*>(values + c + j);
              sum[0] += w[j] * value.x + w[j + 1] * value.y;
              sum[1] += w[j + 2] * value.z + w[j + 3] * value.w;
            }
          }
          return sum[0] + sum[1];
        },
        finish);
  }

  /// Calls finish(c, sum over r of W2[c][r] * values[r], lane).
  template <typename Finish>
  __device__ void rows_of_w2(const float* values, Finish finish) const {
    const auto by = [&]<int kStep>(std::integral_constant<int, kStep>) {
      sum_by_lanes(
          channels, channel_lanes,
          [&](int c, int i) {
            const W* row = w2 + c * r;
            float sum[kStep] = {};
#pragma unroll 4
            for (int k = i * kStep; k < r; k += channel_lanes * kStep) {
              const auto w = *reinterpret_cast<const Few<W, kStep>*>(row + k);
              const auto v = *reinterpret_cast<const Few<float, kStep>*>(values + k);
#pragma unroll
              for (int j = 0; j < kStep; ++j) {
                sum[j] += to_accumulator<float>(w.values[j]) * v.values[j];
              }
            }
            return kStep == 1 ? sum[0] : sum[0] + sum[kStep - 1];
          },
          finish);
    };
    if (r % 2 == 0) {
      by(std::integral_constant<int, 2>());
    } else {
      by(std::integral_constant<int, 1>());
    }
  }

  /// Calls finish(r, sum over channels of W2[c][r] * values[c], lane). Contains a barrier.
  template <typename Finish>
  __device__ void columns_of_w2(const float* values, Finish finish) const {
    const int step = r % 2 == 0 ? 2 : 1;
    const int groups = r / step, parts = min(static_cast<int>(blockDim.x) / groups, channels);
    const int part = threadIdx.x / groups, k = (threadIdx.x - part * groups) * step;
    const auto by = [&]<int kStep>(std::integral_constant<int, kStep>) {
      float sum[kStep] = {};
#pragma unroll 4
      for (int c = part; c < channels; c += parts) {
        const auto w = *reinterpret_cast<const Few<W, kStep>*>(w2 + c * r + k);
        const float value = values[c];
#pragma unroll
        for (int j = 0; j < kStep; ++j) sum[j] += to_accumulator<float>(w.values[j]) * value;
      }
#pragma unroll
      for (int j = 0; j < kStep; ++j) rows[part * r + k + j] = sum[j];
    };
    if (part < parts) {
      if (step == 2) {
        by(std::integral_constant<int, 2>());
      } else {
        by(std::integral_constant<int, 1>());
      }
    }
    __syncthreads();
    sum_rows_by_lanes(rows, parts, r, r, hidden_lanes, finish);
  }

  /// Calls finish(c, sum over r of W1[r][c] * values[r], lane). Contains a barrier.
  template <typename Finish>
  __device__ void columns_of_w1(const float* values, Finish finish) const {
    const int vectors = channels / kVector;
    const int parts = min(static_cast<int>(blockDim.x) / vectors, min(r, rows_of_channels));
    const int part = threadIdx.x / vectors, c = (threadIdx.x - part * vectors) * kVector;
    if (part < parts) {
      float sum[kVector] = {};
#pragma unroll 2
      for (int k = part; k < r; k += parts) {
        const Vector<W> w = load_vector(w1 + k * w1_stride + c);
        const float value = values[k];
#pragma unroll
        for (int j = 0; j < kVector; ++j) sum[j] += w[j] * value;
      }
      store_row(sum, rows + part * row_stride + c);
    }
    __syncthreads();
    sum_rows_by_lanes(rows, parts, row_stride, channels, channel_lanes, finish);
  }

  template <int kCount>
  static __device__ void store_row(const float (&values)[kCount], float* row) {
#pragma unroll
    for (int k = 0; k < kCount; k += 4) {
      *reinterpret_cast<float4*>(row + k) =
          make_float4(values[k], values[k + 1], values[k + 2], values[k + 3]);
    }
  }
};

/// Position of a thread's vectors in a slice: `count` of them, `step` elements apart.
template <typename T, bool kPlanar>
struct Lane {
  static constexpr int kVector = Vector<T>::kSize;
  int first_channel, channels;  ///< of the block
  int channel;                  ///< first channel in this thread's vectors, counted in the block
  int strand, strands;          ///< threads that share the channel
  int count;
  int step;
  long long start;

  __device__ Lane(const Arguments& a, int channel_slice, int pixel_slice) {
    const ClusterPlan& plan = a.plan;
    first_channel = channel_slice * plan.channels;
    channels = min(plan.channels, a.c - first_channel);
    const int first_pixel = pixel_slice * plan.pixels;
    const int pixels = min(plan.pixels, a.hw - first_pixel);
    const int thread = threadIdx.x;
    strands = plan.strands;
    if constexpr (kPlanar) {
      channel = thread / strands;
      strand = thread - channel * strands;
      count = channel < channels ? max(pixels / kVector - strand + strands - 1, 0) / strands : 0;
      start =
          static_cast<long long>(first_channel + channel) * a.hw + first_pixel + strand * kVector;
      step = strands * kVector;
    } else {
      const int lanes = channels / kVector;
      strand = thread / lanes;
      channel = (thread - strand * lanes) * kVector;
      count = strand < strands ? max(pixels - strand + strands - 1, 0) / strands : 0;
      start = static_cast<long long>(first_pixel + strand) * a.c + first_channel + channel;
      step = strands * a.c;
    }
  }

  /// Calls finish(channel, sum over the block's pixels, lane), from every thread's own sums.
  /// Contains a barrier.
  template <typename W, typename Finish>
  __device__ void sum(const float (&mine)[kVector], const Products<W>& products,
                      Finish finish) const {
    int count;
    if constexpr (kPlanar) {
      float total = 0;
#pragma unroll
      for (int k = 0; k < kVector; ++k) total += mine[k];
      total = warp_sum(total, min(strands, 32));
      if (channel < channels && strand % 32 == 0) {
        products.rows[strand / 32 * products.row_stride + channel] = total;
      }
      count = max(strands / 32, 1);
    } else {
      if (strand < strands) {
        products.store_row(mine, products.rows + strand * products.row_stride + channel);
      }
      count = strands;
    }
    __syncthreads();
    sum_rows_by_lanes(products.rows, count, products.row_stride, channels, products.channel_lanes,
                      finish);
  }
};

template <typename T, typename W, bool kPlanar, bool kBackward>
__global__ void __launch_bounds__(kClusterMostThreads, 1)
    cluster_kernel(const __grid_constant__ Arguments a) {
#if __CUDA_ARCH__ >= 900
  constexpr int kVector = Vector<T>::kSize;
  constexpr int kRegisters = cluster_registers(kBackward);
  const ClusterPlan& plan = a.plan;
  const int channel_slices = plan.cut.channel_slices, pixel_slices = plan.cut.pixel_slices;
  const int size = plan.cut.blocks();
  const int cluster = blockIdx.x / size, rank = blockIdx.x - cluster * size;
  const int pixel_slice = rank / channel_slices;
  const int channel_slice = rank - pixel_slice * channel_slices;
  const Lane<T, kPlanar> lane(a, channel_slice, pixel_slice);
  const int channels = lane.channels, first_channel = lane.first_channel;
  const int threads = blockDim.x, thread = threadIdx.x;
  // Blocks with the same channels compute the same channel values, and all blocks the same hidden
  // layer. Only one of them writes.
  const bool writes_channels = pixel_slice == 0, writes_hidden = rank == 0;

  extern __shared__ __align__(128) unsigned char shared[];
  auto* const slots = reinterpret_cast<uint4*>(shared) + thread;
  float* const floats = reinterpret_cast<float*>(shared + 16 * plan.shared_vectors * threads);
  const int hidden_floats = (a.r + 3) / 4 * 4;
  // Double-buffered over samples: the barrier of the sums and that of the hidden layer.
  auto* const barriers = reinterpret_cast<ByteBarrier*>(floats);
  float* const rows = floats + kClusterBarrierFloats;
  float* const values = rows + plan.row_floats;
  float* const gates = values + plan.channels;  // double-buffered over samples
  // The bias of the gates. In backward, the offset that is added to dx.
  float* const offset = gates + 2 * plan.channels;
  float* const hidden = offset + plan.channels;
  // The hidden layer's bias. In backward, the saved hidden layer, double-buffered over samples.
  float* const bias = hidden + hidden_floats;
  // Values received from other blocks, double-buffered over samples.
  float* const sum_box = bias + 2 * hidden_floats;
  float* const hidden_box = sum_box + (pixel_slices > 1 ? 2 * pixel_slices * plan.channels : 0);
  float* const behind =
      hidden_box + (channel_slices > 1 ? 2 * ((channel_slices * a.r + 1) / 2 * 2) : 0);
  W* const w1 = reinterpret_cast<W*>(behind);
  W* const w2 = w1 + a.r * plan.w1_stride;
  const Products<W> products{.w1 = w1,
                             .w2 = w2,
                             .r = a.r,
                             .channels = channels,
                             .w1_stride = plan.w1_stride,
                             .channel_lanes = plan.channel_lanes,
                             .hidden_lanes = plan.hidden_lanes,
                             .rows = rows,
                             .row_stride = plan.row_stride,
                             .rows_of_channels = plan.rows_of_channels};

  if (size > 1) {
    if (thread == 0) {
      for (int i = 0; i < 4; ++i) barriers[i].init(1);
      ByteBarrier::publish();
    }
    arrive_in_cluster();
  }
  wait_for_previous_kernel();
  // With several samples per cluster, blocks of the next kernel may wait in free slots. With one
  // sample per cluster, they would alternate with blocks of this kernel.
  if (plan.clusters < a.n) allow_next_kernel();
  if (cluster >= plan.late_from) sleep_for(plan.late_nanoseconds);

  // Held vectors: the first ones in registers, the others in this thread's slots in shared memory.
  uint4 held[kRegisters];
  const auto as_vector = [](const uint4& bits) -> const Vector<T>& {
    return reinterpret_cast<const Vector<T>&>(bits);
  };
  const auto fetch = [&](const T* from) {
    const Vector<T> v = load_once(from);
    return reinterpret_cast<const uint4&>(v);
  };
  const auto fetch_saved = [&](int sample, int turn) {
    for (int c = thread; c < channels; c += threads) {
      copy_float(gates + turn * plan.channels + c,
                 a.gates + static_cast<long long>(sample) * a.c + first_channel + c);
    }
    for (int r = thread; r < a.r; r += threads) {
      copy_float(bias + turn * hidden_floats + r,
                 a.hidden + static_cast<long long>(sample) * a.r + r);
    }
  };
  const long long sample_size = static_cast<long long>(a.c) * a.hw;
  long long at = cluster * sample_size + lane.start;

  // Backward: x passes through registers, with two batches of loads in flight.
  constexpr int kBatch = 4;
  uint4 x[2][kBatch];
  const T* extra = nullptr;
  const auto fetch_extra = [&](int first, uint4(&batch)[kBatch]) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (first + j < lane.count) batch[j] = fetch(extra);
      extra += lane.step;
    }
  };
  const auto fetch_first_extra = [&] {
    extra = static_cast<const T*>(a.extra) + at;
    fetch_extra(0, x[0]);
    fetch_extra(kBatch, x[1]);
  };

  const auto fetch_weights = [&] {
    constexpr int kWeights = Vector<W>::kSize;
    const W* from1 = static_cast<const W*>(a.w1) + first_channel;
    const W* from2 = static_cast<const W*>(a.w2) + static_cast<long long>(first_channel) * a.r;
#pragma unroll 1
    for (int r = thread / 32; r < a.r; r += threads / 32) {
#pragma unroll 1
      for (int c = thread % 32 * kWeights; c < channels; c += 32 * kWeights) {
        copy_vector(w1 + r * plan.w1_stride + c, from1 + static_cast<long long>(r) * a.c + c);
      }
    }
#pragma unroll 1
    for (int i = thread * kWeights; i < a.r * channels; i += threads * kWeights) {
      copy_vector(w2 + i, from2 + i);
    }
  };
  // Load first what is needed first. But in forward, the weights arrive from L2 while the image is
  // still on its way from memory.
  if constexpr (kBackward) {
    fetch_first_extra();
  } else {
    fetch_weights();
  }
  {
    const T* from = static_cast<const T*>(a.kept) + at;
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) {
      if (i < lane.count) held[i] = fetch(from);
      from += lane.step;
    }
    for (int i = kRegisters; i < lane.count; ++i, from += lane.step) {
      copy_vector(slots + (i - kRegisters) * threads, from);
    }
  }
  if constexpr (kBackward) {
    fetch_saved(cluster, 0);
    fetch_weights();
  } else {
    // Last, because these wait for their loads.
    const W *b1 = static_cast<const W*>(a.b1), *b2 = static_cast<const W*>(a.b2);
#pragma unroll 1
    for (int r = thread; r < a.r; r += threads) bias[r] = b1 ? to_accumulator<float>(b1[r]) : 0.f;
#pragma unroll 1
    for (int c = thread; c < channels; c += threads) {
      offset[c] = b2 ? to_accumulator<float>(b2[first_channel + c]) : 0.f;
    }
  }

  int turn = 0, phase = 0;
  for (int sample = cluster; sample < a.n; sample += plan.clusters) {
    const long long channel_at = static_cast<long long>(sample) * a.c + first_channel;
    const long long hidden_at = static_cast<long long>(sample) * a.r;
    float* const gate = gates + turn * plan.channels;
    const float* const z1 = bias + turn * hidden_floats;
    ByteBarrier& sums_came = barriers[turn];
    ByteBarrier& hidden_came = barriers[2 + turn];
    if (thread == 0) {
      if (pixel_slices > 1) sums_came.expect(4 * pixel_slices * channels);
      if (channel_slices > 1) hidden_came.expect(4 * channel_slices * a.r);
    }

    float mine[kVector] = {};
    if constexpr (kBackward) {
      static_assert(kRegisters % kBatch == 0);
      const auto add = [&](int first, const uint4(&batch)[kBatch], auto dy) {
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          if (first + j < lane.count) {
            const uint4 bits = dy(first + j);
#pragma unroll
            for (int k = 0; k < kVector; ++k) {
              mine[k] += as_vector(bits)[k] * as_vector(batch[j])[k];
            }
          }
        }
      };
#pragma unroll
      for (int first = 0; first < kRegisters; first += kBatch) {
        uint4(&batch)[kBatch] = x[first / kBatch % 2];
        add(first, batch, [&](int i) { return held[i]; });
        fetch_extra(first + 2 * kBatch, batch);
      }
      wait_for_copies();
      const auto slot = [&](int i) { return slots[(i - kRegisters) * threads]; };
      constexpr int kNext = kRegisters / kBatch % 2;
      for (int first = kRegisters; first < lane.count; first += 2 * kBatch) {
        add(first, x[kNext], slot);
        fetch_extra(first + 2 * kBatch, x[kNext]);
        add(first + kBatch, x[1 - kNext], slot);
        fetch_extra(first + 3 * kBatch, x[1 - kNext]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kRegisters; ++i) {
        if (i < lane.count) {
#pragma unroll
          for (int k = 0; k < kVector; ++k) mine[k] += as_vector(held[i])[k];
        }
      }
      wait_for_copies();
#pragma unroll 4
      for (int i = kRegisters; i < lane.count; ++i) {
        const uint4 bits = slots[(i - kRegisters) * threads];
#pragma unroll
        for (int k = 0; k < kVector; ++k) mine[k] += as_vector(bits)[k];
      }
    }
    // Do not write to another block's shared memory before that block runs.
    if (size > 1 && sample == cluster) wait_for_cluster();

    // Converts a channel's sum to the first GEMM's input: the mean, or dz2 in backward.
    const auto take_sum = [&](int c, float sum) {
      if constexpr (kBackward) {
        values[c] = math::gate_gradient(a.gate, gate[c], sum);
        if (writes_channels && a.dz2) a.dz2[channel_at + c] = values[c];
      } else {
        values[c] = sum * a.inverse_hw;
        if (writes_channels && a.pooled) a.pooled[channel_at + c] = values[c];
      }
    };
    float* const sums = sum_box + turn * pixel_slices * plan.channels;
    lane.sum(mine, products, [&](int c, float sum, int i) {
      if (pixel_slices == 1) {
        if (i == 0) take_sum(c, sum);
        return;
      }
      for (int p = i; p < pixel_slices; p += plan.channel_lanes) {
        send_to_block(sums + pixel_slice * plan.channels + c, sums_came,
                      p * channel_slices + channel_slice, sum);
      }
    });
    if (pixel_slices > 1) {
      sums_came.wait(phase);
      sum_rows_by_lanes(sums, pixel_slices, plan.channels, channels, plan.channel_lanes,
                        [&](int c, float sum, int i) {
                          if (i == 0) take_sum(c, sum);
                        });
    }
    __syncthreads();

    const auto take_hidden = [&](int r, float sum) {
      if constexpr (kBackward) {
        hidden[r] = math::activation_gradient(a.activation, z1[r], sum);
        if (writes_hidden && a.dz1) a.dz1[hidden_at + r] = hidden[r];
      } else {
        const float z = sum + bias[r];
        if (writes_hidden && a.hidden) a.hidden[hidden_at + r] = z;
        hidden[r] = math::activate(a.activation, z);
      }
    };
    float* const shares = hidden_box + turn * ((channel_slices * a.r + 1) / 2 * 2);
    const auto give_hidden = [&](int r, float sum, int i) {
      if (channel_slices == 1) {
        if (i == 0) take_hidden(r, sum);
        return;
      }
      for (int s = i; s < channel_slices; s += plan.hidden_lanes) {
        send_to_block(shares + channel_slice * a.r + r, hidden_came,
                      pixel_slice * channel_slices + s, sum);
      }
    };
    if constexpr (kBackward) {
      products.columns_of_w2(values, give_hidden);
    } else {
      products.rows_of_w1(values, give_hidden);
    }
    if (channel_slices > 1) {
      hidden_came.wait(phase);
      sum_rows_by_lanes(shares, channel_slices, a.r, a.r, plan.hidden_lanes,
                        [&](int r, float sum, int i) {
                          if (i == 0) take_hidden(r, sum);
                        });
    }
    __syncthreads();

    if constexpr (kBackward) {
      products.columns_of_w1(hidden, [&](int c, float sum, int i) {
        if (i == 0) offset[c] = sum * a.inverse_hw;
      });
    } else {
      products.rows_of_w2(hidden, [&](int c, float sum, int i) {
        if (i > 0) return;
        gate[c] = math::open_gate(a.gate, sum + offset[c]);
        if (writes_channels && a.gates) a.gates[channel_at + c] = gate[c];
      });
    }
    __syncthreads();

    // Scales the held vectors. Each slot is refilled at once.
    const bool more = sample + plan.clusters < a.n;
    if (lane.count > 0) {
      float g[kVector], o[kVector];
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        g[k] = gate[lane.channel + (kPlanar ? 0 : k)];
        o[k] = kBackward ? offset[lane.channel + (kPlanar ? 0 : k)] : 0.f;
      }
      const auto scaled = [&](const uint4& bits) {
        Vector<T> v = as_vector(bits);
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          v.set(k, kBackward ? fmaf(v[k], g[k], o[k]) : v[k] * g[k]);
        }
        return v;
      };
      T* out = static_cast<T*>(a.out) + at;
      at += plan.clusters * sample_size;
      const T* next = static_cast<const T*>(a.kept) + at;
#pragma unroll
      for (int i = 0; i < kRegisters; ++i) {
        if (i < lane.count) {
          store_streaming(out, scaled(held[i]));
          if (more) held[i] = fetch(next);
        }
        out += lane.step;
        next += lane.step;
      }
      for (int i = kRegisters; i < lane.count; ++i) {
        uint4* slot = slots + (i - kRegisters) * threads;
        store_streaming(out, scaled(*slot));
        if (more) copy_vector(slot, next);
        out += lane.step;
        next += lane.step;
      }
    }
    if (kBackward && more) {
      fetch_first_extra();
      fetch_saved(sample + plan.clusters, turn ^ 1);
    }
    if (!more) allow_next_kernel();
    phase ^= turn;
    turn ^= 1;
  }
  if (size > 1 && thread == 0) {
    for (int i = 0; i < 4; ++i) barriers[i].invalidate();
  }
#endif
}

template <typename T, typename W, bool kPlanar, bool kBackward>
void launch(const Context& context, Arguments a) {
  auto* kernel = cluster_kernel<T, W, kPlanar, kBackward>;
  const ClusterPlan& plan = a.plan;
  launch_kernel({context, std::int64_t{plan.clusters} * plan.cut.blocks(), plan.cut.threads,
                 static_cast<std::size_t>(plan.shared_bytes), true, plan.cut.blocks()},
                "squeezing and exciting", kernel, a);
}

template <bool kBackward, typename Call>
void launch_for(const Context& context, const Call& call, Arguments a, const ClusterPlan& plan) {
  a.n = static_cast<int>(call.x.sizes[0]);
  a.plan = plan;
  dispatch_short_dtypes(call.x.dtype, call.w1.dtype, [&]<typename T, typename W>(T, W) {
    if (is_channels_last(call.x)) {
      launch<T, W, false, kBackward>(context, a);
    } else {
      launch<T, W, true, kBackward>(context, a);
    }
  });
}

/// How many clusters run at once, for every cluster size. Queried once per device.
ClusterLimits ask_limits(Device device) {
  const DeviceLimits& limits = limits_of(device);
  const CurrentDevice current(device);
  auto* kernel = cluster_kernel<float, float, false, false>;
  allow_all(reinterpret_cast<const void*>(kernel), device);
  ClusterLimits result{};
  for (int together = 1; together <= 2; ++together) {
    int& shared_memory = result.shared_memory[together - 1];
    // The system reserves a kilobyte per block.
    shared_memory = std::min(limits.block_shared_memory, limits.shared_memory / together - 1024);
    for (int size = 1; size <= kClusterMostBlocks; ++size) {
      cudaLaunchAttribute attribute{};
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
      cudaLaunchConfig_t config{};
      config.gridDim = dim3(size);
      config.blockDim = dim3(kClusterMostThreads / together);
      config.dynamicSmemBytes = shared_memory;
      config.attrs = &attribute;
      config.numAttrs = 1;
      int& clusters = result.clusters[together - 1][size];
      if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess) {
        clusters = 0;  // a GPU without clusters of this size reports an error
        static_cast<void>(cudaGetLastError());
      }
    }
  }
  return result;
}

template <typename Call>
constexpr bool kIsBackward = std::is_same_v<Call, SqueezeExciteBackward>;

template <typename Call>
ClusterProblem problem_of(const Call& call) {
  return {
      .n = call.x.sizes[0],
      .c = call.x.sizes[1],
      .hw = call.x.sizes[2] * call.x.sizes[3],
      .r = call.w1.sizes[0],
      .element_bytes = static_cast<int>(size_of(call.x.dtype)),
      .weight_bytes = static_cast<int>(size_of(call.w1.dtype)),
      .planar = !is_channels_last(call.x),
      .backward = kIsBackward<Call>,
  };
}

template <typename Call>
const std::optional<ClusterPlan>& plan_for(const Context& context, const Call& call) {
  // Models ask for the same plans repeatedly. The limit bounds memory for a model whose sizes never
  // repeat.
  constexpr std::size_t kMost = 1024;
  thread_local std::map<std::pair<int, ClusterProblem>, std::optional<ClusterPlan>> known;
  const std::pair key(context.device.index, problem_of(call));
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  if (known.size() == kMost) known.clear();
  return known.emplace(key, cluster_plan(key.second, cluster_limits(context.device))).first->second;
}

template <typename Call>
std::string declines(const Context& context, const Call& call,
                     std::initializer_list<const TensorView*> images) {
  if (limits_of(context.device).capability < 90) {
    return "it needs clusters of blocks, compute capability 9.0 or newer";
  }
  std::string reason = dense_images_decline(images);
  if (!reason.empty()) return reason;
  if (!is_aligned(call.w1) || !is_aligned(call.w2)) {
    return "a weight does not start on a 16-byte boundary";
  }
  if (call.x.sizes[1] * std::min(size_of(call.x.dtype), size_of(call.w1.dtype)) % 16 != 0) {
    return "the channels are not a multiple of 16 bytes";
  }
  if (call.w1.sizes[0] > kClusterMostThreads) return "there are more hidden units than threads";
  const std::int64_t plane = call.x.sizes[2] * call.x.sizes[3] * size_of(call.x.dtype);
  if (!is_channels_last(call.x) && plane % 16 != 0) return "a plane is not a multiple of 16 bytes";
  if (!plan_for(context, call)) {
    return "a sample and its weights do not fit in a cluster's registers and shared memory";
  }
  return {};
}

}  // namespace

const ClusterLimits& cluster_limits(Device device) {
  static std::mutex mutex;
  static std::map<int, ClusterLimits> known;
  const std::lock_guard lock(mutex);
  const auto found = known.find(device.index);
  if (found != known.end()) return found->second;
  return known.emplace(device.index, ask_limits(device)).first->second;
}

void cluster_run(const Context& context, const SqueezeExciteForward& call,
                 const ClusterPlan& plan) {
  launch_for<false>(context, call, arguments_of<Arguments>(call), plan);
}

void cluster_run(const Context& context, const SqueezeExciteBackward& call,
                 const ClusterPlan& plan) {
  const WeightGradientVectors vectors(context, call);
  launch_for<true>(context, call, arguments_of<Arguments>(call, vectors), plan);
  vectors.run(context, call);
}

std::string cluster_declines(const Context& context, const SqueezeExciteForward& call) {
  return declines(context, call, {&call.x, &call.y});
}

std::string cluster_declines(const Context& context, const SqueezeExciteBackward& call) {
  if (!call.dx.defined()) return "dx is not needed, so no image is read twice";
  return declines(context, call, {&call.x, &call.dy, &call.dx});
}

double cluster_expected_time(const Context& context, const SqueezeExciteForward& call) {
  return expected_time(problem_of(call), *plan_for(context, call));
}

double cluster_expected_time(const Context& context, const SqueezeExciteBackward& call) {
  return expected_time(problem_of(call), *plan_for(context, call));
}

void cluster_run(const Context& context, const SqueezeExciteForward& call) {
  cluster_run(context, call, *plan_for(context, call));
}

void cluster_run(const Context& context, const SqueezeExciteBackward& call) {
  cluster_run(context, call, *plan_for(context, call));
}

}  // namespace fusewise::cuda
