// Cross-entropy of rows of logits, and its gradient. A row is read twice, the second time from a cache. Of the outputs,
// only the gradient has the length of the row.

#include "panels.h"

namespace {

constexpr int64_t ALONE = 1 << 15;  // logits up to which one thread is faster
constexpr int64_t STRIDE = 4 * PANEL;

// Returns the sum of exp(x - max(x)) for a row x[n], and max(x) in `greatest`. 64 partial sums keep each sum short.
template <class S>
float sum_of_exponentials(const S* x, int64_t n, float& greatest) {
    Vec<float> most[4], sums[4] = {};
    UNROLLED for (auto& each : most) each = Vec<float>{} - INFINITY;
    int64_t whole = n / STRIDE * STRIDE;
    for (int64_t i = 0; i < whole; i += STRIDE)
        UNROLLED for (int part = 0; part < 4; ++part) {
            const Vec<float> values = load(x + i + part * PANEL);
            most[part] = select(values > most[part], values, most[part]);
        }
    greatest = -INFINITY;
    for (const auto& each : most)
        for (int lane = 0; lane < PANEL; ++lane) greatest = std::max(greatest, each[lane]);
    for (int64_t i = whole; i < n; ++i) greatest = std::max(greatest, read(x + i));
    for (int64_t i = 0; i < whole; i += STRIDE)
        UNROLLED for (int part = 0; part < 4; ++part) sums[part] += exponential(load(x + i + part * PANEL) - greatest);
    float sum = total<float, PANEL>((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (int64_t i = whole; i < n; ++i) sum += std::exp(read(x + i) - greatest);
    return sum;
}

// Computes for each row the loss, and the two numbers that determine its softmax: max(x) and log sum exp(x - max(x)).
// Their sum alone would lose the fractional digits of large logits.
template <class S>
void losses(const S* logits, const int64_t* targets, int64_t rows, int64_t n, float* loss, float* sums, int threads) {
#pragma omp parallel for num_threads(rows * n > ALONE ? threads : 1) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const S* x = logits + row * n;
        float greatest;
        const float log_sum = std::log(sum_of_exponentials(x, n, greatest));
        loss[row] = log_sum - (read(x + targets[row]) - greatest);
        sums[2 * row] = greatest;
        sums[2 * row + 1] = log_sum;
    }
}

// Writes (softmax(x) - onehot(target)) times the gradient of the row's loss; `out` may be the logits themselves.
template <class S>
void gradients(
    const S* logits, const int64_t* targets, const float* sums, const float* above, int64_t rows, int64_t n, S* out,
    int threads
) {
#pragma omp parallel for num_threads(rows * n > ALONE ? threads : 1) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const S* x = logits + row * n;
        S* to = out + row * n;
        const float greatest = sums[2 * row], log_sum = sums[2 * row + 1], factor = above[row];
        const float at_target = std::expm1(read(x + targets[row]) - greatest - log_sum) * factor;
        int64_t i = 0;
        for (; i + PANEL <= n; i += PANEL) write(to + i, exponential(load(x + i) - greatest - log_sum) * factor);
        for (; i < n; ++i) write(to + i, std::exp(read(x + i) - greatest - log_sum) * factor);
        write(to + targets[row], at_target);
    }
}

}  // namespace

#define TXL_CROSS_ENTROPY(SUFFIX, S)                                                                                \
    void txl_cross_entropy_##SUFFIX(                                                                                \
        const S* logits, const int64_t* targets, int64_t rows, int64_t n, float* loss, float* sums, int threads     \
    ) {                                                                                                             \
        losses(logits, targets, rows, n, loss, sums, threads);                                                      \
    }                                                                                                               \
    void txl_cross_entropy_backward_##SUFFIX(                                                                       \
        const S* logits, const int64_t* targets, const float* sums, const float* above, int64_t rows, int64_t n,    \
        S* out, int threads                                                                                         \
    ) {                                                                                                             \
        gradients(logits, targets, sums, above, rows, n, out, threads);                                             \
    }

extern "C" {

TXL_CROSS_ENTROPY(float32, float)
TXL_CROSS_ENTROPY(bfloat16, BFloat16)
}
