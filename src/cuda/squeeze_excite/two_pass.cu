// Squeeze-and-Excitation in two kernels each for forward and backward: one sums, one scales.
// Memory: forward reads x twice and writes y; backward reads dy twice, x once and writes dx. The
// second pass starts with the data that the first one read last, so up to the size of L2 of it is
// still cached. Bound by memory bandwidth. The small GEMMs are fused into the passes: each block of
// the first pass multiplies its channels' sums by its part of the first matrix. Each block of the
// second pass adds these partial results and multiplies them by its part of the second matrix.

#include "cuda/squeeze_excite/two_pass.cuh"

#include <algorithm>

#include "common/divide.h"
#include "common/math.h"
#include "common/scratch.h"
#include "cuda/cuda_error.h"
#include "cuda/device.h"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/squeeze_excite/arguments.cuh"
#include "cuda/squeeze_excite/images.h"
#include "cuda/squeeze_excite/planes.cuh"
#include "cuda/squeeze_excite/weight_gradients.cuh"
#include "cuda/vector.cuh"

namespace fusewise::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kAhead = 4;  // vectors that a thread has in flight

struct Arguments {
  const void* kept;   ///< the image that is scaled: x, in backward dy
  const void* extra;  ///< backward: x
  void* out;          ///< y, in backward dx
  const void *w1, *b1, *w2, *b2;
  float *pooled, *hidden, *gates;  ///< forward: written, may be null; backward: read
  float *dz2, *dz1;                ///< backward: for the weight gradients, may be null
  float* parts;                    ///< [n][blocks][c or r], from the first pass to the second
  int c, hw, r;
  int per_block;  ///< channels, pixels or planes
  int blocks;     ///< per sample
  float inverse_hw;
  Activation activation;
  Gate gate;
};

/// A block's part of a sample.
template <typename T, Cut kCut>
struct Part {
  static constexpr bool kPlanes = kCut == Cut::planes;
  static constexpr bool kPixels = kCut == Cut::pixels;
  static constexpr int kVector = Vector<T>::kSize;

  int sample, index;
  int first_channel, channels, first_pixel, pixels;
  int c, hw;
  long long start;
  // Channels-last: a thread has one vector of channels and every strands-th pixel.
  int lanes, strands, strand, lane;

  __device__ Part(const Arguments& a, unsigned block) : c(a.c), hw(a.hw) {
    sample = block / a.blocks;
    index = block - sample * a.blocks;
    const int begin = index * a.per_block;
    const int count = min(a.per_block, (kPixels ? a.hw : a.c) - begin);
    first_channel = kPixels ? 0 : begin;
    channels = kPixels ? a.c : count;
    first_pixel = kPixels ? begin : 0;
    pixels = kPixels ? count : a.hw;
    start = static_cast<long long>(sample) * c * hw;
    start += kPlanes ? static_cast<long long>(first_channel) * hw
                     : static_cast<long long>(first_pixel) * c + first_channel;
    lanes = channels / kVector;
    strands = max(kThreads / max(lanes, 1), 1);
    strand = threadIdx.x / max(lanes, 1);
    lane = threadIdx.x - strand * lanes;
  }

  /// Calls finish(channel, sum over the part's pixels of kept, or of kept * extra). Ends with a
  /// barrier.
  template <bool kProduct, typename Finish>
  __device__ void sum(const T* kept, const T* extra, float* rows, float* scratch,
                      Finish finish) const {
    kept += start;
    extra += start;
    if constexpr (kPlanes) {
      planes().each([&](int plane, int thread, int threads) {
        float total = 0;
        visit(
            kept, plane, thread, threads,
            [&](long long i) {
              const float v = to_accumulator<float>(kept[i]);
              total += kProduct ? v * to_accumulator<float>(extra[i]) : v;
            },
            [&](long long i) {
              const Vector<T> v = load_vector(kept + i);
              float part[2] = {};
              if constexpr (kProduct) {
                const Vector<T> w = load_vector(extra + i);
#pragma unroll
                for (int k = 0; k < kVector; ++k) part[k % 2] += v[k] * w[k];
              } else {
#pragma unroll
                for (int k = 0; k < kVector; ++k) part[k % 2] += v[k];
              }
              total += part[0] + part[1];
            });
        total = planes().sum(total, min(threads, 32));
        if (thread % 32 == 0) rows[thread / 32 * channels + plane] = total;
      });
      __syncthreads();
      block_sum_rows(rows, max(planes().threads() / 32, 1), channels, scratch, finish);
    } else {
      float total[kVector] = {};
      // In batches. All loads of a batch are issued before the first is used, also in the last
      // batch.
      constexpr int kBatch = kProduct ? 4 : 8;
      for (int first = strand; first < end(); first += kBatch * strands) {
        Vector<T> v[kBatch], w[kProduct ? kBatch : 1];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          const int p = first + j * strands;
          v[j] = p < end() ? load_vector(kept + place(p)) : Vector<T>{};
          if constexpr (kProduct) w[j] = p < end() ? load_vector(extra + place(p)) : Vector<T>{};
        }
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          float part = 0;
#pragma unroll
          for (int j = 0; j < kBatch; ++j) part += kProduct ? v[j][k] * w[j][k] : v[j][k];
          total[k] += part;
        }
      }
      if (strand < strands) {
        float4* row = reinterpret_cast<float4*>(rows + threadIdx.x * kVector);
#pragma unroll
        for (int k = 0; k < kVector / 4; ++k) {
          row[k] = make_float4(total[4 * k], total[4 * k + 1], total[4 * k + 2], total[4 * k + 3]);
        }
      }
      __syncthreads();
      block_sum_rows(rows, strands, channels, scratch, finish);
    }
  }

  /// out = kept * gate + offset, channel by channel. `ready` is called when the first loads have
  /// been issued. When it returns, gate and offset are available.
  template <bool kOffset, typename Ready>
  __device__ void scale(const T* kept, T* out, const float* gate, const float* offset,
                        Ready ready) const {
    kept += start;
    out += start;
    if constexpr (kPlanes) {
      ready();
      planes().each([&](int plane, int thread, int threads) {
        const float g = gate[plane], o = kOffset ? offset[plane] : 0.f;
        const auto apply = [&](float v) { return kOffset ? fmaf(v, g, o) : v * g; };
        visit(
            kept, plane, thread, threads,
            [&](long long i) {
              out[i] = from_accumulator<T>(apply(to_accumulator<float>(kept[i])));
            },
            [&](long long i) {
              Vector<T> v = load_vector(kept + i);
#pragma unroll
              for (int k = 0; k < kVector; ++k) v.set(k, apply(v[k]));
              store_streaming(out + i, v);
            });
      });
    } else {
      Vector<T> batch[kAhead];
      const auto load = [&](int first) {
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          const int p = first + j * strands;
          if (p < end()) batch[j] = load_vector(kept + place(p));
        }
      };
      load(strand);
      ready();
      if (end() == 0) return;
      float g[kVector], o[kVector];
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        g[k] = gate[lane * kVector + k];
        o[k] = kOffset ? offset[lane * kVector + k] : 0.f;
      }
      for (int first = strand; first < end(); first += kAhead * strands) {
        if (first != strand) load(first);
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          const int p = first + j * strands;
          if (p >= end()) break;
          Vector<T>& v = batch[j];
#pragma unroll
          for (int k = 0; k < kVector; ++k) {
            v.set(k, kOffset ? fmaf(v[k], g[k], o[k]) : v[k] * g[k]);
          }
          store_streaming(out + place(p), v);
        }
      }
    }
  }

 private:
  /// Channels-last: the end of this thread's pixels, and the offset of its vector in a pixel.
  __device__ int end() const { return strand < strands ? pixels : 0; }
  __device__ long long place(int p) const { return static_cast<long long>(p) * c + lane * kVector; }

  __device__ Planes<kThreads, kVector> planes() const { return {channels, hw}; }
  /// Visits a plane with any alignment: single elements up to a 16-byte boundary, then vectors.
  template <typename One, typename Many>
  __device__ void visit(const T* image, int plane, int thread, int threads, One one,
                        Many many) const {
    const long long begin = static_cast<long long>(plane) * hw, end = begin + hw;
    const int past = reinterpret_cast<std::uintptr_t>(image + begin) % 16 / sizeof(T);
    const long long first = min(begin + (kVector - past) % kVector, end);
    const long long last = first + (end - first) / kVector * kVector;
    for (long long i = begin + thread; i < first; i += threads) one(i);
#pragma unroll 4
    for (long long i = first + thread * kVector; i < last; i += threads * kVector) many(i);
    for (long long i = last + thread; i < end; i += threads) one(i);
  }
};

// The small GEMMs over a block's channels, with weights from global memory.

/// Calls finish(r, sum over channels of W1[r][c] * values[c]) in the first lane of a warp, with one
/// warp per r.
template <typename W, typename Finish>
__device__ void rows_of_w1(const W* w1, int stride, const float* values, int r, int channels,
                           Finish finish) {
  constexpr int kRows = 4;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int first = warp; first < r; first += kRows * kWarps) {
    float sum[kRows] = {};
    for (int c = lane; c < channels; c += 32) {
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        const long long row = min(first + k * kWarps, r - 1);
        sum[k] += to_accumulator<float>(w1[row * stride + c]) * values[c];
      }
    }
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const float total = warp_sum(sum[k]);
      if (lane == 0 && first + k * kWarps < r) finish(first + k * kWarps, total);
    }
  }
}

/// Calls finish(r, sum over channels of W2[c][r] * values[c]). Ends with a barrier.
template <typename W, typename Finish>
__device__ void columns_of_w2(const W* w2, const float* values, int r, int channels, float* scratch,
                              Finish finish) {
  block_sum(
      channels, r, scratch,
      [&](int i, int parts, int k) {
        float sum = 0;
#pragma unroll 8
        for (int c = i; c < channels; c += parts) {
          sum += to_accumulator<float>(w2[static_cast<long long>(c) * r + k]) * values[c];
        }
        return sum;
      },
      finish);
}

/// Calls finish(c, sum over r of W2[c][r] * values[r]), with eight lanes per channel. Ends with a
/// barrier.
template <typename W, typename Finish>
__device__ void rows_of_w2(const W* w2, const float* values, int r, int channels, Finish finish) {
  constexpr int kLanes = 8;
  const int lane = threadIdx.x % kLanes;
  for (int first = 0; first < channels; first += kThreads / kLanes) {
    const int c = first + threadIdx.x / kLanes;
    float sum = 0;
    if (c < channels) {
#pragma unroll 8
      for (int k = lane; k < r; k += kLanes) {
        sum += to_accumulator<float>(w2[static_cast<long long>(c) * r + k]) * values[k];
      }
    }
    sum = warp_sum(sum, kLanes);
    if (c < channels && lane == 0) finish(c, sum);
  }
  __syncthreads();
}

/// Calls finish(c, sum over r of W1[r][c] * values[r]). Ends with a barrier.
template <typename W, typename Finish>
__device__ void columns_of_w1(const W* w1, int stride, const float* values, int r, int channels,
                              float* scratch, Finish finish) {
  block_sum(
      r, channels, scratch,
      [&](int i, int parts, int c) {
        float sum = 0;
#pragma unroll 8
        for (int k = i; k < r; k += parts) {
          sum += to_accumulator<float>(w1[static_cast<long long>(k) * stride + c]) * values[k];
        }
        return sum;
      },
      finish);
}

/// The work of both passes on a part of a sample, apart from moving pixels.
template <typename T, typename W, Cut kCut, bool kBackward>
struct Excitation {
  const Arguments& a;
  const Part<T, kCut>& part;
  float *values, *hidden, *gate, *offset, *scratch;

  __device__ const W* w1() const { return static_cast<const W*>(a.w1) + part.first_channel; }
  __device__ const W* w2() const {
    return static_cast<const W*>(a.w2) + static_cast<long long>(part.first_channel) * a.r;
  }
  __device__ long long channel_at() const {
    return static_cast<long long>(part.sample) * a.c + part.first_channel;
  }

  /// Converts a channel's sum to the first GEMM's input: the mean, or dz2 in backward.
  __device__ void take_sum(int c, float sum, bool write) const {
    if (kBackward) {
      const float dz2 = math::gate_gradient(a.gate, a.gates[channel_at() + c], sum);
      if (write && a.dz2) a.dz2[channel_at() + c] = dz2;
      values[c] = dz2;
    } else {
      const float mean = sum * a.inverse_hw;
      if (write && a.pooled) a.pooled[channel_at() + c] = mean;
      values[c] = mean;
    }
  }
  /// Calls finish(r, the part's contribution to the hidden layer).
  template <typename Finish>
  __device__ void first_product(Finish finish) const {
    if constexpr (kBackward) {
      columns_of_w2(w2(), values, a.r, part.channels, scratch, finish);
    } else {
      rows_of_w1(w1(), a.c, values, a.r, part.channels, finish);
    }
  }
  __device__ void take_hidden(int r, float sum) const {
    const long long at = static_cast<long long>(part.sample) * a.r + r;
    if (kBackward) {
      const float dz1 = math::activation_gradient(a.activation, a.hidden[at], sum);
      if (part.index == 0 && a.dz1) a.dz1[at] = dz1;
      hidden[r] = dz1;
    } else {
      const float z = a.b1 ? sum + to_accumulator<float>(static_cast<const W*>(a.b1)[r]) : sum;
      if (part.index == 0 && a.hidden) a.hidden[at] = z;
      hidden[r] = math::activate(a.activation, z);
    }
  }
  /// Computes the gates from the hidden layer; in backward, the offsets.
  __device__ void second_product() const {
    if constexpr (kBackward) {
      columns_of_w1(w1(), a.c, hidden, a.r, part.channels, scratch, [&](int c, float sum) {
        gate[c] = a.gates[channel_at() + c];
        offset[c] = sum * a.inverse_hw;
      });
    } else {
      const W* b2 = static_cast<const W*>(a.b2);
      rows_of_w2(w2(), hidden, a.r, part.channels, [&](int c, float sum) {
        if (b2) sum += to_accumulator<float>(b2[part.first_channel + c]);
        const float g = math::open_gate(a.gate, sum);
        if ((kCut != Cut::pixels || part.index == 0) && a.gates) a.gates[channel_at() + c] = g;
        gate[c] = g;
      });
    }
  }
};

/// Floats of shared memory for values, gate and offset, hidden, scratch, and the first pass's rows.
__host__ __device__ int row_floats(const Arguments& a, Cut cut, int vector) {
  return cut == Cut::planes ? a.per_block + kWarps : kThreads * vector;
}
__host__ __device__ int channel_floats(const Arguments& a, Cut cut) {
  return cut == Cut::pixels ? a.c : a.per_block;
}

template <typename T, typename W, Cut kCut, bool kBackward>
__device__ Excitation<T, W, kCut, kBackward> excitation(const Arguments& a,
                                                        const Part<T, kCut>& part, float* shared) {
  const int channels = channel_floats(a, kCut);
  float* const hidden = shared + 3 * channels;
  return {a, part, shared, hidden, shared + channels, shared + 2 * channels, hidden + a.r};
}

template <typename T, typename W, Cut kCut, bool kBackward>
__global__ void __launch_bounds__(kThreads) squeeze_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(16) float shared[];
  allow_next_kernel();
  const Part<T, kCut> part(a, blockIdx.x);
  float* const rows = shared;
  const auto excite =
      excitation<T, W, kCut, kBackward>(a, part, shared + row_floats(a, kCut, Vector<T>::kSize));
  const int width = kCut == Cut::pixels ? a.c : a.r;
  float* out = a.parts + static_cast<long long>(blockIdx.x) * width;
  if constexpr (kCut != Cut::pixels) {
    // The weights are needed as soon as the pixels are summed.
    if (!kBackward && threadIdx.x < a.r) {
      prefetch(excite.w1() + static_cast<long long>(threadIdx.x) * a.c);
    }
  }
  part.template sum<kBackward>(static_cast<const T*>(a.kept), static_cast<const T*>(a.extra), rows,
                               excite.scratch, [&](int c, float sum) {
                                 if constexpr (kCut == Cut::pixels) {
                                   out[c] = sum;
                                 } else {
                                   excite.take_sum(c, sum, true);
                                 }
                               });
  if constexpr (kCut != Cut::pixels) {
    excite.first_product([&](int r, float sum) { out[r] = sum; });
  }
}

template <typename T, typename W, Cut kCut, bool kBackward>
__global__ void __launch_bounds__(kThreads) scale_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(16) float shared[];
  // Called before this kernel's own wait. This is correct only because the first pass does not
  // overlap its predecessor: everything before the first pass is done.
  allow_next_kernel();
  // In reverse order: what the first pass read last is in L2.
  const Part<T, kCut> part(a, gridDim.x - 1 - blockIdx.x);
  const auto excite = excitation<T, W, kCut, kBackward>(a, part, shared);
  const int width = kCut == Cut::pixels ? a.c : a.r;
  const float* parts = a.parts + static_cast<long long>(part.sample) * a.blocks * width;
  part.template scale<kBackward>(
      static_cast<const T*>(a.kept), static_cast<T*>(a.out), excite.gate, excite.offset, [&] {
        wait_for_previous_kernel();
        const auto sum_parts = [&](int i, int step, int k) {
          float sum = 0;
#pragma unroll 8
          for (int b = i; b < a.blocks; b += step)
            sum += parts[static_cast<long long>(b) * width + k];
          return sum;
        };
        if constexpr (kCut == Cut::pixels) {
          block_sum(a.blocks, a.c, excite.scratch, sum_parts,
                    [&](int c, float sum) { excite.take_sum(c, sum, part.index == 0); });
          excite.first_product([&](int r, float sum) { excite.take_hidden(r, sum); });
          __syncthreads();
        } else {
          block_sum(a.blocks, a.r, excite.scratch, sum_parts,
                    [&](int r, float sum) { excite.take_hidden(r, sum); });
        }
        excite.second_product();
      });
}

// ---- host

/// Floats of shared memory that both passes need. The first pass needs its rows in addition.
std::int64_t excitation_floats(std::int64_t channels, std::int64_t r) {
  return 3 * channels + r + std::max<std::int64_t>({kThreads, channels, r});
}

template <typename T, typename W, Cut kCut, bool kBackward>
void launch(const Context& context, const Arguments& a, std::int64_t samples) {
  const std::int64_t floats = excitation_floats(channel_floats(a, kCut), a.r);
  const Launch first{context, samples * a.blocks, kThreads,
                     sizeof(float) * (floats + row_floats(a, kCut, Vector<T>::kSize))};
  launch_kernel(first, "summing over pixels", squeeze_kernel<T, W, kCut, kBackward>, a);
  Launch second = first;
  second.shared_bytes = sizeof(float) * floats;
  second.overlaps_previous = true;
  launch_kernel(second, "scaling", scale_kernel<T, W, kCut, kBackward>, a);
}

template <bool kBackward, typename Call>
void launch_for(const Context& context, const Call& call, Arguments a, TwoPassPlan plan) {
  a.per_block = plan.per_block;
  a.blocks = static_cast<int>(divide_up(plan.cut == Cut::pixels ? a.hw : a.c, plan.per_block));
  const std::int64_t samples = call.x.sizes[0];
  const Scratch<float> parts(context, samples * a.blocks * (plan.cut == Cut::pixels ? a.c : a.r));
  a.parts = parts.data();
  dispatch_short_dtypes(call.x.dtype, call.w1.dtype, [&]<typename T, typename W>(T, W) {
    switch (plan.cut) {
      case Cut::channels:
        return launch<T, W, Cut::channels, kBackward>(context, a, samples);
      case Cut::pixels:
        return launch<T, W, Cut::pixels, kBackward>(context, a, samples);
      case Cut::planes:
        return launch<T, W, Cut::planes, kBackward>(context, a, samples);
    }
  });
}

/// Fitted to a sweep on an H200. A block should have rows of a memory burst or two, or some 32 KB
/// of pixels.
TwoPassPlan plan_for(const Context& context, const TensorView& x) {
  const std::int64_t n = x.sizes[0], c = x.sizes[1], hw = x.sizes[2] * x.sizes[3];
  const std::int64_t bytes = size_of(x.dtype);
  if (!is_channels_last(x)) {
    return {Cut::planes, static_cast<int>(std::clamp<std::int64_t>(32768 / (hw * bytes), 1, 64))};
  }
  const std::int64_t multiprocessors = limits_of(context.device).multiprocessors;
  if (hw <= 1024 || c * bytes / 16 > kThreads) {
    std::int64_t channels = (c < 1024 ? 128 : 256) / bytes;
    if (n * divide_up(c, channels) < 3 * multiprocessors) channels /= 2;
    return {Cut::channels, static_cast<int>(std::min(c, channels))};
  }
  const std::int64_t wanted = 4 * multiprocessors / n;
  const std::int64_t strands = kThreads / (c * bytes / 16);
  const std::int64_t pixels = divide_up(hw, std::max<std::int64_t>(wanted, 1));
  return {Cut::pixels, static_cast<int>(std::max(pixels, kAhead * strands))};
}

std::string declines(const Context& context, std::initializer_list<const TensorView*> images,
                     std::int64_t r) {
  std::string reason = dense_images_decline(images);
  if (!reason.empty()) return reason;
  const TensorView& x = **images.begin();
  const TwoPassPlan plan = plan_for(context, x);
  const std::int64_t n = x.sizes[0], c = x.sizes[1], hw = x.sizes[2] * x.sizes[3];
  const std::int64_t blocks = n * divide_up(plan.cut == Cut::pixels ? hw : c, plan.per_block);
  const std::int64_t channels = plan.cut == Cut::pixels ? c : plan.per_block;
  const std::int64_t most_rows = kThreads * 16 / size_of(x.dtype);
  const std::int64_t shared = sizeof(float) * (excitation_floats(channels, r) + most_rows);
  if (shared > limits_of(context.device).block_shared_memory) {
    return "the hidden units do not fit in shared memory";
  }
  const std::int64_t work = n * c * hw / blocks;
  if (work > 16384 && blocks < limits_of(context.device).multiprocessors) {
    return "with so few and so large planes, most of the GPU would be idle";
  }
  return {};
}

}  // namespace

std::string two_pass_yields(const TensorView& x) {
  // Measured: 133 against 112 us for half-precision planes of 95 x 95, 155 against 138 backward.
  const std::int64_t plane = x.sizes[2] * x.sizes[3] * size_of(x.dtype);
  if (is_channels_last(x) || plane % 16 == 0 || plane < 4096) return {};
  return "'general' is faster where large planes do not start on 16-byte boundaries";
}

std::string two_pass_declines(const Context& context, const SqueezeExciteForward& call) {
  return declines(context, {&call.x, &call.y}, call.w1.sizes[0]);
}

std::string two_pass_declines(const Context& context, const SqueezeExciteBackward& call) {
  if (!call.dx.defined()) return "dx is not needed, so no image is read twice";
  return declines(context, {&call.x, &call.dy, &call.dx}, call.w1.sizes[0]);
}

void two_pass_run(const Context& context, const SqueezeExciteForward& call) {
  two_pass_run(context, call, plan_for(context, call.x));
}

void two_pass_run(const Context& context, const SqueezeExciteBackward& call) {
  two_pass_run(context, call, plan_for(context, call.x));
}

void two_pass_run(const Context& context, const SqueezeExciteForward& call, TwoPassPlan plan) {
  launch_for<false>(context, call, arguments_of<Arguments>(call), plan);
}

void two_pass_run(const Context& context, const SqueezeExciteBackward& call, TwoPassPlan plan) {
  const WeightGradientVectors vectors(context, call);
  launch_for<true>(context, call, arguments_of<Arguments>(call, vectors), plan);
  vectors.run(context, call);
}

}  // namespace fusewise::cuda
