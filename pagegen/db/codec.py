"""Values to rows and back. Their JSON is canonical, and its digest is their key: see `pagegen.db.keys`."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagegen.db import keys
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
    check,
)
from pagegen.spec.result import COMPILE_COUNTS

if TYPE_CHECKING:
    from pagegen.db.queries import Portfolio

# A table's columns by name. Rows of shared things are remembered, so they are not to be changed.
Row = dict[str, Any]
_DEVICE_COUNTS = ("units", "registers_per_unit", "max_threads_per_unit")
_DEVICE_COLUMNS = (*keys.DEVICE_FLOATS, *_DEVICE_COUNTS, "name", "target", "partition")


def _row(fields: Mapping[str, Any], **named: Any) -> Row:
    """A row of named columns beside the data and its digest."""
    text = keys.canonical(fields)
    columns = {name: storable(value) if isinstance(value, str) else value for name, value in named.items()}
    return {"digest": keys.digest(text), "data": text, **columns}


@functools.lru_cache(maxsize=1024)
def kernel_row(spec: AttentionSpec, layout: CacheLayout, target: Target, code_hash: str) -> Row:
    """The row of `kernels`: everything that decides which code runs, but for the variant. Two orders that are the same
    bytes are one kernel."""
    layout = layout.canonical(spec.num_kv_heads)
    plain = spec.to_dict()
    named = {key: int(value) if isinstance(value, bool) else value for key, value in plain.items()}
    named |= {"block_size": layout.block_size, "block_order": layout.order}
    named |= {"target": str(target), "code_hash": code_hash, "spec_digest": keys.spec_digest(spec)}
    fields = {"spec": plain, "layout": layout.to_dict(), "target": str(target), "code_hash": code_hash}
    return _row(fields, **named)


@functools.lru_cache(maxsize=1024)
def device_row(device: Device) -> Row:
    """The row of `devices`."""
    plain = keys.device_fields(device)
    named = {name: plain.get(name, getattr(device, name)) for name in _DEVICE_COLUMNS}
    return _row({"device": plain}, **named, features=" ".join(device.features), identity=keys.device_identity(device))


def environment_row(environment: Mapping[str, str]) -> Row:
    """The row of `environments`."""
    return _environment_row(tuple(sorted(environment.items())))


@functools.lru_cache(maxsize=1024)
def _environment_row(items: tuple[tuple[str, str], ...]) -> Row:
    environment = dict(items)
    named = {name: environment.get(name, "") for name in ENVIRONMENT_COLUMNS}
    return _row({"environment": environment}, **named, identity=keys.environment_identity(environment))


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
    return keys.key_of(
        kernel=kernel_row(m.spec, m.layout, m.target, m.code_hash)["digest"],
        device=keys.device_identity(m.device),
        environment=keys.environment_identity(m.environment),
        variant=variant_row(m.variant)["digest"],
        workload=workload_row(m.workload)["digest"],
        regime=m.regime,
    )


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
        "digest": keys.digest(keys.canonical({**fields, **parents})),
        "key": trial_key(measurement),
        "median_us": measurement.median_us,
        "samples_us": json.dumps(fields["samples_us"], separators=(",", ":"), allow_nan=False),
    }


def portfolio_row(portfolio: Portfolio, parents: Mapping[str, str]) -> Row:
    """The row of `portfolios`, without its references."""
    rule, fields = portfolio.rule.to_dict(), {"created_at": portfolio.created_at}
    kind = portfolio.rule.evidence.get("kind") or ""
    digest = keys.digest(keys.canonical({"rule": rule, **fields, **parents}))
    return {**fields, "digest": digest, "rule": _compact(rule), "kind": kind}


def facts_row(facts: CompileFacts, parents: Mapping[str, str]) -> Row:
    """The row of `compile_facts`, without its references."""
    named = {"form": facts.form, **{name: getattr(facts, name) for name in COMPILE_COUNTS}}
    fields = {**named, "loop": facts.loop, "created_at": facts.created_at}
    return {**fields, "digest": keys.digest(keys.canonical({**fields, **parents})), "loop": _compact(facts.loop)}


def prediction_row(prediction: Prediction, parents: Mapping[str, str]) -> Row:
    """The row of `predictions`, without its references."""
    fields = {
        "predicted_us": float(prediction.predicted_us),
        "model": prediction.model,
        "created_at": prediction.created_at,
    }
    return {**fields, "digest": keys.digest(keys.canonical({**fields, **parents}))}


def extra_row(record: str, owner: str, field: str, value: Any) -> Row:
    """The row of `extras`. Raises ValueError or TypeError for a value that is not JSON."""
    check.json_value(check.shown(field) or "a record", value)
    named = {"record": storable(record), "owner": owner, "field": storable(field), "value": _compact(value)}
    return {**named, "digest": keys.digest(keys.canonical(named))}


def _compact(value: Any) -> str:
    """JSON as `keys.canonical` writes it, of any value and without a version."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def kernel_from(data: str) -> tuple[AttentionSpec, CacheLayout, Target, str]:
    """The inverse of `kernel_row`. Raises ValueError, TypeError or KeyError for what is no kernel."""
    fields = keys.fields_of(data)
    return (
        AttentionSpec.from_dict(fields["spec"]),
        CacheLayout.from_dict(fields["layout"]),
        Target.parse(fields["target"]),
        check.text("code_hash", fields["code_hash"], printable=False),
    )


def device_from(data: str) -> Device:
    """The inverse of `device_row`. Raises ValueError, TypeError or KeyError for what is no device."""
    return Device.from_dict(keys.fields_of(data)["device"])


def environment_from(data: str) -> dict[str, str]:
    """The inverse of `environment_row`."""
    return check.texts("environment", keys.fields_of(data)["environment"])


def variant_from(data: str) -> Variant:
    """The inverse of `variant_row`."""
    return Variant.from_dict(keys.fields_of(data)["variant"])


def workload_from(data: str) -> Workload:
    """The inverse of `workload_row`."""
    return Workload.from_dict(keys.fields_of(data)["workload"])


def profile_from(data: str) -> Profile:
    """The inverse of `profile_row`."""
    return Profile.from_dict(keys.fields_of(data)["profile"])


def rule_from(text: str) -> DispatchRule:
    """The inverse of `portfolio_row`'s rule."""
    return DispatchRule.from_dict(json.loads(text))


@dataclass(frozen=True)
class Kind:
    """A kind of thing that rows share: the fields of its JSON, how that is read, and the row made of what was read."""

    fields: tuple[str, ...]
    decode: Callable[[str], Any]
    row: Callable[[Any], Row]


SHARED = {
    "kernel": Kind(("spec", "layout", "target", "code_hash"), kernel_from, lambda kernel: kernel_row(*kernel)),
    "device": Kind(("device",), device_from, device_row),
    "environment": Kind(("environment",), environment_from, environment_row),
    "variant": Kind(("variant",), variant_from, variant_row),
    "workload": Kind(("workload",), workload_from, workload_row),
    "profile": Kind(("profile",), profile_from, profile_row),
}


def parent_rows(value: Measurement | Portfolio | CompileFacts | Prediction, kinds: Iterable[str]) -> dict[str, Row]:
    """The rows of what the value's own row refers to, by kind."""
    kernel = (value.spec, value.layout, value.target, value.code_hash)
    return {kind: SHARED[kind].row(kernel if kind == "kernel" else getattr(value, kind)) for kind in kinds}


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
    return Measurement(
        spec=spec,
        layout=layout,
        target=target,
        device=device,
        variant=variant,
        workload=workload,
        status=Status(fields["status"]),
        samples_us=fields["samples_us"],
        regime=fields["regime"],
        max_error=None if fields["max_error"] is None else float(check.text("max_error", fields["max_error"])),
        detail=fields["detail"],
        code_hash=code_hash,
        environment=dict(environment),
        created_at=fields["created_at"],
    )
