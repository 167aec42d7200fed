// Attention of up to sixteen rows of one sequence over one chunk by AMX tiles (`tiles.h`), over the entries that all
// of them see. Sums are float32. Rules: those of `attention.h`, and
//
// Rules:
// 1. Keys are transposed and values interleaved in pairs, as tiles need them, once for all rows of a block and all
//    heads that share them.
// 2. Softmax weights are bfloat16, and their sum is that of the rounded ones.
// 3. A row's sums do not depend on the rows beside it: an entry that it does not see has weight zero, and is a
//    finite number. Entries are summed in the order in which the row sees them, so values that only some nodes of a
//    tree see are packed for each row; keys, and values that all rows see, are packed once for all.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>

#include "chunk.h"
#include "op.h"
#include "tiles.h"
#include "vectors.h"

namespace {

static_assert(BLOCK_ROWS == TILE_ROWS);
constexpr int TILE_BYTES = 64 * TILE_ROWS;

// TILE_DEPTH columns of TILE_ROWS keys as a tile of weights: each line has one pair of columns, a word for each key.
inline void transpose_keys(const bf16* const* keys, int64_t column, uint8_t* tile) {
    __m512i r[16], t[16], u[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(keys[i] + column);
    for (int i = 0; i < 16; i += 2)
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    for (int i = 0; i < 16; i += 4) {  // u[i + c]: column c of each four, of four keys
        u[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]), u[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        u[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]), u[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int c = 0; c < 4; c++) {
        __m512i even = _mm512_shuffle_i32x4(u[c], u[4 + c], 0x88), odd = _mm512_shuffle_i32x4(u[c], u[4 + c], 0xdd);
        __m512i more = _mm512_shuffle_i32x4(u[8 + c], u[12 + c], 0x88), rest = _mm512_shuffle_i32x4(u[8 + c], u[12 + c], 0xdd);
        _mm512_storeu_si512(tile + 64 * c, _mm512_shuffle_i32x4(even, more, 0x88));
        _mm512_storeu_si512(tile + 64 * (4 + c), _mm512_shuffle_i32x4(odd, rest, 0x88));
        _mm512_storeu_si512(tile + 64 * (8 + c), _mm512_shuffle_i32x4(even, more, 0xdd));
        _mm512_storeu_si512(tile + 64 * (12 + c), _mm512_shuffle_i32x4(odd, rest, 0xdd));
    }
}

// TILE_DEPTH columns of the values of two entries, interleaved.
inline void interleave_values(const bf16* one, const bf16* other, uint8_t* first, uint8_t* second) {
    Words low, high;
    interleave(load_words(one), load_words(other), low, high);
    memcpy(first, &low, sizeof low), memcpy(second, &high, sizeof high);
}

// Write TILE_DEPTH columns of a row's result; factor: 1 / the sum of weights.
inline void write_columns(const float* partial, Floats factor, bf16* out) {
    store_interleaved(out, load(partial) * factor, load(partial + LANES) * factor);
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

// Queries that are the rows of a tile: rows of one head, or heads of one row.
struct Queries {
    const bf16* first;
    int64_t count, stride;  // elements from one to the next
    float* partial;         // partial result of the first, `row_stride` floats from one to the next
    int64_t row_stride;
    const int64_t* seen;  // how many entries of the chunk each sees; `step` from one to the next
    int64_t step;
};

// Computes the partial results of a block's rows, chunk by chunk.
class ChunkAttention {
    const Op& op;
    const Frame& frame;
    const ChunkRange range;
    const int64_t size, deep;  // of a head; and size / TILE_DEPTH
    uint8_t *keys, *values;    // tiles [SPAN / TILE_ROWS, deep] and [CHUNK / TILE_DEPTH, deep, 2]
    float* scores;             // [TILE_ROWS, SPAN]
    bf16* weights;             // [TILE_ROWS, CHUNK]; for trees such for each head of a group, at most TILE_ROWS
    Tiles tiles;

    // Pack the keys of TILE_ROWS entries; column: where the KV head's keys begin.
    void pack_keys(const bf16* const* entries, int64_t first, int64_t column) {
        for (int64_t d = 0; d < deep; d++)
            transpose_keys(entries + first, column + d * TILE_DEPTH, keys + (first / TILE_ROWS * deep + d) * TILE_BYTES);
    }

    // Pack the values of two entries; column: where the KV head's values begin.
    void pack_values(const bf16* const* entries, int64_t i, int64_t column, uint8_t* values) {
        for (int64_t d = 0; d < deep; d++) {
            uint8_t* tile = values + ((i / TILE_DEPTH * deep + d) * 2) * TILE_BYTES + i % TILE_DEPTH / 2 * 64;
            interleave_values(entries[i] + column + d * TILE_DEPTH, entries[i + 1] + column + d * TILE_DEPTH, tile, tile
                    + TILE_BYTES);
        }
    }

    // Pack the keys and values of one KV head of a chunk; meanwhile its share of the next chunk is prefetched.
    void pack_chunk(const Chunk& chunk, int kv_head, const Chunk* next, bool is_prefetched) {
        const int64_t column = kv_head * size, width = op.kv_heads * size,
                count = (chunk.count + TILE_DEPTH - 1) / TILE_DEPTH * TILE_DEPTH;
        NextChunkPrefetch next_prefetch(op, next, kv_head);
        for (int64_t first = 0; first < count; first += TILE_ROWS) {
            for (int64_t i = first; i < first + TILE_ROWS; i++) {
                next_prefetch.prefetch_some(op);
                if (!is_prefetched && !kv_head && i + PREFETCH_ENTRIES < chunk.count) prefetch(chunk.entries[i
                        + PREFETCH_ENTRIES], 2 * width);
            }
            pack_keys(chunk.entries, first, column);
            for (int64_t i = first; i < first + TILE_ROWS; i += 2) pack_values(chunk.entries, i, width + column, values);
        }
        flush_writes();
    }

    // Scores: products of queries and keys, four tiles of keys at a time.
    void score_keys(const Queries& q, int64_t count) {
        for (int64_t first = 0; first < count; first += 4 * TILE_ROWS) {
            const uint8_t* tile = keys + first / TILE_ROWS * deep * TILE_BYTES;
            const int64_t beside = deep * TILE_BYTES;
            const bool more = first + 2 * TILE_ROWS < count;  // more than two of the four
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t d = 0; d < deep; d++, tile += TILE_BYTES) {
                _tile_loadd(4, q.first + d * TILE_DEPTH, 2 * q.stride);
                _tile_loadd(6, tile, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, tile + beside, 64);
                _tile_dpbf16ps(1, 4, 7);
                if (!more) continue;
                _tile_loadd(6, tile + 2 * beside, 64);
                _tile_dpbf16ps(2, 4, 6);
                _tile_loadd(7, tile + 3 * beside, 64);
                _tile_dpbf16ps(3, 4, 7);
            }
            _tile_stored(0, scores + first, 4 * SPAN);
            _tile_stored(1, scores + first + TILE_ROWS, 4 * SPAN);
            if (!more) continue;
            _tile_stored(2, scores + first + 2 * TILE_ROWS, 4 * SPAN);
            _tile_stored(3, scores + first + 3 * TILE_ROWS, 4 * SPAN);
        }
    }

    // Softmax: scores become weights, zero for entries that a row does not see.
    void softmax_rows(const Queries& q, int64_t count, bf16* weights) {
        const Floats scale = splat(1.0f / sqrtf(float(size)));
        for (int64_t c = 0; c < q.count; c++, weights += CHUNK) {
            float *row = scores + c * SPAN, *head = q.partial + c * q.row_stride;
            const int64_t seen = q.seen[c * q.step];
            for (int64_t i = 0; i < seen; i += LANES) store(row + i, load(row + i) * scale);
            head[size + 1] = softmax_weights(row, seen, head[size], [&](int64_t i, Floats weight) {
                store_bf16(weights + i, weight);
                return load_bf16(weights + i);
            });
            for (int64_t i = (seen + LANES - 1) / LANES * LANES; i < count; i += LANES) memset(weights + i, 0, 2 * LANES);
        }
        flush_writes();
    }

    // Weighted sums of the values of `count` entries, for TILE_DEPTH columns (TWO: twice as many) from d * TILE_DEPTH on.
    // accumulate: they are added to `partial`. weights: of the first row at the first entry, `row_stride` from row to row;
    // packed: values from that entry on.
    template <bool TWO>
    void add_weighted_values(float* partial, int64_t partial_stride, const bf16* weights, int64_t row_stride,
                             const uint8_t* packed, int64_t count, bool accumulate, int64_t d) {
        float* to = partial + d * TILE_DEPTH;
        const int64_t line = 4 * partial_stride;
        if (accumulate) {
            _tile_loadd(0, to, line);
            _tile_loadd(1, to + TILE_ROWS, line);
            if (TWO) {
                _tile_loadd(2, to + 2 * TILE_ROWS, line);
                _tile_loadd(3, to + 3 * TILE_ROWS, line);
            }
        } else {
            _tile_zero(0);
            _tile_zero(1);
            if (TWO) {
                _tile_zero(2);
                _tile_zero(3);
            }
        }
        for (int64_t first = 0; first < count; first += TILE_DEPTH) {
            const uint8_t* tile = packed + (first / TILE_DEPTH * deep + d) * 2 * TILE_BYTES;
            _tile_loadd(4, weights + first, 2 * row_stride);
            _tile_loadd(6, tile, 64);
            _tile_loadd(7, tile + TILE_BYTES, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (TWO) {
                _tile_loadd(6, tile + 2 * TILE_BYTES, 64);
                _tile_loadd(7, tile + 3 * TILE_BYTES, 64);
                _tile_dpbf16ps(2, 4, 6);
                _tile_dpbf16ps(3, 4, 7);
            }
        }
        _tile_stored(0, to, line);
        _tile_stored(1, to + TILE_ROWS, line);
        if (TWO) {
            _tile_stored(2, to + 2 * TILE_ROWS, line);
            _tile_stored(3, to + 3 * TILE_ROWS, line);
        }
    }

    // The same for all columns.
    void weighted_values(float* partial, int64_t partial_stride, const bf16* weights, int64_t row_stride, const uint8_t* packed,
                         int64_t count, bool accumulate) {
        int64_t d = 0;
        for (; d + 2 <= deep; d += 2)
            add_weighted_values<true>(partial, partial_stride, weights, row_stride, packed, count, accumulate, d);
        if (d < deep) add_weighted_values<false>(partial, partial_stride, weights, row_stride, packed, count, accumulate, d);
    }

    void attend_queries(const Queries& q, int64_t count) {
        tiles.configure(q.count, q.count);
        score_keys(q, count);
        softmax_rows(q, count, weights);
        weighted_values(q.partial, q.row_stride, weights, CHUNK, values, count, false);
    }

    // The partial results of rows of a tree, which are at least as many as heads that share a KV head.
    void attend_nodes(int64_t row, int64_t rows, int64_t chunk_index, float* partial, int64_t row_stride) {
        const SeenEntries nodes(op, frame, row, rows, chunk_index, TILE_DEPTH);
        const int64_t group = op.heads / op.kv_heads, entry = size + 2, width = op.kv_heads * size;
        const int64_t common = nodes.shared / TILE_DEPTH * TILE_DEPTH, block = TILE_ROWS * CHUNK;
        const bf16* in = (const bf16*)op.in + row * op.in_stride;
        uint8_t* own = values + common / TILE_DEPTH * deep * 2 * TILE_BYTES;  // behind the values that all see
        for (int kv_head = 0; kv_head < op.kv_heads; kv_head++) {
            const int64_t column = kv_head * size;
            for (int64_t i = 0; i < nodes.count; i += TILE_ROWS) pack_keys(nodes.entries, i, column);
            for (int64_t i = 0; i < common; i += 2) pack_values(nodes.entries, i, width + column, values);
            flush_writes();
            for (int64_t first = 0; first < group; first += TILE_ROWS) {
                const int64_t heads = std::min<int64_t>(TILE_ROWS, group - first), begin = kv_head * group + first;
                tiles.configure(rows, rows);
                for (int64_t h = 0; h < heads; h++) {
                    const Queries q = {in + (begin + h) * size, rows, op.in_stride, partial + (begin + h) * entry, row_stride,
                            nodes.seen, 1};
                    score_keys(q, nodes.count);
                    for (int64_t r = 0; r < rows; r++) nodes.gather_own_scores(r, scores + r * SPAN);
                    softmax_rows(q, std::min<int64_t>(nodes.count, CHUNK), weights + h * block);
                    weighted_values(q.partial, row_stride, weights + h * block, CHUNK, values, common, false);
                }
                tiles.configure(heads, heads);
                for (int64_t r = 0; r < rows; r++) {
                    const int64_t count = pack_own_values(nodes, r, common, width + column, own);
                    weighted_values(partial + r * row_stride + begin * entry, entry, weights + r * CHUNK + common, block, own,
                                    count, true);
                }
            }
        }
    }

    // Packs the values that a row sees from entry `common` on. Returns their number with padding.
    int64_t pack_own_values(const SeenEntries& nodes, int64_t r, int64_t common, int64_t column, uint8_t* own) {
        const bf16* entries[CHUNK + NODES];
        int64_t count = 0;
        for (int64_t i = common; i < nodes.seen[r]; i++)
            entries[count++] = nodes.at(r, i);
        for (; count % TILE_DEPTH; count++) entries[count] = entries[count - 1];
        for (int64_t i = 0; i < count; i += 2) pack_values(entries, i, column, own);
        flush_writes();
        return count;
    }

  public:
    // How many rows a block may have.
    static int64_t most_rows(int64_t, int) { return BLOCK_ROWS; }

    // Floats of scratch memory that it needs.
    static int64_t floats(const Op& op) {
        const int64_t heads = std::min(TILE_ROWS, op.heads / op.kv_heads);
        return (SPAN + CHUNK) / 2 * op.head_dim + TILE_ROWS * SPAN + heads * TILE_ROWS * CHUNK / 2 + LANES;
    }

    ChunkAttention(const Op& op, const Frame& frame, ChunkRange range, float* scratch)
        : op(op), frame(frame), range(range), size(op.head_dim), deep(op.head_dim / TILE_DEPTH) {
        keys = (uint8_t*)((uintptr_t(scratch) + 63) / 64 * 64), values = keys + 2 * SPAN * size;
        scores = (float*)(values + 2 * CHUNK * size);
        weights = (bf16*)(scores + TILE_ROWS * SPAN);
    }

    // The partial results of rows from `row` on for a chunk. partial: of the first; row_stride: floats from row to row.
    void attend(int64_t row, int64_t count, int64_t chunk_index, float* partial, int64_t row_stride) {
        const int64_t group = op.heads / op.kv_heads;
        if (count > 1 && !sees_whole_chunk(frame, row, chunk_index)) {
            if (count >= group) return attend_nodes(row, count, chunk_index, partial, row_stride);
            for (int64_t r = 0; r < count; r++) attend(row + r, 1, chunk_index, partial + r * row_stride, row_stride);
            return;
        }
        int64_t seen[TILE_ROWS], longest = row;
        for (int64_t r = row; r < row + count; r++) {
            seen[r - row] = std::min<int64_t>(CHUNK, num_visible(frame, r) - chunk_index * CHUNK);
            if (num_visible(frame, r) > num_visible(frame, longest)) longest = r;
        }
        const bool has_next = chunk_index + 1 < std::min(range.end, chunks_of(num_visible(frame, longest)));
        const Chunk chunk(op, frame, longest, chunk_index);
        std::optional<Chunk> next;
        if (has_next) next.emplace(op, frame, longest, chunk_index + 1);
        const int64_t padded = (chunk.count + TILE_DEPTH - 1) / TILE_DEPTH * TILE_DEPTH;
        const bf16* in = (const bf16*)op.in + row * op.in_stride;
        for (int kv_head = 0; kv_head < op.kv_heads; kv_head++) {
            pack_chunk(chunk, kv_head, next ? &*next : nullptr, chunk_index > range.begin);
            const int64_t begin = kv_head * group, entry = size + 2;
            if (count >= group)
                for (int64_t head = begin; head < begin + group; head++)
                    attend_queries({in + head * size, count, op.in_stride, partial + head * entry, row_stride, seen, 1}, padded);
            else
                for (int64_t r = 0; r < count; r++)
                    for (int64_t head = begin; head < begin + group; head += TILE_ROWS)
                        attend_queries({in + r * op.in_stride + head * size,
                                std::min<int64_t>(TILE_ROWS, begin + group - head), size,
                                partial + r * row_stride + head * entry, entry, seen + r, 0}, padded);
        }
    }
};

}  // namespace
