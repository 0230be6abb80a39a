"""Trials that nobody took, the same on every machine, as the lines of an export."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

from pagegen import costs, targets
from pagegen.db import codec
from pagegen.spec import AttentionSpec, CacheLayout, Clause, Device, DispatchRule, Profile, Target, Variant, Workload

MODELS = (
    "llama-3.1-8b", "llama-2-7b", "llama-2-13b", "llama-3.2-1b", "llama-3.3-70b-instruct", "qwen2-7b", "qwen2.5-0.5b",
    "qwen2.5-1.5b", "qwen2.5-32b", "qwen3-0.6b", "qwen3-30b-a3b", "qwen3-235b-a22b", "phi-4", "gemma-2b", "gemma-7b",
    "gpt2", "falcon-40b", "smollm2-1.7b", "mixtral-8x22b-v0.1", "mistral-large-instruct-2407",
)  # fmt: skip
KV_DTYPES = (None, "float8_e4m3fn")
BLOCK_SIZES = (16, 32, 64, 128)
DEVICES = (
    ("sm_80", "NVIDIA A100-SXM4-40GB"), ("sm_89", "NVIDIA GeForce RTX 4090"), ("sm_90", "NVIDIA H100 80GB HBM3"),
    ("sm_90", "NVIDIA H200"), ("sm_100", "NVIDIA B200"),
)  # fmt: skip
VARIANTS = 60  # a kernel: what three steps of the tuner's search try
SESSION_VARIANTS = 20
ROUNDS = {"search": 7, "confirm": 9}
DAYS = "2026-{:02}-{:02}T{:02}:{:02}:{:02}.000+00:00"


def profile() -> Profile:
    """Twelve batches from idle to full, contexts as skewed as chat's."""
    rng = random.Random(0)
    loads = [
        Workload(context_lens=tuple(int(rng.lognormvariate(7.3, 1.0)) + 16 for _ in range(seqs)))
        for seqs in (1, 4, 8, 16, 32, 64, 128, 256)
    ]
    for seqs, chunk in ((4, 256), (16, 512), (64, 512), (1, 2048)):
        contexts = tuple(int(rng.lognormvariate(7.3, 1.0)) + chunk for _ in range(seqs))
        loads.append(Workload(context_lens=contexts, query_lens=(chunk, *([1] * (seqs - 1)))))
    weights = (3, 5, 8, 12, 16, 20, 16, 8, 4, 4, 3, 1)
    return Profile(name="made up", workloads=tuple(loads), weights=weights, source="bench/database.py")


def specs() -> list[AttentionSpec]:
    """The models' attention with caches of two dtypes, each once."""
    found = [AttentionSpec.from_model(model, kv_dtype=kv_dtype) for model in MODELS for kv_dtype in KV_DTYPES]
    return list(dict.fromkeys(found))


def devices() -> list[Device]:
    """GPUs of four architectures, two of them of one."""
    return [costs.shipped_device(Target.parse(arch), name=name) for arch, name in DEVICES]


def variants(spec: AttentionSpec, layout: CacheLayout, device: Device) -> list[Variant]:
    """The default, its neighbours in the tuner's search space, and theirs."""
    from pagegen_autotune.space import space_around

    start = targets.default_variant(spec, layout, device.target, decode=True)
    space = space_around(start, spec, layout, device)
    near = space.neighbours(start)
    found = dict.fromkeys([start, *near])
    for one in near:
        if len(found) >= VARIANTS:
            break
        found |= dict.fromkeys(space.neighbours(one))
    return list(found)[:VARIANTS]


def _id(row: codec.Row) -> str:
    return str(row["digest"])[:16]


class Maker:
    """The lines of an export with so many trials, deterministic, shared things before what names them."""

    def __init__(self, trials: int) -> None:
        self.left = trials
        self.profile = profile()
        self._defined: set[str] = set()
        self._numbers = 0

    @property
    def measured(self) -> Workload:
        """A batch of the profile, to ask about: 32 sequences that decode."""
        return self.profile.workloads[5]

    def write(self, path: Path) -> None:
        """Writes the lines to a file."""
        with path.open("w", encoding="utf-8") as file:
            for line in self.lines():
                file.write(line + "\n")

    def lines(self) -> Iterator[str]:
        """One record each; made once."""
        yield from self._shared("profile", codec.profile_row(self.profile))
        for spec in specs():
            for size in BLOCK_SIZES:
                for device in devices():
                    if self.left <= 0:
                        return
                    yield from self._cell(spec, CacheLayout(block_size=size), device)

    def _cell(self, spec: AttentionSpec, layout: CacheLayout, device: Device) -> Iterator[str]:
        """One kernel on one device: sessions of trials over every batch, and the portfolio they ended in."""
        code = targets.code_hash(device.target)
        kernel = codec.kernel_row(spec, layout, device.target, code)
        yield from self._shared("kernel", kernel)
        yield from self._shared("device", codec.device_row(device))
        tried = variants(spec, layout, device)
        rows = [codec.variant_row(v) for v in tried]
        for row in rows:
            yield from self._shared("variant", row)
        for load in self.profile.workloads:
            workload = codec.workload_row(load)
            yield from self._shared("workload", workload)
            floor = costs.roofline_us(spec, layout, device, load)
            for purpose, rounds in ROUNDS.items():
                for first in range(0, len(rows), SESSION_VARIANTS):
                    yield from self._session(
                        kernel, device, workload, rows[first : first + SESSION_VARIANTS], floor, purpose, rounds
                    )
        yield self._portfolio(kernel, device, tried)

    def _session(
        self, kernel: codec.Row, device: Device, workload: codec.Row, rows: list[codec.Row], floor: float,
        purpose: str, rounds: int,
    ) -> Iterator[str]:  # fmt: skip
        """One run of the tuner on one batch: its environment, and a trial a variant."""
        if self.left <= 0:
            return
        self._numbers += 1
        environment = {
            "torch": "2.13.0+cu130", "python": "3.12.4", "system": "Linux 6.8.0", "threads": "64",
            "compiler": "triton 3.7.1", "runtime": "13.0",
            "tuning_session": hashlib.sha256(str(self._numbers).encode()).hexdigest()[:32], "tuning_purpose": purpose,
        }  # fmt: skip
        env = codec.environment_row(environment)
        yield from self._shared("environment", env)
        rng = random.Random(self._numbers)
        head = (
            f'{{"record": "trial", "v": 1, "kernel": "{_id(kernel)}", "device": "{_id(codec.device_row(device))}", '
            f'"environment": "{_id(env)}", "workload": "{_id(workload)}", "variant": "'
        )
        now = self._now()
        for row in rows[: self.left]:
            self.left -= 1
            level = floor * (1.15 + int(row["digest"][:4], 16) / 65536) + 6.0
            if row["digest"][4] == "0":  # one variant in sixteen fails
                fields = '"status": "compile_error", "samples_us": [], "max_error": null, "detail": "out of registers"'
            else:
                samples = ", ".join(f"{level * rng.gauss(1.0, 0.02):.4f}" for _ in range(rounds))
                fields = f'"status": "ok", "samples_us": [{samples}], "max_error": "0.0009765625", "detail": ""'
            yield f'{head}{_id(row)}", "regime": "cold", {fields}, "created_at": "{now}"}}'

    def _portfolio(self, kernel: codec.Row, device: Device, tried: list[Variant]) -> str:
        clauses = (Clause(variant=tried[len(tried) // 2], max_query_len=1), Clause(variant=tried[0]))
        rule = DispatchRule(clauses=clauses, reason="tuned on made-up traffic", evidence={"kind": "measured"})
        return json.dumps(
            {
                "record": "portfolio", "v": 1, "kernel": _id(kernel), "device": _id(codec.device_row(device)),
                "profile": _id(codec.profile_row(self.profile)), "rule": rule.to_dict(), "created_at": self._now(),
            }
        )  # fmt: skip

    def _shared(self, kind: str, row: codec.Row) -> Iterator[str]:
        if row["digest"] not in self._defined:
            self._defined.add(row["digest"])
            body = {k: v for k, v in json.loads(row["data"]).items() if k != "v"}
            yield json.dumps({"record": kind, "v": 1, "id": _id(row), **body})

    def _now(self) -> str:
        minutes, second = divmod(self._numbers * 7, 60)
        hours, minute = divmod(minutes, 60)
        days, hour = divmod(hours, 24)
        return DAYS.format(1 + days // 28 % 12, 1 + days % 28, hour, minute, second)
