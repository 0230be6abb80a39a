// Elements of quantised caches, and their conversion: exact, to float32 and, with AVX512_BF16 and
// AVX512_VBMI, to bf16.
//
//   e4m3, e5m2   8-bit floats (OCP FP8); e4m3 has no infinity, both have NaN and subnormals
//   s8           int8
//   s4x2         two int4 a byte, the low nibble first: a pointer to it moves two elements a step
#pragma once

#include "vectors.hpp"

#include <bit>

namespace pagegen {
namespace {

struct e4m3 { uint8_t bits; };
struct e5m2 { uint8_t bits; };
struct s8 { int8_t bits; };
struct s4x2 { uint8_t bits; };

template <class T> constexpr int kPack = 1; // elements in a T
template <> constexpr int kPack<s4x2> = 2;

// a float of 8 bits with `mantissa` bits of significand and an exponent biased by `bias`; all ones is NaN
constexpr float small_float(int bits, int mantissa, int bias) {
  const int magnitude = bits & 0x7f, exponent = magnitude >> mantissa, fraction = magnitude & ((1 << mantissa) - 1);
  if (mantissa == 3 && magnitude == 0x7f) return __builtin_nanf("");
  if (mantissa == 2 && exponent == 31 && fraction) return __builtin_nanf("");
  float value = exponent ? fraction + (1 << mantissa) : fraction;
  if (mantissa == 2 && exponent == 31) value = __builtin_inff();
  for (int e = (exponent ? exponent : 1) - bias - mantissa; e > 0; e--) value *= 2.0f;
  for (int e = (exponent ? exponent : 1) - bias - mantissa; e < 0; e++) value *= 0.5f;
  return bits & 0x80 ? -value : value;
}

#if defined(PAGEGEN_AVX512) || defined(PAGEGEN_AVX2) || defined(PAGEGEN_NEON)
#if defined(PAGEGEN_AVX512)
typedef __m256i halves;
PAGEGEN_INLINE halves shift_left(halves x, int by) { return _mm256_slli_epi16(x, by); }
PAGEGEN_INLINE halves widen(const uint8_t* p) { return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)); }
PAGEGEN_INLINE halves widen_signed(const uint8_t* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
}
PAGEGEN_INLINE halves splat_halves(int x) { return _mm256_set1_epi16((short)x); }
PAGEGEN_INLINE halves equal(halves a, halves b) { return _mm256_cmpeq_epi16(a, b); }
PAGEGEN_INLINE vf from_half(halves x) { return (vf)_mm512_cvtph_ps(x); }
PAGEGEN_INLINE vf from_signed_bytes(__m128i x) { return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x)); }
PAGEGEN_INLINE __m128i bytes(const void* p) { return _mm_loadu_si128((const __m128i*)p); }
PAGEGEN_INLINE __m128i half_bytes(const void* p) { return _mm_loadl_epi64((const __m128i*)p); }
#elif defined(PAGEGEN_AVX2)
typedef __m128i halves;
PAGEGEN_INLINE halves shift_left(halves x, int by) { return _mm_slli_epi16(x, by); }
PAGEGEN_INLINE halves widen(const uint8_t* p) { return _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p)); }
PAGEGEN_INLINE halves widen_signed(const uint8_t* p) { return _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p)); }
PAGEGEN_INLINE halves splat_halves(int x) { return _mm_set1_epi16((short)x); }
PAGEGEN_INLINE halves equal(halves a, halves b) { return _mm_cmpeq_epi16(a, b); }
PAGEGEN_INLINE vf from_half(halves x) { return (vf)_mm256_cvtph_ps(x); }
PAGEGEN_INLINE vf from_signed_bytes(__m128i x) { return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)); }
PAGEGEN_INLINE __m128i bytes(const void* p) { return _mm_loadl_epi64((const __m128i*)p); }
PAGEGEN_INLINE __m128i half_bytes(const void* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return _mm_cvtsi32_si128(four);
}
#else
typedef uint16x4_t halves;
PAGEGEN_INLINE halves shift_left(halves x, int by) { return vshl_u16(x, vdup_n_s16((short)by)); }
PAGEGEN_INLINE uint8x8_t bytes(const void* p) { // four, twice
  uint32_t four;
  std::memcpy(&four, p, 4);
  return vreinterpret_u8_u32(vdup_n_u32(four));
}
PAGEGEN_INLINE int16x4_t signed_halves(uint8x8_t x) { return vget_low_s16(vmovl_s8(vreinterpret_s8_u8(x))); }
PAGEGEN_INLINE halves widen(const uint8_t* p) { return vget_low_u16(vmovl_u8(bytes(p))); }
PAGEGEN_INLINE halves widen_signed(const uint8_t* p) { return vreinterpret_u16_s16(signed_halves(bytes(p))); }
PAGEGEN_INLINE halves splat_halves(int x) { return vdup_n_u16((uint16_t)x); }
PAGEGEN_INLINE halves equal(halves a, halves b) { return vceq_u16(a, b); }
PAGEGEN_INLINE vf from_half(halves x) { return (vf)vcvt_f32_f16(vreinterpret_f16_u16(x)); }
PAGEGEN_INLINE vf from_signed_bytes(uint8x8_t x) { return (vf)vcvtq_f32_s32(vmovl_s16(signed_halves(x))); }
#endif

// The conversion of fp16 takes subnormals whatever the CPU's mode, so it does the work: e5m2 is the upper half of an
// fp16; e4m3 in its place is 2^8 too small, and its NaN (all ones) becomes one by setting the exponent.
PAGEGEN_INLINE vf load_float(const e5m2* p) { return from_half(shift_left(widen(&p->bits), 8)); }
PAGEGEN_INLINE vf load_float(const e4m3* p) {
  const halves x = widen_signed(&p->bits);
  const halves nan = equal(x | splat_halves(0xff80), splat_halves(-1));
  return from_half((shift_left(x, 7) & splat_halves(0xbf80)) | (nan & splat_halves(0x7e00))) * 256.0f;
}
PAGEGEN_INLINE vf load_float(const s8* p) { return from_signed_bytes(bytes(p)); }
#if defined(PAGEGEN_NEON)
PAGEGEN_INLINE vf load_float(const s4x2* p) {
  uint16_t two;
  std::memcpy(&two, p, 2);
  const int32x4_t up = {28, 24, 20, 16}; // each nibble to the top of its lane
  return (vf)vcvtq_f32_s32(vshrq_n_s32(vshlq_s32(vdupq_n_s32(two), up), 28));
}
#else
PAGEGEN_INLINE vf load_float(const s4x2* p) {
  const __m128i x = half_bytes(p), nibble = _mm_set1_epi8(15), eight = _mm_set1_epi8(8);
  const __m128i all = _mm_unpacklo_epi8(x & nibble, _mm_srli_epi16(x, 4) & nibble);
  return from_signed_bytes(_mm_sub_epi8(_mm_xor_si128(all, eight), eight));
}
#endif
#else
PAGEGEN_INLINE vi load_bytes(const void* p) { // four bytes, at the top of their lanes
  int32_t four;
  std::memcpy(&four, p, 4);
  return (vi)in_turn(vh{}, (vh)in_turn(vb{}, (vb)vi{four}));
}
PAGEGEN_INLINE vf load_float(const e5m2* p) { return widen_floats<3, 15, 31 << 23>(load_bytes(p)); }
PAGEGEN_INLINE vf load_float(const e4m3* p) { return widen_floats<4, 7, 0x7f << 20>(load_bytes(p)); }
PAGEGEN_INLINE vf load_float(const s8* p) { return __builtin_convertvector(load_bytes(p) >> 24, vf); }
PAGEGEN_INLINE vf load_float(const s4x2* p) {
  uint16_t four;
  std::memcpy(&four, p, 2);
  const vh up = {0, 1 << 12, 0, 1 << 8, 0, 1 << 4, 0, 1}; // times these, a nibble is at the top of its lane
  return __builtin_convertvector((vi)((vh)splat(four << 16) * up) >> 28, vf);
}
#endif

// the first N elements (N <= W) as float32, the other lanes 0; nothing past them is touched
template <int N, class T> PAGEGEN_INLINE vf load_float_n(const T* p) {
  if constexpr (N == W) {
    return load_float(p);
  } else {
    static_assert(N % kPack<T> == 0);
    alignas(64) T whole[W / kPack<T>] = {};
    std::memcpy(whole, p, N / kPack<T> * sizeof(T));
    return load_float(whole);
  }
}

// ---- to bf16 --------------------------------------------------------------------------------------------
#if defined(PAGEGEN_BF16)

// the first N elements (N <= 32) as bf16, the other lanes 0
template <int N> PAGEGEN_INLINE __m512i load_bf16(const bf16* p) {
  if constexpr (N == 32) return _mm512_loadu_si512(p);
  return _mm512_maskz_loadu_epi16((__mmask32)((1ull << N) - 1), p);
}

#if defined(PAGEGEN_NARROW_BF16)
template <int N> PAGEGEN_INLINE __m512i load_bytes(const void* p) { // N <= 32, into the lower half
  if constexpr (N == 32) return _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)p));
  return _mm512_castsi256_si512(_mm256_maskz_loadu_epi8((__mmask32)((1ull << N) - 1), p));
}

constexpr float magnitude_of(e4m3, int code) { return small_float(code, 3, 7); }
constexpr float magnitude_of(e5m2, int code) { return small_float(code, 2, 15); }
constexpr float magnitude_of(s8, int code) { return (float)code; }

// The halves of a bf16 by the 7 bits of a magnitude, and how bytes are moved.
template <class T> struct ByteTables {
  alignas(64) uint8_t low[128], high[128];
  constexpr ByteTables() : low{}, high{} {
    for (int i = 0; i < 128; i++) {
      const uint32_t bits = std::bit_cast<uint32_t>(magnitude_of(T{}, i));
      low[i] = bits >> 16 & 0xff;
      high[i] = bits >> 24;
    }
  }
};
struct Moves {
  alignas(64) int64_t spread[8]; // 8 bytes to each half of a 128-bit lane: the upper halves are bytes 32 to 63
  alignas(64) uint8_t pairs[64]; // bytes of two registers in turn
  constexpr Moves() : spread{}, pairs{} {
    for (int i = 0; i < 8; i++) spread[i] = i / 2 + i % 2 * 4;
    for (int i = 0; i < 64; i++) pairs[i] = i / 2 + i % 2 * 64;
  }
};
template <class T> constexpr ByteTables<T> kBytes{};
constexpr Moves kMoves{};

// 64 elements as bf16: out[0] has those in the lower halves of the 128-bit lanes, out[1] the others
template <class T> PAGEGEN_INLINE void bytes_to_bf16(__m512i x, __m512i* out) {
  constexpr bool integer = std::is_same_v<T, s8>;
  const auto find = [](const uint8_t* table, __m512i index) __attribute__((always_inline)) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), index, _mm512_load_si512(table + 64));
  };
  const __m512i index = integer ? _mm512_abs_epi8(x) : x, sign = _mm512_set1_epi8((char)0x80);
  const __m512i low = find(kBytes<T>.low, index);
  __m512i high = _mm512_ternarylogic_epi32(find(kBytes<T>.high, index), x, sign, 0xf8); // a | (b & c)
  // -128 has no magnitude of 7 bits: the table says 0, its lower byte is right
  if constexpr (integer)
    high = _mm512_mask_mov_epi8(high, _mm512_cmpeq_epi8_mask(x, sign), _mm512_set1_epi8((char)0xc3));
  out[0] = _mm512_unpacklo_epi8(low, high);
  out[1] = _mm512_unpackhi_epi8(low, high);
}

template <int N, class T> PAGEGEN_INLINE __m512i load_bf16(const T* p) {
  __m512i out[2];
  bytes_to_bf16<T>(_mm512_permutexvar_epi64(_mm512_load_si512(kMoves.spread), load_bytes<N>(p)), out);
  return out[0];
}
// 64 elements
template <class T> PAGEGEN_INLINE void load_bf16_twice(const T* p, __m512i* out) {
  bytes_to_bf16<T>(_mm512_permutexvar_epi64(_mm512_load_si512(kMoves.spread), _mm512_loadu_si512(p)), out);
}
// the first N elements of two rows in turn: of every 8 columns, out[0] holds the first four and out[1] the last
template <int N, class T> PAGEGEN_INLINE void load_bf16_pairs(const T* a, const T* b, __m512i* out) {
  const __m512i pairs = _mm512_load_si512(kMoves.pairs);
  bytes_to_bf16<T>(_mm512_permutex2var_epi8(load_bytes<N>(a), pairs, load_bytes<N>(b)), out);
}

// int4 goes by 16-bit words of four elements: each word is copied to where its elements go, shifted, looked up.
struct Int4Tables {
  alignas(64) uint16_t value[32];
  alignas(64) uint16_t once[32], once_shift[32];    // of one row
  alignas(64) uint16_t pairs[2][32], pairs_shift[32]; // of two rows in turn, in the order of load_bf16_pairs
  constexpr Int4Tables() : value{}, once{}, once_shift{}, pairs{}, pairs_shift{} {
    for (int i = 0; i < 32; i++) {
      const int nibble = i % 16; // bit 4 of an index is another element's
      value[i] = std::bit_cast<uint32_t>((float)((nibble ^ 8) - 8)) >> 16;
      once[i] = i / 4;
      once_shift[i] = i % 4 * 4;
      for (int half = 0; half < 2; half++) pairs[half][i] = i / 8 * 2 + half + i % 2 * 32;
      pairs_shift[i] = i % 8 / 2 * 4;
    }
  }
};
constexpr Int4Tables kInt4{};

PAGEGEN_INLINE __m512i nibbles_to_bf16(__m512i words, const uint16_t* shift) {
  const __m512i nibbles = _mm512_srlv_epi16(words, _mm512_load_si512(shift));
  return _mm512_permutexvar_epi16(nibbles, _mm512_load_si512(kInt4.value));
}
template <int N> PAGEGEN_INLINE __m512i load_bf16(const s4x2* p) {
  const __m512i words = _mm512_permutexvar_epi16(_mm512_load_si512(kInt4.once), load_bytes<N / 2>(p));
  return nibbles_to_bf16(words, kInt4.once_shift);
}
PAGEGEN_INLINE void load_bf16_twice(const s4x2* p, __m512i* out) {
  out[0] = load_bf16<32>(p);
  out[1] = load_bf16<32>(p + 16);
}
template <int N> PAGEGEN_INLINE void load_bf16_pairs(const s4x2* a, const s4x2* b, __m512i* out) {
  const __m512i left = load_bytes<N / 2>(a), right = load_bytes<N / 2>(b);
  for (int half = 0; half < 2; half++) {
    const __m512i words = _mm512_permutex2var_epi16(left, _mm512_load_si512(kInt4.pairs[half]), right);
    out[half] = nibbles_to_bf16(words, kInt4.pairs_shift);
  }
}
#endif
#endif

} // namespace
} // namespace pagegen
