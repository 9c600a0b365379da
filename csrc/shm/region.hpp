#pragma once
// Memory that a rank owns and its peers map.
#include <cstddef>

namespace moeserve {

/// Anonymous shared memory behind a file descriptor. Its pages exist only once they are written, so a region may be as
/// large as the worst case.
class Region {
public:
    /// Makes one; the size is sealed, so no peer can cut it off under a reader. Throws std::system_error.
    explicit Region(size_t bytes);

    /// Maps one that a peer sent, and takes over `fd`. Throws std::runtime_error when it is smaller than `bytes`, or
    /// could become so.
    Region(int fd, size_t bytes);

    ~Region();
    Region(const Region&) = delete;
    Region& operator=(const Region&) = delete;

    std::byte* data() const { return data_; }
    size_t bytes() const { return bytes_; }
    int fd() const { return fd_; }

private:
    void map();

    int fd_;
    size_t bytes_;
    std::byte* data_ = nullptr;
};

}  // namespace moeserve
