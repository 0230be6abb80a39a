"""A server under a tiny memory: requests through the scheduler and, in the same steps, sequences that fork, guess,
give way and come back through the calls of the cache."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field, replace

import torch
from transformers import DynamicCache

from pagegen import OutOfBlocks, PagedKVCache, serving
from pagegen.integrations.generation import PagedGenerator

VOCABULARY = 128
DRAFT = 3  # tokens of a wrong guess, taken back
NOTHING = serving.Step(number=0, seq_ids=(), query_lens=(), context_lens=(), samples=())


class StepFailed(RuntimeError):
    """A step that was announced and did not write what it should."""


@dataclass(eq=False)
class Branch:
    """One of several answers to a prompt. Output i is `forced[i]` where that is given, else what the model says."""

    id: str
    prompt: list[int]
    forced: dict[int, int]
    outputs: list[int] = field(default_factory=list)
    where: str = "waiting"  # "cache", "host", "waiting", "ended"
    guessing: bool = False

    @property
    def tokens(self):
        return [*self.prompt, *self.outputs]


@dataclass(eq=False)
class Family:
    """A prompt that is answered `width` times: its first branch is forked once its prompt is computed, and later, as a
    beam search does, its worst branch is given up for a fork of another. A wrong guess is appended and taken back."""

    id: str
    prompt: list[int]
    width: int
    length: int
    branches: list[Branch] = field(default_factory=list)

    def __post_init__(self):
        self.branches = [Branch(f"{self.id}.0", self.prompt, {})]
        self.names = 1
        self.rng = random.Random(self.id)

    def fork(self, store, parent):
        """A branch that goes on from `parent` with another token than the one that the model is about to tell it."""
        child = Branch(f"{self.id}.{self.names}", self.prompt, dict(parent.forced), list(parent.outputs), "cache")
        self.names += 1
        store.fork(parent.id, child.id)
        child.forced[len(child.outputs)] = self.rng.randrange(2, VOCABULARY)
        child.outputs.append(child.forced[len(child.outputs)])
        self.branches.append(child)


class Families:
    """Serves families a step at a time, beside a scheduler that knows nothing of them."""

    def __init__(self, store: PagedKVCache, families: list[Family]) -> None:
        self.store = store
        self.waiting = deque(families)
        self.present: list[Family] = []
        self.ended: list[Branch] = []
        self.counts: Counter[str] = Counter()

    def branches(self, where):
        return [branch for family in self.present for branch in family.branches if branch.where == where]

    def rows(self):
        """(sequence, query length) of everyone who has something to compute."""
        for branch in self.branches("host"):
            if self.store.can_swap_in(branch.id):
                self.store.swap_in(branch.id)
                branch.where = "cache"
        if len(self.present) < 2 and self.waiting:
            self.present.append(self.waiting.popleft())
        for branch in self.branches("waiting"):
            tokens = branch.tokens
            if self.store.can_admit(len(tokens), tokens=tokens, lookahead=1):
                self.store.add(branch.id, tokens)
                branch.where = "cache"
        for branch in self.branches("cache"):
            self._grow(branch)
        left = {branch.id: self.store.length(branch.id) - self.store.computed(branch.id) for branch in
                self.branches("cache")}  # fmt: skip
        return [(seq_id, count) for seq_id, count in left.items() if count]

    def take(self, tokens):
        """What the model said behind the last token of each row."""
        for family in list(self.present):
            for branch in list(family.branches):
                if branch.id in tokens and branch in family.branches:  # not given up for another in this step
                    self._answer(family, branch, tokens[branch.id])
            if all(branch.where == "ended" for branch in family.branches):
                self.present.remove(family)

    def _grow(self, branch):
        """Appends the last output, and sometimes a wrong guess of what follows it, or gives way."""
        fed = self.store.length(branch.id)
        new = branch.tokens[fed:]
        if not new:
            return
        branch.guessing = len(branch.outputs) % 5 == 4 and not branch.guessing
        guess = [1] * DRAFT if branch.guessing else []
        try:
            self.store.append(branch.id, new + guess)
        except OutOfBlocks:
            branch.guessing = False
            self._give_way(branch)

    def _give_way(self, branch):
        self.counts["family preemptions"] += 1
        try:
            self.store.swap_out(branch.id)
            branch.where = "host"
        except OutOfBlocks:
            self.store.free(branch.id)
            branch.where = "waiting"

    def _answer(self, family, branch, token):
        if self.store.length(branch.id) > len(branch.tokens):  # a guess, and it was wrong: the last output goes too
            self.store.truncate(branch.id, len(branch.tokens) - 1)
            self.counts["guesses taken back"] += 1
            return
        branch.guessing = False
        if family.names == 1:
            for _ in range(family.width - 1):
                family.fork(self.store, branch)
        elif len(branch.outputs) == family.length // 2 and family.names < family.width + 2:
            self._give_up_for(family, branch)
        branch.outputs.append(token)
        for each in family.branches:
            if each.where == "cache" and len(each.outputs) == family.length:
                self.store.free(each.id)
                each.where = "ended"
                self.ended.append(each)

    def _give_up_for(self, family, branch):
        """Another branch, if there is one in the cache, ends without an answer, and a fork of this one goes on."""
        for worst in family.branches:
            if worst is not branch and worst.where == "cache":
                self.store.free(worst.id)
                family.branches.remove(worst)
                family.fork(self.store, branch)
                self.counts["branches given up"] += 1
                return


class Crowd(PagedGenerator):
    """A generator whose steps compute the families' rows too, and fail now and then: announced, but what they were to
    write is poison."""

    families: Families
    failing = 0  # every so many steps
    steps = failed = 0

    def run(self, planned):
        rows = self.families.rows()
        self.steps += 1
        joint = replace(
            planned,
            seq_ids=(*planned.seq_ids, *(seq_id for seq_id, _ in rows)),
            query_lens=(*planned.query_lens, *(count for _, count in rows)),
        )
        if not joint.seq_ids:
            return []
        if self.failing and self.steps % self.failing == 0:
            self._fail(joint, [seq_id for seq_id, _ in rows])
        tokens = super().run(joint)
        own = len(planned.seq_ids)
        self.families.take({seq_id: token for (seq_id, _), token in zip(rows, tokens[own:], strict=True)})
        return tokens[:own]

    def serve(self, requests):
        """The outputs of every request, by id; the families are served meanwhile, and to their end."""
        scheduler, clock, outputs = self.scheduler(), serving.WallClock(), {}
        for request in requests:
            scheduler.submit(request)
        while scheduler.waiting or scheduler.running or self.families.present or self.families.waiting:
            if self.steps > 100 + 10 * len(requests):
                raise RuntimeError(f"no end after {self.steps} steps")
            step = scheduler.schedule(clock.now_s())
            try:
                tokens = self.run(step or NOTHING)
            except StepFailed:
                if step is not None:
                    scheduler.fail(step)
                continue
            if step is not None:
                for outcome in scheduler.complete(step, tokens, clock.now_s()):
                    outputs[outcome.request.id] = outcome.tokens.tolist()
            self.store.check_invariants()
        self.counters = scheduler.counters
        return outputs

    def _fail(self, joint, others):
        batch = self.store.batch(joint.seq_ids, query_lens=joint.query_lens)
        size = self.store.layout.block_size
        blocks, offsets = batch.slot_mapping // size, batch.slot_mapping % size
        for layer in range(self.store.num_layers):
            self.store.k_cache(layer)[blocks, offsets] = torch.nan
            self.store.v_cache(layer)[blocks, offsets] = torch.nan
        if others:
            self.store.abandon(others)
        self.failed += 1
        raise StepFailed


def alone(model, prompt, count, forced=None):
    """`count` outputs of a prompt by itself, by the model's own attention and cache."""
    cache, tokens, outputs = DynamicCache(config=model.config), prompt, []
    with torch.no_grad():
        while len(outputs) < count:
            logits = model(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True).logits
            token = int(logits[0, -1].argmax())
            outputs.append((forced or {}).get(len(outputs), token))
            tokens = outputs[-1:]
    return outputs
