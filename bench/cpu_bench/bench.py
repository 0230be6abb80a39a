"""`Bench`: the pool, the gauges and the peers' processes, and how a comparison of runners becomes rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from cpu_peers.cell import POOL_BYTES, Cell
from cpu_peers.client import Peer, PeerError

from cpu_bench.machine import available_bytes
from cpu_bench.ours import Pool, read_gauge, work_of
from cpu_bench.samples import Failed, Gauge, Runner, Timed, interleave, ratio, summary

Row = dict[str, Any]
RESERVE_BYTES = 3 << 30  # for others on this machine
LIMITS = ("walk", "read")  # how runners begin that compute nothing
PEER_BYTES = 700 << 20  # of a process with torch and a peer, besides what it is given


@dataclass
class Bench:
    """What all sections share."""

    rounds: int
    threads: int
    peers: list[Peer] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.set_num_threads(self.threads)
        self.pool = Pool()
        self.read = read_gauge(self.pool)

    def start_peers(self, names: Sequence[str], folder: Path) -> None:
        """Starts all processes, then asks each for its version; who has none is left out and listed as such."""
        found = [Peer(name, self.threads, folder.resolve()) for name in names]
        for peer in found:
            peer.start()
        for peer in found:
            try:
                self.versions[peer.name] = peer.version()
                self.peers.append(peer)
            except PeerError as error:
                self.versions[peer.name] = error.kind if error.kind == "not installed" else str(error)
                peer.close()

    def close(self) -> None:
        for peer in self.peers:
            peer.close()

    def compare(
        self, section: str, cell: dict[str, Any], runners: list[Runner], gauge: Gauge | None = None,
        *, over: Sequence[str] = (), unit: str = "GB/s",
    ) -> list[Row]:  # fmt: skip
        """Measures runners in turns and makes a row of each. `over`: names whose time every other is held against."""
        taken = interleave(runners, gauge or self.read, self.rounds, self.threads)
        rows = []
        for runner in runners:
            row: Row = {"section": section, "cell": cell, "what": runner.name, "note": runner.note, "unit": unit}
            samples = taken.of(runner.name)
            row |= {"status": "ok", **summary(samples)} if samples and not runner.failure else _failure(runner.failure)
            compared = [] if runner.name.startswith(LIMITS) else [o for o in over if o != runner.name]
            row["time_over"] = {o: found for o in compared if (found := ratio(taken, runner.name, o))}
            rows.append(row)
        return rows

    @contextlib.contextmanager
    def on_threads(self, threads: int) -> Iterator[None]:
        """Ours and the gauges on so many threads meanwhile; peers keep theirs."""
        before = self.threads
        try:
            torch.set_num_threads(threads)
            self.threads = threads
            yield
        finally:
            torch.set_num_threads(before)
            self.threads = before

    def with_peers(self, cell: Cell) -> Iterator[tuple[list[Runner], list[Runner]]]:
        """Lays the cell out in the peers' processes, as many at a time as memory allows; for each such part (there is
        one at least, of none where there are no peers) the runners that are ready and those that cannot."""
        waiting = list(self.peers)
        first = True
        while waiting or first:
            first = False
            free = available_bytes() - RESERVE_BYTES
            count = max(1, int(free / (PEER_BYTES + 1.3 * max(POOL_BYTES, cell.kv_bytes))))
            part, waiting = waiting[:count], waiting[count:]
            runners = [peer_runner(peer, cell) for peer in part]
            yield [r for r in runners if not r.failure], [r for r in runners if r.failure]
            for peer in part:
                try:
                    peer.free()
                except PeerError:
                    peer.close()


def peer_runner(peer: Peer, cell: Cell) -> Runner:
    """A peer with the cell laid out, or with the reason why it has none."""

    def run(first: int, calls: int) -> Timed:
        try:
            return peer.run(first, calls)
        except PeerError as error:
            raise Failed(str(error)) from error

    runner = Runner(peer.name, run, work_of(cell))
    try:
        peer.prepare(cell)
        runner.note = peer.note
    except PeerError as error:
        runner.failure = str(error)
    return runner


def _failure(reason: str) -> Row:
    kind, _, detail = reason.partition(": ")
    return {"status": kind or "no samples", "reason": detail}
