"""Which constants the Triton cache kernels are specialised to, and their specialised source."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagegen.codegen import templates
from pagegen.codegen.specialise import Value, specialise
from pagegen.codegen.triton import CACHE_OPS, template_hash
from pagegen.spec import Target, dtype_name
from pagegen.spec.dtypes import INTEGER_RANGES, QUERY_DTYPES
from pagegen.spec.variant import next_power_of_two


@dataclass(frozen=True, kw_only=True)
class WriteForm:
    """What a generated writer is specialised to. `stored` is what the caches hold; v_head_dim is 0 where K alone is
    written; num_q_heads and rotary_half are 0 without a rotation."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    block_size: int
    stored: torch.dtype
    scaled: bool = False
    zero_points: bool = False
    num_q_heads: int = 0
    rotary_half: int = 0
    interleaved: bool = False
    native_float8: bool = False


def native_float8(target: Target) -> bool:
    """Whether the target converts float32 to float8 (OCP's e4m3 and e5m2) in one rounding to nearest even, as the
    assembly shows: NVIDIA from sm_90, AMD's gfx950. sm_89 goes by way of float16, truncating; sm_80 has no e4m3 and
    gfx942 has other float8 types."""
    if target.kind == "cuda":
        return target.capability >= 90
    return target.arch == "gfx950"


def write_bindings(form: WriteForm) -> dict[str, Value]:
    """The value of every constant of `write_kv_kernel` in templates/cache_ops.py."""
    width = max(2, next_power_of_two(max(form.head_dim, form.v_head_dim)))
    lowest, highest = _range(form.stored)
    return {
        "NUM_Q_HEADS": form.num_q_heads,
        "NUM_KV_HEADS": form.num_kv_heads,
        "HEAD_DIM": form.head_dim,
        "V_HEAD_DIM": form.v_head_dim,
        "BLOCK_SIZE": form.block_size,
        "STORED": "float" if form.stored in QUERY_DTYPES else dtype_name(form.stored),
        "LOWEST": lowest,
        "HIGHEST": highest,
        "NATIVE_FLOAT8": form.native_float8,
        "SCALED": form.scaled,
        "ZERO_POINTS": form.zero_points,
        "ROTATE": form.rotary_half > 0,
        "ROTARY_HALF": form.rotary_half,
        "INTERLEAVED": form.interleaved,
        # 1024 elements a program, 8 a thread: enough loads in flight, and many programs for a decode step's few tokens
        "TILE_HEADS": max(1, min(next_power_of_two(max(form.num_q_heads, form.num_kv_heads)), 1024 // width)),
        "TILE_DIMS": width,
    }


def _range(stored: torch.dtype) -> tuple[float, float]:
    """The values that a cache's type can hold: what others saturate at. (0, 0) for a type that overflows instead."""
    if stored in QUERY_DTYPES:
        return 0.0, 0.0
    first, last = INTEGER_RANGES.get(stored) or (torch.finfo(stored).min, torch.finfo(stored).max)
    return float(first), float(last)


def render_write(form: WriteForm) -> str:
    """The specialised source of a writer and its launcher, as one file that runs without pagegen."""
    what = f"{dtype_name(form.stored)}, {form.num_kv_heads} heads, head_dim {form.head_dim}/{form.v_head_dim}"
    header = [templates.origin(CACHE_OPS, template_hash()), f"write to {what}, block_size {form.block_size}"]
    if form.rotary_half:
        style = "interleaved" if form.interleaved else "half and half"
        header.append(f"{2 * form.rotary_half} columns of {form.num_q_heads} query heads and of k rotated, {style}")
    return specialise(templates.read(CACHE_OPS), write_bindings(form), header=header, roots=["launch_write_kv"])


def copy_bindings(head_dim: int, v_head_dim: int, block_size: int) -> dict[str, Value]:
    """The value of every constant of `copy_blocks_kernel`; v_head_dim is 0 where K alone is copied."""
    width = next_power_of_two(max(head_dim, v_head_dim))
    return {
        "HEAD_DIM": head_dim,
        "V_HEAD_DIM": v_head_dim,
        "TILE_DIMS": width,
        "BLOCK_SIZE": block_size,
        # 4096 elements of K and of V in registers at once
        "TILE_SLOTS": max(1, min(next_power_of_two(block_size), 4096 // width)),
    }


def render_copy(head_dim: int, v_head_dim: int, block_size: int) -> str:
    """The specialised source of a block copier and its launcher."""
    what = f"copy_blocks, head_dim {head_dim}/{v_head_dim}, block_size {block_size}"
    header = (templates.origin(CACHE_OPS, template_hash()), what)
    bound = copy_bindings(head_dim, v_head_dim, block_size)
    return specialise(templates.read(CACHE_OPS), bound, header=header, roots=["launch_copy_blocks"])
