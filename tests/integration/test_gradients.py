"""Gradients of the operators: whatever wants one is refused by name, and never gets 0 in its place."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

import pagegen

KV_HEADS, DIM, BLOCK = 2, 16, 8
TABLE = torch.tensor([[3, 5], [1, 7], [9, 2]], dtype=torch.int32)
LENS = torch.tensor([5, 16, 9], dtype=torch.int32)
SLOTS = torch.tensor([0, 1, 2])


def made(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


Q, CACHE, K = made(3, 4, DIM), made(16, BLOCK, KV_HEADS, DIM, seed=1), made(3, KV_HEADS, DIM, seed=2)
ANGLES, OUTS, LSES = made(8, DIM // 2), made(2, 3, 4, DIM), made(2, 3, 4)


def attend(**given):
    operands = {"q": Q, "k_cache": CACHE, "v_cache": CACHE}
    return pagegen.paged_attention(**{**operands, **given}, block_table=TABLE, seq_lens=LENS)


def write(**given):
    operands = {"k": K, "v": K, "k_cache": CACHE.clone(), "v_cache": CACHE.clone()}
    pagegen.write_kv(**{**operands, **given}, slot_mapping=SLOTS)


def rotate(**given):
    caches = {"k_cache": CACHE.clone(), "v_cache": CACHE.clone()}
    angles = {"cos": ANGLES, "sin": ANGLES, **given}
    return pagegen.rope_write_kv(Q, K, K, SLOTS, **angles, **caches, slot_mapping=SLOTS)


def merge(**given):
    return pagegen.merge_states(**{"outs": OUTS, "lses": LSES, **given})[0]


CASES = {
    "sinks": (attend, "sinks", made(4)),
    "slopes": (attend, "alibi_slopes", made(4)),
    "scales": (attend, "k_scale", torch.ones(KV_HEADS)),
    "out": (attend, "out", torch.zeros(3, 4, DIM)),
    "a cache that is written": (write, "v_cache", CACHE),
    "scales that are written with": (write, "v_scale", torch.ones(KV_HEADS)),
    "angles": (rotate, "cos", made(8, DIM // 2)),
    "states": (merge, "outs", made(2, 3, 4, DIM)),
    "log-sum-exps": (merge, "lses", made(2, 3, 4)),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("case", CASES)
def test_every_operand_that_wants_a_gradient_is_refused_by_name(case, compiled):
    call, name, value = CASES[case]
    torch._dynamo.reset()
    run = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    with torch.no_grad():  # that a call passed says nothing of one that wants a gradient
        run(**{name: value.clone().requires_grad_()})
    with pytest.raises(RuntimeError, match=f"{name} must not require gradients"):
        run(**{name: value.clone().requires_grad_()})


def test_a_captured_tensor_that_wants_a_gradient_is_refused_by_name():
    bias = torch.zeros(3, requires_grad=True)

    @pagegen.score_mod
    def with_a_learned_bias(score, batch, head, q_pos, k_pos):
        return score + bias[batch]

    with pytest.raises(RuntimeError, match="bias captured by .* must not require gradients"):
        attend(score_mod=with_a_learned_bias)


@pytest.mark.parametrize("name", ["q", "k_cache", "sinks"])
@pytest.mark.parametrize("transform", ["grad", "jacrev", "jvp", "grad of vmap", "vmap of grad"])
def test_a_transform_that_would_differentiate_an_operand_is_refused_by_name(name, transform):
    value = {"q": made(3, 4, DIM), "k_cache": made(16, BLOCK, KV_HEADS, DIM), "sinks": made(4)}[name]
    func, stacked = torch.func, torch.stack([value, value])

    def call(x):
        return attend(**{name: x})

    runs = {
        "grad": lambda: func.grad(lambda x: call(x).sum())(value),
        "jacrev": lambda: func.jacrev(call)(value),
        "jvp": lambda: func.jvp(call, (value,), (value,)),
        "grad of vmap": lambda: func.grad(lambda x: func.vmap(call)(x).sum())(stacked),
        "vmap of grad": lambda: func.vmap(func.grad(lambda x: call(x).sum()))(stacked),
    }
    with pytest.raises(RuntimeError, match=f"{name} must not require gradients"):
        runs[transform]()


def test_what_a_transform_does_not_follow_is_computed():
    weight = made(4)
    found = torch.func.grad(lambda w: (w * attend().detach()[0, :, 0]).sum())(weight)
    torch.testing.assert_close(found, attend()[0, :, 0])
    with forward_ad.dual_level():
        torch.testing.assert_close(attend(), attend(sinks=torch.full((4,), -torch.inf)))
