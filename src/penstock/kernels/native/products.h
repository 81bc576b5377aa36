// Matrix products in registers, of fp32 or of pairs of bf16 numbers with sums in fp32, and the packing of their inputs:
// shared by kernels for CPUs with AVX-512. A word is what a lane multiplies in one instruction: an fp32 number, or two
// bf16 numbers of the summed dimension.

#pragma once

#include <immintrin.h>

#include "numbers.h"

namespace {

using u16 = uint16_t;
using u32 = uint32_t;
using V = __m512;
constexpr i64 LANES = 16;
constexpr i64 PANEL = 64;  // lanes of a tile: four vectors

inline __mmask16 first_lanes(i64 n) { return n >= LANES ? 0xffff : n <= 0 ? 0 : __mmask16((1 << n) - 1); }

inline void put_lanes(float* to, __mmask16 lanes, V sums) {
  if (lanes == 0xffff)
    _mm512_storeu_ps(to, sums);
  else
    _mm512_mask_storeu_ps(to, lanes, sums);
}

// e^x to about one unit in the last place, with x at least -87.3.
inline V exponential(V x) {
  x = _mm512_max_ps(_mm512_set1_ps(-87.3f), x);  // NaN stays NaN
  V n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  V r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
  V p = _mm512_set1_ps(1.3981999507e-3f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}

struct Singles {
  using Element = float;
  using Word = float;
  using Stored = Word;  // type in memory of the words on the right
  static constexpr i64 EACH = 1;  // elements of a word
  static V broadcast(const Word* at) { return _mm512_set1_ps(*at); }
  static V read(const Word* at) { return _mm512_loadu_ps(at); }
  static V add(V sums, V left, V right) { return _mm512_fmadd_ps(left, right, sums); }
  // The words of sixteen columns, from a row.
  static V words(const Element* row, i64, bool, __mmask16 lanes) { return _mm512_maskz_loadu_ps(lanes, row); }
};

inline void put_lanes(u16* to, __mmask16 lanes, V sums) {
  __m256i halves = (__m256i)_mm512_cvtneps_pbh(sums);
  if (lanes == 0xffff)
    _mm256_storeu_si256((__m256i*)to, halves);
  else
    _mm256_mask_storeu_epi16(to, lanes, halves);
}

struct Pairs {
  using Element = u16;
  using Word = u32;
  using Stored = Word;
  static constexpr i64 EACH = 2;
  static V broadcast(const Word* at) {
    int word;
    std::memcpy(&word, at, 4);
    return _mm512_castsi512_ps(_mm512_set1_epi32(word));
  }
  static V read(const Word* at) { return _mm512_loadu_ps(at); }
  static V add(V sums, V left, V right) { return _mm512_dpbf16_ps(sums, (__m512bh)left, (__m512bh)right); }
  // The words of sixteen columns, from a row and the one after it, if it is there.
  static V words(const Element* row, i64 stride, bool two, __mmask16 lanes) {
    __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, row));
    if (!two) return _mm512_castsi512_ps(low);
    __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, row + stride));
    return _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
};

// Words in memory, and the strides of left[r][p] and right[p][lane] in words.
template <class Word>
struct Left {
  const Word* data;
  i64 row, step;
};
template <class Word>
struct Right {
  const Word* data;
  i64 step;
};

// out (R x 16 W lanes) = base, if given, + the sum over depth words of left[r][p] right[p][lane]. `lanes` says which
// lanes of the last vector are written.
template <class Kind, int R, int W, class Out>
inline void tile(i64 depth, Left<typename Kind::Word> left, Right<typename Kind::Stored> right, const float* base,
                 i64 base_row, Out* out, i64 out_row, __mmask16 lanes) {
  V sums[R][W];
  for (int r = 0; r < R; ++r)
    for (int w = 0; w < W; ++w)
      sums[r][w] = base ? _mm512_loadu_ps(base + r * base_row + w * LANES) : _mm512_setzero_ps();
  for (i64 p = 0; p < depth; ++p) {
    V columns[W];
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) columns[w] = Kind::read(right.data + p * right.step + w * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      V one = Kind::broadcast(left.data + r * left.row + p * left.step);
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w) sums[r][w] = Kind::add(sums[r][w], one, columns[w]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int w = 0; w < W; ++w)
      put_lanes(out + r * out_row + w * LANES, w == W - 1 ? lanes : __mmask16(0xffff), sums[r][w]);
}

template <class Kind, int R, int W, class Out>
inline void last_rows(i64 rows, i64 depth, Left<typename Kind::Word> left, Right<typename Kind::Stored> right,
                      const float* base, i64 base_row, Out* out, i64 out_row, __mmask16 lanes) {
  if constexpr (R > 0) {
    if (rows == R)
      tile<Kind, R, W>(depth, left, right, base, base_row, out, out_row, lanes);
    else
      last_rows<Kind, R - 1, W>(rows, depth, left, right, base, base_row, out, out_row, lanes);
  }
}

template <class Kind, int W, class Out>
void stripe(i64 rows, i64 depth, Left<typename Kind::Word> left, Right<typename Kind::Stored> right, const float* base,
            i64 base_row, Out* out, i64 out_row, __mmask16 lanes) {
  for (; rows >= 6; rows -= 6) {
    tile<Kind, 6, W>(depth, left, right, base, base_row, out, out_row, lanes);
    left.data += 6 * left.row;
    base = base ? base + 6 * base_row : base;
    out += 6 * out_row;
  }
  last_rows<Kind, 5, W>(rows, depth, left, right, base, base_row, out, out_row, lanes);
}

// The same for any number of rows and columns. Words on the right are padded to whole vectors of lanes.
template <class Kind, class Out>
void product(i64 rows, i64 columns, i64 depth, Left<typename Kind::Word> left, Right<typename Kind::Stored> right,
             const float* base, i64 base_row, Out* out, i64 out_row) {
  for (i64 first = 0; first < columns; first += PANEL) {
    i64 vectors = std::min<i64>(4, (columns - first + LANES - 1) / LANES);
    __mmask16 lanes = first_lanes(columns - first - (vectors - 1) * LANES);
    Right<typename Kind::Stored> panel{right.data + first, right.step};
    const float* from = base ? base + first : base;
    Out* to = out + first;
    switch (vectors) {
      case 4:
        stripe<Kind, 4>(rows, depth, left, panel, from, base_row, to, out_row, lanes);
        break;
      case 3:
        stripe<Kind, 3>(rows, depth, left, panel, from, base_row, to, out_row, lanes);
        break;
      case 2:
        stripe<Kind, 2>(rows, depth, left, panel, from, base_row, to, out_row, lanes);
        break;
      case 1:
        stripe<Kind, 1>(rows, depth, left, panel, from, base_row, to, out_row, lanes);
        break;
    }
  }
}

// rows x columns to words[p][lane], with `lanes` lanes, a multiple of 16: those after the last column are zero.
template <class Kind>
void pack_rows(const typename Kind::Element* x, i64 stride, i64 rows, i64 columns, i64 lanes,
               typename Kind::Word* out) {
  for (i64 p = 0; p * Kind::EACH < rows; ++p)
    for (i64 lane = 0; lane < lanes; lane += LANES)
      _mm512_storeu_ps(out + p * lanes + lane,
                       Kind::words(x + p * Kind::EACH * stride + lane, stride, p * Kind::EACH + 1 < rows,
                                   first_lanes(columns - lane)));
}

// Transposes 16 x 16 words; strides in bytes and in words.
inline void transpose_words(const char* x, i64 stride, void* out_words, i64 step) {
  u32* out = static_cast<u32*>(out_words);
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(x + i * stride);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  // Quarter q of a[4 i + c] now has column 4 q + c of rows 4 i to 4 i + 3.
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    __m512i even = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88), odd = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd),
            even2 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88),
            odd2 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
    _mm512_storeu_si512(out + c * step, _mm512_shuffle_i32x4(even, even2, 0x88));
    _mm512_storeu_si512(out + (4 + c) * step, _mm512_shuffle_i32x4(odd, odd2, 0x88));
    _mm512_storeu_si512(out + (8 + c) * step, _mm512_shuffle_i32x4(even, even2, 0xdd));
    _mm512_storeu_si512(out + (12 + c) * step, _mm512_shuffle_i32x4(odd, odd2, 0xdd));
  }
}

// rows of `depth` words to words[p][row], with `lanes` lanes, a multiple of 16: those after the last row are zero.
template <class Kind>
void pack_columns(const typename Kind::Element* x, i64 stride, i64 rows, i64 depth, i64 lanes,
                  typename Kind::Word* out) {
  const char* bytes = reinterpret_cast<const char*>(x);
  i64 row_bytes = stride * i64(sizeof(typename Kind::Element));
  for (i64 lane = 0; lane < lanes; lane += LANES) {
    i64 p = 0, here = std::min(LANES, rows - lane);
    if (here == LANES)
      for (; p + LANES <= depth; p += LANES)
        transpose_words(bytes + lane * row_bytes + p * 4, row_bytes, out + p * lanes + lane, lanes);
    for (; p < depth; ++p)
      for (i64 i = 0; i < LANES; ++i) {
        typename Kind::Word word = 0;
        if (i < here) std::memcpy(&word, bytes + (lane + i) * row_bytes + p * 4, 4);
        out[p * lanes + lane + i] = word;
      }
  }
}

}  // namespace
