"""Reading rows back as the values they came from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import sqlalchemy as sa

from pagegen.db import codec, keys
from pagegen.db.order import by_code_point
from pagegen.db.schema import devices, kernels, parents, portfolios, profiles, trials, variants, workloads
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
    check,
)

T = TypeVar("T")
# What decoding a row raises when the row is not what this version writes.
UNDECODABLE = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError)
# What a portfolio's rule may rest on; the other kinds of evidence are answers of a selection, and are not stored.
KINDS = ("measured", "predicted", None)


@dataclass(frozen=True, kw_only=True)
class Portfolio:
    """A stored portfolio: the dispatch rule that tuning one profile on one device left for one kernel, with the day or
    time of it in UTC."""

    spec: AttentionSpec
    layout: CacheLayout
    target: Target
    code_hash: str
    device: Device
    profile: Profile
    rule: DispatchRule
    created_at: str

    def __post_init__(self) -> None:
        for name, kind in _PORTFOLIO.items():
            check.instance(name, getattr(self, name), kind)
        check.text("code_hash", self.code_hash, printable=False)
        check.timestamp("created_at", self.created_at, empty=False)
        if self.device.target != self.target:
            raise ValueError(f"device must be of the target {self.target}, got one of {self.device.target}")
        if self.rule.family != self.target.family:
            raise ValueError(
                f"rule must hold {self.target.family} variants for {self.target}, got {self.rule.variants[0].name}"
            )
        check.one_of("kind of the rule's evidence", self.rule.evidence.get("kind"), KINDS)


_PORTFOLIO = {
    "spec": AttentionSpec, "layout": CacheLayout, "target": Target, "device": Device, "profile": Profile,
    "rule": DispatchRule,
}  # fmt: skip


@dataclass(frozen=True)
class Undecodable:
    """A row that cannot be read: `what` names it ("trial 17")."""

    what: str
    why: str


@dataclass
class Decoder:
    """Decodes rows, each shared thing once."""

    seen: dict[str, Any] = field(default_factory=dict)

    def once(self, decode: Callable[[str], T], data: str) -> T:
        """`decode(data)`, remembered by `data`."""
        if data not in self.seen:
            self.seen[data] = decode(data)
        value: T = self.seen[data]
        return value

    def trial(self, row: Any) -> Measurement:
        """The measurement of a row of `TRIALS`. Raises one of UNDECODABLE."""
        return codec.trial_from(
            {**row._mapping, "samples_us": json.loads(row.samples_us)},
            self.once(codec.kernel_from, row.kernel),
            self.once(codec.device_from, row.device),
            self.once(codec.environment_from, row.environment),
            self.once(codec.variant_from, row.variant),
            self.once(codec.workload_from, row.workload),
        )

    def portfolio(self, row: Any) -> Portfolio:
        """The portfolio of a row of `PORTFOLIOS`. Raises one of UNDECODABLE."""
        spec, layout, target, code_hash = self.once(codec.kernel_from, row.kernel)
        return Portfolio(
            spec=spec,
            layout=layout,
            target=target,
            code_hash=code_hash,
            device=self.once(codec.device_from, row.device),
            profile=self.once(codec.profile_from, row.profile),
            rule=codec.rule_from(row.rule),
            created_at=row.created_at,
        )


def joined(table: sa.Table, kinds: Iterable[str] | None = None) -> sa.FromClause:
    """A table beside what its rows refer to: all of it, or these kinds."""
    source: sa.FromClause = table
    known = parents(table)
    for kind in known if kinds is None else kinds:
        source = source.join(known[kind], table.c[f"{kind}_id"] == known[kind].c.id)
    return source


def of_parents(table: sa.Table, column: str, kinds: Iterable[str] | None = None) -> list[sa.Label[Any]]:
    """One column ("data", "digest") of everything that is `joined`, labelled with its kind."""
    known = parents(table)
    return [known[kind].c[column].label(kind) for kind in (known if kinds is None else kinds)]


TRIALS = (
    sa.select(
        trials.c.id, trials.c.digest, trials.c.key, trials.c.regime, trials.c.status, trials.c.median_us,
        trials.c.samples_us, trials.c.max_error, trials.c.detail, trials.c.created_at, *of_parents(trials, "data"),
    )
    .select_from(joined(trials))
    .order_by(by_code_point(trials.c.created_at), trials.c.digest)
)  # fmt: skip
PORTFOLIOS = (
    sa.select(
        portfolios.c.id, portfolios.c.digest, portfolios.c.rule, portfolios.c.kind, portfolios.c.created_at,
        *of_parents(portfolios, "data"),
    )
    .select_from(joined(portfolios))
    .order_by(by_code_point(portfolios.c.created_at).desc(), portfolios.c.digest)
)  # fmt: skip
PROFILES = sa.select(profiles.c.id, profiles.c.digest, profiles.c.data).order_by(
    by_code_point(profiles.c.name), profiles.c.digest
)


_ASKED: dict[str, type] = {
    "spec": AttentionSpec, "layout": CacheLayout, "device": Device, "variant": Variant, "workload": Workload,
    "code_hash": str, "regime": str,
}  # fmt: skip


def narrowed(
    statement: sa.Select[Any],
    *,
    spec: AttentionSpec | None = None,
    layout: CacheLayout | None = None,
    target: Target | None = None,
    code_hash: str | None = None,
    device: Device | None = None,
    variant: Variant | None = None,
    workload: Workload | None = None,
    status: Status | None = None,
    regime: str | None = None,
) -> sa.Select[Any]:
    """The statement narrowed to what matches; None asks for any. What is asked about must be `joined` in it. Raises
    TypeError or ValueError for what is no such thing."""
    target = None if target is None else Target.parse(target)
    asked = {"spec": spec, "layout": layout, "device": device, "variant": variant}
    for name, value in {**asked, "workload": workload, "code_hash": code_hash, "regime": regime}.items():
        if value is not None:
            check.instance(name, value, _ASKED[name])
    if spec is not None and layout is not None:
        layout = layout.canonical(spec.num_kv_heads)
    if spec is not None:
        statement = statement.where(kernels.c.spec_digest == keys.spec_digest(spec))
    if layout is not None:
        statement = statement.where(kernels.c.block_size == layout.block_size, kernels.c.block_order == layout.order)
    if target is not None:
        statement = statement.where(kernels.c.target == str(target))
    if code_hash is not None:
        statement = statement.where(kernels.c.code_hash == codec.storable(code_hash))
    if device is not None:
        statement = statement.where(devices.c.identity == keys.device_identity(device))
    if variant is not None:
        statement = statement.where(variants.c.digest == codec.variant_row(variant)["digest"])
    if workload is not None:
        statement = statement.where(workloads.c.digest == codec.workload_row(workload)["digest"])
    if status is not None:
        check.one_of("status", status, Status)
        statement = statement.where(trials.c.status == Status(status).value)
    if regime is not None:
        statement = statement.where(trials.c.regime == regime)
    return statement


def decoded(
    connection: sa.Connection, statement: sa.Select[Any], kind: str, decode: Callable[[Any], T]
) -> Iterator[T | Undecodable]:
    """Every row of the statement as a value, or as what is wrong with it. `kind` names rows to people."""
    for row in connection.execute(statement):
        try:
            yield decode(row)
        except UNDECODABLE as error:
            yield Undecodable(f"{kind} {row.id}", f"{type(error).__name__}: {error}")
