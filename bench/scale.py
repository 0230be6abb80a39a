"""What does one answer book for many models, devices and serving nodes cost?

    python bench/scale.py --url postgresql://... [--trials 30000] [--output bench/results/scale.json]
    python bench/scale.py                        the arithmetic alone, on the rows that were measured

Measured, on a PostgreSQL database without tables at the URL: the bytes of a trial in made-up trials (those of
bench/database.py), how many trials a second one writer and several record in transactions of a tuner's round, how many
serving processes a second open the database and choose a variant, and how large a mirror is, how long the first pull
takes and one that finds nothing new. Server and clients share the machine's cores, and others use them: what a core
could do is told by the CPU time of the server's processes, which must run on this machine. The rest is arithmetic on
those rows, on bench/results/database.json and on bench/results/tuning-efficiency.json, and says so: nothing was run at
that scale. Nothing is measured on any device.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from cache_bench.document import as_text
from database_bench import made

from pagegen import __version__
from pagegen.db import mirror, open_db
from pagegen.spec import CacheLayout, Status
from pagegen.targets import cpu_device

Row = dict[str, Any]
RESULTS = Path(__file__).parent / "results"
ROUND = 10  # trials of a tuner's transaction: a round's contenders on one batch
WRITERS, STARTERS = (1, 4), (1, 4)
AT_ONCE_S = 4.0

# What the page asks about.
MODELS, KV_DTYPES, DEVICES, BLOCK_SIZES, BATCHES = 100, 2, 10, 4, 12
TRIALS, NODES, STARTS_A_DAY, PULLS_A_DAY = 10**8, 10**4, 1, 24
COMPILE_S, COMPILERS, SAMPLE_S = 1.0, 8, 0.01


def measure(url: str, trials: int, folder: Path) -> Iterator[Row]:
    """The measured rows."""
    lines = folder / "made.jsonl"
    made.Maker(trials).write(lines)
    with open_db(url, shipped=False) as db:
        start, cpu, served = time.perf_counter(), time.process_time(), server_cpu_s(url)
        report = db.import_(lines)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        yield {
            "what": "bulk import into the server", "measured": True, "trials": trials,
            "trials_per_s": round(trials / seconds), "client_cpu_ms": round(1e3 * cpu / trials, 3),
            "server_cpu_ms": round(1e3 * (server_cpu_s(url) - served) / trials, 3), "malformed": len(report.malformed),
        }  # fmt: skip
        yield _size(url, trials)
    for writers in WRITERS:
        yield {"what": "trials recorded", "measured": True, "writers": writers, **_together("write", url, writers)}
    for starters in STARTERS:
        yield {"what": "processes that open and select", "measured": True, "processes": starters,
               **_together("select", url, starters)}  # fmt: skip
    yield from _mirrored(url, folder / "mirror.db")


def _size(url: str, trials: int) -> Row:
    engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.connect() as connection:
        tables = {
            name: connection.execute(sa.text(f"SELECT pg_total_relation_size('{name}')")).scalar_one()
            for name in ("trials", "environments", "portfolios", "kernels", "variants")
        }
    engine.dispose()
    return {
        "what": "size on the server", "measured": True, "trials": trials,
        "bytes_a_trial": round(sum(tables.values()) / trials),
        "by_table": {name: round(size / trials, 1) for name, size in tables.items()},
    }  # fmt: skip


def server_cpu_s(url: str) -> float:
    """CPU seconds of all processes of a server on this machine so far, those that ended included."""
    engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"), poolclass=sa.NullPool)
    with engine.connect() as connection:
        backend = connection.execute(sa.text("SELECT pg_backend_pid()")).scalar_one()
        parent = int(_stat(backend)[1])
        ticks = sum(map(int, _stat(parent)[11:15]))  # its own, and its ended children's
        for process in Path("/proc").glob("[0-9]*"):
            try:
                fields = _stat(int(process.name))
            except OSError:  # it ended
                continue
            if int(fields[1]) == parent:
                ticks += sum(map(int, fields[11:13]))
    engine.dispose()
    return ticks / os.sysconf("SC_CLK_TCK")


def _stat(process: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on: state, parent, ..., and ticks from the 14th on."""
    return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()


def _together(verb: str, url: str, processes: int) -> Row:
    """So many processes at once for some seconds: what they did a second, all together."""
    command = [sys.executable, __file__, "--work", verb, "--url", url]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    running = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(processes)
    ]
    for one in running:
        assert one.stdout is not None
        one.stdout.readline()  # it has imported everything
    for one in running:
        assert one.stdin is not None
        one.stdin.write(f"{os.getpid()}\n")
        one.stdin.flush()
    served = server_cpu_s(url)
    told = [json.loads(one.communicate()[0]) for one in running]
    done = sum(t["done"] for t in told)
    return {
        "server_cpu_ms": round(1e3 * (server_cpu_s(url) - served) / done, 2),
        "a_second": round(sum(t["done"] / t["seconds"] for t in told), 1),
        "median_ms": round(statistics.median(ms for t in told for ms in t["ms"]), 2),
        "client_cpu_ms": round(1e3 * sum(t["cpu_s"] for t in told) / sum(t["done"] for t in told), 2),
    }


def work(verb: str, url: str) -> None:
    """A process of `_together`."""
    from pagegen import selection

    spec, device = made.specs()[0], made.devices()[2]
    load = made.profile().workloads[5]
    if verb == "write":
        with open_db(url, read_only=True, shipped=False) as read:
            plain = read.trials(spec=spec, layout=CacheLayout(block_size=16), device=device, status=Status.OK)[0]
    selection.select(spec, CacheLayout(block_size=16), device.target, load, url)  # what imports and caches
    print("ready", flush=True)
    sys.stdin.readline()
    times, done = [], 0
    start, cpu = time.perf_counter(), time.process_time()
    db = open_db(url, shipped=False) if verb == "write" else None
    while time.perf_counter() - start < AT_ONCE_S:
        began = time.perf_counter()
        if db is not None:
            with db.atomic():
                for i in range(ROUND):
                    us = (plain.samples_us[0] + os.getpid() / 1e7 + (done + i) / 1e3,)
                    db.record(replace(plain, samples_us=us + plain.samples_us))
            done += ROUND
        else:
            found = selection.select(spec, CacheLayout(block_size=16), device.target, load, url)
            assert found.grade == "exact", found.reason
            done += 1
        times.append(1e3 * (time.perf_counter() - began))
    seconds = time.perf_counter() - start
    print(json.dumps({"done": done, "seconds": seconds, "cpu_s": time.process_time() - cpu, "ms": times}))


def _mirrored(url: str, path: Path) -> Iterator[Row]:
    device = made.devices()[2]
    for what in ("first pull of a mirror, one architecture", "pull that finds nothing new"):
        start, cpu, served = time.perf_counter(), time.process_time(), server_cpu_s(url)
        found = mirror.pull(url, path, target=device.target)
        yield {
            "what": what, "measured": True, "seconds": round(time.perf_counter() - start, 2),
            "client_cpu_ms": round(1e3 * (time.process_time() - cpu)),
            "server_cpu_ms": round(1e3 * (server_cpu_s(url) - served)), "trials": found.trials,
            "portfolios": found.portfolios, "mib": round(path.stat().st_size / 2**20, 2),
        }  # fmt: skip


def arithmetic(rows: list[Row]) -> Iterator[Row]:
    """What follows from measured rows for the scale that the page asks about."""
    efficiency = json.loads((RESULTS / "tuning-efficiency.json").read_text(encoding="utf-8"))
    cells = [(case["strategies"]["guided"], case) for case in efficiency["cases"]]
    batches = statistics.mean(len(case["batches"]) for _, case in cells)
    trials = statistics.mean(g["trials"]["median"] * case["cells"] for g, case in cells) / batches
    samples = statistics.mean(g["samples"]["median"] * case["exhaustive_samples"] for g, case in cells) / batches
    compiled = statistics.mean(g["compiled"]["median"] * case["variants"] for g, case in cells)
    kernels = MODELS * KV_DTYPES * DEVICES * BLOCK_SIZES
    device_s = BATCHES * samples * SAMPLE_S
    cell_s = device_s + compiled * COMPILE_S / COMPILERS
    yield {
        "what": "tuning N models x M devices x B block sizes", "measured": False,
        "models": MODELS, "kv_dtypes": KV_DTYPES, "devices": DEVICES, "block_sizes": BLOCK_SIZES, "batches": BATCHES,
        "trials_a_batch": round(trials, 1), "samples_a_batch": round(samples, 1), "compiled": round(compiled, 1),
        "assumed": {"compile_s": COMPILE_S, "compilers": COMPILERS, "sample_s": SAMPLE_S},
        "cells": kernels, "trials": round(kernels * BATCHES * trials), "cell_s": round(cell_s, 1),
        "hours_a_device": round(kernels / DEVICES * cell_s / 3600, 1),
        "compile_cpu_hours": round(kernels * compiled * COMPILE_S / 3600),
    }  # fmt: skip
    size = next(r for r in rows if r["what"] == "size on the server")["bytes_a_trial"]
    database = json.loads((RESULTS / "database.json").read_text(encoding="utf-8"))
    lite = next(r for r in database["rows"] if r["what"] == "size")["bytes_a_trial"]
    record_ms = min(r["server_cpu_ms"] for r in rows if r["what"] == "trials recorded")
    yield {
        "what": "a database of 10^8 trials", "measured": False, "trials": TRIALS,
        "gb_on_the_server": round(size * TRIALS / 1e9, 1), "gb_in_sqlite": round(lite * TRIALS / 1e9, 1),
        "server_core_hours_to_record": round(TRIALS * record_ms / 3.6e6, 1),
    }  # fmt: skip
    starts_ms = min(r["server_cpu_ms"] for r in rows if r["what"] == "processes that open and select")
    first, again = (r for r in rows if "pull" in r["what"])
    portfolios = (
        MODELS * KV_DTYPES * BLOCK_SIZES
    )  # of a node's own device; at most so much each: a file has fixed parts
    mirror_mib = first["mib"] / first["portfolios"] * portfolios
    yield {
        "what": "10^4 serving nodes", "measured": False, "nodes": NODES, "portfolios": portfolios,
        "starts_a_second": round(NODES * STARTS_A_DAY / 86400, 2),
        "core_s_for_all_at_once": round(NODES * starts_ms / 1e3),
        "hourly_pulls_a_second": round(NODES * PULLS_A_DAY / 86400, 1),
        "cores_for_hourly_pulls": round(NODES * PULLS_A_DAY / 86400 * again["server_cpu_ms"] / 1e3, 2),
        "mirror_mib": round(mirror_mib), "first_pulls_gb": round(NODES * mirror_mib * 2**20 / 1e9),
        "core_hours_for_first_pulls": round(
            NODES * portfolios * first["server_cpu_ms"] / first["portfolios"] / 3.6e6
        ),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", help="a PostgreSQL database without tables; without it the arithmetic is done again")
    parser.add_argument("--trials", type=int, default=30_000, help="made-up trials (default: 30,000)")
    parser.add_argument("--output", type=Path, default=RESULTS / "scale.json")
    parser.add_argument("--work", choices=["write", "select"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.url)
        return
    if options.url is None:
        document = json.loads(options.output.read_text(encoding="utf-8"))
        rows = [row for row in document["rows"] if row["measured"]]
        options.output.write_text(as_text({**document, "rows": rows + list(arithmetic(rows))}), encoding="utf-8")
        return
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        rows = list(measure(options.url, options.trials, Path(folder)))
    rows += arithmetic(rows)
    document = {
        "question": "What does one answer book for many models, devices and serving nodes cost?",
        "method": (__doc__ or "").split("\n\n")[2],
        "environment": {
            "cpu": cpu_device.current_device().name, "cores": os.cpu_count(),
            "load_average": round(os.getloadavg()[0], 2),
            "pagegen": __version__, "python": platform.python_version(), "system": f"Linux {platform.release()}",
        },
        "seconds": round(time.perf_counter() - start, 1),
        "rows": rows,
    }  # fmt: skip
    options.output.write_text(as_text(document), encoding="utf-8")
    print(as_text(document))


if __name__ == "__main__":
    main()
