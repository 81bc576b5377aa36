// Products of rows that are sorted by expert with the weights of their experts, on CPUs with AVX-512, in fp32 or bf16.
//
//   forward    y[v][n] = sum over k of x[v][k] W[e(v)][n][k]             expert e has rows first[e] to first[e + 1]
//   outer      G[e][n][k] = sum over the rows v of e of d[v][n] x[v][k]
//
// The gradient of x is a forward product with W transposed, by its strides. A thread takes some rows of one expert and
// some panels of columns, whose weights it packs once, so that experts with many rows are split. A row's sums depend
// neither on the other rows nor on the number of threads.

#include <omp.h>

#include <vector>

#include "products.h"
namespace {
constexpr i64 ROWS = 240;   // of an expert at a time: a multiple of a tile's six
constexpr i64 DEPTH = 256;  // rows whose outer products are summed before the sums leave registers: even
constexpr i64 WIDEST = 192;  // rows of a gradient at a time
constexpr i64 SPAN = 8;      // most panels of a task
constexpr i64 PACKED = 1 << 18;  // bytes of packed panels: an L2 cache holds at least twice as many

struct Rows {
  i64 expert, first, count;
};

template <class Word>
Word* aligned(std::vector<char>& room, i64 words) {
  room.resize(words * 4 + 64);
  return reinterpret_cast<Word*>((uintptr_t(room.data()) + 63) / 64 * 64);
}

// A part of a matrix in memory, in cache lines.
struct Lines {
  const char* data;
  i64 stride, each, count;  // bytes from row to row, lines of a row, lines
  void fetch(i64 from, i64 until) const {
    for (i64 line = from; line < std::min(until, count); ++line)
      _mm_prefetch(data + line / each * stride + line % each * 64, _MM_HINT_T1);
  }
};

template <class Kind>
void multiply(const typename Kind::Element* x, i64 x_row, const typename Kind::Element* weight, const i64* strides,
              i64 columns, i64 depth, const std::vector<Rows>& blocks, typename Kind::Element* out, int threads) {
  using Word = typename Kind::Word;
  constexpr i64 SIZE = sizeof(*weight);
  i64 words = (depth + Kind::EACH - 1) / Kind::EACH;
  i64 span = std::max<i64>(1, std::min<i64>(SPAN, PACKED / (words * PANEL * 4))) * PANEL;
  i64 spans = (columns + span - 1) / span, tasks = i64(blocks.size()) * spans;
  bool turned = strides[2] == 1;
  auto weights_of = [&](i64 task) {
    return weight + blocks[task / spans].expert * strides[0] + task % spans * span * strides[1];
  };
#pragma omp parallel num_threads(threads)
  {
    std::vector<char> room;
    auto* packed = aligned<Word>(room, words * span);
#pragma omp for schedule(dynamic)
    for (i64 task = 0; task < tasks; ++task) {
      const Rows& rows = blocks[task / spans];
      i64 first = task % spans * span, until = std::min(first + span, columns);
      for (i64 column = first; column < until; column += PANEL) {
        const auto* from = weights_of(task) + (column - first) * strides[1];
        i64 width = std::min(PANEL, until - column);
        Word* to = packed + (column - first) * words;
        if (turned)
          pack_columns<Kind>(from, strides[1], width, words, PANEL, to);
        else
          pack_rows<Kind>(from, strides[2], depth, width, PANEL, to);
      }
      // While this task multiplies, prefetch the weights of a later task of this thread.
      i64 next = task + threads, part = 0;
      Lines lines{nullptr, 0, 1, 0};
      if (next < tasks && blocks[next / spans].expert != rows.expert) {
        i64 width = std::min(span, columns - next % spans * span);
        i64 each = ((turned ? depth : width) * SIZE + 63) / 64;
        lines = {reinterpret_cast<const char*>(weights_of(next)), strides[turned ? 1 : 2] * SIZE, each,
                 each * (turned ? width : depth)};
        part = lines.count / ((until - first + PANEL - 1) / PANEL) + 1;
      }
      const auto* left = reinterpret_cast<const Word*>(x + rows.first * x_row);
      for (i64 column = first; column < until; column += PANEL) {
        lines.fetch((column - first) / PANEL * part, ((column - first) / PANEL + 1) * part);
        product<Kind>(rows.count, std::min(PANEL, until - column), words, Left<Word>{left, x_row / Kind::EACH, 1},
                      Right<Word>{packed + (column - first) * words, PANEL}, nullptr, 0,
                      out + rows.first * columns + column, columns);
      }
    }
  }
}

template <class Kind>
void outer(const typename Kind::Element* grad, i64 grad_row, const typename Kind::Element* x, i64 x_row, i64 outputs,
           i64 inputs, i64 experts, const i64* first, typename Kind::Element* out, int threads) {
  i64 parts = (outputs + WIDEST - 1) / WIDEST;
  while (experts * parts < 4 * threads && parts * 12 < outputs) parts *= 2;
  i64 height = ((outputs + parts - 1) / parts + 5) / 6 * 6, tall = (height + LANES - 1) / LANES * LANES;
  i64 wide = (inputs + LANES - 1) / LANES * LANES;
#pragma omp parallel num_threads(threads)
  {
    std::vector<char> left_room, right_room, sums_room;
    auto* left = aligned<typename Kind::Word>(left_room, DEPTH / Kind::EACH * tall);
    auto* right = aligned<typename Kind::Word>(right_room, DEPTH / Kind::EACH * PANEL);
#pragma omp for schedule(dynamic)
    for (i64 task = 0; task < experts * parts; ++task) {
      i64 expert = task / parts, begin = task % parts * height, here = std::min(height, outputs - begin);
      if (here <= 0) continue;
      auto* to = out + (expert * outputs + begin) * inputs;
      i64 end = first[expert + 1];
      if (first[expert] == end) std::memset(to, 0, here * inputs * sizeof(*to));
      float* sums = end - first[expert] > DEPTH ? aligned<float>(sums_room, here * wide) : nullptr;
      for (i64 row = first[expert]; row < end; row += DEPTH) {
        i64 rows = std::min(DEPTH, end - row), words = (rows + Kind::EACH - 1) / Kind::EACH;
        pack_rows<Kind>(grad + row * grad_row + begin, grad_row, rows, here, tall, left);
        for (i64 column = 0; column < inputs; column += PANEL) {
          i64 width = std::min(PANEL, inputs - column), lanes = (width + LANES - 1) / LANES * LANES;
          pack_rows<Kind>(x + row * x_row + column, x_row, rows, width, lanes, right);
          const float* base = row > first[expert] ? sums + column : nullptr;
          if (row + DEPTH < end)
            product<Kind>(here, lanes, words, Left<typename Kind::Word>{left, 1, tall}, {right, lanes}, base, wide,
                          sums + column, wide);
          else
            product<Kind>(here, width, words, Left<typename Kind::Word>{left, 1, tall}, {right, lanes}, base, wide,
                          to + column, inputs);
        }
      }
    }
  }
}

// The first row of each expert, and the end of the last; false if the ends are not in order.
bool starts(const int32_t* ends, i64 experts, i64 rows, std::vector<i64>& first) {
  first.assign(1, 0);
  for (i64 e = 0; e < experts; ++e) first.push_back(ends[e]);
  return std::is_sorted(first.begin(), first.end()) && first.back() <= rows;
}
}  // namespace

// x (rows, depth) to out (rows, columns), zero after the last end; strides of a weight's expert, column and depth. If
// the ends are not in order or exceed the rows, it writes nothing and returns false.
extern "C" int penstock_grouped(int type, const i64* sizes, const void* x, i64 x_row, const void* weight,
                                 const i64* strides, const int32_t* ends, void* out, int threads) {
  i64 rows = sizes[0], columns = sizes[1], depth = sizes[2], experts = sizes[3];
  std::vector<i64> first;
  if (!starts(ends, experts, rows, first)) return false;
  std::vector<Rows> blocks;
  for (i64 e = 0; e < experts; ++e)
    for (i64 row = first[e]; row < first[e + 1]; row += ROWS)
      blocks.push_back({e, row, std::min(ROWS, first[e + 1] - row)});
  i64 size = type ? 2 : 4, done = first.back() * columns * size;
  std::memset(static_cast<char*>(out) + done, 0, rows * columns * size - done);
  if (type)
    multiply<Pairs>(static_cast<const u16*>(x), x_row, static_cast<const u16*>(weight), strides, columns, depth, blocks,
                    static_cast<u16*>(out), threads);
  else
    multiply<Singles>(static_cast<const float*>(x), x_row, static_cast<const float*>(weight), strides, columns, depth,
                      blocks, static_cast<float*>(out), threads);
  return true;
}

// grad (rows, outputs) and x (rows, inputs) to out (experts, outputs, inputs), zero for experts without rows.
extern "C" int penstock_grouped_outer(int type, const i64* sizes, const void* grad, i64 grad_row, const void* x,
                                       i64 x_row, const int32_t* ends, void* out, int threads) {
  i64 rows = sizes[0], outputs = sizes[1], inputs = sizes[2], experts = sizes[3];
  std::vector<i64> first;
  if (!starts(ends, experts, rows, first)) return false;
  if (type)
    outer<Pairs>(static_cast<const u16*>(grad), grad_row, static_cast<const u16*>(x), x_row, outputs, inputs, experts,
                 first.data(), static_cast<u16*>(out), threads);
  else
    outer<Singles>(static_cast<const float*>(grad), grad_row, static_cast<const float*>(x), x_row, outputs, inputs,
                   experts, first.data(), static_cast<float*>(out), threads);
  return true;
}
