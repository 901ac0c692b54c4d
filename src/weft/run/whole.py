"""Models that cannot be captured: the whole module on every rank, each with its share of the samples.

In: a plan with `uncaptured` set, so only `data`, `zero` and `microbatches` apply. Out: the same `Parts` as of a captured model, with
one operator that is the module itself. The loss is the mean of the ranks' losses, as DistributedDataParallel has it: it equals the
serial loss where the loss is a mean over samples. That is tried on some of the batch first.

Not modelled: losses that are such a mean for the batch that was tried, and are not for others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weft.capture.capture import Loss, call
from weft.capture.init import realize
from weft.capture.modes import set_modes, training_modes
from weft.capture.nesting import batch_size_of, leaves, rebuild
from weft.capture.refused import refuse_hooks
from weft.errors import Infeasible
from weft.lower.double import doubled, is_double, widened
from weft.lower.kernels.randomness import Draw
from weft.lower.local import LocalStage
from weft.model.graph import Graph, Variable
from weft.model.graph import Tensor as Spec
from weft.model.sharding import Sharding
from weft.model.stages import Stage
from weft.plan.placement import D, P, Placement, R, Shard
from weft.plan.plan import Plan
from weft.run.build import Parts, Source, program_of
from weft.run.divisible import refuse_division
from weft.run.optimizer import OptimizerSpec
from weft.run.parameters import LocalParameter, build_groups
from weft.run.summing import choose_sums
from weft.world.world import World


class _Whole(nn.Module):
    """The user's module and loss, called with the local batch's tensors in order. It draws what belongs to step, microbatch and `part`."""

    def __init__(
        self, model: nn.Module, batch: Any, loss: Loss | None, share: float, double: bool, own: bool, draw: Draw, part: int
    ) -> None:
        super().__init__()
        self.model, self._batch, self._loss, self._share = model, batch, loss, share
        self._double, self._own, self._draw, self._part = double, own, draw, part

    def forward(self, *tensors: Tensor) -> tuple[Tensor]:
        given = iter(tensors)
        new = {path: next(given) if isinstance(leaf, Tensor) else leaf for path, leaf in leaves(self._batch)}
        batch = rebuild(self._batch, new)
        devices = [x.device for x in tensors if x.is_cuda][:1]
        with torch.random.fork_rng(devices), doubled(self._double, self._own):  # the latter as the serial reference
            torch.manual_seed(self._draw.generator(torch.device("cpu"), 0, self._part).initial_seed())
            try:
                return (call(self.model, batch, self._loss) * self._share,)
            except RuntimeError as error:
                if torch.is_grad_enabled() or "does not require grad" not in str(error):
                    raise
            with torch.enable_grad():  # it asks for gradients of its own, in evaluation too: a differential equation
                return (call(self.model, batch, self._loss).detach() * self._share,)


def build_whole(plan: Plan, source: Source, batch: Any, loss: Loss | None, world: World, optimizer: OptimizerSpec, seed: int) -> Parts:
    """The parts of a model that runs whole on every rank.

    Raises:
        Infeasible: a layout with tensor or pipeline, or batch norm over samples that are divided.
    """
    layout = plan.layout
    if layout.replica_ranks > 1 or layout.num_stages > 1:
        raise Infeasible(
            f"{plan.model} could not be captured ({plan.uncaptured}), so it can only be divided by data, and {layout} has more; "
            "use tensor=1 pipeline=1 with one stage a rank"
        )
    if layout.num_ranks != world.num_ranks:
        raise Infeasible(f"the layout {layout} needs {layout.num_ranks} ranks, {world.num_ranks} were started")
    if layout.recompute != "none":
        raise Infeasible(f"{plan.model} could not be captured ({plan.uncaptured}), so its layers are not known; use recompute=none")
    if layout.moves_layers:
        raise Infeasible(f"{plan.model} could not be captured ({plan.uncaptured}), so its layers are not known; use offload=optimizer")
    if layout.zero == 3:
        raise Infeasible(f"{plan.model} could not be captured ({plan.uncaptured}), so its layers are not known; use zero=2")
    model = source.model
    refuse_hooks(model)
    set_modes(model, training_modes(model))
    loss = source.loss_of(loss)
    if source.deferred is not None:
        model = realize(source.deferred, model)
    model = model.to(world.device)
    own = is_double(model)
    if layout.precision == "float64":
        model = widened(model)
    refuse_division(plan, model, batch, loss)
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False  # gradients lie in buffers with others, which are dense
    size = plan.microbatch_sizes[0]
    samples = batch_size_of(batch)
    tensors = {path: leaf for path, leaf in leaves(batch) if isinstance(leaf, Tensor)}
    inputs = tuple(
        Variable(
            f"batch_{path}",
            path,
            _spec(x, size if x.dim() and x.shape[0] == samples else None),
            batched=bool(x.dim()) and x.shape[0] == samples,
        )
        for path, x in tensors.items()
    )
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    variables = tuple(Variable(name, name, _spec(p), tuple(names[id(p)][1:]), p.requires_grad) for name, p in model.named_parameters())
    buffers = tuple(Variable(name, name, _spec(b)) for name, b in model.named_buffers())
    graph = Graph(
        variables,
        buffers,
        inputs,
        (),
        (),
        {v.value: v.tensor for v in (*variables, *buffers, *inputs)} | {"loss": Spec((), "float32")},
        "loss",
        size,
    )
    if layout.precision == "float64":
        graph = graph.cast("float64")
        variables, inputs = graph.parameters, graph.inputs
    is_cut = layout.data > 1
    forms: dict[str, Mapping[str, Placement]] = {v.value: {} for v in graph.variables}
    forms["loss"] = {}
    if is_cut:
        forms.update({v.value: {"data": D if v.trainable else Shard(0) if v.batched else R} for v in graph.variables})
        forms["loss"] = {"data": P}
    gradients = {v.value: ("data",) for v in variables if v.trainable} if is_cut else {}
    sharding = Sharding({"data": layout.data} if is_cut else {}, {}, forms, {}, gradients, (), ())
    stage = Stage(0, (), tuple(v.value for v in graph.variables), (), (), ("loss",))
    at = layout.mesh.coordinates(world.rank)
    ranks = layout.mesh.group(world.rank, "data")
    order = {name: i for i, (name, _) in enumerate(model.named_parameters())}
    specs = {
        v.name: LocalParameter(
            v.name, v.tensor.shape, (0,) * len(v.tensor.shape), v.tensor.shape, getattr(torch, v.tensor.dtype), v.trainable,
            ranks if v.trainable else (world.rank,), at["data"] == 0, True, optimizer.decays(v.tensor.shape), (), -order[v.name],
        )
        for v in variables
    }  # fmt: skip
    flat, parameters = build_groups(list(specs.values()), world.device, layout.zero, world.rank, plan.bucket_bytes)
    choose_sums(plan, world, flat)
    with torch.no_grad():
        for name, p in model.named_parameters():
            parameters[name].copy_(p)
    for module_name, module in model.named_modules():
        for local, p in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            first = names[id(p)][0] if id(p) in names else f"{module_name}.{local}"
            setattr(module, local, parameters[first])
    draw = Draw(seed=seed)
    whole = _Whole(model, batch, loss, 1.0 / layout.data, layout.precision == "float64", own, draw, at["data"])
    local = LocalStage(whole, tuple(v.value for v in inputs), (), (), ("loss",), forms)
    blocks = {b.name: (b, (0,) * len(b.tensor.shape)) for b in buffers}
    program = program_of(plan, (stage,), world)
    kept = dict(model.named_buffers())
    saved = frozenset(model.state_dict(keep_vars=True))
    return Parts(graph, sharding, (stage,), program, {0: local}, parameters, specs, flat, kept, blocks, {}, draw, saved=saved)


def _spec(x: Tensor, samples: int | None = None) -> Spec:
    shape = tuple(x.shape) if samples is None else (samples, *x.shape[1:])
    return Spec(shape, str(x.dtype).removeprefix("torch."))
