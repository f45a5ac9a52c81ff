#include "cuda/gemm/product.h"

#include <algorithm>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "common/check.h"
#include "common/lru.h"
#include "common/scratch.h"
#include "cuda/cuda_error.h"
#include "cuda/gemm/algorithm_choice.h"
#include "cuda/gemm/alignment.h"
#include "cuda/gemm/padding.h"
#include "cuda/gemm/product_bucket.h"
#include "cuda/gemm/tuning.h"

namespace fusewise::cuda {

namespace {

/// One way to compute a product: the copies around it and its algorithm.
class Way {
 public:
  Way(const Context& context, const CopiedProduct& copied)
      : copied_(copied), padding_(context, copied.bytes) {
    if (copied_.bytes > 0) copied_.place(padding_.data());
    description_.emplace(copied_.product);
    algorithm_ = algorithm_for(context, copied_.product, *description_);
    workspace_.emplace(context, static_cast<std::int64_t>(algorithm_.workspace));
  }

  void run(const Context& context) {
    run_copies(context, copied_.inputs.data(), kMostCopies);
    run_algorithm(context, copied_.product, *description_, algorithm_, workspace_->data());
    run_copies(context, &copied_.result, 1);
  }

  bool is_right() const { return algorithm_.right; }

 private:
  CopiedProduct copied_;
  Scratch<char> padding_;
  std::optional<Scratch<char>> workspace_;
  std::optional<Description> description_;
  Algorithm algorithm_{};
};

/// Decides for the first call of a product bucket, by measuring if that is allowed. With a bias,
/// the product is always padded, unless an algorithm for the unpadded product is known to be right.
bool padding_pays(const Context& context, const Product& p, const ProductBucket& bucket,
                  const CopiedProduct& copies) {
  const Measuring alone(context.device);
  const bool may = may_measure(context, p.math, bucket);
  const std::string key = "pad" + text_of(bucket);
  if (p.math.tune) {
    if (const auto kept = kept_choice(context, key)) return kept == "1";
  }
  // Use a size that represents the bucket, so that the order of sizes does not matter.
  const Product typical = p.math.tune ? representative_of(p) : p;
  const bool expected = padding_should_pay(typical, padded(typical).value_or(copies));
  bool pays = p.bias != nullptr || expected;
  Lifetime lifetime = Lifetime::process;
  try {
    Way plain(context, as_is(p));
    const bool right = p.bias == nullptr || plain.is_right();
    if (right) pays = expected;
    if (right && may) {
      Way copied(context, copies);
      const std::function<void(const Context&)> ways[] = {
          [&](const Context& where) { copied.run(where); },
          [&](const Context& where) { plain.run(where); }};
      pays = fastest(context, weights_of(p), ways) == 0;
    }
    if (may) lifetime = Lifetime::file;
  } catch (const OutOfMemory&) {  // both at once did not fit; one may
  }
  if (p.math.tune) keep_choice(context, key, pays ? "1" : "0", lifetime);
  return pays;
}

CopiedProduct best_copies(const Context& context, const Product& p) {
  const auto copied = padded(p);
  if (!copied) return as_is(p);
  constexpr std::size_t kMostKnown = 1024;
  static std::mutex mutex;
  static LruMap<std::pair<int, ProductBucket>, bool, KeyHash> known{kMostKnown};
  const std::pair key(context.device.index, bucket_of(p));
  std::unique_lock lock(mutex);
  const bool* found = known.find(key);
  bool pays = found != nullptr && *found;
  if (found == nullptr) {
    lock.unlock();  // measuring takes long and calls this function again
    pays = padding_pays(context, p, key.second, *copied);
    lock.lock();
    pays = known.add(key, pays);
  }
  return pays ? *copied : as_is(p);
}

}  // namespace

struct PreparedProduct::State {
  std::optional<Scratch<char>> zeros, bias;
  std::optional<Way> way;

  State(const Context& context, Product p) {
    check(p.add || p.c == nullptr, "a GEMM with c adds it");
    check(!p.add || (p.bias == nullptr && p.epilogue == Epilogue::none),
          "a GEMM that adds has no bias and no epilogue");
    check(!p.wide_result || (p.epilogue == Epilogue::none && !p.math.tune),
          "a GEMM with a wide result has no epilogue and no tuning");
    check(p.count == 1 || (p.bias == nullptr && !p.d.transposed && p.inner > 0 && !p.wide_result &&
                           (!p.add || p.c != nullptr)),
          "several GEMMs in one have no bias and do not add to their output");
    const auto stream = static_cast<cudaStream_t>(context.stream);
    const std::int64_t size = size_of(p.wide_result ? DType::f32 : p.dtype);
    if (p.inner == 0) {  // an empty sum is zero
      const std::int64_t bytes = std::max(p.rows, p.columns) * size;
      zeros.emplace(context, bytes);
      check_cuda(cudaMemsetAsync(zeros->data(), 0, bytes, stream), "clearing zeros");
      p.inner = 1;
      p.a = {zeros->data(), 1, false};
      p.b = {zeros->data(), 1, true};
    }
    if (p.d.transposed) {  // d^T = b^T a^T
      std::swap(p.rows, p.columns);
      std::swap(p.a, p.b);
      for (Matrix* matrix : {&p.a, &p.b, &p.d}) matrix->transposed = !matrix->transposed;
      if (p.batch != BatchSize::inner) {
        p.batch = p.batch == BatchSize::rows ? BatchSize::columns : BatchSize::rows;
      }
    }
    if (!is_aligned(p.bias) && (size_of(p.dtype) > 2 || p.wide_result)) {
      bias.emplace(context, p.columns * size);
      check_cuda(
          cudaMemcpyAsync(bias->data(), p.bias, p.columns * size, cudaMemcpyDeviceToDevice, stream),
          "copying a bias");
      p.bias = bias->data();
    }
    const CopiedProduct best = best_copies(context, p);
    try {
      way.emplace(context, best);
    } catch (const OutOfMemory&) {
      if (best.bytes == 0) throw;
      way.emplace(context, as_is(p));  // it may fit without the copies
      if (p.bias != nullptr && !way->is_right()) throw;
    }
    if (p.bias == nullptr || way->is_right()) return;
    // This size cannot use its bucket's algorithm, and no other one was tested.
    if (const auto copies = padded(p)) way.emplace(context, *copies);
  }
};

PreparedProduct::PreparedProduct(const Context& context, const Product& product) {
  if (product.rows > 0 && product.columns > 0) state_ = std::make_unique<State>(context, product);
}

PreparedProduct::~PreparedProduct() = default;

void PreparedProduct::run(const Context& context) const {
  if (state_ != nullptr) state_->way->run(context);
}

bool PreparedProduct::is_right() const { return state_ == nullptr || state_->way->is_right(); }

void multiply(const Context& context, const Product& product) {
  PreparedProduct(context, product).run(context);
}

}  // namespace fusewise::cuda
