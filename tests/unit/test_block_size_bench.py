"""bench/block_size.py computes what the textbook says, and that is what the allocator and the simulation do."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from pagegen_autotune.simulation import Server, Simulation
from pagegen_autotune.trace import Trace

from pagegen.cache import BlockAllocator
from pagegen.costs import symbols
from pagegen.spec import AttentionSpec, CacheLayout

BENCH = Path(__file__).parents[2] / "bench"
DATA = Path(__file__).parents[3] / "shared" / "data"
sys.path.append(str(BENCH))

import block_size  # noqa: E402
from block_size_bench import kernels, memory, served, sharing  # noqa: E402
from cache_bench.traces import Request, conversations, turns_of  # noqa: E402

SIZES = (1, 3, 8, 16, 100)
SPEC = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=64)
STORED = BENCH / "results" / "block-size.json"


def trace(prompts: list[int], outputs: list[int]) -> Trace:
    return Trace(arrival_s=None, prompt_tokens=np.array(prompts), output_tokens=np.array(outputs))


def row_of(found: list[dict], **way: object) -> dict:
    return next(row for row in found if way.items() <= row["cell"].items())


# ---- memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_wasted_slots_are_those_of_the_layout_and_of_the_cost_model(size):
    lengths = np.arange(1, 300)
    found = memory.wasted_slots(lengths, size).tolist()
    assert found == [CacheLayout(block_size=size).wasted_slots(n) for n in lengths.tolist()]
    assert found == [symbols.WASTED_SLOTS.subs({symbols.context: n, symbols.block_size: size}) for n in range(1, 300)]


@pytest.mark.parametrize("size", SIZES)
def test_lengths_that_fill_every_place_of_a_block_equally_often_waste_half_a_block_less_half_a_slot(size):
    assert memory.wasted_slots(np.arange(1, 12 * size + 1), size).mean() == (size - 1) / 2


@pytest.mark.parametrize("size", SIZES)
def test_sums_over_a_life_are_those_of_every_length_one_by_one(size):
    first, last = np.array([1, 5, 16, 17, 99]), np.array([1, 40, 16, 300, 100])
    layout = CacheLayout(block_size=size)
    lives = [range(a, b + 1) for a, b in zip(first.tolist(), last.tolist(), strict=True)]
    assert memory.block_slots(first, last, size).tolist() == [
        sum(layout.blocks_for(n) * size for n in x) for x in lives
    ]
    assert memory.tokens(first, last).tolist() == [sum(x) for x in lives]


@pytest.mark.parametrize("size", SIZES)
def test_a_simulated_server_holds_the_slots_that_the_closed_form_says(size):
    given = trace([30, 1, 64, 17], [20, 5, 1, 90])
    first, last = memory.lives(given)
    steps = list(Simulation(given, Server(kv_tokens=10_000, block_tokens=size)).steps())
    batches = [step.at(i) for step in steps for i in range(step.count)]
    held = sum(CacheLayout(block_size=size).blocks_for(n) * size for batch in batches for n in batch.context_lens)
    assert held == memory.block_slots(first, last, size).sum()


def test_the_allocator_wastes_what_the_closed_form_says():
    allocator = BlockAllocator(1000, 16)
    lengths = [1, 15, 16, 17, 300]
    for i, n in enumerate(lengths):
        allocator.add(i, range(1000 * i, 1000 * i + n))
    assert allocator.stats().wasted_slots == memory.wasted_slots(np.array(lengths), 16).sum()


def test_powers_of_two_are_the_least_that_suffice():
    lengths = np.arange(1, 5000)
    assert memory.power_of_two(lengths).tolist() == [1 << (n - 1).bit_length() for n in lengths.tolist()]


def test_rows_hold_paging_against_memory_in_one_piece():
    given = trace([100, 900], [100, 100])
    found = list(memory.rows(given, "t", (1, 16), SPEC, layers=2, memory_bytes=1 << 20))
    assert row_of(found, block_size=1)["used_share"] == 1
    assert row_of(found, block_size=1)["end_waste"] == 0
    foretold, longest = (row_of(found, reservation=name) for name in ("own length, foretold", "longest request"))
    assert longest["used_share"] == pytest.approx((149.5 + 949.5) / (2 * 999))
    assert foretold["used_share"] == pytest.approx((149.5 + 949.5) / (199 + 999))
    assert longest["sequences"] == pytest.approx((1 << 20) / (SPEC.kv_bytes_per_token * 2) / 999)
    # an entry of 4 bytes a token, or a block, and a length
    assert row_of(found, block_size=1)["metadata_bytes"] == pytest.approx(4 * 549.5 + 4)
    assert row_of(found, block_size=16)["metadata_bytes"] < row_of(found, block_size=1)["metadata_bytes"] / 15


def test_a_request_for_no_output_is_in_the_cache_once():
    first, last = memory.lives(trace([10, 10], [0, 1]))
    assert first.tolist() == last.tolist() == [10, 10]


# ---- sharing ---------------------------------------------------------------------------------------------


def tree(seed: int, block: int) -> list[list[Request]]:
    """Conversations over a random tree of blocks, with tails and answers."""
    draw = random.Random(seed)
    known: list[tuple[int, ...]] = [()]
    requests = []
    for row in range(60):
        ids = draw.choice(known) + tuple(range(1000 * (row + 1), 1000 * (row + 1) + draw.randrange(1, 4)))
        known.append(ids)
        requests.append(Request(row, len(ids) * block + draw.randrange(block), draw.randrange(1, 20), ids))
    return list(conversations(requests))


@pytest.mark.parametrize("size", (1, 4, 6, 8, 16, 64))
@pytest.mark.parametrize("seed", range(3))
def test_the_allocator_finds_what_rounding_leaves_of_the_tokens_in_common(seed, size):
    dialogues = tree(seed, 8)
    prompts = np.array([request.prompt_tokens for dialogue in dialogues for request in dialogue])
    found = sharing.hits(sharing.common(dialogues, 8), prompts, size)
    turns = [turn for dialogue in dialogues for turn in turns_of(dialogue, 8)]
    assert found.tolist() == sharing.replayed(turns, size).tolist()
    assert found.any() or size == 64


def test_the_last_token_of_a_prompt_is_never_found():
    assert sharing.hits(np.array([32]), np.array([32]), 16).tolist() == [16]
    assert sharing.hits(np.array([32]), np.array([33]), 16).tolist() == [32]


def test_the_next_turn_finds_the_answer_before_but_for_its_last_token():
    turns = [Request(0, 20, 13, (1,)), Request(1, 40, 1, (1, 2))]
    assert list(map(len, conversations(turns))) == [2]
    assert sharing.common([turns], 16).tolist() == [0, 32]


def test_common_lengths_spread_evenly_over_a_block_lose_half_a_block_less_half_a_token():
    shared = np.arange(0, 160)
    lost = shared - sharing.hits(shared, np.full(160, 1000), 16)
    assert lost.mean() == 7.5


# ---- documents -------------------------------------------------------------------------------------------


def test_without_traces_requests_are_drawn_from_the_shipped_profiles(tmp_path):
    one = block_size.named(tmp_path, "azure2023_conv.csv", 100)
    assert one.name == "drawn from azure-conversation" and len(one.trace) == 100
    shared = block_size.named(tmp_path, "mooncake_conversation.csv", None)
    assert sharing.requests_of(shared.trace)[0].ids


@pytest.mark.skipif(not (DATA / "azure2023_conv.csv").exists(), reason="the traces are not beside this checkout")
def test_a_trace_beside_the_checkout_is_taken_and_cut():
    one = block_size.named(DATA, "azure2023_conv.csv", 50)
    assert one.name == "azure2023_conv" and len(one.trace) == 50


def test_memory_in_one_piece_is_simulated_as_one_block_a_request():
    from pagegen_autotune import load_profile
    from pagegen_autotune.served import Rest

    profile = load_profile("azure-conversation")
    rules = served.rules(SPEC, (16,))
    times = {16: {(rules[16].choose(w.num_seqs, w.max_query_len, w.max_context_len), w): 10.0 + w.total_context / 1e3
                  for w in profile.workloads}}  # fmt: skip
    rated = served.rated(SPEC, profile, rules, times, layers=2)
    assert rated[0].kind == "measured"
    given = trace([100] * 300, [10] * 299 + [400])
    paged, whole = served.rows(
        SPEC, 2, rated, profile, given, "t", Rest(base_s=0.01), memory_bytes=2000 * SPEC.kv_bytes_per_token * 2,
        requests=300,
    )  # fmt: skip
    assert paged["kind"] == "simulated, attention measured"
    assert whole["cell"]["reservation"] == "longest request"
    assert whole["server"]["sequences"] < 4 < paged["server"]["sequences"], "499 slots each of 2000"
    assert whole["server"]["output_tokens_per_s"] < paged["server"]["output_tokens_per_s"]


@pytest.mark.skipif(not STORED.exists(), reason="not measured yet")
def test_the_stored_results_can_be_drawn_and_told():
    pytest.importorskip("matplotlib")
    from block_size_bench import figure

    stored = json.loads(STORED.read_text(encoding="utf-8"))
    assert figure.svg(stored).startswith("<svg") and all(map(block_size.line, stored["rows"]))
    assert all(row["replayed_equal"] for row in stored["rows"] if row["section"] == "sharing" and "replayed" in row)
    assert {row["kind"] for row in stored["rows"] if row["section"] == "profile"} == {"measured"}


def test_what_cannot_be_drawn_ends_with_a_line_that_says_why(tmp_path):
    pytest.importorskip("matplotlib")
    broken = tmp_path / "broken.json"
    broken.write_text("{", encoding="utf-8")
    for stored in (tmp_path / "absent.json", broken):
        with pytest.raises(SystemExit, match="cannot be drawn"):
            block_size.draw(stored, tmp_path / "figure.svg")
    assert not (tmp_path / "figure.svg").exists()


@pytest.mark.parametrize("argument", [["--sections", "memory,speed"], ["--sections", ""], ["--rounds", "0"]])
def test_arguments_that_mean_nothing_are_refused(argument, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["block_size.py", *argument])
    with pytest.raises(SystemExit, match="must be"):
        block_size.main()


def test_a_ratio_is_by_cpu_time_where_rounds_were_disturbed():
    row = {"time_over": {"paged 16": {"median": 3.0, "cpu": 1.5}}}
    assert kernels.over({**row, "clock": kernels.WALL}, "paged 16") == 3.0
    assert kernels.over({**row, "clock": kernels.CPU_TIME}, "paged 16") == 1.5


def test_a_document_without_rows_has_no_figure():
    pytest.importorskip("matplotlib")
    from block_size_bench import figure

    with pytest.raises(ValueError, match="must hold rows of kernel, memory, served, sharing"):
        figure.svg({"rows": []})
