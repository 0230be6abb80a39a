"""Who may attend what in the C++ kernels: trees, score and mask functions, and the keys that a mask rules out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import Range, compare
from cpu_cases import DECODE, HASWELL, LONG, PORTABLE, RAGGED, SHORT, TOKENS, Case, check, prebuild, run, same_bits

from pagegen import modifiers, targets
from pagegen.codegen import cpp_modifiers, traced
from pagegen.modifiers import mask_mod, score_mod
from pagegen.spec import Target
from pagegen.targets import cpu

TREES = [(70, 20), (33, 1), (5, 5), (310, 9), (129, 40), (3, 7), (64, 2)]
POSITIONS = 320
GENERATOR = torch.Generator().manual_seed(3)
BIAS = torch.randn(24, generator=GENERATOR)
TABLE = torch.randn(4, 50, generator=GENERATOR)
PREFIXES = torch.tensor([10, 0, 40, 150, 3, 300, 64], dtype=torch.int32)
OPEN = torch.rand(7, generator=GENERATOR) < 0.5


def document_bounds() -> tuple[torch.Tensor, torch.Tensor]:
    """For each of 7 sequences and each position where its document begins and ends."""
    starts, ends = torch.zeros(7, POSITIONS, dtype=torch.int32), torch.zeros(7, POSITIONS, dtype=torch.int64)
    for s in range(7):
        cuts = sorted({0, POSITIONS, *torch.randint(1, POSITIONS, (5,), generator=GENERATOR).tolist()})
        for low, high in zip(cuts, cuts[1:], strict=False):
            starts[s, low:high], ends[s, low:high] = low, high
    return starts, ends


STARTS, ENDS = document_bounds()


@score_mod
def bent(score: Any, batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
    return score * 0.5 + BIAS[head] * torch.tanh(k_pos * 0.01) - 0.001 * abs(q_pos - k_pos)


@score_mod
def past_its_table(score: Any, batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
    return score + TABLE[head, k_pos - 10]  # both ends of the table are left


@score_mod
def shut_by_score(score: Any, batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
    return torch.where((k_pos % 3 == 1) | (q_pos == 36), -float("inf"), score)


@mask_mod
def scattered(batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
    """Queries that stand side by side attend keys far apart."""
    return (k_pos >= q_pos * 119 % 300) & (k_pos < q_pos * 119 % 300 + 20)


@mask_mod
def by_head(batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
    return (k_pos > q_pos - 10 * (head + 1)) & ((q_pos + k_pos) % 3 != 0)


@mask_mod
def some_sequences(batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
    return OPEN[batch]


def chunk_of(size: int) -> Range:
    return lambda s, q_pos: (q_pos // size * size, (q_pos // size + 1) * size)


def document_of(s: int, q_pos: int) -> tuple[int, int]:
    place = max(q_pos, 0)
    return int(STARTS[s, place]), int(ENDS[s, place])


def prefix_of(s: int, q_pos: int) -> tuple[int, int]:
    return 0, max(q_pos + 1, int(PREFIXES[s]))


def mask(modifier: modifiers.Modifier, **fields: Any) -> dict[str, Any]:
    return {"mask_mod": modifier.name, **fields}


def score(modifier: modifiers.Modifier, **fields: Any) -> dict[str, Any]:
    return {"score_mod": modifier.name, **fields}


DOCUMENTS = modifiers.documents(STARTS)
WHOLE_DOCUMENTS = modifiers.documents(STARTS, ENDS)
PREFIX = modifiers.prefix_lm(PREFIXES)
QUANTISED = {"kv_dtype": "float8_e4m3fn", "kv_scale_granularity": "token_head"}

# The kernels whose mask bounds the keys, with these bounds once more as plain Python.
RANGED: list[tuple[Case, Range]] = [
    (Case("chunked", 4, 64, 16, fields=mask(modifiers.chunked(70))), chunk_of(70)),
    (Case("chunked-panel", 16, 64, 8, "HND", variant=SHORT, fields=mask(modifiers.chunked(24))), chunk_of(24)),
    (Case("chunked-portable", 2, 64, 16, machine=PORTABLE, fields=mask(modifiers.chunked(70)), nightly=True),
     chunk_of(70)),
    (Case("chunked-window", 4, 64, 16, fields=mask(modifiers.chunked(70), window=30), nightly=True), chunk_of(70)),
    (Case("documents", 4, 64, 16, fields=mask(DOCUMENTS)), document_of),
    (Case("documents-e4m3", 4, 64, 16, variant=SHORT, fields=mask(DOCUMENTS, **QUANTISED), nightly=True), document_of),
    (Case("documents-both-ways", 12, 64, 24, "HND", machine=HASWELL, fields=mask(WHOLE_DOCUMENTS, causal=False)),
     document_of),
    (Case("prefix", 4, 64, 16, dtype="float32", fields=mask(PREFIX, causal=False)), prefix_of),
]  # fmt: skip
CASES = [
    *(case for case, _ in RANGED),
    Case("scattered", 4, 64, 16, fields=mask(scattered)),
    Case("scattered-panel", 12, 64, 16, "pool", variant=SHORT, fields=mask(scattered, causal=False)),
    Case("by-head", 4, 64, 16, "HND", variant=SHORT, fields=mask(by_head)),
    Case("by-head-tokens", 4, 64, 16, variant=TOKENS, kv_heads=5, fields=mask(by_head)),
    Case("by-head-e4m3", 4, 64, 16, fields=mask(by_head, **QUANTISED), nightly=True),
    Case("some-sequences", 2, 64, 16, dtype="float32", fields=mask(some_sequences, sinks=True)),
    Case("score", 4, 64, 16, fields=score(bent)),
    Case("score-everything", 4, 64, 16, "pool", variant=SHORT,
         fields=score(bent, mask_mod=by_head.name, logit_softcap=20.0, alibi=True, window=90, sinks=True)),
    Case("past-its-table", 2, 64, 16, dtype="float32", fields=score(past_its_table)),
    Case("shut-by-score", 2, 64, 16, fields=score(shut_by_score)),
    Case("score-portable", 3, 64, 16, dtype="float32", machine=PORTABLE, fields=score(bent), nightly=True),
]  # fmt: skip
# A feature of the spec, and the same as a function.
PAIRS = [
    ("window", {"window": 50}, mask(modifiers.sliding_window(50)), LONG),
    ("causal", {}, mask(modifiers.causal(), causal=False), SHORT),
    ("softcap", {"logit_softcap": 20.0}, score(modifiers.soft_cap(20.0)), LONG),
    ("alibi", {"alibi": True}, score(modifiers.alibi(2.0 ** -(torch.arange(1, 9) * 1.0))), SHORT),
]
BY_DAY = ("window", "softcap")  # a mask and a score
PLAIN = [
    Case(f"{n}-field", 4, 64, 16, dtype="float32", variant=v, fields=field, nightly=n not in BY_DAY)
    for n, field, _, v in PAIRS
]
MODDED = [
    Case(f"{n}-function", 4, 64, 16, dtype="float32", variant=v, fields=mod, nightly=n not in BY_DAY)
    for n, _, mod, v in PAIRS
]
TREE_CASES = [
    Case("tree", 4, 64, 16, variant=SHORT),
    Case("tree-one-split", 1, 128, 16, "HND", kv_heads=3, nightly=True),
    Case("tree-tokens", 4, 64, 16, variant=TOKENS, kv_heads=5),
    Case("tree-panel", 16, 64, 24, "pool", dtype="float16"),
    Case("tree-window", 2, 64, 16, dtype="float32", fields={"window": 12, "sinks": True}),
    Case("tree-both-ways", 4, 64, 16, dtype="float32", fields={"causal": False}, nightly=True),
    Case("tree-both-ways-window", 12, 64, 16, variant=SHORT, fields={"causal": False, "window": 12}),
    Case("tree-chunked", 4, 64, 16, fields=mask(modifiers.chunked(70))),
    Case("tree-int4", 4, 64, 16,
         fields={"kv_dtype": "int4", "kv_scale_granularity": "token_head", "kv_zero_points": True}),
    Case("tree-latent", 16, 96, 16, kv_heads=1, fields={"v_head_dim": 64, "shared_kv": True}),
    Case("tree-avx2", 4, 64, 16, machine=HASWELL),
    Case("tree-portable", 4, 64, 16, machine=PORTABLE),
]  # fmt: skip
BY_NAME = {case.name: case for case in (*CASES, *PLAIN, *MODDED, *TREE_CASES)}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    prebuild(list(BY_NAME.values()))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel_with_functions_gives_the_reference_result_wherever_blocks_lie(case: Case) -> None:
    assert cpu.unsupported(case.spec) is None
    kernel = case.load()
    for sequences in (DECODE, RAGGED):
        batch = case.batch(sequences)
        result = check(kernel, batch)
        assert same_bits(result, run(kernel, batch.permuted()))


@pytest.mark.parametrize(("case", "mask_range"), RANGED, ids=lambda value: getattr(value, "name", ""))
@pytest.mark.parametrize(
    "sequences", [DECODE, RAGGED, [(310, 30), (250, 1), (200, 3)]], ids=["decode", "ragged", "few"]
)
def test_blocks_that_a_mask_rules_out_are_never_touched(
    case: Case, mask_range: Range, sequences: list[tuple[int, int]]
) -> None:
    batch = case.batch(sequences)
    poisoned = batch.poisoned_outside(mask_range)
    assert poisoned.block_table.lt(0).sum() > batch.block_table.lt(0).sum() or case.name == "prefix"
    out, lse = run(case.load(), poisoned)
    compare(out, lse, *batch.expected(), case.spec.q_dtype)


@pytest.mark.parametrize("name", ["scattered", "scattered-panel"])
@pytest.mark.parametrize("queries", [1, 2, 20])
def test_blocks_between_the_keys_of_neighbours_are_never_touched(name: str, queries: int) -> None:
    case = BY_NAME[name]
    batch = case.batch([(310, queries), (200, queries)])
    poisoned = batch.permuted(seed=2)
    for s, (length, count) in enumerate(batch.sequences):
        ranges = [(q * 119 % 300, q * 119 % 300 + 20) for q in range(length - count, length)]
        for i in range(case.layout.blocks_for(length)):
            first, last = i * case.block_size, (i + 1) * case.block_size
            if all(high <= first or low >= last for low, high in ranges):
                block = int(poisoned.block_table[s, i])
                poisoned.k_cache[block], poisoned.v_cache[block] = float("nan"), float("nan")  # type: ignore[index]
                poisoned.block_table[s, i] = 2**30
    out, lse = run(case.load(), poisoned)
    compare(out, lse, *batch.expected(), case.spec.q_dtype)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in BY_DAY else [pytest.mark.nightly]) for n, *_ in PAIRS]
)
def test_a_feature_as_a_function_gives_what_the_feature_gives(name: str) -> None:
    plain, modded = BY_NAME[f"{name}-field"], BY_NAME[f"{name}-function"]
    for sequences in (DECODE, RAGGED):
        batch = plain.batch(sequences)
        if batch.alibi_slopes is not None:
            batch.alibi_slopes[:] = 2.0 ** -(torch.arange(1, 9) * 1.0)
        expected = batch.expected()
        compare(*check(modded.load(), modded.batch(sequences)), *expected, torch.float32)
        compare(*run(plain.load(), batch), *expected, torch.float32)


def test_a_window_as_a_function_reads_the_blocks_that_the_window_reads() -> None:
    case = BY_NAME["window-function"]
    batch = case.batch([(310, 3), (300, 1), (200, 20)])
    out, lse = run(case.load(), batch.poisoned_outside(lambda s, q_pos: (q_pos - 49, q_pos + 1)))
    compare(out, lse, *batch.expected(), torch.float32)


@pytest.mark.parametrize("case", TREE_CASES, ids=lambda case: case.name)
def test_tree_gives_the_reference_result_wherever_blocks_lie(case: Case) -> None:
    kernel = case.load()
    for sequences in (TREES, RAGGED):
        batch = case.batch(sequences, tree=True)
        result = check(kernel, batch)
        assert same_bits(result, run(kernel, batch.permuted()))


def test_tree_of_all_earlier_tokens_is_plain_causal_attention_to_the_bit() -> None:
    case = BY_NAME["tree"]
    batch = case.batch(TREES, tree=True)
    assert batch.tree_mask is not None
    batch.tree_mask[:] = True
    call = batch.call()
    call.tree_mask = None
    case.load()(call)
    assert same_bits(run(case.load(), batch), (call.out, call.lse))  # type: ignore[arg-type]


def test_query_that_its_tree_shuts_off_sees_the_older_tokens_only() -> None:
    case = BY_NAME["tree-window"]
    batch = case.batch([(50, 6), (6, 6)], tree=True)
    assert batch.tree_mask is not None
    batch.tree_mask[:] = False
    out, lse = check(case.load(), batch)
    assert lse[:6].isfinite().all()
    assert torch.equal(out[6:12], torch.zeros_like(out[6:12]))
    assert batch.sinks is not None
    assert torch.equal(lse[6:12], batch.sinks.expand(6, -1))


def test_function_is_found_by_the_tensors_of_the_call_not_by_those_it_was_made_with() -> None:
    case = BY_NAME["chunked"]
    assert traced.captures(case.spec) == ()
    case = BY_NAME["past-its-table"]
    batch = case.batch(DECODE)
    call = batch.call()
    call.captures = (torch.zeros(4, 50),)
    case.load()(call)
    assert not torch.equal(call.out, run(case.load(), batch)[0])


def test_call_with_other_captures_is_refused_before_memory_is_touched() -> None:
    case = BY_NAME["past-its-table"]
    call = case.batch(DECODE).call()
    for captures in ((), (torch.zeros(4),), (torch.zeros(4, 50, dtype=torch.int32),)):
        call.captures = captures
        with pytest.raises(ValueError, match="the call must match the kernel"):
            case.load()(call)


def test_template_without_the_function_to_be_written_is_an_error() -> None:
    with pytest.raises(ValueError, match="a function mask in struct Modifiers"):
        cpp_modifiers.write("struct Captured {\n};\n", BY_NAME["chunked"].spec)


def test_a_function_without_an_expression_is_refused_with_its_name() -> None:
    @mask_mod
    def sorted_first(batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
        return torch.sort(k_pos)

    reason = targets.unsupported(BY_NAME["tree"].spec.replace(mask_mod=sorted_first.name), Target("cpu"))
    assert reason is not None
    assert "sorted_first" in reason
