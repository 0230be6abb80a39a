"""Which constants a Triton kernel is specialised to, and the specialised source."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pagegen.codegen import insert, templates, traced
from pagegen.codegen.specialise import Value, specialise
from pagegen.spec import AttentionSpec, CacheLayout, TritonVariant
from pagegen.spec.dtypes import INT4, QUERY_DTYPES
from pagegen.spec.variant import next_power_of_two, pieces

# Every Triton template: what the hash is over.
TEMPLATES = ATTENTION, BALANCED, CACHE_OPS = templates.TRITON
# Partial results that one turn of the reduce kernel merges: a float32 tile of 16 x 128 is 16 registers a thread.
REDUCE_CHUNK = 16


@dataclass(frozen=True, kw_only=True)
class Form:
    """What a call and a target fix beyond the variant: whether it is decode (one query a sequence), has a tree mask and
    wants the logarithms of the denominators; whether some tensor of it needs offsets of 64 bits; whether to compute in
    float32 (the interpreter); whether the target converts float8 or bits are decoded."""

    decode: bool
    write_lse: bool = False
    tree: bool = False
    wide: bool = True
    upcast: bool = False
    native_float8: bool = True


def with_warps_for(variant: TritonVariant, form: Form) -> TritonVariant:
    """The variant with 8 warps for tree masks over tiles of many rows: every (row, key) pair has an address of its own
    there, and with 4 warps 64 rows spill on every NVIDIA target."""
    many = form.tree and variant.tile_rows >= 64 and variant.num_warps < 8
    return replace(variant, num_warps=8) if many else variant


def bindings(spec: AttentionSpec, layout: CacheLayout, variant: TritonVariant, form: Form) -> dict[str, Value]:
    """The value of every constant of templates/attention.py. Raises ValueError for tiles that do not fit the blocks."""
    block_size, tile_kv = layout.block_size, variant.tile_kv
    if variant.page_walk == "tile_in_page" and block_size % tile_kv:
        raise ValueError(f"tile_in_page needs a block_size that is a multiple of tile_kv {tile_kv}, got {block_size}")
    if variant.page_walk == "pages_in_tile" and tile_kv % block_size:
        raise ValueError(f"pages_in_tile needs a block_size that divides tile_kv {tile_kv}, got {block_size}")
    head_main, head_rest = pieces(spec.head_dim, variant.head_pieces)
    v_main, v_rest = pieces(spec.v_head_dim, variant.head_pieces)
    stored = storage(spec, form)
    low, high = traced.mask_bounds(spec)
    mask_low, mask_high = low is not None, high is not None
    values: dict[str, Value] = {
        "HEAD_DIM": spec.head_dim,
        "HEAD_MAIN": head_main,
        "HEAD_REST": head_rest,
        "V_HEAD_DIM": spec.v_head_dim,
        "V_MAIN": v_main,
        "V_REST": v_rest,
        "V_FROM_K": spec.shared_kv and (v_main, v_rest) == (head_main, 0),
        **_tile(spec, variant, form),
        "BLOCK_SIZE": block_size,
        "TILE_KV": tile_kv,
        "PAGE_WALK": variant.page_walk,
        "SPLITS": variant.splits,
        "SPLIT_TOKENS": variant.split_tokens,
        "REDUCE_LAST": variant.splits and variant.reduce == "last",
        "BALANCED": variant.programs > 0,
        "DOT": variant.dot,
        "DESCRIPTORS": variant.loads == "descriptor",
        "WARP_SPECIALIZE": variant.warp_specialize,
        "STORAGE": stored,
        "PACK": 2 if stored == "int4" else 1,
        "SCALES": templates.SCALES[spec.kv_scale_granularity],
        "HAS_ZEROS": spec.kv_zero_points,
        "DECODE": form.decode,
        "CAUSAL": spec.causal,
        "WINDOW": spec.window or 0,
        "SOFTCAP": spec.logit_softcap or 0.0,
        "HAS_ALIBI": spec.alibi,
        "HAS_SINKS": spec.sinks,
        "HAS_TREE": form.tree,
        "HAS_SCORE_MOD": spec.score_mod is not None,
        "HAS_MASK_MOD": spec.mask_mod is not None,
        "MASK_LOW": mask_low,
        "MASK_HIGH": mask_high,
        "HAS_BEGIN": mask_low or spec.window is not None,
        "NATURAL": spec.logit_softcap is not None or spec.score_mod is not None,
        "WRITE_LSE": form.write_lse,
        "UPCAST": form.upcast or (spec.kv_dtype in QUERY_DTYPES and spec.q_dtype != spec.kv_dtype),
        "WIDE": form.wide,
        "V_PADDED": max(16, next_power_of_two(spec.v_head_dim)),
        "CHUNK": REDUCE_CHUNK,
        "NUM_WARPS": with_warps_for(variant, form).num_warps,
        "NUM_STAGES": variant.num_stages,
    }
    values |= {"PROGRAMS": variant.programs} if variant.programs else {"NUM_SPLITS": variant.num_splits}
    return values


def _tile(spec: AttentionSpec, variant: TritonVariant, form: Form) -> dict[str, Value]:
    """How the rows of queries and heads fill a tile."""
    rows, group = variant.tile_rows, spec.group
    shared = group > rows  # a group is divided among tiles
    queries = 1 if form.decode or shared else rows // group
    return {
        "GROUP": group,
        "TILE_ROWS": rows,
        "TILE_QUERIES": queries,
        "ROW_TILES": -(-group // rows),
        "SLOT_ROWS": rows if shared else queries * group,
    }


def storage(spec: AttentionSpec, form: Form) -> str:
    """How stored elements become numbers."""
    if spec.kv_dtype == INT4:
        return "int4"
    if spec.kv_dtype in QUERY_DTYPES:
        return "float" if spec.kv_dtype == spec.q_dtype and not form.upcast else "convert"
    if spec.kv_dtype == torch.int8 or form.native_float8:
        return "convert"
    return "e4m3" if spec.kv_dtype == torch.float8_e4m3fn else "e5m2"


def render_attention(spec: AttentionSpec, layout: CacheLayout, variant: TritonVariant, form: Form) -> str:
    """The specialised source of one attention kernel and its launcher (`launch`, or `launch_balanced`), as one file
    that runs without pagegen. Raises ValueError for tiles that do not fit the blocks, and Untraceable for a score or
    mask function that has no expression."""
    bound = bindings(spec, layout, variant, form)
    kind = "decode" if form.decode else "ragged"
    name = BALANCED if variant.programs else ATTENTION
    header = (
        templates.origin(name, template_hash()),
        f"{kind} attention, {templates.shape(spec, layout)}",
        variant.name,
    )
    return specialise(source(spec, name), bound, header=header, roots=[launcher_name(variant)])


def launcher_name(variant: TritonVariant) -> str:
    """The host function of a rendered file."""
    return "launch_balanced" if variant.programs else "launch"


def source(spec: AttentionSpec, name: str = ATTENTION) -> str:
    """The template with the spec's score and mask functions in their places, still unspecialised. The balanced one
    comes behind the text of the kernel that it imports."""
    text = templates.read(ATTENTION)
    if name == BALANCED:
        own = templates.read(BALANCED)
        text += own[own.index("\n\n@triton.jit") :]  # from behind its docstring and imports on
    return insert.modifiers(text, spec)


def template_hash() -> str:
    """sha256 over the Triton templates' text."""
    return templates.digest(TEMPLATES)
