#include "kernels/table.hpp"

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string_view>

namespace moeserve {

#if defined(__x86_64__)
extern const Kernels kAvx2, kAvx512;
// Replace kernels of AVX2 and AVX-512 by those that use further instructions. The CPU must support
// these.
void use_avx2_vnni(Kernels& kernels);
void use_avx512_bf16(Kernels& kernels);
#elif defined(__aarch64__)
extern const Kernels kNeon;
#endif

namespace {

/// Whether ATEN_CPU_CAPABILITY, which limits torch's own kernels, allows no more than AVX2.
[[maybe_unused]] bool at_most_avx2() {
    const char* asked = std::getenv("ATEN_CPU_CAPABILITY");
    return asked && std::string_view(asked) == "avx2";
}

/// A copy of `base` in which `replace` has replaced some kernels. It must not be a global: its
/// constructor would run before the check of the CPU, with instructions that the CPU may lack.
[[maybe_unused]] Kernels replaced(Kernels base, void (*replace)(Kernels&)) {
    replace(base);
    return base;
}

std::vector<const Kernels*> supported() {
    std::vector<const Kernels*> tables;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
        tables.push_back(&kAvx2);
        if (at_most_avx2()) return tables;
        if (__builtin_cpu_supports("avxvnni")) {
            static const Kernels vnni = replaced(kAvx2, use_avx2_vnni);
            tables.push_back(&vnni);
        }
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
            tables.push_back(&kAvx512);
            if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) {
                static const Kernels bf16 = replaced(kAvx512, use_avx512_bf16);
                tables.push_back(&bf16);
            }
        }
    }
#elif defined(__aarch64__)
    tables.push_back(&kNeon);
#endif
    return tables;
}

std::atomic<const Kernels*>& serving() {
    static std::atomic<const Kernels*> table{supported().empty() ? nullptr : supported().back()};
    return table;
}

}  // namespace

std::vector<std::string> supported_isas() {
    std::vector<std::string> names;
    for (const Kernels* table : supported()) names.emplace_back(table->name);
    return names;
}

void use_isa(const std::string& name) {
    std::string known;
    for (const Kernels* table : supported()) {
        if (table->name == name) {
            serving() = table;
            return;
        }
        known += known.empty() ? table->name : std::string(", ") + table->name;
    }
    throw std::invalid_argument("no kernels for '" + name + "' on this CPU; there are: " + (known.empty() ? "none" : known));
}

const Kernels* kernels() { return serving(); }

}  // namespace moeserve
