"""A small Llama made on the spot, with SmolLM2-135M's attention: what the demo runs where the weights are not."""

from __future__ import annotations

from typing import Any

import torch


class ByteTokenizer:
    """Token = byte. Answers of a random model are no text: they decode to their tokens' numbers."""

    def encode_chat(self, prompt: str) -> list[int]:
        return list(prompt.encode())

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


def tiny_llama(seed: int = 0) -> Any:
    """A random float32 Llama of 4 layers with 9 query heads, 3 KV heads and head dim 64, the same for each seed.

    Its weights are 5 times larger than usual: with the usual ones attention hardly moves the next token, and a
    wrong kernel would go unnoticed.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=576,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=2048,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()
