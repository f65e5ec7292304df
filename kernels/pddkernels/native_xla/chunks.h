// Attention of many queries of one row, one KV head at a time: blocks of queries against blocks of keys, softmax in one pass over the keys
// (arXiv:2205.14135), float32.
//
// Queries of a block lie along the vectors, kVectors * 16 of them (heads of the group, each with its tokens), keys and features across. Then
// products need no transposed keys, and maxima and sums over keys no shuffles.
#pragma once

#include <vector>

#include "numbers.h"

namespace pdd {

constexpr int kBlockKeys = 64;
constexpr int kMostVectors = 6;
constexpr float kMasked = -1e30f;

// c [rows][width] += sum over k < depth of a[row * row_stride + k * depth_stride] * b[k][width], width = kVectors * 16.
template <int kVectors>
void accumulate(const float* a, long row_stride, long depth_stride, const float* b, float* c, long rows, long depth) {
  constexpr int kWidth = kVectors * kLanes;
  const auto tile = [&](auto count, long row) {
    constexpr int kRows = decltype(count)::value;
    floats sums[kRows][kVectors];
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVectors; ++v) sums[r][v] = load(c + (row + r) * kWidth + v * kLanes);
    for (long k = 0; k < depth; ++k) {
      floats column[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) column[v] = load(b + k * kWidth + v * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const float value = a[(row + r) * row_stride + k * depth_stride];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[r][v] += column[v] * value;
      }
    }
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVectors; ++v) store(c + (row + r) * kWidth + v * kLanes, sums[r][v]);
  };
  long row = 0;
  for (; row + 4 <= rows; row += 4) tile(std::integral_constant<int, 4>{}, row);
  for (; row < rows; ++row) tile(std::integral_constant<int, 1>{}, row);
}

// Tokens [token, token + tokens) of the batch, from `position` of their row on, and heads [head, head + heads), all of one KV head.
struct QueryBlock {
  const std::int32_t* table;
  long token, tokens, position, head, heads, kv_head;
};

// Widens keys and values of positions [first, first + count) of the block's row and KV head: [count, dim] each.
using Widen = void (*)(const void* pages, const QueryBlock& block, const Shape& shape, long first, long count, float* keys, float* values);

template <class Page>
void widen_keys(const void* pages, const QueryBlock& block, const Shape& shape, long first, long count, float* keys, float* values) {
  const long dim = shape.dim, stride = 2 * shape.kv_heads * dim;
  for (long key = 0; key < count; ++key) {
    const long at = first + key, slot = long(block.table[at / shape.page_size]) * shape.page_size + at % shape.page_size;
    const Page* from = (const Page*)pages + slot * stride + 2 * block.kv_head * dim;
    for (long i = 0; i < dim; ++i) keys[key * dim + i] = widen(from[i]);
    for (long i = 0; i < dim; ++i) values[key * dim + i] = widen(from[dim + i]);
  }
}

// kVectors: enough for heads * tokens. queries, out [T, heads, dim].
template <int kVectors>
void attend_block(const QueryBlock& block, const float* queries, const void* pages, Widen widen_keys, const Shape& shape, long window, const float* sinks,
                  float* out) {
  constexpr int kWidth = kVectors * kLanes;
  const long dim = shape.dim;
  thread_local std::vector<float> scratch;
  scratch.assign((2 * dim + kBlockKeys) * kWidth + 2 * kBlockKeys * dim + kLanes, 0.0f);
  // On a cache line, else every other load of a vector takes two of them.
  float* aligned = (float*)((std::uintptr_t(scratch.data()) + sizeof(floats) - 1) / sizeof(floats) * sizeof(floats));
  float *q = aligned, *sums = q + dim * kWidth, *scores = sums + dim * kWidth;  // [dim][width], [dim][width], [keys][width]
  float *keys = scores + kBlockKeys * kWidth, *values = keys + kBlockKeys * dim;       // [keys][dim] each
  float positions[kWidth], maxima[kWidth], totals[kWidth];
  for (int column = 0; column < kWidth; ++column) {
    const long head = column / block.tokens, token = column % block.tokens;
    const bool valid = head < block.heads;
    positions[column] = float(block.position + (valid ? token : 0));  // exact up to 2^24
    maxima[column] = valid && sinks != nullptr ? sinks[block.head + head] : kMasked;
    totals[column] = valid && sinks != nullptr ? 1.0f : 0.0f;
    if (!valid) continue;
    const float* from = queries + ((block.token + token) * shape.heads + block.head + head) * dim;
    for (long i = 0; i < dim; ++i) q[i * kWidth + column] = from[i] * shape.scale;
  }
  const long lowest = window > 0 ? std::max(0L, block.position - window + 1) : 0, end = block.position + block.tokens;
  for (long first = lowest; first < end; first += kBlockKeys) {
    const long count = std::min<long>(kBlockKeys, end - first);
    widen_keys(pages, block, shape, first, count, keys, values);
    std::fill(scores, scores + count * kWidth, 0.0f);
    accumulate<kVectors>(keys, dim, 1, q, scores, count, dim);
    if (shape.soft_cap > 0)
      for (long i = 0; i < count * kWidth; ++i) scores[i] = shape.soft_cap * std::tanh(scores[i] / shape.soft_cap);
    const bool all_seen = first + count - 1 <= block.position && (window <= 0 || first > end - 1 - window);
    if (!all_seen) {
      for (long key = 0; key < count; ++key) {
        const float at = float(first + key), since = window > 0 ? at + float(window) : HUGE_VALF;
        for (int column = 0; column < kWidth; ++column) {
          const bool seen = at <= positions[column] && positions[column] < since;
          scores[key * kWidth + column] = seen ? scores[key * kWidth + column] : kMasked;
        }
      }
    }
    float shrink[kWidth];
    for (int column = 0; column < kWidth; ++column) shrink[column] = maxima[column];
    for (long key = 0; key < count; ++key)
      for (int column = 0; column < kWidth; ++column)
        maxima[column] = scores[key * kWidth + column] > maxima[column] ? scores[key * kWidth + column] : maxima[column];
    for (int column = 0; column < kWidth; ++column) {
      shrink[column] = exponential(shrink[column] - maxima[column]);
      totals[column] *= shrink[column];
    }
    for (long key = 0; key < count; ++key)
      for (int column = 0; column < kWidth; ++column) {
        const float weight = exponential(scores[key * kWidth + column] - maxima[column]);
        scores[key * kWidth + column] = weight;
        totals[column] += weight;
      }
    for (long i = 0; i < dim; ++i)
      for (int column = 0; column < kWidth; ++column) sums[i * kWidth + column] *= shrink[column];
    accumulate<kVectors>(values, 1, dim, scores, sums, dim, count);
  }
  for (long column = 0; column < block.heads * block.tokens; ++column) {
    float* to = out + ((block.token + column % block.tokens) * shape.heads + block.head + column / block.tokens) * dim;
    const float share = 1.0f / totals[column];
    for (long i = 0; i < dim; ++i) to[i] = sums[i * kWidth + column] * share;
  }
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
