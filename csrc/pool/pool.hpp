// The thread pool of a process. Its workers spin briefly, then sleep.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace moeserve {

/// A function and its context. They are plain pointers, so that kernels compiled for one
/// instruction set share no code with others. run(context, begin, end, worker) computes the indices
/// [begin, end). worker is in [0, size); no two calls with the same worker run at once.
struct Work {
    void (*run)(void* context, size_t begin, size_t end, int worker);
    void* context;
};

class Pool {
  public:
    /// Makes `cpus.size()` workers. Worker 0 is the calling thread. Worker w > 0 is a thread pinned
    /// to CPU cpus[w], or not pinned if that is negative. spin_ns: how long a thread spins before
    /// it sleeps.
    explicit Pool(std::vector<int> cpus, int64_t spin_ns = 30'000);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return static_cast<int>(threads_.size()) + 1; }

    /// Computes [0, count) in `size()` nearly equal contiguous parts, and waits for all. Any thread
    /// may call; calls run one after the other. Must not be called from inside work.
    ///
    /// The caller waits only for workers that have begun. It takes over the parts of workers that
    /// have not been scheduled yet, which happens on a busy machine.
    void split(size_t count, const Work& work);

    /// Like `split`, for indices of unequal cost (work stealing): a worker takes `grain` indices of
    /// its part at a time, and when none are left, the last ones of another worker's part. So a
    /// worker computes adjacent indices one after the other.
    void share(size_t count, size_t grain, const Work& work);

  private:
    struct Job {
        Work work;
        size_t count, grain;
    };
    /// The remaining grains of a worker's part: the first in the upper half of the word, the end in
    /// the lower half.
    struct alignas(64) Part {
        std::atomic<uint64_t> left{0};
    };

    static constexpr uint32_t kOpen = 1u << 31;  // flag of `taking_part_`: workers may still join the job

    void run(const Job& job);
    bool join();
    void take_part(int worker);
    void compute(uint64_t grain, int worker);
    void live(int worker, int cpu);

    std::mutex callers_;
    Job job_{};
    const int64_t spin_ns_;
    std::vector<Part> parts_;  // one per worker
    std::vector<std::thread> threads_;
    // Each is on its own cache line, because different threads write them.
    alignas(64) std::atomic<uint32_t> round_{0};        // number of the job; changing it starts a job
    alignas(64) std::atomic<uint32_t> taking_part_{0};  // number of workers that work on the job, and kOpen
    alignas(64) std::atomic<uint32_t> asleep_{0};
    alignas(64) std::atomic<bool> caller_asleep_{false};
    std::atomic<bool> ends_{false};
};

/// The pool that kernels use. It has one thread until `set_pool`.
std::shared_ptr<Pool> pool();
void set_pool(std::shared_ptr<Pool> pool);

}  // namespace moeserve
