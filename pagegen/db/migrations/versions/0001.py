"""The first tables: trials and what they share, profiles, portfolios."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_INTEGERS = ("num_q_heads", "num_kv_heads", "head_dim", "v_head_dim")


def _table(name: str, *columns: Any, digest: bool = True) -> None:
    own: list[sa.Column[Any]] = [sa.Column("id", sa.Integer, primary_key=True)]
    own += [sa.Column("digest", sa.String(64), nullable=False, unique=True)] if digest else []
    op.create_table(name, *own, *columns)


def _integer(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.Integer, nullable=False)


def _float(name: str) -> sa.Column[float]:
    return sa.Column(name, sa.Float, nullable=False)


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=False)


def _string(name: str, length: int) -> sa.Column[str]:
    return sa.Column(name, sa.String(length), nullable=False)


def _reference(table: str) -> sa.Column[int]:
    return sa.Column(f"{table}_id", sa.Integer, sa.ForeignKey(f"{table}s.id"), nullable=False)


def upgrade() -> None:
    """Makes the tables in an empty database."""
    op.create_table("pagegen_schema", _integer("version"))
    _table(
        "devices", _string("identity", 64), _text("name"), _string("target", 32), _integer("units"),
        _float("memory_gib"), _float("bandwidth_gb_s"), _float("matrix_tflops"), _text("data"),
    )  # fmt: skip
    op.create_index("ix_devices_identity", "devices", ["identity"])
    _table("environments", _text("data"))
    _table(
        "kernels", _string("spec_digest", 64), *[_integer(name) for name in _INTEGERS], _string("q_dtype", 32),
        _string("kv_dtype", 32), _float("scale"), _integer("causal"), sa.Column("window", sa.Integer),
        sa.Column("logit_softcap", sa.Float), _integer("alibi"), _integer("sinks"),
        _string("kv_scale_granularity", 32), _integer("shared_kv"), sa.Column("score_mod", sa.Text),
        sa.Column("mask_mod", sa.Text), _integer("batch_invariant"), _integer("block_size"),
        _string("block_order", 8), _string("target", 32), _text("code_hash"), _text("data"),
    )  # fmt: skip
    op.create_index("kernels_by_question", "kernels", ["spec_digest", "target", "code_hash"])
    _table("variants", _string("family", 32), _text("name"), _text("data"))
    _table(
        "workloads", _integer("num_seqs"), _integer("total_q"),
        sa.Column("total_context", sa.BigInteger, nullable=False), _integer("max_query_len"),
        _integer("max_context_len"), _text("data"),
    )  # fmt: skip
    _table(
        "trials", _string("key", 64), *[_reference(t) for t in ("kernel", "device", "environment", "variant")],
        _reference("workload"), _string("regime", 32), _string("status", 32), sa.Column("median_us", sa.Float),
        _text("samples_us"), sa.Column("max_error", sa.Text), _text("detail"), _string("created_at", 40),
    )  # fmt: skip
    op.create_index("ix_trials_key", "trials", ["key"])
    op.create_index("trials_by_question", "trials", ["kernel_id", "variant_id", "workload_id"])
    _table("profiles", _text("name"), _text("source"), _text("data"))
    op.create_index("ix_profiles_name", "profiles", ["name"])
    _table(
        "portfolios", _reference("kernel"), _reference("device"), _reference("profile"), _text("rule"),
        _string("created_at", 40),
    )  # fmt: skip
    op.create_index("ix_portfolios_kernel_id", "portfolios", ["kernel_id"])


def downgrade() -> None:
    """Removes the tables, and what is in them."""
    for name in ("portfolios", "profiles", "trials", "workloads", "variants", "kernels", "environments", "devices"):
        op.drop_table(name)
    op.drop_table("pagegen_schema")
