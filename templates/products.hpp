// The two kinds of dot product that attention is made of, over words of 32 bits.
#pragma once

#include "narrow.hpp"

namespace pagegen {
namespace {

// float32 throughout: a word is one element, converted when loaded. Where a CPU has products of narrower types and they
// are wanted (DOT), the specialisations below, or else for int8 and int4 bytes.hpp, take over.
template <class Q, class KV, bool DOT> struct Math {
  using Word = float;
  using VWord = vf;
  static constexpr int step = 1;          // elements of the contraction in a word
  static constexpr int key_vectors = 1;   // vectors of words that are best loaded at once from a row of K
  static constexpr int value_vectors = 1; // vectors of words that one load of V gives
  using Weight = float;                   // how a softmax weight is kept

  static PAGEGEN_INLINE VWord broadcast(Word x) { return splat(x); }
  static PAGEGEN_INLINE VWord load_words(const Word* p) { return load(p); }
  static PAGEGEN_INLINE vf dot(vf sum, VWord a, VWord b) { return fma(a, b, sum); }
  static PAGEGEN_INLINE vi bits(VWord x) { return as_int(x); }
  static PAGEGEN_INLINE void store_words(Word* p, VWord x) { store(p, x); }
  // N elements of a row (N <= W), the other lanes 0
  template <int N, class T> static PAGEGEN_INLINE VWord load_row(const T* p) { return load_float_n<N>(p); }
  static PAGEGEN_INLINE void load_keys(const KV* p, VWord* out) { out[0] = load_row<W>(p); }
  // loaded parts of `step` value rows as the contraction over tokens takes them
  static PAGEGEN_INLINE void interleave(const VWord* row, VWord* out) { out[0] = row[0]; }
  // N columns of `step` value rows, interleaved
  template <int N> static PAGEGEN_INLINE void load_values(const KV* const* row, VWord* out) {
    out[0] = load_row<N>(row[0]);
  }
  static PAGEGEN_INLINE void natural_order(vf*) {}
  static constexpr int place(int column) { return column; } // where a column lies before natural_order
  static PAGEGEN_INLINE float sum(VWord x) { return sum_lanes(x); }
};

#if defined(PAGEGEN_BF16)
#if defined(PAGEGEN_NARROW_BF16)
template <class KV> constexpr bool kNarrow = sizeof(KV) == 1;
#else
template <class KV> constexpr bool kNarrow = false;
#endif

// vdpbf16ps: a word is a pair of bf16, products are summed in float32. Every quantised value is a bf16 exactly.
// Values are contracted over pairs of tokens, so their columns are interleaved and come out permuted inside each 32:
// see `natural_order`.
template <class KV>
  requires(std::is_same_v<KV, bf16> || kNarrow<KV>)
struct Math<bf16, KV, true> {
  using Word = int32_t;
  using VWord = vi;
  static constexpr int step = 2;
  static constexpr int key_vectors = kNarrow<KV> ? 2 : 1;
  static constexpr int value_vectors = 2;
  using Weight = bf16;

  static PAGEGEN_INLINE VWord broadcast(Word x) { return (vi)_mm512_set1_epi32(x); }
  static PAGEGEN_INLINE VWord load_words(const Word* p) { return load(p); }
  static PAGEGEN_INLINE vf dot(vf sum, VWord a, VWord b) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
  static PAGEGEN_INLINE vi bits(VWord x) { return x; }
  static PAGEGEN_INLINE void store_words(Word* p, VWord x) { store(p, x); }
  template <int N, class T> static PAGEGEN_INLINE VWord load_row(const T* p) { return (vi)load_bf16<N>(p); }
  static PAGEGEN_INLINE void interleave(const VWord* row, VWord* out) {
    out[0] = (vi)_mm512_unpacklo_epi16((__m512i)row[0], (__m512i)row[1]);
    out[1] = (vi)_mm512_unpackhi_epi16((__m512i)row[0], (__m512i)row[1]);
  }
  static PAGEGEN_INLINE void load_keys(const KV* p, VWord* out) {
    if constexpr (kNarrow<KV>) load_bf16_twice(p, (__m512i*)out);
    else out[0] = load_row<2 * W>(p);
  }
  template <int N> static PAGEGEN_INLINE void load_values(const KV* const* row, VWord* out) {
    if constexpr (kNarrow<KV>) {
      load_bf16_pairs<N>(row[0], row[1], (__m512i*)out);
    } else {
      const VWord loaded[2] = {load_row<N>(row[0]), load_row<N>(row[1])};
      interleave(loaded, out);
    }
  }
  // undoes the interleaving: of every 8 columns, x[0] holds the first four and x[1] the last four
  static PAGEGEN_INLINE void natural_order(vf* x) {
    const __m512 a = (__m512)x[0], b = (__m512)x[1];
    const __m512 first = _mm512_shuffle_f32x4(a, b, 0x44), second = _mm512_shuffle_f32x4(a, b, 0xee);
    x[0] = (vf)_mm512_shuffle_f32x4(first, first, 0xd8);
    x[1] = (vf)_mm512_shuffle_f32x4(second, second, 0xd8);
  }
  static constexpr int place(int column) {
    return column / 32 * 32 + (column % 8 < 4 ? 0 : 16) + column % 32 / 8 * 4 + column % 4;
  }
  static PAGEGEN_INLINE float sum(VWord x) {
    return sum_lanes(as_float(x << 16)) + sum_lanes(as_float(x & (int32_t)0xffff0000));
  }
};
#endif

#if defined(PAGEGEN_NEON_BF16)
// bfdot: as above, but the columns of a value keep their order. It rounds each sum of two products, and each addition,
// to odd; q and K of 16 bits cost no more error by it than by vdpbf16ps.
template <> struct Math<bf16, bf16, true> {
  using Word = int32_t;
  using VWord = vi;
  static constexpr int step = 2;
  static constexpr int key_vectors = 1;
  static constexpr int value_vectors = 2;
  using Weight = bf16;

  static PAGEGEN_INLINE VWord broadcast(Word x) { return splat(x); }
  static PAGEGEN_INLINE VWord load_words(const Word* p) { return load(p); }
  static PAGEGEN_INLINE vf dot(vf sum, VWord a, VWord b) {
    return (vf)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
  }
  static PAGEGEN_INLINE vi bits(VWord x) { return x; }
  static PAGEGEN_INLINE void store_words(Word* p, VWord x) { store(p, x); }
  template <int N> static PAGEGEN_INLINE VWord load_row(const bf16* p) { // N <= 8
    if constexpr (N == 2 * W) return (vi)vld1q_u16(&p->bits);
    alignas(16) uint16_t whole[2 * W] = {};
    std::memcpy(whole, p, N * sizeof(bf16));
    return (vi)vld1q_u16(whole);
  }
  static PAGEGEN_INLINE void load_keys(const bf16* p, VWord* out) { out[0] = load_row<2 * W>(p); }
  static PAGEGEN_INLINE void interleave(const VWord* row, VWord* out) {
    out[0] = (vi)vzip1q_u16((uint16x8_t)row[0], (uint16x8_t)row[1]);
    out[1] = (vi)vzip2q_u16((uint16x8_t)row[0], (uint16x8_t)row[1]);
  }
  template <int N> static PAGEGEN_INLINE void load_values(const bf16* const* row, VWord* out) {
    const VWord loaded[2] = {load_row<N>(row[0]), load_row<N>(row[1])};
    interleave(loaded, out);
  }
  static PAGEGEN_INLINE void natural_order(vf*) {}
  static constexpr int place(int column) { return column; }
  static PAGEGEN_INLINE float sum(VWord x) {
    return sum_lanes(as_float(x << 16)) + sum_lanes(as_float(x & (int32_t)0xffff0000));
  }
};
#endif

} // namespace
} // namespace pagegen
