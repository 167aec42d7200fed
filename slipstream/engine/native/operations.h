// The operations of a forward, row by row and group by group: norm, product, rotation; and those of a draft
// head between its tokens and the best of its logits.
//
// Rules: those of `kernels.cpp`. Each sum is taken in an order that depends on its own row alone.
//
// It knows nothing about threads: `compute` does one part of an operation, whoever asks.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "attention.h"
#include "list.h"
#include "races.h"
#include "vectors.h"

namespace {

constexpr int GROUP = 2 * LANES;  // outputs of a product that are computed together
constexpr int BLOCK = LANES == 8 ? 4 : 12;  // rows of a product that are computed together, at most: as registers hold
constexpr int SLAB = PAIRED ? 1 << 30 : 8 * BLOCK;  // rows whose inputs are widened together: they stay in the second cache
constexpr int AHEAD = 8192;      // bytes of weights that are asked for in advance: about what memory is late by. Into the
                                 // second cache: what is asked for "once" (NTA) an Intel loses before it is read
constexpr int LINE = 2 * GROUP;  // whole numbers that weigh a pair of inputs for a group of outputs

struct Child {  // `draft.CHILD` is the same
    int64_t token;
    double score;  // logarithm of its share, at most 0
};

bf16* halves(const Op& op, const Frame& frame, int64_t row) {
    if (op.out) return (bf16*)op.out + row * op.out_stride;
    return frame.features + frame.slots[row] * op.out_stride + op.layer;
}

void norm_row(const Op& op, const Frame& frame, int64_t row) {
    const float* x = (const float*)op.in + (op.few ? frame.picked[row] : row) * op.in_stride;
    Floats squares = {};
    for (int64_t i = 0; i < op.inner; i += LANES) squares = fma(load(x + i), load(x + i), squares);
    float factor = 1.0f / sqrtf(total(squares) / float(op.inner) + op.eps);
    bf16* out = halves(op, frame, row);
    for (int64_t i = 0; i < op.inner; i += LANES)
        narrow(out + i, load(x + i) * all(factor) * load((const float*)op.weight + i));
}

void widen_row(const Op& op, const bf16* x, int64_t row) {
    float* out = (float*)op.out + row * op.out_stride;
    for (int64_t i = 0; i < op.inner; i += LANES) store(out + i, widen(x + i));
}

void round_row(const Op& op, const Frame& frame, int64_t row) {
    const float* x = (const float*)op.in + row * op.in_stride;
    bf16* out = halves(op, frame, row);
    for (int64_t i = 0; i < op.inner; i += LANES) narrow(out + i, load(x + i));
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

struct Whole {  // weights as whole numbers
    static constexpr int BYTES = LINE;
    static constexpr bool SCALED = true;
    static void read(const uint8_t* weight, Pairs& first, Pairs& second) { widen_line(weight, first, second); }
};

// What some rows bring to a product: pairs of bfloat16 where these are multiplied as such, else each widened, once for many
// groups.
struct Inputs {
    const bf16* halves;
    int64_t stride;
    std::vector<float>& wide;  // [rows, inner]
    int64_t inner;

    Inputs(const Op& op, int64_t row, int64_t rows, std::vector<float>& scratch)
        : halves((const bf16*)op.in + row * op.in_stride), stride(op.in_stride), wide(scratch), inner(op.inner) {
        if (PAIRED) return;
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
template <int R>
inline void add_pair(Floats (&low)[R], Floats (&high)[R], const Pairs& first, const Pairs& second, const Inputs& x,
                     int64_t row, int64_t pair) {
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
    for (int r = 0; r < R; r++) {
        Words both = both_at(x.halves + (row + r) * x.stride + 2 * pair);
        low[r] = pairs(low[r], first, both);
        high[r] = pairs(high[r], second, both);
    }
#else
    const float* wide = &x.wide[row * x.inner + 2 * pair];
    auto add = [&](Floats one, Floats other, int half) {
        for (int r = 0; r < R; r++) {
            Floats input = all(wide[r * x.inner + half]);
            low[r] = fma(one, input, low[r]);
            high[r] = fma(other, input, high[r]);
        }
    };
    add(first.one, second.one, 0), add(first.other, second.other, 1);
#endif
}

template <class Weights, int R>
void product_block(const Op& op, const Inputs& x, int64_t group, int64_t begin, int64_t row) {
    const uint8_t* weight = (const uint8_t*)op.weight + group * Weights::BYTES * (op.inner / 2);
    Floats low[R] = {}, high[R] = {};
    for (int64_t pair = 0; pair < op.inner / 2; pair++, weight += Weights::BYTES) {
        for (int line = 0; line < Weights::BYTES; line += 64) __builtin_prefetch(weight + AHEAD + line, 0, 1);
        Pairs first, second;
        Weights::read(weight, first, second);
        add_pair<R>(low, high, first, second, x, row, pair);
    }
    for (int r = 0; r < R; r++) {
        if (Weights::SCALED) low[r] *= load(op.scales + group * GROUP), high[r] *= load(op.scales + group * GROUP + LANES);
        finish(op, begin + row + r, group, low[r], high[r]);
    }
}

// Of `rows` rows from `begin` on, which `x` holds.
template <class Weights>
void product_group(const Op& op, const Inputs& x, int64_t group, int64_t begin, int64_t rows) {
    constexpr void (*blocks[])(const Op&, const Inputs&, int64_t, int64_t, int64_t) = {
        nullptr, product_block<Weights, 1>, product_block<Weights, 2>, product_block<Weights, 3>, product_block<Weights, 4>,
        product_block<Weights, 5>, product_block<Weights, 6>, product_block<Weights, 7>, product_block<Weights, 8>,
        product_block<Weights, 9>, product_block<Weights, 10>, product_block<Weights, 11>, product_block<Weights, 12>};
    int64_t parts = (rows + BLOCK - 1) / BLOCK;  // about equally long: one row alone waits for its own sums
    for (int64_t part = 0; part < parts; part++) {
        int64_t row = rows * part / parts;
        blocks[rows * (part + 1) / parts - row](op, x, group, begin, row);
    }
}

template <class Weights>
void product(const Op& op, int64_t first, int64_t last, int64_t rows, std::vector<float>& scratch) {
    int64_t slabs = (rows + SLAB - 1) / SLAB;
    for (int64_t slab = 0; slab < slabs; slab++) {
        int64_t begin = rows * slab / slabs, count = rows * (slab + 1) / slabs - begin;
        Inputs x(op, begin, count, scratch);
        for (int64_t group = first; group < last; group++) product_group<Weights>(op, x, group, begin, count);
    }
}

// A head of queries or keys, normed if there is a norm, rotated; size is a multiple of GROUP.
void rope_head(const float* x, const float* norm, float eps, const float* cos, const float* sin, int size, bf16* out) {
    Floats factor = all(1.0f);
    if (norm) {
        Floats squares = {};
        for (int i = 0; i < size; i += LANES) squares = fma(load(x + i), load(x + i), squares);
        factor = all(1.0f / sqrtf(total(squares) / float(size) + eps));
    }
    int half = size / 2;
    for (int i = 0; i < half; i += LANES) {
        Floats a = load(x + i), b = load(x + half + i);
        if (norm) a = a * factor * load(norm + i), b = b * factor * load(norm + half + i);
        narrow(out + i, fma(a, load(cos + i), b * load(sin + i)));
        narrow(out + half + i, fma(b, load(cos + half + i), a * load(sin + half + i)));
    }
}

void rope_row(const Op& op, const Frame& frame, int64_t row) {
    int size = op.head_dim;
    int64_t position = frame.positions ? frame.positions[row] : row;
    const float *x = (const float*)op.in + row * op.in_stride;
    const float *cos = frame.cos + position * size, *sin = frame.sin + position * size;
    bf16* queries = (bf16*)op.out + row * op.out_stride;
    for (int head = 0; head < op.heads; head++, x += size)
        rope_head(x, (const float*)op.weight, op.eps, cos, sin, size, queries + head * size);
    bf16* kv = frame.kv + op.layer * frame.layer_stride + frame.slots[row] * 2 * op.kv_heads * size;
    for (int head = 0; head < op.kv_heads; head++, x += size)
        rope_head(x, (const float*)op.extra, op.eps, cos, sin, size, kv + head * size);
    for (int i = 0; i < op.kv_heads * size; i += LANES) narrow(kv + op.kv_heads * size + i, load(x + i));
}

// The `outer` best tokens of a row of `inner` logits, best first, the lowest token among equals. The row goes on with -inf to
// a whole vector.
void rank_row(const Op& op, int64_t row) {
    const float* x = (const float*)op.in + row * op.in_stride;
    const int64_t* ids = (const int64_t*)op.weight;  // null: columns are tokens
    Child* best = (Child*)((int64_t*)op.out + row * op.out_stride);
    for (int64_t i = 0; i < op.outer; i++) best[i] = {0, -INFINITY};
    Child& last = best[op.outer - 1];
    for (int64_t i = 0; i < op.inner; i += LANES) {
        if (!any((Words)(load(x + i) >= all(float(last.score))))) continue;
        for (int64_t column = i; column < std::min(i + LANES, op.inner); column++) {
            Child child = {ids ? ids[column] : column, x[column]};
            auto before = [&](const Child& other) {
                return child.score > other.score || (child.score == other.score && child.token < other.token);
            };
            if (!before(last)) continue;
            Child* place = &last;
            for (; place > best && before(place[-1]); place--) *place = place[-1];
            *place = child;
        }
    }
    Floats top = all(float(best[0].score));
    double sum = 0;
    for (int64_t i = 0; i < op.inner;) {  // few terms at a time: float32 forgets small ones beside a large sum
        Floats some = {};
        for (int j = 0; j < 64 && i < op.inner; j++, i += LANES) some += exponential(load(x + i) - top);
        sum += total(some);
    }
    float log_sum = float(std::log(sum));
    for (int64_t i = 0; i < op.outer; i++) best[i].score = std::min(float(best[i].score) - top[0] - log_sum, 0.0f);
}

// The column of the greatest of `count` numbers, the first among equals; the first that is none, if one is not.
int64_t best_of(const float* x, int64_t count) {
    constexpr int64_t SOME = 64 * LANES;
    int64_t found = 0;
    float top = -INFINITY;
    Words odd = {};
    for (int64_t begin = 0; begin < count; begin += SOME) {
        int64_t end = std::min(begin + SOME, count), i = begin;
        Floats greatest = all(-INFINITY);
        for (; i + LANES <= end; i += LANES) {
            Floats v = load(x + i);
            Words more = (Words)(v > greatest);
            odd |= (Words)(v != v);
            greatest = (Floats)(((Words)v & more) | ((Words)greatest & ~more));
        }
        float most = greatest[0];
        for (int lane = 1; lane < LANES; lane++) most = std::max(most, greatest[lane]);
        for (; i < end; i++) {
            if (x[i] != x[i]) odd[0] = 1;
            most = std::max(most, x[i]);
        }
        if (most > top) top = most, found = begin;
    }
    if (any(odd)) return std::find_if(x, x + count, [](float v) { return v != v; }) - x;
    return std::find(x + found, x + count, top) - x;
}

int64_t rows_of(const Op& op, const Frame& frame) { return op.few ? frame.num_picked : frame.rows; }

int64_t parts_of(const Op& op, const Frame& frame, int threads) {
    if (op.kind == PRODUCT) {
        int64_t groups = (op.outer * (op.result == SILU ? 2 : 1) + GROUP - 1) / GROUP;
        return std::min<int64_t>(groups, threads == 1 ? 1 : 8 * threads);
    }
    return op.kind == ATTEND ? frame.rows * splits_of(frame, threads) : rows_of(op, frame);
}

void compute(const Op& op, const Frame& frame, int64_t part, int64_t parts, std::vector<float>& scores, Splits& splits) {
    switch (op.kind) {
        case NORM: return norm_row(op, frame, part);
        case ROUND: return round_row(op, frame, part);
        case EMBED: return widen_row(op, (const bf16*)op.in + frame.tokens[part] * op.in_stride, part);
        case WIDEN: return widen_row(op, op.in ? (const bf16*)op.in + part * op.in_stride : frame.states + part * op.inner, part);
        case RANK: return rank_row(op, part);
        case BEST: ((int64_t*)op.out)[part] = best_of((const float*)op.in + part * op.in_stride, op.inner); return;
        case RACE: {
            const Races& races = *(const Races*)op.extra;
            return race_row(races, part, (const float*)op.in + row_of(races, part) * op.in_stride, op.inner, scores);
        }
        case ROPE: return rope_row(op, frame, part);
        case ATTEND: return attend_part(op, frame, part, parts / frame.rows, scores, splits);
        case PRODUCT: {
            int64_t groups = (op.outer * (op.result == SILU ? 2 : 1) + GROUP - 1) / GROUP;
            auto some = op.scales ? product<Whole> : product<Halves>;
            return some(op, groups * part / parts, groups * (part + 1) / parts, rows_of(op, frame), scores);
        }
    }
}

}  // namespace
