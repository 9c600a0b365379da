#include "shm/channel.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>

namespace moeserve {
namespace {

constexpr uint8_t kGoodbye = 0, kBell = 1;
constexpr int64_t kLookNs = 8'000;

const char* name(Call call) {
    switch (call) {
        case Call::dispatch: return "dispatch";
        case Call::combine: return "combine";
        case Call::gather: return "gather";
    }
    return "?";
}

/// Spin only if there are more cores than ranks. Otherwise a spinning rank takes a core from a
/// working one.
int64_t look_ns(size_t num_ranks) { return static_cast<long>(num_ranks) < sysconf(_SC_NPROCESSORS_ONLN) ? kLookNs : 0; }

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

std::string list(const std::vector<int>& ranks) {
    std::string text = ranks.size() == 1 ? "rank " : "ranks ";
    for (size_t i = 0; i < ranks.size(); ++i) text += (i ? ", " : "") + std::to_string(ranks[i]);
    return text;
}

}  // namespace

int64_t now_ns() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

Channel::Channel(int index, std::vector<int> ranks, int ubatch, const std::vector<int>& sockets,
                 std::shared_ptr<Region> own, const std::vector<int>& regions)
    : index_(index), ranks_(std::move(ranks)), ubatch_(ubatch), peers_(ranks_.size()), regions_(ranks_.size()),
      look_ns_(look_ns(ranks_.size())) {
    int member = 0;
    try {
        for (; member < size(); ++member) {
            const bool self = member == index_;
            regions_[member] = self ? own : std::make_shared<Region>(regions.at(member), own->bytes());
            if (!self) peers_[member].socket = sockets.at(member);
        }
    } catch (...) {  // regions close their own descriptors, but these have no owner
        for (int socket : sockets) close(socket);
        for (++member; member < static_cast<int>(regions.size()); ++member) close(regions[member]);
        throw;
    }
}

Channel::~Channel() {
    leave();
    for (const Peer& peer : peers_) {
        if (peer.socket >= 0) close(peer.socket);
    }
}

uint64_t Channel::ring(Call call) {
    if (left_) throw Lost("this rank left its group", {});
    const uint64_t number = calls_++;
    Board& own = board(index_);
    own.calls[number % kRemembered] = call;
    own.rung.store(calls_);
    nudge();
    return number;
}

void Channel::nudge() {
    for (int member = 0; member < size(); ++member) {
        int me = index_ + 1;
        std::atomic<int>& sleeps_for = board(member).sleeps_for;
        if (member == index_ || sleeps_for.load() != me || !sleeps_for.compare_exchange_strong(me, 0)) continue;
        // If this fails, the peer is gone, and the wait for its next call will report that.
        (void)send(peers_[member].socket, &kBell, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
}

void Channel::wait(uint64_t number, double timeout_s) {
    if (left_) throw Lost("this rank left its group", {});
    const int64_t deadline_ns = now_ns() + static_cast<int64_t>(std::min(timeout_s, 1e9) * 1e9);
    int64_t left_to_look_ns = look_ns_;
    for (int member = 0; member < size(); ++member) {
        if (member == index_) continue;
        while (!look(member, number, left_to_look_ns)) {
            std::vector<int> pending;
            for (int other = 0; other < size(); ++other) {
                if (other != index_ && !rang(other, number)) pending.push_back(other);
            }
            const bool gone = std::any_of(pending.begin(), pending.end(), [&](int other) { return peers_[other].gone; });
            if (left_) throw Lost("this rank left its group", {});
            if (gone || (!pending.empty() && now_ns() >= deadline_ns)) lost(pending, timeout_s);
            sleep(member, number, deadline_ns);
        }
    }
    for (int member = 0; member < size(); ++member) {
        if (member != index_) check(member, number);
    }
}

bool Channel::look(int member, uint64_t number, int64_t& left_to_look_ns) const {
    if (rang(member, number)) return true;
    const int64_t begun_ns = now_ns();
    for (int64_t looked_ns = 0; looked_ns < left_to_look_ns; looked_ns = now_ns() - begun_ns) {
        for (int i = 0; i < 8; ++i) relax();
        if (rang(member, number)) return true;
    }
    left_to_look_ns = 0;
    return false;
}

void Channel::listen(Peer& peer) {
    uint8_t bells[16];
    while (!peer.gone) {
        const ssize_t count = recv(peer.socket, bells, sizeof bells, MSG_DONTWAIT);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
        peer.gone = count <= 0;
        for (ssize_t i = 0; i < count; ++i) {
            if (bells[i] == kGoodbye) peer.parted = true;
        }
        if (count < static_cast<ssize_t>(sizeof bells)) return;  // an EOF would wake the next poll
    }
}

void Channel::check(int member, uint64_t number) const {
    const Call theirs = board(member).calls[number % kRemembered], ours = board(index_).calls[number % kRemembered];
    if (theirs != ours) diverged(member, name(theirs), name(ours));
}

void Channel::diverged(int member, const std::string& theirs, const std::string& ours) const {
    throw Lost("ranks diverged on micro-batch " + std::to_string(ubatch_) + ": rank " + std::to_string(ranks_[member]) + " did " +
                   theirs + " where rank " + std::to_string(ranks_[index_]) + " did " + ours,
               {});
}

void Channel::sleep(int member, uint64_t number, int64_t deadline_ns) {
    std::atomic<int>& sleeps_for = board(index_).sleeps_for;
    sleeps_for.store(member + 1);
    if (!rang(member, number)) {  // otherwise it may have rung before it could see `sleeps_for`
        std::vector<pollfd> fds;
        for (const Peer& peer : peers_) fds.push_back({peer.gone ? -1 : peer.socket, POLLIN, 0});
        const int64_t left_ns = std::max<int64_t>(0, deadline_ns - now_ns());
        const timespec left{static_cast<time_t>(left_ns / 1'000'000'000), static_cast<long>(left_ns % 1'000'000'000)};
        ppoll(fds.data(), fds.size(), &left, nullptr);
        for (int other = 0; other < size(); ++other) {
            if (fds[other].revents) listen(peers_[other]);
        }
    }
    sleeps_for.store(0);
}

void Channel::lost(const std::vector<int>& pending, double timeout_s) {
    std::vector<int> dead, parted, silent;
    for (int member : pending) {
        const Peer& peer = peers_[member];
        (peer.parted ? parted : peer.gone ? dead : silent).push_back(ranks_[member]);
    }
    if (!dead.empty()) throw Lost(list(dead) + " of this rank's group: gone", dead);
    if (!parted.empty()) throw Lost(list(parted) + " left the group", {});
    throw Lost(list(silent) + " of this rank's group: silent for " + std::to_string(std::lround(timeout_s * 1e3)) + " ms",
               silent);
}

void Channel::leave() {
    left_ = true;
    for (const Peer& peer : peers_) {
        if (peer.socket < 0) continue;
        (void)send(peer.socket, &kGoodbye, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
        shutdown(peer.socket, SHUT_RDWR);
    }
}

}  // namespace moeserve
