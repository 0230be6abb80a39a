"""Records on their way into a database: read, judged, added, and what came of each told."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from pagegen.db import codec, conflicts, keys, schema
from pagegen.db.bulk import FIELDS, PARENTS, Shared, TrialBatch, number_all
from pagegen.db.queries import UNDECODABLE, Portfolio
from pagegen.db.rows import Writer
from pagegen.spec import CompileFacts, Prediction, check
from pagegen.spec.result import COMPILE_COUNTS

Record = dict[str, Any]


ID_LENGTH = 16  # hex digits of a digest: 64 bits, readable and unique within a file
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
        self._newer: set[tuple[str, str]] = set()  # (kind, id) of what only a newer version reads
        self._readers: dict[str, Callable[[str, Record], None]] = {
            "trial": self._trial,
            "portfolio": self._portfolio,
            "compile_facts": self._facts,
            "prediction": self._prediction,
        }

    def take(self, name: str, record: Any) -> None:
        """Adds a record, or notes why not under its name. A record is read to the end before anything of it is written,
        and batches are written outside of its judgement: what is wrong with one costs no other."""
        try:
            self._take(name, record)
        except UNDECODABLE as error:
            what = f"it has no {error.args[0]!r}" if isinstance(error, KeyError) else str(error)
            self.malformed.append(f"{name}: {what}")
        if self.trials.is_full:
            self.trials.flush()

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
        if not isinstance(record, dict) or not isinstance(record.get("record"), str):
            raise ValueError('a record must be a JSON object with a field "record", which is text')
        kind, version = record["record"], record.get("v")
        if isinstance(version, bool) or not isinstance(version, int) or version < keys.VERSION:
            raise ValueError(f"a record must have version {keys.VERSION}, got {version!r}")
        if version > keys.VERSION:
            self._keep_whole(name, kind, record, f"{kind!r} of version {version}")
        elif self._newer and any((parent, record.get(parent)) in self._newer for parent in self._named_by(record)):
            self._keep_whole(name, kind, record, f"{kind!r} that names what a newer version defines")
        elif kind in self._readers:
            self._readers[kind](name, record)
        elif kind in codec.SHARED:
            self._define(name, kind, record)
        else:
            self._keep_whole(name, kind, record, f"unknown record {kind!r}")

    @staticmethod
    def _named_by(record: Record) -> list[str]:
        """The kinds of shared things that a record names by an id; one that defines a thing holds it as an object."""
        return [kind for kind in codec.SHARED if isinstance(record.get(kind), str)]

    def _keep_whole(self, name: str, kind: str, record: Record, what: str) -> None:
        """Keeps a record that this version does not read, and what it names, under the ids that an export gives."""
        named = {k: self.known[k, record[k]] for k in self._named_by(record) if (k, record[k]) in self.known}
        ids = {k: shared.digest[:ID_LENGTH] for k, shared in named.items()}
        self.writer.add_extra(kind, "", "", {**record, **ids})
        number_all(self.connection, named.values())
        if isinstance(record.get("id"), str):
            self._newer.add((kind, record["id"]))
        self.ignored.append(f"{name}: {what}")

    @staticmethod
    def _unknown(record: Record, known: Iterable[str]) -> Record:
        """The fields that this version does not know. Raises ValueError for what cannot be kept."""
        unknown = {field: record[field] for field in sorted(record.keys() - {*_HEAD, *known})}
        for field, value in unknown.items():
            check.json_value(check.shown(field), value)
        return unknown

    def _keep(self, name: str, kind: str, owner: str, unknown: Record) -> None:
        """Keeps unknown fields beside the row of that digest."""
        for field, value in unknown.items():
            self.writer.add_extra(kind, owner, field, value)
        if unknown:
            self.ignored.append(f"{name}: unknown field {', '.join(map(check.shown, unknown))}")

    def _define(self, name: str, kind: str, record: Record) -> None:
        how = codec.SHARED[kind]
        unknown = self._unknown(record, ("id", *how.fields))
        identity = check.text("id", record["id"], empty=False)
        value = how.decode(json.dumps({"v": record["v"], **{f: record[f] for f in how.fields}}))
        known = self.known.get((kind, identity))
        if known is not None and known.value != value:
            raise ValueError(f"{kind} {identity} is defined twice, differently")
        shared = known or Shared(kind, value, how.row(value))
        self.known[kind, identity] = shared
        if unknown:
            number_all(self.connection, (shared,))  # what is kept of it needs it
            self._keep(name, kind, shared.digest, unknown)
        if kind == "profile":  # a profile stands for itself; the others come with what names them
            self._count(self.writer.add_profile(value))

    def _named(self, kind: str, record: Record) -> Shared:
        found = self.known.get((kind, record[kind]))
        if found is None:
            raise ValueError(f"it names {kind} {check.shown(record[kind])}, which no record before it defines")
        return found

    def _trial(self, name: str, record: Record) -> None:
        known = self.known
        try:
            parents = tuple([known[kind, record[kind]] for kind in PARENTS])
        except KeyError:
            parents = tuple(self._named(kind, record) for kind in PARENTS)  # says which it is
        unknown = {} if record.keys() <= _TRIAL else self._unknown(record, (*PARENTS, *FIELDS))
        digest = self.trials.add(record, parents)
        if unknown:
            self._keep(name, "trial", digest, unknown)

    def _parents(self, table: sa.Table, record: Record) -> dict[str, Shared]:
        return {kind: self._named(kind, record) for kind in schema.parents(table)}

    def _portfolio(self, name: str, record: Record) -> None:
        parents = self._parents(schema.portfolios, record)
        unknown = self._unknown(record, (*parents, "rule", "created_at"))
        kernel, device = parents["kernel"], parents["device"]
        spec, layout, target, code_hash = kernel.value
        portfolio = Portfolio(
            spec=spec, layout=layout, target=target, code_hash=code_hash, device=device.value,
            profile=parents["profile"].value, rule=codec.rule_from(json.dumps(record["rule"])),
            created_at=record["created_at"],
        )  # fmt: skip
        self._count(self.writer.add_portfolio(portfolio))
        number_all(self.connection, (kernel, device))
        self._portfolios.add((kernel.id or 0, device.id or 0))
        self._keep(name, "portfolio", codec.portfolio_row(portfolio, _digests(parents))["digest"], unknown)

    def _facts(self, name: str, record: Record) -> None:
        parents = self._parents(schema.compile_facts, record)
        spec, layout, target, code_hash = parents["kernel"].value
        fields = ("form", *COMPILE_COUNTS, "loop", "created_at")
        unknown = self._unknown(record, (*parents, *fields))
        facts = CompileFacts(
            spec=spec, layout=layout, target=target, code_hash=code_hash, variant=parents["variant"].value,
            environment=dict(parents["environment"].value), **{field: record[field] for field in fields},
        )  # fmt: skip
        self._count(self.writer.add_facts(facts))
        self._keep(name, "compile_facts", codec.facts_row(facts, _digests(parents))["digest"], unknown)

    def _prediction(self, name: str, record: Record) -> None:
        parents = self._parents(schema.predictions, record)
        spec, layout, _, code_hash = parents["kernel"].value
        fields = ("predicted_us", "model", "created_at")
        unknown = self._unknown(record, (*parents, *fields))
        prediction = Prediction(
            spec=spec, layout=layout, code_hash=code_hash, device=parents["device"].value,
            variant=parents["variant"].value, workload=parents["workload"].value,
            **{field: record[field] for field in fields},
        )  # fmt: skip
        self._count(self.writer.add_prediction(prediction))
        self._keep(name, "prediction", codec.prediction_row(prediction, _digests(parents))["digest"], unknown)

    def _count(self, added: bool) -> None:
        self.added += added
        self.present += not added


def _digests(parents: dict[str, Shared]) -> dict[str, str]:
    return {kind: shared.digest for kind, shared in parents.items()}
