// The greatest output of a product without reading most of its weights: all outputs are bounded with weights of 8 bits, and only
// those that could be the greatest are computed exactly.
//
// Rules:
// 1. The result is what `best_of` finds in the whole product, for every state: the error of an 8-bit output is bounded, not
//    estimated. By Cauchy and Schwarz it is at most |rounding error of the weights| * |state| + |rounded weights| * |rounding
//    error of the state|; the errors of float32 are added, also those of numbers too small for it.
// 2. For a state that is not finite, or too large, every output is computed exactly. For weights that are, there is no screen.
//
// It knows nothing about why only the greatest is wanted.

#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "list.h"
#include "products.h"

namespace {

// More than an output loses where float32 is below its normal numbers: it has fewer digits there, or is zero.
constexpr float LOST = 1e-30f;
constexpr float LARGE = 1e15f;  // products of numbers below are far from what float32 holds, and so are their sums

#if defined(__AVX512VNNI__)
// Four products of 8 bits and their sum are one instruction. Most numbers of a state have no more where the unit is no smaller
// than this share of their root mean square; the few others are a multiple of HIGH and a number of 8 bits.
constexpr float LEAST_UNIT = 3.0f / 127;
constexpr int SCREENED = 12;  // rows that are screened together, as registers hold
inline int8_t screened(int8_t weight) { return int8_t(weight + HIGH); }  // and no sign
#else
constexpr float LEAST_UNIT = 0;
constexpr int SCREENED = LANES == 8 ? 3 : 6;
inline int8_t screened(int8_t weight) { return weight; }
#endif

// A state as whole numbers of some 13 bits, two in a word, times `scale`.
struct Rounded {
    std::vector<uint32_t> pairs;
    float scale = 0, length = INFINITY, missed = INFINITY;  // of the state, and of what rounding took from it, at most
    float* outputs = nullptr;  // what each is not above, for who draws; null: nobody does
#if defined(__AVX512VNNI__)
    std::vector<int8_t> low, high;  // number = HIGH * high + low
    uint32_t sums[2] = {};          // of these
#endif

    Rounded(const bf16* x, int64_t inner) : pairs(inner / 2) {
#if defined(__AVX512VNNI__)
        low.resize(inner), high.resize(inner);
#endif
        // Sums of products with 127 fit 31 bits.
        const float limit = float(std::min<int64_t>(8191, (int64_t(1) << 31) / (128 * inner)));
        Floats greatest_of_lanes = {}, squares = {}, off = {}, magic = all(12582912.0f);  // adding it rounds
        for (int64_t i = 0; i < inner; i += LANES) {
            Floats v = widen(x + i);
            greatest_of_lanes = greater((Floats)((Words)v & 0x7fffffffu), greatest_of_lanes);
        }
        float unit = greatest(greatest_of_lanes) / limit;
        if (!(unit > LOST && unit < LARGE)) return;
        if (LEAST_UNIT > 0) {
            for (int64_t i = 0; i < inner; i += LANES) squares = fma(widen(x + i), widen(x + i), squares);
            unit = std::max(unit, LEAST_UNIT * std::sqrt(total(squares) / float(inner)));
            if (!(unit < LARGE)) return;
            squares = Floats{};
        }
        for (int64_t i = 0; i < inner; i += LANES) {
            Floats v = widen(x + i) * all(1 / unit), whole = (v + magic) - magic;
            squares += v * v, off += (v - whole) * (v - whole);
            typedef int16_t Halfs __attribute__((vector_size(2 * LANES)));
            Halfs numbers = __builtin_convertvector(__builtin_convertvector(whole, Ints), Halfs);
            memcpy((int16_t*)pairs.data() + i, &numbers, sizeof numbers);
        }
        const float sum = total(squares);
        if (!(sum < 1e30f)) return;
        // Float32 has v itself to a 2^23rd, of 8191 at most.
        const float error = 0.002f * std::sqrt(float(inner));
        scale = unit, length = (std::sqrt(sum) * 1.0001f + error) * unit;
        missed = (std::sqrt(total(off)) * 1.0001f + error) * unit;
#if defined(__AVX512VNNI__)
        const int16_t* numbers = (const int16_t*)pairs.data();
        for (int64_t i = 0; i < inner; i++) {
            high[i] = int8_t(std::abs(numbers[i]) < HIGH ? 0 : (numbers[i] + HIGH / 2) >> 7);
            low[i] = int8_t(numbers[i] - HIGH * high[i]);
            sums[0] += low[i], sums[1] += high[i];
        }
#endif
    }
};

// Of a group's sums of whole numbers: what none of its outputs is above, and each is not above, where that is asked.
float most_of(const Op& op, int64_t group, const Rounded& state, Ints low, Ints high) {
    const int64_t outputs = groups_of(op) * GROUP;  // `make_screen` says what is read of each
    auto bound = [&](Ints sums, const float* of) {
        Floats about = __builtin_convertvector(sums, Floats) * (load(of) * all(state.scale));
        Floats most = about + (load(of + outputs) * all(state.length) + load(of + 2 * outputs) * all(state.missed)) + all(LOST);
        Words none = (Words)(most != most);
        return (Floats)(((Words)most & ~none) | ((Words)all(INFINITY) & none));
    };
    const Floats one = bound(low, op.scales + group * GROUP), other = bound(high, op.scales + group * GROUP + LANES);
    if (state.outputs) store(state.outputs + group * GROUP, one), store(state.outputs + group * GROUP + LANES, other);
    return greatest(greater(one, other));
}

#if defined(__AVX512VNNI__)
// Rows `row` to `row + R`. large: the quads where one of them has a number of more than 8 bits.
template <int R>
void screen_block(const Op& op, const std::vector<Rounded>& states, int64_t group, int64_t row, const std::vector<int64_t>& large) {
    const uint8_t* weight = (const uint8_t*)op.weight + group * GROUP * op.inner;
    auto add = [&](Words (&sums)[R][2], int64_t quad, std::vector<int8_t> Rounded::* numbers) {
        const Words one = words_at(weight + quad * QUADS), other = words_at(weight + quad * QUADS + QUADS / 2);
        for (int r = 0; r < R; r++) {
            const Words four = everywhere(&(states[row + r].*numbers)[4 * quad]);
            sums[r][0] = fourfold(sums[r][0], one, four), sums[r][1] = fourfold(sums[r][1], other, four);
        }
    };
    Words low[R][2] = {}, high[R][2] = {};
    for (int64_t quad = 0; quad < op.inner / 4; quad++) {
        for (int line = 0; line < QUADS; line += 64) __builtin_prefetch(weight + quad * QUADS + AHEAD / 2 + line, 0, ONCE);
        add(low, quad, &Rounded::low);
    }
    for (int64_t quad : large) add(high, quad, &Rounded::high);
    for (int r = 0; r < R; r++) {
        const Rounded& state = states[row + r];
        auto whole = [&](int i) {  // weights are 128 more than they are
            return (Ints)(low[r][i] - 128 * state.sums[0] + HIGH * (high[r][i] - 128 * state.sums[1]));
        };
        ((float*)op.out + (row + r) * op.out_stride)[group] = most_of(op, group, state, whole(0), whole(1));
    }
}

std::vector<int64_t> large_quads(const std::vector<Rounded>& states, int64_t row, int64_t end, int64_t inner) {
    std::vector<int64_t> found;
    for (int64_t quad = 0; quad < inner / 4; quad++) {
        uint32_t any = 0, four;
        for (int64_t r = row; r < end; r++) memcpy(&four, &states[r].high[4 * quad], sizeof four), any |= four;
        if (any) found.push_back(quad);
    }
    return found;
}
#else
template <int... I>
inline Ints of_halves(Ints a, Ints b, std::integer_sequence<int, I...>) {  // lanes 2 i and 2 i + 1 of both, added
    return __builtin_shufflevector(a, b, (2 * I)...) + __builtin_shufflevector(a, b, (2 * I + 1)...);
}

// Rows `row` to `row + R`.
template <int R>
void screen_block(const Op& op, const std::vector<Rounded>& states, int64_t group, int64_t row, const std::vector<int64_t>&) {
    typedef uint64_t Longs __attribute__((vector_size(4 * LANES)));
    const uint8_t* weight = (const uint8_t*)op.weight + group * GROUP * op.inner;
    Ints sums[R][4] = {};  // two beside one another for each output
#pragma GCC unroll 4
    for (int64_t quad = 0; quad < op.inner / 4; quad++, weight += QUADS) {
        for (int line = 0; line < QUADS; line += 64) __builtin_prefetch(weight + AHEAD / 2 + line, 0, ONCE);
        Ints numbers[4];
        for (int i = 0; i < 4; i++) numbers[i] = bytes_at(weight + i * QUADS / 4);
        for (int r = 0; r < R; r++) {
            uint64_t four;
            memcpy(&four, &states[row + r].pairs[2 * quad], sizeof four);
            for (int i = 0; i < 4; i++) sums[r][i] += twofold(numbers[i], (Ints)(Longs{} + four));
        }
    }
    auto whole = [](Ints a, Ints b) { return of_halves(a, b, std::make_integer_sequence<int, LANES>()); };
    for (int r = 0; r < R; r++)
        ((float*)op.out + (row + r) * op.out_stride)[group] =
            most_of(op, group, states[row + r], whole(sums[r][0], sums[r][1]), whole(sums[r][2], sums[r][3]));
}

std::vector<int64_t> large_quads(const std::vector<Rounded>&, int64_t, int64_t, int64_t) { return {}; }
#endif

#if defined(__AMX_BF16__)
constexpr int TILED = 3;   // rows from which tiles are faster

// As `screen_block`, of all rows: the two numbers of each stand in two rows of a tile.
void tile_screen(const Op& op, const std::vector<Rounded>& states, int64_t first, int64_t last) {
    const int64_t rows = int64_t(states.size()), size = op.inner * GROUP;
    std::vector<int8_t> halves(2 * rows * op.inner);
    for (int64_t row = 0; row < rows; row++) {
        const int16_t* numbers = (const int16_t*)states[row].pairs.data();
        int8_t *high = &halves[2 * row * op.inner], *low = high + op.inner;
        for (int64_t i = 0; i < op.inner; i++)
            high[i] = int8_t((numbers[i] + HIGH / 2) >> 7), low[i] = int8_t(numbers[i] - HIGH * high[i]);
    }
    alignas(64) int32_t sums[2 * SIDE * GROUP];
    Tiles tiles;
    for (int64_t group = first; group < last; group++) {
        const uint8_t* weight = (const uint8_t*)op.weight + group * size;
        for (int64_t row = 0; row < rows; row += SIDE) {
            const int64_t some = std::min<int64_t>(rows - row, SIDE), one = std::min<int64_t>(2 * some, SIDE);
            tiles.hold(one, 2 * some - one);
            (2 * some > one ? sum_tiles<Numbered, true> : sum_tiles<Numbered, false>)(
                weight, op.inner / (2 * DEEP), &halves[2 * row * op.inner], op.inner, weight + AHEAD,
                row ? 0 : Numbered::BYTES, sums);
            for (int64_t r = 0; r < some; r++) {
                const int32_t *high = sums + 2 * r * GROUP, *low = high + GROUP;
                auto sum = [&](int i) { return (Ints)(HIGH * words_at(high + i) + words_at(low + i)); };
                ((float*)op.out + (row + r) * op.out_stride)[group] =
                    most_of(op, group, states[row + r], sum(0), sum(LANES));
            }
        }
    }
}
#endif

template <int... R>
constexpr auto screen_blocks(std::integer_sequence<int, R...>) { return std::array{&screen_block<R + 1>...}; }

// draws: of the rows, or null.
void screen(const Op& op, int64_t first, int64_t last, int64_t rows, const Draw* draws) {
    static constexpr auto blocks = screen_blocks(std::make_integer_sequence<int, SCREENED>());
    std::vector<Rounded> states;
    for (int64_t row = 0; row < rows; row++) {
        states.emplace_back((const bf16*)op.in + row * op.in_stride, op.inner);
        if (draws && draws[row].heat != 0) states.back().outputs = (float*)op.extra + row * groups_of(op) * GROUP;
    }
#if defined(__AMX_BF16__)
    if (rows >= TILED && op.inner % (2 * DEEP) == 0) return tile_screen(op, states, first, last);
#endif
    int64_t parts = (rows + SCREENED - 1) / SCREENED;
    std::vector<std::vector<int64_t>> large;
    for (int64_t part = 0; part < parts; part++)
        large.push_back(large_quads(states, rows * part / parts, rows * (part + 1) / parts, op.inner));
    for (int64_t group = first; group < last; group++)
        for (int64_t part = 0; part < parts; part++) {
            int64_t row = rows * part / parts;
            blocks[rows * (part + 1) / parts - row - 1](op, states, group, row, large[part]);
        }
}

// The product of one row, so that single groups of its outputs can be computed: who takes it says where they go.
Op exact_row(const Op& op, int64_t row) {
    Op exact = op;
    exact.in = (const bf16*)op.in + row * op.in_stride, exact.scales = nullptr, exact.extra = nullptr;
    exact.result = STORE, exact.out_stride = 0;
    return exact;
}

// The column of a row's greatest output, the first among equals; the first that is no number, if one is none.
int64_t chosen(const Op& op, int64_t row, Scratch& scratch) {
    const float* most = op.scales + row * op.layer;
    const int64_t groups = groups_of(op);
    float sums[GROUP], top = -INFINITY;
    int64_t found = 0;
    Op exact = exact_row(op, row);
    auto look = [&](int64_t group) {  // false: at a number that is none, which is what is chosen
        exact.out = sums - group * GROUP;
        product<Halves>(exact, group, group + 1, 1, scratch);
        for (int64_t i = 0, column = group * GROUP; i < GROUP && column < op.outer; i++, column++) {
            if (sums[i] != sums[i]) return found = column, false;
            if (sums[i] > top || (sums[i] == top && column < found)) top = sums[i], found = column;
        }
        return true;
    };
    // What is likely the greatest tells of most others that they are not.
    int64_t likely = std::max_element(most, most + groups) - most;
    if (!std::isfinite(most[likely]) || !look(likely)) likely = -1, top = -INFINITY;
    for (int64_t group = 0; group < groups; group++)
        if (group != likely && (likely < 0 || most[group] >= top) && !look(group)) break;
    return found;
}

// Of packed bfloat16: whole numbers, four inputs side by side for a group of outputs. bounds: [3, outputs], to whole groups:
// what a number stands for, and how far an output may be off for a state of length 1 and for one unit of what rounding took
// from it. False: a weight is not finite, or too large.
bool make_screen(const bf16* packed, int64_t outer, int64_t inner, int8_t* numbers, float* bounds) {
    const double sums = double(inner + 8) * 0x1p-23;  // of float32, an output's and the screen's
    const int64_t groups = (outer + GROUP - 1) / GROUP, outputs = groups * GROUP;
    for (int64_t group = 0; group < groups; group++, packed += inner * GROUP, numbers += inner * GROUP)
        for (int64_t i = 0; i < GROUP; i++) {
            auto weight = [&](int64_t k) { return std::bit_cast<float>(uint32_t(packed[(k / 2 * GROUP + i) * 2 + k % 2]) << 16); };
            float most = 0;
            for (int64_t k = 0; k < inner; k++) {
                if (!(std::fabs(weight(k)) < LARGE)) return false;
                most = std::max(most, std::fabs(weight(k)));
            }
            const float scale = std::max(most / 127, std::numeric_limits<float>::min());
            double missed = 0, exact = 0, whole = 0;
            for (int64_t k = 0; k < inner; k++) {
                float number = std::clamp(std::nearbyint(weight(k) / scale), -127.0f, 127.0f);
                numbers[(k / 4 * GROUP + i) * 4 + k % 4] = screened(int8_t(number));
                double near = double(number) * scale;
                missed += (weight(k) - near) * (weight(k) - near);
                exact += double(weight(k)) * weight(k), whole += near * near;
            }
            const double off = std::sqrt(missed) + sums * (std::sqrt(exact) + std::sqrt(whole));
            float* bound = bounds + group * GROUP + i;
            bound[0] = scale;
            bound[outputs] = group * GROUP + i < outer ? float(off * 1.0001) + LOST : -INFINITY;  // what fills up is never it
            bound[2 * outputs] = float(std::sqrt(whole) * 1.0001) + LOST;
        }
    return true;
}

}  // namespace
