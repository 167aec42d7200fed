// The argmax of a product without reading most of its weights: all outputs are bounded from above with weights of 8
// bits, and only those that could be the greatest are computed exactly, by `products.h`.
//
// Rules:
// 1. The result is what `argmax` finds in the whole product, for every state: the error of an 8-bit output is
//    bounded, not estimated. By Cauchy and Schwarz it is at most |rounding error of the weights| * |state| +
//    |rounded weights| * |rounding error of the state|; the errors of float32 are added, also those below its normal
//    numbers.
// 2. For a state that is not finite, or too large, every output is computed exactly. For such weights there is no
//    screen.

#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "op.h"
#include "products.h"

namespace {

// More than an output loses where float32 is subnormal (it has fewer digits there) or zero.
constexpr float UNDERFLOW = 1e-30f;
constexpr float LARGE = 1e15f;  // products of smaller numbers, and their sums, are far from float32's limit

#if defined(__AVX512VNNI__)
// One instruction sums four products of 8 bits. If the unit is at least this share of a state's root mean square, most of its
// integers have no more than 8 bits; the few others are a multiple of RADIX and a number of 8 bits.
constexpr float LEAST_UNIT = 3.0f / 127;
constexpr int SCREEN_ROWS = 12;  // rows that are screened together, as registers allow
inline int8_t encode_screen_weight(int8_t weight) { return int8_t(weight + RADIX); }  // without a sign
#else
constexpr float LEAST_UNIT = 0;
constexpr int SCREEN_ROWS = LANES == 8 ? 3 : 6;
inline int8_t encode_screen_weight(int8_t weight) { return weight; }
#endif

// A state as integers of some 13 bits, two in a word, times `scale`.
struct QuantizedState {
    std::vector<uint32_t> pairs;
    float scale = 0, norm = INFINITY, error_norm = INFINITY;  // upper bounds of |state| and |rounding error|
    float* bounds_out = nullptr;  // gets an upper bound of each output, for sampled rows; else null
#if defined(__AVX512VNNI__)
    std::vector<int8_t> low, high;  // number = RADIX * high + low
    uint32_t sums[2] = {};          // of low, and of high
#endif

    QuantizedState(const bf16* x, int64_t inner) : pairs(inner / 2) {
#if defined(__AVX512VNNI__)
        low.resize(inner), high.resize(inner);
#endif
        // So sums of products with 127 fit in 31 bits.
        const float limit = float(std::min<int64_t>(8191, (int64_t(1) << 31) / (128 * inner)));
        Floats greatest_of_lanes = {}, squares = {}, off = {}, magic = splat(12582912.0f);  // adding it rounds
        for (int64_t i = 0; i < inner; i += LANES) {
            Floats v = load_bf16(x + i);
            greatest_of_lanes = maximum((Floats)((Words)v & 0x7fffffffu), greatest_of_lanes);
        }
        float unit = reduce_max(greatest_of_lanes) / limit;
        if (!(unit > UNDERFLOW && unit < LARGE)) return;
        if (LEAST_UNIT > 0) {
            for (int64_t i = 0; i < inner; i += LANES) squares = fma(load_bf16(x + i), load_bf16(x + i), squares);
            unit = std::max(unit, LEAST_UNIT * std::sqrt(reduce_add(squares) / float(inner)));
            if (!(unit < LARGE)) return;
            squares = Floats{};
        }
        for (int64_t i = 0; i < inner; i += LANES) {
            Floats v = load_bf16(x + i) * splat(1 / unit), whole = (v + magic) - magic;
            squares += v * v, off += (v - whole) * (v - whole);
            typedef int16_t Halfs __attribute__((vector_size(2 * LANES)));
            Halfs numbers = __builtin_convertvector(__builtin_convertvector(whole, Ints), Halfs);
            memcpy((int16_t*)pairs.data() + i, &numbers, sizeof numbers);
        }
        const float sum = reduce_add(squares);
        if (!(sum < 1e30f)) return;
        // v itself, at most 8191, has a relative error of 2^-23.
        const float error = 0.002f * std::sqrt(float(inner));
        scale = unit, norm = (std::sqrt(sum) * 1.0001f + error) * unit;
        error_norm = (std::sqrt(reduce_add(off)) * 1.0001f + error) * unit;
#if defined(__AVX512VNNI__)
        const int16_t* numbers = (const int16_t*)pairs.data();
        for (int64_t i = 0; i < inner; i++) {
            high[i] = int8_t(std::abs(numbers[i]) < RADIX ? 0 : (numbers[i] + RADIX / 2) >> 7);
            low[i] = int8_t(numbers[i] - RADIX * high[i]);
            sums[0] += low[i], sums[1] += high[i];
        }
#endif
    }
};

// An upper bound of a group's outputs from their integer sums; and of each output where `state.bounds_out` is given.
float group_upper_bound(const Op& op, int64_t group, const QuantizedState& state, Ints low, Ints high) {
    const int64_t num_outputs = groups_of(op) * GROUP;  // for the layout of op.scales see `make_screen`
    auto bound = [&](Ints sums, const float* of) {
        Floats about = __builtin_convertvector(sums, Floats) * (load(of) * splat(state.scale));
        Floats most = about + (load(of + num_outputs) * splat(state.norm)
                + load(of + 2 * num_outputs) * splat(state.error_norm)) + splat(UNDERFLOW);
        Words none = (Words)(most != most);
        return (Floats)(((Words)most & ~none) | ((Words)splat(INFINITY) & none));
    };
    const Floats one = bound(low, op.scales + group * GROUP), other = bound(high, op.scales + group * GROUP + LANES);
    if (state.bounds_out) store(state.bounds_out + group * GROUP, one), store(state.bounds_out + group * GROUP + LANES, other);
    return reduce_max(maximum(one, other));
}

#if defined(__AVX512VNNI__)
// Rows `row` to `row + R`. large: the quads where one of them has an integer of more than 8 bits.
template <int R>
void screen_block(const Op& op, const std::vector<QuantizedState>& states, int64_t group, int64_t row,
        const std::vector<int64_t>& large) {
    const uint8_t* weight = (const uint8_t*)op.weight + group * GROUP * op.inner;
    auto add = [&](Words (&sums)[R][2], int64_t quad, std::vector<int8_t> QuantizedState::* numbers) {
        const Words one = load_words(weight + quad * QUAD_BYTES), other = load_words(weight + quad * QUAD_BYTES + QUAD_BYTES / 2);
        for (int r = 0; r < R; r++) {
            const Words four = load_splat(&(states[row + r].*numbers)[4 * quad]);
            sums[r][0] = dot_int8_quads(sums[r][0], one, four), sums[r][1] = dot_int8_quads(sums[r][1], other, four);
        }
    };
    Words low[R][2] = {}, high[R][2] = {};
    for (int64_t quad = 0; quad < op.inner / 4; quad++) {
        for (int line = 0; line < QUAD_BYTES; line += 64) __builtin_prefetch(weight + quad * QUAD_BYTES + PREFETCH_BYTES / 2
                + line, 0, STREAMED);
        add(low, quad, &QuantizedState::low);
    }
    for (int64_t quad : large) add(high, quad, &QuantizedState::high);
    for (int r = 0; r < R; r++) {
        const QuantizedState& state = states[row + r];
        auto whole = [&](int i) {  // 128 was added to weights
            return (Ints)(low[r][i] - 128 * state.sums[0] + RADIX * (high[r][i] - 128 * state.sums[1]));
        };
        ((float*)op.out + (row + r) * op.out_stride)[group] = group_upper_bound(op, group, state, whole(0), whole(1));
    }
}

std::vector<int64_t> large_quads(const std::vector<QuantizedState>& states, int64_t row, int64_t end, int64_t inner) {
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
inline Ints add_neighbours(Ints a, Ints b, std::integer_sequence<int, I...>) {  // lanes 2 i and 2 i + 1 of both, added
    return __builtin_shufflevector(a, b, (2 * I)...) + __builtin_shufflevector(a, b, (2 * I + 1)...);
}

// Rows `row` to `row + R`.
template <int R>
void screen_block(const Op& op, const std::vector<QuantizedState>& states, int64_t group, int64_t row,
        const std::vector<int64_t>&) {
    typedef uint64_t Longs __attribute__((vector_size(4 * LANES)));
    const uint8_t* weight = (const uint8_t*)op.weight + group * GROUP * op.inner;
    Ints sums[R][4] = {};  // two lanes for each output
#pragma GCC unroll 4
    for (int64_t quad = 0; quad < op.inner / 4; quad++, weight += QUAD_BYTES) {
        for (int line = 0; line < QUAD_BYTES; line += 64) __builtin_prefetch(weight + PREFETCH_BYTES / 2 + line, 0, STREAMED);
        Ints numbers[4];
        for (int i = 0; i < 4; i++) numbers[i] = load_int8_pairs(weight + i * QUAD_BYTES / 4);
        for (int r = 0; r < R; r++) {
            uint64_t four;
            memcpy(&four, &states[row + r].pairs[2 * quad], sizeof four);
            for (int i = 0; i < 4; i++) sums[r][i] += dot_int16_pairs(numbers[i], (Ints)(Longs{} + four));
        }
    }
    auto whole = [](Ints a, Ints b) { return add_neighbours(a, b, std::make_integer_sequence<int, LANES>()); };
    for (int r = 0; r < R; r++)
        ((float*)op.out + (row + r) * op.out_stride)[group] =
            group_upper_bound(op, group, states[row + r], whole(sums[r][0], sums[r][1]), whole(sums[r][2], sums[r][3]));
}

std::vector<int64_t> large_quads(const std::vector<QuantizedState>&, int64_t, int64_t, int64_t) { return {}; }
#endif

#if defined(__AMX_BF16__)
constexpr int MIN_TILE_ROWS = 3;  // rows from which tiles are faster

// As `screen_block`, for all rows: the two digits of a state are two rows of a tile.
void tile_screen(const Op& op, const std::vector<QuantizedState>& states, int64_t first, int64_t last) {
    const int64_t rows = int64_t(states.size()), size = op.inner * GROUP;
    std::vector<int8_t> digits(2 * rows * op.inner);
    for (int64_t row = 0; row < rows; row++) {
        const int16_t* numbers = (const int16_t*)states[row].pairs.data();
        int8_t *high = &digits[2 * row * op.inner], *low = high + op.inner;
        for (int64_t i = 0; i < op.inner; i++)
            high[i] = int8_t((numbers[i] + RADIX / 2) >> 7), low[i] = int8_t(numbers[i] - RADIX * high[i]);
    }
    alignas(64) int32_t sums[2 * TILE_ROWS * GROUP];
    Tiles tiles;
    for (int64_t group = first; group < last; group++) {
        const uint8_t* weight = (const uint8_t*)op.weight + group * size;
        for (int64_t row = 0; row < rows; row += TILE_ROWS) {
            const int64_t some = std::min<int64_t>(rows - row, TILE_ROWS), one = std::min<int64_t>(2 * some, TILE_ROWS);
            tiles.configure(one, 2 * some - one);
            (2 * some > one ? sum_tiles<Int8Pages, true> : sum_tiles<Int8Pages, false>)(
                weight, op.inner / (2 * TILE_DEPTH), &digits[2 * row * op.inner], op.inner, weight + PREFETCH_BYTES,
                row ? 0 : Int8Pages::BYTES, sums);
            for (int64_t r = 0; r < some; r++) {
                const int32_t *high = sums + 2 * r * GROUP, *low = high + GROUP;
                auto sum = [&](int i) { return (Ints)(RADIX * load_words(high + i) + load_words(low + i)); };
                ((float*)op.out + (row + r) * op.out_stride)[group] =
                    group_upper_bound(op, group, states[row + r], sum(0), sum(LANES));
            }
        }
    }
}
#endif

template <int... R>
constexpr auto screen_blocks(std::integer_sequence<int, R...>) { return std::array{&screen_block<R + 1>...}; }

// The upper bounds of groups first to last, for all rows.
void screen(const Op& op, int64_t first, int64_t last, int64_t rows, const Frame& frame) {
    static constexpr auto blocks = screen_blocks(std::make_integer_sequence<int, SCREEN_ROWS>());
    std::vector<QuantizedState> states;
    for (int64_t row = 0; row < rows; row++) states.emplace_back((const bf16*)op.in + row * op.in_stride, op.inner);
    for (const Draw& draw : std::span(frame.draws, frame.draws ? frame.num_draws : 0))
        for (int64_t row = draw.first_row; draw.temperature != 0 && row < draw.first_row + draw.num_rows; row++)
            states[row].bounds_out = (float*)op.extra + row * groups_of(op) * GROUP;
#if defined(__AMX_BF16__)
    if (rows >= MIN_TILE_ROWS && op.inner % (2 * TILE_DEPTH) == 0) return tile_screen(op, states, first, last);
#endif
    int64_t parts = (rows + SCREEN_ROWS - 1) / SCREEN_ROWS;
    std::vector<std::vector<int64_t>> large;
    for (int64_t part = 0; part < parts; part++)
        large.push_back(large_quads(states, rows * part / parts, rows * (part + 1) / parts, op.inner));
    for (int64_t group = first; group < last; group++)
        for (int64_t part = 0; part < parts; part++) {
            int64_t row = rows * part / parts;
            blocks[rows * (part + 1) / parts - row - 1](op, states, group, row, large[part]);
        }
}

// The exact product of one row, of which single groups can be computed; the caller sets `out`.
Op exact_row(const Op& op, int64_t row) {
    Op exact = op;
    exact.in = (const bf16*)op.in + row * op.in_stride, exact.scales = nullptr, exact.extra = nullptr;
    exact.result = STORE, exact.out_stride = 0;
    return exact;
}

// The argmax of a row's outputs: the first among equals, or the first NaN.
int64_t screened_argmax(const Op& op, int64_t row, Scratch& scratch) {
    const float* most = op.scales + row * op.layer;
    const int64_t groups = groups_of(op);
    float sums[GROUP], top = -INFINITY;
    int64_t found = 0;
    Op exact = exact_row(op, row);
    auto compute_group = [&](int64_t group) {  // false: it has a NaN, which is the argmax
        exact.out = sums - group * GROUP;
        product<Bf16Weights>(exact, group, group + 1, 1, scratch);
        for (int64_t i = 0, column = group * GROUP; i < GROUP && column < op.outer; i++, column++) {
            if (sums[i] != sums[i]) return found = column, false;
            if (sums[i] > top || (sums[i] == top && column < found)) top = sums[i], found = column;
        }
        return true;
    };
    // The group with the greatest bound rules out most others.
    int64_t likely = std::max_element(most, most + groups) - most;
    if (!std::isfinite(most[likely]) || !compute_group(likely)) likely = -1, top = -INFINITY;
    for (int64_t group = 0; group < groups; group++)
        if (group != likely && (likely < 0 || most[group] >= top) && !compute_group(group)) break;
    return found;
}

// Makes int8 weights from packed bfloat16 ones: in a group of outputs, four inputs of each output side by side. bounds:
// [3, outputs, to whole groups]: each output's scale, and its error for a state of norm 1 and for a rounding error of norm 1.
// False: a weight is not finite, or too large.
bool make_screen(const bf16* packed, int64_t outer, int64_t inner, int8_t* numbers, float* bounds) {
    const double sum_error = double(inner + 8) * 0x1p-23;  // error of float32 sums, of the output's and the screen's
    const int64_t groups = (outer + GROUP - 1) / GROUP, num_outputs = groups * GROUP;
    for (int64_t group = 0; group < groups; group++, packed += inner * GROUP, numbers += inner * GROUP)
        for (int64_t i = 0; i < GROUP; i++) {
            auto weight = [&](int64_t k) { return std::bit_cast<float>(uint32_t(packed[(k / 2 * GROUP + i) * 2 + k % 2]) << 16); };
            float most = 0;
            for (int64_t k = 0; k < inner; k++) {
                if (!(std::fabs(weight(k)) < LARGE)) return false;
                most = std::max(most, std::fabs(weight(k)));
            }
            const float scale = std::max(most / 127, std::numeric_limits<float>::min());
            double squared_error = 0, exact = 0, rounded = 0;
            for (int64_t k = 0; k < inner; k++) {
                float number = std::clamp(std::nearbyint(weight(k) / scale), -127.0f, 127.0f);
                numbers[(k / 4 * GROUP + i) * 4 + k % 4] = encode_screen_weight(int8_t(number));
                double near = double(number) * scale;
                squared_error += (weight(k) - near) * (weight(k) - near);
                exact += double(weight(k)) * weight(k), rounded += near * near;
            }
            const double off = std::sqrt(squared_error) + sum_error * (std::sqrt(exact) + std::sqrt(rounded));
            float* bound = bounds + group * GROUP + i;
            bound[0] = scale;
            // padding is never the argmax
            bound[num_outputs] = group * GROUP + i < outer ? float(off * 1.0001) + UNDERFLOW : -INFINITY;
            bound[2 * num_outputs] = float(std::sqrt(rounded) * 1.0001) + UNDERFLOW;
        }
    return true;
}

}  // namespace
