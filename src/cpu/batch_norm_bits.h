#pragma once

// The bits that forward saves for backward: where the gradient of relu or relu6 passes.

#include <cstring>

#include "cpu/batch_norm_plan.h"

namespace fusewise::cpu::batch_norm {

inline std::uint64_t load_word(const std::uint8_t* from) {
  std::uint64_t word;
  std::memcpy(&word, from, sizeof(word));
  return word;
}
inline void store_word(std::uint8_t* to, std::uint64_t word) {
  std::memcpy(to, &word, sizeof(word));
}

/// Sets bits [bit, bit + count) of `to`, which are 0, to those of `from`. `shared`: other threads
/// may write the other bits of the first and the last byte at the same time.
inline void put_bits(std::uint8_t* to, Index bit, const std::uint8_t* from, Index count,
                     bool shared) {
  const int shift = static_cast<int>(bit % 8);
  to += bit / 8;
  const auto set = [&](Index i, unsigned bits) {
    if (shared)
      __atomic_fetch_or(to + i, static_cast<std::uint8_t>(bits), __ATOMIC_RELAXED);
    else
      to[i] |= static_cast<std::uint8_t>(bits);
  };
  const Index whole = count / 8;
  const unsigned rest = count % 8 == 0 ? 0 : from[whole] & ((1u << count % 8) - 1);
  if (shift == 0) {
    std::memcpy(to, from, whole);
    if (rest != 0) set(whole, rest);
    return;
  }
  if (whole > 0) set(0, unsigned(from[0]) << shift);
  Index i = 1;
  for (; i + 8 <= whole; i += 8) {
    store_word(to + i, load_word(from + i) << shift | from[i - 1] >> (8 - shift));
  }
  for (; i < whole; ++i) {
    to[i] = static_cast<std::uint8_t>(from[i] << shift | from[i - 1] >> (8 - shift));
  }
  const unsigned last = rest << shift | (whole > 0 ? from[whole - 1] >> (8 - shift) : 0);
  if ((last & 0xff) != 0) set(whole, last);
  if (last >> 8 != 0) set(whole + 1, last >> 8);
}

/// Bits [0, count) of `to` become bits [bit, bit + count) of `from`.
inline void get_bits(std::uint8_t* to, const std::uint8_t* from, Index bit, Index count) {
  const int shift = static_cast<int>(bit % 8);
  from += bit / 8;
  const Index bytes = (count + 7) / 8, last = (shift + count - 1) / 8;
  if (shift == 0) return void(std::memcpy(to, from, bytes));
  Index i = 0;
  for (; i + 8 <= last; i += 8) {
    store_word(to + i, load_word(from + i) >> shift | std::uint64_t(from[i + 8]) << (64 - shift));
  }
  for (; i < bytes; ++i) {
    const unsigned next = i + 1 <= last ? from[i + 1] : 0;
    to[i] = static_cast<std::uint8_t>(from[i] >> shift | next << (8 - shift));
  }
}

/// The bits of one matrix at a time, with rows that start at a byte.
class Bits {
 public:
  Bits(const Context& context, const Geometry& geometry, const TensorView& t, const Plan& plan)
      : geometry_(geometry),
        shared_(plan.shares_bytes()),
        all_(static_cast<std::uint8_t*>(t.data)),
        bytes_(t.defined()
                   ? rounded_up(geometry.piece_elements() / 8 + geometry.piece_rows() + 8, 64)
                   : 0),
        own_(context, plan.workers * bytes_) {}

  Rows<std::uint8_t> rows(Index worker, const BatchNormShape& shape) const {
    if (bytes_ == 0) return {};
    return {own_.data() + worker * bytes_, (shape.columns * shape.channels + 7) / 8};
  }
  void put(Index worker, const BatchNormShape& shape, const Piece& piece, Index offset) const {
    each(worker, shape, piece, offset, [&](std::uint8_t* row, Index bit, Index count) {
      put_bits(all_, bit, row, count, shared_);
    });
  }
  void get(Index worker, const BatchNormShape& shape, const Piece& piece, Index offset) const {
    each(worker, shape, piece, offset,
         [&](std::uint8_t* row, Index bit, Index count) { get_bits(row, all_, bit, count); });
  }

 private:
  template <typename Body>
  void each(Index worker, const BatchNormShape& shape, const Piece& piece, Index offset,
            const Body& body) const {
    if (bytes_ == 0) return;
    const auto [data, stride] = rows(worker, shape);
    const Geometry& g = geometry_;
    const Index sample = piece.stream * g.samples + piece.sample;
    if (g.planar) {
      const Index first = (sample * g.channels + piece.channel) * g.pixels + piece.pixel;
      for (Index row = 0; row < shape.rows; ++row) {
        body(data + row * stride, first + row * g.channels * g.pixels,
             shape.columns * shape.channels);
      }
      return;
    }
    const Index first = (sample * g.pixels + piece.pixel + offset) * g.channels;
    if (shape.columns % 8 == 0) return body(data, first, shape.rows * shape.columns);
    for (Index row = 0; row < shape.rows; ++row) {
      body(data + row * stride, first + row * shape.columns, shape.columns);
    }
  }

  const Geometry& geometry_;
  const bool shared_;
  std::uint8_t* all_;
  Index bytes_;
  Scratch<std::uint8_t> own_;
};

}  // namespace fusewise::cpu::batch_norm
