"""Stored portfolios that may answer a question: enough of each to judge it, the rest decoded when it is taken.

A portfolio's rule and profile are most of its bytes; reading all of a spec's to use one took longer than all else that
a first selection does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from pagegen.db import codec, keys
from pagegen.db.order import by_code_point
from pagegen.db.queries import UNDECODABLE, Decoder, Portfolio
from pagegen.db.schema import devices, kernels, portfolios, profiles
from pagegen.spec import AttentionSpec, CacheLayout, Device, Profile, Target

if TYPE_CHECKING:
    from pagegen.db.database import Database


@dataclass
class Lead:
    """A portfolio as far as its keys say; the rest is decoded when asked for, which raises one of UNDECODABLE for what
    is damaged."""

    row: Any = field(repr=False)
    layout: CacheLayout
    target: Target
    decoder: Decoder = field(repr=False)

    @property
    def code_hash(self) -> str:
        return str(self.row.code_hash)

    @property
    def device_name(self) -> str:
        return str(self.row.device_name)

    @property
    def device_identity(self) -> str:
        """See `keys.device_identity`."""
        return str(self.row.identity)

    @property
    def measured(self) -> bool:
        """Whether the rule rests on times that were taken."""
        return bool(self.row.kind == "measured")

    @property
    def digest(self) -> str:
        return str(self.row.digest)

    @property
    def created_at(self) -> str:
        return str(self.row.created_at)

    @property
    def spec(self) -> AttentionSpec:
        return self.decoder.once(codec.kernel_from, self.row.kernel)[0]

    @property
    def device(self) -> Device:
        return self.decoder.once(codec.device_from, self.row.device)

    @property
    def profile(self) -> Profile:
        return self.decoder.once(codec.profile_from, self.row.profile)

    @functools.cached_property
    def portfolio(self) -> Portfolio:
        """All of it, judged as one."""
        return self.decoder.portfolio(self.row)

    @property
    def place(self) -> str:
        """For people: "block size 16 NHD on NVIDIA H100"."""
        return f"block size {self.layout.block_size} {self.layout.order} on {self.device_name}"


LEADS = (
    sa.select(
        portfolios.c.id, portfolios.c.rule, portfolios.c.created_at, portfolios.c.digest, portfolios.c.kind,
        kernels.c.block_size, kernels.c.block_order, kernels.c.target, kernels.c.code_hash,
        kernels.c.data.label("kernel"), devices.c.identity, devices.c.name.label("device_name"),
        devices.c.data.label("device"), profiles.c.data.label("profile"),
    )
    .select_from(kernels)
    .join(portfolios, portfolios.c.kernel_id == kernels.c.id)
    .join(devices, portfolios.c.device_id == devices.c.id)
    .join(profiles, portfolios.c.profile_id == profiles.c.id)
    .order_by(by_code_point(portfolios.c.created_at).desc(), portfolios.c.digest)
)  # fmt: skip

OF_SPEC = LEADS.where(kernels.c.spec_digest == sa.bindparam("spec"))  # built once, as it is asked first of all


def leads(db: Database, spec: AttentionSpec) -> Iterator[Lead | str]:
    """Every portfolio of a spec, on whatever target and of whatever code, newest first; of one that is damaged, what is
    wrong with it. The order depends on the content alone."""
    yield from _found(db, OF_SPEC.params(spec=keys.spec_digest(spec)))


def similar(db: Database, limit: int) -> list[Lead]:
    """The newest portfolios of any spec, at most so many, damaged ones left out: for comparing field by field."""
    return [lead for lead in _found(db, LEADS.limit(limit)) if isinstance(lead, Lead)]


def _found(db: Database, statement: sa.Select[Any]) -> Iterator[Lead | str]:
    decoder = Decoder()
    for store in db.stores:
        with store.reading() as connection:
            rows = connection.execute(statement).all()
        for row in rows:
            try:
                yield Lead(
                    row=row,
                    layout=CacheLayout(block_size=row.block_size, order=row.block_order),
                    target=Target.parse(row.target),
                    decoder=decoder,
                )
            except UNDECODABLE as error:
                yield f"portfolio {row.id} of {store.name} cannot be read: {error}"
