"""What the allocator knows of one sequence, and how token ids are packed."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

# Ids are packed as C unsigned ints: 4 bytes a token, range-checked in C, hashed and turned into numpy as they lie.
TOKEN_CODE = "I"
TOKEN_BYTES = array(TOKEN_CODE).itemsize
MAX_TOKEN = 2 ** (8 * TOKEN_BYTES) - 1


@dataclass(slots=True, eq=False)
class SequenceState:
    """One sequence. `blocks[i]` holds tokens i*block_size onward; the first `computed` tokens have their keys and
    values in the cache (or will have once the batch that took them has run); the first `indexed` blocks were offered
    to the prefix index."""

    tokens: array[int]
    context: bytes
    blocks: array[int] = field(default_factory=lambda: array("i"))
    computed: int = 0
    indexed: int = 0


def pack_tokens(tokens: Iterable[int]) -> array[int]:
    """Token ids as an array of C unsigned ints (one that comes is returned as it is, not copied).

    Raises TypeError for what is not integers and ValueError for an id outside 0..MAX_TOKEN.
    """
    if isinstance(tokens, array) and tokens.typecode == TOKEN_CODE:
        return tokens
    if isinstance(tokens, (str, bytes, bytearray, memoryview)):  # array() would take bytes for raw machine words
        raise TypeError(f"tokens must be a sequence of integers, got {type(tokens).__name__}")
    try:
        values = tokens if isinstance(tokens, (list, tuple, range)) else list(tokens)
        return array(TOKEN_CODE, values)
    except OverflowError:
        wrong = next(value for value in values if not 0 <= value <= MAX_TOKEN)
        raise ValueError(f"tokens must be in 0..{MAX_TOKEN}, got {wrong}") from None
    except TypeError as error:
        raise TypeError(f"tokens must be a sequence of integers, got {type(tokens).__name__} ({error})") from None


def integer(name: str, value: int, at_least: int, at_most: int | None = None) -> int:
    """`value`, which must be an integer within bounds. Raises TypeError or ValueError.

    `pagegen.spec.check` says the same for specs, but importing it loads torch, which the bookkeeping does without.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__} {value!r}")
    if value < at_least or (at_most is not None and value > at_most):
        allowed = f"at least {at_least}" if at_most is None else f"in {at_least}..{at_most}"
        raise ValueError(f"{name} must be {allowed}, got {value}")
    return value
