// Which GEMMs share one measured choice of algorithm.

#include <gtest/gtest.h>

#include <set>

#include "cuda/gemm/product_bucket.h"

namespace fusewise::cuda {
namespace {

alignas(256) char memory[512];

Product forward(std::int64_t rows, void* x = memory) {
  Product p{};
  p.rows = rows;
  p.columns = 512;
  p.inner = 256;
  p.a = {x, 256, false};
  p.b = {memory, 256, true};
  p.d = {memory, 512, false};
  p.dtype = DType::bf16;
  p.bias = memory;
  p.epilogue = Epilogue::relu;
  return p;
}

/// dW = dz^T x, where the batch is the length of the sums.
Product weight_gradient(std::int64_t rows) {
  Product p{};
  p.rows = 512;
  p.columns = 256;
  p.inner = rows;
  p.a = {memory, 512, true};
  p.b = {memory, 256, false};
  p.d = {memory, 256, false};
  p.dtype = DType::bf16;
  p.batch = BatchSize::inner;
  return p;
}

TEST(ProductBucket, TenThousandRowCountsAreFew) {
  std::set<std::string> texts;
  for (std::int64_t rows = 1; rows <= 10'000; ++rows) {
    texts.insert("forward" + text_of(bucket_of(forward(rows))));
    texts.insert("dw" + text_of(bucket_of(weight_gradient(rows))));
  }
  EXPECT_EQ(texts.size(), 2 * 14u);
}

TEST(ProductBucket, EveryOtherDifferenceCounts) {
  const ProductBucket base = bucket_of(forward(300));
  EXPECT_EQ(base, bucket_of(forward(256)));
  EXPECT_NE(base, bucket_of(forward(255)));
  EXPECT_NE(base, bucket_of(forward(512)));
  EXPECT_NE(base, bucket_of(forward(300, memory + 2)));
  EXPECT_NE(base, bucket_of(forward(300, memory + 16)));
  EXPECT_EQ(bucket_of(forward(300, memory + 16)), bucket_of(forward(300, memory + 64)))
      << "slices of one tensor share a choice";
  const auto differs = [&](auto change) {
    Product p = forward(300);
    change(p);
    return !(bucket_of(p) == base);
  };
  EXPECT_TRUE(differs([](Product& p) { p.columns = 504; }));
  EXPECT_TRUE(differs([](Product& p) { p.inner = 248; }));
  EXPECT_TRUE(differs([](Product& p) { p.dtype = DType::f16; }));
  EXPECT_TRUE(differs([](Product& p) { p.bias = nullptr; }));
  EXPECT_TRUE(differs([](Product& p) { p.epilogue = Epilogue::none; }));
  EXPECT_TRUE(differs([](Product& p) { p.math.tf32 = true; }));
  EXPECT_TRUE(differs([](Product& p) { p.math.reduced_sums = true; }));
  EXPECT_TRUE(differs([](Product& p) { p.b.transposed = false; }));
  EXPECT_TRUE(differs([](Product& p) { p.a.stride = 257; }));
}

TEST(ProductBucket, WithoutTuningEverySizeIsItsOwn) {
  Product one = forward(300), other = forward(301);
  one.math.tune = other.math.tune = false;
  EXPECT_NE(bucket_of(one), bucket_of(other));
}

TEST(ProductBucket, OneRepresentativeForThreeOctaves) {
  const auto same = [](const Product& one, const Product& other) {
    return exact_key_of(representative_of(one)) == exact_key_of(representative_of(other));
  };
  EXPECT_TRUE(same(forward(64), forward(511)));
  EXPECT_FALSE(same(forward(511), forward(512)));
  EXPECT_TRUE(same(weight_gradient(512), weight_gradient(4095)));
  EXPECT_EQ(representative_of(forward(1)).rows, 3);
  EXPECT_EQ(representative_of(forward(300)).rows, 192);
  Product transposed = forward(64);  // x as columns: its stride spans the batch
  transposed.a = {memory, 64, true};
  EXPECT_GE(representative_of(transposed).a.stride, 192);
}

}  // namespace
}  // namespace fusewise::cuda
