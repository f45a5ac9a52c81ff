// Laboratory: every implementation of BatchNorm + activation on the layers of ResNet-50 (batch 64)
// and on some of EfficientNet-B4 (batch 32) in training, by graph replay on rotating buffers. Not
// shipped.
//
//   cmake --preset core -DFUSEWISE_LAB=ON && cmake --build --preset core
//   build/core/lab/batch_norm_layers [f16|bf16|f32] [nchw] [profile]
//
// Prints microseconds, "-" where an implementation declines, and the sum over ResNet-50 of those
// that are chosen. profile: one call of each instead, for ncu.

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/cuda_error.h"
#include "cuda/vector.cuh"
#include "fusewise/fusewise.h"
#include "timing.h"

namespace fusewise::cuda {
namespace {

constexpr Device kGpu{DeviceType::cuda, 0};
constexpr std::size_t kRoom = std::size_t{4} << 30;  // for each operand
constexpr int kOperands = 4;
constexpr const char* kEntries[] = {"columns", "resident", "planes", "two_pass", "general", ""};

struct Layer {
  std::int64_t n, c, side;
  Activation activation;
  bool residual;
  int count;  // in ResNet-50
};
constexpr Activation kNone = Activation::identity, kRelu = Activation::relu,
                     kSilu = Activation::silu;
constexpr Layer kLayers[] = {
    {64, 64, 112, kRelu, false, 1},  {64, 64, 56, kRelu, false, 6},
    {64, 256, 56, kRelu, true, 3},   {64, 256, 56, kNone, false, 1},
    {64, 128, 56, kRelu, false, 1},  {64, 128, 28, kRelu, false, 7},
    {64, 512, 28, kRelu, true, 4},   {64, 512, 28, kNone, false, 1},
    {64, 256, 28, kRelu, false, 1},  {64, 256, 14, kRelu, false, 11},
    {64, 1024, 14, kRelu, true, 6},  {64, 1024, 14, kNone, false, 1},
    {64, 512, 14, kRelu, false, 1},  {64, 512, 7, kRelu, false, 5},
    {64, 2048, 7, kRelu, true, 3},   {64, 2048, 7, kNone, false, 1},
    {32, 144, 190, kSilu, false, 0}, {32, 192, 95, kSilu, false, 0},
    {32, 672, 24, kSilu, false, 0},  {32, 1632, 12, kSilu, false, 0},
};

/// Returns the same memory to every call, as a caching allocator does.
class Stack : public Allocator {
 public:
  Stack() { check_cuda(cudaMalloc(&base_, 1 << 28), "scratch"); }
  void* allocate(std::size_t bytes) override {
    starts_.push_back(used_);
    used_ += (bytes + 255) / 256 * 256;
    return static_cast<unsigned char*>(base_) + starts_.back();
  }
  void deallocate(void*) noexcept override {
    used_ = starts_.back();
    starts_.pop_back();
  }

 private:
  void* base_ = nullptr;
  std::size_t used_ = 0;
  std::vector<std::size_t> starts_;
};

/// Values between -4 and 4.
template <typename T>
__global__ void fill(T* to, std::size_t count) {
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count; i += step) {
    unsigned h = static_cast<unsigned>(i) * 2654435761u;
    h = (h ^ h >> 15) * 2246822519u;
    h ^= h >> 13;
    to[i] = from_accumulator<T>(((h & 0xffff) + (h >> 16)) / 16384.0f - 4.0f);
  }
}

struct Bench {
  Context context;
  unsigned char* memory;
  float* channels;  // small tensors
  DType dtype;
  bool planar, profile;

  TensorView channel(const Layer& l, int which) const {
    return {channels + which * 4096, DType::f32, kGpu, {l.c}};
  }
  TensorView image(const Layer& l, int operand, int set) const {
    const std::int64_t bytes = l.n * l.c * l.side * l.side * size_of(dtype);
    unsigned char* at = memory + operand * kRoom + set * bytes;
    if (planar) return {at, dtype, kGpu, {l.n, l.c, l.side, l.side}};
    return {
        at, dtype, kGpu, {l.n, l.c, l.side, l.side}, {l.side * l.side * l.c, 1, l.side * l.c, l.c}};
  }
  TensorView bits(const Layer& l, int set) const {
    const std::int64_t bytes = (l.n * l.c * l.side * l.side + 7) / 8;
    return {memory + kOperands * kRoom + set * bytes, DType::u8, kGpu, {bytes}};
  }

  BatchNormActForward forward(const Layer& l, int set) const {
    BatchNormActForward call;
    call.x = image(l, 0, set), call.y = image(l, 1, set);
    if (l.residual) call.residual = image(l, 2, set), call.passes = bits(l, set);
    call.weight = channel(l, 0), call.bias = channel(l, 1);
    call.running_mean = channel(l, 2), call.running_var = channel(l, 3);
    call.mean = channel(l, 4), call.inverse_deviation = channel(l, 5);
    call.activation = l.activation;
    call.training = true;
    return call;
  }
  BatchNormActBackward backward(const Layer& l, int set) const {
    BatchNormActBackward call;
    call.dy = image(l, 1, set), call.x = image(l, 0, set), call.dx = image(l, 2, set);
    if (l.residual) call.dresidual = image(l, 3, set), call.passes = bits(l, set);
    call.weight = channel(l, 0), call.bias = channel(l, 1);
    call.mean = channel(l, 4), call.inverse_deviation = channel(l, 5);
    call.dweight = channel(l, 6), call.dbias = channel(l, 7);
    call.activation = l.activation;
    call.training = true;
    return call;
  }

  /// Microseconds of a call, or -1 if the implementation declines.
  template <typename Make>
  double time(const Layer& l, const char* name, const Make& make) const {
    const std::int64_t bytes = l.n * l.c * l.side * l.side * size_of(dtype);
    const int sets = static_cast<int>(std::clamp<std::int64_t>((1 << 30) / bytes, 2, 64));
    const auto run = [&](int i) {
      auto call = make(l, i % sets);
      call.implementation = name;
      batch_norm_act(context, call);
    };
    try {
      run(0);
    } catch (const Error&) {
      return -1;
    }
    if (profile) return 0;
    return lab::time_us(static_cast<cudaStream_t>(context.stream), std::max(sets, 20), run);
  }

  void run() const {
    double total = 0;
    for (const Layer& l : kLayers) {
      std::printf("%lldx%lldx%lld^2 %s%s", static_cast<long long>(l.n), static_cast<long long>(l.c),
                  static_cast<long long>(l.side), name_of(l.activation), l.residual ? " add" : "");
      double chosen = 0;
      for (const bool back : {false, true}) {
        std::printf("  %s", back ? "backward" : "forward");
        for (const char* name : kEntries) {
          const double us =
              back ? time(l, name, [&](const Layer& of, int set) { return backward(of, set); })
                   : time(l, name, [&](const Layer& of, int set) { return forward(of, set); });
          if (*name == 0) chosen += us;
          std::printf(us < 0 ? " %s -" : " %s %.1f", *name == 0 ? "chosen" : name, us);
        }
      }
      std::printf("\n");
      total += l.count * chosen;
    }
    std::printf("ResNet-50, forward + backward of the chosen ones: %.2f ms\n", total / 1000);
  }
};

}  // namespace
}  // namespace fusewise::cuda

int main(int count, char** words) {
  using namespace fusewise;
  using namespace fusewise::cuda;
  Bench bench{.context = {}, .dtype = DType::f16, .planar = false, .profile = false};
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    if (word == "bf16") bench.dtype = DType::bf16;
    if (word == "f32") bench.dtype = DType::f32;
    bench.planar = bench.planar || word == "nchw";
    bench.profile = bench.profile || word == "profile";
  }
  Stack scratch;
  cudaStream_t stream;
  check_cuda(cudaMalloc(&bench.memory, (kOperands + 1) * kRoom), "buffers");
  check_cuda(cudaMalloc(&bench.channels, 8 * 4096 * sizeof(float)), "channels");
  check_cuda(cudaStreamCreate(&stream), "stream");
  bench.context.device = kGpu;
  bench.context.stream = stream;
  bench.context.allocator = &scratch;
  fill<<<16, 256>>>(bench.channels, 8 * 4096);
  dispatch_short_dtype(bench.dtype, [&]<typename T>(T) {
    fill<<<1024, 256>>>(reinterpret_cast<T*>(bench.memory), kOperands * kRoom / sizeof(T));
  });
  check_cuda(cudaDeviceSynchronize(), "filling");
  bench.run();
  check_cuda(cudaDeviceSynchronize(), "running");
}
