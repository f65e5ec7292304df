// x @ w.T in bfloat16 with float32 sums, for any number of rows; see products.h for the processors that have it. Weights are bfloat16, or
// int8 with a scale per output, widened where they are multiplied: half the bytes to read.
//
// Weights are packed once, in blocks of kOuts outputs, zeros past the last one. A block is read once from memory for all rows, in order.
#include <vector>

#include "products.h"

#ifdef __AVX512BF16__
namespace pdd {
namespace {

inline void put(float* to, __m512 sums, __mmask16 mask) { _mm512_mask_storeu_ps(to, mask, sums); }
inline void put(bfloat16* to, __m512 sums, __mmask16 mask) { _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(sums)); }

template <class Weight, class Out>
void rows_of_block(const bfloat16* x, const Weight* w, const float* scales, const float* bias, Out* out, long rows, long in, long outs,
                   long first) {
  const long width = outs - first < kOuts ? outs - first : kOuts;
  const __mmask16 masks[2] = {__mmask16(width >= 16 ? 0xffff : (1 << width) - 1), __mmask16(width <= 16 ? 0 : 0xffff >> (32 - width))};
  in_steps(rows, [&]<int kM, int kSplit>(long row) {
    __m512 sums[kM][2] = {};
    multiply<kM, kSplit>(x + row * in, in, w, in / 2, sums);
#pragma GCC unroll 12
    for (int m = 0; m < kM; ++m)
#pragma GCC unroll 2
      for (int o = 0; o < 2; ++o) {
        const long at = first + o * 16;
        __m512 sum = sums[m][o];
        if (scales != nullptr) sum = _mm512_mul_ps(sum, _mm512_maskz_loadu_ps(masks[o], scales + at));
        if (bias != nullptr) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(masks[o], bias + at));
        put(out + (row + m) * outs + at, sum, masks[o]);
      }
  });
}

template <class Weight, class Out>
void linear(const bfloat16* x, const Weight* packed, const float* scales, const float* bias, Out* out, long rows, long in, long outs) {
  const long blocks = (outs + kOuts - 1) / kOuts;
#pragma omp parallel for schedule(static)
  for (long b = 0; b < blocks; ++b) {
    const Weight* w = packed + b * in * kOuts;
    if (std::is_same_v<Weight, bfloat16> || rows <= kRows) {
      rows_of_block(x, w, scales, bias, out, rows, in, outs, b * kOuts);
    } else {  // widened once for all rows
      static thread_local std::vector<bfloat16> wide;
      wide.resize(in * kOuts);
      for (long i = 0; i < in * kOuts; i += 2 * kOuts) {
        __m512bh pairs[2];
        load_pairs(w + i, pairs);
        _mm512_storeu_si512(wide.data() + i, (__m512i)pairs[0]);
        _mm512_storeu_si512(wide.data() + i + kOuts, (__m512i)pairs[1]);
      }
      rows_of_block(x, wide.data(), scales, bias, out, rows, in, outs, b * kOuts);
    }
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

// Whether pdd_linear takes weights in int8.
int pdd_linear_has_int8() {
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
  return 1;
#else
  return 0;
#endif
}

#ifdef __AVX512BF16__
// x [rows, in] bfloat16, in even · packed [blocks, in / 2, kOuts, 2] bfloat16, or signed8 in the order of load_pairs with scales [outs]
// float32, else null · bias [outs] float32 or null -> out [rows, outs].
void pdd_linear(int out_format, const void* x, const void* packed, const float* scales, const float* bias, void* out, long rows, long in,
                long outs) {
  using namespace pdd;
  const auto run = [&](auto* to) {
    if (scales == nullptr) linear((const bfloat16*)x, (const bfloat16*)packed, scales, bias, to, rows, in, outs);
#ifdef __AVX512VBMI__
    else linear((const bfloat16*)x, (const signed8*)packed, scales, bias, to, rows, in, outs);
#endif
  };
  if (out_format == kFloat32) run((float*)out);
  else run((bfloat16*)out);
}
#endif
}
