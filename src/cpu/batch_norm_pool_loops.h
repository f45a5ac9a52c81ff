#pragma once

// The max-pool of 3 x 3 values with stride 2 and padding 1, one row at a time, and its gradient as
// a gather: each pixel adds up the gradients of the windows that chose it. The rule of cpu/vector.h
// applies.

#include "cpu/batch_norm_kernels.h"
#include "cpu/vector.h"
#include "cpu/vector_loops.h"
#include "cpu/vector_math.h"

namespace fusewise::cpu::FUSEWISE_ISA {
namespace {

template <typename T>
using MaskOf = decltype(LanesOf<T>{} < LanesOf<T>{});

/// Bytes as the integers of a mask, and back. g++ 12 converts by vector instructions only from one
/// size to the next one.
template <typename T>
struct ByteVector {
  static constexpr int kLanes = Memory<T>::kLanes;
  using Bytes = typename Vector<std::uint8_t, kLanes>::type;
  using Shorts = typename Vector<std::uint16_t, kLanes>::type;
  using Ints = typename Vector<std::uint32_t, kLanes>::type;
};

template <typename T>
MaskOf<T> load_bytes(const std::uint8_t* from, Index count = Memory<T>::kLanes) {
  using Each = ByteVector<T>;
  typename Each::Bytes bytes{};
  if (count == Memory<T>::kLanes)
    __builtin_memcpy(&bytes, from, sizeof(bytes));
  else
    for (Index i = 0; i < count; ++i) bytes[i] = from[i];
  const auto shorts = __builtin_convertvector(bytes, typename Each::Shorts);
  return __builtin_convertvector(__builtin_convertvector(shorts, typename Each::Ints), MaskOf<T>);
}
template <typename T>
void store_bytes(std::uint8_t* to, MaskOf<T> values, Index count = Memory<T>::kLanes) {
  using Each = ByteVector<T>;
  const auto ints = __builtin_convertvector(values, typename Each::Ints);
  const auto shorts = __builtin_convertvector(ints, typename Each::Shorts);
  const auto bytes = __builtin_convertvector(shorts, typename Each::Bytes);
  if (count == Memory<T>::kLanes)
    __builtin_memcpy(to, &bytes, sizeof(bytes));
  else
    for (Index i = 0; i < count; ++i) to[i] = bytes[i];
}

// Channels-last: a vector holds channels of one pixel. -------------------------------------------

template <typename T>
void pool_rows(const PoolShape& shape, const T* const (&rows)[3], T* y, std::uint8_t* choices) {
  using V = LanesOf<T>;
  using M = MaskOf<T>;
  const Index width = shape.width, channels = shape.channels, outputs = shape.outputs;
  const T* const row[3] = {rows[0], rows[1], rows[2]};
  for (Index j = 0; j < outputs; ++j) {
    const int left = j == 0 ? 1 : 0, right = 2 * j + 1 < width ? 2 : 1;
    const int first = (row[0] == nullptr ? 3 : 0) + left;
    each_vector<T>(channels, [&](Index c, auto... count) {
      V best = V{} - __builtin_inff();
      M choice = M{} + first;  // also where all values are -inf
      for (int r = 0; r < 3; ++r) {
        if (row[r] == nullptr) continue;
        for (int k = left; k <= right; ++k) {
          const V value = Memory<T>::load(row[r] + (2 * j - 1 + k) * channels + c, count...);
          const M better = (value > best) | (value != value);
          best = select(better, value, best);
          choice = better ? M{} + (3 * r + k) : choice;
        }
      }
      Memory<T>::store(y + j * channels + c, best, count...);
      store_bytes<T>(choices + j * channels + c, choice, count...);
    });
  }
}

template <typename T, typename A = AccumulatorOf<T>>
void unpool_rows(const PoolShape& shape, const PoolReaders<T>& from, Index first, Index count,
                 A* to) {
  using V = LanesOf<T>;
  const PoolReaders<T> readers = from;
  const Index channels = shape.channels, outputs = shape.outputs;
  for (Index w = first; w < first + count; ++w) {
    // The windows whose column 2 or 1 this pixel is, and whose column 0.
    const Index one = w / 2;
    const int place = w % 2 == 1 ? 2 : 1;
    const bool two = w % 2 == 1 && one + 1 < outputs;
    each_vector<T>(channels, [&](Index c, auto... left) {
      V sum{};
      const auto add = [&](int r, Index window, int column) {
        const Index at = window * channels + c;
        const auto chosen =
            load_bytes<T>(readers.choices[r] + at, left...) == 3 * readers.row[r] + column;
        sum = sum + select(chosen, Memory<T>::load(readers.dy[r] + at, left...), V{});
      };
      for (int r = 0; r < readers.count; ++r) {
        add(r, one, place);
        if (two) add(r, one + 1, 0);
      }
      Memory<A>::store(to + (w - first) * channels + c, sum, left...);
    });
  }
}

// NCHW: even and odd columns apart, so that neighbouring windows read neighbouring values. --------

template <typename T, typename A = AccumulatorOf<T>>
void widen_row(const T* from, Index count, A* to) {
  each_vector<T>(count, [&](Index i, auto... left) {
    Memory<A>::store(to + i, Memory<T>::load(from + i, left...), left...);
  });
}

template <typename T, typename A = AccumulatorOf<T>>
void narrow_row(const A* from, Index count, T* to) {
  each_vector<T>(count, [&](Index i, auto... left) {
    Memory<T>::store(to + i, Memory<A>::load(from + i, left...), left...);
  });
}

template <typename T, typename A = AccumulatorOf<T>>
void pool_plane(const PoolShape& shape, const T* const (&rows)[3], A* scratch, T* y,
                std::uint8_t* choices) {
  const Index width = shape.width, outputs = shape.outputs;
  const A none = -__builtin_inff();
  A* const whole = scratch;
  A *even[3], *odd[3];  // odd[r][j]: to the left of even[r][j]
  for (int r = 0; r < 3; ++r) {
    even[r] = whole + width + r * (2 * outputs + 1);
    odd[r] = even[r] + outputs;
    if (rows[r] == nullptr) {
      for (Index j = 0; j < 2 * outputs + 1; ++j) even[r][j] = none;
      continue;
    }
    widen_row(rows[r], width, whole);
    odd[r][0] = odd[r][outputs] = none;
    for (Index j = 0; j < outputs; ++j) even[r][j] = whole[2 * j];
    for (Index j = 0; j < width / 2; ++j) odd[r][j + 1] = whole[2 * j + 1];
  }
  const int first = rows[0] == nullptr ? 3 : 0;
  A* const best_of = whole;
  for (Index j = 0; j < outputs; ++j) {
    A best = none;
    int choice = first + (j == 0);  // also where all values are -inf
    const auto take = [&](int place, A value) {
      const bool better = value > best || value != value;
      best = better ? value : best;
      choice = better ? place : choice;
    };
    for (int r = 0; r < 3; ++r) {
      take(3 * r, odd[r][j]);
      take(3 * r + 1, even[r][j]);
      take(3 * r + 2, odd[r][j + 1]);
    }
    best_of[j] = best;
    choices[j] = static_cast<std::uint8_t>(choice);
  }
  narrow_row(best_of, outputs, y);
}

template <typename T, typename A = AccumulatorOf<T>>
void unpool_plane(const PoolShape& shape, const PoolReaders<T>& from, Index first, Index count,
                  A* scratch, A* to) {
  const Index outputs = shape.outputs;
  A *const dy = scratch, *const pixels = scratch + outputs;
  for (Index w = 0; w < 2 * outputs; ++w) pixels[w] = 0;
  for (int r = 0; r < from.count; ++r) {
    widen_row(from.dy[r], outputs, dy);
    const std::uint8_t* const choices = from.choices[r];
    const int row = 3 * from.row[r];
    for (Index j = 0; j < outputs; ++j) {
      pixels[2 * j] += choices[j] == row + 1 ? dy[j] : 0;
      pixels[2 * j + 1] += choices[j] == row + 2 ? dy[j] : 0;
    }
    for (Index j = 1; j < outputs; ++j) pixels[2 * j - 1] += choices[j] == row ? dy[j] : 0;
  }
  for (Index w = 0; w < count; ++w) to[w] = pixels[first + w];
}

template <typename T>
void pool(const PoolShape& shape, const T* const (&rows)[3], AccumulatorOf<T>* scratch, T* y,
          std::uint8_t* choices) {
  if (shape.planar)
    pool_plane<T>(shape, rows, scratch, y, choices);
  else
    pool_rows<T>(shape, rows, y, choices);
}

template <typename T>
void unpool(const PoolShape& shape, const PoolReaders<T>& readers, Index first, Index count,
            AccumulatorOf<T>* scratch, AccumulatorOf<T>* to) {
  if (shape.planar)
    unpool_plane<T>(shape, readers, first, count, scratch, to);
  else
    unpool_rows<T>(shape, readers, first, count, to);
}

}  // namespace
}  // namespace fusewise::cpu::FUSEWISE_ISA
