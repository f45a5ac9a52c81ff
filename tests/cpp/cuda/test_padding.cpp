// The plan by which unaligned half GEMMs run on padded copies, tried on the CPU: elements are whole
// numbers modulo 2^16 there, so that every result is exact.

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "cuda/gemm/padding.h"

namespace fusewise::cuda {
namespace {

using Element = std::uint16_t;

/// Memory that starts some elements behind a multiple of 256 bytes.
class Memory {
 public:
  Memory(std::int64_t count, std::int64_t offset, std::mt19937& random)
      : all_(count + offset + 128) {
    for (Element& each : all_) each = static_cast<Element>(random());
    auto address = reinterpret_cast<std::uintptr_t>(all_.data());
    data_ = all_.data() + (256 - address % 256) % 256 / sizeof(Element) + offset;
  }
  Element* data() { return data_; }

 private:
  std::vector<Element> all_;
  Element* data_;
};

Element& at(const Matrix& m, std::int64_t row, std::int64_t column) {
  if (m.transposed) std::swap(row, column);
  return static_cast<Element*>(m.data)[row * m.stride + column];
}

void run_on_host(const Copy& copy) {
  for (std::int64_t r = 0; copy.rows > 0 && r < copy.to_rows; ++r) {
    for (std::int64_t c = 0; c < copy.to_columns; ++c) {
      const bool inside = r < copy.rows && c < copy.columns;
      static_cast<Element*>(copy.to)[r * copy.to_stride + c] =
          inside ? static_cast<const Element*>(copy.from)[r * copy.from_stride + c] : Element{0};
    }
  }
}

void multiply_on_host(const Product& p) {
  for (std::int64_t r = 0; r < p.rows; ++r) {
    for (std::int64_t c = 0; c < p.columns; ++c) {
      Element sum = p.add ? at(p.d, r, c) : Element{0};
      if (p.bias != nullptr)
        sum = static_cast<Element>(sum + static_cast<const Element*>(p.bias)[c]);
      for (std::int64_t k = 0; k < p.inner; ++k) {
        sum = static_cast<Element>(sum + at(p.a, r, k) * at(p.b, k, c));
      }
      at(p.d, r, c) = sum;
    }
  }
}

bool suits_vectors(const Matrix& m, std::int64_t rows, std::int64_t columns) {
  return reinterpret_cast<std::uintptr_t>(m.data) % 16 == 0 && m.stride % 8 == 0 &&
         (m.transposed ? rows : columns) % 8 == 0;
}

struct Sizes {
  std::int64_t rows, columns, inner;
};

void check(Sizes sizes, bool a_transposed, bool b_transposed, std::int64_t slack,
           std::int64_t offset) {
  SCOPED_TRACE(::testing::Message() << sizes.rows << " x " << sizes.columns << " x " << sizes.inner
                                    << (a_transposed ? " a^T" : "") << (b_transposed ? " b^T" : "")
                                    << " slack " << slack << " offset " << offset);
  std::mt19937 random(1);
  const auto matrix = [&](std::int64_t rows, std::int64_t columns, bool transposed) {
    if (transposed) std::swap(rows, columns);
    return std::pair(Memory(rows * (columns + slack), offset, random), columns + slack);
  };
  auto [a, a_stride] = matrix(sizes.rows, sizes.inner, a_transposed);
  auto [b, b_stride] = matrix(sizes.inner, sizes.columns, b_transposed);
  auto [d, d_stride] = matrix(sizes.rows, sizes.columns, false);
  auto [right, right_stride] = matrix(sizes.rows, sizes.columns, false);
  Memory bias(sizes.columns, offset, random);

  Product p{};
  p.rows = sizes.rows;
  p.columns = sizes.columns;
  p.inner = sizes.inner;
  p.a = {a.data(), a_stride, a_transposed};
  p.b = {b.data(), b_stride, b_transposed};
  p.d = {d.data(), d_stride, false};
  p.dtype = DType::bf16;
  p.bias = bias.data();

  auto plan = padded(p);
  const auto expect_right = [&] {
    Product reference = p;
    reference.d = {right.data(), right_stride, false};
    multiply_on_host(reference);
    for (std::int64_t r = 0; r < p.rows; ++r) {
      for (std::int64_t c = 0; c < p.columns; ++c) {
        ASSERT_EQ(d.data()[r * d_stride + c], right.data()[r * right_stride + c]) << r << ", " << c;
      }
    }
  };
  CopiedProduct plain = as_is(p);
  Memory aligned_bias(plain.bytes / 2, 0, random);
  if (plain.bytes > 0) plain.place(aligned_bias.data());
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(plain.product.bias) % 16, 0u);
  for (const Copy& copy : plain.inputs) run_on_host(copy);
  multiply_on_host(plain.product);
  expect_right();

  if (!plan) {
    EXPECT_TRUE(suits_vectors(p.a, p.rows, p.inner));
    EXPECT_TRUE(suits_vectors(p.b, p.inner, p.columns));
    EXPECT_TRUE(suits_vectors(p.d, p.rows, p.columns));
    return;
  }
  Memory scratch(plan->bytes / static_cast<std::int64_t>(sizeof(Element)), 0, random);
  plan->place(scratch.data());
  const Product& q = plan->product;
  EXPECT_TRUE(suits_vectors(q.a, q.rows, q.inner));
  EXPECT_TRUE(suits_vectors(q.b, q.inner, q.columns));
  EXPECT_TRUE(suits_vectors(q.d, q.rows, q.columns));
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(q.bias) % 16, 0u);
  for (const Copy& copy : plan->inputs) run_on_host(copy);
  multiply_on_host(q);
  run_on_host(plan->result);

  expect_right();
}

TEST(Padding, TheProductIsTheSame) {
  for (const Sizes sizes : {Sizes{5, 3, 7},
                            {8, 16, 24},
                            {16, 9, 8},
                            {9, 16, 8},
                            {8, 8, 13},
                            {1, 1, 1},
                            {1, 8, 3},
                            {17, 1, 8}}) {
    for (const bool a : {false, true}) {
      for (const bool b : {false, true}) {
        for (const std::int64_t slack : {0, 1, 8}) {
          for (const std::int64_t offset : {0, 1, 8}) check(sizes, a, b, slack, offset);
        }
      }
    }
  }
}

Product product_of(std::int64_t rows, std::int64_t columns, std::int64_t inner, DType dtype) {
  alignas(256) static char memory[256];
  Product p{};
  p.rows = rows;
  p.columns = columns;
  p.inner = inner;
  p.a = {memory, inner, false};
  p.b = {memory, inner, true};
  p.d = {memory, columns, false};
  p.dtype = dtype;
  return p;
}

TEST(Padding, OnlyUnalignedHalfOperands) {
  EXPECT_FALSE(padded(product_of(5000, 1000, 1000, DType::bf16))) << "aligned";
  EXPECT_TRUE(padded(product_of(5000, 1001, 999, DType::f16)));
  EXPECT_TRUE(padded(product_of(5000, 1000, 999, DType::bf16)));
  EXPECT_FALSE(padded(product_of(5000, 1001, 999, DType::f32)));
  EXPECT_FALSE(padded(product_of(5000, 1001, 999, DType::f64)));
  Product wide = product_of(5000, 1001, 999, DType::f16);
  wide.wide_result = true;
  EXPECT_FALSE(padded(wide));
}

TEST(Padding, ShouldPayWhereTheProductIsLarge) {
  const auto should = [](const Product& p) { return padding_should_pay(p, *padded(p)); };
  EXPECT_TRUE(should(product_of(5000, 1001, 999, DType::f16)));
  EXPECT_TRUE(should(product_of(256, 4097, 4095, DType::f16)));
  EXPECT_FALSE(should(product_of(65536, 65, 63, DType::f16))) << "copies cost more than they save";
  EXPECT_FALSE(should(product_of(512, 100, 100, DType::f16)));
}

}  // namespace
}  // namespace fusewise::cuda
