#pragma once

// How the images of Squeeze-and-Excitation are cut into blocks, and how samples and blocks are
// distributed over threads. A few samples at a time are taken through all steps, so that the second
// read hits the caches.

#include <algorithm>
#include <atomic>
#include <numeric>

#include "common/scratch.h"
#include "cpu/threads.h"
#include "cpu/types.h"

namespace fusewise::cpu::squeeze_excite {

using Index = std::int64_t;

// Chosen by measurement on two Zen 4 cores with 1 MB of L2 each.
constexpr Index kBlockElements = 32 * 1024;  // work unit of one thread inside a sample
constexpr Index kBlockRows = 16;             // fewer rows would make partial sums too expensive
constexpr Index kShortRow = 256;             // channels-last: rows shorter than this are joined
constexpr Index kJoinedRow = 16;             // to a multiple of the widest vector
constexpr Index kFewRows = 8;                // for fewer, values per row would cost too much
constexpr Index kGroupBytes = 4 << 20;       // samples that share one read of the weights
constexpr Index kGroupSamples = 8;
constexpr Index kWorthThreads = 16 * 1024;  // fewer multiplications run on one thread
constexpr Index kStreamBytes = 16 << 20;    // outputs this large bypass the caches

// Iterating over an image. ----------------------------------------------------------------------

/// The pixels of a sample as one dimension, if H and W can be merged.
struct Pixels {
  bool joined;
  Index stride;
};

inline Pixels pixels_of(const TensorView& t) {
  const Index height = t.sizes[2], width = t.sizes[3];
  if (width == 1) return {true, height == 1 ? 1 : t.strides[2]};
  return {height == 1 || t.strides[2] == width * t.strides[3], t.strides[3]};
}

inline bool is_planar(const TensorView& t) {
  const Pixels pixels = pixels_of(t);
  return pixels.joined && pixels.stride == 1;
}

inline bool is_channels_last(const TensorView& t) {
  return pixels_of(t).joined && (t.sizes[1] == 1 || t.strides[1] == 1);
}

/// How to iterate over all images of a call: as planes (NCHW) or as rows of channels
/// (channels-last).
struct Walk {
  Index channels, height, width, pixels;
  bool planar = true;
  Index joined = 1;  // pixels in one row of the channels-last kernels
  Index block = 1;   // channels (planar) or pixels (channels-last) of one work unit
  Index blocks = 1;

  Index volume() const { return channels * pixels; }
  Index row() const { return channels * joined; }
  Index begin(Index b) const { return b * block; }
  Index end(Index b) const { return std::min((b + 1) * block, planar ? channels : pixels); }
  /// Calls body({rows, columns, planar}, channel, offset) for the one or two matrices of a block:
  /// planes, or rows of joined pixels and the pixels that do not fill a row. channel: the first
  /// one. offset: pixels before the matrix.
  template <typename Body>
  void each_matrix(Index b, const Body& body) const {
    const Index count = end(b) - begin(b);
    if (planar) return body({count, pixels, true}, begin(b), 0);
    const Index rows = count / joined, rest = count % joined;
    if (rows > 0) body({rows, row(), false}, 0, 0);
    if (rest > 0) body({1, rest * channels, false}, 0, rows * joined);
  }
};

/// The layout that most of the images have; the others are copied. Absent images do not count.
inline Walk walk_of(std::initializer_list<const TensorView*> images) {
  const TensorView& first = **images.begin();
  Walk walk{first.sizes[1], first.sizes[2], first.sizes[3], first.sizes[2] * first.sizes[3]};
  int planar = 0, channels_last = 0;
  bool dense = true;
  for (const TensorView* t : images) {
    if (!t->defined()) continue;
    planar += is_planar(*t);
    channels_last += is_channels_last(*t);
    dense = dense && (!is_channels_last(*t) || pixels_of(*t).stride == walk.channels);
  }
  walk.planar = walk.pixels > 1 ? planar >= channels_last : planar > channels_last;
  if (walk.planar) {
    walk.block = std::max<Index>(1, kBlockElements / walk.pixels);
  } else {
    if (dense && walk.channels < kShortRow) {
      walk.joined = kJoinedRow / std::gcd(walk.channels, kJoinedRow);
      const Index wanted = (kShortRow + walk.row() - 1) / walk.row();
      walk.joined *= std::clamp<Index>(walk.pixels / (kFewRows * walk.joined), 1, wanted);
      walk.joined = std::min(walk.joined, walk.pixels);
    }
    walk.block = walk.joined * std::max(kBlockRows, kBlockElements / walk.row());
  }
  const Index all = walk.planar ? walk.channels : walk.pixels;
  walk.blocks = (all + walk.block - 1) / walk.block;
  return walk;
}

struct Strides {
  Index channel, row, column;
};

/// Copies channels [c0, c1) of pixels [p0, p1).
template <typename T>
void copy(const Walk& walk, const T* from, Strides in, T* to, Strides out, Index c0, Index c1,
          Index p0, Index p1) {
  constexpr Index kTile = 16;  // channels: contiguous on one side; pixels may be on the other
  for (Index tile = c0; tile < c1; tile += kTile) {
    const Index last = std::min(c1, tile + kTile);
    Index h = p0 / walk.width, w = p0 % walk.width;
    for (Index p = p0; p < p1; ++p) {
      const T* source = from + h * in.row + w * in.column;
      T* target = to + h * out.row + w * out.column;
      for (Index c = tile; c < last; ++c) target[c * out.channel] = source[c * in.channel];
      if (++w == walk.width) w = 0, ++h;
    }
  }
}

/// One of x, y, dy, dx as the kernels see it: the tensor itself, or dense copies of some samples.
template <typename T>
class Image {
 public:
  Image(const Context& context, const Walk& walk, const TensorView& t, Index slots)
      : walk_(walk),
        native_(!t.defined() || (walk.planar ? is_planar(t) : is_channels_last(t))),
        data_(static_cast<T*>(t.data)),
        sample_stride_(t.strides[0]),
        strides_{t.strides[1], t.strides[2], t.strides[3]},
        step_(walk.planar ? walk.pixels : walk.channels),
        copies_(context, native_ ? 0 : slots * walk.volume()) {
    if (native_ && t.defined()) step_ = walk.planar ? t.strides[1] : pixels_of(t).stride;
  }

  /// Stride from one plane or pixel to the next.
  Index step() const { return step_; }
  /// Address of block b of sample n. A copy is in the slot.
  T* block(Index n, Index slot, Index b) const { return sample(n, slot) + walk_.begin(b) * step_; }
  void gather(Index n, Index slot, Index b) const {
    if (!native_) transfer(data_ + n * sample_stride_, strides_, sample(n, slot), dense(), b);
  }
  void scatter(Index n, Index slot, Index b) const {
    if (!native_) transfer(sample(n, slot), dense(), data_ + n * sample_stride_, strides_, b);
  }
  bool native() const { return native_; }

 private:
  T* sample(Index n, Index slot) const {
    return native_ ? data_ + n * sample_stride_ : copies_.data() + slot * walk_.volume();
  }
  Strides dense() const {
    if (walk_.planar) return {walk_.pixels, walk_.width, 1};
    return {1, walk_.width * walk_.channels, walk_.channels};
  }
  void transfer(const T* from, Strides in, T* to, Strides out, Index b) const {
    const Index begin = walk_.begin(b), end = walk_.end(b);
    if (walk_.planar)
      copy(walk_, from, in, to, out, begin, end, 0, walk_.pixels);
    else
      copy(walk_, from, in, to, out, 0, walk_.channels, begin, end);
  }

  const Walk& walk_;
  bool native_;
  T* data_;
  Index sample_stride_;
  Strides strides_;
  Index step_;
  Scratch<T> copies_;
};

/// A matrix of sums, one row per sample: the caller's, or scratch.
template <typename A>
class SampleSums {
 public:
  SampleSums(const Context& context, Index rows, Index columns)
      : own_(context, rows * columns), data_(own_.data()), stride_(columns) {}
  SampleSums(const Context& context, const TensorView& t, Index rows, Index columns)
      : own_(context, t.defined() ? 0 : rows * columns),
        data_(t.defined() ? static_cast<A*>(t.data) : own_.data()),
        stride_(t.defined() ? t.strides[0] : columns) {}

  A* operator[](Index row) const { return data_ + row * stride_; }
  Index stride() const { return stride_; }

 private:
  Scratch<A> own_;
  A* data_;
  Index stride_;
};

// Distribution of work. --------------------------------------------------------------------------

/// How the samples of a call are distributed over threads.
struct Plan {
  int workers;     // threads that process whole samples, a group at a time
  Index together;  // number of samples, from the first, that the workers process
  Index group;
  Index slots;  // samples in progress at the same time

  /// `bytes` of an element that stay in the caches, `products`: multiplications outside of images.
  Plan(const Context& context, Index samples, const Walk& walk, Index bytes, Index products,
       Index group_bytes = kGroupBytes) {
    const Index volume = walk.volume();
    workers = samples * (volume + products) < kWorthThreads ? 1 : threads(context);
    // If the remaining samples would leave threads idle, split them internally, if they are large
    // enough.
    const Index rest = volume < kWorthThreads ? 0 : samples % workers;
    together = samples - rest;
    workers = static_cast<int>(std::clamp<Index>(together, 1, workers));
    group = std::clamp<Index>(group_bytes / (volume * bytes), 1, kGroupSamples);
    group = std::clamp<Index>(group, 1, std::max<Index>(1, together / workers));
    slots = std::max(workers * group, rest);
  }
};

/// Runs work(begin, end) over [0, count): on this thread alone, or on all.
struct OneThread {
  template <typename Work>
  void operator()(Index count, Index, const Work& work) const {
    work(0, count);
  }
};
struct AllThreads {
  const Context& context;
  /// `cost`: multiplications per index.
  template <typename Work>
  void operator()(Index count, Index cost, const Work& work) const {
    if (count * cost < kWorthThreads) return work(0, count);
    parallel_for(context, count, work);
  }
};

/// Takes every sample through `first` (all its blocks), `middle` and `last` (all its blocks).
/// Operation: first(n, slot, block), middle(n, slot, samples, loop), last(n, slot, block).
template <typename Operation>
void drive(const Context& context, const Plan& plan, const Walk& walk, Index samples,
           const Operation& operation) {
  std::atomic<Index> next{0};
  parallel_for(context, plan.together > 0 ? plan.workers : 0, [&](Index begin, Index end) {
    for (Index worker = begin; worker < end; ++worker) {
      const Index slot = worker * plan.group;
      for (Index n; (n = next.fetch_add(plan.group)) < plan.together;) {
        const Index count = std::min(plan.group, plan.together - n);
        for (Index j = 0; j < count; ++j) {
          for (Index b = 0; b < walk.blocks; ++b) operation.first(n + j, slot + j, b);
        }
        operation.middle(n, slot, count, OneThread{});
        // In reverse order: what was read last is still in the nearest cache.
        for (Index j = count - 1; j >= 0; --j) {
          for (Index b = walk.blocks - 1; b >= 0; --b) operation.last(n + j, slot + j, b);
        }
      }
    }
  });

  const Index n = plan.together, rest = samples - n;
  if (rest == 0) return;
  const AllThreads loop{context};
  loop(rest * walk.blocks, kWorthThreads, [&](Index begin, Index end) {
    for (Index i = begin; i < end; ++i) {
      operation.first(n + i / walk.blocks, i / walk.blocks, i % walk.blocks);
    }
  });
  operation.middle(n, 0, rest, loop);
  loop(rest * walk.blocks, kWorthThreads, [&](Index begin, Index end) {
    for (Index i = begin; i < end; ++i) {
      operation.last(n + i / walk.blocks, i / walk.blocks, i % walk.blocks);
    }
  });
}

/// Sums per channel of the samples in progress: of each block first, then over all blocks.
template <typename A>
class BlockSums {
 public:
  BlockSums(const Context& context, const Walk& walk, Index slots, Index kinds = 1)
      : walk_(walk),
        kinds_(kinds),
        size_(walk.planar ? walk.channels : walk.blocks * walk.row()),
        sums_(context, slots * kinds * size_) {}

  /// The sums of a block, one per element of its values per channel.
  A* of(Index slot, Index block, Index kind = 0) const {
    return all(slot, kind) + (walk_.planar ? walk_.begin(block) : block * walk_.row());
  }
  void clear(Index slot, Index block) const {
    const Index size = walk_.planar ? walk_.end(block) - walk_.begin(block) : walk_.row();
    for (Index kind = 0; kind < kinds_; ++kind) std::fill_n(of(slot, block, kind), size, A(0));
  }
  /// The sums over all blocks, in order: one per channel. They stay in the slot.
  A* total(Index slot, Index kind = 0) const {
    A* total = all(slot, kind);
    if (walk_.planar) return total;
    for (Index i = walk_.row(); i < walk_.blocks * walk_.row(); i += walk_.row()) {
      for (Index c = 0; c < walk_.row(); ++c) total[c] += total[i + c];
    }
    for (Index i = walk_.channels; i < walk_.row(); i += walk_.channels) {
      for (Index c = 0; c < walk_.channels; ++c) total[c] += total[i + c];
    }
    return total;
  }

 private:
  A* all(Index slot, Index kind) const { return sums_.data() + (slot * kinds_ + kind) * size_; }

  const Walk& walk_;
  const Index kinds_, size_;
  const Scratch<A> sums_;
};

/// Calls prepare(n, slot) for every sample, then work(n, slot, block) for all its blocks. The last
/// sample comes first: it is still in the caches.
template <typename Prepare, typename Work>
void each_block(const Context& context, const Plan& plan, const Walk& walk, Index samples,
                const Prepare& prepare, const Work& work) {
  const Index n = plan.together, rest = samples - n;
  for (Index i = 0; i < rest; ++i) prepare(n + i, i);
  AllThreads{context}(rest * walk.blocks, kWorthThreads, [&](Index begin, Index end) {
    for (Index i = end - 1; i >= begin; --i) {
      work(n + i / walk.blocks, i / walk.blocks, i % walk.blocks);
    }
  });
  std::atomic<Index> next{0};
  parallel_for(context, plan.together > 0 ? plan.workers : 0, [&](Index begin, Index end) {
    for (Index worker = begin; worker < end; ++worker) {
      const Index slot = worker * plan.group;
      for (Index i; (i = next.fetch_add(1)) < plan.together;) {
        const Index sample = plan.together - 1 - i;
        prepare(sample, slot);
        for (Index b = walk.blocks - 1; b >= 0; --b) work(sample, slot, b);
      }
    }
  });
}

/// Repeats one row of channel values until it is as wide as the rows of the kernels.
template <typename A>
void widen(const Walk& walk, const A* channels, A* row) {
  for (Index i = 0; i < walk.row(); i += walk.channels) {
    std::copy_n(channels, walk.channels, row + i);
  }
}

/// Whether an output is so large that the caches could not hold it for the next reader anyway.
inline bool worth_streaming(const TensorView& out, bool native) {
  return native && out.defined() && out.numel() * size_of(out.dtype) >= kStreamBytes;
}

}  // namespace fusewise::cpu::squeeze_excite
