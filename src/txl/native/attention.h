// What attention is asked for, and what the pass forward (attend.cpp) and the one backward (attend_backward.cpp) share.

#pragma once

#include <algorithm>
#include <limits>
#include <memory>

#include "dropout.h"

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

}  // namespace
