"""Typer arguments and options that several verbs share, and the parser of CLUSTER."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shardwise.cli.output import CommandOutput
    from shardwise.cluster.cluster import Cluster

_MODEL = """A zoo name (gpt-10m, gpt:layers=12,hidden=768), hf:CONFIG.json, or FILE.py:FACTORY that returns a module,
(module, batch) or (module, batch, loss)."""
_LAYOUT = 'The layout by hand: "data=2 tensor=2 pipeline=2 microbatches=4".'
_CLUSTER = "Machines: here (measured), COUNTxNAME such as 8xp3.16xlarge, '4 devices of dgx-h100', or a file that probe wrote."
_CONSTRAIN = (
    'Constrain the search; repeat as needed: --constrain "tensor<=8". Gradients are compressed only where this says so: "compress=int8".'
)


def complete_model(incomplete: str) -> list[str]:
    """Return the zoo's names that begin with what is typed, for the shell's completion."""
    from shardwise.zoo.listing import zoo_names  # here: the command starts fast

    return [name for name in zoo_names() if name.startswith(incomplete)]


def complete_cluster(incomplete: str) -> list[str]:
    """Return the catalogue's machines that begin with what is typed, after its count, for the shell's completion."""
    from shardwise.cluster.catalogue import catalogue_names  # here: the command starts fast

    count, times, name = incomplete.partition("x") if incomplete[:1].isdigit() else ("", "", incomplete)
    names = [f"{count}{times}{one}" for one in catalogue_names() if one.startswith(name)]
    return [*(["here"] if "here".startswith(incomplete) else []), *names]


Model = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL, show_default=False, autocompletion=complete_model)]
Batch = Annotated[int | None, typer.Option("--batch", min=1, metavar="N", help="Samples a step, over all ranks.", show_default=False)]
Sequence = Annotated[int | None, typer.Option("--sequence", min=1, metavar="N", help="Tokens a sample.", show_default=False)]
LayoutText = Annotated[str | None, typer.Option("--layout", metavar='"KEY=N ..."', help=_LAYOUT, show_default=False)]
ClusterText = Annotated[str, typer.Option("--cluster", metavar="CLUSTER", help=_CLUSTER, autocompletion=complete_cluster)]
Constraints = Annotated[list[str] | None, typer.Option("--constrain", metavar='"KEY<=N"', help=_CONSTRAIN, show_default=False)]
DeviceMemory = Annotated[
    str | None, typer.Option("--device-memory", metavar="SIZE", help="Memory limit of a rank, also in a run: 2GiB.", show_default=False)
]
Trials = Annotated[
    int,
    typer.Option("--trials", min=0, metavar="N", help="Run the N plans predicted fastest for some steps here; take the fastest."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output and nothing else there.")]
OutFile = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write it to this file.", show_default=False)]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.toml, as shardwise plan -o writes it.", show_default=False)]
OtherCluster = Annotated[
    str | None, typer.Option("--cluster", metavar="CLUSTER", help="Other machines than the plan's.", show_default=False)
]


def load_cluster(text: str, out: CommandOutput) -> Cluster:
    """Return the cluster that CLUSTER names; `here` is measured once and cached."""
    if text == "here":
        from shardwise.cluster.probe import probe  # here: the command starts fast

        with out.working("measuring this machine (some seconds)"):
            return probe()
    from shardwise.cluster.cluster import Cluster  # here: the command starts fast

    return Cluster.parse(text)
