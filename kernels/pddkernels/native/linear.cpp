// x @ w.T in bfloat16 with float32 sums, for processors with dot products of bfloat16 pairs (AVX-512 BF16), any number of rows.
//
// Weights are packed once: blocks of kOuts outputs, in each of which a pair of inputs of all outputs is contiguous, zeros past the last one.
// A block is read once from memory for all rows, in order; up to kRows rows of sums stay in registers.
#include "numbers.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace pdd {
namespace {

constexpr long kOuts = 32;
constexpr long kRows = 12;

#ifdef __AVX512BF16__
inline __m512bh pairs(const bfloat16* from) { return (__m512bh)_mm512_loadu_si512(from); }
inline __m512bh pair(const bfloat16* from) {
  std::int32_t both;
  std::memcpy(&both, from, sizeof both);
  return (__m512bh)_mm512_set1_epi32(both);
}

inline void put(float* to, __m512 sums, __mmask16 mask) { _mm512_mask_storeu_ps(to, mask, sums); }
inline void put(bfloat16* to, __m512 sums, __mmask16 mask) { _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(sums)); }

// One block of outputs for kM rows. kSplit sums per row and output hide the latency of a product where there are few rows.
template <int kM, int kSplit, class Out>
void block(const bfloat16* x, long x_stride, const bfloat16* w, long pairs_in, const float* bias, Out* out, long out_stride, long outs) {
  __m512 sums[kSplit][kM][2];
  for (int s = 0; s < kSplit; ++s)
    for (int m = 0; m < kM; ++m)
      for (int o = 0; o < 2; ++o) sums[s][m][o] = _mm512_setzero_ps();
  long p = 0;
  for (; p + kSplit <= pairs_in; p += kSplit) {
#pragma GCC unroll 4
    for (int s = 0; s < kSplit; ++s) {
      const bfloat16* at = w + (p + s) * kOuts * 2;
      if (kM <= 2) _mm_prefetch((const char*)(at + 48 * kOuts), _MM_HINT_T0), _mm_prefetch((const char*)(at + 49 * kOuts), _MM_HINT_T0);
      const __m512bh w0 = pairs(at), w1 = pairs(at + kOuts);
#pragma GCC unroll 12
      for (int m = 0; m < kM; ++m) {
        const __m512bh both = pair(x + m * x_stride + (p + s) * 2);
        sums[s][m][0] = _mm512_dpbf16_ps(sums[s][m][0], w0, both);
        sums[s][m][1] = _mm512_dpbf16_ps(sums[s][m][1], w1, both);
      }
    }
  }
  for (; p < pairs_in; ++p) {
    const __m512bh w0 = pairs(w + p * kOuts * 2), w1 = pairs(w + p * kOuts * 2 + kOuts);
#pragma GCC unroll 12
    for (int m = 0; m < kM; ++m) {
      const __m512bh both = pair(x + m * x_stride + p * 2);
      sums[0][m][0] = _mm512_dpbf16_ps(sums[0][m][0], w0, both);
      sums[0][m][1] = _mm512_dpbf16_ps(sums[0][m][1], w1, both);
    }
  }
  const __mmask16 masks[2] = {__mmask16(outs >= 16 ? 0xffff : (1 << outs) - 1),
                              __mmask16(outs >= 32 ? 0xffff : outs <= 16 ? 0 : (1 << (outs - 16)) - 1)};
#pragma GCC unroll 12
  for (int m = 0; m < kM; ++m)
#pragma GCC unroll 2
    for (int o = 0; o < 2; ++o) {
      __m512 sum = sums[0][m][o];
      for (int s = 1; s < kSplit; ++s) sum = _mm512_add_ps(sum, sums[s][m][o]);
      if (bias != nullptr) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(masks[o], bias + o * 16));
      put(out + m * out_stride + o * 16, sum, masks[o]);
    }
}

template <class Out>
void linear(const bfloat16* x, const bfloat16* packed, const float* bias, Out* out, long rows, long in, long outs) {
  const long pairs_in = in / 2, blocks = (outs + kOuts - 1) / kOuts;
#pragma omp parallel for schedule(static)
  for (long b = 0; b < blocks; ++b) {
    const bfloat16* w = packed + b * in * kOuts;
    const float* bias_of_block = bias == nullptr ? nullptr : bias + b * kOuts;
    const long width = outs - b * kOuts < kOuts ? outs - b * kOuts : kOuts;
    for (long row = 0; row < rows;) {
      const bfloat16* from = x + row * in;
      Out* to = out + row * outs + b * kOuts;
      // Equal steps: 16 rows are two of eight, not one of twelve and one of four.
      const long left = rows - row, steps = (left + kRows - 1) / kRows, step = (left + steps - 1) / steps;
#define PDD_ROWS(m, split) \
  case m: block<m, split>(from, in, w, pairs_in, bias_of_block, to, outs, width); break;
      switch (step) {
        PDD_ROWS(1, 4) PDD_ROWS(2, 2) PDD_ROWS(3, 2) PDD_ROWS(4, 1) PDD_ROWS(5, 1) PDD_ROWS(6, 1)
        PDD_ROWS(7, 1) PDD_ROWS(8, 1) PDD_ROWS(9, 1) PDD_ROWS(10, 1) PDD_ROWS(11, 1) PDD_ROWS(12, 1)
      }
#undef PDD_ROWS
      row += step;
    }
  }
}
#endif

}  // namespace
}  // namespace pdd

using namespace pdd;

extern "C" {

// Outputs per block of packed weights; 0: this processor has no such products, and nothing below may be called.
long pdd_linear_block() {
#ifdef __AVX512BF16__
  return kOuts;
#else
  return 0;
#endif
}

// x [rows, in] bfloat16, in even · packed [blocks, in / 2, kOuts, 2] bfloat16 · bias [outs] float32 or null -> out [rows, outs].
void pdd_linear(int out_format, const void* x, const void* packed, const float* bias, void* out, long rows, long in, long outs) {
#ifdef __AVX512BF16__
  if (out_format == kFloat32) linear((const bfloat16*)x, (const bfloat16*)packed, bias, (float*)out, rows, in, outs);
  else linear((const bfloat16*)x, (const bfloat16*)packed, bias, (bfloat16*)out, rows, in, outs);
#else
  (void)out_format, (void)x, (void)packed, (void)bias, (void)out, (void)rows, (void)in, (void)outs;
#endif
}
}
