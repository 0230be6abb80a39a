"""A replaying process: answers one JSON line for each that it is sent. `python -m cache_bench.worker IMPLEMENTATION`,
which is "pagegen", or "vllm" and the name of a hash function with a colon between."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cache_bench.recording import KINDS, Operation, Recording

Do = Callable[[Operation], int]


class Worker:
    """One implementation and the recording it replays."""

    def __init__(self, implementation: str) -> None:
        self._prepare: Callable[[Recording], Do]
        if implementation == "pagegen":
            from cache_bench import ours

            self._prepare, self._version, self._included = ours.prepare, ours.version(), ours.INCLUDED
        else:
            from cache_bench import vllm_manager

            algorithm = implementation.partition(":")[2]
            self._prepare = lambda recording: vllm_manager.prepare(recording, algorithm)
            self._version = vllm_manager.version()
            self._included = vllm_manager.INCLUDED + (vllm_manager.MADE_BEFORE if algorithm == "none" else "")
        self._recording: Recording | None = None
        self._operations: list[Operation] = []

    def version(self) -> dict[str, Any]:
        return {"version": self._version, "included": self._included}

    def load(self, path: str) -> dict[str, Any]:
        """Reads a recording and replays it once: the cached tokens of its adds, in order."""
        self._recording = Recording.load(Path(path))
        self._operations = self._recording.operations()
        do = self._prepare(self._recording)
        return {"cached": [cached for o in self._operations for cached in (do(o),) if o.kind == 0]}

    def run(self) -> dict[str, Any]:
        """Replays it on a fresh cache: seconds, by the wall and by this process's CPU time."""
        do, operations = self._ready(), self._operations
        start, cpu_start = time.perf_counter(), time.process_time()
        for operation in operations:
            do(operation)
        return {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu_start}

    def parts(self) -> dict[str, Any]:
        """Replays it with the clock read around every operation: seconds by kind, and each add's and step's."""
        do, clock = self._ready(), time.perf_counter
        taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for operation in self._operations:
            start = clock()
            do(operation)
            taken[KINDS[operation.kind]].append(clock() - start)
        return {"parts": taken}

    def _ready(self) -> Do:
        if self._recording is None:
            raise RuntimeError("a recording must be loaded before it is replayed")
        do = self._prepare(self._recording)
        gc.collect()
        gc.freeze()  # as engines do once they have started: what exists before is not looked through again
        return do


def main() -> None:
    # what a library prints must not come between the answers
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker: Worker | None = None
    for line in sys.stdin:
        request = json.loads(line)
        verb = request.pop("do")
        try:
            worker = worker or Worker(sys.argv[1])
            answer = {"ok": True, **getattr(worker, verb)(**request)}
        except Exception as error:  # the implementation's, whatever it is: it becomes a row of the report
            answer = {"ok": False, "kind": type(error).__name__, "reason": f"{type(error).__name__}: {error}"[:300]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
