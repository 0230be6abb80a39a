"""Coefficients of the cost model that portfolios carry: fitted by the tuner to a device's trials, used wherever that
device is predicted."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from pagegen.costs import Fit
from pagegen.costs.fitted import COST_MODEL
from pagegen.db import keys, queries
from pagegen.db.queries import UNDECODABLE, Decoder
from pagegen.db.schema import devices, kernels, portfolios, trials
from pagegen.spec import Device, Measurement, Status

if TYPE_CHECKING:
    from pagegen.db.database import Database

# Portfolios looked at: a tuning run writes one a layout, and the newest runs know most.
LOOKED_AT = 16
# Trials fitted to: reading them takes a fifth of a second, and more change no coefficient.
MOST_TRIALS = 5000

_OF_DEVICE = (
    sa.select(portfolios.c.rule, portfolios.c.created_at, portfolios.c.digest)
    .join(kernels, portfolios.c.kernel_id == kernels.c.id)
    .join(devices, portfolios.c.device_id == devices.c.id)
    .where(devices.c.identity == sa.bindparam("identity"), kernels.c.code_hash == sa.bindparam("code"))
    .order_by(portfolios.c.created_at.desc(), portfolios.c.digest)
    .limit(LOOKED_AT)
)


def recent_trials(db: Database, device: Device, code_hash: str, limit: int = MOST_TRIALS) -> list[Measurement]:
    """The newest ok trials of a device, of whatever spec, at most so many; those that cannot be read are left out."""
    statement = queries.narrowed(
        queries.TRIALS, target=device.target, device=device, code_hash=code_hash, status=Status.OK
    )
    statement = statement.order_by(None).order_by(trials.c.created_at.desc(), trials.c.digest).limit(limit)
    decoder = Decoder()
    found: dict[str, Measurement] = {}
    for store in db.stores:
        with store.reading() as connection:
            for row in connection.execute(statement):
                try:
                    found.setdefault(str(row.digest), decoder.trial(row))
                except UNDECODABLE:
                    continue
    return sorted(found.values(), key=lambda trial: trial.created_at, reverse=True)[:limit]


def newest_fit(db: Database, device: Device, code_hash: str) -> Fit | None:
    """The coefficients that the newest of a device's portfolios carries, of whatever spec; None where none does, where
    they do not beat the unfitted model on batches that they were not fitted to, or where they cannot be read."""
    found: list[Any] = []
    for store in db.stores:
        with store.reading() as connection:
            found += connection.execute(_OF_DEVICE, {"identity": keys.device_identity(device), "code": code_hash}).all()
    for row in sorted(found, key=lambda row: str(row.created_at), reverse=True):
        try:
            data = json.loads(row.rule)["evidence"].get(COST_MODEL)
            fit = None if data is None else Fit.from_dict(data)
        except UNDECODABLE:
            continue
        if fit is not None:
            return fit if fit.is_better and fit.family == device.target.family else None
    return None
