// Dropout of whole tensors. Only the seed is kept: the backward pass applies the same function to the gradients.

#include "dropout.h"

namespace {

constexpr int64_t BLOCK = 32 * Dropout::GROUP;  // numbers in a row; their factors fit into the L1 cache
constexpr int64_t ALONE = 8 * BLOCK;            // numbers up to which one thread is faster

template <class S>
void drop(const S* from, S* to, int64_t n, double rate, uint64_t seed, int threads) {
    const Dropout dropout(rate, seed);
    const int64_t blocks = (n + BLOCK - 1) / BLOCK;
#pragma omp parallel for num_threads(n > ALONE ? threads : 1) schedule(static)
    for (int64_t block = 0; block < blocks; ++block) {
        alignas(64) float factors[BLOCK];
        const int64_t first = block * BLOCK, some = std::min(BLOCK, n - first);
        dropout.draw(0, 0, block, 0, some, factors);
        for (int64_t i = 0; i < some; ++i) write(to + first + i, read(from + first + i) * factors[i]);
    }
}

}  // namespace

extern "C" {

void txl_dropout_float32(const float* from, float* to, int64_t n, double rate, uint64_t seed, int threads) {
    drop(from, to, n, rate, seed, threads);
}
void txl_dropout_bfloat16(const BFloat16* from, BFloat16* to, int64_t n, double rate, uint64_t seed, int threads) {
    drop(from, to, n, rate, seed, threads);
}
}
