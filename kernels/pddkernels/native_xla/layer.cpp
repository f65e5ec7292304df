// A decoder layer in one call: norm, q, k and v, rotary embedding, storing KV, attention, output, norm, gated MLP, both residual sums. Between
// the products nothing is left but passes over a few tokens at a time, which go along with packing them for the next product.
//
// float32 throughout, tokens first [tokens, features]. Options of families that a model lacks are empty arrays.
#include <vector>

#include "attention.h"
#include "ffi.h"
#include "layer.h"
#include "panels.h"
#include "powers.h"

namespace pdd {
namespace {

// weights [panels, in, 32], with kCrossRows more where inputs cross, and a bias for every output of the panels or none.
struct Projection {
  const float *weights, *bias;
  long panels, rows, in;

  Projection(const Floats& weights, const Floats& bias, bool crossed)
      : weights(weights.typed_data()), bias(optional(bias)), panels(weights.dimensions()[0]), rows(weights.dimensions()[1]),
        in(rows - (crossed ? kCrossRows : 0)) {}
  long outs() const { return panels * kPanel; }
};

struct Panels {
  long first, count;
};

// x times the weights of `some` panels; inputs cross if both are made for that.
template <class... Takes>
void product_of(Team& team, const Tiles& tiles, const Packed& x, const Projection& by, Panels some, const Takes&... takes) {
  const float* weights = by.weights + some.first * by.rows * kPanel;
  if (by.rows > by.in) product<true>(team, tiles, x, by.in, weights, some.count, takes...);
  else product<false>(team, tiles, x, by.in, weights, some.count, takes...);
}

// Fetches where a result goes and what it is added to: both went out of the caches since, and to wait for them costs up to 5 % of a product.
inline __attribute__((always_inline)) void fetch(const Tiles& tiles, long tile, long width, long column, const float* onto, const float* out) {
  for (long token = tiles.first(tile); token < tiles.first(tile) + tiles.size(tile); ++token)
    for (long half = 0; half < 2; ++half) {
      const long at = token * width + column + half * kLanes;
      __builtin_prefetch(out + at, 1);
      if (onto != nullptr) __builtin_prefetch(onto + at, 0);
    }
}

// out[token] = x times the weights of `some` panels, plus the bias, plus onto[token] unless `onto` is null. Outputs of other panels stay.
void project(Team& team, const Tiles& tiles, const Packed& x, const Projection& by, Panels some, const float* onto, float* out) {
  const auto take = [&](long number, long tile, const auto& sums) __attribute__((always_inline)) {
    const long panel = some.first + number;
    constexpr int kTokens = std::extent_v<std::remove_reference_t<decltype(sums)>>;
#pragma GCC unroll 16
    for (int token = 0; token < kTokens; ++token) {
      const long at = (tiles.first(tile) + token) * by.outs() + panel * kPanel;
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        floats values = sums[token][half];
        if (by.bias != nullptr) values += load(by.bias + panel * kPanel + half * kLanes);
        if (onto != nullptr) values += load(onto + at + half * kLanes);
        store(out + at + half * kLanes, values);
      }
    }
  };
  const auto prepare = [&](long number, long tile) __attribute__((always_inline)) {
    fetch(tiles, tile, by.outs(), (some.first + number) * kPanel, onto, out);
  };
  product_of(team, tiles, x, by, some, take, prepare);
}

void project(Team& team, const Tiles& tiles, const Packed& x, const Projection& by, const float* onto, float* out) {
  project(team, tiles, x, by, {0, by.panels}, onto, out);
}

// Sigmoid(g) * g, or GELU in its tanh form, g * sigmoid(2 k): both times up.
template <bool kGelu>
floats activate(const floats& gate, const floats& up) {
  const floats inner = kGelu ? 1.5957691216f * (gate + 0.044715f * gate * gate * gate) : gate, power = inner * -kLog2E;
  return gate / (1.0f + exponential2(power > 126.0f ? floats{} + 126.0f : power)) * up;
}

// The gated unit, packed for the next product. A panel holds sixteen gates and the sixteen values that they let through.
template <bool kGelu>
void project_gated(Team& team, const Tiles& tiles, const Packed& x, const Projection& by, float* out) {
  const long width = by.panels * kLanes;
  const auto take = [&](long panel, long tile, const auto& sums) __attribute__((always_inline)) {
    constexpr int kTokens = std::extent_v<std::remove_reference_t<decltype(sums)>>;
    floats values[kTokens];
#pragma GCC unroll 16
    for (int token = 0; token < kTokens; ++token) {
      floats gate = sums[token][0], up = sums[token][1];
      if (by.bias != nullptr) {
        gate += load(by.bias + panel * kPanel);
        up += load(by.bias + panel * kPanel + kLanes);
      }
      values[token] = activate<kGelu>(gate, up);
    }
    store_packed(values, out + tiles.first(tile) * width + panel * kLanes * kTokens);
  };
  product_of(team, tiles, x, by, {0, by.panels}, take);
}

struct Norms {
  const float *attention, *attention_post, *mlp, *mlp_post, *q, *k;
  float eps;
};

// out = x + added, normed first if it has weights for that.
void add(const float* x, const float* added, long n, const float* weights, float eps, float* out) {
  const float scale = weights == nullptr ? 1.0f : norm_scale(added, n, eps);
  long i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const floats values = load(added + i);
    store(out + i, load(x + i) + (weights == nullptr ? values : load(weights + i) * (values * scale)));
  }
  for (; i < n; ++i) out[i] = x[i] + (weights == nullptr ? added[i] : weights[i] * (added[i] * scale));
}

// The half-split rotation (arXiv:2104.09864) of a head, normed first if it has weights for that.
void rotate(const float* from, const float* weights, float eps, const float* cos, const float* sin, long dim, float* to) {
  float normed[kMaxHeadDim];
  if (weights != nullptr) {
    const float scale = norm_scale(from, dim, eps);
    for (long i = 0; i < dim; ++i) normed[i] = weights[i] * (from[i] * scale);
    from = normed;
  }
  const long half = dim / 2;
  long i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const floats first = load(from + i), second = load(from + i + half), c = load(cos + i), s = load(sin + i);
    store(to + i, first * c - second * s);
    store(to + i + half, second * c + first * s);
  }
  for (; i < half; ++i) {
    const float first = from[i], second = from[i + half];
    to[i] = first * cos[i] - second * sin[i];
    to[i + half] = second * cos[i] + first * sin[i];
  }
}

// Rows of a step, as attention takes them, and where their tokens are stored: slots past the pool are nowhere.
struct Rows {
  const std::int32_t *slots, *tables, *row_starts, *context_lens;
  long table_width, count, num_slots;

  long tokens() const { return row_starts[count]; }
};

template <class Page>
void narrow_all(const float* from, long count, Page* to) {
  long i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  for (; i < count; ++i) to[i] = narrow<Page>(from[i]);
}

// Queries [heads, dim] of one token.
void turn_queries(const float* from, const Shape& shape, const Norms& norms, const float* cos, const float* sin, float* queries) {
  const long dim = shape.dim;
  for (long head = 0; head < shape.heads; ++head) rotate(from + head * dim, norms.q, norms.eps, cos, sin, dim, queries + head * dim);
}

// Stores KV of one token, of its heads q, k and v.
template <class Page>
void store_kv(const float* heads, const Shape& shape, const Norms& norms, const float* cos, const float* sin, long slot, long num_slots,
              Page* pages) {
  const long dim = shape.dim;
  if (slot < 0 || slot >= num_slots) return;
  float key[kMaxHeadDim];
  for (long head = 0; head < shape.kv_heads; ++head) {
    Page* to = pages + (slot * shape.kv_heads + head) * 2 * dim;
    const float* value = heads + (shape.heads + shape.kv_heads + head) * dim;
    rotate(heads + (shape.heads + head) * dim, norms.k, norms.eps, cos, sin, dim, key);
    narrow_all(key, dim, to);
    narrow_all(value, dim, to + dim);
  }
}

struct Layer {
  Projection qkv, out, gate_up, down;
  Norms norms;
  Shape shape;
  long window;
  bool gelu;

  // Whether a panel holds sixteen values of a head's first half and those of its second that they are turned with: layers.py packs q and k so
  // where no norm comes before.
  bool paired() const { return shape.dim % kPanel == 0 && norms.q == nullptr && norms.k == nullptr; }
};

constexpr long kTokensOfPart = 4;

// Tokens' places: angles [tokens, dim / 2], and slots, null where no KV is to be stored.
struct Places {
  const float *cos, *sin;
  const std::int32_t* slots;
  long num_slots;
};

// The product with `some` paired panels of q, k and v, turned in registers on the way to `queries` [tokens, heads, dim] and `pages`.
template <class Page>
void project_paired(Team& team, const Tiles& tiles, const Packed& x, const Layer& layer, Panels some, const Places& places, float* queries,
                    Page* pages) {
  const Shape& shape = layer.shape;
  const Projection& by = layer.qkv;
  const long dim = shape.dim, half = dim / 2;
  const auto take = [&](long number, long tile, const auto& sums) __attribute__((always_inline)) {
    constexpr int kTokens = std::extent_v<std::remove_reference_t<decltype(sums)>>;
    const long output = (some.first + number) * kPanel, head = output / dim, within = output % dim, turn = within / 2;
    const bool is_query = head < shape.heads, is_key = !is_query && head < shape.heads + shape.kv_heads;
    floats bias[2] = {};
    if (by.bias != nullptr) bias[0] = load(by.bias + output), bias[1] = load(by.bias + output + kLanes);
#pragma GCC unroll 16
    for (int index = 0; index < kTokens; ++index) {
      const long token = tiles.first(tile) + index;
      floats first = sums[index][0] + bias[0], second = sums[index][1] + bias[1];
      if (is_query || is_key) {
        const floats c = load(places.cos + token * half + turn), s = load(places.sin + token * half + turn), before = first;
        first = before * c - second * s;
        second = second * c + before * s;
      }
      if (is_query) {
        float* to = queries + (token * shape.heads + head) * dim + turn;
        store(to, first);
        store(to + half, second);
      } else if (const long slot = places.slots[token]; slot >= 0 && slot < places.num_slots) {
        const long kv_head = head - shape.heads - (is_key ? 0 : shape.kv_heads);
        Page* to = pages + (slot * shape.kv_heads + kv_head) * 2 * dim + (is_key ? turn : dim + within);
        store(to, first);
        store(to + (is_key ? half : kLanes), second);
      }
    }
  };
  product_of(team, tiles, x, by, some, take);
}

// Stores all KV, and makes attention's queries [tokens, heads, dim] unless `queries` is null.
template <class Page>
void project_rows(Team& team, const Layer& layer, const Rows& rows, const float* cos, const float* sin, const float* x, Page* pages,
                  const Packed& packed, float* result, float* queries) {
  const Tiles tiles(rows.tokens());
  const long hidden = layer.qkv.in, half = layer.shape.dim / 2;
  const long unseen = queries == nullptr ? layer.out.in / kPanel : 0;  // panels of queries alone
  const Panels some{unseen, layer.qkv.panels - unseen};
  team(tiles.count, [&](long tile) { pack(tiles, tile, x, hidden, layer.norms.attention, layer.norms.eps, packed); });
  if (layer.paired()) {
    project_paired(team, tiles, packed, layer, some, {cos, sin, rows.slots, rows.num_slots}, queries, pages);
    return;
  }
  project(team, tiles, packed, layer.qkv, some, nullptr, result);
  team((tiles.tokens + kTokensOfPart - 1) / kTokensOfPart, [&](long part) {
    for (long token = part * kTokensOfPart; token < std::min(tiles.tokens, (part + 1) * kTokensOfPart); ++token) {
      const float *heads = result + token * layer.qkv.outs(), *c = cos + token * half, *s = sin + token * half;
      if (queries != nullptr) turn_queries(heads, layer.shape, layer.norms, c, s, queries + token * layer.out.in);
      store_kv(heads, layer.shape, layer.norms, c, s, rows.slots[token], rows.num_slots, pages);
    }
  });
}

// Queries of `tokens` alone, whose x are the tiles'.
template <class Page>
void project_queries(Team& team, const Layer& layer, const std::vector<long>& tokens, const float* cos, const float* sin, const float* x,
                     Page* pages, const Packed& packed, float* result, float* queries) {
  const Tiles tiles(long(tokens.size()));
  const long hidden = layer.qkv.in, attended = layer.out.in, half = layer.shape.dim / 2;
  const Panels some{0, (attended + kPanel - 1) / kPanel};
  std::vector<float> turns(2 * tiles.tokens * half);
  float *own_cos = turns.data(), *own_sin = own_cos + tiles.tokens * half;
  for (long i = 0; i < tiles.tokens; ++i) {
    std::copy(cos + tokens[i] * half, cos + (tokens[i] + 1) * half, own_cos + i * half);
    std::copy(sin + tokens[i] * half, sin + (tokens[i] + 1) * half, own_sin + i * half);
  }
  team(tiles.count, [&](long tile) { pack(tiles, tile, x, hidden, layer.norms.attention, layer.norms.eps, packed); });
  if (layer.paired()) {
    project_paired(team, tiles, packed, layer, some, {own_cos, own_sin, nullptr, 0}, queries, pages);
    return;
  }
  project(team, tiles, packed, layer.qkv, some, nullptr, result);
  for (long i = 0; i < tiles.tokens; ++i)
    turn_queries(result + i * layer.qkv.outs(), layer.shape, layer.norms, own_cos + i * half, own_sin + i * half, queries + i * attended);
}

// From attention's result `mixed` [tokens, heads * dim] and x [tokens, hidden], the residual stream, to the layer's result, `out`.
void finish(Team& team, const Layer& layer, long tokens, const float* mixed, const float* x, const Packed& packed, const Packed& gated,
            float* result, float* out) {
  const Tiles tiles(tokens);
  const long hidden = layer.qkv.in, attended = layer.out.in;
  // out = onto + the product, which goes there at once where no norm comes between and it is no wider.
  const auto project_onto = [&](const Packed& values, const Projection& by, const float* post, const float* onto) {
    if (post == nullptr && by.outs() == hidden) {
      project(team, tiles, values, by, onto, out);
      return;
    }
    project(team, tiles, values, by, nullptr, result);
    team(tokens, [&](long token) {
      add(onto + token * hidden, result + token * by.outs(), hidden, post, layer.norms.eps, out + token * hidden);
    });
  };
  team(tiles.count, [&](long tile) { pack(tiles, tile, mixed, attended, nullptr, 0, packed); });
  project_onto(packed, layer.out, layer.norms.attention_post, x);
  team(tiles.count, [&](long tile) { pack(tiles, tile, out, hidden, layer.norms.mlp, layer.norms.eps, packed); });
  if (layer.gelu) project_gated<true>(team, tiles, packed, layer.gate_up, gated.values);
  else project_gated<false>(team, tiles, packed, layer.gate_up, gated.values);
  if (gated.crosses != nullptr) team(tiles.count, [&](long tile) { cross(tiles, tile, layer.down.in, gated); });
  project_onto(gated, layer.down, layer.norms.mlp_post, out);
}

// A token whose result is wanted, and where.
struct Wanted {
  long token, at;
};

// `wanted`: null, or the tokens whose results are wanted: only there `out` is written.
template <class Page>
void run_layer(Team& team, const Layer& layer, const Rows& rows, const float* cos, const float* sin, const float* x, Page* pages,
               const std::vector<Wanted>* wanted, float* out) {
  const Shape& shape = layer.shape;
  const long tokens = rows.tokens(), hidden = layer.qkv.in, attended = layer.out.in, inner = layer.down.in;
  const long widest = std::max(hidden, attended), wide = std::max({layer.qkv.outs(), layer.out.outs(), layer.down.outs()});
  const long most = std::max(tokens, wanted == nullptr ? 0 : long(wanted->size()));
  Scratch scratch(most * (widest + inner + wide + 3 * attended + hidden + 4), 11);
  const auto take_packed = [&](const Projection& by, long width) {
    const bool crossed = by.rows > by.in;
    return Packed{scratch.take(most * width), crossed ? scratch.take(most) : nullptr, crossed ? scratch.take(most) : nullptr};
  };
  const Packed packed = take_packed(layer.qkv, widest), gated = take_packed(layer.down, inner);
  float* result = scratch.take(most * wide);
  float *queries = scratch.take(most * attended), *mixed = scratch.take(most * attended);
  // Where most tokens are wanted, queries of all are part of one product.
  const long count = wanted == nullptr ? tokens : long(wanted->size());
  const bool all = 2 * count > tokens;
  project_rows(team, layer, rows, cos, sin, x, pages, packed, result, all ? queries : nullptr);
  if (wanted == nullptr) {
    attend(team, queries, (const Page*)pages, rows.tables, rows.table_width, rows.row_starts, rows.context_lens, rows.count, tokens, nullptr,
           layer.window, shape, mixed);
    finish(team, layer, tokens, mixed, x, packed, gated, result, out);
    return;
  }
  // Each wanted token is a decode row of its own.
  float *stream = scratch.take(most * hidden), *mine = scratch.take(most * attended);
  std::vector<Row> alone;
  std::vector<long> numbers;
  for (long i = 0; i < count; ++i) {
    const long token = (*wanted)[i].token;
    const long row = std::upper_bound(rows.row_starts, rows.row_starts + rows.count + 1, token) - rows.row_starts - 1;
    alone.push_back({rows.tables + row * rows.table_width, i, rows.context_lens[row] + token - rows.row_starts[row]});
    numbers.push_back(token);
    std::copy(x + token * hidden, x + (token + 1) * hidden, stream + i * hidden);
    if (all) std::copy(queries + token * attended, queries + (token + 1) * attended, mine + i * attended);
  }
  if (!all) project_queries(team, layer, numbers, cos, sin, stream, pages, packed, result, mine);
  attend_rows(team, alone, mine, (const Page*)pages, shape, layer.window, nullptr, mixed);
  finish(team, layer, count, mixed, stream, packed, gated, result, stream);
  for (long i = 0; i < count; ++i) std::copy(stream + i * hidden, stream + (i + 1) * hidden, out + (*wanted)[i].at * hidden);
}

// See the declaration of arguments below.
ffi::Error run(ffi::ThreadPool pool, Floats x, Floats attention_norm, Floats qkv, Floats qkv_bias, Floats q_norm, Floats k_norm, Floats out,
               Floats out_bias, Floats attention_post_norm, Floats mlp_norm, Floats gate_up, Floats gate_up_bias, Floats down, Floats down_bias,
               Floats mlp_post_norm, Floats cos, Floats sin, Ints slots, ffi::AnyBuffer pages, Ints tables, Ints row_starts, Ints context_lens,
               Ints num_rows, Ints wanted, std::int64_t heads, float eps, float scale, float soft_cap, std::int64_t window,
               bool gelu, bool crossed, ffi::ResultBuffer<ffi::F32> result, ffi::Result<ffi::AnyBuffer> new_pages) {
  const auto page_dims = pages.dimensions();
  if (new_pages->untyped_data() != pages.untyped_data()) return ffi::Error::InvalidArgument("pdd_layer: pages must be updated in place");
  if (page_dims[3] > kMaxHeadDim) return ffi::Error::InvalidArgument("pdd_layer: heads are too long");
  const Norms norms{optional(attention_norm), optional(attention_post_norm), optional(mlp_norm), optional(mlp_post_norm),
                    optional(q_norm),         optional(k_norm),              eps};
  const Shape shape{heads, page_dims[2] / 2, page_dims[3], page_dims[1], scale, soft_cap};
  const Layer layer{{qkv, qkv_bias, crossed}, {out, out_bias, crossed}, {gate_up, gate_up_bias, crossed}, {down, down_bias, crossed},
                    norms, shape, window, gelu};
  const Rows rows{slots.typed_data(),      tables.typed_data(),        row_starts.typed_data(), context_lens.typed_data(),
                  tables.dimensions()[1], num_rows.typed_data()[0], page_dims[0] * page_dims[1]};
  std::vector<Wanted> some;
  for (long at = 0; at < long(wanted.element_count()); ++at)
    if (const long token = wanted.typed_data()[at]; token < rows.tokens()) some.push_back({token, at});
  float* to = result->typed_data();
  if (wanted.element_count() > 0) std::fill(to, to + result->element_count(), 0.0f);
  else std::fill(to + rows.tokens() * layer.qkv.in, to + result->element_count(), 0.0f);
  Team team(pool);
  const ffi::Error error = with_pages(pages, [&](auto* values) {
    using Page = std::remove_const_t<std::remove_pointer_t<decltype(values)>>;
    run_layer(team, layer, rows, cos.typed_data(), sin.typed_data(), x.typed_data(), const_cast<Page*>(values),
              wanted.element_count() == 0 ? nullptr : &some, to);
  });
  return error;
}

}  // namespace
}  // namespace pdd

// x [T, hidden]. Norms [features]; weights packed as panels.h says, with biases in the order of the packed outputs; q, k and v are one product,
// paired as Layer says, gate and up another, sixteen of each in turn. cos, sin [T, dim / 2] · slots [T] · pages, taken over · tables [R, P] · row_starts [R + 1],
// context_lens [R], the first num_rows [1] of them valid · wanted [W], tokens whose results are
// wanted, those past all rows' tokens nobody's; [0]: all are.
// window 0: none. Optional: biases, q_norm, k_norm, post norms, wanted.
// -> [T, hidden] or [W, hidden], zeros where nothing is valid, and the pages.
XLA_FFI_DEFINE_HANDLER_SYMBOL(pdd_layer, pdd::run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Attr<std::int64_t>("heads")
                                  .Attr<float>("eps")
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<std::int64_t>("window")
                                  .Attr<bool>("gelu")
                                  .Attr<bool>("crossed")
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>());

// Whether this processor takes less time for products whose inputs cross.
extern "C" int pdd_crosses() { return pdd::kAddsBeside; }
