#pragma once
// Shared memory that one rank owns and its peers map.
#include <cstddef>

namespace moeserve {

/// Anonymous shared memory with a file descriptor. Pages are allocated when they are first written,
/// so a region may be as large as the worst case.
class Region {
public:
    /// Creates a region. Its size is sealed, so that no peer can truncate it while another reads.
    /// Throws std::system_error.
    explicit Region(size_t bytes);

    /// Maps a peer's region, and owns `fd` from now on. Throws std::runtime_error if it is smaller
    /// than `bytes` or its size is not sealed.
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
