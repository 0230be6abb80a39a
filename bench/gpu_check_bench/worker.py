"""A process that runs cases and tells the supervisor of each: a line of JSON at its begin and one at its end.

What it prints goes to a log; the lines go to a pipe of their own. An exception is a case's result. An error that sticks
to the process (CUDA's do) ends it, and the supervisor starts another for what is left.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpu_check_bench.parts import BY_NAME
from gpu_check_bench.supervisor import STUCK

if TYPE_CHECKING:
    from gpu_check_bench.context import Context

Row = dict[str, Any]
MAX_DETAIL = 600


class Cases:
    """The cases of a part, by name, in the order to run them: the most telling first, since the last may be cut."""

    def __init__(self) -> None:
        self.found: list[tuple[str, Callable[[], Row], float]] = []

    def add(self, name: str, run: Callable[[], Row], *, limit_s: float = math.inf) -> None:
        """`limit_s`: a case that takes longer is ended with its process, and the part goes on without it."""
        if any(name == known for known, *_ in self.found):
            raise ValueError(f"a part must name its cases differently, got {name!r} twice")
        self.found.append((name, run, limit_s))


def run(asked: Row, emit: Callable[[Row], None], now: Callable[[], float] = time.monotonic) -> int:
    """Runs the parts that are asked for; returns the exit status. `asked` holds: parts (names), ends (when each must
    have ended, on the clock `now`), share_after (of the parts that come after them), shard (number, of), done and
    failed ([part, case] that ran before, and of those the ones that failed), dry_run, folder, records."""
    from gpu_check_bench.context import Context

    done = {(part, case) for part, case in asked["done"]}
    context = Context.make(asked)
    emit({"event": "environment", "facts": context.environment()})
    for number, name in enumerate(asked["parts"]):
        later = sum(BY_NAME[other].share for other in asked["parts"][number + 1 :]) + asked["share_after"]
        start, share = now(), BY_NAME[name].share
        context.until = start + max(0.0, asked["ends"][number] - start) * share / (share + later)
        emit({"event": "part", "part": name, "until": context.until})
        cases = Cases()
        try:
            importlib.import_module(f"gpu_check_bench.{name}").add_cases(context, cases)
        except Exception as error:
            emit({"event": "row", "part": name, "case": "its cases", "row": {"error": first_lines(error)}})
        mine = [case for case in shared(cases.found, asked["shard"]) if (name, case[0]) not in done]
        stuck = _run_cases(name, mine, context, emit, now)
        if stuck:
            return STUCK
        emit({"event": "end", "part": name, "seconds": round(now() - start, 2)})
    return 0


def _run_cases(
    part: str, cases: list[tuple[str, Callable[[], Row], float]], context: Context, emit: Callable[[Row], None],
    now: Callable[[], float],
) -> bool:  # fmt: skip
    """Whether the process is of no more use."""
    for number, (name, case, limit_s) in enumerate(cases):
        if now() >= context.until:
            emit({"event": "cut", "part": part, "left": [left for left, *_ in cases[number:]]})
            return False
        emit({"event": "begin", "part": part, "case": name, "limit_s": None if math.isinf(limit_s) else limit_s})
        start = now()
        try:
            row = case()
        except Exception as error:  # a case may fail in any way: its failure is its result
            row = {"error": first_lines(error)}
        if "error" in row:
            context.failed.add((part, name))
        stuck = context.stuck()
        emit({"event": "row", "part": part, "case": name, "row": row, "seconds": round(now() - start, 2)})
        if stuck:
            return True
    return False


def shared(cases: list[Any], shard: tuple[int, int]) -> list[Any]:
    """The cases of one of several processes: every n-th, so that each has cheap and dear ones."""
    number, of = shard
    return cases[number::of]


def first_lines(error: BaseException) -> str:
    """What went wrong, in a few hundred characters."""
    text = str(error).strip() or "no message"
    return f"{type(error).__name__}: {text}"[:MAX_DETAIL]


def main(descriptor: int) -> None:
    """What the supervisor starts; the first line of standard input says what to do."""
    asked = json.loads(sys.stdin.readline())
    with os.fdopen(descriptor, "w", encoding="utf-8") as pipe:

        def emit(event: Row) -> None:
            pipe.write(json.dumps(event) + "\n")
            pipe.flush()

        status = run(asked, emit)
    sys.stdout.flush()
    os._exit(status)  # without the destructors of a context that an error may have left unusable
