#include "cuda/gemm/product.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "common/check.h"
#include "common/scratch.h"
#include "cuda/cuda_error.h"
#include "cuda/gemm/algorithm_choice.h"
#include "cuda/gemm/alignment.h"
#include "cuda/gemm/padding.h"

namespace fusewise::cuda {

struct PreparedProduct::State {
  /// As cuBLASLt takes it: no sum is empty, bias and half operands are aligned, d is not
  /// transposed.
  Product p;
  std::optional<Scratch<char>> zeros, bias, padding, workspace;
  std::optional<PaddedProduct> copies;
  std::optional<Description> description;
  Algorithm algorithm{};

  State(const Context& context, const Product& product) : p(product) {
    check(!p.add || (p.bias == nullptr && p.epilogue == Epilogue::none && !p.math.tune),
          "a product that adds has no bias, no epilogue and no tuning");
    check(!p.wide_result || (p.epilogue == Epilogue::none && !p.math.tune),
          "a product with a wide result has no epilogue and no tuning");
    const auto stream = static_cast<cudaStream_t>(context.stream);
    const std::int64_t size = size_of(p.wide_result ? DType::f32 : p.dtype);
    if (p.inner == 0) {  // an empty sum: a product of zeros
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
      if (p.batch != BatchSize::inner) {
        p.batch = p.batch == BatchSize::rows ? BatchSize::columns : BatchSize::rows;
      }
      for (Matrix* matrix : {&p.a, &p.b, &p.d}) matrix->transposed = !matrix->transposed;
    }
    copies = padded(p);
    if (copies) {
      padding.emplace(context, copies->bytes);
      copies->place(padding->data());
      p = copies->product;
    } else if (!is_aligned(p.bias)) {
      bias.emplace(context, p.columns * size);
      check_cuda(
          cudaMemcpyAsync(bias->data(), p.bias, p.columns * size, cudaMemcpyDeviceToDevice, stream),
          "copying a bias");
      p.bias = bias->data();
    }
    description.emplace(p);
    algorithm = algorithm_for(context, p, *description);
    workspace.emplace(context, static_cast<std::int64_t>(algorithm.workspace));
  }
};

PreparedProduct::PreparedProduct(const Context& context, const Product& product) {
  if (product.rows > 0 && product.columns > 0) state_ = std::make_unique<State>(context, product);
}

PreparedProduct::~PreparedProduct() = default;

void PreparedProduct::run(const Context& context) const {
  if (state_ == nullptr) return;
  if (state_->copies) run_copies(context, state_->copies->inputs.data(), kMostCopies);
  run_algorithm(context, state_->p, *state_->description, state_->algorithm,
                state_->workspace->data());
  if (state_->copies) run_copies(context, &state_->copies->result, 1);
}

bool PreparedProduct::keeps_nan() const { return state_ == nullptr || state_->algorithm.keeps_nan; }

void multiply(const Context& context, const Product& product) {
  PreparedProduct(context, product).run(context);
}

}  // namespace fusewise::cuda
