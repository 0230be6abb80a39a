"""Measured times as figures: medians by variant and batch, read without decoding what they share."""

from __future__ import annotations

import json
import statistics
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from pagegen.db import codec, keys, queries
from pagegen.db.queries import UNDECODABLE, Decoder
from pagegen.db.schema import devices, kernels, portfolios, trials, variants, workloads
from pagegen.spec import AttentionSpec, CacheLayout, Device, Measurement, Status, Variant, Workload, check
from pagegen.spec.result import COMPARE, CONFIRM, PURPOSE, REGIMES

if TYPE_CHECKING:
    from pagegen.db.database import Database
    from pagegen.db.engine import Store

# Samples that the tuner took to confirm a winner; those of the search flatter it (winners measured again scored 0.94
# of what the search had shown), so they count only where there are no others. Before both go the samples taken in
# rounds over all block sizes, since those taken minutes apart do not compare.
RANKS = {CONFIRM: 1, COMPARE: 2}
# Times with a cold and with a warm cache are of different things. A server's caches do not fit a last-level cache, so
# cold ones count; warm ones only where a variant has no others on a batch.
COLD = REGIMES[0]
Medians = dict[tuple[Variant, Workload], float]
_Pools = dict[tuple[Variant, Workload], dict[tuple[bool, int], list[float]]]

# What tells times apart.
_KINDS = ("environment", "variant", "workload")
FIGURES = (
    sa.select(trials.c.samples_us, trials.c.regime, *queries.of_parents(trials, "data", _KINDS), trials.c.digest)
    .select_from(queries.joined(trials, _KINDS))
    .where(trials.c.status == Status.OK.value)
)


def _numbers(table: sa.Table, where: sa.ColumnElement[bool]) -> sa.Select[Any]:
    return sa.select(table.c.id).where(where)


def _among(table: sa.Table, name: str) -> sa.Select[Any]:
    return _numbers(table, table.c.digest.in_(sa.bindparam(name, expanding=True)))


# Built once: making the statement anew took as long as running it.
_HERE = (
    trials.c.kernel_id.in_(_numbers(kernels, kernels.c.digest == sa.bindparam("kernel"))),
    trials.c.device_id.in_(_numbers(devices, devices.c.identity == sa.bindparam("identity"))),
)
ON_ALL = FIGURES.where(*_HERE, trials.c.variant_id.in_(_among(variants, "variants")))
ON_SOME = ON_ALL.where(trials.c.workload_id.in_(_among(workloads, "workloads")))


PROVEN = sa.select(variants.c.digest).where(
    variants.c.digest.in_(sa.bindparam("variants", expanding=True)),
    sa.exists().where(trials.c.variant_id == variants.c.id, *_HERE, trials.c.status == Status.OK.value),
)


def medians(
    db: Database,
    spec: AttentionSpec,
    layout: CacheLayout,
    device: Device,
    code_hash: str,
    *,
    variants: Collection[Variant],
    workloads: Collection[Workload] | None = None,
) -> Medians:
    """The median time of the ok trials of some variants on some batches (None: all), of the best kind there is.

    Every step is a look-up by index: kernels, devices and the rest by what they are, trials by their numbers. Rows that
    cannot be read are left out; `verify` names them.
    """
    statement = medians_statement(spec, layout, device, code_hash, variants, workloads)
    rows: dict[str, Any] = {}  # what the user has of what ships counts once
    for store in db.stores:
        with store.reading() as connection:
            rows = {row.digest: row for row in connection.execute(statement)} | rows
    pool: _Pools = {}
    _add(pool, rows.values())
    return _medians(pool)


def proven(
    stores: Iterable[Store], spec: AttentionSpec, layout: CacheLayout, device: Device, code_hash: str,
    of_variants: Collection[Variant],
) -> set[Variant]:  # fmt: skip
    """Those of some variants that ran well here: that have an ok trial for this kernel on this device."""
    digests = {codec.variant_row(variant)["digest"]: variant for variant in of_variants}
    statement = PROVEN.params(_named(spec, layout, device, code_hash, digests))
    found: set[Variant] = set()
    for store in stores:
        with store.reading() as connection:
            found |= {digests[digest] for digest in connection.execute(statement).scalars()}
    return found


def medians_statement(
    spec: AttentionSpec, layout: CacheLayout, device: Device, code_hash: str, of_variants: Collection[Variant],
    of_workloads: Collection[Workload] | None,
) -> sa.Select[Any]:  # fmt: skip
    """The statement behind `medians`."""
    named = _named(spec, layout, device, code_hash, (codec.variant_row(v)["digest"] for v in of_variants))
    if of_workloads is None:
        return ON_ALL.params(named)
    return ON_SOME.params({**named, "workloads": [codec.workload_row(w)["digest"] for w in of_workloads]})


def _named(
    spec: AttentionSpec, layout: CacheLayout, device: Device, code_hash: str, of_variants: Iterable[str]
) -> dict[str, Any]:
    return {
        "kernel": codec.kernel_row(spec, layout, device.target, code_hash)["digest"],
        "identity": keys.device_identity(device),
        "variants": list(of_variants),
    }


def _add(pool: _Pools, rows: Iterable[Any]) -> None:
    decoder = Decoder()
    for row in rows:
        try:
            environment = decoder.once(codec.environment_from, row.environment)
            key = (decoder.once(codec.variant_from, row.variant), decoder.once(codec.workload_from, row.workload))
            samples = [check.number("samples_us", us, at_least=0) for us in json.loads(row.samples_us)]
        except UNDECODABLE:
            continue
        _put(pool, key, row.regime, environment, samples)


def _put(
    pool: _Pools, key: tuple[Variant, Workload], regime: str, environment: Mapping[str, str], samples: Iterable[float]
) -> None:
    rank = (regime == COLD, RANKS.get(environment.get(PURPOSE, ""), 0))
    pool.setdefault(key, {}).setdefault(rank, []).extend(samples)


def _medians(pool: _Pools) -> Medians:
    return {key: statistics.median(ranks[max(ranks)]) for key, ranks in pool.items() if ranks[max(ranks)]}


def measured_medians(found: Iterable[Measurement]) -> Medians:
    """The median time by variant and workload over the samples of all their ok trials, of the best kind (see RANKS and
    COLD) that there is."""
    pool: _Pools = {}
    for trial in found:
        if trial.status is Status.OK:
            _put(pool, (trial.variant, trial.workload), trial.regime, trial.environment, trial.samples_us)
    return _medians(pool)


def measured_device(db: Database, spec: AttentionSpec, code_hash: str, here: Device) -> Device:
    """`here` where it has ok trials for this spec and code, else the device with the most, else `here`."""
    of_spec = queries.narrowed(sa.select(kernels.c.id), spec=spec, target=here.target, code_hash=code_hash)
    for store in db.stores:
        with store.reading() as connection:
            own = sa.select(trials.c.id).where(
                trials.c.kernel_id.in_(of_spec),
                trials.c.device_id.in_(sa.select(devices.c.id).where(devices.c.identity == keys.device_identity(here))),
                trials.c.status == Status.OK.value,
            )
            if connection.execute(own.limit(1)).first() is not None:
                return here
    measured = db.measured_devices(spec, here.target, code_hash)
    return measured[0] if measured else here


def content_digests(db: Database, spec: AttentionSpec) -> tuple[list[str], list[str]]:
    """The digests of all portfolios and of all trials of a spec, sorted: equal for equal contents, whatever the order
    in which they came and the file they lie in."""
    found: tuple[set[str], set[str]] = (set(), set())
    for store in db.stores:
        with store.reading() as connection:
            for digests, table in zip(found, (portfolios, trials), strict=True):
                statement = sa.select(table.c.digest).join(kernels, table.c.kernel_id == kernels.c.id)
                digests.update(connection.execute(queries.narrowed(statement, spec=spec)).scalars())
    return sorted(found[0]), sorted(found[1])
