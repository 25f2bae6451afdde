// PTX, as a machine runs it: functions of instructions, whose operands are registers by number.
//
// parse() of ptx.cpp reads what nvcc makes of integer code. Words are kept as numbers, as "add"_w.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace ptx {

using Word = uint64_t;  // of up to 8 letters; 0: none

constexpr Word word(std::string_view text) {
    Word packed = 0;
    for (const char letter : text) packed = packed << 8 | static_cast<uint8_t>(letter);
    return packed;
}
constexpr Word operator""_w(const char* text, size_t length) { return word({text, length}); }

struct Type {
    char kind = 'b';  // b, f, p, s or u
    int bits = 32;
};

struct Operand {
    enum Kind {
        kRegister,
        kNumber,
        kSpecial,
        kShared,
        kDynamicShared,
        kLocal,
        kParameter,
        kVector,
        kName
    };
    Kind kind = kNumber;
    int place = 0;                // number of the register, or bytes from the begin of the space
    int64_t offset = 0;           // is added; of a number, the number
    std::vector<Operand> vector;  // of kVector
    std::string name;
};

struct Function;

struct Instruction {
    Word op = 0;
    Type type;
    Type from;         // of cvt
    Word space = 0;    // "global"_w, "shared"_w, "local"_w, "param"_w; 0: of any
    Word mode = 0;     // half of a product, comparison, operation of atom and redux, ...
    Word combine = 0;  // of setp: with a further predicate
    bool with_carry = false;
    bool sets_carry = false;
    bool to_space = false;  // cvta.to
    int width = 1;          // numbers of a vector
    int predicate = -1;     // register, or -1
    bool is_negated = false;
    std::vector<Operand> operands;

    int target = -1;        // of a branch, in Function::code
    bool is_short = false;  // a branch that the assembler makes a predicate of
    int guard = -1;         // predicate of the short branch that this is behind, or -1

    const Function* callee = nullptr;
    std::vector<int> arguments;  // bytes from the begin of the caller's parameters
    int returned = -1;           // the same, or -1

    int source = 0;  // in Program::sources
    std::string text;
};

struct Parameter {
    int offset;
    int bytes;
};

struct Function {
    std::string name;
    bool is_entry = false;
    bool is_watched = false;  // its calls are kept
    std::vector<Parameter> parameters;
    Parameter returned{0, 0};
    std::map<std::string, int> places;  // of these and of its calls' parameters, in bytes
    int parameter_bytes = 0;            // of all of them, for a lane
    std::string local_name;
    int local_bytes = 0;
    int num_registers = 0;
    std::vector<Instruction> code;
};

struct Source {  // a line, and the function that it has become a part of
    const Function* function;
    int file;
    int line;
};

struct Program {
    std::map<std::string, Function> functions;
    std::map<int, std::string> files;
    std::vector<Source> sources;
    int shared_bytes = 0;  // that functions declare
};

struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct UnknownInstruction : Error {
    explicit UnknownInstruction(const Instruction& in) : Error("unknown instruction: " + in.text) {}
};

Program parse(const std::string& text);

}  // namespace ptx
