// What stands between a layer's matrix products, one pass over memory each: norms with the residual sum, rotary embedding, activations.
// Arithmetic is float32 whatever the format of what is read or written.
#include "numbers.h"

namespace pdd {
namespace {

template <class T>
float scale_of_norm(const T* x, long n, float eps) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (long i = 0; i < n; ++i) sum += widen(x[i]) * widen(x[i]);
  return 1.0f / std::sqrt(sum / float(n) + eps);
}

template <class T>
void add_norm(float* hidden, const T* added, const float* post_weight, const float* weight, float eps, T* out, long rows, long n) {
#pragma omp parallel for schedule(static) if (rows * n > kParallelValues)
  for (long row = 0; row < rows; ++row) {
    float* h = hidden + row * n;
    if (added != nullptr) {
      const T* a = added + row * n;
      if (post_weight == nullptr) {
        for (long i = 0; i < n; ++i) h[i] += widen(a[i]);
      } else {
        const float scale = scale_of_norm(a, n, eps);
        for (long i = 0; i < n; ++i) h[i] += widen(a[i]) * scale * post_weight[i];
      }
    }
    const float scale = scale_of_norm(h, n, eps);
    T* o = out + row * n;
    for (long i = 0; i < n; ++i) o[i] = narrow<T>(h[i] * scale * weight[i]);
  }
}

// Sigmoid(g) * g, or GELU in its tanh form, g * sigmoid(2 k): both times up.
template <bool kGelu, class T>
void activate(const T* gate_up, T* out, long rows, long n) {
#pragma omp parallel for schedule(static) if (rows * n > kParallelValues)
  for (long row = 0; row < rows; ++row) {
    const T* gate = gate_up + row * 2 * n;
    const T* up = gate + n;
    T* o = out + row * n;
#pragma omp simd
    for (long i = 0; i < n; ++i) {
      const float g = widen(gate[i]);
      const float inner = kGelu ? 1.5957691216f * (g + 0.044715f * g * g * g) : g;
      o[i] = narrow<T>(g / (1.0f + exponential(-inner)) * widen(up[i]));
    }
  }
}

template <class T>
void rotate(const T* qkv, const float* cos, const float* sin, const float* norm, float eps, T* queries, float* keys, long tokens, long heads,
            long kv_heads, long dim) {
  const long half = dim / 2;
#pragma omp parallel for schedule(static) if (tokens * (heads + kv_heads) * dim > kParallelValues)
  for (long token = 0; token < tokens; ++token) {
    const float *c = cos + token * dim, *s = sin + token * dim;
    for (long head = 0; head < heads + kv_heads; ++head) {
      const T* x = qkv + (token * (heads + 2 * kv_heads) + head) * dim;
      float turned[kMaxHeadDim];
      for (long i = 0; i < dim; ++i) turned[i] = widen(x[i]);
      if (norm != nullptr) {
        const float scale = scale_of_norm(turned, dim, eps);
        for (long i = 0; i < dim; ++i) turned[i] *= scale * norm[head * dim + i];
      }
      const auto turn = [&](auto* to) {
        using To = std::remove_reference_t<decltype(*to)>;
        for (long i = 0; i < half; ++i) to[i] = narrow<To>(turned[i] * c[i] + turned[i + half] * s[i]);
        for (long i = half; i < dim; ++i) to[i] = narrow<To>(turned[i] * c[i] + turned[i - half] * s[i]);
      };
      if (head < heads) {
        turn(queries + (token * heads + head) * dim);
      } else {
        turn(keys + (token * kv_heads + head - heads) * dim);
      }
    }
  }
}

}  // namespace
}  // namespace pdd

using namespace pdd;

extern "C" {

// hidden [rows, n] float32 += added, normed with post_weight where that is given; out = RMSNorm(hidden) * weight. added, post_weight: or null.
void pdd_add_norm(int format, float* hidden, const void* added, const float* post_weight, const float* weight, float eps, void* out, long rows,
                  long n) {
  if (format == kFloat32) {
    add_norm(hidden, (const float*)added, post_weight, weight, eps, (float*)out, rows, n);
  } else {
    add_norm(hidden, (const bfloat16*)added, post_weight, weight, eps, (bfloat16*)out, rows, n);
  }
}

// gate_up [rows, 2 n], gate first -> out [rows, n].
void pdd_activate(int format, int gelu, const void* gate_up, void* out, long rows, long n) {
  if (format == kFloat32) {
    (gelu ? activate<true, float> : activate<false, float>)((const float*)gate_up, (float*)out, rows, n);
  } else {
    (gelu ? activate<true, bfloat16> : activate<false, bfloat16>)((const bfloat16*)gate_up, (bfloat16*)out, rows, n);
  }
}

// qkv [tokens, heads + 2 kv_heads, dim]; cos, sin [tokens, dim], the first half of sin negated; norm [heads + kv_heads, dim] or null ->
// queries [tokens, heads, dim] in the format of qkv, keys [tokens, kv_heads, dim] float32.
void pdd_rotate(int format, const void* qkv, const float* cos, const float* sin, const float* norm, float eps, void* queries, float* keys,
                long tokens, long heads, long kv_heads, long dim) {
  if (format == kFloat32) {
    rotate((const float*)qkv, cos, sin, norm, eps, (float*)queries, keys, tokens, heads, kv_heads, dim);
  } else {
    rotate((const bfloat16*)qkv, cos, sin, norm, eps, (bfloat16*)queries, keys, tokens, heads, kv_heads, dim);
  }
}
}
