// Merging partial states of attention on CPUs: of the same queries over disjoint keys.
//
//   out  [num_rows, num_heads, dim], last stride 1, other strides in elements
//   lse  float32 [num_rows, num_heads], natural logarithms; -inf: an empty state, whose output is not read
//
// A state weighs exp(lse - the largest lse); an infinite lse outweighs all finite ones, several share. Sums are
// float32, in the order of the states. A row depends on its own states alone, so threads change no bit. The target may
// be one of the states: what is written was read before.
#pragma once

#include "copies.hpp"
#include "functions.hpp"

#include <algorithm>
#include <cstdlib>
#include <omp.h>

struct pagegen_state {
  void* out;
  float* lse;
  const int64_t* rows; // where the tensors hold them; null: 0, 1, ...
  int64_t row_stride, head_stride, lse_row_stride, lse_head_stride;
};

struct pagegen_merge_args {
  int64_t num_states, num_rows, num_heads, dim;
  int64_t dtype; // 0 float32, 1 float16, 2 bfloat16
  int64_t num_threads;
  pagegen_state states[1]; // the target, then the states
};

namespace pagegen {
namespace {

// Of a call: below it, waking threads costs more than they save, and lines are left in the caches for who reads them
// next. An element is counted as two bytes whatever it is.
constexpr int64_t kSmallBytes = 64 << 10;
// Results of so many bytes are written past the caches: 1.15 to 1.3 times as fast, and no slower (1.0 to 1.1) when who
// reads them first is counted in. Below, that one pays.
constexpr int64_t kLargeResult = 1 << 20;

inline int64_t state_row(const pagegen_state& s, int64_t row) { return s.rows ? s.rows[row] : row; }
inline float* state_lse(const pagegen_state& s, int64_t row, int64_t head) {
  return s.lse + state_row(s, row) * s.lse_row_stride + head * s.lse_head_stride;
}
template <class T> T* state_out(const pagegen_state& s, int64_t row, int64_t head) {
  return (T*)s.out + state_row(s, row) * s.row_stride + head * s.head_stride;
}

// N vectors of columns from `c` on. `from` and `share` hold `count` states that weigh more than nothing.
template <int N, class T>
PAGEGEN_INLINE void merge_columns(const T* const* from, const float* share, int64_t count, int64_t c, T* to) {
  vf total[N];
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) total[i] = count ? load_float(from[0] + c + i * W) * share[0] : vf{};
  for (int64_t s = 1; s < count; s++)
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) total[i] = fma(load_float(from[s] + c + i * W), splat(share[s]), total[i]);
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) store_float(to + c + i * W, total[i]);
}

template <class T> void merge_rows(const T* const* from, const float* share, int64_t count, T* to, int64_t dim) {
  int64_t c = 0;
  for (; c + 4 * W <= dim; c += 4 * W) merge_columns<4>(from, share, count, c, to);
  for (; c + W <= dim; c += W) merge_columns<1>(from, share, count, c, to);
  if (c == dim) return;
  vf total = {};
  alignas(64) T rest[W] = {};
  for (int64_t s = 0; s < count; s++) {
    std::memcpy((void*)rest, from[s] + c, (dim - c) * sizeof(T));
    const vf x = load_float(rest);
    total = s ? fma(x, splat(share[s]), total) : x * share[s];
  }
  store_float(rest, total);
  std::memcpy((void*)(to + c), rest, (dim - c) * sizeof(T));
}

// e^x of x <= 0. What is below 2^-126 is a square, since exp2 ends there.
PAGEGEN_INLINE vf falling_exp(vf x) {
  const vf y = x * 1.4426950408889634f, root = exp2(y * 0.5f);
  return select(y < -126.0f, root * root, exp2(y));
}

// What one thread needs for W heads of a row.
struct MergeScratch {
  vf* weights;       // of every state
  float* made;       // a head's result on its way past the caches
  const void** from; // of the states of one head that weigh more than nothing: their rows
  float* share;

  MergeScratch(const MergeScratch&) = delete;
  explicit MergeScratch(const pagegen_merge_args& a) {
    const int64_t line = (a.dim * sizeof(float) + 63) / 64 * 64;
    const int64_t bytes = line + a.num_states * (sizeof(vf) + sizeof(void*) + sizeof(float));
    weights = (vf*)std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    made = (float*)(weights + a.num_states);
    from = (const void**)((char*)made + line);
    share = (float*)(from + a.num_states);
  }
  ~MergeScratch() { std::free(weights); }
};

// The heads [head, head + count) of a row, W at most.
template <class T>
void merge_states(const pagegen_merge_args& a, int64_t row, int64_t head, int count, bool past_caches,
                  const MergeScratch& own) {
  const pagegen_state& target = a.states[0];
  const pagegen_state* states = a.states + 1;
  const vf infinity = splat(INFINITY);
  vf top = -infinity;
  for (int64_t s = 0; s < a.num_states; s++) {
    vf lse = -infinity;
    for (int i = 0; i < count; i++) lse[i] = *state_lse(states[s], row, head + i);
    own.weights[s] = lse;
    top = select(lse > top, lse, top); // not NaN, which weighs NaN whatever this is
  }
  vf total = {};
  for (int64_t s = 0; s < a.num_states; s++) {
    const vf lse = own.weights[s];
    // neither inf - inf nor -inf - -inf, which an empty state among empty ones would be
    const vf weight = select(lse == infinity, splat(1.0f), falling_exp(lse - top));
    own.weights[s] = select(lse == -infinity, vf{}, weight);
    total += own.weights[s];
  }
  for (int i = 0; i < count; i++) {
    int64_t live = 0;
    for (int64_t s = 0; s < a.num_states; s++) {
      if (own.weights[s][i] == 0.0f) continue;
      own.from[live] = state_out<T>(states[s], row, head + i);
      own.share[live++] = own.weights[s][i] / total[i];
    }
    T* to = state_out<T>(target, row, head + i);
    const int64_t bytes = a.dim * sizeof(T);
    const bool past = past_caches && goes_past_caches(to, bytes);
    merge_rows((const T* const*)own.from, own.share, live, past ? (T*)own.made : to, a.dim);
    if (past) copy_past_caches((char*)to, (const char*)own.made, bytes);
    const float sum = total[i] == 0.0f ? 1.0f : total[i];
    *state_lse(target, row, head + i) = sum == 1.0f ? top[i] : top[i] + std::log(sum);
  }
}

} // namespace
} // namespace pagegen

extern "C" void pagegen_merge_states(const pagegen_merge_args* args) {
  using namespace pagegen;
  const pagegen_merge_args& a = *args;
  const auto merge = a.dtype == 0 ? merge_states<float> : a.dtype == 1 ? merge_states<fp16> : merge_states<bf16>;
  const int64_t elements = a.num_rows * a.num_heads * a.dim;
  const int threads = elements * (a.num_states + 1) * 2 < kSmallBytes ? 1 : (int)a.num_threads;
  const bool past_caches = elements * (a.dtype == 0 ? 4 : 2) >= kLargeResult;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const MergeScratch own(a);
    const int64_t pieces = (a.num_heads + W - 1) / W;
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < a.num_rows * pieces; i++) {
      const int64_t head = i % pieces * W;
      merge(a, i / pieces, head, (int)std::min<int64_t>(W, a.num_heads - head), past_caches, own);
    }
    if (past_caches) fence_writes();
  }
}
