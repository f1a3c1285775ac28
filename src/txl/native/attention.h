// What attention is asked for, and what the pass forward (attend.cpp) and the one backward (attend_backward.cpp) share.

#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "panels.h"

namespace {

using std::max;
using std::min;

constexpr float NOTHING = -std::numeric_limits<float>::infinity();

}  // namespace

struct Rows {  // numbers [B,n,H,D] of which only the last dimension lies behind one another; strides in numbers
    const void* first;
    int64_t lane, row, head;
};

struct Attention {
    int64_t lanes, queries, keys, heads, width;
    Rows query, key, value;
    Rows position;     // W_kR R [S,H,D], farthest distance first, without lanes; or null
    const float *u, *v;  // [H,D], or null
    const int64_t* filled;  // [B], how many of the S - T positions of memory hold something, the newest; or null: all
    int64_t window;    // keys that a query sees, itself among them
    void* out;         // [B,T,H,D]
    float* sums;       // [B,H,T,2], a query's greatest score and the sum of exponentials of all less that; or null
    double dropout;    // probability with which a weight is dropped
    uint64_t seed;     // of what is dropped
};

namespace {

// Room for words or floats, aligned, not set to anything.
template <class T>
class Room {
  public:
    explicit Room(int64_t n) : memory(new char[n * sizeof(T) + 64]) {
        const auto address = reinterpret_cast<uintptr_t>(memory.get());
        first = reinterpret_cast<T*>((address + 63) / 64 * 64);
    }
    operator T*() const { return first; }

  private:
    std::unique_ptr<char[]> memory;
    T* first;
};

// Which keys queries of a lane see, both counted from the first of their kind.
struct Sight {
    int64_t memory, filled, window;

    Sight(const Attention& a, int64_t lane)
        : memory(a.keys - a.queries), filled(a.filled ? a.filled[lane] : memory), window(a.window) {}

    // The first key that a query sees, and the one behind its last.
    int64_t first(int64_t query) const { return max(memory - filled, memory + query + 1 - window); }
    int64_t last(int64_t query) const { return memory + query + 1; }
};

// 1/(1-p) for each weight that is kept, 0 for each that is dropped: drawn from its place alone, so that any pass over
// the weights, in any order, draws the same.
//
// Philox4x32 with 7 rounds, which pass BigCrush (Salmon et al. 2011). Its counter is (group of keys, query, head, lane),
// its key the seed. The four words of 16 neighbouring counters belong to 64 neighbouring keys, 16 for each word.
class Dropout {
  public:
    static constexpr int64_t GROUP = 4 * PANEL;  // keys

    explicit Dropout(const Attention& a)
        : seed(a.seed),
          threshold(uint32_t(min(std::round(a.dropout * 4294967296.0), 4294967295.0))),
          kept(float(1 / (1 - a.dropout))) {}

    // Of keys [from, to), `from` at a group's beginning; whole groups are written.
    void draw(int64_t lane, int64_t head, int64_t query, int64_t from, int64_t to, float* factors) const {
        constexpr int ROUNDS = 7;
        const Words next = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        for (int64_t key = from; key < to; key += GROUP) {
            Words c0 = next + uint32_t(key / 4), c1 = Words{} + uint32_t(query);
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
                store(factors, words < threshold ? Vec<float>{} : Vec<float>{} + kept);
                factors += PANEL;
            }
        }
    }

  private:
    // Both halves of 64 bits of each product.
    static void product(Words a, uint32_t b, Words& low, Words& high) {
        using Wide = Vector<uint64_t, 8>::type;
        constexpr uint64_t LOW = 0xffffffffu;
        Wide pairs, other;
        std::memcpy(&pairs, &a, sizeof pairs);
        const Wide even = (pairs & LOW) * b, odd = (pairs >> 32) * b;
        other = (even & LOW) | (odd << 32);
        std::memcpy(&low, &other, sizeof low);
        other = (even >> 32) | (odd & ~LOW);
        std::memcpy(&high, &other, sizeof high);
    }

    const uint64_t seed;
    const uint32_t threshold;
    const float kept;
};

}  // namespace
