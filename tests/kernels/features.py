"""The features of the kernel family: what each is, which tests verify it, and what coverage.py compiles for it.

A feature's tests are its cases in the tests of kernels against the float64 reference, on decode and on ragged batches
full of poison, unless another test is named. A kernel that spills must be excused here, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pagegen import modifiers
from pagegen.codegen.triton_cache import WriteForm, native_float8
from pagegen.spec import AttentionSpec, CacheLayout, Target, TritonVariant
from pagegen.spec.dtypes import INT4
from pagegen.spec.shared_prefix import prefix_spec
from pagegen.targets import default_variant

TARGETS = tuple(map(Target.parse, ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")))

_CPU = "tests/kernels/test_cpu_{}.py::{}[{}]"
_INTERPRETER = "tests/kernels/interpreter/test_triton_{}.py::{}[ragged-{}]"
_REFERENCE = "test_kernel_gives_the_reference_result_wherever_blocks_lie"
_ROUND_TRIP = "test_rotating_and_writing_at_once_stores_the_bits_of_rotating_and_then_writing"


def attention(case: str) -> str:
    return _CPU.format("attention", _REFERENCE, case)


def quantised(case: str) -> str:
    return _CPU.format("quantised", _REFERENCE, case)


def masks(case: str) -> str:
    return _CPU.format("masks", "test_kernel_with_functions_gives_the_reference_result_wherever_blocks_lie", case)


def interpreted(case: str) -> str:
    return _INTERPRETER.format("attention", "test_a_kernel_equals_the_reference_whatever_unused_memory_holds", case)


def family(case: str) -> str:
    return _INTERPRETER.format("features", "test_a_kernel_equals_the_reference_whatever_unused_memory_holds", case)


def other(test: str) -> str:
    """Another test of the interpreter's."""
    return f"tests/kernels/interpreter/test_triton_{test}"


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One row of the table. `changes` are to the default variant; without any, the defaults are compiled. `absent`
    and `excused` say for a target why nothing is compiled there, or why it may spill."""

    group: str
    name: str
    cpu: tuple[str, ...]
    interpreter: tuple[str, ...]
    spec: AttentionSpec
    block_size: int = 16
    changes: Mapping[str, Any] = field(default_factory=dict)
    kinds: tuple[str, ...] = ("decode", "ragged")
    options: Mapping[str, bool] = field(default_factory=dict)  # of compile_facts
    absent: Mapping[str, str] = field(default_factory=dict)
    excused: Mapping[str, str] = field(default_factory=dict)

    @property
    def layout(self) -> CacheLayout:
        return CacheLayout(block_size=self.block_size)

    def variant(self, kind: str, target: Target) -> TritonVariant:
        variant = default_variant(self.spec, self.layout, target, decode=kind == "decode")
        assert isinstance(variant, TritonVariant)
        return replace(variant, **self.changes)

    def definition(self) -> dict[str, Any]:
        """What the compiled kernels follow from, besides the variants, as JSON."""
        plain = AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=1).to_dict()
        fields = {k: v for k, v in self.spec.to_dict().items() if k not in plain or plain[k] != v}
        return {"spec": fields, "block_size": self.block_size, "changes": dict(self.changes), **self.options}


@dataclass(frozen=True, kw_only=True)
class WriterFeature:
    """A row for the kernel that writes, and perhaps rotates, new keys and values in `fields` of a WriteForm."""

    group: str
    name: str
    cpu: tuple[str, ...]
    interpreter: tuple[str, ...]
    fields: Mapping[str, Any]
    kinds: tuple[str, ...] = ("write",)
    absent: Mapping[str, str] = field(default_factory=dict)
    excused: Mapping[str, str] = field(default_factory=dict)

    def form(self, target: Target) -> WriteForm:
        shape = {"num_kv_heads": 8, "head_dim": 128, "v_head_dim": 128, "block_size": 16}
        float8 = self.fields["stored"] in (torch.float8_e4m3fn, torch.float8_e5m2)
        return WriteForm(**{**shape, **self.fields}, native_float8=float8 and native_float8(target))

    def definition(self) -> dict[str, Any]:
        return {k: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v for k, v in self.fields.items()}


def spec(group: int = 4, head_dim: int = 128, kv_heads: int = 8, **fields: Any) -> AttentionSpec:
    return AttentionSpec(num_q_heads=group * kv_heads, num_kv_heads=kv_heads, head_dim=head_dim, **fields)


def latent(**fields: Any) -> AttentionSpec:
    return spec(128, 576, 1, v_head_dim=512, shared_kv=True, **fields)


PREFIX = modifiers.prefix_lm(torch.zeros(4, dtype=torch.int32))
DOCUMENTS = modifiers.documents(torch.zeros(4, 64, dtype=torch.int32))
BIAS = torch.zeros(32)


@modifiers.score_mod
def bent(score: Any, batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
    return score * 0.5 + BIAS[head] * torch.tanh(k_pos * 0.01) - 0.001 * abs(q_pos - k_pos)


NO_DESCRIPTORS = dict.fromkeys(("sm_80", "gfx942", "gfx950"), "no tensor memory accelerator")
NO_TENSOR_MEMORY = dict.fromkeys(("sm_80", "sm_90", "sm_120", "gfx942", "gfx950"), "no tcgen05 matrix instructions")
QUANTISED = "Quantised caches"
MASKS, SHAPES, SCHEDULES, WRITERS = "Masks and scores", "Geometry and dtypes", "Ways to compute", "Writing the cache"


def _masks() -> list[Feature]:
    def row(name: str, cpu: str, interpreter: str, fields: dict[str, Any], **more: Any) -> Feature:
        return Feature(group=MASKS, name=name, cpu=(cpu,), interpreter=(interpreter,), spec=spec(**fields), **more)

    window_mod, both_ways = "test_a_prefix_is_seen_whole_and_the_rest_causally", {"causal": False}
    everything = {"window": 4096, "logit_softcap": 30.0, "alibi": True, "sinks": True, "scale": 0.3}
    score_test = "features.py::test_a_score_function_with_captured_tensors_of_every_kind[ragged]"
    tree_test = "features.py::test_a_tree_mask_says_which_of_this_steps_tokens_a_query_sees[1-causal]"
    tree_cpu = _CPU.format("masks", "test_tree_gives_the_reference_result_wherever_blocks_lie", "tree")
    return [
        row("causal", attention("llama"), interpreted("llama"), {}),
        row("sliding window", attention("window-100"), interpreted("window"), {"window": 4096}),
        row("chunked", masks("chunked"), family("chunked"), {"mask_mod": "chunked(8192)"}),
        row("logit soft cap", attention("softcap"), interpreted("softcap"), {"logit_softcap": 50.0}),
        row("ALiBi", attention("alibi"), interpreted("alibi"), {"alibi": True}),
        row("sinks", attention("sinks"), interpreted("sinks-splits"), {"sinks": True}),
        row("tree mask", tree_cpu, other(tree_test), {}, kinds=("ragged",), options={"tree": True}),
        row("bidirectional", attention("bidirectional"), interpreted("bidirectional"), both_ways),
        row("prefix-LM", masks("prefix"), other(f"features.py::{window_mod}"), {**both_ways, "mask_mod": PREFIX.name}),
        row("documents by captured boundaries", masks("documents"),
            other("features.py::test_documents_by_captured_boundaries_are_read_from_their_start[ragged]"),
            {"mask_mod": DOCUMENTS.name}),
        row("score function with a captured tensor", masks("score"), other(score_test), {"score_mod": bent.name}),
        row("other scale", attention("other-scale"), interpreted("everything"), {"scale": 0.3}),
        row("LSE output", attention("group-8"), interpreted("many-rows"), {}, options={"write_lse": True}),
        row("window, soft cap, ALiBi, sinks and scale at once", attention("avx2-fp32-everything"),
            interpreted("everything"), everything),
    ]  # fmt: skip


def _shapes() -> list[Feature]:
    def row(name: str, cpu: str, interpreter: str, shape: AttentionSpec, block: int = 16, **more: Any) -> Feature:
        return Feature(
            group=SHAPES, name=name, cpu=(cpu,), interpreter=(interpreter,), spec=shape, block_size=block, **more
        )

    def wide(name: str, group: int, dim: int, block: int) -> Feature:
        return row(f"head dim {dim}, {group} heads a group, blocks of {block}", attention(name), interpreted(name),
                   spec(group, dim, 1), block)  # fmt: skip

    far = "test_blocks_past_two_billion_elements_are_found"
    return [
        row("head dim 64, 1 head a group, blocks of 1", attention("mha-block-1"), interpreted("mha-block-1"),
            spec(1, 64), 1),
        row("head dim 96, 8 heads a group, blocks of 24", quantised("e4m3-token"), interpreted("group-8-block-24"),
            spec(8, 96), 24),
        row("head dim 80, 7 heads a group, blocks of 8", attention("group-7"), interpreted("group-7"), spec(7, 80), 8),
        row("head dim 56, 2 heads a group, blocks of 528", attention("block-528"), interpreted("block-528"),
            spec(2, 56), 528),
        row("head dim 100, blocks of 24", attention("odd-head"), interpreted("odd-head"), spec(1, 100), 24),
        wide("group-29", 29, 112, 272),
        wide("group-6", 6, 160, 784),
        wide("group-9", 9, 224, 544),
        wide("group-5", 5, 192, 1056),
        row("head dim 80, 12 heads a group, blocks of 2048", attention("group-12"), interpreted("group-12"),
            spec(12, 80), 2048),
        row("48 heads a group", attention("group-48"), interpreted("group-48"), spec(48, 128, 1)),
        row("71 heads a group (multi-query)", attention("group-71"), interpreted("group-71"), spec(71, 64, 1)),
        row("head dim 32, 128 heads a group", attention("group-128"), interpreted("group-128"), spec(128, 32, 1)),
        row("head dim 256", attention("wide-head"), interpreted("wide-head"), spec(4, 256)),
        row("values narrower than keys (192/128)", attention("narrow-values"), family("pieces-192-128"),
            spec(1, 192, 16, v_head_dim=128)),
        row("latent cache (MLA 576/512, 128 heads)", quantised("latent"), family("latent-576"), latent(), 64),
        row("float16", attention("fp16"), interpreted("group-16"), spec(q_dtype="float16")),
        row("float32", attention("fp32"), interpreted("softcap"), spec(q_dtype="float32")),
        row("queries of another dtype than the cache", attention("bf16-over-fp32"), interpreted("mixed-dtypes"),
            spec(kv_dtype="float16")),
        row("caches beyond 2^31 elements", _CPU.format("addresses", far, "bf16-4564-1435968-192-64"),
            other(f"features.py::{far}[chunked-ragged]"), spec(), options={"wide": True}),
    ]  # fmt: skip


def _quantised() -> list[Feature]:
    def row(
        name: str, kv_dtype: str, granularity: str, cpu: tuple[str, ...], interpreter: tuple[str, ...], **fields: Any
    ) -> Feature:
        return Feature(
            group=QUANTISED, name=name, cpu=tuple(map(quantised, cpu)), interpreter=interpreter,
            spec=spec(kv_dtype=kv_dtype, kv_scale_granularity=granularity, **fields),
        )  # fmt: skip

    head, token = "a scale a tensor or head", "a scale a token and head"
    e4m3, e5m2, zeros = "float8_e4m3fn", "float8_e5m2", {"kv_zero_points": True}
    bits = "features.py::test_bits_decode_as_the_hardware_would[{}]"
    shared = latent(kv_dtype=e4m3, kv_scale_granularity="tensor")
    return [
        row(f"float8 e4m3, {head}", e4m3, "head", ("e4m3-tensor", "e4m3-head"),
            (family("e4m3"), family("e4m3-head-bf16"), other(bits.format(e4m3)))),
        row(f"float8 e4m3, {token}", e4m3, "token_head", ("e4m3-token",), (family("latent-e4m3"),)),
        row(f"float8 e5m2, {head}", e5m2, "head", ("e5m2-everything",),
            (family("e5m2-sinks"), other(bits.format(e5m2)))),
        row(f"float8 e5m2, {token}", e5m2, "token_head", ("e5m2-token",), (family("e5m2-token"),)),
        row(f"int8, {head}", "int8", "head", ("int8-tensor",), (family("int8-head"),)),
        row(f"int8, {token}", "int8", "token_head", ("int8-token",), (family("int8-token"),)),
        row("int8, zero points", "int8", "token_head", ("int8-zero",), (family("int8-zeros"),), **zeros),
        row(f"int4, {head}", "int4", "head", ("int4-tensor", "int4-odd"), (family("int4-head"),)),
        row(f"int4, {token}", "int4", "token_head", ("int4-token",), (family("int4-token"),)),
        row("int4, zero points", "int4", "token_head", ("int4-zero",), (family("int4-zeros-window"),), **zeros),
        row("sinks over a quantised cache", "int4", "token_head", ("int4-fp32-sinks",), (family("e5m2-sinks"),),
            sinks=True),
        Feature(group=QUANTISED, name="latent cache in float8 e4m3", cpu=(quantised("latent-e4m3"),),
                interpreter=(family("latent-e4m3"),), spec=shared, block_size=64),
    ]  # fmt: skip


def _schedules() -> list[Feature]:
    def row(name: str, interpreter: str, changes: dict[str, Any], shape: AttentionSpec | None = None,
            cpu: str = "llama", **more: Any) -> Feature:  # fmt: skip
        return Feature(group=SCHEDULES, name=name, cpu=(attention(cpu),), interpreter=(interpreter,),
                       spec=shape or spec(), changes=changes, **more)  # fmt: skip

    fma = {"dot": "fma", "page_walk": "pages_in_tile", "num_stages": 2}
    descriptors = {"loads": "descriptor", "page_walk": "tile_in_page"}
    return [
        row("head in pieces (80 = 64 + 16)", family("pieces-80"), {"head_pieces": "split"}, spec(2, 80), "group-7"),
        row("head padded (80 in 128)", interpreted("group-7"), {"head_pieces": "padded"}, spec(2, 80), "group-7"),
        row("multiply-adds for one row", family("fma-group-1"), {**fma, "tile_rows": 1, "tile_kv": 32},
            spec(1, 64), "smollm", kinds=("decode",)),
        row("multiply-adds for four rows", family("fma-group-3"), {**fma, "tile_rows": 4, "tile_kv": 16},
            kinds=("decode",)),
        row("loads by tensor descriptor", family("descriptors"), descriptors, block_size=64, absent=NO_DESCRIPTORS),
        row("reduction by the last to finish", family("last-to-finish"), {"reduce": "last", "num_splits": 8}),
        row("splits of fixed size", family("split-tokens"), {"split_tokens": 512, "num_splits": 1}),
        row("balanced work list (stream-K)", family("balanced"), {"programs": 264, "num_splits": 1}),
        row("warp specialisation", family("warp-specialised"),
            {**descriptors, "warp_specialize": True, "tile_kv": 128, "num_warps": 8, "num_stages": 2},
            block_size=128, kinds=("ragged",), absent=NO_TENSOR_MEMORY),
        row("batch-invariant", family("invariant"), {}, spec(batch_invariant=True)),
        Feature(group=SCHEDULES, name="shared prefix (cascade)", kinds=("ragged",), spec=prefix_spec(spec()),
                options={"write_lse": True},
                cpu=("tests/kernels/test_cascade.py::test_a_cascade_is_the_flat_result_for_several_groups_and_"
                     "sequences_in_none[decode-bfloat16]",),
                interpreter=(other("cascade.py::test_both_passes_run_on_the_triton_kernels[decode-{}]"),)),
    ]  # fmt: skip


def _writers() -> list[WriterFeature]:
    def row(name: str, cpu: str, interpreter: str, **fields: Any) -> WriterFeature:
        return WriterFeature(group=WRITERS, name=name, cpu=(f"tests/kernels/test_cpu_cache_ops.py::{cpu}",),
                             interpreter=(other(f"cache_ops.py::{interpreter}"),), fields=fields)  # fmt: skip

    written = "test_each_token_is_stored_at_its_slot_as_the_reference_rounds_it_and_nothing_elsewhere[{}]"
    stored = "test_write_kv_stores_what_the_reference_rounds_and_nothing_elsewhere[bfloat16-{}]"
    rope = "test_rope_write_kv_has_the_bits_of_torch_s_operators[{}]"
    rotated = {"num_q_heads": 32, "rotary_half": 64}
    float8, zeros = torch.float8_e4m3fn, {"scaled": True, "zero_points": True}
    return [
        row("write_kv, bfloat16", written.format("bfloat16-bfloat16-none"), stored.format("bfloat16-plain"),
            stored=torch.bfloat16),
        row("write_kv, float8 e4m3", written.format("bfloat16-float8_e4m3fn-head"),
            stored.format("float8_e4m3fn-scaled"), stored=float8, scaled=True),
        row("write_kv, float8 e5m2", written.format("bfloat16-float8_e5m2-head"), stored.format("float8_e5m2-scaled"),
            stored=torch.float8_e5m2, scaled=True),
        row("write_kv, int8", written.format("bfloat16-int8-token and head"), stored.format("int8-scaled"),
            stored=torch.int8, **zeros),
        row("write_kv, int4", written.format("bfloat16-int4-token and head"), stored.format("int4-scaled"),
            stored=INT4, **zeros),
        row("rope_write_kv, halves (NeoX)", f"{_ROUND_TRIP}[halves-bfloat16]", rope.format("bfloat16-halves"),
            stored=torch.bfloat16, **rotated),
        row("rope_write_kv, interleaved, float8 e4m3", f"{_ROUND_TRIP}[interleaved-float8_e4m3fn]",
            rope.format("float8_e4m3fn-interleaved"), stored=float8, scaled=True, interleaved=True, **rotated),
        row("rope_write_kv, latent cache", "test_without_values_only_keys_are_written[bfloat16]",
            "test_keys_alone_are_rotated_and_written[10]", stored=torch.bfloat16, num_kv_heads=1, head_dim=576,
            v_head_dim=0, num_q_heads=128, rotary_half=32),
    ]  # fmt: skip


FEATURES: tuple[Feature | WriterFeature, ...] = (
    *_masks(), *_shapes(), *_quantised(), *_schedules(), *_writers()
)  # fmt: skip
