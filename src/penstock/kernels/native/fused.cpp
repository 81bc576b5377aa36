// Fused passes over rows of features on a CPU: residual + dropout + norm, and bias + activation, both directions.
//
// Rows are read as fp32, computed in a buffer in the L1 cache, and written once in their own type. Sums over rows
// (gradients of weights and biases) are computed in fp32 by each thread, then added up over threads. The file needs
// no header of torch. Threads come from the OpenMP library that torch has loaded, so there is one pool.
//
// Types: 0 is fp32, 1 is bf16. A null pointer means that the tensor is absent.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include <omp.h>

#include "rows.h"

namespace {

// A row as fp32: the row itself, or a copy in `buffer`.
inline const float* read(const void* data, int type, i64 row, i64 n, float* buffer) {
  if (type == 0) return static_cast<const float*>(data) + row * n;
  const Half* half = static_cast<const Half*>(data) + row * n;
#pragma omp simd
  for (i64 i = 0; i < n; ++i) buffer[i] = wide(half[i]);
  return buffer;
}

inline void write(void* data, int type, i64 row, i64 n, const float* values) {
  if (type == 0) {
    float* out = static_cast<float*>(data) + row * n;
    if (out != values) std::memcpy(out, values, n * sizeof(float));
    return;
  }
  Half* half = static_cast<Half*>(data) + row * n;
#pragma omp simd
  for (i64 i = 0; i < n; ++i) put(half[i], values[i]);
}

// A vector as fp32; if it is null, `filler` everywhere.
std::vector<float> vector_of(const void* data, int type, i64 n, float filler) {
  std::vector<float> values(n, filler);
  if (data) {
    const float* read_in = read(data, type, 0, n, values.data());
    if (read_in != values.data()) std::memcpy(values.data(), read_in, n * sizeof(float));
  }
  return values;
}

template <int kind, typename T>
void activation_rows(const void* product, const void* second, i64 stride, const float* bias, void* out, i64 begin,
                     i64 end, i64 n) {
  for (i64 row = begin; row < end; ++row) {
    const T* z = static_cast<const T*>(product) + row * stride;
    T* result = static_cast<T*>(out) + row * n;
    if (second) {
      const T* up = static_cast<const T*>(second) + row * stride;
#pragma omp simd
      for (i64 i = 0; i < n; ++i) {
        float x = wide(z[i]) + bias[i], share, slope;
        activate<kind>(x, share, slope);
        put(result[i], x * share * (wide(up[i]) + bias[n + i]));
      }
    } else {
#pragma omp simd
      for (i64 i = 0; i < n; ++i) {
        float x = wide(z[i]) + bias[i], share, slope;
        activate<kind>(x, share, slope);
        put(result[i], x * share);
      }
    }
  }
}

template <int kind, typename T>
void activation_gradient_rows(
    const void* product, const void* second, i64 stride, const float* bias, const void* gradient, void* out,
    void* second_out, float* sums, i64 begin, i64 end, i64 n) {
  for (i64 row = begin; row < end; ++row) {
    const T* z = static_cast<const T*>(product) + row * stride;
    const T* g = static_cast<const T*>(gradient) + row * n;
    T* result = static_cast<T*>(out) + row * stride;
    if (second) {
      const T* up_row = static_cast<const T*>(second) + row * stride;
      T* up_result = static_cast<T*>(second_out) + row * stride;
#pragma omp simd
      for (i64 i = 0; i < n; ++i) {
        float x = wide(z[i]) + bias[i], up = wide(up_row[i]) + bias[n + i], share, slope;
        activate<kind>(x, share, slope);
        float into_gate = wide(g[i]) * up * slope, into_up = wide(g[i]) * x * share;
        put(result[i], into_gate);
        put(up_result[i], into_up);
        sums[i] += into_gate;
        sums[n + i] += into_up;
      }
    } else {
#pragma omp simd
      for (i64 i = 0; i < n; ++i) {
        float share, slope;
        activate<kind>(wide(z[i]) + bias[i], share, slope);
        float into = wide(g[i]) * slope;
        put(result[i], into);
        sums[i] += into;
      }
    }
  }
}

template <typename X, typename B, typename N>
void add_norm_rows(
    const X* x, const B* branch, const uint8_t* kept, float scale, const float* weights, const float* biases, float eps,
    bool rms, X* sum, N* normed, float* means, float* inverses, i64 begin, i64 end, i64 n) {
  std::vector<float> buffer(n);
  float* v = buffer.data();
  for (i64 row = begin; row < end; ++row) {
    const X* a = x + row * n;
    const B* b = branch + row * n;
    X* s = sum + row * n;
    N* out = normed + row * n;
    // The norm reads the rounded sum.
    if (kept) {
      const uint8_t* here = kept + row * n;
#pragma omp simd
      for (i64 i = 0; i < n; ++i) {
        float added = wide(a[i]) + (here[i] ? wide(b[i]) * scale : 0.0f);
        put(s[i], added);
        v[i] = held(added, X());
      }
    } else {
#pragma omp simd
      for (i64 i = 0; i < n; ++i) {
        float added = wide(a[i]) + wide(b[i]);
        put(s[i], added);
        v[i] = held(added, X());
      }
    }
    Pair about = norm_row(v, weights, biases, eps, rms, out, n);
    means[row] = about.first;
    inverses[row] = about.second;
  }
}

template <typename X, typename B, typename N>
void add_norm_gradient_rows(
    const N* gradient, const X* sum_gradient, const X* sum, const float* means, const float* inverses,
    const uint8_t* kept, float scale, const float* weights, bool rms, X* into, B* into_branch, float* by_weight,
    float* by_bias, i64 begin, i64 end, i64 n) {
  std::vector<float> buffer(n);
  float* d = buffer.data();
  for (i64 row = begin; row < end; ++row) {
    const N* g = gradient + row * n;
    const X* v = sum + row * n;
    X* out = into + row * n;
    float mean = means[row], inverse = inverses[row];
    Pair totals = sums_of(n, [=](i64 i) {
      float weighted = wide(g[i]) * weights[i];
      return Pair{weighted, weighted * ((wide(v[i]) - mean) * inverse)};
    });
    float shift = rms ? 0.0f : totals.first / n, slope = totals.second / n;
#pragma omp simd
    for (i64 i = 0; i < n; ++i) {
      float unit = (wide(v[i]) - mean) * inverse, given = wide(g[i]);
      by_weight[i] += given * unit;
      by_bias[i] += given;
      d[i] = inverse * (given * weights[i] - shift - unit * slope);
    }
    if (sum_gradient) {
      const X* more = sum_gradient + row * n;
#pragma omp simd
      for (i64 i = 0; i < n; ++i) d[i] += wide(more[i]);
    }
#pragma omp simd
    for (i64 i = 0; i < n; ++i) put(out[i], d[i]);
    if (!into_branch) continue;
    B* other = into_branch + row * n;
    if (kept) {
      const uint8_t* here = kept + row * n;
#pragma omp simd
      for (i64 i = 0; i < n; ++i) put(other[i], here[i] ? d[i] * scale : 0.0f);
    } else {
#pragma omp simd
      for (i64 i = 0; i < n; ++i) put(other[i], d[i]);
    }
  }
}

// Adds up the threads' sums, (threads, n), and writes them in type T.
void write_sums(const std::vector<float>& sums, int threads, i64 stride, i64 offset, i64 n, void* out, int type) {
  if (!out) return;
  std::vector<float> total(n, 0.0f);
  for (int thread = 0; thread < threads; ++thread) {
    const float* part = sums.data() + thread * stride + offset;
#pragma omp simd
    for (i64 i = 0; i < n; ++i) total[i] += part[i];
  }
  write(out, type, 0, n, total.data());
}

// Calls work(thread, first row, row after the last) on each of `threads` threads.
template <typename Work>
void over_rows(int threads, i64 rows, const Work& work) {
#pragma omp parallel num_threads(threads)
  {
    i64 there = omp_get_num_threads(), thread = omp_get_thread_num();
    work(int(thread), rows * thread / there, rows * (thread + 1) / there);
  }
}

// Calls work(X, B, N) with an empty value of the type of the stream, of the branch and of the norm's output.
template <typename Work>
void of_types(int x_type, int branch_type, int normed_type, const Work& work) {
  auto with = [&](auto x, auto branch) { normed_type == 0 ? work(x, branch, 0.0f) : work(x, branch, Half()); };
  auto second = [&](auto x) { branch_type == 0 ? with(x, 0.0f) : with(x, Half()); };
  x_type == 0 ? second(0.0f) : second(Half());
}

}  // namespace

extern "C" {

// sum = x + branch (where `kept` is 1, times `scale`), normed = norm of the sum over n features.
void penstock_add_norm(
    const void* x, const void* branch, const uint8_t* kept, float scale, const void* weight, const void* bias, float eps,
    int rms, void* sum, void* normed, float* means, float* inverses, i64 rows, i64 n, int x_type, int branch_type,
    int weight_type, int normed_type, int threads) {
  std::vector<float> weights = vector_of(weight, weight_type, n, 1.0f), biases = vector_of(bias, weight_type, n, 0.0f);
  of_types(x_type, branch_type, normed_type, [&](auto of_x, auto of_branch, auto of_norm) {
    using X = decltype(of_x);
    using B = decltype(of_branch);
    using N = decltype(of_norm);
    over_rows(threads, rows, [&](int, i64 begin, i64 end) {
      add_norm_rows(
          static_cast<const X*>(x), static_cast<const B*>(branch), kept, scale, weights.data(), biases.data(), eps,
          rms != 0, static_cast<X*>(sum), static_cast<N*>(normed), means, inverses, begin, end, n);
    });
  });
}

// Gradients of the inputs of `penstock_add_norm`. `sum_gradient` is null if nothing else reads the sum. The branch's
// gradient is written only if it differs from that of x, because of a mask or of its type.
void penstock_add_norm_gradient(
    const void* normed_gradient, const void* sum_gradient, const void* sum, const float* means, const float* inverses,
    const uint8_t* kept, float scale, const void* weight, int rms, void* x_gradient, void* branch_gradient,
    void* weight_gradient, void* bias_gradient, i64 rows, i64 n, int x_type, int branch_type, int weight_type,
    int normed_type, int threads) {
  std::vector<float> weights = vector_of(weight, weight_type, n, 1.0f), sums(2 * n * threads, 0.0f);
  of_types(x_type, branch_type, normed_type, [&](auto of_x, auto of_branch, auto of_norm) {
    using X = decltype(of_x);
    using B = decltype(of_branch);
    using N = decltype(of_norm);
    over_rows(threads, rows, [&](int thread, i64 begin, i64 end) {
      float* part = sums.data() + thread * 2 * n;
      add_norm_gradient_rows(
          static_cast<const N*>(normed_gradient), static_cast<const X*>(sum_gradient), static_cast<const X*>(sum), means,
          inverses, kept, scale, weights.data(), rms != 0, static_cast<X*>(x_gradient),
          static_cast<B*>(branch_gradient), part, part + n, begin, end, n);
    });
  });
  write_sums(sums, threads, 2 * n, 0, n, weight_gradient, weight_type);
  write_sums(sums, threads, 2 * n, n, n, bias_gradient, weight_type);
}

// Calls FUNCTION of the activation and of the type of its rows.
#define OF_TYPE(FUNCTION, KIND, ...)                      \
  if (type == 0) FUNCTION<KIND, float>(__VA_ARGS__);      \
  else FUNCTION<KIND, Half>(__VA_ARGS__);                 \
  break
#define BY_KIND(FUNCTION, ...)                            \
  switch (kind) {                                         \
    case GELU: OF_TYPE(FUNCTION, GELU, __VA_ARGS__);      \
    case GELU_TANH: OF_TYPE(FUNCTION, GELU_TANH, __VA_ARGS__); \
    case SILU: OF_TYPE(FUNCTION, SILU, __VA_ARGS__);      \
    case GELU_QUICK: OF_TYPE(FUNCTION, GELU_QUICK, __VA_ARGS__); \
    default: OF_TYPE(FUNCTION, RELU, __VA_ARGS__);        \
  }

// out = a(product + bias), (rows, n); gated: times `second` + the second half of the bias. Rows of both are `stride` numbers
// apart: n, or 2n if they are two halves of one tensor. Without a gate `second` is null.
void penstock_activation(
    const void* product, const void* second, i64 stride, const void* bias, void* out, i64 rows, i64 n, int kind, int type,
    int bias_type, int threads) {
  std::vector<float> biases = vector_of(bias, bias_type, second ? 2 * n : n, 0.0f);
  over_rows(threads, rows, [&](int, i64 begin, i64 end) {
    BY_KIND(activation_rows, product, second, stride, biases.data(), out, begin, end, n)
  });
}

void penstock_activation_gradient(
    const void* product, const void* second, i64 stride, const void* bias, const void* gradient, void* out,
    void* second_out, void* bias_gradient, i64 rows, i64 n, int kind, int type, int bias_type, int threads) {
  i64 width = second ? 2 * n : n;
  std::vector<float> biases = vector_of(bias, bias_type, width, 0.0f), sums(width * threads, 0.0f);
  over_rows(threads, rows, [&](int thread, i64 begin, i64 end) {
    float* part = sums.data() + thread * width;
    BY_KIND(activation_gradient_rows, product, second, stride, biases.data(), gradient, out, second_out, part, begin,
            end, n)
  });
  write_sums(sums, threads, width, 0, width, bias_gradient, bias_type);
}

}  // extern "C"
