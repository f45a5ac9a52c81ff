// The autoencoder on the GPU, every implementation against plain loops in float64. Tests named
// Short* are small enough for compute-sanitizer and reach every kernel between them.

#include <algorithm>
#include <cmath>
#include <memory>

#include "autoencoder_reference.h"
#include "gpu.h"

namespace fusewise::testing {
namespace {

constexpr AutoencoderSizes kDefault{64, 5, 32, 64};
constexpr AutoencoderSizes kOdd{7, 3, 5, 9};
// 'general' fuses LayerNorm and Linear for the first two, up to 128 columns.
constexpr AutoencoderSizes kOthers[] = {kOdd, {128, 2, 128, 33}, {130, 2, 12, 20}};

class CudaAutoencoder : public NeedsGpu {};

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

/// Entries of the two lists. One that is forced runs, or the call throws.
struct Names {
  const char* forward;
  const char* backward;
};

void run(AutoencoderCase& call, int output, const Names& names, bool tf32 = false) {
  const Context context = on_gpu();
  std::vector<std::unique_ptr<OnGpu>> held;
  const auto move = [&](Tensor& tensor, TensorView& view) {
    if (!view.defined()) return;
    held.push_back(std::make_unique<OnGpu>(tensor));
    view = held.back()->view();
  };
  AutoencoderForward forward = call.forward(output);
  AutoencoderBackward backward = call.backward(output);
  forward.implementation = names.forward;
  backward.implementation = names.backward;
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

void expect_right(AutoencoderCase& call, int output, const Names& names) {
  SCOPED_TRACE(std::string(names.forward) + ", " + names.backward + ", output " +
               std::to_string(output));
  const AutoencoderReference expected = autoencoder_reference(call, output);
  run(call, output, names);
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

// The kernels that multiply float32 exactly, each at least once.
constexpr Names kDefaultNames[] = {{"few_rows", "block16"},
                                   {"many_rows", "warps"},
                                   {"block16", "general"},
                                   {"any_size", "block16"},
                                   {"general", "block16"}};
constexpr Names kGeneral{"general", "general"}, kAnySize{"any_size", "general"};

TEST_F(CudaAutoencoder, ShortFloat32InEveryImplementation) {
  for (int output = 0; output < 3; ++output) {
    for (const Names& names : kDefaultNames) {
      AutoencoderCase call = make_autoencoder(37, kDefault, DType::f32, DType::f32);
      expect_right(call, output, names);
    }
    for (const AutoencoderSizes& sizes : kOthers) {
      SCOPED_TRACE(std::to_string(sizes.n_mels) + " mels");
      for (const Names& names : {kGeneral, kAnySize}) {
        AutoencoderCase call = make_autoencoder(37, sizes, DType::f32, DType::f32);
        expect_right(call, output, names);
      }
    }
  }
}

/// In TF32, which is within a few hundredths here; the Python tests hold it to its own bound.
TEST_F(CudaAutoencoder, ShortWarpgroups) {
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  if (major != 9) GTEST_SKIP() << "needs Hopper";
  for (const int output : {0, 2}) {
    AutoencoderCase call = make_autoencoder(150, kDefault, DType::f32, DType::f32);
    const AutoencoderReference expected = autoencoder_reference(call, output);
    run(call, output, {"block16", "wgmma"}, true);
    const auto expect_roughly = [](const Tensor& got, const std::vector<double>& right) {
      double largest = 0, error = 0;
      for (std::size_t i = 0; i < right.size(); ++i) {
        largest = std::max(largest, std::fabs(right[i]));
        const double off = std::fabs(got.get(static_cast<Index>(i)) - right[i]);
        error = std::isnan(off) ? INFINITY : std::max(error, off);
      }
      EXPECT_LE(error, 0.05 * largest);
    };
    expect_roughly(call.dx, expected.dx);
    for (std::size_t i = 0; i < call.gradients.size(); ++i) {
      SCOPED_TRACE(kAutoencoderWeights[i].name);
      expect_roughly(call.gradients[i], expected.gradients[i]);
    }
  }
}

TEST_F(CudaAutoencoder, ShortFloat64) {
  for (int output = 0; output < 3; ++output) {
    AutoencoderCase call = make_autoencoder(21, kOdd, DType::f64, DType::f64);
    expect_right(call, output, kGeneral);
  }
}

TEST_F(CudaAutoencoder, ShortLayouts) {
  for (const RowLayout layout : kRowLayouts) {
    SCOPED_TRACE("layout " + std::to_string(static_cast<int>(layout)));
    for (const Names& names : {kGeneral, kAnySize}) {
      AutoencoderCase call = make_autoencoder(19, kOdd, DType::f32, DType::f32, layout);
      expect_right(call, 0, names);
    }
  }
}

TEST_F(CudaAutoencoder, NoRows) {
  for (int output = 0; output < 3; ++output) {
    for (const Names& names : kDefaultNames) {
      AutoencoderCase call = make_autoencoder(0, kDefault, DType::f32, DType::f32);
      expect_right(call, output, names);
    }
    AutoencoderCase call = make_autoencoder(0, kOdd, DType::f32, DType::f32);
    expect_right(call, output, kGeneral);
  }
}

/// The number of rows decides on how many of them a block of few_rows and any_size has, and on
/// block16's warps.
TEST_F(CudaAutoencoder, SomeHundredRows) {
  for (int rows : {1, 200, 500, 2200}) {
    for (const char* forward : {"few_rows", "block16", "any_size"}) {
      for (int output = 0; output < 3; ++output) {
        SCOPED_TRACE(std::to_string(rows) + " rows");
        AutoencoderCase call = make_autoencoder(rows, kDefault, DType::f32, DType::f32);
        expect_right(call, output, {forward, "block16"});
      }
    }
  }
}

TEST_F(CudaAutoencoder, ManyRows) {
  AutoencoderCase call = make_autoencoder(5000, kDefault, DType::f32, DType::f32);
  expect_right(call, 0, {"many_rows", "block16"});
}

}  // namespace
}  // namespace fusewise::testing
