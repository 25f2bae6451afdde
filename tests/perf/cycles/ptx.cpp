#include "ptx.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <set>
#include <sstream>
#include <string_view>

namespace ptx {
namespace {

// What a modifier may choose, and those that change nothing here.
const std::set<std::string_view> kModes = {"add", "and", "ballot", "bfly", "eq", "exch", "ge",
                                           "gt",  "hi",  "hs",     "idx",  "l",  "le",   "lo",
                                           "ls",  "lt",  "max",    "min",  "ne", "or",   "wide"};
const std::set<std::string_view> kSpaces = {"global", "shared", "local", "param"};
const std::set<std::string_view> kSpecials = {
    "%tid.x", "%laneid", "%ctaid.x", "%ctaid.y", "%nctaid.x", "%ntid.x"};
const std::set<std::string_view> kNothing = {
    "sync", "uni", "nc", "cta", "aligned", "approx", "wrap"};

std::string trimmed(std::string_view text) {
    while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front())))
        text.remove_prefix(1);
    while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back())))
        text.remove_suffix(1);
    return std::string(text);
}

bool begins(std::string_view text, std::string_view with) {
    return text.substr(0, with.size()) == with;
}

// The parts between `by`, but for those within brackets.
std::vector<std::string> split(std::string_view text, char by) {
    std::vector<std::string> parts;
    int depth = 0;
    size_t begin = 0;
    for (size_t i = 0; i < text.size(); ++i) {
        if (std::strchr("([{", text[i]) != nullptr) ++depth;
        if (std::strchr(")]}", text[i]) != nullptr) --depth;
        if (text[i] != by || depth > 0) continue;
        parts.push_back(trimmed(text.substr(begin, i - begin)));
        begin = i + 1;
    }
    const std::string last = trimmed(text.substr(begin));
    if (!last.empty()) parts.push_back(last);
    return parts;
}

bool parse_type(std::string_view text, Type& type) {
    if (text == "pred") {
        type = {'p', 1};
        return true;
    }
    if (text.size() < 2 || std::strchr("bfsu", text[0]) == nullptr || !std::isdigit(text[1]))
        return false;
    type = {text[0], std::atoi(std::string(text.substr(1)).c_str())};
    return true;
}

// Of a declaration, as ".param .align 8 .b8 name[48]".
struct Declared {
    std::string name;
    int align = 1;
    int bytes = 0;
};

Declared parse_declared(const std::string& text) {
    Declared declared;
    std::istringstream words(text);
    std::string word;
    while (words >> word) {
        Type type;
        if (word == ".align") {
            words >> declared.align;
        } else if (word[0] == '.' && parse_type(word.substr(1), type)) {
            declared.bytes = type.bits / 8;
            declared.align = std::max(declared.align, declared.bytes);
        } else {
            declared.name = word;
        }
    }
    const size_t bracket = declared.name.find('[');
    if (bracket != std::string::npos) {
        declared.bytes *= std::atoi(declared.name.c_str() + bracket + 1);
        declared.name.resize(bracket);
    }
    return declared;
}

int aligned(int offset, int align) { return (offset + align - 1) / align * align; }

// The text, without comments, from its begin to its end.
class Scanner {
  public:
    explicit Scanner(const std::string& text) {
        std::istringstream lines(text);
        for (std::string line; std::getline(lines, line);)
            text_ += line.substr(0, line.find("//")) + '\n';
    }

    bool at_end() {
        while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) ++at_;
        return at_ == text_.size();
    }
    bool is_at(std::string_view what) const {
        return begins(std::string_view(text_).substr(at_), what);
    }

    // Up to one of these, which `end` tells and which is skipped.
    std::string until(const char* ends, char& end) {
        const size_t found = text_.find_first_of(ends, at_);
        if (found == std::string::npos) throw Error("PTX ends within a statement");
        const std::string text = trimmed(std::string_view(text_).substr(at_, found - at_));
        end = text_[found];
        at_ = found + 1;
        return text;
    }
    std::string until(char end) {
        const char ends[] = {end, 0};
        return until(ends, end);
    }

    // A name and a colon, or nothing.
    std::string label() {
        size_t end = at_;
        while (std::isalnum(static_cast<unsigned char>(text_[end])) ||
               std::strchr("$_", text_[end]))
            ++end;
        if (end == at_ || text_[end] != ':') return "";
        const std::string name = text_.substr(at_, end - at_);
        at_ = end + 1;
        return name;
    }

    void skip(size_t count) { at_ += count; }

  private:
    std::string text_;
    size_t at_ = 0;
};

class Parser {
  public:
    explicit Parser(const std::string& text) : scan_(text) {}

    Program parse() {
        while (!scan_.at_end()) parse_directive();
        for (auto& [name, function] : program_.functions) {
            link(function);
            mark_short_branches(function);
        }
        return std::move(program_);
    }

  private:
    void parse_directive() {
        if (scan_.is_at(".section")) {
            scan_.until('}');
        } else if (scan_.is_at(".file")) {
            parse_file(scan_.until('\n'));
        } else if (scan_.is_at(".version") || scan_.is_at(".target") ||
                   scan_.is_at(".address_size")) {
            scan_.until('\n');
        } else {
            char end;
            const std::string head = scan_.until(";{", end);
            if (end == '{') {
                parse_function(head);
            } else if (head.find(".shared") != std::string::npos) {
                declare_shared(head);
            }
        }
    }

    void parse_file(const std::string& line) {
        const size_t quote = line.find('"');
        program_.files[std::atoi(line.c_str() + 5)] =
            line.substr(quote + 1, line.find('"', quote + 1) - quote - 1);
    }

    void declare_shared(const std::string& text) {
        const Declared declared = parse_declared(text);
        if (begins(text, ".extern")) {
            dynamic_shared_ = declared.name;
            return;
        }
        program_.shared_bytes = aligned(program_.shared_bytes, declared.align);
        shared_[declared.name] = program_.shared_bytes;
        program_.shared_bytes += declared.bytes;
    }

    // Place for a parameter: the function's own, or of what it calls.
    Parameter declare_parameter(const std::string& text) {
        const Declared declared = parse_declared(text);
        const auto [found, is_new] = function_->places.try_emplace(declared.name, 0);
        if (is_new) {
            // A call's parameters have the same names as another's, and other sizes.
            constexpr int kMostOfCall = 64;
            function_->parameter_bytes = aligned(function_->parameter_bytes, 16);
            found->second = function_->parameter_bytes;
            function_->parameter_bytes += std::max(declared.bytes, kMostOfCall);
        }
        return {found->second, declared.bytes};
    }

    // ".visible .func (.param .b64 returned) name(.param .b64 first, ...) .maxntid 512, 1, 1"
    void parse_function(const std::string& head) {
        const size_t entry = head.find(".entry");
        std::string rest =
            trimmed(head.substr((entry != std::string::npos ? entry : head.find(".func")) + 6));
        Function function;
        function.is_entry = entry != std::string::npos;
        function_ = &function;
        if (rest[0] == '(') {
            const size_t end = rest.find(')');
            const std::string returned = rest.substr(1, end - 1);
            function.returned = declare_parameter(returned);
            rest = trimmed(rest.substr(end + 1));
        }
        const size_t open = rest.find('(');
        function.name = trimmed(rest.substr(0, rest.find_first_of("( \t\n")));
        if (open != std::string::npos) {
            for (const std::string& each :
                 split(rest.substr(open + 1, rest.find(')') - open - 1), ',')) {
                function.parameters.push_back(declare_parameter(each));
            }
        }
        function_ = &(program_.functions[function.name] = function);
        registers_.clear();
        labels_[function_].clear();
        source_of_.clear();
        set_source(0, 0);
        for (int depth = 1; depth > 0;) parse_statement(depth);
    }

    void parse_statement(int& depth) {
        if (scan_.at_end()) throw Error(function_->name + " does not end");
        if (scan_.is_at("{") || scan_.is_at("}")) {
            depth += scan_.is_at("{") ? 1 : -1;
            scan_.skip(1);
            return;
        }
        const std::string label = scan_.label();
        if (!label.empty()) {
            labels_[function_][label] = static_cast<int>(function_->code.size());
            return;
        }
        if (scan_.is_at(".loc\t")) {
            int file, line;
            const std::string text = scan_.until('\n');
            // Line 0: code of no line, which counts to the line before.
            if (std::sscanf(text.c_str(), ".loc %d %d", &file, &line) == 2 && line > 0)
                set_source(file, line);
            return;
        }
        const std::string text = scan_.until(';');
        if (text[0] != '.') {
            parse_instruction(text);
        } else if (begins(text, ".local")) {
            const Declared declared = parse_declared(text);
            function_->local_name = declared.name;
            function_->local_bytes = declared.bytes;
        } else if (begins(text, ".shared")) {
            declare_shared(text);
        } else if (begins(text, ".param")) {
            declare_parameter(text);
        } else if (!begins(text, ".reg") && !begins(text, ".pragma")) {
            throw Error("unknown directive: " + text);
        }
    }

    void set_source(int file, int line) {
        const int next = static_cast<int>(program_.sources.size());
        const auto [found, is_new] = source_of_.try_emplace({file, line}, next);
        if (is_new) program_.sources.push_back({function_, file, line});
        source_ = found->second;
    }

    void parse_instruction(const std::string& text) {
        Instruction in;
        in.text = text;
        in.source = source_;
        std::string rest = text;
        const auto take_word = [&] {
            const size_t end = std::min(rest.find_first_of(" \t\n"), rest.size());
            const std::string word = rest.substr(0, end);
            rest = trimmed(rest.substr(end));
            return word;
        };
        if (rest[0] == '@') {
            std::string predicate = take_word().substr(1);
            in.is_negated = predicate[0] == '!';
            in.predicate = register_of(predicate.substr(in.is_negated ? 1 : 0));
        }
        parse_name(take_word(), in);
        if (in.op == "call"_w) {
            parse_call(rest, in);
        } else {
            for (const std::string& each : split(rest, ',')) {
                // shfl also says whether there is such a lane, which nobody asks for.
                in.operands.push_back(parse_operand(each.substr(0, each.find('|'))));
            }
        }
        function_->code.push_back(std::move(in));
    }

    // "ld.shared.v2.u32"
    static void parse_name(const std::string& name, Instruction& in) {
        const std::vector<std::string> parts = split(name, '.');
        in.op = word(parts[0]);
        in.with_carry = parts[0] == "addc" || parts[0] == "subc" || parts[0] == "madc";
        if (in.with_carry) in.op = word(parts[0].substr(0, 3));
        int types = 0;
        for (size_t i = 1; i < parts.size(); ++i) {
            const std::string& part = parts[i];
            Type type;
            if (parse_type(part, type)) {
                (types++ == 0 ? in.type : in.from) = type;
            } else if (kSpaces.contains(part)) {
                in.space = word(part);
            } else if (kModes.contains(part)) {
                (in.mode == 0 ? in.mode : in.combine) = word(part);
            } else if (part == "v2" || part == "v4") {
                in.width = part[1] - '0';
            } else if (part == "warp") {
                in.op = "syncwarp"_w;
            } else if (part == "cc" || part == "to") {
                (part == "cc" ? in.sets_carry : in.to_space) = true;
            } else if (!kNothing.contains(part)) {
                throw UnknownInstruction(in);
            }
        }
    }

    // "(retval0), name, (param0, param1)"
    void parse_call(const std::string& text, Instruction& in) {
        std::vector<std::string> parts = split(text, ',');
        const auto inner = [](const std::string& list) {
            return split(list.substr(1, list.size() - 2), ',');
        };
        if (parts[0][0] == '(') {
            in.returned = function_->places.at(inner(parts[0])[0]);
            parts.erase(parts.begin());
        }
        in.operands.resize(1);
        in.operands[0].kind = Operand::kName;
        in.operands[0].name = parts[0];
        if (parts.size() < 2) return;
        for (const std::string& each : inner(parts[1]))
            in.arguments.push_back(function_->places.at(each));
    }

    int register_of(const std::string& name) {
        const auto [found, is_new] = registers_.try_emplace(name, function_->num_registers);
        function_->num_registers += is_new;
        return found->second;
    }

    Operand parse_operand(std::string text) {
        text = trimmed(text);
        if (text[0] == '[') return parse_operand(text.substr(1, text.size() - 2));
        Operand operand;
        if (text[0] == '{') {
            operand.kind = Operand::kVector;
            for (const std::string& each : split(text.substr(1, text.size() - 2), ',')) {
                operand.vector.push_back(parse_operand(each));
            }
            return operand;
        }
        if (begins(text, "0f")) {  // the bits of a float
            operand.offset = std::stoll(text.substr(2), nullptr, 16);
            return operand;
        }
        if (std::isdigit(text[0]) || text[0] == '-') {
            operand.offset = text[0] == '-' ? std::stoll(text)
                                            : static_cast<int64_t>(std::stoull(text, nullptr, 0));
            return operand;
        }
        const size_t plus = text.find('+');
        if (plus != std::string::npos) {
            operand = parse_operand(text.substr(0, plus));
            operand.offset += std::stoll(text.substr(plus + 1));
            return operand;
        }
        return parse_name_operand(text);
    }

    Operand parse_name_operand(const std::string& name) {
        Operand operand;
        operand.name = name;
        if (kSpecials.contains(name)) {
            operand.kind = Operand::kSpecial;
        } else if (name[0] == '%') {
            operand.kind = Operand::kRegister;
            operand.place = register_of(name);
        } else if (const auto place = function_->places.find(name);
                   place != function_->places.end()) {
            operand.kind = Operand::kParameter;
            operand.place = place->second;
        } else if (name == function_->local_name) {
            operand.kind = Operand::kLocal;
        } else if (name == dynamic_shared_) {
            operand.kind = Operand::kDynamicShared;
        } else if (const auto shared = shared_.find(name); shared != shared_.end()) {
            operand.kind = Operand::kShared;
            operand.place = shared->second;
        } else {
            operand.kind = Operand::kName;
        }
        return operand;
    }

    void link(Function& function) {
        for (Instruction& in : function.code) {
            if (in.op == "bra"_w) {
                const auto label = labels_[&function].find(in.operands[0].name);
                if (label == labels_[&function].end()) throw Error("no such label: " + in.text);
                in.target = label->second;
            } else if (in.op == "call"_w) {
                const auto callee = program_.functions.find(in.operands[0].name);
                if (callee == program_.functions.end()) throw Error("no such function: " + in.text);
                in.callee = &callee->second;
            }
        }
    }

    // A forward branch over a few plain instructions is no branch in the end: the assembler gives
    // these instructions its predicate.
    static void mark_short_branches(Function& function) {
        constexpr int kMost = 7;
        for (int at = 0; at < static_cast<int>(function.code.size()); ++at) {
            Instruction& branch = function.code[at];
            const int between = branch.target - at - 1;
            if (branch.op != "bra"_w || branch.predicate < 0 || between < 0 || between > kMost)
                continue;
            const auto first = function.code.begin() + at + 1;
            const std::set<Word> real = {
                "bra"_w, "call"_w, "ret"_w, "syncwarp"_w, "bar"_w, "redux"_w, "vote"_w, "shfl"_w};
            branch.is_short = std::none_of(first, first + between, [&](const Instruction& in) {
                return real.contains(in.op);
            });
            if (!branch.is_short) continue;
            for (auto in = first; in != first + between; ++in) in->guard = branch.predicate;
        }
    }

    Scanner scan_;
    Program program_;
    Function* function_ = nullptr;  // that is read
    std::map<std::string, int> registers_;
    std::map<std::pair<int, int>, int> source_of_;
    int source_ = 0;
    std::map<const Function*, std::map<std::string, int>> labels_;
    std::map<std::string, int> shared_;
    std::string dynamic_shared_;
};

}  // namespace

Program parse(const std::string& text) { return Parser(text).parse(); }

}  // namespace ptx
