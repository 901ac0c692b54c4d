"""`shardwise cache`: show the folder, number and size of the captures that are cached on disk; `--clear` removes them."""

from __future__ import annotations

from typing import Annotated

import typer

from shardwise.cli import options
from shardwise.cli.output import open_output
from shardwise.units import format_bytes


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove all of them.")] = False,
    as_json: options.Json = False,
) -> None:
    """Show the captures of models that are kept on disk, or clear them.

    A model is traced once; the next start finds its capture, if code, configuration and versions are the same. SHARDWISE_CACHE=off keeps
    none,
    SHARDWISE_CACHE=FOLDER keeps them there.

    \b
    Example:
      shardwise cache
      shardwise cache --clear
    """
    with open_output(as_json) as out:
        from shardwise.capture.cache.store import ENVIRONMENT_VARIABLE, OFF_WORDS, CaptureStore  # here: the command starts fast

        store = CaptureStore.from_environment()
        if store is None:
            out.text(f"{ENVIRONMENT_VARIABLE} is one of {', '.join(OFF_WORDS)}: nothing is kept")
            out.answer({"folder": None, "files": 0, "bytes": 0, "removed": 0})
            return
        removed = store.clear() if clear else 0
        sizes = [about.st_size for _, about in store.files()]
        removal = f", {removed} removed" if clear else ""
        out.text(f"{store.folder}: {len(sizes)} captures, {format_bytes(sum(sizes))} of at most {format_bytes(store.max_bytes)}{removal}")
        out.answer({"folder": str(store.folder), "files": len(sizes), "bytes": sum(sizes), "removed": removed})
