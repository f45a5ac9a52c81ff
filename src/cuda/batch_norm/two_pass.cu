// BatchNorm, residual and activation in two passes over dense images, with 16-byte accesses.
// Memory: forward reads x twice (once in inference), the residual once, and writes y. Backward
// reads dy, x and what else dv needs twice and writes dx and dresidual. Backward's second pass goes
// in the opposite direction within each slab, so that it finds in L2 what the first one read last.
// Forward's starts at the end of x, which L2 has a part of. Bound by memory bandwidth when large;
// by the start of the last kernel and the exchange of sums when small.

#include "cuda/batch_norm/two_pass.cuh"

#include <algorithm>

#include "common/divide.h"
#include "cuda/batch_norm/coefficients.cuh"
#include "cuda/batch_norm/finish.cuh"
#include "cuda/batch_norm/units.cuh"
#include "cuda/device.h"
#include "cuda/launch.cuh"

namespace fusewise::cuda {
namespace {

/// Two blocks fill the registers of an SM: 80 per thread.
constexpr int kThreads = 384, kBlocks = 2;
/// Vectors that a thread has in flight: 48 KB per SM and more.
constexpr int kInFlight = 4;
/// A block of channels that has at most so many parts combines them itself. Otherwise a kernel
/// between the passes does: each block would read all parts of its channels.
constexpr Index kMostOwnParts = 4608;
constexpr int kMostLanes = 64;
/// Vectors that a thread adds in float32. Longer sums would lose digits.
constexpr std::int64_t kMostSteps = 128;
/// normalize_kernel has many short blocks instead, whose threads load all they need at once.
constexpr int kMapThreads = 256, kMapBlocks = 4;
constexpr int map_vectors(bool residual) { return residual ? 2 : 4; }  // of x, per thread

// ---- Forward.

/// Mean and squares of the slabs, shifted by a mean of a few values. Memory: x once.
template <typename T, bool kPlanar>
__global__ void __launch_bounds__(kThreads, kBlocks)
    moments_kernel(const __grid_constant__ Cut cut, const T* x, const MomentParts<float> parts,
                   const Counter counter) {
  constexpr int kVector = Vector<T>::kSize, kBatch = kInFlight + 2;
  extern __shared__ __align__(16) float shared[];
  allow_next_kernel();
  const Tile<T, kPlanar> tile(cut, blockIdx.x);
  Packed<T> batch[kBatch];
  bool present[kBatch];
  const auto load = [&](int step) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const unsigned unit = tile.template unit<false>(step + j);
      present[j] = step + j < tile.steps && !tile.is_blank(unit);
      if (present[j]) batch[j].load(x + tile.offset(unit));
    }
  };
  load(0);
  const Table<T, kPlanar> shifts{shared, tile.lanes};
  float* const rows = shared + table_floats(1, tile.width);
  Shifts<T, kPlanar>(tile, x, tile.begin, tile.end).store(tile, shifts, rows);
  float sum[kVector] = {}, squares[kVector] = {};
  for (int step = 0; step < tile.steps; step += kBatch) {
    if (step > 0) load(step);
    float shift[kVector];
    shifts.get(0, tile.lane, shift);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (!present[j]) continue;
      add_moments(batch[j], shift, sum, squares);
    }
  }
  const double count = tile.count(tile.begin, tile.end);
  if (tile.first == 0 && threadIdx.x == 0) {
    parts.counts[static_cast<Index>(tile.stream) * cut.slabs.value() + tile.slab] = count;
  }
  float* const totals = rows + sum_floats(kThreads, tile.width, kVector);
  sum_over_block(tile, sum, squares, rows,
                 [&](int k, double total) { totals[k] = static_cast<float>(total); });
  for (int k = threadIdx.x; k < tile.width; k += kThreads) {
    Moments own;
    own.count = count;
    own.sum = totals[k];
    own.squares = totals[tile.width + k];
    parts.means[tile.part(k)] = own.mean(shifts.at(0, k));
    parts.squares[tile.part(k)] = static_cast<float>(own.central());
  }
  tile.count_call(counter);
}

/// From the coefficients, or the running statistics. Memory: x and the residual once, y once, and a
/// bit per value.
template <typename T, bool kPlanar, bool kResidual>
__global__ void __launch_bounds__(kMapThreads, kMapBlocks)
    normalize_kernel(const __grid_constant__ Cut cut,
                     const __grid_constant__ NormalizeArguments a) {
  constexpr int kBatch = map_vectors(kResidual);
  extern __shared__ __align__(16) float shared[];
  const Tile<T, kPlanar> tile(cut, gridDim.x - 1 - blockIdx.x);
  Packed<T> x[kBatch], residual[kResidual ? kBatch : 1];
  Index at[kBatch];
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    if (j >= tile.steps) break;
    at[j] = tile.offset(tile.template unit<true>(j));
    x[j].load(static_cast<const T*>(a.x) + at[j]);
    if constexpr (kResidual) residual[j].load(static_cast<const T*>(a.residual) + at[j]);
  }
  wait_for_previous_kernel();
  const Table<T, kPlanar> table{shared, tile.lanes};
  for (int k = threadIdx.x; k < tile.width; k += kMapThreads) {
    const Index channel = tile.channel(k);
    const Coefficients<float> value =
        a.coefficients != nullptr ? a.coefficients[channel]
                                  : running_coefficients<T>(a.channels, channel, tile.writes(k));
    table.at(kMean, k) = value.mean;
    table.at(kScale, k) = value.scale;
    table.at(kShift, k) = value.shift;
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    if (j >= tile.steps) break;
    const bool blank = tile.is_blank(tile.template unit<true>(j));
    write_normalized<kResidual>(a, tile, table, blank, at[j], x[j], residual[kResidual ? j : 0]);
  }
}

// ---- Backward.

/// Sums of dv and dv * (x - mean) of the slabs. Memory: dy, x and what else dv needs once.
template <typename T, bool kPlanar, bool kResidual>
__global__ void __launch_bounds__(kThreads, kBlocks)
    gradient_sums_kernel(const __grid_constant__ Cut cut,
                         const __grid_constant__ GradientArguments a,
                         const GradientParts<float> parts) {
  constexpr int kVector = Vector<T>::kSize, kBatch = kInFlight / 2;
  extern __shared__ __align__(16) float shared[];
  allow_next_kernel();
  const Tile<T, kPlanar> tile(cut, blockIdx.x);
  GradientVectors<T, kResidual> batch[kBatch];
  bool present[kBatch];
  const auto load = [&](int step) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const unsigned unit = tile.template unit<false>(step + j);
      present[j] = step + j < tile.steps && !tile.is_blank(unit);
      if (present[j]) batch[j].load(a, tile.offset(unit));
    }
  };
  load(0);
  const Table<T, kPlanar> table{shared, tile.lanes};
  float* const rows = shared + table_floats(3, tile.width);
  for (int k = threadIdx.x; k < tile.width; k += kThreads) fill_saved(tile, table, a.channels, k);
  __syncthreads();
  float sum[kVector] = {}, products[kVector] = {};
  for (int step = 0; step < tile.steps; step += kBatch) {
    if (step > 0) load(step);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (!present[j]) continue;
      add_gradients(a, table, tile.lane, batch[j], sum, products);
    }
  }
  const double count = tile.count(tile.begin, tile.end);
  if (tile.first == 0 && threadIdx.x == 0) {
    parts.counts[static_cast<Index>(tile.stream) * cut.slabs.value() + tile.slab] = count;
  }
  sum_over_block(tile, sum, products, rows, [&](int k, double total) {
    (k < tile.width ? parts.dv[tile.part(k)] : parts.dvx[tile.part(k - tile.width)]) =
        static_cast<float>(total);
  });
}

/// Memory: dy, x and what else dv needs once, dx and dresidual once.
template <typename T, bool kPlanar, bool kResidual>
__global__ void __launch_bounds__(kThreads, kBlocks)
    gradients_kernel(const __grid_constant__ Cut cut, const __grid_constant__ GradientArguments a) {
  constexpr int kBatch = kInFlight / 2;
  extern __shared__ __align__(16) float shared[];
  const Tile<T, kPlanar> tile(cut, gridDim.x - 1 - blockIdx.x);
  GradientVectors<T, kResidual> batch[kBatch];
  const auto load = [&](int step) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (step + j < tile.steps) batch[j].load(a, tile.offset(tile.template unit<true>(step + j)));
    }
  };
  load(0);
  wait_for_previous_kernel();

  const Table<T, kPlanar> table{shared, tile.lanes};
  const auto set = [&](int k, const Corrections<float>& value) {
    table.at(kOffset, k) = value.offset;
    table.at(kSlope, k) = value.slope;
  };
  if (a.parts.slabs > 0) {
    combine_gradients(
        a.parts, tile.stream, cut.channels, tile.first, tile.width,
        shared + table_floats(5, tile.width), [&](int k, const GradientSums<float>& sums) {
          const Index at = tile.channel(k);
          const float inverse = fill_saved(tile, table, a.channels, k);
          const auto own = finish_gradient<T>(a.channels, at, sums, inverse, tile.writes(k));
          set(k, a.channels.group == nullptr ? own : group_corrections<T>(a.channels, at, inverse));
        });
  } else {
    for (int k = threadIdx.x; k < tile.width; k += kThreads) {
      const Index at = tile.channel(k);
      const float inverse = fill_saved(tile, table, a.channels, k);
      if (a.corrections != nullptr) {
        set(k, a.corrections[at]);
      } else if (a.channels.group != nullptr) {
        set(k, group_corrections<T>(a.channels, at, inverse));
      }
    }
    __syncthreads();
  }

  for (int step = 0; step < tile.steps; step += kBatch) {
    if (step > 0) load(step);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (step + j >= tile.steps) break;
      const unsigned unit = tile.template unit<true>(step + j);
      write_gradients(a, tile, table, tile.is_blank(unit), tile.offset(unit), batch[j]);
    }
  }
}

// ---- Host.

/// Lanes side by side: 128 bytes or more of a pixel, an even number that divides the row, so that
/// blocks do not share 32-byte sectors and have equal work.
int choose_lanes(int vectors) {
  for (int lanes = 8; lanes <= 24; lanes += 2) {
    if (vectors % lanes == 0) return lanes;
  }
  if (vectors <= kMostLanes) return vectors;
  const int tiles = static_cast<int>(divide_up(vectors, 16));
  return static_cast<int>(divide_up(vectors, 2 * tiles)) * 2;
}

/// Slabs of each of `groups`, at most `most`: as many blocks as are resident at once. With so many
/// groups that this leaves much of the GPU idle, those whose last wave is the fullest.
constexpr std::int64_t choose_slabs(std::int64_t groups, std::int64_t resident, std::int64_t most) {
  if (2 * groups <= resident) return std::min(resident / groups, most);
  std::int64_t best = 1;
  double fullest = 0;
  for (std::int64_t slabs = 1; slabs <= std::min<std::int64_t>(8, most); ++slabs) {
    const std::int64_t blocks = groups * slabs, waves = divide_up(blocks, resident);
    const double full = static_cast<double>(blocks) / static_cast<double>(waves * resident);
    if (full <= fullest) continue;
    best = slabs;
    fullest = full;
  }
  return best;
}
static_assert(choose_slabs(64, 264, 100) == 4 && choose_slabs(64, 264, 3) == 3);
static_assert(choose_slabs(264, 264, 100) == 1);  // one full wave
static_assert(choose_slabs(144, 264, 100) == 7);  // 1008 of 1056 places in four waves

/// `slabs(groups, units, strands)` chooses the number of slabs of each group of channels.
template <typename Slabs>
Cut cut_of(const TensorView& x, const TensorView& blanked, bool with_bits, int threads,
           Slabs slabs) {
  const int vector = static_cast<int>(16 / size_of(x.dtype));
  const bool channels_last = has_adjacent_channels(x);
  const std::int64_t folded = channels_last ? folded_pixels(x, blanked, with_bits) : 1;
  const std::int64_t channels = dimension(x, 3) * folded;
  const std::int64_t pixels = dimension(x, 4) * dimension(x, 2) * dimension(x, 1);
  const int vectors = static_cast<int>(channels / vector);
  const int lanes = channels_last ? choose_lanes(vectors) : 1;
  const std::int64_t tiles = channels_last ? divide_up(vectors, lanes) : channels;
  const std::int64_t units = pixels / (channels_last ? folded : vector);
  return make_cut(x, blanked, threads, lanes,
                  slabs(streams_of(x) * tiles, units, std::int64_t{threads / lanes}), folded);
}

/// For kernels whose blocks are all resident at once.
Cut resident_cut(const Context& context, const TensorView& x, const TensorView& blanked,
                 bool with_bits) {
  const std::int64_t resident = kBlocks * limits_of(context.device).multiprocessors;
  return cut_of(x, blanked, with_bits, kThreads,
                [&](std::int64_t groups, std::int64_t units, std::int64_t strands) {
                  const std::int64_t most = divide_up(units, strands);  // a vector per thread
                  const std::int64_t least = divide_up(units, kMostSteps * strands);
                  return std::max(least, choose_slabs(groups, resident, most));
                });
}

/// For normalize_kernel. Slabs are even, and so is what a block takes.
Cut map_cut(const BatchNormActForward& call) {
  static_assert(map_vectors(false) % 2 == 0 && map_vectors(true) % 2 == 0);
  return cut_of(call.x, call.blanked, call.passes.defined(), kMapThreads,
                [&](std::int64_t, std::int64_t units, std::int64_t strands) {
                  return divide_up(units, map_vectors(call.residual.defined()) * strands);
                });
}

/// Channels of a block.
int width_of(const TensorView& x, const Cut& cut) {
  return has_adjacent_channels(x) ? cut.lanes.value() * static_cast<int>(16 / size_of(x.dtype)) : 1;
}

/// Whether outputs of x's size push each other out of L2.
bool is_streaming(const Context& context, const TensorView& x) {
  return 2 * x.numel() * size_of(x.dtype) > limits_of(context.device).l2_cache;
}

/// The plan of two passes and their launches.
struct Passes {
  const Context& context;
  Cut cut;
  std::int64_t streams;
  int width, vector;  // channels per block, values per 16 bytes

  Passes(const Context& context, const TensorView& x, const TensorView& blanked, bool with_bits)
      : context(context),
        cut(resident_cut(context, x, blanked, with_bits)),
        streams(streams_of(x)),
        width(width_of(x, cut)),
        vector(static_cast<int>(16 / size_of(x.dtype))) {}

  bool combines() const { return Index{cut.slabs.value()} * width <= kMostOwnParts; }
  Launch first(int rows) const {
    return {context, cut.blocks(streams), kThreads,
            sizeof(float) *
                (table_floats(rows, width) + sum_floats(kThreads, width, vector) + 2 * width)};
  }
  /// `follows`: it comes after a kernel of this call. Otherwise it must not load before the kernel
  /// that writes its input is done.
  template <typename Result>
  Launch second(int rows, bool follows) const {
    return {.context = context,
            .blocks = cut.blocks(streams),
            .threads = kThreads,
            .shared_bytes =
                sizeof(float) * table_floats(rows, width) + combine_bytes<Result>(kThreads, width),
            .overlaps_previous = follows};
  }
};

/// Calls body(T, planar, residual) with a value of x's type and two std::bool_constant.
template <typename Body>
void dispatch(const TensorView& x, bool with_residual, Body&& body) {
  dispatch_short_dtype(x.dtype, [&]<typename T>(T) {
    const auto choose = [&](auto planar) {
      if (with_residual) return body(T{}, planar, std::true_type{});
      return body(T{}, planar, std::false_type{});
    };
    if (has_adjacent_channels(x)) return choose(std::false_type{});
    return choose(std::true_type{});
  });
}

}  // namespace

std::string two_pass_declines(const Context&, const BatchNormActForward& call) {
  const std::initializer_list<const TensorView*> images = {&call.x, &call.y, &call.residual};
  const bool with_bits = call.passes.defined();
  // Its sums are of the channels of one pixel.
  if (channels_of(call).own()) return dense_decline(images, with_bits);
  return folded_decline(images, call.blanked, with_bits);
}

std::string two_pass_declines(const Context&, const BatchNormActBackward& call) {
  const std::initializer_list<const TensorView*> images = {&call.x, &call.dy, &call.residual,
                                                           &call.dx, &call.dresidual};
  const bool with_bits = call.passes.defined();
  if (needs_of(call).sums) return dense_decline(images, with_bits);
  return folded_decline(images, call.blanked, with_bits);
}

std::string two_pass_declines(const Context&, const BatchNormStatistics& call) {
  return dense_decline({&call.x}, false);
}

void two_pass_coefficients(const Context& context, const TensorView& x, const TensorView& blanked,
                           const ForwardChannels& f, Coefficients<float>* out) {
  const Passes p(context, x, blanked, false);
  const PartMemory<float> memory(context, f.streams, p.cut.slabs.value(), f.channels);
  dispatch(x, false, [&]<typename T>(T, auto planar, auto) {
    launch_kernel(p.first(1), "computing moments", moments_kernel<T, planar()>, p.cut,
                  static_cast<const T*>(x.data), memory.moments(), f.advanced());
    launch_finish<T>(context, f, memory.moments(), out);
  });
}

void two_pass_run(const Context& context, const BatchNormStatistics& call) {
  const ForwardChannels f = channels_of(call);
  const Scratch<Coefficients<float>> coefficients(context, f.streams * f.channels);
  two_pass_coefficients(context, call.x, call.blanked, f, coefficients.data());
}

void two_pass_run(const Context& context, const BatchNormActForward& call) {
  const ForwardChannels f = channels_of(call);
  const bool own = f.own(), given = !own && f.group == nullptr;  // by the running statistics
  const Scratch<Coefficients<float>> coefficients(context, given ? 0 : f.streams * f.channels);
  if (own) two_pass_coefficients(context, call.x, call.blanked, f, coefficients.data());
  NormalizeArguments a = arguments_of(call);
  a.coefficients = coefficients.data();
  a.streaming = is_streaming(context, call.x);
  const Cut cut = map_cut(call);
  const Launch launch{.context = context,
                      .blocks = cut.blocks(f.streams),
                      .threads = kMapThreads,
                      .shared_bytes = sizeof(float) * table_floats(3, width_of(call.x, cut)),
                      .overlaps_previous = !given};
  dispatch(call.x, call.residual.defined(), [&]<typename T>(T, auto planar, auto residual) {
    if (f.group != nullptr) launch_finish<T>(context, f, {}, coefficients.data());
    launch_kernel(launch, "normalizing", normalize_kernel<T, planar(), residual()>, cut, a);
  });
}

void two_pass_run(const Context& context, const BatchNormActBackward& call) {
  const BackwardChannels b = channels_of(call);
  const BackwardNeeds needs = needs_of(call);
  const Passes p(context, call.x, call.blanked, call.passes.defined());
  const bool between = needs.sums && !(needs.images && p.combines());
  const std::int64_t all = between ? b.streams * b.channels : 0;
  const PartMemory<float> memory(context, b.streams, needs.sums ? p.cut.slabs.value() : 0,
                                 b.channels);
  const Scratch<Coefficients<float>> coefficients(context, all);
  const Scratch<Corrections<float>> corrections(context, all);
  GradientArguments a = arguments_of(call);
  a.parts = memory.gradients();
  a.corrections = corrections.data();
  a.streaming = is_streaming(context, call.x);
  dispatch(call.x, reads_residual(call), [&]<typename T>(T, auto planar, auto residual) {
    if (needs.sums) {
      launch_kernel(p.first(3), "summing gradients", gradient_sums_kernel<T, planar(), residual()>,
                    p.cut, a, a.parts);
    }
    if (between) {
      launch_finish<T>(context, b, a.parts, coefficients.data(), corrections.data());
      a.parts.slabs = 0;
    }
    if (!needs.images) return;
    launch_kernel(p.second<GradientSums<float>>(5, needs.sums), "computing gradients",
                  gradients_kernel<T, planar(), residual()>, p.cut, a);
  });
}

}  // namespace fusewise::cuda
