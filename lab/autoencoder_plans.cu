// Laboratory: compares the autoencoder's kernels with an fp64 reference on the CPU, together with a
// plain fp32 evaluation of the same formula. Then times them by graph replay on rotating buffers.
// Not shipped.
//
//   cmake --preset core -DFUSEWISE_LAB=ON && cmake --build --preset core
//   build/core/lab/autoencoder_plans check|large|small|time|sizes|profile [DTYPE]
//
// DTYPE: f32, tf32, bf16, bf16/f32, f16 or f64.
//
// large: 65536 rows; small: few rows, for compute-sanitizer; sizes: models other than the default
// one, with the chosen kernel and with GEMMs; profile: one forward and one backward call, for ncu.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cuda/autoencoder/selection.h"
#include "cuda/autoencoder/warp_tile.cuh"
#include "cuda/cuda_error.h"
#include "cuda/device.h"
#include "cuda/vector.cuh"
#include "timing.h"

using namespace fusewise;
using namespace fusewise::cuda;
using namespace fusewise::cuda::autoencoder;
using lab::time_us;

namespace {

constexpr Device kGpu{DeviceType::cuda, 0};

/// Returns the same memory to every call, as a caching allocator does.
class Stack : public Allocator {
 public:
  explicit Stack(std::size_t bytes) { check_cuda(cudaMalloc(&base_, bytes), "scratch"); }
  void* allocate(std::size_t bytes) override {
    void* p = static_cast<unsigned char*>(base_) + used_;
    sizes_.push_back((bytes + 255) / 256 * 256);
    used_ += sizes_.back();
    return p;
  }
  void deallocate(void*) noexcept override {
    used_ -= sizes_.back();
    sizes_.pop_back();
  }

 private:
  void* base_ = nullptr;
  std::size_t used_ = 0;
  std::vector<std::size_t> sizes_;
};

// ---- reference

constexpr int kTensors = 11;
const char* const kNames[kTensors] = {"norm.weight", "norm.bias",  "encoder.weight", "encoder.bias",
                                      "basis",       "mid_norm.w", "mid_norm.b",     "mid.weight",
                                      "mid.bias",    "decoder.w",  "decoder.b"};

std::vector<int> tensor_sizes(const cuda::AutoencoderSizes& s) {
  const int m = s.n_mels, f = s.frames, l = s.latent, h = s.slice_latent;
  return {m, m, h * m, h, l * f * h, l, l, l * l, l, m * h, m};
}

template <typename A>
struct Results {
  std::vector<A> out, z, score, dx;
  std::vector<std::vector<A>> gradients;
};

template <typename A>
A phi(A v) {
  return A(0.5) * (A(1) + std::erf(v * A(0.70710678118654752440)));
}

/// Forward and, if gradients are passed, backward, in A throughout, directly from the definition.
template <typename A>
Results<A> reference(const cuda::AutoencoderSizes& s,
                     const std::vector<std::vector<float>>& parameters, const std::vector<float>& x,
                     const float* d_out, const float* d_z, const float* d_score) {
  const int M = s.n_mels, F = s.frames, L = s.latent, H = s.slice_latent, W = F * M, C = F * H;
  std::vector<std::vector<A>> p;
  for (const auto& v : parameters) p.emplace_back(v.begin(), v.end());
  std::vector<A> hat(L * C), norms(L);
  for (int l = 0; l < L; ++l) {
    A sum = 0;
    for (int k = 0; k < C; ++k) sum += p[4][l * C + k] * p[4][l * C + k];
    norms[l] = std::max(std::sqrt(sum), A(1e-12));
    for (int k = 0; k < C; ++k) hat[l * C + k] = p[4][l * C + k] / norms[l];
  }
  Results<A> r;
  r.out.resize(s.rows * W);
  r.z.resize(s.rows * L);
  r.score.resize(s.rows);
  r.dx.resize(s.rows * W);
  const auto sizes = tensor_sizes(s);
  const bool back = d_out || d_z || d_score;
  // Fixed strips, so that the result does not depend on the machine.
  const int strips =
      static_cast<int>(std::min<std::int64_t>(64, std::max<std::int64_t>(s.rows, 1)));
  std::vector<std::vector<std::vector<A>>> partial(strips);
  const auto strip = [&](int index) {
    auto& g = partial[index];
    for (int n : sizes) g.emplace_back(n, A(0));
    std::vector<A> d_hat(L * C, A(0));
    std::vector<A> xn(W), inv(F), pre(C), c(C), proj(L), pn(L), premid(L), z(L), rr(C), y(W), dy(W),
        dz(L), dr(C), dpm(L), dn(L), dproj(L), dc(C), dpre(C), dxn(M);
    const std::int64_t begin = s.rows * index / strips, end = s.rows * (index + 1) / strips;
    for (std::int64_t row = begin; row < end; ++row) {
      const float* xr = &x[row * W];
      for (int f = 0; f < F; ++f) {
        A mean = 0, var = 0;
        for (int m = 0; m < M; ++m) mean += A(xr[f * M + m]);
        mean /= M;
        for (int m = 0; m < M; ++m) var += (A(xr[f * M + m]) - mean) * (A(xr[f * M + m]) - mean);
        inv[f] = A(1) / std::sqrt(var / M + A(1e-5));
        for (int m = 0; m < M; ++m) xn[f * M + m] = (A(xr[f * M + m]) - mean) * inv[f];
        for (int h = 0; h < H; ++h) {
          A sum = p[3][h];
          for (int m = 0; m < M; ++m) sum += p[2][h * M + m] * (xn[f * M + m] * p[0][m] + p[1][m]);
          pre[f * H + h] = sum;
          c[f * H + h] = sum * phi(sum);
        }
      }
      A mean = 0, var = 0;
      for (int l = 0; l < L; ++l) {
        A sum = 0;
        for (int k = 0; k < C; ++k) sum += c[k] * hat[l * C + k];
        proj[l] = sum;
        mean += sum;
      }
      mean /= L;
      for (int l = 0; l < L; ++l) var += (proj[l] - mean) * (proj[l] - mean);
      const A minv = A(1) / std::sqrt(var / L + A(1e-5));
      for (int l = 0; l < L; ++l) pn[l] = (proj[l] - mean) * minv;
      for (int n = 0; n < L; ++n) {
        A sum = p[8][n];
        for (int l = 0; l < L; ++l) sum += p[7][n * L + l] * (pn[l] * p[5][l] + p[6][l]);
        premid[n] = sum;
        z[n] = sum * phi(sum);
        r.z[row * L + n] = z[n];
      }
      std::fill(rr.begin(), rr.end(), A(0));
      for (int l = 0; l < L; ++l) {
        for (int k = 0; k < C; ++k) rr[k] += z[l] * hat[l * C + k];
      }
      A squares = 0;
      for (int f = 0; f < F; ++f) {
        for (int m = 0; m < M; ++m) {
          A sum = p[10][m];
          for (int h = 0; h < H; ++h) sum += p[9][m * H + h] * rr[f * H + h];
          y[f * M + m] = sum;
          r.out[row * W + f * M + m] = sum;
          squares += (sum - A(xr[f * M + m])) * (sum - A(xr[f * M + m]));
        }
      }
      r.score[row] = squares / W;
      if (!back) continue;
      for (int i = 0; i < W; ++i) {
        const A d = d_score ? A(2) / W * A(d_score[row]) * (y[i] - A(xr[i])) : A(0);
        dy[i] = d + (d_out ? A(d_out[row * W + i]) : A(0));
        r.dx[row * W + i] = -d;
      }
      std::fill(dr.begin(), dr.end(), A(0));
      for (int f = 0; f < F; ++f) {
        for (int m = 0; m < M; ++m) {
          const A d = dy[f * M + m];
          g[10][m] += d;
          for (int h = 0; h < H; ++h) {
            g[9][m * H + h] += d * rr[f * H + h];
            dr[f * H + h] += d * p[9][m * H + h];
          }
        }
      }
      for (int l = 0; l < L; ++l) {
        A sum = d_z ? A(d_z[row * L + l]) : A(0);
        for (int k = 0; k < C; ++k) {
          sum += dr[k] * hat[l * C + k];
          d_hat[l * C + k] += dr[k] * z[l];
        }
        dz[l] = sum;
        const A v = premid[l];
        dpm[l] = sum * (phi(v) + v * A(0.39894228040143267794) * std::exp(A(-0.5) * v * v));
        g[8][l] += dpm[l];
      }
      A s1 = 0, s2 = 0;
      for (int l = 0; l < L; ++l) {
        A sum = 0;
        for (int n = 0; n < L; ++n) {
          sum += dpm[n] * p[7][n * L + l];
          g[7][n * L + l] += dpm[n] * (pn[l] * p[5][l] + p[6][l]);
        }
        g[5][l] += sum * pn[l];
        g[6][l] += sum;
        dn[l] = sum * p[5][l];
        s1 += dn[l];
        s2 += dn[l] * pn[l];
      }
      std::fill(dc.begin(), dc.end(), A(0));
      for (int l = 0; l < L; ++l) {
        dproj[l] = minv * (dn[l] - s1 / L - pn[l] * (s2 / L));
        for (int k = 0; k < C; ++k) {
          d_hat[l * C + k] += dproj[l] * c[k];
          dc[k] += dproj[l] * hat[l * C + k];
        }
      }
      for (int f = 0; f < F; ++f) {
        std::fill(dxn.begin(), dxn.end(), A(0));
        for (int h = 0; h < H; ++h) {
          const A v = pre[f * H + h];
          const A d =
              dc[f * H + h] * (phi(v) + v * A(0.39894228040143267794) * std::exp(A(-0.5) * v * v));
          g[3][h] += d;
          for (int m = 0; m < M; ++m) {
            g[2][h * M + m] += d * (xn[f * M + m] * p[0][m] + p[1][m]);
            dxn[m] += d * p[2][h * M + m];
          }
        }
        A t1 = 0, t2 = 0;
        for (int m = 0; m < M; ++m) {
          g[0][m] += dxn[m] * xn[f * M + m];
          g[1][m] += dxn[m];
          dxn[m] *= p[0][m];
          t1 += dxn[m];
          t2 += dxn[m] * xn[f * M + m];
        }
        for (int m = 0; m < M; ++m) {
          r.dx[row * W + f * M + m] += inv[f] * (dxn[m] - t1 / M - xn[f * M + m] * (t2 / M));
        }
      }
    }
    for (int k = 0; k < L * C; ++k) g[4][k] = d_hat[k];
  };
  const int threads = std::min<int>(strips, std::max(1u, std::thread::hardware_concurrency()));
  std::vector<std::thread> pool;
  for (int t = 0; t < threads; ++t) {
    pool.emplace_back([&, t] {
      for (int i = t; i < strips; i += threads) strip(i);
    });
  }
  for (auto& t : pool) t.join();
  for (int n : sizes) r.gradients.emplace_back(n, A(0));
  for (const auto& g : partial) {
    for (int i = 0; i < kTensors; ++i) {
      for (int k = 0; k < sizes[i]; ++k) r.gradients[i][k] += g.empty() ? A(0) : g[i][k];
    }
  }
  for (int l = 0; l < L; ++l) {
    A along = 0;
    for (int k = 0; k < C; ++k) along += r.gradients[4][l * C + k] * hat[l * C + k];
    if (norms[l] <= A(1e-12)) along = 0;
    for (int k = 0; k < C; ++k) {
      r.gradients[4][l * C + k] = (r.gradients[4][l * C + k] - along * hat[l * C + k]) / norms[l];
    }
  }
  return r;
}

// ---- data on the GPU

float rounded(float v, DType t) {
  if (t == DType::f16) return __half2float(__float2half_rn(v));
  if (t == DType::bf16) return __bfloat162float(__float2bfloat16_rn(v));
  return v;
}

void* upload(const std::vector<float>& values, DType t) {
  std::vector<unsigned char> bytes(values.size() * size_of(t));
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (t == DType::f32) reinterpret_cast<float*>(bytes.data())[i] = values[i];
    if (t == DType::f64) reinterpret_cast<double*>(bytes.data())[i] = values[i];
    if (t == DType::f16) reinterpret_cast<__half*>(bytes.data())[i] = __float2half_rn(values[i]);
    if (t == DType::bf16)
      reinterpret_cast<__nv_bfloat16*>(bytes.data())[i] = __float2bfloat16_rn(values[i]);
  }
  void* p = nullptr;
  check_cuda(cudaMalloc(&p, std::max<std::size_t>(bytes.size(), 16)), "data");
  check_cuda(cudaMemcpy(p, bytes.data(), bytes.size(), cudaMemcpyHostToDevice), "data");
  return p;
}

std::vector<double> download(const void* p, std::size_t count, DType t) {
  std::vector<unsigned char> bytes(count * size_of(t));
  check_cuda(cudaMemcpy(bytes.data(), p, bytes.size(), cudaMemcpyDeviceToHost), "result");
  std::vector<double> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    if (t == DType::f32) values[i] = reinterpret_cast<float*>(bytes.data())[i];
    if (t == DType::f64) values[i] = reinterpret_cast<double*>(bytes.data())[i];
    if (t == DType::f16) values[i] = __half2float(reinterpret_cast<__half*>(bytes.data())[i]);
    if (t == DType::bf16)
      values[i] = __bfloat162float(reinterpret_cast<__nv_bfloat16*>(bytes.data())[i]);
  }
  return values;
}

struct Mode {
  const char* name;
  DType dtype, parameters;
  bool tf32;
  double loose;  ///< relative to the largest value, if plain fp32 is no measure
};
const Mode kModes[] = {{"f32", DType::f32, DType::f32, false, 0},
                       {"tf32", DType::f32, DType::f32, true, 4e-3},
                       {"bf16", DType::bf16, DType::bf16, false, 4e-2},
                       {"bf16/f32", DType::bf16, DType::f32, false, 4e-2},
                       {"f16", DType::f16, DType::f16, false, 5e-3},
                       {"f64", DType::f64, DType::f64, false, 1e-12}};

int failures = 0;

struct Problem {
  cuda::AutoencoderSizes sizes;
  Mode mode;
  std::vector<std::vector<float>> parameters;
  std::vector<float> x, d_out, d_z, d_score;
  AutoencoderTensors<const void*> tensors;
  AutoencoderTensors<void*> gradients;
  void *gx, *g_dout, *g_dz, *g_dscore, *out, *z, *score, *dx;
  std::vector<void*> owned;

  Problem(cuda::AutoencoderSizes s, Mode m) : sizes(s), mode(m) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& v, std::size_t n, float scale, float shift, DType t) {
      v.resize(n);
      for (float& e : v) e = rounded(shift + scale * normal(random), t);
    };
    const auto counts = tensor_sizes(s);
    const float enc = 1.f / std::sqrt(float(s.n_mels)), mid = 1.f / std::sqrt(float(s.latent)),
                dec = 1.f / std::sqrt(float(s.slice_latent));
    const float scales[kTensors] = {.2f, .2f, enc, enc, .3f, .2f, .2f, mid, mid, dec, dec};
    const float shifts[kTensors] = {1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0};
    parameters.resize(kTensors);
    const void** in = reinterpret_cast<const void**>(&tensors);
    void** grad = reinterpret_cast<void**>(&gradients);
    for (int i = 0; i < kTensors; ++i) {
      fill(parameters[i], counts[i], scales[i], shifts[i], m.parameters);
      in[i] = keep(upload(parameters[i], m.parameters));
      grad[i] = keep(upload(parameters[i], m.parameters));
    }
    const std::size_t width = s.frames * s.n_mels, n = s.rows * width;
    fill(x, n, 2.f, -3.f, m.dtype);
    fill(d_out, n, 1.f, 0.f, m.dtype);
    fill(d_z, s.rows * s.latent, 1.f, 0.f, m.dtype);
    fill(d_score, s.rows, 1.f, 0.f, DType::f32);
    gx = keep(upload(x, m.dtype));
    g_dout = keep(upload(d_out, m.dtype));
    g_dz = keep(upload(d_z, m.dtype));
    g_dscore = keep(upload(d_score, score_type()));
    out = keep(upload(d_out, m.dtype));
    dx = keep(upload(d_out, m.dtype));
    z = keep(upload(d_z, m.dtype));
    score = keep(upload(d_score, score_type()));
  }
  ~Problem() {
    for (void* p : owned) cudaFree(p);
  }
  void* keep(void* p) {
    owned.push_back(p);
    return p;
  }
  DType score_type() const { return mode.dtype == DType::f64 ? DType::f64 : DType::f32; }

  AutoencoderForwardArguments forward() const {
    return {.sizes = sizes,
            .parameters = tensors,
            .dtype = mode.dtype,
            .parameter_dtype = mode.parameters,
            .tf32 = mode.tf32,
            .x = gx,
            .x_stride = sizes.frames * sizes.n_mels};
  }
  AutoencoderBackwardArguments backward() const {
    return {.sizes = sizes,
            .parameters = tensors,
            .gradients = gradients,
            .dtype = mode.dtype,
            .parameter_dtype = mode.parameters,
            .tf32 = mode.tf32,
            .x = gx,
            .x_stride = sizes.frames * sizes.n_mels,
            .dx = dx};
  }
  /// Prints the error of a result, in units of the allowed error.
  double judge(const void* got, DType type, const std::vector<double>& want,
               const std::vector<float>& plain) const {
    const auto values = download(got, want.size(), type);
    double error = 0, plain_error = 0, scale = 0;
    for (std::size_t i = 0; i < want.size(); ++i) {
      const double e = std::abs(values[i] - want[i]);
      error = !(e <= error) && !std::isnan(error) ? e : error;
      plain_error = std::max(plain_error, std::abs(double(plain[i]) - want[i]));
      scale = std::max(scale, std::abs(want[i]));
    }
    const double allowed =
        mode.loose > 0 ? mode.loose * scale + 1e-12 : 2 * plain_error + 4 * 1.1920929e-7 * scale;
    // The scale here is the largest value, not the larger sum of |terms|, so allow twice as much.
    if (!(error <= 2 * allowed)) ++failures;
    return error == 0 ? 0 : error / allowed;
  }
};

std::vector<unsigned char> bytes_of(const void* p, std::size_t n) {
  std::vector<unsigned char> b(n);
  check_cuda(cudaMemcpy(b.data(), p, n, cudaMemcpyDeviceToHost), "bytes");
  return b;
}

using Forward = std::function<void(const AutoencoderForwardArguments&)>;
using Backward = std::function<void(const AutoencoderBackwardArguments&)>;

void check_forward(const Problem& p, const char* name, const Results<double>& want,
                   const Results<float>& plain, const Forward& run) {
  const std::size_t n = p.x.size() * size_of(p.mode.dtype);
  const auto clear = [&] {
    cudaMemset(p.out, 0xff, n);
    cudaMemset(p.z, 0xff, p.d_z.size() * size_of(p.mode.dtype));
    cudaMemset(p.score, 0xff, p.sizes.rows * size_of(p.score_type()));
  };
  clear();
  auto call = p.forward();
  call.out = p.out;
  run(call);
  call.out = nullptr;
  call.z = p.z;
  run(call);
  call.z = nullptr;
  call.score = p.score;
  run(call);
  check_cuda(cudaDeviceSynchronize(), name);
  const double a = p.judge(p.out, p.mode.dtype, want.out, plain.out);
  const double b = p.judge(p.z, p.mode.dtype, want.z, plain.z);
  const double c = p.judge(p.score, p.score_type(), want.score, plain.score);
  const auto before = bytes_of(p.out, n);
  clear();
  call.out = p.out;
  call.z = p.z;
  run(call);
  check_cuda(cudaDeviceSynchronize(), name);
  const bool same = before == bytes_of(p.out, n);
  if (!same) ++failures;
  std::printf("  %-28s of allowed: out %.2f  z %.2f  score %.2f%s\n", name, a, b, c,
              same ? "" : "  NOT DETERMINISTIC");
}

void check_backward(const Problem& p, const char* name, const Backward& run,
                    const void* projection = nullptr, int sources = 4) {
  const auto sizes = tensor_sizes(p.sizes);
  for (int source = 0; source < sources; ++source) {
    auto call = p.backward();
    call.projection = projection;
    if (source == 0 || source == 3) call.d_out = p.g_dout;
    if (source == 1 || source == 3) call.d_score = p.g_dscore;
    if (source == 2 || source == 3) call.d_z = p.g_dz;
    const float* d_out = call.d_out ? p.d_out.data() : nullptr;
    const float* d_score = call.d_score ? p.d_score.data() : nullptr;
    const float* d_z = call.d_z ? p.d_z.data() : nullptr;
    const auto want = reference<double>(p.sizes, p.parameters, p.x, d_out, d_z, d_score);
    const auto plain = reference<float>(p.sizes, p.parameters, p.x, d_out, d_z, d_score);
    void* const* grad = reinterpret_cast<void* const*>(&p.gradients);
    for (int i = 0; i < kTensors; ++i) {
      cudaMemset(grad[i], 0xff, sizes[i] * size_of(p.mode.parameters));
    }
    cudaMemset(p.dx, 0xff, p.x.size() * size_of(p.mode.dtype));
    run(call);
    check_cuda(cudaDeviceSynchronize(), name);
    std::printf("  %-20s from %-7s dx %.2f", name,
                source == 0   ? "d_out"
                : source == 1 ? "d_score"
                : source == 2 ? "d_z"
                              : "all",
                p.judge(p.dx, p.mode.dtype, want.dx, plain.dx));
    std::vector<std::vector<unsigned char>> before;
    for (int i = 0; i < kTensors; ++i) {
      std::printf(" %s %.2f", kNames[i],
                  p.judge(grad[i], p.mode.parameters, want.gradients[i], plain.gradients[i]));
      before.push_back(bytes_of(grad[i], sizes[i] * size_of(p.mode.parameters)));
    }
    run(call);
    check_cuda(cudaDeviceSynchronize(), name);
    bool same = true;
    for (int i = 0; i < kTensors; ++i) {
      same = same && before[i] == bytes_of(grad[i], before[i].size());
    }
    if (!same) ++failures;
    std::printf("%s\n", same ? "" : "  NOT DETERMINISTIC");
  }
}

/// NaN or infinity in one value makes its whole row NaN, and no other.
void check_bad_row(const Problem& p, const char* name, float value, const Forward& run) {
  auto x = p.x;
  const int width = p.sizes.frames * p.sizes.n_mels;
  const std::int64_t bad = p.sizes.rows / 2;
  x[bad * width + width / 2] = value;
  void* gx = upload(x, p.mode.dtype);
  auto call = p.forward();
  call.x = gx;
  call.out = p.out;
  run(call);
  check_cuda(cudaDeviceSynchronize(), name);
  const auto out = download(p.out, p.x.size(), p.mode.dtype);
  std::int64_t missing = 0, spread = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const bool is = std::isnan(out[i]), should = static_cast<std::int64_t>(i / width) == bad;
    missing += should && !is;
    spread += is && !should;
  }
  if (missing + spread > 0) ++failures;
  std::printf("  %-28s row with %g: %lld values not NaN, %lld in other rows\n", name, value,
              static_cast<long long>(missing), static_cast<long long>(spread));
  cudaFree(gx);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "check";
  const std::string only = argc > 2 ? argv[2] : "";
  cudaStream_t stream;
  check_cuda(cudaStreamCreate(&stream), "stream");
  Stack stack(std::size_t{2} << 30);
  const Context context{.device = kGpu, .stream = stream, .allocator = &stack};
  const DeviceLimits& limits = limits_of(kGpu);
  const auto chosen = [&](const auto& call) { choose(limits, call).run(context, call); };
  const auto general = [&](const auto& call) { run_general(context, call); };
  const auto many_rows = [&](int warps) -> Forward {
    return [&, warps](const AutoencoderForwardArguments& call) {
      run_many_rows(context, call, warps);
    };
  };
  const auto block16 = [&](int warps) -> Forward {
    return
        [&, warps](const AutoencoderForwardArguments& call) { run_block16(context, call, warps); };
  };
  const auto warps_back = [&](BackwardPlan plan) -> Backward {
    return [&, plan](const AutoencoderBackwardArguments& call) { run_warps(context, call, plan); };
  };

  if (what == "check" || what == "large" || what == "small") {
    const bool small = what == "small";
    std::vector<cuda::AutoencoderSizes> cases = {{37, 64, 5, 32, 64},
                                                 {1, 64, 5, 32, 64},
                                                 {37, 20, 3, 7, 24},
                                                 {19, 65, 2, 33, 17},
                                                 {21, 128, 2, 64, 96}};
    if (what == "check") {
      for (int rows : {200, 512, 4096}) cases.push_back({rows, 64, 5, 32, 64});
    }
    if (what == "large") cases = {{65536, 64, 5, 32, 64}};
    for (const auto& sizes : cases) {
      for (const Mode& mode : kModes) {
        if (small && only.empty() && (mode.tf32 || mode.dtype == DType::f16)) continue;
        if (!only.empty() && only != mode.name) continue;
        if (sizes.rows > 1000 && mode.dtype != DType::f32) continue;
        std::printf("rows %lld, n_mels %d, frames %d, latent %d, slice %d, %s\n",
                    static_cast<long long>(sizes.rows), sizes.n_mels, sizes.frames, sizes.latent,
                    sizes.slice_latent, mode.name);
        const Problem p(sizes, mode);
        const auto want = reference<double>(sizes, p.parameters, p.x, nullptr, nullptr, nullptr);
        const auto plain = reference<float>(sizes, p.parameters, p.x, nullptr, nullptr, nullptr);
        if (kForwardKernels[2].declines(limits, p.forward()).empty()) {  // block16
          check_forward(p, "chosen", want, plain, chosen);
          if (sizes.rows > 10000) {
            // The reference takes long, so pass only one gradient.
            check_backward(p, "chosen", chosen, nullptr, 1);
            continue;
          }
          check_forward(p, "8 warps alone", want, plain, many_rows(8));
          check_forward(p, "8 warps together", want, plain, block16(8));
          check_forward(p, "5 warps together", want, plain, block16(5));
          for (float value : {NAN, INFINITY}) {
            check_bad_row(p, "chosen", value, chosen);
            check_bad_row(p, "8 warps together", value, block16(8));
          }
          check_backward(p, "chosen", chosen);
          void* kept = nullptr;
          check_cuda(cudaMalloc(&kept, sizes.rows * sizes.latent * 4), "projection");
          auto keeps = p.forward();
          keeps.projection = kept;
          chosen(keeps);
          check_backward(p, "projection kept", chosen, kept);
          if (sizes.rows < 1000) {
            general(keeps);
            check_backward(p, "kept by general", chosen, kept);
          }
          check_backward(p, "8 warps", warps_back({8, true}), kept);
          check_backward(p, "4 warps", warps_back({4, true}), kept, 1);
          cudaFree(kept);
        }
        if (sizes.rows < 1000) {
          check_forward(p, "general", want, plain, general);
          for (float value : {NAN, INFINITY}) check_bad_row(p, "general", value, general);
          check_backward(p, "general", general);
        }
        std::fflush(stdout);
      }
    }
    std::printf(failures == 0 ? "ALL RIGHT\n" : "%d WRONG\n", failures);
    return failures != 0;
  }

  if (what == "profile") {  // one forward and one backward call, for a profiler
    for (const Mode& mode : kModes) {
      if (only != mode.name) continue;
      const Problem p({65536, 64, 5, 32, 64}, mode);
      auto forward = p.forward();
      forward.out = p.out;
      auto backward = p.backward();
      backward.d_out = p.g_dout;
      void* kept = nullptr;
      check_cuda(cudaMalloc(&kept, 65536 * 32 * 4), "projection");
      forward.projection = kept;
      backward.projection = kept;
      chosen(forward);
      chosen(backward);
      check_cuda(cudaDeviceSynchronize(), "profile");
    }
    return 0;
  }

  if (what == "sizes") {
    for (const Mode& mode : kModes) {
      if (mode.dtype == DType::f64 || mode.parameters != mode.dtype) continue;
      if (!only.empty() && only != mode.name) continue;
      for (const cuda::AutoencoderSizes& sizes : {cuda::AutoencoderSizes{0, 40, 5, 16, 32},
                                                  {0, 64, 10, 32, 64},
                                                  {0, 64, 16, 32, 64},
                                                  {0, 80, 5, 32, 64},
                                                  {0, 128, 5, 32, 64},
                                                  {0, 128, 5, 64, 128},
                                                  {0, 128, 8, 64, 128}}) {
        for (std::int64_t rows : {64, 512, 4096, 16384, 65536}) {
          cuda::AutoencoderSizes little = sizes;
          little.rows = 16;
          const Problem p(little, mode);
          const std::int64_t bytes = rows * sizes.frames * sizes.n_mels * size_of(mode.dtype);
          void *x, *y, *d, *kept;
          for (void** each : {&x, &y, &d}) {
            check_cuda(cudaMalloc(each, bytes), "rows");
            check_cuda(cudaMemset(*each, 0x3c, bytes), "rows");
          }
          check_cuda(cudaMalloc(&kept, rows * sizes.latent * 4), "projection");
          check_cuda(cudaMemset(kept, 0x3c, rows * sizes.latent * 4), "projection");
          auto forward = p.forward();
          auto backward = p.backward();
          forward.sizes.rows = backward.sizes.rows = rows;
          forward.x = backward.x = x;
          forward.out = backward.dx = y;
          forward.projection = kept;
          backward.projection = kept;
          backward.d_out = d;
          std::printf("%-5s %3d mels %2d frames %2d %3d latent %6lld rows |", mode.name,
                      sizes.n_mels, sizes.frames, sizes.latent, sizes.slice_latent,
                      static_cast<long long>(rows));
          const auto show = [&](const char* name, const auto& call) {
            general(call);  // the vendor's library must initialise outside of a graph
            std::printf(" %s: %s %.1f, general %.1f |", name, choose(limits, call).name,
                        time_us(stream, 8, [&](int) { chosen(call); }),
                        time_us(stream, 8, [&](int) { general(call); }));
            std::fflush(stdout);
          };
          show("forward", forward);
          show("backward", backward);
          std::printf("\n");
          for (void* each : {x, y, d, kept}) cudaFree(each);
        }
      }
    }
    return 0;
  }

  for (const Mode& mode : kModes) {
    if (mode.dtype == DType::f64 || mode.parameters != mode.dtype) continue;
    if (!only.empty() && only != mode.name) continue;
    for (std::int64_t rows : {1, 32, 512, 4096, 8192, 12288, 16384, 65536}) {
      const cuda::AutoencoderSizes sizes{rows, 64, 5, 32, 64};
      cuda::AutoencoderSizes little = sizes;
      little.rows = 16;
      const Problem p(little, mode);
      const std::int64_t bytes = rows * 320 * size_of(mode.dtype);
      const int sets = static_cast<int>(std::clamp<std::int64_t>((200 << 20) / bytes + 1, 2, 20));
      unsigned char *x, *y, *d;
      check_cuda(cudaMalloc(&x, bytes * sets), "x");
      check_cuda(cudaMalloc(&y, bytes * sets), "y");
      check_cuda(cudaMalloc(&d, bytes * sets), "d");
      float *small, *d_score, *kept;
      check_cuda(cudaMalloc(&kept, rows * 32 * 4), "projection");
      cudaMemset(kept, 0, rows * 32 * 4);
      void* small_memory;
      check_cuda(cudaMalloc(&small_memory, 1 << 20), "packed");
      check_cuda(cudaMalloc(&small, rows * 32 * 4), "z");
      check_cuda(cudaMalloc(&d_score, rows * 4), "d_score");
      // The same random rows, repeated.
      std::vector<unsigned char> pattern(std::size_t{4096} * 320 * size_of(mode.dtype));
      {
        cuda::AutoencoderSizes s = sizes;
        s.rows = 4096;
        static Problem* source = nullptr;
        static const char* source_mode = "";
        if (source_mode != std::string(mode.name)) {
          delete source;
          source = new Problem(s, mode);
          source_mode = mode.name;
        }
        for (std::int64_t at = 0; at < bytes * sets; at += pattern.size()) {
          const std::size_t n = std::min<std::int64_t>(pattern.size(), bytes * sets - at);
          cudaMemcpy(x + at, source->gx, n, cudaMemcpyDeviceToDevice);
          cudaMemcpy(d + at, source->g_dout, n, cudaMemcpyDeviceToDevice);
        }
        cudaMemset(d_score, 0, rows * 4);
      }
      const auto forward = [&](int set, int flavour) {
        auto call = p.forward();
        call.sizes = sizes;
        call.x = x + bytes * (set % sets);
        if (flavour == 0) call.out = y + bytes * (set % sets);
        if (flavour == 1) call.z = small;
        if (flavour == 2) call.score = small;
        if (flavour == 3) call.out = y + bytes * (set % sets), call.projection = kept;
        return call;
      };
      const auto backward = [&](int set, int source) {
        auto call = p.backward();
        call.sizes = sizes;
        call.x = x + bytes * (set % sets);
        call.dx = y + bytes * (set % sets);
        if (source == 0) call.d_out = d + bytes * (set % sets);
        if (source == 1) call.d_score = d_score;
        call.projection = kept;
        return call;
      };
      std::printf("%-5s %6lld rows |", mode.name, static_cast<long long>(rows));
      const auto show = [&](const char* name, const std::function<void(int)>& run) {
        std::printf(" %s %.2f |", name, time_us(stream, 20, run));
        std::fflush(stdout);
      };
      show("out", [&](int i) { chosen(forward(i, 0)); });
      show("z", [&](int i) { chosen(forward(i, 1)); });
      show("score", [&](int i) { chosen(forward(i, 2)); });
      show("back", [&](int i) { chosen(backward(i, 0)); });
      show("back(score)", [&](int i) { chosen(backward(i, 1)); });
      show("f+b", [&](int i) {
        chosen(forward(i, 3));
        chosen(backward(i, 0));
      });
      std::printf("\n    plans:");
      const auto show_warps = [&](const char* name, int warps, const auto& run) {
        show((std::string(name) + " " + std::to_string(warps) + "w").c_str(), run);
      };
      for (int warps : {16, 8}) {
        show_warps("many_rows", warps, [&](int i) { many_rows(warps)(forward(i, 0)); });
      }
      for (int warps : {10, 5}) {
        show_warps("block16", warps, [&](int i) { block16(warps)(forward(i, 0)); });
      }
      for (int warps : {4, 8}) {
        show_warps("back", warps, [&](int i) { warps_back({warps, true})(backward(i, 0)); });
      }
      show("pack", [&](int) {
        const auto kind = autoencoder::packed_kind(mode.dtype, mode.tf32);
        autoencoder::pack_weights(context, sizes, p.tensors, mode.parameters, mode.dtype, kind,
                                  false, autoencoder::packed_layout(sizes, false), small_memory);
      });
      show("back, nothing kept", [&](int i) {
        auto call = backward(i, 0);
        call.projection = nullptr;
        chosen(call);
      });
      show("back, dx only", [&](int i) {
        auto call = backward(i, 0);
        call.gradients = {};
        chosen(call);
      });
      if (rows <= 4096) show("general", [&](int i) { general(forward(i, 0)); });
      std::printf("\n");
      cudaFree(x);
      cudaFree(y);
      cudaFree(d);
      cudaFree(small);
      cudaFree(d_score);
      cudaFree(kept);
      cudaFree(small_memory);
    }
  }
}
