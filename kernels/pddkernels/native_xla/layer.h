// What kernels of whole layers and of the head share: memory, norms.
#pragma once

#include <bit>
#include <cmath>
#include <memory>
#include <new>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "ffi.h"
#include "panels.h"

namespace pdd {

using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;

constexpr long kHugePage = 1 << 21;

// Memory of one call, which its thread keeps for the next.
class Scratch {
 public:
  // Room for `values` in so many pieces, each on a cache line of its own.
  Scratch(long values, long pieces) {
    values += pieces * kLanes;
    Kept& kept = mine();
    if (values > kept.capacity) {
      const long bytes = (values * long(sizeof(float)) + kHugePage - 1) / kHugePage * kHugePage;
      kept.values.reset((float*)::operator new[](bytes, std::align_val_t(kHugePage)));
      kept.capacity = values;
#if defined(__linux__)
      madvise(kept.values.get(), bytes, MADV_HUGEPAGE);  // advice: without such pages it is slower and no less right
#endif
    }
    values_ = kept.values.get();
  }
  float* take(long values) { return values_ + std::exchange(used_, used_ + (values + kLanes - 1) / kLanes * kLanes); }

 private:
  struct Free {
    void operator()(float* values) const { ::operator delete[](values, std::align_val_t(kHugePage)); }
  };
  struct Kept {
    std::unique_ptr<float[], Free> values;
    long capacity = 0;
  };
  static Kept& mine() {
    thread_local Kept kept;
    return kept;
  }
  float* values_;
  long used_ = 0;
};

// What a norm multiplies values [n] with, before its weights.
inline float norm_scale(const float* x, long n, float eps) {
  floats sums = {};
  long i = 0;
  for (; i + kLanes <= n; i += kLanes) sums += load(x + i) * load(x + i);
  float sum = total(sums);
  for (; i < n; ++i) sum += x[i] * x[i];
  return 1.0f / std::sqrt(sum / float(n) + eps);
}

// Makes packed x [n][kTokens] ready to cross: each token times the power of two that brings the mean of its squares to between 1 and 4. Sums
// are written as fma, else it depends on kTokens whether a product is rounded before it is added.
template <int kTokens>
inline void cross(float* x, long n, float* crosses, float* scales) {
  float squares[kTokens] = {}, sums[kTokens] = {}, powers[kTokens];
  for (long i = 0; i < n; ++i)
#pragma GCC unroll 16
    for (int token = 0; token < kTokens; ++token) squares[token] = std::fma(x[i * kTokens + token], x[i * kTokens + token], squares[token]);
  for (long i = 0; i + kCrossing <= n; i += kCrossing) {
    const float* unit = x + i * kTokens;
#pragma GCC unroll 16
    for (int token = 0; token < kTokens; ++token) {
      sums[token] = std::fma(unit[token], unit[kTokens + token], sums[token]);
      sums[token] = std::fma(-unit[3 * kTokens + token], unit[4 * kTokens + token], sums[token]);
    }
  }
  for (int token = 0; token < kTokens; ++token) {
    const float mean = squares[token] / float(n);
    const int exponent = (std::bit_cast<std::int32_t>(mean) >> 23) - 127, power = exponent >> 1;  // mean is in [4^power, 4 * 4^power)
    powers[token] = std::bit_cast<float>((127 - power) << 23);
    scales[token] = std::bit_cast<float>((127 + power) << 23);
    crosses[token] = sums[token] * powers[token] * powers[token];
  }
  for (long i = 0; i < n; ++i)
#pragma GCC unroll 16
    for (int token = 0; token < kTokens; ++token) x[i * kTokens + token] *= powers[token];
}

inline void cross(const Tiles& tiles, long tile, long n, const Packed& x) {
  const long first = tiles.first(tile);
  with_tokens(tiles.size(tile), [&](auto tokens) { cross<tokens>(x.values + first * n, n, x.crosses + first, x.scales + first); });
}

// Packs tokens of x [tokens, n], normed if there are weights for that, ready to cross if there is room for what that needs.
inline void pack(const Tiles& tiles, long tile, const float* x, long n, const float* weights, float eps, const Packed& out) {
  with_tokens(tiles.size(tile), [&](auto tokens) {
    constexpr int kTokens = tokens;
    const float* from = x + tiles.first(tile) * n;
    float *to = out.values + tiles.first(tile) * n, scales[kTokens];
    if (weights != nullptr)
      for (int token = 0; token < kTokens; ++token) scales[token] = norm_scale(from + token * n, n, eps);
    long i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      floats values[kTokens];
#pragma GCC unroll 16
      for (int token = 0; token < kTokens; ++token) values[token] = load(from + token * n + i);
      if (weights != nullptr) {
        const floats weight = load(weights + i);
#pragma GCC unroll 16
        for (int token = 0; token < kTokens; ++token) values[token] = weight * (values[token] * scales[token]);
      }
      store_packed(values, to + i * kTokens);
    }
    for (; i < n; ++i)
      for (int token = 0; token < kTokens; ++token) {
        const float value = from[token * n + i];
        to[i * kTokens + token] = weights == nullptr ? value : weights[i] * (value * scales[token]);
      }
    if (out.crosses != nullptr) cross<kTokens>(to, n, out.crosses + tiles.first(tile), out.scales + tiles.first(tile));
  });
}

}  // namespace pdd
