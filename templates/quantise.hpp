// What a cache stores of W values at a time, and rows of it.
#pragma once

#include "vectors.hpp"

namespace pagegen {
namespace {

typedef uint8_t vb_any __attribute__((vector_size(W), aligned(1), may_alias));
typedef uint8_t vn_any __attribute__((vector_size(W / 2), aligned(1), may_alias));
typedef int64_t vq __attribute__((vector_size(4 * W)));

struct e4m3 { uint8_t bits; };
struct e5m2 { uint8_t bits; };
struct int4x2 { uint8_t bits; };

template <class To> constexpr bool kPacked = std::is_same_v<To, int4x2>;
template <class To> constexpr bool kInteger = kPacked<To> || std::is_same_v<To, int8_t>;

// ---- W float32 values as what a cache stores ------------------------------------------------------------

PAGEGEN_INLINE vi lesser(vi a, vi b) {
#if defined(PAGEGEN_AVX512)
  return (vi)_mm512_min_epi32((__m512i)a, (__m512i)b);
#elif defined(PAGEGEN_AVX2)
  return (vi)_mm256_min_epi32((__m256i)a, (__m256i)b);
#else
  return a < b ? a : b;
#endif
}
PAGEGEN_INLINE vi greater(vi a, vi b) {
#if defined(PAGEGEN_AVX512)
  return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif defined(PAGEGEN_AVX2)
  return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
  return a > b ? a : b;
#endif
}

// float8 of `kept` bits of mantissa and an exponent biased by `bias`, at most `largest`, in a lane's lowest 8 bits.
// Adding a power of two so large that the sum's last place is that of the float8 rounds to nearest even, and leaves the
// mantissa in the low bits, to which the exponent is added; subnormals are steps from 0. The power's own low bits hold
// what turns one bias into the other. No intermediate is a subnormal: any mode of the CPU will do.
template <int kept, int bias> PAGEGEN_INLINE vi float8_bits(vf x, float largest) {
  constexpr int dropped = 23 - kept, rebias = -(128 - bias) * (1 << kept) & 0xff;
  constexpr float power = (1 << dropped) + (float)rebias / (1 << kept);
  const vi size = as_int(x) & 0x7fffffff;
  const vi limited = lesser(size, as_int(splat(largest))); // of infinities and NaN too
  const vi exponent = greater(limited & 0x7f800000, splat((128 - bias) << 23));
  const vi sum = as_int(fma(as_float(exponent), splat(power), as_float(limited)));
  const vi code = sum + (exponent >> dropped);
  return (x == x ? code : splat(0x7f)) | ((as_int(x) >> 24) & 0x80);
}
PAGEGEN_INLINE void store_cache(e4m3* p, vf x) {
  *(vb_any*)p = __builtin_convertvector(float8_bits<3, 7>(x, 448.0f), vb_any);
}
PAGEGEN_INLINE void store_cache(e5m2* p, vf x) {
  *(vb_any*)p = __builtin_convertvector(float8_bits<2, 15>(x, 57344.0f), vb_any);
}

// to nearest even within low .. high; NaN is 0
PAGEGEN_INLINE vi integers(vf x, float low, float high) {
#if defined(PAGEGEN_AVX512)
  const __m512 limited = _mm512_min_ps(_mm512_max_ps((__m512)x, _mm512_set1_ps(low)), _mm512_set1_ps(high));
  return (vi)_mm512_maskz_cvtps_epi32(_mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_ORD_Q), limited);
#else
  const vf above = x > splat(low) ? x : splat(low);
  const vf limited = above < splat(high) ? above : splat(high);
  constexpr float shift = 12582912.0f; // 1.5 * 2^23: its last place is 1
  const vi rounded = as_int(limited + shift) - as_int(splat(shift));
  return x == x ? rounded : splat(0);
#endif
}

PAGEGEN_INLINE void store_cache(float* p, vf x) { store_float(p, x); }
PAGEGEN_INLINE void store_cache(fp16* p, vf x) { store_float(p, x); }
PAGEGEN_INLINE void store_cache(bf16* p, vf x) { store_float(p, x); }
PAGEGEN_INLINE void store_cache(int8_t* p, vf x) {
  *(vb_any*)p = __builtin_convertvector(integers(x, -128.0f, 127.0f), vb_any);
}
PAGEGEN_INLINE void store_cache(int4x2* p, vf x) { // the lower half of 64 bits holds the even value
  const vq pair = (vq)(integers(x, -8.0f, 7.0f) & 0xf);
  *(vn_any*)p = __builtin_convertvector(pair | (pair >> 28), vn_any);
}

// ---- rows -----------------------------------------------------------------------------------------------

// Rows of one token, K's or V's: those of some heads. Strides in elements, of a packed cache in bytes.
struct Rows {
  const void* from;
  void* to;
  const float* scale;
  const float* zero;
  int64_t from_stride, to_stride, scale_stride, zero_stride;
  int64_t count, dim;
};

// A scale alone is added -0, a zero point alone divides by 1: neither changes a bit of any value.
template <class From, class To, bool SCALED> void store_rows(const Rows& r) {
  constexpr int packed = kPacked<To> ? 2 : 1;
  for (int64_t h = 0; h < r.count; h++) {
    const From* from = (const From*)r.from + h * r.from_stride;
    To* to = (To*)r.to + h * r.to_stride;
    const vf divisor = splat(r.scale ? r.scale[h * r.scale_stride] : 1.0f);
    const vf zero = splat(kInteger<To> && r.zero ? r.zero[h * r.zero_stride] : -0.0f);
    const auto quantised = [&](vf x) {
      if constexpr (SCALED) x = x / divisor;
      return SCALED && kInteger<To> ? x + zero : x;
    };
    int64_t i = 0;
    for (; i + W <= r.dim; i += W) store_cache(to + i / packed, quantised(load_float(from + i)));
    if (i == r.dim) continue;
    alignas(64) From rest[W] = {};
    alignas(64) To converted[W];
    std::memcpy((void*)rest, from + i, (r.dim - i) * sizeof(From));
    store_cache(converted, quantised(load_float(rest)));
    std::memcpy((void*)(to + i / packed), converted, (r.dim - i) / packed * sizeof(To));
  }
}

using RowWriter = void (*)(const Rows&);
template <class From, bool SCALED>
constexpr RowWriter kRowWritersFrom[7] = {
    store_rows<From, float, SCALED>, store_rows<From, fp16, SCALED>,   store_rows<From, bf16, SCALED>,
    store_rows<From, e4m3, SCALED>,  store_rows<From, e5m2, SCALED>,   store_rows<From, int8_t, SCALED>,
    store_rows<From, int4x2, SCALED>};
constexpr const RowWriter* kRowWriters[3][2] = {{kRowWritersFrom<float, false>, kRowWritersFrom<float, true>},
                                                {kRowWritersFrom<fp16, false>, kRowWritersFrom<fp16, true>},
                                                {kRowWritersFrom<bf16, false>, kRowWritersFrom<bf16, true>}};

constexpr int64_t kInt4 = 6;
constexpr int64_t kBytes[7] = {4, 2, 2, 1, 1, 1, 1}; // of an element by the code of its type

} // namespace
} // namespace pagegen
