"""What is tuned and measured: two models' attention, with caches of 16 and of 8 bits."""

from __future__ import annotations

import functools

from pagegen_autotune import load_profile

from pagegen.spec import AttentionSpec, Profile, Workload

PROFILE = "azure-conversation"  # a chat service's
BLOCK_SIZES = (16, 32, 64, 128)
DRY_RUN_BLOCK_SIZES = (16, 32)
DRY_RUN_PROFILE = Profile(
    name="dry run",
    weights=(0.5, 0.5),
    workloads=(Workload(context_lens=(40, 3)), Workload(context_lens=(9, 17), query_lens=(9, 1))),
)


def specs(dry_run: bool) -> dict[str, AttentionSpec]:
    """By name, the one that matters most first; small ones for a dry run."""
    if dry_run:
        return {"small bf16": AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=32)}
    return {
        f"{model} {short}": AttentionSpec.from_model(model, kv_dtype=dtype)
        for model in ("llama-3.1-8b", "smollm2-135m")
        for short, dtype in (("bf16", None), ("fp8", "float8_e4m3fn"))
    }


def block_sizes(dry_run: bool) -> tuple[int, ...]:
    return DRY_RUN_BLOCK_SIZES if dry_run else BLOCK_SIZES


@functools.cache
def profile(dry_run: bool) -> Profile:
    return DRY_RUN_PROFILE if dry_run else load_profile(PROFILE)
