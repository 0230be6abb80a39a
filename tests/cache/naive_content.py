"""What slots hold, kept naively: a name for every token that stands for all that its key and value depend on."""

from __future__ import annotations

from dataclasses import dataclass, field

POISON = -1  # what a step that failed leaves behind, and what nobody has written


class Chains:
    """Names of contents. A token's key and value depend on the context, on the token and on every token before it; so
    the name of a content is a number for (the name before it, token), and the first follows the context's."""

    def __init__(self) -> None:
        self._names: dict[tuple[object, int], int] = {}

    def root(self, context: bytes) -> int:
        return self._names.setdefault((context, POISON), len(self._names))

    def after(self, name: int, token: int) -> int:
        """The name of `token` behind what has `name`: a model that reads poison writes poison."""
        return POISON if name == POISON else self._names.setdefault((name, token), len(self._names))


@dataclass
class Naive:
    """A sequence as its owner sees it: whole lists, no blocks. `names[p]` is what token p must read as."""

    context: bytes
    root: int
    tokens: list[int] = field(default_factory=list)
    names: list[int] = field(default_factory=list)
    computed: int = 0
    swapped: bool = False

    def extend(self, chains: Chains, tokens: list[int]) -> None:
        for token in tokens:
            self.names.append(chains.after(self.names[-1] if self.names else self.root, token))
            self.tokens.append(token)

    def cut(self, length: int) -> None:
        del self.tokens[length:], self.names[length:]
        self.computed = min(self.computed, length)

    def copy(self) -> Naive:
        return Naive(self.context, self.root, list(self.tokens), list(self.names), self.computed)


class Slots:
    """Memory as a dictionary would be: one value a slot, on the device and on the host."""

    def __init__(self, num_blocks: int, num_host_blocks: int, block_size: int) -> None:
        self.size = block_size
        self.device = [POISON] * (num_blocks * block_size)
        self.host = [POISON] * (num_host_blocks * block_size)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        for source, target in pairs:
            self._move(self.device, source, self.device, target)

    def to_host(self, pairs: list[tuple[int, int]]) -> None:
        for block, place in pairs:
            self._move(self.device, block, self.host, place)

    def from_host(self, pairs: list[tuple[int, int]]) -> None:
        for block, place in pairs:
            self._move(self.host, place, self.device, block)

    def write(self, slots: list[int], values: list[int]) -> None:
        for slot, value in zip(slots, values, strict=True):
            self.device[slot] = value

    def read(self, blocks: list[int]) -> list[int]:
        """What the slots of `blocks` hold, in order."""
        size, device = self.size, self.device
        return [value for block in blocks for value in device[block * size : (block + 1) * size]]

    def _move(self, source: list[int], block: int, target: list[int], place: int) -> None:
        size = self.size
        target[place * size : (place + 1) * size] = source[block * size : (block + 1) * size]
