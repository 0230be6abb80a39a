"""What won elsewhere: the variants that portfolios of other devices chose, as first guesses for this one."""

from __future__ import annotations

import logging

from pagegen.spec import AttentionSpec, CacheLayout, Device, Variant
from pagegen_autotune.ledger import Store

log = logging.getLogger(__name__)

# Portfolios that are asked, nearest first; each holds one to four variants a class.
MOST_PORTFOLIOS = 8


def elsewhere(store: Store, spec: AttentionSpec, layout: CacheLayout, device: Device, batches: str) -> list[Variant]:
    """The variants that portfolios of the same kernel code on other devices serve a class of batches with, of the
    nearest device and layout first. Those of this device are no guesses: their trials are in the ledger."""
    from pagegen.db import Database
    from pagegen.selection.ladder import Ladder

    if not isinstance(store, Database):
        return []
    try:
        found = Ladder(spec, layout.canonical(spec.num_kv_heads), device.target, store, named=device).candidates()
    except Exception as error:  # a damaged row must not end a run that can do without guesses
        log.warning("tuning goes on without the winners of other devices: %s", error)
        return []
    near = [one for one in found if not one.same_device][:MOST_PORTFOLIOS]
    seen: dict[Variant, None] = {}
    for one in near:
        for clause in one.lead.portfolio.rule.clauses:
            if batches != "decode" and clause.max_query_len == 1:
                continue
            seen.setdefault(clause.variant)
    return list(seen)
