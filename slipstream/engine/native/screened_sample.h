// The keyed sample of a row without most of its logits: an output is computed exactly only if it could win, by its
// upper bound (`screen.h`) and its token's noise (`race.h`). The result is what `races.h` would choose from all
// outputs, or -1: then the specification (`slipstream.choosing`) must choose. An output that is left out loses by
// more than the rounding of both implementations.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "races.h"
#include "screen.h"

namespace {

int64_t screened_sample(const Op& op, int64_t row, const Draw& how, Scratch& scratch) {
    constexpr int GROUPS_PER_BLOCK = NOISE_BLOCK / GROUP;  // GROUPs of outputs in a noise block
    const float* group_bounds = op.scales + row * op.layer;
    const int64_t groups = groups_of(op);
    const float* outputs = (const float*)op.extra + row * groups * GROUP;
    const Vocabulary vocabulary{nullptr, nullptr, nullptr, op.outer, (op.outer + NOISE_BLOCK - 1) / NOISE_BLOCK};
    ChoiceRows session{};
    session.temperature = how.temperature;
    Race race{vocabulary, session, nullptr, op.outer, nullptr, nullptr, {}, {}};
    std::vector<float> bounds(2 * race.blocks(), -INFINITY);
    race.peaks = bounds.data(), race.noise_bounds = race.peaks + race.blocks();
    for (int64_t group = 0; group < groups; group++)
        race.peaks[group / GROUPS_PER_BLOCK] = std::max(race.peaks[group / GROUPS_PER_BLOCK], group_bounds[group]);
    race.top = *std::max_element(race.peaks, race.peaks + vocabulary.blocks);
    if (!(how.temperature >= MIN_TEMPERATURE && std::abs(race.top) <= MAX_LOGIT)) return -1;
    race.key = row_key(how.seed, how.position);
    race.tolerance = score_tolerance(race.top, how.temperature);
    race.num_wanted = 1;
    race.bound_noise();
    float logits[NOISE_BLOCK];
    Op exact = exact_row(op, row);
    race.before_block = [&](int64_t block) {
        race.x = logits - block * NOISE_BLOCK;
        exact.out = logits - block * NOISE_BLOCK;
        for (int64_t group = block * GROUPS_PER_BLOCK; group < std::min(groups, (block + 1) * GROUPS_PER_BLOCK); group++) {
            const int64_t first = group * GROUP;
            if (any(race.may_win(block, first, load(outputs + first)) | race.may_win(block, first + LANES,
                    load(outputs + first + LANES))))
                product<Bf16Weights>(exact, group, group + 1, 1, scratch);
            else
                std::fill_n(logits + first - block * NOISE_BLOCK, GROUP, -INFINITY);
        }
    };
    race.run();
    return race.is_order_certain() && !race.best.empty() ? race.best[0].token : -1;
}

}  // namespace
