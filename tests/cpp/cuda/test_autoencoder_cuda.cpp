// The autoencoder on the GPU, every implementation against plain loops in float64. Tests named
// Short* are small enough for compute-sanitizer and reach every kernel between them.

#include <cuda_runtime.h>

#include <memory>
#include <stdexcept>

#include "autoencoder_reference.h"

namespace fusewise::testing {
namespace {

constexpr Device kGpu{DeviceType::cuda, 0};
constexpr AutoencoderSizes kDefault{64, 5, 32, 64};
constexpr AutoencoderSizes kOdd{7, 3, 5, 9};

class CudaAutoencoder : public ::testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) GTEST_SKIP() << "there is no GPU";
  }
};

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

/// A tensor's memory on the GPU, brought back at its end.
class OnGpu {
 public:
  explicit OnGpu(Tensor& tensor) : tensor_(tensor) {
    check(cudaMalloc(&memory_, tensor.memory().size()));
    check(cudaMemcpy(memory_, tensor.memory().data(), tensor.memory().size(),
                     cudaMemcpyHostToDevice));
  }
  ~OnGpu() {
    cudaMemcpy(tensor_.memory().data(), memory_, tensor_.memory().size(), cudaMemcpyDeviceToHost);
    cudaFree(memory_);
  }
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;

  TensorView view() const {
    TensorView view = tensor_.view();
    const auto offset = static_cast<std::uint8_t*>(view.data) - tensor_.memory().data();
    view.data = static_cast<std::uint8_t*>(memory_) + offset;
    view.device = kGpu;
    return view;
  }

 private:
  Tensor& tensor_;
  void* memory_ = nullptr;
};

void run(AutoencoderCase& call, int output, std::string_view implementation, bool tf32 = false) {
  Context context;
  context.device = kGpu;
  std::vector<std::unique_ptr<OnGpu>> held;
  const auto move = [&](Tensor& tensor, TensorView& view) {
    if (!view.defined()) return;
    held.push_back(std::make_unique<OnGpu>(tensor));
    view = held.back()->view();
  };
  AutoencoderForward forward = call.forward(output);
  AutoencoderBackward backward = call.backward(output);
  forward.implementation = backward.implementation = implementation;
  forward.tf32 = backward.tf32 = tf32;
  move(call.x, forward.x);
  move(call.y, forward.y);
  move(call.latent, forward.latent);
  move(call.score, forward.score);
  move(call.projection, forward.projection);
  for (std::size_t i = 0; i < call.weights.size(); ++i) {
    move(call.weights[i], forward.weights.*kAutoencoderWeights[i].weight);
    move(call.gradients[i], backward.gradients.*kAutoencoderWeights[i].weight);
  }
  backward.x = forward.x;
  backward.weights = forward.weights;
  backward.projection = forward.projection;
  move(call.dy, backward.dy);
  move(call.dlatent, backward.dlatent);
  move(call.dscore, backward.dscore);
  move(call.dx, backward.dx);
  autoencoder(context, forward);
  autoencoder(context, backward);
  check(cudaDeviceSynchronize());
}

void expect_right(AutoencoderCase& call, int output, std::string_view implementation) {
  const AutoencoderReference expected = autoencoder_reference(call, output);
  run(call, output, implementation);
  if (output == 0) {
    EXPECT_TRUE(near(call.y, expected.y)) << "y";
  }
  if (output == 1) {
    EXPECT_TRUE(near(call.latent, expected.latent)) << "latent";
  }
  if (output == 2) {
    EXPECT_TRUE(near(call.score, expected.score)) << "score";
  }
  EXPECT_TRUE(near(call.dx, expected.dx)) << "dx";
  for (std::size_t i = 0; i < call.gradients.size(); ++i) {
    EXPECT_TRUE(near(call.gradients[i], expected.gradients[i])) << kAutoencoderWeights[i].name;
  }
}

TEST_F(CudaAutoencoder, ShortFloat32InEveryImplementation) {
  for (const char* implementation : {"fused", "general"}) {
    for (const AutoencoderSizes& size : {kDefault, kOdd}) {
      for (int output = 0; output < 3; ++output) {
        SCOPED_TRACE(std::string(implementation) + ", output " + std::to_string(output));
        AutoencoderCase call = make_autoencoder(37, size, DType::f32, DType::f32);
        expect_right(call, output, implementation);
      }
    }
  }
}

TEST_F(CudaAutoencoder, ShortFloat64) {
  for (int output = 0; output < 3; ++output) {
    AutoencoderCase call = make_autoencoder(21, kOdd, DType::f64, DType::f64);
    expect_right(call, output, "general");
  }
}

TEST_F(CudaAutoencoder, ShortLayouts) {
  for (const char* implementation : {"fused", "general"}) {
    for (const RowLayout layout : kRowLayouts) {
      SCOPED_TRACE(std::string(implementation) + ", layout " +
                   std::to_string(static_cast<int>(layout)));
      AutoencoderCase call = make_autoencoder(19, kOdd, DType::f32, DType::f32, layout);
      expect_right(call, 0, implementation);
    }
  }
}

TEST_F(CudaAutoencoder, NoRows) {
  for (const char* implementation : {"fused", "general"}) {
    for (int output = 0; output < 3; ++output) {
      AutoencoderCase call = make_autoencoder(0, kOdd, DType::f32, DType::f32);
      expect_right(call, output, implementation);
    }
  }
}

/// How many rows there are decides on the kernel, and on how many of them a block has.
TEST_F(CudaAutoencoder, SomeHundredRows) {
  for (int rows : {1, 200, 500, 700}) {
    for (int output = 0; output < 3; ++output) {
      SCOPED_TRACE(std::to_string(rows) + " rows, output " + std::to_string(output));
      AutoencoderCase call = make_autoencoder(rows, kDefault, DType::f32, DType::f32);
      expect_right(call, output, "fused");
    }
  }
}

TEST_F(CudaAutoencoder, ManyRows) {
  AutoencoderCase call = make_autoencoder(5000, kDefault, DType::f32, DType::f32);
  expect_right(call, 0, "fused");
}

}  // namespace
}  // namespace fusewise::testing
