// y = act(z) with relu's bits; dz = dy * act' with the sums of its columns.
// Memory: forward reads z and writes y once, backward reads dy and what was kept and writes dz
// once; relu's bits are a sixteenth to a sixty-fourth of that. Bound by memory bandwidth.

#include <algorithm>

#include "common/check.h"
#include "common/math.h"
#include "common/matrix.h"
#include "common/scratch.h"
#include "cuda/launch.cuh"
#include "cuda/linear_act/passes.cuh"
#include "cuda/vector.cuh"

namespace fusewise::cuda {
namespace {

constexpr int kGroup = 8;               // columns of a thread: one byte of bits
constexpr int kLanes = 32;              // threads side by side
constexpr int kTile = kGroup * kLanes;  // columns of a block
constexpr int kStrands = 8;             // threads below each other
constexpr int kThreads = kLanes * kStrands;
constexpr int kDepth = 4;  // rows that a thread has in flight
constexpr int kBlocksPerMultiprocessor = 8;

/// Eight adjacent elements of a row: as vectors where addresses allow it, else one by one.
template <typename T, bool kVectors>
struct Row {
  using A = Accumulator<T>;
  A values[kGroup];

  __device__ __forceinline__ static Row load(const T* from, long long stride, int count) {
    Row row;
    if constexpr (kVectors) {
      constexpr int kWidth = Vector<T>::kSize;
#pragma unroll
      for (int i = 0; i < kGroup; i += kWidth) {
        const Vector<T> vector = load_vector(from + i);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) row.values[i + j] = vector[j];
      }
    } else {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        row.values[i] = i < count ? to_accumulator<A>(from[i * stride]) : A(0);
      }
    }
    return row;
  }

  __device__ __forceinline__ void store(T* to, int count) const {
    if constexpr (kVectors) {
      constexpr int kWidth = Vector<T>::kSize;
#pragma unroll
      for (int i = 0; i < kGroup; i += kWidth) {
        Vector<T> vector;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) vector.set(j, values[i + j]);
        store_vector(to + i, vector);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        if (i < count) to[i] = from_accumulator<T>(values[i]);
      }
    }
  }

  /// Rounded to T, as they will be in memory.
  __device__ __forceinline__ void round() {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) values[i] = to_accumulator<A>(from_accumulator<T>(values[i]));
  }
};

/// Which eight columns and which rows a thread has. Column tiles are the fastest, so that the grid
/// has one dimension and no limit of 65535.
struct Place {
  long long column, first_row, end_row;
  int count;  // columns that exist, of the eight

  __device__ Place(long long rows, long long columns, long long chunk, long long block) {
    const long long tiles = (columns + kTile - 1) / kTile;
    const long long index = block / tiles;
    column = (block - index * tiles) * kTile + threadIdx.x % kLanes * kGroup;
    first_row = index * chunk + threadIdx.x / kLanes;
    end_row = min(rows, (index + 1) * chunk);
    count = static_cast<int>(min(static_cast<long long>(kGroup), columns - column));
  }
};

struct ActivationArguments {
  const void* z;
  void* y;
  unsigned char* bits;
  long long rows, columns, chunk, z_stride, y_stride, bit_stride;
};

template <Activation kKind, typename T, bool kVectors>
__global__ void __launch_bounds__(kThreads) activate_rows(const ActivationArguments a) {
  wait_for_previous_kernel();
  allow_next_kernel();
  // The last rows first: they are what the product before has left in the cache.
  const Place place(a.rows, a.columns, a.chunk, gridDim.x - 1 - blockIdx.x);
  if (place.count <= 0) return;
  const T* z = static_cast<const T*>(a.z) + place.column;
  T* y = static_cast<T*>(a.y) + place.column;
  for (long long row = place.first_row; row < place.end_row; row += kDepth * kStrands) {
    Row<T, kVectors> values[kDepth];
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      const long long at = row + i * kStrands;
      if (at < place.end_row) {
        values[i] = Row<T, kVectors>::load(z + at * a.z_stride, 1, place.count);
      }
    }
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      const long long at = row + i * kStrands;
      if (at >= place.end_row) break;
      if (a.bits != nullptr) {
        unsigned open = 0;
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
          open |= static_cast<unsigned>(j < place.count && !(values[i].values[j] <= 0)) << j;
        }
        a.bits[at * a.bit_stride + place.column / kGroup] = static_cast<unsigned char>(open);
      }
      if (a.y == nullptr) continue;
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        values[i].values[j] = math::activate<kKind>(values[i].values[j]);
      }
      values[i].store(y + at * a.y_stride, place.count);
    }
  }
}

enum class Keeps { nothing, bits, values };

struct GradientArguments {
  const void *dy, *kept;
  void *dz, *partial;
  long long rows, columns, chunk, dy_stride, dy_step, kept_stride, dz_stride;
};

template <Activation kKind, Keeps kKeeps, typename T, bool kVectors>
__global__ void __launch_bounds__(kThreads) differentiate_rows(const GradientArguments a) {
  using A = Accumulator<T>;
  using Values = Row<T, kVectors>;
  __shared__ A parts[kStrands][kTile];
  wait_for_previous_kernel();
  allow_next_kernel();
  // Last rows first, as above.
  const long long block = gridDim.x - 1 - blockIdx.x;
  const Place place(a.rows, a.columns, a.chunk, block);
  const T* dy = static_cast<const T*>(a.dy) + place.column * a.dy_step;
  T* dz = static_cast<T*>(a.dz) + place.column;
  A sums[kGroup] = {};
  for (long long row = place.first_row; row < place.end_row; row += kDepth * kStrands) {
    if (place.count <= 0) break;
    Values gradients[kDepth], kept[kKeeps == Keeps::values ? kDepth : 1];
    unsigned open[kDepth];
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      const long long at = row + i * kStrands;
      if (at >= place.end_row) break;
      gradients[i] = Values::load(dy + at * a.dy_stride, a.dy_step, place.count);
      if constexpr (kKeeps == Keeps::bits) {
        const auto* bits = static_cast<const unsigned char*>(a.kept);
        open[i] = bits[at * a.kept_stride + place.column / kGroup];
      }
      if constexpr (kKeeps == Keeps::values) {
        const T* values = static_cast<const T*>(a.kept) + place.column;
        kept[i] = Values::load(values + at * a.kept_stride, 1, place.count);
      }
    }
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      const long long at = row + i * kStrands;
      if (at >= place.end_row) break;
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        A& gradient = gradients[i].values[j];
        if constexpr (kKeeps == Keeps::bits) gradient = open[i] >> j & 1 ? gradient : A(0);
        if constexpr (kKeeps == Keeps::values) {
          gradient = math::activation_gradient<kKind>(kept[i].values[j], gradient);
        }
      }
      gradients[i].round();
      if (a.dz != nullptr) gradients[i].store(dz + at * a.dz_stride, place.count);
#pragma unroll
      for (int j = 0; j < kGroup; ++j) sums[j] += gradients[i].values[j];
    }
  }
  if (a.partial == nullptr) return;
  const int strand = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
#pragma unroll
  for (int j = 0; j < kGroup; ++j) parts[strand][lane * kGroup + j] = sums[j];
  __syncthreads();
  static_assert(kThreads == kTile);
  const long long tiles = (a.columns + kTile - 1) / kTile;
  const long long index = block / tiles, column = (block - index * tiles) * kTile + threadIdx.x;
  if (column >= a.columns) return;
  A sum = 0;
#pragma unroll
  for (int i = 0; i < kStrands; ++i) sum += parts[i][threadIdx.x];
  static_cast<A*>(a.partial)[index * a.columns + column] = sum;
}

constexpr int kSumColumns = 32, kSumRows = 16;

/// db[column] = the sum of the chunks' sums, in a fixed order.
template <typename T, typename A>
__global__ void __launch_bounds__(kSumColumns* kSumRows)
    sum_chunks(const A* partial, long long chunks, long long columns, T* db) {
  __shared__ A parts[kSumRows][kSumColumns];
  wait_for_previous_kernel();
  allow_next_kernel();
  const int lane = threadIdx.x % kSumColumns, strand = threadIdx.x / kSumColumns;
  const long long column = static_cast<long long>(blockIdx.x) * kSumColumns + lane;
  A sum = 0;
  if (column < columns) {
#pragma unroll 4
    for (long long i = strand; i < chunks; i += kSumRows) sum += partial[i * columns + column];
  }
  parts[strand][lane] = sum;
  __syncthreads();
  if (strand != 0 || column >= columns) return;
  for (int i = 1; i < kSumRows; ++i) sum += parts[i][lane];
  db[column] = from_accumulator<T>(sum);
}

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// How many rows a block has: so many that all blocks run at once, but several for each thread.
struct Cut {
  std::int64_t tiles, chunk, chunks;

  Cut(const Context& context, std::int64_t rows, std::int64_t columns)
      : tiles(divide_up(columns, kTile)) {
    const std::int64_t blocks =
        std::int64_t{limits_of(context.device).multiprocessors} * kBlocksPerMultiprocessor;
    const std::int64_t wanted = std::max<std::int64_t>(1, blocks / tiles);
    chunk = std::max<std::int64_t>(divide_up(rows, wanted), kStrands);
    chunks = divide_up(rows, chunk);
  }
};

template <typename T>
bool takes_vectors(const TensorView& t) {
  if (!t.defined()) return true;
  const bool aligned = reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0;
  return aligned && has_adjacent_rows(t) && t.sizes[1] % kGroup == 0 &&
         matrix_of(t).stride % Vector<T>::kSize == 0;
}

/// body(std::true_type or false_type): float64 has no vector kernels, it is for checks.
template <typename T, typename Body>
void dispatch_vectors(bool vectors, Body body) {
  if constexpr (sizeof(T) < 8) {
    if (vectors) return body(std::true_type{});
  }
  body(std::false_type{});
}

/// body<kind>()
template <typename Body>
void dispatch_activation(Activation kind, Body body) {
  switch (kind) {
    case Activation::relu:
      return body.template operator()<Activation::relu>();
    case Activation::gelu:
      return body.template operator()<Activation::gelu>();
    case Activation::gelu_tanh:
      return body.template operator()<Activation::gelu_tanh>();
    case Activation::silu:
      return body.template operator()<Activation::silu>();
    case Activation::identity:
      return body.template operator()<Activation::identity>();
  }
}

}  // namespace

void activate(const Context& context, const ActivationPass& pass) {
  const std::int64_t rows = pass.z.sizes[0], columns = pass.z.sizes[1];
  if (rows == 0 || columns == 0) return;
  const Cut cut(context, rows, columns);
  const ActivationArguments arguments{
      pass.z.data,
      pass.y.data,
      static_cast<unsigned char*>(pass.bits.data),
      rows,
      columns,
      cut.chunk,
      matrix_of(pass.z).stride,
      pass.y.defined() ? matrix_of(pass.y).stride : 0,
      pass.bits.defined() ? matrix_of(pass.bits).stride : 0,
  };
  dispatch_dtype(pass.z.dtype, [&]<typename T>(T) {
    const bool vectors = takes_vectors<T>(pass.z) && takes_vectors<T>(pass.y);
    dispatch_vectors<T>(vectors, [&](auto has_vectors) {
      dispatch_activation(pass.activation, [&]<Activation kKind>() {
        launch_kernel({context, cut.tiles * cut.chunks, kThreads, 0, true}, "activating",
                      activate_rows<kKind, T, decltype(has_vectors)::value>, arguments);
      });
    });
  });
}

void differentiate(const Context& context, const GradientPass& pass) {
  const std::int64_t rows = pass.dy.sizes[0], columns = pass.dy.sizes[1];
  if (columns == 0) return;
  const Cut cut(context, rows, columns);
  const std::int64_t size = size_of(pass.dy.dtype);
  const bool sums = pass.db.defined();
  const Scratch<char> partial(context,
                              sums ? cut.chunks * columns * std::max<std::int64_t>(size, 4) : 0);
  const bool bits = pass.activation == Activation::relu && pass.kept.dtype == DType::u8;
  const bool nothing = pass.activation == Activation::identity;
  const bool rows_of_dy = has_adjacent_rows(pass.dy);
  const GradientArguments arguments{
      pass.dy.data,
      pass.kept.data,
      pass.dz.data,
      partial.data(),
      rows,
      columns,
      cut.chunk,
      rows_of_dy ? matrix_of(pass.dy).stride : pass.dy.strides[0],
      rows_of_dy ? 1 : pass.dy.strides[1],
      nothing ? 0 : matrix_of(pass.kept).stride,
      pass.dz.defined() ? matrix_of(pass.dz).stride : 0,
  };
  dispatch_dtype(pass.dy.dtype, [&]<typename T>(T) {
    using A = Accumulator<T>;
    const bool vectors = takes_vectors<T>(pass.dy) && takes_vectors<T>(pass.dz) &&
                         (bits || nothing || takes_vectors<T>(pass.kept));
    dispatch_vectors<T>(vectors, [&](auto has_vectors) {
      constexpr bool kVectors = decltype(has_vectors)::value;
      const auto launch = [&]<Activation kKind, Keeps kKeeps>() {
        launch_kernel({context, cut.tiles * cut.chunks, kThreads, 0, true}, "differentiating",
                      differentiate_rows<kKind, kKeeps, T, kVectors>, arguments);
      };
      dispatch_activation(pass.activation, [&]<Activation kKind>() {
        if constexpr (kKind == Activation::identity) {
          launch.template operator()<kKind, Keeps::nothing>();
        } else if (kKind == Activation::relu && bits) {
          launch.template operator()<Activation::relu, Keeps::bits>();
        } else {
          launch.template operator()<kKind, Keeps::values>();
        }
      });
    });
    if (!sums) return;
    launch_kernel({context, divide_up(columns, kSumColumns), kSumColumns * kSumRows, 0, true},
                  "summing up a bias gradient", sum_chunks<T, A>,
                  reinterpret_cast<const A*>(partial.data()), cut.chunks, columns,
                  static_cast<T*>(pass.db.data));
  });
}

}  // namespace fusewise::cuda
