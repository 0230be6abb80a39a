"""What the random sweep runs: a case is (spec, layout, variant, batch), all of it drawn from one integer.

Cases that follow each other share a kernel, since a kernel takes seconds to compile and a batch milliseconds. Features
are drawn independently of each other and often, so that most cases combine several; sizes are small.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import sweep_modifiers
from batches import ORDERS, Batch, make_batch

from pagegen.costs import rules
from pagegen.spec import AttentionSpec, CacheLayout, CppVariant, Device, Target, TritonVariant, Variant, dtype_name
from pagegen.targets import cpp_build

CASES_A_KERNEL = {"cpu": 10, "interpreter": 2}
GROUPS = (1, 1, 2, 2, 3, 4, 4, 5, 6, 7, 8, 8, 9, 12, 16, 20, 29, 48, 71, 128)
HEAD_DIMS = (8, 16, 32, 33, 40, 56, 64, 64, 64, 75, 80, 96, 100, 112, 128, 128, 160, 192, 224, 256, 576)
BLOCK_SIZES = (1, 2, 3, 4, 8, 8, 16, 16, 16, 16, 24, 32, 32, 48, 64, 64, 100, 128, 256, 272, 528, 544, 784, 1056, 2048)
# What a case may cost. CPU: multiply-adds of the reference, elements of the caches. Interpreter: see `_interpreted`.
CPU_WORK, CPU_ELEMENTS = 40_000_000, 6_000_000
INTERPRETER_WORK = 150
MACHINES = {
    "native": cpp_build.NATIVE,
    "no-vbmi": (*cpp_build.NATIVE, "-mno-avx512vbmi"),
    "avx2": ("-march=haswell",),
    "portable": ("-march=x86-64",),
}
SMALLEST = [(5, 1)]  # a batch that every kernel can afford
INTERPRETER = Device(name="Triton interpreter", target=Target("interpreter"))


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """What is compiled. `machine` names the instruction set of a C++ kernel; `form` are fields of a Triton kernel's
    Form that a GPU would have: bits of float8 are decoded, offsets have 64 bits."""

    target: str
    spec: AttentionSpec
    order: str
    block_size: int
    variant: Variant
    machine: str = "native"
    form: tuple[tuple[str, bool], ...] = ()

    @property
    def layout(self) -> CacheLayout:
        return CacheLayout(block_size=self.block_size, order=ORDERS[self.order])

    def __str__(self) -> str:
        plain = AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=1).to_dict()
        spec = self.spec.to_dict()
        always = ("num_q_heads", "num_kv_heads", "head_dim", "v_head_dim", "q_dtype", "kv_dtype", "scale")
        fields = ", ".join(f"{k}={v}" for k, v in spec.items() if k in always or v != plain[k])
        form = "".join(f" {name}={value}" for name, value in self.form)
        return f"{fields}; blocks of {self.block_size} {self.order}; {self.variant.name}; {self.machine}{form}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One batch of a kernel. `number` is all that it is drawn from."""

    number: int
    kernel: Kernel
    sequences: tuple[tuple[int, int], ...]
    tree: bool
    magnitude: float
    padded_rows: int

    def batch(self) -> Batch:
        spec = self.kernel.spec
        found = (sweep_modifiers.find(spec.score_mod, "score"), sweep_modifiers.find(spec.mask_mod, "mask"))
        return make_batch(
            spec,
            list(self.sequences),
            block_size=self.kernel.block_size,
            order=self.kernel.order,
            seed=self.number,
            magnitude=self.magnitude,
            padded_rows=self.padded_rows,
            tree=self.tree,
            captures=tuple(tensor for modifier in found if modifier for tensor in modifier.tensors.values()),
        )

    def __str__(self) -> str:
        tree = ", tree mask" if self.tree else ""
        batch = (
            f"(tokens, queries) {list(self.sequences)}{tree}, magnitude {self.magnitude:g}, {self.padded_rows} padded"
        )
        return f"{batch}; {self.kernel}"


def kernel_number(target: str, number: int) -> int:
    """Which kernel a case belongs to."""
    return number // CASES_A_KERNEL[target]


def draw(target: str, number: int) -> Case:
    """The case of a target ("cpu", "interpreter") with this number."""
    kernel = draw_kernel(target, kernel_number(target, number))
    random = Random(f"{target} batch {number}")
    kind = random.choices(["decode", "ragged", "tree"], [9, 8, 3])[0]
    return Case(
        number=number,
        kernel=kernel,
        sequences=tuple(_sequences(random, kernel, kind)),
        tree=kind == "tree",
        magnitude=_magnitude(random, kernel.spec),
        padded_rows=random.choice([0, 3]),
    )


def draw_kernel(target: str, number: int) -> Kernel:
    """The kernel of a target with this number."""
    random = Random(f"{target} kernel {number}")
    kernel = _kernel(random, target)
    while not _affordable(kernel, SMALLEST):
        kernel = _kernel(random, target)
    return kernel


def _kernel(random: Random, target: str) -> Kernel:
    order, block_size = random.choice(list(ORDERS)), random.choice(BLOCK_SIZES)
    spec = _spec(random, target, block_size)
    layout = CacheLayout(block_size=block_size, order=ORDERS[order])
    shared: dict[str, Any] = {"target": target, "spec": spec, "order": order, "block_size": block_size}
    if target == "cpu":
        machine = random.choices(list(MACHINES), [6, 1, 2, 1])[0]
        return Kernel(**shared, variant=_cpp_variant(random), machine=machine)
    # False is what there is on a GPU only
    form = tuple((name, value) for name, value in (("native_float8", False), ("wide", True)) if random.random() < 0.4)
    return Kernel(**shared, variant=_triton_variant(random, spec, layout), form=form)


def _spec(random: Random, target: str, block_size: int) -> AttentionSpec:
    def often(chance: float) -> bool:
        return random.random() < chance

    q_dtype = random.choice(["bfloat16", "bfloat16", "float16", "float32"])
    narrow = ["float8_e4m3fn", "float8_e5m2", "int8", "int4", "int4"]
    kv_dtype = random.choices([q_dtype, random.choice(["bfloat16", "float16", "float32"]), random.choice(narrow)],
                              [9, 1, 10])[0]  # fmt: skip
    plain = kv_dtype not in narrow
    granularity = "none" if plain and often(0.95) else random.choice(["none", "tensor", "head", "token_head"])
    group = random.choice(GROUPS) if often(0.85) else random.randint(1, 128)
    kv_heads = random.choice([1, 2, 2, 3] if target == "interpreter" else [1, 2, 2, 3, 5, 8, 11])
    if group > 12:
        kv_heads = min(kv_heads, 2)
    head_dim = random.choice(HEAD_DIMS) if often(0.85) else random.randint(8, 260)
    v_head_dim = head_dim if often(0.7) else random.choice([random.choice(HEAD_DIMS), max(8, head_dim * 2 // 3)])
    shared_kv = often(0.15)
    if shared_kv:
        v_head_dim = min(head_dim, v_head_dim)
    if kv_dtype == "int4":
        head_dim, v_head_dim = head_dim // 2 * 2, v_head_dim // 2 * 2
    causal = often(0.75)
    mask_mod = sweep_modifiers.draw_mask(random) if often(0.3) else None
    if mask_mod in sweep_modifiers.AHEAD and often(0.85):
        causal = False
    score_mod = sweep_modifiers.draw_score(random) if often(0.2) else None
    for name, kind in ((score_mod, "score"), (mask_mod, "mask")):
        sweep_modifiers.find(name, kind)  # registered from now on
    windows = [1, 2, 7, 16, 33, 64, 150, block_size, block_size + 1, max(1, block_size - 1)]
    return AttentionSpec(
        num_q_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        q_dtype=q_dtype,  # type: ignore[arg-type]  # by name
        kv_dtype=kv_dtype,  # type: ignore[arg-type]
        scale=None if often(0.75) else random.choice([0.3, 0.02, -0.1, 0.0]),  # type: ignore[arg-type]
        causal=causal,
        window=random.choice(windows) if often(0.3) else None,
        logit_softcap=random.choice([0.5, 5.0, 30.0, 50.0]) if often(0.25) else None,
        alibi=often(0.2),
        sinks=often(0.3),
        kv_scale_granularity=granularity,
        kv_zero_points=kv_dtype in ("int8", "int4") and often(0.4),
        shared_kv=shared_kv,
        score_mod=score_mod,
        mask_mod=mask_mod,
        batch_invariant=often(0.2),
    )


def _cpp_variant(random: Random) -> CppVariant:
    tile_kv = random.choice([16, 32, 64, 64, 128, 256])
    return CppVariant(
        tile_kv=tile_kv,
        streams=random.choice([1, 2, 4, 4, 8, 16]),
        prefetch_ahead=random.choice([0, 1, 2, 4, 8]),
        split_tokens=tile_kv * random.choice([1, 2, 3, 5, 32]),
        heads_together=random.choice([1, 2, 3, 8, 32]),
        rows_together=random.choice([1, 2, 4, 8]),
        num_splits=random.choice([0, 0, 1, 2, 5]),
        schedule=random.choice(["dynamic", "balanced"]),
        read_order=random.choice(["head", "token"]),
        prefetch_hint=random.choice(["l2", "l1"]),
        accumulate=random.choice(["dot", "dot", "dot", "float32"]),
    )


def _triton_variant(random: Random, spec: AttentionSpec, layout: CacheLayout) -> TritonVariant:
    while True:
        tile_kv = random.choice([16, 16, 16, 32, 32, 64, 64, 128, 256, 512])
        walks = ["any"]
        walks += ["tile_in_page"] * 3 * (layout.block_size % tile_kv == 0)
        walks += ["pages_in_tile"] * 3 * (tile_kv % layout.block_size == 0)
        walk = random.choice(walks)
        dot = random.choice(["mma", "mma", "fma"])
        fields: dict[str, Any] = {}
        schedule = random.choice(["one pass", "splits", "split tokens", "shares"])
        if schedule == "splits":
            fields = {"num_splits": random.choice([2, 3, 5, 17])}
        elif schedule == "split tokens":
            fields = {"split_tokens": tile_kv * random.choice([1, 2, 3])}
        elif schedule == "shares":
            fields = {"programs": random.choice([1, 2, 3, 7, 16])}
        if schedule.startswith("split"):
            fields["reduce"] = random.choice(["kernel", "last"])
        variant = TritonVariant(
            tile_rows=random.choice([1, 2, 4, 8, 16] if dot == "fma" else [16, 16, 16, 32, 64, 128, 256]),
            tile_kv=tile_kv,
            page_walk=walk,
            head_pieces=random.choice(["padded", "split"]),
            dot=dot,
            loads=random.choice(["pointer", "descriptor"]) if walk == "tile_in_page" else "pointer",
            num_warps=random.choice([1, 2, 4, 8]),
            num_stages=random.choice([1, 2, 3]),
            **fields,
        )
        if not rules.legal(spec, layout, variant, INTERPRETER):
            return variant


def _magnitude(random: Random, spec: AttentionSpec) -> float:
    """The standard deviation of q and k. Enormous scores only where a cap makes them harmless and the dtypes hold
    them: elsewhere float32 itself is as inexact as such scores are large."""
    roomy = all(dtype_name(dtype) in ("float32", "bfloat16") for dtype in (spec.q_dtype, spec.kv_dtype))
    if spec.logit_softcap is not None and roomy and random.random() < 0.3:
        return 1e14
    return random.choice([0.05, 1.0, 1.0, 1.0, 2.0])


def _sequences(random: Random, kernel: Kernel, kind: str) -> list[tuple[int, int]]:
    """(tokens, queries) of up to 7 sequences, as many as a case may cost; one at least."""
    wanted = random.choice([1, 2, 3, 4, 5, 7])
    sequences: list[tuple[int, int]] = []
    for _ in range(4 * wanted):
        length = _length(random, kernel)
        queries = 1 if kind == "decode" else _queries(random, kernel, length)
        if _affordable(kernel, [*sequences, (length, queries)]):
            sequences.append((length, queries))
        if len(sequences) == wanted:
            break
    return sequences or SMALLEST


def _length(random: Random, kernel: Kernel) -> int:
    """A length, mostly one next to where something begins or ends."""
    variant, spec = kernel.variant, kernel.spec
    assert isinstance(variant, (CppVariant, TritonVariant))
    most = 900 if kernel.target == "cpu" else 140
    if random.random() < 0.1:
        return random.choice([0, 1])
    if random.random() < 0.25:
        return random.randint(1, most)
    edge = random.choice(
        [kernel.block_size, variant.tile_kv, variant.split_tokens or variant.tile_kv, spec.window or 1]
    )
    edge *= random.choice([1, 1, 2, 3])
    if spec.window and random.random() < 0.5:
        edge += spec.window
    return max(0, edge + random.choice([-1, 0, 1]))


def _queries(random: Random, kernel: Kernel, length: int) -> int:
    few = 20 if kernel.target == "cpu" else 6
    some = random.randint(0, few)
    return random.choice([1, 1, 0, some, some, min(length, few), min(length, 8 * few), length + random.randint(1, 4)])


def _affordable(kernel: Kernel, sequences: list[tuple[int, int]]) -> bool:
    if kernel.target == "interpreter":
        return _interpreted(kernel, sequences) <= INTERPRETER_WORK
    spec = kernel.spec
    columns = spec.head_dim + spec.v_head_dim
    work = sum(max(queries, 1) * max(length, 1) for length, queries in sequences) * spec.num_q_heads * columns
    blocks = sum(kernel.layout.blocks_for(length) for length, _ in sequences) + 3
    return work <= CPU_WORK and blocks * kernel.block_size * spec.num_kv_heads * columns <= CPU_ELEMENTS


def _interpreted(kernel: Kernel, sequences: list[tuple[int, int]]) -> float:
    """What the interpreter's time is proportional to (2 to 8 ms each): programs and their loop iterations."""
    variant, spec = kernel.variant, kernel.spec
    assert isinstance(variant, TritonVariant)
    heads = spec.num_kv_heads * -(-spec.group // variant.tile_rows)
    tile_queries = max(1, variant.tile_rows // spec.group)
    rows = min(variant.tile_rows, tile_queries * spec.group)
    splits = 1
    if variant.splits:
        longest = max(length for length, _ in sequences)
        splits = -(-longest // variant.split_tokens) if variant.split_tokens else variant.num_splits
    queries = sum(n for _, n in sequences)
    cost = float((queries // tile_queries + len(sequences)) * heads * splits)
    # a tile of 2^17 products (or fewer) takes as long as all the other work on it
    heavy = variant.tile_rows * variant.tile_kv * (spec.head_dim + spec.v_head_dim) / 2**17
    for length, n in sequences:
        cost += -(-n // tile_queries) * heads * -(-length // variant.tile_kv) * max(1.0, heavy)
    if variant.reduce == "kernel" and variant.splits:
        cost += queries * spec.num_q_heads
    if variant.programs:
        cost += 0.5 * (queries // tile_queries + len(sequences)) * heads * rows
    elements = kernel.layout.blocks_for(sum(n for n, _ in sequences)) * kernel.block_size * spec.num_kv_heads
    return cost + elements * (spec.head_dim + spec.v_head_dim) / 20_000
