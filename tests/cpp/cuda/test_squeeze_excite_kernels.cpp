// Each kernel of Squeeze-and-Excitation on the GPU, with plans of every kind.

#include <cmath>

#include "cuda/squeeze_excite/cluster.cuh"
#include "cuda/squeeze_excite/two_pass.cuh"
#include "squeeze_excite_gpu.h"

namespace fusewise::testing {
namespace {

/// The cluster kernels with a cut, and room for so many clusters at once.
void expect_cluster(Sizes sizes, Types types, Layout layout, cuda::ClusterCut cut, int clusters) {
  SCOPED_TRACE(case_name(sizes, types, layout, layout) + ", slices " +
               std::to_string(cut.channel_slices) + " x " + std::to_string(cut.pixel_slices) +
               ", threads " + std::to_string(cut.threads) + ", clusters " +
               std::to_string(clusters));
  SqueezeExcite call = make_squeeze_excite(sizes, types.data, types.weights, layout, layout);
  cuda::ClusterLimits limits = cuda::cluster_limits(kGpu);
  for (auto& most : limits.clusters) {
    for (int& count : most) count = std::min(count, clusters);
  }
  const auto plan_for = [&](bool backward) {
    return cuda::cluster_plan_with({.n = sizes.n,
                                    .c = sizes.c,
                                    .hw = sizes.h * sizes.w,
                                    .r = sizes.r,
                                    .element_bytes = static_cast<int>(size_of(types.data)),
                                    .weight_bytes = static_cast<int>(size_of(types.weights)),
                                    .planar = layout == Layout::nchw,
                                    .backward = backward},
                                   cut, limits);
  };
  const auto forward = plan_for(false), backward = plan_for(true);
  ASSERT_TRUE(forward && backward);
  ASSERT_EQ(cuda::cluster_declines(on_gpu(), OnGpu(call, {}).forward()), "");
  ASSERT_EQ(cuda::cluster_declines(on_gpu(), OnGpu(call, {}).backward()), "");
  const ForwardReference expected = forward_reference(call);
  expect_forward(call, expected,
                 [&](const Context& context, const SqueezeExciteForward& arguments) {
                   cuda::cluster_run(context, arguments, *forward);
                 });
  save(call, expected);
  expect_backward(call, backward_reference(call),
                  [&](const Context& context, const SqueezeExciteBackward& arguments) {
                    cuda::cluster_run(context, arguments, *backward);
                  });
}

void expect_clusters(Types types) {
  // Seven samples: in one cluster all turns and phases of the barriers, in three late starts.
  // Slices of different sizes, an odd and an even number of hidden units, one block and fifteen.
  const Sizes last{7, 40, 6, 5, 7}, odd{7, 72, 5, 9, 11};
  expect_cluster(last, types, Layout::channels_last, {1, 1, 256}, 3);
  expect_cluster(last, types, Layout::channels_last, {3, 1, 256}, 1);
  expect_cluster(last, types, Layout::channels_last, {1, 5, 512}, 2);
  expect_cluster(odd, types, Layout::channels_last, {3, 3, 512}, 1);
  expect_cluster(odd, types, Layout::channels_last, {1, 15, 256}, 1);
  expect_cluster(odd, types, Layout::channels_last, {5, 2, 256}, 7);
  const Sizes planes{7, 24, 4, 8, 9};
  expect_cluster(planes, types, Layout::nchw, {1, 1, 512}, 3);
  expect_cluster(planes, types, Layout::nchw, {3, 1, 256}, 3);
  expect_cluster(planes, types, Layout::nchw, {3, 3, 256}, 1);
}

/// Short, because a watched barrier is slow: one type.
TEST_F(CudaSqueezeExcite, ShortClusters) {
  if (!has_clusters()) GTEST_SKIP() << "clusters of blocks need compute capability 9.0";
  expect_clusters({DType::f16, DType::f16});
}

TEST_F(CudaSqueezeExcite, ClustersOfEveryType) {
  if (!has_clusters()) GTEST_SKIP() << "clusters of blocks need compute capability 9.0";
  for (const Types types : kShortTypes) expect_clusters(types);
  // More vectors than registers hold, so shared memory has the rest; many hidden units.
  const Types half{DType::f16, DType::f16}, single{DType::f32, DType::f32};
  expect_cluster({3, 64, 100, 60, 50}, half, Layout::channels_last, {2, 1, 512}, 2);
  expect_cluster({3, 64, 7, 60, 50}, single, Layout::channels_last, {1, 4, 512}, 2);
  expect_cluster({3, 16, 3, 60, 60}, half, Layout::nchw, {2, 1, 256}, 2);
  expect_cluster({3, 16, 4, 60, 60}, single, Layout::nchw, {2, 1, 256}, 2);
}

/// The two passes, with a plan of every kind.
void expect_two_pass(Sizes sizes, Types types, cuda::TwoPassPlan plan) {
  const Layout layout = plan.cut == cuda::Cut::planes ? Layout::nchw : Layout::channels_last;
  SCOPED_TRACE(case_name(sizes, types, layout, layout) + ", per block " +
               std::to_string(plan.per_block));
  SqueezeExcite call = make_squeeze_excite(sizes, types.data, types.weights, layout, layout);
  ASSERT_EQ(cuda::two_pass_declines(on_gpu(), OnGpu(call, {}).forward()), "");
  ASSERT_EQ(cuda::two_pass_declines(on_gpu(), OnGpu(call, {}).backward()), "");
  const auto run = [plan](const Context& context, const auto& arguments) {
    cuda::two_pass_run(context, arguments, plan);
  };
  const ForwardReference expected = forward_reference(call);
  expect_forward(call, expected, run);
  save(call, expected);
  expect_backward(call, backward_reference(call), run);
}

TEST_F(CudaSqueezeExcite, ShortTwoPassByChannel) {
  for (const Types types : kShortTypes) {
    expect_two_pass({3, 40, 6, 5, 7}, types, {cuda::Cut::channels, 16});
    expect_two_pass({2, 40, 5, 3, 3}, types, {cuda::Cut::channels, 40});
  }
}

TEST_F(CudaSqueezeExcite, ShortTwoPassByPixel) {
  for (const Types types : kShortTypes) {
    expect_two_pass({3, 24, 6, 9, 11}, types, {cuda::Cut::pixels, 40});
    expect_two_pass({2, 24, 5, 3, 3}, types, {cuda::Cut::pixels, 9});
  }
}

TEST_F(CudaSqueezeExcite, ShortTwoPassPlanar) {
  for (const Types types : kShortTypes) {
    expect_two_pass({3, 24, 6, 5, 7}, types, {cuda::Cut::planes, 7});
    expect_two_pass({2, 8, 5, 13, 9}, types, {cuda::Cut::planes, 1});
  }
}

constexpr Types kBatchedTypes[] = {{DType::f16, DType::f16},
                                   {DType::f16, DType::f32},
                                   {DType::bf16, DType::bf16},
                                   {DType::bf16, DType::f32}};

/// One implementation alone, both ways.
void expect_alone(const char* name, Sizes sizes, Types types, Layout layout, Layout other) {
  SCOPED_TRACE(case_name(sizes, types, layout, other));
  SqueezeExcite call = make_squeeze_excite(sizes, types.data, types.weights, layout, other);
  const ForwardReference expected = forward_reference(call);
  expect_forward(call, expected, forced(name));
  save(call, expected);
  expect_backward(call, backward_reference(call), forced(name));
}

void expect_batched(Sizes sizes, Types types) {
  expect_alone("batched", sizes, types, Layout::channels_last, Layout::channels_last);
}

/// Rows of weights that start on boundaries of 16, 8, 4 and 2 bytes, one slice of the depth and
/// several, with one that has nothing.
TEST_F(CudaSqueezeExcite, ShortBatched) {
  for (const Types types : kBatchedTypes) {
    expect_batched({3, 40, 6, 5, 7}, types);
    expect_batched({33, 72, 7, 1, 1}, types);
    expect_batched({2, 264, 33, 3, 3}, types);
    expect_batched({1, 8, 1, 9, 8}, types);
  }
  expect_batched({5, 648, 36, 2, 2}, {DType::f16, DType::f32});
}

/// More samples, channels and hidden units than a tile of either size; all numbers of slices.
TEST_F(CudaSqueezeExcite, BatchedTiles) {
  for (const Types types : kBatchedTypes) {
    expect_batched({65, 1304, 130, 3, 3}, types);
    expect_batched({129, 512, 48, 2, 2}, types);
    expect_batched({300, 200, 301, 2, 2}, types);
    expect_batched({3, 2048, 128, 7, 7}, types);
    expect_batched({2, 2056, 5, 4, 3}, types);
  }
  expect_batched({513, 1000, 130, 2, 1}, {DType::f16, DType::f32});
  expect_batched({513, 1000, 130, 2, 1}, {DType::bf16, DType::bf16});
}

TEST_F(CudaSqueezeExcite, BatchedInfinityAndNaN) {
  for (const Types types : kBatchedTypes) {
    for (const double bad : {HUGE_VAL, -HUGE_VAL, std::nan("")}) {
      SCOPED_TRACE(bad);
      SqueezeExcite call = make_squeeze_excite({5, 264, 20, 3, 3}, types.data, types.weights,
                                               Layout::channels_last, Layout::channels_last);
      call.activation = Activation::relu;  // keeps infinity
      call.x.set(3000, bad);
      call.w2.set(70, bad);
      expect_forward(call, forward_reference(call), forced("batched"));
    }
  }
}

TEST_F(CudaSqueezeExcite, BatchedIsChosenForLargeProducts) {
  SqueezeExcite call = make_squeeze_excite({64, 2048, 128, 7, 7}, DType::f16, DType::f32,
                                           Layout::channels_last, Layout::channels_last);
  OnGpu gpu(call, {});
  EXPECT_TRUE(explain(on_gpu(), gpu.forward())[0].chosen);
  EXPECT_TRUE(explain(on_gpu(), gpu.backward())[0].chosen);
  SqueezeExcite small = make_squeeze_excite({64, 32, 8, 14, 14}, DType::f16, DType::f32,
                                            Layout::channels_last, Layout::channels_last);
  OnGpu small_gpu(small, {});
  EXPECT_FALSE(explain(on_gpu(), small_gpu.forward())[0].chosen);
  EXPECT_FALSE(explain(on_gpu(), small_gpu.backward())[0].chosen);
}

void expect_general(Sizes sizes, Types types, Layout layout, Layout other) {
  expect_alone("general", sizes, types, layout, other);
}

TEST_F(CudaSqueezeExcite, ShortGeneralPlanar) {
  for (const Types types : kTypes) {
    expect_general({2, 5, 3, 5, 7}, types, Layout::nchw, Layout::nchw);
    expect_general({2, 5, 3, 5, 7}, types, Layout::misaligned, Layout::nchw);
  }
  // Enough pixels to be cut into chunks.
  expect_general({1, 3, 2, 47, 53}, {DType::f16, DType::f16}, Layout::nchw, Layout::nchw);
}

TEST_F(CudaSqueezeExcite, ShortGeneralChannelsLast) {
  for (const Types types : kTypes) {
    expect_general({2, 16, 3, 5, 7}, types, Layout::channels_last, Layout::channels_last);
    expect_general({2, 5, 3, 5, 7}, types, Layout::channels_last, Layout::channels_last_sliced);
  }
  expect_general({1, 24, 2, 31, 29}, {DType::f16, DType::f16}, Layout::channels_last,
                 Layout::channels_last);
}

TEST_F(CudaSqueezeExcite, ShortGeneralStrided) {
  for (const Types types : kTypes) {
    expect_general({2, 5, 3, 5, 7}, types, Layout::sliced, Layout::transposed);
    expect_general({2, 5, 3, 5, 7}, types, Layout::nchw, Layout::channels_last);
  }
}

TEST_F(CudaSqueezeExcite, ShortWithoutWhatMayBeAbsent) {
  for (const Layout layout : {Layout::nchw, Layout::channels_last}) {
    SqueezeExcite call = make({3, 16, 4, 4, 5}, DType::f16, layout);
    call.b1 = call.b2 = {};
    const ForwardReference expected = forward_reference(call);
    expect_backwards(call, expected);
    call.dx = {};
    expect_backwards(call, expected);
    call.pooled = call.hidden = call.gates = {};
    expect_forwards(call, expected);
  }
}

TEST_F(CudaSqueezeExcite, ShortForwardAndBackwardByName) {
  for (const Layout layout : {Layout::nchw, Layout::channels_last}) {
    for (const Types types : kShortTypes) {
      EXPECT_EQ(expect_case({3, 16, 4, 4, 6}, types, layout), all_names(types, layout));
    }
  }
}

}  // namespace
}  // namespace fusewise::testing
