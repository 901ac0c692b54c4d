"""What only GPUs reach, held by stand-ins: a device without memory, a transport that meets as NCCL's does, names of torch that are asked.

`tests/gpu` runs the real thing where there is a GPU.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise
from shardwise.capture import fakes
from shardwise.capture.in_fork import in_fork
from shardwise.cluster.catalogue import dump, parse_cluster
from shardwise.cluster.probe import measure
from shardwise.errors import Infeasible, RunError
from shardwise.lower.kernels.randomness import DrawSite, DrawState, draw_random
from shardwise.lower.kernels.sample_positions import DrawnShard
from shardwise.plan.ir.program import Program, Recv, Send
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.run.rank_model.model_source import CachedModelSource
from shardwise.run.step.transfers import Crossing, Transfers, rank_pairs_of, receives_posted_before
from shardwise.run.uncaptured.trial import check_data_parallel
from shardwise.run.verify.serial import RoundingNoise
from shardwise.schedules import build
from shardwise.world import matmul_backend
from shardwise.world.comm.connection import Connection
from shardwise.world.comm.group import Group
from shardwise.world.memory.accounts import CudaAccounts
from shardwise.world.recorder import CollectiveRecorder
from shardwise.world.world import World
from shardwise.zoo.resolve import resolve

WAIT_S = 1.0


@pytest.mark.parametrize("layout", ["data=1 microbatches=2", "data=1 recompute=selective"])
@pytest.mark.parametrize("name", ["gpt-tiny", "bert-tiny", "llama-tiny", "t5-tiny", "moe-tiny", "resnet-tiny", "vit-tiny", "lstm-tiny"])
def test_every_tensor_of_a_step_lies_on_the_worlds_device(name: str, layout: str) -> None:
    """No operator takes tensors of two devices, so one that was made on the host would stop the step."""
    model, device = resolve(name, 4), torch.device("meta")
    engine = shardwise.parallelize(model, 4, plan=layout, world=World(device=device), seed=0)
    result = engine.forward_backward(model.batch(4))
    gradients = (x for group in engine.rank_model.groups for x in group.views.values())
    assert {x.device for x in (*result.losses, *engine.rank_model.variables.values(), *gradients)} == {device}


def test_a_tensor_on_another_device_stops_the_step() -> None:
    """The twin: one constant that stays on the host."""
    model = resolve("gpt-tiny", 4)
    engine = shardwise.parallelize(model, 4, plan="data=1", world=World(device=torch.device("meta")), seed=0)
    runner = engine.executor.runners[0]
    at = next(i for i, x in enumerate(runner._args) if x is not None and x.dim() == 2)
    runner._args[at] = torch.zeros(runner._args[at].shape)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="device"):
        engine.forward_backward(model.batch(4))


class Wire:
    """What ranks that are threads have between them: by connection, who has come and what was sent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._meetings: dict[str, threading.Barrier] = {}
        self.sent: dict[str, queue.Queue[Tensor]] = defaultdict(queue.Queue)

    def meet(self, name: str, size: int) -> None:
        with self._lock:
            meeting = self._meetings.setdefault(name, threading.Barrier(size))
        try:
            meeting.wait(WAIT_S)
        except threading.BrokenBarrierError:
            raise RuntimeError("Timed out: nobody came") from None


class Nccl:
    """One member of a connection that is made by its first operation, in which all members wait for one another; tags mean nothing."""

    def __init__(self, wire: Wire, name: str, size: int) -> None:
        self._wire, self._name, self._size, self._met = wire, name, size, False

    def _meet(self) -> None:
        if not self._met:
            self._wire.meet(self._name, self._size)
            self._met = True

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        self._meet()
        return SimpleNamespace(wait=lambda: None, is_completed=lambda: True)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        self._meet()
        self._wire.sent[self._name].put(tensors[0].clone())
        return SimpleNamespace(wait=lambda: None, is_completed=lambda: True)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        self._meet()

        def wait() -> None:
            tensors[0].copy_(self._wire.sent[self._name].get(timeout=WAIT_S))

        return SimpleNamespace(wait=wait, is_completed=lambda: True)


def member(wire: Wire, ranks: tuple[int, ...], rank: int) -> Group:
    def opened(ranks: tuple[int, ...], lane: Connection) -> tuple[Any, str]:
        size = len(ranks) if lane.direction is None else 2
        return Nccl(wire, f"{ranks}{lane}", size), "nccl"

    return Group(ranks, rank, CollectiveRecorder(), torch.device("cpu"), opened)


def in_threads(run: Callable[[int], None], num_ranks: int) -> list[Exception]:
    """`run(rank)` on ranks that are threads; what they raised."""
    raised: list[Exception] = []

    def guarded(rank: int) -> None:
        try:
            run(rank)
        except Exception as error:
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def messages_of(program: Program, connects: bool) -> list[Exception]:
    """Every rank's messages in the order of its actions, receives posted ahead, each of one number that says which it is."""
    links = {link: [Crossing("x", (), torch.float32, True)] for link in program.links}
    wire, crossings = Wire(), dict.fromkeys(program.microbatches, links)

    def run(rank: int) -> None:
        group = member(wire, tuple(range(program.num_ranks)), rank)
        group.connect()
        if connects:
            group.connect_pairs(rank_pairs_of(program))
        transfers = Transfers(program, crossings, group, torch.device("cpu"))
        arriving: dict[Any, Callable[[], list[Tensor]]] = {}
        actions = program.actions[rank]
        for action, ahead in zip(actions, receives_posted_before(actions), strict=True):
            for one in (actions[i] for i in ahead):
                if isinstance(one, Recv) and one.value.name in ("x", "g"):
                    arriving[one.value] = transfers.receiver(one.value, one.source)()
            if not isinstance(action, Send | Recv) or action.value.name not in ("x", "g"):
                continue
            if isinstance(action, Send):
                transfers.sender(action.value, action.to)([torch.tensor(mark(action.value))])
            else:
                (got,) = arriving.pop(action.value)()
                assert got.item() == mark(action.value), f"rank {rank} got another message for {action.value}"

    return in_threads(run, program.num_ranks)


def mark(value: Any) -> float:
    return float(hash((value.name, value.index)) % 65521)


@pytest.mark.parametrize(
    ("schedule", "ranks", "microbatches"),
    [("gpipe", 3, 4), ("1f1b", 2, 4), ("1f1b", 4, 6), ("interleaved", 2, 4), ("zb-h1", 3, 6), ("zb-v", 2, 4), ("chimera", 4, 4)],
)
def test_messages_over_nccl_neither_wait_for_ever_nor_are_taken_for_others(schedule: str, ranks: int, microbatches: int) -> None:
    chunks = {"chunks": 2} if schedule == "interleaved" else {}
    assert messages_of(build(schedule, ranks, microbatches, rendezvous=True, **chunks), connects=True) == []


def test_messages_over_nccl_that_connect_at_the_first_wait_for_ever() -> None:
    """The twin: rank 0 posts the receive of a gradient before its first forward, and waits there for rank 1, which waits for that."""
    raised = messages_of(build("1f1b", 2, 4, rendezvous=True), connects=False)
    assert raised
    assert all(isinstance(error, RunError) for error in raised)


def test_nccl_groups_are_connected_when_that_is_asked_for() -> None:
    """A rank that goes through its groups in another order waits in the first, not somewhere in a step."""
    wire = Wire()

    def run(rank: int) -> None:
        pairs = [(0, 1), (1, 2), (0, 2)]
        for ranks in (pairs if rank != 1 else pairs[::-1]) if crossed else sorted(pairs):
            if rank in ranks:
                member(wire, ranks, rank).connect()

    crossed = False
    assert in_threads(run, 3) == []
    wire, crossed = Wire(), True
    assert in_threads(run, 3) == [] or all(isinstance(error, RunError) for error in in_threads(run, 3))


def test_a_trace_leaves_the_driver_of_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has asked the driver cannot fork ranks that use a GPU, and `shardwise verify` traces before it forks."""
    asked: list[str] = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: asked.append("is_available") or True)
    model = resolve("gpt-tiny", 2)
    shardwise.plan(model, 2, cluster="1xcpu-2", layout="data=1")
    assert not asked
    with fakes.FakeMode():  # the twin: torch's own mode asks, after a trace as before
        torch.ones(1)
    assert asked


FORKED = """
import os, torch, shardwise
from shardwise.zoo.resolve import resolve
shardwise.plan(resolve("gpt-tiny", 2), 2, cluster="1xcpu-2", layout="data=1")
x = torch.ones(2, requires_grad=True)
x.sum().backward()
pid = os.fork()
if not pid:
    try:
        if torch.cuda.device_count() == 0:  # where there is a GPU, backward has started its thread
            (2 * x).sum().backward()
        os._exit(torch.cuda._is_in_bad_fork())
    except BaseException as error:
        print(error, flush=True)
        os._exit(2)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_process_that_has_traced_may_fork_ranks() -> None:
    """As torch itself tells it, in builds with CUDA too: a fork may use a GPU, and runs backward where there is none."""
    told = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=True).stdout
    assert told.split()[-1] == "0", told


def test_ranks_on_gpus_are_not_told_how_processors_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lets processors go through oneDNN makes GPUs round to TF32."""
    monkeypatch.setattr(
        matmul_backend, "load_or_measure_timings", lambda: matmul_backend.MatmulTimings((matmul_backend.MatmulTiming("medium", 2.0, 1.0),))
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert matmul_backend.matmul_environment({}, "auto") == {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert matmul_backend.matmul_environment({}, "auto") == {matmul_backend.PRODUCTS: "medium"}


def test_a_gpus_accounts_begin_where_nothing_has_used_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses to forget the peak of a device that is not there yet."""
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "init", lambda: order.append("init"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: order.append("forget"))
    CudaAccounts(torch.device("cuda"))
    assert order == ["init", "forget"]


def test_gpus_are_a_cluster_that_reads_back_and_their_probe_leaves_them_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    cases = [f"{kind}.{precision}" for kind in ("linear", "attention", "convolution") for precision in ("float32", "bfloat16")]
    moves = ["elementwise", "cast", "activation", "norm", "batch_norm", "softmax", "optimizer"]
    measured = {**dict.fromkeys(cases, 2e-14), "linear.float64": 4e-14, **dict.fromkeys(moves, 1e-12), "launch": 4e-6}
    monkeypatch.setattr(measure, "measure_alone", lambda device: order.append("measure") or measured)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("let go"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name="GPU", total_memory=80 << 30))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: False)
    found = measure.measure_here("mark", quick=True)
    assert order == ["measure", "let go"]
    assert (found.num_devices, found.kind.shares_hosts) == (2, False)
    assert found.device.peak("float32") == pytest.approx(1 / 2e-14)
    assert found.device.memory_bytes == 80 << 30
    again = parse_cluster(dump(found))
    assert again.device.peak("float64") == pytest.approx(1 / 4e-14)
    assert shardwise.plan("gpt-tiny", 4, cluster=again, layout="data=2").prediction is not None


def test_the_generator_of_every_device_that_an_operator_draws_on_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    borrowed: list[torch.device] = []

    class Borrow:
        def __init__(self, devices: list[torch.device]) -> None:
            borrowed.extend(devices)

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(torch.random, "fork_rng", Borrow)
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)
    where = DrawSite(0, 0, 0, DrawnShard((2, 3)), torch.float32)
    draw_random(lambda *args, **kwargs: None, DrawState(), where, [2, 3], device=torch.device("cuda", 1))
    assert borrowed == [torch.device("cuda", 1)]


def test_noise_is_measured_where_the_serial_runs_lie() -> None:
    """They lie on the world's device, and what they are compared with on the host: torch refuses to subtract one from the other."""
    with fakes.fake_mode():
        found = torch.ones(2, device="meta")
    run = SimpleNamespace(step=lambda: {"weights": {"w": found}}, perturb=lambda seed: None)
    with pytest.raises(
        (*fakes.FAKE_TENSOR_ERRORS, NotImplementedError), match=r"item|meta|_local_scalar_dense"
    ):  # only the number is not there
        RoundingNoise(lambda: run).max_distance("weights", "w", torch.ones(2), 0)  # type: ignore[arg-type, return-value]


class _Doubled(torch.autograd.Function):
    """A function of the user's own, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


class _Own(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Doubled.apply(self.linear(x))  # type: ignore[no-any-return, no-untyped-call]


def _squares(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def _backwards(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where this process runs backward, from now on. Beside a GPU the driver then knows it, and its forks cannot use one."""
    ran: list[str] = []
    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *args, **named: ran.append("grad") or grad(*args, **named))
    monkeypatch.setenv("SHARDWISE_CACHE", "off")
    return ran


def test_functions_of_the_users_own_are_traced_without_backward_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ran, x = _backwards(monkeypatch), torch.randn(4, 4)
    here = CachedModelSource.from_model(_Own).capture(x, _squares, 4).graph
    assert ran  # the twin: no GPU, no fork
    ran.clear()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert CachedModelSource.from_model(_Own).capture(x, _squares, 4).graph.operators == here.operators
    assert not ran


def test_models_that_are_no_graph_are_tried_without_backward_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def summed(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return output.square().sum()

    ran, x, plan = _backwards(monkeypatch), torch.randn(4, 4), Plan(Layout.parse("data=2"), "", "", 4, uncaptured="no graph")
    check_data_parallel(plan, _Own(), x, _squares)
    assert ran
    ran.clear()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    check_data_parallel(plan, _Own(), x, _squares)
    with pytest.raises(Infeasible, match="where the mean over data=2 parts"):
        check_data_parallel(plan, _Own(), x, summed)
    assert not ran


def test_what_a_fork_cannot_tell_is_told_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert in_fork(lambda: [1, os.getpid()], list, list)[1] != os.getpid()
    with pytest.raises(ZeroDivisionError):
        in_fork(lambda: 1 // 0, str, int)
    with pytest.raises(RunError, match="ended with status 3 without a result"):
        in_fork(lambda: os._exit(3), str, str)
