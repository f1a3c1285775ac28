// Arguments of attention, and code shared by the forward pass (attend.cpp) and the backward pass (attend_backward.cpp).

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

struct Rows {  // numbers [B,n,H,D] with stride 1 in the last dimension; strides are counted in numbers
    const void* first;
    int64_t lane, row, head;
};

struct Attention {
    int64_t lanes, queries, keys, heads, width;
    Rows query, key, value;
    Rows position;     // W_kR R [S,H,D], farthest distance first, without lanes; or null
    const float *u, *v;  // [H,D], or null
    const int64_t* filled;  // [B], number of filled positions of memory, which are the newest; or null: all S - T
    int64_t window;    // keys that a query sees, its own included
    void* out;         // [B,T,H,D]
    float* sums;       // [B,H,T,2], a query's greatest score and sum of exp(score - greatest); or null
    double dropout;    // probability with which a weight is dropped
    uint64_t seed;     // of dropout
};

namespace {

// Aligned, uninitialised memory for words or floats.
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

// Keys that the queries of a lane see; queries and keys are each counted from their first.
struct Sight {
    int64_t memory, filled, window;

    Sight(const Attention& a, int64_t lane)
        : memory(a.keys - a.queries), filled(a.filled ? a.filled[lane] : memory), window(a.window) {}

    // The first key that a query sees, and the key after the last one.
    int64_t first(int64_t query) const { return max(memory - filled, memory + query + 1 - window); }
    int64_t last(int64_t query) const { return memory + query + 1; }
};

}  // namespace
