// The thread pool: every index once, whoever calls, however many workers, asleep or spinning; and the thread of its own.
// Run under TSan and ASan.
#include "pool/pool.hpp"

#include <chrono>
#include <cstring>
#include <stdexcept>

#include "pool/background.hpp"
#include "tests/check.hpp"

using namespace moeserve;

namespace {

/// Counts visits to each index without locks or atomics: a second visitor is a data race, which TSan sees.
struct Visits {
    std::vector<int> count, by;

    explicit Visits(size_t n) : count(n), by(n, -1) {}

    static void visit(void* context, size_t begin, size_t end, int worker) {
        Visits& self = *static_cast<Visits*>(context);
        CHECK(begin < end && end <= self.count.size());
        for (size_t i = begin; i < end; ++i) {
            ++self.count[i];
            self.by[i] = worker;
        }
    }

    Work work() { return {visit, this}; }

    void all_once(int workers) const {
        for (size_t i = 0; i < count.size(); ++i) CHECK(count[i] == 1 && by[i] >= 0 && by[i] < workers);
    }
};

void every_index_once(Pool& pool) {
    for (size_t n : {0, 1, 2, 3, 7, 64, 1000}) {
        Visits even(n);
        pool.split(n, even.work());
        even.all_once(pool.size());
        for (size_t grain : {0, 1, 3, 5000}) {
            Visits shared(n);
            pool.share(n, grain, shared.work());
            shared.all_once(pool.size());
        }
    }
}

/// One index waits for all others: they are done by someone else, or came before it.
void held_up(Pool& pool, size_t which) {
    struct Held {
        std::atomic<size_t> done{0};
        const size_t which;
    } held{.which = which};
    const auto run = [](void* context, size_t begin, size_t end, int) {
        Held& self = *static_cast<Held*>(context);
        CHECK(end == begin + 1);
        while (begin == self.which && self.done.load() < 40) std::this_thread::yield();
        ++self.done;
    };
    pool.share(41, 1, {run, &held});
    CHECK(held.done == 41);
}

void many_callers(Pool& pool) {
    std::vector<std::thread> callers;
    for (int c = 0; c < 3; ++c) {
        callers.emplace_back([&pool] {
            for (int i = 0; i < 200; ++i) {
                Visits visits(17);
                pool.share(17, 2, visits.work());
                visits.all_once(pool.size());
            }
        });
    }
    for (std::thread& caller : callers) caller.join();
}

void one_thing_at_a_time() {
    int done = 0;  // without a lock: work and its owner take turns
    Background idle, background;
    background.wait();
    for (int i = 0; i < 200; ++i) {
        background.start([&done] { ++done; });
        if (i % 3) background.wait();
        if (i % 3) CHECK(done == i + 1);
    }
    background.start([] { throw std::runtime_error("failed"); });
    bool caught = false;
    try {
        background.wait();
    } catch (const std::runtime_error&) {
        caught = true;
    }
    CHECK(caught);
    background.wait();
    background.start([&done] { ++done; });
}

}  // namespace

int main() {
    one_thing_at_a_time();
    for (int size : {1, 2, 3, 5}) {
        for (int64_t spin_ns : {0, 1'000, 200'000}) {
            Pool pool(std::vector<int>(static_cast<size_t>(size), -1), spin_ns);
            CHECK(pool.size() == size);
            for (int i = 0; i < 20; ++i) every_index_once(pool);
            std::this_thread::sleep_for(std::chrono::milliseconds(1));  // all asleep
            every_index_once(pool);
            many_callers(pool);
            for (size_t which : {0, 40}) {
                if (size > 1) held_up(pool, which);
            }
        }
    }
    for (int i = 0; i < 200; ++i) Pool ended_at_once({-1, -1, -1});
    Pool pinned({0, 0, 1 << 20});  // a CPU that does not exist is as good as any
    every_index_once(pinned);
    std::puts("ok");
}
