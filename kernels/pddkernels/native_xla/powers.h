// Powers of two, a vector at a time.
#pragma once

#include "numbers.h"

namespace pdd {

constexpr float kLog2E = 1.44269504f;

// 2^x for x <= 127 to 2 units in the last place (a minimax polynomial for [-1/2, 1/2]); 2^-126 for anything below -126. NaN stays NaN.
inline floats exponential2(floats x) {
  constexpr float kToInteger = 12582912.0f;  // added to a float it leaves no fraction, and the integer in the lowest bits
  x = x < -126.0f ? floats{} - 126.0f : x;
  const floats shifted = x + kToInteger, r = x - (shifted - kToInteger);
  floats p = r * 1.32764655e-3f + 9.67554128e-3f;
  p = p * r + 5.55071329e-2f;
  p = p * r + 2.40221197e-1f;
  p = p * r + 6.93146967e-1f;
  p = p * r + 1.00000007f;
  return (floats)((words)p + ((words)shifted << 23));
}

}  // namespace pdd
