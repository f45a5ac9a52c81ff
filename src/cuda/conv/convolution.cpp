#include "cuda/conv/convolution.h"

#ifdef FUSEWISE_WITH_CUDNN

#include <algorithm>
#include <array>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/check.h"
#include "common/li_conv.h"
#include "common/scratch.h"
#include "cuda/conv/cudnn.h"
#include "cuda/device.h"
#include "cuda/gemm/alignment.h"
#include "cuda/gemm/product_bucket.h"
#include "cuda/gemm/tuning.h"

namespace fusewise::cuda {
namespace {

constexpr std::size_t kMostPlans = 10;     // measured for one convolution
constexpr std::int64_t kMostConfigs = 32;  // asked for
constexpr std::int64_t kMostWorkspace = 256 << 20;

enum : std::int64_t { kImage = 1, kKernel, kResult };  // names of the tensors in a plan

cudnnDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return CUDNN_DATA_HALF;
    case DType::bf16:
      return CUDNN_DATA_BFLOAT16;
    default:
      return CUDNN_DATA_FLOAT;
  }
}

/// cuDNN takes addresses of 16 bytes by their exact alignment below that.
std::int64_t alignment_for(const TensorView& t) {
  return std::min<std::int64_t>(alignment_of(t.data), kVectorBytes);
}

/// Everything that a plan depends on, apart from the GPU and the library.
using Key = std::array<std::int64_t, 19>;

Key key_of(const ConvolutionCall& c) {
  const TensorView &x = c.image, &w = c.kernel, &y = c.result;
  return {static_cast<std::int64_t>(c.kind),
          c.add,
          static_cast<std::int64_t>(x.dtype),
          c.math.tf32 && x.dtype == DType::f32,
          c.math.tune,
          x.sizes[0],
          x.sizes[1],
          x.sizes[2],
          x.sizes[3],
          w.sizes[0],
          w.sizes[2],
          w.sizes[3],
          y.sizes[2],
          y.sizes[3],
          c.stride[0],
          c.stride[1],
          c.padding[0],
          c.padding[1],
          alignment_for(x) << 16 | alignment_for(w) << 8 | alignment_for(y)};
}

Descriptor described(std::int64_t name, const TensorView& t) {
  Descriptor tensor(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  const cudnnDataType_t type = type_of(t.dtype);
  const std::int64_t c = t.sizes[1], h = t.sizes[2], w = t.sizes[3];
  const std::int64_t strides[] = {h * w * c, 1, w * c, c};
  tensor.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, name);
  tensor.set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, &type);
  tensor.set(CUDNN_ATTR_TENSOR_DIMENSIONS, std::span(t.sizes.data(), 4));
  tensor.set(CUDNN_ATTR_TENSOR_STRIDES, strides);
  tensor.set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, alignment_for(t));
  return tensor.finalized();
}

/// The attributes of one kind of operation.
struct Names {
  cudnnBackendDescriptorType_t operation;
  cudnnBackendAttributeName_t convolution, image, kernel, result, alpha, beta;
};

Names names_of(ConvolutionKind kind) {
  switch (kind) {
    case ConvolutionKind::forward:
      return {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA};
    case ConvolutionKind::data_gradient:
      return {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA};
    default:
      return {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA};
  }
}

/// A graph of one operation.
Descriptor graph_of(cudnnHandle_t handle, const ConvolutionCall& call) {
  const std::int64_t ones[] = {1, 1};
  const cudnnDataType_t sums = CUDNN_DATA_FLOAT;
  const cudnnConvolutionMode_t mode = CUDNN_CROSS_CORRELATION;
  Descriptor convolution(CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
  convolution.set(CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, std::int64_t{2});
  convolution.set(CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, &sums);
  convolution.set(CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, &mode);
  convolution.set(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, call.padding);
  convolution.set(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, call.padding);
  convolution.set(CUDNN_ATTR_CONVOLUTION_DILATIONS, ones);
  convolution.set(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, call.stride);
  convolution = convolution.finalized();

  const Descriptor image = described(kImage, call.image), kernel = described(kKernel, call.kernel),
                   result = described(kResult, call.result);
  const Names names = names_of(call.kind);
  Descriptor operation(names.operation);
  operation.set(names.convolution, convolution);
  operation.set(names.image, image);
  operation.set(names.kernel, kernel);
  operation.set(names.result, result);
  operation.set(names.alpha, 1.f);
  operation.set(names.beta, call.add ? 1.f : 0.f);
  operation = operation.finalized();

  Descriptor graph(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  graph.set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, &handle);
  graph.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, operation);
  return graph.finalized();
}

/// Whether an engine computes what we promise: the same bits every time, float32 sums, and TF32
/// only where it is allowed. FFT and Winograd are less exact, and spread NaN to other pixels.
bool is_allowed(const Descriptor& config, const ConvolutionCall& call) {
  const Cudnn& api = *Cudnn::get();
  Descriptor engine(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
  cudnnBackendDescriptor_t handle = engine.get();
  std::int64_t count = 0;
  if (api.get_attribute(config.get(), CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1,
                        &count, &handle) != CUDNN_STATUS_SUCCESS) {
    return false;
  }
  std::array<cudnnBackendNumericalNote_t, CUDNN_NUMERICAL_NOTE_TYPE_COUNT> notes{};
  if (api.get_attribute(engine.get(), CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE,
                        notes.size(), &count, notes.data()) != CUDNN_STATUS_SUCCESS) {
    return false;
  }
  const bool f32 = call.image.dtype == DType::f32, exact = f32 && !call.math.tf32;
  // A later cuDNN may have more notes than there is room for.
  const auto end = notes.begin() + std::min<std::int64_t>(count, notes.size());
  return std::none_of(notes.begin(), end, [&](cudnnBackendNumericalNote_t note) {
    return note == CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC ||
           note == CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION ||
           note == CUDNN_NUMERICAL_NOTE_FFT || note == CUDNN_NUMERICAL_NOTE_WINOGRAD ||
           (f32 && note == CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS) ||
           (exact && note == CUDNN_NUMERICAL_NOTE_TENSOR_CORE);
  });
}

/// Engines with their settings, the best guess first.
std::vector<Descriptor> configs_of(const Descriptor& graph, cudnnBackendHeurMode_t mode) {
  const Cudnn& api = *Cudnn::get();
  Descriptor heuristic(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  heuristic.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
  heuristic.set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, &mode);
  if (api.finalize(heuristic.get()) != CUDNN_STATUS_SUCCESS) return {};
  std::vector<Descriptor> configs;
  std::vector<cudnnBackendDescriptor_t> handles;
  for (std::int64_t i = 0; i < kMostConfigs; ++i) {
    handles.push_back(configs.emplace_back(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR).get());
  }
  std::int64_t count = 0;
  if (api.get_attribute(heuristic.get(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                        CUDNN_TYPE_BACKEND_DESCRIPTOR, kMostConfigs, &count,
                        handles.data()) != CUDNN_STATUS_SUCCESS) {
    return {};
  }
  configs.resize(std::min(count, kMostConfigs));
  return configs;
}

struct Plan {
  Descriptor descriptor;
  std::int64_t workspace = 0;
};

std::optional<Plan> plan_of(cudnnHandle_t handle, const Descriptor& config) {
  const Cudnn& api = *Cudnn::get();
  Plan plan{Descriptor(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)};
  plan.descriptor.set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, &handle);
  plan.descriptor.set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config);
  std::int64_t count = 0;
  if (api.finalize(plan.descriptor.get()) != CUDNN_STATUS_SUCCESS ||
      api.get_attribute(plan.descriptor.get(), CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                        CUDNN_TYPE_INT64, 1, &count, &plan.workspace) != CUDNN_STATUS_SUCCESS ||
      plan.workspace > kMostWorkspace) {
    static_cast<void>(cudaGetLastError());  // so that later calls do not report it
    return std::nullopt;
  }
  return plan;
}

void execute(const Context& context, cudnnHandle_t handle, const ConvolutionCall& call,
             const Plan& plan, void* workspace) {
  const Cudnn& api = *Cudnn::get();
  const std::int64_t names[] = {kImage, kKernel, kResult};
  void* data[] = {call.image.data, call.kernel.data, call.result.data};
  Descriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, names);
  pack.set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, data, 3);
  pack.set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, &workspace);
  pack = pack.finalized();
  check_cudnn(api.set_stream(handle, static_cast<cudaStream_t>(context.stream)),
              "setting the stream");
  check_cudnn(api.execute(handle, plan.descriptor.get(), pack.get()), "a convolution");
}

/// A handle, which one thread at a time may use, with its plans.
class Session {
 public:
  Session() { check_cudnn(Cudnn::get()->create(&handle_), "starting"); }

  bool run(const Context& context, const ConvolutionCall& call) {
    const Key key = key_of(call);
    auto found = plans_.find(key);
    std::optional<RelaxedCapture> relaxed;  // the first run of a plan loads its kernels
    if (found == plans_.end()) {
      // No plan is ever destroyed: a captured graph may use its kernels.
      if (plans_.size() >= kMostKept) return false;
      relaxed.emplace();
      found = plans_.emplace(key, chosen(context, call, key)).first;
    }
    if (!found->second.has_value()) return false;
    const Plan& plan = *found->second;
    const Scratch<char> workspace(context, plan.workspace);
    execute(context, handle_, call, plan, workspace.data());
    return true;
  }

 private:
  /// Where shapes change all the time, the first ones are measured, the next ones take cuDNN's best
  /// guess, and torch computes the rest.
  static constexpr std::size_t kMostMeasured = 512, kMostKept = 2048;

  /// Nothing if there is no algorithm that is allowed.
  std::optional<Plan> chosen(const Context& context, const ConvolutionCall& call, const Key& key) {
    const RelaxedCapture relaxed;
    const Descriptor graph = graph_of(handle_, call);
    std::vector<Descriptor> configs = configs_of(graph, CUDNN_HEUR_MODE_A);
    std::erase_if(configs, [&](const Descriptor& each) { return !is_allowed(each, call); });
    if (configs.empty()) {
      configs = configs_of(graph, CUDNN_HEUR_MODE_FALLBACK);
      std::erase_if(configs, [&](const Descriptor& each) { return !is_allowed(each, call); });
    }
    if (!call.math.tune) return first_of(configs);

    std::string text = "conv " + std::to_string(Cudnn::get()->version());
    for (const std::int64_t part : key) text.append(" ").append(std::to_string(part));
    if (auto plan = kept(context, text, configs)) return plan;
    const Measuring alone(context.device);
    if (auto plan = kept(context, text, configs)) return plan;  // another thread was faster
    const bool measures = !is_captured(context) && plans_.size() < kMostMeasured;
    std::vector<std::pair<std::size_t, Plan>> plans;
    for (std::size_t i = 0; i < configs.size(); ++i) {
      if (auto plan = plan_of(handle_, configs[i])) plans.emplace_back(i, *std::move(plan));
      if (plans.size() == (measures ? kMostPlans : 1)) break;
    }
    if (plans.empty()) return std::nullopt;
    // A choice that could not be measured stays for the process, whose results must not change.
    Lifetime lifetime = Lifetime::process;
    std::size_t best = 0;
    if (measures) {
      try {
        best = measured(context, call, plans);
        lifetime = Lifetime::file;
      } catch (const OutOfMemory&) {
      } catch (const Error&) {  // none of them runs
        return std::nullopt;
      }
    }
    keep_choice(context, text, std::to_string(plans[best].first), lifetime);
    return std::move(plans[best].second);
  }

  std::optional<Plan> first_of(const std::vector<Descriptor>& configs) {
    for (const Descriptor& config : configs) {
      if (auto plan = plan_of(handle_, config)) return plan;
    }
    return std::nullopt;
  }

  std::optional<Plan> kept(const Context& context, const std::string& text,
                           const std::vector<Descriptor>& configs) {
    const auto found = kept_choice(context, text);
    if (!found) return std::nullopt;
    const std::size_t index = std::strtoull(found->c_str(), nullptr, 10);
    return index < configs.size() ? plan_of(handle_, configs[index]) : std::nullopt;
  }

  std::size_t measured(const Context& context, const ConvolutionCall& call,
                       const std::vector<std::pair<std::size_t, Plan>>& plans) {
    std::int64_t most = 0;
    for (const auto& [index, plan] : plans) most = std::max(most, plan.workspace);
    const Scratch<char> workspace(context, most);
    // Where a plan adds to its output, repetitions must not change it.
    const std::int64_t changed = call.add ? call.image.numel() * size_of(call.image.dtype) : 0;
    const Scratch<char> image(context, changed);
    ConvolutionCall timed = call;
    if (call.add) {
      timed.image.data = image.data();
      check_cuda(
          cudaMemsetAsync(image.data(), 0, changed, static_cast<cudaStream_t>(context.stream)),
          "clearing an image");
    }
    std::vector<std::function<void(const Context&)>> ways;
    for (const auto& entry : plans) {
      ways.push_back([&, plan = &entry.second](const Context& where) {
        execute(where, handle_, timed, *plan, workspace.data());
      });
    }
    Resident weights{};
    if (call.kind != ConvolutionKind::weight_gradient) {
      weights = {call.kernel.data, call.kernel.numel() * size_of(call.kernel.dtype)};
    }
    return fastest(context, weights, ways);
  }

  cudnnHandle_t handle_ = nullptr;
  std::unordered_map<Key, std::optional<Plan>, KeyHash> plans_;
};

/// The sessions of one GPU that nobody uses at the moment. They are never destroyed: at the end of
/// a process CUDA may be gone before they are.
class Sessions {
 public:
  Session* borrow() {
    {
      const std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        Session* session = free_.back();
        free_.pop_back();
        return session;
      }
    }
    const RelaxedCapture relaxed;
    return new Session;
  }
  void give_back(Session* session) {
    const std::lock_guard lock(mutex_);
    free_.push_back(session);
  }

 private:
  std::mutex mutex_;
  std::vector<Session*> free_;
};

Sessions& sessions_of(Device device) {
  static auto* const all = new std::array<Sessions, kMaxDevices>;
  return (*all)[device.index];
}

class Borrowed {
 public:
  explicit Borrowed(Device device) : device_(device), session_(sessions_of(device).borrow()) {}
  ~Borrowed() { sessions_of(device_).give_back(session_); }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;
  Session* operator->() const { return session_; }

 private:
  Device device_;
  Session* session_;
};

}  // namespace

bool has_cudnn() { return Cudnn::get() != nullptr; }

bool convolve(const Context& context, const ConvolutionCall& call) {
  if (!has_cudnn() || call.image.dtype == DType::f64) return false;
  for (const TensorView* t : {&call.image, &call.kernel, &call.result}) {
    if (!is_channels_last(*t)) return false;
    if (t->numel() >= std::int64_t{1} << 31) return false;  // not every cuDNN 9 is right there
  }
  return Borrowed(context.device)->run(context, call);
}

}  // namespace fusewise::cuda

#else  // without cuDNN's headers

namespace fusewise::cuda {

bool has_cudnn() { return false; }
bool convolve(const Context&, const ConvolutionCall&) { return false; }

}  // namespace fusewise::cuda

#endif
