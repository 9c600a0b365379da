#include "shm/gather.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/rows.hpp"

namespace moeserve {
namespace {

constexpr size_t kHead = 64;

size_t stride(size_t part_bytes) { return (kHead + part_bytes + 4095) / 4096 * 4096; }

}  // namespace

size_t Gather::region_bytes(size_t part_bytes) { return Channel::kHead + 2 * stride(part_bytes); }

Gather::Gather(std::shared_ptr<Channel> channel, size_t part_bytes)
    : channel_(std::move(channel)), part_bytes_(part_bytes) {
    if (channel_->bytes() < 2 * stride(part_bytes)) throw std::logic_error("the region is smaller than two parts");
}

std::byte* Gather::part(int member) const { return channel_->memory(member) + (round_ % 2) * stride(part_bytes_); }

size_t Gather::rows_per_round(size_t row_bytes) const {
    if (row_bytes > part_bytes_) {
        throw std::length_error("a row of " + std::to_string(row_bytes) + " bytes is larger than the " +
                                std::to_string(part_bytes_) + " of a gather's part");
    }
    return row_bytes ? part_bytes_ / row_bytes : 1;
}

void Gather::publish(const void* x, size_t rows, size_t row_bytes, double timeout_s) {
    std::byte* own = part(channel_->index());
    const Head head{row_bytes, rows};
    std::memcpy(own, &head, sizeof head);
    if (rows * row_bytes > 0) std::memcpy(own + kHead, x, rows * row_bytes);
    channel_->wait(channel_->ring(Call::gather), timeout_s);
}

const std::byte* Gather::read(int member, size_t rows, size_t row_bytes) const {
    Head head;
    std::memcpy(&head, part(member), sizeof head);
    if (head.rows != rows || head.row_bytes != row_bytes) {
        const auto text = [](uint64_t n, uint64_t bytes) {
            return "gather of " + std::to_string(n) + " rows x " + std::to_string(bytes) + " bytes";
        };
        channel_->diverged(member, text(head.rows, head.row_bytes), text(rows, row_bytes));
    }
    return part(member) + kHead;
}

void Gather::columns(const void* x, size_t rows, size_t row_bytes, void* out, double timeout_s) {
    const size_t each = rows_per_round(row_bytes), pitch = channel_->size() * row_bytes;
    const std::byte* from = static_cast<const std::byte*>(x);
    std::byte* to = static_cast<std::byte*>(out);
    for (size_t start = 0; start < rows; start += each, ++round_) {
        const size_t count = std::min(each, rows - start);
        publish(from + start * row_bytes, count, row_bytes, timeout_s);
        for (int member = 0; member < channel_->size(); ++member) {
            spread_rows(to + start * pitch + member * row_bytes, pitch, read(member, count, row_bytes), count, row_bytes);
        }
    }
}

void Gather::rows(const void* x, const std::vector<size_t>& counts, size_t row_bytes, void* out, double timeout_s) {
    if (counts.size() != static_cast<size_t>(channel_->size())) throw std::invalid_argument("expected one count per rank");
    const size_t each = rows_per_round(row_bytes), most = *std::max_element(counts.begin(), counts.end());
    const std::byte* from = static_cast<const std::byte*>(x);
    for (size_t start = 0; start < most; start += each, ++round_) {
        const auto in_round = [&](int member) { return std::min(each, counts[member] - std::min(start, counts[member])); };
        publish(from + start * row_bytes, in_round(channel_->index()), row_bytes, timeout_s);
        std::byte* to = static_cast<std::byte*>(out);
        for (int member = 0; member < channel_->size(); ++member) {
            const size_t count = in_round(member);
            const std::byte* theirs = read(member, count, row_bytes);
            if (count > 0) std::memcpy(to + start * row_bytes, theirs, count * row_bytes);
            to += counts[member] * row_bytes;
        }
    }
}

}  // namespace moeserve
