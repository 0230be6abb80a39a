"""Records on their way into a database: read, judged, added, and what came of each told."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from pagegen.db import codec, conflicts
from pagegen.db.bulk import FIELDS, PARENTS, Shared, TrialBatch, number_all
from pagegen.db.queries import UNDECODABLE
from pagegen.db.rows import Writer
from pagegen.spec import CompileFacts, Prediction
from pagegen.spec.result import COMPILE_COUNTS

Record = dict[str, Any]


@dataclass(frozen=True)
class _Kind:
    """How records of one kind of shared thing are read: its fields, value and row."""

    fields: tuple[str, ...]
    decode: Callable[[str], Any]
    row: Callable[[Any], codec.Row]


_SHARED = {
    "kernel": _Kind(
        ("spec", "layout", "target", "code_hash"), codec.kernel_from, lambda kernel: codec.kernel_row(*kernel)
    ),
    "device": _Kind(("device",), codec.device_from, codec.device_row),
    "environment": _Kind(("environment",), codec.environment_from, codec.environment_row),
    "variant": _Kind(("variant",), codec.variant_from, codec.variant_row),
    "workload": _Kind(("workload",), codec.workload_from, codec.workload_row),
    "profile": _Kind(("profile",), codec.profile_from, codec.profile_row),
}
_HEAD = ("record", "v")
_TRIAL = frozenset((*_HEAD, *PARENTS, *FIELDS))


@dataclass(frozen=True, kw_only=True)
class TransferReport:
    """What came of an import or merge. `malformed` names every record that could not be read or cannot be true, by its
    line; `ignored` names what a newer pagegen wrote beside what this one knows, which is kept and comes out again;
    `conflicts` tells where what came contradicts what was there: both stay."""

    added: int = 0
    present: int = 0
    malformed: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()


class Absorber:
    """Reads records in order and adds them in one transaction."""

    def __init__(self, connection: sa.Connection) -> None:
        self.connection = connection
        self.writer = Writer(connection)
        self.trials = TrialBatch(connection)
        self.known: dict[tuple[str, str], Shared] = {}
        self.added = self.present = 0
        self.malformed: list[str] = []
        self.ignored: list[str] = []
        self._portfolios: set[tuple[int, int]] = set()
        self._readers: dict[str, Callable[[str, Record], None]] = {
            "trial": self._trial,
            "portfolio": self._portfolio,
            "compile_facts": self._facts,
            "prediction": self._prediction,
        }

    def take(self, name: str, record: Any) -> None:
        """Adds a record, or notes why not under its name."""
        try:
            self._take(name, record)
        except UNDECODABLE as error:
            what = f"it has no {error.args[0]!r}" if isinstance(error, KeyError) else str(error)
            self.malformed.append(f"{name}: {what}")

    def report(self) -> TransferReport:
        """What came of it all, when the last record was taken."""
        self.trials.flush()
        found = conflicts.trial_conflicts(self.connection, self.trials.shared_keys)
        found += conflicts.portfolio_conflicts(self.connection, self._portfolios) if self._portfolios else []
        return TransferReport(
            added=self.added + self.trials.added,
            present=self.present + self.trials.present,
            malformed=tuple(self.malformed),
            ignored=tuple(self.ignored),
            conflicts=tuple(map(str, found)),
        )

    def _take(self, name: str, record: Any) -> None:
        if isinstance(record, ValueError):  # what another format's reader found wrong
            raise record
        if not isinstance(record, dict) or "record" not in record:
            raise ValueError('a record must be a JSON object with a field "record"')
        kind = record["record"]
        if record.get("v") != codec.VERSION:
            raise ValueError(f"a record must have version {codec.VERSION}, got {record.get('v')!r}")
        if isinstance(kind, str) and kind in self._readers:
            self._readers[kind](name, record)
        elif isinstance(kind, str) and kind in _SHARED:
            self._define(name, kind, record)
        else:
            self.writer.add_extra(str(kind), "", "", record)
            self.ignored.append(f"{name}: unknown record {kind!r}")

    def _keep(self, name: str, record: Record, owner: str, known: Iterable[str]) -> bool:
        """Keeps the fields that this version does not know beside the row of that digest; False for none."""
        unknown = sorted(set(record) - {*_HEAD, *known})
        for field in unknown:
            self.writer.add_extra(record["record"], owner, field, record[field])
        if unknown:
            self.ignored.append(f"{name}: unknown field {', '.join(unknown)}")
        return bool(unknown)

    def _define(self, name: str, kind: str, record: Record) -> None:
        how = _SHARED[kind]
        value = how.decode(json.dumps({"v": record["v"], **{f: record[f] for f in how.fields}}))
        known = self.known.get((kind, record["id"]))
        if known is not None and known.value != value:
            raise ValueError(f"{kind} {record['id']} is defined twice, differently")
        shared = known or Shared(kind, value, how.row(value))
        self.known[kind, record["id"]] = shared
        if self._keep(name, record, shared.digest, ("id", *how.fields)):
            number_all(self.connection, (shared,))  # what is kept of it needs it
        if kind == "profile":  # a profile stands for itself; the others come with what names them
            self._count(self.writer.add_profile(value))

    def _named(self, kind: str, record: Record) -> Shared:
        found = self.known.get((kind, record[kind]))
        if found is None:
            raise ValueError(f"it names {kind} {record[kind]}, which no record before it defines")
        return found

    def _trial(self, name: str, record: Record) -> None:
        known = self.known
        try:
            parents = tuple([known[kind, record[kind]] for kind in PARENTS])
        except KeyError:
            parents = tuple(self._named(kind, record) for kind in PARENTS)  # says which it is
        digest = self.trials.add(record, parents)
        if not record.keys() <= _TRIAL:
            self._keep(name, record, digest, (*PARENTS, *FIELDS))

    def _portfolio(self, name: str, record: Record) -> None:
        parents = ("kernel", "device", "profile")
        kernel, device, profile = (self._named(kind, record) for kind in parents)
        rule = codec.rule_from(json.dumps(record["rule"]))
        self._count(self.writer.add_portfolio(kernel.row, device.value, profile.value, rule, record["created_at"]))
        number_all(self.connection, (kernel, device))
        self._portfolios.add((kernel.id or 0, device.id or 0))
        digests = {shared.kind: shared.digest for shared in (kernel, device, profile)}
        digest = codec.portfolio_row(rule, record["created_at"], digests)["digest"]
        self._keep(name, record, digest, (*parents, "rule", "created_at"))

    def _facts(self, name: str, record: Record) -> None:
        parents = ("kernel", "variant", "environment")
        kernel, variant, environment = (self._named(kind, record) for kind in parents)
        spec, layout, target, code_hash = kernel.value
        fields = ("form", *COMPILE_COUNTS, "loop", "created_at")
        facts = CompileFacts(
            spec=spec, layout=layout, target=target, code_hash=code_hash, variant=variant.value,
            environment=dict(environment.value), **{field: record[field] for field in fields},
        )  # fmt: skip
        self._count(self.writer.add_facts(facts))
        digests = {shared.kind: shared.digest for shared in (kernel, variant, environment)}
        self._keep(name, record, codec.facts_row(facts, digests)["digest"], (*parents, *fields))

    def _prediction(self, name: str, record: Record) -> None:
        parents = ("kernel", "device", "variant", "workload")
        kernel, device, variant, workload = (self._named(kind, record) for kind in parents)
        spec, layout, _, code_hash = kernel.value
        fields = ("predicted_us", "model", "created_at")
        prediction = Prediction(
            spec=spec, layout=layout, code_hash=code_hash, device=device.value, variant=variant.value,
            workload=workload.value, **{field: record[field] for field in fields},
        )  # fmt: skip
        self._count(self.writer.add_prediction(prediction))
        digests = {shared.kind: shared.digest for shared in (kernel, device, variant, workload)}
        self._keep(name, record, codec.prediction_row(prediction, digests)["digest"], (*parents, *fields))

    def _count(self, added: bool) -> None:
        self.added += added
        self.present += not added
