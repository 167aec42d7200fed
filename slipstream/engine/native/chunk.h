// The KV entries that a row sees, CHUNK at a time, and the softmax weights of a chunk. Chunks are counted from the
// first entry that the row sees, so a row has the same chunks whatever rows are beside it.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "op.h"
#include "vectors.h"

namespace {

constexpr int CHUNK = 128;  // KV entries of a chunk, at most
constexpr int PREFETCH_ENTRIES = 32;  // how many KV entries ahead are prefetched

int64_t num_visible(const Frame& frame, int64_t row) { return frame.prefix_len[row] + __builtin_popcountll(frame.words[row]); }

// How many of the first `count` entries lie before the sliding window of a row that also sees those of `word`.
int64_t skipped_by_window(int64_t window, int64_t count, uint64_t word) {
    return window ? std::clamp<int64_t>(count + __builtin_popcountll(word) - window, 0, count) : 0;
}

int64_t chunks_of(int64_t count) { return (count + CHUNK - 1) / CHUNK; }

struct Chunk {  // some of the entries that a row sees
    const bf16* entries[CHUNK + LANES];  // padded with the last one
    int64_t count;

    Chunk(const Op& op, const Frame& frame, int64_t row, int64_t chunk_index) {
        int64_t first = chunk_index * CHUNK, shared = frame.prefix_len[row], stride = 2 * int64_t(op.kv_heads) * op.head_dim;
        const bf16* kv = frame.kv + op.layer * frame.layer_stride;
        const int64_t *slots = frame.kv_slots + frame.prefix_begin[row], *tree = frame.kv_slots + frame.tree_begin[row];
        count = std::min<int64_t>(CHUNK, num_visible(frame, row) - first);
        int64_t i = 0;
        for (; i < count && first + i < shared; i++) entries[i] = kv + slots[first + i] * stride;
        int64_t place = shared - first;
        for (uint64_t word = i < count ? frame.words[row] : 0; word; word &= word - 1, place++)
            if (place >= 0 && place < count) entries[place] = kv + tree[__builtin_ctzll(word)] * stride;
        for (i = count; i < CHUNK + LANES; i++) entries[i] = entries[count - 1];
    }
};

// The chunks of some rows that one thread computes, from `begin` to `end`; is_all: there are no others.
struct ChunkRange {
    int64_t begin, end;
    bool is_all;
};

void prefetch(const bf16* columns, int size) {
    for (int line = 0; line < size; line += 32) __builtin_prefetch(columns + line, 0, 1);
}

// Prefetches the next chunk, whole entries in the order of memory: each KV head prefetches its share, a part of an entry with
// each entry that it reads.
class NextChunkPrefetch {
    const Chunk* chunk;  // null: nothing to prefetch
    int64_t entry = 0, part = 0;

  public:
    NextChunkPrefetch(const Op& op, const Chunk* chunk, int64_t kv_head) : chunk(chunk) {
        if (chunk) entry = kv_head * CHUNK / op.kv_heads, part = kv_head * CHUNK % op.kv_heads;
    }
    void prefetch_some(const Op& op) {
        if (!chunk) return;
        prefetch(chunk->entries[entry] + part * 2 * op.head_dim, 2 * op.head_dim);
        if (++part == op.kv_heads) part = 0, entry++;
    }
};

// Replaces scores by e^(score - top), where top is the greatest; returns their sum.
float softmax_weights(float* scores, int64_t count, float& top) {
    Floats most = splat(-INFINITY), sum = {};
    int64_t padded = (count + LANES - 1) / LANES * LANES;
    for (int64_t i = count; i < padded; i++) scores[i] = -INFINITY;
    for (int64_t i = 0; i < padded; i += LANES) most = maximum(load(scores + i), most);
    top = reduce_max(most);
    for (int64_t i = 0; i < padded; i += LANES) {
        Floats v = exponential(load(scores + i) - splat(top));
        store(scores + i, v);
        sum += v;
    }
    return reduce_add(sum);
}

}  // namespace
