"""`shardwise probe`: measure this machine. In: nothing. Out: a table, and a cluster file that `--cluster` takes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from shardwise.cli import options
from shardwise.cli.output import open_output, write_file
from shardwise.report.cluster_tables import cluster_tables


def probe(
    target: options.OutFile = None,
    full: Annotated[bool, typer.Option("--full", help="More sizes and ranks: longer, and more exact.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again, even where a stored result fits.")] = False,
    as_json: options.Json = False,
) -> None:
    """Measure this machine.

    Matrix products, memory, and collectives between processes. The result is kept in the user's cache and is what `--cluster here` means.

    \b
    Example:
      shardwise probe -o cluster.toml
    """
    with open_output(as_json) as out:
        from shardwise.cluster.catalogue import dump  # here: the command starts fast
        from shardwise.cluster.probe import probe as measure

        with out.working("measuring this machine (some seconds)"):
            cluster = measure(not full, fresh=fresh or full)
        if target is not None:
            write_file(target, dump(cluster))
            out.message(f"written to {target}; use it with --cluster {target}")
        for table in cluster_tables(cluster):
            out.table(table)
        out.answer(asdict(cluster))
