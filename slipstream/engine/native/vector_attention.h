// Chunks of attention by vectors, a row at a time: all that a row's heads make of a chunk.
//
// Rules: those of `attention.h`. Keys and values come from memory once; what is read next is asked for meanwhile.
//
// It knows nothing about what becomes of several chunks.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "chunk.h"
#include "list.h"
#include "vectors.h"

namespace {

constexpr int BLOCK_ROWS = 1;
constexpr int BUNDLE = 4;   // query heads that are computed together, at most
constexpr int LONG = 4;     // chunks; a row of more, whose entries one thread reads, asks for a whole chunk in advance
constexpr int WIDE = LANES == 4 ? 1 : 2;  // pairs of vectors of a value that are computed together, as registers hold

struct Place {  // where keys are read, and values `width` further on
    const Chunk& chunk;
    int64_t column;

    const bf16* operator[](int64_t i) const { return chunk.entries[i] + column; }
};

// Queries as keys are multiplied with them: as they are where pairs of bfloat16 are, else widened, those of even columns of two
// vectors before those of odd ones.
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
typedef bf16 Query;
inline const Query* queries(const bf16* in, int64_t, float*) { return in; }
inline Floats add_keys(Floats sums, const Query* query, const Pairs& keys) { return pairs(sums, words_at(query), keys); }
#else
typedef float Query;
inline const Query* queries(const bf16* in, int64_t width, float* wide) {
    for (int64_t i = 0; i < width; i += 2 * LANES)
        store(wide + i, lower(words_at(in + i))), store(wide + i + LANES, upper(words_at(in + i)));
    return wide;
}
inline Floats add_keys(Floats sums, const Query* query, const Pairs& keys) {
    return fma(keys.other, load(query + LANES), fma(keys.one, load(query), sums));
}
#endif

// Sums of values of H heads, W pairs of vectors from `column` on.
template <int H, int W>
void weighed(const Chunk& chunk, int64_t column, const float* scores, float* known, int64_t stride) {
    Floats even[H][W] = {}, odd[H][W] = {};
    for (int64_t i = 0; i < chunk.count; i++)
        for (int w = 0; w < W; w++) {
            Words both = words_at(chunk.entries[i] + column + w * 2 * LANES);
            Floats low = lower(both), high = upper(both);
            const float* weights = read_anew(scores + i);
            for (int h = 0; h < H; h++) {
                Floats weight = all(weights[h * CHUNK]);
                even[h][w] = add_product(even[h][w], weight, low);
                odd[h][w] = add_product(odd[h][w], weight, high);
            }
        }
    for (int h = 0; h < H; h++)
        for (int w = 0; w < W; w++) {
            store(known + h * stride + w * 2 * LANES, even[h][w]);
            store(known + h * stride + w * 2 * LANES + LANES, odd[h][w]);
        }
}

// Lane i: the sum of the lanes of entry first + i, for N entries of H heads, taken in the same order for each. Few vectors wait for
// others where all of it is one function: the compiler must be told.
template <int N, int H, class SumsOf>
inline __attribute__((always_inline)) void folded_sums(SumsOf& sums_of, int64_t first, Floats (&sums)[H]) {
    if constexpr (N == 1) sums_of(first, sums);
    else {
        Floats others[H];
        folded_sums<N / 2, H>(sums_of, first, sums), folded_sums<N / 2, H>(sums_of, first + N / 2, others);
        for (int h = 0; h < H; h++)
            sums[h] = folded<N / 2>(sums[h], others[h], std::make_integer_sequence<int, LANES>());
    }
}

// What is known of one chunk, of H query heads of SIZE numbers (0: as `op` says) that share a KV head. next: what is read after
// it; asked: the chunk was, as `coming` is.
template <int H, int SIZE>
void attend_heads(const Op& op, const Place& place, const Place& next, Coming coming, bool asked, const Query* query, float* scores,
                  float* known) {
    const Chunk& chunk = place.chunk;
    const int size = SIZE ? SIZE : op.head_dim;
    int64_t width = int64_t(op.kv_heads) * size, stride = size + 2;
    Floats scale = all(1.0f / sqrtf(float(size)));
    auto sums_of = [&](int64_t i, Floats (&sums)[H]) __attribute__((always_inline)) {
        const bf16* key = place[i];
        coming.ask_on(op);
        if (!asked) {
            int64_t early = i + EARLY;
            const bf16* then = early < chunk.count ? place[early] : next[early - chunk.count];
            ask(then, size), ask(then + width, size);
        }
        for (int h = 0; h < H; h++) sums[h] = Floats{};
        for (int j = 0; j < size; j += 2 * LANES) {
            Pairs keys = pairs_of(words_at(key + j));
            for (int h = 0; h < H; h++) sums[h] = add_keys(sums[h], query + h * size + j, keys);
        }
    };
    for (int64_t first = 0; first < chunk.count; first += LANES) {
        Floats sums[H];
        folded_sums<LANES, H>(sums_of, first, sums);
        for (int h = 0; h < H; h++) store(scores + h * CHUNK + first, sums[h] * scale);
    }
    for (int h = 0; h < H; h++) {
        float* head = known + h * stride;
        head[size + 1] = weigh(scores + h * CHUNK, chunk.count, head[size]);
    }
    int j = 0;
    for (; j + WIDE * 2 * LANES <= size; j += WIDE * 2 * LANES)
        weighed<H, WIDE>(chunk, place.column + width + j, scores, known + j, stride);
    for (; j < size; j += 2 * LANES) weighed<H, 1>(chunk, place.column + width + j, scores, known + j, stride);
}

// What is known of a chunk, of all heads. next: the row's next chunk, or the same one; coming: the next one, where all of it is
// asked for meanwhile, or null; asked: this one was.
template <int SIZE>
void attend_chunk(const Op& op, const Chunk& chunk, const Chunk& next, const Chunk* coming, bool asked, const Query* query,
                  float* scores, float* known) {
    constexpr void (*widths[])(const Op&, const Place&, const Place&, Coming, bool, const Query*, float*, float*) = {
        nullptr, attend_heads<1, SIZE>, attend_heads<2, SIZE>, attend_heads<3, SIZE>, attend_heads<4, SIZE>};
    int group = op.heads / op.kv_heads, size = op.head_dim;
    for (int kv_head = 0; kv_head < op.kv_heads; kv_head++) {
        bool last = kv_head + 1 == op.kv_heads;
        Place here = {chunk, int64_t(kv_head) * size}, there = {last ? next : chunk, last ? 0 : here.column + size};
        for (int begin = 0; begin < group; begin += BUNDLE) {
            int head = kv_head * group + begin;
            widths[std::min(BUNDLE, group - begin)](op, here, there, Coming(op, begin ? nullptr : coming, kv_head), asked,
                                                    query + head * size, scores, known + head * (size + 2));
        }
    }
}

// What a row knows of chunks, one after the other.
class Weigher {
    const Op& op;
    const Frame& frame;
    const Reading reading;
    float* scores;  // [BUNDLE, CHUNK]
    const Query* query;
    int64_t chunks;

  public:
    // Floats of scratch that it needs.
    static int64_t floats(const Op& op) { return BUNDLE * CHUNK + op.heads * int64_t(op.head_dim); }

    Weigher(const Op& op, const Frame& frame, int64_t row, Reading reading, float* scratch)
        : op(op), frame(frame), reading(reading), scores(scratch), chunks(chunks_of(seen_by(frame, row))) {
        query = queries((const bf16*)op.in + row * op.in_stride, op.heads * int64_t(op.head_dim), scratch + BUNDLE * CHUNK);
    }

    bool together(int64_t, int64_t, int64_t) const { return false; }

    // What the row knows of a chunk.
    void read(int64_t row, int64_t, int64_t which, float* known, int64_t) {
        const bool goes_on = which + 1 < reading.end, whole = reading.all && chunks > LONG;
        Chunk chunk(op, frame, row, which), next(op, frame, row, which + goes_on);
        // A long row waits for memory, and waits longer when its loop runs ahead of what was asked for.
        auto attend = chunks > LONG ? attend_chunk<0> : op.head_dim == 64 ? attend_chunk<64>
                    : op.head_dim == 128 ? attend_chunk<128> : attend_chunk<0>;
        attend(op, chunk, next, whole && goes_on ? &next : nullptr, whole && which > reading.begin, query, scores, known);
    }

    // Two vectors of a row's result, as `known` has them.
    static void end(const float* known, Floats factor, bf16* out) {
        Words both = rounded(load(known) * factor) | rounded(load(known + LANES) * factor) << 16;
        memcpy(out, &both, sizeof both);
    }
};

}  // namespace
