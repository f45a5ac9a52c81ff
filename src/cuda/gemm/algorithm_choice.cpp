#include "cuda/gemm/algorithm_choice.h"

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>

#include "common/check.h"
#include "common/lru.h"
#include "common/scratch.h"
#include "cuda/cuda_error.h"
#include "cuda/device.h"
#include "cuda/gemm/algorithm_probe.h"
#include "cuda/gemm/product_bucket.h"
#include "cuda/gemm/tuning.h"

namespace fusewise::cuda {
namespace {

constexpr std::size_t kMostKnown = 1024;  // entries of each table

std::string written(const Algorithm& algorithm) {
  std::string text = algorithm.right ? "1" : "0";
  for (const std::uint64_t word : algorithm.algorithm.data) {
    char digits[18];
    std::snprintf(digits, sizeof(digits), " %016" PRIx64, word);
    text += digits;
  }
  return text;
}

/// Returns nothing if the text does not describe an algorithm. Whether the algorithm supports a
/// given size is checked later.
std::optional<Algorithm> restored(const std::string& text) {
  Algorithm algorithm{};
  algorithm.right = text.starts_with("1 ");
  char* end = const_cast<char*>(text.c_str()) + std::min<std::size_t>(1, text.size());
  for (std::uint64_t& word : algorithm.algorithm.data) {
    const char* at = end;
    word = std::strtoull(at, &end, 16);
    if (end == at) return std::nullopt;
  }
  if (*end != '\0') return std::nullopt;
  return algorithm;
}

/// cuBLASLt's suggestions for the product and, if it has an epilogue, also for the product without
/// it. The two lists differ, and either may contain the fastest algorithm.
std::vector<Algorithm> candidates(const Context& context, const Product& p,
                                  Description& description) {
  std::vector<Algorithm> list = suggested(context, p), more;
  if (p.bias != nullptr || p.epilogue != Epilogue::none) {
    Product bare = p;
    bare.bias = nullptr;
    bare.epilogue = Epilogue::none;
    more = suggested(context, bare);
  }
  for (Algorithm& each : more) {
    const bool known = std::any_of(list.begin(), list.end(), [&](const Algorithm& other) {
      return std::memcmp(&each.algorithm, &other.algorithm, sizeof(each.algorithm)) == 0;
    });
    if (!known && takes(context, description, each)) list.push_back(each);
  }
  return list;
}

Algorithm first_suggestion(const Context& context, const Product& p) {
  const std::vector<Algorithm> list = suggested(context, p);
  check(!list.empty(), "cuBLASLt has no algorithm for a ", name_of(p.dtype), " GEMM of [", p.rows,
        ", ", p.inner, "] and [", p.inner, ", ", p.columns, "]");
  return list.front();
}

/// The fastest algorithm that runs. Algorithms that are right are preferred, if there are any.
Algorithm measured(const Context& context, const Product& p, Description& description) {
  std::vector<Algorithm> algorithms = candidates(context, p, description);
  if (needs_probe(p)) {
    std::erase_if(algorithms, [&](Algorithm& each) {
      try {
        each.right = is_right(context, p, description, each);
        return false;
      } catch (const OutOfMemory&) {
        throw;
      } catch (const Error&) {
        return true;
      }
    });
    if (std::any_of(algorithms.begin(), algorithms.end(),
                    [](const Algorithm& each) { return each.right; })) {
      std::erase_if(algorithms, [](const Algorithm& each) { return !each.right; });
    }
  }
  check(!algorithms.empty(), "cuBLASLt has no algorithm that runs for a ", name_of(p.dtype),
        " GEMM of [", p.rows, ", ", p.inner, "] and [", p.inner, ", ", p.columns, "]");
  if (algorithms.size() == 1) return algorithms.front();

  // Trials of a GEMM that adds to its output write elsewhere.
  Product trial = p;
  const bool adds_to_output = p.add && p.c == nullptr;
  const Scratch<char> result(
      context, adds_to_output ? ((p.rows - 1) * p.d.stride + p.columns) * size_of(p.dtype) : 0);
  if (adds_to_output) {
    trial.c = p.d.data;
    trial.d.data = result.data();
  }
  std::size_t most = 0;
  for (const Algorithm& each : algorithms) most = std::max(most, each.workspace);
  const Scratch<char> workspace(context, static_cast<std::int64_t>(most));
  std::vector<std::function<void(const Context&)>> ways;
  for (const Algorithm& each : algorithms) {
    ways.push_back([&](const Context& where) {
      run_algorithm(where, trial, description, each, workspace.data());
    });
  }
  return algorithms[fastest(context, weights_of(p), ways)];
}

/// The choices of this process, for one GPU.
class Choices {
 public:
  Algorithm of(const Context& context, const Product& p, Description& description) {
    const ExactKey key = exact_key_of(p);
    {
      const std::lock_guard lock(mutex_);
      if (const Algorithm* found = exact_.find(key)) return *found;
    }
    Algorithm algorithm = of_bucket(context, p, description);
    if (!takes(context, description, algorithm)) {  // other sizes of the bucket support it
      algorithm = first_suggestion(context, p);
      algorithm.right = is_known_to_be_right(context, p, description, algorithm);
    }
    const std::lock_guard lock(mutex_);
    return exact_.add(key, algorithm);
  }

 private:
  Algorithm of_bucket(const Context& context, const Product& p, Description& description) {
    const ProductBucket bucket = bucket_of(p);
    if (const auto found = find(bucket)) return *found;
    const bool may = may_measure(context, p.math, bucket);
    const std::string text = "gemm" + text_of(bucket);
    if (p.math.tune) {
      if (const auto found = kept(context, text)) return settle(bucket, *found);
    }
    if (!may) return settle(bucket, unmeasured(context, p, description, text));
    const Measuring alone(context.device);
    if (const auto found = find(bucket)) return *found;  // another thread was faster
    try {
      const Algorithm best = measured(context, p, description);
      keep_choice(context, text, written(best), Lifetime::file);
      return settle(bucket, best);
    } catch (const OutOfMemory&) {
      return settle(bucket, unmeasured(context, p, description, text));
    }
  }

  std::optional<Algorithm> kept(const Context& context, const std::string& text) {
    const auto found = kept_choice(context, text);
    return found ? restored(*found) : std::nullopt;
  }

  Algorithm unmeasured(const Context& context, const Product& p, Description& description,
                       const std::string& text) {
    Algorithm first = first_suggestion(context, p.math.tune ? representative_of(p) : p);
    first.right = is_known_to_be_right(context, p, description, first);
    // Remember it: a later call might be allowed to measure, but results must not change within
    // a process.
    if (p.math.tune) keep_choice(context, text, written(first), Lifetime::process);
    return first;
  }

  /// Tested once per algorithm, not for every size: the test synchronises.
  bool is_known_to_be_right(const Context& context, const Product& p, Description& description,
                            Algorithm algorithm) {
    if (!needs_probe(p)) return true;
    Probe probe{};
    std::copy(std::begin(algorithm.algorithm.data), std::end(algorithm.algorithm.data),
              probe.begin());
    probe.back() = exact_key_of(p)[6];
    {
      const std::lock_guard lock(mutex_);
      if (const bool* found = probed_.find(probe)) return *found;
    }
    if (is_captured(context) || !takes(context, description, algorithm)) return false;
    try {
      const bool right = is_right(context, p, description, algorithm);
      const std::lock_guard lock(mutex_);
      return probed_.add(probe, right);
    } catch (const OutOfMemory&) {  // the call itself may still fit
      return false;
    }
  }

  std::optional<Algorithm> find(const ProductBucket& bucket) {
    const std::lock_guard lock(mutex_);
    const Algorithm* found = buckets_.find(bucket);
    return found == nullptr ? std::nullopt : std::optional(*found);
  }

  /// The first thread decides.
  Algorithm settle(const ProductBucket& bucket, const Algorithm& algorithm) {
    const std::lock_guard lock(mutex_);
    return buckets_.add(bucket, algorithm);
  }

  /// The 64-bit words of an algorithm, and the product's flags.
  using Probe = std::array<std::int64_t, std::size(cublasLtMatmulAlgo_t{}.data) + 1>;

  std::mutex mutex_;
  LruMap<ExactKey, Algorithm, KeyHash> exact_{kMostKnown};
  LruMap<ProductBucket, Algorithm, KeyHash> buckets_{kMostKnown};
  LruMap<Probe, bool, KeyHash> probed_{kMostKnown};
};

}  // namespace

Algorithm algorithm_for(const Context& context, const Product& product, Description& description) {
  static std::array<Choices, kMaxDevices> all;
  return all[context.device.index].of(context, product, description);
}

}  // namespace fusewise::cuda
