"""Generated source, byte for byte: a change of a template or of the specialiser shows here as a diff to read.

`pytest tests/golden --update-golden` writes the files anew.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pagegen.codegen import triton
from pagegen.spec import AttentionSpec, CacheLayout, TritonVariant

EXPECTED = Path(__file__).parent / "expected"
LLAMA = AttentionSpec.from_model("llama-3.1-8b")
DECODE = triton.Form(decode=True)
RAGGED = triton.Form(decode=False)


def attention(
    spec: AttentionSpec, block_size: int, form: triton.Form, variant: TritonVariant | None = None
) -> Callable[[], str]:
    layout = CacheLayout(block_size=block_size)
    chosen = variant or triton.default_variant(spec, layout, decode=form.decode)
    return lambda: triton.render_attention(spec, layout, chosen, form)


CASES: dict[str, Callable[[], str]] = {
    "llama_decode_block16.py": attention(LLAMA, 16, DECODE),
    "llama_decode_block128.py": attention(LLAMA, 128, DECODE),
    "llama_decode_block24.py": attention(LLAMA, 24, DECODE),
    "llama_decode_one_pass.py": attention(LLAMA, 16, DECODE, TritonVariant(page_walk="pages_in_tile")),
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
    "cache_ops_block16.py": lambda: triton.render_cache_ops(128, 128, 16),
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
