"""Which registered functions are the same: what a function reads beside its arguments counts, wherever it is read."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor

import pagegen
from pagegen import modifiers
from pagegen.modifiers import print_cpp, trace

SCORE = torch.tensor([-2.0, 0.5, 3.0])


def score(function: Any) -> modifiers.Modifier:
    modifier: modifiers.Modifier = pagegen.score_mod(function)
    return modifier


def applied(modifier: modifiers.Modifier) -> list[float]:
    result: Tensor = modifier.over()(SCORE, torch.tensor(0), torch.tensor(0), torch.tensor(0), torch.tensor(0))
    return result.tolist()


def test_defaults_of_the_functions_that_are_called_tell_them_apart() -> None:
    def made(factor: Any, keyword: float = 0.0) -> modifiers.Modifier:
        def inner(x: Any, factor: Any = factor) -> Any:
            return x * factor

        def helper(x: Any, *, shift: float = keyword, by: Any = inner) -> Any:
            return by(x) + shift

        return score(lambda s, b, h, q, k: helper(s))

    found = [made(1.0), made(3.0), made(3.0, 5.0), made(3.0)]
    assert len({modifier.name for modifier in found}) == 3
    assert found[1] == found[3]
    assert [str(trace(modifier).expression) for modifier in found[:3]] == ["1.0*score", "3.0*score", "3.0*score + 5.0"]
    assert [applied(modifier)[2] for modifier in found[:3]] == [3.0, 9.0, 14.0]


def test_a_tensor_as_a_default_is_captured_as_one_from_a_closure() -> None:
    def made(table: Tensor) -> modifiers.Modifier:
        def helper(h: Any, table: Tensor = table, *, other: Tensor = table * 2) -> Any:
            return table[h] + other[h]

        return score(lambda s, b, h, q, k: s + helper(h))

    first, second = made(torch.ones(4)), made(torch.full((4,), 5.0))
    assert first == second
    assert list(first.tensors) == ["table", "other"]
    assert "score_table(head)" in print_cpp(trace(first))
    assert [applied(modifier)[0] for modifier in (first, second)] == [1.0, 13.0]
    assert first.bound([torch.zeros(4), torch.ones(4)])(SCORE, 0, 0, 0, 0).tolist() == (SCORE + 1).tolist()


class Holder:
    factor = 1.0

    def score(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * self.factor


def holders() -> dict[str, Any]:
    """Ways to read a number that is not held by the code: each gives a setter and a function."""
    cls: Any = type("Config", (Holder,), {})
    items, own, module = {"factor": 1.0}, Holder(), types.ModuleType("settings_of")
    method, get = Holder(), items.get
    module.factor = 1.0  # type: ignore[attr-defined]

    def helper(s: Any) -> Any:
        return s * helper.factor  # type: ignore[attr-defined]

    helper.factor = 1.0  # type: ignore[attr-defined]
    return {
        "item": (lambda v: items.update(factor=v), lambda s, b, h, q, k: s * items["factor"]),
        "class": (lambda v: setattr(cls, "factor", v), lambda s, b, h, q, k: s * cls.factor),
        "instance": (lambda v: setattr(own, "factor", v), lambda s, b, h, q, k: s * own.factor),
        "module": (lambda v: setattr(module, "factor", v), lambda s, b, h, q, k: s * module.factor),
        "method": (lambda v: setattr(method, "factor", v), method.score),
        "function": (lambda v: setattr(helper, "factor", v), lambda s, b, h, q, k: helper(s)),
        "getter": (lambda v: items.update(factor=v), lambda s, b, h, q, k: s * get("factor")),
    }


@pytest.mark.parametrize("way", holders())
def test_a_function_registered_again_after_what_it_reads_has_changed_is_another(way: str) -> None:
    change, function = holders()[way]
    change(2.0)
    first = score(function)
    change(3.0)
    second = score(function)
    assert first.name != second.name
    assert [str(trace(modifier).expression) for modifier in (first, second)] == ["2.0*score", "3.0*score"]
    assert applied(second) == (SCORE * 3).tolist()
    with pytest.raises(
        ValueError, match=r"must compute what it did when it was registered, 2.0\*score, got 3.0\*score"
    ):
        applied(first)
    change(2.0)
    assert score(function) == first, "what computes the same is the same"
    assert applied(first) == (SCORE * 2).tolist()


def test_what_reads_an_object_and_cannot_be_traced_is_served_as_it_computes_now() -> None:
    held = {"factor": 2.0}
    function = score(lambda s, b, h, q, k: s * held["factor"] if s.sum() > 0 else s)
    held["factor"] = 4.0
    with pytest.raises(modifiers.Untraceable, match="decides in Python|has no expression"):
        trace(function)
    assert applied(function) == (SCORE * 4).tolist()
