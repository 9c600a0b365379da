#include "pool/expert_cache.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>

#ifndef O_DIRECT
#define O_DIRECT 0
#endif

namespace moeserve {
namespace {

constexpr size_t kPage = 4096;           // memory page and disk block: direct reads must be aligned to it
constexpr size_t kPart = 1 << 20;        // bytes of one read
constexpr size_t kReaders = 4;           // reads at the same time: fewer leave a disk idle
constexpr size_t kAhead = 2 * kReaders;  // most experts being read at once: the others wait for slots that become free
constexpr size_t kHuge = 2 << 20;
constexpr double kLargest = 1e200;

size_t up(size_t bytes, size_t step) { return (bytes + step - 1) / step * step; }

int open_again(int descriptor, int flags) {
    return open(("/proc/self/fd/" + std::to_string(descriptor)).c_str(), O_RDONLY | O_CLOEXEC | flags);
}

}  // namespace

ExpertCache::ExpertCache(int descriptor, std::string name) : name_(std::move(name)) {
    plain_ = open_again(descriptor, 0);
    if (plain_ < 0) throw std::runtime_error(name_ + ": " + std::strerror(errno));
    if (O_DIRECT) direct_ = open_again(descriptor, O_DIRECT);  // some file systems do not support it
}

ExpertCache::~ExpertCache() {
    {
        const std::lock_guard lock(mutex_);
        ends_ = true;
    }
    work_.notify_all();
    for (std::thread& reader : readers_) reader.join();
    if (memory_) munmap(memory_, up(slots_.size() * slot_bytes_, kHuge));
    if (direct_ >= 0) close(direct_);
    if (plain_ >= 0) close(plain_);
}

size_t ExpertCache::add(size_t offset, size_t num_experts, size_t expert_bytes) {
    if (memory_) throw std::invalid_argument("layers are added before memory is taken");
    if (offset % kUnit || expert_bytes % kUnit || !num_experts || !expert_bytes) {
        throw std::invalid_argument("experts are of whole units of 64 bytes, and begin at them");
    }
    layers_.push_back({experts_.size(), num_experts, expert_bytes});
    for (size_t i = 0; i < num_experts; ++i) experts_.push_back({layers_.size() - 1, offset + i * expert_bytes});
    slot_bytes_ = std::max(slot_bytes_, up(expert_bytes + kPage - kUnit, kPage));  // an expert may begin anywhere in a page
    return layers_.size() - 1;
}

void ExpertCache::open(size_t bytes) {
    const size_t count = slot_bytes_ ? std::min(bytes / slot_bytes_, experts_.size()) : 0;
    if (memory_ || !count) throw std::invalid_argument("memory is taken once, for one expert at least");
    const size_t size = up(count * slot_bytes_, kHuge);
    void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    memory_ = static_cast<uint8_t*>(memory);
#if defined(MADV_HUGEPAGE)
    madvise(memory, size, MADV_HUGEPAGE);  // may be refused
#endif
    std::memset(memory, 0, size);  // allocates all pages, so that the memory no longer counts as free
    slots_.resize(count);
    for (size_t i = count; i-- > 0;) empty_.push_back(i);
    for (size_t i = 0; i < kReaders; ++i) readers_.emplace_back([this] { live(); });
}

void ExpertCache::visit(size_t layer, const std::vector<size_t>& counts, const std::vector<size_t>& expected,
                        const std::function<void(const std::vector<Held>&)>& compute) {
    const std::lock_guard one(callers_);
    const Layer& all = layers_.at(layer);
    if (counts.size() != all.count || !memory_) throw std::invalid_argument("expected one count per expert, after memory was taken");
    std::unique_lock lock(mutex_);
    settle(all, counts);
    weight_ *= std::exp2(1 / (kHalfLife * static_cast<double>(layers_.size())));
    if (weight_ > kLargest) {
        for (Expert& expert : experts_) expert.score /= weight_;
        weight_ = 1;
        for (const auto& [score, slot] : std::exchange(evictable_, {})) allow_eviction(slot);
    }
    std::vector<Held> ready;
    std::vector<size_t> coming, missing;
    bool guessed = expected.empty() || layer + 1 == layers_.size();
    for (size_t i = all.count; i-- > 0;) {
        if (!counts[i]) continue;
        Expert& expert = experts_[all.first + i];
        if (expert.slot >= 0) evictable_.erase({expert.score, static_cast<size_t>(expert.slot)});
        expert.score += weight_;
        stats_.hits += expert.slot >= 0;
        stats_.misses += expert.slot < 0;
        if (expert.slot < 0) {
            missing.push_back(all.first + i);
            continue;
        }
        slots_[static_cast<size_t>(expert.slot)].pinned = true;
        if (slots_[static_cast<size_t>(expert.slot)].left) coming.push_back(all.first + i);
        else ready.push_back(held(all.first + i));
    }
    for (;;) {
        if (!error_.empty()) throw std::runtime_error(error_);
        while (!missing.empty() && coming.size() < kAhead && begin_read(missing.back(), true)) {
            coming.push_back(missing.back());
            missing.pop_back();
        }
        if (!guessed && missing.empty()) {
            expect(layers_[layer + 1], expected);
            guessed = true;
        }
        const auto there = std::partition(coming.begin(), coming.end(), [this](size_t expert) {
            return slots_[static_cast<size_t>(experts_[expert].slot)].left != 0;
        });
        for (auto it = there; it != coming.end(); ++it) ready.push_back(held(*it));
        coming.erase(there, coming.end());
        if (ready.empty()) {
            if (coming.empty() && missing.empty()) return;
            const auto start = std::chrono::steady_clock::now();
            changed_.wait(lock);
            stats_.stall_ns += static_cast<uint64_t>((std::chrono::steady_clock::now() - start) / std::chrono::nanoseconds(1));
            continue;
        }
        lock.unlock();
        compute(ready);
        lock.lock();
        for (const Held& one : ready) {
            const size_t slot = static_cast<size_t>(experts_[all.first + one.expert].slot);
            slots_[slot].pinned = false;
            allow_eviction(slot);
        }
        ready.clear();
    }
}

ExpertCache::Stats ExpertCache::take_stats() {
    const std::lock_guard lock(mutex_);
    return std::exchange(stats_, {});
}

/// Prefetches the experts that a layer is likely to use.
void ExpertCache::expect(const Layer& layer, const std::vector<size_t>& experts) {
    for (const size_t expert : experts) {
        if (expert < layer.count && experts_[layer.first + expert].slot < 0) begin_read(layer.first + expert, false);
    }
}

/// Handles the unfinished prefetches of a layer when its step begins: those that it uses get high
/// priority, those that it does not use are dropped unless their reads have begun.
void ExpertCache::settle(const Layer& layer, const std::vector<size_t>& counts) {
    for (const Read& part : std::exchange(expected_, {})) {
        Slot& slot = slots_[part.slot];
        const size_t expert = slot.expert - layer.first;  // at least layer.count if it belongs to another layer
        if (expert < layer.count && counts[expert]) {
            wanted_.push_back(part);
        } else if (expert >= layer.count || slot.begun) {
            expected_.push_back(part);
        } else if (--slot.left == 0) {
            experts_[std::exchange(slot.expert, kNone)].slot = -1;
            empty_.push_back(part.slot);
        }
    }
}

/// Allocates a slot for an expert and queues its reads. Returns false if no slot is free.
bool ExpertCache::begin_read(size_t expert, bool wanted) {
    const size_t place = free_slot();
    if (place == kNone) return false;
    Slot& slot = slots_[place];
    if (slot.expert != kNone) experts_[slot.expert].slot = -1;
    slot = {expert, 0, wanted, false};
    experts_[expert].slot = static_cast<int>(place);
    const size_t least = experts_[expert].offset % kPage + layers_[experts_[expert].layer].bytes, bytes = up(least, kPage);
    for (size_t begin = 0; begin < bytes; begin += kPart, ++slot.left) {
        const size_t size = std::min(kPart, bytes - begin);
        (wanted ? wanted_ : expected_).push_back({place, begin, size, std::min(size, least - begin)});
    }
    work_.notify_all();
    return true;
}

/// Returns an empty slot, or evicts the expert with the lowest score that is not pinned. Returns
/// kNone if there is none.
size_t ExpertCache::free_slot() {
    if (!empty_.empty()) {
        const size_t slot = empty_.back();
        empty_.pop_back();
        return slot;
    }
    if (evictable_.empty()) return kNone;
    return evictable_.extract(evictable_.begin()).value().second;
}

/// Allows the expert in a slot to be evicted. It must be in memory and not pinned.
void ExpertCache::allow_eviction(size_t slot) { evictable_.emplace(experts_[slots_[slot].expert].score, slot); }

ExpertCache::Held ExpertCache::held(size_t expert) const {
    const Expert& one = experts_[expert];
    return {expert - layers_[one.layer].first, (static_cast<size_t>(one.slot) * slot_bytes_ + one.offset % kPage) / kUnit};
}

void ExpertCache::live() {
    std::unique_lock lock(mutex_);
    for (;;) {
        work_.wait(lock, [this] { return ends_ || !wanted_.empty() || !expected_.empty(); });
        if (ends_) return;
        std::deque<Read>& queue = wanted_.empty() ? expected_ : wanted_;
        const Read part = queue.front();
        queue.pop_front();
        slots_[part.slot].begun = true;
        const size_t expert = slots_[part.slot].expert, offset = experts_[expert].offset / kPage * kPage + part.begin;
        lock.unlock();
        std::string error;
        try {
            read(part, offset);
        } catch (const std::exception& thrown) {
            error = thrown.what();
        }
        lock.lock();
        stats_.read_bytes += part.least;
        if (!error.empty() && error_.empty()) error_ = where(expert) + error;
        Slot& slot = slots_[part.slot];
        --slot.left;
        if (slot.left == 0 && !slot.pinned) allow_eviction(part.slot);
        if (slot.left == 0 || !error.empty()) changed_.notify_all();
    }
}

void ExpertCache::read(const Read& part, size_t offset) {
    uint8_t* to = memory_ + part.slot * slot_bytes_ + part.begin;
    int file = direct_ >= 0 ? direct_ : plain_;
    for (size_t done = 0; done < part.least;) {
        const ssize_t count = pread(file, to + done, part.bytes - done, static_cast<off_t>(offset + done));
        if (count > 0) {
            done += static_cast<size_t>(count);
        } else if (count == 0) {
            throw std::runtime_error("it ends at byte " + std::to_string(offset + done));
        } else if (errno == EINVAL && file == direct_) {
            file = plain_;
        } else if (errno != EINTR) {
            throw std::runtime_error(std::strerror(errno));
        }
        if (done % kPage) file = plain_;  // the file's end
    }
}

std::string ExpertCache::where(size_t expert) const {
    const size_t layer = experts_[expert].layer;
    return "expert " + std::to_string(expert - layers_[layer].first) + " of MoE layer " + std::to_string(layer) +
           " cannot be read from " + name_ + ", which was changed or is on a damaged disk (start again: the file is then "
           "made anew): ";
}

}  // namespace moeserve
