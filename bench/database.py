"""How quickly does a tuning database of a million trials answer, and how large is it?

    python bench/database.py [--quick] [--trials 1000000] [--output bench/results/database.json]

The trials are made up, the same on every machine: specs of known models at four block sizes on five GPUs, the legal
variants of the tuner's search space, a profile's batches, in sessions as the tuner takes them, with times that scatter
about a multiple of the roofline. They are written as an export's lines and imported, which is timed as well. First
answers are timed in fresh processes: from an open of the file to the answer, after the imports of pagegen, whose time
is told apart; the file lies in the operating system's page cache. Nothing is measured on any device.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy

from pagegen import __version__, costs, targets
from pagegen.db import codec, open_db
from pagegen.spec import AttentionSpec, CacheLayout, Clause, Device, DispatchRule, Profile, Target, Variant, Workload

RESULTS = Path(__file__).parent / "results"
MODELS = (
    "llama-3.1-8b", "llama-2-7b", "llama-2-13b", "llama-3.2-1b", "llama-3.3-70b-instruct", "qwen2-7b", "qwen2.5-0.5b",
    "qwen2.5-1.5b", "qwen2.5-32b", "qwen3-0.6b", "qwen3-30b-a3b", "qwen3-235b-a22b", "phi-4", "gemma-2b", "gemma-7b",
    "gpt2", "falcon-40b", "smollm2-1.7b", "mixtral-8x22b-v0.1", "mistral-large-instruct-2407",
)  # fmt: skip
KV_DTYPES = (None, "float8_e4m3fn")
BLOCK_SIZES = (16, 32, 64, 128)
DEVICES = (
    ("sm_80", "NVIDIA A100-SXM4-40GB"), ("sm_89", "NVIDIA GeForce RTX 4090"), ("sm_90", "NVIDIA H100 80GB HBM3"),
    ("sm_90", "NVIDIA H200"), ("sm_100", "NVIDIA B200"),
)  # fmt: skip
VARIANTS = 60  # a kernel: what three steps of the tuner's search try
SESSION_VARIANTS = 20
ROUNDS = {"search": 7, "confirm": 9}
DAYS = "2026-{:02}-{:02}T{:02}:{:02}:{:02}.000+00:00"


def profile() -> Profile:
    """Twelve batches from idle to full, contexts as skewed as chat's."""
    rng = random.Random(0)
    loads = [
        Workload(context_lens=tuple(int(rng.lognormvariate(7.3, 1.0)) + 16 for _ in range(seqs)))
        for seqs in (1, 4, 8, 16, 32, 64, 128, 256)
    ]
    for seqs, chunk in ((4, 256), (16, 512), (64, 512), (1, 2048)):
        contexts = tuple(int(rng.lognormvariate(7.3, 1.0)) + chunk for _ in range(seqs))
        loads.append(Workload(context_lens=contexts, query_lens=(chunk, *([1] * (seqs - 1)))))
    weights = (3, 5, 8, 12, 16, 20, 16, 8, 4, 4, 3, 1)
    return Profile(name="made up", workloads=tuple(loads), weights=weights, source="bench/database.py")


def specs() -> list[AttentionSpec]:
    found = [AttentionSpec.from_model(model, kv_dtype=kv_dtype) for model in MODELS for kv_dtype in KV_DTYPES]
    return list(dict.fromkeys(found))


def devices() -> list[Device]:
    return [costs.shipped_device(Target.parse(arch), name=name) for arch, name in DEVICES]


def variants(spec: AttentionSpec, layout: CacheLayout, device: Device) -> list[Variant]:
    from pagegen_autotune.space import space_around

    start = targets.default_variant(spec, layout, device.target, decode=True)
    space = space_around(start, spec, layout, device)
    near = space.neighbours(start)
    found = dict.fromkeys([start, *near])
    for one in near:
        if len(found) >= VARIANTS:
            break
        found |= dict.fromkeys(space.neighbours(one))
    return list(found)[:VARIANTS]


def _id(row: codec.Row) -> str:
    return str(row["digest"])[:16]


class Maker:
    """The lines of an export with so many trials, deterministic, shared things before what names them."""

    def __init__(self, trials: int) -> None:
        self.left = trials
        self.profile = profile()
        self.cells = 0
        self._defined: set[str] = set()
        self._numbers = 0

    def lines(self) -> Iterator[str]:
        yield from self._shared("profile", codec.profile_row(self.profile))
        for spec in specs():
            for size in BLOCK_SIZES:
                for device in devices():
                    if self.left <= 0:
                        return
                    yield from self._cell(spec, CacheLayout(block_size=size), device)

    def _cell(self, spec: AttentionSpec, layout: CacheLayout, device: Device) -> Iterator[str]:
        """One kernel on one device: sessions of trials over every batch, and the portfolio they ended in."""
        self.cells += 1
        code = targets.code_hash(device.target)
        kernel = codec.kernel_row(spec, layout, device.target, code)
        yield from self._shared("kernel", kernel)
        yield from self._shared("device", codec.device_row(device))
        tried = variants(spec, layout, device)
        rows = [codec.variant_row(v) for v in tried]
        for row in rows:
            yield from self._shared("variant", row)
        for load in self.profile.workloads:
            workload = codec.workload_row(load)
            yield from self._shared("workload", workload)
            floor = costs.roofline_us(spec, layout, device, load)
            for purpose, rounds in ROUNDS.items():
                for first in range(0, len(rows), SESSION_VARIANTS):
                    yield from self._session(
                        kernel, device, workload, rows[first : first + SESSION_VARIANTS], floor, purpose, rounds
                    )
        half = len(tried) // 2
        clauses = (Clause(variant=tried[half], max_query_len=1), Clause(variant=tried[0]))
        rule = DispatchRule(clauses=clauses, reason="tuned on made-up traffic", evidence={"kind": "measured"})
        yield json.dumps(
            {
                "record": "portfolio", "v": 1, "kernel": _id(kernel), "device": _id(codec.device_row(device)),
                "profile": _id(codec.profile_row(self.profile)), "rule": rule.to_dict(), "created_at": self._now(),
            }
        )  # fmt: skip

    def _session(
        self, kernel: codec.Row, device: Device, workload: codec.Row, rows: list[codec.Row], floor: float,
        purpose: str, rounds: int,
    ) -> Iterator[str]:  # fmt: skip
        if self.left <= 0:
            return
        self._numbers += 1
        environment = {
            "torch": "2.13.0+cu130", "python": "3.12.4", "system": "Linux 6.8.0", "threads": "64",
            "compiler": "triton 3.7.1", "runtime": "13.0",
            "tuning_session": hashlib.sha256(str(self._numbers).encode()).hexdigest()[:32], "tuning_purpose": purpose,
        }  # fmt: skip
        env = codec.environment_row(environment)
        yield from self._shared("environment", env)
        rng = random.Random(self._numbers)
        head = (
            f'{{"record": "trial", "v": 1, "kernel": "{_id(kernel)}", "device": "{_id(codec.device_row(device))}", '
            f'"environment": "{_id(env)}", "workload": "{_id(workload)}", "variant": "'
        )
        now = self._now()
        for row in rows[: self.left]:
            self.left -= 1
            level = floor * (1.15 + int(row["digest"][:4], 16) / 65536) + 6.0
            if row["digest"][4] == "0":  # one variant in sixteen fails
                fields = '"status": "compile_error", "samples_us": [], "max_error": null, "detail": "out of registers"'
            else:
                samples = ", ".join(f"{level * rng.gauss(1.0, 0.02):.4f}" for _ in range(rounds))
                fields = f'"status": "ok", "samples_us": [{samples}], "max_error": "0.0009765625", "detail": ""'
            yield f'{head}{_id(row)}", "regime": "cold", {fields}, "created_at": "{now}"}}'

    def _shared(self, kind: str, row: codec.Row) -> Iterator[str]:
        if row["digest"] not in self._defined:
            self._defined.add(row["digest"])
            body = {k: v for k, v in json.loads(row["data"]).items() if k != "v"}
            yield json.dumps({"record": kind, "v": 1, "id": _id(row), **body})

    def _now(self) -> str:
        minutes, second = divmod(self._numbers * 7, 60)
        hours, minute = divmod(minutes, 60)
        days, hour = divmod(hours, 24)
        return DAYS.format(1 + days // 28 % 12, 1 + days % 28, hour, minute, second)


# Run in a fresh process: imports first, then one answer. `question` is a JSON object on standard input.
FRESH = """
import json, sys, time
start = time.perf_counter()
import pagegen, pagegen.db, pagegen.selection
from pagegen.spec import AttentionSpec, CacheLayout, Profile, Workload
imports = time.perf_counter() - start
q = json.loads(sys.stdin.read())
spec, layout = AttentionSpec.from_dict(q["spec"]), CacheLayout(**q["layout"])
profile, workload = Profile.from_dict(q["profile"]), Workload.from_dict(q["workload"])
start, cpu = time.perf_counter(), time.process_time()
with pagegen.open_db(q["url"], read_only=True) as db:
    opened = time.perf_counter()
    if q["verb"] == "select":
        found = db.select(spec, layout, q["target"], workload)
        told = {"grade": found.grade, "time": found.evidence["time"]}
    else:
        rows = db.best_block_size(spec, q["target"], profile)
        told = {"rows": len(rows), "kinds": sorted({row.kind for row in rows})}
    end, cpu = time.perf_counter(), time.process_time() - cpu
    again = []
    for _ in range(5):
        begin = time.perf_counter()
        if q["verb"] == "select":
            db.select(spec, layout, q["target"], workload)
        else:
            db.best_block_size(spec, q["target"], profile)
        again.append(1e3 * (time.perf_counter() - begin))
print(json.dumps({
    "first_ms": 1e3 * (end - start), "first_cpu_ms": 1e3 * cpu, "open_ms": 1e3 * (opened - start),
    "imports_ms": 1e3 * imports, "again_ms": sorted(again)[2], "told": told,
}))
"""


def fresh(question: dict[str, Any], runs: int) -> dict[str, Any]:
    """The medians over fresh processes, and every first time."""
    root = Path(__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "autotune")])}
    found = []
    for _ in range(runs):
        done = subprocess.run(
            [sys.executable, "-c", FRESH],
            input=json.dumps(question),
            env=env,
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(json.loads(done.stdout))
    medians = {
        name: round(statistics.median(f[name] for f in found), 3)
        for name in ("first_ms", "first_cpu_ms", "open_ms", "again_ms", "imports_ms")
    }
    return {
        **medians,
        "first_ms_range": [round(x, 3) for x in _range([f["first_ms"] for f in found])],
        **found[0]["told"],
    }


def _range(values: list[float]) -> tuple[float, float]:
    return min(values), max(values)


def measure(trials: int, runs: int, folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def add(what: str, limit: str, **figures: Any) -> None:
        rows.append({"what": what, "asked_for": limit, **figures})
        print(json.dumps(rows[-1]), flush=True)

    lines, url = folder / "made.jsonl", folder / "trials.db"
    maker = Maker(trials)
    with lines.open("w", encoding="utf-8") as file:
        for line in maker.lines():
            file.write(line + "\n")
    with open_db(url) as db:
        start, cpu = time.perf_counter(), time.process_time()
        report = db.import_(lines)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        counts = db.stats()["rows"]
    assert not report.malformed, report.malformed[:3]
    add(
        "bulk import", "at least 20,000 trials/s", trials_per_s=round(counts["trials"] / seconds),
        trials_per_cpu_s=round(counts["trials"] / cpu), seconds=round(seconds, 1), records=report.added,
        malformed=len(report.malformed), rows=counts,
    )  # fmt: skip
    connection = sqlite3.connect(url)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    pages = dict(connection.execute("SELECT name, sum(pgsize) FROM dbstat GROUP BY name ORDER BY 2 DESC LIMIT 8"))
    connection.close()
    add(
        "size", "bytes a trial, stated", bytes_a_trial=round(url.stat().st_size / counts["trials"]),
        file_mib=round(url.stat().st_size / 2**20), export_bytes_a_trial=round(lines.stat().st_size / counts["trials"]),
        largest={name: round(size / counts["trials"]) for name, size in pages.items()},
    )  # fmt: skip

    spec, device = specs()[0], devices()[2]
    question = {
        "url": str(url), "spec": spec.to_dict(), "layout": {"block_size": 16, "order": "NHD"}, "target": "sm_90",
        "profile": maker.profile.to_dict(), "workload": maker.profile.workloads[5].to_dict(), "verb": "select",
    }  # fmt: skip
    add("first select of a process, a batch that was measured", "at most 20 ms", **fresh(question, runs))
    near = Workload(context_lens=tuple(n + 5 for n in maker.profile.workloads[5].context_lens))
    add(
        "first select of a process, a batch near a measured one (loads the cost model)", "",
        **fresh({**question, "workload": near.to_dict()}, runs),
    )  # fmt: skip
    add("best_block_size, first of a process", "at most 100 ms", **fresh({**question, "verb": "block size"}, runs))
    with open_db(url, read_only=True) as db:
        add("select from the prepared rule", "at most 2 us", **prepared(db, spec, device))
        start = time.perf_counter()
        count = db.export(folder / "out.jsonl")
        add("export", "", records_per_s=round(count / (time.perf_counter() - start)))
        start = time.perf_counter()
        found = len(db.trials(spec=spec, layout=CacheLayout(block_size=16), device=device))
        add("trials of one kernel on one device, decoded", "", trials=found,
            ms=round(1e3 * (time.perf_counter() - start), 1))  # fmt: skip
    return rows


def prepared(db: Any, spec: AttentionSpec, device: Device) -> dict[str, float]:
    """Microseconds of one choice, as an operator makes it: of the stored rule, and of the cost model's longer one."""
    from pagegen import selection
    from pagegen.selection.predicted import predicted_rule

    layout = CacheLayout(block_size=16)
    tuned = selection.rule_for(spec, layout, device.target, db)
    asked = [(seqs, 1, context) for seqs in (1, 8, 64, 256) for context in (500, 4000, 40_000)]

    def us(rule: DispatchRule) -> float:
        best = []
        for _ in range(7):
            start = time.perf_counter()
            for _ in range(500):
                for batch in asked:
                    rule.choose(*batch)
            best.append((time.perf_counter() - start) / 500 / len(asked) * 1e6)
        return round(statistics.median(best), 3)

    model = predicted_rule(spec, layout, device)
    return {"us": us(tuned), "clauses": len(tuned.clauses), "model_us": us(model), "model_clauses": len(model.clauses)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a database of 50,000 trials; writes nothing by default")
    parser.add_argument("--trials", type=int, help="how many (default: 1,000,000)")
    parser.add_argument("--runs", type=int, help="fresh processes a question (default: 9, quick: 3)")
    parser.add_argument("--output", type=Path, help="default: bench/results/database.json, where not --quick")
    options = parser.parse_args()
    trials = options.trials or (50_000 if options.quick else 1_000_000)
    started, load = time.perf_counter(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="pagegen-bench-") as folder:
        rows = measure(trials, options.runs or (3 if options.quick else 9), Path(folder))
    from pagegen.targets import cpu_device

    document = {
        "question": (__doc__ or "").partition("\n")[0],
        "method": (__doc__ or "").rpartition("\n\n")[2].strip(),
        "environment": {
            "cpu": cpu_device.current_device().name, "cores": os.cpu_count(), "load_average": round(load, 2),
            "pagegen": __version__, "python": platform.python_version(), "sqlalchemy": sqlalchemy.__version__,
            "sqlite": sqlite3.sqlite_version, "system": f"{platform.system()} {platform.release()}",
        },
        "trials": trials,
        "quick": options.quick,
        "seconds": round(time.perf_counter() - started, 1),
    }  # fmt: skip
    output = options.output or (None if options.quick or options.trials else RESULTS / "database.json")
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(as_text(document, rows), encoding="utf-8")
    print(f"{document['seconds']:.0f} s", file=sys.stderr)


def as_text(document: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """JSON with one row a line, so that two runs can be compared line by line."""
    head = json.dumps(document, indent=1)
    return head[:-2] + ',\n "rows": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]\n}\n"


if __name__ == "__main__":
    main()
