#include "shm/exchange.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/pairs.hpp"
#include "core/rows.hpp"

namespace moeserve {
namespace {

constexpr size_t kNudgeBytes = 256 << 10;  // copying this many bytes takes about as long as a peer takes to wake up

size_t aligned(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

struct Head {
    uint64_t call;  // number of the dispatch that this buffer belongs to
    int64_t dispatched_ns, combined_ns;
};

struct Places {
    size_t first, tokens, start, x, y, end;
};

Places places(size_t num_ranks, const Shape& shape) {
    const size_t experts = num_ranks * shape.experts_per_rank, pairs = shape.max_tokens * shape.top_k;
    Places at{};
    at.first = 64;
    at.tokens = at.first + aligned((experts + 1) * 4, 64);
    at.start = at.tokens + aligned(pairs * 4, 64);
    at.x = aligned(at.start + experts * 4, 4096);
    at.y = aligned(at.x + shape.max_tokens * shape.x_row_bytes, 4096);
    at.end = aligned(at.y + num_ranks * pairs * shape.y_row_bytes, 4096);
    return at;
}

}  // namespace

/// One rank's buffer in memory.
/// first[g]: number of the rank's pairs with global experts before g.
/// tokens[j]: token of the pair at sorted place j.
/// start[r * experts_per_rank + e]: row of this rank's y where the rows of source rank r for local expert e begin.
struct Exchange::View {
    Head* head;
    uint32_t *first, *tokens, *start;
    std::byte *x, *y;
};

size_t Exchange::region_bytes(size_t num_ranks, const Shape& shape) { return Channel::kHead + kBuffers * places(num_ranks, shape).end; }

Exchange::Exchange(std::shared_ptr<Channel> channel, const Shape& shape)
    : channel_(std::move(channel)), shape_(shape), zeros_(shape.y_row_bytes) {
    const Places at = places(channel_->size(), shape);
    first_at_ = at.first, tokens_at_ = at.tokens, start_at_ = at.start, x_at_ = at.x, y_at_ = at.y, buffer_bytes_ = at.end;
    if (channel_->bytes() < kBuffers * buffer_bytes_) throw std::logic_error("the region is smaller than two buffers");
}

Exchange::View Exchange::view(int member, int buffer) const {
    std::byte* at = channel_->memory(member) + buffer * buffer_bytes_;
    return {reinterpret_cast<Head*>(at),
            reinterpret_cast<uint32_t*>(at + first_at_),
            reinterpret_cast<uint32_t*>(at + tokens_at_),
            reinterpret_cast<uint32_t*>(at + start_at_),
            at + x_at_,
            at + y_at_};
}

Exchange::Buffer& Exchange::expect(int buffer, Stage stage, const char* what) {
    Buffer& found = buffers_.at(buffer);
    if (found.stage == Stage::broken) throw Lost("this dispatch failed before; ranks of its group are gone", {});
    if (found.stage != stage) throw std::logic_error(std::string(what) + " comes out of order for its dispatch");
    return found;
}

size_t Exchange::y_capacity() const { return channel_->size() * shape_.max_tokens * shape_.top_k; }

int Exchange::dispatch(const int32_t* ids, size_t tokens, size_t top_k, const void* x) {
    const uint32_t num_experts = static_cast<uint32_t>(channel_->size() * shape_.experts_per_rank);
    if (tokens > shape_.max_tokens || top_k > shape_.top_k) {
        throw std::length_error("a dispatch of " + std::to_string(tokens) + " tokens x " + std::to_string(top_k) +
                                " experts; agreed were at most " + std::to_string(shape_.max_tokens) + " x " +
                                std::to_string(shape_.top_k));
    }
    check_ids(ids, tokens * top_k, num_experts);
    const auto free = std::find_if(buffers_.begin(), buffers_.end(), [](const Buffer& t) { return t.stage == Stage::free; });
    if (free == buffers_.end()) throw std::logic_error("two dispatches of this micro-batch are in flight; combine one first");
    const int buffer = static_cast<int>(free - buffers_.begin());
    const View own = view(channel_->index(), buffer);

    const size_t x_bytes = tokens * shape_.x_row_bytes, last = std::min(x_bytes, kNudgeBytes);
    if (x_bytes > last) std::memcpy(own.x, x, x_bytes - last);
    channel_->nudge();
    if (last > 0) std::memcpy(own.x + x_bytes - last, static_cast<const std::byte*>(x) + x_bytes - last, last);
    free->tokens = tokens, free->top_k = top_k;
    free->order.resize(tokens * top_k);
    sort_pairs(ids, tokens * top_k, num_experts, own.first, free->order.data());
    for (uint32_t j = 0; j < own.first[num_experts]; ++j) own.tokens[j] = free->order[j] / static_cast<uint32_t>(top_k);
    own.head->call = channel_->calls();
    own.head->dispatched_ns = now_ns();
    free->call = channel_->ring(Call::dispatch);
    free->stage = Stage::sent;
    return buffer;
}

size_t Exchange::await_rows(int buffer, double timeout_s, int64_t* counts, int64_t* ends) {
    Buffer& mine = expect(buffer, Stage::sent, "the wait for rows");
    mine.stage = Stage::broken;  // unless all goes well
    channel_->wait(mine.call, timeout_s);
    const int num_ranks = channel_->size();
    const size_t experts = shape_.experts_per_rank, begin = channel_->index() * experts;
    const View own = view(channel_->index(), buffer);
    mine.arrived_ns = 0;
    for (int source = 0; source < num_ranks; ++source) {
        const Head& head = *view(source, buffer).head;
        if (head.call != mine.call) {
            channel_->diverged(source, "dispatch " + std::to_string(head.call), "dispatch " + std::to_string(mine.call));
        }
        if (source != channel_->index()) mine.arrived_ns = std::max(mine.arrived_ns, head.dispatched_ns);
    }
    uint32_t row = 0;
    for (size_t expert = 0; expert < experts; ++expert) {
        const uint32_t before = row;
        for (int source = 0; source < num_ranks; ++source) {
            const uint32_t* first = view(source, buffer).first + begin + expert;
            own.start[source * experts + expert] = row;
            row += first[1] - first[0];
        }
        counts[expert] = row - before;
        ends[expert] = row;
    }
    if (row > y_capacity()) throw std::length_error("peers sent more rows than was agreed");
    mine.rows = row;
    mine.stage = Stage::received;
    return row;
}

void Exchange::take_rows(int buffer, void* out) const {
    const size_t experts = shape_.experts_per_rank, begin = channel_->index() * experts;
    std::byte* to = static_cast<std::byte*>(out);
    for (size_t expert = begin; expert < begin + experts; ++expert) {
        for (int source = 0; source < channel_->size(); ++source) {
            const View from = view(source, buffer);
            const uint32_t first = from.first[expert], count = from.first[expert + 1] - first;
            to = gather_rows(to, from.x, from.tokens + first, count, shape_.x_row_bytes);
        }
    }
}

void Exchange::combine(int buffer) {
    Buffer& mine = expect(buffer, Stage::received, "combine");
    view(channel_->index(), buffer).head->combined_ns = now_ns();
    mine.call = channel_->ring(Call::combine);
    mine.stage = Stage::combined;
}

void Exchange::await_sums(int buffer, double timeout_s, const float* weights, Element element, size_t dim, void* out) {
    Buffer& mine = expect(buffer, Stage::combined, "the wait for sums");
    if (dim * element_bytes(element) != shape_.y_row_bytes) throw std::logic_error("rows of y have another size");
    mine.stage = Stage::broken;
    channel_->wait(mine.call, timeout_s);
    mine.arrived_ns = 0;
    for (int source = 0; source < channel_->size(); ++source) {
        if (source == channel_->index()) continue;
        mine.arrived_ns = std::max(mine.arrived_ns, view(source, buffer).head->combined_ns);
    }
    if (view(channel_->index(), buffer).first[channel_->size() * shape_.experts_per_rank] == 0) {
        std::fill_n(static_cast<std::byte*>(out), mine.tokens * shape_.y_row_bytes, std::byte{0});
    } else {
        find_rows(buffer, rows_);
        weighted_sum(rows_.data(), weights, mine.tokens, mine.top_k, dim, element, out, best_isa());
    }
    mine.stage = Stage::free;
}

void Exchange::find_rows(int buffer, std::vector<const void*>& rows) const {
    const Buffer& mine = buffers_[buffer];
    const View own = view(channel_->index(), buffer);
    const size_t experts = shape_.experts_per_rank;
    rows.assign(mine.tokens * mine.top_k, zeros_.data());
    for (int owner = 0; owner < channel_->size(); ++owner) {
        const View from = view(owner, buffer);
        for (size_t expert = 0; expert < experts; ++expert) {
            const uint32_t* first = own.first + owner * experts + expert;
            const std::byte* y = from.y + size_t{from.start[channel_->index() * experts + expert]} * shape_.y_row_bytes;
            for (uint32_t j = first[0]; j < first[1]; ++j, y += shape_.y_row_bytes) rows[mine.order[j]] = y;
        }
    }
}

}  // namespace moeserve
