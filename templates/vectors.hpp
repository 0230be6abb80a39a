// Typed vectors for the CPU kernels: W float32 lanes wide, chosen by what the compiler may use.
//
//   AVX-512 (F, BW, DQ, VL)   W = 16, with a bf16 dot product where the CPU has one (AVX512_BF16)
//   AVX2 + FMA + F16C         W = 8
//   NEON (AArch64)            W = 4, with a bf16 dot product where the CPU has one (BF16)
//   anything else             W = 4, by the compiler's own vector types: no intrinsics, any little-endian CPU
//
// A CPU with SVE runs the NEON code. SVE's width is a constant only under -msve-vector-bits, which makes a library
// that computes nonsense on a CPU of another width, and NEON loses nothing where the width is 128 bits (Neoverse N2,
// V2) or the units are shared (V1: two of 256 bits or four of 128).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define PAGEGEN_AVX512 1
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define PAGEGEN_AVX2 1
#elif defined(__aarch64__) && defined(__ARM_NEON)
#define PAGEGEN_NEON 1
#endif
#if defined(PAGEGEN_AVX512) && defined(__AVX512VNNI__)
#define PAGEGEN_VNNI 1
#endif
#if defined(PAGEGEN_AVX512) && defined(__AVX512BF16__)
#define PAGEGEN_BF16 1
#if defined(__AVX512VBMI__)
#define PAGEGEN_NARROW_BF16 1 // bytes become bf16 by tables
#endif
#endif
#if defined(PAGEGEN_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define PAGEGEN_NEON_BF16 1
#endif
#if defined(PAGEGEN_AVX512) || defined(PAGEGEN_AVX2)
#include <immintrin.h>
#elif defined(PAGEGEN_NEON)
#include <arm_neon.h>
#endif

namespace pagegen {
namespace {

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

#if defined(PAGEGEN_AVX512)
constexpr int W = 16;             // lanes of a vector
constexpr int kAccumulators = 24; // of 32 registers, so that operands and broadcasts fit beside them
constexpr int kPanelRows = 6, kPanelVectors = 4;
#elif defined(PAGEGEN_AVX2)
constexpr int W = 8;
constexpr int kAccumulators = 12; // of 16 registers
constexpr int kPanelRows = 6, kPanelVectors = 2;
#elif defined(PAGEGEN_NEON)
constexpr int W = 4;
constexpr int kAccumulators = 20; // of 32 registers
constexpr int kPanelRows = 5, kPanelVectors = 4;
#else
constexpr int W = 4;
constexpr int kAccumulators = 12; // of 16 registers, SSE2's
constexpr int kPanelRows = 4, kPanelVectors = 2;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
// g++ 12 turns a 32-byte memcpy under AVX2 into two 16-byte moves through the stack (8 times slower): load
// through types that may stand at any address instead.
typedef float vf_any __attribute__((vector_size(4 * W), aligned(1), may_alias));
typedef int32_t vi_any __attribute__((vector_size(4 * W), aligned(1), may_alias));
typedef uint16_t vh_any __attribute__((vector_size(2 * W), aligned(1), may_alias));

#define PAGEGEN_INLINE inline __attribute__((always_inline))

PAGEGEN_INLINE vf splat(float x) { return x - vf{}; }
PAGEGEN_INLINE vi splat(int32_t x) { return x - vi{}; }
PAGEGEN_INLINE vf as_float(vi x) { return (vf)x; }
PAGEGEN_INLINE vi as_int(vf x) { return (vi)x; }
PAGEGEN_INLINE vf select(vi mask, vf yes, vf no) { return mask ? yes : no; }
// the second operand comes back where either is NaN
PAGEGEN_INLINE vf larger(vf a, vf b) {
#if defined(PAGEGEN_AVX512)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(PAGEGEN_AVX2)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}
PAGEGEN_INLINE vf load(const float* p) { return *(const vf_any*)p; }
PAGEGEN_INLINE vi load(const int32_t* p) { return *(const vi_any*)p; }
PAGEGEN_INLINE void store(float* p, vf x) { *(vf_any*)p = x; }
PAGEGEN_INLINE void store(int32_t* p, vi x) { *(vi_any*)p = x; }

// ---- conversions of W elements --------------------------------------------------------------------------

PAGEGEN_INLINE vf load_float(const float* p) { return load(p); }

#if defined(PAGEGEN_AVX512)
PAGEGEN_INLINE vf load_float(const bf16* p) {
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
}
PAGEGEN_INLINE vf load_float(const fp16* p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
PAGEGEN_INLINE void store_float(fp16* p, vf x) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
}
PAGEGEN_INLINE vf fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#elif defined(PAGEGEN_AVX2)
PAGEGEN_INLINE vf load_float(const bf16* p) {
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
}
PAGEGEN_INLINE vf load_float(const fp16* p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
PAGEGEN_INLINE void store_float(fp16* p, vf x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
}
PAGEGEN_INLINE vf fma(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#elif defined(PAGEGEN_NEON)
PAGEGEN_INLINE vf load_float(const bf16* p) { return (vf)vshll_n_u16(vld1_u16(&p->bits), 16); }
PAGEGEN_INLINE vf load_float(const fp16* p) { return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits))); }
PAGEGEN_INLINE void store_float(fp16* p, vf x) {
  vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x)));
}
PAGEGEN_INLINE vf fma(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#else
// The first half of a and of b in turn, an instruction of most CPUs. Converting 4 or 8 bytes to a vector by
// __builtin_convertvector takes g++ 12 six instructions, and g++ 11 several for each element.
typedef uint8_t vb __attribute__((vector_size(16)));
typedef uint16_t vh __attribute__((vector_size(16)));
#if defined(__clang__)
PAGEGEN_INLINE vh in_turn(vh a, vh b) { return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
PAGEGEN_INLINE vb in_turn(vb a, vb b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
#else
PAGEGEN_INLINE vh in_turn(vh a, vh b) { return __builtin_shuffle(a, b, vh{0, 8, 1, 9, 2, 10, 3, 11}); }
PAGEGEN_INLINE vb in_turn(vb a, vb b) {
  return __builtin_shuffle(a, b, vb{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
}
#endif
PAGEGEN_INLINE vi load_halves(const void* p) { // four words of 16 bits, at the top of their lanes
  typedef uint64_t vq __attribute__((vector_size(16)));
  uint64_t four;
  std::memcpy(&four, p, 8);
  return (vi)in_turn(vh{}, (vh)vq{four, 0});
}
// Small floats at the top of their lanes, whose exponent is biased by BIAS and begins SHIFT bits too high. From SPECIAL
// on, as float32 has them, they are infinite or NaN. Without float32 subnormals, which a CPU may be set to take for 0.
template <int SHIFT, int BIAS, int32_t SPECIAL> PAGEGEN_INLINE vf widen_floats(vi x) {
  const vi size = (x & 0x7fffffff) >> SHIFT;
  const vf value = as_float(size + ((127 - BIAS) << 23)); // of a subnormal: (1 + f) 2^-BIAS for 2f 2^-BIAS
  const vf missing = as_float(as_int(value - 2.0f / (1 << BIAS)) & (size < (1 << 23)));
  return as_float(as_int(value + missing) | ((size >= SPECIAL) & 0x7f800000) | (x & (int32_t)0x80000000));
}
PAGEGEN_INLINE vf load_float(const bf16* p) { return as_float(load_halves(p)); }
PAGEGEN_INLINE vf load_float(const fp16* p) { return widen_floats<3, 15, 31 << 23>(load_halves(p)); }
inline uint16_t half_bits(float x) { // to nearest even
  uint32_t u;
  std::memcpy(&u, &x, 4);
  const uint16_t sign = (u >> 16) & 0x8000;
  u &= 0x7fffffff;
  if (u > 0x7f800000) return sign | 0x7e00;
  if (u >= 0x477ff000) return sign | 0x7c00; // 65520 and above round to infinity
  if (u < 0x38800000) {                      // below 2^-14: subnormal, in steps of 2^-24
    float magnitude;
    std::memcpy(&magnitude, &u, 4);
    return sign | (uint16_t)std::nearbyint(magnitude * 0x1p24f);
  }
  return sign | (uint16_t)((u - 0x38000000 + 0xfff + ((u >> 13) & 1)) >> 13);
}
PAGEGEN_INLINE void store_float(fp16* p, vf x) {
  for (int i = 0; i < W; i++) p[i].bits = half_bits(x[i]);
}
PAGEGEN_INLINE vf fma(vf a, vf b, vf c) { return a * b + c; }
#endif

PAGEGEN_INLINE void store_float(float* p, vf x) { store(p, x); }
PAGEGEN_INLINE void store_float(bf16* p, vf x) { // to nearest even; NaN stays NaN
#if defined(PAGEGEN_BF16)
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#elif defined(PAGEGEN_NEON_BF16)
  vst1_u16(&p->bits, vreinterpret_u16_bf16(vcvt_bf16_f32((float32x4_t)x)));
#else
  typedef uint32_t vu __attribute__((vector_size(4 * W)));
  const vu u = (vu)x;
  const vu rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  const vi bits = x == x ? (vi)rounded : splat((int32_t)0x7fc0);
  *(vh_any*)p = __builtin_convertvector(bits, vh_any);
#endif
}

// ---- across lanes ---------------------------------------------------------------------------------------

#if defined(PAGEGEN_AVX512)
PAGEGEN_INLINE float sum_lanes(vf x) { return _mm512_reduce_add_ps((__m512)x); }
PAGEGEN_INLINE float max_lanes(vf x) { return _mm512_reduce_max_ps((__m512)x); }

// lane i of the result: the sum of the lanes of a[i]
template <class V> PAGEGEN_INLINE V sum_each(const V* a) {
  const auto pairs = [](V x, V y) {
    return (V)_mm512_unpacklo_ps((__m512)x, (__m512)y) + (V)_mm512_unpackhi_ps((__m512)x, (__m512)y);
  };
  const auto quads = [](V x, V y) {
    return (V)_mm512_unpacklo_pd((__m512d)x, (__m512d)y) + (V)_mm512_unpackhi_pd((__m512d)x, (__m512d)y);
  };
  const auto halves = [](V x, V y) {
    return (V)_mm512_shuffle_f32x4((__m512)x, (__m512)y, 0x88) + (V)_mm512_shuffle_f32x4((__m512)x, (__m512)y, 0xdd);
  };
  V four[4];
  for (int i = 0; i < 4; i++) four[i] = quads(pairs(a[4 * i], a[4 * i + 1]), pairs(a[4 * i + 2], a[4 * i + 3]));
  return halves(halves(four[0], four[1]), halves(four[2], four[3]));
}

// out[i] lane j = in[j] lane i, W x W words
PAGEGEN_INLINE void transpose(const vi* in, int32_t* out, int64_t stride) {
  __m512i a[16], b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    a[2 * i] = _mm512_unpacklo_epi32((__m512i)in[2 * i], (__m512i)in[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_epi32((__m512i)in[2 * i], (__m512i)in[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
    b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) { // b[4 * g + i] holds words i, i + 4, i + 8, i + 12 of rows 4g .. 4g + 3
    const __m512i p = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88), q = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd);
    const __m512i r = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88);
    const __m512i s = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xdd);
    store(out + i * stride, (vi)_mm512_shuffle_i32x4(p, r, 0x88));
    store(out + (i + 4) * stride, (vi)_mm512_shuffle_i32x4(q, s, 0x88));
    store(out + (i + 8) * stride, (vi)_mm512_shuffle_i32x4(p, r, 0xdd));
    store(out + (i + 12) * stride, (vi)_mm512_shuffle_i32x4(q, s, 0xdd));
  }
}
#elif defined(PAGEGEN_NEON)
PAGEGEN_INLINE float sum_lanes(vf x) { return vaddvq_f32((float32x4_t)x); }
PAGEGEN_INLINE float max_lanes(vf x) { return vmaxnmvq_f32((float32x4_t)x); }
PAGEGEN_INLINE vf sum_each(const vf* a) {
  const auto pairs = [](vf x, vf y) { return vpaddq_f32((float32x4_t)x, (float32x4_t)y); };
  return (vf)vpaddq_f32(pairs(a[0], a[1]), pairs(a[2], a[3]));
}
#else
PAGEGEN_INLINE float sum_lanes(vf x) {
  float sum = x[0];
  for (int i = 1; i < W; i++) sum += x[i];
  return sum;
}
PAGEGEN_INLINE float max_lanes(vf x) {
  float top = x[0];
  for (int i = 1; i < W; i++) top = x[i] > top ? x[i] : top;
  return top;
}
#if defined(PAGEGEN_AVX2)
PAGEGEN_INLINE vf sum_each(const vf* a) {
  const auto add = [](vf x, vf y) { return _mm256_hadd_ps((__m256)x, (__m256)y); };
  const __m256 low = _mm256_hadd_ps(add(a[0], a[1]), add(a[2], a[3]));
  const __m256 high = _mm256_hadd_ps(add(a[4], a[5]), add(a[6], a[7]));
  return (vf)_mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}
PAGEGEN_INLINE void transpose(const vi* in, int32_t* out, int64_t stride) {
  __m256i a[8], b[8];
  for (int i = 0; i < 4; i++) {
    a[2 * i] = _mm256_unpacklo_epi32((__m256i)in[2 * i], (__m256i)in[2 * i + 1]);
    a[2 * i + 1] = _mm256_unpackhi_epi32((__m256i)in[2 * i], (__m256i)in[2 * i + 1]);
  }
  for (int i = 0; i < 2; i++) {
    b[4 * i] = _mm256_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 1] = _mm256_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 2] = _mm256_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
    b[4 * i + 3] = _mm256_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    store(out + i * stride, (vi)_mm256_permute2x128_si256(b[i], b[4 + i], 0x20));
    store(out + (i + 4) * stride, (vi)_mm256_permute2x128_si256(b[i], b[4 + i], 0x31));
  }
}
#else
PAGEGEN_INLINE vf sum_each(const vf* a) {
  const auto pairs = [](vf x, vf y) { return vf{x[0], y[0], x[1], y[1]} + vf{x[2], y[2], x[3], y[3]}; };
  const vf low = pairs(a[0], a[1]), high = pairs(a[2], a[3]);
  return vf{low[0], low[1], high[0], high[1]} + vf{low[2], low[3], high[2], high[3]};
}
#endif
#endif

#if !defined(PAGEGEN_AVX512) && !defined(PAGEGEN_AVX2)
PAGEGEN_INLINE void transpose(const vi* in, int32_t* out, int64_t stride) {
  const auto low = [](vi x, vi y) { return vi{x[0], y[0], x[1], y[1]}; };
  const auto high = [](vi x, vi y) { return vi{x[2], y[2], x[3], y[3]}; };
  const vi a = low(in[0], in[2]), b = low(in[1], in[3]), c = high(in[0], in[2]), d = high(in[1], in[3]);
  store(out, low(a, b));
  store(out + stride, high(a, b));
  store(out + 2 * stride, low(c, d));
  store(out + 3 * stride, high(c, d));
}
#endif

} // namespace
} // namespace pagegen
