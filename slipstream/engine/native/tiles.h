// Products by AMX tiles: sixteen rows by sixteen outputs in one instruction. A bfloat16 sum takes 32 inputs at a
// time, the even and the odd ones each by themselves, and its order does not depend on the rows beside it. So a
// single row is computed by tiles, too, and has the same bits as among others. Sums of int8 are exact. Rules: those
// of `products.h`.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "op.h"
#include "vectors.h"

namespace {

#if defined(__AMX_BF16__)
constexpr bool TILES = true;
constexpr int TILE_ROWS = 16;     // rows of a tile; also its outputs
constexpr int TILE_DEPTH = 32;    // bfloat16 inputs that one instruction takes; of int8 twice as many
constexpr int PAGE_BYTES = 2048;  // bytes of two tiles of weights side by side: TILE_DEPTH inputs of 2 * TILE_ROWS outputs

// Compilers do not know that tile instructions read memory; this makes them write what is still in registers.
inline void flush_writes() { asm volatile("" : : : "memory"); }

// The shapes of a thread's tiles: sums of two blocks of rows (0, 1 and 2, 3), their inputs (4 and 5), weights (6 and 7).
class Tiles {
    int64_t first = 0, second = 0;

  public:
    Tiles() = default;
    Tiles(const Tiles&) = delete;
    ~Tiles() { _tile_release(); }

    // For two blocks of so many rows, at most TILE_ROWS each; the second may have none.
    void configure(int64_t one, int64_t other) {
        if (one == first && other == second) return;
        first = one, second = other;
        struct alignas(64) { uint8_t palette, start, zero[14]; uint16_t bytes[16]; uint8_t rows[16]; } shapes = {};
        const int64_t rows[] = {one, one, other, other, one, other, TILE_ROWS, TILE_ROWS};
        shapes.palette = 1;
        for (int tile = 0; tile < 8; tile++)
            if (rows[tile]) shapes.bytes[tile] = 64, shapes.rows[tile] = uint8_t(rows[tile]);
        asm volatile("" : : "r"(&shapes) : "memory");  // as `flush_writes`, for a local object
        _tile_loadconfig(&shapes);
    }
};

template <class S>
struct PackedPages {  // weights in the layout of tiles
    typedef S Sum;
    static constexpr int BYTES = PAGE_BYTES;
    const uint8_t* page(const uint8_t* weight, int64_t) const { return weight; }
};

typedef PackedPages<float> Bf16Pages;
typedef PackedPages<int32_t> Int8Pages;  // rows are int8, too

struct WidenedInt8Pages {  // int8 weights for bfloat16 rows: a page is widened while tiles multiply the one before
    typedef float Sum;
    static constexpr int BYTES = PAGE_BYTES / 2;
    alignas(64) uint8_t pages[2][PAGE_BYTES];

    const uint8_t* page(const uint8_t* weight, int64_t k) {
        uint8_t* wide = pages[k % 2];
        for (int line = 0; line < BYTES; line += 64) {
            Words first, second;
            int8_line_to_bf16(weight + line, first, second);
            memcpy(wide + 2 * line, &first, sizeof first), memcpy(wide + 2 * line + 64, &second, sizeof second);
        }
        asm volatile("" : : "r"(wide) : "memory");  // as `flush_writes`, for a local object
        return wide;
    }
};

// sums [2 TILE_ROWS, 2 TILE_ROWS]: products of one block of rows (TWO: two) from x on, `stride` bytes apart, with `deep` pages.
// prefetched: address of what is prefetched meanwhile, `prefetch_bytes` of it with every page. Weights are loaded as streams, so
// rows stay in the first cache.
template <class Pages, bool TWO>
void sum_tiles(const uint8_t* weight, int64_t deep, const void* x, int64_t stride, const uint8_t* prefetched,
        int64_t prefetch_bytes,
               typename Pages::Sum* sums) {
    constexpr bool WHOLE = std::is_same_v<typename Pages::Sum, int32_t>;
    const uint8_t *one = (const uint8_t*)x, *other = one + TILE_ROWS * stride;
    Pages pages;
    _tile_zero(0);
    _tile_zero(1);
    if (TWO) {
        _tile_zero(2);
        _tile_zero(3);
    }
    flush_writes();
    const uint8_t* next = pages.page(weight, 0);
    for (int64_t k = 0; k < deep; k++, one += 2 * TILE_DEPTH, other += 2 * TILE_DEPTH) {
        const uint8_t* page = next;
        weight += Pages::BYTES;
        for (const uint8_t* line = prefetched; line < prefetched + prefetch_bytes; line += 64) __builtin_prefetch(line, 0, 1);
        prefetched += prefetch_bytes;
        if (k + 1 < deep) next = pages.page(weight, k + 1);
        _tile_stream_loadd(6, page, 128);
        _tile_stream_loadd(7, page + 64, 128);
        _tile_loadd(4, one, stride);
        if (WHOLE) {
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(1, 4, 7);
        } else {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (!TWO) continue;
        _tile_loadd(5, other, stride);
        if (WHOLE) {
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        } else {
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + TILE_ROWS, 128);
    if (TWO) {
        _tile_stored(2, sums + TILE_ROWS * 2 * TILE_ROWS, 128);
        _tile_stored(3, sums + TILE_ROWS * 2 * TILE_ROWS + TILE_ROWS, 128);
    }
}
#else
constexpr bool TILES = false;
#endif

}  // namespace
