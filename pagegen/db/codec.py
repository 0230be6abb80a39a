"""Values to canonical JSON and back, and the digests that are their keys.

Canonical JSON has sorted keys, a version, no spaces and no NaN: the same value gives the same bytes in every
process and on every machine. Changing what a field means raises `VERSION`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from pagegen.db.schema import ENVIRONMENT_COLUMNS
from pagegen.spec import (
    AttentionSpec,
    CacheLayout,
    CompileFacts,
    Device,
    DispatchRule,
    Measurement,
    Prediction,
    Profile,
    Status,
    Target,
    Variant,
    Workload,
)
from pagegen.spec.result import COMPILE_COUNTS, PURPOSE, SESSION

VERSION = 1
# A table's columns by name. Rows of shared things are remembered, so they are not to be changed.
Row = dict[str, Any]
# Rates are measured or nominal and change from run to run on one machine; they do not make it another device.
RATES = ("bandwidth_gb_s", "matrix_tflops")
_CLOCKS = ("core_clock_mhz", "memory_clock_mhz", "power_limit_w")
_DEVICE_FLOATS = (*RATES, *_CLOCKS, "memory_gib", "last_level_cache_mib", "shared_memory_kib")
_DEVICE_COUNTS = ("units", "registers_per_unit", "max_threads_per_unit")
_DEVICE_COLUMNS = (*_DEVICE_FLOATS, *_DEVICE_COUNTS, "name", "target", "partition")
# What marks a tuner's trial; all else in an environment may change its time.
_TAGS = (SESSION, PURPOSE)
# The question that a trial answers: version 1 left the environment out.
KEY_VERSION = 2
# What makers add to one product's name in one place and not in another.
_DECORATION = re.compile(r"\((?:r|tm|c)\)|\b(?:nvidia|amd|intel|corporation|inc)\b[.,]?|[\s_-]+")


def canonical(fields: Mapping[str, Any], version: int = VERSION) -> str:
    """The canonical JSON of named fields, with the version. Raises ValueError for NaN and infinities."""
    return json.dumps({"v": version, **fields}, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(text: str) -> str:
    """sha256 of canonical JSON, as hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def fields_of(text: str) -> dict[str, Any]:
    """The named fields of canonical JSON. Raises ValueError for anything else or another version."""
    data = json.loads(text)
    if not isinstance(data, dict) or data.get("v") != VERSION:
        raise ValueError(f"stored data must have version {VERSION}, got {text[:60]!r}")
    return {key: value for key, value in data.items() if key != "v"}


def _row(fields: Mapping[str, Any], **named: Any) -> Row:
    """A row of named columns beside the data and its digest. Raises OverflowError for integers no database holds."""
    text = canonical(fields)
    columns = {name: storable(value) if isinstance(value, str) else value for name, value in named.items()}
    for name, value in columns.items():
        limit = 2**63 if name == "total_context" else 2**31
        if isinstance(value, int) and not -limit <= value < limit:
            raise OverflowError(f"{name} must be under 2^{limit.bit_length() - 1}, got {value}")
    return {"digest": digest(text), "data": text, **columns}


@functools.lru_cache(maxsize=1024)
def spec_digest(spec: AttentionSpec) -> str:
    """The key of a spec."""
    return digest(canonical({"spec": spec.to_dict()}))


def _device_fields(device: Device) -> dict[str, Any]:
    """The device's fields with 80 and 80.0 written alike."""
    return {k: float(v) if k in _DEVICE_FLOATS else v for k, v in device.to_dict().items()}


@functools.lru_cache(maxsize=1024)
def device_identity(device: Device) -> str:
    """The key under which two descriptions of one device meet: all but its rates, its name without the maker's
    decoration, memory in whole GiB (drivers and kernels reserve a varying sliver), clocks in MHz, power in W."""
    return identity_of(_device_fields(device))


def identity_of(plain: Mapping[str, Any]) -> str:
    """`device_identity` of a device's plain fields."""
    fields = {k: round(v) if k in _CLOCKS else v for k, v in plain.items() if k not in RATES}
    fields |= {"name": _DECORATION.sub("", plain["name"].lower()), "memory_gib": round(plain["memory_gib"])}
    return digest(canonical({"device": fields}))


def environment_identity(environment: Mapping[str, str]) -> str:
    """The key under which trials share a toolchain and system: all of an environment but a tuner's tags."""
    return _environment_identity(tuple((k, v) for k, v in sorted(environment.items()) if k not in _TAGS))


@functools.lru_cache(maxsize=1024)
def _environment_identity(items: tuple[tuple[str, str], ...]) -> str:
    return digest(canonical({"environment": dict(items)}))


@functools.lru_cache(maxsize=1024)
def kernel_row(spec: AttentionSpec, layout: CacheLayout, target: Target, code_hash: str) -> Row:
    """The row of `kernels`: everything that decides which code runs, but for the variant."""
    plain = spec.to_dict()
    named = {key: int(value) if isinstance(value, bool) else value for key, value in plain.items()}
    named |= {"block_size": layout.block_size, "block_order": layout.order}
    named |= {"target": str(target), "code_hash": code_hash, "spec_digest": spec_digest(spec)}
    fields = {"spec": plain, "layout": layout.to_dict(), "target": str(target), "code_hash": code_hash}
    return _row(fields, **named)


@functools.lru_cache(maxsize=1024)
def device_row(device: Device) -> Row:
    """The row of `devices`."""
    plain = _device_fields(device)
    named = {name: plain.get(name, getattr(device, name)) for name in _DEVICE_COLUMNS}
    return _row({"device": plain}, **named, features=" ".join(device.features), identity=device_identity(device))


def environment_row(environment: Mapping[str, str]) -> Row:
    """The row of `environments`."""
    return _environment_row(tuple(sorted(environment.items())))


@functools.lru_cache(maxsize=1024)
def _environment_row(items: tuple[tuple[str, str], ...]) -> Row:
    environment = dict(items)
    named = {name: environment.get(name, "") for name in ENVIRONMENT_COLUMNS}
    return _row({"environment": environment}, **named, identity=environment_identity(environment))


@functools.lru_cache(maxsize=1024)
def variant_row(variant: Variant) -> Row:
    """The row of `variants`."""
    return _row({"variant": variant.to_dict()}, family=variant.family, name=variant.name)


@functools.lru_cache(maxsize=1024)
def workload_row(workload: Workload) -> Row:
    """The row of `workloads`."""
    names = ("num_seqs", "total_q", "total_context", "max_query_len", "max_context_len")
    return _row({"workload": workload.to_dict()}, **{name: getattr(workload, name) for name in names})


def profile_row(profile: Profile) -> Row:
    """The row of `profiles`."""
    return _row({"profile": profile.to_dict()}, name=profile.name, source=profile.source)


def trial_key(measurement: Measurement) -> str:
    """The key of the question that a trial answers: this kernel and variant on this workload, device, toolchain and
    regime. Trials of one key are samples of one thing."""
    m = measurement
    return key_of(
        kernel=kernel_row(m.spec, m.layout, m.target, m.code_hash)["digest"],
        device=device_identity(m.device),
        environment=environment_identity(m.environment),
        variant=variant_row(m.variant)["digest"],
        workload=workload_row(m.workload)["digest"],
        regime=m.regime,
    )


def key_of(*, kernel: str, device: str, environment: str, variant: str, workload: str, regime: str) -> str:
    """`trial_key` of digests and identities."""
    fields = {"kernel": kernel, "device": device, "environment": environment, "variant": variant}
    return digest(canonical({**fields, "workload": workload, "regime": regime}, KEY_VERSION))


def storable(text: str) -> str:
    """`text` with what no database takes as text (NUL, lone surrogates of a compiler's odd bytes) escaped."""
    if text.isascii() and "\0" not in text:
        return text
    return text.encode("utf-8", "backslashreplace").decode("utf-8").replace("\0", "\\x00")


def trial_fields(measurement: Measurement) -> dict[str, Any]:
    """What a trial holds beside the things it shares with others, JSON-ready."""
    m = measurement
    return {
        "regime": m.regime,
        "status": m.status.value,
        "samples_us": [float(us) for us in m.samples_us],
        "max_error": None if m.max_error is None else repr(float(m.max_error)),
        "detail": storable(m.detail),
        "created_at": m.created_at,
    }


def trial_row(measurement: Measurement, parents: Mapping[str, str]) -> Row:
    """The row of `trials`, without its references; `parents` maps each shared thing's kind to its digest."""
    fields = trial_fields(measurement)
    return {
        **fields,
        "digest": digest(canonical({**fields, **parents})),
        "key": trial_key(measurement),
        "median_us": measurement.median_us,
        "samples_us": json.dumps(fields["samples_us"], separators=(",", ":"), allow_nan=False),
    }


def portfolio_row(rule: DispatchRule, created_at: str, parents: Mapping[str, str]) -> Row:
    """The row of `portfolios`, without its references."""
    text = json.dumps(rule.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)
    fields = {"rule": rule.to_dict(), "created_at": created_at, **parents}
    kind = storable(str(rule.evidence.get("kind", "")))
    return {"digest": digest(canonical(fields)), "rule": text, "created_at": created_at, "kind": kind}


def facts_row(facts: CompileFacts, parents: Mapping[str, str]) -> Row:
    """The row of `compile_facts`, without its references."""
    named = {"form": facts.form, **{name: getattr(facts, name) for name in COMPILE_COUNTS}}
    fields = {**named, "loop": facts.loop, "created_at": facts.created_at}
    text = json.dumps(facts.loop, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return {**fields, "digest": digest(canonical({**fields, **parents})), "loop": text}


def prediction_row(prediction: Prediction, parents: Mapping[str, str]) -> Row:
    """The row of `predictions`, without its references."""
    fields = {
        "predicted_us": float(prediction.predicted_us),
        "model": storable(prediction.model),
        "created_at": prediction.created_at,
    }
    return {**fields, "digest": digest(canonical({**fields, **parents}))}


def extra_row(record: str, owner: str, field: str, value: Any) -> Row:
    """The row of `extras`. Raises ValueError for a value that is not JSON."""
    named = {"record": storable(record), "owner": owner, "field": storable(field)}
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return {**named, "digest": digest(canonical({**named, "value": text})), "value": text}


def kernel_from(data: str) -> tuple[AttentionSpec, CacheLayout, Target, str]:
    """The inverse of `kernel_row`. Raises ValueError, TypeError or KeyError for what is no kernel."""
    fields = fields_of(data)
    return (
        AttentionSpec.from_dict(fields["spec"]),
        CacheLayout(**fields["layout"]),
        Target.parse(fields["target"]),
        _text("code_hash", fields["code_hash"]),
    )


def device_from(data: str) -> Device:
    """The inverse of `device_row`. Raises ValueError, TypeError or KeyError for what is no device."""
    fields = fields_of(data)["device"]
    for name, value in fields.items():
        if name in ("name", "partition"):
            _text(name, value)
        elif name not in ("target", "features"):
            _number(name, value)
    return Device.from_dict(fields)


def environment_from(data: str) -> dict[str, str]:
    """The inverse of `environment_row`."""
    return {_text("environment", k): _text(k, v) for k, v in fields_of(data)["environment"].items()}


def variant_from(data: str) -> Variant:
    """The inverse of `variant_row`."""
    return Variant.from_dict(fields_of(data)["variant"])


def workload_from(data: str) -> Workload:
    """The inverse of `workload_row`."""
    return Workload.from_dict(fields_of(data)["workload"])


def profile_from(data: str) -> Profile:
    """The inverse of `profile_row`."""
    return Profile.from_dict(fields_of(data)["profile"])


def rule_from(text: str) -> DispatchRule:
    """The inverse of `portfolio_row`'s rule."""
    return DispatchRule.from_dict(json.loads(text))


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be text, got {type(value).__name__} {value!r}")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__} {value!r}")
    return float(value)


def trial_from(
    fields: Mapping[str, Any],
    kernel: tuple[AttentionSpec, CacheLayout, Target, str],
    device: Device,
    environment: Mapping[str, str],
    variant: Variant,
    workload: Workload,
) -> Measurement:
    """The inverse of `trial_fields`. Raises ValueError, TypeError or KeyError for what is no trial."""
    spec, layout, target, code_hash = kernel
    if not isinstance(fields["samples_us"], list):
        raise TypeError(f"samples_us must be a list, got {type(fields['samples_us']).__name__}")
    return Measurement(
        spec=spec,
        layout=layout,
        target=target,
        device=device,
        variant=variant,
        workload=workload,
        status=Status(fields["status"]),
        samples_us=tuple(_number("samples_us", us) for us in fields["samples_us"]),
        regime=_text("regime", fields["regime"]),
        max_error=None if fields["max_error"] is None else float(_text("max_error", fields["max_error"])),
        detail=_text("detail", fields["detail"]),
        code_hash=code_hash,
        environment=dict(environment),
        created_at=_text("created_at", fields["created_at"]),
    )
