// Products of activations with packed weights in float32, of any number of tokens.
//
// Weights [out, in] are packed in panels of 32 outputs, [out / 32, in, 32], the last one padded with zeros: a panel is one stream of memory,
// read in vectors. Activations are packed in tiles of a few tokens, [tiles, in, tokens], so that a panel times a tile keeps its sums in
// registers and reads both operands in order. An output is summed from the first input to the last whatever the number of tokens, so
// a token's numbers are the same to the bit beside any others.
#pragma once

#include <algorithm>

#include "numbers.h"
#include "team.h"
#include "transpose.h"

namespace pdd {

constexpr long kPanel = 2 * kLanes;
constexpr long kMostTokens = 12;            // of a tile: 24 sums, two vectors of weights
constexpr long kBlockBytes = 5 << 17;       // of activations that stay in a core's second-level cache while panels go by
constexpr long kTilesOfThread = 8;          // so many, and a thread reads all weights for its tiles instead of all tiles for its weights
constexpr long kPanelsInPieces = 2;         // of a block, the last ones
constexpr long kPieces = 4;
constexpr long kLine = kLanes;              // floats

// How tokens are cut into tiles: as evenly as it goes.
struct Tiles {
  long tokens, width, count;

  explicit Tiles(long tokens) : tokens(tokens) {
    const long least = (tokens + kMostTokens - 1) / kMostTokens;
    width = least == 0 ? 0 : (tokens + least - 1) / least;
    count = least == 0 ? 0 : (tokens + width - 1) / width;
  }
  long first(long tile) const { return tile * width; }
  long size(long tile) const { return std::min(width, tokens - first(tile)); }
};

// take(sums of a tile of kTokens and a panel: [kTokens][2] vectors). `ahead`: what is read after this panel; along the first `fetches` inputs
// kFetch lines of it each are fetched.
template <int kTokens, int kFetch, class Take>
[[gnu::noinline]] void multiply(const float* weights, const float* x, long in, const float* ahead, long fetches, const Take& take) {
  floats sums[kTokens][2];  // not initialised as a whole, nor copied so: that goes through memory
#pragma GCC unroll 16
  for (int token = 0; token < kTokens; ++token) sums[token][0] = sums[token][1] = floats{};
  const auto add = [&](long i) __attribute__((always_inline)) {
    const floats first = load(weights + i * kPanel), second = load(weights + i * kPanel + kLanes);
#pragma GCC unroll 16
    for (int token = 0; token < kTokens; ++token) {
      sums[token][0] += first * x[i * kTokens + token];
      sums[token][1] += second * x[i * kTokens + token];
    }
  };
  long i = 0;
  for (; i < fetches; ++i) {
    __builtin_prefetch(ahead + i * kFetch * kLine, 0, 2);
    if constexpr (kFetch > 1) __builtin_prefetch(ahead + (i * kFetch + 1) * kLine, 0, 2);
    add(i);
  }
  for (; i < in; ++i) add(i);
  take(sums);
}

// with(std::integral_constant<int, tokens>).
template <int kTokens = kMostTokens, class With>
inline void with_tokens(long tokens, const With& with) {
  if constexpr (kTokens > 0) {
    if (tokens == kTokens) with(std::integral_constant<int, kTokens>{});
    else with_tokens<kTokens - 1>(tokens, with);
  }
}

// Sixteen values of each of a tile's tokens, packed: to [16][kTokens].
template <int kTokens>
inline void store_packed(const floats (&values)[kTokens], float* to) {
  if constexpr (kTokens == 1) {
    store(to, values[0]);
  } else {
    floats columns[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) columns[i] = i < kTokens ? values[i] : floats{};
    transpose(columns);
    // A whole vector where what it has too many is written over next: past the last value may be another thread's.
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if ((kLanes - i) * kTokens >= kLanes) store(to + i * kTokens, columns[i]);
      else std::memcpy(to + i * kTokens, &columns[i], kTokens * sizeof(float));
    }
  }
}

struct NothingToPrepare {
  void operator()(long, long) const {}
};

// Packed x [tiles, in, tokens] times packed weights [panels, in, 32]; take(panel, tile, sums [tokens][2]) gets each result, and
// prepare(panel, tile) is told before: time to fetch what take needs.
//
// The next panel is fetched evenly along all tiles of this one. The last panels of a block are shared in smaller parts, so that threads wait for
// one another no longer than one of those takes.
template <class Take, class Prepare = NothingToPrepare>
void product(Team& team, const Tiles& tiles, const float* x, long in, const float* weights, long panels, const Take& take,
             const Prepare& prepare = {}) {
  const long most = std::max<long>(1, kBlockBytes / long(sizeof(float)) / in / std::max<long>(1, tiles.width));
  const long least = (tiles.count + most - 1) / most, threads = tiles.count < kTilesOfThread * team.size() ? 1 : team.size();
  const long blocks = (least + threads - 1) / threads * threads;
  const long pieces = tiles.count / std::max<long>(1, blocks) < kPieces ? 1 : kPieces, whole = std::max<long>(0, panels - kPanelsInPieces);
  const long parts = whole + (panels - whole) * pieces;  // of a block
  team(blocks * parts, [&](long part) {
    const long block = part / parts, at = part % parts, late = std::max<long>(0, at - whole), piece = late % pieces;
    const long panel = at < whole ? at : whole + late / pieces;
    const long start = block * tiles.count / blocks, count = (block + 1) * tiles.count / blocks - start;
    const long first = at < whole ? 0 : piece * count / pieces, stop = at < whole ? count : (piece + 1) * count / pieces;
    const float* mine = weights + panel * in * kPanel;
    const float* ahead = weights + std::min(panels - 1, panel + 1) * in * kPanel;
    for (long index = first; index < stop; ++index) {
      const long tile = start + index, lines = 2 * in, from = index * lines / count, fetched = (index + 1) * lines / count - from;
      prepare(panel, tile);
      with_tokens(tiles.size(tile), [&](auto tokens) {
        const float* values = x + tiles.first(tile) * in;
        const auto give = [&](const auto& sums) __attribute__((always_inline)) { take(panel, tile, sums); };
        if (fetched > in) multiply<tokens, 2>(mine, values, in, ahead + from * kLine, fetched / 2, give);
        else multiply<tokens, 1>(mine, values, in, ahead + from * kLine, fetched, give);
      });
    }
  });
}

}  // namespace pdd
