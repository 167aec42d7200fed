// Products by tiles, where a processor has them (AMX): sixteen rows and sixteen outputs by one instruction.
//
// Rules: those of `products.h`. A sum of bfloat16 takes 32 inputs at a time, the even ones and the odd ones of them each by
// themselves; its order knows nothing of the rows beside it. So one row alone is computed by tiles, too. Sums of whole numbers
// are exact.
//
// It knows nothing about what is made of the sums.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "list.h"
#include "vectors.h"

namespace {

#if defined(__AMX_BF16__)
constexpr bool TILES = true;
constexpr int SIDE = 16;    // rows of a tile, and outputs
constexpr int DEEP = 32;    // inputs that one instruction takes; of whole numbers twice as many
constexpr int PAGE = 2048;  // bytes of two tiles of weights side by side: so many inputs of 2 SIDE outputs

// Compilers do not know that tiles read memory: what they have still to write is written here.
inline void written() { asm volatile("" : : : "memory"); }

// The shapes of a thread's tiles: sums of two blocks of rows (0, 1 and 2, 3), their inputs (4 and 5), weights (6 and 7).
class Tiles {
    int64_t first = 0, second = 0;

  public:
    Tiles() = default;
    Tiles(const Tiles&) = delete;
    ~Tiles() { _tile_release(); }

    // For blocks of so many rows, at most SIDE each; the second may have none.
    void hold(int64_t one, int64_t other) {
        if (one == first && other == second) return;
        first = one, second = other;
        struct alignas(64) { uint8_t palette, start, zero[14]; uint16_t bytes[16]; uint8_t rows[16]; } shapes = {};
        const int64_t rows[] = {one, one, other, other, one, other, SIDE, SIDE};
        shapes.palette = 1;
        for (int tile = 0; tile < 8; tile++)
            if (rows[tile]) shapes.bytes[tile] = 64, shapes.rows[tile] = uint8_t(rows[tile]);
        asm volatile("" : : "r"(&shapes) : "memory");  // as `written`, of what nobody else has seen
        _tile_loadconfig(&shapes);
    }
};

template <class S>
struct Stored {  // weights as tiles have them
    typedef S Sum;
    static constexpr int BYTES = PAGE;
    const uint8_t* page(const uint8_t* weight, int64_t) const { return weight; }
};

typedef Stored<float> Halved;      // in bfloat16
typedef Stored<int32_t> Numbered;  // whole numbers, as rows are

struct Widened {  // weights as whole numbers: a page of them is widened while tiles multiply the one before
    typedef float Sum;
    static constexpr int BYTES = PAGE / 2;
    alignas(64) uint8_t pages[2][PAGE];

    const uint8_t* page(const uint8_t* weight, int64_t k) {
        uint8_t* wide = pages[k % 2];
        for (int line = 0; line < BYTES; line += 64) {
            Words first, second;
            halves_of_line(weight + line, first, second);
            memcpy(wide + 2 * line, &first, sizeof first), memcpy(wide + 2 * line + 64, &second, sizeof second);
        }
        asm volatile("" : : "r"(wide) : "memory");  // as `written`, of what nobody else has seen
        return wide;
    }
};

// Sums [2 SIDE, 2 SIDE] of one or two blocks of rows from x on, which are `stride` bytes apart, with `deep` pages.
// soon: what memory is asked for meanwhile, `each` bytes of it with every page. Weights pass by the first cache's other lines,
// rows stay in it.
template <class Pages, bool TWO>
void sum_tiles(const uint8_t* weight, int64_t deep, const void* x, int64_t stride, const uint8_t* soon, int64_t each,
               typename Pages::Sum* sums) {
    constexpr bool WHOLE = std::is_same_v<typename Pages::Sum, int32_t>;
    const uint8_t *one = (const uint8_t*)x, *other = one + SIDE * stride;
    Pages pages;
    _tile_zero(0);
    _tile_zero(1);
    if (TWO) {
        _tile_zero(2);
        _tile_zero(3);
    }
    written();
    const uint8_t* next = pages.page(weight, 0);
    for (int64_t k = 0; k < deep; k++, one += 2 * DEEP, other += 2 * DEEP) {
        const uint8_t* page = next;
        weight += Pages::BYTES;
        for (const uint8_t* line = soon; line < soon + each; line += 64) __builtin_prefetch(line, 0, 1);
        soon += each;
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
    _tile_stored(1, sums + SIDE, 128);
    if (TWO) {
        _tile_stored(2, sums + SIDE * 2 * SIDE, 128);
        _tile_stored(3, sums + SIDE * 2 * SIDE + SIDE, 128);
    }
}
#else
constexpr bool TILES = false;
#endif

}  // namespace
