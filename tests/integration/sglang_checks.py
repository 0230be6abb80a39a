"""What tests/integration/test_sglang.py runs in a Python that has SGLang: pagegen's backend through SGLang's own pools,
layers and batches, beside SGLang's own backend for the CPU.

`python sglang_checks.py` runs every function named check_* and prints one JSON document, as vllm_checks.py does.
"""

from __future__ import annotations

import importlib.machinery
import itertools
import json
import sys
import traceback
from types import SimpleNamespace
from unittest.mock import MagicMock

# SGLang imports torchvision, for images alone; the one on the index is built for a CUDA torch and does not load here.
for _name in (
    "",
    ".io",
    ".ops",
    ".transforms",
    ".transforms.v2",
    ".transforms.functional",
    ".transforms.v2.functional",
):
    _module = MagicMock(name=f"torchvision{_name}")
    _module.__spec__ = importlib.machinery.ModuleSpec(f"torchvision{_name}", None, is_package=True)
    _module.__path__, _module.__version__ = [], "0"
    sys.modules[f"torchvision{_name}"] = _module

import sglang  # noqa: E402
import torch  # noqa: E402
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS  # noqa: E402
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend  # noqa: E402
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode  # noqa: E402
from torch import Tensor  # noqa: E402

from pagegen.integrations import sglang as plugin  # noqa: E402

HEADS, KV_HEADS, DIM, CONTEXT, SLOTS = 6, 2, 64, 160, 384
SCALE = 0.11
LENGTHS, QUERIES = (21, 40, 17, 64), (5, 1, 17, 3)


class Server:
    """What of a model runner a backend looks at, with real pools, and random requests in them."""

    def __init__(
        self, page=1, dtype=torch.float32, hnd=False, layer=None, lengths=LENGTHS, queries=QUERIES, scale=None
    ):
        generator = torch.Generator().manual_seed(3)
        self.lengths, self.queries, self.page = lengths, queries, page
        self.requests = ReqToTokenPool(8, CONTEXT, "cpu", False)
        environment(hnd)
        self.pool = MHATokenToKVPool(SLOTS, page, dtype, KV_HEADS, DIM, 2, "cpu", False)
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer.view(torch.uint8).fill_(0xFF)  # NaN: what nobody wrote must not count
        self.layer = layer or layer_of()
        if scale is not None:
            self.layer.k_scale = self.layer.v_scale = torch.tensor(scale)
        self.runner = SimpleNamespace(
            device="cpu", page_size=page, dtype=torch.float32, use_mla_backend=False,
            model_config=SimpleNamespace(context_len=CONTEXT), model=torch.nn.ModuleList([self.layer]),
            req_to_token_pool=self.requests, token_to_kv_pool=self.pool,
        )  # fmt: skip
        pages = iter((torch.randperm(SLOTS // page - 1, generator=generator) + 1).tolist())  # page 0: for padding
        self.rows = [5, 2, 7, 3, 1, 4][: len(lengths)]
        for row, n in zip(self.rows, lengths, strict=True):
            slots = [p * page + i for p in itertools.islice(pages, -(-n // page)) for i in range(page)]
            self.requests.req_to_token[row, :n] = torch.tensor(slots[:n], dtype=torch.int32)
        self.k = [torch.randn(n, KV_HEADS, DIM, generator=generator) for n in lengths]
        self.v = [torch.randn(n, KV_HEADS, DIM, generator=generator) for n in lengths]
        self.q = torch.randn(sum(queries), HEADS * DIM, generator=generator)

    def batch(self, mode: ForwardMode, queries: tuple[int, ...], past: tuple[int, ...]) -> ForwardBatch:
        seen = [p + n for p, n in zip(past, queries, strict=True)]
        slots = [self.requests.req_to_token[r, p:s] for r, p, s in zip(self.rows, past, seen, strict=True)]
        lens = torch.tensor(seen)
        batch = ForwardBatch(
            forward_mode=mode, batch_size=len(seen), input_ids=torch.zeros(sum(queries), dtype=torch.int64),
            req_pool_indices=torch.tensor(self.rows), seq_lens=lens, out_cache_loc=torch.cat(slots).long(),
            seq_lens_sum=sum(seen), seq_lens_cpu=lens,
        )  # fmt: skip
        if mode.is_extend():
            batch.extend_seq_lens = torch.tensor(queries, dtype=torch.int32)
            batch.extend_prefix_lens = torch.tensor(past, dtype=torch.int32)
            batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu = list(queries), list(past)
        return batch

    def new(self, x: list[Tensor], queries, past) -> Tensor:
        return torch.cat([x[s][p : p + n] for s, (n, p) in enumerate(zip(queries, past, strict=True))])

    def run(self, backend=None, mode=ForwardMode.EXTEND, **options) -> Tensor:
        """Earlier tokens first, then this step's, through the backend's own `forward`."""
        backend = backend or ours(self.runner)
        past = tuple(n - new for n, new in zip(self.lengths, self.queries, strict=True))
        if sum(past):
            earlier = torch.zeros(sum(past), HEADS * DIM)
            self.step(backend, ForwardMode.EXTEND, past, (0,) * len(past), earlier, **options)
        return self.step(backend, mode, self.queries, past, self.q, **options).view(-1, HEADS, DIM)

    def step(self, backend, mode, queries, past, q, **options) -> Tensor:
        batch = self.batch(mode, queries, past)
        backend.init_forward_metadata(batch)
        k, v = self.new(self.k, queries, past), self.new(self.v, queries, past)
        return backend.forward(q, k, v, self.layer, batch, **options)

    def expected(self, *, window=None, softcap=None, sinks=None, stored=lambda x: x) -> Tensor:
        rows, at = [], 0
        for s, new in enumerate(self.queries):
            length = self.lengths[s]
            q = self.q[at : at + new].view(new, HEADS, DIM).double()
            at += new
            k, v = (stored(x[s]).double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (self.k, self.v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            distance = torch.arange(length)[None] - (torch.arange(new)[:, None] + length - new)
            hidden = distance > 0
            if window:
                hidden = hidden | (distance <= -window)
            scores = scores.masked_fill(hidden, float("-inf"))
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, new, 1)], dim=-1)
            rows.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :length], v))
        return torch.cat(rows)


def environment(hnd: bool) -> None:
    import os

    os.environ["SGLANG_USE_HND_KVCACHE"] = "1" if hnd else "0"


def layer_of(**options) -> RadixAttention:
    return RadixAttention(HEADS, DIM, SCALE, KV_HEADS, 0, **options)


def ours(runner):
    plugin.register()
    return ATTENTION_BACKENDS[plugin.NAME](runner)


def close(found: Tensor, expected: Tensor, tolerance=2e-5) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def refused(kind, text, call, *arguments, **options):
    try:
        call(*arguments, **options)
    except kind as error:
        assert text in str(error), f"{error} says nothing of {text}"
        assert "\n" not in str(error), error
    else:
        raise AssertionError(f"{call} was not refused")


def check_sglang_loads_the_plugin_by_its_entry_point_and_offers_the_backend_once():
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.plugins import GENERAL_PLUGINS_GROUP, load_plugins, load_plugins_by_group

    function, _ = load_plugins_by_group(GENERAL_PLUGINS_GROUP)["pagegen"]
    assert function is plugin.register
    load_plugins()
    plugin.register()
    assert ATTENTION_BACKENDS[plugin.NAME] is plugin.create
    assert ATTENTION_BACKEND_CHOICES.count(plugin.NAME) == 1


def check_extend_and_mixed_batches_equal_dense_attention_for_every_page_size_and_layout():
    for page in (1, 16, 64):
        for hnd in (False, True):
            for mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
                server = Server(page, hnd=hnd)
                assert server.pool.kv_cache_layout == ("hnd" if hnd else "nhd")
                close(server.run(mode=mode), server.expected())


def check_decode_equals_dense_attention_and_sglangs_own_backend():
    for page in (1, 16):
        server = Server(page, lengths=(1, 16, 17, 100), queries=(1, 1, 1, 1))
        found = server.run(mode=ForwardMode.DECODE)
        close(found, server.expected())
        theirs = server.run(TorchNativeAttnBackend(server.runner), ForwardMode.DECODE)
        torch.testing.assert_close(found, theirs, rtol=2e-5, atol=2e-5)


def check_extend_with_a_sliding_window_equals_sglangs_own_backend():
    for window in (0, 1, 12):  # 0 is SGLang's word for none
        server = Server(16, layer=layer_of(sliding_window_size=window))
        found = server.run()
        close(found, server.expected(window=window + 1 if window else None))
        theirs = server.run(TorchNativeAttnBackend(server.runner))
        torch.testing.assert_close(found, theirs, rtol=2e-5, atol=2e-5)


def check_soft_cap_and_sinks():
    sinks = torch.linspace(-2, 3, HEADS)
    server = Server(16, layer=layer_of(logit_cap=1.5))
    close(server.run(sinks=sinks), server.expected(softcap=1.5, sinks=sinks))
    close(server.run(), server.expected(softcap=1.5))


def check_float8_pools_with_and_without_scales():
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        for scale in (None, 0.25):
            server = Server(16, dtype, scale=scale)
            factor = scale or 1.0
            kept = server.k[0].clone()
            found = server.run()
            close(found, server.expected(stored=lambda x, d=dtype, f=factor: (x / f).to(d).double() * f), 1e-4)
            assert torch.equal(kept, server.k[0])


def check_keys_that_another_layer_stored_are_read_and_not_written_again():
    server = Server(16)
    backend = ours(server.runner)
    server.run(backend)
    held = [b.clone() for b in server.pool.k_buffer]
    past = tuple(n - new for n, new in zip(server.lengths, server.queries, strict=True))
    batch = server.batch(ForwardMode.EXTEND, server.queries, past)
    found = backend.forward(server.q, None, None, server.layer, batch)
    close(found.view(-1, HEADS, DIM), server.expected())
    nonsense = torch.full_like(server.new(server.k, server.queries, past), 9.0)
    found = backend.forward(server.q, nonsense, nonsense, server.layer, batch, save_kv_cache=False)
    close(found.view(-1, HEADS, DIM), server.expected())
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(held, server.pool.k_buffer, strict=True))


def check_the_buffers_of_a_decode_graph_keep_their_addresses_and_give_the_same_tokens():
    server = Server(16, lengths=(9, 33, 100), queries=(1, 1, 1))
    backend = ours(server.runner)
    backend.init_cuda_graph_state(8, 8)
    assert backend.get_cuda_graph_seq_len_fill_value() == 1
    padded = ForwardBatch(
        forward_mode=ForwardMode.DECODE, batch_size=4, input_ids=torch.zeros(4, dtype=torch.int64),
        req_pool_indices=torch.zeros(4, dtype=torch.int64), seq_lens=torch.ones(4, dtype=torch.int64),
        out_cache_loc=torch.zeros(4, dtype=torch.int64), seq_lens_sum=4,
    )  # fmt: skip
    backend.init_forward_metadata_out_graph(padded, in_capture=True)
    captured = backend.forward_metadata
    assert (captured.max_seq_len, captured.query_start_loc) == (CONTEXT, None)
    server.run(backend, ForwardMode.DECODE)  # stores the tokens
    batch = server.batch(ForwardMode.DECODE, (1, 1, 1), (8, 32, 99))
    batch.batch_size = 4  # as SGLang pads it: request row 0, length 1, slot 0
    batch.req_pool_indices = torch.nn.functional.pad(batch.req_pool_indices, (0, 1))
    batch.seq_lens = torch.nn.functional.pad(batch.seq_lens, (0, 1), value=1)
    batch.out_cache_loc = torch.nn.functional.pad(batch.out_cache_loc, (0, 1))
    backend.init_forward_metadata_out_graph(batch)
    replayed = backend.forward_metadata
    for name in ("block_table", "seq_lens"):
        assert getattr(captured, name).data_ptr() == getattr(replayed, name).data_ptr(), name
    q = torch.cat([server.q, server.q[:1]])
    k, v = (torch.cat([server.new(x, (1, 1, 1), (8, 32, 99)), x[0][:1]]) for x in (server.k, server.v))
    found = backend.forward(q, k, v, server.layer, batch).view(-1, HEADS, DIM)
    close(found[:3], server.expected())
    assert found.isfinite().all()


def check_what_the_backend_cannot_do_is_refused_by_name():
    server = Server()
    for change, text in (
        ({"attn_type": AttentionType.ENCODER_ONLY}, "encoder_only"),
        ({"is_cross_attention": True}, "cross attention"),
        ({"use_irope": True}, "use_irope"),
    ):
        refused(NotImplementedError, text, Server(layer=layer_of(**change)).run)
    mla = SimpleNamespace(**{**vars(server.runner), "use_mla_backend": True})
    refused(NotImplementedError, "MLA", ours, mla)
    other = SimpleNamespace(**{**vars(server.runner), "token_to_kv_pool": SimpleNamespace()})
    refused(NotImplementedError, "got SimpleNamespace", ours, other)
    backend = ours(server.runner)
    batch = server.batch(ForwardMode.TARGET_VERIFY, (1, 1, 1, 1), (1, 1, 1, 1))
    refused(NotImplementedError, "speculative", backend.init_forward_metadata, batch)
    batch = server.batch(ForwardMode.EXTEND, (1, 1, 1, 1), (1, 1, 1, 1))
    refused(NotImplementedError, "decode graphs", backend.init_forward_metadata_out_graph, batch)
    refused(NotImplementedError, "score_mod", server.run, score_mod=object())


def check_an_sglang_that_is_not_supported_is_refused_in_one_line_naming_both_versions():
    real = sglang.__version__
    for found in ("0.5.22", "0.5.24", "0.6", "dev"):
        sglang.__version__ = found
        try:
            assert plugin.fault() == f"SGLang {found} is not supported: install sglang>=0.5.23,<0.5.24"
        finally:
            sglang.__version__ = real
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
    print(json.dumps({"sglang": sglang.__version__, "torch": torch.__version__, "outcome": outcome}), file=sys.stdout)


if __name__ == "__main__":
    main()
