// The operations of one forward on a CPU in bfloat16, run as a list by a team of threads.
//
// Rules:
// 1. A row's bits depend on that row alone: never on how many rows share the forward, on its place among them, on the
//    number of threads or on who computes what. Each sum is taken in one order, written down here and not left to the
//    compiler (-ffp-contract=off).
// 2. The residual stream and all sums are float32; what a product reads, and KV, are bfloat16, rounded to the nearest.
// 3. Threads meet after each operation and nowhere else. They share its parts as they come: one that the system has put
//    aside delays the part that it holds, no other. Between forwards helpers sleep.
// 4. The caller has checked everything: shapes, indices, sizes of buffers.
//
// It knows nothing about models: `program.py` writes the list.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <sched.h>
#include <thread>
#include <utility>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;        // floats of a vector
constexpr int GROUP = 2 * LANES;  // outputs of a product that are computed together
constexpr int BLOCK = 8;         // rows of a product that are computed together, at most
constexpr int BUNDLE = 4;        // query heads that are computed together, at most
constexpr int AHEAD = 256;       // words of weights that are asked for in advance: a processor stops at a page's end
constexpr int SPINS = 300;       // looks before a waiting thread lets others run
constexpr int IDLE_SPINS = 3000;  // looks for another list before a helper sleeps: waking it takes longer

typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Shorts __attribute__((vector_size(32)));
typedef uint16_t bf16;

enum Kind : int32_t { NORM = 0, PRODUCT = 1, ROPE = 2, ATTEND = 3, ROUND = 4 };
enum Result : int32_t { STORE = 0, ADD = 1, SILU = 2 };  // what a product does with its sums

struct Op {  // `program.Op` is the same
    int32_t kind, result;
    const void* in;        // NORM: float32 [T, inner]; PRODUCT: bfloat16 [T, inner]; ROPE: float32 [T, (Q + 2 G) D]
    int64_t in_stride;     // elements from row to row
    const void* weight;    // NORM: float32 [inner]; PRODUCT: packed; ROPE: norm of queries, float32 [D], or null
    const void* extra;     // PRODUCT: bias, float32 [outer], or null; ROPE: norm of keys or null
    void* out;             // NORM, ROUND, ATTEND, ROPE (queries), SILU: bfloat16; STORE, ADD: float32
    int64_t out_stride;
    int64_t inner, outer;  // widths
    int64_t layer;         // ROPE, ATTEND: whose KV
    float eps;
    int32_t heads, kv_heads, head_dim;
};

struct Frame {  // `program.Frame` is the same: what one forward adds to the list
    int64_t rows;
    const float *cos, *sin;   // [T, D]; the sine's first half is negated
    const int64_t* slots;     // [T] where each row's KV is written
    const int64_t* kv_slots;  // of all segments, one behind the other
    const int64_t *begin, *shared, *tree;  // [T] into kv_slots: the first entry that a row sees, how many from there on
                                           // it sees whole, and where the entry of its word's lowest bit stands
    const uint64_t* words;    // [T] bit j: the row sees kv_slots[tree + j]
    bf16* kv;                 // [L, S, 2, G, D]
    int64_t layer_stride;     // elements
};

inline Floats load(const float* p) { Floats v; memcpy(&v, p, sizeof v); return v; }
inline void store(float* p, Floats v) { memcpy(p, &v, sizeof v); }
inline Words words_at(const void* p) { Words v; memcpy(&v, p, sizeof v); return v; }
inline Floats all(float x) { return Floats{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

inline Floats widen(const bf16* p) {
    Shorts v;
    memcpy(&v, p, sizeof v);
#if defined(__AVX512F__)
    return (Floats)((Words)_mm512_cvtepu16_epi32((__m256i)v) << 16);
#else
    return (Floats)(__builtin_convertvector(v, Words) << 16);
#endif
}

inline void narrow(bf16* p, Floats v) {
    Words bits = (Words)v;
    Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    Words exact = (Words)(v == v);  // a rounded NaN could become a number
    Shorts result = __builtin_convertvector((rounded & exact) | (~exact & 0x7fc0), Shorts);
    memcpy(p, &result, sizeof result);
}

inline bf16 narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x == x ? bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) : bf16(0x7fc0);
}

inline float widen(bf16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

// sums + the products of pairs of bfloat16
inline Floats pairs(Floats sums, Words a, Words b) {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
#else
    sums = fma((Floats)(a << 16), (Floats)(b << 16), sums);
    return fma((Floats)(a & 0xffff0000u), (Floats)(b & 0xffff0000u), sums);
#endif
}

inline float total(Floats v) {
    float half[LANES];
    store(half, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) half[i] += half[i + width];
    return half[0];
}

// Lanes without bit S: a's sums of a lane and its neighbour across that bit; lanes with it: b's.
template <int S, int... I>
inline Floats folded(Floats a, Floats b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, (I & S ? LANES + I : I)...) +
           __builtin_shufflevector(a, b, (I & S ? LANES + (I ^ S) : I ^ S)...);
}

template <int S>
inline void fold(Floats (&v)[LANES]) {
    for (int i = 0; i < LANES; i += 2 * S) v[i] = folded<S>(v[i], v[i + S], std::make_integer_sequence<int, LANES>());
}

// Lane i: the sum of v[i], taken in the same order for each.
inline Floats totals(Floats (&v)[LANES]) {
    fold<1>(v), fold<2>(v), fold<4>(v), fold<8>(v);
    return v[0];
}

// e^x for x <= 0, to about 1e-7; 0 below -87
inline Floats exponential(Floats x) {
    const Floats magic = all(12582912.0f);  // adding it rounds to whole numbers
    Floats whole = fma(x, all(1.44269504f), magic) - magic;
    Floats rest = fma(whole, all(-0.693145752f), x);
    rest = fma(whole, all(-1.42860677e-6f), rest);
    Floats sum = all(1.98756915e-4f);
    for (float c : {1.39819994e-3f, 8.33345198e-3f, 4.16657962e-2f, 1.66666657e-1f, 0.5f}) sum = fma(sum, rest, all(c));
    sum = fma(sum, rest * rest, rest + all(1.0f));
    typedef int32_t Ints __attribute__((vector_size(64)));
    Ints power = __builtin_convertvector(whole, Ints) + 127;
    Words seen = (Words)(x > all(-87.0f));
    return (Floats)((Words)(sum * (Floats)(power << 23)) & seen);
}

void norm_row(const Op& op, int64_t row) {
    const float* x = (const float*)op.in + row * op.in_stride;
    Floats squares = {};
    for (int64_t i = 0; i < op.inner; i += LANES) squares = fma(load(x + i), load(x + i), squares);
    float factor = 1.0f / sqrtf(total(squares) / float(op.inner) + op.eps);
    bf16* out = (bf16*)op.out + row * op.out_stride;
    for (int64_t i = 0; i < op.inner; i += LANES)
        narrow(out + i, load(x + i) * all(factor) * load((const float*)op.weight + i));
}

void round_row(const Op& op, int64_t row) {
    const float* x = (const float*)op.in + row * op.in_stride;
    bf16* out = (bf16*)op.out + row * op.out_stride;
    for (int64_t i = 0; i < op.inner; i += LANES) narrow(out + i, load(x + i));
}

void finish(const Op& op, int64_t row, int64_t group, Floats low, Floats high) {
    if (op.extra) {
        low += load((const float*)op.extra + group * GROUP);
        high += load((const float*)op.extra + group * GROUP + LANES);
    }
    if (op.result == SILU) {  // gates below, what they gate above
        Floats down = exponential((Floats)((Words)low | 0x80000000u));  // e^-|gate|
        Floats one = all(1.0f);
        Words negative = (Words)(low < Floats{});
        Floats top = (Floats)(((Words)down & negative) | ((Words)one & ~negative));
        narrow((bf16*)op.out + row * op.out_stride + group * LANES, low * (top / (one + down)) * high);
        return;
    }
    float* out = (float*)op.out + row * op.out_stride + group * GROUP;
    int64_t left = op.outer - group * GROUP;
    float part[GROUP];
    float* to = left >= GROUP ? out : part;
    if (left < GROUP) memcpy(part, out, left * sizeof(float));
    store(to, op.result == ADD ? load(to) + low : low);
    store(to + LANES, op.result == ADD ? load(to + LANES) + high : high);
    if (left < GROUP) memcpy(out, part, left * sizeof(float));
}

template <int R>
void product_block(const Op& op, int64_t group, int64_t row) {
    const uint32_t* weight = (const uint32_t*)op.weight + group * GROUP * (op.inner / 2);
    const bf16* x = (const bf16*)op.in + row * op.in_stride;
    Floats low[R] = {}, high[R] = {};
    for (int64_t pair = 0; pair < op.inner / 2; pair++, weight += GROUP) {
        __builtin_prefetch(weight + AHEAD, 0, 0), __builtin_prefetch(weight + AHEAD + LANES, 0, 0);
        Words first = words_at(weight), second = words_at(weight + LANES);
        for (int r = 0; r < R; r++) {
            uint32_t two;
            memcpy(&two, x + r * op.in_stride + 2 * pair, 4);
            Words both = Words{} + two;
            low[r] = pairs(low[r], first, both);
            high[r] = pairs(high[r], second, both);
        }
    }
    for (int r = 0; r < R; r++) finish(op, row + r, group, low[r], high[r]);
}

void product_group(const Op& op, int64_t group, int64_t rows) {
    constexpr void (*blocks[])(const Op&, int64_t, int64_t) = {
        nullptr, product_block<1>, product_block<2>, product_block<3>, product_block<4>,
        product_block<5>, product_block<6>, product_block<7>, product_block<8>};
    for (int64_t row = 0; row < rows; row += BLOCK) blocks[std::min<int64_t>(BLOCK, rows - row)](op, group, row);
}

// A head of queries or keys, normed if there is a norm, rotated; size is a multiple of GROUP.
void rope_head(const float* x, const float* norm, float eps, const float* cos, const float* sin, int size, bf16* out) {
    Floats factor = all(1.0f);
    if (norm) {
        Floats squares = {};
        for (int i = 0; i < size; i += LANES) squares = fma(load(x + i), load(x + i), squares);
        factor = all(1.0f / sqrtf(total(squares) / float(size) + eps));
    }
    int half = size / 2;
    for (int i = 0; i < half; i += LANES) {
        Floats a = load(x + i), b = load(x + half + i);
        if (norm) a = a * factor * load(norm + i), b = b * factor * load(norm + half + i);
        narrow(out + i, fma(a, load(cos + i), b * load(sin + i)));
        narrow(out + half + i, fma(b, load(cos + half + i), a * load(sin + half + i)));
    }
}

void rope_row(const Op& op, const Frame& frame, int64_t row) {
    int size = op.head_dim;
    const float *x = (const float*)op.in + row * op.in_stride, *cos = frame.cos + row * size, *sin = frame.sin + row * size;
    bf16* queries = (bf16*)op.out + row * op.out_stride;
    for (int head = 0; head < op.heads; head++, x += size)
        rope_head(x, (const float*)op.weight, op.eps, cos, sin, size, queries + head * size);
    bf16* kv = frame.kv + op.layer * frame.layer_stride + frame.slots[row] * 2 * op.kv_heads * size;
    for (int head = 0; head < op.kv_heads; head++, x += size)
        rope_head(x, (const float*)op.extra, op.eps, cos, sin, size, kv + head * size);
    for (int i = 0; i < op.kv_heads * size; i += LANES) narrow(kv + op.kv_heads * size + i, load(x + i));
}

struct Seen {  // the KV entries of one row, oldest first
    const int64_t* slots;
    int64_t shared, count;
    int64_t own[64];

    Seen(const Frame& frame, int64_t row) : slots(frame.kv_slots + frame.begin[row]), shared(frame.shared[row]) {
        count = shared;
        for (uint64_t word = frame.words[row]; word; word &= word - 1)
            own[count++ - shared] = frame.kv_slots[frame.tree[row] + __builtin_ctzll(word)];
    }
    int64_t operator[](int64_t i) const { return i < shared ? slots[i] : own[i - shared]; }
};

float weigh(float* scores, int64_t count) {  // e^(score - greatest); returns one over their sum
    Floats greatest = all(-INFINITY), sum = {};
    int64_t padded = (count + LANES - 1) / LANES * LANES;
    for (int64_t i = count; i < padded; i++) scores[i] = -INFINITY;
    for (int64_t i = 0; i < padded; i += LANES) {
        Floats v = load(scores + i);
        Words more = (Words)(v > greatest);
        greatest = (Floats)(((Words)v & more) | ((Words)greatest & ~more));
    }
    float top = greatest[0];
    for (int i = 1; i < LANES; i++) top = std::max(top, greatest[i]);
    for (int64_t i = 0; i < padded; i += LANES) {
        Floats v = exponential(load(scores + i) - all(top));
        store(scores + i, v);
        sum += v;
    }
    return 1.0f / total(sum);
}

// H query heads that share a KV head, from `head` on
template <int H>
void attend_heads(const Op& op, const Frame& frame, int64_t row, int head, std::vector<float>& scores) {
    Seen seen(frame, row);
    int size = op.head_dim, kv_head = head / (op.heads / op.kv_heads);
    int64_t slot_stride = 2 * int64_t(op.kv_heads) * size, padded = (seen.count + LANES - 1) / LANES * LANES;
    const bf16* query = (const bf16*)op.in + row * op.in_stride + head * size;
    const bf16* keys = frame.kv + op.layer * frame.layer_stride + kv_head * size;
    const bf16* values = keys + op.kv_heads * size;
    if (int64_t(scores.size()) < H * padded) scores.resize(2 * H * padded);
    Floats scale = all(1.0f / sqrtf(float(size)));
    for (int64_t first = 0; first < seen.count; first += LANES) {
        Floats sums[H][LANES];
        for (int i = 0; i < LANES; i++) {  // beyond the last entry: that one again
            const bf16* key = keys + seen[std::min(first + i, seen.count - 1)] * slot_stride;
            Floats sum[H] = {};
            for (int j = 0; j < size; j += GROUP)
                for (int h = 0; h < H; h++) sum[h] = pairs(sum[h], words_at(query + h * size + j), words_at(key + j));
            for (int h = 0; h < H; h++) sums[h][i] = sum[h];
        }
        for (int h = 0; h < H; h++) store(&scores[h * padded + first], totals(sums[h]) * scale);
    }
    Floats factor[H];
    for (int h = 0; h < H; h++) factor[h] = all(weigh(&scores[h * padded], seen.count));
    bf16* out = (bf16*)op.out + row * op.out_stride + head * size;
    for (int j = 0; j < size; j += GROUP) {
        Floats low[H] = {}, high[H] = {};
        for (int64_t i = 0; i < seen.count; i++) {
            const bf16* value = values + seen[i] * slot_stride + j;
            Floats first = widen(value), second = widen(value + LANES);
            for (int h = 0; h < H; h++) {
                Floats weight = all(scores[h * padded + i]);
                low[h] = fma(weight, first, low[h]);
                high[h] = fma(weight, second, high[h]);
            }
        }
        for (int h = 0; h < H; h++) {
            narrow(out + h * size + j, low[h] * factor[h]);
            narrow(out + h * size + j + LANES, high[h] * factor[h]);
        }
    }
}

int bundles(const Op& op) { return (op.heads / op.kv_heads + BUNDLE - 1) / BUNDLE; }  // of one KV head's query heads

void attend_bundle(const Op& op, const Frame& frame, int64_t part, std::vector<float>& scores) {
    constexpr void (*widths[])(const Op&, const Frame&, int64_t, int, std::vector<float>&) = {
        nullptr, attend_heads<1>, attend_heads<2>, attend_heads<3>, attend_heads<4>};
    int group = op.heads / op.kv_heads, all_bundles = op.kv_heads * bundles(op), bundle = int(part % all_bundles);
    int begin = bundle % bundles(op) * BUNDLE;
    widths[std::min(BUNDLE, group - begin)](op, frame, part / all_bundles, bundle / bundles(op) * group + begin, scores);
}

int64_t parts_of(const Op& op, const Frame& frame, int threads) {
    if (op.kind == PRODUCT) {
        int64_t groups = (op.outer * (op.result == SILU ? 2 : 1) + GROUP - 1) / GROUP;
        return std::min<int64_t>(groups, threads == 1 ? 1 : 8 * threads);
    }
    return op.kind == ATTEND ? frame.rows * op.kv_heads * bundles(op) : frame.rows;
}

void compute(const Op& op, const Frame& frame, int64_t part, int64_t parts, std::vector<float>& scores) {
    switch (op.kind) {
        case NORM: return norm_row(op, part);
        case ROUND: return round_row(op, part);
        case ROPE: return rope_row(op, frame, part);
        case ATTEND: return attend_bundle(op, frame, part, scores);
        case PRODUCT: {
            int64_t groups = (op.outer * (op.result == SILU ? 2 : 1) + GROUP - 1) / GROUP;
            for (int64_t g = groups * part / parts; g < groups * (part + 1) / parts; g++) product_group(op, g, frame.rows);
        }
    }
}

inline void pause(int& spins) {
    if (++spins % SPINS == 0) sched_yield();
#if defined(__x86_64__)
    else _mm_pause();
#endif
}

struct alignas(64) Progress {
    std::atomic<int64_t> taken{0}, done{0};
};

struct Team {
    std::mutex calls, door;
    std::condition_variable work;
    std::vector<std::thread> helpers;
    std::vector<std::vector<float>> scores;
    std::vector<Progress> progress;
    const Op* ops = nullptr;
    int64_t num_ops = 0;
    const Frame* frame = nullptr;
    std::atomic<int64_t> announced{0};
    std::atomic<int> inside{0};
    bool open = false, ended = false;

    explicit Team(int threads) : scores(threads) {
        for (int i = 1; i < threads; i++) helpers.emplace_back([this, i] { help(i); });
    }
    ~Team() {
        { std::lock_guard lock(door); ended = true; }
        work.notify_all();
        for (auto& helper : helpers) helper.join();
    }
    void share(int thread) {
        for (int64_t i = 0; i < num_ops; i++) {
            int64_t parts = parts_of(ops[i], *frame, int(scores.size()));
            for (int64_t part; (part = progress[i].taken.fetch_add(1, std::memory_order_relaxed)) < parts;) {
                compute(ops[i], *frame, part, parts, scores[thread]);
                progress[i].done.fetch_add(1, std::memory_order_release);
            }
            for (int spins = 0; progress[i].done.load(std::memory_order_acquire) < parts;) pause(spins);
        }
    }
    void help(int thread) {
        int64_t seen = 0;
        while (true) {
            for (int spins = 0; announced.load(std::memory_order_acquire) == seen && spins < IDLE_SPINS;) pause(spins);
            {
                std::unique_lock lock(door);
                work.wait(lock, [&] { return ended || announced.load() != seen; });
                if (ended) return;
                seen = announced.load();
                if (!open) continue;
                inside++;
            }
            share(thread);
            inside--;
        }
    }
    void run(const Op* list, int64_t count, const Frame& what) {
        std::lock_guard one(calls);
        if (int64_t(progress.size()) < count) progress = std::vector<Progress>(count);
        for (auto& p : progress) p.taken = p.done = 0;
        {
            std::lock_guard lock(door);
            ops = list, num_ops = count, frame = &what, open = true;
            announced++;
        }
        work.notify_all();
        share(0);
        { std::lock_guard lock(door); open = false; }
        for (int spins = 0; inside.load();) pause(spins);
    }
};

}  // namespace

extern "C" {

Team* slipstream_team(int32_t threads) { return new Team(threads); }
void slipstream_end(Team* team) { delete team; }
void slipstream_run(Team* team, const Op* ops, int64_t count, const Frame* frame) { team->run(ops, count, *frame); }

// weight: bfloat16 [outer, inner] -> packed: groups of 32 outputs, and in each all of its pairs of inputs
void slipstream_pack(const bf16* weight, int64_t outer, int64_t inner, bf16* packed) {
    for (int64_t group = 0; group * GROUP < outer; group++)
        for (int64_t pair = 0; pair < inner / 2; pair++)
            for (int64_t i = 0; i < GROUP; i++, packed += 2) {
                int64_t row = group * GROUP + i;
                for (int half = 0; half < 2; half++) packed[half] = row < outer ? weight[row * inner + 2 * pair + half] : 0;
            }
}
}
