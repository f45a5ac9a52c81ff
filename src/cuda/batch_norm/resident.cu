// BatchNorm, residual and activation in one kernel, for channels-last images of any size. Where the
// channels of a pixel do not fill vectors of 16 bytes, those of several pixels together do. Its
// blocks are all resident at once: they sum, meet at a barrier of the whole grid, and then
// normalise in reverse order. What they read first is still in their shared memory, what they read
// last in L2. Memory: forward reads x twice (once what fits on the chip), the residual once,
// and writes y. Backward does the same with dy and x, and writes dx and dresidual. Bound by memory
// bandwidth when large, by the barrier and the exchange of sums when small.

#include "cuda/batch_norm/resident.cuh"

#include <cooperative_groups.h>

#include <algorithm>
#include <optional>

#include "common/scratch.h"
#include "cuda/batch_norm/finish.cuh"
#include "cuda/batch_norm/units.cuh"
#include "cuda/copy_async.cuh"
#include "cuda/device.h"
#include "cuda/launch.cuh"

namespace fusewise::cuda {
namespace {

/// Steps that copies run ahead of their use: 48 KB per SM and more.
constexpr int kAheadForward = 8, kAheadResidual = 5, kAheadBackward = 4;
/// Shared memory of a block. There is one block per SM.
constexpr std::size_t kSharedBytes = 220 << 10;
constexpr int kThreads = 512;
constexpr int kMostLanes = kThreads / 8;  // a thread for each channel of a tile

/// A thread's own vectors in shared memory. Those of its first steps stay, because L2 will have
/// lost them; the last kAhead slots are a ring for all others. Nobody else uses them, so they need
/// no barriers. A slot is named by its distance from the first one in bytes.
template <int kImages, int kAhead>
struct Slots {
  static constexpr int kVectorBytes = kThreads * 16, kSlotBytes = kImages * kVectorBytes;

  unsigned char* own;
  unsigned char* own_bits;  // a word for each slot, behind all vectors
  int end;                  // behind the last slot
  int kept;                 // steps that stay

  __device__ Slots(unsigned char* memory, int count)
      : own(memory + threadIdx.x * 16),
        own_bits(memory + count * kSlotBytes + threadIdx.x * 4),
        end(count * kSlotBytes),
        kept(count - kAhead) {}
  __device__ __forceinline__ unsigned char* vector(int slot, int image) const {
    return own + slot + image * kVectorBytes;
  }
  __device__ __forceinline__ unsigned char* bits(int slot) const {
    return own_bits + slot / (kImages * 4);
  }
  __device__ __forceinline__ int ring() const { return end - kAhead * kSlotBytes; }
  __device__ __forceinline__ int after(int slot) const {
    return slot + kSlotBytes == end ? ring() : slot + kSlotBytes;
  }
};

/// Starts copy(slot) for the first steps.
template <int kImages, int kAhead, typename Copy>
__device__ __forceinline__ void copy_ahead(int steps, const Slots<kImages, kAhead>& slots,
                                           Copy copy) {
#pragma unroll
  for (int j = 0; j < kAhead; ++j) {
    if (j < steps) copy(j * slots.kSlotBytes);
    commit_copies();
  }
}

/// Calls use(step, slot) for all steps in order, and pause() after at most 16 of them. copy(slot)
/// starts the copies of the next step. copy_ahead has been called. Returns the slot after that of
/// the last step.
template <int kImages, int kAhead, typename Copy, typename Use, typename Pause>
__device__ __forceinline__ int first_pass(int steps, const Slots<kImages, kAhead>& slots, Copy copy,
                                          Use use, Pause pause) {
  int slot = 0, next = slots.after((kAhead - 1) * slots.kSlotBytes);
#pragma unroll 1
  for (int step = 0; step < steps;) {
    const int until = min(step + 16, steps);
#pragma unroll 1
    for (; step < until; ++step) {
      wait_for_all_but<kAhead - 1>();
      use(step, slot);
      if (step + kAhead < steps) copy(next);
      commit_copies();
      slot = slots.after(slot);
      next = slots.after(next);
    }
    pause();
  }
  return slot;
}

/// The same in reverse order, from the slot that first_pass returned. copy(slot, is_missing) is
/// called for the steps from steps - 1 - kAhead down, also for those that are still in their slots.
template <int kImages, int kAhead, typename Copy, typename Use>
__device__ __forceinline__ void second_pass(int steps, const Slots<kImages, kAhead>& slots,
                                            int slot, Copy copy, Use use) {
#pragma unroll 1
  for (int step = steps - 1; step >= 0; --step) {
    slot = (slot == slots.ring() && step >= slots.kept ? slots.end : slot) - slots.kSlotBytes;
    wait_for_all_but<kAhead - 1>();
    use(step, slot);
    // A missing one goes into the slot that is free now: it is kAhead steps away in the ring.
    if (step >= kAhead) copy(slot, step - kAhead >= slots.kept);
    commit_copies();
  }
}

/// Calls body(std::bool_constant): whether samples may be blanked. Loops that need not ask are
/// shorter.
template <typename Body>
__device__ __forceinline__ void with_blanks(const Cut& cut, Body body) {
  if (cut.blanked == nullptr) {
    body(std::false_type{});
  } else {
    body(std::true_type{});
  }
}

/// Two sums of each channel of a thread. Long sums in float32 lose digits, so every few steps they
/// move on into totals.
template <int kVector>
struct LongSums {
  float first[kVector] = {}, second[kVector] = {};
  float first_total[kVector] = {}, second_total[kVector] = {};

  __device__ __forceinline__ void move_on() {
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      first_total[k] += first[k];
      second_total[k] += second[k];
      first[k] = second[k] = 0;
    }
  }
};

/// The sums of all slabs, [S, slabs, 2, C].
__device__ __forceinline__ float* sums_of(float* sums, const Cut& cut, int stream, int slab) {
  return sums + (static_cast<Index>(stream) * cut.slabs.value() + slab) * 2 * cut.channels;
}

/// Whether the blocks of a stream need each other's sums.
__host__ __device__ inline bool blocks_meet(const Cut& cut) {
  return cut.slabs.value() > 1 || cut.folded > 1;
}

/// Adds the sums of a channel in all slabs, and of all its copies, which may be in other tiles:
/// row i of `rows` has those of every rows-th part from i on. Not inlined: few images are folded,
/// and the code of the others should stay together.
__device__ __noinline__ void add_folded(const Cut& cut, int first, int distinct, int rows,
                                        const float* all, double* shared) {
  const int channels = cut.image_channels.value(), columns = 2 * distinct;
  const int parts = cut.slabs.value() * cut.folded;
  for (int t = threadIdx.x; t < rows * columns; t += kThreads) {
    const int row = t / columns, column = t - row * columns;
    const int second = column >= distinct ? 1 : 0;
    const int k = (first + column - second * distinct) % channels;
    double total = 0;
#pragma unroll 8
    for (int part = row; part < parts; part += rows) {
      const int slab = part / cut.folded, copy = part - slab * cut.folded;
      total += __ldcg(all + (static_cast<Index>(slab) * 2 + second) * cut.channels +
                      copy * channels + k);
    }
    shared[t] = total;
  }
}

/// The same where pixels are not folded, with 16-byte loads.
template <typename T>
__device__ __forceinline__ void add_slabs(const Tile<T, false>& tile, int rows, const float* all,
                                          double* shared) {
  const int slabs = tile.cut.slabs.value(), channels = tile.cut.channels, width = tile.width;
  const int quads = 2 * width / 4;
  for (int t = threadIdx.x; t < rows * quads; t += kThreads) {
    const int row = t / quads, k = (t - row * quads) * 4;
    const float* from = all + tile.first + (k < width ? k : channels + k - width);
    double total[4] = {};
#pragma unroll 8
    for (int slab = row; slab < slabs; slab += rows) {
      const float4 part =
          __ldcg(reinterpret_cast<const float4*>(from + static_cast<Index>(slab) * 2 * channels));
      total[0] += part.x;
      total[1] += part.y;
      total[2] += part.z;
      total[3] += part.w;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) shared[row * 2 * width + k + j] = total[j];
  }
}

/// Adds the sums of all blocks of the stream in float64 and in a fixed order, and calls
/// finish(k, first, second) for k < width, in thread k. `shared`: combine_doubles. Ends with a
/// barrier.
template <typename T, typename Finish>
__device__ __forceinline__ void combine_blocks(const Tile<T, false>& tile, float* sums,
                                               double* shared, Finish finish) {
  const Cut& cut = tile.cut;
  const float* const all = sums_of(sums, cut, tile.stream, 0);
  int distinct = tile.width;  // channels of this block without copies
  int rows = max(1, min(cut.slabs.value(), kThreads / (2 * distinct / 4)));
  if (cut.folded > 1) {
    distinct = min(distinct, cut.image_channels.value());
    rows = max(1, min(cut.slabs.value() * cut.folded, kThreads / (2 * distinct)));
    add_folded(cut, tile.first, distinct, rows, all, shared);
  } else {
    add_slabs(tile, rows, all, shared);
  }
  __syncthreads();
  for (int k = threadIdx.x; k < tile.width; k += kThreads) {
    const double* column = shared + (k < distinct ? k : k % distinct);
    double first = 0, second = 0;
#pragma unroll 8
    for (int row = 0; row < rows; ++row) {
      first += column[2 * row * distinct];
      second += column[(2 * row + 1) * distinct];
    }
    finish(k, first, second);
  }
  __syncthreads();
}
__host__ __device__ constexpr int combine_doubles(int width) {
  return 4 * kThreads > 2 * width ? 4 * kThreads : 2 * width;
}

/// Adds the sums of all threads of the stream and calls finish(k, first, second) for k < width, in
/// thread k. Calls meanwhile() before it waits for the other blocks. A block that has all of the
/// stream's units waits for nobody. `row`: of two rows of the table that are free. Ends with a
/// barrier.
template <typename T, typename Meanwhile, typename Finish>
__device__ __forceinline__ void sum_over_grid(const Tile<T, false>& tile,
                                              const Table<T, false>& table, int row,
                                              LongSums<Vector<T>::kSize>& own, float* sums,
                                              float* work, Meanwhile meanwhile, Finish finish) {
  const bool alone = !blocks_meet(tile.cut);
  float* const to = sums_of(sums, tile.cut, tile.stream, tile.slab) + tile.first;
  sum_over_block(tile, own.first_total, own.second_total, work, [&](int k, double sum) {
    const int second = k >= tile.width ? 1 : 0;
    k -= second * tile.width;
    (alone ? table.at(row + second, k) : to[second * tile.cut.channels + k]) =
        static_cast<float>(sum);
  });
  meanwhile();
  if (alone) {
    for (int k = threadIdx.x; k < tile.width; k += kThreads) {
      finish(k, table.at(row, k), table.at(row + 1, k));
    }
    __syncthreads();
  } else {
    cooperative_groups::this_grid().sync();
    combine_blocks(tile, sums, reinterpret_cast<double*>(work), finish);
  }
}

/// Whether count_calls advances the counters. Blocks that meet at the barrier do it themselves.
__host__ __device__ inline bool counts_before(const Cut& cut, const ForwardChannels& channels) {
  return channels.momentum < 0 && !blocks_meet(cut);
}

/// Bytes of shared memory before the slots: the table, and the sums over the block, where later the
/// slabs are combined.
__host__ __device__ constexpr int head_bytes(int rows, int width, int vector) {
  const int sums = sum_floats(kThreads, width, vector) * static_cast<int>(sizeof(float));
  const int combined = combine_doubles(width) * static_cast<int>(sizeof(double));
  const int table = table_floats(rows, width) * static_cast<int>(sizeof(float));
  return (table + (sums > combined ? sums : combined) + 15) / 16 * 16;
}

template <typename T, Kinds kKinds, bool kResidual>
__global__ void __launch_bounds__(kThreads, 1)
    forward_kernel(const __grid_constant__ Cut cut, const __grid_constant__ NormalizeArguments a,
                   float* sums, int slot_count) {
#if __CUDA_ARCH__ >= 800
  constexpr int kVector = Vector<T>::kSize, kAhead = kResidual ? kAheadResidual : kAheadForward;
  extern __shared__ __align__(16) unsigned char memory[];
  const Tile<T, false> tile(cut, blockIdx.x);
  const int full = cut.lanes.value() * kVector;
  const Table<T, false> table{reinterpret_cast<float*>(memory), tile.lanes};
  float* const work = reinterpret_cast<float*>(memory) + table_floats(3, full);
  using Ring = Slots<1, kAhead>;
  const Ring slots(memory + head_bytes(3, full, kVector), slot_count);
  const Ring others(memory + head_bytes(3, full, kVector) + slots.end, kAhead);
  const T* x = static_cast<const T*>(a.x);
  const Index origin = tile.offset(tile.template unit<false>(0));
  const int stride = tile.stride();
  // Small loads first: behind the copies they would wait for them.
  const Shifts<T, false> shifts(tile, x, 0, cut.units);
  float weight_and_bias[2] = {1, 0};  // of this thread's channel
  if (static_cast<int>(threadIdx.x) < tile.width) {
    parameters<T>({a.channels.weight, a.channels.bias}, a.channels.wide, tile.channel(threadIdx.x),
                  weight_and_bias);
  }
  const T* next = x + origin;
  const auto copy = [&](int slot) {
    copy_vector(slots.vector(slot, 0), next);
    next += stride;
  };
  copy_ahead(tile.steps, slots, copy);
  if (!counts_before(cut, a.channels)) tile.count_call(a.channels.advanced());
  const double count = tile.count(0, cut.units);
  shifts.store(tile, table, work);  // where the means will be
  float shift[kVector];
  LongSums<kVector> own_sums;
  table.get(kMean, tile.lane, shift);
  int end = 0;
  with_blanks(cut, [&](auto blanks) {
    end = first_pass(
        tile.steps, slots, copy,
        [&](int step, int slot) {
          if (blanks && tile.is_blank(tile.template unit<false>(step))) return;
          Packed<T> values;
          values.load_shared(slots.vector(slot, 0));
          add_moments(values, shift, own_sums.first, own_sums.second);
        },
        [&] { own_sums.move_on(); });
  });
  Index at = origin + static_cast<Index>(tile.steps - 1) * stride;  // of the last step
  next = x + at - kAhead * stride;
  const T* next_residual = static_cast<const T*>(a.residual) + at;
  const auto copy_residual = [&](int slot) {
    copy_vector(others.vector(slot, 0), next_residual);
    next_residual -= stride;
  };
  const double share = tile.share(count);
  double mean = 0, variance = 0;  // of this thread's channel
  sum_over_grid(
      tile, table, kScale, own_sums, sums, work,
      [&] {  // what the second pass needs first
        if constexpr (kResidual) copy_ahead(tile.steps, others, copy_residual);
      },
      [&](int k, double d, double dd) {
        mean = static_cast<double>(table.at(kMean, k)) + d * share;
        variance = above_0(dd - d * d * share) * share;
        const float eps = static_cast<float>(a.channels.eps);
        table.at(kMean, k) = static_cast<float>(mean);
        table.at(kScale, k) =
            inverse_deviation(static_cast<float>(variance), eps) * weight_and_bias[0];
        table.at(kShift, k) = weight_and_bias[1];
      });
  const Held<T, 3> held(table, tile.lane);
  int other = 0, used = 0;  // slots of the residual
  with_blanks(cut, [&](auto blanks) {
    second_pass(
        tile.steps, slots, end,
        [&](int slot, bool is_missing) {
          if (is_missing) copy_vector(slots.vector(slot, 0), next);
          next -= stride;
          if constexpr (kResidual) copy_residual(used);
        },
        [&](int step, int slot) {
          Packed<T> values, added;
          values.load_shared(slots.vector(slot, 0));
          if constexpr (kResidual) {
            added.load_shared(others.vector(other, 0));
            used = other;
            other = others.after(other);
          }
          const bool blank = blanks && tile.is_blank(tile.template unit<false>(step));
          write_normalized<kResidual, kKinds>(a, tile, held, blank, at, values, added);
          at -= stride;
        });
  });
  // Last, because nobody waits for it. A tile has no more channels than a block has threads.
  if (static_cast<int>(threadIdx.x) < tile.width && tile.writes(threadIdx.x)) {
    finish_channel<T>(a.channels, tile.channel(threadIdx.x), count, mean, variance,
                      calls_of(a.channels.counter, tile.stream), true);
  }
#endif
}

template <typename T, Kinds kKinds>
__global__ void __launch_bounds__(kThreads, 1)
    backward_kernel(const __grid_constant__ Cut cut, const __grid_constant__ GradientArguments a,
                    float* sums, int slot_count) {
#if __CUDA_ARCH__ >= 800
  constexpr int kVector = Vector<T>::kSize;
  extern __shared__ __align__(16) unsigned char memory[];
  const Tile<T, false> tile(cut, blockIdx.x);
  const int full = cut.lanes.value() * kVector;
  const Table<T, false> table{reinterpret_cast<float*>(memory), tile.lanes};
  float* const work = reinterpret_cast<float*>(memory) + table_floats(5, full);
  const Slots<2, kAheadBackward> slots(memory + head_bytes(5, full, kVector), slot_count);
  const Index origin = tile.offset(tile.template unit<false>(0));
  const int stride = tile.stride();
  const Index bit_bytes = a.channels.streams * cut.units * cut.channels / 8;
  Index next = origin;
  const auto copy = [&](int slot) {
    copy_vector(slots.vector(slot, 0), static_cast<const T*>(a.dy) + next);
    copy_vector(slots.vector(slot, 1), static_cast<const T*>(a.x) + next);
    if (a.passes == nullptr) return;
    const Index word = next / 32 * 4;
    copy_word(slots.bits(slot), a.passes + word, min(Index{4}, bit_bytes - word));
  };
  Index at = origin;
  const auto get = [&](int slot) {
    GradientVectors<T, false, kKinds> vectors;
    vectors.dy.load_shared(slots.vector(slot, 0));
    vectors.x.load_shared(slots.vector(slot, 1));
    if (a.passes != nullptr) {
      vectors.bits = *reinterpret_cast<const unsigned*>(slots.bits(slot)) >> at % 32;
    }
    return vectors;
  };
  // Small loads first: behind the copies they would wait for them.
  const bool has_channel = static_cast<int>(threadIdx.x) < tile.width;
  Coefficients<float> of_channel{};
  if (has_channel) of_channel = saved_coefficients<T>(a.channels, tile.channel(threadIdx.x));
  const auto copy_next = [&](int slot) {
    copy(slot);
    next += stride;
  };
  copy_ahead(tile.steps, slots, copy_next);
  const double count = tile.count(0, cut.units);
  if (has_channel) {
    table.at(kMean, threadIdx.x) = of_channel.mean;
    table.at(kScale, threadIdx.x) = of_channel.scale;
    table.at(kShift, threadIdx.x) = of_channel.shift;
  }
  __syncthreads();
  LongSums<kVector> own_sums;
  const Held<T, 3> saved(table, tile.lane);
  int end = 0;
  with_blanks(cut, [&](auto blanks) {
    end = first_pass(
        tile.steps, slots, copy_next,
        [&](int step, int slot) {
          if (!blanks || !tile.is_blank(tile.template unit<false>(step))) {
            add_gradients(a, saved, tile.lane, get(slot), own_sums.first, own_sums.second);
          }
          at += stride;
        },
        [&] { own_sums.move_on(); });
  });
  sum_over_grid(
      tile, table, kOffset, own_sums, sums, work, [] {},
      [&](int k, double dv, double dvx) {
        const Index channel = tile.channel(k);
        const float inverse = of_channel.inverse;
        const GradientSums<float> all{count, static_cast<float>(dv), static_cast<float>(dvx)};
        Corrections<float> value =
            finish_gradient<T>(a.channels, channel, all, inverse, tile.writes(k));
        if (a.channels.group != nullptr) value = group_corrections<T>(a.channels, channel, inverse);
        table.at(kOffset, k) = value.offset;
        table.at(kSlope, k) = value.slope;
      });
  const Held<T, 5> held(table, tile.lane);
  next = at - (kAheadBackward + 1) * stride;  // at: behind the last step
  with_blanks(cut, [&](auto blanks) {
    second_pass(
        tile.steps, slots, end,
        [&](int slot, bool is_missing) {
          if (is_missing) copy(slot);
          next -= stride;
        },
        [&](int step, int slot) {
          at -= stride;
          const bool blank = blanks && tile.is_blank(tile.template unit<false>(step));
          write_gradients(a, tile, held, blank, at, get(slot));
        });
  });
#endif
}

// ---- Host.

struct Plan {
  Cut cut;
  int slots;
  std::size_t shared_bytes;
};

/// What a kernel needs of shared memory.
struct Needs {
  int rows;        // of the table
  int step_bytes;  // of a thread
  int ahead;
  int others;  // more bytes of a thread
  bool bits;   // reads or writes the bits of relu
};
Needs shared_needs_of(const BatchNormActForward& call) {
  const bool bits = call.passes.defined();
  return call.residual.defined() ? Needs{3, 16, kAheadResidual, kAheadResidual * 16, bits}
                                 : Needs{3, 16, kAheadForward, 0, bits};
}
Needs shared_needs_of(const BatchNormActBackward& call) {
  const bool bits = call.passes.defined();
  return {5, bits ? 36 : 32, kAheadBackward, 0, bits};
}

/// The cut that is expected to be fastest. Its cost is in steps of a thread: those of the widest
/// slab, more if blocks read short pieces of a pixel, and the time to meet and to combine the
/// slabs. The factors are from measurements on an H200.
std::optional<Plan> plan(const Context& context, const TensorView& x, const TensorView& blanked,
                         const Needs& needs) {
  const DeviceLimits& limits = limits_of(context.device);
  const int vector = static_cast<int>(16 / size_of(x.dtype));
  const std::int64_t folded = folded_pixels(x, blanked, needs.bits);
  const std::int64_t vectors = dimension(x, 3) * folded / vector;
  const std::int64_t units = dimension(x, 4) * dimension(x, 2) * dimension(x, 1) / folded;
  std::int64_t best_lanes = 0, best_slabs = 0;
  double least = 0;
  const auto consider = [&](std::int64_t lanes, std::int64_t slabs) {
    if (slabs == 0) return;
    const std::int64_t tiles = divide_up(vectors, lanes);
    const std::int64_t waves = divide_up(streams_of(x) * tiles * slabs, limits.multiprocessors);
    const std::int64_t steps = divide_up(divide_up(units, slabs), kThreads / lanes);
    const double short_pieces = tiles == 1 || lanes >= 16 ? 1.0
                                : lanes >= 8              ? 1.04
                                : lanes >= 6              ? 1.15
                                                          : 2.0;
    double cost = static_cast<double>(waves * steps) * short_pieces;
    if (slabs > 1) {
      cost += 10 + static_cast<double>(std::min(slabs, units) * lanes * vector) / 2500;
    }
    if (best_lanes > 0 && cost >= least) return;
    best_lanes = lanes;
    best_slabs = slabs;
    least = cost;
  };
  const auto consider_all = [&](std::int64_t lanes) {
    if (folded == 1) consider(lanes, 1);
    consider(lanes, limits.multiprocessors / (streams_of(x) * divide_up(vectors, lanes)));
  };
  // Even, so that blocks do not share 32-byte sectors.
  for (std::int64_t lanes = 2; lanes <= 24 && lanes < vectors; lanes += 2) consider_all(lanes);
  if (vectors <= kMostLanes) consider_all(vectors);
  if (best_lanes == 0) return std::nullopt;
  const int lanes = static_cast<int>(best_lanes);
  const Cut cut = make_cut(x, blanked, kThreads, lanes, best_slabs, folded);
  const int head = head_bytes(needs.rows, lanes * vector, vector) + kThreads * needs.others;
  const std::int64_t room = std::min<std::int64_t>(kSharedBytes, limits.block_shared_memory) - head;
  const std::int64_t steps = divide_up(cut.per_slab, kThreads / lanes);
  const std::int64_t slots =
      std::min(room / (kThreads * needs.step_bytes), std::max<std::int64_t>(steps, needs.ahead));
  if (slots < needs.ahead) return std::nullopt;
  return Plan{.cut = cut,
              .slots = static_cast<int>(slots),
              .shared_bytes = static_cast<std::size_t>(head + slots * kThreads * needs.step_bytes)};
}

std::string declines(const Context& context, const TensorView& x, const TensorView& blanked,
                     const Needs& needs) {
  if (limits_of(context.device).capability < 80) {
    return "asynchronous copies need compute capability 8.0";
  }
  if (!has_adjacent_channels(x)) return "it takes channels-last images";
  if (!plan(context, x, blanked, needs)) {
    return "its blocks do not fit on the GPU at once, or need more shared memory than there is";
  }
  return {};
}

Launch launch_of(const Context& context, const TensorView& x, const Plan& plan) {
  return {.context = context,
          .blocks = plan.cut.blocks(streams_of(x)),
          .threads = kThreads,
          .shared_bytes = plan.shared_bytes,
          .cooperative = blocks_meet(plan.cut)};
}

/// Calls body(T, kinds) with a value of x's type and a constant of Kinds.
template <typename Call, typename Body>
void dispatch(const Call& call, Body&& body) {
  dispatch_short_dtype(call.x.dtype, [&]<typename T>(T) {
    if (kinds_of(call.activation) == Kinds::smooth) {
      return body(T{}, std::integral_constant<Kinds, Kinds::smooth>{});
    }
    body(T{}, std::integral_constant<Kinds, Kinds::piecewise>{});
  });
}

/// Memory for the sums of all slabs.
Scratch<float> sums_memory(const Context& context, const TensorView& x, const Cut& cut) {
  return Scratch<float>(context, streams_of(x) * cut.slabs.value() * 2 * cut.channels);
}

}  // namespace

std::string resident_declines(const Context& context, const BatchNormActForward& call) {
  std::string reason =
      folded_decline({&call.x, &call.y, &call.residual}, call.blanked, call.passes.defined());
  if (!reason.empty()) return reason;
  if (!channels_of(call).own()) return "the statistics are given, so one pass is enough";
  return declines(context, call.x, call.blanked, shared_needs_of(call));
}

std::string resident_declines(const Context& context, const BatchNormActBackward& call) {
  std::string reason = folded_decline({&call.x, &call.dy, &call.dx, &call.dresidual}, call.blanked,
                                      call.passes.defined());
  if (!reason.empty()) return reason;
  if (reads_residual(call)) return "it does not read the residual";
  if (reinterpret_cast<std::uintptr_t>(call.passes.data) % 4 != 0) {
    return "the bits of relu do not start on a 4-byte boundary";
  }
  const BackwardNeeds needs = needs_of(call);
  if (!needs.sums || !needs.images) return "one pass is enough for these gradients";
  return declines(context, call.x, call.blanked, shared_needs_of(call));
}

void resident_run(const Context& context, const BatchNormActForward& call) {
  const Plan p = *plan(context, call.x, call.blanked, shared_needs_of(call));
  const Scratch<float> sums = sums_memory(context, call.x, p.cut);
  const NormalizeArguments a = arguments_of(call);
  if (counts_before(p.cut, a.channels)) {
    count_calls(context, a.channels.advanced(), call.x, call.blanked);
  }
  dispatch(call, [&]<typename T>(T, auto kinds) {
    auto* kernel = call.residual.defined() ? forward_kernel<T, kinds(), true>
                                           : forward_kernel<T, kinds(), false>;
    launch_kernel(launch_of(context, call.x, p), "normalizing", kernel, p.cut, a, sums.data(),
                  p.slots);
  });
}

void resident_run(const Context& context, const BatchNormActBackward& call) {
  const Plan p = *plan(context, call.x, call.blanked, shared_needs_of(call));
  const Scratch<float> sums = sums_memory(context, call.x, p.cut);
  const GradientArguments a = arguments_of(call);
  dispatch(call, [&]<typename T>(T, auto kinds) {
    launch_kernel(launch_of(context, call.x, p), "computing gradients", backward_kernel<T, kinds()>,
                  p.cut, a, sums.data(), p.slots);
  });
}

}  // namespace fusewise::cuda
