"""Hugging Face transformers on paged attention.

paged = enable(model)
model.generate(ids, past_key_values=paged.cache())      # eager, as transformers does it
paged.generator().generate(prompts, max_new_tokens=64)  # compiled, ragged
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pagegen.integrations.hf_attention import NAME, paged_attention_forward, paged_mask
from pagegen.integrations.hf_layers import layer_specs
from pagegen.ops import prepare
from pagegen.ops.plans import target_of
from pagegen.spec import AttentionSpec, CacheLayout, DispatchRule, Variant, check

if TYPE_CHECKING:
    from pagegen.db import Database
    from pagegen.integrations.generation import PagedGenerator
    from pagegen.integrations.hf_cache import PagedCache
    from pagegen.serving import Preempt

SUPPORTED = ((5, 5), (6, 0))  # from, below
# Tokens that the block pool holds unless `num_blocks` says otherwise: 16 conversations of 1024.
_DEFAULT_TOKENS = 16_384


@dataclass(frozen=True, kw_only=True)
class PagedModel:
    """A transformers model that attends over paged blocks.

    `specs` and `rules` have one entry a layer: what it computes and which variants serve it (None: `variant` was
    named, or no generated kernel serves the layer and it computes densely).
    """

    model: Any = field(repr=False)
    specs: tuple[AttentionSpec, ...]
    rules: tuple[DispatchRule | None, ...]
    layout: CacheLayout
    num_blocks: int
    variant: str | None
    _previous: str

    def cache(self) -> PagedCache:
        """A new, empty cache for `model.generate(..., past_key_values=cache)`."""
        from pagegen.integrations.hf_cache import PagedCache

        return PagedCache(self.specs, self._store(prefix_caching=False), self.variant)

    def generator(
        self,
        *,
        compile: bool = True,
        backend: Any = "inductor",
        max_num_seqs: int = 256,
        max_batch_tokens: int = 2048,
        preempt: Preempt = "recompute",
        num_host_blocks: int = 0,
    ) -> PagedGenerator:
        """A greedy generator over ragged batches; see `PagedGenerator`. `num_host_blocks` of host memory take what
        `preempt="swap"` moves out."""
        from pagegen.integrations.generation import PagedGenerator

        return PagedGenerator(
            self.model,
            self.specs,
            self._store(prefix_caching=True, num_host_blocks=num_host_blocks),
            variant=self.variant,
            compile=compile,
            backend=backend,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_batch_tokens,
            preempt=preempt,
        )

    def disable(self) -> None:
        """Gives the model back the attention that it had. Paged caches of it are refused from then on."""
        self.model.set_attn_implementation(self._previous)

    def _store(self, *, prefix_caching: bool, num_host_blocks: int = 0) -> Any:
        from pagegen.cache import PagedKVCache

        spec = self.specs[0]
        return PagedKVCache(
            len(self.specs),
            self.num_blocks,
            self.layout,
            spec.num_kv_heads,
            spec.head_dim,
            spec.v_head_dim,
            dtype=spec.kv_dtype,
            device=self.model.device,
            prefix_caching=prefix_caching,
            num_host_blocks=num_host_blocks,
        )


def enable(
    model: Any,
    *,
    block_size: int = 16,
    num_blocks: int | None = None,
    order: str = "NHD",
    variant: Variant | str | None = None,
    db: Database | str | None = None,
) -> PagedModel:
    """Makes a transformers decoder attend over paged blocks.

    Each cache holds `num_blocks` blocks of `block_size` tokens in every layer (default: 16 384 tokens). The
    kernels are chosen and compiled now, from `db` (default: the default database), unless `variant` names one.
    Raises ImportError for a transformers that is missing or not supported, and ValueError naming the layer and
    the feature of a model that paged attention cannot express.
    """
    check_version()
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers model, got {type(model).__name__}")
    if model.config._attn_implementation == NAME:
        raise ValueError(f"{type(model).__name__} is already enabled: use that handle, or disable() it first")
    layout = CacheLayout(block_size=block_size, order=order)
    blocks = layout.blocks_for(_DEFAULT_TOKENS) if num_blocks is None else check.integer("num_blocks", num_blocks)
    specs = layer_specs(model)
    name = Variant.parse(variant).name if isinstance(variant, str) else variant.name if variant else None
    rules: dict[AttentionSpec, DispatchRule | None] = {}
    if name is None:
        rules = {spec: prepare(spec, layout, target_of(model.device), db) for spec in dict.fromkeys(specs)}
    AttentionInterface.register(NAME, paged_attention_forward)
    AttentionMaskInterface.register(NAME, paged_mask)
    previous = str(model.config._attn_implementation)
    model.set_attn_implementation(NAME)
    for module in dict.fromkeys([model, model.base_model]):
        if _pass_cache not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_pass_cache, with_kwargs=True)
    return PagedModel(
        model=model,
        specs=specs,
        rules=tuple(map(rules.get, specs)),
        layout=layout,
        num_blocks=blocks,
        variant=name,
        _previous=previous,
    )


def _pass_cache(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Hands the paged cache to the attention function: a model passes keyword arguments that it does not know
    down to it, and its own cache argument not. The hook outlives `disable`, to refuse what would then be wrong."""
    from pagegen.integrations.hf_cache import PagedCacheBase

    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    if not isinstance(cache, PagedCacheBase):
        return args, kwargs
    if module.config._attn_implementation != NAME:
        raise ValueError(
            f"a paged cache needs paged attention, got {module.config._attn_implementation}: enable the model again"
        )
    cache.entered = True
    return args, {**kwargs, NAME: cache}


def check_version() -> None:
    """Raises ImportError for a transformers that is missing or not supported."""
    lowest, limit = (".".join(map(str, bound)) for bound in SUPPORTED)
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"transformers is not installed: pip install 'transformers>={lowest},<{limit}'") from error
    found = tuple(int(n) for n in re.findall(r"\d+", transformers.__version__)[:2])
    if not SUPPORTED[0] <= found < SUPPORTED[1]:
        raise ImportError(f"transformers {transformers.__version__} is not supported: install >={lowest},<{limit}")
