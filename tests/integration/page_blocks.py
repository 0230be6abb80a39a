"""The code blocks of a page, and what the page says about them in comments that a reader does not see.

    <!-- not run: the reason -->          the next block is not run here
    <!-- before: Python statements -->    run ahead of the next block, in the same namespace; may have several lines
    <!-- output varies -->                the next block shows what was printed once; it is not compared
    <!-- in a checkout -->                the page's blocks run in a copy of the repository

A block of `python`, `sh` or `diff` is run; a block of `text` behind one is what it prints, where "..." stands for
anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
RUN = ("python", "sh", "diff")
LANGUAGES = (*RUN, "text")

_COMMENT = re.compile(r"<!-- (not run|before|output varies|in a checkout)(?::\s*(.*?))?\s*-->", re.DOTALL)
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block. `line` is that of its first line of code; `not_run` the reason, or None."""

    page: str
    line: int
    language: str
    code: str
    not_run: str | None = None
    before: str = ""
    varies: bool = False

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    """The blocks of a page in order. Raises ValueError for a comment that no block follows directly."""
    text, found, end = text_of(page), [], 0
    for fence in _FENCE.finditer(text):
        said = dict(_comments(page, text[end : fence.start()]))
        end = fence.end()
        indent, language, code = fence.groups()
        code = "".join(line.removeprefix(indent) for line in code.splitlines(keepends=True))
        line = text.count("\n", 0, fence.start(3)) + 1
        found.append(
            Block(
                page=page, line=line, language=language, code=code, not_run=said.get("not run"),
                before=said.get("before", ""), varies="output varies" in said,
            )
        )  # fmt: skip
    return found


def _comments(page: str, between: str) -> Iterator[tuple[str, str]]:
    for comment in _COMMENT.finditer(between):
        kind, value = comment.group(1), comment.group(2) or ""
        if kind == "in a checkout":
            continue
        rest = _COMMENT.sub("", between[comment.end() :])
        if rest.strip():
            raise ValueError(f"{page}: a block must follow '<!-- {kind}' directly, got {rest.strip()[:40]!r}")
        if kind == "not run" and not value:
            raise ValueError(f"{page}: '<!-- not run' needs a reason")
        yield kind, value


def in_a_checkout(page: str) -> bool:
    return "<!-- in a checkout -->" in text_of(page)


def commands(block: Block) -> list[str]:
    """The lines of a shell block, those that go on in the next one joined, without comments."""
    joined = re.sub(r"\\\n\s*", "", block.code)
    return [line for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#")]
