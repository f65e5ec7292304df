// Rows with one new token here, others by chunks.h; and both as XLA calls them.
//
// The keys of a row with one new token are cut into spans at absolute multiples of kSpan positions, so how a row is computed depends on the row
// alone. Every (span, KV head) is a part: scores, their maximum, the sum of their exponentials and the weighted sum of values, float32. Then
// each row's spans are merged (the online softmax of arXiv:1805.02867).
#include "attention.h"

#include "chunks.h"
#include "ffi.h"

namespace pdd {
namespace {

constexpr long kSpan = 256;
constexpr long kFetchAhead = 4;  // keys
constexpr long kLineBytes = 64;

struct Span {
  long row, begin, end;
};

// Calls visit(position - begin, the head's first value of the token) for every position of the span; a token's values are `stride` apart.
// `bytes`: of the head's values.
template <class Page, class Visit>
void each_key(const Page* plane, const std::int32_t* table, const Span& span, long page_size, long stride, long bytes, Visit visit) {
  for (long position = span.begin; position < span.end;) {
    const long slot = position % page_size, stop = std::min(span.end, position - slot + page_size);
    const Page* at = plane + (long(table[position / page_size]) * page_size + slot) * stride;
    for (; position < stop; ++position, at += stride) {
      const char* ahead = (const char*)(at + kFetchAhead * stride);
      __builtin_prefetch(ahead);
      if (bytes > kLineBytes) __builtin_prefetch(ahead + kLineBytes);
      visit(position - span.begin, at);
    }
  }
}

// Scores become their exponentials; their maximum and sum are given.
void exponentials(float* scores, long count, float soft_cap, float& maximum, float& sum) {
  if (soft_cap > 0)
    for (long t = 0; t < count; ++t) scores[t] = soft_cap * std::tanh(scores[t] / soft_cap);
  float largest = scores[0];
  for (long t = 1; t < count; ++t) largest = scores[t] > largest ? scores[t] : largest;
  for (long t = 0; t < count; ++t) scores[t] = exponential(scores[t] - largest);
  floats sums = {};
  long t = 0;
  for (; t + kLanes <= count; t += kLanes) sums += load(scores + t);
  sum = total(sums);
  for (; t < count; ++t) sum += scores[t];
  maximum = largest;
}

// kHeads query heads of one KV head, so that a key is widened once and sums stay in registers. kVectors: dim / 16.
template <class Page, int kVectors, int kHeads>
void attend_heads(const float* queries, const Page* k, const std::int32_t* table, const Span& span, const Shape& shape, float* maxima,
                  float* sums, float* out) {
  const long stride = 2 * shape.kv_heads * shape.dim;
  alignas(64) float scores[kHeads][kSpan];
  floats q[kHeads][kVectors];
  for (int h = 0; h < kHeads; ++h)
    for (int i = 0; i < kVectors; ++i) q[h][i] = load(queries + h * shape.dim + i * kLanes) * shape.scale;
  each_key(k, table, span, shape.page_size, stride, shape.dim * long(sizeof(Page)), [&](long at, const Page* key) {
    floats products[kHeads] = {};
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      const floats values = load(key + i * kLanes);
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h) products[h] += values * q[h][i];
    }
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) scores[h][at] = total(products[h]);
  });
  for (int h = 0; h < kHeads; ++h) exponentials(scores[h], span.end - span.begin, shape.soft_cap, maxima[h], sums[h]);
  floats weighted[kHeads][kVectors] = {};
  each_key(k + shape.dim, table, span, shape.page_size, stride, shape.dim * long(sizeof(Page)), [&](long at, const Page* value) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      const floats values = load(value + i * kLanes);
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h) weighted[h][i] += values * scores[h][at];
    }
  });
  for (int h = 0; h < kHeads; ++h)
    for (int i = 0; i < kVectors; ++i) store(out + h * shape.dim + i * kLanes, weighted[h][i]);
}

template <class Page, int kVectors>
void attend_group(const float* queries, const Page* k, const std::int32_t* table, const Span& span, const Shape& shape, float* maxima,
                  float* sums, float* out) {
  const long group = shape.heads / shape.kv_heads;
  for (long h = 0; h < group;) {
    const auto some = [&](auto count) {
      attend_heads<Page, kVectors, count>(queries + h * shape.dim, k, table, span, shape, maxima + h, sums + h, out + h * shape.dim);
      h += count;
    };
    if (group - h >= 4) some(std::integral_constant<int, 4>{});
    else if (group - h == 3) some(std::integral_constant<int, 3>{});
    else if (group - h == 2) some(std::integral_constant<int, 2>{});
    else some(std::integral_constant<int, 1>{});
  }
}

// Any dim.
template <class Page>
void attend_any(const float* queries, const Page* k, const std::int32_t* table, const Span& span, const Shape& shape, float* maxima,
                float* sums, float* out) {
  const long stride = 2 * shape.kv_heads * shape.dim, group = shape.heads / shape.kv_heads, dim = shape.dim;
  float scores[kSpan];
  for (long h = 0; h < group; ++h) {
    const float* q = queries + h * dim;
    float* to = out + h * dim;
    each_key(k, table, span, shape.page_size, stride, shape.dim * long(sizeof(Page)), [&](long at, const Page* key) {
      float score = 0;
      for (long i = 0; i < dim; ++i) score += q[i] * shape.scale * widen(key[i]);
      scores[at] = score;
    });
    exponentials(scores, span.end - span.begin, shape.soft_cap, maxima[h], sums[h]);
    std::fill(to, to + dim, 0.0f);
    each_key(k + dim, table, span, shape.page_size, stride, shape.dim * long(sizeof(Page)), [&](long at, const Page* value) {
      for (long i = 0; i < dim; ++i) to[i] += scores[at] * widen(value[i]);
    });
  }
}

template <class Page>
void attend_span(const float* queries, const Page* k, const std::int32_t* table, const Span& span, const Shape& shape, float* maxima,
                 float* sums, float* out) {
  switch (shape.dim) {
#define PDD_DIM(dim) \
  case dim: attend_group<Page, dim / kLanes>(queries, k, table, span, shape, maxima, sums, out); break;
    PDD_DIM(64) PDD_DIM(128)
#undef PDD_DIM
    default: attend_any(queries, k, table, span, shape, maxima, sums, out);
  }
}

void merge(const Shape& shape, const float* maxima, const float* sums, const float* parts, long num_spans, const float* sinks, float* out) {
  for (long head = 0; head < shape.heads; ++head) {
    float largest = sinks == nullptr ? maxima[head] : sinks[head];
    for (long span = 0; span < num_spans; ++span) largest = std::max(largest, maxima[span * shape.heads + head]);
    float sum = sinks == nullptr ? 0.0f : exponential(sinks[head] - largest);
    float* to = out + head * shape.dim;
    std::fill(to, to + shape.dim, 0.0f);
    for (long span = 0; span < num_spans; ++span) {
      const float share = exponential(maxima[span * shape.heads + head] - largest);
      const float* part = parts + (span * shape.heads + head) * shape.dim;
      sum += share * sums[span * shape.heads + head];
      for (long i = 0; i < shape.dim; ++i) to[i] += share * part[i];
    }
    for (long i = 0; i < shape.dim; ++i) to[i] /= sum;
  }
}

}  // namespace

template <class Page>
void attend_rows(Team& team, const std::vector<Row>& rows, const float* queries, const Page* pages, const Shape& shape,
                 long window, const float* sinks, float* out) {
  std::vector<Span> spans;
  std::vector<long> first_spans;
  for (const Row& row : rows) {
    first_spans.push_back(long(spans.size()));
    const long end = row.position + 1;
    for (long begin = window > 0 ? std::max(0L, end - window) : 0; begin < end; begin = (begin / kSpan + 1) * kSpan)
      spans.push_back({long(first_spans.size()) - 1, begin, std::min(end, (begin / kSpan + 1) * kSpan)});
  }
  first_spans.push_back(long(spans.size()));
  const long num_spans = long(spans.size()), group = shape.heads / shape.kv_heads, values = shape.heads * shape.dim;
  std::vector<float> scratch(num_spans * (2 * shape.heads + values));
  float *maxima = scratch.data(), *sums = maxima + num_spans * shape.heads, *parts = sums + num_spans * shape.heads;
  team(num_spans * shape.kv_heads, [&](long part) {
    const long kv_head = part % shape.kv_heads, index = part / shape.kv_heads;
    const Row& row = rows[spans[index].row];
    const long first = index * shape.heads + kv_head * group;
    attend_span(queries + row.token * values + kv_head * group * shape.dim, pages + 2 * kv_head * shape.dim, row.table, spans[index], shape,
                maxima + first, sums + first, parts + first * shape.dim);
  });
  team(long(rows.size()), [&](long row) {
    const long begin = first_spans[row], count = first_spans[row + 1] - begin;
    merge(shape, maxima + begin * shape.heads, sums + begin * shape.heads, parts + begin * values, count, sinks,
          out + rows[row].token * values);
  });
}

template <class Page>
void attend(Team& team, const float* queries, const Page* pages, const std::int32_t* tables, long table_width,
            const std::int32_t* row_starts, const std::int32_t* context_lens, long num_rows, long num_tokens, const float* sinks, long window,
            const Shape& shape, float* out) {
  const long group = shape.heads / shape.kv_heads, columns = kMostVectors * kLanes;
  std::vector<Row> rows;
  std::vector<QueryBlock> blocks;
  for (long row = 0; row < num_rows; ++row) {
    const std::int32_t* table = tables + row * table_width;
    const long start = row_starts[row], stop = row_starts[row + 1];
    if (stop - start == 1) rows.push_back({table, start, context_lens[row]});
    if (stop - start <= 1) continue;
    const long heads = std::min(group, columns / 4), tokens = columns / heads;
    for (long token = start; token < stop; token += tokens)
      for (long head = 0; head < shape.heads; head += std::min(heads, group - head % group))
        blocks.push_back({table, token, std::min(tokens, stop - token), context_lens[row] + token - start, head,
                          std::min(heads, group - head % group), head / group});
  }
  attend_rows(team, rows, queries, pages, shape, window, sinks, out);
  const long count = long(blocks.size());  // a row's last blocks see the most keys, so each thread begins with its last
  team(count, [&](long part) { attend_block(blocks[team.mirrored(count, part)], queries, pages, shape, window, sinks, out); });
  std::fill(out + row_starts[num_rows] * shape.heads * shape.dim, out + num_tokens * shape.heads * shape.dim, 0.0f);
}

#define PDD_PAGE(Page) \
  template void attend_rows(Team&, const std::vector<Row>&, const float*, const Page*, const Shape&, long, const float*, float*); \
  template void attend(Team&, const float*, const Page*, const std::int32_t*, long, const std::int32_t*, const std::int32_t*, long, long, \
                       const float*, long, const Shape&, float*);
PDD_PAGE(float)
PDD_PAGE(bfloat16)
#undef PDD_PAGE

namespace {

Shape shape_of(ffi::Buffer<ffi::F32>& queries, const ffi::AnyBuffer& pages, float scale, float soft_cap) {
  const auto query_dims = queries.dimensions(), page_dims = pages.dimensions();
  return {query_dims[1], page_dims[2] / 2, query_dims[2], page_dims[1], scale, soft_cap};
}

ffi::Error decode(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> queries, ffi::AnyBuffer pages, ffi::Buffer<ffi::S32> tables,
                  ffi::Buffer<ffi::S32> context_lens, ffi::Buffer<ffi::S32> num_new, ffi::Buffer<ffi::F32> sinks, float scale, float soft_cap,
                  std::int64_t window, ffi::ResultBuffer<ffi::F32> out) {
  const Shape shape = shape_of(queries, pages, scale, soft_cap);
  std::vector<Row> rows;
  for (long row = 0; row < queries.dimensions()[0]; ++row) {
    float* to = out->typed_data() + row * shape.heads * shape.dim;
    if (num_new.typed_data()[row] == 0) std::fill(to, to + shape.heads * shape.dim, 0.0f);
    else rows.push_back({tables.typed_data() + row * tables.dimensions()[1], row, context_lens.typed_data()[row]});
  }
  Team team(pool);
  return with_pages(pages, [&](auto* values) {
    attend_rows(team, rows, queries.typed_data(), values, shape, window, optional(sinks), out->typed_data());
  });
}

ffi::Error ragged(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> queries, ffi::AnyBuffer pages, ffi::Buffer<ffi::S32> tables,
                  ffi::Buffer<ffi::S32> row_starts, ffi::Buffer<ffi::S32> context_lens, ffi::Buffer<ffi::S32> num_rows,
                  ffi::Buffer<ffi::F32> sinks, float scale, float soft_cap, std::int64_t window, ffi::ResultBuffer<ffi::F32> out) {
  const Shape shape = shape_of(queries, pages, scale, soft_cap);
  Team team(pool);
  return with_pages(pages, [&](auto* values) {
    attend(team, queries.typed_data(), values, tables.typed_data(), tables.dimensions()[1], row_starts.typed_data(),
           context_lens.typed_data(), num_rows.typed_data()[0], queries.dimensions()[0], optional(sinks), window, shape, out->typed_data());
  });
}

}  // namespace
}  // namespace pdd

// queries [R, heads, dim] · pages · tables [R, P] · context_lens, num_new (0 or 1) [R] · sinks [heads] or [0] -> [R, heads, dim]; zeros for
// rows without a new token. window 0: none.
XLA_FFI_DEFINE_HANDLER_SYMBOL(pdd_attend_decode, pdd::decode,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<std::int64_t>("window")
                                  .Ret<ffi::Buffer<ffi::F32>>());

// queries [T, heads, dim] · pages · tables [R, P] · row_starts [R + 1], context_lens [R], the first num_rows [1] of them valid · sinks
// -> [T, heads, dim]; zeros for tokens of no row.
XLA_FFI_DEFINE_HANDLER_SYMBOL(pdd_attend_ragged, pdd::ragged,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<std::int64_t>("window")
                                  .Ret<ffi::Buffer<ffi::F32>>());
