"""The shipped table of model geometries (`geometries.csv`, one source a row)."""

from __future__ import annotations

import csv
import difflib
import functools
import math
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from pagegen.spec import check
from pagegen.spec.attention import AttentionSpec


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """One model's attention geometry. `head_dim` and `v_head_dim` are per query head; an MLA model has
    `latent_dim` > 0 and caches latent_dim + rope_dim columns instead."""

    name: str
    hf_id: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    attn_layers: int
    window: int | None
    window_layers: str
    logit_softcap: float | None
    sinks: bool
    latent_dim: int
    rope_dim: int
    dtype: str
    source: str

    def spec(
        self,
        *,
        layer: str | None = None,
        q_dtype: str | torch.dtype | None = None,
        kv_dtype: str | torch.dtype | None = None,
    ) -> AttentionSpec:
        """The spec of a "full" or "sliding" layer; see `AttentionSpec.from_model`."""
        if layer is not None:
            check.one_of("layer", layer, ("full", "sliding"))
        if layer == "sliding" and self.window is None:
            raise ValueError(f"layer must be 'full' for {self.name}, which has no sliding-window layer, got 'sliding'")
        if layer == "full" and self.window_layers == "all":
            raise ValueError(f"layer must be 'sliding' for {self.name}, whose layers all slide, got 'full'")
        slides = layer == "sliding" or (layer is None and self.window_layers == "all")
        latent = self.latent_dim > 0
        return AttentionSpec(
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.latent_dim + self.rope_dim if latent else self.head_dim,
            v_head_dim=self.latent_dim if latent else self.v_head_dim,
            # MLA scales by the width of the uncompressed key; corrections for stretched rope are the model's own
            scale=1.0 / math.sqrt(self.head_dim),
            q_dtype=q_dtype or self.dtype,  # type: ignore[arg-type]
            kv_dtype=kv_dtype,  # type: ignore[arg-type]
            window=self.window if slides else None,
            logit_softcap=self.logit_softcap,
            sinks=self.sinks,
            shared_kv=latent,
        )


def _row(row: dict[str, str]) -> Geometry:
    return Geometry(
        name=row["name"],
        hf_id=row["hf_id"],
        num_q_heads=int(row["num_q_heads"]),
        num_kv_heads=int(row["num_kv_heads"]),
        head_dim=int(row["head_dim"]),
        v_head_dim=int(row["v_head_dim"]),
        attn_layers=int(row["attn_layers"]),
        window=int(row["window"]) if row["window"] else None,
        window_layers=row["window_layers"],
        logit_softcap=float(row["logit_softcap"]) if row["logit_softcap"] else None,
        sinks=row["sinks"] == "yes",
        latent_dim=int(row["latent_dim"] or 0),
        rope_dim=int(row["rope_dim"] or 0),
        dtype=row["dtype"],
        source=row["source"],
    )


@functools.cache
def geometries() -> dict[str, Geometry]:
    """Every shipped geometry by name."""
    text = (Path(__file__).parent / "geometries.csv").read_text(encoding="utf-8")
    return {g.name: g for g in map(_row, csv.DictReader(text.splitlines()))}


def _normal(name: str) -> str:
    short = name.strip().lower().split("/")[-1]
    return re.sub(r"^meta-|-(hf|instruct|it|base|chat|2507)(?=-|$)", "", short)


def find_geometry(name: str) -> Geometry:
    """The geometry called `name`: a table name or a Hugging Face id, with or without an "-instruct" ending.
    Raises ValueError for an unknown name, naming near ones."""
    if not isinstance(name, str):
        raise TypeError(f"name must be a model's name, got {type(name).__name__} {name!r}")
    table = geometries()
    for geometry in table.values():
        if name.strip().lower() in (geometry.name, geometry.hf_id.lower()):
            return geometry
    for geometry in table.values():
        if _normal(name) in (_normal(geometry.name), _normal(geometry.hf_id)):
            return geometry
    near = difflib.get_close_matches(_normal(name), table, n=3, cutoff=0.4)
    hint = f"near: {', '.join(near)}" if near else f"known: {', '.join(table)}"
    raise ValueError(f"model {name!r} is not in the geometry table; {hint}. Or use AttentionSpec.from_config")
