#pragma once

// What the tests of every family on a GPU share.

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "fusewise/context.h"
#include "reference.h"

namespace fusewise::testing {

inline constexpr Device kGpu{DeviceType::cuda, 0};

class NeedsGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) GTEST_SKIP() << "there is no GPU";
  }
};

inline void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

inline Context on_gpu(cudaStream_t stream = nullptr) {
  Context context;
  context.device = kGpu;
  context.stream = stream;
  return context;
}

/// Copies of every tensor of a call on the GPU, guards included. `Host` is the struct that holds
/// the tensors on the CPU; `all` lists its tensors. Outputs are poisoned first.
template <typename Host>
class TensorsOnGpu {
 public:
  using Members = std::vector<Tensor Host::*>;

  TensorsOnGpu(Host& host, const Members& all, const Members& outputs) : host_(host), all_(all) {
    for (const auto member : outputs) {
      if ((host.*member).defined()) (host.*member).poison();
    }
    for (const auto member : all_) {
      const std::vector<std::uint8_t>& bytes = (host.*member).memory();
      void* memory = nullptr;
      if (!bytes.empty()) {
        check(cudaMalloc(&memory, bytes.size()));
        check(cudaMemcpy(memory, bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
      }
      memory_.emplace_back(memory);
    }
    check(cudaDeviceSynchronize());
  }

  TensorView view(Tensor Host::* member) const {
    TensorView view = (host_.*member).view();
    move(view);
    return view;
  }

  /// Waits for the GPU and copies all tensors back. Only the outputs may have changed.
  void fetch(const Members& outputs) {
    check(cudaDeviceSynchronize());
    for (std::size_t i = 0; i < all_.size(); ++i) {
      std::vector<std::uint8_t>& bytes = (host_.*all_[i]).memory();
      if (bytes.empty()) continue;
      std::vector<std::uint8_t> now(bytes.size());
      check(cudaMemcpy(now.data(), memory_[i].get(), now.size(), cudaMemcpyDeviceToHost));
      if (std::find(outputs.begin(), outputs.end(), all_[i]) == outputs.end()) {
        EXPECT_TRUE(now == bytes) << "tensor " << i << " is no output, and was written to";
      }
      bytes = std::move(now);
    }
  }

 protected:
  /// Points a view of one of the host's tensors to the copy on the GPU.
  void move(TensorView& view) const {
    if (!view.defined()) return;
    for (std::size_t i = 0; i < all_.size(); ++i) {
      const Tensor& tensor = host_.*all_[i];
      if (!tensor.defined() || tensor.view().data != view.data) continue;
      const auto offset = static_cast<const std::uint8_t*>(view.data) - tensor.memory().data();
      view.data = static_cast<std::uint8_t*>(memory_[i].get()) + offset;
      view.device = kGpu;
      return;
    }
    throw std::logic_error("a tensor without a copy on the GPU");
  }

  Host& host_;

 private:
  struct Free {
    void operator()(void* memory) const { static_cast<void>(cudaFree(memory)); }
  };
  Members all_;
  std::vector<std::unique_ptr<void, Free>> memory_;
};

}  // namespace fusewise::testing
