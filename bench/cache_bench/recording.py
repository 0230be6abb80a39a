"""A recorded sequence of cache operations, made once, kept in a file, replayed by every implementation alike.

What is recorded is what a server did that runs up to `running` requests at a time, admits one while every admitted
request can still reach its full length, computes whole prompts at once, and decodes one token of every running request
a step. A conversation's next turn waits for the one before. The last token of an answer is never fed back.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache_bench.traces import Turn, packed
from pagegen.cache import BlockAllocator

ADD, STEP, FREE = range(3)
KINDS = ("add", "step", "free")


class Operation(NamedTuple):
    """`add` of a request with its prompt, which is then computed; a `step` that gives each of `requests` one token,
    which is then computed; `free` of a request. `requests` and `tokens` are what the kind needs."""

    kind: int
    requests: list[str]
    tokens: list[int]


@dataclass(frozen=True, eq=False)
class Recording:
    """Operations for a cache of `num_blocks` blocks of `block_size` tokens. Operation i has the requests and tokens
    from starts[i] up to starts[i + 1] (an add repeats its request; a free has one, with a token that means nothing).
    `cached`: what every add must find, in order, in tokens."""

    name: str
    source: str
    num_blocks: int
    block_size: int
    kinds: npt.NDArray[np.int8]
    starts: npt.NDArray[np.int64]
    requests: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.uint32]
    cached: npt.NDArray[np.int64]

    def operations(self) -> list[Operation]:
        """All as Python values, which is what a server hands to its cache."""
        return list(self._operations())

    def _operations(self) -> Iterator[Operation]:
        names = [f"request-{i}" for i in range(int(self.requests.max(initial=-1)) + 1)]
        starts = self.starts.tolist()
        for kind, first, last in zip(self.kinds.tolist(), starts[:-1], starts[1:], strict=True):
            owners = self.requests[first:last] if kind == STEP else self.requests[first : first + 1]
            tokens = [] if kind == FREE else self.tokens[first:last].tolist()
            yield Operation(kind, [names[i] for i in owners.tolist()], tokens)

    @property
    def count(self) -> int:
        """Operations: adds, frees, and every token that a step appends."""
        return sum(self.counts().values())

    def counts(self) -> dict[str, int]:
        steps = np.diff(self.starts)[self.kinds == STEP]
        return {
            "add": int((self.kinds == ADD).sum()), "append": int(steps.sum()), "free": int((self.kinds == FREE).sum()),
        }  # fmt: skip

    def facts(self) -> dict[str, int]:
        """What kind of sequence it is."""
        lengths = np.diff(self.starts)
        prompts = lengths[self.kinds == ADD]
        return {
            **self.counts(), "steps": int((self.kinds == STEP).sum()), "prompt_tokens": int(prompts.sum()),
            "hit_tokens": int(self.cached.sum()), "num_blocks": self.num_blocks, "block_size": self.block_size,
        }  # fmt: skip

    def save(self, path: Path) -> None:
        np.savez(
            path, allow_pickle=False, about=np.array([self.num_blocks, self.block_size]),
            names=np.array([self.name, self.source]), kinds=self.kinds, starts=self.starts, requests=self.requests,
            tokens=self.tokens, cached=self.cached,
        )  # fmt: skip

    @classmethod
    def load(cls, path: Path) -> Recording:
        with np.load(path, allow_pickle=False) as file:
            name, source = map(str, file["names"])
            num_blocks, block_size = map(int, file["about"])
            arrays = (file[part] for part in ("kinds", "starts", "requests", "tokens", "cached"))
            return cls(name, source, num_blocks, block_size, *arrays)


@dataclass
class Recorder:
    """Takes operations down and makes the `Recording`."""

    kinds: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    requests: array[int] = field(default_factory=lambda: array("i"))
    tokens: array[int] = field(default_factory=lambda: array("I"))
    cached: list[int] = field(default_factory=list)
    count: int = 0

    def add(self, request: int, prompt: array[int], cached: int) -> None:
        self._note(ADD, [request] * len(prompt), prompt)
        self.cached.append(cached)

    def step(self, requests: Sequence[int], tokens: array[int]) -> None:
        self._note(STEP, requests, tokens)

    def free(self, request: int) -> None:
        self._note(FREE, [request], array("I", [0]))

    def _note(self, kind: int, requests: Sequence[int], tokens: array[int]) -> None:
        self.kinds.append(kind)
        self.requests.extend(requests)
        self.tokens.extend(tokens)
        self.starts.append(len(self.tokens))
        self.count += len(tokens) if kind == STEP else 1

    def finish(self, name: str, source: str, num_blocks: int, block_size: int) -> Recording:
        return Recording(
            name, source, num_blocks, block_size, np.array(self.kinds, np.int8), np.array(self.starts, np.int64),
            np.array(self.requests, np.int32), np.array(self.tokens, np.uint32), np.array(self.cached, np.int64),
        )  # fmt: skip


@dataclass(eq=False)
class _Running:
    """A request in the server: tokens of its answer already fed back, and the turns that wait for its end."""

    name: int
    turn: Turn
    later: deque[Turn]
    fed: int = 0

    @property
    def most(self) -> int:
        """Tokens in the cache at its end."""
        return len(self.turn.prompt) + max(0, len(self.turn.output) - 1)


def record(
    name: str, source: str, dialogues: Iterable[Sequence[Turn]], *, block_size: int, num_blocks: int, running: int,
    operations: int,
) -> Recording:  # fmt: skip
    """Runs the server over the dialogues until there are `operations`, or no dialogue is left; then the running
    requests end. Raises ValueError for a turn that `num_blocks` blocks cannot hold."""
    allocator, recorder = BlockAllocator(num_blocks, block_size), Recorder()
    fresh = (deque(turns) for turns in dialogues)
    waiting: deque[deque[Turn]] = deque()  # what is left of dialogues whose turn before has ended
    served: list[_Running] = []
    held = count = 0  # blocks promised to the running requests; requests so far

    def blocks(tokens: int) -> int:
        return -(-tokens // block_size)

    while recorder.count < operations:
        while len(served) < running:
            turns = waiting.popleft() if waiting else next(fresh, None)
            if turns is None:
                break
            request = _Running(count, turns[0], turns)
            if blocks(request.most) > num_blocks:
                raise ValueError(f"num_blocks must hold {request.most} tokens, got {num_blocks} blocks of {block_size}")
            if held + blocks(request.most) > num_blocks:
                waiting.appendleft(turns)
                break
            turns.popleft()
            count, held = count + 1, held + blocks(request.most)
            prompt = packed(request.turn.prompt)
            recorder.add(request.name, prompt, allocator.add(request.name, prompt))
            allocator.mark_computed(request.name, len(prompt))
            served.append(request)
        if not served:
            break
        still = _step(allocator, recorder, served)
        held -= sum(blocks(r.most) for r in served if r not in still)
        waiting.extend(r.later for r in served if r not in still and r.later)
        served = still
    for request in served:
        recorder.free(request.name)
    return recorder.finish(name, source, num_blocks, block_size)


def _step(allocator: BlockAllocator, recorder: Recorder, served: list[_Running]) -> list[_Running]:
    """One step: those whose answer is whole end, all others feed back one token more; returns the others."""
    still = [r for r in served if r.fed < len(r.turn.output) - 1]
    for request in served:
        if request not in still:
            allocator.free(request.name)
            recorder.free(request.name)
    if still:
        tokens = array("I", [int(r.turn.output[r.fed]) for r in still])
        recorder.step([r.name for r in still], tokens)
        for request, token in zip(still, tokens, strict=True):
            allocator.append(request.name, [token])
            allocator.mark_computed(request.name, allocator.length(request.name))
            request.fed += 1
    return still
