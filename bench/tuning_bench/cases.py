"""The recorded cases: six kernels under real traffic, each with a grid of variants that was measured as a whole.

The batches are those of shipped profiles, evenly spread sequences of them where a whole batch would take too long to
record. The grid holds the default variant; its axes are the ones that the tuner moves along, the read order in
addition. All lie in one place, so that the recording and the replay cannot disagree.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

from pagegen_autotune import load_profile

from pagegen import targets
from pagegen.spec import AttentionSpec, CacheLayout, CppVariant, Profile, Target, Workload

CPU = Target("cpu")
TILES, STREAMS, ORDERS = (32, 64, 128, 256), (2, 4, 8), ("head", "token")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel, one memory layout, one class of batches. `tokens` bounds what a batch holds in the cache."""

    name: str
    spec: AttentionSpec
    layout: CacheLayout
    traffic: str
    batches: int
    tokens: int

    @property
    def default(self) -> CppVariant:
        """The variant that the search starts from: what the tuner starts from for this kernel."""
        found = targets.default_variant(self.spec, self.layout, CPU, decode=True)
        assert isinstance(found, CppVariant)
        return found

    @property
    def grid(self) -> list[CppVariant]:
        """Every variant that was recorded, the default first."""
        start = self.default
        heads = sorted({1, start.heads_together})
        ahead = sorted({0, start.prefetch_ahead or 1})
        splits = sorted({512, start.split_tokens if start.split_tokens != 512 else 8192})
        axes = (TILES, STREAMS, heads, ahead, ORDERS, splits)
        names = ("tile_kv", "streams", "heads_together", "prefetch_ahead", "read_order", "split_tokens")
        changes: list[dict[str, Any]] = [dict(zip(names, values, strict=True)) for values in itertools.product(*axes)]
        points = [replace(start, **change) for change in changes]
        return list(dict.fromkeys([start, *points]))

    @property
    def profile(self) -> Profile:
        """Decode batches of the traffic, from its largest to its smallest, each thinned by the same factor so that the
        largest holds at most `tokens`."""
        decode = [(w, weight) for w, weight in load_profile(self.traffic) if w.is_decode]
        decode.sort(key=lambda load: -load[0].total_context)
        kept = [decode[round(i * (len(decode) - 1) / (self.batches - 1))] for i in range(self.batches)]
        share = min(1.0, self.tokens / kept[0][0].total_context)
        return Profile(
            name=f"decode of {self.traffic}",
            workloads=tuple(_thinned(w, share) for w, _ in kept),
            weights=tuple(weight for _, weight in kept),
        )


def _thinned(workload: Workload, share: float) -> Workload:
    """So many of a decode batch's sequences, one at least, evenly spread by context length."""
    lengths = sorted(workload.context_lens)
    count = max(1, round(len(lengths) * share))
    return Workload(context_lens=tuple(lengths[(2 * i + 1) * len(lengths) // (2 * count)] for i in range(count)))


def _case(name: str, model: str, traffic: str, block_size: int, order: str, tokens: int, **spec: Any) -> Case:
    made = AttentionSpec.from_model(model).replace(**spec)
    layout = CacheLayout(block_size=block_size, order=order).canonical(made.num_kv_heads)
    return Case(name=name, spec=made, layout=layout, traffic=traffic, batches=4, tokens=tokens)


CASES = (
    _case("llama-3.2-1b", "llama-3.2-1b", "azure-conversation", 16, "NHD", 48_000),
    _case("llama-3.1-8b-hnd", "llama-3.1-8b", "azure-conversation", 32, "HND", 24_000),
    _case("qwen2.5-0.5b", "qwen2.5-0.5b", "reasoning", 32, "NHD", 160_000),
    _case("llama-3.1-8b-int8", "llama-3.1-8b", "azure-conversation", 16, "NHD", 40_000,
          kv_dtype="int8", kv_scale_granularity="head"),
    _case("head-dim-256", "gemma-2-9b", "mooncake-conversation", 16, "HND", 24_000),
    # recorded when the search's constants stood: none of them was chosen with it in view
    _case("held-out", "qwen2.5-7b", "reasoning", 64, "NHD", 60_000),
)  # fmt: skip
