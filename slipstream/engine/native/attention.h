// Attention of a row over the KV entries that it sees, chunk by chunk.
//
// Rules:
// 1. Chunks are counted from the first entry that a row sees. Each is weighed by itself, from nothing; what is known of a row's
//    chunks is joined in their order. So its bits do not depend on who computes which of them.
// 2. Few rows are split: threads take chunks of one row, and who is the last to end joins them.
// 3. Keys and values come from memory once: a chunk stays in a near cache, and what is read next is asked for meanwhile.
//
// It knows nothing about threads.

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "list.h"
#include "vectors.h"

namespace {

constexpr int BUNDLE = 4;   // query heads that are computed together, at most
constexpr int EARLY = 32;   // KV entries that are asked for in advance
constexpr int CHUNK = 128;  // KV entries that are weighed together, at most
constexpr int LONG = 2;     // chunks; a row of more, whose entries one thread reads, asks for a whole chunk in advance
constexpr int WIDE = LANES == 16 ? 2 : 1;  // pairs of vectors of a value that are computed together, as registers hold

int64_t seen_by(const Frame& frame, int64_t row) { return frame.shared[row] + __builtin_popcountll(frame.words[row]); }
int64_t chunks_of(int64_t count) { return (count + CHUNK - 1) / CHUNK; }

int64_t splits_of(const Frame& frame, int threads) {  // of each row
    int64_t most = 1, wanted = threads == 1 ? 1 : 4 * threads / frame.rows;
    for (int64_t row = 0; wanted > 1 && row < frame.rows; row++) most = std::max(most, chunks_of(seen_by(frame, row)));
    return std::clamp<int64_t>(wanted, 1, most);
}

// What is known of some chunks of a row, for each head: `size` sums of weighed values (those of even columns in each pair of
// vectors before those of odd ones), the greatest score, and the sum of weights.
int64_t known_size(const Op& op) { return op.heads * (int64_t(op.head_dim) + 2); }

struct Splits {  // rows that several threads compute
    std::vector<float> known;  // [rows, chunks], as `known_size` has it
    std::unique_ptr<std::atomic<int64_t>[]> left;  // [rows] parts that have not ended
    int64_t chunks = 0, rows = 0;

    void hold(const Op* ops, int64_t count, const Frame& frame, int threads) {
        int64_t size = 0, splits = 0;
        for (int64_t i = 0; i < count; i++)
            if (ops[i].kind == ATTEND) size = std::max(size, known_size(ops[i]));
        if (!size || (splits = splits_of(frame, threads)) == 1) return;
        chunks = 0;
        for (int64_t row = 0; row < frame.rows; row++) chunks = std::max(chunks, chunks_of(seen_by(frame, row)));
        if (int64_t(known.size()) < frame.rows * chunks * size) known.resize(2 * frame.rows * chunks * size);
        if (rows < frame.rows) rows = frame.rows, left = std::make_unique<std::atomic<int64_t>[]>(rows);
        for (int64_t row = 0; row < frame.rows; row++) left[row] = splits;
    }
};

struct Chunk {  // of the entries that a row sees
    const bf16* entries[CHUNK + LANES];  // beyond the last one: that one again
    int64_t count;

    Chunk(const Op& op, const Frame& frame, int64_t row, int64_t which) {
        int64_t first = which * CHUNK, shared = frame.shared[row], stride = 2 * int64_t(op.kv_heads) * op.head_dim;
        const bf16* kv = frame.kv + op.layer * frame.layer_stride;
        const int64_t *slots = frame.kv_slots + frame.begin[row], *tree = frame.kv_slots + frame.tree[row];
        count = std::min<int64_t>(CHUNK, seen_by(frame, row) - first);
        int64_t i = 0;
        for (; i < count && first + i < shared; i++) entries[i] = kv + slots[first + i] * stride;
        int64_t place = shared - first;
        for (uint64_t word = i < count ? frame.words[row] : 0; word; word &= word - 1, place++)
            if (place >= 0 && place < count) entries[place] = kv + tree[__builtin_ctzll(word)] * stride;
        for (i = count; i < CHUNK + LANES; i++) entries[i] = entries[count - 1];
    }
};

struct Place {  // where keys are read, and values `width` further on
    const Chunk& chunk;
    int64_t column;

    const bf16* operator[](int64_t i) const { return chunk.entries[i] + column; }
};

// Of the chunk that a long row goes on with, entries whole, as memory has them: a part with each step of this chunk.
struct Coming {
    const Chunk* chunk;  // null: there is none
    bool alone;  // this chunk was asked for in the same way
};

void ask(const bf16* columns, int size) {
    for (int line = 0; line < size; line += 32) __builtin_prefetch(columns + line, 0, 1);
}

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

// e^(score - top), and their sum
float weigh(float* scores, int64_t count, float& top) {
    Floats most = all(-INFINITY), sum = {};
    int64_t padded = (count + LANES - 1) / LANES * LANES;
    for (int64_t i = count; i < padded; i++) scores[i] = -INFINITY;
    for (int64_t i = 0; i < padded; i += LANES) most = greater(load(scores + i), most);
    top = greatest(most);
    for (int64_t i = 0; i < padded; i += LANES) {
        Floats v = exponential(load(scores + i) - all(top));
        store(scores + i, v);
        sum += v;
    }
    return total(sum);
}

// Sums of values of H heads, W pairs of vectors from `column` on.
template <int H, int W>
void weighed(const Chunk& chunk, int64_t column, const float* scores, float* known, int64_t stride) {
    Floats even[H][W] = {}, odd[H][W] = {};
    for (int64_t i = 0; i < chunk.count; i++)
        for (int w = 0; w < W; w++) {
            Words both = words_at(chunk.entries[i] + column + w * 2 * LANES);
            Floats low = lower(both), high = upper(both);
            for (int h = 0; h < H; h++) {
                Floats weight = all(scores[h * CHUNK + i]);
                even[h][w] = fma(weight, low, even[h][w]);
                odd[h][w] = fma(weight, high, odd[h][w]);
            }
        }
    for (int h = 0; h < H; h++)
        for (int w = 0; w < W; w++) {
            store(known + h * stride + w * 2 * LANES, even[h][w]);
            store(known + h * stride + w * 2 * LANES + LANES, odd[h][w]);
        }
}

// What is known of one chunk, of H query heads that share a KV head. next: what is read after it.
template <int H>
void attend_heads(const Op& op, const Place& place, const Place& next, const Coming& coming, const Query* query, float* scores,
                  float* known) {
    const Chunk& chunk = place.chunk;
    int size = op.head_dim;
    int64_t width = int64_t(op.kv_heads) * size, stride = size + 2;
    Floats scale = all(1.0f / sqrtf(float(size)));
    for (int64_t first = 0; first < chunk.count; first += LANES) {
        Floats sums[H][LANES];
        for (int i = 0; i < LANES; i++) {
            const bf16* key = place[first + i];
            if (coming.chunk) {
                int64_t step = place.column / size * CHUNK + first + i;
                ask(coming.chunk->entries[step / op.kv_heads] + step % op.kv_heads * 2 * size, 2 * size);
            }
            if (!coming.alone) {
                int64_t early = first + i + EARLY;
                const bf16* then = early < chunk.count ? place[early] : next[early - chunk.count];
                ask(then, size), ask(then + width, size);
            }
            Floats sum[H] = {};
            for (int j = 0; j < size; j += 2 * LANES) {
                Pairs keys = pairs_of(words_at(key + j));
                for (int h = 0; h < H; h++) sum[h] = add_keys(sum[h], query + h * size + j, keys);
            }
            for (int h = 0; h < H; h++) sums[h][i] = sum[h];
        }
        for (int h = 0; h < H; h++) store(scores + h * CHUNK + first, totals(sums[h]) * scale);
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

// What is known of a chunk, of all heads. next: the row's next chunk, or the same one.
void attend_chunk(const Op& op, const Chunk& chunk, const Chunk& next, const Coming& coming, const Query* query, float* scores,
                  float* known) {
    constexpr void (*widths[])(const Op&, const Place&, const Place&, const Coming&, const Query*, float*, float*) = {
        nullptr, attend_heads<1>, attend_heads<2>, attend_heads<3>, attend_heads<4>};
    int group = op.heads / op.kv_heads, size = op.head_dim;
    for (int kv_head = 0; kv_head < op.kv_heads; kv_head++) {
        bool last = kv_head + 1 == op.kv_heads;
        Place here = {chunk, int64_t(kv_head) * size}, there = {last ? next : chunk, last ? 0 : here.column + size};
        for (int begin = 0; begin < group; begin += BUNDLE) {
            int head = kv_head * group + begin;
            widths[std::min(BUNDLE, group - begin)](op, here, there, begin ? Coming{nullptr, coming.alone} : coming,
                                                    query + head * size, scores, known + head * (size + 2));
        }
    }
}

// Adds what is known of the next chunk to what is known of those before it.
void join(const Op& op, float* known, const float* next) {
    int size = op.head_dim;
    for (int head = 0; head < op.heads; head++, known += size + 2, next += size + 2) {
        float top = std::max(known[size], next[size]);
        Floats ours = exponential(all(known[size] - top)), theirs = exponential(all(next[size] - top));
        for (int i = 0; i < size; i += LANES) store(known + i, fma(load(known + i), ours, load(next + i) * theirs));
        known[size + 1] = fmaf(known[size + 1], ours[0], next[size + 1] * theirs[0]);
        known[size] = top;
    }
}

void end_row(const Op& op, int64_t row, const float* known) {
    int size = op.head_dim;
    bf16* out = (bf16*)op.out + row * op.out_stride;
    for (int head = 0; head < op.heads; head++, known += size + 2) {
        Floats factor = all(1.0f / known[size + 1]);
        for (int i = 0; i < size; i += 2 * LANES, out += 2 * LANES) {
            Words both = rounded(load(known + i) * factor) | rounded(load(known + i + LANES) * factor) << 16;
            memcpy(out, &both, sizeof both);
        }
    }
}

void attend_part(const Op& op, const Frame& frame, int64_t part, int64_t parts, std::vector<float>& scratch, Splits& splits) {
    int64_t row = part / parts, chunks = chunks_of(seen_by(frame, row)), size = known_size(op);
    int64_t begin = chunks * (part % parts) / parts, end = chunks * (part % parts + 1) / parts;
    int64_t width = op.heads * int64_t(op.head_dim), wanted = BUNDLE * CHUNK + width + 2 * size;
    if (int64_t(scratch.size()) < wanted) scratch.resize(wanted);
    float *scores = scratch.data(), *wide = scores + BUNDLE * CHUNK, *whole = wide + width;
    float* known = parts > 1 ? splits.known.data() + row * splits.chunks * size : nullptr;
    const Query* query = queries((const bf16*)op.in + row * op.in_stride, width, wide);
    for (int64_t which = begin; which < end; which++) {
        Chunk chunk(op, frame, row, which), next(op, frame, row, std::min(which + 1, end - 1));
        float* to = parts > 1 ? known + which * size : which ? whole + size : whole;
        Coming coming = {parts == 1 && chunks > LONG && which + 1 < end ? &next : nullptr,
                         parts == 1 && chunks > LONG && which > begin};
        attend_chunk(op, chunk, next, coming, query, scores, to);
        if (parts == 1 && which) join(op, whole, to);
    }
    if (parts == 1) return end_row(op, row, whole);
    if (splits.left[row].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    splits.left[row] = parts;
    for (int64_t which = 1; which < chunks; which++) join(op, known, known + which * size);
    end_row(op, row, known);
}

}  // namespace
