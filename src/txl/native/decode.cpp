// One token of every stream through the layers of Transformer-XL on a CPU, and products of a few rows with a matrix.
//
// Such a step is bound by reading weights, keys and values once. All threads read them in memory order, and all other
// data stays in the caches of the threads. One parallel region covers all layers. Activations and sums are float32
// (float64 for a float64 model), whatever the dtype of the weights.
//
// Results of a stream do not depend on the other streams, their number or the number of threads, as each sum has a
// fixed order.
//
// Shapes: B lanes (streams), H heads, D width of a head, E d_model, F d_inner.

#include <algorithm>
#include <atomic>
#include <initializer_list>
#include <thread>
#include <vector>

#include "vectors.h"

namespace {

using std::max;
using std::min;

constexpr int64_t MOST_D = 512;  // width of a head
constexpr int64_t CHUNK = 256;  // keys of one task of attention
constexpr int64_t AHEAD = 16;   // rows of a matrix to prefetch

// Rows of a matrix that are multiplied at once, by one vector or by SQUARE vectors; registers hold all sums.
constexpr int SOME_ROWS = REGISTER == 64 ? 8 : 4, SQUARE = REGISTER == 64 ? 4 : 2;

// --------------------------------------------------------------------------------------------------------- products

// A block is 64 bytes of a matrix, read at once. A block of bfloat16 has 32 numbers; a shift converts the even ones to
// float32, a mask the odd ones. The vectors that multiply the block are arranged in the same way.
template <class S>
constexpr int BLOCK = 64 / sizeof(S);

template <class T, class = std::enable_if_t<std::is_arithmetic<T>::value>>
void multiply_add(Vec<T>& sum, const T* matrix, const Vec<T>* x) {
    sum += load(matrix) * x[0];
}
inline void multiply_add(Vec<float>& sum, const BFloat16* matrix, const Vec<float>* x) {
    const auto both = loaded<Vec<uint32_t>>(matrix);
    sum += bits_as<Vec<float>>(both << 16) * x[0];
    sum += bits_as<Vec<float>>(both & 0xffff0000u) * x[1];
}

// Vectors [lanes,n] that multiply the rows of a matrix, in blocks. If n is not a multiple of a block's size, the last
// block overlaps the previous one, and is zero in the overlap.
template <class S, class T>
struct Rows {
    static constexpr int STEP = BLOCK<S>, VECTORS = STEP / LANES<T>;
    const int64_t lanes, n, blocks;
    const T* const plain;
    std::vector<Vec<T>> arranged;  // [lanes, blocks, VECTORS]

    Rows(const T* first, int64_t lanes, int64_t n)
        : lanes(lanes), n(n), blocks(n < STEP ? 0 : (n + STEP - 1) / STEP), plain(first), arranged(lanes * blocks * VECTORS) {
        for (int64_t lane = 0; lane < lanes; ++lane)
            for (int64_t b = 0; b < blocks; ++b) {
                const T* x = plain + lane * n + at(b);
                T to[VECTORS][LANES<T>] = {};
                for (int i = int(b * STEP - at(b)); i < STEP; ++i) to[i % VECTORS][i / VECTORS] = x[i];
                for (int i = 0; i < VECTORS; ++i) arranged[(lane * blocks + b) * VECTORS + i] = load(to[i]);
            }
    }
    int64_t at(int64_t block) const { return min(block * STEP, n - STEP); }
    const Vec<T>* of(int64_t lane) const { return arranged.data() + lane * blocks * VECTORS; }
};

// Adds R rows of a matrix times C of the vectors to `sums`, or to `rest` if a row is shorter than a block.
template <class S, class T, int R, int C>
inline __attribute__((always_inline)) void products(const S* matrix, const Rows<S, T>& rows, int64_t lane,
                                                    Vec<T> (&sums)[R][C], T (&rest)[R][C]) {
    const int64_t n = rows.n, blocks = rows.blocks, step = blocks * rows.VECTORS;
    const Vec<T>* x = rows.of(lane);
    if (blocks == 0)
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c)
                for (int64_t i = 0; i < n; ++i) rest[r][c] += read(matrix + r * n + i) * rows.plain[(lane + c) * n + i];
    for (int64_t b = 0; b < blocks; ++b) {
        const S* here = matrix + (b + 1 < blocks ? b * rows.STEP : n - rows.STEP);
        UNROLLED for (int r = 0; r < R; ++r) {
            __builtin_prefetch(here + (r + AHEAD) * n);
            UNROLLED for (int c = 0; c < C; ++c)
                multiply_add(sums[r][c], here + r * n, x + c * step + b * rows.VECTORS);
        }
    }
}

// R rows of a matrix times C of the vectors; if `other` is given, plus R rows of that matrix times the next vector.
// Not inlined, so that the compiler keeps all sums in registers.
template <class S, class T, int R, int C>
__attribute__((noinline)) void dots(const S* matrix, const S* other, const Rows<S, T>& rows, int64_t lane,
                                    T (&out)[R][C]) {
    Vec<T> sums[R][C] = {};
    T rest[R][C] = {};
    products<S, T, R, C>(matrix, rows, lane, sums, rest);
    if constexpr (C == 1)
        if (other) products<S, T, R, C>(other, rows, lane + 1, sums, rest);
    UNROLLED for (int i = 0; i < R * C; ++i)
        out[i / C][i % C] = total<T, LANES<T>>(sums[i / C][i % C]) + rest[i / C][i % C];
}

template <class S, class T, int R, int C, class Use>
void few_lanes(const S* matrix, const Rows<S, T>& rows, int64_t row, int64_t lane, const Use& use) {
    T out[R][C];
    dots<S, T, R, C>(matrix + row * rows.n, nullptr, rows, lane, out);
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) use(row + r, lane + c, out[r][c]);
}

template <class S, class T, int R, class Use>
void few_rows(const S* matrix, const Rows<S, T>& rows, int64_t row, const Use& use) {
    int64_t lane = 0;
    if constexpr (R > 1)
        for (; lane + SQUARE <= rows.lanes; lane += SQUARE)
            for (int r = 0; r < R; r += SQUARE) few_lanes<S, T, SQUARE, SQUARE>(matrix, rows, row + r, lane, use);
    for (; lane < rows.lanes; ++lane) few_lanes<S, T, R, 1>(matrix, rows, row, lane, use);
}

// Rows [first, end) of a matrix times all vectors; calls `use(row, lane, value)` with each product.
template <class S, class T, class Use>
void multiply(const S* matrix, int64_t first, int64_t end, const Rows<S, T>& rows, const Use& use) {
    int64_t row = first;
    for (; row + SOME_ROWS <= end; row += SOME_ROWS) few_rows<S, T, SOME_ROWS>(matrix, rows, row, use);
    for (; row < end; ++row) few_rows<S, T, 1>(matrix, rows, row, use);
}

// ---------------------------------------------------------------------------------------------------------- threads

// Tasks of one phase, all of which end before the next phase begins. Threads wait only for tasks in progress: on a busy
// machine, other threads take the tasks of a thread that is not running, which later skips the finished phases.
struct alignas(64) Phase {
    std::atomic<int64_t> next{0}, done{0};

    // Each thread that gets a task calls `prepare()` once, and passes the result to `task(result, number)`.
    template <class Prepare, class Task>
    void share(int64_t n, const Prepare& prepare, const Task& task) {
        int64_t number = next.fetch_add(1, std::memory_order_relaxed);
        if (number < n) {
            const auto prepared = prepare();
            do {
                task(prepared, number);
                done.fetch_add(1, std::memory_order_release);
                number = next.fetch_add(1, std::memory_order_relaxed);
            } while (number < n);
        }
        for (int turns = 0; done.load(std::memory_order_acquire) < n; ++turns)
            if (turns > 10000) std::this_thread::yield();
    }

    template <class Task>
    void share(int64_t n, const Task& task) {
        share(n, [] { return 0; }, [&](int, int64_t number) { task(number); });
    }
};

// Number of rows in a task: small enough to give all threads tasks, large enough to read rows at full speed.
template <class S>
int64_t rows_of_task(int64_t n_out, int64_t n_in, int threads) {
    const int64_t fast = (32 << 10) / (n_in * int64_t(sizeof(S))), fair = n_out / (4 * threads);
    return (max({fast, fair, int64_t(1)}) + 7) / 8 * 8;
}

// A whole matrix times all vectors.
template <class S, class T, class Use>
void multiply(Phase& phase, int threads, std::initializer_list<const void*> matrices, int64_t n_out, const T* x,
              int64_t lanes, int64_t n_in, const Use& use) {
    const int64_t some = rows_of_task<S>(n_out, n_in, threads), tasks = (n_out + some - 1) / some;
    phase.share(
        tasks * int64_t(matrices.size()), [&] { return Rows<S, T>(x, lanes, n_in); },
        [&](const Rows<S, T>& rows, int64_t task) {
            const int64_t which = task / tasks, first = task % tasks * some;
            multiply((const S*)matrices.begin()[which], first, min(first + some, n_out), rows,
                     [&](int64_t row, int64_t lane, T value) { use(which, row, lane, value); });
        });
}

}  // namespace

// ------------------------------------------------------------------------------------------ arguments from the caller

struct Layer {  // weights in the layout of torch.nn.Linear, [out, in]
    const void *query, *key, *value, *output, *inner, *inner_bias, *outer, *outer_bias;
    const void *attention_norm, *attention_norm_bias, *norm, *norm_bias, *u, *v;
};

struct Gains {  // [D], gains of the norms of a layer's queries and keys
    const void *query, *key;
};

struct Model {
    int64_t n_layer, d_model, n_head, d_head, d_inner, pre_norm;
    double epsilon;
    const Layer* layers;
    const Gains* gains;  // null if heads are not normalised
};

struct Cache {  // of one layer; strides in elements
    void *keys, *values;  // [H,B,size,D], with any strides of heads and lanes
    void* hidden;         // [B,size,E], with any stride of lanes, or null
    const void* position;  // W_kR R [H,n_distance,D], farthest distance first
};

struct Places {
    int64_t head_stride, lane_stride, hidden_stride, size, n_distance, clamp;  // clamp: larger distances count as it
    const int64_t* lanes;  // [B], lanes of the cache
    const int64_t* at;     // [B], index of this token's key in the ring; older keys precede it, wrapping around
    const int64_t* seen;   // [B], number of keys that this token sees, its own included
};

namespace {

template <class S, class T>
class Step {
  public:
    Step(const Model& model, const Cache* caches, const Places& places, int64_t lanes, T* hidden, int threads)
        : m(model),
          caches(caches),
          p(places),
          lanes(lanes),
          width(model.n_head * model.d_head),
          threads(threads),
          phases(model.n_layer * PHASES),
          hidden(hidden),
          normal(lanes * model.d_model),
          query(lanes * width),
          key(model.gains ? lanes * width : 0),
          attended(lanes * width),
          inner(lanes * model.d_inner) {
        for (int64_t lane = 0; lane < lanes; ++lane) chunks = max(chunks, (p.seen[lane] + CHUNK - 1) / CHUNK);
        parts.resize(lanes * m.n_head * chunks * (m.d_head + 2));
    }

    void run() {
#pragma omp parallel num_threads(threads)
        for (int64_t layer = 0; layer < m.n_layer; ++layer)
            one_layer(m.layers[layer], m.gains ? m.gains + layer : nullptr, caches[layer], phases.data() + layer * PHASES);
    }

  private:
    static constexpr int64_t PHASES = 10;

    // Replaces `hidden` [B,E], h^{n-1}, by h^n.
    void one_layer(const Layer& layer, const Gains* gains, const Cache& cache, Phase* phase) {
        const T* entered = m.pre_norm ? normal.data() : hidden;
        phase++->share(lanes, [&](int64_t lane) {
            S* kept = (S*)cache.hidden + p.lanes[lane] * p.hidden_stride + p.at[lane] * m.d_model;
            for (int64_t i = 0; cache.hidden && i < m.d_model; ++i) write(kept + i, hidden[lane * m.d_model + i]);
            if (m.pre_norm) normalise(lane, layer.attention_norm, layer.attention_norm_bias, normal.data());
        });
        multiply<S>(*phase++, threads, {layer.query, layer.key, layer.value}, width, entered, lanes, m.d_model,
                    [&](int64_t which, int64_t row, int64_t lane, T value) {
                        if (which == 0) query[lane * width + row] = value;
                        else if (which == 1 && gains) key[lane * width + row] = value;
                        else write(place(which == 1 ? cache.keys : cache.values, lane, row / m.d_head) + row % m.d_head, value);
                    });
        if (gains)
            phase++->share(lanes * m.n_head, [&](int64_t task) {
                const int64_t lane = task / m.n_head, head = task % m.n_head;
                T *q = query.data() + task * m.d_head, *k = key.data() + task * m.d_head;
                normalise_head(q, gains->query);
                normalise_head(k, gains->key);
                S* to = place(cache.keys, lane, head);
                for (int64_t i = 0; i < m.d_head; ++i) write(to + i, k[i]);
            });
        attend(layer, cache, phase);
        multiply<S>(*phase++, threads, {layer.output}, m.d_model, attended.data(), lanes, width,
                    [&](int64_t, int64_t row, int64_t lane, T value) { hidden[lane * m.d_model + row] += value; });
        phase++->share(lanes, [&](int64_t lane) {
            if (m.pre_norm) normalise(lane, layer.norm, layer.norm_bias, normal.data());
            else normalise(lane, layer.attention_norm, layer.attention_norm_bias, hidden);
        });
        multiply<S>(*phase++, threads, {layer.inner}, m.d_inner, entered, lanes, m.d_model,
                    [&](int64_t, int64_t row, int64_t lane, T value) {
                        inner[lane * m.d_inner + row] = max(value + read((const S*)layer.inner_bias + row), T(0));
                    });
        multiply<S>(*phase++, threads, {layer.outer}, m.d_model, inner.data(), lanes, m.d_inner,
                    [&](int64_t, int64_t row, int64_t lane, T value) {
                        hidden[lane * m.d_model + row] += value + read((const S*)layer.outer_bias + row);
                    });
        if (!m.pre_norm)
            phase++->share(lanes, [&](int64_t lane) { normalise(lane, layer.norm, layer.norm_bias, hidden); });
    }

    S* of(void* buffer, int64_t lane, int64_t head) const {
        return (S*)buffer + head * p.head_stride + p.lanes[lane] * p.lane_stride;
    }

    // Address of a lane's new key or value.
    S* place(void* buffer, int64_t lane, int64_t head) const { return of(buffer, lane, head) + p.at[lane] * m.d_head; }

    // LayerNorm of a lane of `hidden`.
    void normalise(int64_t lane, const void* weight, const void* bias, T* to) const {
        const int64_t n = m.d_model;
        const T* x = hidden + lane * n;
        double mean = 0, square = 0;  // float64 costs little for a thousand numbers
        for (int64_t i = 0; i < n; ++i) mean += x[i];
        mean /= n;
        for (int64_t i = 0; i < n; ++i) square += (x[i] - mean) * (x[i] - mean);
        const T centre = T(mean), scale = T(1 / std::sqrt(square / n + m.epsilon));
        for (int64_t i = 0; i < n; ++i)
            to[lane * n + i] = (x[i] - centre) * scale * read((const S*)weight + i) + read((const S*)bias + i);
    }

    // RMSNorm of a head, in place.
    void normalise_head(T* x, const void* gain) const {
        double square = 0;
        for (int64_t i = 0; i < m.d_head; ++i) square += double(x[i]) * double(x[i]);
        const T scale = T(1 / std::sqrt(square / double(m.d_head) + m.epsilon));
        for (int64_t i = 0; i < m.d_head; ++i) x[i] *= scale * read((const S*)gain + i);
    }

    // Attention of the query: first for each chunk of keys, counted from the newest key, then joined.
    void attend(const Layer& layer, const Cache& cache, Phase*& phase) {
        const int64_t part = m.d_head + 2;
        phase++->share(lanes * m.n_head * chunks, [&](int64_t task) {
            const int64_t chunk = task % chunks, head = task / chunks % m.n_head, lane = task / chunks / m.n_head;
            if (chunk * CHUNK < p.seen[lane])
                attend_to_chunk(layer, cache, lane, head, chunk * CHUNK, parts.data() + task * part);
        });
        phase++->share(lanes, [&](int64_t lane) {
            for (int64_t head = 0; head < m.n_head; ++head) join(lane, head, part);
        });
    }

    void join(int64_t lane, int64_t head, int64_t part) {
        const int64_t used = (p.seen[lane] + CHUNK - 1) / CHUNK;
        const T* first = parts.data() + (lane * m.n_head + head) * chunks * part;
        T* out = attended.data() + lane * width + head * m.d_head;
        T top = first[0], weight = 0;
        for (int64_t c = 1; c < used; ++c) top = max(top, first[c * part]);
        std::fill(out, out + m.d_head, T(0));
        for (int64_t c = 0; c < used; ++c) {
            const T scale = std::exp(first[c * part] - top);
            weight += scale * first[c * part + 1];
            for (int64_t i = 0; i < m.d_head; ++i) out[i] += scale * first[c * part + 2 + i];
        }
        for (int64_t i = 0; i < m.d_head; ++i) out[i] /= weight;
    }

    // For the keys at distances [nearest, nearest + CHUNK), writes to `out` the greatest score, the sum of the weights
    // exp(score - greatest), and the weighted sum of the values.
    void attend_to_chunk(const Layer& layer, const Cache& cache, int64_t lane, int64_t head, int64_t nearest, T* out) {
        const int64_t d = m.d_head, n = min(CHUNK, p.seen[lane] - nearest), farthest = nearest + n - 1;
        const S *keys = of(cache.keys, lane, head), *values = of(cache.values, lane, head);
        const S* position = (const S*)cache.position + (head + 1) * p.n_distance * d - d;  // row of distance 0
        alignas(64) T scores[CHUNK], both[2 * MOST_D];
        const T scale = T(1 / std::sqrt(double(d)));
        const T* q = query.data() + lane * width + head * d;
        for (int64_t i = 0; i < d; ++i) {
            both[i] = (q[i] + read((const S*)layer.u + head * d + i)) * scale;
            both[d + i] = (q[i] + read((const S*)layer.v + head * d + i)) * scale;
        }
        const Rows<S, T> queries(both, 2, d);  // q + u for keys, q + v for positions
        T beyond = 0;                          // position term for all distances >= clamp
        if (farthest >= p.clamp)
            few_rows<S, T, 1>(position - p.clamp * d, Rows<S, T>(both + d, 1, d), 0,
                              [&](int64_t, int64_t, T value) { beyond = value; });
        const int64_t oldest = (p.at[lane] - farthest + p.size) % p.size;
        const int64_t before_end = min(n, p.size - oldest), clamped = min(n, max(farthest - p.clamp + 1, int64_t(0)));
        const auto score = [&](int64_t first, int64_t end, bool by_distance) {
            for (int64_t i = first; i < end;) {
                const S* key = keys + (i < before_end ? oldest + i : i - before_end) * d;
                const S* distance = by_distance ? position - (farthest - i) * d : nullptr;
                const int64_t next = i + SOME_ROWS;
                const bool some = next <= end && (next <= before_end || i >= before_end);
                if (some) scores_of<SOME_ROWS>(key, distance, queries, beyond, scores + i);
                else scores_of<1>(key, distance, queries, beyond, scores + i);
                i = some ? next : i + 1;
            }
        };
        score(0, clamped, false);
        beyond = 0;
        score(clamped, n, true);
        const T top = *std::max_element(scores, scores + n);
        for (int64_t i = 0; i < n; ++i) scores[i] -= top;
        exponentials(scores, n);
        out[0] = top;
        out[1] = summed(scores, n);
        std::fill(out + 2, out + 2 + d, T(0));
        weighted(values + oldest * d, scores, before_end, out + 2);
        weighted(values, scores + before_end, n - before_end, out + 2);
    }

    // Scores of R consecutive keys with consecutive positions; `position` is null if all are at or beyond the clamp.
    template <int R>
    static void scores_of(const S* key, const S* position, const Rows<S, T>& queries, T beyond, T* out) {
        T both[R][1];
        dots<S, T, R, 1>(key, position, queries, 0, both);
        for (int r = 0; r < R; ++r) out[r] = both[r][0] + beyond;
    }

    // Adds the weighted rows [n,D] of `values` to `out`.
    void weighted(const S* values, const T* weights, int64_t n, T* out) const {
        constexpr int L = LANES<T>;
        const int64_t d = m.d_head;
        if (d == 4 * L) return weighted_blocks<4>(values, weights, n, out);
        if (d == 2 * L) return weighted_blocks<2>(values, weights, n, out);
        int64_t column = 0;
        for (; column + L <= d; column += L) weighted_blocks<1>(values + column, weights, n, out + column);
        for (int64_t i = 0; column < d && i < n; ++i)
            for (int64_t c = column; c < d; ++c) out[c] += weights[i] * read(values + i * d + c);
    }

    template <int N>
    void weighted_blocks(const S* values, const T* weights, int64_t n, T* out) const {
        constexpr int L = LANES<T>;
        Vec<T> sums[N];
        for (int b = 0; b < N; ++b) sums[b] = load(out + b * L);
        for (int64_t i = 0; i < n; ++i) {
            __builtin_prefetch(values + (i + AHEAD) * m.d_head);
            __builtin_prefetch(values + (i + AHEAD) * m.d_head + BLOCK<S>);
            UNROLLED for (int b = 0; b < N; ++b) sums[b] += weights[i] * load(values + i * m.d_head + b * L);
        }
        for (int b = 0; b < N; ++b) store(out + b * L, sums[b]);
    }

    const Model& m;
    const Cache* caches;
    const Places& p;
    const int64_t lanes, width;
    const int threads;
    int64_t chunks = 1;
    std::vector<Phase> phases;
    T* hidden;
    std::vector<T> normal, query, key, attended, inner, parts;
};

template <class S, class T>
void product(const void* weight, const void* bias, int64_t n_out, int64_t n_in, const T* x, int64_t lanes, T* out,
             int threads) {
    Phase phase;
#pragma omp parallel num_threads(threads)
    multiply<S>(phase, threads, {weight}, n_out, x, lanes, n_in, [&](int64_t, int64_t row, int64_t lane, T value) {
        out[lane * n_out + row] = bias ? value + read((const S*)bias + row) : value;
    });
}

// `product` with the transposed matrix [I,O]; each task computes several columns.
template <class S, class T>
void transposed_product(const void* weight, const void* bias, int64_t n_out, int64_t n_in, const T* x, int64_t lanes,
                        T* out, int threads) {
    constexpr int L = LANES<T>, COLUMNS = 4 * L;
    Phase phase;
#pragma omp parallel num_threads(threads)
    phase.share(lanes * ((n_out + COLUMNS - 1) / COLUMNS), [&](int64_t task) {
        const int64_t lane = task % lanes, first = task / lanes * COLUMNS, end = min(first + COLUMNS, n_out);
        const S* matrix = (const S*)weight;
        T* to = out + lane * n_out;
        for (int64_t i = first; i < end; ++i) to[i] = bias ? read((const S*)bias + i) : T(0);
        if (end - first == COLUMNS) {
            Vec<T> sums[4] = {};
            for (int64_t i = 0; i < n_in; ++i)
                UNROLLED for (int b = 0; b < 4; ++b)
                    sums[b] += x[lane * n_in + i] * load(matrix + i * n_out + first + b * L);
            for (int i = 0; i < COLUMNS; ++i) to[first + i] += sums[i / L][i % L];
        } else {
            for (int64_t c = first; c < end; ++c)
                for (int64_t i = 0; i < n_in; ++i) to[c] += x[lane * n_in + i] * read(matrix + i * n_out + c);
        }
    });
}

}  // namespace

// -------------------------------------------------------------------------------------------------------- entry points
// Sums are float32 for float32 and bfloat16 weights, float64 for float64 weights.

extern "C" {

// Passes streams through all layers: turns `hidden` [B,E] from h^0 into h^N, writes keys, values and inputs to caches.
void txl_step_float32(const Model* m, const Cache* c, const Places* p, int64_t lanes, float* hidden, int threads) {
    Step<float, float>(*m, c, *p, lanes, hidden, threads).run();
}
void txl_step_bfloat16(const Model* m, const Cache* c, const Places* p, int64_t lanes, float* hidden, int threads) {
    Step<BFloat16, float>(*m, c, *p, lanes, hidden, threads).run();
}
void txl_step_float64(const Model* m, const Cache* c, const Places* p, int64_t lanes, double* hidden, int threads) {
    Step<double, double>(*m, c, *p, lanes, hidden, threads).run();
}

// x [B,I], weight [O,I] or, transposed, [I,O], bias [O] or null -> out [B,O].
#define TXL_LINEAR(NAME, S, T)                                                                                       \
    void txl_linear_##NAME(const void* w, const void* b, int64_t n_out, int64_t n_in, const T* x, int64_t lanes,     \
                           T* out, int transposed, int threads) {                                                    \
        (transposed ? transposed_product<S, T> : product<S, T>)(w, b, n_out, n_in, x, lanes, out, threads);          \
    }
TXL_LINEAR(float32, float, float)
TXL_LINEAR(bfloat16, BFloat16, float)
TXL_LINEAR(float64, double, double)
}
