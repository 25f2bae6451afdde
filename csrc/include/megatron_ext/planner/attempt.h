// One try to bring every rank of an NVLink domain down to a threshold.
//
// A try uses only integers and a warp's collectives, so host and device give equal plans (warp.h).
// The work of a try is bounded and counted, by the same rule everywhere.
#pragma once

#include "megatron_ext/planner/chain.h"
#include "megatron_ext/planner/domain.h"
#include "megatron_ext/planner/hand_over.h"
#include "megatron_ext/planner/published.h"
#include "megatron_ext/planner/refill.h"
#include "megatron_ext/planner/shed.h"

namespace megatron_ext {

// What a try does. A method that sheds takes the overloaded ranks one by one, by falling excess
// where no other order is given. The remainder of a rank is its excess modulo the most room.
enum class Method : int32_t {
    kBestFit,          // sheds without pairs of hosts
    kRoomiest,         // UltraEP, Algorithm 1
    kPairFit,          // sheds with pairs of hosts, as the next three methods do
    kRising,           // busiest rank first, then by rising excess
    kRemainder,        // by falling remainder
    kRemainderRising,  // busiest rank first, then by rising remainder
    kRefill,           // fills hosts instead of emptying senders
    kFill,             // MoonEP's exact fill
};
constexpr int kCompeting = 6;  // the first methods: of their plans the best is taken
constexpr int kMethods = 8;

struct Verdict {
    bool reached;   // every rank is within its limit
    int32_t sends;  // replicas that the busiest sender has to send
    int32_t replicas;
    int32_t work;  // rounds of a warp
};

template <class Warp>
class Attempt {
    using Amount = typename Warp::Amount;

  public:
    // work_limit: a try that takes as many rounds has failed.
    // may_stop: whether the try ends, with any verdict, when the memory says that nobody needs it.
    MEGATRON_EXT_HOST_DEVICE Attempt(typename Warp::Memory memory,
                                     int32_t work_limit,
                                     bool may_stop = false)
        : moves_(memory, work_limit, may_stop) {}

    // The plan is in the memory if the threshold was reached. A rank that no step relieves goes to
    // the front of the order, and the try starts over, up to `restarts` times. Refilling starts
    // over with a detour. With so many ranks that one pass is much work, starting over found
    // nothing more.
    MEGATRON_EXT_HOST_DEVICE Verdict run(Amount threshold, Method method, int restarts) {
        bool reached = false;
        MEGATRON_EXT_ROLLED
        for (int pass = 0; !reached && pass <= restarts; ++pass) {
            if (pass > 0 && (moves_.work() >= kWorkToRestart || moves_.is_stopped())) break;
            moves_.reset(threshold);
            if (method == Method::kFill || method == Method::kRoomiest) {
                reached = method == Method::kFill ? fill_exactly(moves_) : shed_to_roomiest(moves_);
                break;
            }
            if (method == Method::kRefill) {
                reached = refill(moves_, pass - 1);
            } else {
                if (pass == 0) set_order(method);
                const int stuck = relieve_all(method != Method::kBestFit);
                reached = stuck < 0;
                if (stuck == 0) break;
                if (stuck > 0) move_to_front(stuck);
            }
        }
        if (reached) Warp::template HandOver<Warp>::run(moves_);
        reached = reached && !moves_.is_spent();
        return {reached, moves_.most_sends(), moves_.replicas(), moves_.work()};
    }

  private:
    static constexpr int32_t kWorkToRestart = 2048;

    MEGATRON_EXT_HOST_DEVICE void set_order(Method method) {
        const auto& at = moves_.at();
        const auto& domain = moves_.domain();
        const auto& warp = moves_.warp();
        const int ranks = domain.ranks;
        if (method == Method::kBestFit || method == Method::kPairFit) {
            warp.for_each(ranks, [&](int i) { at.order[i] = domain.busiest_first[i]; });
            return;
        }
        const Amount room_there = at.room[domain.busiest_first[ranks - 1]];
        const Amount most_room = room_there > 0 ? room_there : 1;
        const Amount last = domain.before();  // no key of a rank that has to shed is above it
        const auto key_of = [&](int i) -> Amount {
            const Amount excess = -at.room[domain.busiest_first[i]];
            if (excess <= 0) return last;
            const Amount rest = excess % most_room;
            const Amount other = i == 0 ? 0 : 1 + (method == Method::kRising ? excess : rest);
            return method == Method::kRemainder ? most_room - rest : other;
        };
        warp.template place_rising<Moves<Warp>::kRanks>(
            ranks, key_of, last, at.wider, at.step, [&](int i, int place) {
                at.order[place] = domain.busiest_first[i];
            });
        moves_.spend(4 * rounds_of(ranks));
    }

    // Returns the position in the order of the first rank that could not be relieved, or -1.
    MEGATRON_EXT_HOST_DEVICE int relieve_all(bool pairs) {
        return Shedding<Warp>(moves_, pairs).relieve_all();
    }

    MEGATRON_EXT_HOST_DEVICE void move_to_front(int place) {
        moves_.warp().move_to_front(place, moves_.at().order);
    }

    Moves<Warp> moves_;
};

}  // namespace megatron_ext
