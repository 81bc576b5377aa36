// AdamW on a CPU, over many tensors in one pass. While a number is in a register, its gradient is divided by a common
// divisor (loss scale and clipping), its moments and weight are updated, its half copy is rounded and its average is
// moved: see `penstock.kernels.adamw`. For a weight w, a gradient g and moments m and v,
//
//   g /= scale      w *= 1 - lr decay      m += (1 - b1) (g - m)      v = b2 v + (1 - b2) g g
//   w -= step m / (sqrt(v) / root + eps)   average += part (w - average)
//
// Each operation is rounded separately, in fp32. With -ffp-contract=off, every CPU returns the same bits. The file
// includes no header of torch. Threads come from the OpenMP library that torch has loaded, so there is one pool.
//
// Types of gradients: 0 is fp32, 1 is bf16. A null pointer means that the tensor is absent.

#include <cmath>
#include <cstdint>
#include <vector>

#include <omp.h>

#include "numbers.h"

namespace {

// Numbers of one step that all tensors share.
struct Hyper {
  float decay, part1, beta2, part2, eps, scale, sign, average_part;
};

// One tensor, and the two numbers that depend on how many steps it has taken.
struct Tensor {
  i64 size;
  float* weight;
  Half* copy;
  const void* gradient;
  float *first, *second, *average;
  float root, step;
};

// Numbers `begin` to `end` of a tensor.
template <typename Gradient, bool copies, bool averages>
void update(const Tensor& t, const Hyper& h, i64 begin, i64 end) {
  const Gradient* gradients = static_cast<const Gradient*>(t.gradient);
#pragma omp simd
  for (i64 i = begin; i < end; ++i) {
    float g = wide(gradients[i]) / h.scale * h.sign;
    float w = t.weight[i];
    w = w * h.decay;
    float m = t.first[i] + h.part1 * (g - t.first[i]);
    float v = t.second[i] * h.beta2 + h.part2 * g * g;
    w = w - (t.step * m) / (std::sqrt(v) / t.root + h.eps);
    t.first[i] = m;
    t.second[i] = v;
    t.weight[i] = w;
    if (copies) put(t.copy[i], w);
    if (averages) t.average[i] = t.average[i] + (w - t.average[i]) * h.average_part;
  }
}

using Update = void (*)(const Tensor&, const Hyper&, i64, i64);

template <typename Gradient>
Update update_of(const Tensor& t) {
  if (t.copy) return t.average ? update<Gradient, true, true> : update<Gradient, true, false>;
  return t.average ? update<Gradient, false, true> : update<Gradient, false, false>;
}

}  // namespace

// `arrays` has seven addresses for each tensor: weight, gradient, both moments, copy, average, and the count of steps,
// this one included. `types` are those of gradients. `numbers`: lr, beta1, beta2, eps, decay, sign of gradients, and
// how far averages move. `divisor` and `stops` may be null. If `stops` is not 0, nothing changes.
extern "C" void penstock_adamw(i64 count, const i64* sizes, void* const* arrays, const int* types, const float* divisor,
                               const float* stops, const double* numbers, int threads) {
  if (stops && *stops != 0) return;
  double lr = numbers[0], beta1 = numbers[1], beta2 = numbers[2];
  Hyper h{float(1 - lr * numbers[4]), float(1 - beta1), float(beta2), float(1 - beta2), float(numbers[3]),
          divisor ? *divisor : 1.0f, float(numbers[5]), float(numbers[6])};
  std::vector<Tensor> tensors;
  std::vector<i64> ends;
  i64 total = 0;
  for (i64 i = 0; i < count; ++i) {
    void* const* a = arrays + 7 * i;
    double taken = *static_cast<const float*>(a[6]);
    tensors.push_back({sizes[i], (float*)a[0], (Half*)a[4], a[1], (float*)a[2], (float*)a[3], (float*)a[5],
                       float(std::pow(1 - std::pow(beta2, taken), 0.5)),
                       float(lr / (1 - std::pow(beta1, taken)))});
    ends.push_back(total += sizes[i]);
  }
  // Each thread takes an equal stretch of all numbers, laid end to end.
#pragma omp parallel num_threads(threads)
  {
    i64 there = omp_get_num_threads(), thread = omp_get_thread_num();
    i64 from = total * thread / there, to = total * (thread + 1) / there;
    for (i64 i = 0; i < count; ++i) {
      i64 start = ends[i] - sizes[i], begin = std::max(from - start, i64(0)), end = std::min(to - start, sizes[i]);
      if (begin >= end) continue;
      (types[i] == 1 ? update_of<Half>(tensors[i]) : update_of<float>(tensors[i]))(tensors[i], h, begin, end);
    }
  }
}
