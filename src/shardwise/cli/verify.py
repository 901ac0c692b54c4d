"""`shardwise verify`: compare parallel runs of layouts, or of a plan, with the serial run; exit 4 above the tolerance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli import options
from shardwise.cli.output import CommandOutput, open_output
from shardwise.errors import UsageError, VerifyError, did_you_mean
from shardwise.report.tables import TextTable, measured_memory_table

if TYPE_CHECKING:
    from shardwise.plan.layout import Layout
    from shardwise.plan.plan import Plan
    from shardwise.run.verify.verification import Verification
    from shardwise.zoo.resolved import ResolvedModel

DEVICES = ("cpu", "cuda", "auto")
_SCHEDULE = "A schedule of your own: the same as schedule=FILE in the layout."
_LAYOUTS = 'The layout, as often as needed: "data=2 tensor=2 pipeline=2 microbatches=4". The model is traced once for all of them.'
_DTYPE = "float64, float32, bfloat16 or float16; by default what the layout says (precision=bfloat16), or float64."
_DEVICE = "Where ranks run: cpu, cuda or auto. Several ranks share a GPU where there are more of them."
_CUT = "Shard weights wherever the rules allow, even where it does not pay; small models are otherwise not sharded."
_LOOP = """A script with a training loop of its own (shardwise.auto_parallelize), with its arguments in quotes, instead of a model:
losses, gradients, weights, optimizer state and buffers are compared, over --steps steps of its optimizers."""
_MODEL = """A zoo name (gpt-10m, gpt:layers=12,hidden=768), hf:CONFIG.json, FILE.py:FACTORY that returns a module,
(module, batch) or (module, batch, loss); or a PLAN.toml, whose layout, cuts and stages are then verified."""


def verify(  # noqa: PLR0913
    model: Annotated[str | None, typer.Argument(metavar="MODEL|PLAN.toml", help=_MODEL, show_default=False)] = None,
    loop: Annotated[str | None, typer.Option("--loop", metavar="FILE", help=_LOOP, show_default=False)] = None,
    layout: Annotated[list[str] | None, typer.Option("--layout", metavar='"KEY=N ..."', help=_LAYOUTS, show_default=False)] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, metavar="N", help="Check that the layout has N ranks.", show_default=False)
    ] = None,
    batch: options.Batch = None,
    sequence: options.Sequence = None,
    steps: Annotated[int, typer.Option("--steps", min=1, metavar="N", help="Training steps to compare.")] = 2,
    dtype: Annotated[str | None, typer.Option("--dtype", metavar="TYPE", help=_DTYPE, show_default=False)] = None,
    tolerance: Annotated[
        float | None, typer.Option("--tolerance", metavar="X", help="Largest relative error; 1e-9 in float64.", show_default=False)
    ] = None,
    cut_everything: Annotated[bool, typer.Option("--cut-everything", help=_CUT)] = False,
    device: Annotated[str, typer.Option("--device", metavar="NAME", help=_DEVICE)] = "cpu",
    device_memory: options.DeviceMemory = None,
    schedule: Annotated[Path | None, typer.Option("--schedule", metavar="FILE", help=_SCHEDULE, show_default=False)] = None,
    as_json: options.Json = False,
) -> None:
    """Compare layouts with the serial model.

    It starts the ranks and compares loss, gradients and updated weights of every rank. It reports the share of the
    model that each axis shards; sharding is proven only for that share. Without --layout, --ranks N means data=N.

    \b
    Example:
      shardwise verify examples/own_model.py:make --layout "data=2 tensor=2"
      shardwise verify gpt-tiny --layout "tensor=2" --layout "pipeline=2 microbatches=2" --cut-everything
      shardwise verify hf:gpt2.json --layout "pipeline=2 microbatches=4" --batch 8 --sequence 32
      shardwise verify plan.toml
      shardwise verify --loop "train.py --epochs 1" --layout "data=2 zero=3" --steps 4
    """
    with open_output(as_json) as out:
        if loop is not None:
            _refuse_beside_loop(MODEL=model, schedule=schedule, cut_everything=cut_everything)
            return _verify_loop(out, loop, layout, ranks, steps, tolerance)
        model = _check_words(device, dtype, model)
        plan = _read_plan_to_verify(model, batch, layout, schedule) if model.endswith(".toml") else None
        batch = plan.batch_size if plan is not None else batch
        layouts = [plan.layout] if plan is not None else [_with_schedule(text, schedule) for text in layout or [f"data={ranks or 1}"]]
        _check_ranks(layouts, ranks)
        from shardwise import api  # here: the command starts fast, and says what is wrong with its words before torch is loaded
        from shardwise.zoo.resolve import resolve

        asked = layouts if plan is not None or schedule is not None or not layout else layout
        subject = resolve(plan.model if plan is not None else model, batch, sequence)
        with out.working(f"comparing {', '.join(map(str, layouts))} with the serial model over {steps} steps"):
            result = api.verify(
                subject, plan or asked, batch, steps=steps, dtype=dtype, tolerance=tolerance, device=device,
                device_memory=device_memory or 0, cut_everything=cut_everything,
            )  # fmt: skip
        if len(results := result.layouts or (result,)) > 1:
            _show_all(out, model, results)
        else:
            _show_result(out, model, result := results[0])
            _show_memory(out, result, subject, batch, layouts[0])
        _write_answer(out, result, _describe_undivided(layouts, layout is None and plan is None))
        _exit_if_different(out, result)


def _exit_if_different(out: CommandOutput, result: Verification) -> None:
    if not result.ok:
        out.message(f"the parallel run differs from the serial one above the tolerance, first in {result.first_difference}")
        raise typer.Exit(VerifyError.exit_code)


def _refuse_beside_loop(**given: object) -> None:
    if words := [name if name.isupper() else f"--{name.replace('_', '-')}" for name, value in given.items() if value]:
        raise UsageError(f"--loop has its model, batch and schedule in the script; leave {' and '.join(words)} out")


def _verify_loop(out: CommandOutput, script: str, layout: list[str] | None, ranks: int | None, steps: int, tolerance: float | None) -> None:
    from shardwise.api_loop_verify import verify_loop  # here: the command starts fast
    from shardwise.plan.layout import Layout  # here: the command starts fast

    layouts = [Layout.parse(text) for text in layout or ()]
    _check_ranks(layouts, ranks)
    if len(layouts) > 1:
        raise UsageError("--loop compares one layout at a time; give one --layout")
    num_ranks = layouts[0].num_ranks if layouts else ranks or 2
    with out.working(f"running {script} serially and on {num_ranks} ranks over {steps} steps"):
        result = verify_loop(script, layout[0] if layout else None, num_ranks, steps, tolerance)
    _show_result(out, script, result)
    out.answer(result.record())
    _exit_if_different(out, result)


def _check_words(device: str, dtype: str | None, model: str | None) -> str:
    if model is None:
        raise UsageError("give a MODEL or a PLAN.toml, or --loop FILE with a training loop")
    from shardwise.plan.layout_words import refuse_word  # here: the command starts fast
    from shardwise.zoo.listing import check_model_text

    if not model.endswith(".toml"):
        check_model_text(model)

    if device not in DEVICES:
        raise UsageError(f"--device {device} is unknown{did_you_mean(device, DEVICES)}; use {', '.join(DEVICES)}")
    if dtype is not None and (reason := refuse_word("precision", dtype)):
        raise UsageError(f"--dtype {dtype}: {reason}")
    return model


def _show_memory(out: CommandOutput, result: Verification, subject: ResolvedModel, batch: int | None, layout: Layout) -> None:
    if result.memory:
        from shardwise import api  # here: the command starts fast

        predicted = api.plan(
            subject, batch, cluster="1xcpu-2", layout=replace(layout, precision=result.dtype, gradients="float32")
        ).prediction
        out.table(measured_memory_table(result.memory, predicted.memory if predicted else None))


def _write_answer(out: CommandOutput, result: Verification, undivided: str) -> None:
    """Write the object; `undivided`: the warning that nothing was divided, if so."""
    if undivided:
        out.message(f"warning: {undivided}")
    out.answer({**result.record(), "warnings": [*result.warnings, *([undivided] if undivided else [])]})


def _read_plan_to_verify(file: str, batch: int | None, layout: list[str] | None, schedule: Path | None) -> Plan:
    """Read a plan file; raises UsageError where options contradict its layout or batch size."""
    from shardwise.plan.plan_file import read_plan  # here: the command starts fast

    if layout or schedule:
        raise UsageError(f"{file} is a plan, which has a layout of its own; leave --layout and --schedule out, or plan again")
    plan = read_plan(file)
    if batch not in (None, plan.batch_size):
        raise UsageError(f"{file} is a plan for {plan.batch_size} samples; leave --batch {batch} out, or plan again")
    return plan


def _with_schedule(text: str, schedule: Path | None) -> Layout:
    from shardwise.plan.ir.custom_schedule import read_actions  # here: the command starts fast
    from shardwise.plan.layout import Layout

    layout = Layout.parse(text)
    return layout if schedule is None else layout.with_schedule(schedule.name, read_actions(schedule))


def _describe_undivided(layouts: Sequence[Layout], by_default: bool) -> str:
    """Say that nothing was divided, where no layout has several ranks; empty where one has."""
    if any(layout.num_ranks > 1 for layout in layouts):
        return ""
    why = "no layout was given" if by_default else "the layout has one rank"
    return f'{why}, so nothing was divided: one rank ran the whole model beside itself; for example --layout "data=2"'


def _check_ranks(layouts: Sequence[Layout], ranks: int | None) -> None:
    for layout in layouts:
        if ranks is not None and ranks != layout.num_ranks:
            raise UsageError(
                f"--ranks {ranks}, but the layout {layout} has {layout.num_ranks} ranks; leave --ranks out, or change one of them"
            )


def _show_result(out: CommandOutput, model: str, result: Verification) -> None:
    """Show one layout: errors by kind, what each axis shards, and what is not proven."""
    rows = tuple((name, f"{error:.3g}") for name, error in result.worst.items())
    out.text(f"{model}, {result.layout}: worst {result.unit} over {result.steps} steps in {result.dtype}, tolerance {result.tolerance:.0e}")
    out.table(TextTable("", ("", "error"), rows, right=(1,)))
    for axis, words in result.shares():
        out.text(f"{axis} divides {words}")
    if result.replicated_operators:
        out.text("computed whole on every rank, for want of a rule: " + ", ".join(result.replicated_operators))
    for warning in result.warnings:
        out.message(f"warning: {warning}")
    out.text("the same as the serial model" if result.ok else f"differs first in {result.first_difference}")


def _show_all(out: CommandOutput, model: str, results: Sequence[Verification]) -> None:
    """Show several layouts, a row each."""
    from shardwise.run.verify.verification import summary_notes, summary_table  # here: the command starts fast

    columns, rows = summary_table(results)
    first = results[0]
    title = f"{model}: worst {first.unit} over {first.steps} steps in {first.dtype}, tolerance {first.tolerance:.0e}"
    out.table(TextTable(title, columns, tuple(rows), right=tuple(range(2, len(columns)))))
    for text in summary_notes(results):
        out.text(text)
