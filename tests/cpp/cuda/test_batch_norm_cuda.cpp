// BatchNorm + activation on the GPU: every type, layout, size and choice of a call, with every
// implementation that takes it. Tests named Short* are small enough for compute-sanitizer and reach
// every kernel between them.

#include "batch_norm_gpu.h"

namespace fusewise::testing {
namespace {

TEST_F(CudaBatchNorm, ShortEveryTypeAndActivation) {
  for (const Types types : kTypes) {
    for (const Activation activation : kBatchNormActivations) {
      for (const bool residual : {false, true}) {
        for (const Layout layout : {Layout::nchw, Layout::channels_last}) {
          const Case is{.data = types.data,
                        .weights = types.weights,
                        .layout = layout,
                        .other = layout,
                        .activation = activation,
                        .residual = residual};
          if (types.data == DType::f64) {
            expect_case(is);
          } else {
            expect_all(is);
          }
        }
      }
    }
  }
}

TEST_F(CudaBatchNorm, ShortResident) {
  struct Sizes {
    Index s, n, c, h, w;
  };
  // One block and several, slabs of different sizes, few and many vectors per thread; channels that
  // only fill vectors together with those of neighbouring pixels.
  for (const Sizes& z : {Sizes{0, 2, 8, 3, 3},
                         {0, 3, 64, 9, 7},
                         {0, 2, 24, 40, 41},
                         {2, 5, 48, 11, 13},
                         {0, 4, 512, 7, 7},
                         {0, 16, 16, 14, 14},
                         {3, 2, 1024, 6, 6},
                         {0, 4, 36, 6, 6},
                         {2, 7, 65, 4, 4},
                         {0, 8, 3, 15, 17},
                         {0, 16, 100, 13, 14},
                         {0, 8, 1001, 3, 3}}) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      for (const bool residual : {false, true}) {
        const std::set<std::string> ran = expect_case({.s = z.s,
                                                       .n = z.n,
                                                       .c = z.c,
                                                       .h = z.h,
                                                       .w = z.w,
                                                       .data = dtype,
                                                       .residual = residual,
                                                       .blanked = z.s > 0});
        EXPECT_TRUE(ran.contains("forward resident"));
        EXPECT_TRUE(ran.contains("backward resident"));
      }
    }
  }
}

TEST_F(CudaBatchNorm, ShortPlanes) {
  struct Sizes {
    Index s, n, c, h, w;
  };
  // Planes of whole vectors and others, planes smaller than a vector, one block and clusters. The
  // image of 3 x 65 x 7 x 5 ends within a vector. Its bits of relu would end within a word, so
  // forward goes elsewhere where it keeps them.
  for (const Sizes& z : {Sizes{0, 4, 8, 7, 7},
                         {0, 2, 16, 14, 14},
                         {0, 32, 3, 1, 3},
                         {0, 16, 2, 1, 2},
                         {2, 5, 16, 11, 13},
                         {0, 16, 2, 33, 33},
                         {0, 3, 65, 7, 5},
                         {3, 4, 40, 17, 2},
                         {0, 8, 2, 64, 65},
                         {0, 1, 300, 4, 8}}) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      for (const Activation activation : {Activation::relu, Activation::silu}) {
        for (const bool residual : {false, true}) {
          const std::set<std::string> ran = expect_case({.s = z.s,
                                                         .n = z.n,
                                                         .c = z.c,
                                                         .h = z.h,
                                                         .w = z.w,
                                                         .data = dtype,
                                                         .layout = Layout::nchw,
                                                         .other = Layout::nchw,
                                                         .activation = activation,
                                                         .residual = residual,
                                                         .blanked = z.s > 0});
          const bool keeps_bits = residual && activation == Activation::relu;
          const bool whole_words = std::max<Index>(1, z.s) * z.n * z.c * z.h * z.w % 32 == 0;
          EXPECT_EQ(ran.contains("forward planes"), whole_words || !keeps_bits);
          EXPECT_TRUE(ran.contains("backward planes"));
        }
      }
    }
  }
}

TEST_F(CudaBatchNorm, ShortColumns) {
  struct Sizes {
    Index s, n, c, h, w;
    Activation activation;
  };
  // Any number of channels; few and many values per thread; a last block with idle lanes.
  for (const Sizes& z : {Sizes{0, 1, 2048, 7, 7, Activation::relu},
                         {0, 3, 65, 17, 13, Activation::hardswish},
                         {0, 2, 3, 1, 1, Activation::silu},
                         {2, 5, 40, 4, 3, Activation::relu6},
                         {3, 4, 13, 6, 5, Activation::silu},
                         {0, 4, 24, 8, 8, Activation::relu},
                         {0, 2, 1001, 5, 1, Activation::identity}}) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      for (const bool residual : {false, true}) {
        const std::set<std::string> ran = expect_case({.s = z.s,
                                                       .n = z.n,
                                                       .c = z.c,
                                                       .h = z.h,
                                                       .w = z.w,
                                                       .data = dtype,
                                                       .activation = z.activation,
                                                       .residual = residual,
                                                       .blanked = z.s > 0});
        EXPECT_TRUE(ran.contains("forward columns"));
        EXPECT_TRUE(ran.contains("backward columns"));
      }
    }
  }
}

TEST_F(CudaBatchNorm, ShortNaNStaysInItsChannel) {
  for (const char* name : kEntries) {
    for (const Layout layout : {Layout::nchw, Layout::channels_last}) {
      Problem p = make({.n = 4,
                        .c = 8,
                        .h = 7,
                        .w = 7,
                        .data = DType::f16,
                        .layout = layout,
                        .other = layout,
                        .residual = true});
      const auto is_bad = [&](Index i) { return i / p.is.pixels() % p.is.c == 3; };
      for (Index i = 0; i < p.x.numel(); ++i) {
        if (is_bad(i)) p.x.set(i, kNaN), p.dy.set(i, kNaN), p.residual.set(i, kNaN);
      }
      OnGpu gpu(p);
      if (!takes(name, gpu.forward()) || !takes(name, gpu.backward())) continue;
      run(name, gpu.forward());
      run(name, gpu.backward());
      gpu.fetch();
      for (Index i = 0; i < p.x.numel(); ++i) {
        const bool all = std::isfinite(p.y.get(i)) && std::isfinite(p.dx.get(i));
        ASSERT_EQ(all, !is_bad(i)) << name << ", element " << i;
      }
    }
  }
}

TEST_F(CudaBatchNorm, EveryLayout) {
  for (const Layout layout : kLayouts) {
    for (const Layout other : kLayouts) {
      for (const Index channels : {1, 5, 16}) {
        for (const bool residual : {false, true}) {
          expect_case({.c = channels,
                       .h = 4,
                       .w = 6,
                       .data = DType::f16,
                       .layout = layout,
                       .other = other,
                       .residual = residual});
        }
      }
    }
  }
}

TEST_F(CudaBatchNorm, EverySize) {
  struct Sizes {
    Index n, c, h, w;
  };
  const Sizes all[] = {{2, 1, 1, 1},    {3, 65, 1, 1},   {2, 64, 1, 1},   {3, 3, 9, 11},
                       {1, 24, 31, 30}, {2, 144, 9, 7},  {5, 272, 3, 2},  {9, 336, 5, 4},
                       {2, 1000, 4, 2}, {40, 8, 16, 16}, {3, 600, 2, 4},  {2, 2048, 7, 7},
                       {1, 96, 64, 65}, {2, 16, 61, 48}, {1, 4, 128, 96}, {130, 40, 8, 8}};
  for (const Types types : kTypes) {
    for (const Sizes& s : all) {
      for (const Layout layout : {Layout::nchw, Layout::channels_last}) {
        expect_case({.n = s.n,
                     .c = s.c,
                     .h = s.h,
                     .w = s.w,
                     .data = types.data,
                     .weights = types.weights,
                     .layout = layout,
                     .other = layout});
      }
    }
  }
}

TEST_F(CudaBatchNorm, Streams) {
  for (const Types types : kTypes) {
    for (const Layout layout : {Layout::nchw, Layout::channels_last, Layout::transposed}) {
      for (const bool blanked : {false, true}) {
        expect_case({.s = 3,
                     .n = 4,
                     .c = 24,
                     .h = 6,
                     .w = 4,
                     .data = types.data,
                     .weights = types.weights,
                     .layout = layout,
                     .other = layout,
                     .activation = Activation::silu,
                     .blanked = blanked});
      }
    }
  }
}

TEST_F(CudaBatchNorm, Blanked) {
  for (const DType dtype : {DType::f32, DType::f16}) {
    for (const Activation activation : kBatchNormActivations) {
      for (const Layout layout : {Layout::nchw, Layout::channels_last}) {
        for (const bool residual : {false, true}) {
          expect_all({.n = 7,
                      .data = dtype,
                      .weights = dtype,
                      .layout = layout,
                      .other = layout,
                      .activation = activation,
                      .residual = residual,
                      .blanked = true});
        }
        expect_all({.n = 1,
                    .data = dtype,
                    .weights = dtype,
                    .layout = layout,
                    .other = layout,
                    .activation = activation,
                    .blanked = true});  // nothing is left
      }
    }
  }
}

TEST_F(CudaBatchNorm, EverySourceOfStatistics) {
  for (const Types types : kTypes) {
    for (const Layout layout : {Layout::nchw, Layout::channels_last}) {
      Case is{.s = 2,
              .data = types.data,
              .weights = types.weights,
              .layout = layout,
              .other = layout,
              .residual = true};
      expect_case(is);
      is.momentum = -1;
      expect_case(is);
      is.group = true;
      expect_case(is);
      is.running = false;
      expect_case(is);
      is.group = false;
      expect_case(is);
      is.training = false;
      expect_case(is);
      is.running = true;
      expect_case(is);
      is.affine = false;
      expect_case(is);
    }
  }
}

/// A group of one process: its own parts give what a call without a group gives.
TEST_F(CudaBatchNorm, ShortPartsOfAGroup) {
  for (const char* name : {"two_pass", "general"}) {
    for (const Layout layout : {Layout::nchw, Layout::channels_last}) {
      Problem p = make({.s = 3,
                        .n = 4,
                        .data = DType::f16,
                        .layout = layout,
                        .other = layout,
                        .activation = Activation::silu,
                        .residual = true,
                        .blanked = true,
                        .group = true});
      Problem alone = p;
      alone.is.group = false;
      const Expected expected = forward_reference(alone);
      OnGpu gpu(p);
      const BatchNormActForward forward = gpu.forward();
      batch_norm_statistics(on_gpu(), {.x = forward.x,
                                       .blanked = forward.blanked,
                                       .statistics = forward.group,
                                       .implementation = name});
      run(name, forward);
      gpu.fetch();
      expect_close(p.y, expected.y, "y");
      expect_close(p.running_mean, expected.running_mean, "running_mean");
      expect_close(p.running_var, expected.running_var, "running_var");

      alone.mean = p.mean;
      alone.inverse = p.inverse;
      const ExpectedGradients gradients = backward_reference(alone);
      BatchNormActBackward sums = gpu.backward();
      sums.dgroup = sums.group;
      sums.group = sums.dx = sums.dresidual = {};
      run(name, sums);
      run(name, gpu.backward());
      gpu.fetch();
      expect_close(p.dx, gradients.dx, "dx");
      expect_close(p.dresidual, gradients.dresidual, "dresidual");
      expect_close(p.dweight, gradients.dweight, "dweight");
    }
  }
}

TEST_F(CudaBatchNorm, LargeMeansDoNotCancel) {
  for (const Layout layout : {Layout::nchw, Layout::channels_last}) {
    Case is{.n = 8,
            .c = 64,
            .h = 24,
            .w = 20,
            .layout = layout,
            .other = layout,
            .mean = 1e4,
            .deviation = 1e-2};
    expect_all(is);
    is.blanked = true;  // the first sample too
    expect_all(is);
    is = {.n = 8,
          .c = 64,
          .h = 24,
          .w = 20,
          .data = DType::f16,
          .layout = layout,
          .other = layout,
          .mean = 1000,
          .deviation = 1};
    expect_all(is);
  }
}

TEST_F(CudaBatchNorm, EmptyBatch) {
  for (const Types types : kTypes) {
    for (const Layout layout : {Layout::nchw, Layout::channels_last}) {
      expect_case({.n = 0,
                   .data = types.data,
                   .weights = types.weights,
                   .layout = layout,
                   .other = layout,
                   .residual = true});
    }
  }
}

TEST_F(CudaBatchNorm, OneValuePerChannelInInference) {
  for (const Layout layout : {Layout::nchw, Layout::channels_last}) {
    expect_case(
        {.n = 1, .c = 8, .h = 1, .w = 1, .layout = layout, .other = layout, .training = false});
  }
}

TEST_F(CudaBatchNorm, OnlyTheWantedGradients) {
  for (const char* name : {"two_pass", "general"}) {
    for (const bool training : {false, true}) {
      Problem p = make({.data = DType::f16, .residual = true, .training = training});
      save(p, forward_reference(p));
      const ExpectedGradients expected = backward_reference(p);
      for (Tensor Problem::* only :
           {&Problem::dx, &Problem::dresidual, &Problem::dweight, &Problem::dbias}) {
        Problem some = p;
        for (Tensor Problem::* other :
             {&Problem::dx, &Problem::dresidual, &Problem::dweight, &Problem::dbias}) {
          if (other != only) some.*other = {};
        }
        expect_backward(name, some, expected);
      }
    }
  }
}

TEST_F(CudaBatchNorm, RerunsAreBitIdentical) {
  for (const Layout layout : {Layout::nchw, Layout::channels_last}) {
    for (const char* name : kEntries) {
      Problem first = make({.n = 40,
                            .c = 64,
                            .h = 16,
                            .w = 16,
                            .data = DType::f16,
                            .layout = layout,
                            .other = layout});
      if (!takes(name, OnGpu(first).forward()) || !takes(name, OnGpu(first).backward())) continue;
      Problem second = first;
      for (Problem* p : {&first, &second}) {
        OnGpu gpu(*p);
        run(name, gpu.forward());
        run(name, gpu.backward());
        gpu.fetch();
      }
      const auto a = first.all(), b = second.all();
      for (std::size_t i = 0; i < a.size(); ++i) EXPECT_EQ(a[i]->memory(), b[i]->memory()) << i;
    }
  }
}

TEST_F(CudaBatchNorm, CapturedInAGraph) {
  for (const char* name : kEntries) {
    const bool planar = std::string(name) == "planes";
    const Layout layout = planar ? Layout::nchw : Layout::channels_last;
    Problem p = make({.data = DType::f16, .layout = layout, .other = layout, .residual = true});
    const Expected expected = forward_reference(p);
    OnGpu gpu(p);
    cudaStream_t stream = nullptr;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t ready = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    BatchNormActForward forward = gpu.forward();
    BatchNormActBackward backward = gpu.backward();
    forward.implementation = backward.implementation = name;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    batch_norm_act(on_gpu(stream), forward);
    batch_norm_act(on_gpu(stream), backward);
    check(cudaStreamEndCapture(stream, &graph));
    check(cudaGraphInstantiate(&ready, graph, 0));
    for (int i = 0; i < 3; ++i) check(cudaGraphLaunch(ready, stream));
    check(cudaStreamSynchronize(stream));
    gpu.fetch();
    expect_close(p.y, expected.y, "y");
    Index calls = 0;
    std::memcpy(&calls, Problem::bytes(p.tracked), sizeof(calls));
    EXPECT_EQ(calls, 6);
    check(cudaGraphExecDestroy(ready));
    check(cudaGraphDestroy(graph));
    check(cudaStreamDestroy(stream));
  }
}

}  // namespace
}  // namespace fusewise::testing
