// Rotary position embeddings of rows (RoFormer, arXiv 2104.09864).
#pragma once

#include "quantise.hpp"

#include <utility>

namespace pagegen {
namespace {

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

// Pairs i .. i + W of a row by their angles: in float32, rounded once.
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

} // namespace
} // namespace pagegen
