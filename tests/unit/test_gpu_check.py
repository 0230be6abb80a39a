"""What bench/gpu_check.py does on a machine without a GPU: the dry run, how overruns and crashes are kept, how times
are taken (on a device that only writes down what is asked of it), and what the figures are judged to say."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench"
DATA = ROOT.parent / "shared" / "data" / "measured_decode_attention.csv"
sys.path.append(str(BENCH))

import gpu_check  # noqa: E402
from gpu_check_bench import aims as judging  # noqa: E402
from gpu_check_bench import (  # noqa: E402
    correctness,
    needed,
    operands,
    peers,
    published,
    ranking,
    supervisor,
    timing,
    worker,
)
from gpu_check_bench.context import Context  # noqa: E402
from gpu_check_bench.document import CUT, DONE, NOT_RUN, Document  # noqa: E402
from gpu_check_bench.operands import TOLERANCE, Cell  # noqa: E402
from gpu_check_bench.parts import PARTS, Part  # noqa: E402
from gpu_check_bench.supervisor import Supervisor  # noqa: E402

from pagegen.spec import AttentionSpec  # noqa: E402

SMALL = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=32)


# ---- the whole script ----------------------------------------------------------------------------------------------


def test_a_dry_run_takes_the_same_paths_and_its_figures_are_no_results(tmp_path):
    before = sorted(gpu_check.RESULTS.glob("*"))
    done = subprocess.run(
        [sys.executable, str(BENCH / "gpu_check.py"), "--dry-run", "--parts", "bandwidth,integration,records",
         "--output", str(tmp_path)],
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "dry-run.json").read_text())
    assert document["dry_run"]
    assert {name: part["state"] for name, part in document["parts"].items()} == dict.fromkeys(
        ("bandwidth", "integration", "records"), DONE
    )
    assert {aim["met"] for aim in document["aims"]} == {"dry run"}
    assert "DRY RUN" in done.stdout
    assert (tmp_path / "dry-run.records.jsonl").exists()
    assert sorted(gpu_check.RESULTS.glob("*")) == before


def test_a_dry_run_is_never_written_among_the_results():
    with pytest.raises(SystemExit):
        gpu_check.main(["--dry-run", "--output", str(gpu_check.RESULTS)])


@pytest.mark.parametrize(
    "arguments", [["--parts", "speed,typo"], ["--budget", "0"], ["--budget", "nan"], ["--site", "/nowhere/at/all"]]
)
def test_wrong_arguments_are_refused_before_anything_runs(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        gpu_check.main(["--dry-run", *arguments])
    assert arguments[0] in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_told_before_anything_runs(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(Supervisor, "run", lambda self: pytest.fail("nothing may run"))
    assert gpu_check.main(["--dry-run", "--output", str(tmp_path / "file")]) == 2
    assert "argument --output" in capsys.readouterr().err


def test_what_is_missing_is_named_at_once_with_the_lines_that_bring_it(monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(needed, "missing", lambda names: [n for n in names if n in ("libcst", "alembic", "triton")])
    monkeypatch.setattr(gpu_check, "_device", lambda *_: pytest.fail("nothing may be asked of a device yet"))
    assert gpu_check.main([]) == 2
    said = capsys.readouterr().err
    assert "missing here: triton, libcst, alembic" in said
    assert "libcst alembic\n" in said and f"--python-version {sys.version_info[0]}.{sys.version_info[1]}" in said
    assert "--site gpu-site" in said and "triton: use an image" in said


def test_packages_of_a_site_folder_are_found_but_those_that_are_here_come_first(tmp_path, monkeypatch):
    (tmp_path / "only_in_the_site_folder.py").write_text("")
    (tmp_path / "json.py").write_text("raise ImportError('the wrong json')")
    monkeypatch.setattr(sys, "path", list(sys.path))
    asked = []
    monkeypatch.setattr(gpu_check, "_device", lambda dry_run, path: asked.append(path))
    monkeypatch.setattr(needed, "OWN", ("only_in_the_site_folder",))
    monkeypatch.setattr(needed, "GPU", ())
    assert gpu_check.main(["--site", str(tmp_path)]) == 2  # found, but there is no GPU
    assert asked[0][-1] == str(tmp_path)


def test_the_page_names_the_parts_the_options_and_the_line_that_brings_packages():
    page = (ROOT / "docs" / "gpu-check.md").read_text(encoding="utf-8")
    parted = page.split("## What it does")[1]
    assert re.findall(r"^\| (\w+) \| ", parted, re.MULTILINE)[1:] == [part.name for part in PARTS]
    offered = {option for action in gpu_check.parser()._actions for option in action.option_strings}
    named = re.findall(r"^\| `(--[a-z-]+)", page, re.MULTILINE)
    assert named and set(named) | {"--site", "--help", "-h"} == offered
    lacking = ("libcst", "sqlalchemy", "alembic", "platformdirs")
    assert needed.PREPARE.format(folder=needed.FOLDER, version="3.12", names=" ".join(lacking)) in page
    declared = re.search(r"\ndependencies = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL)[1]
    assert {*needed.RUNTIME, *needed.OWN} == set(re.findall(r'"([a-z]+)>', declared))


# ---- parts, workers, overruns --------------------------------------------------------------------------------------


def parts(*names):
    return tuple(Part(name=name, share=1.0, question="?", side_by_side=name.startswith("side")) for name in names)


# What a worker says, by a script: "row A x", "hang", "abort", "exit N", "cut A x y".
SCRIPTED = """
import json, os, sys, time
asked = json.loads(sys.stdin.readline())
pipe = os.fdopen({descriptor}, "w")
def tell(**event):
    pipe.write(json.dumps(event) + chr(10)); pipe.flush()
done = {{tuple(pair) for pair in asked["done"]}}
script = json.load(open(asked["folder"] + "/script.json"))
for part in asked["parts"]:
    tell(event="part", part=part, until=time.monotonic() + script.get("limit", 60))
    for case, act in list(script["cases"][part].items())[asked["shard"][0] :: asked["shard"][1]]:
        if (part, case) in done:
            continue
        if act == "die between":
            os._exit(9)
        tell(event="begin", part=part, case=case, limit_s=0.5 if act == "limited" else None)
        if act in ("hang", "limited"):
            time.sleep(60)
        if act == "abort":
            print("a kernel said something before it died", flush=True); os.abort()
        row = {{"error": "e"}} if act == "stuck" else {{"ok": os.getpid()}}
        tell(event="row", part=part, case=case, row=row, seconds=0.1)
        if act == "stuck":
            os._exit(70)
    tell(event="end", part=part, seconds=0.1)
"""


def supervised(folder, names, cases, *, limit=60.0, budget_s=60.0, grace_s=0.2, side=1, program=SCRIPTED):
    (folder / "script.json").write_text(json.dumps({"cases": cases, "limit": limit}))
    document = Document(folder / "document.json", {"device": "none", "dry_run": True, "budget_s": 1}, parts(*names))
    run = Supervisor(
        parts(*names), document, budget_s=budget_s, dry_run=True, folder=folder, side=side, path=sys.path,
        environment={}, program=program, grace_s=grace_s,
    )  # fmt: skip
    return run, document


def states(document):
    return {name: part["state"] for name, part in document.parts.items()}


def errors(document):
    return {row["case"]: row["error"] for row in document.rows if "error" in row}


def test_a_case_that_takes_its_process_down_costs_that_case_only(tmp_path):
    run, document = supervised(tmp_path, ["a", "b"], {"a": {"1": "", "2": "abort", "3": ""}, "b": {"4": ""}})
    run.run()
    assert [row["case"] for row in document.rows] == ["1", "2", "3", "4"]
    assert list(errors(document)) == ["2"]
    assert "signal 6" in errors(document)["2"] and "a kernel said something" in errors(document)["2"]
    assert states(document) == {"a": DONE, "b": DONE}


def test_an_error_that_sticks_to_a_process_gets_the_next_case_a_fresh_one(tmp_path):
    run, document = supervised(tmp_path, ["a"], {"a": {"1": "stuck", "2": "stuck", "3": ""}})
    run.run()
    assert [(row["case"], "error" in row) for row in document.rows] == [("1", True), ("2", True), ("3", False)]
    assert states(document) == {"a": DONE}


def test_a_part_that_overruns_is_cut_and_the_next_ones_run(tmp_path):
    run, document = supervised(tmp_path, ["a", "b"], {"a": {"1": "", "2": "hang", "3": ""}, "b": {"4": ""}}, limit=0.5)
    run.run()
    assert "its part's time" in errors(document)["2"]
    assert [row["case"] for row in document.rows] == ["1", "2", "4"]
    assert states(document) == {"a": CUT, "b": DONE}


def test_a_case_with_a_time_of_its_own_costs_itself_and_its_part_goes_on(tmp_path):
    run, document = supervised(tmp_path, ["a", "b"], {"a": {"1": "", "2": "limited", "3": ""}, "b": {"4": ""}})
    run.run()
    assert [row["case"] for row in document.rows] == ["1", "2", "3", "4"]
    assert "its own time" in errors(document)["2"]
    assert states(document) == {"a": DONE, "b": DONE}


def test_the_whole_time_ends_everything_and_what_ran_is_in_the_file(tmp_path):
    run, document = supervised(
        tmp_path, ["a", "b"], {"a": {"1": "", "2": "hang"}, "b": {"3": ""}}, budget_s=supervisor.ENDING_S + 1.5
    )
    run.run()
    assert run.clock() - run.start < supervisor.ENDING_S + 3.0
    assert states(document) == {"a": CUT, "b": NOT_RUN}
    kept = json.loads((tmp_path / "document.json").read_text())
    assert [row["case"] for row in kept["rows"]] == ["1", "2"]
    assert "the whole check" in kept["rows"][1]["error"]


def test_a_process_that_dies_between_cases_gives_its_part_up(tmp_path):
    run, document = supervised(tmp_path, ["a", "b"], {"a": {"1": "", "2": "die between"}, "b": {"3": ""}})
    run.run()
    assert [row["case"] for row in document.rows] == ["1", "its cases", "3"]
    assert states(document) == {"a": CUT, "b": DONE}


def test_workers_that_do_not_start_are_told_once_and_not_tried_again(tmp_path):
    run, document = supervised(tmp_path, ["a", "b"], {}, program="raise ImportError('no such thing as torch')")
    run.run()
    assert run.restarts == 0
    assert {row["part"] for row in document.rows} == {"a", "b"}
    assert "no such thing as torch" in document.rows[0]["error"]
    assert states(document) == {"a": NOT_RUN, "b": NOT_RUN}


def test_processes_that_keep_dying_are_not_started_for_ever(tmp_path):
    cases = {"a": {str(i): "abort" for i in range(supervisor.MAX_RESTARTS + 4)}}
    run, document = supervised(tmp_path, ["a"], cases)
    run.run()
    assert len(document.rows) == supervisor.MAX_RESTARTS + 1
    assert states(document) == {"a": CUT}


def test_parts_that_time_nothing_are_shared_by_processes_and_all_cases_run_once(tmp_path):
    cases = {"side": {str(i): "abort" if i == 2 else "" for i in range(7)}, "b": {"last": ""}}
    run, document = supervised(tmp_path, ["side", "b"], cases, side=3)
    run.run()
    assert sorted(row["case"] for row in document.rows) == sorted([*cases["side"], "last"])
    assert document.rows[-1]["case"] == "last"
    assert len({row["ok"] for row in document.rows if "ok" in row}) >= 4


def test_a_stop_leaves_no_process_and_keeps_the_rows(tmp_path):
    run, document = supervised(tmp_path, ["a"], {"a": {"1": "", "2": "hang"}})
    taken = run._take

    def stopping(one, event):
        taken(one, event)
        if event["event"] == "begin" and event["case"] == "2":
            raise KeyboardInterrupt

    run._take = stopping
    workers = []
    begin = run._begin
    run._begin = lambda *given: (begin(*given), workers.extend(run._workers))[0]
    with pytest.raises(KeyboardInterrupt):
        run.run()
    assert [one.process.poll() for one in workers] == [-9]
    assert [row["case"] for row in document.rows] == ["1"]
    assert states(document) == {"a": CUT}


def run_worker(monkeypatch, modules, *, end, clock, **asked):
    """What worker.run emits for parts whose cases are functions; the clock moves by what a case returns as `takes`."""
    monkeypatch.setattr(worker, "BY_NAME", {part.name: part for part in parts(*modules)})
    for name, cases in modules.items():

        def add_cases(context, found, cases=cases):
            for case, run in cases.items():
                found.add(case, run)

        monkeypatch.setitem(sys.modules, f"gpu_check_bench.{name}", types.SimpleNamespace(add_cases=add_cases))
    events = []
    given = {
        "parts": list(modules), "ends": [end] * len(modules), "share_after": 0.0, "shard": [0, 1], "dry_run": True,
        "folder": "/",
        "done": [], "failed": [], "records": "", **asked,
    }  # fmt: skip
    status = worker.run(given, events.append, lambda: clock[0])
    return status, events


def test_a_part_takes_its_share_of_what_is_left_and_the_next_gets_what_it_leaves(monkeypatch):
    clock = [0.0]

    def taking(seconds):
        def case():
            clock[0] += seconds
            return {}

        return case

    status, events = run_worker(
        monkeypatch, {"a": {"1": taking(10.0)}, "b": {"2": taking(50.0), "3": taking(1.0)}}, end=90.0, clock=clock,
        share_after=1.0,
    )  # fmt: skip
    assert status == 0
    assert [event["until"] for event in events if event["event"] == "part"] == [30.0, 50.0]
    assert [event["left"] for event in events if event["event"] == "cut"] == [["3"]]


def test_an_exception_is_a_case_s_result_and_what_ran_before_is_not_run_again(monkeypatch):
    def bad():
        raise ZeroDivisionError("by zero")

    status, events = run_worker(
        monkeypatch, {"a": {"1": bad, "2": dict, "3": lambda: pytest.fail("it ran before")}}, end=9.0, clock=[0.0],
        done=[["a", "3"]],
    )  # fmt: skip
    rows = {event["case"]: event["row"] for event in events if event["event"] == "row"}
    assert status == 0
    assert rows == {"1": {"error": "ZeroDivisionError: by zero"}, "2": {}}


def test_shards_together_are_all_cases():
    cases = list(range(11))
    found = [worker.shared(cases, (i, 4)) for i in range(4)]
    assert sorted(sum(found, [])) == cases


def test_two_cases_of_one_name_are_refused():
    cases = worker.Cases()
    cases.add("x", dict)
    with pytest.raises(ValueError, match="twice"):
        cases.add("x", dict)


def test_shares_are_of_one_whole_and_every_part_has_a_module():
    assert sum(part.share for part in PARTS) == pytest.approx(1.0)
    for part in PARTS:
        assert (BENCH / "gpu_check_bench" / f"{part.name}.py").exists()


# ---- times, on a device that writes down what is asked of it -------------------------------------------------------


class FakeDevice:
    """torch.cuda's part that timing uses: events a microsecond apart for each call replayed."""

    def __init__(self, monkeypatch, refuses=None):
        self.log = []
        self.capturing = False
        self.refuses = refuses
        self.current = "main"
        device = self

        class Event:
            def __init__(self, enable_timing=False):
                assert enable_timing

            def record(self):
                device.log.append("record")

            def synchronize(self):
                device.log.append("wait")

            def elapsed_time(self, other):
                return 0.006

        class Graph:
            def replay(self):
                device.log.append("replay")

        class Capture:
            def __init__(self, graph):
                pass

            def __enter__(self):
                device.capturing, device.current = True, "capture"

            def __exit__(self, kind, error, at):
                device.capturing = False
                if device.refuses:
                    raise RuntimeError(device.refuses)  # as torch does: its stream stays the current one
                device.current = "main"

        class Stream:
            def wait_stream(self, other):
                pass

        for name, fake in {
            "Event": Event, "CUDAGraph": Graph, "graph": Capture, "Stream": Stream,
            "stream": lambda s: contextlib.nullcontext(), "current_stream": Stream,
            "synchronize": lambda: self.log.append("synchronize"),
            "set_stream": lambda s: setattr(self, "current", "main"),
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, fake)
        zeros = torch.zeros
        monkeypatch.setattr(torch, "zeros", lambda *a, device=None, **k: zeros(4, **k))
        monkeypatch.setattr(torch, "amax", lambda x: self.log.append("read"))

    def call(self):
        self.log.append("captured" if self.capturing else "call")


def test_a_cold_sample_reads_something_else_right_before_the_replay_that_it_times(monkeypatch):
    device = FakeDevice(monkeypatch)
    runner = timing.DeviceClock(1).runner([device.call] * 3)
    assert device.log.count("captured") == 3 and runner.how == timing.GRAPH
    device.log.clear()
    assert runner.sample() == pytest.approx(6.0 / 3)
    assert device.log == ["synchronize", "read", "record", "replay", "record", "wait"]


def test_a_warm_sample_replays_twice_and_times_the_second(monkeypatch):
    device = FakeDevice(monkeypatch)
    runner = timing.DeviceClock(1).runner([device.call], cold=False)
    device.log.clear()
    runner.sample()
    assert device.log == ["synchronize", "replay", "record", "replay", "record", "wait"]


def test_what_cannot_be_captured_is_launched_between_events_and_says_so(monkeypatch):
    device = FakeDevice(monkeypatch, refuses="operation not permitted when stream is capturing\nmore")
    runner = timing.DeviceClock(1).runner([device.call] * 2)
    assert runner.how == f"{timing.EVENTS} (no capture: operation not permitted when stream is capturing)"
    assert device.current == "main"
    device.log.clear()
    runner.sample()
    assert device.log == ["synchronize", "read", "record", "call", "call", "record", "wait"]


def test_rounds_take_turns_at_being_first_and_end_where_time_does():
    order = []

    class Runner:
        how = "a list"

        def __init__(self, name):
            self.name = name

        def sample(self):
            order.append(self.name)
            return 1.0

    left = iter([1.0, 1.0, 0.0])
    found = timing.interleave({name: Runner(name) for name in "abc"}, 9, lambda: next(left))
    assert "".join(order) == "abcbcacab"
    assert {name: len(samples) for name, samples in found.items()} == {"a": 3, "b": 3, "c": 3}


# ---- operands and peers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_sets_are_other_memory_behind_one_table_and_all_hold_numbers(kv_dtype):
    spec = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=32, kv_dtype=kv_dtype)
    cell = Cell(spec=spec, batch=3, context=40)
    given = operands.make(cell, 16, on="cpu", cold_bytes=3 * cell.bytes)
    assert len(given.caches) == 3
    assert len({cache.data_ptr() for pair in given.caches for cache in pair}) == 6
    assert sorted(given.block_table.flatten().tolist()) == list(range(9))
    assert all(cache.float().isfinite().all() for pair in given.caches for cache in pair)
    assert given.caches[2][0].dtype == spec.kv_dtype
    assert cell.bytes == 2 * 3 * 40 * 2 * 32 * spec.kv_dtype.itemsize


def test_an_error_is_seen_whatever_it_is():
    given = operands.make(Cell(spec=SMALL, batch=2, context=40), 16, on="cpu", cold_bytes=1)
    right = given.expected.to(torch.bfloat16)
    assert given.error(right) < TOLERANCE
    wrong = right.clone()
    wrong[1, 3, 5] = float("nan")
    assert given.error(wrong) == float("inf")
    assert given.error(right.flip(0)) > TOLERANCE


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("peer", [peers.GatherSdpa(), peers.FlexPaged("eager")], ids=lambda peer: peer.name)
def test_peers_that_run_here_give_the_reference_result(peer, kv_dtype):
    spec = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=32, kv_dtype=kv_dtype)
    cell = Cell(spec=spec, batch=2, context=150)
    given = operands.make(cell, peer.block_size(cell), on="cpu", cold_bytes=1)
    if isinstance(peer, peers.FlexPaged) and kv_dtype != "bfloat16":
        with pytest.raises(peers.Unsupported):
            peer.prepare(given)
        return
    assert given.error(peer.prepare(given).result()) < TOLERANCE


def test_a_peer_that_is_not_here_is_listed_with_the_reason():
    assert {peer.name for peer in peers.others(dry_run=True) if peers.absent(peer) is None} == {
        "gather, then SDPA", "FlexAttention, paged",
    }  # fmt: skip
    assert "flashinfer" in peers.absent(peers.FlashInfer())


def reference(given, k, v, table):
    from pagegen.reference import reference_attention

    result = reference_attention(given.q.float(), k, v, table, given.seq_lens, scale=given.cell.spec.scale)
    return result.to(given.q.dtype)


@pytest.mark.parametrize(("peer", "module", "table"), [
    (peers.FlashAttention2(), "flash_attn", "block_table"),
    (peers.FlashAttention3(), "flash_attn_interface", "page_table"),
])  # fmt: skip
def test_flash_attention_is_called_as_its_interface_says(monkeypatch, peer, module, table):
    """By its documented signature: q [batch, queries, heads, D], pages of 256 (2), lengths and table int32."""
    cell = Cell(spec=SMALL, batch=2, context=300)
    given = operands.make(cell, peer.block_size(cell), on="cpu", cold_bytes=2 * cell.bytes)
    seen = []

    def flash_attn_with_kvcache(q, k, v, *, cache_seqlens, softmax_scale, causal, window_size, **options):
        assert q.dim() == 4 and cache_seqlens.dtype == options[table].dtype == torch.int32 and causal
        assert k.shape[1] % 256 == 0 or table == "page_table"
        seen.append(k.data_ptr())
        return reference(given, k, v, options[table])[:, None]

    monkeypatch.setitem(
        sys.modules, module, types.SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache, __version__="0")
    )
    prepared = peer.prepare(given)
    assert given.error(prepared.result()) < TOLERANCE
    seen.clear()
    for call in prepared.calls:
        call()
    assert len(set(seen)) == len(given.caches) == 2


def test_flashinfer_is_planned_once_from_the_same_blocks(monkeypatch):
    cell = Cell(spec=SMALL, batch=2, context=40)
    given = operands.make(cell, 16, on="cpu", cold_bytes=2 * cell.bytes)

    class Wrapper:
        plans = 0

        def __init__(self, workspace, layout, use_tensor_cores=False):
            assert layout == "NHD" and workspace.dtype == torch.uint8

        def plan(self, indptr, indices, last, heads, kv_heads, dim, page_size, *, window_left, q_data_type,
                 kv_data_type, sm_scale):  # fmt: skip
            Wrapper.plans += 1
            assert indptr.tolist() == [0, 3, 6] and last.tolist() == [8, 8] and window_left == -1
            self.table = indices.view(2, 3)

        def run(self, q, cache):
            return reference(given, *cache, self.table)

    monkeypatch.setattr(peers, "WORKSPACE_BYTES", 16)
    monkeypatch.setitem(
        sys.modules, "flashinfer", types.SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Wrapper, __version__="0")
    )
    prepared = peers.FlashInfer().prepare(given)
    for call in prepared.calls:
        call()
    assert given.error(prepared.result()) < TOLERANCE and Wrapper.plans == 1


LAUNCHES = """
import sys
from dataclasses import replace

sys.path[:0] = {path!r}
from launching_nowhere import LAUNCHED, become_sm_90

become_sm_90()
from batches import make_batch
from features import FEATURES
from gpu_check_bench import correctness, fixed_splits, operands
from gpu_check_bench.operands import Cell
from pagegen.modifiers import captured_tensors
from pagegen.spec import AttentionSpec, Target
from pagegen.targets import default_variant, load_attention

for kv_dtype in ("bfloat16", "float8_e4m3fn"):
    spec = AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, kv_dtype=kv_dtype)
    given = operands.make(Cell(spec=spec, batch=2, context=100), 16, on="cpu", cold_bytes=1)
    space = fixed_splits.workspace(given.q)
    fixed_splits.decode(given.q, *given.caches[0], given.block_table, given.seq_lens, given.out, space, scale=0.1)
target = Target.parse("sm_90")
for feature in FEATURES:
    kinds = getattr(feature, "kinds", ())
    if "decode" not in kinds or str(target) in feature.absent or sys.argv[1:] not in ([], [feature.name]):
        continue
    variant = replace(default_variant(feature.spec, feature.layout, target, decode=True), **feature.changes)
    captures = [correctness._grown(x) for x in captured_tensors(feature.spec.score_mod, feature.spec.mask_mod)]
    batch = make_batch(feature.spec, [(37, 1)], block_size=feature.block_size, captures=tuple(captures))
    load_attention(batch.spec, batch.layout, variant, target)(batch.call())
print(*LAUNCHED)
"""


def test_what_is_launched_binds_specialises_and_compiles_for_sm_90(nightly):
    """The plain kernel, and a decode kernel that takes a tuple; with --nightly one of every feature."""
    pytest.importorskip("triton")
    path = [str(BENCH), str(ROOT), str(ROOT / "autotune"), str(ROOT / "tests" / "kernels")]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    only = [] if nightly else ["score function with a captured tensor"]
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHES.format(path=path), *only], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-800:]
    launched = done.stdout.split()
    assert launched[:4] == ["attend_part", "merge_parts"] * 2
    assert {"paged_attention_kernel", "reduce_kernel"} <= set(launched[4:])
    assert not nightly or "balanced_attention_kernel" in launched


# ---- what a GPU's correctness part needs, as far as a CPU shows it -------------------------------------------------


def test_blocks_behind_many_elements_mean_the_same():
    from batches import make_batch

    batch = make_batch(SMALL, [(37, 1), (5, 1)], block_size=16)
    far = correctness._far(batch, 100_000)
    assert far.k_cache.numel() > 100_000
    for here, there in zip(batch.expected(), far.expected(), strict=True):
        assert torch.equal(here, there)


def test_a_wrong_kernel_is_found(monkeypatch):
    from batches import make_batch

    batch = make_batch(SMALL, [(37, 1), (5, 1)], block_size=16)

    def kernel(call):
        out, lse = batch.expected()
        call.out.copy_(out)
        call.lse.copy_(lse)
        call.out[0, 0, 0] += 0.5

    monkeypatch.setattr(correctness, "load_attention", lambda *_: kernel)
    context = Context(on="cpu", dry_run=True, folder=Path())
    assert "wrong" in correctness._checked(context, batch, None)["error"]


# ---- published latencies and ranks ---------------------------------------------------------------------------------


def test_the_committed_latencies_are_the_source_s():
    if not DATA.exists():
        pytest.skip("the source's file is not beside the checkout")
    assert json.loads(published.FILE.read_text()) == published.distil(DATA)


def test_the_shapes_of_a_device_take_turns_and_name_themselves_apart():
    rows = published.rows_for("NVIDIA H200")
    assert len({published.case_name(row) for row in rows}) == len(rows) > 100
    turned = published.in_turns(rows)
    assert sorted(map(str, turned)) == sorted(map(str, rows))
    kinds = 2 * len(published.GEOMETRIES)
    assert len({tuple(row[name] for name in published.FIELDS[1:6]) for row in turned[:kinds]}) == kinds
    assert published.rows_for("NVIDIA GeForce RTX 4090") == []


def test_ranks_share_equal_places_and_correlate():
    assert ranking.ranks([3.0, 1.0, 3.0, 2.0]) == [3.5, 1.0, 3.5, 2.0]
    assert ranking.spearman([1, 2, 3, 4], [10, 20, 30, 40]) == 1.0
    assert ranking.spearman([1, 2, 3, 4], [4, 3, 2, 1]) == -1.0
    assert ranking.spearman([1, 1, 1], [1, 2, 3]) is None and ranking.spearman([1, 2], [1, 2]) is None


def test_the_top_five_hold_the_winner_or_one_within_five_percent():
    measured = [104.0, 130.0, 120.0, 110.0, 125.0, 100.0]
    assert ranking.agreement([1, 2, 3, 4, 5, 6], measured)["top_holds_winner"]
    measured[0] = 106.0
    found = ranking.agreement([1, 2, 3, 4, 5, 6], measured)
    assert not found["top_holds_winner"] and found["top_loss"] == 0.06


# ---- the aims ------------------------------------------------------------------------------------------------------


def speed_row(batch, context, dtype, **times):
    return {
        "part": "speed", "case": f"{batch} x {context} {dtype}", "batch": batch, "context": context, "kv_dtype": dtype,
        "q_heads": 32, "kv_heads": 8, "head_dim": 128, "window": None, "kv_bytes": batch * context * 4096,
        "contenders": {name.replace("_", " "): {"us": us} for name, us in times.items()},
    }  # fmt: skip


def judged(*rows):
    return {aim["asked"] + " " + aim["aim"]: (aim["met"], aim["found"]) for aim in judging.aims(rows)}


def met(found, word):
    return next(verdict for name, (verdict, _) in found.items() if word in name)


def test_without_figures_nothing_is_met():
    assert {aim["met"] for aim in judging.aims([])} == {"not known"}


@pytest.mark.parametrize(("us", "verdict"), [(1073741824 / 3600e3, "yes"), (1073741824 / 3590e3, "no")])
def test_bandwidth_is_the_best_of_ours_over_the_copy(us, verdict):
    copy = {"part": "bandwidth", "case": "device copy", "gb_s": 4000.0}
    found = judged(copy, speed_row(64, 4096, "bfloat16", pagegen_16=us + 50, pagegen_64=us, FlashInfer=us / 2))
    assert met(found, "copy") == verdict and met(found, "fastest peer") == "no"


def test_published_latencies_are_met_in_half_and_never_far_below():
    def row(speed):
        return {"part": "published", "case": str(speed), "speed": speed}

    assert met(judged(row(1.0), row(0.8)), "half") == "yes" and met(judged(row(1.0), row(0.8)), "everywhere") == "yes"
    assert met(judged(row(1.0), row(0.79), row(0.9)), "half") == "no"
    assert met(judged(row(1.5), row(0.79)), "everywhere") == "no"


def test_float8_is_judged_on_long_cells_by_the_worst():
    rows = [
        speed_row(64, 4096, "bfloat16", pagegen=170.0), speed_row(64, 4096, "float8_e4m3fn", pagegen=100.0),
        speed_row(1, 4096, "bfloat16", pagegen=10.0), speed_row(1, 4096, "float8_e4m3fn", pagegen=10.0),
    ]  # fmt: skip
    assert met(judged(*rows), "float8") == "yes"
    rows[1]["contenders"]["pagegen"]["us"] = 101.0
    assert met(judged(*rows), "float8") == "no"


def test_a_failed_case_fails_its_aim():
    good, bad = {"part": "correctness", "case": "a"}, {"part": "correctness", "case": "b", "error": "wrong"}
    assert met(judged(good), "reference") == "yes" and met(judged(good, bad), "reference") == "no"
    assert met(judged({"part": "integration", "case": "c", "error": "x"}), "CUDA graph") == "no"


def test_the_document_is_whole_at_every_moment(tmp_path):
    path = tmp_path / "document.json"
    document = Document(path, {"device": "x"}, parts("a"))
    document.began("a")
    stop, seen = threading.Event(), []

    def reading():
        while not stop.is_set():
            if path.exists():
                seen.append(len(json.loads(path.read_text())["rows"]))

    reader = threading.Thread(target=reading)
    reader.start()
    for i in range(100):
        document.add("a", str(i), {"figures": list(range(200))}, 0.0)
    stop.set()
    reader.join()
    assert seen and seen == sorted(seen)
    assert [file.name for file in tmp_path.iterdir()] == ["document.json"]


def test_a_disk_that_is_full_loses_no_row(tmp_path, monkeypatch):
    document = Document(tmp_path / "document.json", {"device": "x"}, parts("a"))
    document.add("a", "1", {}, 0.0)

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    document.add("a", "2", {}, 0.0)
    assert "No space left on device" in document.unwritten
    assert [row["case"] for row in document.rows] == ["1", "2"]
    assert [row["case"] for row in json.loads((tmp_path / "document.json").read_text())["rows"]] == ["1"]
    assert [file.name for file in tmp_path.iterdir()] == ["document.json"]
    monkeypatch.undo()
    document.add("a", "3", {}, 0.0)
    assert not document.unwritten


def test_time_is_kept_for_writing_the_trials_down(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "RECORDS_S", 4.0)
    run, document = supervised(
        tmp_path, ["a", "b", "records"], {"a": {"1": "hang"}, "b": {"2": ""}, "records": {"export": ""}},
        budget_s=supervisor.ENDING_S + 6.0,
    )  # fmt: skip
    run.run()
    assert run.restarts == 1
    assert [row["case"] for row in document.rows] == ["1", "export"]
    assert states(document) == {"a": CUT, "b": NOT_RUN, "records": DONE}
