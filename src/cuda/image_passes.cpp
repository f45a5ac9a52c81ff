#include "cuda/image_passes.h"

#include <algorithm>
#include <cstdint>

#include "common/divide.h"
#include "cuda/device.h"

namespace fusewise::cuda::passes {
namespace {

/// Pixels of a thread in a chunk. Rounding errors of longer sums would grow. At least so many are
/// worth a thread; of planar images, so many vectors of them.
constexpr Index kMostSteps = 512, kFewestSteps = 4;

bool pixels_collapse(const TensorView& t) {
  return t.sizes[2] == 1 || t.sizes[3] == 1 || t.strides[2] == t.sizes[3] * t.strides[3];
}

ImageLayout layout_of(std::initializer_list<const TensorView*> images) {
  const bool one_pixel = (*images.begin())->sizes[2] * (*images.begin())->sizes[3] == 1;
  const bool one_channel = (*images.begin())->sizes[1] == 1;
  bool planar = true, channels_last = true;
  for (const TensorView* t : images) {
    planar = planar && pixels_collapse(*t) && (one_pixel || pixel_stride(*t) == 1);
    channels_last = channels_last && pixels_collapse(*t) && (one_channel || t->strides[1] == 1);
  }
  // An image of one pixel is both. Then its channels are contiguous.
  if (channels_last && (one_pixel || !planar)) return ImageLayout::channels_last;
  return planar ? ImageLayout::planar : ImageLayout::strided;
}

/// How channels-last images are divided: `tiles` blocks side by side have all channels, and
/// `chunks` of them have all pixels.
struct Cut {
  Index columns, tiles, chunks;
};

/// The cut with the shortest expected time of a pass, if `together` blocks run at once. A block
/// that has few columns keeps more of its threads busy. More blocks fill the GPU, but each wave of
/// them loads the values of its channels and adds sums first.
Cut choose_cut(const Shape& s, Index columns, Index together, std::int64_t element) {
  constexpr Index kFewestColumns = 16, kMostTiles = 64, kMostWaves = 4;
  constexpr double kBytes = 4.2e6, kWave = 0.7;  // per microsecond; microseconds
  const double bytes = static_cast<double>(s.n * s.c * s.hw * element);
  const Index least = divide_up(columns, kThreads);
  Cut best{};
  double shortest = 0;
  for (Index tiles = least;
       tiles == least || (columns >= kFewestColumns * tiles && tiles < least + kMostTiles);
       ++tiles) {
    const Index width = divide_up(columns, tiles), strands = kThreads / width;
    const double busy = static_cast<double>(strands * width) / kThreads;
    const Index groups = std::max<Index>(s.n, 1) * divide_up(columns, width);
    const Index fewest = divide_up(s.hw, strands * kMostSteps);
    const Index most = std::max<Index>(fewest, divide_up(s.hw, strands * kFewestSteps));
    for (Index wave = 1; wave <= kMostWaves; ++wave) {
      const Index chunks = std::clamp<Index>(wave * together / groups, fewest, most);
      const Index waves = divide_up(groups * chunks, together);
      const double full =
          static_cast<double>(groups * chunks) / static_cast<double>(waves * together);
      const double time = bytes / kBytes / (full * busy) + kWave * static_cast<double>(waves);
      if (shortest > 0 && time >= shortest) continue;
      best = {width, divide_up(columns, width), chunks};
      shortest = time;
    }
  }
  return best;
}

}  // namespace

Plan plan_for(const Context& context, std::initializer_list<const TensorView*> images,
              int resident) {
  const TensorView& x = **images.begin();
  Plan p{layout_of(images), {x.sizes[0], x.sizes[1], x.sizes[2] * x.sizes[3], x.sizes[3], 1, 0}};
  Shape& s = p.shape;
  const Index vector = 16 / size_of(x.dtype);
  const Index multiprocessors = limits_of(context.device).multiprocessors;
  if (p.layout == ImageLayout::channels_last) {
    p.vectors = s.c % vector == 0;
    for (const TensorView* t : images) {
      const bool aligned = reinterpret_cast<std::uintptr_t>(t->data) % 16 == 0 &&
                           (s.n == 1 || t->strides[0] % vector == 0) &&
                           (s.hw == 1 || pixel_stride(*t) % vector == 0);
      p.vectors = p.vectors && aligned;
    }
    const Cut cut =
        choose_cut(s, s.c / (p.vectors ? vector : 1), multiprocessors * resident, size_of(x.dtype));
    p.columns = static_cast<int>(cut.columns);
    p.tiles = static_cast<int>(cut.tiles);
    s.chunks = cut.chunks;
  } else {
    while (p.lanes > 4 && p.lanes * vector > s.hw) p.lanes /= 2;
    const Index least = divide_up(s.hw, 32 * kMostSteps);
    const Index most = divide_up(s.hw, 32 * vector * kFewestSteps);
    const Index blocks = std::max<Index>(s.n * s.c * p.lanes / kThreads, 1);
    s.chunks = std::clamp<Index>(divide_up(multiprocessors * 16, blocks), least, most);
  }
  s.chunk = divide_up(s.hw, s.chunks);
  if (p.layout == ImageLayout::planar) s.chunk = divide_up(s.chunk, vector) * vector;
  s.chunks = divide_up(s.hw, s.chunk);
  return p;
}

}  // namespace fusewise::cuda::passes
