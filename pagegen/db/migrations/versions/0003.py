"""Devices told apart by half octaves of memory, and trials' keys that follow: whole GiB split one product in two. A
table of leases: who measures what just now. They are no record, and go on the way down.

Rows whose JSON cannot be read keep what they have: `pagegen db verify` names them, before as after.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

_RATES = ("bandwidth_gb_s", "matrix_tflops")
_CLOCKS = ("core_clock_mhz", "memory_clock_mhz", "power_limit_w")
_DECORATION = re.compile(r"\((?:r|tm|c)\)|\b(?:nvidia|amd|intel|corporation|inc)\b[.,]?|[\s_-]+")
_KINDS = ("kernel", "device", "environment", "variant", "workload")
_BATCH = 10_000


def upgrade() -> None:
    """Version 2 to 3."""
    op.create_table(
        "leases",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("holder", sa.String(64), nullable=False),
        sa.Column("expires_at", sa.Float, nullable=False),
        sa.Column("what", sa.Text, nullable=False),
    )
    _identify(by_class=True)
    _rekey(3)


def downgrade() -> None:
    """Version 3 to 2."""
    op.drop_table("leases")
    _identify(by_class=False)
    _rekey(2)


def _digest(fields: dict[str, Any], version: int = 1) -> str:
    text = json.dumps({"v": version, **fields}, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _identity(device: dict[str, Any], by_class: bool) -> str:
    fields = {k: round(v) if k in _CLOCKS else v for k, v in device.items() if k not in _RATES}
    fields["name"] = _DECORATION.sub("", device["name"].lower())
    gib = fields.pop("memory_gib")
    if by_class:
        fields["memory_class"] = round(2 * math.log2(gib)) if gib > 0 else 0
    else:
        fields["memory_gib"] = round(gib)
    return _digest({"device": fields})


def _identify(*, by_class: bool) -> None:
    connection = op.get_bind()
    devices = sa.table("devices", sa.column("id"), sa.column("data"), sa.column("identity"))
    for row in connection.execute(sa.select(devices.c.id, devices.c.data)).all():
        try:
            identity = _identity(json.loads(row.data)["device"], by_class)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
        connection.execute(devices.update().where(devices.c.id == row.id).values(identity=identity))


def _rekey(version: int) -> None:
    """Writes every trial's key anew, in batches by id."""
    connection = op.get_bind()
    column = {"device": "identity", "environment": "identity"}
    parents = {kind: sa.table(f"{kind}s", sa.column("id"), sa.column(column.get(kind, "digest"))) for kind in _KINDS}
    references: list[sa.ColumnClause[Any]] = [sa.column(f"{kind}_id") for kind in _KINDS]
    trials: Any = sa.table("trials", sa.column("id"), sa.column("key"), sa.column("regime"), *references)
    source: Any = trials
    for kind, parent in parents.items():
        source = source.join(parent, trials.c[f"{kind}_id"] == parent.c.id)
    named = [parent.c[column.get(kind, "digest")].label(kind) for kind, parent in parents.items()]
    statement = sa.select(trials.c.id, trials.c.regime, *named).select_from(source).order_by(trials.c.id).limit(_BATCH)
    update = trials.update().where(trials.c.id == sa.bindparam("at")).values(key=sa.bindparam("new"))
    last = -1
    while rows := connection.execute(statement.where(trials.c.id > last)).all():
        last = rows[-1].id
        keys = [
            {"at": row.id, "new": _digest({**{k: getattr(row, k) for k in _KINDS}, "regime": row.regime}, version)}
            for row in rows
        ]
        connection.execute(update, keys)
