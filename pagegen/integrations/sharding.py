"""Tensor parallelism: how the operators run on DTensors whose heads are sharded over a device mesh.

    register()           from now on torch.ops.pagegen.* take DTensors, each rank its own heads, no communication
    head_shard(...)      which query and KV heads a rank holds, and the spec that its calls have

Attention heads do not meet each other, so a rank attends its own with its own cache. Nothing is ever redistributed: a
cache that DTensor would gather is a copy that writes get lost in, so what does not fit raises ValueError (which DTensor
passes on as RuntimeError) naming the argument.

The rules go into the registry that `torch.distributed.tensor.experimental.register_sharding` fills, not through that
function: of keywords it counts integers alone among what decides a call, so that (torch 2.13) a call without
`return_lse` would decide the shape of a later call's lse.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pagegen import modifiers
from pagegen.ops import schemas  # noqa: F401  importing registers
from pagegen.spec import AttentionSpec, check

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._op_schema import OpSchema, OpStrategy
    from torch.distributed.tensor.placement_types import Placement

# Arguments that have a dimension of heads: whose, and which dimension. All other tensors are the same on every rank.
# A scale or zero point has heads last, [Hkv] or [num_blocks, block_size, Hkv], unless it is a single number.
_HEADS = {
    "q": ("q", 1), "out": ("q", 1), "alibi_slopes": ("q", 0), "sinks": ("q", 0),
    "k": ("kv", 1), "v": ("kv", 1), "k_cache": ("kv", 2), "v_cache": ("kv", 2),
    "k_scale": ("kv", -1), "v_scale": ("kv", -1), "k_zero": ("kv", -1), "v_zero": ("kv", -1),
}  # fmt: skip
# Keyword arguments without which a cached decision would be another one's: the placements of tensors, and what decides
# the results' shapes and the modifiers. Bounds and numbers, which change from step to step, are not among them.
_DECIDING = ("return_lse", "v_head_dim", "kv_dtype", "score_mod", "mask_mod")
_OPERATORS = (
    "paged_attention.default", "write_kv.default", "rope_write_kv.default", "update_scales.default",
    "copy_blocks.default",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HeadShard:
    """What one of `ranks` holds of an attention layer: query heads `q_heads` and KV heads `kv_heads` (slices of the
    model's), and `spec`, the layer as this rank computes it. Plans, thresholds and the tuning database go by that."""

    rank: int
    ranks: int
    spec: AttentionSpec
    q_heads: slice
    kv_heads: slice


def head_shard(spec: AttentionSpec, rank: int, ranks: int) -> HeadShard:
    """The heads of `rank` (0..ranks-1) of `ranks` that share the layer `spec`.

    With at least as many KV heads as ranks, each rank holds whole groups, the first ranks one more where they do not
    divide evenly. With fewer, each rank holds one KV head, which several ranks replicate and whose query heads they
    share. Raises ValueError where a rank would be left without a query head.
    """
    check.instance("spec", spec, AttentionSpec)
    check.integer("ranks", ranks)
    if check.integer("rank", rank, at_least=0) >= ranks:
        raise ValueError(f"rank must be in 0..{ranks - 1}, got {rank}")
    kv, group = spec.num_kv_heads, spec.group
    if ranks <= kv:
        kv_heads = _share(kv, rank, ranks)
        q_heads = slice(kv_heads.start * group, kv_heads.stop * group)
    else:
        head = min(i for i in range(kv) if rank < _share(ranks, i, kv).stop)
        holders = _share(ranks, head, kv)  # the ranks that hold this KV head
        copies = holders.stop - holders.start
        if copies > group:
            raise ValueError(
                f"ranks must be at most {kv * group} for {spec.num_q_heads} query and {kv} KV heads, so that each rank "
                f"has a query head, got {ranks}"
            )
        own = _share(group, rank - holders.start, copies)
        kv_heads = slice(head, head + 1)
        q_heads = slice(head * group + own.start, head * group + own.stop)
    local = spec.replace(num_q_heads=q_heads.stop - q_heads.start, num_kv_heads=kv_heads.stop - kv_heads.start)
    return HeadShard(rank=rank, ranks=ranks, spec=local, q_heads=q_heads, kv_heads=kv_heads)


def _share(count: int, place: int, places: int) -> slice:
    """The contiguous share of `place` among `places` of `count` things; the first ones have one more."""
    each, more = divmod(count, places)
    start = place * each + min(place, more)
    return slice(start, start + each + (place < more))


def register() -> None:
    """Teaches DTensor the operators; again is harmless. Afterwards `pagegen.paged_attention`, `write_kv`,
    `rope_write_kv`, `update_scales`, `copy_blocks` and `merge_states` take DTensors.

    On every mesh dimension q [.., Hq, ..] is Shard on its heads or Replicate; what has query heads (sinks,
    alibi_slopes) follows it, what has KV heads (k, v, caches, scales, zero points) is Shard on its heads with them;
    tables, lengths, positions and slots are Replicate. Where KV heads are fewer than ranks, caches are Shard on the
    outer mesh dimensions that have as many ranks as there are KV heads, and Replicate on the inner ones (with one KV
    head: on all). Results are placed like q. Raises RuntimeError where torch has no torch.distributed.
    """
    if not torch.distributed.is_available():
        raise RuntimeError("torch.distributed must be available to register sharding rules, got a torch without it")
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    registry = DTensor._op_dispatcher.sharding_propagator
    for name in _OPERATORS:
        operator = _operator(name)
        keywords = [a.name for a in operator._schema.arguments if a.kwarg_only]
        key = [keyword for keyword in keywords if keyword in _DECIDING or _is_tensor(operator, keyword)]
        registry.register_op_strategy(operator, _by_heads, RuntimeSchemaInfo(static_kwargkey=key or None))
    registry.register_op_strategy(_operator("paged_attention.out"), _refuse_out)
    for name in ("merge_states.default", "merge_states.list"):
        registry.register_op_strategy(_operator(name), _by_states, RuntimeSchemaInfo(needs_pytree=True))


def _operator(name: str) -> Any:
    packet, overload = name.split(".")
    return getattr(getattr(torch.ops.pagegen, packet), overload)


def _is_tensor(operator: Any, name: str) -> bool:
    declared = {argument.name: str(argument.type) for argument in operator._schema.arguments}
    return declared[name] in ("Tensor", "Optional[Tensor]")


def _refuse_out(schema: OpSchema) -> OpStrategy:
    # DTensor takes an operator with `out` to return it; this one returns the lse
    raise ValueError("out must be None where tensors are DTensors (give local tensors instead), got one")


def _by_heads(schema: OpSchema) -> OpStrategy:
    """The one way to run the operator on DTensors as they are placed."""
    given = _tensors(schema)
    mesh = schema.get_mesh_from_args()
    leads: dict[str, str] = {}
    sharded: dict[str, tuple[bool, ...]] = {}
    for name, spec in given.items():
        family, dim = _heads_of(name, spec)
        if spec.mesh != mesh:
            raise ValueError(f"{name} must be on the mesh of the other tensors, {mesh}, got {spec.mesh}")
        if family is not None and family not in leads:
            leads[family], sharded[family] = name, _sharded_on(name, spec, dim)
        _check_placements(name, spec, dim, sharded.get(family or "", (False,) * mesh.ndim), leads.get(family or ""))
    for family, lead in leads.items():
        _check_divides(lead, given[lead], sharded[family])
    results: list[tuple[bool, ...]] = []
    if schema.op._schema.name == "pagegen::paged_attention":
        _check_groups(given["k_cache"], sharded["q"], sharded["kv"])
        if any(sharded["q"]):
            _check_modifiers(schema.kwargs_schema)
        returns_lse = bool(schema.kwargs_schema.get("return_lse", False))
        results = [sharded["q"], sharded["q"] if returns_lse else (False,) * mesh.ndim]
    elif schema.op._schema.returns:
        results = [sharded["q"]]
    return _strategy(schema, mesh, results, dim=1)


def _by_states(schema: OpSchema) -> OpStrategy:
    """Merging is by query and head: states may be sharded over either, all alike."""
    mesh = schema.get_mesh_from_args()
    offset = 0 if schema.op._overloadname == "list" else 1  # of the dimension of queries
    specs = [strategy.strategies[0].output_spec for strategy in schema.args_strategy]
    for placement in specs[0].placements:
        if not (placement.is_replicate() or _is_shard(placement, offset) or _is_shard(placement, offset + 1)):
            raise ValueError(
                f"outs must be Shard({offset}) (queries), Shard({offset + 1}) (heads) or Replicate(), got {placement}"
            )
    if any(spec.placements != specs[0].placements for spec in specs):
        found = ", ".join(sorted({str(spec.placements) for spec in specs}))
        raise ValueError(f"outs and lses must all have the same placements, got {found}")
    dims = [None if p.is_replicate() else p.dim - offset for p in specs[0].placements]  # type: ignore[attr-defined]
    return _spec_of(schema, mesh, [dims, dims])


def _tensors(schema: OpSchema) -> dict[str, DTensorSpec]:
    """Where the tensors of a call are, by argument name. Raises ValueError for DTensors inside a list, which DTensor
    does not unwrap among keyword arguments."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import OpStrategy

    names = [argument.name for argument in schema.op._schema.arguments]
    given = {**dict(zip(names, schema.args_schema, strict=False)), **schema.kwargs_schema}
    if any(isinstance(tensor, DTensor) for tensor in given.get("captures") or ()):  # type: ignore[attr-defined]
        raise ValueError("captures must be plain tensors, the same on every rank, got DTensors")
    return {n: value.strategies[0].output_spec for n, value in given.items() if isinstance(value, OpStrategy)}


def _heads_of(name: str, spec: DTensorSpec) -> tuple[str | None, int]:
    """Whose heads a tensor has (None: no one's) and in which dimension."""
    family, dim = _HEADS.get(name, (None, 0))
    if dim < 0 and math.prod(spec.shape) == 1:
        return None, 0
    return family, dim % max(spec.ndim, 1)


def _sharded_on(name: str, spec: DTensorSpec, dim: int) -> tuple[bool, ...]:
    """For each mesh dimension whether a tensor's heads are sharded over it."""
    for i, placement in enumerate(spec.placements):
        if not (placement.is_replicate() or _is_shard(placement, dim)):
            raise ValueError(
                f"{name} must be Shard({dim}) (heads) or Replicate() on mesh dimension {i}, got {placement}"
            )
    return tuple(_is_shard(placement, dim) for placement in spec.placements)


def _is_shard(placement: Placement, dim: int) -> bool:
    """Whether a placement is Shard(dim) itself; a strided one, in older torch a kind of Shard, orders heads anew."""
    from torch.distributed.tensor import Shard

    return type(placement) is Shard and placement.dim == dim


def _check_placements(name: str, spec: DTensorSpec, dim: int, sharded: tuple[bool, ...], lead: str | None) -> None:
    for i, (placement, wanted) in enumerate(zip(spec.placements, sharded, strict=True)):
        fits = _is_shard(placement, dim) if wanted else placement.is_replicate()
        if not fits:
            like = f" like {lead}" if lead is not None and lead != name else ""
            expected = f"Shard({dim})" if wanted else "Replicate()"
            raise ValueError(f"{name} must be {expected} on mesh dimension {i}{like}, got {placement}")


def _check_divides(lead: str, spec: DTensorSpec, sharded: tuple[bool, ...]) -> None:
    ranks, heads = _ranks(spec.mesh, sharded), spec.shape[_HEADS[lead][1]]
    if heads % ranks:
        raise ValueError(
            f"{lead} must have a multiple of {ranks} heads to be sharded over {ranks} ranks, got {heads}: "
            "pagegen.integrations.sharding.head_shard says which heads a rank can hold instead"
        )


def _check_groups(k_cache: DTensorSpec, q: tuple[bool, ...], kv: tuple[bool, ...]) -> None:
    """Every rank must hold the KV heads of its query heads, and no other ones in between."""
    both = [i for i, sharded in enumerate(q) if sharded]
    count = sum(kv)
    outer = all(kv[i] for i in both[:count]) and not any(k and not s for k, s in zip(kv, q, strict=True))
    if outer and (count == len(both) or k_cache.shape[2] == _ranks(k_cache.mesh, kv)):
        return
    raise ValueError(
        "k_cache must be Shard(2) on every mesh dimension that q is Shard(1) on, or else on the outer ones of them, "
        f"with as many ranks as there are KV heads, got {k_cache.placements} for {k_cache.shape[2]} KV heads and q on "
        f"mesh dimensions {both}"
    )


def _ranks(mesh: DeviceMesh, sharded: tuple[bool, ...]) -> int:
    """How many ranks share the heads."""
    return math.prod(mesh.size(i) for i, wanted in enumerate(sharded) if wanted)


def _check_modifiers(options: dict[str, Any]) -> None:
    """A modifier that looks at the head would see the rank's own count. Raises ValueError for one that may."""
    for kind in ("score", "mask"):
        modifier = modifiers.find(options.get(f"{kind}_mod"), kind)
        if modifier is None:
            continue
        try:
            reads_head = "head" in {symbol.name for symbol in modifiers.trace(modifier).expression.free_symbols}
        except modifiers.Untraceable:
            reads_head = True
        if reads_head:
            raise ValueError(
                f"{kind}_mod must not depend on the head where heads are sharded (each rank counts its own from 0), "
                f"got {modifier.name}"
            )


def _strategy(schema: OpSchema, mesh: DeviceMesh, results: list[tuple[bool, ...]], dim: int) -> OpStrategy:
    return _spec_of(schema, mesh, [[dim if sharded else None for sharded in result] for result in results])


def _spec_of(schema: OpSchema, mesh: DeviceMesh, results: list[list[int | None]]) -> OpStrategy:
    """The strategy that keeps all inputs as they are; `results` names each result's sharded dimension on each mesh
    dimension (None: replicated)."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._op_schema import OpSpec, OpStrategy

    keywords = [value for value in schema.kwargs_schema.values() if isinstance(value, OpStrategy)]
    inputs = [strategy.strategies[0].output_spec for strategy in (*schema.args_strategy, *keywords)]
    outputs = [
        DTensorSpec(mesh, tuple(Replicate() if dim is None else Shard(dim) for dim in result)) for result in results
    ]
    chosen = None if not outputs else outputs[0] if len(outputs) == 1 else tuple(outputs)
    return OpStrategy([OpSpec(chosen, input_specs=inputs, redistribute_cost=[[0.0] for _ in inputs])])
