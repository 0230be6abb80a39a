"""The parts of the check: what each asks, and its share of the time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Part:
    """`share` is the part's share of the time that is left when all before it took theirs; what a part leaves, later
    ones get. A `side_by_side` part times nothing: several processes share its cases."""

    name: str
    share: float
    question: str
    side_by_side: bool = False


PARTS = (
    Part(
        name="correctness", share=0.16, side_by_side=True,
        question="Does every kernel family give the float64 reference's result on this device?",
    ),
    Part(
        name="candidates", share=0.12, side_by_side=True,
        question="Do the tuner's first candidates compile here, and are they right? (Triton then finds them compiled.)",
    ),
    Part(name="bandwidth", share=0.03, question="What does a copy within the device's memory give?"),
    Part(name="tuning", share=0.30, question="What does the tuner find for the chat profile?"),
    Part(name="speed", share=0.15, question="How long does a decode step take, beside the peers that import?"),
    Part(name="published", share=0.09, question="And beside latencies that others published for this device?"),
    Part(name="ranking", share=0.08, question="Do predictions rank variants as measurements do?"),
    Part(
        name="integration", share=0.06,
        question="CUDA-graph capture and replay, fullgraph compile, and what a call costs the host?",
    ),
    Part(name="records", share=0.01, question="Every trial, as cache_db/records holds them."),
)  # fmt: skip
BY_NAME = {part.name: part for part in PARTS}
