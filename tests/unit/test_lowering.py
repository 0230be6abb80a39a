"""The step graph: which ways there are, what they cost, and which is taken."""

from __future__ import annotations

import pytest

from pagegen import costs, lowering
from pagegen.spec import AttentionSpec, CacheLayout, Device, Target, TritonVariant, Workload

LLAMA = AttentionSpec.from_model("llama-3.1-8b")
BLOCKS = CacheLayout(block_size=16)
H100: Device = costs.shipped_device(Target.parse("sm_90"))


def names(spec: AttentionSpec, variant: TritonVariant, workload: Workload) -> list[str]:
    graph = lowering.step_graph(spec, BLOCKS, variant, H100, workload)
    return [path.name for path in lowering.paths(graph)]


def test_one_long_sequence_is_cheapest_in_splits_since_8_programs_leave_most_of_the_gpu_idle() -> None:
    found = names(LLAMA, TritonVariant(num_splits=16), Workload(context_lens=(65536,)))
    assert found[0] == "attend in splits + reduce"
    assert set(found) == {"attend in splits + reduce", "attend", "gather + dense"}


def test_short_sequences_are_not_worth_a_second_launch() -> None:
    found = names(LLAMA, TritonVariant(num_splits=16), Workload(context_lens=(64,) * 256))
    assert found[0] == "attend"


def test_a_variant_without_splits_offers_no_reduction() -> None:
    assert names(LLAMA, TritonVariant(), Workload(context_lens=(4096,) * 8)) == ["attend", "gather + dense"]


def test_what_no_kernel_serves_is_left_with_the_dense_path() -> None:
    quantised = LLAMA.replace(kv_dtype="int8")
    assert names(quantised, TritonVariant(), Workload(context_lens=(4096,) * 8)) == ["gather + dense"]


def test_a_path_costs_what_its_steps_cost() -> None:
    workload = Workload(context_lens=(65536,))
    graph = lowering.step_graph(LLAMA, BLOCKS, TritonVariant(num_splits=16), H100, workload)
    split = lowering.paths(graph)[0]
    assert split.us == pytest.approx(sum(step.us for step in split.steps))
    assert split.us == pytest.approx(
        costs.predict_us(LLAMA, BLOCKS, TritonVariant(num_splits=16), H100, workload), rel=1e-9
    )
