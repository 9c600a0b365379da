// A thread that runs one task at a time in the background.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

namespace moeserve {

class Background {
  public:
    /// Ends the thread after its present task.
    ~Background();

    /// Starts `work` after the previous task, whose error, if any, is dropped.
    void start(std::function<void()> work);

    /// Waits for the present task. Throws its error.
    void wait();

  private:
    void live();

    std::mutex mutex_;
    std::condition_variable changed_;
    std::function<void()> work_;  // the present task; empty for none
    std::exception_ptr error_;
    bool ends_ = false;
    std::thread thread_;  // started with the first task
};

}  // namespace moeserve
