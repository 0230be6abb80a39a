"""Past one machine: what the tuner takes for a trial on a Ray cluster, and what one database for a fleet costs."""

from __future__ import annotations

from results_pages.claims import Claim, Document, Row, Section, said

# What is told of a row of bench/scale.py, in this order, where it has it.
MEASURED = {
    "trials_per_s": "{:,} trials/s", "bytes_a_trial": "{:,} bytes a trial", "a_second": "{:.1f} a second",
    "seconds": "{:.2f} s", "mib": "a file of {:.2f} MiB", "server_cpu_ms": "CPU of the server {:g} ms",
    "client_cpu_ms": "of the client {:g} ms",
}  # fmt: skip
FOLLOWS = {
    "trials": "{:,} trials", "hours_a_device": "{:g} hours on each device",
    "compile_cpu_hours": "{:,} CPU hours compiling",
    "gb_on_the_server": "{:.0f} GB on a server", "gb_in_sqlite": "{:.0f} GB in SQLite",
    "server_core_hours_to_record": "{:.0f} core hours to record them one round at a time",
    "core_s_for_all_at_once": "{:,} core seconds where all start at once",
    "cores_for_hourly_pulls": "{:g} cores for hourly pulls", "first_pulls_gb": "first pulls of at most {:,} GB",
}  # fmt: skip


def fleet(document: Document) -> Section:
    return Section(
        title="Past one machine", source="fleet.json", command="python bench/fleet.py", said=said(document),
        claims=tuple(map(_fleet_claim, document["rows"])),
        notes=(
            "Devices are arithmetic and stations share this machine's cores: samples that take no time show what the "
            "tuner takes, samples that sleep how busy devices are kept. Nothing ran on several machines, nor on a GPU.",
        ),
    )  # fmt: skip


def _fleet_claim(row: Row) -> Claim:
    where = row["where"] if row["where"] == "this process" else f"{row['where']}, stations: {row['stations']}"
    part = "races sent and collected" if row["part"] == "executor" else "a whole run"
    sample = f"samples of {row['sample_ms']:g} ms" if row["sample_ms"] else "samples that take no time"
    busy = f"; devices busy {row['busy']:.0%}" if "busy" in row else ""
    cpu = f"{row['driver_cpu_ms_a_trial']:.2f} ms of the driver's CPU each"
    found = f"{row['trials_a_second']:,.0f} trials/s, {cpu}{busy}"
    return Claim(what=f"{where}: {part}, {sample}", found=found)


def scale(document: Document) -> Section:
    """What was measured; CPU times are for each trial, process or pull that a row counts."""
    return _scale("One database for a fleet", document, MEASURED, measured=True)


def scaled(document: Document) -> Section:
    """What follows from it by arithmetic."""
    return _scale("Many models, devices and serving nodes", document, FOLLOWS, measured=False)


def _scale(title: str, document: Document, told: dict[str, str], *, measured: bool) -> Section:
    claims = []
    for row in document["rows"]:
        if row["measured"] == measured:
            side = next((f", {name}: {row[name]}" for name in ("writers", "processes") if name in row), "")
            found = ", ".join(form.format(row[name]) for name, form in told.items() if name in row)
            claims.append(Claim(what=row["what"] + side, found=found))
    notes = () if measured else ("Arithmetic on measured rows, in docs/scale.md with what is assumed.",)
    return Section(
        title=title, source="scale.json", command="python bench/scale.py --url postgresql://...",
        said=said(document, "Measured" if measured else "Computed from what was measured"),
        claims=tuple(claims), notes=notes,
    )  # fmt: skip
