"""How long does the first answer of a process take? `python -m database_bench.first` answers one question.

The question is a JSON object on standard input. Imports of pagegen come first and are timed apart.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIMED = ("first_ms", "first_cpu_ms", "open_ms", "again_ms", "imports_ms")
REPEATS = 5  # of the same question in the same process


def fresh(question: dict[str, Any], runs: int) -> dict[str, Any]:
    """The medians over fresh processes, the range of the first times, and what was answered."""
    bench = Path(__file__).parents[1]
    paths = [str(bench), str(bench.parent), str(bench.parent / "autotune")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    found = []
    for _ in range(1 + runs):  # the first leaves bytecode, as an installation does
        done = subprocess.run(
            [sys.executable, "-m", "database_bench.first"], input=json.dumps(question), capture_output=True, text=True,
            check=True, env={**environment, "PYTHONPATH": os.pathsep.join(paths)},
        )  # fmt: skip
        found.append(json.loads(done.stdout))
    del found[0]
    first = [f["first_ms"] for f in found]
    return {
        **{name: round(statistics.median(f[name] for f in found), 3) for name in TIMED},
        "first_ms_range": [round(min(first), 3), round(max(first), 3)],
        **found[0]["told"],
    }


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of the imports, of the first answer from an open of the file on, and of the same again."""
    start = time.perf_counter()
    import pagegen
    import pagegen.db
    import pagegen.selection
    from pagegen.spec import AttentionSpec, CacheLayout, Profile, Workload

    imports = time.perf_counter() - start
    spec, layout = AttentionSpec.from_dict(question["spec"]), CacheLayout(**question["layout"])
    profile, workload = Profile.from_dict(question["profile"]), Workload.from_dict(question["workload"])

    def select() -> dict[str, Any]:
        found = db.select(spec, layout, question["target"], workload)
        return {"grade": found.grade, "time": found.evidence["time"]}

    def best_block_size() -> dict[str, Any]:
        rows = db.best_block_size(spec, question["target"], profile)
        return {"rows": len(rows), "kinds": sorted({row.kind for row in rows})}

    ask: Callable[[], dict[str, Any]] = select if question["verb"] == "select" else best_block_size
    start, cpu = time.perf_counter(), time.process_time()
    with pagegen.open_db(question["url"], read_only=True) as db:
        opened = time.perf_counter()
        told = ask()
        end, cpu = time.perf_counter(), time.process_time() - cpu
        again = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            ask()
            again.append(1e3 * (time.perf_counter() - begin))
    return {
        "first_ms": 1e3 * (end - start), "first_cpu_ms": 1e3 * cpu, "open_ms": 1e3 * (opened - start),
        "imports_ms": 1e3 * imports, "again_ms": statistics.median(again), "told": told,
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(answer(json.loads(sys.stdin.read()))))
