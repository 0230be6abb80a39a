"""What tests/integration/test_vllm.py runs in a Python that has vLLM: pagegen's backend through vLLM's own classes.

`python vllm_checks.py` runs every function named check_* and prints one JSON document: the versions, and for each
check "ok" or what went wrong.
"""

from __future__ import annotations

import json
import sys
import traceback
from types import ModuleType, SimpleNamespace

import torch
import vllm
from torch import Tensor
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from pagegen.integrations import vllm as plugin

HEADS, KV_HEADS, DIM, BLOCK, BLOCKS = 6, 2, 64, 16, 24
SCALE = 0.11
LENGTHS, QUERIES = (21, 40, 17, 64), (5, 1, 17, 3)  # mixed: a chunk, a decode, a prefill, a chunk


def backend():
    plugin.register()
    return AttentionBackendEnum[plugin.NAME].get_class()


def config_of() -> VllmConfig:
    return VllmConfig(device_config=DeviceConfig(device="cpu"))


def impl_of(**options):
    with set_current_vllm_config(config_of()):
        return backend().get_impl_cls()(HEADS, DIM, SCALE, options.pop("num_kv_heads", KV_HEADS), **options)


def layer_of(k_scale=1.0, v_scale=1.0):
    return SimpleNamespace(_k_scale=torch.tensor(k_scale), _v_scale=torch.tensor(v_scale))


def cache_of(layout: str, dtype=torch.float32, width=2 * DIM) -> Tensor:
    """One layer's cache as vLLM's runner makes it: logical [blocks, heads, block, width] over the layout's order, the
    second of three layers. Poisoned: what nobody wrote must not count."""
    sizes = (3, BLOCKS, KV_HEADS, BLOCK, width)
    order = KVCacheLayout[layout].stride_order
    memory = torch.zeros([sizes[i] for i in order], dtype=dtype)
    memory.view(torch.uint8).fill_(0xFF)  # NaN in every float, float8 included
    return memory.permute([order.index(i) for i in range(5)])[1]


def builder_of(dtype=torch.float32):
    """The metadata builder of a group without layers: nothing to prepare."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=DIM, dtype=dtype)
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=dtype),
        cache_config=SimpleNamespace(kv_cache_layout="LBNHC"),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    return backend().get_builder_cls()(spec, [], config, torch.device("cpu"))


class Batch:
    """Random sequences, where their tokens lie, and what attention over them is, densely and in float64."""

    def __init__(self, lengths=LENGTHS, queries=QUERIES, dtype=torch.float32, padded=0, v_dim=DIM):
        generator = torch.Generator().manual_seed(7)
        normal = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
        self.lengths, self.queries, self.padded = lengths, queries, padded
        self.k = [normal(n, KV_HEADS, DIM) for n in lengths]
        self.v = [normal(n, KV_HEADS, v_dim) for n in lengths]
        self.q = normal(sum(queries) + padded, HEADS, DIM)
        width = max(-(-n // BLOCK) for n in lengths) + 1
        free = iter(torch.randperm(BLOCKS, generator=generator).tolist())
        self.table = torch.full((len(lengths), width), 10**6, dtype=torch.int32)  # never to be read
        for s, n in enumerate(lengths):
            used = -(-n // BLOCK)
            self.table[s, :used] = torch.tensor([next(free) for _ in range(used)])
        self.starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)

    def slots(self, s: int) -> Tensor:
        places = torch.arange(self.lengths[s])
        return self.table[s].long()[places // BLOCK] * BLOCK + places % BLOCK

    def common(self, **changes) -> CommonAttentionMetadata:
        new = torch.cat([self.slots(s)[-n:] for s, n in enumerate(self.queries)])
        fields = {
            "query_start_loc": self.starts, "query_start_loc_cpu": self.starts,
            "seq_lens": torch.tensor(self.lengths, dtype=torch.int32), "num_reqs": len(self.lengths),
            "num_actual_tokens": sum(self.queries), "max_query_len": max(self.queries),
            "max_seq_len": max(self.lengths), "block_table_tensor": self.table,
            "slot_mapping": torch.cat([new, torch.full((self.padded,), -1)]),
        }  # fmt: skip
        return CommonAttentionMetadata(**{**fields, **changes})

    def run(self, impl, cache: Tensor, layer=None, common=None) -> Tensor:
        """Writes earlier tokens, then this step's, then attends, as `Attention.forward` does."""
        layer, common = layer or layer_of(), common or self.common()
        for s, new in enumerate(self.queries):
            old = self.lengths[s] - new
            impl.do_kv_cache_update(layer, self.k[s][:old], self.v[s][:old], cache, self.slots(s)[:old])
        key, value = (torch.cat([x[s][-n:] for s, n in enumerate(self.queries)]) for x in (self.k, self.v))
        pad = [0, 0] * 2 + [0, self.padded]
        key, value = (torch.nn.functional.pad(x, pad, value=float("nan")) for x in (key, value))
        impl.do_kv_cache_update(layer, key, value, cache, common.slot_mapping)
        out = torch.full((len(self.q), HEADS, value.shape[2]), 7.0, dtype=self.q.dtype)
        metadata = builder_of().build(0, common)
        assert impl.forward(layer, self.q, key, value, cache, metadata, out) is out
        return out

    def expected(self, *, window=None, softcap=None, alibi=None, sinks=None, stored=lambda x: x) -> Tensor:
        rows = []
        for s, new in enumerate(self.queries):
            length = self.lengths[s]
            q = self.q[int(self.starts[s]) :][:new].double()
            k, v = (stored(x[s]).double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (self.k, self.v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            distance = torch.arange(length)[None] - (torch.arange(new)[:, None] + length - new)
            if alibi is not None:
                scores = scores + torch.tensor(alibi).double()[:, None, None] * distance
            hidden = distance > 0
            if window:
                hidden = hidden | (distance <= -window)
            scores = scores.masked_fill(hidden, float("-inf"))
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, new, 1)], dim=-1)
            weights = scores.softmax(-1)[..., :length]
            rows.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(rows)


def close(found: Tensor, expected: Tensor, tolerance=2e-5) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def check_the_backend_is_registered_by_name_and_twice_does_no_harm():
    plugin.register()
    plugin.register()
    found = AttentionBackendEnum[plugin.NAME]
    assert found.get_path() == plugin.BACKEND
    assert found.get_class().get_name() == plugin.NAME


def check_vllm_finds_the_plugin_by_its_entry_point():
    from importlib.metadata import entry_points

    from vllm.plugins import DEFAULT_PLUGINS_GROUP

    (found,) = [e for e in entry_points(group=DEFAULT_PLUGINS_GROUP) if e.name == "pagegen"]
    assert found.load() is plugin.register


def check_a_backend_of_vllm_is_replaced_where_the_setting_names_it():
    import os

    os.environ["PAGEGEN_VLLM_REPLACE"] = "flex_attention, "
    try:
        plugin.register()
        assert AttentionBackendEnum.FLEX_ATTENTION.get_path() == plugin.BACKEND
        assert AttentionBackendEnum.CPU_ATTN.get_path() != plugin.BACKEND
        os.environ["PAGEGEN_VLLM_REPLACE"] = "NONSENSE"
        refused(ValueError, "got NONSENSE", plugin.register)
    finally:
        del os.environ["PAGEGEN_VLLM_REPLACE"]
        AttentionBackendEnum.FLEX_ATTENTION.clear_override()


def refused(kind, text, call, *arguments, **options):
    try:
        call(*arguments, **options)
    except kind as error:
        assert text in str(error), f"{error} says nothing of {text}"
        assert "\n" not in str(error), error
    else:
        raise AssertionError(f"{call} was not refused")


def check_vllm_accepts_the_backend_for_what_it_serves_and_names_what_it_does_not():
    from vllm.platforms.interface import DeviceCapability

    usual = {
        "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16, "use_mla": False,
        "has_sink": True, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0), "attn_type": "decoder", "has_sliding_window": True,
        "use_batch_invariant": True,
    }  # fmt: skip
    valid = backend().validate_configuration
    assert valid(**usual) == []
    for dtype in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        assert valid(**{**usual, "kv_cache_dtype": dtype}) == []
    for change in (
        {"use_mla": True}, {"use_sparse": True}, {"use_mm_prefix": True}, {"attn_type": "encoder"},
        {"kv_cache_dtype": "nvfp4"}, {"kv_cache_dtype": "int8_per_token_head"}, {"use_non_causal": True},
        {"use_dcp": True}, {"use_pcp": True}, {"block_size": 8}, {"use_per_head_quant_scales": True},
        {"use_rswa": True}, {"dtype": torch.float64},
    ):  # fmt: skip
        assert len(valid(**{**usual, **change})) == 1, change


def cuda_platform():
    """vLLM's rules for GPUs, on a Hopper that is not here: its libraries of kernels are stood in for."""
    for name in ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch"):
        sys.modules.setdefault(name, ModuleType(name))
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    return type("Hopper", (CudaPlatformBase,), {"get_device_capability": classmethod(lambda _: DeviceCapability(9, 0))})


def check_the_command_line_and_vllms_gpu_platform_select_the_backend_by_its_name():
    from vllm.config import AttentionConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.attention.selector import AttentionSelectorConfig

    plugin.register()
    given = "pagegen"
    if current_platform.is_cpu():  # vLLM makes no parser for a platform that it does not know
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        given = parser.parse_args(["--model", "m", "--attention-backend", given]).attention_backend
    selected = AttentionConfig(backend=given).backend
    wanted = AttentionSelectorConfig(128, torch.bfloat16, "fp8", 16, has_sink=True, has_sliding_window=True)
    choose = cuda_platform().get_attn_backend_cls
    assert choose(selected, wanted) == plugin.BACKEND
    refused(ValueError, "kv_cache_dtype not supported", choose, selected, wanted._replace(kv_cache_dtype="nvfp4"))
    real, module = vllm.__version__, sys.modules.pop("pagegen.integrations.vllm_backend")
    try:
        vllm.__version__ = "0.31.0"
        line = "vLLM 0.31.0 is not supported: install vllm>=0.32,<0.34"
        refused(ValueError, line, choose, selected, wanted)
    finally:
        vllm.__version__, sys.modules["pagegen.integrations.vllm_backend"] = real, module


def check_mixed_prefill_and_decode_equal_dense_attention_in_every_layout_of_vllm():
    batch = Batch()
    for layout in KVCacheLayout:
        close(batch.run(impl_of(), cache_of(layout.name)), batch.expected())


def check_a_batch_of_decodes_equals_dense_attention():
    batch = Batch(lengths=(1, 16, 17, 100), queries=(1, 1, 1, 1))
    common = batch.common()
    assert builder_of().build(0, common).step.query_start_loc is None
    for layout in ("LBNHC", "LBHNC"):
        close(batch.run(impl_of(), cache_of(layout), common=common), batch.expected())


def check_half_precision_equals_dense_attention():
    for dtype, tolerance in ((torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)):
        batch = Batch(dtype=dtype)
        close(batch.run(impl_of(), cache_of("LBNHC", dtype)), batch.expected(), tolerance)


def check_a_half_precision_cache_under_a_model_of_another_dtype():
    batch = Batch(dtype=torch.bfloat16)
    found = batch.run(impl_of(kv_cache_dtype="float16"), cache_of("LBHNC", torch.float16))
    close(found, batch.expected(), 1.6e-2)


def check_float8_caches_are_read_and_written_as_bytes_with_the_layers_scales():
    stored_as = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    for name, dtype in stored_as.items():
        for layout in ("LBNHC", "LBHNC"):
            batch, cache, scale = Batch(), cache_of(layout, torch.uint8), 0.25
            found = batch.run(impl_of(kv_cache_dtype=name), cache, layer_of(scale, scale))
            close(found, batch.expected(stored=lambda x, d=dtype: (x / 0.25).to(d).double() * 0.25), 1e-4)


def check_key_and_value_scales_are_not_mixed_up():
    def stored(scale):
        return lambda x: (x / scale).to(torch.float8_e4m3fn).double() * scale

    batch = Batch()
    found = batch.run(impl_of(kv_cache_dtype="fp8"), cache_of("LBNHC", torch.uint8), layer_of(0.5, 0.125))
    batch.k, batch.v = [stored(0.5)(k) for k in batch.k], [stored(0.125)(v) for v in batch.v]
    close(found, batch.expected(), 1e-4)


def check_sliding_window_soft_cap_alibi_and_sinks_mean_what_vllm_means():
    slopes, sinks = [2.0 ** -(i + 1) for i in range(HEADS)], torch.linspace(-2, 3, HEADS)
    batch = Batch()
    for given, meant in (
        ({"sliding_window": 1}, {"window": 1}),
        ({"sliding_window": 7}, {"window": 7}),
        ({"logits_soft_cap": 1.5}, {"softcap": 1.5}),
        ({"logits_soft_cap": 0.0}, {}),
        ({"alibi_slopes": slopes}, {"alibi": slopes}),
        ({"sinks": sinks}, {"sinks": sinks}),
        (
            {"sliding_window": 20, "logits_soft_cap": 3.0, "sinks": sinks.bfloat16()},
            {"window": 20, "softcap": 3.0, "sinks": sinks.bfloat16()},
        ),
    ):
        close(batch.run(impl_of(**given), cache_of("LBNHC")), batch.expected(**meant))


def check_sinks_loaded_after_the_layer_was_made_count():
    sinks = torch.nn.Parameter(torch.zeros(HEADS), requires_grad=False)
    impl, batch = impl_of(sinks=sinks), Batch()
    sinks.data.copy_(torch.linspace(-1, 4, HEADS))
    close(batch.run(impl, cache_of("LBNHC")), batch.expected(sinks=sinks.data))


def check_values_may_be_narrower_than_keys():
    batch = Batch(v_dim=32)
    close(batch.run(impl_of(), cache_of("LBNHC", width=DIM + 32)), batch.expected())


def check_padded_rows_are_neither_read_nor_written():
    batch = Batch(padded=5)
    batch.q[-5:] = float("nan")
    cache = cache_of("LBNHC")
    found = batch.run(impl_of(), cache)
    tokens = sum(QUERIES)
    close(found[:tokens], batch.expected())
    assert (found[tokens:] == 7.0).all()
    written = (~cache.isnan()).all(-1).all(1).sum()
    assert int(written) == sum(LENGTHS)


def check_a_batch_padded_for_a_captured_graph_equals_the_batch_itself():
    """vLLM pads requests too: no queries, length 0, a table of zeros, and slots of -1."""
    for queries in ((1, 1, 1), (2, 2, 2)):
        batch = Batch(lengths=(21, 40, 17), queries=queries, padded=2 * queries[0])
        total = sum(queries) + batch.padded
        common = batch.common(
            num_reqs=5,
            num_actual_tokens=total,
            max_seq_len=4096,
            seq_lens=torch.tensor([21, 40, 17, 0, 0], dtype=torch.int32),
            query_start_loc=torch.tensor([*batch.starts.tolist(), *[sum(queries)] * 2], dtype=torch.int32),
            block_table_tensor=torch.cat([batch.table, torch.zeros_like(batch.table[:2])]),
        )
        found = batch.run(impl_of(), cache_of("LBNHC"), common=common)
        close(found[: sum(queries)], batch.expected())
        assert (found[sum(queries) :] == 0).all()


def check_a_profiling_run_has_no_cache_and_gives_zeros():
    impl, out = impl_of(), torch.full((8, HEADS, DIM), float("nan"))
    q, k = torch.randn(8, HEADS, DIM), torch.randn(8, KV_HEADS, DIM)
    none = torch.tensor([])
    impl.do_kv_cache_update(layer_of(), k, k, none, torch.arange(8))
    assert impl.forward(layer_of(), q, k, k, none, None, out) is out
    assert (out == 0).all()


def check_what_the_backend_cannot_do_is_refused_by_name():
    refused(NotImplementedError, "attn_type", impl_of, attn_type="encoder_only")
    refused(NotImplementedError, "use_alibi_sqrt", impl_of, use_alibi_sqrt=True)
    refused(NotImplementedError, "got nvfp4", impl_of, kv_cache_dtype="nvfp4")
    impl_of(use_alibi_sqrt=False)
    batch, impl = Batch(), impl_of()
    refused(NotImplementedError, "causal", builder_of().build, 0, batch.common(causal=False))
    out, scale = torch.empty(len(batch.q), HEADS, DIM), torch.ones(1)
    metadata = builder_of().build(0, batch.common())
    arguments = (layer_of(), batch.q, None, None, cache_of("LBNHC"), metadata, out, scale)
    refused(NotImplementedError, "output scale", impl.forward, *arguments)


def check_the_builder_prepares_the_kernels_that_its_layers_will_run():
    from vllm.model_executor.layers.attention import Attention

    from pagegen.ops import attention, plans

    batch = Batch(lengths=(33, 18), queries=(1, 4))
    plugin.register()
    config = config_of()
    config.attention_config.backend = AttentionBackendEnum[plugin.NAME]
    config.model_config = SimpleNamespace(dtype=torch.float32)
    config.cache_config.kv_cache_layout = "LBHNC"
    layer = Attention.__new__(Attention)
    torch.nn.Module.__init__(layer)
    layer.impl, layer.kv_cache_dtype, layer.head_size_v = impl_of(sliding_window=9), "auto", DIM
    config.compilation_config.static_forward_context["layer"] = layer
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=DIM, dtype=torch.float32)
    backend().get_builder_cls()(spec, ["layer"], config, torch.device("cpu"))
    (wanted,) = [p for p in plans._PREPARED.values() if p.spec.window == 9]
    assert (wanted.spec.num_q_heads, wanted.layout.order, bool(wanted.kernels)) == (HEADS, "HND", True)
    close(batch.run(layer.impl, cache_of("LBHNC")), batch.expected(window=9))
    assert wanted in attention.PLANS.values(), "the call ran something that was not prepared"


def check_a_vllm_that_is_not_supported_is_refused_in_one_line_naming_both_versions():
    real = vllm.__version__
    for found in ("0.31.2", "0.34.0", "dev", "1.0"):
        vllm.__version__ = found
        try:
            assert plugin.fault() == f"vLLM {found} is not supported: install vllm>=0.32,<0.34"
        finally:
            vllm.__version__ = real
    assert plugin.fault() is None


def main() -> None:
    outcome: dict[str, str] = {}
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            try:
                check()
                outcome[name] = "ok"
            except Exception:
                outcome[name] = traceback.format_exc()
    print(json.dumps({"vllm": vllm.__version__, "torch": torch.__version__, "outcome": outcome}), file=sys.stdout)


if __name__ == "__main__":
    main()
