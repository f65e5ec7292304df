// weight [out, in] @ x [in, columns] in float32 for few columns: what a decode step computes, bound by reading the weights.
//
// Weights are read once, as they lie. kRows outputs are summed at a time, in registers: of all columns (a vector holds them), or, of one
// column, along the inputs. So many rows side by side are too many streams for processors to run ahead of, so what the next rows need is
// fetched while these are computed (measured: 33 GB/s of weights instead of 21 for 8 columns).
#include "numbers.h"
#include "ffi.h"
#include "team.h"

namespace pdd {
namespace {

constexpr int kRows = 12;
constexpr int kLine = 64 / sizeof(float);
constexpr long kPartBytes = 1 << 18;  // of weights: small enough to share them evenly, large enough to be worth taking

template <int kRows>
inline void fetch_next(const float* weight, long in, long i) {
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) __builtin_prefetch(weight + (row + kRows) * in + i, 0, 2);
}

template <int kColumns>
struct Columns {
  using vector __attribute__((vector_size(4 * kColumns))) = float;

  template <int kRows>
  static void rows(const float* weight, const float* x, float* out, long in) {
    vector sums[kRows] = {};
    const auto add = [&](long i) {
      vector column;
      std::memcpy(&column, x + i * kColumns, sizeof column);
#pragma GCC unroll 16
      for (int row = 0; row < kRows; ++row) sums[row] += column * weight[row * in + i];
    };
    long i = 0;
    for (; i + kLine <= in; i += kLine) {
      fetch_next<kRows>(weight, in, i);
#pragma GCC unroll 4
      for (int step = 0; step < kLine; ++step) add(i + step);
    }
    for (; i < in; ++i) add(i);
    std::memcpy(out, sums, sizeof sums);
  }
};

template <>
struct Columns<1> {
  template <int kRows>
  static void rows(const float* weight, const float* x, float* out, long in) {
    floats sums[kRows] = {};
    long i = 0;
    for (; i + kLanes <= in; i += kLanes) {
      fetch_next<kRows>(weight, in, i);
      const floats inputs = load(x + i);
#pragma GCC unroll 16
      for (int row = 0; row < kRows; ++row) sums[row] += inputs * load(weight + row * in + i);
    }
    for (int row = 0; row < kRows; ++row) {
      out[row] = total(sums[row]);
      for (long rest = i; rest < in; ++rest) out[row] += x[rest] * weight[row * in + rest];
    }
  }
};

template <int kColumns>
void product(ffi::ThreadPool& pool, const float* weight, const float* x, float* out, long outs, long in) {
  const long part_rows = kRows * std::max<long>(1, kPartBytes / long(sizeof(float)) / in / kRows);
  Team team(pool);
  team((outs + part_rows - 1) / part_rows, [&](long part) {
    const long stop = std::min(outs, (part + 1) * part_rows);
    long row = part * part_rows;
    for (; row + kRows <= stop; row += kRows) Columns<kColumns>::template rows<kRows>(weight + row * in, x, out + row * kColumns, in);
    for (; row < stop; ++row) Columns<kColumns>::template rows<1>(weight + row * in, x, out + row * kColumns, in);
  });
}

ffi::Error run(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> weight, ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> out) {
  const long outs = weight.dimensions()[0], in = weight.dimensions()[1];
  const float *w = weight.typed_data(), *from = x.typed_data();
  float* to = out->typed_data();
  switch (x.dimensions()[1]) {
    case 1: product<1>(pool, w, from, to, outs, in); break;
    case 4: product<4>(pool, w, from, to, outs, in); break;
    case 8: product<8>(pool, w, from, to, outs, in); break;
    case 16: product<16>(pool, w, from, to, outs, in); break;
    default: return ffi::Error::InvalidArgument("pdd_product: columns must be 1, 4, 8 or 16");
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace pdd

// weight [out, in], x [in, columns] -> [out, columns], all float32; columns 1, 4, 8 or 16.
XLA_FFI_DEFINE_HANDLER_SYMBOL(pdd_product, pdd::run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
