"""The tables, in SQLAlchemy Core and portable SQL.

A thing that many trials share (device, environment, kernel, variant, workload, profile) is stored once. `digest` is
the sha256 of its canonical, versioned JSON (`data`; see `pagegen.db.codec`) and its unique key; the named columns
repeat what people and look-ups ask for. A trial's `key` is what a tuner asks for ("was this measured here?"), its
`digest` covers everything it holds, so that recording and merging add each trial once.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Float, ForeignKey, Index, Integer, MetaData, String, Table, Text

SCHEMA_VERSION = 1

metadata = MetaData()


def _digest() -> Column[str]:
    return Column("digest", String(64), nullable=False, unique=True)


def _reference(table: str, *, index: bool = False) -> Column[int]:
    return Column(f"{table}_id", Integer, ForeignKey(f"{table}s.id"), nullable=False, index=index)


schema_info = Table("pagegen_schema", metadata, Column("version", Integer, nullable=False))

devices = Table(
    "devices",
    metadata,
    Column("id", Integer, primary_key=True),
    _digest(),
    # digest of what makes it the same device for look-up: everything but the rates, which are measured or nominal
    Column("identity", String(64), nullable=False, index=True),
    Column("name", Text, nullable=False),
    Column("target", String(32), nullable=False),
    Column("units", Integer, nullable=False),
    Column("memory_gib", Float, nullable=False),
    Column("bandwidth_gb_s", Float, nullable=False),
    Column("matrix_tflops", Float, nullable=False),
    Column("data", Text, nullable=False),
)

environments = Table(
    "environments",
    metadata,
    Column("id", Integer, primary_key=True),
    _digest(),
    Column("data", Text, nullable=False),
)

kernels = Table(
    "kernels",
    metadata,
    Column("id", Integer, primary_key=True),
    _digest(),
    Column("spec_digest", String(64), nullable=False),
    Column("num_q_heads", Integer, nullable=False),
    Column("num_kv_heads", Integer, nullable=False),
    Column("head_dim", Integer, nullable=False),
    Column("v_head_dim", Integer, nullable=False),
    Column("q_dtype", String(32), nullable=False),
    Column("kv_dtype", String(32), nullable=False),
    Column("scale", Float, nullable=False),
    Column("causal", Integer, nullable=False),
    Column("window", Integer),
    Column("logit_softcap", Float),
    Column("alibi", Integer, nullable=False),
    Column("sinks", Integer, nullable=False),
    Column("kv_scale_granularity", String(32), nullable=False),
    Column("shared_kv", Integer, nullable=False),
    Column("score_mod", Text),
    Column("mask_mod", Text),
    Column("batch_invariant", Integer, nullable=False),
    Column("block_size", Integer, nullable=False),
    Column("block_order", String(8), nullable=False),
    Column("target", String(32), nullable=False),
    Column("code_hash", Text, nullable=False),
    Column("data", Text, nullable=False),
    Index("kernels_by_question", "spec_digest", "target", "code_hash"),
)

variants = Table(
    "variants",
    metadata,
    Column("id", Integer, primary_key=True),
    _digest(),
    Column("family", String(32), nullable=False),
    Column("name", Text, nullable=False),
    Column("data", Text, nullable=False),
)

workloads = Table(
    "workloads",
    metadata,
    Column("id", Integer, primary_key=True),
    _digest(),
    Column("num_seqs", Integer, nullable=False),
    Column("total_q", Integer, nullable=False),
    Column("total_context", BigInteger, nullable=False),
    Column("max_query_len", Integer, nullable=False),
    Column("max_context_len", Integer, nullable=False),
    Column("data", Text, nullable=False),
)

trials = Table(
    "trials",
    metadata,
    Column("id", Integer, primary_key=True),
    _digest(),
    Column("key", String(64), nullable=False, index=True),
    _reference("kernel"),
    _reference("device"),
    _reference("environment"),
    _reference("variant"),
    _reference("workload"),
    Column("regime", String(32), nullable=False),
    Column("status", String(32), nullable=False),
    Column("median_us", Float),
    Column("samples_us", Text, nullable=False),  # JSON list, every run in order
    Column("max_error", Text),  # a number as Python writes it: SQLite has no NaN, and a wrong result may be NaN
    Column("detail", Text, nullable=False),
    Column("created_at", String(40), nullable=False),
    Index("trials_by_question", "kernel_id", "variant_id", "workload_id"),
)

profiles = Table(
    "profiles",
    metadata,
    Column("id", Integer, primary_key=True),
    _digest(),
    Column("name", Text, nullable=False, index=True),
    Column("source", Text, nullable=False),
    Column("data", Text, nullable=False),
)

portfolios = Table(
    "portfolios",
    metadata,
    Column("id", Integer, primary_key=True),
    _digest(),
    _reference("kernel", index=True),
    _reference("device"),
    _reference("profile"),
    Column("rule", Text, nullable=False),  # JSON of DispatchRule, its reason and evidence included
    Column("created_at", String(40), nullable=False),
)
