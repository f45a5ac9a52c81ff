#pragma once

// Linear + activation as plain loops in float64, with the error that each value may be off by.

#include "reference.h"

namespace fusewise::testing {

// Matrices. --------------------------------------------------------------------------------------

enum class Form { dense, sliced, misaligned, columns, sliced_columns, stepped, expanded, flat };

/// What the library's products take.
constexpr Form kOperands[] = {Form::dense, Form::sliced, Form::misaligned, Form::columns,
                              Form::sliced_columns};
constexpr Form kRows[] = {Form::dense, Form::sliced, Form::misaligned};
constexpr Form kForms[] = {Form::dense,          Form::sliced,  Form::misaligned, Form::columns,
                           Form::sliced_columns, Form::stepped, Form::expanded,   Form::flat};

inline Tensor matrix(DType dtype, Form form, Index rows, Index columns) {
  const std::vector<Index> sizes{rows, columns};
  switch (form) {
    case Form::dense:
      return Tensor(dtype, sizes, {columns, 1});
    case Form::sliced:
      return Tensor(dtype, sizes, {columns + 3, 1}, 2);
    case Form::misaligned:
      return Tensor(dtype, sizes, {columns, 1}, 1);
    case Form::columns:
      return Tensor(dtype, sizes, {1, rows});
    case Form::sliced_columns:
      return Tensor(dtype, sizes, {1, rows + 5}, 3);
    case Form::stepped:
      return Tensor(dtype, sizes, {2 * columns + 1, 2}, 1);
    case Form::expanded:
      return Tensor(dtype, sizes, {0, 1});
    case Form::flat:
      return Tensor(dtype, sizes, {0, 0});
  }
  return {};
}

/// Of the functions: for halves, on GPUs, approximations serve that are good to some 1e-6.
inline double function_epsilon(DType dtype) {
  return (size_of(dtype) == 2 ? 16 : 1) * epsilon(sum_type(dtype));
}

// Functions. -------------------------------------------------------------------------------------

inline double linear_activate(Activation kind, double z) {
  switch (kind) {
    case Activation::identity:
      return z;
    case Activation::relu:
      return z < 0 ? 0 : z;
    case Activation::gelu:
      return z * 0.5 * std::erfc(-z * std::sqrt(0.5));
    case Activation::gelu_tanh:
      return z * 0.5 * (1 + std::tanh(std::sqrt(2 / M_PI) * (z + 0.044715 * z * z * z)));
    case Activation::silu:
      return z / (1 + std::exp(-z));
    case Activation::relu6:
    case Activation::hardswish:  // neither is of linear maps
      break;
  }
  return 0;
}

/// act'(z), and the sum of |terms| behind it as the error.
inline Bounded linear_slope(Activation kind, double z) {
  switch (kind) {
    case Activation::identity:
      return {1, 0};
    case Activation::relu:
      return {z <= 0 ? 0.0 : 1.0, 0};
    case Activation::gelu: {
      const double cdf = 0.5 * std::erfc(-z * std::sqrt(0.5));
      const double rest = z * std::exp(-z * z / 2) / std::sqrt(2 * M_PI);
      return {cdf + rest, 1 + std::fabs(rest) * (1 + z * z)};
    }
    case Activation::gelu_tanh: {
      const double c = std::sqrt(2 / M_PI), t = std::tanh(c * (z + 0.044715 * z * z * z));
      const double inner = 0.5 * std::fabs(z) * c * (1 + 3 * 0.044715 * z * z);
      // 1 - t * t is exact to an epsilon of 1, not of itself.
      return {0.5 * (1 + t) + (z < 0 ? -inner : inner) * (1 - t * t), 1 + inner};
    }
    case Activation::silu: {
      const double s = 1 / (1 + std::exp(-z));
      return {s * (1 + z * (1 - s)), s * (1 + std::fabs(z))};
    }
    case Activation::relu6:
    case Activation::hardswish:  // neither is of linear maps
      break;
  }
  return {};
}

// Calls. -----------------------------------------------------------------------------------------

struct MatrixSizes {
  Index m, n, k;
};

/// Arguments of one call, forward and backward, by value.
struct LinearAct {
  Index m = 0, n = 0, k = 0;
  Activation activation = Activation::relu;
  Tensor x, w, b, y, kept;
  Tensor dy, dx, dw, db;
  Tensor z, dz;  // of a GEMM of the test's own, see GivenGemm

  LinearActForward forward() const {
    LinearActForward call;
    call.x = x.view(), call.w = w.view(), call.b = b.view();
    call.y = y.view(), call.kept = kept.view();
    call.activation = activation;
    return call;
  }
  LinearActBackward backward() const {
    LinearActBackward call;
    call.dy = dy.view(), call.x = x.view(), call.w = w.view(), call.kept = kept.view();
    call.dx = dx.view(), call.dw = dw.view(), call.db = db.view();
    call.activation = activation;
    return call;
  }
};

/// A caller's GEMM for a call without a bias: gives its z, whatever x and w are. Of dx it takes
/// down dz, the left factor, and declines. z and dz are dense.
class GivenGemm : public Gemm {
 public:
  explicit GivenGemm(const LinearAct& call) : call_(call) {}
  bool multiply(const TensorView& a, const TensorView&, const TensorView&,
                const TensorView& d) override {
    const bool forward = d.data == call_.y.view().data || d.data == call_.kept.view().data;
    if (forward) return call_.z.defined() && copy(call_.z.view(), d);
    if (call_.dz.defined() && d.data == call_.dx.view().data) copy(a, call_.dz.view());
    return false;
  }

 private:
  static bool copy(const TensorView& from, const TensorView& to) {
    const Index bytes = size_of(from.dtype);
    for (Index i = 0; i < from.sizes[0]; ++i) {
      std::memcpy(static_cast<char*>(to.data) + i * to.strides[0] * bytes,
                  static_cast<const char*>(from.data) + i * from.strides[0] * bytes,
                  from.sizes[1] * bytes);
    }
    return true;
  }

  const LinearAct& call_;
};

/// Room for what backward needs.
inline Tensor kept_for(Activation activation, DType dtype, Index m, Index n) {
  if (activation == Activation::identity) return {};
  if (activation == Activation::relu) return Tensor(DType::u8, {m, bit_bytes(n)});
  return Tensor(dtype, {m, n});
}

/// All tensors but z and dz, inputs filled; gradients in the forms of what they belong to.
inline LinearAct make_linear_act(MatrixSizes s, DType dtype, Activation activation,
                                 Form x = Form::dense, Form w = Form::dense,
                                 Form dy = Form::dense) {
  LinearAct call;
  call.m = s.m, call.n = s.n, call.k = s.k;
  call.activation = activation;
  call.x = matrix(dtype, x, s.m, s.k).fill(1);
  call.w = matrix(dtype, w, s.n, s.k).fill(2, 1 / std::sqrt(s.k + 1));
  call.b = Tensor(dtype, {s.n}).fill(3, 0.5);
  call.y = Tensor(dtype, {s.m, s.n});
  call.kept = kept_for(activation, dtype, s.m, s.n);
  call.dy = matrix(dtype, dy, s.m, s.n).fill(4);
  call.dx = matrix(dtype, x, s.m, s.k);
  call.dw = matrix(dtype, w, s.n, s.k);
  call.db = Tensor(dtype, {s.n});
  return call;
}

inline std::uint8_t* byte_at(const Tensor& bits, Index row, Index byte) {
  const TensorView view = bits.view();
  return static_cast<std::uint8_t*>(view.data) + row * view.strides[0] + byte;
}

inline bool bit_at(const Tensor& bits, Index row, Index column) {
  return *byte_at(bits, row, column / 8) >> column % 8 & 1;
}

/// z before it is rounded to the type of the tensors. Sums are kept in the type of sums, with the
/// bias: nothing is rounded in between, whoever computes the product.
inline Values z_reference(const LinearAct& call) {
  const double eps = epsilon(sum_type(call.y.dtype()));
  Values z;
  for (Index i = 0; i < call.m * call.n; ++i) {
    if (call.z.defined()) {
      z.push_back({call.z.get(i), 0});
      continue;
    }
    Sum sum;
    for (Index p = 0; p < call.k; ++p) {
      sum.add(call.x.get(i / call.n * call.k + p), call.w.get(i % call.n * call.k + p));
    }
    if (call.b.defined()) sum.add(call.b.get(i % call.n));
    z.push_back(sum.done(eps));
  }
  return z;
}

/// y, where z may have been rounded on its way.
inline Values y_reference(const LinearAct& call, const Values& z) {
  const DType dtype = call.y.dtype();
  const double eps = function_epsilon(dtype);
  Values y;
  for (const Bounded& each : z) {
    const double value = each.value, size = std::fabs(value);
    const double rounding = call.z.defined() ? 0 : epsilon(dtype) / 2 * size;
    y.push_back(
        {linear_activate(call.activation, value), 1.2 * (each.error + rounding) + 4 * eps * size});
  }
  return y;
}

/// What forward keeps, by the reference: backward is tested on its own.
inline void keep(LinearAct& call) {
  if (!call.kept.defined()) return;
  const Values z = z_reference(call);
  for (Index i = 0; i < call.m * call.n; ++i) {
    const double value = z[i].value;
    if (call.kept.dtype() != DType::u8) {
      call.kept.set(i, call.activation == Activation::relu && value < 0 ? 0 : value);
    } else {
      std::uint8_t& byte = *byte_at(call.kept, i / call.n, i % call.n / 8);
      const auto bit = static_cast<std::uint8_t>(1 << i % call.n % 8);
      byte = !(value <= 0) ? byte | bit : byte & ~bit;
    }
  }
}

/// As a tensor of the type holds them.
inline Values stored(Values values, DType dtype) {
  for (Bounded& each : values) {
    each.error += epsilon(dtype) / 2 * std::fabs(each.value) + smallest(dtype);
  }
  return values;
}

struct LinearGradients {
  Values dz, dx, dw, db;
};

/// From what the call has kept, as backward itself, and from `gradient`, dy with its errors.
inline LinearGradients gradient_reference(const LinearAct& call, const Values& gradient) {
  const DType dtype = call.dy.dtype();
  const double eps = epsilon(sum_type(dtype));
  const Index m = call.m, n = call.n, k = call.k;
  LinearGradients out;
  for (Index i = 0; i < m * n; ++i) {
    const Bounded dy = gradient[i];
    if (call.activation == Activation::relu) {
      const bool open = call.kept.dtype() == DType::u8 ? bit_at(call.kept, i / n, i % n)
                                                       : !(call.kept.get(i) <= 0);
      out.dz.push_back(open ? dy : Bounded{});
    } else if (call.activation == Activation::identity) {
      out.dz.push_back(dy);
    } else {
      const Bounded slope = linear_slope(call.activation, call.kept.get(i));
      const double error = 8 * function_epsilon(dtype) * std::fabs(dy.value) * slope.error;
      out.dz.push_back({dy.value * slope.value, std::fabs(slope.value) * dy.error + error});
    }
  }
  const Values dz = stored(out.dz, dtype);  // as products read it
  for (Index i = 0; i < m * k; ++i) {
    Sum sum;
    for (Index j = 0; j < n; ++j) sum.add(call.w.get(j * k + i % k), dz[i / k * n + j]);
    out.dx.push_back(sum.done(eps));
  }
  for (Index i = 0; i < n * k; ++i) {
    Sum sum;
    for (Index r = 0; r < m; ++r) sum.add(call.x.get(r * k + i % k), dz[r * n + i / k]);
    out.dw.push_back(sum.done(eps));
  }
  for (Index j = 0; j < n; ++j) {
    Sum sum;
    for (Index r = 0; r < m; ++r) sum.add(1, dz[r * n + j]);
    out.db.push_back(sum.done(eps));
  }
  return out;
}

/// From the call's own dy.
inline LinearGradients gradient_reference(const LinearAct& call) {
  Values dy;
  for (Index i = 0; i < call.dy.numel(); ++i) dy.push_back({call.dy.get(i), 0});
  return gradient_reference(call, dy);
}

// Comparing. -------------------------------------------------------------------------------------

/// Bits where z tells them beyond its error; those behind the last column may be anything.
inline ::testing::AssertionResult bits_right(const Tensor& bits, const Values& z, Index n) {
  for (Index i = 0; i < static_cast<Index>(z.size()); ++i) {
    const double value = z[i].value;
    if (std::fabs(value) <= z[i].error && value != 0) continue;
    if (bit_at(bits, i / n, i % n) != !(value <= 0)) {
      return ::testing::AssertionFailure() << "bit " << i << " is wrong, z is " << value;
    }
  }
  if (!bits.guards_hold()) return ::testing::AssertionFailure() << "wrote outside the bits";
  return ::testing::AssertionSuccess();
}

inline void expect_forward_results(const LinearAct& call, const Values& z) {
  EXPECT_TRUE(all_close(call.y, y_reference(call, z))) << "y";
  if (!call.kept.defined()) return;
  if (call.kept.dtype() == DType::u8) {
    EXPECT_TRUE(bits_right(call.kept, z, call.n)) << "kept";
  } else {
    EXPECT_TRUE(all_close(call.kept, z)) << "kept";
  }
}

inline void expect_backward_results(const LinearAct& call, const LinearGradients& expected) {
  if (call.dz.defined()) {
    EXPECT_TRUE(all_close(call.dz, expected.dz)) << "dz";
  }
  if (call.dx.defined()) {
    EXPECT_TRUE(all_close(call.dx, expected.dx)) << "dx";
  }
  if (call.dw.defined()) {
    EXPECT_TRUE(all_close(call.dw, expected.dw)) << "dw";
  }
  if (call.db.defined()) {
    EXPECT_TRUE(all_close(call.db, expected.db)) << "db";
  }
}

inline std::string case_name(const MatrixSizes& s, DType dtype, Activation activation, Form x,
                             Form w, Form dy) {
  return "M, N, K = " + std::to_string(s.m) + ", " + std::to_string(s.n) + ", " +
         std::to_string(s.k) + "; " + name_of(dtype) + ", " + name_of(activation) + ", forms " +
         std::to_string(static_cast<int>(x)) + ", " + std::to_string(static_cast<int>(w)) + ", " +
         std::to_string(static_cast<int>(dy));
}

constexpr DType kFloating[] = {DType::f32, DType::f64, DType::f16, DType::bf16};

}  // namespace fusewise::testing
