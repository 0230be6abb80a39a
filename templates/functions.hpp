// Functions of vectors that the C++ library has for single numbers only.
#pragma once

#include "vectors.hpp"

namespace pagegen {
namespace {

// 2^x to 2e-7 relative, exactly 1 at 0; below -126 it stays at 2^-126. NaN stays NaN.
PAGEGEN_INLINE vf exp2(vf x) {
  x = larger(splat(-126.0f), x);
#if defined(PAGEGEN_AVX512)
  const vf n = (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(PAGEGEN_NEON)
  const vf n = (vf)vrndnq_f32((float32x4_t)x);
#else
  const vf magic = splat(0x1.8p23f); // adding it leaves the nearest integer in the low bits
  const vf n = (x + magic) - magic;
#endif
  const vf f = x - n;
  // Chebyshev interpolation of (2^f - 1) / f on [-1/2, 1/2]
  vf p = splat(0.0013381302537f);
  p = fma(p, f, splat(0.0096663685154f));
  p = fma(p, f, splat(0.0555038101380f));
  p = fma(p, f, splat(0.2402234903802f));
  p = fma(p, f, splat(0.6931471805599f));
  p = fma(p, f, splat(1.0f));
#if defined(PAGEGEN_AVX512)
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  return p * as_float((__builtin_convertvector(n, vi) + 127) << 23);
#endif
}

PAGEGEN_INLINE float exp2(float x) { return exp2(splat(x))[0]; }

// tanh to 3e-7 relative; +-1 for any large argument, infinities included
PAGEGEN_INLINE vf tanh(vf x) {
  const vf size = as_float(as_int(x) & 0x7fffffff);
  const vf z = x * x;
  // Chebyshev interpolation of (tanh(x) / x - 1) / x^2 on x^2 in [0, 0.4]
  vf p = splat(-0.0060451650968f);
  p = fma(p, z, splat(0.0209613291091f));
  p = fma(p, z, splat(-0.0538432631738f));
  p = fma(p, z, splat(0.1333271884559f));
  p = fma(p, z, splat(-0.3333332843332f));
  const vf near = fma(x * z, p, x);
  // 1 - 2 / (e^2x + 1), where e^2x = 2^(2.885... x); beyond 10 it is 1 in float32
  const vf capped = size > 10.0f ? splat(10.0f) : size;
  const vf far = 1.0f - 2.0f / (exp2(capped * 2.8853900817779268f) + 1.0f);
  const vf signed_far = as_float(as_int(far) | (as_int(x) & (int32_t)0x80000000));
  return select(size < 0.6f, near, signed_far);
}

} // namespace
} // namespace pagegen
