// Chunks of attention by tiles: rows of one sequence, sixteen at a time, over entries that all of them see.
//
// Rules: those of `attention.h`, and
// 1. Keys are turned and values paired as tiles want them, once for all rows of a block and all heads that share them.
// 2. Weights are two bfloat16 each, the second what rounding took from the first: bfloat16 alone would cost accuracy.
// 3. A row's sums do not depend on the rows beside it: what it does not see weighs zero, and is a number. Entries are
//    summed in the order in which the row sees them, so values that only some nodes of a tree see are laid for each row;
//    keys are laid, and values that all see, once for all of them.
//
// It knows nothing about what becomes of several chunks.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>

#include "chunk.h"
#include "list.h"
#include "tiles.h"
#include "vectors.h"

namespace {

constexpr int BLOCK_ROWS = SIDE;
constexpr int NODES = 64;            // of a tree, at most
constexpr int SPAN = CHUNK + NODES;  // entries that the rows of a block see of a chunk together, at most
constexpr int TILE_BYTES = 64 * SIDE;

// Keys i to i + SIDE, DEEP columns of each, as weights: pairs of columns below one another, a word of each key in a line.
inline void turn(const bf16* const* keys, int64_t column, uint8_t* tile) {
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

// DEEP columns of the values of two entries, beside one another: of each eight columns the first four, then the others.
inline void pair(const bf16* one, const bf16* other, uint8_t* first, uint8_t* second) {
    __m512i a = _mm512_loadu_si512(one), b = _mm512_loadu_si512(other);
    _mm512_storeu_si512(first, _mm512_unpacklo_epi16(a, b));
    _mm512_storeu_si512(second, _mm512_unpackhi_epi16(a, b));
}

// Some queries that are a tile's rows: as many rows of one head, or heads of one row.
struct Queries {
    const bf16* first;
    int64_t count, stride;  // elements from one to the next
    float* known;           // of the first, and `apart` floats from one to the next
    int64_t apart;
    const int64_t* seen;    // entries that each sees of the chunk, and `step` from one to the next
    int64_t step;
};

// What some rows of a block know of chunks, one after the other.
class Weigher {
    const Op& op;
    const Frame& frame;
    const Reading reading;
    const int64_t size, deep;  // of a head; and how often DEEP goes into it
    uint8_t *keys, *values;  // tiles [SPAN / SIDE, deep] and [CHUNK / DEEP, deep, 2]
    float* scores;           // [SIDE, SPAN]
    bf16 *high, *low;        // [SIDE, CHUNK], of trees for each head of a group, SIDE of them at most
    Tiles tiles;

    // Entries of one KV head as keys, from `column` on.
    void lay_keys(const bf16* const* entries, int64_t first, int64_t column) {
        for (int64_t d = 0; d < deep; d++)
            turn(entries + first, column + d * DEEP, keys + (first / SIDE * deep + d) * TILE_BYTES);
    }

    // Two entries of one KV head as values.
    void lay_values(const bf16* const* entries, int64_t i, int64_t column, uint8_t* values) {
        for (int64_t d = 0; d < deep; d++) {
            uint8_t* tile = values + ((i / DEEP * deep + d) * 2) * TILE_BYTES + i % DEEP / 2 * 64;
            pair(entries[i] + column + d * DEEP, entries[i + 1] + column + d * DEEP, tile, tile + TILE_BYTES);
        }
    }

    // Of one KV head, all that the chunk's entries bring; meanwhile its part of what comes next is asked for.
    void lay(const Chunk& chunk, int kv_head, const Chunk* next, bool asked) {
        const int64_t column = kv_head * size, width = op.kv_heads * size, count = (chunk.count + DEEP - 1) / DEEP * DEEP;
        Coming coming(op, next, kv_head);
        for (int64_t first = 0; first < count; first += SIDE) {
            for (int64_t i = first; i < first + SIDE; i++) {
                coming.ask_on(op);
                if (!asked && !kv_head && i + EARLY < chunk.count) ask(chunk.entries[i + EARLY], 2 * width);
            }
            lay_keys(chunk.entries, first, column);
            for (int64_t i = first; i < first + SIDE; i += 2) lay_values(chunk.entries, i, width + column, values);
        }
        written();
    }

    // Products with keys, four tiles of them at a time.
    void score(const Queries& q, int64_t count) {
        for (int64_t first = 0; first < count; first += 4 * SIDE) {
            const uint8_t* tile = keys + first / SIDE * deep * TILE_BYTES;
            const int64_t beside = deep * TILE_BYTES;
            const bool more = first + 2 * SIDE < count;  // than two of the four
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t d = 0; d < deep; d++, tile += TILE_BYTES) {
                _tile_loadd(4, q.first + d * DEEP, 2 * q.stride);
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
            _tile_stored(1, scores + first + SIDE, 4 * SPAN);
            if (!more) continue;
            _tile_stored(2, scores + first + 2 * SIDE, 4 * SPAN);
            _tile_stored(3, scores + first + 3 * SIDE, 4 * SPAN);
        }
    }

    // Scores become weights; of entries that a row does not see, zero.
    void rate(const Queries& q, int64_t count, bf16* high, bf16* low) {
        const Floats scale = all(1.0f / sqrtf(float(size)));
        for (int64_t c = 0; c < q.count; c++, high += CHUNK, low += CHUNK) {
            float *row = scores + c * SPAN, *head = q.known + c * q.apart;
            const int64_t seen = q.seen[c * q.step];
            for (int64_t i = 0; i < seen; i += LANES) store(row + i, load(row + i) * scale);
            head[size + 1] = weigh(row, seen, head[size]);
            int64_t i = 0;
            for (; i < seen; i += LANES) {
                Floats v = load(row + i);
                Words above = rounded(v);
                Shorts one = __builtin_convertvector(above, Shorts);
                memcpy(high + i, &one, sizeof one);
                narrow(low + i, v - (Floats)(above << 16));
            }
            for (; i < count; i += LANES) memset(high + i, 0, 2 * LANES), memset(low + i, 0, 2 * LANES);
        }
        written();
    }

    // Sums of weighed values of entries `begin` to `end`, DEEP columns of them from `d` on, or twice as many. They join
    // what is known, unless these are the first. high, low: of the first row at entry `begin`, `apart` from one row to
    // the next; laid: of that entry.
    template <bool TWO>
    void sum(float* known, int64_t known_apart, const bf16* high, const bf16* low, int64_t apart, const uint8_t* laid, int64_t count,
             bool joins, int64_t d) {
        float* to = known + d * DEEP;
        const int64_t line = 4 * known_apart;
        if (joins) {
            _tile_loadd(0, to, line);
            _tile_loadd(1, to + SIDE, line);
            if (TWO) {
                _tile_loadd(2, to + 2 * SIDE, line);
                _tile_loadd(3, to + 3 * SIDE, line);
            }
        } else {
            _tile_zero(0);
            _tile_zero(1);
            if (TWO) {
                _tile_zero(2);
                _tile_zero(3);
            }
        }
        for (int64_t first = 0; first < count; first += DEEP) {
            const uint8_t* tile = laid + (first / DEEP * deep + d) * 2 * TILE_BYTES;
            _tile_loadd(4, high + first, 2 * apart);
            _tile_loadd(5, low + first, 2 * apart);
            _tile_loadd(6, tile, 64);
            _tile_loadd(7, tile + TILE_BYTES, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(0, 5, 6);
            _tile_dpbf16ps(1, 5, 7);
            if (TWO) {
                _tile_loadd(6, tile + 2 * TILE_BYTES, 64);
                _tile_loadd(7, tile + 3 * TILE_BYTES, 64);
                _tile_dpbf16ps(2, 4, 6);
                _tile_dpbf16ps(3, 4, 7);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, to, line);
        _tile_stored(1, to + SIDE, line);
        if (TWO) {
            _tile_stored(2, to + 2 * SIDE, line);
            _tile_stored(3, to + 3 * SIDE, line);
        }
    }

    // The same, all columns.
    void sums(float* known, int64_t known_apart, const bf16* high, const bf16* low, int64_t apart, const uint8_t* laid, int64_t count,
              bool joins) {
        int64_t d = 0;
        for (; d + 2 <= deep; d += 2) sum<true>(known, known_apart, high, low, apart, laid, count, joins, d);
        if (d < deep) sum<false>(known, known_apart, high, low, apart, laid, count, joins, d);
    }

    void attend(const Queries& q, int64_t count) {
        tiles.hold(q.count, q.count);
        score(q, count);
        rate(q, count, high, low);
        sums(q.known, q.apart, high, low, CHUNK, values, count, false);
    }

    // Nodes of one tree in a chunk that is not shared whole: what each of them sees of it.
    struct Nodes {
        const bf16* entries[SPAN + LANES];  // that all see, then all nodes that any sees, then the last one again
        int64_t shared, count;              // of those that all see; and of all, filled up
        int64_t seen[SIDE];
        uint8_t own[SIDE][NODES];           // by row, behind those that all see: which of the nodes

        Nodes(const Op& op, const Frame& frame, int64_t row, int64_t rows, int64_t which) {
            const int64_t stride = 2 * int64_t(op.kv_heads) * op.head_dim, before = frame.shared[row] - which * CHUNK;
            const bf16* kv = frame.kv + op.layer * frame.layer_stride;
            const int64_t *slots = frame.kv_slots + frame.begin[row] + which * CHUNK, *tree = frame.kv_slots + frame.tree[row];
            uint64_t any = 0;
            uint8_t number[NODES];
            shared = count = std::max<int64_t>(before, 0);
            for (int64_t i = 0; i < shared; i++) entries[i] = kv + slots[i] * stride;
            for (int64_t r = row; r < row + rows; r++) any |= frame.words[r];
            for (uint64_t word = any; word; word &= word - 1) {
                const int node = __builtin_ctzll(word);
                number[node] = uint8_t(count - shared), entries[count++] = kv + tree[node] * stride;
            }
            for (int64_t r = 0; r < rows; r++) {
                int64_t place = before;
                for (uint64_t word = frame.words[row + r]; word && place < CHUNK; word &= word - 1, place++)
                    if (place >= 0) own[r][place - shared] = number[__builtin_ctzll(word)];
                seen[r] = place;
            }
            const bf16* last = entries[count - 1];
            for (; count % DEEP; count++) entries[count] = last;
        }
    };

    // Of the rows of a tree, at least as many as heads share keys.
    void read_nodes(int64_t row, int64_t rows, int64_t which, float* known, int64_t apart) {
        const Nodes nodes(op, frame, row, rows, which);
        const int64_t group = op.heads / op.kv_heads, entry = size + 2, width = op.kv_heads * size;
        const int64_t common = nodes.shared / DEEP * DEEP, block = SIDE * CHUNK;
        const bf16* in = (const bf16*)op.in + row * op.in_stride;
        uint8_t* own = values + common / DEEP * deep * 2 * TILE_BYTES;  // behind what all see
        for (int kv_head = 0; kv_head < op.kv_heads; kv_head++) {
            const int64_t column = kv_head * size;
            for (int64_t i = 0; i < nodes.count; i += SIDE) lay_keys(nodes.entries, i, column);
            for (int64_t i = 0; i < common; i += 2) lay_values(nodes.entries, i, width + column, values);
            written();
            for (int64_t first = 0; first < group; first += SIDE) {
                const int64_t heads = std::min<int64_t>(SIDE, group - first), begin = kv_head * group + first;
                tiles.hold(rows, rows);
                for (int64_t h = 0; h < heads; h++) {
                    const Queries q = {in + (begin + h) * size, rows, op.in_stride, known + (begin + h) * entry, apart, nodes.seen, 1};
                    score(q, nodes.count);
                    for (int64_t r = 0; r < rows; r++) take_own(nodes, r);
                    rate(q, std::min<int64_t>(nodes.count, CHUNK), high + h * block, low + h * block);
                    sums(q.known, apart, high + h * block, low + h * block, CHUNK, values, common, false);
                }
                tiles.hold(heads, heads);
                for (int64_t r = 0; r < rows; r++) {
                    const int64_t from = r * CHUNK + common;
                    const int64_t count = lay_own(nodes, r, common, width + column, own);
                    sums(known + r * apart + begin * entry, entry, high + from, low + from, block, own, count, true);
                }
            }
        }
    }

    // The scores of what a row alone sees, in its order.
    void take_own(const Nodes& nodes, int64_t r) {
        float *row = scores + r * SPAN + nodes.shared, found[NODES];
        const int64_t count = nodes.seen[r] - nodes.shared;
        for (int64_t i = 0; i < count; i++) found[i] = row[nodes.own[r][i]];
        for (int64_t i = 0; i < count; i++) row[i] = found[i];
    }

    // Values of what a row sees from entry `common` on. Returns of how many, filled up.
    int64_t lay_own(const Nodes& nodes, int64_t r, int64_t common, int64_t column, uint8_t* own) {
        const bf16* entries[CHUNK + NODES];
        int64_t count = 0;
        for (int64_t i = common; i < nodes.seen[r]; i++)
            entries[count++] = nodes.entries[i < nodes.shared ? i : nodes.shared + nodes.own[r][i - nodes.shared]];
        for (; count % DEEP; count++) entries[count] = entries[count - 1];
        for (int64_t i = 0; i < count; i += 2) lay_values(entries, i, column, own);
        written();
        return count;
    }

    // Whether all that a row sees of a chunk are entries of the list that it shares.
    bool whole(int64_t row, int64_t which) const { return !frame.words[row] || frame.shared[row] >= (which + 1) * CHUNK; }

  public:
    // Floats of scratch that it needs.
    static int64_t floats(const Op& op) {
        const int64_t heads = std::min(SIDE, op.heads / op.kv_heads);
        return (SPAN + CHUNK) / 2 * op.head_dim + SIDE * SPAN + heads * SIDE * CHUNK + LANES;
    }

    Weigher(const Op& op, const Frame& frame, int64_t, Reading reading, float* scratch)
        : op(op), frame(frame), reading(reading), size(op.head_dim), deep(op.head_dim / DEEP) {
        keys = (uint8_t*)((uintptr_t(scratch) + 63) / 64 * 64), values = keys + 2 * SPAN * size;
        scores = (float*)(values + 2 * CHUNK * size);
        high = (bf16*)(scores + SIDE * SPAN), low = high + std::min<int64_t>(SIDE, op.heads / op.kv_heads) * SIDE * CHUNK;
    }

    // Whether two rows read a chunk together: they share all that they see of it, or they are nodes of one tree.
    bool together(int64_t row, int64_t other, int64_t which) const {
        if (whole(row, which)) return whole(other, which);
        return frame.words[other] && frame.tree[row] == frame.tree[other] && frame.shared[row] == frame.shared[other];
    }

    // What rows from `row` on know of a chunk; known is the first one's, and `apart` floats lie from one to the next.
    void read(int64_t row, int64_t count, int64_t which, float* known, int64_t apart) {
        const int64_t group = op.heads / op.kv_heads;
        if (count > 1 && !whole(row, which)) {
            if (count >= group) return read_nodes(row, count, which, known, apart);
            for (int64_t r = 0; r < count; r++) read(row + r, 1, which, known + r * apart, apart);
            return;
        }
        int64_t seen[SIDE], longest = row;
        for (int64_t r = row; r < row + count; r++) {
            seen[r - row] = std::min<int64_t>(CHUNK, seen_by(frame, r) - which * CHUNK);
            if (seen_by(frame, r) > seen_by(frame, longest)) longest = r;
        }
        const bool goes_on = which + 1 < std::min(reading.end, chunks_of(seen_by(frame, longest)));
        const Chunk chunk(op, frame, longest, which);
        std::optional<Chunk> next;
        if (goes_on) next.emplace(op, frame, longest, which + 1);
        const int64_t padded = (chunk.count + DEEP - 1) / DEEP * DEEP;
        const bf16* in = (const bf16*)op.in + row * op.in_stride;
        for (int kv_head = 0; kv_head < op.kv_heads; kv_head++) {
            lay(chunk, kv_head, next ? &*next : nullptr, which > reading.begin);
            const int64_t begin = kv_head * group, entry = size + 2;
            if (count >= group)
                for (int64_t head = begin; head < begin + group; head++)
                    attend({in + head * size, count, op.in_stride, known + head * entry, apart, seen, 1}, padded);
            else
                for (int64_t r = 0; r < count; r++)
                    for (int64_t head = begin; head < begin + group; head += SIDE)
                        attend({in + r * op.in_stride + head * size, std::min<int64_t>(SIDE, begin + group - head), size,
                                known + r * apart + head * entry, entry, seen + r, 0}, padded);
        }
    }

    // DEEP columns of a row's result, as `known` has them.
    static void end(const float* known, Floats factor, bf16* out) {
        __m512i both = _mm512_packus_epi32((__m512i)rounded(load(known) * factor), (__m512i)rounded(load(known + LANES) * factor));
        _mm512_storeu_si512(out, both);
    }
};

}  // namespace
