"""What does the tuner itself take for a trial, here and on a Ray cluster, and how does it scale?

    python bench/fleet.py [--quick] [--stations 1,2,4] [--races 200] [--output bench/results/fleet.json]

A trial is a variant on a batch, seven samples beside the default's. Devices are arithmetic: a sample is a number and
takes no time ("fake clock"), so that all of a trial's time is the tuner's and the cluster's; or it sleeps for 2 ms in
place of a kernel, so that one sees how busy devices are kept. The cluster is one of Ray's on this machine, a node a
process group with one CPU each. "executor": races are sent and collected, and nothing else. "run": a whole run with
its search, leases and a SQLite file whose commits are synced. Stations share this machine's cores, so the rows with a
fake clock say what the tuner takes, not how it scales; the rows with sleeping kernels say that.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is loaded

from cache_bench.document import as_text
from cpu_bench import machine
from fleet_bench import fake
from pagegen_autotune.executor import Entry, Executor, LocalExecutor, Race
from pagegen_autotune.fleet import tune_fleet
from pagegen_autotune.fleet.cluster import Cluster, Member
from pagegen_autotune.fleet.executor import RayExecutor
from pagegen_autotune.interrupt import StopSignal
from pagegen_autotune.tuner import tune

from pagegen import settings, targets
from pagegen.db import open_db
from pagegen.spec.result import CONFIRM

Row = dict[str, Any]
HERE = Path(__file__).parent
RIVALS, ROUNDS = 8, 7
SLEEP_S = 0.002
STORE_BYTES = 80 * 2**20  # the least that Ray takes, a node


def race(number: int) -> Race:
    """The default and some rivals on one batch, without eliminations."""
    entries: tuple[Entry, ...] = tuple((fake.LAYOUT, variant) for variant in fake.variants(1 + RIVALS))
    workloads = fake.PROFILE.workloads
    return Race(
        entries=entries, workload=workloads[number % len(workloads)], purpose=CONFIRM, rounds=ROUNDS, until=1e12,
        seed=number, essential=entries[:1],
    )  # fmt: skip


def sent_and_collected(executor: Executor, races: int) -> tuple[float, float]:
    """Seconds, and CPU seconds of this process, for so many races."""
    executor.check(fake.LAYOUT, fake.variants(1 + RIVALS))
    _collect(executor, 2 * max(1, executor.free))  # every station has checked what it times
    start, cpu = time.perf_counter(), time.process_time()
    _collect(executor, races)
    return time.perf_counter() - start, time.process_time() - cpu


def _collect(executor: Executor, races: int) -> None:
    begun = done = 0
    while done < races:
        while executor.free and begun < races:
            executor.start(race(begun))
            begun += 1
        done += len(executor.ended(0.25))


def executor_row(what: str, stations: int, sleep_s: float, races: int, executor: Executor) -> Row:
    seconds, cpu = sent_and_collected(executor, races)
    trials = races * RIVALS
    row = {
        "part": "executor", "where": what, "stations": stations, "sample_ms": 1e3 * sleep_s, "trials": trials,
        "trials_a_second": round(trials / seconds, 1), "ms_a_trial": round(1e3 * seconds / trials, 3),
        "driver_cpu_ms_a_trial": round(1e3 * cpu / trials, 3),
    }  # fmt: skip
    if sleep_s:
        ideal_s = races * (1 + RIVALS) * ROUNDS * sleep_s / stations
        row["busy"] = round(ideal_s / seconds, 3)
    return row


def run_row(what: str, stations: int, tuned: Callable[[str], Any]) -> Row:
    """A whole run into a new file."""
    with tempfile.TemporaryDirectory(prefix="pagegen-bench-") as folder:
        url = str(Path(folder) / "fleet.db")
        start, cpu = time.perf_counter(), time.process_time()
        report = tuned(url)
        seconds, own = time.perf_counter() - start, time.process_time() - cpu
        with open_db(url, shipped=False) as db:
            trials = len(db.trials())
        return {
            "part": "run", "where": what, "stations": stations, "sample_ms": 0.0, "trials": trials,
            "trials_a_second": round(trials / seconds, 1), "ms_a_trial": round(1e3 * seconds / trials, 3),
            "driver_cpu_ms_a_trial": round(1e3 * own / trials, 3), "chosen": chosen(report),
        }  # fmt: skip


def chosen(report: Any) -> str:
    """The variants of a run's rule, to show that all runs find the same."""
    (only,) = getattr(report, "reports", (report,))
    return " ".join(d.chosen.name for row in only.rows for d in row.decisions)


def here(races: int) -> Iterator[Row]:
    for sleep_s in (0.0, SLEEP_S):
        bench = fake.FakeBench(fake.SPEC, None, fake.DEVICE, fake.PROFILE, seed=0)
        bench.seconds = sleep_s
        executor = LocalExecutor(bench, time.monotonic, StopSignal())
        yield executor_row("this process", 1, sleep_s, races, executor)
    targets.current_device = lambda target: fake.DEVICE
    bench = fake.FakeBench(fake.SPEC, None, fake.DEVICE, fake.PROFILE, seed=0)
    yield run_row(
        "this process", 1,
        lambda url: tune(fake.SPEC, fake.PROFILE, db=url, bench=bench, block_sizes=(16,), target="cpu", progress=False),
    )  # fmt: skip


@contextmanager
def cluster(stations: int, sleep_s: float) -> Iterator[str]:
    """The address of a cluster of so many nodes on this machine."""
    from ray._private.utils import get_ray_address_file
    from ray.cluster_utils import Cluster as Nodes

    # Ray notes a head's address in its default folder, and makes that only for a head that works there.
    Path(get_ray_address_file(None)).parent.mkdir(parents=True, exist_ok=True)
    plain = {"object_store_memory": STORE_BYTES, "include_dashboard": False}
    with tempfile.TemporaryDirectory(prefix="pagegen-ray-") as folder:
        nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 0, "temp_dir": folder, **plain})
        for _ in range(stations):
            nodes.add_node(num_cpus=1, env_vars={fake.SAMPLE_S: str(sleep_s)}, object_store_memory=STORE_BYTES)
        try:
            yield nodes.address
        finally:
            nodes.shutdown()


def on_ray(stations: int, sleep_s: float, races: int) -> Iterator[Row]:
    with cluster(stations, sleep_s) as address:
        with Cluster(address, fake.SPEC, fake.PROFILE, devices=(), seed=0, kit=fake.KIT) as found:
            members: list[Member] = []
            while len(members) < stations:
                members += found.look()
                time.sleep(0.1)
            executor = RayExecutor(found, fake.SPEC, members[0], clock=time.monotonic, stop=StopSignal())
            for member in members[1:]:
                executor.join(member)
            yield executor_row("Ray", stations, sleep_s, races, executor)
        if not sleep_s:
            yield run_row(
                "Ray, with its start", stations,
                lambda url: tune_fleet(
                    fake.SPEC, fake.PROFILE, address=address, db=url, block_sizes=(16,), kit=fake.KIT, progress=False
                ),
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few races on one station; writes nothing by default")
    parser.add_argument("--stations", default="1,2,4", help="numbers of nodes, by commas")
    parser.add_argument("--races", type=int, default=200)
    parser.add_argument("--output", type=Path, help="default: bench/results/fleet.json, where not --quick")
    options = parser.parse_args()
    stations = [1] if options.quick else [int(count) for count in options.stations.split(",")]
    races = 20 if options.quick else options.races
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, sys.path)])  # for the nodes' processes
    settings.keep_ray_quiet()
    started, rows = time.perf_counter(), []

    def every() -> Iterator[Row]:
        yield from here(races)
        for count in stations:
            for sleep_s in (0.0, SLEEP_S):
                yield from on_ray(count, sleep_s, races)

    environment = machine.environment({"ray": _ray_version()})
    for row in every():
        print(json.dumps(row), flush=True)
        rows.append(row)
    document = {
        "question": (__doc__ or "").partition("\n")[0],
        "method": (__doc__ or "").rpartition("\n\n")[2].strip(),
        "environment": {**environment, "cores": os.cpu_count()},
        "load_average_after": round(os.getloadavg()[0], 2),
        "races": races,
        "quick": options.quick,
        "seconds": round(time.perf_counter() - started, 1),
        "rows": rows,
    }
    output = options.output or (None if options.quick else HERE / "results" / "fleet.json")
    if output is not None:
        output.write_text(as_text(document), encoding="utf-8")
    print(f"{document['seconds']:.0f} s", file=sys.stderr)


def _ray_version() -> str:
    import ray

    return str(ray.__version__)


if __name__ == "__main__":
    main()
