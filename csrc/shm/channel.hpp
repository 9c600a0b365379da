#pragma once
// Synchronization of the ranks of one host: flags in shared memory, a one-byte message on a socket
// to wake a rank that sleeps, and EOF on the socket when a rank dies.
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

/// Thrown if ranks are dead, silent or in another call. `missing`: the ranks that did not answer.
struct Lost : std::runtime_error {
    Lost(const std::string& what, std::vector<int> missing_) : std::runtime_error(what), missing(std::move(missing_)) {}
    std::vector<int> missing;
};

int64_t now_ns();  // CLOCK_MONOTONIC, the same for all processes of a host

/// The connections of one micro-batch to all members of a group. All members must ring the same
/// calls in the same order; the first wait detects a rank that rang another call. Use by one thread
/// at a time, except `leave`.
class Channel {
public:
    /// index: this rank's index among the members. ranks: the members' ranks, for messages.
    /// sockets[i], regions[i]: descriptors of the connection to member i and of its memory, owned
    /// from now on; ignored at `index`.
    Channel(int index, std::vector<int> ranks, int ubatch, const std::vector<int>& sockets,
            std::shared_ptr<Region> own, const std::vector<int>& regions);
    ~Channel();
    Channel(const Channel&) = delete;
    Channel& operator=(const Channel&) = delete;

    /// Offset of the users' memory in a region. The channel's own data comes before.
    static constexpr size_t kHead = 4096;

    int index() const { return index_; }
    uint64_t calls() const { return calls_; }  // number of calls that this rank has rung
    int size() const { return static_cast<int>(peers_.size()); }
    std::byte* memory(int member) const { return regions_[member]->data() + kHead; }
    size_t bytes() const { return regions_[index_]->bytes() - kHead; }

    /// Wakes members that sleep while they wait for this rank. Call it some microseconds before
    /// `ring`, because waking up takes time.
    void nudge();

    /// Signals all others that this rank's data of `call` is ready. Returns the call's number.
    /// Throws Lost after `leave`.
    uint64_t ring(Call call);

    /// Waits until all others rang call number `number`: spins for a few microseconds, then sleeps.
    /// Throws Lost if ranks are dead (at once) or silent (after timeout_s), if this rank leaves, or
    /// if a rank rang another call.
    void wait(uint64_t number, double timeout_s);

    /// Throws Lost: `member` is in another call.
    [[noreturn]] void diverged(int member, const std::string& theirs, const std::string& ours) const;

    /// Leaves the group and interrupts a wait. Any thread may call it, any number of times.
    void leave();

private:
    static constexpr uint64_t kRemembered = 64;  // enough, because a rank is at most a few calls ahead of another

    /// The beginning of each region. Its owner writes it, but the member that wakes the owner
    /// resets `sleeps_for`.
    struct Board {
        alignas(64) std::atomic<uint64_t> rung;   // number of calls that the owner rang
        std::array<Call, kRemembered> calls;      // the last of these calls
        alignas(64) std::atomic<int> sleeps_for;  // member for which the owner waits asleep, plus 1; 0 for none
    };

    struct Peer {
        int socket = -1;
        bool gone = false;    // the connection is closed
        bool parted = false;  // it left the group in order
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
    const int64_t look_ns_;  // how long to spin before sleeping
    uint64_t calls_ = 0;
    std::atomic<bool> left_{false};
};

}  // namespace moeserve
