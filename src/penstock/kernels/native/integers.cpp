// Products of rows with weights in int8, for inference on CPUs with AVX512-VNNI: rows are rounded, multiplied and scaled
// in one pass; or, with AVX512-BF16, they stay in bf16 and the weights are widened.
//
//   y[m][n] = s[m] scale[n] (sum over k of q[m][k] w[n][k]) + middle[m] sums[n] + bias[n]
//
// Integers are summed exactly. Products of bf16 numbers are added in the order of k, two at a time. So a row's result
// depends neither on the other rows or their number, nor on the number of threads.
//
// Weights are in panels of 64 outputs: [panel][k / EACH][64][EACH], zeros after the last input and output. Types of x
// and of the result: 0 is fp32, 1 is bf16. A null pointer means that the tensor is absent.

#include "rounded.h"

namespace {

constexpr i64 FEW = 6;            // rows of one tile: a weight is multiplied by up to so many while it is read
constexpr i64 CHUNK = 64;         // words of a weight that are widened at a time, in the L1 cache

template <class T>
inline void scale_row(const float* totals, const float* scales, const float* bias, T* out, i64 n) {
  for (i64 i = 0; i < n; i += LANES) {
    __mmask16 lanes = first_lanes(n - i);
    V more = bias ? _mm512_maskz_loadu_ps(lanes, bias + i) : _mm512_setzero_ps();
    put_lanes(out + i, lanes, _mm512_fmadd_ps(_mm512_loadu_ps(totals + i), _mm512_maskz_loadu_ps(lanes, scales + i), more));
  }
}

// Pairs of bf16 numbers; those on the right are int8 in memory, which bf16 represents exactly.
struct NarrowPairs : Pairs {
  using Stored = u16;
  static V read(const Stored* at) {
    __m256i all = _mm256_loadu_si256((const __m256i*)at);
    V low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(all)));
    V high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(all, 1)));
    return _mm512_castsi512_ps((__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
};

template <class T>
void multiply_widened(const T* x, i64 rows, i64 inputs, i64 outputs, const u16* weight, const float* scales,
                      const float* bias, T* out, int threads) {
  i64 words = (inputs + Pairs::EACH - 1) / Pairs::EACH, bytes = words * 4;
  i64 block = std::min(rows, rows_of_block(bytes)), panels = (outputs + PANEL - 1) / PANEL;
  auto* halves = reinterpret_cast<u16*>(kept<0>(block * bytes));
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    auto* totals = reinterpret_cast<float*>(kept<2>(block * PANEL * 4));
    alignas(64) u32 wider[CHUNK * PANEL];
    for (i64 first = 0; first < rows; first += block) {
      i64 here = std::min(block, rows - first);
#pragma omp for schedule(static)
      for (i64 r = 0; r < here; ++r) {
        const T* from = x + (first + r) * inputs;
        u16* to = halves + r * words * 2;
#pragma omp simd
        for (i64 i = 0; i < inputs; ++i) to[i] = rounded(wide(from[i]));
        if (inputs % 2) to[inputs] = 0;
      }
#pragma omp for schedule(static)
      for (i64 panel = 0; panel < panels; ++panel) {
        i64 column = panel * PANEL, width = std::min(PANEL, outputs - column);
        const u16* numbers = weight + panel * words * PANEL;
        auto* left = reinterpret_cast<const u32*>(halves);
        if (here <= FEW)
          product<NarrowPairs>(here, PANEL, words, Left<u32>{left, words, 1}, Right<u16>{numbers, PANEL}, nullptr, 0,
                               totals, PANEL);
        for (i64 word = here <= FEW ? words : 0; word < words; word += CHUNK) {
          i64 depth = std::min(CHUNK, words - word);
          for (i64 i = 0; i < depth * PANEL; i += LANES)
            _mm512_store_ps(wider + i, NarrowPairs::read(numbers + word * PANEL + i));
          product<Pairs>(here, PANEL, depth, Left<u32>{left + word, words, 1}, Right<u32>{wider, PANEL},
                         word ? totals : nullptr, PANEL, totals, PANEL);
        }
        for (i64 r = 0; r < here; ++r) {
          const float* more = bias ? bias + column : nullptr;
          scale_row(totals + r * PANEL, scales + column, more, out + (first + r) * outputs + column, width);
        }
      }
    }
  }
}

}  // namespace

extern "C" {

// x (rows, inputs), rounded with the inverse of a given scale, by each row's size or by its range, times a weight of
// `outputs` in panels of four inputs: out (rows, outputs). `row_sizes` may be null: those of the rows of x. With a given
// scale, `scales` are those of the product.
void penstock_int8_product(int type, const i64* sizes, const void* x, int scaling, float inverse, const float* row_sizes,
                           const void* weight, const int32_t* zeros, const float* scales, const float* sums,
                           const float* bias, void* out, int threads) {
  Outputs of{zeros, scales, sums, bias};
  auto run = [&](auto of_type) {
    using T = decltype(of_type);
    auto source = [=](i64 row) { return static_cast<const T*>(x) + row * sizes[1]; };
    auto then = [](i64, i64, T*, i64) {};
    auto product = [&](auto by) {
      multiply<decltype(by)::value>(source, sizes[0], sizes[1], sizes[2], inverse, row_sizes,
                                    static_cast<const u32*>(weight), of, static_cast<T*>(out), then, threads);
    };
    with_scaling(scaling, product);
  };
  type == 0 ? run(0.0f) : run(Half());
}

// x (rows, inputs) in bf16 times a weight in panels of two inputs: out (rows, outputs).
void penstock_widened_product(int type, const i64* sizes, const void* x, const u16* weight, const float* scales,
                              const float* bias, void* out, int threads) {
  auto run = [&](auto of_type) {
    using T = decltype(of_type);
    multiply_widened(static_cast<const T*>(x), sizes[0], sizes[1], sizes[2], weight, scales, bias, static_cast<T*>(out),
                     threads);
  };
  type == 0 ? run(0.0f) : run(Half());
}
}
