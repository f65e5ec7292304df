// Attention of a row with several new tokens, in bfloat16 with float32 scores, softmax and sums; see products.h for the processors.
//
// The keys and values that the row sees are packed for small products first, once for all of its queries. A task is one KV head and a tile
// of queries, all query heads of that head: it goes over the keys a span at a time with an online softmax (arXiv:1805.02867), and stops at
// the last key that its queries see.
#include "products.h"

#ifdef __AVX512BF16__
#include <algorithm>
#include <limits>

namespace pdd {
namespace {

constexpr long kSpan = 256;
constexpr long kTileRows = 24;
constexpr long kMaxGroup = 64;
constexpr long kMaxDim = 256;

struct Shape {
  long kv_heads, group, page_size, dim;
  long padded_dim() const { return (dim + kOuts - 1) / kOuts * kOuts; }
};

// Positions [first, stop) of the row to k_packed [kv_heads, blocks of kOuts keys, dim / 2, kOuts, 2] and
// v_packed [kv_heads, padded_dim / kOuts, keys / 2, kOuts, 2]; zeros past the last key and past dim.
void pack(const bfloat16* k, const bfloat16* v, const std::int32_t* table, long first, long stop, const Shape& shape, bfloat16* k_packed,
          bfloat16* v_packed) {
  const auto [kv_heads, group, page_size, dim] = shape;
  const long blocks = (stop - first + kOuts - 1) / kOuts, padded = shape.padded_dim();
  const bfloat16 zeros[kMaxDim] = {};
#pragma omp parallel for schedule(static) collapse(2)
  for (long head = 0; head < kv_heads; ++head) {
    for (long block = 0; block < blocks; ++block) {
      const bfloat16 *keys[kOuts], *values[kOuts];
      for (long i = 0; i < kOuts; ++i) {
        const long position = first + block * kOuts + i;
        const bool inside = position < stop;
        const long offset = inside ? ((long(table[position / page_size]) * kv_heads + head) * page_size + position % page_size) * dim : 0;
        keys[i] = inside ? k + offset : zeros;
        values[i] = inside ? v + offset : zeros;
      }
      bfloat16* to = k_packed + (head * blocks + block) * dim * kOuts;
      for (long i = 0; i < kOuts; ++i)
        for (long p = 0; p < dim / 2; ++p) std::memcpy(to + (p * kOuts + i) * 2, keys[i] + p * 2, 4);
      for (long i = 0; i < kOuts; i += 2) {
        for (long d = 0; d < padded; ++d) {
          const long part = d / kOuts, in_part = d % kOuts;
          to = v_packed + (((head * (padded / kOuts) + part) * blocks * kOuts + block * kOuts + i) * kOuts) + in_part * 2;
          to[0] = d < dim ? values[i][d] : zeros[0];
          to[1] = d < dim ? values[i + 1][d] : zeros[0];
        }
      }
    }
  }
}

struct Tile {
  float scores[kMaxGroup * kSpan];
  bfloat16 weights[kMaxGroup * kSpan];
  bfloat16 queries[kMaxGroup * kMaxDim];
  float sums_of_values[kMaxGroup * kMaxDim];
  float maxima[kMaxGroup], sums[kMaxGroup];
};

// A row of scores, of which [begin, end) are seen, to bfloat16 weights, zero elsewhere; updates maximum and sum, returns what the sums so
// far shrink by.
float softmax(float* scores, bfloat16* weights, long begin, long end, long width, float scale, float soft_cap, float& maximum, float& sum) {
  float largest = maximum;
  if (soft_cap > 0) {
    for (long i = begin; i < end; ++i) scores[i] = soft_cap * std::tanh(scores[i] * scale / soft_cap);
    scale = 1;
  }
#pragma omp simd reduction(max : largest)
  for (long i = begin; i < end; ++i) {
    scores[i] *= scale;
    largest = scores[i] > largest ? scores[i] : largest;
  }
  float added = 0;
#pragma omp simd reduction(+ : added)
  for (long i = begin; i < end; ++i) {
    scores[i] = exponential(scores[i] - largest);
    added += scores[i];
  }
  std::fill(scores, scores + std::min(begin, width), 0.0f);
  std::fill(scores + std::max(end, 0L), scores + width, 0.0f);
  for (long i = 0; i < width; i += 16)
    _mm256_storeu_si256((__m256i*)(weights + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(scores + i)));
  const float shrink = exponential(maximum - largest);
  maximum = largest;
  sum = sum * shrink + added;
  return shrink;
}

void attend_tile(Tile& tile, const bfloat16* queries, const bfloat16* k_packed, const bfloat16* v_packed, long first, long stop, long context,
                 long token, long tokens, long window, const Shape& shape, long head, const float* sinks, float scale, float soft_cap,
                 bfloat16* out) {
  const auto [kv_heads, group, page_size, dim] = shape;
  const long heads = kv_heads * group, rows = tokens * group, padded = shape.padded_dim();
  const long blocks = (stop - first + kOuts - 1) / kOuts;
  for (long row = 0; row < rows; ++row)
    std::copy_n(queries + ((token + row / group) * heads + head * group + row % group) * dim, dim, tile.queries + row * dim);
  std::fill_n(tile.sums_of_values, rows * padded, 0.0f);
  std::fill_n(tile.maxima, rows, -std::numeric_limits<float>::infinity());
  std::fill_n(tile.sums, rows, 0.0f);
  // In keys from ``first``: what the tile's first query sees first, and the one past what its last query sees.
  const long seen_from = std::max(0L, context + token - window + 1 - first), seen_to = context + token + tokens - first;
  for (long begin = seen_from / kOuts * kOuts; begin < seen_to; begin += kSpan) {
    const long block = begin / kOuts, num_blocks = std::min(kSpan / kOuts, (seen_to - begin + kOuts - 1) / kOuts);
    for (long b = 0; b < num_blocks; ++b) {
      in_steps(rows, [&]<int kM, int kSplit>(long row) {
        __m512 sums[kM][2] = {};
        multiply<kM, kSplit>(tile.queries + row * dim, dim, k_packed + (head * blocks + block + b) * dim * kOuts, dim / 2, sums);
#pragma GCC unroll 12
        for (int m = 0; m < kM; ++m)
#pragma GCC unroll 2
          for (int o = 0; o < 2; ++o) _mm512_storeu_ps(tile.scores + (row + m) * kSpan + b * kOuts + o * 16, sums[m][o]);
      });
    }
    for (long row = 0; row < rows; ++row) {
      const long position = context + token + row / group - first;  // of the query, in keys from ``first``
      const long width = num_blocks * kOuts;
      const long low = std::clamp(position - window + 1 - begin, 0L, width), high = std::clamp(position + 1 - begin, 0L, width);
      if (low >= high) {
        std::fill_n(tile.weights + row * kSpan, width, bfloat16{0});
        continue;
      }
      const float shrink = softmax(tile.scores + row * kSpan, tile.weights + row * kSpan, low, high, width, scale, soft_cap, tile.maxima[row],
                                   tile.sums[row]);
      for (long d = 0; d < padded; ++d) tile.sums_of_values[row * padded + d] *= shrink;
    }
    for (long part = 0; part < padded / kOuts; ++part) {
      const bfloat16* w = v_packed + ((head * (padded / kOuts) + part) * blocks + block) * kOuts * kOuts;
      in_steps(rows, [&]<int kM, int kSplit>(long row) {
        float* at = tile.sums_of_values + row * padded + part * kOuts;
        __m512 sums[kM][2];
#pragma GCC unroll 12
        for (int m = 0; m < kM; ++m)
#pragma GCC unroll 2
          for (int o = 0; o < 2; ++o) sums[m][o] = _mm512_loadu_ps(at + m * padded + o * 16);
        multiply<kM, kSplit>(tile.weights + row * kSpan, kSpan, w, num_blocks * kOuts / 2, sums);
#pragma GCC unroll 12
        for (int m = 0; m < kM; ++m)
#pragma GCC unroll 2
          for (int o = 0; o < 2; ++o) _mm512_storeu_ps(at + m * padded + o * 16, sums[m][o]);
      });
    }
  }
  for (long row = 0; row < rows; ++row) {
    float sum = tile.sums[row], shrink = 1;
    if (sinks != nullptr) {
      const float sink = sinks[head * group + row % group], largest = std::max(sink, tile.maxima[row]);
      shrink = exponential(tile.maxima[row] - largest);
      sum = sum * shrink + exponential(sink - largest);
    }
    bfloat16* to = out + ((token + row / group) * heads + head * group + row % group) * dim;
    for (long d = 0; d < dim; ++d) to[d] = narrow<bfloat16>(tile.sums_of_values[row * padded + d] * shrink / sum);
  }
}

}  // namespace
}  // namespace pdd

using namespace pdd;

extern "C" {

// queries, out [tokens, kv_heads * group, dim] bfloat16: of one row's new tokens, which stand at context, context + 1 ... · pages
// [N, kv_heads, page_size, dim] bfloat16 · table [P]: of the row · window: keys that a query sees at most, itself one of them ·
// sinks [kv_heads * group] or null · soft_cap 0: none · k_packed: kv_heads * keys * dim, v_packed: kv_heads * keys * dim rounded up to
// kOuts, of keys from max(0, context - window + 1) to context + tokens, rounded up to kOuts. dim even, up to 256; group up to 64.
void pdd_attend_chunk(const void* queries, const void* k, const void* v, const std::int32_t* table, long tokens, long context, long window,
                      const float* sinks, float scale, float soft_cap, void* k_packed, void* v_packed, void* out, long kv_heads, long group,
                      long page_size, long dim) {
  const Shape shape{kv_heads, group, page_size, dim};
  const long first = std::max(0L, context - window + 1), stop = context + tokens;
  pack((const bfloat16*)k, (const bfloat16*)v, table, first, stop, shape, (bfloat16*)k_packed, (bfloat16*)v_packed);
  const long per_tile = std::max(1L, kTileRows / group), tiles = (tokens + per_tile - 1) / per_tile;
#pragma omp parallel
  {
    static thread_local Tile tile;
#pragma omp for schedule(dynamic)
    for (long task = 0; task < tiles * kv_heads; ++task) {
      const long number = tiles - 1 - task / kv_heads;  // the last ones see most: longest first
      const long token = number * per_tile;
      attend_tile(tile, (const bfloat16*)queries, (const bfloat16*)k_packed, (const bfloat16*)v_packed, first, stop, context, token,
                  std::min(per_tile, tokens - token), window, shape, task % kv_heads, sinks, scale, soft_cap, (bfloat16*)out);
    }
  }
}
}
#endif
