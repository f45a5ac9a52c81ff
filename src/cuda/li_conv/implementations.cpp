// LINet's convolution on CUDA. cuDNN computes the convolutions, or the context where there is no
// cuDNN or it has no suitable algorithm. The integration forward: `one_pass` reads every stream
// once and writes y once; `accumulate` has a GEMM per stream, each of which adds to y. Backward,
// the streams' gradients are added to GEMMs with dy. The gradients of the integration's weights are
// GEMMs too, each of which reads dy, or with `one_pass` one kernel of ours. With `one_pass_all`, a
// kernel of ours computes the streams' gradients too. Bound by the convolutions.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <vector>

#include "common/li_conv.h"
#include "common/matrix.h"
#include "common/scratch.h"
#include "cuda/conv/convolution.h"
#include "cuda/cuda_error.h"
#include "cuda/gemm/alignment.h"
#include "cuda/gemm/product.h"
#include "cuda/gemm/tuning.h"
#include "cuda/li_conv/integrate.h"
#include "cuda/li_conv/stream_gradients.h"
#include "cuda/li_conv/unfolded.h"
#include "cuda/li_conv/weight_gradients.h"

namespace fusewise::cuda {
namespace {

using Index = std::int64_t;

/// previous [D, E] as the weights of a 1x1 convolution.
TensorView as_kernel(const TensorView& previous) {
  if (!previous.defined()) return {};
  return {
      previous.data, previous.dtype, previous.device, {previous.sizes[0], previous.sizes[1], 1, 1}};
}

/// Whether m is a matrix of pixels in the order of y's. Otherwise a 1x1 convolution reads it.
bool is_matrix_of_pixels(const TensorView& m, Index stride) {
  return stride == 1 && is_channels_last(m);
}

/// TF32 only where both numbers of channels are multiples of 4, or 16 bytes of float32. cuDNN's
/// TF32 kernels need that, so torch computes others in float32, and ours must be as exact.
ProductMath math_for(ProductMath math, Index channels, Index other_channels) {
  math = with_environment(math);
  math.tf32 = math.tf32 && channels % 4 == 0 && other_channels % 4 == 0;
  return math;
}

/// What a GEMM adds: nothing, its output, or another matrix.
struct Addend {
  bool add = false;
  const void* c = nullptr;
};

/// d = a b + addend. The batch is the size that counts pixels; the other two count channels.
void multiply(const Context& context, ProductMath math, const TensorView& a, const TensorView& b,
              const TensorView& d, Addend addend = {}, BatchSize batch = BatchSize::rows) {
  Product p{};
  p.rows = d.sizes[0];
  p.columns = d.sizes[1];
  p.inner = a.sizes[1];
  p.a = matrix_of(a);
  p.b = matrix_of(b);
  p.d = matrix_of(d);
  p.dtype = d.dtype;
  p.math = math_for(math, p.columns, batch == BatchSize::rows ? p.inner : p.rows);
  p.batch = batch;
  p.add = addend.add;
  p.c = addend.c;
  multiply(context, p);
}

std::string needs_convolution(const Context& context) {
  return context.convolution != nullptr || has_cudnn()
             ? ""
             : "there is no cuDNN, and the context has no convolution; pass one as "
               "Context::convolution";
}

Convolution& convolution_of(const Context& context) {
  check(context.convolution != nullptr,
        "cuDNN has no algorithm for these tensors, and the context has no convolution; pass one as "
        "Context::convolution");
  return *context.convolution;
}

struct Geometry {
  std::int64_t stride, padding;
  ProductMath math;
};

std::array<std::int64_t, 2> both(std::int64_t value) { return {value, value}; }

void convolve(const Context& context, const TensorView& x, const TensorView& w, const Geometry& g,
              const TensorView& y) {
  const ProductMath math = math_for(g.math, w.sizes[0], w.sizes[1]);
  if (cuda::convolve(context,
                     {ConvolutionKind::forward, x, w, y, both(g.stride), both(g.padding), math})) {
    return;
  }
  convolution_of(context).forward(x, w, g.stride, g.padding, y);
}

/// The gradients of x and w, each unless it is absent. With `add`, that of x is added to dx.
void convolve_back(const Context& context, const TensorView& dy, const TensorView& x,
                   const TensorView& w, const Geometry& g, TensorView dx, TensorView dw, bool add) {
  using enum ConvolutionKind;
  const ProductMath math = math_for(g.math, w.sizes[0], w.sizes[1]);
  if (dx.defined() && cuda::convolve(context, {data_gradient, dx, w, dy, both(g.stride),
                                               both(g.padding), math, add})) {
    dx = {};
  }
  if (dw.defined() && cuda::convolve(context, {weight_gradient, x, dw, dy, both(g.stride),
                                               both(g.padding), math})) {
    dw = {};
  }
  if (!dx.defined() && !dw.defined()) return;
  convolution_of(context).backward(dy, x, w, g.stride, g.padding, dx, dw, add);
}

std::string forward_declines(const Context& context, const LiConvForward&) {
  return needs_convolution(context);
}

void forward_run(const Context& context, const LiConvForward& call) {
  const LiConvSizes s = check_sizes(call);
  if (s.n == 0) return;
  const TensorView y = as_matrix(call.y);
  UnfoldedStreams unfolded(context, call.streams, s, {call.stride, call.padding}, false);
  bool add = false;
  if (call.m.defined()) {
    if (is_matrix_of_pixels(call.m, call.stride)) {
      multiply(context, call.math, as_matrix(call.m), transposed(call.previous), y);
    } else {
      convolve(context, call.m, as_kernel(call.previous), {call.stride, 0, call.math}, call.y);
    }
    add = true;
  }
  for (Index i = 0; i < s.streams; ++i) {
    const LiConvStream& stream = call.streams[i];
    const TensorView u = stream_of(call.u, i);
    if (!unfolded.convolve(i, with_environment(call.math), u)) {
      convolve(context, stream.x, stream.w, {call.stride, call.padding, call.math}, u);
    }
    multiply(context, call.math, as_matrix(u), transposed(stream.mix), y, {add});
    add = true;
  }
}

/// Up to here the kernel is bound by memory, and saves most of the trips of y.
constexpr Index kFewChannels = 128;
constexpr Index kMostRows = Index{1} << 31;

/// Why our own kernels for the integration do not take a call; empty if they do.
template <typename Call>
std::string own_kernels_decline(const Call& call, std::initializer_list<const void*> addresses) {
  const LiConvSizes s = check_sizes(call);
  if (size_of(s.dtype) != 2) return "x is not half precision";
  if (s.k % kIntegrationStep != 0 || s.d % kIntegrationStep != 0 || s.e % kIntegrationStep != 0) {
    return "the channels are not multiples of 64";
  }
  if (s.streams + 1 > kMostSources) return "there are too many streams";
  if (call.m.defined() && !is_channels_last(call.m)) return "m is not channels-last";
  if (s.pixels() >= kMostRows || s.n * s.h * s.w >= kMostRows) return "there are too many pixels";
  bool aligned = is_aligned(call.u.data) && is_aligned(call.m.data);
  for (const void* each : addresses) aligned = aligned && is_aligned(each);
  for (const LiConvStream& stream : call.streams) {
    aligned = aligned && is_aligned(stream.mix.data) && is_aligned(stream.dmix.data);
  }
  return aligned ? "" : "a tensor is not aligned to 16 bytes";
}

/// Where source `index`, the integrated stream before, has the pixels of y.
StridedImage strided_image(const LiConvSizes& s, Index stride, int index) {
  if (stride == 1) return {};
  return {index,
          static_cast<unsigned>(s.h * s.w),
          static_cast<unsigned>(s.w),
          static_cast<unsigned>(stride),
          static_cast<unsigned>(s.p * s.q),
          static_cast<unsigned>(s.q)};
}

std::string one_pass_declines(const Context& context, const LiConvForward& call) {
  if (const std::string reason = needs_convolution(context); !reason.empty()) return reason;
  return own_kernels_decline(call, {call.y.data, call.previous.data});
}

std::string one_pass_yields(const Context&, const LiConvForward& call) {
  return check_sizes(call).d <= kFewChannels ? "" : "cuBLASLt is faster for many channels";
}

void one_pass_run(const Context& context, const LiConvForward& call) {
  const LiConvSizes s = check_sizes(call);
  if (s.n == 0) return;
  Integration all{};
  UnfoldedStreams unfolded(context, call.streams, s, {call.stride, call.padding}, false);
  for (Index i = 0; i < s.streams; ++i) {
    const LiConvStream& stream = call.streams[i];
    const TensorView u = stream_of(call.u, i);
    if (!unfolded.convolve(i, with_environment(call.math), u)) {
      convolve(context, stream.x, stream.w, {call.stride, call.padding, call.math}, u);
    }
    all.source[all.sources++] = {u.data, stream.mix.data, static_cast<int>(s.k)};
  }
  all.y = call.y.data;
  all.rows = static_cast<unsigned>(s.pixels());
  all.columns = static_cast<int>(s.d);
  if (call.m.defined()) {
    all.strided = strided_image(s, call.stride, all.sources);
    all.source[all.sources++] = {call.m.data, call.previous.data, static_cast<int>(s.e)};
  }
  integrate(context, s.dtype, all);
}

std::vector<TensorView> weight_gradients(const LiConvBackward& call) {
  std::vector<TensorView> found{call.dprevious};
  for (const LiConvStream& stream : call.streams) {
    found.push_back(stream.dw);
    found.push_back(stream.dmix);
  }
  return found;
}

std::string backward_declines(const Context& context, const LiConvBackward& call) {
  if (call.dy.numel() == 0) {
    for (const TensorView& t : weight_gradients(call)) {
      if (!has_no_gaps(t))
        return "there are no samples, and a gradient to clear has gaps in memory";
    }
  }
  return needs_convolution(context);
}

void clear(const Context& context, const LiConvBackward& call) {
  for (const TensorView& t : weight_gradients(call)) {
    if (!t.defined()) continue;
    check_cuda(cudaMemsetAsync(t.data, 0, t.numel() * size_of(t.dtype),
                               static_cast<cudaStream_t>(context.stream)),
               "clearing a gradient");
  }
}

/// The gradients of m and, unless it is computed elsewhere, of previous.
void integrated_gradients(const Context& context, LiConvBackward call, bool with_previous) {
  if (!with_previous) call.dprevious = {};
  if (!call.dm.defined() && !call.dprevious.defined()) return;
  const bool pixels =
      is_matrix_of_pixels(call.m, call.stride) && (!call.dm.defined() || is_channels_last(call.dm));
  if (!pixels) {
    convolve_back(context, call.dy, call.m, as_kernel(call.previous), {call.stride, 0, call.math},
                  call.dm, as_kernel(call.dprevious), call.add);
    return;
  }
  const TensorView dy = as_matrix(call.dy);
  if (call.dprevious.defined()) {
    multiply(context, call.math, transposed(dy), as_matrix(call.m), call.dprevious, {},
             BatchSize::inner);
  }
  if (call.dm.defined()) {
    multiply(context, call.math, dy, call.previous, as_matrix(call.dm), {call.add});
  }
}

/// Whether one GEMM computes the gradients of all streams: every matrix must begin at a multiple of
/// 16 bytes from the others. Only sizes decide. If addresses did, equal models at other addresses
/// would give other bits.
bool takes_all_streams(const LiConvBackward& call) {
  const Index size = size_of(call.u.dtype), d = call.dy.sizes[1], k = call.u.sizes[2];
  return call.streams.size() > 1 && d * size % kVectorBytes == 0 && k * size % kVectorBytes == 0;
}

/// Bytes from one stream's mix to the next one's, if they follow each other evenly.
std::optional<Index> step_of_mix(const LiConvBackward& call) {
  const TensorView& mix = call.streams[0].mix;
  const auto address = [&](std::size_t i) {
    return reinterpret_cast<std::intptr_t>(call.streams[i].mix.data);
  };
  const Index step = address(1) - address(0);
  if (step < mix.numel() * size_of(mix.dtype) || step % kVectorBytes != 0) return std::nullopt;
  for (std::size_t i = 2; i < call.streams.size(); ++i) {
    if (address(i) - address(i - 1) != step) return std::nullopt;
  }
  return step;
}

/// The gradients of all streams before their convolutions, g_s = du_s + dy mix_s, by one GEMM.
void add_all_gradients(const Context& context, const LiConvBackward& call, const TensorView& g) {
  TensorView mix = call.streams[0].mix;
  const auto count = static_cast<Index>(call.streams.size());
  const Index bytes = mix.numel() * size_of(mix.dtype);
  const std::optional<Index> step = step_of_mix(call);
  const Scratch<char> evenly(context, step.has_value() ? 0 : count * bytes);
  for (Index i = 0; !step.has_value() && i < count; ++i) {
    check_cuda(cudaMemcpyAsync(evenly.data() + i * bytes, call.streams[i].mix.data, bytes,
                               cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(context.stream)),
               "copying a mix");
  }
  if (!step.has_value()) mix.data = evenly.data();
  const TensorView first = as_matrix(stream_of(g, 0));
  Product p{};
  p.rows = first.sizes[0];
  p.columns = first.sizes[1];
  p.inner = call.dy.sizes[1];
  p.a = matrix_of(as_matrix(call.dy));
  p.b = matrix_of(mix);
  p.d = matrix_of(first);
  p.dtype = g.dtype;
  p.math = math_for(call.math, p.columns, p.inner);
  p.add = call.du.defined();
  p.c = call.du.data;
  p.count = static_cast<int>(count);
  p.b_step = step.value_or(bytes) / size_of(mix.dtype);
  p.d_step = g.strides[0];
  multiply(context, p);
}

/// The gradients of mix and previous, by our own kernel.
void own_weight_gradients(const Context& context, const LiConvBackward& call,
                          const LiConvSizes& s) {
  WeightGradients all{};
  all.dy = call.dy.data;
  all.rows = static_cast<unsigned>(s.pixels());
  all.columns = static_cast<int>(s.d);
  for (Index i = 0; i < s.streams; ++i) {
    const TensorView& dmix = call.streams[i].dmix;
    if (!dmix.defined()) continue;
    all.source[all.sources++] = {stream_of(call.u, i).data, dmix.data, static_cast<int>(s.k)};
  }
  if (call.dprevious.defined()) {
    all.strided = strided_image(s, call.stride, all.sources);
    all.source[all.sources++] = {call.m.data, call.dprevious.data, static_cast<int>(s.e)};
  }
  weight_gradients(context, s.dtype, all);
}

/// The same as add_all_gradients, by our own kernel.
void own_stream_gradients(const Context& context, const LiConvBackward& call, const LiConvSizes& s,
                          const TensorView& g) {
  StreamGradients all{};
  for (const LiConvStream& stream : call.streams) all.mix[all.streams++] = stream.mix.data;
  all.dy = call.dy.data;
  all.du = call.du.data;
  all.g = g.data;
  all.rows = s.pixels();
  all.depth = static_cast<int>(s.d);
  all.columns = static_cast<int>(s.k);
  stream_gradients(context, s.dtype, all);
}

/// What our own kernels compute.
enum class Own { nothing, weight_gradients, all_gradients };

void run_backward(const Context& context, const LiConvBackward& call, Own own) {
  const LiConvSizes s = check_sizes(call);
  if (s.n == 0) return clear(context, call);
  const bool own_weights = own != Own::nothing;
  if (own_weights) own_weight_gradients(context, call, s);
  const TensorView dy = as_matrix(call.dy);
  const auto needs_g = [](const LiConvStream& each) {
    return each.dx.defined() || each.dw.defined();
  };
  const bool all = std::all_of(call.streams.begin(), call.streams.end(), needs_g);
  const Index bytes = call.u.numel() * size_of(call.u.dtype);
  std::optional<Scratch<char>> memory;
  TensorView together = call.u;
  if (all && (own == Own::all_gradients || takes_all_streams(call))) {
    memory.emplace(context, bytes);
    together.data = memory->data();
    if (own == Own::all_gradients) {
      own_stream_gradients(context, call, s, together);
    } else {
      add_all_gradients(context, call, together);
    }
  }
  UnfoldedStreams unfolded(context, call.streams, s, {call.stride, call.padding}, true);
  for (Index i = 0; i < s.streams; ++i) {
    LiConvStream stream = call.streams[i];
    const TensorView u = stream_of(call.u, i);
    if (stream.dmix.defined() && !own_weights) {
      multiply(context, call.math, transposed(dy), as_matrix(u), stream.dmix, {}, BatchSize::inner);
    }
    if (!needs_g(stream)) continue;
    const Scratch<char> one(context, memory.has_value() ? 0 : bytes / s.streams);
    TensorView g = u;
    if (memory.has_value()) {
      g = stream_of(together, i);
    } else {
      g.data = one.data();
      Addend du;
      if (call.du.defined()) du = {true, stream_of(call.du, i).data};
      multiply(context, call.math, dy, stream.mix, as_matrix(g), du);
    }
    if (unfolded.weight_gradient(i, with_environment(call.math), g, stream.dw)) stream.dw = {};
    convolve_back(context, g, stream.x, stream.w, {call.stride, call.padding, call.math}, stream.dx,
                  stream.dw, call.add);
  }
  unfolded.finish();
  memory.reset();
  integrated_gradients(context, call, !own_weights);
}

void backward_run(const Context& context, const LiConvBackward& call) {
  run_backward(context, call, Own::nothing);
}

std::string one_pass_backward_declines(const Context& context, const LiConvBackward& call) {
  if (const std::string reason = backward_declines(context, call); !reason.empty()) return reason;
  return own_kernels_decline(call, {call.dy.data, call.dprevious.data});
}

void one_pass_backward_run(const Context& context, const LiConvBackward& call) {
  run_backward(context, call, Own::weight_gradients);
}

std::string one_pass_all_declines(const Context& context, const LiConvBackward& call) {
  if (const std::string reason = backward_declines(context, call); !reason.empty()) return reason;
  if (check_sizes(call).d > kMostDepth) return "dy has more than 128 channels";
  return own_kernels_decline(call, {call.dy.data, call.du.data, call.dprevious.data});
}

std::string one_pass_all_yields(const Context&, const LiConvBackward&) {
  return "it has not been measured against one_pass yet";
}

void one_pass_all_run(const Context& context, const LiConvBackward& call) {
  run_backward(context, call, Own::all_gradients);
}

}  // namespace

Implementations<LiConvForward> li_conv_forward() {
  static constexpr Implementation<LiConvForward> list[] = {
      {"one_pass", one_pass_declines, one_pass_run, one_pass_yields},
      {"accumulate", forward_declines, forward_run}};
  return list;
}

Implementations<LiConvBackward> li_conv_backward() {
  static constexpr Implementation<LiConvBackward> list[] = {
      {"one_pass_all", one_pass_all_declines, one_pass_all_run, one_pass_all_yields},
      {"one_pass", one_pass_backward_declines, one_pass_backward_run},
      {"accumulate", backward_declines, backward_run}};
  return list;
}

}  // namespace fusewise::cuda
