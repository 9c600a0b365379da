// Kernels for CPUs with AVX-512 (F, BW, DQ, VL); setup.py has the compiler's flags.
#define MOESERVE_ISA avx512
#include "kernels/vec_avx512.hpp"

#include "kernels/families.hpp"

namespace moeserve {
extern const Kernels kAvx512;
const Kernels kAvx512 = avx512::table("avx512");
}  // namespace moeserve
