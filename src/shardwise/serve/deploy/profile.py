"""Profiling of operator variants: measured on this machine, predicted for devices that are not here.

Measured: seconds of a batch by its size and threads (median, 95th and 99th percentile), bytes of an answer, peak live bytes, and the
accuracy of every choice of variants on labelled requests. Predicted: forward time of the captured model by the cost model
(`shardwise.cost.operators`), without the overhead of serving. A user function cannot be predicted, and is reported as skipped.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from shardwise.capture.capture import capture
from shardwise.capture.fakes import DispatchMode
from shardwise.capture.initialization import DeferredInit
from shardwise.capture.modes import evaluation_modes, in_modes
from shardwise.capture.nesting import tensors_in
from shardwise.cluster.cluster import Cluster
from shardwise.cost.operators.operators import OperatorPricer
from shardwise.errors import ConfigError, ModelError, UsageError
from shardwise.model.graph import Graph
from shardwise.plan.layout import Layout
from shardwise.serve.deploy.dataflow import compute_operator, operators_on_items, requests_of
from shardwise.serve.deploy.operator_runtime import (
    Compute,
    OperatorRuntime,
    Request,
    example_requests,
    load_function,
    load_operator,
    stack_inputs,
    value_bytes,
)
from shardwise.serve.placement.workflow import Machines, OperatorVariant, Workflow, WorkflowOperator
from shardwise.units import format_bytes

MIN_RUNS, ACCURACY_BATCH = 5, 16  # fewest timed runs of a batch; batch size for measuring accuracy
Key = tuple[str, str]  # operator, variant
Say = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class BatchTiming:
    """Seconds of a batch: median, 95th and 99th percentile."""

    median_s: float
    p95_s: float
    p99_s: float

    @classmethod
    def from_samples(cls, seconds: Sequence[float]) -> BatchTiming:
        median, p95, p99 = np.quantile(seconds, (0.5, 0.95, 0.99))
        return cls(float(median), float(p95), float(p99))


@dataclass
class Profile:
    """`measured`: [operator, variant][threads][batch]. `priced`: predicted seconds, [operator, variant][device][batch]. `skipped`: variants
    without a prediction, and why."""

    measured: dict[Key, dict[int, dict[int, BatchTiming]]] = field(default_factory=dict)
    priced: dict[Key, dict[str, dict[int, float]]] = field(default_factory=dict)
    output_bytes: dict[Key, float] = field(default_factory=dict)
    memory_bytes: dict[Key, float] = field(default_factory=dict)
    accuracy: dict[tuple[str, ...], float] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    def latency_s(self, key: Key, machines: Machines) -> dict[str, dict[int, float]]:
        """Seconds of a variant by worker and batch, without workers that cannot run it or have no prediction."""
        out: dict[str, dict[int, float]] = {}
        for w in machines.workers:
            measured = {batch: t.median_s for batch, t in self.measured[key].get(w.threads, {}).items()}
            seconds = measured if w.device == "here" else self.priced.get(key, {}).get(w.device, {})
            if seconds:
                out[w.name] = seconds
        return out


@dataclass(frozen=True)
class ProfileOptions:
    """Options of profiling: batch sizes, each measured for `budget_s` seconds; `devices`: clusters by the workers' device names; `threads`
    of predictions, 0 for the number of cores."""

    batches: tuple[int, ...] = (1, 2, 4, 8)
    budget_s: float = 0.5
    threads: int = 0
    devices: Mapping[str, Cluster] = field(default_factory=dict)


def profile_workflow(workflow: Workflow, machines: Machines, options: ProfileOptions, say: Say = lambda line: None) -> Profile:
    """Measure every variant, and predict it for other devices.

    Raises:
        ConfigError: a variant without model or call, missing labels. ModelError: a variant that cannot be run.
    """
    operators_on_items(workflow)
    computers = {(op.name, v.name): load_operator(op, v, workflow.folder) for op in workflow.operators for v in op.variants}
    requests, labels = _load_labelled(workflow)
    figures = Profile()
    variant_inputs = _measure_accuracies(workflow, computers, requests, labels, figures, say) if requests else {}
    threads = sorted({w.threads for w in machines.workers if w.device == "here"})
    num_threads = torch.get_num_threads()
    try:
        for op in workflow.operators:
            for v in op.variants:
                key = op.name, v.name
                inputs = variant_inputs.get(key) or _requests_to_measure(op, v, computers[key], max(options.batches))
                say(f"measuring {op.name}.{v.name}")
                _measure(key, computers[key], inputs, threads, options, figures)
                _price(key, computers[key], inputs, options, figures)
    finally:
        torch.set_num_threads(num_threads)
    return figures


def _load_labelled(workflow: Workflow) -> tuple[list[Mapping[str, Any]], Any]:
    """Return (requests, labels) of the user's function; empty if there is none."""
    if not workflow.measure.labelled:
        return [], None
    labelled = load_function(workflow.measure.labelled, workflow.folder)()
    sources = {s.name for s in workflow.sources}
    if not isinstance(labelled, tuple) or len(labelled) != 2 or not labelled[0] or len(labelled[0]) != len(labelled[1]):
        raise ConfigError(f"{workflow.measure.labelled} returns (requests, labels), two lists of equal length with at least one request")
    requests, labels = labelled
    if not all(isinstance(request, Mapping) and set(request) == sources for request in requests):
        raise ConfigError(f"a request of {workflow.measure.labelled} is a dict with a value for each of {', '.join(sorted(sources))}")
    return list(requests), labels


def score_answers(workflow: Workflow, answers: Sequence[Any], labels: Sequence[Any]) -> float:
    """Score answers by the user's function, by default as the percentage that equal their labels."""
    if workflow.measure.score:
        return float(load_function(workflow.measure.score, workflow.folder)(answers, labels))
    return 100.0 * float(np.mean([_predicted_class(a) == _predicted_class(b) for a, b in zip(answers, labels, strict=True)]))


def _predicted_class(value: Any) -> Any:
    """Return the class that an answer predicts: the argmax of scores, or the answer itself."""
    return int(np.argmax(value)) if isinstance(value, np.ndarray) and value.ndim else value


def labelled_requests(workflow: Workflow) -> tuple[list[Mapping[str, Any]], Any]:
    """Return the labelled requests of a workflow. Raises `ConfigError` if it has none."""
    requests, labels = _load_labelled(workflow)
    if not requests:
        raise ConfigError(f'{workflow.name} has no requests to send; give [measure] labelled = "file.py:name"')
    return requests, labels


def _measure_accuracies(
    workflow: Workflow, computers: Mapping[Key, OperatorRuntime], requests: Sequence[Any], labels: Any, figures: Profile, say: Say
) -> dict[Key, list[Request]]:
    """Measure the accuracy of every choice of variants. Return the requests that each variant computed, in its first choice."""
    inner, variant_inputs, cache = operators_on_items(workflow), dict[Key, list[Request]](), dict[tuple[Any, ...], list[Any]]()
    sources = {s.name: [request[s.name] for request in requests] for s in workflow.sources}
    upstream = {op.name: _upstream_operators(workflow, op) for op in workflow.operators}
    for choice in product(*(op.variants for op in workflow.operators)):
        names = {op.name: v.name for op, v in zip(workflow.operators, choice, strict=True)}
        values: dict[str, Sequence[Any]] = dict(sources)
        for op in workflow.operators:
            key = op.name, names[op.name]
            cache_key = (op.name, *(names[name] for name in upstream[op.name]))
            if cache_key not in cache:
                say(f"computing {op.name}.{names[op.name]} on {len(requests)} requests")
                inputs = [{name: values[name][i] for name, _ in op.inputs} for i in range(len(requests))]
                variant_inputs.setdefault(key, [request for values_of in inputs for request in requests_of(op, inner, values_of)])
                cache[cache_key] = compute_operator(workflow, op, partial(_run_in_batches, computers[key].run), values)
            values[op.name] = cache[cache_key]
        answers = [tuple(values[name][i] for name in workflow.sinks) for i in range(len(requests))]
        figures.accuracy[tuple(names.values())] = score_answers(workflow, [a[0] if len(a) == 1 else a for a in answers], labels)
    return variant_inputs


def _run_in_batches(run: Compute, rows: Sequence[Request]) -> list[Any]:
    return [answer for first in range(0, len(rows), ACCURACY_BATCH) for answer in run(rows[first : first + ACCURACY_BATCH])]


def _upstream_operators(workflow: Workflow, op: WorkflowOperator) -> tuple[str, ...]:
    """Return the operators that an operator's value depends on, including itself, in order."""
    upstream = {op.name}
    for other in reversed(workflow.operators):
        if other.name in upstream:
            upstream.update(name for name, _ in other.inputs)
    return tuple(o.name for o in workflow.operators if o.name in upstream)


def _requests_to_measure(op: WorkflowOperator, variant: OperatorVariant, computer: OperatorRuntime, size: int) -> list[Request]:
    requests = example_requests(computer, size)
    if not requests:
        raise ConfigError(f'{op.name}.{variant.name} has no example to be measured on; give [measure] labelled = "file.py:name"')
    return requests


def _measure(
    key: Key, computer: OperatorRuntime, inputs: Sequence[Request], threads: Sequence[int], options: ProfileOptions, figures: Profile
) -> None:
    answers = computer.run(inputs[: max(options.batches)])
    figures.output_bytes[key] = float(np.mean([value_bytes(a) for a in answers]))
    weights = [*computer.module.parameters(), *computer.module.buffers()] if computer.module is not None else []
    largest = _take_batch(inputs, max(options.batches), 0)
    figures.memory_bytes[key] = float(sum(map(value_bytes, weights)) + peak_live_bytes(lambda: computer.run(largest)))
    for count in threads:
        torch.set_num_threads(count)
        by_batch = figures.measured.setdefault(key, {}).setdefault(count, {})
        for batch in options.batches:
            by_batch[batch] = BatchTiming.from_samples(_batch_times_s(computer, inputs, batch, options.budget_s))
    figures.measured.setdefault(key, {})


def _batch_times_s(computer: OperatorRuntime, inputs: Sequence[Request], batch: int, budget_s: float) -> list[float]:
    computer.run(_take_batch(inputs, batch, 0))
    seconds: list[float] = []
    while len(seconds) < MIN_RUNS or sum(seconds) < budget_s:
        requests = _take_batch(inputs, batch, len(seconds))
        begun = time.perf_counter()
        computer.run(requests)
        seconds.append(time.perf_counter() - begun)
    return seconds


def _take_batch(inputs: Sequence[Request], size: int, number: int) -> list[Request]:
    return [inputs[(number * size + i) % len(inputs)] for i in range(size)]


def _price(key: Key, computer: OperatorRuntime, inputs: Sequence[Request], options: ProfileOptions, figures: Profile) -> None:
    if not options.devices:
        return
    name = ".".join(key)
    if computer.module is None or computer.resolved is None:
        figures.skipped.append(f"{name} is a function or an exported program, which no cost model knows: measure it there")
        return
    for batch in options.batches:
        try:
            graph = _capture_graph(computer, _take_batch(inputs, batch, 0))
        except ModelError as error:
            figures.skipped.append(f"{name} cannot be captured, so it has no price elsewhere: {error}")
            return
        for device, cluster in options.devices.items():
            if figures.memory_bytes[key] > cluster.memory_of(1):
                continue
            figures.priced.setdefault(key, {}).setdefault(device, {})[batch] = forward_s(graph, cluster, batch, options.threads)
    for device, cluster in options.devices.items():
        if figures.memory_bytes[key] > cluster.memory_of(1):
            takes, has = format_bytes(figures.memory_bytes[key]), format_bytes(cluster.memory_of(1))
            figures.skipped.append(f"{name} takes {takes} and a device of {device} has {has}: it is not planned there")


def _capture_graph(computer: OperatorRuntime, requests: Sequence[Request]) -> Graph:
    """Capture the module in evaluation mode, without allocating its weights."""
    assert computer.module is not None
    assert computer.resolved is not None
    with DeferredInit() as deferred:
        model = computer.resolved.make()
    with in_modes(model, evaluation_modes(model)):
        batch = stack_inputs(requests, computer.module)
        return capture(model, batch, None, batch_size=len(requests), fake_mode=deferred.fake_mode, outputs=True).graph


def forward_s(graph: Graph, cluster: Cluster, batch: int, threads: int = 0) -> float:
    """Seconds of a graph's forward on one device of a cluster, by the cost model."""
    if cluster.parts:
        raise UsageError(f"{cluster.name} has several kinds of machines; a worker is one of them")
    pricer = OperatorPricer(graph, cluster, batch)
    return float(pricer.operator_seconds(Layout(threads=threads))[0].sum())


class _LiveBytesCounter(DispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes, self.peak_bytes = 0, 0
        self._counted: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {t.untyped_storage().data_ptr() for t in tensors_in((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for t in tensors_in(result):
            self._count(t.untyped_storage(), inputs)
        return result

    def _count(self, storage: torch.UntypedStorage, inputs: set[int]) -> None:
        key, size = storage.data_ptr(), storage.nbytes()
        if not size or key in inputs or key in self._counted:
            return
        self._counted.add(key)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._on_free, key, size)

    def _on_free(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self.live_bytes -= size


def peak_live_bytes(run: Callable[[], object]) -> int:
    """Return the peak bytes of live tensors that `run` created.

    >>> peak_live_bytes(lambda: torch.zeros(100).add_(1))
    400
    """
    with _LiveBytesCounter() as alive:
        run()
    return int(alive.peak_bytes)
