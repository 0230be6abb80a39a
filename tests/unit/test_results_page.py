"""docs/results.md is the page of the files in bench/results, and says plainly what those do not hold."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.append(str(BENCH))

import results_page  # noqa: E402
from results_pages import cpu, others, paging  # noqa: E402
from results_pages.claims import Claim, at_least, at_most, said, table  # noqa: E402


def gpu_document(**over: object) -> dict:
    times = {"pagegen": 100.0, "pagegen, tuned": 80.0, "flashinfer": 120.0, "sdpa": 400.0}
    contenders = {name: {"us": us} for name, us in times.items()}
    row = {"part": "speed", "case": "64 x 4096", "contenders": contenders}
    aims = [
        {"aim": "over a device copy", "asked": ">= 0.90", "found": "0.85", "met": "no"},
        {"aim": "float8 over bfloat16", "asked": ">= 1.7", "found": "not known", "met": "not known"},
    ]
    return {"device": "NVIDIA H200", "started": "2026-12-01T10:00:00Z", "dry_run": False, "environment": {},
            "aims": aims, "rows": [row, {"part": "bandwidth", "case": "copy"}], **over}  # fmt: skip


def test_the_page_is_what_the_files_say():
    assert results_page.PAGE.read_text(encoding="utf-8") == results_page.render(results_page.RESULTS), (
        "docs/results.md is not current: run `python bench/results_page.py`"
    )


def test_every_stored_document_is_on_the_page_and_every_script_it_names_is_there():
    wanted = {name for name, _, _ in (*results_page.MEASURED, *results_page.NOT_MEASURED)}
    assert {path.name for path in results_page.RESULTS.glob("*.json")} <= wanted
    for name, script, _ in results_page.MEASURED:
        if (results_page.RESULTS / name).exists():
            assert (results_page.ROOT / script).exists()


def test_every_stored_document_says_something():
    for name, _, section in (*results_page.MEASURED, *results_page.NOT_MEASURED):
        path = results_page.RESULTS / name
        if path.exists():
            made = section(json.loads(path.read_text(encoding="utf-8")))
            assert made.claims and all(claim.found for claim in made.claims), name


def test_without_files_nothing_is_claimed(tmp_path):
    page = results_page.render(tmp_path)
    assert "Nothing measured on a GPU yet" in page
    assert "- `cpu.json`: `bench/cpu.py` writes it" in page
    assert "reached |" not in page


def test_a_gpus_file_takes_the_place_of_the_sentence_that_there_is_none(tmp_path):
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "nvidia-h200.json").write_text(json.dumps(gpu_document()), encoding="utf-8")
    page = results_page.render(tmp_path)
    assert "Nothing measured on a GPU yet" not in page
    assert "### NVIDIA H200" in page and "Measured on 2026-12-01 on NVIDIA H200." in page
    assert "| NVIDIA H200 | over a device copy | 0.85 | >= 0.90 |" in page
    assert "| 64 x 4096: 80.0 us; others' time over it | flashinfer 1.50 x, sdpa 5.00 x |" in page


def test_a_dry_run_is_no_measurement(tmp_path):
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "cpu.json").write_text(json.dumps(gpu_document(dry_run=True)), encoding="utf-8")
    assert "Nothing measured on a GPU yet" in results_page.render(tmp_path)


def test_what_is_not_known_is_neither_reached_nor_missed():
    section = others.gpu(gpu_document(), "gpu/x.json")
    assert [claim.met for claim in section.claims[:2]] == [False, None]


def test_a_figure_that_misses_what_was_asked_is_listed_first(tmp_path):
    shutil.copy(results_page.RESULTS / "host-cost.json", tmp_path)
    document = json.loads((tmp_path / "host-cost.json").read_text(encoding="utf-8"))
    document["rows"][0]["over_bare_us"], document["rows"][1]["over_bare_us"] = 12.0, 9.0
    (tmp_path / "host-cost.json").write_text(json.dumps(document), encoding="utf-8")
    first = results_page.render(tmp_path).partition("## Measured on a GPU")[0]
    assert "| A call's cost to the host | decode, over a bare operator call | 12.0 us" in first
    assert "mixed, over" not in first


def test_asked_figures_are_reached_at_the_limit_itself():
    assert at_least("a", 2.0, 2.0).met and not at_least("a", 1.99, 2.0).met
    assert at_most("a", 2.0, 2.0).met and not at_most("a", 2.01, 2.0).met


def test_a_peer_must_be_beaten_in_every_cell_and_both_orders():
    rows = {f"decode bfloat16 vllm {order}": {"median": 2.6, "least": least, "cells": 9, "cpu_median": 2.5}
            for order, least in (("HND", 2.1), ("NHD", 1.9))}  # fmt: skip
    limit = {"decode bfloat16 vllm read": {"median": 2.45, "least": 2.2, "cells": 8, "cpu_median": 2.4}}
    (claim,) = cpu._peers({"speed_over": rows, "limit_over": limit})
    assert claim.met is False
    assert claim.limit == "as many bytes front to back 2.45 (least 2.20)"
    rows["decode bfloat16 vllm NHD"]["least"] = 2.0
    (claim,) = cpu._peers({"speed_over": rows})
    assert claim.met is True and claim.limit == ""


def test_a_date_that_is_not_there_is_said_not_to_be():
    assert said({"environment": {"cpu": "A", "threads": 2}}) == "Measured (date not recorded) on A, 2 threads."
    assert said({"environment": {"date": "2026-12-01", "cpu": "A"}, "quick": True}).startswith("Measured on 2026-12-01")


def test_what_was_not_measured_is_not_said_to_be():
    assert said({"environment": {"date": "2026-12-01", "cpu": "A"}}, "Simulated") == "Simulated on 2026-12-01 on A."
    _, _, apart = results_page.PAGE.read_text(encoding="utf-8").partition("## Simulated and predicted")
    assert apart and "Measured on" not in apart and "Measured (" not in apart


def test_the_servers_speed_and_what_requests_wait_are_claims_of_their_own():
    server = {"output_tokens_per_s": 12.5, "sequences": 3.0, "hit_share": 0.5}
    requests = {"ttft_p50_s": 1.0, "ttft_p99_s": 2.0, "itl_p50_s": 0.1, "itl_p99_s": 0.2}
    row = {"section": "served", "cell": {"trace": "t", "block_size": 16}, "server": server, "requests": requests}
    speed, waits = paging.simulated({"rows": [row], "environment": {}}).claims
    assert "tokens/s" in speed.found and "ms" not in speed.found
    assert "tokens/s" not in waits.found and "p99 200 ms" in waits.found


def test_disturbed_rounds_are_told_by_cpu_time_and_that_is_said():
    cell = {"batch": 8, "context": 64, "order": "NHD"}
    ratios = {"median": 9.0, "range": [1.0, 20.0], "cpu": 2.0}
    row = {
        "section": "kernel",
        "cell": cell,
        "what": "gather 16 + SDPA",
        "status": "ok",
        "time_over": {"paged 16": ratios},
    }
    for clock, found, note in (("wall", "9.00 x", "in turns."), ("CPU time", "2.00 x", "1 of 1 rows by CPU time")):
        section = paging.block_size({"rows": [{**row, "clock": clock}], "environment": {}})
        assert section.claims[0].found.startswith(found) and note in section.notes[0]


def test_bars_in_a_cell_do_not_end_it():
    assert table(("a",), [("x|y",)])[-1] == "| x\\|y |"


@pytest.mark.parametrize("met", [True, False, None])
def test_a_claim_holds_its_verdict(met):
    assert Claim(what="a", found="1", met=met).met is met
