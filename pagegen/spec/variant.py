"""`Variant`: how attention is computed. One subclass a kernel family, so no field is ever meaningless."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from pagegen.spec import check

PAGE_WALKS = ("tile_in_page", "pages_in_tile", "any")
HEAD_PIECES = ("padded", "split")
DOTS = ("mma", "fma")
LOADS = ("pointer", "descriptor")
REDUCES = ("kernel", "last")
PREFETCHES = (0, 1, 2, 4, 8)
# The cache a C++ kernel asks lines into, by the locality that __builtin_prefetch takes.
PREFETCH_HINTS = {"l1": 3, "l2": 2}
READ_ORDERS = ("head", "token")
SCHEDULES = ("dynamic", "balanced")
ACCUMULATES = ("dot", "float32")
MAX_SPLITS = 1024  # of a C++ kernel: what 2**20 keys give parts of 1024


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def pieces(head_dim: int, head_pieces: str) -> tuple[int, int]:
    """The columns of the two pieces that hold a head dim, powers of two; the second is 0 where one holds it all. 16 at
    least: tl.dot needs as many."""
    whole = max(16, next_power_of_two(head_dim))
    if head_pieces == "padded" or whole == max(16, head_dim):
        return whole, 0
    main = whole // 2
    rest = max(16, next_power_of_two(head_dim - main))
    return (main, rest) if rest < main else (whole, 0)


def cheapest_walk(block_size: int, tile_kv: int) -> str:
    """The page walk with the fewest block-table look-ups a tile that these sizes allow."""
    if block_size % tile_kv == 0:
        return "tile_in_page"
    return "pages_in_tile" if tile_kv % block_size == 0 else "any"


def fewest_columns(head_dim: int) -> str:
    """The head pieces that pad a head dim least; "padded" where both pad alike."""
    return min(HEAD_PIECES, key=lambda head_pieces: sum(pieces(head_dim, head_pieces)))


def _power_of_two(name: str, value: Any, *, at_least: int, at_most: int) -> None:
    check.integer(name, value, at_least=at_least)
    if value & (value - 1) or value > at_most:
        raise ValueError(f"{name} must be a power of two in {at_least}..{at_most}, got {value}")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A point of a kernel family's search space; a concrete value is a `TritonVariant` or a `CppVariant`."""

    family: ClassVar[str] = ""
    rare: ClassVar[tuple[str, ...]] = ()  # fields that `name` shows only where they are not at their default

    @property
    def name(self) -> str:
        """A readable, unique name: the family and every field ("triton:tile_rows=16,..."), less the rare ones that are
        at their default."""
        shown = [f.name for f in fields(self) if f.name not in self.rare or getattr(self, f.name) != f.default]
        return f"{self.family}:" + ",".join(f"{name}={getattr(self, name)}" for name in shown)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready fields, the family included."""
        return {"family": self.family, **asdict(self)}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Variant:
        """The inverse of `to_dict`. Raises ValueError for an unknown family or field."""
        families: dict[str, type[Variant]] = {c.family: c for c in (TritonVariant, CppVariant)}
        check.instance("variant", data, dict)
        family = check.one_of("family", data.get("family"), families)
        values = {k: v for k, v in data.items() if k != "family"}
        cls = families[family]
        return cls(**check.fields(f"a {family} variant", values, (f.name for f in fields(cls))))

    @staticmethod
    def parse(name: str) -> Variant:
        """The inverse of `name`."""
        family, _, body = name.partition(":")
        data: dict[str, Any] = {"family": family}
        for item in filter(None, body.split(",")):
            key, _, value = item.partition("=")
            if value in ("True", "False"):
                data[key] = value == "True"
            else:
                data[key] = int(value) if value.lstrip("-").isdigit() else value
        return Variant.from_dict(data)


@dataclass(frozen=True, kw_only=True)
class TritonVariant(Variant):
    """A Triton kernel.

    `tile_rows`: rows of the query tile, a row being one (query, head of the group) pair.
    `tile_kv`: keys a loop iteration reads. `page_walk`: how a tile finds its blocks (see the template).
    `num_splits`: programs that share one sequence's keys, in equal parts; `split_tokens`, where not 0, makes parts of
    that many keys instead, as many as the longest sequence needs. `reduce`: who merges their partial states, a second
    "kernel" or the "last" of them to finish. `programs`, where not 0: so many programs share all key tiles of the batch
    equally (stream-K, arXiv 2301.03598), in place of one program a query tile and part.
    `head_pieces`: a head dim that is no power of two is "padded" to one, or "split" into the largest that fits and a
    padded rest (192 = 128 + 64). `dot`: matrix instructions, or multiply-adds for a row or two. `loads`: by pointers,
    or by tensor descriptors (TMA). `warp_specialize`: loads and arithmetic in warps of their own (sm_100).
    """

    family: ClassVar[str] = "triton"
    rare: ClassVar[tuple[str, ...]] = (
        "split_tokens", "reduce", "programs", "head_pieces", "dot", "loads", "warp_specialize",
    )  # fmt: skip

    tile_rows: int = 16
    tile_kv: int = 64
    page_walk: str = "any"
    num_splits: int = 1
    split_tokens: int = 0
    reduce: str = "kernel"
    programs: int = 0
    head_pieces: str = "padded"
    dot: str = "mma"
    loads: str = "pointer"
    warp_specialize: bool = False
    num_warps: int = 4
    num_stages: int = 2

    def __post_init__(self) -> None:
        check.one_of("dot", self.dot, DOTS)
        # 16 rows and 16 keys: tl.dot needs M, N, K >= 16; the pad is free, decode is memory bound
        _power_of_two("tile_rows", self.tile_rows, at_least=1 if self.dot == "fma" else 16, at_most=256)
        _power_of_two("tile_kv", self.tile_kv, at_least=16, at_most=512)
        check.one_of("page_walk", self.page_walk, PAGE_WALKS)
        check.count("num_splits", self.num_splits)
        check.count("split_tokens", self.split_tokens, at_least=0)
        if self.split_tokens % self.tile_kv:
            raise ValueError(f"split_tokens must be a multiple of tile_kv {self.tile_kv}, got {self.split_tokens}")
        if self.split_tokens and self.num_splits > 1:
            raise ValueError(f"num_splits must be 1 where split_tokens divides the keys, got {self.num_splits}")
        check.one_of("reduce", self.reduce, REDUCES)
        check.count("programs", self.programs, at_least=0)
        if self.programs and (self.splits or self.reduce == "last"):
            raise ValueError(f"programs must be 0 where keys are split or reduced otherwise, got {self.programs}")
        check.one_of("head_pieces", self.head_pieces, HEAD_PIECES)
        check.one_of("loads", self.loads, LOADS)
        if self.loads == "descriptor" and self.page_walk != "tile_in_page":
            raise ValueError(f"page_walk must be tile_in_page for descriptor loads, got {self.page_walk}")
        check.boolean("warp_specialize", self.warp_specialize)
        _power_of_two("num_warps", self.num_warps, at_least=1, at_most=16)
        check.count("num_stages", self.num_stages)

    @property
    def splits(self) -> bool:
        """Whether a sequence's keys are divided among programs."""
        return self.num_splits > 1 or self.split_tokens > 0


def all_heads(num_kv_heads: int) -> int:
    """`heads_together` for all KV heads of a token, 32 at most; 8 where there are no more, whatever their number, so
    that one variant serves them all."""
    return 8 if num_kv_heads <= 8 else 32


@dataclass(frozen=True, kw_only=True)
class CppVariant(Variant):
    """A C++ kernel for CPUs.

    `tile_kv`: keys scored at once. `streams`: places in the tile read side by side, so that more memory requests are
    in flight. `heads_together`: KV heads that one work item reads in turn, at most. `read_order`: in which order, a
    tile of one "head" after the other, or by "token": a few tokens of all heads at a time, as memory lies in NHD
    order. `prefetch_ahead`: how far ahead lines are prefetched, in tiles of one head, or by token in steps of 8 tokens
    (of `streams`, or of the tokens that a vector of scores holds, where those are more); 0: never. `prefetch_hint`:
    into which cache. `rows_together`: rows of q that a row of V of 16 or 32 bits meets at once, at most.
    `split_tokens`: keys one work item covers; longer sequences are divided and merged. `num_splits`, where not 0: so
    many items a sequence instead. `schedule`: a thread takes the next item left ("dynamic"), or a run of items of
    equal work ("balanced"). `accumulate`: by "dot" products of 16 or 8 bits where the CPU has them for the dtypes, or
    in "float32" throughout.
    """

    family: ClassVar[str] = "cpp"
    rare: ClassVar[tuple[str, ...]] = (
        "rows_together", "read_order", "prefetch_hint", "num_splits", "schedule", "accumulate",
    )  # fmt: skip

    tile_kv: int = 64
    streams: int = 4
    heads_together: int = 1
    rows_together: int = 2
    prefetch_ahead: int = 1
    read_order: str = "head"
    prefetch_hint: str = "l2"
    split_tokens: int = 2048
    num_splits: int = 0
    schedule: str = "dynamic"
    accumulate: str = "dot"

    def __post_init__(self) -> None:
        _power_of_two("tile_kv", self.tile_kv, at_least=16, at_most=256)
        _power_of_two("streams", self.streams, at_least=1, at_most=16)
        check.count("heads_together", self.heads_together)
        _power_of_two("rows_together", self.rows_together, at_least=1, at_most=8)
        check.one_of("prefetch_ahead", self.prefetch_ahead, PREFETCHES)
        check.one_of("read_order", self.read_order, READ_ORDERS)
        check.one_of("prefetch_hint", self.prefetch_hint, PREFETCH_HINTS)
        check.count("num_splits", self.num_splits, at_least=0)
        if self.num_splits > MAX_SPLITS:
            raise ValueError(f"num_splits must be at most {MAX_SPLITS}, got {self.num_splits}")
        check.one_of("schedule", self.schedule, SCHEDULES)
        check.one_of("accumulate", self.accumulate, ACCUMULATES)
        check.count("split_tokens", self.split_tokens)
        if self.split_tokens % self.tile_kv:
            raise ValueError(f"split_tokens must be a multiple of tile_kv {self.tile_kv}, got {self.split_tokens}")
