// Passes over one row of fp32 numbers: sums, norms and activations, shared by the fused passes and by whole blocks.

#pragma once

#include <cmath>

#include "numbers.h"

namespace {

// Two sums over a row, four vectors at a time, so that no addition waits for the one before.
constexpr i64 ABREAST = 64;

struct Pair {
  float first, second;
};

template <typename Terms>
inline Pair sums_of(i64 n, const Terms& terms) {
  float first[ABREAST] = {}, second[ABREAST] = {};
  i64 whole = n - n % ABREAST;
  for (i64 i = 0; i < whole; i += ABREAST) {
#pragma omp simd
    for (i64 lane = 0; lane < ABREAST; ++lane) {
      Pair one = terms(i + lane);
      first[lane] += one.first;
      second[lane] += one.second;
    }
  }
  for (i64 i = whole; i < n; ++i) {
    Pair one = terms(i);
    first[i - whole] += one.first;
    second[i - whole] += one.second;
  }
  Pair total = {0.0f, 0.0f};
  for (i64 lane = 0; lane < ABREAST; ++lane) {
    total.first += first[lane];
    total.second += second[lane];
  }
  return total;
}

template <typename Term>
inline float sum_of(i64 n, const Term& term) {
  float parts[ABREAST] = {}, total = 0.0f;
  i64 whole = n - n % ABREAST;
  for (i64 i = 0; i < whole; i += ABREAST) {
#pragma omp simd
    for (i64 lane = 0; lane < ABREAST; ++lane) parts[lane] += term(i + lane);
  }
  for (i64 i = whole; i < n; ++i) parts[i - whole] += term(i);
  for (i64 lane = 0; lane < ABREAST; ++lane) total += parts[lane];
  return total;
}

// The norm of a row v over n features. Returns the mean, 0 for RMS norms, and the inverse of the deviation.
template <typename N>
inline Pair norm_row(const float* v, const float* weights, const float* biases, float eps, bool rms, N* out, i64 n) {
  float mean = rms ? 0.0f : sum_of(n, [=](i64 i) { return v[i]; }) / n;
  float square = sum_of(n, [=](i64 i) { return (v[i] - mean) * (v[i] - mean); });
  float inverse = 1.0f / std::sqrt(square / n + eps);
#pragma omp simd
  for (i64 i = 0; i < n; ++i) put(out[i], (v[i] - mean) * inverse * weights[i] + biases[i]);
  return {mean, inverse};
}

enum Kind { GELU = 0, GELU_TANH = 1, SILU = 2, RELU = 3, GELU_QUICK = 4 };

// The share of x that an activation returns, a(x) = x * share, and its slope a'(x).
template <int kind>
inline void activate(float x, float& share, float& slope) {
  if (kind == RELU) {
    share = slope = x <= 0 ? 0.0f : 1.0f;
  } else if (kind == GELU) {
    // share = (1 + erf(x / sqrt 2)) / 2: near 0 by the series of erf; elsewhere by e^(-x^2 / 2), which the slope needs,
    // and a polynomial of degree 6 of 1 / (1 + 0.24 |x|), as in Abramowitz & Stegun (7.1.26).
    float square = x * x, bell = exponential(-0.5f * square), t = 1.0f / (1.0f + 0.24f * std::fabs(x));
    float near = 6.6596e-7f;
    near = near * square - 9.4447e-6f;
    near = near * square + 1.154345e-4f;
    near = near * square - 1.1873283e-3f;
    near = near * square + 9.9735570e-3f;
    near = near * square - 6.6490380e-2f;
    near = near * square + 3.9894228e-1f;
    float tail = -0.121860778f;
    tail = tail * t + 0.539195601f;
    tail = tail * t - 0.615716717f;
    tail = tail * t + 0.593852520f;
    tail = tail * t - 0.135511512f;
    tail = tail * t + 0.149779807f;
    tail = tail * t + 0.0902610894f;
    tail *= bell * t;
    share = std::fabs(x) < 1.0f ? 0.5f + x * near : x < 0 ? tail : 1.0f - tail;
    slope = share + x * bell * 0.398942280f;
  } else {
    // x * sigmoid(u): u is x for SiLU, 1.702 x for the quick GELU, 2 sqrt(2 / pi) (x + 0.044715 x^3) for the tanh form.
    float linear = kind == SILU ? 1.0f : kind == GELU_QUICK ? 1.702f : 1.59576912f;
    float u = kind == GELU_TANH ? x * (linear + 0.0713548162f * x * x) : linear * x;
    float du = kind == GELU_TANH ? linear + 0.214064449f * x * x : linear;
    float small = exponential(-std::fabs(u));
    float large = 1.0f / (1.0f + small);
    share = u < 0 ? small * large : large;
    slope = share + x * small * large * large * du;
  }
}

}  // namespace
