"""The real model behind caches of several block sizes, each of the same bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagegen.db import open_db
from pagegen.integrations.generation import PagedGenerator
from pagegen.integrations.transformers import enable
from pagegen.serving import Clock
from serving_bench.serve import Served, serve
from serving_bench.workloads import Workload


@dataclass(frozen=True, kw_only=True)
class Limits:
    """`kv_tokens` that the cache holds in blocks of any size, and what a step may hold."""

    kv_tokens: int
    max_num_seqs: int
    max_batch_tokens: int


@dataclass(frozen=True, kw_only=True)
class Server:
    """The model on one block size."""

    block_size: int
    kernel: str
    generator: PagedGenerator

    def serve(self, workload: Workload, span_s: float, clock: Clock) -> Served:
        """One run on an empty cache."""
        self.generator.reset()
        return serve(self.generator.scheduler(), self.generator.run, workload, span_s, clock)


def servers(model: Any, block_sizes: Sequence[int], limits: Limits, *, compiled: bool) -> list[Server]:
    """One server a block size around the same model."""
    found = []
    paged = None
    for size in block_sizes:
        if paged is not None:
            paged.disable()  # a model has one handle at a time; the generators of all of them go on
        # no records of this machine: the kernels are those that a fresh installation chooses
        with tempfile.TemporaryDirectory() as folder, open_db(Path(folder) / "empty.db") as db:
            paged = enable(model, block_size=size, num_blocks=limits.kv_tokens // size, db=db)
        generator = paged.generator(
            compile=compiled, max_num_seqs=limits.max_num_seqs, max_batch_tokens=limits.max_batch_tokens
        )
        rule = paged.rules[0]
        names = "dense" if rule is None else ", ".join(variant.name for variant in rule.variants)
        found.append(Server(block_size=size, kernel=names, generator=generator))
    return found
