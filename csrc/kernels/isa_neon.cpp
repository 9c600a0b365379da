// Kernels for 64-bit ARM CPUs, all of which have what they need.
#define MOESERVE_ISA neon
#include "kernels/vec_neon.hpp"

#include "kernels/families.hpp"
#include "kernels/int_product.hpp"
#include "kernels/product.hpp"

namespace moeserve {
extern const Kernels kNeon;
const Kernels kNeon = neon::table("neon");
}  // namespace moeserve
