"""What every run of the tuner is asked for, checked."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pagegen.spec import AttentionSpec, CacheLayout, Profile, check
from pagegen.spec.layout import USUAL_BLOCK_SIZES
from pagegen_autotune.objective import OBJECTIVES
from pagegen_autotune.search import STRATEGIES


def layouts_of(
    spec: AttentionSpec, profile: Profile, block_sizes: Sequence[int] | None, orders: Sequence[str], *,
    strategy: str, objective: str, budget_s: float | None, budget_trials: int | None,
) -> list[CacheLayout]:  # fmt: skip
    """The layouts to tune: those that are the same bytes are one. Raises TypeError and ValueError for bad arguments."""
    check.instance("spec", spec, AttentionSpec)
    check.instance("profile", profile, Profile)
    if budget_s is not None and not budget_s > 0:
        raise ValueError(f"budget_s must be positive, got {budget_s!r}")
    if budget_trials is not None:
        check.integer("budget_trials", budget_trials)
    check.one_of("strategy", strategy, STRATEGIES)
    check.one_of("objective", objective, OBJECTIVES)
    sizes = USUAL_BLOCK_SIZES if block_sizes is None else tuple(block_sizes)
    layouts = [CacheLayout(block_size=check.integer("block_sizes", b), order=o) for o in orders for b in sizes]
    if not layouts:
        raise ValueError(f"block_sizes and orders must not be empty, got {sizes} and {tuple(orders)}")
    return list(dict.fromkeys(layout.canonical(spec.num_kv_heads) for layout in layouts))


def opened(db: Any) -> AbstractContextManager[Any]:
    """The database that `db` is, or the one at the path or URL that it names (None: the default one), closed at the
    end. Raises the database's errors."""
    if db is None or isinstance(db, str):
        from pagegen.db import open_db

        return open_db(db)
    return nullcontext(db)
