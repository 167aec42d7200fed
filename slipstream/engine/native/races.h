// Keyed choices: the best of a row of logits under penalties, filters and noise, as `slipstream.choosing` specifies them.
//
// Rules:
// 1. The result is that of the specification, or "not sure": two scores, or a mass and its limit, are closer than the rounding of
//    both implementations, or a number is NaN. Then the specification computes the row.
// 2. Noise is made for tiles of 64 token ids: one hash bounds the noise of all. A tile is computed only if its greatest logit
//    plus that bound could be among the best. Bounds are float32, rounded up; scores are float64.
// 3. Filters are thresholds on the logit: if a token is filtered, so are all with lower logits. The best of all nearly always
//    survives, so only that one is checked first; if it does not, its logit is the lower limit of the next race.
// 4. Masses are sums of float32 exponentials. Tiles far below the top are bounded by their greatest logit, and summed exactly
//    only if the bound does not decide.
// 5. Tokens with penalties, bias or stops are taken out of the row and compete by themselves, in float64.
//
// It knows nothing about threads or sessions.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "vectors.h"

namespace {

constexpr int TILE = 64;  // `noise.BLOCK`
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15, STRIDE = 0xD1342543DE82EF95, TILE_STRIDE = 0xA0761D6478BD642F;
constexpr double UNKNOWN = 2e-5;    // share by which masses of either side may be wrong: at most 256 float32 sums, some roundings
                                    // of arguments that are 13 on average at most
constexpr double NEAR = 1e-9;       // logits that float64 may merge when they are shifted and divided
constexpr double ROUGH = 0.93;      // chords are at most 1.0615 of what they span, and float32 sums of 50,000 are not exact
constexpr float LOOSE = 0.01f;      // by which a bound lies above, for its own rounding and for that of the top to a float32
constexpr double MOST_LOGIT = 1e6, COLDEST = 1e-6;  // beyond them rounding was not looked at

struct Vocabulary {  // `races.Vocabulary` is the same: which tokens the columns are
    const int64_t* ids;      // [V] ascending; null: columns are tokens
    const int64_t* starts;   // [tiles + 1] the first column of each tile
    const int64_t* columns;  // [num_ids] of tokens, -1: none
    int64_t num_ids, tiles;
};

struct Asked {  // `races.ASKED` is the same: how the rows of a session are chosen from
    uint64_t seed;
    double heat;  // 0: the greatest
    double top_p, min_p;  // 1: off; a logarithm, -inf: off
    int64_t top_k;        // 0: off
    double repetition, frequency, presence;  // 1, 0, 0: off
    const int64_t *seen, *counts;            // [num_seen] tokens of the prompt and the answer, how often in the answer
    int64_t num_seen;
    const int64_t* biased;  // [num_biased]
    const double* amounts;
    int64_t num_biased;
    const int64_t* stops;  // [num_stops] impossible before so many tokens, unless it is told what is allowed
    int64_t num_stops, min_tokens;
    int64_t first, row;       // place of its first row in the call, and in the logits
    const uint32_t* allowed;  // [rows, words] a bit for each token, the lowest first; null: all of them
    int64_t words;
};

struct Races {  // `NativeRace` tells the same: what one call asks, for R rows
    const Vocabulary* vocabulary;
    const Asked* asked;
    const int64_t* sessions;   // [R] which `Asked`
    const int64_t* positions;  // [R] of the token to be chosen
    const int64_t* outputs;    // [R] tokens of the answer before it
    const int64_t* paths;      // draft tokens among them, of all rows
    const int64_t* path_ends;  // [R]
    int64_t* tokens;           // [R, most] best first; 0: there are no more
    double* scores;            // [R, most] logarithms of their shares among those that are told, or -inf
    int64_t* sure;             // [R] 0: the specification must say
    int64_t most;
};

constexpr int HALF = LANES / 2;  // of a vector: as many hashes are as wide

typedef uint64_t Quads __attribute__((vector_size(8 * HALF)));
typedef int64_t Signed __attribute__((vector_size(8 * HALF)));
typedef float Narrow __attribute__((vector_size(4 * HALF)));

template <class W>
inline W mixed(W word) {  // SplitMix64's finaliser
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB;
    return word ^ (word >> 31);
}

inline Quads counted() {
    Quads numbers;
    for (int i = 0; i < HALF; i++) numbers[i] = i;
    return numbers;
}

// 1 - u of LANES hashes, whose unmixed words come in halves.
template <class Half>
inline Floats lacking(Half half) {
    float found[LANES];
    for (int64_t i = 0; i < LANES; i += HALF) {
        Quads rest = (((uint64_t(1) << 52) - 1) - (mixed<Quads>(half(i)) >> 12)) * 2 + 1;
        Narrow wide = __builtin_convertvector((Signed)rest, Narrow);  // below 2^53
        memcpy(found + i, &wide, sizeof wide);
    }
    return load(found) * all(0x1p-53f);
}

inline double exponential_of(uint64_t hash) { return -std::log(double(2 * (hash >> 12) + 1) * 0x1p-53); }

inline float up(double x) {  // the lowest float that is not below
    float found = float(x);
    return double(found) < x ? std::nextafterf(found, INFINITY) : found;
}

inline Floats some(const float* p, int64_t left) {  // as many as there are, then -inf
    if (left >= LANES) return load(p);
    float part[LANES];
    std::fill(std::copy_n(p, std::max<int64_t>(left, 0), part), part + LANES, -INFINITY);
    return load(part);
}

struct Touched {
    int64_t column;
    double value;
};

struct Runner {
    int64_t token;
    double score, logit;
};

struct Race {
    const Vocabulary& words;
    const Asked& asked;
    const float* x;  // [count]
    int64_t count;
    float *peaks, *noises;  // [tiles, to a whole vector] the greatest logit; what no token's noise is above
    std::vector<Touched> touched;
    std::vector<Runner> best;  // best first, one more than asked for
    uint64_t key = 0;
    double top = 0, near = 0;  // the greatest logit; scores that are nearer than this are told apart by nobody
    double from = -INFINITY;   // lower logits do not take part
    double guess = 0;          // what the best are taken to score at least, until there are enough
    float inverse = 0, lowest = 0;
    size_t most = 0;
    std::function<void(int64_t)> ready;  // called with a tile before `x` is read there, where not all logits are made

    int64_t tiles() const { return (words.tiles + LANES - 1) / LANES * LANES; }
    int64_t begin(int64_t tile) const { return words.ids ? words.starts[tile] : tile * TILE; }
    int64_t end(int64_t tile) const { return words.ids ? words.starts[tile + 1] : std::min(count, (tile + 1) * TILE); }
    int64_t token(int64_t column) const { return words.ids ? words.ids[column] : column; }

    bool survey() {  // peaks, and whether all are numbers
        bool odd = false;
        for (int64_t first = 0; first < words.tiles; first += LANES) {
            Floats found[LANES];
            for (int i = 0; i < LANES; i++) {
                bool is = first + i < words.tiles;
                int64_t start = is ? begin(first + i) : 0, left = is ? end(first + i) - start : 0;
                const float* v = x + start;
                if (left == TILE) {
                    found[i] = load(v);
                    for (int j = 0; j < TILE; j += 2 * LANES) {
                        Floats a = load(v + j), b = load(v + j + LANES);
                        odd |= odd_one(a, b);
                        found[i] = greater(greater(a, b), found[i]);
                    }
                    continue;
                }
                found[i] = all(-INFINITY);
                for (; left > 0; v += LANES, left -= LANES) {
                    Floats part = some(v, left);
                    odd |= odd_one(part, part);
                    found[i] = greater(part, found[i]);
                }
            }
            store(peaks + first, greatests(found));
        }
        Floats highest = all(-INFINITY);
        for (int64_t first = 0; first < tiles(); first += LANES) highest = greater(load(peaks + first), highest);
        top = greatest(highest);
        for (const Touched& one : touched) {
            odd |= one.value != one.value;
            top = std::max(top, one.value);
        }
        return !odd;
    }

    // -log u >= 1 - u, and log2 of a float is at least what its bits say.
    void bound() {
        inverse = float(1 / asked.heat);
        for (int64_t first = 0; first < tiles(); first += LANES) {
            Floats least = lacking([&](int64_t half) { return (counted() + uint64_t(first + half)) * TILE_STRIDE + (key + GOLDEN); });
            Floats log2 = __builtin_convertvector((Ints)least, Floats) * all(0x1p-23f) - all(127.0f);
            store(noises + first, all(6 * 0.693147181f + LOOSE) - log2 * all(0.693147181f));
        }
    }

    double floor() const { return best.size() < most ? guess : best[most - 1].score - near; }

    uint64_t hash_of(int64_t tile) const { return mixed<uint64_t>(uint64_t(tile) * TILE_STRIDE + key + GOLDEN); }

    void offer(int64_t token, double logit) {
        uint64_t hash = hash_of(token / TILE);
        double noise = exponential_of(hash) / TILE;
        if (token % TILE != int64_t(hash % TILE)) noise += exponential_of(mixed<uint64_t>(uint64_t(token) * STRIDE + key));
        Runner one = {token, (logit - top) / asked.heat - std::log(noise), logit};
        if (one.score < floor()) return;
        auto before = [&](const Runner& other) {
            return one.score > other.score || (one.score == other.score && one.token < other.token);
        };
        best.insert(std::find_if(best.begin(), best.end(), before), one);
        if (best.size() > most + 1) best.pop_back();
    }

    // Which tokens of a vector could be among the best by their tile's noise and by their own hashes, were these their logits.
    Words able(int64_t tile, int64_t first, Floats logits) const {
        double low = std::max(floor(), double(std::numeric_limits<float>::lowest()));
        Floats reach = (logits - all(float(top))) * all(inverse) - all(float(low) - LOOSE);  // above the floor
        Words now = (Words)(logits >= all(lowest)) & (Words)(reach + all(noises[tile]) >= Floats{});
        if (!any(now)) return now;
        Floats left = lacking([&](int64_t half) {
            Quads ids = counted() + uint64_t(first + half);
            if (words.ids) memcpy(&ids, words.ids + first + half, sizeof ids);  // it goes on to a whole vector
            return ids * STRIDE + key;
        });
        Words open = (Words)(left <= exponential((Floats)((Words)reach & (Words)(reach < Floats{}))));
        int64_t holder = tile * TILE + int64_t(hash_of(tile) % TILE);
        for (int lane = 0; lane < LANES; lane++)
            if (now[lane] && token(first + lane) == holder) open[lane] = ~0u;
        return now & open;
    }

    // Offer those of a tile.
    void enter(int64_t tile) {
        if (ready) ready(tile);
        int64_t last = end(tile);
        for (int64_t first = begin(tile); first < last; first += LANES) {
            Floats logits = some(x + first, last - first);
            Words now = able(tile, first, logits);
            if (!any(now)) continue;
            for (int lane = 0; lane < LANES; lane++)
                if (now[lane]) offer(token(first + lane), logits[lane]);
        }
    }

    Floats bounds(int64_t first) const {  // what the tokens of some tiles can score
        return (load(peaks + first) - all(float(top))) * all(inverse) + load(noises + first);
    }

    void sweep(Floats soon, bool late) {
        for (int64_t first = 0; first < words.tiles; first += LANES) {
            Floats reach = bounds(first);
            Words now = (Words)(reach >= soon);
            if (late) now = ~now & (Words)(reach >= all(float(floor()) - LOOSE));
            now &= (Words)(load(peaks + first) >= all(lowest));
            if (!any(now)) continue;
            for (int lane = 0; lane < LANES; lane++)
                if (now[lane] && double(reach[lane]) >= floor()) enter(first + lane);
        }
    }

    void run() {
        lowest = up(std::max(from, double(std::numeric_limits<float>::lowest())));
        Floats highest = all(-INFINITY);
        for (int64_t first = 0; first < words.tiles; first += LANES) {
            Words runs = (Words)(load(peaks + first) >= all(lowest));
            highest = greater((Floats)(((Words)bounds(first) & runs) | ((Words)all(-INFINITY) & ~runs)), highest);
        }
        Floats soon = all(greatest(highest) - 1.5f);  // those that are likely to win come first
        // The n-th best of a law whose top has logit 0 scores about -log n, or more. Where the tail is thin it scores less.
        for (double start : {-2.5 - std::log(double(most)), -14.0 - std::log(double(most)), -double(INFINITY)}) {
            guess = start;
            best.clear();
            sweep(soon, false);
            for (const Touched& one : touched) {
                int64_t id = token(one.column);
                if (one.value >= from && one.value > -INFINITY &&
                    (one.value - top) / asked.heat + noises[id / TILE] >= floor()) offer(id, one.value);
            }
            sweep(soon, true);
            if (best.size() >= most && best[most - 1].score >= guess + near) return;  // all that is near was offered
        }
    }

    bool apart() const {  // whether nobody could order the best in another way
        for (size_t i = 0; i + 1 < best.size(); i++)
            if (!(best[i].score - best[i + 1].score > near)) return false;
        return true;
    }

    double share(double logit) const { return std::exp((logit - top) / asked.heat); }

    template <class Sum>
    void each(int64_t tile, Sum sum) const {  // vectors of a tile
        int64_t first = begin(tile), last = end(tile);
        if (last - first == TILE) {
            for (int i = 0; i < TILE; i += LANES) sum(load(x + first + i));
        } else {
            for (; first < last; first += LANES) sum(some(x + first, last - first));
        }
    }

    // The mass of the logits from `least` on, of tiles whose peak is at least `reach`; and about that of the other tiles,
    // if asked for: no more than this, and at least ROUGH of it.
    double mass(double least, double reach, double* others = nullptr) const {
        double sum = 0;
        float low = up(least), near_enough = up(reach);
        Floats above = all(float(top)), scale = all(inverse), part = {}, far = {};
        // Powers of two and chords between them, by the bits of a float: never below, and at most 1 / ROUGH above.
        Floats slope = all(inverse * 12102203.2f), start = all(float(127 << 23)) - slope * above, least_normal = all(0x1p23f);
        int parts = 0;
        for (int64_t tile = 0; tile < words.tiles; tile++) {
            if (!others && tile % LANES == 0 && !any((Words)(load(peaks + tile) >= all(near_enough)))) {
                tile += LANES - 1;
                continue;
            }
            if (peaks[tile] >= near_enough) {
                each(tile, [&](Floats v) { part += (Floats)((Words)exponential((v - above) * scale) & (Words)(v >= all(low))); });
                if (++parts % 16 == 0) sum += total(part), part = Floats{};
            } else if (others) {
                each(tile, [&](Floats v) {
                    far += (Floats)__builtin_convertvector(greater(fma(v, slope, start), least_normal), Ints);
                });
            }
        }
        for (const Touched& one : touched) sum += one.value >= least ? share(one.value) : 0;
        if (others) *others = double(total(far));
        return sum + total(part);
    }
};

enum Verdict { OUT, IN, UNSURE };

// What top-k, top-p and min-p leave, as thresholds.
struct Filters {
    Race& race;
    double kth = -INFINITY, lowest = -INFINITY;  // the k-th greatest logit; below it min-p takes all
    double total = -1, others = 0;               // of what top-p counts, and about what may be missing in it
    double reach = 6;                            // tiles with peaks so far below the top are summed exactly
    double known_in = INFINITY, known_out = -INFINITY;

    double slack() const { return NEAR * (1 + race.asked.heat + std::abs(race.top)); }
    bool limited() const { return race.asked.top_k > 0 && race.asked.top_k < race.count; }

    // Returns whether the thresholds are known.
    bool prepare() {
        const Asked& asked = race.asked;
        if (limited() && !rank()) return false;
        if (asked.min_p > -INFINITY) lowest = race.top + asked.heat * asked.min_p;
        double out = std::max(kth, lowest - slack());
        race.from = std::max(race.from, out);
        return true;
    }

    bool rank() {
        size_t k = race.asked.top_k;
        std::vector<float> peaks(race.peaks, race.peaks + race.words.tiles);
        double least = -INFINITY;  // the k-th greatest is not below
        if (k <= peaks.size()) {
            std::nth_element(peaks.begin(), peaks.begin() + k - 1, peaks.end(), std::greater<>());
            least = peaks[k - 1];
        }
        std::vector<double> found;
        float low = up(least - NEAR);
        for (int64_t tile = 0; tile < race.words.tiles; tile++) {
            if (!(race.peaks[tile] >= low)) continue;
            for (int64_t i = race.begin(tile); i < race.end(tile); i++)
                if (race.x[i] >= low && race.x[i] > -INFINITY) found.push_back(race.x[i]);
        }
        for (const Touched& one : race.touched)
            if (one.value >= low && one.value > -INFINITY) found.push_back(one.value);
        if (found.size() >= k) {
            std::nth_element(found.begin(), found.begin() + k - 1, found.end(), std::greater<>());
            kth = found[k - 1];
        }
        total = 0;
        for (double logit : found) {
            if (logit >= kth) total += race.share(logit);
            else if (logit > kth - NEAR) return false;
        }
        return true;
    }

    Verdict nucleus(double logit) {
        if (race.asked.top_p >= 1) return IN;
        double next = std::nextafter(logit, INFINITY), wanted = race.asked.top_p;
        double above = race.mass(next, logit), surely = -1;
        if (race.touched.empty() && up(next) == up(logit + slack())) surely = above;  // nothing lies in between
        double unknown = UNKNOWN + 1.2e-7 * std::abs(race.top) / race.asked.heat;  // of a top that is no float32
        while (true) {
            if (total < 0) total = race.mass(-INFINITY, race.top - reach * race.asked.heat, &others);
            if (above * (1 + unknown) < wanted * (total + ROUGH * others) * (1 - unknown)) return IN;
            if (surely < 0) surely = race.mass(logit + slack(), logit);
            if (surely * (1 - unknown) > wanted * (total + 1.01 * others) * (1 + unknown)) return OUT;
            if (limited() || reach == INFINITY) return UNSURE;
            reach = INFINITY, total = -1, others = 0;
        }
    }

    Verdict survives(double logit) {  // of one that is not below `race.from`
        if (logit >= known_in) return IN;
        if (logit <= known_out) return OUT;
        if (race.asked.min_p > -INFINITY && std::abs(logit - lowest) <= slack()) return UNSURE;
        Verdict found = nucleus(logit);
        if (found == IN) known_in = logit;
        if (found == OUT) known_out = logit;
        return found;
    }
};

// The best survivors. Returns whether that is certain.
bool choose_filtered(Race& race) {
    Filters filters{race};
    if (!filters.prepare()) return false;
    while (true) {
        race.run();
        std::vector<double> logits;
        for (const Runner& one : race.best)
            if (race.most > 1 || logits.empty()) logits.push_back(one.logit);  // or the second only has to be far away
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
        if (!low) return race.apart();
        race.from = std::max(race.from, std::nextafter(logits[low - 1], INFINITY));
    }
}

uint64_t key_of(uint64_t seed, int64_t position) {  // `noise.row_keys`
    return mixed<uint64_t>(mixed<uint64_t>(seed + GOLDEN) + uint64_t(position) * GOLDEN);
}

double nearness(double top, double heat) { return 1e-11 * (1 + 0.01 * std::abs(top) / heat); }  // `Race::near`

struct Changes {  // of a row before the race
    bool early;
    const int64_t* path;
    int64_t num_path;
    const uint32_t* allowed;
};

// Penalties, bias and stops of a row: what they touch, with its value; and the row without it.
void touch(Race& race, const Changes& row, float* copy) {
    const Asked& asked = race.asked;
    auto column_of = [&](int64_t token) {
        if (!race.words.ids) return token >= 0 && token < race.count ? token : -1;
        return token >= 0 && token < race.words.num_ids ? race.words.columns[token] : -1;
    };
    std::vector<Touched>& touched = race.touched;
    auto add = [&](int64_t token) {
        if (int64_t column = column_of(token); column >= 0) touched.push_back({column, race.x[column]});
    };
    struct Count {
        int64_t column, count;
    };
    std::vector<Count> counts;  // none where nothing is penalised
    for (int64_t i = 0; i < asked.num_seen; i++)
        if (int64_t column = column_of(asked.seen[i]); column >= 0) counts.push_back({column, asked.counts[i]});
    for (int64_t i = 0; i < row.num_path; i++)
        if (int64_t column = column_of(row.path[i]); column >= 0) counts.push_back({column, 1});
    std::sort(counts.begin(), counts.end(), [](const Count& a, const Count& b) { return a.column < b.column; });
    size_t kept = 0;
    for (size_t i = 0; i < counts.size(); i++) {
        if (kept && counts[kept - 1].column == counts[i].column) counts[kept - 1].count += counts[i].count;
        else counts[kept++] = counts[i];
    }
    counts.resize(kept);
    for (const Count& one : counts) {
        double value = race.x[one.column];
        if (asked.repetition != 1) value = value > 0 ? value / asked.repetition : value * asked.repetition;
        value = value - asked.frequency * double(one.count) - asked.presence * double(one.count > 0);
        touched.push_back({one.column, value});
    }
    for (int64_t i = 0; i < asked.num_biased; i++) add(asked.biased[i]);
    for (int64_t i = 0; row.early && i < asked.num_stops; i++) add(asked.stops[i]);
    auto by_column = [](const Touched& a, const Touched& b) { return a.column < b.column; };
    std::stable_sort(touched.begin(), touched.end(), by_column);  // a penalised one stands before its own logit
    auto same = [](const Touched& a, const Touched& b) { return a.column == b.column; };
    touched.erase(std::unique(touched.begin(), touched.end(), same), touched.end());
    auto find = [&](int64_t token) -> Touched* {
        int64_t column = column_of(token);
        if (column < 0) return nullptr;
        return &*std::lower_bound(touched.begin(), touched.end(), Touched{column, 0}, by_column);
    };
    for (int64_t i = 0; i < asked.num_biased; i++)
        if (Touched* one = find(asked.biased[i])) one->value += asked.amounts[i];
    for (int64_t i = 0; row.early && i < asked.num_stops; i++)
        if (Touched* one = find(asked.stops[i])) one->value = -INFINITY;
    auto allowed = [&](int64_t token) { return !row.allowed || (row.allowed[token / 32] >> (token % 32) & 1); };
    if (row.allowed && !race.words.ids) {
        for (int64_t i = 0; i < race.count; i += 32) {
            uint32_t word = row.allowed[i / 32];
            for (int64_t j = i; j < std::min(i + 32, race.count); j++, word >>= 1) copy[j] = word & 1 ? race.x[j] : -INFINITY;
        }
    } else {
        for (int64_t i = 0; i < race.count; i++) copy[i] = allowed(race.token(i)) ? race.x[i] : -INFINITY;
    }
    for (Touched& one : touched) {
        copy[one.column] = -INFINITY;
        if (!allowed(race.token(one.column))) one.value = -INFINITY;
    }
    race.x = copy;
}

// The greatest logit, the lowest token among equals.
void choose_greatest(Race& race) {
    Runner found = {INT64_MAX, 0, -INFINITY};
    auto offer = [&](int64_t token, double logit) {
        if (logit > found.logit || (logit == found.logit && token < found.token)) found = {token, 0, logit};
    };
    for (int64_t tile = 0; tile < race.words.tiles; tile++) {
        if (!(race.peaks[tile] == race.top)) continue;
        for (int64_t i = race.begin(tile); i < race.end(tile); i++)
            if (race.x[i] == race.top) offer(race.token(i), race.x[i]);
        break;
    }
    for (const Touched& one : race.touched) offer(race.token(one.column), one.value);
    race.best.assign(1, found);
}

// The row of the logits that stands at `place` in the call.
int64_t row_of(const Races& races, int64_t place) {
    const Asked& asked = races.asked[races.sessions[place]];
    return asked.row + place - asked.first;
}

// x: its logits; scratch: grows to what it needs.
void race_row(const Races& races, int64_t place, const float* x, int64_t count, std::vector<float>& scratch) {
    const Asked& asked = races.asked[races.sessions[place]];
    Race race{*races.vocabulary, asked, x, count, nullptr, nullptr, {}, {}};
    int64_t tiles = race.tiles();
    if (int64_t(scratch.size()) < 2 * tiles + count) scratch.resize(2 * tiles + count);
    race.peaks = scratch.data(), race.noises = race.peaks + tiles;
    race.most = races.most;
    int64_t begin = place ? races.path_ends[place - 1] : 0;
    Changes row = {races.outputs[place] < asked.min_tokens && !asked.allowed, races.paths + begin, races.path_ends[place] - begin,
                   asked.allowed ? asked.allowed + (place - asked.first) * asked.words : nullptr};
    bool penalised = asked.repetition != 1 || asked.frequency != 0 || asked.presence != 0;
    if (penalised || asked.num_biased || (row.early && asked.num_stops) || row.allowed)
        touch(race, row, race.noises + tiles);
    bool sure = race.survey() && std::abs(race.top) <= MOST_LOGIT;
    if (sure && asked.heat == 0) {
        choose_greatest(race);
    } else if (sure && (sure = asked.heat >= COLDEST && std::abs(race.top - float(race.top)) <= LOOSE / 2 * asked.heat)) {
        race.key = key_of(asked.seed, races.positions[place]);
        race.near = nearness(race.top, asked.heat);
        race.bound();
        if (asked.top_k > 0 || asked.top_p < 1 || asked.min_p > -INFINITY) {
            sure = choose_filtered(race);
        } else {
            race.run();
            sure = race.apart();
        }
    }
    std::vector<Runner>& best = race.best;
    if (best.size() > race.most) best.pop_back();
    races.sure[place] = sure && !best.empty();
    double sum = 0;
    for (const Runner& one : best) sum += std::exp(one.score - best[0].score);
    for (size_t i = 0; i < race.most; i++) {
        bool is = i < best.size();
        races.tokens[place * race.most + i] = is ? best[i].token : 0;
        races.scores[place * race.most + i] = is ? float(best[i].score - best[0].score - std::log(sum)) : -INFINITY;
    }
}

}  // namespace
