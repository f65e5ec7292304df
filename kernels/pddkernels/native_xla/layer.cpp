// A decoder layer in one call: norm, q, k and v, rotary embedding, storing KV, attention, output, norm, gated MLP, both residual sums. Between
// the products nothing is left but passes over a few tokens at a time, which go along with packing them for the next product.
//
// float32 throughout, tokens first [tokens, features]. Options of families that a model lacks are empty arrays.
#include <vector>

#include "attention.h"
#include "ffi.h"
#include "layer.h"
#include "panels.h"

namespace pdd {
namespace {

// weights [panels, in, 32], and a bias for every output of the panels or none.
struct Projection {
  const float *weights, *bias;
  long panels, in;

  Projection(const Floats& weights, const Floats& bias)
      : weights(weights.typed_data()), bias(optional(bias)), panels(weights.dimensions()[0]), in(weights.dimensions()[1]) {}
  long outs() const { return panels * kPanel; }
};

// out[token] = x times weights, plus the bias, plus onto[token] unless `onto` is null.
void project(Team& team, const Tiles& tiles, const float* x, const Projection& by, const float* onto, float* out) {
  product(team, tiles, x, by.in, by.weights, by.panels, [&](long panel, long tile, const auto& sums) {
    long token = tiles.first(tile);
    for (const auto& sum : sums) {
      const long at = token++ * by.outs() + panel * kPanel;
      for (int half = 0; half < 2; ++half) {
        floats values = sum[half];
        if (by.bias != nullptr) values += load(by.bias + panel * kPanel + half * kLanes);
        if (onto != nullptr) values += load(onto + at + half * kLanes);
        store(out + at + half * kLanes, values);
      }
    }
  });
}

// Sigmoid(g) * g, or GELU in its tanh form, g * sigmoid(2 k): both times up.
template <bool kGelu>
floats activate(const floats& gate, const floats& up) {
  alignas(64) float shares[kLanes];
  const floats inner = kGelu ? 1.5957691216f * (gate + 0.044715f * gate * gate * gate) : gate;
  store(shares, -inner);
  for (float& share : shares) share = exponential(share);
  return gate / (1.0f + load(shares)) * up;
}

// The gated unit, packed for the next product. A panel holds sixteen gates and the sixteen values that they let through.
template <bool kGelu>
void project_gated(Team& team, const Tiles& tiles, const float* x, const Projection& by, float* out) {
  const long width = by.panels * kLanes;
  product(team, tiles, x, by.in, by.weights, by.panels, [&](long panel, long tile, const auto& sums) {
    constexpr long kTokens = std::extent_v<std::remove_reference_t<decltype(sums)>>;
    floats values[kTokens];
#pragma GCC unroll 16
    for (long token = 0; token < kTokens; ++token) {
      floats gate = sums[token][0], up = sums[token][1];
      if (by.bias != nullptr) {
        gate += load(by.bias + panel * kPanel);
        up += load(by.bias + panel * kPanel + kLanes);
      }
      values[token] = activate<kGelu>(gate, up);
    }
    store_packed(values, out + tiles.first(tile) * width + panel * kLanes * kTokens);
  });
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

// Queries [heads, dim] and stored KV of one token, of its heads q, k and v.
template <class Page>
void place_token(const float* heads, const Shape& shape, const Norms& norms, const float* cos, const float* sin, long slot, long num_slots,
                 float* queries, Page* pages) {
  const long dim = shape.dim;
  for (long head = 0; head < shape.heads; ++head) rotate(heads + head * dim, norms.q, norms.eps, cos, sin, dim, queries + head * dim);
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
};

constexpr long kTokensOfPart = 4;

// Attention's queries [tokens, heads, dim], with all KV stored on the way.
template <class Page>
void project_queries(Team& team, const Layer& layer, const Rows& rows, const float* cos, const float* sin, const float* x, Page* pages,
                     float* packed, float* result, float* queries) {
  const Tiles tiles(rows.tokens());
  const long hidden = layer.qkv.in, half = layer.shape.dim / 2;
  team(tiles.count, [&](long tile) { pack(tiles, tile, x, hidden, layer.norms.attention, layer.norms.eps, packed); });
  project(team, tiles, packed, layer.qkv, nullptr, result);
  team((tiles.tokens + kTokensOfPart - 1) / kTokensOfPart, [&](long part) {
    for (long token = part * kTokensOfPart; token < std::min(tiles.tokens, (part + 1) * kTokensOfPart); ++token)
      place_token(result + token * layer.qkv.outs(), layer.shape, layer.norms, cos + token * half, sin + token * half, rows.slots[token],
                  rows.num_slots, queries + token * layer.out.in, pages);
  });
}

// From attention's result `mixed` [tokens, heads * dim] and x [tokens, hidden], the residual stream, to the layer's result, `out`.
void finish(Team& team, const Layer& layer, long tokens, const float* mixed, const float* x, float* packed, float* gated, float* result,
            float* out) {
  const Tiles tiles(tokens);
  const long hidden = layer.qkv.in, attended = layer.out.in;
  // out = onto + the product, which goes there at once where no norm comes between and it is no wider.
  const auto project_onto = [&](const float* values, const Projection& by, const float* post, const float* onto) {
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
  if (layer.gelu) project_gated<true>(team, tiles, packed, layer.gate_up, gated);
  else project_gated<false>(team, tiles, packed, layer.gate_up, gated);
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
  Scratch scratch(most * (widest + inner + wide + 2 * attended + hidden), 6);
  float *packed = scratch.take(most * widest), *gated = scratch.take(most * inner), *result = scratch.take(most * wide);
  float *queries = scratch.take(most * attended), *mixed = scratch.take(most * attended);
  project_queries(team, layer, rows, cos, sin, x, pages, packed, result, queries);
  if (wanted == nullptr) {
    attend(team, queries, (const Page*)pages, rows.tables, rows.table_width, rows.row_starts, rows.context_lens, rows.count, tokens, nullptr,
           layer.window, shape, mixed);
    finish(team, layer, tokens, mixed, x, packed, gated, result, out);
    return;
  }
  // Each wanted token is a decode row of its own.
  const long count = long(wanted->size());
  float* stream = scratch.take(most * hidden);
  std::vector<Row> alone;
  for (long i = 0; i < count; ++i) {
    const long token = (*wanted)[i].token;
    const long row = std::upper_bound(rows.row_starts, rows.row_starts + rows.count + 1, token) - rows.row_starts - 1;
    alone.push_back({rows.tables + row * rows.table_width, i, rows.context_lens[row] + token - rows.row_starts[row]});
    std::copy(queries + token * attended, queries + (token + 1) * attended, result + i * attended);
    std::copy(x + token * hidden, x + (token + 1) * hidden, stream + i * hidden);
  }
  attend_rows(team, alone, result, (const Page*)pages, shape, layer.window, nullptr, mixed);
  finish(team, layer, count, mixed, stream, packed, gated, result, stream);
  for (long i = 0; i < count; ++i) std::copy(stream + i * hidden, stream + (i + 1) * hidden, out + (*wanted)[i].at * hidden);
}

// See the declaration of arguments below.
ffi::Error run(ffi::ThreadPool pool, Floats x, Floats attention_norm, Floats qkv, Floats qkv_bias, Floats q_norm, Floats k_norm, Floats out,
               Floats out_bias, Floats attention_post_norm, Floats mlp_norm, Floats gate_up, Floats gate_up_bias, Floats down, Floats down_bias,
               Floats mlp_post_norm, Floats cos, Floats sin, Ints slots, ffi::AnyBuffer pages, Ints tables, Ints row_starts, Ints context_lens,
               Ints num_rows, Ints wanted, std::int64_t heads, float eps, float scale, float soft_cap, std::int64_t window,
               bool gelu, ffi::ResultBuffer<ffi::F32> result, ffi::Result<ffi::AnyBuffer> new_pages) {
  const auto page_dims = pages.dimensions();
  if (new_pages->untyped_data() != pages.untyped_data()) return ffi::Error::InvalidArgument("pdd_layer: pages must be updated in place");
  if (page_dims[3] > kMaxHeadDim) return ffi::Error::InvalidArgument("pdd_layer: heads are too long");
  const Norms norms{optional(attention_norm), optional(attention_post_norm), optional(mlp_norm), optional(mlp_post_norm),
                    optional(q_norm),         optional(k_norm),              eps};
  const Shape shape{heads, page_dims[2] / 2, page_dims[3], page_dims[1], scale, soft_cap};
  const Layer layer{{qkv, qkv_bias}, {out, out_bias}, {gate_up, gate_up_bias}, {down, down_bias}, norms, shape, window, gelu};
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
// gate and up another, sixteen of each in turn. cos, sin [T, dim / 2] · slots [T] · pages, taken over · tables [R, P] · row_starts [R + 1],
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
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>());
