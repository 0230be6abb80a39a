"""Processes killed at random moments while they write, and what is left: `python tests/db/crashes.py --kills 500`.

A child does all that writes (making the file, single trials, transactions of several, rules, profiles, merging, opening
anew, leading an old file up) and tells of every commit; the parent kills it after a random time. Whatever was told must
be there, nothing half, and the file must be sound. Each file takes many kills before a new one begins.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import processes
from database_fakes import H100, LAYOUT, PROFILE, SPEC, rule, trial

from pagegen.db import migrations, open_db

KILLS_A_FILE = 25
BATCH = 5
HERE = Path(__file__).parent
OLD = HERE / "schema_1.sql"


def restore_old(path: Path) -> None:
    """A file of schema version 1: the first to open it leads it up."""
    connection = sqlite3.connect(path)
    connection.executescript(OLD.read_text(encoding="utf-8"))
    connection.close()


def write_for_ever(path: Path, first: int, tell) -> None:
    """Writes trials numbered from `first` until killed; tells "s" for a single one, "b" for a batch, "p" for a rule."""
    number = first
    while True:
        with open_db(path) as db:
            tell(b"o")
            for _ in range(3):
                db.record(trial(detail=str(number)))
                tell(b"s")
                number += 1
                with db.atomic():
                    for i in range(BATCH):
                        db.record(trial(detail=str(number + i), environment={"round": str(number)}))
                    db.save_profile(PROFILE)
                tell(b"b")
                number += BATCH
            db.save_portfolio(
                spec=SPEC, layout=LAYOUT, device=H100, profile=PROFILE, rule=rule(), code_hash="c0de",
                created_at=f"2026-01-01T00:00:00.{number:09}",
            )  # fmt: skip
            tell(b"p")


def told_numbers(told: bytes, first: int) -> set[int]:
    """The trials of which a child told."""
    numbers, number = set(), first
    for event in told:
        size = {ord("s"): 1, ord("b"): BATCH}.get(event, 0)
        numbers |= set(range(number, number + size))
        number += size
    return numbers


def kill_once(path: Path, first: int, wait_s: float) -> tuple[bytes, bool]:
    """Starts a writer, kills it `wait_s` after it began; returns what it told, and whether it had ended by itself."""
    child = processes.started(lambda tell: write_for_ever(path, first, tell))
    told, end = b"", time.monotonic() + wait_s
    while (left := end - time.monotonic()) > 0:
        if select.select([child.reader], [], [], left)[0]:
            said = os.read(child.reader, 65536)
            if not said:
                break
            told += said
    os.kill(child.pid, signal.SIGKILL)
    failure = child.finish()
    return told + child.told, "-9" not in failure


def check(path: Path, expected: set[int], *, whole: bool) -> int:
    """The file must open, be sound and hold what was told, batches whole; returns its trials. Raises AssertionError."""
    with open_db(path) as db, db.store.reading() as connection:
        assert [tuple(r) for r in connection.exec_driver_sql("PRAGMA integrity_check")] == [("ok",)]
        assert connection.exec_driver_sql("PRAGMA foreign_key_check").all() == []
        rows = connection.exec_driver_sql(
            "SELECT t.detail, e.data FROM trials t JOIN environments e ON e.id = t.environment_id"
        ).all()
        stored = Counter(int(number) for number, _ in rows if number.isdigit())
        assert max(stored.values(), default=1) == 1, "a trial is there twice"
        lost = expected - set(stored)
        assert not lost, f"{len(lost)} trials are lost of which a commit was told, the first {min(lost)}"
        batches = Counter(json.loads(data)["environment"].get("round") for _, data in rows)
        batches.pop(None, 0)
        assert set(batches.values()) <= {BATCH}, "a transaction is there in part"
        if whole:
            assert db.verify() == []
    return sum(stored.values())


def crash(kills: int, seed: int, folder: Path, *, longest_s: float = 0.1) -> dict[str, int]:
    """Kills so many writers; returns counts of what happened. Raises AssertionError for the first thing amiss."""
    rng, counts = random.Random(seed), Counter()
    with open_db(folder / "warm.db") as db:  # what is compiled at a first use, no child has to
        db.record(trial())
    restore_old(folder / "warm-old.db")
    open_db(folder / "warm-old.db").close()
    path, expected, first = folder / "crashed.db", set(), 1000
    for number in range(kills):
        if number % KILLS_A_FILE == 0:
            for leftover in folder.glob("crashed.db*"):
                leftover.unlink()
            expected, first = set(), 1000
            counts["files"] += 1
            if counts["files"] % 2 == 0:
                restore_old(path)
        told, ended = kill_once(path, first, rng.expovariate(1 / (longest_s / 3)) % longest_s)
        assert not ended, "a writer failed by itself"
        expected |= told_numbers(told, first)
        first += 10_000
        before_ready = b"o" not in told
        counts["killed while opening" if before_ready else "killed while writing"] += 1
        counts["left a log"] += any(p.stat().st_size for p in folder.glob("crashed.db-[wj]*"))
        counts["commits told"] += len(told)
        counts["trials found"] = check(path, expected, whole=number % KILLS_A_FILE == KILLS_A_FILE - 1)
        counts["kills"] += 1
    assert migrations.FIRST == 1  # the old file is of the first version
    return dict(counts)


# What changes a file, or makes a change last.
WRITES = ("pwrite64", "ftruncate", "fdatasync", "fsync", "unlink")


def write_once(path: Path, first: int, tell) -> None:
    """One round of `write_for_ever`, and the end of the database's last connection."""

    class Enough(Exception):
        pass

    def until_the_end(said: bytes) -> None:
        tell(said)
        if said == b"p":
            raise Enough

    with contextlib.suppress(Enough):
        write_for_ever(path, first, until_the_end)


def kill_at_write(path: Path, first: int, call: str, number: int) -> tuple[bytes, bool]:
    """Runs `write_once` under strace, which kills it at its `number`-th such system call; returns what it told, and
    whether it ended by itself, having made fewer."""
    gate, opener = os.pipe()

    def work(tell) -> None:
        os.close(opener)
        os.read(gate, 1)
        write_once(path, first, tell)

    child = processes.started(work)
    os.close(gate)
    tracer = subprocess.Popen(
        ["strace", "-qq", f"--trace={call}", f"--inject={call}:signal=KILL:when={number}", "-p", str(child.pid)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    end = time.monotonic() + 20
    while "TracerPid:\t0" in Path(f"/proc/{child.pid}/status").read_text(encoding="utf-8"):
        if time.monotonic() > end or tracer.poll() is not None:
            os.kill(child.pid, signal.SIGKILL)
            child.finish()
            raise OSError(f"strace cannot attach: {tracer.communicate()[1]}")
        time.sleep(0.005)
    os.close(opener)
    failure = child.finish()
    tracer.communicate()
    assert failure == "" or "-9" in failure, failure
    return child.told, failure == ""


def crash_at_every_write(folder: Path, *, every: int = 1, old: bool = False) -> dict[str, int]:
    """Kills writers at each `every`-th system call that writes, on a new file each time (of schema version 1, where
    `old`); returns the counts of kills."""
    with open_db(folder / "warm.db") as db:
        write_once(folder / "warm.db", 1000, lambda said: None)
        assert db.verify() == []
    counts = Counter()
    for call in WRITES:
        number, ended = 1, False
        while not ended:
            path = folder / f"{call}{number}.db"
            if old:
                restore_old(path)
            told, ended = kill_at_write(path, 1000, call, number)
            check(path, told_numbers(told, 1000), whole=True)
            for leftover in folder.glob(f"{call}{number}.db*"):
                leftover.unlink()
            counts[call] += not ended
            number += every
    return dict(counts)


def main() -> None:
    """Kills and prints the counts as JSON; exit code 1 with the reason where something is lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every-write", action="store_true", help="kill at each system call that writes (strace)")
    parser.add_argument("--longest-ms", type=float, default=100.0, help="the longest that a writer lives")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="pagegen-crashes-"))
    started = time.monotonic()
    try:
        if arguments.every_write:
            new, old = (crash_at_every_write(folder, old=old) for old in (False, True))
            counts = {"kills": sum(new.values()) + sum(old.values()), "new file": new, "old file": old}
        else:
            counts = crash(arguments.kills, arguments.seed, folder, longest_s=arguments.longest_ms / 1e3)
    except AssertionError as error:
        print(f"seed {arguments.seed}: {error}; the files are in {folder}", file=sys.stderr)
        raise SystemExit(1) from error
    shutil.rmtree(folder)
    print(json.dumps({**counts, "seconds": round(time.monotonic() - started, 1), "seed": arguments.seed}))


if __name__ == "__main__":
    main()
