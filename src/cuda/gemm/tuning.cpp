#include "cuda/gemm/tuning.h"

#include <cublasLt.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdlib>
#include <exception>
#include <vector>

#include "common/check.h"
#include "common/lru.h"
#include "common/scratch.h"
#include "common/tuning_cache.h"
#include "cuda/device.h"
#include "fusewise/version.h"

namespace fusewise::cuda {
namespace {

constexpr int kRounds = 7, kFinalRounds = 20;
constexpr float kRoundsMs = 200;  // at most for each of the two phases, but at least one round
constexpr std::size_t kFinalists = 3;
constexpr float kNoise = 0.99f;  // others need less than this fraction of the time of the first
constexpr float kHopeless = 3;   // a candidate this much slower than the best is not timed again

// Limits on how many buckets are measured, for programs whose batch size changes with every call.
constexpr int kBucketsOfAKind = 5;
constexpr int kBucketsInAll = 1024;
constexpr std::size_t kKinds = 1024;  // number of kinds remembered

/// The choices of this process, backed by the tuning cache file in the user's cache folder.
class KeptChoices {
 public:
  std::optional<std::string> find(const Context& context, const std::string& key) {
    std::string problem;
    std::optional<std::string> result;
    {
      const std::lock_guard lock(mutex_);
      problem = load();
      if (const std::string* found = choices_.find(key)) result = *found;
    }
    if (!problem.empty() && context.warn != nullptr) context.warn(problem.c_str());
    return result;
  }

  void add(const std::string& key, const std::string& value, Lifetime lifetime) {
    const std::lock_guard lock(mutex_);
    choices_.add(key, value) = value;
    if (lifetime == Lifetime::process) return;
    std::erase_if(unwritten_, [&](const auto& entry) { return entry.first == key; });
    unwritten_.emplace_back(key, value);
  }

  void write() {
    TuningCache::Entries entries;
    {
      const std::lock_guard lock(mutex_);
      entries.swap(unwritten_);
    }
    if (!entries.empty()) file_.add(entries);
  }

 private:
  /// Reads the file, once. Returns a description of what is wrong with it.
  std::string load() {
    std::string problem;
    if (loaded_) return problem;
    loaded_ = true;
    for (const auto& [key, value] : file_.read(problem)) choices_.add(key, value);
    return problem;
  }

  std::mutex mutex_;
  bool loaded_ = false;
  const TuningCache file_{TuningCache::in_cache_folder("products")};
  LruMap<std::string, std::string> choices_{2 * TuningCache::kMostEntries};
  TuningCache::Entries unwritten_;
};

KeptChoices& kept_choices() {
  static KeptChoices instance;
  return instance;
}

/// "0.1.0|NVIDIA H200|132|130100|": a choice is only valid for this machine and these versions.
const std::string& machine(int device) {
  static std::array<std::once_flag, kMaxDevices> once;
  static std::array<std::string, kMaxDevices> texts;
  std::call_once(once[device], [&] {
    cudaDeviceProp properties{};
    check_cuda(cudaGetDeviceProperties(&properties, device), "asking for the GPU's name");
    texts[device] = std::string(FUSEWISE_VERSION "|") + properties.name + "|" +
                    std::to_string(properties.multiProcessorCount) + "|" +
                    std::to_string(cublasLtGetVersion()) + "|";
  });
  return texts[device];
}

/// Limits which octaves of each kind are measured, first come, first served. Octaves found in the
/// file count too. A process with the same file therefore measures the same octaves as the one that
/// wrote it.
class Budget {
 public:
  bool admits(const ProductBucket& bucket) {
    const std::uint64_t bit = std::uint64_t{1} << bucket.octave;
    const std::lock_guard lock(mutex_);
    std::uint64_t& octaves = kinds_.add(bucket.kind, 0);
    if (octaves & bit) return true;
    if (std::popcount(octaves) == kBucketsOfAKind || total_ == kBucketsInAll) return false;
    octaves |= bit;
    ++total_;
    return true;
  }

 private:
  std::mutex mutex_;
  LruMap<ProductKind, std::uint64_t, KeyHash> kinds_{kKinds};
  int total_ = 0;
};

Budget& budget_of(Device device) {
  static std::array<Budget, kMaxDevices> all;
  return all[device.index];
}

struct DeviceMutex {
  std::recursive_mutex mutex;
  int depth = 0;
};

DeviceMutex& mutex_of(Device device) {
  static std::array<DeviceMutex, kMaxDevices> all;
  return all[device.index];
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

/// Times single calls. Before each call, it writes a buffer of twice the size of L2 and then reads
/// the weights. That takes longer than the host needs to enqueue the call, so host time does not
/// count.
class ColdTimer {
 public:
  ColdTimer(const Context& context, Resident weights)
      : context_(context),
        weights_(weights),
        bytes_(2 * limits_of(context.device).l2_cache),
        evicting_(context, bytes_) {}

  float milliseconds(const std::function<void(const Context&)>& way) const {
    const auto stream = static_cast<cudaStream_t>(context_.stream);
    check_cuda(cudaMemsetAsync(evicting_.data(), 0, bytes_, stream), "emptying the cache");
    if (weights_.bytes > 0 && weights_.bytes <= bytes_ / 4) {  // larger ones would not stay in L2
      check_cuda(cudaMemcpyAsync(evicting_.data(), weights_.data, weights_.bytes,
                                 cudaMemcpyDeviceToDevice, stream),
                 "reading weights");
    }
    check_cuda(cudaEventRecord(begin_.get(), stream), "timing a GEMM");
    way(context_);
    check_cuda(cudaEventRecord(end_.get(), stream), "timing a GEMM");
    check_cuda(cudaEventSynchronize(end_.get()), "timing a GEMM");
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, begin_.get(), end_.get()), "timing a GEMM");
    return ms;
  }

 private:
  const Context& context_;
  Resident weights_;
  std::int64_t bytes_;
  Scratch<char> evicting_;
  Event begin_, end_;
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

ProductMath with_environment(ProductMath math) {
  static const bool wanted = [] {
    const char* text = std::getenv("FUSEWISE_TUNE");
    return text == nullptr || std::string(text) != "0";
  }();
  math.tune = math.tune && wanted;
  return math;
}

bool may_measure(const Context& context, const ProductMath& math, const ProductBucket& bucket) {
  return math.tune && !is_captured(context) && budget_of(context.device).admits(bucket);
}

std::optional<std::string> kept_choice(const Context& context, const std::string& key) {
  return kept_choices().find(context, machine(context.device.index) + key);
}

void keep_choice(const Context& context, const std::string& key, const std::string& value,
                 Lifetime lifetime) {
  kept_choices().add(machine(context.device.index) + key, value, lifetime);
}

Measuring::Measuring(Device device) : device_(device), lock_(mutex_of(device).mutex) {
  ++mutex_of(device).depth;
}

Measuring::~Measuring() {
  if (--mutex_of(device_).depth > 0) return;
  try {
    kept_choices().write();
  } catch (const std::exception&) {  // no memory for the text: the choices stay in the process
  }
}

Resident weights_of(const Product& p) {
  const auto all = [&](const Matrix& matrix, std::int64_t rows, std::int64_t columns) {
    const std::int64_t lines = matrix.transposed ? columns : rows;
    const std::int64_t line = matrix.transposed ? rows : columns;
    if (lines == 0 || line == 0) return Resident{};
    return Resident{matrix.data, ((lines - 1) * matrix.stride + line) * size_of(p.dtype)};
  };
  switch (p.batch) {
    case BatchSize::rows:
      return all(p.b, p.inner, p.columns);
    case BatchSize::columns:
      return all(p.a, p.rows, p.inner);
    default:
      return {};
  }
}

std::size_t fastest(const Context& context, Resident weights,
                    std::span<const std::function<void(const Context&)>> ways) {
  const RelaxedCapture relaxed;
  const ColdTimer timer(context, weights);
  std::vector<std::vector<float>> samples(ways.size());
  std::vector<std::size_t> left;
  float best = std::numeric_limits<float>::infinity();
  std::exception_ptr failure;
  for (std::size_t i = 0; i < ways.size(); ++i) {
    try {
      ways[i](context);  // the first call of a kernel loads it
      samples[i].push_back(timer.milliseconds(ways[i]));
      best = std::min(best, samples[i].front());
      left.push_back(i);
    } catch (const OutOfMemory&) {
      throw;
    } catch (const Error&) {
      failure = std::current_exception();
    }
  }
  if (left.empty()) std::rethrow_exception(failure);
  const std::size_t first = left.front();
  std::erase_if(left,
                [&](std::size_t i) { return i != first && samples[i].front() > kHopeless * best; });
  // Round-robin, so that a change of clocks affects all alike: first all candidates, then the best.
  const auto measure = [&](int most) {
    const float once_around = best * static_cast<float>(left.size());
    for (int round = std::clamp(static_cast<int>(kRoundsMs / once_around), 1, most); round > 0;
         --round) {
      for (const std::size_t i : left) samples[i].push_back(timer.milliseconds(ways[i]));
    }
  };
  measure(kRounds);
  std::sort(left.begin(), left.end(),
            [&](std::size_t i, std::size_t j) { return median(samples[i]) < median(samples[j]); });
  left.resize(std::min(left.size(), kFinalists));
  if (std::find(left.begin(), left.end(), first) == left.end()) left.push_back(first);
  if (left.size() > 1) measure(kFinalRounds);
  std::size_t winner = first;
  for (const std::size_t i : left) {
    if (median(samples[i]) < median(samples[winner])) winner = i;
  }
  return median(samples[winner]) < kNoise * median(samples[first]) ? winner : first;
}

}  // namespace fusewise::cuda
