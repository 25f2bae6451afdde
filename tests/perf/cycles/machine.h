// A block of warps that runs a kernel's PTX, and how many cycles that may take.
//
// Lanes that part run one after the other, those that are behind first, until they meet again; a
// collective waits for its lanes. Addresses are the host's own, but for those of shared memory.
//
// What time is, for a warp:
//
// 1. Each instruction takes issue slots. A register has a time from which it is ready, and what
//    needs it starts then. Within a basic block nothing else waits: the assembler moves
//    instructions that are ready before others.
// 2. What ends a basic block waits for its operands: branches, calls, returns, __syncwarp.
// 3. Loads stay behind stores before them, and stores behind loads: addresses are not compared.
// 4. A short forward branch does not wait for its predicate; what it may skip does.
// 5. A barrier takes as long as its slowest warp.
//
// Not in it: caches of code, schedulers that warps share, conflicts of shared memory's banks,
// registers that are kept in memory around calls, and of global memory more than one latency.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ptx.h"
#include "races.h"

namespace ptx {

constexpr int kLanes = 32;
using Lanes = uint32_t;                               // a bit each
using Arguments = std::vector<std::vector<uint8_t>>;  // of a kernel: bytes of each parameter

// A call of a function, by some lanes of a warp.
struct Frame {
    const Function* function;
    const Instruction* call = nullptr;  // that made it
    Lanes lanes;
    Lanes returned = 0;
    Lanes waiting = 0;  // at a collective
    Lanes carry = 0;
    int64_t began = 0;
    int local = 0;                    // bytes of a lane's stack that are the callers'
    std::array<int, kLanes> at{};     // next instruction of a lane
    std::vector<uint64_t> registers;  // [number][lane]
    std::vector<int64_t> ready;       // [number] cycle
    std::vector<uint8_t> parameters;  // [lane][Function::parameter_bytes]

    Frame(const Function& called, Lanes by);
    uint64_t& value(int number, int lane) { return registers[number * kLanes + lane]; }
    uint8_t* parameter(int lane) { return parameters.data() + lane * function->parameter_bytes; }
};

// A call of a function that is watched: what it took, and what it returned.
struct Watched {
    int64_t cycles;
    std::vector<uint8_t> returned;
};

struct Segment {  // between two barriers of the block
    int64_t cycles;
    int warp;    // the slowest
    int source;  // where it ends
};

class Block;

class Warp {
  public:
    Warp(Block& block, int number, const Function& entry, const Arguments& arguments);

    // Run an instruction; false if the warp waits for others or has ended.
    bool step();
    void go_on(int64_t now);         // after a barrier of the block
    void go_on_behind(int64_t now);  // after one of some warps

    int64_t now() const { return now_; }
    bool has_ended() const { return frames_.empty(); }
    bool is_waiting() const { return is_waiting_; }
    uint64_t waits_for() const { return waits_for_; }  // threads; 0 where it waits for the block
    int source() const { return source_; }
    const std::vector<int64_t>& spent() const { return spent_; }

  private:
    // machine.cpp
    Lanes choose(Frame& frame);
    void execute(const Instruction& in, Frame& frame, Lanes lanes);
    void compute(const Instruction& in, Frame& frame, Lanes lanes);
    void move(const Instruction& in, Frame& frame, Lanes lanes);
    void convert_address(const Instruction& in, Frame& frame, Lanes lanes);
    void load(const Instruction& in, Frame& frame, Lanes lanes);
    void store(const Instruction& in, Frame& frame, Lanes lanes);
    void update(const Instruction& in, Frame& frame, Lanes lanes);
    void reduce(const Instruction& in, Frame& frame, Lanes lanes);
    void shuffle(const Instruction& in, Frame& frame, Lanes lanes);
    void vote(const Instruction& in, Frame& frame, Lanes lanes);
    void enter(const Instruction& in, Frame& frame, Lanes lanes);
    void leave();
    void proceed(int64_t now);
    void note(Access access, bool changes, const uint8_t* place, int bytes, int lane);
    uint64_t get(const Operand& operand, Frame& frame, int lane);
    uint8_t* address(const Instruction& in, const Operand& operand, Frame& frame, int lane);
    Lanes lanes_of(const Instruction& in, Frame& frame, int lane);
    uint64_t special(const std::string& name, int lane) const;

    // timing.cpp
    struct Cost;
    void spend(const Instruction& in, Frame& frame, int lane);
    Cost cost_of(const Instruction& in, Frame& frame, int lane);
    int64_t load_latency(const Instruction& in, Frame& frame, int lane);

    Block& block_;
    const int number_;
    std::vector<Frame> frames_;
    std::vector<uint8_t> stacks_;  // [lane] of local memory
    Passed passed_;
    int64_t now_ = 0;
    int64_t last_load_ = 0;
    int64_t last_store_ = 0;
    bool is_waiting_ = false;
    uint64_t waits_for_ = 0;
    int source_ = 0;
    std::vector<int64_t> spent_;  // since the last barrier, by source
};

class Block {
  public:
    Block(const Program& program, const Function& entry, int warps);

    int64_t run(const Arguments& arguments);  // cycles

    const std::vector<Segment>& segments() const { return segments_; }
    const std::vector<int64_t>& spent() const { return spent_; }  // of the slowest warps, by source
    const std::vector<Watched>& watched() const { return watched_; }
    const Races& races() const { return races_; }

  private:
    friend class Warp;
    static constexpr int kSharedBytes = 227 << 10;  // of Hopper, behind what any kernel declares
    static constexpr int kLocalBytes = 16 << 10;    // of a lane

    static void release_some(std::vector<Warp>& warps);
    void end_segment(std::vector<Warp>& warps);

    const Program& program_;
    const Function& entry_;
    const int num_warps_;
    int dynamic_shared_;  // bytes that are declared
    std::vector<uint8_t> shared_;
    int64_t now_ = 0;
    std::vector<Segment> segments_;
    std::vector<int64_t> spent_;
    std::vector<Watched> watched_;
    Races races_;
};

}  // namespace ptx
