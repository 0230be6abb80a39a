"""`pagegen report`: one page that needs nothing else, from whatever a database holds."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from database_fakes import CPU, DECODE, H100, MIXED, PROFILE, SPEC, TUNED, cpu_trial, rule, trial

from pagegen import costs, targets
from pagegen.cli.main import main
from pagegen.cli.report_data import gather
from pagegen.db import open_db
from pagegen.spec import CacheLayout, Profile, Status

CODE = targets.code_hash(H100.target)
H200 = costs.shipped_device("sm_90", name="NVIDIA H200")
EVIL = '<script>alert("x")</script>'


@pytest.fixture(autouse=True)
def _no_device_of_this_machine(monkeypatch):
    def absent(target):
        raise ValueError(f"no {target} here")

    monkeypatch.setattr(targets, "current_device", absent)


def fill(url, *, profile=PROFILE, sizes=(16, 64)):
    decided = {"decode": {"regret": 0.031, "speedup": 1.25}, "mixed": {"regret": 0.0, "speedup": 1.0}}
    made = rule(replace(TUNED, page_walk="any"))
    made = replace(made, evidence={**made.evidence, **decided})
    with open_db(url, shipped=False) as db, db.atomic():
        for size in sizes:
            layout = CacheLayout(block_size=size)
            for device in (H100, H200):
                for number, workload in enumerate((DECODE, MIXED)):
                    one = trial(
                        layout=layout, device=device, workload=workload, code_hash=CODE, variant=made.variants[0],
                        samples_us=(40.0 + size + number,), created_at=f"2026-01-0{1 + number}",
                    )  # fmt: skip
                    db.record(one)
                db.save_portfolio(
                    spec=SPEC, layout=layout, device=device, profile=profile, rule=made, code_hash=CODE,
                    created_at="2026-02-01",
                )  # fmt: skip
        db.record(trial(status=Status.TIMEOUT, samples_us=(), code_hash=CODE))
        db.record(cpu_trial(samples_us=(800.0,)))
        db.record(cpu_trial(samples_us=(800.0,), device=replace(CPU, bandwidth_gb_s=0.0, name="unknown")))


def draw(tmp_path, *words, code=0):
    url, path = str(tmp_path / "one.db"), tmp_path / "report.html"
    result = CliRunner().invoke(main, ["report", "-o", str(path), "--db", url, *words])
    assert result.exit_code == code, result.output
    return result.output, path.read_text() if path.exists() else ""


_DRAWN: dict[str, tuple[Path, str]] = {}


@pytest.fixture
def usual(tmp_path_factory):
    """Where `fill` wrote, and the page of it: drawn once, since matplotlib takes 5 s of CPU time for it."""
    if not _DRAWN:
        folder = tmp_path_factory.mktemp("usual")
        fill(folder / "one.db")
        _DRAWN["usual"] = folder, draw(folder)[1]
    return _DRAWN["usual"]


class Page(HTMLParser):
    """Tags that are opened, and attributes that could load something."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.loads = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.loads += [v for k, v in attributes if k in ("src", "href", "xlink:href", "data") and not v.startswith("#")]


def test_the_page_has_every_section_and_loads_nothing(usual):
    _, text = usual
    page = Page(text)
    assert page.loads == []
    assert "script" not in page.tags
    assert re.findall("<h2>(.*?)</h2>", text) == ["Block size", "Roofline", "Regret", "Tuning history", "Devices"]
    for words in ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "tokens/s", "regret, %", "best so far", "fake CPU"):
        assert words in text
    drawn = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawn) == 1 + 3 + 1 + 1 + 1  # one spec; two GPUs and a CPU below their roofs
    for one in drawn:
        ElementTree.fromstring(one)  # noqa: S314


def test_the_same_database_gives_the_same_page(usual):
    folder, text = usual
    assert draw(folder)[1] == text


def test_names_from_a_database_are_text_and_no_markup(tmp_path):
    fill(tmp_path / "one.db", profile=Profile(name=EVIL, workloads=(DECODE, MIXED), weights=(1, 1)))
    with open_db(tmp_path / "one.db", shipped=False) as db:
        db.record(trial(device=replace(H100, name=EVIL), code_hash=CODE))
    _, text = draw(tmp_path)
    assert EVIL not in text
    assert "&lt;script&gt;" in text
    assert "script" not in Page(text).tags


def test_ticks_are_plain_numbers_and_figures_have_no_frame(usual):
    _, text = usual
    assert "mathdefault" not in text
    assert "<!-- 0.1 -->" in text or ">0.1<" in text
    assert text.count('id="patch_6"') <= text.count("<svg")


def test_the_line_of_a_tuning_run_never_falls_and_starts_at_one(tmp_path):
    with open_db(tmp_path / "one.db", shipped=False) as db:
        for number, (us, load) in enumerate(((100.0, DECODE), (80.0, DECODE), (400.0, MIXED), (90.0, DECODE))):
            db.record(trial(samples_us=(us,), workload=load, created_at=f"2026-01-0{1 + number}"))
        (found,) = gather(db, spec=None, target=None, limit=100, max_specs=1).history
    assert found["line"] == [[1, 1.0], [2, pytest.approx(1.25**0.5)], [3, pytest.approx(1.25**0.5)],
                             [4, pytest.approx(1.25**0.5)], [4, pytest.approx(1.25**0.5)]]  # fmt: skip


def test_json_holds_the_figures_that_are_drawn(tmp_path):
    fill(tmp_path / "one.db")
    output, _ = draw(tmp_path, "--json")
    found = json.loads(output)
    assert [row["block_size"] for row in found["block_sizes"][0]["rows"]] == [16, 64]
    assert found["block_sizes"][0]["rows"][0]["step_us"] == 0.75 * 56 + 0.25 * 57
    assert {e["device"] for e in found["devices"]} == {"NVIDIA H100 80GB HBM3", "NVIDIA H200", "fake CPU"}
    assert max(e["regret"] for e in found["regret"]) == 0.031
    assert found["trials"] == found["shown_trials"] == 11
    shares = {e["device"]: e["roofline_share"] for e in found["devices"]}
    assert all(0 < share < 1 for share in shares.values())


def test_a_limit_is_said(tmp_path):
    fill(tmp_path / "one.db")
    output, text = draw(tmp_path, "--limit", "3")
    assert "3 trials drawn" in output
    assert "Figures of trials are of the newest 3 of 11." in text


def test_one_trial_alone_can_be_drawn(tmp_path):
    with open_db(tmp_path / "one.db", shipped=False) as db:
        db.record(trial())
    _, text = draw(tmp_path)
    assert "Nothing to show: no measured portfolio." in text


def test_failures_alone_can_be_drawn(tmp_path):
    with open_db(tmp_path / "one.db", shipped=False) as db:
        db.record(trial(status=Status.TIMEOUT, samples_us=()))
    assert "Nothing to show" in draw(tmp_path)[1]


def test_an_empty_database_and_a_missing_one_are_told_and_write_no_page(tmp_path):
    assert "there is no tuning database" in draw(tmp_path, code=1)[0]
    open_db(tmp_path / "one.db", shipped=False).close()
    output, text = draw(tmp_path, code=1)
    assert "nothing to draw" in output
    assert text == ""


def test_without_matplotlib_one_line_says_what_to_install(tmp_path, monkeypatch):
    fill(tmp_path / "one.db")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    output, text = draw(tmp_path, code=1)
    assert "drawing needs matplotlib: pip install 'pagegen-attention[report]'" in output
    assert len(output.strip().splitlines()) == 1
    assert text == ""
