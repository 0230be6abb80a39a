"""Hit rates of the traces: with an infinite cache, and against memory."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cache_bench import hits
from cache_bench.traces import MOONCAKE, SHAREGPT, Request, conversations, read

Row = dict[str, Any]
AT_A_TIME = 1000  # conversations whose turns come mixed
# Of 12,031 and 61,225 rows, so that the whole bench ends within three minutes. An infinite cache's rates are of all.
CURVE_ROWS = {MOONCAKE[0]: 4_000, SHAREGPT[0]: 8_000}
CACHE_TOKENS = {MOONCAKE[0]: range(17, 28, 2), SHAREGPT[0]: range(15, 24, 2)}  # powers of two
QUICK_ROWS = 1500


def infinite(data: Path, quick: bool) -> Iterator[Row]:
    """One row a trace: an allocator that never evicts beside what the ids alone say."""
    for name, block in (MOONCAKE, SHAREGPT):
        if (data / name).exists():
            requests = list(read(data / name, QUICK_ROWS if quick else None))
            counted = hits.named(requests, block, partial=False)
            found = hits.replay(requests, block, num_blocks=counted.blocks + _longest(requests, block))
            yield {
                "section": "infinite",
                "cell": {"trace": name, "block_size": block, "rows": len(requests)},
                "rate": found.rate,
                "counted_rate": counted.rate,
                "equal": (found.hit_tokens, found.refused) == (counted.hit_tokens, 0),
                "partial_rate": hits.named(requests, block, partial=True).rate,
                "prompt_tokens": found.prompt_tokens,
                "hit_tokens": found.hit_tokens,
                "blocks": counted.blocks,
            }


def against_memory(data: Path, quick: bool) -> Iterator[Row]:
    """One row a trace, order and size of the cache. The traces' own order, and for the one whose conversations stand
    one behind the other also 1000 conversations at a time, as many users' turns would come."""
    for name, block in (MOONCAKE, SHAREGPT):
        if (data / name).exists():
            in_order = list(read(data / name, QUICK_ROWS if quick else CURVE_ROWS[name]))
            orders = {"in the file's order": in_order}
            if name == SHAREGPT[0]:
                orders[f"{AT_A_TIME} conversations at a time"] = list(alternating(in_order, AT_A_TIME))
            for order, requests in orders.items():
                limit = hits.named(requests, block, partial=False).rate
                for exponent in list(CACHE_TOKENS[name])[:: 4 if quick else 1]:
                    found = hits.replay(requests, block, 2**exponent // block)
                    yield {
                        "section": "hit_rate",
                        "cell": {
                            "trace": name, "order": order, "block_size": block, "tokens": 2**exponent,
                            "rows": len(requests),
                        },
                        "rate": found.rate,
                        "limit": limit,
                        "refused": found.refused,
                    }  # fmt: skip


def alternating(requests: Iterable[Request], at_a_time: int) -> Iterator[Request]:
    """The turns of so many conversations, each next one of a conversation drawn at random (seeded); where one ends,
    another begins. By turns would be the one order in which a cache that forgets the oldest finds all or nothing."""
    draw = random.Random(0)
    fresh = (deque(turns) for turns in conversations(requests))
    running = list(itertools.islice(fresh, at_a_time))
    while running:
        place = draw.randrange(len(running))
        yield running[place].popleft()
        if not running[place]:
            running[place : place + 1] = itertools.islice(fresh, 1)


def _longest(requests: Iterable[Request], block: int) -> int:
    """Blocks of the longest prompt: what is being computed needs room beside what is named."""
    return max(-(-request.prompt_tokens // block) for request in requests)
