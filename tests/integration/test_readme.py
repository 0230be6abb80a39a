"""What the README shows runs as it stands, and its commands exist with the options that it gives them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from pagegen.cli.main import main

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md"]


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def commands() -> list[str]:
    """The lines of the README's shell blocks that call pagegen."""
    lines = "\n".join(blocks("README.md", "sh")).splitlines()
    return [line for line in lines if line.startswith("pagegen ")]


def parse(command: click.Command, arguments: list[str]) -> None:
    """Parses `arguments` as the command line would, subcommands first, and runs nothing."""
    while isinstance(command, click.Group):
        child = command.get_command(click.Context(command), arguments[0])
        assert child is not None, f"no command {arguments[0]}"
        command, arguments = child, arguments[1:]
    command.make_context("pagegen", list(arguments))


@pytest.mark.parametrize("number", range(len(blocks("README.md", "python"))))
def test_a_python_block_of_the_readme_runs(number, tmp_path):
    code = blocks("README.md", "python")[number]
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("line", commands())
def test_a_command_of_the_readme_is_understood(line):
    parse(main, shlex.split(line)[1:])


def test_the_readme_shows_every_job():
    shown = {shlex.split(line)[1] for line in commands()}
    assert {"profile", "tune", "query", "explain", "emit"} <= shown


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_and_files_that_a_page_names_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"\bmake ([a-z-]+)", text)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"
    for path in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / path).exists(), path
