// Attention over interleaved pages [pages, page_size, 2 * kv_heads, dim], straight from the pages, float32 or bfloat16.
#pragma once

#include <vector>

#include "numbers.h"
#include "team.h"

namespace pdd {

struct Shape {
  long heads, kv_heads, dim, page_size;
  float scale, soft_cap;  // soft_cap 0: none
};

// A row's new token, the `token`-th of the batch, at `position`.
struct Row {
  const std::int32_t* table;
  long token, position;
};

// queries, out [tokens, heads, dim]: of `rows` alone. window 0: none. sinks: [heads] or null.
template <class Page>
void attend_rows(Team& team, const std::vector<Row>& rows, const float* queries, const Page* pages, const Shape& shape, long window,
                 const float* sinks, float* out);

// Row r has tokens [row_starts[r], row_starts[r + 1]), context_lens[r] before them and the page table tables[r]. Zeros for tokens of no row.
template <class Page>
void attend(Team& team, const float* queries, const Page* pages, const std::int32_t* tables, long table_width,
            const std::int32_t* row_starts, const std::int32_t* context_lens, long num_rows, long num_tokens, const float* sinks, long window,
            const Shape& shape, float* out);

}  // namespace pdd
