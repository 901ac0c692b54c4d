"""The command line's verbs as functions that return an `Answer`, which prints as the verb does.

Each shares its implementation with the verb of the same name; `answer.record` is the JSON object of `--json`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.api import Model, subject_of
from shardwise.capture.capture import Loss
from shardwise.capture.nesting import batch_size_of
from shardwise.cli.changes import parse_changes
from shardwise.cli.compare import show_plan_comparison, show_timeline_comparison
from shardwise.cli.estimate import show_estimate
from shardwise.cli.explain import MAX_CANDIDATES, show_explanation
from shardwise.cli.output import CommandOutput, as_json, show_table
from shardwise.cli.pricing_context import PricingContext, pricing_context_of_name
from shardwise.cli.report import subject_of_plan, write, write_page
from shardwise.cli.scaling import device_counts, show_scaling
from shardwise.cli.whatif import show_changes
from shardwise.cluster.cluster import Cluster
from shardwise.cluster.resize import resize_cluster
from shardwise.errors import UsageError
from shardwise.plan.ir.timeline import Timeline
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.plan.plan_file import read_plan
from shardwise.report.notebook import html_table
from shardwise.report.tables import TextTable
from shardwise.zoo.resolved import ResolvedModel

if TYPE_CHECKING:
    from rich.text import Text
    from torch import nn


class Answer(CommandOutput):
    """The result of `shardwise.explain` and similar functions: `tables`, `record` as of `--json`; `str` draws the tables."""

    def __init__(self) -> None:
        super().__init__(None)
        self.record: dict[str, object] = {}
        self._entries: list[TextTable | str] = []

    @property
    def tables(self) -> tuple[TextTable, ...]:
        return tuple(entry for entry in self._entries if isinstance(entry, TextTable))

    def __getitem__(self, key: str) -> Any:
        return self.record[key]

    def text(self, text: str) -> None:
        self._entries.append(text)

    def picture(self, picture: Text) -> None:
        self._entries.append(picture.plain)

    def table(self, table: TextTable) -> None:
        self._entries.append(table)

    def message(self, text: str) -> None:
        self._entries.append(text)

    def answer(self, record: Mapping[str, object]) -> None:
        self.record = {key: as_json(value) for key, value in record.items()}

    def __str__(self) -> str:
        from io import StringIO  # here: the command starts fast

        from rich.console import Console

        buffer = StringIO()
        console = Console(file=buffer, width=120, highlight=False, markup=False, emoji=False)
        for entry in self._entries:
            if isinstance(entry, TextTable):
                show_table(entry, console)
            else:
                console.print(entry, soft_wrap=True)
        return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return "".join(html_table(entry) if isinstance(entry, TextTable) else f"<p>{escape(entry)}</p>" for entry in self._entries)


def explain(
    plan: Plan | str | Path,
    model: Model | None = None,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    cluster: Cluster | str | None = None,
    candidates: int = MAX_CANDIDATES,
    brief: bool = False,
) -> Answer:
    """Explain a plan: candidates, reasons, prices of other choices, the optimality bound, placements of each layer.

    Args:
        plan: a `Plan`, or a plan file. model, batch, loss: as of `shardwise.plan`, where the plan does not name its model.
        cluster: other machines than the plan's. candidates: rows of their table. brief: only what the plan itself says.

    Raises:
        UsageError: the plan names no model that shardwise can build, and none is given. Infeasible: the plan does not fit the cluster.

    >>> import shardwise
    >>> chosen = shardwise.plan("gpt-tiny", 8, cluster="1xcpu-2")
    >>> shardwise.explain(chosen)["model"]
    'gpt-tiny'
    """
    read, out = _load_plan(plan), Answer()
    show_explanation(read, _context_of_plan(read, model, batch, loss, cluster), out, candidates, brief)
    return out


def whatif(
    plan: Plan | str | Path,
    *changes: str,
    model: Model | None = None,
    batch: Any = None,
    loss: Loss | None = None,
    cluster: Cluster | str | None = None,
    replan: bool = False,
) -> Answer:
    """Price a plan under changes: each change alone, then all together.

    Args:
        changes: "gpus=16", "seq=2048", "batch=64", "cluster=8xdgx-h100", or a key of the layout, "zero=3".
        replan: also the best plan for each change. The rest as of `explain`.

    Raises:
        UsageError: an unknown key (names the nearest), no change, or a value that the key cannot have.
    """
    read, out = _load_plan(plan), Answer()
    show_changes(read, _context_of_plan(read, model, batch, loss, cluster), parse_changes(changes), out, replan, read.model)
    return out


def compare(
    first: Plan | Timeline | str | Path,
    second: Plan | Timeline | str | Path,
    model: Model | None = None,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    cluster: Cluster | str | None = None,
) -> Answer:
    """Compare two plans side by side, each priced on its own machines, or two timelines kind by kind. Arguments as of `explain`.

    Raises:
        UsageError: a plan and a timeline.
    """
    out = Answer()
    if isinstance(first, Timeline) and isinstance(second, Timeline):
        show_timeline_comparison(first, second, out)
        return out
    if isinstance(first, Timeline) or isinstance(second, Timeline):
        raise UsageError(
            "a plan and a timeline have nothing to compare; give two of a kind (shardwise.simulate(plan) is a plan's timeline)"
        )
    plans = _load_plan(first), _load_plan(second)
    priced = [
        _context_of_plan(plan, model, batch, loss, cluster).price_plan(plan, name)
        for plan, name in zip(plans, ("first", "second"), strict=True)
    ]
    show_plan_comparison(plans, priced, out)
    return out


def estimate(  # noqa: PLR0913
    model: Model,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    cluster: Cluster | str = "here",
    tokens: float | str | None = None,
    epochs: float | None = None,
    sequence: int | None = None,
    gpus: int | None = None,
    constraints: str | Sequence[str] = "",
) -> Answer:
    """Estimate training: time, dollars, kWh, memory, and the assumptions.

    Args:
        model, batch, loss: as of `shardwise.plan`; without a batch a usual one. cluster: the machines, `gpus` of them.
        tokens: to train on, 300e9 or "300B"; by default 20 a parameter. epochs: of ImageNet-1k, for models of images.

    Raises:
        UsageError: tokens for images, epochs for text.
    """
    machines = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    if gpus is not None:
        machines = resize_cluster(machines, gpus)
    name, first, size = _first_context(model, batch, loss, machines, sequence)
    out = Answer()
    words = [constraints] if isinstance(constraints, str) else constraints
    show_estimate(first, name, size, None if tokens is None else str(tokens), epochs, words, out)
    return out


def scaling(  # noqa: PLR0913
    model: Model,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    cluster: Cluster | str = "here",
    devices: Sequence[int] = (),
    weak: bool = False,
    sequence: int | None = None,
    layout: Layout | str | None = None,
    constraints: str | Sequence[str] = "",
) -> Answer:
    """Plan a model for several numbers of devices: step time, speed-up and efficiency of each.

    Args:
        model, batch, loss: as of `shardwise.plan`. devices: numbers of them; by default one machine, two, four, ... up to the cluster.
        weak: the batch grows with the devices. layout: priced as it is, with as many data replicas as fill the devices.

    Raises:
        UsageError: a batch that the devices do not divide.

    >>> import shardwise
    >>> shardwise.scaling("gpt-tiny", 8, cluster="1xcpu-2", devices=[1, 2])["sizes"][0]["speedup"]
    1.0
    """
    machines = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    words = ",".join(map(str, devices)) if devices else None
    counts = device_counts(words, machines.node_size, machines.num_devices)
    name, first, _ = _first_context(model, batch, loss, machines, sequence)
    fixed = Layout.parse(layout) if isinstance(layout, str) else layout
    out = Answer()
    limits = [constraints] if isinstance(constraints, str) else constraints
    show_scaling(first, name, counts, out, weak=weak, layout=fixed, constraints=limits)
    return out


def report(subject: Plan | str | Path, target: str | Path = "report.html") -> Path:
    """Write a page about a run's folder, a plan file or a plan; returns its path.

    Raises:
        UsageError: a subject that cannot be read, or a target that cannot be written.
    """
    page = Path(target)
    if isinstance(subject, Plan):
        write(subject_of_plan(subject, timeline=True), page)
    else:
        write_page(Path(subject), page, timeline=True)
    return page


def _first_context(
    model: Model, batch: Any, loss: Loss | None, machines: Cluster, sequence: int | None
) -> tuple[str, PricingContext, int | None]:
    """Return a model's name, its pricing context, and the given batch size, None where none was given."""
    size = batch if isinstance(batch, int) else None if batch is None else batch_size_of(batch)
    if isinstance(model, str):
        setting = pricing_context_of_name(model, machines, size, sequence)
        return setting.model, setting, size
    resolved, module = _resolve_module(model, batch, loss)
    size = size or resolved.default_batch
    return resolved.name, PricingContext(resolved.name, machines, size, None, resolved, module), size


def _load_plan(source: Plan | str | Path) -> Plan:
    return source if isinstance(source, Plan) else read_plan(source)


def _context_of_plan(plan: Plan, model: Model | None, batch: Any, loss: Loss | None, cluster: Cluster | str | None) -> PricingContext:
    """Build a plan's pricing context: `cluster` and `model`, or those that the plan names."""
    machines = cluster if isinstance(cluster, Cluster) else Cluster.parse(cluster or plan.cluster)
    if model is None or isinstance(model, str):
        return PricingContext(model or plan.model, machines, plan.batch_size)
    resolved, module = _resolve_module(model, batch, loss)
    return PricingContext(resolved.name, machines, plan.batch_size, None, resolved, module)


def _resolve_module(
    model: nn.Module | Callable[[], nn.Module] | ResolvedModel, batch: Any, loss: Loss | None
) -> tuple[ResolvedModel, nn.Module | None]:
    """Resolve a model object, with the given batch as its only one; and return the module, if it is one."""
    if isinstance(model, ResolvedModel):
        return model, None
    name, make, inputs, loss = subject_of(model, batch, loss)
    size = batch_size_of(inputs)

    def given_batch(wanted: int) -> Any:
        if wanted != size:
            raise UsageError(f"{name} was given with a batch of {size} samples, and {wanted} are asked for; give it with such a batch")
        return inputs

    from torch import nn  # here: the command starts fast

    if isinstance(make, nn.Module):
        return ResolvedModel(name, lambda: make, given_batch, loss, size), make
    return ResolvedModel(name, make, given_batch, loss, size), None
