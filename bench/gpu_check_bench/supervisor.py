"""Starts workers, keeps what they tell, ends those that overrun, and writes the document after every row.

Nothing here imports torch: a device that hangs or a kernel that aborts costs the case that ran, and nothing else.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_check_bench.document import ITS_CASES, RUNNING, Document
from gpu_check_bench.parts import Part

Row = dict[str, Any]
BENCH = Path(__file__).resolve().parents[1]
ROOT = BENCH.parent
# What workers import from a checkout.
FOLDERS = (BENCH, ROOT, ROOT / "autotune", ROOT / "tests" / "kernels")
PROGRAM = "import sys; sys.path[:] = {path!r}; from gpu_check_bench.worker import main; main({descriptor})"
# A part's last case may run so much longer than the part.
GRACE_S = 15.0
# Before the end of all: to write, and to end processes.
ENDING_S = 3.0
MAX_RESTARTS = 12
# Kept for the part that writes the trials down, a process's start included, whatever happened before.
RECORDS, RECORDS_S = "records", 15.0
CORES = len(os.sched_getaffinity(0))
# A worker's exit status after an error that would fail every later case too, and a row that says so.
STUCK = 70
LOG_LINES, LOG_CHARACTERS = 4, 500


@dataclass
class Worker:
    """One process, the parts that it still has, and what runs in it."""

    process: subprocess.Popen[str]
    pipe: int
    parts: list[str]
    shard: tuple[int, int]
    share_after: float
    log: Path
    part: str = ""
    case: str = ""
    until: float = math.inf
    case_until: float = math.inf
    unread: bytes = b""

    def __hash__(self) -> int:
        return self.process.pid


class Supervisor:
    """Runs `parts` within `budget_s` and fills `document`. `side` processes share the cases of parts that time nothing.
    `folder` holds the logs and the trials, `path` is what workers import from, `program` what they run, `records` a
    file of earlier trials to add to."""

    def __init__(
        self, parts: Sequence[Part], document: Document, *, budget_s: float, dry_run: bool, folder: Path, side: int,
        path: Sequence[str], environment: dict[str, str], program: str = PROGRAM, grace_s: float = GRACE_S,
        records: str = "", clock: Callable[[], float] = time.monotonic, say: Callable[[str], None] = lambda line: None,
    ) -> None:  # fmt: skip
        self.parts = parts
        self.document = document
        self.dry_run = dry_run
        self.folder = folder
        self.side = side
        self.path = list(path)
        self.environment = environment
        self.program = program
        self.grace_s = grace_s
        self.records = records
        self.clock = clock
        self.say = say
        self.start = clock()
        self.end = self.start + budget_s - ENDING_S
        self.restarts = 0
        self._workers: list[Worker] = []
        self._selector = selectors.DefaultSelector()
        self._count = 0

    def run(self) -> None:
        """Runs all parts; whatever ends it, no process is left."""
        groups = self._groups()
        try:
            for number, (names, shards) in enumerate(groups):
                later = {name for group, _ in groups[number + 1 :] for name in group}
                self._run_group(names, shards, sum(part.share for part in self.parts if part.name in later))
        finally:
            for worker in list(self._workers):
                self._end(worker)
            self._selector.close()
            self.document.seconds = self.clock() - self.start
            for name, found in self.document.parts.items():
                if found["state"] == RUNNING:
                    self.document.cut(name, [])
            self.document.write()

    def _groups(self) -> list[tuple[list[str], int]]:
        """Neighbouring parts that share processes: (names, processes). What runs side by side has processes of its own,
        be it one, so that the operator plans anew after tuning."""
        groups = itertools.groupby(self.parts, key=lambda part: part.side_by_side)
        return [([part.name for part in group], self.side if beside else 1) for beside, group in groups]

    def _run_group(self, names: list[str], shards: int, share_after: float) -> None:
        for number in range(shards):
            self._begin(names, (number, shards), share_after)
        while self._workers:
            limit = min(self.clock() + 1.0, *map(self._limit, self._workers))
            for key, _ in self._selector.select(max(0.0, limit - self.clock())):
                self._read(key.data)
            for worker in [w for w in self._workers if self.clock() >= self._limit(w)]:
                self._overrun(worker)

    def _limit(self, worker: Worker) -> float:
        """When a worker is ended, whatever it does."""
        return min(self._end_of(worker.parts), worker.until + self.grace_s, worker.case_until)

    def _end_of(self, names: Sequence[str]) -> float:
        """When the parts must have ended."""
        return self.end - (RECORDS_S if self.parts[-1].name == RECORDS and names != [RECORDS] else 0.0)

    # --- processes ---------------------------------------------------------------------------------------------------

    def _begin(self, names: Sequence[str], shard: tuple[int, int], share_after: float) -> None:
        if not names or self.clock() >= self.end:
            return
        self._count += 1
        log = self.folder / f"worker-{self._count}.log"
        ours, its = os.pipe()
        with log.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", self.program.format(path=self.path, descriptor=its)],
                stdin=subprocess.PIPE, stdout=output, stderr=output, pass_fds=[its], start_new_session=True, text=True,
                env={**self.environment, "OMP_NUM_THREADS": str(max(1, CORES // shard[1]))},
            )  # fmt: skip
        os.close(its)
        os.set_blocking(ours, False)
        worker = Worker(process, ours, list(names), shard, share_after, log)
        self._workers.append(worker)
        self._selector.register(ours, selectors.EVENT_READ, worker)
        asked = {
            "parts": list(names), "ends": [self._end_of([name]) for name in names], "share_after": share_after,
            "shard": list(shard), "dry_run": self.dry_run, "folder": str(self.folder),
            "done": [list(pair) for pair in sorted(self.document.done())],
            "failed": [list(pair) for pair in sorted(self.document.failed())], "records": self.records,
        }  # fmt: skip
        stdin = process.stdin
        with contextlib.suppress(BrokenPipeError):  # it ended at once: its log says why
            if stdin is not None:
                stdin.write(json.dumps(asked) + "\n")
                stdin.close()

    def _read(self, worker: Worker) -> None:
        try:
            found = os.read(worker.pipe, 1 << 16)
        except BlockingIOError:
            return
        if not found:
            self._gone(worker)
            return
        *lines, worker.unread = (worker.unread + found).split(b"\n")
        for line in lines:
            self._take(worker, json.loads(line))

    def _take(self, worker: Worker, event: Row) -> None:
        kind = event["event"]
        if kind == "environment":
            self.document.environment.update(event["facts"])
        elif kind == "part":
            worker.part, worker.case, worker.until = event["part"], "", event["until"]
            self.document.began(worker.part)
            self.say(f"{self.clock() - self.start:6.1f} s  {worker.part}")
        elif kind == "begin":
            worker.case, limit_s = event["case"], event.get("limit_s")
            worker.case_until = math.inf if limit_s is None else self.clock() + limit_s
        elif kind == "row":
            worker.case, worker.case_until = "", math.inf
            self.document.add(event["part"], event["case"], event["row"], event.get("seconds", 0.0))
            if "error" in event["row"]:
                self.say(f"          {event['part']}: {event['case']}: {event['row']['error']}")
        elif kind == "cut":
            self.document.cut(event["part"], event["left"])
        elif kind == "end":
            worker.parts.remove(event["part"])
            worker.part, worker.until = "", math.inf
            self.document.ended(event["part"], event["seconds"])

    def _gone(self, worker: Worker) -> None:
        """A worker has closed its pipe: it is done, or it was lost with a case."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(timeout=5.0)
        self._end(worker)
        if not worker.parts:
            return
        status = worker.process.returncode
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        why = f"its process ended with {how}{_last_words(worker.log)}"
        if worker.case:
            self.document.add(worker.part, worker.case, {"error": f"lost: {why}"}, 0.0)
            self.say(f"          {worker.part}: {worker.case}: {why}")
        elif not worker.part:  # it did not even start: so would the next
            for name in worker.parts:
                self.document.add(name, "start", {"error": f"no case ran: {why}"}, 0.0)
            self.say(f"          {', '.join(worker.parts)}: {why}")
            return
        elif status != STUCK:  # between two cases: it may be lost there again
            self.document.add(worker.part, ITS_CASES, {"error": f"lost: {why}"}, 0.0)
            self.document.cut(worker.part, [])
            worker.parts.remove(worker.part)
        self._again(worker, worker.parts)

    def _overrun(self, worker: Worker) -> None:
        """The time of a worker's case is over, or that of its part, grace included."""
        self._end(worker)
        if self.clock() < min(self._end_of(worker.parts), worker.until):
            self.document.add(worker.part, worker.case, {"error": "cut: it ran past its own time"}, 0.0)
            self.say(f"          {worker.part}: {worker.case} ran past its own time")
            self._again(worker, worker.parts)
            return
        over = "its part's time" if self.clock() >= worker.until + self.grace_s else "the time of the whole check"
        if worker.case:
            self.document.add(worker.part, worker.case, {"error": f"cut: it ran past {over}"}, 0.0)
            self.say(f"          {worker.part}: {worker.case} ran past {over}")
        if worker.part:
            self.document.cut(worker.part, [])
        left = [name for name in worker.parts if name != worker.part]
        if self.clock() >= self._end_of(left):
            left = [name for name in left if name == RECORDS]
        self._again(worker, left)

    def _again(self, worker: Worker, names: Sequence[str]) -> None:
        """Another process for what a lost one had left."""
        if names and self.restarts < MAX_RESTARTS:
            self.restarts += 1
            self._begin(names, worker.shard, worker.share_after)
        elif names:
            self.say(f"          {MAX_RESTARTS} processes were lost: no more are started")

    def _end(self, worker: Worker) -> None:
        """Ends a process and all it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.process.pid, signal.SIGKILL)
        worker.process.wait()
        self._selector.unregister(worker.pipe)
        os.close(worker.pipe)
        self._workers.remove(worker)


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f": {' | '.join(lines[-LOG_LINES:])[-LOG_CHARACTERS:]}" if lines else ""
