// Paged KV on the CPU: storing new tokens, and attention of rows with one new token straight from their pages, nothing gathered.
//
// A row's keys are cut into spans of kSpan positions, at absolute multiples of it, so that how a row is computed depends on the row alone.
// Every (span, KV head) is a task: scores, their maximum, the sum of their exponentials and the weighted sum of values, all float32; then
// each row's spans are merged (the online softmax of arXiv:1805.02867).
#include <algorithm>

#include "numbers.h"

namespace pdd {
namespace {

constexpr long kSpan = 256;

template <class From, class To>
void write_rows(To* pages, const std::int64_t* rows, const From* values, long token_stride, long tokens, long heads, long dim) {
  for (long token = 0; token < tokens; ++token) {
    for (long head = 0; head < heads; ++head) {
      const From* from = values + token * token_stride + head * dim;
      To* to = pages + rows[token * heads + head] * dim;
      for (long i = 0; i < dim; ++i) to[i] = narrow<To>(widen(from[i]));
    }
  }
}

void write_plane(int page_format, void* pages, const std::int64_t* rows, int format, const void* values, long stride, long tokens, long heads,
                 long dim) {
  if (page_format == kFloat32) {
    if (format == kFloat32) write_rows((float*)pages, rows, (const float*)values, stride, tokens, heads, dim);
    else write_rows((float*)pages, rows, (const bfloat16*)values, stride, tokens, heads, dim);
  } else {
    if (format == kFloat32) write_rows((bfloat16*)pages, rows, (const float*)values, stride, tokens, heads, dim);
    else write_rows((bfloat16*)pages, rows, (const bfloat16*)values, stride, tokens, heads, dim);
  }
}

struct Keys {
  const std::int32_t* table;  // of the row
  long page_size, kv_heads, head, dim, begin, end;

  // Where each position's values start in a plane; filled up to whole vectors with the last one.
  void offsets(long (&of)[kSpan]) const {
    long count = 0;
    for (long position = begin; position < end;) {
      const long slot = position % page_size;
      const long stop = std::min(end, position - slot + page_size);
      long offset = ((long(table[position / page_size]) * kv_heads + head) * page_size + slot) * dim;
      for (; position < stop; ++position, offset += dim) of[count++] = offset;
    }
    for (; count % kLanes != 0; ++count) of[count] = of[count - 1];
  }
};

// A head's part of a page is a few KiB and its next one is elsewhere: too short for the processor to see a pattern, so it is told.
constexpr long kAhead = 32;

template <class Page>
inline void prefetch(const Page* at, int vectors) {
  for (long byte = 0; byte < long(vectors * kLanes * sizeof(Page)); byte += 64) __builtin_prefetch((const char*)at + byte);
}

// kVectors: dim / 16. kHeads query heads of one KV head at a time, so that a key is widened once and sums stay in registers.
template <class Page, int kVectors, int kHeads>
void attend_vectors(const float* queries, const Page* k, const Page* v, const long (&offsets)[kSpan], long count, float soft_cap, float* out,
                    float* maxima, float* sums) {
  float scores[kHeads][kSpan];
  floats q[kHeads][kVectors];
  for (int h = 0; h < kHeads; ++h)
    for (int i = 0; i < kVectors; ++i) q[h][i] = load(queries + (h * kVectors + i) * kLanes);
  const long last = count - 1;
  for (long t = 0; t < count; t += kLanes) {
    floats products[kHeads][kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      const Page* key = k + offsets[t + lane];
      prefetch(k + offsets[std::min(t + lane + kAhead, last)], kVectors);
      prefetch(v + offsets[t + lane], kVectors);
      floats sum[kHeads] = {};
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) {
        const floats part = load(key + i * kLanes);
#pragma GCC unroll 4
        for (int h = 0; h < kHeads; ++h) sum[h] += part * q[h][i];
      }
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h) products[h][lane] = sum[h];
    }
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) store(scores[h] + t, totals(products[h]));
  }
  for (int h = 0; h < kHeads; ++h) {
    if (soft_cap > 0)
      for (long t = 0; t < count; ++t) scores[h][t] = soft_cap * std::tanh(scores[h][t] / soft_cap);
    float largest = scores[h][0], sum = 0;
#pragma omp simd reduction(max : largest)
    for (long t = 0; t < count; ++t) largest = scores[h][t] > largest ? scores[h][t] : largest;
#pragma omp simd reduction(+ : sum)
    for (long t = 0; t < count; ++t) {
      scores[h][t] = exponential(scores[h][t] - largest);
      sum += scores[h][t];
    }
    maxima[h] = largest;
    sums[h] = sum;
  }
  floats weighted[kHeads][kVectors] = {};
  for (long t = 0; t < count; ++t) {
    const Page* value = v + offsets[t];
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      const floats part = load(value + i * kLanes);
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h) weighted[h][i] += part * scores[h][t];
    }
  }
  for (int h = 0; h < kHeads; ++h)
    for (int i = 0; i < kVectors; ++i) store(out + (h * kVectors + i) * kLanes, weighted[h][i]);
}

// Any dim, one query head.
template <class Page>
void attend_any(const float* q, const Page* k, const Page* v, const long (&offsets)[kSpan], long count, long dim, float soft_cap, float* out,
                float* maximum, float* sum) {
  float scores[kSpan];
  for (long t = 0; t < count; ++t) {
    const Page* key = k + offsets[t];
    float score = 0;
#pragma omp simd reduction(+ : score)
    for (long i = 0; i < dim; ++i) score += q[i] * widen(key[i]);
    scores[t] = soft_cap > 0 ? soft_cap * std::tanh(score / soft_cap) : score;
  }
  *maximum = *std::max_element(scores, scores + count);
  *sum = 0;
  for (long t = 0; t < count; ++t) *sum += scores[t] = exponential(scores[t] - *maximum);
  std::fill(out, out + dim, 0.0f);
  for (long t = 0; t < count; ++t) {
    const Page* value = v + offsets[t];
    for (long i = 0; i < dim; ++i) out[i] += scores[t] * widen(value[i]);
  }
}

template <class Page, int kVectors>
void attend_heads(const float* q, const Page* k, const Page* v, const Keys& keys, float soft_cap, float* out, float* maxima, float* sums,
                  long heads) {
  long offsets[kSpan];
  keys.offsets(offsets);
  const long count = keys.end - keys.begin;
  for (long h = 0; h < heads;) {
    const float* at = q + h * keys.dim;
    float* to = out + h * keys.dim;
    if constexpr (kVectors == 0) {
      attend_any(at, k, v, offsets, count, keys.dim, soft_cap, to, maxima + h, sums + h);
      h += 1;
    } else if (heads - h >= 4) {
      attend_vectors<Page, kVectors, 4>(at, k, v, offsets, count, soft_cap, to, maxima + h, sums + h);
      h += 4;
    } else if (heads - h == 3 && kVectors <= 4) {
      attend_vectors<Page, kVectors, 3>(at, k, v, offsets, count, soft_cap, to, maxima + h, sums + h);
      h += 3;
    } else if (heads - h >= 2) {
      attend_vectors<Page, kVectors, 2>(at, k, v, offsets, count, soft_cap, to, maxima + h, sums + h);
      h += 2;
    } else {
      attend_vectors<Page, kVectors, 1>(at, k, v, offsets, count, soft_cap, to, maxima + h, sums + h);
      h += 1;
    }
  }
}

template <class Query, class Page>
void attend(const Query* queries, const Page* k, const Page* v, const std::int32_t* tables, long table_stride, const std::int64_t* spans,
            const std::int64_t* rows, long num_spans, long num_rows, const float* sinks, float scale, float soft_cap, float* scratch, Query* out,
            long kv_heads, long group, long page_size, long dim) {
  const long heads = kv_heads * group;
  float* maxima = scratch;                      // [spans, heads]
  float* sums = maxima + num_spans * heads;     // [spans, heads]
  float* parts = sums + num_spans * heads;      // [spans, heads, dim]
  const bool parallel = num_spans * kv_heads > 1 && (num_spans > 1 || spans[3] - spans[2] >= 64);
#pragma omp parallel if (parallel)
  {
#pragma omp for schedule(dynamic)
    for (long task = 0; task < num_spans * kv_heads; ++task) {
      const long span = task / kv_heads, head = task % kv_heads;
      const std::int64_t* s = spans + span * 4;  // token, row, begin, end
      const Keys keys{tables + s[1] * table_stride, page_size, kv_heads, head, dim, s[2], s[3]};
      const long first = span * heads + head * group;
      float q[kMaxGroupValues];
      const Query* from = queries + (s[0] * heads + head * group) * dim;
      for (long i = 0; i < group * dim; ++i) q[i] = widen(from[i]) * scale;
      float* to = parts + first * dim;
      if (dim == 64) attend_heads<Page, 4>(q, k, v, keys, soft_cap, to, maxima + first, sums + first, group);
      else if (dim == 128) attend_heads<Page, 8>(q, k, v, keys, soft_cap, to, maxima + first, sums + first, group);
      else attend_heads<Page, 0>(q, k, v, keys, soft_cap, to, maxima + first, sums + first, group);
    }
#pragma omp for schedule(static)
    for (long row = 0; row < num_rows; ++row) {
      const long begin = rows[row], end = rows[row + 1], token = spans[begin * 4];
      for (long head = 0; head < heads; ++head) {
        float largest = sinks == nullptr ? maxima[begin * heads + head] : sinks[head];
        for (long span = begin; span < end; ++span) largest = std::max(largest, maxima[span * heads + head]);
        float sum = sinks == nullptr ? 0.0f : exponential(sinks[head] - largest);
        float merged[kMaxHeadDim] = {};
        for (long span = begin; span < end; ++span) {
          const float share = exponential(maxima[span * heads + head] - largest);
          const float* part = parts + (span * heads + head) * dim;
          sum += share * sums[span * heads + head];
          for (long i = 0; i < dim; ++i) merged[i] += share * part[i];
        }
        Query* to = out + (token * heads + head) * dim;
        for (long i = 0; i < dim; ++i) to[i] = narrow<Query>(merged[i] / sum);
      }
    }
  }
}

}  // namespace
}  // namespace pdd

using namespace pdd;

extern "C" {

long pdd_span() { return kSpan; }

// keys, values [tokens, kv_heads, dim], tokens apart by their strides (in values), to pages seen as rows of dim; rows [tokens * kv_heads].
void pdd_append(int page_format, void* k_pages, void* v_pages, const std::int64_t* rows, int key_format, const void* keys, long key_stride,
                int value_format, const void* values, long value_stride, long tokens, long kv_heads, long dim) {
#pragma omp parallel for if (tokens * kv_heads * dim > kParallelValues)
  for (int plane = 0; plane < 2; ++plane) {
    if (plane == 0) write_plane(page_format, k_pages, rows, key_format, keys, key_stride, tokens, kv_heads, dim);
    else write_plane(page_format, v_pages, rows, value_format, values, value_stride, tokens, kv_heads, dim);
  }
}

// queries, out [T, kv_heads * group, dim] · pages [N, kv_heads, page_size, dim] · tables [R, table_stride] · spans [num_spans, 4]: token in
// the batch, row of tables, first position and the one past the last · rows [num_rows + 1]: each row's spans · sinks [heads] or null ·
// soft_cap 0: none · scratch: num_spans * heads * (dim + 2) floats.
void pdd_attend(int query_format, int page_format, const void* queries, const void* k, const void* v, const std::int32_t* tables,
                long table_stride, const std::int64_t* spans, const std::int64_t* rows, long num_spans, long num_rows, const float* sinks,
                float scale, float soft_cap, float* scratch, void* out, long kv_heads, long group, long page_size, long dim) {
  const auto run = [&](auto* query, auto* page) {
    using Query = std::remove_pointer_t<decltype(query)>;
    using Page = std::remove_pointer_t<decltype(page)>;
    attend((const Query*)queries, (const Page*)k, (const Page*)v, tables, table_stride, spans, rows, num_spans, num_rows, sinks, scale, soft_cap,
           scratch, (Query*)out, kv_heads, group, page_size, dim);
  };
  if (query_format == kFloat32) {
    if (page_format == kFloat32) run((float*)nullptr, (float*)nullptr);
    else run((float*)nullptr, (bfloat16*)nullptr);
  } else {
    if (page_format == kFloat32) run((bfloat16*)nullptr, (float*)nullptr);
    else run((bfloat16*)nullptr, (bfloat16*)nullptr);
  }
}
}
