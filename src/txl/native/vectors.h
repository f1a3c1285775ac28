// Numbers and vectors of 64 bytes. Only vector extensions common to GCC and Clang are used, which the compiler
// translates for any processor.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace {

using std::int64_t;

#define UNROLLED _Pragma("GCC unroll 16")

struct BFloat16 {
    uint16_t bits;
};

template <class T, int L>
struct Vector {
    typedef T type __attribute__((vector_size(L * sizeof(T))));
};

template <class T>
constexpr int LANES = 64 / sizeof(T);
template <class T>
using Vec = typename Vector<T, LANES<T>>::type;

template <class T, class = std::enable_if_t<std::is_arithmetic<T>::value>>
Vec<T> load(const T* from) {
    Vec<T> loaded;
    std::memcpy(&loaded, from, sizeof loaded);
    return loaded;
}

inline Vec<float> load(const BFloat16* from) {
    Vector<uint16_t, 16>::type bits;
    std::memcpy(&bits, from, sizeof bits);
    const auto wide = __builtin_convertvector(bits, Vector<uint32_t, 16>::type) << 16;
    Vec<float> loaded;
    std::memcpy(&loaded, &wide, sizeof loaded);
    return loaded;
}

template <class T>
void store(T* to, Vec<T> values) {
    std::memcpy(to, &values, sizeof values);
}

inline float read(const float* from) { return *from; }
inline double read(const double* from) { return *from; }
inline float read(const BFloat16* from) {
    const uint32_t wide = uint32_t(from->bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

inline void write(float* to, float value) { *to = value; }
inline void write(double* to, double value) { *to = value; }
inline void write(BFloat16* to, float value) {  // rounds to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    to->bits = value != value ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <class T, int L>
T total(typename Vector<T, L>::type values) {
    if constexpr (L == 1) {
        return values[0];
    } else {
        typename Vector<T, L / 2>::type low, high;
        std::memcpy(&low, &values, sizeof low);
        std::memcpy(&high, reinterpret_cast<const char*>(&values) + sizeof low, sizeof high);
        return total<T, L / 2>(low + high);
    }
}

// exp(x) for x <= 0, up to rounding; 0 where the result would be below the smallest normal number.
inline Vec<float> exponential(Vec<float> x) {
    const auto vanishes = x < -87.0f;
    const auto within = vanishes ? Vec<float>{} : x;  // NaN compares false, and is preserved
    const auto power = __builtin_convertvector(within * 1.44269504f - 0.5f, Vector<int32_t, 16>::type);
    const auto whole = __builtin_convertvector(power, Vec<float>);
    const auto r = (within - whole * 0.693359375f) + whole * 2.12194440e-4f;
    auto p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const auto bits = (power + 127) << 23;
    Vec<float> scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return vanishes ? Vec<float>{} : p * scale;
}

inline void exponentials(float* values, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) store(values + i, exponential(load(values + i)));
    for (; i < n; ++i) values[i] = std::exp(values[i]);
}
inline void exponentials(double* values, int64_t n) {
    for (int64_t i = 0; i < n; ++i) values[i] = std::exp(values[i]);
}

template <class T>
T summed(const T* values, int64_t n) {
    constexpr int L = LANES<T>;
    Vec<T> sums = {};
    int64_t i = 0;
    for (; i + L <= n; i += L) sums += load(values + i);
    T sum = total<T, L>(sums);
    for (; i < n; ++i) sum += values[i];
    return sum;
}

}  // namespace
