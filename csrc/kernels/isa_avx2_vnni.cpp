// Kernels for CPUs with AVX2, FMA, F16C and (AVX-VNNI) dot products of bytes, without AVX-512; setup.py has the compiler's flags.
#define MOESERVE_ISA avx2_vnni
#include "kernels/vec_avx2.hpp"

#include "kernels/families.hpp"

namespace moeserve {
extern const Kernels kAvx2Vnni;
const Kernels kAvx2Vnni = avx2_vnni::table("avx2_vnni");
}  // namespace moeserve
