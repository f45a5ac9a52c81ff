// Squeeze-and-Excitation on the GPU, every implementation against plain loops in float64. Tests
// named Short* are small enough for compute-sanitizer and reach every kernel between them.

#include <cuda_runtime.h>

#include <algorithm>
#include <memory>
#include <set>
#include <stdexcept>

#include "cuda/device.h"
#include "cuda/squeeze_excite/cluster.cuh"
#include "cuda/squeeze_excite/two_pass.cuh"
#include "reference.h"

namespace fusewise::testing {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr Device kGpu{DeviceType::cuda, 0};

class CudaSqueezeExcite : public ::testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) GTEST_SKIP() << "there is no GPU";
  }
};

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

Context on_gpu(cudaStream_t stream = nullptr) {
  Context context;
  context.device = kGpu;
  context.stream = stream;
  return context;
}

// Tensors on the GPU. ----------------------------------------------------------------------------

using Tensors = std::vector<Tensor SqueezeExcite::*>;

const Tensors kAll = {
    &SqueezeExcite::x,      &SqueezeExcite::w1,    &SqueezeExcite::b1,  &SqueezeExcite::w2,
    &SqueezeExcite::b2,     &SqueezeExcite::y,     &SqueezeExcite::dy,  &SqueezeExcite::pooled,
    &SqueezeExcite::hidden, &SqueezeExcite::gates, &SqueezeExcite::dx,  &SqueezeExcite::dw1,
    &SqueezeExcite::db1,    &SqueezeExcite::dw2,   &SqueezeExcite::db2,
};
const Tensors kForwardOutputs = {&SqueezeExcite::y, &SqueezeExcite::pooled, &SqueezeExcite::hidden,
                                 &SqueezeExcite::gates};
const Tensors kBackwardOutputs = {&SqueezeExcite::dx, &SqueezeExcite::dw1, &SqueezeExcite::db1,
                                  &SqueezeExcite::dw2, &SqueezeExcite::db2};

/// Every tensor of a call on the GPU, guards included. Outputs are poisoned first.
class OnGpu {
 public:
  OnGpu(SqueezeExcite& host, const Tensors& outputs) : host_(host) {
    for (const auto member : outputs) {
      if ((host.*member).defined()) (host.*member).poison();
    }
    for (const auto member : kAll) {
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

  SqueezeExciteForward forward() const {
    SqueezeExciteForward call = host_.forward();
    for (TensorView* view : {&call.x, &call.w1, &call.b1, &call.w2, &call.b2, &call.y, &call.pooled,
                             &call.hidden, &call.gates}) {
      move(*view);
    }
    return call;
  }
  SqueezeExciteBackward backward() const {
    SqueezeExciteBackward call = host_.backward();
    for (TensorView* view : {&call.dy, &call.x, &call.w1, &call.w2, &call.pooled, &call.hidden,
                             &call.gates, &call.dx, &call.dw1, &call.db1, &call.dw2, &call.db2}) {
      move(*view);
    }
    return call;
  }

  /// Waits for the GPU and brings the outputs back. Nothing else may have changed.
  void fetch(const Tensors& outputs) {
    check(cudaDeviceSynchronize());
    for (std::size_t i = 0; i < kAll.size(); ++i) {
      std::vector<std::uint8_t>& bytes = (host_.*kAll[i]).memory();
      if (bytes.empty()) continue;
      std::vector<std::uint8_t> now(bytes.size());
      check(cudaMemcpy(now.data(), memory_[i].get(), now.size(), cudaMemcpyDeviceToHost));
      if (std::find(outputs.begin(), outputs.end(), kAll[i]) == outputs.end()) {
        EXPECT_TRUE(now == bytes) << "tensor " << i << " is no output, and was written to";
      }
      bytes = std::move(now);
    }
  }

 private:
  void move(TensorView& view) const {
    if (!view.defined()) return;
    for (std::size_t i = 0; i < kAll.size(); ++i) {
      const Tensor& tensor = host_.*kAll[i];
      if (!tensor.defined() || tensor.view().data != view.data) continue;
      const auto offset = static_cast<const std::uint8_t*>(view.data) - tensor.memory().data();
      view.data = static_cast<std::uint8_t*>(memory_[i].get()) + offset;
      view.device = kGpu;
      return;
    }
    throw std::logic_error("a tensor without a copy on the GPU");
  }

  struct Free {
    void operator()(void* memory) const { static_cast<void>(cudaFree(memory)); }
  };
  SqueezeExcite& host_;
  std::vector<std::unique_ptr<void, Free>> memory_;
};

// Running and comparing. -------------------------------------------------------------------------

using RunForward = std::function<void(const Context&, const SqueezeExciteForward&)>;
using RunBackward = std::function<void(const Context&, const SqueezeExciteBackward&)>;

/// Forces an implementation by name.
auto forced(const char* name) {
  return [name](const Context& context, auto call) {
    call.implementation = name;
    squeeze_excite(context, call);
  };
}

/// Whether it takes the call when it is forced to.
template <typename Call>
bool takes(const char* name, Call call) {
  call.implementation = name;
  try {
    explain(on_gpu(), call);
  } catch (const Error&) {
    return false;
  }
  return true;
}

void save(SqueezeExcite& call, const ForwardReference& saved) {
  for (Index i = 0; i < call.pooled.numel(); ++i) call.pooled.set(i, saved.pooled[i].value);
  for (Index i = 0; i < call.hidden.numel(); ++i) call.hidden.set(i, saved.hidden[i].value);
  for (Index i = 0; i < call.gates.numel(); ++i) call.gates.set(i, saved.gates[i].value);
}

void expect_close(const Tensor& got, const Values& expected, const char* name) {
  if (!got.defined()) return;
  EXPECT_TRUE(all_close(got, expected)) << name;
}

void expect_forward(SqueezeExcite call, const ForwardReference& expected, const RunForward& run) {
  OnGpu gpu(call, kForwardOutputs);
  run(on_gpu(), gpu.forward());
  gpu.fetch(kForwardOutputs);
  expect_close(call.y, expected.y, "y");
  expect_close(call.pooled, expected.pooled, "pooled");
  expect_close(call.hidden, expected.hidden, "hidden");
  expect_close(call.gates, expected.gates, "gates");
}

/// `call` has what forward saves.
void expect_backward(SqueezeExcite call, const BackwardReference& expected,
                     const RunBackward& run) {
  OnGpu gpu(call, kBackwardOutputs);
  run(on_gpu(), gpu.backward());
  gpu.fetch(kBackwardOutputs);
  expect_close(call.dx, expected.dx, "dx");
  expect_close(call.dw1, expected.dw1, "dw1");
  expect_close(call.db1, expected.db1, "db1");
  expect_close(call.dw2, expected.dw2, "dw2");
  expect_close(call.db2, expected.db2, "db2");
}

/// Those that ran, as "forward cluster". `general` always has to.
using Names = std::set<std::string>;
constexpr const char* kNames[] = {"cluster", "two_pass", "general"};

Names expect_forwards(SqueezeExcite& call, const ForwardReference& expected) {
  Names ran;
  for (const char* name : kNames) {
    SCOPED_TRACE(std::string("forward ") + name);
    if (!takes(name, OnGpu(call, {}).forward())) continue;
    expect_forward(call, expected, forced(name));
    ran.insert(std::string("forward ") + name);
  }
  EXPECT_TRUE(ran.contains("forward general"));
  return ran;
}

Names expect_backwards(SqueezeExcite& call, const ForwardReference& saved) {
  save(call, saved);
  const BackwardReference expected = backward_reference(call);
  Names ran;
  for (const char* name : kNames) {
    SCOPED_TRACE(std::string("backward ") + name);
    if (!takes(name, OnGpu(call, {}).backward())) continue;
    expect_backward(call, expected, forced(name));
    ran.insert(std::string("backward ") + name);
  }
  EXPECT_TRUE(ran.contains("backward general"));
  return ran;
}

/// Both ways, with every implementation that takes the call.
Names expect_both(SqueezeExcite call) {
  const ForwardReference expected = forward_reference(call);
  Names ran = expect_forwards(call, expected);
  ran.merge(expect_backwards(call, expected));
  return ran;
}

bool has_clusters() { return cuda::limits_of(kGpu).capability >= 90; }

/// What takes dense, aligned float32 or half images of a size that suits the GPU.
Names all_names() {
  Names all{"forward two_pass", "forward general", "backward two_pass", "backward general"};
  if (has_clusters()) all.merge(Names{"forward cluster", "backward cluster"});
  return all;
}

// Problems. --------------------------------------------------------------------------------------

struct Types {
  DType data, weights;
};
constexpr Types kTypes[] = {{DType::f32, DType::f32},   {DType::f64, DType::f64},
                            {DType::f16, DType::f16},   {DType::f16, DType::f32},
                            {DType::bf16, DType::bf16}, {DType::bf16, DType::f32}};
constexpr Types kShortTypes[] = {{DType::f32, DType::f32},
                                 {DType::f16, DType::f16},
                                 {DType::f16, DType::f32},
                                 {DType::bf16, DType::bf16},
                                 {DType::bf16, DType::f32}};

std::string case_name(const Sizes& s, Types types, Layout layout, Layout other) {
  return "N, C, R, H, W = " + std::to_string(s.n) + ", " + std::to_string(s.c) + ", " +
         std::to_string(s.r) + ", " + std::to_string(s.h) + ", " + std::to_string(s.w) + "; " +
         name_of(types.data) + ", weights " + name_of(types.weights) + ", layouts " +
         std::to_string(static_cast<int>(layout)) + " and " +
         std::to_string(static_cast<int>(other));
}

SqueezeExcite make(Sizes sizes, DType dtype = DType::f32, Layout layout = Layout::nchw) {
  return make_squeeze_excite(sizes, dtype, dtype, layout, layout);
}

/// Both ways for one layout of all images; says what ran.
Names expect_case(Sizes sizes, Types types, Layout layout) {
  SCOPED_TRACE(case_name(sizes, types, layout, layout));
  return expect_both(make_squeeze_excite(sizes, types.data, types.weights, layout, layout));
}

// Short tests. -----------------------------------------------------------------------------------

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

/// The general kernels alone, both ways.
void expect_general(Sizes sizes, Types types, Layout layout, Layout other) {
  SCOPED_TRACE(case_name(sizes, types, layout, other));
  SqueezeExcite call = make_squeeze_excite(sizes, types.data, types.weights, layout, other);
  const ForwardReference expected = forward_reference(call);
  expect_forward(call, expected, forced("general"));
  save(call, expected);
  expect_backward(call, backward_reference(call), forced("general"));
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
      EXPECT_EQ(expect_case({3, 16, 4, 4, 6}, types, layout), all_names());
    }
  }
}

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
      EXPECT_EQ(expect_case({300, 64, 4, 4, 6}, types, layout), all_names());
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
    SqueezeExcite call = make({5, 24, 5, 6, 6}, DType::f32, layout);
    call.pooled = call.hidden = call.gates = {};
    expect_forwards(call, forward_reference(call));
  }
}

TEST_F(CudaSqueezeExcite, ConvolutionWeights) {
  SqueezeExcite call = make({2, 20, 5, 6, 6});
  call.w1 = Tensor(DType::f32, {5, 20, 1, 1}).fill(3, 0.2);
  call.w2 = Tensor(DType::f32, {20, 5, 1, 1}).fill(5, 0.4);
  call.dw1 = Tensor(DType::f32, {5, 20, 1, 1});
  call.dw2 = Tensor(DType::f32, {20, 5, 1, 1});
  EXPECT_EQ(expect_both(call), all_names());
}

TEST_F(CudaSqueezeExcite, EveryChoiceOfGradients) {
  for (const Layout layout : {Layout::nchw, Layout::channels_last, Layout::transposed}) {
    for (int absent = 0; absent < 32; ++absent) {
      SCOPED_TRACE(absent);
      SqueezeExcite call = make({4, 24, 5, 6, 7}, DType::f32, layout);
      if (absent & 1) call.dx = {};
      if (absent & 2) call.dw1 = {};
      if (absent & 4) call.db1 = {};
      if (absent & 8) call.dw2 = {};
      if (absent & 16) call.db2 = {};
      expect_backwards(call, forward_reference(call));
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
    SqueezeExcite call = make({3, 16, 4, 4, 5}, DType::f32, layout);
    call.x.poison();
    expect_both(call);
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
                       {150, 64, 16, 8, 8}, {5, 672, 28, 24, 24}, {2, 3, 2, 5, 7}};
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

// Errors. ----------------------------------------------------------------------------------------

template <typename Call>
void expect_error(const Call& call, const std::string& start) {
  std::string message = "nothing was thrown";
  try {
    squeeze_excite(on_gpu(), call);
  } catch (const Error& error) {
    message = error.what();
  }
  EXPECT_EQ(message.substr(0, start.size()), start) << message;
  EXPECT_THROW(explain(on_gpu(), call), Error);
}

template <typename Call>
struct Argument {
  TensorView Call::* view;
  const char* name;
};

/// Spoils one argument after another; the error begins with its name.
template <typename Call>
void spoil_each(const std::vector<Argument<Call>>& arguments, const Call& good) {
  for (const Argument<Call>& argument : arguments) {
    const std::string name = argument.name;
    Call call = good;
    TensorView& bad = call.*argument.view;
    bad.device = {};
    expect_error(call, name + ": expected a tensor on cuda:0, got one on cpu");
    bad.device = {DeviceType::cuda, 1};
    expect_error(call, name + ": expected a tensor on cuda:0, got one on cuda:1");
    bad = good.*argument.view;
    bad.sizes[bad.rank] = 2;
    bad.strides[bad.rank++] = 1;
    expect_error(call, name + ": expected");
    if (name == "x") continue;  // x says what the others must be
    bad = good.*argument.view;
    bad.sizes[name == "w1" ? 1 : 0] += 1;  // and the first size of W1 says what R is
    expect_error(call, name + ": expected");
    bad = good.*argument.view;
    bad.dtype = DType::f64;
    expect_error(call, name + ": expected");
  }
}

TEST_F(CudaSqueezeExcite, BadArgumentsOfForwardAreNamed) {
  using Call = SqueezeExciteForward;
  SqueezeExcite tensors = make({2, 8, 3, 4, 5});
  OnGpu gpu(tensors, kForwardOutputs);
  const Call good = gpu.forward();
  spoil_each<Call>({{&Call::x, "x"},
                    {&Call::w1, "w1"},
                    {&Call::b1, "b1"},
                    {&Call::w2, "w2"},
                    {&Call::b2, "b2"},
                    {&Call::y, "y"},
                    {&Call::pooled, "pooled"},
                    {&Call::hidden, "hidden"},
                    {&Call::gates, "gates"}},
                   good);
  Call call = good;
  call.y = {};
  expect_error(call, "y: is missing");
  call = good;
  call.gates = {};
  expect_error(call, "pooled, hidden and gates: expected all or none");
  call = good;
  call.implementation = "fastest";
  expect_error(call, "implementation: there is none named 'fastest'");
  gpu.fetch({});  // no output was touched
}

TEST_F(CudaSqueezeExcite, BadArgumentsOfBackwardAreNamed) {
  using Call = SqueezeExciteBackward;
  SqueezeExcite tensors = make({2, 8, 3, 4, 5});
  OnGpu gpu(tensors, kBackwardOutputs);
  const Call good = gpu.backward();
  spoil_each<Call>({{&Call::dy, "dy"},
                    {&Call::x, "x"},
                    {&Call::w1, "w1"},
                    {&Call::w2, "w2"},
                    {&Call::pooled, "pooled"},
                    {&Call::hidden, "hidden"},
                    {&Call::gates, "gates"},
                    {&Call::dx, "dx"},
                    {&Call::dw1, "dw1"},
                    {&Call::db1, "db1"},
                    {&Call::dw2, "dw2"},
                    {&Call::db2, "db2"}},
                   good);
  Call call = good;
  call.dy = {};
  expect_error(call, "dy: is missing");
  call = good;
  call.implementation = "avx2";
  expect_error(call, "implementation: there is none named 'avx2'");
  gpu.fetch({});  // no output was touched
}

TEST_F(CudaSqueezeExcite, ClustersYieldToNobodyWhoDeclines) {
  if (!has_clusters()) GTEST_SKIP() << "clusters of blocks need compute capability 9.0";
  SqueezeExcite few = make({1, 2048, 64, 32, 32}, DType::f16, Layout::channels_last);
  OnGpu gpu(few, {});
  const Candidates list = explain(on_gpu(), gpu.backward());
  EXPECT_NE(list[1].declined, "");
  EXPECT_TRUE(list[0].chosen) << list[0].declined;
}

TEST_F(CudaSqueezeExcite, WhoIsForcedAndDeclinesSaysWhy) {
  SqueezeExcite wide = make({2, 8, 3, 4, 5}, DType::f64);
  OnGpu gpu(wide, kForwardOutputs);
  SqueezeExciteForward call = gpu.forward();
  call.implementation = "two_pass";
  expect_error(call, "implementation: none takes this call");
  const Candidates list = explain(on_gpu(), gpu.forward());
  ASSERT_EQ(list.size(), 3u);
  EXPECT_EQ(list[0].name, "cluster");
  EXPECT_NE(list[0].declined, "");
  EXPECT_EQ(list[1].name, "two_pass");
  EXPECT_NE(list[1].declined, "");
  EXPECT_EQ(list[2].name, "general");
  EXPECT_EQ(list[2].declined, "");
  EXPECT_TRUE(list[2].chosen);
  gpu.fetch({});
}

}  // namespace
}  // namespace fusewise::testing
