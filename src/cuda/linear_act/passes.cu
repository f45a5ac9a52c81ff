// y = act(z) with relu's bits; dz = dy * act' with its column sums.
// Memory: forward reads z and writes y once. Backward reads dy and the tensor saved by forward and
// writes dz once. relu's bits are a sixteenth to a sixty-fourth of that. Bound by memory bandwidth.

#include <algorithm>

#include "common/check.h"
#include "common/divide.h"
#include "common/matrix.h"
#include "common/scratch.h"
#include "cuda/fast_math.cuh"
#include "cuda/launch.cuh"
#include "cuda/linear_act/passes.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vector.cuh"

namespace fusewise::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kByte = 8;  // columns whose bits share a byte
/// Blocks per SM for the kernels with vectors: limits their registers.
constexpr int kBlocks = 4, kBlocksWithValues = 3;

/// Adjacent columns per thread: one vector, so that a warp accesses contiguous memory. A kernel
/// that only reads z and writes bits has one byte of bits per thread, so that a warp writes a whole
/// sector.
template <typename T, bool kVectors, bool kOnlyBits = false>
constexpr int kColumns = kVectors && !kOnlyBits ? Vector<T>::kSize : kByte;

/// Rows that a thread has in flight: 64 bytes.
template <typename T, int kGroup>
constexpr int kDepth = std::max<int>(1, 64 / (kGroup * sizeof(T)));

/// A block has up to 32 groups of columns and at least 8 rows at a time. To sum few rows, it has 4
/// groups and 64 rows at a time and iterates over all rows, so that no second summation is needed.
constexpr int kWideShift = 5, kNarrowShift = 2;
constexpr long long kFewRows = 512;

/// A thread's columns of a row in memory format: vectors if addresses allow it, otherwise single
/// elements with a stride. Columns past the end repeat the first one: loads without branches are
/// all in flight at once.
template <typename T, bool kVectors, int kGroup>
struct Group {
  alignas(16) T values[kGroup];

  __device__ __forceinline__ Accumulator<T> operator[](int i) const {
    return to_accumulator<Accumulator<T>>(values[i]);
  }
  __device__ __forceinline__ void set(int i, Accumulator<T> value) {
    values[i] = from_accumulator<T>(value);
  }

  __device__ __forceinline__ void load(const T* from, long long stride, int count) {
    if constexpr (kVectors) {
#pragma unroll
      for (int i = 0; i < kGroup; i += Vector<T>::kSize) {
        reinterpret_cast<Vector<T>&>(values[i]) = load_vector(from + i);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) values[i] = from[(i < count ? i : 0) * stride];
    }
  }

  __device__ __forceinline__ void store(T* to, int count) const {
    if constexpr (kVectors) {
#pragma unroll
      for (int i = 0; i < kGroup; i += Vector<T>::kSize) {
        store_vector(to + i, reinterpret_cast<const Vector<T>&>(values[i]));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        if (i < count) to[i] = values[i];
      }
    }
  }
};

/// Which columns and rows a thread has. The column tile varies fastest, so that the grid has one
/// dimension and no limit of 65535. The last rows come first, because the GEMM before has left them
/// in the cache.
struct ThreadTile {
  long long tile, index;  // of the block
  long long column, first_row, end_row;
  int lane, strand, strands;
  int count;  // columns of this thread that exist

  __device__ ThreadTile(long long rows, long long columns, long long chunk, unsigned tiles,
                        int shift, int group) {
    const unsigned block = gridDim.x - 1 - blockIdx.x;
    lane = threadIdx.x & ((1 << shift) - 1);
    strand = threadIdx.x >> shift;
    strands = kThreads >> shift;
    index = block / tiles;
    tile = static_cast<long long>(block % tiles) * (group << shift);
    column = tile + lane * group;
    first_row = index * chunk + strand;
    end_row = min(rows, (index + 1) * chunk);
    count = static_cast<int>(max(0ll, min(static_cast<long long>(group), columns - column)));
  }
};

/// The activation is a compile-time constant in the vector kernels. The others, for odd sizes,
/// check it at run time.
template <Activation kKind, typename T, bool kVectors>
__device__ __forceinline__ Accumulator<T> apply(Activation kind, Accumulator<T> z) {
  if constexpr (kVectors) return activate_as<kKind, T>(z);
  switch (kind) {
    case Activation::relu:
      return activate_as<Activation::relu, T>(z);
    case Activation::gelu:
      return activate_as<Activation::gelu, T>(z);
    case Activation::gelu_tanh:
      return activate_as<Activation::gelu_tanh, T>(z);
    case Activation::silu:
      return activate_as<Activation::silu, T>(z);
    default:
      return z;
  }
}

template <Activation kKind, typename T, bool kVectors>
__device__ __forceinline__ Accumulator<T> apply_gradient(Activation kind, Accumulator<T> z,
                                                         Accumulator<T> gradient) {
  if constexpr (kVectors) return activation_gradient_as<kKind, T>(z, gradient);
  switch (kind) {
    case Activation::relu:
      return activation_gradient_as<Activation::relu, T>(z, gradient);
    case Activation::gelu:
      return activation_gradient_as<Activation::gelu, T>(z, gradient);
    case Activation::gelu_tanh:
      return activation_gradient_as<Activation::gelu_tanh, T>(z, gradient);
    case Activation::silu:
      return activation_gradient_as<Activation::silu, T>(z, gradient);
    default:
      return gradient;
  }
}

struct ActivationArguments {
  const void* z;
  void* y;
  unsigned char* bits;
  long long rows, columns, chunk, z_stride, y_stride, bit_stride;
  unsigned tiles;
  int shift;
  Activation kind;
};

template <Activation kKind, typename T, bool kVectors, bool kOnlyBits>
__global__ void __launch_bounds__(kThreads, kVectors ? kBlocks : 1)
    activate_rows(const ActivationArguments a) {
  constexpr int kGroup = kColumns<T, kVectors, kOnlyBits>, kRows = kDepth<T, kGroup>;
  const ThreadTile mine(a.rows, a.columns, a.chunk, a.tiles, a.shift, kGroup);
  if (mine.count == 0) return;
  const T* z = static_cast<const T*>(a.z) + mine.column;
  for (long long row = mine.first_row; row < mine.end_row; row += kRows * mine.strands) {
    Group<T, kVectors, kGroup> values[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const long long at = min(row + i * mine.strands, mine.end_row - 1);
      values[i].load(z + at * a.z_stride, 1, mine.count);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const long long at = row + i * mine.strands;
      if (at >= mine.end_row) break;
      if (a.bits != nullptr) {
        unsigned open = 0;
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
          open |= static_cast<unsigned>(j < mine.count && !(values[i][j] <= 0)) << j;
        }
        if constexpr (kGroup < kByte) {  // two neighbours share a byte
          static_assert(2 * kGroup == kByte);
          open |= __shfl_xor_sync(3u << (threadIdx.x & 30), open, 1) << kGroup;
        }
        if (mine.column % kByte == 0) {
          a.bits[at * a.bit_stride + mine.column / kByte] = static_cast<unsigned char>(open);
        }
      }
      if constexpr (!kOnlyBits) {
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
          values[i].set(j, apply<kKind, T, kVectors>(a.kind, values[i][j]));
        }
        values[i].store(static_cast<T*>(a.y) + at * a.y_stride + mine.column, mine.count);
      }
    }
  }
}

/// What forward saved for backward.
enum class Keeps { nothing, bits, values };

struct GradientArguments {
  const void *dy, *kept;
  void *dz, *sums;  // sums of the chunks, or db itself if there is only one chunk
  long long rows, columns, chunk, dy_stride, dy_step, kept_stride, dz_stride;
  unsigned tiles;
  int shift;
  bool rounds;  // round to T: db itself has that type
  Activation kind;
};

template <Activation kKind, Keeps kKeeps, typename T, bool kVectors>
__global__ void __launch_bounds__(kThreads, !kVectors                 ? 1
                                            : kKeeps == Keeps::values ? kBlocksWithValues
                                                                      : kBlocks)
    differentiate_rows(const GradientArguments a) {
  using A = Accumulator<T>;
  constexpr int kGroup = kColumns<T, kVectors>, kRows = kDepth<T, kGroup>;
  __shared__ A parts[kThreads / 32][32 * kGroup];
  allow_next_kernel();
  const ThreadTile mine(a.rows, a.columns, a.chunk, a.tiles, a.shift, kGroup);
  const T* dy = static_cast<const T*>(a.dy) + mine.column * a.dy_step;
  const T* values = static_cast<const T*>(a.kept) + mine.column;
  const auto* bits = static_cast<const unsigned char*>(a.kept) + mine.column / kByte;
  const int first_bit = static_cast<int>(mine.column % kByte);
  T* dz = static_cast<T*>(a.dz) + mine.column;
  A sums[kGroup] = {};
  const long long end_row = mine.count == 0 ? 0 : mine.end_row;
  for (long long row = mine.first_row; row < end_row; row += kRows * mine.strands) {
    Group<T, kVectors, kGroup> gradients[kRows], kept[kKeeps == Keeps::values ? kRows : 1];
    unsigned open[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const long long at = min(row + i * mine.strands, end_row - 1);
      gradients[i].load(dy + at * a.dy_stride, a.dy_step, mine.count);
      if constexpr (kKeeps == Keeps::bits) open[i] = bits[at * a.kept_stride] >> first_bit;
      if constexpr (kKeeps == Keeps::values) {
        kept[i].load(values + at * a.kept_stride, 1, mine.count);
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const long long at = row + i * mine.strands;
      if (at >= end_row) break;
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        if constexpr (kKeeps == Keeps::bits) {
          if (!(open[i] >> j & 1)) gradients[i].set(j, A(0));
        }
        if constexpr (kKeeps == Keeps::values) {
          gradients[i].set(j,
                           apply_gradient<kKind, T, kVectors>(a.kind, kept[i][j], gradients[i][j]));
        }
        sums[j] += gradients[i][j];  // rounded to T, as torch sums them
      }
      if (a.dz != nullptr) gradients[i].store(dz + at * a.dz_stride, mine.count);
    }
  }
  if (a.sums == nullptr) return;
  // First over the rows of a warp, then over the warps.
  for (int offset = 16; offset >> a.shift > 0; offset /= 2) {
#pragma unroll
    for (int j = 0; j < kGroup; ++j) sums[j] += __shfl_xor_sync(0xffffffffu, sums[j], offset);
  }
  if (threadIdx.x % 32 >> a.shift == 0) {
#pragma unroll
    for (int j = 0; j < kGroup; ++j) parts[threadIdx.x / 32][mine.lane * kGroup + j] = sums[j];
  }
  __syncthreads();
  static_assert(kThreads >= 32 * kGroup, "a thread for each column of the widest block");
  const long long column = mine.tile + threadIdx.x;
  if (threadIdx.x >= kGroup << a.shift || column >= a.columns) return;
  A sum = 0;
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) sum += parts[warp][threadIdx.x];
  if (a.rounds) {
    static_cast<T*>(a.sums)[column] = from_accumulator<T>(sum);
  } else {
    static_cast<A*>(a.sums)[mine.index * a.columns + column] = sum;
  }
}

constexpr int kSumColumns = 8, kSumThreads = 512;

/// db[column] = the sum of the chunks' sums, in a fixed order. A block has few columns, so that
/// each thread adds few of up to 2000 chunks.
template <typename T, typename A>
__global__ void __launch_bounds__(kSumThreads)
    sum_chunks(const A* partial, long long chunks, long long columns, T* db) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int lane = threadIdx.x % kSumColumns, strand = threadIdx.x / kSumColumns;
  const long long column = static_cast<long long>(blockIdx.x) * kSumColumns + lane;
  A sum = 0;
  if (column < columns) {
#pragma unroll 8
    for (long long i = strand; i < chunks; i += kSumThreads / kSumColumns) {
      sum += partial[i * columns + column];
    }
  }
  sum = block_column_sum<kSumThreads, kSumColumns>(sum);
  if (strand == 0 && column < columns) db[column] = from_accumulator<T>(sum);
}

/// As few groups of columns side by side as cover a row, so that few lanes are idle on narrow rows.
int shift_for(std::int64_t columns, int group) {
  int shift = kWideShift;
  while (shift > 1 && group << (shift - 1) >= columns) --shift;  // two share a byte of bits
  return shift;
}

/// Number of columns and rows of a block.
struct Cut {
  int shift;
  std::int64_t tiles, chunk, chunks;

  /// Many small blocks balance best on the GPU: as many rows as a thread has in flight, or fewer if
  /// SMs would be idle otherwise.
  Cut(const Context& context, std::int64_t rows, std::int64_t columns, int group, int depth)
      : shift(shift_for(columns, group)), tiles(divide_up(columns, group << shift)) {
    const int all = limits_of(context.device).multiprocessors;
    do {
      chunk = depth * (kThreads >> shift);
      chunks = divide_up(rows, chunk);
      depth /= 2;
    } while (depth > 0 && tiles * chunks < all);
  }

  /// Column sums cost memory per chunk, so there are only as many chunks as keep the GPU busy. Few
  /// rows are one chunk.
  static Cut for_sums(const Context& context, std::int64_t rows, std::int64_t columns, int group,
                      int depth, bool vectors) {
    const int all = limits_of(context.device).multiprocessors;
    Cut cut(context, rows, columns, group, depth);
    if (rows <= kFewRows) {
      cut.shift = std::min(cut.shift, kNarrowShift);
      // Element by element a row takes long, so use one block per group of columns.
      if (!vectors && divide_up(columns, group << cut.shift) < all / 4) cut.shift = 0;
      cut.tiles = divide_up(columns, group << cut.shift);
      cut.chunk = kFewRows;
      cut.chunks = 1;
    } else {
      constexpr int kWaves = 2;
      const std::int64_t wanted = std::max<std::int64_t>(1, all * kBlocks * kWaves / cut.tiles);
      cut.chunk *= divide_up(rows, cut.chunk * wanted);
      cut.chunks = divide_up(rows, cut.chunk);
    }
    return cut;
  }
};

template <typename T>
bool takes_vectors(const TensorView& t) {
  if (!t.defined()) return true;
  const bool aligned = reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0;
  return aligned && has_adjacent_rows(t) && t.sizes[1] % kByte == 0 &&
         matrix_of(t).stride % Vector<T>::kSize == 0;
}

/// For dense tensors without bits the row length does not matter, so choose rows that fit vectors.
ActivationPass with_wide_rows(ActivationPass pass) {
  const std::int64_t columns = pass.z.sizes[1], count = pass.z.numel();
  const auto dense = [&](const TensorView& t) {
    return t.defined() && matrix_of(t).stride == columns;
  };
  if (columns % kByte == 0 || pass.bits.defined() || !dense(pass.z) || !dense(pass.y)) return pass;
  std::int64_t wide = 2048;
  while (wide >= kByte && count % wide != 0) wide /= 2;
  if (wide < kByte) return pass;
  for (TensorView* t : {&pass.z, &pass.y}) {
    *t = TensorView(t->data, t->dtype, t->device, {count / wide, wide});
  }
  return pass;
}

/// Calls body<kind, vectors>(). float64 has no vector kernels: it is only for checks.
template <typename T, typename Body>
void dispatch(Activation kind, bool vectors, Body body) {
  if constexpr (sizeof(T) < 8) {
    if (vectors) {
      switch (kind) {
        case Activation::identity:
          return body.template operator()<Activation::identity, true>();
        case Activation::relu:
          return body.template operator()<Activation::relu, true>();
        case Activation::gelu:
          return body.template operator()<Activation::gelu, true>();
        case Activation::gelu_tanh:
          return body.template operator()<Activation::gelu_tanh, true>();
        case Activation::silu:
          return body.template operator()<Activation::silu, true>();
        case Activation::relu6:
        case Activation::hardswish:  // rejected earlier
          return;
      }
    }
  }
  body.template operator()<Activation::identity, false>();
}

}  // namespace

void activate(const Context& context, const ActivationPass& given) {
  const ActivationPass pass = with_wide_rows(given);
  const std::int64_t rows = pass.z.sizes[0], columns = pass.z.sizes[1];
  if (rows == 0 || columns == 0) return;
  ActivationArguments arguments{};
  arguments.z = pass.z.data;
  arguments.y = pass.y.data;
  arguments.bits = static_cast<unsigned char*>(pass.bits.data);
  arguments.rows = rows;
  arguments.columns = columns;
  arguments.z_stride = matrix_of(pass.z).stride;
  if (pass.y.defined()) arguments.y_stride = matrix_of(pass.y).stride;
  if (pass.bits.defined()) arguments.bit_stride = matrix_of(pass.bits).stride;
  arguments.kind = pass.activation;
  dispatch_dtype(pass.z.dtype, [&]<typename T>(T) {
    const bool vectors = takes_vectors<T>(pass.z) && takes_vectors<T>(pass.y);
    const auto launch = [&]<Activation kKind, bool kVectors, bool kOnlyBits>() {
      constexpr int kGroup = kColumns<T, kVectors, kOnlyBits>;
      const Cut cut(context, rows, columns, kGroup, kDepth<T, kGroup>);
      arguments.chunk = cut.chunk;
      arguments.tiles = static_cast<unsigned>(cut.tiles);
      arguments.shift = cut.shift;
      // Does not overlap the previous kernel. After a GEMM there is nothing to do ahead, and
      // measurements showed no gain.
      launch_kernel({context, cut.tiles * cut.chunks, kThreads}, "activating",
                    activate_rows<kKind, T, kVectors, kOnlyBits>, arguments);
    };
    dispatch<T>(pass.activation, vectors, [&]<Activation kKind, bool kVectors>() {
      if (pass.y.defined()) return launch.template operator()<kKind, kVectors, false>();
      if constexpr (kKind == Activation::relu || !kVectors) {
        launch.template operator()<kKind, kVectors, true>();
      }
    });
  });
}

void differentiate(const Context& context, const GradientPass& pass) {
  const std::int64_t rows = pass.dy.sizes[0], columns = pass.dy.sizes[1];
  if (columns == 0) return;
  const bool sums = pass.db.defined();
  const bool nothing = pass.activation == Activation::identity;
  const bool bits = pass.activation == Activation::relu && pass.kept.dtype == DType::u8;
  const bool rows_of_dy = has_adjacent_rows(pass.dy);
  const bool wide_sums = sums && pass.db.dtype != pass.dy.dtype;
  GradientArguments arguments{};
  arguments.dy = pass.dy.data;
  arguments.kept = pass.kept.data;
  arguments.dz = pass.dz.data;
  arguments.rows = rows;
  arguments.columns = columns;
  arguments.dy_stride = rows_of_dy ? matrix_of(pass.dy).stride : pass.dy.strides[0];
  arguments.dy_step = rows_of_dy ? 1 : pass.dy.strides[1];
  if (!nothing) arguments.kept_stride = matrix_of(pass.kept).stride;
  if (pass.dz.defined()) arguments.dz_stride = matrix_of(pass.dz).stride;
  arguments.kind = pass.activation;
  dispatch_dtype(pass.dy.dtype, [&]<typename T>(T) {
    using A = Accumulator<T>;
    const bool vectors = takes_vectors<T>(pass.dy) && takes_vectors<T>(pass.dz) &&
                         (bits || nothing || takes_vectors<T>(pass.kept));
    dispatch<T>(pass.activation, vectors, [&]<Activation kKind, bool kVectors>() {
      constexpr int kGroup = kColumns<T, kVectors>, kRows = kDepth<T, kGroup>;
      const Cut cut = sums ? Cut::for_sums(context, rows, columns, kGroup, kRows, kVectors)
                           : Cut(context, rows, columns, kGroup, kRows);
      const bool only_chunk = cut.chunks == 1;
      const Scratch<A> partial(context, sums && !only_chunk ? cut.chunks * columns : 0);
      arguments.sums = sums && only_chunk ? pass.db.data : partial.data();
      arguments.chunk = cut.chunk;
      arguments.tiles = static_cast<unsigned>(cut.tiles);
      arguments.shift = cut.shift;
      arguments.rounds = only_chunk && !wide_sums;
      const auto launch = [&]<Keeps kKeeps>() {
        launch_kernel({context, cut.tiles * cut.chunks, kThreads}, "differentiating",
                      differentiate_rows<kKind, kKeeps, T, kVectors>, arguments);
      };
      if (nothing) {
        if constexpr (kKind == Activation::identity) launch.template operator()<Keeps::nothing>();
      } else if (bits) {
        if constexpr (kKind == Activation::relu || !kVectors) {
          launch.template operator()<Keeps::bits>();
        }
      } else if constexpr (kKind != Activation::identity || !kVectors) {
        launch.template operator()<Keeps::values>();
      }
      if (!sums || only_chunk) return;
      const auto add_up = [&]<typename Sum>(Sum) {
        launch_kernel({context, divide_up(columns, kSumColumns), kSumThreads, 0, true},
                      "summing up a bias gradient", sum_chunks<Sum, A>, partial.data(), cut.chunks,
                      columns, static_cast<Sum*>(pass.db.data));
      };
      wide_sums ? add_up(A{}) : add_up(T{});
    });
  });
}

}  // namespace fusewise::cuda
