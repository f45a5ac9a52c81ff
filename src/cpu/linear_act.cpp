// Linear + activation on the CPU: distributes rows and panels over threads.
// The elementwise passes touch each byte once and are bound by memory bandwidth.

#include <algorithm>
#include <type_traits>

#include "common/divide.h"
#include "common/implementation.h"
#include "common/linear_act.h"
#include "cpu/gemm_loops.h"
#include "cpu/instruction_sets.h"
#include "cpu/linear_act_kernels.h"
#include "cpu/threads.h"
#include "fusewise/linear_act.h"

namespace fusewise::cpu {
namespace {

using Index = std::int64_t;

constexpr Index kPieceElements = 64 * 1024;  // work unit of a cheap pass, for one thread
constexpr Index kLaterBiasColumns = 256;     // fewer are activated as one long row
constexpr Index kSumRows = 32;               // rows whose gradients are summed together, in order

template <typename T>
class Operation {
 public:
  using A = AccumulatorOf<T>;

  Operation(const Context& context, const LinearKernels<T>& kernels)
      : context_(context), kernels_(kernels) {}

  void run(const LinearActForward& call) const {
    const bool bits = call.kept.defined() && call.kept.dtype == DType::u8;
    const TensorView z = call.kept.defined() && !bits ? call.kept : call.y;
    // GEMM libraries add the bias in a separate pass over z. The activation pass adds it for free,
    // if z is not saved and adding it later causes no extra rounding.
    const bool later = std::is_same_v<T, A> && z.data == call.y.data &&
                       call.activation != Activation::identity && z.sizes[1] >= kLaterBiasColumns;
    const TensorView absent;
    multiply(call.x, transposed(call.w), later ? absent : call.b, z);
    if (call.activation == Activation::identity) return;
    activate(call.activation, z, later ? call.b : absent, call.y, bits ? call.kept : absent);
  }

  void run(const LinearActBackward& call) const {
    const Dz dz(context_, call);
    if (dz.output().defined() || call.db.defined()) differentiate(call, dz.output());
    if (call.dw.defined()) multiply(transposed(dz.view()), call.x, {}, call.dw);
    if (call.dx.defined()) multiply(dz.view(), call.w, {}, call.dx);
  }

 private:
  static T* data(const TensorView& t) { return static_cast<T*>(t.data); }

  void activate(Activation kind, const TensorView& z, const TensorView& bias, const TensorView& y,
                const TensorView& bits) const {
    const Index rows = z.sizes[0], columns = z.sizes[1];
    const Index z_stride = matrix_of(z).stride, y_stride = matrix_of(y).stride;
    const Index bit_stride = bits.defined() ? matrix_of(bits).stride : 0;
    const bool cheap = kind == Activation::relu || kind == Activation::identity;
    Index piece = cheap ? kPieceElements : kPieceElements / 4;
    if (!bits.defined() && !bias.defined() && z_stride == columns && y_stride == columns) {
      // Contiguous rows are one long row, which has only one remainder.
      const Index all = rows * columns;
      parallel_for(context_, divide_up(all, piece), [&](Index begin, Index end) {
        const Index first = begin * piece, count = std::min(end * piece, all) - first;
        kernels_.activate(kind, data(z) + first, 0, nullptr, data(y) + first, 0, nullptr, 0, 1,
                          count);
      });
      return;
    }
    piece = std::max<Index>(1, piece / std::max<Index>(columns, 1));
    parallel_for(context_, divide_up(rows, piece), [&](Index begin, Index end) {
      const Index first = begin * piece, count = std::min(end * piece, rows) - first;
      auto* open = static_cast<std::uint8_t*>(bits.data);
      kernels_.activate(kind, data(z) + first * z_stride, z_stride, data(bias),
                        data(y) + first * y_stride, y_stride,
                        open == nullptr ? nullptr : open + first * bit_stride, bit_stride, count,
                        columns);
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

  /// d = a b (+ bias). A bias requires contiguous rows of d.
  void multiply(const TensorView& a, const TensorView& b, const TensorView& bias,
                const TensorView& d) const {
    if (!has_adjacent_rows(d)) return multiply(transposed(b), transposed(a), {}, transposed(d));
    cpu::multiply(context_, kernels_, a, b, bias, d);
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
    case DType::b8:
    case DType::i64:
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
