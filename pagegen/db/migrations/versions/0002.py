"""Named columns for what only the JSON held, keys with the environment, and tables for compile facts and predictions.

Rows whose JSON cannot be read keep what they have: `pagegen db verify` names them, before as after.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_ENVIRONMENT = ("pagegen", "torch", "triton", "compiler", "driver", "runtime", "python", "system", "threads")
_TAGS = ("tuning_session", "tuning_purpose")
_DEVICE_FLOATS = (
    "last_level_cache_mib", "shared_memory_kib", "core_clock_mhz", "memory_clock_mhz", "power_limit_w",
)  # fmt: skip
_DEVICE_INTEGERS = ("registers_per_unit", "max_threads_per_unit")
_DEVICE_TEXTS = ("partition", "features")
_RATES = ("bandwidth_gb_s", "matrix_tflops")
_DECORATION = re.compile(r"\((?:r|tm|c)\)|\b(?:nvidia|amd|intel|corporation|inc)\b[.,]?|[\s_-]+")
_COUNTS = ("registers", "spills", "shared_bytes", "num_warps", "programs_per_unit", "binary_bytes")
# The columns of these that the steps below touch.
_DATA = {name: sa.table(name, sa.column("id"), sa.column("data")) for name in ("devices", "environments", "kernels")}
_BATCH = 10_000


def upgrade() -> None:
    """Version 1 to 2."""
    for name in _DEVICE_FLOATS:
        op.add_column("devices", sa.Column(name, sa.Float, nullable=False, server_default="0"))
    for name in _DEVICE_INTEGERS:
        op.add_column("devices", sa.Column(name, sa.Integer, nullable=False, server_default="0"))
    for name in _DEVICE_TEXTS:
        op.add_column("devices", sa.Column(name, sa.Text, nullable=False, server_default=""))
    op.add_column("environments", sa.Column("identity", sa.String(64), nullable=False, server_default=""))
    for name in _ENVIRONMENT:
        op.add_column("environments", sa.Column(name, sa.Text, nullable=False, server_default=""))
    op.add_column("kernels", sa.Column("kv_zero_points", sa.Integer, nullable=False, server_default="0"))
    op.add_column("portfolios", sa.Column("kind", sa.Text, nullable=False, server_default=""))
    _create_tables()
    connection = op.get_bind()
    _fill(connection, "devices", _device)
    _fill(connection, "environments", _environment)
    _fill(connection, "kernels", lambda data: {"kv_zero_points": int(data["spec"].get("kv_zero_points", False))})
    _fill_kinds(connection)
    _rekey(connection, 2)
    op.drop_index("trials_by_question", "trials")
    columns = ["kernel_id", "device_id", "variant_id", "workload_id", "status"]
    op.create_index("trials_by_question", "trials", columns)


def downgrade() -> None:
    """Version 2 to 1; compile facts, predictions and extras have no place there and go."""
    connection = op.get_bind()
    _fill(connection, "devices", lambda data: {"identity": _first_identity(data["device"])})
    _rekey(connection, 1)
    for name in ("extras", "predictions", "compile_facts"):
        op.drop_table(name)
    op.drop_index("trials_by_question", "trials")
    op.create_index("trials_by_question", "trials", ["kernel_id", "variant_id", "workload_id"])
    op.drop_column("portfolios", "kind")
    op.drop_column("kernels", "kv_zero_points")
    for name in (*_ENVIRONMENT, "identity"):
        op.drop_column("environments", name)
    for name in (*_DEVICE_FLOATS, *_DEVICE_INTEGERS, *_DEVICE_TEXTS):
        op.drop_column("devices", name)


def _create_tables() -> None:
    def table(name: str, *columns: Any) -> None:
        own: list[sa.Column[Any]] = [sa.Column("id", sa.Integer, primary_key=True)]
        own += [sa.Column("digest", sa.String(64), nullable=False, unique=True)]
        op.create_table(name, *own, *columns)

    def reference(kind: str) -> sa.Column[int]:
        return sa.Column(f"{kind}_id", sa.Integer, sa.ForeignKey(f"{kind}s.id"), nullable=False)

    def text(name: str) -> sa.Column[str]:
        return sa.Column(name, sa.Text, nullable=False)

    def created() -> sa.Column[str]:
        return sa.Column("created_at", sa.String(40), nullable=False)

    table(
        "compile_facts", reference("kernel"), reference("variant"), reference("environment"),
        sa.Column("form", sa.String(16), nullable=False), *[sa.Column(name, sa.BigInteger) for name in _COUNTS],
        text("loop"), created(),
    )  # fmt: skip
    op.create_index("ix_compile_facts_kernel_id", "compile_facts", ["kernel_id"])
    table(
        "predictions", reference("kernel"), reference("device"), reference("variant"), reference("workload"),
        sa.Column("predicted_us", sa.Float, nullable=False), text("model"), created(),
    )  # fmt: skip
    op.create_index("ix_predictions_kernel_id", "predictions", ["kernel_id"])
    owner = sa.Column("owner", sa.String(64), nullable=False)
    table("extras", text("record"), owner, text("field"), text("value"))
    op.create_index("ix_extras_owner", "extras", ["owner"])


def _digest(fields: dict[str, Any], version: int = 1) -> str:
    text = json.dumps({"v": version, **fields}, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _device(data: dict[str, Any]) -> dict[str, Any]:
    device = data["device"]
    fields: dict[str, Any] = {name: float(device.get(name, 0)) for name in _DEVICE_FLOATS}
    fields |= {name: int(device.get(name, 0)) for name in _DEVICE_INTEGERS}
    fields |= {"partition": device.get("partition", ""), "features": " ".join(device["features"])}
    clocks = _DEVICE_FLOATS[2:]
    identity = {k: round(v) if k in clocks else v for k, v in device.items() if k not in _RATES}
    identity |= {"name": _DECORATION.sub("", device["name"].lower()), "memory_gib": round(device["memory_gib"])}
    return {**fields, "identity": _digest({"device": identity})}


def _first_identity(device: dict[str, Any]) -> str:
    known = {k: v for k, v in device.items() if k not in _RATES}
    return _digest({"device": {**known, "memory_gib": round(device["memory_gib"])}})


def _environment(data: dict[str, Any]) -> dict[str, Any]:
    told = {k: v for k, v in data["environment"].items() if k not in _TAGS}
    return {**{name: str(told.get(name, "")) for name in _ENVIRONMENT}, "identity": _digest({"environment": told})}


def _fill(connection: sa.Connection, name: str, columns: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Sets columns of every row of a table from its JSON."""
    table = _DATA[name]
    for row in connection.execute(sa.select(table.c.id, table.c.data)).all():
        try:
            found = columns(json.loads(row.data))
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
        names: list[sa.ColumnClause[Any]] = [sa.column(column) for column in found]
        target = sa.table(name, sa.column("id"), *names)
        connection.execute(target.update().where(target.c.id == row.id).values(**found))


def _fill_kinds(connection: sa.Connection) -> None:
    table = sa.table("portfolios", sa.column("id"), sa.column("rule"), sa.column("kind"))
    for row in connection.execute(sa.select(table.c.id, table.c.rule)).all():
        try:
            kind = str(json.loads(row.rule)["evidence"].get("kind", ""))
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
        connection.execute(table.update().where(table.c.id == row.id).values(kind=kind))


def _rekey(connection: sa.Connection, version: int) -> None:
    """Writes every trial's key anew, in batches by id."""

    def table(name: str, *columns: str) -> Any:
        return sa.table(name, sa.column("id"), *[sa.column(c) for c in columns])

    kinds = ("kernel", "device", "environment", "variant", "workload")
    column = {"device": "identity", "environment": "identity"}
    parents = {k: table(f"{k}s", column.get(k, "digest")) for k in kinds if version > 1 or k != "environment"}
    trials = table("trials", "key", "regime", *[f"{k}_id" for k in kinds])
    statement = sa.select(trials.c.id, trials.c.regime)
    for kind, parent in parents.items():
        statement = statement.join(parent, trials.c[f"{kind}_id"] == parent.c.id)
        statement = statement.add_columns(parent.c[column.get(kind, "digest")].label(kind))
    last = -1
    update = trials.update().where(trials.c.id == sa.bindparam("at")).values(key=sa.bindparam("new"))
    while rows := connection.execute(
        statement.select_from(trials).where(trials.c.id > last).order_by(trials.c.id).limit(_BATCH)
    ).all():
        last = rows[-1].id
        keys = [
            {"at": row.id, "new": _digest({**{k: getattr(row, k) for k in parents}, "regime": row.regime}, version)}
            for row in rows
        ]
        connection.execute(update, keys)
