"""Weights from any training layout to a model that serves, without a file: values, bytes counted, one version at a time, refusals."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardwise
from shardwise.errors import RunError
from shardwise.serve.deploy.weight_receiver import WeightReceiver
from shardwise.world.world import World

NUMBERS = 6 * 8 + 8 + 8 * 4 + 4 + 2 * 4 + 1 + 2 * 4  # two linear layers, a batch norm with its statistics


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))


def _loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return output.square().mean()


def _published(world: World, layout: str, addresses: list[tuple[str, int]]) -> tuple[int, dict[str, torch.Tensor] | None, str]:
    """Bytes that this rank sent, the whole weights on rank 0, and what the engine said."""
    dtype = torch.float64 if "float64" in layout else torch.float32
    batch = (torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=dtype),)
    engine = shardwise.parallelize(_model, batch, loss=_loss, plan=layout, seed=0, world=world)
    engine.step(batch)
    try:
        sent, said = engine.publish(addresses), ""
    except RunError as error:
        sent, said = 0, str(error)
    return sent, engine.full_state_dict(), said


@pytest.mark.parametrize("layout", ["data=2 precision=float64", "tensor=2 precision=float64", "data=2 zero=3 precision=float64",
                                    "pipeline=2 microbatches=1 precision=float64"])  # fmt: skip
def test_every_element_crosses_once_and_the_server_has_the_trainers_weights(
    ranks: Callable[..., list[Any]], layout: str, tmp_path: Path
) -> None:
    receivers = [WeightReceiver(_model().double(), newest_file=tmp_path / "net") for _ in range(2)]
    results = ranks(_published, 2, layout, [r.address for r in receivers])
    for receiver in receivers:
        receiver.close()
        state = results[0][1]
        assert receiver.version == 1
        for name, tensor in receiver.module.state_dict().items():
            assert torch.equal(tensor, state[name].to(tensor.dtype)), name
        assert receiver.received_bytes == 8 * NUMBERS
    started = WeightReceiver(_model().double(), newest_file=tmp_path / "net")  # a replica that Ray starts again, or that a new plan has
    started.close()
    assert started.version == 1
    assert all(torch.equal(tensor, results[0][1][name].to(tensor.dtype)) for name, tensor in started.module.state_dict().items())
    assert [path.name for path in tmp_path.iterdir()] == ["net"]
    assert sum(sent for sent, _, _ in results) == 2 * 8 * NUMBERS
    assert not any(said for _, _, said in results)


def test_a_version_that_a_rank_did_not_end_can_be_sent_anew(ranks: Callable[..., list[Any]]) -> None:
    receiver = WeightReceiver(_model().double())
    with socket.create_connection(receiver.address) as one:
        piece = {"name": "0.bias", "shape": [8], "dtype": "F64", "offsets": [0], "block": [8], "flat": None, "bytes": 64}
        one.sendall("".join(json.dumps(line) + "\n" for line in ({"version": 1, "ranks": 2, "pieces": 2}, piece)).encode() + bytes(64))
    results = ranks(_published, 2, "tensor=2 precision=float64", [receiver.address])
    receiver.close()
    assert not any(said for _, _, said in results)
    assert receiver.version == 1
    assert torch.equal(receiver.module.state_dict()["0.bias"], results[0][1]["0.bias"])


def test_what_cannot_be_kept_is_refused_by_name(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    good, other = (
        WeightReceiver(_model().double(), newest_file=tmp_path / "net"),
        WeightReceiver(_model().double(), newest_file=tmp_path / "file" / "net"),
    )
    results = ranks(_published, 2, "tensor=2 precision=float64", [good.address, other.address])
    good.close()
    other.close()
    assert any("cannot be written" in said for _, _, said in results)
    assert good.version == other.version == 0
    assert not (tmp_path / "net").exists()


def test_beyond_loopback_both_ends_have_a_token(ranks: Callable[..., list[Any]]) -> None:
    """At an address that is loopback's in fact and is not taken for it."""
    token = "an elephant never forgets"
    receiver = WeightReceiver(_model().double(), host="0.0.0.0", token=token)
    addresses = [("0.0.0.0", receiver.address[1])]
    for other, why in (("", "set it on all ranks"), ("another token than theirs", "does not have this rank's")):
        results = ranks(_published, 2, "tensor=2 precision=float64", addresses, env={"SHARDWISE_TOKEN": other})
        assert any(why in said for _, _, said in results)
        assert receiver.version == 0
    results = ranks(_published, 2, "tensor=2 precision=float64", addresses, env={"SHARDWISE_TOKEN": token})
    receiver.close()
    assert not any(said for _, _, said in results)
    assert receiver.version == 1


def test_another_model_is_refused_and_keeps_what_it_has(ranks: Callable[..., list[Any]]) -> None:
    good, other = WeightReceiver(_model().double()), WeightReceiver(torch.nn.Linear(6, 8).double())
    before = {name: tensor.clone() for name, tensor in good.module.state_dict().items()}
    results = ranks(_published, 2, "tensor=2 precision=float64", [good.address, other.address])
    good.close()
    other.close()
    assert all("not published" in said for _, _, said in results)
    assert any("differ in" in said for _, _, said in results)
    assert good.version == other.version == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in good.module.state_dict().items())


CODE = """
import torch

def net():
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4)), (torch.zeros(4, 6),)
"""
FLOW = """
rate = 10
[source.x]
[operator.net]
inputs = ["x"]
[operator.net.variant.v]
model = "code.py:net"
latency_s = { here = 0.001 }
[worker.here]
price_per_hour = 1.0
"""


@pytest.mark.long
@pytest.mark.timeout(400)
def test_no_request_fails_while_the_weights_change(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    pytest.importorskip("ray.serve")
    from shardwise.serve.deploy.load_generator import RequestLoad, encode_request, send
    from shardwise.serve.deploy.server import ServeOptions, Server
    from shardwise.serve.placement.assignment_milp import Demand
    from shardwise.serve.placement.service_planner import plan_service
    from shardwise.serve.placement.workflow_files import read_workflow

    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "flow.toml").write_text(FLOW)
    workflow, machines, rate = read_workflow(tmp_path / "flow.toml")
    assert machines is not None
    placed = plan_service(workflow, machines, Demand(rate))
    assert placed is not None
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    server, state = Server(workflow, machines, placed, ServeOptions(port=port, queue_size=1000, replans=False)), {}
    server.start()
    try:
        x = np.linspace(-1, 1, 6, dtype=np.float32)
        layout = "tensor=2"

        def publish() -> None:
            results = ranks(_published, 2, layout, server.addresses("net"))
            state.update(results[0][1])
            assert not results[0][2]

        answers = send(server.url, [encode_request({"x": x})], RequestLoad(10.0, 12.0), [(3.0, publish)])
        assert len(answers.latency_s) == answers.num_sent, answers.failures
        after = send(server.url, [encode_request({"x": x})], RequestLoad(10.0, 1.0))
        server.kill("here")  # Ray starts the replica again
        again = send(server.url, [encode_request({"x": x})], RequestLoad(10.0, 1.0))
    finally:
        server.stop()
    scope: dict[str, Any] = {}
    exec(CODE, scope)
    old, _ = scope["net"]()
    new = _model()
    new.load_state_dict(state)
    with torch.inference_mode():
        before, now = (net.eval()(torch.tensor(x)[None])[0].numpy() for net in (old, new))
    which = [np.allclose(value, before, atol=1e-6) + 2 * np.allclose(value, now, atol=1e-6) for _, value in answers.answers]
    assert set(which) == {1, 2}, which  # each answer is of the one or the other, and both were seen
    assert all(np.allclose(value, now, atol=1e-6) for _, value in [*after.answers, *again.answers])
    assert len(again.latency_s) == again.num_sent, again.failures


def test_answers_are_of_one_version_while_weights_change() -> None:
    """A model of equal weights answers with equal numbers, or it turned in the middle of a batch."""
    from shardwise.serve.deploy import weight_receiver as room

    module = torch.nn.Linear(64, 64, bias=False)
    torch.nn.init.constant_(module.weight, 0.0)
    served, wrong, stop = WeightReceiver(module), [], threading.Event()

    def answer() -> None:
        while not stop.is_set():
            with served.lock:
                rows = module(torch.ones(1, 64))
                again = module(torch.ones(1, 64))
            if not torch.equal(rows, again):
                wrong.append(1)

    reader = threading.Thread(target=answer)
    reader.start()
    for version in range(1, 30):
        staged = room._StagedVersion(tensors={"weight": torch.full((64, 64), float(version))})
        served._switch_version(version, staged)
    stop.set()
    reader.join()
    served.close()
    assert not wrong
    assert served.version == 29
    assert (module.weight == 29).all()
