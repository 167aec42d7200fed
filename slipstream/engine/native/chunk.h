// The KV entries that a row sees, CHUNK at a time, and the softmax weights of a chunk. Chunks are counted from the
// first entry that the row sees, so a row has the same chunks whatever rows are beside it.

#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "op.h"
#include "vectors.h"

namespace {

constexpr int CHUNK = 128;  // KV entries of a chunk, at most
constexpr int BLOCK_ROWS = 16;  // rows that are computed together, at most
constexpr int NODES = 64;       // of a tree, at most
constexpr int SPAN = CHUNK + NODES;  // entries of a chunk that any row of a block sees, at most
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

// Whether a row's tree mask plays no part in a chunk.
bool sees_whole_chunk(const Frame& frame, int64_t row, int64_t chunk_index) {
    return !frame.words[row] || frame.prefix_len[row] >= (chunk_index + 1) * CHUNK;
}

// Whether two rows of a block read a chunk together: neither sees it through its tree mask, or they are nodes of one tree.
bool can_batch(const Frame& frame, int64_t row, int64_t other, int64_t chunk_index) {
    if (sees_whole_chunk(frame, row, chunk_index)) return sees_whole_chunk(frame, other, chunk_index);
    return frame.words[other] && frame.tree_begin[row] == frame.tree_begin[other]
            && frame.prefix_len[row] == frame.prefix_len[other];
}

// What some rows see of a chunk: rows that `can_batch`.
struct SeenEntries {
    const bf16* entries[SPAN + LANES];  // those that rows share, then nodes of a tree that any row sees, then padding
    int64_t shared, count;              // number of those that rows share; and of all with padding
    int64_t seen[BLOCK_ROWS];           // how many each row sees: of the shared ones the first, or all and some nodes
    uint8_t own[BLOCK_ROWS][NODES];     // by row: the nodes it sees after the shared entries

    // padding: `count` becomes a multiple of it.
    SeenEntries(const Op& op, const Frame& frame, int64_t row, int64_t rows, int64_t chunk_index, int64_t padding) {
        const int64_t stride = 2 * int64_t(op.kv_heads) * op.head_dim, before = frame.prefix_len[row] - chunk_index * CHUNK;
        const bf16* kv = frame.kv + op.layer * frame.layer_stride;
        const int64_t *slots = frame.kv_slots + frame.prefix_begin[row] + chunk_index * CHUNK;
        const bool whole = sees_whole_chunk(frame, row, chunk_index);
        shared = std::max<int64_t>(before, 0);
        for (int64_t r = 0; whole && r < rows; r++) {
            seen[r] = std::min<int64_t>(CHUNK, frame.prefix_len[row + r] - chunk_index * CHUNK);
            shared = r ? std::max(shared, seen[r]) : seen[r];
        }
        for (count = 0; count < shared; count++) entries[count] = kv + slots[count] * stride;
        if (!whole) add_nodes(frame, row, rows, before, kv, stride);
        for (; count % padding; count++) entries[count] = entries[count - 1];
    }

    // The entry at a place of what row `r` sees.
    const bf16* at(int64_t r, int64_t place) const { return entries[place < shared ? place : shared + own[r][place - shared]]; }

    // Moves the scores of the nodes that a row sees behind the shared ones, in the row's order.
    void gather_own_scores(int64_t r, float* scores) const {
        float *row = scores + shared, found[NODES];
        const int64_t own_count = seen[r] - shared;
        for (int64_t i = 0; i < own_count; i++) found[i] = row[own[r][i]];
        for (int64_t i = 0; i < own_count; i++) row[i] = found[i];
    }

  private:
    // before: how many entries of the chunk lie before the nodes; below 0: how many nodes lie before the chunk.
    void add_nodes(const Frame& frame, int64_t row, int64_t rows, int64_t before, const bf16* kv, int64_t stride) {
        const int64_t* tree = frame.kv_slots + frame.tree_begin[row];
        uint64_t any = 0;
        uint8_t node_index[NODES];
        for (int64_t r = row; r < row + rows; r++) any |= frame.words[r];
        for (uint64_t word = any; word; word &= word - 1) {
            const int node = std::countr_zero(word);
            node_index[node] = uint8_t(count - shared), entries[count++] = kv + tree[node] * stride;
        }
        for (int64_t r = 0; r < rows; r++) {
            int64_t place = before;
            for (uint64_t word = frame.words[row + r]; word && place < CHUNK; word &= word - 1, place++)
                if (place >= 0) own[r][place - shared] = node_index[std::countr_zero(word)];
            seen[r] = place;
        }
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

// Gives `keep` the weights e^(score - top), a vector of them at a time; top: the greatest. Returns the sum of what it returns.
template <class Keep>
float softmax_weights(float* scores, int64_t count, float& top, Keep keep) {
    Floats most = splat(-INFINITY), sum = {};
    int64_t padded = (count + LANES - 1) / LANES * LANES;
    for (int64_t i = count; i < padded; i++) scores[i] = -INFINITY;
    for (int64_t i = 0; i < padded; i += LANES) most = maximum(load(scores + i), most);
    top = reduce_max(most);
    for (int64_t i = 0; i < padded; i += LANES) sum += keep(i, exponential(load(scores + i) - splat(top)));
    return reduce_add(sum);
}

}  // namespace
