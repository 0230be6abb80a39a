"""What the bookkeeping itself takes, in bytes: `python -m cache_bench.memory BLOCK_SIZE KIND`, a fresh process each.

KIND is "traced" (what Python and numpy allocated) or "resident" (what the process grew by). Three states of one
allocator: empty; full of live sequences of distinct tokens, all computed and findable; full of cached blocks.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tracemalloc
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cache_bench.traces import VOCABULARY
from pagegen.cache import BlockAllocator

Row = dict[str, Any]
TOKENS = 1 << 20  # in the cache
SEQUENCE = 1024  # tokens of one
KINDS = ("traced", "resident")
MODEL = "llama-3.2-1b"
TARGET_SHARE = 0.01


def measure(block_size: int, kind: str) -> dict[str, float]:
    """Bytes a block in each state, and bytes that a token of a live sequence takes besides its blocks' own."""
    used = _traced() if kind == "traced" else _resident
    names = [f"request-{i}" for i in range(TOKENS // SEQUENCE)]
    draw = np.random.default_rng(0)
    before = used()
    allocator = BlockAllocator(TOKENS // block_size, block_size)
    empty = used() - before
    for name in names:
        allocator.add(name, array("I", draw.integers(0, VOCABULARY, SEQUENCE, dtype=np.uint32).tobytes()))
        allocator.mark_computed(name, SEQUENCE)
    live = used() - before
    for name in names:
        allocator.free(name)
    cached = used() - before
    blocks = TOKENS // block_size
    return {"empty": empty / blocks, "live": live / blocks, "cached": cached / blocks}


def rows(block_sizes: tuple[int, ...]) -> Iterator[Row]:
    """One row a block size and kind, each from a process of its own."""
    for size in block_sizes:
        kv = kv_bytes_per_block(size)
        for kind in KINDS:
            found = _in_a_process(size, kind)
            most = max(found.values())
            yield {
                "section": "memory",
                "cell": {"block_size": size, "counted": kind},
                "bytes_a_block": {state: round(value, 1) for state, value in found.items()},
                "bytes_a_token": {state: round(value / size, 2) for state, value in found.items()},
                "share_of_kv": round(most / kv, 5),
                "kv_bytes_a_block": kv,
                "model": MODEL,
                "target_share": TARGET_SHARE,
            }


def kv_bytes_per_block(block_size: int) -> int:
    """Keys and values of one block in all layers of the model, bfloat16."""
    from pagegen.spec.models import find_geometry

    geometry = find_geometry(MODEL)
    return 2 * 2 * geometry.attn_layers * geometry.num_kv_heads * geometry.head_dim * block_size


def _in_a_process(block_size: int, kind: str) -> dict[str, float]:
    bench = Path(__file__).parents[1]
    paths = [str(bench), str(bench.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "cache_bench.memory", str(block_size), kind], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )  # fmt: skip
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _traced() -> Callable[[], int]:
    tracemalloc.start()

    def used() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    return used


def _resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGESIZE")


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), sys.argv[2])))
