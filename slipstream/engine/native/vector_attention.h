// Attention of rows over one chunk by vectors: all queries of a block's rows that share a KV head. Scores and sums are
// float32; queries and keys are multiplied as bfloat16 pairs where one instruction does so, else widened. Rules:
// those of `attention.h`, and
//
// Rules:
// 1. A score is the sum of LANES sums, pairwise in a tree; each has every LANES-th pair of columns. So it has the same bits by
//    entry (few queries: a vector has pairs of one entry) and by column (many: keys are transposed once for all).
// 2. Entries are summed in the order in which a row sees them, alone or two at a time.
// 3. Keys and values are read from memory once, and what is read next is prefetched meanwhile.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>

#include "chunk.h"
#include "op.h"
#include "vectors.h"

namespace {

constexpr int MAX_QUERIES = LANES == 16 ? 6 : 4;    // queries that are computed together, at most: as registers allow
constexpr int MAX_BY_ENTRY = 4;                     // the same, by entry
constexpr bool CAN_TRANSPOSE = LANES == 16;         // with fewer registers and shorter vectors it takes longer
constexpr int MIN_BY_COLUMN = 6;                    // queries of a KV head
constexpr int LONG_CHUNKS = 4;                      // a row that sees more chunks waits for memory
constexpr int PAIRS_TOGETHER = LANES == 4 ? 1 : 2;  // pairs of vectors of a value computed together: as registers allow

// A query in the form that keys are multiplied with: unchanged where bfloat16 pairs are multiplied, else widened, for each two
// vectors the even columns before the odd ones.
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
inline void copy_query(const bf16* in, int64_t size, float* query) { memcpy(query, in, 2 * size); }
inline Floats add_entry(Floats sums, const float* query, int64_t column, const Pairs& keys) {
    return dot_pairs(sums, load_words(query + column / 2), keys);
}
inline Floats add_columns(Floats sums, const float* query, int64_t column, int64_t lane, const Pairs& keys) {
    return dot_pairs(sums, load_splat(query + column / 2 + lane), keys);
}
#else
inline void copy_query(const bf16* in, int64_t size, float* query) {
    for (int64_t i = 0; i < size; i += 2 * LANES)
        store(query + i, even_bf16(load_words(in + i))), store(query + i + LANES, odd_bf16(load_words(in + i)));
}
inline Floats add_entry(Floats sums, const float* query, int64_t column, const Pairs& keys) {
    return fma(keys.odd, load(query + column + LANES), fma(keys.even, load(query + column), sums));
}
inline Floats add_columns(Floats sums, const float* query, int64_t column, int64_t lane, const Pairs& keys) {
    return fma(keys.odd, splat(query[column + LANES + lane]), fma(keys.even, splat(query[column + lane]), sums));
}
#endif

struct Query {
    float *scores, *partial;
    int64_t row, seen;  // row of the block; how many entries of the chunk it sees
};

// The sum of N sums of Q queries from `first` on, pairwise in a tree: `add` adds the halves of N sums. Inlined, as few vectors wait
// for others if all of it is one function.
template <int N, int Q, class SumsOf, class Add>
inline __attribute__((always_inline)) void add_pairwise(SumsOf& sums_of, Add add, int64_t first, Floats (&sums)[Q]) {
    if constexpr (N == 1) sums_of(first, sums);
    else {
        Floats others[Q];
        add_pairwise<N / 2, Q>(sums_of, add, first, sums), add_pairwise<N / 2, Q>(sums_of, add, first + N / 2, others);
        for (int q = 0; q < Q; q++) sums[q] = add(std::integral_constant<int, N / 2>(), sums[q], others[q]);
    }
}

// For entries, each a vector of all its lanes: lane i becomes the sum of entry i. For lanes, each a vector of entries: their sum.
struct AddEntries {
    template <int S>
    Floats operator()(std::integral_constant<int, S>, Floats a, Floats b) const {
        return fold_add<S>(a, b, std::make_integer_sequence<int, LANES>());
    }
};
struct AddLanes {
    template <int S>
    Floats operator()(std::integral_constant<int, S>, Floats a, Floats b) const { return a + b; }
};

// Scores of Q queries for a vector of entries. numbers: of the queries, [Q, size]; keys: transposed, [size / 2].
template <int Q>
void score_columns(const float* numbers, const Words* keys, int64_t size, Floats scale, float* scores) {
    auto sums_of = [&](int64_t lane, Floats (&sums)[Q]) __attribute__((always_inline)) {
        for (int q = 0; q < Q; q++) sums[q] = Floats{};
        for (int64_t column = 0; column < size; column += 2 * LANES) {
            const Pairs some = to_pairs(keys[column / 2 + lane]);
            for (int q = 0; q < Q; q++) sums[q] = add_columns(sums[q], numbers + q * size, column, lane, some);
        }
    };
    Floats sums[Q];
    add_pairwise<LANES, Q>(sums_of, AddLanes(), 0, sums);
    for (int q = 0; q < Q; q++) store(scores + q * SPAN, sums[q] * scale);
}

// How values are summed: entries whose values are added together, and what a vector of them or of their weights is.
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
constexpr int TOGETHER = 2;

struct Values { Words first, second; };
inline Values load_values(const bf16* one, const bf16* other) {
    Values values;
    interleave(load_words(one), load_words(other), values.first, values.second);
    return values;
}

inline float weights_of(float* scores, int64_t count, float& top) {
    return softmax_weights(scores, count, top, [&](int64_t i, Floats weight) {
        const __m256bh halves = _mm512_cvtneps_pbh((__m512)weight);  // the first halves replace the first scores
        memcpy((bf16*)scores + i, &halves, sizeof halves);
        return load_bf16((const bf16*)&halves);
    });
}
inline void add_values(Floats& first, Floats& second, const float* weights, int64_t i, const Values& values) {
    const Words both = load_splat((const bf16*)weights + i);
    first = dot_pairs(first, values.first, both), second = dot_pairs(second, values.second, both);
}

// Write two vectors of a row's result; factor: 1 / the sum of weights.
inline void write_columns(const float* partial, Floats factor, bf16* out) {
    store_interleaved(out, load(partial) * factor, load(partial + LANES) * factor);
}
#else
constexpr int TOGETHER = 1;

struct Values { Floats first, second; };
inline Values load_values(const bf16* one, const bf16*) {
    const Words both = load_words(one);
    return {even_bf16(both), odd_bf16(both)};
}
inline float weights_of(float* scores, int64_t count, float& top) {
    return softmax_weights(scores, count, top, [&](int64_t i, Floats weight) { return store(scores + i, weight), weight; });
}
inline void add_values(Floats& first, Floats& second, const float* weights, int64_t i, const Values& values) {
    const Floats weight = splat(weights[i]);
    first = add_product(first, weight, values.first), second = add_product(second, weight, values.second);
}
inline void write_columns(const float* partial, Floats factor, bf16* out) {
    Words both = to_bf16(load(partial) * factor) | to_bf16(load(partial + LANES) * factor) << 16;
    memcpy(out, &both, sizeof both);
}
#endif

// Weighted sums of the values of the first `count` entries (a multiple of TOGETHER) for Q queries, W pairs of vectors from `column`
// of an entry on, which are `to` of a partial result.
template <int Q, int W>
void weighted_values(const Query* queries, const float* scores, const bf16* const* entries, int64_t count, int64_t column,
                     int64_t to) {
    Floats first[Q][W] = {}, second[Q][W] = {};
    for (int64_t i = 0; i < count; i += TOGETHER)
        for (int w = 0; w < W; w++) {
            const int64_t from = column + w * 2 * LANES;
            const Values values = load_values(entries[i] + from, entries[i + TOGETHER - 1] + from);
            const float* weights = opaque(scores);
            for (int q = 0; q < Q; q++) add_values(first[q][w], second[q][w], weights + q * SPAN, i, values);
        }
    for (int q = 0; q < Q; q++)
        for (int w = 0; w < W; w++) {
            store(queries[q].partial + to + w * 2 * LANES, first[q][w]);
            store(queries[q].partial + to + w * 2 * LANES + LANES, second[q][w]);
        }
}

// Prefetches the keys and values of one KV head of a chunk, some at a time.
class HeadPrefetch {
    const bf16* const* entries = nullptr;
    int64_t column = 0, width = 0, entry = 0, last = 0, step = 0;

  public:
    HeadPrefetch() = default;
    // Entries from `first` to `last`; calls: how often `prefetch_some` will be called.
    HeadPrefetch(const Op& op, const bf16* const* entries, int64_t kv_head, int64_t first, int64_t last, int64_t calls)
        : entries(entries), column(kv_head * op.head_dim), width(int64_t(op.kv_heads) * op.head_dim), entry(first), last(last),
          step((last + calls - 1) / calls) {}

    // size: of a head
    inline __attribute__((always_inline)) void prefetch_some(int size) {
        for (const int64_t end = std::min(entry + step, last); entry < end; entry++)
            prefetch(entries[entry] + column, size), prefetch(entries[entry] + column + width, size);
    }
};

// One KV head of a chunk: where its keys begin in an entry, and what is prefetched meanwhile.
struct HeadEntries {
    const SeenEntries& seen;
    int64_t column;
    HeadPrefetch own, next;
    bool by_column, is_long;  // how its keys are read; whether the row sees many chunks
};

// Computes the partial results of rows, chunk by chunk.
class ChunkAttention {
    const Op& op;
    const Frame& frame;
    const ChunkRange range;
    const int64_t size, group;  // of a head; query heads of a KV head
    const Floats scale;
    Words* keys;                // [SPAN / LANES, size / 2] of one KV head, transposed
    float *numbers, *scores;    // [MAX_QUERIES, size], [MAX_QUERIES, SPAN]

    void transpose_keys(HeadEntries& head) {
        const int64_t pairs = size / 2;
        for (int64_t first = 0; first < head.seen.count; first += LANES) {
            for (int i = 0; i < LANES; i++) head.own.prefetch_some(int(size));
            for (int64_t pair = 0; pair < pairs; pair += LANES) {
                Words some[LANES];
                for (int i = 0; i < LANES; i++) some[i] = load_words(head.seen.entries[first + i] + head.column + 2 * pair);
                transpose(some);
                for (int i = 0; i < LANES; i++) keys[first / LANES * pairs + pair + i] = some[i];
            }
        }
    }

    // Scores of Q queries by column.
    template <int Q>
    void score_by_column(HeadEntries& head) {
        constexpr int SOME = (Q + 1) / 2;
        for (int64_t first = 0; first < head.seen.count; first += LANES) {
            head.next.prefetch_some(int(size));
            const Words* some = keys + first / LANES * (size / 2);
            score_columns<SOME>(numbers, some, size, scale, scores + first);
            if constexpr (Q > SOME) score_columns<Q - SOME>(numbers + SOME * size, some, size, scale, scores + SOME * SPAN + first);
        }
    }

    // Scores of Q queries by entry. SIZE: of a head, 0: any; is_first: nobody has read these entries before.
    template <int Q, int SIZE>
    void score_by_entry(const HeadEntries& head, bool is_first) {
        const int64_t width = SIZE ? SIZE : size, column = head.column;
        const float* numbers = this->numbers;
        const SeenEntries& seen = head.seen;
        HeadPrefetch own = is_first ? head.own : HeadPrefetch(), next = is_first ? head.next : HeadPrefetch();
        auto sums_of = [&](int64_t i, Floats (&sums)[Q]) __attribute__((always_inline)) {
            const bf16* key = seen.entries[i] + column;
            own.prefetch_some(int(width)), next.prefetch_some(int(width));
            for (int q = 0; q < Q; q++) sums[q] = Floats{};
            for (int64_t j = 0; j < width; j += 2 * LANES) {
                const Pairs pairs = to_pairs(load_words(key + j));
                for (int q = 0; q < Q; q++) sums[q] = add_entry(sums[q], numbers + q * width, j, pairs);
            }
        };
        for (int64_t first = 0; first < seen.count; first += LANES) {
            Floats sums[Q];
            add_pairwise<LANES, Q>(sums_of, AddEntries(), first, sums);
            for (int q = 0; q < Q; q++) store(scores + q * SPAN + first, sums[q] * scale);
        }
    }

    // The partial results of Q queries whose scores are known. column: where values begin in an entry.
    template <int Q>
    void weigh(const SeenEntries& seen, const Query* queries, int64_t column) {
        int64_t common = seen.shared, j = 0;
        for (int q = 0; q < Q; q++) {
            const Query& query = queries[q];
            if (query.seen > seen.shared) seen.gather_own_scores(query.row, query.scores);
            query.partial[size + 1] = weights_of(query.scores, query.seen, query.partial[size]);
            common = std::min(common, query.seen);
        }
        common -= common % TOGETHER;
        for (; j + PAIRS_TOGETHER * 2 * LANES <= size; j += PAIRS_TOGETHER * 2 * LANES)
            weighted_values<Q, PAIRS_TOGETHER>(queries, scores, seen.entries, common, column + j, j);
        for (; j < size; j += 2 * LANES) weighted_values<Q, 1>(queries, scores, seen.entries, common, column + j, j);
        for (int q = 0; q < Q; q++) add_own_values(seen, queries[q], common, column);
    }

    // Adds the values that a query sees from a place on.
    void add_own_values(const SeenEntries& seen, const Query& query, int64_t place, int64_t column) {
        for (; place < query.seen; place += TOGETHER) {
            const bf16* one = seen.at(query.row, place) + column;
            const bf16* other = TOGETHER > 1 && place + 1 < query.seen ? seen.at(query.row, place + 1) + column : one;
            for (int64_t j = 0; j < size; j += 2 * LANES) {
                float* sums = query.partial + j;
                Floats first = load(sums), second = load(sums + LANES);
                add_values(first, second, query.scores, place, load_values(one + j, other + j));
                store(sums, first), store(sums + LANES, second);
            }
        }
    }

    // The partial results of `count` queries, at least Q.
    template <int Q = 1>
    void attend_queries(int64_t count, HeadEntries& head, const Query* queries, bool is_first) {
        if constexpr (Q < MAX_QUERIES)
            if (count > Q) return attend_queries<Q + 1>(count, head, queries, is_first);
        if constexpr (CAN_TRANSPOSE)
            if (head.by_column) score_by_column<Q>(head);
        if constexpr (Q <= MAX_BY_ENTRY) {
            // It waits longer if its loop runs ahead of what was prefetched, so a long row gets the slower loop.
            if (!head.by_column && size == 64 && !head.is_long) score_by_entry<Q, 64>(head, is_first);
            else if (!head.by_column) score_by_entry<Q, 0>(head, is_first);
        }
        weigh<Q>(head.seen, queries, head.column + op.kv_heads * size);
    }

    // The partial results of all `count` queries of a KV head, in `parts` calls. fill: makes a query.
    template <class Fill>
    void attend_head(HeadEntries& head, int64_t count, int64_t parts, Fill fill) {
        for (int64_t part = 0; part < parts; part++) {  // about equal in size
            const int64_t first = count * part / parts, last = count * (part + 1) / parts;
            Query queries[MAX_QUERIES];
            for (int64_t q = first; q < last; q++) queries[q - first] = fill(q, q - first);
            attend_queries(last - first, head, queries, !part);
        }
    }

  public:
    // How many rows a block may have: some for each thread.
    static int64_t most_rows(int64_t rows, int threads) {
        return CAN_TRANSPOSE ? std::clamp<int64_t>((rows + threads - 1) / threads, 1, BLOCK_ROWS) : 1;
    }

    // Floats of scratch memory that it needs.
    static int64_t floats(const Op& op) { return SPAN / 2 * op.head_dim + MAX_QUERIES * (op.head_dim + SPAN) + LANES; }

    ChunkAttention(const Op& op, const Frame& frame, ChunkRange range, float* scratch)
        : op(op), frame(frame), range(range), size(op.head_dim), group(op.heads / op.kv_heads),
          scale(splat(1.0f / sqrtf(float(op.head_dim)))) {
        keys = (Words*)((uintptr_t(scratch) + sizeof(Words) - 1) / sizeof(Words) * sizeof(Words));
        numbers = (float*)keys + SPAN / 2 * size, scores = numbers + MAX_QUERIES * size;
    }

    // The partial results of rows from `row` on for a chunk. partial: of the first; row_stride: floats from row to row.
    void attend(int64_t row, int64_t count, int64_t chunk_index, float* partial, int64_t row_stride) {
        const SeenEntries seen(op, frame, row, count, chunk_index, LANES);
        const int64_t queries = count * group, chunks = chunks_of(num_visible(frame, row));
        const bool by_column = CAN_TRANSPOSE && queries >= MIN_BY_COLUMN;
        const int64_t most = by_column ? MAX_QUERIES : MAX_BY_ENTRY, parts = (queries + most - 1) / most;
        std::optional<Chunk> next;
        if (chunk_index + 1 < std::min(range.end, chunks)) next.emplace(op, frame, row, chunk_index + 1);
        for (int kv_head = 0; kv_head < op.kv_heads; kv_head++) {
            HeadEntries head = {seen, kv_head * size, {}, {}, by_column, chunks > LONG_CHUNKS};
            const int64_t calls = by_column ? parts * (seen.count / LANES) : seen.count;
            if (!kv_head && chunk_index == range.begin)
                head.own = HeadPrefetch(op, seen.entries, 0, PREFETCH_ENTRIES, seen.count, seen.count);
            if (kv_head + 1 < op.kv_heads) head.next = HeadPrefetch(op, seen.entries, kv_head + 1, 0, seen.count, calls);
            else if (next) head.next = HeadPrefetch(op, next->entries, 0, 0, next->count, calls);
            if (by_column) transpose_keys(head);
            attend_head(head, queries, parts, [&](int64_t q, int64_t place) -> Query {
                const int64_t r = q / group, query_head = kv_head * group + q % group;
                copy_query((const bf16*)op.in + (row + r) * op.in_stride + query_head * size, size, numbers + place * size);
                return {scores + place * SPAN, partial + r * row_stride + query_head * (size + 2), r, seen.seen[r]};
            });
        }
    }
};

}  // namespace
