#pragma once

// The autoencoder as plain loops in float64, forward and backward, and its tensors.

#include <algorithm>
#include <array>

#include "reference.h"

namespace fusewise::testing {

struct AutoencoderCase {
  AutoencoderSizes size;
  Index rows = 0;
  Tensor x, y, latent, score, projection, dy, dlatent, dscore, dx;
  std::array<Tensor, std::size(kAutoencoderWeights)> weights, gradients;

  static AutoencoderWeights views(const std::array<Tensor, std::size(kAutoencoderWeights)>& from) {
    AutoencoderWeights views;
    for (std::size_t i = 0; i < from.size(); ++i) {
      views.*kAutoencoderWeights[i].weight = from[i].view();
    }
    return views;
  }
  /// output: 0 the reconstruction, 1 the latent, 2 the score.
  AutoencoderForward forward(int output) const {
    AutoencoderForward call;
    call.x = x.view();
    call.weights = views(weights);
    if (output == 0) call.y = y.view();
    if (output == 1) call.latent = latent.view();
    if (output == 2) call.score = score.view();
    call.projection = projection.view();
    return call;
  }
  AutoencoderBackward backward(int output) const {
    AutoencoderBackward call;
    if (output == 0) call.dy = dy.view();
    if (output == 1) call.dlatent = dlatent.view();
    if (output == 2) call.dscore = dscore.view();
    call.x = x.view();
    call.weights = views(weights);
    call.projection = projection.view();
    call.dx = dx.view();
    call.gradients = views(gradients);
    return call;
  }
};

enum class RowLayout { dense, frames, spectrogram, sliced, every_second, misaligned };
constexpr RowLayout kRowLayouts[] = {RowLayout::dense,        RowLayout::frames,
                                     RowLayout::spectrogram,  RowLayout::sliced,
                                     RowLayout::every_second, RowLayout::misaligned};

inline Tensor rows_of(DType dtype, RowLayout layout, Index rows, Index frames, Index mels) {
  const Index width = frames * mels;
  switch (layout) {
    case RowLayout::dense:
      return Tensor(dtype, {rows, width});
    case RowLayout::frames:
      return Tensor(dtype, {rows, frames, mels});
    case RowLayout::spectrogram:  // the frames of a band side by side
      return Tensor(dtype, {rows, frames, mels}, {width, 1, frames});
    case RowLayout::sliced:
      return Tensor(dtype, {rows, width}, {width + 5, 1}, 3);
    case RowLayout::every_second:
      return Tensor(dtype, {rows, width}, {4 * width, 2});
    case RowLayout::misaligned:
      return Tensor(dtype, {rows, width}, {}, 1);
  }
  return {};
}

inline AutoencoderCase make_autoencoder(Index rows, AutoencoderSizes size, DType dtype,
                                        DType weight_dtype, RowLayout layout = RowLayout::dense) {
  AutoencoderCase call;
  call.size = size;
  call.rows = rows;
  const Index m = size.n_mels, f = size.frames, l = size.latent, s = size.slice_latent;
  const std::vector<Index> shapes[] = {{m}, {m},    {s, m}, {s},    {l, f * s}, {l},
                                       {l}, {l, l}, {l},    {m, s}, {m}};
  for (std::size_t i = 0; i < call.weights.size(); ++i) {
    const double scale = shapes[i].size() == 2 && i != 4 ? 1 / std::sqrt(shapes[i][1]) : 1;
    call.weights[i] = Tensor(weight_dtype, shapes[i]).fill(10 + i, scale);
    call.gradients[i] = Tensor(weight_dtype, shapes[i]);
  }
  call.x = rows_of(dtype, layout, rows, f, m).fill(1);
  call.y = rows_of(dtype, layout, rows, f, m);
  call.dy = rows_of(dtype, layout, rows, f, m).fill(2);
  call.dx = rows_of(dtype, layout, rows, f, m);
  call.latent = Tensor(dtype, {rows, l}, {l + 2, 1});
  call.dlatent = Tensor(dtype, {rows, l}, {1, rows + 1}).fill(3);
  call.projection = Tensor(sum_type(dtype), {rows, l});
  call.score = Tensor(sum_type(dtype), {rows}, {3});
  call.dscore = Tensor(sum_type(dtype), {rows}, {2}).fill(4);
  return call;
}

struct AutoencoderReference {
  std::vector<double> y, latent, score, dx;
  std::array<std::vector<double>, std::size(kAutoencoderWeights)> gradients;
};

/// All outputs, and the gradients from that of one of them.
inline AutoencoderReference autoencoder_reference(const AutoencoderCase& call, int output) {
  using Row = std::vector<double>;
  const Index m = call.size.n_mels, f = call.size.frames, l = call.size.latent,
              s = call.size.slice_latent, fs = f * s;
  std::array<Row, std::size(kAutoencoderWeights)> w;
  AutoencoderReference out;
  for (std::size_t i = 0; i < w.size(); ++i) {
    for (Index k = 0; k < call.weights[i].numel(); ++k) w[i].push_back(call.weights[i].get(k));
    out.gradients[i].assign(w[i].size(), 0);
  }
  auto& d = out.gradients;
  const Row &g = w[0], &b = w[1], &we = w[2], &be = w[3], &basis = w[4], &g2 = w[5], &b2 = w[6],
            &wm = w[7], &bm = w[8], &wd = w[9], &bd = w[10];
  Row unit(basis.size()), length(l), dunit(basis.size(), 0);
  for (Index i = 0; i < l; ++i) {
    double sum = 0;
    for (Index k = 0; k < fs; ++k) sum += basis[i * fs + k] * basis[i * fs + k];
    length[i] = std::max(std::sqrt(sum), 1e-12);
    for (Index k = 0; k < fs; ++k) unit[i * fs + k] = basis[i * fs + k] / length[i];
  }
  const auto normal = [](Row values, double& scale) {
    double mean = 0, variance = 0;
    for (const double v : values) mean += v / values.size();
    for (const double v : values) variance += (v - mean) * (v - mean) / values.size();
    scale = 1 / std::sqrt(variance + 1e-5);
    for (double& v : values) v = (v - mean) * scale;
    return values;
  };
  const auto normal_gradient = [](Row gradient, const Row& normalised, double scale) {
    double mean = 0, slope = 0;
    for (std::size_t i = 0; i < gradient.size(); ++i) {
      mean += gradient[i] / gradient.size();
      slope += gradient[i] * normalised[i] / gradient.size();
    }
    for (std::size_t i = 0; i < gradient.size(); ++i) {
      gradient[i] = (gradient[i] - mean - normalised[i] * slope) * scale;
    }
    return gradient;
  };
  const auto cdf = [](double z) { return 0.5 * std::erfc(-z / std::sqrt(2.0)); };
  const auto gelu = [&](double z) { return z * cdf(z); };
  const auto slope_of = [&](double z) {
    return cdf(z) + z * std::exp(-z * z / 2) / std::sqrt(2 * M_PI);
  };

  for (Index n = 0; n < call.rows; ++n) {
    std::vector<Row> xn(f), u(f, Row(s));
    Row scale(f), c(fs), p(l, 0), v(l), z(l), r(fs), y(f * m), off(f * m);
    for (Index i = 0; i < f; ++i) {
      Row x(m);
      for (Index k = 0; k < m; ++k) x[k] = call.x.get((n * f + i) * m + k);
      xn[i] = normal(x, scale[i]);
      for (Index j = 0; j < s; ++j) {
        u[i][j] = be[j];
        for (Index k = 0; k < m; ++k) u[i][j] += we[j * m + k] * (xn[i][k] * g[k] + b[k]);
        c[i * s + j] = gelu(u[i][j]);
      }
    }
    for (Index i = 0; i < l; ++i) {
      for (Index k = 0; k < fs; ++k) p[i] += unit[i * fs + k] * c[k];
    }
    double mid_scale;
    const Row pn = normal(p, mid_scale);
    for (Index i = 0; i < l; ++i) {
      v[i] = bm[i];
      for (Index k = 0; k < l; ++k) v[i] += wm[i * l + k] * (pn[k] * g2[k] + b2[k]);
      z[i] = gelu(v[i]);
    }
    for (Index k = 0; k < fs; ++k) {
      for (Index i = 0; i < l; ++i) r[k] += z[i] * unit[i * fs + k];
    }
    double score = 0;
    for (Index i = 0; i < f; ++i) {
      for (Index k = 0; k < m; ++k) {
        double& value = y[i * m + k];
        value = bd[k];
        for (Index j = 0; j < s; ++j) value += wd[k * s + j] * r[i * s + j];
        off[i * m + k] = value - call.x.get((n * f + i) * m + k);
        score += off[i * m + k] * off[i * m + k] / (f * m);
      }
    }
    out.y.insert(out.y.end(), y.begin(), y.end());
    out.latent.insert(out.latent.end(), z.begin(), z.end());
    out.score.push_back(score);

    Row dy(f * m, 0), dr(fs, 0), dz(l, 0), dv(l), dq(l, 0);
    for (Index k = 0; k < f * m; ++k) {
      if (output == 0) dy[k] = call.dy.get(n * f * m + k);
      if (output == 2) dy[k] = call.dscore.get(n) * 2 / (f * m) * off[k];
    }
    for (Index i = 0; i < l && output == 1; ++i) dz[i] = call.dlatent.get(n * l + i);
    for (Index i = 0; i < f; ++i) {
      for (Index k = 0; k < m; ++k) {
        d[10][k] += dy[i * m + k];
        for (Index j = 0; j < s; ++j) {
          d[9][k * s + j] += dy[i * m + k] * r[i * s + j];
          dr[i * s + j] += dy[i * m + k] * wd[k * s + j];
        }
      }
    }
    for (Index i = 0; i < l; ++i) {
      for (Index k = 0; k < fs; ++k) {
        dz[i] += dr[k] * unit[i * fs + k];
        dunit[i * fs + k] += dr[k] * z[i];
      }
      dv[i] = dz[i] * slope_of(v[i]);
      d[8][i] += dv[i];
      for (Index k = 0; k < l; ++k) {
        d[7][i * l + k] += dv[i] * (pn[k] * g2[k] + b2[k]);
        dq[k] += dv[i] * wm[i * l + k];
      }
    }
    for (Index i = 0; i < l; ++i) {
      d[5][i] += dq[i] * pn[i];
      d[6][i] += dq[i];
      dq[i] *= g2[i];
    }
    const Row dp = normal_gradient(dq, pn, mid_scale);
    for (Index i = 0; i < f; ++i) {
      Row dh(m, 0);
      for (Index j = 0; j < s; ++j) {
        double dc = 0;
        for (Index k = 0; k < l; ++k) {
          dc += dp[k] * unit[k * fs + i * s + j];
          dunit[k * fs + i * s + j] += dp[k] * c[i * s + j];
        }
        const double du = dc * slope_of(u[i][j]);
        d[3][j] += du;
        for (Index k = 0; k < m; ++k) {
          d[2][j * m + k] += du * (xn[i][k] * g[k] + b[k]);
          dh[k] += du * we[j * m + k];
        }
      }
      for (Index k = 0; k < m; ++k) {
        d[0][k] += dh[k] * xn[i][k];
        d[1][k] += dh[k];
        dh[k] *= g[k];
      }
      const Row dx = normal_gradient(dh, xn[i], scale[i]);
      for (Index k = 0; k < m; ++k) {
        out.dx.push_back(dx[k] - (output == 2 ? dy[i * m + k] : 0));
      }
    }
  }
  for (Index i = 0; i < l; ++i) {
    double along = 0;
    for (Index k = 0; k < fs && length[i] > 1e-12; ++k) {
      along += dunit[i * fs + k] * unit[i * fs + k];
    }
    for (Index k = 0; k < fs; ++k) {
      d[4][i * fs + k] = (dunit[i * fs + k] - unit[i * fs + k] * along) / length[i];
    }
  }
  return out;
}

/// Within some epsilons of the type of sums, of the tensor's largest value, and the rounding to its
/// own type. Sums behind sums: the loops of the Python tests hold every one to its own bound.
inline ::testing::AssertionResult near(const Tensor& got, const std::vector<double>& expected) {
  double largest = 0;
  for (const double value : expected) {
    if (std::isfinite(value)) largest = std::max(largest, std::fabs(value));
  }
  const double error = 200 * epsilon(sum_type(got.dtype())) * largest;
  Values bounded;
  for (const double value : expected) bounded.push_back({value, error});
  return all_close(got, bounded);
}

}  // namespace fusewise::testing
