"""Real kernels with something wrong put into their source, for the tests of what the tuner does then."""

from __future__ import annotations

from pagegen_autotune.measure import KernelBench

from pagegen.codegen import cpp
from pagegen.spec import AttentionSpec, CacheLayout, CppVariant
from pagegen.targets import cpp_build, cpu

ENTRY = 'extern "C" int64_t pagegen_attention(const pagegen_attention_args* args) {\n'
# What a candidate does at the beginning of a call. `out` has rows of Hq * Dv elements, those of the first batch 8.
FAULTS = {
    "hangs": "for (volatile int i = 0;; i = 0) {}",
    "aborts": "std::abort();",
    "writes far outside": "*(volatile char*)16 = 1;",
    "writes past its end": "std::memset((char*)args->out + 8 * 2 * args->out_token_stride, 0, 64);",
    "writes before its beginning": "std::memset((char*)args->out - 64, 0, 64);",
    "exits": "std::_Exit(3);",
}
BY_VARIANT = {CppVariant(tile_kv=32, streams=4, split_tokens=32 * (2 + i)): fault for i, fault in enumerate(FAULTS)}
RAISES = CppVariant(tile_kv=32, streams=4, split_tokens=32)


class FaultyBench(KernelBench):
    """The bench, whose compiler is given the faulty source of a variant of `BY_VARIANT`."""

    def _kernel(self, layout: CacheLayout, variant: CppVariant):
        if variant == RAISES:
            raise RuntimeError("this one always raises")
        if variant not in BY_VARIANT:
            return super()._kernel(layout, variant)
        return faulty_kernel(self.spec, layout, variant, FAULTS[BY_VARIANT[variant]])


def faulty_kernel(spec: AttentionSpec, layout: CacheLayout, variant: CppVariant, statement: str):
    source = cpp.render_attention(spec, layout, variant)
    assert source.count(ENTRY) == 1
    headers = "#include <cstdlib>\n#include <cstring>\n"
    library = cpp_build.load(headers + source.replace(ENTRY, ENTRY + f"  {statement}\n"), variant.name)
    return cpu.CpuAttention(library, spec, layout)
