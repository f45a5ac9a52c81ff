#include "cuda/gemm/tuning.h"

#include <cublasLt.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "common/check.h"
#include "common/choices.h"
#include "cuda/cuda_error.h"

namespace fusewise::cuda {
namespace {

constexpr int kRounds = 5, kFinalRounds = 10;
constexpr std::size_t kFinalists = 3;
constexpr int kMostCalls = 10;   // in one sample
constexpr float kSampleMs = 2;   // a sample is about so long, or one call
constexpr float kNoise = 0.99f;  // another than the first must be faster by more than that
constexpr float kHopeless = 3;   // so much slower than the best, a way is not timed again

/// Choices of this process and, behind them, the file of the user's cache folder.
class Kept {
 public:
  std::optional<std::string> find(const Context& context, const std::string& key) {
    const std::lock_guard lock(mutex_);
    load(context);
    const auto found = entries_.find(key);
    if (found == entries_.end()) return std::nullopt;
    return found->second;
  }

  void add(const std::string& key, const std::string& value) {
    {
      const std::lock_guard lock(mutex_);
      entries_.insert_or_assign(key, value);
    }
    file_.add(key, value);
  }

 private:
  void load(const Context& context) {
    if (loaded_) return;
    loaded_ = true;
    std::string problem;
    for (auto& [key, value] : file_.read(problem)) entries_.emplace(key, std::move(value));
    if (!problem.empty() && context.warn != nullptr) context.warn(problem.c_str());
  }

  std::mutex mutex_;
  bool loaded_ = false;
  const ChoiceFile file_{ChoiceFile::in_cache_folder("products")};
  std::unordered_map<std::string, std::string> entries_;
};

Kept& kept() {
  static Kept instance;
  return instance;
}

/// "NVIDIA H200|132|130100|": what an algorithm is good for.
const std::string& machine(int device) {
  thread_local std::unordered_map<int, std::string> known;
  std::string& text = known[device];
  if (text.empty()) {
    cudaDeviceProp properties{};
    check_cuda(cudaGetDeviceProperties(&properties, device), "asking for the GPU's name");
    text = std::string(properties.name) + "|" + std::to_string(properties.multiProcessorCount) +
           "|" + std::to_string(cublasLtGetVersion()) + "|";
  }
  return text;
}

class Event {
 public:
  Event() { check_cuda(cudaEventCreate(&event_), "creating an event"); }
  ~Event() { static_cast<void>(cudaEventDestroy(event_)); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_{};
};

/// Several calls of one way as a graph.
class Graph {
 public:
  Graph(const Context& context, const std::function<void(const Context&)>& way, int calls) {
    Context recording = context;
    cudaStream_t stream{};
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "creating a stream");
    recording.stream = stream;
    cudaGraph_t graph{};
    cudaError_t status = cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed);
    try {
      if (status == cudaSuccess) {
        for (int i = 0; i < calls; ++i) way(recording);
      }
    } catch (...) {
      static_cast<void>(cudaStreamEndCapture(stream, &graph));
      if (graph != nullptr) static_cast<void>(cudaGraphDestroy(graph));
      static_cast<void>(cudaStreamDestroy(stream));
      throw;
    }
    if (status == cudaSuccess) status = cudaStreamEndCapture(stream, &graph);
    static_cast<void>(cudaStreamDestroy(stream));
    if (status == cudaSuccess) status = cudaGraphInstantiate(&exec_, graph, 0);
    if (graph != nullptr) static_cast<void>(cudaGraphDestroy(graph));
    check_cuda(status, "capturing a product to measure it");
  }
  ~Graph() {
    if (exec_ != nullptr) static_cast<void>(cudaGraphExecDestroy(exec_));
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void launch(const Context& context) const {
    check_cuda(cudaGraphLaunch(exec_, static_cast<cudaStream_t>(context.stream)),
               "running a product to measure it");
  }

 private:
  cudaGraphExec_t exec_ = nullptr;
};

float median(std::vector<float> samples) {
  std::sort(samples.begin(), samples.end());
  return samples[samples.size() / 2];
}

}  // namespace

bool is_captured(const Context& context) {
  cudaStreamCaptureStatus status{};
  check_cuda(cudaStreamIsCapturing(static_cast<cudaStream_t>(context.stream), &status),
             "asking whether a graph is captured");
  return status != cudaStreamCaptureStatusNone;
}

bool may_measure(const Context& context, const ProductMath& math) {
  static const bool wanted = [] {
    const char* text = std::getenv("FUSEWISE_TUNE");
    return text == nullptr || std::string(text) != "0";
  }();
  return math.tune && wanted && !is_captured(context);
}

std::optional<std::string> kept_choice(const Context& context, const std::string& key) {
  return kept().find(context, machine(context.device.index) + key);
}

void keep_choice(const Context& context, const std::string& key, const std::string& value) {
  kept().add(machine(context.device.index) + key, value);
}

std::unique_lock<std::recursive_mutex> measuring() {
  static std::recursive_mutex mutex;
  return std::unique_lock(mutex);
}

std::size_t fastest(const Context& context,
                    std::span<const std::function<void(const Context&)>> ways) {
  const RelaxedCapture relaxed;
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const Event begin, end;
  const auto time = [&](const std::function<void()>& work) {
    check_cuda(cudaEventRecord(begin.get(), stream), "timing a product");
    work();
    check_cuda(cudaEventRecord(end.get(), stream), "timing a product");
    check_cuda(cudaEventSynchronize(end.get()), "timing a product");
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, begin.get(), end.get()), "timing a product");
    return ms;
  };

  std::vector<float> once(ways.size());
  for (std::size_t i = 0; i < ways.size(); ++i) {
    ways[i](context);  // the first call of a kernel loads it
    once[i] = time([&] { ways[i](context); });
  }
  const float best = *std::min_element(once.begin(), once.end());
  const int calls = std::clamp(static_cast<int>(kSampleMs / std::max(best, 1e-3f)), 1, kMostCalls);
  std::vector<std::optional<Graph>> graphs(ways.size());
  std::vector<std::vector<float>> samples(ways.size());
  const auto sample = [&](std::size_t i) {
    if (!graphs[i]) graphs[i].emplace(context, ways[i], calls);
    samples[i].push_back(time([&] { graphs[i]->launch(context); }));
  };
  // In turns, so that a change of clocks meets all. First those with hope, then the best of them.
  std::vector<std::size_t> left;
  for (std::size_t i = 0; i < ways.size(); ++i) {
    if (i == 0 || once[i] < kHopeless * best) left.push_back(i);
  }
  for (int round = 0; round < kRounds; ++round) {
    for (const std::size_t i : left) sample(i);
  }
  std::sort(left.begin(), left.end(),
            [&](std::size_t i, std::size_t j) { return median(samples[i]) < median(samples[j]); });
  left.resize(std::min(left.size(), kFinalists));
  if (std::find(left.begin(), left.end(), 0) == left.end()) left.push_back(0);
  for (int round = 0; round < kFinalRounds && left.size() > 1; ++round) {
    for (const std::size_t i : left) sample(i);
  }
  std::size_t winner = 0;
  for (const std::size_t i : left) {
    if (median(samples[i]) < median(samples[winner])) winner = i;
  }
  return median(samples[winner]) < kNoise * median(samples[0]) ? winner : 0;
}

}  // namespace fusewise::cuda
