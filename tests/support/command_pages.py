"""The page of every verb, `docs/commands.md`, from the parsers. Write it anew: `python -m tests.support.command_pages`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from shardwise.cli import app

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"
HEAD = """# Commands

Every verb with its arguments and options, as its parser has them; `shardwise VERB --help` says the same. Exit codes: 0 done, 2 wrong use
or configuration, 3 infeasible, 4 a run or a check failed, 75 stopped and to be resumed, 130 interrupted. `shardwise --install-completion`
completes verbs, options, models and machines in bash, zsh and fish.

With `--json` a verb writes one object on standard output and nothing else. Its `version` is {version}: the number grows when a key is
removed or means something else; keys may come without. The [schemas](https://json-schema.org) lie in `docs/json`, one a verb, for
{schemas}. An error is the object of `error`.
"""


def commands() -> Iterator[tuple[str, Any]]:
    """Names and parsers of all verbs that help lists."""
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        if inner:
            yield from ((f"{name} {sub}", inner[sub]) for sub in inner if not inner[sub].hidden)
        elif not command.hidden:
            yield name, command


def section_of(name: str, command: Any) -> str:
    """The section of one verb."""
    text, _, example = (command.help or "").partition("\b\n")
    paragraphs = [" ".join(p.split()) for p in text.replace("\b", "").strip().split("\n\n") if p.strip()]
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    words = [p.make_metavar(_context(command)) if not p.metavar else p.metavar for p in arguments]
    lines = [f"## shardwise {name}", "", f"`shardwise {name} {' '.join([*words, '[OPTIONS]'])}`", "", *_joined(paragraphs)]
    if arguments or options:
        lines += ["| | |", "|---|---|"]
        lines += [f"| `{(p.metavar or p.name.upper()).replace('|', chr(92) + '|')}` | {_cell(p.help)} |" for p in arguments]
        lines += [f"| {_flags(p)} | {_cell(p.help)}{_default(p)} |" for p in options]
        lines.append("")
    if examples := re.findall(r"^ *(shardwise .*)$", example, re.M):
        lines += ["For example:", "", *(f"- `{example}`" for example in examples), ""]
    return "\n".join(lines)


def _context(command: Any) -> Any:
    return typer.Context(command)


def _joined(paragraphs: list[str]) -> list[str]:
    return [line for paragraph in paragraphs for line in (_cell(paragraph), "")]


def _flags(option: Any) -> str:
    value = "" if option.is_flag else f" {option.metavar or 'VALUE'}"
    return ", ".join(f"`{flag}{value}`".replace("|", "\\|") for flag in option.opts)


def _default(option: Any) -> str:
    if option.is_flag or not option.show_default or option.default in (None, "", ()) or callable(option.default):
        return ""
    return f" Default: `{option.default}`."


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def page() -> str:
    """The whole page."""
    from shardwise.cli.output import JSON_VERSION
    from tests.support.json_schemas import COMMANDS

    schemas = ", ".join(f"`{name}.json`" for name in COMMANDS)
    return "\n".join([HEAD.format(version=JSON_VERSION, schemas=schemas), *(section_of(name, command) for name, command in commands())])


if __name__ == "__main__":
    PAGE.write_text(page())
