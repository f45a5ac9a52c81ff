// Squeeze-and-Excitation on the CPU: distributes samples and blocks over threads.
// A few samples at a time are pooled, excited and scaled, so that the second read of x (and of dy
// in backward) hits the caches. Bound by memory bandwidth.

#include <algorithm>
#include <atomic>
#include <numeric>
#include <string>

#include "common/implementation.h"
#include "common/math.h"
#include "common/scratch.h"
#include "cpu/instruction_sets.h"
#include "cpu/squeeze_excite_kernels.h"
#include "cpu/threads.h"
#include "fusewise/squeeze_excite.h"

namespace fusewise::cpu {
namespace {

using Index = std::int64_t;

// Chosen by measurement on two Zen 4 cores with 1 MB of L2 each.
constexpr Index kBlockElements = 32 * 1024;  // work unit of one thread inside a sample
constexpr Index kBlockRows = 16;             // fewer rows would make partial sums too expensive
constexpr Index kShortRow = 256;             // channels-last: rows shorter than this are joined
constexpr Index kJoinedRow = 16;             // to a multiple of the widest vector
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

Pixels pixels_of(const TensorView& t) {
  const Index height = t.sizes[2], width = t.sizes[3];
  if (width == 1) return {true, height == 1 ? 1 : t.strides[2]};
  return {height == 1 || t.strides[2] == width * t.strides[3], t.strides[3]};
}

bool is_planar(const TensorView& t) {
  const Pixels pixels = pixels_of(t);
  return pixels.joined && pixels.stride == 1;
}

bool is_channels_last(const TensorView& t) {
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
};

/// The layout that most of the images have; the others are copied. Absent images do not count.
Walk walk_of(std::initializer_list<const TensorView*> images) {
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
      walk.joined *= (kShortRow + walk.row() - 1) / walk.row();
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

  Plan(const Context& context, Index samples, const Walk& walk, Index element, Index products) {
    const Index volume = walk.volume();
    workers = samples * (volume + products) < kWorthThreads ? 1 : threads(context);
    // If the remaining samples would leave threads idle, split them internally, if they are large
    // enough.
    const Index rest = volume < kWorthThreads ? 0 : samples % workers;
    together = samples - rest;
    workers = static_cast<int>(std::clamp<Index>(together, 1, workers));
    group = std::clamp<Index>(kGroupBytes / (volume * element), 1, kGroupSamples);
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

/// Sums over pixels and scaling, block by block, in either layout.
template <typename T, typename A = AccumulatorOf<T>>
class Passes {
 public:
  Passes(const Context& context, const Kernels<T>& kernels, const Walk& walk, Index slots)
      : kernels_(kernels),
        walk_(walk),
        partial_(context, slots, walk.planar ? walk.channels : walk.blocks * walk.row()) {}

  /// The sums of block b over a, or over a * b if b is given.
  void reduce(Index slot, Index block, const T* a, Index a_step, const T* b, Index b_step) const {
    const Index count = walk_.end(block) - walk_.begin(block);
    if (walk_.planar) {
      A* sums = partial_[slot] + walk_.begin(block);
      return kernels_.reduce_planes(a, a_step, b, b_step, count, walk_.pixels, sums);
    }
    A* sums = partial_[slot] + block * walk_.row();
    std::fill_n(sums, walk_.row(), A(0));
    const Index joined = walk_.joined, rows = count / joined, rest = count % joined;
    kernels_.reduce_rows(a, a_step * joined, b, b_step * joined, rows, walk_.row(), sums);
    if (rest > 0) {
      const T* b_rest = b == nullptr ? nullptr : b + rows * joined * b_step;
      kernels_.reduce_rows(a + rows * joined * a_step, 0, b_rest, 0, 1, rest * walk_.channels,
                           sums);
    }
  }

  /// The sums over all blocks, in order: one per channel. They stay in the slot.
  A* sums(Index slot) const {
    A* total = partial_[slot];
    if (walk_.planar) return total;
    for (Index i = walk_.row(); i < walk_.blocks * walk_.row(); i += walk_.row()) {
      for (Index c = 0; c < walk_.row(); ++c) total[c] += total[i + c];
    }
    for (Index i = walk_.channels; i < walk_.row(); i += walk_.channels) {
      for (Index c = 0; c < walk_.channels; ++c) total[c] += total[i + c];
    }
    return total;
  }

  /// out = in * factors (+ offsets). Both are as wide as `row()`.
  void scale(Index block, const T* in, Index in_step, const A* factors, const A* offsets, T* out,
             Index out_step, bool stream) const {
    const Index count = walk_.end(block) - walk_.begin(block);
    if (walk_.planar) {
      const Index c = walk_.begin(block);
      return kernels_.scale_planes(in, in_step, factors + c, offsets ? offsets + c : nullptr, count,
                                   walk_.pixels, out, out_step, stream);
    }
    const Index joined = walk_.joined, rows = count / joined, rest = count % joined;
    kernels_.scale_rows(in, in_step * joined, factors, offsets, rows, walk_.row(), out,
                        out_step * joined, stream);
    if (rest > 0) {
      const Index done = rows * joined;
      kernels_.scale_rows(in + done * in_step, 0, factors, offsets, 1, rest * walk_.channels,
                          out + done * out_step, 0, stream);
    }
  }

 private:
  const Kernels<T>& kernels_;
  const Walk& walk_;
  SampleSums<A> partial_;
};

/// Repeats one row of channel values until it is as wide as the rows of the kernels.
template <typename A>
void widen(const Walk& walk, const A* channels, A* row) {
  for (Index i = 0; i < walk.row(); i += walk.channels) {
    std::copy_n(channels, walk.channels, row + i);
  }
}

/// Whether an output is so large that the caches could not hold it for the next reader anyway.
bool worth_streaming(const TensorView& out, bool native) {
  return native && out.defined() && out.numel() * size_of(out.dtype) >= kStreamBytes;
}

// Forward. ---------------------------------------------------------------------------------------

template <typename T, typename W>
class Forward {
  using A = AccumulatorOf<T>;

 public:
  Forward(const Context& context, const SqueezeExciteForward& call, const Kernels<T>& images,
          const Kernels<W>& weights)
      : call_(call),
        weights_(weights),
        samples_(call.x.sizes[0]),
        channels_(call.x.sizes[1]),
        reduced_(call.w1.sizes[0]),
        walk_(walk_of({&call.x, &call.y})),
        plan_(context, samples_, walk_, sizeof(T), 2 * channels_ * reduced_),
        x_(context, walk_, call.x, plan_.slots),
        y_(context, walk_, call.y, plan_.slots),
        passes_(context, images, walk_, plan_.slots),
        pooled_(context, call.pooled, samples_, channels_),
        hidden_(context, call.hidden, samples_, reduced_),
        gates_(context, call.gates, samples_, channels_),
        active_(context, plan_.slots, reduced_),
        wide_gates_(context, walk_.joined > 1 ? plan_.slots : 0, walk_.row()),
        stream_(worth_streaming(call.y, y_.native())) {
    drive(context, plan_, walk_, samples_, *this);
  }

  void first(Index n, Index slot, Index b) const {
    x_.gather(n, slot, b);
    passes_.reduce(slot, b, x_.block(n, slot, b), x_.step(), nullptr, 0);
  }

  template <typename Loop>
  void middle(Index n, Index slot, Index samples, const Loop& loop) const {
    for (Index j = 0; j < samples; ++j) {
      const A* sums = passes_.sums(slot + j);
      for (Index c = 0; c < channels_; ++c) pooled_[n + j][c] = sums[c] / A(walk_.pixels);
    }
    loop(reduced_, channels_ * samples, [&](Index begin, Index end) {
      weights_.multiply_transposed(weight(call_.w1) + begin * channels_, bias(call_.b1, begin),
                                   end - begin, channels_, pooled_[n], pooled_.stride(), samples,
                                   hidden_[n] + begin, hidden_.stride());
      for (Index j = 0; j < samples; ++j) {
        for (Index r = begin; r < end; ++r) {
          active_[slot + j][r] = math::activate(call_.activation, hidden_[n + j][r]);
        }
      }
    });
    loop(channels_, reduced_ * samples, [&](Index begin, Index end) {
      weights_.multiply_transposed(weight(call_.w2) + begin * reduced_, bias(call_.b2, begin),
                                   end - begin, reduced_, active_[slot], active_.stride(), samples,
                                   gates_[n] + begin, gates_.stride());
      for (Index j = 0; j < samples; ++j) {
        A* gates = gates_[n + j];
        for (Index c = begin; c < end; ++c) gates[c] = math::open_gate(call_.gate, gates[c]);
      }
    });
    if (walk_.joined == 1) return;
    for (Index j = 0; j < samples; ++j) widen(walk_, gates_[n + j], wide_gates_[slot + j]);
  }

  void last(Index n, Index slot, Index b) const {
    const A* gates = walk_.joined > 1 ? wide_gates_[slot] : gates_[n];
    passes_.scale(b, x_.block(n, slot, b), x_.step(), gates, nullptr, y_.block(n, slot, b),
                  y_.step(), stream_);
    y_.scatter(n, slot, b);
  }

 private:
  static const W* weight(const TensorView& t) { return static_cast<const W*>(t.data); }
  static const W* bias(const TensorView& t, Index begin) {
    return t.defined() ? weight(t) + begin : nullptr;
  }

  const SqueezeExciteForward& call_;
  const Kernels<W>& weights_;
  const Index samples_, channels_, reduced_;
  const Walk walk_;
  const Plan plan_;
  const Image<T> x_, y_;
  const Passes<T> passes_;
  const SampleSums<A> pooled_, hidden_, gates_, active_, wide_gates_;
  const bool stream_;
};

// Backward. --------------------------------------------------------------------------------------

template <typename T, typename W>
class Backward {
  using A = AccumulatorOf<T>;

 public:
  Backward(const Context& context, const SqueezeExciteBackward& call, const Kernels<T>& images,
           const Kernels<W>& weights)
      : call_(call),
        weights_(weights),
        want_dx_(call.dx.defined()),
        want_dz_(want_dx_ || call.dw1.defined() || call.db1.defined()),
        samples_(call.x.sizes[0]),
        channels_(call.x.sizes[1]),
        reduced_(call.w1.sizes[0]),
        walk_(walk_of({&call.x, &call.dy, &call.dx})),
        plan_(context, samples_, walk_, sizeof(T), 2 * channels_ * reduced_),
        x_(context, walk_, call.x, plan_.slots),
        dy_(context, walk_, call.dy, plan_.slots),
        dx_(context, walk_, call.dx, plan_.slots),
        passes_(context, images, walk_, plan_.slots),
        pooled_(context, call.pooled, samples_, channels_),
        hidden_(context, call.hidden, samples_, reduced_),
        gates_(context, call.gates, samples_, channels_),
        dz2_(context, samples_, channels_),
        dz_(context, want_dz_ ? samples_ : 0, reduced_),
        dp_(context, want_dx_ ? plan_.slots : 0, walk_.row()),
        wide_gates_(context, want_dx_ && walk_.joined > 1 ? plan_.slots : 0, walk_.row()),
        stream_(worth_streaming(call.dx, dx_.native())) {
    if (!want_dz_ && !call.dw2.defined() && !call.db2.defined()) return;
    drive(context, plan_, walk_, samples_, *this);
    weight_gradients(context);
  }

  void first(Index n, Index slot, Index b) const {
    x_.gather(n, slot, b);
    dy_.gather(n, slot, b);
    passes_.reduce(slot, b, dy_.block(n, slot, b), dy_.step(), x_.block(n, slot, b), x_.step());
  }

  template <typename Loop>
  void middle(Index n, Index slot, Index samples, const Loop& loop) const {
    for (Index j = 0; j < samples; ++j) {
      const A* sums = passes_.sums(slot + j);
      for (Index c = 0; c < channels_; ++c) {
        dz2_[n + j][c] = math::gate_gradient(call_.gate, gates_[n + j][c], sums[c]);
      }
    }
    if (!want_dz_) return;
    loop(reduced_, channels_ * samples, [&](Index begin, Index end) {
      weights_.multiply(dz2_[n], dz2_.stride(), samples, weight(call_.w2) + begin, reduced_,
                        channels_, end - begin, dz_[n] + begin, dz_.stride());
      for (Index j = 0; j < samples; ++j) {
        A* dz = dz_[n + j];
        for (Index r = begin; r < end; ++r) {
          dz[r] = math::activation_gradient(call_.activation, hidden_[n + j][r], dz[r]);
        }
      }
    });
    if (!want_dx_) return;
    loop(channels_, reduced_ * samples, [&](Index begin, Index end) {
      weights_.multiply(dz_[n], dz_.stride(), samples, weight(call_.w1) + begin, channels_,
                        reduced_, end - begin, dp_[slot] + begin, dp_.stride());
      for (Index j = 0; j < samples; ++j) {
        for (Index c = begin; c < end; ++c) dp_[slot + j][c] /= A(walk_.pixels);
      }
    });
    if (walk_.joined == 1) return;
    for (Index j = 0; j < samples; ++j) {
      widen(walk_, gates_[n + j], wide_gates_[slot + j]);
      widen(walk_, dp_[slot + j], dp_[slot + j]);
    }
  }

  void last(Index n, Index slot, Index b) const {
    if (!want_dx_) return;
    const A* gates = walk_.joined > 1 ? wide_gates_[slot] : gates_[n];
    passes_.scale(b, dy_.block(n, slot, b), dy_.step(), gates, dp_[slot], dx_.block(n, slot, b),
                  dx_.step(), stream_);
    dx_.scatter(n, slot, b);
  }

 private:
  static W* weight(const TensorView& t) { return static_cast<W*>(t.data); }

  /// Sums over the samples, in their order.
  void weight_gradients(const Context& context) const {
    const AllThreads loop{context};
    if (call_.dw2.defined()) {
      const SampleSums<A> active(context, samples_, reduced_);
      for (Index n = 0; n < samples_; ++n) {
        for (Index r = 0; r < reduced_; ++r) {
          active[n][r] = math::activate(call_.activation, hidden_[n][r]);
        }
      }
      products(loop, dz2_, active, channels_, reduced_, weight(call_.dw2));
    }
    if (call_.dw1.defined()) {
      products(loop, dz_, pooled_, reduced_, channels_, weight(call_.dw1));
    }
    if (call_.db2.defined()) add_samples(dz2_, channels_, weight(call_.db2));
    if (call_.db1.defined()) add_samples(dz_, reduced_, weight(call_.db1));
  }

  void products(const AllThreads& loop, const SampleSums<A>& a, const SampleSums<A>& b, Index rows,
                Index columns, W* out) const {
    loop(rows, samples_ * columns, [&](Index begin, Index end) {
      weights_.outer_products(a[0] + begin, a.stride(), b[0], b.stride(), samples_, end - begin,
                              columns, out + begin * columns, columns);
    });
  }

  void add_samples(const SampleSums<A>& rows, Index columns, W* out) const {
    const A one = 1;
    weights_.outer_products(&one, 0, rows[0], rows.stride(), samples_, 1, columns, out, columns);
  }

  const SqueezeExciteBackward& call_;
  const Kernels<W>& weights_;
  const bool want_dx_, want_dz_;
  const Index samples_, channels_, reduced_;
  const Walk walk_;
  const Plan plan_;
  const Image<T> x_, dy_, dx_;
  const Passes<T> passes_;
  const SampleSums<A> pooled_, hidden_, gates_, dz2_, dz_, dp_, wide_gates_;
  const bool stream_;
};

// The list of implementations. -------------------------------------------------------------------

template <template <typename, typename> class Operation, typename Call>
void run(const KernelSet& kernels, const Context& context, const Call& call) {
  const bool same = call.w1.dtype == call.x.dtype;
  switch (call.x.dtype) {
    case DType::f32:
      Operation<float, float>(context, call, kernels.f32, kernels.f32);
      return;
    case DType::f64:
      Operation<double, double>(context, call, kernels.f64, kernels.f64);
      return;
    case DType::f16:
      if (same)
        Operation<F16, F16>(context, call, kernels.f16, kernels.f16);
      else
        Operation<F16, float>(context, call, kernels.f16, kernels.f32);
      return;
    case DType::bf16:
      if (same)
        Operation<BF16, BF16>(context, call, kernels.bf16, kernels.bf16);
      else
        Operation<BF16, float>(context, call, kernels.bf16, kernels.f32);
      return;
    case DType::u8:
    case DType::b8:
    case DType::i64:
      return;
  }
}

template <const KernelSet& kKernels>
void forward(const Context& context, const SqueezeExciteForward& call) {
  run<Forward>(kKernels, context, call);
}

template <const KernelSet& kKernels>
void backward(const Context& context, const SqueezeExciteBackward& call) {
  run<Backward>(kKernels, context, call);
}

constexpr Implementation<SqueezeExciteForward> kForward[] = {
    {"avx512", needs_avx512, forward<avx512::kernels>},
    {"avx2", needs_avx2, forward<avx2::kernels>},
    {"portable", needs_nothing, forward<portable::kernels>},
};

constexpr Implementation<SqueezeExciteBackward> kBackward[] = {
    {"avx512", needs_avx512, backward<avx512::kernels>},
    {"avx2", needs_avx2, backward<avx2::kernels>},
    {"portable", needs_nothing, backward<portable::kernels>},
};

}  // namespace

Implementations<SqueezeExciteForward> squeeze_excite_forward() { return kForward; }
Implementations<SqueezeExciteBackward> squeeze_excite_backward() { return kBackward; }

}  // namespace fusewise::cpu
