// Inputs of int8 products as integers, for processors that multiply and add four bytes with one instruction.
//
// Rules: those of `kernels.cpp`. A row's inputs are rounded to integers of 15 bits, scaled so that the largest is FULL. This
// usually changes a product far less than the rounding of the weights to 8 bits.
//
// It knows nothing about weights.

#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "vectors.h"

namespace {

constexpr int HIGH = 128;  // a number of more than 8 bits is HIGH * high + low

#if defined(__AVX512VNNI__)
constexpr float FULL = 127 * HIGH;
constexpr float LEAST = 1e-30f;  // a row of less than this is as good as none

struct Numbers {
    int64_t rows, quads;
    std::vector<uint32_t> halves;  // [quads, rows, 2] four low ones, and four high ones
    std::vector<float> unit;       // [rows] what 1 stands for; NaN of a row that is not finite
    std::vector<int32_t> sums;     // [rows, 2] of the halves

    void take(const bf16* x, int64_t count, int64_t stride, int64_t inner) {
        rows = count, quads = (inner + 3) / 4;
        halves.resize((quads + LANES / 4) * 2 * rows), unit.resize(rows), sums.resize(2 * rows);
        for (int64_t row = 0; row < rows; row++) unit[row] = take_row(x + row * stride, inner, row);
    }

  private:
    float take_row(const bf16* x, int64_t inner, int64_t row) {
        float rest[LANES] = {};
        for (int64_t i = inner / LANES * LANES; i < inner; i++) rest[i % LANES] = std::bit_cast<float>(uint32_t(x[i]) << 16);
        auto at = [&](int64_t i) { return i + LANES <= inner ? widen(x + i) : load(rest); };
        Floats most = {}, odd = {};
        for (int64_t i = 0; i < inner; i += LANES) {
            const Floats v = at(i);
            most = greater((Floats)((Words)v & 0x7fffffffu), most), odd += v * Floats{};
        }
        if (!(total(odd) == 0)) return NAN;
        const float top = greatest(most) < LEAST ? 0 : greatest(most);
        const Floats magic = all(12582912.0f), scale = all(top == 0 ? 0 : FULL / top);  // adding it rounds
        Ints of_low = {}, of_high = {};
        for (int64_t i = 0; i < inner; i += LANES) {
            const Ints number = __builtin_convertvector((at(i) * scale + magic) - magic, Ints), high = (number + HIGH / 2) >> 7;
            const Ints low = number - (high << 7);
            typedef int8_t Bytes __attribute__((vector_size(LANES)));
            const Bytes bytes[2] = {__builtin_convertvector(low, Bytes), __builtin_convertvector(high, Bytes)};
            for (int half = 0; half < 2; half++)
                for (int quad = 0; quad < LANES / 4; quad++)
                    memcpy(&halves[((i / 4 + quad) * rows + row) * 2 + half], (const int8_t*)&bytes[half] + 4 * quad, 4);
            of_low += low, of_high += high;
        }
        sums[2 * row] = sums[2 * row + 1] = 0;
        for (int lane = 0; lane < LANES; lane++) sums[2 * row] += of_low[lane], sums[2 * row + 1] += of_high[lane];
        return top / FULL;
    }
};
#endif

}  // namespace
