// Laboratory: times every implementation of Squeeze-and-Excitation, forced, for blocks of the model
// zoo: fp16 images, channels-last. Each result is first compared with the generic one. Cold L2:
// buffers rotate. Not shipped.
//
//   cmake --preset core -DFUSEWISE_LAB=ON && cmake --build --preset core
//   build/core/lab/squeeze_excite_zoo_times [half] [-]
//
// `half`: fp16 weights instead of float32. `-`: reads blocks from stdin, one `N C R H` per line.
// It stops after 27 seconds.

#include <cuda_fp16.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/cuda_error.h"
#include "cuda/device.h"
#include "cuda/squeeze_excite/batched_plan.h"
#include "cuda/squeeze_excite/cluster.cuh"
#include "fill.cuh"
#include "fusewise/squeeze_excite.h"
#include "timing.h"

using namespace fusewise;
using namespace fusewise::cuda;

namespace {

constexpr Device kGpu{DeviceType::cuda, 0};
constexpr std::int64_t kPool = std::int64_t{1} << 30;  // bytes for each of x, dy, y, dx
constexpr int kCalls = 20;
constexpr double kSeconds = 27;

struct Block {
  std::int64_t n, c, r, side;
};

constexpr Block kBlocks[] = {
    {256, 960, 240, 7},  {64, 2048, 128, 7},   {256, 2048, 128, 7}, {64, 1392, 348, 14},
    {64, 896, 224, 14},  {256, 672, 168, 14},  {64, 1024, 64, 14},  {64, 1536, 64, 10},
    {32, 1632, 68, 12},  {32, 960, 40, 24},    {32, 336, 14, 48},   {32, 3712, 348, 7},
    {64, 3712, 928, 7},  {256, 1152, 48, 7},   {256, 576, 144, 7},  {256, 480, 120, 14},
    {256, 120, 32, 28},  {256, 72, 24, 28},    {32, 2688, 112, 12}, {1, 960, 240, 7},
    {8, 1392, 348, 14},  {32, 960, 240, 7},    {32, 672, 28, 24},   {32, 232, 58, 56},
    {256, 256, 16, 56},  {64, 512, 32, 28},    {256, 440, 110, 7},  {32, 192, 8, 95},
    {16, 1888, 222, 14}, {100, 1536, 384, 15},
};

/// worst[0] = the largest difference, worst[1] = the largest value of b. Both keep NaN.
template <typename T>
__global__ void compare(const T* a, const T* b, std::int64_t count, float* worst) {
  float difference = 0, value = 0;
  for (std::int64_t i = blockIdx.x * std::int64_t{256} + threadIdx.x; i < count;
       i += gridDim.x * std::int64_t{256}) {
    const float d = fabsf(static_cast<float>(a[i]) - static_cast<float>(b[i]));
    const float v = fabsf(static_cast<float>(b[i]));
    difference = isnan(difference) || d <= difference ? difference : d;
    value = isnan(value) || v <= value ? value : v;
  }
  if (!(difference <= 0)) atomicMax(reinterpret_cast<int*>(worst), __float_as_int(difference));
  if (!(value <= 0)) atomicMax(reinterpret_cast<int*>(worst) + 1, __float_as_int(value));
}

template <typename T>
T* allocate(std::int64_t count) {
  void* memory = nullptr;
  check_cuda(cudaMalloc(&memory, count * sizeof(T)), "allocating");
  return static_cast<T*>(memory);
}

TensorView image(void* data, const Block& k) {
  const std::int64_t hw = k.side * k.side;
  return {data, DType::f16, kGpu, {k.n, k.c, k.side, k.side}, {k.c * hw, 1, k.side * k.c, k.c}};
}

/// The tensors of a call that are not images, in memory of their own.
template <typename W>
struct Small {
  W *w1, *b1, *w2, *b2, *dw1, *db1, *dw2, *db2;
  float *pooled, *hidden, *gates;

  static constexpr std::int64_t kMost = 16 << 20;  // elements of a matrix, or of saved vectors
  Small() {
    for (W** matrix : {&w1, &w2, &dw1, &dw2}) *matrix = allocate<W>(kMost);
    for (W** vector : {&b1, &b2, &db1, &db2}) *vector = allocate<W>(1 << 20);
    for (float** saved : {&pooled, &hidden, &gates}) *saved = allocate<float>(kMost);
  }
  template <typename Call>
  void attach(Call& call, const Block& k, DType dtype) const {
    call.w1 = TensorView(w1, dtype, kGpu, {k.r, k.c});
    call.w2 = TensorView(w2, dtype, kGpu, {k.c, k.r});
    call.pooled = TensorView(pooled, DType::f32, kGpu, {k.n, k.c});
    call.hidden = TensorView(hidden, DType::f32, kGpu, {k.n, k.r});
    call.gates = TensorView(gates, DType::f32, kGpu, {k.n, k.c});
  }
};

template <typename W>
class Experiment {
 public:
  explicit Experiment(DType weights) : weights_(weights) {
    check_cuda(cudaStreamCreate(&stream_), "creating a stream");
    for (__half** pool : {&x_, &dy_, &y_, &dx_}) *pool = allocate<__half>(kPool / 2);
    worst_ = allocate<float>(2);
    std::uint64_t keep = ~0ull;
    cudaMemPool_t pool{};
    check_cuda(cudaDeviceGetDefaultMemPool(&pool, 0), "finding the memory pool");
    check_cuda(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep), "keeping");
    fill<<<1024, 256, 0, stream_>>>(x_, kPool / 2, 1.f, 1, 0.5f);
    fill<<<1024, 256, 0, stream_>>>(dy_, kPool / 2, 1.f, 2, 0.1f);
  }

  bool fits(const Block& k) const {
    return 2 * bytes(k) <= kPool && k.r * k.c <= Small<W>::kMost && k.n * k.c <= Small<W>::kMost &&
           k.n * k.r <= Small<W>::kMost;
  }

  void run(const Block& k) {
    const float scale = 2.f;
    fill_small(k, scale);
    const DeviceLimits& limits = limits_of(kGpu);
    const int weight_bytes = sizeof(W);
    std::string chosen[2];
    for (const Candidate& each : explain(context(), forward(k, 0, mine_, ""))) {
      if (each.chosen) chosen[0] = each.name;
    }
    for (const Candidate& each : explain(context(), backward(k, 0, mine_, ""))) {
      if (each.chosen) chosen[1] = each.name;
    }
    const double gigabytes = static_cast<double>(bytes(k)) * 1e-9;
    for (const std::string name : {"batched", "cluster", "two_pass", "general"}) {
      double forward_us = NAN, both_us = NAN, model[2] = {NAN, NAN};
      std::string wrong;
      if (!takes(forward(k, 0, mine_, name)) || !takes(backward(k, 0, mine_, name))) continue;
      if (name != "general") wrong = check(k, name);
      const int replays = name == "general" ? 2 : 5;
      forward_us = lab::time_us(
          stream_, kCalls, [&](int i) { squeeze_excite(context(), forward(k, i, mine_, name)); },
          replays);
      both_us = lab::time_us(
          stream_, kCalls,
          [&](int i) {
            squeeze_excite(context(), forward(k, i, mine_, name));
            squeeze_excite(context(), backward(k, i, mine_, name));
          },
          replays);
      for (const bool back : {false, true}) {
        const BatchedProblem p{k.n, k.c, k.side * k.side, k.r, weight_bytes, back};
        if (name == "batched") {
          model[back] = expected_batched_time(p, limits.l2_cache, limits.multiprocessors);
        } else if (name == "two_pass") {
          model[back] = expected_two_pass_time(p, limits.l2_cache);
        } else if (name == "cluster") {
          model[back] = back ? cluster_expected_time(context(), backward(k, 0, mine_, name))
                             : cluster_expected_time(context(), forward(k, 0, mine_, name));
        }
      }
      std::printf(
          "%4lld %4lld %4lld %3lld %-8s fwd %7.1f (floor %6.1f) f+b %7.1f (floor %6.1f) model "
          "%6.1f "
          "%6.1f%s%s%s\n",
          static_cast<long long>(k.n), static_cast<long long>(k.c), static_cast<long long>(k.r),
          static_cast<long long>(k.side), name.c_str(), forward_us, 2 * gigabytes / 4.26e-3,
          both_us, 5 * gigabytes / 4.26e-3, model[0], model[0] + model[1],
          name == chosen[0] ? " CHOSEN-fwd" : "", name == chosen[1] ? " CHOSEN-bwd" : "",
          wrong.c_str());
      std::fflush(stdout);
    }
  }

 private:
  Context context() const { return {.device = kGpu, .stream = stream_}; }
  static std::int64_t bytes(const Block& k) { return 2 * k.n * k.c * k.side * k.side; }

  /// Buffer i of rotating ones, of together three times L2 at least.
  __half* part(__half* pool, const Block& k, int i) const {
    const std::int64_t elements = bytes(k) / 2, most = kPool / bytes(k);
    const std::int64_t sets = std::min(most, 3 * limits_of(kGpu).l2_cache / bytes(k) + 1);
    return pool + i % sets * elements;
  }

  SqueezeExciteForward forward(const Block& k, int i, const Small<W>& small,
                               std::string_view name) const {
    SqueezeExciteForward call;
    small.attach(call, k, weights_);
    call.b1 = TensorView(small.b1, weights_, kGpu, {k.r});
    call.b2 = TensorView(small.b2, weights_, kGpu, {k.c});
    call.x = image(part(x_, k, i), k);
    call.y = image(part(y_, k, i), k);
    call.implementation = name;
    return call;
  }

  SqueezeExciteBackward backward(const Block& k, int i, const Small<W>& small,
                                 std::string_view name) const {
    SqueezeExciteBackward call;
    small.attach(call, k, weights_);
    call.x = image(part(x_, k, i), k);
    call.dy = image(part(dy_, k, i), k);
    call.dx = image(part(dx_, k, i), k);
    call.dw1 = TensorView(small.dw1, weights_, kGpu, {k.r, k.c});
    call.db1 = TensorView(small.db1, weights_, kGpu, {k.r});
    call.dw2 = TensorView(small.dw2, weights_, kGpu, {k.c, k.r});
    call.db2 = TensorView(small.db2, weights_, kGpu, {k.c});
    call.implementation = name;
    return call;
  }

  template <typename Call>
  bool takes(const Call& call) const {
    try {
      explain(context(), call);
    } catch (const Error&) {
      return false;
    }
    return true;
  }

  void fill_small(const Block& k, float scale) {
    for (const Small<W>* small : {&mine_, &right_}) {
      const auto matrix = [&](W* data, std::int64_t fan_in, unsigned seed) {
        fill<<<512, 256, 0, stream_>>>(data, k.r * k.c, scale / std::sqrt(float(fan_in)), seed);
      };
      matrix(small->w1, k.c, 3);
      matrix(small->w2, k.r, 4);
      fill<<<16, 256, 0, stream_>>>(small->b1, k.r, 0.5f, 5);
      fill<<<16, 256, 0, stream_>>>(small->b2, k.c, 0.5f, 6);
    }
  }

  /// " WRONG ..." with every output whose largest difference is too large for its largest value.
  std::string check(const Block& k, const std::string& name) {
    // The right result has the second buffer of y and dx, from the same x and dy.
    SqueezeExciteForward f = forward(k, 0, right_, "general");
    SqueezeExciteBackward b = backward(k, 0, right_, "general");
    f.y = image(y_ + bytes(k) / 2, k);
    b.dx = image(dx_ + bytes(k) / 2, k);
    squeeze_excite(context(), f);
    squeeze_excite(context(), b);
    const SqueezeExciteForward my_f = forward(k, 0, mine_, name);
    const SqueezeExciteBackward my_b = backward(k, 0, mine_, name);
    for (const TensorView* out : {&my_f.y, &my_f.pooled, &my_f.hidden, &my_f.gates, &my_b.dx,
                                  &my_b.dw1, &my_b.db1, &my_b.dw2, &my_b.db2}) {
      check_cuda(cudaMemsetAsync(out->data, 0xff, out->numel() * size_of(out->dtype), stream_),
                 "poisoning");
    }
    squeeze_excite(context(), my_f);
    squeeze_excite(context(), my_b);
    std::string wrong;
    const auto differ = [&](const char* what, const TensorView& mine, const TensorView& right) {
      check_cuda(cudaMemsetAsync(worst_, 0, 8, stream_), "clearing");
      if (mine.dtype == DType::f16) {
        compare<<<512, 256, 0, stream_>>>(static_cast<const __half*>(mine.data),
                                          static_cast<const __half*>(right.data), mine.numel(),
                                          worst_);
      } else {
        compare<<<512, 256, 0, stream_>>>(static_cast<const float*>(mine.data),
                                          static_cast<const float*>(right.data), mine.numel(),
                                          worst_);
      }
      float worst[2];
      check_cuda(cudaMemcpyAsync(worst, worst_, 8, cudaMemcpyDeviceToHost, stream_), "reading");
      check_cuda(cudaStreamSynchronize(stream_), name.c_str());
      const float limit = mine.dtype == DType::f16 ? 1.5e-3f : 3e-5f;
      if (worst[0] <= limit * worst[1]) return;
      char text[64];
      std::snprintf(text, sizeof text, " %s %.1e of %.1e", what, worst[0], worst[1]);
      wrong += text;
    };
    differ("y", my_f.y, f.y);
    differ("pooled", my_f.pooled, f.pooled);
    differ("hidden", my_f.hidden, f.hidden);
    differ("gates", my_f.gates, f.gates);
    differ("dx", my_b.dx, b.dx);
    differ("dw1", my_b.dw1, b.dw1);
    differ("db1", my_b.db1, b.db1);
    differ("dw2", my_b.dw2, b.dw2);
    differ("db2", my_b.db2, b.db2);
    return wrong.empty() ? wrong : " WRONG" + wrong;
  }

  DType weights_;
  cudaStream_t stream_{};
  __half *x_, *dy_, *y_, *dx_;
  float* worst_;
  Small<W> mine_, right_;
};

template <typename W>
void run_all(const std::vector<Block>& blocks, DType weights) {
  const auto start = std::chrono::steady_clock::now();
  Experiment<W> experiment(weights);
  int done = 0;
  for (const Block& block : blocks) {
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
    if (passed.count() > kSeconds) break;
    if (experiment.fits(block)) experiment.run(block);
    ++done;
  }
  std::printf("%d of %zu blocks\n", done, blocks.size());
}

}  // namespace

int main(int argc, char** argv) {
  bool half = false, from_stdin = false;
  for (int i = 1; i < argc; ++i) {
    half = half || argv[i] == std::string("half");
    from_stdin = from_stdin || argv[i] == std::string("-");
  }
  std::vector<Block> blocks(std::begin(kBlocks), std::end(kBlocks));
  if (from_stdin) {
    blocks.clear();
    for (Block k{}; std::cin >> k.n >> k.c >> k.r >> k.side;) blocks.push_back(k);
  }
  std::printf("fp16 images, channels-last, %s weights, microseconds\n", half ? "fp16" : "float32");
  if (half) {
    run_all<__half>(blocks, DType::f16);
  } else {
    run_all<float>(blocks, DType::f32);
  }
}
