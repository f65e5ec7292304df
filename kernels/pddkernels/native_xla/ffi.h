// What XLA hands to kernels, as they take it.
#pragma once

#include "numbers.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace pdd {

// Calls with(pages in their format).
template <class With>
ffi::Error with_pages(const ffi::AnyBuffer& pages, With with) {
  if (pages.element_type() == ffi::F32) with((const float*)pages.untyped_data());
  else if (pages.element_type() == ffi::U16) with((const bfloat16*)pages.untyped_data());
  else return ffi::Error::InvalidArgument("pages must be float32, or bfloat16 as uint16");
  return ffi::Error::Success();
}

// An array of no elements stands for none.
inline const float* optional(const ffi::Buffer<ffi::F32>& values) { return values.element_count() == 0 ? nullptr : values.typed_data(); }

}  // namespace pdd
