"""Modifiers as text: what is printed, and that it computes what the function computes, in both languages."""

from __future__ import annotations

import ast
import random
import shutil
from pathlib import Path
from typing import Any

import modifier_texts
import pytest
import torch

import pagegen
from pagegen import modifiers
from pagegen.modifiers import mask_range, print_cpp, print_triton, trace

LENGTHS = torch.tensor([3, 7], dtype=torch.int32)
SLOPES = torch.tensor([0.5, 0.25, -0.125])
STARTS = torch.tensor([[0, 0, 0, 3, 3, 3, 6, 6], [0, 1, 2, 2, 2, 5, 5, 5]])
FLAGS = torch.tensor([True, False])
TABLE = torch.arange(24.0).reshape(2, 3, 4) / 8 - 1
INFINITY = float("inf")

MASKS: dict[str, Any] = {
    "chunk": lambda b, h, q, k: k // 4 == q // 4,
    "document": lambda b, h, q, k: (k >= STARTS[b, q]) & (k <= q),
    "prefix": lambda b, h, q, k: (k <= q) | (k < LENGTHS[b]),
    "flags": lambda b, h, q, k: FLAGS[b] & ~(k > q) | (h == 1),
    "every_third": lambda b, h, q, k: (q - k) % 3 == 0,
    "strided": lambda b, h, q, k: (k % 4 == 0) ^ (k > q - 3),
    "chosen": lambda b, h, q, k: torch.where(h > 1, k < 5, k >= q - 2),
    "negative_divisor": lambda b, h, q, k: k // -3 < (q - k) // 4 - 2,
    "head_limit": lambda b, h, q, k: q - k < 2 ** (h + 1),
    "always": lambda b, h, q, k: True,
    "ones": lambda b, h, q, k: torch.ones_like(k, dtype=torch.bool) & (k > 2) | torch.zeros_like(q).bool(),
    "first_sequence": lambda b, h, q, k: torch.where(b == 0, k < 4, k.ge(q - 3)),
    "never": lambda b, h, q, k: k < 0,
    "logical": lambda b, h, q, k: torch.logical_and(k > 2, torch.logical_not(torch.logical_or(q > 5, k == 4))),
}
SCORES: dict[str, Any] = {
    "alibi": lambda s, b, h, q, k: s + SLOPES[h] * (k - q),
    "cap": lambda s, b, h, q, k: 20 * torch.tanh(s / 20),
    "bias": lambda s, b, h, q, k: torch.where((q - k).abs() <= 3, s * 0.5 + TABLE[b, h, k], -INFINITY),
    "decay": lambda s, b, h, q, k: s - 2.0 ** (-8.0 * (h + 1) / 3) * (q - k),
    "activations": lambda s, b, h, q, k: torch.sigmoid(s / 3) + torch.exp2(s) - torch.exp(-s * s) + torch.erf(s),
    "roots": lambda s, b, h, q, k: torch.sqrt(k) + torch.rsqrt(s * s + 1) + (s * s + 1) ** 1.5 + torch.log(1 + k),
    "whole_powers": lambda s, b, h, q, k: s**5 + s**7.0 / 50 - 3 / s**5 + s**-7 + (k - q) ** 6 / 1e5 + (q - k) ** 3.0,
    "high_powers": lambda s, b, h, q, k: (s / 2) ** 17 + (s / 3) ** 20 + (s / 2) ** -19.0 / 1e9 + s**1.0,
    "waves": lambda s, b, h, q, k: torch.sin(s) * torch.cos(k - q),
    "extremes": lambda s, b, h, q, k: torch.minimum(torch.maximum(q - k, k), s) + torch.clamp(q, min=0) % LENGTHS[b],
    "quotients": lambda s, b, h, q, k: (k + 1) / 4 - 5 * k / 12 + 1 / (1 + k) - (q - k) ** 3 / 7 + s / (k + 2),
    "integers": lambda s, b, h, q, k: s + q // 3 - (q % 5) * (k // 2) * 3 - (-k) // 4 + (q - k) // (k + 1) - -k % 3,
    "rounding": lambda s, b, h, q, k: torch.floor(s) + torch.ceil(s * 3) - torch.trunc(s / 2) + (s * 4).int() % 3,
    "signs": lambda s, b, h, q, k: torch.sign(q - k) * s + (q > k) * 2 - (q > k).float() / 3 + abs(s),
    "methods": lambda s, b, h, q, k: s.clamp(min=-1.0, max=1.0).square() + (k - q).to(torch.float32).relu() * 0.1,
    "looked_up": lambda s, b, h, q, k: s * STARTS[b, LENGTHS[b]] + TABLE[b, h, (s * 2).floor().long()],
    "limited": lambda s, b, h, q, k: torch.maximum(torch.where(k > q, -INFINITY, s), torch.full_like(s, -1e4)),
    "constant": lambda s, b, h, q, k: 1.5,
    "large": lambda s, b, h, q, k: s + 3_000_000_000.0 * 1e-12 + 1e-7,
}


def made(kind: str) -> list[tuple[str, modifiers.Modifier]]:
    functions = MASKS if kind == "mask" else SCORES
    decorate: Any = getattr(pagegen, f"{kind}_mod")
    return [(name, decorate(function)) for name, function in functions.items()]


POINTS = [
    (dice.uniform(-4, 4), dice.randint(0, 1), dice.randint(0, 2), dice.randint(-5, 12), dice.randint(0, 9))
    for dice in map(random.Random, range(60))
]
COLUMNS = [torch.tensor(column) for column in zip(*POINTS, strict=True)]
VALUES = {
    "score": COLUMNS[0].float(),
    **dict(zip(("batch", "head", "q_pos", "k_pos"), (c.int() for c in COLUMNS[1:]), strict=True)),
}


def computed(modifier: modifiers.Modifier) -> torch.Tensor:
    """What the function itself computes at the points, in float64."""
    arguments = [VALUES[name] for name in ("batch", "head", "q_pos", "k_pos")]
    score = [VALUES["score"].double()] if modifier.kind == "score" else []
    return torch.as_tensor(modifier.over()(*score, *arguments)).double().expand(len(POINTS))


@pytest.mark.parametrize("kind", ["mask", "score"])
def test_printed_triton_is_one_python_expression_that_computes_what_the_function_does(kind: str) -> None:
    for name, modifier in made(kind):
        text = print_triton(trace(modifier))
        ast.parse(text, mode="eval")
        found = torch.as_tensor(modifier_texts.evaluate_triton(text, modifier, VALUES)).double().expand(len(POINTS))
        torch.testing.assert_close(found, computed(modifier), rtol=2e-5, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_printed_cpp_compiles_and_computes_what_the_function_does(tmp_path: Path) -> None:
    cases = [(name, modifier) for kind in ("mask", "score") for name, modifier in made(kind)]
    texts = [(modifier, print_cpp(trace(modifier))) for _, modifier in cases]
    bounds = [
        (modifier, bound)
        for _, modifier in cases
        if modifier.kind == "mask"
        for bound in mask_range(trace(modifier).expression)
        if bound is not None
    ]
    texts += [(modifier, print_cpp(bound, "mask")) for modifier, bound in bounds]
    values = modifier_texts.evaluate_cpp(texts, POINTS, tmp_path)
    for (name, modifier), found in zip(cases, values, strict=False):
        expected = computed(modifier)
        torch.testing.assert_close(
            torch.tensor(found).double(), expected, rtol=2e-5, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
    for (modifier, bound), found in zip(bounds, values[len(cases) :], strict=True):
        text = print_triton(bound, "mask")
        expected = torch.as_tensor(modifier_texts.evaluate_triton(text, modifier, VALUES)).double()
        assert torch.equal(torch.tensor(found).double(), expected.expand(len(POINTS))), text


GOLDEN = {
    "chunk": ("k_pos // 4 == floor_div(q_pos, 4)", "k_pos / 4 == floor_div(q_pos, 4)"),
    "document": (
        "(k_pos <= q_pos) & (k_pos >= captured_2(mask_STARTS_ptr, batch, q_pos, mask_STARTS_size_0, "
        "mask_STARTS_size_1))",
        "k_pos <= q_pos && k_pos >= captured.mask_STARTS(batch, q_pos)",
    ),
    "prefix": (
        "(k_pos <= q_pos) | (k_pos < captured_1(mask_LENGTHS_ptr, batch, mask_LENGTHS_size_0))",
        "k_pos <= q_pos || k_pos < captured.mask_LENGTHS(batch)",
    ),
    "flags": (
        "(head == 1) | ((k_pos <= q_pos) & (captured_1(mask_FLAGS_ptr, batch, mask_FLAGS_size_0) != 0))",
        "head == 1 || (k_pos <= q_pos && captured.mask_FLAGS(batch) != 0)",
    ),
    "every_third": ("floor_mod(q_pos - k_pos, 3) == 0", "floor_mod(q_pos - k_pos, 3) == 0"),
    "always": ("True", "true"),
    "alibi": (
        "score + (k_pos - q_pos) * captured_1(score_SLOPES_ptr, head, score_SLOPES_size_0)",
        "score + (k_pos - q_pos) * captured.score_SLOPES(head)",
    ),
    "cap": ("20 * tanh(score / 20)", "20 * std::tanh(score / 20)"),
    "bias": (
        "tl.where(tl.abs(k_pos - q_pos) <= 3, 0.5 * score + captured_3(score_TABLE_ptr, batch, head, k_pos, "
        'score_TABLE_size_0, score_TABLE_size_1, score_TABLE_size_2), -float("inf"))',
        "std::abs(k_pos - q_pos) <= 3 ? 0.5f * score + captured.score_TABLE(batch, head, k_pos) : "
        "-std::numeric_limits<float>::infinity()",
    ),
    "constant": ("1.5", "1.5f"),
}


def test_the_text_is_what_a_person_would_write() -> None:
    known = {name: modifier for kind in ("mask", "score") for name, modifier in made(kind)}
    assert {name: (print_triton(trace(known[name])), print_cpp(trace(known[name]))) for name in GOLDEN} == GOLDEN


def test_a_power_that_is_not_whole_of_a_negative_number_is_nan_as_in_torch(tmp_path: Path) -> None:
    modifier = pagegen.score_mod(lambda s, b, h, q, k: s**2.5 + (s + 9) ** -0.75)
    expected = computed(modifier)
    assert expected.isnan().any() and not expected.isnan().all()
    found = torch.as_tensor(modifier_texts.evaluate_triton(print_triton(trace(modifier)), modifier, VALUES)).double()
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5, equal_nan=True)


def test_an_expression_needs_the_kind_whose_captures_it_reads() -> None:
    bound = mask_range(trace(modifiers.chunked(4)).expression)[0]
    for printer in (print_triton, print_cpp):
        with pytest.raises(ValueError, match='kind must be "score" or "mask", got None'):
            printer(bound)


def test_a_comparison_of_integers_is_printed_without_fractions() -> None:
    text = print_triton(trace(pagegen.mask_mod(lambda b, h, q, k: ((k // 2 + 1) // 3 <= 4) & (k // 7 > 2))))
    assert text == "(k_pos > 20) & (k_pos < 28)" or "/ " not in text.replace("//", "")
