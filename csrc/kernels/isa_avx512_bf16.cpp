// Kernels for CPUs with AVX-512 with dot products of BF16 and (VNNI) of bytes; setup.py has the compiler's flags.
#define MOESERVE_ISA avx512_bf16
#include "kernels/vec_avx512.hpp"

#include "kernels/families.hpp"

namespace moeserve {
extern const Kernels kAvx512Bf16;
const Kernels kAvx512Bf16 = avx512_bf16::table("avx512_bf16");
}  // namespace moeserve
