"""The command line's frame: every command is there, loads late, and fails in one line with the right exit code."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import pagegen
from pagegen.cli import output
from pagegen.cli.main import COMMANDS, main


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m pagegen` in a process of its own, as a user runs it."""
    command = [sys.executable, "-m", "pagegen", *arguments]
    return subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)


def leaves(command: click.Command, path: tuple[str, ...] = ()) -> list[tuple[str, click.Command]]:
    """The commands below `command` that do something, by their full name."""
    if not isinstance(command, click.Group):
        return [(" ".join(path), command)]
    context = click.Context(command)
    return [
        leaf
        for name in command.list_commands(context)
        if (child := command.get_command(context, name)) is not None
        for leaf in leaves(child, (*path, name))
    ]


PRINTS_A_FILE = ("db roles",)  # SQL for another program to read


def test_help_describes_every_command():
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    for name in COMMANDS:
        line = next(line for line in result.output.splitlines() if line.strip().startswith(f"{name} "))
        assert len(line.split()) > 2, f"{name} has no summary"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_a_click_command_with_a_docstring(name):
    command = importlib.import_module(COMMANDS[name]).command
    assert isinstance(command, click.Command)
    assert command.help


def test_every_command_can_answer_in_json_and_explains_its_options():
    found = leaves(main)
    assert len(found) >= len(COMMANDS)
    for name, command in found:
        options = {flag: option for option in command.params for flag in option.opts}
        assert "--json" in options or name in PRINTS_A_FILE, name
        silent = [f for f, o in options.items() if isinstance(o, click.Option) and not o.help]
        assert not silent, f"{name}: {silent} have no help"


def test_the_version_is_the_packages():
    assert CliRunner().invoke(main, ["--version"]).output == f"pagegen, version {pagegen.__version__}\n"


def test_an_unknown_command_is_bad_usage():
    result = CliRunner().invoke(main, ["tuen"])
    assert result.exit_code == 2
    assert "No such command 'tuen'" in result.output


def test_a_failure_is_one_line_that_says_what_to_do_and_exit_code_one():
    @click.command()
    def broken() -> None:
        raise output.Failure("no profile at x.json: make one with pagegen profile import")

    result = CliRunner().invoke(broken)
    assert result.exit_code == 1
    assert result.stderr == "Error: no profile at x.json: make one with pagegen profile import\n"
    assert result.stdout == ""


def test_a_table_prints_missing_values_as_a_dash_and_keeps_the_column_order():
    lines = output.table([{"b": 2, "a": None}], {"a": "first", "b": "second"}).splitlines()
    assert lines[0].split() == ["first", "second"]
    assert lines[-1].split() == ["-", "2"]


def test_the_module_is_the_command():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"pagegen, version {pagegen.__version__}\n")


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from click.testing import CliRunner; from pagegen.cli.main import main;"
        "CliRunner().invoke(main, ['--help'], catch_exceptions=False);"
        "print(*(m for m in ('triton', 'sqlalchemy', 'libcst', 'transformers') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
