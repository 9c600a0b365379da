#pragma once
// Dispatch and combine of one micro-batch over shared memory; docs/decisions/0007 says why rows are pulled.
#include <array>
#include <memory>
#include <vector>

#include "core/weighted_sum.hpp"
#include "shm/channel.hpp"

namespace moeserve {

/// What all members agreed on when they met. Row sizes in bytes: x as dispatched, y as the experts write it.
struct Shape {
    size_t experts_per_rank, max_tokens, top_k, x_row_bytes, y_row_bytes;
};

/// Each rank's region holds two turns. A turn belongs to one dispatch until its combine was waited for, and holds the
/// rows that this rank sends (x), sorted pairs that say who takes which, and what its experts make of what it took (y).
///
/// Why a turn may be written again without asking: a peer has read x before it rings its combine, which this rank waits
/// for before the turn is free; and it has read y before it rings its next dispatch in the turn, which this rank waits
/// for before experts write. Calls out of this order throw std::logic_error.
class Exchange {
public:
    static constexpr int kTurns = 2;
    static size_t region_bytes(size_t num_ranks, const Shape& shape);

    Exchange(std::shared_ptr<Channel> channel, const Shape& shape);

    /// Writes rows x to this rank's region, sorted pairs beside them, and rings. Returns the turn taken. Throws before
    /// anything is sent: std::length_error beyond the agreed shape, std::out_of_range for an id that is no expert.
    int dispatch(const int32_t* ids, size_t tokens, size_t top_k, const void* x);

    /// Waits until all others dispatched. counts[e]: rows that came for local expert e; ends[e]: their sum up to e.
    /// Returns the sum of all.
    size_t await_rows(int turn, double timeout_s, int64_t* counts, int64_t* ends);

    /// Copies the rows out of all regions, ordered by (local expert, source rank, token, k).
    void take_rows(int turn, void* out) const;

    /// Where in the own region the experts' results for this turn go, in the same order.
    size_t y_offset(int turn) const { return Channel::kHead + turn * turn_bytes_ + y_at_; }
    size_t y_capacity() const;
    size_t num_experts() const { return shape_.experts_per_rank; }

    /// Says that y is written.
    void combine(int turn);

    /// Waits until all others combined; sums the results of this rank's tokens into out. Frees the turn.
    void await_sums(int turn, double timeout_s, const float* weights, Element element, size_t dim, void* out);

    /// When the last of the others' rows (of the call waited for last) lay ready; 0 without others.
    int64_t arrived_ns(int turn) const { return turns_[turn].arrived_ns; }

    void leave() { channel_->leave(); }

private:
    enum class Stage { free, sent, received, combined, broken };

    struct Turn {
        Stage stage = Stage::free;
        uint64_t call = 0;
        size_t tokens = 0, top_k = 0, rows = 0;
        int64_t arrived_ns = 0;
        std::vector<uint32_t> order;  // pair at each sorted place
    };

    struct View;  // one rank's turn in memory
    View view(int member, int turn) const;
    Turn& expect(int turn, Stage stage, const char* what);
    void find_rows(int turn, std::vector<const void*>& rows) const;

    std::shared_ptr<Channel> channel_;
    const Shape shape_;
    size_t first_at_, tokens_at_, start_at_, x_at_, y_at_, turn_bytes_;
    std::array<Turn, kTurns> turns_;
    std::vector<std::byte> zeros_;  // what a pair that went nowhere adds
    std::vector<const void*> rows_;
};

}  // namespace moeserve
