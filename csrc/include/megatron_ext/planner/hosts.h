// The hosts of a try: the ranks that have a free slot and room for the smallest replica. Two ways
// to find the tightest and the roomiest one, with equal results:
//   SortedHosts  a list by room, for one thread: to find is little work, to change a rank is more
//   FlatHosts    an entry a rank, for lanes side by side: all are looked at, nothing is moved
// SortedHosts keeps the room that a rank is listed with in `words`, by rank.
// Where hosts are equally roomy, the lower rank is the tighter one. Functions get the Moves that
// they belong to; where they get an expert, only hosts without a replica of it count.
#pragma once

#include <algorithm>
#include <cstdint>

#include "megatron_ext/planner/domain.h"

namespace megatron_ext {

// The hosts with less room than some amount, whatever they hold.
template <class Amount>
struct HostsBelow {
    int count;
    Amount most;  // room of one of them, or more
};

template <class Amount>
class SortedHosts {
    using Memory = TryMemory<Amount>;

  public:
    // All ranks are to be looked at. `rising`: room rises in the order `busiest_first`.
    template <class Moves>
    void list(const Moves& moves, bool rising) {
        const Memory& at = moves.at();
        count_ = 0;
        most_room_of_others_ = 0;
        for (int i = 0; i < moves.domain().ranks; ++i) {
            const int t = moves.domain().busiest_first[i];
            const Amount room = moves.room_of_host(at.room[t], at.held[t]);
            at.words[t] = room;
            if (room == 0) {
                most_room_of_others_ = std::max(most_room_of_others_, at.room[t]);
                continue;
            }
            const int place = rising ? count_ : place_of(at, room, t);
            open(at, place, count_++);
            put(at, place, room, t);
        }
    }

    // Rank t has room for `room` now, as a host, or 0 if it is none.
    void update(const Memory& at, int t, Amount room) {
        const auto before = static_cast<Amount>(at.words[t]);
        const bool is_listed = before > 0;
        const int from = is_listed ? place_of(at, before, t) : 0;
        at.words[t] = room;
        if (room == 0) {
            most_room_of_others_ = std::max(most_room_of_others_, at.room[t]);
            if (is_listed) close(at, from, --count_);
            return;
        }
        int to = place_of(at, room, t);
        if (!is_listed) {
            open(at, to, count_++);
        } else if (from < to) {
            close(at, from, --to);
        } else {
            open(at, to, from);
        }
        put(at, to, room, t);
    }

    template <class Moves>
    int count(const Moves&) const {
        return count_;
    }

    // The tightest with at least `amount`, or -1.
    template <class Moves>
    int tightest(const Moves& moves, int expert, Amount amount) const {
        const Memory& at = moves.at();
        for (int i = place_of(at, amount, -1); i < count_; ++i) {
            if (moves.slot_of(at.host[i], expert) < 0) return at.host[i];
        }
        return -1;
    }

    // The roomiest with less than `most`, or -1.
    template <class Moves>
    int roomiest_below(const Moves& moves, int expert, Amount most) const {
        const Memory& at = moves.at();
        for (int i = place_of(at, most, -1) - 1; i >= 0; --i) {
            if (moves.slot_of(at.host[i], expert) < 0) return at.host[i];
        }
        return -1;
    }

    // The lowest rank of those with most room, or -1.
    template <class Moves>
    int roomiest(const Moves& moves) const {
        const Memory& at = moves.at();
        return count_ == 0 ? -1 : at.host[place_of(at, at.host_room[count_ - 1], -1)];
    }

    // Whether any rank, host or not, has more room than that.
    template <class Moves>
    bool is_any_roomier(const Moves& moves, Amount than) const {
        const Memory& at = moves.at();
        if (count_ > 0 && at.host_room[count_ - 1] > than) return true;
        return most_room_of_others_ > than &&
               moves.best_rank([&](int r) -> Amount { return at.room[r]; }).key > than;
    }

    // Those with less than `most`.
    template <class Moves>
    HostsBelow<Amount> below(const Moves& moves, Amount most) const {
        const Memory& at = moves.at();
        const int count = place_of(at, most, -1);
        return {count, count > 0 ? at.host_room[count - 1] : 0};
    }

    // Of those with less than `most`: two with `whole` together and least, but less than `whole`,
    // left over. Of several pairs the one whose roomier host is the tightest, and that host; -1 if
    // there are none.
    template <class Moves>
    Best<Amount> tightest_pair(const Moves& moves, int expert, Amount most, Amount whole) const {
        const Memory& at = moves.at();
        const auto may = [&](int i) { return moves.slot_of(at.host[i], expert) < 0; };
        Best<Amount> roomier;
        const int count = place_of(at, most, -1);
        Amount least_over = whole;
        const int half = std::min(place_of(at, whole - whole / 2, -1), count);
        int first = half;  // that has enough room with the one looked at, or more
        for (int larger = half; larger < count && least_over > 0; ++larger) {
            const Amount room = at.host_room[larger];
            while (first > 0 && at.host_room[first - 1] >= whole - room) --first;
            if (first >= larger) continue;
            if (room - (whole - at.host_room[first]) >= least_over || !may(larger)) continue;
            int smaller = first;
            while (smaller < larger && !may(smaller)) ++smaller;
            if (smaller == larger) continue;
            const Amount over = room - (whole - at.host_room[smaller]);
            if (over >= least_over) continue;
            least_over = over;
            roomier = {at.host[larger], room};
        }
        return roomier;
    }

  private:
    // How many come before a rank with this room.
    int place_of(const Memory& at, Amount room, int rank) const {
        int first = 0;
        int count = count_;
        while (count > 0) {
            const int half = count / 2;
            const int i = first + half;
            const bool is_before =
                at.host_room[i] < room || (at.host_room[i] == room && at.host[i] < rank);
            first = is_before ? i + 1 : first;
            count = is_before ? count - half - 1 : half;
        }
        return first;
    }

    static void put(const Memory& at, int place, Amount room, int t) {
        at.host_room[place] = room;
        at.host[place] = t;
    }

    // Entries from `place` to before `end` make room for one, or fill the place of one.
    static void open(const Memory& at, int place, int end) {
        for (int i = end; i > place; --i) put(at, i, at.host_room[i - 1], at.host[i - 1]);
    }

    static void close(const Memory& at, int place, int last) {
        for (int i = place; i < last; ++i) put(at, i, at.host_room[i + 1], at.host[i + 1]);
    }

    int count_ = 0;
    Amount most_room_of_others_ = 0;  // that are no hosts; or more
};

// As SortedHosts, function by function.
template <class Amount>
class FlatHosts {
  public:
    template <class Moves>
    MEGATRON_EXT_HOST_DEVICE void list(const Moves& moves, bool /*rising*/) {
        const auto& at = moves.at();
        moves.warp().for_each(moves.domain().ranks, [&](int t) {
            at.host_room[t] = moves.room_of_host(at.room[t], at.held[t]);
        });
    }

    // By one lane.
    MEGATRON_EXT_HOST_DEVICE void update(const TryMemory<Amount>& at, int t, Amount room) {
        at.host_room[t] = room;
    }

    template <class Moves>
    MEGATRON_EXT_HOST_DEVICE int count(const Moves& moves) const {
        const auto& at = moves.at();
        return static_cast<int>(moves.warp().sum(
            moves.domain().ranks, [&](int t) -> int64_t { return at.host_room[t] > 0; }));
    }

    template <class Moves>
    MEGATRON_EXT_HOST_DEVICE int tightest(const Moves& moves, int expert, Amount amount) const {
        return find(moves, expert, [&](const Amount* rooms) {
            return moves
                .best_rank([&](int t) -> Amount {
                    return rooms[t] >= amount ? Moves::kMost - rooms[t] : 0;
                })
                .index;
        });
    }

    template <class Moves>
    MEGATRON_EXT_HOST_DEVICE int roomiest_below(const Moves& moves, int expert, Amount most) const {
        const int last = moves.domain().ranks - 1;
        return find(moves, expert, [&](const Amount* rooms) {
            const int from_last =  // the last of equals
                moves
                    .best_rank([&](int i) -> Amount {
                        return rooms[last - i] < most ? rooms[last - i] : 0;
                    })
                    .index;
            return from_last < 0 ? -1 : last - from_last;
        });
    }

    template <class Moves>
    MEGATRON_EXT_HOST_DEVICE int roomiest(const Moves& moves) const {
        const auto& at = moves.at();
        return moves.best_rank([&](int t) -> Amount { return at.host_room[t]; }).index;
    }

    template <class Moves>
    MEGATRON_EXT_HOST_DEVICE bool is_any_roomier(const Moves& moves, Amount than) const {
        const auto& at = moves.at();
        return moves.best_rank([&](int r) -> Amount { return at.room[r]; }).key > than;
    }

    template <class Moves>
    MEGATRON_EXT_HOST_DEVICE HostsBelow<Amount> below(const Moves& moves, Amount most) const {
        const auto& at = moves.at();
        const int64_t count = moves.warp().sum(moves.domain().ranks, [&](int t) -> int64_t {
            return at.host_room[t] > 0 && at.host_room[t] < most;
        });
        return {static_cast<int>(count), most};
    }

    template <class Moves>
    MEGATRON_EXT_HOST_DEVICE Best<Amount> tightest_pair(const Moves& moves,
                                                        int expert,
                                                        Amount most,
                                                        Amount whole) const {
        const auto& at = moves.at();
        const int ranks = moves.domain().ranks;
        moves.warp().for_each(ranks, [&](int t) {
            const bool may = at.host_room[t] < most && moves.slot_of(t, expert) < 0;
            at.wider[t] = may ? at.host_room[t] : 0;
        });
        return moves.warp().closest_pair(ranks, at.wider, whole);
    }

  private:
    // What `find_in` finds in the rooms of hosts; if that one holds the expert, among the others.
    template <class Moves, class FindIn>
    MEGATRON_EXT_HOST_DEVICE int find(const Moves& moves, int expert, FindIn find_in) const {
        const auto& at = moves.at();
        const int t = find_in(at.host_room);
        if (t < 0 || moves.slot_of(t, expert) < 0) return t;
        moves.warp().for_each(moves.domain().ranks, [&](int r) {
            at.wider[r] = moves.slot_of(r, expert) < 0 ? at.host_room[r] : 0;
        });
        return find_in(at.wider);
    }
};

// None: lanes have hosts at hand.
template <class Amount>
class NoHosts {
  public:
    template <class Moves>
    MEGATRON_EXT_HOST_DEVICE void list(const Moves&, bool) {}
    MEGATRON_EXT_HOST_DEVICE void update(const TryMemory<Amount>&, int, Amount) {}
};

}  // namespace megatron_ext
