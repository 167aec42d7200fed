// Chunks of attention by tiles: rows of one sequence, sixteen at a time, over entries that all of them see.
//
// Rules: those of `attention.h`, and
// 1. Keys are turned and values paired as tiles want them, once for all rows of a block and all heads that share them.
// 2. Weights are two bfloat16 each, the second what rounding took from the first: bfloat16 alone would cost accuracy.
// 3. A row's sums do not depend on the rows beside it: what it does not see weighs zero, and is a number.
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
    uint8_t *keys, *values;  // tiles [CHUNK / SIDE, deep] and [CHUNK / DEEP, deep, 2]
    float* scores;           // [SIDE, CHUNK]
    bf16 *high, *low;        // [SIDE, CHUNK]
    Tiles tiles;

    // Of one KV head, all that the chunk's entries bring; meanwhile its part of what comes next is asked for.
    void lay(const Chunk& chunk, int kv_head, const Chunk* next, bool asked) {
        const int64_t column = kv_head * size, width = op.kv_heads * size, count = (chunk.count + DEEP - 1) / DEEP * DEEP;
        for (int64_t first = 0; first < count; first += SIDE) {
            for (int64_t i = first; i < first + SIDE; i++) {
                if (next) ask_next(op, *next, kv_head, i);
                if (!asked && !kv_head && i + EARLY < chunk.count) ask(chunk.entries[i + EARLY], 2 * width);
            }
            for (int64_t d = 0; d < deep; d++)
                turn(chunk.entries + first, column + d * DEEP, keys + (first / SIDE * deep + d) * TILE_BYTES);
            for (int64_t i = first; i < first + SIDE; i += 2)
                for (int64_t d = 0; d < deep; d++) {
                    uint8_t* tile = values + ((i / DEEP * deep + d) * 2) * TILE_BYTES + i % DEEP / 2 * 64;
                    const int64_t at = width + column + d * DEEP;
                    pair(chunk.entries[i] + at, chunk.entries[i + 1] + at, tile, tile + TILE_BYTES);
                }
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
            _tile_stored(0, scores + first, 4 * CHUNK);
            _tile_stored(1, scores + first + SIDE, 4 * CHUNK);
            if (!more) continue;
            _tile_stored(2, scores + first + 2 * SIDE, 4 * CHUNK);
            _tile_stored(3, scores + first + 3 * SIDE, 4 * CHUNK);
        }
    }

    // Scores become weights; of entries that a row does not see, zero.
    void rate(const Queries& q, int64_t count) {
        const Floats scale = all(1.0f / sqrtf(float(size)));
        for (int64_t c = 0; c < q.count; c++) {
            float *row = scores + c * CHUNK, *head = q.known + c * q.apart;
            const int64_t seen = q.seen[c * q.step];
            for (int64_t i = 0; i < seen; i += LANES) store(row + i, load(row + i) * scale);
            head[size + 1] = weigh(row, seen, head[size]);
            int64_t i = 0;
            for (; i < seen; i += LANES) {
                Floats v = load(row + i);
                Words above = rounded(v);
                Shorts one = __builtin_convertvector(above, Shorts);
                memcpy(high + c * CHUNK + i, &one, sizeof one);
                narrow(low + c * CHUNK + i, v - (Floats)(above << 16));
            }
            for (; i < count; i += LANES)
                memset(high + c * CHUNK + i, 0, 2 * LANES), memset(low + c * CHUNK + i, 0, 2 * LANES);
        }
        written();
    }

    // Sums of weighed values, DEEP columns of them or twice as many at a time.
    template <bool TWO>
    void sum(const Queries& q, int64_t count, int64_t d) {
        _tile_zero(0);
        _tile_zero(1);
        if (TWO) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t first = 0; first < count; first += DEEP) {
            const uint8_t* tile = values + (first / DEEP * deep + d) * 2 * TILE_BYTES;
            _tile_loadd(4, high + first, 2 * CHUNK);
            _tile_loadd(5, low + first, 2 * CHUNK);
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
        float* to = q.known + d * DEEP;
        _tile_stored(0, to, 4 * q.apart);
        _tile_stored(1, to + SIDE, 4 * q.apart);
        if (TWO) {
            _tile_stored(2, to + 2 * SIDE, 4 * q.apart);
            _tile_stored(3, to + 3 * SIDE, 4 * q.apart);
        }
    }

    void attend(const Queries& q, int64_t count) {
        tiles.hold(q.count, q.count);
        score(q, count);
        rate(q, count);
        int64_t d = 0;
        for (; d + 2 <= deep; d += 2) sum<true>(q, count, d);
        if (d < deep) sum<false>(q, count, d);
    }

  public:
    // Floats of scratch that it needs.
    static int64_t floats(const Op& op) { return CHUNK * op.head_dim + 2 * SIDE * CHUNK + LANES; }

    Weigher(const Op& op, const Frame& frame, int64_t, Reading reading, float* scratch)
        : op(op), frame(frame), reading(reading), size(op.head_dim), deep(op.head_dim / DEEP) {
        keys = (uint8_t*)((uintptr_t(scratch) + 63) / 64 * 64), values = keys + 2 * CHUNK * size;
        scores = (float*)(values + 2 * CHUNK * size);
        high = (bf16*)(scores + SIDE * CHUNK), low = high + SIDE * CHUNK;
    }

    // Whether a row reads a chunk with others: all that it sees of it are entries of the list that they share.
    bool shares(int64_t row, int64_t which) const {
        return !frame.words[row] || frame.shared[row] >= (which + 1) * CHUNK;
    }

    // What rows from `row` on know of a chunk; known is the first one's, and `apart` floats lie from one to the next.
    void read(int64_t row, int64_t count, int64_t which, float* known, int64_t apart) {
        int64_t seen[SIDE], longest = row;
        for (int64_t r = row; r < row + count; r++) {
            seen[r - row] = std::min<int64_t>(CHUNK, seen_by(frame, r) - which * CHUNK);
            if (seen_by(frame, r) > seen_by(frame, longest)) longest = r;
        }
        const bool goes_on = which + 1 < std::min(reading.end, chunks_of(seen_by(frame, longest)));
        const Chunk chunk(op, frame, longest, which);
        std::optional<Chunk> next;
        if (goes_on) next.emplace(op, frame, longest, which + 1);
        const int64_t group = op.heads / op.kv_heads, padded = (chunk.count + DEEP - 1) / DEEP * DEEP;
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
