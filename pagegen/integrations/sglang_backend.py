"""The class that SGLang makes and calls. Importing this module imports SGLang, and raises ImportError, in one line, for
an SGLang that is missing or not supported."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pagegen.integrations import sglang as plugin
from pagegen.integrations.engine_layer import EngineLayer, EngineStep, prepare_layers
from pagegen.spec import CacheLayout, dtype_name

if (_fault := plugin.fault()) is not None:
    raise ImportError(_fault)

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool

ORDERS = {"nhd": "NHD", "hnd": "HND"}  # SGLang's name of a pool's layout -> ours
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class PagegenAttnBackend(AttentionBackend):
    """Decoder attention over SGLang's token pool: extend (chunked and mixed with decode) and decode, eager or in a
    captured graph.

    SGLang's table names a token slot for each token of a request, [requests, max_context_len]; a block is a page, whose
    tokens lie together, so every page_size-th entry / page_size is a block table.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        _refuse_runner(model_runner)
        self.device = torch.device(model_runner.device)
        self.page_size = model_runner.page_size or 1
        self.max_context_len = int(model_runner.model_config.context_len)
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.forward_metadata: EngineStep | None = None
        self._layers: dict[int, EngineLayer] = {}
        self._graph_table = self._graph_lens = torch.empty(0, dtype=torch.int32, device=self.device)
        self._prepare(model_runner)

    def _prepare(self, model_runner: Any) -> None:
        """Compiles what the model's layers will run, before SGLang captures graphs and serves. Sinks are first seen in
        a call: layers that have some compile in the warm-up before the capture."""
        layers = [module for module in model_runner.model.modules() if isinstance(module, RadixAttention)]
        order = ORDERS[self.token_to_kv_pool.kv_cache_layout]
        stored = self.token_to_kv_pool.dtype
        specs = [
            self._layer(layer, None).spec(
                model_runner.dtype, stored, layer.v_head_dim, scaled=layer.k_scale is not None
            )
            for layer in layers
        ]
        prepare_layers(specs, CacheLayout(block_size=self.page_size, order=order), self.device)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """The metadata of an eager forward, from what the host knows. Raises NotImplementedError for speculative
        modes."""
        _refuse_batch(forward_batch)
        longest = max(1, int(forward_batch.seq_lens_cpu.max()))
        starts, queries = None, 1
        if not forward_batch.forward_mode.is_decode_or_idle():
            starts = torch.nn.functional.pad(forward_batch.extend_seq_lens.cumsum(0), (1, 0)).to(torch.int32)
            queries = max(forward_batch.extend_seq_lens_cpu)
        self.forward_metadata = EngineStep(
            block_table=self._table(forward_batch.req_pool_indices, longest),
            seq_lens=forward_batch.seq_lens.to(torch.int32),
            query_start_loc=starts,
            max_query_len=queries,
            max_seq_len=longest,
        )

    def _table(self, requests: Tensor, longest: int) -> Tensor:
        """The block table int32 [num_seqs, pages of `longest` tokens] of rows of SGLang's table."""
        table: Tensor = self.req_to_token[:, : longest : self.page_size][requests] // self.page_size
        return table

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """The buffers whose addresses captured decode graphs hold."""
        pages = -(-self.max_context_len // self.page_size)
        self._graph_table = torch.zeros(max_bs, pages, dtype=torch.int32, device=self.device)
        self._graph_lens = torch.zeros(max_bs, dtype=torch.int32, device=self.device)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fills the buffers of a decode graph, for its capture or a replay. It is captured for the longest context, so
        that every batch of its size fits. Raises NotImplementedError for graphs of other modes."""
        _refuse_batch(forward_batch)
        if not forward_batch.forward_mode.is_decode_or_idle():
            raise NotImplementedError(f"pagegen's backend captures decode graphs, got {forward_batch.forward_mode}")
        seqs, known = forward_batch.batch_size, forward_batch.seq_lens_cpu
        longest = self.max_context_len if known is None else min(self.max_context_len, max(1, int(known.max())))
        table = self._table(forward_batch.req_pool_indices[:seqs], longest)
        self._graph_table[:seqs, : table.shape[1]] = table
        self._graph_lens[:seqs] = forward_batch.seq_lens[:seqs]
        self.forward_metadata = EngineStep(
            block_table=self._graph_table[:seqs],
            seq_lens=self._graph_lens[:seqs],
            query_start_loc=None,
            max_query_len=1,
            max_seq_len=self.max_context_len,
        )

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **others: Any
    ) -> Tensor:
        """Attention [num_tokens, num_heads * Dv] of new tokens, whose keys and values are stored first."""
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, **others)

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **others: Any
    ) -> Tensor:
        """As `forward_extend`, of one token a request."""
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, **others)

    def _forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        unknown = sorted(name for name, value in others.items() if value is not None)
        if unknown:
            raise NotImplementedError(f"pagegen's backend does not know the attention argument {', '.join(unknown)}")
        if self.forward_metadata is None:
            raise RuntimeError("init_forward_metadata must be called before a forward, got none")
        ours = self._layer(layer, sinks)
        if save_kv_cache and k is not None and v is not None:
            self._store(layer, forward_batch, k, v)
        k_cache, v_cache = map(self._blocks, self.token_to_kv_pool.get_kv_buffer(layer.layer_id))
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_empty(len(q), layer.tp_q_head_num, layer.v_head_dim)
        ours.attend(q, k_cache, v_cache, self.forward_metadata, out, layer.k_scale, layer.v_scale)
        return out.flatten(1)

    def _store(self, layer: Any, forward_batch: Any, k: Tensor, v: Tensor) -> None:
        """By the pool's own function, which knows the pool's memory. It divides by the scales in place, so that it gets
        copies of what the model may still read."""
        place = KVWriteLoc.for_batch(forward_batch)
        if layer.k_scale is None:
            self.token_to_kv_pool.set_kv_buffer(layer, place, k, v)
        else:
            self.token_to_kv_pool.set_kv_buffer(layer, place, k.clone(), v.clone(), layer.k_scale, layer.v_scale)

    def _blocks(self, buffer: Tensor) -> Tensor:
        """[num_pages, page_size, num_heads, D] of a pool's buffer: [slots, num_heads, D], or [num_pages, num_heads,
        page_size, D]."""
        if buffer.dim() == 4:
            return buffer.transpose(1, 2)
        pages = buffer.shape[0] // self.page_size
        return buffer[: pages * self.page_size].view(pages, self.page_size, *buffer.shape[1:])

    def _layer(self, layer: Any, sinks: Tensor | None) -> EngineLayer:
        known = self._layers.get(layer.layer_id)
        if known is None or known.sinks is not sinks:
            known = self._layers[layer.layer_id] = _engine_layer(layer, sinks, self.token_to_kv_pool.dtype)
        return known


def _engine_layer(layer: Any, sinks: Tensor | None, stored: torch.dtype) -> EngineLayer:
    """What an SGLang layer computes. Raises NotImplementedError naming what this backend lacks."""
    fault = None
    if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
        fault = f"{'cross' if layer.is_cross_attention else layer.attn_type.value} attention"
    elif layer.use_irope:
        fault = "chunked local attention (use_irope)"
    elif layer.xai_temperature_len > 0:
        fault = f"a temperature by position (xai_temperature_len={layer.xai_temperature_len})"
    elif layer.logit_cap and layer.logit_capping_method != "tanh":
        fault = f"logit_capping_method {layer.logit_capping_method}"
    if fault is not None:
        raise NotImplementedError(
            f"pagegen's backend serves causal decoder attention, layer {layer.layer_id} has {fault}"
        )
    window = layer.sliding_window_size
    return EngineLayer(
        num_q_heads=layer.tp_q_head_num,
        num_kv_heads=layer.tp_k_head_num,
        head_dim=layer.qk_head_dim,
        scale=float(layer.scaling),
        window=None if window is None or window < 0 else window + 1,  # SGLang counts the keys before the query's own
        logit_softcap=layer.logit_cap or None,
        sinks=sinks,
        kv_dtype=dtype_name(stored) if stored in FLOAT8 else None,
    )


def _refuse_runner(model_runner: Any) -> None:
    """Raises NotImplementedError for a pool that this backend cannot read, or a mode of attention that it lacks."""
    pool = model_runner.token_to_kv_pool
    if model_runner.use_mla_backend:
        raise NotImplementedError("pagegen's backend has no MLA, got a model that uses it")
    if not isinstance(pool, MHATokenToKVPool) or pool.is_quantized_kv_cache:
        hint = (
            "; --disable-hybrid-swa-memory gives sliding windows the usual pool" if "SWA" in type(pool).__name__ else ""
        )
        raise NotImplementedError(f"pagegen's backend reads MHATokenToKVPool, got {type(pool).__name__}{hint}")
    if pool.kv_cache_layout not in ORDERS:
        raise NotImplementedError(f"pagegen's backend reads pools in {', '.join(ORDERS)}, got {pool.kv_cache_layout}")


def _refuse_batch(forward_batch: Any) -> None:
    mode = forward_batch.forward_mode
    if forward_batch.spec_info is not None or mode.is_target_verify() or mode.is_draft_extend_v2():
        raise NotImplementedError(f"pagegen's backend has no speculative decoding, got {mode}")
    if forward_batch.encoder_lens is not None:
        raise NotImplementedError("pagegen's backend has no cross attention, got encoder_lens")
