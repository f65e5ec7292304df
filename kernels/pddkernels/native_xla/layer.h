// What kernels of whole layers and of the head share: memory, norms.
#pragma once

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

// Packs tokens of x [tokens, n], normed.
inline void pack_normed(const Tiles& tiles, long tile, const float* x, long n, const float* weights, float eps, float* out) {
  const long size = tiles.size(tile);
  float* to = out + tiles.first(tile) * n;
  for (long token = 0; token < size; ++token) {
    const float* from = x + (tiles.first(tile) + token) * n;
    const float scale = norm_scale(from, n, eps);
    for (long i = 0; i < n; ++i) to[i * size + token] = weights[i] * (from[i] * scale);
  }
}

}  // namespace pdd
