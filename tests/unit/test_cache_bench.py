"""What bench/cache.py and bench/serving.py do with traces, recordings, samples and clocks; nothing is timed here."""

from __future__ import annotations

import json
import random
import sys
import xml.etree.ElementTree
from array import array
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from pagegen.cache import BlockAllocator
from pagegen.serving import Scheduler

BENCH = Path(__file__).parents[2] / "bench"
DATA = Path(__file__).parents[3] / "shared" / "data"
sys.path.append(str(BENCH))

from cache_bench import figure, hits, memory, peers, replays, report, samples, sequences  # noqa: E402
from cache_bench.document import as_text  # noqa: E402
from cache_bench.recording import ADD, FREE, STEP, Recorder, Recording, record  # noqa: E402
from cache_bench.traces import (  # noqa: E402
    MOONCAKE,
    SHAREGPT,
    Request,
    Turn,
    conversations,
    packed,
    prompt_of,
    read,
    turns_of,
)
from cache_bench.worker import Worker  # noqa: E402
from serving_bench import figure as serving_figure  # noqa: E402
from serving_bench import workloads  # noqa: E402
from serving_bench.serve import CpuClock, serve  # noqa: E402

BLOCK = 4


def request(row: int, prompt: int, *ids: int, output: int = 0) -> Request:
    return Request(row, prompt, output, ids)


def trace(seed: int, count: int) -> list[Request]:
    """Requests over a random tree of blocks, of full blocks and with a tail."""
    draw = random.Random(seed)
    known: list[tuple[int, ...]] = [()]
    made = []
    for row in range(count):
        ids = draw.choice(known)
        ids = ids + tuple(range(1000 * (row + 1), 1000 * (row + 1) + draw.randrange(4)))
        known.append(ids)
        made.append(request(row, max(1, len(ids) * BLOCK + draw.randrange(BLOCK)), *ids))
    return made


# ---- traces ----------------------------------------------------------------------------------------------


def test_equal_ids_give_equal_tokens_and_other_ids_other_tokens():
    a, b = prompt_of(request(0, 10, 7, 8, 9), BLOCK), prompt_of(request(1, 12, 7, 8, 5), BLOCK)
    assert a[:8].tolist() == b[:8].tolist()
    assert a[8:].tolist() != b[8:10].tolist()


def test_what_no_id_names_gets_tokens_that_no_other_row_has():
    a, b = (prompt_of(request(row, 7, 7), BLOCK) for row in (0, 1))
    assert a[:4].tolist() == b[:4].tolist()
    assert not set(a[4:].tolist()) & set(b[4:].tolist())


def test_a_trace_is_read_with_its_runs_of_ids(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens,prefix_hash_ids\n0,9,3,0 4-6\n,2,1,\n", encoding="utf-8")
    assert list(read(path)) == [request(0, 9, 0, 4, 5, 6, output=3), request(1, 2, output=1)]
    assert len(list(read(path, 1))) == 1


def test_a_conversation_is_a_run_of_rows_that_repeat_what_was_said_and_answered():
    first, second = request(0, 5, 1, output=3), request(1, 9, 1, 2, output=1)
    stranger, short = request(2, 9, 8, 9), request(3, 9, 8, 9, output=1)
    assert list(conversations([first, second, stranger])) == [[first, second], [stranger]]
    assert list(conversations([short, request(4, 9, 8, 9)])) == [[short], [request(4, 9, 8, 9)]]


def test_the_turns_of_a_conversation_repeat_each_others_tokens_answers_included():
    first, second = turns_of([request(0, 6, 1, output=5), request(1, 14, 1, 2, 3, output=2)], BLOCK)
    assert (len(first.prompt), len(first.output), len(second.prompt), len(second.output)) == (6, 5, 14, 2)
    assert second.prompt[:11].tolist() == [*first.prompt.tolist(), *first.output.tolist()]


def test_mixed_turns_keep_each_conversations_order_and_lose_none():
    made = [
        [request(10 * i, 4, 100 * i, output=1), request(10 * i + 1, 9, 100 * i, 100 * i + 1, output=1)]
        for i in range(1, 20)
    ]
    rows = [r.row for r in replays.alternating((r for turns in made for r in turns), 4)]
    assert sorted(rows) == sorted(r.row for turns in made for r in turns) != rows
    assert all(rows.index(10 * i) < rows.index(10 * i + 1) for i in range(1, 20))
    # of four at a time, the last cannot begin before all but three of the others have ended
    assert rows.index(190) >= 2 * 15


# ---- hit rates -------------------------------------------------------------------------------------------


def test_hits_are_counted_up_to_the_first_block_that_is_new():
    requests = [request(0, 12, 1, 2, 3), request(1, 12, 1, 9, 3)]
    assert hits.named(requests, BLOCK, partial=False).hit_tokens == BLOCK
    assert hits.named(requests, BLOCK, partial=False).blocks == 4


def test_the_last_token_and_a_partial_block_are_no_hit_for_a_cache_of_blocks():
    full, partial = [request(0, 8, 1, 2), request(1, 8, 1, 2)], [request(0, 6, 1, 2), request(1, 6, 1, 2)]
    assert [hits.named(full, BLOCK, partial=p).hit_tokens for p in (False, True)] == [4, 8]
    assert [hits.named(partial, BLOCK, partial=p).hit_tokens for p in (False, True)] == [4, 6]


@pytest.mark.parametrize("seed", range(5))
def test_an_allocator_that_never_evicts_finds_what_the_ids_say(seed):
    requests = trace(seed, 60)
    found, counted = hits.replay(requests, BLOCK, 5000), hits.named(requests, BLOCK, partial=False)
    assert (found.hit_tokens, found.prompt_tokens, found.refused) == (counted.hit_tokens, counted.prompt_tokens, 0)
    assert counted.hit_tokens > 0


def naive_lru(requests: list[Request], num_blocks: int) -> tuple[int, int]:
    """Hit tokens and refused requests of a cache that forgets the block used longest ago, the deepest first."""
    cached: OrderedDict[int, None] = OrderedDict()  # oldest first
    found = refused = 0
    for asked in requests:
        needed, full = -(-asked.prompt_tokens // BLOCK), asked.prompt_tokens // BLOCK
        if needed > num_blocks:
            refused += 1
            continue
        hit = 0
        while hit < (asked.prompt_tokens - 1) // BLOCK and asked.ids[hit] in cached:
            hit += 1
        found += hit * BLOCK
        for name in asked.ids[:hit]:
            del cached[name]
        while len(cached) + needed > num_blocks:
            cached.popitem(last=False)
        for name in reversed(asked.ids[:full]):
            cached.pop(name, None)
            cached[name] = None
    return found, refused


@pytest.mark.parametrize("num_blocks", [6, 10, 20, 40])
@pytest.mark.parametrize("seed", range(3))
def test_a_small_cache_finds_what_a_naive_lru_finds(seed, num_blocks):
    requests = [r for r in trace(seed, 120) if len(r.ids) > r.prompt_tokens // BLOCK - 1]
    found = hits.replay(requests, BLOCK, num_blocks)
    assert (found.hit_tokens, found.refused) == naive_lru(requests, num_blocks)


def test_a_request_larger_than_the_memory_is_refused_and_counts_as_asked_for():
    found = hits.replay([request(0, 8, 1, 2), request(1, 80, *range(20))], BLOCK, 4)
    assert (found.refused, found.prompt_tokens, found.rate) == (1, 88, 0.0)


@pytest.mark.skipif(not (DATA / MOONCAKE[0]).exists(), reason="the traces are not beside this checkout")
@pytest.mark.parametrize(
    ("name", "block", "published", "of_blocks"), [(*MOONCAKE, 0.374, 0.3734), (*SHAREGPT, 0.602, 0.6016)]
)
def test_the_published_hit_rates_are_reproduced(name, block, published, of_blocks):
    """Of the whole trace by the ids, of its first 2000 rows by the allocator too, exactly; the bench replays it all."""
    requests = list(read(DATA / name))
    assert round(hits.named(requests, block, partial=True).rate, 3) == published
    assert round(hits.named(requests, block, partial=False).rate, 4) == of_blocks
    counted = hits.named(requests[:2000], block, partial=False)
    assert hits.replay(requests[:2000], block, counted.blocks + 500).hit_tokens == counted.hit_tokens > 0


# ---- recordings ------------------------------------------------------------------------------------------


def small(running: int = 3, num_blocks: int = 60) -> Recording:
    dialogues = [turns_of(turns, BLOCK) for turns in ([request(i, 9, 1, 2, output=4)] for i in range(5))]
    talk = turns_of([request(7, 6, 70, output=5), request(8, 14, 70, 71, 72, output=2)], BLOCK)
    return record(
        "small", "made", [talk, *dialogues], block_size=BLOCK, num_blocks=num_blocks, running=running, operations=999
    )


def test_a_recording_adds_and_frees_each_request_once_and_feeds_all_but_its_last_token():
    made = small()
    counts = made.counts()
    assert (counts["add"], counts["free"], counts["append"]) == (7, 7, 5 * 3 + 4 + 1)
    assert made.count == sum(counts.values())
    by_kind = {kind: [o for o in made.operations() if o.kind == kind] for kind in (ADD, STEP, FREE)}
    assert sorted(o.requests[0] for o in by_kind[ADD]) == sorted(o.requests[0] for o in by_kind[FREE])
    assert all(len(o.requests) == len(o.tokens) <= 3 for o in by_kind[STEP])
    assert all(len(o.requests) == 1 and len(o.tokens) in (6, 9, 14) for o in by_kind[ADD])


def test_a_next_turn_is_added_after_the_turn_before_was_freed_and_finds_its_answer():
    operations = small().operations()
    kinds = [(o.kind, o.requests[0], len(o.tokens)) for o in operations]
    first = kinds.index((ADD, "request-0", 6))
    second = next(i for i, (kind, _, tokens) in enumerate(kinds) if kind == ADD and tokens == 14)
    assert first < kinds.index((FREE, "request-0", 0)) < second
    # of prompt and answer 6 + 4 tokens were computed: two full blocks
    assert small().cached[[o for o in operations if o.kind == ADD].index(operations[second])] == 8


def test_a_recording_survives_its_file(tmp_path):
    made = small()
    made.save(tmp_path / "made.npz")
    loaded = Recording.load(tmp_path / "made.npz")
    assert loaded.operations() == made.operations()
    assert (loaded.name, loaded.source, loaded.facts()) == (made.name, made.source, made.facts())
    assert loaded.cached.tolist() == made.cached.tolist()


def test_a_replay_finds_what_was_recorded_and_another_cache_is_told_apart(tmp_path):
    made = sequences.made_conversation(3000)
    made.save(tmp_path / "made.npz")
    worker = Worker("pagegen")
    assert worker.load(str(tmp_path / "made.npz"))["cached"] == made.cached.tolist()
    assert worker.run()["cpu_seconds"] >= 0
    parts = worker.parts()["parts"]
    assert {kind: len(taken) for kind, taken in parts.items()} == {
        "add": made.counts()["add"],
        "step": made.facts()["steps"],
        "free": made.counts()["free"],
    }
    wrong = made.cached.tolist()
    wrong[3] += 16
    assert peers.differences(made.cached.tolist(), wrong).startswith(f"1 of {len(wrong)} adds: add 3 found")
    assert peers.differences(wrong[1:], wrong) and not peers.differences(wrong, wrong)


def test_a_recording_is_the_same_every_time():
    assert sequences.made_conversation(500).operations() == sequences.made_conversation(500).operations()


def test_a_recorded_server_never_promises_more_blocks_than_there_are():
    tight = small(running=7, num_blocks=8)  # two requests of 4 blocks at most
    running = most = 0
    for operation in tight.operations():
        running += {ADD: 1, FREE: -1, STEP: 0}[operation.kind]
        most = max(most, running)
    assert most == 2
    assert tight.counts() == small().counts()


def test_a_turn_that_no_cache_of_this_size_holds_is_refused():
    with pytest.raises(ValueError, match="num_blocks must hold"):
        record("x", "made", [[Turn(np.zeros(50, np.uint32), np.zeros(1, np.uint32))]], block_size=BLOCK, num_blocks=5,
               running=1, operations=9)  # fmt: skip


def test_a_recording_of_full_hits_finds_all_but_the_last_block_every_time_but_the_first():
    made = sequences.full_hits(64, 4)
    assert made.cached.tolist() == [0, 48, 48, 48]


def test_a_recording_of_decode_steps_gives_every_sequence_a_token_in_every_step():
    made = sequences.decode(8, 40, 200)
    steps = [o for o in made.operations() if o.kind == STEP]
    assert all(len(o.requests) == 8 for o in steps) and len(steps) >= 24
    assert made.counts()["append"] == 8 * len(steps)


def test_a_process_of_its_own_replays_a_recording_and_a_missing_package_is_a_row(tmp_path):
    comparison = peers.Comparison((), tmp_path)
    assert comparison.about == {}
    replayer = peers.Replayer("pagegen", 1, tmp_path)
    made = small()
    made.save(tmp_path / "made.npz")
    try:
        assert replayer.ask("load", path=str(tmp_path / "made.npz"))["cached"] == made.cached.tolist()
    finally:
        replayer.close()
    void = peers.Comparison(("vllm:sha256",), tmp_path)
    assert "not installed" in void.versions()["vllm:sha256"]
    assert list(void.rows(made, 1)) == []
    void.close()


# ---- samples, documents, figures -------------------------------------------------------------------------


def test_a_percentile_is_a_value_that_occurs():
    values = [float(i) for i in range(1, 101)]
    assert [samples.percentile(values, p) for p in (0, 1, 50, 99, 100)] == [1, 1, 50, 99, 100]
    assert samples.percentile([3.0], 99) == 3.0
    assert samples.percentile([5.0, 1.0], 50) == 1.0
    for wrong in (([], 50), ([1.0], 101), ([1.0], -1)):
        with pytest.raises(ValueError, match="percentile needs"):
            samples.percentile(*wrong)


def test_ratios_are_taken_round_by_round():
    assert samples.ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0])["median"] == 2.0
    assert samples.ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0])["range"] == [1.0, 3.0]
    with pytest.raises(ValueError, match="zip"):
        samples.ratio([1.0], [1.0, 2.0])


def test_runs_take_turns_and_a_first_round_is_thrown_away():
    order: list[str] = []
    taken = samples.interleaved({name: lambda n=name: order.append(n) or len(order) for name in "abc"}, 4)
    assert len(order) == 15
    assert all(sorted(order[i : i + 3]) == ["a", "b", "c"] for i in range(0, 15, 3))
    assert all(len(found) == 4 and min(found) > 3 for found in taken.values())


def document() -> dict:
    hit = {"section": "hit_rate", "limit": 0.4, "refused": 0}
    replay = {"section": "replay", "status": "ok", "cell": {"sequence": "chat"}}
    rows = [
        *({**hit, "cell": {"trace": "t.csv", "order": "o", "block_size": 16, "tokens": 2**i}, "rate": i / 60}
          for i in (14, 17, 20)),
        {**replay, "what": "pagegen", "operations_per_s": 900_000, "time_over_ours": {"median": 1.0, "range": [1, 1]}},
        {**replay, "what": "vllm:sha256", "operations_per_s": 90_000,
         "time_over_ours": {"median": 10.0, "range": [9, 11]}},
        {**replay, "what": "vllm:xxhash", "status": "void", "reason": "1 of 2 adds"},
    ]  # fmt: skip
    return {"environment": {"cpu": "c", "threads": 2}, "rows": rows}


def test_a_document_is_written_with_one_row_a_line():
    text = as_text(document())
    assert json.loads(text) == document()
    assert sum(line.startswith('  {"section"') for line in text.splitlines()) == 6


def test_the_summary_names_a_void_comparison_and_leaves_it_out_of_the_ratios():
    found = report.summary(document()["rows"])
    assert found["vllm_time_over_ours"] == {"vllm:sha256": {"least": 10.0, "median": 10.0, "sequences": 1}}
    assert found["void"] == ["vllm:xxhash"]
    assert found["slowest_step_us"] is None


def test_the_figure_of_the_cache_draws_every_curve_and_bar():
    drawn = figure.svg(document())
    root = xml.etree.ElementTree.fromstring(drawn)
    assert len(root.findall("{*}circle")) == 3
    assert "chat, vLLM, sha256 (its default)" in drawn and "chat, vLLM, xxhash" not in drawn
    with pytest.raises(ValueError, match="must hold rows"):
        figure.svg({"rows": []})


def test_the_figure_of_the_server_draws_each_trace_in_its_own_line():
    names = ("output_tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")
    found = {name: {"median": 5.0, "range": [4.0, 6.0]} for name in names}
    rows = [
        {"section": section, "cell": {"trace": trace, "block_size": size}, **found}
        for section in ("rush", "paced") for trace in ("chat", "single") for size in (16, 256)
    ]  # fmt: skip
    drawn = serving_figure.svg({"model": "m", "environment": {"cpu": "c", "threads": 2}, "clock": "wall", "rows": rows})
    assert len(xml.etree.ElementTree.fromstring(drawn).findall("{*}rect/{*}title")) == 2 * 2 * 5


def test_the_memory_of_a_block_is_counted_against_that_of_the_models_keys_and_values(monkeypatch):
    assert memory.kv_bytes_per_block(16) == 16 * 32 * 1024  # 16 layers, 8 heads of 64, bfloat16
    monkeypatch.setattr(memory, "TOKENS", 1 << 15)
    found = memory.measure(16, "traced")
    assert found["empty"] > 0 and found["live"] > 0 and found["cached"] > 0


# ---- the server's runs -----------------------------------------------------------------------------------


class SteppedClock:
    """A second a step; waiting is free."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s

    def wait_until(self, time_s: float) -> None:
        self.time_s = max(self.time_s, time_s)


def served(workload, span_s: float):
    clock = SteppedClock()
    scheduler = Scheduler(BlockAllocator(400, BLOCK), max_num_seqs=8, max_batch_tokens=64)

    def run(step):
        for seq_id, query in zip(step.seq_ids, step.query_lens, strict=True):
            allocator = scheduler.cache
            allocator.mark_computed(seq_id, allocator.computed(seq_id) + query)
        clock.time_s += 1.0
        return [9] * len(step.seq_ids)

    return serve(scheduler, run, workload, span_s, clock)


def dialogue(*turns: tuple[int, int, float]) -> tuple[workloads.Turn, ...]:
    return tuple(workloads.Turn(array("I", range(said)), answer, after) for said, answer, after in turns)


def test_a_next_turns_prompt_is_all_before_it_with_the_answer_that_came():
    run = served(workloads.Workload("w", "made", (dialogue((6, 3, 0.0), (2, 2, 0.5)),)), 20.0)
    first, second = run.outcomes
    assert second.request.prompt.tolist() == [*range(6), 9, 9, 9, 0, 1]
    # computed were 6 + 2 tokens: two full blocks of 4
    assert (first.hit_tokens, second.hit_tokens) == (0, 8)
    assert second.request.arrival_s == first.times.end_s + 10.0


def test_without_a_span_all_dialogues_begin_at_once_and_with_one_they_come_when_they_are_due():
    workload = workloads.Workload("w", "made", (dialogue((4, 2, 0.0)), dialogue((5, 2, 0.5)), dialogue((7, 2, 1.0))))
    assert [o.request.arrival_s for o in served(workload, 0.0).outcomes] == [0.0, 0.0, 0.0]
    paced = served(workload, 40.0)
    assert sorted(o.request.arrival_s for o in paced.outcomes) == [0.0, 20.0, 40.0]
    row = paced.to_row()
    assert (row["ttft_p50_ms"], row["itl_p99_ms"]) == (1000.0, 1000.0)
    assert row["output_tokens_per_s"] == pytest.approx(6 / 42)


def test_waiting_on_the_cpus_clock_sets_it_forward_and_never_back():
    clock = CpuClock()
    clock.wait_until(1000.0)
    assert 1000.0 <= clock.now_s() < 1060.0
    clock.wait_until(5.0)
    assert clock.now_s() >= 1000.0


def test_every_answer_is_as_long_as_the_workload_says():
    for workload in workloads.workloads(Path("nowhere"), 10, 100):
        lengths = {(i, j): turn.answer for i, turns in enumerate(workload.dialogues) for j, turn in enumerate(turns)}
        assert {o.request.id: o.output_tokens for o in served(workload, 0.0).outcomes} == lengths
        assert workload.facts()["requests"] == len(lengths) >= 10


def test_workloads_are_the_same_every_time_and_keep_to_the_vocabulary():
    one, two = (list(workloads.workloads(Path("nowhere"), 12, 50)) for _ in range(2))
    for a, b in zip(one, two, strict=True):
        assert [[(t.said, t.answer, t.after) for t in d] for d in a.dialogues] == [
            [(t.said, t.answer, t.after) for t in d] for d in b.dialogues
        ]
        assert all(max(t.said) < 50 for d in a.dialogues for t in d)
        assert min(d[0].after for d in a.dialogues) == 0.0


@pytest.mark.skipif(not (DATA / SHAREGPT[0]).exists(), reason="the traces are not beside this checkout")
def test_the_traces_workloads_are_short_enough_for_the_cache_and_repeat_their_prompts():
    chat, single = workloads.workloads(DATA, 64, 49_152)
    assert (chat.source, single.source) == (SHAREGPT[0], workloads.AZURE)
    for workload in (chat, single):
        facts = workload.facts()
        assert 64 <= facts["requests"] < 70
        assert facts["longest_prompt"] <= 400
    assert chat.facts()["mean_prompt"] > 2 * chat.facts()["mean_said"]
    assert all(3 <= len(turns) <= 6 for turns in chat.dialogues)


def test_a_recorder_counts_every_token_of_a_step():
    recorder = Recorder()
    recorder.add(0, array("I", [1, 2, 3]), 0)
    recorder.step([0, 1], array("I", [4, 5]))
    recorder.free(0)
    assert recorder.count == 4
    assert packed(np.array([1, 2], np.uint32)) == array("I", [1, 2])
