// Cross entropy of rows of logits on a CPU: losses and log-sum-exps forward, gradients backward, each with one
// exponential per logit. Rows are read in blocks that fit in the L1 cache. For logits z, a target t, V columns,
// smoothing e and a z-loss y
//
//   L = log sum exp z            loss = L - (1 - e) z_t - e mean z + y L^2
//   gradient = (exp(z - L) (1 + 2 y L) - e / V - (1 - e) [t]) factor
//
// No header of torch is included. Threads come from the OpenMP library that torch has loaded, so there is one pool.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include <omp.h>

#include "numbers.h"

namespace {

// Logits of a row that are read twice while they are in the L1 cache.
constexpr i64 BLOCK = 2048;

// Returns whether all targets are columns or ignored.
template <typename T>
bool losses(const T* logits, const i64* targets, i64 rows, i64 columns, i64 stride, float smoothing, float z_loss,
            i64 ignored, float* loss, double* lse, int threads) {
  bool valid = true;
#pragma omp parallel for num_threads(threads) reduction(&& : valid)
  for (i64 row = 0; row < rows; ++row) {
    const T* z = logits + row * stride;
    float most = -INFINITY, total = 0.0f, sum = 0.0f;
    for (i64 first = 0; first < columns; first += BLOCK) {
      i64 n = std::min(BLOCK, columns - first);
      const T* part = z + first;
      float top = -INFINITY, plain = 0.0f, add = 0.0f;
#pragma omp simd reduction(max : top) reduction(+ : plain)
      for (i64 i = 0; i < n; ++i) {
        float v = wide(part[i]);
        top = v > top ? v : top;
        plain += v;
      }
      sum += plain;
      float now = std::max(most, top);
      if (now == -INFINITY) continue;  // all logits so far are masked
#pragma omp simd reduction(+ : add)
      for (i64 i = 0; i < n; ++i) add += exponential(wide(part[i]) - now);
      total = (total > 0 ? total * std::exp(most - now) : 0.0f) + add;
      most = now;
    }
    double l = double(most) + std::log(double(total));
    lse[row] = l;
    i64 t = targets[row];
    if (t != ignored && (t < 0 || t >= columns)) {
      valid = false;
      continue;
    }
    // The mean is read only with smoothing: logits of -inf would make it 0 times infinity.
    float mean = smoothing ? smoothing * (sum / columns) : 0.0f;
    loss[row] = t == ignored ? 0.0f : float(l) - (1.0f - smoothing) * wide(z[t]) - mean + z_loss * float(l * l);
  }
  return valid;
}

template <typename T>
void gradients(const T* logits, T* out, const i64* targets, const double* lse, const float* factors, i64 rows,
               i64 columns, i64 stride, i64 out_stride, float smoothing, float z_loss, i64 ignored, int threads) {
#pragma omp parallel for num_threads(threads)
  for (i64 row = 0; row < rows; ++row) {
    const T* z = logits + row * stride;
    T* g = out + row * out_stride;
    i64 t = targets[row];
    if (t == ignored) {
      std::memset(g, 0, columns * sizeof(T));
      continue;
    }
    // The sum in two parts: in a single fp32 number, its rounding error would be in every probability.
    float high = float(lse[row]), low = float(lse[row] - high);
    float f = factors[row], s = smoothing / columns, up = 1.0f + 2.0f * z_loss * high;
    float own = (std::exp((wide(z[t]) - high) - low) * up - s - (1.0f - smoothing)) * f;
#pragma omp simd
    for (i64 i = 0; i < columns; ++i) put(g[i], (exponential((wide(z[i]) - high) - low) * up - s) * f);
    put(g[t], own);
  }
}

}  // namespace

extern "C" int penstock_row_losses(const void* z, int type, const i64* t, i64 rows, i64 columns, i64 stride,
                                   float smoothing, float z_loss, i64 ignored, float* loss, double* lse, int threads) {
  if (type == 1)
    return losses((const Half*)z, t, rows, columns, stride, smoothing, z_loss, ignored, loss, lse, threads);
  return losses((const float*)z, t, rows, columns, stride, smoothing, z_loss, ignored, loss, lse, threads);
}

extern "C" void penstock_row_gradients(const void* z, void* g, int type, const i64* t, const double* lse,
                                       const float* factors, i64 rows, i64 columns, i64 stride, i64 out_stride,
                                       float smoothing, float z_loss, i64 ignored, int threads) {
  if (type == 1)
    gradients((const Half*)z, (Half*)g, t, lse, factors, rows, columns, stride, out_stride, smoothing, z_loss, ignored,
              threads);
  else
    gradients((const float*)z, (float*)g, t, lse, factors, rows, columns, stride, out_stride, smoothing, z_loss,
              ignored, threads);
}
