// BatchNorm, residual and activation in one kernel, for small channels-last images. The blocks of a
// cluster have the pixels of a few channels in their registers and exchange their sums through
// shared memory. Memory: forward reads x and the residual once and writes y; backward reads dy and
// x once and writes dx and dresidual. Bound by latency: a launch, a load, the exchange, a store.

#include "cuda/batch_norm/cluster.cuh"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <optional>

#include "common/backends.h"
#include "cuda/batch_norm/units.cuh"
#include "cuda/cluster.cuh"
#include "cuda/device.h"
#include "cuda/launch.cuh"

namespace fusewise::cuda {
namespace {

/// Vectors of each image that a thread keeps.
constexpr int kHeldForward = 16, kHeldBackward = 8;
/// The largest cluster that every GPU with clusters can run.
constexpr int kMostBlocks = 8;
constexpr std::int64_t kMostBytes = 8 << 20;

/// The same address in the shared memory of another block of the cluster.
template <typename V>
__device__ __forceinline__ const V* in_block(const V* mine, int rank) {
  const V* theirs;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(theirs) : "l"(mine), "r"(rank));
  return theirs;
}

/// The blocks of a cluster are neighbours in the grid and have the slabs of one tile.
[[maybe_unused]] __device__ __forceinline__ unsigned tile_index(const Cut& cut) {
  const unsigned slab = blockIdx.x % cut.slabs, rest = blockIdx.x / cut.slabs;
  return (rest / cut.tiles * cut.slabs + slab) * cut.tiles + rest % cut.tiles;
}

[[maybe_unused]] __device__ __forceinline__ void sync_cluster(const Cut& cut) {
  if (cut.slabs == 1) return __syncthreads();
  arrive_in_cluster();
  wait_for_cluster();
}

/// The sums of a block, in its shared memory, for all blocks of the cluster.
struct Exchange {
  double* count;
  double* means;              // forward
  float *squares, *dv, *dvx;  // the first forward, the others backward

  __device__ Exchange(float* shared, int width)
      : count(reinterpret_cast<double*>(shared)),
        means(count + 1),
        squares(reinterpret_cast<float*>(means + width)),
        dv(reinterpret_cast<float*>(means)),
        dvx(dv + width) {}
};
/// A multiple of four, as what follows has 16-byte accesses.
__host__ __device__ constexpr int exchange_floats(int width) { return (2 + 3 * width + 3) / 4 * 4; }

/// Floats of shared memory: the exchange, `rows` of the table, the sums over the block. The last
/// part also serves to combine the blocks.
__host__ __device__ constexpr int shared_floats(int rows, int width, int vector) {
  return exchange_floats(width) + table_floats(rows, width) + sum_floats(width, vector);
}
static_assert(sizeof(Moments) * kThreads <= sizeof(float) * 2 * kThreads * 4);

template <typename T, bool kResidual>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const __grid_constant__ Cut cut, const __grid_constant__ NormalizeArguments a) {
#if __CUDA_ARCH__ >= 900
  constexpr int kVector = Vector<T>::kSize;
  extern __shared__ __align__(16) float shared[];
  const Tile<T, false> tile(cut, tile_index(cut));
  const T* x = static_cast<const T*>(a.x);
  const T* residual = static_cast<const T*>(a.residual);
  Packed<T> held[kHeldForward];
#pragma unroll
  for (int j = 0; j < kHeldForward; ++j) {
    if (j >= tile.steps) break;
    const Index at = tile.offset(tile.template unit<false>(j));
    held[j].load(x + at);
    if (kResidual && tile.lane == 0) prefetch(residual + at);
  }
  const Exchange exchange(shared, tile.width);
  float* const values = shared + exchange_floats(tile.width);
  const Table<T, false> table{values, tile.lanes};
  float* const rows = values + table_floats(3, tile.width);
  fill_shifts(tile, x, table);  // where the means will be
  __syncthreads();
  float sum[kVector] = {}, squares[kVector] = {}, shift[kVector];
  table.get(0, tile.lane, shift);
#pragma unroll
  for (int j = 0; j < kHeldForward; ++j) {
    if (j >= tile.steps) break;
    if (tile.is_blank(tile.template unit<false>(j))) continue;
    add_moments(held[j], shift, sum, squares);
  }
  const double count = tile.count();
  if (threadIdx.x == 0) *exchange.count = count;
  sum_over_block(tile, sum, squares, rows, [&](int k, float total, float total_squares) {
    Moments own;
    own.count = count;
    own.sum = total;
    own.squares = total_squares;
    exchange.means[k] = own.mean(table.at(0, k));
    exchange.squares[k] = static_cast<float>(own.central());
  });
  sync_cluster(cut);

  int first = 0;
  while (first < cut.slabs - 1 && *in_block(exchange.count, first) == 0) ++first;
  const double* reference = in_block(exchange.means, first);
  combine<Moments>(
      cut.slabs, tile.width, rows,
      [&](Moments& all, int k, int i) {
        all.add(*in_block(exchange.count, i), in_block(exchange.means, i)[k],
                static_cast<double>(in_block(exchange.squares, i)[k]), reference[k]);
      },
      [&](int k, const Moments& all) {
        const double variance = all.count > 0 ? all.central() / all.count : 0.0;
        const Coefficients<float> value =
            finish_channel<T>(a.channels, tile.channel(k), all.count, all.mean(reference[k]),
                              variance, 1, tile.slab == 0);
        table.at(kMean, k) = value.mean;
        table.at(kScale, k) = value.scale;
        table.at(kShift, k) = value.shift;
      });
  if (a.channels.training) tile.count_call(a.channels.counter);  // nobody reads it here
  // From here on, this block reads no other block's memory.
  if (cut.slabs > 1) arrive_in_cluster();

  constexpr int kBatch = 4;
#pragma unroll
  for (int j = 0; j < kHeldForward; j += kBatch) {
    if (j >= tile.steps) break;
    Packed<T> others[kResidual ? kBatch : 1];
    if constexpr (kResidual) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (j + i >= tile.steps) break;
        others[i].load(residual + tile.offset(tile.template unit<false>(j + i)));
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (j + i >= tile.steps) break;
      write_normalized<kResidual>(a, tile, table, tile.template unit<false>(j + i), held[j + i],
                                  others[kResidual ? i : 0]);
    }
  }
  // A block's shared memory must live until all others have read it.
  if (cut.slabs > 1) wait_for_cluster();
#endif
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const __grid_constant__ Cut cut, const __grid_constant__ GradientArguments a) {
#if __CUDA_ARCH__ >= 900
  constexpr int kVector = Vector<T>::kSize;
  extern __shared__ __align__(16) float shared[];
  const Tile<T, false> tile(cut, tile_index(cut));
  GradientVectors<T, false> held[kHeldBackward];
#pragma unroll
  for (int j = 0; j < kHeldBackward; ++j) {
    if (j >= tile.steps) break;
    held[j].load(a, tile.offset(tile.template unit<false>(j)));
  }
  const Exchange exchange(shared, tile.width);
  float* const values = shared + exchange_floats(tile.width);
  const Table<T, false> table{values, tile.lanes};
  float* const rows = values + table_floats(5, tile.width);
  for (int k = threadIdx.x; k < tile.width; k += kThreads) fill_saved(tile, table, a.channels, k);
  __syncthreads();
  float sum[kVector] = {}, products[kVector] = {};
#pragma unroll
  for (int j = 0; j < kHeldBackward; ++j) {
    if (j >= tile.steps) break;
    if (tile.is_blank(tile.template unit<false>(j))) continue;
    add_gradients(a, table, tile.lane, held[j], sum, products);
  }
  const double count = tile.count();
  if (threadIdx.x == 0) *exchange.count = count;
  sum_over_block(tile, sum, products, rows, [&](int k, float dv, float dvx) {
    exchange.dv[k] = dv;
    exchange.dvx[k] = dvx;
  });
  sync_cluster(cut);
  combine<GradientSums<float>>(
      cut.slabs, tile.width, rows,
      [&](GradientSums<float>& all, int k, int i) {
        all.add({*in_block(exchange.count, i), in_block(exchange.dv, i)[k],
                 in_block(exchange.dvx, i)[k]});
      },
      [&](int k, const GradientSums<float>& all) {
        const Index at = tile.channel(k);
        const float inverse = static_cast<const float*>(a.channels.inverse)[at];
        Corrections<float> value = finish_gradient<T>(a.channels, at, all, inverse, tile.slab == 0);
        if (a.channels.group != nullptr) value = group_corrections<T>(a.channels, at, inverse);
        table.at(kOffset, k) = value.offset;
        table.at(kSlope, k) = value.slope;
      });
  if (cut.slabs > 1) arrive_in_cluster();
#pragma unroll
  for (int j = 0; j < kHeldBackward; ++j) {
    if (j >= tile.steps) break;
    write_gradients(a, tile, table, tile.template unit<false>(j), held[j]);
  }
  if (cut.slabs > 1) wait_for_cluster();
#endif
}

// ---- Host.

/// By the size of clusters, how many run at once.
using ClustersAtOnce = std::array<int, kMostBlocks + 1>;

ClustersAtOnce ask_clusters(Device device) {
  const CurrentDevice current(device);
  // All kernels have room for one block per SM.
  auto* kernel = forward_kernel<float, true>;
  allow_all(reinterpret_cast<const void*>(kernel), device);
  ClustersAtOnce result{};
  for (int size = 1; size <= kMostBlocks; ++size) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(size);
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = sizeof(float) * shared_floats(5, 64, 8);
    config.attrs = &attribute;
    config.numAttrs = 1;
    if (cudaOccupancyMaxActiveClusters(&result[size], kernel, &config) != cudaSuccess) {
      result[size] = 0;  // a GPU without clusters of this size reports an error
      static_cast<void>(cudaGetLastError());
    }
  }
  return result;
}

/// Queried once per device.
const ClustersAtOnce& clusters_at_once(Device device) {
  static std::mutex mutex;
  static std::map<int, ClustersAtOnce> known;
  const std::lock_guard lock(mutex);
  const auto found = known.find(device.index);
  if (found != known.end()) return found->second;
  return known.emplace(device.index, ask_clusters(device)).first->second;
}

/// A cut whose slabs fit in registers. Rows of 128 bytes if a thread then has few vectors, else the
/// cut with the fewest per thread.
std::optional<Cut> plan(const Context& context, const TensorView& x, const TensorView& blanked,
                        int held) {
  constexpr std::int64_t kFew = 4;
  const std::int64_t vectors = dimension(x, 3) * size_of(x.dtype) / 16;
  const ClustersAtOnce& clusters = clusters_at_once(context.device);
  std::optional<Cut> best;
  std::int64_t fewest = held + 1;
  for (const int wanted : {8, 4, 2}) {
    const int lanes = vectors < wanted ? static_cast<int>(vectors) : wanted;
    if (vectors % lanes != 0) continue;
    const std::int64_t groups = streams_of(x) * (vectors / lanes);
    int slabs = kMostBlocks;  // as many as let all clusters run at once
    while (slabs > 1 && clusters[slabs] < groups) --slabs;
    const Cut cut = make_cut(x, blanked, lanes, slabs);
    const std::int64_t steps = divide_up(cut.per_slab, kThreads / lanes);
    if (steps >= fewest) continue;
    fewest = steps;
    best = cut;
    if (steps <= kFew) break;
  }
  return best;
}

Launch launch_of(const Context& context, const TensorView& x, const Cut& cut, int rows) {
  const int vector = static_cast<int>(16 / size_of(x.dtype));
  return {.context = context,
          .blocks = cut.blocks(streams_of(x)),
          .threads = kThreads,
          .shared_bytes = sizeof(float) * shared_floats(rows, cut.lanes * vector, vector),
          .cluster = cut.slabs};
}

template <typename Call>
std::string declines(const Context& context, const Call& call, int held) {
  if (limits_of(context.device).capability < 90) {
    return "clusters of blocks need compute capability 9.0";
  }
  if (!has_adjacent_channels(call.x)) return "it takes channels-last images";
  if (!plan(context, call.x, call.blanked, held)) return "the images do not fit in registers";
  return {};
}

}  // namespace

std::string cluster_declines(const Context& context, const BatchNormActForward& call) {
  std::string reason = dense_decline({&call.x, &call.y, &call.residual}, call.passes.defined());
  if (!reason.empty()) return reason;
  const ForwardChannels f = channels_of(call);
  if (!f.own()) return "the statistics are given, so no sums are needed";
  if (f.training && f.running_mean != nullptr && f.momentum < 0) {
    return "its blocks would read the counter while one of them advances it";
  }
  return declines(context, call, kHeldForward);
}

std::string cluster_declines(const Context& context, const BatchNormActBackward& call) {
  std::string reason =
      dense_decline({&call.x, &call.dy, &call.dx, &call.dresidual}, call.passes.defined());
  if (!reason.empty()) return reason;
  if (call.residual.defined() && !call.passes.defined()) return "it does not read the residual";
  const BackwardNeeds needs = needs_of(call);
  if (!needs.sums || !needs.images) return "one pass is enough for these gradients";
  return declines(context, call, kHeldBackward);
}

std::string cluster_yields(const TensorView& x) {
  if (x.numel() * size_of(x.dtype) <= kMostBytes) return {};
  return "two_pass is expected to be faster for images of more than 8 MB";
}

void cluster_run(const Context& context, const BatchNormActForward& call) {
  const Cut cut = *plan(context, call.x, call.blanked, kHeldForward);
  const NormalizeArguments a{.x = call.x.data,
                             .residual = call.residual.data,
                             .y = call.y.data,
                             .passes = static_cast<unsigned char*>(call.passes.data),
                             .channels = channels_of(call),
                             .parts = {},
                             .coefficients = nullptr,
                             .activation = call.activation,
                             .streaming = false};
  dispatch_short_dtype(call.x.dtype, [&]<typename T>(T) {
    auto* kernel = call.residual.defined() ? forward_kernel<T, true> : forward_kernel<T, false>;
    launch_kernel(launch_of(context, call.x, cut, 3), "normalizing in clusters", kernel, cut, a);
  });
}

void cluster_run(const Context& context, const BatchNormActBackward& call) {
  const Cut cut = *plan(context, call.x, call.blanked, kHeldBackward);
  const GradientArguments a{.dy = call.dy.data,
                            .x = call.x.data,
                            .residual = nullptr,
                            .passes = static_cast<const unsigned char*>(call.passes.data),
                            .dx = call.dx.data,
                            .dresidual = call.dresidual.data,
                            .channels = channels_of(call),
                            .parts = {},
                            .corrections = nullptr,
                            .activation = call.activation,
                            .streaming = false};
  dispatch_short_dtype(call.x.dtype, [&]<typename T>(T) {
    launch_kernel(launch_of(context, call.x, cut, 5), "computing gradients in clusters",
                  backward_kernel<T>, cut, a);
  });
}

}  // namespace fusewise::cuda
