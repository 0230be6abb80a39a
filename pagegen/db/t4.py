"""The T4 format of auto-tuning results (schema 1.0.0), which Kernel Tuner writes and its hub collects.

A T4 file is one tuning problem: here one kernel on one device with one batch. `configuration` holds the variant's
fields, `runtimes` are milliseconds. What T4 has no place for stands where its schema allows more: the problem under
`metadata`, and the samples in microseconds, the regime and the environment among a result's measurements, so that what
is exported here comes back as it was. Schema: kernel_tuner/schema/T4/1.0.0 in KernelTuner/kernel_tuner.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pagegen.db import codec, keys
from pagegen.db.absorbing import Record
from pagegen.db.files import whole_file
from pagegen.db.queries import UNDECODABLE
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
# What a result and its measurements hold here; what else there is, is kept and told.
_RESULT = ("timestamp", "configuration", "objectives", "times", "invalidity", "correctness", "measurements")
_MEASUREMENTS = ("time", "samples", "max_error", "regime", "detail", "environment")


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


def of_folder(folder: Path) -> Iterator[tuple[str, Any]]:
    """The records of every .json file of a folder, as `transfer.absorb` takes them. Of a file or a result that cannot
    be read comes the error, which is named there. Raises ValueError for a folder without such files."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ValueError(f"{folder} must hold .json files of T4 results, got none")
    for file in files:
        try:
            found = list(of_text(file.name, file.read_bytes()))
        except (OSError, ValueError) as error:
            yield file.name, ValueError(str(error))
        else:
            yield from found


def of_text(name: str, text: bytes) -> Iterator[tuple[str, Any]]:
    """The records of a T4 file, whose name is `name`. Raises ValueError for what is none of a pagegen problem."""
    try:
        found = json.loads(text.removeprefix(codecs.BOM_UTF8))
        problem, results = found["metadata"]["pagegen"], found["results"]
        if found.get("schema_version") != SCHEMA or not isinstance(results, list):
            raise ValueError(f"schema_version must be {SCHEMA}, got {found.get('schema_version')!r}")
        # ids are the file's own: two files may name two devices "device"
        own = {kind: f"{name}:{kind}" for kind in _KINDS}
        shared = [{**problem[kind], "record": kind, "v": problem["v"], "id": own[kind]} for kind in _KINDS]
    except UNDECODABLE as error:
        why = f"no {error.args[0]!r}" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"{name} must be T4 results that name a pagegen problem under metadata.pagegen, got {why}"
        ) from error
    for record in shared:
        yield f"{name}, {record['record']}", record
    for number, result in enumerate(results):
        yield from _of_result(f"{name}, result {number}", result, own)


def _of_result(name: str, result: Any, own: dict[str, str]) -> Iterator[tuple[str, Any]]:
    try:
        values = {m["name"]: m["value"] for m in result.get("measurements", [])}
        samples = values["samples"] if "samples" in values else [ms * 1e3 for ms in result["times"].get("runtimes", [])]
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
        unknown = {k: v for k, v in result.items() if k not in _RESULT}
        unknown |= {f"measurement {k}": v for k, v in values.items() if k not in _MEASUREMENTS}
    except UNDECODABLE as error:
        yield name, ValueError(f"no T4 result: {error!r}")
        return
    ids = {**own, "variant": f"{name}:variant", "environment": f"{name}:environment"}
    head = {"v": keys.VERSION}
    yield name, {"record": "variant", **head, "id": ids["variant"], "variant": variant}
    yield name, {"record": "environment", **head, "id": ids["environment"], "environment": environment}
    # kept as what a newer pagegen would write into a trial
    yield name, {"record": "trial", **head, **ids, **trial, **({"t4": unknown} if unknown else {})}
