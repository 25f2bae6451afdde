// Runs the kernels that move replicas on the host (cuda_on_host/), with ranks as pairs of streams:
// random transfers, several generations back to back, against the mains' bytes and sums made
// directly. Built by test_kernels_on_host.py; exits with 1 and a line on stderr at a difference.
//
// Every rank has one stream for its pushes and one for its pulls, and nothing but the flags orders
// ranks. What a rank may overwrite, it overwrites with NaN at once.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "megatron_ext/cuda_api.h"
#include "megatron_ext/peer_exchange.h"

using namespace megatron_ext;

namespace {

std::mt19937_64 random_numbers(7);

void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "broken: %s\n", what);
    std::exit(1);
}

int64_t pick(int64_t low, int64_t high) {
    const auto choices = static_cast<uint64_t>(high - low) + 1;
    return low + static_cast<int64_t>(random_numbers() % choices);
}

template <class T>
T one_of(std::initializer_list<T> choices) {
    return *(choices.begin() + pick(0, static_cast<int64_t>(choices.size()) - 1));
}

constexpr char kGarbage = '\xff';  // NaN, in float32 and bfloat16

// Aligned to 16, as device memory is, and garbage.
class Memory {
  public:
    explicit Memory(int64_t bytes) : vectors_(bytes / 16 + 1) { fill(kGarbage); }
    char* data() { return reinterpret_cast<char*>(vectors_.data()); }
    void fill(char byte) { std::memset(data(), byte, vectors_.size() * 16); }

  private:
    struct alignas(16) Vector {
        char bytes[16];
    };
    std::vector<Vector> vectors_;
};

// A replica: main `main` of rank `home` in slot `slot` of rank `rank`.
struct Transfer {
    int64_t home, main, rank, slot;
};

struct Sizes {
    int64_t ranks, mains, slots;
    std::vector<int64_t> weights;  // bytes of each segment of an expert
    std::vector<int64_t> grads;    // elements
    bool is_bfloat16;
    int64_t relay_threshold;
    int64_t domain = ranks;   // ranks that have each other's memory, and no other's
    bool is_narrow = false;   // totals are bfloat16, as the gradients are
    bool has_asides = false;  // something was set aside for the totals of even segments
};

// A plan as transports give it to one rank.
struct Lists {
    std::vector<int32_t> slots;
};

// All ranks' memory, and their calls.
class Group {
  public:
    explicit Group(Sizes sizes)
        : sizes_(std::move(sizes)),
          states_(sizes_.ranks),
          failures_(sizes_.ranks),
          aborted_(sizes_.ranks) {
        for (const int64_t bytes : sizes_.weights) add_segment(weights_, bytes);
        for (const int64_t count : sizes_.grads) {
            add_segment(grads_, count * (sizes_.is_bfloat16 ? 2 : 4));
        }
        for (int64_t i = 0; i < sizes_.ranks * sizes_.mains; ++i) {
            for (const int64_t bytes : sizes_.weights) mains_.emplace_back(bytes);
            for (const int64_t count : sizes_.grads) {
                totals_.emplace_back(total_bytes() * count);
                asides_.emplace_back(total_bytes() * count);
            }
        }
        rows_.resize(sizes_.ranks);
        gathered_.resize(sizes_.ranks);
        for (int64_t rank = 0; rank < sizes_.ranks; ++rank) {
            tables_.emplace_back(row_table_.bytes());
            tables_.back().fill(0);
            table_addresses_.push_back(tables_.back().data());
            copies_.emplace_back(PeerCopies::bytes(sizes_.ranks, sizes_.slots));
            sums_.emplace_back(PeerSums::bytes(problem_of(rank)));
            addresses_.emplace_back();
            total_addresses_.emplace_back();
            aside_addresses_.emplace_back();
            for (int64_t e = rank * sizes_.mains; e < (rank + 1) * sizes_.mains; ++e) {
                for (size_t g = 0; g < sizes_.grads.size(); ++g) {
                    total_addresses_[rank].push_back(total(e, g).data());
                    aside_addresses_[rank].push_back(has_aside(g) ? aside(e, g).data() : nullptr);
                }
            }
            for (int64_t i = 0; i < sizes_.mains * num_segments(); ++i) {
                addresses_[rank].push_back(main(rank * sizes_.mains, i).data());
            }
        }
    }

    const Sizes& sizes() const { return sizes_; }
    const PeerFailure& failure(int64_t rank) const { return failures_[rank]; }
    const PeerState& state(int64_t rank) const { return states_[rank]; }

    std::vector<Transfer> random_transfers() const {
        std::vector<Transfer> transfers;
        for (int64_t rank = 0; rank < sizes_.ranks; ++rank) {
            std::vector<int64_t> experts;
            for (int64_t e = 0; e < sizes_.ranks * sizes_.mains; ++e) {
                const int64_t home = e / sizes_.mains;
                if (home != rank && domain_of(home) == domain_of(rank)) experts.push_back(e);
            }
            std::shuffle(experts.begin(), experts.end(), random_numbers);
            // Some ranks' experts are hot.
            if (pick(0, 1) == 1) std::sort(experts.begin(), experts.end());
            const int64_t used =
                std::min<int64_t>(pick(0, sizes_.slots), static_cast<int64_t>(experts.size()));
            for (int64_t slot = 0; slot < used; ++slot) {
                transfers.push_back(
                    {experts[slot] / sizes_.mains, experts[slot] % sizes_.mains, rank, slot});
            }
        }
        std::shuffle(transfers.begin(), transfers.end(), random_numbers);
        return transfers;
    }

    // One for each rank.
    std::vector<std::shared_ptr<Lists>> compile(const std::vector<Transfer>& transfers) {
        std::vector<std::shared_ptr<Lists>> all;
        for (int64_t rank = 0; rank < sizes_.ranks; ++rank) {
            all.push_back(std::make_shared<Lists>());
            all.back()->slots = slots_of(transfers);
        }
        return all;
    }

    // Push, wait, look, and leave nothing of it. `round` makes this call's bytes.
    void push(int64_t rank, const std::vector<Transfer>& transfers, Lists* lists, int round) {
        const auto stream = stream_of(rank, 0);
        const PeerRank self = self_of(rank);
        run(stream, [=, this] { write_mains(rank, round); });
        const PeerCopies copies = PeerCopies::in(copies_[rank].data(), sizes_.ranks, sizes_.slots);
        PeerPush task{segments_of(rank, weights_),
                      problem_of(rank),
                      lists->slots.data(),
                      copies,
                      addresses_[rank].data()};
        for (int64_t g = 0; g < num_segments(); ++g)
            task.segments.each[g].used_bytes = used(g, round);
        push_peers_cuda(self, task, static_cast<int>(pick(1, most_blocks)), stream);
        wait_peers_cuda(self, task.segments, copies.used, sizes_.slots, stream);
        // From here on the rank may change its mains.
        run(stream, [=, this] {
            for (const Transfer& each : transfers) {
                if (each.home == rank) {
                    for (int64_t g = 0; g < num_segments(); ++g) {
                        main(each.home * sizes_.mains + each.main, g).fill(kGarbage);
                    }
                }
                if (each.rank == rank) check_slot(each, round);
            }
        });
    }

    // Write gradients, pull, look, and leave nothing of it.
    void pull(int64_t rank, const std::vector<Transfer>& transfers, Lists* lists, int round) {
        const auto stream = stream_of(rank, 1);
        run(stream, [=, this] {
            for (const Transfer& each : transfers) {
                if (each.rank == rank) write_grads(each, round);
            }
            write_totals(rank, round);
        });
        PeerPull task{segments_of(rank, grads_),
                      {},
                      {},
                      problem_of(rank),
                      lists->slots.data(),
                      PeerSums::in(sums_[rank].data(), problem_of(rank)),
                      total_addresses_[rank].data(),
                      aside_addresses_[rank].data()};
        std::fill(task.is_bfloat16, task.is_bfloat16 + kMaxPeerSegments, sizes_.is_bfloat16);
        std::fill(
            task.is_total_bfloat16, task.is_total_bfloat16 + kMaxPeerSegments, sizes_.is_narrow);
        pull_add_peers_cuda(self_of(rank), task, static_cast<int>(pick(1, 3)), stream);
        run(stream, [=, this] {
            for (const Transfer& each : transfers) {
                if (each.rank == rank) check_zero(each);
            }
            if (transfers.empty()) return;
            for (int64_t m = 0; m < sizes_.mains; ++m) check_total(rank, m, transfers, round);
        });
    }

    // Gather rows, look, and leave nothing of the row given.
    void gather(int64_t rank, int64_t num_words, int round) {
        const auto stream = stream_of(rank, 0);
        run(stream, [=, this] {
            std::vector<int64_t>& row = rows_[rank];
            row.assign(num_words, 0);
            for (int64_t i = 0; i < num_words; ++i) row[i] = word(rank, round, i);
            gathered_[rank].assign(sizes_.ranks * num_words, -1);
        });
        // Lists are made when the launch is, and rows then: their places must be known by now.
        rows_[rank].reserve(kMostWords);
        gathered_[rank].reserve(kMostWords * sizes_.ranks);
        gather_rows_cuda(self_of(rank),
                         {row_table_,
                          table_addresses_.data(),
                          rows_[rank].data(),
                          num_words,
                          gathered_[rank].data()},
                         stream);
        run(stream, [=, this] {
            bool equal = true;
            for (int64_t i = 0; i < sizes_.ranks * num_words; ++i) {
                const int64_t expected = word(i / num_words, round, i % num_words);
                equal = equal && gathered_[rank][i] == expected;
            }
            require(equal || failures_[rank].is_set != 0, "rows are those of all ranks");
            std::fill(rows_[rank].begin(), rows_[rank].end(), -1);
        });
    }

    // The host gives up, at some time while streams run.
    void abort(int64_t rank) {
        run(reinterpret_cast<cudaStream_t>(1 + 2 * sizes_.ranks + rank),
            [=, this] { aborted_[rank] = 1; });
    }

    int64_t timeout_ns = int64_t{1} << 40;
    int64_t most_blocks = 4;  // of a push

  private:
    // A segment's buffers of all ranks, with their flags at 0.
    struct Shared {
        PeerSegment segment;
        std::vector<char*> addresses;
        std::vector<std::vector<char*>> seen_by;  // the same as each rank has them
        std::vector<Memory> buffers;
    };

    static cudaStream_t stream_of(int64_t rank, int64_t kind) {
        return reinterpret_cast<cudaStream_t>(1 + 2 * rank + kind);
    }

    template <class Deed>
    static void run(cudaStream_t stream, Deed deed) {
        cuda_on_host::launch(1, 1, 0, stream, deed);
    }

    void add_segment(std::vector<Shared>& to, int64_t slot_bytes) {
        Shared added{{nullptr, sizes_.slots, slot_bytes, slot_bytes}, {}, {}, {}};
        for (int64_t rank = 0; rank < sizes_.ranks; ++rank) {
            added.buffers.emplace_back(added.segment.bytes());
            char* const buffer = added.buffers.back().data();
            const int64_t flags = added.segment.flags_offset();
            std::memset(buffer + flags, 0, added.segment.bytes() - flags);
            added.addresses.push_back(buffer);
        }
        for (int64_t rank = 0; rank < sizes_.ranks; ++rank) {
            added.seen_by.push_back(added.addresses);
            for (int64_t other = 0; other < sizes_.ranks; ++other) {
                if (domain_of(other) != domain_of(rank)) added.seen_by[rank][other] = nullptr;
            }
        }
        to.push_back(std::move(added));
        to.back().segment.buffers = to.back().addresses.data();
    }

    static int64_t word(int64_t rank, int round, int64_t i) {
        return 1 + rank * 100'000 + round * 1'000 + i;
    }

    int64_t domain_of(int64_t rank) const { return rank / sizes_.domain; }

    static PeerSegments segments_of(int64_t rank, const std::vector<Shared>& shared) {
        PeerSegments segments{{}, static_cast<int32_t>(shared.size())};
        for (size_t g = 0; g < shared.size(); ++g) {
            segments.each[g] = shared[g].segment;
            segments.each[g].buffers = shared[g].seen_by[rank].data();
        }
        return segments;
    }

    PeerRank self_of(int64_t rank) {
        return {rank, timeout_ns, 40 + rank, &states_[rank], &failures_[rank], &aborted_[rank]};
    }

    CopyProblem problem_of(int64_t rank) const {
        return {rank,
                domain_of(rank) * sizes_.domain,
                sizes_.domain,
                sizes_.ranks,
                sizes_.slots,
                sizes_.mains,
                sizes_.relay_threshold};
    }

    int64_t total_bytes() const { return sizes_.is_narrow ? 2 : 4; }
    bool has_aside(size_t g) const { return sizes_.has_asides && g % 2 == 0; }

    std::vector<int32_t> slots_of(const std::vector<Transfer>& transfers) const {
        std::vector<int32_t> slots(sizes_.ranks * sizes_.slots, -1);
        for (const Transfer& each : transfers) {
            slots[each.rank * sizes_.slots + each.slot] =
                static_cast<int32_t>(each.home * sizes_.mains + each.main);
        }
        return slots;
    }

    // Bytes that a push of this round fills of a slot, from its start.
    int64_t used(int64_t g, int round) const {
        return round % 3 == 1 ? (sizes_.weights[g] + 1) / 2 : sizes_.weights[g];
    }

    int64_t num_segments() const { return static_cast<int64_t>(sizes_.weights.size()); }
    Memory& main(int64_t expert, int64_t g) { return mains_[expert * num_segments() + g]; }
    Memory& total(int64_t expert, int64_t g) { return totals_[expert * sizes_.grads.size() + g]; }
    Memory& aside(int64_t expert, int64_t g) { return asides_[expert * sizes_.grads.size() + g]; }
    static char* slot(const Shared& shared, const Transfer& at) {
        return shared.segment.slot(at.rank, at.slot);
    }

    static char weight(int64_t expert, int64_t g, int round, int64_t i) {
        return static_cast<char>(expert * 31 + g * 7 + round * 13 + i * 5 + i / 4096 * 3);
    }

    void write_mains(int64_t rank, int round) {
        for (int64_t e = rank * sizes_.mains; e < (rank + 1) * sizes_.mains; ++e) {
            for (int64_t g = 0; g < num_segments(); ++g) {
                for (int64_t i = 0; i < sizes_.weights[g]; ++i) {
                    main(e, g).data()[i] = weight(e, g, round, i);
                }
            }
        }
    }

    void check_slot(const Transfer& at, int round) {
        for (int64_t g = 0; g < num_segments(); ++g) {
            char* const bytes = slot(weights_[g], at);
            bool equal = true;
            for (int64_t i = 0; i < used(g, round); ++i) {
                equal = equal && bytes[i] == weight(at.home * sizes_.mains + at.main, g, round, i);
            }
            require(equal, "a slot has the bytes of its main");
            std::memset(bytes, kGarbage, sizes_.weights[g]);
        }
    }

    // Eight bits, as bfloat16 holds, of so different size that the order of additions shows.
    static float grad(const Transfer& at, int64_t g, int round, int64_t i) {
        const auto mixed = static_cast<uint32_t>(
            (at.rank * 3 + at.slot * 5 + g * 11 + round * 17 + i) * 2654435761u);
        return static_cast<float>(static_cast<int>(mixed >> 24) - 128) *
               static_cast<float>(1 << mixed / 64 % 24);
    }

    // What a total, or what was set aside for it, is before.
    static float before(int64_t expert, int64_t g, int round, int64_t i) {
        return grad({0, 0, expert, 50}, g, round, i);
    }

    // As float32, or bfloat16 to nearest, ties to even.
    static void write(char* to, int64_t i, float value, bool is_narrow) {
        if (!is_narrow) {
            std::memcpy(to + 4 * i, &value, 4);
            return;
        }
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        const uint32_t low = bits & 0xffff, high = bits >> 16;
        const auto rounded = static_cast<uint16_t>(
            low > 0x8000 || (low == 0x8000 && high % 2 == 1) ? high + 1 : high);
        std::memcpy(to + 2 * i, &rounded, 2);
    }

    void write_grads(const Transfer& at, int round) {
        for (size_t g = 0; g < sizes_.grads.size(); ++g) {
            for (int64_t i = 0; i < sizes_.grads[g]; ++i) {
                write(slot(grads_[g], at), i, grad(at, g, round, i), sizes_.is_bfloat16);
            }
        }
    }

    void write_totals(int64_t rank, int round) {
        for (int64_t e = rank * sizes_.mains; e < (rank + 1) * sizes_.mains; ++e) {
            for (size_t g = 0; g < sizes_.grads.size(); ++g) {
                for (int64_t i = 0; i < sizes_.grads[g]; ++i) {
                    write(total(e, g).data(), i, before(e, g, round, i), sizes_.is_narrow);
                    write(aside(e, g).data(), i, before(e, g, round + 1, i), sizes_.is_narrow);
                }
            }
        }
    }

    void check_zero(const Transfer& at) {
        for (const Shared& each : grads_) {
            char* const bytes = slot(each, at);
            const int64_t count = each.segment.slot_bytes;
            require(std::all_of(bytes, bytes + count, [](char byte) { return byte == 0; }),
                    "the gradient of a replica is zero again");
            std::memset(bytes, kGarbage, count);
        }
    }

    void check_total(int64_t rank, int64_t m, const std::vector<Transfer>& transfers, int round) {
        const int64_t e = rank * sizes_.mains + m;
        std::vector<Transfer> replicas;
        for (const Transfer& each : transfers) {
            if (each.home == rank && each.main == m) replicas.push_back(each);
        }
        std::sort(replicas.begin(), replicas.end(), [](const Transfer& a, const Transfer& b) {
            return a.rank < b.rank;
        });
        for (size_t g = 0; g < sizes_.grads.size(); ++g) {
            Memory expected(total_bytes() * sizes_.grads[g]);
            for (int64_t i = 0; i < sizes_.grads[g]; ++i) {
                float value = before(e, g, round, i);
                if (!replicas.empty()) {
                    float sum = grad(replicas[0], g, round, i);
                    for (size_t r = 1; r < replicas.size(); ++r) {
                        sum += grad(replicas[r], g, round, i);
                    }
                    if (has_aside(g)) sum += before(e, g, round + 1, i);
                    value += sum;
                }
                write(expected.data(), i, value, sizes_.is_narrow);
            }
            require(std::memcmp(
                        total(e, g).data(), expected.data(), total_bytes() * sizes_.grads[g]) == 0,
                    "a total has the gradients of its replicas, in the order of their ranks");
            total(e, g).fill(kGarbage);
            aside(e, g).fill(kGarbage);
        }
    }

    static constexpr int64_t kMostWords = 80;

    const Sizes sizes_;
    const RowTable row_table_{sizes_.ranks, kMostWords};
    std::vector<Memory> tables_;  // of each rank
    std::vector<char*> table_addresses_;
    std::vector<std::vector<int64_t>> rows_, gathered_;  // of each rank
    std::vector<Shared> weights_, grads_;                // of each segment
    std::vector<Memory> mains_, totals_, asides_;        // [experts, segments]
    std::vector<Memory> copies_, sums_;                  // each rank's, compiled anew by every call
    // Each rank's mains, [M, segments], and what belongs to them.
    std::vector<std::vector<const char*>> addresses_, aside_addresses_;
    std::vector<std::vector<char*>> total_addresses_;
    std::vector<PeerState> states_;
    std::vector<PeerFailure> failures_;
    std::vector<uint32_t> aborted_;
};

Sizes random_sizes() {
    Sizes sizes{one_of<int64_t>({2, 3, 4, 8}), pick(1, 2), pick(1, 3), {}, {}, false, 0};
    if (sizes.ranks % 2 == 0 && pick(0, 1) == 1) sizes.domain = sizes.ranks / 2;
    sizes.is_bfloat16 = pick(0, 1) == 1;
    sizes.is_narrow = sizes.is_bfloat16 && pick(0, 1) == 1;
    sizes.has_asides = pick(0, 1) == 1;
    sizes.relay_threshold = one_of<int64_t>({0, 2, 1000});
    // Less than a tile, tails, slots that are not aligned, more chunks than one.
    for (int64_t g = pick(1, 2); g > 0; --g) {
        sizes.weights.push_back(
            one_of<int64_t>({16, 48, 100, 8192, 8 * 8192 + 32, kPeerChunkBytes + 7, 270'000}));
        sizes.grads.push_back(one_of<int64_t>({4, 9, 100, 2048, 3 * 4096 + 8, 40'000}));
    }
    return sizes;
}

void move_random_replicas() {
    Group group(random_sizes());
    std::vector<std::vector<std::shared_ptr<Lists>>> kept;
    const int rounds = 4;
    // A gather lets ranks wait for each other, and would hide what only late ranks show.
    const int gathers = pick(0, 1) == 0 ? 0 : 2;
    for (int round = 0; round < rounds; ++round) {
        const int64_t num_words = pick(1, 80);
        const std::vector<Transfer> transfers = group.random_transfers();
        kept.push_back(group.compile(transfers));
        for (int64_t rank = 0; rank < group.sizes().ranks; ++rank) {
            group.push(rank, transfers, kept.back()[rank].get(), round);
            group.pull(rank, transfers, kept.back()[rank].get(), round);
            for (int i = 0; i < gathers; ++i) group.gather(rank, num_words, 2 * round + i);
        }
    }
    cuda_on_host::run_streams();
    for (int64_t rank = 0; rank < group.sizes().ranks; ++rank) {
        require(group.failure(rank).is_set == 0, "no rank waits too long");
        require(group.state(rank).push.generation == rounds, "every push is counted once");
        require(group.state(rank).pull.generation == rounds, "every pull is counted once");
        require(group.state(rank).gathered == gathers * rounds, "rows are counted once");
    }
}

// Pushes of one block: the mains of the first `num_homes` ranks to all others.
void push_to_all(Sizes sizes, int64_t num_homes) {
    Group group(std::move(sizes));
    group.most_blocks = 1;
    std::vector<Transfer> transfers;
    const int64_t mains = group.sizes().mains;
    for (int64_t rank = 0; rank < group.sizes().ranks; ++rank) {
        int64_t slot = 0;
        for (int64_t e = 0; e < num_homes * mains; ++e) {
            if (e / mains != rank) transfers.push_back({e / mains, e % mains, rank, slot++});
        }
    }
    const auto lists = group.compile(transfers);
    for (int round = 0; round < 2; ++round) {
        for (int64_t rank = 0; rank < group.sizes().ranks; ++rank) {
            group.push(rank, transfers, lists[rank].get(), round);
        }
    }
    cuda_on_host::run_streams();
    for (int64_t rank = 0; rank < group.sizes().ranks; ++rank) {
        require(group.failure(rank).is_set == 0, "no rank waits too long");
    }
}

// Of mains with replicas, and of others; more than one launch takes.
void set_aside() {
    std::vector<int32_t> slots(pick(1, 300));
    for (int32_t& expert : slots) expert = static_cast<int32_t>(pick(-1, 200));
    AsideTasks tasks{};
    tasks.count = static_cast<int>(pick(1, 3));
    std::vector<std::vector<uint16_t>> memory;
    for (int i = 0; i < 2 * tasks.count; ++i) {
        memory.emplace_back(one_of<int64_t>({1, 8, 9, 40'000}) + 1, static_cast<uint16_t>(1 + i));
    }
    for (int i = 0; i < tasks.count; ++i) {
        auto& grads = memory[i];
        auto& copies = memory[tasks.count + i];
        copies.assign(grads.size(), 77);
        const auto bytes = static_cast<int64_t>(2 * (grads.size() - 1));
        // Aligned, or not.
        const int64_t first = pick(0, 1);
        tasks.each[i] = {reinterpret_cast<char*>(grads.data() + first),
                         reinterpret_cast<char*>(copies.data() + first),
                         bytes,
                         i == 0 ? slots[0] : pick(0, 200)};
        if (tasks.each[i].expert < 0) tasks.each[i].expert = 200;
    }
    set_aside_cuda(tasks, slots.data(), static_cast<int64_t>(slots.size()), nullptr);
    for (int i = 0; i < tasks.count; ++i) {
        const bool is_there =
            std::find(slots.begin(), slots.end(), tasks.each[i].expert) != slots.end();
        const auto* const grads = reinterpret_cast<uint16_t*>(tasks.each[i].main_grad);
        const auto* const copies = reinterpret_cast<uint16_t*>(tasks.each[i].copy);
        for (int64_t k = 0; k < tasks.each[i].bytes / 2; ++k) {
            require(grads[k] == (is_there ? 0 : 1 + i), "only what has replicas is emptied");
            require(copies[k] == (is_there ? 1 + i : 77), "what is emptied is copied");
        }
        const int at = tasks.count + i;
        const bool is_first = tasks.each[i].main_grad == reinterpret_cast<char*>(memory[i].data());
        require((is_first ? memory[i].back() : memory[i].front()) == 1 + i, "nothing beside it is");
        require((is_first ? memory[at].back() : memory[at].front()) == 77, "nothing beside it is");
    }
}

void write_words() {
    std::vector<int64_t> words(pick(0, 2000)), there(words.size() + 1, -1);
    for (int64_t& word : words) word = pick(0, 1 << 30);
    write_words_cuda(words.data(), static_cast<int64_t>(words.size()), there.data(), nullptr);
    words.push_back(-1);
    require(there == words, "the words are written, and nothing behind them");
}

void require_failure(const PeerFailure& failure, const PeerFailure& expected) {
    require(failure.is_set == 1, "a wait that is too long is recorded");
    require(failure.deed == expected.deed, "what was waited for is recorded");
    require(failure.peer == expected.peer, "who was waited for is recorded");
    require(failure.slot == expected.slot, "the slot is recorded");
    require(failure.expected == expected.expected, "the expected generation is recorded");
    require(failure.seen == expected.seen, "the generation seen is recorded");
    require(failure.label == expected.label, "the call is recorded");
}

// After a good generation one rank of two makes `calls` and the other none.
template <class Calls>
PeerFailure when_the_other_stays_away(int64_t caller, Calls calls) {
    Group group({2, 1, 1, {300'000}, {90'000}, false, 1000});
    group.timeout_ns = 5'000'000;
    const std::vector<Transfer> transfers{{0, 0, 1, 0}};
    const auto lists = group.compile(transfers);
    for (int64_t rank = 0; rank < 2; ++rank) {
        group.push(rank, transfers, lists[rank].get(), 0);
        group.pull(rank, transfers, lists[rank].get(), 0);
    }
    cuda_on_host::run_streams();
    calls(group, lists[caller].get());
    cuda_on_host::run_streams();
    require(group.failure(1 - caller).is_set == 0, "who does not wait has no failure");
    return group.failure(caller);
}

// What a rank does after a failed wait is of no use (no transfers are given: nothing is compared),
// but it must come to its end.
void end_waits_in_time() {
    const auto push = [](int64_t rank) {
        return [rank](Group& group, Lists* lists) { group.push(rank, {}, lists, 1); };
    };
    const auto pull = [](int64_t rank) {
        return [rank](Group& group, Lists* lists) { group.pull(rank, {}, lists, 1); };
    };
    const auto gather = [](Group& group, Lists*) { group.gather(0, 3, 0); };
    require_failure(when_the_other_stays_away(0, gather),
                    {1, -1, 0, 1, 0, 40, PeerDeed::kSendRow, 1});
    require_failure(when_the_other_stays_away(0, push(0)), {1, 0, 0, 2, 1, 40, PeerDeed::kFree, 1});
    require_failure(when_the_other_stays_away(1, push(1)), {0, 0, 0, 2, 1, 41, PeerDeed::kFill, 1});
    require_failure(when_the_other_stays_away(0, pull(0)),
                    {1, 0, 0, 2, 1, 40, PeerDeed::kOfferGrad, 1});
    require_failure(when_the_other_stays_away(1, pull(1)),
                    {0, 0, 0, 2, 1, 41, PeerDeed::kTakeGrad, 1});
    // A peer that makes a call more is no peer to wait for.
    require_failure(when_the_other_stays_away(0,
                                              [&push](Group& group, Lists* lists) {
                                                  Lists nothing;
                                                  nothing.slots = {-1, -1};
                                                  group.push(1, {}, &nothing, 1);
                                                  group.push(1, {}, &nothing, 2);
                                                  cuda_on_host::run_streams();
                                                  push(0)(group, lists);
                                              }),
                    {1, 0, 0, 2, 3, 40, PeerDeed::kFree, 1});
}

// The time limit is days, which nobody polls away: what ends the waits is the host's word.
void end_waits_at_once() {
    Group group({2, 1, 1, {300'000}, {90'000}, false, 1000});
    group.timeout_ns = int64_t{1} << 60;
    const std::vector<Transfer> transfers{{0, 0, 1, 0}};
    const auto lists = group.compile(transfers);
    group.push(0, {}, lists[0].get(), 0);
    group.pull(0, {}, lists[0].get(), 0);
    group.abort(0);
    cuda_on_host::run_streams();
    require(group.state(0).failed == 1, "later waits of the rank end at once");
    require(group.failure(0).is_set == 0, "giving up is no failure of a peer");
}

}  // namespace

int main(int, char** arguments) {
    const int rounds = std::atoi(arguments[1]);
    for (int i = 0; i < 5; ++i) {
        // Each rank passes on what the one before it sends, in a circle.
        push_to_all({4, 1, 3, {100}, {}, false, 0}, 4);
        // Chunks without a tile, as an expert's scale is one: who loads has nothing to do.
        push_to_all({2, 8, 8, {4, 4, 100, 4}, {}, false, 1000}, 2);
        // Short copies of as many tiles as are under way: many last tiles in front of others.
        push_to_all({2, 8, 8, {8 * 8192}, {}, false, 1000}, 2);
        write_words();
    }
    const int first_rounds = std::min(rounds, 20);
    for (int i = 0; i < first_rounds; ++i) move_random_replicas();
    // More destinations than a warp has lanes. Dear: most kernels that are wrong fail before.
    for (int i = 0; i < 5; ++i)
        push_to_all({40, 2, 2, {100, 48, 16, 8192 + 4}, {}, false, 1000}, 1);
    for (int i = first_rounds; i < rounds; ++i) move_random_replicas();
    for (int i = 0; i < 20; ++i) set_aside();
    end_waits_in_time();
    end_waits_at_once();
    std::printf("%d rounds\n", rounds);
}
