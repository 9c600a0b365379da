// One thread that works on one thing at a time while its owner does another.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

namespace moeserve {

class Background {
  public:
    /// Ends the thread once its work is done.
    ~Background();

    /// Begins `work` when the thread is done with what it was given before, whose error is lost.
    void start(std::function<void()> work);

    /// Returns when there is no work, or throws its error.
    void wait();

  private:
    void live();

    std::mutex mutex_;
    std::condition_variable changed_;
    std::function<void()> work_;  // empty: there is none
    std::exception_ptr error_;
    bool ends_ = false;
    std::thread thread_;  // once there was work
};

}  // namespace moeserve
