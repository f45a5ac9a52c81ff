// The autoencoder's implementations on CUDA: the kernels of selection.h. Tensors whose layout the
// kernels do not support are copied first.

#include <array>
#include <bit>
#include <utility>

#include "common/check.h"
#include "common/implementation.h"
#include "common/scratch.h"
#include "cuda/autoencoder/copy_rows.cuh"
#include "cuda/autoencoder/selection.h"
#include "cuda/cuda_error.h"
#include "fusewise/autoencoder.h"

namespace fusewise::cuda {
namespace {

constexpr std::size_t kWeights = std::size(kAutoencoderWeights);

/// The members of AutoencoderTensors are in the order of kAutoencoderWeights.
template <typename Pointer>
AutoencoderTensors<Pointer> pointers_of(const AutoencoderWeights& weights) {
  std::array<Pointer, kWeights> pointers;
  for (std::size_t i = 0; i < kWeights; ++i) {
    pointers[i] = (weights.*kAutoencoderWeights[i].weight).data;
  }
  return std::bit_cast<AutoencoderTensors<Pointer>>(pointers);
}

/// Calls have passed all checks by now, so the shapes of two weights determine all sizes.
fusewise::AutoencoderSizes sizes_of(const AutoencoderWeights& weights) {
  const TensorView &encoder = weights.encoder_weight, &basis = weights.basis;
  return {encoder.sizes[1], basis.sizes[1] / encoder.sizes[0], basis.sizes[0], encoder.sizes[0]};
}

/// Whether the values of a row are contiguous.
bool has_dense_rows(const TensorView& t) {
  std::int64_t stride = 1;
  for (int d = t.rank - 1; d >= 1; --d) {
    if (t.sizes[d] > 1 && t.strides[d] != stride) return false;
    stride *= t.sizes[d];
  }
  return true;
}

/// Whether the kernels support the tensor's layout.
bool is_taken(const TensorView& t, bool rows_suffice) {
  return !t.defined() || (rows_suffice ? has_dense_rows(t) : is_dense(t));
}

/// The same tensor as row-major memory at `data`.
TensorView laid_out(TensorView t, void* data) {
  t.data = data;
  std::int64_t stride = 1;
  for (int d = t.rank - 1; d >= 0; --d) {
    t.strides[d] = stride;
    stride *= t.sizes[d];
  }
  return t;
}

/// A tensor in a layout that the kernels support: the tensor itself, or a dense copy that is read
/// or written instead.
class Dense {
 public:
  Dense(const Context& context, const TensorView& t, bool rows_suffice = false)
      : context_(context),
        tensor_(t),
        own_(is_taken(t, rows_suffice)),
        copy_(context, own_ ? 0 : t.numel() * size_of(t.dtype)) {}

  /// The tensor with the data pointer that the kernels should use.
  TensorView view() const { return own_ ? tensor_ : laid_out(tensor_, copy_.data()); }
  void gather() const {
    if (!own_) autoencoder_copy(context_, tensor_, view());
  }
  void scatter() const {
    if (!own_) autoencoder_copy(context_, view(), tensor_);
  }

 private:
  const Context& context_;
  const TensorView& tensor_;
  bool own_;
  Scratch<char> copy_;
};

template <typename Arguments, typename Call>
Arguments shared_arguments(const Call& call) {
  const fusewise::AutoencoderSizes sizes = sizes_of(call.weights);
  Arguments a;
  a.sizes = {call.x.sizes[0], static_cast<int>(sizes.n_mels), static_cast<int>(sizes.frames),
             static_cast<int>(sizes.latent), static_cast<int>(sizes.slice_latent)};
  a.parameters = pointers_of<const void*>(call.weights);
  a.dtype = call.x.dtype;
  a.parameter_dtype = call.weights.basis.dtype;
  a.tf32 = call.tf32;
  a.x = call.x.data;
  a.x_stride = call.x.strides[0];
  return a;
}

AutoencoderForwardArguments arguments(const AutoencoderForward& call) {
  auto a = shared_arguments<AutoencoderForwardArguments>(call);
  a.out = call.y.data;
  a.z = call.latent.data;
  a.score = call.score.data;
  a.projection = call.projection.data;
  return a;
}

AutoencoderBackwardArguments arguments(const AutoencoderBackward& call) {
  auto a = shared_arguments<AutoencoderBackwardArguments>(call);
  a.gradients = pointers_of<void*>(call.gradients);
  a.d_out = call.dy.data;
  a.d_z = call.dlatent.data;
  a.d_score = call.dscore.data;
  a.projection = call.projection.data;
  a.dx = call.dx.data;
  return a;
}

/// The launchers take dense tensors, except that rows of x may be strided.
template <typename Run>
void with_dense(const Context& context, const AutoencoderForward& call, const Run& run) {
  const Dense x(context, call.x, true), y(context, call.y), latent(context, call.latent),
      score(context, call.score);
  x.gather();
  AutoencoderForward dense = call;
  dense.x = x.view();
  dense.y = y.view();
  dense.latent = latent.view();
  dense.score = score.view();
  run(dense);
  y.scatter();
  latent.scatter();
  score.scatter();
}

template <typename Run>
void with_dense(const Context& context, const AutoencoderBackward& call, const Run& run) {
  const Dense x(context, call.x, true), dx(context, call.dx), dy(context, call.dy),
      dlatent(context, call.dlatent), dscore(context, call.dscore);
  for (const Dense* each : {&x, &dy, &dlatent, &dscore}) each->gather();
  AutoencoderBackward dense = call;
  dense.x = x.view();
  dense.dx = dx.view();
  dense.dy = dy.view();
  dense.dlatent = dlatent.view();
  dense.dscore = dscore.view();
  run(dense);
  dx.scatter();
}

/// Writes the results of a call without rows. Returns false if there are rows.
bool done_without_rows(const Context&, const AutoencoderForward& call) {
  return call.x.sizes[0] == 0;
}
bool done_without_rows(const Context& context, const AutoencoderBackward& call) {
  if (call.x.sizes[0] > 0) return false;
  for (const auto& [weight, name, state, shape] : kAutoencoderWeights) {
    const TensorView& t = call.gradients.*weight;
    if (!t.defined()) continue;
    check_cuda(cudaMemsetAsync(t.data, 0, t.numel() * size_of(t.dtype),
                               static_cast<cudaStream_t>(context.stream)),
               "clearing a gradient");
  }
  return true;
}

/// The arguments that with_dense will pass, as far as they follow from shapes and addresses.
/// Scratch memory is aligned to 256 bytes.
std::int64_t row_of(const TensorView& t) {
  return t.rank == 3 ? t.sizes[1] * t.sizes[2] : t.rank == 2 ? t.sizes[1] : 1;
}
template <typename Pointer>
void foresee(Pointer& data, const TensorView& t, bool rows_suffice = false) {
  if (!is_taken(t, rows_suffice)) data = reinterpret_cast<void*>(std::uintptr_t{256});
}
AutoencoderForwardArguments foreseen(const AutoencoderForward& call) {
  AutoencoderForwardArguments a = arguments(call);
  foresee(a.x, call.x, true);
  if (!has_dense_rows(call.x)) a.x_stride = row_of(call.x);
  foresee(a.out, call.y);
  foresee(a.z, call.latent);
  foresee(a.score, call.score);
  return a;
}
AutoencoderBackwardArguments foreseen(const AutoencoderBackward& call) {
  AutoencoderBackwardArguments a = arguments(call);
  foresee(a.x, call.x, true);
  if (!has_dense_rows(call.x)) a.x_stride = row_of(call.x);
  foresee(a.dx, call.dx);
  foresee(a.d_out, call.dy);
  foresee(a.d_z, call.dlatent);
  foresee(a.d_score, call.dscore);
  return a;
}

template <typename Call>
constexpr auto& kKernels = autoencoder::kForwardKernels;
template <>
constexpr auto& kKernels<AutoencoderBackward> = autoencoder::kBackwardKernels;

/// Entry i of the operator's list.
template <typename Call, std::size_t i>
Implementation<Call> entry() {
  return {kKernels<Call>[i].name,
          [](const Context& context, const Call& call) {
            std::string reason = indices_decline(sizes_of(call.weights));
            if (!reason.empty()) return reason;
            return kKernels<Call>[i].declines(limits_of(context.device), foreseen(call));
          },
          [](const Context& context, const Call& call) {
            if (done_without_rows(context, call)) return;
            with_dense(context, call, [&](const Call& dense) {
              kKernels<Call>[i].run(context, arguments(dense));
            });
          },
          [](const Context& context, const Call& call) {
            const auto yields = kKernels<Call>[i].yields;
            return yields == nullptr ? std::string()
                                     : yields(limits_of(context.device), foreseen(call));
          }};
}

template <typename Call>
Implementations<Call> list() {
  static const auto entries = []<std::size_t... i>(std::index_sequence<i...>) {
    return std::array{entry<Call, i>()...};
  }(std::make_index_sequence<std::size(kKernels<Call>)>{});
  return entries;
}

}  // namespace

Implementations<AutoencoderForward> autoencoder_forward() { return list<AutoencoderForward>(); }
Implementations<AutoencoderBackward> autoencoder_backward() { return list<AutoencoderBackward>(); }

}  // namespace fusewise::cuda
