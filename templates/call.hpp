// One call of the attention kernel, as the host fills it, and the score and mask functions that it may carry.
#pragma once

#include "vectors.hpp"

#include <algorithm>
#include <cstdlib>
#include <limits>

// Scales or zero points [num_blocks, block_size, num_kv_heads]; strides are 0 where they repeat.
struct pagegen_factors {
  const float* data;
  int64_t block_stride, slot_stride, head_stride;
};

struct pagegen_capture { // a tensor that a score or mask function captured
  const void* data;
  int64_t sizes[3], strides[3];
};

// Strides count elements (packed int4: bytes). Returns are through `out` and `lse` (may be null).
struct pagegen_attention_args {
  const void* q;
  const void* k_cache;
  const void* v_cache; // shared_kv: not read
  const int32_t* block_table;
  const int32_t* seq_lens;
  const int32_t* query_start_loc; // null: one query a sequence
  const float* alibi_slopes;      // [num_q_heads], or null
  const float* sinks;             // [num_q_heads], or null
  const uint8_t* tree_mask;       // [total_q, max_query_len] of this step's own tokens, or null
  const pagegen_capture* captures;
  void* out;
  float* lse;
  void* workspace;
  int64_t workspace_bytes;
  int64_t q_token_stride, q_head_stride;
  int64_t out_token_stride, out_head_stride;
  int64_t lse_token_stride;
  int64_t k_block_stride, k_slot_stride, k_head_stride;
  int64_t v_block_stride, v_slot_stride, v_head_stride;
  int64_t table_stride;
  int64_t tree_stride;
  int64_t num_seqs;
  int64_t num_threads;
  pagegen_factors k_scale, v_scale, k_zero, v_zero; // shared_kv: values are dequantised as keys are
  double scale;
};

namespace pagegen {
namespace {

// An element of a captured tensor; an index outside of it reads the nearest element.
template <class T, class... Index> PAGEGEN_INLINE T element(const pagegen_capture& from, Index... index) {
  int64_t offset = 0;
  int axis = 0;
  ((offset += std::clamp<int64_t>(index, 0, from.sizes[axis] - 1) * from.strides[axis], axis++), ...);
  return ((const T*)from.data)[offset];
}

// Where the CPU's division traps, which would end the process. Divisors come from captured tensors, and lanes of a tile
// past a sequence's last token are evaluated too: 0 there is nobody's mistake. At a key in use it is one; what it gives
// is unspecified then (0 here), but it is no crash.
template <class T> PAGEGEN_INLINE bool has_no_quotient(T a, T b) {
  return b == 0 || (b == -1 && a == std::numeric_limits<T>::min());
}

// Python's // and %: towards negative infinity
template <class A, class B> PAGEGEN_INLINE auto floor_div(A a, B b) {
  using T = decltype(a / b);
  if (has_no_quotient<T>(a, b)) return T{0};
  const T quotient = a / b, rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? T(quotient - 1) : quotient;
}
template <class A, class B> PAGEGEN_INLINE auto floor_mod(A a, B b) {
  using T = decltype(a % b);
  if (has_no_quotient<T>(a, b)) return T{0};
  const T rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? T(rest + b) : rest;
}

// The captured tensors by name, and the functions over them. The generator writes members and results where a spec
// has such functions (Constants::score_mod, ...); as they stand they change nothing.
struct Captured {
  const pagegen_capture* tensor;
};

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter" // an expression need not hold them all
struct Modifiers {
  // the score in natural units, scaled, capped and with its ALiBi
  static PAGEGEN_INLINE float score(Captured captured, float score, int32_t batch, int32_t head, int32_t q_pos,
                                    int32_t k_pos) {
    return score;
  }
  // whether the query of `head` at q_pos may attend the key at k_pos
  static PAGEGEN_INLINE bool mask(Captured captured, int32_t batch, int32_t head, int32_t q_pos, int32_t k_pos) {
    return true;
  }
  // the mask can only hold for low <= k_pos < high
  static PAGEGEN_INLINE int64_t low(Captured captured, int32_t batch, int32_t head, int32_t q_pos) {
    return 0;
  }
  static PAGEGEN_INLINE int64_t high(Captured captured, int32_t batch, int32_t head, int32_t q_pos) {
    return INT32_MAX;
  }
};
#pragma GCC diagnostic pop

} // namespace
} // namespace pagegen
