// Experts that lie in a file, some of them in memory.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace moeserve {

/// A cache of all layers' packed experts in slots of one size. Threads read what a step lacks while it computes with what
/// is there.
///
/// What makes room is the expert that routers asked for least often: every step that wants an expert adds to its score, and
/// kHalfLife steps later that counts half. So a long prompt, which wants each expert once, does not drive out those that
/// are wanted again and again.
class ExpertCache {
  public:
    static constexpr size_t kUnit = 64;  // bytes: experts begin at multiples of it, in the file and in memory
    static constexpr double kHalfLife = 64;

    /// An expert of a layer in memory, `unit` units behind `memory()`.
    struct Held {
        size_t expert, unit;
    };

    /// Experts wanted that were in memory, and that were not; time for which steps waited; bytes read.
    struct Stats {
        uint64_t hits = 0, misses = 0, stall_ns = 0, read_bytes = 0;
    };

    /// descriptor: of the file, which is opened anew. name: of the file, for errors.
    ExpertCache(int descriptor, std::string name);
    ~ExpertCache();
    ExpertCache(const ExpertCache&) = delete;
    ExpertCache& operator=(const ExpertCache&) = delete;

    /// Adds a layer whose experts lie one behind the other, and returns its number; before `open`.
    size_t add(size_t offset, size_t num_experts, size_t expert_bytes);

    /// Takes memory for `bytes / slot_bytes()` experts, at most for all.
    void open(size_t bytes);

    size_t slot_bytes() const { return slot_bytes_; }
    size_t num_slots() const { return slots_.size(); }
    const uint8_t* memory() const { return memory_; }

    /// Calls compute with experts of a layer, some at a time, until it has had each that has rows. An expert stays where it
    /// is during the call. expected: experts that the next layer is likely to want, which are read meanwhile and behind it.
    /// Throws std::runtime_error if one cannot be read.
    void visit(size_t layer, const std::vector<size_t>& counts, const std::vector<size_t>& expected,
               const std::function<void(const std::vector<Held>&)>& compute);

    /// Returns what was counted since the last call.
    Stats take_stats();

  private:
    struct Expert {
        size_t layer, offset;
        int slot = -1;
        double score = 0;
    };
    struct Layer {
        size_t first, count, bytes;  // first: of its experts' numbers
    };
    struct Slot {
        size_t expert = kNone;
        size_t left = 0;      // parts that are still to be read
        bool pinned = false;  // a step computes with it, or will
        bool begun = false;   // with reading it
    };
    struct Read {
        size_t slot, begin, bytes, least;  // of the slot; least: bytes without what only fills up the last page
    };

    static constexpr size_t kNone = ~size_t{0};

    void expect(const Layer& layer, const std::vector<size_t>& experts);
    bool begin_read(size_t expert, bool wanted);
    size_t free_slot();
    void allow_eviction(size_t slot);
    void settle(const Layer& layer, const std::vector<size_t>& counts);
    Held held(size_t expert) const;
    void live();
    void read(const Read& part, size_t offset);
    std::string where(size_t expert) const;

    const std::string name_;
    int direct_ = -1, plain_ = -1;
    size_t slot_bytes_ = 0;
    uint8_t* memory_ = nullptr;
    std::vector<Layer> layers_;
    std::vector<Expert> experts_;

    std::mutex callers_;  // one step at a time
    std::mutex mutex_;    // all below
    std::condition_variable work_, changed_;
    std::vector<Slot> slots_;
    std::vector<size_t> empty_;                        // slots without an expert
    std::set<std::pair<double, size_t>> evictable_;  // (score, slot) of experts that may make room
    std::deque<Read> wanted_, expected_;
    double weight_ = 1;  // of a step; grows, so that earlier ones count less
    std::string error_;  // of a read; every later step fails with it
    Stats stats_;
    bool ends_ = false;
    std::vector<std::thread> readers_;
};

}  // namespace moeserve
