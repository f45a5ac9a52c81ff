// A residual block of LINet for torch, forward and backward: convolutions, each with its BatchNorm,
// and a residual. Allocation and the order of the calls; the core does the rest. Compiled once per
// device: FUSEWISE_DEVICE is CPU or CUDA.
//
// Every image is packed, [S + 1, N, C, H, W], the streams and behind them the integrated one. The
// layers of the main path come first, each of them a convolution and a norm with relu. The last
// norm adds the residual. With `shortcut`, one more layer, without relu, computes the residual from
// x. With `integrated_only`, the last norm and that of the shortcut see the integrated stream
// alone, and the result is that stream.
//
// Memory: forward keeps the results of all convolutions, those of all norms but the last, and the
// bits of its relu, in one tensor. The shortcut's result is not kept.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#ifdef FUSEWISE_CUDA_VERSION
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>
#else
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#endif

#include <algorithm>
#include <tuple>

#include "common/check.h"
#include "common/divide.h"
#include "common/li_conv.h"
#include "common/operators.h"
#include "convolution.h"
#include "failure.h"
#include "li_layer.h"
#include "text.h"

namespace fusewise::binding {
namespace {

#ifdef FUSEWISE_CUDA_VERSION
constexpr auto torch_cat = aoti_torch_cuda_cat;
#else
constexpr auto torch_cat = aoti_torch_cpu_cat;
#endif

using Index = std::int64_t;

/// The same tensor, `elements` behind the beginning of `memory`.
TensorView placed(TensorView view, const TensorView& memory, Index elements) {
  if (memory.data != nullptr) {
    view.data = static_cast<char*>(memory.data) + elements * size_of(memory.dtype);
  }
  return view;
}

struct Layer {
  /// `own`: the streams' weights, their mixture, and the weight of the integrated stream.
  Layer(std::span<const Tensor> own, Index streams, Index stride)
      : weights(own.first(streams), own.subspan(streams, streams), &own.back()), stride(stride) {}

  LiWeights weights;
  Index stride, padding = 0;
  bool integrated_only = false;  ///< whether the norm sees the integrated stream alone
  TensorView z;                  ///< the convolution's result, packed
  Index integrated_at = 0;       ///< where the integrated stream begins in z, in elements
  /// Where these begin, in elements: z and the norm's result among the images that are kept, mean
  /// and deviation among the statistics, weight and bias among the parameters, and their gradients,
  /// which all streams have.
  Index z_at = 0, y_at = 0, statistics_at = 0, parameters_at = 0, gradients_at = 0;
};

/// The layers of a block and their sizes. The core checks what this does not read.
class Block {
 public:
  Block(const Tensor& x, const std::vector<Tensor>& weights, const std::vector<Index>& strides,
        bool shortcut, bool integrated_only)
      : x(view_of("x", x)), streams(this->x.sizes[0] - 1), length(strides.size() - shortcut) {
    check_floating("x", x);
    check(this->x.rank == 5 && streams >= 1, "x: expected [S + 1, N, C, H, W] with S >= 1, got ",
          this->x);
    check(strides.size() >= 1u + shortcut, "strides: expected one for each convolution, got ",
          strides.size());
    const std::size_t each = 2 * streams + 1;
    check(weights.size() == each * strides.size(), "weights: expected ", each * strides.size(),
          ", one per stream, their mixture and one more for each convolution, got ",
          weights.size());
    layers.reserve(strides.size());
    for (std::size_t i = 0; i < strides.size(); ++i) {
      layers.emplace_back(std::span(weights).subspan(i * each, each), streams, strides[i]);
      layers[i].integrated_only = integrated_only && i + 1 >= length;
      set_sizes(layers[i], is_first(i) ? this->x : layers[i - 1].z);
    }
    for (std::size_t i = 0; i < layers.size(); ++i) place(layers[i], i + 1 < length);
    passes_at = kept;
    kept += aligned(divide_up(passes().numel(), size_of(this->x.dtype)));
  }

  /// Whether the convolution reads x: the first one, and the shortcut's.
  bool is_first(std::size_t i) const { return i == 0 || i == length; }

  /// What the layer's norm sees of a packed tensor.
  TensorView seen(const Layer& layer, const TensorView& packed) const {
    return layer.integrated_only ? stream_of(packed, streams) : packed;
  }
  /// The integrated stream of the convolution's result.
  TensorView integrated(const Layer& layer) const {
    return placed(stream_of(layer.z, streams), layer.z, layer.integrated_at);
  }
  /// What the layer's norm sees of the convolution's result.
  TensorView normed(const Layer& layer) const {
    return layer.integrated_only ? integrated(layer) : layer.z;
  }
  /// The memory of the convolution's result, in elements.
  Index z_size(const Layer& layer) const {
    return layer.integrated_at + stream_of(layer.z, streams).numel();
  }
  /// [S + 1, C], or [C] for the integrated stream alone.
  TensorView channels(const Layer& layer, DType dtype) const {
    const Index c = layer.z.sizes[2];
    return seen(layer, {nullptr, dtype, x.device, {streams + 1, c}});
  }
  /// Calls body(begin, end) for the elements that no tensor fills, so that nothing that forward
  /// returns is left unwritten. Bits may fill a part of an element.
  template <typename Body>
  void for_each_gap(const Body& body) const {
    for (std::size_t i = 0; i < layers.size(); ++i) {
      const Index z = layers[i].z_at, y = layers[i].y_at, image = layers[i].z.numel();
      body(z + first_streams(layers[i].z, streams).numel(), z + layers[i].integrated_at);
      body(z + z_size(layers[i]), z + aligned(z_size(layers[i])));
      if (i + 1 < length) body(y + image, y + aligned(image));
    }
    body(passes_at + passes().numel() / size_of(x.dtype), kept);
  }
  /// The decisions of the last norm's relu.
  TensorView passes() const {
    return {nullptr, DType::u8, x.device, {divide_up(normed(layers[length - 1]).numel(), 8)}};
  }

  const TensorView x;
  const Index streams;
  const std::size_t length;  ///< of the main path
  std::vector<Layer> layers;
  Index kept = 0, passes_at = 0;  ///< in elements of x's type
  Index statistics = 0, parameters = 0, gradients = 0;

 private:
  void set_sizes(Layer& layer, const TensorView& from) {
    const TensorView& w = layer.weights.streams[0].w;
    check(w.rank == 4, "stream 0: w: expected [K, ", from.sizes[2], ", R, R], got ", w);
    for (Index i = 0; i < streams; ++i) {  // before torch, which would not name it, reads any
      const Device device = layer.weights.streams[i].w.device;
      in_stream(i, [&] {
        check(device == x.device, "w: expected a tensor on ", x.device, ", got one on ", device);
      });
    }
    check_packed(layer.weights);
    check(layer.stride >= 1, "stride: expected at least 1, got ", layer.stride);
    const Index kernel = w.sizes[2];
    layer.padding = kernel / 2;
    const auto size = [&](int d) {
      return std::max<Index>(0, convolved(from.sizes[d], kernel, layer.stride, layer.padding));
    };
    layer.z = channels_last({nullptr,
                             from.dtype,
                             from.device,
                             {streams + 1, from.sizes[1], w.sizes[0], size(3), size(4)}});
  }

  void place(Layer& layer, bool keeps_y) {
    const Index before = first_streams(layer.z, streams).numel();
    layer.integrated_at = layer.integrated_only ? aligned(before) : before;
    layer.z_at = kept;
    layer.y_at = kept + aligned(z_size(layer));
    kept = layer.y_at + (keeps_y ? aligned(layer.z.numel()) : 0);
    const Index each = channels(layer, DType::f32).numel();
    layer.statistics_at = statistics;
    statistics += 2 * each;
    layer.parameters_at = parameters;
    parameters += 2 * each;
    layer.gradients_at = gradients;
    gradients += 2 * (streams + 1) * layer.z.sizes[2];
  }
};

/// Writes 0 to the elements [begin, end) of a tensor without strides.
void clear(const TensorView& memory, Index begin, Index end) {
  if (begin == end) return;
  const TensorView part =
      placed({nullptr, memory.dtype, memory.device, {end - begin}}, memory, begin);
  TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(tensor_of(part).get()));
}

/// The convolution of a layer, without images.
template <typename Call>
Call convolution_call(Layer& layer, ProductMath math, const Text& implementation) {
  Call call;
  call.streams = layer.weights.streams;
  call.previous = layer.weights.previous;
  call.stride = layer.stride;
  call.padding = layer.padding;
  call.math = math;
  call.implementation = implementation;
  return call;
}

void read_image(Layer& layer, const TensorView& x, TensorView& m) {
  const auto count = static_cast<Index>(layer.weights.streams.size());
  for (Index i = 0; i < count; ++i) layer.weights.streams[i].x = stream_of(x, i);
  m = stream_of(x, count);
}

/// The parameters of all norms, one after another. `given`: for each layer the weights of all
/// streams, then their biases.
Tensor joined_parameters(const Block& block, const std::vector<Tensor>& given) {
  const std::size_t each = block.streams + 1;
  check(given.size() == 2 * each * block.layers.size(), "norms: expected ",
        2 * each * block.layers.size(), " tensors, got ", given.size());
  const DType dtype = view_of("weight", given[0]).dtype;
  std::vector<AtenTensorHandle> found;
  for (std::size_t i = 0; i < given.size(); ++i) {
    const Layer& layer = block.layers[i / (2 * each)];
    const char* name = i / each % 2 == 0 ? "weight" : "bias";
    const TensorView view = view_of(name, given[i]);
    const Index c = layer.z.sizes[2];
    check(view.rank == 1 && view.sizes[0] == c, name, ": expected [", c, "], got ", view);
    check(view.dtype == dtype, name, ": expected dtype ", dtype, ", got ", view.dtype);
    check(view.device == block.x.device, name, ": expected a tensor on ", block.x.device,
          ", got one on ", view.device);
    if (!layer.integrated_only || (i + 1) % each == 0) found.push_back(given[i].get());
  }
  AtenTensorHandle result = nullptr;
  if (torch_cat(found.data(), static_cast<Index>(found.size()), 0, &result) != AOTI_TORCH_SUCCESS) {
    fail_as_torch("aten::cat", block.x.device, block.parameters * size_of(dtype));
  }
  return Tensor(result);
}

/// Returns the result, and for backward the images that are kept, statistics, the parameters of the
/// norms and the copies of float32 weights. `running`: for each norm mean, variance and counters.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> li_block_forward(
    const Tensor& x, const std::vector<Tensor>& weights, const std::vector<Tensor>& norms,
    const std::vector<Tensor>& running, const std::optional<Tensor>& blanked,
    const std::vector<Index>& strides, bool shortcut, bool integrated_only, bool training,
    double momentum, double eps, bool save, bool tf32, bool reduced_sums, bool tune,
    const Text& convolution, const Text& norm) {
  const CallContext context(x);
  Block block(x, weights, strides, shortcut, integrated_only);
  const DType dtype = block.x.dtype;
  check(running.size() == 3 * block.layers.size(), "running: expected ", 3 * block.layers.size(),
        " tensors, got ", running.size());
  WeightCasts casts(context.get(), dtype);
  for (Layer& layer : block.layers) casts.add(layer.weights);
  const Tensor cast = casts.finish(x);
  const Tensor parameters = joined_parameters(block, norms);
  const TensorView parameters_view = view_of("parameters", parameters);

  const DType wide = dtype == DType::f64 ? DType::f64 : DType::f32;
  const Tensor kept = new_dense(x, dtype, {save ? block.kept : 0});
  const Tensor statistics = new_dense(x, wide, {save ? block.statistics : 0});
  const TensorView kept_view = view_of("kept", kept);
  const TensorView statistics_view = view_of("statistics", statistics);
  // What is not kept. Each result is read by the next step alone.
  Index largest = 0;
  for (const Layer& layer : block.layers) largest = std::max(largest, block.z_size(layer));
  const Tensor z_memory = new_dense(x, dtype, {save ? 0 : largest});
  const Tensor y_memory = new_dense(x, dtype, {save || block.length == 1 ? 0 : largest});
  const Layer& last = block.layers[block.length - 1];
  const Index residual_size = shortcut ? block.normed(last).numel() : 0;
  const Tensor residual = new_dense(x, dtype, {residual_size});
  const Tensor y = new_strided(x, channels_last(block.normed(last)));

  std::vector<LiConvForward> convolutions;
  std::vector<BatchNormActForward> calls;
  for (std::size_t i = 0; i < block.layers.size(); ++i) {
    Layer& layer = block.layers[i];
    const bool is_last = i + 1 == block.length, is_shortcut = i == block.length;
    layer.z =
        save ? placed(layer.z, kept_view, layer.z_at) : placed(layer.z, view_of("z", z_memory), 0);
    auto& conv = convolutions.emplace_back(
        convolution_call<LiConvForward>(layer, {tf32, reduced_sums, tune}, convolution));
    read_image(layer, block.is_first(i) ? block.x : calls[i - 1].y, conv.m);
    conv.u = first_streams(layer.z, block.streams);
    conv.y = block.integrated(layer);

    BatchNormActForward& call = calls.emplace_back();
    call.x = block.normed(layer);
    const TensorView channels = block.channels(layer, parameters_view.dtype);
    call.weight = placed(channels, parameters_view, layer.parameters_at);
    call.bias = placed(channels, parameters_view, layer.parameters_at + channels.numel());
    const auto of_streams = [&](const char* name, const Tensor& tensor) {
      const TensorView view = view_of(name, tensor);
      check(view.rank >= 1 && view.sizes[0] == block.streams + 1, name, ": expected ",
            block.streams + 1, " rows, got ", view);
      return block.seen(layer, view);
    };
    call.running_mean = of_streams("running_mean", running[3 * i]);
    call.running_var = of_streams("running_var", running[3 * i + 1]);
    if (training) {
      check_dtype("num_batches_tracked", running[3 * i + 2], DType::i64);
      call.num_batches_tracked = of_streams("num_batches_tracked", running[3 * i + 2]);
    }
    if (blanked.has_value() && !layer.integrated_only) {
      check_dtype("blanked", *blanked, DType::b8);
      call.blanked = view_of("blanked", *blanked);
    }
    call.activation = is_shortcut ? Activation::identity : Activation::relu;
    call.training = training;
    call.momentum = momentum;
    call.eps = eps;
    if (is_last) {
      call.y = view_of("y", y);
    } else if (is_shortcut) {
      call.y = placed(call.x, view_of("residual", residual), 0);
      calls[i - 1].residual = call.y;
    } else {
      call.y = save ? placed(layer.z, kept_view, layer.y_at)
                    : placed(layer.z, view_of("y", y_memory), 0);
    }
    if (is_last && !shortcut) call.residual = block.seen(layer, block.x);
    if (save) {
      const TensorView each = block.channels(layer, wide);
      call.mean = placed(each, statistics_view, layer.statistics_at);
      call.inverse_deviation = placed(each, statistics_view, layer.statistics_at + each.numel());
      if (is_last) call.passes = placed(block.passes(), kept_view, block.passes_at);
    }
    call.implementation = norm;
  }
  // Before anything is written: the norms update running statistics.
  for (std::size_t i = 0; i < calls.size(); ++i) {
    check_sizes(convolutions[i]);
    check_call(kBatchNormAct, context.get().device, calls[i]);
    // If an implementation is forced, also whether it can run.
    if (!convolutions[i].implementation.empty()) explain(context.get(), convolutions[i]);
    if (!calls[i].implementation.empty()) explain_checked(kBatchNormAct, context.get(), calls[i]);
  }
  if (save) block.for_each_gap([&](Index begin, Index end) { clear(kept_view, begin, end); });
  const auto run = [&](std::size_t i) {
    li_conv(context.get(), convolutions[i]);
    run_checked(kBatchNormAct, context.get(), calls[i]);
  };
  if (shortcut) run(block.length);
  for (std::size_t i = 0; i < block.length; ++i) run(i);
  if (!save) return {y, kept, statistics, new_dense(x, dtype, {0}), new_dense(x, dtype, {0})};
  return {y, kept, statistics, parameters, cast};
}

/// The backward of a block, layer by layer.
class Backward {
 public:
  Backward(const Context& context, Block& block, const Tensor& x, const Tensor& kept,
           const Tensor& statistics, const Tensor& parameters)
      : context_(context),
        block_(block),
        x_(x),
        wide_(block.x.dtype == DType::f64 ? DType::f64 : DType::f32),
        kept_(checked("kept", kept, block.x.dtype, block.kept)),
        statistics_(checked("statistics", statistics, wide_, block.statistics)),
        parameters_(checked("parameters", parameters, view_of("parameters", parameters).dtype,
                            block.parameters)),
        dparameters_(new_dense(x, parameters_.dtype, {block.gradients})) {
    m_.resize(block.layers.size());
    for (std::size_t i = 0; i < block.layers.size(); ++i) {
      Layer& layer = block.layers[i];
      layer.z = placed(layer.z, kept_, layer.z_at);
      read_image(layer, block.is_first(i) ? block.x : y_of(block.layers[i - 1]), m_[i]);
    }
  }

  /// The gradients of all norms' parameters: for each layer the weights of all streams and of the
  /// integrated one, then the biases.
  const Tensor& dparameters() const { return dparameters_; }

  Tensor new_image(const TensorView& like) const { return new_strided(x_, channels_last(like)); }

  /// Through the norm of a layer. Absent gradients are not computed.
  void through_norm(std::size_t i, const TensorView& dy, const TensorView& dx, TensorView dresidual,
                    bool needs_parameters, bool training, const std::optional<Tensor>& blanked,
                    const Text& implementation) {
    const Layer& layer = block_.layers[i];
    BatchNormActBackward call;
    call.dy = dy;
    call.x = block_.normed(layer);
    const TensorView channels = block_.channels(layer, parameters_.dtype);
    const TensorView wide = block_.channels(layer, wide_);
    call.weight = placed(channels, parameters_, layer.parameters_at);
    call.bias = placed(channels, parameters_, layer.parameters_at + channels.numel());
    call.mean = placed(wide, statistics_, layer.statistics_at);
    call.inverse_deviation = placed(wide, statistics_, layer.statistics_at + wide.numel());
    if (blanked.has_value() && !layer.integrated_only) call.blanked = view_of("blanked", *blanked);
    const bool is_shortcut = i == block_.length;
    call.activation = is_shortcut ? Activation::identity : Activation::relu;
    if (i + 1 == block_.length) call.passes = placed(block_.passes(), kept_, block_.passes_at);
    call.training = training;
    call.dx = dx;
    call.dresidual = dresidual;
    if (needs_parameters) {
      const Index of_streams = layer.integrated_only ? block_.streams * layer.z.sizes[2] : 0;
      const Index each = (block_.streams + 1) * layer.z.sizes[2], begin = layer.gradients_at;
      const TensorView all = view_of("gradient", dparameters_);
      call.dweight = placed(channels, all, begin + of_streams);
      call.dbias = placed(channels, all, begin + each + of_streams);
      if (of_streams > 0) clear(all, begin, begin + 2 * each);  // the streams' are not used
    }
    call.implementation = implementation;
    batch_norm_act(context_, call);
  }

  /// Through the convolution of a layer, with the gradient of what its norm sees. Weight gradients
  /// are those that the layer's streams and `dprevious` have. `dx`: packed, or absent. With `add`,
  /// the gradient is added to what it holds.
  void through_convolution(std::size_t i, const TensorView& dz, const TensorView& dx, bool add,
                           const TensorView& dprevious, ProductMath math,
                           const Text& implementation) {
    Layer& layer = block_.layers[i];
    auto call = convolution_call<LiConvBackward>(layer, math, implementation);
    for (Index s = 0; dx.defined() && s < block_.streams; ++s) {
      layer.weights.streams[s].dx = stream_of(dx, s);
    }
    if (dx.defined()) call.dm = stream_of(dx, block_.streams);
    call.dprevious = dprevious;
    call.add = add;
    call.m = m_[i];
    call.u = first_streams(layer.z, block_.streams);
    if (layer.integrated_only) {
      call.dy = dz;
    } else {
      call.du = first_streams(dz, block_.streams);
      call.dy = stream_of(dz, block_.streams);
    }
    li_conv(context_, call);
  }

 private:
  TensorView y_of(const Layer& layer) const { return placed(layer.z, kept_, layer.y_at); }

  TensorView checked(const char* name, const Tensor& tensor, DType dtype, Index elements) const {
    const TensorView view = view_of(name, tensor);
    check(view.rank == 1 && view.sizes[0] == elements && view.dtype == dtype &&
              (elements <= 1 || view.strides[0] == 1) && view.device == block_.x.device,
          name, ": expected what forward returned");
    return view;
  }

  const Context& context_;
  Block& block_;
  const Tensor& x_;
  DType wide_;
  TensorView kept_, statistics_, parameters_;
  Tensor dparameters_;
  std::vector<TensorView> m_;  // of each layer's convolution
};

/// Returns the gradients of x, of the norms' parameters (see `Backward::dparameters`) and of the
/// weights. `needs`: whether x's is needed, then for each layer whether a parameter of the norm has
/// one, then for each weight.
std::vector<Tensor> li_block_backward(
    const Tensor& gradient, const Tensor& x, const Tensor& kept, const Tensor& statistics,
    const Tensor& parameters, const std::optional<Tensor>& cast, const std::vector<Tensor>& weights,
    const std::optional<Tensor>& blanked, const std::vector<Index>& strides, bool shortcut,
    bool integrated_only, bool training, const std::vector<Index>& needs, bool tf32,
    bool reduced_sums, bool tune, const Text& convolution, const Text& norm) {
  const CallContext call_context(x);
  const Context& context = call_context.get();
  Block block(x, weights, strides, shortcut, integrated_only);
  const std::size_t layers = block.layers.size(), each = 2 * block.streams + 1;
  check(needs.size() == 1 + layers + weights.size(), "needs: expected ",
        1 + layers + weights.size(), " flags, got ", needs.size());
  check_floating("gradient", gradient);
  const Tensor dy = channels_last_tensor("gradient", gradient);
  WeightCasts casts(context, block.x.dtype);
  for (Layer& layer : block.layers) casts.add(layer.weights);
  casts.finish(x, cast);
  Backward backward(context, block, x, kept, statistics, parameters);

  const std::vector<Index> weight_needs(needs.begin() + 1 + layers, needs.end());
  const auto norm_needs = [&](std::size_t i) { return needs[1 + i] != 0; };
  const auto convolution_needs = [&](std::size_t i) {
    const auto first = weight_needs.begin() + i * each;
    return std::any_of(first, first + each, [](Index need) { return need != 0; });
  };
  const bool x_needs = needs[0] != 0;
  /// Whether the gradient of the image that the layer reads is needed.
  const auto input_needs = [&](std::size_t i) {
    bool any = x_needs;
    for (std::size_t j = 0; j < i && i < block.length; ++j) {
      any = any || norm_needs(j) || convolution_needs(j);
    }
    return any;
  };
  const auto z_needs = [&](std::size_t i) { return convolution_needs(i) || input_needs(i); };

  Gradients gradients(x, weight_needs);
  std::vector<TensorView> dprevious(layers);
  for (std::size_t i = 0; i < layers; ++i) {
    std::vector<LiConvStream>& streams = block.layers[i].weights.streams;
    const Tensor* own = &weights[i * each];
    for (Index s = 0; s < block.streams; ++s) streams[s].dw = gradients.next(own[s]);
    for (Index s = 0; s < block.streams; ++s) {
      streams[s].dmix = gradients.next_kernel(own[block.streams + s], streams[s].mix);
    }
    dprevious[i] = gradients.next_kernel(own[each - 1], block.layers[i].weights.previous);
  }

  /// From the gradient of a layer's result to that of its input, which is absent if not needed. It
  /// is added to `other`, if that is given.
  const auto through = [&](std::size_t i, const Tensor& from, TensorView dresidual,
                           const std::optional<Tensor>& other) {
    const Layer& layer = block.layers[i];
    std::optional<Tensor> dz, dx = other;
    if (z_needs(i)) dz = backward.new_image(block.normed(layer));
    backward.through_norm(i, view_of("gradient", from), view_of("gradient", dz), dresidual,
                          norm_needs(i), training, blanked, norm);
    if (!dz.has_value()) return dx;
    if (!dx.has_value() && input_needs(i))
      dx = backward.new_image(block.is_first(i) ? block.x : block.layers[i - 1].z);
    backward.through_convolution(i, view_of("gradient", *dz), view_of("gradient", dx),
                                 other.has_value(), dprevious[i], {tf32, reduced_sums, tune},
                                 convolution);
    return dx;
  };
  const Layer& last = block.layers[block.length - 1];
  const bool residual_needs =
      x_needs || (shortcut && (norm_needs(block.length) || z_needs(block.length)));
  std::optional<Tensor> residual, main = dy;
  if (residual_needs) residual = backward.new_image(block.normed(last));
  // Without a shortcut, x gets the residual's gradient as well.
  const bool x_gets_residual = x_needs && !shortcut;
  for (std::size_t i = block.length; i-- > 0 && main.has_value();) {
    main = through(i, *main, i + 1 == block.length ? view_of("gradient", residual) : TensorView(),
                   i == 0 && x_gets_residual && !integrated_only ? residual : std::nullopt);
  }
  if (shortcut && residual_needs) main = through(block.length, *residual, {}, main);
  if (x_gets_residual && integrated_only) {
    add_to(tensor_of(stream_of(view_of("gradient", *main), block.streams)), *residual);
  }
  const Tensor dx = x_needs ? *main : new_dense(x, block.x.dtype, {0});
  gradients.finish(context);
  std::vector<Tensor> found = gradients.take();
  found.insert(found.begin(), {dx, backward.dparameters()});
  return found;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusewise, FUSEWISE_DEVICE, m) {
  m.impl("_li_block", TORCH_BOX(&li_block_forward));
  m.impl("_li_block_backward", TORCH_BOX(&li_block_backward));
}

}  // namespace fusewise::binding
