"""The tables of schema version 3, in SQLAlchemy Core and portable SQL; `pagegen.db.migrations` leads there from others.

A thing that many trials share (device, environment, kernel, variant, workload, profile) is stored once. `digest` is
the sha256 of its canonical, versioned JSON (`data`; see `pagegen.db.codec`) and its unique key; the named columns
repeat what people and look-ups ask for. A trial's `key` is what a tuner asks for ("was this measured here?"), its
`digest` covers everything it holds, so that recording and merging add each trial once.

What a compiler said of a kernel (`compile_facts`) and what a model expects (`predictions`) have tables of their own: a
prediction is no trial. `extras` keeps what a newer pagegen wrote into records beside what this one knows. `leases` are
no records either: who measures what just now (`pagegen.db.leases`); they are neither exported nor merged.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Float, ForeignKey, Index, Integer, MetaData, String, Table, Text
from sqlalchemy.schema import SchemaItem

from pagegen.spec.result import COMPILE_COUNTS

SCHEMA_VERSION = 3
# In the header of a SQLite file, so that a damaged one is still known as ours: "page" in ASCII.
APPLICATION_ID = 0x70616765

metadata = MetaData()


def _table(name: str, *columns: SchemaItem) -> Table:
    """A table of things that are stored once, each under its digest."""
    number = Column("id", Integer, primary_key=True)
    digest = Column("digest", String(64), nullable=False, unique=True)
    return Table(name, metadata, number, digest, *columns)


def _reference(table: str, *, index: bool = False) -> Column[int]:
    return Column(f"{table}_id", Integer, ForeignKey(f"{table}s.id"), nullable=False, index=index)


def _created_at() -> Column[str]:
    return Column("created_at", String(40), nullable=False)


def _unknown_is_zero(name: str) -> Column[float]:
    return Column(name, Float, nullable=False, server_default="0")


def _text(*names: str) -> list[Column[str]]:
    return [Column(name, Text, nullable=False, server_default="") for name in names]


# Read at every opening, and by every older pagegen, which then asks for an upgrade.
schema_info = Table("pagegen_schema", metadata, Column("version", Integer, nullable=False))
# The same version as Alembic keeps it; both change in one transaction.
revision = Table("pagegen_revision", metadata, Column("version_num", String(32), primary_key=True))

devices = _table(
    "devices",
    # digest of what makes it the same device for look-up: see `keys.device_identity`
    Column("identity", String(64), nullable=False, index=True),
    Column("name", Text, nullable=False),
    Column("target", String(32), nullable=False),
    Column("units", Integer, nullable=False),
    Column("memory_gib", Float, nullable=False),
    Column("bandwidth_gb_s", Float, nullable=False),
    Column("matrix_tflops", Float, nullable=False),
    Column("data", Text, nullable=False),
    _unknown_is_zero("last_level_cache_mib"),
    _unknown_is_zero("shared_memory_kib"),
    Column("registers_per_unit", Integer, nullable=False, server_default="0"),
    Column("max_threads_per_unit", Integer, nullable=False, server_default="0"),
    _unknown_is_zero("core_clock_mhz"),
    _unknown_is_zero("memory_clock_mhz"),
    _unknown_is_zero("power_limit_w"),
    *_text("partition", "features"),
)

# What an environment says of itself under these names has a column, the rest is in `data` only.
ENVIRONMENT_COLUMNS = ("pagegen", "torch", "triton", "compiler", "driver", "runtime", "python", "system", "threads")

environments = _table(
    "environments",
    Column("data", Text, nullable=False),
    Column("identity", String(64), nullable=False, server_default=""),  # see `keys.environment_identity`
    *_text(*ENVIRONMENT_COLUMNS),
)

kernels = _table(
    "kernels",
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
    Column("kv_zero_points", Integer, nullable=False, server_default="0"),
    Index("kernels_by_question", "spec_digest", "target", "code_hash"),
)

variants = _table(
    "variants",
    Column("family", String(32), nullable=False),
    Column("name", Text, nullable=False),
    Column("data", Text, nullable=False),
)

workloads = _table(
    "workloads",
    Column("num_seqs", Integer, nullable=False),
    Column("total_q", Integer, nullable=False),
    Column("total_context", BigInteger, nullable=False),
    Column("max_query_len", Integer, nullable=False),
    Column("max_context_len", Integer, nullable=False),
    Column("data", Text, nullable=False),
)

trials = _table(
    "trials",
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
    _created_at(),
    # choosing a block size finds its trials and counts devices in this index alone
    Index("trials_by_question", "kernel_id", "device_id", "variant_id", "workload_id", "status"),
)

compile_facts = _table(
    "compile_facts",
    _reference("kernel", index=True),
    _reference("variant"),
    _reference("environment"),
    Column("form", String(16), nullable=False),
    *[Column(name, BigInteger) for name in COMPILE_COUNTS],
    Column("loop", Text, nullable=False),  # JSON: instructions of the main loop by kind
    _created_at(),
)

predictions = _table(
    "predictions",
    _reference("kernel", index=True),
    _reference("device"),
    _reference("variant"),
    _reference("workload"),
    Column("predicted_us", Float, nullable=False),
    Column("model", Text, nullable=False),
    _created_at(),
)

extras = _table(
    "extras",
    Column("record", Text, nullable=False),  # the kind of the record that it came in
    Column("owner", String(64), nullable=False, index=True),  # digest of the row made of that record, "" for none
    Column("field", Text, nullable=False),  # "" where the whole record is of an unknown kind
    Column("value", Text, nullable=False),  # canonical JSON
)

profiles = _table(
    "profiles",
    Column("name", Text, nullable=False, index=True),
    Column("source", Text, nullable=False),
    Column("data", Text, nullable=False),
)

portfolios = _table(
    "portfolios",
    _reference("kernel", index=True),
    _reference("device"),
    _reference("profile"),
    Column("rule", Text, nullable=False),  # JSON of DispatchRule, its reason and evidence included
    _created_at(),
    *_text("kind"),  # of the rule's evidence: "measured" or "predicted"
)

leases = Table(
    "leases",
    metadata,
    Column("name", String(64), primary_key=True),  # digest of what is leased
    Column("holder", String(64), nullable=False),
    Column("expires_at", Float, nullable=False),  # seconds since 1970 by the database's clock
    Column("what", Text, nullable=False),  # for people
)


# What a mirror of a server says of itself (see `pagegen.db.mirror`). Apart: no other database has this table.
mirror = Table(
    "pagegen_mirror", MetaData(), Column("name", String(64), primary_key=True), Column("value", Text, nullable=False)
)


def parents(table: Table) -> dict[str, Table]:
    """The tables of what a row refers to, by kind ("kernel"), in the order of the columns."""
    return {
        column.name.removesuffix("_id"): key.column.table for column in table.columns for key in column.foreign_keys
    }
