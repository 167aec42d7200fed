// Attention of rows over the paged KV entries that they see, chunk by chunk, as in FlashDecoding: each chunk gives a
// partial result (weighted sums of values, greatest score, sum of weights), and partial results are merged.
//
// Rules:
// 1. Softmax and weighted sum are computed for each chunk by itself; the partial results of a row's chunks are
//    merged in their order, in float32. So a row's bits do not depend on which thread computes which chunk, nor on
//    the rows beside it.
// 2. Rows that read the same entries form a block, if the processor computes several rows together
//    (`ChunkAttention`).
// 3. If there are few blocks, several threads compute one, each some of its chunks (split KV), and the last to
//    finish merges them; unless the partial results would take too much memory.
// 4. Keys and values are read from memory once: a chunk stays in a near cache, while the next one is prefetched.

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "chunk.h"
#include "op.h"
#if defined(__AMX_BF16__)
#include "tile_attention.h"
#else
#include "vector_attention.h"
#endif
#include "vectors.h"

namespace {

constexpr int64_t MAX_PARTIAL_FLOATS = 16 << 20;  // floats of partial results not merged yet, for each thread

// The size of a row's partial result over some chunks, in floats. It has for each head: `head_dim` weighted sums of values (in
// the `ChunkAttention`'s order), the greatest score, and the sum of weights.
int64_t partial_floats(const Op& op) { return op.heads * (int64_t(op.head_dim) + 2); }

struct RowBlock {  // rows whose first visible entry is the same
    int64_t row, count, chunks;  // row: the first; chunks: of the row that sees most
};

struct Splits {  // how the rows of a forward are divided into blocks and parts, the same in each layer
    std::vector<RowBlock> blocks;
    int64_t parts = 1;  // of each block
    std::vector<float> partials;  // [rows, chunks], `partial_floats` each; only where there are several parts
    std::unique_ptr<std::atomic<int64_t>[]> parts_left;  // [blocks] parts that have not finished
    int64_t chunks = 0, capacity = 0;

    void plan(const Op* ops, int64_t count, const Frame& frame, int threads) {
        int64_t size = 0;
        for (int64_t i = 0; i < count; i++)
            if (ops[i].kind == ATTEND) size = std::max(size, partial_floats(ops[i]));
        if (!size) return;
        blocks.clear(), chunks = 0;
        const int64_t most = ChunkAttention::most_rows(frame.rows, threads);
        for (int64_t row = 0; row < frame.rows; row++) {
            RowBlock* last = blocks.empty() ? nullptr : &blocks.back();
            if (!last || last->count == most || frame.prefix_begin[row] != frame.prefix_begin[last->row])
                last = &blocks.emplace_back(RowBlock{row, 0, 0});
            last->count++, last->chunks = std::max(last->chunks, chunks_of(num_visible(frame, row)));
            chunks = std::max(chunks, last->chunks);
        }
        const int64_t some = int64_t(blocks.size());
        parts = threads == 1 ? 1 : std::clamp<int64_t>(4 * threads / std::max<int64_t>(some, 1), 1, std::max<int64_t>(chunks, 1));
        const int64_t wanted = frame.rows * chunks * size;
        if (wanted > MAX_PARTIAL_FLOATS * threads) parts = 1;
        if (parts == 1) return;
        if (int64_t(partials.size()) < wanted) partials.resize(wanted / 4 * 5);
        if (capacity < some) capacity = some, parts_left = std::make_unique<std::atomic<int64_t>[]>(capacity);
        for (int64_t block = 0; block < some; block++) parts_left[block] = parts;
    }
};

// Merges the partial result of the next chunk into that of the chunks before it.
void merge_partials(const Op& op, float* partial, const float* next) {
    int size = op.head_dim;
    for (int head = 0; head < op.heads; head++, partial += size + 2, next += size + 2) {
        float top = std::max(partial[size], next[size]);
        Floats ours = exponential(splat(partial[size] - top)), theirs = exponential(splat(next[size] - top));
        for (int i = 0; i < size; i += LANES) store(partial + i, fma(load(partial + i), ours, load(next + i) * theirs));
        partial[size + 1] = fmaf(partial[size + 1], ours[0], next[size + 1] * theirs[0]);
        partial[size] = top;
    }
}

void write_row(const Op& op, int64_t row, const float* partial) {
    int size = op.head_dim;
    bf16* out = (bf16*)op.out + row * op.out_stride;
    for (int head = 0; head < op.heads; head++, partial += size + 2) {
        Floats factor = splat(1.0f / partial[size + 1]);
        for (int i = 0; i < size; i += 2 * LANES, out += 2 * LANES) write_columns(partial + i, factor, out);
    }
}

// Computes the partial results of a block's rows for one chunk. partial: that of the first row; row_stride: floats from row
// to row.
void attend_block(const Frame& frame, const RowBlock& block, ChunkAttention& attention, int64_t chunk_index, float* partial,
        int64_t row_stride) {
    const int64_t end = block.row + block.count;
    auto sees = [&](int64_t row) { return chunk_index < chunks_of(num_visible(frame, row)); };
    for (int64_t row = block.row, next; row < end; row = next) {
        next = row + 1;
        if (!sees(row)) continue;
        while (next < end && sees(next) && can_batch(frame, row, next, chunk_index)) next++;
        attention.attend(row, next - row, chunk_index, partial + (row - block.row) * row_stride, row_stride);
    }
}

void attend_part(const Op& op, const Frame& frame, int64_t part, std::vector<float>& scratch, Splits& splits) {
    const int64_t parts = splits.parts, block_index = part / parts, size = partial_floats(op);
    const RowBlock& block = splits.blocks[block_index];
    const ChunkRange range = {block.chunks * (part % parts) / parts, block.chunks * (part % parts + 1) / parts, parts == 1};
    const int64_t wanted = ChunkAttention::floats(op) + 2 * block.count * size;
    if (int64_t(scratch.size()) < wanted) scratch.resize(wanted);
    float *total = scratch.data() + ChunkAttention::floats(op), *next = total + block.count * size;
    float* partial = range.is_all ? nullptr : splits.partials.data() + block.row * splits.chunks * size;
    ChunkAttention attention(op, frame, range, scratch.data());
    auto chunks = [&](int64_t r) { return chunks_of(num_visible(frame, block.row + r)); };
    for (int64_t chunk_index = range.begin; chunk_index < range.end; chunk_index++) {
        if (!range.is_all) {
            attend_block(frame, block, attention, chunk_index, partial + chunk_index * size, splits.chunks * size);
            continue;
        }
        attend_block(frame, block, attention, chunk_index, chunk_index ? next : total, size);
        for (int64_t r = 0; chunk_index && r < block.count; r++)
            if (chunk_index < chunks(r)) merge_partials(op, total + r * size, next + r * size);
    }
    if (!range.is_all) {
        if (splits.parts_left[block_index].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
        splits.parts_left[block_index] = parts;
    }
    for (int64_t r = 0; r < block.count; r++) {
        float* row = range.is_all ? total + r * size : partial + r * splits.chunks * size;
        for (int64_t chunk_index = 1; !range.is_all && chunk_index < chunks(r); chunk_index++) merge_partials(op, row, row
                + chunk_index * size);
        write_row(op, block.row + r, row);
    }
}

}  // namespace
