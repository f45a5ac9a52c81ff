#pragma once

// How the pieces of BatchNorm are distributed over threads.

#include "common/divide.h"
#include "cpu/batch_norm_pieces.h"
#include "cpu/threads.h"

namespace fusewise::cpu::batch_norm {

constexpr Index kChannelTile = 64;          // channels whose partial sums are combined together
constexpr Index kChannelRange = 8;          // NCHW: whole bytes of bits, for any number of pixels
constexpr Index kWorthThreads = 16 * 1024;  // fewer elements run on one thread

/// Two sums for each of some channels.
struct Sums {
  double *first, *second;
};

/// Takes all pieces through `reduce` and `apply`, with `finish` between them.
/// Operation: reduce(worker, piece, sums), merge(count, sums, count of part, part, channels),
/// finish(stream, channel, channels, sums), apply(worker, piece), is_blanked(piece).
class Plan {
 public:
  const int workers;

  Plan(const Context& context, const Geometry& geometry, bool reduces)
      : workers(geometry.elements() < kWorthThreads ? 1 : threads(context)),
        context_(context),
        geometry_(geometry),
        reduces_(reduces),
        units_(geometry.streams * geometry.bundles),
        range_(std::max<Index>(1, kChannelRange / geometry.bundle)),
        size_(geometry.bundle),
        by_channel_(geometry.planar && is_even(divide_up(units_, range_), workers)),
        parts_(context,
               reduces ? 2 * size_ * (by_channel_ ? workers : units_ * geometry.pieces) : 0),
        totals_(context, 2 * geometry.streams * geometry.channels) {}

  template <typename Operation>
  void run(const Operation& operation) const {
    const Geometry& g = geometry_;
    if (by_channel_) {
      each(divide_up(units_, range_), [&](Index worker, Index begin, Index end) {
        for (Index unit = begin * range_; unit < std::min(units_, end * range_); ++unit) {
          const Bundle all = bundle(unit);
          const Sums total = totals(all, 0), sums = part(worker);
          combine(operation, unit, all.channels, total, [&](const Piece& piece, Index) {
            operation.reduce(worker, piece, sums);
            return sums;
          });
          operation.finish(all.stream, all.channel, all.channels, total);
          for (Index i = g.pieces - 1; i >= 0; --i) operation.apply(worker, piece(unit, i));
        }
      });
      return;
    }
    if (reduces_) {
      each(units_ * g.pieces, [&](Index worker, Index begin, Index end) {
        for (Index i = begin; i < end; ++i) {
          const Piece at = piece(i / g.pieces, i % g.pieces);
          if (!operation.is_blanked(at)) operation.reduce(worker, at, part(i));
        }
      });
    }
    const Index tiles = divide_up(size_, kChannelTile);
    each(units_ * tiles, [&](Index, Index begin, Index end) {
      for (Index i = begin; i < end; ++i) {
        const Index unit = i / tiles, c = i % tiles * kChannelTile;
        const Bundle all = bundle(unit);
        const Index count = std::min(kChannelTile, all.channels - c);
        const Sums total = totals(all, c);
        combine(operation, unit, count, total, [&](const Piece&, Index k) {
          const Sums sums = part(unit * g.pieces + k);
          return Sums{sums.first + c, sums.second + c};
        });
        operation.finish(all.stream, all.channel + c, count, total);
      }
    });
    // In reverse order: what was read last is still in the nearest cache.
    each(units_ * g.pieces, [&](Index worker, Index begin, Index end) {
      for (Index i = end - 1; i >= begin; --i) {
        operation.apply(worker, piece(i / g.pieces, i % g.pieces));
      }
    });
  }

  /// Whether two workers may write bits of the same byte.
  bool shares_bytes() const {
    const Geometry& g = geometry_;
    const bool aligned = by_channel_ || (!g.planar && g.row() % 8 == 0);
    return workers > 1 && (!aligned || g.channels * g.pixels % 8 != 0);
  }

 private:
  /// Whether ranges of channels keep all workers busy.
  static bool is_even(Index ranges, int workers) {
    return ranges % workers == 0 || ranges >= 4 * workers;
  }
  /// Calls work(worker, begin, end). A worker has the same range for the same count.
  template <typename Work>
  void each(Index count, const Work& work) const {
    parallel_for(context_, count > 0 ? workers : 0, [&](Index begin, Index end) {
      for (Index w = begin; w < end; ++w) {
        work(w, count * w / workers, count * (w + 1) / workers);
      }
    });
  }
  template <typename Operation, typename Part>
  void combine(const Operation& operation, Index unit, Index channels, Sums total,
               const Part& part) const {
    std::fill_n(total.first, channels, 0.0);
    std::fill_n(total.second, channels, 0.0);
    if (!reduces_) return;
    double count = 0;
    for (Index i = 0; i < geometry_.pieces; ++i) {
      const Piece at = piece(unit, i);
      if (operation.is_blanked(at)) continue;
      const auto values = static_cast<double>(at.samples * at.pixels);
      operation.merge(count, total, values, part(at, i), channels);
      count += values;
    }
  }
  /// The channels of a unit.
  struct Bundle {
    Index stream, channel, channels;
  };
  Bundle bundle(Index unit) const {
    const Geometry& g = geometry_;
    const Index channel = unit % g.bundles * g.bundle;
    return {unit / g.bundles, channel, std::min(g.bundle, g.channels - channel)};
  }
  Piece piece(Index unit, Index i) const {
    const Bundle all = bundle(unit);
    return geometry_.piece(all.stream, all.channel, i);
  }
  Sums part(Index i) const {
    double* from = parts_.data() + 2 * size_ * i;
    return {from, from + size_};
  }
  /// Of the c-th channel of a bundle.
  Sums totals(const Bundle& all, Index c) const {
    double* from = totals_.data() + all.stream * geometry_.channels + all.channel + c;
    return {from, from + geometry_.streams * geometry_.channels};
  }

  const Context& context_;
  const Geometry& geometry_;
  const bool reduces_;
  const Index units_, range_, size_;  // bundles, bundles of a range, channels of a bundle
  const bool by_channel_;
  Scratch<double> parts_, totals_;
};

}  // namespace fusewise::cpu::batch_norm
