"""`AttentionSpec.from_config`, over real transformers configs where it is installed and plain objects otherwise."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagegen import modifiers
from pagegen.spec import AttentionSpec


def config(name: str, **values: Any) -> Any:
    """The transformers config class called `name`, with its own defaults for what is not given."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
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


@pytest.mark.parametrize("dtype", ["float16", "torch.float16", torch.float16])
def test_a_dtype_may_be_a_name_as_in_a_config_file(dtype):
    plain = SimpleNamespace(num_attention_heads=4, hidden_size=64, torch_dtype=dtype)
    assert AttentionSpec.from_config(plain).q_dtype == torch.float16


def test_a_dtype_left_to_the_loader_is_bfloat16():
    plain = SimpleNamespace(num_attention_heads=4, hidden_size=64, torch_dtype="auto")
    assert AttentionSpec.from_config(plain).q_dtype == torch.bfloat16


LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"torch_dtype": "half-ish"}, ValueError, "config.dtype .or torch_dtype. must be one of .*, got 'half-ish'"),
        ({"hidden_size": None}, ValueError, "config must have hidden_size, got None: expected an integer"),
        ({"num_attention_heads": 0}, ValueError, "config.num_attention_heads must be at least 1, got 0"),
        ({"num_attention_heads": [4, 8]}, TypeError, "config.num_attention_heads must be an integer, got list"),
        ({"num_hidden_layers": None}, ValueError, "config must have num_hidden_layers, got None: expected an integer"),
        ({"num_key_value_heads": 0}, ValueError, "config.num_key_value_heads must be at least 1, got 0"),
        ({"layer_types": ["full_attention"]}, ValueError, "layer_types must have an entry for layer 1, got 1 entries"),
        ({"hidden_size": 3}, ValueError, "config.hidden_size // num_attention_heads must be at least 1, got 0"),
        ({"layer_types": []}, ValueError, "layer_types must have an entry for layer 1, got 0 entries"),
        ({"query_pre_attn_scalar": -4.0}, ValueError, "config.query_pre_attn_scalar must be positive, got -4.0"),
        ({"layer_types": "full_attention"}, TypeError, "config.layer_types must be a list of names, got str"),
        (
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": None},
            ValueError,
            "have sliding_window, got None",
        ),
        (LATENT | {"qk_nope_head_dim": None}, ValueError, "config must have qk_nope_head_dim, got None"),
        (
            LATENT | {"rope_parameters": {"rope_type": "yarn", "mscale_all_dim": 1}},
            TypeError,
            "'factor'. must be a num",
        ),
    ],
)
def test_a_malformed_field_is_named_with_what_was_expected_and_what_came(values, error, message):
    plain = SimpleNamespace(**{"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2} | values)
    with pytest.raises(error, match=message):
        AttentionSpec.from_config(plain, layer=1)


def test_a_missing_hidden_size_is_named():
    with pytest.raises(ValueError, match="config must have hidden_size, got SimpleNamespace without it"):
        AttentionSpec.from_config(SimpleNamespace(num_attention_heads=4))


@pytest.mark.parametrize("rope", ["rope_parameters", "rope_scaling"])
def test_latent_attention_over_stretched_rope_corrects_its_scale(rope):
    yarn = {"type": "yarn", "factor": 40, "mscale_all_dim": 1.0}
    spec = AttentionSpec.from_config(SimpleNamespace(num_attention_heads=4, **LATENT, **{rope: yarn}))
    assert spec.scale == pytest.approx((0.1 * math.log(40) + 1) ** 2 / math.sqrt(192))


@pytest.mark.parametrize("yarn", [{"factor": 40}, {"factor": 1, "mscale_all_dim": 1.0}])
def test_latent_attention_keeps_its_scale_where_there_is_nothing_to_correct(yarn):
    plain = SimpleNamespace(num_attention_heads=4, **LATENT, rope_parameters={"rope_type": "yarn"} | yarn)
    assert AttentionSpec.from_config(plain).scale == 1 / math.sqrt(192)


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


@pytest.mark.parametrize("kind", ["linear_attention", "mamba", "conv", "indexed_attention", "mlp"])
def test_a_layer_that_is_no_softmax_over_the_context_is_refused(kind):
    plain = SimpleNamespace(num_attention_heads=4, hidden_size=64, num_hidden_layers=1, layer_types=[kind])
    with pytest.raises(ValueError, match=f"layer 0 is {kind}, which a paged attention spec cannot express"):
        AttentionSpec.from_config(plain)


@pytest.mark.parametrize("family", ["t5", "mpt", "gpt_neo", "diffllama", "deepseek_v32", "jetmoe"])
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


@pytest.mark.parametrize("family", ["DeepseekV2", "DeepseekV3"])
def test_deepseek_scales_as_its_model_does_when_its_rope_is_stretched(family):
    yarn = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "rope_theta": 1e4}
    deepseek = config(
        f"{family}Config", rope_parameters=yarn | {"mscale": 0.707, "mscale_all_dim": 0.707}, q_lora_rank=8,
        hidden_size=64, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=163840,
    )  # fmt: skip
    name = "deepseek_v2" if family == "DeepseekV2" else "deepseek_v3"
    module = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    attention = getattr(module, f"{family}Attention")(deepseek, 0)
    assert AttentionSpec.from_config(deepseek).scale == pytest.approx(attention.scaling, rel=1e-12)


def test_gemma3n_leaves_its_scores_unscaled():
    assert AttentionSpec.from_config(config("Gemma3nTextConfig")).scale == 1.0


def test_gpt2_may_scale_by_layer_or_not_at_all():
    by_layer = config("GPT2Config", scale_attn_by_inverse_layer_idx=True)
    assert [AttentionSpec.from_config(by_layer, layer=i).scale for i in (0, 3)] == [1 / 8, 1 / 32]
    assert AttentionSpec.from_config(config("GPT2Config", scale_attn_weights=False)).scale == 1.0
    neither = config("GPT2Config", scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True)
    assert AttentionSpec.from_config(neither, layer=3).scale == 1 / 4


@pytest.mark.parametrize("name", ["GraniteSWAConfig", "GraniteMoeSWAConfig", "FlintConfig"])
def test_a_model_whose_every_layer_has_sinks_says_so_in_both_kinds(name):
    model = config(name)
    layers = [model.layer_types.index(kind) for kind in ("full_attention", "sliding_attention")]
    specs = [AttentionSpec.from_config(model, layer=layer) for layer in layers]
    assert [(spec.sinks, spec.window) for spec in specs] == [(True, None), (True, model.sliding_window)]


def test_mimo_has_sinks_and_twice_the_kv_heads_in_its_sliding_layers():
    full, sliding = (AttentionSpec.from_config(config("MiMoV2FlashConfig"), layer=i) for i in (0, 1))
    assert (full.num_kv_heads, full.sinks, full.window) == (4, False, None)
    assert (sliding.num_kv_heads, sliding.sinks, sliding.window) == (8, True, 129)
    assert (sliding.head_dim, sliding.v_head_dim, sliding.scale) == (192, 128, 1 / math.sqrt(192))


def test_jetmoe_is_refused_for_the_order_of_its_heads():
    with pytest.raises(ValueError, match="config is of jetmoe, which repeats its KV heads in another order"):
        AttentionSpec.from_config(config("JetMoeConfig"))


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


def test_llama4_sees_chunks_in_three_layers_of_four_and_everything_in_the_fourth():
    llama = config("Llama4Config")
    specs = [AttentionSpec.from_config(llama, layer=layer) for layer in range(4)]
    assert [spec.mask_mod for spec in specs] == ["chunked(8192)"] * 3 + [None]
    assert all(spec.causal and spec.window is None for spec in specs)
    assert modifiers.find(specs[0].mask_mod, "mask") == modifiers.chunked(8192)


@pytest.mark.parametrize("size", [None, 0])
def test_a_chunked_layer_needs_the_size_of_its_chunks(size):
    plain = SimpleNamespace(
        num_attention_heads=4, hidden_size=64, layer_types=["chunked_attention"], attention_chunk_size=size
    )
    with pytest.raises(ValueError, match="attention_chunk_size"):
        AttentionSpec.from_config(plain)
