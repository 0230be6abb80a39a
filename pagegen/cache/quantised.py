"""What a quantised cache holds beside its blocks."""

from __future__ import annotations

import torch

from pagegen.spec import bytes_per_element, check, dtype_name
from pagegen.spec.attention import SCALE_GRANULARITIES
from pagegen.spec.dtypes import FLOAT8_DTYPES, INT4, INTEGER_RANGES

QUANTISED = (*FLOAT8_DTYPES, *INTEGER_RANGES)


def factors(stored: torch.dtype, granularity: str, zero_points: bool) -> dict[str, float]:
    """The tensors of one number a token and head that a cache of `stored` has, and what they hold at first: as if there
    were none. Raises ValueError for a dtype that has no scales, or no zero points."""
    check.one_of("kv_scale_granularity", granularity, SCALE_GRANULARITIES)
    check.boolean("kv_zero_points", zero_points)
    if granularity != "none" and stored not in QUANTISED:
        raise ValueError(
            f"kv_scale_granularity must be none for a cache that is not quantised, got {granularity} for "
            f"{dtype_name(stored)}"
        )
    if zero_points and stored not in INTEGER_RANGES:
        raise ValueError(f"kv_zero_points must be False unless the cache is int8 or int4, got {dtype_name(stored)}")
    scales = dict.fromkeys(("k_scale", "v_scale"), 1.0) if granularity == "token_head" else {}
    return scales | (dict.fromkeys(("k_zero", "v_zero"), 0.0) if zero_points else {})


def stored_width(name: str, width: int, stored: torch.dtype) -> int:
    """Elements of the tensor that a row of `width` values takes. Raises ValueError, naming `name`, for an odd number of
    int4 values, of which two share a byte."""
    check.integer(name, width)
    if stored != INT4:
        return width
    if width % 2:
        raise ValueError(f"{name} must be even in an int4 cache, where two values share a byte, got {width}")
    return int(width * bytes_per_element(stored))
