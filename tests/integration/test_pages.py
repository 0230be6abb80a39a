"""What README and docs show runs as it stands: every code block, page by page, in an empty folder. What does not run
here says why, and its commands exist with the options that it gives them."""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import page_blocks
import pytest
from page_blocks import LANGUAGES, PAGES, ROOT, RUN, Block, blocks, commands, in_a_checkout, text_of

from pagegen.cli.main import main

HERE = Path(__file__).parent
# The page that tunes in an empty folder; the others find what it tuned, so that the same command ends at once.
FIRST = "docs/start.md"
BUDGET = "1s"  # in place of a page's own
LONGEST_S = 900  # of one page, on a machine that does much else
CHECKOUT = ("pagegen", "autotune", "templates", "cache_db", "tests", "docs", "pyproject.toml")
SHOWN = [page for page in PAGES if any(b.language in RUN and b.not_run is None for b in blocks(page))]
LEFT_OUT = [block for page in PAGES for block in blocks(page) if block.not_run is not None]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The socket of a page server. Its folder has a short name: an address of a socket holds 107 characters."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "autotune")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_WAIT_POLICY": "passive", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="pages", dir="/tmp") as folder:
        place = Path(folder) / "socket"
        with (Path(folder) / "log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, str(HERE / "page_server.py"), str(place)],
                env=environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        try:
            wait_for(place, process)
            yield str(place)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # and whatever it forked
            process.wait()
            print((Path(folder) / "log").read_text())  # what took how long


def wait_for(place: Path, process: subprocess.Popen[bytes]) -> None:
    for _ in range(1200):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as trial:
            trial.connect(str(place))
            return
        assert process.poll() is None, (place.parent / "log").read_text()
        time.sleep(0.1)
    raise AssertionError("the page server does not answer")


def run_page(page: str, folder: Path, server: str, database: Path) -> list[tuple[Block, dict[str, Any]]]:
    """Runs the blocks of a page in `folder` and returns each with what came of it."""
    checkout = in_a_checkout(page)
    if checkout:
        copy_checkout(folder)
    shown = [block for block in blocks(page) if block.not_run is None and block.language in RUN]
    steps = [{"language": b.language, "code": b.code, "before": b.before, "place": b.place} for b in shown]
    private = folder.parent / f"{folder.name}-private"
    private.mkdir()
    (private / "steps").write_text(json.dumps(steps), encoding="utf-8")
    environment = {**os.environ, "PAGEGEN_DB": str(database), "PAGES_BUDGET": BUDGET, "OMP_WAIT_POLICY": "passive"}
    found = tools(private, server, folder if checkout else None)
    environment["PATH"] = os.pathsep.join([str(found), os.environ["PATH"]])
    arguments = map(str, (HERE / "page_client.py", server, "page", private / "steps", private / "done"))
    client = [sys.executable, *arguments]
    done = subprocess.run(
        client, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=LONGEST_S
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((private / "done").read_text(encoding="utf-8"))
    return list(zip(shown, results, strict=False))


def tools(folder: Path, server: str, checkout: Path | None) -> Path:
    """A folder with the commands `pagegen` and `python`: those of the page server, or of a changed checkout."""
    (folder / "bin").mkdir()
    client = f"exec {sys.executable} -IS {HERE / 'page_client.py'} {server}"
    texts = {"pagegen": f'{client} pagegen "$@"', "python": f'{client} python "$@"'}
    if checkout is not None:
        changed = f"PYTHONPATH={checkout}:{checkout / 'autotune'} exec {sys.executable}"
        texts = {"pagegen": f'{changed} -m pagegen "$@"', "python": f'{changed} "$@"'}
    for name, text in texts.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    return folder / "bin"


def copy_checkout(folder: Path) -> None:
    for name in CHECKOUT:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "expected"))
        else:
            shutil.copy(ROOT / name, folder / name)


def prose_of(page: str) -> str:
    """A page without its blocks."""
    return re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL)


def failures(results: list[tuple[Block, dict[str, Any]]]) -> list[str]:
    """What went wrong: an error, or another output than the block of text behind it shows."""
    found = []
    for block, result in results:
        if result["error"]:
            found.append(f"{block.place}\n{result['error']}")
        after = blocks(block.page)
        following = after[after.index(block) + 1 :][:1]
        for shown in following:
            if shown.language == "text" and not shown.varies and not alike(result["printed"], shown.code):
                found.append(f"{shown.place} shows\n{shown.code}\nprinted was\n{result['printed']}")
    return found


def alike(printed: str, shown: str) -> bool:
    """Whether an output is the one shown, line by line, where "..." stands for anything."""
    pattern = "".join(re.escape(part) + ".*" for part in shown.strip().split("..."))[:-2]
    tidy = "\n".join(line.rstrip() for line in printed.strip().splitlines())
    return re.fullmatch(pattern, tidy, re.DOTALL) is not None


@pytest.fixture(scope="module")
def first(server: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the first page was followed, with the database that it tuned; once for all workers."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder, told = shared / "first-page", shared / "first-page.failures"
    with (shared / "first-page.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not told.exists():
            for left in (folder, shared / "first-page-private"):
                shutil.rmtree(left, ignore_errors=True)
            folder.mkdir()
            wrong = failures(run_page(FIRST, folder, server, shared / "first-page.db"))
            told.write_text(json.dumps(wrong))
    return shared


def test_the_first_page_can_be_followed_in_an_empty_folder(first):
    wrong = json.loads((first / "first-page.failures").read_text())
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", [page for page in SHOWN if page != FIRST])
def test_a_page_can_be_followed_in_an_empty_folder(page, first, server, tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    for copied in first.glob("first-page.db*"):
        shutil.copy(copied, tmp_path / copied.name)
    wrong = failures(run_page(page, folder, server, tmp_path / "first-page.db"))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_blocks_of_known_languages_and_comments_that_belong_to_one(page):
    unknown = [block.place for block in blocks(page) if block.language not in LANGUAGES]
    assert not unknown, f"blocks must be of {', '.join(LANGUAGES)}: {unknown}"
    hidden = re.findall(r"^    (?:\$ )?(?:pagegen|python|pip|make|vllm) .*", prose_of(page), re.MULTILINE)
    assert not hidden, f"a command belongs into a block of sh: {hidden}"


@pytest.mark.parametrize("block", LEFT_OUT, ids=lambda block: f"{block.place} {block.not_run}")
def test_commands_of_a_block_that_is_not_run_are_understood(block):
    if block.language == "python":
        compile(block.code, block.place, "exec")
    for line in commands(block) if block.language == "sh" else ():
        if line.startswith("pagegen "):
            parse(main, shlex.split(re.split(r" [#|>]", line)[0])[1:])


def parse(command: click.Command, arguments: list[str]) -> None:
    """Parses `arguments` as the command line would, subcommands first, and runs nothing."""
    while isinstance(command, click.Group):
        child = command.get_command(click.Context(command), arguments[0])
        assert child is not None, f"no command {arguments[0]}"
        command, arguments = child, arguments[1:]
    command.make_context("pagegen", list(arguments))


def test_the_readme_shows_every_job():
    lines = [line for block in blocks("README.md") if block.language == "sh" for line in commands(block)]
    shown = {shlex.split(line)[1] for line in lines if line.startswith("pagegen ")}
    assert {"profile", "tune", "query", "explain", "emit"} <= shown


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_and_files_that_a_page_names_exist(page):
    text = text_of(page)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"`make ([a-z-]+)|^make ([a-z-]+)", text, re.MULTILINE)):
        assert re.search(rf"^{''.join(target)}:", makefile, re.MULTILINE), f"make {target}"
    generated = ("cli.md", "schema.md", "reference/*", "figures/cpu.svg")  # written by docs/hooks.py
    for path in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose_of(page)):
        known = page.startswith("docs/") and any(fnmatch.fnmatch(path, name) for name in generated)
        assert known or ((ROOT / page).parent / path).exists(), path


def test_a_block_is_read_with_what_its_page_says_about_it(tmp_path, monkeypatch):
    page = "a\n<!-- not run: needs a GPU -->\n```sh\npagegen x\n```\n<!-- before: x = 1 -->\n```python\nx\n```\n"
    (tmp_path / "p.md").write_text(page)
    monkeypatch.setattr(page_blocks, "ROOT", tmp_path)
    first, second = blocks("p.md")
    assert (first.not_run, first.code, first.line, second.before) == ("needs a GPU", "pagegen x\n", 4, "x = 1")
    (tmp_path / "p.md").write_text("<!-- not run: lost -->\nwords\n```sh\nx\n```\n")
    with pytest.raises(ValueError, match="must follow"):
        blocks("p.md")


def test_a_block_that_fails_or_prints_something_else_is_reported(server, tmp_path, monkeypatch):
    page = "```python\nprint(1)\n```\n```text\n2\n```\n```sh\npython -c 'raise SystemExit(3)'\n```\n"
    (tmp_path / "p.md").write_text(page)
    monkeypatch.setattr(page_blocks, "ROOT", tmp_path)
    folder = tmp_path / "empty"
    folder.mkdir()
    printed, failed = failures(run_page("p.md", folder, server, tmp_path / "tuning.db"))
    assert "p.md:5 shows\n2" in printed and "p.md:8\nexit status 3" in failed


def test_an_output_is_compared_but_for_what_is_left_open():
    assert alike("a 12 us\nb\n", "a ... us\nb\n")
    assert not alike("a 12 us\nc\n", "a ... us\nb\n")
