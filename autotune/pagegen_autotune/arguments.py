"""What every run of the tuner is asked for, checked."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from pagegen.spec import AttentionSpec, CacheLayout, Profile, check
from pagegen.spec.layout import USUAL_BLOCK_SIZES
from pagegen_autotune.objective import OBJECTIVES
from pagegen_autotune.search import STRATEGIES

MAX_SEED = 2**63 - 1  # what a torch.Generator takes


def layouts_of(
    spec: AttentionSpec, profile: Profile, block_sizes: Sequence[int] | None, orders: Sequence[str], *,
    strategy: str, objective: str, budget_s: float | None, budget_trials: int | None, seed: int,
) -> list[CacheLayout]:  # fmt: skip
    """The layouts to tune: those that are the same bytes are one. Raises TypeError and ValueError for bad arguments."""
    check.instance("spec", spec, AttentionSpec)
    check.instance("profile", profile, Profile)
    check.integer("seed", seed, at_least=0, at_most=MAX_SEED)
    if isinstance(budget_s, bool) or not isinstance(budget_s, (numbers.Real, type(None))):
        raise TypeError(f"budget_s must be seconds or None, got {type(budget_s).__name__} {budget_s!r}")
    if budget_s is not None and not budget_s > 0:
        raise ValueError(f"budget_s must be positive, got {budget_s!r}")
    if budget_trials is not None:
        check.integer("budget_trials", budget_trials)
    check.one_of("strategy", strategy, STRATEGIES)
    check.one_of("objective", objective, OBJECTIVES)
    sizes = USUAL_BLOCK_SIZES if block_sizes is None else check.integers("block_sizes", block_sizes)
    named = check.instances("orders", orders, str)
    layouts = [CacheLayout(block_size=size, order=order) for order in named for size in sizes]
    if not layouts:
        raise ValueError(f"block_sizes and orders must not be empty, got {sizes} and {named}")
    return list(dict.fromkeys(layout.canonical(spec.num_kv_heads) for layout in layouts))


def opened(db: Any) -> AbstractContextManager[Any]:
    """The database that `db` is, or the one at the path or URL that it names (None: the default one), closed at the
    end. Raises the database's errors."""
    if db is None or isinstance(db, (str, Path)):
        from pagegen.db import open_db

        return open_db(db)
    if not hasattr(db, "save_portfolio"):
        raise TypeError(f"db must be a Database, a path, a URL or None, got {type(db).__name__} {db!r}")
    return nullcontext(db)
