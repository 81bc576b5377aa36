// Dropout masks on a CPU: a byte for each element, 1 where it is kept, from 16 random bits each.
//
// The bits are those of Philox-4x32 with 10 rounds (Salmon et al., SC 2011, sections 2.3 and 3.3): block c of 128 bits
// is a function of the key and of c alone, so that threads share the work and the mask does not depend on how many
// there are. 64 blocks make 512 elements: word w of lane l has those numbered 128 w + 2 l and 128 w + 2 l + 1, its lower
// half first. Rounds wait for each other, but lanes do not: with 64, an element takes a third of its time with 16. The
// file includes no header of torch. Threads come from the OpenMP library that torch has loaded, so there is one pool.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include <omp.h>

namespace {

using i64 = int64_t;
using u32 = uint32_t;
using u64 = uint64_t;

constexpr int LANES = 64, WORDS = 4, ROUNDS = 10, ELEMENTS = LANES * WORDS * 2;
constexpr u64 FIRST_FACTOR = 0xD2511F53u, SECOND_FACTOR = 0xCD9E8D57u;
constexpr u32 FIRST_STEP = 0x9E3779B9u, SECOND_STEP = 0xBB67AE85u;

// The blocks first to first + LANES - 1 of a key, word by word.
inline void random_words(u64 key, u64 first, u32 (&words)[WORDS][LANES]) {
  for (int lane = 0; lane < LANES; ++lane) {
    u64 counter = first + lane;
    words[0][lane] = u32(counter);
    words[1][lane] = u32(counter >> 32);
    words[2][lane] = words[3][lane] = 0;
  }
  u32 low = u32(key), high = u32(key >> 32);
  for (int round = 0; round < ROUNDS; ++round) {
#pragma omp simd
    for (int lane = 0; lane < LANES; ++lane) {
      u64 one = FIRST_FACTOR * words[0][lane], other = SECOND_FACTOR * words[2][lane];
      words[0][lane] = u32(other >> 32) ^ words[1][lane] ^ low;
      words[1][lane] = u32(other);
      words[2][lane] = u32(one >> 32) ^ words[3][lane] ^ high;
      words[3][lane] = u32(one);
    }
    low += FIRST_STEP;
    high += SECOND_STEP;
  }
}

}  // namespace

// kept[i] says whether the bits of element i are at least `least`, of 2^16: `least` of 2^16 elements are not kept.
extern "C" void penstock_kept(uint8_t* kept, i64 count, u64 key, u32 least, int threads) {
  i64 blocks = (count + ELEMENTS - 1) / ELEMENTS;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 block = 0; block < blocks; ++block) {
    u32 words[WORDS][LANES];
    uint16_t bits[ELEMENTS];
    uint8_t made[ELEMENTS];
    random_words(key, u64(block) * LANES, words);
    std::memcpy(bits, words, sizeof bits);
#pragma omp simd
    for (int i = 0; i < ELEMENTS; ++i) made[i] = bits[i] >= least;
    std::memcpy(kept + block * ELEMENTS, made, std::min<i64>(ELEMENTS, count - block * ELEMENTS));
  }
}
