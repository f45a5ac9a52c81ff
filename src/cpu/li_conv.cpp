// LINet's convolution on the CPU. The context computes the convolutions, except those that a GEMM
// computes faster (im2col.cpp). The integration is a GEMM for each stream, which adds to the ones
// before it: each stream is read once. Half-precision streams are put side by side for a single
// GEMM, so that a sum is rounded once. Bound by the GEMMs' arithmetic.

#include "common/li_conv.h"

#include <algorithm>

#include "common/divide.h"
#include "common/implementation.h"
#include "common/matrix.h"
#include "common/scratch.h"
#include "cpu/gemm_loops.h"
#include "cpu/im2col.h"
#include "cpu/instruction_sets.h"
#include "cpu/li_conv_kernels.h"
#include "cpu/threads.h"

namespace fusewise::cpu {
namespace {

using Index = std::int64_t;

// Size of a block of gathered rows. It stays in the cache until the GEMM reads it.
constexpr Index kBlockBytes = 1 << 20;
constexpr Index kPieceElements = 64 * 1024;  // work unit of a cheap pass, for one thread

template <typename T>
class Operation {
 public:
  Operation(const Context& context, const LiConvKernels<T>& kernels, const LinearKernels<T>& gemm)
      : context_(context),
        kernels_(kernels),
        gemm_(gemm),
        im2col_(context, kernels, gemm),
        convolution_(context.convolution != nullptr ? *context.convolution : im2col_) {}

  void run(const LiConvForward& call) {
    const LiConvSizes s = check_sizes(call);
    if (s.n == 0) return;
    for (Index i = 0; i < s.streams; ++i) {
      const LiConvStream& stream = call.streams[i];
      const TensorView u = stream_of(call.u, i);
      convolution(stream, u).forward(stream.x, stream.w, call.stride, call.padding, u);
    }
    if constexpr (kKeepsSums<T>) {
      integrate(call, s);
    } else {
      integrate_at_once(call, s);
    }
  }

  void run(const LiConvBackward& call) {
    const LiConvSizes s = check_sizes(call);
    if (s.n == 0) return zero(call);
    integration_weight_gradients(call, s);
    if (call.dm.defined()) previous_gradient(call, s);
    if (std::none_of(call.streams.begin(), call.streams.end(), needs_gradient)) return;
    // The gradient of u_s.
    const Scratch<T> memory(context_, s.pixels() * s.k);
    const TensorView g = stream_gradient(call, s, memory.data());
    for (Index i = 0; i < s.streams; ++i) {
      const LiConvStream& stream = call.streams[i];
      if (!needs_gradient(stream)) continue;
      const TensorView du = call.du.defined() ? as_matrix(stream_of(call.du, i)) : TensorView();
      multiply(as_matrix(call.dy), stream.mix, du, as_matrix(g));
      convolution(stream, g).backward(g, stream.x, stream.w, call.stride, call.padding, stream.dx,
                                      stream.dw, call.add);
    }
  }

 private:
  static T* data(const TensorView& t) { return static_cast<T*>(t.data); }
  static bool needs_gradient(const LiConvStream& stream) {
    return stream.dx.defined() || stream.dw.defined();
  }
  /// The channels of all streams, then those of m.
  static Index width(const LiConvSizes& s) { return s.streams * s.k + s.e; }
  static Index rows_of_a_block(const LiConvSizes& s) {
    const Index wanted = kBlockBytes / (width(s) * static_cast<Index>(sizeof(T)));
    return std::clamp<Index>(wanted, 32, std::max<Index>(s.pixels(), 32));
  }
  static TensorView matrix(const TensorView& like, const T* data, Index rows, Index columns) {
    return {data, like.dtype, like.device, {rows, columns}};
  }
  /// Channels-last [N, K, P, Q].
  static TensorView stream_gradient(const LiConvBackward& call, const LiConvSizes& s, T* data) {
    return {data,
            call.dy.dtype,
            call.dy.device,
            {s.n, s.k, s.p, s.q},
            {s.p * s.q * s.k, 1, s.q * s.k, s.k}};
  }

  /// d = a b + c.
  void multiply(const TensorView& a, const TensorView& b, const TensorView& c,
                const TensorView& d) const {
    cpu::multiply(context_, gemm_, a, b, c, d);
  }

  /// Where a GEMM is faster than a library's convolution. Libraries have layouts of their own for
  /// weights, and write to memory of their own. With at most as many pixels as channels, most of
  /// their time goes into converting between layouts.
  Convolution& convolution(const LiConvStream& stream, const TensorView& result) {
    const bool few = as_matrix(result).sizes[0] <= result.sizes[1] && is_channels_last(stream.w);
    const bool no_taps = stream.w.sizes[2] == 1 && is_channels_last(stream.x);
    return kKeepsSums<T> && (few || no_taps) ? im2col_ : convolution_;
  }

  /// Calls body on pieces of [0, count), with a piece of work for each thread.
  template <typename Body>
  void in_pieces(Index count, Index elements_each, const Body& body) const {
    const Index piece = std::max<Index>(1, kPieceElements / std::max<Index>(elements_each, 1));
    parallel_for(context_, divide_up(count, piece), [&](Index begin, Index end) {
      for (Index i = begin * piece; i < std::min(end * piece, count); ++i) body(i);
    });
  }

  /// mix_0, mix_1, ..., previous side by side: [D, width].
  template <typename Call>
  void gather_weights(const Call& call, const LiConvSizes& s, T* to) const {
    for (Index row = 0; row < s.d; ++row) {
      for (const LiConvStream& stream : call.streams) {
        to = std::copy_n(data(stream.mix) + row * s.k, s.k, to);
      }
      if (s.e > 0) to = std::copy_n(data(call.previous) + row * s.e, s.e, to);
    }
  }

  /// Pixel `row` of [N, P, Q] in m.
  static T* pixel(const TensorView& m, const LiConvSizes& s, Index stride, Index row) {
    const Index n = row / (s.p * s.q), p = row / s.q % s.p, q = row % s.q;
    return data(m) + n * m.strides[0] + p * stride * m.strides[2] + q * stride * m.strides[3];
  }

  /// The channels of one pixel of m, which may have any strides.
  static void read_pixel(const TensorView& m, const T* from, Index channels, T* to) {
    if (m.strides[1] == 1) {
      std::copy_n(from, channels, to);
    } else {
      for (Index c = 0; c < channels; ++c) to[c] = from[c * m.strides[1]];
    }
  }

  /// The channels of all streams and of m, pixel by pixel.
  void gather_rows(const LiConvForward& call, const LiConvSizes& s, Index first, Index count,
                   T* rows) const {
    in_pieces(count, width(s), [&](Index i) {
      T* to = rows + i * width(s);
      for (Index stream = 0; stream < s.streams; ++stream) {
        to = std::copy_n(data(call.u) + (stream * s.pixels() + first + i) * s.k, s.k, to);
      }
      if (s.e > 0) read_pixel(call.m, pixel(call.m, s, call.stride, first + i), s.e, to);
    });
  }

  void integrate_at_once(const LiConvForward& call, const LiConvSizes& s) const {
    const Scratch<T> weights(context_, s.d * width(s));
    gather_weights(call, s, weights.data());
    const TensorView w = transposed(matrix(call.y, weights.data(), s.d, width(s)));
    const Index block = rows_of_a_block(s);
    const Scratch<T> rows(context_, block * width(s));
    for (Index first = 0; first < s.pixels(); first += block) {
      const Index count = std::min(block, s.pixels() - first);
      gather_rows(call, s, first, count, rows.data());
      multiply(matrix(call.y, rows.data(), count, width(s)), w, {},
               matrix(call.y, data(call.y) + first * s.d, count, s.d));
    }
  }

  void integrate(const LiConvForward& call, const LiConvSizes& s) const {
    const TensorView y = as_matrix(call.y);
    TensorView sum;
    for (Index i = 0; i < s.streams; ++i) {
      multiply(as_matrix(stream_of(call.u, i)), transposed(call.streams[i].mix), sum, y);
      sum = y;
    }
    if (s.e == 0) return;
    const Pixels m(*this, call.m, call.stride, s);
    multiply(m.rows, transposed(call.previous), sum, y);
  }

  /// The pixels of m that the convolution reads, as a matrix [pixels, E].
  struct Pixels {
    Scratch<T> copy;
    TensorView rows;

    Pixels(const Operation& operation, const TensorView& m, Index stride, const LiConvSizes& s)
        : copy(operation.context_, is_matrix(m, stride) ? 0 : s.pixels() * s.e),
          rows(is_matrix(m, stride) ? as_matrix(m) : matrix(m, copy.data(), s.pixels(), s.e)) {
      if (copy.data() == nullptr) return;
      operation.in_pieces(s.pixels(), s.e, [&](Index i) {
        read_pixel(m, pixel(m, s, stride, i), s.e, copy.data() + i * s.e);
      });
    }
    static bool is_matrix(const TensorView& m, Index stride) {
      return stride == 1 && is_channels_last(m);
    }
  };

  void integration_weight_gradients(const LiConvBackward& call, const LiConvSizes& s) const {
    const TensorView dy = transposed(as_matrix(call.dy));
    for (Index i = 0; i < s.streams; ++i) {
      const TensorView& dmix = call.streams[i].dmix;
      if (dmix.defined()) multiply(dy, as_matrix(stream_of(call.u, i)), {}, dmix);
    }
    if (!call.dprevious.defined()) return;
    const Pixels m(*this, call.m, call.stride, s);
    multiply(dy, m.rows, {}, call.dprevious);
  }

  void previous_gradient(const LiConvBackward& call, const LiConvSizes& s) const {
    const TensorView& dm = call.dm;
    const TensorView dy = as_matrix(call.dy);
    if (!call.add && Pixels::is_matrix(dm, call.stride)) {
      return multiply(dy, call.previous, {}, as_matrix(dm));
    }
    if (call.stride > 1 && !call.add) fill_with_zeros(dm);
    const Scratch<T> rows(context_, s.pixels() * s.e);
    multiply(dy, call.previous, {}, matrix(dm, rows.data(), s.pixels(), s.e));
    in_pieces(s.pixels(), 2 * s.e, [&](Index i) {
      write_pixel(kernels_, rows.data() + i * s.e, s.e, pixel(dm, s, call.stride, i), dm.strides[1],
                  call.add);
    });
  }

  /// Every gradient of a call without samples.
  void zero(const LiConvBackward& call) const {
    for (const LiConvStream& stream : call.streams) {
      for (const TensorView* t : {&stream.dw, &stream.dmix}) fill_with_zeros(*t);
    }
    fill_with_zeros(call.dprevious);
  }

  /// A tensor of any strides and of at most four dimensions, or an absent one.
  void fill_with_zeros(const TensorView& t) const {
    if (!t.defined()) return;
    Index sizes[4] = {1, 1, 1, 1}, strides[4] = {};
    for (int d = 0; d < t.rank; ++d) sizes[d] = t.sizes[d], strides[d] = t.strides[d];
    in_pieces(sizes[0] * sizes[1], sizes[2] * sizes[3], [&](Index i) {
      T* plane = data(t) + i / sizes[1] * strides[0] + i % sizes[1] * strides[1];
      for (Index a = 0; a < sizes[2]; ++a) {
        for (Index b = 0; b < sizes[3]; ++b) plane[a * strides[2] + b * strides[3]] = T{};
      }
    });
  }

  const Context& context_;
  const LiConvKernels<T>& kernels_;
  const LinearKernels<T>& gemm_;
  Im2col<T> im2col_;
  Convolution& convolution_;
};

template <const LiConvKernelSet& kKernels, const LinearKernelSet& kGemm, typename Call>
void run(const Context& context, const Call& call) {
  switch (call.streams[0].x.dtype) {
    case DType::f32:
      return Operation<float>(context, kKernels.f32, kGemm.f32).run(call);
    case DType::f64:
      return Operation<double>(context, kKernels.f64, kGemm.f64).run(call);
    case DType::f16:
      return Operation<F16>(context, kKernels.f16, kGemm.f16).run(call);
    case DType::bf16:
      return Operation<BF16>(context, kKernels.bf16, kGemm.bf16).run(call);
    case DType::u8:
    case DType::b8:
    case DType::i64:
      return;
  }
}

template <typename Call>
constexpr Implementation<Call> kList[] = {
    {"avx512", needs_avx512<Call>, run<avx512::li_conv_kernels, avx512::linear_kernels, Call>},
    {"avx2", needs_avx2<Call>, run<avx2::li_conv_kernels, avx2::linear_kernels, Call>},
    {"portable", needs_nothing<Call>,
     run<portable::li_conv_kernels, portable::linear_kernels, Call>},
};

}  // namespace

Implementations<LiConvForward> li_conv_forward() { return kList<LiConvForward>; }
Implementations<LiConvBackward> li_conv_backward() { return kList<LiConvBackward>; }

}  // namespace fusewise::cpu
