// Attention of a segment on a CPU: relative (terms (a) to (d)), or plain if there are no positions. For gradients it
// stores two numbers per query beside the outputs, from which attend_backward.cpp computes the weights again.
//
// There is no matrix of all scores. A block of keys and values, and the positions that the queries of a task need for
// it, are packed once for all of these queries. For a few queries at a time, the scores of the block are the sum of two
// products, one by keys and one by distances; the latter is read one column further to the left for each next query
// (Appendix B's shift). Scores become weights in place, in the L1 cache. The greatest score, the sum of weights and the
// weighted sum of values of each query are carried from block to block. All numbers but the operands of products are
// float32.
//
// Results of a lane do not depend on the other lanes or on the number of threads.
//
// Shapes: B lanes, T queries, S keys of which the last T are the queries' own, H heads, D width of a head.

#include <vector>

#include "attention.h"

namespace {

constexpr int64_t KEYS = 512;     // largest number of keys in a block
constexpr int64_t QUERIES = 240;  // queries of a task, which share its packed keys
template <class S>
constexpr int64_t FEW = sizeof(S) == 2 ? 2 * TILE : 4 * BLOCK_ROWS;  // queries whose scores exist at a time

// Attention of several queries of one head, in several lanes, one lane after the other.
template <class S>
class Task {
  public:
    Task(const Attention& attention, int64_t head, int64_t lane, int64_t lanes, int64_t query, int64_t queries)
        : a(attention),
          head(head),
          first_lane(lane),
          lanes(lanes),
          first_query(query),
          queries(queries),
          memory(attention.keys - attention.queries),
          width(rounded_up(attention.width, PANEL)),
          words(rounded_up(rounded_up(attention.width, PER_WORD<S>) / PER_WORD<S>, sizeof(S) == 2 ? TILE : 1)),
          rows(rounded_up(queries, FEW<S>)),
          most(min(KEYS, rounded_up(attention.keys, TWO))),
          pairs(most / PER_WORD<S>),
          distances_stride(most + FEW<S> + 2 * PANEL),
          by_key(lanes * rows * words),
          by_distance(a.position.first ? lanes * rows * words : 0),
          keys(most * words),
          values(pairs * width),
          positions(a.position.first ? (most + rows + 2 * PANEL) * words : 0),
          scores(FEW<S> * most),
          distances(a.position.first ? FEW<S> * distances_stride : 0),
          weights(FEW<S> * pairs),
          factors(a.dropout > 0 ? most + 2 * Dropout::GROUP : 0),
          dropout(attention.dropout, attention.seed),
          sums(lanes * rows * width),
          greatest(lanes * rows, NOTHING),
          total_weight(lanes * rows, 0.0f) {}

    void run() {
        const Tiles here;
        tiles = &here;
        for (int64_t lane = 0; lane < lanes; ++lane) pack_queries(lane);
        std::fill(sums + 0, sums + lanes * rows * width, 0.0f);
        std::fill(weights + 0, weights + FEW<S> * pairs, 0);  // so that rows without a query hold finite numbers
        const int64_t last = memory + first_query + queries;            // one past the last key that a query sees
        int64_t first = last;
        for (int64_t lane = 0; lane < lanes; ++lane) first = min(first, first_key(lane, first_query));
        for (int64_t key = first / most * most; key < last; key += most) {
            if (a.position.first) pack_positions(key);
            for (int64_t lane = 0; lane < lanes; ++lane) block(lane, key, min(key + most, last));
        }
        for (int64_t lane = 0; lane < lanes; ++lane) finish(lane);
    }

  private:
    int64_t first_key(int64_t lane, int64_t query) const { return Sight(a, first_lane + lane).first(query); }
    int64_t last_key(int64_t query) const { return memory + query + 1; }

    const S* at(const Rows& from, int64_t lane, int64_t row) const {
        return (const S*)from.first + (first_lane + lane) * from.lane + row * from.row + head * from.head;
    }

    // Packs (q + u) / sqrt(D) and (q + v) / sqrt(D).
    void pack_queries(int64_t lane) {
        const float scale = float(1 / std::sqrt(double(a.width)));
        const auto add = [&](const float* bias, Word* to) {
            std::fill(to, to + rows * words, 0);
            for (int64_t t = 0; t < queries; ++t) {
                const S* q = at(a.query, lane, first_query + t);
                S* row = (S*)(to + t * words);
                int64_t i = 0;
                for (; i + PANEL <= a.width; i += PANEL)
                    write(row + i, (load(q + i) + (bias ? load(bias + head * a.width + i) : Vec<float>{})) * scale);
                for (; i < a.width; ++i)
                    write(row + i, (read(q + i) + (bias ? bias[head * a.width + i] : 0.0f)) * scale);
            }
        };
        add(a.u, by_key + lane * rows * words);
        if (a.position.first) add(a.v, by_distance + lane * rows * words);
    }

    // Index of the row of W_kR R, farthest distance first, for a query and a key.
    int64_t column(int64_t query, int64_t key) const { return a.queries - 1 - query + key; }

    // Packs the positions that all queries of the task need for a block of keys.
    void pack_positions(int64_t key) {
        first_column = column(first_query + queries - 1, key);
        n_column = min(column(first_query, key + most), a.keys) - first_column;
        const S* from = (const S*)a.position.first + head * a.position.head + first_column * a.position.row;
        pack_transposed(from, a.position.row, n_column, a.width, words, (Word*)positions);
    }

    void block(int64_t lane, int64_t first, int64_t last) {
        const int64_t n = last - first, seen = first_key(lane, first_query);
        if (seen >= last) return;
        pack_transposed(at(a.key, lane, first), a.key.row, n, a.width, words, (Word*)keys);
        pack(at(a.value, lane, first), a.value.row, n, a.width, pairs, (Word*)values);
        for (int64_t t = 0; t < queries; t += FEW<S>) few(lane, t, min(t + FEW<S>, queries), first, last);
    }

    // Attention of queries [t, end) of this task to keys [first, last).
    void few(int64_t lane, int64_t t, int64_t end, int64_t first, int64_t last) {
        const int64_t seen = max(first, first_key(lane, first_query + t));
        const int64_t behind = min(last, last_key(first_query + end - 1));
        if (seen >= behind) return;
        // From here on, keys are counted from the block's first key, in whole panels and whole tiles of weights.
        const int64_t from = (seen - first) / TWO * TWO, to = rounded_up(behind - first, TWO), n = end - t;
        multiply<S>(*tiles, by_key + (lane * rows + t) * words, words, n, keys + from * words, words * PANEL,
                    (to - from) / PANEL, words, scores + from, most, false);
        int64_t shift = 0;  // column at which the distances of the last query begin
        if (a.position.first) {
            const int64_t wanted = column(first_query + end - 1, first + from) - first_column;
            const int64_t panel = wanted / PANEL, panels = rounded_up(n_column, PANEL) / PANEL;
            const int64_t until = min(panels, (wanted + to - from + n + PANEL - 1) / PANEL);
            shift = wanted - panel * PANEL;
            multiply<S>(*tiles, by_distance + (lane * rows + t) * words, words, n, positions + panel * words * PANEL,
                        words * PANEL, until - panel, words, distances + 0, distances_stride, false);
        }
        for (int64_t r = 0; r < n; ++r) {
            const int64_t query = first_query + t + r;
            const int64_t low = min(max(first_key(lane, query) - first, from), to);
            const int64_t high = max(min(last_key(query) - first, to), low);
            const float* other = a.position.first ? distances + r * distances_stride + shift + (n - 1 - r) - from : nullptr;
            const float* keep = nullptr;
            if (a.dropout > 0) {
                const int64_t key = (first + from) / Dropout::GROUP * Dropout::GROUP;
                dropout.draw(first_lane + lane, head, query, key, first + to, factors);
                keep = factors + (first - key);
            }
            weigh(lane * rows + t + r, scores + r * most, other, keep, from, to, low, high,
                  (S*)(weights + r * pairs));
        }
        multiply<S>(*tiles, weights + from / PER_WORD<S>, pairs, n, values + from / PER_WORD<S> * PANEL,
                    pairs * PANEL, width / PANEL, (to - from) / PER_WORD<S>,
                    sums + (lane * rows + t) * width, width, true);
    }

    // Turns a query's scores of keys [from, to) into weights; the query sees keys [low, high).
    void weigh(int64_t query, float* row, const float* other, const float* keep, int64_t from, int64_t to, int64_t low,
               int64_t high, S* out) {
        // Panels [whole, behind) are seen entirely; the panels next to them may be seen in part.
        const int64_t whole = min(rounded_up(low, PANEL), to), behind = max(high / PANEL * PANEL, whole);
        Vec<float> top = Vec<float>{} + NOTHING;
        const auto raise = [&](Vec<float> next) { top = select(next > top, next, top); };
        if (other) {
            for (int64_t i = low / PANEL * PANEL; i < high; i += PANEL) {
                const auto score = load(row + i) + load(other + i);
                store(row + i, score);
                if (i >= whole && i < behind) raise(score);
            }
        } else {
            for (int64_t i = whole; i < behind; i += PANEL) raise(load(row + i));
        }
        std::fill(row + from, row + low, NOTHING);
        std::fill(row + high, row + to, NOTHING);
        if (whole > low) raise(load(row + whole - PANEL));
        if (behind < high) raise(load(row + behind));
        float most = greatest[query];
        for (int i = 0; i < 16; ++i) most = top[i] > most ? top[i] : most;
        if (low >= high) {
            for (int64_t i = from; i < to; i += PANEL) write(out + i, Vec<float>{});
            return;
        }
        Vec<float> all = {};
        for (int64_t i = from; i < to; i += PANEL) {
            const auto weight = exponential(load(row + i) - most);
            all += weight;
            write(out + i, keep ? weight * load(keep + i) : weight);
        }
        const float kept = greatest[query] == NOTHING ? 0.0f : std::exp(greatest[query] - most);
        if (kept != 1.0f)
            for (int64_t i = 0; i < width; i += PANEL)
                store(sums + query * width + i, load(sums + query * width + i) * kept);
        total_weight[query] = total_weight[query] * kept + total<float, 16>(all);
        greatest[query] = most;
    }

    void finish(int64_t lane) {
        for (int64_t t = 0; t < queries; ++t) {
            const int64_t query = lane * rows + t;
            S* to = (S*)a.out + (((first_lane + lane) * a.queries + first_query + t) * a.heads + head) * a.width;
            int64_t i = 0;
            for (; i + PANEL <= a.width; i += PANEL) write(to + i, load(sums + query * width + i) / total_weight[query]);
            for (; i < a.width; ++i) write(to + i, sums[query * width + i] / total_weight[query]);
            if (a.sums) {
                float* kept = a.sums + (((first_lane + lane) * a.heads + head) * a.queries + first_query + t) * 2;
                kept[0] = greatest[query], kept[1] = total_weight[query];
            }
        }
    }

    static constexpr int64_t TWO = 2 * PANEL;  // keys in a tile of weights

    const Attention& a;
    const int64_t head, first_lane, lanes, first_query, queries;
    const int64_t memory, width, words, rows;
    const int64_t most;   // keys in a block
    const int64_t pairs;  // words of these keys, if sums run over keys
    const int64_t distances_stride;
    int64_t first_column = 0, n_column = 0;
    const Tiles* tiles = nullptr;
    Room<Word> by_key, by_distance, keys, values, positions;
    Room<float> scores, distances;
    Room<Word> weights;
    Room<float> factors;
    const Dropout dropout;
    Room<float> sums;
    std::vector<float> greatest, total_weight;
};

template <class S>
void attend(const Attention& a, int threads) {
    if (a.lanes <= 0 || a.queries <= 0) return;
    // Lanes of a head share positions, and queries of a lane share keys; split them only as far as threads need work.
    const int64_t wanted = 2 * threads, lane_parts = min(a.lanes, max(int64_t(1), (wanted + a.heads - 1) / a.heads));
    const int64_t most = (a.queries + FEW<S> - 1) / FEW<S>, least = (a.queries + QUERIES - 1) / QUERIES;
    const int64_t query_parts = min(most, max(least, (wanted + a.heads * lane_parts - 1) / (a.heads * lane_parts)));
    const int64_t some_lanes = (a.lanes + lane_parts - 1) / lane_parts;
    const int64_t some_queries = rounded_up((a.queries + query_parts - 1) / query_parts, FEW<S>);
    const int64_t n_lanes = (a.lanes + some_lanes - 1) / some_lanes, n_queries = (a.queries + some_queries - 1) / some_queries;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t task = 0; task < a.heads * n_lanes * n_queries; ++task) {
        // Start with the last queries, which see the most keys.
        const int64_t query = (n_queries - 1 - task / (a.heads * n_lanes)) * some_queries;
        const int64_t head = task % a.heads, lane = task / a.heads % n_lanes * some_lanes;
        Task<S>(a, head, lane, min(some_lanes, a.lanes - lane), query, min(some_queries, a.queries - query)).run();
    }
}

}  // namespace

// -------------------------------------------------------------------------------------------------------- entry points

extern "C" {

void txl_attend_float32(const Attention* a, int threads) { attend<float>(*a, threads); }
void txl_attend_bfloat16(const Attention* a, int threads) {
    if constexpr (MULTIPLIES<BFloat16>) attend<BFloat16>(*a, threads);
}
// Returns whether this processor multiplies bfloat16.
int txl_attends_bfloat16() { return MULTIPLIES<BFloat16>; }
}
