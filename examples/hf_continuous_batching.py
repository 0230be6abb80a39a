"""transformers' own continuous batching (`generate_batch`) with this project's kernels behind flash-attention's names.

python examples/hf_continuous_batching.py
"""

from __future__ import annotations

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from pagegen.integrations import hf_flash
from pagegen.integrations.tiny_llama import tiny_llama

PROMPTS = [list(b"Requests come and go,"), list(b"and"), list(b"each step takes those that there are.")]


def main() -> None:
    model = tiny_llama()
    expected = [
        model.generate(torch.tensor([p]), max_new_tokens=8, do_sample=False)[0, len(p) :].tolist() for p in PROMPTS
    ]
    model.set_attn_implementation(hf_flash.register())
    outputs = model.generate_batch(
        inputs=PROMPTS,
        generation_config=GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=16, num_blocks=64, max_batch_tokens=64, auto_switch_to_flash=False
        ),
        progress_bar=False,
    )
    answers = sorted(output.generated_tokens for output in outputs.values())
    assert answers == sorted(expected)
    print("continuous batching gives the same tokens:", *answers, sep="\n")


if __name__ == "__main__":
    main()
