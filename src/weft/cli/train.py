"""`weft train`: plan, launch, train, resume. In: a configuration file and `key=value` words. Out: a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.cli import options
from weft.cli.output import output


def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="What to train, on what, for how long.", show_default=False)],
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the configuration to set instead.", show_default=False)
    ] = None,
    layout: options.LayoutText = None,
    as_json: options.Json = False,
) -> None:
    """Plan, launch and train; again, go on.

    Run again with the same configuration, it goes on from the last checkpoint.

    \b
    Example:
      weft train examples/gpt_text.toml
      weft train examples/gpt_text.toml steps=100 --layout "data=2"
    """
    with output(as_json) as out:
        from weft.train.flow import train as run

        words = [*(changes or ()), *([f"plan.layout={layout}"] if layout is not None else [])]
        out.answer(run(config, words))
