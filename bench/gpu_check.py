"""Is pagegen right and fast on this GPU? One script for one GPU and 8 minutes at most; docs/gpu-check.md says more.

    python3 bench/gpu_check.py [--budget 480] [--parts correctness,speed] [--site DIR] [--output DIR]
    python3 bench/gpu_check.py --dry-run

Kernels against the float64 reference, tuning, bandwidth, peers, published latencies, CUDA graphs, torch.compile and the
cost model's ranking, each with its share of the time. The JSON is written after every case. Without a GPU, --dry-run
takes the same paths on the CPU with small sizes; its figures mean nothing and are not kept as results.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cache_bench.document import as_text
from gpu_check_bench import needed
from gpu_check_bench.aims import aims, table
from gpu_check_bench.document import Document, stamp
from gpu_check_bench.parts import BY_NAME, PARTS, Part
from gpu_check_bench.supervisor import FOLDERS, ROOT, Supervisor

BUDGET_S, DRY_RUN_BUDGET_S, LEAST_BUDGET_S = 480.0, 240.0, 60.0
RESULTS = ROOT / "bench" / "results" / "gpu"
RECORDS = ROOT / "cache_db" / "records"
MAX_SIDE = 14  # processes that check kernels side by side, half a GiB of device memory each
_DEVICE = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
QUESTION = "Is pagegen right and fast on this GPU?"
METHOD = (
    "Kernels are checked against the float64 reference before they are timed. Decode steps are timed in CUDA graphs of "
    "calls that read different blocks, after a read of several times the last-level cache, in rounds that every "
    "contender takes part in; times are medians, and rates count the bytes of K and V alone."
)


class Unwritable(Exception):
    """Where the results are to go."""


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where everything ran and nothing failed, 1 where something failed or was cut, 2 where it cannot run here."""
    options = _options(arguments)
    path = [*map(str, FOLDERS), *(entry for entry in sys.path if entry), *options.site]
    sys.path[:] = path
    wanted = (*needed.RUNTIME, *(() if options.dry_run else needed.GPU), *needed.OWN)
    missing = needed.missing(wanted)
    if missing:
        print(needed.advice(missing, f"{sys.version_info[0]}.{sys.version_info[1]}"), file=sys.stderr)
        return 2
    device = _device(options.dry_run, path)
    if device is None:
        print("no GPU that torch can use is here: --dry-run takes the same paths on the CPU", file=sys.stderr)
        return 2
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    try:
        with _folder(options.work) as folder:
            document = _run(options, device, name, folder, path)
            _keep_records(options, name, folder)
    except Unwritable as error:
        print(error, file=sys.stderr)
        return 2
    print(table(document))
    states = {part["state"] for part in document["parts"].values()}
    return int(states != {"done"} or any("error" in row for row in document["rows"]))


def _run(options: argparse.Namespace, device: str, name: str, folder: Path, path: list[str]) -> dict[str, Any]:
    output = options.output or (None if options.dry_run else RESULTS)
    head = {
        "question": QUESTION, "method": METHOD, "device": device, "dry_run": options.dry_run, "started": stamp(),
        "budget_s": options.budget, "packages": needed.versions(("torch", "triton", "numpy", *needed.OWN)),
    }  # fmt: skip
    document = Document(None if output is None else output / f"{name}.json", head, options.parts)
    try:
        document.publish()  # a place that cannot be written is told now, not after eight minutes
    except OSError as error:
        raise Unwritable(f"argument --output: {document.path} cannot be written: {error.strerror or error}") from error
    supervisor = Supervisor(
        options.parts, document, budget_s=options.budget, dry_run=options.dry_run, folder=folder,
        side=1 if options.dry_run else max(1, min(MAX_SIDE, len(os.sched_getaffinity(0)) - 2)), path=path,
        environment=_environment(options.dry_run, folder), records=str(_records_path(options, name) or ""),
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )  # fmt: skip
    signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    with contextlib.suppress(KeyboardInterrupt):  # what ran is kept
        supervisor.run()
    document.aims = aims(document.rows, dry_run=options.dry_run)
    document.write()
    if document.unwritten:
        print(f"{document.unwritten}; the whole document follows", file=sys.stderr)
        print(as_text(document.to_dict()))
    return document.to_dict()


def _environment(dry_run: bool, folder: Path) -> dict[str, str]:
    """A database of the run's own, OpenMP threads that wait asleep, and no GPU for a dry run."""
    changed = {"PAGEGEN_DB": str(folder / "tuning.db"), "OMP_WAIT_POLICY": "passive", "PYTHONUNBUFFERED": "1"}
    if dry_run:
        changed |= {"CUDA_VISIBLE_DEVICES": "", "PAGEGEN_TARGET": "cpu"}
    kept = {name: value for name, value in os.environ.items() if name not in ("PAGEGEN_TARGET", "PAGEGEN_CHECK")}
    return {**kept, **changed}


def _device(dry_run: bool, path: list[str]) -> str | None:
    """The device's name, asked in a process of its own; None for no GPU."""
    if dry_run:
        return "dry run"
    program = f"import sys; sys.path[:] = {path!r}; {_DEVICE}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    return lines[-1] if done.returncode == 0 and lines else None


def _records_path(options: argparse.Namespace, name: str) -> Path | None:
    """Where the run's records go: to those that ship, or beside the JSON where another folder was named."""
    if options.output is not None:
        return Path(options.output) / f"{name}.records.jsonl"
    return None if options.dry_run else RECORDS / f"{name}.jsonl"


def _keep_records(options: argparse.Namespace, name: str, folder: Path) -> None:
    made, kept = folder / "records.jsonl", _records_path(options, name)
    if made.exists() and kept is not None:
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(made, kept)
            print(f"records: {kept}", file=sys.stderr)
        except OSError as error:
            print(f"{kept} cannot be written: {error.strerror or error}; --work keeps the trials", file=sys.stderr)


@contextlib.contextmanager
def _folder(chosen: Path | None) -> Iterator[Path]:
    """The folder of logs and trials: a temporary one, or the one that was named, which stays."""
    if chosen is not None:
        chosen.mkdir(parents=True, exist_ok=True)
        yield chosen
        return
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as made:
        yield Path(made)


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--dry-run", action="store_true", help="the same paths on the CPU, with small sizes")
    made.add_argument("--budget", type=_seconds, help=f"seconds in all (default {BUDGET_S:.0f})")
    made.add_argument("--parts", type=_parts, default=PARTS, help=f"by commas, of {', '.join(BY_NAME)}")
    made.add_argument("--site", action="append", default=[], metavar="DIR", help="a folder of packages missing here")
    made.add_argument("--output", type=Path, metavar="DIR", help="for the JSON and the records")
    made.add_argument("--work", type=Path, metavar="DIR", help="keeps logs and trials here")
    return made


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser()
    options = made.parse_args(arguments)
    if options.budget is None:
        options.budget = DRY_RUN_BUDGET_S if options.dry_run else BUDGET_S
    for folder in options.site:
        if not Path(folder).is_dir():
            made.error(f"argument --site: {folder} is no folder")
    if options.dry_run and options.output is not None and options.output.resolve() == RESULTS.resolve():
        made.error("argument --output: a dry run is no result of a GPU")
    options.site = [str(Path(folder).resolve()) for folder in options.site]
    return options


def _seconds(text: str) -> float:
    value = float(text)
    if not LEAST_BUDGET_S <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be {LEAST_BUDGET_S:.0f} seconds or more, got {text}")
    return value


def _parts(text: str) -> tuple[Part, ...]:
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        raise argparse.ArgumentTypeError(f"must be of {', '.join(BY_NAME)}, got {', '.join(unknown)}")
    return tuple(part for part in PARTS if part.name in names)


if __name__ == "__main__":
    sys.exit(main())
