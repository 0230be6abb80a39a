"""A seeded random sweep over specs, layouts, variants and batches: `make sweep`, or

    python tests/kernels/sweep.py --target cpu --cases 2000 --seed 0
    python tests/kernels/sweep.py --target interpreter --only 123

A case that fails prints the command that runs it alone, why, and what it is; the sweep goes on. Exits 1 if any failed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SEED_STEP = 1_000_000  # the cases of a seed begin here


def numbers(cases: int, seed: int) -> range:
    """The cases of a sweep."""
    return range(seed * SEED_STEP, seed * SEED_STEP + cases)


def failures_of(target: str, cases: Sequence[int]) -> list[str]:
    """Runs cases of one kernel and returns a line for each that fails."""
    import sweep_cases
    import sweep_checks

    lines = []
    check = None
    for number in cases:
        case = sweep_cases.draw(target, number)
        try:
            if check is None:
                check = sweep_checks.checker(case.kernel, sweep_cases.kernel_number(target, number))
            check(case)
        except Exception as error:  # whatever it is, the other cases are run too
            lines.append(
                _line(target, number, f"{type(error).__name__}: {' '.join(str(error).split())[:400]}", str(case))
            )
    return lines


def by_kernel(target: str, cases: Sequence[int]) -> list[list[int]]:
    """The cases, divided by the kernel that they run."""
    import sweep_cases

    found: dict[int, list[int]] = {}
    for number in cases:
        found.setdefault(sweep_cases.kernel_number(target, number), []).append(number)
    return list(found.values())


def sweep(target: str, cases: Sequence[int], jobs: int) -> Iterator[tuple[int, list[str]]]:
    """Runs the cases in `jobs` processes; yields, kernel by kernel, how many ran and a line for each that failed."""
    left = by_kernel(target, cases)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        started = {pool.submit(failures_of, target, group): group for group in left}
        for done in as_completed(started):
            if isinstance(done.exception(), BrokenProcessPool):
                continue
            left.remove(started[done])
            yield len(started[done]), done.result()
    for group in left:  # a kernel has taken its process down, and with it the others' results
        for number in group:
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                try:
                    lines = pool.submit(failures_of, target, [number]).result()
                except BrokenProcessPool:
                    lines = [_line(target, number, "the process died", "")]
            yield 1, lines


def _line(target: str, number: int, why: str, what: str) -> str:
    return f"python tests/kernels/sweep.py --target {target} --only {number}  # {why} | {what}"


def _environment(target: str) -> None:
    """Set before anything is imported, here and in the processes that inherit it."""
    os.environ.setdefault("PAGEGEN_CACHE_DIR", str(ROOT / ".pytest_cache" / "kernels"))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if target == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"
    elif os.environ.pop("TRITON_INTERPRET", None):
        print("TRITON_INTERPRET is unset for the CPU target", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description="Random sweep of the attention kernels against the float64 reference.")
    parser.add_argument("--target", choices=["cpu", "interpreter"], default="cpu")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, action="append", metavar="CASE", help="run this case; may be repeated")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--list", action="store_true", help="print the cases instead of running them")
    asked = parser.parse_args()
    _environment(asked.target)
    cases = asked.only or list(numbers(asked.cases, asked.seed))
    if asked.list:
        import sweep_cases

        for number in cases:
            print(number, sweep_cases.draw(asked.target, number))
        return 0
    start, count, failed = time.monotonic(), 0, 0
    for done, lines in sweep(asked.target, cases, asked.jobs):
        for line in lines:
            print(line, flush=True)
        failed += len(lines)
        if (count + done) * 10 // len(cases) > count * 10 // len(cases):
            print(f"{count + done} of {len(cases)} cases, {failed} failed", file=sys.stderr, flush=True)
        count += done
    seconds = time.monotonic() - start
    print(f"{count} cases on {asked.target}, {failed} failed, {seconds:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
