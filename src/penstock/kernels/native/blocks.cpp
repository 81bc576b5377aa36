// A whole Transformer block in one call, for inference on CPUs with AVX512-VNNI: linear layers with weights in int8,
// everything else in fp32.
//
//   pre-norm:   u = x + out(attend(qkv(norm1(x))))      y = u + down(a(up(norm2(u))))
//   post-norm:  u = norm1(x + out(attend(qkv(x))))      y = norm2(u + down(a(up(u))))
//
// Rows are the tokens of all samples, one sample after another. A token attends to all tokens of its sample. Norms are
// computed while rows are rounded, activations and residual sums while products are written. Linear layers return the
// same bits as integers.cpp. A row's result depends only on its sample, not on the number of threads.

#include "rounded.h"
#include "rows.h"

namespace {

constexpr i64 QUERIES = 30;  // queries at a time, whose scores fit in the L1 cache: a multiple of a tile's six rows

struct Linear {
  i64 inputs, outputs;
  const u32* weight;
  const int32_t* zeros;
  const float *scales, *sums, *bias;
  int32_t scaling;
  float inverse;
  const float* factors;  // that inputs are multiplied by, or null
};

struct Norm {
  const float *weight, *bias;
  float eps;
  int32_t rms;
};

struct Block {
  Linear qkv, out, up, down;
  Norm first, second;  // a null weight means no norm
  i64 heads, width;    // features of a head
  float scale;
  int32_t norm_first, activation;
};

// softmax(scale q k^T) v for one head of one sample. Queries, keys and values of its n tokens are `row` numbers apart.
void attend(const float* q, const float* k, const float* v, i64 row, i64 n, i64 width, float scale, float* out,
            i64 out_row) {
  i64 padded = (n + LANES - 1) / LANES * LANES;
  auto* keys = reinterpret_cast<float*>(kept<4>((width * padded + n * width + QUERIES * (padded + 2 * width)) * 4));
  float *values = keys + width * padded, *scores = values + n * width, *queries = scores + QUERIES * padded,
        *sums = queries + QUERIES * width;
  pack_columns<Singles>(k, row, n, width, padded, keys);
  for (i64 r = 0; r < n; ++r) std::memcpy(values + r * width, v + r * row, width * sizeof(float));
  V factor = _mm512_set1_ps(scale);
  for (i64 first = 0; first < n; first += QUERIES) {
    i64 here = std::min(QUERIES, n - first);
    for (i64 r = 0; r < here; ++r) std::memcpy(queries + r * width, q + (first + r) * row, width * sizeof(float));
    product<Singles>(here, padded, width, {queries, width, 1}, {keys, padded}, nullptr, 0, scores, padded);
    float inverse[QUERIES];
    for (i64 r = 0; r < here; ++r) {
      float* of = scores + r * padded;
      V most = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
      for (i64 j = 0; j < n; j += LANES) {
        __mmask16 lanes = first_lanes(n - j);
        most = _mm512_mask_max_ps(most, lanes, most, _mm512_mul_ps(_mm512_loadu_ps(of + j), factor));
      }
      V top = _mm512_set1_ps(_mm512_reduce_max_ps(most));
      for (i64 j = 0; j < n; j += LANES) {
        V power = exponential(_mm512_fmsub_ps(_mm512_loadu_ps(of + j), factor, top));
        total = _mm512_add_ps(total, _mm512_maskz_mov_ps(first_lanes(n - j), power));
        _mm512_storeu_ps(of + j, power);
      }
      inverse[r] = 1.0f / _mm512_reduce_add_ps(total);
    }
    product<Singles>(here, width, n, {scores, padded, 1}, {values, width}, nullptr, 0, sums, width);
    for (i64 r = 0; r < here; ++r)
      for (i64 j = 0; j < width; j += LANES)
        _mm512_storeu_ps(out + (first + r) * out_row + j,
                         _mm512_mul_ps(_mm512_loadu_ps(sums + r * width + j), _mm512_set1_ps(inverse[r])));
  }
}

template <class Source, class Then>
void apply(const Linear& layer, const Source& source, i64 rows, float* out, const Then& then, int threads) {
  Outputs of{layer.zeros, layer.scales, layer.sums, layer.bias};
  with_scaling(layer.scaling, [&](auto by) {
    multiply<decltype(by)::value>(source, rows, layer.inputs, layer.outputs, layer.inverse, nullptr, layer.weight, of, out,
                                  then, threads);
  });
}

// erf(|x| / sqrt 2) by a polynomial of degree 4 in each of 32 intervals up to |x| = 6, through Chebyshev's points. The
// error is 1e-8 before rounding. The last interval is 1, and serves all larger |x|.
struct Erf {
  static constexpr int INTERVALS = 2 * LANES, TERMS = 5;
  static constexpr float END = 6.0f;
  alignas(64) float terms[TERMS][INTERVALS] = {};

  Erf() {
    for (int i = 0; i + 1 < INTERVALS; ++i) {
      double at[TERMS], slopes[TERMS], sums[TERMS] = {};  // Newton's form, then powers of the position, 0 to 1
      for (int k = 0; k < TERMS; ++k) {
        at[k] = 0.5 - 0.5 * std::cos(M_PI * (2 * k + 1) / (2 * TERMS));
        slopes[k] = std::erf((i + at[k]) * END / INTERVALS / std::sqrt(2.0));
      }
      for (int order = 1; order < TERMS; ++order)
        for (int k = TERMS - 1; k >= order; --k) slopes[k] = (slopes[k] - slopes[k - 1]) / (at[k] - at[k - order]);
      for (int k = TERMS - 1; k >= 0; --k) {
        for (int power = TERMS - 1; power > 0; --power) sums[power] = sums[power - 1] - at[k] * sums[power];
        sums[0] = slopes[k] - at[k] * sums[0];
      }
      for (int power = 0; power < TERMS; ++power) terms[power][i] = float(sums[power]);
    }
    terms[0][INTERVALS - 1] = 1.0f;
  }
};
const Erf ERF;

inline V gelu(V x) {
  V end = _mm512_set1_ps(Erf::INTERVALS - 0.5f);
  V place = _mm512_min_ps(_mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(Erf::INTERVALS / Erf::END)), end);
  __m512i interval = _mm512_cvttps_epi32(place);
  place = _mm512_sub_ps(place, _mm512_cvtepi32_ps(interval));
  V erf = _mm512_setzero_ps();
#pragma GCC unroll 5
  for (int power = Erf::TERMS - 1; power >= 0; --power) {
    V term = _mm512_permutex2var_ps(_mm512_load_ps(ERF.terms[power]), interval, _mm512_load_ps(ERF.terms[power] + LANES));
    erf = _mm512_fmadd_ps(erf, place, term);
  }
  V half = _mm512_mul_ps(x, _mm512_set1_ps(0.5f));
  return _mm512_fmadd_ps(_mm512_abs_ps(half), erf, half);  // |x| erf(|x|) = x erf(x)
}

// An activation in place.
void activate_values(int kind, float* values, i64 n) {
  auto run = [=](auto of) {
#pragma omp simd
    for (i64 i = 0; i < n; ++i) {
      float share, slope;
      activate<decltype(of)::value>(values[i], share, slope);
      values[i] *= share;
    }
  };
  switch (kind) {
    case GELU:
      for (i64 i = 0; i < n; i += LANES) {
        __mmask16 lanes = first_lanes(n - i);
        put_lanes(values + i, lanes, gelu(_mm512_maskz_loadu_ps(lanes, values + i)));
      }
      return;
    case GELU_TANH: return run(std::integral_constant<int, GELU_TANH>());
    case SILU: return run(std::integral_constant<int, SILU>());
    case GELU_QUICK: return run(std::integral_constant<int, GELU_QUICK>());
    default: return run(std::integral_constant<int, RELU>());
  }
}

// Rows of x (·, n), after the norm and times the factors, if given, in memory that the calling thread reuses.
auto normed(const Norm& norm, const float* factors, const float* x, i64 n) {
  return [=](i64 row) {
    const float* from = x + row * n;
    if (!norm.weight && !factors) return from;
    auto* out = reinterpret_cast<float*>(kept<5>(n * 4));
    if (norm.weight) norm_row(from, norm.weight, norm.bias, norm.eps, norm.rms != 0, out, n);
    const float* last = norm.weight ? out : from;
    for (i64 i = 0; factors && i < n; ++i) out[i] = last[i] * factors[i];
    return static_cast<const float*>(out);
  };
}

// Adds a row of another tensor (·, n) to the values of a row.
auto adding(const float* x, i64 n) {
  return [=](i64 row, i64 column, float* values, i64 width) {
    const float* more = x + row * n + column;
#pragma omp simd
    for (i64 i = 0; i < width; ++i) values[i] += more[i];
  };
}

void norm_in_place(const Norm& norm, float* x, i64 rows, i64 n, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (i64 r = 0; r < rows; ++r)
    norm_row(x + r * n, norm.weight, norm.bias, norm.eps, norm.rms != 0, x + r * n, n);
}

}  // namespace

extern "C" {

// qkv (rows, heads * 3 * width), queries, keys and values of each head, to out (rows, heads * width). Sample s ends
// before row ends[s]; rows after the last sample become zero.
void penstock_attend_samples(const i64* sizes, const float* qkv, const i64* ends, float scale, float* out, int threads) {
  i64 rows = sizes[0], samples = sizes[1], heads = sizes[2], width = sizes[3], row = heads * 3 * width;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic)
  for (i64 i = 0; i < samples * heads; ++i) {
    i64 sample = i / heads, head = i % heads, begin = sample ? ends[sample - 1] : 0;
    const float* q = qkv + begin * row + head * 3 * width;
    attend(q, q + width, q + 2 * width, row, ends[sample] - begin, width, scale, out + (begin * heads + head) * width,
           heads * width);
  }
  i64 last = samples ? ends[samples - 1] : 0;
  std::memset(out + last * heads * width, 0, (rows - last) * heads * width * sizeof(float));
}

void penstock_activate(int kind, float* values, i64 n) { activate_values(kind, values, n); }

// x and y are (rows, D); `room` is memory for rows * (4 * heads * width + D) numbers.
void penstock_int8_block(const void* of, i64 rows, const i64* ends, i64 samples, const float* x, float* y, float* room,
                         int threads) {
  const Block& b = *static_cast<const Block*>(of);
  i64 inner = b.heads * b.width, n = b.out.outputs;
  float *qkv = room, *mixed = qkv + 3 * rows * inner, *u = mixed + rows * inner;
  auto as_it_is = [](i64, i64, float*, i64) {};
  auto activated = [&](i64, i64, float* values, i64 width) { activate_values(b.activation, values, width); };
  Norm none{}, first = b.norm_first ? b.first : none, second = b.norm_first ? b.second : none;
  apply(b.qkv, normed(first, b.qkv.factors, x, n), rows, qkv, as_it_is, threads);
  i64 sizes[] = {rows, samples, b.heads, b.width};
  penstock_attend_samples(sizes, qkv, ends, b.scale, mixed, threads);
  apply(b.out, normed(none, b.out.factors, mixed, inner), rows, u, adding(x, n), threads);
  if (!b.norm_first) norm_in_place(b.first, u, rows, n, threads);
  // Parts of nearly equal size, whose hidden features fit in the L2 cache.
  i64 most = rows_of_block(b.down.inputs) * threads, parts = (rows + most - 1) / most, some = (rows + parts - 1) / parts;
  auto* hidden = reinterpret_cast<float*>(kept<3>(some * b.down.inputs * 4));
  for (i64 begin = 0; begin < rows; begin += some) {
    i64 here = std::min(some, rows - begin);
    float* from = u + begin * n;
    apply(b.up, normed(second, b.up.factors, from, n), here, hidden, activated, threads);
    apply(b.down, normed(none, b.down.factors, hidden, b.down.inputs), here, y + begin * n, adding(from, n), threads);
  }
  if (!b.norm_first) norm_in_place(b.second, y, rows, n, threads);
}
}
