"""`AttentionSpec.from_config`, over real transformers configs where it is installed and plain objects otherwise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagegen.spec import AttentionSpec


def config(name: str, **values: Any) -> Any:
    """The transformers config class called `name`, with its own defaults for what is not given."""
    transformers = pytest.importorskip("transformers")
    return getattr(transformers, name)(**values)


def test_a_plain_object_with_the_usual_names_is_enough():
    plain = SimpleNamespace(
        num_attention_heads=12, num_key_value_heads=4, hidden_size=768, num_hidden_layers=2, dtype=torch.float16
    )
    spec = AttentionSpec.from_config(plain)
    assert spec == AttentionSpec(num_q_heads=12, num_kv_heads=4, head_dim=64, q_dtype=torch.float16)


def test_without_kv_heads_every_query_head_has_its_own():
    spec = AttentionSpec.from_config(SimpleNamespace(num_attention_heads=6, hidden_size=96))
    assert (spec.num_kv_heads, spec.head_dim) == (6, 16)


def test_the_text_part_of_a_config_with_several_parts_counts():
    text = SimpleNamespace(num_attention_heads=4, hidden_size=64)
    outer = SimpleNamespace(num_attention_heads=99, get_text_config=lambda: text)
    assert AttentionSpec.from_config(outer).num_q_heads == 4


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_a_dtype_may_be_a_name_as_in_a_config_file(dtype):
    plain = SimpleNamespace(num_attention_heads=4, hidden_size=64, torch_dtype=dtype)
    assert AttentionSpec.from_config(plain).q_dtype == torch.bfloat16


def test_the_cache_dtype_is_the_callers_choice():
    plain = SimpleNamespace(num_attention_heads=4, hidden_size=64)
    assert AttentionSpec.from_config(plain, kv_dtype="int8").kv_dtype == torch.int8


@pytest.mark.parametrize("nothing", [None, {}, SimpleNamespace(hidden_size=64)])
def test_a_config_without_attention_heads_is_refused(nothing):
    with pytest.raises(ValueError, match="config must have num_attention_heads, got"):
        AttentionSpec.from_config(nothing)


@pytest.mark.parametrize(("layer", "message"), [(2, "below num_hidden_layers 2, got 2"), (-1, "at least 0, got -1")])
def test_a_layer_that_is_not_there_is_refused(layer, message):
    plain = SimpleNamespace(num_attention_heads=4, hidden_size=64, num_hidden_layers=2)
    with pytest.raises(ValueError, match=f"layer must be {message}"):
        AttentionSpec.from_config(plain, layer=layer)


@pytest.mark.parametrize("kind", ["linear_attention", "chunked_attention", "mamba", "conv", "indexed_attention", "mlp"])
def test_a_layer_that_is_no_softmax_over_the_context_is_refused(kind):
    plain = SimpleNamespace(num_attention_heads=4, hidden_size=64, num_hidden_layers=1, layer_types=[kind])
    with pytest.raises(ValueError, match=f"layer 0 is {kind}, which a paged attention spec cannot express"):
        AttentionSpec.from_config(plain)


@pytest.mark.parametrize("family", ["t5", "mpt", "gpt_neo", "diffllama", "deepseek_v32"])
def test_a_model_with_attention_of_another_kind_is_refused(family):
    plain = SimpleNamespace(num_attention_heads=4, hidden_size=64, model_type=family)
    with pytest.raises(ValueError, match=f"config is of {family}, which"):
        AttentionSpec.from_config(plain)


# --- real configs


def test_llama():
    llama = config("LlamaConfig", hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, dtype="bfloat16")
    assert AttentionSpec.from_config(llama) == AttentionSpec.from_model("llama-3.1-8b")


def test_qwen3_states_its_head_dim_apart_from_the_hidden_size():
    qwen = config("Qwen3Config", hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, head_dim=128)
    assert AttentionSpec.from_config(qwen) == AttentionSpec.from_model("qwen3-0.6b")


def test_qwen2_slides_from_the_layer_it_names_on():
    qwen = config("Qwen2Config", use_sliding_window=True, sliding_window=4096, max_window_layers=2)
    assert [AttentionSpec.from_config(qwen, layer=i).window for i in (0, 1, 2, 3)] == [None, None, 4096, 4096]
    assert AttentionSpec.from_config(config("Qwen2Config", use_sliding_window=False)).window is None


def test_gemma3_mixes_five_sliding_layers_with_a_full_one():
    gemma = config("Gemma3TextConfig", sliding_window=1024, query_pre_attn_scalar=168, head_dim=128)
    specs = [AttentionSpec.from_config(gemma, layer=i) for i in range(7)]
    assert [spec.window for spec in specs] == [1024] * 5 + [None, 1024]
    assert specs[0].scale == 168**-0.5


def test_gemma3_with_images_is_read_through_its_text_part():
    assert AttentionSpec.from_config(config("Gemma3Config"), layer=5).window is None


def test_gemma2_caps_its_logits():
    spec = AttentionSpec.from_config(config("Gemma2Config"))
    assert (spec.logit_softcap, spec.window) == (50.0, 4096)


def test_gpt_oss_has_sinks_in_both_kinds_of_layer():
    specs = [AttentionSpec.from_config(config("GptOssConfig"), layer=i) for i in (0, 1)]
    assert specs == [AttentionSpec.from_model("gpt-oss-20b", layer=kind) for kind in ("sliding", "full")]
    assert specs[0].sinks


def test_phi3_slides_everywhere_or_nowhere():
    assert AttentionSpec.from_config(config("Phi3Config", sliding_window=2047)) == AttentionSpec.from_model(
        "phi-3-mini-4k-instruct"
    )
    assert AttentionSpec.from_config(config("Phi3Config")).window is None


def test_mistral_slides_in_every_layer():
    assert AttentionSpec.from_config(config("MistralConfig"), layer=7) == AttentionSpec.from_model("mistral-7b-v0.1")


def test_deepseek_caches_its_latent():
    assert AttentionSpec.from_config(config("DeepseekV3Config")) == AttentionSpec.from_model("deepseek-v3")


def test_falcon_states_its_kv_heads_in_a_way_of_its_own():
    assert AttentionSpec.from_config(config("FalconConfig")) == AttentionSpec.from_model("falcon-7b")
    new = config(
        "FalconConfig", new_decoder_architecture=True, num_kv_heads=8, num_attention_heads=128, hidden_size=8192
    )
    assert AttentionSpec.from_config(new) == AttentionSpec.from_model("falcon-40b")


def test_starcoder_has_one_kv_head():
    code = config("GPTBigCodeConfig", n_head=48, n_embd=6144)
    assert AttentionSpec.from_config(code) == AttentionSpec.from_model("starcoder")


def test_bloom_always_adds_alibi():
    assert AttentionSpec.from_config(config("BloomConfig")).alibi


def test_granite_states_its_scale():
    assert AttentionSpec.from_config(config("GraniteConfig", attention_multiplier=0.0078125)).scale == 0.0078125


def test_llama4_is_served_in_the_layers_that_see_everything():
    llama = config("Llama4Config")
    with pytest.raises(ValueError, match="layer 0 is chunked_attention"):
        AttentionSpec.from_config(llama)
    assert AttentionSpec.from_config(llama, layer=3).window is None
