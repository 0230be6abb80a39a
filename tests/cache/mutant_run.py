"""Runs the state machine against a changed copy of `pagegen.cache`, each in a process of its own.

The processes are forked from one that has imported what takes long (torch, hypothesis) and nothing of the cache.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import shutil
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parents[2] / "pagegen" / "cache"
STEPS = 40
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["hypothesis.stateful", "pytest", "pagegen"])


class Verdict(NamedTuple):
    """How a run ended: "passed", "failed" (an assertion or an error in it), "broken" (it could not begin, or ended
    without a word) or "hung"; and why."""

    ended: str
    detail: str


def changed_copy(folder: Path, module: str, text: str, replacement: str) -> Path:
    """A copy of the package in `folder`, with `text` replaced, which must occur just once."""
    copy = folder / "cache"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    path = copy / module
    source = path.read_text(encoding="utf-8")
    if source.count(text) != 1:
        raise LookupError(f"pagegen/cache/{module} has it {source.count(text)} times, not once: {text!r}")
    path.write_text(source.replace(text, replacement), encoding="utf-8")
    return copy


def verdict(
    copy: Path,
    *,
    focus: str = "all",
    tensors: bool = False,
    compiled: bool = True,
    invariants: bool = True,
    examples: int,
    limit_s: float,
) -> Verdict:
    """What the machine says of the copy, from the same random numbers every time, with the prefix index `compiled` or
    in Python. Without `invariants` the cache's own checks of itself are left out."""
    ours, theirs = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_run, args=(theirs, copy, focus, tensors, compiled, invariants, examples))
    process.start()
    theirs.close()
    try:
        return Verdict(*ours.recv()) if ours.poll(limit_s) else Verdict("hung", f"no end after {limit_s} s")
    except EOFError:
        return Verdict("broken", "the process died")
    finally:
        process.kill()
        process.join()


def _run(
    report: Connection, copy: Path, focus: str, tensors: bool, compiled: bool, invariants: bool, examples: int
) -> None:
    try:
        _import_from(copy)
        from pagegen.cache import pool, prefix, prefix_compiled

        pool.open_index = prefix_compiled.CompiledIndex if compiled else prefix.PrefixIndex
        import machine_faults
        from hypothesis import HealthCheck, Phase, settings
        from hypothesis.stateful import run_state_machine_as_test

        machine = machine_faults.focused(
            machine_faults.TensorMachine if tensors else machine_faults.CacheMachine, focus
        )
        machine.checks_invariants = invariants
    except Exception:
        report.send(("broken", traceback.format_exc()))
        return
    chosen = settings(
        max_examples=examples, stateful_step_count=STEPS, derandomize=True, database=None, deadline=None,
        phases=[Phase.generate], report_multiple_bugs=False, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    try:
        run_state_machine_as_test(machine, settings=chosen)
    except BaseException as error:  # pytest.raises fails with one that is no Exception
        where = traceback.extract_tb(error.__traceback__)[-1]
        report.send(("failed", f"{type(error).__name__} in {where.name}: {error}"))
    else:
        report.send(("passed", f"{machine_faults.COUNTS['steps']} steps"))


def _import_from(copy: Path) -> None:
    """Makes `pagegen.cache` the package in `copy`."""
    assert "pagegen.cache" not in sys.modules
    spec = importlib.util.spec_from_file_location(
        "pagegen.cache", copy / "__init__.py", submodule_search_locations=[str(copy)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pagegen.cache"] = module
    sys.modules["pagegen"].cache = module  # type: ignore[attr-defined]
    spec.loader.exec_module(module)
