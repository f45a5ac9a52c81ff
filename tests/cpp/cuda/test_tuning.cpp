// Measuring which of several ways is the fastest, on the GPU.

#include "cuda/gemm/tuning.h"

#include <array>

#include "fusewise/error.h"
#include "gpu.h"

namespace fusewise::testing {
namespace {

using Way = std::function<void(const Context&)>;

class CudaTuning : public NeedsGpu {
 protected:
  static constexpr std::size_t kBytes = std::size_t{1} << 26;

  void SetUp() override {
    NeedsGpu::SetUp();
    if (IsSkipped()) return;
    check(cudaMalloc(&memory_, kBytes));
    check(cudaStreamCreate(&stream_));
  }
  void TearDown() override {
    if (stream_ != nullptr) check(cudaStreamDestroy(stream_));
    if (memory_ != nullptr) check(cudaFree(memory_));
  }

  /// Writes so many bytes.
  Way writes(std::size_t bytes) const {
    return [this, bytes](const Context& context) {
      check(cudaMemsetAsync(memory_, 0, bytes, static_cast<cudaStream_t>(context.stream)));
    };
  }
  std::size_t fastest_of(std::span<const Way> ways) const {
    return cuda::fastest(on_gpu(stream_), {}, ways);
  }

 private:
  void* memory_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

void fails(const Context&) { throw Error("this way does not work"); }
void has_no_memory(const Context&) { throw OutOfMemory("there is no memory"); }

TEST_F(CudaTuning, TheFastestWayWins) {
  EXPECT_EQ(fastest_of(std::array{writes(kBytes), writes(64)}), 1U);
  EXPECT_EQ(fastest_of(std::array{writes(64), writes(kBytes)}), 0U);
}

TEST_F(CudaTuning, WaysThatFailAreLeftOut) {
  EXPECT_EQ(fastest_of(std::array{Way(fails), writes(kBytes)}), 1U);
  EXPECT_EQ(fastest_of(std::array{writes(kBytes), Way(fails)}), 0U);
  EXPECT_EQ(fastest_of(std::array{Way(fails), writes(kBytes), writes(64)}), 2U);
}

TEST_F(CudaTuning, OnlyIfAllFailItFails) {
  EXPECT_THROW(fastest_of(std::array{Way(fails), Way(fails)}), Error);
  EXPECT_THROW(fastest_of(std::array{writes(64), Way(has_no_memory)}), OutOfMemory);
}

}  // namespace
}  // namespace fusewise::testing
