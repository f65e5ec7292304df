// From hidden states to logits, their maximum and where it is: norm, product with packed weights, soft cap.
#include <memory>
#include <vector>

#include "ffi.h"
#include "layer.h"

namespace pdd {
namespace {

struct Best {
  float logit;
  std::int32_t id;
};

// The higher one; the lower id of equals. NaN is higher than anything, so that it shows.
Best better(const Best& a, const Best& b) { return b.logit > a.logit || (b.logit != b.logit && a.logit == a.logit) ? b : a; }

ffi::Error run(ffi::ThreadPool pool, Floats x, Floats norm, Floats weights, float eps, float soft_cap, ffi::ResultBuffer<ffi::F32> logits,
               ffi::ResultBuffer<ffi::F32> highest, ffi::ResultBuffer<ffi::S32> ids) {
  const long tokens = x.dimensions()[0], hidden = x.dimensions()[1], vocab = logits->dimensions()[0], panels = weights.dimensions()[0];
  const Tiles tiles(tokens);
  Scratch scratch(tokens * hidden, 1);
  const Packed packed{scratch.take(tokens * hidden), nullptr, nullptr};
  std::vector<Best> best(panels * tokens);
  float* out = logits->typed_data();
  Team team(pool);
  team(tiles.count, [&](long tile) { pack(tiles, tile, x.typed_data(), hidden, norm.typed_data(), eps, packed); });
  const auto take = [&](long panel, long tile, const auto& sums) __attribute__((always_inline)) {
    constexpr long kTokens = std::extent_v<std::remove_reference_t<decltype(sums)>>;
    const long first = panel * kPanel, count = std::min(kPanel, vocab - first);
    alignas(64) float values[kTokens][kPanel];
#pragma GCC unroll 16
    for (long token = 0; token < kTokens; ++token) {
      float* mine = values[token];
      store(mine, sums[token][0]);
      store(mine + kLanes, sums[token][1]);
      if (soft_cap > 0)  // cap * tanh(logit / cap)
        for (long i = 0; i < kPanel; ++i) mine[i] = soft_cap - 2 * soft_cap / (exponential(2 * mine[i] / soft_cap) + 1);
      Best found{mine[0], std::int32_t(first)};
      for (long i = 1; i < count; ++i) found = better(found, {mine[i], std::int32_t(first + i)});
      best[panel * tokens + tiles.first(tile) + token] = found;
    }
    for (long i = 0; i < count; ++i)
      for (long token = 0; token < kTokens; ++token) out[(first + i) * tokens + tiles.first(tile) + token] = values[token][i];
  };
  product<false>(team, tiles, packed, hidden, weights.typed_data(), panels, take);
  for (long token = 0; token < tokens; ++token) {
    Best found = best[token];
    for (long panel = 1; panel < panels; ++panel) found = better(found, best[panel * tokens + token]);
    highest->typed_data()[token] = found.logit;
    ids->typed_data()[token] = found.id;
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace pdd

// x [S, hidden], norm [hidden], weights packed [panels, hidden, 32] -> logits [vocab, S], their maximum [S], the lowest id that has it [S].
XLA_FFI_DEFINE_HANDLER_SYMBOL(pdd_head, pdd::run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("eps")
                                  .Attr<float>("soft_cap")
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>());
