// What a list holds: its operations (`Op`), and a `Frame` with the inputs of one forward. The structs have the
// layout of those in `program.py`, field by field. How operations are computed is said elsewhere.

#pragma once

#include <cstdint>

#include "vectors.h"

namespace {

enum Kind : int32_t { NORM = 0, PRODUCT = 1, ROPE = 2, ATTEND = 3, ROUND = 4, EMBED = 5, WIDEN = 6, RANK = 7, BEST = 8, RACE = 9,
                      SCREEN = 10, CHOOSE = 11 };
enum Result : int32_t { STORE = 0, ADD = 1, SILU = 2 };  // what a product does with its sums

struct Op {  // `program.Op` is the same
    int32_t kind, result;
    const void* in;        // NORM: float32 [T, inner]; PRODUCT: bfloat16 [T, inner]; ROPE: float32 [T, (Q + 2 G) D];
                           // EMBED: bfloat16 [V, inner]; WIDEN: bfloat16 [T, inner], or null: the frame's states;
                           // RANK, BEST: float32 [T, inner]; RACE: float32 [., inner];
                           // SCREEN, CHOOSE: bfloat16 [T, inner]
    int64_t in_stride;     // elements from row to row
    const void* weight;    // NORM: float32 [inner]; PRODUCT, CHOOSE: packed; SCREEN: int8 weights;
                           // ROPE: norm of queries, float32 [D], or null;
                           // RANK: tokens of the columns, int64 [inner], or null
    const void* extra;     // PRODUCT: bias, float32 [outer], or null; ROPE: norm of keys or null; RACE: RaceCall;
                           // SCREEN, CHOOSE: float32 [T, outer, to whole groups] bounds of sampled rows' outputs
    void* out;             // NORM, ROUND, ATTEND, ROPE (queries), SILU: bfloat16; STORE, ADD: float32;
                           // EMBED, WIDEN: float32; RANK: Child [T, outer], as int64; BEST: int64 [T];
                           // SCREEN: float32 [T, groups]; CHOOSE: int64 [T];
                           // NORM, ROUND: null for the frame's features, by slot, from column `layer` on
    int64_t out_stride;
    int64_t inner, outer;  // widths
    int64_t layer;         // ROPE, ATTEND: number of the layer in the KV pool; CHOOSE: row stride of what SCREEN wrote
    float eps;
    int32_t heads, kv_heads, head_dim;
    const float* scales;   // PRODUCT of int8: [outer], to whole groups; null: weights are bfloat16;
                           // SCREEN: see `make_screen`; CHOOSE: what SCREEN wrote
    int64_t picked_only;   // 1: computes num_picked rows; NORM reads the picked ones, others what NORM wrote
    int64_t keep_cached;   // PRODUCT, 1: its weights are read again soon
};

struct Draw {  // `program.DRAW` is the same: how tokens are chosen in a session's rows, whose logits are not wanted
    uint64_t seed;
    double temperature;           // 0: greedy
    double top_p, min_p;          // as in `ChoiceRows`
    int64_t top_k, position;      // position: of the token to be chosen in its first row
    int64_t first_row, num_rows;  // its picked rows: a tree's nodes
};

struct Frame {  // `program.Frame` is the same: the inputs of one forward
    int64_t rows;
    const float *cos, *sin;   // [P, D] by position; the sine's first half is negated
    const int64_t* slots;     // [T] where each row's KV is written
    const int64_t* kv_slots;  // of all segments, one after the other, or a whole slot table
    // [T] into kv_slots: the first entry that a row sees, how many from there on it sees without gaps, and the entry of its
    // word's lowest bit
    const int64_t *prefix_begin, *prefix_len, *tree_begin;
    const uint64_t* words;     // [T] bit j: the row sees kv_slots[tree_begin + j]
    bf16* kv;                  // [L, S, 2, G, D]
    int64_t layer_stride;      // elements
    const int64_t* tokens;     // [T] for EMBED
    const bf16* states;        // [T, W] for WIDEN
    const int64_t* positions;  // [T] rows of cos and sin
    const int64_t* segments;   // of the batch: q_indptr, kv_indptr, begins, mask_lens; null: prefix_* and tree_begin are given
    int64_t num_segments, window;
    const int64_t* picked;  // [num_picked] the rows that operations with `picked_only` compute
    int64_t num_picked;
    bf16* features;            // [S, F] rows by slot
    const Draw* draws;         // for CHOOSE; their rows tile the picked ones; null: all rows are greedy
    int64_t num_draws;
};

}  // namespace
