"""pagegen as the attention backend of vLLM's own engine: a batch of prompts, with the tokens that transformers has.

python examples/vllm_engine.py, in an environment that has vLLM (`make engines` makes one: .venv-engines/bin/python)
"""

from __future__ import annotations

import os
import tempfile

# vLLM's CPU platform takes its own backend, whatever is asked for: pagegen serves under its name. On a GPU this line is
# not needed: LLM(..., attention_backend="PAGEGEN").
os.environ["PAGEGEN_VLLM_REPLACE"] = "CPU_ATTN"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
from vllm import LLM, SamplingParams
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from pagegen.integrations.tiny_llama import tiny_llama

PROMPTS = [list(b"The cache is cut into blocks,"), list(b"and a table"), list(b"says where each of them lies.")]
NEW = 8


def main() -> None:
    model = tiny_llama()
    expected = [
        model.generate(torch.tensor([p]), max_new_tokens=NEW, do_sample=False)[0, len(p) :].tolist() for p in PROMPTS
    ]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        llm = LLM(
            folder, skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=256, max_num_seqs=8,
            block_size=32, max_num_batched_tokens=32,  # prompts come in chunks, beside the decodes of others
        )  # fmt: skip
    assert AttentionBackendEnum.CPU_ATTN.get_class().get_name() == "PAGEGEN"
    greedy = SamplingParams(temperature=0, max_tokens=NEW, detokenize=False, ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], greedy, use_tqdm=False)
    assert [list(answer.outputs[0].token_ids) for answer in answers] == expected
    print(
        "vLLM's engine on pagegen gives the tokens of transformers for prompts of", [len(p) for p in PROMPTS], "tokens"
    )


if __name__ == "__main__":
    main()
