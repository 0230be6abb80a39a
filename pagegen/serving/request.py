"""What is asked of a server, and what came of it."""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from pagegen.cache import OutOfBlocks
from pagegen.cache.sequence import integer, pack_tokens
from pagegen.serving.figures import RequestTimes

Reason = Literal["length", "stop", "aborted"]


@dataclass(frozen=True, eq=False)
class Request:
    """One request. It ends with a token of `stop_tokens` (which is kept) or after `max_new_tokens`.

    `prompt`: its tokens, or only how many there are, where nothing but sizes matters (then no prefix is shared, and
    the outputs are counted, not kept). `priority`: lower numbers first. `tenant`: who it is counted to; the server is
    shared fairly between tenants. `context`: what besides the tokens decides their keys and values (`add`).
    `arrival_s`: when it came, on the scheduler's clock: its times count from there.
    """

    id: Hashable
    prompt: Sequence[int] | int
    max_new_tokens: int
    _: KW_ONLY
    arrival_s: float = 0.0
    priority: int = 0
    tenant: Hashable = None
    context: bytes = b""
    stop_tokens: frozenset[int] = field(default=frozenset())

    def __post_init__(self) -> None:
        if isinstance(self.prompt, int):
            integer("prompt", self.prompt, 1)
        else:
            object.__setattr__(self, "prompt", pack_tokens(self.prompt)[:])
            if not self.prompt:
                raise ValueError(f"prompt must hold at least one token, got none for request {self.id!r}")
        integer("max_new_tokens", self.max_new_tokens, 1)
        integer("priority", self.priority, -(2**31), 2**31)
        if not math.isfinite(self.arrival_s):
            raise ValueError(f"arrival_s must be a time in seconds, got {self.arrival_s}")
        if not isinstance(self.context, bytes):
            raise TypeError(f"context must be bytes, got {type(self.context).__name__} {self.context!r}")
        object.__setattr__(self, "stop_tokens", frozenset(self.stop_tokens))

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the prompt has."""
        return self.prompt if isinstance(self.prompt, int) else len(self.prompt)

    @property
    def most_tokens(self) -> int:
        """Tokens in the cache when it ends at the latest: the last output is never fed back."""
        return self.prompt_tokens + self.max_new_tokens - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """How a request ended: `tokens` are its outputs (none for a prompt given by its length), `output_tokens` how many
    there were, `hit_tokens` of its prompt came from the prefix cache when it was first admitted."""

    request: Request
    reason: Reason
    tokens: array[int]
    output_tokens: int
    hit_tokens: int
    preemptions: int
    times: RequestTimes


class NeverFits(OutOfBlocks):
    """A request that the cache cannot hold even alone. It was refused; nothing else was changed."""

    def __init__(self, request: Request, needed: int, num_blocks: int, watermark: int) -> None:
        super().__init__(needed, num_blocks - watermark)
        self.request_id = request.id
        held = f"{num_blocks} blocks" + (f", {watermark} of them kept back" if watermark else "")
        self._text = (
            f"request {request.id!r} needs {needed} blocks for {request.prompt_tokens} prompt and up to "
            f"{request.max_new_tokens} new tokens, but the cache has {held}: ask for fewer tokens"
        )

    def __str__(self) -> str:
        return self._text
