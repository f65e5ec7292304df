// weight [out, in] int8 @ x [columns, in] bfloat16, sums in float32: what a step with weights in int8 computes, a decode step bound by reading
// them: a quarter of the bytes of float32.
//
// Weights are read once, as they lie, and widened in registers, which loses nothing. Vectors run along the inputs, so a sum is one of lanes,
// which are added last: a column's are the same to the bit beside any others.
#include <vector>

#include "numbers.h"
#include "ffi.h"
#include "team.h"
#include "transpose.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace pdd {
namespace {

constexpr int kMostColumns = 8;       // of one pass over a part of the weights: with two rows of them sixteen sums
constexpr long kPartBytes = 1 << 16;  // of weights: what a core's second-level cache keeps from pass to pass, and enough to be worth taking

#ifdef __AVX512BF16__

constexpr long kStep = 32;
using Sums = __m512;
using Input = bfloat16;

inline __m512bh widen(__m256i steps) {
  const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(steps)));
  const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(steps, 1)));
  return _mm512_cvtne2ps_pbh(high, low);
}

// sums[r][c] += of inputs i to i + kStep, those that `mask` has.
template <int kRows, int kColumns>
inline void add(const std::int8_t* weight, const bfloat16* x, long in, long i, __mmask32 mask, Sums (&sums)[kRows][kColumns]) {
  __m512bh w[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) w[r] = widen(_mm256_maskz_loadu_epi8(mask, weight + r * in + i));
#pragma GCC unroll 8
  for (int c = 0; c < kColumns; ++c) {
    const __m512bh inputs = (__m512bh)_mm512_maskz_loadu_epi16(mask, x + c * in + i);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) sums[r][c] = _mm512_dpbf16_ps(sums[r][c], w[r], inputs);
  }
}

inline std::uint32_t first(long count) { return count >= 32 ? ~0u : (1u << count) - 1; }

#else

constexpr long kStep = kLanes;
using Sums = floats;
using Input = float;

template <int kRows, int kColumns>
inline void add(const std::int8_t* weight, const float* x, long in, long i, long count, Sums (&sums)[kRows][kColumns]) {
  using steps = std::int8_t __attribute__((vector_size(kLanes)));
  floats w[kRows];
  for (int r = 0; r < kRows; ++r) {
    steps values = {};
    std::memcpy(&values, weight + r * in + i, count);
    w[r] = __builtin_convertvector(values, floats);
  }
  for (int c = 0; c < kColumns; ++c) {
    floats inputs = {};
    std::memcpy(&inputs, x + c * in + i, count * sizeof(float));
    for (int r = 0; r < kRows; ++r) sums[r][c] += w[r] * inputs;
  }
}

inline long first(long count) { return count; }

#endif

// out[r][c] of consecutive rows; the next ones' weights are fetched while these are used.
template <int kRows, int kColumns>
inline void rows(const std::int8_t* weight, const Input* x, float* out, long in, long out_stride) {
  static_assert(kRows * kColumns <= kLanes);
  Sums sums[kRows][kColumns];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) sums[r][c] = Sums{};
  long i = 0;
  for (; i + kStep <= in; i += kStep) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) __builtin_prefetch(weight + (kRows + r) * in + i, 0, 2);
    add<kRows, kColumns>(weight, x, in, i, first(kStep), sums);
  }
  if (i < in) add<kRows, kColumns>(weight, x, in, i, first(in - i), sums);
  floats lanes[kLanes];
#pragma GCC unroll 16
  for (int sum = 0; sum < kLanes; ++sum) lanes[sum] = sum < kRows * kColumns ? (floats)sums[sum / kColumns][sum % kColumns] : floats{};
  transpose(lanes);
#pragma GCC unroll 4
  for (int width = kLanes / 2; width > 0; width /= 2)
#pragma GCC unroll 8
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) out[r * out_stride + c] = lanes[0][r * kColumns + c];
}

template <int kRows, int kColumns>
void product(ffi::ThreadPool& pool, const std::int8_t* weight, const Input* x, float* out, long outs, long in, long columns) {
  const long part_rows = kRows * std::max<long>(1, kPartBytes / in / kRows);
  Team team(pool);
  team((outs + part_rows - 1) / part_rows, [&](long part) {
    const long stop = std::min(outs, (part + 1) * part_rows);
    for (long c = 0; c < columns; c += kColumns) {
      long row = part * part_rows;
      for (; row + kRows <= stop; row += kRows) rows<kRows, kColumns>(weight + row * in, x + c * in, out + row * columns + c, in, columns);
      for (; row < stop; ++row) rows<1, kColumns>(weight + row * in, x + c * in, out + row * columns + c, in, columns);
    }
  });
}

ffi::Error run(ffi::ThreadPool pool, ffi::Buffer<ffi::S8> weight, ffi::Buffer<ffi::BF16> x, ffi::ResultBuffer<ffi::F32> out) {
  const long outs = weight.dimensions()[0], in = weight.dimensions()[1], columns = x.dimensions()[0];
  const std::int8_t* w = weight.typed_data();
  const bfloat16* given = (const bfloat16*)x.untyped_data();
#ifdef __AVX512BF16__
  const Input* from = given;
#else
  std::vector<float> wide(columns * in);
  for (long i = 0; i < columns * in; ++i) wide[i] = pdd::widen(given[i]);
  const Input* from = wide.data();
#endif
  float* to = out->typed_data();
  switch (columns) {
    case 1: product<8, 1>(pool, w, from, to, outs, in, columns); break;
    case 2: product<8, 2>(pool, w, from, to, outs, in, columns); break;
    case 4: product<4, 4>(pool, w, from, to, outs, in, columns); break;
    default:
      if (columns % kMostColumns != 0) return ffi::Error::InvalidArgument("pdd_product_int8: columns must be 1, 2, 4 or a multiple of 8");
      product<2, kMostColumns>(pool, w, from, to, outs, in, columns);
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace pdd

// weight [out, in] int8, x [columns, in] bfloat16 -> [out, columns] float32; columns 1, 2, 4 or a multiple of 8.
XLA_FFI_DEFINE_HANDLER_SYMBOL(pdd_product_int8, pdd::run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::S8>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
