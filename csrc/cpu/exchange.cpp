// Pushes and pulls over memory that the ranks share: see exchange.h for the ordering.

#include "megatron_ext/exchange.h"

#include <poll.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <stdexcept>
#include <utility>

#include "megatron_ext/lived_time.h"

namespace megatron_ext {
namespace {

uint64_t now_ns() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<uint64_t>(std::chrono::nanoseconds(now).count());
}

// A hand-over between running ranks takes well under a microsecond; with more ranks than cores the
// peer needs this core; and a peer that is a layer behind is worth no core at all.
constexpr int kSpins = 200;
constexpr uint64_t kYieldNs = 200'000;
constexpr auto kNap = std::chrono::microseconds(50);
// So often a wait looks whether it is of any use.
constexpr uint64_t kLookNs = 100'000'000;

constexpr long kPidfdOpen = 434;  // On all machines; older headers have no name for it.

thread_local bool is_worker = false;

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// So many elements of every replica are added before the next ones: sum and sources stay in the
// first-level cache, so each gradient is read from memory once.
constexpr int64_t kTile = 2048;

struct BFloat16 {
    uint16_t bits;
};
float widen(float value) { return value; }
double widen(double value) { return value; }
float widen(BFloat16 value) { return std::bit_cast<float>(uint32_t{value.bits} << 16); }

void round_to(float value, float& to) { to = value; }
void round_to(double value, double& to) { to = value; }
// To nearest, ties to even.
void round_to(float value, BFloat16& to) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
    to.bits = static_cast<uint16_t>(std::isnan(value) ? 0x7fc0 : rounded >> 16);
}

// total += (sources[0] + sources[1] + ...) + aside, in this order; the sources are zero then.
template <class Sum, class Grad, class Stored>
void add_all(const Total& to, const std::vector<std::byte*>& sources, int64_t bytes) {
    const int64_t count = bytes / static_cast<int64_t>(sizeof(Grad));
    Sum added[kTile];
    for (int64_t first = 0; first < count; first += kTile) {
        const int64_t size = std::min(kTile, count - first);
        const auto tile_of = [&](size_t s) { return reinterpret_cast<Grad*>(sources[s]) + first; };
        const Grad* const __restrict one = tile_of(0);
        for (int64_t i = 0; i < size; ++i) added[i] = widen(one[i]);
        for (size_t s = 1; s < sources.size(); ++s) {
            const Grad* const __restrict more = tile_of(s);
            for (int64_t i = 0; i < size; ++i) added[i] += widen(more[i]);
        }
        if (to.aside != nullptr) {
            const Stored* const __restrict aside = static_cast<const Stored*>(to.aside) + first;
            for (int64_t i = 0; i < size; ++i) added[i] += widen(aside[i]);
        }
        Stored* const __restrict total = static_cast<Stored*>(to.memory) + first;
        for (int64_t i = 0; i < size; ++i) round_to(widen(total[i]) + added[i], total[i]);
        for (size_t s = 0; s < sources.size(); ++s) std::fill_n(tile_of(s), size, Grad{});
    }
}

std::string behind_label(const std::string& label) { return label.empty() ? "" : ", " + label; }

}  // namespace

std::string message_of(const FailedWait& wait) {
    const std::string rank = "rank " + std::to_string(wait.rank);
    const std::string peer = "rank " + std::to_string(wait.peer);
    const std::string slot = wait.slot < 0 ? "its row" : "slot " + std::to_string(wait.slot);
    if (wait.seen > wait.expected) {
        return rank + " is at generation " + std::to_string(wait.expected) + ", but " + peer +
               " is at generation " + std::to_string(wait.seen) + " of " + slot +
               ": they did not make the same calls; after an aborted step every rank of the EP "
               "group must call reset()" +
               behind_label(wait.label);
    }
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, "%.1f", wait.timeout_s);
    return rank + " waited " + seconds + " s for " + peer + " to " + wait.deed + " " + slot +
           " (generation " + std::to_string(wait.expected) + ", seen " + std::to_string(wait.seen) +
           ")" + behind_label(wait.label);
}

Exchange::Exchange(int64_t rank, double timeout_s, int64_t max_delay_us, void (*heed)())
    : rank_(rank),
      timeout_s_(timeout_s),
      max_delay_us_(max_delay_us),
      heed_(heed),
      process_(getpid()) {}

Exchange::~Exchange() {
    for (const int process : processes_) close(process);
    // A forked child has a copy of this, but no such thread, and waiting for it would never end.
    if (getpid() != process_) {
        static_cast<void>(worker_.release());
        return;
    }
    cancelled_.store(true, std::memory_order_relaxed);
}

void Exchange::set_processes(const std::vector<int64_t>& by_rank) {
    for (const int64_t process : by_rank) {
        processes_.push_back(static_cast<int>(syscall(kPidfdOpen, process, 0)));
    }
}

int64_t Exchange::add_segment(std::vector<std::byte*> by_rank, int64_t slot_bytes) {
    finish();
    segments_.push_back({std::move(by_rank), slot_bytes});
    return static_cast<int64_t>(segments_.size()) - 1;
}

uint64_t Exchange::start_push(PushTask task) {
    // The last push must be over before a slot is offered again: now another rank may fill the
    // slot, and two ranks must never write the same flag at a time.
    finish();
    const uint64_t generation = ++push_generation_;
    if (task.num_slots > 0) {
        std::atomic_ref(flags_[rank_][0].freed.seals[generation % 2])
            .store(task.seal, std::memory_order_release);
    }
    // The caller's order of calls is why this is true: it does not read the slots any more.
    for (int64_t slot = 0; slot < task.num_slots; ++slot) {
        publish(&SlotFlags::freed, {rank_, slot}, generation);
    }
    push_ = std::move(task);
    int64_t bytes = 0;
    bool is_relay = false;
    for (const CopyTask& copy : push_.copies) {
        is_relay |= copy.main_segments.empty();
        bytes += expert_bytes(push_.segments) * static_cast<int64_t>(copy.destinations.size());
    }
    if (bytes <= kInlineBytes && !is_relay) {
        send(push_, generation);
    } else {
        worker_->start([this, generation] { send(push_, generation); });
    }
    under_way_ = UnderWay::kPush;
    return generation;
}

void Exchange::finish_push(uint64_t generation) {
    // Else something later has ended it.
    if (under_way_ == UnderWay::kPush && generation == push_generation_) finish();
}

uint64_t Exchange::start_pull(PullTask task) {
    finish();
    const uint64_t generation = ++pull_generation_;
    for (const Place& slot : task.computed) {
        publish(&SlotFlags::grad_ready, {rank_, slot.slot}, generation);
    }
    pull_ = std::move(task);
    under_way_ = UnderWay::kPull;
    // Unlike a push, a pull waits for peers that have yet to compute, so it never runs at once.
    if (!pull_.sums.empty()) worker_->start([this, generation] { sum_up(pull_, generation); });
    return generation;
}

void Exchange::finish_pull(uint64_t generation) {
    if (under_way_ == UnderWay::kPull && generation == pull_generation_) finish();
}

void Exchange::finish() {
    const UnderWay what = std::exchange(under_way_, UnderWay::kNothing);
    worker_->join([this] { heed(); });
    if (what == UnderWay::kPush) receive(push_, push_generation_);
    if (what == UnderWay::kPull) wait_until_taken(pull_, pull_generation_);
}

void Exchange::send(const PushTask& task, uint64_t generation) {
    for (const CopyTask& each : task.copies) copy(task, each, generation);
}

void Exchange::receive(const PushTask& task, uint64_t generation) {
    uint64_t chunks = 0;
    for (const int64_t segment : task.segments) {
        chunks += (segments_[segment].slot_bytes + kChunkBytes - 1) / kChunkBytes;
    }
    for (const Place& slot : task.expected) {
        wait_for(&SlotFlags::filled,
                 {rank_, slot.slot},
                 generation << kChunkBits | chunks,
                 kChunkBits,
                 slot.rank,
                 "fill",
                 task.label);
    }
}

void Exchange::copy(const PushTask& task, const CopyTask& copy, uint64_t generation) {
    // The slot's rank has stored `freed` after its last read, so writing is safe from here on.
    for (const Place& place : copy.destinations) {
        wait_for(&SlotFlags::freed, place, generation, 0, place.rank, "free", task.label);
    }
    const bool is_relay = copy.main_segments.empty();
    uint64_t progress = generation << kChunkBits;
    for (size_t g = 0; g < task.segments.size(); ++g) {
        const int64_t segment = task.segments[g];
        const int64_t size = segments_[segment].slot_bytes;
        const MainSegment source =
            is_relay ? MainSegment{address(segment, {rank_, copy.relayed.slot}), size}
                     : copy.main_segments[g];
        // A chunk behind the end of a shorter main is empty, and is counted like the others.
        for (int64_t first = 0; first < size; first += kChunkBytes) {
            const int64_t bytes = std::clamp<int64_t>(source.bytes - first, 0, kChunkBytes);
            ++progress;
            if (is_relay) {
                wait_for(&SlotFlags::filled,
                         {rank_, copy.relayed.slot},
                         progress,
                         kChunkBits,
                         copy.relayed.rank,
                         "fill",
                         task.label);
            }
            for (const Place& place : copy.destinations) {
                std::memcpy(address(segment, place) + first, source.memory + first, bytes);
                publish(&SlotFlags::filled, place, progress);
            }
        }
    }
}

void Exchange::sum_up(const PullTask& task, uint64_t generation) {
    for (const SumTask& sum : task.sums) {
        for (const Place& place : sum.replicas) {
            wait_for(&SlotFlags::grad_ready,
                     place,
                     generation,
                     0,
                     place.rank,
                     "offer the gradient of",
                     task.label);
        }
        add(task, sum);
        for (const Place& place : sum.replicas) {
            publish(&SlotFlags::grad_taken, place, generation);
        }
    }
}

void Exchange::wait_until_taken(const PullTask& task, uint64_t generation) {
    // The caller adds to its slot gradients next, so they must have been read, and be zero.
    for (const Place& slot : task.computed) {
        wait_for(&SlotFlags::grad_taken,
                 {rank_, slot.slot},
                 generation,
                 0,
                 slot.rank,
                 "take the gradient of",
                 task.label);
    }
}

void Exchange::add(const PullTask& task, const SumTask& sum) {
    std::vector<std::byte*> sources(sum.replicas.size());
    for (size_t g = 0; g < task.segments.size(); ++g) {
        const int64_t segment = task.segments[g];
        for (size_t i = 0; i < sources.size(); ++i) sources[i] = address(segment, sum.replicas[i]);
        const int64_t bytes = segments_[segment].slot_bytes;
        const Total& total = sum.totals[g];
        switch (task.types[g]) {
            case GradType::kFloat32:
                add_all<float, float, float>(total, sources, bytes);
                break;
            case GradType::kFloat64:
                add_all<double, double, double>(total, sources, bytes);
                break;
            case GradType::kBFloat16:
                if (total.type == GradType::kBFloat16) {
                    add_all<float, BFloat16, BFloat16>(total, sources, bytes);
                } else {
                    add_all<float, BFloat16, float>(total, sources, bytes);
                }
                break;
        }
    }
}

void Exchange::set_table(std::vector<std::byte*> by_rank, RowTable table) {
    tables_ = std::move(by_rank);
    table_ = table;
}

void Exchange::gather(const int64_t* row,
                      int64_t num_words,
                      int64_t* rows,
                      const std::string& label) {
    const uint64_t generation = ++row_generation_;
    for (std::byte* const there : tables_) {
        std::copy_n(row, num_words, table_.row(there, generation, rank_));
        delay();
        std::atomic_ref(*table_.flag(there, generation, rank_))
            .store(generation, std::memory_order_release);
    }
    std::byte* const here = tables_[rank_];
    for (int64_t peer = 0; peer < table_.num_ranks; ++peer) {
        wait_until(*table_.flag(here, generation, peer),
                   0,
                   {rank_, peer, "send", -1, generation, 0, timeout_s_, label},
                   false);
        std::copy_n(table_.row(here, generation, peer), num_words, rows + peer * num_words);
    }
}

uint64_t Exchange::abort() {
    cancelled_.store(true, std::memory_order_relaxed);
    under_way_ = UnderWay::kNothing;
    try {
        worker_->join();
    } catch (const std::exception&) {
        // The step has failed already: what its copies say about it is no news.
    }
    return std::max({push_generation_, pull_generation_, row_generation_});
}

void Exchange::restart(uint64_t generation) {
    // Every flag was stored with a generation of some rank, so none is above the highest: nothing
    // that an aborted step left can be taken for what comes now.
    push_generation_ = generation;
    pull_generation_ = generation;
    row_generation_ = generation;
    cancelled_.store(false, std::memory_order_relaxed);
}

std::byte* Exchange::address(int64_t segment, const Place& place) const {
    return segments_[segment].by_rank[place.rank] + place.slot * segments_[segment].slot_bytes;
}

int64_t Exchange::expert_bytes(const std::vector<int64_t>& segments) const {
    int64_t bytes = 0;
    for (const int64_t segment : segments) bytes += segments_[segment].slot_bytes;
    return bytes;
}

void Exchange::publish(FlagOf flag, const Place& place, uint64_t value) {
    delay();
    std::atomic_ref((flags_[place.rank][place.slot].*flag).value)
        .store(value, std::memory_order_release);
}

void Exchange::wait_for(FlagOf flag,
                        const Place& place,
                        uint64_t value,
                        int shift,
                        int64_t peer,
                        const char* deed,
                        const std::string& label) {
    const bool is_push = flag == &SlotFlags::freed || flag == &SlotFlags::filled;
    wait_until((flags_[place.rank][place.slot].*flag).value,
               shift,
               {rank_, peer, deed, place.slot, value, 0, timeout_s_, label},
               is_push);
}

void Exchange::wait_until(uint64_t& flag, int shift, FailedWait wait, bool is_push) {
    delay();
    const std::atomic_ref word(flag);
    const uint64_t value = wait.expected;
    const auto fail = [&](uint64_t seen, const std::string& why = "") {
        wait.expected >>= shift;
        wait.seen = seen >> shift;
        throw std::runtime_error(message_of(wait) + why);
    };
    LivedTime waited{};
    uint64_t next_look_ns = kLookNs;
    for (int tries = 0;; ++tries) {
        const uint64_t seen = word.load(std::memory_order_acquire);
        if (seen >> shift > value >> shift) fail(seen);
        if (seen >= value) return;
        if (tries < kSpins) {
            relax();
            continue;
        }
        if (cancelled_.load(std::memory_order_relaxed)) {
            throw std::runtime_error("rank " + std::to_string(rank_) + " gave up waiting: reset" +
                                     behind_label(wait.label));
        }
        if (is_push) check_same_push(wait.peer, value >> shift, wait.label);
        const uint64_t now = now_ns();
        if (tries == kSpins) waited.last_look_ns = now;
        if (static_cast<double>(waited.at(now)) >= 1e9 * timeout_s_) fail(seen);
        if (waited.passed_ns >= next_look_ns) {
            next_look_ns += kLookNs;
            heed();
            // What the peer has stored before its end is seen by now.
            if (has_ended(wait.peer) && word.load(std::memory_order_acquire) == seen) {
                wait.timeout_s = static_cast<double>(waited.passed_ns) / 1e9;
                fail(seen, ": the process of rank " + std::to_string(wait.peer) + " has ended");
            }
        }
        if (waited.passed_ns < kYieldNs) {
            sched_yield();
        } else {
            std::this_thread::sleep_for(kNap);
        }
    }
}

void Exchange::check_same_push(int64_t peer, uint64_t generation, const std::string& label) const {
    Flag& theirs = flags_[peer][0].freed;
    const std::atomic_ref word(theirs.value);
    if (word.load(std::memory_order_acquire) != generation) return;
    const uint64_t seal =
        std::atomic_ref(theirs.seals[generation % 2]).load(std::memory_order_acquire);
    // A peer that is two generations on has stored another seal there, behind the generation
    // between.
    if (word.load(std::memory_order_acquire) != generation) return;
    const uint64_t mine = flags_[rank_][0].freed.seals[generation % 2];
    if (seal == mine) return;
    throw std::runtime_error(
        "rank " + std::to_string(rank_) + " and rank " + std::to_string(peer) +
        " were given different replicas to push (generation " + std::to_string(generation) +
        "); planning must be the same integer arithmetic on the same load" + behind_label(label));
}

bool Exchange::has_ended(int64_t rank) const {
    if (processes_.empty() || processes_[rank] < 0) return false;
    pollfd process{processes_[rank], POLLIN, 0};
    return poll(&process, 1, 0) == 1;
}

void Exchange::heed() {
    if (heed_ == nullptr || is_worker) return;
    try {
        heed_();
    } catch (...) {
        abort();  // Else the worker would wait on.
        throw;
    }
}

void Exchange::delay() {
    if (max_delay_us_ == 0) return;
    thread_local std::minstd_rand random(static_cast<unsigned>(rank_ + 1));
    if (random() % 4 == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(random() % max_delay_us_));
    }
}

Worker::~Worker() {
    if (!thread_.joinable()) return;
    {
        const std::lock_guard lock(mutex_);
        ending_ = true;
    }
    changed_.notify_all();
    thread_.join();
}

void Worker::start(std::function<void()> job) {
    // First: it throws where no thread can be had, and then there must be no job to wait for.
    if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
    {
        const std::lock_guard lock(mutex_);
        job_ = std::move(job);
    }
    changed_.notify_all();
}

void Worker::join(const std::function<void()>& look) {
    std::unique_lock lock(mutex_);
    while (!changed_.wait_for(lock, std::chrono::nanoseconds(kLookNs), [this] { return !job_; })) {
        lock.unlock();
        look();
        lock.lock();
    }
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void Worker::work() {
    is_worker = true;
    std::unique_lock lock(mutex_);
    while (true) {
        changed_.wait(lock, [this] { return job_ || ending_; });
        if (!job_) return;
        // Not under the lock: until the job is empty again, others only look whether it is.
        lock.unlock();
        std::exception_ptr failure;
        try {
            job_();
        } catch (...) {
            failure = std::current_exception();
        }
        lock.lock();
        failure_ = failure;
        job_ = nullptr;
        changed_.notify_all();
    }
}

}  // namespace megatron_ext
