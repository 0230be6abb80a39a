"""Serves a model through vLLM's own engine, in one process, and prints what it generated as one JSON document.

`python vllm_serve.py MODEL '{"prompts": [[token, ...], ...], "max_tokens": N, "engine": {argument: value}}'`. What
serves is vLLM's choice of backend; `PAGEGEN_VLLM_REPLACE` puts pagegen's in its place. The calls of each backend are
counted, so that the comparison of two runs cannot compare a backend with itself.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process, where its calls can be counted
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def counted(impl: type, calls: Counter[str]) -> None:
    """Counts the forwards of a backend's layers by what they serve: "decode", "mixed" (more than one query of some
    request) or "profile"."""
    forward = impl.forward

    def counting(self, layer, query, key, value, kv_cache, attn_metadata, *others, **options):
        kind = "profile" if attn_metadata is None else "decode" if _longest(attn_metadata) == 1 else "mixed"
        calls[f"{type(self).__name__}:{kind}"] += 1
        return forward(self, layer, query, key, value, kv_cache, attn_metadata, *others, **options)

    impl.forward = counting


def _longest(metadata) -> int:
    return metadata.max_query_len if hasattr(metadata, "max_query_len") else metadata.step.max_query_len


def main() -> None:
    model, request = sys.argv[1], json.loads(sys.argv[2])
    from vllm import LLM, SamplingParams
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    calls: Counter[str] = Counter()
    started = time.perf_counter()
    llm = LLM(model=model, skip_tokenizer_init=True, enforce_eager=True, **request["engine"])
    loaded = time.perf_counter()
    backend = AttentionBackendEnum.CPU_ATTN.get_class()
    counted(backend.get_impl_cls(), calls)
    sampling = SamplingParams(temperature=0, max_tokens=request["max_tokens"], detokenize=False, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
    tokens = [[list(o.outputs[0].token_ids) for o in llm.generate(prompts, sampling, use_tqdm=False)] for _ in range(2)]
    document = {
        "backend": backend.get_name(), "calls": calls, "tokens": tokens, "load_s": round(loaded - started, 1),
        "generate_s": round(time.perf_counter() - loaded, 1),
    }  # fmt: skip
    print(json.dumps(document))


if __name__ == "__main__":
    main()
