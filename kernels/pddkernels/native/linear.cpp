// x @ w.T in bfloat16 with float32 sums, for any number of rows; see products.h for the processors that have it.
//
// Weights are packed once, in blocks of kOuts outputs, zeros past the last one. A block is read once from memory for all rows, in order.
#include "products.h"

#ifdef __AVX512BF16__
namespace pdd {
namespace {

inline void put(float* to, __m512 sums, __mmask16 mask) { _mm512_mask_storeu_ps(to, mask, sums); }
inline void put(bfloat16* to, __m512 sums, __mmask16 mask) { _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(sums)); }

template <class Out>
void linear(const bfloat16* x, const bfloat16* packed, const float* bias, Out* out, long rows, long in, long outs) {
  const long blocks = (outs + kOuts - 1) / kOuts;
#pragma omp parallel for schedule(static)
  for (long b = 0; b < blocks; ++b) {
    const long first = b * kOuts, width = outs - first < kOuts ? outs - first : kOuts;
    const __mmask16 masks[2] = {__mmask16(width >= 16 ? 0xffff : (1 << width) - 1),
                                __mmask16(width <= 16 ? 0 : 0xffff >> (32 - width))};
    in_steps(rows, [&]<int kM, int kSplit>(long row) {
      __m512 sums[kM][2];
#pragma GCC unroll 12
      for (int m = 0; m < kM; ++m)
#pragma GCC unroll 2
        for (int o = 0; o < 2; ++o)
          sums[m][o] = bias == nullptr ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(masks[o], bias + first + o * 16);
      multiply<kM, kSplit>(x + row * in, in, packed + b * in * kOuts, in / 2, sums);
#pragma GCC unroll 12
      for (int m = 0; m < kM; ++m)
#pragma GCC unroll 2
        for (int o = 0; o < 2; ++o) put(out + (row + m) * outs + first + o * 16, sums[m][o], masks[o]);
    });
  }
}

}  // namespace
}  // namespace pdd
#endif

extern "C" {

// Outputs per block of packed weights; 0: this processor has no such products, and neither pdd_linear nor pdd_attend_chunk may be called.
long pdd_linear_block() {
#ifdef __AVX512BF16__
  return pdd::kOuts;
#else
  return 0;
#endif
}

#ifdef __AVX512BF16__
// x [rows, in] bfloat16, in even · packed [blocks, in / 2, kOuts, 2] bfloat16 · bias [outs] float32 or null -> out [rows, outs].
void pdd_linear(int out_format, const void* x, const void* packed, const float* bias, void* out, long rows, long in, long outs) {
  using namespace pdd;
  if (out_format == kFloat32) linear((const bfloat16*)x, (const bfloat16*)packed, bias, (float*)out, rows, in, outs);
  else linear((const bfloat16*)x, (const bfloat16*)packed, bias, (bfloat16*)out, rows, in, outs);
}
#endif
}
