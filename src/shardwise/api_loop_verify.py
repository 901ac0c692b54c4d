"""`shardwise verify --loop`: run a user's script serially and divided for some steps in float64, and compare what it trains.

The script runs unchanged. In the serial run `shardwise.auto_parallelize` and `shardwise.shard` return what they are given; in the divided
one they divide, in `precision=float64`. At every optimizer's step both runs record gradients, weights and optimizer state, with every
backward its loss, and at the end the buffers of the divided modules. Not modelled: random draws inside of a model, which differ from
torch's own; losses of each rank's own samples, which are compared by their mean.
"""

from __future__ import annotations

import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwise import api_loop
from shardwise.capture.nesting import tensors_in
from shardwise.errors import UsageError
from shardwise.lower.float64_mode import cast_to_float64, compute_in_float64, is_float64
from shardwise.run.loop import gathered_optimizer
from shardwise.run.loop.gathered_optimizer import gather_full_tensor
from shardwise.run.loop.module import sharded_modules_of
from shardwise.run.loop.shard_module import shard_module
from shardwise.run.loop.sharded_tensor import ShardedTensor
from shardwise.run.verify.verification import Verification
from shardwise.world.launch.launch import Launcher, engine_modules
from shardwise.world.launch.watch import LaunchOptions
from shardwise.world.world import World

TOLERANCE = 1e-9
_NEGLIGIBLE = 1e-6  # of the largest value of a kind: below it an error is relative to this
Values = list[tuple[str, str, Tensor]]  # (kind, name, value) in the order of the run


class _EnoughSteps(BaseException):
    """The script has made the steps to compare; no `except Exception` of it catches this."""


@dataclass
class LoopRecorder:
    """What one run of a script computes; a step is a step of any optimizer. `models`: those given to `auto_parallelize`. `is_paused`: an
    optimizer is tried on matrices of our own."""

    num_steps: int
    values: Values = field(default_factory=list)
    models: list[nn.Module] = field(default_factory=list)
    is_paused: bool = False
    _depth: int = 0
    _step: int = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record losses and optimizers' steps within a block."""
        backward = torch.autograd.backward

        @wraps(backward)
        def record_loss(tensors: Any, *args: Any, **kwargs: Any) -> None:
            for x in () if self.is_paused else tensors_in(tensors):
                if x.numel() == 1:
                    self._add("losses", f"loss before step {self._step + 1}", x)
            backward(tensors, *args, **kwargs)

        handles = [register_optimizer_step_pre_hook(self._begin_step), register_optimizer_step_post_hook(self._end_step)]
        torch.autograd.backward = record_loss
        try:
            yield
        finally:
            torch.autograd.backward = backward
            for handle in handles:
                handle.remove()

    def record_buffers(self) -> None:
        """Record the buffers of the models, on rank 0."""
        for number, model in enumerate(self.models):
            names = [name for name, _ in model.named_buffers()]
            sharded = sharded_modules_of(model)
            state = sharded[0][1].replica.full_state() if sharded else model.state_dict()
            for name in names:
                if state is not None and name in state:
                    self._add("buffers", f"{self._model_name(number)}.{name} after step {self._step}", state[name])

    def _model_name(self, number: int) -> str:
        return f"{type(self.models[number]).__name__}{'' if number == 0 else f' {number + 1}'}"

    def _add(self, kind: str, name: str, x: Tensor) -> None:
        whole = gather_full_tensor(x) if isinstance(x, ShardedTensor) else x
        whole = whole.detach().to("cpu").to_dense() if whole.is_sparse else whole.detach().to("cpu")
        self.values.append((kind, name, torch.view_as_real(whole.resolve_conj()).clone() if whole.is_complex() else whole.clone()))

    def _parameters(self, optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
        names = {id(p): f"{self._model_name(i)}.{name}" for i, m in enumerate(self.models) for name, p in m.named_parameters()}
        number = 0
        for group in optimizer.param_groups:
            for p in group["params"]:
                number += 1
                yield names.get(id(p), f"parameter {number} of {type(optimizer).__name__}"), p

    def _begin_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth += 1
        if self._depth > 1 or self.is_paused:  # an optimizer of an optimizer
            return
        for name, p in self._parameters(optimizer):
            if p.grad is not None:
                self._add("gradients", f"gradient of {name} in step {self._step + 1}", p.grad)

    def _end_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth or self.is_paused:
            return
        self._step += 1
        for name, p in self._parameters(optimizer):
            self._add("weights", f"{name} after step {self._step}", p)
            for slot, x in sorted(optimizer.state.get(p, {}).items()):
                if isinstance(x, Tensor):
                    self._add("optimizer state", f"{slot} of {name} after step {self._step}", x)
        if self._step >= self.num_steps:
            raise _EnoughSteps


def record_script(world: World, script: str, num_steps: int, layout: str | None, is_serial: bool) -> Values:
    """Run a script in this process and return what it computed."""
    file, *arguments = shlex.split(script)
    sys.argv = [file, *arguments]
    sys.path.insert(0, str(Path(file).parent))
    recorder = LoopRecorder(num_steps)
    if is_serial:
        _leave_undivided(recorder)
    else:
        _divide_in_float64(recorder, layout, world)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    with recorder.recording(), suppress(_EnoughSteps):
        runpy.run_path(file, run_name="__main__")
    recorder.record_buffers()
    if not recorder.models:
        raise UsageError(f"{file} divides no model: it has no call of shardwise.auto_parallelize, so that there is nothing to compare")
    return recorder.values


def _leave_undivided(recorder: LoopRecorder) -> None:
    """Let the names that a loop uses return what they are given, in float64."""

    def cast_model(model: nn.Module) -> nn.Module:
        is_native = is_float64(model)
        forward = cast_to_float64(model).forward

        @wraps(forward)
        def forward_in_float64(*args: Any, **kwargs: Any) -> Any:
            with compute_in_float64(True, is_native):
                return forward(*args, **kwargs)

        model.forward = forward_in_float64
        recorder.models.append(model)
        return model

    @contextmanager
    def cast_built_models() -> Iterator[None]:
        built: list[nn.Module] = []
        original = nn.Module.__init__

        def record_module(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            built.append(self)
            original(self, *args, **kwargs)

        nn.Module.__init__ = record_module  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__init__ = original  # type: ignore[method-assign]
        inner = {id(m) for module in built for m in module.modules() if m is not module}
        for module in built:
            if id(module) not in inner:
                cast_model(module)

    def auto_parallelize(model: Any = None, batch: Any = None, **kwargs: Any) -> Any:
        return cast_model(model) if isinstance(model, nn.Module) else cast_built_models()

    def full_state_dict(model: Any) -> Any:
        return model.state_dict()

    _replace_names(
        auto_parallelize=auto_parallelize,
        shard=lambda loader, engine=None: loader,
        accumulate=lambda model, last=False: nullcontext(),
        full_state_dict=full_state_dict,
    )


def _divide_in_float64(recorder: LoopRecorder, layout: str | None, world: World) -> None:
    """Let `auto_parallelize` divide by `layout`, or as the script says, in float64."""
    original, divide, trial = api_loop.auto_parallelize, shard_module, gathered_optimizer.updates_together

    def auto_parallelize(model: Any = None, batch: Any = None, **kwargs: Any) -> Any:
        plan = layout if layout is not None else kwargs.get("plan") or f"data={world.num_ranks}"
        words = [word for word in str(plan).split() if not word.startswith("precision=")]
        return original(model, batch, **{**kwargs, "plan": " ".join([*words, "precision=float64"]), "world": world})

    def record_model(model: nn.Module, *args: Any) -> None:
        recorder.models.append(model)
        divide(model, *args)

    def try_unrecorded(*args: Any) -> bool | None:
        recorder.is_paused = True
        try:
            return trial(*args)
        finally:
            recorder.is_paused = False

    vars(gathered_optimizer)["updates_together"] = try_unrecorded
    vars(api_loop)["shard_module"] = record_model
    _replace_names(auto_parallelize=auto_parallelize)


def _replace_names(**functions: Callable[..., Any]) -> None:
    for name, function in functions.items():
        setattr(sys.modules["shardwise"], name, function)
        if hasattr(api_loop, name):
            setattr(api_loop, name, function)


def verify_loop(script: str, layout: str | None = None, num_ranks: int = 2, steps: int = 4, tolerance: float | None = None) -> Verification:
    """Run a script (with its arguments, as one text) serially and on `num_ranks` ranks, and compare them over `steps` optimizer steps.

    `layout`: of all models that the script divides; by default what the script says, or `data=num_ranks`.

    Raises:
        UsageError: there is no such script, or it divides nothing. RankError: it failed, serially or divided.
    """
    file = shlex.split(script)[0] if script.strip() else ""
    if not Path(file).is_file():
        raise UsageError(f"{file or 'an empty text'} is not a file; give --loop a script with a training loop, its arguments in quotes")
    options = LaunchOptions(show=False)
    with Launcher(preload=engine_modules(options.device)) as launcher:
        serial = launcher.launch(record_script, 1, script, steps, layout, True, options=options)[0]
        divided = launcher.launch(record_script, num_ranks, script, steps, layout, False, options=options)
    limit = TOLERANCE if tolerance is None else tolerance
    worst, first = compare_runs(serial, divided, limit)
    num_steps = len({name.rpartition("step ")[2] for kind, name, _ in serial if kind == "weights"})
    shown = layout or f"{num_ranks} ranks"
    return Verification(first is None, worst, first, (), limit, layout=shown, steps=num_steps, dtype="float64")


def compare_runs(serial: Values, by_rank: list[Values], tolerance: float) -> tuple[dict[str, float], str | None]:
    """Return the worst relative error of each kind, and the name of the first value above the tolerance.

    >>> one = [("losses", "loss", torch.tensor(2.0)), ("weights", "w", torch.ones(2))]
    >>> other = [("losses", "loss", torch.tensor(2.0)), ("weights", "w", torch.tensor([1.0, 1.5]))]
    >>> compare_runs(one, [one, other], 1e-9)
    ({'losses': 0.0, 'weights': 0.5}, 'w (rank 1)')
    """
    largest: dict[str, float] = {}
    for kind, _, x in serial:
        largest[kind] = max(largest.get(kind, 0.0), _largest_magnitude(x))
    worst = dict.fromkeys(largest, 0.0)
    first: str | None = None
    losses = _mean_losses(by_rank)
    for rank, values in enumerate(by_rank):
        expected = [row for row in serial if row[0] != "buffers" or rank == 0]
        for i, (kind, name, x) in enumerate(expected):
            if i >= len(values) or values[i][:2] != (kind, name) or values[i][2].shape != x.shape:
                found = f"has {values[i][1]} {list(values[i][2].shape)}" if i < len(values) else "ends"
                return worst, first or f"{name} {list(x.shape)}, where the divided run {found} (rank {rank})"
            actual = losses[i] if kind == "losses" else values[i][2]
            scale = max(_largest_magnitude(x), _NEGLIGIBLE * largest[kind], 1e-300)
            error = float((actual.double() - x.double()).abs().max()) / scale if x.numel() else 0.0
            error = error if error == error else float("inf") if not torch.equal(actual.isnan(), x.isnan()) else 0.0
            worst[kind] = max(worst[kind], error)
            if error > tolerance and first is None:
                first = f"{name} (rank {rank})"
        if len(values) > len(expected) and first is None:
            first = f"{values[len(expected)][1]}, which the serial run does not have (rank {rank})"
    return worst, first


def _mean_losses(by_rank: list[Values]) -> dict[int, Tensor]:
    """Return the losses by position: that of all ranks, or the mean over ranks of those of their own samples."""
    rows = [[x for kind, _, x in values if kind == "losses"] for values in by_rank]
    positions = [i for i, (kind, _, _) in enumerate(by_rank[0]) if kind == "losses"]
    return {i: torch.stack(xs).double().mean(0) for i, *xs in zip(positions, *rows, strict=False)}


def _largest_magnitude(x: Tensor) -> float:
    return float(x.double().abs().nan_to_num().max()) if x.numel() else 0.0
