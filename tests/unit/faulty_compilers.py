"""Compilers with something wrong, for worker processes: importable by name, told by a variant's tile_kv what to do."""

from __future__ import annotations

import os
import time

from pagegen.targets.errors import CompileError
from pagegen.targets.offline import ResourceFacts

HANGS, ABORTS, REFUSES, RAISES, FINE = 16, 32, 64, 128, 256


def facts(**changes) -> ResourceFacts:
    """What a compiler tells of a kernel without a fault."""
    plain = {
        "kernel": "decode", "target": "sm_90", "registers": 90, "spills": 0, "shared_bytes": 4096, "num_warps": 4,
        "programs_per_unit": 4, "binary_bytes": 9000, "loop": None,
    }  # fmt: skip
    return ResourceFacts(**{**plain, **changes})


class FaultyCompiler:
    """Answers what a KernelCompiler answers. `binary_bytes` is the process that answered."""

    regime = ""
    workers = 1

    def __init__(self, spec, target, device, profile, *, seed):
        self.environment = {}

    def compile(self, layout, variant, decode):
        fault = variant.tile_kv
        if fault == HANGS:
            time.sleep(3600)
        if fault == ABORTS:
            os.abort()
        if fault == REFUSES:
            raise CompileError("sm_90", variant.name, "too much")
        if fault == RAISES:
            raise RuntimeError("PassManager::run failed\nand a page of intermediate code")
        return facts(binary_bytes=os.getpid())


class NeverStarts:
    """Ends its process before it answers anything."""

    def __init__(self, *arguments, **options):
        os._exit(7)
