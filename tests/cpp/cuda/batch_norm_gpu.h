#pragma once

// BatchNorm + activation on the GPU: its tensors there, and every implementation against plain
// loops in float64.

#include <map>
#include <memory>
#include <set>

#include "cuda/device.h"
#include "gpu.h"
#include "reference.h"

namespace fusewise::testing {

class CudaBatchNorm : public NeedsGpu {};

inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
inline constexpr const char* kEntries[] = {"columns", "resident", "planes", "two_pass", "general"};

struct Case {
  Index s = 0, n = 2, c = 16, h = 5, w = 8;  // s = 0: no dimension for streams
  DType data = DType::f32, weights = DType::f32;
  Layout layout = Layout::channels_last, other = Layout::channels_last;
  Activation activation = Activation::relu;
  bool residual = false, training = true, running = true, affine = true;
  bool blanked = false, group = false;
  double momentum = 0.1, mean = 0.5, deviation = 2;

  Index streams() const { return std::max<Index>(s, 1); }
  Index pixels() const { return h * w; }
  bool own() const { return !group && (training || !running); }
  bool keeps_bits() const {
    return residual && (activation == Activation::relu || activation == Activation::relu6);
  }
  std::string name() const {
    std::string text = "S, N, C, H, W = ";
    for (const Index size : {s, n, c, h, w}) text += std::to_string(size) + ", ";
    text += std::string(name_of(data)) + ", weights " + name_of(weights) + ", layouts " +
            std::to_string(static_cast<int>(layout)) + " and " +
            std::to_string(static_cast<int>(other)) + ", " + name_of(activation);
    for (const auto& [flag, word] : {std::pair{residual, "residual"},
                                     {training, "training"},
                                     {running, "running"},
                                     {affine, "affine"},
                                     {blanked, "blanked"},
                                     {group, "group"}}) {
      if (flag) text += std::string(", ") + word;
    }
    return text;
  }
};

/// All tensors of a case, on the host. Those with images have [S * N, C, H, W].
struct Problem {
  Case is;
  Tensor x, residual, y, dy, dx, dresidual;
  Tensor weight, bias, running_mean, running_var, dweight, dbias;
  Tensor group, backward_group, mean, inverse, blanked, passes, tracked;

  std::vector<Tensor*> all() {
    return {&x,    &residual,     &y,           &dy,      &dx,     &dresidual, &weight,
            &bias, &running_mean, &running_var, &dweight, &dbias,  &group,     &backward_group,
            &mean, &inverse,      &blanked,     &passes,  &tracked};
  }
  static std::uint8_t* bytes(const Tensor& t) { return static_cast<std::uint8_t*>(t.view().data); }
  bool is_blank(Index sample) const { return blanked.defined() && bytes(blanked)[sample] != 0; }
  /// The bit of an element, by its place in row-major order.
  Index bit(Index i) const {
    const TensorView view = x.view();
    if (is.c == 1 || view.strides[1] != 1) return i;
    const Index pixel = i % is.pixels(), c = i / is.pixels() % is.c, n = i / is.pixels() / is.c;
    return (n * is.pixels() + pixel) * is.c + c;
  }
  bool passes_at(Index i) const { return bytes(passes)[bit(i) / 8] >> bit(i) % 8 & 1; }
};

inline double activation_of(Activation kind, double v) {
  if (kind == Activation::identity) return v;
  if (kind == Activation::relu6) return v < 0 ? 0 : v > 6 ? 6 : v;
  return activate(kind, v);
}
inline Bounded gradient_of(Activation kind, double v, Bounded d, double eps) {
  if (kind == Activation::identity) return d;
  if (kind == Activation::relu6) return v <= 0 || v >= 6 ? Bounded{} : d;
  return activation_gradient(kind, v, d, 4 * eps);
}

inline Problem make(const Case& is) {
  Problem p;
  p.is = is;
  const DType sums = sum_type(is.data);
  const Index samples = is.streams() * is.n, channels = is.streams() * is.c;
  const auto images = [&](Layout layout) {
    return image(is.data, layout, samples, is.c, is.h, is.w);
  };
  p.x = images(is.layout).fill(1, is.deviation);
  for (Index i = 0; i < p.x.numel(); ++i) p.x.set(i, p.x.get(i) + is.mean);
  p.y = images(is.other);
  p.dy = images(is.other).fill(2);
  p.dx = images(is.layout);
  if (is.residual) {
    p.residual = images(is.other).fill(3);
    p.dresidual = images(is.other);
  }
  if (is.affine) {
    p.weight = Tensor(is.weights, {channels}).fill(4);
    p.bias = Tensor(is.weights, {channels}).fill(5);
    p.dweight = Tensor(is.weights, {channels});
    p.dbias = Tensor(is.weights, {channels});
  }
  if (is.running) {
    p.running_mean = Tensor(is.weights, {channels}).fill(6);
    p.running_var = Tensor(is.weights, {channels}).fill(7);
    for (Index i = 0; i < channels; ++i) {
      p.running_var.set(i, std::fabs(p.running_var.get(i)) + 0.5);
    }
  }
  p.tracked = Tensor(DType::i64, {1});
  const Index calls = 3;
  std::memcpy(Problem::bytes(p.tracked), &calls, sizeof(calls));
  p.mean = Tensor(sums, {channels});
  p.inverse = Tensor(sums, {channels});
  if (is.keeps_bits()) p.passes = Tensor(DType::u8, {(p.x.numel() + 7) / 8});
  if (is.blanked) {
    p.blanked = Tensor(DType::b8, {samples});
    for (Index i = 0; i < samples; ++i) {
      const bool blank = i % 3 == 0 || (is.s > 1 && i / is.n == 1);  // all of the second stream
      Problem::bytes(p.blanked)[i] = blank;
      for (Index k = 0; blank && k < is.c * is.pixels(); ++k) {
        const Index at = i * is.c * is.pixels() + k;
        p.x.set(at, kNaN);
        p.dy.set(at, kNaN);
        if (is.residual) p.residual.set(at, kNaN);
      }
    }
  }
  if (is.group) {
    p.group = Tensor(sums, {is.streams(), 3, is.c}).fill(8);
    p.backward_group = Tensor(sums, {is.streams(), 3, is.c}).fill(9);
    for (Index i = 0; i < p.group.numel(); ++i) {
      if (i / is.c % 3 == 0) {
        p.group.set(i, 1000);
        p.backward_group.set(i, 1000);
      }
      if (i / is.c % 3 == 2) p.group.set(i, std::fabs(p.group.get(i)) + 0.5);
    }
  }
  return p;
}

// The operator in float64. -----------------------------------------------------------------------

struct Expected {
  Values y, mean, inverse, running_mean, running_var;
  std::vector<Bounded> v;  // of every element, with its error
};

/// Calls body(n, element) for the elements of a channel of a stream.
template <typename Body>
inline void each(const Problem& p, Index s, Index c, const Body& body) {
  for (Index n = s * p.is.n; n < (s + 1) * p.is.n; ++n) {
    for (Index k = 0; k < p.is.pixels(); ++k) body(n, (n * p.is.c + c) * p.is.pixels() + k);
  }
}

inline Expected forward_reference(const Problem& p) {
  const double eps = epsilon(sum_type(p.is.data));
  Expected out;
  out.y.resize(p.x.numel());
  out.v.resize(p.x.numel());
  for (Index at = 0; at < p.mean.numel(); ++at) {
    const Index s = at / p.is.c, c = at % p.is.c;
    double count = 0, magnitude = 0;
    long double sum = 0, variance = 0;  // the float64 kernels are held against these
    Bounded mean, var;
    if (p.is.group) {
      const Index from = 3 * s * p.is.c + c;
      count = p.group.get(from);
      mean = {p.group.get(from + p.is.c), 0};
      var = {p.group.get(from + 2 * p.is.c), 0};
    } else if (p.is.own()) {
      each(p, s, c, [&](Index n, Index i) {
        if (p.is_blank(n)) return;
        ++count;
        sum += p.x.get(i);
        magnitude += std::fabs(p.x.get(i));
      });
      const double all = std::max(count, 1.0);
      mean = {static_cast<double>(sum / all), 4 * eps * magnitude / all};
      each(p, s, c, [&](Index n, Index i) {
        if (!p.is_blank(n)) variance += std::pow(p.x.get(i) - mean.value, 2);
      });
      var = {static_cast<double>(variance / all), 32 * eps * static_cast<double>(variance / all)};
    } else {
      mean = {p.running_mean.get(at), 0};
      var = {p.running_var.get(at), 0};
    }
    const double inverse = 1 / std::sqrt(var.value + 1e-5);
    const double inverse_error = inverse * (var.error / (var.value + 1e-5) + 4 * eps);
    out.mean.push_back(mean);
    out.inverse.push_back({inverse, inverse_error});
    if (p.is.running) {
      const double old_mean = p.running_mean.get(at), old_var = p.running_var.get(at);
      const bool updates = p.is.training && count > 1;
      const double factor = !updates ? 0 : p.is.momentum < 0 ? 1.0 / 4 : p.is.momentum;
      const double unbiased = updates ? var.value * count / (count - 1) : 0;
      const auto updated = [&](double old, double now, double error) {
        return Bounded{old + factor * (now - old),
                       2 * factor * error + 4 * eps * factor * (std::fabs(old) + std::fabs(now))};
      };
      out.running_mean.push_back(updated(old_mean, mean.value, mean.error));
      out.running_var.push_back(updated(old_var, unbiased, var.error));
    }
    const double weight = p.is.affine ? p.weight.get(at) : 1,
                 bias = p.is.affine ? p.bias.get(at) : 0;
    each(p, s, c, [&](Index n, Index i) {
      if (p.is_blank(n)) return;
      const double centred = p.x.get(i) - mean.value,
                   residual = p.is.residual ? p.residual.get(i) : 0;
      const double v = centred * inverse * weight + bias + residual;
      const double scale =
          std::fabs(centred * inverse * weight) + std::fabs(bias) + std::fabs(residual);
      const double error =
          std::fabs(weight) * (std::fabs(centred) * inverse_error + inverse * mean.error) +
          8 * eps * scale;
      out.v[i] = {v, error};
      const double y = activation_of(p.is.activation, v);
      out.y[i] = {y, 1.5 * error + 16 * eps * std::fabs(v)};
    });
  }
  return out;
}

struct ExpectedGradients {
  Values dx, dresidual, dweight, dbias;
};

/// From what forward saved, as backward itself.
inline ExpectedGradients backward_reference(const Problem& p) {
  const double eps = epsilon(sum_type(p.is.data));
  ExpectedGradients out;
  out.dx.resize(p.x.numel());
  out.dresidual.resize(p.x.numel());
  for (Index at = 0; at < p.mean.numel(); ++at) {
    const Index s = at / p.is.c, c = at % p.is.c;
    const double mean = p.mean.get(at), inverse = p.inverse.get(at);
    const double weight = p.is.affine ? p.weight.get(at) : 1,
                 bias = p.is.affine ? p.bias.get(at) : 0;
    const auto gradient = [&](Index i) -> Bounded {
      const double d = p.dy.get(i);
      if (p.is.keeps_bits()) return {p.passes_at(i) ? d : 0, 0};
      double v = (p.x.get(i) - mean) * inverse * weight, scale = std::fabs(v) + std::fabs(bias);
      v += bias;
      if (p.is.residual) {
        v += p.residual.get(i);
        scale += std::fabs(p.residual.get(i));
      }
      Bounded result = gradient_of(p.is.activation, v, {d, 0}, eps);
      if (p.is.activation == Activation::silu || p.is.activation == Activation::hardswish) {
        result.error += 8 * eps * scale * std::fabs(d);
      }
      return result;
    };
    Sum dbias, dweight;
    double count = 0;
    each(p, s, c, [&](Index n, Index i) {
      if (p.is_blank(n)) return;
      ++count;
      const Bounded d = gradient(i);
      dbias.add(1, d);
      dweight.add((p.x.get(i) - mean) * inverse, d);
    });
    Bounded all_dbias = dbias.done(eps, 8), all_dweight = dweight.done(eps, 8);
    out.dbias.push_back(all_dbias);
    out.dweight.push_back(all_dweight);
    if (p.is.group) {
      const Index from = 3 * s * p.is.c + c;
      count = p.backward_group.get(from);
      all_dbias = {p.backward_group.get(from + p.is.c), 0};
      all_dweight = {p.backward_group.get(from + 2 * p.is.c), 0};
    }
    each(p, s, c, [&](Index n, Index i) {
      if (p.is_blank(n)) return;
      const Bounded d = gradient(i);
      Sum dx;
      dx.add(weight * inverse, d);
      if (p.is.training) {
        dx.add(-weight * inverse / count, all_dbias);
        dx.add(-weight * inverse / count * (p.x.get(i) - mean) * inverse, all_dweight);
      }
      out.dx[i] = dx.done(eps, 8);
      out.dresidual[i] = d;
    });
  }
  return out;
}

/// How far below 6 a value may be that is stored as 6: half the distance to the next number.
inline double rounds_to_6(DType dtype) {
  return dtype == DType::bf16 ? 0x1p-6 : dtype == DType::f16 ? 0x1p-9 : 0;
}

/// What forward would save, and no gradient where an error in v could change the side of a kink.
inline void save(Problem& p, const Expected& expected) {
  for (Index i = 0; i < p.mean.numel(); ++i) {
    p.mean.set(i, expected.mean[i].value);
    p.inverse.set(i, expected.inverse[i].value);
  }
  if (p.passes.defined()) std::fill_n(Problem::bytes(p.passes), p.passes.numel(), 0);
  for (Index i = 0; i < p.x.numel(); ++i) {
    if (p.is_blank(i / p.is.c / p.is.pixels())) continue;
    const double v = expected.v[i].value, near = expected.v[i].error + 1e-4;
    for (const double kink : {0.0, 6.0, 3.0, -3.0}) {
      const double rounded = kink == 6 ? rounds_to_6(p.is.data) : 0;
      if (std::fabs(v - kink) <= near + rounded) p.dy.set(i, 0);
    }
    const bool passes = gradient_of(p.is.activation, v, {1, 0}, 0).value != 0;
    if (p.passes.defined() && passes) Problem::bytes(p.passes)[p.bit(i) / 8] |= 1 << p.bit(i) % 8;
  }
}

// On the GPU. ------------------------------------------------------------------------------------

class OnGpu {
 public:
  explicit OnGpu(Problem& host) : host_(host) {
    for (Tensor* t : host.all()) {
      if (t->memory().empty()) continue;
      void* memory = nullptr;
      check(cudaMalloc(&memory, t->memory().size()));
      memory_[t].reset(memory);
      check(cudaMemcpy(memory, t->memory().data(), t->memory().size(), cudaMemcpyHostToDevice));
    }
    check(cudaDeviceSynchronize());
  }
  /// Brings everything back.
  void fetch() {
    check(cudaDeviceSynchronize());
    for (auto& [tensor, memory] : memory_) {
      check(cudaMemcpy(tensor->memory().data(), memory.get(), tensor->memory().size(),
                       cudaMemcpyDeviceToHost));
    }
  }

  BatchNormActForward forward() {
    Problem& p = host_;
    BatchNormActForward call;
    call.x = images(p.x), call.y = images(p.y), call.residual = images(p.residual);
    call.weight = channels(p.weight), call.bias = channels(p.bias);
    call.running_mean = channels(p.running_mean), call.running_var = channels(p.running_var);
    call.mean = channels(p.mean), call.inverse_deviation = channels(p.inverse);
    call.blanked = rows(p.blanked, {p.is.n});
    call.group = rows(p.group, {3, p.is.c});
    call.passes = moved(p.passes);
    call.num_batches_tracked = moved(p.tracked);
    call.num_batches_tracked.rank = 0;
    call.activation = p.is.activation, call.training = p.is.training;
    call.momentum = p.is.momentum;
    return call;
  }
  BatchNormActBackward backward() {
    Problem& p = host_;
    BatchNormActBackward call;
    call.x = images(p.x), call.dy = images(p.dy);
    if (!p.is.keeps_bits()) call.residual = images(p.residual);
    call.dx = images(p.dx), call.dresidual = images(p.dresidual);
    call.weight = channels(p.weight), call.bias = channels(p.bias);
    call.dweight = channels(p.dweight), call.dbias = channels(p.dbias);
    call.mean = channels(p.mean), call.inverse_deviation = channels(p.inverse);
    call.blanked = rows(p.blanked, {p.is.n});
    call.group = rows(p.backward_group, {3, p.is.c});
    call.passes = moved(p.passes);
    call.activation = p.is.activation, call.training = p.is.training;
    return call;
  }

 private:
  TensorView moved(Tensor& t) const {
    TensorView view = t.view();
    if (!view.defined()) return view;
    view.device = kGpu;
    const auto found = memory_.find(&t);
    const auto offset = Problem::bytes(t) - t.memory().data();
    view.data = static_cast<std::uint8_t*>(found->second.get()) + offset;
    return view;
  }
  TensorView images(Tensor& t) const {
    TensorView view = moved(t);
    if (!view.defined() || host_.is.s == 0) return view;
    for (int d = 4; d > 0; --d)
      view.sizes[d] = view.sizes[d - 1], view.strides[d] = view.strides[d - 1];
    view.rank = 5;
    view.sizes[0] = host_.is.s;
    view.sizes[1] = host_.is.n;
    view.strides[0] = host_.is.n * view.strides[1];
    return view;
  }
  /// A dense tensor of these sizes, with the streams before them if the case has any.
  TensorView rows(Tensor& t, std::vector<Index> sizes) const {
    TensorView view = moved(t);
    if (!view.defined()) return view;
    if (host_.is.s > 0) sizes.insert(sizes.begin(), host_.is.s);
    view.rank = static_cast<int>(sizes.size());
    Index stride = 1;
    for (int d = view.rank - 1; d >= 0; --d) {
      view.sizes[d] = sizes[d];
      view.strides[d] = stride;
      stride *= sizes[d];
    }
    return view;
  }
  TensorView channels(Tensor& t) const { return rows(t, {host_.is.c}); }

  struct Free {
    void operator()(void* memory) const { static_cast<void>(cudaFree(memory)); }
  };
  Problem& host_;
  std::map<Tensor*, std::unique_ptr<void, Free>> memory_;
};

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

template <typename Call>
inline void run(const char* name, Call call) {
  call.implementation = name;
  batch_norm_act(on_gpu(), call);
}

inline void expect_close(const Tensor& got, const Values& expected, const char* name) {
  if (!got.defined()) return;
  EXPECT_TRUE(all_close(got, expected)) << name;
}

inline void expect_forward(const char* name, Problem p, const Expected& expected) {
  for (Tensor* t : {&p.y, &p.mean, &p.inverse, &p.passes}) {
    if (t->defined()) t->poison();
  }
  OnGpu gpu(p);
  run(name, gpu.forward());
  gpu.fetch();
  expect_close(p.y, expected.y, "y");
  expect_close(p.mean, expected.mean, "mean");
  expect_close(p.inverse, expected.inverse, "inverse_deviation");
  expect_close(p.running_mean, expected.running_mean, "running_mean");
  expect_close(p.running_var, expected.running_var, "running_var");
  Index calls = 0;
  std::memcpy(&calls, Problem::bytes(p.tracked), sizeof(calls));
  EXPECT_EQ(calls, p.is.training ? 4 : 3);
  for (Index i = 0; p.passes.defined() && i < p.x.numel(); ++i) {
    const double v = expected.v[i].value, near = expected.v[i].error;
    const bool blank = p.is_blank(i / p.is.c / p.is.pixels());
    const bool six = p.is.activation == Activation::relu6;
    const bool near_6 = six && std::fabs(v - 6) <= near + rounds_to_6(p.is.data);
    if (!blank && (std::fabs(v) <= near || near_6)) continue;
    ASSERT_EQ(p.passes_at(i), !blank && v > 0 && !(six && v >= 6)) << "bit of element " << i;
  }
}

inline void expect_backward(const char* name, Problem p, const ExpectedGradients& expected) {
  for (Tensor* t : {&p.dx, &p.dresidual, &p.dweight, &p.dbias}) {
    if (t->defined()) t->poison();
  }
  OnGpu gpu(p);
  run(name, gpu.backward());
  gpu.fetch();
  expect_close(p.dx, expected.dx, "dx");
  expect_close(p.dresidual, expected.dresidual, "dresidual");
  expect_close(p.dweight, expected.dweight, "dweight");
  expect_close(p.dbias, expected.dbias, "dbias");
}

/// Both ways with every implementation that takes the case; says which did.
inline std::set<std::string> expect_case(const Case& is) {
  SCOPED_TRACE(is.name());
  std::set<std::string> ran;
  Problem p = make(is);
  const Expected expected = forward_reference(p);
  for (const char* name : kEntries) {
    SCOPED_TRACE(std::string("forward ") + name);
    if (!takes(name, OnGpu(p).forward())) continue;
    expect_forward(name, p, expected);
    ran.insert(std::string("forward ") + name);
  }
  save(p, expected);
  const ExpectedGradients gradients = backward_reference(p);
  for (const char* name : kEntries) {
    SCOPED_TRACE(std::string("backward ") + name);
    if (!takes(name, OnGpu(p).backward())) continue;
    expect_backward(name, p, gradients);
    ran.insert(std::string("backward ") + name);
  }
  EXPECT_TRUE(ran.contains("forward general") && ran.contains("backward general"));
  return ran;
}

/// All that take dense float32 or half-precision images.
inline void expect_all(const Case& is) {
  std::set<std::string> ran = expect_case(is);
  const bool one_kernel = is.layout == Layout::channels_last;
  for (const char* direction : {"forward", "backward"}) {
    const std::string name = direction;
    EXPECT_TRUE(ran.contains(name + " two_pass")) << name << ", " << is.name();
    // It has no backward that reads the residual again.
    const bool reads = name == "backward" && is.residual && !is.keeps_bits() &&
                       is.activation != Activation::identity;
    EXPECT_EQ(ran.contains(name + " resident"), one_kernel && !reads) << name << ", " << is.name();
    EXPECT_EQ(ran.contains(name + " planes"), !one_kernel) << name << ", " << is.name();
  }
}

struct Types {
  DType data, weights;
};
inline constexpr Types kTypes[] = {{DType::f32, DType::f32},   {DType::f64, DType::f64},
                                   {DType::f16, DType::f16},   {DType::f16, DType::f32},
                                   {DType::bf16, DType::bf16}, {DType::bf16, DType::f32}};

}  // namespace fusewise::testing
