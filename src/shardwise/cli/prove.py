"""`shardwise prove`: prove that layouts, or a plan, compute what the serial model does, without a tolerance; exit 4 if one does not."""

from __future__ import annotations

from typing import Annotated

import typer

from shardwise.cli import options
from shardwise.cli.output import open_output
from shardwise.errors import UsageError, VerifyError
from shardwise.report.tables import TextTable

_MODEL = """A zoo name (gpt-10m, gpt:layers=12,hidden=768), hf:CONFIG.json, FILE.py:FACTORY that returns a module,
(module, batch) or (module, batch, loss); or a PLAN.toml, whose layout, shards and stages are then proven."""
_LAYOUTS = 'The layout, as often as needed: "data=2 tensor=2 pipeline=2 microbatches=4". The model is traced once for all of them.'
_OWN_SHARDS = "Shard weights as the planner would, which leaves small models whole, instead of wherever the rules allow."
_PROBABILITY = "At most with which a wrong plan passes; it determines the number of random points."


_REDUCED = """Reduce to so many ranks along every axis (2 or 3), and a zoo model to the smallest sizes that these divide alike; 0: to 2 if
there are more than 16 ranks, or a zoo model has more than 2^20 parameters."""
_WHOLE = "Prove plans as they are, however large."


def prove(  # noqa: PLR0913
    model: Annotated[str, typer.Argument(metavar="MODEL|PLAN.toml", help=_MODEL, show_default=False)],
    layout: Annotated[list[str] | None, typer.Option("--layout", metavar='"KEY=N ..."', help=_LAYOUTS, show_default=False)] = None,
    batch: options.Batch = None,
    sequence: options.Sequence = None,
    steps: Annotated[int, typer.Option("--steps", min=1, metavar="N", help="Training steps to compare.")] = 1,
    optimizer: Annotated[str, typer.Option("--optimizer", metavar="NAME", help="Of torch.optim, whose update is proven too.")] = "adamw",
    planned_shards: Annotated[bool, typer.Option("--planned-shards", help=_OWN_SHARDS)] = False,
    probability: Annotated[float, typer.Option("--probability", metavar="P", help=_PROBABILITY)] = 1e-12,
    ranks_per_axis: Annotated[int, typer.Option("--ranks-per-axis", min=0, metavar="N", help=_REDUCED)] = 0,
    whole: Annotated[bool, typer.Option("--whole", help=_WHOLE)] = False,
    as_json: options.Json = False,
) -> None:
    """Prove layouts without a tolerance.

    Every rank runs as a thread of this process, on whole numbers modulo a prime, in which sums are exact; gradients,
    updated weights and optimizer state of every rank must equal the serial model's. Rounding is left to verify.

    \b
    Example:
      shardwise prove gpt-tiny --layout "tensor=2" --layout "pipeline=2 microbatches=2"
      shardwise prove examples/own_model.py:make --layout "data=2 tensor=2 zero=1"
      shardwise prove plan.toml
      shardwise prove llama-405b --layout "data=128 tensor=8 pipeline=16 microbatches=16"
    """
    if layout and model.endswith(".toml"):
        raise UsageError(f"{model} is a plan, which has a layout of its own; leave --layout out, or plan again")
    with open_output(as_json) as out:
        from shardwise.api_prove import prove as prove_model  # here: the command starts fast

        wanted = None if model.endswith(".toml") else layout or ["data=2"]
        with out.working(f"proving {', '.join(wanted or [model])}"):
            proved = prove_model(
                model, wanted, batch, optimizer=optimizer, steps=steps, sequence=sequence, cut_everything=not planned_shards,
                max_error_probability=probability, ranks_per_axis=ranks_per_axis, whole=whole,
            )  # fmt: skip
        proofs = proved if isinstance(proved, tuple) else (proved,)
        rows = tuple((proof.layout, str(proof.points), proof.outcome) for proof in proofs)
        out.table(TextTable(model, ("layout", "points", "outcome"), rows, right=(1,)))
        for reduction in dict.fromkeys(proof.reduction for proof in proofs if proof.reduction):
            out.message(reduction)
        out.answer({"ok": all(proof.ok for proof in proofs), "layouts": [proof.record() for proof in proofs]})
        if wrong := next((proof for proof in proofs if not proof.ok), None):
            out.message(f"{wrong.layout} does not compute what the serial model does: {wrong.outcome}")
            raise typer.Exit(VerifyError.exit_code)
