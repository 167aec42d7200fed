// A row of outputs of which only some groups were computed exactly; upper bounds of all others are known (`screen.h`).

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "products.h"
#include "race.h"
#include "screen.h"

namespace {

struct PartialRow {
    const Op exact;  // the row's product
    const int64_t groups;
    const float *group_bounds, *bounds;  // [groups], [groups * GROUP] no output is more
    Scratch& scratch;
    std::vector<int64_t> places;  // [groups] where a group's outputs are in `outputs`; -1: not computed
    std::vector<float> outputs;   // of the groups that were computed, GROUP each

    // op: a CHOOSE.
    PartialRow(const Op& op, int64_t row, Scratch& scratch)
        : exact(exact_row(op, row)), groups(groups_of(op)), group_bounds(op.scales + row * op.layer),
          bounds((const float*)op.extra + row * groups * GROUP), scratch(scratch), places(groups, -1) {}

    const float* compute(int64_t group) {  // its outputs, valid until the next call; -inf beyond the last one
        if (places[group] < 0) {
            places[group] = int64_t(outputs.size());
            outputs.resize(outputs.size() + GROUP);
            Op one = exact;
            one.out = &outputs[places[group]] - group * GROUP;
            product<Bf16Weights>(one, group, group + 1, 1, scratch);
            const int64_t used = std::min<int64_t>(exact.outer - group * GROUP, GROUP);
            std::fill_n(outputs.end() - (GROUP - used), GROUP - used, -INFINITY);
        }
        return &outputs[places[group]];
    }

    // Computes the groups that may have an output of at least `least`. Returns whether these are no more than `most`, all
    // that were computed before included; else some may be missing.
    bool compute_above(double least, size_t most) {
        for (int64_t group = 0; group < groups; group++) {
            if (!(group_bounds[group] >= least) || places[group] >= 0) continue;
            if (outputs.size() >= most * GROUP) return false;
            compute(group);
        }
        return true;
    }

    float greatest_known() const { return *std::max_element(outputs.begin(), outputs.end()); }

    // How many of the computed outputs are more than `least`; how many of the others may be.
    size_t count_known(double least) const {
        return std::count_if(outputs.begin(), outputs.end(), [&](float x) { return x > least; });
    }
    size_t count_others(double least) const {
        size_t count = 0;
        for (int64_t group = 0; group < groups; group++)
            if (places[group] < 0 && group_bounds[group] > least)
                count += std::count_if(bounds + group * GROUP, bounds + (group + 1) * GROUP, [&](float x) { return x > least; });
        return count;
    }

    // The mass of the computed outputs that are at least `least`, in float64.
    double known_mass(const Race& race, double least) const {
        const double from = std::max(least, race.top + NO_MASS * race.session.temperature);
        double sum = 0;
        for (float x : outputs) sum += x >= from ? race.relative_mass(x) : 0;
        return sum;
    }

    // An upper bound of the mass of the other outputs that may be more than `least`; none of them is above the top.
    double mass_bound(const Race& race, double least) const {
        const Floats top = splat(float(race.top)), scale = splat(race.inverse_temperature);
        Floats sum = {};
        for (int64_t group = 0; group < groups; group++) {
            if (places[group] >= 0 || !(group_bounds[group] > least)) continue;
            const float* each = bounds + group * GROUP;
            sum += exponential((load(each) - top) * scale) + exponential((load(each + LANES) - top) * scale);
        }
        // Exponents of 80 cost 1e-5, and each addition a lane's last bit.
        return double(reduce_add(sum)) * (1.0001 + double(groups) * 0x1p-22);
    }
};

}  // namespace
