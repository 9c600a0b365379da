// A cache of experts whose weights are in a file.
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

/// A cache of all layers' packed experts, in slots of the same size. Threads read missing experts
/// while a step computes with those in memory.
///
/// The expert with the lowest score is evicted. Every step that uses an expert adds to its score,
/// and kHalfLife steps later that counts half (LFU with exponential decay). So a long prompt, which
/// uses each expert once, does not evict the experts that are used often.
class ExpertCache {
  public:
    static constexpr size_t kUnit = 64;  // bytes; experts begin at multiples of it in the file and in memory
    static constexpr double kHalfLife = 64;  // steps

    /// An expert of a layer in memory, at `memory() + unit * kUnit`.
    struct Held {
        size_t expert, unit;
    };

    /// Experts used that were in memory (hits) and that were not (misses), time that steps waited,
    /// and bytes read.
    struct Stats {
        uint64_t hits = 0, misses = 0, stall_ns = 0, read_bytes = 0;
    };

    /// descriptor: of the file, which is opened again. name: of the file, for errors.
    ExpertCache(int descriptor, std::string name);
    ~ExpertCache();
    ExpertCache(const ExpertCache&) = delete;
    ExpertCache& operator=(const ExpertCache&) = delete;

    /// Adds a layer, whose experts are contiguous in the file, and returns its number. Call it
    /// before `open`.
    size_t add(size_t offset, size_t num_experts, size_t expert_bytes);

    /// Allocates memory for `bytes / slot_bytes()` experts, at most for all.
    void open(size_t bytes);

    size_t slot_bytes() const { return slot_bytes_; }
    size_t num_slots() const { return slots_.size(); }
    const uint8_t* memory() const { return memory_; }

    /// Calls `compute` with some experts of a layer at a time, until it got every expert that has
    /// rows. Experts are not evicted during the call. counts: rows of each expert. expected:
    /// experts that the next layer is likely to use, which are read with lower priority. Throws
    /// std::runtime_error if an expert cannot be read.
    void visit(size_t layer, const std::vector<size_t>& counts, const std::vector<size_t>& expected,
               const std::function<void(const std::vector<Held>&)>& compute);

    /// Returns the counts since the last call.
    Stats take_stats();

  private:
    struct Expert {
        size_t layer, offset;
        int slot = -1;
        double score = 0;
    };
    struct Layer {
        size_t first, count, bytes;  // number of the first expert, number of experts, bytes of an expert
    };
    struct Slot {
        size_t expert = kNone;
        size_t left = 0;      // number of parts that are still to be read
        bool pinned = false;  // a step uses it now or will
        bool begun = false;   // a read has begun
    };
    struct Read {
        size_t slot, begin, bytes, least;  // bytes [begin, begin + bytes) of a slot; least: without padding of the last page
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

    std::mutex callers_;  // allows one step at a time
    std::mutex mutex_;    // protects everything below
    std::condition_variable work_, changed_;
    std::vector<Slot> slots_;
    std::vector<size_t> empty_;                        // slots without an expert
    std::set<std::pair<double, size_t>> evictable_;  // (score, slot) of experts that may be evicted
    std::deque<Read> wanted_, expected_;             // queues of reads: for the present step, and prefetches
    double weight_ = 1;  // added to scores by a step; it grows, so that earlier steps count less
    std::string error_;  // of a failed read; every later step fails with it
    Stats stats_;
    bool ends_ = false;
    std::vector<std::thread> readers_;
};

}  // namespace moeserve
