// The autoencoder's implementations on CUDA, fastest first, each with its reasons to decline.

#include "common/backends.h"
#include "common/check.h"
#include "common/scratch.h"
#include "cuda/autoencoder/backward.cuh"
#include "cuda/autoencoder/copy_rows.cuh"
#include "cuda/autoencoder/forward.cuh"
#include "cuda/autoencoder/general.cuh"
#include "cuda/cuda_error.h"

namespace fusewise::cuda {
namespace {

template <typename Pointer>
constexpr Pointer AutoencoderTensors<Pointer>::* kPointers[] = {
    &AutoencoderTensors<Pointer>::norm_weight,    &AutoencoderTensors<Pointer>::norm_bias,
    &AutoencoderTensors<Pointer>::encoder_weight, &AutoencoderTensors<Pointer>::encoder_bias,
    &AutoencoderTensors<Pointer>::basis,          &AutoencoderTensors<Pointer>::mid_norm_weight,
    &AutoencoderTensors<Pointer>::mid_norm_bias,  &AutoencoderTensors<Pointer>::mid_weight,
    &AutoencoderTensors<Pointer>::mid_bias,       &AutoencoderTensors<Pointer>::decoder_weight,
    &AutoencoderTensors<Pointer>::decoder_bias,
};

template <typename Pointer>
AutoencoderTensors<Pointer> pointers_of(const AutoencoderWeights& weights) {
  AutoencoderTensors<Pointer> pointers{};
  for (std::size_t i = 0; i < std::size(kAutoencoderWeights); ++i) {
    pointers.*kPointers<Pointer>[i] = (weights.*kAutoencoderWeights[i].weight).data;
  }
  return pointers;
}

/// Whether a row's values lie side by side.
bool has_dense_rows(const TensorView& t) {
  std::int64_t stride = 1;
  for (int d = t.rank - 1; d >= 1; --d) {
    if (t.sizes[d] > 1 && t.strides[d] != stride) return false;
    stride *= t.sizes[d];
  }
  return true;
}

/// Whether the kernels take a tensor as it lies.
bool is_taken(const TensorView& t, bool rows_suffice) {
  return !t.defined() || (rows_suffice ? has_dense_rows(t) : is_dense(t));
}

/// The same tensor, row-major elsewhere.
TensorView laid_out(TensorView t, void* data) {
  t.data = data;
  std::int64_t stride = 1;
  for (int d = t.rank - 1; d >= 0; --d) {
    t.strides[d] = stride;
    stride *= t.sizes[d];
  }
  return t;
}

/// A tensor as the kernels take it: itself, or a dense copy that is read or written instead.
class Dense {
 public:
  Dense(const Context& context, const TensorView& t, bool rows_suffice = false)
      : context_(context),
        tensor_(t),
        own_(is_taken(t, rows_suffice)),
        copy_(context, own_ ? 0 : t.numel() * size_of(t.dtype)) {}

  /// The tensor with its data where the kernels find it.
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
  const fusewise::AutoencoderSizes sizes = autoencoder_sizes(call.weights);
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

/// The launchers take dense tensors, but for the rows of x.
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

/// What no rows give; false where there are some.
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

template <typename Call>
std::string sizes_decline(const Context&, const Call& call) {
  return indices_decline(autoencoder_sizes(call.weights));
}

template <typename Call>
std::string fused_declines(const Context& context, const Call& call) {
  std::string reason = sizes_decline(context, call);
  return reason.empty() ? autoencoder_fused_declines(context, arguments(call)) : reason;
}

/// What with_dense will hand over, as far as shapes and addresses tell.
TensorView foreseen(const TensorView& t, bool rows_suffice = false) {
  void* const aligned = reinterpret_cast<void*>(std::uintptr_t{256});
  return is_taken(t, rows_suffice) ? t : laid_out(t, aligned);
}
AutoencoderForward foreseen(AutoencoderForward call) {
  call.x = foreseen(call.x, true);
  for (TensorView* each : {&call.y, &call.latent, &call.score}) *each = foreseen(*each);
  return call;
}
AutoencoderBackward foreseen(AutoencoderBackward call) {
  call.x = foreseen(call.x, true);
  for (TensorView* each : {&call.dx, &call.dy, &call.dlatent, &call.dscore}) {
    *each = foreseen(*each);
  }
  return call;
}

template <typename Call>
std::string fused_yields(const Context& context, const Call& call) {
  if (!autoencoder_products_are_faster(context, arguments(foreseen(call)))) return "";
  return "plain products are faster for these sizes and so many rows";
}

template <typename Call>
void fused(const Context& context, const Call& call) {
  if (done_without_rows(context, call)) return;
  with_dense(context, call,
             [&](const Call& dense) { autoencoder_fused_run(context, arguments(dense)); });
}

template <typename Call>
void general(const Context& context, const Call& call) {
  if (done_without_rows(context, call)) return;
  with_dense(context, call,
             [&](const Call& dense) { autoencoder_general_run(context, arguments(dense)); });
}

constexpr Implementation<AutoencoderForward> kForward[] = {
    {"fused", fused_declines, fused, fused_yields},
    {"general", sizes_decline, general},
};

constexpr Implementation<AutoencoderBackward> kBackward[] = {
    {"fused", fused_declines, fused, fused_yields},
    {"general", sizes_decline, general},
};

}  // namespace

Implementations<AutoencoderForward> autoencoder_forward() { return kForward; }
Implementations<AutoencoderBackward> autoencoder_backward() { return kBackward; }

}  // namespace fusewise::cuda
