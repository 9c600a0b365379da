// Kernels for CPUs with AVX2, FMA and F16C; setup.py has the compiler's flags.
#define MOESERVE_ISA avx2
#include "kernels/vec_avx2.hpp"

#include "kernels/families.hpp"

namespace moeserve {
extern const Kernels kAvx2;
const Kernels kAvx2 = avx2::table("avx2");
}  // namespace moeserve
