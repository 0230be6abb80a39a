"""What mkdocs builds beside the pages in this folder: API, command line and schema, each written from the code itself,
so that none of them can be out of date. `make docs` builds the site; a warning of `on_post_build` fails it."""

from __future__ import annotations

import importlib
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import click
    from sqlalchemy import Table

ROOT = Path(__file__).parents[1]
LOG = logging.getLogger("mkdocs.pagegen")

# The pages of the API: title, modules whose public names they hold, and what a reader is told first.
API = {
    "spec": ("Values", ["pagegen.spec"], "Every value is frozen, checked when made, and hashable. A name that ends in "
             "a unit (`_us`, `_bytes`, `_gib`) is in that unit."),
    "ops": ("Operators", ["pagegen.ops", "pagegen.reference"], "`paged_attention`, `write_kv`, `rope_write_kv`, "
            "`update_scales`, `copy_blocks` and `merge_states` are also operators under `torch.ops.pagegen`, which "
            "`torch.compile` keeps whole. `reference_attention` is what attention means, in float64."),
    "cache": ("Caches", ["pagegen.cache"], "Which block holds what, for whom. `PagedKVCache` has the tensors, "
              "`BlockAllocator` the books alone."),
    "db": ("Database", ["pagegen.db", "pagegen.selection"], "`pagegen.open_db` gives a `Database`; its answers and "
           "their grades are described in [answers of the database](../database.md)."),
    "modifiers": ("Modifiers", ["pagegen.modifiers"], "Score and mask functions, and those that ship. "
                  "[Score and mask functions](../modifiers.md) is the introduction."),
    "pagegen_autotune": ("Tuner", ["pagegen_autotune"], "Traces, profiles, search and measurement."),
    "serving": ("Serving", ["pagegen.serving"], "Which requests share a step, and what they waited."),
    "integrations": ("Integrations", ["pagegen.integrations.transformers", "pagegen.integrations.generation",
                     "pagegen.integrations.flash_attn_compat", "pagegen.integrations.sharding",
                     "pagegen.integrations.block_spread", "pagegen.integrations.context_share",
                     "pagegen.integrations.context_parallel"], "Other projects' models, and several devices. "
                     "The backends of [vLLM and SGLang](../engines.md) are chosen by name: there is nothing to call."),
}  # fmt: skip
# Files from elsewhere in the repository that pages show.
SHOWN = {"figures/cpu.svg": "bench/results/cpu.svg"}


def names_of(module: str) -> list[str]:
    """The public names of a module: its `__all__`, what `pagegen` takes from it, or what it defines without an
    underscore."""
    import pagegen

    loaded = importlib.import_module(module)
    if not hasattr(loaded, "__all__") and module in pagegen._HOMES:
        return list(pagegen._HOMES[module])
    own = [n for n, v in vars(loaded).items() if not n.startswith("_") and getattr(v, "__module__", None) == module]
    return list(getattr(loaded, "__all__", [name for name in own if callable(getattr(loaded, name))]))


def shown_as(module: str, name: str) -> str:
    """The name that people import: `pagegen.Target` lives in `pagegen.spec`."""
    import pagegen

    return f"pagegen.{name}" if name in pagegen._HOMES.get(module, ()) else f"{module}.{name}"


def api_page(title: str, modules: list[str], intro: str) -> str:
    """One page of the API as mkdocstrings reads it; what is importable from the top comes first."""
    found = [(shown_as(module, name), f"{module}.{name}") for module in modules for name in names_of(module)]
    found.sort(key=lambda pair: pair[0].count("."))
    parts = [f"# {title}\n\n{intro}\n"]
    for heading, home in found:
        options = f"    options:\n      heading: {heading}\n      toc_label: {heading.split('.')[-1]}\n"
        anchor = f"[](){{#{heading}}}\n\n" if heading != home else ""
        parts.append(f"{anchor}::: {home}\n{options}")
    return "\n".join(parts)


def api_index() -> str:
    """Every public name with the first sentence of its docstring."""
    lines = [
        "# Reference", "",
        "Everything public, from the docstrings. Names of one dot are what most programs need; `pagegen.spec.Target` "
        "is the same as `pagegen.Target`. The [command line](../cli.md) has a page of its own.",
    ]  # fmt: skip
    for page, (title, modules, _) in API.items():
        lines += ["", f"## {title}", "", "| name | |", "| --- | --- |"]
        for module in modules:
            for name in names_of(module):
                value = getattr(importlib.import_module(module), name)
                heading = shown_as(module, name)
                lines.append(f"| [`{heading}`]({page}.md#{heading}) | {first_sentence(value)} |")
    return "\n".join(lines) + "\n"


def first_sentence(value: Any) -> str:
    """Of a class's or function's docstring, in one line; "" for a plain constant, whose type's would mislead."""
    text = (value.__doc__ or "") if isinstance(value, type) or hasattr(value, "__code__") else ""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    return escaped(re.split(r"(?<=[.])\s", paragraph)[0].rstrip("."))


def cli_page() -> str:
    """Every command with its help, arguments and options, as click knows them."""
    import click

    from pagegen.cli.main import main

    text = ["# Command line", "", "Written from the commands themselves. Every command has `--json`, which prints one "
            "document on standard output (progress goes to standard error), and exits with 0 on success, 2 on bad "
            "usage and 1 on a failure, which it tells in one line."]  # fmt: skip
    text += command_text(main, click.Context(main, info_name="pagegen"))
    return "\n".join(text) + "\n"


def command_text(command: click.Command, context: click.Context) -> list[str]:
    """The section of one command, and of those below it."""
    import click

    lines = ["", f"## {context.command_path}", "", (command.help or "").strip().replace("\f", "")]
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            lines += command_text(child, click.Context(child, parent=context, info_name=name))
        return lines
    lines += ["", "```text", command.get_usage(context), "```", "", "| option | |", "| --- | --- |"]
    records = [record for parameter in command.get_params(context) if (record := parameter.get_help_record(context))]
    return lines + [f"| `{option}` | {escaped(told)} |" for option, told in records]


def escaped(text: str) -> str:
    """Plain text, which may have code between backticks, as a cell of a table."""
    return " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*")


def schema_page() -> str:
    """The tables as SQLAlchemy has them, with the words that the schema's own comments say."""
    from pagegen.db import schema

    text = ["# Database schema", "", f"Schema version {schema.SCHEMA_VERSION}, written from the tables in "
            "`pagegen/db/schema.py`. SQLite and PostgreSQL have the same tables. [Ask the database](asking.md) shows "
            "how to read them.", "", (schema.__doc__ or "").split("\n\n", 1)[1].strip()]  # fmt: skip
    said = schema_comments()
    text += ["", "```text", *[f"{t.name} -> {', '.join(p)}" for t in schema.metadata.sorted_tables if (p := refers(t))]]
    text.append("```")
    for table in schema.metadata.sorted_tables:
        text += ["", f"## {table.name}", "", "| column | type | |", "| --- | --- | --- |"]
        for column in table.columns:
            notes = [
                *(["primary key"] if column.primary_key else []),
                *[f"refers to `{key.column.table.name}`" for key in column.foreign_keys],
                *(["unique"] if column.unique else []), *(["may be null"] if column.nullable else []),
                *(["indexed"] if column.index else []), said.get((table.name, column.name), ""),
            ]  # fmt: skip
            text.append(f"| `{column.name}` | {column.type} | {escaped('; '.join(note for note in notes if note))} |")
        for index in sorted((i for i in table.indexes if len(i.columns) > 1), key=lambda i: str(i.name)):
            text += ["", f"Index `{index.name}` over " + ", ".join(f"`{c.name}`" for c in index.columns) + "."]
    return "\n".join(text) + "\n"


def refers(table: Table) -> list[str]:
    """The tables that a table's rows refer to."""
    return [key.column.table.name for column in table.columns for key in column.foreign_keys]


def schema_comments() -> dict[tuple[str, str], str]:
    """(table, column) -> the comment behind the column in the source, or on the line before it."""
    comments: dict[tuple[str, str], str] = {}
    table = above = ""
    for line in (ROOT / "pagegen" / "db" / "schema.py").read_text(encoding="utf-8").splitlines():
        opened = re.search(r'(?:_table|Table)\(\s*(?:"(\w+)")?', line)
        if opened and not line.startswith((" ", "def ")):
            table = opened[1] or line.split(" ")[0]
        column = re.search(r'Column\("(\w+)"', line)
        behind = re.search(r"#\s+(.+)$", line)
        if column and (behind or above):
            comments[table, column[1]] = behind[1] if behind else above
        above = line.strip().removeprefix("# ") if line.strip().startswith("#") else ""
    return comments


def generated() -> dict[str, str]:
    """Every page that is written from the code, by its place in the site."""
    pages = {f"reference/{name}.md": api_page(*parts) for name, parts in API.items()}
    return {**pages, "reference/index.md": api_index(), "cli.md": cli_page(), "schema.md": schema_page()}


def on_files(files: Any, config: Any) -> Any:
    """mkdocs: adds the pages that are written here."""
    from mkdocs.structure.files import File

    for path, text in generated().items():
        files.append(File.generated(config, path, content=text))
    for path, source in SHOWN.items():
        files.append(File.generated(config, path, abs_src_path=str(ROOT / source)))
    return files


def on_post_build(config: Any) -> None:
    """mkdocs: looks at what was built, and warns, which fails the build."""
    for problem in problems(Path(config["site_dir"])):
        LOG.warning(problem)


def problems(site: Path) -> list[str]:
    """What is wrong with a built site: something that a browser would fetch from elsewhere, a public name without its
    place in the reference, a docstring whose asterisks were taken for emphasis."""
    found = []
    for path in sorted(site.rglob("*.html")):
        html, where = path.read_text(encoding="utf-8"), path.relative_to(site)
        fetched = re.findall(r"<(?:script|img|link|iframe)\b[^>]*?\b(?:src|href)=[\"']?((?:https?:)?//[^\"'> ]+)", html)
        found += [f"{where} loads {address}" for address in fetched]
        if where.parent.name == "reference" and (broken := re.findall(r"<(?:em|strong)>.{,60}", html)):
            found.append(f"{where}: a docstring needs backticks around {broken[0]}")
    for page, (_, modules, _) in API.items():
        html = (site / "reference" / f"{page}.html").read_text(encoding="utf-8")
        names = [shown_as(module, name) for module in modules for name in names_of(module)]
        found += [f"reference/{page}.html lacks {name}" for name in names if f'id="{name}"' not in html]
    return found
