"""What a quantised cache holds beside its blocks."""

from __future__ import annotations

import torch

from pagegen.spec import check, dtype_name
from pagegen.spec.attention import SCALE_GRANULARITIES
from pagegen.spec.dtypes import FLOAT8_DTYPES, INT4, INTEGER_RANGES

QUANTISED = (*FLOAT8_DTYPES, *INTEGER_RANGES)


def factors(stored: torch.dtype, granularity: str, zero_points: bool) -> tuple[str, ...]:
    """The tensors of one number a token and head that a cache of `stored` holds. Raises ValueError for scales that bind
    to no block, and for a dtype that has no scales or no zero points."""
    check.one_of("kv_scale_granularity", granularity, SCALE_GRANULARITIES)
    check.boolean("kv_zero_points", zero_points)
    if granularity in ("tensor", "head"):
        raise ValueError(
            f"kv_scale_granularity must be none or token_head for a cache, got {granularity}: pass such scales to the "
            "operators, they bind to no block"
        )
    if granularity != "none" and stored not in QUANTISED:
        raise ValueError(
            f"kv_scale_granularity must be none for a cache that is not quantised, got {granularity} for "
            f"{dtype_name(stored)}"
        )
    if zero_points and (stored not in INTEGER_RANGES or granularity == "none"):
        raise ValueError(
            "kv_zero_points must be False unless the cache is int8 or int4 and has token_head scales, got True for "
            f"{dtype_name(stored)} and {granularity}"
        )
    names = ("k_scale", "v_scale") if granularity == "token_head" else ()
    return (*names, "k_zero", "v_zero") if zero_points else names


def stored_width(name: str, width: int, stored: torch.dtype) -> int:
    """Elements of the tensor that a row of `width` values takes. Raises ValueError, naming `name`, for an odd number of
    int4 values, of which two share a byte."""
    check.integer(name, width)
    if stored != INT4:
        return width
    if width % 2:
        raise ValueError(f"{name} must be even in an int4 cache, where two values share a byte, got {width}")
    return width // 2
