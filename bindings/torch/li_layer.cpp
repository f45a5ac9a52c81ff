// Compiled once per device, like the operators.

#include "li_layer.h"

#include "common/check.h"
#include "common/li_conv.h"

namespace fusewise::binding {
namespace {

bool is_half(DType dtype) { return dtype == DType::f16 || dtype == DType::bf16; }

/// The weights of a 1x1 convolution as a matrix.
TensorView as_matrix_of_weights(TensorView view) {
  if (view.rank != 4 || view.sizes[2] != 1 || view.sizes[3] != 1) return view;
  return {view.data, view.dtype, view.device, {view.sizes[0], view.sizes[1]}};
}

}  // namespace

LiWeights::LiWeights(std::span<const Tensor> weights, std::span<const Tensor> mix,
                     const Tensor* previous) {
  check(!weights.empty(), "weights: expected at least one");
  check(mix.size() == weights.size(), "mix: expected ", weights.size(), ", one per stream, got ",
        mix.size());
  const auto dense_matrix = [&](const char* name, const Tensor& tensor) {
    return as_matrix_of_weights(view_of(name, copies_.emplace_back(dense(tensor))));
  };
  streams.resize(weights.size());
  for (std::size_t i = 0; i < streams.size(); ++i) {
    in_stream(i, [&] {
      streams[i].w = view_of("w", weights[i]);
      streams[i].mix = dense_matrix("mix", mix[i]);
    });
  }
  if (previous != nullptr) this->previous = dense_matrix("previous", *previous);
}

void check_packed(const LiWeights& layer) {
  const TensorView &w = layer.streams[0].w, &mix = layer.streams[0].mix;
  check(w.rank != 4 || mix.rank != 2 || w.sizes[0] == mix.sizes[0], "stream 0: mix: expected [",
        w.sizes[0], ", ", w.sizes[0], "], because all streams are packed into one tensor, got ",
        mix);
}

void WeightCasts::add(LiWeights& layer) {
  if (!is_half(dtype_)) return;
  const auto look_at = [&](TensorView& weight) {
    if (!weight.defined() || weight.dtype != DType::f32) return;
    weight.dtype = dtype_;
    // The core's checks name a weight on another device.
    if (weight.device == context_.device && weight.numel() > 0) found_.push_back(&weight);
  };
  for (LiConvStream& stream : layer.streams) look_at(stream.mix);  // evenly spaced: see the core
  look_at(layer.previous);
  for (LiConvStream& stream : layer.streams) look_at(stream.w);
}

Tensor WeightCasts::finish(const Tensor& like, const std::optional<Tensor>& made) {
  std::int64_t total = 0;
  for (const TensorView* weight : found_) total += aligned(weight->numel());
  if (made.has_value()) {
    const TensorView view = view_of("cast", *made);
    check(view.rank == 1 && view.sizes[0] == total && view.strides[0] == 1 &&
              view.dtype == dtype_ && view.device == context_.device,
          "cast: expected what forward returned");
  }
  const Tensor result = made.has_value() ? *made : new_dense(like, dtype_, {total});
  auto* memory = static_cast<char*>(result.mutable_data_ptr());
  std::vector<CastPair> pairs;
  for (TensorView* weight : found_) {
    TensorView from = *weight;
    from.dtype = DType::f32;
    if (!has_no_gaps(from)) {
      from = view_of("w", copies_.emplace_back(dense(tensor_of(from))));
      weight->strides = from.strides;
    }
    weight->data = memory;
    memory += aligned(weight->numel()) * size_of(dtype_);
    pairs.push_back({from, *weight});
  }
  if (!made.has_value()) cast_all(context_, pairs);
  return copies_.emplace_back(result);
}

TensorView Gradients::add_weight(Tensor tensor) {
  const TensorView wide = add(std::move(tensor));
  if (wide.dtype == dtype_) return wide;
  TensorView half = wide;
  half.dtype = dtype_;
  half.data = halves_.emplace_back(new_strided(like_, half)).mutable_data_ptr();
  casts_.push_back({half, wide});
  return half;
}

TensorView Gradients::next(const Tensor& weight) {
  if (next_is_needed()) return add_weight(new_like(weight));
  skip();
  return {};
}

TensorView Gradients::next_kernel(const Tensor& weight, const TensorView& matrix) {
  if (!next_is_needed()) {
    skip();
    return {};
  }
  TensorView view = matrix;
  const DType dtype = view_of("mix", weight).dtype;
  view.data = add_weight(new_dense(weight, dtype, weight.sizes())).data;
  return view;
}

Tensor channels_last_tensor(const char* name, const Tensor& tensor) {
  const TensorView view = view_of(name, tensor);
  check(view.rank >= 4, name, ": expected at least 4 dimensions, got ", view);
  if (is_channels_last(view)) return tensor;
  Tensor made = new_strided(tensor, channels_last(view));
  copy(tensor, made);
  return made;
}

}  // namespace fusewise::binding
