"""What does a call cost the host before its kernel is launched?

    python bench/host_cost.py [--turns 2000] [--output FILE]

Every call runs with its kernel replaced by nothing, so what is measured is the host's part: the public function, the
dispatcher, the checks, the look-up of the plan and the operands. Beside it, an operator of the same schema whose Python
body is empty, called with the same arguments: what torch itself takes. The two take turns, ten calls at a time; the
least of each is reported, since whatever else the machine does only adds. What our call allocates is part of it.
A mixed call's result is zeroed before the kernel runs, which is a device's work like the kernel: what zeroing 256 KiB
takes longer than zeroing one number is measured in the same turns and left out.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is loaded

import torch
from cache_bench.document import as_text
from cpu_bench import machine

import pagegen
from pagegen import targets
from pagegen.ops import attention, plans, schemas

RESULTS = Path(__file__).parent / "results"
CALLS = 10
ZEROED = ("mixed",)  # cases whose result is
Row = dict[str, Any]


LIBRARY = torch.library.Library("pagegen_bare", "DEF")


@functools.cache
def bare(name: str) -> Any:
    """An operator of the schema of `name` with an empty body."""
    schema = str(getattr(torch.ops.pagegen, name).default._schema)
    LIBRARY.define(schema.removeprefix("pagegen::"), tags=schemas.TAGS)
    empty = torch.empty(0)
    result = (empty, empty) if name == "paged_attention" else None
    LIBRARY.impl(name, lambda *_, **__: result, "CPU")
    return getattr(torch.ops.pagegen_bare, name).default


def decode(num_seqs: int) -> dict[str, Any]:
    caches = [torch.zeros(4 * num_seqs, 16, 8, 128, dtype=torch.bfloat16) for _ in range(2)]
    return {
        "q": torch.zeros(num_seqs, 32, 128, dtype=torch.bfloat16),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "block_table": torch.arange(4 * num_seqs, dtype=torch.int32).view(num_seqs, 4),
        "seq_lens": torch.full((num_seqs,), 60, dtype=torch.int32),
    }


def cases() -> dict[str, tuple[str, Callable[[], Any], Callable[[Any], Any]]]:
    """name -> (operator, our call, the same call of the bare operator)."""
    plain, ragged = decode(32), decode(32)
    starts = torch.arange(33, dtype=torch.int32)
    more = {"query_start_loc": starts, "max_query_len": 1, "max_seq_len": 64}
    sinks = torch.zeros(32)
    k = torch.zeros(32, 8, 128, dtype=torch.bfloat16)
    written = (k, k.clone(), plain["k_cache"], plain["v_cache"], torch.arange(32))

    def attend(given: dict[str, Any], **options: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        operands = tuple(given.values())
        return lambda: pagegen.paged_attention(*operands, **options), lambda op: op(*operands, **options)

    return {
        "decode": ("paged_attention", *attend(plain, max_seq_len=64)),
        "mixed": ("paged_attention", *attend(ragged, **more)),
        "decode, window, sinks, lse": (
            "paged_attention", *attend(plain, max_seq_len=64, window=32, sinks=sinks, return_lse=True),
        ),
        "write_kv": ("write_kv", lambda: pagegen.write_kv(*written), lambda op: op(*written)),
    }  # fmt: skip


def without_kernels() -> None:
    """Every kernel does nothing from now on."""
    plans.Plan.load = lambda self, variant: _nothing  # type: ignore[method-assign]
    targets.cache_writer = lambda target: _nothing


def _nothing(call: Any) -> None:
    return None


def us(calls: tuple[Callable[[], Any], ...], turns: int) -> list[float]:
    """The least time of each call, in microseconds."""
    best = [float("inf")] * len(calls)
    for turn in range(turns + 1):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            if turn:  # the first one plans
                best[i] = min(best[i], (time.perf_counter() - start) / CALLS * 1e6)
    return best


def measure(turns: int) -> list[Row]:
    rows = []
    for name, (operator, ours, theirs) in cases().items():
        result, number = torch.zeros(32, 32, 128, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16)
        taken, torchs, whole, one = us(
            (ours, functools.partial(theirs, bare(operator)), result.zero_, number.zero_), turns
        )
        zeroing = whole - one if name in ZEROED else 0.0
        rows.append(
            {
                "call": name,
                "us": round(taken, 2),
                "bare_us": round(torchs, 2),
                "zeroing_us": round(zeroing, 2),
                "over_bare_us": round(taken - torchs - zeroing, 2),
                "asked_for": "at most 10 over the bare operator",
            }
        )
    return rows


def main() -> None:
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--turns", type=int, default=2000)
    made.add_argument("--output", type=Path, default=RESULTS / "host-cost.json")
    options = made.parse_args()
    torch.set_num_threads(1)
    without_kernels()
    attention.forget()
    with torch.inference_mode():
        rows = measure(options.turns)
    for row in rows:
        print(json.dumps(row))
    document = {
        "question": (__doc__ or "").partition("\n")[0],
        "method": (__doc__ or "").rpartition("\n\n")[2].strip(),
        "environment": machine.environment({}),
        "turns": options.turns,
        "rows": rows,
    }
    options.output.write_text(as_text(document), encoding="utf-8")
    print(f"written to {options.output.name}", file=sys.stderr)


if __name__ == "__main__":
    main()
