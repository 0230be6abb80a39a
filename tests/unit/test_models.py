"""The shipped table of model geometries, and how people find a row of it."""

from __future__ import annotations

import math
import re

import pytest
import torch

from pagegen.spec import AttentionSpec
from pagegen.spec.models import _normal, find_geometry, geometries

TABLE = geometries()


@pytest.mark.parametrize("name", TABLE)
def test_every_row_says_where_it_comes_from_and_builds_a_spec(name):
    row = TABLE[name]
    spec = AttentionSpec.from_model(name)
    assert row.source
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", row.hf_id)
    assert spec.num_q_heads == row.num_q_heads
    assert spec.q_dtype == getattr(torch, row.dtype)
    assert spec.scale == 1 / math.sqrt(row.head_dim)
    assert row.attn_layers >= 1


@pytest.mark.parametrize("name", [n for n, row in TABLE.items() if row.window_layers])
def test_a_row_with_a_window_says_which_layers_slide(name):
    assert TABLE[name].window_layers in ("some", "all")
    assert AttentionSpec.from_model(name, layer="sliding").window == TABLE[name].window is not None


def test_no_two_rows_answer_to_one_name():
    names = [_normal(row.name) for row in TABLE.values()]
    assert len(set(names)) == len(names)


def test_llama():
    spec = AttentionSpec.from_model("llama-3.1-8b")
    assert (spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim) == (32, 8, 128, 128)
    assert (spec.window, spec.logit_softcap, spec.sinks, spec.shared_kv) == (None, None, False, False)


def test_smollm2_has_a_group_of_three():
    spec = AttentionSpec.from_model("smollm2-135m")
    assert (spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.group) == (9, 3, 64, 3)


def test_a_model_that_mixes_layers_gives_the_full_one_unless_asked():
    assert AttentionSpec.from_model("gemma-2-9b").window is None
    assert AttentionSpec.from_model("gemma-2-9b", layer="full").window is None
    assert AttentionSpec.from_model("gemma-2-9b", layer="sliding").window == 4096
    assert AttentionSpec.from_model("gemma-2-9b").logit_softcap == 50.0


def test_a_model_whose_layers_all_slide_gives_the_window():
    assert AttentionSpec.from_model("mistral-7b-v0.1").window == 4096
    with pytest.raises(ValueError, match="layer must be 'sliding' for mistral-7b-v0.1, whose layers all slide"):
        AttentionSpec.from_model("mistral-7b-v0.1", layer="full")


def test_a_layer_that_the_model_does_not_have_is_refused():
    with pytest.raises(ValueError, match="layer must be 'full' for llama-3.1-8b, which has no sliding-window layer"):
        AttentionSpec.from_model("llama-3.1-8b", layer="sliding")
    with pytest.raises(ValueError, match="layer must be one of 'full', 'sliding', got 'local'"):
        AttentionSpec.from_model("gemma-2-9b", layer="local")


def test_mla_caches_the_latent_and_scales_by_the_uncompressed_width():
    spec = AttentionSpec.from_model("deepseek-v3")
    assert (spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim) == (128, 1, 576, 512)
    assert spec.shared_kv
    assert spec.scale == 1 / math.sqrt(128 + 64)


def test_sinks_come_from_the_table():
    assert AttentionSpec.from_model("gpt-oss-20b").sinks


def test_dtypes_can_be_chosen_for_a_known_model():
    spec = AttentionSpec.from_model("llama-3.1-8b", q_dtype="float16", kv_dtype="fp8")
    assert (spec.q_dtype, spec.kv_dtype) == (torch.float16, torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("LLAMA-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m"),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("google/gemma-3-4b-it", "gemma-3-4b-it"),
        ("mistral-large-instruct-2407", "mistral-large-instruct-2407"),
    ],
)
def test_a_model_is_found_by_the_names_people_use(asked, found):
    assert find_geometry(asked).name == found


@pytest.mark.parametrize("name", ["mistralai/Mistral-7B-Instruct-v0.2", "llama-3.1-80b", "qwen3-1.7b"])
def test_a_near_name_is_not_taken_for_the_model(name):
    with pytest.raises(ValueError, match="not in the geometry table"):
        AttentionSpec.from_model(name)


def test_an_unknown_model_is_answered_with_near_ones():
    with pytest.raises(ValueError, match=r"model 'llama-3-1-8b' .*; near: llama-3.1-8b, .* Or use .*from_config"):
        AttentionSpec.from_model("llama-3-1-8b")


def test_a_name_like_no_other_is_answered_with_the_list():
    with pytest.raises(ValueError, match="known: aya-23-8b, .*tinyllama"):
        AttentionSpec.from_model("@@@@")


def test_a_name_must_be_a_string():
    with pytest.raises(TypeError, match="name must be a model's name, got NoneType None"):
        AttentionSpec.from_model(None)
