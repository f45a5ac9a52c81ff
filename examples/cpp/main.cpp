// Squeeze-and-Excitation from C++, on the CPU, with no Python and no torch.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "fusewise/fusewise.h"

int main() {
  using fusewise::DType, fusewise::TensorView;
  const fusewise::Device cpu{};
  const int n = 2, c = 3, r = 1, h = 4, w = 4;

  // With W1 = 1/3, W2 = 0 and b2 = 0 every gate is sigmoid(0) = 1/2, so y must be x / 2.
  std::vector<float> x(n * c * h * w), y(x.size()), w1(r * c, 1.0f / 3), w2(c * r, 0.0f);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i);

  fusewise::SqueezeExciteForward call;
  call.x = TensorView(x.data(), DType::f32, cpu, {n, c, h, w});
  call.w1 = TensorView(w1.data(), DType::f32, cpu, {r, c});
  call.w2 = TensorView(w2.data(), DType::f32, cpu, {c, r});
  call.y = TensorView(y.data(), DType::f32, cpu, {n, c, h, w});
  fusewise::squeeze_excite({.device = cpu}, call);

  float worst = 0;
  for (std::size_t i = 0; i < x.size(); ++i) worst = std::max(worst, std::abs(y[i] - x[i] / 2));
  std::printf("largest difference from x / 2: %g\n", worst);
  return worst == 0 ? 0 : 1;
}
