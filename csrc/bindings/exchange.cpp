// torch.classes.megatron_ext.Exchange: the exchange of exchange.h over tensors.

#include "megatron_ext/exchange.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "checks.h"
#include "megatron_ext/seal.h"

// Of Python's stable ABI, so that a build needs no headers of Python.
extern "C" {
int PyGILState_Ensure();
void PyGILState_Release(int state);
int PyErr_CheckSignals();
void PyErr_Fetch(void** type, void** value, void** traceback);
void PyErr_Restore(void* type, void* value, void* traceback);
}

namespace megatron_ext {
namespace {

using at::Tensor;

// What a handler raised; Torch would make a RuntimeError of it. Read and written under the GIL.
void* raised[3];

// Run Python's handlers of the signals that have come; throws if one raises.
void heed_signals() {
    const int state = PyGILState_Ensure();
    const bool has_raised = PyErr_CheckSignals() != 0;
    if (has_raised) PyErr_Fetch(&raised[0], &raised[1], &raised[2]);
    PyGILState_Release(state);
    if (has_raised) throw std::runtime_error("a signal ended the wait for another rank");
}

GradType grad_type(const Tensor& grads) {
    switch (grads.scalar_type()) {
        case at::kFloat:
            return GradType::kFloat32;
        case at::kDouble:
            return GradType::kFloat64;
        case at::kBFloat16:
            return GradType::kBFloat16;
        default:
            TORCH_CHECK_VALUE(false,
                              "slot_grads must be float32, float64 or bfloat16, got ",
                              grads.scalar_type());
    }
}

// Checks what the caller's tensors must be, and keeps alive what is used after a call.
class TensorExchange : public torch::CustomClassHolder {
  public:
    TensorExchange(int64_t rank, double timeout_s, int64_t max_delay_us)
        : rank_(rank), reach_(rank) {
        check_timeout(timeout_s);
        check_number("max_delay_us", max_delay_us, 0, 1'000'000);
        exchange_ = std::make_unique<Exchange>(rank, timeout_s, max_delay_us, heed_signals);
    }

    void set_processes(const std::vector<int64_t>& by_rank) {
        check_length("processes", by_rank.size(), reach_.num_ranks());
        open().set_processes(by_rank);
    }

    // `by_rank`: the ranks' regions as bytes, zeroed; none for a rank that is out of reach, to or
    // from which nothing may move. So with segments.
    void set_flags(std::vector<Tensor> by_rank) {
        Exchange& exchange = open();
        reach_.set_flags(by_rank);
        max_slots_ = by_rank[rank_].numel() / static_cast<int64_t>(sizeof(SlotFlags));
        exchange.set_flags(starts_of<SlotFlags>(by_rank));
        keep(std::move(by_rank));
    }

    // `by_rank`: each rank's [S, *shape] buffer of one segment.
    int64_t add_segment(std::vector<Tensor> by_rank) {
        Exchange& exchange = open();
        reach_.check_segment(by_rank, max_slots_);
        const Tensor& like = by_rank[rank_];
        const int64_t segment = exchange.add_segment(
            starts_of<std::byte>(by_rank), static_cast<int64_t>(like.nbytes()) / like.size(0));
        buffers_.push_back(like);
        keep(std::move(by_rank));
        return segment;
    }

    // Start a push; see `PushTask`.
    //   segments    ids of the segments
    //   mains       the mains' segments, main after main, in the order of the copies from mains
    //   copies      for each copy: rank and slot where it comes from if it is relayed, else -1 -1;
    //               then the number of destinations, then rank and slot of each
    //   expected    rank that fills and slot, for each used slot of this rank
    //   slots       expert in each slot of each rank, int32 [R, S]: what all ranks push by
    int64_t start_push(const std::vector<int64_t>& segments,
                       std::vector<Tensor> mains,
                       const std::vector<int64_t>& copies,
                       const std::vector<int64_t>& expected,
                       const Tensor& slots,
                       std::string label) {
        Exchange& exchange = open();
        const int64_t num_slots = check_segments(segments, buffers_);
        const Tensor held = slots.contiguous();
        check_slots(held, reach_.num_ranks(), num_slots, at::kCPU);
        PushTask task{segments,
                      {},
                      num_slots,
                      reach_.places("expected", expected, num_slots),
                      std::move(label),
                      sealed_words(held.const_data_ptr<int32_t>(), held.numel(), 0, 0, 1)};
        size_t from_mains = 0;
        for (size_t i = 0; i < copies.size();) {
            TORCH_CHECK_VALUE(copies.size() - i > 2,
                              "copies must each be a source, a number and destinations, got ",
                              copies.size() - i,
                              " numbers for the last one");
            CopyTask copy{{},
                          {copies[i], copies[i + 1]},
                          reach_.places("copies", copies, num_slots, i + 3, copies[i + 2])};
            i += 3 + 2 * copy.destinations.size();
            if (is_main(copy)) {
                ++from_mains;
            } else {
                reach_.check("copies", copy.relayed, num_slots);
            }
            task.copies.push_back(std::move(copy));
        }
        check_length("mains", mains.size(), from_mains * segments.size());
        size_t used = 0;
        for (CopyTask& copy : task.copies) {
            if (!is_main(copy)) continue;
            for (const int64_t segment : segments) {
                copy.main_segments.push_back(main_segment(mains[used++], segment));
            }
        }
        const uint64_t generation = exchange.start_push(std::move(task));
        mains_ = std::move(mains);  // those of the last push are not in use any more
        return static_cast<int64_t>(generation);
    }

    void finish_push(int64_t generation) { open().finish_push(static_cast<uint64_t>(generation)); }

    // Start adding gradients; see `PullTask`.
    //   totals    for each main with replicas, its segments' totals
    //   asides    likewise, what is added to their sums, or nothing
    //   replicas  for each such main: the number of replicas, then rank and slot of each
    //   computed  rank of the main and slot, for each used slot of this rank
    int64_t start_pull(const std::vector<int64_t>& segments,
                       const std::vector<Tensor>& totals,
                       const std::vector<std::optional<Tensor>>& asides,
                       const std::vector<int64_t>& replicas,
                       const std::vector<int64_t>& computed,
                       std::string label) {
        Exchange& exchange = open();
        const int64_t num_slots = check_segments(segments, buffers_);
        PullTask task{
            segments, {}, {}, reach_.places("computed", computed, num_slots), std::move(label)};
        for (const int64_t segment : segments) {
            task.types.push_back(grad_type(buffers_[segment]));
        }
        for (size_t i = 0; i < replicas.size();) {
            task.sums.push_back(
                {reach_.places("replicas", replicas, num_slots, i + 1, replicas[i]), {}});
            i += 1 + 2 * task.sums.back().replicas.size();
        }
        check_length("totals", totals.size(), task.sums.size() * segments.size());
        check_length("asides", asides.size(), totals.size());
        size_t used = 0;
        for (SumTask& sum : task.sums) {
            for (const int64_t segment : segments) {
                sum.totals.push_back(total_of(totals[used], asides[used], segment));
                ++used;
            }
        }
        pull_ = static_cast<int64_t>(exchange.start_pull(std::move(task)));
        sums_ = totals;
        for (const auto& aside : asides) {
            if (aside.has_value()) sums_.push_back(*aside);
        }
        return pull_;
    }

    void finish_pull(int64_t generation) {
        open().finish_pull(static_cast<uint64_t>(generation));
        if (generation == pull_) sums_.clear();
    }

    static int64_t table_bytes(int64_t num_ranks, int64_t num_words) {
        return row_table(num_ranks, num_words).bytes();
    }

    // `by_rank`: the ranks' regions of `table_bytes`, zeroed.
    void set_table(std::vector<Tensor> by_rank, int64_t num_words) {
        Exchange& exchange = open();
        const RowTable table = row_table(static_cast<int64_t>(by_rank.size()), num_words);
        reach_.check_table(by_rank, table);
        exchange.set_table(starts_of<std::byte>(by_rank), table);
        table_ = table;
        keep(std::move(by_rank));
    }

    // Rows [R, W] of all ranks, each with as many words as `row`, int64 [W]; in new memory or
    // `into`.
    Tensor gather(const Tensor& row, const std::string& label, const std::optional<Tensor>& into) {
        check_row(row, at::kCPU, table_);
        Tensor rows = rows_for(row, table_, into);
        open().gather(
            row.const_data_ptr<int64_t>(), row.numel(), rows.mutable_data_ptr<int64_t>(), label);
        return rows;
    }

    int64_t abort() {
        aborted_at_ = static_cast<int64_t>(open().abort());
        return *aborted_at_;
    }
    void restart(int64_t generation) {
        Exchange& exchange = open();
        check_restart(generation, aborted_at_);
        exchange.restart(static_cast<uint64_t>(generation));
        aborted_at_.reset();
    }

    // End the thread and let the memory go.
    void close() {
        exchange_.reset();
        kept_.clear();
        buffers_.clear();
        mains_.clear();
        sums_.clear();
    }

  private:
    Exchange& open() {
        TORCH_CHECK(exchange_ != nullptr, "this transport is closed");
        return *exchange_;
    }

    void keep(std::vector<Tensor> tensors) {
        kept_.insert(kept_.end(), tensors.begin(), tensors.end());
    }

    // Where the ranks' regions start; null for a rank that is out of reach.
    template <class Start>
    static std::vector<Start*> starts_of(const std::vector<Tensor>& by_rank) {
        std::vector<Start*> starts;
        for (const Tensor& each : by_rank) {
            starts.push_back(each.numel() > 0 ? static_cast<Start*>(each.mutable_data_ptr())
                                              : nullptr);
        }
        return starts;
    }

    static bool is_main(const CopyTask& copy) {
        return copy.relayed.rank == -1 && copy.relayed.slot == -1;
    }

    MainSegment main_segment(const Tensor& main, int64_t segment) const {
        const Tensor& slots = buffers_[segment];
        if (!is_shorter(main, slots)) check_like_slot("main", main, slots, slots.scalar_type());
        return {static_cast<const std::byte*>(main.const_data_ptr()),
                static_cast<int64_t>(main.nbytes())};
    }

    Total total_of(const Tensor& total, const std::optional<Tensor>& aside, int64_t segment) const {
        const Tensor& slots = buffers_[segment];
        const auto type = total.scalar_type();
        check_like_slot("total", total, slots, total_type(type, slots.scalar_type()));
        if (aside.has_value()) check_like_slot("aside", *aside, slots, type);
        return {total.mutable_data_ptr(),
                aside.has_value() ? aside->const_data_ptr() : nullptr,
                grad_type(total)};
    }

    const int64_t rank_;
    Reach reach_;
    int64_t max_slots_ = 0;
    RowTable table_{};
    std::vector<Tensor> kept_;           // the ranks' regions: their mappings live as long as these
    std::vector<Tensor> buffers_;        // for each segment, this rank's: shape and dtype
    std::vector<Tensor> mains_;          // of the last push
    std::vector<Tensor> sums_;           // totals of the pull under way, and what was set aside
    int64_t pull_ = 0;                   // generation of the last one
    std::optional<int64_t> aborted_at_;  // until the restart
    std::unique_ptr<Exchange> exchange_;  // goes first: its thread uses the memory above
};

}  // namespace
}  // namespace megatron_ext

// Raise what a handler of a signal raised in a wait, if one did; for ctypes.PyDLL.
extern "C" __attribute__((visibility("default"))) void megatron_ext_raise() {
    using megatron_ext::raised;
    if (void* const type = std::exchange(raised[0], nullptr)) {
        PyErr_Restore(type, raised[1], raised[2]);
    }
}

TORCH_LIBRARY_FRAGMENT(megatron_ext, m) {
    m.class_<megatron_ext::TensorExchange>("Exchange")
        .def(torch::init<int64_t, double, int64_t>())
        .def("set_processes", &megatron_ext::TensorExchange::set_processes)
        .def("set_flags", &megatron_ext::TensorExchange::set_flags)
        .def("add_segment", &megatron_ext::TensorExchange::add_segment)
        .def("start_push", &megatron_ext::TensorExchange::start_push)
        .def("finish_push", &megatron_ext::TensorExchange::finish_push)
        .def("start_pull", &megatron_ext::TensorExchange::start_pull)
        .def("finish_pull", &megatron_ext::TensorExchange::finish_pull)
        .def_static("table_bytes", &megatron_ext::TensorExchange::table_bytes)
        .def("set_table", &megatron_ext::TensorExchange::set_table)
        .def("gather", &megatron_ext::TensorExchange::gather)
        .def("abort", &megatron_ext::TensorExchange::abort)
        .def("restart", &megatron_ext::TensorExchange::restart)
        .def("close", &megatron_ext::TensorExchange::close);
}
