// Moves replicas between ranks that map the same memory. The file needs no Torch, and does not say
// how the memory came to be shared: ranks may be processes or, in a test, threads.
//
// Ordering. Every rank counts its pushes and its pulls; all ranks call alike, so the counts
// (*generations*) agree without a message. Four flags a slot, in the memory of the slot's rank, say
// how far that slot is:
//
//   freed       by the slot's rank    nobody here reads the last generation's weights any more
//   filled      by the sending rank   so many chunks of this generation are in the slot
//   grad_ready  by the slot's rank    the gradient of this generation is in the slot
//   grad_taken  by the main's rank    that gradient has been added, and is zero
//
// A flag only grows. It is stored with release after the writes and reads that it reports, and read
// with acquire before those that depend on it. A rank publishes all that peers can wait for before
// it waits itself, and copies from mains wait for no other copy, so ranks that all make the call
// always finish. Nothing of this is a barrier: a rank without transfers goes on at once.
//
// Besides, ranks gather rows (row_table.h): there each waits for all.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "megatron_ext/row_table.h"

namespace megatron_ext {

// On a cache line of its own: a rank spins on it while others store beside it.
struct alignas(64) Flag {
    uint64_t value;
    // Of `freed`: seals (seal.h) of the replicas that the rank was given to push, in the last
    // generation of either parity. Stored before the generation is.
    uint64_t seals[2];
};
static_assert(std::atomic_ref<uint64_t>::is_always_lock_free, "flags are shared by processes");

struct SlotFlags {
    Flag freed;
    Flag filled;  // generation << kChunkBits | chunks
    Flag grad_ready;
    Flag grad_taken;
};

// A slot is filled chunk by chunk, segment after segment, and a relay passes chunks on as they
// come. One chunk is read from memory once and written to all destinations while it is in cache.
constexpr int64_t kChunkBytes = 1 << 18;
constexpr int kChunkBits = 24;
// The most to go on behind: a flag still holds the generations of any training, and their chunks.
constexpr int64_t kMaxGeneration = int64_t{1} << 38;

// A slot of a rank of the EP group.
struct Place {
    int64_t rank;
    int64_t slot;
};

// One segment of a main: as long as its slot, or shorter. Then it comes to the slot's start.
struct MainSegment {
    const std::byte* memory;
    int64_t bytes;
};

// One source to all its destinations. The source is a main, segment by segment, or, where
// `main_segments` is empty, what arrives in this rank's slot `relayed.slot`, filled by
// `relayed.rank`.
struct CopyTask {
    std::vector<MainSegment> main_segments;
    Place relayed;
    std::vector<Place> destinations;
};

struct PushTask {
    std::vector<int64_t> segments;  // what `add_segment` returned, for each part of an expert
    std::vector<CopyTask> copies;   // by this rank; copies from mains first
    int64_t num_slots;              // of every rank
    std::vector<Place> expected;    // this rank's used slots; `rank` is who fills them
    std::string label;              // for messages: which layer
    uint64_t seal = 0;              // of all replicas of the group: equal on all ranks
};

enum class GradType { kFloat32, kFloat64, kBFloat16 };

// What the gradients of replicas are added to.
struct Total {
    void* memory;
    const void* aside;  // of the same type: added to their sum; null for nothing
    GradType type;      // of the gradients, or float32 for bfloat16
};

// The sum over the replicas of one main, in the order of `replicas`.
struct SumTask {
    std::vector<Place> replicas;
    std::vector<Total> totals;  // for each segment
};

struct PullTask {
    std::vector<int64_t> segments;
    std::vector<GradType> types;  // of each segment's slot gradients
    std::vector<SumTask> sums;
    std::vector<Place> computed;  // this rank's used slots; `rank` is the main's rank
    std::string label;
};

// A wait that took too long or, where the flag is ahead (`seen` > `expected`), is of no use.
struct FailedWait {
    int64_t rank;
    int64_t peer;
    const char* deed;   // what the peer was to do with the slot
    int64_t slot;       // -1: not with a slot but with its row
    uint64_t expected;  // generations
    uint64_t seen;
    double timeout_s;
    std::string label;
};
std::string message_of(const FailedWait& wait);

// One thread for one job at a time, started with the first.
class Worker {
  public:
    ~Worker();

    // Run `job`; the last one must have been joined.
    void start(std::function<void()> job);

    // Return when the job is done; throws what it threw, once. Meanwhile calls
    // `look` now and then.
    void join(const std::function<void()>& look = [] {});

  private:
    void work();

    std::mutex mutex_;
    std::condition_variable changed_;
    std::thread thread_;
    std::function<void()> job_;  // empty when there is nothing to do
    bool ending_ = false;
    std::exception_ptr failure_;
};

// A push of so little is copied before `start_push` returns: waking a thread takes as long.
constexpr int64_t kInlineBytes = 1 << 18;

// One rank's end. All calls come from one thread; copies and sums run in a thread of their own, one
// push or pull at a time: starting another first ends the one before. A wait longer than the time
// limit (lived_time.h), a flag from the future, or a peer that pushes other replicas is a
// std::runtime_error.
class Exchange {
  public:
    // `max_delay_us`: before flags are read or stored, sometimes sleep up to so long. For tests of
    // the ordering; 0 otherwise. `heed`: called now and then while the caller waits; what it throws
    // ends the wait.
    Exchange(int64_t rank, double timeout_s, int64_t max_delay_us, void (*heed)() = nullptr);
    ~Exchange();
    Exchange(const Exchange&) = delete;
    Exchange& operator=(const Exchange&) = delete;

    // Processes of the ranks, on this machine: a wait for one that has ended fails at once.
    void set_processes(const std::vector<int64_t>& by_rank);

    // Flags of each rank's slots, zero before the first use.
    void set_flags(std::vector<SlotFlags*> by_rank) { flags_ = std::move(by_rank); }

    // Each rank's slots of one segment, `slot_bytes` apart.
    int64_t add_segment(std::vector<std::byte*> by_rank, int64_t slot_bytes);

    // Start a push and return its generation. All that `task` points to must stay until it is
    // ended.
    uint64_t start_push(PushTask task);

    // Return when this rank's slots are filled and its mains may be changed. Throws what went
    // wrong.
    void finish_push(uint64_t generation);

    // Start a pull and return its generation; as for a push.
    uint64_t start_pull(PullTask task);

    // Return when the totals are there and this rank's slots with a replica have zero gradients.
    // Throws what went wrong.
    void finish_pull(uint64_t generation);

    // Where each rank's rows come; as segments, on all ranks alike.
    void set_table(std::vector<std::byte*> by_rank, RowTable table);

    // Give all ranks a row of `num_words`, and take theirs: rows [R, num_words]. Beside what is
    // under way.
    void gather(const int64_t* row, int64_t num_words, int64_t* rows, const std::string& label);

    // End what is under way without waiting for peers; returns the highest generation used here.
    uint64_t abort();

    // Go on behind `generation`: the highest of all ranks, after all have aborted.
    void restart(uint64_t generation);

  private:
    struct Segment {
        std::vector<std::byte*> by_rank;
        int64_t slot_bytes;
    };
    using FlagOf = Flag SlotFlags::*;

    enum class UnderWay { kNothing, kPush, kPull };

    // End what is under way.
    void finish();
    // Their parts: what others wait for, and what this rank waits for.
    void send(const PushTask& task, uint64_t generation);
    void receive(const PushTask& task, uint64_t generation);
    void sum_up(const PullTask& task, uint64_t generation);
    void wait_until_taken(const PullTask& task, uint64_t generation);
    void copy(const PushTask& task, const CopyTask& copy, uint64_t generation);
    void add(const PullTask& task, const SumTask& sum);
    int64_t expert_bytes(const std::vector<int64_t>& segments) const;
    std::byte* address(int64_t segment, const Place& place) const;

    void publish(FlagOf flag, const Place& place, uint64_t value);
    // Wait until `flag` of `place` is at least `value`; `shift` takes it to a generation.
    void wait_for(FlagOf flag,
                  const Place& place,
                  uint64_t value,
                  int shift,
                  int64_t peer,
                  const char* deed,
                  const std::string& label);
    // Wait until `flag` is at least `wait.expected`; `shift` takes both to generations.
    void wait_until(uint64_t& flag, int shift, FailedWait wait, bool is_push);
    // Throw if `peer` pushes other replicas in this generation: then what this rank waits for never
    // comes.
    void check_same_push(int64_t peer, uint64_t generation, const std::string& label) const;
    bool has_ended(int64_t rank) const;
    void heed();
    void delay();

    const int64_t rank_;
    const double timeout_s_;
    const int64_t max_delay_us_;
    void (*const heed_)();
    std::vector<int> processes_;  // a file descriptor of each, or -1
    std::vector<SlotFlags*> flags_;
    std::vector<Segment> segments_;
    uint64_t push_generation_ = 0;
    uint64_t pull_generation_ = 0;
    uint64_t row_generation_ = 0;
    std::vector<std::byte*> tables_;  // of each rank
    RowTable table_{};
    PushTask push_;  // of the last generation; the worker reads it
    PullTask pull_;  // likewise
    UnderWay under_way_ = UnderWay::kNothing;
    std::atomic<bool> cancelled_ = false;

    const int64_t process_;
    std::unique_ptr<Worker> worker_ = std::make_unique<Worker>();
};

}  // namespace megatron_ext
