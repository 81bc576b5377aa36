// Products of rows with weights in int8, for inference on CPUs with AVX512-VNNI: rows are rounded, multiplied and scaled
// in one pass; or, with AVX512-BF16, they stay in bf16 and the weights are widened.
//
//   y[m][n] = s[m] scale[n] (sum over k of q[m][k] w[n][k]) + middle[m] sums[n] + bias[n]
//
// Whole numbers are summed exactly. Sums of bf16 products are made in the order of k, two at a time. So a row's result
// does not depend on the other rows, on how many there are, nor on the number of threads.
//
// Weights lie in panels of 64 outputs: [panel][k / EACH][64][EACH], with zeros past the last input and output. Types of x
// and of the result: 0 is fp32, 1 is bf16. A null pointer stands for a tensor that is not there.

#include <omp.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "products.h"

namespace {

constexpr i64 MOST_ROWS = 240;    // that are multiplied before the next panel is read: a multiple of the six of a tile
constexpr i64 BLOCK = 1 << 18;    // bytes of their numbers, which stay in the second cache
constexpr i64 FEW = 6;            // rows by which a weight is multiplied as it is read, of one tile
constexpr i64 CHUNK = 64;         // words of a weight that are widened at a time, and stay in the first
constexpr float LEAST = 1e-12f;   // the least range or size of a row
constexpr float MOST = 127.0f;
constexpr u32 INFINITE = 0x7f800000u;  // bits of infinity; those of NaN are larger
enum Scaling { GIVEN = 0, BY_SIZE = 1, BY_RANGE = 2 };

// Four products of whole numbers, unsigned on the left; sums are int32 in the lanes' bits.
struct Quads {
  using Element = uint8_t;
  using Word = u32;
  using Stored = Word;
  static constexpr i64 EACH = 4;
  static V broadcast(const Word* at) { return Pairs::broadcast(at); }
  static V read(const Word* at) { return _mm512_loadu_ps(at); }
  static V add(V sums, V left, V right) {
    return _mm512_castsi512_ps(_mm512_dpbusd_epi32(_mm512_castps_si512(sums), _mm512_castps_si512(left),
                                                   _mm512_castps_si512(right)));
  }
};

struct Row {
  float scale, middle;
};

// Whole numbers from -128 to 127, each 128 higher, of (x - middle) * inverse.
template <class T>
inline void round_row(const T* x, i64 n, float middle, float inverse, uint8_t* out) {
#pragma omp simd
  for (i64 i = 0; i < n; ++i) {
    float whole = std::nearbyint((wide(x[i]) - middle) * inverse);
    whole = whole < -128.0f ? -128.0f : whole > 127.0f ? 127.0f : whole;
    out[i] = uint8_t(int32_t(whole) + 128);
  }
}

// `given` is the inverse of a given scale, or the size of the row; 0 where that is to be found.
template <int scaling, class T>
inline Row round_by(float given, const T* x, i64 n, uint8_t* out) {
  if (scaling == GIVEN) {
    round_row(x, n, 0.0f, given, out);
    return {1.0f, 0.0f};
  }
  float low = wide(x[0]), high = low;
  u32 largest = 0;  // magnitude by its bits, which compilers do not simplify as they do NaN * 0
#pragma omp simd reduction(min : low) reduction(max : high) reduction(max : largest)
  for (i64 i = 0; i < n; ++i) {
    float value = wide(x[i]);
    u32 bits;
    std::memcpy(&bits, &value, 4);
    low = value < low ? value : low;
    high = value > high ? value : high;
    largest = std::max(largest, bits & 0x7fffffffu);
  }
  float zero = largest < INFINITE ? 0.0f : NAN;
  if (scaling == BY_SIZE) {
    float size = given ? given : std::max(std::max(std::fabs(low), std::fabs(high)), LEAST);
    round_row(x, n, 0.0f, 1.0f / size * MOST, out);  // as torch divides a number by a tensor
    return {size / MOST + zero, 0.0f};
  }
  float middle = (low + high) / 2, scale = std::max((high - low) / (2 * MOST), LEAST);
  round_row(x, n, middle, 1.0f / scale, out);
  return {scale + zero, middle + zero};
}

// What a product is made of besides its factors.
struct Outputs {
  const int32_t* zeros;  // 128 times the sum of each output's numbers
  const float *scales, *sums, *bias;
};

// To the nearest, ties to even; NaN stays NaN: as `rounded`, of sixteen numbers, on CPUs with and without bf16.
inline void put_lanes(Half* to, __mmask16 lanes, V values) {
  __m512i bits = _mm512_castps_si512(values), one = _mm512_set1_epi32(1);
  __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
  __m512i up = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), even), 16);
  __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  _mm256_mask_storeu_epi16(to, lanes, _mm512_cvtepi32_epi16(_mm512_mask_set1_epi32(up, nan, 0x7fc0)));
}

// y = s * (sums * scale) + middle * sums + bias, of one row; multiplications and additions as torch's `addcmul` has them.
template <int scaling, class T>
inline void scale_row(const int32_t* totals, Row row, Outputs of, T* out, i64 n) {
  V scale = _mm512_set1_ps(row.scale), middle = _mm512_set1_ps(row.middle);
  for (i64 i = 0; i < n; i += LANES) {
    __mmask16 lanes = first_lanes(n - i);
    __m512i zeros = _mm512_maskz_loadu_epi32(lanes, of.zeros + i);
    V total = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_load_si512(totals + i), zeros));
    V factor = _mm512_maskz_loadu_ps(lanes, of.scales + i);
    V bias = of.bias ? _mm512_maskz_loadu_ps(lanes, of.bias + i) : _mm512_setzero_ps();
    if (scaling == GIVEN) {
      put_lanes(out + i, lanes, _mm512_fmadd_ps(total, factor, bias));
      continue;
    }
    if (scaling == BY_RANGE) bias = _mm512_fmadd_ps(middle, _mm512_maskz_loadu_ps(lanes, of.sums + i), bias);
    put_lanes(out + i, lanes, _mm512_fmadd_ps(_mm512_mul_ps(total, factor), scale, bias));
  }
}

template <class T>
inline void scale_row(const float* totals, const float* scales, const float* bias, T* out, i64 n) {
  for (i64 i = 0; i < n; i += LANES) {
    __mmask16 lanes = first_lanes(n - i);
    V more = bias ? _mm512_maskz_loadu_ps(lanes, bias + i) : _mm512_setzero_ps();
    put_lanes(out + i, lanes, _mm512_fmadd_ps(_mm512_loadu_ps(totals + i), _mm512_maskz_loadu_ps(lanes, scales + i), more));
  }
}

// Memory that the calling thread keeps: a new piece for each product would be mapped page by page.
template <int which>
char* kept(i64 bytes) {
  static thread_local std::vector<char> room;
  if (i64(room.size()) < bytes + 64) room.resize(bytes + 64);
  return reinterpret_cast<char*>((uintptr_t(room.data()) + 63) / 64 * 64);
}

// Rows that are multiplied at once, of so many bytes each.
inline i64 rows_of_block(i64 bytes) { return std::max<i64>(48, std::min(MOST_ROWS, BLOCK / bytes / 6 * 6)); }

template <int scaling, class T>
void multiply(const T* x, i64 rows, i64 inputs, i64 outputs, float inverse, const float* row_sizes, const u32* weight,
              Outputs of, T* out, int threads) {
  constexpr i64 HEIGHT = 48;  // rows whose sums stay in the first cache
  i64 words = (inputs + Quads::EACH - 1) / Quads::EACH, bytes = words * Quads::EACH;
  i64 block = std::min(rows, rows_of_block(bytes)), panels = (outputs + PANEL - 1) / PANEL;
  auto* numbers = reinterpret_cast<uint8_t*>(kept<0>(block * bytes));
  auto* scaled = reinterpret_cast<Row*>(kept<1>(block * i64(sizeof(Row))));
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    alignas(64) int32_t totals[HEIGHT * PANEL];
    for (i64 first = 0; first < rows; first += block) {
      i64 here = std::min(block, rows - first);
#pragma omp for schedule(static)
      for (i64 r = 0; r < here; ++r) {
        uint8_t* row = numbers + r * bytes;
        float given = row_sizes ? row_sizes[first + r] : inverse;
        scaled[r] = round_by<scaling>(given, x + (first + r) * inputs, inputs, row);  // past it weights are zero
      }
#pragma omp for schedule(static)
      for (i64 panel = 0; panel < panels; ++panel) {
        i64 column = panel * PANEL, width = std::min(PANEL, outputs - column);
        Outputs part{of.zeros + column, of.scales + column, of.sums ? of.sums + column : nullptr,
                     of.bias ? of.bias + column : nullptr};
        for (i64 r = 0; r < here; r += HEIGHT) {
          i64 height = std::min(HEIGHT, here - r);
          product<Quads>(height, width, words, Left<u32>{reinterpret_cast<const u32*>(numbers) + r * words, words, 1},
                         Right<u32>{weight + panel * words * PANEL, PANEL}, nullptr, 0,
                         reinterpret_cast<float*>(totals), PANEL);
          for (i64 i = 0; i < height; ++i)
            scale_row<scaling>(totals + i * PANEL, scaled[r + i], part, out + (first + r + i) * outputs + column, width);
        }
      }
    }
  }
}

// Pairs of bf16 numbers, on the right of int8 in memory: bf16 holds each of them.
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
    auto product = scaling == GIVEN ? multiply<GIVEN, T> : scaling == BY_SIZE ? multiply<BY_SIZE, T> : multiply<BY_RANGE, T>;
    product(static_cast<const T*>(x), sizes[0], sizes[1], sizes[2], inverse, row_sizes, static_cast<const u32*>(weight),
            of, static_cast<T*>(out), threads);
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
