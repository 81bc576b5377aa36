// Attention in bf16 on a CPU that multiplies pairs of bf16 numbers (AVX512-BF16), forward and backward.
//
// The scores of BLOCK queries and all their keys are computed at a time, in the L2 cache, and then discarded. The
// backward pass computes them again from each query's log-sum-exp L (Dao 2023, arXiv:2307.08691,
// section 3.1):
//
//   S = scale q k^T + mask     P = exp(S - L)     out = D(P) v          D: dropout of weights, by a hash of position
//   dv = D(P)^T do     dP = D(do v^T)     dS = P (dP - rowsum(do out)) scale     dq = dS k     dk = dS^T q
//
// All five products run through `product`, whose operands hold two bf16 numbers of the summed dimension in 32 bits.
// Sums and the softmax are fp32; P and dS are rounded to bf16 for their products. A thread takes one head at a time; in
// the backward pass, all query heads of a KV head, so that no two threads add to one sum. No header of torch is
// included. Threads come from the OpenMP library that torch has loaded, so there is one pool.

#include <omp.h>

#include <cmath>
#include <vector>

#include "products.h"
namespace {
void product(i64 rows, i64 lanes, i64 depth, const u32* a, i64 a_row, i64 a_step, const u32* b, i64 b_step, float* c,
             i64 c_row, bool add) {
  product<Pairs>(rows, lanes, depth, {a, a_row, a_step}, {b, b_step}, add ? c : nullptr, c_row, c, c_row);
}
// Rows of a packed projection are far apart, so the hardware does not prefetch them.
inline void fetch(const u16* x, i64 row, i64 rows, i64 features) {
  for (i64 r = 0; r < rows; ++r)
    for (i64 f = 0; f < features; f += 32) _mm_prefetch((const char*)(x + r * row + f), _MM_HINT_T0);
}
inline void gather_rows(const u16* x, i64 row, i64 rows, i64 features, u16* out) {
  for (i64 r = 0; r < rows; ++r) std::memcpy(out + r * features, x + r * row, features * 2);
}
// [rows][pairs] -> [pairs][rows padded]
inline void transpose(const u16* x, i64 row, i64 rows, i64 padded, i64 features, u32* out) {
  pack_columns<Pairs>(x, row, rows, features / 2, padded, out);
}
// rows two by two: [rows/2][features] of (row 2i, row 2i+1)
inline void interleave(const u16* x, i64 row, i64 rows, i64 pairs_of_rows, i64 features, u32* out) {
  i64 filled = (rows + 1) / 2;
  pack_rows<Pairs>(x, row, rows, features, features, out);
  std::memset(out + filled * features, 0, (pairs_of_rows - filled) * features * 4);
}
inline __m256i halves(V x) { return (__m256i)_mm512_cvtneps_pbh(x); }
inline V wide(const u16* x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)), 16));
}
// keeps a weight if the hash of its position is at least `least`
inline __mmask16 keeps(u32 seed, i64 row, i64 column, u32 least) {
  __m512i x = _mm512_add_epi32(_mm512_set1_epi32(int(column)),
                               _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  u32 s = (seed ^ u32(row) * 0x9E3779B9u);
  s ^= s >> 16;
  s *= 0x7feb352du;
  s ^= s >> 15;
  x = _mm512_add_epi32(_mm512_mullo_epi32(x, _mm512_set1_epi32(int(0x85ebca6bu))), _mm512_set1_epi32(int(s)));
  x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
  x = _mm512_mullo_epi32(x, _mm512_set1_epi32(0x7feb352d));
  x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 15));
  x = _mm512_mullo_epi32(x, _mm512_set1_epi32(int(0x846ca68bu)));
  x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
  return _mm512_cmpge_epu32_mask(x, _mm512_set1_epi32(int(least)));
}
struct Heads {
  const u16* data;
  i64 sample, head, token;
};  // strides in elements
inline i64 up(i64 n, i64 to) { return (n + to - 1) / to * to; }
constexpr i64 BLOCK = 60;  // queries at a time: a multiple of a tile's six rows

struct Sizes {
  i64 samples, heads, groups, n, m, k;
  float scale;
  int causal;
  float dropout;
  u32 seed;
};

void forward_head(const Sizes& s, i64 b, i64 h, const Heads& q, const Heads& k, const Heads& v, const float* mask,
                  u16* out, i64 o_sample, i64 o_head, i64 o_token, float* lse, std::vector<char>& room) {
  i64 m16 = up(s.m, 16), pairs_m = m16 / 2, shared = s.heads / s.groups;
  room.resize((s.k / 2 * m16 + pairs_m * s.k + BLOCK * m16 + BLOCK * s.k) * 4 + BLOCK * (m16 + s.k) * 2 + 256);
  u32* keys = (u32*)(((uintptr_t)room.data() + 63) / 64 * 64);
  u32* values = keys + s.k / 2 * m16;
  float* scores = (float*)(values + pairs_m * s.k);
  float* sums = scores + BLOCK * m16;
  u16* weights = (u16*)(sums + BLOCK * s.k);
  u16* near = weights + BLOCK * m16;
  const u16* kk = k.data + b * k.sample + h / shared * k.head;
  const u16* vv = v.data + b * v.sample + h / shared * v.head;
  fetch(kk, k.token, s.m, s.k);
  fetch(vv, v.token, s.m, s.k);
  fetch(q.data + b * q.sample + h * q.head, q.token, std::min(BLOCK, s.n), s.k);
  transpose(kk, k.token, s.m, m16, s.k, keys);
  interleave(vv, v.token, s.m, pairs_m, s.k, values);
  const float* m_row = mask ? mask + b * m16 : nullptr;
  u32 least = u32(std::min(4294967295.0, double(s.dropout) * 4294967296.0));
  float up_scale = 1.0f / (1.0f - s.dropout);
  u32 seed = s.seed + u32(b * s.heads + h) * 0x27d4eb2fu;
  for (i64 first = 0; first < s.n; first += BLOCK) {
    i64 rows = std::min(BLOCK, s.n - first), seen = s.causal ? std::min(m16, up(first + rows + s.m - s.n, 16)) : m16;
    const u16* qq = q.data + b * q.sample + h * q.head + first * q.token;
    gather_rows(qq, q.token, rows, s.k, near);
    if (first + BLOCK < s.n) fetch(qq + BLOCK * q.token, q.token, std::min(BLOCK, s.n - first - BLOCK), s.k);
    product(rows, seen, s.k / 2, (const u32*)near, s.k / 2, 1, keys, m16, scores, m16, false);
    float totals[BLOCK];
    for (i64 r = 0; r < rows; ++r) {
      float* row = scores + r * m16;
      u16* w = weights + r * m16;
      i64 limit = s.causal ? std::min(s.m, first + r + 1 + s.m - s.n) : s.m;
      V most = _mm512_set1_ps(-INFINITY), scale = _mm512_set1_ps(s.scale);
      for (i64 j = 0; j < seen; j += LANES) {
        V x = _mm512_mul_ps(_mm512_loadu_ps(row + j), scale);
        if (m_row) x = _mm512_add_ps(x, _mm512_loadu_ps(m_row + j));
        i64 left = limit - j;
        if (left < LANES)
          x = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), __mmask16(left <= 0 ? 0 : (1u << left) - 1), x);
        _mm512_storeu_ps(row + j, x);
        most = _mm512_max_ps(most, x);
      }
      float top = _mm512_reduce_max_ps(most);
      if (top == -INFINITY) top = 0.0f;
      V total = _mm512_setzero_ps(), tops = _mm512_set1_ps(top);
      for (i64 j = 0; j < seen; j += LANES) {
        V x = _mm512_loadu_ps(row + j);
        V e = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-INFINITY), _CMP_NEQ_OQ),
                                  exponential(_mm512_sub_ps(x, tops)));
        total = _mm512_add_ps(total, e);
        if (least) e = _mm512_maskz_mov_ps(keeps(seed, first + r, j, least), e);
        _mm256_storeu_si256((__m256i*)(w + j), halves(e));
      }
      float t = _mm512_reduce_add_ps(total);
      totals[r] = t;
      lse[first + r] = top + std::log(t);
    }
    product(rows, s.k, seen / 2, (const u32*)weights, m16 / 2, 1, values, s.k, sums, s.k, false);
    for (i64 r = 0; r < rows; ++r) {
      u16* to = out + b * o_sample + h * o_head + (first + r) * o_token;
      V f = _mm512_set1_ps(totals[r] > 0 ? up_scale / totals[r] : 0.0f);
      for (i64 j = 0; j < s.k; j += LANES)
        _mm256_storeu_si256((__m256i*)(to + j), halves(_mm512_mul_ps(_mm512_loadu_ps(sums + r * s.k + j), f)));
    }
  }
}
struct Out {
  u16* data;
  i64 sample, head, token;
};

void backward_group(const Sizes& s, i64 b, i64 g, const Heads& q, const Heads& k, const Heads& v, const float* mask,
                    const Heads& o, const Heads& go, const float* lse, const Out& gq, const Out& gk, const Out& gv,
                    std::vector<char>& room) {
  i64 m16 = up(s.m, 16), pm = m16 / 2, shared = s.heads / s.groups, rows2 = BLOCK / 2;
  i64 floats = BLOCK * m16 * 2 + BLOCK * s.k + 2 * m16 * s.k;
  i64 words = 2 * (s.k / 2 * m16) + pm * s.k + 2 * rows2 * s.k + 2 * rows2 * m16;
  room.resize((floats + words) * 4 + BLOCK * (m16 + 2 * s.k) * 2 + 256);
  u32* keys_t = (u32*)(((uintptr_t)room.data() + 63) / 64 * 64);
  u32* values_t = keys_t + s.k / 2 * m16;
  u32* keys = values_t + s.k / 2 * m16;
  u32* queries2 = keys + pm * s.k;
  u32* grads2 = queries2 + rows2 * s.k;
  u32* p2 = grads2 + rows2 * s.k;
  u32* ds2 = p2 + rows2 * m16;
  float* scores = (float*)(ds2 + rows2 * m16);
  float* dp = scores + BLOCK * m16;
  float* dq = dp + BLOCK * m16;
  float* dk = dq + BLOCK * s.k;
  float* dv = dk + m16 * s.k;
  u16* ds = (u16*)(dv + m16 * s.k);
  u16* nq = ds + BLOCK * m16;
  u16* ng = nq + BLOCK * s.k;
  std::memset(dk, 0, 2 * m16 * s.k * 4);
  const u16* kk = k.data + b * k.sample + g * k.head;
  const u16* vv = v.data + b * v.sample + g * v.head;
  fetch(kk, k.token, s.m, s.k);
  fetch(vv, v.token, s.m, s.k);
  transpose(kk, k.token, s.m, m16, s.k, keys_t);
  transpose(vv, v.token, s.m, m16, s.k, values_t);
  interleave(kk, k.token, s.m, pm, s.k, keys);
  const float* m_row = mask ? mask + b * m16 : nullptr;
  u32 least = u32(std::min(4294967295.0, double(s.dropout) * 4294967296.0));
  V up_scale = _mm512_set1_ps(1.0f / (1.0f - s.dropout));
  V scale = _mm512_set1_ps(s.scale);
  for (i64 h = g * shared; h < (g + 1) * shared; ++h) {
    u32 seed = s.seed + u32(b * s.heads + h) * 0x27d4eb2fu;
    for (i64 first = 0; first < s.n; first += BLOCK) {
      i64 rows = std::min(BLOCK, s.n - first), seen = s.causal ? std::min(m16, up(first + rows + s.m - s.n, 16)) : m16,
          even = (rows + 1) / 2;
      const u16* qq = q.data + b * q.sample + h * q.head + first * q.token;
      const u16* gg = go.data + b * go.sample + h * go.head + first * go.token;
      const u16* oo = o.data + b * o.sample + h * o.head + first * o.token;
      fetch(qq, q.token, rows, s.k);
      fetch(gg, go.token, rows, s.k);
      fetch(oo, o.token, rows, s.k);
      gather_rows(qq, q.token, rows, s.k, nq);
      gather_rows(gg, go.token, rows, s.k, ng);
      product(rows, seen, s.k / 2, (const u32*)nq, s.k / 2, 1, keys_t, m16, scores, m16, false);
      product(rows, seen, s.k / 2, (const u32*)ng, s.k / 2, 1, values_t, m16, dp, m16, false);
      for (i64 r = 0; r < 2 * even; ++r) {
        u32 *pp = p2 + r / 2 * m16, *dd = ds2 + r / 2 * m16;
        u16* d = ds + r * m16;
        if (r >= rows) continue;  // the upper half of an odd last pair was cleared with the lower one
        V delta = _mm512_setzero_ps();
        for (i64 j = 0; j < s.k; j += LANES)
          delta = _mm512_fmadd_ps(wide(oo + r * o.token + j), wide(gg + r * go.token + j), delta);
        V sum = _mm512_set1_ps(_mm512_reduce_add_ps(delta)), level = _mm512_set1_ps(lse[h * s.n + first + r]);
        i64 limit = s.causal ? std::min(s.m, first + r + 1 + s.m - s.n) : s.m;
        for (i64 j = 0; j < seen; j += LANES) {
          V x = _mm512_mul_ps(_mm512_loadu_ps(scores + r * m16 + j), scale);
          if (m_row) x = _mm512_add_ps(x, _mm512_loadu_ps(m_row + j));
          V p = exponential(_mm512_sub_ps(x, level));
          i64 left = limit - j;
          __mmask16 there = left >= LANES ? 0xffff : __mmask16(left <= 0 ? 0 : (1u << left) - 1);
          if (m_row) there &= _mm512_cmp_ps_mask(x, _mm512_set1_ps(-INFINITY), _CMP_NEQ_OQ);
          p = _mm512_maskz_mov_ps(there, p);
          V into = _mm512_loadu_ps(dp + r * m16 + j), dropped = p;
          if (least) {
            __mmask16 kept = keeps(seed, first + r, j, least);
            into = _mm512_maskz_mul_ps(kept, into, up_scale);
            dropped = _mm512_maskz_mul_ps(kept, p, up_scale);
          }
          V dsx = _mm512_mul_ps(_mm512_mul_ps(p, _mm512_sub_ps(into, sum)), scale);
          __m256i ph = halves(dropped), dh = halves(dsx);
          _mm256_storeu_si256((__m256i*)(d + j), dh);
          __m512i pw = _mm512_cvtepu16_epi32(ph), dw = _mm512_cvtepu16_epi32(dh);
          if (r % 2) {
            pw = _mm512_or_si512(_mm512_loadu_si512(pp + j), _mm512_slli_epi32(pw, 16));
            dw = _mm512_or_si512(_mm512_loadu_si512(dd + j), _mm512_slli_epi32(dw, 16));
          }
          _mm512_storeu_si512(pp + j, pw);
          _mm512_storeu_si512(dd + j, dw);
        }
      }
      product(rows, s.k, seen / 2, (const u32*)ds, m16 / 2, 1, keys, s.k, dq, s.k, false);
      for (i64 r = 0; r < rows; ++r) {
        u16* to = gq.data + b * gq.sample + h * gq.head + (first + r) * gq.token;
        for (i64 j = 0; j < s.k; j += LANES)
          _mm256_storeu_si256((__m256i*)(to + j), halves(_mm512_loadu_ps(dq + r * s.k + j)));
      }
      interleave(nq, s.k, rows, even, s.k, queries2);
      interleave(ng, s.k, rows, even, s.k, grads2);
      product(seen, s.k, even, p2, 1, m16, grads2, s.k, dv, s.k, true);
      product(seen, s.k, even, ds2, 1, m16, queries2, s.k, dk, s.k, true);
    }
  }
  for (i64 r = 0; r < s.m; ++r) {
    u16* tk = gk.data + b * gk.sample + g * gk.head + r * gk.token;
    u16* tv = gv.data + b * gv.sample + g * gv.head + r * gv.token;
    for (i64 j = 0; j < s.k; j += LANES) {
      _mm256_storeu_si256((__m256i*)(tk + j), halves(_mm512_loadu_ps(dk + r * s.k + j)));
      _mm256_storeu_si256((__m256i*)(tv + j), halves(_mm512_loadu_ps(dv + r * s.k + j)));
    }
  }
}
}  // namespace
extern "C" void penstock_attend(const i64* sizes, float scale, int causal, float dropout, u32 seed, const u16* q,
                                const u16* k, const u16* v, const i64* strides, const float* mask, u16* out, float* lse,
                                int threads) {
  Sizes s{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], scale, causal, dropout, seed};
  Heads hq{q, strides[0], strides[1], strides[2]}, hk{k, strides[3], strides[4], strides[5]},
      hv{v, strides[6], strides[7], strides[8]};
#pragma omp parallel num_threads(threads)
  {
    std::vector<char> room;
#pragma omp for schedule(dynamic)
    for (i64 i = 0; i < s.samples * s.heads; ++i)
      forward_head(s, i / s.heads, i % s.heads, hq, hk, hv, mask, out, strides[9], strides[10], strides[11],
                   lse + i * s.n, room);
  }
}
extern "C" void penstock_attend_gradient(const i64* sizes, float scale, int causal, float dropout, u32 seed,
                                         const u16* q, const u16* k, const u16* v, const u16* o, const u16* go,
                                         const i64* strides, const float* mask, const float* lse, u16* gq, u16* gk,
                                         u16* gv, int threads) {
  Sizes s{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], scale, causal, dropout, seed};
  auto in = [&](const u16* p, int i) { return Heads{p, strides[3 * i], strides[3 * i + 1], strides[3 * i + 2]}; };
  auto to = [&](u16* p, int i) { return Out{p, strides[3 * i], strides[3 * i + 1], strides[3 * i + 2]}; };
#pragma omp parallel num_threads(threads)
  {
    std::vector<char> room;
#pragma omp for schedule(dynamic)
    for (i64 i = 0; i < s.samples * s.groups; ++i)
      backward_group(s, i / s.groups, i % s.groups, in(q, 0), in(k, 1), in(v, 2), mask, in(o, 3), in(go, 4),
                     lse + i / s.groups * s.heads * s.n, to(gq, 5), to(gk, 6), to(gv, 7), room);
  }
}
