// Attention of many queries of one row, one KV head at a time: blocks of queries against blocks of keys, softmax in one pass over the keys
// (arXiv:2205.14135), float32.
//
// Queries of a block lie along the vectors, kVectors * 16 of them (heads of the group, each with its tokens), keys and features across. Then
// products need no transposed keys, and maxima and sums over keys no shuffles.
#pragma once

#include <vector>

#include "attention.h"
#include "numbers.h"
#include "powers.h"
#include "transpose.h"

namespace pdd {

constexpr int kBlockKeys = 128;
constexpr int kMostVectors = 6;
constexpr float kMasked = -1e30f;

// c [rows][width] = c * shrink [width] + sum over k < depth of a[row * row_stride + k * depth_stride] * b[k][width], width = kVectors * 16;
// without kKeep c was nothing. Eight rows times three vectors at a time: 24 sums in registers for 11 loads.
template <int kVectors, bool kKeep>
void accumulate(const float* a, long row_stride, long depth_stride, const float* b, const float* shrink, float* c, long rows, long depth) {
  constexpr int kWidth = kVectors * kLanes;
  const auto tile = [&](auto num_rows, auto num_columns, long row, int first) {
    constexpr int kRows = decltype(num_rows)::value, kColumns = decltype(num_columns)::value;
    floats sums[kRows][kColumns];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kColumns; ++v)
        if constexpr (kKeep) sums[r][v] = load(c + (row + r) * kWidth + (first + v) * kLanes) * load(shrink + (first + v) * kLanes);
        else sums[r][v] = floats{};
    const float *from = a + row * row_stride, *columns = b + first * kLanes;
    for (long k = 0; k < depth; ++k, from += depth_stride, columns += kWidth) {
      floats column[kColumns];
#pragma GCC unroll 4
      for (int v = 0; v < kColumns; ++v) column[v] = load(columns + v * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kColumns; ++v) sums[r][v] += column[v] * from[r * row_stride];
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kColumns; ++v) store(c + (row + r) * kWidth + (first + v) * kLanes, sums[r][v]);
  };
  const auto all_rows = [&](auto num_columns, int first) {
    long row = 0;
    for (; row + 8 <= rows; row += 8) tile(std::integral_constant<int, 8>{}, num_columns, row, first);
    for (; row < rows; ++row) tile(std::integral_constant<int, 1>{}, num_columns, row, first);
  };
  int first = 0;
  for (; first + 3 <= kVectors; first += 3) all_rows(std::integral_constant<int, 3>{}, first);
  if constexpr (kVectors % 3 != 0) all_rows(std::integral_constant<int, kVectors % 3>{}, first);
}

// Tokens [token, token + tokens) of the batch, from `position` of their row on, and heads [head, head + heads), all of one KV head.
struct QueryBlock {
  const std::int32_t* table;
  long token, tokens, position, head, heads, kv_head;
};

// Widens keys and values of positions [first, first + count) of the block's row and KV head: [count, dim] each.
using Widen = void (*)(const void* pages, const QueryBlock& block, const Shape& shape, long first, long count, float* keys, float* values);

// Those of the next block of keys are fetched meanwhile.
template <class Page>
void widen_keys(const void* pages, const QueryBlock& block, const Shape& shape, long first, long count, float* keys, float* values) {
  constexpr long kLineValues = sizeof(floats) / sizeof(Page);
  const long dim = shape.dim, stride = 2 * shape.kv_heads * dim, end = block.position + block.tokens;
  const auto widen_all = [dim](const Page* from, float* to) {
    long i = 0;
    for (; i + kLanes <= dim; i += kLanes) store(to + i, load(from + i));
    for (; i < dim; ++i) to[i] = widen(from[i]);
  };
  const auto stored = [&](long position) {
    const long token = long(block.table[position / shape.page_size]) * shape.page_size + position % shape.page_size;
    return (const Page*)pages + token * stride + 2 * block.kv_head * dim;
  };
  for (long at = first; at < first + count;) {
    const long stop = std::min(first + count, (at / shape.page_size + 1) * shape.page_size);
    const Page *from = stored(at), *ahead = stored(std::min(at + kBlockKeys, end - 1));
    for (; at < stop; ++at, from += stride, ahead += stride, keys += dim, values += dim) {
      for (long i = 0; i < 2 * dim; i += kLineValues) __builtin_prefetch(ahead + i);
      widen_all(from, keys);
      widen_all(from + dim, values);
    }
  }
}

// to [dim][width]: the queries at `places`, times `unit`, as columns, and zeros past them.
template <int kVectors>
void place_queries(const float* queries, const long* places, long num_columns, long dim, float unit, float* to) {
  constexpr int kWidth = kVectors * kLanes;
  for (int column = 0; column < kWidth; column += kLanes) {
    const long count = std::min<long>(kLanes, num_columns - column);
    long i = 0;
    for (; i + kLanes <= dim; i += kLanes) {
      floats values[kLanes];
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) values[j] = j < count ? load(queries + places[column + j] + i) * unit : floats{};
      transpose(values);
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) store(to + (i + j) * kWidth + column, values[j]);
    }
    for (; i < dim; ++i)
      for (int j = 0; j < kLanes; ++j) to[i * kWidth + column + j] = j < count ? queries[places[column + j] + i] * unit : 0.0f;
  }
}

// The columns of from [dim][width], times their `shares`, to their places in out.
template <int kVectors>
void place_results(const float* from, const float* shares, const long* places, long num_columns, long dim, float* out) {
  constexpr int kWidth = kVectors * kLanes;
  for (int column = 0; column < kWidth; column += kLanes) {
    const long count = std::min<long>(kLanes, num_columns - column);
    const floats share = load(shares + column);
    long i = 0;
    for (; i + kLanes <= dim; i += kLanes) {
      floats values[kLanes];
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) values[j] = load(from + (i + j) * kWidth + column) * share;
      transpose(values);
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j)
        if (j < count) store(out + places[column + j] + i, values[j]);
    }
    for (; i < dim; ++i)
      for (int j = 0; j < count; ++j) out[places[column + j] + i] = from[i * kWidth + column + j] * share[j];
  }
}

// kVectors: enough for heads * tokens. queries, out [T, heads, dim].
template <int kVectors>
void attend_block(const QueryBlock& block, const float* queries, const void* pages, Widen widen_keys, const Shape& shape, long window, const float* sinks,
                  float* out) {
  constexpr int kWidth = kVectors * kLanes;
  const long dim = shape.dim;
  thread_local std::vector<float> scratch;
  scratch.resize((2 * dim + kBlockKeys) * kWidth + 2 * kBlockKeys * dim + kLanes);
  // On a cache line, else every other load of a vector takes two of them.
  float* aligned = (float*)((std::uintptr_t(scratch.data()) + sizeof(floats) - 1) / sizeof(floats) * sizeof(floats));
  float *q = aligned, *sums = q + dim * kWidth, *scores = sums + dim * kWidth;  // [dim][width], [dim][width], [keys][width]
  float *keys = scores + kBlockKeys * kWidth, *values = keys + kBlockKeys * dim;       // [keys][dim] each
  // Scores are in units of ln 2, so that their exponentials are powers of two; a cap comes before.
  const float unit = shape.soft_cap > 0 ? shape.scale : shape.scale * kLog2E;
  alignas(64) float positions[kWidth], maxima[kWidth], totals[kWidth], shrink[kWidth];
  long places[kWidth];  // of the columns, in queries and out
  const long num_columns = block.heads * block.tokens;
  for (int column = 0; column < kWidth; ++column) {
    const long head = column / block.tokens, token = column % block.tokens;
    const bool valid = column < num_columns;
    positions[column] = float(block.position + (valid ? token : 0));  // exact up to 2^24
    maxima[column] = valid && sinks != nullptr ? sinks[block.head + head] * kLog2E : kMasked;
    totals[column] = valid && sinks != nullptr ? 1.0f : 0.0f;
    places[column] = valid ? ((block.token + token) * shape.heads + block.head + head) * dim : 0;
  }
  place_queries<kVectors>(queries, places, num_columns, dim, unit, q);
  const long lowest = window > 0 ? std::max(0L, block.position - window + 1) : 0, end = block.position + block.tokens;
  for (long first = lowest; first < end; first += kBlockKeys) {
    const long count = std::min<long>(kBlockKeys, end - first);
    widen_keys(pages, block, shape, first, count, keys, values);
    accumulate<kVectors, false>(keys, dim, 1, q, nullptr, scores, count, dim);
    if (shape.soft_cap > 0)
      for (long i = 0; i < count * kWidth; ++i) scores[i] = kLog2E * shape.soft_cap * std::tanh(scores[i] / shape.soft_cap);
    const bool all_seen = first + count - 1 <= block.position && (window <= 0 || first > end - 1 - window);
    if (!all_seen) {
      for (long key = 0; key < count; ++key) {
        const float at = float(first + key), since = window > 0 ? at + float(window) : HUGE_VALF;
        for (int v = 0; v < kVectors; ++v) {
          const floats position = load(positions + v * kLanes);
          float* mine = scores + key * kWidth + v * kLanes;
          store(mine, (at <= position) & (position < since) ? load(mine) : floats{} + kMasked);
        }
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      float* mine = scores + v * kLanes;
      const floats before = load(maxima + v * kLanes);
      floats largest = before;
      for (long key = 0; key < count; ++key) {
        const floats score = load(mine + key * kWidth);
        largest = score > largest ? score : largest;
      }
      const floats less = exponential2(before - largest);
      floats sum = load(totals + v * kLanes) * less;
      for (long key = 0; key < count; ++key) {
        const floats weight = exponential2(load(mine + key * kWidth) - largest);
        store(mine + key * kWidth, weight);
        sum += weight;
      }
      store(maxima + v * kLanes, largest);
      store(shrink + v * kLanes, less);
      store(totals + v * kLanes, sum);
    }
    if (first == lowest) accumulate<kVectors, false>(values, 1, dim, scores, nullptr, sums, dim, count);
    else accumulate<kVectors, true>(values, 1, dim, scores, shrink, sums, dim, count);
  }
  for (int v = 0; v < kVectors; ++v) store(totals + v * kLanes, 1.0f / load(totals + v * kLanes));
  place_results<kVectors>(sums, totals, places, num_columns, dim, out);
}

template <class Page>
void attend_block(const QueryBlock& block, const float* queries, const Page* pages, const Shape& shape, long window, const float* sinks,
                  float* out) {
  switch ((block.heads * block.tokens + kLanes - 1) / kLanes) {
#define PDD_VECTORS(count) \
  case count: attend_block<count>(block, queries, pages, widen_keys<Page>, shape, window, sinks, out); break;
    PDD_VECTORS(1) PDD_VECTORS(2) PDD_VECTORS(3) PDD_VECTORS(4) PDD_VECTORS(5) PDD_VECTORS(6)
#undef PDD_VECTORS
  }
}

}  // namespace pdd
