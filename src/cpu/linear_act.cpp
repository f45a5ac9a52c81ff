// Linear + activation on the CPU: which rows and panels run where, in which order.
// The passes touch each byte once and are bound by memory bandwidth. The product, for callers that
// bring none, packs a panel of columns and lets all rows run over it.

#include <algorithm>

#include "common/backends.h"
#include "common/divide.h"
#include "common/matrix.h"
#include "common/scratch.h"
#include "cpu/instruction_sets.h"
#include "cpu/linear_act_kernels.h"
#include "cpu/threads.h"

namespace fusewise::cpu {
namespace {

using Index = std::int64_t;

constexpr Index kPieceElements = 64 * 1024;  // of a cheap pass, for one thread at a time
constexpr Index kSumRows = 32;               // whose gradients are summed up together, in order

Strides strides_of(const TensorView& t) { return {t.strides[0], t.strides[1]}; }
Strides transposed(Strides strides) { return {strides.column, strides.row}; }

template <typename T>
class Operation {
 public:
  using A = AccumulatorOf<T>;

  Operation(const Context& context, const LinearKernels<T>& kernels)
      : context_(context), kernels_(kernels) {}

  void run(const LinearActForward& call) const {
    const bool bits = call.kept.defined() && call.kept.dtype == DType::u8;
    TensorView z = call.z;
    if (!z.defined()) {
      z = call.kept.defined() && !bits ? call.kept : call.y;
      multiply(call.x, strides_of(call.x), call.w, transposed(strides_of(call.w)), call.x.sizes[1],
               call.b, z);
    } else if (call.kept.defined() && !bits && call.kept.data != z.data) {
      activate(Activation::identity, z, call.kept, {});
    }
    if (call.activation == Activation::identity && z.data == call.y.data) return;
    activate(call.activation, z, call.y, bits ? call.kept : TensorView());
  }

  void run(const LinearActBackward& call) const {
    const Index m = call.dy.sizes[0], n = call.dy.sizes[1];
    const bool products = call.dx.defined() || call.dw.defined();
    const bool same = call.activation == Activation::identity && !call.dz.defined();
    const bool own = products && !same && !call.dz.defined();
    const Scratch<T> memory(context_, own ? m * n : 0);
    TensorView dz = call.dz;
    if (own) dz = TensorView(memory.data(), call.dy.dtype, call.dy.device, {m, n});
    if (dz.defined() || call.db.defined()) differentiate(call, dz);
    if (same) dz = call.dy;
    if (call.dw.defined()) {
      multiply(dz, transposed(strides_of(dz)), call.x, strides_of(call.x), m, {}, call.dw);
    }
    if (call.dx.defined()) {
      multiply(dz, strides_of(dz), call.w, strides_of(call.w), n, {}, call.dx);
    }
  }

 private:
  static T* data(const TensorView& t) { return static_cast<T*>(t.data); }

  void activate(Activation kind, const TensorView& z, const TensorView& y,
                const TensorView& bits) const {
    const Index rows = z.sizes[0], columns = z.sizes[1];
    const Index z_stride = matrix_of(z).stride, y_stride = matrix_of(y).stride;
    const Index bit_stride = bits.defined() ? matrix_of(bits).stride : 0;
    const bool cheap = kind == Activation::relu || kind == Activation::identity;
    Index piece = cheap ? kPieceElements : kPieceElements / 4;
    if (!bits.defined() && z_stride == columns && y_stride == columns) {
      // One behind the other, they are one long row, which has its rest but once.
      const Index all = rows * columns;
      parallel_for(context_, divide_up(all, piece), [&](Index begin, Index end) {
        const Index first = begin * piece, count = std::min(end * piece, all) - first;
        kernels_.activate(kind, data(z) + first, 0, data(y) + first, 0, nullptr, 0, 1, count);
      });
      return;
    }
    piece = std::max<Index>(1, piece / std::max<Index>(columns, 1));
    parallel_for(context_, divide_up(rows, piece), [&](Index begin, Index end) {
      const Index first = begin * piece, count = std::min(end * piece, rows) - first;
      auto* open = static_cast<std::uint8_t*>(bits.data);
      kernels_.activate(kind, data(z) + first * z_stride, z_stride, data(y) + first * y_stride,
                        y_stride, open == nullptr ? nullptr : open + first * bit_stride, bit_stride,
                        count, columns);
    });
  }

  void differentiate(const LinearActBackward& call, const TensorView& dz) const {
    const Index rows = call.dy.sizes[0], columns = call.dy.sizes[1];
    const Strides dy = strides_of(call.dy);
    const bool bits = call.activation == Activation::relu && call.kept.dtype == DType::u8;
    const bool values = call.activation != Activation::identity && !bits;
    const Index kept_stride = bits || values ? matrix_of(call.kept).stride : 0;
    const Index dz_stride = dz.defined() ? matrix_of(dz).stride : 0;
    const bool adjacent = columns <= 1 || dy.column == 1;
    const Index chunks = divide_up(rows, kSumRows);
    const Scratch<A> partial(context_, call.db.defined() ? chunks * columns : 0);
    parallel_for(context_, chunks, [&](Index begin, Index end) {
      const Scratch<T> line(context_, adjacent ? 0 : columns);
      for (Index chunk = begin; chunk < end; ++chunk) {
        A* sums = call.db.defined() ? partial.data() + chunk * columns : nullptr;
        if (sums != nullptr) std::fill_n(sums, columns, A(0));
        const Index first = chunk * kSumRows, count = std::min(kSumRows, rows - first);
        const auto step = [&](Index row, Index number, const T* from, Index stride) {
          kernels_.differentiate(
              call.activation, from, stride,
              bits ? static_cast<const std::uint8_t*>(call.kept.data) + row * kept_stride : nullptr,
              kept_stride, values ? data(call.kept) + row * kept_stride : nullptr, kept_stride,
              dz.defined() ? data(dz) + row * dz_stride : nullptr, dz_stride, sums, number,
              columns);
        };
        if (adjacent) {
          step(first, count, data(call.dy) + first * dy.row, dy.row);
          continue;
        }
        for (Index row = first; row < first + count; ++row) {
          const T* from = data(call.dy) + row * dy.row;
          for (Index i = 0; i < columns; ++i) line.data()[i] = from[i * dy.column];
          step(row, 1, line.data(), 0);
        }
      }
    });
    if (call.db.defined()) kernels_.add_chunks(partial.data(), chunks, columns, data(call.db));
  }

  /// d = a b (+ bias), a and b of any strides.
  void multiply(const TensorView& a, Strides a_strides, const TensorView& b, Strides b_strides,
                Index inner, const TensorView& bias, const TensorView& d) const {
    Index rows = d.sizes[0], columns = d.sizes[1];
    T *left = data(a), *right = data(b);
    const Matrix out = matrix_of(d);
    if (out.transposed) {  // d^T = b^T a^T
      std::swap(rows, columns);
      std::swap(left, right);
      std::swap(a_strides, b_strides);
      a_strides = transposed(a_strides);
      b_strides = transposed(b_strides);
    }
    const Index width = kernels_.product_columns;
    parallel_for(context_, divide_up(columns, width), [&](Index begin, Index end) {
      const Scratch<A> panel(context_, inner * width);
      for (Index i = begin; i < end; ++i) {
        const Index first = i * width, count = std::min(width, columns - first);
        kernels_.pack(right + first * b_strides.column, b_strides, inner, count, panel.data());
        kernels_.multiply(left, a_strides, panel.data(), inner,
                          bias.defined() ? data(bias) + first : nullptr,
                          static_cast<T*>(out.data) + first, out.stride, rows, count);
      }
    });
  }

  const Context& context_;
  const LinearKernels<T>& kernels_;
};

template <const LinearKernelSet& kKernels, typename Call>
void run(const Context& context, const Call& call) {
  DType dtype;
  if constexpr (requires { call.y; })
    dtype = call.y.dtype;
  else
    dtype = call.dy.dtype;
  switch (dtype) {
    case DType::f32:
      return Operation<float>(context, kKernels.f32).run(call);
    case DType::f64:
      return Operation<double>(context, kKernels.f64).run(call);
    case DType::f16:
      return Operation<F16>(context, kKernels.f16).run(call);
    case DType::bf16:
      return Operation<BF16>(context, kKernels.bf16).run(call);
    case DType::u8:
      return;
  }
}

template <typename Call>
constexpr Implementation<Call> kList[] = {
    {"avx512", needs_avx512<Call>, run<avx512::linear_kernels, Call>},
    {"avx2", needs_avx2<Call>, run<avx2::linear_kernels, Call>},
    {"portable", needs_nothing<Call>, run<portable::linear_kernels, Call>},
};

}  // namespace

Implementations<LinearActForward> linear_act_forward() { return kList<LinearActForward>; }
Implementations<LinearActBackward> linear_act_backward() { return kList<LinearActBackward>; }

}  // namespace fusewise::cpu
