// Small products of bfloat16 matrices with float32 sums held in registers: what the linear layers and the attention of chunks are made of.
//
// w is packed: a pair of inputs of kOuts outputs is contiguous, [pairs, kOuts, 2]. Only for processors with dot products of bfloat16 pairs
// (AVX-512 BF16).
#pragma once

#ifdef __AVX512BF16__
#include <immintrin.h>

#include "numbers.h"

namespace pdd {

constexpr long kOuts = 32;
constexpr long kRows = 12;  // of sums in registers: 12 x 2 of 32

inline __m512bh pairs(const bfloat16* from) { return (__m512bh)_mm512_loadu_si512(from); }
inline __m512bh pair(const bfloat16* from) {
  std::int32_t both;
  std::memcpy(&both, from, sizeof both);
  return (__m512bh)_mm512_set1_epi32(both);
}

// sums[m][o] += x[m] . w over ``count`` pairs. kSplit sums per row and output hide the latency of a product where there are few rows.
template <int kM, int kSplit>
inline void multiply(const bfloat16* x, long x_stride, const bfloat16* w, long count, __m512 (&sums)[kM][2]) {
  __m512 split[kSplit][kM][2];
  for (int s = 0; s < kSplit; ++s)
    for (int m = 0; m < kM; ++m)
      for (int o = 0; o < 2; ++o) split[s][m][o] = s == 0 ? sums[m][o] : _mm512_setzero_ps();
  long p = 0;
  for (; p + kSplit <= count; p += kSplit) {
#pragma GCC unroll 4
    for (int s = 0; s < kSplit; ++s) {
      const bfloat16* at = w + (p + s) * kOuts * 2;
      const __m512bh w0 = pairs(at), w1 = pairs(at + kOuts);
#pragma GCC unroll 12
      for (int m = 0; m < kM; ++m) {
        const __m512bh both = pair(x + m * x_stride + (p + s) * 2);
        split[s][m][0] = _mm512_dpbf16_ps(split[s][m][0], w0, both);
        split[s][m][1] = _mm512_dpbf16_ps(split[s][m][1], w1, both);
      }
    }
  }
  for (; p < count; ++p) {
    const __m512bh w0 = pairs(w + p * kOuts * 2), w1 = pairs(w + p * kOuts * 2 + kOuts);
#pragma GCC unroll 12
    for (int m = 0; m < kM; ++m) {
      const __m512bh both = pair(x + m * x_stride + p * 2);
      split[0][m][0] = _mm512_dpbf16_ps(split[0][m][0], w0, both);
      split[0][m][1] = _mm512_dpbf16_ps(split[0][m][1], w1, both);
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < kM; ++m)
#pragma GCC unroll 2
    for (int o = 0; o < 2; ++o) {
      sums[m][o] = split[0][m][o];
      for (int s = 1; s < kSplit; ++s) sums[m][o] = _mm512_add_ps(sums[m][o], split[s][m][o]);
    }
}

// Calls run<kM, kSplit>(first row) for consecutive steps of about equal height: 16 rows are two of eight, not twelve and four.
template <class Run>
inline void in_steps(long rows, Run run) {
  for (long row = 0; row < rows;) {
    const long left = rows - row, steps = (left + kRows - 1) / kRows, step = (left + steps - 1) / steps;
#define PDD_ROWS(m, split) \
  case m: run.template operator()<m, split>(row); break;
    switch (step) {
      PDD_ROWS(1, 4) PDD_ROWS(2, 2) PDD_ROWS(3, 2) PDD_ROWS(4, 1) PDD_ROWS(5, 1) PDD_ROWS(6, 1)
      PDD_ROWS(7, 1) PDD_ROWS(8, 1) PDD_ROWS(9, 1) PDD_ROWS(10, 1) PDD_ROWS(11, 1) PDD_ROWS(12, 1)
    }
#undef PDD_ROWS
    row += step;
  }
}

}  // namespace pdd
#endif
