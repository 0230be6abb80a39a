"""A peer as the bench sees it: a process that is asked for one sample at a time."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpu_peers.cell import Cell

BENCH = Path(__file__).parents[1]
INSTALLED = BENCH.parent / ".venv-bench"
TIMEOUT_S = 300.0


class PeerError(Exception):
    """Why a peer has no number for a cell: `kind` is "not installed", "unsupported", "wrong", "died" or "error"."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(f"{kind}: {reason}")
        self.kind, self.reason = kind, reason


_KINDS = {"ImportError": "not installed", "ModuleNotFoundError": "not installed", "Unsupported": "unsupported"}


@dataclass
class Peer:
    """One peer's process, started when first asked and again after it died."""

    name: str
    threads: int
    folder: Path = INSTALLED
    note: str = ""

    def __post_init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._checked: dict[str, str] = {}  # kinds of cells and what is wrong with them, "" where nothing is

    def start(self) -> None:
        """Starts the process without waiting for it."""
        paths = [str(BENCH), str(BENCH.parent), str(self.folder / self.name), os.environ.get("PYTHONPATH", "")]
        threads = str(self.threads)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cpu_peers.worker", self.name, threads],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=BENCH,
            env={
                **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_WAIT_POLICY": "passive",
                "OMP_NUM_THREADS": threads, "KMP_BLOCKTIME": "0",
            },
        )  # fmt: skip

    def ask(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Sends one request and waits for its answer. Raises PeerError."""
        if self._process is None or self._process.poll() is not None:
            self.start()
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps({"do": verb, **arguments}) + "\n")
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], TIMEOUT_S)
            line = process.stdout.readline() if ready else None
        except OSError:
            line = ""
        if line is None:
            self.close()
            raise PeerError("died", f"no answer to {verb} within {TIMEOUT_S:.0f} s")
        if not line:
            status = process.wait()
            raise PeerError("died", f"the process ended with status {status} while asked to {verb}")
        answer: dict[str, Any] = json.loads(line)
        if not answer.pop("ok"):
            raise PeerError(_KINDS.get(answer["kind"], answer["kind"]), answer["reason"])
        return answer

    def version(self) -> str:
        return str(self.ask("version")["version"])

    def prepare(self, cell: Cell) -> None:
        """Checks the peer against float64 on a small cell of this kind, once, and lays the cell out."""
        kind = json.dumps({**cell.small().to_dict(), "batch": 0})
        self.ask("version")  # loads what a process that was started again has not: vLLM's library
        if kind not in self._checked:
            found = self.ask("check", cell=cell.to_dict())
            self._checked[kind] = "" if found["right"] else f"off by {found['error']:.3g} from float64"
        if self._checked[kind]:
            raise PeerError("wrong", self._checked[kind])
        self.note = self.ask("prepare", cell=cell.to_dict())["note"]

    def run(self, first: int, calls: int) -> tuple[float, float]:
        """(seconds, seconds of CPU time) of `calls` calls."""
        answer = self.ask("run", first=first, calls=calls)
        return answer["seconds"], answer["cpu_seconds"]

    def free(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.ask("free")

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
