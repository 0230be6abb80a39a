"""What a variant takes to compile: read, optimised, linked, stored and mapped into the process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable

from cpu_bench.bench import Bench, Row
from cpu_bench.own import BASE
from pagegen.codegen import cpp
from pagegen.spec import CacheLayout
from pagegen.spec.dtypes import DTYPES
from pagegen.targets import cpp_build, cpp_headers, cpu
from pagegen.targets.errors import CompileError

LAYOUT = CacheLayout(block_size=32, order="HND")
TIMES = 5  # in turn, so that what else the host does meets all alike
NARROW = ("float8_e4m3fn", "int8", "int4")


def compiling(bench: Bench) -> Iterable[Row]:
    """Default variants, each time as a source that no cache holds. The system's headers are compiled by then, as they
    are from a process's third kernel on."""
    specs = {"bfloat16": BASE, "float32": BASE.replace(q_dtype=DTYPES["float32"], kv_dtype=DTYPES["float32"])}
    specs |= {n: BASE.replace(kv_dtype=DTYPES[n], kv_scale_granularity="head") for n in NARROW}
    sources = {
        n: cpp.render_attention(s, LAYOUT, cpu.default_variant(s, LAYOUT, decode=True)) for n, s in specs.items()
    }
    sources["long queries"] = cpp.render_attention(BASE, LAYOUT, cpu.default_variant(BASE, LAYOUT, decode=False))
    for _ in range(cpp_headers.WORTH_IT):
        _seconds(sources["bfloat16"])
    taken: dict[str, list[float]] = {name: [] for name in sources}
    failed: dict[str, str] = {}
    for name, source in [*sources.items()] * TIMES:
        if name not in failed:
            try:
                taken[name].append(_seconds(source))
            except CompileError as error:
                failed[name] = error.detail
    for name, samples in taken.items():
        row: Row = {"section": "compile", "cell": {"label": "a default variant"}, "what": name, "unit": "s"}
        if name in failed:
            yield {**row, "status": "does not compile", "reason": failed[name]}
        else:
            yield {**row, "status": "ok", "seconds": round(statistics.median(samples), 3), "samples_s": samples}


def _seconds(source: str) -> float:
    """Of one compilation of `source`, made a source of its own by its last line."""
    start = time.perf_counter()
    cpp_build.load(f"{source}\n// {time.time_ns()}\n", "bench")
    return round(time.perf_counter() - start, 3)
