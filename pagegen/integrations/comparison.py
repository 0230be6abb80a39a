"""The same greedy prompts through paged attention and through transformers' own: tokens and times, side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pagegen.integrations.generation import PagedGenerator

Tokens = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One way of answering all prompts. `tokens` are the new ones of each prompt, `latencies_s` what each request
    waited for its last token, `seconds` the time from the first request's start to the last one's end."""

    name: str
    tokens: Tokens
    seconds: float
    latencies_s: tuple[float, ...]

    @property
    def server_tokens_per_s(self) -> float:
        """New tokens of all requests over the whole time."""
        return sum(map(len, self.tokens)) / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready fields, the tokens by count."""
        return {
            "name": self.name,
            "new_tokens": [len(t) for t in self.tokens],
            "seconds": self.seconds,
            "server_tokens_per_s": self.server_tokens_per_s,
            "latencies_s": list(self.latencies_s),
        }


@dataclass(frozen=True)
class Difference:
    """The first token that two runs do not share; a missing token is None."""

    prompt: int
    position: int
    expected: int | None
    got: int | None

    def __str__(self) -> str:
        return f"prompt {self.prompt}, new token {self.position}: expected {self.expected}, got {self.got}"


def first_difference(expected: Tokens, got: Tokens) -> Difference | None:
    """Where `got` first leaves `expected`, or None."""
    for prompt, (left, right) in enumerate(zip(expected, got, strict=True)):
        for position in range(max(len(left), len(right))):
            a = left[position] if position < len(left) else None
            b = right[position] if position < len(right) else None
            if a != b:
                return Difference(prompt, position, a, b)
    return None


def run_paged(generator: PagedGenerator, prompts: Sequence[Sequence[int]], max_new_tokens: int, name: str) -> Run:
    """All prompts as one ragged batch."""
    # other tokens than the prompts' own, so that no prefix is found in the timed run
    generator.generate([[0] * len(p) for p in prompts], max_new_tokens=2)
    ends = [0.0] * len(prompts)
    start = time.perf_counter()

    def note(prompt: int, _token: int) -> None:
        ends[prompt] = time.perf_counter() - start

    tokens = generator.generate(prompts, max_new_tokens=max_new_tokens, on_token=note)
    seconds = time.perf_counter() - start
    return Run(name=name, tokens=tuple(map(tuple, tokens)), seconds=seconds, latencies_s=tuple(ends))


def run_alone(model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int, name: str) -> Run:
    """Each prompt by itself, one after the other, through `model.generate`."""
    _generate(model, [list(prompts[0])], 2)
    tokens, latencies = [], []
    for prompt in prompts:
        start = time.perf_counter()
        tokens += _generate(model, [list(prompt)], max_new_tokens)
        latencies.append(time.perf_counter() - start)
    return Run(name=name, tokens=tuple(tokens), seconds=sum(latencies), latencies_s=tuple(latencies))


def run_padded(model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int, name: str) -> Run:
    """All prompts as one batch padded on the left, through `model.generate`. Every request waits for the longest
    answer, since `generate` returns them together."""
    _generate(model, [list(p) for p in prompts], 2)
    start = time.perf_counter()
    tokens = _generate(model, [list(p) for p in prompts], max_new_tokens)
    seconds = time.perf_counter() - start
    return Run(name=name, tokens=tuple(tokens), seconds=seconds, latencies_s=(seconds,) * len(prompts))


def _generate(model: Any, prompts: list[list[int]], max_new_tokens: int) -> list[tuple[int, ...]]:
    """New tokens of each prompt, up to and with its end-of-sequence token."""
    longest = max(map(len, prompts))
    pads = [longest - len(p) for p in prompts]
    ids = torch.tensor([[0] * pad + p for pad, p in zip(pads, prompts, strict=True)], device=model.device)
    mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads], device=model.device)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False)
    eos = model.generation_config.eos_token_id
    stop = {eos} if isinstance(eos, int) else set(eos or ())
    return [_until(row[longest:].tolist(), stop) for row in out]


def _until(tokens: list[int], stop: set[int]) -> tuple[int, ...]:
    ends = [i + 1 for i, token in enumerate(tokens) if token in stop]
    return tuple(tokens[: ends[0]] if ends else tokens)
