// Inputs of int8 products as integers, for processors that multiply and add four bytes with one instruction (VNNI).
// A row is rounded to integers of 15 bits, scaled so that its largest is MAX_QUANTIZED, and each integer is stored
// as two digits to base RADIX. The scale is the row's own, and sums are exact, so a row's bits do not depend on
// others. This rounding usually changes a product far less than that of the weights to 8 bits.

#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "vectors.h"

namespace {

constexpr int RADIX = 128;  // an integer is RADIX * its high digit + its low digit

#if defined(__AVX512VNNI__)
constexpr float MAX_QUANTIZED = 127 * RADIX;
constexpr float MIN_ROW_MAX = 1e-30f;  // a row of smaller numbers counts as zero

struct QuantizedRows {
    int64_t rows, quads;
    std::vector<uint32_t> digits;     // [quads, rows, 2] four low digits, and four high ones
    std::vector<float> scale;         // [rows] the value of 1; NaN for a row that is not finite
    std::vector<int32_t> digit_sums;  // [rows, 2] of low digits, and of high ones

    void quantize(const bf16* x, int64_t count, int64_t stride, int64_t inner) {
        rows = count, quads = (inner + 3) / 4;
        digits.resize((quads + LANES / 4) * 2 * rows), scale.resize(rows), digit_sums.resize(2 * rows);
        for (int64_t row = 0; row < rows; row++) scale[row] = quantize_row(x + row * stride, inner, row);
    }

  private:
    float quantize_row(const bf16* x, int64_t inner, int64_t row) {
        float tail[LANES] = {};
        for (int64_t i = inner / LANES * LANES; i < inner; i++) tail[i % LANES] = std::bit_cast<float>(uint32_t(x[i]) << 16);
        auto load_at = [&](int64_t i) { return i + LANES <= inner ? load_bf16(x + i) : load(tail); };
        Floats greatest = {}, not_finite = {};
        for (int64_t i = 0; i < inner; i += LANES) {
            const Floats v = load_at(i);
            greatest = maximum((Floats)((Words)v & 0x7fffffffu), greatest), not_finite += v * Floats{};
        }
        if (!(reduce_add(not_finite) == 0)) return NAN;
        const float top = reduce_max(greatest) < MIN_ROW_MAX ? 0 : reduce_max(greatest);
        const Floats magic = splat(12582912.0f), inverse_scale = splat(top == 0 ? 0 : MAX_QUANTIZED / top);  // adding it rounds
        Ints low_sum = {}, high_sum = {};
        for (int64_t i = 0; i < inner; i += LANES) {
            const Ints number = __builtin_convertvector((load_at(i) * inverse_scale + magic) - magic, Ints),
                    high = (number + RADIX / 2) >> 7;
            const Ints low = number - (high << 7);
            typedef int8_t Bytes __attribute__((vector_size(LANES)));
            const Bytes bytes[2] = {__builtin_convertvector(low, Bytes), __builtin_convertvector(high, Bytes)};
            for (int half = 0; half < 2; half++)
                for (int quad = 0; quad < LANES / 4; quad++)
                    memcpy(&digits[((i / 4 + quad) * rows + row) * 2 + half], (const int8_t*)&bytes[half] + 4 * quad, 4);
            low_sum += low, high_sum += high;
        }
        digit_sums[2 * row] = digit_sums[2 * row + 1] = 0;
        for (int lane = 0; lane < LANES; lane++) digit_sums[2 * row] += low_sum[lane], digit_sums[2 * row + 1] += high_sum[lane];
        return top / MAX_QUANTIZED;
    }
};
#endif

}  // namespace
