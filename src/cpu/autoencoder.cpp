// The autoencoder on the CPU: distributes rows over threads and combines sums over rows.
// Forward: every thread takes the next block of rows. Backward: rows are split into groups. The
// split depends on the number of rows only. Each group has its own sums, which are added in the
// order of the groups, so results do not depend on the threads. Bound by arithmetic.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "common/implementation.h"
#include "cpu/autoencoder_kernels.h"
#include "cpu/instruction_sets.h"
#include "cpu/threads.h"
#include "fusewise/autoencoder.h"

namespace fusewise::cpu {
namespace {

using autoencoder::Index;
using autoencoder::Kernels;
using autoencoder::KernelSet;
using autoencoder::Model;
using autoencoder::Outputs;
using autoencoder::Sizes;
using autoencoder::Strided;
using autoencoder::Sums;
using autoencoder::Tensors;

// Chosen by measurement on two Zen 4 cores with 1 MB of L2 each.
constexpr Index kGroupRows = 64;   // fewer rows would make adding the sums too expensive
constexpr Index kGroups = 32;      // at most
constexpr Index kFewestRows = 16;  // in a group, if there are only two groups

/// Memory that a thread reuses from call to call, so that only the result is allocated.
template <typename A>
class ThreadMemory {
 public:
  ThreadMemory() = default;
  ~ThreadMemory() { ::operator delete(data_, kAlignment); }
  ThreadMemory(const ThreadMemory&) = delete;
  ThreadMemory& operator=(const ThreadMemory&) = delete;

  A* at_least(Index count) {
    if (count > size_) {
      ::operator delete(data_, kAlignment);
      size_ = 0;
      data_ = static_cast<A*>(::operator new(count * sizeof(A), kAlignment, std::nothrow));
      if (data_ == nullptr) throw OutOfMemory("a thread could not allocate its scratch memory");
      size_ = count;
    }
    return data_;
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  A* data_ = nullptr;
  Index size_ = 0;
};

/// A thread's cached object, moved out of its slot while in use. While a loop of this call waits,
/// an executor may run another call on the same thread. That call finds the slot empty and creates
/// its own.
template <typename T>
class Taken {
 public:
  explicit Taken(std::unique_ptr<T>& place)
      : place_(place), value_(place ? std::move(place) : std::make_unique<T>()) {}
  ~Taken() { place_ = std::move(value_); }
  Taken(const Taken&) = delete;
  Taken& operator=(const Taken&) = delete;

  T* operator->() const { return value_.get(); }

 private:
  std::unique_ptr<T>& place_;
  std::unique_ptr<T> value_;
};

// Weights. ---------------------------------------------------------------------------------------

template <typename Pointer>
constexpr std::array kPointers = {
    &Tensors<Pointer>::norm_weight,    &Tensors<Pointer>::norm_bias,
    &Tensors<Pointer>::encoder_weight, &Tensors<Pointer>::encoder_bias,
    &Tensors<Pointer>::basis,          &Tensors<Pointer>::mid_norm_weight,
    &Tensors<Pointer>::mid_norm_bias,  &Tensors<Pointer>::mid_weight,
    &Tensors<Pointer>::mid_bias,       &Tensors<Pointer>::decoder_weight,
    &Tensors<Pointer>::decoder_bias,
};
constexpr std::size_t kWeights = std::size(kAutoencoderWeights);
constexpr std::size_t kBasis = 4, kDecoder = 9;

std::array<Index, kWeights> counts(const AutoencoderWeights& weights) {
  std::array<Index, kWeights> found{};
  for (std::size_t i = 0; i < kWeights; ++i) {
    found[i] = (weights.*kAutoencoderWeights[i].weight).numel();
  }
  return found;
}

Sizes sizes_of(const AutoencoderWeights& weights) {
  const Index slice = weights.encoder_weight.sizes[0], latent = weights.basis.sizes[0];
  return {weights.encoder_weight.sizes[1], weights.basis.sizes[1] / slice, latent, slice};
}

/// What a thread computed from the weights it saw last, which are often the same from call to call.
/// Comparing the weights costs a fiftieth of folding the decoder, and nobody has to report changes.
template <typename A>
struct Folding {
  ThreadMemory<A> memory, widened;
  Sizes sizes{};
  bool foldable = false;

  template <typename W>
  Model<A> model(const Kernels<W>& kernels, const AutoencoderWeights& weights) {
    Model<A> model{};
    model.sizes = sizes_of(weights);
    read(kernels, weights, model);
    const Index basis = counts(weights)[kBasis], decoder = counts(weights)[kDecoder];
    const Index folded = model.sizes.frames * model.sizes.latent * model.sizes.mels;
    const bool fits = std::memcmp(&sizes, &model.sizes, sizeof(sizes)) == 0;
    A* seen_basis = memory.at_least(basis + 2 * decoder + folded + model.sizes.latent);
    A* seen_decoder = seen_basis + basis;
    A* folded_decoder = seen_decoder + decoder;
    A* inverse_lengths = folded_decoder + folded;
    A* scratch = inverse_lengths + model.sizes.latent;
    if (!fits || std::memcmp(seen_basis, model.weights.basis, basis * sizeof(A)) != 0 ||
        std::memcmp(seen_decoder, model.weights.decoder_weight, decoder * sizeof(A)) != 0) {
      std::copy_n(model.weights.basis, basis, seen_basis);
      std::copy_n(model.weights.decoder_weight, decoder, seen_decoder);
      foldable = kernels.fold(model.sizes, model.weights, inverse_lengths, folded_decoder, scratch);
      sizes = model.sizes;
    }
    model.folded_decoder = folded_decoder;
    model.inverse_lengths = inverse_lengths;
    model.foldable = foldable;
    return model;
  }

 private:
  /// The weights themselves, or float32 copies if they are half precision.
  template <typename W>
  void read(const Kernels<W>& kernels, const AutoencoderWeights& weights, Model<A>& model) {
    const std::array<Index, kWeights> count = counts(weights);
    A* to = nullptr;
    if constexpr (!std::is_same_v<W, A>) {
      Index all = 0;
      for (const Index each : count) all += each;
      to = widened.at_least(all);
    }
    for (std::size_t i = 0; i < kWeights; ++i) {
      const auto* from = static_cast<const W*>((weights.*kAutoencoderWeights[i].weight).data);
      if constexpr (std::is_same_v<W, A>) {
        model.weights.*kPointers<const A*>[i] = from;
      } else {
        kernels.widen(from, count[i], to);
        model.weights.*kPointers<const A*>[i] = to;
        to += count[i];
      }
    }
  }
};

/// Cached per instruction set, because sums differ in the last bits.
template <typename A, const KernelSet& kKernels>
std::unique_ptr<Folding<A>>& folding() {
  thread_local std::unique_ptr<Folding<A>> kept;
  return kept;
}

// Data. ------------------------------------------------------------------------------------------

/// [N, F M] or [N, F, M] as rows of frames of features.
template <typename T>
Strided<T> frames_of(const TensorView& t, const Sizes& sizes) {
  if (!t.defined()) return {nullptr, 0, 0, 0};
  auto* data = static_cast<T*>(t.data);
  if (t.rank == 3) return {data, t.strides[0], t.strides[1], t.strides[2]};
  return {data, t.strides[0], sizes.mels * t.strides[1], t.strides[1]};
}

template <typename T, typename S>
Outputs<T, S> outputs_of(const TensorView& y, const TensorView& latent, const TensorView& score,
                         const Sizes& sizes) {
  Outputs<T, S> out{frames_of<T>(y, sizes), {nullptr, 0, 0, 0}, nullptr, 0};
  if (latent.defined()) {
    out.latent = {static_cast<T*>(latent.data), latent.strides[0], 0, latent.strides[1]};
  }
  if (score.defined()) {
    out.score = static_cast<S*>(score.data);
    out.score_step = score.strides[0];
  }
  return out;
}

// Forward and backward. --------------------------------------------------------------------------

template <typename T, typename W, const KernelSet& kSet>
struct Forward {
  using A = AccumulatorOf<T>;

  static void run(const Context& context, const AutoencoderForward& call, const Kernels<T>& kernels,
                  const Kernels<W>& weight_kernels) {
    const Index rows = call.x.sizes[0];
    const Index together = kernels.rows;
    // Use half blocks if whole ones would leave a thread idle.
    const Index all = threads(context);
    const Index step = rows < all * together ? together / 2 : together;
    const Index workers = std::clamp<Index>((rows + step - 1) / step, rows > 0 ? 1 : 0, all);
    std::atomic<Index> next{0};
    parallel_for(context, workers, [&](Index begin, Index end) {
      thread_local ThreadMemory<A> scratch;
      const Taken folded(folding<A, kSet>());
      const Model<A> model = folded->model(weight_kernels, call.weights);
      const auto x = frames_of<const T>(call.x, model.sizes);
      const auto out = outputs_of<T, A>(call.y, call.latent, call.score, model.sizes);
      A* memory = scratch.at_least(kernels.scratch(model.sizes, false));
      for (Index worker = begin; worker < end; ++worker) {
        for (Index row; (row = next.fetch_add(step)) < rows;) {
          kernels.forward(model, x, out, static_cast<A*>(call.projection.data), row,
                          std::min(row + step, rows), memory);
        }
      }
    });
  }
};

template <typename T, typename W, const KernelSet& kSet>
struct Backward {
  using A = AccumulatorOf<T>;

  /// Offsets of a group's sums in its memory, and which sums are wanted.
  struct Layout {
    std::array<Index, kWeights> offset{}, count{};
    std::array<bool, kWeights> wanted{};
    Index folded = 0;
    bool folded_wanted = false;
    Index all = 0;

    Layout(const AutoencoderBackward& call, const Sizes& sizes) : count(counts(call.weights)) {
      constexpr Index kLine = 64 / sizeof(A);
      const auto take = [&](Index elements) {
        const Index at = all;
        all += (elements + kLine - 1) / kLine * kLine;
        return at;
      };
      for (std::size_t i = 0; i < kWeights; ++i) {
        wanted[i] = (call.gradients.*kAutoencoderWeights[i].weight).defined();
      }
      const bool decodes = !call.dlatent.defined();
      folded_wanted = decodes && (wanted[kBasis] || wanted[kDecoder]);
      summed_ = wanted;
      // The norm's gradients need the encoder's sums, and the encoder's weight needs the sum for
      // its bias.
      summed_[2] = wanted[2] || wanted[0];
      summed_[3] = wanted[3] || wanted[1] || summed_[2];
      for (std::size_t i = 0; i < kWeights; ++i) {
        if (summed_[i]) offset[i] = take(count[i]);
      }
      if (folded_wanted) folded = take(sizes.frames * sizes.mels * sizes.latent);
    }

    Sums<A> at(A* memory) const {
      Sums<A> sums{};
      for (std::size_t i = 0; i < kWeights; ++i) {
        if (summed_[i]) sums.weights.*kPointers<A*>[i] = memory + offset[i];
      }
      if (folded_wanted) sums.folded_decoder = memory + folded;
      return sums;
    }

   private:
    std::array<bool, kWeights> summed_{};
  };

  static void run(const Context& context, const AutoencoderBackward& call,
                  const Kernels<T>& kernels, const Kernels<W>& weight_kernels) {
    const Index rows = call.x.sizes[0];
    const auto in_steps = [](Index count, Index step) { return (count + step - 1) / step * step; };
    const Index per_group = rows < 2 * kGroupRows
                                ? std::max(kFewestRows, in_steps((rows + 1) / 2, kFewestRows))
                                : in_steps((rows + kGroups - 1) / kGroups, kGroupRows);
    const Index groups = std::max<Index>(1, (rows + per_group - 1) / per_group);
    const Layout layout(call, sizes_of(call.weights));
    thread_local std::unique_ptr<ThreadMemory<A>> place;
    const Taken kept(place);
    A* sums = kept->at_least(groups * layout.all);

    parallel_for(context, groups, [&](Index begin, Index end) {
      thread_local ThreadMemory<A> scratch;
      const Taken folded(folding<A, kSet>());
      const Model<A> model = folded->model(weight_kernels, call.weights);
      const auto x = frames_of<const T>(call.x, model.sizes);
      const auto gradient =
          outputs_of<const T, const A>(call.dy, call.dlatent, call.dscore, model.sizes);
      const auto dx = frames_of<T>(call.dx, model.sizes);
      A* memory = scratch.at_least(kernels.scratch(model.sizes, true));
      for (Index group = begin; group < end; ++group) {
        A* own = sums + group * layout.all;
        std::fill_n(own, layout.all, A(0));
        const Index first = group * per_group, last = std::min(first + per_group, rows);
        kernels.backward(model, x, gradient, static_cast<const A*>(call.projection.data), dx,
                         layout.at(own), first, last, memory);
      }
    });

    constexpr Index kPart = 4096;
    const Index parts = groups > 1 ? (layout.all + kPart - 1) / kPart : 0;
    parallel_for(context, parts, [&](Index begin, Index end) {
      const Index first = begin * kPart, last = std::min(end * kPart, layout.all);
      for (Index group = 1; group < groups; ++group) {
        kernels.add(sums + group * layout.all + first, last - first, sums + first);
      }
    });

    if (layout.all == 0) return;
    const Taken folded(folding<A, kSet>());
    const Model<A> model = folded->model(weight_kernels, call.weights);
    const Sums<A> added = layout.at(sums);
    const auto finish = [&](Index begin, Index end) {
      for (Index part = begin; part < end; ++part) {
        const bool basis = part == 1;
        if (!basis) {
          thread_local ThreadMemory<A> scratch;
          kernels.finish(model, added, scratch.at_least(model.sizes.mels * model.sizes.latent));
        } else if (layout.wanted[kBasis]) {
          kernels.finish_basis(model, added);
        }
        for (std::size_t i = 0; i < kWeights; ++i) {
          if (!layout.wanted[i] || (i == kBasis) != basis) continue;
          auto* to = static_cast<W*>((call.gradients.*kAutoencoderWeights[i].weight).data);
          weight_kernels.narrow(sums + layout.offset[i], layout.count[i], to);
        }
      }
    };
    if (groups > 1)
      parallel_for(context, 2, finish);
    else
      finish(0, 2);  // few rows: no other thread has been woken so far
  }
};

// The list of implementations. -------------------------------------------------------------------

template <template <typename, typename, const KernelSet&> class Direction, const KernelSet& kSet,
          typename Call>
void run(const Context& context, const Call& call) {
  const bool same = call.weights.basis.dtype == call.x.dtype;
  switch (call.x.dtype) {
    case DType::f32:
      return Direction<float, float, kSet>::run(context, call, kSet.f32, kSet.f32);
    case DType::f64:
      return Direction<double, double, kSet>::run(context, call, kSet.f64, kSet.f64);
    case DType::f16:
      if (same) return Direction<F16, F16, kSet>::run(context, call, kSet.f16, kSet.f16);
      return Direction<F16, float, kSet>::run(context, call, kSet.f16, kSet.f32);
    case DType::bf16:
      if (same) return Direction<BF16, BF16, kSet>::run(context, call, kSet.bf16, kSet.bf16);
      return Direction<BF16, float, kSet>::run(context, call, kSet.bf16, kSet.f32);
    case DType::u8:
      return;  // rejected earlier
  }
}

constexpr Implementation<AutoencoderForward> kForward[] = {
    {"avx512", needs_avx512, run<Forward, avx512::autoencoder_kernels>},
    {"avx2", needs_avx2, run<Forward, avx2::autoencoder_kernels>},
    {"portable", needs_nothing, run<Forward, portable::autoencoder_kernels>},
};

constexpr Implementation<AutoencoderBackward> kBackward[] = {
    {"avx512", needs_avx512, run<Backward, avx512::autoencoder_kernels>},
    {"avx2", needs_avx2, run<Backward, avx2::autoencoder_kernels>},
    {"portable", needs_nothing, run<Backward, portable::autoencoder_kernels>},
};

}  // namespace

Implementations<AutoencoderForward> autoencoder_forward() { return kForward; }
Implementations<AutoencoderBackward> autoencoder_backward() { return kBackward; }

}  // namespace fusewise::cpu
