// Squeeze-and-Excitation on the GPU: every type, layout, size and choice of a call, reruns and
// streams.

#include "squeeze_excite_gpu.h"

namespace fusewise::testing {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

// Every type, layout and size. -------------------------------------------------------------------

TEST_F(CudaSqueezeExcite, EveryTypeAndLayout) {
  for (const Types types : kTypes) {
    for (const Layout layout : kLayouts) {
      for (const Layout other : kLayouts) {
        for (const Index channels : {19, 24}) {
          const Sizes sizes{3, channels, 5, 5, 7};
          SCOPED_TRACE(case_name(sizes, types, layout, other));
          expect_both(make_squeeze_excite(sizes, types.data, types.weights, layout, other));
        }
      }
    }
  }
}

TEST_F(CudaSqueezeExcite, EverySize) {
  const Sizes all[] = {
      {1, 1, 1, 1, 1},      {2, 65, 3, 1, 1},   {3, 3, 1, 9, 11},   {1, 1, 4, 40, 33},
      {2, 48, 12, 19, 19},  {9, 65, 17, 7, 7},  {5, 130, 33, 3, 2}, {2, 24, 6, 31, 30},
      {1, 304, 20, 12, 12}, {17, 16, 4, 4, 4},  {2, 600, 70, 1, 9}, {3, 257, 64, 8, 1},
      {1, 96, 4, 64, 65},   {3, 40, 2, 61, 47}, {2, 64, 16, 1, 1},  {4, 8, 3, 2, 1},
  };
  for (const Types types : kTypes) {
    for (const Sizes& sizes : all) {
      for (const Layout layout : {Layout::nchw, Layout::channels_last}) {
        expect_case(sizes, types, layout);
      }
    }
  }
}

struct Block {
  Index c, r, side;
};
constexpr Block kEfficientNetB4[] = {{48, 12, 190}, {24, 6, 190},  {144, 6, 95},   {192, 8, 95},
                                     {192, 8, 48},  {336, 14, 48}, {336, 14, 24},  {672, 28, 24},
                                     {960, 40, 24}, {960, 40, 12}, {1632, 68, 12}, {2688, 112, 12}};

TEST_F(CudaSqueezeExcite, EfficientNetB4) {
  const cuda::DeviceLimits& limits = cuda::limits_of(kGpu);
  const bool large = limits.multiprocessors >= 132 && limits.block_shared_memory >= 232448;
  for (const Block& block : kEfficientNetB4) {
    const Names ran = expect_case({2, block.c, block.r, block.side, block.side},
                                  {DType::f16, DType::f16}, Layout::channels_last);
    if (has_clusters() && large) {
      EXPECT_TRUE(ran.contains("forward cluster"));
      EXPECT_TRUE(ran.contains("backward cluster"));
    }
  }
}

TEST_F(CudaSqueezeExcite, EfficientNetB4Planar) {
  for (const Block& block : kEfficientNetB4) {
    if (block.side > 24) continue;
    expect_case({2, block.c, block.r, block.side, block.side}, {DType::bf16, DType::f32},
                Layout::nchw);
  }
}

TEST_F(CudaSqueezeExcite, EveryWidthOfTheHiddenLayer) {
  for (const Index hidden : {1, 2, 7, 31, 33, 255, 256, 257, 300, 1001}) {
    for (const Types types : kShortTypes) {
      for (const Layout layout : {Layout::nchw, Layout::channels_last}) {
        expect_case({3, 64, hidden, 5, 5}, types, layout);
      }
    }
  }
}

TEST_F(CudaSqueezeExcite, ManyChannels) {
  for (const Types types : kTypes) {
    for (const Layout layout : {Layout::nchw, Layout::channels_last}) {
      expect_case({3, 4096, 33, 1, 1}, types, layout);
      expect_case({2, 4096, 16, 2, 3}, types, layout);
      expect_case({2, 4099, 5, 1, 1}, types, layout);
    }
  }
}

TEST_F(CudaSqueezeExcite, ManySamples) {
  for (const Types types : kShortTypes) {
    for (const Layout layout : {Layout::nchw, Layout::channels_last}) {
      EXPECT_EQ(expect_case({300, 64, 4, 4, 6}, types, layout), all_names(types, layout));
    }
  }
}

TEST_F(CudaSqueezeExcite, EmptyBatch) {
  for (const Types types : kTypes) {
    for (const Layout layout : {Layout::nchw, Layout::channels_last, Layout::transposed}) {
      expect_case({0, 24, 5, 6, 7}, types, layout);  // sums over nothing are zero
    }
  }
}

// Every choice that a call has. ------------------------------------------------------------------

TEST_F(CudaSqueezeExcite, EveryFunction) {
  for (const Activation activation : kSqueezeExciteActivations) {
    for (const Gate gate : {Gate::sigmoid, Gate::hardsigmoid}) {
      for (const DType dtype : {DType::f32, DType::f64, DType::bf16}) {
        for (const Layout layout : {Layout::nchw, Layout::channels_last}) {
          SqueezeExcite call = make({4, 24, 6, 4, 5}, dtype, layout);
          call.activation = activation;
          call.gate = gate;
          call.b1.fill(8, 4);  // far enough for hardswish to reach both ends
          call.b2.fill(7, 4);  // and for hardsigmoid
          expect_both(call);
        }
      }
    }
  }
}

TEST_F(CudaSqueezeExcite, HardswishAtItsKinks) {
  const double all[] = {-3, 3, std::nextafter(-3.f, -4.f), std::nextafter(3.f, 2.f), kInf, kNaN};
  for (const DType dtype : {DType::f32, DType::f64, DType::f16}) {
    for (const Layout layout : {Layout::nchw, Layout::channels_last}) {
      SqueezeExcite call = make({2, 24, 6, 4, 5}, dtype, layout);
      call.activation = Activation::hardswish;
      call.gate = Gate::hardsigmoid;
      call.dw2 = {};  // a sum of what is infinite and NaN
      ForwardReference saved = forward_reference(call);
      for (Index i = 0; i < call.hidden.numel(); ++i) saved.hidden[i] = {all[i % 6], 0};
      expect_backwards(call, saved);
    }
  }
}

TEST_F(CudaSqueezeExcite, WithoutBiases) {
  for (const Layout layout : {Layout::nchw, Layout::channels_last}) {
    for (const int absent : {1, 2, 3}) {
      SCOPED_TRACE(absent);
      SqueezeExcite call = make({2, 24, 5, 6, 6}, DType::f16, layout);
      if (absent & 1) call.b1 = {};
      if (absent & 2) call.b2 = {};
      expect_forwards(call, forward_reference(call));
    }
  }
}

TEST_F(CudaSqueezeExcite, WithoutSavedTensors) {
  for (const Layout layout : {Layout::nchw, Layout::channels_last, Layout::sliced}) {
    for (const DType dtype : {DType::f32, DType::f16}) {
      SqueezeExcite call = make({5, 24, 5, 6, 6}, dtype, layout);
      call.pooled = call.hidden = call.gates = {};
      expect_forwards(call, forward_reference(call));
    }
  }
}

TEST_F(CudaSqueezeExcite, ConvolutionWeights) {
  SqueezeExcite call = make({2, 20, 5, 6, 6});
  call.w1 = Tensor(DType::f32, {5, 20, 1, 1}).fill(3, 0.2);
  call.w2 = Tensor(DType::f32, {20, 5, 1, 1}).fill(5, 0.4);
  call.dw1 = Tensor(DType::f32, {5, 20, 1, 1});
  call.dw2 = Tensor(DType::f32, {20, 5, 1, 1});
  EXPECT_EQ(expect_both(call), all_names({DType::f32, DType::f32}, Layout::nchw));
}

TEST_F(CudaSqueezeExcite, EveryChoiceOfGradients) {
  for (const Layout layout : {Layout::nchw, Layout::channels_last, Layout::transposed}) {
    for (const DType dtype : {DType::f32, DType::f16}) {
      for (int absent = 0; absent < 32; ++absent) {
        SCOPED_TRACE(absent);
        SqueezeExcite call = make({4, 24, 5, 6, 7}, dtype, layout);
        if (absent & 1) call.dx = {};
        if (absent & 2) call.dw1 = {};
        if (absent & 4) call.db1 = {};
        if (absent & 8) call.dw2 = {};
        if (absent & 16) call.db2 = {};
        expect_backwards(call, forward_reference(call));
      }
    }
  }
}

TEST_F(CudaSqueezeExcite, ExpandedGradient) {
  for (const Layout layout : {Layout::nchw, Layout::channels_last}) {
    SqueezeExcite call = make({3, 24, 5, 6, 7}, DType::f32, layout);
    call.dy = Tensor(DType::f32, {3, 24, 6, 7}, {0, 0, 0, 0}).fill(2);
    expect_backwards(call, forward_reference(call));
    call.dy = Tensor(DType::f32, {3, 24, 6, 7}, {24, 1, 0, 0}).fill(2);
    expect_backwards(call, forward_reference(call));
  }
}

TEST_F(CudaSqueezeExcite, NaNAndInfinityPropagate) {
  for (const Layout layout : {Layout::nchw, Layout::channels_last}) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f64}) {
      for (const double bad : {kNaN, kInf, -kInf}) {
        SCOPED_TRACE(bad);
        SqueezeExcite call = make({3, 24, 5, 5, 7}, dtype, layout);
        call.x.set(1000, bad);  // in the second sample
        expect_both(call);
        SqueezeExcite gradient = make({3, 24, 5, 5, 7}, dtype, layout);
        gradient.dy.set(1000, bad);
        expect_backwards(gradient, forward_reference(gradient));
      }
    }
  }
}

TEST_F(CudaSqueezeExcite, ANaNOfAllOnes) {
  // What one block tells another may be any float.
  for (const Layout layout : {Layout::nchw, Layout::channels_last}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      SqueezeExcite call = make({3, 16, 4, 4, 5}, dtype, layout);
      call.x.poison();
      expect_both(call);
    }
  }
}

// Reruns and streams. ----------------------------------------------------------------------------

/// Every byte of the outputs.
std::vector<std::uint8_t> bytes_of(const SqueezeExcite& call, const Tensors& outputs) {
  std::vector<std::uint8_t> bytes;
  for (const auto member : outputs) {
    const std::vector<std::uint8_t>& memory = (call.*member).memory();
    bytes.insert(bytes.end(), memory.begin(), memory.end());
  }
  return bytes;
}

std::vector<std::uint8_t> forward_bytes(SqueezeExcite call, const char* name) {
  OnGpu gpu(call, kForwardOutputs);
  forced(name)(on_gpu(), gpu.forward());
  gpu.fetch(kForwardOutputs);
  return bytes_of(call, kForwardOutputs);
}

std::vector<std::uint8_t> backward_bytes(SqueezeExcite call, const char* name) {
  OnGpu gpu(call, kBackwardOutputs);
  forced(name)(on_gpu(), gpu.backward());
  gpu.fetch(kBackwardOutputs);
  return bytes_of(call, kBackwardOutputs);
}

TEST_F(CudaSqueezeExcite, TheSameBitsAgain) {
  const Sizes all[] = {{1, 72, 9, 40, 41},  {3, 96, 8, 33, 31},   {9, 40, 6, 12, 12},
                       {5, 336, 100, 9, 9}, {2, 1000, 250, 7, 7}, {7, 8, 2, 90, 91},
                       {150, 64, 16, 8, 8}, {5, 672, 28, 24, 24}, {2, 3, 2, 5, 7},
                       {65, 480, 120, 7, 7}};
  for (const Sizes& sizes : all) {
    for (const Layout layout : {Layout::nchw, Layout::channels_last, Layout::sliced}) {
      const Types types{DType::f16, DType::f16};
      SCOPED_TRACE(case_name(sizes, types, layout, layout));
      SqueezeExcite call = make(sizes, types.data, layout);
      for (const char* name : kNames) {
        if (!takes(name, OnGpu(call, {}).forward())) continue;
        const auto once = forward_bytes(call, name);
        for (int i = 0; i < 3; ++i) EXPECT_TRUE(forward_bytes(call, name) == once) << name;
      }
      // Backward compares its own runs alone, so any saved tensors do.
      call.pooled.fill(8);
      call.hidden.fill(9);
      call.gates.fill(10, 0.3);
      for (const char* name : kNames) {
        if (!takes(name, OnGpu(call, {}).backward())) continue;
        const auto once = backward_bytes(call, name);
        for (int i = 0; i < 3; ++i) EXPECT_TRUE(backward_bytes(call, name) == once) << name;
      }
    }
  }
}

class Stream {
 public:
  Stream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Stream() { static_cast<void>(cudaStreamDestroy(stream_)); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

/// Backward reads what forward has just written, and nothing waits in between.
TEST_F(CudaSqueezeExcite, ShortForwardThenBackward) {
  for (const Layout layout : {Layout::nchw, Layout::channels_last}) {
    for (const char* name : kNames) {
      SCOPED_TRACE(name);
      SqueezeExcite call = make({5, 40, 6, 6, 8}, DType::f16, layout);
      Tensors outputs = kForwardOutputs;
      outputs.insert(outputs.end(), kBackwardOutputs.begin(), kBackwardOutputs.end());
      OnGpu gpu(call, outputs);
      if (!takes(name, gpu.forward()) || !takes(name, gpu.backward())) continue;
      for (int repeat = 0; repeat < 3; ++repeat) {
        forced(name)(on_gpu(), gpu.forward());
        forced(name)(on_gpu(), gpu.backward());
      }
      gpu.fetch(outputs);
      const BackwardReference expected = backward_reference(call);
      expect_close(call.dx, expected.dx, "dx");
      expect_close(call.dw1, expected.dw1, "dw1");
      expect_close(call.db1, expected.db1, "db1");
      expect_close(call.dw2, expected.dw2, "dw2");
      expect_close(call.db2, expected.db2, "db2");
    }
  }
}

TEST_F(CudaSqueezeExcite, TwoStreamsAtOnce) {
  for (const Layout layout : {Layout::nchw, Layout::channels_last}) {
    SqueezeExcite calls[] = {make({40, 96, 8, 16, 15}, DType::f16, layout),
                             make({17, 192, 12, 24, 23}, DType::f16, layout)};
    for (const char* name : kNames) {
      SCOPED_TRACE(name);
      if (!takes(name, OnGpu(calls[0], {}).forward())) continue;
      if (!takes(name, OnGpu(calls[1], {}).forward())) continue;
      std::vector<std::uint8_t> expected[2][2];
      for (const int i : {0, 1}) {
        calls[i].pooled.fill(8 + i);
        calls[i].hidden.fill(9 + i);
        calls[i].gates.fill(10 + i, 0.3);
        expected[i][1] = backward_bytes(calls[i], name);
        expected[i][0] = forward_bytes(calls[i], name);
      }
      // Forward writes what backward reads, so each has tensors of its own.
      SqueezeExcite forward[] = {calls[0], calls[1]}, gradients[] = {calls[0], calls[1]};
      const Stream streams[2];
      OnGpu forward_on[] = {{forward[0], kForwardOutputs}, {forward[1], kForwardOutputs}};
      OnGpu gradients_on[] = {{gradients[0], kBackwardOutputs}, {gradients[1], kBackwardOutputs}};
      for (int repeat = 0; repeat < 20; ++repeat) {
        for (const int i : {0, 1}) {
          const Context context = on_gpu(streams[i].get());
          forced(name)(context, forward_on[i].forward());
          forced(name)(context, gradients_on[i].backward());
        }
      }
      for (const int i : {0, 1}) {
        forward_on[i].fetch(kForwardOutputs);
        EXPECT_TRUE(bytes_of(forward[i], kForwardOutputs) == expected[i][0]) << i;
        gradients_on[i].fetch(kBackwardOutputs);
        EXPECT_TRUE(bytes_of(gradients[i], kBackwardOutputs) == expected[i][1]) << i;
      }
    }
  }
}

}  // namespace
}  // namespace fusewise::testing
