"""The T4 format of auto-tuning results (schema 1.0.0), which Kernel Tuner writes and its hub collects.

A T4 file is one tuning problem: here one kernel on one device with one batch. `configuration` holds the variant's
fields, `runtimes` are milliseconds. What T4 has no place for stands where its schema allows more: the problem under
`metadata`, and the samples in microseconds, the regime and the environment among a result's measurements, so that what
is exported here comes back as it was. Schema: kernel_tuner/schema/T4/1.0.0 in KernelTuner/kernel_tuner.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pagegen.db import codec, keys
from pagegen.db.absorbing import Record
from pagegen.db.transfer import whole_file
from pagegen.spec import Measurement, Status

SCHEMA = "1.0.0"
INVALIDITY = {
    Status.OK: "correct",
    Status.COMPILE_ERROR: "compile",
    Status.RESOURCE_LIMIT: "constraints",
    Status.WRONG_RESULT: "correctness",
    Status.RUNTIME_ERROR: "runtime",
    Status.TIMEOUT: "timeout",
}
_STATUS = {word: status.value for status, word in INVALIDITY.items()}
_KINDS = ("kernel", "device", "workload")


def problems(trials: Iterable[Measurement]) -> dict[str, list[Measurement]]:
    """Trials by problem: the same kernel, device and batch. The keys name files and depend on the problem alone."""
    found: dict[str, list[Measurement]] = {}
    for m in trials:
        kernel = codec.kernel_row(m.spec, m.layout, m.target, m.code_hash)["digest"]
        device, workload = codec.device_row(m.device)["digest"], codec.workload_row(m.workload)["digest"]
        short = keys.digest(f"{kernel} {device} {workload}")[:12]
        heads = f"{m.spec.num_q_heads}x{m.spec.num_kv_heads}x{m.spec.head_dim}"
        name = f"{m.target}-{heads}-block{m.layout.block_size}-{short}"
        found.setdefault(name, []).append(m)
    return found


def document(trials: list[Measurement]) -> dict[str, Any]:
    """One problem's trials as a T4 document. Raises ValueError for no trial."""
    if not trials:
        raise ValueError("trials must hold at least one, got none")
    first = trials[0]
    kernel = keys.fields_of(codec.kernel_row(first.spec, first.layout, first.target, first.code_hash)["data"])
    results = sorted(
        (_result(m) for m in trials),
        key=lambda r: (json.dumps(r["configuration"]), r["timestamp"], json.dumps(r, sort_keys=True)),
    )
    requirements = {
        f"{name}=={m.environment[name]}" for m in trials for name in ("torch", "triton") if m.environment.get(name)
    }
    return {
        "schema_version": SCHEMA,
        "metadata": {
            "hardware": {"hardware_description": [first.device.to_dict()]},
            "environment": {"requirements": sorted(requirements)},
            "pagegen": {
                "v": keys.VERSION,
                "kernel": kernel,
                "device": {"device": first.device.to_dict()},
                "workload": {"workload": first.workload.to_dict()},
            },
        },
        "results": results,
    }


def _result(m: Measurement) -> dict[str, Any]:
    measurements: list[dict[str, Any]] = []
    if m.median_us is not None:
        measurements.append({"name": "time", "value": m.median_us / 1e3, "unit": "ms"})
    measurements.append({"name": "samples", "value": list(m.samples_us), "unit": "us"})
    if m.max_error is not None:
        measurements.append({"name": "max_error", "value": repr(m.max_error), "unit": ""})
    measurements += [
        {"name": name, "value": value, "unit": ""}
        for name, value in (
            ("regime", m.regime),
            ("detail", m.detail),
            ("environment", json.dumps(m.environment, sort_keys=True)),
        )
    ]
    return {
        "timestamp": m.created_at,
        "configuration": m.variant.to_dict(),
        "objectives": ["time"],
        "times": {"runtimes": [us / 1e3 for us in m.samples_us]},
        "invalidity": INVALIDITY[m.status],
        "correctness": 0 if m.status is Status.WRONG_RESULT else 1,
        "measurements": measurements,
    }


def export(trials: Iterable[Measurement], folder: Path) -> list[Path]:
    """Writes one T4 file a problem into `folder`, which is made where there is none; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, found in sorted(problems(trials).items()):
        path = folder / f"{name}.json"
        with whole_file(path) as file:
            head = document(found)
            results = ",\n".join(f"  {json.dumps(result)}" for result in head.pop("results"))
            file.write(json.dumps(head, indent=1)[:-2] + f',\n "results": [\n{results}\n ]\n}}\n')
        written.append(path)
    return written


def is_t4(path: Path) -> bool:
    """Whether a path is a folder, or a file of one JSON object over several lines, or of one with results: an export
    has one record a line."""
    if path.is_dir():
        return True
    with path.open("rb") as file:
        first = file.readline().strip()
    if first == b"{":
        return True
    try:
        found = json.loads(first)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "results" in found and "record" not in found


def named_records(path: Path) -> Iterator[tuple[str, Any]]:
    """The records of a T4 file, or of every .json file of a folder, as `transfer.absorb` takes them. Of a
    result that cannot be read comes the error, which is named there."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path} must hold .json files of T4 results, got none")
    for file in files:
        yield from _of_file(file)


def _of_file(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        problem = found["metadata"]["pagegen"]
        results = found["results"]
        if found.get("schema_version") != SCHEMA or not isinstance(results, list):
            raise ValueError(f"schema_version must be {SCHEMA}, got {found.get('schema_version')!r}")
        shared = [{"record": kind, "v": problem["v"], "id": kind, **problem[kind]} for kind in _KINDS]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        why = f"no {error.args[0]!r}" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"{file} must be T4 results that name a pagegen problem under metadata.pagegen, got {why}"
        ) from error
    # ids are the file's own: two files may name two devices "device"
    own = {kind: f"{file.name}:{kind}" for kind in _KINDS}
    for record in shared:
        yield f"{file.name}, {record['record']}", {**record, "id": own[record["record"]]}
    for number, result in enumerate(results):
        yield from _of_result(f"{file.name}, result {number}", result, own)


def _of_result(name: str, result: Any, own: dict[str, str]) -> Iterator[tuple[str, Any]]:
    try:
        values = {m["name"]: m["value"] for m in result.get("measurements", [])}
        runtimes = result["times"].get("runtimes", [])
        samples = values.get("samples", [ms * 1e3 for ms in runtimes])
        environment = json.loads(values.get("environment", "{}"))
        variant = result["configuration"]
        trial: Record = {
            "regime": values.get("regime", "cold"),
            "status": _STATUS[result["invalidity"]],
            "samples_us": samples,
            "max_error": values.get("max_error"),
            "detail": values.get("detail", ""),
            "created_at": result.get("timestamp", ""),
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        yield name, ValueError(f"no T4 result: {error!r}")
        return
    ids = {**own, "variant": f"{name}:variant", "environment": f"{name}:environment"}
    head = {"v": keys.VERSION}
    yield name, {"record": "variant", **head, "id": ids["variant"], "variant": variant}
    yield name, {"record": "environment", **head, "id": ids["environment"], "environment": environment}
    yield name, {"record": "trial", **head, **ids, **trial}
