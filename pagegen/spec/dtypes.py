"""Names and sizes of the element types that queries and caches may have."""

from __future__ import annotations

from fractions import Fraction

import torch

INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]  # torch's own stubs leave it out

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "int4": INT4,
}
"""The dtypes by their plain names. Text (files, keys, the command line) uses the names, Python torch.dtype."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "float8_e4m3fn"}

QUERY_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
# The integers that a quantised cache can hold.
INTEGER_RANGES = {torch.int8: (-128, 127), INT4: (-8, 7)}


def parse_dtype(value: str | torch.dtype, argument: str = "dtype") -> torch.dtype:
    """The torch.dtype for a name such as "bfloat16" (or "bf16"); a torch.dtype is checked and returned. Raises
    ValueError, naming `argument`, for one that pagegen does not know."""
    if isinstance(value, torch.dtype):
        if value in _NAMES:
            return value
    elif isinstance(value, str):
        name = value.removeprefix("torch.")
        name = _ALIASES.get(name, name)
        if name in DTYPES:
            return DTYPES[name]
    raise ValueError(f"{argument} must be one of {', '.join(DTYPES)}, got {value!r}")


def dtype_name(dtype: torch.dtype) -> str:
    """The plain name of a dtype ("bfloat16"). Raises ValueError for one that pagegen does not know."""
    return _NAMES[parse_dtype(dtype)]


def bytes_per_element(dtype: torch.dtype) -> Fraction:
    """Bytes an element takes in a cache: a fraction, since two int4 values share a byte."""
    return Fraction(1, 2) if dtype == INT4 else Fraction(dtype.itemsize)
