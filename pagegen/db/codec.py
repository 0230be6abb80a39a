"""Values to canonical JSON and back, and the digests that are their keys.

Canonical JSON has sorted keys, a version, no spaces and no NaN: the same value gives the same bytes in every
process and on every machine. Changing what a field means raises `VERSION`.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pagegen.spec import (
    AttentionSpec,
    CacheLayout,
    Device,
    DispatchRule,
    Measurement,
    Profile,
    Status,
    Target,
    Variant,
    Workload,
)

VERSION = 1
# A table's columns by name. Rows of shared things are remembered, so they are not to be changed.
Row = dict[str, Any]
# Rates are measured or nominal and change from run to run on one machine; they do not make it another device.
RATES = ("bandwidth_gb_s", "matrix_tflops")
_DEVICE_FLOATS = (*RATES, "memory_gib", "last_level_cache_mib", "shared_memory_kib")


def canonical(fields: Mapping[str, Any]) -> str:
    """The canonical JSON of named fields, with the version. Raises ValueError for NaN and infinities."""
    return json.dumps({"v": VERSION, **fields}, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(text: str) -> str:
    """sha256 of canonical JSON, as hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def fields_of(text: str) -> dict[str, Any]:
    """The named fields of canonical JSON. Raises ValueError for anything else or another version."""
    data = json.loads(text)
    if not isinstance(data, dict) or data.get("v") != VERSION:
        raise ValueError(f"stored data must have version {VERSION}, got {text[:60]!r}")
    return {key: value for key, value in data.items() if key != "v"}


def _row(fields: Mapping[str, Any]) -> Row:
    text = canonical(fields)
    return {"digest": digest(text), "data": text}


@functools.lru_cache(maxsize=1024)
def spec_digest(spec: AttentionSpec) -> str:
    """The key of a spec."""
    return digest(canonical({"spec": spec.to_dict()}))


def _device_fields(device: Device) -> dict[str, Any]:
    """The device's fields with 80 and 80.0 written alike."""
    return {k: float(v) if k in _DEVICE_FLOATS else v for k, v in device.to_dict().items()}


@functools.lru_cache(maxsize=1024)
def device_identity(device: Device) -> str:
    """The key under which two descriptions of one device meet: all but its rates, memory in whole GiB (drivers and
    kernels reserve a varying sliver)."""
    fields = {k: v for k, v in _device_fields(device).items() if k not in RATES}
    return digest(canonical({"device": {**fields, "memory_gib": round(device.memory_gib)}}))


@functools.lru_cache(maxsize=1024)
def kernel_row(spec: AttentionSpec, layout: CacheLayout, target: Target, code_hash: str) -> Row:
    """The row of `kernels`: everything that decides which code runs, but for the variant."""
    plain = spec.to_dict()
    named = {key: int(value) if isinstance(value, bool) else value for key, value in plain.items()}
    fields = {"spec": plain, "layout": layout.to_dict(), "target": str(target), "code_hash": code_hash}
    return {
        **_row(fields),
        **named,
        "spec_digest": spec_digest(spec),
        "block_size": layout.block_size,
        "block_order": layout.order,
        "target": str(target),
        "code_hash": code_hash,
    }


@functools.lru_cache(maxsize=1024)
def device_row(device: Device) -> Row:
    """The row of `devices`."""
    plain = _device_fields(device)
    named = {k: plain[k] for k in ("name", "target", "units", "memory_gib", "bandwidth_gb_s", "matrix_tflops")}
    return {**_row({"device": plain}), **named, "identity": device_identity(device)}


def environment_row(environment: Mapping[str, str]) -> Row:
    """The row of `environments`."""
    return _row({"environment": dict(environment)})


@functools.lru_cache(maxsize=1024)
def variant_row(variant: Variant) -> Row:
    """The row of `variants`."""
    return {**_row({"variant": variant.to_dict()}), "family": variant.family, "name": variant.name}


@functools.lru_cache(maxsize=1024)
def workload_row(workload: Workload) -> Row:
    """The row of `workloads`."""
    names = ("num_seqs", "total_q", "total_context", "max_query_len", "max_context_len")
    return {**_row({"workload": workload.to_dict()}), **{name: getattr(workload, name) for name in names}}


def profile_row(profile: Profile) -> Row:
    """The row of `profiles`."""
    return {**_row({"profile": profile.to_dict()}), "name": profile.name, "source": profile.source}


def trial_key(measurement: Measurement) -> str:
    """The key of the question that a trial answers: this kernel and variant on this workload, device and regime."""
    m = measurement
    return question_key(
        m.spec, m.layout, m.target, m.device, m.variant, m.workload, code_hash=m.code_hash, regime=m.regime
    )


def question_key(
    spec: AttentionSpec,
    layout: CacheLayout,
    target: Target,
    device: Device,
    variant: Variant,
    workload: Workload,
    *,
    code_hash: str,
    regime: str,
) -> str:
    """See `trial_key`."""
    return digest(
        canonical(
            {
                "kernel": kernel_row(spec, layout, target, code_hash)["digest"],
                "device": device_identity(device),
                "variant": variant_row(variant)["digest"],
                "workload": workload_row(workload)["digest"],
                "regime": regime,
            }
        )
    )


def _storable(text: str) -> str:
    """`text` with what no database takes as text (NUL, lone surrogates of a compiler's odd bytes) escaped."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8").replace("\0", "\\x00")


def trial_fields(measurement: Measurement) -> dict[str, Any]:
    """What a trial holds beside the things it shares with others, JSON-ready."""
    m = measurement
    return {
        "regime": m.regime,
        "status": m.status.value,
        "samples_us": [float(us) for us in m.samples_us],
        "max_error": None if m.max_error is None else repr(float(m.max_error)),
        "detail": _storable(m.detail),
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
    return {"digest": digest(canonical(fields)), "rule": text, "created_at": created_at}


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
        if name not in ("name", "target", "features"):
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
