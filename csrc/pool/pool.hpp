// The one thread pool of a process: workers that spin briefly, then wait asleep.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace moeserve {

/// A function and its context: plain pointers, so that kernels compiled for one instruction set share no code with others.
/// run(context, begin, end, worker) computes the indices [begin, end); worker is in [0, size) and no two run at once.
struct Work {
    void (*run)(void* context, size_t begin, size_t end, int worker);
    void* context;
};

class Pool {
  public:
    /// `cpus.size()` workers; worker 0 is whoever calls. Worker w > 0 is a thread on CPU cpus[w], on any if that is
    /// negative. spin_ns: how long one looks for work, or for the end of it, before it sleeps.
    explicit Pool(std::vector<int> cpus, int64_t spin_ns = 30'000);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return static_cast<int>(threads_.size()) + 1; }

    /// Computes [0, count) in `size()` nearly equal contiguous parts. Returns when all is done. Any thread may call; one
    /// caller's work runs after the other's. Never called from inside work.
    ///
    /// A caller waits for workers that have begun, not for those that the system has yet to give a processor: on a busy
    /// machine it does their share itself.
    void split(size_t count, const Work& work);

    /// As `split`, but a worker takes `grain` indices of its part at a time, and when there are none left, the last ones of
    /// another's: for indices of unequal cost. So what lies side by side is computed by one worker, one after the other.
    void share(size_t count, size_t grain, const Work& work);

  private:
    struct Job {
        Work work;
        size_t count, grain;
    };
    /// What is left of a worker's part, in grains: the first one in the upper half of the word, the end in the lower.
    struct alignas(64) Part {
        std::atomic<uint64_t> left{0};
    };

    static constexpr uint32_t kOpen = 1u << 31;  // of `taking_part_`: its caller still works

    void run(const Job& job);
    bool join();
    void take_part(int worker);
    void compute(uint64_t grain, int worker);
    void live(int worker, int cpu);

    std::mutex callers_;
    Job job_{};
    const int64_t spin_ns_;
    std::vector<Part> parts_;  // one of each worker
    std::vector<std::thread> threads_;
    // Each on a cache line of its own: they are written by different threads all the time.
    alignas(64) std::atomic<uint32_t> round_{0};        // a new number starts a job
    alignas(64) std::atomic<uint32_t> taking_part_{0};  // workers that have begun it and not finished
    alignas(64) std::atomic<uint32_t> asleep_{0};
    alignas(64) std::atomic<bool> caller_asleep_{false};
    std::atomic<bool> ends_{false};
};

/// The pool that kernels use; one thread until `set_pool`.
std::shared_ptr<Pool> pool();
void set_pool(std::shared_ptr<Pool> pool);

}  // namespace moeserve
