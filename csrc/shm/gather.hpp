#pragma once
// Every rank's rows or columns, at every rank: what tensor parallelism needs.
#include <memory>
#include <vector>

#include "shm/channel.hpp"

namespace moeserve {

/// Each rank's region holds two parts, used in turn. A part is free again after one more call: a rank that rang for that
/// one has read all of this one. Larger matters go in several rounds.
class Gather {
public:
    static size_t region_bytes(size_t part_bytes);

    Gather(std::shared_ptr<Channel> channel, size_t part_bytes);

    /// out [rows, size * row_bytes]: row t of all ranks side by side. rows and row_bytes must be the same on all ranks.
    void columns(const void* x, size_t rows, size_t row_bytes, void* out, double timeout_s);

    /// out [sum(counts), row_bytes]: all ranks' rows in rank order; this rank brings counts[index] of them.
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
