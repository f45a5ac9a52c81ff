#pragma once

// Which GEMMs share one choice of algorithm: those that differ only in the batch size, within one
// octave. Batch sizes and sequence lengths change from call to call, and measuring every size would
// stall every call.

#include <array>
#include <string>
#include <utility>

#include "cuda/gemm/product.h"

namespace fusewise::cuda {

/// What the best algorithm depends on, apart from GPU, library and batch size.
using ProductKind = std::array<std::int64_t, 5>;

struct ProductBucket {
  ProductKind kind;
  /// Batch sizes from 2^octave up to 2^(octave + 1). Without tuning the octave is 0 and the kind
  /// contains the exact size.
  int octave;
  friend bool operator==(const ProductBucket&, const ProductBucket&) = default;
};

ProductBucket bucket_of(const Product& product);
std::string text_of(const ProductBucket& bucket);

/// The product with a batch size that represents this octave and some neighbouring ones. Two
/// processes that see sizes in a different order then ask cuBLASLt about the same product.
Product representative_of(const Product& product);

/// Sizes, strides, kind and alignments: everything that cuBLASLt sees.
using ExactKey = std::array<std::int64_t, 8>;
ExactKey exact_key_of(const Product& product);

struct KeyHash {
  template <std::size_t kSize>
  std::size_t operator()(const std::array<std::int64_t, kSize>& key) const {
    std::uint64_t hash = 0xcbf29ce484222325;
    for (const std::int64_t part : key) hash = (hash ^ part) * 0x9e3779b97f4a7c15;
    return hash ^ (hash >> 32);
  }
  std::size_t operator()(const ProductBucket& bucket) const {
    return (*this)(bucket.kind) * 31 + bucket.octave;
  }
  std::size_t operator()(const std::pair<int, ProductBucket>& of_device) const {
    return (*this)(of_device.second) * 31 + of_device.first;
  }
};

}  // namespace fusewise::cuda
