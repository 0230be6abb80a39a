"""Score and mask functions: what is captured, how they are named, what tracing makes of them, which keys they touch."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import subprocess
import sys
import weakref
from typing import Any

import hypothesis
import hypothesis.strategies as st
import modifier_texts
import pytest
import sympy
import torch
from torch import Tensor

import pagegen
from pagegen import modifiers
from pagegen.modifiers import Capture, Untraceable, mask_range, print_triton, trace

LENGTHS = torch.tensor([3, 7], dtype=torch.int32)
SLOPES = torch.tensor([0.5, 0.25, 0.125])
STARTS = torch.tensor([[0, 0, 0, 3, 3, 3, 6, 6]])
FLAGS = torch.tensor([True, False])
NUMBER = 5
HALF = torch.ones(4, dtype=torch.float16)


def mask(function: Any) -> modifiers.Modifier:
    return pagegen.mask_mod(function)


def score(function: Any) -> modifiers.Modifier:
    return pagegen.score_mod(function)


def test_captured_tensors_are_found_by_name_in_the_order_in_which_they_are_read() -> None:
    alone = torch.zeros(2, 3, 4)

    @pagegen.score_mod
    def function(score: Any, batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
        return torch.where(FLAGS[batch], score * SLOPES[head], alone[batch, head, 0]) + LENGTHS[batch] + NUMBER

    assert list(function.tensors) == ["FLAGS", "SLOPES", "alone", "LENGTHS"]
    assert function.tensors["alone"] is alone
    assert function.captures[2:] == (Capture("alone", 3, torch.float32), Capture("LENGTHS", 1, torch.int32))
    assert trace(function).captures == function.captures


def test_a_function_may_call_others_and_captures_what_they_do() -> None:
    def factory(lengths: Tensor) -> Any:
        return lambda batch, k_pos: k_pos < lengths[batch]

    first, second = factory(torch.tensor([1, 2])), factory(torch.tensor([3, 4]))
    causal = modifiers.causal()
    both = mask(lambda b, h, q, k: (first(b, k) | second(b, k)) & causal(b, h, q, k))
    assert list(both.tensors) == ["lengths", "lengths_2"]
    places = both.bound([torch.tensor([0, 9]), torch.tensor([4, 0])])
    assert [bool(places(b, 0, torch.tensor(8), torch.tensor(3))) for b in (0, 1)] == [True, True]
    assert not bool(places(0, 0, torch.tensor(8), torch.tensor(4)))


def test_the_functions_own_cells_and_globals_are_left_alone() -> None:
    function = mask(lambda b, h, q, k: k < LENGTHS[b])
    trace(function)
    function.bound([torch.tensor([9, 9])])
    assert function.function.__globals__["LENGTHS"] is LENGTHS
    assert bool(function(0, 0, torch.tensor(0), torch.tensor(2)))


@pytest.mark.parametrize(
    ("tensor", "error", "message"),
    [
        (
            torch.zeros(3, dtype=torch.float16),
            TypeError,
            "captured tensor wrong must be one of float32, int32, int64, bool",
        ),
        (torch.tensor(3), ValueError, "captured tensor wrong must have 1 to 3 dimensions, got 0"),
        (torch.zeros(2, 2, 2, 2), ValueError, "captured tensor wrong must have 1 to 3 dimensions, got 4"),
        (torch.zeros(4, 4).t(), ValueError, r"captured tensor wrong must be contiguous, got strides \(1, 4\)"),
        (torch.zeros(0), ValueError, r"captured tensor wrong must have elements, got shape \[0\]"),
    ],
)
def test_a_tensor_that_no_kernel_takes_is_refused_by_name(tensor: Tensor, error: type, message: str) -> None:
    wrong = tensor
    if wrong.dim() == 2:
        assert not wrong.is_contiguous()
    with pytest.raises(error, match=message):
        mask(lambda b, h, q, k: k < wrong[b])


def test_what_cannot_be_traced_is_refused_with_the_reason() -> None:
    class Holder:
        lengths = LENGTHS

    def decides(b: Any, h: Any, q: Any, k: Any) -> Any:
        return k if k > q else q

    sum_ = "sum"
    cases: list[tuple[Any, str]] = [
        (decides, r"decides in Python .*\(if, and, or, not, .*: use & \| ~, torch.where"),
        (lambda b, h, q, k: (k > q) and (k > 3), "decides in Python"),
        (lambda b, h, q, k: 0 <= k < q, "a chained comparison"),
        (lambda b, h, q, k: max(k, q) > 3, "decides in Python"),
        (lambda b, h, q, k: torch.cumsum(k, 0) > 3, "torch's cumsum of a symbolic value has no expression"),
        (lambda b, h, q, k: getattr(k, sum_)() > 3, "torch's sum of a symbolic value has no expression"),
        (lambda b, h, q, k: k.half() > 3, "torch's half of a symbolic value has no expression"),
        (lambda b, h, q, k: k.to(torch.float16) > 3, "converts to torch.float16"),
        (lambda b, h, q, k: Holder.lengths[b] > k, "reads a tensor that it did not capture by name"),
        (lambda b, h, q, k: LENGTHS + k > 3, "captured tensor LENGTHS needs 1 indices"),
        (lambda b, h, q, k: LENGTHS.sum() > k, "captured tensor LENGTHS can only be indexed, got .sum"),
        (lambda b, h, q, k: torch.amax(LENGTHS) > k, "can only be indexed with all its dimensions, got torch's amax"),
        (lambda b, h, q, k: STARTS[b] > k, "StandIn|needs 2 indices"),
        (lambda b, h, q, k: LENGTHS[b, h] > k, "captured tensor LENGTHS has 1 dimensions, got 2 indices"),
        (lambda b, h, q, k: STARTS[q][k] > k, "captured tensor STARTS must be indexed in all its dimensions at once"),
        (lambda b, h, q, k: LENGTHS[:2][b] > k, "must be indexed with integers"),
        (lambda b, h, q, k: LENGTHS[-1] > k, "no negative constants"),
        (lambda b, h, q, k: LENGTHS[k / 2] > k, "must be indexed with integers .* got k_pos/2"),
        (lambda b, h, q, k: k, "a mask function must return a condition, got k_pos"),
        (lambda b, h, q, k: k & 1, "uses the number k_pos as a condition"),
        (lambda b, h, q, k: k // 0 > 1, "divides by zero"),
        (lambda b, h, q, k: k**q > 1, "raises k_pos to q_pos: one must be a constant"),
        (lambda b, h, q, k: k > float("nan"), "computes with NaN"),
        (lambda b, h, q, k: "keys", "computes with a str"),
        (lambda b, h, q, k: range(5)[k], "cannot be traced: TypeError"),
    ]
    for function, message in cases:
        with pytest.raises(Untraceable, match=message):
            trace(mask(function))
    with pytest.raises(Untraceable, match="a score function must return a number"):
        trace(score(lambda s, b, h, q, k: s > 0))
    assert issubclass(Untraceable, TypeError)


def test_two_functions_of_one_name_are_told_apart_and_equal_ones_are_not() -> None:
    def factory(size: int, step: Any = 1) -> modifiers.Modifier:
        def local(batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
            return k_pos < size * step

        return mask(local)

    assert factory(3).name.endswith("local(size=3, step=1)")
    assert factory(3) == factory(3)
    assert factory(3, True).name != factory(3, 1).name
    assert factory(4) != factory(3)
    hidden = [factory(3, step) for step in ([1], [2])]  # a list has no name: told apart by identity
    assert hidden[0].name != hidden[1].name
    redefined = [mask(eval(f"lambda b, h, q, k: k < {n}")) for n in (1, 2, 1)]  # noqa: S307
    assert redefined[0] == redefined[2]
    assert redefined[1].name == redefined[0].name + "#2" or redefined[1].name != redefined[0].name
    with pytest.raises(TypeError, match="a mask_mod must be a plain function, got the mask modifier"):
        mask(redefined[0])


def test_a_traced_function_keeps_only_the_tensors_that_it_was_last_made_with() -> None:
    references = []
    for _ in range(3):
        lengths = torch.tensor([1, 2, 3], dtype=torch.int32)
        trace(modifiers.prefix_lm(lengths))
        references.append(weakref.ref(lengths))
    del lengths
    gc.collect()
    assert [reference() is None for reference in references] == [True, True, False]


def test_functions_of_other_packages_are_not_searched_for_tensors() -> None:
    def library_function(k: Any) -> Any:
        return k < HALF[0]

    library_function.__module__ = "somebody.else"
    scope = {"library_function": library_function}
    exec("def function(b, h, q, k):\n    return library_function(k)", scope)  # noqa: S102
    scope["function"].__module__ = __name__  # type: ignore[attr-defined]
    assert mask(scope["function"]).captures == ()


def test_a_number_counts_as_it_was_when_the_function_was_registered() -> None:
    scope: dict[str, Any] = {"LIMIT": 5}
    exec("def function(b, h, q, k):\n    return k < LIMIT", scope)  # noqa: S102
    function = mask(scope["function"])
    scope["LIMIT"] = 7
    assert str(trace(function).expression) == "k_pos < 5"
    assert not bool(function.over()(0, 0, torch.tensor(0), torch.tensor(6)))


# Terms whose order could follow a hash.
MANY_TERMS = """
from pagegen import modifiers as m
mod = m.mask_mod(lambda b, h, q, k: ((k <= q) | (k < 7) | (h > 2) | (b == 1) | (q % 5 == k % 3)) & ((k > 3) | (q > 2)))
print(m.print_triton(m.trace(mod)), m.mask_range(m.trace(mod).expression))
"""


def test_shipped_functions_are_found_by_name_in_a_fresh_process_and_print_the_same_text_there() -> None:
    code = f"""
import sys
from pagegen import modifiers as m
for name in ("chunked(8192)", "sliding_window(7)", "causal()", "soft_cap(30.0)"):
    traced = m.trace(m.find(name, "score" if "cap" in name else "mask"))
    print(name, m.print_triton(traced), m.print_cpp(traced), sep=" | ")
{MANY_TERMS}
for name, kind in (("documents(int32, int32)", "mask"), ("alibi(float32)", "score")):
    try:
        m.find(name, kind)
    except ValueError as error:
        print(error)
"""
    env = {**os.environ, "PYTHONHASHSEED": "77"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    with contextlib.redirect_stdout(io.StringIO()) as here:  # under another hash seed, a random one or 0
        exec(MANY_TERMS, {})
    assert lines[4] == here.getvalue().strip()
    assert lines[5:] == [
        "mask_mod must be made with pagegen.modifiers.documents in this process, "
        "got the name 'documents(int32, int32)' alone",
        "score_mod must be made with pagegen.modifiers.alibi in this process, got the name 'alibi(float32)' alone",
    ]
    assert lines[:4] == [
        "chunked(8192) | k_pos // 8192 == floor_div(q_pos, 8192) | k_pos / 8192 == floor_div(q_pos, 8192)",
        "sliding_window(7) | k_pos > q_pos - 7 | k_pos > q_pos - 7",
        "causal() | k_pos <= q_pos | k_pos <= q_pos",
        "soft_cap(30.0) | 30.0 * tanh(0.03333333333333333 * score) | 30.0f * std::tanh(0.03333333333333333f * score)",
    ]


@pytest.mark.parametrize(
    "name", ["chunked(0)", "chunked(08)", "chunked(8.0)", "chunked()", "causal(1)", "soft_cap(30)", "soft_cap(-1.0)",
             "chunked(8) ", "nobody(3)", ""],
)  # fmt: skip
def test_a_name_that_is_not_canonical_is_unknown(name: str) -> None:
    with pytest.raises(ValueError, match=r"mask_mod must (be a function decorated with @pagegen|name a modifier)"):
        modifiers.find(name, "mask")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("chunked(0)", "size must be at least 1, got 0"),
        ("sliding_window(4.5)", "size must be an integer, got float 4.5"),
        ("soft_cap(-1.0)", "cap must be positive, got -1.0"),
    ],
)
def test_a_name_with_a_number_that_cannot_be_says_what_is_wrong_with_it(name: str, reason: str) -> None:
    kind = "score" if "cap" in name else "mask"
    with pytest.raises(ValueError, match=rf"{kind}_mod must name a modifier as its maker does, got .*: {reason}"):
        modifiers.find(name, kind)


def test_shipped_functions_refuse_bad_numbers_and_tensors() -> None:
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        modifiers.chunked(0)
    with pytest.raises(TypeError, match="size must be an integer, got float"):
        modifiers.sliding_window(4.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cap must be positive"):
        modifiers.soft_cap(-3.0)
    with pytest.raises(ValueError, match=r"slopes must be float32 \[num_q_heads\], got int64 \[4\]"):
        modifiers.alibi(torch.arange(4))
    with pytest.raises(ValueError, match=r"starts must be int32 or int64 \[num_seqs, positions\], got int32 \[2\]"):
        modifiers.documents(LENGTHS)
    with pytest.raises(TypeError, match="prefix_lengths must be a Tensor, got list"):
        modifiers.prefix_lm([1, 2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mask_mod must be a mask function, got the score function soft_cap"):
        modifiers.find("soft_cap(30.0)", "mask")


RANGES = {
    "causal": (lambda b, h, q, k: k <= q, "None", "q_pos + 1"),
    "window": (lambda b, h, q, k: q - k < 7, "q_pos - 6", "None"),
    "chunk": (lambda b, h, q, k: q // 8 == k // 8, "8*floor(q_pos/8)", "8*floor(q_pos/8) + 8"),
    "chunk_and_window": (
        lambda b, h, q, k: (q // 8 == k // 8) & (k <= q) & (k > q - 3),
        "Max(q_pos - 2, 8*floor(q_pos/8))",
        "Min(q_pos + 1, 8*floor(q_pos/8) + 8)",
    ),
    "prefix": (lambda b, h, q, k: (k <= q) | (k < LENGTHS[b]), "None", "Max(q_pos + 1, LENGTHS(batch))"),
    "document": (lambda b, h, q, k: (k >= STARTS[b, q]) & (k <= q), "STARTS(batch, q_pos)", "q_pos + 1"),
    "sink_or_window": (lambda b, h, q, k: (k < 4) | (k > q - 9), "None", "None"),
    "distance": (lambda b, h, q, k: (q - k).abs() <= 2, "q_pos - 2", "q_pos + 3"),
    "negated": (lambda b, h, q, k: ~((k > q) | (k < q - 3)), "q_pos - 3", "q_pos + 1"),
    "scaled": (lambda b, h, q, k: 3 * k < q, "None", "floor(q_pos/3 - 1/3) + 1"),
    "never": (lambda b, h, q, k: k < 0, "0", "0"),
    "always": (lambda b, h, q, k: k >= 0, "None", "None"),
    "pattern": (lambda b, h, q, k: (k % 4 == 0) & (k <= q), "None", "q_pos + 1"),
    "float": (lambda b, h, q, k: k * 0.1 <= q, "None", "None"),
    "float_tensor": (lambda b, h, q, k: k < SLOPES[h], "None", "None"),
    "heads_only": (lambda b, h, q, k: h > 3, "None", "None"),
    "same_document": (lambda b, h, q, k: STARTS[b, q] == STARTS[b, k], "None", "None"),
    "nested_division": (lambda b, h, q, k: (k // 2 + 1) // 3 <= 4, "None", "28"),
}


@pytest.mark.parametrize("name", RANGES)
def test_the_range_of_keys_is_derived(name: str) -> None:
    function, low, high = RANGES[name]
    found = mask_range(trace(mask(function)).expression)
    assert tuple(map(str, found)) == (low, high)


def test_a_limit_of_the_largest_integer_is_no_limit() -> None:
    limits = torch.tensor([2**31 - 1, 3], dtype=torch.int32)
    modifier = mask(lambda b, h, q, k: (k <= limits[b]) & (k // 4 <= limits[b]))
    low, high = mask_range(trace(modifier).expression)
    assert low is None
    text = print_triton(high, "mask")
    assert ".to(tl.int64) + 1" in text
    assert modifier_texts.evaluate_triton(text, modifier, {"batch": torch.tensor([0, 1])}).tolist() == [2**31, 4]


def conditions() -> st.SearchStrategy[str]:
    """Texts of conditions over b, h, q, k and captured tensors."""
    number = st.integers(-9, 9).map(str)
    terms = st.sampled_from(
        ["q", "k", "k", "k", "q // 4", "k // 3", "(k + 2) // 5", "(k - q) // 2", "(q - k).abs()", "LENGTHS[b]", "h"]
        + ["STARTS[b, q]", "k % 3", "(k // 2) // 3", "(-k) // 4", "SLOPES[h]", "(k // 2 + 1) // 3", "(2 * k - 1) // 3"]
    )
    scaled = st.builds("({} * {})".format, st.integers(-3, 3), terms)
    side = st.lists(st.one_of(terms, scaled, number), min_size=1, max_size=3).map(" + ".join)
    compared = st.builds(
        "((0 * k + {}) {} ({}))".format, side, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), side
    )
    flags = st.sampled_from(["FLAGS[b]", "(h > 1)"])
    return st.recursive(
        st.one_of(compared, compared, compared, flags),
        lambda inner: st.one_of(
            st.builds("({} & {})".format, inner, inner),
            st.builds("({} | {})".format, inner, inner),
            st.builds("(~{})".format, inner),
            st.builds("torch.where({}, {}, {})".format, inner, inner, inner),
            st.builds("({} ^ {})".format, inner, inner),
        ),
        max_leaves=5,
    )


GRID = dict(
    zip(
        ("batch", "head", "q_pos", "k_pos"),
        torch.meshgrid(*map(torch.arange, (2, 3)), torch.arange(-4, 15), torch.arange(19), indexing="ij"),
        strict=True,
    )
)
ON_GRID = {name: values.to(torch.int32) for name, values in GRID.items()}


@hypothesis.settings(max_examples=hypothesis.settings.default.max_examples, deadline=None, derandomize=True)
@hypothesis.given(conditions())
def test_no_key_outside_of_the_range_is_ever_let_through_and_the_printed_mask_is_the_mask(text: str) -> None:
    modifier = mask(eval(f"lambda b, h, q, k: {text}", globals()))  # noqa: S307
    traced = trace(modifier)
    allowed = torch.as_tensor(modifier.over()(*ON_GRID.values())).expand(2, 3, 19, 19)
    printed = modifier_texts.evaluate_triton(print_triton(traced), modifier, ON_GRID)
    assert torch.equal(torch.as_tensor(printed).expand(2, 3, 19, 19), allowed)
    for bound, outside in zip(mask_range(traced.expression), (torch.lt, torch.ge), strict=True):
        if bound is not None:
            assert not bound.has(sympy.Symbol("k_pos", integer=True, nonnegative=True))
            edge = modifier_texts.evaluate_triton(print_triton(bound, "mask"), modifier, ON_GRID)
            assert not (allowed & outside(ON_GRID["k_pos"], edge)).any(), str(bound)


def operands(lengths: tuple[int, ...], queries: tuple[int, ...]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return {
        "q": torch.randn(sum(queries), 3, 8, generator=generator),
        "k_cache": torch.randn(12, 4, 1, 8, generator=generator),
        "v_cache": torch.randn(12, 4, 1, 8, generator=generator),
        "block_table": torch.randperm(12, generator=generator, dtype=torch.int32).reshape(2, 6)[: len(lengths)],
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "query_start_loc": starts,
    }


@pytest.mark.parametrize("lengths", [(9, 22), (3, 4), (1, 0)])
def test_the_named_features_are_the_same_as_modifiers(lengths: tuple[int, int]) -> None:
    given = operands(lengths, (2 if lengths[0] > 1 else 1, 4 if lengths[1] else 0))
    attend: Any = pagegen.reference_attention
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"causal": True}, {"causal": False, "mask_mod": modifiers.causal()}),
        ({"window": 3}, {"mask_mod": modifiers.sliding_window(3)}),
        ({"logit_softcap": 0.7}, {"score_mod": modifiers.soft_cap(0.7)}),
        ({"alibi_slopes": SLOPES}, {"score_mod": modifiers.alibi(SLOPES)}),
        (
            {"window": 5, "logit_softcap": 2.0, "causal": False},
            {"mask_mod": modifiers.sliding_window(5), "score_mod": modifiers.soft_cap(2.0), "causal": False},
        ),
    ]
    for options, modified in pairs:
        expected, lse = attend(**given, **options, return_lse=True)
        out, out_lse = attend(**given, **modified, return_lse=True)
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(out_lse, lse, rtol=1e-6, atol=1e-6)


def test_chunked_attention_is_attention_over_the_keys_of_the_chunk_alone() -> None:
    given = operands((22,), (22,))
    out: Any = pagegen.reference_attention(**given, mask_mod="chunked(8)")
    parts = []
    for first in (0, 8, 16):
        size = min(8, 22 - first)
        part = operands((22,), (22,)) | {
            "q": given["q"][first : first + size],
            "block_table": given["block_table"][:, first // 4 :],
            "seq_lens": torch.tensor([size], dtype=torch.int32),
            "query_start_loc": torch.tensor([0, size], dtype=torch.int32),
        }
        parts.append(pagegen.reference_attention(**part))
    torch.testing.assert_close(out, torch.cat(parts), rtol=1e-6, atol=1e-6)


def test_documents_and_prefixes_let_through_what_they_say() -> None:
    q_pos, k_pos = torch.arange(8)[:, None], torch.arange(8)[None, :]
    ends = torch.tensor([[3, 3, 3, 6, 6, 6, 8, 8]])
    owner = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
    same = owner[:, None] == owner[None, :]
    assert torch.equal(modifiers.documents(STARTS).over()(0, 0, q_pos, k_pos), same & (k_pos <= q_pos))
    assert torch.equal(modifiers.documents(STARTS, ends).over()(0, 0, q_pos, k_pos), same)
    prefix = modifiers.prefix_lm(LENGTHS).over()(0, 0, q_pos, k_pos)
    assert torch.equal(prefix, (k_pos <= q_pos) | (k_pos < 3))
