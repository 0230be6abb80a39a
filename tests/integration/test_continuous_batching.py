"""transformers' own continuous batching, with this project's attention behind flash-attention's names."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
from test_transformers import alone, build, gemma3, llama, phi3, prompts_of, qwen3
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from pagegen.integrations import flash_attn_compat, hf_flash


def batch(model, prompts, new=12):
    config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(page_size=16, num_blocks=64, max_batch_tokens=64, auto_switch_to_flash=False)
    found = model.generate_batch(
        inputs=prompts, generation_config=config, continuous_batching_config=batching, progress_bar=False
    )
    return [found[name].generated_tokens for name in sorted(found, key=lambda name: int(name.rpartition("_")[2]))]


@pytest.fixture
def counted(monkeypatch):
    """How often transformers called each function; it must have been made to look them up anew."""
    import transformers.modeling_flash_attention_utils as flash

    monkeypatch.setattr(flash, "_loaded_implementation", None)
    calls = {}
    for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache"):
        function = getattr(flash_attn_compat, name)

        def counting(*args, _name=name, _function=function, **kwargs):
            calls[_name] = calls.get(_name, 0) + 1
            return _function(*args, **kwargs)

        counting.__signature__ = inspect.signature(function)  # transformers reads what it may pass
        monkeypatch.setattr(flash_attn_compat, name, counting)
    return calls


@pytest.mark.compat("transformers", "continuous batching")
@pytest.mark.parametrize("make", [llama, pytest.param(qwen3, marks=pytest.mark.nightly), gemma3, phi3])
def test_continuous_batching_gives_each_prompt_the_tokens_it_gets_alone(make, counted):
    model, prompts = build(make), prompts_of(5, 17, 40)
    expected = alone(model, prompts)
    model.set_attn_implementation(hf_flash.register())
    assert batch(model, prompts) == expected
    assert counted["flash_attn_varlen_func"] >= 3


@pytest.mark.compat("transformers", "continuous batching with block tables")
def test_decode_steps_go_through_the_block_table_where_transformers_has_it_on(counted, monkeypatch):
    """transformers asks for a GPU before it takes that way."""
    from transformers.generation.continuous_batching import initialization

    model, prompts = build(llama), prompts_of(5, 17, 40)
    expected = alone(model, prompts)
    model.set_attn_implementation(hf_flash.register())
    monkeypatch.setattr(initialization, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True)))
    assert batch(model, prompts) == expected
    assert counted["flash_attn_with_kvcache"] >= 3 * 11


def test_it_is_registered_once():
    assert hf_flash.register() == hf_flash.register() == "flash_pagegen_2"
    import transformers.modeling_flash_attention_utils as flash

    found = flash._lazy_imports(hf_flash.NAME)
    assert found[:3] == (
        flash_attn_compat.flash_attn_func, flash_attn_compat.flash_attn_varlen_func,
        flash_attn_compat.flash_attn_with_kvcache,
    )  # fmt: skip
