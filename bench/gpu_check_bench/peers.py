"""What pagegen is measured beside: each peer over the same numbers, in its own layout where it needs one.

A peer that does not import is listed as absent, with the reason; one that does not take a cell is listed as such.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

import pagegen
from gpu_check_bench.operands import Cell, Operands
from gpu_check_bench.timing import Call
from pagegen.spec import check
from pagegen.spec.dtypes import FLOAT8_DTYPES

USUAL_BLOCK = 16
FLASH_BLOCK = 256  # what flash-attn 2 wants a page to be a multiple of
FLASH3_BLOCK = 128  # flash-attn 3 takes any, but TMA wants whole tiles
FLEX_BLOCK = 128  # FlexAttention's own block of a mask
WORKSPACE_BYTES = 128 << 20


class Unsupported(Exception):
    """The peer does not take this cell, and why."""


@dataclass(frozen=True)
class Prepared:
    """The calls of one sample, and what gives the result of the first set, [batch, Hq, D]."""

    calls: list[Call]
    result: Callable[[], Tensor]
    note: str = ""


class Peer(Protocol):
    """`few`: it compiles for every shape, and is measured on one cell only, after all others."""

    @property
    def name(self) -> str: ...

    @property
    def few(self) -> bool: ...

    def version(self) -> str:
        """Raises ImportError where it is not here."""
        ...

    def block_size(self, cell: Cell) -> int: ...

    def prepare(self, given: Operands) -> Prepared: ...


@dataclass(frozen=True)
class Pagegen:
    """The operator as a model calls it, with what the tuner left in the database."""

    size: int
    few: bool = False

    @property
    def name(self) -> str:
        return f"pagegen, blocks of {self.size}"

    def version(self) -> str:
        return pagegen.__version__

    def block_size(self, cell: Cell) -> int:
        return self.size

    def prepare(self, given: Operands) -> Prepared:
        spec = given.cell.spec

        def call(i: int) -> Tensor:
            k, v = given.caches[i]
            result = pagegen.paged_attention(
                given.q, k, v, given.block_table, given.seq_lens, max_seq_len=given.cell.context, scale=spec.scale,
                window=spec.window, out=given.out,
            )  # fmt: skip
            assert isinstance(result, Tensor)
            return result

        return Prepared([_bound(call, i) for i in given.turns], lambda: call(0))


@dataclass(frozen=True)
class FixedSplits:
    """See `fixed_splits`."""

    name: str = "Triton, one variant, 8 splits"
    few: bool = False

    def version(self) -> str:
        if not torch.cuda.is_available():
            raise ImportError("Triton kernels run on a GPU")
        return f"triton {importlib.metadata.version('triton')}"

    def block_size(self, cell: Cell) -> int:
        return USUAL_BLOCK

    def prepare(self, given: Operands) -> Prepared:
        from gpu_check_bench import fixed_splits

        spec = given.cell.spec
        if spec.group > fixed_splits.TILE_HEADS or spec.head_dim & (spec.head_dim - 1):
            raise Unsupported("its one variant holds 16 heads a group and head dims that are powers of two")
        space, out = fixed_splits.workspace(given.q), torch.empty_like(given.out)

        def call(i: int) -> Tensor:
            k, v = given.caches[i]
            fixed_splits.decode(
                given.q, k, v, given.block_table, given.seq_lens, out, space, scale=spec.scale, window=spec.window or 0
            )
            return out

        return Prepared([_bound(call, i) for i in given.turns], lambda: call(0))


@dataclass(frozen=True)
class FlashInfer:
    """BatchDecodeWithPagedKVCacheWrapper over the same blocks. It plans on the host from the lengths, once here."""

    name: str = "FlashInfer"
    few: bool = False

    def version(self) -> str:
        return str(importlib.import_module("flashinfer").__version__)

    def block_size(self, cell: Cell) -> int:
        return USUAL_BLOCK

    def prepare(self, given: Operands) -> Prepared:
        flashinfer: Any = importlib.import_module("flashinfer")
        cell, spec = given.cell, given.cell.spec
        blocks = given.block_table.shape[1]
        on = given.q.device
        indptr = torch.arange(0, cell.batch * blocks + 1, blocks, dtype=torch.int32, device=on)
        last = torch.full((cell.batch,), (cell.context - 1) % given.block_size + 1, dtype=torch.int32, device=on)
        space = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=on)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=spec.group >= 4)
        wrapper.plan(
            indptr, given.block_table.flatten(), last, spec.num_q_heads, spec.num_kv_heads, spec.head_dim,
            given.block_size, window_left=-1 if spec.window is None else spec.window - 1, q_data_type=spec.q_dtype,
            kv_data_type=spec.kv_dtype, sm_scale=spec.scale,
        )  # fmt: skip

        def call(i: int) -> Tensor:
            result: Tensor = wrapper.run(given.q, given.caches[i])
            return result

        return Prepared([_bound(call, i) for i in given.turns], lambda: call(0), "planned once")


@dataclass(frozen=True)
class FlashAttention2:
    """flash_attn_with_kvcache, in blocks of 256."""

    name: str = "flash-attn 2"
    few: bool = False

    def version(self) -> str:
        return str(importlib.import_module("flash_attn").__version__)

    def block_size(self, cell: Cell) -> int:
        return FLASH_BLOCK

    def prepare(self, given: Operands) -> Prepared:
        return _flash(importlib.import_module("flash_attn"), "block_table", given)


@dataclass(frozen=True)
class FlashAttention3:
    """The Hopper kernels."""

    name: str = "flash-attn 3"
    few: bool = False

    def version(self) -> str:
        importlib.import_module("flash_attn_interface")
        try:
            return importlib.metadata.version("flash_attn_3")
        except importlib.metadata.PackageNotFoundError:
            return "release not known"

    def block_size(self, cell: Cell) -> int:
        return FLASH3_BLOCK

    def prepare(self, given: Operands) -> Prepared:
        return _flash(importlib.import_module("flash_attn_interface"), "page_table", given)


def _flash(module: Any, table: str, given: Operands) -> Prepared:
    spec = given.cell.spec
    if spec.kv_dtype != spec.q_dtype:
        raise Unsupported("keys and values must have the queries' dtype")
    window = (-1, -1) if spec.window is None else (spec.window - 1, 0)
    options = {
        "cache_seqlens": given.seq_lens, table: given.block_table, "softmax_scale": spec.scale, "causal": True,
        "window_size": window,
    }  # fmt: skip

    def call(i: int) -> Tensor:
        k, v = given.caches[i]
        result: Tensor = module.flash_attn_with_kvcache(given.q[:, None], k, v, **options)
        return result.squeeze(1)

    return Prepared([_bound(call, i) for i in given.turns], lambda: call(0))


@dataclass(frozen=True)
class GatherSdpa:
    """The blocks gathered into one tensor, then torch's own attention: what is done without a paged kernel. The query
    heads of a group are rows of one matrix."""

    name: str = "gather, then SDPA"
    few: bool = False

    def version(self) -> str:
        return f"torch {torch.__version__}"

    def block_size(self, cell: Cell) -> int:
        return USUAL_BLOCK

    def prepare(self, given: Operands) -> Prepared:
        cell, spec = given.cell, given.cell.spec
        if spec.window is not None and spec.window < cell.context:
            raise Unsupported("a window would be a mask")
        table = given.block_table.long()
        rows = given.q.view(cell.batch, spec.num_kv_heads, spec.group, spec.head_dim)

        def dense(cache: Tensor) -> Tensor:
            if spec.kv_dtype in FLOAT8_DTYPES:  # few operations know one-byte floats
                found = cache.view(torch.uint8)[table].view(spec.kv_dtype).to(spec.q_dtype)
            else:
                found = cache[table]
            whole = found.view(cell.batch, -1, spec.num_kv_heads, spec.head_dim)
            return whole[:, : cell.context].transpose(1, 2)

        def call(i: int) -> Tensor:
            k, v = given.caches[i]
            attend = torch.nn.functional.scaled_dot_product_attention
            return attend(rows, dense(k), dense(v), scale=spec.scale).reshape(given.q.shape)

        return Prepared([_bound(call, i) for i in given.turns], lambda: call(0))


@dataclass(frozen=True)
class FlexPaged:
    """FlexAttention over torch's paged cache, compiled for the shape, in pages of its own mask blocks. It has one page
    table and one copy of the cache: a small cell finds it in the last-level cache, which favours it."""

    backend: str
    name: str = "FlexAttention, paged"
    few: bool = True

    def version(self) -> str:
        importlib.import_module("torch.nn.attention.experimental._paged_attention")
        return f"torch {torch.__version__}"

    def block_size(self, cell: Cell) -> int:
        return FLEX_BLOCK

    def prepare(self, given: Operands) -> Prepared:
        from torch.nn.attention.experimental._paged_attention import PagedAttention
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention, noop_mask

        cell, spec, on = given.cell, given.cell.spec, given.q.device
        if spec.kv_dtype != spec.q_dtype or spec.window is not None:
            raise Unsupported("prepared for caches of the queries' dtype without a window")
        size, (k, v) = given.block_size, given.caches[0]
        pages = given.block_table.numel()
        paged = PagedAttention(pages, size, cell.batch, device=str(on))
        paged.empty_pages = given.block_table.flip(0).flatten().tolist()  # taken from the end: the same pages
        for b in range(cell.batch):
            paged.reserve(torch.tensor(b, device=on), torch.tensor(cell.context, device=on))
        # [1, Hkv, slots, D], as it wants a cache
        k_cache, v_cache = (x.permute(2, 0, 1, 3).reshape(1, spec.num_kv_heads, -1, spec.head_dim) for x in (k, v))
        lens = torch.full((cell.batch,), cell.context, device=on)
        logical = create_block_mask(
            noop_mask, cell.batch, 1, 1, math.ceil(cell.context / size) * size, device=str(on), BLOCK_SIZE=(size, size)
        )
        mask = paged.convert_logical_block_mask(logical, kv_len=lens)
        score = paged.get_score_mod(None, kv_len=lens)
        torch._dynamo.reset()  # after eight shapes of one function it would no longer compile
        attend = torch.compile(flex_attention, dynamic=False, backend=self.backend)
        q = given.q[:, :, None]

        def call() -> Tensor:
            with torch.no_grad():
                result = attend(
                    q, k_cache, v_cache, block_mask=mask, score_mod=score, scale=spec.scale, enable_gqa=spec.group > 1
                )
            assert isinstance(result, Tensor)
            return result.squeeze(2)

        return Prepared([call] * len(given.turns), call, f"compiled ({self.backend}); one copy of the cache")


def _bound(call: Callable[[int], Tensor], i: int) -> Call:
    return lambda: call(i)


def ours(block_sizes: tuple[int, ...]) -> list[Peer]:
    """pagegen, once a block size."""
    return [Pagegen(size) for size in block_sizes]


def others(*, dry_run: bool) -> list[Peer]:
    """Everything else, whether it is here or not."""
    flex = FlexPaged("eager" if dry_run else "inductor")
    return [FixedSplits(), FlashInfer(), FlashAttention2(), FlashAttention3(), GatherSdpa(), flex]


def absent(peer: Peer) -> str | None:
    """Why a peer is not here; None where it is."""
    try:
        peer.version()
    except Exception as error:  # an import may fail in any way: a library that is missing, another CUDA
        return check.class_and_line(error)[:200]
    return None
