#include "races.h"

#include <algorithm>

namespace ptx {

void Races::note(Access access, bool changes, int offset, int bytes, const Thread& by, int source) {
    const int end = offset + bytes;
    for (int at = offset; at < end; at = (at / kBytes + 1) * kBytes) {
        const int count = std::min(end - at, kBytes - at % kBytes);
        const uint32_t mask = ((1u << count) - 1) << at % kBytes;
        note(words_[at / kBytes], mask, access, changes, by, source);
    }
}

void Races::note(
    Word& word, uint32_t bytes, Access access, bool changes, const Thread& by, int source) {
    const bool is_update = access == Access::kUpdate;
    if (changes && !(is_update && word.is_update)) {
        compare(word.write, word.writer, bytes, by, source);
    }
    const auto add = [&](Noted& noted, bool is_more) {
        if (!is_more) noted = {0, 0, by.passed, source};
        noted.lanes |= 1u << by.lane;
        noted.bytes |= bytes;
    };
    const auto is_of_now = [&](const Noted& noted, int warp) {
        return warp == by.warp && noted.lanes != 0 && noted.passed.of_warp == by.passed.of_warp;
    };
    if (access == Access::kRead) {
        Noted& read = word.reads[by.warp];
        add(read, is_of_now(read, by.warp));
        return;
    }
    for (int warp = 0; changes && warp < kWarps; ++warp) {
        compare(word.reads[warp], warp, bytes, by, source);
    }
    add(word.write, !changes && is_of_now(word.write, word.writer));
    word.writer = by.warp;
    word.is_update = is_update;
}

void Races::compare(const Noted& before, int warp, uint32_t bytes, const Thread& by, int source) {
    const uint32_t others = warp == by.warp ? before.lanes & ~(1u << by.lane) : before.lanes;
    if (others == 0 || (before.bytes & bytes) == 0 || is_ordered(before, warp, by)) return;
    ++found_[{before.source, source}];
}

bool Races::is_ordered(const Noted& before, int warp, const Thread& by) const {
    if (warp == by.warp) return before.passed.of_warp < by.passed.of_warp;
    if (before.passed.of_block < by.passed.of_block) return true;
    return waits_for_some_[warp] && waits_for_some_[by.warp] &&
           before.passed.of_some < by.passed.of_some;
}

}  // namespace ptx
