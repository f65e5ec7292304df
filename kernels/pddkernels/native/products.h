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

// An integer of -127 ... 127 as sign and magnitude.
struct signed8 {
  std::uint8_t bits;
};

// A pair of inputs of all kOuts outputs, in two registers.
inline void load_pairs(const bfloat16* from, __m512bh (&w)[2]) {
  w[0] = (__m512bh)_mm512_loadu_si512(from);
  w[1] = (__m512bh)_mm512_loadu_si512(from + kOuts);
}

#ifdef __AVX512VBMI__
// Both bytes of each magnitude's bfloat16, in which it is exact, come from tables of 128 that fill two registers each. The bytes are stored
// in the order that makes the interleaved halves of w[0] and w[1] what load_pairs gives for bfloat16: of each 16, 8 are for either.
struct Magnitudes {
  std::uint8_t low[128], high[128];
  constexpr Magnitudes() : low(), high() {
    for (int i = 1; i < 128; ++i) {
      int exponent = 0;
      while (i >> (exponent + 1)) ++exponent;
      const int bits = (127 + exponent) << 7 | (i << (7 - exponent) & 0x7f);
      low[i] = std::uint8_t(bits & 0xff), high[i] = std::uint8_t(bits >> 8);
    }
  }
};
alignas(64) constexpr Magnitudes kMagnitudes;

inline void load_pairs(const signed8* from, __m512bh (&w)[2]) {
  const __m512i values = _mm512_loadu_si512(from);  // a look-up ignores the sign bit
  const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(kMagnitudes.low), values, _mm512_load_si512(kMagnitudes.low + 64));
  const __m512i magnitude = _mm512_permutex2var_epi8(_mm512_load_si512(kMagnitudes.high), values, _mm512_load_si512(kMagnitudes.high + 64));
  const __m512i high = _mm512_ternarylogic_epi32(magnitude, values, _mm512_set1_epi8(char(0x80)), 0xf8);  // magnitude | (values & 0x80)
  w[0] = (__m512bh)_mm512_unpacklo_epi8(low, high);
  w[1] = (__m512bh)_mm512_unpackhi_epi8(low, high);
}
#endif

inline __m512bh pair(const bfloat16* from) {
  std::int32_t both;
  std::memcpy(&both, from, sizeof both);
  return (__m512bh)_mm512_set1_epi32(both);
}

// sums[m][o] += x[m] . w over ``count`` pairs. kSplit sums per row and output hide the latency of a product where there are few rows.
template <int kM, int kSplit, class Weight>
inline void multiply(const bfloat16* x, long x_stride, const Weight* w, long count, __m512 (&sums)[kM][2]) {
  __m512 split[kSplit][kM][2];
  for (int s = 0; s < kSplit; ++s)
    for (int m = 0; m < kM; ++m)
      for (int o = 0; o < 2; ++o) split[s][m][o] = s == 0 ? sums[m][o] : _mm512_setzero_ps();
  long p = 0;
  for (; p + kSplit <= count; p += kSplit) {
#pragma GCC unroll 4
    for (int s = 0; s < kSplit; ++s) {
      const Weight* at = w + (p + s) * kOuts * 2;
      __m512bh both_w[2];
      load_pairs(at, both_w);
#pragma GCC unroll 12
      for (int m = 0; m < kM; ++m) {
        const __m512bh both = pair(x + m * x_stride + (p + s) * 2);
        split[s][m][0] = _mm512_dpbf16_ps(split[s][m][0], both_w[0], both);
        split[s][m][1] = _mm512_dpbf16_ps(split[s][m][1], both_w[1], both);
      }
    }
  }
  for (; p < count; ++p) {
    __m512bh both_w[2];
    load_pairs(w + p * kOuts * 2, both_w);
#pragma GCC unroll 12
    for (int m = 0; m < kM; ++m) {
      const __m512bh both = pair(x + m * x_stride + p * 2);
      split[0][m][0] = _mm512_dpbf16_ps(split[0][m][0], both_w[0], both);
      split[0][m][1] = _mm512_dpbf16_ps(split[0][m][1], both_w[1], both);
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
