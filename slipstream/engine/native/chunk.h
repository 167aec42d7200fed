// The KV entries that a row sees, a chunk of them at a time, and what weighs them.
//
// Rule: chunks are counted from the first entry that a row sees.
//
// It knows nothing about queries.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "list.h"
#include "vectors.h"

namespace {

constexpr int CHUNK = 128;  // KV entries that are weighed together, at most
constexpr int EARLY = 32;   // KV entries that are asked for in advance

int64_t seen_by(const Frame& frame, int64_t row) { return frame.shared[row] + __builtin_popcountll(frame.words[row]); }
// How many of the first `count` entries lie before the window of a row that sees more by its word.
int64_t skipped(int64_t window, int64_t count, uint64_t word) {
    return window ? std::clamp<int64_t>(count + __builtin_popcountll(word) - window, 0, count) : 0;
}

int64_t chunks_of(int64_t count) { return (count + CHUNK - 1) / CHUNK; }

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

// What one thread reads of some rows: chunks from `begin` to `end`; all: there are no others.
struct Reading {
    int64_t begin, end;
    bool all;
};

void ask(const bf16* columns, int size) {
    for (int line = 0; line < size; line += 32) __builtin_prefetch(columns + line, 0, 1);
}

// Of the chunk that is read next, entries whole, as memory has them: each KV head asks for its share, a part with each of its
// own entries.
class Coming {
    const Chunk* chunk;  // null: there is none
    int64_t entry = 0, part = 0;

  public:
    Coming(const Op& op, const Chunk* chunk, int64_t kv_head) : chunk(chunk) {
        if (chunk) entry = kv_head * CHUNK / op.kv_heads, part = kv_head * CHUNK % op.kv_heads;
    }
    void ask_on(const Op& op) {
        if (!chunk) return;
        ask(chunk->entries[entry] + part * 2 * op.head_dim, 2 * op.head_dim);
        if (++part == op.kv_heads) part = 0, entry++;
    }
};

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

}  // namespace
