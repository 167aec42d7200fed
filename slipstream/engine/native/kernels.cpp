// The operations of one forward on a CPU in bfloat16, run as a list by a team of threads.
//
// Rules:
// 1. A row's bits depend on that row only: not on the number of rows in the forward, on its place among them, on the
//    number of threads, nor on which thread computes it. The order of each sum is fixed in this source, not chosen by the
//    compiler (-ffp-contract=off).
// 2. The residual stream and all sums are float32 (or exact integers); inputs of products, and KV, are bfloat16, rounded to
//    nearest.
// 3. Threads wait for one another only after each operation. Each takes the next free part of an operation, so a thread that
//    the system suspends delays only the part that it computes. Between forwards the helper threads sleep.
// 4. The caller has checked everything: shapes, indices, sizes of buffers.
//
// It knows nothing about models: `program.py` writes the list.

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <sched.h>
#include <thread>
#include <vector>

#include "operations.h"
#include "trees.h"

namespace {

constexpr int SPINS = 300;       // checks of a waiting thread before it yields its core
constexpr int IDLE_SPINS = 3000;  // checks for another list before a helper sleeps, as waking it takes longer

inline void pause(int& spins) {
    if (++spins % SPINS == 0) sched_yield();
#if defined(__x86_64__)
    else _mm_pause();
#endif
}

struct Sight {  // the visibility of each row (`Frame::begin`, `shared`, `tree`, `words`), computed from the batch's segments
    std::vector<int64_t> begin, shared, tree;
    std::vector<uint64_t> words;

    void see(Frame& frame) {
        const int64_t *rows = frame.segments, *entries = rows + frame.num_segments + 1,
                      *begins = entries + frame.num_segments + 1, *masks = begins + frame.num_segments;
        begin.resize(frame.rows), shared.resize(frame.rows), tree.resize(frame.rows), words.resize(frame.rows);
        for (int64_t b = 0; b < frame.num_segments; b++)
            for (int64_t row = rows[b]; row < rows[b + 1]; row++) {
                int64_t count = entries[b + 1] - entries[b], masked = masks[b];
                int64_t whole = count - (masked ? masked : rows[b + 1] - row - 1);  // entries of rows behind it are not seen
                words[row] = masked ? frame.words[row] : 0;
                int64_t past = skipped(frame.window, whole, words[row]);
                tree[row] = begins[b] + count - masked;
                begin[row] = begins[b] + past, shared[row] = whole - past;
            }
        frame.begin = begin.data(), frame.shared = shared.data(), frame.tree = tree.data(), frame.words = words.data();
    }
};

struct alignas(64) Progress {
    std::atomic<int64_t> taken{0}, done{0};
};

struct Team {
    std::mutex calls, door;
    std::condition_variable work;
    std::vector<std::thread> helpers;
    std::vector<Scratch> scratch;
    Splits splits;
    std::vector<Progress> progress;
    const Op* ops = nullptr;
    int64_t num_ops = 0;
    const Frame* frame = nullptr;
    Sight sight;
    std::atomic<int64_t> announced{0};
    std::atomic<int> inside{0};
    bool open = false, ended = false;

    explicit Team(int threads) : scratch(threads) {
        for (int i = 1; i < threads; i++) helpers.emplace_back([this, i] { help(i); });
    }
    ~Team() {
        { std::lock_guard lock(door); ended = true; }
        work.notify_all();
        for (auto& helper : helpers) helper.join();
    }
    void share(int thread) {
        for (int64_t i = 0; i < num_ops; i++) {
            scratch[thread].widened = nullptr;
            int64_t parts = parts_of(ops[i], *frame, int(scratch.size()), splits);
            for (int64_t part; (part = progress[i].taken.fetch_add(1, std::memory_order_relaxed)) < parts;) {
                compute(ops[i], *frame, part, parts, scratch[thread], splits);
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
    void run(const Op* list, int64_t count, Frame what) {
        std::lock_guard one(calls);
        if (what.segments) sight.see(what);
        if (int64_t(progress.size()) < count) progress = std::vector<Progress>(count);
        for (auto& p : progress) p.taken = p.done = 0;
        splits.hold(list, count, what, int(scratch.size()));
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

void slipstream_grow(Team* team, const Trees* trees) {
    grow(*trees, [team](const Op* list, int64_t count, const Frame& frame) { team->run(list, count, frame); });
}

int32_t slipstream_lanes() { return LANES; }
int32_t slipstream_tiles() { return TILES; }

// weight: bfloat16 [outer, inner] -> packed: groups of 2 LANES outputs, and in each all of its pairs of inputs
void slipstream_pack(const bf16* weight, int64_t outer, int64_t inner, bf16* packed) {
    for (int64_t group = 0; group * GROUP < outer; group++)
        for (int64_t pair = 0; pair < inner / 2; pair++)
            for (int64_t i = 0; i < GROUP; i++, packed += 2) {
                int64_t row = group * GROUP + i;
                for (int half = 0; half < 2; half++) packed[half] = row < outer ? weight[row * inner + 2 * pair + half] : 0;
            }
}

// weight: whole numbers [outer, inner] from -127 to 127 -> packed: groups of 2 LANES outputs, and in each all of its inputs, as
// `whole_place` says
void slipstream_pack_whole(const int8_t* weight, int64_t outer, int64_t inner, uint8_t* packed) {
    for (int64_t group = 0; group * GROUP < outer; group++, packed += whole_size(inner))
        for (int64_t i = 0; i < GROUP; i++)
            for (int64_t k = 0, row = group * GROUP + i; k < inner; k++)
                packed[whole_place(i, k)] = whole_byte(row < outer ? weight[row * inner + k] : 0);
}

// See `make_screen`; 0 where there is none.
int32_t slipstream_screen(const bf16* packed, int64_t outer, int64_t inner, int8_t* numbers, float* bounds) {
    return make_screen(packed, outer, inner, numbers, bounds);
}
}
