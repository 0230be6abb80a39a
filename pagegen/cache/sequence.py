"""What the allocator keeps of one sequence, and how token ids are packed."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Hashable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from pagegen.cache.arrays import Ints, Packed

T = TypeVar("T")

# Ids are packed as C unsigned ints: 4 bytes a token, range-checked in C, hashed and turned into numpy as they lie.
TOKEN_CODE = "I"
TOKEN_BYTES = array(TOKEN_CODE).itemsize
_MAX_TOKEN = 2 ** (8 * TOKEN_BYTES) - 1

# Up to here plain integers are faster than arrays: an array operation takes as long as 5 to 10 of theirs.
FEW_TOKENS = 16

_MIX = 0x1E3779B97F4A7C15  # the golden ratio's digits: odd, and its multiples are spread evenly


@dataclass(slots=True, eq=False)
class SequenceState:
    """A sequence in the cache. Its numbers and its blocks are row `row` of the table; `host` are the host blocks it
    lies in while it is swapped out. `came` counts who came to the device and when, a fork with its parent: others'
    blocks it refers to from then on, and later ones are its own or its forks'."""

    seq_id: Hashable
    context: bytes
    came: int
    row: int = -1
    host: list[int] | None = None


def pack_tokens(tokens: Iterable[int], name: str = "tokens") -> array[int]:
    """Token ids as an array of C unsigned ints (one that comes is returned as it is, not copied).

    Raises TypeError for what is not integers and ValueError for an id outside 0..2^32-1.
    """
    plain = isinstance(tokens, (list, tuple, range))
    if isinstance(tokens, array) and tokens.typecode == TOKEN_CODE:
        return tokens
    # array() would take bytes for raw machine words; sets and mappings have no order that means anything
    if not plain and (
        isinstance(tokens, (str, bytes, bytearray, memoryview, Set, Mapping)) or getattr(tokens, "ndim", 1) != 1
    ):
        raise TypeError(f"{name} must be a 1-D sequence of integers, got {type(tokens).__name__}")
    try:
        values = tokens if plain else list(tokens)
        return array(TOKEN_CODE, values)
    except OverflowError:
        wrong = next((value for value in map(operator.index, values) if not 0 <= value <= _MAX_TOKEN), "another")
        raise ValueError(f"{name} must be in 0..{_MAX_TOKEN}, got {wrong}") from None
    except IndexError:
        raise ValueError(f"{name} must stay as they are while they are read, got a list that became shorter") from None
    except TypeError as error:
        raise TypeError(f"{name} must be a sequence of integers, got {type(tokens).__name__} ({error})") from None


def token_array(tokens: Iterable[int]) -> Packed:
    """Token ids as uint32, copied only where they are something else. Raises what `pack_tokens` does, and TypeError for
    an array that is not 1-D or not of integers."""
    if not isinstance(tokens, np.ndarray):
        return np.frombuffer(pack_tokens(tokens), dtype=np.uint32)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise TypeError(f"tokens must be a 1-D sequence of integers, got {tokens.dtype} {list(tokens.shape)}")
    if tokens.dtype != np.uint32:
        wrong = tokens[(tokens < 0) | (tokens > _MAX_TOKEN)]
        if wrong.size:
            raise ValueError(f"tokens must be in 0..{_MAX_TOKEN}, got {wrong[0]}")
    return np.ascontiguousarray(tokens, dtype=np.uint32)


def token_sums(positions: Ints, packed: Packed) -> Ints:
    """A number for each token and its position, to be summed over a sequence (modulo 2^64): whoever reads other tokens
    than a sequence was given, or in another order, comes to another sum."""
    sums: Ints = positions * _MIX
    sums |= 1
    sums *= packed
    return sums


def token_sum(start: int, packed: Packed) -> int:
    """The sum of `token_sums` of tokens in a row, the first at position `start`; up to multiples of 2^64."""
    if len(packed) > FEW_TOKENS:
        return int(token_sums(np.arange(start, start + len(packed)), packed).sum())
    return sum(token * (position * _MIX | 1) for position, token in enumerate(packed.tolist(), start))


def listed(name: str, values: Iterable[T]) -> list[T]:
    """`values` as a list. Raises TypeError for what cannot be gone through."""
    try:
        return list(values)
    except TypeError:
        raise TypeError(f"{name} must be a sequence, got {type(values).__name__} {values!r}") from None


def check_id(name: str, value: Hashable) -> None:
    """Raises TypeError for what cannot name a sequence: for a tensor too, whose hash tells it from others where `==`
    does not."""
    try:
        hash(value)
    except TypeError:
        raise TypeError(f"{name} must be hashable, got {type(value).__name__} {value!r}") from None
    if not isinstance(value == value, (bool, np.bool_)):
        raise TypeError(f"{name} must be hashable and compare to True or False, got {type(value).__name__} {value!r}")


def integer(name: str, value: int, at_least: int, at_most: int | None = None) -> int:
    """`value` as an int: an integer of any kind (numpy's too) within bounds. Raises TypeError or ValueError.

    `pagegen.spec.check` says the same for specs, but importing it loads torch, which the bookkeeping does without.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__} {value!r}")
    value = operator.index(value)  # numpy's integers too
    if value < at_least or (at_most is not None and value > at_most):
        allowed = f"at least {at_least}" if at_most is None else f"in {at_least}..{at_most}"
        raise ValueError(f"{name} must be {allowed}, got {value}")
    return value
