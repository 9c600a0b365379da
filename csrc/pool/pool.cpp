#include "pool/pool.hpp"

#include <algorithm>
#include <chrono>
#include <climits>

#if defined(__linux__)
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moeserve {
namespace {

int64_t now_ns() {
    return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

void breathe() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb");  // pauses about as long as x86's; `yield` does nothing on most of these CPUs
#endif
}

/// Sleeps while `word` is `value`. May wake up spuriously.
void wait_while(std::atomic<uint32_t>& word, uint32_t value) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
    word.wait(value);
#endif
}

void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#else
    word.notify_all();
#endif
}

/// Spins until `done()` or the time limit. Returns whether `done()`.
template <class Done>
bool spin(int64_t limit_ns, const Done& done) {
    if (done()) return true;
    if (limit_ns <= 0) return false;
    const int64_t end = now_ns() + limit_ns;
    do {
        for (int i = 0; i < 32; ++i) {
            breathe();
            if (done()) return true;
        }
    } while (now_ns() < end);
    return false;
}

void pin_to([[maybe_unused]] int cpu) {
#if defined(__linux__)
    if (cpu < 0) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(static_cast<size_t>(cpu), &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // if this is refused, the thread is not pinned
#endif
}

}  // namespace

Pool::Pool(std::vector<int> cpus, int64_t spin_ns) : spin_ns_(spin_ns), parts_(cpus.size()) {
    for (size_t w = 1; w < cpus.size(); ++w) {
        threads_.emplace_back([this, w, cpu = cpus[w]] { live(static_cast<int>(w), cpu); });
    }
}

Pool::~Pool() {
    ends_ = true;
    round_.fetch_add(1);
    wake_all(round_);
    for (std::thread& thread : threads_) thread.join();
}

void Pool::split(size_t count, const Work& work) {
    const size_t workers = static_cast<size_t>(size());
    run({work, count, std::max<size_t>((count + workers - 1) / workers, 1)});
}

void Pool::share(size_t count, size_t grain, const Work& work) { run({work, count, std::max<size_t>(grain, 1)}); }

void Pool::run(const Job& job) {
    if (job.count == 0) return;
    const std::lock_guard<std::mutex> one_at_a_time(callers_);
    if (threads_.empty() || job.count <= job.grain) {
        job.work.run(job.work.context, 0, job.count, 0);
        return;
    }
    job_ = job;
    const uint64_t grains = (job.count + job.grain - 1) / job.grain, workers = parts_.size();
    for (uint64_t w = 0; w < workers; ++w) {
        parts_[w].left.store(grains * w / workers << 32 | grains * (w + 1) / workers, std::memory_order_relaxed);
    }
    taking_part_.store(kOpen, std::memory_order_release);
    round_.fetch_add(1);  // sequentially consistent, like the load of `asleep_`, so that no sleeping worker is missed
    if (asleep_.load() != 0) wake_all(round_);
    take_part(0);
    taking_part_.fetch_and(~kOpen, std::memory_order_acq_rel);  // workers can no longer join
    if (spin(spin_ns_, [this] { return taking_part_.load(std::memory_order_acquire) == 0; })) return;
    caller_asleep_ = true;
    for (uint32_t number; (number = taking_part_.load()) != 0;) wait_while(taking_part_, number);
    caller_asleep_ = false;
}

/// Joins the job if it is open. Returns whether it was; then the caller waits for this worker.
bool Pool::join() {
    uint32_t number = taking_part_.load(std::memory_order_relaxed);
    while (number & kOpen) {
        if (taking_part_.compare_exchange_weak(number, number + 1, std::memory_order_acq_rel)) return true;
    }
    return false;
}

void Pool::take_part(int worker) {
    constexpr uint64_t kFirst = uint64_t{1} << 32;
    for (size_t i = 0; i < parts_.size(); ++i) {  // from the front of its own part, then from the back of the others'
        std::atomic<uint64_t>& part = parts_[(static_cast<size_t>(worker) + i) % parts_.size()].left;
        uint64_t left = part.load(std::memory_order_relaxed);
        while (left >> 32 < static_cast<uint32_t>(left)) {
            const uint64_t rest = i == 0 ? left + kFirst : left - 1;
            if (!part.compare_exchange_weak(left, rest, std::memory_order_relaxed)) continue;
            compute(i == 0 ? left >> 32 : static_cast<uint32_t>(rest), worker);
            left = rest;
        }
    }
}

void Pool::compute(uint64_t grain, int worker) {
    const size_t begin = grain * job_.grain;
    job_.work.run(job_.work.context, begin, std::min(begin + job_.grain, job_.count), worker);
}

void Pool::live(int worker, int cpu) {
    pin_to(cpu);
    for (uint32_t seen = 0;;) {
        if (!spin(spin_ns_, [&] { return round_.load(std::memory_order_acquire) != seen; })) {
            asleep_.fetch_add(1);
            while (round_.load() == seen) wait_while(round_, seen);
            asleep_.fetch_sub(1);
        }
        if (ends_) return;
        seen = round_.load(std::memory_order_acquire);
        if (!join()) continue;
        take_part(worker);
        if (taking_part_.fetch_sub(1) == 1 && caller_asleep_) wake_all(taking_part_);
    }
}

namespace {
std::mutex g_mutex;
std::shared_ptr<Pool> g_pool;
}  // namespace

std::shared_ptr<Pool> pool() {
    const std::lock_guard<std::mutex> lock(g_mutex);
    if (!g_pool) g_pool = std::make_shared<Pool>(std::vector<int>{-1});
    return g_pool;
}

void set_pool(std::shared_ptr<Pool> pool) {
    const std::lock_guard<std::mutex> lock(g_mutex);
    g_pool = std::move(pool);
}

}  // namespace moeserve
