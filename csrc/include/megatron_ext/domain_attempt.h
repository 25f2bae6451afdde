// The heart of stage 2: one try to bring every rank of an NVLink domain down to a threshold.
//
// A try takes the overloaded ranks one by one and sheds their excess to replicas:
//   1. the tightest host that takes all of it, so that roomy hosts stay for larger excesses;
//   2. the tightest pair of hosts (some methods);
//   3. the largest piece any host takes, unless a chain carries more: a chain moves assignments
//      from rank to rank, by replicas there are and by new ones, until a rank with room is reached.
//      It gets to room behind full slots, and through warm ranks to cold ones;
//   4. less than `min_quota`, by giving more and taking some back.
// A rank that no step relieves goes to the front of the order, and the try starts over, some times.
// In the end the busiest sender hands replicas over to others.
//
// Some methods go about it otherwise; they are described where they are.
//
// Integers only, and a warp's collectives only, so host and device give equal plans (warp.h).
//
// Legend: D ranks of the domain, M mains per rank, S slots per rank. Ranks and experts are counted
// from the domain's first; the main of expert e lives on rank e / M. All orders have ties by the
// lowest index.
#pragma once

#include <cstdint>

#include "megatron_ext/warp.h"

namespace megatron_ext {

struct Domain {
    int ranks;  // D
    int mains;  // M
    int slots;  // S
    int64_t min_quota;
    bool even;  // whether no rank may be idler than the others by more than one assignment
    const int64_t* expert_load;    // [D * M] assignments of all sources
    const int64_t* home_load;      // [D] assignments of a rank's mains
    const int32_t* busiest_first;  // [D] ranks

    MEGATRON_EXT_HOST_DEVICE int experts() const { return ranks * mains; }
    MEGATRON_EXT_HOST_DEVICE int home(int expert) const { return expert / mains; }
    // Whether that is the expert's home: a division less.
    MEGATRON_EXT_HOST_DEVICE bool is_main_of(int expert, int rank) const {
        return static_cast<unsigned>(expert - rank * mains) < static_cast<unsigned>(mains);
    }
};

// How a try goes about it. Where nothing else is said, overloaded ranks come by falling excess.
enum class Method : int32_t {
    kBestFit,          // steps 1 and 3
    kPairFit,          // steps 1, 2 and 3, as all that follow
    kRising,           // after the busiest rank, by rising excess
    kRemainder,        // by what is left over when the roomiest hosts are filled
    kRemainderRising,  // after the busiest rank, by that, rising
    kRefill,           // for one slot: fills hosts, not empties senders; starts over with a detour
    kRoomiest,         // UltraEP, Algorithm 1 (SolveReplication): always the roomiest host
    kFill,             // MoonEP's exact fill: the busiest rank fills the roomiest one completely
};
constexpr int kMethods = 8;

struct Verdict {
    bool reached = false;  // every rank is within its limit
    int32_t sends = 0;     // replicas that the busiest sender has to fill
    int32_t replicas = 0;
};

// What a try works on and leaves behind; memory of the caller.
struct AttemptState {
    static constexpr int kHops = 5;  // longest chain; longer ones found nothing more on any load

    struct Step {
        int32_t from;    // rank
        int32_t kind;    // kGrow, kReturn, kAdd
        int32_t expert;  // whose assignments move
        int32_t slot;    // of the replica that grows (on the rank gone to) or shrinks (on `from`)
    };

    int64_t* limit;    // [D] most assignments a rank may keep
    int64_t* load;     // [D] assignments a rank computes
    int64_t* kept;     // [D * M] assignments that stay with the main
    int64_t* amount;   // [D, S] assignments of a replica
    int64_t* width;    // [kHops + 1, D] what a chain of so many steps carries to a rank
    Step* step;        // [kHops, D] its last step
    int32_t* expert;   // [D, S] expert of a replica
    int32_t* held;     // [D] slots in use, from slot 0
    int32_t* sends;    // [D] replicas of a rank's mains
    int32_t* order;    // [D] ranks, in the order of shedding
    int32_t* hottest;  // [D] expert of a rank that keeps most
    int32_t* given;    // [D] first slot of a rank with a replica of the busiest sender, or -1

    // Lay the arrays out behind `memory`, which has `bytes` for them.
    MEGATRON_EXT_HOST_DEVICE static int64_t bytes(int ranks, int mains, int slots) {
        AttemptState state{};
        return state.place(nullptr, ranks, mains, slots);
    }

    MEGATRON_EXT_HOST_DEVICE int64_t place(char* memory, int ranks, int mains, int slots) {
        int64_t offset = 0;
        const int64_t d = ranks;
        put(limit, memory, offset, d);
        put(load, memory, offset, d);
        put(kept, memory, offset, d * mains);
        put(amount, memory, offset, d * slots);
        put(width, memory, offset, (kHops + 1) * d);
        put(step, memory, offset, kHops * d);
        put(expert, memory, offset, d * slots);
        put(held, memory, offset, d);
        put(sends, memory, offset, d);
        put(order, memory, offset, d);
        put(hottest, memory, offset, d);
        put(given, memory, offset, d);
        return (offset + 15) / 16 * 16;
    }

  private:
    template <class T>
    MEGATRON_EXT_HOST_DEVICE static void put(T*& array, char* memory, int64_t& offset, int64_t n) {
        if (memory != nullptr) array = reinterpret_cast<T*>(memory + offset);
        offset += n * static_cast<int64_t>(sizeof(T));
    }
};

template <class Warp>
class DomainAttempt {
  public:
    MEGATRON_EXT_HOST_DEVICE DomainAttempt(const Domain& domain,
                                           const AttemptState& state,
                                           Warp warp)
        : domain_(domain), state_(state), warp_(warp) {}

    // Try to bring every rank down to `threshold`. The plan is in the state if that was reached.
    MEGATRON_EXT_HOST_DEVICE Verdict run(int64_t threshold, Method method) {
        set_limits(threshold);
        set_order(method);
        for (int restart = 0; restart <= kRestarts; ++restart) {
            reset();
            int stuck = 0;
            switch (method) {
                case Method::kFill:
                    return done(fill());
                case Method::kRefill:
                    if (domain_.slots != 1) return done(false);
                    if (refill(restart - 1)) return done(true);
                    break;
                default:
                    stuck = relieve_all(method);
                    if (stuck < 0) return done(true);
                    if (stuck == 0 || method == Method::kRoomiest) return done(false);
                    move_to_front(stuck);
            }
        }
        return done(false);
    }

  private:
    static constexpr int kRestarts = 8;  // more of them found nothing more
    using Step = AttemptState::Step;
    enum Kind : int32_t {
        kGrow,    // an existing replica takes more from its main
        kReturn,  // a replica gives back to its main
        kAdd,     // a new replica takes from its main
    };

    // The threshold. For an even plan that leaves less than one spare assignment a rank, the
    // coldest ranks stay below it, so that nothing is spare.
    MEGATRON_EXT_HOST_DEVICE void set_limits(int64_t threshold) {
        const int ranks = domain_.ranks;
        const int64_t total = warp_.sum(ranks, [&](int r) { return domain_.home_load[r]; });
        const int64_t spare = threshold * ranks - total;
        const int coldest = domain_.even && spare < ranks ? static_cast<int>(spare) : 0;
        warp_.for_each(ranks, [&](int i) {
            state_.limit[domain_.busiest_first[i]] = threshold - (i >= ranks - coldest);
        });
    }

    MEGATRON_EXT_HOST_DEVICE void set_order(Method method) {
        const int ranks = domain_.ranks;
        const int coldest = domain_.busiest_first[ranks - 1];
        const int64_t room_there = state_.limit[coldest] - domain_.home_load[coldest];
        const int64_t most_room = room_there > 0 ? room_there : 1;
        // The higher, the earlier.
        const auto key = [&](int i) -> int64_t {
            const int rank = domain_.busiest_first[i];
            const int64_t excess = domain_.home_load[rank] - state_.limit[rank];
            if (excess <= 0) return -1;
            switch (method) {
                case Method::kRising:
                    return i == 0 ? kHuge : kHuge - 1 - excess;
                case Method::kRemainder:
                    return excess % most_room;
                case Method::kRemainderRising:
                    return i == 0 ? kHuge : kHuge - 1 - excess % most_room;
                default:
                    return 0;
            }
        };
        int64_t* const keys = state_.width;  // which a chain needs only later
        warp_.for_each(ranks, [&](int i) { keys[i] = key(i); });
        warp_.for_each(ranks, [&](int i) {
            const int64_t own = keys[i];
            int place = 0;
            for (int j = 0; j < ranks; ++j) place += keys[j] > own || (keys[j] == own && j < i);
            state_.order[place] = domain_.busiest_first[i];
        });
    }

    // Nothing has moved.
    MEGATRON_EXT_HOST_DEVICE void reset() {
        warp_.for_each(domain_.experts(), [&](int e) { state_.kept[e] = domain_.expert_load[e]; });
        warp_.for_each(domain_.ranks, [&](int r) {
            state_.load[r] = domain_.home_load[r];
            state_.held[r] = 0;
            state_.sends[r] = 0;
        });
    }

    // Returns the place in the order of the first rank that could not be relieved, or -1.
    MEGATRON_EXT_HOST_DEVICE int relieve_all(Method method) {
        for (int i = 0; i < domain_.ranks; ++i) {
            const int rank = state_.order[i];
            if (excess(rank) <= 0) continue;
            if (!relieve(rank, method)) return i;
        }
        return -1;
    }

    MEGATRON_EXT_HOST_DEVICE bool relieve(int rank, Method method) {
        return method == Method::kRoomiest ? shed_to_roomiest(rank)
                                           : shed(rank, method != Method::kBestFit);
    }

    MEGATRON_EXT_HOST_DEVICE void move_to_front(int place) {
        warp_.once([&] {
            const int32_t rank = state_.order[place];
            for (int i = place; i > 0; --i) state_.order[i] = state_.order[i - 1];
            state_.order[0] = rank;
        });
    }

    MEGATRON_EXT_HOST_DEVICE bool shed(int rank, bool pairs) {
        while (excess(rank) > 0) {
            const int64_t whole = excess(rank);
            // A replica that must carry more than the excess may: nobody is hurt by room.
            const int64_t needed = whole > domain_.min_quota ? whole : domain_.min_quota;
            const int hot = hottest_main(rank);

            const Best tightest = warp_.best(domain_.ranks, [&](int t) {
                if (!can_host(rank, t) || room(t) < needed) return Score{};
                const int expert = main_for(rank, hot, t);
                if (expert < 0 || state_.kept[expert] < needed) return Score{};
                return Score{kHuge - room(t), 0};
            });
            if (tightest.index >= 0) {
                add(main_for(rank, hot, tightest.index), tightest.index, needed);
                continue;
            }
            if (pairs && state_.kept[hot] >= whole) {
                const int first = larger_of_tightest_pair(rank, hot, whole);
                if (first >= 0) {
                    add(hot, first, room(first));
                    continue;
                }
            }
            const Best largest = warp_.best(domain_.ranks, [&](int t) {
                const int64_t piece = piece_for(rank, hot, t, whole);
                return Score{piece, -room(t)};
            });
            const Best roomiest =
                warp_.best(domain_.ranks, [&](int t) { return Score{room(t), 0}; });
            const int64_t piece = largest.score.first;
            if (piece < least(whole, roomiest.score.first, kHuge) && chain(rank, whole, piece)) {
                continue;
            }
            if (largest.index >= 0) {
                add(main_for(rank, hot, largest.index), largest.index, piece);
            } else if (!exchange(rank, whole)) {
                return false;
            }
        }
        return true;
    }

    // Move less than `min_quota`: a replica on a rank with room takes that much more than one of
    // that rank's experts, on `rank`, gives back.
    MEGATRON_EXT_HOST_DEVICE bool exchange(int rank, int64_t whole) {
        if (domain_.min_quota == 1) return false;
        const int hot = hottest_main(rank);
        const Best host = warp_.best(domain_.ranks, [&](int t) {
            if (room(t) <= 0 || !can_host(rank, t) || !can_host(t, rank)) return Score{};
            const int64_t piece = least(room(t), whole, kHuge);
            const int there = main_for(rank, hot, t);
            const int back = main_for(t, keeps_most(t), rank);
            if (there < 0 || state_.kept[there] - piece < domain_.min_quota || back < 0 ||
                state_.kept[back] < domain_.min_quota) {
                return Score{};
            }
            return Score{piece, -room(t)};
        });
        const int t = host.index;
        if (t < 0) return false;
        const int there = main_for(rank, hot, t);
        const int back = main_for(t, keeps_most(t), rank);
        add(there, t, domain_.min_quota + host.score.first);
        add(back, rank, domain_.min_quota);
        return true;
    }

    // What a new replica on rank t can take of `whole`; 0 if there can be none.
    MEGATRON_EXT_HOST_DEVICE int64_t piece_for(int rank, int hot, int t, int64_t whole) const {
        if (!can_host(rank, t) || room(t) <= 0) return 0;
        const int expert = main_for(rank, hot, t);
        const int64_t piece = expert < 0 ? 0 : least(state_.kept[expert], room(t), whole);
        return piece < domain_.min_quota ? 0 : piece;
    }

    // Hosts a and b, neither of which takes `whole` of expert `hot`, but both together do with the
    // least room left over; the roomier of them, or -1.
    MEGATRON_EXT_HOST_DEVICE int larger_of_tightest_pair(int rank, int hot, int64_t whole) {
        const auto fits = [&](int t) {
            return can_host(rank, t) && room(t) >= domain_.min_quota && room(t) < whole &&
                   !holds(t, hot);
        };
        return warp_
            .best(domain_.ranks,
                  [&](int a) {
                      const int64_t larger = room(a);
                      if (2 * larger < whole || !fits(a)) return Score{};
                      int64_t left_over = kHuge;
                      for (int b = 0; b < domain_.ranks; ++b) {
                          const int64_t both = larger + room(b);
                          if (both < whole || both - whole >= left_over || room(b) > larger ||
                              b == a || !fits(b)) {
                              continue;
                          }
                          left_over = both - whole;
                      }
                      return left_over == kHuge ? Score{} : Score{kHuge - left_over, larger};
                  })
            .index;
    }

    // Move up to `whole` off `rank` along the widest chain; nothing if that is not more than
    // `at_least`.
    MEGATRON_EXT_HOST_DEVICE bool chain(int rank, int64_t whole, int64_t at_least) {
        const int ranks = domain_.ranks;
        warp_.for_each(ranks, [&](int v) {
            state_.width[v] = v == rank ? whole : 0;
            state_.hottest[v] = keeps_most(v);
        });
        int last = -1;
        int length = 0;
        int64_t carried = at_least;
        for (int hop = 0; hop < AttemptState::kHops && carried < whole; ++hop) {
            warp_.for_each(ranks, [&](int t) { extend(hop, t); });
            const int64_t* width = state_.width + (hop + 1) * ranks;
            const Best end = warp_.best(
                ranks, [&](int t) { return Score{least(width[t], room(t), kHuge), room(t)}; });
            if (end.score.first > carried) {
                last = end.index;
                length = hop + 1;
                carried = end.score.first;
            }
        }
        if (last < 0) return false;
        carried = whole_replicas_only(last, length, carried);
        if (carried <= at_least) return false;
        warp_.once([&] {
            int t = last;
            for (int hop = length - 1; hop >= 0; --hop) {
                const Step step = state_.step[hop * ranks + t];
                take(step, t, carried);
                t = step.from;
            }
            drop_empty();
        });
        return true;
    }

    // Find the widest way to rank t in hop + 1 steps.
    MEGATRON_EXT_HOST_DEVICE void extend(int hop, int t) {
        const int ranks = domain_.ranks;
        const int slots = domain_.slots;
        const int64_t* width = state_.width + hop * ranks;
        int64_t best = 0;
        Step best_step{};
        const auto offer = [&](int64_t most, int64_t way, const Step& step) {
            const int64_t carried = least(most, way, kHuge);
            if (carried <= best) return;
            best = carried;
            best_step = step;
        };
        for (int v = 0; v < ranks; ++v) {
            if (width[v] <= best || passes(hop, v, t)) continue;
            for (int k = 0; k < state_.held[t]; ++k) {
                const int e = state_.expert[t * slots + k];
                if (domain_.is_main_of(e, v)) offer(width[v], state_.kept[e], {v, kGrow, e, k});
            }
            for (int k = 0; k < state_.held[v]; ++k) {
                const int e = state_.expert[v * slots + k];
                if (domain_.is_main_of(e, t)) {
                    offer(width[v], state_.amount[v * slots + k], {v, kReturn, e, k});
                }
            }
            if (!can_host(v, t)) continue;
            const int e = main_for(v, state_.hottest[v], t);
            if (e >= 0 && state_.kept[e] >= domain_.min_quota && width[v] >= domain_.min_quota) {
                offer(width[v], state_.kept[e], {v, kAdd, e, 0});
            }
        }
        state_.width[(hop + 1) * ranks + t] = best;
        state_.step[hop * ranks + t] = best_step;
    }

    // Whether the chain of `hop` steps to rank v has been at rank t.
    MEGATRON_EXT_HOST_DEVICE bool passes(int hop, int v, int t) const {
        for (; hop > 0 && v != t; --hop) v = state_.step[(hop - 1) * domain_.ranks + v].from;
        return v == t;
    }

    // What the chain may carry so that every replica on it has at least `min_quota` or nothing.
    MEGATRON_EXT_HOST_DEVICE int64_t whole_replicas_only(int last,
                                                         int length,
                                                         int64_t carried) const {
        if (domain_.min_quota == 1) return carried;
        bool changed = true;
        while (changed && carried > 0) {
            changed = false;
            int t = last;
            for (int hop = length - 1; hop >= 0; --hop) {
                const Step& step = state_.step[hop * domain_.ranks + t];
                if (step.kind == kAdd && carried < domain_.min_quota) return 0;
                if (step.kind == kReturn) {
                    const int64_t amount = state_.amount[step.from * domain_.slots + step.slot];
                    if (carried < amount && amount - carried < domain_.min_quota) {
                        carried = amount - domain_.min_quota;
                        changed = true;
                    }
                }
                t = step.from;
            }
        }
        return carried;
    }

    // By one lane.
    MEGATRON_EXT_HOST_DEVICE void take(const Step& step, int t, int64_t carried) {
        switch (step.kind) {
            case kGrow:
                state_.amount[t * domain_.slots + step.slot] += carried;
                state_.kept[step.expert] -= carried;
                break;
            case kReturn:
                state_.amount[step.from * domain_.slots + step.slot] -= carried;
                state_.kept[step.expert] += carried;
                break;
            default:
                place_replica(step.expert, t, carried);
        }
        state_.load[step.from] -= carried;
        state_.load[t] += carried;
    }

    // By one lane.
    MEGATRON_EXT_HOST_DEVICE void drop_empty() {
        const int slots = domain_.slots;
        for (int r = 0; r < domain_.ranks; ++r) {
            for (int k = 0; k < state_.held[r];) {
                if (state_.amount[r * slots + k] > 0) {
                    ++k;
                    continue;
                }
                --state_.sends[domain_.home(state_.expert[r * slots + k])];
                const int last = --state_.held[r];
                state_.expert[r * slots + k] = state_.expert[r * slots + last];
                state_.amount[r * slots + k] = state_.amount[r * slots + last];
            }
        }
    }

    // UltraEP, Algorithm 1: from the hottest expert on, always to the roomiest host.
    MEGATRON_EXT_HOST_DEVICE bool shed_to_roomiest(int rank) {
        const int first = rank * domain_.mains;
        int expert = -1;
        for (int m = 0; m < domain_.mains && excess(rank) > 0; ++m) {
            const int last = expert;
            const auto comes_later = [&](int e) {
                const int64_t difference =
                    last < 0 ? 1 : domain_.expert_load[last] - domain_.expert_load[e];
                return difference != 0 ? difference > 0 : e > last;
            };
            const Best next = warp_.best(domain_.mains, [&](int i) {
                const int e = first + i;
                return comes_later(e) ? Score{domain_.expert_load[e], 0} : Score{};
            });
            if (next.index < 0) return false;
            expert = first + next.index;
            while (excess(rank) > 0 && state_.kept[expert] > 0) {
                const Best host = warp_.best(domain_.ranks, [&](int t) {
                    return can_host(rank, t) ? Score{room(t), 0} : Score{};
                });
                const int64_t piece = least(excess(rank), host.score.first, state_.kept[expert]);
                if (host.index < 0 || piece < domain_.min_quota) break;
                add(expert, host.index, piece);
            }
        }
        return excess(rank) <= 0;
    }

    // MoonEP's exact fill: the busiest rank gives the roomiest one all that it lacks.
    MEGATRON_EXT_HOST_DEVICE bool fill() {
        while (true) {
            const Best busiest =
                warp_.best(domain_.ranks, [&](int r) { return Score{excess(r), 0}; });
            if (busiest.index < 0) return true;
            const int rank = busiest.index;
            const Best roomiest = warp_.best(domain_.ranks, [&](int t) {
                return can_host(rank, t) && state_.held[t] == 0 ? Score{room(t), 0} : Score{};
            });
            if (roomiest.index < 0) return false;
            const int t = roomiest.index;
            while (room(t) > 0) {
                const int hot = main_for(rank, hottest_main(rank), t);
                const int64_t piece = hot < 0 ? 0 : least(room(t), state_.kept[hot], kHuge);
                if (piece < domain_.min_quota || state_.held[t] == domain_.slots) return false;
                add(hot, t, piece);
            }
        }
    }

    // With one slot a rank receives once, so a plan is a forest, and it is found from the leaves:
    // the roomiest host is filled by the busiest rank that can, from its coolest main that does.
    // Then the host is done, and the rank that gave is a host itself if it now has room. Room may
    // be lost only as far as the domain has room to spare. This gets through where ranks must both
    // give and receive, but needs more replicas than shedding.
    //   detour  the step that takes the second best main, or -1: a limited discrepancy search
    //           (Harvey and Ginsberg, 1995) with one discrepancy
    MEGATRON_EXT_HOST_DEVICE bool refill(int detour) {
        int64_t spare = warp_.sum(domain_.ranks, [&](int r) { return room(r); });
        for (int step = 0;; ++step) {
            const Best busiest =
                warp_.best(domain_.ranks, [&](int r) { return Score{excess(r), 0}; });
            if (busiest.index < 0) return true;
            const Best roomiest = warp_.best(domain_.ranks, [&](int t) {
                return state_.held[t] == 0 && room(t) >= domain_.min_quota ? Score{room(t), 0}
                                                                           : Score{};
            });
            const int t = roomiest.index;
            if (t < 0) return false;
            const int64_t enough = larger_of(room(t) - spare, domain_.min_quota);
            const auto score = [&](int e) {
                const int home = domain_.home(e);
                if (home == t || state_.held[home] > 0 || state_.kept[e] < enough) return Score{};
                return Score{state_.load[home], -state_.kept[e]};
            };
            int main = warp_.best(domain_.experts(), score).index;
            if (step == detour) {
                const int passed = main;
                main = warp_
                           .best(domain_.experts(),
                                 [&](int e) { return e == passed ? Score{} : score(e); })
                           .index;
            }
            if (main < 0) return false;
            const int64_t piece = least(room(t), state_.kept[main], kHuge);
            spare -= room(t) - piece;
            add(main, t, piece);
        }
    }

    // A replica of the busiest sender that one of its other hosts can fill instead.
    struct HandOver {
        int32_t slot = 0;      // of the replica
        int32_t via = -1;      // rank that will fill it; -1 if none can
        int32_t via_slot = 0;  // of the sender's replica there, which grows
        int32_t expert = 0;    // main of `via` that takes the slot
        Score score;
    };

    // Spare the busiest sender: the assignments of one of its replicas go to another of its hosts,
    // and from there, as those of an expert of that host, to where the replica was. No rank's load
    // and no slot changes, but the host sends instead of the sender.
    MEGATRON_EXT_HOST_DEVICE void hand_over() {
        warp_.for_each(domain_.ranks, [&](int r) { state_.hottest[r] = keeps_most(r); });
        while (true) {
            const Best busiest =
                warp_.best(domain_.ranks, [&](int r) { return Score{state_.sends[r], 0}; });
            const int sender = busiest.index;
            if (sender < 0) return;
            warp_.for_each(domain_.ranks, [&](int r) { state_.given[r] = slot_given(sender, r); });
            const Best host =
                warp_.best(domain_.ranks, [&](int t) { return best_hand_over(sender, t).score; });
            if (host.index < 0) return;
            const HandOver best = best_hand_over(sender, host.index);
            warp_.once([&] {
                const int slots = domain_.slots;
                const int32_t replica = host.index * slots + best.slot;
                const int64_t amount = state_.amount[replica];
                state_.kept[state_.expert[replica]] += amount;
                state_.kept[state_.expert[best.via * slots + best.via_slot]] -= amount;
                state_.amount[best.via * slots + best.via_slot] += amount;
                state_.kept[best.expert] -= amount;
                state_.expert[replica] = best.expert;
                --state_.sends[sender];
                ++state_.sends[best.via];
                state_.hottest[sender] = keeps_most(sender);
                state_.hottest[best.via] = keeps_most(best.via);
            });
        }
    }

    // Of the sender's replicas on rank t, by the least busy of its hosts, then the smallest.
    MEGATRON_EXT_HOST_DEVICE HandOver best_hand_over(int sender, int t) const {
        HandOver best;
        if (state_.given[t] < 0) return best;
        for (int k = state_.given[t]; k < state_.held[t]; ++k) {
            const int expert = state_.expert[t * domain_.slots + k];
            if (!domain_.is_main_of(expert, sender)) continue;
            const int64_t amount = state_.amount[t * domain_.slots + k];
            for (int via = 0; via < domain_.ranks; ++via) {
                if (state_.given[via] < 0 || via == t) continue;
                const Score score{state_.sends[sender] - 1 - state_.sends[via], -amount};
                if (!score.above(best.score)) continue;
                const int grown = slot_that_grows(sender, via, expert, amount);
                if (grown < 0) continue;
                const int main = main_for(via, state_.hottest[via], t);
                if (main < 0 || state_.kept[main] < amount) continue;
                best = {k, via, grown, main, score};
            }
        }
        return best;
    }

    MEGATRON_EXT_HOST_DEVICE int slot_given(int sender, int t) const {
        for (int k = 0; k < state_.held[t]; ++k) {
            if (domain_.is_main_of(state_.expert[t * domain_.slots + k], sender)) return k;
        }
        return -1;
    }

    // A slot of rank `via` whose replica can take `amount` that `expert` of the sender gets back.
    MEGATRON_EXT_HOST_DEVICE int slot_that_grows(int sender,
                                                 int via,
                                                 int expert,
                                                 int64_t amount) const {
        for (int k = state_.given[via]; k < state_.held[via]; ++k) {
            const int e = state_.expert[via * domain_.slots + k];
            if (e == expert) return k;
            if (domain_.is_main_of(e, sender) && state_.kept[e] >= amount) return k;
        }
        return -1;
    }

    MEGATRON_EXT_HOST_DEVICE Verdict done(bool reached) {
        if (reached) hand_over();
        const Best busiest =
            warp_.best(domain_.ranks, [&](int r) { return Score{state_.sends[r], 0}; });
        const int64_t replicas = warp_.sum(domain_.ranks, [&](int r) { return state_.held[r]; });
        return {reached, static_cast<int32_t>(busiest.score.first), static_cast<int32_t>(replicas)};
    }

    MEGATRON_EXT_HOST_DEVICE int64_t excess(int rank) const {
        return state_.load[rank] - state_.limit[rank];
    }

    MEGATRON_EXT_HOST_DEVICE int64_t room(int rank) const { return -excess(rank); }

    MEGATRON_EXT_HOST_DEVICE bool can_host(int rank, int t) const {
        return t != rank && state_.held[t] < domain_.slots;
    }

    MEGATRON_EXT_HOST_DEVICE bool holds(int t, int expert) const {
        const int32_t* held = state_.expert + t * domain_.slots;
        for (int k = 0; k < state_.held[t]; ++k) {
            if (held[k] == expert) return true;
        }
        return false;
    }

    // The main of `rank` that keeps most; its first if none keeps anything.
    MEGATRON_EXT_HOST_DEVICE int hottest_main(int rank) const {
        const int first = rank * domain_.mains;
        const Best best =
            warp_.best(domain_.mains, [&](int m) { return Score{state_.kept[first + m], 0}; });
        return best.index < 0 ? first : first + best.index;
    }

    // The same, by one lane.
    MEGATRON_EXT_HOST_DEVICE int keeps_most(int rank) const {
        int best = rank * domain_.mains;
        for (int e = best + 1; e < (rank + 1) * domain_.mains; ++e) {
            if (state_.kept[e] > state_.kept[best]) best = e;
        }
        return best;
    }

    // The main of `rank` that keeps most and is not yet on rank t, given the one that keeps most;
    // -1 if all are there.
    MEGATRON_EXT_HOST_DEVICE int main_for(int rank, int hot, int t) const {
        if (!holds(t, hot)) return hot;
        int best = -1;
        for (int e = rank * domain_.mains; e < (rank + 1) * domain_.mains; ++e) {
            if ((best < 0 || state_.kept[e] > state_.kept[best]) && !holds(t, e)) best = e;
        }
        return best;
    }

    MEGATRON_EXT_HOST_DEVICE void add(int expert, int t, int64_t piece) {
        warp_.once([&] {
            place_replica(expert, t, piece);
            state_.load[domain_.home(expert)] -= piece;
            state_.load[t] += piece;
        });
    }

    // By one lane.
    MEGATRON_EXT_HOST_DEVICE void place_replica(int expert, int t, int64_t piece) {
        const int k = state_.held[t]++;
        state_.expert[t * domain_.slots + k] = expert;
        state_.amount[t * domain_.slots + k] = piece;
        state_.kept[expert] -= piece;
        ++state_.sends[domain_.home(expert)];
    }

    MEGATRON_EXT_HOST_DEVICE static int64_t least(int64_t a, int64_t b, int64_t c) {
        const int64_t ab = a < b ? a : b;
        return ab < c ? ab : c;
    }

    MEGATRON_EXT_HOST_DEVICE static int64_t larger_of(int64_t a, int64_t b) {
        return a > b ? a : b;
    }

    static constexpr int64_t kHuge = INT64_MAX;

    // Not copies: on a GPU they lie in shared memory, and all their pointers in registers would
    // spill.
    const Domain& domain_;
    const AttemptState& state_;
    const Warp warp_;
};

}  // namespace megatron_ext
