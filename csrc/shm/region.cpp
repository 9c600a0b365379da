#include "shm/region.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

namespace moeserve {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

[[noreturn]] void fail(int fd, const std::string& what) {
    const int error = errno;
    if (fd >= 0) close(fd);
    throw std::system_error(error, std::generic_category(), what);
}

}  // namespace

Region::Region(size_t bytes) : fd_(memfd_create("moeserve", MFD_CLOEXEC | MFD_ALLOW_SEALING)), bytes_(bytes) {
    if (fd_ < 0) fail(-1, "memfd_create");
    if (ftruncate(fd_, static_cast<off_t>(bytes)) < 0) fail(fd_, "ftruncate to " + std::to_string(bytes) + " bytes");
    if (fcntl(fd_, F_ADD_SEALS, kSeals | F_SEAL_SEAL) < 0) fail(fd_, "F_ADD_SEALS");
    map();
}

Region::Region(int fd, size_t bytes) : fd_(fd), bytes_(bytes) {
    struct stat found {};
    if (fstat(fd, &found) < 0) fail(fd, "fstat of a peer's memory");
    const int seals = fcntl(fd, F_GET_SEALS);
    if (static_cast<size_t>(found.st_size) < bytes || seals < 0 || (seals & kSeals) != kSeals) {
        close(fd);
        throw std::runtime_error("a peer's memory has " + std::to_string(found.st_size) + " bytes and seals " +
                                 std::to_string(seals) + "; expected " + std::to_string(bytes) + " sealed bytes");
    }
    map();
}

Region::~Region() {
    munmap(data_, bytes_);
    close(fd_);
}

void Region::map() {
    void* at = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_, 0);
    if (at == MAP_FAILED) fail(fd_, "mmap of " + std::to_string(bytes_) + " bytes");
    data_ = static_cast<std::byte*>(at);
}

}  // namespace moeserve
