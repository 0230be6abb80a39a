"""Profiles distilled from traces, and the ones that ship."""

import json
import subprocess
import sys
import time

import numpy as np
import pytest
from pagegen_autotune.figures import percentiles
from pagegen_autotune.profiles import distil, import_trace, load_profile, shipped_profiles
from pagegen_autotune.simulation import Server
from pagegen_autotune.trace import Trace, read_trace

from pagegen import paths

SMALL = Server(max_num_seqs=8, max_batch_tokens=128, kv_tokens=16_384)


@pytest.fixture(scope="module")
def csv(tmp_path_factory):
    """A trace of 400 requests, Poisson arrivals."""
    generator = np.random.default_rng(3)
    arrivals = np.cumsum(generator.exponential(0.2, 400))
    rows = zip(arrivals, generator.integers(1, 1500, 400), generator.integers(1, 200, 400), strict=True)
    path = tmp_path_factory.mktemp("traces") / "chat.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{a:.3f},{p},{o}\n" for a, p, o in rows))
    return path


@pytest.fixture(scope="module")
def profile(csv):
    return import_trace(csv, server=SMALL, source="made up", licence="CC0")


def test_profile_is_named_after_its_trace_and_says_whence_it_is(profile):
    assert (profile.name, profile.source, profile.licence) == ("chat", "made up", "CC0")
    assert 2 <= len(profile.workloads) <= 12
    assert any(load.is_decode for load in profile.workloads) and not all(load.is_decode for load in profile.workloads)


def test_batches_are_ones_the_server_could_run(profile):
    for load in profile.workloads:
        assert load.num_seqs <= 8 and load.total_q <= 128 and load.total_context <= 16_384
        assert load.max_context_len < 1500 + 200


def test_figures_are_those_of_the_trace(profile, csv):
    figures, trace = profile.figures, read_trace(csv)
    assert figures["requests"] == 400 and figures["bad_rows"] == 0
    assert figures["prompt_tokens"]["p50"] == sorted(trace.prompt_tokens.tolist())[199]
    assert figures["output_tokens"]["mean"] == pytest.approx(trace.output_tokens.mean(), abs=0.01)
    assert set(figures["prompt_tokens"]) == {"p5", "p25", "p50", "p75", "p95", "p99", "mean"}
    assert figures["arrivals"]["rate_per_s"] == pytest.approx(5, rel=0.15)
    assert figures["arrivals"]["gap_cv"] == pytest.approx(1, abs=0.15)
    assert figures["prefix_reuse_share"] is None


def test_figures_say_how_the_profile_was_made_and_how_far_off_it_is(profile):
    simulation, coverage = profile.figures["simulation"], profile.figures["coverage"]
    assert profile.figures["server"]["max_num_seqs"] == 8 and profile.figures["server"]["block_tokens"] == 16
    assert simulation["utilisation"] == 0.8 and simulation["seed"] == 0
    assert simulation["requests"] == 400 and simulation["rejected_requests"] == 0
    decode = sum(weight for load, weight in profile if load.is_decode)
    assert simulation["decode_step_share"] == pytest.approx(decode, abs=1e-3)
    assert coverage["batches"] == len(profile.workloads)
    assert 0 < coverage["mean_distance_doublings"] < 1 and 0 < coverage["mean_context_error"] < 0.5
    assert abs(coverage["context_bias"]) < 0.2


def test_weighted_batches_have_the_mean_size_of_the_steps(profile):
    mean = sum(weight * load.num_seqs for load, weight in profile)
    assert mean == pytest.approx(profile.figures["sequences_a_step"]["mean"], rel=0.15)


def test_same_seed_gives_the_same_file_and_another_seed_another(profile, csv, tmp_path):
    profile.save(tmp_path / "a.json")
    import_trace(csv, server=SMALL, source="made up", licence="CC0").save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert import_trace(csv, server=SMALL, seed=1).workloads != profile.workloads


def test_saved_profile_comes_back_equal_with_its_figures(profile, tmp_path):
    profile.save(tmp_path / "p.json")
    back = load_profile(tmp_path / "p.json")
    assert back.workloads == profile.workloads and back.figures == profile.figures
    assert back.weights == pytest.approx(profile.weights)
    assert "NaN" not in (tmp_path / "p.json").read_text()


def test_given_rate_scale_is_used_in_place_of_the_utilisation(csv):
    simulation = import_trace(csv, server=SMALL, rate_scale=2.0).figures["simulation"]
    assert simulation["rate_scale"] == 2.0 and simulation["utilisation"] is None
    assert simulation["capacity_requests_per_s"] is None


def test_trace_without_times_is_a_closed_loop(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt_tokens": 300, "output_tokens": 40}\n' * 50)
    profile = import_trace(path, server=SMALL)
    assert profile.figures["arrivals"] is None and profile.figures["simulation"]["rate_scale"] is None
    assert profile.figures["sequences_a_step"]["p50"] == 8


def test_single_request_makes_a_profile(tmp_path):
    path = tmp_path / "one.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n5,1,0\n")
    profile = import_trace(path)
    assert profile.workloads[0].context_lens == (1,) and profile.figures["arrivals"] is None


def test_requests_without_outputs_have_no_decode_contexts(tmp_path):
    path = tmp_path / "prefill.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{i},900,0\n" for i in range(30)))
    profile = import_trace(path, server=SMALL)
    assert profile.figures["simulation"]["decode_step_share"] == 0
    assert profile.figures["decode_context_tokens"] is None


def test_requests_larger_than_the_memory_are_counted(tmp_path):
    path = tmp_path / "big.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,100000,5\n1,100,5\n2,100,5\n")
    assert import_trace(path, server=SMALL).figures["simulation"]["rejected_requests"] == 1


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("utilisation", 0),
        ("utilisation", 3),
        ("utilisation", float("nan")),
        ("rate_scale", 0.0),
        ("rate_scale", float("inf")),
        ("batches", 1),
        ("seed", -1),
        ("name", " "),
    ],
)
def test_argument_out_of_range_is_named(argument, value):
    trace = Trace(arrival_s=None, prompt_tokens=np.array([5]), output_tokens=np.array([5]))
    with pytest.raises(ValueError, match=f"{argument} must"):
        distil(trace, **{"name": "n", "server": SMALL, argument: value})


def test_percentiles_are_values_that_occur_under_weights_too():
    assert percentiles([1, 2, 3, 4]) == {"p5": 1, "p25": 1, "p50": 2, "p75": 3, "p95": 4, "p99": 4, "mean": 2.5}
    weighted = percentiles([30, 10, 20], [0.01, 0.9, 0.09])
    assert (weighted["p50"], weighted["p95"], weighted["p99"]) == (10, 20, 20)
    assert weighted["mean"] == pytest.approx(0.3 + 9 + 1.8)


def test_shipped_profiles_say_their_source_licence_and_server_and_hold_no_rows():
    assert shipped_profiles() == [
        "azure-code",
        "azure-conversation",
        "mooncake-conversation",
        "mooncake-shared",
        "reasoning",
    ]
    for name in shipped_profiles():
        profile = load_profile(name)
        file = paths.data("profiles") / f"{name}.json"
        assert profile.name == name and len(profile.source) > 20 and profile.licence in ("CC-BY-4.0", "Apache-2.0")
        assert file.stat().st_size < 60_000
        server = profile.figures["server"]
        assert server["max_num_seqs"] == 64
        assert all(load.num_seqs <= 64 and load.total_q <= server["max_batch_tokens"] for load in profile.workloads)
        assert {load.is_decode for load in profile.workloads} == {True, False}
        assert abs(profile.figures["coverage"]["context_bias"]) < 0.1
        assert set(json.loads(file.read_text())) == {"version", "name", "source", "licence", "figures", "batches"}


def test_unknown_profile_is_refused_with_the_names_there_are(tmp_path):
    with pytest.raises(FileNotFoundError, match="azure-conversation.*got 'azure-chat', which is neither"):
        load_profile("azure-chat")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match="broken.json is not a profile"):
        load_profile(tmp_path / "broken.json")


def write_large(path, rows):
    with path.open("w") as file:
        file.write("arrival_s,prompt_tokens,output_tokens,prefix_hash_ids\n")
        file.writelines(f"{i / 50},{100 + i % 900},{i % 30},{i % 97} {i}-{i + 5}\n" for i in range(rows))
    return path


def peak_of(path, expression):
    """The most bytes that Python holds while `read_trace` reads a trace, and `expression` of the trace: in a process of
    its own, since tracemalloc counts what other threads of this one do."""
    code = (
        "import sys, tracemalloc\nfrom pathlib import Path\nfrom pagegen_autotune.trace import read_trace\n"
        "keep = sys.argv[2] == 'keep'\ntracemalloc.start()\ntrace = read_trace(Path(sys.argv[1]), keep_prefixes=keep)\n"
        f"print(tracemalloc.get_traced_memory()[1], {expression})"
    )
    kept = "keep" if "prefix_runs" in expression else "drop"
    done = subprocess.run([sys.executable, "-c", code, path, kept], capture_output=True, text=True, check=True)
    return tuple(map(int, done.stdout.split()))


def test_memory_of_reading_a_trace_is_bounded_by_its_arrays_and_the_remembered_blocks(tmp_path):
    peak, rows = peak_of(write_large(tmp_path / "large.csv", 20_000), "len(trace)")
    # 20000 block ids at about 80 bytes, and 3 arrays of 160 kB a few times over; as Python rows it would be 8 MB more
    assert rows == 20_000 and peak < 5e6


def test_hundred_thousand_rows_take_seconds(tmp_path):
    path = write_large(tmp_path / "large.csv", 100_000)
    start = time.process_time()
    assert import_trace(path).figures["requests"] == 100_000
    # a million rows take 7 s of reading, of which 7 us each are read here, and 11 s for the 20,000 that are simulated
    assert time.process_time() - start < 20


def test_the_ids_of_a_trace_take_little_more_memory_than_its_numbers(tmp_path):
    path = write_large(tmp_path / "large.csv", 20_000)
    peak, rows, held = peak_of(path, "len(trace.prefix_runs), trace.prefix_runs.nbytes")
    # two runs of 16 bytes a request and 8 for where they begin, twice while they are put in order of arrival
    assert rows == 20_000 and held <= 40 * 20_000 + 8 and peak < 8e6
