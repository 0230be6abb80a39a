"""Block size as the outer variable: the server and its requests, simulated together and told apart."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from database_fakes import H100, SM_90, SPEC, TUNED, rule, trial
from pagegen_autotune.drawn import drawn_trace
from pagegen_autotune.served import Rest, serve_block_sizes
from pagegen_autotune.step_model import fit
from pagegen_autotune.trace import Trace

from pagegen import targets
from pagegen.cli.main import main
from pagegen.db import open_db
from pagegen.spec import CacheLayout, Profile, Workload

CODE = targets.code_hash(SM_90)
DECODE = tuple(Workload(context_lens=(n,) * s) for n, s in ((300, 4), (900, 16), (2000, 8)))
CHUNK = Workload(context_lens=(400, 700), query_lens=(1, 128))
TRAFFIC = Profile(name="traffic", workloads=(*DECODE, CHUNK), weights=(1, 1, 1, 1))
ANYWHERE = replace(TUNED, page_walk="any")
TOKEN_BYTES = SPEC.kv_bytes_per_token
AMPLE = 200_000 * TOKEN_BYTES


@pytest.fixture(autouse=True)
def _no_device_of_this_machine(monkeypatch):
    def absent(target):
        raise ValueError(f"no {target} here")

    monkeypatch.setattr(targets, "current_device", absent)


@pytest.fixture
def db(tmp_path):
    with open_db(tmp_path / "sizes.db", shipped=False) as database:
        yield database


def measured(db, **us_a_token):
    """Trials at block sizes b16, b128, ...: 20 us a call and so many a token of the contexts."""
    for name, us in us_a_token.items():
        layout = CacheLayout(block_size=int(name[1:]))
        db.save_portfolio(
            spec=SPEC, layout=layout, device=H100, profile=TRAFFIC, rule=rule(ANYWHERE), code_hash=CODE
        )  # fmt: skip
        for load in TRAFFIC.workloads:
            samples = (20 + us * load.total_context,)
            db.record(trial(layout=layout, variant=ANYWHERE, workload=load, samples_us=samples, code_hash=CODE))


def requests(count=120, *, shared_ids=0):
    """Prompts of a few hundred tokens, with so many leading ids of 16 tokens that all share."""
    rng = random.Random(1)
    prompts = [rng.randrange(200, 600) for _ in range(count)]
    runs = None
    if shared_ids:
        runs = [((0, shared_ids - 1), (1000 * i + 500, 1000 * i + 500 + p // 16 - shared_ids - 1))
                for i, p in enumerate(prompts)]  # fmt: skip
    return Trace(
        arrival_s=np.cumsum([rng.expovariate(5) for _ in prompts]), prompt_tokens=np.array(prompts),
        output_tokens=np.array([rng.randrange(20, 120) for _ in prompts]), prefix_runs=runs,
    )  # fmt: skip


def serve(db, **options):
    defaults = {"memory_bytes": AMPLE, "trace": requests(), "requests": 120, "db": db, "max_num_seqs": 32}
    return serve_block_sizes(SPEC, SM_90, TRAFFIC, **{**defaults, **options})


def test_a_faster_kernel_decides_where_memory_is_ample_and_waste_where_it_is_scarce(db):
    """The joint choice: at 256 tokens a block attention is a tenth faster, but a fifth fewer sequences fit."""
    measured(db, b16=0.020, b256=0.018)
    ample = serve(db)
    assert [one.block_size for one in ample] == [256, 16]
    scarce = serve(db, memory_bytes=2600 * TOKEN_BYTES, rest=Rest(base_s=5e-3))
    assert [one.block_size for one in scarce] == [16, 256]
    small, large = scarce
    assert small.sequences > 1.2 * large.sequences
    assert small.speed.output_tokens_per_s > 1.2 * large.speed.output_tokens_per_s
    assert small.waste_share < 0.05 < 0.15 < large.waste_share
    assert all(one.attention.kind == "measured" and one.cost.mean_error < 1e-6 for one in ample)


def test_scarce_memory_preempts_and_what_gave_way_is_computed_again(db):
    measured(db, b16=0.02)
    (one,) = serve(db, memory_bytes=3000 * TOKEN_BYTES)
    assert one.speed.preemptions > 0 and one.speed.recomputed_tokens > 0
    assert one.speed.output_tokens == requests().output_tokens.sum()
    (ample,) = serve(db)
    assert ample.speed.preemptions == 0


def test_larger_blocks_share_prefixes_in_a_coarser_grain(db):
    measured(db, b16=0.02, b64=0.02, b128=0.02)
    served = {one.block_size: one for one in
              serve(db, trace=requests(shared_ids=7), prefix_block_tokens=16)}  # fmt: skip
    assert served[16].hit_share > served[64].hit_share > served[128].hit_share == 0  # 112, 64 and no shared tokens
    assert served[16].speed.computed_tokens < served[64].speed.computed_tokens < served[128].speed.computed_tokens


def test_latencies_are_taken_at_the_same_rate_for_all_and_say_nothing_of_speed(db):
    measured(db, b16=0.02, b128=0.03)
    served = {one.block_size: one for one in serve(db, utilisation=0.5)}
    fast, slow = served[16], served[128]
    assert fast.latencies.inter_token_s.p50 < slow.latencies.inter_token_s.p50
    assert fast.latencies.time_to_first_token_s.count == slow.latencies.time_to_first_token_s.count == 120
    # under the same load both serve what comes; only with requests always waiting is one faster
    assert fast.load_figures.output_tokens_per_s == pytest.approx(slow.load_figures.output_tokens_per_s, rel=0.1)
    assert fast.speed.output_tokens_per_s > 1.1 * slow.speed.output_tokens_per_s
    told = fast.to_dict()
    assert "output_tokens_per_s" in told["server"] and "time_to_first_token_s" not in told["server"]
    assert set(told["requests"]) == {
        "time_to_first_token_s", "inter_token_s", "end_to_end_s", "preemptions", "output_tokens_per_s", "rejected",
    }  # fmt: skip
    json.dumps(told, allow_nan=False)


def test_requests_without_times_come_at_a_rate_that_the_server_can_keep_up_with(db):
    measured(db, b16=0.02)
    plain = requests()
    untimed = Trace(arrival_s=None, prompt_tokens=plain.prompt_tokens, output_tokens=plain.output_tokens)
    (one,) = serve(db, trace=untimed, utilisation=0.3)
    (late,) = serve(db, trace=untimed, utilisation=1.5)
    assert one.latencies.time_to_first_token_s.p99 < 0.5 * late.latencies.time_to_first_token_s.p99
    assert one.load_figures.span_s > 2 * one.speed.span_s


def test_a_block_size_that_holds_no_request_is_left_out_and_the_others_are_served(db):
    measured(db, b16=0.02, b256=0.001)
    served = serve(db, memory_bytes=760 * TOKEN_BYTES)  # 47 blocks of 16, 2 of 256
    assert [one.block_size for one in served] == [16, 256] and served[1].rejected > 0
    assert [one.block_size for one in serve(db, memory_bytes=255 * TOKEN_BYTES)] == [16]


def test_each_objective_ranks_by_its_own_figures(db):
    measured(db, b16=0.02, b128=0.03)
    for objective in ("throughput", "latency"):
        assert serve(db, objective=objective)[0].block_size == 16


def test_the_same_requests_give_the_same_figures(db):
    measured(db, b16=0.02)
    assert [one.to_dict() for one in serve(db)] == [one.to_dict() for one in serve(db)]


def test_layers_and_the_rest_of_a_step_take_their_time(db):
    measured(db, b16=0.02)
    (alone,), (deep,) = serve(db), serve(db, num_layers=4, memory_bytes=4 * AMPLE)
    assert deep.speed.span_s == pytest.approx(4 * alone.speed.span_s, rel=1e-3)
    assert alone.attention_share == pytest.approx(1, abs=0.02)
    (beside,) = serve(db, rest=Rest(base_s=1.0))
    assert beside.speed.span_s > beside.speed.steps and beside.attention_share < 0.01
    weights = Rest.of_weights(16 * 10**9, H100)
    assert weights.base_s == pytest.approx(16 / (0.85 * H100.bandwidth_gb_s), rel=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_bytes": 10}, "memory_bytes must hold at least one block of all layers"),
        ({"memory_bytes": 64 * TOKEN_BYTES}, "kv_tokens must hold at least the trace's smallest request"),
        ({"memory_bytes": 0}, "memory_bytes must be"),
        ({"requests": 5}, "requests must be"),
        ({"utilisation": float("nan")}, "utilisation must be above 0"),
        ({"objective": "fame"}, "objective must be one of"),
        ({"num_layers": 0}, "num_layers must be"),
        ({"prefix_block_tokens": 16}, "keep_prefixes"),
    ],
)
def test_bad_arguments_are_named(db, change, message):
    measured(db, b16=0.02)
    with pytest.raises(ValueError, match=message):
        serve(db, **change)


def test_a_cost_is_met_exactly_where_times_are_made_of_its_parts_and_never_negative():
    us = tuple(5 + 0.01 * w.total_context + 1e-4 * (128 * 700 if w is CHUNK else 0) for w in TRAFFIC.workloads)
    found = fit(TRAFFIC, us)
    assert (found.base_us, found.context_us, found.pair_us) == pytest.approx((5, 0.01, 1e-4))
    assert found.mean_error < 1e-9 and found.us(CHUNK) == pytest.approx(us[-1])
    falling = fit(TRAFFIC, (9.0, 5.0, 4.0, 6.0))  # more to read in less time: noise
    assert min(falling.base_us, falling.context_us, falling.pair_us) >= 0 and falling.mean_error > 0.1
    alone = fit(Profile(name="one", workloads=DECODE[:1], weights=(1,)), (7.0,))
    assert alone.us(DECODE[0]) == pytest.approx(7.0) and alone.mean_error < 1e-9
    for wrong in ((1.0,), (1.0, 1.0, 0.0, 1.0), (1.0, float("nan"), 1.0, 1.0)):
        with pytest.raises(ValueError, match="us must be a positive time for each of 4 workloads"):
            fit(TRAFFIC, wrong)


FIGURES = {
    "prompt_tokens": {"p5": 100, "p25": 300, "p50": 800, "p75": 1200, "p95": 4000, "p99": 9000},
    "output_tokens": {"p5": 0, "p25": 50, "p50": 100, "p75": 300, "p95": 500, "p99": 900},
    "arrivals": {"duration_s": 100.0, "rate_per_s": 4.0, "gap_cv": 2.0},
    "prefix_reuse_share": 0.4,
}


def test_drawn_requests_have_the_profiles_percentiles_rate_burstiness_and_reuse():
    profile = Profile(name="p", workloads=DECODE, weights=(1, 1, 1), figures=FIGURES)
    drawn = drawn_trace(profile, 20_000, seed=3)
    assert np.percentile(drawn.prompt_tokens, [25, 50, 75]) == pytest.approx([300, 800, 1200], rel=0.05)
    assert np.percentile(drawn.output_tokens, [50, 95]) == pytest.approx([100, 500], rel=0.05)
    assert drawn.prompt_tokens.max() <= 9000 and drawn.prompt_tokens.min() >= 1
    gaps = np.diff(drawn.arrival_s)
    assert gaps.mean() == pytest.approx(0.25, rel=0.1) and gaps.std() / gaps.mean() == pytest.approx(2, rel=0.1)
    seen: set[int] = set()
    reused = 0
    for runs in drawn.prefix_runs:
        ids = [i for first, last in runs for i in range(first, last + 1)]
        reused += 64 * sum(i in seen for i in ids)
        seen.update(ids)
    assert reused / drawn.prompt_tokens.sum() == pytest.approx(0.4, rel=0.1)
    again = drawn_trace(profile, 20_000, seed=3)
    assert np.array_equal(again.prompt_tokens, drawn.prompt_tokens) and again.prefix_runs == drawn.prefix_runs


def test_a_profile_without_the_figures_is_refused_and_one_without_times_is_a_closed_loop():
    with pytest.raises(ValueError, match="profile traffic must hold prompt_tokens with p5, p25"):
        drawn_trace(TRAFFIC, 100)
    figures = {name: value for name, value in FIGURES.items() if name.endswith("tokens")}
    drawn = drawn_trace(Profile(name="p", workloads=DECODE, weights=(1, 1, 1), figures=figures), 100)
    assert drawn.arrival_s is None and drawn.prefix_runs is None and len(drawn) == 100


def run(*words):
    return CliRunner().invoke(main, ["simulate", "--model", "llama-3.1-8b", "--target", "sm_90", *words])


def test_the_command_tells_the_server_and_its_requests_apart(tmp_path):
    words = ["--profile", "azure-conversation", "--memory", "20GiB", "--requests", "100", "--max-num-seqs", "32"]
    shown = run(*words)
    assert shown.exit_code == 0, shown.output
    assert "What the server can do" in shown.output and "What requests wait for" in shown.output
    assert "predicted" in shown.output and "measured" not in shown.output
    told = json.loads(run(*words, "--weights", "15GiB", "--json").stdout)
    assert told["best_block_size"] in (16, 32, 64, 128) and told["requests_of"] == "the profile's figures"
    assert {row["attention"]["kind"] for row in told["rows"]} == {"predicted"}


def test_the_command_serves_a_traces_own_requests_and_names_what_is_wrong_with_it(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{i},{100 + i},9\n" for i in range(150)))
    words = ["--profile", "azure-conversation", "--memory", "2GiB", "--requests", "100", "--trace", str(path)]
    told = json.loads(run(*words, "--json").stdout)
    assert told["rows"][0]["server"]["output_tokens"] == 900
    path.write_text("arrival_s,prompt_tokens,output_tokens\n1,x,2\n")
    failed = run(*words)
    assert failed.exit_code == 1 and "line 2: prompt_tokens must be" in failed.output and "--skip-bad" in failed.output
    failed = run("--profile", "azure-conversation", "--memory", "1MiB")
    assert failed.exit_code == 1 and "memory_bytes must hold" in failed.output
    assert run("--profile", "azure-conversation").exit_code == 2
