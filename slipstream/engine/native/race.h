// One row's race: the best tokens of a row of logits under Gumbel noise, as `slipstream.choosing` specifies them. Noise
// is -log of exponential numbers, so a choice is won like a race. Nothing here knows about threads or sessions.
//
// Rules:
// 1. Noise is made for blocks of 64 token ids: one hash bounds the noise of all. A block is computed only if its
//    greatest logit plus that bound could be among the best. Bounds are float32, rounded up; scores are float64.
// 2. Tokens with penalties, bias or stops are taken out of the row and compete by themselves, in float64.
// 3. Masses are sums of float32 exponentials. Blocks far below the top are bounded by their greatest logit, and
//    summed exactly only if the bound does not decide. If that does not decide either, the row is summed in float64.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "vectors.h"

namespace {

constexpr int NOISE_BLOCK = 64;  // `noise.BLOCK`
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15, STRIDE = 0xD1342543DE82EF95, BLOCK_STRIDE = 0xA0761D6478BD642F;
constexpr double NO_MASS = -45;       // exp of it times all tokens is less than `EXACT_MASS_ERROR`
constexpr double CHORD_RATIO = 0.93;  // chords are at most 1.0615 of what they span, and float32 sums of 50,000 are not exact
constexpr float BOUND_SLACK = 0.01f;  // added to bounds: for their own rounding and that of the top to float32
constexpr double MAX_LOGIT = 1e6, MIN_TEMPERATURE = 1e-6;  // beyond these, rounding errors were not analysed

struct Vocabulary {          // `races.Vocabulary` is the same: which tokens the columns are
    const int64_t* ids;      // [V] ascending; null: columns are tokens
    const int64_t* starts;   // [blocks + 1] the first column of each noise block
    const int64_t* columns;  // [num_ids] of tokens, -1: none
    int64_t num_ids, blocks;
};

struct ChoiceRows {  // `races.CHOICE_ROWS` is the same: how tokens are chosen in the rows of a session
    uint64_t seed;
    double temperature;                      // 0: greedy
    double top_p, min_p;                     // top_p: 1 is off; min_p: its logarithm, -inf is off
    int64_t top_k;                           // 0: off
    double repetition, frequency, presence;  // 1, 0, 0: off
    const int64_t *seen, *counts;            // [num_seen] tokens of the prompt and the answer, ascending; how often in the answer
    int64_t num_seen;
    const int64_t* biased;  // [num_biased]
    const double* amounts;
    int64_t num_biased;
    const int64_t* stops;  // [num_stops] impossible before `min_tokens`, unless `allowed` is given
    int64_t num_stops, min_tokens;
    int64_t first, row;       // index of its first row in the call, and in the logits
    const uint32_t* allowed;  // [rows, mask_words] a bit for each token, the lowest first; null: all of them
    int64_t mask_words;
    const int64_t *parents, *nodes;  // of a tree, an entry for each row: parent and token of its node; null: no tree
    int64_t num_rows;
};

constexpr int HALF = LANES / 2;  // as many 64-bit hashes fill a vector

typedef uint64_t U64s __attribute__((vector_size(8 * HALF)));
typedef int64_t I64s __attribute__((vector_size(8 * HALF)));
typedef float HalfFloats __attribute__((vector_size(4 * HALF)));

template <class W>
inline W mix(W word) {  // SplitMix64's finaliser
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB;
    return word ^ (word >> 31);
}

inline U64s iota() {
    U64s numbers;
    for (int i = 0; i < HALF; i++) numbers[i] = i;
    return numbers;
}

// 1 - u for the uniform u of LANES hashes; half: gives the words to hash, HALF at a time.
template <class Half>
inline Floats one_minus_uniform(Half half) {
    float found[LANES];
    for (int64_t i = 0; i < LANES; i += HALF) {
        U64s rest = (((uint64_t(1) << 52) - 1) - (mix<U64s>(half(i)) >> 12)) * 2 + 1;
        HalfFloats wide = __builtin_convertvector((I64s)rest, HalfFloats);  // below 2^53
        memcpy(found + i, &wide, sizeof wide);
    }
    return load(found) * splat(0x1p-53f);
}

inline double exponential_noise(uint64_t hash) { return -std::log(double(2 * (hash >> 12) + 1) * 0x1p-53); }

inline float round_up(double x) {  // the lowest float that is not below x
    float found = float(x);
    return double(found) < x ? std::nextafterf(found, INFINITY) : found;
}

inline Floats load_partial(const float* p, int64_t left) {  // `left` floats, padded with -inf
    if (left >= LANES) return load(p);
    float part[LANES];
    std::fill(std::copy_n(p, std::max<int64_t>(left, 0), part), part + LANES, -INFINITY);
    return load(part);
}

struct AdjustedLogit {
    int64_t column;
    double value;
};

struct Candidate {
    int64_t token;
    double score, logit;
};

struct Race {
    const Vocabulary& vocabulary;
    const ChoiceRows& session;
    const float* x;  // [count]
    int64_t count;
    float *peaks, *noise_bounds;  // [blocks, to a whole vector] the greatest logit; an upper bound of the noise
    std::vector<AdjustedLogit> adjusted;
    std::vector<Candidate> best;  // best first, one more than wanted
    uint64_t key = 0;
    double top = 0, tolerance = 0;  // the greatest logit; the order of closer scores is not certain
    double min_logit = -INFINITY;   // lower logits do not take part
    double assumed_floor = 0;       // assumed score of the last winner, until there are enough candidates
    float inverse_temperature = 0, lowest = 0;
    size_t num_wanted = 0;
    std::function<void(int64_t)> before_block;  // if set, called before `x` is read in a block: it computes its logits

    int64_t blocks() const { return (vocabulary.blocks + LANES - 1) / LANES * LANES; }
    int64_t begin(int64_t block) const { return vocabulary.ids ? vocabulary.starts[block] : block * NOISE_BLOCK; }
    int64_t end(int64_t block) const { return vocabulary.ids ? vocabulary.starts[block + 1]
            : std::min(count, (block + 1) * NOISE_BLOCK); }
    int64_t token(int64_t column) const { return vocabulary.ids ? vocabulary.ids[column] : column; }

    bool find_peaks() {  // false: a logit is NaN
        bool has_nan = false;
        for (int64_t first = 0; first < vocabulary.blocks; first += LANES) {
            Floats found[LANES];
            for (int i = 0; i < LANES; i++) {
                bool is = first + i < vocabulary.blocks;
                int64_t start = is ? begin(first + i) : 0, left = is ? end(first + i) - start : 0;
                const float* v = x + start;
                if (left == NOISE_BLOCK) {
                    found[i] = load(v);
                    for (int j = 0; j < NOISE_BLOCK; j += 2 * LANES) {
                        Floats a = load(v + j), b = load(v + j + LANES);
                        has_nan |= any_nan(a, b);
                        found[i] = maximum(maximum(a, b), found[i]);
                    }
                    continue;
                }
                found[i] = splat(-INFINITY);
                for (; left > 0; v += LANES, left -= LANES) {
                    Floats part = load_partial(v, left);
                    has_nan |= any_nan(part, part);
                    found[i] = maximum(part, found[i]);
                }
            }
            store(peaks + first, reduce_max_each(found));
        }
        Floats highest = splat(-INFINITY);
        for (int64_t first = 0; first < blocks(); first += LANES) highest = maximum(load(peaks + first), highest);
        top = reduce_max(highest);
        for (const AdjustedLogit& one : adjusted) {
            has_nan |= one.value != one.value;
            top = std::max(top, one.value);
        }
        return !has_nan;
    }

    // Noise bounds: -log u >= 1 - u, and log2 of a float is at least what its bits say.
    void bound_noise() {
        inverse_temperature = float(1 / session.temperature);
        for (int64_t first = 0; first < blocks(); first += LANES) {
            Floats least = one_minus_uniform([&](int64_t half) { return (iota() + uint64_t(first + half)) * BLOCK_STRIDE
                    + (key + GOLDEN); });
            Floats log2 = __builtin_convertvector((Ints)least, Floats) * splat(0x1p-23f) - splat(127.0f);
            store(noise_bounds + first, splat(6 * 0.693147181f + BOUND_SLACK) - log2 * splat(0.693147181f));
        }
    }

    double score_floor() const { return best.size() < num_wanted ? assumed_floor : best[num_wanted - 1].score - tolerance; }

    uint64_t hash_of(int64_t block) const { return mix<uint64_t>(uint64_t(block) * BLOCK_STRIDE + key + GOLDEN); }

    void offer(int64_t token, double logit) {
        uint64_t hash = hash_of(token / NOISE_BLOCK);
        double noise = exponential_noise(hash) / NOISE_BLOCK;
        if (token % NOISE_BLOCK != int64_t(hash % NOISE_BLOCK)) noise
                += exponential_noise(mix<uint64_t>(uint64_t(token) * STRIDE + key));
        Candidate one = {token, (logit - top) / session.temperature - std::log(noise), logit};
        if (one.score < score_floor()) return;
        auto before = [&](const Candidate& other) {
            return one.score > other.score || (one.score == other.score && one.token < other.token);
        };
        best.insert(std::find_if(best.begin(), best.end(), before), one);
        if (best.size() > num_wanted + 1) best.pop_back();
    }

    // Which tokens of a vector could be among the best, by the noise of their block and their own hashes, given these logits.
    Words may_win(int64_t block, int64_t first, Floats logits) const {
        double low = std::max(score_floor(), double(std::numeric_limits<float>::lowest()));
        // distance above the floor
        Floats reach = (logits - splat(float(top))) * splat(inverse_temperature) - splat(float(low) - BOUND_SLACK);
        Words now = (Words)(logits >= splat(lowest)) & (Words)(reach + splat(noise_bounds[block]) >= Floats{});
        if (!any(now)) return now;
        Floats left = one_minus_uniform([&](int64_t half) {
            U64s ids = iota() + uint64_t(first + half);
            if (vocabulary.ids) memcpy(&ids, vocabulary.ids + first + half, sizeof ids);  // padded to a whole vector
            return ids * STRIDE + key;
        });
        Words open = (Words)(left <= exponential((Floats)((Words)reach & (Words)(reach < Floats{}))));
        int64_t holder = block * NOISE_BLOCK + int64_t(hash_of(block) % NOISE_BLOCK);
        for (int lane = 0; lane < LANES; lane++)
            if (now[lane] && token(first + lane) == holder) open[lane] = ~0u;
        return now & open;
    }

    // Offer the tokens of a block that could be among the best.
    void offer_block(int64_t block) {
        if (before_block) before_block(block);
        int64_t last = end(block);
        for (int64_t first = begin(block); first < last; first += LANES) {
            Floats logits = load_partial(x + first, last - first);
            Words now = may_win(block, first, logits);
            if (!any(now)) continue;
            for (int lane = 0; lane < LANES; lane++)
                if (now[lane]) offer(token(first + lane), logits[lane]);
        }
    }

    Floats score_bounds(int64_t first) const {  // upper bounds of the scores in LANES blocks
        return (load(peaks + first) - splat(float(top))) * splat(inverse_temperature) + load(noise_bounds + first);
    }

    void sweep(Floats likely_bound, bool second_pass) {
        for (int64_t first = 0; first < vocabulary.blocks; first += LANES) {
            Floats reach = score_bounds(first);
            Words now = (Words)(reach >= likely_bound);
            if (second_pass) now = ~now & (Words)(reach >= splat(float(score_floor()) - BOUND_SLACK));
            now &= (Words)(load(peaks + first) >= splat(lowest));
            if (!any(now)) continue;
            for (int lane = 0; lane < LANES; lane++)
                if (now[lane] && double(reach[lane]) >= score_floor()) offer_block(first + lane);
        }
    }

    void run() {
        lowest = round_up(std::max(min_logit, double(std::numeric_limits<float>::lowest())));
        Floats highest = splat(-INFINITY);
        for (int64_t first = 0; first < vocabulary.blocks; first += LANES) {
            Words runs = (Words)(load(peaks + first) >= splat(lowest));
            highest = maximum((Floats)(((Words)score_bounds(first) & runs) | ((Words)splat(-INFINITY) & ~runs)), highest);
        }
        Floats likely_bound = splat(reduce_max(highest) - 1.5f);  // likely winners come first
        // The n-th best of a distribution whose top logit is 0 scores about -log n, or more; less if its tail is thin.
        for (double start : {-2.5 - std::log(double(num_wanted)), -14.0 - std::log(double(num_wanted)), -double(INFINITY)}) {
            assumed_floor = start;
            best.clear();
            sweep(likely_bound, false);
            for (const AdjustedLogit& one : adjusted) {
                int64_t id = token(one.column);
                if (one.value >= min_logit && one.value > -INFINITY &&
                    (one.value - top) / session.temperature + noise_bounds[id / NOISE_BLOCK] >= score_floor()) offer(id, one.value);
            }
            sweep(likely_bound, true);
            // all that could be close was offered
            if (best.size() >= num_wanted && best[num_wanted - 1].score >= assumed_floor + tolerance) return;
        }
    }

    bool is_order_certain() const {  // whether rounding cannot change the order
        for (size_t i = 0; i + 1 < best.size(); i++)
            if (!(best[i].score - best[i + 1].score > tolerance)) return false;
        return true;
    }

    double relative_mass(double logit) const { return std::exp((logit - top) / session.temperature); }

    template <class Sum>
    void for_each_vector(int64_t block, Sum sum) const {  // calls sum with each vector of a block
        int64_t first = begin(block), last = end(block);
        if (last - first == NOISE_BLOCK) {
            for (int i = 0; i < NOISE_BLOCK; i += LANES) sum(load(x + first + i));
        } else {
            for (; first < last; first += LANES) sum(load_partial(x + first, last - first));
        }
    }

    // The mass of logits of at least `least`, in blocks whose peak is at least `reach`. others: gets an approximate mass of all
    // other blocks; the true one is at most this, and at least CHORD_RATIO of it.
    double mass(double least, double reach, double* others = nullptr) const {
        double sum = 0;
        float low = round_up(least), near_enough = round_up(reach);
        Floats above = splat(float(top)), scale = splat(inverse_temperature), part = {}, far = {};
        // Powers of two and chords between them, by the bits of a float: never below, and at most 1 / CHORD_RATIO above.
        Floats slope = splat(inverse_temperature * 12102203.2f), start = splat(float(127 << 23)) - slope * above,
                least_normal = splat(0x1p23f);
        int parts = 0;
        for (int64_t block = 0; block < vocabulary.blocks; block++) {
            if (!others && block % LANES == 0 && !any((Words)(load(peaks + block) >= splat(near_enough)))) {
                block += LANES - 1;
                continue;
            }
            if (peaks[block] >= near_enough) {
                for_each_vector(block, [&](Floats v) { part
                        += (Floats)((Words)exponential((v - above) * scale) & (Words)(v >= splat(low))); });
                if (++parts % 16 == 0) sum += reduce_add(part), part = Floats{};
            } else if (others) {
                for_each_vector(block, [&](Floats v) {
                    far += (Floats)__builtin_convertvector(maximum(fma(v, slope, start), least_normal), Ints);
                });
            }
        }
        for (const AdjustedLogit& one : adjusted) sum += one.value >= least ? relative_mass(one.value) : 0;
        if (others) *others = double(reduce_add(far));
        return sum + reduce_add(part);
    }

    double exact_mass(double least) const {  // of logits that are at least `least`, in float64
        double sum = 0, from = std::max(least, top + NO_MASS * session.temperature);
        for (int64_t block = 0; block < vocabulary.blocks; block++) {
            if (!(peaks[block] >= from)) continue;
            for (int64_t i = begin(block); i < end(block); i++) sum += x[i] >= from ? relative_mass(x[i]) : 0;
        }
        for (const AdjustedLogit& one : adjusted) sum += one.value >= from ? relative_mass(one.value) : 0;
        return sum;
    }
};

uint64_t row_key(uint64_t seed, int64_t position) {  // `noise.row_keys`
    return mix<uint64_t>(mix<uint64_t>(seed + GOLDEN) + uint64_t(position) * GOLDEN);
}

// `Race::tolerance`
double score_tolerance(double top, double temperature) { return 1e-11 * (1 + 0.01 * std::abs(top) / temperature); }

}  // namespace
