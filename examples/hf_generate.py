"""A Hugging Face model on paged attention: `generate()` as it is, and a compiled batch of prompts of any lengths.

python examples/hf_generate.py
"""

from __future__ import annotations

import torch

from pagegen.integrations.tiny_llama import tiny_llama
from pagegen.integrations.transformers import enable

PROMPTS = [list(b"The cache is cut into blocks,"), list(b"and a table"), list(b"says where each of them lies.")]


def main() -> None:
    model = tiny_llama()  # or AutoModelForCausalLM.from_pretrained(...)
    new = 8
    expected = [
        model.generate(torch.tensor([p]), max_new_tokens=new, do_sample=False)[0, len(p) :].tolist() for p in PROMPTS
    ]

    paged = enable(model, block_size=16)
    one = torch.tensor(PROMPTS[:1])
    answer = model.generate(one, max_new_tokens=new, do_sample=False, past_key_values=paged.cache())
    assert answer[0, len(PROMPTS[0]) :].tolist() == expected[0]
    print("generate() gives the same tokens")

    answers = paged.generator().generate(PROMPTS, max_new_tokens=new)  # one compiled step for all of them
    assert answers == expected
    print("one compiled step for prompts of", [len(p) for p in PROMPTS], "tokens gives the same tokens")


if __name__ == "__main__":
    main()
