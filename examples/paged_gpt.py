"""A small GPT in plain PyTorch on paged attention: prompts of different lengths in one batch, a compiled decode step.

    python examples/paged_gpt.py

The model calls a function to attend, and does not know which: the paged one below, or scaled_dot_product_attention over
whole texts, which every answer is compared with.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import pagegen

LAYERS, HEADS, WIDTH, VOCABULARY, LONGEST = 3, 4, 128, 97, 512
PROMPTS = ((3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4), (2, 7, 1), (1, 1, 2, 3, 5, 8, 13, 21))
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # layer, q, k, v [tokens, HEADS, head_dim] -> the same shape


class Block(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.norm, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(attend(self.layer, q, k, v).flatten(-2))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(Block(layer) for layer in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """ids and positions [tokens], of as many sequences as there are; logits [tokens, VOCABULARY]."""
        x = self.tokens(ids) + self.positions(positions)
        for block in self.blocks:
            x = block(x, attend)
        return self.head(self.norm(x))


class Server:
    """Greedy answers for several prompts at once."""

    def __init__(self, model: GPT, *, max_num_seqs: int = 8, max_tokens: int = LONGEST) -> None:
        layout = pagegen.CacheLayout(block_size=16)
        width = WIDTH // HEADS
        self.cache = pagegen.PagedKVCache(
            LAYERS, max_num_seqs * layout.blocks_for(max_tokens), layout, HEADS, width, dtype=torch.float32
        )
        # tensors at fixed addresses and a block table of fixed width: no step compiles anew because one grew
        self.buffers = pagegen.BatchBuffers(max_num_seqs, max_num_seqs * max_tokens, layout.blocks_for(max_tokens))
        self.model = model
        self.prefill = self._step
        self.decode = torch.compile(self._step, fullgraph=True)

    def _step(self, ids: Tensor, positions: Tensor, where: tuple[Tensor, ...], longest: int) -> Tensor:
        slots, table, lengths, starts = where

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k_cache, v_cache = self.cache.k_cache(layer), self.cache.v_cache(layer)
            pagegen.write_kv(k, v, k_cache, v_cache, slots)
            return pagegen.paged_attention(
                q, k_cache, v_cache, table, lengths, query_start_loc=starts, max_query_len=longest
            )

        return self.model(ids, positions, attend)

    @torch.no_grad()
    def answer(self, prompts: tuple[tuple[int, ...], ...], new: int) -> list[list[int]]:
        names = list(range(len(prompts)))
        for name, prompt in zip(names, prompts, strict=True):
            self.cache.add(name, prompt)
        answers: list[list[int]] = [[] for _ in prompts]
        for i in range(new):
            batch = self.cache.batch(names, buffers=self.buffers)
            where = (batch.slot_mapping, batch.block_table, batch.seq_lens, batch.query_start_loc)
            step = self.decode if i else self.prefill
            logits = step(batch.input_ids, batch.positions, where, batch.max_query_len)
            chosen = logits[batch.query_start_loc[1:].long() - 1].argmax(-1).tolist()  # of each one's last query
            for name, token in zip(names, chosen, strict=True):
                answers[name].append(token)
                self.cache.append(name, [token])
        for name in names:
            self.cache.free(name)
        return answers


def dense(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention over one whole text."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)


@torch.no_grad()
def alone(model: GPT, prompt: tuple[int, ...], new: int) -> list[int]:
    """The answer to one prompt, computed over its whole text for every token."""
    text = list(prompt)
    for _ in range(new):
        text.append(int(model(torch.tensor(text), torch.arange(len(text)), dense)[-1].argmax()))
    return text[len(prompt) :]


def main() -> None:
    torch.manual_seed(0)
    model = GPT().eval()
    answers = Server(model).answer(PROMPTS, new=12)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        print(*prompt, "->", *answer)
    assert answers == [alone(model, prompt, new=12) for prompt in PROMPTS]
    print("the same tokens as attention over whole texts")


if __name__ == "__main__":
    main()
