// Ranks as threads over one Exchange each, in ordinary memory; built with a thread sanitizer by
// test_exchange_threads.py, which then sees every access that a flag does not order.
// Exits with 1 and a line on stderr when something else than the right value arrives.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "megatron_ext/exchange.h"

using namespace megatron_ext;

namespace {

constexpr int64_t kRanks = 4;
constexpr int64_t kMains = 2;
constexpr int64_t kSlots = 2;
// The first segment is two chunks.
constexpr int64_t kSizes[] = {kChunkBytes / 4 + 5, 7};

void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "broken: %s\n", what);
    std::exit(1);
}

struct Transfer {
    int64_t home, main, replica, slot;
};

// Different for every expert and round, and exact as a float.
float value_of(int64_t home, int64_t main, int round) {
    return static_cast<float>(1000 * round + 10 * home + main);
}
float gradient_of(int64_t rank, int64_t slot, int round) {
    return static_cast<float>(round % 50 + 5 * rank + slot);
}

std::vector<Transfer> pick_transfers(std::mt19937_64& random) {
    std::vector<Transfer> transfers;
    for (int64_t rank = 0; rank < kRanks; ++rank) {
        std::vector<int64_t> foreign;
        for (int64_t e = 0; e < kRanks * kMains; ++e) {
            if (e / kMains != rank) foreign.push_back(e);
        }
        std::shuffle(foreign.begin(), foreign.end(), random);
        const int64_t count = static_cast<int64_t>(random() % (kSlots + 1));
        for (int64_t s = 0; s < count; ++s) {
            transfers.push_back({foreign[s] / kMains, foreign[s] % kMains, rank, s});
        }
    }
    return transfers;
}

// What all ranks share.
struct Memory {
    std::vector<std::vector<SlotFlags>> flags;
    std::vector<std::vector<float>> slots[2];
    std::vector<std::vector<float>> grads[2];
    const RowTable table{kRanks, 5};
    std::vector<std::vector<Flag>> tables;  // enough memory, aligned
    Memory()
        : flags(kRanks, std::vector<SlotFlags>(kSlots)),
          tables(kRanks, std::vector<Flag>(table.bytes() / sizeof(Flag) + 1)) {
        for (int g = 0; g < 2; ++g) {
            slots[g].assign(kRanks, std::vector<float>(kSlots * kSizes[g]));
            grads[g].assign(kRanks, std::vector<float>(kSlots * kSizes[g]));
        }
    }
};

class Rank {
  public:
    Rank(int64_t rank, Memory& memory) : rank_(rank), memory_(memory), exchange_(rank, 60.0, 100) {
        std::vector<SlotFlags*> flags;
        for (auto& each : memory.flags) flags.push_back(each.data());
        exchange_.set_flags(std::move(flags));
        for (int g = 0; g < 2; ++g) slot_ids_.push_back(add(memory.slots[g], kSizes[g]));
        for (int g = 0; g < 2; ++g) grad_ids_.push_back(add(memory.grads[g], kSizes[g]));
        std::vector<std::byte*> tables;
        for (auto& each : memory.tables) tables.push_back(reinterpret_cast<std::byte*>(each.data()));
        exchange_.set_table(std::move(tables), memory.table);
    }

    void run(int rounds, unsigned seed) {
        std::mt19937_64 random(seed);  // the same choices on all ranks
        for (int round = 0; round < rounds; ++round) {
            const auto transfers = pick_transfers(random);
            const bool is_relayed = random() % 2;
            const bool is_reset = random() % 16 == 0;
            push(transfers, is_relayed, round);
            gather(static_cast<int64_t>(1 + random() % 5), round);
            pull(transfers, round);
            if (is_reset) {
                // All generations are equal here, so the highest is one's own. Nobody waits for the
                // others here, so the next rows go into the table that this one's do not lie in.
                exchange_.restart(exchange_.abort() + 2);
            }
        }
    }

  private:
    int64_t add(std::vector<std::vector<float>>& by_rank, int64_t size) {
        std::vector<std::byte*> bases;
        for (auto& each : by_rank) bases.push_back(reinterpret_cast<std::byte*>(each.data()));
        return exchange_.add_segment(std::move(bases), size * static_cast<int64_t>(sizeof(float)));
    }

    void gather(int64_t num_words, int round) {
        std::vector<int64_t> row(num_words, 100 * round + rank_), rows(kRanks * num_words);
        exchange_.gather(row.data(), num_words, rows.data(), "a round");
        for (int64_t i = 0; i < kRanks * num_words; ++i) {
            require(rows[i] == 100 * round + i / num_words, "rows are those of all ranks");
        }
    }

    static MainSegment segment_of(const std::vector<float>& values) {
        return {reinterpret_cast<const std::byte*>(values.data()),
                static_cast<int64_t>(values.size() * sizeof(float))};
    }

    void push(const std::vector<Transfer>& transfers, bool is_relayed, int round) {
        // The mains change from push to push, which is right as the last one has ended.
        for (int64_t m = 0; m < kMains; ++m) {
            for (int g = 0; g < 2; ++g) mains_[m][g].assign(kSizes[g], value_of(rank_, m, round));
        }
        PushTask task{slot_ids_, {}, kSlots, {}, "a round"};
        std::vector<CopyTask> onward;
        for (int64_t e = 0; e < kRanks * kMains; ++e) {
            const int64_t home = e / kMains;
            std::vector<Place> to;
            for (const Transfer& t : transfers) {
                if (t.home * kMains + t.main == e) to.push_back({t.replica, t.slot});
            }
            if (to.empty()) continue;
            // The first destination passes on to all others, or nobody does.
            const size_t direct = is_relayed ? 1 : to.size();
            const std::vector<Place> rest(to.begin() + static_cast<int64_t>(direct), to.end());
            const Place relay = to.front();
            to.resize(direct);
            if (home == rank_) {
                const auto& main = mains_[e % kMains];
                task.copies.push_back({{segment_of(main[0]), segment_of(main[1])}, {}, to});
            }
            if (!rest.empty() && relay.rank == rank_) {
                onward.push_back({{}, {home, relay.slot}, rest});
            }
            for (const Place& place : to) {
                if (place.rank == rank_) task.expected.push_back({home, place.slot});
            }
            for (const Place& place : rest) {
                if (place.rank == rank_) task.expected.push_back({relay.rank, place.slot});
            }
        }
        task.copies.insert(task.copies.end(), onward.begin(), onward.end());
        exchange_.finish_push(exchange_.start_push(std::move(task)));
        for (const Transfer& t : transfers) {
            if (t.replica != rank_) continue;
            for (int g = 0; g < 2; ++g) {
                const float* slot = memory_.slots[g][rank_].data() + t.slot * kSizes[g];
                const float expected = value_of(t.home, t.main, round);
                require(std::all_of(slot, slot + kSizes[g], [&](float v) { return v == expected; }),
                        "a slot holds its expert");
            }
        }
    }

    void pull(const std::vector<Transfer>& transfers, int round) {
        PullTask task{grad_ids_, {GradType::kFloat32, GradType::kFloat32}, {}, {}, "a round"};
        for (const Transfer& t : transfers) {
            if (t.replica != rank_) continue;
            task.computed.push_back({t.home, t.slot});
            for (int g = 0; g < 2; ++g) {
                std::fill_n(memory_.grads[g][rank_].data() + t.slot * kSizes[g],
                            kSizes[g],
                            gradient_of(rank_, t.slot, round));
            }
        }
        std::vector<float> totals[kMains][2], asides[kMains];
        float expected[kMains] = {};
        for (int64_t m = 0; m < kMains; ++m) {
            SumTask sum;
            for (const Transfer& t : transfers) {
                if (t.home != rank_ || t.main != m) continue;
                sum.replicas.push_back({t.replica, t.slot});
                expected[m] += gradient_of(t.replica, t.slot, round);
            }
            if (sum.replicas.empty()) continue;
            for (int g = 0; g < 2; ++g) {
                totals[m][g].assign(kSizes[g], 1000.0f);
                // Of the first segment, something was set aside.
                if (g == 0) asides[m].assign(kSizes[g], 500.0f);
                sum.totals.push_back({totals[m][g].data(),
                                      g == 0 ? asides[m].data() : nullptr,
                                      GradType::kFloat32});
            }
            task.sums.push_back(std::move(sum));
        }
        exchange_.finish_pull(exchange_.start_pull(std::move(task)));
        for (int64_t m = 0; m < kMains; ++m) {
            for (int g = 0; g < 2; ++g) {
                const float value = expected[m] + (g == 0 ? 1500.0f : 1000.0f);
                require(std::all_of(totals[m][g].begin(),
                                    totals[m][g].end(),
                                    [&](float v) { return v == value; }),
                        "a total has the gradients of its replicas");
            }
        }
        for (const Transfer& t : transfers) {
            if (t.replica != rank_) continue;
            for (int g = 0; g < 2; ++g) {
                const float* slot = memory_.grads[g][rank_].data() + t.slot * kSizes[g];
                require(std::all_of(slot, slot + kSizes[g], [](float v) { return v == 0; }),
                        "the gradient of a replica is zero again");
            }
        }
    }

    const int64_t rank_;
    Memory& memory_;
    std::vector<float> mains_[kMains][2];
    std::vector<int64_t> slot_ids_, grad_ids_;
    Exchange exchange_;  // goes first: its thread uses what is above
};

// A peer that never calls: the wait ends with an error, and so does what is under way at the end.
void wait_for_nobody() {
    Memory memory;
    Exchange exchange(0, 0.05, 0);
    std::vector<SlotFlags*> flags;
    for (auto& each : memory.flags) flags.push_back(each.data());
    exchange.set_flags(std::move(flags));
    for (int i = 0; i < 2; ++i) {
        bool has_failed = false;
        const uint64_t generation = exchange.start_push({{}, {}, kSlots, {{1, 0}}, "nothing"});
        try {
            exchange.finish_push(generation);
        } catch (const std::runtime_error&) {
            has_failed = true;
        }
        require(i == 1 || has_failed, "a silent peer is an error");
        exchange.restart(exchange.abort());
    }
    exchange.start_push({{}, {}, kSlots, {{1, 0}}, "nothing"});
}

}  // namespace

int main(int, char** arguments) {
    const int rounds = std::atoi(arguments[1]);
    Memory memory;
    std::vector<std::unique_ptr<Rank>> ranks;
    for (int64_t r = 0; r < kRanks; ++r) ranks.push_back(std::make_unique<Rank>(r, memory));
    std::vector<std::thread> threads;
    for (auto& rank : ranks) threads.emplace_back([&rank, rounds] { rank->run(rounds, 3); });
    for (auto& thread : threads) thread.join();
    wait_for_nobody();
    std::printf("%d rounds\n", rounds);
}
