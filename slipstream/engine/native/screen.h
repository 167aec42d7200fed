// The greatest output of a product without most of its weights: all outputs from whole numbers of 8 bits, about, and exactly
// those of which this does not say that they are not the greatest.
//
// Rules:
// 1. What is chosen is what `best_of` would choose of the product, for every state: how far an output may be off is bounded,
//    not estimated. By Cauchy and Schwarz that is the length of what rounding took from its weights times the state's, and
//    the length of its rounded weights times what rounding took from the state; float32's own errors are added, those of
//    numbers that are too small for it among them.
// 2. A state that is not finite, or sums that are not, make every output one that is computed.
//
// It knows nothing about why only the greatest is wanted.

#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "list.h"
#include "products.h"

namespace {

// More than an output loses where float32 is below its normal numbers: it has fewer digits there, or is zero.
constexpr float LOST = 1e-30f;

struct Off {  // how far the outputs of a group may be off, for a state of length 1 and for one unit of what rounding took
    float weights, state;
};

// A state as whole numbers of some 13 bits, two in a word, times `scale`.
struct Rounded {
    std::vector<uint32_t> pairs;
    float scale = 0, length = INFINITY, missed = INFINITY;  // of the state, and of what rounding took from it, at most

    Rounded(const bf16* x, int64_t inner) : pairs(inner / 2) {
        // Sums of products with 127 fit 31 bits.
        const float limit = float(std::min<int64_t>(8191, (int64_t(1) << 31) / (128 * inner)));
        Floats greatest_of_lanes = {}, squares = {}, off = {}, magic = all(12582912.0f);  // adding it rounds
        for (int64_t i = 0; i < inner; i += LANES) {
            Floats v = widen(x + i);
            greatest_of_lanes = greater((Floats)((Words)v & 0x7fffffffu), greatest_of_lanes);
        }
        const float unit = greatest(greatest_of_lanes) / limit;
        if (!(unit > LOST)) return;
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
    }
};

// Rows `row` to `row + R`: the greatest output of a group, about.
template <int R>
void screen_block(const Op& op, const std::vector<Rounded>& states, int64_t group, int64_t row) {
    const uint8_t* weight = (const uint8_t*)op.weight + group * LINE * (op.inner / 2);
    Ints low[R] = {}, high[R] = {};
#pragma GCC unroll 4
    for (int64_t pair = 0; pair < op.inner / 2; pair++, weight += LINE) {
        __builtin_prefetch(weight + AHEAD / 2, 0, 1);
        Ints first = bytes_at(weight), second = bytes_at(weight + LINE / 2);
        for (int r = 0; r < R; r++) {
            Ints both = (Ints)(Words{} + states[row + r].pairs[pair]);
            low[r] += twofold(first, both), high[r] += twofold(second, both);
        }
    }
    int64_t count = std::min<int64_t>(GROUP, op.outer - group * GROUP);
    for (int r = 0; r < R; r++) {
        Floats scale = all(states[row + r].scale);
        Floats one = __builtin_convertvector(low[r], Floats) * (load(op.scales + group * GROUP) * scale);
        Floats other = __builtin_convertvector(high[r], Floats) * (load(op.scales + group * GROUP + LANES) * scale);
        float about[GROUP];
        store(about, one), store(about + LANES, other);
        ((float*)op.out + (row + r) * op.out_stride)[group] =
            count == GROUP ? greatest(greater(one, other)) : *std::max_element(about, about + count);
    }
}

void screen(const Op& op, int64_t first, int64_t last, int64_t rows) {
    constexpr void (*blocks[])(const Op&, const std::vector<Rounded>&, int64_t, int64_t) = {
        nullptr, screen_block<1>, screen_block<2>, screen_block<3>, screen_block<4>, screen_block<5>, screen_block<6>};
    std::vector<Rounded> states;
    for (int64_t row = 0; row < rows; row++) states.emplace_back((const bf16*)op.in + row * op.in_stride, op.inner);
    int64_t parts = (rows + 5) / 6;
    for (int64_t group = first; group < last; group++)
        for (int64_t part = 0; part < parts; part++) {
            int64_t row = rows * part / parts;
            blocks[rows * (part + 1) / parts - row](op, states, group, row);
        }
}

// The column of a row's greatest output, the first among equals; the first that is no number, if one is none.
int64_t chosen(const Op& op, int64_t row, std::vector<float>& scratch) {
    const float* most = op.scales + row * op.layer;
    const Off* off = (const Off*)op.extra;
    const Rounded state((const bf16*)op.in + row * op.in_stride, op.inner);
    const int64_t groups = groups_of(op);
    auto far = [&](int64_t group) { return off[group].weights * state.length + off[group].state * state.missed + LOST; };
    float least = -INFINITY;  // of the greatest
    for (int64_t group = 0; group < groups; group++) least = std::max(least, most[group] - far(group));
    if (!std::isfinite(least)) least = -INFINITY;
    float sums[GROUP], top = -INFINITY;
    Op exact = op;
    exact.in = (const bf16*)op.in + row * op.in_stride, exact.scales = nullptr, exact.extra = nullptr;
    exact.result = STORE, exact.out_stride = 0;
    int64_t found = 0;
    for (int64_t group = 0; group < groups; group++) {
        if (most[group] + far(group) < least) continue;  // what is no number is looked at
        exact.out = sums - group * GROUP;
        product<Halves>(exact, group, group + 1, 1, scratch);
        for (int64_t i = 0; i < std::min<int64_t>(GROUP, op.outer - group * GROUP); i++) {
            if (sums[i] != sums[i]) return group * GROUP + i;
            if (sums[i] > top) top = sums[i], found = group * GROUP + i;
        }
    }
    return found;
}

// Of packed bfloat16: whole numbers with a scale an output, pairs of inputs side by side for a group of outputs; and how far
// they may be off. False: a weight is not finite.
bool make_screen(const bf16* packed, int64_t groups, int64_t inner, int8_t* numbers, float* scales, Off* off) {
    const double sums = double(inner + 8) * 0x1p-23;  // of float32, an output's and the screen's
    for (int64_t group = 0; group < groups; group++, packed += inner * GROUP, numbers += inner * GROUP) {
        double far = 0, size = 0;
        for (int64_t i = 0; i < GROUP; i++) {
            auto place = [i](int64_t k) { return (k / 2 * GROUP + i) * 2 + k % 2; };
            auto weight = [&](int64_t k) { return std::bit_cast<float>(uint32_t(packed[place(k)]) << 16); };
            float most = 0;
            for (int64_t k = 0; k < inner; k++) {
                if (!std::isfinite(weight(k))) return false;
                most = std::max(most, std::fabs(weight(k)));
            }
            const float scale = scales[group * GROUP + i] = std::max(most / 127, std::numeric_limits<float>::min());
            double missed = 0, exact = 0, whole = 0;
            for (int64_t k = 0; k < inner; k++) {
                float number = std::clamp(std::nearbyint(weight(k) / scale), -127.0f, 127.0f);
                numbers[place(k)] = int8_t(number);
                double near = double(number) * scale;
                missed += (weight(k) - near) * (weight(k) - near);
                exact += double(weight(k)) * weight(k), whole += near * near;
            }
            size = std::max(size, std::sqrt(whole));
            far = std::max(far, std::sqrt(missed) + sums * (std::sqrt(exact) + std::sqrt(whole)));
        }
        off[group] = {float(far * 1.0001) + LOST, float(size * 1.0001) + LOST};
    }
    return true;
}

}  // namespace
