"""Generated source, byte for byte: a change of a template or of the specialiser shows here as a diff to read.

`pytest tests/golden --update-golden` writes the files anew.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagegen.codegen import triton, triton_cache
from pagegen.codegen.defaults import default_variant
from pagegen.spec import AttentionSpec, CacheLayout, Target, TritonVariant

EXPECTED = Path(__file__).parent / "expected"
LLAMA = AttentionSpec.from_model("llama-3.1-8b")
DECODE = triton.Form(decode=True)
RAGGED = triton.Form(decode=False)


def attention(
    spec: AttentionSpec, block_size: int, form: triton.Form, variant: TritonVariant | None = None
) -> Callable[[], str]:
    layout = CacheLayout(block_size=block_size)
    chosen = variant or default_variant(spec, layout, Target.parse("sm_90"), decode=form.decode)
    return lambda: triton.render_attention(spec, layout, chosen, form)


def writing(stored: torch.dtype, **changes: Any) -> Callable[[], str]:
    fields = {"num_kv_heads": 8, "head_dim": 128, "v_head_dim": 128, "block_size": 16, "native_float8": True}
    return lambda: triton_cache.render_write(triton_cache.WriteForm(stored=stored, **{**fields, **changes}))


CASES: dict[str, Callable[[], str]] = {
    "llama_decode_block16.py": attention(LLAMA, 16, DECODE),
    "llama_decode_block128.py": attention(LLAMA, 128, DECODE),
    "llama_decode_block24.py": attention(LLAMA, 24, DECODE),
    "llama_decode_one_pass.py": attention(LLAMA, 16, DECODE, TritonVariant(page_walk="pages_in_tile")),
    "llama_decode_small_cache.py": attention(LLAMA, 16, triton.Form(decode=True, wide=False)),
    "llama_decode_balanced.py": attention(LLAMA, 16, DECODE, TritonVariant(page_walk="pages_in_tile", programs=264)),
    "llama_decode_last_reduces.py": attention(
        LLAMA, 16, DECODE, TritonVariant(page_walk="pages_in_tile", split_tokens=512, reduce="last")
    ),
    "llama_ragged_descriptors.py": attention(
        LLAMA, 64, RAGGED, TritonVariant(tile_rows=64, page_walk="tile_in_page", loads="descriptor")
    ),
    "llama_ragged_tree.py": attention(LLAMA, 16, triton.Form(decode=False, tree=True)),
    "llama_decode_float8.py": attention(
        LLAMA.replace(kv_dtype="float8_e4m3fn", kv_scale_granularity="tensor"), 16, DECODE
    ),
    "llama_decode_float8_bits.py": attention(
        LLAMA.replace(kv_dtype="float8_e4m3fn", kv_scale_granularity="head"), 16,
        triton.Form(decode=True, native_float8=False),
    ),
    "llama_decode_int4_zeros.py": attention(
        LLAMA.replace(kv_dtype="int4", kv_scale_granularity="token_head", kv_zero_points=True), 16, DECODE
    ),
    "deepseek_latent_decode.py": attention(
        AttentionSpec(num_q_heads=128, num_kv_heads=1, head_dim=576, v_head_dim=512, shared_kv=True), 64, DECODE
    ),
    "chunked_soft_cap_ragged.py": attention(
        LLAMA.replace(mask_mod="chunked(8192)", score_mod="soft_cap(30.0)"), 16, RAGGED
    ),
    "multi_head_fma_decode.py": attention(
        LLAMA.replace(num_kv_heads=32), 16, DECODE, TritonVariant(tile_rows=1, tile_kv=32, dot="fma")
    ),
    "llama_decode_lse.py": attention(LLAMA, 16, triton.Form(decode=True, write_lse=True)),
    "llama_ragged_block16.py": attention(LLAMA, 16, RAGGED),
    "llama_ragged_splits.py": attention(LLAMA, 64, RAGGED, TritonVariant(page_walk="tile_in_page", num_splits=4)),
    "smollm2_decode_block32.py": attention(AttentionSpec.from_model("smollm2-135m"), 32, DECODE),
    "gemma2_sliding_ragged.py": attention(AttentionSpec.from_model("gemma-2-2b", layer="sliding"), 16, RAGGED),
    "gpt_oss_sinks_decode.py": attention(AttentionSpec.from_model("gpt-oss-20b", layer="sliding"), 16, DECODE),
    "phi3_head96_decode.py": attention(AttentionSpec.from_model("phi-3.5-mini-instruct"), 16, DECODE),
    "alibi_bidirectional_interpreter.py": attention(
        AttentionSpec(num_q_heads=8, num_kv_heads=8, head_dim=80, v_head_dim=64, alibi=True, causal=False,
                      q_dtype=torch.float16),
        256,
        triton.Form(decode=False, write_lse=True, upcast=True),
    ),
    "write_kv_bfloat16.py": writing(torch.bfloat16),
    "write_kv_latent_float8.py": writing(torch.float8_e4m3fn, num_kv_heads=1, head_dim=576, v_head_dim=0),
    "rope_write_kv_float8_arithmetic.py": writing(
        torch.float8_e5m2, scaled=True, native_float8=False, num_q_heads=32, rotary_half=64
    ),
    "rope_write_kv_int4_interleaved.py": writing(
        torch.int4, scaled=True, zero_points=True, num_q_heads=32, rotary_half=32, interleaved=True  # type: ignore[attr-defined]
    ),
    "copy_blocks_block16.py": lambda: triton_cache.render_copy(128, 128, 16),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_generated_source_is_what_was_reviewed(name: str, update_golden: bool) -> None:
    path = EXPECTED / name
    source = CASES[name]()
    if update_golden:
        path.parent.mkdir(exist_ok=True)
        path.write_text(source, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == source


def test_no_golden_file_is_left_over() -> None:
    assert {path.name for path in EXPECTED.iterdir()} == set(CASES)
