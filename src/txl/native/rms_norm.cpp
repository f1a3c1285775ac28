// RMSNorm of rows (Zhang and Sennrich 2019) times a gain, and its gradients. Rows are short: D, the width of a head.

#include <algorithm>
#include <vector>

#include "panels.h"

namespace {

constexpr int64_t SOME = 256;       // rows of a task; the gain's gradient is summed within tasks, then in task order
constexpr int64_t ALONE = 1 << 14;  // numbers up to which one thread is faster

// Sum over [0,n): `vectors(i)` for each whole vector that begins at i, `numbers(i)` for each remaining number.
template <class Vectors, class Numbers>
float summed(int64_t n, const Vectors& vectors, const Numbers& numbers) {
    Vec<float> sums{};
    int64_t i = 0;
    for (; i + PANEL <= n; i += PANEL) sums += vectors(i);
    float sum = total<float, PANEL>(sums);
    for (; i < n; ++i) sum += numbers(i);
    return sum;
}

// Writes the normalised rows, and the scale 1 / sqrt(mean(x^2) + epsilon) of each row to `scales`.
template <class S>
void normalise(const S* from, const float* gain, int64_t rows, int64_t n, double epsilon, S* to, float* scales, int threads) {
#pragma omp parallel for num_threads(rows * n > ALONE ? threads : 1) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const S* x = from + row * n;
        S* out = to + row * n;
        const float square = summed(
            n, [&](int64_t i) { return load(x + i) * load(x + i); }, [&](int64_t i) { return read(x + i) * read(x + i); });
        const float scale = float(1 / std::sqrt(double(square) / double(n) + epsilon));
        scales[row] = scale;
        int64_t i = 0;
        for (; i + PANEL <= n; i += PANEL) write(out + i, load(x + i) * scale * load(gain + i));
        for (; i < n; ++i) write(out + i, read(x + i) * scale * gain[i]);
    }
}

// From the gradient `above` of the output, computes the gradients of the rows, and of the gain, summed over rows.
template <class S>
void gradients(const S* from, const float* gain, const float* scales, const S* above, int64_t rows, int64_t n, S* to,
               float* gain_gradient, int threads) {
    const int64_t tasks = (rows + SOME - 1) / SOME;
    std::vector<float> parts(tasks * n);
#pragma omp parallel for num_threads(rows * n > ALONE ? threads : 1) schedule(static)
    for (int64_t task = 0; task < tasks; ++task) {
        float* part = parts.data() + task * n;
        for (int64_t row = task * SOME; row < std::min(rows, (task + 1) * SOME); ++row) {
            const S *x = from + row * n, *g = above + row * n;
            S* out = to + row * n;
            const float scale = scales[row];
            const float along = scale * scale / float(n) * summed(
                n, [&](int64_t i) { return load(g + i) * load(gain + i) * load(x + i); },
                [&](int64_t i) { return read(g + i) * gain[i] * read(x + i); });
            int64_t i = 0;
            for (; i + PANEL <= n; i += PANEL) {
                const Vec<float> values = load(x + i), gradient = load(g + i);
                write(out + i, scale * (gradient * load(gain + i) - along * values));
                store(part + i, load(part + i) + gradient * values * scale);
            }
            for (; i < n; ++i) {
                write(out + i, scale * (read(g + i) * gain[i] - along * read(x + i)));
                part[i] += read(g + i) * read(x + i) * scale;
            }
        }
    }
    std::fill(gain_gradient, gain_gradient + n, 0.0f);
    for (int64_t task = 0; task < tasks; ++task)
        for (int64_t i = 0; i < n; ++i) gain_gradient[i] += parts[task * n + i];
}

}  // namespace

#define TXL_RMS_NORM(SUFFIX, S)                                                                                       \
    void txl_rms_norm_##SUFFIX(const S* from, const float* gain, int64_t rows, int64_t n, double epsilon, S* to,      \
                               float* scales, int threads) {                                                          \
        normalise(from, gain, rows, n, epsilon, to, scales, threads);                                                 \
    }                                                                                                                 \
    void txl_rms_norm_backward_##SUFFIX(const S* from, const float* gain, const float* scales, const S* above,        \
                                        int64_t rows, int64_t n, S* to, float* gain_gradient, int threads) {          \
        gradients(from, gain, scales, above, rows, n, to, gain_gradient, threads);                                    \
    }

extern "C" {
TXL_RMS_NORM(float32, float)
TXL_RMS_NORM(bfloat16, BFloat16)
}
