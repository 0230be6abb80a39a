"""Every quantity that legality and time depend on, as sympy expressions over named symbols.

An expression is for one sequence; `evaluate` takes arrays with one entry a sequence. Bytes are bytes, keys are
tokens. The search prunes with these, the cost model evaluates them and `explain` prints them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import sympy
from numpy.typing import NDArray
from sympy import Eq, Ge, Le, Max, Min, Piecewise, Rational, Sum, ceiling, floor
from sympy.printing.numpy import NumPyPrinter

from pagegen.costs.binding import bind_device as bind_device
from pagegen.costs.binding import bind_spec as bind_spec
from pagegen.costs.binding import bind_variant as bind_variant
from pagegen.costs.binding import bind_workload as bind_workload


def _symbols(names: str) -> Any:
    return sympy.symbols(names, integer=True, nonnegative=True)


# workload, one sequence: `context` tokens in the cache, `queries` of this step among them
context, queries = _symbols("context queries")
# spec; `window` is larger than any context where the layer has none; the padded dims are powers of two, the split ones
# sums of two; `shared_values` is 1 where values are columns of the keys
num_q_heads, num_kv_heads, group = _symbols("num_q_heads num_kv_heads group")
head_dim, v_head_dim, padded_head_dim, padded_v_head_dim, split_head_dim, split_v_head_dim = _symbols(
    "head_dim v_head_dim padded_head_dim padded_v_head_dim split_head_dim split_v_head_dim"
)
window, causal, shared_values, batch_invariant = _symbols("window causal shared_values batch_invariant")
uses_bfloat16 = _symbols("uses_bfloat16")  # 0 or 1: q or the cache
query_element_bytes, kv_element_bytes = sympy.symbols("query_element_bytes kv_element_bytes", positive=True)
kv_token_bytes = _symbols("kv_token_bytes")  # K and V of one token, all heads, scales included
block_size = _symbols("block_size")
# variant
tile_rows, tile_kv, num_splits, num_warps, num_stages = _symbols("tile_rows tile_kv num_splits num_warps num_stages")
split_tokens, programs, splits_head = _symbols("split_tokens programs splits_head")  # the last: 0 or 1
is_fma, descriptors, tile_in_page, reduces_last = _symbols("is_fma descriptors tile_in_page reduces_last")  # 0 or 1
# device
shared_limit_bytes, warp_size, max_threads = _symbols("shared_limit_bytes warp_size max_threads")
register_limit, unit_registers = _symbols("register_limit unit_registers")  # of a thread, of a multiprocessor
# what a compiler made of a kernel
spills, taken_registers, taken_shared_bytes = _symbols("spills taken_registers taken_shared_bytes")
programs_per_unit = _symbols("programs_per_unit")
is_amd, has_wgmma, capability = _symbols("is_amd has_wgmma capability")  # 0 or 1; the last 90 for sm_90, 0 on AMD

# intermediate quantities, defined below in DEFINITIONS
pairs, mean_keys, query_tiles, tile_pairs, parts = _symbols("pairs mean_keys query_tiles tile_pairs parts")
head_columns, v_columns = _symbols("head_columns v_columns")


def _capped_sum(first: Any, last: Any, cap: Any) -> Any:
    """The sum of min(k, cap) for k in first+1 .. last, in closed form."""

    def up_to(x: Any) -> Any:
        y = Min(x, cap)
        return y * (y + 1) / 2 + (x - y) * cap

    return up_to(last) - up_to(first)


# --- what any implementation must do -------------------------------------------------------------------
# Keys that at least one query sees: all of them, or the window of the first query up to the last key.
KV_TOKENS = Min(queries, 1) * Min(context, window + queries - 1)
KV_BYTES = KV_TOKENS * kv_token_bytes
QUERY_BYTES = queries * num_q_heads * (head_dim + v_head_dim) * query_element_bytes  # q read, out written
# (query, key) pairs that the masks allow. Causal: query i of m sees min(context - m + i + 1, window) keys.
# Not causal: it sees every later key as well, min(context, window + m - 1 - i).
PAIRS = causal * _capped_sum(Max(context - queries, 0), context, window) + (1 - causal) * _capped_sum(
    window - 1, window + queries - 1, context
)
FLOPS = pairs * num_q_heads * 2 * (head_dim + v_head_dim)  # a multiply and an add for q.k, again for p.v

# --- what the layout costs ------------------------------------------------------------------------------
BLOCKS = ceiling(context / block_size)
WASTED_SLOTS = BLOCKS * block_size - context
# int32: a block-table entry a block, seq_lens and query_start_loc; int64: a slot a new token
METADATA_BYTES = 4 * BLOCKS + 8 + 8 * queries

# --- the Triton kernel ----------------------------------------------------------------------------------
# A head dim of one piece or of two, as the tiles hold it.
HEAD_COLUMNS = Piecewise((split_head_dim, splits_head > 0), (padded_head_dim, True))
V_COLUMNS = Piecewise((split_v_head_dim, splits_head > 0), (padded_v_head_dim, True))
# Parts of a sequence's keys: a fixed number, or as many as its context has of a fixed size.
PARTS = Piecewise((Max(ceiling(context / Max(split_tokens, 1)), 1), split_tokens > 0), (num_splits, True))
# Rows of a tile are (query, head of the group) pairs: a tile holds floor(tile_rows / group) queries, or a part of the
# heads of one.
QUERY_TILES = Piecewise(
    (ceiling(queries / Max(floor(tile_rows / group), 1)), Le(group, tile_rows)),
    (queries * ceiling(group / tile_rows), True),
)
PROGRAMS = query_tiles * num_kv_heads * parts
# A program runs over whole key tiles; with a causal mask a query tile stops at its own last key, pairs/queries on
# average.
MEAN_KEYS = pairs / Max(queries, 1)
TILES_PER_PROGRAM = ceiling(mean_keys / (tile_kv * parts))
EXECUTED_FLOPS = PROGRAMS * tile_rows * TILES_PER_PROGRAM * tile_kv * 2 * (head_columns + v_columns)
# Every split writes an unnormalised float32 row and its log-sum-exp, and the reduce kernel reads them again.
PARTIAL_BYTES = 2 * 4 * queries * num_q_heads * parts * (v_head_dim + 1)
# What Triton 3.7 gave the attention template: a K and a V tile a stage past the first, since the block ids are looked
# up a turn ahead and no load waits; one more pair where wgmma or tcgen05 reads tiles of 64 rows or more from shared
# memory, which then keeps p in registers; q, but on AMD, and p pass through it on their way to the matrix unit.
# AMD's compiler keeps a second pair for three stages only, and q for tiles of few rows.
TILE_PAIRS = Piecewise(
    (1 + Piecewise((1, Eq(num_stages, 3)), (0, True)), is_amd > 0),
    (Max(2, num_stages), (has_wgmma > 0) & Ge(tile_rows, 64) & Ge(num_stages, 2)),
    (Max(1, num_stages - 1), True),
)
PASSING_COLUMNS = Piecewise(
    (tile_kv, (is_amd > 0) & Ge(tile_rows, 64)),
    (head_columns + 2 * tile_kv, is_amd > 0),
    (head_columns, (has_wgmma > 0) & Ge(tile_rows, 64)),
    (head_columns + tile_kv, True),
)
TILE_BYTES = tile_kv * (head_columns + (1 - shared_values) * v_columns) * kv_element_bytes
SHARED_BYTES = tile_pairs * TILE_BYTES + tile_rows * PASSING_COLUMNS * query_element_bytes
STAGES_IN_FLIGHT = Max(1, num_stages - 1)
# A thread's share of the accumulator, of the scores with what they become, and of q at two values a register; beside
# them addresses, block ids and softmax state take 40-60 in what Triton 3.7 compiled for sm_80 and sm_90. Without a
# pipeline both tiles pass through registers, though not whole at once.
THREADS = num_warps * warp_size
REGISTERS = 40 + ceiling(
    tile_rows * (v_columns + Rational(5, 4) * tile_kv + head_columns / 2) / THREADS
    + Piecewise((Rational(3, 4) * TILE_BYTES / (4 * THREADS), Eq(num_stages, 1)), (0, True))
)
# What a warp issues in one turn of the main loop: its scores are scaled, masked and exponentiated, its accumulators
# rescaled, its share of the tiles is copied (16 bytes an instruction, with an address each) and multiplied (one
# instruction for 16 x 8 x 16). 0.67 to 1.28 of what Triton 3.7 made of 34 variants for sm_90.
SCORES_A_THREAD = tile_rows * tile_kv / THREADS
COPIES_A_THREAD = TILE_BYTES / (16 * THREADS)
PRODUCTS = tile_rows * tile_kv * (head_columns + v_columns)
MATRIX_INSTRUCTIONS = PRODUCTS / (16 * 8 * 16 * num_warps)
INSTRUCTIONS = (
    60
    + 12 * SCORES_A_THREAD
    + 2 * tile_rows * v_columns / THREADS
    + 12 * COPIES_A_THREAD
    + Piecewise(
        (Rational(3, 2) * PRODUCTS / THREADS, is_fma > 0),  # each summed over the threads that share it
        (MATRIX_INSTRUCTIONS / 16, (has_wgmma > 0) & Ge(tile_rows, 64)),
        (MATRIX_INSTRUCTIONS, True),
    )
)

# --- the C++ kernel -------------------------------------------------------------------------------------
# A sequence of at most 64 rows divides its keys; one with more divides its rows, down to 32 an item.
ROWS = queries * group
FEW_ROWS = Le(ROWS, 64)
# keys an item of the C++ kernel covers where a sequence has few rows
SPLIT = Piecewise((Max(ceiling(mean_keys / Max(num_splits, 1)), tile_kv), num_splits > 0), (split_tokens, True))
ITEMS = num_kv_heads * Piecewise(
    (Min(queries, 1) * Max(ceiling(mean_keys / SPLIT), 1), FEW_ROWS), (ceiling(ROWS / 32), True)
)
# Keys that one item reads in turn: what the last thread to finish may have left.
ITEM_KEYS = Piecewise((Min(mean_keys, SPLIT), FEW_ROWS), (mean_keys * 32 / Max(group, 1), True))
CPU_TILES = num_kv_heads * queries * ceiling(mean_keys / tile_kv)
CPU_FLOPS = CPU_TILES * tile_kv * group * 2 * (head_dim + v_head_dim)

DEFINITIONS: Mapping[Any, Any] = {
    pairs: PAIRS,
    mean_keys: MEAN_KEYS,
    query_tiles: QUERY_TILES,
    tile_pairs: TILE_PAIRS,
    parts: PARTS,
    head_columns: HEAD_COLUMNS,
    v_columns: V_COLUMNS,
}
_key = sympy.Symbol("k", integer=True, positive=True)
# What `pairs` means; the closed form above is what is evaluated.
PAIRS_AS_SUM = causal * Sum(Min(_key, window), (_key, context - queries + 1, context)) + (1 - causal) * Sum(
    Min(_key, context), (_key, window, window + queries - 1)
)
EXPRESSIONS: Mapping[str, Any] = {
    "kv_tokens": KV_TOKENS,
    "kv_bytes": KV_BYTES,
    "query_bytes": QUERY_BYTES,
    "pairs": PAIRS_AS_SUM,
    "flops": FLOPS,
    "blocks": BLOCKS,
    "wasted_slots": WASTED_SLOTS,
    "metadata_bytes": METADATA_BYTES,
}
TRITON_EXPRESSIONS: Mapping[str, Any] = {
    "mean_keys": MEAN_KEYS,
    "query_tiles": QUERY_TILES,
    "programs": PROGRAMS,
    "tiles_per_program": TILES_PER_PROGRAM,
    "executed_flops": EXECUTED_FLOPS,
    "partial_bytes": PARTIAL_BYTES,
    "tile_pairs": TILE_PAIRS,
    "shared_bytes": SHARED_BYTES,
    "registers": REGISTERS,
    "instructions": INSTRUCTIONS,
}
CPP_EXPRESSIONS: Mapping[str, Any] = {"mean_keys": MEAN_KEYS, "items": ITEMS, "executed_flops": CPU_FLOPS}


class _Printer(NumPyPrinter):  # type: ignore[misc]
    """Prints Min and Max as nested numpy.minimum/maximum, which broadcast; sympy before 1.14 prints amin, which
    does not."""

    def _nested(self, function: str, args: Any) -> str:
        text = str(self._print(args[0]))
        for arg in args[1:]:
            text = f"{function}({text}, {self._print(arg)})"
        return text

    def _print_Min(self, expr: Any) -> str:
        return self._nested("minimum", expr.args)

    def _print_Max(self, expr: Any) -> str:
        return self._nested("maximum", expr.args)

    def _print_Piecewise(self, expr: Any) -> str:
        """Nested numpy.where: numpy.select, which sympy prints, took most of a prediction's time. Every piecewise
        expression here ends with a case that always holds."""
        *cases, (last, _) = expr.args
        text = str(self._print(last))
        for value, condition in reversed(cases):
            text = f"where({self._print(condition)}, {self._print(value)}, {text})"
        return text


_LAMBDIFY = threading.Lock()  # sympy fills its tables of names at the first call, and others find them half full
# What compiled expressions may call. Naming "numpy" instead makes sympy import all that numpy loads when first asked
# for (its Fortran wrapper and more): 100 ms of the first prediction.
_NUMPY = {name: value for name, value in vars(np).items() if not name.startswith("_")}


@functools.cache
def _compiled(expression: Any) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """The expression as a numpy function with every definition written out, and its arguments' names."""
    expression = expression.xreplace({PAIRS_AS_SUM: pairs})
    while expression.free_symbols & set(DEFINITIONS):
        expression = expression.xreplace(DEFINITIONS)
    arguments = sorted(expression.free_symbols, key=lambda s: str(s.name))
    printer = _Printer({"fully_qualified_modules": False, "inline": True, "allow_unknown_functions": True})
    with _LAMBDIFY:
        function = sympy.lambdify(arguments, expression, modules=[_NUMPY], printer=printer)
    return function, tuple(str(s.name) for s in arguments)


def evaluate(expression: Any, values: Mapping[str, Any]) -> NDArray[np.float64]:
    """The value of an expression, elementwise over the arrays among `values` (one entry a sequence).

    Raises KeyError naming a symbol that `values` lacks.
    """
    function, names = _compiled(expression)
    return np.asarray(function(*(values[name] for name in names)))


def total(expression: Any, values: Mapping[str, Any]) -> float:
    """The sum of an expression over the sequences of the workload bound in `values`."""
    shape = np.shape(values["context"])
    return float(np.broadcast_to(evaluate(expression, values), shape).sum())
