// Attention of one row over one chunk by vectors: all query heads of a KV head together. Scores and sums are
// float32; queries and keys are multiplied as bfloat16 pairs where one instruction does so, else widened. Rules:
// those of `attention.h`. Keys and values are read from memory once, and what is read next is prefetched meanwhile.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "chunk.h"
#include "op.h"
#include "vectors.h"

namespace {

constexpr int BLOCK_ROWS = 1;
constexpr int MAX_HEADS_TOGETHER = 4;               // query heads that are computed together, at most
constexpr int LONG_CHUNKS = 4;                      // if one thread reads a row of more chunks, it prefetches a whole chunk ahead
constexpr int PAIRS_TOGETHER = LANES == 4 ? 1 : 2;  // pairs of vectors of a value computed together: as registers allow

struct Place {  // where keys of a KV head begin in each entry; its values begin `width` further on
    const Chunk& chunk;
    int64_t column;

    const bf16* operator[](int64_t i) const { return chunk.entries[i] + column; }
};

// Queries in the form that keys are multiplied with: unchanged where bfloat16 pairs are multiplied, else widened, for each two
// vectors the even columns before the odd ones.
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
typedef bf16 Query;
inline const Query* queries(const bf16* in, int64_t, float*) { return in; }
inline Floats add_keys(Floats sums, const Query* query, const Pairs& keys) { return dot_pairs(sums, load_words(query), keys); }
#else
typedef float Query;
inline const Query* queries(const bf16* in, int64_t width, float* wide) {
    for (int64_t i = 0; i < width; i += 2 * LANES)
        store(wide + i, even_bf16(load_words(in + i))), store(wide + i + LANES, odd_bf16(load_words(in + i)));
    return wide;
}
inline Floats add_keys(Floats sums, const Query* query, const Pairs& keys) {
    return fma(keys.odd, load(query + LANES), fma(keys.even, load(query), sums));
}
#endif

// Weighted sums of values for H heads, W pairs of vectors from `column` on.
template <int H, int W>
void weighted_values(const Chunk& chunk, int64_t column, const float* scores, float* partial, int64_t stride) {
    Floats even[H][W] = {}, odd[H][W] = {};
    for (int64_t i = 0; i < chunk.count; i++)
        for (int w = 0; w < W; w++) {
            Words both = load_words(chunk.entries[i] + column + w * 2 * LANES);
            Floats low = even_bf16(both), high = odd_bf16(both);
            const float* weights = opaque(scores + i);
            for (int h = 0; h < H; h++) {
                Floats weight = splat(weights[h * CHUNK]);
                even[h][w] = add_product(even[h][w], weight, low);
                odd[h][w] = add_product(odd[h][w], weight, high);
            }
        }
    for (int h = 0; h < H; h++)
        for (int w = 0; w < W; w++) {
            store(partial + h * stride + w * 2 * LANES, even[h][w]);
            store(partial + h * stride + w * 2 * LANES + LANES, odd[h][w]);
        }
}

// Lane i: the sum of the lanes of entry first + i, for N entries of H heads, in the same order for each. Inlined, as few vectors
// wait for others if all of it is one function.
template <int N, int H, class SumsOf>
inline __attribute__((always_inline)) void fold_add_entries(SumsOf& sums_of, int64_t first, Floats (&sums)[H]) {
    if constexpr (N == 1) sums_of(first, sums);
    else {
        Floats others[H];
        fold_add_entries<N / 2, H>(sums_of, first, sums), fold_add_entries<N / 2, H>(sums_of, first + N / 2, others);
        for (int h = 0; h < H; h++)
            sums[h] = fold_add<N / 2>(sums[h], others[h], std::make_integer_sequence<int, LANES>());
    }
}

// The partial results of one chunk for H query heads of SIZE numbers (0: op.head_dim) that share a KV head. next: where reading
// goes on after it; is_prefetched: the chunk was prefetched whole, as `next_prefetch` is now.
template <int H, int SIZE>
void attend_heads(const Op& op, const Place& place, const Place& next, NextChunkPrefetch next_prefetch, bool is_prefetched,
        const Query* query, float* scores,
                  float* partial) {
    const Chunk& chunk = place.chunk;
    const int size = SIZE ? SIZE : op.head_dim;
    int64_t width = int64_t(op.kv_heads) * size, stride = size + 2;
    Floats scale = splat(1.0f / sqrtf(float(size)));
    auto sums_of = [&](int64_t i, Floats (&sums)[H]) __attribute__((always_inline)) {
        const bf16* key = place[i];
        next_prefetch.prefetch_some(op);
        if (!is_prefetched) {
            int64_t early = i + PREFETCH_ENTRIES;
            const bf16* then = early < chunk.count ? place[early] : next[early - chunk.count];
            prefetch(then, size), prefetch(then + width, size);
        }
        for (int h = 0; h < H; h++) sums[h] = Floats{};
        for (int j = 0; j < size; j += 2 * LANES) {
            Pairs keys = to_pairs(load_words(key + j));
            for (int h = 0; h < H; h++) sums[h] = add_keys(sums[h], query + h * size + j, keys);
        }
    };
    for (int64_t first = 0; first < chunk.count; first += LANES) {
        Floats sums[H];
        fold_add_entries<LANES, H>(sums_of, first, sums);
        for (int h = 0; h < H; h++) store(scores + h * CHUNK + first, sums[h] * scale);
    }
    for (int h = 0; h < H; h++) {
        float* head = partial + h * stride;
        head[size + 1] = softmax_weights(scores + h * CHUNK, chunk.count, head[size]);
    }
    int j = 0;
    for (; j + PAIRS_TOGETHER * 2 * LANES <= size; j += PAIRS_TOGETHER * 2 * LANES)
        weighted_values<H, PAIRS_TOGETHER>(chunk, place.column + width + j, scores, partial + j, stride);
    for (; j < size; j += 2 * LANES) weighted_values<H, 1>(chunk, place.column + width + j, scores, partial + j, stride);
}

// The partial results of a chunk for all heads. next: the row's next chunk, or the same one; to_prefetch: the next one, if all of
// it is prefetched meanwhile, or null; is_prefetched: this one was.
template <int SIZE>
void attend_chunk(const Op& op, const Chunk& chunk, const Chunk& next, const Chunk* to_prefetch, bool is_prefetched,
        const Query* query,
                  float* scores, float* partial) {
    constexpr void (*widths[])(const Op&, const Place&, const Place&, NextChunkPrefetch, bool, const Query*, float*, float*) = {
        nullptr, attend_heads<1, SIZE>, attend_heads<2, SIZE>, attend_heads<3, SIZE>, attend_heads<4, SIZE>};
    int group = op.heads / op.kv_heads, size = op.head_dim;
    for (int kv_head = 0; kv_head < op.kv_heads; kv_head++) {
        bool last = kv_head + 1 == op.kv_heads;
        Place here = {chunk, int64_t(kv_head) * size}, there = {last ? next : chunk, last ? 0 : here.column + size};
        for (int begin = 0; begin < group; begin += MAX_HEADS_TOGETHER) {
            int head = kv_head * group + begin;
            widths[std::min(MAX_HEADS_TOGETHER, group - begin)](op, here, there,
                    NextChunkPrefetch(op, begin ? nullptr : to_prefetch, kv_head), is_prefetched,
                                                    query + head * size, scores, partial + head * (size + 2));
        }
    }
}

// Computes the partial results of one row, chunk by chunk.
class ChunkAttention {
    const Op& op;
    const Frame& frame;
    const ChunkRange range;
    float* scores;  // [MAX_HEADS_TOGETHER, CHUNK]
    const Query* query;
    int64_t chunks;

  public:
    // Floats of scratch memory that it needs.
    static int64_t floats(const Op& op) { return MAX_HEADS_TOGETHER * CHUNK + op.heads * int64_t(op.head_dim); }

    ChunkAttention(const Op& op, const Frame& frame, int64_t row, ChunkRange range, float* scratch)
        : op(op), frame(frame), range(range), scores(scratch), chunks(chunks_of(num_visible(frame, row))) {
        query = queries((const bf16*)op.in + row * op.in_stride, op.heads * int64_t(op.head_dim), scratch
                + MAX_HEADS_TOGETHER * CHUNK);
    }

    bool can_batch(int64_t, int64_t, int64_t) const { return false; }

    // The row's partial result of a chunk.
    void attend(int64_t row, int64_t, int64_t chunk_index, float* partial, int64_t) {
        const bool has_next = chunk_index + 1 < range.end, whole = range.is_all && chunks > LONG_CHUNKS;
        Chunk chunk(op, frame, row, chunk_index), next(op, frame, row, chunk_index + has_next);
        // A long row waits for memory, and waits longer if its loop runs ahead of what was prefetched.
        auto attend = chunks > LONG_CHUNKS ? attend_chunk<0> : op.head_dim == 64 ? attend_chunk<64>
                    : op.head_dim == 128 ? attend_chunk<128> : attend_chunk<0>;
        attend(op, chunk, next, whole && has_next ? &next : nullptr, whole && chunk_index > range.begin, query, scores, partial);
    }

    // Write two vectors of a row's result; factor: 1 / the sum of weights.
    static void normalize(const float* partial, Floats factor, bf16* out) {
        Words both = to_bf16(load(partial) * factor) | to_bf16(load(partial + LANES) * factor) << 16;
        memcpy(out, &both, sizeof both);
    }
};

}  // namespace
