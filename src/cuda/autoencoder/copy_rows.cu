// Copies rows between strided and dense memory, for the kernels that take dense rows only. Every
// element is read and written once. With odd strides, each access touches its own sector. Bound by
// memory bandwidth.

#include <algorithm>

#include "cuda/autoencoder/copy_rows.cuh"
#include "cuda/launch.cuh"

namespace fusewise::cuda {
namespace {

struct Shape {
  long long count, middle, last;  // number of elements; sizes of the two inner dimensions
  long long from[3], to[3];       // strides
};

template <typename Bits>
__global__ void copy_kernel(const Bits* from, Bits* to, Shape shape) {
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < shape.count;
       i += step) {
    const long long last = i % shape.last, row = i / shape.last, middle = row % shape.middle,
                    first = row / shape.middle;
    to[first * shape.to[0] + middle * shape.to[1] + last * shape.to[2]] =
        from[first * shape.from[0] + middle * shape.from[1] + last * shape.from[2]];
  }
}

template <typename Bits>
void copy(const Context& context, const TensorView& from, const TensorView& to,
          const Shape& shape) {
  constexpr int kThreads = 256;
  const long long blocks = std::min((shape.count + kThreads - 1) / kThreads, 1LL << 16);
  launch_kernel({context, blocks, kThreads}, "copying the autoencoder's rows", copy_kernel<Bits>,
                static_cast<const Bits*>(from.data), static_cast<Bits*>(to.data), shape);
}

}  // namespace

void autoencoder_copy(const Context& context, const TensorView& from, const TensorView& to) {
  Shape shape{from.numel(), 1, 1, {}, {}};
  if (from.rank >= 2) shape.last = from.sizes[from.rank - 1];
  if (from.rank == 3) shape.middle = from.sizes[1];
  for (int d = 0; d < from.rank; ++d) {  // of two dimensions, use the outer and the inner one
    const int place = d == 1 && from.rank == 2 ? 2 : d;
    shape.from[place] = from.strides[d];
    shape.to[place] = to.strides[d];
  }
  switch (size_of(from.dtype)) {
    case 2:
      return copy<unsigned short>(context, from, to, shape);
    case 4:
      return copy<unsigned>(context, from, to, shape);
    default:
      return copy<unsigned long long>(context, from, to, shape);
  }
}

}  // namespace fusewise::cuda
