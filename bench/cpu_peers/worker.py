"""A peer's process: answers one JSON line for each that it is sent. `python -m cpu_peers.worker NAME THREADS`."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from types import ModuleType
from typing import Any

import torch

from cpu_peers.cell import TOLERANCE, Cell, Prepared, Unsupported, expected, given


class Worker:
    """One peer and the cell it holds."""

    def __init__(self, name: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self._peer: ModuleType = importlib.import_module(f"cpu_peers.{name}")
        self._held: Prepared | None = None

    def version(self) -> dict[str, Any]:
        return {"version": self._peer.version()}

    def check(self, cell: dict[str, Any]) -> dict[str, Any]:
        """The largest error against float64 on a small cell of the same kind."""
        small = Cell(**cell).small()
        content = given(small)
        prepared = self._peer.prepare(small, 1, content)
        prepared.run(0)
        error = float((prepared.output().double() - expected(small, content)).abs().max())
        return {"error": error, "right": error <= TOLERANCE[small.dtype], "note": prepared.note}

    def prepare(self, cell: dict[str, Any]) -> dict[str, Any]:
        self._held = None
        wanted = Cell(**cell)
        self._held = self._peer.prepare(wanted, wanted.sets, None)
        return {"note": self._held.note}

    def run(self, first: int, calls: int) -> dict[str, Any]:
        if self._held is None:
            raise RuntimeError("a cell must be prepared before it is run")
        run = self._held.run
        start, cpu_start = time.perf_counter(), time.process_time()
        for i in range(first, first + calls):
            run(i)
        return {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu_start}

    def free(self) -> dict[str, Any]:
        self._held = None
        return {}


def main() -> None:
    # what a library prints must not come between the answers
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker: Worker | None = None
    for line in sys.stdin:
        request = json.loads(line)
        verb = request.pop("do")
        try:
            worker = worker or Worker(sys.argv[1], int(sys.argv[2]))
            answer = {"ok": True, **getattr(worker, verb)(**request)}
        except (ImportError, Unsupported) as error:
            answer = {"ok": False, "kind": type(error).__name__, "reason": str(error)}
        except Exception as error:  # the peer's, whatever it is: it becomes a row of the report
            answer = {"ok": False, "kind": "error", "reason": f"{type(error).__name__}: {error}"[:300]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
