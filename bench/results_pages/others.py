"""The database, a call's cost to the host, the search; and apart from all that is measured, what is predicted."""

from __future__ import annotations

import re

from results_pages.claims import Claim, Document, Row, Section, at_most, said

# What a row of the database bench is asked for, and the field that answers.
ANSWERS = ("trials_per_s", "first_ms", "us", "bytes_a_trial", "records_per_s", "ms")
UNITS = {"trials_per_s": "trials/s", "first_ms": "ms", "us": "us", "bytes_a_trial": "bytes a trial",
         "records_per_s": "records/s", "ms": "ms"}  # fmt: skip


def database(document: Document) -> Section:
    return Section(
        title="The tuning database", source="database.json", command="python bench/database.py", said=said(document),
        claims=tuple(map(_database_claim, document["rows"])),
        notes=(f"A database of {document['trials']:,} made trials.",),
    )  # fmt: skip


def _database_claim(row: Row) -> Claim:
    field = next(name for name in ANSWERS if name in row)
    found = f"{row[field]:,.6g} {UNITS[field]}"
    limit = re.search(r"at (least|most) ([\d,.]+)", row["asked_for"])
    if limit is None:
        return Claim(what=row["what"], found=found, asked=row["asked_for"])
    asked = float(limit[2].replace(",", ""))
    met = row[field] >= asked if limit[1] == "least" else row[field] <= asked
    return Claim(what=row["what"], found=found, asked=row["asked_for"], met=met)


def host_cost(document: Document) -> Section:
    claims = []
    for row in document["rows"]:
        what, whole = f"{row['call']}, over a bare operator call", f"the whole call {row['us']:.1f}"
        if row["zeroing_us"]:
            whole += f", of it {row['zeroing_us']:.1f} zeroing the result"
        claims.append(at_most(what, row["over_bare_us"], 10.0, "{:.1f} us", whole))
    return Section(
        title="A call's cost to the host", source="host-cost.json", command="python bench/host_cost.py",
        said=said(document), claims=tuple(claims),
    )  # fmt: skip


def tuning(document: Document) -> Section:
    claims = []
    for case in document["cases"]:
        found, target, floor = case["strategies"]["guided"], document["target"], case["noise_floor"]
        claims.append(Claim(
            what=f"{case['case']}: step time over the exhaustive search's choice, and measurements taken of all",
            found=f"{found['against_search']['median']:+.1%} (p95 {found['against_search']['p95']:+.1%}) with "
            f"{max(found['cells']['median'], found['samples']['median']):.1%}; reached by {found['within_target']:.0%} "
            f"of {found['runs']} replays",
            asked=f"at most {target['regret']:+.0%} with at most {target['cost']:.0%}",
            met=found["against_search"]["p95"] <= target["regret"]
            and max(found["cells"]["p95"], found["samples"]["p95"]) <= target["cost"],
        ))  # fmt: skip
        claims.append(Claim(
            what=f"{case['case']}: step time over the best of the half of the rounds that was not searched",
            found=f"{found['regret']['median']:+.1%} (p95 {found['regret']['p95']:+.1%}); by the recording's noise "
            f"the exhaustive search's choice: {floor['median']:+.1%} (p95 {floor['p95']:+.1%})",
        ))  # fmt: skip
    held = [case["strategies"]["guided"]["stated_bound_held"] for case in document["cases"]]
    known = [share for share in held if share is not None]
    if known:
        what = "cases in which at least 95 % of the runs keep the bound that they state for their own regret"
        claims.append(Claim(what=what, found=f"{sum(share >= 0.95 for share in known)} of {len(known)}"))
    recorded = document.get("recorded_on", {}).get("name", "")
    return Section(
        title="The search", source="tuning-efficiency.json", command="python bench/tuning.py",
        said=said(document, "Replayed"), claims=tuple(claims),
        notes=(f"Replayed on exhaustive measurements recorded on {recorded}.",),
    )  # fmt: skip


def predicted(document: Document) -> Section:
    """The cost model against what others measured: nothing of pagegen's own ran on these devices."""
    claims = []
    for row in document["rows"]:
        if "below_the_floor" in row:
            what = f"{row['device']}: published times below the model's floor, of {row['shapes']} shapes"
            claims.append(at_most(what, row["below_the_floor"], 0, "{:.0f}", f"nearest {row['lowest']:.2f} x it"))
        elif row["what"].startswith("the fastest measured time over the predicted"):
            claims.append(Claim(
                what=f"{row['system']}, {row['over']}: the fastest published time over the predicted one",
                found=f"{row['median']:.2f} in the median of {row['shapes']}",
            ))  # fmt: skip
        elif row["what"] == "leave one GPU out":
            claims.append(Claim(
                what=f"{row['system']}, {row['over']}: median error of the plain model",
                found=f"{row['median_error_unfitted']:.0%}; fitted on the other GPU {row['median_error_fitted']:.0%}",
            ))  # fmt: skip
    return Section(
        title="The cost model against published GPU latencies", source="cost-model.json",
        command="python bench/cost_model.py", said=said(document, "Computed"), claims=tuple(claims),
        notes=(document["data"]["source"] + ".", document["data"]["notes"]),
    )  # fmt: skip


def gpu(document: Document, source: str) -> Section:
    """A document of bench/gpu_check.py: its aims as they were judged, and every timed cell beside its peers."""
    claims = [
        Claim(what=aim["aim"], found=aim["found"], asked=aim["asked"], met={"yes": True, "no": False}.get(aim["met"]))
        for aim in document["aims"]
    ]
    for row in document["rows"]:
        contenders = row.get("contenders", {})
        ours = min((taken["us"] for name, taken in contenders.items() if name.startswith("pagegen")), default=None)
        theirs = {name: taken["us"] for name, taken in contenders.items() if not name.startswith("pagegen")}
        if ours is not None and theirs:
            told = ", ".join(f"{name} {us / ours:.2f} x" for name, us in sorted(theirs.items(), key=lambda one: one[1]))
            claims.append(Claim(what=f"{row['case']}: {ours:.1f} us; others' time over it", found=told))
    return Section(
        title=document["device"], source=source, command="python bench/gpu_check.py", said=said(document),
        claims=tuple(claims),
    )  # fmt: skip
