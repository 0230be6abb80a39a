// The products of the stream way over caches of int8 and int4 where the CPU multiplies bytes (AVX512_VNNI): nothing
// is converted. The other side of a product has 16 bits, as two planes of bytes, and every sum is exact.
//
//   scores   a row of q times 32512 / max|q|, to the nearest integer, and keys made unsigned by adding 128 (8 for
//            int4), which adds that times the row's sum
//   values   weights times 32512 / their maximum in the tile, and values made unsigned; a word has four tokens
//
// So a score is off by at most max|q| sum|k| / 65024, a weight by 1/65024 of the tile's largest. That is little beside
// what bf16 rounds, unless some elements tower over the others: channels of q far out of range, or the weights of
// attention sinks, whose own values may be next to nothing. Then what the rounding left is multiplied as well, in two
// more planes. (In SmolLM2 on prose so for 0.22 of the rows of weights, in tiles of 128 tokens.)
#pragma once

#include "planes.hpp"
#include "rows.hpp"

#include <utility>

namespace pagegen {
namespace {

template <class C> struct Bytes : TileRows<C> {
  using Base = TileRows<C>;
  using typename Base::Args, typename Base::Factors, typename Base::KV, typename Base::M, typename Base::PrefetchK;
  using typename Base::PrefetchV, typename Base::Q, typename Base::Rows, typename Base::Span, typename Base::State;
  using Base::D, Base::DV, Base::OUT, Base::PACKED, Base::R, Base::TILE, Base::ZEROS;

  static constexpr int PER_BYTE = PACKED ? 2 : 1;
  static constexpr int OFFSET = PACKED ? 8 : 128; // what makes a key or a value unsigned
  static constexpr int PIECES = ceil_div(D, 64 * PER_BYTE); // of 64 bytes of a key
  // A pass makes 32 columns of the sums: two vectors.
  static constexpr int PASSES = ceil_div(DV, 64 * PER_BYTE) * 2 * PER_BYTE;
  static constexpr int WIDTH = PASSES * 2 * W;

  struct Factor { // R rows of q as the products take them
    alignas(64) int8_t high[R][PIECES][PER_BYTE][64], low[R][PIECES][PER_BYTE][64]; // int4: even, odd elements
    int32_t offset[R]; // a score is (sum - offset) * unit
    float unit[R];
  };
  struct Query { // R rows of one query
    Factor rounded, residual;
    bool coarse;  // whether the residual counts
    float sum[R]; // of a row's elements, which zero points are multiplied by
  };

  struct Weights {
    alignas(64) float weight[R][TILE];
    alignas(64) int8_t high[R][TILE], low[R][TILE];
    int32_t offset[R];
    float unit[R];
  };
  static PAGEGEN_INLINE float* weights_of(Weights& w, int r) { return w.weight[r]; }

#if defined(PAGEGEN_VNNI)
  static_assert(255LL * kMost * 256 < 1LL << 31); // a sum over 256 elements, or tokens, fits

  static void load_query(const Args& a, int64_t token, int head, Query& q) {
    alignas(64) float x[R][D];
    std::memset((void*)&q, 0, sizeof q);
    for (int r = 0; r < R; r++) {
      const Q* from = (const Q*)a.q + token * a.q_token_stride + (head + r) * a.q_head_stride;
      vf sum = vf{};
      for (int i = 0; i < D; i += W) {
        const vf loaded = load_float(from + i);
        store(x[r] + i, loaded);
        sum = sum + loaded;
      }
      q.sum[r] = sum_lanes(sum);
      // The largest is more than some 50 times the spread of the others. Up to there scores are off by 1e-3 of theirs.
      q.coarse |= keep_row(x[r], r, q.rounded) < 1.0f / 64;
    }
    for (int r = 0; r < R && q.coarse; r++) keep_row(x[r], r, q.residual);
  }
  // Returns how small the small channels are, and leaves in `x` what the rounding left.
  static float keep_row(float* x, int r, Factor& to) {
    alignas(64) int8_t high[D], low[D];
    const Planes planes = to_planes(x, 0, D, 8, high, low);
    deal(high, to.high[r]);
    deal(low, to.low[r]);
    to.unit[r] = planes.unit;
    to.offset[r] = planes.total * OFFSET;
    subtract_planes(x, 0, D, high, low, planes.unit);
    return planes.small;
  }
  // Bytes to where those of a key that they meet lie.
  static PAGEGEN_INLINE void deal(const int8_t* plane, int8_t (*to)[PER_BYTE][64]) {
    for (int i = 0; i < D; i += 16) {
      const __m128i x = _mm_load_si128((const __m128i*)(plane + i));
      const int byte = i / PER_BYTE;
      int8_t(*piece)[64] = to[byte / 64];
      if constexpr (PACKED) {
        _mm_storel_epi64((__m128i*)(piece[0] + byte % 64), _mm_cvtepi16_epi8(x));
        _mm_storel_epi64((__m128i*)(piece[1] + byte % 64), _mm_cvtepi16_epi8(_mm_srli_epi16(x, 8)));
      } else {
        _mm_store_si128((__m128i*)(piece[0] + byte % 64), x);
      }
    }
  }

  static PAGEGEN_INLINE void to_unsigned(__m512i x, __m512i* out) {
    const __m512i bytes = _mm512_xor_si512(x, _mm512_set1_epi8((char)(PACKED ? 0x88 : 0x80)));
    if constexpr (PACKED) {
      const __m512i nibble = _mm512_set1_epi8(15);
      out[0] = _mm512_and_si512(bytes, nibble);
      out[1] = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), nibble);
    } else {
      out[0] = bytes;
    }
  }

  static void scores(const Rows& k, PrefetchK next, const Query& q, Span span, float (*score)[TILE]) {
    multiply(k, next, q.rounded, span, score);
    if (!q.coarse) return;
    alignas(64) float residual[R][TILE];
    next.end = 0; // once
    multiply(k, next, q.residual, span, residual);
    for (int r = 0; r < R; r++)
      for (int t = span.begin; t < span.end; t += W) store(&score[r][t], load(&score[r][t]) + load(&residual[r][t]));
  }

  // four bytes, in every word
  static PAGEGEN_INLINE __m512i repeat(const int8_t* from) {
    int32_t word;
    std::memcpy(&word, from, 4);
    return _mm512_set1_epi32(word);
  }

  // Keys are turned, 16 at a time, so that a token has a lane: cheaper than adding up across lanes for every token and
  // row of q.
  static void multiply(const Rows& k, PrefetchK next, const Factor& q, Span span, float (*score)[TILE]) {
    constexpr int LAST = D / PER_BYTE - (PIECES - 1) * 64; // bytes of the last piece
    constexpr int WORDS = D / PER_BYTE / 4;                // of 32 bits
    alignas(64) int32_t word[W][W];
    for (int t = span.begin; t < span.end; t += W) {
      vi high[R] = {}, low[R] = {};
#pragma GCC unroll 1 // written out as well, pieces take no less time
      for (int i = 0; i < PIECES; i++) {
        const int first = t + i * W * W / WORDS;
        int fetched = 0; // tokens from `first` on whose lines were prefetched; one twice where no piece ends with it
        const bool last = i == PIECES - 1;
        const __mmask64 held = last && LAST < 64 ? (1ull << (LAST % 64)) - 1 : ~0ull;
        vi row[W];
#pragma GCC unroll 16
        for (int j = 0; j < W; j++) row[j] = (vi)_mm512_maskz_loadu_epi8(held, k.row(t + j) + i * 64);
        transpose(row, word[0], W);
        const auto one = [&](int n) __attribute__((always_inline)) {
          for (; fetched * WORDS < (n + 1) * W; fetched++) next.template issue<1, 1>(first + fetched, 0);
          __m512i key[PER_BYTE]; // int4: even and odd elements
          to_unsigned((__m512i)load(word[n]), key);
#pragma GCC unroll 2
          for (int m = 0; m < PER_BYTE; m++)
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
              const __m512i upper = repeat(q.high[r][i][m] + n * 4), lower = repeat(q.low[r][i][m] + n * 4);
              high[r] = (vi)_mm512_dpbusd_epi32((__m512i)high[r], key[m], upper);
              low[r] = (vi)_mm512_dpbusd_epi32((__m512i)low[r], key[m], lower);
            }
        };
        const int words = last ? LAST / 4 : W;
        if constexpr (PACKED) {
          for (int n = 0; n < words; n++) one(n);
        } else { // written out, words stay in registers: 0.94 of the time; int4 would only compile longer
#pragma GCC unroll 16
          for (int n = 0; n < words; n++) one(n);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const vi sum = (high[r] << 8) + low[r] - q.offset[r]; // as integers: the two are nearly alike
        store(&score[r][t], __builtin_convertvector(sum, vf) * q.unit[r]);
      }
    }
  }

  // A row's weights as integers. What zero points add follows the weights as rounded: it cancels.
  static PAGEGEN_INLINE bool prepare(Weights& w, int r, Span span, const Factors& f, State& state) {
    const float small = round_weights(w, r, span);
    if constexpr (ZEROS) {
      vf shift = vf{};
      for (int t = span.begin; t < span.end; t += W) {
        const vf rounded = from_planes(w.high[r] + t, w.low[r] + t, w.unit[r]);
        shift = fma(rounded - load(w.weight[r] + t), load(f.v_zero + t), shift);
      }
      state.shift += sum_lanes(shift);
    }
    // 1/512: the mean of the small ones is 64 integers, so their sum is off by less than 1/128 of itself
    return small < 1.0f / 512;
  }
  // What the rounding left of a row's weights, as weights.
  static void prepare_residual(Weights& w, int r, Span span, const Factors& f, State& state) {
    subtract_planes(w.weight[r], span.begin, span.end, w.high[r], w.low[r], w.unit[r]);
    round_weights(w, r, span);
    if constexpr (ZEROS) {
      vf shift = vf{};
      for (int t = span.begin; t < span.end; t += W)
        shift = fma(from_planes(w.high[r] + t, w.low[r] + t, w.unit[r]), load(f.v_zero + t), shift);
      state.shift += sum_lanes(shift);
    }
  }
  static PAGEGEN_INLINE float round_weights(Weights& w, int r, Span span) {
    const Planes planes = to_planes(w.weight[r], span.begin, span.end, 32, w.high[r], w.low[r]);
    w.unit[r] = planes.unit;
    w.offset[r] = planes.total * OFFSET;
    return planes.small;
  }

  // Of one pass: two vectors of words, each word with four tokens' values of one column.
  template <int PASS> static PAGEGEN_INLINE void load_values(const KV* const* row, __m512i* out) {
    constexpr int GROUP = PASS / (2 * PER_BYTE) * 64, LEFT = std::min(64, DV / PER_BYTE - GROUP);
    constexpr bool UPPER = PASS / PER_BYTE % 2;
    __m512i x[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++)
      x[j] = LEFT == 64 ? _mm512_loadu_si512(row[j] + GROUP)
                        : _mm512_maskz_loadu_epi8((1ull << (LEFT % 64)) - 1, row[j] + GROUP);
    const auto turn = [](__m512i a, __m512i b) __attribute__((always_inline)) {
      return UPPER ? _mm512_unpackhi_epi8(a, b) : _mm512_unpacklo_epi8(a, b);
    };
    const __m512i left = turn(x[0], x[1]), right = turn(x[2], x[3]);
    if constexpr (PACKED) {
      to_unsigned(PASS % 2 ? _mm512_unpackhi_epi16(left, right) : _mm512_unpacklo_epi16(left, right), out);
    } else {
      to_unsigned(_mm512_unpacklo_epi16(left, right), out);
      to_unsigned(_mm512_unpackhi_epi16(left, right), out + 1);
    }
  }

  static constexpr int ROW_PART = even_part(R, 4), ROW_REST = R % ROW_PART;
  static constexpr int BLOCKS = PASSES * ceil_div(R, ROW_PART);

  template <int ROWS, int PASS>
  static PAGEGEN_INLINE void block(const Rows& v, const PrefetchV& next, Span span, int r0, const Weights& w,
                                   const float* rescale, float (*sums)[WIDTH]) {
    vi high[ROWS][2] = {}, low[ROWS][2] = {};
    for (int t = span.begin; t < span.end; t += 4) {
      next.template issue<4, BLOCKS>(t, PASS * ceil_div(R, ROW_PART) + r0 / ROW_PART);
      const KV* row[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) row[j] = v.row(t + j);
      __m512i value[2];
      load_values<PASS>(row, value);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        const __m512i upper = repeat(w.high[r0 + r] + t), lower = repeat(w.low[r0 + r] + t);
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
          high[r][i] = (vi)_mm512_dpbusd_epi32((__m512i)high[r][i], value[i], upper);
          low[r][i] = (vi)_mm512_dpbusd_epi32((__m512i)low[r][i], value[i], lower);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
      for (int i = 0; i < 2; i++) {
        float* to = sums[r0 + r] + (PASS * 2 + i) * W;
        const vf sum = __builtin_convertvector((high[r][i] << 8) + low[r][i] - w.offset[r0 + r], vf);
        store(to, fma(load(to), splat(rescale[r0 + r]), sum * w.unit[r0 + r]));
      }
  }

  // sums = sums * rescale + the tile's
  static void values(const Rows& v, PrefetchV next, Span span, const Weights& w, const float* rescale,
                     float (*sums)[WIDTH]) {
    const auto one = [&]<int PASS>() __attribute__((always_inline)) {
      for (int r = 0; r + ROW_PART <= R; r += ROW_PART) block<ROW_PART, PASS>(v, next, span, r, w, rescale, sums);
      if constexpr (ROW_REST > 0) block<ROW_REST, PASS>(v, next, span, R - ROW_REST, w, rescale, sums);
    };
    [&]<int... PASS>(std::integer_sequence<int, PASS...>) {
      (one.template operator()<PASS>(), ...);
    }(std::make_integer_sequence<int, PASSES>{});
  }

  // The sums in the order that `finish` expects. Unpacking bytes and then pairs of bytes spreads a group of 64 over its
  // passes: see load_values.
  struct Order {
    int32_t from[OUT];
    constexpr Order() : from{} {
      for (int column = 0; column < DV; column++) {
        const int byte = column / PER_BYTE, odd = column % PER_BYTE, r = byte % 64;
        const int quarter = r / 16, half = r % 16 / 8, quad = r % 8 / 4; // of 16 bytes, of 8, of 4
        const int pass = (byte / 64 * 2 + half) * PER_BYTE + (PACKED ? quad : 0);
        from[M::place(column)] = (pass * 2 + (PACKED ? odd : quad)) * W + quarter * 4 + r % 4;
      }
    }
  };
  static constexpr Order kOrder{};
  static PAGEGEN_INLINE const float* ordered(const float* sums, float* row) {
    for (int c = 0; c < OUT; c++) row[c] = sums[kOrder.from[c]];
    return row;
  }
#endif
};

} // namespace
} // namespace pagegen
