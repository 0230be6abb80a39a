"""Tuning on a real Ray cluster of several nodes on this machine, into a real database: whatever dies, every trial ends
exactly once and the answer is the one machine's."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fleet_fakes import KIT, PROFILE, ROOT, SPEC, FleetBench, answer, ended, fake_device
from pagegen_autotune import job, tune
from pagegen_autotune.fleet import tune_fleet

from pagegen import targets
from pagegen.db import leases, open_db

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'pagegen-attention[fleet]'"
)
DRIVER = ROOT / "tests" / "unit" / "fleet_driver.py"
PATH = os.pathsep.join(str(ROOT / folder) for folder in ("", "autotune", "tests/unit"))
STORE_BYTES = 80 * 2**20  # the least that Ray takes, a node
NAMES = ("fake CPU", "other CPU")


class Nodes:
    """A Ray cluster of processes on this machine: a head that measures nothing, and nodes of two CPUs each."""

    def __init__(self, names: tuple[str, ...]):
        from ray._private.utils import get_ray_address_file
        from ray.cluster_utils import Cluster

        # Ray notes a head's address in its default folder, and makes that only for a head that works there.
        Path(get_ray_address_file(None)).parent.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="pagegen-ray-"))
        (self.folder / "pids").mkdir()
        plain = {"object_store_memory": STORE_BYTES, "include_dashboard": False}
        self._cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "temp_dir": str(self.folder), **plain}
        )  # fmt: skip
        self.address: str = self._cluster.address
        self.nodes = [self.add(name) for name in names]

    def add(self, name: str):
        variables = {"FLEET_DEVICE": name, "FLEET_PIDS": str(self.folder / "pids"), "FLEET_SAMPLE_S": "0.001"}
        return self._cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES, env_vars=variables)

    def remove(self, node) -> None:
        self._cluster.remove_node(node, allow_graceful=False)

    def stations(self) -> list[int]:
        """The processes that measure just now, the latest last."""
        files = sorted((self.folder / "pids").iterdir(), key=lambda p: p.stat().st_mtime)
        return [int(file.name) for file in files if _lives(int(file.name))]

    def stop(self) -> None:
        processes = [info.process.pid for node in self._all() for info in _infos(node)]
        self._cluster.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)
        end = time.monotonic() + 20
        while any(map(_lives, [*processes, *self.stations_ever])) and time.monotonic() < end:
            time.sleep(0.1)
        assert not [pid for pid in (*processes, *self.stations_ever) if _lives(pid)]

    def _all(self):
        return [self._cluster.head_node, *self._cluster.worker_nodes]

    @property
    def stations_ever(self) -> list[int]:
        folder = self.folder / "pids"
        return [int(file.name) for file in folder.iterdir()] if folder.exists() else []


def _infos(node) -> list:
    return [info for infos in node.all_processes.values() for info in infos]


def _lives(pid: int) -> bool:
    """Whether there is such a process that is not just waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def quiet() -> Iterator[None]:
    """What Ray's processes inherit: pagegen's and the tests' modules, and nothing told to anybody."""
    before = signal.getsignal(signal.SIGTERM)  # Ray's nodes take it for themselves
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PATH)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def cluster(quiet) -> Iterator[Nodes]:
    nodes = Nodes((NAMES[0], NAMES[0]))
    yield nodes
    nodes.stop()


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict:
    """By device: the answer and the trials of one machine that nobody disturbs."""
    found = {}
    for name in NAMES:
        device = fake_device(name)
        with pytest.MonkeyPatch.context() as patch, open_db(tmp_path_factory.mktemp("alone") / "alone.db") as db:
            patch.setattr(targets, "current_device", lambda target, device=device: device)
            bench = FleetBench(SPEC, device.target, device, PROFILE, seed=0)
            report = tune(SPEC, PROFILE, db=db, bench=bench, block_sizes=(16,), target="cpu", progress=False)
            found[name] = answer(report), ended(db)
    return found


@pytest.fixture
def slow(nightly: bool) -> None:
    """For tests that take half a minute and more; tests/unit/test_claims.py has two tuners at once for every run."""
    if not nightly:
        pytest.skip("takes half a minute: --nightly")


def fleet(cluster: Nodes, db, **options):
    given = {"block_sizes": (16,), "kit": KIT, "progress": False, **options}
    return tune_fleet(SPEC, PROFILE, address=cluster.address, db=db, **given)


def driver(address: str, url: str, lease_s: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(DRIVER), address, url, str(lease_s)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": PATH},
    )  # fmt: skip


def finished(process: subprocess.Popen[str]) -> dict:
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 0, out
    return json.loads(out.splitlines()[-1])


def check(url: str, answers: dict, alone: dict) -> None:
    """The answers are the one machine's, every trial ended once, and nobody holds anything."""
    wanted = {name: found for name, (found, _) in alone.items() if name in answers}
    assert json.loads(json.dumps(answers)) == json.loads(json.dumps(wanted)) and wanted
    with open_db(url) as db:
        assert ended(db) == sum((alone[name][1] for name in wanted), Counter())
        assert db.verify() == [] and leases.held(db.store) == []


def when(condition: Callable[[], bool], act: Callable[[], None]) -> threading.Thread:
    """Does something in a thread as soon as something holds."""

    def wait() -> None:
        end = time.monotonic() + 120
        while time.monotonic() < end:
            with contextlib.suppress(Exception):
                if condition():
                    act()
                    return
            time.sleep(0.1)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def trials(url: str) -> int:
    """How many there are. Raises DatabaseError where there is no database yet, or just now."""
    with open_db(url, read_only=True, shipped=False) as db, db.store.reading() as connection:
        return connection.exec_driver_sql("SELECT count(*) FROM trials").scalar()


@pytest.mark.nightly  # 34 s of CPU time; test_a_node_that_dies stays
def test_a_killed_driver_a_killed_station_and_a_database_that_is_down_cost_nothing(
    cluster, alone, postgres, postgres_place
):  # fmt: skip
    """Two scenarios in one test, since tests of a module may run in several processes, each with a cluster."""
    url = postgres_place("fleet")
    first = driver(cluster.address, url, 2.0)
    when(lambda: trials(url) > 25, first.kill).join()
    first.communicate()
    assert first.returncode == -signal.SIGKILL
    kept = trials(url)
    second = driver(cluster.address, url, 2.0)
    killed: list[int] = []

    def disturb() -> None:
        killed.append(cluster.stations()[-1])
        os.kill(killed[0], signal.SIGKILL)
        with postgres.down():
            time.sleep(1.5)

    when(lambda: trials(url) > kept + 15, disturb).join()
    told = finished(second)
    assert killed and told["lost"] >= 1 and told["left_out"] == [] and told["resumed"] >= kept > 25
    check(url, told["answers"], alone)


def test_a_driver_that_is_told_to_end_gives_its_leases_back(cluster, alone, postgres_place, slow):
    url = postgres_place("told")
    first = driver(cluster.address, url, 60.0)
    when(lambda: trials(url) > 25, first.terminate).join()
    first.communicate(timeout=60)
    assert first.returncode == 3
    with open_db(url) as db:
        assert leases.held(db.store) == []
    check(url, finished(driver(cluster.address, url, 60.0))["answers"], alone)


def test_a_database_that_is_down_for_ten_seconds_costs_nothing(cluster, alone, postgres, postgres_place, slow):
    url = postgres_place("cut")

    def cut() -> None:
        with postgres.down():
            time.sleep(10)

    cutting = when(lambda: trials(url) > 25, cut)
    with open_db(url) as db:
        report = fleet(cluster, db)
    cutting.join()
    check(url, {one.device.name: answer(one) for one in report.reports}, alone)


def test_two_fleets_at_once_share_the_work_and_neither_measures_what_the_other_does(
    cluster, quiet, alone, postgres_place, slow
):  # fmt: skip
    url = postgres_place("two")
    other = Nodes((NAMES[0],))
    try:
        drivers = [driver(address, url, 20.0) for address in (cluster.address, other.address)]
        told = [finished(process) for process in drivers]
    finally:
        other.stop()
    for one in told:
        check(url, one["answers"], alone)


def test_a_node_that_dies_and_one_that_comes_and_every_kind_of_device_in_one_run(
    cluster, alone, tmp_path, monkeypatch, slow
):  # fmt: skip
    # a kind that begins when the other has chosen starts from its choice: on a busy machine, another answer
    monkeypatch.setattr(job, "elsewhere", lambda *asked: [])
    url = str(tmp_path / "kinds.db")
    doomed = cluster.add(NAMES[1])
    reports: list = []
    with open_db(url) as db:
        # Ray's nodes are begun by the main thread alone
        running = threading.Thread(target=lambda: reports.append(fleet(cluster, db)))
        running.start()
        when(lambda: len(db.trials(device=fake_device(NAMES[1]))) > 25, lambda: cluster.remove(doomed)).join()
        replacement = cluster.add(NAMES[1])
        running.join()
        try:
            (report,) = reports
            assert report.lost >= 1 and len(report.reports) == 2
            check(url, {one.device.name: answer(one) for one in report.reports}, alone)
            chosen = fleet(cluster, db, devices=["Other"])
            assert [one.device.name for one in chosen.reports] == [NAMES[1]]
        finally:
            cluster.remove(replacement)
