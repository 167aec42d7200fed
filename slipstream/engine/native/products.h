// Products of rows and packed weights, a group of outputs at a time.
//
// Rules: those of `kernels.cpp`. Each sum is taken in an order that depends on its own row alone.
//
// It knows nothing about what is made of the sums beyond an addition and a gate.

#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "list.h"
#include "numbers.h"
#include "tiles.h"
#include "vectors.h"

namespace {

constexpr int GROUP = 2 * LANES;  // outputs of a product that are computed together
constexpr int BLOCK = LANES == 8 ? 6 : 12;  // rows of a product that are computed together, at most: as registers hold
constexpr int BESIDE = LANES == 16 ? 1 : 4;  // groups that are computed beside one another for one row, half as many for two
constexpr int PARTS = 8;  // of a product, for each thread. The first part of each is three quarters of its share: a new part
                          // finds none of its weights asked for. The others are for whoever comes first
constexpr int SLAB = PAIRED ? 1 << 30 : 8 * BLOCK;  // rows whose inputs are widened together: they stay in the second cache
constexpr int AHEAD = 8192;      // bytes of weights that are asked for in advance: about what memory is late by
constexpr int AGAIN = 1;         // how they are asked for: into the second cache
constexpr int ONCE = PAIRED ? 0 : AGAIN;  // what is read once leaves an AMD's caches to all that runs between two steps
                                 // (NTA); an Intel loses it before it is read
constexpr int LINE = 2 * GROUP;  // whole numbers that weigh a pair of inputs for a group of outputs
constexpr int QUADS = 4 * GROUP;  // and four

int64_t groups_of(const Op& op) { return (op.outer * (op.result == SILU ? 2 : 1) + GROUP - 1) / GROUP; }

// The first group of a product's part; of part `parts`: the end.
int64_t first_group(int64_t groups, int64_t part, int64_t parts) {
    if (groups < 4 * parts || parts < PARTS) return groups * part / parts;
    int64_t threads = parts / PARTS, large = groups * 3 / 4;
    return part <= threads ? large * part / threads : large + (groups - large) * (part - threads) / (parts - threads);
}

void finish(const Op& op, int64_t row, int64_t group, Floats low, Floats high) {
    if (op.extra) {
        low += load((const float*)op.extra + group * GROUP);
        high += load((const float*)op.extra + group * GROUP + LANES);
    }
    if (op.result == SILU) {  // gates below, what they gate above
        Floats down = exponential((Floats)((Words)low | 0x80000000u));  // e^-|gate|
        Floats one = all(1.0f);
        Words negative = (Words)(low < Floats{});
        Floats top = (Floats)(((Words)down & negative) | ((Words)one & ~negative));
        narrow((bf16*)op.out + row * op.out_stride + group * LANES, low * (top / (one + down)) * high);
        return;
    }
    float* out = (float*)op.out + row * op.out_stride + group * GROUP;
    int64_t left = op.outer - group * GROUP;
    float part[GROUP];
    float* to = left >= GROUP ? out : part;
    if (left < GROUP) memcpy(part, out, left * sizeof(float));
    store(to, op.result == ADD ? load(to) + low : low);
    store(to + LANES, op.result == ADD ? load(to + LANES) + high : high);
    if (left < GROUP) memcpy(out, part, left * sizeof(float));
}

struct Halves {  // weights in bfloat16
    static constexpr int BYTES = 2 * LINE;
    static constexpr bool SCALED = false;
    static void read(const uint8_t* weight, Pairs& first, Pairs& second) {
        first = pairs_of(words_at(weight)), second = pairs_of(words_at(weight + LINE));
    }
};

#if defined(__AVX512VNNI__)
// Where the number stands that weighs input k for output i of a group, and how a byte holds it: HIGH more than it is, and so
// without a sign.
constexpr int64_t whole_place(int64_t i, int64_t k) { return k / 4 * QUADS + 4 * i + k % 4; }
constexpr int64_t whole_size(int64_t inner) { return (inner + 3) / 4 * QUADS; }  // of a group
inline uint8_t whole_byte(int8_t number) { return uint8_t(number + HIGH); }
#else
constexpr int64_t whole_place(int64_t i, int64_t k) { return k / 2 * LINE + line_place(int(i), k % 2); }
constexpr int64_t whole_size(int64_t inner) { return inner / 2 * LINE; }
inline uint8_t whole_byte(int8_t number) { return line_byte(number); }
#endif

struct Whole {  // weights as whole numbers
    static constexpr int BYTES = LINE;
    static constexpr bool SCALED = true;
    static void read(const uint8_t* weight, Pairs& first, Pairs& second) { widen_line(weight, first, second); }
};

// What a thread writes on while it does parts of an operation.
struct Scratch {
    std::vector<float> floats;
    const bf16* widened = nullptr;  // whose inputs the floats are, of this operation
#if defined(__AVX512VNNI__)
    Numbers numbers;
#endif
};

// What some rows bring to a product: pairs of bfloat16 where these are multiplied as such, else each widened, once for a
// thread's parts of the operation where one slab holds all rows.
struct Inputs {
    const bf16* halves;
    int64_t stride;
    std::vector<float>& wide;  // [rows, inner]
    int64_t inner;

    Inputs(const Op& op, int64_t row, int64_t rows, Scratch& scratch)
        : halves((const bf16*)op.in + row * op.in_stride), stride(op.in_stride), wide(scratch.floats), inner(op.inner) {
        if (PAIRED || std::exchange(scratch.widened, halves) == halves) return;
        if (int64_t(wide.size()) < rows * inner) wide.resize(rows * inner);
        for (int64_t r = 0; r < rows; r++) {
            const bf16* x = halves + r * stride;
            float* to = &wide[r * inner];
            int64_t i = 0;
            for (; i + LANES <= inner; i += LANES) store(to + i, widen(x + i));
            for (; i < inner; i++) to[i] = std::bit_cast<float>(uint32_t(x[i]) << 16);
        }
    }
};

// Sums of R rows from `row` on, for the outputs of a group: the products of a pair of inputs come to them.
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
template <class Weights, int R>
inline void add_pair(Floats (&low)[R], Floats (&high)[R], const uint8_t* weight, const Inputs& x, int64_t row, int64_t pair) {
    Pairs first, second;
    Weights::read(weight, first, second);
    for (int r = 0; r < R; r++) {
        Words both = everywhere(x.halves + (row + r) * x.stride + 2 * pair);
        low[r] = pairs(low[r], first, both);
        high[r] = pairs(high[r], second, both);
    }
}
#else
// Of one input of the pair. Its weights alone are widened: sixteen registers hold them, the sums of six rows, an input, and
// nothing else.
template <class Weights, int HALF, int R>
inline void add_half(Floats (&low)[R], Floats (&high)[R], const uint8_t* weight, const float* input, int64_t stride) {
    Pairs first, second;
    Weights::read(read_anew(weight), first, second);
    const Floats one = HALF ? first.other : first.one, other = HALF ? second.other : second.one;
    #pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
        const Floats x = all(input[r * stride + HALF]);
        low[r] = add_product(low[r], one, x);
        high[r] = add_product(high[r], other, x);
    }
}

template <class Weights, int R>
inline void add_pair(Floats (&low)[R], Floats (&high)[R], const uint8_t* weight, const Inputs& x, int64_t row, int64_t pair) {
    const float* input = &x.wide[row * x.inner + 2 * pair];
    add_half<Weights, 0>(low, high, weight, input, x.inner);
    add_half<Weights, 1>(low, high, weight, input, x.inner);
}
#endif

// Which share of the next group's weights a block asks for, where several blocks read the same group: memory is not idle
// while all but the first find theirs in the second cache.
struct Share {
    int64_t which, of;  // of 1: it asks for what it reads itself, a little in advance
    bool alone;         // nobody else reads that, soon

    // Of one of so many blocks. first: nobody has asked for the group that it reads.
    static Share part(const Op& op, int64_t which, int64_t of, bool first) {
        const bool alone = of == 1 && !op.again;
        return first && !which ? Share{0, 1, alone} : Share{which, of, alone};
    }
};

// Rows `row` to `row + R` of the block, and groups `group` to `group + S` beside one another: few sums wait for themselves. The
// order of a sum knows neither R nor S.
template <class Weights, int R, int S>
void product_block(const Op& op, const Inputs& x, int64_t group, int64_t begin, int64_t row, Share share) {
    constexpr int64_t SOON = S == 1 ? AHEAD : AHEAD / 2 / S;
    const int64_t pairs = op.inner / 2, size = pairs * Weights::BYTES;
    const uint8_t* weight = (const uint8_t*)op.weight + group * size;
    Floats low[S][R] = {}, high[S][R] = {};
    auto add = [&]<int LINES, int HOW>(std::integral_constant<int, LINES>, std::integral_constant<int, HOW>, int64_t pair,
                                       int64_t last, const uint8_t* soon, int64_t step) {
        for (; pair < last; pair++, weight += Weights::BYTES, soon += step)
            #pragma GCC unroll 4
            for (int s = 0; s < S; s++) {
                for (int line = 0; line < LINES; line++) __builtin_prefetch(soon + s * size + 64 * line, 0, HOW);
                add_pair<Weights>(low[s], high[s], weight + s * size, x, row, pair);
            }
    };
    const int64_t near = S == 1 ? pairs : std::max<int64_t>(0, pairs - SOON / Weights::BYTES);
    const std::integral_constant<int, 1> line;
    const std::integral_constant<int, (Weights::BYTES + 63) / 64> lines;
    const std::integral_constant<int, AGAIN> again;
    auto add_own = [&](auto how) {
        add(lines, how, 0, near, weight + SOON, Weights::BYTES);
        add(lines, how, near, pairs, weight + SOON + (S - 1) * size, Weights::BYTES);  // what comes next is of the next groups
    };
    if (share.of > 1)
        add(line, again, 0, pairs, weight + size + size / share.of * share.which, (Weights::BYTES + share.of - 1) / share.of);
    else if (share.alone)
        add_own(std::integral_constant<int, ONCE>());
    else
        add_own(again);
    for (int s = 0; s < S; s++)
        for (int r = 0; r < R; r++) {
            const float* scales = op.scales + (group + s) * GROUP;
            if (Weights::SCALED) low[s][r] *= load(scales), high[s][r] *= load(scales + LANES);
            finish(op, begin + row + r, group + s, low[s][r], high[s][r]);
        }
}

// Of `rows` rows from `begin` on, which `x` holds. first: nobody has asked for this group's weights.
template <class Weights>
void product_group(const Op& op, const Inputs& x, int64_t group, int64_t begin, int64_t rows, bool first) {
    constexpr void (*blocks[])(const Op&, const Inputs&, int64_t, int64_t, int64_t, Share) = {
        nullptr, product_block<Weights, 1, 1>, product_block<Weights, 2, 1>, product_block<Weights, 3, 1>,
        product_block<Weights, 4, 1>, product_block<Weights, 5, 1>, product_block<Weights, 6, 1>, product_block<Weights, 7, 1>,
        product_block<Weights, 8, 1>, product_block<Weights, 9, 1>, product_block<Weights, 10, 1>,
        product_block<Weights, 11, 1>, product_block<Weights, 12, 1>};
    int64_t parts = (rows + BLOCK - 1) / BLOCK;  // about equally long
    for (int64_t part = 0; part < parts; part++) {
        int64_t row = rows * part / parts;
        blocks[rows * (part + 1) / parts - row](op, x, group, begin, row, Share::part(op, part, parts, first));
    }
}

// R rows and the groups up to `last`, S at a time. Returns the first that is left.
template <class Weights, int R, int S>
int64_t product_beside(const Op& op, const Inputs& x, int64_t group, int64_t last, int64_t begin) {
    if constexpr (S > 1)
        for (; group + S <= last; group += S) product_block<Weights, R, S>(op, x, group, begin, 0, Share::part(op, 0, 1, true));
    return group;
}

#if defined(__AMX_BF16__)
template <class Weights>
void tile_product(const Op& op, int64_t first, int64_t last, int64_t rows) {
    typedef std::conditional_t<Weights::SCALED, Widened, Halved> Pages;
    if (!rows) return;
    const int64_t pairs = op.inner / 2, stride = 2 * op.in_stride, blocks = (rows + 2 * SIDE - 1) / (2 * SIDE);
    const int64_t size = pairs * Weights::BYTES;
    const int64_t part = (Pages::BYTES / blocks + 63) / 64 * 64;  // of the next group, which all blocks of this one ask for
    alignas(64) float sums[2 * SIDE * GROUP];
    Tiles tiles;
    for (int64_t group = first; group < last; group++) {
        const uint8_t* weight = (const uint8_t*)op.weight + group * size;
        for (int64_t row = 0; row < rows; row += 2 * SIDE) {
            int64_t count = std::min<int64_t>(rows - row, 2 * SIDE), one = std::min<int64_t>(count, SIDE);
            const bf16* x = (const bf16*)op.in + row * op.in_stride;
            tiles.hold(one, count - one);
            const bool alone = blocks == 1 || (group == first && !row);
            const uint8_t* soon = weight + (alone ? AHEAD : size + row / (2 * SIDE) * part * (op.inner / DEEP));
            (count > one ? sum_tiles<Pages, true> : sum_tiles<Pages, false>)(weight, op.inner / DEEP, x, stride, soon,
                                                                             alone ? Pages::BYTES : part, sums);
            for (int64_t r = 0; r < count; r++) {
                Floats low = load(sums + r * GROUP), high = load(sums + r * GROUP + LANES);
                const float* scales = op.scales + group * GROUP;
                if (Weights::SCALED) low *= load(scales), high *= load(scales + LANES);
                finish(op, row + r, group, low, high);
            }
        }
    }
}
#endif

#if defined(__AVX512VNNI__)
constexpr int ROUNDED = 6;  // rows of whole numbers that are computed together, as registers hold

// Rows `row` to `row + R` of those that `x` holds.
template <int R>
void number_block(const Op& op, const Numbers& x, int64_t group, int64_t begin, int64_t row, Share share) {
    const int64_t size = whole_size(op.inner);
    const uint8_t* weight = (const uint8_t*)op.weight + group * size;
    const uint8_t* soon = share.of > 1 ? weight + size + size / share.of * share.which : weight + AHEAD;
    const int64_t step = QUADS / share.of;
    const uint32_t* numbers = &x.halves[2 * row];
    Words low[R][2] = {}, high[R][2] = {};
    auto add = [&]<int HOW>(std::integral_constant<int, HOW>) {
        for (int64_t quad = 0; quad < x.quads; quad++, weight += QUADS, soon += step, numbers += 2 * x.rows) {
            __builtin_prefetch(soon, 0, HOW), __builtin_prefetch(soon + 64, 0, HOW);
            const Words one = words_at(weight), other = words_at(weight + QUADS / 2);
            for (int r = 0; r < R; r++) {
                const Words lower = Words{} + numbers[2 * r];
                low[r][0] = fourfold(low[r][0], one, lower), low[r][1] = fourfold(low[r][1], other, lower);
                const Words upper = Words{} + numbers[2 * r + 1];
                high[r][0] = fourfold(high[r][0], one, upper), high[r][1] = fourfold(high[r][1], other, upper);
            }
        }
    };
    if (share.alone)
        add(std::integral_constant<int, ONCE>());
    else
        add(std::integral_constant<int, AGAIN>());
    for (int r = 0; r < R; r++) {
        const int32_t* more = &x.sums[2 * (row + r)];
        auto sum = [&](int i) {  // weights are HIGH more than they are
            const Ints lower = (Ints)low[r][i] - HIGH * more[0], upper = (Ints)high[r][i] - HIGH * more[1];
            const Floats whole = fma(__builtin_convertvector(upper, Floats), all(HIGH), __builtin_convertvector(lower, Floats));
            return whole * all(x.unit[row + r]) * load(op.scales + group * GROUP + i * LANES);
        };
        finish(op, begin + row + r, group, sum(0), sum(1));
    }
}

template <int... R>
constexpr auto number_blocks(std::integer_sequence<int, R...>) { return std::array{&number_block<R + 1>...}; }

void number_product(const Op& op, int64_t first, int64_t last, int64_t rows, Scratch& scratch) {
    static constexpr auto blocks = number_blocks(std::make_integer_sequence<int, ROUNDED>());
    constexpr int64_t SOME = 16 * ROUNDED;  // rows whose numbers stay in the second cache
    for (int64_t begin = 0; begin < rows; begin += SOME) {
        const int64_t count = std::min(rows - begin, SOME), parts = (count + ROUNDED - 1) / ROUNDED;
        const bf16* x = (const bf16*)op.in + begin * op.in_stride;
        if (std::exchange(scratch.widened, x) != x) scratch.numbers.take(x, count, op.in_stride, op.inner);
        for (int64_t group = first; group < last; group++)
            for (int64_t part = 0; part < parts; part++) {
                const int64_t row = count * part / parts;
                blocks[count * (part + 1) / parts - row - 1](op, scratch.numbers, group, begin, row,
                                                            Share::part(op, part, parts, group == first));
            }
    }
}
#endif

template <class Weights>
void product(const Op& op, int64_t first, int64_t last, int64_t rows, Scratch& scratch) {
#if defined(__AMX_BF16__)
    if (op.inner % DEEP == 0) return tile_product<Weights>(op, first, last, rows);
#endif
#if defined(__AVX512VNNI__)
    if constexpr (Weights::SCALED) return number_product(op, first, last, rows, scratch);
#endif
    int64_t slabs = (rows + SLAB - 1) / SLAB;
    for (int64_t slab = 0; slab < slabs; slab++) {
        int64_t begin = rows * slab / slabs, count = rows * (slab + 1) / slabs - begin, group = first;
        Inputs x(op, begin, count, scratch);
        if (count == 1) group = product_beside<Weights, 1, BESIDE>(op, x, group, last, begin);
        if (count == 2) group = product_beside<Weights, 2, BESIDE / 2>(op, x, group, last, begin);
        for (int64_t next = group; next < last; next++) product_group<Weights>(op, x, next, begin, count, next == group);
    }
}

}  // namespace
