// Top-k, top-p and min-p, as `slipstream.choosing.logits` specifies them: thresholds on the logit.
//
// If a token is filtered, so are all with lower logits. The best of all nearly always survives, so only that one is
// checked first; if it does not, its logit is the lower limit of the next race.

#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "race.h"

namespace {

// relative error of a mass: at most 256 float32 sums, some roundings of arguments that are 13 on average at most
constexpr double MASS_ERROR = 2e-5;
constexpr double EXACT_MASS_ERROR = 1e-11;  // of one in float64, on either side
constexpr double LOGIT_ERROR = 1e-9;        // logits this close may become equal in float64 when shifted and divided

enum Verdict { OUT, IN, UNSURE };

// Top-k, top-p and min-p as thresholds on the logit, of a row whose logits are all known.
struct Filters {
    explicit Filters(Race& race) : race(race) {}

    Race& race;
    double kth = -INFINITY, lowest = -INFINITY;  // the k-th greatest logit; the threshold of min-p
    double total = -1, others = 0;               // the mass that top-p counts, and an approximation of what is missing in it
    double exact_wanted = -1;                    // the mass above a survivor is less than this, in float64
    double reach = 6;                            // blocks with peaks up to so far below the top are summed exactly
    double lowest_in = INFINITY, highest_out = -INFINITY;

    double slack() const { return LOGIT_ERROR * (1 + race.session.temperature + std::abs(race.top)); }
    bool limited() const { return race.session.top_k > 0 && race.session.top_k < race.count; }

    // Returns whether the thresholds are known.
    bool prepare() {
        const ChoiceRows& session = race.session;
        if (limited() && !rank()) return false;
        if (session.min_p > -INFINITY) lowest = race.top + session.temperature * session.min_p;
        double out = std::max(kth, lowest - slack());
        race.min_logit = std::max(race.min_logit, out);
        return true;
    }

    // Sets `kth` and `total`. Returns whether they are certain.
    virtual bool rank() {
        size_t k = race.session.top_k;
        std::vector<float> peaks(race.peaks, race.peaks + race.vocabulary.blocks);
        double least = -INFINITY;  // lower bound of the k-th greatest
        if (k <= peaks.size()) {
            std::nth_element(peaks.begin(), peaks.begin() + k - 1, peaks.end(), std::greater<>());
            least = peaks[k - 1];
        }
        std::vector<double> found;
        float low = round_up(least - LOGIT_ERROR);
        for (int64_t block = 0; block < race.vocabulary.blocks; block++) {
            if (!(race.peaks[block] >= low)) continue;
            for (int64_t i = race.begin(block); i < race.end(block); i++)
                if (race.x[i] >= low && race.x[i] > -INFINITY) found.push_back(race.x[i]);
        }
        for (const AdjustedLogit& one : race.adjusted)
            if (one.value >= low && one.value > -INFINITY) found.push_back(one.value);
        if (found.size() >= k) {
            std::nth_element(found.begin(), found.begin() + k - 1, found.end(), std::greater<>());
            kth = found[k - 1];
        }
        total = 0;
        for (double logit : found) {
            if (logit >= kth) total += race.relative_mass(logit);
            else if (logit > kth - LOGIT_ERROR) return false;
        }
        return true;
    }

    Verdict nucleus(double logit) {
        double next = std::nextafter(logit, INFINITY), wanted = race.session.top_p;
        double above = race.mass(next, logit), certain_above = -1;
        if (race.adjusted.empty() && round_up(next) == round_up(logit + slack())) certain_above = above;  // nothing lies in between
        // the second term: the top may not be a float32
        double error = MASS_ERROR + 1.2e-7 * std::abs(race.top) / race.session.temperature;
        while (true) {
            if (total < 0) total = race.mass(-INFINITY, race.top - reach * race.session.temperature, &others);
            if (above * (1 + error) < wanted * (total + CHORD_RATIO * others) * (1 - error)) return IN;
            if (certain_above < 0) certain_above = race.mass(logit + slack(), logit);
            if (certain_above * (1 - error) > wanted * (total + 1.01 * others) * (1 + error)) return OUT;
            if (limited() || reach == INFINITY) return exact_nucleus(logit);
            reach = INFINITY, total = -1, others = 0;
        }
    }

    Verdict exact_nucleus(double logit) {
        if (exact_wanted < 0) exact_wanted = race.session.top_p * (limited() ? total : race.exact_mass(-INFINITY));
        double least = exact_wanted * (1 - EXACT_MASS_ERROR), most = exact_wanted * (1 + EXACT_MASS_ERROR);
        if (race.exact_mass(std::nextafter(logit, INFINITY)) < least) return IN;
        return race.exact_mass(logit + slack()) > most ? OUT : UNSURE;
    }

    // What top-k and top-p say of a logit of at least `kth`.
    virtual Verdict judge(double logit) { return race.session.top_p < 1 ? nucleus(logit) : IN; }

    Verdict survives(double logit) {  // logit: at least `race.min_logit`
        if (logit >= lowest_in) return IN;
        if (logit <= highest_out) return OUT;
        if (race.session.min_p > -INFINITY && std::abs(logit - lowest) <= slack()) return UNSURE;
        Verdict found = judge(logit);
        if (found == IN) lowest_in = logit;
        if (found == OUT) highest_out = logit;
        return found;
    }
};

bool is_filtered(const ChoiceRows& session) {
    return session.top_k > 0 || session.top_p < 1 || session.min_p > -INFINITY;
}

// Leaves the best survivors in `race.best`. Returns whether they are certain.
bool choose_filtered(Race& race, Filters& filters) {
    if (!filters.prepare()) return false;
    while (true) {
        race.run();
        std::vector<double> logits;
        for (const Candidate& one : race.best)
            // for one winner the second only has to be far away
            if (race.num_wanted > 1 || logits.empty()) logits.push_back(one.logit);
        std::sort(logits.begin(), logits.end());
        // All above a survivor survive, and none below one that does not.
        size_t low = 0, high = logits.size();
        while (low < high) {
            size_t middle = (low + high) / 2;
            Verdict verdict = filters.survives(logits[middle]);
            if (verdict == UNSURE) return false;
            if (verdict == IN) high = middle;
            else low = middle + 1;
        }
        if (!low) return race.is_order_certain();
        race.min_logit = std::max(race.min_logit, std::nextafter(logits[low - 1], INFINITY));
    }
}

}  // namespace
