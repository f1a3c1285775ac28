// Products of two matrices, the second of which is packed in panels of 16 columns.
//
// A word has 32 bits: one float32, or two bfloat16 that are adjacent in a sum. A product is
// C[i,n] (+)= sum over words w of A[i,w] * B[w,n]. Two words of bfloat16 multiply as two pairs of numbers; sums are
// float32. A panel holds the words of 16 columns of B, [words,16]; if B is stored in rows, `word_stride` is the stride
// of its rows.
//
// bfloat16 needs instructions that some processors lack (`MULTIPLIES<BFloat16>` is false for them). With AMX a product
// consists of tiles of 16 rows; a process may have to request the use of AMX (`Tiles`).

#pragma once

#include <algorithm>

#if defined(__AVX512BF16__) && defined(__AVX512F__)
#include <immintrin.h>
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define TXL_AMX 1
#endif
#endif

#include "vectors.h"

namespace {

using Word = uint32_t;
using Words = Vec<Word>;

constexpr int64_t PANEL = 16;  // columns of a panel
constexpr int64_t AHEAD = 64;  // rows to prefetch, as their distance is too large for hardware prefetching
constexpr int64_t TILE = 16;   // products may read and write rows and words up to the next multiple of this

template <class S>
constexpr int64_t PER_WORD = 4 / sizeof(S);

template <class S>
constexpr bool MULTIPLIES = true;
#ifndef __AVX512BF16__
template <>
constexpr bool MULTIPLIES<BFloat16> = false;
#endif

inline int64_t rounded_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// ---------------------------------------------------------------------------------------------------------- packing

// Numbers [n] of a row as words, at most 16, followed by zeros.
template <class S>
Words words_of(const S* row, int64_t n) {
    Words words = {};
    if (n * int64_t(sizeof(S)) >= int64_t(sizeof words)) std::memcpy(&words, row, sizeof words);
    else if (n > 0) std::memcpy(&words, row, n * sizeof(S));
    return words;
}

// Shuffles with the same four words of `a` and `b` in each quarter of 128 bits; those of `b` count from REGISTER_WORDS.
#ifdef __clang__
#define TXL_SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define TXL_SHUFFLED(a, b, ...) __builtin_shuffle(a, b, RegisterWords{__VA_ARGS__})
#endif
#define TXL_QUARTER(at, i, j, k, l) at + i, at + j, at + k, at + l
#if defined(__AVX512F__)
#define TXL_IN_QUARTERS(a, b, ...)                                                                            \
    TXL_SHUFFLED(a, b, TXL_QUARTER(0, __VA_ARGS__), TXL_QUARTER(4, __VA_ARGS__), TXL_QUARTER(8, __VA_ARGS__), \
                 TXL_QUARTER(12, __VA_ARGS__))
#elif defined(__AVX2__)
#define TXL_IN_QUARTERS(a, b, ...) TXL_SHUFFLED(a, b, TXL_QUARTER(0, __VA_ARGS__), TXL_QUARTER(4, __VA_ARGS__))
#else
#define TXL_IN_QUARTERS(a, b, ...) TXL_SHUFFLED(a, b, TXL_QUARTER(0, __VA_ARGS__))
#endif

constexpr int REGISTER_WORDS = REGISTER / 4;
using RegisterWords = Vector<Word, REGISTER_WORDS>::type;

// Transposes a square in three rounds: adjacent words of quarters, pairs of words, quarters. Each shuffle is one
// instruction of the processor.
inline void transpose(RegisterWords (&rows)[REGISTER_WORDS]) {
    constexpr int N = REGISTER_WORDS;
    RegisterWords next[N];
    UNROLLED for (int i = 0; i < N; i += 2) {
        next[i] = TXL_IN_QUARTERS(rows[i], rows[i + 1], 0, N, 1, N + 1);
        next[i + 1] = TXL_IN_QUARTERS(rows[i], rows[i + 1], 2, N + 2, 3, N + 3);
    }
    UNROLLED for (int i = 0; i < N; i += 4)
        UNROLLED for (int j = 0; j < 2; ++j) {
            const RegisterWords a = next[i + j], b = next[i + j + 2];
            rows[i + 2 * j] = TXL_IN_QUARTERS(a, b, 0, 1, N, N + 1);
            rows[i + 2 * j + 1] = TXL_IN_QUARTERS(a, b, 2, 3, N + 2, N + 3);
        }
#if defined(__AVX512F__)
    UNROLLED for (int j = 0; j < 4; ++j) {
        const auto even = [](Words a, Words b) {
            return TXL_SHUFFLED(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
        };
        const auto odd = [](Words a, Words b) {
            return TXL_SHUFFLED(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
        };
        const Words a = even(rows[j], rows[4 + j]), b = odd(rows[j], rows[4 + j]);
        const Words c = even(rows[8 + j], rows[12 + j]), d = odd(rows[8 + j], rows[12 + j]);
        rows[j] = even(a, c), rows[4 + j] = even(b, d), rows[8 + j] = odd(a, c), rows[12 + j] = odd(b, d);
    }
#elif defined(__AVX2__)
    UNROLLED for (int j = 0; j < 4; ++j) {
        const RegisterWords a = rows[j], b = rows[4 + j];
        rows[j] = TXL_SHUFFLED(a, b, 0, 1, 2, 3, 8, 9, 10, 11);
        rows[4 + j] = TXL_SHUFFLED(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    }
#endif
}

#ifndef __AVX512F__
// Transposes 16 rows of 16 words, square by square.
inline void transpose(Words (&rows)[16]) {
    constexpr int N = REGISTER_WORDS;
    alignas(64) Word from[16][16], to[16][16];
    for (int i = 0; i < 16; ++i) store(from[i], rows[i]);
    for (int row = 0; row < 16; row += N)
        for (int column = 0; column < 16; column += N) {
            RegisterWords square[N];
            UNROLLED for (int i = 0; i < N; ++i) square[i] = loaded<RegisterWords>(from[row + i] + column);
            transpose(square);
            UNROLLED for (int i = 0; i < N; ++i) store_vector(to[column + i] + row, square[i]);
        }
    for (int i = 0; i < 16; ++i) rows[i] = load(to[i]);
}
#endif

// Packs the transpose of rows [n,width] into panels: each row becomes a column; zeros fill the last panel.
template <class S>
void pack_transposed(const S* rows, int64_t stride, int64_t n, int64_t width, int64_t words, Word* panels) {
    for (int64_t first = 0; first < n; first += PANEL, panels += words * PANEL)
        for (int64_t word = 0; word < words; word += PANEL) {
            const int64_t at = word * PER_WORD<S>;
            const S* row = rows + first * stride + at;
            Words block[16];
            if (first + AHEAD + PANEL <= n)
                UNROLLED for (int i = 0; i < 16; ++i) __builtin_prefetch(row + (AHEAD + i) * stride);
            if (first + PANEL <= n && (width - at) * int64_t(sizeof(S)) >= int64_t(sizeof block[0])) {
                UNROLLED for (int i = 0; i < 16; ++i) std::memcpy(&block[i], row + i * stride, sizeof block[i]);
            } else {
                UNROLLED for (int i = 0; i < 16; ++i)
                    block[i] = first + i < n ? words_of(row + i * stride, width - at) : Words{};
            }
            transpose(block);
            if (words - word >= PANEL) {
                UNROLLED for (int i = 0; i < 16; ++i) store(panels + (word + i) * PANEL, block[i]);
            } else {
                for (int64_t i = 0; i < words - word; ++i) store(panels + (word + i) * PANEL, block[i]);
            }
        }
}

// Packs rows [n,width] into panels without transposing, followed by zeros; products then sum over rows.
inline void pack(const float* rows, int64_t stride, int64_t n, int64_t width, int64_t words, Word* panels) {
    for (int64_t column = 0; column < width; column += PANEL, panels += words * PANEL)
        for (int64_t row = 0; row < words; ++row) {
            if (row + AHEAD < n) __builtin_prefetch(rows + (row + AHEAD) * stride + column);
            store(panels + row * PANEL, row < n ? words_of(rows + row * stride + column, width - column) : Words{});
        }
}
inline void pack(const BFloat16* rows, int64_t stride, int64_t n, int64_t width, int64_t words, Word* panels) {
    const auto half = [&](int64_t row, int64_t column) {
        const BFloat16* here = rows + row * stride + column;
        if (row < n && column + PANEL <= width) return widened<16>(&here->bits);
        uint16_t bits[16] = {};
        if (row < n) std::memcpy(bits, here, (width - column) * 2);
        return widened<16>(bits);
    };
    for (int64_t column = 0; column < width; column += PANEL, panels += words * PANEL)
        for (int64_t word = 0; word < words; ++word) {
            if (2 * word + 1 + AHEAD < n) {
                __builtin_prefetch(rows + (2 * word + AHEAD) * stride + column);
                __builtin_prefetch(rows + (2 * word + 1 + AHEAD) * stride + column);
            }
            store(panels + word * PANEL, half(2 * word, column) | half(2 * word + 1, column) << 16);
        }
}

// Numbers [n] of a row, at most 16, followed by zeros.
template <class S>
Vec<float> load_some(const S* row, int64_t n) {
    if (n >= PANEL) return load(row);
    float some[PANEL] = {};
    for (int64_t i = 0; i < n; ++i) some[i] = read(row + i);
    return load(some);
}

// Writes 16 numbers, rounded to the type of `to`.
inline void write(float* to, Vec<float> values) { store(to, values); }
inline void write(BFloat16* to, Vec<float> values) {
#ifdef __AVX512BF16__
    const auto rounded = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(values));
    std::memcpy(to, &rounded, sizeof rounded);
#else
    for (int i = 0; i < 16; ++i) write(to + i, values[i]);
#endif
}

// --------------------------------------------------------------------------------------------------------- products

template <class S>
inline __attribute__((always_inline)) void multiply_words(Vec<float>& sum, Word a, Words b) {
    if constexpr (sizeof(S) == 4) {
        float x;
        std::memcpy(&x, &a, sizeof x);
        sum += x * bits_as<Vec<float>>(b);
    } else {
#ifdef __AVX512BF16__
        sum = Vec<float>(_mm512_dpbf16_ps(__m512(sum), __m512bh(_mm512_set1_epi32(int(a))), __m512bh(b)));
#endif
    }
}

// R rows times P panels. Not inlined, so that the compiler keeps all sums in registers.
template <class S, int R, int P>
__attribute__((noinline)) void multiply_block(const Word* a, int64_t a_stride, const Word* panels, int64_t panel_stride,
                                              int64_t words, float* c, int64_t c_stride, bool add,
                                              int64_t word_stride) {
    Vec<float> sums[R][P] = {};
    if (add)
        UNROLLED for (int r = 0; r < R; ++r)
            UNROLLED for (int p = 0; p < P; ++p) sums[r][p] = load(c + r * c_stride + p * PANEL);
    for (int64_t word = 0; word < words; ++word) {
        Words columns[P];
        UNROLLED for (int p = 0; p < P; ++p) columns[p] = load(panels + p * panel_stride + word * word_stride);
        UNROLLED for (int r = 0; r < R; ++r)
            UNROLLED for (int p = 0; p < P; ++p) multiply_words<S>(sums[r][p], a[r * a_stride + word], columns[p]);
    }
    UNROLLED for (int r = 0; r < R; ++r)
        UNROLLED for (int p = 0; p < P; ++p) store(c + r * c_stride + p * PANEL, sums[r][p]);
}

// Sums that registers hold: 24 of 32 with AVX-512 and on ARM, 12 of 16 with AVX2, else 8 of 16.
#if defined(__AVX512F__)
constexpr int BLOCK_ROWS = 6, BLOCK_PANELS = 4;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int BLOCK_ROWS = 6, BLOCK_PANELS = 1;
#else
constexpr int BLOCK_ROWS = 2, BLOCK_PANELS = 1;
#endif

// All rows times P panels: R rows at a time, then the remaining rows.
template <class S, int P, int R = BLOCK_ROWS>
void multiply_rows(const Word* a, int64_t a_stride, int64_t rows, const Word* panels, int64_t panel_stride, int64_t words,
                   float* c, int64_t c_stride, bool add, int64_t word_stride) {
    int64_t row = 0;
    for (; row + R <= rows; row += R)
        multiply_block<S, R, P>(a + row * a_stride, a_stride, panels, panel_stride, words, c + row * c_stride, c_stride,
                                add, word_stride);
    if constexpr (R > 1)
        if (row < rows)
            multiply_rows<S, P, R - 1>(a + row * a_stride, a_stride, rows - row, panels, panel_stride, words,
                                       c + row * c_stride, c_stride, add, word_stride);
}

// All rows times all panels: P panels at a time, which stay in the L1 cache, then the remaining panels.
template <class S, int P = BLOCK_PANELS>
void multiply_all(const Word* a, int64_t a_stride, int64_t rows, const Word* panels, int64_t panel_stride,
                  int64_t n_panel, int64_t words, float* c, int64_t c_stride, bool add, int64_t word_stride) {
    int64_t p = 0;
    for (; p + P <= n_panel; p += P)
        multiply_rows<S, P>(a, a_stride, rows, panels + p * panel_stride, panel_stride, words, c + p * PANEL, c_stride,
                            add, word_stride);
    if constexpr (P > 1)
        if (p < n_panel)
            multiply_all<S, P - 1>(a, a_stride, rows, panels + p * panel_stride, panel_stride, n_panel - p, words,
                                   c + p * PANEL, c_stride, add, word_stride);
}

#ifdef TXL_AMX
// Tile registers of a thread, configured while this object exists: each has 16 rows of 16 words.
class Tiles {
  public:
    Tiles() : usable(asked()) {
        if (!usable) return;
        alignas(64) struct {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } layout;
        asm volatile("" ::: "memory");
        _tile_loadconfig(&layout);
    }
    ~Tiles() {
        if (usable) _tile_release();
    }
    Tiles(const Tiles&) = delete;

    const bool usable;

  private:
    static bool asked() {  // on Linux a process must request the use of tiles
        constexpr int REQUEST = 0x1023, TILE_DATA = 18;
        static const bool granted = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
        return granted;
    }
};

// 16 R rows times P panels.
template <int R, int P>
__attribute__((noinline)) void multiply_tiles(const Word* a, int64_t a_stride, const Word* panels, int64_t panel_stride,
                                              int64_t words, float* c, int64_t c_stride, bool add,
                                              int64_t word_stride) {
    asm volatile("" ::: "memory");  // the compiler does not see that tiles read memory
    float *c1 = c + TILE * c_stride, *c2 = c + PANEL, *c3 = c1 + PANEL;
    if (add) {
        _tile_loadd(0, c, c_stride * 4);
        if constexpr (R > 1) _tile_loadd(1, c1, c_stride * 4);
        if constexpr (P > 1) _tile_loadd(2, c2, c_stride * 4);
        if constexpr (R > 1 && P > 1) _tile_loadd(3, c3, c_stride * 4);
    } else {
        _tile_zero(0);
        if constexpr (R > 1) _tile_zero(1);
        if constexpr (P > 1) _tile_zero(2);
        if constexpr (R > 1 && P > 1) _tile_zero(3);
    }
    for (int64_t word = 0; word < words; word += TILE) {
        _tile_loadd(4, a + word, a_stride * 4);
        _tile_loadd(6, panels + word * word_stride, word_stride * 4);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (R > 1) {
            _tile_loadd(5, a + TILE * a_stride + word, a_stride * 4);
            _tile_dpbf16ps(1, 5, 6);
        }
        if constexpr (P > 1) {
            _tile_loadd(7, panels + panel_stride + word * word_stride, word_stride * 4);
            _tile_dpbf16ps(2, 4, 7);
            if constexpr (R > 1) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, c_stride * 4);
    if constexpr (R > 1) _tile_stored(1, c1, c_stride * 4);
    if constexpr (P > 1) _tile_stored(2, c2, c_stride * 4);
    if constexpr (R > 1 && P > 1) _tile_stored(3, c3, c_stride * 4);
    asm volatile("" ::: "memory");
}

template <int R>
void multiply_tile_rows(const Word* a, int64_t a_stride, const Word* panels, int64_t panel_stride, int64_t n_panel,
                        int64_t words, float* c, int64_t c_stride, bool add, int64_t word_stride) {
    int64_t p = 0;
    for (; p + 2 <= n_panel; p += 2)
        multiply_tiles<R, 2>(a, a_stride, panels + p * panel_stride, panel_stride, words, c + p * PANEL, c_stride, add,
                             word_stride);
    if (p < n_panel)
        multiply_tiles<R, 1>(a, a_stride, panels + p * panel_stride, panel_stride, words, c + p * PANEL, c_stride, add,
                             word_stride);
}
#else
struct Tiles {
    static constexpr bool usable = false;
};
#endif

// C [rows,16*n_panel] = A [rows,words] times panels, or C += if `add`. With tiles, rows and words are rounded up to
// multiples of 16: A, B and C must have memory for these, and the additional words of A, or those of B, must be zeros.
template <class S>
void multiply([[maybe_unused]] const Tiles& tiles, const Word* a, int64_t a_stride, int64_t rows, const Word* panels,
              int64_t panel_stride, int64_t n_panel, int64_t words, float* c, int64_t c_stride, bool add,
              int64_t word_stride = PANEL) {
#ifdef TXL_AMX
    if (sizeof(S) == 2 && tiles.usable) {
        int64_t row = 0;
        for (; row + TILE < rows; row += 2 * TILE)
            multiply_tile_rows<2>(a + row * a_stride, a_stride, panels, panel_stride, n_panel, words,
                                  c + row * c_stride, c_stride, add, word_stride);
        if (row < rows)
            multiply_tile_rows<1>(a + row * a_stride, a_stride, panels, panel_stride, n_panel, words,
                                  c + row * c_stride, c_stride, add, word_stride);
        return;
    }
#endif
    multiply_all<S>(a, a_stride, rows, panels, panel_stride, n_panel, words, c, c_stride, add, word_stride);
}

}  // namespace
