// The operations besides products and attention, a row at a time: RMS norm, rotary embedding, embedding lookup,
// casts, argmax and top-k; and `compute`, which runs one part of any operation on whichever thread calls it. Rules:
// those of `kernels.cpp`; each sum is taken in an order that depends on its own row alone.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "attention.h"
#include "screened_sample.h"
#include "op.h"
#include "products.h"
#include "races.h"
#include "screen.h"
#include "vectors.h"

namespace {

struct Child {  // `draft.CHILD` is the same
    int64_t token;
    double score;  // log probability, at most 0
};

bf16* output_row(const Op& op, const Frame& frame, int64_t row) {
    if (op.out) return (bf16*)op.out + row * op.out_stride;
    return frame.features + frame.slots[row] * op.out_stride + op.layer;
}

void norm_row(const Op& op, const Frame& frame, int64_t row) {
    const float* x = (const float*)op.in + (op.picked_only ? frame.picked[row] : row) * op.in_stride;
    Floats squares = {};
    for (int64_t i = 0; i < op.inner; i += LANES) squares = fma(load(x + i), load(x + i), squares);
    float factor = 1.0f / sqrtf(reduce_add(squares) / float(op.inner) + op.eps);
    bf16* out = output_row(op, frame, row);
    for (int64_t i = 0; i < op.inner; i += LANES)
        store_bf16(out + i, load(x + i) * splat(factor) * load((const float*)op.weight + i));
}

void widen_row(const Op& op, const bf16* x, int64_t row) {
    float* out = (float*)op.out + row * op.out_stride;
    for (int64_t i = 0; i < op.inner; i += LANES) store(out + i, load_bf16(x + i));
}

void round_row(const Op& op, const Frame& frame, int64_t row) {
    const float* x = (const float*)op.in + row * op.in_stride;
    bf16* out = output_row(op, frame, row);
    for (int64_t i = 0; i < op.inner; i += LANES) store_bf16(out + i, load(x + i));
}

// Norm (if there is one) and rotary embedding of one head of queries or keys; size: a multiple of GROUP.
void rope_head(const float* x, const float* norm, float eps, const float* cos, const float* sin, int size, bf16* out) {
    Floats factor = splat(1.0f);
    if (norm) {
        Floats squares = {};
        for (int i = 0; i < size; i += LANES) squares = fma(load(x + i), load(x + i), squares);
        factor = splat(1.0f / sqrtf(reduce_add(squares) / float(size) + eps));
    }
    int half = size / 2;
    for (int i = 0; i < half; i += LANES) {
        Floats a = load(x + i), b = load(x + half + i);
        if (norm) a = a * factor * load(norm + i), b = b * factor * load(norm + half + i);
        store_bf16(out + i, fma(a, load(cos + i), b * load(sin + i)));
        store_bf16(out + half + i, fma(b, load(cos + half + i), a * load(sin + half + i)));
    }
}

void rope_row(const Op& op, const Frame& frame, int64_t row) {
    int size = op.head_dim;
    int64_t position = frame.positions[row];
    const float *x = (const float*)op.in + row * op.in_stride;
    const float *cos = frame.cos + position * size, *sin = frame.sin + position * size;
    bf16* queries = (bf16*)op.out + row * op.out_stride;
    for (int head = 0; head < op.heads; head++, x += size)
        rope_head(x, (const float*)op.weight, op.eps, cos, sin, size, queries + head * size);
    bf16* kv = frame.kv + op.layer * frame.layer_stride + frame.slots[row] * 2 * op.kv_heads * size;
    for (int head = 0; head < op.kv_heads; head++, x += size)
        rope_head(x, (const float*)op.extra, op.eps, cos, sin, size, kv + head * size);
    for (int i = 0; i < op.kv_heads * size; i += LANES) store_bf16(kv + op.kv_heads * size + i, load(x + i));
}

// Top-k (k = outer) of a row of `inner` logits, best first, the lowest token among equals. The row is padded with -inf to a whole
// vector.
void rank_row(const Op& op, int64_t row) {
    const float* x = (const float*)op.in + row * op.in_stride;
    const int64_t* ids = (const int64_t*)op.weight;  // null: columns are tokens
    Child* best = (Child*)((int64_t*)op.out + row * op.out_stride);
    for (int64_t i = 0; i < op.outer; i++) best[i] = {0, -INFINITY};
    Child& last = best[op.outer - 1];
    for (int64_t i = 0; i < op.inner; i += LANES) {
        if (!any((Words)(load(x + i) >= splat(float(last.score))))) continue;
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
    Floats top = splat(float(best[0].score));
    double sum = 0;
    for (int64_t i = 0; i < op.inner;) {  // few terms at a time: float32 forgets small ones beside a large sum
        Floats some = {};
        for (int j = 0; j < 64 && i < op.inner; j++, i += LANES) some += exponential(load(x + i) - top);
        sum += reduce_add(some);
    }
    float log_sum = float(std::log(sum));
    for (int64_t i = 0; i < op.outer; i++) best[i].score = std::min(float(best[i].score) - top[0] - log_sum, 0.0f);
}

// The column of the greatest of `count` numbers, the first among equals; or of the first NaN.
int64_t argmax(const float* x, int64_t count) {
    constexpr int64_t SOME = 64 * LANES;
    int64_t found = 0;
    float top = -INFINITY;
    Words odd = {};
    for (int64_t begin = 0; begin < count; begin += SOME) {
        int64_t end = std::min(begin + SOME, count), i = begin;
        Floats highest = splat(-INFINITY);
        for (; i + LANES <= end; i += LANES) {
            Floats v = load(x + i);
            odd |= (Words)(v != v);
            highest = maximum(v, highest);
        }
        float most = reduce_max(highest);
        for (; i < end; i++) {
            if (x[i] != x[i]) odd[0] = 1;
            most = std::max(most, x[i]);
        }
        if (most > top) top = most, found = begin;
    }
    if (any(odd)) return std::find_if(x, x + count, [](float v) { return v != v; }) - x;
    return std::find(x + found, x + count, top) - x;
}

int64_t rows_of(const Op& op, const Frame& frame) { return op.picked_only ? frame.num_picked : frame.rows; }

int64_t parts_of(const Op& op, const Frame& frame, int threads, const Splits& splits) {
    if (op.kind == PRODUCT || op.kind == SCREEN) return std::min<int64_t>(groups_of(op), threads == 1 ? 1
            : PARTS_PER_THREAD * threads);
    if (op.kind == CHOOSE && frame.draws) return frame.num_draws;
    return op.kind == ATTEND ? int64_t(splits.blocks.size()) * splits.parts : rows_of(op, frame);
}

void compute(const Op& op, const Frame& frame, int64_t part, int64_t parts, Scratch& scratch, Splits& splits) {
    switch (op.kind) {
        case NORM: return norm_row(op, frame, part);
        case ROUND: return round_row(op, frame, part);
        case EMBED: return widen_row(op, (const bf16*)op.in + frame.tokens[part] * op.in_stride, part);
        case WIDEN: return widen_row(op, op.in ? (const bf16*)op.in + part * op.in_stride : frame.states + part * op.inner, part);
        case RANK: return rank_row(op, part);
        case BEST: ((int64_t*)op.out)[part] = argmax((const float*)op.in + part * op.in_stride, op.inner); return;
        case RACE: {
            const RaceCall& call = *(const RaceCall*)op.extra;
            return race_rows(call, part, op, scratch.floats);
        }
        case SCREEN: {
            int64_t groups = groups_of(op), first = first_group(groups, part, parts), last = first_group(groups, part + 1, parts);
            return screen(op, first, last, rows_of(op, frame), frame);
        }
        case CHOOSE:
            if (frame.draws) return screened_walk(op, frame, frame.draws[part], scratch);
            ((int64_t*)op.out)[part] = screened_argmax(op, part, scratch);
            return;
        case ROPE: return rope_row(op, frame, part);
        case ATTEND: return attend_part(op, frame, part, scratch.floats, splits);
        case PRODUCT: {
            int64_t groups = groups_of(op), first = first_group(groups, part, parts), last = first_group(groups, part + 1, parts);
            return (op.scales ? product<Int8Weights> : product<Bf16Weights>)(op, first, last, rows_of(op, frame), scratch);
        }
    }
}

}  // namespace
