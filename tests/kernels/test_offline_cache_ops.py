"""The writers compiled for GPUs that are not here: no errors, no spills, and float8 rounded once."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from cache_cases import INT4, INTEGERS, name_of

from pagegen.codegen.triton_cache import WriteForm, native_float8
from pagegen.spec import Target
from pagegen.targets.offline_cache import compile_writer


def llama(stored: torch.dtype, target: Target, **changes: Any) -> WriteForm:
    """A write of llama-3.1-8b's heads, with every option that the type has."""
    fields: dict[str, Any] = {
        "num_kv_heads": 8, "head_dim": 128, "v_head_dim": 128, "block_size": 16, "stored": stored,
        "scaled": stored != torch.bfloat16, "zero_points": stored in INTEGERS,
        "native_float8": native_float8(target) and stored in (torch.float8_e4m3fn, torch.float8_e5m2),
    }  # fmt: skip
    return WriteForm(**{**fields, **changes})


@pytest.mark.parametrize(  # docs/coverage.md has the others
    ("name", "stored"),
    [
        ("sm_80", torch.float8_e4m3fn), ("sm_80", INT4), ("gfx942", torch.bfloat16), ("gfx942", torch.int8),
        *(
            pytest.param(name, stored, marks=pytest.mark.nightly)
            for name, stored in (
                ("sm_80", torch.bfloat16), ("sm_80", torch.int8), ("gfx942", torch.float8_e4m3fn), ("gfx942", INT4),
            )
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else name_of(value),
)  # fmt: skip
def test_rotating_writers_of_every_type_compile_without_spills(name: str, stored: torch.dtype) -> None:
    target = Target.parse(name)
    facts = compile_writer(llama(stored, target, num_q_heads=32, rotary_half=64), target, source_dtype=torch.bfloat16)
    assert facts.spills == 0
    assert facts.registers <= 64, "8 programs of 4 warps on a multiprocessor"


@pytest.mark.parametrize("name", ["sm_90", "gfx950"])
def test_plain_and_latent_writers_compile_without_spills(name: str) -> None:
    target = Target.parse(name)
    for form in (
        llama(torch.bfloat16, target),
        llama(torch.float8_e5m2, target),
        llama(torch.float8_e4m3fn, target, num_kv_heads=1, head_dim=576, v_head_dim=0, num_q_heads=128,
              rotary_half=32, interleaved=True),
    ):  # fmt: skip
        assert compile_writer(form, target, source_dtype=torch.bfloat16).spills == 0


@pytest.mark.parametrize("name", ["sm_90", "gfx950"])
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2], ids=name_of)
def test_where_hardware_converts_to_float8_it_does_so_from_float32(name: str, stored: torch.dtype) -> None:
    target = Target.parse(name)
    assembly = compile_writer(llama(stored, target), target, source_dtype=torch.bfloat16).assembly
    conversions = re.findall(r"F2FP\.\S+|v_cvt_\w*(?:fp8|bf8)\w*", assembly)
    assert conversions
    for conversion in conversions:
        assert re.search(r"E[45]M[23]\.F32|(?:fp8|bf8)_f32", conversion), "by way of float16 it would round twice"


def test_a_target_that_is_no_gpu_is_refused() -> None:
    target = Target.parse("cpu")
    with pytest.raises(ValueError, match="target must be a GPU"):
        compile_writer(llama(torch.bfloat16, target), target, source_dtype=torch.bfloat16)
