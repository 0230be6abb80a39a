"""Requests of two traces, scaled down to what two CPU cores serve in half a minute, as dialogues.

Lengths are divided by 4 (the chat's) or 12, so that a block here is to a context what one 4 or 12 times as large is to
the trace's. Times are in spans: one span is what the bench lets the arrivals of a run take.
"""

from __future__ import annotations

import csv
import itertools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cache_bench.traces import SHAREGPT, Request, conversations, read

SHRINK = 4
AZURE = "azure2023_conv.csv"
AZURE_SHRINK = 12
MADE = "made, seed 0"
MOST_PROMPT = 1600  # tokens of the trace: 400 here
MOST_ANSWER = 64  # 16 here
THINK_SPANS = 0.05  # mean time from an answer's end to the next turn


Place = tuple[int, int]  # dialogue, turn of it


@dataclass(frozen=True, eq=False)
class Turn:
    """What the user says, in tokens, and how many tokens are answered; `after` spans after the last answer's end, or
    after the start."""

    said: array[int]
    answer: int
    after: float


@dataclass(frozen=True, eq=False)
class Workload:
    """Dialogues of at least one turn each; a turn's prompt is all that was said and answered before, and its own."""

    name: str
    source: str
    dialogues: tuple[tuple[Turn, ...], ...]

    def turn(self, place: Place) -> Turn:
        return self.dialogues[place[0]][place[1]]

    def facts(self) -> dict[str, float]:
        """Sizes: requests, mean tokens said, answered and of prompts."""
        turns = list(itertools.chain.from_iterable(self.dialogues))
        prompts = [length for dialogue in self.dialogues for length in _prompts(dialogue)]
        return {
            "requests": len(turns),
            "dialogues": len(self.dialogues),
            "mean_said": round(sum(len(turn.said) for turn in turns) / len(turns), 1),
            "mean_answer": round(sum(turn.answer for turn in turns) / len(turns), 1),
            "mean_prompt": round(sum(prompts) / len(prompts), 1),
            "longest_prompt": max(prompts),
        }


def workloads(data: Path, requests: int, vocabulary: int) -> Iterator[Workload]:
    """A chat and a stream of single requests, about `requests` each, of tokens below `vocabulary`: of the traces in
    `data`, else made."""
    draw = np.random.default_rng(0)
    chat, stream = data / SHAREGPT[0], data / AZURE
    turns = _sharegpt(chat, requests) if chat.exists() else _made_chat(draw, requests)
    yield _chat(turns, SHAREGPT[0] if chat.exists() else MADE, draw, vocabulary)
    rows = _azure(stream, requests) if stream.exists() else _made_stream(draw, requests)
    yield _stream(rows, AZURE if stream.exists() else MADE, draw, vocabulary)


def _chat(
    dialogues: Sequence[Sequence[tuple[int, int]]], source: str, draw: np.random.Generator, vocabulary: int
) -> Workload:
    """Dialogues that begin at random over the span, a short break before each further turn."""
    starts = np.sort(draw.uniform(0, 1, len(dialogues)))
    starts[0] = 0.0
    made = []
    for start, turns in zip(starts.tolist(), dialogues, strict=True):
        breaks = [start, *draw.exponential(THINK_SPANS, len(turns) - 1).tolist()]
        pairs = zip(turns, breaks, strict=True)
        made.append(tuple(Turn(_ids(draw, said, vocabulary), answer, after) for (said, answer), after in pairs))
    return Workload("chat, many turns", source, tuple(made))


def _stream(
    rows: Sequence[tuple[float, int, int]], source: str, draw: np.random.Generator, vocabulary: int
) -> Workload:
    """Single requests at the trace's times, stretched to one span."""
    first, last = rows[0][0], rows[-1][0]
    places = [(arrival - first) / max(last - first, 1e-9) for arrival, _, _ in rows]
    turns = [
        (Turn(_ids(draw, prompt, vocabulary), answer, place),)
        for place, (_, prompt, answer) in zip(places, rows, strict=True)
    ]
    return Workload("single requests", source, tuple(turns))


def _sharegpt(path: Path, requests: int) -> list[list[tuple[int, int]]]:
    """(tokens said, tokens answered) of dialogues of 3 to 6 turns, the first in the file that are short enough."""
    found: list[list[tuple[int, int]]] = []
    for dialogue in conversations(read(path)):
        if sum(map(len, found)) >= requests:
            break
        if 3 <= len(dialogue) <= 6 and dialogue[-1].prompt_tokens <= MOST_PROMPT:
            found.append([_shrunk(before, turn) for before, turn in zip([None, *dialogue], dialogue, strict=False)])
    return found


def _shrunk(before: Request | None, turn: Request) -> tuple[int, int]:
    said = turn.prompt_tokens - (0 if before is None else before.prompt_tokens + before.output_tokens)
    return max(1, said // SHRINK), max(2, min(turn.output_tokens, MOST_ANSWER) // SHRINK)


def _azure(path: Path, requests: int) -> list[tuple[float, int, int]]:
    """(arrival, prompt, answer) of neighbouring rows."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [
            (float(row["arrival_s"]), int(row["prompt_tokens"]), int(row["output_tokens"]))
            for row in itertools.islice(csv.DictReader(file), requests)
        ]
    most = 2 * MOST_PROMPT, 2 * MOST_ANSWER  # as much here as of the chat
    return [
        (arrival, max(1, min(prompt, most[0]) // AZURE_SHRINK), max(2, min(output, most[1]) // AZURE_SHRINK))
        for arrival, prompt, output in rows
    ]


def _made_chat(draw: np.random.Generator, requests: int) -> list[list[tuple[int, int]]]:
    sizes = [(int(said), int(answer)) for said, answer in draw.integers((8, 8), (60, 40), (requests, 2)).tolist()]
    return [sizes[i : i + 4] for i in range(0, requests, 4)]


def _made_stream(draw: np.random.Generator, requests: int) -> list[tuple[float, int, int]]:
    arrivals = np.cumsum(draw.exponential(1.0, requests)).tolist()
    sizes = draw.integers((20, 8), (300, 40), (requests, 2)).tolist()
    return [(arrival, prompt, answer) for arrival, (prompt, answer) in zip(arrivals, sizes, strict=True)]


def _prompts(dialogue: Sequence[Turn]) -> Iterator[int]:
    length = 0
    for turn in dialogue:
        length += len(turn.said)
        yield length
        length += turn.answer


def _ids(draw: np.random.Generator, count: int, vocabulary: int) -> array[int]:
    return array("I", draw.integers(0, vocabulary, count, dtype=np.uint32).tobytes())
