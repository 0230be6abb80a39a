"""Compiling in worker processes: what a bad candidate costs, and what it does not."""

from __future__ import annotations

import time

import pytest
from database_fakes import H100, LAYOUT, PROFILE, SPEC
from faulty_compilers import ABORTS, FINE, HANGS, RAISES, REFUSES, FaultyCompiler, NeverStarts
from pagegen_autotune.compiling import Compilers, Task
from pagegen_autotune.isolated import WorkerLost

from pagegen.spec import Status, TritonVariant


def task(fault: int, splits: int = 1) -> Task:
    return Task(layout=LAYOUT, variant=TritonVariant(tile_kv=fault, num_splits=splits), decode=True)


def compilers(**options) -> Compilers:
    return Compilers(SPEC, H100, PROFILE, **{"make": FaultyCompiler, "workers": 2, **options})


def always() -> bool:
    return True


def test_a_compiler_that_hangs_aborts_or_raises_costs_that_candidate_only():
    bad = [task(HANGS), task(ABORTS), task(REFUSES), task(RAISES)]
    fine = [task(FINE, splits=n) for n in (1, 2, 4)]
    with compilers(limit_s=3.0) as pool:
        found = dict(pool.run([*bad, *fine], always))
    assert [found[t].status for t in bad] == [
        Status.TIMEOUT, Status.RUNTIME_ERROR, Status.COMPILE_ERROR, Status.RUNTIME_ERROR
    ]  # fmt: skip
    assert "no answer within 3 s" in found[bad[0]].detail and "SIGABRT" in found[bad[1]].detail
    assert "too much" in found[bad[2]].detail
    assert found[bad[3]].detail == "RuntimeError: PassManager::run failed"  # its first line
    assert all(found[t].status is Status.OK and found[t].facts.registers == 90 for t in fine)


def test_candidates_are_compiled_in_as_many_processes_as_there_are_workers():
    with compilers() as pool:
        processes = {
            done.facts.binary_bytes for _, done in pool.run([task(FINE, splits=n) for n in range(1, 9)], always)
        }
    assert len(processes) == 2


def test_when_the_time_is_up_what_was_begun_is_finished_and_the_rest_left():
    answers = iter([True, True])  # asked before the first are begun, and once they are waited for
    with compilers() as pool:
        found = list(pool.run([task(FINE, splits=n) for n in range(1, 9)], lambda: next(answers, False)))
    assert 2 <= len(found) <= 4
    assert list(pool.run([task(FINE)], lambda: False)) == []


def test_a_stop_ends_workers_that_hang_at_once():
    def stop() -> bool:
        if time.monotonic() - begun > 4.0:
            raise KeyboardInterrupt
        return True

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt), compilers(limit_s=600.0, workers=1) as pool:
        list(pool.run([task(HANGS), task(HANGS, splits=2), task(HANGS, splits=4)], stop))
    assert time.monotonic() - begun < 20.0


def test_workers_that_do_not_start_are_an_error_and_no_endless_loop():
    with compilers(make=NeverStarts, workers=1) as pool, pytest.raises(WorkerLost, match="exit status 7"):
        list(pool.run([task(FINE)], always))


def test_kernels_with_a_score_function_are_compiled_in_this_process(monkeypatch):
    """A worker does not know the function."""
    import os

    from pagegen_autotune import compiling

    monkeypatch.setattr(compiling, "KernelCompiler", FaultyCompiler)
    with Compilers(SPEC.replace(score_mod="bias"), H100, PROFILE) as pool:
        found = dict(pool.run([task(FINE), task(REFUSES)], always))
    assert found[task(FINE)].facts.binary_bytes == os.getpid()
    assert found[task(REFUSES)].status is Status.COMPILE_ERROR
