// Floats as integers of 16 bits in two planes of bytes, for products of bytes (bytes.hpp).
#pragma once

#include "vectors.hpp"

#include <algorithm>
#include <bit>

namespace pagegen {
namespace {

#if defined(PAGEGEN_VNNI)
constexpr int kMost = 127 * 256; // of what has two planes: the high byte is signed, and rounds up

struct Planes {
  float unit;    // what an integer is worth; NaN where a float is not finite
  int32_t total; // of the integers
  float small;   // the mean magnitude of the small ones, over the largest; 1 where there are none
};
// Small are those other than 0 that are at most 1/`tower` of the largest.
inline __attribute__((noinline)) Planes to_planes(const float* x, int begin, int end, float tower, int8_t* high,
                                                  int8_t* low) {
  vi top = vi{}; // magnitudes compare as integers, infinity and NaN are the largest
  for (int i = begin; i < end; i += W) {
    const vi size = as_int(load(x + i)) & 0x7fffffff;
    top = (vi)_mm512_max_epi32((__m512i)top, (__m512i)size);
  }
  const float most = std::bit_cast<float>(_mm512_reduce_max_epi32((__m512i)top));
  const bool usable = most > 0.0f && most < INFINITY;
  const float up = usable ? std::min(kMost / most, 0x1p126f) : 0.0f;
  const __m512 limit = _mm512_set1_ps(most / tower);
  vi sum = vi{};
  __m512 sizes = _mm512_setzero_ps();
  int count = 0;
  for (int i = begin; i < end; i += W) {
    const vf loaded = load(x + i);
    const vi whole = (vi)_mm512_cvtps_epi32((__m512)(loaded * up)), upper = (whole + 128) >> 8;
    _mm_store_si128((__m128i*)(high + i), _mm512_cvtepi32_epi8((__m512i)upper));
    _mm_store_si128((__m128i*)(low + i), _mm512_cvtepi32_epi8((__m512i)whole)); // less 256 times the upper one
    sum += whole;
    const __m512 size = _mm512_abs_ps((__m512)loaded);
    const __mmask16 some = _mm512_test_epi32_mask((__m512i)size, (__m512i)size);
    const __mmask16 small = _mm512_mask_cmp_ps_mask(some, size, limit, _CMP_LE_OQ);
    sizes = _mm512_mask_add_ps(sizes, small, sizes, size);
    count += __builtin_popcount(small);
  }
  const float unit = !(most < INFINITY) ? __builtin_nanf("") : usable ? std::max(most / kMost, 0x1p-126f) : 0.0f;
  const float small = usable && count > 0 ? sum_lanes((vf)sizes) / (count * most) : 1.0f;
  return {unit, _mm512_reduce_add_epi32((__m512i)sum), small};
}
// what W integers are worth
PAGEGEN_INLINE vf from_planes(const int8_t* high, const int8_t* low, float unit) {
  const vi upper = (vi)_mm512_cvtepi8_epi32(_mm_load_si128((const __m128i*)high));
  const vi lower = (vi)_mm512_cvtepi8_epi32(_mm_load_si128((const __m128i*)low));
  return __builtin_convertvector(upper * 256 + lower, vf) * unit;
}
inline __attribute__((noinline)) void subtract_planes(float* x, int begin, int end, const int8_t* high,
                                                      const int8_t* low, float unit) {
  for (int i = begin; i < end; i += W) store(x + i, load(x + i) - from_planes(high + i, low + i, unit));
}
#endif

} // namespace
} // namespace pagegen
