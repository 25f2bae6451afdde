#include "machine.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

namespace ptx {
namespace {

constexpr Lanes kAll = ~Lanes{0};
using Wide = unsigned __int128;
using Signed = int64_t;

Lanes bit(int lane) { return Lanes{1} << lane; }

template <class Run>
void for_each_lane(Lanes lanes, Run run) {
    for (; lanes != 0; lanes &= lanes - 1) run(std::countr_zero(lanes));
}

uint64_t truncated(uint64_t value, int bits) {
    return bits >= 64 ? value : value & ((uint64_t{1} << bits) - 1);
}

// As 64 bits of the same number.
uint64_t extended(uint64_t value, Type type) {
    if (type.kind != 's' || type.bits >= 64) return truncated(value, type.bits);
    return static_cast<uint64_t>(static_cast<Signed>(value << (64 - type.bits)) >>
                                 (64 - type.bits));
}

bool is_less(uint64_t a, uint64_t b, Type type) {
    a = extended(a, type);
    b = extended(b, type);
    return type.kind == 's' ? static_cast<Signed>(a) < static_cast<Signed>(b) : a < b;
}

bool compare(const Instruction& in, uint64_t a, uint64_t b) {
    switch (in.mode) {
        case "eq"_w:
            return extended(a, in.type) == extended(b, in.type);
        case "ne"_w:
            return extended(a, in.type) != extended(b, in.type);
        case "lo"_w:
        case "lt"_w:
            return is_less(a, b, in.type);
        case "hi"_w:
        case "gt"_w:
            return is_less(b, a, in.type);
        case "ls"_w:
        case "le"_w:
            return !is_less(b, a, in.type);
        case "hs"_w:
        case "ge"_w:
            return !is_less(a, b, in.type);
        default:
            throw UnknownInstruction(in);
    }
}

// setp, whose last operand may be a further predicate.
bool decide(const Instruction& in, const std::array<uint64_t, 4>& v) {
    const bool is = compare(in, v[0], v[1]);
    if (in.combine == "and"_w) return is && v[2] & 1;
    return is || (in.combine == "or"_w && v[2] & 1);
}

uint64_t product(const Instruction& in, uint64_t a, uint64_t b) {
    a = extended(a, in.type);
    b = extended(b, in.type);
    if (in.mode == "wide"_w) return a * b;
    if (in.mode == "lo"_w) return truncated(a * b, in.type.bits);
    const bool is_signed = in.type.kind == 's';
    const Wide whole =
        is_signed ? static_cast<Wide>(__int128{static_cast<Signed>(a)} * static_cast<Signed>(b))
                  : Wide{a} * b;
    return truncated(static_cast<uint64_t>(whole >> in.type.bits), in.type.bits);
}

uint64_t sum(const Instruction& in, uint64_t a, uint64_t b, bool& carry) {
    const int bits = in.mode == "wide"_w ? 2 * in.type.bits : in.type.bits;
    const Wide sum = Wide{truncated(a, bits)} + truncated(b, bits) + (in.with_carry && carry);
    if (in.sets_carry) carry = sum >> bits & 1;
    return static_cast<uint64_t>(sum);
}

// The carry is there where nothing was borrowed: divisions of 128 bits rely on that.
uint64_t difference(const Instruction& in, uint64_t a, uint64_t b, bool& carry) {
    const bool borrow = in.with_carry && !carry;
    const int bits = in.type.bits;
    if (in.sets_carry) carry = truncated(a, bits) >= Wide{truncated(b, bits)} + borrow;
    return a - b - borrow;
}

// div and rem.
uint64_t quotient(const Instruction& in, uint64_t a, uint64_t b) {
    a = extended(a, in.type);
    b = extended(b, in.type);
    const bool divides = in.op == "div"_w;
    if (b == 0) return kAll;  // undefined, for lanes whose result is not looked at
    if (in.type.kind != 's') return divides ? a / b : a % b;
    if (b == ~uint64_t{0}) return divides ? -a : 0;
    const auto dividend = static_cast<Signed>(a);
    const auto divisor = static_cast<Signed>(b);
    return static_cast<uint64_t>(divides ? dividend / divisor : dividend % divisor);
}

uint64_t shifted(const Instruction& in, uint64_t value, uint64_t count) {
    const auto bits = static_cast<uint64_t>(in.type.bits);
    count = truncated(count, 32);
    if (in.op == "shl"_w) return count >= bits ? 0 : value << count;
    value = extended(value, in.type);
    if (in.type.kind != 's') return count >= bits ? 0 : value >> count;
    return static_cast<uint64_t>(static_cast<Signed>(value) >> std::min(count, bits - 1));
}

uint64_t both(uint64_t low, uint64_t high) {
    return truncated(high, 32) << 32 | truncated(low, 32);
}

uint64_t insert_bits(const Instruction& in, const std::array<uint64_t, 4>& v) {
    const auto at = static_cast<int>(std::min<uint64_t>(truncated(v[2], 32), 63));
    const auto count = static_cast<int>(std::min<uint64_t>(truncated(v[3], 32), 64));
    const uint64_t mask = truncated(truncated(~uint64_t{0}, count) << at, in.type.bits);
    return (v[1] & ~mask) | (v[0] << at & mask);
}

// prmt: each nibble of the selector chooses one of eight bytes.
uint64_t permute(const Instruction& in, uint64_t bytes, uint64_t selector) {
    if (selector & 0x8888) throw UnknownInstruction(in);  // a byte's sign
    uint64_t result = 0;
    for (int i = 0; i < 4; ++i) result |= (bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return result;
}

uint64_t reciprocal(uint64_t bits) {
    return std::bit_cast<uint32_t>(1.0f / std::bit_cast<float>(static_cast<uint32_t>(bits)));
}

// What atom and redux make of two numbers.
uint64_t combined(const Instruction& in, uint64_t a, uint64_t b) {
    switch (in.mode) {
        case "add"_w:
            return a + b;
        case "exch"_w:
            return b;
        case "min"_w:
            return is_less(b, a, in.type) ? b : a;
        case "max"_w:
            return is_less(a, b, in.type) ? b : a;
        default:
            throw UnknownInstruction(in);
    }
}

// v: what it reads, in the order of its operands.
uint64_t result_of(const Instruction& in, const std::array<uint64_t, 4>& v, bool& carry) {
    const int bits = in.type.bits;
    if ((in.type.kind == 'f' || in.from.kind == 'f') && in.op != "rcp"_w)
        throw UnknownInstruction(in);
    switch (in.op) {
        case "add"_w:
            return sum(in, v[0], v[1], carry);
        case "and"_w:
            return v[0] & v[1];
        case "bfi"_w:
            return insert_bits(in, v);
        case "clz"_w:
            return std::countl_zero(truncated(v[0], bits)) - (64 - bits);
        case "cvt"_w:
            return extended(v[0], in.from);
        case "div"_w:
        case "rem"_w:
            return quotient(in, v[0], v[1]);
        case "mad"_w:
            return sum(in, product(in, v[0], v[1]), v[2], carry);
        case "max"_w:
            return is_less(v[0], v[1], in.type) ? v[1] : v[0];
        case "min"_w:
            return is_less(v[1], v[0], in.type) ? v[1] : v[0];
        case "mul"_w:
            return product(in, v[0], v[1]);
        case "neg"_w:
            return -v[0];
        case "not"_w:
            return ~v[0];
        case "or"_w:
            return v[0] | v[1];
        case "popc"_w:
            return std::popcount(truncated(v[0], bits));
        case "prmt"_w:
            return permute(in, both(v[0], v[1]), v[2]);
        case "rcp"_w:
            return reciprocal(v[0]);
        case "selp"_w:
            return v[2] & 1 ? v[0] : v[1];
        case "setp"_w:
            return decide(in, v);
        case "shf"_w:
            return both(v[0], v[1]) >> (32 - (v[2] & 31));  // .l.wrap
        case "shl"_w:
        case "shr"_w:
            return shifted(in, v[0], v[1]);
        case "sub"_w:
            return difference(in, v[0], v[1], carry);
        case "xor"_w:
            return v[0] ^ v[1];
        default:
            throw UnknownInstruction(in);
    }
}

int bits_of_result(const Instruction& in) {
    if (in.op == "setp"_w) return 1;
    if (in.op == "popc"_w || in.op == "clz"_w) return 32;
    return in.mode == "wide"_w ? 2 * in.type.bits : in.type.bits;
}

bool is_collective(const Instruction& in) {
    return in.op == "syncwarp"_w || in.op == "redux"_w || in.op == "shfl"_w || in.op == "vote"_w ||
           in.op == "bar"_w;
}

}  // namespace

// A call: registers and parameters of all lanes, at 0.
Frame::Frame(const Function& called, Lanes by)
    : function(&called),
      lanes(by),
      registers(called.num_registers * kLanes),
      ready(called.num_registers),
      parameters(called.parameter_bytes * kLanes) {}

Warp::Warp(Block& block, int number, const Function& entry, const Arguments& arguments)
    : block_(block),
      number_(number),
      stacks_(kLanes * Block::kLocalBytes),
      spent_(block.program_.sources.size()) {
    Frame& frame = frames_.emplace_back(entry, kAll);
    for (size_t i = 0; i < arguments.size() * kLanes; ++i) {
        const size_t which = i / kLanes;
        std::ranges::copy(
            arguments[which],
            frame.parameter(static_cast<int>(i % kLanes)) + entry.parameters[which].offset);
    }
}

void Warp::go_on(int64_t now) {
    ++passed_.of_block;
    proceed(now);
    std::ranges::fill(spent_, 0);
}

void Warp::go_on_behind(int64_t now) {
    ++passed_.of_some;
    proceed(now);
}

void Warp::proceed(int64_t now) {
    ++passed_.of_warp;
    is_waiting_ = false;
    now_ = last_load_ = last_store_ = now;
}

bool Warp::step() {
    Frame& frame = frames_.back();
    if (frame.lanes == frame.returned) {
        leave();
        return !frames_.empty();
    }
    const Lanes lanes = choose(frame);
    if (lanes == 0) return true;
    const int lane = std::countr_zero(lanes);
    const Instruction& in = frame.function->code[frame.at[lane]];
    source_ = in.source;
    for_each_lane(lanes, [&](int each) { ++frame.at[each]; });
    if (in.op == "bar"_w) {
        ++now_;
        is_waiting_ = true;
        waits_for_ = in.operands.size() > 1 ? get(in.operands[1], frame, lane) : 0;
        if (waits_for_ > 0) block_.races_.wait_for_some(number_);
        return false;
    }
    spend(in, frame, lane);
    Lanes executing = 0;
    for_each_lane(lanes, [&](int each) {
        if (in.predicate < 0 || (frame.value(in.predicate, each) & 1) != in.is_negated)
            executing |= bit(each);
    });
    if (executing != 0) execute(in, frame, executing);
    return true;
}

// The lanes that are behind all others, but for those that wait; at a collective all that it is
// for. None if some of those are still missing.
Lanes Warp::choose(Frame& frame) {
    const Lanes running = frame.lanes & ~frame.returned;
    // Those that others have left behind by a return look again, and find nobody.
    const Lanes ready = running == frame.waiting ? running : running & ~frame.waiting;
    int first = std::numeric_limits<int>::max();
    for_each_lane(ready, [&](int lane) { first = std::min(first, frame.at[lane]); });
    Lanes there = 0;
    for_each_lane(running, [&](int lane) { there |= frame.at[lane] == first ? bit(lane) : 0; });
    const Instruction& in = frame.function->code[first];
    if (!is_collective(in)) return there & ready;
    if (there == lanes_of(in, frame, std::countr_zero(there))) {
        frame.waiting &= ~there;
        return there;
    }
    frame.waiting |= there;
    if (frame.waiting == running) {
        throw Error("lanes wait for others for ever in " + frame.function->name + ": " + in.text);
    }
    return 0;
}

// Whom a collective is for: its last operand.
Lanes Warp::lanes_of(const Instruction& in, Frame& frame, int lane) {
    if (in.op == "bar"_w) return kAll;
    return static_cast<Lanes>(get(in.operands.back(), frame, lane));
}

void Warp::execute(const Instruction& in, Frame& frame, Lanes lanes) {
    switch (in.op) {
        case "atom"_w:
            return update(in, frame, lanes);
        case "bra"_w:
            return for_each_lane(lanes, [&](int lane) { frame.at[lane] = in.target; });
        case "call"_w:
            return enter(in, frame, lanes);
        case "cvta"_w:
            return convert_address(in, frame, lanes);
        case "ld"_w:
            return load(in, frame, lanes);
        case "mov"_w:
            return move(in, frame, lanes);
        case "redux"_w:
            return reduce(in, frame, lanes);
        case "ret"_w:
            frame.returned |= lanes;
            return;
        case "shfl"_w:
            return shuffle(in, frame, lanes);
        case "st"_w:
            return store(in, frame, lanes);
        case "syncwarp"_w:
            ++passed_.of_warp;
            return;
        case "vote"_w:
            return vote(in, frame, lanes);
        default:
            compute(in, frame, lanes);
    }
}

uint64_t Warp::special(const std::string& name, int lane) const {
    if (name == "%tid.x") return number_ * kLanes + lane;
    if (name == "%laneid") return lane;
    if (name == "%nctaid.x") return 1;
    return name == "%ntid.x" ? block_.num_warps_ * kLanes : 0;  // the only block's number: 0
}

uint64_t Warp::get(const Operand& operand, Frame& frame, int lane) {
    const auto at = [&](const void* place) {
        return reinterpret_cast<uint64_t>(place) + operand.offset;
    };
    switch (operand.kind) {
        case Operand::kRegister:
            return frame.value(operand.place, lane) + operand.offset;
        case Operand::kNumber:
            return operand.offset;
        case Operand::kShared:
            return operand.place + operand.offset;
        case Operand::kDynamicShared:
            return block_.dynamic_shared_ + operand.offset;
        case Operand::kLocal:
            return at(stacks_.data() + lane * Block::kLocalBytes + frame.local);
        case Operand::kParameter:
            return at(frame.parameter(lane) + operand.place);
        case Operand::kSpecial:
            return special(operand.name, lane);
        default:
            throw Error("no value has this name: " + operand.name);
    }
}

uint8_t* Warp::address(const Instruction& in, const Operand& operand, Frame& frame, int lane) {
    const uint64_t where = get(operand, frame, lane);
    if (in.space != "shared"_w) {
        if (where < 4096) throw Error("no memory is at " + std::to_string(where) + ": " + in.text);
        return reinterpret_cast<uint8_t*>(where);
    }
    const size_t bytes = block_.shared_.size();
    if (truncated(where, 32) + in.width * in.type.bits / 8 > bytes) {
        throw Error("beyond shared memory's " + std::to_string(bytes) + " bytes: " + in.text);
    }
    return block_.shared_.data() + truncated(where, 32);
}

void Warp::compute(const Instruction& in, Frame& frame, Lanes lanes) {
    const int bits = bits_of_result(in);
    for_each_lane(lanes, [&](int lane) {
        std::array<uint64_t, 4> read{};
        for (size_t i = 1; i < in.operands.size(); ++i)
            read.at(i - 1) = get(in.operands[i], frame, lane);
        bool carry = frame.carry & bit(lane);
        frame.value(in.operands[0].place, lane) = truncated(result_of(in, read, carry), bits);
        frame.carry = (frame.carry & ~bit(lane)) | (carry ? bit(lane) : 0);
    });
}

// Also between a number and its parts.
void Warp::move(const Instruction& in, Frame& frame, Lanes lanes) {
    const Operand& to = in.operands[0];
    const Operand& from = in.operands[1];
    const auto parts =
        static_cast<int>(std::max({to.vector.size(), from.vector.size(), size_t{1}}));
    const int bits = in.type.bits / parts;
    for_each_lane(lanes, [&](int lane) {
        uint64_t value = from.vector.empty() ? get(from, frame, lane) : 0;
        for (int i = parts; !from.vector.empty() && i-- > 0;) {
            value = value << bits | truncated(get(from.vector[i], frame, lane), bits);
        }
        if (to.vector.empty()) frame.value(to.place, lane) = truncated(value, in.type.bits);
        for (size_t i = 0; i < to.vector.size(); ++i, value >>= bits) {
            frame.value(to.vector[i].place, lane) = truncated(value, bits);
        }
    });
}

// Generic addresses are the host's; those of shared memory count from its begin.
void Warp::convert_address(const Instruction& in, Frame& frame, Lanes lanes) {
    const auto shared = reinterpret_cast<uint64_t>(block_.shared_.data());
    const uint64_t base = in.space == "shared"_w ? shared : 0;
    for_each_lane(lanes, [&](int lane) {
        const uint64_t from = get(in.operands[1], frame, lane);
        frame.value(in.operands[0].place, lane) = in.to_space ? from - base : from + base;
    });
}

void Warp::note(Access access, bool changes, const uint8_t* place, int bytes, int lane) {
    const int64_t offset = place - block_.shared_.data();
    if (offset < 0 || offset >= std::ssize(block_.shared_)) return;
    const Thread by{number_, lane, passed_};
    block_.races_.note(access, changes, static_cast<int>(offset), bytes, by, source_);
}

void Warp::load(const Instruction& in, Frame& frame, Lanes lanes) {
    const int bytes = in.type.bits / 8;
    for_each_lane(lanes, [&](int lane) {
        const uint8_t* from = address(in, in.operands[1], frame, lane);
        note(Access::kRead, true, from, bytes * in.width, lane);
        for (int i = 0; i < in.width; ++i, from += bytes) {
            uint64_t value = 0;
            std::memcpy(&value, from, bytes);
            const Operand& to = in.width > 1 ? in.operands[0].vector[i] : in.operands[0];
            frame.value(to.place, lane) = extended(value, in.type);
        }
    });
}

void Warp::store(const Instruction& in, Frame& frame, Lanes lanes) {
    const int bytes = in.type.bits / 8;
    for_each_lane(lanes, [&](int lane) {
        uint8_t* to = address(in, in.operands[0], frame, lane);
        for (int i = 0; i < in.width; ++i, to += bytes) {
            const uint64_t value =
                get(in.width > 1 ? in.operands[1].vector[i] : in.operands[1], frame, lane);
            note(Access::kWrite, std::memcmp(to, &value, bytes) != 0, to, bytes, lane);
            std::memcpy(to, &value, bytes);
        }
    });
}

void Warp::update(const Instruction& in, Frame& frame, Lanes lanes) {
    const int bytes = in.type.bits / 8;
    for_each_lane(lanes, [&](int lane) {
        uint8_t* const place = address(in, in.operands[1], frame, lane);
        note(Access::kUpdate, true, place, bytes, lane);
        uint64_t before = 0;
        std::memcpy(&before, place, bytes);
        const uint64_t after = combined(in, before, get(in.operands[2], frame, lane));
        std::memcpy(place, &after, bytes);
        frame.value(in.operands[0].place, lane) = before;
    });
}

void Warp::reduce(const Instruction& in, Frame& frame, Lanes lanes) {
    uint64_t result = get(in.operands[1], frame, std::countr_zero(lanes));
    for_each_lane(lanes & (lanes - 1), [&](int lane) {
        result = combined(in, result, get(in.operands[1], frame, lane));
    });
    result = truncated(result, in.type.bits);
    for_each_lane(lanes, [&](int lane) { frame.value(in.operands[0].place, lane) = result; });
}

void Warp::shuffle(const Instruction& in, Frame& frame, Lanes lanes) {
    if (in.mode != "bfly"_w && in.mode != "idx"_w) throw UnknownInstruction(in);
    std::array<uint64_t, kLanes> before{};
    for_each_lane(lanes, [&](int lane) { before[lane] = get(in.operands[1], frame, lane); });
    for_each_lane(lanes, [&](int lane) {
        const auto by = static_cast<int>(get(in.operands[2], frame, lane) & (kLanes - 1));
        const uint64_t value = before[in.mode == "bfly"_w ? lane ^ by : by];
        frame.value(in.operands[0].place, lane) = truncated(value, 32);
    });
}

void Warp::vote(const Instruction& in, Frame& frame, Lanes lanes) {
    if (in.mode != "ballot"_w) throw UnknownInstruction(in);
    Lanes votes = 0;
    for_each_lane(lanes, [&](int lane) {
        if (get(in.operands[1], frame, lane) & 1) votes |= bit(lane);
    });
    for_each_lane(lanes, [&](int lane) { frame.value(in.operands[0].place, lane) = votes; });
}

void Warp::enter(const Instruction& in, Frame& frame, Lanes lanes) {
    const Function& callee = *in.callee;
    Frame called(callee, lanes);
    called.call = &in;
    called.began = now_;
    called.local = frame.local + (frame.function->local_bytes + 15) / 16 * 16;
    if (called.local + callee.local_bytes > Block::kLocalBytes)
        throw Error("the stack is full: " + in.text);
    for_each_lane(lanes, [&](int lane) {
        for (size_t i = 0; i < in.arguments.size(); ++i) {
            const Parameter& to = callee.parameters[i];
            const uint8_t* const from = frame.parameter(lane) + in.arguments[i];
            std::memcpy(called.parameter(lane) + to.offset, from, to.bytes);
        }
    });
    frames_.push_back(std::move(called));
}

void Warp::leave() {
    Frame left = std::move(frames_.back());
    frames_.pop_back();
    if (frames_.empty()) return;
    const Parameter& returned = left.function->returned;
    const auto value_of = [&](int lane) { return left.parameter(lane) + returned.offset; };
    const int to = left.call->returned;
    for_each_lane(to >= 0 ? left.lanes : 0, [&](int lane) {
        std::memcpy(frames_.back().parameter(lane) + to, value_of(lane), returned.bytes);
    });
    if (!left.function->is_watched) return;
    const uint8_t* const value = value_of(std::countr_zero(left.lanes));
    block_.watched_.push_back({now_ - left.began, {value, value + returned.bytes}});
}

Block::Block(const Program& program, const Function& entry, int warps)
    : program_(program),
      entry_(entry),
      num_warps_(warps),
      dynamic_shared_((program.shared_bytes + 127) / 128 * 128),
      shared_(dynamic_shared_ + kSharedBytes, 0x55),  // what others have left there
      spent_(program.sources.size()),
      races_(static_cast<int>(shared_.size()), warps) {}

int64_t Block::run(const Arguments& arguments) {
    std::vector<Warp> warps;
    for (int i = 0; i < num_warps_; ++i) warps.emplace_back(*this, i, entry_, arguments);
    const auto runs = [](const Warp& warp) { return !warp.has_ended() && !warp.is_waiting(); };
    while (!std::ranges::all_of(warps, &Warp::has_ended)) {
        // The warp that is behind, as warps look at each other's flags; a few steps at once.
        Warp* behind = nullptr;
        for (Warp& warp : warps) {
            if (runs(warp) && (behind == nullptr || warp.now() < behind->now())) behind = &warp;
        }
        constexpr int kSteps = 16;
        for (int i = 0; behind != nullptr && i < kSteps && behind->step(); ++i) {
        }
        release_some(warps);
        if (std::ranges::none_of(warps, runs)) end_segment(warps);
    }
    return now_;
}

// Warps that wait for each other, and not for the block, go on when all of them are there.
void Block::release_some(std::vector<Warp>& warps) {
    std::vector<Warp*> there;
    for (Warp& warp : warps) {
        if (warp.is_waiting() && warp.waits_for() > 0) there.push_back(&warp);
    }
    if (there.empty() || there.size() * kLanes != there[0]->waits_for()) return;
    const int64_t now = std::ranges::max(there, {}, &Warp::now)->now();
    for (Warp* warp : there) warp->go_on_behind(now);
}

void Block::end_segment(std::vector<Warp>& warps) {
    const auto slowest = std::ranges::max_element(warps, {}, &Warp::now);
    segments_.push_back(
        {slowest->now() - now_, static_cast<int>(slowest - warps.begin()), slowest->source()});
    for (size_t i = 0; i < spent_.size(); ++i) spent_[i] += slowest->spent()[i];
    now_ = slowest->now();
    for (Warp& warp : warps) warp.go_on(now_);
}

}  // namespace ptx
