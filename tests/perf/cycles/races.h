// Races: accesses to a byte of shared memory by two threads, one of which writes, that nothing
// orders.
//
// Threads of a warp are ordered by __syncwarp, warps by barriers that both wait at. Other
// collectives bring values, but order no memory. Two atomic updates are no race, and neither are
// two writes of the same value.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace ptx {

// How often a warp has been ordered.
struct Passed {
    uint32_t of_warp = 0;   // among its lanes
    uint32_t of_block = 0;  // with all warps
    uint32_t of_some = 0;   // with those that wait for each other
};

enum class Access { kRead, kWrite, kUpdate };

struct Thread {
    int warp;
    int lane;
    Passed passed;
};

class Races {
  public:
    using Pair = std::pair<int, int>;  // sources of the earlier access and of the later one

    Races(int bytes, int warps) : words_(bytes / kBytes), waits_for_some_(warps) {}

    // A warp waits for some others: whichever do so are always the same.
    void wait_for_some(int warp) { waits_for_some_[warp] = true; }

    //   changes  whether what is written differs from what is there
    void note(Access access, bool changes, int offset, int bytes, const Thread& by, int source);

    const std::map<Pair, int>& found() const { return found_; }  // how often

  private:
    static constexpr int kBytes = 4;  // of a word
    static constexpr int kWarps = 16;

    struct Noted {  // of lanes of one warp, between two of its orders
        uint32_t lanes = 0;
        uint32_t bytes = 0;  // a bit each
        Passed passed;
        int source = 0;
    };
    struct Word {
        Noted write;
        int writer = 0;  // its warp
        bool is_update = false;
        std::array<Noted, kWarps> reads;
    };

    void note(Word& word, uint32_t bytes, Access access, bool changes, const Thread&, int source);
    void compare(const Noted& before, int warp, uint32_t bytes, const Thread& by, int source);
    bool is_ordered(const Noted& before, int warp, const Thread& by) const;

    std::vector<Word> words_;
    std::vector<bool> waits_for_some_;
    std::map<Pair, int> found_;
};

}  // namespace ptx
