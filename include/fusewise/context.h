#pragma once

#include <cstddef>
#include <cstdint>

#include "fusewise/tensor.h"

namespace fusewise {

/// Source of scratch memory. Memory is ordered by the context's stream: after `deallocate` it may
/// be reused by work that is enqueued later on the same stream. On the CPU several threads of one
/// call may use it at once.
class Allocator {
 public:
  virtual ~Allocator() = default;
  /// Throws OutOfMemory. The result is aligned to 256 bytes.
  virtual void* allocate(std::size_t bytes) = 0;
  virtual void deallocate(void* memory) noexcept = 0;
};

/// Runs the loops of the CPU kernels. A framework passes its own threads here, so that the two do
/// not compete for the cores. Results do not depend on the number of threads.
class Executor {
 public:
  using Body = void (*)(std::int64_t begin, std::int64_t end, void* state);

  virtual ~Executor() = default;
  virtual int threads() const = 0;
  /// Calls body on disjoint ranges that together cover [0, count), and returns when all are done.
  /// While it waits, it may run other work on this thread, including calls of this library.
  virtual void parallel_for(std::int64_t count, Body body, void* state) = 0;
};

/// Computes GEMMs for the CPU kernels. A framework or program that has a fast GEMM library passes
/// it here.
class Gemm {
 public:
  virtual ~Gemm() = default;
  /// d = a b + c, with a [M, K], b [K, N], d [M, N], and c [M, N], [N] for all rows, or absent.
  ///
  /// Requirements on the call: all tensors have one dtype, float32, float64, float16 or bfloat16,
  /// and no size is 0. a and b have strides [s, 1] (contiguous rows) or [1, s] (contiguous
  /// columns), where s is at least the size of the other dimension. d and a c [M, N] have strides
  /// [s, 1], a c [N] is dense. c may be d itself. Apart from that, d overlaps no other tensor, and
  /// its old contents must not be read.
  ///
  /// Guarantees of the result: sums are at least float32 (float64 for float64), and c is added
  /// before the sum is rounded to the dtype. The same call gives the same bits every time.
  ///
  /// Returns false to decline, for instance because of the dtype. Then it must not have written
  /// anything, and the library uses its own loops. An exception ends the call of the operator and
  /// reaches its caller. Runs on the thread that calls the operator; several threads may call at
  /// once.
  virtual bool multiply(const TensorView& a, const TensorView& b, const TensorView& c,
                        const TensorView& d) = 0;
};

/// Computes convolutions without bias, dilation and groups. A framework or program that has a fast
/// library passes it here. On the CPU it is not asked for those that a GEMM computes faster.
class Convolution {
 public:
  virtual ~Convolution() = default;
  /// y = conv(x, w), with x [N, C, H, W], w [K, C, R, R] and y [N, K, P, Q]. Stride and zero
  /// padding are the same in both directions.
  ///
  /// Requirements on the call: all tensors have one floating dtype and one device, and no size is
  /// 0. y and dy are channels-last without gaps; x, w, dx and dw may have any strides. y, dx and dw
  /// overlap nothing. Their old contents must not be read, except those of dx with `add`.
  ///
  /// Guarantees of the result: sums are at least float32 (float64 for float64). On CUDA the work is
  /// enqueued on the context's stream. An exception ends the call of the operator and reaches its
  /// caller. Runs on the thread that calls the operator; several threads may call at once.
  virtual void forward(const TensorView& x, const TensorView& w, std::int64_t stride,
                       std::int64_t padding, const TensorView& y) = 0;
  /// The gradients of x and w. An absent one is not computed. With `add`, that of x is added to
  /// what dx holds.
  virtual void backward(const TensorView& dy, const TensorView& x, const TensorView& w,
                        std::int64_t stride, std::int64_t padding, const TensorView& dx,
                        const TensorView& dw, bool add) = 0;
};

/// Where a call runs and what it may use.
struct Context {
  Device device{};
  /// The cudaStream_t that work is enqueued on; ignored on the CPU.
  void* stream = nullptr;
  /// Null: the heap on the CPU, the device's stream-ordered memory pool on CUDA.
  Allocator* allocator = nullptr;
  /// Null: the library's own threads, one per core that the process may use.
  Executor* executor = nullptr;
  /// For the CPU only; on CUDA, cuBLASLt is used. Null: the BLAS that the library was built with
  /// (CMake's FUSEWISE_BLAS), or its own loops.
  Gemm* gemm = nullptr;
  /// Null: loops of the library on the CPU; on CUDA, operators with convolutions decline.
  Convolution* convolution = nullptr;
  /// Called with messages for the user that are not errors. Null: they are dropped.
  void (*warn)(const char* message) = nullptr;
};

}  // namespace fusewise
