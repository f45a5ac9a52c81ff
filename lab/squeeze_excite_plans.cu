// Laboratory: times the cluster kernels under many plans, and the two-pass and general kernels, for
// EfficientNet-B4's blocks (batch 32, float16, channels-last) and other shapes. Each result is
// first compared with the general kernel's. Cold L2: buffers rotate. Not shipped.
//
//   cmake --preset core -DFUSEWISE_LAB=ON && cmake --build --preset core
//   build/core/lab/squeeze_excite_plans

#include <cuda_fp16.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda/cuda_error.h"
#include "cuda/device.h"
#include "cuda/squeeze_excite/cluster.cuh"
#include "cuda/squeeze_excite/general.cuh"
#include "cuda/squeeze_excite/two_pass.cuh"
#include "fill.cuh"
#include "fusewise/squeeze_excite.h"
#include "timing.h"

using namespace fusewise;
using namespace fusewise::cuda;
using lab::time_us;

namespace {

constexpr std::int64_t kPool = std::int64_t{1} << 30;  // bytes for each of x, dy, out
constexpr Device kGpu{DeviceType::cuda, 0};

__global__ void difference(const unsigned char* a, const unsigned char* b, std::int64_t count,
                           bool half, float* worst) {
  float mine = 0;
  for (std::int64_t i = blockIdx.x * std::int64_t{256} + threadIdx.x; i < count;
       i += gridDim.x * std::int64_t{256}) {
    const float x = half ? __half2float(reinterpret_cast<const __half*>(a)[i])
                         : reinterpret_cast<const float*>(a)[i];
    const float y = half ? __half2float(reinterpret_cast<const __half*>(b)[i])
                         : reinterpret_cast<const float*>(b)[i];
    const float d = fabsf(x - y);
    mine = d <= mine ? mine : d;  // keeps NaN
  }
  if (!(mine <= 0)) atomicMax(reinterpret_cast<int*>(worst), __float_as_int(mine));
}

__global__ void copy_kernel(const uint4* in, uint4* out, std::int64_t count) {
#pragma unroll 4
  for (std::int64_t i = blockIdx.x * std::int64_t{512} + threadIdx.x; i < count;
       i += gridDim.x * std::int64_t{512}) {
    out[i] = in[i];
  }
}

struct Case {
  const char* name;
  std::int64_t n, c, r, side;
  int count;
  DType dtype;
  bool planar;
};

}  // namespace

int main(int argc, char** argv) {
  // Optional arguments: run only this case and this plan.
  const std::string only_case = argc > 1 ? argv[1] : "", only_plan = argc > 2 ? argv[2] : "";
  const std::vector<Case> cases = {
      {"48x190", 32, 48, 12, 190, 1, DType::f16, false},
      {"24x190", 32, 24, 6, 190, 1, DType::f16, false},
      {"144x95", 32, 144, 6, 95, 1, DType::f16, false},
      {"192x95", 32, 192, 8, 95, 3, DType::f16, false},
      {"192x48", 32, 192, 8, 48, 1, DType::f16, false},
      {"336x48", 32, 336, 14, 48, 3, DType::f16, false},
      {"336x24", 32, 336, 14, 24, 1, DType::f16, false},
      {"672x24", 32, 672, 28, 24, 6, DType::f16, false},
      {"960x24", 32, 960, 40, 24, 5, DType::f16, false},
      {"960x12", 32, 960, 40, 12, 1, DType::f16, false},
      {"1632x12", 32, 1632, 68, 12, 8, DType::f16, false},
      {"2688x12", 32, 2688, 112, 12, 1, DType::f16, false},
      {"b1 192x95", 1, 192, 8, 95, 0, DType::f16, false},
      {"b1 672x24", 1, 672, 28, 24, 0, DType::f16, false},
      {"b1 1632x12", 1, 1632, 68, 12, 0, DType::f16, false},
      {"b4 48x190", 4, 48, 12, 190, 0, DType::f16, false},
      {"b4 336x48", 4, 336, 14, 48, 0, DType::f16, false},
      {"b4 960x24", 4, 960, 40, 24, 0, DType::f16, false},
      {"b8 192x95", 8, 192, 8, 95, 0, DType::f16, false},
      {"b8 2688x12", 8, 2688, 112, 12, 0, DType::f16, false},
      {"b16 960x24", 16, 960, 40, 24, 0, DType::f16, false},
      {"b128 192x48", 128, 192, 8, 48, 0, DType::f16, false},
      {"b128 672x24", 128, 672, 28, 24, 0, DType::f16, false},
      {"b256 1152x7", 256, 1152, 48, 7, 0, DType::f16, false},
      {"b256 480x14", 256, 480, 20, 14, 0, DType::f16, false},
      {"b32 192x48 fp32", 32, 192, 8, 48, 0, DType::f32, false},
      {"b32 960x12 fp32", 32, 960, 40, 12, 0, DType::f32, false},
      {"b16 256x56 fp32 nchw", 16, 256, 16, 56, 0, DType::f32, true},
      {"b32 512x28 nchw", 32, 512, 32, 28, 0, DType::f16, true},
      {"b64 256x56 nchw", 64, 256, 16, 56, 0, DType::f16, true},
      {"b4 64x112 nchw", 4, 64, 16, 112, 0, DType::f16, true},
      {"64x112 fp32 nchw", 32, 64, 16, 112, 0, DType::f32, true},
      {"672x24 nchw", 32, 672, 28, 24, 0, DType::f16, true},
      {"1632x12 nchw", 32, 1632, 68, 12, 0, DType::f16, true},
  };
  const DeviceLimits limits = limits_of(kGpu);
  unsigned char *x, *dy, *out, *expected, *weights;
  float *saved, *worst;
  check_cuda(cudaMalloc(&x, kPool), "x");
  check_cuda(cudaMalloc(&dy, kPool), "dy");
  check_cuda(cudaMalloc(&out, kPool), "out");
  check_cuda(cudaMalloc(&expected, kPool), "expected");
  check_cuda(cudaMalloc(&weights, 64 << 20), "weights");
  check_cuda(cudaMalloc(&saved, 64 << 20), "saved");
  check_cuda(cudaMalloc(&worst, 4), "worst");
  cudaStream_t stream;
  cudaStreamCreate(&stream);
  std::uint64_t keep = ~0ull;
  cudaMemPool_t pool;
  cudaDeviceGetDefaultMemPool(&pool, 0);
  cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep);
  const Context context{.device = kGpu, .stream = stream};

  const double copy = time_us(stream, 10, [&](int) {
    copy_kernel<<<132 * 16, 512, 0, stream>>>(reinterpret_cast<const uint4*>(x),
                                              reinterpret_cast<uint4*>(out), kPool / 16);
  });
  const double bandwidth = 2.0 * kPool / copy * 1e-6;  // TB/s
  std::printf("copy %.2f TB/s, %d SMs, %d bytes shared\n", bandwidth, limits.multiprocessors,
              limits.block_shared_memory);

  for (int together = 1; together <= 2; ++together) {
    std::printf("clusters, %d a multiprocessor:", together);
    for (int size = 1; size <= kClusterMostBlocks; ++size) {
      std::printf(" %d", cluster_limits(kGpu).clusters[together - 1][size]);
    }
    std::printf("\n");
  }
  double total[2][3] = {};
  for (const Case& k : cases) {
    if (!only_case.empty() && only_case != k.name) continue;
    const bool half = k.dtype == DType::f16;
    const std::int64_t hw = k.side * k.side, count = k.n * k.c * hw,
                       bytes = count * size_of(k.dtype);
    if (half) {
      fill<<<1024, 256, 0, stream>>>(reinterpret_cast<__half*>(x), kPool / 2, 1.f, 1);
      fill<<<1024, 256, 0, stream>>>(reinterpret_cast<__half*>(dy), kPool / 2, 1.f, 2);
      fill<<<1024, 256, 0, stream>>>(reinterpret_cast<__half*>(weights), 16 << 20, .2f, 3);
    } else {
      fill<<<1024, 256, 0, stream>>>(reinterpret_cast<float*>(x), kPool / 4, 1.f, 1);
      fill<<<1024, 256, 0, stream>>>(reinterpret_cast<float*>(dy), kPool / 4, 1.f, 2);
      fill<<<1024, 256, 0, stream>>>(reinterpret_cast<float*>(weights), 8 << 20, .2f, 3);
    }
    const int sets = static_cast<int>(std::max<std::int64_t>(1, kPool / bytes));
    const std::int64_t e = size_of(k.dtype);
    unsigned char* w = weights;
    const auto take = [&](std::int64_t elements) {
      unsigned char* p = w;
      w += (elements * e + 255) / 256 * 256;
      return p;
    };
    void *w1 = take(k.r * k.c), *b1 = take(k.r), *w2 = take(k.r * k.c), *b2 = take(k.c);
    void *dw1 = take(k.r * k.c), *db1 = take(k.r), *dw2 = take(k.r * k.c), *db2 = take(k.c);
    const auto view = [&](void* base, int set) {
      void* p = static_cast<unsigned char*>(base) + (set % sets) * bytes;
      if (k.planar) return TensorView(p, k.dtype, kGpu, {k.n, k.c, k.side, k.side});
      return TensorView(p, k.dtype, kGpu, {k.n, k.c, k.side, k.side},
                        {k.c * hw, 1, k.side * k.c, k.c});
    };
    SqueezeExciteForward f;
    f.w1 = TensorView(w1, k.dtype, kGpu, {k.r, k.c});
    f.b1 = TensorView(b1, k.dtype, kGpu, {k.r});
    f.w2 = TensorView(w2, k.dtype, kGpu, {k.c, k.r});
    f.b2 = TensorView(b2, k.dtype, kGpu, {k.c});
    f.pooled = TensorView(saved, DType::f32, kGpu, {k.n, k.c});
    f.gates = TensorView(saved + k.n * k.c, DType::f32, kGpu, {k.n, k.c});
    f.hidden = TensorView(saved + 2 * k.n * k.c, DType::f32, kGpu, {k.n, k.r});
    SqueezeExciteBackward b;
    b.w1 = f.w1;
    b.w2 = f.w2;
    b.pooled = f.pooled;
    b.gates = f.gates;
    b.hidden = f.hidden;
    b.dw1 = TensorView(dw1, k.dtype, kGpu, {k.r, k.c});
    b.db1 = TensorView(db1, k.dtype, kGpu, {k.r});
    b.dw2 = TensorView(dw2, k.dtype, kGpu, {k.c, k.r});
    b.db2 = TensorView(db2, k.dtype, kGpu, {k.c});
    const auto forward = [&](int set, void* y) {
      SqueezeExciteForward call = f;
      call.x = view(x, set);
      call.y = view(y, set);
      return call;
    };
    const auto backward = [&](int set, void* dx) {
      SqueezeExciteBackward call = b;
      call.x = view(x, set);
      call.dy = view(dy, set);
      call.dx = view(dx, set);
      return call;
    };

    const auto measure = [&](bool back, double passes, auto&& make) {
      const double floor = passes * bytes / bandwidth * 1e-6;
      general_run(context, make(0, expected));
      check_cuda(cudaStreamSynchronize(stream), "general");
      const int calls = std::max(20, sets);
      const double general =
          time_us(stream, calls, [&](int i) { general_run(context, make(i, out)); });
      double best = 1e9;
      std::string best_name;
      std::printf("%-16s %s floor %6.1f general %6.1f |", k.name, back ? "bwd" : "fwd", floor,
                  general);
      std::vector<std::pair<double, std::string>> tried;
      const auto trial = [&](std::string name, auto&& run) {
        cudaMemsetAsync(out, 0xff, bytes, stream);
        cudaMemsetAsync(worst, 0, 4, stream);
        run(0);
        difference<<<512, 256, 0, stream>>>(expected, out, count, half, worst);
        float error = 0;
        cudaMemcpyAsync(&error, worst, 4, cudaMemcpyDeviceToHost, stream);
        check_cuda(cudaStreamSynchronize(stream), name.c_str());
        const double us = time_us(stream, calls, run);
        if (!(error < 2e-2)) name += "(WRONG " + std::to_string(error) + ")";
        tried.emplace_back(us, name);
        if (us < best) best = us, best_name = name;
      };
      const ClusterProblem problem{k.n,      k.c, hw, k.r, static_cast<int>(e), static_cast<int>(e),
                                   k.planar, back};
      for (int threads : {256, 512}) {
        for (int cs = 1; cs <= 16; ++cs) {
          for (int ps = 1; cs * ps <= 16; ++ps) {
            if (!k.planar && cs > 1 && k.c * e / cs < 64) continue;
            const auto plan = cluster_plan_with(problem, {cs, ps, threads}, cluster_limits(kGpu));
            if (!plan) continue;
            char text[96];
            std::snprintf(text, sizeof text, "C%dx%d/%d", cs, ps, threads);
            if (!only_plan.empty() && only_plan != text) continue;
            trial(text, [&](int i) { cluster_run(context, make(i, out), *plan); });
          }
        }
      }
      if (const auto plan = cluster_plan(problem, cluster_limits(kGpu))) {
        char text[96];
        std::snprintf(text, sizeof text, "CHOSEN C%dx%d/%d", plan->cut.channel_slices,
                      plan->cut.pixel_slices, plan->cut.threads);
        trial(text, [&](int i) { cluster_run(context, make(i, out)); });
      }
      trial("CHOSEN two_pass", [&](int i) { two_pass_run(context, make(i, out)); });
      std::sort(tried.begin(), tried.end());
      for (const auto& [us, name] : tried) {
        if (name.starts_with("CHOSEN")) std::printf(" %s %.1f |", name.c_str(), us);
      }
      std::printf(" best %6.1f (%3.0f%%)", best, 100 * floor / best);
      for (std::size_t i = 0; i < tried.size() && i < 8; ++i) {
        std::printf("  %s %.1f", tried[i].second.c_str(), tried[i].first);
      }
      if (!tried.empty())
        std::printf("  ... worst %s %.1f", tried.back().second.c_str(), tried.back().first);
      for (auto& [us, name] : tried) {
        std::fprintf(stderr, "%s,%s,%s,%.2f,%.2f\n", k.name, back ? "bwd" : "fwd", name.c_str(), us,
                     floor);
      }
      std::printf("\n");
      std::fflush(stdout);
      total[back][0] += k.count * floor;
      total[back][1] += k.count * general;
      total[back][2] += k.count * best;
    };
    measure(false, 2, forward);
    measure(true, 3, backward);
  }
  for (int back = 0; back < 2; ++back) {
    std::printf("32 blocks %s: floor %.0f general %.0f best %.0f us\n", back ? "bwd" : "fwd",
                total[back][0], total[back][1], total[back][2]);
  }
}
