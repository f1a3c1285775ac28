// Factors of dropout: 1/(1-p) for a kept number, 0 for a dropped one. A factor depends only on the seed and the index
// of the number, so that any pass over the numbers, in any order, draws the same factors.

#pragma once

#include <algorithm>
#include <cmath>

#include "panels.h"

namespace {

// Philox4x32 with 7 rounds, which passes BigCrush (Salmon et al. 2011). The counter is (group of places, row, head,
// lane) and the key is the seed. A place is an index within a row. The four words of 16 consecutive counters belong to
// 64 consecutive places of a row, 16 for each word. For attention weights a row is a query, and a place is a key.
class Dropout {
  public:
    static constexpr int64_t GROUP = 4 * PANEL;  // places

    // Drops a number with probability `rate`.
    Dropout(double rate, uint64_t seed)
        : seed(seed),
          threshold(uint32_t(std::min(std::round(rate * 4294967296.0), 4294967295.0))),
          kept(float(1 / (1 - rate))) {}

    // Writes the factors of places [from, to) of a row, in whole groups; `from` must be the first place of a group.
    void draw(int64_t lane, int64_t head, int64_t row, int64_t from, int64_t to, float* factors) const {
        constexpr int ROUNDS = 7;
        static constexpr Word COUNT[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const Words next = load(COUNT);
        for (int64_t place = from; place < to; place += GROUP) {
            Words c0 = next + uint32_t(place / 4), c1 = Words{} + uint32_t(row);
            Words c2 = Words{} + uint32_t(head), c3 = Words{} + uint32_t(lane);
            uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
            for (int round = 0; round < ROUNDS; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
                Words low0, high0, low1, high1;
                product(c0, 0xD2511F53u, low0, high0);
                product(c2, 0xCD9E8D57u, low1, high1);
                c0 = high1 ^ c1 ^ k0;
                c1 = low1;
                c2 = high0 ^ c3 ^ k1;
                c3 = low0;
            }
            for (const Words& words : {c0, c1, c2, c3}) {
                store(factors, select(words < threshold, Vec<float>{}, Vec<float>{} + kept));
                factors += PANEL;
            }
        }
    }

  private:
    // Computes the low and the high 32 bits of each product.
    static void product(Words a, uint32_t b, Words& low, Words& high) {
        using Wide = Vec<uint64_t>;
        constexpr uint64_t LOW = 0xffffffffu;
        const Wide pairs = bits_as<Wide>(a);
        const Wide even = (pairs & LOW) * b, odd = (pairs >> 32) * b;
        low = bits_as<Words>((even & LOW) | (odd << 32));
        high = bits_as<Words>((even >> 32) | (odd & ~LOW));
    }

    const uint64_t seed;
    const uint32_t threshold;
    const float kept;
};

}  // namespace
