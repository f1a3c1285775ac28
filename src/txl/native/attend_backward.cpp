// Gradients of attention on a CPU: of queries, keys, values, projected positions, u and v.
//
// The forward pass (attend.cpp) keeps its outputs, and for each query the greatest score and the sum of
// exp(score - greatest). From these, the weights of a few queries and a block of keys are computed again, in a tile
// that stays in the L2 cache, and are replaced in place by the gradient of the scores:
//
//     P = exp(score - greatest) / sum    dP = dO V^T    dS = P (keep dP - dO . O)    keep: factors of dropout
//     dV = (keep P)^T dO    dK = dS^T (q + u)    dq = dS K + dB R    dR = dB^T (q + v)    du, dv: sums over queries
//
// B are the position terms by distance, before Appendix B's shift, in a tile [queries, distances]. Read with a row
// stride smaller by one, the tile is [queries, keys], which is the shift. dS is written through this view, and all
// other entries of the tile are set to zero. The tile is then dB, without a copy. Scores are summed in the same order
// as in the forward pass, so that they have the same bits.
//
// A task has one head and several lanes. It sums the gradients of positions, u and v over its lanes, in their order;
// then the sums of all tasks of a head are added, in task order. The number of tasks depends only on the shape, so
// results do not depend on the number of threads. All numbers but the operands of products are float32.
//
// Shapes: B lanes, T queries, S keys of which the last T are the queries' own, H heads, D width of a head.

#include <utility>

#include "attention.h"

struct AttentionGradients {
    Attention of;     // arguments of the forward pass, without `out`
    Rows out, above;  // [B,T,H,D]: output of the forward pass, and its gradient
    void *query, *key, *value;  // gradients [B,T,H,D], [B,S,H,D], [B,S,H,D]
    void* position;   // [S,H,D], or null if `of.position` is
    float *u, *v;     // [H,D], or null if those of `of` are
};

namespace {

constexpr int64_t FEW = 32;     // queries in a tile
constexpr int64_t TASKS = 32;   // approximate upper bound
constexpr int64_t STEP = 32;    // the number of keys in a tile is a multiple of this

// Largest number of keys in a block: packed keys and values, and the sums of their gradients, must fit into a cache.
template <class S>
int64_t most_keys(const Attention& a) {
    const int64_t fitting = 16384 * PER_WORD<S> / a.width / STEP * STEP;
    return min(max(min(fitting, int64_t(512)), STEP), rounded_up(a.keys, STEP));
}

// Writes two rows of 16 floats as bfloat16: each as a row, and both as words of adjacent numbers of a column.
#ifdef __AVX512BF16__
inline void write_pairs(Vec<float> even, Vec<float> odd, BFloat16* even_row, BFloat16* odd_row, Word* words) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(__m512(odd), __m512(even));
    if (even_row) {
        _mm256_storeu_si256((__m256i*)even_row, _mm512_castsi512_si256(both));
        _mm256_storeu_si256((__m256i*)odd_row, _mm512_extracti64x4_epi64(both, 1));
    }
    const __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(both));
    const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(both, 1)), 16);
    _mm512_storeu_si512(words, _mm512_or_si512(low, high));
}
#else
inline void write_pairs(Vec<float>, Vec<float>, BFloat16*, BFloat16*, Word*) {}
#endif

// Writes rows [n,width] from columns [width,n], in blocks of 16 by 16; the last blocks are used in part.
template <class S, class Row>
void write_transposed(const float* columns, int64_t stride, int64_t n, int64_t width, const Row& row) {
    for (int64_t first = 0; first < n; first += PANEL)
        for (int64_t i = 0; i < width; i += PANEL) {
            Words block[16];
            UNROLLED for (int j = 0; j < 16; ++j) std::memcpy(&block[j], columns + (i + j) * stride + first, sizeof block[j]);
            transpose(block);
            Vec<float> values[16];
            std::memcpy(values, block, sizeof values);
            if (i + PANEL <= width && first + PANEL <= n) {
                UNROLLED for (int j = 0; j < 16; ++j) write(row(first + j) + i, values[j]);
            } else {
                for (int64_t j = 0; j < min(PANEL, n - first); ++j)
                    for (int64_t k = 0; k < min(PANEL, width - i); ++k) write(row(first + j) + i + k, values[j][k]);
            }
        }
}

// Layout of sums over lanes: gradients of a head's positions, in columns of which the first ones are unused, u and v.
struct Shared {
    int64_t columns, width, size;

    explicit Shared(const Attention& a)
        : columns(a.position.first ? rounded_up(a.keys + before(a) + FEW + STEP, STEP) : 0),
          width(rounded_up(a.width, PANEL)),
          size(width * stride() + 2 * width) {}

    // Columns before the farthest distance, so that every tile begins at a panel.
    static int64_t before(const Attention& a) { return FEW + rounded_up(a.queries, PANEL) - a.queries; }
    int64_t stride() const { return columns ? columns + PANEL : 0; }  // of rows; no power of two: cache conflicts
    float* u(float* sums) const { return sums + width * stride(); }
    float* v(float* sums) const { return u(sums) + width; }
};

// Backward pass of one head and several lanes.
template <class S>
class Backward {
  public:
    explicit Backward(const AttentionGradients& gradients)
        : g(gradients),
          a(gradients.of),
          relative(a.position.first != nullptr),
          memory(a.keys - a.queries),
          width(rounded_up(a.width, PANEL)),
          words(rounded_up(a.width, PANEL * PER_WORD<S>) / PER_WORD<S>),
          rows(rounded_up(a.queries, FEW)),
          feature_stride(rows / PER_WORD<S> + PANEL),
          most(most_keys<S>(a)),
          distances(a),
          tile_stride(most + (relative ? FEW : 0) + PANEL),
          key_stride(most + PANEL),
          scale(float(1 / std::sqrt(double(a.width)))),
          dropout(a.dropout, a.seed),
          by_key(rows * words),
          by_distance(relative ? rows * words : 0),
          above(rows * words),
          by_key_t(width * feature_stride),
          by_distance_t(relative ? width * feature_stride : 0),
          above_t(width * feature_stride),
          greatest(rows),
          inverse(rows),
          delta(rows),
          query_u(rows * width),
          query_v(relative ? rows * width : 0),
          keys_t(most * words),
          keys(most / PER_WORD<S> * width),
          values_t(most * words),
          positions_t(distances.columns * words),
          positions(distances.columns / PER_WORD<S> * width),
          padded(rounded_up(distances.columns * a.width, PER_WORD<S>) / PER_WORD<S>),
          tile(FEW * tile_stride + PANEL),
          contents(FEW * key_stride),
          products(FEW * key_stride),
          factors(a.dropout > 0 ? most + 2 * Dropout::GROUP : 0),
          halves(sizeof(S) == 2 ? FEW / 2 * tile_stride * 5 : 0),
          key_sums(width * key_stride),
          value_sums(width * key_stride) {
        // Words after the last feature stay zero.
        std::fill(by_key + 0, by_key + rows * words, 0);
        if (relative) std::fill(by_distance + 0, by_distance + rows * words, 0);
        std::fill(above + 0, above + rows * words, 0);
    }

    // Selects a head; sums over lanes are added to `shared` from here on.
    void begin(int64_t number, float* shared) {
        head = number;
        position_sums = shared, u_sums = distances.u(shared), v_sums = distances.v(shared);
        std::fill(shared, shared + distances.size, 0.0f);
        if (relative) pack_positions();
    }

    void run(int64_t number) {
        lane = number;
        pack_queries();
        std::fill(query_u + 0, query_u + rows * width, 0.0f);
        if (relative) std::fill(query_v + 0, query_v + rows * width, 0.0f);
        for (int64_t key = 0; key < a.keys; key += most) block(key, min(key + most, a.keys));
        finish();
    }

  private:
    const S* at(const Rows& from, int64_t row) const {
        return (const S*)from.first + lane * from.lane + row * from.row + head * from.head;
    }

    // Packs W_kR R, preceded by columns of zeros, by distance and by feature.
    void pack_positions() {
        const int64_t before = Shared::before(a), n = distances.columns;
        S* all = (S*)(padded + 0);
        std::memset(all, 0, n * a.width * sizeof(S));
        for (int64_t i = 0; i < a.keys; ++i)
            std::memcpy(all + (before + i) * a.width,
                        (const S*)a.position.first + head * a.position.head + i * a.position.row, a.width * sizeof(S));
        pack_transposed(all, a.width, n, a.width, words, (Word*)positions_t);
        pack(all, a.width, n, a.width, n / PER_WORD<S>, (Word*)positions);
    }

    // Packs (q + u) / sqrt(D), (q + v) / sqrt(D) and the gradient `above`, by query and by feature; computes dO . O.
    void pack_queries() {
        std::fill(greatest + 0, greatest + rows, 0.0f);
        std::fill(inverse + 0, inverse + rows, 0.0f);
        for (int64_t t = 0; t < a.queries; ++t) {
            const float* kept = a.sums + ((lane * a.heads + head) * a.queries + t) * 2;
            greatest[t] = kept[0], inverse[t] = 1 / kept[1];
        }
        Vec<float> one[FEW], other[FEW];
        for (int64_t t = 0; t < rows; t += FEW) {
            // Sum feature by feature, like the products dO V^T: in a row that a single weight dominates, the product
            // and the mean dO . O are almost equal, and should have almost equal rounding errors.
            Vec<float> products[FEW / PANEL] = {};
            for (int64_t i = 0; i < width; i += PANEL) {
                const auto bias = [&](const float* of) {
                    return of ? load_some(of + head * a.width + i, a.width - i) : Vec<float>{};
                };
                const Vec<float> bias_u = bias(a.u), bias_v = bias(a.v);
                get(a.query, t, i, one);
                for (int64_t r = 0; r < FEW; ++r) other[r] = t + r < a.queries ? (one[r] + bias_v) * scale : Vec<float>{};
                for (int64_t r = 0; r < FEW; ++r) one[r] = t + r < a.queries ? (one[r] + bias_u) * scale : Vec<float>{};
                put(one, t, i, by_key, by_key_t);
                if (relative) put(other, t, i, by_distance, by_distance_t);
                get(g.above, t, i, one);
                get(g.out, t, i, other);
                put(one, t, i, above, above_t);
                for (int64_t part = 0; part < FEW; part += PANEL) {
                    Words turned[16];
                    const auto sum = [&](const auto& factor) {
                        UNROLLED for (int j = 0; j < 16; ++j)
                            products[part / PANEL] += factor(j) * bits_as<Vec<float>>(turned[j]);
                    };
                    if constexpr (sizeof(S) == 4) {
                        std::memcpy(turned, other + part, sizeof turned);
                        transpose(turned);
                        sum([&](int j) { return load((float*)(above_t + (i + j) * feature_stride + t + part)); });
                    } else {
                        UNROLLED for (int j = 0; j < 16; ++j)
                            turned[j] = bits_as<Words>(one[part + j] * other[part + j]);
                        transpose(turned);
                        sum([](int) { return 1.0f; });
                    }
                }
            }
            for (int64_t part = 0; part < FEW / PANEL; ++part) store(delta + t + part * PANEL, products[part]);
        }
    }

    // Loads features [i, i + 16) of queries from t on; zeros where there is no query or feature.
    void get(const Rows& from, int64_t t, int64_t i, Vec<float> (&values)[FEW]) const {
        for (int64_t r = 0; r < FEW; ++r) {
            values[r] = Vec<float>{};
            if (t + r >= a.queries) continue;
            const S* row = at(from, t + r) + i;
            if (t + r + AHEAD < a.queries) __builtin_prefetch(row + AHEAD * from.row);
            values[r] = load_some(row, a.width - i);
        }
    }

    // Writes the values that `get` loads as operands, by query and, transposed, by feature.
    void put(const Vec<float> (&values)[FEW], int64_t t, int64_t i, Word* by_query, Word* by_feature) const {
        Word* to = by_query + t * words + i / PER_WORD<S>;
        Words turned[16];
        if constexpr (sizeof(S) == 2) {
            for (int64_t r = 0; r < FEW; r += 2)
                write_pairs(values[r], values[r + 1], (S*)(to + r * words), (S*)(to + (r + 1) * words), (Word*)&turned[r / 2]);
            transpose(turned);
            for (int64_t j = 0; j < PANEL; ++j) store(by_feature + (i + j) * feature_stride + t / 2, turned[j]);
        } else {
            for (int64_t r = 0; r < FEW; ++r) store((float*)(to + r * words), values[r]);
            for (int64_t part = 0; part < FEW; part += PANEL) {
                std::memcpy(turned, values + part, sizeof turned);
                transpose(turned);
                for (int64_t j = 0; j < PANEL; ++j) store(by_feature + (i + j) * feature_stride + t + part, turned[j]);
            }
        }
    }

    void block(int64_t first, int64_t last) {
        const Sight sight(a, lane);
        std::fill(key_sums + 0, key_sums + width * key_stride, 0.0f);
        std::fill(value_sums + 0, value_sums + width * key_stride, 0.0f);
        if (sight.first(0) < last) {
            for (const auto& [from, to] : {std::pair(a.key, (Word*)keys_t), std::pair(a.value, (Word*)values_t)}) {
                pack_transposed(at(from, first), from.row, last - first, a.width, words, to);
                const int64_t packed = rounded_up(last - first, PANEL), wanted = rounded_up(last - first, STEP);
                std::fill(to + packed * words, to + wanted * words, 0);
            }
            pack(at(a.key, first), a.key.row, last - first, a.width, most / PER_WORD<S>, (Word*)keys);
        }
        const Tiles here;
        tiles = &here;
        for (int64_t t = 0; t < a.queries; t += FEW) {
            const int64_t seen = max(first, sight.first(t)) - first;
            const int64_t behind = min(last, sight.last(min(t + FEW, a.queries) - 1)) - first;
            if (seen < behind) few(sight, t, first, seen / STEP * STEP, rounded_up(behind, STEP));
        }
        const auto write = [&](const float* sums, void* to) {
            write_transposed<S>(sums, key_stride, last - first, a.width, [&](int64_t key) {
                return (S*)to + ((lane * a.keys + first + key) * a.heads + head) * a.width;
            });
        };
        write(key_sums, g.key);
        write(value_sums, g.value);
    }

    // Backward pass of queries from t on and keys [from, to) of the block that begins with key `first`.
    void few(const Sight& sight, int64_t t, int64_t first, int64_t from, int64_t to) {
        const int64_t n_key = to - from, n_distance = n_key + FEW;
        // If a word holds two numbers, use all FEW rows; rows without a query are zeros.
        const int64_t n = sizeof(S) == 2 ? FEW : min(FEW, a.queries - t), n_word = n / PER_WORD<S>;
        const int64_t key_words = n_key / PER_WORD<S>, distance_words = n_distance / PER_WORD<S>;
        // Column 0 of the tile belongs to the distance from the query of its last row to the first key.
        const int64_t column = Shared::before(a) + a.queries - t - FEW + first + from;
        const int64_t stride = relative ? tile_stride - 1 : tile_stride;
        float* scores = relative ? tile + (FEW - 1) : tile + 0;
        if (relative)
            multiply<S>(*tiles, by_distance + t * words, words, n, positions_t + column * words, words * PANEL,
                        n_distance / PANEL, words, tile + 0, tile_stride, false);
        multiply<S>(*tiles, by_key + t * words, words, n, keys_t + from * words, words * PANEL, n_key / PANEL, words,
                    contents + 0, key_stride, false);
        multiply<S>(*tiles, above + t * words, words, n, values_t + from * words, words * PANEL, n_key / PANEL, words,
                    products + 0, key_stride, false);
        for (int64_t r = 0; r < n; ++r) weigh(sight, t + r, r, first + from, n_key, scores + r * stride);

        // Operands dS, dB and P, by query and by key.
        const Word *scores_a = (Word*)scores, *distances_a = (Word*)(tile + 0);
        const Word *scores_b = (Word*)scores, *distances_b = (Word*)(tile + 0), *weights_b = (Word*)(products + 0);
        int64_t scores_stride = stride, a_stride = stride, a_distances = tile_stride, weights_stride = key_stride;
        if constexpr (sizeof(S) == 2) {
            const int64_t part = FEW * tile_stride / 2;
            Word *s_a = halves, *d_a = halves + part, *s_b = halves + 2 * part, *d_b = halves + 3 * part, *p_b = halves + 4 * part;
            for (int64_t r = 0; r < n; r += 2) {
                for (int64_t i = 0; i < n_key; i += PANEL) {
                    const float *x = products + r * key_stride + i, *y = scores + r * stride + i;
                    write_pairs(load(x), load(x + key_stride), nullptr, nullptr, p_b + r / 2 * key_stride + i);
                    write_pairs(load(y), load(y + stride), (S*)(s_a + r * tile_stride / 2) + i,
                                (S*)(s_a + (r + 1) * tile_stride / 2) + i, s_b + r / 2 * tile_stride + i);
                }
                for (int64_t i = 0; relative && i < n_distance; i += PANEL) {
                    const float* z = tile + r * tile_stride + i;
                    write_pairs(load(z), load(z + tile_stride), (S*)(d_a + r * tile_stride / 2) + i,
                                (S*)(d_a + (r + 1) * tile_stride / 2) + i, d_b + r / 2 * tile_stride + i);
                }
            }
            scores_a = s_a, distances_a = d_a, scores_b = s_b, distances_b = d_b, weights_b = p_b;
            a_stride = a_distances = tile_stride / 2, scores_stride = tile_stride;
        }
        const int64_t t_word = t / PER_WORD<S>;
        multiply<S>(*tiles, above_t + t_word, feature_stride, width, weights_b, PANEL, n_key / PANEL, n_word, value_sums + from,
                    key_stride, true, weights_stride);
        multiply<S>(*tiles, by_key_t + t_word, feature_stride, width, scores_b, PANEL, n_key / PANEL, n_word, key_sums + from,
                    key_stride, true, scores_stride);
        multiply<S>(*tiles, scores_a, a_stride, n, keys + from / PER_WORD<S> * PANEL, most / PER_WORD<S> * PANEL,
                    width / PANEL, key_words, query_u + t * width, width, true);
        if (!relative) return;
        multiply<S>(*tiles, by_distance_t + t_word, feature_stride, width, distances_b, PANEL, n_distance / PANEL, n_word,
                    position_sums + column, distances.stride(), true, tile_stride);
        multiply<S>(*tiles, distances_a, a_distances, n, positions + column / PER_WORD<S> * PANEL,
                    distances.columns / PER_WORD<S> * PANEL, width / PANEL, distance_words, query_v + t * width, width, true);
    }

    // Replaces a row of scores of n keys from `first` on by their gradient, and its products by the applied weights.
    void weigh(const Sight& sight, int64_t query, int64_t r, int64_t first, int64_t n, float* row) {
        float *content = contents + r * key_stride, *other = products + r * key_stride;
        const int64_t low = min(max(sight.first(query) - first, int64_t(0)), n);
        const int64_t high = query < a.queries ? max(min(sight.last(query) - first, n), low) : low;
        const float top = greatest[query], share = inverse[query], less = delta[query];
        const float* keep = nullptr;
        if (a.dropout > 0) {
            const int64_t group = first / Dropout::GROUP * Dropout::GROUP;
            dropout.draw(lane, head, query, group, first + n, factors);
            keep = factors + (first - group);
        }
        const int64_t begin = low / PANEL * PANEL, end = low < high ? rounded_up(high, PANEL) : begin;
        for (int64_t i = begin; i < end; i += PANEL) {
            auto score = load(content + i);
            if (relative) score += load(row + i);
            const auto weight = exponential(score - top) * share, product = load(other + i);
            if (keep) {
                const auto factor = load(keep + i);
                store(row + i, weight * (factor * product - less));
                store(other + i, weight * factor);
            } else {
                store(row + i, weight * (product - less));
                store(other + i, weight);
            }
        }
        std::fill(other, other + low, 0.0f);
        std::fill(other + high, other + n, 0.0f);
        float* whole = relative ? tile + r * tile_stride : row;
        std::fill(whole, row + low, 0.0f);
        std::fill(row + high, relative ? whole + n + FEW : row + n, 0.0f);
    }

    void finish() {
        for (int64_t t = 0; t < a.queries; ++t) {
            const float *x = query_u + t * width, *y = relative ? query_v + t * width : nullptr;
            S* to = (S*)g.query + ((lane * a.queries + t) * a.heads + head) * a.width;
            for (int64_t i = 0; i < a.width; ++i) {
                write(to + i, (x[i] + (y ? y[i] : 0.0f)) * scale);
                u_sums[i] += x[i] * scale;
                if (y) v_sums[i] += y[i] * scale;
            }
        }
    }

    const AttentionGradients& g;
    const Attention& a;
    int64_t head = 0, lane = 0;
    const bool relative;
    const int64_t memory, width, words, rows;
    const int64_t feature_stride;  // words of a feature's queries; no power of two, to avoid cache conflicts
    const int64_t most;  // keys in a block
    const Shared distances;
    const int64_t tile_stride, key_stride;
    const float scale;
    const Dropout dropout;
    const Tiles* tiles = nullptr;
    Room<Word> by_key, by_distance, above, by_key_t, by_distance_t, above_t;
    Room<float> greatest, inverse, delta, query_u, query_v;
    Room<Word> keys_t, keys, values_t, positions_t, positions, padded;
    Room<float> tile, contents, products, factors;
    Room<Word> halves;
    Room<float> key_sums, value_sums;
    float *position_sums = nullptr, *u_sums = nullptr, *v_sums = nullptr;
};

template <class S>
void backward(const AttentionGradients& g, int threads) {
    const Attention& a = g.of;
    const int64_t parts = max(int64_t(1), min(a.lanes, TASKS / a.heads)), lanes = max(int64_t(1), (a.lanes + parts - 1) / parts);
    const int64_t n_part = max(int64_t(1), (a.lanes + lanes - 1) / lanes);  // without lanes, one task writes zeros
    const Shared shared(a);
    Room<float> sums(a.heads * n_part * shared.size);
#pragma omp parallel num_threads(threads)
    {
        Backward<S> some(g);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < a.heads * n_part; ++task) {
            // Consecutive tasks are heads of the same lanes, whose numbers are adjacent in memory.
            const int64_t head = task % a.heads, part = task / a.heads;
            some.begin(head, sums + (head * n_part + part) * shared.size);
            for (int64_t lane = part * lanes; lane < min((part + 1) * lanes, a.lanes); ++lane) some.run(lane);
        }
    }
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t head = 0; head < a.heads; ++head) {
        float* all = sums + head * n_part * shared.size;
        for (int64_t part = 1; part < n_part; ++part)
            for (int64_t i = 0; i < shared.size; ++i) all[i] += all[part * shared.size + i];
        for (int64_t i = 0; g.u && i < a.width; ++i) g.u[head * a.width + i] = shared.u(all)[i];
        for (int64_t i = 0; g.v && i < a.width; ++i) g.v[head * a.width + i] = shared.v(all)[i];
        if (g.position)
            write_transposed<S>(all + Shared::before(a), shared.stride(), a.keys, a.width, [&](int64_t row) {
                return (S*)g.position + (row * a.heads + head) * a.width;
            });
    }
}

}  // namespace

// -------------------------------------------------------------------------------------------------------- entry points

extern "C" {

void txl_attend_backward_float32(const AttentionGradients* g, int threads) { backward<float>(*g, threads); }
void txl_attend_backward_bfloat16(const AttentionGradients* g, int threads) {
    if constexpr (MULTIPLIES<BFloat16>) backward<BFloat16>(*g, threads);
}
}
