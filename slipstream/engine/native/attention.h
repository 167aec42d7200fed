// Attention of rows over the KV entries that they see, chunk by chunk.
//
// Rules:
// 1. Softmax and weighted sum are computed for each chunk by itself; the partial results of a row's chunks are joined in their
//    order. So its bits do not depend on which thread computes which chunk.
// 2. Rows that read the same entries form a block, if the processor computes several rows together (`Weigher`).
// 3. If there are few blocks, several threads compute one, each some of its chunks, and the last to finish joins them; unless
//    the partial results would take too much memory.
// 4. Keys and values are read from memory once: a chunk stays in a near cache, while the next one is prefetched.
//
// It knows nothing about threads.

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "chunk.h"
#include "list.h"
#if defined(__AMX_BF16__)
#include "tile_attention.h"
#else
#include "vector_attention.h"
#endif
#include "vectors.h"

namespace {

constexpr int64_t MOST_KNOWN = 16 << 20;  // floats of partial results that are not joined yet, for each thread

// The size of a row's partial result over some chunks, in floats. It has for each head: `head_dim` weighted sums of values (in
// the `Weigher`'s order), the greatest score, and the sum of weights.
int64_t known_size(const Op& op) { return op.heads * (int64_t(op.head_dim) + 2); }

struct Block {  // rows that see entries from the same one on
    int64_t row, count, chunks;  // chunks: of the row that sees most
};

struct Splits {  // of a forward's rows, for each of its layers
    std::vector<Block> blocks;
    int64_t parts = 1;  // of each block
    std::vector<float> known;  // [rows, chunks], as `known_size` has it, where there are several parts
    std::unique_ptr<std::atomic<int64_t>[]> left;  // [blocks] parts that have not ended
    int64_t chunks = 0, room = 0;

    void hold(const Op* ops, int64_t count, const Frame& frame, int threads) {
        int64_t size = 0;
        for (int64_t i = 0; i < count; i++)
            if (ops[i].kind == ATTEND) size = std::max(size, known_size(ops[i]));
        if (!size) return;
        blocks.clear(), chunks = 0;
        for (int64_t row = 0; row < frame.rows; row++) {
            Block* last = blocks.empty() ? nullptr : &blocks.back();
            if (!last || last->count == BLOCK_ROWS || frame.begin[row] != frame.begin[last->row])
                last = &blocks.emplace_back(Block{row, 0, 0});
            last->count++, last->chunks = std::max(last->chunks, chunks_of(seen_by(frame, row)));
            chunks = std::max(chunks, last->chunks);
        }
        const int64_t some = int64_t(blocks.size());
        parts = threads == 1 ? 1 : std::clamp<int64_t>(4 * threads / std::max<int64_t>(some, 1), 1, std::max<int64_t>(chunks, 1));
        const int64_t wanted = frame.rows * chunks * size;
        if (wanted > MOST_KNOWN * threads) parts = 1;
        if (parts == 1) return;
        if (int64_t(known.size()) < wanted) known.resize(wanted / 4 * 5);
        if (room < some) room = some, left = std::make_unique<std::atomic<int64_t>[]>(room);
        for (int64_t block = 0; block < some; block++) left[block] = parts;
    }
};

// Joins the partial result of the next chunk to that of the chunks before it.
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
        for (int i = 0; i < size; i += 2 * LANES, out += 2 * LANES) Weigher::end(known + i, factor, out);
    }
}

// Computes the partial results of a block's rows for one chunk. known: that of the first row; the next is `apart` floats later.
void read_chunk(const Frame& frame, const Block& block, Weigher& weigher, int64_t which, float* known, int64_t apart) {
    const int64_t end = block.row + block.count;
    auto sees = [&](int64_t row) { return which < chunks_of(seen_by(frame, row)); };
    for (int64_t row = block.row, next; row < end; row = next) {
        next = row + 1;
        if (!sees(row)) continue;
        while (next < end && sees(next) && weigher.together(row, next, which)) next++;
        weigher.read(row, next - row, which, known + (row - block.row) * apart, apart);
    }
}

void attend_part(const Op& op, const Frame& frame, int64_t part, std::vector<float>& scratch, Splits& splits) {
    const int64_t parts = splits.parts, own = part / parts, size = known_size(op);
    const Block& block = splits.blocks[own];
    const Reading reading = {block.chunks * (part % parts) / parts, block.chunks * (part % parts + 1) / parts, parts == 1};
    const int64_t wanted = Weigher::floats(op) + 2 * block.count * size;
    if (int64_t(scratch.size()) < wanted) scratch.resize(wanted);
    float *whole = scratch.data() + Weigher::floats(op), *next = whole + block.count * size;
    float* known = reading.all ? nullptr : splits.known.data() + block.row * splits.chunks * size;
    Weigher weigher(op, frame, block.row, reading, scratch.data());
    auto chunks = [&](int64_t r) { return chunks_of(seen_by(frame, block.row + r)); };
    for (int64_t which = reading.begin; which < reading.end; which++) {
        if (!reading.all) {
            read_chunk(frame, block, weigher, which, known + which * size, splits.chunks * size);
            continue;
        }
        read_chunk(frame, block, weigher, which, which ? next : whole, size);
        for (int64_t r = 0; which && r < block.count; r++)
            if (which < chunks(r)) join(op, whole + r * size, next + r * size);
    }
    if (!reading.all) {
        if (splits.left[own].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
        splits.left[own] = parts;
    }
    for (int64_t r = 0; r < block.count; r++) {
        float* row = reading.all ? whole + r * size : known + r * splits.chunks * size;
        for (int64_t which = 1; !reading.all && which < chunks(r); which++) join(op, row, row + which * size);
        end_row(op, block.row + r, row);
    }
}

}  // namespace
