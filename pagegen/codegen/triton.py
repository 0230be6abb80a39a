"""Which constants a Triton kernel is specialised to, and the specialised source."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from pagegen import __version__, paths
from pagegen.codegen.specialise import Value, specialise
from pagegen.spec import AttentionSpec, CacheLayout, TritonVariant, dtype_name

ATTENTION = "attention.py"
CACHE_OPS = "cache_ops.py"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Form:
    """What a call fixes beyond the variant: whether it is decode (one query a sequence), whether it wants the
    logarithms of the denominators, and whether to compute in float32 (the interpreter)."""

    decode: bool
    write_lse: bool = False
    upcast: bool = False


def unsupported(spec: AttentionSpec) -> str | None:
    """Why the Triton templates do not serve `spec`, or None when they do."""
    if spec.kv_dtype not in _FLOATS:
        return f"the Triton templates read float caches, not {dtype_name(spec.kv_dtype)}"
    if spec.shared_kv:
        return "the Triton templates read separate K and V, not a shared latent cache"
    if spec.score_mod or spec.mask_mod:
        return "the Triton templates take no score or mask functions"
    if next_power_of_two(spec.group) > 256:
        return f"the Triton templates pack at most 256 query heads a KV head, not {spec.group}"
    return None


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def least_rows(spec: AttentionSpec) -> int:
    """The smallest query tile that holds all the heads of a group; 16, since tl.dot needs M >= 16."""
    return max(16, next_power_of_two(spec.group))


def default_variant(spec: AttentionSpec, layout: CacheLayout, *, decode: bool) -> TritonVariant:
    """A variant that compiles without spills for head dims up to 256 on sm_80 and later and on gfx942.

    The key tile shrinks with the head dim, so that K and V tiles in flight stay within 64 KiB of shared memory,
    and is half as long for ragged batches: 64 rows by 64 keys in 4 warps take 255 registers on sm_80 and spill.
    """
    widest = next_power_of_two(max(spec.head_dim, spec.v_head_dim))
    tile_kv = max(16, (64 if widest <= 128 else 32) // (1 if decode else 2))
    rows = least_rows(spec) if decode else max(least_rows(spec), 64 if widest <= 128 else 32)
    return TritonVariant(
        tile_rows=rows,
        tile_kv=tile_kv,
        page_walk=page_walk(layout.block_size, tile_kv),
        num_splits=8 if decode else 1,
        num_warps=8 if rows * widest > 64 * 128 else 4,
        num_stages=2,
    )


def page_walk(block_size: int, tile_kv: int) -> str:
    """The cheapest walk that fits: fewest block-table look-ups a tile."""
    if block_size % tile_kv == 0:
        return "tile_in_page"
    if tile_kv % block_size == 0:
        return "pages_in_tile"
    return "any"


def bindings(spec: AttentionSpec, layout: CacheLayout, variant: TritonVariant, form: Form) -> dict[str, Value]:
    """The value of every constant of templates/attention.py. Raises ValueError for a tile that is too small."""
    if variant.tile_rows < spec.group:
        raise ValueError(f"tile_rows must be at least the group {spec.group}, got {variant.tile_rows}")
    block_size, tile_kv = layout.block_size, variant.tile_kv
    if variant.page_walk == "tile_in_page" and block_size % tile_kv:
        raise ValueError(f"tile_in_page needs a block_size that is a multiple of tile_kv {tile_kv}, got {block_size}")
    if variant.page_walk == "pages_in_tile" and tile_kv % block_size:
        raise ValueError(f"pages_in_tile needs a block_size that divides tile_kv {tile_kv}, got {block_size}")
    return {
        "HEAD_DIM": spec.head_dim,
        "HEAD_DIM_PADDED": max(16, next_power_of_two(spec.head_dim)),
        "V_HEAD_DIM": spec.v_head_dim,
        "V_HEAD_DIM_PADDED": max(16, next_power_of_two(spec.v_head_dim)),
        "GROUP": spec.group,
        "BLOCK_SIZE": layout.block_size,
        "TILE_ROWS": variant.tile_rows,
        "TILE_QUERIES": 1 if form.decode else variant.tile_rows // spec.group,
        "TILE_KV": variant.tile_kv,
        "PAGE_WALK": variant.page_walk,
        "NUM_SPLITS": variant.num_splits,
        "NUM_SPLITS_PADDED": next_power_of_two(variant.num_splits),
        "DECODE": form.decode,
        "CAUSAL": spec.causal,
        "WINDOW": spec.window or 0,
        "SOFTCAP": spec.logit_softcap or 0.0,
        "HAS_ALIBI": spec.alibi,
        "HAS_SINKS": spec.sinks,
        "WRITE_LSE": form.write_lse,
        "UPCAST": form.upcast or spec.q_dtype != spec.kv_dtype,
        "NUM_WARPS": variant.num_warps,
        "NUM_STAGES": variant.num_stages,
    }


def render_attention(spec: AttentionSpec, layout: CacheLayout, variant: TritonVariant, form: Form) -> str:
    """The specialised source of one attention kernel and its launcher, as one file that runs without pagegen."""
    bound = bindings(spec, layout, variant, form)
    kind = "decode" if form.decode else "ragged"
    heads = f"{spec.num_q_heads}/{spec.num_kv_heads} heads"
    header = (
        f"Generated by pagegen {__version__} from templates/{ATTENTION} (sha256 {template_hash()[:12]}).",
        f"{kind} attention, {dtype_name(spec.q_dtype)} over {dtype_name(spec.kv_dtype)}, {heads}, "
        f"head_dim {spec.head_dim}, block_size {layout.block_size}",
        variant.name,
    )
    return specialise(_template(ATTENTION), bound, header=header, roots=["launch"])


def cache_bindings(head_dim: int, v_head_dim: int, block_size: int) -> dict[str, Value]:
    """The value of every constant of templates/cache_ops.py."""
    width = next_power_of_two(max(head_dim, v_head_dim))
    return {
        "HEAD_DIM": head_dim,
        "V_HEAD_DIM": v_head_dim,
        "TILE_DIMS": width,
        "BLOCK_SIZE": block_size,
        # 4096 elements of K and of V in registers at once
        "TILE_SLOTS": max(1, min(next_power_of_two(block_size), 4096 // width)),
    }


def render_cache_ops(head_dim: int, v_head_dim: int, block_size: int) -> str:
    """The specialised source of `write_kv` and `copy_blocks`."""
    header = (
        f"Generated by pagegen {__version__} from templates/{CACHE_OPS} (sha256 {template_hash()[:12]}).",
        f"write_kv and copy_blocks, head_dim {head_dim}/{v_head_dim}, block_size {block_size}",
    )
    bound = cache_bindings(head_dim, v_head_dim, block_size)
    return specialise(_template(CACHE_OPS), bound, header=header, roots=["launch_write_kv", "launch_copy_blocks"])


@functools.cache
def _template(name: str) -> str:
    return (paths.data("templates") / name).read_text(encoding="utf-8")


@functools.cache
def template_hash() -> str:
    """sha256 over the Triton templates' text."""
    text = "".join(f"{name}\0{_template(name)}\0" for name in (ATTENTION, CACHE_OPS))
    return hashlib.sha256(text.encode()).hexdigest()


def form_of(call: Any, *, upcast: bool) -> Form:
    """The form that serves a call."""
    return Form(decode=call.query_start_loc is None, write_lse=call.lse is not None, upcast=upcast)
