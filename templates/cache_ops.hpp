// Writing to and copying within a paged cache on CPUs; merge.hpp comes along in the same library.
//
// Layouts; every last dimension has stride 1, all other strides are arguments, in elements:
//   k, v        [num_tokens, num_kv_heads, head_dim or v_head_dim]
//   q, rotated  [num_tokens, num_q_heads, head_dim]
//   k, v cache  [num_blocks, block_size, num_kv_heads, head_dim or v_head_dim]; int4: two a byte, low nibble first
//   scale, zero [num_blocks, block_size, num_kv_heads]; an absent one is null
//   cos, sin    [max_position, rotary_half]
//   slot        block * block_size + place in the block; a negative slot skips the token
//
// What a cache stores: value / scale + zero, both rounded to float32, then to the nearest value that the cache's type
// has, ties to even. Types of 8 and 4 bits saturate, infinities too; NaN stays NaN in float8 and is 0 in integers.
//
// Build: c++ -O2 -fpeel-loops -std=c++20 -fopenmp -ffp-contract=off -fwrapv -shared -fPIC -march=native
#pragma once

#include "merge.hpp"

#include <algorithm>
#include <cstdlib>
#include <omp.h>
#include <utility>

struct pagegen_strides {
  int64_t block, slot, head;
};

// One of K and V: what is written, where to, and how it is quantised.
struct pagegen_rows {
  const void* rows; // null: this one is not written
  void* cache;
  const float* scale;
  const float* zero; // int8 and int4 alone
  int64_t token_stride, head_stride;
  pagegen_strides cache_strides, scale_strides, zero_strides;
  int64_t dim;
};

struct pagegen_write_args {
  pagegen_rows k, v;
  const int64_t* slots;
  int64_t num_tokens, num_kv_heads, block_size;
  int64_t source_dtype, cache_dtype; // 0 float32, 1 float16, 2 bfloat16; a cache also 3 e4m3, 4 e5m2, 5 int8, 6 int4
  int64_t num_threads;
  // rotation; cos is null for a plain write
  const void* q;
  void* rotated;
  const int64_t* positions;
  const void* cos;
  const void* sin;
  int64_t q_token_stride, q_head_stride, rotated_token_stride, rotated_head_stride, cos_stride, sin_stride;
  int64_t num_q_heads, max_position, rotary_half, interleaved;
  int64_t q_dtype, angle_dtype;
};

struct pagegen_copy_args {
  void* k_cache;
  void* v_cache;        // null: K alone
  const int64_t* pairs; // [num_pairs, 2]: source block, target block; no target is a source
  pagegen_strides k_strides, v_strides;
  int64_t num_pairs, num_kv_heads, head_dim, v_head_dim, block_size;
  int64_t element_bytes;
  int64_t num_threads;
};

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

// float8 to nearest even, of `kept` bits of mantissa and an exponent biased by `bias`, at most `largest`. Adding a
// power of two so large that the sum's last place is that of the float8 rounds; how far the sum lies behind the power
// are the steps from it, and subnormals are steps from 0. No intermediate is a subnormal: any mode of the CPU will do.
template <int kept, int bias> PAGEGEN_INLINE vi float8_bits(vf x, float largest) {
  constexpr int dropped = 23 - kept;
  const vi size = as_int(x) & 0x7fffffff;
  const vi limited = lesser(size, as_int(splat(largest))); // of infinities and NaN too
  const vi exponent = greater(limited & 0x7f800000, splat((128 - bias) << 23));
  const vi power = exponent + (dropped << 23);
  const vi sum = as_int(as_float(limited) + as_float(power));
  const vi code = sum - power + (power >> dropped) - ((127 + dropped - bias + 1) << kept);
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

// ---- copies ---------------------------------------------------------------------------------------------

// Writes past the caches: lines need not be read first, and rows strewn over a cache do not wait for theirs. On a Zen 4
// core 33-45 GB/s of reads and writes where memcpy has 22-30, and 64 strewn tokens in 21 us where stores take 46. `to`
// and `bytes` are multiples of 64.
PAGEGEN_INLINE void copy_past_caches(char* to, const char* from, int64_t bytes) {
#if defined(PAGEGEN_AVX512)
  for (int64_t i = 0; i < bytes; i += 64) _mm512_stream_si512((__m512i*)(to + i), _mm512_loadu_si512(from + i));
#elif defined(PAGEGEN_AVX2)
  for (int64_t i = 0; i < bytes; i += 32)
    _mm256_stream_si256((__m256i*)(to + i), _mm256_loadu_si256((const __m256i*)(from + i)));
#else
  std::memcpy(to, from, bytes);
#endif
}
PAGEGEN_INLINE void copy(char* to, const char* from, int64_t bytes, bool past_caches) {
  if (past_caches && (((uintptr_t)to | bytes) & 63) == 0) copy_past_caches(to, from, bytes);
  else std::memcpy(to, from, bytes);
}
// What was written past the caches is seen by whoever is told so after this.
PAGEGEN_INLINE void fence_writes() {
#if defined(PAGEGEN_AVX512) || defined(PAGEGEN_AVX2)
  _mm_sfence();
#endif
}

// A box of rows [outer, inner, bytes]: copied in as few pieces as its strides allow.
struct Axis {
  int64_t size, from_stride, to_stride; // bytes
};
inline void copy_box(char* to, const char* from, Axis outer, Axis inner, int64_t bytes, bool past_caches) {
  if (outer.from_stride < inner.from_stride) std::swap(outer, inner); // reads ascend
  for (Axis* axis : {&inner, &outer})
    if (axis->size == 1 || (axis->from_stride == bytes && axis->to_stride == bytes)) {
      bytes *= axis->size;
      axis->size = 1;
    } else break;
  for (int64_t i = 0; i < outer.size; i++)
    for (int64_t j = 0; j < inner.size; j++)
      copy(to + i * outer.to_stride + j * inner.to_stride, from + i * outer.from_stride + j * inner.from_stride, bytes,
           past_caches);
}

// ---- rotation -------------------------------------------------------------------------------------------

template <int... I> using Lanes = std::integer_sequence<int, I...>;
using Each = std::make_integer_sequence<int, W>;
template <int... I> PAGEGEN_INLINE vf even(vf a, vf b, Lanes<I...>) { return __builtin_shufflevector(a, b, 2 * I...); }
template <int... I> PAGEGEN_INLINE vf odd(vf a, vf b, Lanes<I...>) {
  return __builtin_shufflevector(a, b, 2 * I + 1 ...);
}
template <int... I> PAGEGEN_INLINE vf low_in_turn(vf a, vf b, Lanes<I...>) {
  return __builtin_shufflevector(a, b, I / 2 + I % 2 * W...);
}
template <int... I> PAGEGEN_INLINE vf high_in_turn(vf a, vf b, Lanes<I...>) {
  return __builtin_shufflevector(a, b, (W + I) / 2 + I % 2 * W...);
}

// Pairs i .. i + W of a row by their angles (RoFormer, arXiv 2104.09864): in float32, rounded once.
template <class T, bool INTERLEAVED>
PAGEGEN_INLINE void turn_pairs(const T* from, T* to, int64_t i, int64_t half, vf cos, vf sin) {
  const int64_t first = INTERLEAVED ? 2 * i : i, second = INTERLEAVED ? 2 * i + W : half + i;
  vf a = load_float(from + first), b = load_float(from + second);
  if constexpr (INTERLEAVED) {
    const vf low = a, high = b;
    a = even(low, high, Each{});
    b = odd(low, high, Each{});
  }
  vf x = a * cos - b * sin, y = b * cos + a * sin;
  if constexpr (INTERLEAVED) {
    a = x;
    b = y;
    x = low_in_turn(a, b, Each{});
    y = high_in_turn(a, b, Each{});
  }
  store_float(to + first, x);
  store_float(to + second, y);
}

constexpr int64_t whole_vectors(int64_t n) { return (n + W - 1) / W * W; }

// `angles`: the cosines and then the sines of a position, in float32, each padded to whole vectors.
template <class T, bool INTERLEAVED>
void turn_row(const T* from, T* to, int64_t dim, const float* angles, int64_t half) {
  const float* cos = angles;
  const float* sin = angles + whole_vectors(half);
  int64_t i = 0;
  for (; i + W <= half; i += W) turn_pairs<T, INTERLEAVED>(from, to, i, half, load(cos + i), load(sin + i));
  if (i < half) {
    const int64_t second = INTERLEAVED ? 2 * i + (half - i) : half + i, first = INTERLEAVED ? 2 * i : i;
    const int64_t place = INTERLEAVED ? half - i : W, bytes = (half - i) * sizeof(T);
    alignas(64) T rest[2 * W] = {};
    alignas(64) T turned[2 * W];
    std::memcpy((void*)rest, from + first, bytes);
    std::memcpy((void*)(rest + place), from + second, bytes);
    turn_pairs<T, INTERLEAVED>(rest, turned, 0, W, load(cos + i), load(sin + i));
    std::memcpy((void*)(to + first), turned, bytes);
    std::memcpy((void*)(to + second), turned + place, bytes);
  }
  std::memcpy((void*)(to + 2 * half), from + 2 * half, (dim - 2 * half) * sizeof(T));
}

template <class T> void load_angles(const void* table, int64_t row, int64_t half, float* to) {
  store_rows<T, float, false>({(const T*)table + row, to, nullptr, nullptr, 0, 0, 0, 0, 1, half});
}

using Turner = void (*)(const void*, void*, int64_t, const float*, int64_t);
template <class T> void turn_halves(const void* from, void* to, int64_t dim, const float* angles, int64_t half) {
  turn_row<T, false>((const T*)from, (T*)to, dim, angles, half);
}
template <class T> void turn_interleaved(const void* from, void* to, int64_t dim, const float* angles, int64_t half) {
  turn_row<T, true>((const T*)from, (T*)to, dim, angles, half);
}
constexpr Turner kTurners[3][2] = {{turn_halves<float>, turn_interleaved<float>},
                                   {turn_halves<fp16>, turn_interleaved<fp16>},
                                   {turn_halves<bf16>, turn_interleaved<bf16>}};
using AngleLoader = void (*)(const void*, int64_t, int64_t, float*);
constexpr AngleLoader kAngles[3] = {load_angles<float>, load_angles<fp16>, load_angles<bf16>};

// ---- writing --------------------------------------------------------------------------------------------

struct Range {
  int64_t begin, end;
};
inline Range share(int64_t size, int64_t part, int64_t parts) {
  return {size * part / parts, size * (part + 1) / parts};
}

inline int64_t offset(pagegen_strides s, int64_t block, int64_t place, int64_t head) {
  return block * s.block + place * s.slot + head * s.head;
}

// What is the same for every token of a call.
struct Writing {
  const pagegen_write_args& a;
  int64_t from_bytes, to_bytes;
  bool same;        // the cache holds the type of the rows
  bool past_caches; // converted rows too: the lines of a token are made in L1 first

  Writing(const pagegen_write_args& args, bool past)
      : a(args), from_bytes(kBytes[a.source_dtype]), to_bytes(kBytes[a.cache_dtype]),
        same(a.source_dtype == a.cache_dtype), past_caches(past) {}

  bool as_it_is(const pagegen_rows& r) const { return same && !r.scale && !r.zero; }

  // A thread's own memory: a position's angles, and rows of one token, rotated and as they are stored.
  struct Scratch {
    float* angles;
    char* turned;
    char* stored;
    Scratch(const Scratch&) = delete;
    explicit Scratch(const pagegen_write_args& a) {
      const int64_t angle_bytes = 2 * whole_vectors(a.rotary_half) * sizeof(float);
      const int64_t turned_bytes = a.cos ? a.num_kv_heads * a.k.dim * sizeof(float) : 0;
      const int64_t stored_bytes = a.num_kv_heads * std::max(a.k.dim, a.v.dim) * sizeof(float);
      angles = (float*)std::aligned_alloc(64, (angle_bytes + turned_bytes + stored_bytes + 63) / 64 * 64);
      std::memset(angles, 0, angle_bytes);
      turned = (char*)angles + angle_bytes;
      stored = turned + turned_bytes;
    }
    ~Scratch() { std::free(angles); }
  };

  char* place(const pagegen_rows& r, int64_t slot, int64_t head) const {
    return (char*)r.cache + offset(r.cache_strides, slot / a.block_size, slot % a.block_size, head) * to_bytes;
  }
  const char* source(const pagegen_rows& r, int64_t t, int64_t head) const {
    return (const char*)r.rows + (t * r.token_stride + head * r.head_stride) * from_bytes;
  }

  // Rows of heads of one token, which lie `from_stride` bytes apart.
  void store(const pagegen_rows& r, int64_t slot, Range heads, const char* from, int64_t from_stride,
             const Scratch& own) const {
    const Axis one{1, 0, 0};
    const int64_t count = heads.end - heads.begin, apart = r.cache_strides.head * to_bytes;
    char* to = place(r, slot, heads.begin);
    if (as_it_is(r)) return copy_box(to, from, one, {count, from_stride, apart}, r.dim * to_bytes, past_caches);
    const int64_t width = a.cache_dtype == kInt4 ? r.dim / 2 : r.dim;
    const int64_t block = slot / a.block_size, in_block = slot % a.block_size;
    const auto factor = [&](const float* f, pagegen_strides s) {
      return f ? f + offset(s, block, in_block, heads.begin) : nullptr;
    };
    const RowWriter write = kRowWriters[a.source_dtype][r.scale || r.zero][a.cache_dtype];
    const int64_t to_stride = past_caches ? width : r.cache_strides.head;
    write({from, past_caches ? own.stored : to, factor(r.scale, r.scale_strides), factor(r.zero, r.zero_strides),
           from_stride / from_bytes, to_stride, r.scale_strides.head, r.zero_strides.head, count, r.dim});
    if (past_caches) copy_box(to, own.stored, one, {count, width * to_bytes, apart}, width * to_bytes, true);
  }
  void store(const pagegen_rows& r, int64_t t, Range heads, const Scratch& own) const {
    store(r, a.slots[t], heads, source(r, t, heads.begin), r.head_stride * from_bytes, own);
  }

  // Tokens [t, t + count) of consecutive slots in one block.
  void copy_run(const pagegen_rows& r, int64_t t, int64_t count) const {
    copy_box(place(r, a.slots[t], 0), source(r, t, 0),
             {count, r.token_stride * to_bytes, r.cache_strides.slot * to_bytes},
             {a.num_kv_heads, r.head_stride * to_bytes, r.cache_strides.head * to_bytes}, r.dim * to_bytes,
             past_caches);
  }
  int64_t run(int64_t t, int64_t end) const {
    const int64_t slot = a.slots[t], most = std::min(end - t, a.block_size - slot % a.block_size);
    int64_t count = 1;
    while (count < most && a.slots[t + count] == slot + count) count++;
    return count;
  }
  void copy_tokens(Range tokens) const {
    for (int64_t t = tokens.begin; t < tokens.end;) {
      const bool skipped = a.slots[t] < 0;
      const int64_t count = skipped ? 1 : run(t, tokens.end);
      if (!skipped) copy_run(a.k, t, count);
      if (!skipped && a.v.rows) copy_run(a.v, t, count);
      t += count;
    }
  }

  void rotate_token(int64_t t, Range q_heads, Range heads, const Scratch& own) const {
    const int64_t position = std::clamp<int64_t>(a.positions[t], 0, a.max_position - 1), half = a.rotary_half;
    kAngles[a.angle_dtype](a.cos, position * a.cos_stride, half, own.angles);
    kAngles[a.angle_dtype](a.sin, position * a.sin_stride, half, own.angles + whole_vectors(half));
    const int64_t q_bytes = kBytes[a.q_dtype], width = a.k.dim * from_bytes;
    for (int64_t h = q_heads.begin; h < q_heads.end; h++) {
      const char* from = (const char*)a.q + (t * a.q_token_stride + h * a.q_head_stride) * q_bytes;
      char* to = (char*)a.rotated + (t * a.rotated_token_stride + h * a.rotated_head_stride) * q_bytes;
      kTurners[a.q_dtype][a.interleaved](from, to, a.k.dim, own.angles, half);
    }
    if (a.slots[t] < 0) return;
    for (int64_t h = heads.begin; h < heads.end; h++)
      kTurners[a.source_dtype][a.interleaved](source(a.k, t, h), own.turned + (h - heads.begin) * width, a.k.dim,
                                              own.angles, half);
    store(a.k, a.slots[t], heads, own.turned, width, own);
    if (a.v.rows) store(a.v, t, heads, own);
  }
  void write_token(int64_t t, Range heads, const Scratch& own) const {
    if (a.slots[t] < 0) return;
    store(a.k, t, heads, own);
    if (a.v.rows) store(a.v, t, heads, own);
  }

  // What one thread does. Tokens are divided into `pieces`, each of some heads.
  void work(int64_t part, int64_t parts, int64_t pieces) const {
    const Range units = share(a.num_tokens * pieces, part, parts);
    if (!a.cos && pieces == 1 && as_it_is(a.k) && as_it_is(a.v)) return copy_tokens(units);
    const Scratch own(a);
    for (int64_t u = units.begin; u < units.end; u++) {
      const Range heads = share(a.num_kv_heads, u % pieces, pieces);
      if (a.cos) rotate_token(u / pieces, share(a.num_q_heads, u % pieces, pieces), heads, own);
      else write_token(u / pieces, heads, own);
    }
  }
};

} // namespace
} // namespace pagegen

// Stores k and v at their slots; with `cos`, also rotates q and k first: q into `rotated`, every row of it.
extern "C" void pagegen_write_kv(const pagegen_write_args* args) {
  using namespace pagegen;
  const pagegen_write_args& a = *args;
  const int64_t bytes = a.num_tokens * (a.num_kv_heads * (a.k.dim + a.v.dim) + a.num_q_heads * a.k.dim) * 2;
  const int threads = bytes < kSmallBytes ? 1 : (int)a.num_threads;
  const int64_t pieces = a.num_tokens < 8 * threads && threads > 1 ? a.num_kv_heads : 1;
  const Writing writing(a, bytes >= kSmallBytes);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    writing.work(omp_get_thread_num(), omp_get_num_threads(), pieces);
    if (writing.past_caches) fence_writes();
  }
}

extern "C" void pagegen_copy_blocks(const pagegen_copy_args* args) {
  using namespace pagegen;
  const pagegen_copy_args& a = *args;
  const int64_t bytes = a.num_pairs * a.block_size * a.num_kv_heads * (a.head_dim + a.v_head_dim) * a.element_bytes;
  const int threads = bytes < kSmallBytes ? 1 : (int)a.num_threads;
  const auto copy_block = [&](char* cache, pagegen_strides s, int64_t dim, const int64_t* pair) {
    const int64_t e = a.element_bytes;
    copy_box(cache + pair[1] * s.block * e, cache + pair[0] * s.block * e, {a.block_size, s.slot * e, s.slot * e},
             {a.num_kv_heads, s.head * e, s.head * e}, dim * e, bytes >= kSmallBytes);
  };
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < a.num_pairs; i++) {
      copy_block((char*)a.k_cache, a.k_strides, a.head_dim, a.pairs + 2 * i);
      if (a.v_cache) copy_block((char*)a.v_cache, a.v_strides, a.v_head_dim, a.pairs + 2 * i);
    }
    fence_writes();
  }
}

