"""kill -9 in the middle of a run: what was measured is there, and the next run goes on from it."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "killed_tuning.py"
ROOT = PROGRAM.parents[2]


def start(path: Path, seconds: float) -> subprocess.Popen[str]:
    search = os.pathsep.join([str(ROOT), str(ROOT / "autotune")])
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), str(path), str(seconds)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": search},
    )  # fmt: skip


def rows(path: Path) -> list[tuple[int, str]]:
    """Every stored trial: its number and its samples."""
    if not path.exists():
        return []
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)
    try:
        return connection.execute("SELECT id, samples_us FROM trials ORDER BY id").fetchall()
    except sqlite3.OperationalError:  # its tables are not there yet
        return []
    finally:
        connection.close()


def finish(path: Path) -> tuple[int, int, str]:
    """(samples taken, trials found, what was chosen) of an undisturbed run."""
    running = start(path, 0.0)
    out, _ = running.communicate(timeout=100)
    assert running.returncode == 0
    taken, resumed, chosen = out.split(maxsplit=2)
    return int(taken), int(resumed), chosen.strip()


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_killed_run_keeps_every_finished_trial_and_the_next_one_ends_where_an_undisturbed_one_does(tmp_path):
    whole, _, expected = finish(tmp_path / "undisturbed.db")
    path = tmp_path / "killed.db"
    running = start(path, 0.004)
    until = time.monotonic() + 60
    while len(rows(path)) < 30 and running.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    os.kill(running.pid, signal.SIGKILL)
    running.communicate()
    kept = rows(path)
    assert running.returncode == -signal.SIGKILL and len(kept) >= 30
    taken, resumed, chosen = finish(path)
    assert resumed == len(kept) and chosen == expected and rows(path)[: len(kept)] == kept
    samples = sum(text.count(",") + 1 for _, text in kept)
    assert taken <= whole - samples + 7 * 24  # at most the rounds of the race that it was killed in are taken again
