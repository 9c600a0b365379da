#pragma once
// Dispatch and combine of one micro-batch over shared memory. docs/decisions/0007 explains why rows
// are pulled.
#include <array>
#include <memory>
#include <vector>

#include "core/weighted_sum.hpp"
#include "shm/channel.hpp"

namespace moeserve {

/// The sizes that all members agreed on when they joined. Bytes per row: x as dispatched, y as the
/// experts write it.
struct Shape {
    size_t experts_per_rank, max_tokens, top_k, x_row_bytes, y_row_bytes;
};

/// Each rank's region has two buffers, so that two dispatches may be in flight. A buffer belongs to
/// one dispatch until `await_sums` of its combine. It has the activations that this rank sends (x),
/// the sorted pairs that tell other ranks which rows to read, and the outputs of this rank's
/// experts (y).
///
/// A buffer may be reused without further synchronization:
/// - A peer has read x before it rings its combine, which this rank waits for before the buffer is
///   free.
/// - A peer has read y before it rings its next dispatch in the buffer, which this rank waits for
///   before experts write y. Calls out of this order throw std::logic_error.
class Exchange {
public:
    static constexpr int kBuffers = 2;
    static size_t region_bytes(size_t num_ranks, const Shape& shape);

    Exchange(std::shared_ptr<Channel> channel, const Shape& shape);

    /// Writes rows x and the sorted pairs to this rank's region, and rings. Returns the index of
    /// the buffer. Throws before anything is sent: std::length_error beyond the agreed shape,
    /// std::out_of_range for an invalid expert id.
    int dispatch(const int32_t* ids, size_t tokens, size_t top_k, const void* x);

    /// Waits until all others have dispatched. Returns the number of rows for this rank's experts.
    /// counts[e]: rows for local expert e; ends[e]: their sum up to and including e.
    size_t await_rows(int buffer, double timeout_s, int64_t* counts, int64_t* ends);

    /// Copies these rows from all regions to `out`, ordered by (local expert, source rank, token,
    /// k).
    void take_rows(int buffer, void* out) const;

    /// Offset of y in the own region, where the experts' outputs go, in the same order.
    size_t y_offset(int buffer) const { return Channel::kHead + buffer * buffer_bytes_ + y_at_; }
    size_t y_capacity() const;
    size_t num_experts() const { return shape_.experts_per_rank; }

    /// Signals that y is written.
    void combine(int buffer);

    /// Waits until all others have called `combine`, writes the weighted sums of this rank's tokens
    /// to `out`, and frees the buffer.
    void await_sums(int buffer, double timeout_s, const float* weights, Element element, size_t dim, void* out);

    /// The time (`now_ns`) when the last of the other ranks was ready in the call that was waited
    /// for last; 0 without others.
    int64_t arrived_ns(int buffer) const { return buffers_[buffer].arrived_ns; }

    void leave() { channel_->leave(); }

private:
    enum class Stage { free, sent, received, combined, broken };

    struct Buffer {
        Stage stage = Stage::free;
        uint64_t call = 0;
        size_t tokens = 0, top_k = 0, rows = 0;
        int64_t arrived_ns = 0;
        std::vector<uint32_t> order;  // the pair at each sorted place
    };

    struct View;
    View view(int member, int buffer) const;
    Buffer& expect(int buffer, Stage stage, const char* what);
    void find_rows(int buffer, std::vector<const void*>& rows) const;

    std::shared_ptr<Channel> channel_;
    const Shape shape_;
    size_t first_at_, tokens_at_, start_at_, x_at_, y_at_, buffer_bytes_;
    std::array<Buffer, kBuffers> buffers_;
    std::vector<std::byte> zeros_;  // the row of pairs without an expert
    std::vector<const void*> rows_;
};

}  // namespace moeserve
