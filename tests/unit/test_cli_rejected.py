"""`pagegen explain --rejected`: what the symbols, compilers and trials ruled out, by rule."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from database_fakes import H100, PROFILE, SM_90, TUNED, rule, trial

from pagegen import targets
from pagegen.cli.main import main
from pagegen.db import open_db
from pagegen.spec import AttentionSpec, CacheLayout, Status, TritonVariant

LLAMA = AttentionSpec.from_model("llama-3.1-8b")
LAYOUT = CacheLayout(block_size=16)
SPILLS = {"variants": 3, "reason": "spills registers to memory: 160", "example": "triton:tile_rows=16"}


@pytest.fixture
def url(tmp_path):
    """A database with an offline run's portfolio, and a trial that computed something else."""
    place = str(tmp_path / "tuning.db")
    code = targets.code_hash(SM_90)
    made = rule(kind="predicted", reason="predicted, not measured")
    made.evidence["rejected"] = {"spills": SPILLS}
    with open_db(place, shipped=False) as db:
        db.save_portfolio(spec=LLAMA, layout=LAYOUT, device=H100, profile=PROFILE, rule=made, code_hash=code)
        wrong = {"spec": LLAMA, "status": Status.WRONG_RESULT, "samples_us": (), "detail": "off by 0.5"}
        db.record(trial(**wrong, code_hash=code, variant=TUNED))
        db.record(trial(**wrong, code_hash=code, variant=TritonVariant(num_warps=8)))
    return place


def explained(url: str, *more: str):
    arguments = ["explain", "--model", "llama-3.1-8b", "--batch", "32", "--context", "2000", "--target", "sm_90"]
    result = CliRunner().invoke(main, [*arguments, "--rejected", "--db", url, *more], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_stage_is_listed_with_its_rules_counts_and_reasons(url):
    document = json.loads(explained(url, "--block-size", "16", "--json"))
    by_stage: dict = {}
    for row in document["rejected"]:
        by_stage.setdefault(row["stage"], {})[row["rule"]] = row
    assert {"tile_in_page", "registers", "shared_memory"} <= set(by_stage["symbols"])
    assert by_stage["compiled"] == {"spills": {"rule": "spills", "stage": "compiled", **SPILLS}}
    assert by_stage["tried"]["wrong_result"]["variants"] == 2
    assert by_stage["tried"]["wrong_result"]["reason"] == "off by 0.5"
    assert 0 < document["legal"] < document["points"]


def test_what_compilers_said_of_another_block_size_is_not_this_ones(url):
    document = json.loads(explained(url, "--block-size", "32", "--json"))
    assert {row["stage"] for row in document["rejected"]} <= {"symbols", "fields"}


def test_the_text_has_the_rules_and_how_much_of_the_space_is_legal(url):
    text = explained(url, "--block-size", "16")
    assert "points of the search space are legal" in text
    assert "rejected because" in text and "wrong_result" in text and "spills registers" in text


def test_a_database_that_is_not_there_leaves_the_symbols(tmp_path):
    document = json.loads(explained(str(tmp_path / "none.db"), "--block-size", "16", "--json"))
    assert {row["stage"] for row in document["rejected"]} == {"symbols"}
