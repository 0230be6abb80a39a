"""What contradicts itself in a database: told to people, and never settled by throwing something away."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from pagegen.db.order import by_code_point
from pagegen.db.queries import UNDECODABLE, joined
from pagegen.db.schema import devices, kernels, portfolios, trials, variants, workloads
from pagegen.spec import DispatchRule, Status
from pagegen.spec.result import INTERIM

# One machine's read bandwidth was seen to change 1.7-fold within a search; medians further apart than this are not of
# the same thing.
APART = 2.0
CHUNK = 500


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """A question with contradicting answers: `what` names it, `answers` says who says what."""

    what: str
    answers: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.what}: {'; '.join(self.answers)}"


def trial_conflicts(connection: sa.Connection, keys: Collection[str] | None = None) -> list[Conflict]:
    """Trials of one key that ended differently, or whose medians are more than twofold apart. `keys` of None: all."""
    statement = (
        sa.select(
            trials.c.key, trials.c.status, trials.c.median_us, trials.c.created_at, trials.c.digest,
            variants.c.name.label("variant"), devices.c.name.label("device"), workloads.c.num_seqs,
            workloads.c.total_context, kernels.c.block_size, kernels.c.block_order,
        )
        .select_from(joined(trials, ("variant", "device", "workload", "kernel")))
        .order_by(trials.c.key, by_code_point(trials.c.created_at), trials.c.digest)
    )  # fmt: skip
    found: dict[str, list[Any]] = defaultdict(list)
    for chunk in _contradicting(connection, keys):
        for row in connection.execute(statement.where(trials.c.key.in_(chunk))):
            found[row.key].append(row)
    return [_of_trials(rows) for _, rows in sorted(found.items())]


def _contradicting(connection: sa.Connection, keys: Collection[str] | None) -> Iterable[list[str]]:
    """The keys with conflicts, in chunks."""
    ok = sa.case((trials.c.status == Status.OK.value, 1), else_=0)
    statement = (
        sa.select(trials.c.key)
        .group_by(trials.c.key)
        .having(
            sa.or_(
                sa.func.min(ok) != sa.func.max(ok),
                sa.func.max(trials.c.median_us) > APART * sa.func.min(trials.c.median_us),
            )
        )
    )
    if keys is None:
        found = list(connection.execute(statement).scalars())
    else:
        ordered = sorted(keys)
        found = []
        for first in range(0, len(ordered), CHUNK):
            chunk = ordered[first : first + CHUNK]
            found += connection.execute(statement.where(trials.c.key.in_(chunk))).scalars()
    for first in range(0, len(found), CHUNK):
        yield found[first : first + CHUNK]


def _of_trials(rows: list[Any]) -> Conflict:
    one = rows[0]
    where = f"block size {one.block_size} {one.block_order} on {one.device}"
    batch = f"{one.num_seqs} sequences of {one.total_context} tokens in all"
    return Conflict(
        what=f"{one.variant} at {where}, {batch}",
        answers=tuple(map(_answer, rows)),
    )


def _answer(row: Any) -> str:
    time = "no time" if row.median_us is None else f"{row.median_us:.4g} us"
    return f"{time} ({row.status}, {row.created_at or 'no date'})"


def portfolio_conflicts(connection: sa.Connection, pairs: Collection[tuple[int, int]] | None = None) -> list[Conflict]:
    """Portfolios of one kernel on one device that choose different variants: the newest measured one counts, all stay.
    `pairs` are (kernel, device) row numbers; None: all. What a run stored on its way contradicts nothing once there is
    a newer one for the same profile."""
    statement = (
        sa.select(
            portfolios.c.kernel_id, portfolios.c.device_id, portfolios.c.profile_id, portfolios.c.rule,
            portfolios.c.created_at,
            devices.c.name.label("device"), kernels.c.block_size, kernels.c.block_order, kernels.c.target,
        )
        .select_from(joined(portfolios, ("device", "kernel")))
        .order_by(kernels.c.digest, devices.c.digest, by_code_point(portfolios.c.created_at), portfolios.c.digest)
    )  # fmt: skip
    if pairs is not None:
        statement = statement.where(portfolios.c.kernel_id.in_({kernel for kernel, _ in pairs}))
    found: dict[tuple[int, int], list[Any]] = {}
    for row in connection.execute(statement):
        if pairs is None or (row.kernel_id, row.device_id) in pairs:
            found.setdefault((row.kernel_id, row.device_id), []).append(row)
    conflicts = []
    for rows in found.values():
        newest = {row.profile_id: row for row in rows}  # they come by date
        standing = [row for row in rows if row is newest[row.profile_id] or not _is_interim(row.rule)]
        told = [(row, _choices(row.rule)) for row in standing]
        if len({choices for _, choices in told}) > 1:
            what = f"portfolios of block size {rows[0].block_size} {rows[0].block_order} on {rows[0].device}"
            answers = tuple(f"{choices} ({row.created_at})" for row, choices in told)
            conflicts.append(Conflict(what=what, answers=answers))
    return conflicts


def _is_interim(text: str) -> bool:
    try:
        return json.loads(text)["evidence"].get(INTERIM) is True
    except UNDECODABLE:
        return False


def _choices(text: str) -> str:
    try:
        return " / ".join(variant.name for variant in DispatchRule.from_dict(json.loads(text)).variants)
    except UNDECODABLE:
        return "cannot be read"
