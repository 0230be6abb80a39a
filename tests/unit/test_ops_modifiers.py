"""Score and mask functions through the operator: whose tensors are read, also in compiled and exported graphs."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

import pagegen
from pagegen import modifiers

BIAS = torch.linspace(-1, 1, 4)
LIMITS = torch.tensor([3, 2, 6], dtype=torch.int32)
BLOCKED = torch.zeros(3, 12, dtype=torch.bool)


@pagegen.score_mod
def head_bias(score: Any, batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
    return score + BIAS[head] * (k_pos + 1)


@pagegen.mask_mod
def below_limit(batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
    return (k_pos < LIMITS[batch]) & ~BLOCKED[batch, k_pos]


def operands(**changes: Any) -> dict[str, Any]:
    """Three decode rows of contexts 5, 0 and 9 over blocks of 4, 4 query heads on 2 KV heads."""
    generator = torch.Generator().manual_seed(0)
    values: dict[str, Any] = {
        "q": torch.randn(3, 4, 16, generator=generator),
        "k_cache": torch.randn(8, 4, 2, 16, generator=generator),
        "v_cache": torch.randn(8, 4, 2, 16, generator=generator),
        "block_table": torch.tensor([[3, 1, -9], [-1, -1, -1], [0, 7, 5]], dtype=torch.int32),
        "seq_lens": torch.tensor([5, 0, 9], dtype=torch.int32),
    }
    return {**values, **changes}


def by_definition(bias: Tensor, limits: Tensor, given: dict[str, Any]) -> Tensor:
    """The two modifiers above, written out for decode rows in float64."""
    rows = torch.zeros(3, 4, 16, dtype=torch.float64)
    for s, length in enumerate(given["seq_lens"].tolist()):
        table = given["block_table"][s, : -(-length // 4)].long()
        keys, values = (given[n][table].flatten(0, 1)[:length].double() for n in ("k_cache", "v_cache"))
        seen = min(length, int(limits[s]))
        for head in range(4 if seen else 0):
            scores = keys[:seen, head // 2] @ given["q"][s, head].double() / 4
            scores = scores + bias[head].double() * torch.arange(1, seen + 1)
            rows[s, head] = scores.softmax(0) @ values[:seen, head // 2]
    return rows.float()


def test_captured_tensors_are_read_and_their_contents_may_change_between_calls() -> None:
    given = operands(score_mod=head_bias, mask_mod=below_limit)
    torch.testing.assert_close(
        pagegen.paged_attention(**given), by_definition(BIAS, LIMITS, given), rtol=1e-5, atol=1e-5
    )
    before = BIAS.clone()
    try:
        BIAS.copy_(torch.tensor([0.5, 0.0, -2.0, 1.0]))
        expected = by_definition(BIAS, LIMITS, given)
        torch.testing.assert_close(pagegen.paged_attention(**given), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(pagegen.reference_attention(**given), expected, rtol=1e-5, atol=1e-5)
    finally:
        BIAS.copy_(before)


@pytest.mark.parametrize("path", ["operator", "reference"])
def test_tensors_handed_to_a_call_are_read_instead_of_the_registered_ones(path: str) -> None:
    bias, limits = torch.tensor([0.5, 0.0, -2.0, 1.0]), torch.tensor([1, 1, 8], dtype=torch.int32)
    attend: Any = torch.ops.pagegen.paged_attention if path == "operator" else pagegen.reference_attention
    given = operands()
    out = attend(*given.values(), score_mod=head_bias.name, mask_mod=below_limit.name, captures=[bias, limits, BLOCKED])
    out = out[0] if path == "operator" else out
    torch.testing.assert_close(out, by_definition(bias, limits, given), rtol=1e-5, atol=1e-5)


def test_a_call_by_name_alone_reads_the_registered_tensors() -> None:
    given = operands()
    out, _ = torch.ops.pagegen.paged_attention(*given.values(), score_mod=head_bias.name, mask_mod=below_limit.name)
    torch.testing.assert_close(out, by_definition(BIAS, LIMITS, given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("captures", "message"),
    [
        ([BIAS], r"captures must be the 3 tensors that the modifiers read \(BIAS, LIMITS, BLOCKED\), got 1"),
        ([LIMITS, LIMITS, BLOCKED], "tensor BIAS captured by .*head_bias must be float32 of 1 dim.*got int32"),
        ([BIAS, LIMITS, BLOCKED[0]], "tensor BLOCKED captured by .* must be bool of 2 dimensions, got bool .12."),
        ([BIAS[::2], LIMITS, BLOCKED], "tensor BIAS captured by .* must be contiguous and not empty, got"),
        ([BIAS, LIMITS[:0], BLOCKED], "tensor LIMITS captured by .* must be contiguous and not empty, got"),
        ([BIAS.to("meta"), LIMITS, BLOCKED], "tensor BIAS captured by .* must be on cpu like q, got meta"),
    ],
)
def test_tensors_that_are_not_what_was_traced_are_refused_by_name(captures: list[Tensor], message: str) -> None:
    from pagegen.ops import operands as module

    names = {"score_mod": head_bias.name, "mask_mod": below_limit.name}
    with pytest.raises(ValueError, match=message):
        module.captures(operands()["q"], names, captures)


def test_tensors_without_a_function_that_reads_them_are_refused() -> None:
    with pytest.raises(ValueError, match="captures must be the 0 tensors that the modifiers read .none., got 1"):
        torch.ops.pagegen.paged_attention(*operands().values(), captures=[BIAS])


def test_a_factory_called_twice_makes_two_functions_that_do_not_disturb_each_other() -> None:
    def cap(limit: int) -> modifiers.Modifier:
        @pagegen.mask_mod
        def mask(batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
            return k_pos < limit

        return mask

    first, second = cap(1), cap(3)
    out = [pagegen.paged_attention(**operands(mask_mod=m)) for m in (first, second)]
    short = operands(seq_lens=torch.tensor([1, 0, 1], dtype=torch.int32))
    torch.testing.assert_close(out[0], pagegen.reference_attention(**short), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(out[0], out[1])


def test_one_function_over_several_tensors_is_one_plan_that_reads_each_calls_own() -> None:
    from pagegen.ops.attention import PLANS

    first = modifiers.prefix_lm(torch.tensor([2, 0, 4], dtype=torch.int32))
    pagegen.paged_attention(**operands(mask_mod=first, causal=False))
    plans = len(PLANS)
    second = modifiers.prefix_lm(torch.tensor([5, 0, 9], dtype=torch.int32))
    for modifier in (first, second, first):
        given = operands(mask_mod=modifier, causal=False)
        torch.testing.assert_close(
            pagegen.paged_attention(**given), pagegen.reference_attention(**given), rtol=1e-5, atol=1e-5
        )
    assert len(PLANS) == plans


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_graph_takes_the_captured_tensors_as_inputs(dynamic: bool) -> None:
    def step(q: Tensor, **given: Any) -> Tensor:
        return 2 * pagegen.paged_attention(q, **given, score_mod=head_bias, mask_mod=below_limit)

    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append((graph, inputs))
        return graph.forward

    compiled = torch.compile(step, fullgraph=True, backend=backend, dynamic=dynamic)
    given = operands()
    torch.testing.assert_close(compiled(**given), 2 * by_definition(BIAS, LIMITS, given), rtol=1e-5, atol=1e-5)
    before = LIMITS.clone()
    try:
        LIMITS.copy_(torch.tensor([1, 1, 9]))
        torch.testing.assert_close(compiled(**given), 2 * by_definition(BIAS, LIMITS, given), rtol=1e-5, atol=1e-5)
    finally:
        LIMITS.copy_(before)
    assert len(graphs) == 1
    assert {BIAS.data_ptr(), LIMITS.data_ptr(), BLOCKED.data_ptr()} <= {
        value.data_ptr() for value in (*graphs[0][1], *graphs[0][0].buffers()) if isinstance(value, Tensor)
    }


def test_a_compiled_module_may_be_given_other_tensors_each_step_without_being_compiled_again() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = modifiers.alibi(torch.tensor([0.5, 0.0, -2.0, 1.0]))

        def forward(self, q: Tensor, prefix: modifiers.Modifier, **given: Any) -> Tensor:
            return pagegen.paged_attention(q, **given, score_mod=self.bias, mask_mod=prefix, causal=False)

    counter = torch._dynamo.testing.CompileCounter()
    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for lengths in ([5, 0, 9], [1, 0, 4], [2, 2, 2]):
        prefix = modifiers.prefix_lm(torch.tensor(lengths, dtype=torch.int32))
        given = operands()
        expected = pagegen.reference_attention(**given, score_mod=layer.bias, mask_mod=prefix, causal=False)
        torch.testing.assert_close(compiled(prefix=prefix, **given), expected, rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1


def test_inductor_compiles_a_call_with_captured_tensors_in_one_graph() -> None:
    @torch.compile(fullgraph=True)
    def step(q: Tensor, **given: Any) -> Tensor:
        return pagegen.paged_attention(q * 1.0, **given, score_mod=head_bias, mask_mod=below_limit) + 0.0

    given = operands()
    torch.testing.assert_close(step(**given), by_definition(BIAS, LIMITS, given), rtol=1e-5, atol=1e-5)


def test_a_compiled_graph_may_name_a_shipped_function_that_nobody_made_before() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def step(q: Tensor, **given: Any) -> Tensor:
        return pagegen.paged_attention(q, **given, mask_mod="chunked(3)")

    given = operands()
    expected = pagegen.reference_attention(**given, mask_mod=modifiers.chunked(3))
    torch.testing.assert_close(step(**given), expected, rtol=1e-5, atol=1e-5)


def test_an_exported_program_carries_the_captured_tensors() -> None:
    class Step(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, lens: Tensor) -> Any:
            return pagegen.paged_attention(q, k, v, table, lens, score_mod=head_bias, mask_mod=below_limit)

    given = operands()
    program = torch.export.export(Step(), tuple(given.values()))
    torch.testing.assert_close(
        program.module()(*given.values()), by_definition(BIAS, LIMITS, given), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("overload", ["default", "out"])
def test_the_operator_with_captured_tensors_scales_and_a_tree_mask_keeps_torchs_rules(overload: str) -> None:
    given = operands()
    options: dict[str, Any] = {
        "score_mod": head_bias.name, "mask_mod": below_limit.name, "captures": [BIAS, LIMITS, BLOCKED],
        "k_scale": torch.tensor(0.37), "v_scale": torch.tensor([0.5, 1.9]), "return_lse": True,
        "tree_mask": torch.ones(3, 1, dtype=torch.bool),
    }  # fmt: skip
    if overload == "out":
        options["out"] = torch.empty(3, 4, 16)
    target = getattr(torch.ops.pagegen.paged_attention, overload)
    torch.library.opcheck(target, tuple(given.values()), options, test_utils=("test_schema", "test_faketensor"))


def test_an_index_outside_of_a_captured_tensor_reads_its_nearest_element() -> None:
    limits = torch.tensor([9, 2], dtype=torch.int32)  # none for the third sequence: it reads the second's
    given = operands()
    out, _ = torch.ops.pagegen.paged_attention(
        *given.values(), mask_mod=below_limit.name, captures=[limits, BLOCKED[:, :2].contiguous()]
    )
    expected = by_definition(torch.zeros(4), torch.tensor([9, 2, 2]), given)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_a_score_of_minus_infinity_takes_a_key_out() -> None:
    @pagegen.score_mod
    def only_first(score: Any, batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
        return torch.where(k_pos < 2, score, -math.inf)

    given = operands()
    out, lse = pagegen.paged_attention(**given, score_mod=only_first, return_lse=True)
    short = operands(seq_lens=torch.tensor([2, 0, 2], dtype=torch.int32))
    expected, expected_lse = pagegen.reference_attention(**short, return_lse=True)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


def test_importing_pagegen_and_making_a_modifier_does_not_load_sympy() -> None:
    code = (
        "import sys, pagegen\nfrom pagegen import modifiers\n"
        "assert modifiers.find('chunked(8192)', 'mask').name == 'chunked(8192)'\n"
        "assert 'sympy' not in sys.modules\nmodifiers.trace(modifiers.causal())\nassert 'sympy' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
