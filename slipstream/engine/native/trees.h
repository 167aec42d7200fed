// Grows draft trees, greedy or under keyed noise: from the tokens that a draft head has not read yet down to the
// leaves, without Python between levels. `run` computes a list of operations for a frame; nothing here knows about
// threads.
//
// Rules:
// 1. The first forward computes the pending rows of all sessions; the last row of each gives the root's children.
//    Then trees grow level by level: the K best candidates of a level (the earlier first among equals) are the rows
//    of the next one. Scores are summed in float64, as the host does when it chooses again.
// 2. With `wanted` nodes only those of the best `wanted` - 1 nodes are: no child of others would be sent.
// 3. Sampled sessions are ranked under their noise (`races.h`). If the ranking of a row is not certain, only the
//    levels down to this row count as known (`Trees::known_levels`); deeper ones are to be ignored. Penalties and bias
//    change a greedy session's logits where they are, in float32.
// 4. The KV entries of a session are: its computed ones, its pending rows', then its tree's, level by level.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "operations.h"

namespace {

struct Seed {                       // one session, as `draft.Call` packs it
    int64_t rows, begin, computed;  // pending rows; where its KV entries begin; how many of them are computed
    int64_t position;               // of the first pending row
    int64_t levels;                 // beyond the root's children, at most `most_levels`
    int64_t base;                   // position of the root's children in the text, from which their noise is made
    int64_t output;                 // number of the answer's tokens before them
    int64_t choice;                 // which `ChoiceRows`; -1: the greatest logits, as they are
    int64_t wanted;                 // nodes that are sent of the tree; 0: all may have children
};

struct Trees {  // `draft.Trees` is the same
    const Op* body;  // tokens and states to states
    int64_t body_count;
    const Op* head;  // two operations: states to logits, and top-k of these
    float* logits;  // [C, .] buffer: the head's logits
    int64_t logits_stride, columns;
    bf16 *normed, *states;  // [C, W] buffers: input of the head; input of a child's row
    Child* best;            // [C, K] buffer: the head's top-k
    int64_t sessions, topk, most_levels, width, window;
    const float *cos, *sin;        // [P, D]
    const Seed* seeds;             // [B]
    const Vocabulary* vocabulary;  // of the columns
    const ChoiceRows* choices;     // how tokens are chosen, of sessions that are sampled or adjust logits
    int64_t runners_up;            // tokens beyond `topk` that count in the shares of sampled sessions
    const int64_t* tokens;         // of the pending rows of all sessions
    const bf16* pending_states;    // [., W] their states
    const int64_t* kv_slots;       // entries of all sessions
    bf16* kv;
    int64_t layer_stride;
    Child* children;        // [B, 1 + L * K, K] of the root, and of each row
    int64_t* picks;         // [B, L, K] which of a level's candidates are the next level's rows; -1 behind the last
    int64_t* known_levels;  // [B] levels of the tree that are certain; the root's children are the first
    bf16* row_states;       // [B, 1 + L * K, W] states of the root and of each row
};

struct Rows {  // the rows of one forward
    const Trees& trees;
    std::vector<int64_t> tokens, positions, slots, prefix_begin, prefix_len, tree_begin;
    std::vector<uint64_t> words;
    std::vector<bf16> states;

    void add(int64_t token, int64_t position, const bf16* state, int64_t slot) {
        tokens.push_back(token), positions.push_back(position), slots.push_back(slot);
        states.insert(states.end(), state, state + trees.width);
    }
    void add_visibility(int64_t first, int64_t count, uint64_t word, int64_t own) {
        int64_t past = skipped_by_window(trees.window, count, word);
        prefix_begin.push_back(first + past), prefix_len.push_back(count - past), words.push_back(word), tree_begin.push_back(own);
    }
    Frame frame() const {
        return {int64_t(tokens.size()), trees.cos, trees.sin, slots.data(), trees.kv_slots, prefix_begin.data(), prefix_len.data(),
                tree_begin.data(), words.data(), trees.kv, trees.layer_stride, tokens.data(), states.data(), positions.data()};
    }
};

struct Node {  // a row of the newest level
    uint64_t word;
    double total;
    std::vector<int64_t> path;  // tokens from below the root, of a session with `ChoiceRows`
};

Rows pending_rows(const Trees& trees) {
    Rows rows{trees};
    int64_t row = 0;
    for (int64_t b = 0; b < trees.sessions; b++) {
        const Seed& seed = trees.seeds[b];
        for (int64_t i = 0; i < seed.rows; i++, row++) {
            int64_t entry = seed.computed + i;
            rows.add(trees.tokens[row], seed.position + i, trees.pending_states + row * trees.width,
                    trees.kv_slots[seed.begin + entry]);
            rows.add_visibility(seed.begin, entry + 1, 0, 0);
        }
    }
    return rows;
}

// A session's tree so far.
struct Tree {
    int64_t width = 1;           // rows of its newest level; 0: it is finished
    std::vector<double> totals;  // of all nodes, level by level
};

// Adds a session's next level, below rows whose results begin at `first` in the buffers.
void add_level(const Trees& trees, int64_t b, int64_t level, int64_t first, const Node* above, Tree& tree, Rows& rows,
               std::vector<Node>& nodes) {
    const Seed& seed = trees.seeds[b];
    int64_t k = trees.topk, candidates = tree.width * k, context = seed.computed + seed.rows, entries = seed.begin + context;
    int64_t before = tree.totals.size();
    for (int64_t i = 0; i < candidates; i++) {
        double total = above[i / k].total + trees.best[first * k + i].score;
        tree.totals.push_back(total == total ? total : -INFINITY);  // NaN has no order
    }
    const double* totals = tree.totals.data();
    auto precedes = [&](int64_t a, int64_t c) { return totals[a] > totals[c] || (totals[a] == totals[c] && a < c); };
    std::vector<int64_t> order(candidates);
    for (int64_t i = 0; i < candidates; i++) order[i] = before + i;
    std::partial_sort(order.begin(), order.begin() + k, order.end(), precedes);
    std::sort(order.begin(), order.begin() + k);
    int64_t* picks = trees.picks + (b * trees.most_levels + level) * k;
    tree.width = 0;
    for (int64_t i = 0; i < k; i++) {
        if (totals[order[i]] == -INFINITY) continue;  // a filter forbids its token
        int64_t rank = 1;
        for (int64_t other = 0; seed.wanted && other < before + candidates; other++) rank += precedes(other, order[i]);
        if (seed.wanted && rank >= seed.wanted) continue;
        int64_t pick = picks[tree.width] = order[i] - before, parent = pick / k, own = level * k + tree.width++;
        int64_t token = trees.best[first * k + pick].token;
        Node node = {above[parent].word | uint64_t(1) << own, totals[order[i]], above[parent].path};
        if (seed.choice >= 0) node.path.push_back(token);
        rows.add(token, seed.position + seed.rows + level,
                 trees.states + (first + parent) * trees.width, trees.kv_slots[entries + own]);
        rows.add_visibility(seed.begin, context, node.word, entries);
        nodes.push_back(std::move(node));
    }
    std::fill(picks + tree.width, picks + k, -1);
}

// Copies the results of `width` rows of a session, from `first` on in the buffers, to the arrays of the host.
void copy_results(const Trees& trees, int64_t b, int64_t place, int64_t width, int64_t first) {
    int64_t k = trees.topk, to = b * (1 + trees.most_levels * k) + place;
    std::copy_n(trees.best + first * k, width * k, trees.children + to * k);
    std::copy_n(trees.states + first * trees.width, width * trees.width, trees.row_states + to * trees.width);
}

// Applies a greedy session's penalties, bias and stops to a row of logits.
void adjust_logits(const Trees& trees, const ChoiceRows& session, int64_t output, const std::vector<int64_t>& path, float* x) {
    Race race{*trees.vocabulary, session, x, trees.columns, nullptr, nullptr, {}, {}};
    adjust_row(race, {output < session.min_tokens, path.data(), int64_t(path.size()), nullptr}, x);
    for (const AdjustedLogit& one : race.adjusted) x[one.column] = float(one.value);
}

struct SampledRows {  // the newest rows of sampled sessions, as a `RaceCall` has them
    std::vector<ChoiceRows> sessions;
    std::vector<int64_t> session_of, positions, outputs, paths, path_ends, owners;

    void add(const ChoiceRows& session, int64_t owner, int64_t row) {
        sessions.push_back(session), owners.push_back(owner);
        sessions.back().first = int64_t(session_of.size()), sessions.back().row = row;
    }
    void add_row(int64_t position, int64_t output, const std::vector<int64_t>& path) {
        session_of.push_back(int64_t(sessions.size()) - 1), positions.push_back(position), outputs.push_back(output);
        paths.insert(paths.end(), path.begin(), path.end()), path_ends.push_back(int64_t(paths.size()));
    }
};

// Ranks the logits of sampled rows under their noise.
template <typename Run>
void rank_sampled(const Trees& trees, const SampledRows& sampled, int64_t depth, Run run) {
    int64_t rows = int64_t(sampled.session_of.size()), k = trees.topk, most = k + trees.runners_up;
    std::vector<int64_t> tokens(rows * most), sure(rows);
    std::vector<double> scores(rows * most);
    RaceCall call = {trees.vocabulary, sampled.sessions.data(), sampled.session_of.data(), sampled.positions.data(),
                   sampled.outputs.data(), sampled.paths.data(), sampled.path_ends.data(), tokens.data(), scores.data(),
                   sure.data(), most};
    Op op = {};
    op.kind = RACE, op.in = trees.logits, op.in_stride = trees.logits_stride, op.inner = trees.columns, op.extra = &call;
    Frame frame = {};
    frame.rows = rows;
    run(&op, 1, frame);
    for (int64_t place = 0; place < rows; place++) {
        Child* best = trees.best + row_of(call, place) * k;
        for (int64_t i = 0; i < k; i++) best[i] = {tokens[place * most + i], scores[place * most + i]};
        int64_t& known_levels = trees.known_levels[sampled.owners[sampled.session_of[place]]];
        if (!sure[place]) known_levels = std::min(known_levels, depth);
    }
}

// Ranks the head's logits for the newest rows of all sessions (`nodes`), `depth` levels below their roots.
template <typename Run>
void rank_children(const Trees& trees, const std::vector<Tree>& grown, const std::vector<Node>& nodes, int64_t depth,
                   const Frame& frame, Run run) {
    const Seed* last = trees.seeds + trees.sessions;
    if (std::all_of(trees.seeds, last, [](const Seed& seed) { return seed.choice < 0; }))
        return run(trees.head, 2, frame);
    run(trees.head, 1, frame);
    SampledRows sampled;
    int64_t row = 0;
    for (int64_t b = 0; b < trees.sessions; b++) {
        const Seed& seed = trees.seeds[b];
        const ChoiceRows* session = seed.choice < 0 ? nullptr : trees.choices + seed.choice;
        bool greedy = session && session->temperature == 0;
        if (session && !greedy) sampled.add(*session, b, row);
        for (int64_t end = row + grown[b].width; row < end; row++) {
            const int64_t output = seed.output + depth;
            if (greedy) adjust_logits(trees, *session, output, nodes[row].path, trees.logits + row * trees.logits_stride);
            else if (session) sampled.add_row(seed.base + depth, output, nodes[row].path);
        }
    }
    if (int64_t(sampled.session_of.size()) < row) run(trees.head + 1, 1, frame);
    if (!sampled.session_of.empty()) rank_sampled(trees, sampled, depth, run);
}

// run: computes a list of operations (their address and number) for a frame.
template <typename Run>
void grow(const Trees& trees, Run run) {
    for (int64_t b = 0; b < trees.sessions; b++) trees.known_levels[b] = 1 + trees.seeds[b].levels;
    run(trees.body, trees.body_count, pending_rows(trees).frame());
    for (int64_t b = 0, last = -1; b < trees.sessions; b++) {  // the last pending rows to the front, for the head
        last += trees.seeds[b].rows;
        for (bf16* buffer : {trees.normed, trees.states})
            memmove(buffer + b * trees.width, buffer + last * trees.width, trees.width * sizeof(bf16));
    }
    Frame roots = {};
    roots.rows = trees.sessions;
    std::vector<Tree> grown(trees.sessions);
    std::vector<Node> nodes(trees.sessions), next;
    rank_children(trees, grown, nodes, 0, roots, run);
    for (int64_t b = 0; b < trees.sessions; b++) copy_results(trees, b, 0, 1, b);
    for (int64_t level = 0; level < trees.most_levels; level++, nodes.swap(next)) {
        Rows rows{trees};
        next.clear();
        int64_t first = 0;
        for (int64_t b = 0; b < trees.sessions; b++) {
            int64_t above = grown[b].width;
            if (level < trees.seeds[b].levels && above)
                add_level(trees, b, level, first, &nodes[first], grown[b], rows, next);
            else
                grown[b].width = 0;
            if (!grown[b].width) trees.known_levels[b] = std::min(trees.known_levels[b], 1 + level);
            first += above;
        }
        if (next.empty()) return;
        Frame frame = rows.frame();
        run(trees.body, trees.body_count, frame);
        rank_children(trees, grown, next, 1 + level, frame, run);
        first = 0;
        for (int64_t b = 0; b < trees.sessions; first += grown[b++].width)
            copy_results(trees, b, 1 + level * trees.topk, grown[b].width, first);
    }
}

}  // namespace
