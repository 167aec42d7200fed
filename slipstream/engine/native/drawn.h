// The keyed choice of a row without most of its logits: only outputs of the product that could win are computed exactly.
//
// Rules:
// 1. The result is what `races.h` would choose from all outputs, or -1: the specification (`choosing`) must choose.
// 2. A group of outputs is computed if one of them could be the best, by its upper bound (`screen.h`) and its token's noise.
//    An output that is left out loses by more than the rounding of both implementations.
//
// It knows nothing about why nothing else is asked of the logits.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "races.h"
#include "screen.h"

namespace {

int64_t drawn(const Op& op, int64_t row, const Draw& how, Scratch& scratch) {
    constexpr int GROUPS = TILE / GROUP;  // of a tile
    const float* most = op.scales + row * op.layer;
    const int64_t groups = groups_of(op);
    const float* outputs = (const float*)op.extra + row * groups * GROUP;
    const Vocabulary words{nullptr, nullptr, nullptr, op.outer, (op.outer + TILE - 1) / TILE};
    Asked asked{};
    asked.heat = how.heat;
    Race race{words, asked, nullptr, op.outer, nullptr, nullptr, {}, {}};
    std::vector<float> bounds(2 * race.tiles(), -INFINITY);
    race.peaks = bounds.data(), race.noises = race.peaks + race.tiles();
    for (int64_t group = 0; group < groups; group++)
        race.peaks[group / GROUPS] = std::max(race.peaks[group / GROUPS], most[group]);
    race.top = *std::max_element(race.peaks, race.peaks + words.tiles);
    if (!(how.heat >= COLDEST && std::abs(race.top) <= MOST_LOGIT)) return -1;
    race.key = key_of(how.seed, how.position);
    race.near = nearness(race.top, how.heat);
    race.most = 1;
    race.bound();
    float logits[TILE];
    Op exact = exact_row(op, row);
    race.ready = [&](int64_t tile) {
        race.x = logits - tile * TILE;
        exact.out = logits - tile * TILE;
        for (int64_t group = tile * GROUPS; group < std::min(groups, (tile + 1) * GROUPS); group++) {
            const int64_t first = group * GROUP;
            if (any(race.able(tile, first, load(outputs + first)) | race.able(tile, first + LANES, load(outputs + first + LANES))))
                product<Halves>(exact, group, group + 1, 1, scratch);
            else
                std::fill_n(logits + first - tile * TILE, GROUP, -INFINITY);
        }
    };
    race.run();
    return race.apart() && !race.best.empty() ? race.best[0].token : -1;
}

}  // namespace
