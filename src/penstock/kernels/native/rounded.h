// Products of rows, rounded to 8 bits, with weights in int8, on CPUs with AVX512-VNNI: shared by the kernel of one
// linear layer and that of whole blocks. integers.cpp has the formula and the layout of weights.

#pragma once

#include <omp.h>

#include <cmath>
#include <type_traits>
#include <vector>

#include "products.h"

namespace {

constexpr i64 MOST_ROWS = 240;    // multiplied before the next panel is read: a multiple of a tile's six
constexpr i64 BLOCK = 1 << 18;    // bytes of these rows, which fit in the L2 cache
constexpr i64 TILE = 6;            // rows of a tile
constexpr i64 BRIEF = 18;         // up to so many rows, a weight is prefetched
constexpr i64 AHEAD = 32 * PANEL;  // so many words ahead
constexpr float LEAST = 1e-12f;   // the least range or size of a row
constexpr float MOST = 127.0f;
constexpr u32 INFINITE = 0x7f800000u;  // bits of infinity; those of NaN are larger
enum Scaling { GIVEN = 0, BY_SIZE = 1, BY_RANGE = 2 };

// Calls work with the kind of scaling as a type.
template <class Work>
void with_scaling(int scaling, const Work& work) {
  if (scaling == GIVEN) work(std::integral_constant<int, GIVEN>());
  else if (scaling == BY_SIZE) work(std::integral_constant<int, BY_SIZE>());
  else work(std::integral_constant<int, BY_RANGE>());
}

// Four products of integers, unsigned on the left; the lanes' bits hold int32 sums.
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

// The same for few rows: a weight then arrives from the L3 cache as fast as it is multiplied.
struct FetchedQuads : Quads {
  static V read(const Word* at) {
    _mm_prefetch(reinterpret_cast<const char*>(at + AHEAD), _MM_HINT_T0);
    return Quads::read(at);
  }
};

// Prefetches a part of the next panel into the L2 cache while rows `begin` to `end` are multiplied by the current one.
// The part is proportional to the number of these rows.
inline void fetch_share(const u32* panel, i64 bytes, i64 begin, i64 end, i64 rows) {
  auto* at = reinterpret_cast<const char*>(panel);
  for (i64 i = bytes / 64 * begin / rows; i < bytes / 64 * end / rows; ++i) _mm_prefetch(at + i * 64, _MM_HINT_T1);
}

struct Row {
  float scale, middle;
};

// Rounds (x - middle) * inverse to integers from -128 to 127, and stores each plus 128.
template <class T>
inline void round_row(const T* x, i64 n, float middle, float inverse, uint8_t* out) {
#pragma omp simd
  for (i64 i = 0; i < n; ++i) {
    float whole = std::nearbyint((wide(x[i]) - middle) * inverse);
    whole = whole < -128.0f ? -128.0f : whole > 127.0f ? 127.0f : whole;
    out[i] = uint8_t(int32_t(whole) + 128);
  }
}

// `given` is the inverse of a given scale, or the size of the row; if it is 0, the size is computed.
template <int scaling, class T>
inline Row round_by(float given, const T* x, i64 n, uint8_t* out) {
  if (scaling == GIVEN) {
    round_row(x, n, 0.0f, given, out);
    return {1.0f, 0.0f};
  }
  float low = wide(x[0]), high = low;
  u32 largest = 0;  // bits of the magnitude, which compilers do not simplify as they do NaN * 0
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

// Inputs of a product besides its two factors.
struct Outputs {
  const int32_t* zeros;  // 128 times the sum of each output's numbers
  const float *scales, *sums, *bias;
};

// Rounds to the nearest, ties to even; NaN stays NaN: as `rounded`, for sixteen numbers, on CPUs with or without bf16.
inline void put_lanes(Half* to, __mmask16 lanes, V values) {
  __m512i bits = _mm512_castps_si512(values), one = _mm512_set1_epi32(1);
  __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
  __m512i up = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), even), 16);
  __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  _mm256_mask_storeu_epi16(to, lanes, _mm512_cvtepi32_epi16(_mm512_mask_set1_epi32(up, nan, 0x7fc0)));
}

// y = s * (sums * scale) + middle * sums + bias, for one row, in the order of torch's `addcmul`.
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

// Memory that the calling thread reuses: the kernel would map new memory page by page for each product.
template <int which>
char* kept(i64 bytes) {
  static thread_local std::vector<char> room;
  if (i64(room.size()) < bytes + 64) room.resize(bytes + 64);
  return reinterpret_cast<char*>((uintptr_t(room.data()) + 63) / 64 * 64);
}

// Number of rows, of so many bytes each, that are multiplied at a time.
inline i64 rows_of_block(i64 bytes) { return std::max<i64>(48, std::min(MOST_ROWS, BLOCK / bytes / 6 * 6)); }

// The product of the rows that `source(r)` returns, panel by panel. `then(r, column, values, width)` changes values of
// row r in place once they are written, while they are in the L1 cache.
template <int scaling, class T, class Source, class Then>
void multiply(const Source& source, i64 rows, i64 inputs, i64 outputs, float inverse, const float* row_sizes,
              const u32* weight, Outputs of, T* out, const Then& then, int threads) {
  constexpr i64 HEIGHT = 48;  // rows whose sums fit in the L1 cache
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
        float given = row_sizes ? row_sizes[first + r] : inverse;
        scaled[r] = round_by<scaling>(given, source(first + r), inputs, numbers + r * bytes);  // beyond, weights are 0
      }
#pragma omp for schedule(static)
      for (i64 panel = 0; panel < panels; ++panel) {
        i64 column = panel * PANEL, width = std::min(PANEL, outputs - column);
        Outputs part{of.zeros + column, of.scales + column, of.sums ? of.sums + column : nullptr,
                     of.bias ? of.bias + column : nullptr};
        for (i64 r = 0; r < here; r += HEIGHT) {
          i64 height = std::min(HEIGHT, here - r);
          auto* left = reinterpret_cast<const u32*>(numbers) + r * words;
          auto* sums = reinterpret_cast<float*>(totals);
          const u32* right = weight + panel * words * PANEL;
          if (here <= BRIEF) {
            product<FetchedQuads>(height, width, words, {left, words, 1}, {right, PANEL}, nullptr, 0, sums, PANEL);
          } else {
            for (i64 i = 0; i < height; i += TILE) {
              i64 tall = std::min(TILE, height - i);
              product<Quads>(tall, width, words, {left + i * words, words, 1}, {right, PANEL}, nullptr, 0,
                             sums + i * PANEL, PANEL);
              fetch_share(right + words * PANEL, words * PANEL * 4, r + i, r + i + tall, here);
            }
          }
          for (i64 i = 0; i < height; ++i) {
            T* values = out + (first + r + i) * outputs + column;
            scale_row<scaling>(totals + i * PANEL, scaled[r + i], part, values, width);
            then(first + r + i, column, values, width);
          }
        }
      }
    }
  }
}

}  // namespace
