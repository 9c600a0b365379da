#pragma once
// Ranks of one host that call in step: shared memory to read, one-byte doorbells for who sleeps, EOF when one dies.
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "shm/region.hpp"

namespace moeserve {

enum class Call : uint8_t { dispatch, combine, gather };

/// Ranks are gone, silent or at another call. `missing`: those that did not answer.
struct Lost : std::runtime_error {
    Lost(const std::string& what, std::vector<int> missing_) : std::runtime_error(what), missing(std::move(missing_)) {}
    std::vector<int> missing;
};

int64_t now_ns();  // CLOCK_MONOTONIC, the same for all processes of a host

/// One micro-batch's connections. Every member rings the same calls in the same order; a rank that rings another one is told
/// apart at the first wait. Used by one thread at a time, except `leave`.
class Channel {
public:
    /// ranks: the members' names in messages, by index. sockets[i], regions[i]: the connection to member i and the memory
    /// that it sent, taken over; ignored at `index`, which is this rank.
    Channel(int index, std::vector<int> ranks, int ubatch, const std::vector<int>& sockets,
            std::shared_ptr<Region> own, const std::vector<int>& regions);
    ~Channel();
    Channel(const Channel&) = delete;
    Channel& operator=(const Channel&) = delete;

    /// Where a region's memory begins for those who use the channel.
    static constexpr size_t kHead = 4096;

    int index() const { return index_; }
    uint64_t calls() const { return calls_; }  // rung so far
    int size() const { return static_cast<int>(peers_.size()); }
    std::byte* memory(int member) const { return regions_[member]->data() + kHead; }
    size_t bytes() const { return regions_[index_]->bytes() - kHead; }

    /// Wakes who sleeps for this rank, some microseconds before it rings: waking up takes longer than that.
    void nudge();

    /// Tells all others that this rank's part of `call` lies ready. Returns the call's number. Throws Lost after `leave`.
    uint64_t ring(Call call);

    /// Waits until all others rang call number `number`: looks for a few microseconds, then sleeps. Throws Lost naming
    /// those that are gone (at once) or silent (after timeout_s), or when this rank leaves, or when a rank rang for
    /// something else.
    void wait(uint64_t number, double timeout_s);

    /// Throws Lost, because `member` described its call differently.
    [[noreturn]] void diverged(int member, const std::string& theirs, const std::string& ours) const;

    /// Says goodbye and wakes whoever waits; any thread, any number of times.
    void leave();

private:
    static constexpr uint64_t kRemembered = 64;  // a rank is at most a few calls ahead of another

    /// At the start of each region, written by its owner; `sleeps_for` is cleared by who rings the doorbell.
    struct Board {
        alignas(64) std::atomic<uint64_t> rung;  // calls that the owner rang
        std::array<Call, kRemembered> calls;     // the last of them
        alignas(64) std::atomic<int> sleeps_for;  // member + 1, or 0
    };

    struct Peer {
        int socket = -1;
        bool gone = false;
        bool parted = false;  // it said goodbye
    };

    Board& board(int member) const { return *reinterpret_cast<Board*>(regions_[member]->data()); }
    bool rang(int member, uint64_t number) const { return board(member).rung.load() > number; }
    bool look(int member, uint64_t number, int64_t& left_to_look_ns) const;
    void sleep(int member, uint64_t number, int64_t deadline_ns);
    void listen(Peer& peer);
    void check(int member, uint64_t number) const;
    [[noreturn]] void lost(const std::vector<int>& pending, double timeout_s);

    const int index_;
    const std::vector<int> ranks_;
    const int ubatch_;
    std::vector<Peer> peers_;
    std::vector<std::shared_ptr<Region>> regions_;
    const int64_t look_ns_;  // how long to look before going to sleep
    uint64_t calls_ = 0;
    std::atomic<bool> left_{false};
};

}  // namespace moeserve
