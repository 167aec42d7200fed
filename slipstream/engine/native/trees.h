// Draft trees, greedy or under keyed noise, from tokens that a draft head has not seen yet down to the leaves, without Python between levels.
//
// Rules:
// 1. The first forward computes the pending rows of all sessions; the last row of each gives the root's children. Then trees
//    grow level by level: the K best candidates of a level (the earlier first among equals) are the rows of the next one.
//    Scores are summed in float64, as the host does when it chooses again.
// 2. Sessions are sorted by their number of levels, most first, so the sessions that have a level are the first ones.
// 3. Sampled sessions are ranked under their noise (`races.h`). If the ranking of a row is not certain, only the levels down
//    to this row count as known (`Trees::known`); deeper ones are to be ignored.
// 4. The KV entries of a session are: its computed ones, its pending rows', then its tree's, level by level.
//
// It knows nothing about threads: `run` computes a list for a frame.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "operations.h"

namespace {

struct Seed {  // `draft.Call` tells the same: one session
    int64_t rows, begin, computed;  // pending rows; where its KV entries begin; how many of them are computed
    int64_t position;               // of the first pending row
    int64_t levels;                 // beyond the root's children, at most `most_levels`
    int64_t base;                   // position of the root's children in the text, from which their noise is made
    int64_t asked;                  // which `Asked`; -1: greedy
};

struct Trees {  // `draft.Trees` is the same
    const Op* body;  // tokens and states to states
    int64_t body_count;
    const Op* head;  // two: states to logits, and these to the best of them
    const float* logits;  // [C, .] a buffer: what the head's product says
    int64_t logits_stride, columns;
    bf16 *normed, *states;  // [C, W] buffers: what the head reads; what a child's row reads
    Child* best;            // [C, K] what the head says
    int64_t sessions, topk, most_levels, width, window;
    const float *cos, *sin;   // [P, D]
    const Seed* seeds;        // [B]
    const Vocabulary* vocabulary;  // of the columns
    const Asked* asked;       // of sampled sessions
    int64_t spare;            // tokens beyond `topk` among which shares are told, of sampled ones
    const int64_t* tokens;    // pending, of all sessions
    const bf16* read;         // [., W] their states
    const int64_t* kv_slots;  // entries of all sessions
    bf16* kv;
    int64_t layer_stride;
    Child* children;  // [B, 1 + L * K, K] of the root, and of each row
    int64_t* picks;   // [B, L, K] which of a level's candidates are the next level's rows
    int64_t* known;   // [B] levels of the tree that are certain, the root's children the first of them
    bf16* found;      // [B, 1 + L * K, W] states of the root and of each row
};

struct Rows {  // of one forward
    const Trees& trees;
    std::vector<int64_t> tokens, positions, slots, begin, shared, tree;
    std::vector<uint64_t> words;
    std::vector<bf16> states;

    void add(int64_t token, int64_t position, const bf16* state, int64_t slot) {
        tokens.push_back(token), positions.push_back(position), slots.push_back(slot);
        states.insert(states.end(), state, state + trees.width);
    }
    void see(int64_t first, int64_t count, uint64_t word, int64_t own) {
        int64_t past = skipped(trees.window, count, word);
        begin.push_back(first + past), shared.push_back(count - past), words.push_back(word), tree.push_back(own);
    }
    Frame frame() const {
        return {int64_t(tokens.size()), trees.cos, trees.sin, slots.data(), trees.kv_slots, begin.data(), shared.data(),
                tree.data(), words.data(), trees.kv, trees.layer_stride, tokens.data(), states.data(), positions.data()};
    }
};

struct Node {  // a row of the newest level
    uint64_t word;
    double total;
};

Rows pending(const Trees& trees) {
    Rows rows{trees};
    int64_t row = 0;
    for (int64_t b = 0; b < trees.sessions; b++) {
        const Seed& seed = trees.seeds[b];
        for (int64_t i = 0; i < seed.rows; i++, row++) {
            int64_t entry = seed.computed + i;
            rows.add(trees.tokens[row], seed.position + i, trees.read + row * trees.width, trees.kv_slots[seed.begin + entry]);
            rows.see(seed.begin, entry + 1, 0, 0);
        }
    }
    return rows;
}

// A session's next level below `width` rows, whose results begin at `first` in the buffers.
void descend(const Trees& trees, int64_t b, int64_t level, int64_t width, int64_t first, const Node* above, Rows& rows,
             std::vector<Node>& nodes) {
    const Seed& seed = trees.seeds[b];
    int64_t k = trees.topk, candidates = width * k, context = seed.computed + seed.rows, tree = seed.begin + context;
    std::vector<double> totals(candidates);
    for (int64_t i = 0; i < candidates; i++) {
        double total = above[i / k].total + trees.best[first * k + i].score;
        totals[i] = total == total ? total : -INFINITY;  // order needs numbers
    }
    std::vector<int64_t> order(candidates);
    for (int64_t i = 0; i < candidates; i++) order[i] = i;
    auto before = [&](int64_t a, int64_t c) { return totals[a] > totals[c] || (totals[a] == totals[c] && a < c); };
    std::partial_sort(order.begin(), order.begin() + k, order.end(), before);
    std::sort(order.begin(), order.begin() + k);
    int64_t* picks = trees.picks + (b * trees.most_levels + level) * k;
    for (int64_t i = 0; i < k; i++) {
        int64_t pick = picks[i] = order[i], parent = pick / k, own = level * k + i;
        Node node = {above[parent].word | uint64_t(1) << own, totals[pick]};
        rows.add(trees.best[first * k + pick].token, seed.position + seed.rows + level,
                 trees.states + (first + parent) * trees.width, trees.kv_slots[tree + own]);
        rows.see(seed.begin, context, node.word, tree);
        nodes.push_back(node);
    }
}

// What the buffers hold of `width` rows of a session, from `first` on, to where the host looks for it.
void keep(const Trees& trees, int64_t b, int64_t place, int64_t width, int64_t first) {
    int64_t k = trees.topk, to = b * (1 + trees.most_levels * k) + place;
    std::copy_n(trees.best + first * k, width * k, trees.children + to * k);
    std::copy_n(trees.states + first * trees.width, width * trees.width, trees.found + to * trees.width);
}

// The best of the head's logits, of `width` rows of each of the first `count` sessions, so deep below their roots.
template <typename Run>
void rank(const Trees& trees, int64_t count, int64_t width, int64_t depth, const Frame& frame, Run run) {
    std::vector<Asked> asked;
    std::vector<int64_t> sessions, positions, owners;
    for (int64_t b = 0; b < count; b++) {
        const Seed& seed = trees.seeds[b];
        if (seed.asked < 0) continue;
        asked.push_back(trees.asked[seed.asked]), owners.push_back(b);
        asked.back().first = int64_t(sessions.size()), asked.back().row = b * width;
        sessions.insert(sessions.end(), width, int64_t(asked.size()) - 1);
        positions.insert(positions.end(), width, seed.base + depth);
    }
    int64_t rows = int64_t(sessions.size()), k = trees.topk, most = k + trees.spare;
    run(trees.head, rows < count * width ? 2 : 1, frame);
    if (!rows) return;
    std::vector<int64_t> none(rows), tokens(rows * most), sure(rows);
    std::vector<double> scores(rows * most);
    Races races = {trees.vocabulary, asked.data(), sessions.data(), positions.data(), none.data(), nullptr, none.data(),
                   tokens.data(), scores.data(), sure.data(), most};
    Op op = {};
    op.kind = RACE, op.in = trees.logits, op.in_stride = trees.logits_stride, op.inner = trees.columns, op.extra = &races;
    Frame raced = {};
    raced.rows = rows;
    run(&op, 1, raced);
    for (int64_t place = 0; place < rows; place++) {
        Child* best = trees.best + row_of(races, place) * k;
        for (int64_t i = 0; i < k; i++) best[i] = {tokens[place * most + i], scores[place * most + i]};
        int64_t& known = trees.known[owners[sessions[place]]];
        if (!sure[place]) known = std::min(known, depth);
    }
}

// run: computes a list (its operations, how many) for a frame.
template <typename Run>
void grow(const Trees& trees, Run run) {
    for (int64_t b = 0; b < trees.sessions; b++) trees.known[b] = 1 + trees.seeds[b].levels;
    run(trees.body, trees.body_count, pending(trees).frame());
    for (int64_t b = 0, last = -1; b < trees.sessions; b++) {  // the last pending rows to the front, for the head
        last += trees.seeds[b].rows;
        for (bf16* buffer : {trees.normed, trees.states})
            memmove(buffer + b * trees.width, buffer + last * trees.width, trees.width * sizeof(bf16));
    }
    Frame roots = {};
    roots.rows = trees.sessions;
    rank(trees, trees.sessions, 1, 0, roots, run);
    for (int64_t b = 0; b < trees.sessions; b++) keep(trees, b, 0, 1, b);
    std::vector<Node> nodes(trees.sessions), next;
    for (int64_t level = 0, width = 1; level < trees.most_levels; level++, width = trees.topk, nodes = next) {
        Rows rows{trees};
        next.clear();
        int64_t count = 0;
        for (; count < trees.sessions && trees.seeds[count].levels > level; count++)
            descend(trees, count, level, width, count * width, &nodes[count * width], rows, next);
        if (!count) return;
        Frame frame = rows.frame();
        run(trees.body, trees.body_count, frame);
        rank(trees, count, trees.topk, 1 + level, frame, run);
        for (int64_t b = 0; b < count; b++) keep(trees, b, 1 + level * trees.topk, trees.topk, b * trees.topk);
    }
}

}  // namespace
