// The operations of one forward on a CPU in bfloat16, run as a list by a team of threads. `program.py` writes the
// list and checks everything beforehand: shapes, indices, sizes of buffers. Nothing here knows about models.
//
// Rules:
// 1. A row's bits depend on that row alone: not on the number of rows in the forward, on its place among them, on
//    the number of threads, nor on which thread computes it. So a drafted row has the bits of a plain step. The
//    order of each sum is fixed in this source, not chosen by the compiler (-ffp-contract=off).
// 2. The residual stream and all sums are float32 (or exact integers). Inputs of products, and KV, are bfloat16,
//    rounded to nearest, ties to even.
// 3. Threads wait for one another only after each operation. Each takes the next free part of an operation, so a
//    thread that the system suspends delays only the part that it computes. Between forwards the helper threads
//    sleep.

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

struct Visibility {  // which entries each row sees (`Frame::prefix_begin` to `words`), from the batch's segments
    std::vector<int64_t> prefix_begin, prefix_len, tree_begin;
    std::vector<uint64_t> words;

    void compute(Frame& frame) {
        const int64_t *rows = frame.segments, *entries = rows + frame.num_segments + 1,
                      *begins = entries + frame.num_segments + 1, *masks = begins + frame.num_segments;
        prefix_begin.resize(frame.rows), prefix_len.resize(frame.rows), tree_begin.resize(frame.rows), words.resize(frame.rows);
        for (int64_t b = 0; b < frame.num_segments; b++)
            for (int64_t row = rows[b]; row < rows[b + 1]; row++) {
                int64_t count = entries[b + 1] - entries[b], masked = masks[b];
                int64_t prefix = count - (masked ? masked : rows[b + 1] - row - 1);  // entries of rows behind it are not seen
                words[row] = masked ? frame.words[row] : 0;
                int64_t skipped = skipped_by_window(frame.window, prefix, words[row]);
                tree_begin[row] = begins[b] + count - masked;
                prefix_begin[row] = begins[b] + skipped, prefix_len[row] = prefix - skipped;
            }
        frame.prefix_begin = prefix_begin.data(), frame.prefix_len = prefix_len.data(), frame.tree_begin = tree_begin.data(),
                frame.words = words.data();
    }
};

struct alignas(64) Progress {
    std::atomic<int64_t> next_part{0}, finished_parts{0};
};

struct Team {
    std::mutex run_mutex, mutex;
    std::condition_variable wake;
    std::vector<std::thread> helpers;
    std::vector<Scratch> scratch;
    Splits splits;
    std::vector<Progress> progress;
    const Op* ops = nullptr;
    int64_t num_ops = 0;
    const Frame* frame = nullptr;
    Visibility visibility;
    std::atomic<int64_t> generation{0};
    std::atomic<int> num_active{0};
    bool open = false, ended = false;

    explicit Team(int threads) : scratch(threads) {
        for (int i = 1; i < threads; i++) helpers.emplace_back([this, i] { helper_loop(i); });
    }
    ~Team() {
        { std::lock_guard lock(mutex); ended = true; }
        wake.notify_all();
        for (auto& helper : helpers) helper.join();
    }
    void run_parts(int thread) {
        for (int64_t i = 0; i < num_ops; i++) {
            scratch[thread].widened = nullptr;
            int64_t parts = parts_of(ops[i], *frame, int(scratch.size()), splits);
            for (int64_t part; (part = progress[i].next_part.fetch_add(1, std::memory_order_relaxed)) < parts;) {
                compute(ops[i], *frame, part, parts, scratch[thread], splits);
                progress[i].finished_parts.fetch_add(1, std::memory_order_release);
            }
            for (int spins = 0; progress[i].finished_parts.load(std::memory_order_acquire) < parts;) pause(spins);
        }
    }
    void helper_loop(int thread) {
        int64_t seen = 0;
        while (true) {
            for (int spins = 0; generation.load(std::memory_order_acquire) == seen && spins < IDLE_SPINS;) pause(spins);
            {
                std::unique_lock lock(mutex);
                wake.wait(lock, [&] { return ended || generation.load() != seen; });
                if (ended) return;
                seen = generation.load();
                if (!open) continue;
                num_active++;
            }
            run_parts(thread);
            num_active--;
        }
    }
    void run(const Op* list, int64_t count, Frame what) {
        std::lock_guard one(run_mutex);
        if (what.segments) visibility.compute(what);
        if (int64_t(progress.size()) < count) progress = std::vector<Progress>(count);
        for (auto& p : progress) p.next_part = p.finished_parts = 0;
        splits.plan(list, count, what, int(scratch.size()));
        {
            std::lock_guard lock(mutex);
            ops = list, num_ops = count, frame = &what, open = true;
            generation++;
        }
        wake.notify_all();
        run_parts(0);
        { std::lock_guard lock(mutex); open = false; }
        for (int spins = 0; num_active.load();) pause(spins);
    }
};

}  // namespace

extern "C" {

Team* slipstream_team_new(int32_t threads) { return new Team(threads); }
void slipstream_team_delete(Team* team) { delete team; }
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

// weight: int8 [outer, inner] from -127 to 127 -> packed: groups of 2 LANES outputs, and in each all of its inputs, as
// `int8_index` says
void slipstream_pack_int8(const int8_t* weight, int64_t outer, int64_t inner, uint8_t* packed) {
    for (int64_t group = 0; group * GROUP < outer; group++, packed += int8_group_bytes(inner))
        for (int64_t i = 0; i < GROUP; i++)
            for (int64_t k = 0, row = group * GROUP + i; k < inner; k++)
                packed[int8_index(i, k)] = encode_int8(row < outer ? weight[row * inner + k] : 0);
}

// See `make_screen`; 0: there is no screen.
int32_t slipstream_screen(const bf16* packed, int64_t outer, int64_t inner, int8_t* numbers, float* bounds) {
    return make_screen(packed, outer, inner, numbers, bounds);
}
}
