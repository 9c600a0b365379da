#include "pool/background.hpp"

#include <utility>

namespace moeserve {

Background::~Background() {
    {
        std::lock_guard lock(mutex_);
        ends_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
}

void Background::start(std::function<void()> work) {
    {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return !work_; });
        error_ = nullptr;
        work_ = std::move(work);
        if (!thread_.joinable()) thread_ = std::thread([this] { live(); });
    }
    changed_.notify_all();
}

void Background::wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !work_; });
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void Background::live() {
    std::unique_lock lock(mutex_);
    for (;;) {
        changed_.wait(lock, [this] { return work_ || ends_; });
        if (!work_) return;
        lock.unlock();
        std::exception_ptr error;
        try {
            work_();
        } catch (...) {
            error = std::current_exception();
        }
        lock.lock();
        error_ = error;
        work_ = nullptr;
        changed_.notify_all();
    }
}

}  // namespace moeserve
