// Keyed choices: the best tokens of the rows of a call under penalties, filters and Gumbel noise, as
// `slipstream.choosing` specifies them. Nothing here knows about threads.
//
// The result of a row is that of the specification, or "not sure": two scores, or a mass and its limit, are closer than
// the rounding of both implementations, or a number is NaN. Then the specification computes the row.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "filters.h"
#include "op.h"
#include "race.h"

namespace {

struct RaceCall {  // `NativeRace` fills it: one call, for R rows
    const Vocabulary* vocabulary;
    const ChoiceRows* sessions;
    const int64_t* session_of;  // [R] which `ChoiceRows`
    const int64_t* positions;   // [R] of the token to be chosen
    const int64_t* outputs;     // [R] number of the answer's tokens before it
    const int64_t* paths;       // draft tokens among them, of all rows one after the other
    const int64_t* path_ends;   // [R] where each row's path ends
    int64_t* tokens;            // [R, num_wanted] best first, padded with 0
    double* scores;             // [R, num_wanted] their log shares among the returned ones, padded with -inf
    int64_t* sure;              // [R] 0: not sure, the specification must choose
    int64_t num_wanted;
};

struct RowAdjustments {  // what changes the logits of one row
    bool early;
    const int64_t* path;
    int64_t num_path;
    const uint32_t* allowed;
};

// Applies penalties, bias, stops and mask: `race.adjusted` gets the changed logits, `copy` the row without these tokens.
void adjust_row(Race& race, const RowAdjustments& row, float* copy) {
    const ChoiceRows& session = race.session;
    auto column_of = [&](int64_t token) {
        if (!race.vocabulary.ids) return token >= 0 && token < race.count ? token : -1;
        return token >= 0 && token < race.vocabulary.num_ids ? race.vocabulary.columns[token] : -1;
    };
    std::vector<AdjustedLogit>& adjusted = race.adjusted;
    auto add = [&](int64_t token) {
        if (int64_t column = column_of(token); column >= 0) adjusted.push_back({column, race.x[column]});
    };
    struct Count {
        int64_t column, count;
    };
    std::vector<Count> counts;  // by column, as its tokens ascend; empty if nothing is penalised
    counts.reserve(session.num_seen + row.num_path);
    for (int64_t i = 0; i < session.num_seen; i++)
        if (int64_t column = column_of(session.seen[i]); column >= 0) counts.push_back({column, session.counts[i]});
    for (int64_t i = 0; i < row.num_path; i++) {
        int64_t column = column_of(row.path[i]);
        if (column < 0) continue;
        auto before = [](const Count& one, int64_t other) { return one.column < other; };
        auto place = std::lower_bound(counts.begin(), counts.end(), column, before);
        if (place == counts.end() || place->column != column) place = counts.insert(place, {column, 0});
        place->count++;
    }
    adjusted.reserve(counts.size() + session.num_biased + session.num_stops);
    for (const Count& one : counts) {
        double value = race.x[one.column];
        if (session.repetition != 1) value = value > 0 ? value / session.repetition : value * session.repetition;
        value = value - session.frequency * double(one.count) - session.presence * double(one.count > 0);
        adjusted.push_back({one.column, value});
    }
    for (int64_t i = 0; i < session.num_biased; i++) add(session.biased[i]);
    for (int64_t i = 0; row.early && i < session.num_stops; i++) add(session.stops[i]);
    auto by_column = [](const AdjustedLogit& a, const AdjustedLogit& b) { return a.column < b.column; };
    std::sort(adjusted.begin() + counts.size(), adjusted.end(), by_column);
    // A penalised entry precedes one with the plain logit.
    std::inplace_merge(adjusted.begin(), adjusted.begin() + counts.size(), adjusted.end(), by_column);
    auto same = [](const AdjustedLogit& a, const AdjustedLogit& b) { return a.column == b.column; };
    adjusted.erase(std::unique(adjusted.begin(), adjusted.end(), same), adjusted.end());
    auto find = [&](int64_t token) -> AdjustedLogit* {
        int64_t column = column_of(token);
        if (column < 0) return nullptr;
        return &*std::lower_bound(adjusted.begin(), adjusted.end(), AdjustedLogit{column, 0}, by_column);
    };
    for (int64_t i = 0; i < session.num_biased; i++)
        if (AdjustedLogit* one = find(session.biased[i])) one->value += session.amounts[i];
    for (int64_t i = 0; row.early && i < session.num_stops; i++)
        if (AdjustedLogit* one = find(session.stops[i])) one->value = -INFINITY;
    auto allowed = [&](int64_t token) { return !row.allowed || (row.allowed[token / 32] >> (token % 32) & 1); };
    if (row.allowed && !race.vocabulary.ids) {
        for (int64_t i = 0; i < race.count; i += 32) {
            uint32_t word = row.allowed[i / 32];
            for (int64_t j = i; j < std::min(i + 32, race.count); j++, word >>= 1) copy[j] = word & 1 ? race.x[j] : -INFINITY;
        }
    } else {
        for (int64_t i = 0; i < race.count; i++) copy[i] = allowed(race.token(i)) ? race.x[i] : -INFINITY;
    }
    for (AdjustedLogit& one : adjusted) {
        copy[one.column] = -INFINITY;
        if (!allowed(race.token(one.column))) one.value = -INFINITY;
    }
    race.x = copy;
}

// The greatest logit, the lowest token among equals.
void choose_greatest(Race& race) {
    Candidate found = {INT64_MAX, 0, -INFINITY};
    auto offer = [&](int64_t token, double logit) {
        if (logit > found.logit || (logit == found.logit && token < found.token)) found = {token, 0, logit};
    };
    for (int64_t block = 0; block < race.vocabulary.blocks; block++) {
        if (!(race.peaks[block] == race.top)) continue;
        for (int64_t i = race.begin(block); i < race.end(block); i++)
            if (race.x[i] == race.top) offer(race.token(i), race.x[i]);
        break;
    }
    for (const AdjustedLogit& one : race.adjusted) offer(race.token(one.column), one.value);
    race.best.assign(1, found);
}

// The row in the logits of the call's row `place`.
int64_t row_of(const RaceCall& call, int64_t place) {
    const ChoiceRows& session = call.sessions[call.session_of[place]];
    return session.row + place - session.first;
}

// Chooses for the call's row `place`. x: its logits; scratch: grows as needed.
void race_row(const RaceCall& call, int64_t place, const float* x, int64_t count, std::vector<float>& scratch) {
    const ChoiceRows& session = call.sessions[call.session_of[place]];
    Race race{*call.vocabulary, session, x, count, nullptr, nullptr, {}, {}};
    int64_t blocks = race.blocks();
    if (int64_t(scratch.size()) < 2 * blocks + count) scratch.resize(2 * blocks + count);
    race.peaks = scratch.data(), race.noise_bounds = race.peaks + blocks;
    race.num_wanted = call.num_wanted;
    int64_t begin = place ? call.path_ends[place - 1] : 0;
    RowAdjustments row = {call.outputs[place] < session.min_tokens && !session.allowed, call.paths + begin,
            call.path_ends[place] - begin,
                   session.allowed ? session.allowed + (place - session.first) * session.mask_words : nullptr};
    bool penalised = session.repetition != 1 || session.frequency != 0 || session.presence != 0;
    if (penalised || session.num_biased || (row.early && session.num_stops) || row.allowed)
        adjust_row(race, row, race.noise_bounds + blocks);
    bool sure = race.find_peaks() && std::abs(race.top) <= MAX_LOGIT;
    if (sure && session.temperature == 0) {
        choose_greatest(race);
    } else if (sure && (sure = session.temperature >= MIN_TEMPERATURE
            && std::abs(race.top - float(race.top)) <= BOUND_SLACK / 2 * session.temperature)) {
        race.key = row_key(session.seed, call.positions[place]);
        race.tolerance = score_tolerance(race.top, session.temperature);
        race.bound_noise();
        if (is_filtered(session)) {
            Filters filters(race);
            sure = choose_filtered(race, filters);
        } else {
            race.run();
            sure = race.is_order_certain();
        }
    }
    std::vector<Candidate>& best = race.best;
    if (best.size() > race.num_wanted) best.pop_back();
    call.sure[place] = sure && !best.empty();
    double sum = 0;
    for (const Candidate& one : best) sum += std::exp(one.score - best[0].score);
    for (size_t i = 0; i < race.num_wanted; i++) {
        bool is = i < best.size();
        call.tokens[place * race.num_wanted + i] = is ? best[i].token : 0;
        call.scores[place * race.num_wanted + i] = is ? float(best[i].score - best[0].score - std::log(sum)) : -INFINITY;
    }
}

// Chooses for the call's row `place`; for a tree's first row, in all its rows that a walk along the choices reaches, and
// for its other rows nothing. After a row that is not sure all rows are not.
void race_rows(const RaceCall& call, int64_t place, const Op& op, std::vector<float>& scratch) {
    auto choose = [&](int64_t row) {
        race_row(call, row, (const float*)op.in + row_of(call, row) * op.in_stride, op.inner, scratch);
    };
    const ChoiceRows& session = call.sessions[call.session_of[place]];
    if (!session.parents) return choose(place);
    if (place != session.first) return;
    int64_t* tokens = call.tokens + place * call.num_wanted;
    std::fill_n(call.sure + place, session.num_rows, 1);
    for (int64_t node = 0; node < session.num_rows;) {
        choose(place + node);
        if (!call.sure[place + node]) return (void)std::fill_n(call.sure + place + node, session.num_rows - node, 0);
        const int64_t above = node;
        for (node++; node < session.num_rows; node++)
            if (session.parents[node] == above && session.nodes[node] == tokens[above * call.num_wanted]) break;
    }
}

}  // namespace
