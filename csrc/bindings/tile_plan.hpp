// The tiles of a step's tokens, and calls of the recurrent kernels over all of them.
#pragma once

#include <pybind11/numpy.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <vector>

#include "bindings/bindings.hpp"
#include "bindings/rows.hpp"
#include "kernels/recurrence_args.hpp"
#include "pool/scratch.hpp"

namespace moeserve {

/// The tiles of a step's tokens, request by request.
class TilePlan {
  public:
    using Ints = pybind11::array_t<int32_t, pybind11::array::c_style | pybind11::array::forcecast>;

    TilePlan(Address blocks, size_t table_width, size_t block_size, const Ints& starts, const Ints& offsets)
        : per_block_(block_size / kStateTile), num_tokens_(offsets.at(offsets.size() - 1)) {
        if (offsets.size() != starts.size() + 1) throw std::invalid_argument("expected one offset more than starts");
        for (pybind11::ssize_t row = 0; row < starts.size(); ++row) {
            const int64_t* table = at<int64_t>(blocks) + row * table_width;
            const size_t begin = offsets.at(row), end = offsets.at(row + 1);
            size_t position = starts.at(row);
            for (size_t token = begin, count; token < end; token += count, position += count) {
                const size_t tile = position / kStateTile, first = position % kStateTile;
                count = std::min(kStateTile - first, end - token);
                if (tile / per_block_ >= table_width) throw std::out_of_range("a position beyond its row's blocks");
                tiles_.push_back({token, count, first, table[tile / per_block_], int64_t(tile % per_block_), -1, -1});
                if (!tile) continue;
                tiles_.back().before_block = table[(tile - 1) / per_block_];
                tiles_.back().before_place = int64_t((tile - 1) % per_block_);
            }
            if (begin < end) runs_.push_back(tiles_.size());
        }
    }

    StateTiles tiles() const { return {tiles_.data(), runs_.data(), runs_.size() - 1, per_block_}; }
    size_t num_tokens() const { return num_tokens_; }

  private:
    size_t per_block_, num_tokens_;
    std::vector<StateTile> tiles_;
    std::vector<size_t> runs_{0};
};

/// Computes all pieces of a call, on the pool's threads if `elements` are worth it, and zeroes the
/// padding rows.
template <class Args>
void compute(void (*kernel)(void*, size_t, size_t, int), Args& args, const TilePlan& plan, size_t num_rows, size_t width,
             size_t elements) {
    std::memset(args.out + plan.num_tokens() * width, 0, (num_rows - plan.num_tokens()) * width * sizeof(float));
    const bool alone = elements < kWorthSharing;
    const std::shared_ptr<Pool> threads = pool();
    const size_t floats = args.scratch_floats() * (alone ? 1 : threads->size());
    args.scratch = reinterpret_cast<float*>(scratch(Scratch::recurrence, floats * sizeof(float)));
    if (alone) return kernel(&args, 0, args.pieces(), 0);
    std::optional<pybind11::gil_scoped_release> unlocked;
    if (PyGILState_Check()) unlocked.emplace();
    threads->share(args.pieces(), 1, {kernel, &args});
}

/// Computes the recurrence. If there are too few heads to keep all threads busy, several share the
/// values of a head.
inline void recur(RecurrenceArgs& args, const TilePlan& plan, size_t num_rows) {
    const size_t wanted = 2 * pool()->size(), there = std::max<size_t>(args.plan.num_runs * args.heads, 1);
    const size_t parts = pool()->size() == 1 ? 1 : std::max<size_t>((wanted + there - 1) / there, 1);
    args.columns = std::max<size_t>(RecurrenceArgs::padded((args.v + parts - 1) / parts), 64);
    args.columns = std::min(args.columns, RecurrenceArgs::padded(args.v));
    compute(kernels()->recurrence, args, plan, num_rows, args.heads * args.v,
            plan.num_tokens() * args.heads * args.d * args.v);
}

}  // namespace moeserve
