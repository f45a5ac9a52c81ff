// Laboratory: the elementwise kernels of linear + activation compared with a plain copy, by graph
// replay. "warm": on one set of buffers, if these fit the cache. "cold": on rotating buffers. Not
// shipped.
//
//   cmake --preset core -DFUSEWISE_LAB=ON && cmake --build --preset core
//   build/core/lab/linear_passes

#include <algorithm>
#include <cstdio>
#include <functional>
#include <vector>

#include "cuda/cuda_error.h"
#include "cuda/linear_act/passes.cuh"
#include "cuda/vector.cuh"
#include "timing.h"

namespace fusewise::cuda {
namespace {

constexpr Device kGpu{DeviceType::cuda, 0};
constexpr std::size_t kRoom = std::size_t{6} << 30;  // a quarter for each operand

/// Returns the same memory to every call, as a caching allocator does.
class Same : public Allocator {
 public:
  Same() { check_cuda(cudaMalloc(&memory_, 1 << 28), "scratch"); }
  void* allocate(std::size_t) override { return memory_; }
  void deallocate(void*) noexcept override {}

 private:
  void* memory_ = nullptr;
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

__global__ void __launch_bounds__(256) copy(const uint4* from, uint4* to, std::size_t count) {
  const std::size_t i = blockIdx.x * std::size_t{256} + threadIdx.x;
  if (i < count) to[i] = from[i];
}

template <typename T>
void measure(const Context& context, unsigned char* memory, DType dtype, std::int64_t rows,
             std::int64_t columns, bool cold) {
  const std::size_t bytes = rows * columns * sizeof(T);
  const int sets = cold ? std::clamp<int>((std::size_t{1} << 30) / bytes, 1, 64) : 1;
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const auto at = [&](int operand, int i) {
    return memory + operand * (kRoom / 4) + i % sets * bytes;
  };
  const auto matrix = [&](int operand, int i) {
    return TensorView(at(operand, i), dtype, kGpu, {rows, columns});
  };
  const auto bits = [&](int i) {
    return TensorView(at(3, i), DType::u8, kGpu, {rows, bit_bytes(columns)});
  };
  const TensorView db(memory + kRoom - (1 << 20), dtype, kGpu, {columns});
  const auto run = [&](const char* name, const std::function<void(int)>& call) {
    call(0);
    std::printf("%lldx%lld %s %s %s %.2f\n", static_cast<long long>(rows),
                static_cast<long long>(columns), sizeof(T) == 4 ? "float32" : "bfloat16",
                cold ? "cold" : "warm", name, lab::time_us(stream, std::max(sets, 20), call));
  };
  run("copy", [&](int i) {
    copy<<<(bytes / 16 + 255) / 256, 256, 0, stream>>>(
        reinterpret_cast<uint4*>(at(0, i)), reinterpret_cast<uint4*>(at(1, i)), bytes / 16);
  });
  run("gelu",
      [&](int i) { activate(context, {matrix(0, i), matrix(1, i), {}, Activation::gelu}); });
  run("silu",
      [&](int i) { activate(context, {matrix(0, i), matrix(1, i), {}, Activation::silu}); });
  run("bits", [&](int i) { activate(context, {matrix(0, i), {}, bits(i), Activation::relu}); });
  run("backward-relu", [&](int i) {
    differentiate(context, {matrix(0, i), bits(i), matrix(1, i), db, Activation::relu});
  });
  run("backward-gelu", [&](int i) {
    differentiate(context, {matrix(0, i), matrix(1, i), matrix(2, i), db, Activation::gelu});
  });
}

template <typename T>
void measure_all(const Context& context, unsigned char* memory, DType dtype) {
  fill<<<1024, 256>>>(reinterpret_cast<T*>(memory), kRoom / sizeof(T));
  check_cuda(cudaDeviceSynchronize(), "filling");
  for (auto [rows, columns] : {std::pair{256, 512}, {1024, 2048}, {8192, 4096}, {65536, 1024}}) {
    if (rows <= 1024) measure<T>(context, memory, dtype, rows, columns, false);
    measure<T>(context, memory, dtype, rows, columns, true);
  }
}

}  // namespace
}  // namespace fusewise::cuda

int main() {
  using namespace fusewise;
  using namespace fusewise::cuda;
  Same scratch;
  unsigned char* memory;
  cudaStream_t stream;
  check_cuda(cudaMalloc(&memory, kRoom), "buffers");
  check_cuda(cudaStreamCreate(&stream), "stream");
  Context context;
  context.device = kGpu;
  context.stream = stream;
  context.allocator = &scratch;
  measure_all<float>(context, memory, DType::f32);
  measure_all<__nv_bfloat16>(context, memory, DType::bf16);
}
