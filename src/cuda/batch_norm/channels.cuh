#pragma once

// What the kernels of BatchNorm do once per channel: combine the partial results of the first pass,
// update the running statistics, and derive the coefficients of the second pass.

#include "cuda/batch_norm/arguments.h"
#include "cuda/reduce.cuh"
#include "cuda/vector.cuh"

namespace fusewise::cuda {

/// Weight, bias, running statistics and their gradients: x's type T, or float32 beside half
/// precision (`wide`). An absent one reads as `absent`.
template <typename T>
__device__ __forceinline__ Accumulator<T> parameter(const void* data, bool wide, long long i,
                                                    Accumulator<T> absent) {
  if (data == nullptr) return absent;
  if (sizeof(T) == 2 && wide) return static_cast<const float*>(data)[i];
  return to_accumulator<Accumulator<T>>(static_cast<const T*>(data)[i]);
}
/// Several of them, loaded side by side: converted one by one, each would wait for the one before.
/// `values` come in as what absent ones read as.
template <typename T, int kCount>
__device__ __forceinline__ void parameters(const void* const (&data)[kCount], bool wide,
                                           long long i, Accumulator<T> (&values)[kCount]) {
  const auto load = [&]<typename Stored>(Stored zero) {
    Stored raw[kCount];
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      raw[j] = data[j] == nullptr ? zero : static_cast<const Stored*>(data[j])[i];
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (data[j] != nullptr) values[j] = to_accumulator<Accumulator<T>>(raw[j]);
    }
  };
  if (sizeof(T) == 2 && wide) {
    load(0.0f);
  } else {
    load(T(0.0f));
  }
}
template <typename T>
__device__ __forceinline__ void set_parameter(void* data, bool wide, long long i,
                                              Accumulator<T> value) {
  if (data == nullptr) return;
  if (sizeof(T) == 2 && wide) {
    static_cast<float*>(data)[i] = static_cast<float>(value);
  } else {
    static_cast<T*>(data)[i] = from_accumulator<T>(value);
  }
}

/// v = (x - mean) * scale + shift. Every kernel computes it exactly so: then backward takes the
/// same side of relu as forward. With x * scale + (shift - mean * scale) it would cancel.
template <typename A>
struct alignas(4 * sizeof(A)) Coefficients {
  A mean, scale, shift, inverse;

  __device__ __forceinline__ A operator()(A x) const { return fma(x - mean, scale, shift); }
};

/// dx = scale * (dv - offset - (x - mean) * slope), with offset and slope 0 in inference.
template <typename A>
struct alignas(2 * sizeof(A)) Corrections {
  A offset, slope;
};

/// Each block of the first pass writes the moments of its slab of pixels. The means are float64: in
/// float32, the difference of two large means would have lost the digits that the variance needs.
template <typename A>
struct MomentParts {
  double* counts;  ///< [S, slabs]
  double* means;   ///< [S, slabs, C], 0 where the count is 0
  A* squares;      ///< [S, slabs, C]: sums of squared differences from that mean
  int slabs;
};

/// The same in backward.
template <typename A>
struct GradientParts {
  double* counts;  ///< [S, slabs]
  A* dv;           ///< [S, slabs, C]: sums of dv
  A* dvx;          ///< [S, slabs, C]: sums of dv * (x - mean)
  int slabs;
};

/// NaN stays NaN.
__device__ __forceinline__ double above_0(double value) { return value < 0 ? 0.0 : value; }

/// Moments about `reference`, which is near the mean. They add without cancelling.
struct Moments {
  double count = 0, sum = 0, squares = 0;

  __device__ __forceinline__ void add(double n, double mean, double own, double reference) {
    const double d = mean - reference;
    count += n;
    sum += n * d;
    squares += n * d * d + own;
  }
  __device__ __forceinline__ void add(const Moments& other) {
    count += other.count;
    sum += other.sum;
    squares += other.squares;
  }
  __device__ double mean(double reference) const {
    return count > 0 ? reference + sum / count : 0.0;
  }
  /// The sum of squared differences from the mean.
  __device__ double central() const {
    return count > 0 ? above_0(squares - sum * (sum / count)) : 0.0;
  }
};

/// Bytes of shared memory that `combine` needs for results of type Result.
template <typename Result>
constexpr std::size_t combine_bytes(int threads, int width) {
  return sizeof(Result) * (threads > width ? threads : width);
}

/// Adds what part(k, i) returns for i < slabs in a fixed order and calls finish(k, sum) for
/// k < width. Called by the whole block. Ends with a barrier.
template <typename Result, typename Part, typename Finish>
__device__ void combine(int slabs, int width, void* shared, Part part, Finish finish) {
  Result* const sums = static_cast<Result*>(shared);
  const int threads = static_cast<int>(blockDim.x);
  const int rows = max(1, min(slabs, threads / width));
  for (int t = threadIdx.x; t < rows * width; t += threads) {
    const int row = t / width, k = t - row * width;
    Result sum{};
#pragma unroll 4
    for (int i = row; i < slabs; i += rows) part(sum, k, i);
    sums[t] = sum;
  }
  __syncthreads();
  for (int k = threadIdx.x; k < width; k += threads) {
    Result sum = sums[k];
    for (int row = 1; row < rows; ++row) sum.add(sums[row * width + k]);
    finish(k, sum);
  }
  __syncthreads();
}

/// The first slab with values: its mean serves as the reference of the sums.
__device__ __forceinline__ int first_slab(const double* counts, int slabs) {
  int first = 0;
  while (first < slabs - 1 && counts[first] == 0) ++first;
  return first;
}

/// Calls finish(k, count, mean, variance) for the `width` channels from `first`. See combine.
template <typename A, typename Finish>
__device__ void combine_moments(const MomentParts<A>& parts, long long stream, long long channels,
                                long long first, int width, void* shared, Finish finish) {
  const double* counts = parts.counts + stream * parts.slabs;
  const long long start = stream * parts.slabs * channels + first;
  const double* means = parts.means + start;
  const A* squares = parts.squares + start;
  const double* reference = means + first_slab(counts, parts.slabs) * channels;
  combine<Moments>(
      parts.slabs, width, shared,
      [&](Moments& sum, int k, int i) {
        const long long at = i * channels + k;
        sum.add(counts[i], means[at], static_cast<double>(squares[at]), reference[k]);
      },
      [&](int k, const Moments& sum) {
        const double variance = sum.count > 0 ? sum.central() / sum.count : 0.0;
        finish(k, sum.count, sum.mean(reference[k]), variance);
      });
}

template <typename A>
struct GradientSums {
  double count = 0;
  A dv = 0, dvx = 0;

  __device__ __forceinline__ void add(const GradientSums& other) {
    count += other.count;
    dv += other.dv;
    dvx += other.dvx;
  }
};

/// Calls finish(k, sums) for the `width` channels from `first`. See combine.
template <typename A, typename Finish>
__device__ void combine_gradients(const GradientParts<A>& parts, long long stream,
                                  long long channels, long long first, int width, void* shared,
                                  Finish finish) {
  const double* counts = parts.counts + stream * parts.slabs;
  const long long start = stream * parts.slabs * channels + first;
  combine<GradientSums<A>>(
      parts.slabs, width, shared,
      [&](GradientSums<A>& sum, int k, int i) {
        const long long at = start + i * channels + k;
        sum.add({counts[i], parts.dv[at], parts.dvx[at]});
      },
      finish);
}

/// The number of calls, for the cumulative average.
__device__ __forceinline__ long long calls_of(const Counter& counter, long long stream) {
  return counter.calls == nullptr ? 1 : counter.calls[counter.per_stream ? stream : 0];
}

/// Advances a stream's counter if it has more than one value, or that of all streams. Called by one
/// warp for each stream.
__device__ __forceinline__ void count_call(const Counter& counter, long long stream,
                                           const bool* blanked, long long samples,
                                           long long pixels) {
  if (counter.calls == nullptr || (!counter.per_stream && stream > 0)) return;
  const int lane = threadIdx.x % 32;
  if (!counter.per_stream) {
    if (lane == 0) ++*counter.calls;
    return;
  }
  long long present = samples;
  if (blanked != nullptr) {
    present = 0;
    for (long long n = lane; n < samples; n += 32) present += !blanked[stream * samples + n];
    present = warp_sum(present);
  }
  if (lane == 0 && present * pixels > 1) ++counter.calls[stream];
}

/// Writes a column of a [S, 3, C] tensor, if there is one.
template <typename A>
__device__ __forceinline__ void set_column(void* to, long long at, long long channels, double count,
                                           double first, double second) {
  if (to == nullptr) return;
  A* const column = static_cast<A*>(to) + 2 * (at / channels) * channels + at;
  column[0] = static_cast<A>(count);
  column[channels] = static_cast<A>(first);
  column[2 * channels] = static_cast<A>(second);
}

template <typename A>
__device__ __forceinline__ A inverse_deviation(A variance, A eps) {
  return A(1) / sqrt(variance + eps);
}

template <typename A>
struct RunningStatistics {
  A mean = 0, variance = 0;
};

/// Those before this call, or 0 if it does not update them.
template <typename T>
__device__ __forceinline__ RunningStatistics<Accumulator<T>> running_statistics(
    const ForwardChannels& f, long long at) {
  using A = Accumulator<T>;
  if (!f.training) return {};
  return {parameter<T>(f.running_mean, f.wide, at, A(0)),
          parameter<T>(f.running_var, f.wide, at, A(0))};
}

/// Writes a channel's saved and running statistics. `old`: the running ones before this call.
template <typename T>
__device__ void save_channel(const ForwardChannels& f, long long at, double count, double mean,
                             double variance, Accumulator<T> inverse, long long calls,
                             const RunningStatistics<Accumulator<T>>& old) {
  using A = Accumulator<T>;
  set_column<A>(f.statistics, at, f.channels, count, mean, variance);
  if (f.mean != nullptr) {
    static_cast<A*>(f.mean)[at] = static_cast<A>(mean);
    static_cast<A*>(f.inverse)[at] = inverse;
  }
  if (f.training && f.running_mean != nullptr && count > 1) {
    const double factor = f.momentum < 0 ? 1.0 / static_cast<double>(calls) : f.momentum;
    const auto update = [&](void* running, double before, double now) {
      set_parameter<T>(running, f.wide, at, static_cast<A>(before + factor * (now - before)));
    };
    update(f.running_mean, old.mean, mean);
    update(f.running_var, old.variance, variance * count / (count - 1));
  }
}

/// From a channel's statistics to its coefficients. `write`: also the saved and running statistics.
template <typename T>
__device__ Coefficients<Accumulator<T>> finish_channel(const ForwardChannels& f, long long at,
                                                       double count, double mean, double variance,
                                                       long long calls, bool write) {
  using A = Accumulator<T>;
  const A inverse = inverse_deviation(static_cast<A>(variance), static_cast<A>(f.eps));
  if (write) {
    save_channel<T>(f, at, count, mean, variance, inverse, calls, running_statistics<T>(f, at));
  }
  return {static_cast<A>(mean), inverse * parameter<T>(f.weight, f.wide, at, A(1)),
          parameter<T>(f.bias, f.wide, at, A(0)), inverse};
}

/// The coefficients in inference, from the running statistics.
template <typename T>
__device__ __forceinline__ Coefficients<Accumulator<T>> running_coefficients(
    const ForwardChannels& f, long long at, bool write) {
  using A = Accumulator<T>;
  A values[4] = {A(0), A(0), A(1), A(0)};
  parameters<T>({f.running_mean, f.running_var, f.weight, f.bias}, f.wide, at, values);
  const auto [mean, variance, weight, bias] = values;
  const A inverse = inverse_deviation(variance, static_cast<A>(f.eps));
  if (write) save_channel<T>(f, at, 0, mean, variance, inverse, 1, {});
  return {mean, inverse * weight, bias, inverse};
}

/// The coefficients in backward, from what forward saved.
template <typename T>
__device__ __forceinline__ Coefficients<Accumulator<T>> saved_coefficients(
    const BackwardChannels& b, long long at) {
  using A = Accumulator<T>;
  const A inverse = static_cast<const A*>(b.inverse)[at], mean = static_cast<const A*>(b.mean)[at];
  A values[2] = {A(1), A(0)};
  parameters<T>({b.weight, b.bias}, b.wide, at, values);
  return {mean, inverse * values[0], values[1], inverse};
}

/// What dx needs besides dv, from the number of values and the sums over all of them.
template <typename A>
__device__ __forceinline__ Corrections<A> corrections(double count, A dbias, A dweight, A inverse) {
  if (!(count > 0)) return {A(0), A(0)};
  const A n = static_cast<A>(count);
  return {dbias / n, dweight / n * inverse};
}

/// From a channel's sums in this call to what dx needs. `write`: also dweight and dbias.
template <typename T>
__device__ Corrections<Accumulator<T>> finish_gradient(const BackwardChannels& b, long long at,
                                                       const GradientSums<Accumulator<T>>& sums,
                                                       Accumulator<T> inverse, bool write) {
  const auto dweight = sums.dvx * inverse;
  if (write) {
    set_parameter<T>(b.dweight, b.wide, at, dweight);
    set_parameter<T>(b.dbias, b.wide, at, sums.dv);
    set_column<Accumulator<T>>(b.dgroup, at, b.channels, sums.count, sums.dv, dweight);
  }
  return corrections(sums.count, sums.dv, dweight, inverse);
}

/// What dx needs from the sums over all processes.
template <typename T>
__device__ __forceinline__ Corrections<Accumulator<T>> group_corrections(const BackwardChannels& b,
                                                                         long long at,
                                                                         Accumulator<T> inverse) {
  using A = Accumulator<T>;
  const long long stream = at / b.channels;
  const A* group = static_cast<const A*>(b.group) + 2 * stream * b.channels + at;
  return corrections(static_cast<double>(group[0]), group[b.channels], group[2 * b.channels],
                     inverse);
}

}  // namespace fusewise::cuda
