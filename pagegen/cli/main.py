"""The `pagegen` command: a group whose subcommands load their modules when called."""

from __future__ import annotations

import importlib

import click

import pagegen

COMMANDS = {
    "build": "pagegen.cli.build",
    "db": "pagegen.cli.db",
    "demo": "pagegen.cli.demo",
    "doctor": "pagegen.cli.doctor",
    "emit": "pagegen.cli.emit",
    "explain": "pagegen.cli.explain",
    "inspect": "pagegen.cli.inspect",
    "profile": "pagegen.cli.profile",
    "query": "pagegen.cli.query",
    "report": "pagegen.cli.report",
    "simulate": "pagegen.cli.simulate",
    "tune": "pagegen.cli.tune",
}


class LazyGroup(click.Group):
    """Imports a subcommand's module when it is needed, so that one command does not load what another needs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[cmd_name]).command
        assert isinstance(command, click.Command)
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(pagegen.__version__, prog_name="pagegen")
def main() -> None:
    """Generates, tunes and serves specialised paged-attention kernels."""
