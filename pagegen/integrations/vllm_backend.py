"""The classes that vLLM makes and calls. Importing this module imports vLLM, and raises ImportError, in one line, for a
vLLM that is missing or not supported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pagegen.integrations import vllm as plugin
from pagegen.integrations.engine_layer import EngineLayer, EngineStep, kv_dtype_of, prepare_layers
from pagegen.spec import CacheLayout

if (_fault := plugin.fault()) is not None:
    raise ImportError(_fault)

from vllm import envs
from vllm.config import get_layers_from_vllm_config
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)


class PagegenBackend(AttentionBackend):
    """Decoder attention over vLLM's packed caches, [num_blocks, num_kv_heads, block_size, D + Dv] in any physical
    layout."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return plugin.NAME

    @staticmethod
    def get_impl_cls() -> type[PagegenImpl]:
        return PagegenImpl

    @staticmethod
    def get_builder_cls() -> type[PagegenMetadataBuilder]:
        return PagegenMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True


@dataclass
class PagegenMetadata(AttentionMetadata):
    """One step for all layers of a cache group. The first `num_actual_tokens` rows of a forward are tokens."""

    num_actual_tokens: int
    slot_mapping: Tensor
    step: EngineStep


class PagegenMetadataBuilder(AttentionMetadataBuilder[PagegenMetadata]):
    """Makes a step's metadata without a look at the device."""

    # lengths, tables and query starts are read on the device, and vLLM captures with the model's longest context, so a
    # graph of one batch shape serves each of its batches; batches that mix prefills run piecewise, on tighter bounds
    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._prepare()

    def _prepare(self) -> None:
        """Compiles what the group's layers will run, before vLLM captures graphs and serves."""
        from vllm.model_executor.layers.attention import Attention

        config = self.vllm_config
        layers = get_layers_from_vllm_config(config, Attention, self.layer_names).values()
        dtype = config.model_config.dtype
        specs = [
            layer.impl.layer.spec(
                dtype,
                kv_cache_dtype_str_to_dtype(layer.kv_cache_dtype, config.model_config),
                layer.head_size_v,
                scaled=True,
            )
            for layer in layers
            if isinstance(layer.impl, PagegenImpl)
        ]
        order = _order(config.cache_config.kv_cache_layout)
        prepare_layers(specs, CacheLayout(block_size=self.kv_cache_spec.block_size, order=order), self.device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> PagegenMetadata:
        """The metadata of a step. Raises NotImplementedError for a step that is not causal."""
        common = common_attn_metadata
        if common.causal is not True:
            raise NotImplementedError("pagegen's backend serves causal attention, got causal=False or a mask a request")
        seqs, tokens = common.num_reqs, common.num_actual_tokens
        one_each = common.max_query_len == 1 and tokens == seqs
        step = EngineStep(
            block_table=common.block_table_tensor[:seqs],
            seq_lens=common.seq_lens[:seqs],
            query_start_loc=None if one_each else common.query_start_loc[: seqs + 1],
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
        )
        return PagegenMetadata(tokens, common.slot_mapping, step)


def _order(layout: str | None) -> str:
    """The order inside a block of a vLLM cache layout, by its name: letters from the outermost dimension to the
    innermost (LBHNC: layer, block, head, token, content)."""
    return "HND" if layout is not None and layout.index("H") < layout.index("N") else "NHD"


class PagegenImpl(AttentionImpl[PagegenMetadata]):
    """One layer: writes keys and values into their slots, attends."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        """Raises NotImplementedError naming what the layer asks for and this backend cannot give."""
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"pagegen's backend serves decoder self-attention, got attn_type {attn_type}")
        unknown = sorted(name for name, value in others.items() if value is not None and value is not False)
        if unknown:
            raise NotImplementedError(f"pagegen's backend does not know the attention argument {', '.join(unknown)}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sliding_window, self.sinks = sliding_window, sinks
        self.layer = EngineLayer(
            num_q_heads=num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=head_size,
            scale=self.scale,
            window=sliding_window,
            logit_softcap=logits_soft_cap or None,
            # on the default device, which is the model's while vLLM makes its layers
            alibi_slopes=None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32),
            sinks=sinks,
            kv_dtype=kv_dtype_of(kv_cache_dtype),
            batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
        )

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Stores key and value [num_tokens, num_kv_heads, D]; rows past `slot_mapping` are padding, and a negative slot
        skips its token."""
        if kv_cache.numel():  # none is bound in a profiling run
            k_cache, v_cache = self._caches(kv_cache)
            self.layer.write(key, value, k_cache, v_cache, slot_mapping, layer._k_scale, layer._v_scale)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PagegenMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Fills the first `num_actual_tokens` rows of `output` [num_tokens, num_heads, Dv] from the cache, which holds
        this step's keys and values already; 0 in a profiling run, which has no metadata."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("pagegen's backend writes no quantised output, got an output scale")
        if attn_metadata is None:
            return output.fill_(0)
        tokens = attn_metadata.num_actual_tokens
        k_cache, v_cache = self._caches(kv_cache)
        self.layer.attend(
            query[:tokens], k_cache, v_cache, attn_metadata.step, output[:tokens], layer._k_scale, layer._v_scale
        )
        return output

    def _caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """K and V as [num_blocks, block_size, num_kv_heads, D] views of [num_blocks, num_kv_heads, block_size,
        D + Dv]."""
        by_token = kv_cache.transpose(1, 2)
        return by_token[..., : self.head_size], by_token[..., self.head_size :]
