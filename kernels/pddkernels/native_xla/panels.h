// Products of activations with packed weights in float32, of any number of tokens.
//
// Weights [out, in] are packed in panels of 32 outputs, [out / 32, in, 32], the last one padded with zeros: a panel is one stream of memory,
// read in vectors. Activations are packed in tiles of a few tokens, [tiles, in, tokens], so that a panel times a tile keeps its sums in
// registers and reads both operands in order. An output is summed from the first input to the last whatever the number of tokens, so
// a token's numbers are the same to the bit beside any others.
//
// Where a processor adds beside its multiply-adds, inputs of a product cross (Winograd, A New Algorithm for Inner Product, IEEE Transactions
// on Computers C-17, 1968): x0 w0 + x1 w1 = (x0 + w1) (x1 + w0) - x0 x1 - w0 w1. Of three inputs two cross and one does not: two
// additions beside two multiply-adds instead of three. x0 x1 is summed once per token, w0 w1 once per output when weights are packed
// (layers.py). What is taken off again was rounded. So tokens and outputs are brought to one size, by powers of two, which round nothing; and
// every other three are x0 x1 + w0 w1 - (w1 - x0) (w0 - x1), so that what is taken off does not grow where inputs have one sign.
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
constexpr long kCrossing = 6;               // inputs of two threes: 0 and 1 cross, and so do 3 and 4
constexpr long kCrossRows = 2;              // of a panel before its weights: what is added for crossing ones, and what results are multiplied with

// Zen's adders are not its multipliers: three inputs take the time of two, 171 GFLOP/s of a core instead of 116 (measured).
#if defined(__AVX512F__) && (defined(__znver3__) || defined(__znver4__) || defined(__znver5__))
constexpr bool kAddsBeside = true;
#else
constexpr bool kAddsBeside = false;
#endif

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

// Packed x [tiles, in, tokens]. Where inputs cross, what is taken off for them and what results are multiplied with, [tokens]; else null.
struct Packed {
  float *values, *crosses, *scales;
};

// take(sums of a tile of kTokens and a panel: [kTokens][2] vectors), with `x` of the tile. `ahead`: what is read after this panel; along the
// first `fetches` inputs kFetch lines of it each are fetched.
template <int kTokens, int kFetch, bool kCross, class Take>
[[gnu::noinline]] void multiply(const float* panel, const Packed& tile, long in, const float* ahead, long fetches, const Take& take) {
  const float *weights = panel + (kCross ? kCrossRows * kPanel : 0), *x = tile.values;
  floats sums[kTokens][2];  // not initialised as a whole, nor copied so: that goes through memory
#pragma GCC unroll 16
  for (int token = 0; token < kTokens; ++token)
    if constexpr (kCross) {
      sums[token][0] = load(panel) - tile.crosses[token];
      sums[token][1] = load(panel + kLanes) - tile.crosses[token];
    } else {
      sums[token][0] = sums[token][1] = floats{};
    }
  const auto add = [&](long i) __attribute__((always_inline)) {
    const floats first = load(weights + i * kPanel), second = load(weights + i * kPanel + kLanes);
#pragma GCC unroll 16
    for (int token = 0; token < kTokens; ++token) {
      sums[token][0] += first * x[i * kTokens + token];
      sums[token][1] += second * x[i * kTokens + token];
    }
  };
  const auto add_crossing = [&](long i) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      const int half = part % 2;
      const float *w = weights + (i + part / 2 * 3) * kPanel + half * kLanes, *inputs = x + (i + part / 2 * 3) * kTokens;
      const floats first = load(w), second = load(w + kPanel), third = load(w + 2 * kPanel);
#pragma GCC unroll 16
      for (int token = 0; token < kTokens; ++token) {
        if (part < 2) sums[token][half] += (second + inputs[token]) * (first + inputs[kTokens + token]);
        else sums[token][half] -= (second - inputs[token]) * (first - inputs[kTokens + token]);
        sums[token][half] += third * inputs[2 * kTokens + token];
        asm volatile("" ::: "memory");  // read again for each half, as part of an addition: kept, they would take registers of sums
      }
    }
  };
  constexpr long kStep = kCross ? kCrossing : 1;
  long i = 0;
  for (; i < fetches && i + kStep <= in; i += kStep) {
#pragma GCC unroll 12
    for (long line = 0; line < kStep * kFetch; ++line) __builtin_prefetch(ahead + (i * kFetch + line) * kLine, 0, 2);
    if constexpr (kCross) add_crossing(i);
    else add(i);
  }
  if constexpr (kCross)
    for (; i + kStep <= in; i += kStep) add_crossing(i);
  for (; i < in; ++i) add(i);
  if constexpr (kCross) {
    const floats first = load(panel + kPanel), second = load(panel + kPanel + kLanes);
#pragma GCC unroll 16
    for (int token = 0; token < kTokens; ++token) {
      sums[token][0] *= first * tile.scales[token];
      sums[token][1] *= second * tile.scales[token];
    }
  }
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

// Packed x times packed weights [panels, in, 32], or with kCrossRows more where inputs cross; take(panel, tile, sums [tokens][2]) gets each result, and
// prepare(panel, tile) is told before: time to fetch what take needs.
//
// The next panel is fetched evenly along all tiles of this one. The last panels of a block are shared in smaller parts, so that threads wait for
// one another no longer than one of those takes.
template <bool kCross, class Take, class Prepare = NothingToPrepare>
void product(Team& team, const Tiles& tiles, const Packed& x, long in, const float* weights, long panels, const Take& take,
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
    const long stride = (in + (kCross ? kCrossRows : 0)) * kPanel;
    const float *mine = weights + panel * stride, *ahead = weights + std::min(panels - 1, panel + 1) * stride;
    for (long index = first; index < stop; ++index) {
      const long tile = start + index, lines = 2 * in, from = index * lines / count, fetched = (index + 1) * lines / count - from;
      prepare(panel, tile);
      with_tokens(tiles.size(tile), [&](auto tokens) {
        const long before = tiles.first(tile);
        const Packed values{x.values + before * in, x.crosses + (kCross ? before : 0), x.scales + (kCross ? before : 0)};
        const auto give = [&](const auto& sums) __attribute__((always_inline)) { take(panel, tile, sums); };
        if (fetched > in) multiply<tokens, 2, kCross>(mine, values, in, ahead + from * kLine, fetched / 2, give);
        else multiply<tokens, 1, kCross>(mine, values, in, ahead + from * kLine, fetched, give);
      });
    }
  });
}

}  // namespace pdd
