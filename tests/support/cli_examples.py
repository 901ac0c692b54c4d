"""Command lines found in help texts and documents, and whether they would be understood."""

from __future__ import annotations

import re
import shlex

import typer

from shardwise.cli import app


def find(text: str) -> list[list[str]]:
    """Words of every line that calls shardwise, without `shardwise` itself and without comments."""
    return [shlex.split(line, comments=True)[1:] for line in re.findall(r"^ *(shardwise .*)$", text, re.M)]


def require_understood(words: list[str]) -> None:
    """Parse a command line as shardwise would, without running it; unknown verbs and options raise."""
    command = typer.main.get_command(app)
    while getattr(command, "commands", None) and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"shardwise has no verb {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    command.make_context("shardwise", list(words))
