"""Ranks compare what their choices rest on before they serve, and a difference is told by name."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from database_fakes import H100, LAYOUT, PROFILE, SM_90, SPEC, TUNED, rule, trial

from pagegen import selection, targets
from pagegen.db import open_db
from pagegen.selection import RanksDisagree, check_ranks, choice_digest
from pagegen.spec import CacheLayout

ROOT = Path(__file__).parents[2]
CODE = targets.code_hash(SM_90)


@pytest.fixture(autouse=True)
def _no_device_of_this_machine(monkeypatch):
    def absent(target):
        raise ValueError(f"no {target} here")

    monkeypatch.setattr(targets, "current_device", absent)


def save(db, saved, *, at="2026-01-01"):
    db.save_portfolio(spec=SPEC, layout=LAYOUT, device=H100, profile=PROFILE, rule=saved, code_hash=CODE, created_at=at)


def digest(db):
    return db.digest(SPEC, LAYOUT, SM_90)


def test_the_same_contents_in_other_files_in_another_order_have_one_digest(place):
    with open_db(place("one")) as one, open_db(place("other")) as other:
        save(one, rule(), at="2026-01-01")
        save(one, rule(replace(TUNED, num_splits=2)), at="2026-01-02")
        one.record(trial(code_hash=CODE))
        other.record(trial(code_hash=CODE))
        save(other, rule(replace(TUNED, num_splits=2)), at="2026-01-02")
        save(other, rule(), at="2026-01-01")
        assert digest(one) == digest(other)
        assert digest(one).hex == digest(other).hex
        check_ranks([digest(one), digest(other), digest(one).to_dict()])


def test_a_difference_is_named_with_its_ranks_and_values(place):
    with open_db(place("one")) as one, open_db(place("other")) as other:
        save(one, rule())
        save(other, rule(replace(TUNED, num_splits=2)))
        digests = [digest(one), digest(one), digest(other)]
    with pytest.raises(RanksDisagree) as refusal:
        check_ranks(digests)
    assert set(refusal.value.differences) == {"portfolios", "rule"}
    assert list(refusal.value.differences["rule"].values()) == [[0, 1], [2]]
    text = str(refusal.value)
    assert f"{TUNED.name} (" in text
    assert "on ranks 0, 1 and " in text
    assert "on rank 2" in text


def test_trials_that_only_change_expected_times_are_told_apart_from_the_rule(place):
    with open_db(place("one")) as one, open_db(place("other")) as other:
        for db in (one, other):
            save(db, rule())
        other.record(trial(code_hash=CODE))
        with pytest.raises(RanksDisagree) as refusal:
            check_ranks([digest(one), digest(other)])
    assert set(refusal.value.differences) == {"trials"}


def test_other_templates_devices_and_a_missing_database_are_named(place, tmp_path, monkeypatch):
    with open_db(place("one")) as one:
        save(one, rule())
        own = digest(one)
        monkeypatch.setattr(targets, "current_device", lambda target: replace(H100, name="another", units=7))
        with pytest.raises(RanksDisagree, match="device is NVIDIA H100 80GB HBM3 .* and another"):
            check_ranks([own, digest(one)])
    monkeypatch.setattr(targets, "current_device", lambda target: H100)
    missing = choice_digest(SPEC, LAYOUT, SM_90, str(tmp_path / "none.db"))
    with pytest.raises(RanksDisagree, match=r"portfolios is 1 \(.*unreadable"):
        check_ranks([own, missing])
    with pytest.raises(RanksDisagree, match="layout is 16 NHD on rank 0 and 32 NHD on rank 1"):
        check_ranks([own, choice_digest(SPEC, CacheLayout(block_size=32), SM_90, str(tmp_path / "none.db"))])


def test_measured_rates_do_not_make_ranks_differ(place, monkeypatch):
    with open_db(place("one")) as one:
        save(one, rule())
        monkeypatch.setattr(targets, "current_device", lambda target: H100)
        own = digest(one)
        monkeypatch.setattr(targets, "current_device", lambda target: replace(H100, bandwidth_gb_s=3000.0))
        check_ranks([own, digest(one)])


def test_a_process_alone_agrees_with_itself(tmp_path):
    with open_db(tmp_path / "one.db") as one:
        assert selection.check_job(SPEC, LAYOUT, SM_90, one) == digest(one)


RANK = """
import sys
import torch.distributed as dist
from pagegen import selection, targets
from pagegen.selection import RanksDisagree
from pagegen.spec import AttentionSpec, CacheLayout
rank, store, url = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
spec = AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
try:
    print("agreed", selection.check_job(spec, CacheLayout(block_size=16), "sm_90", url).hex)
except RanksDisagree as error:
    print("disagreed", sorted(error.differences))
dist.destroy_process_group()
"""


def ranks(folder: Path, *urls: str) -> list[str]:
    """What two processes of one gloo group print."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "autotune")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(folder / "store"), url],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank, url in enumerate(urls)
    ]  # fmt: skip
    done = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0, 0], done
    return [out.strip() for out, _ in done]


def test_two_gloo_processes_find_out_whether_they_would_choose_alike(tmp_path):
    urls = [str(tmp_path / "one.db"), str(tmp_path / "other.db")]
    for url in urls:
        with open_db(url) as db:
            save(db, rule())
    first, second = ranks(tmp_path, *urls)
    assert first == second
    assert first.startswith("agreed ")
    with open_db(urls[1]) as db:
        save(db, rule(replace(TUNED, num_splits=2)), at="2026-02-01")
    (tmp_path / "store").unlink(missing_ok=True)
    assert ranks(tmp_path, *urls) == ["disagreed ['portfolios', 'rule']"] * 2
