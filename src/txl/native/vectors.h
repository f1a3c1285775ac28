// Numbers and vectors of 64 bytes. Only vector extensions common to GCC and Clang are used, which the compiler
// translates for any processor. A vector that is wider than the processor's registers consists of two halves: GCC would
// keep a wider vector of its own in memory, and compute with it several times more slowly.

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

// Bytes of a vector register.
#if defined(__AVX512F__)
constexpr int REGISTER = 64;
#elif defined(__AVX2__)
constexpr int REGISTER = 32;
#else
constexpr int REGISTER = 16;
#endif

template <class T, int L>
struct Halves;

// L numbers.
template <class T, int L, bool = (L * sizeof(T) > REGISTER)>
struct Vector {
    typedef T type __attribute__((vector_size(L * sizeof(T))));
};
template <class T, int L>
struct Vector<T, L, true> {
    using type = Halves<T, L>;
};

// A vector of L numbers as two halves, with the operators that compilers define for vectors.
template <class T, int L>
struct Halves {
    using Half = typename Vector<T, L / 2>::type;
    using Mask = typename Vector<std::conditional_t<sizeof(T) == 4, int32_t, int64_t>, L>::type;
    Half low, high;

    T operator[](int i) const { return i < L / 2 ? low[i] : high[i - L / 2]; }

#define TXL_OPERATOR(RESULT, OP)                                                                     \
    friend RESULT operator OP(Halves a, Halves b) { return {a.low OP b.low, a.high OP b.high}; }     \
    friend RESULT operator OP(Halves a, T b) { return {a.low OP b, a.high OP b}; }                   \
    friend RESULT operator OP(T a, Halves b) { return {a OP b.low, a OP b.high}; }
    TXL_OPERATOR(Halves, +)
    TXL_OPERATOR(Halves, -)
    TXL_OPERATOR(Halves, *)
    TXL_OPERATOR(Halves, /)
    TXL_OPERATOR(Halves, &)
    TXL_OPERATOR(Halves, |)
    TXL_OPERATOR(Halves, ^)
    TXL_OPERATOR(Halves, <<)
    TXL_OPERATOR(Halves, >>)
    TXL_OPERATOR(Mask, <)
    TXL_OPERATOR(Mask, >)
#undef TXL_OPERATOR
    Halves& operator+=(Halves b) { return *this = *this + b; }
};

template <class V>
constexpr bool IS_HALVES = false;
template <class T, int L>
constexpr bool IS_HALVES<Halves<T, L>> = true;

template <class T>
constexpr int LANES = 64 / sizeof(T);
template <class T>
using Vec = typename Vector<T, LANES<T>>::type;

// Reads a vector of any type.
template <class V>
V loaded(const void* from) {
    if constexpr (IS_HALVES<V>) {
        using Half = typename V::Half;
        return {loaded<Half>(from), loaded<Half>(static_cast<const char*>(from) + sizeof(Half))};
    } else {
        V vector;
        std::memcpy(&vector, from, sizeof vector);
        return vector;
    }
}

template <class V>
void store_vector(void* to, V values) {
    if constexpr (IS_HALVES<V>) {
        store_vector(to, values.low);
        store_vector(static_cast<char*>(to) + sizeof values.low, values.high);
    } else {
        std::memcpy(to, &values, sizeof values);
    }
}

// The same bits as another type of vector.
template <class To, class From>
To bits_as(From from) {
    if constexpr (IS_HALVES<To>) {
        using Half = typename To::Half;
        return {bits_as<Half>(from.low), bits_as<Half>(from.high)};
    } else {
        return loaded<To>(&from);
    }
}

// `yes` where a comparison is true, else `no`.
template <class M, class V>
V select(M mask, V yes, V no) {
    if constexpr (IS_HALVES<V>) {
        return {select(mask.low, yes.low, no.low), select(mask.high, yes.high, no.high)};
    } else {
        return mask ? yes : no;
    }
}

// L numbers of 16 bits, as numbers of 32 bits.
template <int L>
typename Vector<uint32_t, L>::type widened(const uint16_t* from) {
    using Wide = typename Vector<uint32_t, L>::type;
    if constexpr (IS_HALVES<Wide>) {
        return {widened<L / 2>(from), widened<L / 2>(from + L / 2)};
    } else {
        return __builtin_convertvector(loaded<typename Vector<uint16_t, L>::type>(from), Wide);
    }
}

template <class T, class = std::enable_if_t<std::is_arithmetic<T>::value>>
Vec<T> load(const T* from) {
    return loaded<Vec<T>>(from);
}

inline Vec<float> load(const BFloat16* from) { return bits_as<Vec<float>>(widened<16>(&from->bits) << 16); }

template <class T>
void store(T* to, Vec<T> values) {
    store_vector(to, values);
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
    } else if constexpr (IS_HALVES<decltype(values)>) {
        return total<T, L / 2>(values.low + values.high);
    } else {
        typename Vector<T, L / 2>::type low, high;
        std::memcpy(&low, &values, sizeof low);
        std::memcpy(&high, reinterpret_cast<const char*>(&values) + sizeof low, sizeof high);
        return total<T, L / 2>(low + high);
    }
}

// exp(x) for x <= 0, up to rounding; 0 where the result would be below the smallest normal number.
template <class V>
V exponential(V x) {
    if constexpr (IS_HALVES<V>) {
        return {exponential(x.low), exponential(x.high)};
    } else {
        using Integers = typename Vector<int32_t, sizeof(V) / 4>::type;
        const auto vanishes = x < -87.0f;
        const auto within = vanishes ? V{} : x;  // NaN compares false, and is preserved
        const auto power = __builtin_convertvector(within * 1.44269504f - 0.5f, Integers);
        const auto whole = __builtin_convertvector(power, V);
        const auto r = (within - whole * 0.693359375f) + whole * 2.12194440e-4f;
        auto p = r * (1.0f / 5040) + 1.0f / 720;
        p = p * r + 1.0f / 120;
        p = p * r + 1.0f / 24;
        p = p * r + 1.0f / 6;
        p = p * r + 0.5f;
        p = p * r + 1.0f;
        p = p * r + 1.0f;
        return vanishes ? V{} : p * bits_as<V>((power + 127) << 23);
    }
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
