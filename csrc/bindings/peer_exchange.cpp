// torch.classes.megatron_ext.PeerExchange: the counterpart of Exchange (exchange.cpp) for ranks
// that reach each other's GPU memory. The kernels do the work (peer_exchange.h); this class gives
// them memory, launches them on streams and turns a failed wait into an error. Compiled in a CUDA
// build only.

#include "megatron_ext/peer_exchange.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checks.h"
#include "megatron_ext/cuda_api.h"
#include "megatron_ext/exchange.h"

namespace megatron_ext {
namespace {

using at::Tensor;
using c10::cuda::CUDAStream;
using Words = std::vector<int64_t>;

const char* name_of(PeerDeed deed) {
    switch (deed) {
        case PeerDeed::kFree:
            return "free";
        case PeerDeed::kFill:
            return "fill";
        case PeerDeed::kOfferGrad:
            return "offer the gradient of";
        case PeerDeed::kSendRow:
            return "send";
        default:
            return "take the gradient of";
    }
}

// The id of the capture of a CUDA graph that the current stream is part of; 0 outside of captures.
unsigned long long capture_id() {
    auto status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    C10_CUDA_CHECK(cudaStreamGetCaptureInfo(c10::cuda::getCurrentCUDAStream(), &status, &id));
    return status == cudaStreamCaptureStatusActive ? id : 0;
}

// A stream's work so far. Other streams may wait for it in the same capture only, or outside of
// all.
class Mark {
  public:
    explicit Mark(const CUDAStream& stream)
        : event_(c10::DeviceType::CUDA), capture_(capture_id()) {
        event_.record(stream.unwrap());
    }
    bool is_of_this_capture() const { return capture_ == capture_id(); }
    void block(const CUDAStream& stream) { event_.block(stream.unwrap()); }

  private:
    c10::Event event_;
    unsigned long long capture_;
};

// Pushes and pulls run on a stream each, which waits for the current stream at `start_...`; at
// `finish_...` the current stream waits for it. The host waits for nothing: a failed wait is an
// error of some later call.
class TensorPeerExchange : public torch::CustomClassHolder {
  public:
    // A rank with its buffers on `like`'s device, in a domain of `num_peers` ranks from
    // `first_peer` on. Kernels that push or pull have so many blocks.
    TensorPeerExchange(int64_t rank,
                       int64_t first_peer,
                       int64_t num_peers,
                       double timeout_s,
                       const Tensor& like,
                       int64_t relay_threshold,
                       int64_t push_blocks,
                       int64_t pull_blocks)
        : device_(checked_device(like)),
          first_peer_(first_peer),
          num_peers_(num_peers),
          timeout_s_(timeout_s),
          relay_threshold_(relay_threshold),
          push_blocks_(static_cast<int>(push_blocks)),
          pull_blocks_(static_cast<int>(pull_blocks)),
          push_stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device_.index())),
          // The backward pass needs no sum before its end.
          pull_stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device_.index())) {
        check_number("rank", rank, 0, kMaxRanks - 1);
        check_number("first_peer", first_peer, 0, rank);
        check_number("num_peers", num_peers, rank - first_peer + 1, kMaxRanks - first_peer);
        check_fits(first_peer + num_peers);
        check_timeout(timeout_s);
        check_number("relay_threshold", relay_threshold, 0, INT32_MAX);
        check_number("push_blocks", push_blocks, 1, kMaxBlocks);
        check_number("pull_blocks", pull_blocks, 1, kMaxBlocks);
        const c10::cuda::CUDAGuard guard(device_);
        const auto bytes = at::TensorOptions().dtype(at::kByte);
        state_ = at::zeros({sizeof(PeerState)}, bytes.device(device_));
        failure_ = at::zeros({sizeof(PeerFailure)}, bytes.pinned_memory(true));
        aborted_ = at::zeros({1}, at::TensorOptions().dtype(at::kInt).pinned_memory(true));
        self_ = {rank,
                 static_cast<int64_t>(timeout_s * 1e9),
                 0,
                 static_cast<PeerState*>(state_.mutable_data_ptr()),
                 static_cast<PeerFailure*>(failure_.mutable_data_ptr()),
                 static_cast<const uint32_t*>(aborted_.const_data_ptr())};
    }

    // Bytes of a rank's buffer of one segment.
    static int64_t segment_bytes(int64_t num_slots, int64_t slot_bytes) {
        check_number("num_slots", num_slots, 1, kMaxPeerReplicas);
        check_number("slot_bytes", slot_bytes, 1, int64_t{1} << 46);
        return PeerSegment{nullptr, num_slots, slot_bytes, slot_bytes}.bytes();
    }

    // `slots`: this rank's [S, *shape] at the start of its buffer; `addresses`: of all ranks'
    // buffers, int64 [R] on the device.
    int64_t add_segment(const Tensor& slots, const Tensor& addresses) {
        raise_failure();
        TORCH_CHECK_VALUE(
            is_memory(slots, slots.scalar_type(), device_) && slots.dim() >= 1 && slots.numel() > 0,
            "a slot buffer must have slots with elements, contiguous on ",
            device_,
            ", got ",
            kind_of(slots));
        check_fits(addresses.numel(), slots.size(0));
        check_addresses(addresses);
        const int64_t slot_bytes = static_cast<int64_t>(slots.nbytes()) / slots.size(0);
        const PeerSegment segment{
            reinterpret_cast<char* const*>(addresses.const_data_ptr<int64_t>()),
            slots.size(0),
            slot_bytes,
            slot_bytes};
        check_room("a slot buffer", slots, segment.bytes());
        slots_.push_back(slots);
        addresses_.push_back(addresses);
        segments_.push_back(segment);
        return static_cast<int64_t>(segments_.size()) - 1;
    }

    // Start a push of what a plan says, which stays on the device.
    //   segments  ids of the segments
    //   mains     all mains' segments, main after main
    //   slots     expert in each slot, int32 [R, S]; see PeerPush
    int64_t start_push(const std::vector<int64_t>& segments,
                       const std::vector<Tensor>& mains,
                       int64_t mains_per_rank,
                       const Tensor& slots,
                       const std::string& label) {
        raise_failure();
        const c10::cuda::CUDAGuard guard(device_);
        const CopyProblem problem = problem_of(segments, slots, mains_per_rank);
        check_length("mains", mains.size(), mains_per_rank * segments.size());
        Push push{label_of(label), segments_of(segments), {}, problem.num_slots, mains, slots};
        const Words addresses = addresses_of(mains, segments);
        for (size_t g = 0; g < segments.size(); ++g) {
            push.segments.each[g].used_bytes = static_cast<int64_t>(mains[g].nbytes());
        }

        // Before the slots are offered again, those of the last push must be filled: another rank
        // may fill them now. Its end is the current stream's, and then nothing of it is in use.
        finish_push(num_pushes_);
        // The current stream has changed the mains and made the plan.
        wait_for_current_stream(push_stream_);
        if (read_.has_value() && read_->is_of_this_capture()) read_->block(push_stream_);
        const c10::cuda::CUDAStreamGuard on(push_stream_);
        const Tensor table = kept_on_device(addresses);
        const int64_t bytes = PeerCopies::bytes(problem.num_ranks, problem.num_slots);
        const PeerCopies copies =
            PeerCopies::in(memory_of(copies_, bytes), problem.num_ranks, problem.num_slots);
        const PeerPush task{push.segments,
                            problem,
                            slots.const_data_ptr<int32_t>(),
                            copies,
                            static_cast<const char* const*>(table.const_data_ptr())};
        C10_CUDA_CHECK(push_peers_cuda(self(push.label), task, push_blocks_, push_stream_));
        push.used = task.copies.used;
        last_ = std::move(push);
        pushed_.emplace(push_stream_);
        return ++num_pushes_;
    }

    // Let the current stream wait until this rank's slots are filled and its mains may be changed.
    // The current stream of the next `start_push` must be behind that.
    void finish_push(int64_t push) {
        raise_failure();
        const c10::cuda::CUDAGuard guard(device_);
        if (push == num_pushes_ && pushed_.has_value()) {  // else a later push has ended it
            const CUDAStream stream = c10::cuda::getCurrentCUDAStream();
            check_capture("push", *pushed_);
            pushed_->block(stream);
            C10_CUDA_CHECK(wait_peers_cuda(
                self(last_.label), last_.segments, last_.used, last_.num_slots, stream));
            pushed_.reset();
        }
    }

    // Let later pushes wait for the current stream's work so far, which reads this rank's slots.
    void note_reads() {
        const c10::cuda::CUDAGuard guard(device_);
        const CUDAStream stream = c10::cuda::getCurrentCUDAStream();
        // Earlier reads may be of another stream. What was read before a capture began, or in a
        // graph that the current stream has replayed, is over when this work begins.
        if (read_.has_value() && read_->is_of_this_capture()) read_->block(stream);
        read_.emplace(stream);
    }

    // Start adding the gradients of what a plan says, which stays on the device.
    //   segments  ids of the segments
    //   totals    of all mains, main after main, segment by segment
    //   asides    likewise, what is added to their sums, or nothing
    //   slots     expert in each slot, int32 [R, S]; see PeerPush
    int64_t start_pull(const std::vector<int64_t>& segments,
                       const std::vector<Tensor>& totals,
                       const std::vector<std::optional<Tensor>>& asides,
                       int64_t mains_per_rank,
                       const Tensor& slots,
                       const std::string& label) {
        raise_failure();
        const c10::cuda::CUDAGuard guard(device_);
        const CopyProblem problem = problem_of(segments, slots, mains_per_rank);
        check_length("totals", totals.size(), mains_per_rank * segments.size());
        check_length("asides", asides.size(), totals.size());
        PeerPull pull{};
        pull.segments = segments_of(segments);
        pull.problem = problem;
        pull.slots = slots.const_data_ptr<int32_t>();
        for (size_t g = 0; g < segments.size(); ++g) {
            const auto type = slots_[segments[g]].scalar_type();
            TORCH_CHECK_VALUE(type == at::kFloat || type == at::kBFloat16,
                              "slot_grads on a GPU must be float32 or bfloat16, got ",
                              type);
            pull.is_bfloat16[g] = type == at::kBFloat16;
            pull.is_total_bfloat16[g] = totals.at(g).scalar_type() == at::kBFloat16;
        }
        Words addresses;
        std::vector<Tensor> used{slots};
        for (size_t i = 0; i < totals.size(); ++i) {
            const int64_t segment = segments[i % segments.size()];
            const auto type = totals.at(i % segments.size()).scalar_type();
            check_like_slot("total",
                            totals[i],
                            slots_[segment],
                            total_type(type, slots_[segment].scalar_type()));
            addresses.push_back(reinterpret_cast<intptr_t>(totals[i].mutable_data_ptr()));
            used.push_back(totals[i]);
        }
        for (size_t i = 0; i < asides.size(); ++i) {
            addresses.push_back(0);
            if (!asides[i].has_value()) continue;
            check_like_slot("aside",
                            *asides[i],
                            slots_[segments[i % segments.size()]],
                            totals[i].scalar_type());
            addresses.back() = reinterpret_cast<intptr_t>(asides[i]->const_data_ptr());
            used.push_back(*asides[i]);
        }

        // Before the slots' gradients are offered again, those of the last pull must be taken.
        finish_pull(num_pulls_);
        // The current stream has written the slots' gradients and the totals.
        wait_for_current_stream(pull_stream_);
        const c10::cuda::CUDAStreamGuard on(pull_stream_);
        Tensor words = on_device(addresses);
        const auto* const there = words.const_data_ptr<int64_t>();
        pull.totals = reinterpret_cast<char* const*>(there);
        pull.asides = reinterpret_cast<const char* const*>(there + totals.size());
        pull.sums = PeerSums::in(memory_of(sums_, PeerSums::bytes(problem)), problem);
        C10_CUDA_CHECK(
            pull_add_peers_cuda(self(label_of(label)), pull, pull_blocks_, pull_stream_));
        used.push_back(std::move(words));
        pulling_ = std::move(used);
        pulled_.emplace(pull_stream_);
        return ++num_pulls_;
    }

    // Let the current stream wait until the totals are there and this rank's slots with a replica
    // have zero gradients. The current stream of the next `start_pull` must be behind that.
    void finish_pull(int64_t pull) {
        raise_failure();
        const c10::cuda::CUDAGuard guard(device_);
        if (pull == num_pulls_ && pulled_.has_value()) {
            check_capture("pull", *pulled_);
            pulled_->block(c10::cuda::getCurrentCUDAStream());
            pulled_.reset();
            pulling_.clear();  // its memory is the current stream's again
        }
    }

    // `mine`: this rank's bytes of a table (Exchange.table_bytes), zeroed; `addresses`: of all
    // ranks' tables, int64 [R] on the device.
    void set_table(const Tensor& mine, const Tensor& addresses, int64_t num_words) {
        raise_failure();
        const RowTable table = row_table(addresses.numel(), num_words);
        check_addresses(addresses);
        TORCH_CHECK_VALUE(is_memory(mine, at::kByte, device_),
                          "a table must be contiguous bytes on ",
                          device_,
                          ", got ",
                          kind_of(mine));
        check_room("a table", mine, table.bytes());
        table_ = table;
        tables_.push_back(mine);
        tables_.push_back(addresses);
    }

    // Rows [R, W] of all ranks, each with as many words as `row`, int64 [W], on the current stream;
    // in new memory or `into`.
    Tensor gather(const Tensor& row, const std::string& label, const std::optional<Tensor>& into) {
        raise_failure();
        check_row(row, device_, table_);
        const c10::cuda::CUDAGuard guard(device_);
        Tensor rows = rows_for(row, table_, into);
        const PeerRows given{
            table_,
            reinterpret_cast<char* const*>(tables_.back().const_data_ptr<int64_t>()),
            row.const_data_ptr<int64_t>(),
            row.numel(),
            rows.mutable_data_ptr<int64_t>()};
        C10_CUDA_CHECK(
            gather_rows_cuda(self(label_of(label)), given, c10::cuda::getCurrentCUDAStream()));
        return rows;
    }

    // End waits for peers, those under way, too, until `restart`.
    void cancel() {
        TORCH_CHECK(!closed_, "this transport is closed");
        // Waits look at this word.
        *static_cast<volatile int32_t*>(aborted_.mutable_data_ptr<int32_t>()) = 1;
    }

    // End what is under way without waiting for peers; returns the highest generation used here.
    int64_t abort() {
        cancel();
        const c10::cuda::CUDAGuard guard(device_);
        // The program may have left a stream of its own, with waits that have not begun.
        C10_CUDA_CHECK(cudaDeviceSynchronize());
        PeerState state;
        C10_CUDA_CHECK(cudaMemcpy(&state, self_.state, sizeof state, cudaMemcpyDeviceToHost));
        aborted_at_ = static_cast<int64_t>(
            std::max({state.push.generation, state.pull.generation, state.gathered}));
        return *aborted_at_;
    }

    // Go on behind `generation`: the highest of all ranks, after all have aborted.
    void restart(int64_t generation) {
        check_restart(generation, std::exchange(aborted_at_, {}));
        const c10::cuda::CUDAGuard guard(device_);
        PeerState state{};
        state.push.generation = state.pull.generation = static_cast<uint64_t>(generation);
        state.gathered = static_cast<uint64_t>(generation);
        // `cudaMemcpy` may return before so few bytes have arrived, and other streams do not wait.
        const auto stream = c10::cuda::getCurrentCUDAStream();
        C10_CUDA_CHECK(
            cudaMemcpyAsync(self_.state, &state, sizeof state, cudaMemcpyHostToDevice, stream));
        C10_CUDA_CHECK(cudaStreamSynchronize(stream));
        failure_.zero_();
        aborted_.zero_();
        pushed_.reset();
        pulled_.reset();
    }

    // Throw what a wait on the device has failed with, as far as the device has come. All calls do,
    // but those from `cancel` to `restart`.
    void raise_failure() {
        TORCH_CHECK(!closed_, "this transport is closed");
        // Waits would end at once, and leave out what has not come.
        TORCH_CHECK(*static_cast<const volatile int32_t*>(aborted_.const_data_ptr<int32_t>()) == 0,
                    "this transport was cancelled, and no restart has come to its end");
        const PeerFailure& failure = *self_.failure;
        if (static_cast<const volatile PeerFailure&>(failure).is_set == 0) return;
        std::atomic_thread_fence(std::memory_order_acquire);  // the device wrote the rest before
        TORCH_CHECK(false,
                    message_of({self_.rank,
                                failure.peer,
                                name_of(failure.deed),
                                failure.slot,
                                failure.expected,
                                failure.seen,
                                timeout_s_,
                                labels_.at(failure.label)}));
    }

    // 1 once a wait has failed, else 0: int32 [1] in pinned memory, which the device writes.
    Tensor failed() const {
        constexpr int64_t kAt = offsetof(PeerFailure, is_set);
        return failure_.slice(0, kAt, kAt + static_cast<int64_t>(sizeof(uint32_t))).view(at::kInt);
    }

    // Let the memory go.
    void close() {
        slots_.clear();
        addresses_.clear();
        segments_.clear();
        main_addresses_.clear();
        tables_.clear();
        copies_.reset();
        sums_.reset();
        last_ = {};
        pulling_.clear();
        pushed_.reset();
        pulled_.reset();
        closed_ = true;
    }

  private:
    // What a push leaves for its end.
    struct Push {
        int64_t label;
        PeerSegments segments;
        const PeerPlace* used;  // [num_slots] in `copies_`
        int64_t num_slots;
        std::vector<Tensor> mains;  // read by another stream than the one they are of
        Tensor slots;               // likewise
    };

    PeerRank self(int64_t label) const {
        PeerRank self = self_;
        self.label = label;
        return self;
    }

    static at::Device checked_device(const Tensor& like) {
        TORCH_CHECK_VALUE(like.is_cuda(), "like must be on a GPU, got ", kind_of(like));
        return like.device();
    }

    // Addresses of all ranks' memory, of as many ranks each time.
    void check_addresses(const Tensor& addresses) const {
        const int64_t least = addresses_.empty() ? first_peer_ + num_peers_ : num_ranks();
        const int64_t most = addresses_.empty() ? kMaxPeerRanks : num_ranks();
        TORCH_CHECK_VALUE(is_memory(addresses, at::kLong, device_) && addresses.dim() == 1 &&
                              addresses.numel() >= least && addresses.numel() <= most,
                          "addresses must be int64 of ",
                          least,
                          " to ",
                          most,
                          " ranks, contiguous on ",
                          device_,
                          ", got ",
                          kind_of(addresses));
    }
    int64_t num_ranks() const { return addresses_.empty() ? 0 : addresses_.front().numel(); }

    // What stands at the start of a rank's memory has that much behind its own start.
    static void check_room(const char* name, const Tensor& start, int64_t bytes) {
        const int64_t behind = static_cast<int64_t>(start.storage().nbytes()) -
                               start.storage_offset() * static_cast<int64_t>(start.itemsize());
        TORCH_CHECK_VALUE(
            behind >= bytes, name, " must have memory of ", bytes, " bytes, got ", behind);
    }

    static void wait_for_current_stream(const CUDAStream& stream) {
        Mark(c10::cuda::getCurrentCUDAStream()).block(stream);
    }

    static void check_capture(const char* what, const Mark& ended) {
        TORCH_CHECK(
            ended.is_of_this_capture(),
            "a ",
            what,
            " must end in the capture of a CUDA graph in which it started, or start and end "
            "outside of captures: wait for it before the capture begins, and before it ends");
    }

    CopyProblem problem_of(const std::vector<int64_t>& segments,
                           const Tensor& slots,
                           int64_t mains_per_rank) const {
        check_slots(slots, num_ranks(), check_segments(segments, slots_), device_);
        check_number("mains_per_rank", mains_per_rank, 1, kMaxExperts);
        check_fits(slots.size(0), slots.size(1), mains_per_rank);
        return {self_.rank,
                first_peer_,
                num_peers_,
                slots.size(0),
                slots.size(1),
                mains_per_rank,
                relay_threshold_};
    }

    // Called as soon as a number is known, so that a training ends before its first step.
    static void check_fits(int64_t num_ranks, int64_t num_slots = 1, int64_t mains_per_rank = 1) {
        const CopyProblem problem{0, 0, 1, num_ranks, num_slots, mains_per_rank, 0};
        TORCH_CHECK_VALUE(problem.fits(),
                          "transport cuda is for at most ",
                          kMaxPeerRanks,
                          " ranks, ",
                          kMaxPeerReplicas,
                          " slots of all ranks together and less than ",
                          kMaxPeerExperts,
                          " experts, got ",
                          num_ranks,
                          " ranks with ",
                          num_slots,
                          " slots and ",
                          mains_per_rank,
                          " experts each; use balance.transport=collective");
    }

    // Memory of the current stream for what one call after the other compiles.
    void* memory_of(Tensor& kept, int64_t bytes) const {
        if (!kept.defined() || kept.numel() < bytes) {
            kept = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device_));
        }
        return kept.mutable_data_ptr();
    }

    // A layer's mains in memory of the push stream, which is the current one: written at the first
    // push and kept, because parameters mostly stay where they are.
    Tensor kept_on_device(const Words& addresses) {
        const bool is_captured = capture_id() != 0;
        const auto found = main_addresses_.find(addresses);
        if (found != main_addresses_.end()) {
            found->second.is_in_graph |= is_captured;
            return found->second.there;
        }
        Tensor there = on_device(addresses);
        // A captured graph writes them in each replay, where no other push finds them.
        if (is_captured) return there;
        // Mains that move would fill the memory. Pushes under way come first on its stream.
        if (main_addresses_.size() >= kMostKept) {
            std::erase_if(main_addresses_,
                          [](const auto& each) { return !each.second.is_in_graph; });
        }
        main_addresses_.emplace(addresses, Kept{there});
        return there;
    }

    // Words in memory of the current stream.
    Tensor on_device(const Words& words) const {
        const auto count = static_cast<int64_t>(words.size());
        Tensor there = at::empty({count}, at::TensorOptions().dtype(at::kLong).device(device_));
        C10_CUDA_CHECK(write_words_cuda(words.data(),
                                        count,
                                        there.mutable_data_ptr<int64_t>(),
                                        c10::cuda::getCurrentCUDAStream()));
        return there;
    }

    // Of mains, segment by segment.
    Words addresses_of(const std::vector<Tensor>& mains,
                       const std::vector<int64_t>& segments) const {
        Words addresses;
        for (size_t i = 0; i < mains.size(); ++i) {
            const Tensor& slots = slots_[segments[i % segments.size()]];
            if (!is_shorter(mains[i], slots)) {
                check_like_slot("main", mains[i], slots, slots.scalar_type());
            }
            addresses.push_back(reinterpret_cast<intptr_t>(mains[i].data_ptr()));
        }
        return addresses;
    }

    PeerSegments segments_of(const std::vector<int64_t>& ids) const {
        TORCH_CHECK_VALUE(ids.size() <= kMaxPeerSegments,
                          "an expert must have at most ",
                          kMaxPeerSegments,
                          " segments, got ",
                          ids.size());
        PeerSegments segments{{}, static_cast<int32_t>(ids.size())};
        for (size_t g = 0; g < ids.size(); ++g) segments.each[g] = segments_[ids[g]];
        return segments;
    }

    int64_t label_of(const std::string& label) {
        const auto [found, is_new] = label_ids_.try_emplace(label, labels_.size());
        if (is_new) labels_.push_back(label);
        return found->second;
    }

    // Addresses of mains on the device.
    struct Kept {
        Tensor there;
        bool is_in_graph = false;  // a captured graph reads them at its replays
    };

    static constexpr int64_t kMaxBlocks = 1 << 16;
    static constexpr size_t kMostKept = 1024;  // far more than a model's layers push from

    const at::Device device_;
    const int64_t first_peer_;
    const int64_t num_peers_;
    const double timeout_s_;
    const int64_t relay_threshold_;
    const int push_blocks_;
    const int pull_blocks_;
    const CUDAStream push_stream_;
    const CUDAStream pull_stream_;
    Tensor state_, failure_, aborted_;  // what `self_` points to
    PeerRank self_{};
    std::vector<Tensor> slots_;      // for each segment, this rank's: shape and dtype
    std::vector<Tensor> addresses_;  // for each segment, all ranks'
    std::vector<PeerSegment> segments_;
    RowTable table_{};
    std::vector<Tensor> tables_;            // this rank's, and all ranks' addresses; the last count
    std::map<Words, Kept> main_addresses_;  // for each layer
    Tensor copies_;                         // compiled anew by each push
    Push last_{};
    std::optional<Mark> pushed_;   // until the last push is finished
    std::optional<Mark> read_;     // reads of the slots so far
    Tensor sums_;                  // compiled anew by each pull
    std::vector<Tensor> pulling_;  // used by the pull under way, on another stream than theirs
    std::optional<Mark> pulled_;   // until the last pull is finished
    int64_t num_pushes_ = 0;
    int64_t num_pulls_ = 0;
    std::optional<int64_t> aborted_at_;  // until the restart
    std::vector<std::string> labels_;
    std::map<std::string, int64_t> label_ids_;
    bool closed_ = false;
};

}  // namespace
}  // namespace megatron_ext

TORCH_LIBRARY_FRAGMENT(megatron_ext, m) {
    using megatron_ext::TensorPeerExchange;
    m.class_<TensorPeerExchange>("PeerExchange")
        .def(torch::init<int64_t,
                         int64_t,
                         int64_t,
                         double,
                         const at::Tensor&,
                         int64_t,
                         int64_t,
                         int64_t>())
        .def_static("segment_bytes", &TensorPeerExchange::segment_bytes)
        .def("add_segment", &TensorPeerExchange::add_segment)
        .def("start_push", &TensorPeerExchange::start_push)
        .def("finish_push", &TensorPeerExchange::finish_push)
        .def("note_reads", &TensorPeerExchange::note_reads)
        .def("start_pull", &TensorPeerExchange::start_pull)
        .def("finish_pull", &TensorPeerExchange::finish_pull)
        .def("set_table", &TensorPeerExchange::set_table)
        .def("gather", &TensorPeerExchange::gather)
        .def("cancel", &TensorPeerExchange::cancel)
        .def("abort", &TensorPeerExchange::abort)
        .def("restart", &TensorPeerExchange::restart)
        .def("raise_failure", &TensorPeerExchange::raise_failure)
        .def("failed", &TensorPeerExchange::failed)
        .def("close", &TensorPeerExchange::close);
}
