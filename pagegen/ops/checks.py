"""What the operators accept: every check names the argument, what was expected and what came.

Checks of values on the device (block ids, lengths) cost a synchronisation: `validate_batch` does them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from pagegen.ops import memory
from pagegen.reference import value_width
from pagegen.spec.dtypes import FLOAT8_DTYPES, INT4, INTEGER_RANGES, QUERY_DTYPES, parse_dtype

FLOATS = QUERY_DTYPES
EIGHT_BIT = (*FLOAT8_DTYPES, torch.int8)
BYTES = (torch.int8, torch.uint8)
SCALES = ("k_scale", "v_scale", "k_zero", "v_zero")
STORED = (*FLOATS, *EIGHT_BIT, torch.uint8)  # uint8: float8, int8 or packed int4 by `kv_dtype`


def describe(value: Any) -> str:
    """A tensor as dtype and shape; anything else as its repr."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"{type(value).__name__} {value!r}"


def tensor(name: str, value: Any, shape: str, dtypes: tuple[torch.dtype, ...], device: torch.device | None) -> None:
    """`value` must be a tensor of one of `dtypes`, of as many dimensions as `shape` names, unit last stride,
    on `device`. Raises TypeError or ValueError."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor {shape}, got {describe(value)}")
    rank = len(shape.split(","))
    if value.dim() != rank or value.dtype not in dtypes:
        kinds = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ValueError(f"{name} must be {kinds} {shape}, got {describe(value)}")
    if rank and value.shape[-1] > 1 and value.stride(-1) != 1:
        raise ValueError(f"{name} must have a last stride of 1, got strides {value.stride()}")
    if device is not None and value.device != device:
        raise ValueError(f"{name} must be on {device}, got {value.device}")


def sizes(name: str, value: Tensor, expected: tuple[int | None, ...], shape: str) -> None:
    """`value` must have the `expected` sizes (None: any)."""
    if any(want is not None and want != got for want, got in zip(expected, value.shape, strict=True)):
        wanted = ", ".join("any" if e is None else str(e) for e in expected)
        raise ValueError(f"{name} must be {shape} = [{wanted}], got {describe(value)}")


def own_memory(name: str, value: Tensor) -> None:
    """No two elements of `value`, which is written, may share memory."""
    if _overlaps(tuple(value.shape), value.stride()):
        raise ValueError(
            f"{name} must have memory of its own for every element, got strides {value.stride()} "
            f"for {describe(value)}, which overlap"
        )


@functools.lru_cache(maxsize=256)
def _overlaps(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements share memory, for views that slicing and permuting a dense tensor can make."""
    last = 0
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride <= last:
            return 0 not in shape
        last += (size - 1) * stride
    return False


def output(out: Tensor, q: Tensor, width: int, k_cache: Tensor, v_cache: Tensor | None) -> None:
    """The tensor that a call's result of `width` columns a head is to be written to: nothing that is read lies in it.
    Of the operands only the large ones are looked at."""
    shape = "[total_q, num_q_heads, v_head_dim]"
    tensor("out", out, shape, (q.dtype,), q.device)
    sizes("out", out, (*q.shape[:2], width), shape)
    own_memory("out", out)
    for name, read in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if read is not None and memory.ranges_meet(out, read):
            if out.stride() == read.stride() and not memory.share_elements(out, read):
                continue  # q and out side by side in one buffer
            raise ValueError(f"out must have memory of its own, got memory between the first and last byte of {name}")


def caches(k_cache: Tensor, v_cache: Tensor | None, dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    """The cache pair: [num_blocks, block_size, Hkv, D] with a block size of at least 1."""
    shape = "[num_blocks, block_size, num_kv_heads, head_dim]"
    tensor("k_cache", k_cache, shape, dtypes, device)
    if k_cache.shape[1] < 1:
        raise ValueError(f"k_cache must have a block size of at least 1, got {describe(k_cache)}")
    if v_cache is not None:
        tensor("v_cache", v_cache, shape, (k_cache.dtype,), device)
        sizes("v_cache", v_cache, (*k_cache.shape[:3], None), shape)


def tables(block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor | None, device: torch.device | None) -> None:
    """What says where the tokens and the queries of each sequence are."""
    tensor("seq_lens", seq_lens, "[num_seqs]", (torch.int32,), device)
    num_seqs = seq_lens.shape[0]
    tensor("block_table", block_table, "[num_seqs, max_blocks]", (torch.int32,), device)
    sizes("block_table", block_table, (num_seqs, None), "[num_seqs, max_blocks]")
    if query_start_loc is not None:
        tensor("query_start_loc", query_start_loc, "[num_seqs + 1]", (torch.int32,), device)
        sizes("query_start_loc", query_start_loc, (num_seqs + 1,), "[num_seqs + 1]")


# What an operator's schema calls a type -> what it takes and how errors call that.
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "Tensor": ((Tensor,), "a tensor"),
    "int": ((int, torch.SymInt), "an integer"),
    "float": ((int, float, torch.SymInt, torch.SymFloat), "a number"),
    "bool": ((bool,), "True or False"),
    "str": ((str,), "a string"),
}


def operand_types(schema: torch.FunctionSchema, operands: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Raises TypeError naming the first argument of an operator whose type is not that of its schema."""
    given = {**{argument.name: value for argument, value in zip(schema.arguments, operands, strict=False)}, **options}
    for argument in schema.arguments:
        declared = str(argument.type)
        optional = declared.startswith("Optional[")
        kind = declared.removeprefix("Optional[").removesuffix("]") if optional else declared
        value = given.get(argument.name)
        if kind not in _KINDS or argument.name not in given or (optional and value is None):
            continue
        kinds, called = _KINDS[kind]
        if not isinstance(value, kinds):
            raise TypeError(f"{argument.name} must be {called}{' or None' if optional else ''}, got {describe(value)}")


def held(name: str, cache: Tensor, kv_dtype: str | None) -> torch.dtype:
    """What a cache holds: `kv_dtype`, or its own dtype where none is named."""
    if kv_dtype is None:
        if cache.dtype == torch.uint8:
            raise ValueError(f"kv_dtype must say what a uint8 {name} holds, got None")
        return cache.dtype
    meant = parse_dtype(kv_dtype, "kv_dtype")
    if not _can_hold(cache.dtype, meant):
        raise ValueError(f"kv_dtype must be a dtype that {name} can hold, got {kv_dtype} for {describe(cache)}")
    return meant


def _can_hold(stored: torch.dtype, meant: torch.dtype) -> bool:
    """Whether a tensor of dtype `stored` can be storage for values of dtype `meant`."""
    return stored == meant or (stored == torch.uint8 and meant in EIGHT_BIT) or (stored in BYTES and meant == INT4)


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None,
    max_query_len: int | None,
    max_seq_len: int | None,
    window: int | None,
    logit_softcap: float | None,
    kv_dtype: str | None,
    v_head_dim: int | None,
) -> None:
    """The operands that every attention call has."""
    tensor("q", q, "[total_q, num_q_heads, head_dim]", FLOATS, None)
    device = q.device
    caches(k_cache, v_cache, STORED, device)
    packed = held("k_cache", k_cache, kv_dtype) == INT4
    if packed and (q.shape[2] % 2 or (v_cache is None and (v_head_dim or 0) % 2)):
        raise ValueError(
            f"q must have an even head_dim, and v_head_dim be even, for an int4 cache (two values a byte), "
            f"got {q.shape[2]} and {v_head_dim}"
        )
    width = q.shape[2] // 2 if packed else q.shape[2]
    if k_cache.shape[3] != width:
        raise ValueError(f"k_cache must have head_dim {width} like q, got {describe(k_cache)} for q {describe(q)}")
    if k_cache.shape[2] < 1 or q.shape[1] % k_cache.shape[2]:
        raise ValueError(f"q must have a multiple of num_kv_heads {k_cache.shape[2]} heads, got {q.shape[1]}")
    if v_cache is None and (v_head_dim is None or not 1 <= v_head_dim <= q.shape[2]):
        raise ValueError(f"v_head_dim must be in 1..{q.shape[2]} when v_cache is None, got {v_head_dim}")
    columns = value_width(v_cache, v_head_dim, kv_dtype)
    if v_head_dim is not None and v_head_dim != columns:
        raise ValueError(f"v_head_dim must be {columns} like v_cache, got {v_head_dim}")
    tables(block_table, seq_lens, query_start_loc, device)
    num_seqs = seq_lens.shape[0]
    if query_start_loc is None and (q.shape[0] != num_seqs or (max_query_len or 1) != 1):
        raise ValueError(
            f"query_start_loc is required unless every sequence has one query, got None for {q.shape[0]} queries, "
            f"{num_seqs} sequences and max_query_len {max_query_len}"
        )
    for name, value in (("max_query_len", max_query_len), ("max_seq_len", max_seq_len)):
        if value is not None and value < 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 (keys, the query's own included), got {window}")
    if logit_softcap is not None and not 0 < logit_softcap < float("inf"):
        raise ValueError(f"logit_softcap must be positive and finite, got {logit_softcap}")


def per_head(name: str, value: Tensor | None, num_q_heads: int, device: torch.device) -> None:
    """An optional float vector with one entry a query head."""
    if value is not None:
        tensor(name, value, "[num_q_heads]", FLOATS, device)
        sizes(name, value, (num_q_heads,), "[num_q_heads]")


def scales(k_cache: Tensor, v_cache: Tensor | None, kv_dtype: str | None, given: dict[str, Any]) -> None:
    """The scales and zero points among the arguments `given` by name."""
    for name in SCALES:
        if given.get(name) is not None:
            scale(name, given[name], k_cache, v_cache, kv_dtype)


def scale(name: str, value: Tensor, k_cache: Tensor, v_cache: Tensor | None, kv_dtype: str | None) -> None:
    """A cache's scale or, of an integer cache, zero point: one number, one a KV head, or one a token and head."""
    num_blocks, block_size, num_kv_heads, _ = k_cache.shape
    shapes = [(), (1,), (num_kv_heads,), (num_blocks, block_size, num_kv_heads)]
    if not isinstance(value, Tensor) or tuple(value.shape) not in shapes or not value.dtype.is_floating_point:
        raise ValueError(
            f"{name} must be a float, floats [{num_kv_heads}] or float32 [{num_blocks}, {block_size}, {num_kv_heads}], "
            f"got {describe(value)}"
        )
    if value.dim() == 3 and value.dtype != torch.float32:  # a conversion would copy one value a token and head
        raise ValueError(f"{name} must be float32 where it is one a token and head, got {describe(value)}")
    if value.device != k_cache.device:
        raise ValueError(f"{name} must be on {k_cache.device}, got {value.device}")
    if v_cache is None and name.startswith("v_"):
        raise ValueError(f"{name} must be None where v_cache is None (V is part of K), got {describe(value)}")
    if name.endswith("_zero") and held("k_cache", k_cache, kv_dtype) not in INTEGER_RANGES:
        raise ValueError(f"{name} must be None unless the cache holds int8 or int4, got {describe(value)}")


def tree_mask(value: Tensor | None, q: Tensor, max_query_len: int | None, *, ragged: bool) -> None:
    """An optional bool mask over this step's own tokens, as wide as the host knows the longest query to be."""
    if value is None:
        return
    tensor("tree_mask", value, "[total_q, max_query_len]", (torch.bool,), q.device)
    sizes("tree_mask", value, (q.shape[0], None), "[total_q, max_query_len]")
    least = (max_query_len or 0) if ragged else min(1, q.shape[0])
    if value.shape[1] < least:
        raise ValueError(f"tree_mask must have at least {least} columns (max_query_len), got {describe(value)}")


def slots(slot_mapping: Tensor, k_cache: Tensor) -> None:
    """Slots inside the cache or -1, each named once. Reads the device."""
    num_slots = k_cache.shape[0] * k_cache.shape[1]
    named = [slot for slot in slot_mapping.tolist() if slot != -1]
    for slot in named:
        if not 0 <= slot < num_slots:
            raise ValueError(f"slot_mapping must hold -1 or 0..{num_slots - 1}, got {slot}")
    if len(set(named)) != len(named):
        raise ValueError("slot_mapping must name each slot once, got a repeated slot")


def validate_batch(
    k_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    query_start_loc: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    total_q: int | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    tree_mask: Tensor | None = None,
) -> None:
    """Checks values on the device, at the cost of a synchronisation: block ids within the cache for every used
    block-table entry, lengths within the table, query ranges that rise and fit, slots inside the cache and
    written once, bounds that bound, and a tree mask as wide as the longest query. Raises ValueError naming the
    sequence and the value."""
    tables(block_table, seq_lens, query_start_loc, None)
    if slot_mapping is not None:
        tensor("slot_mapping", slot_mapping, "[num_tokens]", (torch.int64,), None)
    num_blocks, block_size = k_cache.shape[:2]
    lengths = seq_lens.tolist()
    starts = list(range(len(lengths) + 1)) if query_start_loc is None else query_start_loc.tolist()
    if starts[0] != 0 or (total_q is not None and starts[-1] > total_q):
        raise ValueError(f"query_start_loc must start at 0 and end at most at {total_q} queries, got {starts}")
    table = block_table.cpu()
    for s, length in enumerate(lengths):
        queries = starts[s + 1] - starts[s]
        if not 0 <= length <= table.shape[1] * block_size:
            raise ValueError(f"seq_lens[{s}] must be in 0..{table.shape[1] * block_size}, got {length}")
        if queries < 0 or (query_start_loc is not None and queries > length):
            raise ValueError(f"query_start_loc[{s}] must give 0..{length} queries to sequence {s}, got {queries}")
        if max_query_len is not None and queries > max_query_len:
            raise ValueError(f"max_query_len must be at least {queries} (sequence {s}), got {max_query_len}")
        if tree_mask is not None and queries > tree_mask.shape[1]:
            raise ValueError(f"tree_mask must have {queries} columns (sequence {s}), got {tree_mask.shape[1]}")
        if max_seq_len is not None and length > max_seq_len:
            raise ValueError(f"max_seq_len must be at least {length} (sequence {s}), got {max_seq_len}")
        for i, block in enumerate(table[s, : -(-length // block_size)].tolist()):
            if not 0 <= block < num_blocks:
                raise ValueError(f"block_table[{s}, {i}] must be in 0..{num_blocks - 1}, got {block}")
    if slot_mapping is not None:
        slots(slot_mapping, k_cache)
