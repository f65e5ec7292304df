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

namespace pdd {

constexpr long kPanel = 2 * kLanes;
constexpr long kMostTokens = 12;            // of a tile: 24 sums, two vectors of weights
constexpr long kBlockBytes = 1 << 19;       // of activations that stay in a core's second-level cache while panels go by
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

// The sums of a tile of kTokens and a panel: [kTokens][2] vectors. `ahead`: what is read after this panel, kFetch lines of it per input.
template <int kTokens, int kFetch>
[[gnu::noinline]] void multiply(const float* weights, const float* x, long in, const float* ahead, floats (&result)[kTokens][2]) {
  floats sums[kTokens][2] = {};
  for (long i = 0; i < in; ++i) {
    const floats first = load(weights + i * kPanel), second = load(weights + i * kPanel + kLanes);
    if constexpr (kFetch > 0) __builtin_prefetch(ahead + i * kFetch * kLine, 0, 2);
    if constexpr (kFetch > 1) __builtin_prefetch(ahead + (i * kFetch + 1) * kLine, 0, 2);
#pragma GCC unroll 16
    for (int token = 0; token < kTokens; ++token) {
      sums[token][0] += first * x[i * kTokens + token];
      sums[token][1] += second * x[i * kTokens + token];
    }
  }
  std::memcpy(result, sums, sizeof sums);
}

// with(std::integral_constant<int, tokens>).
template <int kTokens = kMostTokens, class With>
inline void with_tokens(long tokens, const With& with) {
  if constexpr (kTokens > 0) {
    if (tokens == kTokens) with(std::integral_constant<int, kTokens>{});
    else with_tokens<kTokens - 1>(tokens, with);
  }
}

// Packed x [tiles, in, tokens] times packed weights [panels, in, 32]; take(panel, tile, sums [tokens][2]) gets each result.
template <class Take>
void product(Team& team, const Tiles& tiles, const float* x, long in, const float* weights, long panels, const Take& take) {
  const long per_block = std::max<long>(1, kBlockBytes / long(sizeof(float)) / in / std::max<long>(1, tiles.width));
  const long blocks = (tiles.count + per_block - 1) / per_block;
  team(blocks * panels, [&](long part) {
    const long panel = part % panels, stop = std::min(tiles.count, (part / panels + 1) * per_block);
    const float* mine = weights + panel * in * kPanel;
    const float* ahead = weights + std::min(panels - 1, panel + team.size()) * in * kPanel;
    for (long tile = part / panels * per_block, done = 0; tile < stop; ++tile, ++done)
      with_tokens(tiles.size(tile), [&](auto tokens) {
        floats sums[tokens][2];
        const float* from = x + tiles.first(tile) * in;
        if (stop - tile + done == 1) multiply<tokens, 2>(mine, from, in, ahead, sums);
        else if (done < 2) multiply<tokens, 1>(mine, from, in, ahead + done * in * kLine, sums);
        else multiply<tokens, 0>(mine, from, in, ahead, sums);
        take(panel, tile, sums);
      });
  });
}

}  // namespace pdd
