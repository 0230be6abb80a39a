"""The step graph: which ways there are, what they cost and whence that is known, and which is taken."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest

from pagegen import costs, lowering, targets
from pagegen.spec import AttentionSpec, CacheLayout, CppVariant, Device, Target, TritonVariant, Variant, Workload

LLAMA = AttentionSpec.from_model("llama-3.1-8b")
BLOCKS = CacheLayout(block_size=16)
H100: Device = costs.shipped_device(Target.parse("sm_90"))
CPU = Device(
    name="a CPU", target=Target("cpu"), units=2, bandwidth_gb_s=20.0, last_level_cache_mib=32.0, features=("avx512f",)
)
ATTEND = {
    "attend",
    "attend in splits + reduce",
    "attend in splits, the last reduces",
    "attend in equal shares",
    "gather + dense",
    "gather and attend densely",
}
SPLIT = TritonVariant(num_splits=16)
CASCADE = "attend prefix + attend own + merge"
SHARED = Workload(context_lens=(16384 + 128,) * 16)
GROUPS = ((1024, tuple(range(16))),)


def graph_of(
    workload: Workload,
    *,
    spec: AttentionSpec = LLAMA,
    variant: Variant = SPLIT,
    device: Device = H100,
    **options,
) -> lowering.Graph:
    return lowering.step_graph(spec, BLOCKS, variant, device, workload, **options)


def names(workload: Workload, source: str = "written", **options) -> list[str]:
    return [path.name for path in lowering.paths(graph_of(workload, **options), source)]


def steps_of(graph: lowering.Graph) -> dict[str, lowering.Step]:
    return {node.name: node for node in graph if isinstance(node, lowering.Step)}


def test_every_way_to_attend_follows_every_way_to_write() -> None:
    found = names(Workload(context_lens=(4096,) * 8), "projected")
    assert set(found) == {f"{write} + {rest}" for write in ("rotate + write", "rotate and write") for rest in ATTEND}
    assert len(found) == len(set(found))


def test_one_pass_over_new_keys_is_cheaper_than_two() -> None:
    for device, variant in ((H100, TritonVariant()), (CPU, CppVariant())):
        for workload in (Workload(context_lens=(4096,) * 8), Workload(context_lens=(4096,), query_lens=(4096,))):
            graph = graph_of(workload, variant=variant, device=device)
            assert lowering.plan(graph).name.startswith("rotate and write + ")


def test_one_long_sequence_is_cheapest_in_splits_since_8_programs_leave_most_of_the_gpu_idle() -> None:
    found = names(Workload(context_lens=(65536,)))
    assert set(found) == ATTEND
    assert found.index("attend in splits + reduce") < found.index("attend")


def test_short_sequences_are_not_worth_a_second_launch() -> None:
    found = names(Workload(context_lens=(64,) * 256))
    assert found.index("attend") < found.index("attend in splits + reduce")


def test_a_variant_that_does_not_split_is_compared_with_its_own_best_split() -> None:
    workload = Workload(context_lens=(65536,))
    steps = {
        step.name: step for path in lowering.paths(graph_of(workload, variant=TritonVariant())) for step in path.steps
    }
    split = steps["attend in splits"].variant
    assert isinstance(split, TritonVariant) and split.num_splits > 1 and steps["reduce"].variant == split
    assert replace(split, num_splits=1) == steps["attend"].variant == TritonVariant()


def test_a_ragged_batch_gains_from_equal_shares_of_work() -> None:
    ragged = Workload(context_lens=(60000, *(500,) * 40))
    found = names(ragged, variant=TritonVariant())
    assert found.index("attend in equal shares") < found.index("attend")


def test_what_no_kernel_serves_is_left_with_the_dense_paths(monkeypatch) -> None:
    monkeypatch.setattr(targets, "unsupported", lambda spec, target: "the templates do not know it")
    assert set(names(SHARED, prefix_groups=GROUPS)) == {"gather + dense", "gather and attend densely"}


@pytest.mark.parametrize(
    "fields", [{"logit_softcap": 30.0}, {"sinks": True}, {"alibi": True}, {"kv_dtype": "int8"}, {"score_mod": "any"}]
)
def test_what_sdpa_cannot_express_is_not_offered_to_it_but_the_fallback_is_always_there(fields) -> None:
    steps = steps_of(graph_of(SHARED, spec=LLAMA.replace(**fields)))
    assert "dense" not in steps and "gather and attend densely" in steps


def test_a_batch_invariant_spec_takes_no_split_that_depends_on_the_batch() -> None:
    spec = LLAMA.replace(batch_invariant=True)
    dense = {"gather + dense", "gather and attend densely"}
    assert set(names(SHARED, spec=spec, prefix_groups=GROUPS)) == {"attend", *dense}


def test_an_illegal_form_is_not_in_the_graph() -> None:
    too_wide = TritonVariant(tile_rows=256, tile_kv=512)  # shared memory for 256 rows and 512 keys
    assert costs.legal(LLAMA, BLOCKS, too_wide, H100)
    assert set(names(SHARED, variant=too_wide)) == {"gather + dense", "gather and attend densely"}


def test_a_cpu_kernel_divides_and_merges_inside_one_call() -> None:
    found = names(SHARED, variant=CppVariant(), device=CPU)
    assert set(found) == {"attend", "gather + dense", "gather and attend densely"}


def test_a_path_costs_what_its_steps_cost() -> None:
    workload = Workload(context_lens=(65536,))
    variant = TritonVariant(num_splits=16)
    split = next(p for p in lowering.paths(graph_of(workload), "written") if p.name == "attend in splits + reduce")
    assert split.us == pytest.approx(sum(step.us for step in split.steps))
    assert split.us == pytest.approx(costs.predict_us(LLAMA, BLOCKS, variant, H100, workload), rel=1e-9)
    assert all(step.us > 0 for step in split.steps)


def test_the_plan_is_the_first_of_the_paths_and_the_others_are_no_cheaper() -> None:
    graph = graph_of(SHARED, prefix_groups=GROUPS)
    found = lowering.paths(graph)
    assert lowering.plan(graph).us == pytest.approx(found[0].us)
    assert [path.us for path in found] == sorted(path.us for path in found)
    assert lowering.paths(graph, limit=3) == found[:3]


# --- shared prefixes --------------------------------------------------------------------------------------------


def test_a_long_shared_prefix_is_cheapest_attended_once() -> None:
    for device, variant in ((H100, TritonVariant()), (CPU, CppVariant())):
        found = names(SHARED, variant=variant, device=device, prefix_groups=GROUPS)
        assert found[0] == CASCADE


def test_a_short_shared_prefix_is_not_worth_a_merge() -> None:
    short = Workload(context_lens=(64 + 4096,) * 4)
    found = names(short, variant=TritonVariant(), prefix_groups=((4, (0, 1, 2, 3)),))
    assert CASCADE in found and found[0] != CASCADE


@pytest.mark.parametrize(("device", "variant"), [(H100, TritonVariant()), (CPU, CppVariant())], ids=["h100", "cpu"])
def test_the_break_even_is_where_the_plan_turns_to_the_cascade(device, variant) -> None:
    tokens = lowering.break_even_tokens(LLAMA, BLOCKS, variant, device, num_seqs=16)
    assert tokens is not None

    def planned(saved: float) -> str:
        blocks = round(saved / 15 / 16)
        workload = Workload(context_lens=(16 * blocks + 128,) * 16)
        groups = ((blocks, tuple(range(16))),)
        return lowering.plan(graph_of(workload, variant=variant, device=device, prefix_groups=groups), "written").name

    assert planned(tokens) == planned(2 * tokens) == CASCADE
    assert planned(tokens / 2) != CASCADE


def test_a_spec_that_is_never_divided_has_no_break_even() -> None:
    spec = LLAMA.replace(batch_invariant=True)
    assert lowering.break_even_tokens(spec, BLOCKS, TritonVariant(), H100, num_seqs=16) is None


def test_without_groups_or_with_a_group_of_one_query_there_is_no_cascade() -> None:
    assert CASCADE not in names(SHARED)
    assert CASCADE not in names(SHARED, prefix_groups=((1024, (3,)),))


@pytest.mark.parametrize("fields", [{"window": 128}, {"mask_mod": "any"}, {"batch_invariant": True}])
def test_a_spec_whose_prefix_cannot_be_attended_apart_has_no_cascade(fields) -> None:
    assert CASCADE not in names(SHARED, spec=LLAMA.replace(**fields), prefix_groups=GROUPS)


def test_a_prefix_that_the_cache_holds_is_read_fast_by_everybody() -> None:
    small = ((256, tuple(range(16))),)  # 16 MiB in a cache of 50
    workload = Workload(context_lens=(4096 + 128,) * 16)

    def attend_us(groups) -> float:
        return next(
            p.us for p in lowering.paths(graph_of(workload, prefix_groups=groups), "written") if p.name == "attend"
        )

    assert attend_us(small) < 0.6 * attend_us(())
    assert costs.with_reuse(LLAMA, BLOCKS, H100, SHARED, GROUPS) == H100  # 64 MiB are too many


def test_the_parts_of_a_cascade_hold_all_queries_and_every_key_once() -> None:
    workload = Workload(context_lens=(100, 90, 300, 64), query_lens=(40, 30, 1, 0))
    prefix, own = costs.prefix_workloads(BLOCKS, workload, ((2, (0, 1)), (4, (2, 3))))
    assert prefix.context_lens == (32, 32, 32, 64) and prefix.query_lens == (24, 23, 23, 1)
    assert own.context_lens == (68, 58, 236, 0) and own.query_lens == workload.query_lens


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (((1, (0, 9)),), r"rows in 0\.\.1, each once, got 9"),
        (((1, (0, 1)), (1, (1,))), "each once, got 1"),
        (((7, (0, 1)),), r"before every query of row 0 \(99\), got 7 blocks of 16"),
    ],
)
def test_groups_that_the_batch_cannot_have_are_refused(groups, said) -> None:
    with pytest.raises(ValueError, match=said):
        costs.prefix_workloads(BLOCKS, Workload(context_lens=(100, 200)), groups)


# --- measured and predicted -------------------------------------------------------------------------------------


def test_a_measured_step_says_so_and_its_path_keeps_the_two_kinds_apart() -> None:
    variant = TritonVariant(num_splits=16)
    graph = graph_of(SHARED, measured=lowering.whole_calls({replace(variant, num_splits=1): 7.0}))
    attend = next(p for p in lowering.paths(graph) if p.name == "rotate and write + attend")
    assert (attend.cost, attend.measured_us) == ("mixed", 7.0)
    assert attend.us == 7.0 + attend.predicted_us and attend.predicted_us > 0
    assert [step["cost"] for step in attend.to_dict()["steps"]] == ["predicted", "measured"]
    (alone,) = [p for p in lowering.paths(graph, "written") if p.cost == "measured"]
    assert alone.us == 7.0
    assert lowering.plan(graph, "written") == alone


def test_a_measured_split_is_one_step_since_nothing_was_measured_of_its_parts() -> None:
    variant = TritonVariant(num_splits=16)
    graph = graph_of(SHARED, variant=variant, measured=lowering.whole_calls({variant: 9.0}))
    (split,) = [p for p in lowering.paths(graph, "written") if p.name == "attend in splits + reduce"]
    assert [(step.us, step.measured) for step in split.steps] == [(9.0, True)]


def test_a_prediction_does_not_hide_what_was_measured_of_its_kind() -> None:
    measured = replace(SPLIT, num_splits=4)
    graph = graph_of(SHARED, variant=TritonVariant(), measured=lowering.whole_calls({measured: 1e6}))
    split = next(p for p in lowering.paths(graph, "written") if p.name == "attend in splits + reduce")
    assert (split.us, split.cost, split.steps[0].variant) == (1e6, "measured", measured)


def test_any_step_can_be_measured_by_its_name() -> None:
    times = {"rotate": 1.0, "write": 2.0, "merge": 3.0}
    graph = graph_of(SHARED, prefix_groups=GROUPS, measured=lambda step: times.get(step.name))
    steps = steps_of(graph)
    assert {name for name, step in steps.items() if step.measured} == set(times)
    assert all(steps[name].us == us for name, us in times.items())


def test_a_measured_call_is_not_mistaken_for_a_part_of_a_cascade() -> None:
    variant = CppVariant()
    graph = graph_of(
        SHARED, variant=variant, device=CPU, prefix_groups=GROUPS, measured=lowering.whole_calls({variant: 5.0})
    )  # fmt: skip
    assert [name for name, step in steps_of(graph).items() if step.measured] == ["attend"]


def test_every_step_names_a_function_that_is_there() -> None:
    for name, step in steps_of(graph_of(SHARED, prefix_groups=GROUPS)).items():
        if name != "rotate":
            module, _, function = step.does.rpartition(".")
            assert callable(getattr(importlib.import_module(module), function)), step
