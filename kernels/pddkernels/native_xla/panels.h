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
  floats sums[kTokens][2];  // not initialised as a whole, nor copied so: that goes through memory
#pragma GCC unroll 16
  for (int token = 0; token < kTokens; ++token) sums[token][0] = sums[token][1] = floats{};
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
#pragma GCC unroll 16
  for (int token = 0; token < kTokens; ++token) {
    result[token][0] = sums[token][0];
    result[token][1] = sums[token][1];
  }
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

// Packed x [tiles, in, tokens] times packed weights [panels, in, 32]; take(panel, tile, sums [tokens][2]) gets each result.
template <class Take>
void product(Team& team, const Tiles& tiles, const float* x, long in, const float* weights, long panels, const Take& take) {
  const long most = std::max<long>(1, kBlockBytes / long(sizeof(float)) / in / std::max<long>(1, tiles.width));
  const long least = (tiles.count + most - 1) / most, threads = tiles.count < kTilesOfThread * team.size() ? 1 : team.size();
  const long blocks = (least + threads - 1) / threads * threads;
  team(blocks * panels, [&](long part) {
    const long panel = part % panels, block = part / panels, stop = (block + 1) * tiles.count / blocks;
    const float* mine = weights + panel * in * kPanel;
    const float* ahead = weights + std::min(panels - 1, panel + 1) * in * kPanel;
    for (long tile = block * tiles.count / blocks, done = 0; tile < stop; ++tile, ++done)
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
