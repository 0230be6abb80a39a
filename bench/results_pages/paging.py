"""Is paging worth it, which block size, what a real server does with it, and a shared prefix attended once."""

from __future__ import annotations

from collections.abc import Iterator

from results_pages.claims import Claim, Document, Row, Section, said

BLOCK = 16


def block_size(document: Document) -> Section:
    rows: dict[str, list[Row]] = {}
    for row in document["rows"]:
        rows.setdefault(row["section"], []).append(row)
    claims = [*_memory(rows.get("memory", [])), *_sharing(rows.get("sharing", [])), *_kernel(rows.get("kernel", []))]
    return Section(
        title="Is paging worth it, and which block size", source="block-size.json",
        command="python bench/block_size.py", said=said(document), claims=tuple(claims), figure="block-size.svg",
        notes=(f"Memory and sharing are computed from the traces, exactly; kernels are timed in turns{_clock(rows)}.",),
    )  # fmt: skip


def _clock(rows: dict[str, list[Row]]) -> str:
    """What is to be said where others took too much of the machine for its wall clock."""
    timed = [row for row in (*rows.get("kernel", []), *rows.get("batch", []))]
    disturbed = sum(row["clock"] != "wall" for row in timed)
    return f"; {disturbed} of {len(timed)} rows by CPU time, since other processes disturbed them" if disturbed else ""


def simulated(document: Document) -> Section:
    """What a server would do: apart, since it is not measured."""
    served = [row for row in document["rows"] if row["section"] == "served"]
    rest = next((row for row in document["rows"] if row["section"] == "rest"), None)
    notes = [
        "Simulated by the scheduler that serves real models; attention takes the times measured at each block size, "
        "the rest of a step the model's weights at the rates measured beside them"
        + (f" ({rest['read_gb_s']:.0f} GB/s, {rest['peak_tflops']:.2f} TFLOP/s)." if rest else "."),
        "Tokens a second are the server's when all requests wait from the start; waits are of single requests at one "
        "rate of arrivals for all block sizes. Neither says anything of the other.",
    ]
    return Section(
        title="A server in each block size", source="block-size.json", command="python bench/block_size.py",
        said=said(document, "Simulated"), claims=tuple(_served(served)), notes=tuple(notes),
    )  # fmt: skip


def _memory(rows: list[Row]) -> Iterator[Claim]:
    for trace in dict.fromkeys(row["cell"]["trace"] for row in rows):
        found = {_way(row): row for row in rows if row["cell"]["trace"] == trace}
        paged = found[str(BLOCK)]
        for way, row in found.items():
            if way.startswith("in one piece"):
                yield Claim(
                    what=f"{trace}: sequences in the same memory, blocks of {BLOCK} over {way}",
                    found=f"{paged['sequences'] / row['sequences']:.2f} x ({paged['used_share']:.1%} of the slots used "
                    f"against {row['used_share']:.1%})",
                )
        if "256" in found:
            yield Claim(
                what=f"{trace}: slots wasted at a request's end, blocks of 16 and of 256",
                found=f"{paged['end_waste']:.1f} and {found['256']['end_waste']:.1f} tokens; evenly spread lengths "
                "would waste 7.5 and 127.5",
            )
        yield Claim(
            what=f"{trace}: block table of a mean sequence, blocks of {BLOCK}",
            found=f"{paged['metadata_bytes']:.0f} bytes, {paged['metadata_share']:.1e} of its keys and values",
        )


def _sharing(rows: list[Row]) -> Iterator[Claim]:
    for trace in dict.fromkeys(row["cell"]["trace"] for row in rows):
        found = {row["cell"]["block_size"]: row for row in rows if row["cell"]["trace"] == trace}
        lost = ", ".join(f"{size}: {found[size]['lost_share']:.1%}" for size in (16, 64, 256, 1024) if size in found)
        replayed = [row for row in found.values() if "replayed_equal" in row]
        wrong = [row["cell"]["block_size"] for row in replayed if not row["replayed_equal"]]
        yield Claim(
            what=f"{trace}: shared prompt tokens lost to whole blocks, by block size",
            found=f"{lost}; {next(iter(found.values()))['common_share']:.1%} of all prompt tokens are shared "
            "with earlier prompts or, within a conversation, the answers before",
        )
        yield Claim(
            what=f"{trace}: the allocator finds what the formula says",
            found=f"at {len(replayed) - len(wrong)} of {len(replayed)} block sizes, token by token",
            asked="all",
            met=not wrong,
        )


def _kernel(rows: list[Row]) -> Iterator[Claim]:
    ok = [row for row in rows if row["status"] == "ok"]
    for cell in dict.fromkeys((r["cell"]["batch"], r["cell"]["context"], r["cell"]["order"]) for r in ok):
        found = {r["what"]: r for r in ok if tuple(r["cell"][k] for k in ("batch", "context", "order")) == cell}
        head = f"decode {cell[0]} x {cell[1]}, {cell[2]}"
        over = {
            int(what.split()[1]): _over(row, "paged in one piece")
            for what, row in found.items()
            if what.startswith("paged") and what.split()[-1].isdigit() and "paged in one piece" in row["time_over"]
        }
        if over:
            told = ", ".join(f"{size}: {value:.2f}" for size, value in over.items())
            yield Claim(what=f"{head}: time over the same kernel's with each context in one piece", found=told)
        for what, row in found.items():
            beside = row["time_over"].get(f"paged {BLOCK}")
            if "SDPA" in what and beside:
                by, rounds = ("", "rounds") if row["clock"] == "wall" else (" by CPU time", "rounds by the clock")
                yield Claim(
                    what=f"{head}: paged kernel, blocks of {BLOCK}, speed over {what}",
                    found=f"{_over(row, f'paged {BLOCK}'):.2f} x{by} ({rounds}: {beside['range'][0]:.2f} to "
                    f"{beside['range'][1]:.2f})",
                )


def _over(row: Row, name: str) -> float:
    """By the clock that the rounds allowed."""
    return float(row["time_over"][name]["median" if row["clock"] == "wall" else "cpu"])


def _served(rows: list[Row]) -> Iterator[Claim]:
    for row in rows:
        speed, waits = row["server"], row["requests"]
        way, trace = _way(row), row["cell"]["trace"]
        head = f"{trace}, {f'blocks of {way}' if way.isdigit() else way}"
        yield Claim(
            what=f"{head}: the server",
            found=f"{speed['output_tokens_per_s']:.1f} tokens/s, {speed['sequences']:.1f} sequences a step, hits "
            f"{speed['hit_share']:.1%}",
        )
        yield Claim(
            what=f"{head}: a request",
            found=f"first token p50 {waits['ttft_p50_s']:.1f} s, p99 {waits['ttft_p99_s']:.1f} s; between tokens p50 "
            f"{waits['itl_p50_s'] * 1e3:.0f} ms, p99 {waits['itl_p99_s'] * 1e3:.0f} ms",
        )


def _way(row: Row) -> str:
    cell = row["cell"]
    return str(cell["block_size"]) if "block_size" in cell else f"in one piece ({cell['reservation']})"


def serving(document: Document) -> Section:
    claims = []
    for row in document["rows"]:
        head = f"{row['cell']['trace']}, blocks of {row['cell']['block_size']}"
        if row["section"] == "rush":
            found = (
                f"{row['output_tokens_per_s']['median']:.1f} tokens/s out, {row['total_tokens_per_s']['median']:.1f} "
                f"in and out; hits {row['hit_rate']['median']:.1%}"
            )
            claims.append(Claim(what=f"{head}: the server, all requests at once", found=found))
        else:
            first, between = (
                " and ".join(f"{p} {row[f'{name}_{p}_ms']['median']:.0f} ms" for p in ("p50", "p99"))
                for name in ("ttft", "itl")
            )
            found = f"first token {first}; between tokens {between}"
            claims.append(Claim(what=f"{head}: a request, at a pace", found=found))
    rounds = len(document["rows"][0]["span_s"]["samples"]) if document["rows"] else 0
    notes = (
        f"{document['model']}; clock: {document['clock']}; {rounds} rounds. Two questions with an answer each: the "
        "server's speed, and what requests wait.",
    )
    return Section(
        title="A real server", source="serving.json", command="python bench/serving.py", said=said(document),
        claims=tuple(claims), notes=notes, figure="serving.svg",
    )  # fmt: skip


def cascade(document: Document) -> Section:
    claims = [
        Claim(
            what=f"{row['cell']['num_seqs']} sequences sharing {row['cell']['shared_tokens']} tokens: speed over each "
            "attending the prefix for itself",
            found=_gained(row),
        )
        for row in document["rows"]
    ]
    return Section(
        title="A shared prefix attended once", source="cascade.json", command="python bench/cascade.py",
        said=said(document), claims=tuple(claims),
        notes=("Every batch is divided here, whether or not a gain is predicted, by the graph of steps, for it.",),
    )  # fmt: skip


def _gained(row: Row) -> str:
    by_cpu = row["undisturbed"] < 3
    found = row["cpu_speedup" if by_cpu else "speedup"]
    clock = ", by CPU time: other processes disturbed the rounds" if by_cpu else ""
    spread = f"{found['range'][0]:.2f} to {found['range'][1]:.2f}{clock}"
    return f"{found['median']:.2f} x ({spread}); predicted {row['predicted_speedup']:.2f}"
