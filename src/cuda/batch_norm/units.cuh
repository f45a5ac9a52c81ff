#pragma once

// What the kernels with 16-byte accesses do with each vector, forward and backward.

#include "cuda/batch_norm/activation.cuh"
#include "cuda/batch_norm/tile.cuh"
#include "cuda/packed.cuh"

namespace fusewise::cuda {

// ---- Forward.

/// The mean of four values without the largest and the smallest.
__device__ __forceinline__ float middle(float a, float b, float c, float d) {
  const float low = fmaxf(fminf(a, b), fminf(c, d)), high = fminf(fmaxf(a, b), fmaxf(c, d));
  return 0.5f * low + 0.5f * high;  // their sum might overflow
}

/// A value near the mean of each channel of a block, so that the squares of the differences from it
/// do not cancel: of four values across the units from `begin` to `end`, the mean without the
/// largest and the smallest. One unusual value, as from the border of an image, does not move it
/// far.
template <typename T, bool kPlanar>
struct Shifts {
  static constexpr int kVector = Vector<T>::kSize, kCount = 4;
  Vector<T> own{};  // a vector of this thread if its strand is below kCount; 0 if all is blanked

  /// Starts to load them, all at once.
  __device__ __forceinline__ Shifts(const Tile<T, kPlanar>& tile, const T* x, unsigned begin,
                                    unsigned end) {
    if (tile.strand >= kCount || !tile.has_vectors) return;
    // Uneven, so that they are not the same pixel of several images.
    const int part = 7 + 6 * tile.strand + (tile.strand == 3 ? 4 : 0);
    unsigned unit = begin + static_cast<unsigned>(Index{end - begin} * part / 32);
    if (tile.cut.blanked != nullptr) {
      unit = tile.next_present(unit, end);
      if (unit == end) unit = tile.next_present(begin, end);
    }
    if (unit == end) return;
    if (kPlanar || tile.cut.folded == 1) {
      own = load_vector(x + tile.offset(unit));
    } else {  // of the unit's first pixel, so that all copies of a channel have the same shift
      const T* from =
          x + (static_cast<Index>(tile.stream) * tile.cut.units + unit) * tile.cut.channels;
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        own.values[k] = from[tile.image_channel(tile.lane * kVector + k)];
      }
    }
  }
  /// `shared`: kCount floats for each channel. Ends with a barrier.
  __device__ __forceinline__ void store(const Tile<T, kPlanar>& tile,
                                        const Table<T, kPlanar>& shifts, float* shared) const {
    if (tile.strand < kCount && tile.has_vectors) {
      float* to = shared + tile.strand * tile.width + tile.lane * kVector;
      if constexpr (kPlanar) {
        float mean = 0;
#pragma unroll
        for (int k = 0; k < kVector; ++k) mean += own[k] * (1.0f / kVector);
        *to = mean;
      } else {
#pragma unroll
        for (int k = 0; k < kVector; ++k) to[k] = own[k];
      }
    }
    __syncthreads();
    for (int k = threadIdx.x; k < tile.width; k += blockDim.x) {
      const float* from = shared + k;
      shifts.at(0, k) =
          middle(from[0], from[tile.width], from[2 * tile.width], from[3 * tile.width]);
    }
    __syncthreads();
  }
};

/// Adds a vector, shifted.
template <int kVector>
__device__ __forceinline__ void add_moments(const float (&values)[kVector],
                                            const float (&shift)[kVector], float (&sum)[kVector],
                                            float (&squares)[kVector]) {
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    const float d = values[k] - shift[k];
    sum[k] += d;
    squares[k] = fmaf(d, d, squares[k]);
  }
}

template <typename T, int kVector>
__device__ __forceinline__ void add_moments(const Packed<T>& packed, const float (&shift)[kVector],
                                            float (&sum)[kVector], float (&squares)[kVector]) {
  float values[kVector];
  packed.unpack(values);
  add_moments(values, shift, sum, squares);
}

struct NormalizeArguments {
  const void *x, *residual;
  void* y;
  unsigned char* passes;
  ForwardChannels channels;
  const Coefficients<float>* coefficients;  // in a second pass; the running statistics if null
  Activation activation;
  bool streaming;  // y does not stay in L2
};
/// Of a call, without a first pass.
inline NormalizeArguments arguments_of(const BatchNormActForward& call) {
  return {.x = call.x.data,
          .residual = call.residual.data,
          .y = call.y.data,
          .passes = static_cast<unsigned char*>(call.passes.data),
          .channels = channels_of(call),
          .coefficients = nullptr,
          .activation = call.activation,
          .streaming = false};
}

/// v of a vector. `table`: a Table or Held.
template <bool kResidual, typename T, int kVector, typename Values>
__device__ __forceinline__ void normalize(const Values& table, int lane, const Packed<T>& x,
                                          const Packed<T>& residual, float (&v)[kVector]) {
  float mean[kVector], scale[kVector], shift[kVector];
  x.unpack(v);
  table.get(kMean, lane, mean);
  table.get(kScale, lane, scale);
  table.get(kShift, lane, shift);
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    v[k] = Coefficients<float>{mean[k], scale[k], shift[k], 0}(v[k]);
  }
  if constexpr (kResidual) {
    float other[kVector];
    residual.unpack(other);
#pragma unroll
    for (int k = 0; k < kVector; ++k) v[k] += other[k];
  }
}

/// Computes and stores y and the bits of the unit at `at`.
template <bool kResidual, Kinds kKinds = Kinds::all, typename T, bool kPlanar, typename Values>
__device__ __forceinline__ void write_normalized(const NormalizeArguments& a,
                                                 const Tile<T, kPlanar>& tile, const Values& table,
                                                 bool blank, Index at, const Packed<T>& x,
                                                 const Packed<T>& residual) {
  constexpr int kVector = Vector<T>::kSize;
  float v[kVector];
  normalize<kResidual>(table, tile.lane, x, residual, v);
  if (kResidual && a.passes != nullptr) {
    unsigned bits = blank ? 0 : passing<T>(a.activation, v);
    if constexpr (kVector == 4) {  // two neighbouring lanes share a byte
      bits |= __shfl_xor_sync(3u << (threadIdx.x & 30), bits, 1) << 4;
    }
    if (kVector == 8 || threadIdx.x % 2 == 0) {
      a.passes[at / 8] = static_cast<unsigned char>(bits);
    }
  }
  activate_all<T, kKinds>(a.activation, v);
#pragma unroll
  for (int k = 0; k < kVector; ++k) v[k] = blank ? 0.0f : v[k];
  Packed<T> y;
  y.pack(v);
  y.store(static_cast<T*>(a.y) + at, a.streaming);
}

// ---- Backward.

struct GradientArguments {
  const void *dy, *x, *residual;
  const unsigned char* passes;
  void *dx, *dresidual;
  BackwardChannels channels;
  GradientParts<float> parts;             // the second pass: combined here if there are any
  const Corrections<float>* corrections;  // else these, the group's if null, none without a group
  Activation activation;
  bool streaming;
};
inline GradientArguments arguments_of(const BatchNormActBackward& call) {
  return {.dy = call.dy.data,
          .x = call.x.data,
          .residual = call.residual.data,
          .passes = static_cast<const unsigned char*>(call.passes.data),
          .dx = call.dx.data,
          .dresidual = call.dresidual.data,
          .channels = channels_of(call),
          .parts = {},
          .corrections = nullptr,
          .activation = call.activation,
          .streaming = false};
}

/// The vectors of a unit that dv depends on.
template <typename T, bool kResidual, Kinds kKinds = Kinds::all>
struct GradientVectors {
  static constexpr int kVector = Vector<T>::kSize;
  Packed<T> dy, x, residual;  // the residual only if kResidual
  unsigned bits;

  __device__ __forceinline__ void load(const GradientArguments& a, Index at) {
    dy.load(static_cast<const T*>(a.dy) + at);
    x.load(static_cast<const T*>(a.x) + at);
    if constexpr (kResidual) residual.load(static_cast<const T*>(a.residual) + at);
    if (!kResidual && a.passes != nullptr) bits = a.passes[at / 8] >> at % 8;
  }

  /// dv, and x without its mean.
  template <typename Values>
  __device__ __forceinline__ void gradient(const GradientArguments& a, const Values& table,
                                           int lane, float (&d)[kVector],
                                           float (&centred)[kVector]) const {
    float mean[kVector];
    dy.unpack(d);
    x.unpack(centred);
    table.get(kMean, lane, mean);
#pragma unroll
    for (int k = 0; k < kVector; ++k) centred[k] -= mean[k];
    if (!kResidual && a.passes != nullptr) return keep_passing(bits, d);
    if (a.activation == Activation::identity) return;
    float scale[kVector], v[kVector];
    table.get(kScale, lane, scale);
    table.get(kShift, lane, v);
#pragma unroll
    for (int k = 0; k < kVector; ++k) v[k] = fmaf(centred[k], scale[k], v[k]);
    if constexpr (kResidual) {
      residual.unpack(mean);
#pragma unroll
      for (int k = 0; k < kVector; ++k) v[k] += mean[k];
    }
    differentiate_all<T, kKinds>(a.activation, v, d);
  }
};

template <typename T, bool kPlanar>
__device__ __forceinline__ float fill_saved(const Tile<T, kPlanar>& tile,
                                            const Table<T, kPlanar>& table,
                                            const BackwardChannels& channels, int k) {
  const Coefficients<float> saved = saved_coefficients<T>(channels, tile.channel(k));
  table.at(kMean, k) = saved.mean;
  table.at(kScale, k) = saved.scale;
  table.at(kShift, k) = saved.shift;
  return saved.inverse;
}

/// Adds dv and dv * (x - mean) of a vector.
template <typename T, bool kResidual, Kinds kKinds, int kVector, typename Values>
__device__ __forceinline__ void add_gradients(const GradientArguments& a, const Values& table,
                                              int lane,
                                              const GradientVectors<T, kResidual, kKinds>& vectors,
                                              float (&sum)[kVector], float (&products)[kVector]) {
  float d[kVector], centred[kVector];
  vectors.gradient(a, table, lane, d, centred);
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    sum[k] += d[k];
    products[k] = fmaf(d[k], centred[k], products[k]);
  }
}

/// d becomes dx from dv.
template <int kVector, typename Values>
__device__ __forceinline__ void differentiate_norm(const GradientArguments& a, const Values& table,
                                                   int lane, const float (&centred)[kVector],
                                                   float (&d)[kVector]) {
  float row[kVector];
  if (a.channels.training) {
    table.get(kOffset, lane, row);
#pragma unroll
    for (int k = 0; k < kVector; ++k) d[k] -= row[k];
    table.get(kSlope, lane, row);
#pragma unroll
    for (int k = 0; k < kVector; ++k) d[k] = fmaf(-centred[k], row[k], d[k]);
  }
  table.get(kScale, lane, row);
#pragma unroll
  for (int k = 0; k < kVector; ++k) d[k] *= row[k];
}

/// Computes and stores dx and dresidual of the unit at `at`.
template <typename T, bool kPlanar, bool kResidual, Kinds kKinds, typename Values>
__device__ __forceinline__ void write_gradients(
    const GradientArguments& a, const Tile<T, kPlanar>& tile, const Values& table, bool blank,
    Index at, const GradientVectors<T, kResidual, kKinds>& vectors) {
  constexpr int kVector = Vector<T>::kSize;
  float d[kVector], centred[kVector];
  vectors.gradient(a, table, tile.lane, d, centred);
  const auto store = [&](void* to) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) d[k] = blank ? 0.0f : d[k];
    Packed<T> out;
    out.pack(d);
    out.store(static_cast<T*>(to) + at, a.streaming);
  };
  if (a.dresidual != nullptr) store(a.dresidual);
  if (a.dx == nullptr) return;
  differentiate_norm(a, table, tile.lane, centred, d);
  store(a.dx);
}

}  // namespace fusewise::cuda
