"""What comes from outside is read to the end before anything of it is written: one bad record costs its own line."""

from __future__ import annotations

import copy
import json
import os
import threading
from dataclasses import replace

import pytest
from database_fakes import DECODE, H100, LAYOUT, PROFILE, SPEC, TUNED, rule, trial

from pagegen.db import open_db
from pagegen.spec import CacheLayout, CompileFacts, CppVariant, Device, Measurement, Status, Target, Workload


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> list[dict]:
    """One record of every kind, as an export has them."""
    folder = tmp_path_factory.mktemp("border")
    with open_db(folder / "one.db", shipped=False) as db:
        db.record(trial())
        db.save_portfolio(
            spec=SPEC,
            layout=LAYOUT,
            device=H100,
            profile=PROFILE,
            rule=rule(),
            code_hash="c0de",
            created_at="2026-01-01",
        )
        db.record_facts(
            CompileFacts(spec=SPEC, layout=LAYOUT, target=H100.target, variant=TUNED, form="decode", code_hash="c0de")
        )
        db.export(folder / "one.jsonl")
    return [json.loads(line) for line in (folder / "one.jsonl").read_text().splitlines()]


def imported(folder, records: list, place=None):
    """(report, records after it) of a new database that imports these."""
    (folder / "in.jsonl").write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in records))
    with open_db(place or folder / "new.db", shipped=False) as db:
        report = db.import_(folder / "in.jsonl")
        assert db.verify() == []
        db.export(folder / "out.jsonl")
    return report, [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def deep(levels: int) -> list:
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


# By what is wrong: (kind of the record, path of the field in it, value).
BAD = {
    "a date that is none": ("portfolio", ["created_at"], None),
    "a date that is a dict": ("portfolio", ["created_at"], {}),
    "a date in words": ("portfolio", ["created_at"], "yesterday"),
    "a date of another zone": ("portfolio", ["created_at"], "2026-01-01T00:00:00+14:00"),
    "a date over 40 characters": ("trial", ["created_at"], "2026-01-01" + "0" * 40),
    "a date with a surrogate": ("trial", ["created_at"], "\ud800"),
    "a regime with a surrogate": ("trial", ["regime"], "\ud800"),
    "a regime that is not known": ("trial", ["regime"], "Cold"),
    "a profile without a source": ("profile", ["profile", "source"], None),
    "a profile with a number for a name": ("profile", ["profile", "name"], 5),
    "a profile named by a dict": ("profile", ["profile", "name"], {}),
    "a field beside a batch's": ("profile", ["profile", "batches", 0, "zzz"], 1),
    "a field beside a profile's": ("profile", ["profile", "zzz"], 1),
    "a field beside a workload's": ("workload", ["workload", "zzz"], 1),
    "a field beside a rule's": ("portfolio", ["rule", "zzz"], 1),
    "a field beside a clause's": ("portfolio", ["rule", "clauses", 0, "zzz"], 1),
    "a field beside a device's": ("device", ["device", "zzz"], 1),
    "a field beside a layout's": ("kernel", ["layout", "zzz"], 1),
    "a sample that is next to nothing": ("trial", ["samples_us"], [5e-324]),
    "a sample that no float holds": ("trial", ["samples_us"], [10**400]),
    "an unknown field that is NaN": ("trial", ["zzz"], float("nan")),
    "an unknown field that is nested absurdly": ("kernel", ["zzz"], deep(300)),
    "half a unit": ("device", ["device", "units"], 132.5),
    "a device with NaN": ("device", ["device", "memory_gib"], float("nan")),
    "a negative rate": ("device", ["device", "bandwidth_gb_s"], -1.0),
    "a bandwidth next to nothing": ("device", ["device", "bandwidth_gb_s"], 5e-324),
    "features that are one text": ("device", ["device", "features"], "abc"),
    "a count of over 63 bits": ("compile_facts", ["registers"], 2**63),
    "a loop with NaN": ("compile_facts", ["loop"], {"mma": float("nan")}),
    "a number in an environment": ("environment", ["environment", "threads"], 4),
    "an id that is a list": ("kernel", ["id"], ["x"]),
    "a status that is a list": ("trial", ["status"], ["ok"]),
    "a reason that is none": ("portfolio", ["rule", "reason"], None),
    "a bound that is text": ("portfolio", ["rule", "clauses", 0, "max_num_seqs"], "64"),
    "evidence that no rule may rest on": ("portfolio", ["rule", "evidence"], {"kind": "reference"}),
    "a variant of another family": ("variant", ["variant"], CppVariant().to_dict()),
    "code that is no text": ("kernel", ["code_hash"], None),
}


def spoilt(records: list[dict], kind: str, path: list, value: object) -> tuple[list[dict], int]:
    """The records with one field of one of them changed, and the number of its line."""
    changed = copy.deepcopy(records)
    at = [record["record"] for record in changed].index(kind)
    into = changed[at]
    for step in path[:-1]:
        into = into[step]
    into[path[-1]] = value
    return changed, at + 1


@pytest.mark.parametrize("what", BAD)
def test_a_bad_record_is_named_by_its_line_and_costs_only_what_names_it(what, records, tmp_path):
    kind, path, value = BAD[what]
    changed, line = spoilt(records, kind, path, value)
    report, left = imported(tmp_path, changed)
    named = [problem.split(": ")[0] for problem in report.malformed]
    if what in ("a bandwidth next to nothing", "a variant of another family"):  # only beside a trial
        assert set(named) <= {f"line {n}" for n, r in enumerate(records, 1) if kind in r and r["record"] != kind}
    else:
        assert named[0] == f"line {line}"
    assert report.malformed
    lost = {"trial": {"trial", "workload"}, "portfolio": {"portfolio"}, "profile": {"profile", "portfolio"}}
    assert {r["record"] for r in records} - {r["record"] for r in left} <= lost.get(
        kind, {r["record"] for r in records}
    )
    if kind in ("portfolio", "profile", "compile_facts"):
        assert "trial" in {r["record"] for r in left}


@pytest.mark.parametrize("what", ["a date over 40 characters", "a count of over 63 bits", "half a unit"])
def test_a_server_judges_the_same(what, records, tmp_path, postgres_place):
    changed, line = spoilt(records, *BAD[what])
    report, _ = imported(tmp_path, changed, postgres_place("border"))
    assert report.malformed[0].startswith(f"line {line}: ")


@pytest.mark.parametrize("value", ["\ud800", "a\0b"])
def test_of_a_batch_with_one_bad_trial_all_others_come_in(value, records, tmp_path, monkeypatch):
    monkeypatch.setattr("pagegen.db.bulk.BATCH", 10)
    at = [record["record"] for record in records].index("trial")
    many = [{**records[at], "samples_us": [100.0 + n / 100]} for n in range(35)]
    many[9]["created_at"] = value
    report, left = imported(tmp_path, [*records[:at], *many])
    assert [problem.split(": ")[0] for problem in report.malformed] == [f"line {at + 10}"]
    assert sum(record["record"] == "trial" for record in left) == 34


def test_lines_that_are_no_utf_8_too_deep_or_no_object_are_named_and_a_mark_at_the_start_is_none(records, tmp_path):
    (tmp_path / "in.jsonl").write_bytes(
        b"\xef\xbb\xbf" + json.dumps(records[0]).encode() + b'\n{"record": "x\xff"}\n' + b"[" * 100_000 + b"\n[]\n"
        b'{"record": [], "v": 1}\n{"record": "x", "v": true}\n'
    )
    with open_db(tmp_path / "new.db", shipped=False) as db:
        report = db.import_(tmp_path / "in.jsonl")
    assert [problem.split(":")[0] for problem in report.malformed] == [f"line {n}" for n in range(2, 7)]


def test_records_come_through_a_pipe(records, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    text = "".join(f"{json.dumps(record)}\n" for record in records)
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=(text,))
    writer.start()
    with open_db(tmp_path / "new.db", shipped=False) as db:
        assert db.import_(tmp_path / "pipe").added == 4
    writer.join()


def test_contradicting_unknown_fields_are_all_kept_and_all_come_out_again(records, tmp_path):
    at = [record["record"] for record in records].index("trial")
    several = [{**records[at], "zz": value, "one": 1} for value in (1, 2, 3)]
    report, left = imported(tmp_path, [*records[:at], *several])
    assert [report.malformed, len(report.ignored)] == [(), 3]
    assert sorted(record["zz"] for record in left if "zz" in record) == [1, 2, 3]
    assert sum("one" in record for record in left) == 1
    (tmp_path / "new.db").unlink()
    assert imported(tmp_path, left)[1] == left


def test_unknown_names_cannot_move_a_terminals_cursor(records, tmp_path):
    report, _ = imported(tmp_path, [{**records[0], "\x1b[31mred": 1}])
    assert report.ignored == ("line 1: unknown field '\\x1b[31mred'",)


WRONG = {
    "status": "ok", "spec": None, "layout": 16, "target": "sm_90", "device": "H100", "variant": "x", "workload": None,
    "regime": None, "created_at": 5, "detail": None, "code_hash": 7, "environment": {"threads": 4},
    "samples_us": "1", "max_error": "x",
}  # fmt: skip


@pytest.mark.parametrize("field", WRONG)
def test_a_trial_that_could_not_be_read_back_is_refused_by_its_field(field):
    with pytest.raises((TypeError, ValueError), match=field):
        trial(**{field: WRONG[field]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"variant": CppVariant()}, "variant must be of the family triton"),
        ({"target": Target("cpu")}, "device must be of the target cpu"),
        ({"created_at": "2026-13-01"}, "created_at must be an ISO 8601 date"),
    ],
)
def test_a_trial_of_parts_that_do_not_belong_together_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        trial(**change)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Device(name="x", target=H100.target, units=132.0), "units must be an integer, got float 132.0"),
        (lambda: Device(name="x", target=H100.target, memory_gib=float("nan")), "memory_gib must be finite"),
        (lambda: Device(name="x", target=H100.target, features="abc"), "features must be a tuple, got str"),
        (lambda: replace(PROFILE, name="a\x1b[31m"), "name must be text without surrogates and control characters"),
        (lambda: Target("cuda", "sm_９０"), "target arch"),
        (lambda: CacheLayout(block_size=2**31), "block_size must be at most 2147483647"),
        (lambda: Workload(context_lens=(10**400,)), "context_lens must be at most .* a number of over 30 digits"),
        (lambda: replace(PROFILE, name=5), "name must be text, got int 5"),
        (lambda: replace(PROFILE, figures={1: 2}), "figures must have text for names"),
    ],
)
def test_a_noun_refuses_what_it_cannot_be(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


@pytest.mark.parametrize(
    ("verb", "message"),
    [
        (lambda db: db.save_profile(None), "profile must be a Profile"),
        (lambda db: db.trials(layout=16), "layout must be a CacheLayout, got int 16"),
        (lambda db: db.trials(status="bad"), "status must be one of"),
        (lambda db: db.trials(regime=[]), "regime must be a str"),
        (lambda db: db.trials(target="vax"), "target must be like sm_90"),
        (lambda db: db.save_portfolio(spec=SPEC, layout=LAYOUT, device="H100", profile=PROFILE, rule=rule(),
                                      code_hash="c"), "device must be a Device, got str 'H100'"),
        (lambda db: db.save_portfolio(spec=SPEC, layout=LAYOUT, device=H100, profile=PROFILE, rule=rule(),
                                      code_hash="c", created_at="garbage"), "created_at must be an ISO 8601 date"),
        (lambda db: db.prune(target=H100.target, keep="c0de"), "keep must be a list of code hashes, got str"),
        (lambda db: db.prune(target=H100.target, keep=["typo"]), "held for sm_90 .*got 'typo', which is none of them"),
        (lambda db: db.prune(target=H100.target, keep=[None]), "a code hash in keep must be text"),
        (lambda db: db.prune(target="h100", keep=["c0de"]), "target must be like sm_90"),
    ],
)  # fmt: skip
def test_a_verb_names_the_argument_that_is_wrong(verb, message, tmp_path):
    with open_db(tmp_path / "one.db") as db:
        db.record(trial())
        with pytest.raises((TypeError, ValueError), match=message):
            verb(db)
        assert len(db.trials()) == 1


def test_pruning_takes_the_first_characters_of_one_hash(tmp_path):
    with open_db(tmp_path / "one.db") as db:
        for code in ("0123456789ab", "0123456789cd", "fedc"):
            db.record(trial(code_hash=code))
        with pytest.raises(ValueError, match="'0123456789', which is more than one"):
            db.prune(target=H100.target, keep=["0123456789"])
        assert db.prune(target=H100.target, keep=["0123456789a"])["trials"] == 2
        assert [t.code_hash for t in db.trials()] == ["0123456789ab"]


def test_two_orders_that_are_the_same_bytes_are_one_kernel(tmp_path):
    spec = SPEC.replace(num_q_heads=8, num_kv_heads=1)
    hnd, nhd = (CacheLayout(block_size=16, order=order) for order in ("HND", "NHD"))
    with open_db(tmp_path / "one.db") as db:
        db.record(trial(spec=spec, layout=hnd))
        assert not db.record(trial(spec=spec, layout=nhd))
        assert len(db.trials(spec=spec, layout=hnd)) == len(db.trials(spec=spec, layout=nhd)) == 1
        assert db.verify() == []


def test_numbers_of_other_types_are_one_with_floats(tmp_path):
    numpy = pytest.importorskip("numpy")
    whole = replace(H100, memory_gib=80)
    assert whole.memory_gib.__class__ is float
    with open_db(tmp_path / "one.db") as db:
        assert db.record(trial(samples_us=(99.5, 98.0), workload=DECODE))
        assert not db.record(trial(samples_us=numpy.array([99.5, 98.0]), device=whole))
        (found,) = db.trials()
        assert isinstance(found, Measurement)
        assert db.verify() == []


def test_a_failed_trial_keeps_an_odd_byte_of_its_compiler_escaped(tmp_path):
    with open_db(tmp_path / "one.db") as db:
        db.record(trial(status=Status.COMPILE_ERROR, samples_us=(), detail="x\ud800\0"))
        assert db.trials()[0].detail == "x\\ud800\\x00"
        assert db.verify() == []
