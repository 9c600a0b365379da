#pragma once
// All-gather over shared memory, for tensor parallelism.
#include <memory>
#include <vector>

#include "shm/channel.hpp"

namespace moeserve {

/// Each rank's region has two buffers ("parts") that alternate. A buffer may be written again one
/// call later, because a rank that has rung the next call has read this one. Larger data is
/// transferred in several rounds.
class Gather {
public:
    static size_t region_bytes(size_t part_bytes);

    Gather(std::shared_ptr<Channel> channel, size_t part_bytes);

    /// Concatenates the columns: row t of out [rows, size * row_bytes] has row t of all ranks. rows
    /// and row_bytes must be the same on all ranks.
    void columns(const void* x, size_t rows, size_t row_bytes, void* out, double timeout_s);

    /// Concatenates the rows: out [sum(counts), row_bytes] has all ranks' rows in rank order. This
    /// rank has counts[index].
    void rows(const void* x, const std::vector<size_t>& counts, size_t row_bytes, void* out, double timeout_s);

    void leave() { channel_->leave(); }

private:
    struct Head {
        uint64_t row_bytes, rows;
    };

    std::byte* part(int member) const;
    void publish(const void* x, size_t rows, size_t row_bytes, double timeout_s);
    const std::byte* read(int member, size_t rows, size_t row_bytes) const;
    size_t rows_per_round(size_t row_bytes) const;

    std::shared_ptr<Channel> channel_;
    const size_t part_bytes_;
    uint64_t round_ = 0;
};

}  // namespace moeserve
