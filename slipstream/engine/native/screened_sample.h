// The keyed sample of a row without most of its logits: an output is computed exactly only if it could win, by its
// upper bound (`screen.h`) and its token's noise (`race.h`), or if a filter has to know it. The result is what
// `races.h` would choose from all outputs, or -1: then the specification (`slipstream.choosing`) must choose. An output
// that is left out loses by more than the rounding of both implementations.

#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "filters.h"
#include "partial_row.h"
#include "race.h"

namespace {

// Filters of a row that is computed only as far as they need. They depend on few likely tokens, and on how many, or how
// likely, the others can be at most: if bounds do not decide, more outputs are computed.
struct ScreenedFilters : Filters {
    static constexpr double FIRST_REACH = 2, LAST_REACH = 8;  // temperatures below the top, down to which all are computed
    PartialRow& row;
    const size_t most;  // groups to compute: beyond them a whole product is faster
    double computed_reach = 0;

    ScreenedFilters(Race& race, PartialRow& row) : Filters(race), row(row), most(std::max<size_t>(row.groups / 8, 16)) {}

    bool find_top() {  // false: it needs too many groups
        row.compute(std::max_element(row.group_bounds, row.group_bounds + row.groups) - row.group_bounds);
        if (!row.compute_above(row.greatest_known(), most)) return false;
        race.top = row.greatest_known();
        return true;
    }

    bool rank() override { return true; }

    Verdict judge(double logit) override {
        while (true) {
            Verdict found = limited() ? place(logit) : IN;
            if (found != OUT && race.session.top_p < 1)
                if (Verdict other = share(logit); other != IN) found = other;
            if (found != UNSURE || computed_reach == LAST_REACH) return found;
            computed_reach = computed_reach ? 2 * computed_reach : FIRST_REACH;
            if (!row.compute_above(race.top - computed_reach * race.session.temperature, most)) return UNSURE;
        }
    }

    Verdict place(double logit) const {  // by top-k
        const size_t k = race.session.top_k;
        if (row.count_known(logit) + row.count_others(logit) < k) return IN;
        return row.count_known(logit + slack()) >= k ? OUT : UNSURE;
    }

    Verdict share(double logit) const {  // by top-p
        auto [least, greatest] = limited() ? mass_of_best() : std::pair<double, double>(row.known_mass(race, -INFINITY), INFINITY);
        double above = row.known_mass(race, std::nextafter(logit, INFINITY)), wanted = race.session.top_p;
        if (above + row.mass_bound(race, logit) < wanted * least * (1 - 2 * EXACT_MASS_ERROR)) return IN;
        if (greatest == INFINITY) greatest = row.known_mass(race, -INFINITY) + row.mass_bound(race, -INFINITY);
        return row.known_mass(race, logit + slack()) > wanted * greatest * (1 + 2 * EXACT_MASS_ERROR) ? OUT : UNSURE;
    }

    // Bounds of the mass that top-k leaves.
    std::pair<double, double> mass_of_best() const {
        std::vector<float> best = row.outputs;
        const size_t k = std::min<size_t>(race.session.top_k, best.size());
        std::nth_element(best.begin(), best.begin() + k - 1, best.end(), std::greater<>());
        const double least_best = best[k - 1], mass = row.known_mass(race, least_best);
        const bool all_known = k == size_t(race.session.top_k) && !row.count_others(least_best - slack())
                && row.count_known(least_best - slack()) == row.count_known(std::nextafter(least_best, -INFINITY));
        if (all_known) return {mass, mass};
        return {std::accumulate(best.begin(), best.begin() + k, 0.0,
                [&](double sum, float x) { return sum + race.relative_mass(x); }), INFINITY};
    }
};

// The choice of a row, at a temperature, for the token at `position`.
int64_t screened_sample(const Op& op, int64_t row, const Draw& how, int64_t position, Scratch& scratch) {
    constexpr int GROUPS_PER_BLOCK = NOISE_BLOCK / GROUP;  // GROUPs of outputs in a noise block
    PartialRow outputs(op, row, scratch);
    const Vocabulary vocabulary{nullptr, nullptr, nullptr, op.outer, (op.outer + NOISE_BLOCK - 1) / NOISE_BLOCK};
    ChoiceRows session{};
    session.temperature = how.temperature, session.top_p = how.top_p, session.min_p = how.min_p, session.top_k = how.top_k;
    Race race{vocabulary, session, nullptr, op.outer, nullptr, nullptr, {}, {}};
    std::vector<float> bounds(2 * race.blocks(), -INFINITY);
    race.peaks = bounds.data(), race.noise_bounds = race.peaks + race.blocks();
    for (int64_t group = 0; group < outputs.groups; group++)
        race.peaks[group / GROUPS_PER_BLOCK] = std::max(race.peaks[group / GROUPS_PER_BLOCK], outputs.group_bounds[group]);
    race.top = *std::max_element(race.peaks, race.peaks + vocabulary.blocks);
    if (!(how.temperature >= MIN_TEMPERATURE && std::abs(race.top) <= MAX_LOGIT)) return -1;
    ScreenedFilters filters(race, outputs);
    if (is_filtered(session) && !(filters.find_top() && std::abs(race.top) <= MAX_LOGIT)) return -1;
    race.key = row_key(how.seed, position);
    race.tolerance = score_tolerance(race.top, how.temperature);
    race.num_wanted = 1;
    race.bound_noise();
    float logits[NOISE_BLOCK];
    race.before_block = [&](int64_t block) {
        race.x = logits - block * NOISE_BLOCK;
        for (int64_t i = 0; i < GROUPS_PER_BLOCK; i++) {
            const int64_t group = block * GROUPS_PER_BLOCK + i, first = group * GROUP;
            if (group < outputs.groups && any(race.may_win(block, first, load(outputs.bounds + first))
                    | race.may_win(block, first + LANES, load(outputs.bounds + first + LANES))))
                std::copy_n(outputs.compute(group), GROUP, logits + i * GROUP);
            else
                std::fill_n(logits + i * GROUP, GROUP, -INFINITY);
        }
    };
    if (is_filtered(session) && !choose_filtered(race, filters)) return -1;
    if (!is_filtered(session)) race.run();
    return race.is_order_certain() && !race.best.empty() ? race.best[0].token : -1;
}

// Chooses in a session's rows, as far as a walk along the choices reaches them, or up to one that is not certain (-1).
void screened_walk(const Op& op, const Frame& frame, const Draw& how, Scratch& scratch) {
    int64_t* chosen = (int64_t*)op.out + how.first_row;
    auto row_of_node = [&](int64_t node) { return frame.picked ? frame.picked[how.first_row + node] : how.first_row + node; };
    std::fill_n(chosen, how.num_rows, 0);
    for (int64_t node = 0, depth = 0; node < how.num_rows; depth++) {
        const int64_t row = how.first_row + node;
        chosen[node] = how.temperature == 0 ? screened_argmax(op, row, scratch)
                : screened_sample(op, row, how, how.position + depth, scratch);
        if (chosen[node] < 0) return;
        const int64_t above = node;
        for (node++; node < how.num_rows; node++) {
            const uint64_t ancestors = frame.words[row_of_node(node)] ^ (uint64_t(1) << node);  // the highest is the parent
            if (std::bit_width(ancestors) - 1 == above && frame.tokens[row_of_node(node)] == chosen[above]) break;
        }
    }
}

}  // namespace
