// Matrix products: rows of bfloat16 times packed weights (bfloat16, or int8 with a scale for each output), GROUP
// outputs at a time. Sums are float32, or exact integers for int8 on VNNI; the epilogue adds a bias, adds to the
// residual stream, or gates by SiLU. Rules: those of `kernels.cpp`: each sum is taken in an order that depends on
// its own row alone, however many rows are computed together.

#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "op.h"
#include "quantized_rows.h"
#include "tiles.h"
#include "vectors.h"

namespace {

constexpr int GROUP = 2 * LANES;  // outputs of a product that are computed together
constexpr int PRODUCT_ROWS = LANES == 8 ? 6 : 12;  // rows that are computed together, at most: as registers allow
// groups that are computed at the same time for one row; half as many for two
constexpr int GROUPS_TOGETHER = LANES == 16 ? 1 : 4;
// The first part of each thread is three quarters of its share: a new part finds none of its weights prefetched. The others are
// for whichever thread is free first.
constexpr int PARTS_PER_THREAD = 8;
// rows whose inputs are widened together: they stay in the L2 cache
constexpr int SLAB_ROWS = HAS_BF16_DOT ? 1 << 30 : 8 * PRODUCT_ROWS;
constexpr int PREFETCH_BYTES = 8192;  // how far ahead weights are prefetched: about the latency of memory
constexpr int INTO_L2 = 1;            // locality of prefetches: into the L2 cache
// locality for weights that are read once: NTA leaves an AMD's caches to other work; an Intel loses such lines before they are read
constexpr int STREAMED = HAS_BF16_DOT ? 0 : INTO_L2;
constexpr int PAIR_BYTES = 2 * GROUP;  // int8 weights of a pair of inputs for a group of outputs
constexpr int QUAD_BYTES = 4 * GROUP;  // of four inputs

int64_t groups_of(const Op& op) { return (op.outer * (op.result == SILU ? 2 : 1) + GROUP - 1) / GROUP; }

// The first group of a product's part; for part `parts`: the end of the last one.
int64_t first_group(int64_t groups, int64_t part, int64_t parts) {
    if (groups < 4 * parts || parts < PARTS_PER_THREAD) return groups * part / parts;
    int64_t threads = parts / PARTS_PER_THREAD, large = groups * 3 / 4;
    return part <= threads ? large * part / threads : large + (groups - large) * (part - threads) / (parts - threads);
}

void epilogue(const Op& op, int64_t row, int64_t group, Floats low, Floats high) {
    if (op.extra) {
        low += load((const float*)op.extra + group * GROUP);
        high += load((const float*)op.extra + group * GROUP + LANES);
    }
    if (op.result == SILU) {  // low: gates; high: what they gate
        Floats down = exponential((Floats)((Words)low | 0x80000000u));  // e^-|gate|
        Floats one = splat(1.0f);
        Words negative = (Words)(low < Floats{});
        Floats top = (Floats)(((Words)down & negative) | ((Words)one & ~negative));
        store_bf16((bf16*)op.out + row * op.out_stride + group * LANES, low * (top / (one + down)) * high);
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

struct Bf16Weights {
    static constexpr int BYTES = 2 * PAIR_BYTES;
    static constexpr bool SCALED = false;
    static void read(const uint8_t* weight, Pairs& first, Pairs& second) {
        first = to_pairs(load_words(weight)), second = to_pairs(load_words(weight + PAIR_BYTES));
    }
};

#if defined(__AVX512VNNI__)
// Where the weight of input k for output i of a group is, and how a byte holds it: RADIX is added, so it has no sign.
constexpr int64_t int8_index(int64_t i, int64_t k) { return k / 4 * QUAD_BYTES + 4 * i + k % 4; }
constexpr int64_t int8_group_bytes(int64_t inner) { return (inner + 3) / 4 * QUAD_BYTES; }
inline uint8_t encode_int8(int8_t number) { return uint8_t(number + RADIX); }
#else
constexpr int64_t int8_index(int64_t i, int64_t k) { return k / 2 * PAIR_BYTES + int8_line_index(int(i), k % 2); }
constexpr int64_t int8_group_bytes(int64_t inner) { return inner / 2 * PAIR_BYTES; }
inline uint8_t encode_int8(int8_t number) { return int8_line_byte(number); }
#endif

struct Int8Weights {
    static constexpr int BYTES = PAIR_BYTES;
    static constexpr bool SCALED = true;
    static void read(const uint8_t* weight, Pairs& first, Pairs& second) { int8_line_to_pairs(weight, first, second); }
};

// A thread's memory for intermediate results of an operation.
struct Scratch {
    std::vector<float> floats;
    const bf16* widened = nullptr;  // the rows whose inputs are widened in `floats` (or quantized), in this operation
#if defined(__AVX512VNNI__)
    QuantizedRows numbers;
#endif
};

// The inputs of some rows: bfloat16 where pairs of them are multiplied, else widened to float32; only once for all parts of
// a thread if one slab holds all rows.
struct Inputs {
    const bf16* halves;
    int64_t stride;
    std::vector<float>& wide;  // [rows, inner]
    int64_t inner;

    Inputs(const Op& op, int64_t row, int64_t rows, Scratch& scratch)
        : halves((const bf16*)op.in + row * op.in_stride), stride(op.in_stride), wide(scratch.floats), inner(op.inner) {
        if (HAS_BF16_DOT || std::exchange(scratch.widened, halves) == halves) return;
        if (int64_t(wide.size()) < rows * inner) wide.resize(rows * inner);
        for (int64_t r = 0; r < rows; r++) {
            const bf16* x = halves + r * stride;
            float* to = &wide[r * inner];
            int64_t i = 0;
            for (; i + LANES <= inner; i += LANES) store(to + i, load_bf16(x + i));
            for (; i < inner; i++) to[i] = std::bit_cast<float>(uint32_t(x[i]) << 16);
        }
    }
};

// Adds the products of one pair of inputs to the sums of R rows from `row` on, for the outputs of a group.
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
template <class Weights, int R>
inline void add_pair(Floats (&low)[R], Floats (&high)[R], const uint8_t* weight, const Inputs& x, int64_t row, int64_t pair) {
    Pairs first, second;
    Weights::read(weight, first, second);
    for (int r = 0; r < R; r++) {
        Words both = load_splat(x.halves + (row + r) * x.stride + 2 * pair);
        low[r] = dot_pairs(low[r], first, both);
        high[r] = dot_pairs(high[r], second, both);
    }
}
#else
// The same for one input of the pair. Only its weights are widened: sixteen registers hold them, the sums of six rows and an
// input, and no more.
template <class Weights, int HALF, int R>
inline void add_half(Floats (&low)[R], Floats (&high)[R], const uint8_t* weight, const float* input, int64_t stride) {
    Pairs first, second;
    Weights::read(opaque(weight), first, second);
    const Floats one = HALF ? first.odd : first.even, other = HALF ? second.odd : second.even;
    #pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
        const Floats x = splat(input[r * stride + HALF]);
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

// Which share of the next group's weights a block prefetches, if several blocks read the same group: memory is not idle while
// all but the first block find theirs in the L2 cache.
struct PrefetchShare {
    int64_t which, of;  // of == 1: it prefetches what it reads itself, PREFETCH_BYTES ahead
    bool alone;         // nothing else reads these weights soon

    // The share of block `which` of `of`. first: the group that it reads was not prefetched.
    static PrefetchShare part(const Op& op, int64_t which, int64_t of, bool first) {
        const bool alone = of == 1 && !op.keep_cached;
        return first && !which ? PrefetchShare{0, 1, alone} : PrefetchShare{which, of, alone};
    }
};

// Rows `row` to `row + R` and groups `group` to `group + S`: with many independent sums few instructions wait for earlier ones.
// The order of a sum depends neither on R nor on S.
template <class Weights, int R, int S>
void product_block(const Op& op, const Inputs& x, int64_t group, int64_t begin, int64_t row, PrefetchShare prefetch) {
    constexpr int64_t DISTANCE = S == 1 ? PREFETCH_BYTES : PREFETCH_BYTES / 2 / S;
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
    const int64_t near = S == 1 ? pairs : std::max<int64_t>(0, pairs - DISTANCE / Weights::BYTES);
    const std::integral_constant<int, 1> line;
    const std::integral_constant<int, (Weights::BYTES + 63) / 64> lines;
    const std::integral_constant<int, INTO_L2> again;
    auto add_own = [&](auto how) {
        add(lines, how, 0, near, weight + DISTANCE, Weights::BYTES);
        // what follows belongs to the next groups
        add(lines, how, near, pairs, weight + DISTANCE + (S - 1) * size, Weights::BYTES);
    };
    if (prefetch.of > 1)
        add(line, again, 0, pairs, weight + size + size / prefetch.of * prefetch.which,
                (Weights::BYTES + prefetch.of - 1) / prefetch.of);
    else if (prefetch.alone)
        add_own(std::integral_constant<int, STREAMED>());
    else
        add_own(again);
    for (int s = 0; s < S; s++)
        for (int r = 0; r < R; r++) {
            const float* scales = op.scales + (group + s) * GROUP;
            if (Weights::SCALED) low[s][r] *= load(scales), high[s][r] *= load(scales + LANES);
            epilogue(op, begin + row + r, group + s, low[s][r], high[s][r]);
        }
}

// One group for `rows` rows from `begin` on, whose inputs are `x`. first: this group's weights were not prefetched.
template <class Weights>
void product_group(const Op& op, const Inputs& x, int64_t group, int64_t begin, int64_t rows, bool first) {
    constexpr void (*blocks[])(const Op&, const Inputs&, int64_t, int64_t, int64_t, PrefetchShare) = {
        nullptr, product_block<Weights, 1, 1>, product_block<Weights, 2, 1>, product_block<Weights, 3, 1>,
        product_block<Weights, 4, 1>, product_block<Weights, 5, 1>, product_block<Weights, 6, 1>, product_block<Weights, 7, 1>,
        product_block<Weights, 8, 1>, product_block<Weights, 9, 1>, product_block<Weights, 10, 1>,
        product_block<Weights, 11, 1>, product_block<Weights, 12, 1>};
    int64_t parts = (rows + PRODUCT_ROWS - 1) / PRODUCT_ROWS;  // about equal in size
    for (int64_t part = 0; part < parts; part++) {
        int64_t row = rows * part / parts;
        blocks[rows * (part + 1) / parts - row](op, x, group, begin, row, PrefetchShare::part(op, part, parts, first));
    }
}

// R rows and the groups up to `last`, S at a time. Returns the first group that is left.
template <class Weights, int R, int S>
int64_t product_few_rows(const Op& op, const Inputs& x, int64_t group, int64_t last, int64_t begin) {
    if constexpr (S > 1)
        for (; group + S <= last; group += S) product_block<Weights, R,
                S>(op, x, group, begin, 0, PrefetchShare::part(op, 0, 1, true));
    return group;
}

#if defined(__AMX_BF16__)
template <class Weights>
void tile_product(const Op& op, int64_t first, int64_t last, int64_t rows) {
    typedef std::conditional_t<Weights::SCALED, WidenedInt8Pages, Bf16Pages> Pages;
    if (!rows) return;
    const int64_t pairs = op.inner / 2, stride = 2 * op.in_stride, blocks = (rows + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS);
    const int64_t size = pairs * Weights::BYTES;
    const int64_t part = (Pages::BYTES / blocks + 63) / 64 * 64;  // share of the next group that each block prefetches
    alignas(64) float sums[2 * TILE_ROWS * GROUP];
    Tiles tiles;
    for (int64_t group = first; group < last; group++) {
        const uint8_t* weight = (const uint8_t*)op.weight + group * size;
        for (int64_t row = 0; row < rows; row += 2 * TILE_ROWS) {
            int64_t count = std::min<int64_t>(rows - row, 2 * TILE_ROWS), one = std::min<int64_t>(count, TILE_ROWS);
            const bf16* x = (const bf16*)op.in + row * op.in_stride;
            tiles.configure(one, count - one);
            const bool alone = blocks == 1 || (group == first && !row);
            const uint8_t* soon = weight + (alone ? PREFETCH_BYTES : size + row / (2 * TILE_ROWS) * part * (op.inner / TILE_DEPTH));
            (count > one ? sum_tiles<Pages, true> : sum_tiles<Pages, false>)(weight, op.inner / TILE_DEPTH, x, stride, soon,
                                                                             alone ? Pages::BYTES : part, sums);
            for (int64_t r = 0; r < count; r++) {
                Floats low = load(sums + r * GROUP), high = load(sums + r * GROUP + LANES);
                const float* scales = op.scales + group * GROUP;
                if (Weights::SCALED) low *= load(scales), high *= load(scales + LANES);
                epilogue(op, row + r, group, low, high);
            }
        }
    }
}
#endif

#if defined(__AVX512VNNI__)
constexpr int INT8_ROWS = 6;  // quantized rows that are computed together, as registers allow

// Rows `row` to `row + R` of `x`.
template <int R>
void int8_block(const Op& op, const QuantizedRows& x, int64_t group, int64_t begin, int64_t row, PrefetchShare prefetch) {
    const int64_t size = int8_group_bytes(op.inner);
    const uint8_t* weight = (const uint8_t*)op.weight + group * size;
    const uint8_t* soon = prefetch.of > 1 ? weight + size + size / prefetch.of * prefetch.which : weight + PREFETCH_BYTES;
    const int64_t step = QUAD_BYTES / prefetch.of;
    const uint32_t* numbers = &x.digits[2 * row];
    Words low[R][2] = {}, high[R][2] = {};
    auto add = [&]<int HOW>(std::integral_constant<int, HOW>) {
        for (int64_t quad = 0; quad < x.quads; quad++, weight += QUAD_BYTES, soon += step, numbers += 2 * x.rows) {
            __builtin_prefetch(soon, 0, HOW), __builtin_prefetch(soon + 64, 0, HOW);
            const Words one = load_words(weight), other = load_words(weight + QUAD_BYTES / 2);
            for (int r = 0; r < R; r++) {
                const Words lower = Words{} + numbers[2 * r];
                low[r][0] = dot_int8_quads(low[r][0], one, lower), low[r][1] = dot_int8_quads(low[r][1], other, lower);
                const Words upper = Words{} + numbers[2 * r + 1];
                high[r][0] = dot_int8_quads(high[r][0], one, upper), high[r][1] = dot_int8_quads(high[r][1], other, upper);
            }
        }
    };
    if (prefetch.alone)
        add(std::integral_constant<int, STREAMED>());
    else
        add(std::integral_constant<int, INTO_L2>());
    for (int r = 0; r < R; r++) {
        const int32_t* digit_sums = &x.digit_sums[2 * (row + r)];
        auto sum = [&](int i) {  // RADIX was added to weights
            const Ints lower = (Ints)low[r][i] - RADIX * digit_sums[0], upper = (Ints)high[r][i] - RADIX * digit_sums[1];
            const Floats whole = fma(__builtin_convertvector(upper, Floats), splat(RADIX), __builtin_convertvector(lower, Floats));
            return whole * splat(x.scale[row + r]) * load(op.scales + group * GROUP + i * LANES);
        };
        epilogue(op, begin + row + r, group, sum(0), sum(1));
    }
}

template <int... R>
constexpr auto int8_blocks(std::integer_sequence<int, R...>) { return std::array{&int8_block<R + 1>...}; }

void int8_product(const Op& op, int64_t first, int64_t last, int64_t rows, Scratch& scratch) {
    static constexpr auto blocks = int8_blocks(std::make_integer_sequence<int, INT8_ROWS>());
    constexpr int64_t SOME = 16 * INT8_ROWS;  // rows whose integers stay in the L2 cache
    for (int64_t begin = 0; begin < rows; begin += SOME) {
        const int64_t count = std::min(rows - begin, SOME), parts = (count + INT8_ROWS - 1) / INT8_ROWS;
        const bf16* x = (const bf16*)op.in + begin * op.in_stride;
        if (std::exchange(scratch.widened, x) != x) scratch.numbers.quantize(x, count, op.in_stride, op.inner);
        for (int64_t group = first; group < last; group++)
            for (int64_t part = 0; part < parts; part++) {
                const int64_t row = count * part / parts;
                blocks[count * (part + 1) / parts - row - 1](op, scratch.numbers, group, begin, row,
                                                            PrefetchShare::part(op, part, parts, group == first));
            }
    }
}
#endif

template <class Weights>
void product(const Op& op, int64_t first, int64_t last, int64_t rows, Scratch& scratch) {
#if defined(__AMX_BF16__)
    if (op.inner % TILE_DEPTH == 0) return tile_product<Weights>(op, first, last, rows);
#endif
#if defined(__AVX512VNNI__)
    if constexpr (Weights::SCALED) return int8_product(op, first, last, rows, scratch);
#endif
    int64_t slabs = (rows + SLAB_ROWS - 1) / SLAB_ROWS;
    for (int64_t slab = 0; slab < slabs; slab++) {
        int64_t begin = rows * slab / slabs, count = rows * (slab + 1) / slabs - begin, group = first;
        Inputs x(op, begin, count, scratch);
        if (count == 1) group = product_few_rows<Weights, 1, GROUPS_TOGETHER>(op, x, group, last, begin);
        if (count == 2) group = product_few_rows<Weights, 2, GROUPS_TOGETHER / 2>(op, x, group, last, begin);
        for (int64_t next = group; next < last; next++) product_group<Weights>(op, x, next, begin, count, next == group);
    }
}

}  // namespace
